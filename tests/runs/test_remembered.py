"""A request that was answered before is answered again without torch, and only while nothing of it has changed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Done, fedcache, ok

from fedcache.commands import train as command
from fedcache.config import PRESETS, Home, PartitionConfig, TrainConfig
from fedcache.errors import StoppedError
from fedcache.extract import digests
from fedcache.extract.digests import package_state
from fedcache.federate.methods import NAMES, find_method
from fedcache.grids import train_grid
from fedcache.runs import remembered
from fedcache.runs.directory import read_result, write_result
from fedcache.runs.loop import train
from fedcache.runs.remembered import Heard, Request, usual_settings
from fedcache.runs.run import Run
from fedcache.store.catalog import remember_last

TRAIN = ("train", "--method", "fed3r", "--scheme", "iid", "--clients", 3)
GRID = ("grid", "--method", "fedavg,fedncm", "--sweep", "rounds=1,2", "--scheme", "iid", "--clients", 3)


def ingest(place: Path, name: str, seed: int = 0) -> Path:
    """A store of 60 rows of 3 classes, in 8 numbers each; what is ingested last is what is trained on."""
    rng, y = np.random.default_rng(seed), np.arange(60) % 3
    np.savez(place / f"{name}.npz", embeddings=rng.normal(size=(60, 8)).astype(np.float32) + y[:, None], labels=y)
    return Path(ok("ingest", place / f"{name}.npz", "--name", name).data["path"])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return ingest(tmp_path, "mine")


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of ``train`` that went the whole way."""
    went: list[str] = []
    before = command.train_asked

    def train_asked(asked: Request, *others: Any) -> Run:
        went.append(str(asked.config.method))
        return before(asked, *others)

    monkeypatch.setattr(command, "train_asked", train_asked)
    return went


def without_torch(*words: object) -> Done:
    """A command in a process of its own, in which torch and scikit-learn cannot be imported."""
    code = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "sklearn"):
            raise ModuleNotFoundError(f"import of {name} halted")

