# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The comparison harness: fair turns, honest medians, exact JSON, and one sentence for what cannot run."""

from __future__ import annotations

import gc
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # torchrl's wheel installs a package named ``benchmarks`` as well

from benchmarks import cases, compare  # noqa: E402 (the path above must be set first)
from benchmarks.peers import PeerUnavailableError, motrixlab, motrixlab_weights  # noqa: E402
from benchmarks.presets import LARGE, SMALL, TINY, ReplaySizes  # noqa: E402
from benchmarks.timing import Candidate, Timing, interleave, round_order, summarise  # noqa: E402

CPU = torch.device("cpu")
KEYS = [
    "case",
    "device",
    "config",
    "ours_ms",
    "peer",
    "peer_ms",
    "limit",
    "limit_ms",
    "ratio_peer",
    "ratio_limit",
    "extra",
]


class FakeClock:
    """Seconds that pass only when a candidate says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def candidate(self, name: str, *milliseconds: float) -> Candidate:
        """Takes the given times in turn, the last one for ever."""
        times = iter(milliseconds)

        def run(_: object) -> None:
            self.log.append(name)
            self.now += next(times, milliseconds[-1]) / 1e3

        return Candidate(run)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class TestInterleave:
    """Contract: every candidate once per round, neighbours change, only the call and its synchronisation are timed."""

    def test_every_round_holds_every_candidate(self, clock):
        candidates = {name: clock.candidate(name, 1.0) for name in "abc"}
        interleave(candidates, rounds=12, warmup=0, clock=clock)
        turns = [tuple(clock.log[i : i + 3]) for i in range(0, 36, 3)]
        assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
        # All six orders come up equally often, so nobody always follows the same neighbour.
        assert {turn: turns.count(turn) for turn in turns} == dict.fromkeys(turns, 2)
        assert len(set(turns)) == 6

    def test_order_is_defined_for_warm_up_rounds(self):
        assert sorted(round_order(["a", "b"], -3)) == ["a", "b"]
        assert round_order(["only"], -1) == ["only"]

    def test_reports_medians_not_means(self, clock):
        candidates = {"slow once": clock.candidate("s", 1.0, 2.0, 900.0, 2.0, 1.0), "even": clock.candidate("e", 7.0)}
        timings = interleave(candidates, rounds=5, warmup=0, clock=clock)
        assert timings["slow once"].median_ms == pytest.approx(2.0)
        assert timings["even"].median_ms == pytest.approx(7.0)
        assert list(timings) == ["slow once", "even"]

    def test_percentiles_are_nearest_ranks(self):
        assert summarise([float(i) for i in range(101)]) == Timing(50.0, 10.0, 90.0, 95.0)
        assert summarise([3.0]) == Timing(3.0, 3.0, 3.0, 3.0)

    def test_warm_up_is_not_reported(self, clock):
        timings = interleave({"a": clock.candidate("a", 500.0, 500.0, 1.0)}, rounds=3, warmup=2, clock=clock)
        assert timings["a"] == Timing(*[pytest.approx(1.0)] * 4)

    def test_fresh_inputs_are_passed_on_and_not_timed(self, clock):
        seen = []

        def fresh() -> int:
            clock.now += 10.0
            return len(seen)

        timings = interleave({"a": Candidate(seen.append, fresh)}, rounds=3, warmup=0, clock=clock)
        assert seen == [0, 1, 2]
        assert timings["a"].median_ms == 0.0

    def test_synchronisation_is_timed_after_the_call_only(self, clock):
        pending = [0.0]

        def launch(_: object) -> None:
            pending[0] = 4e-3

        def synchronize() -> None:
            clock.now += pending[0]
            pending[0] = 0.0

        def fresh() -> None:
            pending[0] = 1.0  # left over from before: must end before the timer starts

        timings = interleave({"a": Candidate(launch, fresh)}, rounds=3, warmup=0, synchronize=synchronize, clock=clock)
        assert timings["a"].median_ms == pytest.approx(4.0)

    def test_garbage_collection_is_off_and_comes_back_after_an_error(self, clock):
        def fail(_: object) -> None:
            assert not gc.isenabled()
            raise RuntimeError("stop")

        assert gc.isenabled()
        with pytest.raises(RuntimeError, match="stop"):
            interleave({"a": Candidate(fail)}, rounds=1, clock=clock)
        assert gc.isenabled()

    def test_no_rounds_is_refused(self, clock):
        with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
            interleave({"a": clock.candidate("a", 1.0)}, rounds=0, clock=clock)


def comparison(**overrides) -> cases.Comparison:
    idle = Candidate(lambda _: None)
    fields = {"config": "small", "ours": idle, "limit_name": "memcpy", "limit": idle, "peer_name": "peer 1.0"}
    return cases.Comparison(**{**fields, "peer": idle, **overrides})


class TestRecord:
    """Contract: the keys are exact and ordered; a ratio is null when one of its sides is."""

    def test_keys_and_ratios(self):
        timings = {
            "ours": Timing(2.0, 1.0, 3.0, 3.5),
            "peer": Timing(5.0, 4.0, 6.0, 6.5),
            "limit": Timing(1.6, 1.5, 1.7, 1.8),
        }
        record = compare.make_record("ingest", CPU, comparison(bytes_moved=4_000_000), timings, rounds=7)
        assert list(record) == KEYS
        assert record["ratio_peer"] == 2.5
        assert record["ratio_limit"] == 1.25
        assert (record["case"], record["device"], record["config"]) == ("ingest", "cpu", "small")
        assert (record["peer"], record["limit"]) == ("peer 1.0", "memcpy")
        assert record["extra"]["ours_p10_p90_p95_ms"] == [1.0, 3.0, 3.5]
        assert record["extra"]["ours_gb_s"] == 2.0
        assert record["extra"]["rounds"] == 7
        assert record["extra"]["versions"]["torch"] == torch.__version__
        assert json.loads(json.dumps(record)) == record

    def test_missing_peer_is_null_with_its_reason(self):
        timings = {"ours": Timing(2.0, 1.0, 3.0, 3.5), "limit": Timing(1.0, 1.0, 1.0, 1.0)}
        missing = comparison(peer=None, peer_missing="it is not installed.")
        record = compare.make_record("ingest", CPU, missing, timings, rounds=1)
        assert list(record) == KEYS
        assert record["peer_ms"] is None
        assert record["ratio_peer"] is None
        assert record["ratio_limit"] == 2.0
        assert record["extra"]["peer_missing"] == "it is not installed."

    def test_other_candidates_are_reported_in_extra(self):
        with_other = comparison(others={"peer_light": Candidate(lambda _: None)})

        def one(device: torch.device, sizes: list[ReplaySizes]) -> Iterator[cases.Comparison]:
            yield with_other

        (record,) = compare.run_case("fake", one, CPU, sizes=[TINY], rounds=2)
        assert list(record) == KEYS
        assert record["extra"]["peer_light_ms"] >= 0.0


class TestCommandLine:
    """Contract: bad input is one sentence and exit status 2; nothing is measured."""

    def test_unknown_case_lists_the_cases(self, capsys):
        assert compare.main(["ingset"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err == f"compare.py: unknown case 'ingset'; the cases are {', '.join(sorted(cases.CASES))}.\n"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_cuda_without_a_gpu(self, capsys, fake_case):
        assert compare.main([fake_case, "--device", "cuda"]) == 2
        assert "visible GPU" in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--rounds", "--threads"])
    def test_counts_must_be_positive(self, option, capsys):
        with pytest.raises(SystemExit) as caught:
            compare.main(["ingest", option, "0"])
        assert caught.value.code == 2
        assert "must be at least 1, got 0" in capsys.readouterr().err

    def test_thread_clock_needs_one_cpu_thread(self, capsys, fake_case):
        assert compare.main([fake_case, "--clock", "thread", "--threads", "2"]) == 2
        assert "--clock thread sees one CPU thread only" in capsys.readouterr().err

    def test_out_receives_the_printed_lines(self, fake_case, tmp_path, capsys, restore_threads):
        out = tmp_path / "report.jsonl"
        assert compare.main([fake_case, "--rounds", "1", "--clock", "thread", "--out", str(out)]) == 0
        assert out.read_text() == capsys.readouterr().out
        assert json.loads(out.read_text())["case"] == fake_case
        assert json.loads(out.read_text())["extra"]["clock"] == "thread"

    def test_runs_as_a_script_beside_another_package_named_benchmarks(self):
        command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "nothing"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
        assert done.returncode == 2
        assert done.stderr.startswith("compare.py: unknown case 'nothing'")

    @pytest.mark.parametrize("out", ["nowhere/report.jsonl", "."])
    def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
        self, fake_case, tmp_path, capsys, out
    ):
        with pytest.raises(SystemExit) as caught:
            compare.main([fake_case, "--out", str(tmp_path / out)])
        said, err = capsys.readouterr()
        assert (caught.value.code, said) == (2, "")
        assert err.endswith(f"--out: must be a file in a folder that exists, got {tmp_path / out}\n")

    def test_what_was_measured_before_an_error_is_in_the_file(
        self, fake_case, tmp_path, capsys, monkeypatch, restore_threads
    ):
        def none(device: torch.device, sizes: list[ReplaySizes]) -> Iterator[cases.Comparison]:
            raise ValueError("it is measured elsewhere.")
            yield

        monkeypatch.setitem(cases.CASES, "none", f"{__name__}:none")
        monkeypatch.setattr(sys.modules[__name__], "none", none, raising=False)
        out = tmp_path / "report.jsonl"
        assert compare.main([fake_case, "none", "--rounds", "1", "--out", str(out)]) == 2
        said, err = capsys.readouterr()
        assert err == "compare.py: it is measured elsewhere.\n"
        assert out.read_text() == said != ""

    @pytest.fixture
    def fake_case(self, monkeypatch):
        def one(device: torch.device, sizes: list[ReplaySizes]) -> Iterator[cases.Comparison]:
            yield comparison()

        monkeypatch.setitem(cases.CASES, "fake", f"{__name__}:one")
        monkeypatch.setattr(sys.modules[__name__], "one", one, raising=False)
        return "fake"


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class TestSizes:
    """Contract: sizes that would not be equal work for the peer, or would wrap inside a run, are refused."""

    def test_the_sizes_of_the_report(self):
        assert (SMALL.streams, SMALL.observation, SMALL.critic_observation, SMALL.action) == (256, 48, 60, 12)
        assert (LARGE.streams, LARGE.observation, LARGE.critic_observation, LARGE.action) == (2048, 98, 120, 29)
        cuda = torch.device("cuda")
        for sizes in (SMALL, LARGE):
            assert (sizes.run_slots, sizes.slots(CPU), sizes.slots(cuda)) == (8, 128, 1024)
            assert (sizes.sample_rows(CPU), sizes.sample_rows(cuda)) == (8192, 65536)

    @pytest.mark.parametrize("bad", [{"slots_cpu": 12}, {"slots_cuda": 8}, {"sample_rows_cpu": 100}])
    def test_nonsense_is_refused(self, bad):
        with pytest.raises(ValueError, match="must be a multiple"):
            ReplaySizes(name="bad", streams=8, observation=1, critic_observation=1, action=1, **bad)


class TestPeer:
    """Contract: a package that cannot be imported is a PeerUnavailableError that says how to get it."""

    def test_missing_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "motrix_rl_builtin", None)
        for module in [name for name in sys.modules if name.startswith("motrix_rl_builtin.")]:
            monkeypatch.delitem(sys.modules, module)
        with pytest.raises(PeerUnavailableError, match=r"pip install --no-deps -r benchmarks/requirements-peers\.txt"):
            build_tiny_peer()

    def test_where_omegaconf_is_missing_more_than_one_module_can_be_imported(self, monkeypatch):
        for name in [name for name in sys.modules if name.split(".")[0] == "omegaconf"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
        monkeypatch.setattr(sys, "path_importer_cache", {})
        imported = [motrixlab._import("json"), motrixlab._import("csv")]
        assert [module.__name__ for module in imported] == ["json", "csv"]
        assert sys.modules["omegaconf"].MISSING == "???"
        monkeypatch.delitem(sys.modules, "omegaconf")

    def test_a_report_names_the_release_that_is_installed(self, monkeypatch):
        real, name = motrixlab.importlib.metadata.version, motrixlab.DISTRIBUTION
        monkeypatch.setattr(motrixlab.importlib.metadata, "version", lambda what: "9.9" if what == name else real(what))
        push = next(cases.load("ring_push")(CPU, [TINY]))
        drain = next(cases.load("ring_host_drain")(CPU, [TINY]))
        assert push.peer_name == "motrix-rl-builtin 9.9 push"
        assert drain.peer_name == "motrix-rl-builtin 9.9 Learner.drain"
        assert motrixlab_weights.name() == "motrix-rl-builtin 9.9 HostWeightReceiver"

    def test_buffer_samples_what_was_written(self):
        pytest.importorskip("motrix_rl_builtin")
        buffer = build_tiny_peer()
        floats = [torch.ones(4, 2, width) for width in (3, 5, 1)]
        flags = torch.zeros(4, 2, dtype=torch.long)
        last = flags.clone()
        last[1, 1] = 1
        payload = motrixlab.final_payload(torch.tensor([1]), torch.full((1, 3), 9.0), torch.full((1, 5), 9.0))
        buffer.extend_batch(*floats, torch.ones(4, 2), last, last, final_payloads=[None, payload, None, None])
        successors = buffer.sample(64)["next_obs"]
        assert set(successors.flatten().tolist()) == {1.0, 9.0}


def build_tiny_peer():
    options = {"n_steps": 1, "device": CPU, "final_obs_bootstrap": True}
    return motrixlab.build_buffer(streams=2, slots=8, observation=3, critic_observation=5, action=1, **options)


class TestManyStreamCases:
    """Contract: the cases of many streams run end to end at tiny sizes, their peer included."""

    @staticmethod
    def records(name: str) -> list[dict]:
        return list(compare.run_case(name, cases.load(name), CPU, sizes=[TINY], rounds=1))

    def test_routed_extend_runs(self, monkeypatch):
        from benchmarks.cases import write_back

        monkeypatch.setattr(write_back, "RECORDS", 16)
        monkeypatch.setattr(write_back, "STREAM_COUNTS", (2, 4))
        records = self.records("routed_extend")
        assert [record["config"] for record in records] == [
            f"{streams} streams, {order}" for streams in (2, 4) for order in ("in order", "shuffled")
        ]
        assert all(record["ratio_peer"] > 0 and record["ratio_limit"] > 0 for record in records)

    def test_write_back_runs(self, monkeypatch):
        from benchmarks.cases import write_back

        monkeypatch.setattr(write_back, "LATENT", 8)
        alone, eventual, ordered = self.records("write_back")
        assert alone["ratio_peer"] > 0 and alone["extra"]["submit_until_applied_ms"] > 0
        assert eventual["ratio_limit"] > 0 and ordered["ratio_limit"] > 0

    def test_dreamer_replay_path_runs(self, monkeypatch):
        from benchmarks.cases import dreamer

        small = dreamer.Recipe(name="walker", streams=3, windows=2, steps=4, state=2, belief=3, pixels=True, slots=16)
        monkeypatch.setattr(dreamer, "RECIPES", (small,))
        (record,) = self.records("dreamer_replay_path")
        assert record["ratio_limit"] > 0
        assert (record["peer_ms"] is None) == ("peer_missing" in record["extra"])


class TestRingCases:
    """Contract: the cases of rings and weights run end to end at a tiny size, with or without their peer."""

    def test_drains_run_from_one_ring_and_from_four(self):
        one, four = compare.run_case("ring_host_drain", cases.load("ring_host_drain"), CPU, sizes=[TINY], rounds=2)
        assert (one["config"], four["config"]) == ("tiny", "tiny, 4 collectors")
        assert one["ratio_limit"] > 0 and four["ratio_limit"] > 0

    def test_push_runs(self):
        (record,) = compare.run_case("ring_push", cases.load("ring_push"), CPU, sizes=[TINY], rounds=2)
        assert list(record) == KEYS
        assert record["ratio_limit"] > 0

    def test_snapshots_of_a_busy_publisher_are_counted_and_whole(self):
        rest, busy = compare.run_case("weight_sync", cases.load("weight_sync"), CPU, sizes=[TINY], rounds=2)
        assert rest["ratio_limit"] > 0
        assert busy["extra"]["snapshots"] == 2 + compare.WARMUP_ROUNDS
        assert busy["extra"]["snapshots_s"] > 0

    def test_a_publisher_ends_with_the_process_that_started_it(self):
        script = (
            "import contextlib, multiprocessing, sys, time, torch\n"
            f"sys.path.insert(0, {str(ROOT)!r})\n"
            "from benchmarks.cases import weights\n"
            "turn = torch.full((1,), weights.OURS).share_memory_()\n"
            "weights._start(contextlib.ExitStack(), turn, weights._publish_on, (weights.SeqlockSlots(8), None, turn))\n"
            "print(multiprocessing.active_children()[0].pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            publisher = Path(f"/proc/{int(process.stdout.readline())}/cmdline")
            deadline = time.monotonic() + 30
            while not publisher.read_bytes():  # as long as the process only begins to run its program
                assert time.monotonic() < deadline, "the publisher has ended, or never ran"
                time.sleep(0.05)
            process.kill()  # or SIGTERM, which ends Python as abruptly
        deadline = time.monotonic() + 30
        # Nothing is left there of what ended and nobody waited for.
        while publisher.exists() and publisher.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def test_the_peer_gets_every_row_that_we_get(self):
        pytest.importorskip("motrix_rl_builtin", reason="the peer comes with benchmarks/requirements-peers.txt")
        from benchmarks.cases import ring_peers, ring_sources

        pushes = ring_sources.Pushes(TINY)
        (learner, plain), missing = ring_peers.peer_drains(TINY, [pushes], CPU, "host", ended=True)
        assert missing is None
        for candidate in (learner, plain):
            candidate.run(candidate.fresh())  # raises where the run is not all there

    def test_device_memory_is_not_measured_without_a_gpu(self):
        with pytest.raises(ValueError, match="--device cuda"):
            next(cases.load("ring_ipc_drain")(CPU, [TINY]))


class TestCollectorRate:
    """Contract: every candidate collects the same rows; it is a case of the CPU."""

    def test_case_runs(self, monkeypatch):
        pytest.importorskip("envpool")
        from benchmarks.cases import collection

        def refuse(*_: object, **__: object) -> None:
            raise PeerUnavailableError("not now.")

        monkeypatch.setattr(collection, "SECONDS", 0.05)
        monkeypatch.setattr(collection, "TASKS", (collection.Task("Pendulum-v1", 4, 3, 1),))
        monkeypatch.setattr(collection.torchrl_collector, "SharedReplayCollector", refuse)
        monkeypatch.setattr(collection.motrixlab_collector, "RingedCollector", refuse)
        (record,) = compare.run_case("collector_rate", cases.load("collector_rate"), CPU, sizes=[TINY], rounds=1)
        assert record["config"] == "Pendulum-v1, 4 streams"
        assert record["ratio_limit"] > 0
        assert record["extra"]["rows"] % 4 == 0 and record["extra"]["ours_rows_s"] > 0

    def test_motrixlabs_collector_makes_the_rows_it_is_asked_for_and_rests(self):
        pytest.importorskip("envpool")
        pytest.importorskip("motrix_rl_builtin")
        from benchmarks.peers.motrixlab_collector import RingedCollector

        options = {"task_id": "Pendulum-v1", "num_envs": 4, "num_threads": 1, "seed": 0}
        with closing(RingedCollector(options, torch.nn.Linear(3, 1), slots=64, drain_every=1e-3)) as collector:
            for wanted in (100, 150):
                collector.collect(200 if wanted == 150 else 400)
                assert collector._control.collector_steps == wanted
            assert collector._drain() == 0

    def test_motrixlabs_worker_ends_with_the_process_that_started_it(self, tmp_path):
        pytest.importorskip("envpool")
        pytest.importorskip("motrix_rl_builtin")
        script = tmp_path / "start.py"
        script.write_text(
            "import sys, time, torch\n"
            f"sys.path.insert(0, {str(ROOT)!r})\n"
            "from benchmarks.peers.motrixlab_collector import RingedCollector\n"
            "if __name__ == '__main__':\n"
            "    options = {'task_id': 'Pendulum-v1', 'num_envs': 4, 'num_threads': 1, 'seed': 0}\n"
            "    collector = RingedCollector(options, torch.nn.Linear(3, 1), slots=64, drain_every=1e-3)\n"
            "    print(collector._worker.pid, flush=True)\n"
            "    time.sleep(60)\n"
        )
        with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
            worker = Path(f"/proc/{int(process.stdout.readline())}/cmdline")
            assert worker.read_bytes()
            process.kill()
        deadline = time.monotonic() + 30
        # Nothing is left there of what ended and nobody waited for.
        while worker.exists() and worker.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def test_motrixlabs_worker_ends_when_the_wait_for_it_fails(self, monkeypatch):
        pytest.importorskip("envpool")
        pytest.importorskip("motrix_rl_builtin")
        from benchmarks.peers import motrixlab_collector

        monkeypatch.setattr(motrixlab_collector, "DEADLINE_S", -1.0)
        before = set(multiprocessing.active_children())
        with pytest.raises(TimeoutError, match="RingedCollector: the worker must be done"):
            motrixlab_collector.RingedCollector(
                {"task_id": "Pendulum-v1", "num_envs": 4, "num_threads": 1, "seed": 0},
                torch.nn.Linear(3, 1),
                slots=64,
                drain_every=1e-3,
            )
        assert set(multiprocessing.active_children()) <= before

    def test_without_envpool_it_is_one_sentence(self, monkeypatch, capsys, restore_threads):
        monkeypatch.setitem(sys.modules, "envpool", None)
        assert compare.main(["collector_rate", "--rounds", "1"]) == 2
        assert capsys.readouterr().err == (
            "compare.py: collector_rate needs EnvPool, which comes with the extra 'sota' and needs Python 3.11 or "
            "newer.\n"
        )

    def test_it_is_not_measured_on_a_gpu(self):
        with pytest.raises(ValueError, match="--device cpu"):
            next(cases.load("collector_rate")(torch.device("cuda"), [TINY]))


class TestReplayCases:
    """Contract: every case runs end to end at a tiny size, with and without its peer."""

    @pytest.fixture(autouse=True)
    def replay(self):
        data = pytest.importorskip("torchrl_ext.data")
        if not hasattr(data, "SlotReplayBuffer"):
            pytest.skip("torchrl_ext.data has no replay buffer")

    @pytest.mark.parametrize("name", ["ingest", "sample", "sample_nstep"])
    def test_case_runs(self, name):
        pytest.importorskip("motrix_rl_builtin")
        (record,) = compare.run_case(name, cases.load(name), CPU, sizes=[TINY], rounds=1)
        assert list(record) == KEYS
        assert (record["case"], record["config"]) == (name, "tiny")
        assert min(record[key] for key in KEYS if key.endswith("_ms")) > 0.0
        assert record["ratio_peer"] == pytest.approx(record["peer_ms"] / record["ours_ms"], rel=1e-2)
        assert record["ratio_limit"] == pytest.approx(record["ours_ms"] / record["limit_ms"], rel=1e-2)

    @pytest.mark.parametrize("name", ["ingest", "sample"])
    def test_case_runs_without_its_peer(self, name, monkeypatch):
        def refuse(module: str) -> None:
            raise PeerUnavailableError("it is not installed.")

        monkeypatch.setattr(motrixlab, "_import", refuse)
        (record,) = compare.run_case(name, cases.load(name), CPU, sizes=[TINY], rounds=1)
        assert record["peer_ms"] is None
        assert record["extra"]["peer_missing"] == "it is not installed."
        assert record["ours_ms"] > 0.0

    def test_all_candidates_read_the_same_run(self):
        from benchmarks.cases.replay_sources import make_source

        source = make_source(TINY, CPU, ended=True, seed=3)
        packed, view = source.packed, source.packed.layout.view(source.packed.rows)
        assert source.block.numel() == packed.rows.numel() + packed.finals.numel()
        for key, field in zip(("observation", "critic_observation", "action"), source.fields[:3], strict=True):
            assert torch.equal(view[key], field)
        ended = view["next", "done"].squeeze(-1)
        assert torch.equal(ended.long(), source.fields[4])
        assert torch.equal(ended.flatten().nonzero().squeeze(-1), packed.final_rows)

    def test_peer_gets_the_same_final_observations(self):
        pytest.importorskip("motrix_rl_builtin", reason="the peer comes with benchmarks/requirements-peers.txt")
        from benchmarks.cases.replay_sources import make_source

        source = make_source(TINY, CPU, ended=True, seed=3)
        packed = source.packed
        finals = packed.layout.view_successors(packed.finals)
        payloads = [payload for payload in source.payloads if payload is not None]
        assert torch.equal(torch.cat([payload.obs for payload in payloads]), finals["observation"])
