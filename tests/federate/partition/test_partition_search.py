"""The Dirichlet search: its counts by hand, its draws against a plain loop, and that it always ends with an answer."""

from dataclasses import replace

import numpy as np
import pytest
from federation import rows_tested
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_rows import columns_from, even_columns
from refusal import corruption, refused
from setting_lines import chosen, set_to
from text_tables import rows_of

from fedcache.federate.partition import domain_shift as module
from fedcache.federate.partition.domain_shift import Rule, draw, search
from fedcache.federate.partition.partition import SCHEMES, make
from fedcache.federate.partition.scheme import Streams

CIFAR10 = even_columns(5000, 1000, 10)


def quota(*rows):
    return np.array(rows, np.int64)


def counted(rule, shares):
    """Rows [C, M] by a rule of shares [1, C, M]."""
    return rule.counts(shares.swapaxes(0, 1), len(shares)).rows[0]


def test_a_class_is_cut_at_floored_cumulative_shares():
    # cumulative .25 .6 1 of 10 rows: cut at 2, 6 and 10 -> 2, 4, 4; of 3 rows: cut at 0, 1 and 3 -> 0, 1, 2
    shares = np.tile([0.25, 0.35, 0.4], (1, 2, 1))
    assert counted(Rule(quota(10, 3), 3, 1.0), shares).tolist() == [[2, 4, 4], [0, 1, 2]]


def test_floored_shares_leave_rows_out():
    # .25 .35 .4 of 10 rows -> 2, 3, 4; the limit of the last client is 1
    shares = np.array([[[0.25, 0.35, 0.4]]])
    assert counted(Rule(quota(10), 3, 1.0, exact=False), shares).tolist() == [[2, 3, 4]]
    limited = Rule(quota(10), 3, 1.0, exact=False, limit=np.array([[9, 9, 1]]))
    assert counted(limited, shares).tolist() == [[2, 3, 1]]


def test_the_gate_closes_a_client_at_its_even_share():
    # 2 classes of 12 rows, 3 clients, gate 24 / 3 = 8.
    # class 0: .75 .15 .10 -> cut at 9, 10, 12 -> 9, 1, 2: client 0 has reached 8 and is closed.
    # class 1: .5 .3 .2 -> 0, .3, .2 of .5 -> 0, .6, .4 -> cut at 0, 7, 12 -> 0, 7, 5.
    shares = np.array([[[0.75, 0.15, 0.10], [0.5, 0.3, 0.2]]])
    rule = Rule(quota(12, 12), 3, 1.0, gate=8.0)
    assert counted(rule, shares).tolist() == [[9, 1, 2], [0, 7, 5]]
    # All the mass of class 1 on the closed client: even between the open ones.
    shares[0, 1] = [1.0, 0.0, 0.0]
    assert counted(rule, shares).tolist() == [[9, 1, 2], [0, 6, 6]]


@pytest.mark.parametrize("alpha", [1e-6, 0.0499, 0.05, 0.5])
def test_shares_are_gammas_over_their_sum_and_below_five_hundredths_numpys_own_dirichlet(alpha):
    wanted = np.random.default_rng(4).dirichlet([alpha] * 5, size=(3, 2))
    if alpha >= 0.05:
        gammas = np.random.default_rng(4).standard_gamma(alpha, size=(3, 2, 5))
        wanted = gammas / gammas.sum(axis=-1, keepdims=True)
    assert np.array_equal(draw(np.random.default_rng(4), alpha, 3, 2, 5), wanted)


@settings(max_examples=30)
@given(
    alpha=st.sampled_from([0.02, 0.05, 0.2]),
    seed=st.integers(0, 10_000),
    least=st.sampled_from([0.0, 0.1]),
)
def test_the_first_acceptable_draw_is_taken(alpha, seed, least):
    """Blocks, caps and early ends change nothing: a plain loop over single draws finds the same one."""
    rule = Rule(quota(30, 40, 50), 5, alpha, minimum=3, gate=24.0, least_share=least)
    found = search(np.random.default_rng(seed), rule, draws=400)
    rng = np.random.default_rng(seed)
    smallest = []
    for number in range(1, found.draws + 1):
        shares = draw(rng, alpha, 1, 3, 5)
        counts = counted(rule, shares)
        smallest.append(counts.sum(axis=0).min())
        if counts.sum(axis=0).min() >= 3 and (least == 0.0 or shares[0].sum(axis=0).min() > least):
            assert found.counts is not None
            assert (found.counts == counts).all()
            assert found.draws == number
            return
    assert found.counts is None
    assert found.best_minimum == max(smallest)


def test_the_search_stops_at_its_caps():
    # one row cannot be cut in two by shares that never reach 1: always short, but only one client of two is
    impossible = Rule(quota(1), 2, 1.0)
    found = search(np.random.default_rng(0), impossible, draws=300)
    assert found.counts is None
    assert found.draws == 300
    assert found.best_minimum == 0
    assert found.hopeless is False
    # 100 numbers are 50 draws of 2
    assert search(np.random.default_rng(0), impossible, shares=100).draws == 50
    assert search(np.random.default_rng(0), impossible, shares=1).draws == module.LEAST_DRAWS


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "gate"), [(0.01, True), (0.02, False)])
def test_an_infeasible_lda_ends_soon_and_names_an_alpha_that_works(alpha, gate):
    def dealt(alpha):
        return make("lda", CIFAR10, clients=100, alpha=alpha, gate=gate, min_size=10)

    error = refused(lambda: dealt(alpha))
    works = error.instead["alpha"]
    assert f"--alpha {works}" in error.hint
    assert alpha < works < 0.1
    assert min(len(client.train) for client in dealt(works).clients) >= 10


