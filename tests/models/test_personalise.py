"""The model of a client that was not there: over all personalised methods, and what is refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import one_of_each
from federation import VARIANTS, cases, fitted, go_tiny, ids, tiny
from methods_tried import tried
from refusal import refused, store_error, training_error
from test_saved_model import facts_of
from torch.nn.functional import cross_entropy

from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.methods import METHODS
from fedcache.models.saved_model import NewClient, SavedModel, collect, personalise, trains


def trained(case, **kwargs):
    """The saved model of a case on the tiny federation, its data and its clients."""
    data, clients = tiny(views=4)
    out = go_tiny(*case, data, clients, **kwargs)
    data = fitted(METHODS[case[0]], data)
    return collect(out, facts_of(out, data), data, None, []), data, clients


def shard(data, client, name="newcomer"):
    """A client's rows alone, as a store of its own has them: training rows first."""
    rows = np.concatenate([client.train, client.test])
    x = data.x[rows]
    x = x if data.image is not None else x.double()
    return NewClient(name, x, data.y[rows], np.arange(len(client.train)))


def scores(model, data, name, rows):
    x = data.x[rows, 0]
    x = x if data.image is not None else x.to(getattr(torch, model.facts.dtype))
    with torch.no_grad():
        return model.deployed(name, encoders=data.towers).scores(x)


def is_personal(case):
    method = METHODS[case[0]]
    return method.protocol(method.resolve("paper", case[1])) != "global"


PERSONAL = [case for case in cases() + VARIANTS if is_personal(case)]
NEEDS_OTHERS = [c for c in PERSONAL if c[0] == "min-local" or c[1].get("score") == "probe"]
LEAKS = [c for c in PERSONAL if c[1].get("adapt_on") == "test"]
POSSIBLE = [c for c in PERSONAL if c not in NEEDS_OTHERS + LEAKS]
FUNCTIONS = ("tip-local", "fed3r", "perfedavg")
ALONE = ("solo", "supcon", "local-prompt", "local-supervised")


@pytest.mark.parametrize("case", [c for c in POSSIBLE if c[0] in FUNCTIONS + ALONE], ids=ids)
def test_a_client_of_the_run_gets_the_very_model_it_had(case):
    """Where the personal part is a function of broadcast and rows, or nothing is ever received."""
    model, data, clients = trained(case, participation=None, execution="sequential")
    for client in clients:
        if client.name not in model.facts.saved:
            continue
        # it rested
        if trains(METHODS[case[0]]) and not batch_sizes(len(client.train), model.facts.hp):
            store_error(
                lambda client=client: personalise(model, shard(data, client, client.name)),
                "too few for one batch",
            )
            continue
        made = personalise(model, shard(data, client, client.name), encoders=data.towers)
        assert made.clients == [client.name]
        rows = np.arange(len(data.x))
        own, had = (scores(one, data, client.name, rows) for one in (made, model))
        assert torch.equal(own, had)


@pytest.mark.parametrize("case", tried(POSSIBLE), ids=ids)
def test_a_new_client_gets_a_model_that_can_be_saved(case, tmp_path):
    model, data, clients = trained(case)
    made = personalise(model, shard(data, clients[1]), encoders=data.towers)
    made.save(tmp_path / "m.safetensors")
    found = SavedModel.load(tmp_path / "m.safetensors")
    assert found.clients == ["newcomer"]
    rows = clients[1].test
    assert torch.equal(scores(found, data, None, rows), scores(made, data, "newcomer", rows))
    again = personalise(model, shard(data, clients[1]), encoders=data.towers)
    assert all(torch.equal(t, again.tensors[k]) for k, t in made.tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    tried(one_of_each(c for c in POSSIBLE if c in cases() and "pixels" not in METHODS[c[0]].needs)),
    ids=ids,
)
def test_a_new_client_learns_its_rows(case):
    """On its own rows it is about as right as the client of the run that has them.

    Where the client's prompt and the shared one were trained together, its loss only falls, because the loss of a
    prompt is not convex.
    """
    name, settings = case
    data, clients = tiny(views=4, sizes=(60, 60, 60, 60))
    if "batch" in settings:
        settings = {**settings, "batch": 16}
    # A projection must also come to prototypes that others made.
    if name == "fedproto":
        settings = {**settings, "epochs": 8}
    out = go_tiny(name, settings, data, clients, rounds=8, participation=None)
    data = fitted(METHODS[name], data)
    model = collect(out, facts_of(out, data), data, None, [])
    new = shard(data, clients[1])
    rows = clients[1].train
    trained = personalise(model, new, encoders=data.towers)
    untrained = personalise(model, new, encoders=data.towers, rounds=0)
    made, before, had = (
        torch.as_tensor(scores(one, data, client, rows))
        for one, client in (
            (trained, "newcomer"),
            (untrained, "newcomer"),
            (model, clients[1].name),
        )
    )
    y = data.y[rows]
    if name in ("fedpgp", "dp-fpl", "promptfolio"):
        assert cross_entropy(made, y) < cross_entropy(before, y)
    else:
        short = 0.2 if name == "fedproto" else 0.1
        right = (made.argmax(-1) == y).double().mean()
        assert right >= (had.argmax(-1) == y).double().mean() - short


@pytest.mark.parametrize("case", NEEDS_OTHERS, ids=ids)
def test_a_method_that_needs_others_rows_is_refused(case):
    model, data, clients = trained(case)
    refused(lambda: personalise(model, shard(data, clients[1])), case[0])


def test_adaptation_to_test_rows_is_refused():
    model, data, clients = trained(LEAKS[0])
    refused(lambda: personalise(model, shard(data, clients[1])), "test rows")
    made = personalise(model, shard(data, clients[1]), settings={"adapt_on": "train"})
    assert made.clients == ["newcomer"]


def test_settings_replace_the_runs_and_are_saved():
    model, data, clients = trained(("perfedavg", {"alpha": 0.1, "dim": 5}))
    new = shard(data, clients[1])
    plain = personalise(model, new)
    longer = personalise(model, new, settings={"adapt_steps": "5"})
    assert longer.facts.hp["adapt_steps"] == 5
    assert any(not torch.equal(plain.tensors[k], longer.tensors[k]) for k in plain.tensors)
    refused(
        lambda: personalise(model, new, settings={"adapt_step": 3}), "hyperparameter of perfedavg"
    )


def test_what_does_not_fit_is_told():
    model, data, clients = trained(("fedrep", {}))
    new = shard(data, clients[1])
    store_error(lambda: personalise(model, replace(new, train=np.empty(0, np.int64))), "newcomer")
    diverges = replace(new, x=new.x * float("inf"))
    training_error(lambda: personalise(model, diverges), "newcomer diverged")
