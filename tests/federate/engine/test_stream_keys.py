"""Every draw of a run is that of its key: who knows seed, purpose, round and name makes the same one with numpy alone.

A stored run is gone on with, and repeated by another release, from these keys: a draw from another stream is as random,
and gives other figures. The streams here are made by hashlib and numpy, with no code of fedcache.
"""

import hashlib
import math

import numpy as np
import pytest
import torch
from float64 import doubles

from fedcache.federate.engine.context import ClientRng, generator
from fedcache.federate.engine.sampling import (
    MANY,
    UNIFORM,
    ClientSampler,
    ClusterRule,
    SamplingRule,
)
from fedcache.federate.methods import fed3r
from fedcache.federate.partition.client_table import NumberedNames
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.privacy import Privacy, PrivateDraws

M = 10
SEED = 5
EVERYBODY = np.arange(M)
NAMES = ("e", "a", "d", "b", "c")
ROWS = np.arange(3.0, 3.0 + M)


def hashed(*key):
    return int.from_bytes(
        hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=16).digest(), "little"
    )


def stream(*key):
    return np.random.Generator(np.random.PCG64(hashed(*key)))


def sampler(rule=UNIFORM, clients=M):
    return ClientSampler(NumberedNames(clients), np.arange(clients), SEED, ROWS, rule)


