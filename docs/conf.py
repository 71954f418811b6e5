# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Sphinx settings; `make docs` builds docs/_build/html."""

from __future__ import annotations

import os
import re
from typing import Any

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
napoleon_use_ivar = True  # attributes are listed in the class; autodoc may document them once more

# `-n` reports names that cannot be resolved. No other project's inventory is fetched (the build needs no network), so
# their names are left alone, and so are the words that Google-style docstrings use for types ("optional", "callable").
nitpick_ignore_regex = [
    ("py:.*", r"(torch|torchrl|tensordict|numpy|np|collections|concurrent|pathlib|types|typing|zipfile)\..*"),
    # Types, except those that claim to be a public name of this package.
    ("py:class", r"(?!torchrl_ext\.[a-z_]+\.[A-Z]).*"),
    # Raised and caught inside the package.
    ("py:exc", r"NotCapturedError"),
    # What runs in a worker: named where it is explained, private all the same.
    ("py:func", r"torchrl_ext\.collectors\._worker\.collect"),
]

# A word for a type ("version") may be the name of several attributes.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"torchrl_ext {release}"

#: The first line of a protocol, "Roles      One producer ...": its word, the gap, the text.
_ENTRY = re.compile(r"([A-Z]\w+(?: \w+)?)( {2,})(\S.*)")


def _protocol(paragraph: list[str]) -> list[str] | None:
    """Turns the words and texts of a protocol into a definition list; None when it is another kind of paragraph."""
    first = _ENTRY.match(paragraph[0])
    if first is None:
        return None
    width, lines = len(first[1] + first[2]), []
    for line in paragraph:
        word, text = line[:width].rstrip(), line[width:]
        if not text or text.startswith(" ") or (word and not line[width - 1].isspace()):
            return None
        lines += [f"**{word}**"] * bool(word) + [f"    {text}"]
    return lines


def format_protocols(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Formats the protocol paragraphs of a docstring, in place."""
    result: list[str] = []
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
            continue
        result += (_protocol(paragraph) or paragraph) if paragraph else []
        result.append("")
        paragraph = []
    lines[:] = result


def skip_foreign(app: Any, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leaves out what a class has from other packages, such as the methods that ``@tensorclass`` adds."""
    module = getattr(getattr(obj, "fget", obj), "__module__", None) or ""
    return True if module.split(".")[0] in ("tensordict", "torch", "torchrl") else None


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", format_protocols, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip_foreign)
