"""Simulated time and asynchronous rounds (FedBuff), as laws: over all methods that take them, and by hand."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import examples, one_of_each
from federation import (
    VARIANTS,
    cases,
    difference,
    go_tiny,
    keeps,
    tiny,
    trial_of_case,
    wide,
)
from float64 import doubles
from hypothesis import given
from hypothesis import strategies as st
from methods_tried import tried
from pairs import parametrize, served
from refusal import refused
from setting_lines import set_to

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.method import Defaults, Method, whole_server
from fedcache.federate.engine.run import RunCallbacks, TrainingRun, run
from fedcache.federate.engine.sampling import ClientSampler, SamplingRule
from fedcache.federate.engine.simulated_time import (
    DURATIONS,
    EQUAL,
    Schedule,
    TimingRule,
    parse_timing,
    why_not_asynchronous,
)
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.client_table import Client, NumberedNames
from fedcache.testing.method_laws import METHOD_LAWS, Trial

pytest_generate_tests = parametrize


def takes_it(name):
    return why_not_asynchronous(METHODS[name], METHODS[name].resolve()) is None


ALL = [case for case in tried(cases() + VARIANTS) if takes_it(case[0])]
EACH = one_of_each(ALL)
EXECUTIONS = ["sequential", "batched", "gram"]


def pair_for(execution):
    return wide() if execution == "gram" else tiny(views=4)


@served(EACH, EXECUTIONS, in_turn=True)
def test_equal_durations_and_a_buffer_of_all_in_training_are_rounds_to_the_bit(case, execution):
    pair = pair_for(execution)
    timing = TimingRule(EQUAL, buffer=3)
    rounds, steps = (go_tiny(*case, *pair, execution=execution, timing=t) for t in (None, timing))
    assert difference(rounds, steps) == 0.0
    assert steps.traffic == rounds.traffic
    assert [r.clients for r in steps.records] == [r.clients for r in rounds.records]
    assert [r.diagnostics["simulated_time"] for r in steps.records] == [1.0, 2.0]
    assert all(r.diagnostics["staleness_max"] == 0.0 for r in steps.records)


class Stale(Trial):
    """A trial with stale updates: two fill the buffer, of three clients in training."""

    def run(self, pair, **how):
        out = super().run(pair, **{"timing": TimingRule(buffer=2), "rounds": 5, **how})
        assert max(record.diagnostics["staleness_max"] for record in out.records) > 0
        return out


def keeps_when_stale(law, case, execution):
    """Try a law of all methods on a case whose updates are stale."""
    settings = trial_of_case(case, execution).settings
    METHOD_LAWS[law].holds(Stale(METHODS[case[0]], execution, settings))


@served(EACH, ["batched", "gram"])
def test_executions_agree_on_stale_updates(case, execution):
    keeps_when_stale("executions_agree", case, execution)


@served(EACH, EXECUTIONS, in_turn=True)
def test_a_run_that_goes_on_with_clients_in_training_has_the_same_bits(case, execution):
    keeps_when_stale("a_resumed_run_has_the_same_bits", case, execution)


def test_a_snapshot_has_the_models_that_clients_in_training_began_with():
    saved = []
    go_tiny("fedavg", rounds=5, timing=TimingRule(buffer=2), on_round=keeps(saved))
    assert any(key.startswith("version/") for snap in saved for key in snap.tensors)


@served(EACH, ["sequential"])
def test_the_order_of_clients_does_not_matter_in_simulated_time(case, execution):
    keeps_when_stale("the_order_of_clients_does_not_matter", case, execution)


def add(down, _state, data, _ctx):
    """y = 2 w + d, where d is the client's feature: the update y - w = w + d tells which w it was made from."""
    return {}, {"w": 2.0 * down["w"] + data.x[data.rows].mean()}


