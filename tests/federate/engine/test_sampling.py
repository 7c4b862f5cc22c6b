"""Who takes part in a round, and whose model is scored, as laws of the draws."""

import hashlib

import numpy as np
import pytest
from federation import federation, go, server_gap
from refusal import refused

from fedcache.federate.engine.sampling import (
    ClientSampler,
    SamplingRule,
    parse_clusters,
    parse_sampling,
    read_trace,
)
from fedcache.federate.engine.simulated_time import parse_timing
from fedcache.federate.partition.client_table import Client
from fedcache.federate.trust.pipeline import parse_policy


def test_only_the_drawn_clients_are_scored_and_the_same_in_every_round():
    everybody = go("fedrep", eval_every=1).client_accuracy
    rounds = [go("fedrep", rounds=r, eval_clients=0.5).client_accuracy for r in (1, 2, 3)]
    scored = [np.flatnonzero(~np.isnan(r)).tolist() for r in rounds]
    assert scored[0] == scored[1] == scored[2]
    assert len(scored[0]) == 4  # round(0.5 x 9)
    assert np.array_equal(rounds[2][scored[0]], everybody[scored[0]])
    assert np.isfinite(go("fedavg", eval_clients=2).client_accuracy).all()  # one model for all


ROWS = np.array([1.0, 2.0, 3.0, 4.0])


def drawn(rule, rounds, participation=2):
    sampler = ClientSampler(list("abcd"), np.arange(4), 5, ROWS, rule)
    return [sampler.drawn(r, participation) for r in range(rounds)]


def test_weighted_draws_go_by_rows_without_replacement():
    """P(client 3 first) = 0.4; P(it is among two) = 0.4 + sum over the others of p (0.4 / (1 - p))."""
    found = drawn(SamplingRule("weighted"), 4000)
    assert all(len(set(r)) == 2 for r in found)
    p = ROWS / ROWS.sum()
    for client in range(4):
        likely = p[client] + sum(p[o] * p[client] / (1 - p[o]) for o in range(4) if o != client)
        share = np.mean([client in r for r in found])
        assert abs(share - likely) < 5 * (likely * (1 - likely) / 4000) ** 0.5
    assert drawn(SamplingRule("weighted"), 3, participation=9) == [[0, 1, 2, 3]] * 3


