"""FLESD and its baselines against the facts of their papers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from contrast import anchor_terms
from federation import difference, federation, gap, rows_trained, server_gap, small
from federation import go as go_on
from float64 import even, zeros
from refusal import refused
from setting_lines import chosen, set_to
from torch import nn

from fedcache.federate.engine.context import ClientRng, Ctx, RunConstants
from fedcache.federate.engine.method import ClientOverrides
from fedcache.federate.methods import METHODS
from fedcache.federate.methods.common import distillation as distil
from fedcache.federate.methods.common import simclr as contrastive
from fedcache.heads.encoder import Encoder
from fedcache.heads.simclr import Ensemble, kept, nt_xent, one_way, similarity_divergence


def go(name, settings=None, data=None, clients=None, **kwargs):
    """A run with small encoders."""
    return go_on(name, small(name) | chosen(settings), data, clients, **kwargs)


def units(seed, *shape):
    x = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(x / np.linalg.norm(x, axis=-1, keepdims=True))


A = units(0, 5, 4)
B = units(1, 5, 4)


# -- the local loss (eq 3, D-30, T-E6)


def test_nt_xent_is_cross_entropy_over_the_other_embeddings():
    z = torch.cat([A, B])
    expected = np.mean(anchor_terms((z @ z.T / 0.3).numpy(), np.tile(np.arange(5), 2)))
    assert float(nt_xent(A, B, even(5), 0.3)) == pytest.approx(expected)


def test_one_way_is_cross_entropy_of_view_one_against_view_two():
    expected = nn.functional.cross_entropy(A @ B.T / 0.3, torch.arange(5))
    assert float(one_way(A, B, even(5), 0.3)) == pytest.approx(float(expected))


@pytest.mark.parametrize("loss", [nt_xent, one_way])
def test_padding_is_neither_a_query_nor_a_candidate(loss):
    w = torch.cat([even(3), zeros(2)])
    assert float(loss(A, B, w, 0.4)) == pytest.approx(float(loss(A[:3], B[:3], even(3), 0.4)))


# -- the ensemble (eqs 4 to 8, T-E1, T-E2, T-E4, T-E7)


def test_the_ensemble_is_the_mean_of_exponentials_up_to_one_constant():
    R = torch.stack([units(s, 6, 4) for s in range(3)])
    expected = torch.stack([torch.exp(r @ r.T / 0.5) for r in R]).mean(0)
    rows = Ensemble(R, None, 0.5).rows(torch.arange(6))
    assert torch.allclose(rows * math.exp(1 / 0.5), expected)
    q = Ensemble(R, None, 0.5).targets(torch.arange(6), torch.arange(6))
    assert torch.allclose(q, expected / expected.sum(-1, keepdim=True))


def test_a_large_ensemble_is_made_row_by_row_and_is_the_same(monkeypatch):
    R = torch.stack([units(s, 6, 4) for s in range(2)])
    i = torch.tensor([4, 1])
    j = torch.tensor([0, 2, 5])
    eager = Ensemble(R, None, 0.1, 0.5)
    monkeypatch.setattr(Ensemble, "EAGER", 5)
    assert torch.equal(Ensemble(R, None, 0.1, 0.5).targets(i, j), eager.targets(i, j))


def test_sparse_similarities_keep_the_largest_of_each_row():
    R = units(0, 1, 6, 4)
    M = R[0] @ R[0].T
    kept = torch.stack([torch.where(row >= row.sort().values[-2], row, zeros(6)) for row in M])
    assert torch.allclose(
        Ensemble(R, None, 0.1, 2 / 6).rows(torch.arange(6)), torch.exp((kept - 1) / 0.1)
    )


def test_the_released_count_of_kept_similarities_has_the_rows_own_beside_it():
    # utils.py of the release: int(percent / 100 * N) + 1, the row's own similarity not counted as communication
    assert [kept(n, 0.1, own=True) for n in (5, 19, 20, 8333)] == [1, 2, 3, 834]
    assert [kept(n, 0.1) for n in (5, 19, 20, 8333)] == [1, 2, 2, 833]
    assert kept(7, 0.99, own=True) == kept(7, 1.0, own=True) == kept(7, 1.0) == 7
    R = units(0, 1, 20, 4)
    M = R[0] @ R[0].T
    wanted = torch.where(M.topk(3).values[:, -1:] - 1e-6 < M, M, zeros(20, 20))
    wanted = torch.exp((wanted - wanted.max(1, keepdim=True).values) / 0.1)
    assert torch.allclose(Ensemble(R, None, 0.1, 0.1, own=True).rows(torch.arange(20)), wanted)


def test_a_query_may_be_left_out_of_its_anchors():
    q = Ensemble(units(0, 1, 6, 4), None, 0.1).targets(
        torch.tensor([2]), torch.arange(6), exclude_self=True
    )
    assert float(q[0, 2]) == 0.0
    assert float(q.sum()) == pytest.approx(1.0)


# -- distillation (eqs 7, 9, 10; T-E3, T-E5)


def server(hp, public, image=None):
    draws = ClientRng(0, 0, ("/server",), 0, torch.float64, torch.device("cpu"))
    env = RunConstants(
        3,
        public.shape[-1],
        1,
        1,
        None,
        torch.float64,
        torch.device("cpu"),
        public=public,
        image=image,
    )
    return Ctx((), hp, env, draws, (), 0)


def fresh(encoder, seed=0, width=0):
    g = np.random.default_rng(seed)
    return encoder.init(lambda shape: torch.from_numpy(g.uniform(-1, 1, shape)), width)


def test_a_student_that_is_the_only_client_has_nothing_to_learn():
    public = units(3, 9, 1, 6)
    settings = set_to("anchors=all tau_T=0.2 tau_S=0.2 wd=0.0 esd_epochs=1 esd_batch=9")
    hp = METHODS["flesd-head"].resolve("paper", small("flesd-head") | settings)
    w = fresh(contrastive.encoder_of(hp), width=6)
    ctx = server(hp, public)
    R = distil.unit(w, public[:, 0], ctx)
    i = torch.arange(9)
    assert (
        float(similarity_divergence(R, R, Ensemble(R[None], None, 0.2).targets(i, i), even(9), 0.2))
        < 1e-12
    )
    # one step: Adam blows rounding errors up, and would find a direction in them
    assert gap(distil.distil(w, Ensemble(R[None], None, 0.2), ctx), w) < 1e-9


@pytest.mark.parametrize(
    ("name", "encoder", "wrong", "right", "advice"),
    [
        ("flesd", "conv", None, (8, 8), "--backbones pixels"),
        ("flesd-head", "mlp", (8, 8), None, "--backbones NAME"),
    ],
)
def test_an_encoder_reads_either_images_or_features(name, encoder, wrong, right, advice):
    hp = {**METHODS[name].resolve(), "encoder": encoder}
    public = units(3, 12, 1, 6)
    error = refused(lambda: METHODS[name].check(hp, server(hp, public, wrong)))
    assert error.message.startswith(f"encoder={encoder}")
    # Not every method has another encoder, so the data come first.
    assert error.hint.partition(", or ")[0].endswith(advice)
    METHODS[name].check(hp, server(hp, public, right))


# -- whole methods


def test_non_fl_is_the_same_for_every_partition():
    data, clients = federation(views=4)
    rows = rows_trained(clients)
    other = [replace(clients[0], train=rows[::2]), replace(clients[1], train=rows[1::2])]
    other = [replace(o, test=c.test) for o, c in zip(other, clients, strict=False)]
    a, b = (go("non-fl", {}, data, who, participation=None) for who in (clients, other))
    assert server_gap(a, b) == 0.0


def test_flesd_cc_is_flesd_head_in_one_round():
    data, clients = federation(views=4)
    a = go("flesd-cc", {}, data, clients)
    assert difference(a, go("flesd-head", {}, data, clients, rounds=1)) == 0.0


@pytest.mark.parametrize(
    ("settings", "scalars"),
    [
        ({}, 6 * 5 // 2),
        ({"sim_topk_percent": 50.0}, 2 * 6 * 3),
        (
            {"sim_topk_percent": 49.0, "sim_topk_own": True},
            2 * 6 * 2,
        ),  # int(.49 * 6), beside the row's own, always 1
    ],
)
def test_matrices_travel_by_halves_or_by_their_largest(settings, scalars):
    pair = federation(views=4, sizes=(6, 20, 9))
    matrix = go("flesd-head", {"send": "matrix", **settings}, *pair, rounds=1, participation=None)
    assert matrix.traffic.up.tolist() == [0, scalars, scalars]
    if not settings:
        plain = go("flesd-head", {}, *pair, rounds=1, participation=None)
        assert server_gap(matrix, plain) < 1e-9


@pytest.mark.slow
def test_clients_of_other_backbones_and_trunks_distil_into_one_student():
    data, clients = federation(views=4)
    own = {2: ClientOverrides(columns=((0, 4),)), 3: ClientOverrides(hp={"hidden": 9})}
    out = go("flesd-head", {}, data, clients, own=own, participation=None)
    assert out.states[2]["t.W"].shape == (7, 4)
    assert out.states[3]["t.W"].shape == (9, 11)
    assert {c for c, state in out.states.items() if "t.W" in state} == {2, 3}
    assert out.server["t.W"].shape == (7, 11)
    before = go("flesd-head", {}, data, clients, own=own, participation=None, rounds=1).states[2][
        "t.W"
    ]
    assert gap(before, out.states[2]["t.W"]) > 0.0  # it goes on from its own encoder


# -- images


@pytest.mark.parametrize("channels", [1, 8])
def test_a_narrow_trunk_has_one_gradient_in_either_memory_format(channels):
    # On processors with AVX2 alone oneDNN's strided 1 x 1 convolution of few channels ends the process, channels last.
    e = Encoder("conv", channels=channels)
    p = {n: t.float() for n, t in fresh(e).items()}
    names = [n for n in e.trained() if n.startswith("t.")]
    for n in names:
        p[n].requires_grad_()
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        h, _ = e.trunk(p, x.contiguous(memory_format=layout), training=False)
        found.append(torch.autograd.grad(h.square().sum(), [p[n] for n in names]))
    for plain, last in zip(*found, strict=True):
        torch.testing.assert_close(
            last, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max())
        )
