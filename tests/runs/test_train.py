"""Training end to end: defaults said aloud, stored results, resume, shards, grids."""

import shutil

import numpy as np
import pytest
from arrays import ingested, normals
from command import data_of, ok
from draws import one_of_each
from failing_command import must_fail_store
from federation import small
from homes import made_once
from made_path import place_of
from pictures import folder
from refusal import stopped
from stops import StopsAfter

import fedcache as fc
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.federate.methods import METHODS
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs import loop

SMALL = "--batch 4 --chunk-rows 8 --workers 0"
IID = "--scheme iid --clients 3"


def extracted(place):
    """Two domains of three classes, with features of two backbones, text features of one, and its images."""
    images = folder(place / "shapes", domains=("ink", "chalk"))
    recipe = "random-projection:size=16,pixels:size=32,pixels:resize=squash"
    words = f"--backbones random-projection,glyph-clip,pixels --recipe {recipe} {SMALL}"
    return place_of(f"extract --dataset folder:{images} {words}")


store = made_once(extracted)


def on_its_way(name):
    """What the way from a command line to a result depends on; the laws of the engine train every method."""
    method = METHODS[name]
    return method.needs, method.one_shot, method.central, method.protocol(method.resolve())


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each(METHODS, on_its_way))
def test_every_method_trains_from_the_command_line(store, name):
    sizes = " ".join(f"--set {k}={v}" for k, v in small(name).items())
    words = f"train --method {name} {IID} --rounds 2 --participation all --seeds 0,1"
    data = data_of(f"{words} {sizes}")
    assert len(data["accuracy"]["per_client"]) == 3
    assert len(data["accuracy"]["per_seed"]) == 2
    assert data["macro_f1"]["mean"] == pytest.approx(sum(data["macro_f1"]["per_seed"]) / 2)


@pytest.mark.slow
def test_a_linear_head_starts_from_text_where_there_is_some(store):
    glyph = f"{IID} --backbones glyph-clip"
    zero_shot = data_of(f"train --method clip-zs {glyph}")["accuracy"]
    still = f"{glyph} --rounds 1 --participation all --set epochs=0"
    for words in ("central --set probe=sgd", "fedntd", "fedavg --set head=linear"):
        start = data_of(f"train --method {words} {still}")
        assert start["accuracy"]["per_client"] == zero_shot["per_client"], words
        assert len(start["features"]) == 2, "the text is part of what the result was made from"


@pytest.mark.slow
def test_the_config_of_a_run_means_the_same_run_after_later_extractions(store, tmp_path):
    first = place_of(f"train --method fed3r {IID}")
    ok(f"extract --backbones random-projection --size 24 {SMALL}")
    other = folder(tmp_path / "other", train=4, test=2)
    ok(f"extract --dataset folder:{other} --backbones glyph-clip {SMALL}")
    again = data_of(f"train --config {first}/config.toml")
    assert again["reused"]
    assert again["path"] == str(first)
    # The partition is kept with each run: the one it came from may go.
    runs = f"--runs {tmp_path}/runs"
    other = place_of(f"train --config {first}/config.toml {runs}")
    assert (other / "result.json").read_bytes() == (first / "result.json").read_bytes()
    shutil.rmtree(first)
    assert data_of(f"train --config {other}/config.toml {runs}")["reused"]


@pytest.mark.slow
def test_training_from_client_stores_equals_training_by_index(store, tmp_path):
    saved = data_of(f"partition {IID}")["name"]
    ok(f"shard --partition {saved} --out {tmp_path}/sites")
    for name in ("fed3r", "fedpcl"):
        by_index = data_of(f"train --method {name} --partition {saved} --rounds 2")
        by_store = data_of(f"train --method {name} --clients-from {tmp_path}/sites --rounds 2")
        assert by_store["accuracy"] == by_index["accuracy"]
        assert by_store["traffic"] == by_index["traffic"]
    next((tmp_path / "sites").glob("1-*.zarr")).rename(tmp_path / "gone.zarr")
    must_fail_store(
        "has no store of client 1", f"train --method fed3r --clients-from {tmp_path}/sites"
    )


def train(config, runs, **how):
    home = Home.from_environment()
    dealt = PartitionConfig("iid", 3)
    return loop.train(config, home, partition=dealt, runs=home.root / runs, **how)


def train_until_stopped(said, config, runs, **how):
    stopped(lambda: train(config, runs, **how), said)


def same_files(one, other):
    """The result holds the digest of the rounds."""
    return (one.path / "result.json").read_bytes() == (other.path / "result.json").read_bytes()


class StopsInRound(Silent):
    """Asks for a stop while the round after ``last`` takes its steps."""

    def __init__(self, last):
        self.last = last
        self.rounds = 0
        self.flag = AfterSomeReads(self)

    def advance(self, units):
        self.rounds += units


class AfterSomeReads(Stop):
    """Asked when it is read for the third time in the round; two reads are at the end of the round before."""

    def __init__(self, story):
        self.story = story
        self.reads = 0

    @property
    def requested(self):
        self.reads += self.story.rounds == self.story.last
        return self.reads > 2


def test_a_checkpoint_goes_on_to_the_same_bits(tmp_path):
    """A run that is stopped after every single round and started again equals the run in one go."""
    ingested(tmp_path)
    config = TrainConfig(method="fedpcl", rounds=4, seeds="0")
    for _ in range(3):
        story = StopsAfter(1)
        train_until_stopped("Stopped", config, "parts", observer=story, stop=story.flag)
    parts = train(config, "parts")
    assert same_files(parts, train(config, "whole"))
    assert not list(parts.path.glob("checkpoint*"))


@pytest.mark.parametrize("execution", ["sequential", "batched"])
def test_a_stop_inside_a_round_keeps_the_rounds_before_it(tmp_path, execution, monkeypatch):
    """Asked in the first step of round 2, whose state is written, or is not: then round 2 is finished first."""
    ingested(tmp_path)
    config = TrainConfig(method="fedpcl", rounds=3, seeds="0", execution=execution)
    whole = train(config, "whole")
    for always, runs, said in ((True, "all", "in round 2"), (False, "few", "after round 2")):
        monkeypatch.setattr(loop.CheckpointPolicy, "due", lambda _self, always=always: always)
        story = StopsInRound(1)
        train_until_stopped(said, config, runs, observer=story, stop=story.flag)
        assert same_files(train(config, runs), whole)


def test_features_that_are_all_the_same_are_warned_of(tmp_path):
    fine = normals(0, 70, 4)
    late = np.r_[np.ones((64, 4), "f4"), fine[:6]]
    store = fc.Store.from_arrays(
        {"late": late, "fine": fine}, labels=np.arange(70) % 2, path=tmp_path / "s.zarr"
    )
    for name, told in (("late", 1), ("fine", 0)):
        done = ok(f"train --method fedncm --backbones {name} --store {store.path} {IID}")
        assert len([w for w in done.warnings if "the first 64 rows" in w]) == told


@pytest.mark.parametrize(
    ("words", "notes", "warnings"),
    [
        ("fedavg", 2, 0),  # rounds, and clients a round
        ("fed3r", 1, 0),  # clients a round
        ("fed3r --rounds 3 --participation all", 0, 1),  # it has one round
        ("fedavg --rounds 1 --participation 2", 0, 0),
    ],
)
def test_what_the_paper_settles_is_said_unless_it_was_asked_for(tmp_path, words, notes, warnings):
    ingested(tmp_path)
    done = ok(f"train --method {words} {IID} -v")
    assert "dataset extracted last" in done.err
    assert done.err.count("paper; change with --") == notes
    assert len(done.warnings) == warnings
