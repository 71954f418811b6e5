# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Benchmarks of ``torchrl_ext`` against the packages it replaces and against the hardware limit."""
