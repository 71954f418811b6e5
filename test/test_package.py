# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The package as a package: version, typing marker, light imports, licence headers, the README's example."""

import ast
import importlib
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import torchrl_ext

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchrl_ext"
HEADER = [
    "# Copyright (c) torchrl_ext contributors.",
    "# This source code is licensed under the MIT license found in the LICENSE file in the root directory.",
]
SOURCE_FOLDERS = ["torchrl_ext", "sota_implementations", "benchmarks", "test", "docs"]
TEXT_SUFFIXES = {".py", ".md", ".rst", ".toml", ".yaml", ".yml", ".txt", ".cfg"}


def source_files(*suffixes: str) -> list[Path]:
    """Files with one of `suffixes` in the project's folders and its root; what runs and builds left is not source."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in SOURCE_FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    left = {"outputs", "_build", "generated", "__pycache__", "multirun"}
    return sorted(path for path in found if path.suffix in suffixes and not left & set(path.relative_to(ROOT).parts))


def run_python(code: str, **env: str) -> str:
    """Output of `code` in a new interpreter, which has imported nothing of ours yet."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "RL_WARNINGS": "0", **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


class TestMetadata:
    """Contract: one version, in the package and in what is installed; the package is typed; requirements are ranges
    that admit the tested set."""

    def test_version(self):
        assert re.fullmatch(r"\d+\.\d+\.\d+", torchrl_ext.__version__)
        try:
            installed = metadata.version("torchrl_ext")
        except metadata.PackageNotFoundError:
            pytest.skip("torchrl_ext runs from a source folder here, not from an installation")
        assert installed == torchrl_ext.__version__

    def test_typing_marker_is_package_data(self):
        assert (PACKAGE / "py.typed").read_bytes() == b""
        setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(setup) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"]
        (keywords,) = [{keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords} for call in calls]
        assert ast.literal_eval(keywords["package_data"]) == {"torchrl_ext": ["py.typed"]}

    def test_every_subpackage_is_installed(self):
        folders = {path.parent for path in PACKAGE.rglob("*.py")}
        assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]

    def test_constraints_are_exact_and_portable(self):
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        pattern = re.compile(r'[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; python_version (<|>=) "3\.\d+")?')
        assert not [pin for pin in pins if not pattern.fullmatch(pin)]  # no local version (+cpu), path or address
        for tested in ("torch==2.13.0", "torchrl==0.14.1", "tensordict==0.14.3"):
            assert tested in pins


class TestImport:
    """Contract: `import torchrl_ext` is light; no part of ours imports TorchRL's compiled extension, and all of it
    imports where that extension is missing (it is built for one torch release)."""

    def test_package_alone_imports_no_torch(self):
        code = "import sys, torchrl_ext; print({'torch', 'tensordict', 'torchrl', 'numpy'} & set(sys.modules))"
        assert run_python(code) == "set()"

    def test_data_loads_no_more_of_the_extension_than_torchrl(self):
        loaded = "print('torchrl._torchrl' in __import__('sys').modules)"
        ours = run_python(f"import torchrl_ext.data; {loaded}")
        assert ours == run_python(f"import torchrl, torchrl.data; {loaded}")

    def test_subpackages_import_without_the_extension(self):
        names = sorted(f"torchrl_ext.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py"))
        names = [name for name in names if name != "torchrl_ext.__pycache__"]
        code = f"""
import importlib, sys
sys.modules["torchrl._torchrl"] = None  # importing it raises ImportError
for name in {names!r}:
    importlib.import_module(name)
print("imported")
"""
        assert run_python(code) == "imported"

    def test_no_source_names_the_extension(self):
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                assert not [n for n in [module, *names] if "_torchrl" in n.split(".")], path

    def test_public_names_exist(self):
        for path in PACKAGE.glob("*/__init__.py"):
            module = importlib.import_module(f"torchrl_ext.{path.parent.name}")
            assert not [name for name in getattr(module, "__all__", []) if not hasattr(module, name)], module


class TestSources:
    """Contract: each source file carries the licence header and is ASCII; library code does not print."""

    def test_licence_header(self):
        missing = []
        for path in source_files(".py"):
            lines = path.read_text(encoding="utf-8").splitlines()
            if lines and lines[0].startswith("#!"):
                lines = lines[1:]
            if lines[:2] != HEADER:
                missing.append(str(path.relative_to(ROOT)))
        assert not missing, f"the first two lines must be the licence header in {missing}"

    def test_ascii(self):
        others = []
        for path in source_files(*TEXT_SUFFIXES):
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                if not line.isascii():
                    others.append(f"{path.relative_to(ROOT)}:{number}")
        assert not others, f"non-ASCII characters in {others}"

    def test_package_does_not_print(self):
        printing = []
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    printing.append(f"{path.relative_to(ROOT)}:{node.lineno}")
        assert not printing, f"log, return or raise instead of print in {printing}"


class TestReadme:
    """Contract: what the README tells a reader to type works."""

    def test_make_targets_exist(self):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
        used = set(re.findall(r"\bmake ([a-z-]+)(?=[`\s])", "\n".join(re.findall(r"`[^`]+`", readme))))
        assert {"fastsac", "test"} <= targets and used <= targets
