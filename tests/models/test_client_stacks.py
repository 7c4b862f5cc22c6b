"""Clients' tensors in few tensors: each client gets back its own, and files of format 1 are read for ever."""

import torch
from draws import examples
from federation import go_tiny, tiny
from hypothesis import given
from hypothesis import strategies as st
from refusal import store_error
from test_saved_model import facts_of

import fedcache.models.saved_model as collecting
from fedcache.models.saved_model import (
    KIND,
    ClientStacks,
    ClientTensors,
    ModelFacts,
    SavedModel,
    collect,
    of_format_1,
)
from fedcache.store.files import write_sealed

NAMES = ("down/W", "down/a/b", "own/W", "own/count")
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
TREES = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(st.sampled_from([(), (0,), (3,), (2, 3), (5, 1, 2)]), st.sampled_from(DTYPES)),
)


def drawn(shapes, seed):
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 9, shape, generator=g).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        t.dtype == b[k].dtype and torch.equal(t, b[k]) for k, t in a.items()
    )


@given(st.dictionaries(st.integers(0, 10**6), TREES, max_size=8), st.integers(0, 99))
@examples(60, 600)
def test_every_client_gets_back_its_own_tensors(clients, seed):
    rows = ClientTensors()
    trees = {}
    for number, shapes in clients.items():
        trees[number] = drawn(shapes, seed + number)
        rows.add(number, trees[number])
    found = ClientStacks.of({"server/W": torch.ones(2), **rows.stacked()})
    for number, tree in trees.items():
        again = {
            f"{part}/{k}": t
            for part in ("down", "own")
            for k, t in found.tree(number, part).items()
        }
        assert same(again, tree)
    assert found.tree(-1, "own") == found.tree(None, "own") == {}


def test_models_that_are_alike_are_one_group_and_others_have_their_own():
    """Clients 4 and 9 hold caches of two rows, client 6 one of three."""
    rows = ClientTensors()
    for number, n in ((4, 2), (6, 3), (9, 2)):
        rows.add(number, {"own/keys": torch.full((n, 2), float(number))})
    found = rows.stacked()
    assert {name: t.tolist() for name, t in found.items()} == {
        "clients/0/number": [4, 9],
        "clients/0/own/keys": [[[4.0, 4.0]] * 2, [[9.0, 9.0]] * 2],
        "clients/1/number": [6],
        "clients/1/own/keys": [[[6.0, 6.0]] * 3],
    }


def test_a_clients_tensors_are_no_window_on_the_stack():
    """Neither does a change reach the model, nor does a row begin where memory is not aligned."""
    rows = ClientTensors()
    for number in range(3):
        rows.add(number, {"own/W": torch.full((5,), float(number))})
    found = ClientStacks.of(rows.stacked())
    taken = found.tree(1, "own")["W"]
    assert taken.data_ptr() % 64 == 0
    taken += 7
    assert found.tree(1, "own")["W"].tolist() == [1.0] * 5


def facts_of_run():
    data, clients = tiny()
    return facts_of(go_tiny("ditto", {}, data, clients), data).to_dict()


def test_a_file_of_format_1_by_hand(tmp_path):
    facts = {**facts_of_run(), "format": 1, "clients": 11, "saved": {"a": 0, "b": 10}}
    tensors = {
        "server/W": torch.zeros(1),
        "client/0/own/v/W": torch.ones(2),
        "client/10/own/v/W": torch.full((2,), 3.0),
    }
    write_sealed(tmp_path / "m.safetensors", KIND, facts, tensors)
    model = SavedModel.load(tmp_path / "m.safetensors")
    model.save(tmp_path / "again.safetensors")  # in today's format
    again = SavedModel.load(tmp_path / "again.safetensors")
    assert again.tensors.keys() == {"server/W", "clients/0/number", "clients/0/own/v/W"}
    for found in (model, again):
        assert found.client_stacks.tree(0, "own")["v/W"].tolist() == [1.0, 1.0]
        assert found.client_stacks.tree(10, "own")["v/W"].tolist() == [3.0, 3.0]
    assert of_format_1({"server/W": tensors["server/W"]}).keys() == {"server/W"}


def test_a_format_of_the_future_is_refused():
    for unknown in (3, 12):
        store_error(
            lambda unknown=unknown: ModelFacts.from_dict({**facts_of_run(), "format": unknown}),
            "expected 2",
        )


def test_models_of_very_many_clients_are_saved_where_they_are_asked_for(monkeypatch):
    data, clients = tiny()
    out = go_tiny("fedpcl", {}, data, clients)
    facts = facts_of(out, data)
    notes = []
    whole = collect(out, facts, data, None, notes)
    assert len(whole.clients) == 4
    assert notes == []
    monkeypatch.setattr(collecting, "MOST_BYTES", 0)
    for word, saved in ((None, 0), ("all", 4), ("client-2", 1)):
        assert len(collect(out, facts, data, None, notes, word).clients) == saved
