# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Weights for workers: in place, whole, never older, and everybody learns of them."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.weight_update import WeightSyncScheme

from torchrl_ext.modules import EmpiricalNormalization
from torchrl_ext.testing import CountingEnv
from torchrl_ext.transport.cursors import CURSOR_BYTES
from torchrl_ext.weight_update import SeqlockWeightSyncScheme, WeightLayout
from torchrl_ext.weight_update import _sending as sending
from torchrl_ext.weight_update._channel import ANSWERED

DEADLINE = 120.0


class Counting(nn.Linear):
    """A layer whose extra state is a tensor."""

    seen = torch.zeros(())

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.seen = state["seen"]


class Mixed(nn.Module):
    """Leaves of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.coarse = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("nothing", None)
        self.register_buffer("hidden", torch.randn(2, dtype=torch.float64), persistent=False)
        self.strided = nn.Parameter(torch.randn(4, 6).t())


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def same(first: nn.Module, second: nn.Module) -> bool:
    one, other = values(first), values(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def packed(module: nn.Module) -> tuple[WeightLayout, torch.Tensor]:
    layout = WeightLayout.from_weights(module)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(module, flat)
    return layout, flat


class TestLayout:
    """Contract: one order that names decide; in place; tied, integer, bool, 0-dim, empty and strided leaves; another
    layout is refused with the first key that differs, and changes nothing."""

    def test_every_kind_of_leaf_arrives(self):
        source, destination = Mixed(), Mixed()
        source.norm.num_batches_tracked.fill_(2**40 + 1)
        layout, flat = packed(source)
        layout.unpack(flat, destination)
        assert same(source, destination)

    def test_destination_keeps_its_memory(self):
        source, destination = Mixed(), Mixed()
        before = {name: tensor.data_ptr() for name, tensor in destination.state_dict(keep_vars=True).items()}
        layout, flat = packed(source)
        for _ in range(2):
            layout.unpack(flat, destination)
        after = {name: tensor.data_ptr() for name, tensor in destination.state_dict(keep_vars=True).items()}
        assert before == after and destination.first.weight.requires_grad
        assert destination.second.weight is destination.first.weight

    def test_leaves_are_sorted_and_aligned(self):
        layout, _ = packed(Mixed())
        names = [leaf.name for leaf in layout.leaves]
        assert names == sorted(names)
        assert {"first.weight", "second.weight", "hidden", "empty"} <= set(names)
        assert all(leaf.offset % 16 == 0 for leaf in layout.leaves) and layout.nbytes % 16 == 0

    def test_module_tensordict_and_state_dict_have_one_layout(self):
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        sources = [module, TensorDict.from_module(module), module.state_dict(), TensorDict(module.state_dict())]
        layouts = [WeightLayout.from_weights(source) for source in sources]
        assert len({layout.digest for layout in layouts}) == len(set(layouts)) == 1
        flats = [torch.zeros(layouts[0].nbytes, dtype=torch.uint8) for _ in sources]
        for source, flat in zip(sources, flats, strict=True):
            layouts[0].pack(source, flat)
            assert torch.equal(flat, flats[0])

    def test_tensordict_destination_is_written_in_place(self):
        layout, flat = packed(nn.Linear(3, 2))
        destination = TensorDict.from_module(nn.Linear(3, 2)).data.clone()
        weight = destination["weight"]
        layout.unpack(flat, destination)
        assert torch.equal(weight, layout.view(flat)["weight"]) and destination["weight"] is weight

    def test_parameters_in_a_tensordict_are_leaves(self):
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.params = TensorDictParams(TensorDict.from_module(nn.Linear(3, 2)).data.clone())

        source, destination = Holder(), Holder()
        layout, flat = packed(source)
        assert [leaf.name for leaf in layout.leaves] == ["params.bias", "params.weight"]
        layout.unpack(flat, destination)
        assert torch.equal(destination.params["weight"], source.params["weight"])

    def test_wrapper_of_compile_is_not_in_the_names(self):
        module = nn.Linear(3, 2)
        assert WeightLayout.from_weights(torch.compile(module)) == WeightLayout.from_weights(module)

    def test_layout_survives_dict_and_pickle(self):
        layout, _ = packed(Mixed())
        for other in (WeightLayout.from_dict(layout.to_dict()), pickle.loads(pickle.dumps(layout))):
            assert other == layout and other.digest == layout.digest and hash(other) == hash(layout)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (nn.Linear(3, 4), r"'bias' must be torch.float32 \[2\], got torch.float32 \[4\]"),
            (nn.Linear(3, 2, bias=False), "'bias' must be torch.float32 .*, got nothing of that name"),
            (nn.Linear(3, 2).double(), "'bias' must be torch.float32 .*, got torch.float64"),
            (nn.Bilinear(1, 1, 2), "'weight' must be torch.float32"),
        ],
    )
    def test_other_weights_are_refused_and_stay(self, other, message):
        layout, flat = packed(nn.Linear(3, 2))
        before, flat_before = values(other), flat.clone()
        with pytest.raises(ValueError, match=message):
            layout.unpack(flat, other)
        with pytest.raises(ValueError, match=message):
            layout.pack(other, flat)
        assert all(torch.equal(tensor, before[name]) for name, tensor in values(other).items())
        assert torch.equal(flat, flat_before)

    def test_other_buffers_are_refused(self):
        layout, flat = packed(nn.Linear(3, 2))
        for wrong in (flat[:-16], flat.view(torch.int8), flat.repeat(2)[::2]):
            with pytest.raises(ValueError, match="flat buffer must be"):
                layout.unpack(wrong, nn.Linear(3, 2))

    def test_nothing_has_no_layout(self):
        with pytest.raises(ValueError, match="a leaf that is not empty"):
            WeightLayout.from_weights(nn.ReLU())

    def test_tensors_that_were_replaced_meanwhile_are_noticed(self):
        """case 52: the module was moved, and got other parameters, buffers and children, after its first weights."""
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        layout, flat = packed(module)
        layout.unpack(flat, module)
        for change in (
            lambda: setattr(module[0], "weight", nn.Parameter(torch.zeros(2, 3))),
            lambda: setattr(module[0].bias, "data", torch.zeros(2)),
            lambda: setattr(module[1], "running_mean", torch.ones(2)),
            lambda: module.__setitem__(0, nn.Linear(3, 2)),
        ):
            change()
            layout.unpack(flat, module)
            assert torch.equal(packed(module)[1], flat)

    def test_leaves_that_were_added_meanwhile_are_noticed(self):
        def module() -> nn.Module:
            made = nn.Sequential(nn.Linear(2, 1))
            made.register_buffer("later", None)
            return made

        for make, add in (
            (module, lambda m: m.register_parameter("more", nn.Parameter(torch.ones(3)))),
            (module, lambda m: setattr(m, "later", torch.ones(2))),
            (module, lambda m: m.append(nn.Linear(1, 1))),
            (lambda: TensorDict(a=TensorDict(b=torch.zeros(2))), lambda td: td.set(("a", "c"), torch.ones(1))),
        ):
            source = make()
            layout, flat = packed(source)
            layout.unpack(flat, source)
            add(source)
            before = flat.clone()
            with pytest.raises(ValueError, match="must be absent, got torch.float32"):
                layout.pack(source, flat)
            assert torch.equal(flat, before)

    def test_weights_are_not_kept_alive(self):
        layout, flat = packed(nn.Linear(3, 2))
        for _ in range(3):
            layout.pack(TensorDict.from_module(nn.Linear(3, 2)).data, flat)
            layout.pack(nn.Linear(3, 2), flat.clone())
        assert not layout._known

    def test_normaliser_travels(self):
        source, destination = (EmpiricalNormalization(["observation"], [3]) for _ in range(2))
        source.update(TensorDict(observation=torch.randn(50, 3), batch_size=[50]))
        layout, flat = packed(source)
        layout.unpack(flat, destination)
        assert same(source, destination)

    def test_extra_state_of_tensors_travels(self):
        source, destination = Counting(2, 1), Counting(2, 1)
        layout, flat = packed(source)
        source.seen = torch.tensor(7.0)  # another tensor than the one of before
        layout.pack(source, flat)
        layout.unpack(flat, destination)
        flat.zero_()
        assert destination.seen.item() == 7.0
        before = flat.clone()
        for other in (
            {"seen": torch.zeros(2)},
            {"seen": torch.zeros((), dtype=torch.int64)},
            {"heard": torch.zeros(())},
        ):
            source.get_extra_state = lambda other=other: other
            with pytest.raises(ValueError, match="key '__extra_state__.(seen|heard)' must be .* Nothing was changed"):
                layout.pack(source, flat)
            assert torch.equal(flat, before)


def make_policy() -> TensorDictModule:
    return TensorDictModule(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)), ["observation"], ["action"])


def fill(module: nn.Module, number: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(number)


def connected(learner: nn.Module, workers: int = 1, **options: Any) -> tuple[SeqlockWeightSyncScheme, list, list]:
    scheme = SeqlockWeightSyncScheme(num_workers=workers, **options)
    scheme.init_on_sender(model_id="policy", model=learner)
    scheme.connect()
    policies, receivers = [make_policy() for _ in range(workers)], []
    for worker, policy in enumerate(policies):
        receivers.append(scheme.for_worker(worker))
        receivers[-1].init_on_receiver(model_id="policy", model=policy)
        receivers[-1].connect()
    return scheme, receivers, policies


class TestScheme:
    """Contract: TorchRL's life cycle; ``send`` takes a snapshot; each worker has its versions; nothing is sent by an
    error."""

    def test_backend_is_registered(self):
        assert isinstance(WeightSyncScheme.from_backend("seqlock", num_workers=2), SeqlockWeightSyncScheme)

    def test_first_weights_are_version_one(self):
        learner = make_policy()
        scheme, (receiver,), (policy,) = connected(learner)
        assert same(learner, policy)
        assert (scheme.version, receiver.version, scheme.applied_versions) == (1, 1, {0: 1})
        assert receiver.receive() is None

    def test_send_takes_a_snapshot(self):
        learner = make_policy()
        scheme, (receiver,), (policy,) = connected(learner)
        fill(learner, 1.0)
        scheme.send()
        fill(learner, 2.0)
        taken = receiver.receive()
        assert all(bool((leaf == 1.0).all()) for leaf in taken.values(True, True))
        assert all(bool((parameter == 1.0).all()) for parameter in policy.parameters())

    def test_weights_of_other_kinds_are_sent(self):
        learner = make_policy()
        scheme, (receiver,), (policy,) = connected(learner)
        for number, kind in enumerate((lambda m: m, TensorDict.from_module, lambda m: m.state_dict())):
            fill(learner, number)
            scheme.send(kind(learner))
            assert receiver.receive() is not None and same(learner, policy)

    def test_host_memory_gives_the_bits_of_a_direct_copy(self):
        """case 51, its second half"""
        learner, direct = make_policy(), make_policy()
        scheme, (receiver,), (policy,) = connected(learner)
        for parameter in learner.parameters():
            parameter.data.view(torch.int32).random_(-(2**31), 2**31 - 1)  # any bits, NaNs too
        scheme.send()
        receiver.receive()
        direct.load_state_dict(learner.state_dict())
        for ours, theirs in zip(policy.parameters(), direct.parameters(), strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))

    def test_policy_is_written_in_place(self):
        """What was compiled or captured acts on the new weights, since it knows tensors by their memory."""
        learner = make_policy()
        scheme, (receiver,), (policy,) = connected(learner)
        before = [(parameter, parameter.data_ptr()) for parameter in policy.parameters()]
        scheme.send()
        receiver.receive()
        assert all(p is q and p.data_ptr() == at for (p, at), q in zip(before, policy.parameters(), strict=True))

    def test_only_named_workers_get_weights(self):
        learner = make_policy()
        scheme, receivers, policies = connected(learner, 3)
        fill(learner, 0.0)
        scheme.send(worker_ids=[1])
        assert [receiver.receive() is None for receiver in receivers] == [True, False, True]
        assert (scheme.versions, scheme.version) == ({0: 1, 1: 2, 2: 1}, 2)
        scheme.send(worker_ids=2)
        assert receivers[2].receive() is not None and receivers[0].receive() is None

    def test_workers_get_weights_of_their_own(self):
        scheme, receivers, policies = connected(make_policy(), 2)
        learners = {0: make_policy(), 1: make_policy()}
        scheme.send(learners)
        for worker, receiver in enumerate(receivers):
            receiver.receive()
            assert same(learners[worker], policies[worker])
        scheme.send(learners, worker_ids=[0])
        assert [receiver.receive() is None for receiver in receivers] == [False, True]

    def test_params_map_gives_the_first_weights(self):
        scheme = SeqlockWeightSyncScheme()
        weights = {worker: TensorDict.from_module(make_policy()).data for worker in range(2)}
        scheme.init_on_sender(params_map=weights)
        scheme.connect()
        for worker in range(2):
            policy, receiver = make_policy(), scheme.for_worker(worker)
            receiver.init_on_receiver(model_id="policy", model=policy)
            receiver.connect()
            assert torch.equal(policy.module[0].weight, weights[worker]["module", "0", "weight"])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"worker_ids": [0, 5]}, r"worker ids must be among \[0, 1\], got \[5\]"),
            ({"weights": {0: make_policy(), 7: make_policy()}}, r"got \[7\]"),
            ({"weights": {0: make_policy(), 1: nn.Linear(3, 1)}}, "key 'bias' must be absent"),
            ({"weights": 3}, "must be a module"),
        ],
    )
    def test_nothing_is_sent_by_an_error(self, arguments, message):
        scheme, receivers, _ = connected(make_policy(), 2)
        with pytest.raises(ValueError, match=message):
            scheme.send(**arguments)
        assert [receiver.receive() for receiver in receivers] == [None, None]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
            ({"devices": []}, "num_workers must be at least 1, got 0"),
            ({"devices": ["cpu"], "num_workers": 2}, "devices must be one for each of 2 workers, got 1"),
            ({"params_map": {}}, "num_workers must be at least 1, got 0"),
            ({"params_map": {0: 0, 2: 2}}, r"params_map must have weights for workers \[0, 1\], got \[0, 2\]"),
            ({"params_map": {0: 0}, "num_workers": 2}, r"params_map must have weights for workers \[0, 1\], got \[0\]"),
        ],
    )
    def test_workers_without_weights_are_refused(self, given, message):
        weights = TensorDict.from_module(make_policy()).data
        if "params_map" in given:
            given = {**given, "params_map": dict.fromkeys(given["params_map"], weights)}
        else:
            given = {**given, "weights": weights}
        scheme = SeqlockWeightSyncScheme()
        with pytest.raises(ValueError, match=message):
            scheme.init_on_sender(**given)
        assert not scheme.initialized_on_sender and scheme.layout is None

    def test_extra_state_that_changed_meanwhile_keeps_all_workers_weights(self):
        learners, policy = {worker: Counting(2, 1) for worker in range(2)}, Counting(2, 1)
        scheme = SeqlockWeightSyncScheme(num_workers=2)
        scheme.init_on_sender(model_id="policy", model=learners[0])
        scheme.connect()
        scheme.send(learners)
        receiver = scheme.for_worker(0)
        receiver.init_on_receiver(model_id="policy", model=policy)
        receiver.connect()
        learners[1].seen = torch.zeros(3)
        with pytest.raises(ValueError, match=r"key '__extra_state__.seen' must be torch.float32 \[\]"):
            scheme.send(learners)
        assert receiver.receive() is None and scheme.versions == {0: 2, 1: 2}

    def test_failed_initialisation_leaves_the_scheme_as_it_was(self):
        learner = make_policy()
        scheme, (receiver,), _ = connected(learner)
        with pytest.raises(ValueError, match="a leaf that is not empty"):
            scheme.init_on_sender(model_id="other", model=nn.ReLU(), num_workers=3)
        assert (scheme.model_id, scheme.model, len(scheme.versions)) == ("policy", learner, 1)

    def test_weights_that_are_not_there_are_refused_in_one_sentence(self):
        scheme = SeqlockWeightSyncScheme()
        scheme.init_on_sender(params_map={0: TensorDict.from_module(make_policy()).data}, model_id="policy")
        scheme.connect()
        with pytest.raises(
            ValueError, match="weights must be a module, a TensorDict or a state dict.*Nothing was sent"
        ):
            scheme.send()
        assert scheme.versions == {0: 1}

    def test_connection_that_timed_out_may_be_tried_again(self):
        scheme = SeqlockWeightSyncScheme(transport="ipc", connect_timeout=0.01)
        scheme.init_on_sender(params_map={0: TensorDict.from_module(make_policy()).data})
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"workers \[0\] must connect within"):
                scheme.connect()

    def test_another_worker_than_that_of_the_channel_cannot_connect(self):
        scheme = SeqlockWeightSyncScheme(num_workers=2)
        scheme.init_on_sender(model_id="policy", model=(learner := make_policy()))
        scheme.connect()
        receiver, policy = scheme.for_worker(1), make_policy()
        receiver.init_on_receiver(model_id="policy", model=policy)
        with pytest.raises(ValueError, match="worker_idx must be 1, that of init_on_receiver, got 0"):
            receiver.connect(worker_idx=0)
        assert not same(policy, learner)
        receiver.connect(worker_idx=1)
        assert same(policy, learner)

    def test_another_model_is_refused_by_the_worker(self):
        scheme = SeqlockWeightSyncScheme(num_workers=1)
        scheme.init_on_sender(model_id="policy", model=make_policy())
        with pytest.raises(ValueError, match="key 'bias' must be absent, got torch.float32"):
            scheme.for_worker(0).init_on_receiver(model_id="policy", model=nn.Linear(3, 1))

    def test_worker_without_a_sender_says_so(self):
        scheme = SeqlockWeightSyncScheme(num_workers=1, connect_timeout=0.05)
        scheme.init_on_sender(model_id="policy", model=make_policy())
        receiver, policy = scheme.for_worker(0), make_policy()
        receiver.init_on_receiver(model_id="policy", model=policy)
        with pytest.raises(TimeoutError, match="worker 0 must get its first weights within 0.05 s"):
            receiver.connect()

    def test_calls_out_of_order_are_refused(self):
        scheme = SeqlockWeightSyncScheme(num_workers=1)
        with pytest.raises(RuntimeError, match="send must follow"):
            scheme.send()
        with pytest.raises(RuntimeError, match="receive must follow"):
            scheme.receive()
        with pytest.raises(RuntimeError, match="poll must follow"):
            scheme.poll()
        with pytest.raises(ValueError, match="worker_idx must be among"):
            scheme.for_worker(0)
        with pytest.raises(ValueError, match="init_on_sender must be given one of"):
            scheme.init_on_sender(model_id="policy")
        with pytest.raises(ValueError, match="num_workers must be given"):
            SeqlockWeightSyncScheme().init_on_sender(model_id="policy", model=make_policy())
        with pytest.raises(ValueError, match="transport must be"):
            SeqlockWeightSyncScheme(transport="pipe")

    def test_receive_waits_only_when_told(self):
        _, (receiver,), _ = connected(make_policy())
        begin = time.monotonic()
        assert receiver.receive(0) is None and receiver.receive(timeout=0.05) is None
        assert 0.05 <= time.monotonic() - begin < DEADLINE

    def test_receiver_may_be_given_another_model(self):
        """case 52: a collector moved its policy after the first weights."""
        learner = make_policy()
        scheme, (receiver,), _ = connected(learner)
        other = make_policy()
        receiver.model = other
        assert receiver.receive() is not None and same(other, learner) and receiver.version == 1
        assert receiver.receive() is None
        fill(learner, 0.0)
        scheme.send()
        receiver.receive()
        assert same(other, learner)

    def test_receiver_keeps_its_model_when_another_one_is_refused(self):
        learner = make_policy()
        scheme, (receiver,), (policy,) = connected(learner)
        with pytest.raises(ValueError, match="key 'bias' must be absent"):
            receiver.model = nn.Linear(3, 1)
        assert receiver.model is policy
        fill(learner, 5.0)
        scheme.send()
        assert receiver.receive() is not None and same(policy, learner)

    def test_weights_that_a_model_could_not_take_are_applied_once_it_can(self):
        learner = make_policy()
        scheme, (receiver,), (policy,) = connected(learner)
        bias, policy.module[0].bias = policy.module[0].bias, nn.Parameter(torch.zeros(5))
        before = values(policy)
        fill(learner, 3.0)
        scheme.send()
        with pytest.raises(ValueError, match=r"'module.0.bias' must be torch.float32 \[8\], got torch.float32 \[5\]"):
            receiver.receive()
        assert receiver.version == 1 and all(torch.equal(value, before[name]) for name, value in values(policy).items())
        policy.module[0].bias = bias
        assert receiver.receive() is not None and same(policy, learner) and receiver.version == 2

    def test_weights_whose_way_into_the_model_failed_are_applied_the_next_time(self):
        class Failing(nn.Linear):
            fails = False

            def get_extra_state(self) -> dict[str, torch.Tensor]:
                return {"seen": torch.zeros(())}

            def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
                if self.fails:
                    raise RuntimeError("not now")

        learner, policy = Failing(2, 1), Failing(2, 1)
        scheme = SeqlockWeightSyncScheme(num_workers=1)
        scheme.init_on_sender(model_id="policy", model=learner)
        scheme.connect()
        receiver = scheme.for_worker(0)
        receiver.init_on_receiver(model_id="policy", model=policy)
        receiver.connect()
        fill(learner, 3.0)
        scheme.send()
        policy.fails = True
        with pytest.raises(RuntimeError, match="not now"):
            receiver.receive()
        policy.fails = False
        assert receiver.receive() is not None and same(policy, learner) and receiver.version == 2

    def test_receiver_without_a_model_is_refused_in_one_sentence(self):
        scheme = SeqlockWeightSyncScheme(num_workers=1)
        scheme.init_on_sender(model_id="policy", model=make_policy())
        receiver, empty = scheme.for_worker(0), SimpleNamespace(policy=None)
        for given in ({}, {"context": empty}):
            with pytest.raises(ValueError, match="must be given a model, or a context whose 'policy' is one"):
                receiver.init_on_receiver(model_id="policy", **given)
            assert not receiver.initialized_on_receiver

    def test_receiver_with_a_context_receives_before_each_call(self):
        class Collector:
            versions = 0

            def __init__(self, policy: nn.Module) -> None:
                self.policy, self.worker_idx = policy, 0

            def increment_version(self) -> None:
                self.versions += 1

        learner, collector = make_policy(), Collector(make_policy())
        scheme = SeqlockWeightSyncScheme(num_workers=1)
        scheme.init_on_sender(model_id="policy", model=learner)
        scheme.connect()
        receiver = pickle_free(scheme)
        receiver.init_on_receiver(model_id="policy", context=collector)
        receiver.connect()
        fill(learner, 0.0)
        scheme.send()
        data = TensorDict(observation=torch.ones(3))
        assert collector.policy(data)["action"].item() == 0.0
        assert (receiver.version, collector.versions) == (2, 1)
        receiver.shutdown()
        fill(learner, 1.0)
        scheme.send()
        assert collector.policy(data)["action"].item() == 0.0

    def test_model_without_memory_gets_it_from_the_first_weights(self):
        learner, policy = Mixed(), Mixed().to("meta")
        scheme = SeqlockWeightSyncScheme(num_workers=1)
        scheme.init_on_sender(model_id="policy", model=learner)
        scheme.connect()
        receiver = scheme.for_worker(0)
        receiver.init_on_receiver(model_id="policy", model=policy)
        receiver.connect()
        assert same(learner, policy) and policy.coarse.requires_grad and not policy.empty.is_meta

    @pytest.mark.parametrize("make", ["in a module", "alone"])
    def test_tensordict_without_memory_gets_it_from_the_first_weights(self, make):
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.params = TensorDictParams(TensorDict(a=TensorDict.from_module(nn.Linear(3, 2)).data.clone()))

        made = Holder if make == "in a module" else lambda: TensorDict(a=TensorDict(b=torch.randn(3)), device="cpu")
        learner = made()
        if make == "in a module":
            with torch.device("meta"):
                policy = made()
        else:
            policy = made().to("meta").lock_()
        scheme = SeqlockWeightSyncScheme(num_workers=1)
        scheme.init_on_sender(model_id="policy", **{"model" if make == "in a module" else "weights": learner})
        scheme.connect()
        receiver = scheme.for_worker(0)
        receiver.init_on_receiver(model_id="policy", model=policy)
        receiver.connect()
        ours, theirs = (held.params if make == "in a module" else held for held in (learner, policy))
        assert bool((ours.data == theirs.data).all())
        if make == "in a module":
            assert all(parameter.device.type == "cpu" for parameter in policy.parameters())


def pickle_free(scheme: SeqlockWeightSyncScheme) -> SeqlockWeightSyncScheme:
    """What a process gets that is passed the whole scheme."""
    other = SeqlockWeightSyncScheme()
    other.__setstate__(scheme.__getstate__())
    return other


class FakeCopy:
    """A snapshot whose copy into host memory completes when told."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.flat, self.done = torch.full((nbytes,), number, dtype=torch.uint8), False

    def on_host(self) -> tuple[torch.Tensor, Any]:
        return self.flat, self

    def on_stream(self) -> torch.Tensor:
        return self.flat

    def query(self) -> bool:
        return self.done


