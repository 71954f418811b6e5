# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the FastSAC script has that serves any script: settings parser, records, signals, environments."""

from __future__ import annotations

import sys
from pathlib import Path

_FAST_SAC = str(Path(__file__).resolve().parents[1] / "fast_sac")
if _FAST_SAC not in sys.path:
    # Behind this folder, whose modules all have names of their own.
    sys.path.append(_FAST_SAC)

from curves import draw_curve  # noqa: E402
from env_factory import make_env as make_plain_env  # noqa: E402
from parsing import parse, require  # noqa: E402
from records import Records  # noqa: E402
from settings import EnvSettings as PlainEnvSettings  # noqa: E402
from utils import EVAL_SEED_OFFSET, Every, StopSignal, make_device, mean, seed_everything  # noqa: E402

__all__ = [
    "EVAL_SEED_OFFSET",
    "Every",
    "PlainEnvSettings",
    "Records",
    "StopSignal",
    "draw_curve",
    "make_device",
    "make_plain_env",
    "mean",
    "parse",
    "require",
    "seed_everything",
]
