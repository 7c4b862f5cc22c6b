"""What ``embed`` of a method gives is what its classifier reads: scores are a function of it."""

import pytest
import torch
from federation import VARIANTS, cases, fitted, go_tiny, ids, small, tiny
from methods_tried import tried

from fedcache.federate.methods import METHODS

NARROW = {"dim": 3, "hidden": 3}
"""Fewer numbers than the five features of a row, so that an embedding forgets some of them."""


def deployed(case):
    """A model of a trained case with narrow blocks, and the data as its method reads them."""
    method = METHODS[case[0]]
    declared = {h.name for h in method.hparams}
    data, clients = tiny(views=4)
    out = go_tiny(
        case[0], case[1] | {k: v for k, v in NARROW.items() if k in declared}, data, clients
    )
    number = (
        None
        if out.protocol == "global"
        else next(i for i in range(4) if out.deployed(i) is not None)
    )
    return out.deployed(number), fitted(method, data)


def slopes(function, x):
    """[R, outputs, D] central differences at rows x [R, D] in float64."""
    step = 1e-6
    moves = step * torch.eye(x.shape[-1], dtype=x.dtype)
    with torch.no_grad():
        return torch.stack([(function(x + m) - function(x - m)) / (2 * step) for m in moves], -1)


ON_FEATURES = [c for c in tried(cases() + VARIANTS) if "pixels" not in METHODS[c[0]].needs]


@pytest.mark.parametrize("case", ON_FEATURES, ids=ids)
def test_a_change_of_features_that_leaves_the_embedding_leaves_the_scores(case):
    model, data = deployed(case)
    x = data.x[:4, 0, : model.ctx.env.width].double()
    before = slopes(model.embed, x)
    after = slopes(model.scores, x)
    for e, s in zip(before, after, strict=True):
        found = torch.linalg.lstsq(e.mT, s.mT, driver="gelsd").solution
        assert torch.allclose(e.mT @ found, s.mT, atol=1e-5 * float(s.abs().max().clamp(min=1.0)))


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if "pixels" in m.needs])
def test_an_embedding_of_images_has_one_row_for_each(name):
    model, data = deployed((name, small(name)))
    made = model.embed(data.x[:4, 0])
    assert made.shape[0] == 4
    assert made.dim() == 2
    assert made.isfinite().all()


def test_a_projection_is_narrower_than_the_features():
    for name in ("fedavg", "fedpcl", "fedproto", "flesd-head"):
        model, data = deployed((name, small(name)))
        assert model.embed(data.x[:2, 0]).shape[-1] == 3 < data.x.shape[-1]
