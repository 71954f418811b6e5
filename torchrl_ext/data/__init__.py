# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Replay over packed rows: storages, writers, samplers and buffers that plug into TorchRL's."""

from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.context_update import replay_context_update
from torchrl_ext.data.ensemble import GroupedReplayBufferEnsemble
from torchrl_ext.data.fields import Field
from torchrl_ext.data.grouping import RowGroups, group_rows
from torchrl_ext.data.handles import SlotHandle
from torchrl_ext.data.layout import RowLayout
from torchrl_ext.data.packing import PackedRun
from torchrl_ext.data.prioritized import PrioritizedTransitionSampler
from torchrl_ext.data.replay_buffers import SlotReplayBuffer
from torchrl_ext.data.samplers import TransitionSampler
from torchrl_ext.data.sequences import SequenceSampler
from torchrl_ext.data.slot_sampler import SlotSampler
from torchrl_ext.data.storages import SlotStorage
from torchrl_ext.data.write_back import WriteBackResult
from torchrl_ext.data.writers import SlotWriter

__all__ = [
    "BatchPool",
    "Field",
    "GroupedReplayBufferEnsemble",
    "PackedRun",
    "PrioritizedTransitionSampler",
    "RowGroups",
    "RowLayout",
    "SequenceSampler",
    "SlotHandle",
    "SlotReplayBuffer",
    "SlotSampler",
    "SlotStorage",
    "SlotWriter",
    "TransitionSampler",
    "WriteBackResult",
    "group_rows",
    "replay_context_update",
]
