"""Heads: formulas against references of scipy, and limits worked by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from contrast import anchor_terms
from float64 import doubles, even, normal, zeros
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from fedcache.heads import ridge
from fedcache.heads.class_balance import deficits, votes
from fedcache.heads.losses import anchor_contrast, cross_entropy, proto_contrast
from fedcache.heads.projection import Head, classify, embed
from fedcache.heads.prototype import class_means, merge, scores
from fedcache.heads.ridge import SINGLE_ROWS, gram

M = 3
B = 4
D = 5
P = 6
C = 7  # all different, so that a wrong axis is an error


def test_cross_entropy_weighs_rows_and_ignores_padding():
    u = normal(M, B, C)
    y = torch.arange(M * B).view(M, B) % C
    w = doubles([[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0]])
    by_torch = [F.cross_entropy(u[i, :k], y[i, :k]) for i, k in enumerate((4, 2, 1))]
    assert torch.allclose(cross_entropy(u, y, w), torch.stack(by_torch))


def reference_contrast(u, y, candidate, include):
    out = []
    for row, label, allowed in zip(u.numpy(), y.numpy(), candidate.numpy(), strict=True):
        negative = allowed & (np.arange(C) != label)
        pool = allowed if include else negative
        out.append(logsumexp(row[pool]) - row[label] if negative.any() else 0.0)
    return out


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_proto_contrast_is_equation_8(include, seed):
    g = torch.Generator().manual_seed(seed)
    u = normal(20, C, seed=seed)
    y = torch.randint(0, C, (20,), generator=g)
    candidate = torch.rand(20, C, generator=g) < 0.6
    candidate.scatter_(1, y[:, None], True)
    value = proto_contrast(u, y, candidate, include)
    assert torch.allclose(value, doubles(reference_contrast(u, y, candidate, include)))


def test_a_single_available_class_has_no_negative_and_no_loss():
    only = torch.tensor([[True, False, False]])
    u = normal(1, 3).requires_grad_()
    for include in (False, True):
        value = proto_contrast(u, torch.tensor([0]), only, include)
        assert value.tolist() == [0.0]
        assert torch.autograd.grad(value.sum(), u)[0].abs().max() == 0.0


def reference_anchor(sim, y, real):
    return sum(anchor_terms(sim[real][:, real], y[real])) / max(real.sum(), 1)


@pytest.mark.parametrize("seed", range(2))
def test_anchor_contrast_is_the_released_formula(seed):
    g = torch.Generator().manual_seed(seed)
    L = 12
    sim = normal(M, L, L, seed=seed)
    y = torch.randint(0, 4, (M, L), generator=g)
    real = torch.rand(M, L, generator=g) < 0.8
    expected = [reference_anchor(sim[i].numpy(), y[i].numpy(), real[i].numpy()) for i in range(M)]
    assert anchor_contrast(sim, y, real).tolist() == pytest.approx(expected)


def test_a_prototype_weighs_each_example_once():
    # class 0: client a has 1 example at 1.0, client b has 2 at 4.0 -> (1 + 2 * 4) / 3 = 3.0
    # class 1: only client a has it                                -> 9.0
    # class 2: nobody                                              -> not available
    sets = torch.tensor([[[1.0], [9.0], [0.0]], [[4.0], [0.0], [0.0]]])
    counts = torch.tensor([[1.0, 2.0, 0.0], [2.0, 0.0, 0.0]])
    bar, has = merge(sets, counts, "weighted")
    assert bar.tolist() == [[3.0], [9.0], [0.0]]
    assert has.tolist() == [True, True, False]
    assert merge(sets, counts, "mean")[0].tolist() == [[2.5], [9.0], [0.0]]
    assert merge(sets, counts, "eq6")[0].tolist() == [
        [1.5],
        [9.0],
        [0.0],
    ]  # a further 1/|O_j|: 3/2, 9/1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 5))
@settings(max_examples=30)
def test_class_means_are_means(labels, padding):
    y = torch.tensor(labels + [0] * padding)
    z = normal(len(y), 2)
    mean, count = class_means(z, y, doubles([1.0] * len(labels) + [0.0] * padding), 4)
    for c in range(4):
        rows = [i for i, k in enumerate(labels) if k == c]
        assert float(count[c]) == len(rows)
        expected = z[rows].mean(0) if rows else zeros(2)
        assert torch.allclose(mean[c], expected)


def test_mse_is_the_nearest_prototype_and_all_rules_agree_on_equal_norms():
    # T-L8.
    z = normal(50, P)
    proto = normal(C, P, seed=1)
    has = torch.ones(C, dtype=torch.bool)
    assert torch.equal(scores(z, proto, has, "mse").argmax(-1), torch.cdist(z, proto).argmin(-1))
    even = F.normalize(proto, dim=-1)
    by_rule = [scores(z, even, has, rule).argmax(-1) for rule in ("dot", "cos", "mse")]
    assert torch.equal(by_rule[0], by_rule[1])
    assert torch.equal(by_rule[0], by_rule[2])


def with_weights(kind, z_norm):
    """A head with BatchNorm, and weights for it."""
    head = Head(kind, dim=P, bn=True, z_norm=z_norm)
    return head, head.init(lambda shape: 2 * torch.rand(shape, dtype=torch.float64) - 1, D, C)


def test_projection_is_what_torch_computes_and_batchnorm_too():
    head, p = with_weights("mlp", z_norm=True)
    x = normal(B, D)
    w = even(B)
    norm = torch.nn.BatchNorm1d(P).double()
    hidden = torch.relu(F.linear(x, p["P.W"], p["P.b"]))
    expected = F.normalize(norm(hidden), dim=-1)
    z, updates = embed(head, p, x, w)
    assert torch.allclose(z, expected)
    assert torch.allclose(updates["P.mean"], norm.running_mean)
    assert torch.allclose(updates["P.var"], norm.running_var)
    norm.eval()
    assert torch.allclose(embed(head, p | updates, x)[0], F.normalize(norm(hidden), dim=-1))
    norm.weight.data, norm.bias.data = 0.5 + torch.rand(P, dtype=torch.float64), normal(P)
    trained = {**p, **updates, "P.gain": norm.weight.data, "P.shift": norm.bias.data}
    assert torch.allclose(embed(head, trained, x)[0], F.normalize(norm(hidden), dim=-1))
    u = F.linear(z, p["Q.W"], p["Q.b"])
    assert torch.allclose(classify(head, p, z), u)
    relu_l2 = Head("mlp", dim=P, relu_l2=True)
    assert torch.allclose(classify(relu_l2, p, z), F.normalize(torch.relu(u), dim=-1))


def test_batchnorm_ignores_padding():
    head, p = with_weights("projection", z_norm=False)
    x = normal(3, D)
    padded = torch.cat([x, 100 * normal(2, D, seed=3)])
    w = doubles([1 / 3] * 3 + [0.0] * 2)
    alone = embed(head, p, x, w[:3])
    with_padding = embed(head, p, padded, w)
    assert torch.allclose(alone[0], with_padding[0][:3])
    assert torch.allclose(alone[1]["P.var"], with_padding[1]["P.var"])


def test_a_variance_below_zero_counts_as_zero():
    # A robust rule or an average over liars may make one; nothing that is scored may become NaN of it.
    head, p = with_weights("projection", z_norm=False)
    x = normal(3, D)
    zero, below = (
        embed(head, {**p, "P.var": torch.full((P,), v).double()}, x)[0] for v in (0.0, -4.0)
    )
    assert torch.equal(zero, below)
    assert torch.isfinite(below).all()


@given(
    st.lists(st.lists(st.floats(0, 1, width=16), min_size=4, max_size=4), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.3]),
)
@settings(max_examples=50)
def test_synthetic_rows_fill_every_class_to_the_same_size(rows, gamma):
    # T-F3: m_k + n_k == round((1 + gamma) max m), n_k >= 0; gamma = 0 leaves the largest class alone.
    m = votes(doubles(rows), torch.ones(len(rows)))
    n = deficits(m, gamma)
    assert int(m.sum()) == len(rows)
    assert (m + n).tolist() == [round((1 + gamma) * int(m.max()))] * 4
    assert int(n.min()) >= 0
    if gamma == 0.0:
        assert int(n[m.argmax()]) == 0
    assert set(deficits(m, gamma, equal=True).tolist()) == {round(int(n.sum()) / 4)}


def test_votes_follow_the_largest_label_and_spread_ties():
    q = torch.tensor([[0.1, 0.9, 0.0], [0.2, 0.2, 0.6], [0.0, 1.0, 0.0]])
    assert votes(q, torch.tensor([1.0, 1.0, 0.0])).tolist() == [0, 1, 1]  # the last row is padding
    assert votes(torch.full((7, 3), 1 / 3), torch.ones(7)).tolist() == [3, 2, 2]


@pytest.mark.parametrize("rows", [1, SINGLE_ROWS, 5 * SINGLE_ROWS + 77])
@pytest.mark.parametrize("at_once", [2, 100])
def test_blocks_side_by_side_are_the_gram_matrix_within_the_bound(monkeypatch, rows, at_once):
    D = 24
    monkeypatch.setattr(ridge, "SIDE_BY_SIDE", at_once * 4 * D * D)
    z = torch.randn(rows, D, generator=torch.Generator().manual_seed(rows))
    exact = gram(z.double())
    made = ridge._gram_of_many_blocks(z)
    assert made.dtype == torch.float64
    diagonal = (z.double() ** 2).sum(0).sqrt()
    assert bool(((made - exact).abs() <= ridge.pack(6.2e-5 * diagonal.outer(diagonal))).all())


def test_blocks_are_added_in_float64():
    # Beside 2^28, float32 has every 32nd integer alone: sums of blocks in float32 would lose rows.
    z = torch.ones(3 * SINGLE_ROWS + 5, 1)
    z[:SINGLE_ROWS] = 0.0
    z[0] = 2.0**14
    assert float(ridge._gram_of_many_blocks(z)) == 2.0**28 + 2 * SINGLE_ROWS + 5
