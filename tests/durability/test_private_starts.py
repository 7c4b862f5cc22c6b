"""Many starts of one private run at once, some killed: one result, one entry of each seed in the ledger, no damage."""

from shlex import split

import pytest
from command import data_of
from forked import start
from private_starts import CONFIG, held_owner, home, ingested, started, until_all_wait

from fedcache.config import Home
from fedcache.runs.loop import train
from fedcache.runs.privacy_ledger import read_releases


@pytest.fixture(autouse=True)
def store(once):
    pytest.importorskip("dp_accounting")
    return once(ingested)


def test_a_killed_owner_of_a_private_run_is_succeeded_by_one_that_waits(tmp_path):
    owner = held_owner(tmp_path, 2)
    others = [started(tmp_path) for _ in range(3)]
    until_all_wait(tmp_path, others)
    owner.kill()
    (tmp_path / "go").touch()
    all_give_one_result(others)


def test_a_private_grid_whose_points_are_trained_elsewhere_returns_their_results():
    words = split(
        "grid --method fedavg --sweep lr=0.1,0.01 --rounds 3 --participation 0.5 "
        "--dp-clip 1 --dp-noise 2 --dp-allow evaluation"
    )
    both = [start(*words, "--json", home=home()) for _ in range(2)]
    told = [one.communicate(timeout=600) for one in both]
    assert [one.returncode for one in both] == [0, 0], told
    assert all(point["reused"] for point in data_of(*words)["points"])
    assert len(read_releases(home() / "privacy.jsonl")) == 2


def all_give_one_result(starts):
    """The processes end with one result, which is stored, and the ledger has one entry of each seed."""
    told = [one.communicate(timeout=600) for one in starts]
    assert told[0][0], told
    assert [out for out, _ in told] == len(told) * [told[0][0]], told
    assert sorted(r.seed for r in read_releases(home() / "privacy.jsonl")) == [0, 1]
    assert train(CONFIG, Home(home())).reused


def test_eight_starts_of_a_private_run_at_once_give_one_result(tmp_path):
    all_give_one_result([started(tmp_path) for _ in range(8)])
