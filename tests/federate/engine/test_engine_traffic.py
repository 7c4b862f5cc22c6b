"""Traffic: the counts printed in the papers, and the sum over a run against its closed form."""

import numpy as np
import pytest
import torch
from federation import federation, fitted, go, go_all, run, scaled, small
from method_calls import paper
from methods_tried import tried
from text_tables import rows_of

from fedcache.federate.engine.outcome import Traffic
from fedcache.federate.methods import METHODS

PAPERS = rows_of(
    """
    fedavg        |  512 |                   |   133_632 | 133_632
    fedprox       | 1536 |                   |   395_776 | 395_776
    fedrep        |  512 |                   |   131_072 | 131_072
    scaffold      |  512 |                   |   267_264 | 267_264
    fedproto      | 1536 |                   |     2_560 |   2_560
    fedpcl        |  512 |                   |     2_560 |  15_360
    fst-cbdg      | 1024 |                   |    10_250 |  10_250
    fedncm        |  512 |                   |     5_120 |   5_120
    fed3r         |  512 |                   |   136_448 |   5_130
    fed3r         |  512 | omega=1.0         |   136_448 | 136_448
    fed3r         |  512 | rff_dim=1000      |   510_500 |  10_010
    fedcof        |  512 |                   |     5_120 |   5_120
    fedcgs        |  512 |                   |   136_448 |   5_130
    fedpft        |  512 |                   |     5_140 |   5_130
    fedpft        |  512 | k_mix=10 cov=diag |   102_500 |   5_130
    fedpft        |  512 | k_mix=2 cov=full  | 2_636_820 |   5_130
    fed-tip-proto |  512 |                   |     5_120 |  25_600
    fedclip       |  512 |                   |   525_312 | 525_312
    """
)
"""Method, features, settings, scalars up and down a round, as the papers count them: 10 classes, 5 clients.

FedPCL sends (m + 1) C 256 numbers down. FedPFT sends 514, 10 x 1,025 and 2 (512 + 131,328 + 1) numbers for each of 10
classes; the prototypes of 5 clients come down in fed-tip-proto.
"""


@pytest.mark.parametrize(("name", "width", "settings", "up", "down"), PAPERS)
def test_the_counts_of_the_papers(name, width, settings, up, down):  # T-C1 to T-C4
    assert paper(name, int(width), settings) == (int(up), int(down))


def test_text_features_reach_a_client_once():
    out = go("fst-cbdg", rounds=6, participation=4)
    head = 6 * 11 + 6
    text = 6 * 11
    times = [sum(c in r.clients for r in out.records) for c in range(9)]
    assert max(times) > 1
    assert out.traffic.up.tolist() == [k * head for k in times]
    assert out.traffic.down.tolist() == [k * head + text * (k > 0) for k in times]
    assert go_all("clip-zs").traffic.down.tolist() == [text] * 9


@pytest.mark.parametrize(("post", "sums"), [("l2", 0), ("center", 1), ("standardize", 2)])
def test_means_over_all_clients_rows_are_counted_once(post, sums):
    """Before the first round, each client sends sums of its rows and their number, and receives the means."""
    plain, counted = (
        go("fst-cbdg", f"feat_post={name}", rounds=2, participation=4).traffic
        for name in ("none", post)
    )
    assert (counted.up - plain.up).tolist() == [11 * sums + (sums > 0)] * 9
    assert (counted.down - plain.down).tolist() == [11 * sums] * 9
    bytes_up = counted.totals()["up_bytes"] - plain.totals()["up_bytes"]
    assert bytes_up == 9 * 8 * (11 * sums + (sums > 0))
    assert counted.rounds[1] == plain.rounds[1]


