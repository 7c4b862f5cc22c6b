"""Scores of many models at once are those of each alone, and what is too much to be kept is counted."""

import numpy as np
import pytest
from federation import federation, go
from sklearn.metrics import confusion_matrix

from fedcache.federate.engine import evaluate
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.client_table import Client, ClientTable

STACKED = [
    name
    for name, m in METHODS.items()
    if m.protocol(m.resolve()) != "global"
    and "batched" in m.executions
    and not m.needs & {"pixels", "text tower"}
]


COMMON = np.unique(np.concatenate([c.test for c in federation()[1]]))


def shared(clients):
    """The clients; all but the third are tested on the rows of all."""
    own = [Client(c.name, c.train, c.test if i == 2 else COMMON) for i, c in enumerate(clients)]
    return ClientTable.of(own, COMMON)


@pytest.mark.parametrize("method", STACKED)
def test_models_that_are_scored_together_say_what_each_says_alone(method, monkeypatch):
    data, clients = federation()
    table = shared(clients)
    asked = []
    together = evaluate.models_together
    monkeypatch.setattr(evaluate, "models_together", lambda *a: asked.append(a[2]) or together(*a))
    # its own 200 take half a minute
    few = {"epochs": 2, "probe_epochs": 2} if method == "min-local" else {}
    many = go(method, few, data, table).evaluation
    monkeypatch.setattr(evaluate, "CLIENTS", 1)
    alone = go(method, few, data, table).evaluation
    for name in ("rows", "predictions", "client_accuracy"):
        assert np.array_equal(getattr(many, name), getattr(alone, name), equal_nan=True)
    assert many.macro_f1 == alone.macro_f1
    assert many.by_domain == alone.by_domain
    assert METHODS[method].deploy is not evaluate.keep_down or asked
    y = data.y.numpy()[many.rows]
    known = many.predictions >= 0
    expected = confusion_matrix(y[known], many.predictions[known], labels=range(data.classes))
    assert many.counts.tolist() == expected.tolist()


def test_predictions_beyond_what_is_kept_leave_the_scores_as_they_are(monkeypatch):
    data, clients = federation()
    whole = go("fedrep", {}, data, shared(clients)).evaluation
    assert whole.whole
    monkeypatch.setattr(evaluate, "KEPT", len(whole.rows) - 1)
    counted = go("fedrep", {}, data, shared(clients)).evaluation
    assert not counted.whole
    assert len(counted.rows) == len(counted.predictions) == 0
    assert counted.accuracy == whole.accuracy
    assert counted.by_domain == whole.by_domain
    assert counted.counts.tolist() == whole.counts.tolist()