class FakeDeviceSlots(sending.CudaSeqlockSlots):
    """Device slots in host memory, whose copies complete when told."""

    def __init__(self, nbytes: int, *, device: torch.device, counters: Any) -> None:
        self.nbytes, self._counters, self.device = nbytes, counters, device
        self._cursors = sending.Channel(nbytes).cursors()
        self._slots, self._under_way, self._floor, self.done = [torch.zeros(nbytes) for _ in range(2)], 0, 0, True
        self._copied, self.exports = self, 0

    def export(self) -> Any:
        self.exports += 1
        return sending.CudaSlotsHandle(self.nbytes, "GPU-1", ("handle",), None)

    def forget(self, handle: Any) -> None:
        self.exports -= 1

    def record(self, _: Any) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class TestSendingEnd:
    """Contract: nothing is visible before its copy is complete; of what waits, the newest goes; the last one sent
    always arrives; device memory takes over once the worker opened it, and versions go on."""

    NBYTES = 64

    @pytest.fixture
    def end(self, monkeypatch):
        monkeypatch.setattr(sending, "uuid_of", lambda _: "GPU-1")
        monkeypatch.setattr(sending, "CudaSeqlockSlots", FakeDeviceSlots)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_event=lambda _: None))
        self.channel = sending.Channel(self.NBYTES)
        self.reader, self.cursors = self.channel.host.reader(), self.channel.cursors()
        return sending.SendingEnd(self.channel, 0, "ipc", torch.device("cuda"))

    def read(self) -> int | None:
        out = torch.zeros(self.NBYTES, dtype=torch.uint8)
        return None if self.reader.read(out) is None else int(out[0])

    def open(self, end: sending.SendingEnd, *, well: bool = True) -> int:
        number = self.channel.ask(self.cursors, "GPU-1")
        end.poll()
        assert self.channel.offer(self.cursors).storage == ("handle",)
        self.cursors[sending.OPENED] = number if well else -number
        end.poll()
        return number

    def test_newest_of_what_waits_is_sent(self, end):
        copies = [FakeCopy(number, self.NBYTES) for number in range(1, 5)]
        for copy in copies:
            end.send(copy)
            assert self.read() is None and not end.idle
        copies[0].done = copies[3].done = True
        end.poll()
        assert self.read() == 1
        end.poll()
        assert self.read() == 4 and end.idle and end.version == 2

    def test_busy_sender_does_not_starve_the_worker(self, end):
        """A learner that is always ahead of its device: each copy completes only after the next send."""
        seen, last = [], None
        for number in range(1, 20):
            copy = FakeCopy(number, self.NBYTES)
            end.send(copy)
            if last is not None:
                last.done = True
            last = copy
            seen.append(self.read())
        arrived = [number for number in seen if number is not None]
        assert len(arrived) > 5 and arrived == sorted(arrived)

    def test_sender_that_always_has_a_copy_under_way_still_hands_over_its_device_memory(self, end):
        number, last = self.channel.ask(self.cursors, "GPU-1"), None
        for value in range(1, 10):
            copy = FakeCopy(value, self.NBYTES)
            end.send(copy)
            if self.cursors[ANSWERED] == number:
                self.cursors[sending.OPENED] = number
            if last is not None:
                last.done = True
            last = copy
        assert end.on_device

    def test_weights_in_host_memory_replace_what_is_on_its_way(self, end):
        copy = FakeCopy(1, self.NBYTES)
        end.send(copy)
        layout = WeightLayout([("weight", (self.NBYTES,), torch.uint8)])
        end.put(layout, {"weight": torch.full((self.NBYTES,), 2, dtype=torch.uint8)})
        copy.done = True
        end.poll()
        assert self.read() == 2 and self.read() is None and end.idle

    def test_weights_that_cannot_be_packed_replace_nothing(self, end):
        copy = FakeCopy(1, self.NBYTES)
        end.send(copy)
        with pytest.raises(ValueError, match="key 'other' must be absent"):
            end.put(WeightLayout([("weight", (self.NBYTES,), torch.uint8)]), {"other": torch.zeros(1)})
        copy.done = True
        end.poll()
        assert self.read() == 1 and end.idle

    def test_device_memory_takes_over_once_it_is_open(self, end):
        self.channel.host.publish(torch.zeros(self.NBYTES, dtype=torch.uint8))
        assert not end.settled
        self.open(end)
        assert end.on_device and end.settled and end.version == 1
        end.send(FakeCopy(5, self.NBYTES))
        end.send(FakeCopy(6, self.NBYTES))
        assert not end.idle and end.version == 1
        slots = end._device_slots
        slots.done = True
        end.poll()
        slots.done = True
        end.poll()
        assert end.idle and end.version == 3 and int(slots.newest()[0]) == 6
        assert self.read() == 0  # host memory keeps the last one of before

    def test_question_that_is_asked_anew_while_it_is_read_is_answered_once_it_is_whole(self, end):
        """Forced: a worker's model moved after its first question, and the sender looks while it writes the second."""
        self.channel.ask(self.cursors, "GPU-2")
        put = self.channel._put

        def stop_halfway(box: int, value: Any) -> None:
            put(box, value)
            whole = bytes(self.channel.control.memory)
            self.channel.control.memory[CURSOR_BYTES + 8 : CURSOR_BYTES + 12] = b"\xff" * 4
            end.poll()
            assert self.cursors[ANSWERED] == 0 and not end.settled
            self.channel.control.memory[CURSOR_BYTES:] = whole[CURSOR_BYTES:]

        self.channel._put = stop_halfway
        number = self.channel.ask(self.cursors, "GPU-1")
        self.channel._put = put
        end.poll()
        assert self.cursors[ANSWERED] == number

    def test_worker_that_cannot_open_keeps_host_memory(self, end):
        with pytest.raises(RuntimeError, match="could not map the memory. transport='ipc' forbids that"):
            self.open(end, well=False)
        assert not end.on_device and end._device_slots.exports == 0

    def test_device_memory_that_cannot_be_offered_keeps_host_memory(self, end, monkeypatch):
        def fail(_: Any) -> None:
            raise RuntimeError("no IPC here")

        monkeypatch.setattr(FakeDeviceSlots, "export", fail)
        monkeypatch.setattr(sending, "IPC_BYTES", 1)
        end._transport = "auto"
        self.channel.ask(self.cursors, "GPU-1")
        end.poll()
        assert not end.on_device and end.settled

    def test_worker_on_another_device_keeps_host_memory(self, end):
        self.channel.ask(self.cursors, "GPU-2")
        with pytest.raises(RuntimeError, match="its model is on GPU-2, the sender's weights on GPU-1"):
            end.poll()

    def test_small_weights_keep_host_memory(self, end):
        end._transport = "auto"
        self.channel.ask(self.cursors, "GPU-1")
        end.poll()
        assert not end.on_device and end.settled and end._device_slots is None

    def test_restarted_worker_finds_the_newest_weights(self, end, monkeypatch):
        monkeypatch.setattr(sending, "Snapshot", lambda flat: FakeDone(flat))
        self.channel.host.publish(torch.zeros(self.NBYTES, dtype=torch.uint8))
        self.open(end)
        end.send(FakeCopy(5, self.NBYTES))
        end._device_slots.done = True
        end.poll()
        self.channel.ask(self.cursors, "GPU-1")
        end.poll()
        end.poll()
        assert self.read() == 5 and end.version == 3 and end._device_slots.exports == 1


