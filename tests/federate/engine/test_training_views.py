"""Which stored view training reads: the plain image unless a method is asked, and never in a test."""

from dataclasses import replace

import pytest
import torch
from federation import federation, gap, go, server_gap
from method_calls import lanes
from refusal import store_error

from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.engine.context import training_views
from fedcache.federate.methods import METHODS

METHODS_OF_THE_TABLE = {
    "fedavg": "epochs=2",
    "fedrep": "e_h=2",
    "fedpcl": "epochs=2",
    "pfedme": "epochs=2 eta=0.2",
    "perfedavg": "epochs=2 adapt_steps=0 beta=0.1",
}


def swapped(data, views):
    """The data with these views in place of the stored ones, in this order."""
    return replace(data, x=data.x[:, views].contiguous())


@pytest.mark.parametrize("method", METHODS_OF_THE_TABLE)
def test_training_on_the_augmented_view_is_training_on_its_rows(method):
    data, clients = federation(views=2)
    plain = f"batch=16 {METHODS_OF_THE_TABLE[method]}"
    augmented = plain + " train_view=aug" + " proto_view=aug" * (method == "fedpcl")
    drawn = go(method, augmented, data, clients)
    expected = go(method, plain, swapped(data, [1, 1]), clients)
    center = go(method, plain, data, clients)
    assert drawn.fidelity == "cached_views"
    assert center.fidelity == "exact"
    assert max(server_gap(drawn, expected), gap(drawn.states, expected.states)) < 1e-12
    assert server_gap(drawn, center) > 1e-4


def test_tests_read_the_plain_image():
    data, clients = federation(views=2)
    lost = replace(data, x=torch.stack([-data.x[:, 0], data.x[:, 1]], 1))
    good, bad = (go("fedavg", "batch=16 epochs=2 train_view=aug", d, clients) for d in (data, lost))
    assert server_gap(good, bad) == 0.0  # trained alike
    # and scored on what view 0 is
    assert bad.predict(lost.x[:, :1]).tolist() != good.predict(data.x[:, :1]).tolist()
    rows = bad.evaluation.rows
    assert bad.evaluation.predictions.tolist() == bad.predict(lost.x[rows, :1]).tolist()


def test_an_epoch_draws_one_augmentation_of_each_row_and_never_the_plain_one():

    data, clients = federation(views=4)
    ctx = lanes("fedavg", "train_view=aug", lead=(1,), who=[clients[0].name])
    rows = stack_clients(data.x, data.y, [clients[0].train], 1)
    first, again, other, inner = (
        training_views(rows, ctx, *key)[0] for key in ((0,), (0,), (1,), (0, "inner"))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Per-FedAvg's two batches show a row in views of their own
    assert not torch.equal(first, inner)
    assert set(first.flatten().tolist()) == {1, 2, 3}


@pytest.mark.parametrize("setting", ["train_view", "proto_view"])
def test_augmentations_that_are_not_stored_are_asked_for_in_vain(setting):
    store_error(lambda: go("fedpcl", {setting: "aug"}), f"{setting}=aug", "--views 4")


@pytest.mark.parametrize(("score", "warnings"), [("dot", 1), ("cos", 0), ("mse", 0)])
def test_padded_prototypes_that_can_hardly_win_are_told_of(score, warnings):
    # A merged prototype is a mean of the clients', which point elsewhere: it is shorter than any of them.
    asked = f"infer_proto=local_padded infer_score={score} batch=16 dim=5"
    assert len([w for w in go("fedpcl", asked).warnings if "local_padded" in w]) == warnings


def test_one_view_twice_is_what_two_views_are_where_images_have_one():
    # Released FedPCL, whose two draws of a digit are equal (D-08) and whose noisy image is shown twice (D-20).
    data, clients = federation()
    official = {**METHODS["fedpcl"].resolve("official"), "batch": 16, "dim": 5}
    one, two, twice = (
        go("fedpcl", {**official, "views": v}, data, clients) for v in ("1", "2", "twice")
    )
    assert server_gap(two, twice) == 0
    # its candidates are 2B embeddings, not B
    assert gap(one.server["sets"], twice.server["sets"]) > 1e-4
    noisy, clients = federation(views=2)
    drawn = go(
        "fedpcl",
        {**official, "views": "twice", "train_view": "aug", "proto_view": "aug"},
        noisy,
        clients,
    )
    only = go("fedpcl", {**official, "views": "twice"}, swapped(noisy, [1]), clients)
    assert server_gap(drawn, only) < 1e-12
