"""Training end to end: defaults said aloud, stored results, resume, shards, grids."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from arrays import ingested
from command import apart, fedcache, ok, start
from draws import one_of_each
from federation import small
from pictures import folder

import fedcache as fc
from fedcache.federate.methods import METHODS

SMALL = ("--batch", 4, "--chunk-rows", 8, "--workers", 0)
IID = ("--scheme", "iid", "--clients", 3)


def extracted(place: Path) -> Path:
    """Two domains of three classes, with features of two backbones, text features of one, and its images."""
    images = folder(place / "shapes", train=12, test=4, domains=("ink", "chalk"))
    recipe = "random-projection:size=16,pixels:size=32,pixels:resize=squash"
    words = ("--backbones", "random-projection,glyph-clip,pixels", "--recipe", recipe, *SMALL)
    return Path(ok("extract", "--dataset", f"folder:{images}", *words).data["path"])


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(extracted)


def on_its_way(name: str) -> tuple[object, ...]:
    """What the way from a command line to a result depends on; the laws of the engine train every method."""
    method = METHODS[name]
    return method.needs, method.one_shot, method.central, method.protocol(method.resolve())


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each(METHODS, on_its_way))
def test_every_method_trains_from_the_command_line(store: Path, name: str) -> None:
    sizes = (
        [word for k, v in small(name).items() for word in ("--set", f"{k}={v}")]
        if {"hidden", "channels", "n_ctx"} & small(name).keys()
        else []
    )
    done = ok("train", "--method", name, *IID, "--rounds", 2, "--participation", "all", "--seeds", "0,1", *sizes)
    data = done.data
    for key in (
        "method",
        "preset",
        "fidelity",
        "dataset",
        "backbones",
        "partition",
        "rounds",
        "seeds",
        "accuracy",
        "fairness",
        "macro_f1",
        "parameters",
        "classes_owned",
        "traffic",
        "seconds",
        "digest",
    ):
        assert key in data, key
    assert set(data["accuracy"]) >= {"mean", "std", "per_seed", "per_client"}
    assert len(data["accuracy"]["per_client"]) == 3
    assert len(data["accuracy"]["per_seed"]) == 2
    assert 0 <= data["accuracy"]["mean"] <= 1
    assert data["macro_f1"]["mean"] == pytest.approx(sum(data["macro_f1"]["per_seed"]) / 2)
    assert 0 < data["macro_f1"]["mean"] <= 1
    assert data["classes_owned"]["per_client"] == [3.0] * 3
    assert set(data["traffic"]) >= {"up", "down", "paper", "exact"}
    assert set(data["seconds"]) >= {"extract", "train"}


def test_the_same_run_again_is_returned_and_not_run(store: Path) -> None:
    first = ok("train", "--method", "fedavg", *IID, "--rounds", 2).data
    again = ok("train", "--method", "fedavg", *IID, "--rounds", 2).data
    assert not first["reused"]
    assert again["reused"]
    assert again["accuracy"] == first["accuracy"]
    other = ok("train", "--method", "fedavg", *IID, "--rounds", 2, "--set", "lr=0.5").data
    assert other["digest"] != first["digest"]


@pytest.mark.slow
def test_a_result_says_what_was_trained_and_when(store: Path) -> None:
    words = ("--method", "fst-cbdg", *IID, "--rounds", 5, "--participation", "all", "--seeds", "0,1")
    done = ok("train", *words, "--backbones", "glyph-clip", "--eval-every", 2)
    data = done.data
    assert data["parameters"] == {"trainable": 3 * 128 + 3, "fixed": 1_360_664}
    lines = [json.loads(line) for line in (Path(data["path"]) / "rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in data["accuracy"]["per_round"]] == [2, 4, 5]
    for point in data["accuracy"]["per_round"]:
        scored = [r["accuracy"] for r in lines if r["round"] == point["round"]]
        assert point["mean"] == pytest.approx(sum(scored) / 2)
    assert data["accuracy"]["per_round"][-1]["mean"] == data["accuracy"]["mean"]
    assert {r["round"] for r in lines if r["diagnostics"]} == {2, 4, 5}
    assert all(0 <= r["diagnostics"]["pseudo_accuracy"] <= 1 for r in lines if r["diagnostics"])
    told = fedcache("train", *words, "--backbones", "random-projection", "--method", "fedavg").out
    assert "%; 3 of 3 classes per client" in told
    assert "macro-F1" in told
    assert "fixed" not in told, "nobody knows what a random projection holds"


@pytest.mark.slow
def test_a_linear_head_starts_from_text_where_there_is_some(store: Path) -> None:
    still = (*IID, "--rounds", 1, "--set", "epochs=0")
    zero_shot = ok("train", "--method", "clip-zs", *IID, "--backbones", "glyph-clip").data["accuracy"]
    for words in (("central", "--set", "probe=sgd"), ("fedntd",), ("fedavg", "--set", "head=linear")):
        start = ok("train", "--method", *words, *still, "--participation", "all", "--backbones", "glyph-clip").data
        assert start["accuracy"]["per_client"] == zero_shot["per_client"], words
        assert len(start["features"]) == 2  # the text is part of what the result was made from
    plain = ok("train", "--method", "fedavg", *still, "--participation", "all", "--backbones", "glyph-clip").data
    assert len(plain["features"]) == 1


@pytest.mark.slow
def test_a_fresh_run_is_bit_identical(store: Path) -> None:
    words = ("train", "--method", "fedpcl", *IID, "--rounds", 2, "--seeds", "0,1")
    path = Path(ok(*words).data["path"])
    files = {name: (path / name).read_bytes() for name in ("result.json", "rounds.jsonl")}
    ok(*words, "--fresh")
    assert {name: (path / name).read_bytes() for name in files} == files


def test_result_holds_no_time_and_no_place(store: Path, tmp_path: Path) -> None:
    path = Path(ok("train", "--method", "fed3r", *IID).data["path"])
    text = (path / "result.json").read_text() + (path / "rounds.jsonl").read_text()
    assert "seconds" not in text
    assert str(tmp_path) not in text


def test_what_a_method_watches_is_kept_and_shown(store: Path) -> None:
    data = ok("train", "--method", "fedcof", *IID, "--seeds", "0,1").data
    assert set(data["diagnostics"]) == {"gamma", "owners_min", "owners_mean"}
    assert data["diagnostics"]["owners_min"] == data["diagnostics"]["owners_mean"] == 3.0  # each client has all classes
    lines = [json.loads(line) for line in (Path(data["path"]) / "rounds.jsonl").read_text().splitlines()]
    assert [line["diagnostics"] for line in lines] == [data["diagnostics"]] * 2
    shown = fedcache("train", "--method", "fedcof", *IID, "--seeds", "0,1").out
    assert f"at the end gamma {data['diagnostics']['gamma']:.4g}" in shown
    assert ", owners_mean 3, owners_min 3" in shown


def test_the_config_of_a_run_runs_it_again(store: Path) -> None:
    first = ok("train", "--method", "fedprox", *IID, "--rounds", 2, "--set", "mu=0.3").data
    again = ok("train", "--config", Path(first["path"]) / "config.toml").data
    assert again["accuracy"] == first["accuracy"]
    assert again["hyperparameters"] == first["hyperparameters"]


@pytest.mark.slow
def test_the_config_of_a_run_means_the_same_run_whatever_is_extracted_later(store: Path, tmp_path: Path) -> None:
    first = ok("train", "--method", "fed3r", *IID).data
    config = Path(first["path"]) / "config.toml"
    ok("extract", "--backbones", "random-projection", "--size", "24", *SMALL)
    ok(
        "extract",
        "--dataset",
        f"folder:{folder(tmp_path / 'other', train=4, test=2)}",
        "--backbones",
        "glyph-clip",
        *SMALL,
    )
    again = ok("train", "--config", config).data
    assert again["reused"]
    assert again["digest"] == first["digest"]
    # The partition is kept with each run: the one it came from may go.
    other = ok("train", "--config", config, "--runs", tmp_path / "runs").data
    assert other["partition"]["name"] is None
    assert (Path(other["path"]) / "result.json").read_bytes() == (Path(first["path"]) / "result.json").read_bytes()
    shutil.rmtree(first["path"])
    assert ok("train", "--config", Path(other["path"]) / "config.toml", "--runs", tmp_path / "runs").data["reused"]


@pytest.mark.slow
def test_training_from_client_stores_equals_training_by_index(store: Path, tmp_path: Path) -> None:
    saved = ok("partition", *IID).data["name"]
    ok("shard", "--partition", saved, "--out", tmp_path / "sites")
    for name in ("fed3r", "fedpcl"):
        by_index = ok("train", "--method", name, "--partition", saved, "--rounds", 2).data
        by_store = ok("train", "--method", name, "--clients-from", tmp_path / "sites", "--rounds", 2).data
        assert by_store["accuracy"] == by_index["accuracy"]
        assert by_store["traffic"] == by_index["traffic"]
    next((tmp_path / "sites").glob("1-*.zarr")).rename(tmp_path / "gone.zarr")
    missing = fedcache("train", "--method", "fed3r", "--clients-from", tmp_path / "sites", "--json")
    assert missing.code == 4
    assert "lacks client 1" in missing.envelope["error"]["message"]


@pytest.mark.slow
def test_two_stores_of_one_client_are_named(store: Path, tmp_path: Path) -> None:
    saved = ok("partition", *IID).data["name"]
    sites = tmp_path / "sites"
    ok("shard", "--partition", saved, "--out", sites)
    one = next(sites.glob("1-*.zarr"))
    shutil.copytree(one, sites / "9-copy.zarr")
    done = fedcache("train", "--method", "fed3r", "--clients-from", sites, "--json")
    assert done.code == 4
    message = done.envelope["error"]["message"]
    assert str(one) in message
    assert str(sites / "9-copy.zarr") in message


@pytest.mark.slow
def test_a_grid_is_the_product_and_equals_single_runs(store: Path) -> None:
    grid = ok("grid", "--method", "fedavg,fedprox", "--sweep", "lr=0.1,0.01", *IID, "--rounds", 2).data
    assert {(p["method"], p["sweep"]["lr"]) for p in grid["points"]} == {
        ("fedavg", "0.1"),
        ("fedavg", "0.01"),
        ("fedprox", "0.1"),
        ("fedprox", "0.01"),
    }
    alone = ok("train", "--method", "fedprox", "--set", "lr=0.01", *IID, "--rounds", 2).data
    assert alone["reused"]
    assert alone["accuracy"] == next(
        p["accuracy"] for p in grid["points"] if p["method"] == "fedprox" and p["sweep"]["lr"] == "0.01"
    )
    again = ok("grid", "--method", "fedavg,fedprox", "--sweep", "lr=0.1,0.01", *IID, "--rounds", 2).data
    assert again["reused"] == 4


def test_too_few_rows_for_label_shift_come_with_what_works(store: Path) -> None:
    words = ("partition", "--scheme", "label-shift", "--clients", 2, "--option", "ratio=2", "--domain", "ink")
    (note,) = ok(*words, "--shots", 10).data["notes"]
    assert note.endswith("--shots 3 deals what it asks for")
    assert ok(*words, "--shots", 3).data["notes"] == []
    words = ("partition", "--scheme", "label-shift", "--clients", 2, "--option", "ratio=7", "--domain", "ink")
    (hopeless,) = ok(*words, "--shots", 1, "--alpha", 100).data["notes"]
    assert "extract more images" in hopeless


def test_defaults_are_said_aloud(store: Path) -> None:
    done = fedcache("train", "--method", "fst-cbdg")
    assert done.code == 0, done.err
    for words in ("last extracted", "Backbone", "Partition", "Clients", "Rounds", "Clients a round"):
        assert words in done.err


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--method", "fedpkl"), 2, "fedpcl"),
        (("--method", "fedavg", "--set", "lrr=1"), 2, "lr"),
        (("--method", "fedavg", "--set", "lr=-1"), 2, "lr"),
        (("--method", "fedavg", "--seeds", "x"), 2, "0-4"),
        (("--method", "fedavg", "--participation", "0"), 2, "10%"),
        (("--method", "fedavg", "--execution", "batchd"), 2, "batched"),
        (("--method", "fedavg", "--device", "cuda"), 6, "doctor"),
        (("--method", "fedavg", "--device", "gpu"), 2, "cuda"),
        (("--method", "fedavg", "--store", "x.zarr", "--dataset", "digits"), 2, "--store and --dataset"),
        (("--method", "fedavg", "--partition", "x", "--clients", "7"), 2, "--partition and --clients"),
        (("--method", "fedavg", "--clients-from", "x", "--scheme", "iid"), 2, "--clients-from and --scheme"),
        (("--method", "fedavg", "--scheme", "iid", "--clients", "3", "--participation", "9"), 2, "3 clients"),
        (("--method", "fedavg", "--partition", "nope"), 2, "fedcache partition"),
        (("--method", "fedavg", "--backbones", "vit-base"), 4, "fedcache extract"),
        (("--method", "fst-cbdg", "--backbones", "random-projection"), 4, "fedcache extract"),
        (("--method", "fedavg", "--scheme", "iid", "--clients", "9999"), 2, "72"),
        (("--method", "fedavg", "--domain", "pen"), 2, "ink"),
        (("--method", "fedavg", "--store", "nowhere.zarr"), 4, "fedcache extract"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(
    store: Path, words: tuple[str, ...], code: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = fedcache("train", *words, "--json")
    assert done.code == code, done.err
    error = done.envelope["error"]
    assert expected in error["message"] + error["hint"]
    assert "Traceback" not in done.err


def test_nothing_extracted_and_no_extract_is_exit_4() -> None:
    done = fedcache("train", "--method", "fed3r", "--no-extract", "--json")
    assert done.code == 4
    assert "fedcache extract --dataset digits --backbones efficientnet-lite0" in done.envelope["error"]["hint"]


@pytest.mark.slow
def test_a_damaged_result_is_found(store: Path) -> None:
    path = Path(ok("train", "--method", "fed3r", *IID).data["path"]) / "result.json"
    content = json.loads(path.read_text())
    content["accuracy"]["mean"] = 0.99
    path.write_text(json.dumps(content))
    assert fedcache("train", "--method", "fed3r", *IID, "--json").code == 5


def test_a_checkpoint_goes_on_to_the_same_bits(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped after every single round and started again equals the run in one go."""
    from fedcache.config import Home, PartitionConfig, TrainConfig
    from fedcache.errors import Exit, FedcacheError
    from fedcache.process import Stop
    from fedcache.progress import Silent
    from fedcache.runs import loop as training

    class StopEachRound(Silent):
        def __init__(self) -> None:
            self.stop_flag = Stop()

        def advance(self, units: int) -> None:
            if units == 1:
                self.stop_flag.ask()

    home = Home(Path(os.environ["FEDCACHE_HOME"]))
    dealt = PartitionConfig("iid", 3)
    config = TrainConfig(method="fedpcl", rounds=4, seeds="0")
    whole = training.train(config, home, partition=dealt, runs=home.root / "whole")
    for _ in range(3):
        observer = StopEachRound()
        with pytest.raises(FedcacheError) as caught:
            training.train(
                config, home, partition=dealt, runs=home.root / "parts", observer=observer, stop=observer.stop_flag
            )
        assert caught.value.code is Exit.INTERRUPTED
    parts = training.train(config, home, partition=dealt, runs=home.root / "parts")
    assert (parts.path / "result.json").read_bytes() == (whole.path / "result.json").read_bytes()
    assert (parts.path / "rounds.jsonl").read_bytes() == (whole.path / "rounds.jsonl").read_bytes()
    assert not list(parts.path.glob("checkpoint*"))


