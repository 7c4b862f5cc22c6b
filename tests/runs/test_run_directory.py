"""What a resume reads: sealed for its run and seed; what is not whole, or another's, begins again with a warning."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from damage import flip_bit
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from refusal import stopped
from stops import StopsAfter

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.runs import loop
from fedcache.runs.directory import Identity, RunDirectory

TENSORS = {
    "server/W": torch.arange(6.0).reshape(2, 3),
    "client/1/n": torch.tensor(3),
    "empty": torch.empty(0, 2),
}
STATE = {
    "round": 4,
    "records": [{"round": 4, "accuracy": float("nan"), "clients": [0, 2]}],
    "traffic": {"up": [10]},
}


def directory(root, method="fedavg"):
    made = RunDirectory(root, Identity({"method": method}, ["r"], "d", "p", "c"))
    made.begin({"method": method}, {})
    return made


def read(run, seed=0):
    """A checkpoint as text, and what was said."""
    said = []
    found = run.checkpoint(seed, said.append)
    return found and repr(found), said


def checkpoint_of(run, seed=0):
    return run.path / f"checkpoint-{seed}.safetensors"


@pytest.mark.slow
@examples(60, 2000)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(place, bit, tmp_path_factory):
    run = directory(tmp_path_factory.mktemp("flipped"))
    run.save_checkpoint(0, TENSORS, STATE)
    whole, _ = read(run)
    flip_bit(checkpoint_of(run), place, bit=bit)
    found, said = read(run)
    assert found in (None, whole)  # the spaces that pad a header hold nothing
    if found is None:
        assert "Seed 0 is trained again from the start." in said[0]
        assert not checkpoint_of(run).exists()


def test_a_restart_forgets_the_checkpoints_of_some_seeds(tmp_path):
    run = directory(tmp_path)
    for seed in (0, 1, 2):
        run.save_seed(seed, {"accuracy": 0.5})
        run.save_checkpoint(seed, TENSORS, STATE)
    run.restart([0, 1])
    assert list(run.path.glob("checkpoint*")) == [checkpoint_of(run, 2)]
    assert len(list(run.path.glob("seed-*"))) == 3


def test_a_checkpoint_of_another_seed_or_run_is_found(tmp_path):
    run = directory(tmp_path)
    other = directory(tmp_path, "fedprox")
    for made in (run, other):
        for seed in (0, 1):
            made.save_checkpoint(seed, TENSORS, STATE)
    shutil.copy(checkpoint_of(run, 1), checkpoint_of(run, 0))
    shutil.copy(checkpoint_of(other, 1), checkpoint_of(run, 1))
    for seed in (0, 1):
        found, said = read(run, seed)
        assert found is None
        assert "has content that belongs to another file" in said[0]
    assert read(other)[0] is not None


def test_a_finished_seed_of_another_seed_or_run_is_found(tmp_path):
    run = directory(tmp_path)
    other = directory(tmp_path, "fedprox")
    said = []
    for seed in (0, 1):
        run.save_seed(seed, {"accuracy": seed})
    other.save_seed(0, {"accuracy": 0.5})
    assert run.seed_result(1, said.append) == {"accuracy": 1}
    shutil.copy(run.path / "seed-0.json", run.path / "seed-1.json")
    shutil.copy(other.path / "seed-0.json", run.path / "seed-0.json")
    assert run.seed_result(0, said.append) is run.seed_result(1, said.append) is None
    assert len(said) == 2


def test_a_run_with_a_damaged_checkpoint_begins_again_to_the_same_bits(shapes):
    home = Home(Path(os.environ["FEDCACHE_HOME"]))
    dealt = PartitionConfig("iid", 3)
    config = TrainConfig(method="fedavg", rounds=4, seeds="0")
    whole = loop.train(config, home, partition=dealt, runs=home.root / "whole")
    first = StopsAfter(2)
    stopped(lambda: loop.train(config, home, partition=dealt, observer=first, stop=first.flag))
    (checkpoint,) = home.runs.rglob("checkpoint-0.safetensors")
    # a figure beside the tensors, which the digest of the first release did not cover
    checkpoint.write_bytes(checkpoint.read_bytes().replace(b"accuracy", b"bccuracy", 1))
    second = StopsAfter()
    run = loop.train(config, home, partition=dealt, observer=second)
    assert "Seed 0 is trained again from the start." in "".join(second.warnings)
    assert (run.path / "result.json").read_bytes() == (whole.path / "result.json").read_bytes()
