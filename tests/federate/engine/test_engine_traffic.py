"""Traffic: the counts printed in the papers, and the sum over a run against its closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import federation, fitted, go, run, scaled, small
from method_calls import paper, wide
from methods_tried import tried

from fedcache.federate.engine.outcome import Traffic
from fedcache.federate.methods import METHODS


@pytest.mark.parametrize(("width", "weights"), [(512, 133_632), (1024, 264_704), (1536, 395_776)])
def test_the_papers_count_weights_only(width, weights):  # T-C1, T-C2
    for name in ("fedavg", "fedprox"):
        assert paper(name, width) == (weights, weights)


def test_prototypes_and_linear_heads():  # T-C3, T-C4
    assert paper("fedproto", 512) == paper("fedproto", 1536) == (2560, 2560)
    assert paper("fedpcl", 512) == (2560, 15_360)  # (m + 1) C 256 down
    assert paper("fst-cbdg", 1024) == paper("fedavg", 1024, {"head": "linear"}) == (10_250, 10_250)
    assert paper("fst-cbdg", 1024, classes=100) == (102_500, 102_500)
    assert paper("fedncm", 512) == (5_120, 5_120)
    assert paper("fed3r", 512) == (136_448, 5_130)
    assert paper("solo", 512) == paper("central", 512) == (0, 0)


@pytest.mark.parametrize(("width", "exact"), [(512, 133_898), (1536, 396_042)])
def test_exact_counts_hold_biases_and_batchnorm_too(width, exact):  # T-X4
    pair = wide(width)
    for settings, extra in (({"bn": False}, 0), ({}, 1024)):  # 512 of gain and shift, 512 running statistics
        out = go("fedavg", settings, *pair, rounds=1, participation=None, dtype=torch.float32)
        assert out.traffic.up.tolist() == out.traffic.down.tolist() == [exact + extra] * 5
        assert out.traffic.totals()["up_bytes"] == 5 * 4 * (exact + extra)


def test_exact_counts_of_the_closed_forms():  # T-X4
    pair = wide(512)
    one = {"rounds": 1, "participation": None}
    for execution in ("sequential", "batched"):
        assert go("fed3r", {}, *pair, **one, execution=execution).traffic.up.tolist() == [136_448] * 5
        out = go("fed3r", {"bias": True}, *pair, **one, execution=execution)
        assert out.traffic.up.tolist() == [136_448 + 512 + 10] * 5
        assert out.traffic.down.tolist() == [10 * 513] * 5
        assert out.traffic.totals()["up_bytes"] == 8 * sum(out.traffic.up)  # statistics are float64
        assert go("fedncm", {}, *pair, **one, execution=execution).traffic.up.tolist() == [5_130] * 5


@pytest.mark.parametrize("execution", ["sequential", "batched"])
@pytest.mark.parametrize("name", ["fedproto", "fedpcl"])
def test_only_owned_classes_are_sent(name, execution):
    data, clients = federation()
    out = go(name, {"bn": False}, data, clients, rounds=1, participation=None, execution=execution)
    owned = [len(np.unique(data.y[c.train])) for c in clients]
    assert out.traffic.up.tolist() == [k * 257 for k in owned]
    assert out.traffic.down.tolist() == [0] * 9  # there are no prototypes before the first round


def test_a_run_of_fedpcl_adds_up():  # T-X5
    data, clients = wide(64, rows=60)
    assert all(len(np.unique(data.y[c.train])) == 10 for c in clients)
    out = go("fedpcl", {}, data, clients, rounds=4, participation=None)
    assert out.traffic.up.tolist() == [4 * 10 * 257] * 5
    assert out.traffic.down.tolist() == [3 * 15_360] * 5
    assert out.traffic.totals()["paper_up"] == 4 * 5 * 2_560
    assert out.traffic.totals()["paper_down"] == 4 * 5 * 15_360


@pytest.mark.parametrize("execution", ["sequential", "batched"])
def test_text_features_reach_a_client_once(execution):
    data, clients = federation()
    out = go("fst-cbdg", {}, data, clients, rounds=6, participation=4, execution=execution)
    head, text = 6 * 11 + 6, 6 * 11
    times = [sum(c in r.clients for r in out.records) for c in range(9)]
    assert max(times) > 1
    assert out.traffic.up.tolist() == [k * head for k in times]
    assert out.traffic.down.tolist() == [k * head + text * (k > 0) for k in times]
    assert out.traffic.totals()["down"] == sum(out.traffic.down) == sum(r.down for r in out.traffic.rounds)
    assert go("clip-zs", {}, data, clients, participation=None).traffic.down.tolist() == [text] * 9


@pytest.mark.parametrize("name", tried(METHODS))
def test_totals_are_the_sum_over_clients(name):
    out = go(name, small(name))
    assert out.traffic.totals()["up"] == sum(out.traffic.up)
    assert out.traffic.totals()["down"] == sum(out.traffic.down)
    assert len(out.traffic.rounds) == len(out.records) == (1 if METHODS[name].one_shot else 3)


# Sizes of the law below: classes, features, projection, trunk, contrasted, public rows, token width, clients.
C, D, P, H, Z, N, E, M = 3, 5, 7, 7, 4, 11, 8, 3
LINEAR, MLP, GRAM, T = C * D + C, P * D + P + 4 * P + C * P + C, D * (D + 1) // 2 + C * D, C * D  # 4 P: BatchNorm
SIMCLR = (H * D + H) + (H * H + H) + (Z * H + Z)
RESNET = 9 * (3 + 4 * 1) + 9 * (2 + 3 * 4) + 2 + 9 * (8 + 3 * 16) + 8 + 9 * (32 + 3 * 64) + 32  # one channel: w = 1
RESNET += 4 * (1 + 4 * 1 + 5 * 2 + 5 * 4 + 5 * 8) + (8 * 8 + 8) + (Z * 8 + Z)  # BatchNorm, the projection
SCRATCH = RESNET - (8 * 8 + 8) - (Z * 8 + Z) + 8 * C + C  # a classifier in the projection's place
PROMPT, VISUAL = 2 * E, 3 * (4 * 3 - 2 * 1)  # two tokens; a frame of one pixel in 4 x 3
SAME = dict.fromkeys(("fedavg", "fedprox", "pfedme", "perfedavg", "ditto", "moon", "fedavgm", "fedadam", "fedadagrad",
                      "fedyogi", "feddyn", "fedlc"), MLP)  # fmt: skip
BODY = P * D + P + 4 * P  # with BatchNorm's scale, shift and statistics
PLAIN = MLP - 4 * P  # without
SAME |= {"scaffold": 2 * MLP - 2 * P, "fedrep": BODY, "fedper": BODY, "lg-fedavg": C * P + C, "fedntd": LINEAR}
SAME |= {"fedavg-simclr": SIMCLR, "fedprox-simclr": SIMCLR}
SAME |= {"fedavg-scratch": SCRATCH, "local-supervised": 0, "lp-plus-plus": LINEAR, "fedclip": 2 * D * (D + 1)}
NETWORK = PROMPT + 4 * E + 2 * D + (2 * E * E + 2 * E * D + 4 * E) + (8 * E * E + 8 * E) + (4 * E * E + E)  # fedtpg
SAME |= {"promptfl": PROMPT, "pfedprompt": PROMPT, "fedtpg": NETWORK, "tpfl-feat": 2 * D, "atpfl-feat": 2 * D}
SAME |= {"tpfl": PROMPT + VISUAL, "atpfl": PROMPT + VISUAL}
SAME |= dict.fromkeys(("solo", "supcon", "central", "non-fl", "min-local", "local-prompt", "clip-zs", "tip-local"), 0)
UP = {**SAME, "fst-cbdg": LINEAR, "fed3r": GRAM, "fed3r-prior": GRAM, "fedcgs": GRAM + C, "fedcof": T + C,
      "afl": GRAM, "gda": GRAM + C, "gh-ofl": 2 * T + C, "fedncm": T + C, "fedbabu": BODY, "fednova": MLP + 1,
      "feddisco": MLP + 2, "ifca": PLAIN + 1, "tofa": GRAM + 9 * C,
      "flesd": N * Z, "flesd-head": N * Z, "flesd-cc": N * Z}  # fmt: skip
PER_CLASS = {"fedproto": P + 1, "fedpcl": P + 1, "fedpft": D + 3, "fed-tip-proto": D}
ONE_SHOT = ("afl", "gda", "fed3r", "fed3r-prior", "fedcgs", "fedcof", "fedncm", "fedpft")
DOWN = {**SAME, "fedbabu": MLP, "fednova": MLP, "feddisco": MLP, "ifca": 2 * PLAIN + 2, "fst-cbdg": LINEAR,
        **dict.fromkeys(ONE_SHOT, LINEAR), "gh-ofl": 2 * T + C, "tofa": GRAM + C + 9 * T,
        "flesd": RESNET, "flesd-head": SIMCLR,
        "flesd-cc": SIMCLR}  # fmt: skip
LATER = {"fedproto": C * P, "fedpcl": (M + 1) * C * P}  # nothing before the first round
HALF_PRECISION = {"fedpft"}
"""Methods that send numbers of two bytes; all others send those of the run, here of eight."""
TEXT = {"clip-zs", "fst-cbdg", "tip-local", "fed-tip-proto", "tpfl-feat", "atpfl-feat", "lp-plus-plus", "fedclip"}


@pytest.mark.parametrize("name", tried(METHODS))
def test_the_counter_agrees_with_the_closed_form(name):  # T-0d, T-X4
    method = METHODS[name]
    data, clients = federation(sizes=(N, 13, 17), classes=C, width=D, per_client=C, tests=2)
    hp, data = method.resolve("paper", scaled(small(name))), fitted(method, data)
    owned = [len(np.unique(data.y[c.train])) for c in clients]
    assert sorted(set(owned)) == [2, 3]
    for execution in method.executions:
        how = {**hp, "opt": "sgd"} if execution == "gram" and "opt" in hp else hp
        out = run(method, how, data, clients, rounds=3, execution=execution, dtype=torch.float64)
        rounds, first = len(out.records), int("public" in method.reads(hp))
        down = DOWN.get(name, D * sum(owned)) * rounds if name not in LATER else LATER[name] * (rounds - 1)
        once = T * (name in TEXT)
        up = [rounds * (UP[name] if name in UP else o * PER_CLASS[name]) for o in owned]
        assert out.traffic.up.tolist() == [0] * first + up[first:]
        assert out.traffic.down.tolist() == [0] * first + [down + once] * (M - first)
        totals = out.traffic.totals()
        assert totals["up_bytes"] == sum(up[first:]) * (2 if name in HALF_PRECISION else 8)
        assert totals["down_bytes"] == (M - first) * (down + once) * 8


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_bytes_are_those_of_the_numbers_of_every_round(dtype, size):
    out = go("fedavg", {"head": "linear"}, dtype=dtype)
    assert len(out.traffic.rounds) == 3
    for counted in out.traffic.rounds:
        assert (counted.up_bytes, counted.down_bytes) == (size * counted.up, size * counted.down) != (0, 0)


def test_traffic_is_written_of_all_clients_that_sent_or_received_anything():
    counted = Traffic.none_of(5)
    counted.up[:] = [0, 0, 1, 3, 0]
    counted.down[:] = [0, 5, 2, 0, 0]  # 1 only received, and 3 only sent; no bit of 1 is one of 2
    written = counted.to_json()
    assert (written["clients"], written["up"], written["down"]) == ([1, 2, 3], [0, 1, 3], [5, 2, 0])
    assert Traffic.from_json(written, 5) == counted
