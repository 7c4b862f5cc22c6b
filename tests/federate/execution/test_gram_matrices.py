"""Rows and Gram matrices of clients, and the two products of a round, are those of plain arithmetic in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from float64 import normal

from fedcache.federate.execution import gram_matrices
from fedcache.federate.execution.gram_matrices import COMPILED, GramMatrices

SIZES = {
    "unequal": [5, 9, 9, 2, 7],
    "equal": [6] * 5,
    "one": [4],
    "none": [3, 0, 3],
    "many equal": [40] * COMPILED + [39, 3],
}


def made(sizes, width=24, dtype=torch.float64):
    x = normal(sum(sizes) + 7, 1, width, seed=3)
    ends = np.cumsum([0, *sizes])
    order = np.random.default_rng(1).permutation(len(x))
    rows = {c: order[a:b] for c, (a, b) in enumerate(pairwise(ends))}
    return x, rows, GramMatrices(x.to(dtype), rows)


def chunks(grams):
    """All clients as they lie, and some that do not lie one after another."""
    order = sorted(grams.n, key=lambda c: (-grams.n[c], c))
    return [order] if len(order) < 3 else [order, [order[0], order[2]], [order[-1]]]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_matrices_of_clients_are_products_of_their_rows_and_zero_past_them(sizes):
    x, rows, grams = made(sizes)
    for clients in chunks(grams):
        stacked = grams.stacked(clients)
        assert stacked.shape == (len(clients), *[max(grams.n[c] for c in clients)] * 2)
        for one, c in zip(stacked, clients, strict=True):
            own = x[rows[c], 0]
            wanted = torch.zeros_like(one)
            wanted[: len(own), : len(own)] = own @ own.mT
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(grams.of(c), own, rtol=0, atol=0)


def test_scored_rows_are_multiplied_with_every_basis_also_with_one_that_comes_later():
    x, rows, grams = made(SIZES["unequal"])
    tested = torch.tensor([1, 4, 6])
    bases = list(normal(3, 4, x.shape[-1], seed=7))
    for known in (bases[:1], bases[:1], bases[1:]):
        basis = grams.scoring_basis(1, x, tested, known)
        torch.testing.assert_close(
            basis.gram[0], x[tested, 0] @ x[rows[1], 0].mT, rtol=0, atol=1e-12
        )
        for j, base in enumerate(known):
            torch.testing.assert_close(
                basis.seen[0, j, ..., 0], x[tested, 0] @ base.mT, rtol=0, atol=1e-12
            )


@pytest.mark.parametrize("columns", [10, 300])
def test_products_in_float32_are_those_of_float64_to_its_rounding(columns):
    """Large enough for oneDNN where the processor has it: few columns, and more than features."""
    x, rows, grams = made([40] * COMPILED, width=256, dtype=torch.float32)
    clients = list(grams.n)
    block = grams.block(clients)
    base = normal(1, columns, 256, seed=5).float()
    A = normal(len(clients), 40, columns, 1, seed=6).float()
    exact = torch.stack([x[rows[c], 0] for c in clients])
    seen = grams.forward(clients, base)
    total = grams.back(clients, A, [1.0] * len(clients))
    torch.testing.assert_close(
        seen[..., 0].double(), exact @ base[0].double().mT, rtol=0, atol=1e-3
    )
    wanted = (A[..., 0].double().mT @ exact).sum(0)
    torch.testing.assert_close(total[0].double(), wanted, rtol=0, atol=1e-2)
    assert total.is_contiguous()
    torch.testing.assert_close(grams.stacked(clients).double(), exact @ exact.mT, rtol=0, atol=1e-3)
    worth = gram_matrices.by_onednn(base[0], block)
    assert worth == gram_matrices.by_onednn(block.mT, A.flatten(0, 1)[..., 0].mT)
