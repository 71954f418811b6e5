# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Which events of GitHub run benchmarks, and what the workflows may do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".github" / "scripts" / "benchmark_decision.py"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EVENTS = Path(__file__).parent / "data" / "github_events"

_spec = importlib.util.spec_from_file_location("benchmark_decision", SCRIPT)
decision = importlib.util.module_from_spec(_spec)
sys.modules["benchmark_decision"] = decision  # its dataclass looks itself up
_spec.loader.exec_module(decision)

PULL = "pull_request"
#: Payload (in the form that GitHub sends, cut down), name of the event, suite or None, a word of the reason.
EXPECTED = [
    ("closed_merged_with_trigger", "pull_request_target", "full", "merged into main"),
    ("closed_unmerged_with_trigger", "pull_request_target", None, "without a merge"),
    ("closed_merged_without_label", "pull_request_target", None, "no label"),
    ("closed_merged_with_upload_only", "pull_request_target", None, "no label"),
    ("closed_merged_into_other_branch", "pull_request_target", None, "another branch"),
    ("labeled_trigger_on_open", PULL, None, "waits for the merge"),
    ("labeled_trigger_after_merge", PULL, None, "after the merge"),
    ("labeled_upload_on_open", PULL, "short", "base against head"),
    ("labeled_upload_on_closed", PULL, None, "closed"),
    ("labeled_other_beside_upload", PULL, None, "not about benchmarks"),
    ("synchronize_with_upload", PULL, None, "label or a merge"),
    ("workflow_dispatch_short", "workflow_dispatch", "short", "short suite"),
    ("workflow_dispatch_full", "workflow_dispatch", "full", "full suite"),
    ("workflow_dispatch_without_inputs", "workflow_dispatch", "short", "short suite"),
    ("schedule", "schedule", "full", "nightly"),
    ("push", "push", None, "No benchmarks"),
]


def payload(name: str) -> dict:
    return json.loads((EVENTS / f"{name}.json").read_text(encoding="utf-8"))


def run_script(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    # -I and -S: without site-packages, as it runs before anything is installed.
    return subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), *arguments],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


class TestDecision:
    """Contract: only a label that asks for it, a merge, a dispatch or the night run benchmarks, and the reason says
    why or why not."""

    @pytest.mark.parametrize(("name", "event", "suite", "word"), EXPECTED, ids=[line[0] for line in EXPECTED])
    def test_the_event_runs_this_suite(self, name, event, suite, word):
        decided = decision.decide(event, payload(name))
        assert (decided.run, decided.suite) == (suite is not None, suite or "")
        assert word in decided.reason and decided.reason.endswith(".")

    def test_every_payload_is_decided(self):
        files = {path.stem for path in EVENTS.glob("*.json")}
        assert files == {line[0] for line in EXPECTED} | {"workflow_dispatch_unknown_suite"}

    def test_both_events_of_a_pull_request_are_read_alike(self):
        for name, event, *_ in EXPECTED:
            if event.startswith(PULL):
                other = "pull_request_target" if event == PULL else PULL
                assert decision.decide(other, payload(name)) == decision.decide(event, payload(name))


