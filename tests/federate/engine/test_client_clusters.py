"""Rounds that draw clusters of clients first: laws of the draws, and of runs."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from draws import examples
from federation import difference, go
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused

from fedcache.federate.engine.sampling import (
    ClientSampler,
    ClusterRule,
    SamplingRule,
    parse_clusters,
    parse_sampling,
)
from fedcache.federate.engine.simulated_time import TimingRule
from fedcache.federate.partition.client_table import NumberedNames

UNEVEN = "client,cluster\n" + "".join(f"client-{c},{'abbcccccc'[c]}\n" for c in range(9))


@pytest.fixture
def uneven(tmp_path):
    """Clusters of 1, 2 and 6 of nine clients."""
    path = tmp_path / "clusters.csv"
    path.write_text(UNEVEN)
    return str(path)


def sampler(clients, rule, eligible=None):
    who = np.arange(clients) if eligible is None else np.array(sorted(eligible))
    return ClientSampler(NumberedNames(clients), who, 3, np.arange(1.0, clients + 1), rule)


def of_nine(path, each=1):
    """The nine clients of a file of clusters."""
    rule = parse_sampling("uniform", None, 0.0, path, each)
    return ClientSampler([f"client-{c}" for c in range(9)], np.arange(9), 0, np.ones(9), rule)


@examples(60, 600)
@given(st.integers(2, 60), st.sampled_from(["uniform", "weighted", "poisson"]), st.data())
def test_a_round_has_clients_of_so_many_clusters_alone(clients, how, draw):
    count = draw.draw(st.integers(1, clients))
    each = draw.draw(st.integers(1, count))
    asked = draw.draw(st.integers(1, clients))
    eligible = draw.draw(st.sets(st.integers(0, clients - 1), min_size=1))
    rule = SamplingRule(
        how, draw.draw(st.sampled_from([1.0, 0.7])), clusters=ClusterRule(count, each)
    )
    made = sampler(clients, rule, eligible)
    of = {
        int(made.by_name[p]): k
        for k, some in enumerate(made.rule.clusters.places(made.names, made.by_name, 3))
        for p in some
    }
    assert of.keys() == eligible
    for round_ in range(4):
        found = made.drawn(round_, asked)
        assert found == sorted(set(found))
        assert len({of[c] for c in found}) <= each
        assert set(found) <= eligible
        if how != "poisson":
            assert len(found) <= min(asked, made.planned(round_, asked))
        assert sampler(clients, rule, eligible).drawn(round_, asked) == found


@examples(30, 300)
@given(st.permutations(list("abcdefgh")))
def test_clusters_are_of_names_for_every_order_of_clients(names):
    """And the same for a method that leaves some clients out."""
    by_name = np.argsort(names)
    known, whole, some = (
        {
            frozenset(of[int(who[p])] for p in cluster) - {"a", "b"}
            for cluster in ClusterRule(4).places(of, who, 3)
        }
        for of, who in (("abcdefgh", np.arange(8)), (names, by_name), (names, by_name[2:]))
    )
    assert known == whole
    assert whole - {frozenset()} == some


@pytest.mark.parametrize("clusters", [ClusterRule(1), ClusterRule(3, 3)])
@pytest.mark.parametrize("timing", [None, TimingRule(buffer=2)])
def test_one_cluster_and_all_clusters_are_the_plain_run(clusters, timing):
    plain = SamplingRule("weighted", 0.7, dropout=0.3)
    one, other = (
        go("fedrep", timing=timing, sampling=rule)
        for rule in (plain, replace(plain, clusters=clusters))
    )
    assert difference(one, other) == 0.0
    assert one.traffic == other.traffic


def test_clusters_smaller_than_a_round_are_said(uneven):
    for how, each, participation, expected in (
        ("uniform", 2, 5, 1),
        ("uniform", 1, 1, 0),
        ("uniform", 1, None, 0),  # all of a cluster are what was asked for
        ("poisson", 1, 5, 0),
    ):
        sampling = parse_sampling(how, None, 0.0, uneven, each)
        out = go("fedavg", rounds=1, participation=participation, sampling=sampling)
        assert len([w for w in out.warnings if "clusters" in w]) == expected


def test_memory_is_planned_for_the_largest_clusters(uneven):
    """Not for those of the first round, which may be the smallest; nor for another number in a run that goes on."""
    made = of_nine(uneven)
    assert len({len(made.drawn(r, 9)) for r in range(9)}) > 1
    assert {made.planned(r, 9) for r in range(9)} == {6}
    assert made.planned(0, 4) == 4


def test_clients_of_other_clusters_begin_in_no_step(uneven):
    made = of_nine(uneven, 2)
    for round_ in range(20):
        here = set(made.drawn(round_, 9))
        for busy in ([], [0], [4, 1]):
            assert [c for c, _ in made.begin(round_, 1, 9, busy)] == sorted(here - set(busy))
            assert {c for c, _ in made.begin(round_, 1, 2, busy)} <= here - set(busy)


def test_a_file_names_the_clusters_of_clients(tmp_path):
    path = tmp_path / "clusters.csv"
    path.write_text("client,cluster\n b , north\na,north\n\nc,south\n")
    rule = parse_clusters(str(path), 1)
    assert rule.count == 2
    assert rule.words()["clusters_per_round"] == 1
    assert str(rule.words()["client_clusters"]).startswith("sha256:")
    assert [p.tolist() for p in rule.places("abc", np.array([0, 1]), 9)] == [
        [0, 1]
    ]  # c cannot train
    assert [p.tolist() for p in rule.places("abcd", np.arange(3), 0)] == [[0, 1], [2]]  # nor can d
    refused(lambda: rule.places("abcd", np.arange(4), 0), "'d'")
    refused(lambda: rule.places("ab", np.arange(2), 0), "'c'")


def test_a_name_may_have_characters_that_some_functions_take_for_line_ends(tmp_path):
    path = tmp_path / "clusters.csv"
    path.write_text('client,cluster\r\na\x1c1,x\n"b\u2028\n2",y\n', encoding="utf-8", newline="")
    places = parse_clusters(str(path), 1).places(["a\x1c1", "b\u2028\n2"], np.arange(2), 0)
    assert [p.tolist() for p in places] == [[0], [1]]


def test_a_file_that_says_something_else_is_parsed_again(tmp_path):
    path = tmp_path / "clusters.csv"
    # as long as before, and perhaps in the same tick of the clock
    for of_b, count in (("y", 2), ("x", 1)):
        path.write_text(f"client,cluster\na,x\nb,{of_b}\n")
        assert parse_clusters(str(path), 1).count == count


def test_a_round_costs_what_its_clusters_cost():
    """Of 10^6 clients in 1,000 clusters a round touches 1,000: no array of all clients, which is 1 MB at least."""
    made = sampler(1_000_000, SamplingRule("weighted", 0.5, clusters=ClusterRule(1000)))
    made.drawn(0, 100)
    tracemalloc.start()
    try:
        assert len(made.drawn(1, 100)) == 100
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000
