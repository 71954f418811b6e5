# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Sphinx settings; `make docs` builds docs/_build/html."""

import os

# Before TorchRL is imported by autodoc: its extension warns with any torch release but one.
os.environ.setdefault("RL_WARNINGS", "0")

import torchrl_ext

project = "torchrl_ext"
author = "torchrl_ext contributors"
copyright = "2026, torchrl_ext contributors"
version = release = torchrl_ext.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
templates_path = ["_templates"]
exclude_patterns = ["_build"]

# One page for each public name of a subpackage, as listed in its __all__.
autosummary_generate = True
autosummary_imported_members = True
autosummary_ignore_module_all = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"torchrl_ext {release}"
