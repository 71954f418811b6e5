# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The gradient step of FastSAC as one CUDA graph: sample, normalise, losses, optimizers, targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer

from torchrl_ext.objectives._tensor_losses import Transition
from torchrl_ext.trainers._gradient_steps import Draws, GradientSteps, NotCapturedError
from torchrl_ext.trainers._graph_sampling import GraphSampling, why_not_inside

if TYPE_CHECKING:
    from torchrl_ext.trainers.fast_sac_learner import FastSACLearner

__all__ = ["FastSACStepper", "NotCapturedError"]

_WARM_UP_STEPS = 3


class FastSACStepper(GradientSteps):
    """Takes the gradient steps of a :class:`FastSACLearner` from tensors, captured and compiled where that is possible.

    The numbers are those of the learner's eager step for the same state and draws: bit-equal up to the order of sums
    in float32; under bfloat16 autocast the weights are rounded once per step, as autocast does at each use.

    Graphs      One launch is one step, or ``steps_per_graph`` steps where so many are due and the actor's turn fits.
                Each is captured when it is first needed, and again when the replay, the batch or a loaded state asks.
    Draws       Made inside the graph, from torch's CUDA generator or the replay's own, in the order of eager steps; for
                each generator torch's replay writes seed and offset by two launches of one number. Batches of one graph
                are drawn beside its computations. A replay that cannot be sampled inside (another
                device, priorities, transforms, prefetch) is sampled before each launch.
    Follows     Without a new capture: everything written to the replay, learning rates, statistics of the normaliser,
                ``gamma``, ``target_entropy`` and whatever else changes in place. Other options of the optimizers,
                ``tau`` and ``max_grad_norm`` are read at capture.
    Metrics     Stay in memory of the stepper; :meth:`metrics` copies it, once.
    Repeats     Sums by atomic additions (the projection, some gradients) differ in the last bits from run to run on
                CUDA, so that runs part after some hundred steps. Draws repeat exactly for the same seed.

    Args:
        learner (FastSACLearner): whose networks and optimizers.

    Keyword Args:
        capture (bool): ``True`` (default) needs CUDA; ``False`` runs the same steps launch by launch, on any device.
        compile (bool or dict): whether Inductor compiles losses and parameter updates, tuning elementwise kernels and
            reductions (some 80 s the first time); a dictionary gives other options, such as ``{}`` (40 s). Defaults
            to ``False``.
        steps_per_graph (int, optional): a multiple of the learner's ``policy_frequency``, which is the default.

    Raises:
        ValueError: if ``steps_per_graph`` is no such multiple.
        NotCapturedError: if the loss has no form in tensors.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl_ext.modules import make_fast_sac_actor, make_fast_sac_critic
        >>> from torchrl_ext.objectives import FastSACLoss
        >>> from torchrl_ext.trainers import FastSACLearner
        >>> actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=32)
        >>> critic = make_fast_sac_critic(observation_dim=3, action_dim=2, hidden_size=32)
        >>> learner = FastSACLearner(FastSACLoss(actor, critic), critic_lr=3e-4, actor_lr=3e-4, alpha_lr=3e-4)
        >>> stepper = FastSACStepper(learner, capture=False)
        >>> batch = learner.policy(TensorDict(observation=torch.randn(4, 3), batch_size=[4]))
        >>> batch["next"] = batch.clone().update({"reward": torch.ones(4, 1), "terminated": torch.zeros(4, 1).bool()})
        >>> stepper.step(batch, done=0)
        >>> sorted(stepper.metrics())
        ['alpha', 'entropy', 'loss_alpha', 'loss_critic', 'q_target', 'td_error']
    """

    def __init__(
        self,
        learner: FastSACLearner,
        *,
        capture: bool = True,
        compile: bool | dict[str, Any] = False,
        steps_per_graph: int | None = None,
    ) -> None:
        frequency = learner.policy_frequency
        self.steps_per_graph = frequency if steps_per_graph is None else steps_per_graph
        if self.steps_per_graph < 1 or self.steps_per_graph % frequency:
            raise ValueError(
                f"FastSACStepper: steps_per_graph must be a multiple of policy_frequency={frequency}, got "
                f"{steps_per_graph}."
            )
        super().__init__(learner, compile=compile)
        self._capturing = capture
        self._sampling: GraphSampling | None = None
        self._static: Transition | None = None
        # The capture's own, and that of its draws; made when the first graph is.
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        # By kind: whether it samples, how many steps it takes, whether a single one has the actor's turn.
        self._graphs: dict[tuple[bool, int, bool], torch.cuda.CUDAGraph] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets all graphs: after states were loaded into optimizers, or options changed that graphs hold."""
        if self._graphs and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # none of them may still run when its memory is given back
        self._graphs = {}
        self._warm: set[bool] = set()
        self._pool = torch.cuda.graph_pool_handle() if self._capturing else None
        self.updates.bind()

    # ------------------------------------------------------------------ taking steps

    def step(self, batch: TensorDictBase, *, done: int) -> None:
        """Takes one step from a batch, which is left as it is.

        Args:
            batch (TensorDictBase): ``[B]`` transitions with raw observations, on the learner's device.

        Keyword Args:
            done (int): steps taken before, which say whether it is the actor's turn.
        """
        with_actor = self._is_actors_turn(done)
        if not self._capturing:
            self._choose_metrics(False, batch)
            self._run([with_actor], lambda: batch)
        else:
            with torch.cuda.device(self.device):
                self._fill(self.losses.read(batch))
                self._graph(False, 1, with_actor).replay()
        self._has_actor_loss = self._has_actor_loss or with_actor

    def launch(self, replay: ReplayBuffer, most: int, *, done: int) -> int:
        """Samples and takes at most ``most`` steps in one launch; returns how many.

        Raises:
            NotCapturedError: if capturing failed. No step was taken.
        """
        if not self._capturing:
            self.step(replay.sample(), done=done)
            return 1
        reason = why_not_inside(replay, self.device)
        if reason is not None or not GraphSampling.can_draw(replay):
            if reason is not None:
                self._say(f"batches are sampled outside of the graph, because {reason}")
            self.step(replay.sample(), done=done)
            return 1
        if self._sampling is None or not self._sampling.matches(replay):
            self.reset()
            self._sampling = GraphSampling(replay)
        whole = done % self._frequency == 0 and most >= self.steps_per_graph
        count = self.steps_per_graph if whole else 1
        with_actor = whole or self._is_actors_turn(done)
        with torch.cuda.device(self.device):
            graph = self._graph(True, count, with_actor)
            with self._sampling.launching():
                graph.replay()
        self._has_actor_loss = self._has_actor_loss or with_actor
        return count

    # ------------------------------------------------------------------ capturing

    def _run_beside(self, pattern: Sequence[bool], sample: Callable[[], TensorDictBase]) -> None:
        """The same inside a capture, draws on a branch of their own: their small kernels hide behind large ones."""
        main, branch = cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", self._streams)
        branch.wait_stream(main)
        made: list[tuple[Draws, torch.cuda.Event]] = []
        with torch.cuda.stream(branch):
            for with_actor in pattern:
                draws, event = self._draw(sample, with_actor), torch.cuda.Event()
                event.record(branch)
                made.append((draws, event))
        self.updates.refresh()
        # All draws are kept to the end: memory freed here would be given to later draws, which run ahead.
        for draws, event in made:
            main.wait_event(event)
            self._take(draws)

    def _fill(self, batch: Transition) -> None:
        fresh = _tensors(batch)
        own = [] if self._static is None else _tensors(self._static)
        if own and [leaf.shape for leaf in own] == [leaf.shape for leaf in fresh]:
            torch._foreach_copy_(own, fresh)
            return
        if own:
            self.reset()
        self._static = _rebuilt(batch, [leaf.clone() for leaf in fresh])

    def _graph(self, inside: bool, count: int, with_actor: bool) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get((inside, count, with_actor))
        if graph is None:
            try:
                self._warm_up(inside)
                self._choose_metrics(inside)
                graph = self._captured(inside, count, with_actor)
            except Exception as error:  # whatever torch, Triton or a user's module raises inside a capture
                reason = str(error).strip().splitlines() or [""]
                raise NotCapturedError(f"{type(error).__name__}: {reason[0]}") from error
            self._graphs[inside, count, with_actor] = graph
        self._choose_metrics(inside)
        return graph

    def _captured(self, inside: bool, count: int, with_actor: bool) -> torch.cuda.CUDAGraph:
        pattern = [with_actor] if count == 1 else [self._is_actors_turn(turn) for turn in range(count)]
        graph, (stream, _) = torch.cuda.CUDAGraph(), cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", self._streams)
        sampling = self._sampling if inside else None
        if sampling is not None:
            sampling.register(graph)
        launching = nullcontext() if sampling is None else sampling.launching()
        # Thread-local: other threads, a collector's for one, may go on using the device.
        options: dict[str, Any] = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        with launching, torch.cuda.graph(graph, **options):
            self._run_beside(pattern, self._source(inside))
        return graph

    def _source(self, inside: bool) -> Callable[[], Any]:
        return self._sampling.draw if inside and self._sampling is not None else self._static_batch

    def _static_batch(self) -> Any:
        return self._static

    def _warm_up(self, inside: bool) -> None:
        """Compiles and allocates in steps of which no trace is left."""
        if inside in self._warm:
            return
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        generators = [torch.cuda.default_generators[self.device.index or 0]]
        if inside and self._sampling is not None and self._sampling.replay._rng is not None:
            generators.append(self._sampling.replay._rng)
        states = [(generator, generator.get_state()) for generator in generators]
        before: list[tuple[Tensor, Tensor]] = []
        try:
            batch = self._source(inside)()
            self._choose_metrics(inside, batch)
            before = [(tensor, tensor.clone()) for tensor in (*self.updates.changed(), self._metrics)]
            try:
                self._rehearse(batch)
            except Exception as error:  # an error of the step itself is raised again below
                if not self.compiled:
                    raise
                first = (str(error).strip().splitlines() or [""])[0]
                self._say(f"steps are captured but not compiled, because of {type(error).__name__}: {first}")
                self._compile(False)
                self._rehearse(batch)
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            for generator, state in states:
                generator.set_state(state)
        self._warm.add(inside)

    def _rehearse(self, batch: Any) -> None:
        # On the stream of the capture: what libraries allocate per stream is then there already.
        stream, _ = cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", self._streams)
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._run([False, True], lambda: batch)
        current.wait_stream(stream)


def _tensors(batch: Transition) -> list[Tensor]:
    leaves = [*batch.observations, *batch.next_observations, *batch[2:]]
    return [leaf for leaf in leaves if leaf is not None]


def _rebuilt(batch: Transition, leaves: list[Tensor]) -> Transition:
    count = len(batch.observations)
    weight = None if batch.weight is None else leaves[-1]
    action, reward, terminated, discount = leaves[2 * count : 2 * count + 4]
    return Transition(
        tuple(leaves[:count]), tuple(leaves[count : 2 * count]), action, reward, terminated, discount, weight
    )
