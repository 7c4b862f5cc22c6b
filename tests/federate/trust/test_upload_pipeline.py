"""Attacks, robust rules and privacy on whole runs: what they promise, what they refuse, what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import difference, federation, gap, go, run, run_points, small

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.buffered_uploads import UploadLayout
from fedcache.federate.trust.noise import simulated_normals
from fedcache.federate.trust.policy import parse_policy
from fedcache.federate.trust.privacy import Privacy, parse_privacy

ROBUST = ("median", "trimmed:0.2", "geomedian", "multikrum", "nnm+median")


@pytest.mark.parametrize("execution", ["sequential", "batched", "gram"])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedproto"])
@pytest.mark.parametrize("trust", ["median", "nnm+trimmed:0.2", "clip:0.5"])
def test_executions_agree_under_robust_rules_and_attacks(name, execution, trust):
    settings = {"opt": "sgd", "lr": 0.05}
    how = {"trust": parse_policy(trust, "sign-flip:0.3:10"), "participation": 7}
    assert (
        difference(go(name, settings, execution="sequential", **how), go(name, settings, execution=execution, **how))
        < 1e-10
    )


@pytest.mark.parametrize("name", ["fedavg", "fed3r", "fedncm", "scaffold", "fedrep", "pfedme", "fst-cbdg"])
def test_a_rule_that_is_the_mean_gives_the_mean(name):
    # Equal clients, so that one vote each is a vote by rows.
    data, clients = federation()
    size = 8
    clients = [type(c)(c.name, c.train[:size], c.test) for c in clients if len(c.train) >= size]
    plain = go(name, {}, data, clients, participation=None)
    voted = go(name, {}, data, clients, participation=None, trust=parse_policy("trimmed:0"))
    assert (
        gap({k: t.double() for k, t in plain.server.items()}, {k: t.double() for k, t in voted.server.items()}) < 1e-9
    )


def test_a_resumed_run_under_attack_has_the_same_bits():
    kept = []
    how = {"trust": parse_policy("median", "gaussian:0.3"), "rounds": 4, "dtype": torch.float32, "execution": "batched"}
    whole = go(
        "fedavg", on_round=lambda number, _m, _t, snapshot: kept.append(snapshot()) if number == 2 else None, **how
    )
    assert difference(whole, go("fedavg", state=kept[0], **how)) == 0.0


def test_grid_points_are_guarded_one_by_one():
    data, clients = federation()
    method, trust = METHODS["fedavg"], parse_policy("median", "sign-flip:0.3:10")
    hps = [method.resolve("paper", {"opt": "sgd", "lr": lr}) for lr in (0.05, 0.02)]
    points = run_points(method, hps, data, clients, rounds=2, trust=trust, dtype=torch.float64)
    for hp, point in zip(hps, points, strict=True):
        assert difference(point, run(method, hp, data, clients, rounds=2, trust=trust, dtype=torch.float64)) < 1e-10


def test_labels_are_flipped_for_attackers_alone():
    data, clients = federation()
    out = go("fedncm", {}, data, clients, participation=None, trust=parse_policy(attack="label-flip:0.5"))
    lied = {c.name for c in clients} & set(out.attackers)
    y = data.y.clone()
    for c in clients:
        if c.name in lied:
            y[torch.from_numpy(c.train)] = data.classes - 1 - y[torch.from_numpy(c.train)]
    from dataclasses import replace

    honest = go("fedncm", {}, replace(data, y=y), clients, participation=None)
    assert gap(out.server, honest.server) < 1e-12
    assert len(lied) == len(clients) // 2


STILL = {"lr": 0.0, "bn": False, "mu": 0.0, "eta": 0.0, "alpha": 0.0, "beta": 0.0, "lambda": 0.0}
"""Settings with which no client moves away from what it was sent."""


def moves(name):
    """Whether the method's clients train what they were sent, at a rate, and its server averages what they send."""
    method = METHODS[name]
    hp = method.resolve("paper")
    trains = method.gradient and not method.one_shot and not method.central and "lr" in hp
    return trains and not {"mean", "uniform"}.isdisjoint(method.pool(hp).values())


