"""What the engine and its parts refuse and fall back to."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Rows, go_tiny, keeps, run, run_points, small, tiny
from refusal import refused, training_error

from fedcache.errors import FederatedRunError, InternalError, UsageError
from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.engine.outcome import no_training_rows
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.client_table import ClientTable
from fedcache.federate.partition.json_file import beyond
from fedcache.federate.trust.attacks import flipped_labels

FEDAVG = METHODS["fedavg"]


def test_a_run_is_told_everything_and_has_rounds_and_clients():
    data, clients = tiny()
    hp = FEDAVG.resolve("paper", small("fedavg"))
    twice = [replace(clients[1], name=clients[2].name), *clients[2:]]
    for who, rounds, error, named in (
        (clients, 0, UsageError, "rounds"),
        ([], 1, FederatedRunError, "client"),
        (twice, 1, FederatedRunError, "client-2"),
    ):
        with pytest.raises(error, match=named):
            run(FEDAVG, hp, data, who, rounds=rounds)


def test_a_run_that_fails_raises_and_points_beside_it_end(monkeypatch):
    """The server of the second of three points breaks in the second round."""
    data, clients = tiny()
    hps = [
        FEDAVG.resolve("paper", {**small("fedavg"), "head": "linear", "lr": lr})
        for lr in (0.1, 0.2, 0.3)
    ]
    words = {"rounds": 2, "participation": 4, "dtype": torch.float64}
    alone = run(FEDAVG, hps[2], data, clients, **words)
    finish = RunState.finish

    def breaks(self, ids, *given):
        if self.hp["lr"] == 0.2 and self.round == 1:
            raise FederatedRunError("The server broke.", "Mend it.")
        return finish(self, ids, *given)

    monkeypatch.setattr(RunState, "finish", breaks)
    _, failed, last = run_points(FEDAVG, hps, data, clients, execution="batched", **words)
    assert isinstance(failed, FederatedRunError)
    assert failed.message == "The server broke."
    assert torch.allclose(last.server["W"], alone.server["W"], atol=1e-9)
    training_error(lambda: run(FEDAVG, hps[1], data, clients, **words), "The server broke")


def test_a_state_of_an_earlier_release_names_its_clients_one_by_one():
    _, clients = tiny()
    saved = []
    go_tiny("solo", rounds=1, on_round=keeps(saved))
    (snapshot,) = saved
    names = [c.name for c in clients]
    whole = go_tiny("solo")
    again = go_tiny("solo", state=snapshot._replace(meta={**snapshot.meta, "clients": names}))
    assert np.array_equal(again.client_accuracy, whole.client_accuracy, equal_nan=True)
    other = snapshot._replace(meta={**snapshot.meta, "clients": names[::-1]})
    training_error(lambda: go_tiny("solo", state=other), "clients")


@pytest.mark.parametrize(("row", "said"), [(4, None), (9, "client 'b' has row 9")])
def test_the_first_client_with_a_row_that_there_is_not_is_named(row, said):
    test = np.array([3])
    clients = [Rows("a", np.array([0, 1]), test), Rows("b", np.array([2, row]), test)]
    assert beyond(ClientTable.of(clients, test), 5) == said


def test_attackers_that_share_rows_with_honest_clients_are_refused():
    rows = {0: np.array([0, 3]), 1: np.array([1]), 2: np.array([0, 2])}
    y = torch.tensor([0, 1, 2, -1])
    refused(lambda: flipped_labels(y, rows, frozenset([0]), 3), "--attack label-flip")


def test_what_a_method_may_not_read_is_refused():
    data = stack_clients(torch.zeros(4, 1, 2), None, [np.array([1, 3])], 0)
    with pytest.raises(InternalError):  # a method that declared no labels
        data.labels(torch.tensor([[0]]))
    refused(lambda: no_training_rows("mine").x, "mine")  # a saved model has no training rows
