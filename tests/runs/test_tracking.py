"""Hooks on the result stream, and the adapter that writes it for TensorBoard."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from arrays import ingested
from command import fedcache, ok

import fedcache as fc
from fedcache.config import Home
from fedcache.progress import Round, Silent
from fedcache.runs import events, loop
from fedcache.runs.trackers import choose, seeds
from fedcache.runs.trackers.tensorboard import TensorBoard

TRAIN = ("train", "--method", "fedavg", "--scheme", "iid", "--clients", 3, "--participation", "all")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return ingested(tmp_path)


class Writer:
    """What ``SummaryWriter`` is told, by directory."""

    made: dict[str, list[Writer]]
    broken = False

    def __init__(self, folder: str) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"events.out.tfevents.{len(self.made.setdefault(folder, []))}").touch()
        self.made[folder].append(self)
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str]] = []
        self.hparams: list[tuple[dict[str, Any], dict[str, float]]] = []
        self.open = True

    def add_scalar(self, tag: str, value: float, step: int, walltime: float | None) -> None:
        assert self.open
        assert walltime is None, "the library takes the time of a run that is not private"
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str) -> None:
        self.texts.append((tag, text))

    def add_hparams(self, given: dict[str, Any], metrics: dict[str, float], run_name: str) -> None:
        assert run_name == ".", "or TensorBoard shows a run of its own"
        self.hparams.append((given, metrics))

    def close(self) -> None:
        self.open = False


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Writer]]:
    """A TensorBoard that remembers, installed or not."""
    monkeypatch.setattr(Writer, "made", {}, raising=False)
    monkeypatch.setattr(choose, "find_spec", lambda _name: object())
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Writer.made


def test_a_run_is_written_once_whole_and_again_from_what_is_stored(
    mine: Path, own_home: Path, writers: dict[str, list[Writer]]
) -> None:
    words = (*TRAIN, "--rounds", 4, "--seeds", "0-1", "--eval-every", 2, "--track", "tensorboard")
    first = ok(*words).data
    assert not first["reused"]
    folder = own_home / "runs" / "tensorboard" / Path(first["path"]).name
    assert sorted(writers) == [str(folder / "seed-0"), str(folder / "seed-1")]
    told = [json.loads(line) for line in (Path(first["path"]) / "rounds.jsonl").read_text().splitlines()]
    for seed in (0, 1):
        (writer,) = writers[str(folder / f"seed-{seed}")]
        mine_ = [r for r in told if r["seed"] == seed]
        assert [(v, n) for t, v, n in writer.scalars if t == "accuracy"] == [
            (r["accuracy"], r["round"]) for r in mine_ if r["accuracy"] is not None
        ]
        assert [n for t, _, n in writer.scalars if t == "bytes/up"] == [1, 2, 3, 4]
        assert [v for t, v, _ in writer.scalars if t == "bytes/down"][-1] == sum(
            r["traffic"]["down_bytes"] for r in mine_
        )
        ((given, metrics),) = writer.hparams
        assert metrics == {"hparam/accuracy": mine_[-1]["accuracy"]}
        assert {"method", "dataset", "lr", "batch"} <= set(given)
        assert "| lr | " in writer.texts[0][1]
        assert not writer.open
    again = ok(*words).data
    assert again["reused"]
    assert again["digest"] == first["digest"] == ok(*[w for w in words if w != words[-1]][:-1]).data["digest"]
    for seed in (0, 1):
        before, now = writers[str(folder / f"seed-{seed}")]
        assert now.scalars == before.scalars
        assert len(list((folder / f"seed-{seed}").iterdir())) == 1, "what lay there is replaced"


def test_a_run_that_goes_on_is_written_once(mine: Path, tmp_path: Path, writers: dict[str, list[Writer]]) -> None:
    from fedcache.config import Home, PartitionConfig, TrainConfig
    from fedcache.process import Stop
    from fedcache.runs.loop import train

    class StopAfter(Silent):
        left, flag = 3, Stop()

        def advance(self, units: int) -> None:
            self.left -= units
            if self.left <= 0:
                self.flag.ask()

    config = TrainConfig(method="fedavg", rounds=5, participation="all", store=str(mine))
    home, dealt, observer = Home.from_environment(), PartitionConfig("iid", 3), StopAfter()
    for more in ({"observer": observer, "stop": observer.flag}, {}):
        board = choose.tracker(f"tensorboard:{tmp_path / 'boards'}", home.runs)
        stops = pytest.raises(fc.FedcacheError, match="Stopped") if more else nullcontext()
        with stops:
            train(config, home, partition=dealt, hooks=[board], **more)
        board.close()
    ((folder, (stopped, whole)),) = writers.items()
    assert folder.startswith(str(tmp_path / "boards"))
    assert [n for t, _, n in stopped.scalars if t == "bytes/up"] == [1, 2, 3]
    assert [n for t, _, n in whole.scalars if t == "bytes/up"] == [1, 2, 3, 4, 5]
    assert stopped.scalars == [s for s in whole.scalars if s[2] <= 3]
    assert len(list(Path(folder).iterdir())) == 1


def test_every_point_of_a_grid_is_a_run_of_its_own_also_beyond_the_files_that_may_be_open(
    mine: Path, tmp_path: Path, writers: dict[str, list[Writer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "OPEN", 2)
    words = ("grid", *TRAIN[1:], "--set", "head=linear", "--set", "opt=sgd", "--set", "reset_opt=false", "--set",
             "batch=8", "--rounds", 3, "--sweep", "lr=0.4,0.2,0.1,0.05")  # fmt: skip
    done = ok(*words, "--track", f"tensorboard:{tmp_path / 'b'}").data
    assert len(writers) == 4
    for point in done["points"]:
        (writer,) = writers[str(tmp_path / "b" / Path(point["path"]).name / "seed-0")]
        assert [n for t, _, n in writer.scalars if t == "bytes/up"] == [1, 2, 3]
        assert f"| lr | {point['sweep']['lr']} |" in writer.texts[0][1]
        assert not writer.open


def test_a_tracker_that_cannot_write_costs_no_training(
    mine: Path, writers: dict[str, list[Writer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "broken", True)
    done = ok(*TRAIN, "--rounds", 2, "--track", "tensorboard")
    assert not writers
    (warning,) = done.envelope["warnings"]
    assert "TensorBoard failed in round 1 of seed 0" in warning
    assert "No space left" in warning
    assert ok(*TRAIN, "--rounds", 2).data["reused"]


def test_what_is_not_installed_or_not_known_is_refused_before_any_training(
    mine: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda _name: None)
    done = fedcache(*TRAIN, "--track", "tensorboard", "--json")
    assert done.code == 6
    assert "pip install 'fedcache[tensorboard]'" in done.envelope["error"]["hint"]
    for command in (TRAIN, ("grid", *TRAIN[1:])):
        wrong = fedcache(*command, "--track", "tensorbord", "--json")
        assert wrong.code == 2
        assert "Did you mean 'tensorboard'?" in wrong.envelope["error"]["message"]
    assert fedcache(*TRAIN, "--track", "tensorboard:", "--json").code == 2
    assert not (own_home / "runs").exists()


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="the extra tensorboard is not installed")
def test_tensorboard_itself_reads_what_is_written(mine: Path, tmp_path: Path) -> None:
    words = (*TRAIN, "--rounds", 3, "--eval-every", 1, "--track", f"tensorboard:{tmp_path / 'boards'}")
    made = ok(*words).data
    ok(*words)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "boards" / Path(made["path"]).name / "seed-0"))
    read.Reload()
    assert [e.step for e in read.Scalars("accuracy")] == [1, 2, 3]
    assert read.Scalars("hparam/accuracy")[0].value == pytest.approx(made["accuracy"]["mean"])
    assert "| lr | " in read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()


def test_on_round_is_told_what_the_result_says(mine: Path) -> None:
    told: list[Round] = []
    dealt = fc.partition(mine, "iid", clients=3)
    run = fc.train("fedavg", mine, dealt, rounds=3, seeds=range(2), eval_every=1, on_round=told.append)
    assert [(r.seed, r.round, r.stored) for r in told] == [(s, n, False) for s in (0, 1) for n in (1, 2, 3)]
    assert [told[2].accuracy, told[5].accuracy] == run.accuracy["per_seed"]
    assert told[2].sent_bytes + told[5].sent_bytes == run.traffic["exact"]["up_bytes"]
    assert told[0].settings["lr"] == run.result["hyperparameters"]["lr"]
    again: list[Round] = []
    assert fc.train("fedavg", mine, dealt, rounds=3, seeds=range(2), eval_every=1, on_round=again.append).reused
    assert all(r.stored for r in again)
    assert [r.accuracy for r in again] == [r.accuracy for r in told]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_on_round_of_a_grid_says_which_point(mine: Path, jobs: int) -> None:
    told: list[Round] = []
    options = {"rounds": 2, "execution": "sequential"}
    dealt = fc.partition(mine, "iid", clients=3)
    grid = fc.grid("fedavg", mine, dealt, lr=[0.1, 0.02], on_round=told.append, options=options, jobs=jobs)
    for point in grid.points:
        mine_ = [r for r in told if r.path == point.run.path]
        assert [r.round for r in mine_] == [1, 2]
        assert {r.point for r in mine_} == {f"lr={point.sweep['lr']}"}
        assert {r.points for r in mine_} == {2}


def test_the_observer_of_a_grid_hears_every_round_of_every_point(mine: Path) -> None:
    heard = Told()
    dealt = fc.partition(mine, "iid", clients=3)
    fc.grid("fedavg", mine, dealt, lr=[0.1, 0.02], observer=heard, options={"rounds": 2})
    rounds = sorted((r.point, r.round) for r in heard.rounds)
    assert rounds == [("lr=0.02", 1), ("lr=0.02", 2), ("lr=0.1", 1), ("lr=0.1", 2)]


@pytest.mark.parametrize("heard", [True, False], ids=["observer", "nobody"])
def test_a_hook_that_raises_is_named_and_the_run_goes_on(mine: Path, heard: bool) -> None:
    class Hears(Silent):
        said: list[str]

        def warn(self, text: str) -> None:
            self.said.append(text)

    def breaks(round_: Round) -> None:
        if round_.round == 2:
            raise ValueError("no such dashboard")

    def go(hook: Callable[[Round], object], observer: Silent | None) -> fc.Run:
        dealt = fc.partition(mine, "iid", clients=3)
        return fc.train("fedavg", mine, dealt, rounds=4, on_round=hook, observer=observer)

    observer = Hears()
    observer.said = []
    if heard:
        run = go(breaks, observer)
        (said,) = observer.said
    else:
        with pytest.warns(RuntimeWarning) as caught:
            run = go(breaks, None)
        (said,) = [str(w.message) for w in caught]
    assert "breaks failed in round 2 of seed 0" in said
    assert "no such dashboard" in said
    told: list[Round] = []
    assert go(told.append, None).path == run.path
    assert len(told) == 4


class Told(Silent):
    """The rounds that an observer hears."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def told(self, round_: Round) -> None:
        self.rounds.append(round_)


