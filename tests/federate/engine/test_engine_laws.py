"""Laws of the engine, over the table of methods: whatever a method computes, these hold.

They run on the tiny federation, where a law of a method takes milliseconds; 4 clients, 3 classes, 5 features.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import FULL, one_of_each
from federation import (
    TINY,
    VARIANTS,
    cases,
    difference,
    fitted,
    gap,
    go_tiny,
    ids,
    run,
    run_points,
    scaled,
    small,
    spread,
    tiny,
    wide,
)
from pairs import fitting, parametrize, served
from safetensors.torch import load, save

from fedcache.federate.engine.context import generator
from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.methods import METHODS


def pytest_generate_tests(metafunc):
    parametrize(metafunc)


def pair_for(execution, views=4):
    """The tiny federation with several views, or with one and enough features for coordinates on rows to be fewer."""
    return wide() if execution == "gram" else tiny(views=views)


def closeness(name):
    """How far sums in another order may lead a method, in float64."""
    # BatchNorm over a few pixels and Adam on dead units turn the last bits of a sum into visible ones.
    return 1e-10 if "batched" in METHODS[name].executions else 1e-4


ALL = cases() + VARIANTS
DRAWN = ALL if FULL else cases()
"""For laws of what every method has in common: the variants of a method are tried in the full draw."""
ONE_EACH = one_of_each(cases(), lambda case: case[0])
"""For laws that no optimiser can break: one case of every method, all of them in the full draw."""
EVERYTHING = pytest.mark.parametrize("case", ALL, ids=ids)
CASES = pytest.mark.parametrize("case", cases(), ids=ids)
METHOD = pytest.mark.parametrize("name", METHODS)

LABEL_FREE = {"clip-zs", "fst-cbdg", "flesd", "flesd-head", "flesd-cc", "fedavg-simclr", "fedprox-simclr", "min-local",
              "non-fl"}  # fmt: skip
"""The papers' unsupervised methods, named here so that none of them leaves the law by declaring labels."""


@served(ALL, ["batched", "gram"])
def test_executions_agree(case, execution):
    pair = pair_for(execution)
    loop, other = go_tiny(*case, *pair, execution="sequential"), go_tiny(*case, *pair, execution=execution, chunk=2)
    assert other.execution == execution
    assert difference(loop, other) < closeness(case[0])
    assert loop.traffic == other.traffic


@served(DRAWN, ["batched", "gram"])
def test_a_grid_point_is_the_run_alone(case, execution):
    method, (data, clients) = METHODS[case[0]], pair_for(execution)
    hp = method.resolve("paper", scaled({**small(case[0]), **case[1]}))
    hps = [spread(method, hp, factor) for factor in (1.0, 0.8, 1.1)]
    how = {"rounds": 2, "participation": 3, "dtype": torch.float64}
    points = run_points(method, hps, fitted(method, data), clients, execution=execution, chunk=2, **how)
    for alone, point in zip(hps, points, strict=True):
        single = run(method, alone, fitted(method, data), clients, execution="sequential", **how)
        assert difference(single, point) < closeness(case[0])
        assert single.traffic == point.traffic


@EVERYTHING
def test_dual_serves_sgd_on_features(case):
    # The one table of exceptions: what is added here must say why in ``dual.serves`` or in the method.
    method = METHODS[case[0]]
    takes_sgd = any(h.name == "opt" and "sgd" in h.choices for h in method.hparams) or case[0] in (
        "pfedme",
        "perfedavg",
    )
    other = {"central", "fedpft", "fst-cbdg", "scaffold", "flesd-head", "flesd-cc", "min-local", "non-fl", "promptfl",
             "fedavg-simclr", "fedprox-simclr", "tpfl-feat", "atpfl-feat"}  # fmt: skip
    if method.gradient and takes_sgd and "batched" in method.executions and case[0] not in other:
        assert "gram" in method.executions
    else:
        assert "gram" not in method.executions


def test_every_execution_that_a_method_names_has_a_case():
    # Pairs that cannot be are not collected: none may be missing because an execution refuses all of them.
    for name, method in METHODS.items():
        for execution in method.executions:
            assert any(fitting(case, execution) for case in ALL if case[0] == name), (name, execution)


@served(DRAWN, ["batched", "gram"])
def test_chunks_change_nothing(case, execution):
    pair = pair_for(execution)  # three clients take part: 2 leaves one of them to a chunk of its own
    assert difference(*(go_tiny(*case, *pair, execution=execution, chunk=k) for k in (2, 3))) < 1e-12


