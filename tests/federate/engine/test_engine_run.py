"""Runs of the engine: who takes part, what is refused, what comes back."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from federation import C, federation, gap, go, go_all, keeps, rows_tested
from refusal import refused, training_error
from setting_lines import set_to
from sklearn.metrics import f1_score
from text_tables import rows_of


def test_a_client_without_rows_is_skipped_with_a_warning():
    data, clients = federation()
    clients[2] = replace(clients[2], train=np.empty(0, np.int64))
    out = go_all("solo", {}, data, clients)
    assert "1 of 9 clients" in out.warnings[0]
    assert "client-2" in out.warnings[0]
    assert np.isnan(out.client_accuracy[2])
    assert all(2 not in r.clients for r in out.records)


def test_a_client_without_a_whole_batch_is_skipped_when_the_last_is_dropped():
    out = go_all("fedavg", "drop_last=true batch=32")
    assert out.records[0].clients == (1, 3, 5, 8)  # 64, 33, 50 and 40 rows
    assert "5 of 9" in out.warnings[0]


@pytest.mark.parametrize("execution", ["sequential", "batched", "gram"])
@pytest.mark.parametrize("name", ["fedavg", "fedpcl"])
def test_a_client_of_one_row_rests_where_there_is_batchnorm(name, execution):
    steps = set_to("dim=5 batch=16 opt=sgd lr=0.05")  # nine clients; the fifth has one row
    out = go_all(name, steps, execution=execution)
    assert all(4 not in r.clients for r in out.records)
    assert any("BatchNorm" in w for w in out.warnings)
    assert np.isfinite(out.client_accuracy[[0, 1, 2, 3, 5, 6, 7, 8]]).all()
    plain = go_all(name, {**steps, "bn": False}, execution=execution)
    assert all(4 in r.clients for r in plain.records)


@pytest.mark.parametrize("execution", ["sequential", "batched"])
def test_a_result_that_is_not_finite_names_round_and_client(execution):
    data, clients = federation()
    x = data.x.clone()
    x[clients[3].train[5]] = torch.inf
    training_error(
        lambda: go_all("fedavg", "head=linear", replace(data, x=x), clients, execution=execution),
        "round 1 for client 3 ('client-3')",
    )


@pytest.mark.parametrize(("asked", "clients"), [(None, 9), (4, 4), (100, 9), (0.25, 2), (1.0, 9)])
def test_participation_is_a_number_or_a_share(asked, clients):
    assert {len(r.clients) for r in go("fedncm", participation=asked).records} == {clients}


def test_accuracies_are_those_of_the_predictions():
    data, clients = federation()
    out = go("fedavg")
    right = (out.predict(data.x) == data.y).numpy()
    assert list(out.client_accuracy) == [right[c.test].mean() for c in clients]
    union = rows_tested(clients)
    assert out.evaluation.global_accuracy == right[union].mean()
    f1 = partial(f1_score, average="macro")
    assert out.evaluation.macro_f1 == pytest.approx(f1(data.y[union], out.predict(data.x)[union]))
    own = go_all("solo").evaluation
    each = np.split(own.predictions, np.cumsum([len(c.test) for c in clients])[:-1])
    scores = [
        f1(data.y[c.test], p, labels=data.y[c.test].unique())
        for c, p in zip(clients, each, strict=True)
    ]
    assert own.macro_f1 == pytest.approx(np.mean(scores))
    for d, accuracy in out.evaluation.by_domain.items():
        assert accuracy == right[union[union % 2 == d]].mean()


@pytest.mark.parametrize(
    ("name", "settings", "trained"),
    [
        ("fedavg", "dim=5 bn=true bn_mode=local batch=16", 5 * 11 + 5 + 6 * 5 + 6 + 2 * 5),
        ("fedavg", "head=linear reset_opt=false", 6 * 11 + 6),
        ("ditto", "dim=5", 106),
        ("fedpcl", "dim=5", 70),
        ("fst-cbdg", "", 72),
        ("clip-zs", "", 0),
        ("atpfl-feat", "csc=true", 11 + 6 * 11),
    ],
)
def test_only_what_is_trained_and_deployed_counts_as_trained(name, settings, trained):
    assert go(name, settings).trainable == trained


def test_classes_are_owned_by_training_rows():
    data, clients = federation()
    out = go("clip-zs")
    assert tuple(out.classes_owned) == tuple(len(set(data.y[c.train].tolist())) for c in clients)
    assert out.classes_owned[4] == 1  # it has one row
    assert max(out.classes_owned) == 3
    unknown = go("clip-zs", {}, replace(data, y=torch.where(data.y == 0, -1, data.y)), clients)
    assert tuple(unknown.classes_owned) == tuple(
        len(set(data.y[c.train].tolist()) - {0}) for c in clients
    )


def test_a_test_row_that_two_clients_hold_counts_once_globally():
    data, clients = federation()
    out = go("fedncm", {}, data, [replace(c, test=clients[0].test) for c in clients])
    assert len(out.evaluation.rows) == len(clients[0].test)
    assert set(out.client_accuracy) == {out.accuracy}


IMPOSSIBLE = rows_of(
    """
    fedncm |                            | participation=0            | participation
    fedncm |                            | participation=1.5          | participation
    fed3r  |                            | execution=gram             | fed3r
    fed3r  |                            | execution=batchd           | 'batched'
    fedavg | opt=adam                   | execution=gram             | opt=adam
    fedpcl | opt=sgd noise_on=features  | execution=gram             | noise_on=features
    fedavg |                            | execution=batched chunk=0  | chunk is 0
    fedpcl | batch=1                    |                            | --set bn=false
    """
)
"""Method, settings, words of a run, and what is named; one row of a batch has no variance."""


@pytest.mark.parametrize(("name", "settings", "how", "named"), IMPOSSIBLE)
def test_what_cannot_be_run_is_refused(name, settings, how, named):
    refused(lambda: go(name, settings, **set_to(how)), named)


def test_batches_that_no_client_fills_end_the_run():
    training_error(lambda: go("fedavg", "drop_last=true batch=999"), "9 clients")


def test_a_state_of_another_run_is_refused():
    saved = []
    go("solo", rounds=1, on_round=keeps(saved))
    training_error(lambda: go("fedavg", state=saved[0]), "method 'solo'")
    training_error(lambda: go("solo", state=saved[0], seed=1), "seed 0")


def test_the_snapshot_is_not_a_view_of_the_run():
    saved = []
    out = go("solo", on_round=keeps(saved))
    held = {t.data_ptr() for state in out.states.values() for t in state.values()}
    last = saved[-1].tensors.values()
    assert held.isdisjoint(t.data_ptr() for t in last)
    assert sum(t.untyped_storage().nbytes() for t in last) == sum(t.nbytes for t in last)
    kept = {f"client/{c}/{k}": t for c, s in out.states.items() for k, t in s.items()}
    assert gap(saved[-1].tensors, kept) == 0.0


def test_classes_are_not_read_from_the_labels():
    data, clients = federation()
    out = go("fedavg", "head=linear", replace(data, classes=C + 2, text=None), clients)
    assert len(out.server["W"]) == 8


def test_personal_models_have_no_global_prediction():
    refused(lambda: go("solo").predict(federation()[0].x))
