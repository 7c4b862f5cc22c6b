"""Points of a grid as they are asked for, named and ended, without training any."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from heard import Heard

from fedcache.config import Home, PartitionConfig, SaveModels, TrainConfig
from fedcache.errors import (
    CorruptionError,
    Exit,
    FedcacheError,
    FederatedRunError,
    StoppedError,
    StoreError,
    UsageError,
)
from fedcache.grids import train_grid
from fedcache.grids.points import combinations, partition_of_point, point_groups, values_of_place
from fedcache.grids.request import GridRequest, request_grid
from fedcache.grids.result import ends_one_point
from fedcache.grids.train_grid import GridRun, train_in_processes
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs.directory import DamagedRunError
from fedcache.runs.events import GridPosition
from fedcache.runs.run import Run

HOME = Home(Path("/home"))


def requested(methods: list[str], sweeps: dict[str, Any], **options: Any) -> GridRequest:
    config = options.pop("config", TrainConfig(set={"mu": "1", "lr": "9"}, backbones=("z",)))
    return request_grid(methods, sweeps, config, HOME, **options)


def test_a_point_is_what_train_would_be_asked() -> None:
    sweeps = {"lr": ["0.1"], "rounds": ["3"], "participation": ["50%"], "backbones": ["glyph-clip+pixels"],
              "domain": ["a+b"], "byzantine": ["0.3"], "aggregate": ["median"]}  # fmt: skip
    request = requested(["fedprox", "fedavg"], sweeps)
    assert request.config_of(0) == TrainConfig(
        method="fedprox", set={"mu": "1", "lr": "0.1"}, rounds=3, participation="50%", byzantine=0.3,
        aggregate="median", backbones=("glyph-clip", "pixels"), domain=("a", "b"),
    )  # fmt: skip
    assert type(request.config_of(0).byzantine) is float
    assert request.config_of(1).method == "fedavg"
    assert request.words_of(1) == (
        "fedavg lr=0.1 rounds=3 participation=50% backbones=glyph-clip+pixels domain=a+b byzantine=0.3 aggregate=median"
    )
    assert requested(["fedavg"], {}).config_of(0) == TrainConfig(
        method="fedavg", set={"mu": "1", "lr": "9"}, backbones=("z",)
    )


def test_a_swept_scheme_is_laid_over_that_of_all_points() -> None:
    base = PartitionConfig("iid", 5, 7, {"alpha": 1.0, "other": 2})
    assert partition_of_point(base, {"lr": "1"}) == base
    swept = {"scheme": "shards", "clients": "3", "shards": "2", "partition.alpha": "0.5", "shots": "4"}
    wanted = {"alpha": "0.5", "other": 2, "shards": "2", "shots": "4"}
    assert partition_of_point(base, swept) == PartitionConfig("shards", 3, 7, wanted)
    assert values_of_place({"set.mu": "1", "clients": "2", "rounds": "3", "lr": "4"}, "set") == {"mu": "1", "lr": "4"}


def test_where_results_lie_and_what_is_allowed_is_taken_over(tmp_path: Path) -> None:
    sweeps = {"lr": ["1", "2", "3"]}
    plain = requested(["fedavg"], sweeps)
    assert plain.runs == HOME.runs
    assert plain.partition == PartitionConfig()
    given: dict[str, Any] = {"runs": tmp_path, "repartition": True, "extract": False, "fresh": True, "exact": True}
    chosen = requested(["fedavg"], sweeps, **given, sampler="random:2", partition=PartitionConfig("iid"))
    for name, value in given.items():
        assert getattr(chosen, name) == value != getattr(plain, name)
    assert len(chosen.points) == 2
    assert chosen.partition.scheme == "iid"


def test_points_that_differ_in_floats_alone_are_one_group() -> None:
    points = combinations(["fedprox", "fedavg"], {"lr": ["0.1", "0.2"], "batch": ["8", "16"]})
    assert point_groups(points) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_point_that_uploads_do_not_allow_is_named_before_any_is_run() -> None:
    config = TrainConfig(participation="all", byzantine=0.4)
    with pytest.raises(FedcacheError, match=r"^fedavg aggregate=krum clients=3: "):
        requested(["fedavg"], {"aggregate": ["mean", "krum"], "clients": ["9", "3"]}, config=config)


@pytest.mark.parametrize(
    ("methods", "sweeps", "words"),
    [
        (["fedavg"], {"lr": ["1", "2"]}, "lr=2"),
        (["solo", "fedavg"], {"lr": ["2"]}, "fedavg lr=2"),
        (["solo", "fedavg"], {}, "fedavg"),
    ],
)
def test_a_point_is_called_by_what_tells_it_from_the_others(
    methods: list[str], sweeps: dict[str, Any], words: str
) -> None:
    run = GridRun(requested(methods, sweeps), Silent(), Stop())
    run.ended[0] = StoreError("", "")
    assert run.position_of(1) == GridPosition(words, 1, 2, run.name)
    assert run.name == GridRun(requested(methods, sweeps), Silent(), Stop()).name
    assert run.name.startswith("grid-")
    alone = GridRun(requested(["fedavg"], {}), Silent(), Stop())
    assert alone.position_of(0) == GridPosition("fedavg", 0, 1)


def made(mean: float | None) -> Run:
    result = {"method": "fedavg", "digest": "d" * 64, "accuracy": {"mean": mean, "std": None}}
    return Run(Path("nowhere"), result, {})


def test_a_point_that_ends_is_told_of_when_it_is_the_best_so_far() -> None:
    heard = Heard()
    run = GridRun(requested(["fedavg"], {"lr": ["1", "2", "3", "4", "5"]}), heard, Stop())
    run.end_point(3, made(0.0))
    run.end_point(0, made(0.5))
    run.end_point(1, made(0.5))  # not better
    run.end_point(2, FederatedRunError("The loss is not a number.", "Lower lr."))
    run.end_point(4, made(None))
    assert [note.rpartition(": ")[2] for note in heard.notes] == ["fedavg lr=4  0.00 %", "fedavg lr=1  50.00 %"]
    assert heard.warnings == ["The loss is not a number."]
    grid = run.grid()
    assert [(p.method, p.sweep) for p in grid.points] == [("fedavg", {"lr": n}) for n in ("1", "2", "4", "5")]
    assert grid.damaged == []
    (lost,) = grid.failed
    assert (lost.method, lost.sweep, lost.message, lost.hint) == (
        "fedavg", {"lr": "3"}, "The loss is not a number.", "Lower lr.",
    )  # fmt: skip
    silent = Heard()
    GridRun(requested(["fedavg"], {}), silent, Stop()).end_point(0, made(0.5))
    assert silent.notes == [], "of one point nothing is the best"


def test_a_grid_without_any_result_is_an_error() -> None:
    run = GridRun(requested(["fedavg"], {"lr": ["1", "2"]}), Silent(), Stop())
    run.end_point(0, FederatedRunError("Failed.", "Lower lr."))
    run.end_point(1, DamagedRunError(Path("/runs/d/result.json")))
    with pytest.raises(FedcacheError, match=r"(?s)result\.json .*Failed") as caught:
        run.grid()
    assert "--fresh" in caught.value.hint


def test_some_errors_end_one_point_and_others_the_grid() -> None:
    assert ends_one_point(DamagedRunError(Path("/r")))
    assert ends_one_point(FederatedRunError("", ""))
    assert not ends_one_point(CorruptionError("", ""))
    assert not ends_one_point(StoreError("", ""))


def test_a_word_for_the_models_to_keep_that_is_none_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UsageError, match="--save-models"):
        requested(["fedavg"], {"lr": ["1", "2"]}, save=SaveModels("bets"))


@pytest.mark.parametrize(
    ("error", "ends"),
    [(FederatedRunError("No client.", "More rows."), True), (StoreError("No store.", "Make one."), False)],
)
def test_points_that_cannot_be_prepared_end_alone_or_end_the_grid(
    error: FedcacheError, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(_run: GridRun, _number: int) -> None:
        raise error

    monkeypatch.setattr(GridRun, "prepare", prepare)
    run = GridRun(requested(["fedavg"], {"lr": ["1", "2", "3"]}), Silent(), Stop())
    if ends:
        run.prepare_first()
        run.train([0, 2])
        assert run.ended == {0: error, 2: error}
        return
    for call in (run.prepare_first, lambda: run.train([0, 2])):
        with pytest.raises(StoreError, match="No store"):
            call()
    assert run.ended == {}


class Pool:
    """A pool of processes that trains each point when it is asked to, in this process."""

    stopped: list[dict[str, bool]]

    def __init__(self, jobs: int, **_: Any) -> None:
        Pool.stopped = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self, **words: bool) -> None:
        Pool.stopped.append(words)


def test_points_of_other_processes_are_taken_over_and_a_fault_of_all_ends_the_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: dict[int, Any] = {}

    def point(_request: GridRequest, number: int) -> Any:
        return answers[number]

    monkeypatch.setattr(train_grid, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(train_grid, "_train_point", point)
    monkeypatch.setattr(GridRun, "train", lambda run, group: run.end_point(group[0], FederatedRunError("First.", "-")))
    monkeypatch.setattr(train_grid, "replay_stored", lambda *_: None)

    def trained(*outcomes: Any, stop: bool = False) -> GridRun:
        answers.update(enumerate(outcomes, 1))
        run = GridRun(requested(["fedavg"], {"lr": ["1", "2", "3"]}), Silent(), Stop())
        run.stop.requested = stop
        train_in_processes(run, 2)
        return run

    failed, best = FederatedRunError("The loss is not a number.", "Lower lr."), made(0.5)
    ended = trained(failed, best).ended
    assert (ended[1], ended[2]) == (failed, best)
    assert Pool.stopped == []
    with pytest.raises(StoreError, match="No store"):
        trained(best, StoreError("No store.", "Make one."))
    assert Pool.stopped == [{"wait": False, "cancel_futures": True}]
    with pytest.raises(StoppedError, match="1 of 3 points"):
        trained(best, best, stop=True)
    assert Pool.stopped == [{"wait": False, "cancel_futures": True}]


def test_an_error_of_a_point_crosses_the_process_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    error = FederatedRunError("Failed.", "Lower lr.")

    def fails(config: TrainConfig, home: Home, **words: Any) -> None:
        assert (config.set["lr"], home, words["extract"]) == ("2", HOME, False)
        raise error

    monkeypatch.setattr(train_grid, "train", fails)
    assert train_grid._train_point(requested(["fedavg"], {"lr": ["1", "2"]}), 1) is error
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.message, again.hint) == (Exit.FEDERATED, "Failed.", "Lower lr.")


def test_an_engine_is_handed_the_points() -> None:
    seen: list[Any] = []

    def run_grid(run: GridRun, jobs: int) -> None:
        seen.append((run.request.exact, jobs))
        for n in range(2):
            run.end_point(n, made(0.5 + n / 10))

    engine: Any = SimpleNamespace(run_grid=run_grid)
    found = train_grid.grid(requested(["fedavg"], {"lr": ["1", "2"]}), engine=engine, jobs=3)
    assert seen == [(True, 3)]
    assert [p.sweep for p in found.points] == [{"lr": "1"}, {"lr": "2"}]