@served(cases(), ["sequential", "batched", "gram"])
def test_the_same_seed_gives_the_same_bits_in_float32(case, execution):
    data, clients = wide(dtype=torch.float32) if execution == "gram" else tiny(dtype=torch.float32)
    a, b = (go_tiny(*case, data, clients, execution=execution, dtype=torch.float32) for _ in range(2))
    assert difference(a, b) == 0.0
    assert np.array_equal(a.evaluation.predictions, b.evaluation.predictions)


def test_a_seed_means_the_same_draws_in_every_process():
    # Two runs in one process cannot see a stream keyed by hash(), which every process salts anew.
    assert generator(0, "batch", 1, "client-0", 2).permutation(8).tolist() == [2, 3, 6, 5, 1, 0, 7, 4]


@served(DRAWN, ["sequential", "batched", "gram"])
def test_a_resumed_run_has_the_same_bits(case, execution):
    saved: dict[int, Snapshot] = {}
    pair = pair_for(execution)
    whole = go_tiny(*case, *pair, execution=execution, on_round=lambda r, _m, _t, snap: saved.update({r: snap()}))
    for after, snap in saved.items():
        snap = Snapshot(load(save(snap.tensors)), json.loads(json.dumps(snap.meta)))  # as it comes back from files
        resumed = go_tiny(*case, *pair, execution=execution, state=snap)
        assert difference(whole, resumed) == 0.0, f"resumed after round {after}"
        assert resumed.traffic == whole.traffic
        assert [replace(r, seconds=0.0) for r in resumed.records] == [replace(r, seconds=0.0) for r in whole.records]


@served(cases(), ["batched", "gram"])
def test_executions_may_change_between_rounds(case, execution):
    pair = pair_for(execution, views=1)
    whole = go_tiny(*case, *pair, execution=execution)
    for first, then in (
        ("sequential", execution),
        (execution, "sequential"),
        *((("batched", execution),) if execution == "gram" else ()),
    ):
        saved: list[Snapshot] = []
        go_tiny(*case, *pair, execution=first, rounds=1, on_round=lambda _r, _m, _t, snap, to=saved: to.append(snap()))
        assert difference(go_tiny(*case, *pair, execution=then, state=saved[0]), whole) < closeness(case[0])


@CASES
def test_the_order_of_clients_does_not_matter(case):
    data, clients = tiny()
    order = [0, 2, 3, 1]  # the first client may be a public set
    a, b = go_tiny(*case, data, clients), go_tiny(*case, data, [clients[i] for i in order])
    assert np.array_equal(a.client_accuracy[order], b.client_accuracy, equal_nan=True)
    close = closeness(case[0])
    if "sets" not in a.server:  # a server that keeps one row per client keeps it in their order
        assert gap(a.server, b.server) < close
    for new, old in enumerate(order):
        assert gap(a.states.get(old, {}), b.states.get(new, {})) < close


@served(ONE_EACH, ["sequential", "batched", "gram"], only=lambda name: not METHODS[name].central)
def test_who_is_not_sampled_sends_nothing_and_keeps_its_state(case, execution):
    before: list[dict[str, torch.Tensor]] = []
    data, clients = (wide if execution == "gram" else tiny)(
        sizes=(*TINY, 9, 5)
    )  # two of six a round, so that a stack has two lanes and two are absent
    out = go_tiny(*case, data, clients, execution=execution, participation=2,
                  on_round=lambda _r, _m, _t, snap: before.append(snap().tensors))  # fmt: skip
    for record, old, new in zip(out.records[1:], before[:-1], before[1:], strict=True):
        for key in old:
            if key.startswith("client/") and int(key.split("/")[1]) not in record.clients:
                assert torch.equal(old[key], new[key])
    absent = set(range(len(clients))) - {c for r in out.records for c in r.clients}
    assert absent, "the law needs a client that is never sampled"
    assert all(out.traffic.up[c] == out.traffic.down[c] == 0 for c in absent)
    assert not absent & set(out.states)