def client_rng(axes=1, *, clients=NAMES):
    return ClientRng(SEED, 2, clients, axes, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("round_", [0, 2])
def test_the_clients_of_a_round(round_):
    assert sampler().drawn(round_, 4) == sorted(stream(SEED, "sampling", round_).permutation(M)[:4])
    times = stream(SEED, "sampling", round_).standard_exponential(M) / ROWS
    assert sampler(SamplingRule("weighted")).drawn(round_, 4) == sorted(np.argsort(times)[:4])
    alone = stream(SEED, "poisson", round_).random(M) < 0.4
    assert sampler(SamplingRule("poisson")).drawn(round_, 4) == np.flatnonzero(alone).tolist()
    many = stream(SEED, "sampling", round_).choice(MANY, 4, replace=False, shuffle=False)
    assert sampler(clients=MANY).drawn(round_, 4) == sorted(many)


def test_names_are_drawn_in_their_order():
    drawn = stream(SEED, "sampling", 1).permutation(5)[:2]
    found = ClientSampler(NAMES, np.arange(5), SEED, ROWS).drawn(1, 2)
    assert sorted(NAMES[c] for c in found) == sorted(sorted(NAMES)[i] for i in drawn)


def test_who_is_there_drops_out_and_is_scored():
    there = np.flatnonzero(stream(SEED, "availability", 2).random(M) < 0.6)
    assert 4 < len(there) < M
    chosen = there[stream(SEED, "sampling", 2).permutation(len(there))[:4]]
    assert sampler(SamplingRule(available=0.6)).drawn(2, 4) == sorted(chosen)
    lost = np.flatnonzero(stream(SEED, "dropout", 2).random(M) < 0.3)
    assert 0 < len(lost) < M
    assert sampler(SamplingRule(dropout=0.3)).lost(2, M) == lost.tolist()
    assert sampler().scored(3) == sorted(stream(SEED, "eval-clients").permutation(M)[:3])


def test_clusters_and_those_of_a_round():
    cluster = stream(SEED, "client-clusters").permutation(M) % 4
    drawn = sampler(SamplingRule(clusters=ClusterRule(4, 2)))
    for round_ in range(6):
        taken = stream(SEED, "clusters", round_).permutation(4)[:2]
        assert drawn.drawn(round_, M) == np.flatnonzero(np.isin(cluster, taken)).tolist()


@pytest.mark.parametrize(("draw", "key"), [(0, (2,)), (1, (2, 1)), (3, (2, 3))])
def test_who_begins_while_others_train(draw, key):
    first = sorted(stream(SEED, "sampling", *key).permutation(M)[:4])
    gone = stream(SEED, "dropout", *key).random(4) < 0.5
    rule = SamplingRule(dropout=0.5)
    assert sampler(rule).begin(2, draw, 4, ()) == list(zip(first, gone, strict=True))
    # With one busy, places are drawn one by one, and again where someone is busy or drawn already.
    found = []
    numbers = stream(SEED, "sampling", *key)
    while len(found) < 3:
        if (place := int(numbers.integers(M))) not in (7, *found):
            found.append(place)
    assert [client for client, _ in sampler(rule).begin(2, draw, 3, [7])] == sorted(found)
    # With most of them busy the free ones are counted first.
    busy = [0, 2, 3, 5, 7, 8]
    free = np.setdiff1d(EVERYBODY, busy)
    places = stream(SEED, "sampling", *key).permutation(len(free))[:3]
    assert [client for client, _ in sampler(rule).begin(2, draw, 3, busy)] == sorted(free[places])


def test_attackers_and_what_they_draw():
    attack = parse_attack("gaussian:0.4:3")
    liars = stream(SEED, "attackers").permutation(5)[:2]
    assert {NAMES[c] for c in attack.attackers(NAMES, SEED)} == {sorted(NAMES)[i] for i in liars}
    # honest rows of length 5 and 13: on the whole 9, by coordinate 9 / 2^.5
    V = doubles([[3.0, 4.0], [5.0, 12.0], [0.0, 0.0], [9.0, 9.0]])
    sent = attack(V, torch.tensor([False, False, True, True]), SEED, 2)
    drawn = stream(SEED, "attack", 2).standard_normal((2, 2))
    assert torch.equal(sent[:2], V[:2])
    assert sent[2:].numpy() == pytest.approx(3 * 9 / math.sqrt(2) * drawn)


def test_who_takes_part_in_a_simulated_private_run():
    found = PrivateDraws(Privacy(1.0, 1.0, seed=0), SEED, (), {}, []).uniforms(2, 6)
    assert found.tolist() == stream(SEED, "poisson", 2).random(6).tolist()


@pytest.mark.parametrize("clients", [NAMES, NAMES[:1], tuple("abcdefghijk")])
def test_the_draws_of_clients_in_a_round(clients):
    rng = client_rng(clients=clients)
    sizes = range(3, 3 + len(clients))
    rows = rng.permutations("batch", list(sizes), 4)
    for row, name, n in zip(rows, clients, sizes, strict=True):
        assert row[:n].tolist() == stream(SEED, "batch", 2, name, 4).permutation(n).tolist()
    once = rng.each("split", lambda g, i: g.random(3), every_round=False)
    assert once.tolist() == [stream(SEED, "split", -1, name).random(3).tolist() for name in clients]
    assert (
        rng.generator("mixture", 0, 1).random()
        == stream(SEED, "mixture", 2, clients[0], 1).random()
    )


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_the_first_weights_of_clients(axes):
    names = NAMES if axes else NAMES[:1]
    own, common = (
        client_rng(axes, clients=names).uniform("init", independent=i) for i in (True, False)
    )
    streams = [stream(SEED, "init", -1, name) for name in names]
    for shape in ((2, 3), (4,)):  # drawn one after the other
        wanted = np.stack([g.uniform(-1.0, 1.0, shape) for g in streams])
        assert np.array_equal(own(shape).numpy().reshape(wanted.shape), wanted)
    whole = stream(SEED, "init", -1, "")
    for shape in ((2, 3), (4,)):
        drawn = common(shape)
        assert drawn.shape == (*(1,) * axes, *shape)
        assert np.array_equal(drawn.numpy().reshape(shape), whole.uniform(-1.0, 1.0, shape))
    shared = client_rng(axes).shared("code", lambda g: g.random(4))
    assert shared.tolist() == stream(SEED, "code", -1, "").random(4).tolist()


@pytest.mark.parametrize(("counts", "width"), [([3, 5], 4), ([16, 8], 2), ([17, 3], 1)])
def test_normal_rows_of_clients_are_torchs_in_whole_groups_of_sixteen(counts, width):
    found = client_rng(clients=("a", "b")).normal("noise", counts, width, 7)
    for rows, name, count in zip(found, "ab", counts, strict=True):
        source = torch.Generator().manual_seed(hashed(SEED, "noise", 2, name, 7) % 2**32)
        drawn = torch.randn(math.ceil(count * width / 16) * 16, generator=source)[: count * width]
        assert rows[:count].flatten().tolist() == drawn.tolist()
        assert not rows[count:].any()


def test_the_frequencies_of_fourier_features():
    om, u = fed3r._drawn(SEED, 3, 4, 2.0)
    numbers = stream(SEED, "fourier", 3, 4)
    assert np.array_equal(om.numpy(), numbers.standard_normal((3, 4)) / 2.0)
    assert np.array_equal(u.numpy(), numbers.uniform(0, 2 * np.pi, 4))


def test_a_seed_means_the_same_draws_in_every_process():
    # Two runs in one process cannot see a stream keyed by hash(), which every process salts anew.
    assert generator(0, "batch", 1, "client-0", 2).permutation(8).tolist() == [
        2,
        3,
        6,
        5,
        1,
        0,
        7,
        4,
    ]
