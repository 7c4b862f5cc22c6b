"""Local training written out, for references that share nothing with the engine but the order of the rows."""

import torch
from method_calls import batches_of


def local_batches(client, round_, epochs=1, *, seed=0):
    """Rows of a client's batches in a round, over all epochs, in the engine's order."""
    for epoch in range(epochs):
        yield from batches_of(client, seed, round_, epoch)


class Tree(dict):
    """Tensors by name, which are added and multiplied name by name, as equations have them."""

    def __add__(self, other):
        return Tree({k: t + other[k] for k, t in self.items()})

    def __sub__(self, other):
        return Tree({k: t - other[k] for k, t in self.items()})

    def __rmul__(self, factor):
        return Tree({k: factor * t for k, t in self.items()})


def gradient(objective, p):
    """Gradient of a scalar function of a flat dict."""
    at = {k: t.detach().requires_grad_() for k, t in p.items()}
    return Tree(zip(at, torch.autograd.grad(objective(at), list(at.values())), strict=True))


def descended(p, data, batches, lr, objective, *more):
    """Where plain gradient descent of ``objective(p, x, y, *more)`` over the batches ends."""
    for rows in batches:
        at = data.x[rows, 0], data.y[rows], *more
        p = p - lr * gradient(lambda q, at=at: objective(q, *at), p)
    return p


def linear(p, x):
    """Logits of a linear head."""
    return x @ p["W"].T + p["b"]


def linear_gradient(p, data, rows):
    """Gradient of a linear head's mean cross-entropy on these rows."""
    return gradient(
        lambda q: torch.nn.functional.cross_entropy(linear(q, data.x[rows, 0]), data.y[rows]), p
    )


def mean_of(trees, sizes):
    """Mean of dicts of tensors, weighed by ``sizes``."""
    return Tree(
        {k: sum(n * t[k] for n, t in zip(sizes, trees, strict=True)) / sum(sizes) for k in trees[0]}
    )