@served(ONE_EACH, ["sequential", "batched", "gram"])
def test_no_method_trains_on_a_test_row(case, execution):
    data, clients = wide() if execution == "gram" else tiny()
    holed = data.x.clone()
    holed[np.concatenate([c.test for c in clients])] = torch.nan
    a = go_tiny(*case, data, clients, execution=execution)
    b = go_tiny(*case, replace(data, x=holed), clients, execution=execution)
    assert gap(a.server, b.server) == 0.0
    assert gap(a.states, b.states) == 0.0
    if a.protocol == "global":  # nor does the probe that evaluation trains
        x = fitted(METHODS[case[0]], data).x
        assert torch.equal(a.predict(x), b.predict(x))


@pytest.mark.parametrize("name", sorted(LABEL_FREE))
def test_methods_without_labels_never_read_one(name):
    method = METHODS[name]
    assert {n for n, m in METHODS.items() if "labels" not in m.needs} == LABEL_FREE
    data, clients = tiny()
    handed: list[torch.Tensor | None] = []

    def spy(down, state, lanes, ctx):
        handed.append(lanes.y)
        return method.fit(down, state, lanes, ctx)

    hp = method.resolve("paper", scaled(small(name)))
    run(replace(method, fit=spy), hp, fitted(method, data), clients, rounds=1, dtype=torch.float64)
    assert handed
    assert all(y is None for y in handed)


@served([(name, {}) for name in sorted(LABEL_FREE)], ["sequential", "batched", "gram"])
def test_other_labels_change_no_method_without_labels(case, execution):
    data, clients = tiny()
    g = torch.Generator().manual_seed(0)
    for y in (torch.full_like(data.y, -1), data.y[torch.randperm(len(data.y), generator=g)]):
        a, b = (go_tiny(*case, replace(data, y=labels), clients, execution=execution) for labels in (data.y, y))
        assert gap(a.server, b.server) == 0.0
        assert gap(a.states, b.states) == 0.0


@served([(name, {}) for name in METHODS], ["sequential", "batched", "gram"])
def test_a_missing_image_is_never_read(case, execution):
    # Row 0 of the store failed to decode (NaN) and belongs to no client; padding must not reach for it.
    name, settings = case
    data, clients = wide() if execution == "gram" else tiny()
    x = torch.cat([torch.full_like(data.x[:1], torch.nan), data.x])
    shifted = replace(data, x=x, y=torch.cat([data.y[:1], data.y]), domain=None)
    moved = [replace(c, train=c.train + 1, test=c.test + 1) for c in clients]
    method = METHODS[name]

    def spy(down, state, lanes, ctx):
        assert lanes.cut or (lanes.rows > 0).all()  # whatever weight such a row would have
        assert torch.isfinite(lanes.x[lanes.rows]).all()
        return method.fit(down, state, lanes, ctx)

    a = go_tiny(name, settings, data, clients, execution=execution)
    b = run(replace(method, fit=spy), a.hp, fitted(method, shifted), moved, rounds=2, participation=3,
            execution=execution, dtype=torch.float64)  # fmt: skip
    assert difference(a, b) == 0.0


@METHOD
def test_every_method_that_reads_features_alone_stacks(name):
    method = METHODS[name]
    if {"pixels", "text tower", "image tower"} & method.reads(method.resolve()):
        assert method.executions == ("sequential",)
    else:
        assert "batched" in method.executions
        assert go_tiny(name, {}, execution="batched").execution == "batched"


@METHOD
def test_no_example_leaves_a_client(name):
    # 97 and 89 rows: prime, and no other size here. All clients have as many, so that any upload could be pooled.
    method, shapes = METHODS[name], {}
    for rows in (97, 89):
        data, clients = tiny(sizes=(5 if "public" in method.needs else rows, rows, rows))
        data = fitted(method, data)
        sent: list[torch.Tensor] = []

        def spy(*args, to=sent):
            state, up = method.fit(*args)
            to.extend(up.values())
            return state, up

        hp = method.resolve("paper", small(name))
        run(replace(method, fit=spy), hp, data, clients, rounds=1, execution="sequential", dtype=torch.float64)
        shapes[rows] = [tuple(t.shape) for t in sent]
        assert all(rows not in shape for shape in shapes[rows])
        own = data.x[np.concatenate([c.train for c in clients[1:]])].flatten(0, 1).double()
        for t in sent:
            if t.dim() and t.shape[-1] == own.shape[-1]:  # perhaps a part of the rows, one below another
                assert torch.cdist(t.reshape(-1, t.shape[-1]).double(), own).min() > 1e-3
    assert shapes[97] == shapes[89]