@pytest.mark.parametrize("execution", ["sequential", "batched"])
def test_a_stop_inside_a_round_keeps_the_rounds_before_it(
    tmp_path: Path, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked in the first step of round 2, whose state is written, or is not: then round 2 is finished first."""
    from fedcache.config import Home, PartitionConfig, TrainConfig
    from fedcache.errors import Exit, FedcacheError
    from fedcache.process import Stop
    from fedcache.progress import Silent
    from fedcache.runs import loop as training

    class InRound(Silent):
        """Asks for a stop when the second round begins to step."""

        def __init__(self) -> None:
            self.rounds = 0
            self.flag = AfterOne(self)

        def advance(self, units: int) -> None:
            self.rounds += units

    class AfterOne(Stop):
        def __init__(self, story: InRound) -> None:
            self.story, self.reads = story, 0

        @property
        def requested(self) -> bool:
            self.reads += self.story.rounds == 1
            return self.reads > 2  # two are at the end of round 1

    ingested(tmp_path)
    home = Home(Path(os.environ["FEDCACHE_HOME"]))
    config = TrainConfig(method="fedpcl", rounds=3, seeds="0", execution=execution)
    dealt = PartitionConfig("iid", 3)
    whole = training.train(config, home, partition=dealt, runs=home.root / "whole")
    for always, runs, said in ((True, "all", "in round 2"), (False, "few", "after round 2")):
        monkeypatch.setattr(training.CheckpointPace, "due", lambda _self, always=always: always)
        story = InRound()
        with pytest.raises(FedcacheError, match=said) as caught:
            training.train(config, home, partition=dealt, runs=home.root / runs, observer=story, stop=story.flag)
        assert caught.value.code is Exit.INTERRUPTED
        parts = training.train(config, home, partition=dealt, runs=home.root / runs)
        assert (parts.path / "result.json").read_bytes() == (whole.path / "result.json").read_bytes()


def test_a_stop_inside_the_first_round_is_heard(tmp_path: Path) -> None:
    from fedcache.config import Home, PartitionConfig, TrainConfig
    from fedcache.errors import Exit, FedcacheError
    from fedcache.process import Stop
    from fedcache.runs import loop as training

    class Late(Stop):
        def __init__(self) -> None:
            self.reads = 0

        @property
        def requested(self) -> bool:
            self.reads += 1
            return self.reads > 5

    ingested(tmp_path)
    home, stop = Home(Path(os.environ["FEDCACHE_HOME"])), Late()
    config = TrainConfig(method="fedavg", rounds=1, seeds="0", execution="sequential")
    with pytest.raises(FedcacheError, match="in round 1 of seed 0") as caught:
        training.train(config, home, partition=PartitionConfig("iid", 3), runs=home.root / "first", stop=stop)
    assert caught.value.code is Exit.INTERRUPTED


def test_a_seed_that_has_ended_is_not_trained_again(tmp_path: Path) -> None:
    """Stopped after round 2 of the second of three seeds."""
    from fedcache.config import Home, PartitionConfig, TrainConfig
    from fedcache.errors import FedcacheError
    from fedcache.process import Stop
    from fedcache.runs.loop import train

    ingested(tmp_path)
    stop, told = Stop(), []

    def hook(done: fc.Round) -> None:
        told.append((done.seed, done.round, done.stored))
        if told[-1] == (4, 2, False):
            stop.ask()

    config = TrainConfig(method="fedavg", rounds=3, seeds="7,4,5")
    home, dealt = Home.from_environment(), PartitionConfig("iid", 3)
    with pytest.raises(FedcacheError, match="after round 2 of seed 4; the state is kept"):
        train(config, home, partition=dealt, hooks=[hook], stop=stop)
    assert told == [(7, 1, False), (7, 2, False), (7, 3, False), (4, 1, False), (4, 2, False)]
    told.clear()
    train(config, home, partition=dealt, hooks=[hook])
    every = [(seed, round_) for seed in (7, 4, 5) for round_ in (1, 2, 3)]
    assert told == [(seed, round_, i < 5) for i, (seed, round_) in enumerate(every)]


@pytest.mark.slow
def test_a_killed_train_resumes_to_the_same_bits(store: Path, tmp_path: Path) -> None:
    home = os.environ["FEDCACHE_HOME"]
    words = ("train", "--method", "fedpcl", *IID, "--rounds", 800, "--json")
    whole = apart(*words, "--runs", tmp_path / "whole", home=home)
    assert whole.code == 0, whole.err
    run = start(*words, "--runs", tmp_path / "parts", home=home)
    began = time.monotonic()
    while run.poll() is None and not list((tmp_path / "parts").rglob("checkpoint*.safetensors")):
        assert time.monotonic() - began < 120
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert not list((tmp_path / "parts").rglob("result.json")), "the run was over before it was killed"
    again = apart(*words, "--runs", tmp_path / "parts", home=home)
    assert again.code == 0, again.err
    files = [sorted((tmp_path / side).rglob("result.json"))[0].read_bytes() for side in ("whole", "parts")]
    assert files[0] == files[1]


def test_features_that_are_all_the_same_are_warned_of(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = {"same": np.ones((70, 4), "f4"), "late": np.r_[np.ones((64, 4), "f4"), rng.normal(size=(6, 4)).astype("f4")],
         "fine": rng.normal(size=(70, 4)).astype("f4")}  # fmt: skip
    store = fc.Store.from_arrays(x, labels=np.arange(70) % 2, path=tmp_path / "s.zarr")
    for name, told in (("same", 1), ("late", 1), ("fine", 0)):
        warned = ok("train", "--method", "fedncm", "--backbones", name, "--store", store.path, *IID).envelope[
            "warnings"
        ]
        said = "are the same in the first 64 rows, as of a model that does not see its input"
        assert sum(said in w for w in warned) == told, (name, warned)


@pytest.mark.slow
def test_one_class_among_the_training_rows_is_warned_of(tmp_path: Path) -> None:
    images = folder(tmp_path / "shapes", train=6, test=2, classes=2)
    shutil.rmtree(images / "train" / "ant")
    ok("extract", "--dataset", f"folder:{images}", "--backbones", "glyph-clip", *SMALL)
    said = "only one class among the training rows (zebra)"
    for method in ("fed3r", "fedavg"):
        done = ok("train", "--method", method, *IID, "--rounds", 1)
        assert [said in w for w in done.envelope["warnings"]] == [True]
    done = ok("grid", "--method", "fed3r", *IID, "--sweep", "lam=0.1,1")
    assert len([w for w in done.envelope["warnings"] if said in w]) == 1
    assert not ok("train", "--method", "clip-zs", *IID).envelope["warnings"]
    ok("extract", "--backbones", "glyph-clip", "--partition", "iid", "--clients", 3, "--out", tmp_path / "cut")
    done = ok("train", "--method", "fed3r", "--clients-from", tmp_path / "cut")
    assert [said in w for w in done.envelope["warnings"]] == [True]


@pytest.mark.slow
def test_fewer_rows_than_shots_are_warned_of_with_the_shots_that_work(store: Path) -> None:
    # 24 training rows of each class; label-shift draws 2 x 2 for each shot
    for scheme, option in (
        (("few-shot", "--option", "skew=disjoint"), "--shots 24 "),
        (("few-shot", "--option", "skew=dirichlet"), "--shots 12 "),
        (("label-shift", "--option", "ratio=2"), "--shots 6 "),
    ):
        words = ("--scheme", *scheme, "--clients", 2)
        (warning,) = ok("train", "--method", "fed3r", *words, "--shots", 50).envelope["warnings"]
        assert "3 of 3 classes have fewer than" in warning
        assert option in warning
        named = ok("partition", *words, "--shots", 50)
        assert named.envelope["warnings"] == [warning]
        again = ok("train", "--method", "fed3r", *words, *option.split())
        assert not again.envelope["warnings"]


@pytest.mark.slow
def test_features_of_clip_towers_are_scaled_aloud(store: Path) -> None:
    words = ("train", "--method", "fed3r", *IID, "--backbones", "glyph-clip")
    done = ok(*words)
    assert done.data["hyperparameters"]["feat_post"] == "l2"
    assert "feat_post l2: what is usual for features of glyph-clip (--set feat_post=none" in done.err
    done = ok(*words, "--set", "feat_post=none")
    assert done.data["hyperparameters"]["feat_post"] == "none"
    assert "feat_post" not in done.err
    assert "feat_post" not in ok("train", "--method", "fed3r", *IID, "--backbones", "random-projection").err
    (entry,) = [h for h in ok("methods", "info", "fed3r").data["hyperparameters"] if h["name"] == "feat_post"]
    assert "none, or what the backbone wants: l2 for CLIP towers" in entry["help"]