def test_only_clients_that_are_there_are_drawn(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,first,last\nb,1,2\nd,2,3\nb,4,4\n\n")
    rule = parse_sampling("uniform", str(trace), 0.0)
    assert drawn(rule, 5) == [[1], [1, 3], [3], [1], []]
    assert rule.words() == {
        "availability": f"sha256:{hashlib.sha256(trace.read_bytes()).hexdigest()}"
    }
    found = drawn(parse_sampling("uniform", "0.25", 0.0), 4000, participation=4)
    assert abs(np.mean([len(r) for r in found]) - 1.0) < 5 * (4 * 0.25 * 0.75 / 4000) ** 0.5
    refused(lambda: ClientSampler(["a"], np.arange(1), 0, ROWS, rule), "'b'")


READERS = {
    "trace": read_trace,
    "durations": lambda path: parse_timing(None, 1.0, 0.5, str(path)),
    "clusters": lambda path: parse_clusters(str(path), 1),
}


@pytest.mark.parametrize(
    ("what", "text", "why"),
    [
        ("trace", b"", "client,first,last"),
        ("trace", b"client,first,last\n", "for any client"),
        ("trace", b"client,first,last\na,1,2\na,3,2\n", "line 3"),
        ("trace", b"client,first,last\na,0,2\n", "line 2"),
        ("trace", b"client,first,last\n\xff,1,2\n", "CSV"),
        ("durations", b"client,seconds\n", "client,duration"),
        ("durations", b"client,duration\na,1\nb,0\n", "line 3"),
        ("durations", b"client,duration\na,1\na,2\n", "line 3"),
        ("clusters", b"client,site\n", "client,cluster"),
        ("clusters", b"client,cluster\na,x\nb, \n", "line 3"),
        ("clusters", b"client,cluster\na,x\na,y\n", "line 3"),
    ],
)
def test_a_file_about_clients_that_is_none_is_refused_by_line(tmp_path, what, text, why):
    path = tmp_path / f"{what}.csv"
    path.write_bytes(text)
    refused(lambda: READERS[what](path), why)


@pytest.mark.parametrize(
    ("method", "execution"), [("fedavg", "sequential"), ("fedrep", "batched"), ("fed3r", "batched")]
)
def test_who_drops_out_gets_the_broadcast_sends_nothing_and_changes_nothing(method, execution):
    """The run is that of the clients whose uploads arrive, and its traffic has the broadcasts that led to nothing."""
    data, clients = federation()
    one = {"rounds": 1, "participation": None, "execution": execution}
    settings = {} if method == "fed3r" else {"bn": False}  # else a client of one row rests
    with_loss = go(method, settings, sampling=SamplingRule(dropout=0.5), **one)
    lost = np.setdiff1d(range(9), with_loss.records[0].clients)
    assert 0 < len(lost) < 9
    kept = [
        Client(c.name, c.train[:0] if i in lost else c.train, c.test) for i, c in enumerate(clients)
    ]
    assert server_gap(with_loss, go(method, settings, data, kept, **one)) == 0.0
    assert all(with_loss.traffic.up[lost] == 0)
    whole = go(method, settings, **one).traffic
    assert with_loss.traffic.down.tolist() == whole.down.tolist()
    assert not set(with_loss.states) & set(lost)
    # By client that sent, and by client that was sent to.
    assert with_loss.traffic.per_client_round() == whole.per_client_round()
    assert with_loss.traffic.rounds[0].to_dict()["receivers"] == 9


@pytest.mark.parametrize("trust", [parse_policy(), parse_policy("median")])
@pytest.mark.parametrize("execution", ["sequential", "batched"])
def test_a_round_without_uploads_changes_nothing(execution, trust):
    rule = SamplingRule(available=1e-9)
    late = go("fedavg", "init=shared", rounds=1, sampling=rule, execution=execution, trust=trust)
    begun = go("fedavg", "init=shared epochs=0", rounds=1, execution=execution)
    assert server_gap(late, begun) < 1e-12
    assert late.records[0].clients == ()
    assert late.traffic.totals()["up"] == late.traffic.totals()["down"] == 0
    assert "no upload" in late.warnings[-1]


def test_a_trace_that_leaves_clients_out_says_how_many_it_has(tmp_path):
    trace = tmp_path / "trace.csv"
    for named, warnings in ((range(9), 0), ((1, 4), 1)):
        trace.write_text("client,first,last\n" + "".join(f"client-{i},1,5\n" for i in named))
        rule = parse_sampling("uniform", str(trace), 0.0)
        assert len(go("fedavg", "bn=false", rounds=1, sampling=rule).warnings) == warnings


def test_a_share_of_less_than_half_a_client_is_one_and_says_so():
    out = go("fedavg", "bn=false", rounds=1, participation=0.01)
    assert len(out.records[0].clients) == 1
    assert "0.01" in out.warnings[0]
    assert not go("fedavg", "bn=false", rounds=1, participation=0.06).warnings


def test_a_run_that_goes_on_computes_as_many_clients_at_once():
    """As many as the first round has, though another may have fewer: the number is part of the result."""
    saved = {}
    how = {"sampling": SamplingRule(available=0.5), "rounds": 6, "execution": "batched"}
    whole = go("fedavg", on_round=lambda r, _m, _t, snap: saved.update({r: snap()}), **how)
    assert len({len(r.clients) for r in whole.records}) > 1, "rounds differ"
    assert {go("fedavg", state=snap, **how).chunk for snap in saved.values()} == {whole.chunk}
