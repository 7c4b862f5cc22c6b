"""A grid point alone is the lane it has in a grid: ``fit`` with leading axes (G, M) against (M,) and ()."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import federation, gap
from method_calls import lanes

from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.execution.grid_batch import pad_stack
from fedcache.federate.methods import METHODS
from fedcache.heads.linear import Tree

SWEPT = {
    "solo": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2), "momentum": (0.9, 0.5)},
    "fedavg": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2), "momentum": (0.9, 0.5), "logit_scale": (1.0, 5.0)},
    "fedprox": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2), "momentum": (0.9, 0.5), "mu": (0.3, 2.0)},
    "fedproto": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2), "lambda_proto": (0.5, 3.0)},
    "fedpcl": {"lr": (0.01, 0.002), "wd": (1e-3, 1e-2), "tau": (0.07, 0.5)},
    "fst-cbdg": {
        "lr": (0.1, 0.02),
        "beta": (0.9, 0.3),
        "gamma": (0.0, 0.6),
        "lambda": (1.0, 0.4),
        "sigma": (0.2, 0.5),
        "logit_scale": (1.0, 5.0),
    },
    "fedrep": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2)},
    "pfedme": {"lambda": (3.0, 1.0), "lr_p": (0.1, 0.02), "eta": (0.2, 0.5), "inner_decay": (0.0, 0.1)},
    "perfedavg": {"alpha": (0.3, 0.05), "beta": (0.1, 0.02)},
    "supcon": {"lr": (0.01, 0.002), "wd": (1e-3, 1e-2), "tau": (0.07, 0.5), "tau_base": (0.07, 0.1)},
    "fedntd": {
        "lr": (0.1, 0.02),
        "wd": (1e-3, 1e-2),
        "beta": (0.3, 2.0),
        "tau": (1.0, 3.0),
        "lr_decay": (1.0, 0.5),
        "logit_scale": (1.0, 5.0),
    },
    "scaffold": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2)},
    "ditto": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2), "lambda": (0.3, 2.0)},
    "moon": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2), "mu": (0.3, 5.0), "tau": (0.5, 0.1)},
    "tpfl-feat": {"lr": (0.1, 0.02), "wd": (1e-3, 1e-2), "a": (0.5, 1.5), "scale": (100.0, 10.0)},
    "atpfl-feat": {"lr": (0.1, 0.02), "a": (0.5, 1.5), "mu_aug": (0.5, 2.0), "gamma_aug": (0.5, 0.1)},
}


def share(tree: Tree, axes: int) -> Tree:
    """Tensors without leading axes, given ``axes`` of length 1."""
    return {k: t.reshape((1,) * axes + tuple(t.shape)) for k, t in tree.items()}


def optimizers(name):
    """What a method can step with; one without the switch steps by SGD."""
    choices = [h.choices for h in METHODS[name].hparams if h.name == "opt"]
    return [opt for opt in ("sgd", "adam") if opt in (choices[0] if choices else ("sgd",))]


@pytest.mark.parametrize(("name", "opt"), [(name, opt) for name in SWEPT for opt in optimizers(name)])
def test_a_lane_of_a_grid_is_the_point_alone(name, opt):
    data, clients = federation()
    method = METHODS[name]
    declared = {h.name for h in method.hparams}
    group = sorted(clients[1:4], key=lambda c: -len(c.train))  # M = 3, G = 2, C = 6, D = 11, P = 5
    who = [c.name for c in group]
    settings = {k: v for k, v in {"opt": opt, "batch": 16, "epochs": 2, "dim": 5}.items() if k in declared}
    swept = {k: torch.tensor(v, dtype=torch.float64)[:, None] for k, v in SWEPT[name].items()}
    y = data.y if "labels" in method.needs else None
    trains = [c.train for c in group]
    servers = []
    for g in range(2):  # two different servers
        ctx = lanes(name, settings, text=data.text)
        server = method.init(ctx)
        noise = np.random.default_rng(g)
        server = {
            k: t + 0.1 * torch.from_numpy(noise.standard_normal(t.shape)) if t.is_floating_point() else ~t
            for k, t in server.items()
        }
        if "counts" in server:
            server["counts"] = torch.from_numpy(noise.integers(0, 4, server["counts"].shape).astype(float))
        servers.append(method.broadcast(server, ctx))
    down = {k: torch.stack([s[k] for s in servers])[:, None] for k in servers[0]}
    grid = lanes(name, settings, lead=(2, 3), who=who, text=data.text, swept=swept)
    rows = stack_clients(data.x, y, trains, 2)
    state, up = method.fit(down, method.enter(down, rows, grid), rows, grid)
    for g in range(2):
        floats = {k: v[g] for k, v in SWEPT[name].items()}
        ctx = lanes(name, {**settings, **floats}, lead=(3,), who=who, text=data.text)
        rows = stack_clients(data.x, y, trains, 1)
        one = share(servers[g], 1)
        want_state, want_up = method.fit(one, method.enter(one, rows, ctx), rows, ctx)
        assert gap({k: t.expand(2, *t.shape[1:])[g].expand(want_up[k].shape) for k, t in up.items()}, want_up) < 1e-10
        assert gap({k: t.expand(2, *t.shape[1:])[g] for k, t in state.items()}, want_state) < 1e-10


@pytest.mark.parametrize("name", SWEPT)
def test_one_client_alone_without_axes_is_its_lane(name):
    data, clients = federation()
    method = METHODS[name]
    y = data.y if "labels" in method.needs else None
    group = sorted(clients[1:4], key=lambda c: -len(c.train))
    down = method.broadcast(method.init(lanes(name, {}, text=data.text)), lanes(name, {}, text=data.text))
    singles = []
    for c in group:
        shard = data.x[c.train].clone()  # the client's own little store
        ctx = lanes(name, {}, who=(c.name,), text=data.text)
        rows = stack_clients(shard, None if y is None else y[c.train], [np.arange(len(c.train))], 0)
        singles.append(method.fit(down, method.enter(down, rows, ctx), rows, ctx))
    ctx = lanes(name, {}, lead=(3,), who=[c.name for c in group], text=data.text)
    rows = stack_clients(data.x, y, [c.train for c in group], 1)
    state, up = method.fit(share(down, 1), method.enter(share(down, 1), rows, ctx), rows, ctx)
    assert gap(pad_stack([u for _, u in singles]), up) < 1e-12
    alone = pad_stack([s for s, _ in singles])
    for k, t in state.items():  # padding of rows/ tensors is not part of a client's state
        t = t.expand(3, *t.shape[1:])
        for i, c in enumerate(group):
            cut = slice(len(c.train)) if k.startswith("rows/") else slice(None)
            assert gap(alone[k][i][cut], t[i][cut]) < 1e-12
