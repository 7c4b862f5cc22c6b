"""What the clients of a chunk hold between rounds and what they upload: stacked, until somebody reads one client."""

import pytest
import torch
from federation import PER_ROUND, ROUNDS, difference, gap, go, server_gap
from setting_lines import set_to

from fedcache.federate.execution import executor
from fedcache.federate.execution.gram_states import Chunk, ClientStates
from fedcache.federate.execution.grid_batch import GridBatch
from fedcache.federate.execution.state_table import StateTable
from fedcache.federate.trust.pipeline import UploadPipeline


def chunk(clients, value):
    stacked = {
        "W": torch.full((len(clients), 2, 3), float(value))
        + torch.arange(len(clients)).view(-1, 1, 1)
    }
    return Chunk(tuple(clients), stacked, [{"W": stacked["W"][j]} for j in range(len(clients))])


def entered(*clients):
    states = ClientStates()
    for c in clients:
        states[c] = {"W": torch.zeros(2, 3)}
    return states


def value(states, client):
    """The mean of what a client holds."""
    return float(states[client]["W"].mean())


def test_the_same_clients_find_their_tensors_as_they_are():
    states = entered(3, 5)
    held = chunk((3, 5), 1.0)
    states.hold(held)
    assert states.chunk([3, 5])["W"] is held.stacked["W"]
    assert states.chunk([5, 3]) is None
    assert states.chunk([3]) is None
    states.hold(chunk((3, 5), 7.0))
    assert value(states, 3) == 7.0
    assert value(states, 5) == 8.0


@pytest.mark.parametrize(
    "then", ["read", "write", "another chunk", "set", "delete", "move", "rest", "held"]
)
def test_nothing_of_a_chunk_is_lost_for_every_next_one(then):
    states = entered(3, 5, 6, 7)
    held = chunk((3, 5), 1.0)
    states.hold(held)
    other = {"W": torch.full((2, 3), 9.0)}
    {
        "read": lambda: states[7],
        "write": lambda: states.write(6, other),
        "another chunk": lambda: states.hold(chunk((6, 7), 4.0)),
        "set": lambda: states.__setitem__(6, other),
        "delete": lambda: states.__delitem__(6),
        "move": lambda: states.move({}),
        "rest": lambda: states.rest(6),
        "held": lambda: states.held(6),
    }[then]()
    assert value(states, 3) == 1.0
    assert value(states, 5) == 2.0
    assert states.chunk([3, 5]) is None  # from here on their own tensors count
    held.stacked["W"].zero_()
    assert value(states, 3) == 1.0  # copies


def test_a_later_write_of_one_client_is_not_undone_by_the_chunk_before():
    states = entered(3, 5)
    states.hold(chunk((3, 5), 1.0))
    states.write(5, {"W": torch.full((2, 3), 9.0)})
    assert value(states, 3) == 1.0
    assert value(states, 5) == 9.0


def test_only_tensors_that_have_their_memory_alone_are_held():
    """A view would keep what it is cut from; a tensor that clients share has no place for each of them."""
    for stacked in (torch.zeros(4, 2, 3)[:2], torch.zeros(2, 3, 2).mT, torch.zeros(1, 2, 3)):
        states = entered(3, 5)
        states.hold(Chunk((3, 5), {"W": stacked}, [{"W": torch.ones(2, 3)} for _ in range(2)]))
        assert states.chunk([3, 5]) is None
        assert value(states, 5) == 1.0


def test_new_clients_and_those_in_a_file_are_written_at_once(tmp_path):
    states = entered(3)
    states.hold(chunk((3, 5), 1.0))
    assert 5 in states
    assert states.chunk([3, 5]) is None
    states.move(StateTable(tmp_path / "table", 8, torch.device("cpu")))
    states.hold(chunk((3, 5), 4.0))
    assert states.chunk([3, 5]) is None
    assert value(states, 5) == 5.0
    states.close()


@pytest.mark.parametrize("participation", [None, 3])
@pytest.mark.parametrize("method", ["fedpcl", "scaffold"])
def test_rounds_that_hold_chunks_are_those_that_read_every_client(method, participation):
    """Scoring after every round reads all clients, which splits the chunk; without it one stays for all rounds."""
    how = {"rounds": 4, "participation": participation, "execution": "batched", "chunk": 64}
    kept, read = (go(method, eval_every=n, **how) for n in (4, 1))
    assert server_gap(kept, read) == 0.0
    assert gap(dict(kept.states), dict(read.states)) == 0.0


@pytest.fixture
def called(monkeypatch):
    """Which of the two ways was taken, how often."""
    calls = []
    for owner, name in ((GridBatch, "weighted_sum"), (UploadPipeline, "add")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, real=real, name=name, **k: [calls.append(name), real(*a, **k)][1],
        )
    return calls


def test_the_size_of_uploads_decides_and_both_ways_give_one_result(called, monkeypatch):
    settings = set_to("head=linear epochs=1 batch=16")
    summed = go("fedavg", settings, execution="batched")
    assert set(called) == {"weighted_sum"}
    called.clear()
    monkeypatch.setattr(executor, "SMALL_HEAD", 6 * 11 * 8)  # W alone in float64: b comes on top
    apart = go("fedavg", settings, execution="batched")
    assert called == ["add"] * PER_ROUND * ROUNDS
    assert difference(summed, apart) < 1e-12
    assert summed.traffic == apart.traffic


def test_a_client_whose_tensors_change_their_shape_leaves_the_block():
    """A block would keep its old place for as long as its neighbours, and a new one every round would fill memory."""
    states = ClientStates()
    states.write(0, {"q": torch.zeros(4)})
    states.write(1, {"q": torch.zeros(4)})
    for rows in (5, 6):
        states.write(0, {"q": torch.full((rows,), 2.0)})
        assert states[0]["q"].untyped_storage().nbytes() == 4 * rows
    assert states[0]["q"].tolist() == [2.0] * 6
    assert states[1]["q"].tolist() == [0.0] * 4
