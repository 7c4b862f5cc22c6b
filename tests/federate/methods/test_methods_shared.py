"""What closed forms share: uploads of runs that differ in what the server reads, sums of any partition, eigenvalues."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from federation import (
    Rows,
    difference,
    federation,
    fitted,
    gap,
    go_all,
    go_points,
    rows_trained,
    server_gap,
    small,
    spread,
)
from methods_tried import tried
from refusal import refused
from setting_lines import cases_of

from fedcache.errors import FedcacheError
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.grid_batch import GridCache
from fedcache.federate.methods import METHODS

FREE = [(name, h.name) for name, m in METHODS.items() for h in m.hparams if not h.fit]
"""(method, hyperparameter that its ``fit`` is said not to read)."""


@pytest.mark.parametrize("name", tried(METHODS))
def test_every_number_has_a_least_value_and_is_refused_below(name):
    for h in METHODS[name].hparams:
        assert h.kind in ("int", "float", "bool", "choice"), h.name
        if h.kind in ("int", "float"):
            assert h.low is not None, h.name
            refused(partial(METHODS[name].resolve, "paper", {h.name: h.low - 1}))


def other(h, value):
    """Another legal value."""
    if h.kind == "bool":
        return not value
    if h.kind == "choice":
        return next(c for c in h.choices if c != value)
    return 0.7 if value != 0.7 else 0.3


def uploads(name, hp):
    """What every client sends in the first round."""
    data, clients = federation()
    method = METHODS[name]
    job = RunState(method, hp, fitted(method, data), clients, 0, torch.float64)
    job.start()
    return [job.fit_one(job.down(), c) for c in job.eligible]


@pytest.mark.parametrize(("name", "key"), FREE)
def test_uploads_do_not_depend_on_what_fit_does_not_read(name, key):
    method = METHODS[name]
    for settings in ({}, {"bias": True}) if name == "fed3r" else ({},):
        hp = method.resolve("paper", small(name) | settings)
        changed = {**hp, key: other(method.hparam(key), hp[key])}
        for a, b in zip(uploads(name, hp), uploads(name, changed), strict=True):
            assert gap(a, b) == 0.0


GRIDS = cases_of(
    """
    fed3r
    fed3r bias=true
    fed3r bias=true reg_bias=true w_normalize=true
    fed3r omega=0.5
    fed3r rff_dim=8
    fed3r-prior
    fedcgs gamma_shrink=0.1
    fedcgs cov=total gamma_shrink=0.1
    fedcof
    afl
    gda
    gh-ofl head=lda
    gh-ofl head=qda
    fedpft
    """
)


@pytest.mark.parametrize(("name", "settings"), GRIDS)
def test_points_that_share_uploads_are_the_runs_alone(name, settings):
    """Five points solve by eigenvalues."""
    method = METHODS[name]
    grid = [spread(method, method.resolve("paper", settings), 1.0 + 0.4 * g) for g in range(5)]
    for hp, out in zip(grid, go_points(name, grid), strict=True):
        alone = go_all(name, hp)
        assert difference(out, alone) < 1e-10
        assert out.traffic == alone.traffic


def test_shared_clients_fit_once():
    """Five ridges, then another partition of the same rows: seven fits in all, those of the first seven clients."""
    data, clients = federation()
    clients = clients[:7]
    calls = []
    fed3r = METHODS["fed3r"]
    counted = replace(fed3r, fit=lambda *a: calls.append(1) or fed3r.fit(*a))
    shared = GridCache()
    ridges = [{"lam": 0.1 * g} for g in range(1, 6)]
    go_points(counted, ridges, data, clients, cache=shared)
    assert len(calls) == 7
    rows = np.random.default_rng(0).permutation(rows_trained(clients))
    dealt = [
        Rows(f"other-{i}", part, clients[0].test) for i, part in enumerate(np.array_split(rows, 3))
    ]
    (again,) = go_points(counted, ridges[:1], data, dealt, cache=shared)
    assert len(calls) == 7
    alone = go_all(counted, ridges[0], data, dealt)
    assert server_gap(again, alone) < 1e-12
    assert again.traffic == alone.traffic
    go_points(counted, ridges[:1], data, [Rows("fewer", rows[:-1], clients[0].test)], cache=shared)
    assert len(calls) == 7 + 3 + 1


def test_one_singular_ridge_of_a_grid_ends_alone():
    """Two equal features: lam = 0 fails, the other points do not."""
    data, clients = federation()
    data = replace(data, x=torch.cat([data.x, data.x[..., :1]], -1), text=None)
    found = go_points("fed3r", [{"lam": lam} for lam in (0.1, 0.0, 1.0, 2.0)], data, clients)
    assert [isinstance(out, FedcacheError) for out in found] == [False, True, False, False]
    assert server_gap(found[2], go_all("fed3r", "lam=1.0", data, clients, rounds=1)) < 1e-10