TOY = Method(
    name="toy",
    paper="",
    summary="",
    hparams=(),
    defaults=Defaults(1, None, 2, "iid"),
    paper_count=None,
    init=lambda ctx: {"w": torch.zeros(1, dtype=ctx.env.dtype)},
    fit=add,
    uploads=whole_server,
    predict=lambda _down, _own, _data, x, _ctx: x,
    executions=("sequential",),
)


def toy(features, durations, **rule):
    """The run of clients a, b, ... with so many rows each of one feature, which take so long; w after each step."""
    x = doubles([d for rows, d in features for _ in range(rows)]).view(-1, 1, 1)
    start = np.cumsum([0, *(rows for rows, _ in features)])
    names = tuple("abc"[: len(features)])
    clients = [
        Client(name, np.arange(*start[i : i + 2]), np.array([0])) for i, name in enumerate(names)
    ]
    steps = []
    timing = TimingRule("by hand", names, durations, **{"buffer": 1, **rule})
    spec = TrainingRun(
        TOY,
        Data(x, torch.zeros(len(x), dtype=torch.int64), 1),
        clients,
        4,
        dtype=torch.float64,
        timing=timing,
        execution="sequential",
        eval_every=4,
    )
    calls = RunCallbacks(
        on_round=lambda _g, _r, _m, _t, snap: steps.append(float(snap().tensors["server/w"]))
    )
    return run(spec, {}, callbacks=calls), steps


TWO = ([(1, 1.0), (3, 8.0)], (1.0, 2.5))


def test_two_clients_by_hand():
    # a adds 1 and takes 1, b adds 8 and takes 2.5; K = 1. An update is w + d of the w that the client began with.
    #   t = 1    a, from w0 = 0, is fresh:                 w1 = 0 + (0 + 1) = 1
    #   t = 2    a, from w1 = 1, is fresh:                 w2 = 1 + (1 + 1) = 3
    #   t = 2.5  b, from w0 = 0, is two steps old:         w3 = 3 + (0 + 8) / sqrt(3)
    #   t = 3    a, from w2 = 3, is one step old:          w4 = w3 + (3 + 1) / sqrt(2)
    out, steps = toy(*TWO)
    w3 = 3.0 + 8.0 / math.sqrt(3.0)
    assert steps == pytest.approx([1.0, 3.0, w3, w3 + 4.0 / math.sqrt(2.0)], abs=1e-14)
    # Broadcasts: two at 0, a's at 1, 2 and b's at 2.5; whoever is in training at the end has got one too.
    for record, clients, time, staleness, down in zip(
        out.records,
        (0, 0, 1, 0),
        (1.0, 2.0, 2.5, 3.0),
        (0.0, 0.0, 2.0, 1.0),
        (2, 1, 1, 1),
        strict=True,
    ):
        assert record.clients == (clients,)
        assert record.diagnostics["simulated_time"] == time
        assert record.diagnostics["staleness_max"] == staleness
        assert record.traffic.down == down
        assert record.traffic.up == 1
    assert toy(*TWO, power=0.0)[1] == [1.0, 3.0, 11.0, 15.0]
    # Half the step: 0.5; 0.5 + (0.5 + 1) / 2 = 1.25; 1.25 + 4 / sqrt(3); and (1.25 + 1) / 2 / sqrt(2) on top.
    w3 = 1.25 + 4.0 / math.sqrt(3.0)
    expected = [0.5, 1.25, w3, w3 + 1.125 / math.sqrt(2.0)]
    assert toy(*TWO, step=0.5)[1] == pytest.approx(expected, abs=1e-14)