# Sizes of the law below: classes, features, projection, trunk, contrasted, public rows, token width, clients.
C = 3
D = 5
P = 7
H = 7
Z = 4
N = 11
E = 8
M = 3
LINEAR = C * D + C
MLP = P * D + P + 4 * P + C * P + C
GRAM = D * (D + 1) // 2 + C * D
T = C * D  # 4 P: BatchNorm
SIMCLR = (H * D + H) + (H * H + H) + (Z * H + Z)
# one channel: w = 1
RESNET = 9 * (3 + 4 * 1) + 9 * (2 + 3 * 4) + 2 + 9 * (8 + 3 * 16) + 8 + 9 * (32 + 3 * 64) + 32
# BatchNorm, the projection
RESNET += 4 * (1 + 4 * 1 + 5 * 2 + 5 * 4 + 5 * 8) + (8 * 8 + 8) + (Z * 8 + Z)
SCRATCH = RESNET - (8 * 8 + 8) - (Z * 8 + Z) + 8 * C + C  # a classifier in the projection's place
PROMPT = 2 * E
VISUAL = 3 * (4 * 3 - 2 * 1)  # two tokens; a frame of one pixel in 4 x 3
SAME = {
    name: size
    for size, (names,) in zip(
        (MLP, PROMPT, 0),
        rows_of(
            """
            fedavg fedprox pfedme perfedavg ditto moon fedavgm fedadam fedadagrad fedyogi feddyn fedlc
            promptfl kgcoop prograd promptfolio fedpgp dp-fpl pfedprompt
            solo supcon central non-fl min-local local-prompt clip-zs tip-local local-supervised
            """
        ),
        strict=True,
    )
    for name in names.split()
}
BODY = P * D + P + 4 * P  # with BatchNorm's scale, shift and statistics
PLAIN = MLP - 4 * P  # without
# fedtpg
NETWORK = (
    PROMPT + 4 * E + 2 * D + (2 * E * E + 2 * E * D + 4 * E) + (8 * E * E + 8 * E) + (4 * E * E + E)
)
SAME |= {
    "scaffold": 2 * MLP - 2 * P,
    "fedrep": BODY,
    "fedper": BODY,
    "lg-fedavg": C * P + C,
    "fedntd": LINEAR,
    "fedavg-simclr": SIMCLR,
    "fedprox-simclr": SIMCLR,
    "fedavg-scratch": SCRATCH,
    "lp-plus-plus": LINEAR,
    "fedclip": 2 * D * (D + 1),
    "fedtpg": NETWORK,
    "tpfl-feat": 2 * D,
    "atpfl-feat": 2 * D,
    "tpfl": PROMPT + VISUAL,
    "atpfl": PROMPT + VISUAL,
}
UP = {
    **SAME,
    "fst-cbdg": LINEAR,
    "fed3r": GRAM + C,
    "fed3r-prior": GRAM,
    "fedcgs": GRAM + C,
    "fedcof": T + C,
    "afl": GRAM,
    "gda": GRAM + C,
    "gh-ofl": 2 * T + C,
    "fedncm": T + C,
    "fedbabu": BODY,
    "fednova": MLP + 1,
    "feddisco": MLP + 2,
    "ifca": PLAIN + 1,
    "tofa": GRAM + 9 * C,
    "flesd": N * Z,
    "flesd-head": N * Z,
    "flesd-cc": N * Z,
}
PER_CLASS = {"fedproto": P + 1, "fedpcl": P + 1, "fedpft": D + 3, "fed-tip-proto": D}
ONE_SHOT = ("afl", "gda", "fed3r", "fed3r-prior", "fedcgs", "fedcof", "fedncm", "fedpft")
DOWN = {
    **SAME,
    "fedbabu": MLP,
    "fednova": MLP,
    "feddisco": MLP,
    "ifca": 2 * PLAIN + 2,
    "fst-cbdg": LINEAR,
    **dict.fromkeys(ONE_SHOT, LINEAR),
    "gh-ofl": 2 * T + C,
    "tofa": GRAM + C + 9 * T,
    "flesd": RESNET,
    "flesd-head": SIMCLR,
    "flesd-cc": SIMCLR,
}
LATER = {"fedproto": C * P, "fedpcl": (M + 1) * C * P}  # nothing before the first round
HALF_PRECISION = {"fedpft"}
"""Methods that send numbers of two bytes; all others send those of the run, here of eight."""
TEXT = {
    "clip-zs",
    "fst-cbdg",
    "tip-local",
    "fed-tip-proto",
    "tpfl-feat",
    "atpfl-feat",
    "lp-plus-plus",
    "fedclip",
}


# The test of a method that is not listed has its own number, worked out by hand.
@pytest.mark.parametrize(
    "name", [name for name in tried(METHODS) if name in UP or name in PER_CLASS]
)
def test_the_counter_agrees_with_the_closed_form(name):  # T-0d, T-X4
    method = METHODS[name]
    data, clients = federation(sizes=(N, 13, 17), classes=C, width=D, per_client=C, tests=2)
    hp = method.resolve("paper", scaled(small(name)))
    data = fitted(method, data)
    owned = [len(np.unique(data.y[c.train])) for c in clients]
    assert sorted(set(owned)) == [2, 3]
    for execution in method.executions:
        how = {**hp, "opt": "sgd"} if execution == "gram" and "opt" in hp else hp
        out = run(method, how, data, clients, rounds=3, execution=execution, dtype=torch.float64)
        rounds = len(out.records)
        first = int("public" in method.reads(hp))
        down = (
            DOWN.get(name, D * sum(owned)) * rounds
            if name not in LATER
            else LATER[name] * (rounds - 1)
        )
        once = T * (name in TEXT)
        up = [rounds * (UP[name] if name in UP else o * PER_CLASS[name]) for o in owned]
        assert out.traffic.up.tolist() == [0] * first + up[first:]
        assert out.traffic.down.tolist() == [0] * first + [down + once] * (M - first)
        totals = out.traffic.totals()
        assert totals["up_bytes"] == sum(up[first:]) * (2 if name in HALF_PRECISION else 8)
        assert totals["down_bytes"] == (M - first) * (down + once) * 8


def test_bytes_are_those_of_the_numbers_of_every_round():
    for counted in go("fedavg", "head=linear", dtype=torch.float32).traffic.rounds:
        assert (
            (counted.up_bytes, counted.down_bytes) == (4 * counted.up, 4 * counted.down) != (0, 0)
        )


def test_traffic_is_written_of_all_clients_that_sent_or_received_anything():
    counted = Traffic.none_of(5)
    counted.up[:] = [0, 0, 1, 3, 0]
    counted.down[:] = [0, 5, 2, 0, 0]  # 1 only received, and 3 only sent; no bit of 1 is one of 2
    written = counted.to_json()
    assert written["clients"] == [1, 2, 3]
    assert written["up"] == [0, 1, 3]
    assert written["down"] == [5, 2, 0]
    assert Traffic.from_json(written, 5) == counted
