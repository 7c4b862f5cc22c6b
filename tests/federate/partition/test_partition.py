"""Partitions: the laws every scheme keeps, and each scheme's own facts (numbers from the papers where printed)."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from draws import examples
from federation import rows_trained
from hypothesis import given
from hypothesis import strategies as st
from partition_rows import any_columns, attempt, columns_from, drawn_arguments, even_columns
from refusal import refused
from text_tables import rows_of

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.partition.partition import SCHEMES, InfeasibleError, make
from fedcache.federate.partition.scheme import TEST, TRAIN, make_pool
from fedcache.federate.partition.schemes import classes_per_client

CIFAR10 = even_columns(5000, 1000, 10)
DIGIT5 = even_columns(250, 120, 10, domains=5)
LEAVE_NONE = ("shards", "lda", "iid", "dirichlet")


def trained(partition):
    return rows_trained(partition.clients)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@examples(15, 200)
@given(data=st.data(), columns=any_columns(), seed=st.integers(0, 2**63 - 1))
def test_every_row_has_exactly_one_client(scheme, data, columns, seed):
    args = drawn_arguments(data.draw, scheme)
    partition = attempt(scheme.name, columns, seed=seed, **args)
    if isinstance(partition, FedcacheError):
        assert partition.code == Exit.USAGE
        assert partition.hint
        # what the message says works must not be infeasible too
        if instead := getattr(partition, "instead", {}):
            again = attempt(scheme.name, columns, seed=seed, **args | instead)
            assert not isinstance(again, InfeasibleError), f"{partition.message} -> {instead}"
        return
    rows = trained(partition)
    sharing = (
        scheme.name == "few-shot" and partition.args["sharing"] and partition.args["skew"] == "iid"
    )
    if not sharing:
        assert len(np.unique(rows)) == len(rows)
    assert all(len(client.train) and len(client.test) for client in partition.clients)

    split = columns.split
    held = np.unique(np.concatenate([rows, *(client.test for client in partition.clients)]))
    of_both = scheme.name == "natural" and (
        partition.args["rows"] == "all" or partition.args["tests"] != "global"
    )
    source = 1 if partition.args.get("pool") == "test" else 0
    pool = np.flatnonzero((columns.ok == 1) & (split == source))
    if not of_both:
        assert partition.pool == len(pool)
        assert (split[partition.test] == 1).all() or not (split == 1).any()
        assert partition.dropped == len(np.setdiff1d(pool, held))
    for client in partition.clients if partition.args.get("by") == "domain" else ():
        assert {client.name.split("/")[0]} == {
            columns.domains[d] for d in columns.domain[client.train]
        }
    keeps_all = scheme.name in LEAVE_NONE and "long_tail" not in partition.args
    if keeps_all and (columns.label >= 0).all():
        assert partition.dropped == 0
    for used in (rows, partition.test, held):
        assert (columns.ok[used] == 1).all()
        assert (split[used] != 2).all()
    assert not np.intersect1d(
        rows, np.concatenate([partition.test, *(c.test for c in partition.clients)])
    ).size
    assert make(scheme.name, columns, seed=seed, **args).digest == partition.digest


def test_a_numpy_seed_is_a_seed():
    assert make("iid", DIGIT5, seed=np.int64(3)).digest == make("iid", DIGIT5, seed=3).digest


# Feature shift


def test_feature_shift_gives_each_domain_its_first_ten_rows_of_every_class():
    # even_columns stores 370 rows of a class in one run, the first 250 for training and the other 120 for testing.
    partition = make("feature-shift", DIGIT5)
    assert [len(client.train) for client in partition.clients] == [
        100
    ] * 5  # as printed: 5 clients, 10 x 10
    assert [client.name for client in partition.clients] == list(DIGIT5.domains)
    assert partition.clients[0].train.tolist() == [
        370 * c + i for c in range(10) for i in range(10)
    ]
    assert partition.clients[1].test.tolist() == [
        3700 + 370 * c + 250 + i for c in range(10) for i in range(120)
    ]
    assert (
        partition.clients[2].train.tolist()
        == make("feature-shift", DIGIT5, seed=9).clients[2].train.tolist()
    )
    assert partition.test_protocol == "balanced"


def test_feature_shift_at_random_keeps_the_counts_and_changes_the_rows():
    stored, one, two = (
        make("feature-shift", DIGIT5, order=o, seed=s)
        for o, s in (("stored", 0), ("random", 0), ("random", 1))
    )
    assert (one.counts(DIGIT5) == stored.counts(DIGIT5)).all()
    assert len({p.clients[0].train.tobytes() for p in (stored, one, two)}) == 3


def test_a_short_class_keeps_what_exists_and_says_so():
    columns = even_columns(250, 120, 10, domains=2)
    ok = columns.ok.copy()
    ok[7:250] = 0  # 7 training rows of class 0 remain in domain 0
    partition = make("feature-shift", replace(columns, ok=ok))
    assert partition.counts(columns)[:, 0].tolist() == [7, 10]
    assert "domain 0/class 0 (7); --shots 7" in partition.notes[1]


def test_the_domain_filter_chooses_and_orders_the_clients():
    partition = make("feature-shift", DIGIT5, domain=("domain 3", "domain 1"))
    assert [client.name for client in partition.clients] == ["domain 3", "domain 1"]
    assert set(DIGIT5.domain[partition.test]) == {1, 3}
    one = make("iid", DIGIT5, clients=4, domain="domain 2")
    assert set(DIGIT5.domain[trained(one)]) == {2}
    assert one.args["domain"] == ("domain 2",)


# Label shift


@pytest.mark.parametrize(
    ("clients", "rows", "ratio"),
    [(5, 550, 11), (10, 1100, 11), (20, 1100, 5.5), (40, 1200, 3), (80, 1200, 1.5)],
)
def test_label_shift_draws_the_released_rows_per_class(clients, rows, ratio):
    # FedPCL's code draws (110 m, 11), (55 m, 5.5), (30 m, 3), (15 m, 1.5): always 10 x 10 training rows a client.
    partition = make("label-shift", CIFAR10, clients=clients, alpha=1.0)
    held = np.concatenate([np.concatenate([c.train, c.test]) for c in partition.clients])
    assert partition.args["ratio"] == ratio
    assert np.bincount(CIFAR10.label[held]).tolist() == [rows] * 10
    assert sorted(held) == [
        6000 * c + i for c in range(10) for i in range(rows)
    ]  # the first of every class
    for client in partition.clients:
        assert len(client.train) == int((len(client.train) + len(client.test)) / ratio)
    # floor() costs each client less than one row; the paper prints 498 twice, for m = 5
    assert 100 * clients - clients < len(trained(partition)) <= 100 * clients


def test_label_shift_on_the_test_split_leaves_the_rest_for_global_evaluation():
    partition = make("label-shift", CIFAR10, pool="test", test_protocol="balanced", tests=30)
    assert (CIFAR10.split[trained(partition)] == 1).all()
    assert len(partition.test) == 10_000 - len(trained(partition))
    # 550 of the 1000 test rows of a class are drawn; a balanced test has the next 30 of each
    assert partition.clients[3].test.tolist() == [
        6000 * c + 5550 + i for c in range(10) for i in range(30)
    ]


def test_a_small_pool_keeps_ratio_and_clients_and_says_what_each_has():
    # 250 of the 550 rows exist: 10 x 250 / 11 / 5 = 45.45 training rows a client, less what floor() takes
    partition = make("label-shift", DIGIT5, domain="domain 1")
    mean = len(trained(partition)) / 5
    assert 44.4 < mean <= 45.45
    assert partition.args["ratio"] == 11
    (note,) = partition.notes
    assert f"{mean:.1f} training rows per client instead of 100; --shots 4" in note


# Feature and label shift


@pytest.mark.parametrize(
    ("clients", "shots", "printed"), [(5, 10, 472), (4, 10, 375), (6, 20, 1168)]
)
def test_both_shifts_deal_almost_all_rows(clients, shots, printed):
    # floor() takes less than one row for each client and class, and half a row on average
    asked = clients * shots * 10
    cells = clients * 10
    columns = even_columns(clients * shots, 5, 10, domains=clients)  # no domain can run out
    totals = [
        len(trained(make("feature-label-shift", columns, shots=shots, seed=s))) for s in range(60)
    ]
    assert asked - cells < printed <= asked
    assert all(asked - cells < total <= asked for total in totals)
    assert asked - np.mean(totals) == pytest.approx(cells / 2, rel=0.15)


def test_both_shifts_take_the_first_rows_and_what_a_domain_has():
    columns = even_columns(12, 5, 3, domains=2)
    partition = make("feature-label-shift", columns, alpha=0.2, shots=10, seed=4)
    for place, client in enumerate(partition.clients):
        counts = np.bincount(columns.label[client.train], minlength=3)
        assert counts.max() <= 12
        assert client.train.tolist() == [
            51 * place + 17 * c + i for c in range(3) for i in range(counts[c])
        ]
    assert partition.counts(columns).max() == 12  # alpha 0.2 asks for up to 20


def test_both_shifts_test_on_balanced_or_matched_rows_of_the_own_domain():
    balanced = make("feature-label-shift", DIGIT5)
    own = make("feature-label-shift", DIGIT5, test_protocol="matched")
    assert (balanced.counts(DIGIT5) == own.counts(DIGIT5)).all()
    for place, (a, b) in enumerate(zip(balanced.clients, own.clients, strict=True)):
        assert np.bincount(DIGIT5.label[a.test]).tolist() == [100] * 10
        assert set(DIGIT5.domain[b.test]) == {place}


# Matched tests


def test_a_client_without_matching_tests_is_refused():
    label = [0, 0, 1, 1, 0]
    # class 1 has no test row
    columns = columns_from(label, [0] * 5, [0, 0, 0, 0, 1], [1] * 5, 2, 1)
    refused(
        lambda: make("shards", columns, clients=2, shards=1, test_protocol="matched"),
        "no test row has a class of client 'client-",
    )
    assert make("shards", columns, clients=2, shards=1).test.tolist() == [4]


# Shards


def test_two_shards_of_cifar10_are_250_rows_each():
    counts = make("shards", CIFAR10, clients=100, shards=2).counts(CIFAR10)
    assert set(np.unique(counts)) == {0, 250, 500}
    assert (counts.sum(axis=1) == 500).all()


@examples(15, 200)
@given(clients=st.integers(1, 12), shards=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_client_has_at_most_s_classes(clients, shards, seed):
    columns = even_columns(23, 1, 7)
    if clients * shards < 7:
        shards = 7
    partition = make("shards", columns, clients=clients, shards=shards, seed=seed)
    counts = partition.counts(columns)
    assert ((counts > 0).sum(axis=1) <= shards).all()
    assert partition.dropped == 0
    # 12 clients of 6 shards: 72 shards over 7 classes are 10 or 11 of 23 rows, so 2 or 3 rows each
    assert counts.sum(axis=1).max() <= shards * -(-23 // (clients * shards // 7))


# iid


def test_iid_deals_the_remainder_one_by_one():
    # 2,500 rows x 5 domains = 12,500 = 7 x 1785 + 5
    sizes = [len(client.train) for client in make("iid", DIGIT5, clients=7).clients]
    assert sizes == [1786] * 5 + [1785] * 2


def test_iid_needs_no_labels_and_the_others_name_it():
    columns = columns_from([-1] * 30, [0] * 30, [0] * 20 + [1] * 10, [1] * 30, 3, 1)
    assert len(trained(make("iid", columns, clients=4))) == 20
    for name, scheme in SCHEMES.items():
        if scheme.needs_labels:
            refused(partial(make, name, columns), "20 training rows", "--scheme iid")


# Few shot


@pytest.mark.parametrize(
    ("classes", "clients", "shares"),
    rows_of(
        """
        10  | 5  | 2 2 2 2 2
        10  | 3  | 3 3 4
        10  | 6  | 2 2 2 2 1 1
        101 | 10 | 10 10 10 10 10 10 10 10 10 11
        """
    ),
)
def test_classes_per_client(classes, clients, shares):
    # round(3.33) = 3, and the last takes the rest; round(1.67) = 2 five times would leave the last with none
    assert classes_per_client(int(classes), int(clients)) == [int(n) for n in shares.split()]


def test_few_shot_disjoint_gives_each_class_to_one_client():
    counts = make("few-shot", CIFAR10, clients=4, shots=4).counts(CIFAR10)
    assert set(np.unique(counts)) == {0, 4}
    assert ((counts > 0).sum(axis=0) == 1).all()
    assert (counts > 0).sum(axis=1).tolist() == [3, 3, 3, 1]


def test_clients_share_images_only_when_asked_to():
    columns = even_columns(8, 2, 3)
    error = refused(lambda: make("few-shot", columns, clients=5, shots=4, skew="iid"))
    assert error.instead == {"shots": 1}  # 5 x 1 <= 8 < 5 x 2
    partition = make("few-shot", columns, clients=5, shots=4, skew="iid", sharing=True)
    assert (partition.counts(columns) == 4).all()
    assert len(np.unique(trained(partition))) < 60
    assert "clients may have the same image (sharing)" in partition.notes


def test_few_shot_in_dirichlet_shares_deals_at_most_what_was_asked():
    partition = make("few-shot", CIFAR10, clients=5, shots=16, skew="dirichlet", alpha=1.0)
    per_class = partition.counts(CIFAR10).sum(axis=0)
    assert (per_class <= 80).all()
    assert (per_class > 75).all()  # floor() takes less than one row for each of 5 clients


# What a partition says of itself


@pytest.mark.parametrize("scheme", LEAVE_NONE)
def test_a_long_tail_leaves_exponentially_fewer_rows_of_later_classes(scheme):
    columns = even_columns(1000, 10, 4)
    partition = make(scheme, columns, clients=2, long_tail=1000)
    assert partition.counts(columns).sum(0).tolist() == [1000, 100, 10, 1]
    other = make(scheme, columns, clients=2, long_tail=1000, seed=1)
    assert set(trained(other)) != set(trained(partition))
    assert (
        make(scheme, columns, clients=2, long_tail=1).digest
        == make(scheme, columns, clients=2).digest
    )
    refused(lambda: make(scheme, columns, clients=2, long_tail=0.5), "a number from 1")


def test_a_long_tail_keeps_all_rows_of_a_class_that_is_small_already():
    label = np.repeat([0, 1, 2, 0, 1, 2], [8, 64, 2, 1, 1, 1])
    split = np.arange(len(label)) >= 8 + 64 + 2
    columns = columns_from(label, 0 * label, split, 0 * label + 1, 3, 1)
    partition = make("iid", columns, clients=2, long_tail=4)
    assert partition.counts(columns).sum(0).tolist() == [8, 32, 2]


def test_names_show_what_is_not_the_default():
    assert (
        make("dirichlet", CIFAR10, clients=100, alpha=0.1).default_name()
        == "dirichlet-a0.1-m100-s0"
    )
    assert make("label-shift", CIFAR10).default_name() == "label-shift-a1-m5-n10-s0"
    gated = make("lda", CIFAR10, clients=10, gate=False, test_protocol="matched", domain="domain 0")
    assert gated.default_name() == "lda-a0.1-ddomain_0-g0-m10-tmatched-s0"


def test_an_image_in_train_and_test_is_noted():
    columns = even_columns(4, 2, 3)
    uid = columns.uid.copy()
    uid[[4, 5]] = uid[[0, 1]]  # the test rows of class 0 repeat two of its training rows
    (note,) = make("iid", replace(columns, uid=uid), clients=2).notes
    assert note.startswith("2 of 6 test rows")
    assert make("iid", columns, clients=2).notes == ()


def test_test_rows_without_a_label_are_in_no_pool():
    columns = even_columns(2, 2, classes=3)
    label = columns.label.copy()
    unknown = np.flatnonzero(columns.split == TEST)[:2]
    label[unknown] = -1
    pool = make_pool(
        replace(columns, label=label), None, split=TRAIN, needs_labels=False, scheme="iid"
    )
    assert not np.isin(unknown, pool.test).any()
    assert len(pool.test) == 4
    assert any("2 test rows without a label are left out" in note for note in pool.notes)
