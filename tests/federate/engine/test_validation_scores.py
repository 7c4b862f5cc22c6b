"""Rows to choose by are scored by the models that are scored on test rows, and change nothing of a run."""

from dataclasses import replace

import numpy as np
import pytest
from draws import one_of_each
from federation import cases, difference, federation, go, go_all, go_tiny, rows_tested, tiny, wide
from methods_tried import tried
from pairs import parametrize, served
from setting_lines import set_to

from fedcache.federate.partition.client_table import Client, ClientTable, RowLists, Validation

ONE_EACH = one_of_each(
    [*cases(), ("perfedavg", {"adapt_on": "test"})], lambda case: (case[0], case[1].get("adapt_on"))
)


pytest_generate_tests = parametrize


def tables(clients):
    """Every client tested on its first test row and with the second to choose by; without that; and the other way."""
    first = [Client(c.name, c.train, c.test[:1]) for c in clients]
    second = [Client(c.name, c.train, c.test[1:]) for c in clients]
    common = np.unique(rows_tested(first))
    others = np.unique(rows_tested(second))
    plain = ClientTable.of(first, common)
    validation = Validation.of_clients(RowLists.of([c.test for c in second]))
    return replace(plain, validation=validation), plain, ClientTable.of(second, others)


@served(tried(ONE_EACH), ["sequential", "batched", "gram"], in_turn=True)
def test_validation_is_the_test_of_a_run_with_the_rows_exchanged_and_the_run_stays_what_it_was(
    case, execution
):
    data, clients = wide() if execution == "gram" else tiny(views=4)
    both, plain, exchanged = tables(clients)
    made, alone, other = (
        go_tiny(*case, data, t, execution=execution, chunk=2) for t in (both, plain, exchanged)
    )
    assert difference(made, alone) == 0.0
    assert alone.evaluation.validation is None
    assert made.evaluation.predictions.tolist() == alone.evaluation.predictions.tolist()
    found = made.evaluation.validation
    assert np.array_equal(found.client_accuracy, other.evaluation.client_accuracy, equal_nan=True)
    assert found.predictions.tolist() == other.evaluation.predictions.tolist()
    assert found.accuracy == other.evaluation.accuracy or np.isnan(found.accuracy)
    assert made.traffic == alone.traffic


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedproto"])
def test_rows_that_all_clients_share_are_scored_as_shared_test_rows_are(method):
    data, clients = federation()
    table = tables(clients)[1]
    left = np.setdiff1d(rows_tested(clients), table.common)
    made = go(method, {}, data, replace(table, validation=Validation(left, None)))
    other = go(
        method, {}, data, ClientTable.of([Client(c.name, c.train, left) for c in clients], left)
    )
    found = made.evaluation.validation
    assert np.array_equal(found.client_accuracy, other.client_accuracy, equal_nan=True)
    assert found.accuracy == other.accuracy
    # All clients have the same rows, so that the pooled figure is the plain mean over those that were scored.
    assert found.pooled == pytest.approx(np.nanmean(found.client_accuracy), abs=1e-12)


def test_the_pooled_figure_weighs_clients_by_their_rows():
    data, clients = federation()
    lists = [c.test[1 : 2 + i % 4] for i, c in enumerate(clients)]
    validation = Validation.of_clients(RowLists.of(lists))
    made = go("fedrep", {}, data, replace(tables(clients)[1], validation=validation))
    found = made.evaluation.validation
    assert len({len(rows) for rows in lists}) > 1
    right = (found.predictions == data.y.numpy()[found.rows]).sum()
    assert found.pooled == pytest.approx(right / sum(map(len, lists)), abs=1e-12)
    assert found.pooled != found.mean_accuracy


def test_drawn_clients_alone_are_scored_on_validation_rows_and_those_that_have_some():
    data, clients = federation()
    both, _, _ = tables(clients)
    lists = [both.validation.own[i] if i else both.validation.rows[:0] for i in range(len(clients))]
    validation = Validation.of_clients(RowLists.of(lists))
    made = go_all("solo", {}, data, replace(both, validation=validation), eval_clients=6)
    tested, chosen_by = (
        np.flatnonzero(~np.isnan(a)).tolist()
        for a in (made.client_accuracy, made.evaluation.validation.client_accuracy)
    )
    assert len(tested) == 6
    assert tested == [0, *chosen_by]


def test_every_round_that_is_scored_has_its_validation_accuracy_and_a_resumed_run_has_them_too():
    data, clients = federation()
    both, _, _ = tables(clients)
    kept = []
    how = {"rounds": 5, "eval_every": 2}
    whole = go("fedavg", {}, data, both, on_round=lambda *a: kept.append(a[-1]()), **how)
    for told, last in (
        (
            [r.diagnostics.get("validation_accuracy") for r in whole.records],
            whole.evaluation.validation,
        ),
        ([r.accuracy for r in whole.records], whole),
    ):
        assert [t is not None for t in told] == [False, True, False, True, True]
        assert told[-1] == last.accuracy
    again = go("fedavg", {}, data, both, state=kept[2], **how)
    assert [r.diagnostics for r in again.records] == [r.diagnostics for r in whole.records]


@pytest.mark.parametrize("together", [False, True])
def test_a_method_that_learns_from_what_it_is_scored_on_learns_from_no_test_row_to_be_chosen(
    together, monkeypatch
):
    data, clients = federation()
    if not together:
        monkeypatch.setattr("fedcache.federate.engine.evaluate.CLIENTS", 1)
    rows = [
        np.unique(np.concatenate([c.test[part] for c in clients]))
        for part in (slice(3), slice(3, None))
    ]
    rows[1] = np.setdiff1d(rows[1], rows[0])
    y = data.y.clone()
    # so that what is learnt of the ones is wrong of the others
    y[rows[1]] = (y[rows[1]] + 1) % data.classes
    data = replace(data, y=y)
    plain, other = (
        ClientTable.of([Client(c.name, c.train, own) for c in clients], own) for own in rows
    )
    how = set_to("adapt_on=test adapt_steps=3 alpha=5.0")
    made = go(
        "perfedavg", how, data, replace(plain, validation=Validation(rows[1], None))
    ).evaluation
    expected = go("perfedavg", how, data, other).evaluation
    assert made.validation.predictions.tolist() == expected.predictions.tolist()
    assert made.validation.accuracy == expected.accuracy
