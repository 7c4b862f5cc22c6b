"""Every exit code comes out of the command line with a hint, and no error can be raised without one."""

from pathlib import Path

import pytest
from command import fedcache, words_of
from damage import flip_bit
from pictures import folder

from fedcache.errors import Exit

IID = words_of("--scheme iid --clients 3 --participation all")


@pytest.fixture
def images(tmp_path):
    return folder(tmp_path / "shapes", train=6, test=2)


def extract(images, *more):
    words = f"extract --backbones random-projection --workers 0 --dataset folder:{images} --json"
    return fedcache(words, *more)


def hint_of(done):
    error = done.envelope["error"]
    assert error["code"] == done.code
    assert error["message"]
    return str(error["hint"])


@pytest.mark.slow
def test_0_2_3_and_5_come_from_good_wrong_and_bad_input(images):
    assert extract(images).code == Exit.OK
    misspelt = fedcache("train --method fedavgg --json")
    assert misspelt.code == Exit.USAGE
    assert "fedavg" in hint_of(misspelt)
    next(images.rglob("*.png")).write_bytes(b"not an image")
    bad = extract(images, "--max-bad", 1)
    assert bad.code == Exit.QUARANTINED
    assert bad.envelope["status"] == "problem"
    for picture in sorted(images.rglob("*.png"))[::2]:
        picture.write_bytes(b"not an image")
    worse = extract(images, "--max-bad", 1)
    assert worse.code == Exit.CORRUPT
    assert "--max-bad" in hint_of(worse)


def test_5_when_a_store_is_damaged(images):
    path = Path(extract(images).data["path"])
    chunk = next(
        p
        for p in sorted(path.joinpath("features").rglob("*"))
        if p.is_file() and p.suffix != ".json"
    )
    flip_bit(chunk)
    found = fedcache("verify --json")
    assert found.code == Exit.CORRUPT
    assert found.data["problems"]
    assert "fedcache repair" in fedcache("verify").out


def test_6_when_weights_are_not_there(images, monkeypatch):
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    lacking = fedcache(f"extract --backbones clip-rn50 --json --dataset folder:{images}")
    assert lacking.code == Exit.ENVIRONMENT
    assert "fedcache backbones import FILE --as clip-rn50" in hint_of(lacking)


def test_7_when_a_run_falls_apart(images):
    extract(images)
    diverged = fedcache("train --method fedavg --set lr=1e30", *IID, "--rounds", 2, "--json")
    assert diverged.code == Exit.FEDERATED
    assert "learning rate" in hint_of(diverged)


def test_10_is_a_bug_and_says_so(images, monkeypatch):
    extract(images)

    def broken(*_, **__):
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr("fedcache.federate.engine.run.run", broken)
    monkeypatch.setattr("fedcache.federate.engine.run_state.RunState.start", broken)
    bug = fedcache("train --method fedavg", *IID, "--rounds", 1, "--json")
    assert bug.code == Exit.BUG
    assert "nobody expected this" in str(bug.envelope["error"])
    assert hint_of(bug)


def test_130_goes_on_with_the_same_command(images, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedcache.store.store.Store.create", interrupted)
        assert extract(images).code == Exit.INTERRUPTED
    assert extract(images).code == Exit.OK
