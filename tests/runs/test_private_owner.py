"""A private run that is started several times at once: one training, one result, one entry in the ledger."""

import pytest
from command import fedcache
from private_starts import CONFIG, held_owner, home, ingested, started, until_all_wait

from fedcache.config import Home
from fedcache.runs.loop import train
from fedcache.runs.privacy_ledger import read_releases


@pytest.fixture(autouse=True)
def store(once):
    pytest.importorskip("dp_accounting")
    return once(ingested)


@pytest.mark.slow
def test_others_wait_for_the_owner_of_a_private_run_and_return_its_result(tmp_path):
    owner = held_owner(tmp_path, 2)
    others = [started(tmp_path), started(tmp_path)]
    until_all_wait(tmp_path, others)
    (tmp_path / "go").touch()
    told = [one.communicate(timeout=200) for one in (owner, *others)]
    results = [out for out, _ in told]
    assert results[0], told
    assert results == 3 * results[:1], told
    assert sorted(r.seed for r in read_releases(home() / "privacy.jsonl")) == [0, 1]
    assert train(CONFIG, Home(home())).reused


def test_a_private_run_that_is_made_again_and_killed_while_it_is_stored_is_not_damaged(monkeypatch):
    from fedcache.runs import directory

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    train(CONFIG, Home(home()))
    with monkeypatch.context() as patched:
        patched.setattr(directory, "write_result", killed)
        with pytest.raises(Killed):
            train(CONFIG, Home(home()), fresh=True)
    spent = len(read_releases(home() / "privacy.jsonl"))
    again = train(CONFIG, Home(home()))
    assert not again.reused
    # its seeds had ended: no noise is drawn again
    assert len(read_releases(home() / "privacy.jsonl")) == spent == 4
    assert fedcache("runs list").code == 0
