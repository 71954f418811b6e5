# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The form of GitHub's event payloads: which keys there are, how they nest, and the types of their values.

Taken from what is published: the schemas and examples of ``octokit/webhooks``, and for younger keys (merge settings,
``user_view_type``, ``custom_properties``) a delivery of 2024 that a public project keeps among its tests. There is no
``installation``, which GitHub Apps get, and no ``enterprise``, which the repository is not part of.

A form is a type, a tuple of types, a dict of forms (an object with these keys and no others) or a list with the form
of its items. ``URL`` and ``TIME`` are strings of these kinds.
"""

from __future__ import annotations

import re
from typing import Any

URL = re.compile(r"(https|git)://\S+")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)")
SHA = re.compile(r"[0-9a-f]{40}")
NULL = type(None)


def _all(form: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), form)


USER = {
    **_all(str, "login node_id gravatar_id type user_view_type"),
    **_all(URL, "avatar_url url html_url followers_url following_url gists_url starred_url subscriptions_url"),
    **_all(URL, "organizations_url repos_url events_url received_events_url"),
    "id": int,
    "site_admin": bool,
}
ORGANIZATION = {
    **_all(str, "login node_id"),
    **_all(URL, "url repos_url events_url hooks_url issues_url members_url public_members_url avatar_url"),
    "id": int,
    "description": (str, NULL),
}
LABEL = {**_all(str, "node_id name color"), "id": int, "url": URL, "default": bool, "description": (str, NULL)}
LICENSE = {**_all(str, "key name spdx_id node_id"), "url": (URL, NULL)}

_REPOSITORY = {
    **_all(str, "node_id name full_name ssh_url visibility default_branch"),
    **_all(URL, "html_url url forks_url keys_url collaborators_url teams_url hooks_url issue_events_url events_url"),
    **_all(URL, "assignees_url branches_url tags_url blobs_url git_tags_url git_refs_url trees_url statuses_url"),
    **_all(URL, "languages_url stargazers_url contributors_url subscribers_url subscription_url commits_url"),
    **_all(URL, "git_commits_url comments_url issue_comment_url contents_url compare_url merges_url archive_url"),
    **_all(URL, "downloads_url issues_url pulls_url milestones_url notifications_url labels_url releases_url"),
    **_all(URL, "deployments_url git_url clone_url svn_url"),
    **_all(int, "id size stargazers_count watchers_count forks_count open_issues_count forks open_issues watchers"),
    **_all(bool, "private fork has_issues has_projects has_downloads has_wiki has_pages has_discussions archived"),
    **_all(bool, "disabled allow_forking is_template web_commit_signoff_required"),
    **_all((str, NULL), "description homepage language mirror_url"),
    **_all(TIME, "created_at updated_at pushed_at"),
    "owner": USER,
    "license": (LICENSE, NULL),
    "topics": [str],
}
#: The repository of an event.
REPOSITORY = {**_REPOSITORY, "custom_properties": dict}
#: The repository of a pull request's head or base.
MERGED_REPOSITORY = {
    **_REPOSITORY,
    **_all(bool, "allow_squash_merge allow_merge_commit allow_rebase_merge allow_auto_merge delete_branch_on_merge"),
    **_all(bool, "allow_update_branch use_squash_pr_title_as_default"),
    **_all(str, "squash_merge_commit_message squash_merge_commit_title merge_commit_message merge_commit_title"),
}
PUSHED_REPOSITORY = {
    **REPOSITORY,
    **_all(int, "created_at pushed_at stargazers"),  # seconds
    **_all(str, "master_branch organization"),
    "owner": {**USER, "name": str, "email": (str, NULL)},
}

_BRANCH = {**_all(str, "label ref"), "sha": SHA, "user": USER, "repo": MERGED_REPOSITORY}
_LINKS = "self html issue comments review_comments review_comment commits statuses"
PULL_REQUEST = {
    **_all(URL, "url html_url diff_url patch_url issue_url commits_url review_comments_url review_comment_url"),
    **_all(URL, "comments_url statuses_url"),
    **_all(int, "id number comments review_comments commits additions deletions changed_files"),
    **_all(str, "node_id state title author_association mergeable_state"),
    **_all((str, NULL), "body active_lock_reason"),
    **_all(bool, "locked draft merged maintainer_can_modify"),
    **_all((bool, NULL), "mergeable rebaseable"),
    **_all(TIME, "created_at updated_at"),
    **_all((TIME, NULL), "closed_at merged_at"),
    **_all((USER, NULL), "assignee merged_by"),
    **_all((dict, NULL), "milestone auto_merge"),
    **_all([USER], "assignees requested_reviewers"),
    "merge_commit_sha": (SHA, NULL),
    "user": USER,
    "requested_teams": [dict],
    "labels": [LABEL],
    "head": _BRANCH,
    "base": _BRANCH,
    "_links": _all({"href": URL}, _LINKS),
}
_COMMON = {"repository": REPOSITORY, "organization": ORGANIZATION, "sender": USER}
_PULL_EVENT = {"action": str, "number": int, "pull_request": PULL_REQUEST, **_COMMON}
_PERSON = _all(str, "name email")
_COMMIT = {
    **_all(SHA, "id tree_id"),
    **_all({**_PERSON, "username": str}, "author committer"),
    **_all([str], "added removed modified"),
    "distinct": bool,
    "message": str,
    "timestamp": TIME,
    "url": URL,
}
#: By the first word of a payload's file.
EVENTS = {
    "closed": _PULL_EVENT,
    "labeled": {**_PULL_EVENT, "label": LABEL},
    "synchronize": {**_PULL_EVENT, "before": SHA, "after": SHA},
    "workflow_dispatch": {"inputs": (dict, NULL), "ref": str, "workflow": str, **_COMMON},
    "push": {
        **_all(SHA, "before after"),
        **_all(bool, "created deleted forced"),
        "ref": str,
        "base_ref": (str, NULL),
        "compare": URL,
        "commits": [_COMMIT],
        "head_commit": (_COMMIT, NULL),
        "pusher": _PERSON,
        **_COMMON,
        "repository": PUSHED_REPOSITORY,
    },
}


def departures(value: Any, form: Any, path: str = "event") -> list[str]:
    """Returns where a value is not of a form, one line for each key."""
    if isinstance(form, tuple):
        found = [departures(value, one, path) for one in form]
        # Of an object the keys say more than that it is not null.
        return [] if [] in found else max(found, key=len)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return [f"{path} must be an object"]
        lines = [f"{path}.{key} is missing" for key in sorted(form.keys() - value.keys())]
        lines += [f"{path}.{key} is not sent" for key in sorted(value.keys() - form.keys())]
        return lines + [
            line for key in form if key in value for line in departures(value[key], form[key], f"{path}.{key}")
        ]
    if isinstance(form, list):
        if not isinstance(value, list):
            return [f"{path} must be an array"]
        return [line for place, item in enumerate(value) for line in departures(item, form[0], f"{path}[{place}]")]
    if isinstance(form, re.Pattern):
        return [] if isinstance(value, str) and form.fullmatch(value) else [f"{path} must match {form.pattern}"]
    return [] if type(value) is form else [f"{path} must be of type {form.__name__}"]
