#!/usr/bin/env python3
# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Decides whether an event of GitHub runs benchmarks, and which suite.

    python .github/scripts/benchmark_decision.py

Reads the event's name and payload from ``GITHUB_EVENT_NAME`` and ``GITHUB_EVENT_PATH``, prints ``run``, ``suite`` and
``reason`` as ``key=value`` lines and appends the same to ``GITHUB_OUTPUT`` where that is set. Standard library only: it
runs before anything is installed.

    schedule                                        the full suite
    workflow_dispatch                               the suite of its input, short without one
    label benchmarks/upload added to an open one    the short suite, base against head
    a merge into main with benchmarks/trigger       the full suite on main
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BRANCH = "main"
SUITES = ("short", "full")
#: Compares a pull request with its base as soon as it is added.
UPLOAD_LABEL = "benchmarks/upload"
#: Does nothing until the pull request is merged.
TRIGGER_LABEL = "benchmarks/trigger"


@dataclass(frozen=True)
class Decision:
    """Whether to run, which suite (empty when nothing runs), and why, in one sentence."""

    run: bool
    suite: str
    reason: str

    def lines(self) -> list[str]:
        """Returns the ``key=value`` lines; texts of a payload never get into them."""
        return [f"run={str(self.run).lower()}", f"suite={self.suite}", f"reason={self.reason}"]


def decide(name: str, event: Mapping[str, Any]) -> Decision:
    """Returns the decision for an event.

    Args:
        name (str): ``GITHUB_EVENT_NAME``.
        event (Mapping): the payload.

    Raises:
        ValueError: if a dispatch asks for a suite that there is not.
    """
    if name == "schedule":
        return Decision(True, "full", "The nightly run measures everything.")
    if name == "workflow_dispatch":
        suite = (event.get("inputs") or {}).get("suite") or "short"
        if suite not in SUITES:
            raise ValueError(f"the input suite must be one of {', '.join(SUITES)}, got {suite!r}.")
        return Decision(True, suite, f"A dispatch asks for the {suite} suite.")
    if name in ("pull_request", "pull_request_target"):
        return _decide_pull_request(event)
    return Decision(False, "", "No benchmarks belong to this kind of event.")


def _decide_pull_request(event: Mapping[str, Any]) -> Decision:
    pull, action = event["pull_request"], event["action"]
    if action == "labeled":
        added = event["label"]["name"]
        if added == UPLOAD_LABEL and pull["state"] == "open":
            return Decision(True, "short", f"{UPLOAD_LABEL} was added: base against head.")
        if added == UPLOAD_LABEL:
            return Decision(False, "", f"{UPLOAD_LABEL} was added to a pull request that is closed.")
        if added == TRIGGER_LABEL and pull.get("merged"):
            return Decision(False, "", f"{TRIGGER_LABEL} came after the merge; start the workflow benchmarks by hand.")
        if added == TRIGGER_LABEL:
            return Decision(False, "", f"{TRIGGER_LABEL} waits for the merge.")
        return Decision(False, "", "The added label is not about benchmarks.")
    if action != "closed":
        return Decision(False, "", "Only a label or a merge runs benchmarks.")
    if not pull.get("merged"):
        return Decision(False, "", "The pull request was closed without a merge.")
    if pull["base"]["ref"] != BRANCH:
        return Decision(False, "", f"The pull request was merged into another branch than {BRANCH}.")
    if TRIGGER_LABEL not in {label["name"] for label in pull["labels"]}:
        return Decision(False, "", f"The merged pull request has no label {TRIGGER_LABEL}.")
    return Decision(True, "full", f"A pull request with {TRIGGER_LABEL} was merged into {BRANCH}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Decides about the event of the environment or the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Decide whether an event of GitHub runs benchmarks.")
    parser.add_argument("--name", default=os.environ.get("GITHUB_EVENT_NAME"), help="default: GITHUB_EVENT_NAME")
    parser.add_argument("--event", type=Path, default=os.environ.get("GITHUB_EVENT_PATH"), help="GITHUB_EVENT_PATH")
    args = parser.parse_args(argv)
    if not args.name or args.event is None:
        return _fail("it needs GITHUB_EVENT_NAME and GITHUB_EVENT_PATH, or --name and --event.")
    try:
        decision = decide(args.name, json.loads(Path(args.event).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        return _fail(str(error))
    except KeyError as error:
        return _fail(f"the payload of {args.name} has no {error}.")
    except (AttributeError, TypeError):  # an array or null where GitHub sends an object
        return _fail(f"the payload of {args.name} is not of GitHub's form.")
    text = "".join(f"{line}\n" for line in decision.lines())
    sys.stdout.write(text)
    if output := os.environ.get("GITHUB_OUTPUT"):
        with open(output, "a", encoding="utf-8") as file:
            file.write(text)
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"benchmark_decision.py: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