SILENT = {"local-prompt", "local-supervised", "min-local", "solo", "supcon"}
"""Methods whose clients send nothing."""
MOVING = [name for name in METHODS if moves(name) and name not in {*SILENT, "fedavg-scratch", "fednova"}]
"""Without fedavg-scratch, whose statistics of batches move, and fednova, which sends the number of steps as well."""


@pytest.mark.parametrize("name", MOVING)
def test_an_upload_of_a_client_that_does_not_move_is_no_change(name):
    # The norm of a change is what --max-update-norm, --dp-clip and robust rules look at.
    legal = {h.name: h for h in METHODS[name].hparams}
    still = {k: v for k, v in STILL.items() if k in legal and legal[k].low in (None, 0.0)}
    out = go(name, {**small(name), **still}, trust=parse_policy(on_bad_update="reject", max_update_norm=1e-6))
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


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "feddyn", "fedadam", "fedproto", "ifca"])
def test_no_honest_client_is_rejected_whatever_the_scale_of_its_features(name, scale):
    data, clients = federation()
    out = go(
        name,
        {"feat_post": "none", "lr": 0.01},
        replace(data, x=data.x.float() * scale),
        clients,
        dtype=torch.float32,
        trust=parse_policy(on_bad_update="reject"),
    )
    assert [record.diagnostics["rejected"] for record in out.records] == [0.0] * len(out.records)


@pytest.mark.parametrize(
    ("name", "how", "word"),
    [
        ("fedpcl", {"aggregate": "median"}, "takes no mean"),
        ("fedpft", {"aggregate": "krum"}, "takes no mean"),
        ("central", {"aggregate": "median"}, "one place"),
        ("solo", {"aggregate": "median"}, "send nothing"),
        ("fedavg", {"aggregate": "krum", "byzantine": 0.45}, "at least"),
        ("fedavg", {"on_bad_update": "ignore"}, "--on-bad-update"),
        ("fedavg", {"byzantine": 0.5}, "--byzantine"),
        ("fedavg", {"max_update_norm": 0.0}, "--max-update-norm"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(name, how, word):
    with pytest.raises(FedcacheError) as error:
        go(name, {}, trust=parse_policy(**how), participation=5)
    assert error.value.code is Exit.USAGE
    assert word in str(error.value)
    assert error.value.hint


def test_noise_has_the_deviation_it_says_and_clips_what_is_long():
    V = torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64)
    noise = simulated_normals(0)
    assert Privacy(1.0, 0.0).noisy_sum(V, noise).tolist() == pytest.approx([0.9, 1.2])
    drawn = torch.stack([Privacy(2.0, 1.5).noisy_sum(torch.zeros(1, 400), noise) for _ in range(50)])
    assert float(drawn.std()) == pytest.approx(3.0, rel=0.02)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.1)


def test_without_noise_and_with_a_wide_bound_privacy_is_the_mean_of_clients():
    data, clients = federation()
    clients = [type(c)(c.name, c.train[:8], c.test) for c in clients if len(c.train) >= 8]
    for name in ("fedavg", "fed3r"):
        plain = go(name, {}, data, clients, participation=None)
        private = go(name, {}, data, clients, participation=None, trust=parse_policy(privacy=Privacy(1e9, 0.0)))
        assert gap(plain.server, private.server) < 1e-9
    merged = {"proto_agg": "mean"}  # one vote each, as privacy must have it
    plain = go("fedproto", merged, data, clients, participation=None)
    private = go("fedproto", merged, data, clients, participation=None, trust=parse_policy(privacy=Privacy(1e9, 0.0)))
    assert gap(plain.server["bar"], private.server["bar"]) < 1e-9


def test_clients_are_sampled_each_by_itself():
    out = go(
        "fedavg", {"bn": False}, rounds=40, participation=0.3, trust=parse_policy(privacy=Privacy(1.0, 0.1, seed=0))
    )
    sizes = [len(r.clients) for r in out.records]
    assert len(set(sizes)) > 3
    assert np.mean(sizes) == pytest.approx(0.3 * 9, abs=0.9)
    assert all(math.isfinite(v) for v in out.client_accuracy[~np.isnan(out.client_accuracy)])


def test_counts_do_not_travel_beside_noise():
    trust = parse_policy(privacy=Privacy(1.0, 1.0, seed=0))
    for name, settings, hint in (
        ("fedncm", {}, "Another method: fedavg, fedprox, fedproto, or fed3r without a bias."),
        ("fed3r", {"bias": True}, "--set bias=false --set class_weight=none, or another method: fedavg"),
    ):
        with pytest.raises(FedcacheError, match="count") as caught:
            go(name, settings, trust=trust, participation=None)
        assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((1.0, None, None), "--dp-noise is missing"),
        ((None, 1.0, None), "--dp-clip is missing"),
        ((None, None, 1e-5), "--dp-delta says nothing by itself"),
        ((None, None, None, 3), "--dp-seed says nothing by itself"),
        ((None, None, None, None, "rows"), "--dp-allow says nothing by itself"),
        ((1.0, 1.0, None, -1), "--dp-seed -1"),
        ((1.0, 1.0, None, None, "rows,acuracy"), "Unknown --dp-allow 'acuracy'"),
        ((0.0, 1.0, None), "--dp-clip 0"),
        ((1.0, -1.0, None), "--dp-noise -1"),
        ((1.0, 1.0, 1.0), "--dp-delta 1"),
        ((math.inf, 1.0, None), "--dp-clip inf"),
    ],
)
def test_words_that_are_no_privacy(words, message):
    with pytest.raises(FedcacheError) as error:
        parse_privacy(*words)
    assert error.value.code is Exit.USAGE
    assert message in str(error.value)


