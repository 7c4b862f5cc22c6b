"""The rows of the federation as one pool, and partitions of it: closed forms do not see which one."""

import numpy as np
from federation import Rows, federation

DATA, CLIENTS = federation()
POOL = np.concatenate([c.train for c in CLIENTS])
TEST = np.concatenate([c.test for c in CLIENTS])
X = DATA.x[POOL, 0].numpy()
Y = np.eye(6)[DATA.y[POOL].numpy()]


def parts(seed, m):
    g = np.random.default_rng(seed)
    owner = g.integers(0, m, len(POOL))
    return [Rows(f"part-{i}", g.permutation(POOL[owner == i]), TEST) for i in range(m)]
