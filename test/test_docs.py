# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Contract: what the README and docs/ say is there, is there, and runs. Read as text: Sphinx is not needed."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import logging
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrl._utils import logger as torchrl_logger

import torchrl_ext

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.rst") if not {"generated", "_build", "_templates"} & set(path.parts))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
TEXTS += sorted((ROOT / "sota_implementations").glob("*/README.md"))
PACKAGES = sorted(module.name for module in pkgutil.iter_modules(torchrl_ext.__path__) if module.ispkg)


@pytest.fixture
def quiet(monkeypatch):
    """Runs in the repository's root, without log lines on standard output, which a doctest would take for its own."""
    monkeypatch.chdir(ROOT)
    level = torchrl_logger.level
    torchrl_logger.setLevel(logging.WARNING)
    yield
    torchrl_logger.setLevel(level)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


class TestReference:
    """Contract: each public name has a page, made by autosummary from its package's ``__all__``."""

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_package_has_a_page_that_lists_it(self, package):
        text = (DOCS / "reference" / f"{package}.rst").read_text()
        listed = re.findall(r"\.\. autosummary::\n(?: {3}:.*\n)+\n((?: {3}\S+\n?)+)", text)
        assert f"torchrl_ext.{package}" in " ".join(listed).split()
        assert f"   reference/{package}\n" in (DOCS / "index.rst").read_text()

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_public_name_is_found_by_autosummary_and_has_a_docstring(self, package):
        module = importlib.import_module(f"torchrl_ext.{package}")
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            value = getattr(module, name)
            # The template lists classes, functions, exceptions; anything else would be left out in silence.
            assert callable(value), f"torchrl_ext.{package}.{name} is neither a class nor a function"
            assert (value.__doc__ or "").strip(), f"torchrl_ext.{package}.{name} has no docstring"

    def test_autosummary_takes_names_from_all(self):
        settings = (DOCS / "conf.py").read_text()
        assert "autosummary_ignore_module_all = False" in settings and "autosummary_generate = True" in settings

    def test_the_build_treats_warnings_as_errors(self):
        assert "sphinx -W" in (ROOT / "Makefile").read_text()


