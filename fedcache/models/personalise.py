"""Personalisation: a model for a client that took no part in the training.

A new client receives the broadcast that the server sent after the last round. It then runs the steps of every client:
``enter``, then ``fit`` for as many rounds as the run had, with the run's hyperparameters and the draws of a client of
that name. Its uploads are discarded. Some methods need no training, because their personal part is a function of the
broadcast and the client's rows (steps of adaptation, a cache, its own ridge regression). For these, and for methods
without a broadcast, personalising a client of the run from its own rows gives exactly its model in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.errors import FederatedRunError, StoreError, UsageError
from fedcache.federate.engine.client_data import FrozenEncoders, cut_out, stack_clients
from fedcache.federate.engine.context import Ctx, check_views
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.method import Method, keep_down, less_training_state
from fedcache.federate.engine.outcome import DeployedModel, missing_rows, no_training_rows
from fedcache.federate.trust.update_validation import all_bounded
from fedcache.models.client_stacks import PREFIX, ClientTensors
from fedcache.models.saved_model import SavedModel, client_tensors, owned


@dataclass(frozen=True)
class NewClient:
    """A client that took no part in the training."""

    name: str
    x: Tensor  # [N, V, D] features as the model reads them, or images uint8 [N, 1, H W 3]
    label: Tensor  # int64 [N], index of the model's class; -1 if unknown
    train: NDArray[np.int64]  # training rows; labelled if the method reads labels


def settled(model: SavedModel, method: Method, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of the new client: those of the run, replaced by ``settings`` (words or typed values).

    Raises UsageError for a method that has no personal part under these hyperparameters, or learns from test rows; and
    as ``Method.hparam``.
    """
    facts = model.facts
    hp = dict(facts.hp)
    for name, value in settings.items():
        hp[name] = method.hparam(name).parse(value)
    if "global" in (facts.protocol, method.protocol(hp)):
        why = " with these settings."
        if not facts.personal:
            why = (
                ", because it trained one global model. A new client can use this model unchanged."
            )
        raise UsageError(
            f"{facts.method} has no personal part{why}", "fedcache predict RUN --store SHARD"
        )
    if method.reads_test(hp):
        raise UsageError(
            f"The models of {facts.method} adapt to labelled test rows, but a new client has no such rows.",
            "--set adapt_on=train",
        )
    return hp


def trains(method: Method) -> bool:
    """Whether the personal part is trained round by round. Otherwise the broadcast and the rows determine it."""
    return method.personal_part is less_training_state


def personalise(
    model: SavedModel,
    client: NewClient,
    *,
    settings: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    encoders: FrozenEncoders | None = None,
    device: str = "cpu",
    each_round: Callable[[], None] = lambda: None,
) -> SavedModel:
    """A model with the personal part of only ``client``.

    Raises UsageError as ``settled``, for a method that needs other clients' rows, and for settings that do not fit the
    broadcast of the run's server; StoreError for a client without rows and a model that lacks tensors of the broadcast;
    FederatedRunError for training that diverges.

    Args:
        model: of a run of a personalised method.
        client: the new client. With the name of a client of the run it gets the draws of that client.
        settings: hyperparameters that replace those of the run.
        rounds: of local training, each with the run's number of epochs; None for as many as the run had.
        encoders: live encoders, for a model that runs some.
        device: of the computation.
        each_round: called before every round; an exception that it raises ends the training.
    """
    facts = model.facts
    method = model.find_method()
    hp = settled(model, method, settings or {})
    n = len(client.train)
    if not n:
        raise StoreError(
            f"{client.name} has no labelled training rows.",
            "Give a store with labelled training rows.",
        )
    if trains(method) and method.gradient and "batch" in hp:
        batch = int(hp["batch"])
        # A client with more rows than two batches is checked as if it had two: more rows give no fewer batches.
        if not batch_sizes(min(n, 2 * batch), hp):
            raise StoreError(
                f"{client.name} has {n} rows, too few for one batch of {batch}.", "--set batch=1"
            )
    # A new client has the number after the last one. Columns and settings of single clients of the run do not apply.
    number = facts.saved.get(client.name, facts.clients)
    base = replace(model, facts=replace(facts, hp=hp, overrides={}))
    ctx = base.context((client.name, number), encoders=encoders, device=device)
    ctx = replace(ctx, env=replace(ctx.env, views=client.x.shape[1]))
    check_views(hp, ctx.env.views)
    down = {k: t.to(device) for k, t in model.tree("server/").items()}
    label = None
    if "labels" in method.reads(hp):
        label = client.label.to(device)
    x = client.x.to(device)
    # ``data`` holds copies of the training rows; ``seen`` refers to the same rows in ``x``, as in the scores of a run.
    (data,) = cut_out(x, label, [client.train])
    seen = stack_clients(x, label, [client.train], 0)
    if rounds is None:
        rounds = facts.rounds
    if not trains(method):
        rounds = 0
    try:
        state = method.enter(down, data, ctx)
        for number_of_round in range(rounds):
            each_round()
            state, _ = method.fit(down, state, data, at_round(ctx, number_of_round))
        deployed = down
        if method.deploy is not keep_down:
            # A probe would be trained on the labelled rows of all clients.
            absent = missing_rows(
                f"The classifier of {method.name} is a probe that is trained on the labelled rows of all clients. "
                "These rows are not available here.",
                "Train again with the new client as one of the clients.",
            )
            deployed = method.deploy(down, state, absent, ctx)
        with torch.no_grad():
            part = method.personal_part(deployed, state, seen, ctx)
    except KeyError as error:
        raise StoreError(
            f"{method.name} needs {error} to make a personal model, but the run did not store it.",
            "Train the run again with --fresh and this version of fedcache.",
        ) from error
    except RuntimeError as error:
        if not settings:
            raise
        words = ", ".join(f"{k}={v}" for k, v in settings.items())
        raise UsageError(
            f"{words} does not fit what the server of the run sends to clients: {error}",
            "Leave --set out.",
        ) from error
    personal = DeployedModel(method, deployed, part, no_training_rows(method.name), ctx)
    tensors = owned(client_tensors(personal, down))
    floats = {k: t for k, t in tensors.items() if t.is_floating_point()}
    if not all_bounded(floats):
        raise FederatedRunError(
            f"The training of {client.name} diverged.", "Try a smaller learning rate: --set lr=0.01"
        )
    shared = {k: t for k, t in model.tensors.items() if not k.startswith(PREFIX)}
    stacks = ClientTensors()
    stacks.add(number, tensors)
    new_facts = replace(base.facts, saved={client.name: number})
    return SavedModel(new_facts, {**shared, **stacks.stacked()})


def at_round(ctx: Ctx, number: int) -> Ctx:
    """The context of round ``number``, counted from 0, with the draws of that round."""
    return replace(ctx, round=number, rng=replace(ctx.rng, round=number))
