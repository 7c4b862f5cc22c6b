"""What a number of rows may give a client: caps on shares, warnings, and rules that give every client one vote."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import difference, federation, go, go_all, server_gap
from hypothesis import given
from hypothesis import strategies as st
from refusal import training_error
from setting_lines import set_to
from test_update_validation import sending
from text_tables import rows_of

from fedcache.federate.methods import METHODS
from fedcache.federate.trust.pipeline import capped_weights, parse_policy, weight_warnings
from fedcache.federate.trust.privacy import Privacy

rows = st.lists(
    st.one_of(st.integers(0, 1000), st.sampled_from([10**9, 2**63])).map(float),
    min_size=1,
    max_size=30,
)


@pytest.mark.cases(100)
@given(rows=rows, share=st.floats(0.01, 1.0))
def test_no_client_weighs_more_than_its_share_and_no_weight_is_cut_further_than_needed(rows, share):
    weights = capped_weights(rows, share)
    some = np.count_nonzero(rows)
    total = sum(weights)
    assert all(0.0 <= w <= n for w, n in zip(weights, rows, strict=True))
    assert max(weights) <= max(share, 1 / max(1, some)) * total * (1 + 1e-9)
    cut = [w for w, n in zip(weights, rows, strict=True) if w < n]
    if cut and share * some > 1:
        # what is cut has all of the share it may have
        assert min(cut) == pytest.approx(share * total, rel=1e-9)
    largest = max(cut, default=0.0)
    assert all(w == n for w, n in zip(weights, rows, strict=True) if n < largest)


def numbers(cell):
    return [float(word) for word in cell.split()]


def test_shares_by_hand():
    # t = 0.25 (t + 300), of 1000 rows and three times 100; three clients cannot have a fifth each
    for row in rows_of(
        """
        1000 100 100 100 | 0.25 | 100 100 100 100
        1000 100 100 100 | 0.4  | 200 100 100 100
        1000 500 60 40   | 0.4  | 200 200 60 40
        3 9 5            | 0.2  | 3 3 3
        3 2              | 1.0  | 3 2
        0 0              | 0.5  | 0 0
        """
    ):
        weights, share, wanted = map(numbers, row)
        assert capped_weights(weights, *share) == pytest.approx(wanted)


LIAR = 3


def federated(claim, **how):
    """Six equal clients; one holds many copies of its rows."""
    data, clients = federation(sizes=(30,) * 6, **how)
    client = clients[LIAR]
    return data, [
        replace(c, train=np.resize(client.train, claim)) if i == LIAR else c
        for i, c in enumerate(clients)
    ]


@pytest.mark.parametrize("name", ["fed3r", "fedncm", "fedcgs", "fedavg", "fedproto"])
def test_a_capped_client_counts_as_if_it_had_so_many_rows(name):
    # Its 150 rows are 30 rows five times, and a sixth of the weight of six clients is that of 30. What is trained is
    # trained on all rows at once, so that a step is on the same mean.
    trained = name in ("fedavg", "fedproto")
    settings = set_to("opt=sgd lr=0.1 batch=1000 epochs=1 bn=false") if trained else {}
    how = {"participation": None, "rounds": 2 if trained else 1}
    plain = go(name, settings, *federated(30), **how)
    for bad in (None, "reject"):
        policy = parse_policy(max_share=1 / 6, on_bad_update=bad)
        capped = go(name, settings, *federated(150), trust=policy, **how)
        assert server_gap(plain, capped) < 1e-9


@pytest.mark.parametrize("name", ["fed3r", "fedavg"])
@pytest.mark.parametrize(
    "rule", ["clip:5", "median", "trimmed:0.2", "geomedian", "multikrum", "nnm+median"]
)
def test_rows_that_are_the_same_five_times_give_no_more_than_one_vote(name, rule):
    # A batch of all rows, so that a step is on the same mean; and statistics per row are equal.
    settings = set_to("opt=sgd lr=0.1 batch=1000 epochs=1 head=linear") if name == "fedavg" else {}
    how = {"participation": None, "trust": parse_policy(rule), "rounds": 1}
    once, five = (go(name, settings, *federated(n), **how) for n in (30, 150))
    assert server_gap(once, five) < 1e-8


def test_a_plain_mean_warns_of_a_client_that_is_most_of_it_and_a_rule_does_not():
    (said,) = [w for w in go_all("fedncm", {}, *federated(3000)).warnings if "rows" in w]
    assert "client 3 ('client-3') has 3,000 rows" in said
    assert not go_all("fedncm", {}, *federated(3000), trust=parse_policy("median")).warnings
    assert not go_all("fedncm", {}, *federated(31)).warnings


@pytest.mark.parametrize(
    ("share", "warned", "rows"),
    rows_of(
        """
        0.2 | 5 4   | 21 50 9 20
            |       | 50 10 10 30
            | 6     | 10 10 51 29
            |       | 10 100 10 10 10 10 10 10 10 10 10 10 10
            | 5     | 10 101 10 10 10 10 10 10 10 10 10 10 10
            |       | 1 99
            | 4 5 6 | 99 99 99 99 99 99 99 99 99 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
        """
    ),
)
def test_the_clients_that_are_warned_of_by_hand(share, warned, rows):
    # In the first the last has a fifth and no more; in the second one has half of 100 and no more. Ten times a median
    # of 10 is 100. Of two nobody can say which is wrong, and three are named at most.
    of = np.array(numbers(rows))
    names = {c: f"c{c}" for c in range(4, 44)}
    said = weight_warnings(names, np.arange(4, 4 + len(of)), of, float(share) if share else None)
    wanted = [f"client {c} ('c{c}')" for c in warned.split()]
    assert [w.partition(" has")[0] for w in said] == wanted
    assert all("--max-share" in w for w in said)


def test_a_client_with_more_rows_than_are_allowed_takes_no_part():
    data, clients = federated(3000)
    without = [replace(c, train=c.train[:0]) if i == LIAR else c for i, c in enumerate(clients)]
    out = go_all("fedavg", {}, data, clients, trust=parse_policy(max_rows_per_client=100))
    assert difference(out, go_all("fedavg", {}, data, without)) == 0.0
    assert any("--max-rows-per-client 100" in w and "client-3" in w for w in out.warnings)
    training_error(
        lambda: go("fedavg", {}, data, clients, trust=parse_policy(max_rows_per_client=1))
    )


def test_counts_are_voted_on_like_the_sums_they_belong_to():
    """A client that says all its rows are of class 0, and that they are 10^6: the sum of counts would be its own."""
    data, clients = federated(10**6, per_client=6)
    method = METHODS["fedncm"]
    seen = []

    def lie(up, _down, _data, ctx):
        if LIAR in ctx.ids:
            up = {name: torch.zeros_like(t) for name, t in up.items()}
            up["sum"][0] = 1.0
            up["count"][0] = 1e6
        return up

    def aggregate(server, up, ctx):
        seen.append(up)
        return method.aggregate(server, up, ctx)

    lied = replace(sending(method, lie), aggregate=aggregate)
    go_all(lied, {}, data, clients, execution="sequential", trust=parse_policy("median"))
    honest = [
        np.bincount(data.y.numpy()[c.train], minlength=6)
        for i, c in enumerate(clients)
        if i != LIAR
    ]
    counts = seen[0]["count"].numpy()
    assert (counts <= 6 * np.max(honest, 0)).all()
    assert (counts >= 0.5 * 6 * np.min(honest, 0)).all()


def test_a_private_run_names_nobody_it_skips():
    data, clients = federated(3000)
    clients[1] = replace(clients[1], train=clients[1].train[:0])
    private = Privacy(1.0, 1.0, allow=("evaluation",))
    plain = "bn=false"
    out = go("fedavg", plain, data, clients, participation=0.5, trust=parse_policy(privacy=private))
    told = " ".join(out.warnings)
    assert "client-" not in told
    assert not any(character.isdigit() for character in told)
    # What is sent is told as that of half of all six clients, whoever of them can train.
    upload = sum(t.numel() for t in out.server.values())
    assert [r.up for r in out.traffic.rounds] == [3 * upload] * len(out.traffic.rounds)
    assert [r.clients for r in out.traffic.rounds] == [3] * len(out.traffic.rounds)
