"""Facts of supcon: the loss against its formula, and a client's own prototypes."""

import numpy as np
import pytest
import torch
from contrast import anchor_terms
from federation import federation, go, go_all
from float64 import even, normal, zeros
from method_calls import lanes, model_of
from torch.nn.functional import normalize

from fedcache.federate.methods import supcon
from fedcache.heads.losses import supervised_contrast
from fedcache.heads.projection import Head, embed


def units(n, width=5, seed=0):
    return normalize(normal(n, width, seed=seed), dim=-1)


def reference_supcon(z, y, tau):
    """The formula; anchors without a positive are skipped."""
    return np.mean(anchor_terms((z @ z.T / tau).numpy(), y.numpy()))


@pytest.mark.parametrize("seed", range(3))
def test_supcon_is_its_formula_for_every_padding(seed):
    y = torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(seed))
    z = units(9, seed=seed)
    expected = reference_supcon(units(9, seed=seed), y, 0.3)
    assert float(supervised_contrast(z, y, even(9), 0.3)) == pytest.approx(expected)
    padded = (
        torch.cat([z, units(3, seed=99)]),
        torch.cat([y, y[:3]]),
        torch.cat([even(9), torch.zeros(3)]),
    )
    assert float(supervised_contrast(*padded, 0.3)) == pytest.approx(expected)


def test_a_batch_without_a_positive_has_no_loss_and_no_gradient():
    for n in (1, 4):
        z = units(n).requires_grad_()
        value = supervised_contrast(z, torch.arange(n), even(n), 0.07)
        assert value.item() == 0.0
        assert float(torch.autograd.grad(value, z)[0].abs().max()) == 0.0


def test_the_loss_is_scaled_by_tau_over_tau_base():  # T-U4: 1 at tau = 0.07
    p = {"P.W": normal(5, 11), "P.b": zeros(5)}
    x = units(8, 11)
    x2 = units(8, 11, seed=3)
    y = torch.arange(8) % 3
    batch = {"x": x, "x2": x2, "y": y, "w": even(8)}
    views = normalize(torch.relu(torch.cat([x, x2]) @ p["P.W"].T), dim=-1)
    for tau, base, factor in ((0.07, 0.07, 1.0), (0.35, 0.07, 5.0), (0.35, 0.35, 1.0)):
        ctx = lanes("supcon", {"dim": 5, "bn": False, "tau": tau, "tau_base": base})
        value = float(supcon.loss(p, batch, {}, ctx)[0])
        assert value == pytest.approx(factor * reference_supcon(views, y.repeat(2), tau))


def test_supcon_deploys_its_own_prototypes():
    data, clients = federation()
    out = go("supcon", "dim=8 lr=0.01")
    head = Head("projection", dim=8, bn=True)
    for i, c in enumerate(clients):
        if i not in out.states:
            continue
        p = model_of(out.states[i])
        z = embed(head, p, data.x[c.train, 0])[0]
        y = data.y[c.train]
        owned = y.unique()
        means = torch.stack([z[y == k].mean(0) for k in owned])
        predicted = owned[(embed(head, p, data.x[c.test, 0])[0] @ means.T).argmax(-1)]
        assert out.client_accuracy[i] == (predicted == data.y[c.test]).double().mean()
        assert torch.allclose(out.states[i]["proto"][owned], means, atol=1e-12)


def test_a_client_that_never_trained_has_prototypes_of_its_initial_projection():
    out = go("supcon", "dim=8 proto_drop_last=true batch=64")
    absent = [i for i in range(9) if i not in out.states]
    first = go_all("supcon", "dim=8 epochs=0", rounds=1)
    assert absent
    assert [out.client_accuracy[i] for i in absent] == [first.client_accuracy[i] for i in absent]
