"""Points of a grid as they are asked for, named and ended, without training any."""

from pathlib import Path

import pytest
from heard import Heard
from refusal import corruption
from sent import sent
from setting_lines import swept

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, FederatedRunError, StoreError
from fedcache.grids import train_grid
from fedcache.grids.points import combinations, partition_of_point, point_groups
from fedcache.grids.train_grid import GridRun, request_grid
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs.directory import DamagedRunError, ends_one_run
from fedcache.runs.run import Run

HOME = Home(Path("/home"))


def requested(methods, sweeps, **options):
    config = options.pop("config", TrainConfig(set={"mu": "1", "lr": "9"}, backbones=("z",)))
    return request_grid(methods, sweeps, config, HOME, **options)


def test_a_point_is_what_train_would_be_asked():
    said = "lr=0.1 rounds=3 participation=50% backbones=glyph-clip+pixels domain=a+b byzantine=0.3 aggregate=median"
    request = requested(["fedprox", "fedavg"], swept(said))
    assert request.config_of(0) == TrainConfig(
        method="fedprox",
        set={"mu": "1", "lr": "0.1"},
        rounds=3,
        participation="50%",
        byzantine=0.3,
        aggregate="median",
        backbones=("glyph-clip", "pixels"),
        domain=("a", "b"),
    )
    assert request.words_of(1) == f"fedavg {said}"
    assert requested(["fedavg"], {}).config_of(0) == TrainConfig(
        method="fedavg", set={"mu": "1", "lr": "9"}, backbones=("z",)
    )


@pytest.mark.parametrize(
    ("methods", "sweeps", "rounds", "noted"),
    [
        ("fedavg,fedntd", "", None, True),
        ("fedavg,fedprox", "", None, False),
        # A method of one round has no choice.
        ("fedavg,fed3r", "", None, False),
        ("fedavg,fedntd", "", 3, False),
        ("fedavg,fedntd", "rounds=3", None, False),
    ],
)
def test_different_rounds_of_two_papers_are_noted(methods, sweeps, rounds, noted):
    config = TrainConfig(rounds=rounds)
    request = requested(methods.split(","), swept(sweeps), config=config)
    assert ["fedntd 10" in note for note in request.notes] == [True] * noted


def test_a_swept_scheme_is_laid_over_that_of_all_points():
    base = PartitionConfig("iid", 5, 7, {"alpha": 1.0, "other": 2})
    assert partition_of_point(base, {"lr": "1"}) == base
    swept = {"scheme": "shards", "clients": "3", "shards": "2", "partition.alpha": "0.5"}
    swept["shots"] = "4"
    wanted = {"alpha": "0.5", "other": 2, "shards": "2", "shots": "4"}
    assert partition_of_point(base, swept) == PartitionConfig("shards", 3, 7, wanted)


def test_points_that_differ_in_floats_alone_are_one_group():
    points = combinations(["fedprox", "fedavg"], swept("lr=0.1,0.2 batch=8,16"))
    assert point_groups(points) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_point_that_uploads_do_not_allow_is_named_before_any_is_run():
    config = TrainConfig(participation="all", byzantine=0.4)
    with pytest.raises(FedcacheError, match=r"^fedavg aggregate=krum clients=3: "):
        requested(["fedavg"], swept("aggregate=mean,krum clients=9,3"), config=config)


def made(mean):
    result = {
        "method": "fedavg",
        "digest": "d" * 64,
        "accuracy": {"mean": mean, "std": None, "per_seed": [mean]},
    }
    return Run(Path("nowhere"), result, {})


def test_a_point_that_ends_is_told_of_when_it_is_the_best_so_far():
    heard = Heard()
    run = GridRun(requested(["fedavg"], swept("lr=1,2,3,4,5")), heard, Stop())
    run.end_point(3, made(0.0))
    run.end_point(0, made(0.5))
    run.end_point(1, made(0.5))  # not better
    run.end_point(2, FederatedRunError("The loss is not a number.", "Lower lr."))
    run.end_point(4, made(None))
    assert [note.rpartition(": ")[2] for note in heard.notes] == [
        "fedavg lr=4  0.00 %",
        "fedavg lr=1  50.00 %",
    ]
    assert heard.warnings == ["The loss is not a number."]
    grid = run.grid()
    assert [p.sweep["lr"] for p in grid.points] == ["1", "2", "4", "5"]
    assert [p.sweep["lr"] for p in grid.failed] == ["3"]
    silent = Heard()
    GridRun(requested(["fedavg"], {}), silent, Stop()).end_point(0, made(0.5))
    assert silent.notes == [], "of one point nothing is the best"


def test_a_grid_without_any_result_is_an_error():
    run = GridRun(requested(["fedavg"], swept("lr=1,2")), Silent(), Stop())
    run.end_point(0, FederatedRunError("Failed.", "Lower lr."))
    run.end_point(1, DamagedRunError(Path("/runs/d/result.json")))
    corruption(run.grid, "result.json ", "Failed", "--fresh")


def test_some_errors_end_one_point_and_others_the_grid():
    assert ends_one_run(DamagedRunError(Path("/r")))
    assert ends_one_run(FederatedRunError("", ""))
    assert not ends_one_run(StoreError("", ""))


def test_an_error_of_a_point_crosses_the_process_as_it_is(monkeypatch):
    error = FederatedRunError("Failed.", "Lower lr.")

    def fails(config, home, **words):
        assert config.set["lr"] == "2"
        assert home == HOME
        assert words["extract"] is False
        raise error

    monkeypatch.setattr(train_grid, "train", fails)
    assert train_grid._train_point(requested(["fedavg"], swept("lr=1,2")), 1) is error
    again = sent(error)
    assert again.code == Exit.FEDERATED
    assert again.message == "Failed."
    assert again.hint == "Lower lr."
