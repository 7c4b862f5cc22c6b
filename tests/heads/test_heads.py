"""Heads: formulas against references written with loops, and limits worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcache.heads.class_balance import deficits, votes
from fedcache.heads.linear import affine
from fedcache.heads.losses import anchor_contrast, cross_entropy, proto_contrast
from fedcache.heads.projection import Head, classify, embed, logits
from fedcache.heads.prototype import class_means, merge, scores

G, M, B, D, P, C = 2, 3, 4, 5, 6, 7  # all different, so that a wrong axis is an error


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape, seed=0):
    return torch.nn.functional.normalize(draw(*shape, seed=seed), dim=-1)


@pytest.mark.parametrize("lead_x", [(), (M,), (1, M), (G, M)])
@pytest.mark.parametrize("lead_w", ["none", "full", "shared"])
def test_affine_is_the_same_on_every_lane(lead_x, lead_w):
    full = (G, M) if len(lead_x) == 2 else lead_x
    lead = {"none": (), "full": full, "shared": (*full[:-1], 1)[: len(full)]}[lead_w]
    x, W, b = draw(*lead_x, B, D), draw(*lead, C, D, seed=1), draw(*lead, C, seed=2)
    assert torch.allclose(affine(x, W, b), torch.einsum("...bd,...cd->...bc", x, W) + b[..., None, :], atol=1e-12)
    assert torch.allclose(affine(x, W), torch.einsum("...bd,...cd->...bc", x, W), atol=1e-12)


def test_the_batched_affine_has_the_right_gradients():
    inputs = [t.requires_grad_() for t in (draw(M, B, D), draw(M, C, D, seed=1), draw(M, C, seed=2))]
    assert torch.autograd.gradcheck(affine, inputs)


def test_cross_entropy_weighs_rows_and_ignores_padding():
    u, y = draw(M, B, C), torch.arange(M * B).view(M, B) % C
    w = torch.tensor([[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    by_torch = [torch.nn.functional.cross_entropy(u[i, :k], y[i, :k]) for i, k in enumerate((4, 2, 1))]
    assert torch.allclose(cross_entropy(u, y, w), torch.stack(by_torch))


def reference_contrast(u, y, candidate, include):
    out = []
    for row, label, allowed in zip(u.numpy(), y.numpy(), candidate.numpy(), strict=True):
        pool = [c for c in range(len(row)) if allowed[c] and (include or c != label)]
        negatives = [c for c in range(len(row)) if allowed[c] and c != label]
        out.append(-row[label] + math.log(sum(math.exp(row[c]) for c in pool)) if negatives else 0.0)
    return out


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_proto_contrast_is_equation_8(include, seed):
    g = torch.Generator().manual_seed(seed)
    u, y = draw(20, C, seed=seed), torch.randint(0, C, (20,), generator=g)
    candidate = torch.rand(20, C, generator=g) < 0.6
    candidate.scatter_(1, y[:, None], True)
    value = proto_contrast(u, y, candidate, include)
    assert torch.allclose(value, torch.tensor(reference_contrast(u, y, candidate, include), dtype=torch.float64))


def test_excluding_the_positive_is_minus_the_logit_of_its_probability():
    # T-L1: exclude = include + log(1 - p_y) = -logit(p_y), and grad(include) = (1 - p_y) grad(exclude).
    u, y = draw(1, C).requires_grad_(), torch.tensor([2])
    everywhere = torch.ones(1, C, dtype=torch.bool)
    p = torch.softmax(u, -1)[0, 2]
    exclude, include = (proto_contrast(u, y, everywhere, inc)[0] for inc in (False, True))
    assert (exclude - include - torch.log(1 - p)).item() == pytest.approx(0.0, abs=1e-12)
    assert (exclude + torch.logit(p)).item() == pytest.approx(0.0, abs=1e-12)
    g_ex, g_in = (torch.autograd.grad(v, u, retain_graph=True)[0] for v in (exclude, include))
    assert torch.allclose(g_in, (1 - p) * g_ex, atol=1e-12)


def test_a_hot_temperature_leaves_the_number_of_candidates():
    # T-L2: tau -> infinity: log(C - 1) without the positive, log C with it.
    u, y, everywhere = draw(5, 10) / 1e9, torch.arange(5), torch.ones(5, 10, dtype=torch.bool)
    assert torch.allclose(proto_contrast(u, y, everywhere, False), torch.tensor(math.log(9), dtype=torch.float64))
    assert torch.allclose(proto_contrast(u, y, everywhere, True), torch.tensor(math.log(10), dtype=torch.float64))


def test_a_hot_temperature_pulls_to_the_own_and_away_from_the_mean_of_the_others():
    # T-L2: tau grad_z L -> -(C^y - mean of the other prototypes).
    z, proto, tau = unit(1, P).requires_grad_(), unit(C, P, seed=1), 1e6
    value = proto_contrast(z @ proto.T / tau, torch.tensor([2]), torch.ones(1, C, dtype=torch.bool), False)
    others = proto[[0, 1, 3, 4, 5, 6]].mean(0)
    assert torch.allclose(tau * torch.autograd.grad(value.sum(), z)[0][0], -(proto[2] - others), atol=1e-5)


def test_without_unit_length_the_loss_has_no_floor():
    # T-L7: on a correctly classified row, scaling z by k makes the exclude loss fall linearly.
    proto = torch.eye(3, dtype=torch.float64)
    at = [
        float(proto_contrast(k * proto[:1], torch.tensor([0]), torch.ones(1, 3, dtype=torch.bool), False))
        for k in (10, 20, 30)
    ]
    assert at[0] - at[1] == pytest.approx(10.0)
    assert at[1] - at[2] == pytest.approx(10.0)


def test_a_single_available_class_has_no_negative_and_no_loss():
    only = torch.tensor([[True, False, False]])
    u = draw(1, 3).requires_grad_()
    for include in (False, True):
        value = proto_contrast(u, torch.tensor([0]), only, include)
        assert value.tolist() == [0.0]
        assert torch.autograd.grad(value.sum(), u)[0].abs().max() == 0.0


def reference_anchor(sim, y, real):
    rows = [i for i in range(len(y)) if real[i]]
    total = 0.0
    for a in rows:
        positives = [j for j in rows if j != a and y[j] == y[a]]
        if positives:
            z = math.log(sum(math.exp(sim[a, other]) for other in rows if other != a))
            total -= sum(sim[a, j] - z for j in positives) / len(positives)
    return total / max(len(rows), 1)


@pytest.mark.parametrize("seed", range(5))
def test_anchor_contrast_is_the_released_formula(seed):
    g = torch.Generator().manual_seed(seed)
    L = 12
    sim, y = draw(M, L, L, seed=seed), torch.randint(0, 4, (M, L), generator=g)
    real = torch.rand(M, L, generator=g) < 0.8
    expected = [reference_anchor(sim[i].numpy(), y[i].numpy(), real[i].numpy()) for i in range(M)]
    assert anchor_contrast(sim, y, real).tolist() == pytest.approx(expected)


def test_a_hot_anchor_counts_the_other_embeddings():
    # T-L9, one set: tau -> infinity leaves log(2B - 1).
    y = torch.arange(5).repeat(2)
    value = anchor_contrast(torch.zeros(10, 10, dtype=torch.float64), y, torch.ones(10, dtype=torch.bool))
    assert float(value) == pytest.approx(math.log(9))


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
    assert merge(sets, counts, "eq6")[0].tolist() == [[1.5], [9.0], [0.0]]  # a further 1/|O_j|: 3/2, 9/1


def test_equation_6_is_the_weighted_mean_over_the_number_of_owners():
    # T-L4: weighted == eq6 * |O_j|, and unit versions coincide.
    counts = torch.tensor([[1.0, 0, 3, 2], [2, 2, 0, 1], [0, 4, 0, 1]])
    sets = draw(3, 4, P) * (counts > 0)[..., None]
    weighted, literal = merge(sets, counts, "weighted")[0], merge(sets, counts, "eq6")[0]
    owners = (counts > 0).sum(0)
    assert torch.allclose(weighted, literal * owners[:, None], atol=1e-14)
    unit_of = torch.nn.functional.normalize
    assert torch.allclose(unit_of(weighted, dim=-1), unit_of(literal, dim=-1), atol=1e-14)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 5))
@settings(max_examples=30)
def test_class_means_are_means(labels, padding):
    y = torch.tensor(labels + [0] * padding)
    z, mask = draw(len(y), 2), torch.tensor([1.0] * len(labels) + [0.0] * padding, dtype=torch.float64)
    mean, count = class_means(z, y, mask, 4)
    for c in range(4):
        rows = [i for i, k in enumerate(labels) if k == c]
        assert float(count[c]) == len(rows)
        expected = z[rows].mean(0) if rows else torch.zeros(2, dtype=torch.float64)
        assert torch.allclose(mean[c], expected)


def test_mse_is_the_nearest_prototype_and_all_rules_agree_on_equal_norms():
    # T-L8.
    z, proto, has = draw(50, P), draw(C, P, seed=1), torch.ones(C, dtype=torch.bool)
    nearest = torch.cdist(z, proto).argmin(-1)
    assert torch.equal(scores(z, proto, has, "mse").argmax(-1), nearest)
    even = torch.nn.functional.normalize(proto, dim=-1)
    by_rule = [scores(z, even, has, rule).argmax(-1) for rule in ("dot", "cos", "mse")]
    assert torch.equal(by_rule[0], by_rule[1])
    assert torch.equal(by_rule[0], by_rule[2])


def test_a_class_without_a_prototype_is_never_predicted():
    has = torch.tensor([True, False, True])
    s = scores(-torch.ones(4, 2), torch.tensor([[1.0, 1], [0, 0], [2, 2]]), has, "dot")
    assert set(s.argmax(-1).tolist()) <= {0, 2}


def test_projection_is_what_torch_computes_and_batchnorm_too():
    head = Head("mlp", dim=P, bn=True, z_norm=True)
    p = head.init(lambda shape: 2 * torch.rand(shape, dtype=torch.float64) - 1, D, C)
    x, w = draw(B, D), torch.full((B,), 1 / B, dtype=torch.float64)
    norm = torch.nn.BatchNorm1d(P).double()
    hidden = torch.relu(torch.nn.functional.linear(x, p["P.W"], p["P.b"]))
    expected = torch.nn.functional.normalize(norm(hidden), dim=-1)
    z, updates = embed(head, p, x, w)
    assert torch.allclose(z, expected)
    assert torch.allclose(updates["P.mean"], norm.running_mean)
    assert torch.allclose(updates["P.var"], norm.running_var)
    norm.eval()
    assert torch.allclose(embed(head, {**p, **updates}, x)[0], torch.nn.functional.normalize(norm(hidden), dim=-1))
    norm.weight.data, norm.bias.data = 0.5 + torch.rand(P, dtype=torch.float64), draw(P)
    trained = {**p, **updates, "P.gain": norm.weight.data, "P.shift": norm.bias.data}
    assert torch.allclose(embed(head, trained, x)[0], torch.nn.functional.normalize(norm(hidden), dim=-1))
    u = torch.nn.functional.linear(z, p["Q.W"], p["Q.b"])
    assert torch.allclose(classify(head, p, z), u)
    relu_l2 = Head("mlp", dim=P, relu_l2=True)
    assert torch.allclose(classify(relu_l2, p, z), torch.nn.functional.normalize(torch.relu(u), dim=-1))


def test_batchnorm_ignores_padding():
    head = Head("projection", dim=P, bn=True, z_norm=False)
    p = head.init(lambda shape: 2 * torch.rand(shape, dtype=torch.float64) - 1, D, C)
    x = draw(3, D)
    padded = torch.cat([x, 100 * draw(2, D, seed=3)])
    w = torch.tensor([1 / 3] * 3 + [0.0] * 2, dtype=torch.float64)
    alone, with_padding = embed(head, p, x, w[:3]), embed(head, p, padded, w)
    assert torch.allclose(alone[0], with_padding[0][:3])
    assert torch.allclose(alone[1]["P.var"], with_padding[1]["P.var"])


def test_a_variance_below_zero_counts_as_zero():
    # A robust rule or an average over liars may make one; nothing that is scored may become NaN of it.
    head = Head("projection", dim=P, bn=True, z_norm=False)
    p = head.init(lambda shape: 2 * torch.rand(shape, dtype=torch.float64) - 1, D, C)
    x = draw(3, D)
    zero, below = (embed(head, {**p, "P.var": torch.full((P,), v).double()}, x)[0] for v in (0.0, -4.0))
    assert torch.equal(zero, below)
    assert torch.isfinite(below).all()


def test_released_logits_bound_the_loss_from_below():
    # D-13: unit-length non-negative logits: CE >= log(1 + (C - 1)/e) = 1.46115 at C = 10.
    head = Head("linear", relu_l2=True)
    p = {"W": 1e6 * torch.eye(10, dtype=torch.float64), "b": torch.zeros(10, dtype=torch.float64)}
    u = logits(head, p, torch.eye(10, dtype=torch.float64))[0]
    value = cross_entropy(u, torch.arange(10), torch.full((10,), 0.1, dtype=torch.float64))
    assert float(value) == pytest.approx(1.46115, abs=1e-5)


@given(
    st.lists(st.lists(st.floats(0, 1, width=16), min_size=4, max_size=4), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.3]),
)
@settings(max_examples=50)
def test_synthetic_rows_fill_every_class_to_the_same_size(rows, gamma):
    # T-F3: m_k + n_k == round((1 + gamma) max m), n_k >= 0; gamma = 0 leaves the largest class alone.
    q = torch.tensor(rows, dtype=torch.float64)
    m = votes(q, torch.ones(len(rows)))
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
