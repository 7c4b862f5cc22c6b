"""What the engine and its parts refuse, forget and fall back to: exact sentences, values and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import Rows, federation, go_tiny, run, run_points, small, tiny

from fedcache.errors import Exit, FedcacheError, FederatedRunError, InternalError, UsageError
from fedcache.federate.engine import method as contract
from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.engine.deployed import no_training_rows
from fedcache.federate.engine.method import UploadTensor
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.stored_rows import StoredRows
from fedcache.federate.execution import gram_matrices, memory_estimate
from fedcache.federate.execution.gram import Gram
from fedcache.federate.execution.gram_matrices import GramMatrices
from fedcache.federate.execution.gram_states import ClientStates, KeptCoordinates
from fedcache.federate.methods import METHODS, fed3r
from fedcache.federate.partition import dirichlet_shares
from fedcache.federate.partition.checks import beyond
from fedcache.federate.partition.client_table import ClientTable, train_rows_of
from fedcache.federate.trust.attacks import flipped_labels
from fedcache.federate.trust.pipeline import UploadPipeline, UploadPool

FEDAVG = METHODS["fedavg"]


def refused(kind, message, call, code=None):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.message == message
    assert caught.value.hint
    assert code is None or caught.value.code == code
    return caught.value


def test_a_run_is_told_everything_and_has_rounds_and_clients():
    data, clients = tiny()
    hp = FEDAVG.resolve("paper", small("fedavg"))
    less = {k: v for k, v in hp.items() if k not in ("lr", "epochs")}
    error = refused(UsageError, "fedavg is not told epochs, lr.", lambda: run(FEDAVG, less, data, clients, rounds=1))
    assert error.hint == "Take all hyperparameters from METHODS['fedavg'].resolve(preset, settings)."
    refused(UsageError, "rounds is 0, expected at least 1.", lambda: run(FEDAVG, hp, data, clients, rounds=0))
    refused(
        FederatedRunError, "The partition has no client.", lambda: run(FEDAVG, hp, data, [], rounds=1), Exit.FEDERATED
    )
    a, b, c, d = clients
    for who, times in (
        ([a, replace(b, name=c.name), c, d], 2),
        ([a, *(replace(x, name=c.name) for x in (b, c, d))], 3),
    ):
        refused(
            FederatedRunError, f"Clients must have different names, found 'client-2' {times} times.",
            lambda who=who: run(FEDAVG, hp, data, who, rounds=1), Exit.FEDERATED,
        )  # fmt: skip
    others = [hp, {**hp, "head": "linear" if hp["head"] != "linear" else "mlp"}]
    said = "Points of one program differ in more than floats."
    refused(InternalError, said, lambda: run_points(FEDAVG, others, data, clients, rounds=1))


def test_a_run_that_fails_raises_and_points_beside_it_end(monkeypatch):
    """The server of the second of three points breaks in the second round."""
    data, clients = tiny()
    hps = [FEDAVG.resolve("paper", {**small("fedavg"), "head": "linear", "lr": lr}) for lr in (0.1, 0.2, 0.3)]
    words = {"rounds": 2, "participation": 4, "dtype": torch.float64}
    alone = [run(FEDAVG, hp, data, clients, **words) for hp in (hps[0], hps[2])]
    finish = RunState.finish

    def breaks(self, ids, *given):
        if self.hp["lr"] == 0.2 and self.round == 1:
            raise FederatedRunError("The server broke.", "Mend it.")
        return finish(self, ids, *given)

    monkeypatch.setattr(RunState, "finish", breaks)
    first, failed, last = run_points(FEDAVG, hps, data, clients, execution="batched", **words)
    assert isinstance(failed, FederatedRunError)
    assert failed.message == "The server broke."
    for found, wanted in ((first, alone[0]), (last, alone[1])):
        assert torch.allclose(found.server["W"], wanted.server["W"], atol=1e-9)
    refused(FederatedRunError, "The server broke.", lambda: run(FEDAVG, hps[1], data, clients, **words))


def test_a_state_of_an_earlier_release_names_its_clients_one_by_one():
    data, clients = tiny()
    saved = []
    go_tiny("solo", {}, data, clients, rounds=1, on_round=lambda _r, _m, _t, snap: saved.append(snap()))
    (snapshot,) = saved
    names = [c.name for c in clients]
    whole = go_tiny("solo", {}, data, clients)
    former = snapshot._replace(meta={**snapshot.meta, "clients": names})
    again = go_tiny("solo", {}, data, clients, state=former)
    assert np.array_equal(again.client_accuracy, whole.client_accuracy, equal_nan=True)
    other = snapshot._replace(meta={**snapshot.meta, "clients": names[::-1]})
    with pytest.raises(FedcacheError, match="The saved state has clients '4 named "):
        go_tiny("solo", {}, data, clients, state=other)


def test_uploads_are_pooled_by_the_longest_name_and_have_one_shape():
    pool = UploadPool({"W": "sum", "W/a": "stack"}, 2)
    assert (pool.rule("W/b"), pool.rule("W/a/c")) == ("sum", "stack")
    refused(InternalError, "No pooling rule covers the upload 'V'.", lambda: pool.rule("V"), Exit.BUG)
    pool.add({"W": torch.zeros(2, 3)}, 1.0, 7)
    said = "Client 8 uploads W of shape (2, 4), and another (2, 3)."
    refused(FederatedRunError, said, lambda: pool.add({"W": torch.zeros(2, 4)}, 1.0, 8), Exit.FEDERATED)


@pytest.mark.parametrize(
    ("total", "dtype"), [(torch.zeros(5, 2, 4), torch.float64), (torch.zeros(2, 3), torch.float32)]
)
def test_a_sum_of_uploads_is_of_what_is_declared(total, dtype):
    taken = []
    pipeline = SimpleNamespace(
        expected={"W": UploadTensor((2, 3), torch.float64)}, round=SimpleNamespace(number=4),
        _pool=SimpleNamespace(add_sum=lambda *given: taken.append(given)),
    )  # fmt: skip
    shape = tuple(total.shape[-2:])
    said = f"Round 4: sums of W have shape {shape} and {dtype}, expected (2, 3) and torch.float64."
    refused(FederatedRunError, said, lambda: UploadPipeline.add_sum(pipeline, "W", total, dtype))
    good = torch.zeros(5, 2, 3)
    UploadPipeline.add_sum(pipeline, "W", good, torch.float64)
    assert taken == [("W", good, torch.float64)]


def test_stored_rows_are_as_many_as_they_are_and_go_to_a_device_without_their_file():
    rows = StoredRows(torch.zeros(3, 2, 4, dtype=torch.float16), release=lambda: None)
    assert (len(rows), rows.nbytes) == (3, 0)
    moved = rows.to("meta")
    assert (moved.device.type, moved.release, moved.dtype, tuple(moved.shape)) == (
        "meta",
        None,
        torch.float32,
        (3, 2, 4),
    )
    assert rows.to(torch.float64).release is rows.release
    assert rows.to(torch.float64).dtype is torch.float64


def test_gram_matrices_are_of_the_clients_own_rows():
    load = SimpleNamespace(mixed=False, views=1)
    method, hp = METHODS["fedpcl"], METHODS["fedpcl"].resolve("paper", {"opt": "sgd"})
    assert Gram.name in method.executions
    assert Gram.serves(method, {**hp, "noise_on": "proto"}, load) == ""
    said = "noise_on=features: noisy rows leave the client's own"
    assert Gram.serves(method, {**hp, "noise_on": "features"}, load) == said
    assert Gram.serves(method, hp, SimpleNamespace(mixed=False, views=2)) == "2 views are stored of a row"
    assert Gram.cost(METHODS["fed3r"], {}, load) == Gram.cost(METHODS["central"], {}, load) == 4.0


def test_free_memory_is_what_the_system_says_or_half_of_what_there_is(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "MemTotal: 9 kB\nMemAvailable:   7 kB\n")
    assert memory_estimate.free_memory() == 7 * 1024

    def gone(*_, **__):
        raise OSError

    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 11}
    monkeypatch.setattr(Path, "read_text", gone)
    monkeypatch.setattr(memory_estimate.os, "sysconf", sizes.__getitem__)
    assert memory_estimate.free_memory() == 4096 * 11 // 2
    monkeypatch.setattr(memory_estimate.os, "sysconf", gone)
    assert memory_estimate.free_memory() == 2 << 30


def table(train, test, common=()):
    rows = [np.array(r, np.int64) for r in (*train, *test)]
    clients = [Rows(f"c{i}", rows[i], rows[len(train) + i]) for i in range(len(train))]
    return ClientTable.of(clients, np.array(common, np.int64))


@pytest.mark.parametrize(
    ("train", "test", "common", "said"),
    [
        ([[0, 1], [2]], [[3], [4]], (), None),
        ([[0, 1], [2, 7, 9]], [[3], [4]], (), "client 'c1' holds 9"),
        ([[0, 1], [2]], [[3, 5], [4]], (), "client 'c0' holds 5"),
        ([[0, 1], [2, 8]], [[3, 6], [4]], (), "client 'c0' holds 6"),
        ([[0, 8], [2, 9]], [[3, 6], [4]], (), "client 'c0' holds 8"),
        ([[0, 8]], [[3]], (2, 6), "test holds 6"),
    ],
)
def test_the_first_client_with_a_row_that_there_is_not_is_named(train, test, common, said):
    assert beyond(table(train, test, common), 5) == said


def test_a_scheme_without_a_number_of_clients_has_no_fewer(monkeypatch):
    scheme = SimpleNamespace(arguments=(SimpleNamespace(name="alpha"),))
    assert dirichlet_shares._fewer_clients(scheme, {}, None, None) == {}
    monkeypatch.setattr(dirichlet_shares, "search", lambda *_, **__: pytest.fail("searched without rows"))
    rule = SimpleNamespace(quota=np.array([3, 2]), clients=3, minimum=2)
    assert dirichlet_shares._has_rows(SimpleNamespace(quota=np.array([3, 3]), clients=3, minimum=2))
    assert dirichlet_shares._works(None, rule) is False


def test_a_method_without_labels_reads_none():
    data = stack_clients(torch.zeros(4, 1, 2), None, [np.array([1, 3])], 0)
    said = "A method without labels read a label."
    refused(InternalError, said, lambda: data.labels(torch.tensor([[0]])), Exit.BUG)
    said = "predict of mine reads the client's training rows, which a saved model does not hold."
    refused(UsageError, said, lambda: no_training_rows("mine").x)
    down: Mapping[str, torch.Tensor] = {"W": torch.zeros(1)}
    assert contract.keep_down(down, {}, data, None) is down
    assert fed3r.personal_part(down, {}, data, SimpleNamespace(hp={"omega": 0.0})) == {}


def test_training_rows_are_taken_of_clients_in_the_order_asked_for():
    clients = [Rows("a", np.array([1, 2]), np.array([0])), Rows("b", np.array([5]), np.array([0]))]
    assert train_rows_of(clients, [1, 0]).tolist() == [5, 1, 2]
    assert train_rows_of(ClientTable.of(clients, np.empty(0, np.int64)), [1, 0]).tolist() == [5, 1, 2]
    assert train_rows_of(clients, []).dtype == np.int64


def test_attackers_that_share_rows_with_honest_clients_are_refused():
    y, rows = torch.tensor([0, 1, 2, -1]), {0: np.array([0, 3]), 1: np.array([1]), 2: np.array([0, 2])}
    assert flipped_labels(y, {0: rows[0], 1: rows[1]}, frozenset([0]), 3).tolist() == [2, 1, 2, -1]
    said = "--attack label-flip: attackers and honest clients share training rows, whose labels cannot be both."
    refused(UsageError, said, lambda: flipped_labels(y, rows, frozenset([0]), 3))
    assert flipped_labels(y, rows, frozenset([0, 2]), 3).tolist() == [2, 1, 0, -1]


def test_products_of_scored_rows_are_forgotten_oldest_first(monkeypatch):
    data, _ = federation()
    grams = GramMatrices(data.x, {0: np.arange(3), 1: np.arange(3, 5)})
    base = torch.randn(4, data.x.shape[-1], dtype=torch.float64)
    places = [torch.arange(n, n + 3) for n in (5, 6, 7)]
    for rows in places[:2]:
        grams.beside(0, data.x, rows, [base])
    kept = list(grams._beside)
    assert len(kept) == 2
    monkeypatch.setattr(gram_matrices, "CACHE_BYTES", 1)
    grams.beside(0, data.x, places[2], [base])
    assert len(grams._beside) == 1
    assert next(iter(grams._beside))[1] == places[2].numpy().tobytes(), "the latest stays"


def test_what_is_held_of_a_client_goes_with_it():
    states, (W, base, seen, n) = ClientStates(), (torch.zeros(k) for k in (1, 2, 3, 4))
    states[3] = {"n": n}
    assert states.held(3) == [n]
    states.kept[3] = KeptCoordinates({"W": W}, [base], [seen])
    assert [id(t) for t in states.held(3)] == [id(t) for t in (n, W, base, seen)]
    states._written.add(3)
    del states[3]
    assert (3 in states, states.kept, states._written) == (False, {}, set())
