"""Runs whose clients differ, hold a public set, or are scored everywhere, and what evaluation trains."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import (
    C,
    D,
    difference,
    federation,
    gap,
    go,
    go_all,
    rows_tested,
    rows_trained,
    run,
    server_gap,
    small,
)
from refusal import refused, store_error, training_error

from fedcache.federate.engine.method import ClientOverrides, everywhere
from fedcache.federate.methods import METHODS
from fedcache.heads.linear import affine

LEFT = ClientOverrides(columns=((0, 4),))
ENDS = ClientOverrides(columns=((8, D), (0, 2)))


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if "backbones" in m.mixed])
def test_all_columns_by_name_are_all_columns(name):
    same = {1: ClientOverrides(columns=((0, D),)), 3: ClientOverrides()}
    a = go(name, small(name), execution="sequential")
    assert difference(a, go(name, small(name), own=same)) == 0.0


def test_a_client_with_some_backbones_trains_as_on_a_store_that_has_only_those():
    data, clients = federation()
    out = go_all("solo", "dim=5", own={1: LEFT, 3: ENDS})
    ends = torch.cat([data.x[..., 8:D], data.x[..., :2]], -1)
    for client, x in ((1, data.x[..., :4]), (3, ends), (0, data.x)):
        alone = go_all(
            "solo", "dim=5", replace(data, x=x, text=None), clients, execution="sequential"
        )
        assert gap(out.states[client], alone.states[client]) == 0.0
        assert out.client_accuracy[client] == alone.client_accuracy[client]


@pytest.mark.parametrize("name", ["fedproto", "fedpcl"])
def test_prototypes_of_one_width_travel_between_clients_of_different_backbones(name):
    out = go_all(name, "dim=5 batch=16", own={1: LEFT, 3: ENDS})
    assert {out.states[c]["proto"].shape[-1] for c in (1, 3)} == {5}
    weights = next(k for k, t in out.states[0].items() if t.dim() == 2 and t.shape[-1] == D)
    assert [out.states[c][weights].shape[-1] for c in (1, 3)] == [4, D - 8 + 2]
    assert not np.isnan(out.client_accuracy).any()


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("fedavg", {0: LEFT}, "backbones"),
        ("fedproto", {0: ClientOverrides(hp={"dim": 9})}, "dim"),
        ("solo", {0: ClientOverrides(columns=((0, D + 1),))}, "11 columns"),
        ("solo", {9: LEFT}, "client 9"),
    ],
)
def test_differences_a_method_cannot_bear_are_refused(name, own, message):
    refused(lambda: go(name, own=own), message)


def test_the_traffic_of_a_client_is_that_of_its_own_backbones():
    method = replace(METHODS["solo"], paper_count=lambda width, *_: (width, 2 * width))
    totals = go_all(method, "bn=false", rounds=1, own={1: LEFT}).traffic.totals()
    assert totals["paper_up"] == 8 * D + 4
    assert totals["paper_down"] == 2 * (8 * D + 4)


def test_everywhere_scores_each_model_on_all_test_rows():
    data, clients = federation()
    method = replace(METHODS["solo"], protocol=everywhere)
    out = go_all(method, rounds=2)
    union = rows_tested(clients)
    assert len(out.evaluation.rows) == len(clients) * len(union)
    right = out.evaluation.predictions.reshape(len(clients), -1) == data.y.numpy()[np.sort(union)]
    assert np.array_equal(out.client_accuracy, right.mean(1))
    assert out.accuracy == right.mean(1).mean()
    lowest = go_all(replace(method, headline="min"), rounds=2)
    assert lowest.accuracy == right.mean(1).min() < out.accuracy


def test_the_public_set_neither_trains_nor_is_scored_and_everybody_reads_it():
    data, clients = federation()
    seen = []

    def fit(down, state, lanes, ctx):
        seen.append(ctx.public)
        return METHODS["solo"].fit(down, state, lanes, ctx)

    method = replace(METHODS["solo"], needs=frozenset({"labels", "public"}), fit=fit)
    out = go_all(method, "bn=false", rounds=1, execution="sequential")
    assert out.records[0].clients == tuple(range(1, 9))
    assert np.isnan(out.client_accuracy[0])
    assert all(torch.equal(p, data.x[clients[0].train]) for p in seen)
    empty = [replace(clients[0], train=np.empty(0, np.int64)), *clients[1:]]
    training_error(lambda: go_all(method, {}, data, empty), "client 0")


def test_what_evaluation_trains_reads_labels_of_all_training_rows_and_changes_no_run():
    data, clients = federation()

    def deploy(down, _state, lanes, ctx):
        x = lanes.full()[0]
        y = lanes.labels(lanes.positions())
        means = torch.stack(
            [x[y == c].mean(0) if (y == c).any() else x[0] * 0 for c in range(ctx.env.classes)]
        )
        return {**down, "probe": means}

    probed = replace(
        METHODS["fst-cbdg"],
        deploy=deploy,
        predict=lambda down, _s, _d, x, _c: affine(x, down["probe"]),
    )
    a = go_all("fst-cbdg", rounds=2)
    b = go_all(probed, rounds=2, eval_every=1)
    assert server_gap(a, b) == gap(a.states, b.states) == 0.0
    rows = rows_trained(clients)
    test = np.sort(rows_tested(clients))
    means = torch.stack([data.x[rows, 0][data.y[rows] == c].mean(0) for c in range(C)])
    assert np.array_equal(b.evaluation.predictions, (data.x[test, 0] @ means.mT).argmax(-1).numpy())
    assert torch.equal(b.predict(data.x[test]), torch.from_numpy(b.evaluation.predictions))


@pytest.mark.parametrize("need", ["pixels", "text tower", "text"])
def test_what_the_data_lack_is_asked_for(need):
    data, clients = federation()
    method = replace(METHODS["fedncm"], needs=frozenset({"labels", need}))
    store_error(
        lambda: run(method, method.resolve(), replace(data, text=None), clients, rounds=1), need
    )