def test_updates_of_different_ages_share_a_buffer_by_their_rows():
    # a and b have 1 row and take 1, c has 2 rows and takes 3; they add 1, 2 and 4; K = 2.
    #   t = 1  a and b are fresh:  w1 = (1 + 2) / 2 = 1.5
    #   t = 2  a and b are fresh:  w2 = 1.5 + (1.5 + 1 + 1.5 + 2) / 2 = 4.5
    #   t = 3  c began first, two steps ago, and weighs 2/3; a is fresh and weighs 1/3:
    #          w3 = 4.5 + 2/3 (0 + 4) / sqrt(3) + 1/3 (4.5 + 1)
    #   t = 4  b arrived at 3 with w2 and waited, one step old; a, with w3, is fresh; each weighs 1/2:
    #          w4 = w3 + 1/2 (4.5 + 2) / sqrt(2) + 1/2 (w3 + 1)
    out, steps = toy([(1, 1.0), (1, 2.0), (2, 4.0)], (1.0, 1.0, 3.0), buffer=2)
    w3 = 4.5 + 8.0 / 3.0 / math.sqrt(3.0) + 5.5 / 3.0
    w4 = w3 + 3.25 / math.sqrt(2.0) + (w3 + 1.0) / 2.0
    assert steps == pytest.approx([1.5, 4.5, w3, w4], abs=1e-14)
    assert [r.clients for r in out.records] == [(0, 1), (0, 1), (0, 2), (0, 1)]
    assert [r.diagnostics["staleness_mean"] for r in out.records] == [0.0, 0.0, 1.0, 0.5]


DRAWS = [
    SamplingRule(),
    SamplingRule("weighted"),
    SamplingRule(dropout=0.4),
    SamplingRule(available=0.6),
]


@examples(200, 2000)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from(DURATIONS),
    st.sampled_from(DRAWS),
    st.integers(0, 9),
)
def test_what_a_schedule_keeps(clients, concurrency, buffer, durations, sampling, seed):
    names = NumberedNames(clients)
    rows = np.arange(1.0, clients + 1)
    sampler = ClientSampler(names, np.arange(clients), seed, rows, sampling)
    rule = TimingRule(durations, buffer=buffer)
    schedule = Schedule(
        rule, sampler, min(concurrency, clients), rule.of_clients(names, rows, seed)
    )
    begun = Counter()
    ended = Counter()
    clock = 0.0
    for round_ in range(8):
        arrived, began = schedule.fill_buffer(round_)
        assert len(arrived) <= buffer
        assert schedule.clock >= clock
        clock = schedule.clock
        if sampling.available == 1.0 and sampling.dropout == 0.0:
            assert len(arrived) == min(buffer, clients)
            assert len(began) == len(set(began))  # nobody begins twice with one model
        begun.update((c, round_) for c in began)
        ended.update(arrived.items())
        in_training = [one.client for one in schedule._heap]
        assert len(in_training) == len(set(in_training)) <= min(concurrency, clients)
        # every update is of a client that began, with that model, and comes once
        assert not ended - begun


def test_who_drops_out_frees_its_place_and_is_never_in_a_buffer():
    out = go_tiny(
        "fedavg",
        "opt=sgd bn=false",
        rounds=12,
        timing=TimingRule(buffer=2),
        sampling=SamplingRule(dropout=0.5),
    )
    assert all(len(r.clients) == 2 for r in out.records)
    received, sent = (sum(getattr(r.traffic, k) for r in out.records) for k in ("down", "up"))
    assert received > 1.3 * sent  # a broadcast for everyone who began
    each = out.traffic.per_client_round()
    assert each["up"] == each["down"]
    never = SamplingRule(available=1e-9)
    nobody = go_tiny("fedavg", "opt=sgd", timing=TimingRule(buffer=2), sampling=never)
    assert [(r.clients, r.diagnostics) for r in nobody.records] == [
        ((), {"simulated_time": 0.0})
    ] * 2


