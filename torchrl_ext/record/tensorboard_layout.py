# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How TensorBoard's tab Custom Scalars groups what the scripts log."""

from __future__ import annotations

__all__ = ["custom_scalars_layout"]

_CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "episodes": {
        "return": ("train/return", "eval/return", "eval/worst"),
        "length": ("train/length", "eval/length"),
    },
    "learner": {
        "loss of critics": ("learner/loss_critic",),
        "loss of actor": ("learner/loss_actor",),
        "loss of temperature": ("learner/loss_alpha",),
        "losses of the world model": ("learner/loss_model_[a-z_]+",),
        "losses of the value": ("learner/loss_value", "learner/loss_replay_value", "learner/value_slow_loss"),
        "values": ("learner/q_target", "learner/td_error", "learner/replay_value"),
        "imagined returns": ("learner/return_low", "learner/return_high", "learner/return_scale"),
        "imagined continuation": ("learner/continuation_mean",),
        "temperature": ("learner/alpha",),
        "entropy": ("learner/entropy", "learner/actor_entropy"),
    },
    "pace": {
        "share of the learner's time": ("learner/busy_share", "learner/wait_share"),
        # First-level stages alone, here and below: what is below one is part of it already.
        "milliseconds of a stage": ("learner/[^/]+_ms",),
        "updates per frame": ("utd/requested", "utd/measured"),
        "replayed steps per frame": ("train_ratio",),
        "updates": ("updates",),
        "episodes": ("episodes",),
        "seconds": ("seconds",),
    },
    "collector": {
        "milliseconds of a step": ("collector/[^/]+_ms",),
        "filled share of the rings": ("collector/ring_fill",),
        "policy lag in updates": ("collector/policy_lag_updates",),
    },
    "write-back": {
        "share of the rows": ("write_back/(?:applied|stale|superseded)_share",),
        "updates that are pending": ("write_back/pending",),
        "milliseconds until applied": ("write_back/wait_ms",),
    },
}


def custom_scalars_layout() -> dict[str, dict[str, list[str | list[str]]]]:
    """Returns the layout for ``SummaryWriter.add_custom_scalars``, which is to be called once per event file.

    Charts of metrics that a run does not log stay empty. No metric is in two charts.

    Returns:
        dict: charts by category; the tags of a chart are regular expressions of whole names.

    Examples:
        >>> custom_scalars_layout()["episodes"]["length"]
        ['Multiline', ['^train/length$', '^eval/length$']]
    """
    return {
        category: {title: ["Multiline", [f"^{name}$" for name in names]] for title, names in charts.items()}
        for category, charts in _CHARTS.items()
    }
