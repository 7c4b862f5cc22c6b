"""The rows of the federation as one pool, and partitions of it: closed forms do not see which one."""

import numpy as np
from federation import Rows, federation
from hypothesis import given, settings
from hypothesis import strategies as st

DATA, CLIENTS = federation()
POOL = np.concatenate([c.train for c in CLIENTS])
TEST = np.concatenate([c.test for c in CLIENTS])
X = DATA.x[POOL, 0].numpy()
Y = np.eye(6)[DATA.y[POOL].numpy()]
MEANS = (Y.T @ X) / Y.sum(0)[:, None]
"""The mean of each class."""


def any_partition(examples, most, **more):
    """Run a test on so many draws of the ``seed`` and ``m`` of ``parts``, with at most ``most`` clients."""
    drawn = given(seed=st.integers(0, 99), m=st.integers(1, most), **more)
    return lambda test: settings(max_examples=examples)(drawn(test))


def parts(seed, m):
    """The pool in ``m`` parts of random sizes."""
    g = np.random.default_rng(seed)
    owner = g.integers(0, m, len(POOL))
    return [Rows(f"part-{i}", g.permutation(POOL[owner == i]), TEST) for i in range(m)]