def test_a_round_that_waits_takes_as_long_as_its_slowest_client():
    _, clients = tiny()
    timing = TimingRule("by hand", tuple(c.name for c in clients), (1.0, 2.0, 3.0, 4.5))
    plain = go_tiny("fedavg", timing=None)
    timed = go_tiny("fedavg", timing=timing)
    assert difference(plain, timed) == 0.0
    assert timed.traffic == plain.traffic
    ends = np.cumsum([max(timing.given[c] for c in r.clients) for r in timed.records]).tolist()
    assert [r.diagnostics for r in timed.records] == [{"simulated_time": end} for end in ends]


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_variances_of_batchnorm_stay_variances(name):
    words = set_to("bn=true batch=4 opt=sgd lr=0.5 dim=5")
    out = go_tiny(name, words, rounds=30, timing=TimingRule(buffer=1, power=0.0))
    assert float(out.server["P.var"].min()) > 0.0
    refused(lambda: go_tiny(name, words, timing=TimingRule(buffer=1, step=1.5)), "--server-step")


def test_uploads_that_are_no_updates_of_the_broadcast_are_refused():
    odd = replace(TOY, fit=lambda down, state, data, ctx: ({}, {"v": down["w"]}), uploads=None)
    x = Data(torch.ones(2, 1, 1), torch.zeros(2, dtype=torch.int64), 1)
    spec = TrainingRun(
        odd, x, [Client("a", np.arange(2), np.array([0]))], timing=TimingRule(buffer=1)
    )
    refused(lambda: run(spec, {}), "--asynchronous")


def test_a_file_of_durations_names_the_clients_that_train(tmp_path):
    path = tmp_path / "durations.csv"
    path.write_text("client,duration\n b ,2.5\na,1\n")
    rule = parse_timing(2, 1.0, 0.5, str(path))
    assert rule.of_clients("ab", np.ones(2), 0)([0, 1], 7) == [1.0, 2.5]
    assert rule.words()["client_durations"].startswith("sha256:")
    refused(lambda: rule.of_clients("abc", np.ones(3), 0), "'c'")
    assert rule.of_clients("abc", np.array([1.0, 1.0, 0.0]), 0)([1], 0) == [2.5]  # c cannot train
    by_rows = TimingRule("rows").of_clients("abc", np.array([1.0, 2.0, 3.0]), 0)
    assert by_rows([0, 2], 4) == [0.5, 1.5]


def test_half_normal_durations_are_those_of_a_client_and_a_round():
    last = TimingRule().of_clients(NumberedNames(4000), np.ones(4000), 3)
    drawn = np.array(last(range(4000), 0))
    assert abs(drawn.mean() - math.sqrt(2 / math.pi)) < 5 * math.sqrt((1 - 2 / math.pi) / 4000)
    assert last([7, 5], 0) == [drawn[7], drawn[5]]
    assert last([7], 1) != [drawn[7]]


def test_the_draws_of_a_step_are_numbered_and_no_client_of_its_buffer_begins_again():
    # Two at a time of six, K = 3; client c takes 1 + c, and the first that is free begins.
    #   t = 0  0 (until 1) and 1 (until 2) begin;  t = 1  0 arrives, 2 (until 4) begins;  t = 2  1 arrives, 3 (until 6)
    #   begins;  t = 4  2 arrives, the first step;  0 (until 5) begins;  t = 5  0 arrives, 1 (until 7) begins;
    #   t = 6  3 arrives, from before the step, 2 (until 9) begins;  t = 7  1 arrives, the second step
    asked = []

    class First:
        def begin(self, round_, draw, count, busy):
            asked.append((round_, draw, count, sorted(busy)))
            return [(c, False) for c in range(6) if c not in busy][:count]

    schedule = Schedule(
        TimingRule(buffer=3), First(), 2, lambda clients, round_: [1.0 + c for c in clients]
    )
    assert schedule.fill_buffer(0) == ({0: 0, 1: 0, 2: 0}, [0, 1, 2, 3])
    assert schedule.clock == 4.0
    assert schedule.fill_buffer(1) == ({0: 1, 3: 0, 1: 1}, [0, 1, 2])
    assert schedule.clock == 7.0
    first = [(0, 0, 2, []), (0, 1, 1, [0, 1]), (0, 2, 1, [0, 1, 2])]
    assert asked == [*first, (1, 0, 1, [3]), (1, 1, 1, [0, 3]), (1, 2, 1, [0, 1, 3])]