def test_the_paper_alpha_of_five_hundredths_is_found():
    # FST-CBDG uses alpha .05 with 100 clients; about one draw in 20,000 gives everybody 10 rows
    partition = make("lda", CIFAR10, clients=100, alpha=0.05, seed=1)
    assert min(len(client.train) for client in partition.clients) >= 10


def test_five_hundred_clients_of_cifar100_are_no_endless_loop():
    assert make("dirichlet", even_columns(500, 10, 100), clients=500, alpha=0.3).dropped == 0


SMALL = even_columns(4, 2, 3)


# 12 rows for 6 x 10: 1 client can have 10. 3 classes of 4 rows can be cut into 3 to 12 shards.
INFEASIBLE = rows_of(
    """
    iid      | clients=13                                 | clients=12
    lda      | clients=6                                  | clients=1
    shards   | clients=5 shards=4                         | shards=2
    shards   | clients=13 shards=1                        | clients=12
    few-shot | clients=4                                  | clients=3
    few-shot | clients=2 shots=3 skew=iid                 | shots=2
    few-shot | clients=9 shots=5 skew=iid                 | clients=1 shots=4
    few-shot | clients=2 shots=5 skew=iid sharing=true    | shots=4
    """
)


@pytest.mark.parametrize(
    ("columns", "scheme", "args", "instead"),
    [
        *((SMALL, *row) for row in INFEASIBLE),
        # 7 classes of one row are 7 shards, neither for two clients nor two for each
        (even_columns(1, 1, 7), "shards", "clients=2 shards=2", "clients=1 shards=7"),
        # classes of 2 and 5 rows: the larger may have one shard more, so 2 x 2 + 1 = 5 shards at most
        (
            columns_from([0, 0, 1, 1, 1, 1, 1, 0], [0] * 8, [0] * 7 + [1], [1] * 8, 2, 1),
            "shards",
            "clients=6 shards=1",
            "clients=5",
        ),
    ],
)
def test_infeasible_arguments_come_with_those_that_work(columns, scheme, args, instead):
    asked = set_to(args)
    error = refused(lambda: make(scheme, columns, **asked), f"fedcache partition --scheme {scheme}")
    assert error.instead == set_to(instead)
    make(scheme, columns, **asked | error.instead)


# Arguments


@pytest.mark.parametrize(
    ("scheme", "args", "message"),
    [
        *rows_of(
            """
            lda           | alhpa=0.1                | 'alpha'
            dirchlet      |                          | 'dirichlet'
            lda           | alpha=NaN                | alpha is nan
            lda           | alpha="0.1"              | alpha is '0.1'
            lda           | clients=2.5              | clients is 2.5
            label-shift   | pool=tests               | 'test'
            iid           | seed=-1                  | -1
            iid           | seed=9223372036854775808 | 9223372036854775808
            feature-shift |                          | domain
            """
        ),
        ("iid", {"domain": "domain 1"}, "'domain 0'"),
        ("iid", {"domain": ["domain 0", "domain 0"]}, "twice"),
    ],
)
def test_a_wrong_argument_is_named(scheme, args, message):
    refused(lambda: make(scheme, SMALL, **chosen(args)), message)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_arguments_are_declared_well(scheme):
    tags = [argument.tag for argument in scheme.arguments]
    assert len({*tags, "s", ""}) == len(tags) + 2, "one for each, and none is the seed's"


@pytest.mark.parametrize(
    ("splits", "scheme", "split"), [([1] * 6, "iid", "split train"), ([0] * 6, "iid", "test rows")]
)
def test_an_absent_split_is_named(splits, scheme, split):
    columns = columns_from([0, 1] * 3, [0] * 6, splits, [1] * 6, 2, 1)
    refused(lambda: make(scheme, columns, clients=2), split)


def test_label_shift_needs_no_test_split():
    columns = columns_from([0, 1] * 40, [0] * 80, [0] * 80, [1] * 80, 2, 1)
    partition = make("label-shift", columns, clients=2, ratio=2, alpha=5)
    assert partition.test.tolist() == sorted(rows_tested(partition.clients).tolist())
    assert "no test split" in partition.notes[-1]


@pytest.mark.parametrize(
    ("column", "value"),
    [("domain", np.zeros(3)), ("uid", np.zeros((18, 15))), ("label", np.full(18, 3))],
)
def test_columns_that_do_not_fit_are_refused(column, value):
    corruption(lambda: replace(even_columns(4, 2, 3), **{column: value}))


def test_streams_differ_by_purpose_key_scheme_and_seed():
    names = [Streams(0, "lda"), Streams(1, "lda"), Streams(0, "flesd")]
    firsts = [
        s(*key).random()
        for s in names
        for key in (("shares",), ("rows",), ("rows", 0), ("rows", 1))
    ]
    assert len(set(firsts)) == 12
    assert Streams(0, "lda")("rows", 1).random() == firsts[3]
