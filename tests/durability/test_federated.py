"""Liars, partitions, threads and long runs: what methods promise at sizes that take a while."""

import gc
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import difference, go_tiny, run, scaled, small
from methods_tried import tried
from sklearn.datasets import load_digits

from fedcache.errors import FedcacheError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import Client
from fedcache.federate.trust.pipeline import parse_policy

CLIENTS = 10
ROBUST = ("median", "trimmed:0.2", "multikrum", "nnm+trimmed:0.2")


def digits():
    """scikit-learn's 1,797 digits as unit features, turned so that they are as dense as a backbone's, for ten clients.

    Of pixels, which are mostly zero, the middle value of ten products is far from their mean.
    """
    x, y = load_digits(return_X_y=True)
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((64, 64)))[0]
    x = torch.nn.functional.normalize(torch.from_numpy(x @ turn).float(), dim=1).unsqueeze(1)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = (np.array_split(part, CLIENTS) for part in np.split(order, [len(x) * 3 // 4]))
    clients = [Client(f"client-{i}", train[i], test[i]) for i in range(CLIENTS)]
    return Data(x, torch.from_numpy(y), 10), clients


SETTINGS = {
    "fedavg": {"head": "linear", "opt": "sgd", "lr": 1.0, "batch": 16, "epochs": 2, "init": "zero"},
    "fedproto": {"opt": "adam", "lr": 0.01, "batch": 16, "epochs": 2},
    "fed3r": {"lam": 3.0},  # above the error that taking products coordinate by coordinate makes
}


@pytest.mark.parametrize(
    "name", ["fedavg", "fed3r", pytest.param("fedproto", marks=pytest.mark.full)]
)
def test_a_fifth_of_sign_flippers_breaks_the_mean_and_no_robust_rule(name, cases):
    data, clients = digits()
    method = METHODS[name]
    hp = method.resolve("paper", SETTINGS[name])

    def accuracy(aggregate, attack, seed):
        trust = parse_policy(aggregate, attack, byzantine=0.2)
        try:
            return run(method, hp, data, clients, rounds=20, seed=seed, trust=trust).accuracy
        except FedcacheError as error:
            # of flipped statistics nothing is made
            return 0.0 if "not positive definite" in str(error) else math.nan

    for seed in range(cases(1, 5)):
        clean = accuracy("mean", None, seed)
        assert accuracy("mean", "sign-flip:0.2:10", seed) < clean - 0.2
        for rule in ROBUST:
            assert accuracy(rule, "sign-flip:0.2:10", seed) > clean - 0.03, rule


@pytest.mark.parametrize("name", tried(n for n, m in METHODS.items() if "batched" in m.executions))
def test_threads_do_not_change_a_result_beyond_rounding(name):
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            made.append(go_tiny(name, scaled(small(name)), execution="batched"))
    finally:
        torch.set_num_threads(before)
    assert max(difference(made[0], other) for other in made[1:]) < 1e-10


def test_two_hundred_rounds_keep_memory_and_descriptors(cases):
    data, clients = digits()
    method = METHODS["fedavg"]
    hp = method.resolve("paper", SETTINGS["fedavg"])
    page, seen = os.sysconf("SC_PAGE_SIZE"), []

    def look(*_):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        seen.append((resident, len(list(Path("/proc/self/fd").iterdir()))))

    run(method, hp, data, clients, rounds=20)  # libraries load, pools fill
    gc.collect()
    run(method, hp, data, clients, rounds=cases(200, 200), on_round=look)
    memory = [m for m, _ in seen]
    assert max(memory[-20:]) - memory[20] < 20 << 20
    assert len({d for _, d in seen}) == 1
