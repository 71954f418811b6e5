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
from _github_form import EVENTS as FORMS
from _github_form import departures

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".github" / "scripts" / "benchmark_decision.py"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EVENTS = Path(__file__).parent / "data" / "github_events"

_spec = importlib.util.spec_from_file_location("benchmark_decision", SCRIPT)
decision = importlib.util.module_from_spec(_spec)
sys.modules["benchmark_decision"] = decision  # its dataclass looks itself up
_spec.loader.exec_module(decision)

PULL = "pull_request"
#: Payload (in the form that GitHub sends, not recorded), name of the event, suite or None, a word of the reason.
EXPECTED = [
    ("closed_merged_with_trigger", "pull_request_target", "full", "merged into main"),
    ("closed_unmerged_with_trigger", "pull_request_target", None, "without a merge"),
    ("closed_merged_unlabelled", "pull_request_target", None, "no label"),
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


class TestPayloads:
    """Contract: the payloads are written by hand, none was recorded; each has the keys and types of GitHub's event of
    its kind, all of them and no others, and its values agree with each other and with the labels of the repository."""

    FILES = sorted(EVENTS.glob("*.json"))
    PULLS = [path.stem for path in FILES if path.stem.split("_")[0] in ("closed", "labeled", "synchronize")]

    @pytest.mark.parametrize("name", [path.stem for path in FILES if path.stem != "schedule"])
    def test_a_payload_has_the_form_of_its_event(self, name):
        (kind,) = [kind for kind in FORMS if name.startswith(kind)]
        event = payload(name)
        assert departures(event, FORMS[kind]) == []
        assert event.get("action", kind) == kind

    def test_a_departure_from_the_form_is_found(self):
        event = payload("closed_merged_with_trigger")
        del event["organization"], event["pull_request"]["merged_by"]["login"]
        event["pull_request"] |= {"merged": None, "number": "214", "squashed": True, "merged_at": "yesterday"}
        assert departures(event, FORMS["closed"]) == [
            "event.organization is missing",
            "event.pull_request.squashed is not sent",
            "event.pull_request.number must be of type int",
            "event.pull_request.merged must be of type bool",
            r"event.pull_request.merged_at must match \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)",
            "event.pull_request.merged_by.login is missing",
        ]

    @pytest.mark.parametrize("name", PULLS)
    def test_the_values_of_a_pull_request_agree(self, name):
        event = payload(name)
        pull, action = event["pull_request"], event["action"]
        closed, merged = pull["state"] == "closed", pull["merged"]
        assert pull["state"] in ("open", "closed") and (closed or not merged)
        assert (pull["closed_at"] is not None, pull["merged_at"] is not None) == (closed, merged)
        assert (pull["merged_by"] is not None, pull["mergeable"] is None) == (merged, closed)
        assert (pull["merge_commit_sha"] == payload("push")["after"]) == merged
        assert pull["number"] == event["number"] and pull["url"].endswith(f"/pulls/{event['number']}")
        assert pull["base"]["repo"]["full_name"] == event["repository"]["full_name"]
        for side in (pull["head"], pull["base"]):
            assert side["label"] == f"{side['user']['login']}:{side['ref']}"
            assert side["repo"]["full_name"].startswith(f"{side['user']['login']}/")
        assert pull["head"]["repo"]["fork"] == (pull["head"]["user"]["login"] != event["organization"]["login"])
        assert action != "closed" or closed
        assert action != "labeled" or event["label"] in pull["labels"]
        assert action != "synchronize" or event["after"] == pull["head"]["sha"] != event["before"]

    def test_labels_are_those_of_the_repository(self):
        text = (ROOT / ".github" / "labels.yml").read_text(encoding="utf-8")
        known = re.findall(r'^- name: (.+)\n  color: "(.+)"\n  description: (.+)$', text, re.MULTILINE)
        used = {
            tuple(label[key] for key in ("name", "color", "description"))
            for name in self.PULLS
            for label in payload(name)["pull_request"]["labels"]
        }
        assert used and used <= set(known)

    def test_the_folder_says_that_they_were_not_recorded(self):
        text = (EVENTS / "README.md").read_text(encoding="utf-8")
        assert "not recorded" in text


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

    @pytest.mark.parametrize(("name", "event"), [line[:2] for line in EXPECTED], ids=[line[0] for line in EXPECTED])
    def test_what_is_read_of_a_payload_is_what_the_folder_says(self, name, event):
        whole = payload(name)
        read = {key: whole[key] for key in ("action", "inputs") if key in whole}
        if "label" in whole:
            read["label"] = {"name": whole["label"]["name"]}
        if "pull_request" in whole:
            pull = whole["pull_request"]
            labels = [{"name": label["name"]} for label in pull["labels"]]
            state = {key: pull[key] for key in ("state", "merged")}
            read["pull_request"] = {**state, "base": {"ref": pull["base"]["ref"]}, "labels": labels}
        assert decision.decide(event, read) == decision.decide(event, whole)

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

    @pytest.mark.parametrize("name", ["workflow_dispatch", PULL])
    @pytest.mark.parametrize("text", ["[]", "null", '{"pull_request": null, "inputs": ["full"], "action": "closed"}'])
    def test_a_payload_that_is_no_object_of_objects_is_refused(self, tmp_path, name, text):
        event = tmp_path / "event.json"
        event.write_text(text)
        done = run_script("--name", name, "--event", str(event))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"benchmark_decision.py: the payload of {name} is not of GitHub's form.\n"

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

    def test_no_token_is_left_in_the_folder_where_code_runs(self, workflow):
        _, loaded = workflow
        steps = [step for job in loaded["jobs"].values() for step in job["steps"]]
        checkouts = [step for step in steps if "checkout" in step.get("uses", "")]
        assert all(step.get("with", {}).get("persist-credentials") is False for step in checkouts)

    def test_the_merge_queue_hears_of_what_a_pull_request_must_pass(self, workflow):
        name, loaded = workflow
        # Without it a queue waits for results that never come; benchmarks are no part of what is asked there.
        assert ("merge_group" in loaded["on"]) == (name in ("lint", "tests"))
        assert not decision.decide("merge_group", {"action": "checks_requested"}).run

    def test_a_full_suite_that_waits_does_not_give_way_to_a_short_one(self):
        yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra 'sota'.")
        loaded = yaml.safe_load((ROOT / ".github" / "workflows" / "benchmarks.yml").read_text(encoding="utf-8"))
        # GitHub keeps one waiting run of a group: the newest. The night has no input and measures everything.
        assert loaded["concurrency"]["group"].endswith("${{ inputs.suite || 'full' }}")
        assert "cancel-in-progress" not in loaded["concurrency"]

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
        # Quoted: 5319e7 alone is a number in YAML 1.2.
        assert len(re.findall(r'^  color: "[0-9a-f]{6}"$', text, re.MULTILINE)) == len(names)
        descriptions = re.findall(r"^  description: (.+)$", text, re.MULTILINE)
        assert len(descriptions) == len(names) and max(map(len, descriptions)) <= 100  # GitHub's limit

    def test_actionlint_finds_nothing(self):
        actionlint = shutil.which("actionlint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if actionlint is None:
            pytest.skip("actionlint is not installed; the lint workflow runs it.")
        done = subprocess.run([actionlint, "-no-color"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
