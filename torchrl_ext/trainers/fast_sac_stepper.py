# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The gradient step of FastSAC as one CUDA graph: sample, normalise, losses, optimizers, targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer

from torchrl_ext.objectives._tensor_losses import Transition
from torchrl_ext.trainers._counter_draws import CounterDraws
from torchrl_ext.trainers._gradient_steps import Draws, GradientSteps, NotCapturedError
from torchrl_ext.trainers._graph_sampling import GraphSampling, why_not_inside
from torchrl_ext.trainers._static_batch import StaticBatch

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
    Draws       Made inside the graph by kernels, as functions of seed and offset of a generator: of torch's CUDA
                generator for noise, of the replay's own for rows where it has one. Every step moves the generator on,
                so that seeding it, its states and checkpoints of them count as ever, whatever graphs take the steps;
                the numbers are others than torch's operations draw there. The device follows by itself: a replay is
                the only launch, and one small copy goes before it where the generator was seeded or drawn from
                elsewhere. Batches of one graph are drawn beside its computations. A replay that cannot be sampled
                inside (another device, priorities, transforms, prefetch) is sampled before each launch. Without Triton
                and on other devices torch's operations draw, in the order of eager steps; in a graph torch's replay
                then writes seed and offset by two launches of one number for each generator.
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
        super().__init__(learner, compile=compile, most=self.steps_per_graph)
        self._capturing = capture
        self._sampling: GraphSampling | None = None
        self._static: StaticBatch | None = None
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
        with self._on_device():
            if not self._capturing:
                self._take_one(False, lambda _: batch, with_actor, self._counters(False))
            else:
                self._fill(self.losses.read(batch))
                self._replay(self._graph(False, 1, with_actor), False, 1)
        self._has_actor_loss = self._has_actor_loss or with_actor

    def launch(self, replay: ReplayBuffer, most: int, *, done: int) -> int:
        """Samples and takes at most ``most`` steps in one launch; returns how many.

        Raises:
            NotCapturedError: if capturing failed. No step was taken.
        """
        if not self._can_draw(replay):
            self.step(replay.sample(), done=done)
            return 1
        sampling = self._sample_from(replay)
        whole = self._capturing and done % self._frequency == 0 and most >= self.steps_per_graph
        count = self.steps_per_graph if whole else 1
        with_actor = whole or self._is_actors_turn(done)
        with self._on_device():
            graph = self._graph(True, count, with_actor) if self._capturing else None
            with sampling.launching():
                if graph is None:
                    self._take_one(True, sampling.draw, with_actor, self._counters(True))
                else:
                    self._replay(graph, True, count)
        self._has_actor_loss = self._has_actor_loss or with_actor
        return count

    def prepare(self, replay: ReplayBuffer) -> None:
        """Compiles and captures the whole graph that :meth:`launch` of a replay takes; no step is taken.

        Raises:
            NotCapturedError: if capturing failed.
        """
        if self._capturing and self._can_draw(replay):
            self._sample_from(replay)
            with self._on_device():
                self._graph(True, self.steps_per_graph, True)

    def _sample_from(self, replay: ReplayBuffer) -> GraphSampling:
        if self._sampling is None or not self._sampling.matches(replay):
            self.reset()
            self._sampling = GraphSampling(replay, self._counter, self.steps_per_graph)
        return self._sampling

    def _can_draw(self, replay: ReplayBuffer) -> bool:
        """Whether batches are drawn here; without graphs only kernels are."""
        if not self._capturing and self._counter is None:
            return False
        reason = why_not_inside(replay, self.device)
        if reason is not None:
            self._say(f"batches are sampled outside of the graph, because {reason}")
        return reason is None and GraphSampling.can_draw(replay)

    def _on_device(self) -> AbstractContextManager[Any]:
        used = self._capturing or self.device.type == "cuda"
        return torch.cuda.device(self.device) if used else nullcontext()

    def _counters(self, inside: bool) -> list[CounterDraws]:
        """Of one kind of graph: of noise, and of rows where that is another."""
        rows = self._sampling.counter if inside and self._sampling is not None else None
        return [counter for counter in dict.fromkeys((self._counter, rows)) if counter is not None]

    def _replay(self, graph: torch.cuda.CUDAGraph, inside: bool, count: int) -> None:
        counters = self._counters(inside)
        for counter in counters:
            counter.place()
        graph.replay()
        for counter in counters:
            counter.launched(count)

    # ------------------------------------------------------------------ capturing

    def _run_beside(self, pattern: Sequence[bool], inside: bool) -> None:
        """Takes one step per entry of ``pattern``, which says whether the actor has its turn, inside a capture.

        Draws have a branch of their own: their small kernels hide behind large ones.
        """
        main, branch = cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", self._streams)
        branch.wait_stream(main)
        made: list[tuple[Draws, torch.cuda.Event]] = []
        source = self._source(inside)
        with torch.cuda.stream(branch):
            for turn, with_actor in enumerate(pattern):
                draws, event = self._draw(source, with_actor, turn), torch.cuda.Event()
                if turn == len(pattern) - 1:
                    for counter in self._counters(inside):
                        counter.advance(len(pattern))
                event.record(branch)
                made.append((draws, event))
        self.updates.refresh()
        # All draws are kept to the end: memory freed here would be given to later draws, which run ahead.
        for draws, event in made:
            main.wait_event(event)
            self._take(draws)

    def _fill(self, batch: Transition) -> None:
        if self._static is None or not self._static.take(batch):
            if self._static is not None:
                self.reset()
            self._static = StaticBatch(batch)

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
        if inside and self._sampling is not None:
            self._sampling.register(graph)
        # Thread-local: other threads, a collector's for one, may go on using the device.
        options: dict[str, Any] = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        with self._launching(inside), torch.cuda.graph(graph, **options):
            self._run_beside(pattern, inside)
        return graph

    def _launching(self, inside: bool) -> AbstractContextManager[Any]:
        return self._sampling.launching() if inside and self._sampling is not None else nullcontext()

    def _source(self, inside: bool) -> Callable[[int], Any]:
        if inside and self._sampling is not None:
            return self._sampling.draw
        return lambda _: cast(StaticBatch, self._static).batch

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
            with self._launching(inside):  # other threads may write to the replay
                batch = self._source(inside)(0)
            for counter in self._counters(inside):
                counter.advance(0)
            self._choose_metrics(inside, self.losses.read(batch))
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
                self.updates.refresh()
                for with_actor in (False, True):
                    self._take(self._draw(lambda _: batch, with_actor))
        current.wait_stream(stream)