sys.meta_path.insert(0, Refused())
from fedcache.cli import main
main()
"""
    line = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=dict(os.environ), check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def forget(home: Path) -> None:
    shutil.rmtree(home / "digests")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(TRAIN, id="train"),
        *(
            pytest.param(words, id=name, marks=pytest.mark.slow)
            for name, words in {
                "grid": GRID,
                "defaults": ("train", "--method", "fedavg", *TRAIN[3:], "--rounds", 2, "--seeds", "0,1"),
                "no-model": (*TRAIN, "--no-model"),
                "exact": (*GRID, "--exact", "--save-models", "all"),
            }.items()
        ),
    ],
)
def test_what_was_just_trained_is_returned_without_torch_and_every_line_is_that_of_the_whole_way(
    own_home: Path, store: Path, words: tuple[object, ...]
) -> None:
    assert fedcache(*words).code == 0
    second = without_torch(*words)
    assert second.code == 0, second.err
    third = without_torch(*words, "--json")
    forget(own_home)
    assert without_torch(*words).code != 0, "the whole way needs torch"
    found = fedcache(*words)  # finds all there, and notes it once more
    assert (second.out, second.err) == (found.out, found.err)
    assert "The same run is there already" in second.err
    forget(own_home)
    assert third.envelope == ok(*words).envelope
    assert without_torch(*words).out == found.out


@pytest.mark.slow
def test_the_whole_way_is_gone_where_anything_that_was_asked_is_another(store: Path, whole: list[str]) -> None:
    ok(*TRAIN)
    assert ok(*TRAIN).data["reused"]
    assert whole == ["fed3r"]
    others: tuple[tuple[object, ...], ...] = (
        ("--set", "lam=3"), ("--seeds", "1"), ("--seed", "1"), ("--scheme", "dirichlet", "--alpha", "1"),
        ("--dataset", "mine"), ("--save-clients", "all"), ("--no-model",), ("--no-extract",), ("--repartition",),
        ("--runs", store.parent / "elsewhere"), ("--dtype", "float64"), ("--fresh",),
    )  # fmt: skip
    for more in others:
        whole.clear()
        ok(*TRAIN, *more)
        assert whole == ["fed3r"], more


def rewrite(path: Path) -> None:
    """The same bytes as another file: whoever compares sizes and times has to look into it again."""
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["manifest.json", "samples", "features"])
def test_a_store_that_was_touched_is_read_again(store: Path, whole: list[str], name: str) -> None:
    ok(*TRAIN)
    file = next(p for p in sorted(store.rglob("*")) if p.is_file() and name in str(p.relative_to(store)))
    rewrite(file)
    first = ok(*TRAIN).data
    assert (first["reused"], whole) == (True, ["fed3r", "fed3r"])
    ok(*TRAIN)
    assert len(whole) == 2, "and noted as it is now"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(bytes(raw))
    assert fedcache(*TRAIN).code == 5, "damage is found as ever"


@pytest.mark.slow
def test_another_store_that_is_the_last_one_is_another_request(store: Path, tmp_path: Path, whole: list[str]) -> None:
    mine = ok(*TRAIN).data
    ingest(tmp_path, "yours", seed=1)
    yours = ok(*TRAIN).data
    assert mine["digest"] != yours["digest"]
    assert len(whole) == 2
    assert ok(*TRAIN, "--dataset", "mine").data["digest"] == mine["digest"]
    remember_last(Home.from_environment(), store, "mine, by another name")
    assert "mine, by another name, the dataset last extracted" in fedcache(*TRAIN).err, "said as it is now"


@pytest.mark.slow
def test_a_partition_an_availability_and_client_stores_are_compared_as_files(
    store: Path, tmp_path: Path, whole: list[str]
) -> None:
    def partition(seed: int) -> None:
        ok(
            "partition",
            "--scheme",
            "dirichlet",
            "--alpha",
            1,
            "--clients",
            3,
            "--seed",
            seed,
            "--name",
            "p",
            "--replace",
        )

    times, sites = tmp_path / "times.csv", tmp_path / "sites"
    here = "client,first,last\nclient-0,1,9\n"
    partition(0)
    ok("shard", "--partition", "p", "--out", sites)
    times.write_text(f"{here}client-1,1,9\nclient-2,1,9\n")
    named = ("train", "--method", "fedavg", "--rounds", 1)
    lasts = tmp_path / "lasts.csv"
    lasts.write_text("client,duration\nclient-0,1\nclient-1,2\nclient-2,3\n")
    swept = ("grid", "--method", "fedavg", "--rounds", 1, "--scheme", "iid", "--clients", 3, "--sweep",
             f"client_durations={lasts},equal")  # fmt: skip
    digests = [p["digest"] for p in ok(*swept).data["points"]]
    assert [p["digest"] for p in ok(*swept).data["points"]] == digests
    lasts.write_text("client,duration\nclient-0,1\nclient-1,2\nclient-2,9\n")
    assert [p["digest"] == d for p, d in zip(ok(*swept).data["points"], digests, strict=True)] == [False, True]
    for words, change in (
        ((*named, "--partition", "p"), lambda: partition(1)),
        (
            (*named, "--partition", "p", "--availability", times),
            lambda: times.write_text("client,first,last\nclient-0,1,9\n"),
        ),
        ((*named, "--clients-from", sites), lambda: rewrite(next(sites.glob("*.zarr/manifest.json")))),
    ):
        before = ok(*words).data
        whole.clear()
        assert ok(*words).data == {**before, "reused": True}
        assert not whole
        change()
        after = ok(*words).data
        assert whole == ["fedavg"]
        assert (after["digest"] == before["digest"]) == ("--clients-from" in words)


@pytest.mark.slow
def test_a_changed_package_python_or_environment_goes_the_whole_way(
    store: Path, tmp_path: Path, whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, library = tmp_path / "package", tmp_path / "site-packages"
    for folder in (package / "heads", library):
        folder.mkdir(parents=True)
    (package / "heads" / "ridge.py").write_text("x = 1")
    monkeypatch.setattr(digests, "ROOT", package)
    monkeypatch.setattr(digests, "INSTALLED", (library,))

    def asked_again() -> int:
        package_state.cache_clear()  # each command is a process
        whole.clear()
        ok(*TRAIN)
        return len(whole)

    assert [asked_again(), asked_again()] == [1, 0]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "ridge.pyc").write_bytes(b"compiled")
    assert asked_again() == 0
    changes: list[Callable[[], object]] = [
        lambda: (package / "heads" / "ridge.py").write_text("x = 2"),
        lambda: (package / "heads" / "more.py").touch(),
        lambda: (library / "numpy-9.dist-info").mkdir(),
        lambda: monkeypatch.setenv("FEDCACHE_MEMORY", "3GiB"),
        lambda: monkeypatch.setattr(sys, "version", "another"),
    ]
    for change in changes:
        change()
        assert [asked_again(), asked_again()] == [1, 0]
    package_state.cache_clear()


@pytest.mark.slow
def test_a_damaged_result_is_told_and_one_that_is_gone_is_made_again(store: Path, whole: list[str]) -> None:
    run = Path(ok(*TRAIN).data["path"])
    for name in ("result.json", "rounds.jsonl", "config.toml"):
        raw = (run / name).read_bytes()
        (run / name).write_bytes(raw.replace(b"r", b"s", 1))
        told = fedcache(*TRAIN)
        assert (told.code, str(run / name) in told.err) == (5, True), told.err
        (run / name).write_bytes(raw)
    whole.clear()
    assert ok(*TRAIN).data["reused"]
    assert not whole, "what is whole again is the answer"
    shutil.rmtree(run)
    assert not ok(*TRAIN).data["reused"]
    (run / "measured.json").unlink()
    assert "its times are lost" in fedcache(*TRAIN).err
    assert whole == ["fed3r", "fed3r"]


def test_a_model_that_is_gone_is_missed_as_ever(store: Path, whole: list[str]) -> None:
    run = Path(ok(*TRAIN).data["path"])
    shutil.rmtree(run / "models")
    for count in (2, 2):
        assert "The stored run has no model" in fedcache(*TRAIN).err
        assert len(whole) == count
    Path(run / "models").mkdir()


def test_a_damaged_note_is_no_answer(own_home: Path, store: Path, whole: list[str]) -> None:
    ok(*TRAIN)
    for note in (own_home / "digests").glob("*.json"):
        note.write_bytes(note.read_bytes().replace(b"fact", b"lies"))
    assert ok(*TRAIN).data["reused"]
    assert len(whole) == 2


def test_a_note_is_of_the_result_that_was_seen(store: Path, whole: list[str]) -> None:
    """A whole result of the same digest with other figures, as private noise gives them, was never told of."""
    run = Path(ok(*TRAIN).data["path"])
    write_result(run / "result.json", {**read_result(run / "result.json"), "classes": 4})
    ok(*TRAIN)
    assert len(whole) == 2


def test_trackers_and_dry_runs_take_the_whole_way(store: Path, whole: list[str], own_home: Path) -> None:
    pytest.importorskip("tensorboard")
    ok(*TRAIN)
    ok(*TRAIN, "--track", "tensorboard")
    assert len(whole) == 2
    assert list((own_home / "runs" / "tensorboard").rglob("events.*"))
    assert "programs" in ok(*TRAIN, "--dry-run").data


def test_what_loads_long_is_noted_when_it_is_found(
    store: Path, whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "QUICK", -1.0)
    ok(*TRAIN)
    for count in (2, 2):
        assert ok(*TRAIN).data["reused"]
        assert len(whole) == count


def test_only_what_is_found_is_noted_and_no_failure_costs_the_result(store: Path) -> None:
    made = ok(*TRAIN).data
    run = Run(Path(made["path"]), made, {"seconds": {"load": 0.0}})
    found = Run(run.path, made, run.measured, reused=True)
    home = Home.from_environment()
    observer, words = Heard(), itertools.count()

    def noted(again: Any, config: TrainConfig | None = None) -> bool:
        asked = Request((next(words),), config or TrainConfig(), home, home.runs)
        asked.note([(None, run)], observer, again)
        return asked.answer(observer) is not None

    def fails(_: object) -> Any:
        raise OSError("no room")

    assert noted(lambda _: [(None, found)])
    assert not noted(None)
    assert not noted(lambda _: [(None, run)]), "trained and not found"
    assert not noted(fails)
    assert not noted(lambda _: [(None, found)], TrainConfig(device="cuda"))
    for method in ("promptfl", "somebody's"):
        other = Run(run.path, {**made, "method": method}, run.measured, reused=True)
        assert not noted(lambda _, other=other: [(None, other)]), "weights and code that are not compared"


def test_asking_again_finds_and_never_trains(store: Path, own_home: Path) -> None:
    iid = PartitionConfig(scheme="iid", clients=3)
    for method in ("fed3r", "fedavg"):
        with pytest.raises(StoppedError):
            train(TrainConfig(method=method), Home(own_home), partition=iid, stop=command.stopped())
    assert not list((own_home / "runs").glob("*/result.json"))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_of_methods_are_remembered_as_they_are(
    own_home: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_home.mkdir(exist_ok=True)
    for name in NAMES:
        usual = find_method(name).resolve(preset)
        assert usual_settings(name, preset) == usual
        again = usual_settings(name, preset)
        assert list(map(repr, again.items())) == list(map(repr, sorted(usual.items())))
    monkeypatch.setattr(remembered, "find_method", lambda _name: pytest.fail("asked again"))
    usual_settings("fedavg", preset)
    monkeypatch.setattr(digests, "package_state", lambda: "another")
    with pytest.raises(pytest.fail.Exception):
        usual_settings("fedavg", preset)


@pytest.mark.slow
def test_a_report_of_runs_that_were_trained_here_is_made_without_torch(store: Path, tmp_path: Path) -> None:
    words = ("--scheme", "iid", "--clients", 3)
    ok("train", "--method", "fedavg", *words, "--rounds", 2, "--eval-every", 1, "--set", "lr=0.5")
    ok(*TRAIN)
    done = without_torch("report", "-o", tmp_path / "report.html", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["data"]["runs"] == 2
    assert "--set lr=0.5 --set" not in (tmp_path / "report.html").read_text()
    assert "--set lr=0.5" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_grid_by_several_processes_is_not_opened_once_more_to_be_noted(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid of one process is found again at once; several would be started anew for it."""
    asked: list[int] = []
    before = train_grid.grid

    def grid(*request: Any, jobs: int = 1, **how: Any) -> Any:
        asked.append(jobs)
        return before(*request, **how)

    monkeypatch.setattr(train_grid, "grid", grid)
    ok(*GRID, "--jobs", 2)
    assert asked == [2]
    ok(*GRID, "--seeds", 1)
    assert asked == [2, 1, 1]
    ok(*GRID, "--seeds", 1)
    assert asked == [2, 1, 1], "an answer that was noted asks nothing"