class FakeDone(FakeCopy):
    def __init__(self, flat: torch.Tensor) -> None:
        self.flat, self.done = flat.to(torch.uint8), True


def work(scheme: SeqlockWeightSyncScheme, worker: int, connection: Any) -> None:
    torch.set_num_threads(1)
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
    scheme.connect()
    connection.send("ready")
    while True:
        command = connection.recv()
        if command == "stop":
            return
        if command == "receive":
            connection.send((scheme.receive() is not None, scheme.version))
        elif command == "action":
            connection.send(policy(TensorDict(observation=torch.ones(3)))["action"].item())
        elif command == "chase":  # until weights of nan come
            versions, uniform = [], True
            deadline = time.monotonic() + DEADLINE
            while time.monotonic() < deadline:
                taken = scheme.receive()
                if taken is None:
                    continue
                numbers = torch.cat([leaf.flatten() for leaf in taken.values(True, True)])
                versions.append(scheme.version)
                if bool(numbers.isnan().any()):
                    break
                uniform &= bool((numbers == numbers[0]).all())
            connection.send((versions, uniform))


class Fleet:
    """Two worker processes that do as they are told."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.learner = make_policy()
        self.scheme = SeqlockWeightSyncScheme(num_workers=2)
        self.scheme.init_on_sender(model_id="policy", model=self.learner)
        self.pipes, self.processes = [], []
        for worker in range(2):
            ours, theirs = context.Pipe()
            # One gets its own channel, the other one the whole scheme, as TorchRL's collectors pass it.
            scheme = self.scheme if worker else self.scheme.for_worker(worker)
            process = context.Process(target=work, args=(scheme, worker, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.scheme.connect()
        for pipe in self.pipes:
            assert self.answer(pipe) == "ready"

    @staticmethod
    def answer(pipe: Any) -> Any:
        assert pipe.poll(DEADLINE), "a worker did not answer in time"
        return pipe.recv()

    def ask(self, command: str, workers: tuple[int, ...] = (0, 1)) -> list[Any]:
        for worker in workers:
            self.pipes[worker].send(command)
        return [self.answer(self.pipes[worker]) for worker in workers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(DEADLINE)


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet()
    yield fleet
    fleet.close()


class TestProcesses:
    def test_zeroed_weights_make_every_action_zero(self, fleet):
        """case 52"""
        fill(fleet.learner, 1.0)
        fleet.scheme.send()
        fleet.ask("receive")
        assert fleet.ask("action") == [33.0, 33.0]  # 8 hidden units of 3 + 1, and a bias
        fill(fleet.learner, 0.0)
        fleet.scheme.send()
        assert fleet.ask("action") == [33.0, 33.0]  # until they are received
        assert fleet.ask("receive") == [(True, version) for version in fleet.scheme.versions.values()]
        assert fleet.ask("action") == [0.0, 0.0]
        assert fleet.scheme.applied_versions == fleet.scheme.versions

    def test_wait_names_the_worker_that_did_not_apply(self, fleet):
        fleet.scheme.send()
        fleet.ask("receive", (0,))
        with pytest.raises(TimeoutError, match=r"workers \[1\] must have applied versions \[\d+\] within 0.01 s"):
            fleet.scheme.send(worker_ids=[1], wait=0.01)
        fleet.ask("receive", (1,))
        for pipe in fleet.pipes:
            pipe.send("chase")
        fleet.scheme.send(wait=DEADLINE)
        assert fleet.scheme.applied_versions == fleet.scheme.versions
        fill(fleet.learner, float("nan"))
        fleet.scheme.send(wait=DEADLINE)
        for pipe in fleet.pipes:
            fleet.answer(pipe)

    def test_busy_sender_never_shows_torn_or_older_weights(self, fleet):
        """case 36"""
        for pipe in fleet.pipes:
            pipe.send("chase")
        end, number, applied = time.monotonic() + 1.0, 0, [set(), set()]
        # For a second and, where the workers get little of a core, until each of them has seen enough.
        while time.monotonic() < end or min(map(len, applied)) <= 20:
            assert time.monotonic() < end + DEADLINE / 2, "the workers have not seen enough versions"
            number += 1
            fill(fleet.learner, number)
            fleet.scheme.send()
            for worker, version in fleet.scheme.applied_versions.items():
                applied[worker].add(version)
        fill(fleet.learner, float("nan"))
        fleet.scheme.send()
        for pipe in fleet.pipes:
            versions, uniform = fleet.answer(pipe)
            assert uniform and len(versions) > 20
            assert all(before < after for before, after in zip(versions[:-1], versions[1:], strict=True))


def test_torchrl_collector_acts_on_new_weights():
    """case 52"""
    policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    collector = MultiSyncCollector(
        [CountingEnv],
        policy,
        frames_per_batch=6,
        total_frames=18,
        weight_sync_schemes={"policy": SeqlockWeightSyncScheme()},
    )
    actions = []
    try:
        for number, batch in enumerate(collector):
            actions.append(batch["action"].unique().tolist())
            with torch.no_grad():
                policy.module.weight.zero_()
                policy.module.bias.fill_(number)
            collector.update_policy_weights_()
    finally:
        collector.shutdown()
    assert actions[1:] == [[0.0], [1.0]]


def work_on_device(scheme: SeqlockWeightSyncScheme, last: int, results: Any) -> None:
    policy = make_policy().to("cuda")
    scheme.init_on_receiver(model_id="policy", model=policy)
    scheme.connect()
    on_device, versions, deadline = scheme._receiver.settled, [scheme.version], time.monotonic() + DEADLINE
    while scheme.version < last and time.monotonic() < deadline:
        if scheme.receive() is not None:
            versions.append(scheme.version)
    bits = torch.cat([parameter.detach().view(torch.int32).flatten() for parameter in policy.parameters()])
    results.put((on_device, versions, bits.tolist()))


@pytest.mark.gpu
class TestCuda:
    def test_value_of_the_send_arrives_though_it_is_overwritten(self):
        learner = make_policy().to("cuda")
        scheme, (receiver,), (policy,) = connected(learner)
        fill(learner, 1.0)
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        scheme.send()
        fill(learner, 2.0)
        assert not scheme.poll() and receiver.receive() is None  # not complete, and nobody waited
        end = time.monotonic() + DEADLINE
        while not scheme.poll() and time.monotonic() < end:
            time.sleep(0.001)
        assert receiver.receive() is not None
        assert all(bool((parameter == 1.0).all()) for parameter in policy.parameters())

    def test_last_of_many_sends_arrives(self):
        learner = make_policy().to("cuda")
        scheme, (receiver,), (policy,) = connected(learner)
        torch.cuda._sleep(400_000_000)
        for number in range(10):
            fill(learner, number)
            scheme.send()
        end = time.monotonic() + DEADLINE
        while not scheme.poll() and time.monotonic() < end:
            time.sleep(0.001)
        receiver.receive()
        assert all(bool((parameter == 9.0).all()) for parameter in policy.parameters())

    def test_model_on_a_device_gets_weights_of_the_host(self):
        """case 52"""
        learner = make_policy()
        scheme, _, _ = connected(learner)
        policy, receiver = make_policy().to("cuda"), scheme.for_worker(0)
        receiver.init_on_receiver(model_id="policy", model=policy)
        receiver.connect()
        for number in range(5):
            fill(learner, number)
            scheme.send()
            receiver.receive(timeout=DEADLINE)
            assert all(bool((parameter == number).all()) for parameter in policy.parameters())
        policy.to("cpu")  # moved in place, and nobody said so
        fill(learner, 7.0)
        scheme.send()
        receiver.receive(timeout=DEADLINE)
        assert all(bool((parameter == 7.0).all()) for parameter in policy.parameters())

    def test_every_kind_of_leaf_arrives(self):
        source, destination = Mixed().to("cuda"), Mixed().to("cuda")
        layout = WeightLayout.from_weights(source)
        for device in ("cuda", "cpu"):
            flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
            layout.pack(source, flat)
            layout.unpack(flat, destination)
            assert same(source, destination)
            destination = Mixed().to("cuda")
        layout.unpack(flat, host := Mixed())
        assert same(source.cpu(), host)

    def test_captured_graph_acts_on_new_weights(self):
        learner, policy = nn.Linear(3, 1).to("cuda"), nn.Linear(3, 1).to("cuda")
        layout = WeightLayout.from_weights(learner)
        flat, data = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda"), torch.ones(3, device="cuda")
        with torch.no_grad():
            policy(data)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                action = policy(data)
        fill(learner, 2.0)
        layout.pack(learner, flat)
        layout.unpack(flat, policy)
        graph.replay()
        assert action.item() == 8.0

    def test_both_transports_give_the_same_bits(self):
        """case 51, its second half"""
        context, bits = mp.get_context("spawn"), {}
        for transport in ("host", "ipc"):
            torch.manual_seed(0)
            learner, results, last = make_policy().to("cuda"), context.Queue(), 6
            scheme = SeqlockWeightSyncScheme(num_workers=1, transport=transport)
            scheme.init_on_sender(model_id="policy", model=learner)
            process = context.Process(target=work_on_device, args=(scheme.for_worker(0), last, results), daemon=True)
            process.start()
            try:
                scheme.connect()
                for _ in range(last - 1):
                    with torch.no_grad():
                        for parameter in learner.parameters():
                            parameter.normal_()
                    scheme.send(wait=DEADLINE)
                on_device, versions, bits[transport] = results.get(timeout=DEADLINE)
            finally:
                process.join(5.0)
                process.kill()
                process.join()
                scheme.shutdown()
            assert on_device == (transport == "ipc")
            assert versions == sorted(set(versions)) and versions[-1] == last  # skipped ones are never seen
            sent = [parameter.detach().view(torch.int32).flatten() for parameter in learner.parameters()]
            assert bits[transport] == torch.cat(sent).tolist()
        assert bits["host"] == bits["ipc"]

    def test_ipc_is_refused_with_the_reason(self):
        scheme, learner = SeqlockWeightSyncScheme(num_workers=1, transport="ipc", connect_timeout=0.2), make_policy()
        scheme.init_on_sender(model_id="policy", model=learner.to("cuda"))
        receiver, policy = scheme.for_worker(0), make_policy()
        receiver.init_on_receiver(model_id="policy", model=policy)
        receiver._receiver.ask()
        with pytest.raises(RuntimeError, match="its model is on the host"):
            scheme.connect()