@pytest.mark.slow
def test_accounting_is_that_of_the_reference_and_monotone():  # A1
    pytest.importorskip("dp_accounting")

    def spent(sigma=1.0, rounds=100, share=0.1):
        told = Privacy(1.0, sigma, 1e-5).cost(rounds, share)
        return told["epsilon_pld"], told["epsilon_rdp"]

    pld, rdp = spent()
    assert pld == pytest.approx(7.05, rel=0.01)
    assert rdp == pytest.approx(7.90, rel=0.01)
    for worse in ({"rounds": 200}, {"sigma": 0.8}, {"share": 0.2}):
        assert spent(**worse)[0] > pld
        assert spent(**worse)[1] > rdp
        assert spent(**worse)[0] <= spent(**worse)[1]
    assert Privacy(1.0, 0.0).cost(1, 1.0)["epsilon_pld"] is None


def test_noise_without_accounting_names_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(FedcacheError, match="dp-accounting") as error:
        Privacy(1.0, 1.0).cost(1, 1.0)
    assert error.value.code is Exit.ENVIRONMENT
    assert "pip install 'fedcache[dp]'" in error.value.hint


def test_a_method_that_cannot_count_what_it_sends_ends_the_run_unless_uploads_are_judged():
    def miscounts(_up, _ctx):
        raise KeyError("head")

    data, clients = federation()
    method = replace(METHODS["fedavg"], sent=miscounts)
    with pytest.raises(KeyError, match="head"):
        run(method, method.resolve(), data, clients, rounds=1, execution="sequential")
    how = {"rounds": 1, "execution": "sequential", "trust": parse_policy("median")}
    judged = run(method, method.resolve(), data, clients, **how)
    first = next(up for up in judged.traffic.up if up)  # every number of an upload: weights and biases
    assert first == sum(t.numel() for t in judged.server.values())