class Closing:
    """A tracker of which only the end matters."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.closed, self.problem = 0, problem

    def __call__(self, round_: Round) -> None:
        """Nothing is written."""

    def close(self) -> None:
        self.closed += 1
        if self.problem is not None:
            raise self.problem


def test_a_tracker_is_closed_however_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = Closing(), []
    monkeypatch.setattr(choose, "tracker", lambda spec, runs: asked.append((spec, runs)) or made)
    home = Home(tmp_path)
    with choose.tracking("tensorboard", home, None, None) as hooks:
        assert [hook.tracker for hook in hooks] == [made]
        assert not made.closed
    with pytest.raises(KeyError), choose.tracking("tensorboard:x", home, tmp_path / "r", None):
        raise KeyError
    assert made.closed == 2
    assert asked == [("tensorboard", home.runs), ("tensorboard:x", tmp_path / "r")]
    with choose.tracking(None, home, None, None) as hooks:
        assert hooks == ()


def test_what_a_tracker_cannot_write_at_the_end_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard(Silent):
        def __init__(self) -> None:
            self.said: list[str] = []

        def warn(self, text: str) -> None:
            self.said.append(text)

    monkeypatch.setattr(choose, "tracker", lambda *_: Closing(OSError("no room")))
    words, heard = "--track tensorboard could not be finished: OSError: no room", Heard()
    with choose.tracking("tensorboard", Home(tmp_path), None, heard):
        pass
    assert heard.said == [words]
    with (
        pytest.warns(RuntimeWarning, match=f"^{words}$") as warned,
        choose.tracking("tensorboard", Home(tmp_path), None, None),
    ):
        pass
    assert warned[0].filename == __file__, "the warning points at who asked for tracking"


@pytest.mark.parametrize(
    ("spec", "folder"),
    [("tensorboard", "runs/tensorboard"), ("tensorboard:boards", "boards"), ("tensorboard:a:b", "a:b")],
)
def test_a_tracker_writes_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, folder: str
) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda _name: object())
    made = choose.tracker(spec, Path("runs"))
    assert isinstance(made, TensorBoard)
    assert made.folder == Path(folder)


def told_of(**changes: Any) -> list[Round]:
    """What an observer hears of three rounds of two seeds, one of them read from a checkpoint."""

    heard = Told()
    facts = {
        "method": "fedavg", "rounds": 2, "seeds": [7, 3], "dataset": {"slug": "mine"}, "backbones": ["a", "b"],
        "preset": "paper", "participation": "all", "dtype": "float32", "hyperparameters": {"lr": 0.1, "mu": None},
    }  # fmt: skip
    run = events.RunEvents(heard, Path("r"), {**facts, **changes}, events.GridPosition("lr=0.1", 3, 9))
    run.replay(7, [{"round": 1, "accuracy": None, "traffic": {"up_bytes": 10, "down_bytes": 20}}])
    run.round_ended(7, 2, {"accuracy": 0.5, "seconds": 1.0, "clients": [1], "drift": float("nan")},
                    {"up_bytes": 1, "down_bytes": 2})  # fmt: skip
    run.round_ended(3, 1, {"accuracy": float("inf"), "kept": 2.0}, {"up_bytes": 5, "down_bytes": 6})
    return heard.rounds


def test_a_round_says_what_was_measured_and_what_was_sent_so_far() -> None:
    settings = {"dataset": "mine", "backbones": "a + b", "preset": "paper", "participation": "all", "dtype": "float32",
                "lr": 0.1, "mu": "auto"}  # fmt: skip
    common: dict[str, Any] = {"path": Path("r"), "method": "fedavg", "seeds": 2, "rounds": 2, "point": "lr=0.1",
                              "points_done": 3, "points": 9, "settings": settings}  # fmt: skip
    assert told_of() == [
        Round(seed=7, seed_number=1, round=1, accuracy=None, diagnostics={}, up_bytes=10, down_bytes=20, sent_bytes=10,
              received_bytes=20, stored=True, **common),
        Round(seed=7, seed_number=1, round=2, accuracy=0.5, diagnostics={"drift": None}, up_bytes=1, down_bytes=2,
              sent_bytes=11, received_bytes=22, **common),
        Round(seed=3, seed_number=2, round=1, accuracy=None, diagnostics={"kept": 2.0}, up_bytes=5, down_bytes=6,
              sent_bytes=5, received_bytes=6, **common),
    ]  # fmt: skip


def test_the_time_of_those_who_listen_is_no_training(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))

    def slow(_round: Round) -> None:
        clock[0] += 100.0

    run = fc.train("fedavg", mine, fc.partition(mine, "iid", clients=3), rounds=3, on_round=slow)
    assert (clock[0], run.measured["seconds"]["train"]) == (300.0, 0.0)
