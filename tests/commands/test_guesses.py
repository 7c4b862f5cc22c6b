"""Command lines that people guess: they work, or the answer is the right command."""

import pytest
from arrays import ingested
from command import data_of, fedcache, ok
from failing_command import must_fail
from pictures import folder

ANSWERED = {
    "train fedavg --lr 0.1": "fedcache train fedavg --set lr=0.1",
    "train --method fedavg --epochs=3": "fedcache train --method fedavg --set epochs=3",
    "train fedavg --learning-rate 0.1 --rounds 2": "fedcache train fedavg --set lr=0.1 --rounds 2",
    "train fedavg --batch-size": "fedcache train fedavg --set batch=VALUE",
    "grid fed3r,fedavg --lr 0.1,0.2": "fedcache grid fed3r,fedavg --sweep lr=0.1,0.2",
    "train fed3r --epochs 3": "fedcache methods info fed3r",
    "train --lr 0.1": "--set lr=VALUE",
    "train fedavg --runds 3": "fedcache train --help-all",
    # Options of earlier releases.
    "train fedavg --seed 3": "--partition-seed",
    "train fedavg --lift loop": "--execution",
    "compare --metric macro_f1": "--score",
    "status": "for runs `fedcache runs list`",
    "list": "For stores `fedcache ls`",
    "show": "for methods `fedcache methods info`",
    "rm": "for runs `fedcache runs rm`",
    "help train": "fedcache train --help",
    "fedavg --rounds 3": "fedcache train fedavg --rounds 3",
    "trian fedavg": "fedcache train --help",
    "methods fed3r": "fedcache methods info fed3r",
    "methods show fed3r": "fedcache methods info fed3r",
    "methods lst": "fedcache methods list --help",
    "runs 3f9c": "fedcache runs show 3f9c",
    "ls --foo": "fedcache ls --help-all",
    "--foo": "fedcache --help",
}
"""A command line -> a part of the hint of its refusal."""


@pytest.mark.parametrize(("line", "hint"), ANSWERED.items())
def test_a_guess_is_answered_with_the_right_command(line, hint):
    error = must_fail("", line)
    assert hint in error["hint"]
    assert len(error["hint"].splitlines()) == 1


def test_a_folder_is_extracted_by_its_path(tmp_path):
    images = folder(tmp_path / "photos", train=4, test=2)
    words = "extract --backbones random-projection --size 16 --workers 0"
    named = data_of(f"{words} {images}/")
    assert data_of(f"{words} --dataset folder:{images}")["path"] == named["path"]
    error = fedcache("extract digits --dataset letters --json").error
    assert error["hint"] == "Leave one of them out."


def test_runs_are_compared_by_the_names_of_their_methods(tmp_path):
    store = ingested(tmp_path)
    for method in ("fedncm", "fed3r"):
        ok(f"train {method} --scheme iid --clients 2 --store {store}")
    assert data_of("compare fedncm fed3r") == data_of("compare method:fedncm method:fed3r")
    error = fedcache("compare fedavg --json").error
    assert error["hint"].startswith("fedcache train fedavg")


@pytest.mark.parametrize("line", ["", "methods", "runs", "-V", "--version"])
def test_a_guess_that_only_asks_for_help_or_the_version_succeeds(line):
    done = fedcache(line)
    assert done.code == 0
    assert done.err == ""
    assert done.out