class TestExamples:
    """Contract: each ``>>>`` of the pages runs; each Python example of the README runs."""

    @pytest.mark.parametrize("path", [path for path in PAGES if ">>> " in path.read_text()], ids=_name)
    def test_the_examples_of_a_page_run(self, path, quiet):
        outcome = doctest.testfile(str(path), module_relative=False, encoding="utf-8")
        assert outcome.attempted and not outcome.failed

    def test_no_example_of_a_page_is_skipped(self):
        assert [_name(path) for path in PAGES if "doctest: +SKIP" in path.read_text()] == []

    README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    def test_the_first_example_of_the_readme_is_short(self):
        assert len([line for line in self.README[0].splitlines() if line.strip()]) <= 15

    @pytest.mark.parametrize("number", range(len(README)))
    def test_an_example_of_the_readme_runs(self, number, quiet, capsys):
        example = self.README[number]
        if "EnvPool" in example and importlib.util.find_spec("envpool") is None:
            pytest.skip("needs EnvPool")
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
        promised = re.findall(r"print\(.*\)  # ([^:\n]+): ", example)
        printed = capsys.readouterr().out.split("\n")
        assert printed[: len(promised)] == promised

    def test_the_environment_of_the_first_run_trains(self, tmp_path):
        pytest.importorskip("hydra")
        options = {
            "preset": "pendulum",
            "env.backend": "factory",
            "env.task": "my_env:make_env",
            "networks.v_min": -100,
            "networks.v_max": 0,
            "time_budget": "null",
            "total_frames": 560,
            "eval.episodes": 1,
            "log.backends": "[csv]",
            "hydra.run.dir": tmp_path / "run",
        }
        script = ROOT / "sota_implementations" / "fast_sac" / "fast_sac.py"
        for option in ("preset=pendulum", "env.backend=factory", "env.task=my_env:make_env", "networks.v_min=-100"):
            assert option in (DOCS / "first_run.rst").read_text()
        done = subprocess.run(
            [sys.executable, str(script), *(f"{key}={value}" for key, value in options.items())],
            cwd=DOCS / "examples",
            env={**os.environ, "RL_WARNINGS": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "final mean return" in done.stdout and (tmp_path / "run" / "metrics.jsonl").exists()


class TestTroubleshooting:
    """Contract: each sentence that the page quotes is one that the package says; ``<...>`` stands for a value."""

    SENTENCES = [
        " ".join(block.split())
        for block in re.findall(
            r"\.\. code-block:: text\n\n((?: {3}.*\n)+)", (DOCS / "troubleshooting.rst").read_text()
        )
    ]

    @staticmethod
    def texts() -> list[str]:
        """Every string of the package, with a NUL where a value is formatted into it."""
        found = []
        for path in sorted((ROOT / "torchrl_ext").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value.replace("{}", "\0"))
        return found

    def test_the_page_has_sentences(self):
        assert len(self.SENTENCES) >= 25

    def test_every_sentence_is_in_the_source(self):
        texts = self.texts()
        missing = []
        for sentence in self.SENTENCES:
            said = [part.strip() for part in re.split(r"<[^<>]*>", sentence)]
            assert sum(map(len, said)) >= 24, f"{sentence!r} quotes too little to be found"
            pattern = re.compile(".*".join(map(re.escape, said)), re.DOTALL)
            if not any(map(pattern.search, texts)):
                missing.append(sentence)
        assert missing == []


class TestCommands:
    """Contract: what a text tells one to type is there: scripts, targets of make, options of the training scripts and
    of the benchmarks."""

    #: Groups of the training scripts' configurations, as texts name their options: `collector.max_ahead`.
    OPTION = r"(?:checkpoint|collector|env|eval|learner|log|networks|replay)\.\w+"
    PEERS = {"collector.backend"}  # of TorchRL's recipe

    @staticmethod
    def commands(path: Path) -> list[str]:
        """The code of a text: lines of its blocks, those that a backslash continues as one, and what is inline."""
        text = path.read_text().replace("\\\n", " ")
        if path.suffix == ".rst":
            lines, inline = re.findall(r"^ {3}(\S.*)$", text, re.MULTILINE), re.findall(r"``([^`]+)``", text)
        else:
            lines = [line for block in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
            inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        return lines + [" ".join(code.split()) for code in inline]

    @staticmethod
    def options() -> set[str]:
        """Of both training scripts."""
        yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra 'sota'.")
        known: set[str] = set()
        for path in (ROOT / "sota_implementations").glob("*/config/*.yaml"):
            for group, values in yaml.safe_load(path.read_text()).items():
                known |= {f"{group}.{name}" for name in values} if isinstance(values, dict) else {group}
        return known

    @pytest.mark.parametrize("path", [*TEXTS, *PAGES], ids=_name)
    def test_scripts_and_targets_exist(self, path):
        lines = self.commands(path)
        scripts = {name for line in lines for name in re.findall(r"python (\w[\w/]*\.py)", line)}
        assert [name for name in sorted(scripts) if not (ROOT / name).exists()] == []
        targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {name for line in lines for name in re.findall(r"^make ([a-z][a-z-]*)", line)} <= targets

    @pytest.mark.parametrize("path", [*TEXTS, *PAGES], ids=_name)
    def test_options_and_presets_of_training_scripts_exist(self, path):
        lines = self.commands(path)
        named = {name for line in lines for name in re.findall(rf"(?<![\w.])({self.OPTION})=", line)}
        if path.parent.parent.name == "sota_implementations":
            named |= {line for line in lines if re.fullmatch(self.OPTION, line)}
        assert named - self.options() <= self.PEERS
        presets = {name for line in lines for name in re.findall(r"preset=(\w+)", line)} - {"mine"}
        assert presets <= {file.stem for file in ROOT.glob("sota_implementations/*/config/preset/*.yaml")}

    def test_every_case_is_in_the_text_of_the_benchmarks(self):
        text = (ROOT / "benchmarks" / "README.md").read_text()
        source = ast.parse((ROOT / "benchmarks" / "cases" / "__init__.py").read_text())
        (cases,) = [node.value for node in source.body if isinstance(node, ast.AnnAssign) and node.target.id == "CASES"]
        assert [name for name in ast.literal_eval(cases) if f"| `{name}`" not in text] == []

    @pytest.mark.parametrize(
        "script",
        [
            "bench_dreamer_v3_end_to_end.py",
            "bench_dreamer_v3_learner.py",
            "compare.py",
            "compare_revisions.py",
            "draw_runs.py",
            "panel_overhead.py",
            "peers/motrixlab_run.py",
        ],
    )
    def test_options_of_the_benchmarks_exist(self, script):
        source = (ROOT / "benchmarks" / script).read_text()
        known = set(re.findall(r"add_argument\(\s*(?:\"-\w\", )?\"(--[\w-]+)\"", source))
        texts = [*TEXTS, *sorted((ROOT / "benchmarks" / "reports").glob("*.md"))]
        lines = [line for path in texts for line in self.commands(path) if f"python benchmarks/{script}" in line]
        used = {name for line in lines for name in re.findall(r" (--[a-z][\w-]*)", line.split(" -- ")[0])}
        assert lines and used <= known


class TestLinks:
    """Contract: a link to a file of the repository leads to one."""

    @pytest.mark.parametrize("path", TEXTS, ids=_name)
    def test_links_of_markdown_lead_to_files(self, path):
        targets = re.findall(r"\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"", path.read_text())
        local = [a or b for a, b in targets if not re.match(r"[a-z]+:|#", a or b)]
        assert [link for link in local if not (path.parent / link.split("#")[0]).exists()] == []

    @pytest.mark.parametrize("path", TEXTS, ids=_name)
    def test_anchors_of_markdown_are_headings(self, path):
        missing = []
        for link in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", path.read_text()):
            file, anchor = link.split("#")
            target = path.parent / file if file else path
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            known = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            missing += [link] if anchor not in known else []
        assert missing == []

    @pytest.mark.parametrize("path", PAGES, ids=_name)
    def test_links_of_pages_lead_to_files(self, path):
        text = path.read_text()
        files = re.findall(r"^\s*\.\. (?:image|figure|literalinclude):: (\S+)", text, re.MULTILINE)
        files += re.findall(r":download:`[^<`]*<([^>]+)>`", text)
        pages = [f"{page}.rst" for page in re.findall(r":doc:`(?:[^<`]*<)?([^>`]+)>?`", text)]
        if path.name == "index.rst":
            pages += [f"{page}.rst" for page in re.findall(r"^   ([a-z_]+(?:/[a-z_]+)?)$", text, re.MULTILINE)]
        assert [link for link in files + pages if not (path.parent / link).exists()] == []

    @pytest.mark.parametrize("path", [*TEXTS, *PAGES], ids=_name)
    def test_paths_that_are_named_exist(self, path):
        named = re.findall(
            r"`((?:docs|test|benchmarks|sota_implementations|torchrl_ext)/[\w./]*\w/?)`", path.read_text()
        )
        labels = re.findall(r"^- name: (\S+)$", (ROOT / ".github" / "labels.yml").read_text(), re.MULTILINE)
        files = [name for name in named if "_build" not in name and name not in labels]
        assert [name for name in files if not (ROOT / name).exists()] == []

    def test_every_page_is_in_the_index(self):
        index = (DOCS / "index.rst").read_text()
        pages = [str(path.relative_to(DOCS).with_suffix("")) for path in PAGES if path.name != "index.rst"]
        assert [page for page in pages if f"   {page}\n" not in index] == []

    def test_every_notebook_is_on_its_page(self):
        text = (DOCS / "notebooks.rst").read_text()
        assert [path.name for path in sorted((DOCS / "notebooks").glob("*.ipynb")) if path.name not in text] == []
