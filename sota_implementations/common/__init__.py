# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What serves any training script; each puts the folder above on its path and imports ``common.NAME``."""
