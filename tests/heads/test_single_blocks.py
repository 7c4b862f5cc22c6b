"""Products in float32 of a GPU's blocks, which any device can compute."""

from __future__ import annotations

import pytest
import torch

from fedcache.heads import ridge
from fedcache.heads.ridge import SINGLE_ROWS, gram


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
    bound = ridge.pack(6.2e-5 * diagonal.outer(diagonal))
    assert bool(((made - exact).abs() <= bound).all())


def test_blocks_are_added_in_float64():
    # Beside 2^28, float32 has every 32nd integer alone: sums of blocks in float32 would lose rows.
    z = torch.ones(3 * SINGLE_ROWS + 5, 1)
    z[:SINGLE_ROWS] = 0.0
    z[0] = 2.0**14
    assert float(ridge._gram_of_many_blocks(z)) == 2.0**28 + 2 * SINGLE_ROWS + 5
