"""Calls of single functions of a method, and what facts about methods share: contexts, batches, sizes of the papers."""

import numpy as np
import torch
from federation import Rows, federation, rows_tested, rows_trained
from setting_lines import chosen

from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.engine.context import ClientRng, Ctx, RunConstants, generator
from fedcache.federate.methods import METHODS


def lanes(
    name,
    settings,
    *,
    classes=6,
    clients=9,
    width=11,
    lead=(),
    who=("client-1",),
    text=None,
):
    """A context of float64 lanes for calling a method's functions directly."""
    hp = METHODS[name].resolve("paper", chosen(settings))
    env = RunConstants(classes, width, 1, clients, text, torch.float64, torch.device("cpu"))
    draws = ClientRng(0, 1, tuple(who), len(lead), torch.float64, torch.device("cpu"))
    return Ctx(lead, hp, env, draws, tuple(range(len(who))), 1)


def paper(name, width, settings=None, *, classes=10):
    method = METHODS[name]
    return method.paper_count(width, classes, 5, method.resolve("paper", chosen(settings)))


def single(clients):
    """All rows in one client."""
    return [Rows("only", rows_trained(clients), rows_tested(clients))]


def rows_of_one(x, y):
    """The rows of one client: features [N, D] and labels."""
    return stack_clients(x[:, None], torch.tensor(y), [np.arange(len(y))], 0)


def model_of(tree):
    return {k: t for k, t in tree.items() if k[:2] in ("P.", "Q.") or k in ("W", "b")}


def exact(**kwargs):
    """A federation in float32, where laws hold bit for bit."""
    return federation(dtype=torch.float32), {"dtype": torch.float32, **kwargs}


def batches_of(client, seed, round_, epoch, purpose="batch", size=16):
    """The rows of each batch of an epoch, as the engine draws them."""
    n = len(client.train)
    order = client.train[generator(seed, purpose, round_, client.name, epoch).permutation(n)]
    return [torch.from_numpy(order[i : i + size]) for i in range(0, n, size)]
