# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Contract: each notebook of docs/notebooks runs from top to bottom in its own kernel, and is kept without outputs.

``NOTEBOOK_QUICK=0 pytest test/test_notebooks.py`` runs them at full length, as a reader would.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
#: Seconds for a whole notebook; below the time limit of a test, so that the message can name the cell.
DEADLINE = 100.0
#: What a notebook needs beside the `test` extra.
NEEDS = {"fast_sac_pendulum": ["envpool"], "reading_a_run": ["hydra", "gymnasium"]}


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"{path.name}, cell {number}: clear its outputs"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    for module in NEEDS.get(path.stem, []):
        if (
            importlib.util.find_spec(module) is None
        ):  # not imported here: EnvPool changes the environment of its process
            pytest.skip(f"needs {module}")
    notebook = nbformat.read(path, as_version=4)
    end, at = time.monotonic() + DEADLINE, 0

    def begin(cell_index: int, **_: object) -> None:
        nonlocal at
        at = cell_index

    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout_func=lambda _: max(1, int(end - time.monotonic())),
        startup_timeout=60,
        on_cell_start=begin,
        resources={"metadata": {"path": str(path.parent)}},
    )
    environment = {
        "NOTEBOOK_QUICK": "1",
        **os.environ,
        "RL_WARNINGS": "0",
        "OMP_NUM_THREADS": "1",
        # Another test may have imported EnvPool, which sets it.
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IPYTHONDIR": str(tmp_path),  # nothing of the user's own start-up files
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    try:
        client.execute(env=environment)
    except nbclient.exceptions.CellTimeoutError:
        pytest.fail(f"{path.name}, cell {at}: not done {DEADLINE:.0f} s after the notebook began")
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.DeadKernelError) as error:
        pytest.fail(f"{path.name}, cell {at}: {error}")
    plots = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert plots, f"{path.name} shows no plot"