class TestScript:
    """Contract: the environment in, three lines out; one sentence and status 2 for nonsense."""

    def test_output_file_and_standard_output_are_the_same(self, tmp_path):
        output = tmp_path / "output"
        output.write_text("earlier=1\n")
        event = EVENTS / "workflow_dispatch_full.json"
        done = run_script(
            GITHUB_EVENT_NAME="workflow_dispatch", GITHUB_EVENT_PATH=str(event), GITHUB_OUTPUT=str(output)
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["run=true", "suite=full", "reason=A dispatch asks for the full suite."]
        assert output.read_text() == "earlier=1\n" + done.stdout

    def test_text_of_a_payload_never_becomes_an_output(self):
        assert "\nrun=true\n" in payload("labeled_upload_on_open")["pull_request"]["title"]
        done = run_script("--name", PULL, "--event", str(EVENTS / "labeled_upload_on_open.json"))
        assert [line.split("=")[0] for line in done.stdout.splitlines()] == ["run", "suite", "reason"]

    def test_an_unknown_suite_is_refused(self):
        done = run_script(
            "--name", "workflow_dispatch", "--event", str(EVENTS / "workflow_dispatch_unknown_suite.json")
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "benchmark_decision.py: the input suite must be one of short, full, got 'huge'.\n"

    def test_a_payload_of_another_form_is_refused(self, tmp_path):
        event = tmp_path / "event.json"
        event.write_text('{"action": "closed"}')
        done = run_script("--name", PULL, "--event", str(event))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "benchmark_decision.py: the payload of pull_request has no 'pull_request'.\n"

    def test_it_needs_an_event(self):
        done = run_script()
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1 and "GITHUB_EVENT_PATH" in done.stderr


class TestWorkflows:
    """Contract: least permissions, actions pinned by major version, no text of an event in a shell line, and no token
    that can write where code of a pull request runs."""

    @pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
    def workflow(self, request):
        yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra 'sota'.")
        loaded = yaml.safe_load(request.param.read_text(encoding="utf-8"))
        loaded["on"] = loaded.pop(True)  # YAML 1.1 reads the key `on` as a truth value
        return request.param.stem, loaded

    def test_write_permissions_are_only_these(self, workflow):
        name, loaded = workflow
        assert "permissions" in loaded  # otherwise those of the repository's settings
        granted = {("", scope, level) for scope, level in loaded["permissions"].items()}
        for job, body in loaded["jobs"].items():
            granted |= {(job, scope, level) for scope, level in body.get("permissions", {}).items()}
        writes = {grant for grant in granted if grant[2] != "read"}
        allowed = {"labels": {("", "issues", "write")}, "benchmarks_post_merge": {("dispatch", "actions", "write")}}
        assert writes == allowed.get(name, set())

    def test_only_the_merge_has_the_event_with_a_token_and_it_runs_nothing_of_the_pull_request(self, workflow):
        name, loaded = workflow
        targets = "pull_request_target" in loaded["on"]
        assert targets == (name == "benchmarks_post_merge")
        if targets:
            steps = [step for job in loaded["jobs"].values() for step in job["steps"]]
            assert [step["with"]["ref"] for step in steps if "checkout" in step.get("uses", "")] == ["main"]

    def test_shell_lines_take_values_from_the_environment(self, workflow):
        _, loaded = workflow
        lines = [step.get("run", "") for job in loaded["jobs"].values() for step in job["steps"]]
        assert not [line for line in lines if "${{" in line and "matrix." not in line]

    def test_actions_are_pinned(self, workflow):
        _, loaded = workflow
        used = [step["uses"] for job in loaded["jobs"].values() for step in job["steps"] if "uses" in step]
        pinned = r"actions/[a-z-]+@v\d+|docker://rhysd/actionlint:\d+\.\d+\.\d+"
        assert not [use for use in used if not re.fullmatch(pinned, use)]

    def test_every_job_has_a_time_limit(self, workflow):
        _, loaded = workflow
        assert all("timeout-minutes" in job for job in loaded["jobs"].values())

    def test_the_gpu_leg_waits_for_a_variable_of_the_repository(self):
        text = (ROOT / ".github" / "workflows" / "benchmarks.yml").read_text(encoding="utf-8")
        assert "if: needs.decide.outputs.run == 'true' && vars.GPU_RUNNER == 'true'" in text

    def test_the_labels_exist_and_fit(self):
        text = (ROOT / ".github" / "labels.yml").read_text(encoding="utf-8")
        names = re.findall(r"^- name: (\S+)$", text, re.MULTILINE)
        assert {decision.UPLOAD_LABEL, decision.TRIGGER_LABEL} <= set(names) and len(set(names)) == len(names)
        assert len(re.findall(r"^  color: [0-9a-f]{6}$", text, re.MULTILINE)) == len(names)
        descriptions = re.findall(r"^  description: (.+)$", text, re.MULTILINE)
        assert len(descriptions) == len(names) and max(map(len, descriptions)) <= 100  # GitHub's limit

    def test_actionlint_finds_nothing(self):
        actionlint = shutil.which("actionlint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if actionlint is None:
            pytest.skip("actionlint is not installed; the lint workflow runs it.")
        done = subprocess.run([actionlint, "-no-color"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
