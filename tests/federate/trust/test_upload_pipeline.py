"""Attacks, robust rules and privacy on whole runs: what they promise, what they refuse, what they say."""

from dataclasses import replace

import pytest
import torch
from federation import difference, federation, gap, go, go_all, server_gap, small
from methods_tried import tried
from refusal import refused
from setting_lines import set_to
from text_tables import rows_of

from fedcache.federate.engine.method import sends_nothing
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.pipeline import UploadLayout, parse_policy
from fedcache.federate.trust.privacy import Privacy, parse_privacy


def equal_clients():
    """The federation's clients of 8 rows and more, cut to 8, so that one vote each is a vote by rows."""
    data, clients = federation()
    return data, [replace(c, train=c.train[:8]) for c in clients if len(c.train) >= 8]


@pytest.mark.parametrize("execution", ["batched", "gram"])
@pytest.mark.parametrize(
    ("name", "words"),
    rows_of(
        """
        fedavg   | aggregate=median attack=sign-flip:0.3:10
        fedprox  | aggregate=nnm+trimmed:0.2 attack=sign-flip:0.3:10
        fedproto | aggregate=clip:0.5 attack=sign-flip:0.3:10
        fedavg   | max_share=0.2
        fedproto | max_share=0.2
        """
    ),
)
def test_executions_agree_under_robust_rules_attacks_and_capped_shares(name, execution, words):
    how = {"trust": parse_policy(**set_to(words)), "participation": 7}
    one, other = (
        go(name, "opt=sgd lr=0.05", execution=e, **how) for e in ("sequential", execution)
    )
    assert difference(one, other) < 1e-10


@pytest.mark.parametrize("name", ["fedavg", "fed3r", "fedncm", "scaffold"])
def test_a_rule_that_is_the_mean_gives_the_mean(name):
    plain = go_all(name, {}, *equal_clients())
    voted = go_all(name, {}, *equal_clients(), trust=parse_policy("trimmed:0"))
    assert server_gap(plain, voted) < 1e-9


def test_labels_are_flipped_for_attackers_alone():
    data, clients = federation()
    out = go_all("fedncm", trust=parse_policy(attack="label-flip:0.5"))
    lied = {c.name for c in clients} & set(out.attackers)
    y = data.y.clone()
    for c in clients:
        if c.name in lied:
            y[c.train] = data.classes - 1 - y[c.train]
    assert server_gap(out, go_all("fedncm", {}, replace(data, y=y), clients)) < 1e-12
    assert len(lied) == len(clients) // 2


STILL = set_to("lr=0.0 bn=false mu=0.0 eta=0.0 alpha=0.0 beta=0.0 lambda=0.0")
"""Settings with which no client moves away from what it was sent."""


def moves(name):
    """Whether the method's clients train what they were sent, at a rate, and its server averages what they send."""
    method = METHODS[name]
    hp = method.resolve("paper")
    sends = not method.central and method.uploads is not sends_nothing
    trains = method.gradient and not method.one_shot and sends and "lr" in hp
    return trains and not {"mean", "uniform"}.isdisjoint(method.pool(hp).values())


UNLIKE = ("ccvr", "fedavg-scratch", "fednova")
MOVING = [name for name in METHODS if moves(name) and name not in UNLIKE]
"""Without ccvr, which ends with statistics of rows, fedavg-scratch, whose statistics of batches move, and fednova,
which sends the number of steps as well."""


@pytest.mark.parametrize("name", tried(MOVING))
def test_an_upload_of_a_client_that_does_not_move_is_no_change(name):
    # The norm of a change is what --max-update-norm, --dp-clip and robust rules look at.
    legal = {h.name: h for h in METHODS[name].hparams}
    still = {k: v for k, v in STILL.items() if k in legal and legal[k].low in (None, 0.0)}
    out = go(
        name, small(name) | still, trust=parse_policy(on_bad_update="reject", max_update_norm=1e-6)
    )
    assert [record.diagnostics["rejected"] for record in out.records] == [0.0] * len(out.records)


@pytest.mark.parametrize("name", ["fednova", "scaffold"])
def test_a_step_is_no_difference_from_what_was_sent(name):
    out = go(name, small(name))
    expected = METHODS[name].uploads(out.server, out.deployed(None).ctx)
    layout = UploadLayout(expected, out.server, dict.fromkeys(expected, "uniform"))
    steps = [n for n, t in expected.items() if t.is_step]
    assert any(bool(out.server[n].abs().max() > 0) for n in steps)
    unmoved = {n: out.server.get(n, torch.zeros(t.shape)) for n, t in expected.items()}
    unmoved |= {n: torch.zeros_like(out.server[n]) for n in steps}
    assert torch.equal(layout.vector(unmoved, 5.0), torch.zeros(layout.size, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "feddyn", "fedproto", "ifca"])
def test_no_honest_client_is_rejected_for_the_scale_of_its_features(name, scale):
    data, clients = federation()
    data = replace(data, x=data.x.float() * scale)
    trust = parse_policy(on_bad_update="reject")
    out = go(name, "feat_post=none lr=0.01", data, clients, dtype=torch.float32, trust=trust)
    assert [record.diagnostics["rejected"] for record in out.records] == [0.0] * len(out.records)


REFUSED = rows_of(
    """
    fedpcl  | aggregate=median                    | fedpcl
    central | aggregate=median                    | central
    solo    | aggregate=median                    | solo
    fedavg  | aggregate=krum byzantine=0.45       | krum
    fedavg  | aggregate=multikrum:8 byzantine=0.2 | multikrum:8
    fedavg  | on_bad_update=ignore                | --on-bad-update
    fedavg  | byzantine=0.5                       | --byzantine
    fedavg  | max_update_norm=0.0                 | --max-update-norm
    fedavg  | max_row_norm=5.0                    | no statistics
    fedpcl  | max_share=0.5                       | --max-share
    central | max_rows_per_client=5               | --max-rows-per-client
    fedavg  | max_share=NaN                       | --max-share nan
    fedavg  | max_rows_per_client=0               | --max-rows-per-client 0
    """
)
"""Method, words of a policy, and what of them is named."""


@pytest.mark.parametrize(("name", "how", "word"), REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(name, how, word):
    refused(lambda: go(name, trust=parse_policy(**set_to(how)), participation=5), word)


def test_without_noise_and_with_a_wide_bound_privacy_is_the_mean_of_clients():
    trust = parse_policy(privacy=Privacy(1e9, 0.0))
    for name, settings, part in (
        ("fedavg", "", "P.W"),
        ("fed3r", "", "W"),
        ("fedproto", "proto_agg=mean", "bar"),  # one vote each, as privacy must have it
    ):
        plain = go_all(name, settings, *equal_clients())
        private = go_all(name, settings, *equal_clients(), trust=trust)
        assert gap(plain.server[part], private.server[part]) < 1e-9


@pytest.mark.parametrize(
    ("words", "message"),
    rows_of(
        """
        bound=1.0 noise=null                   | --dp-noise
        bound=null noise=null allow=rows       | --dp-allow
        bound=1.0 noise=1.0 seed=-1            | --dp-seed -1
        bound=1.0 noise=1.0 allow=rows,acuracy | 'acuracy'
        bound=1.0 noise=1.0 delta=1.0          | --dp-delta 1
        bound=Infinity noise=1.0               | --dp-clip is inf
        """
    ),
)
def test_words_that_are_no_privacy(words, message):
    refused(lambda: parse_privacy(**set_to(words)), message)
