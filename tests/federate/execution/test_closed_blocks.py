"""Sums by blocks: of a client's rows, of many clients' rows at once, and of products in float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import difference, federation, gap, go, go_all, tiny
from float64 import normal
from hypothesis import given
from hypothesis import strategies as st
from refusal import training_error
from setting_lines import cases_of

from fedcache.federate.engine.client_data import cut_out, stack_clients
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution import executor
from fedcache.federate.methods import METHODS, fedncm
from fedcache.federate.trust.pipeline import TrustPolicy
from fedcache.heads.ridge import HALVED, SINGLE_ROWS, gram, gram_single, unpack

SUMS = cases_of(
    """
    fedncm
    fed3r
    fed3r bias=true class_weight=local
    fed3r bias=true rff_dim=20
    fed3r-prior
    fedcgs
    gda
    afl
    gh-ofl
    gh-ofl variance=pooled
    gh-ofl head=qda
    """
)


def job_of(case, data, clients, **how):
    method = METHODS[case[0]]
    hp = method.resolve("paper", case[1])
    return RunState(method, hp, data, clients, 0, torch.float64, **how)


@pytest.mark.parametrize("case", SUMS, ids=str)
@pytest.mark.parametrize(("axes", "size"), [(0, 5), (1, 1)])
def test_sums_by_blocks_are_the_sums(case, axes, size, monkeypatch):
    data, clients = federation(sizes=(33, 12, 1))
    job = job_of(case, data, clients)
    ids = [0, 1, 2] if axes else [0]
    rows = stack_clients(data.x, data.y, [clients[i].train for i in ids], axes)
    _, whole = job.method.fit({}, {}, rows, job.ctx(ids, axes))
    monkeypatch.setattr(fedncm, "FEW_ROWS", size)
    monkeypatch.setattr(fedncm, "BLOCK_BYTES", 1)
    _, blocks = job.method.fit({}, {}, rows, job.ctx(ids, axes))
    assert gap(whole, blocks) < 1e-12
    if not axes:
        (cut,) = cut_out(data.x, data.y, [clients[0].train])
        assert gap(whole, job.method.fit({}, {}, cut, job.ctx(ids, axes))[1]) < 1e-12


def crowd():
    """A federation of 1,200 clients, more than are taken one by one, of one to three rows each."""
    sizes = tuple(1 + i % 3 for i in range(1200))
    return federation(sizes=sizes, classes=4, width=6, per_client=2, tests=1)


@pytest.mark.parametrize(
    "case", [("fedncm", {}), pytest.param(("fed3r", {"bias": True}), marks=pytest.mark.slow)]
)
def test_sums_of_a_million_clients_are_those_of_each(case, monkeypatch):
    data, clients = crowd()
    fits = []
    fit = METHODS[case[0]].fit
    counted = replace(METHODS[case[0]], fit=lambda *args: (fits.append(1), fit(*args))[1])
    monkeypatch.setitem(METHODS, case[0], counted)
    together = go_all(*case, data, clients, rounds=1)
    assert len(fits) <= 3
    monkeypatch.setattr(executor, "TOGETHER_FROM", 10**9)
    alone = go_all(*case, data, clients, rounds=1)
    assert len(fits) > 1200
    assert difference(together, alone) < 1e-10
    assert together.traffic == alone.traffic


@pytest.mark.parametrize(
    ("case", "trust"),
    [
        (("fedcof", {}), TrustPolicy()),  # stacked
        (("fed3r", {"class_weight": "local"}), TrustPolicy()),  # weighed by what the client has
        (("fedncm", {}), TrustPolicy(on_bad="reject")),
        (("fedncm", {}), TrustPolicy(max_norm=1.0)),
    ],
)
def test_uploads_that_are_more_than_a_sum_come_one_by_one(case, trust):
    data, clients = crowd()
    job = job_of(case, data, clients, trust=trust)
    assert all(len(group) == 1 for group in executor.groups_of(job, range(1200)))


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), 1e200])
def test_the_client_with_a_bad_row_is_found_by_its_name(value):
    data, clients = crowd()
    data.x[clients[777].train[0]] = value
    caught = training_error(lambda: go_all("fedncm", {}, data, clients, rounds=1), "client-777")
    assert "client-776" not in caught.message


@pytest.mark.slow
def test_a_share_that_is_capped_is_counted_client_by_client():
    data, clients = tiny(sizes=(200, *[1] * 1199))
    keys = {"participation": None, "rounds": 1, "trust": TrustPolicy(max_share=0.05)}
    capped = go("fedncm", {}, data, clients, **keys)
    assert difference(capped, go_all("fedncm", {}, data, clients, rounds=1)) > 1e-6


@given(
    seed=st.integers(0, 99),
    rows=st.sampled_from([1, 3, SINGLE_ROWS, SINGLE_ROWS + 1, 2500]),
    kind=st.sampled_from(["normal", "offset", "scales", "collinear"]),
)
def test_products_in_float32_are_within_their_bound(seed, rows, kind):
    g = np.random.default_rng(seed)
    z = g.standard_normal((rows, 12))
    if kind == "offset":
        z += 100.0
    elif kind == "scales":
        z *= 10.0 ** np.linspace(-6, 6, 12)
    elif kind == "collinear":
        z[:, 1:] = z[:, :1] * g.standard_normal(11) + 1e-5 * z[:, 1:]
    z = torch.from_numpy(z.astype(np.float32)).double()
    exact = unpack(gram(z), 12)
    single = unpack(gram_single(z), 12)
    assert single.dtype is torch.float64
    bound = 6.2e-5 * z.abs().mT @ z.abs()
    assert bool(((single - exact).abs() <= bound).all())
    assert float(torch.linalg.matrix_norm(single - exact, 2)) <= 6.2e-5 * float(exact.trace())


@pytest.mark.parametrize("rows", [0, 1, SINGLE_ROWS, 2 * SINGLE_ROWS + 7])
def test_one_triangle_is_within_the_bound_for_each_client_and_any_number_of_threads(rows):
    z = normal(3, rows, HALVED + 2, seed=rows).float() + 3.0
    exact = gram(z.double())
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            single = gram_single(z)
            assert single.shape == exact.shape
            bound = 6.2e-5 * gram(z.double().abs())
            assert bool(((single - exact).abs() <= bound).all())
    finally:
        torch.set_num_threads(before)
    assert rows < 2 or bool((single != exact).any())  # it did compute in float32
