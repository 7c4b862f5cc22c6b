"""Privacy of clients: noise that nobody can repeat or subtract, and what it costs by accountants of our own."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import federation, go, go_all, go_tiny
from float64 import doubles, zeros
from methods_tried import tried
from refusal import machine_error, refused
from scipy import fft, optimize, stats
from setting_lines import set_to

from fedcache.federate.engine.context import key_hash
from fedcache.federate.methods import METHODS
from fedcache.federate.trust import accounting
from fedcache.federate.trust import privacy as noise
from fedcache.federate.trust.accounting import Spent, epsilons
from fedcache.federate.trust.pipeline import parse_policy
from fedcache.federate.trust.privacy import Privacy, PrivateDraws
from fedcache.report.methods.facts import UNKNOWN, kind_of, leaving

REAL = Privacy(1.0, 1.0, allow=("evaluation",))
SIMULATED = replace(REAL, seed=0)


STEPS = set_to("opt=sgd lr=0.05 bn=false")  # a private run has no BatchNorm


def after_one_round(privacy):
    """The server of fedavg after one round of all clients, as one float64 vector; its start is the same for all."""
    server = go_all("fedavg", STEPS, rounds=1, trust=parse_policy(privacy=privacy)).server
    return torch.cat([server[name].flatten() for name in sorted(server)])


# Noise.


def test_noise_of_the_system_is_standard_normal_and_independent():
    # Not seeded, so false alarms are set to about one in a million runs of the suite.
    n = 200_000
    drawn = noise.system_normals(n).numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert abs(drawn.var() - 1.0) < 5.0 * math.sqrt(2.0 / n)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5.0 / math.sqrt(n)
    tail = (np.abs(drawn) > 4.0).sum()  # 12.7 of 200,000
    assert 0 < tail < 50


def test_noise_of_the_system_is_made_of_every_bit_of_its_bytes(monkeypatch):
    # Bytes of one kind are the ends of the distribution: sign by the lowest bit, size by the others.
    monkeypatch.setattr(noise.os, "urandom", lambda n: b"\x00" * n)
    # 4 draws of 9 deviations, over 2
    assert noise.system_normals(3).tolist() == pytest.approx([2 * 9.0] * 3, abs=1.0)
    assert noise.system_uniforms(2).tolist() == [0.0, 0.0]
    monkeypatch.setattr(noise.os, "urandom", lambda n: b"\xff" * n)
    assert noise.system_normals(3).tolist() == pytest.approx([0.0] * 3, abs=1e-12)
    assert noise.system_uniforms(2).max() < 1.0


def test_simulated_noise_is_standard_normal():
    drawn = noise.simulated_normals(3, "privacy", 1)(200_000).numpy()
    assert stats.kstest(drawn, "norm").pvalue > 0.01
    assert abs(drawn.var() - 1.0) < 0.01


def test_what_is_long_is_clipped():
    V = doubles([[3.0, 4.0], [0.3, 0.4]])
    assert Privacy(1.0, 0.0).noisy_sum(V, noise.system_normals).tolist() == pytest.approx(
        [0.9, 1.2]
    )


def test_the_deviation_on_a_sum_is_that_which_epsilon_is_told_for():
    drawn = Privacy(2.0, 1.5).noisy_sum(zeros(1, 100_000), noise.system_normals)
    assert float(drawn.std()) == pytest.approx(3.0, rel=0.02)  # z C, 9 standard errors


def published_noise(size):
    """Every noise that follows from what a run tells: its seed, and the seed of a simulation."""
    _data, everyone = federation()
    yield torch.randn(
        size,
        generator=torch.Generator().manual_seed(key_hash(0, "privacy", 0) & (1 << 63) - 1),
        dtype=torch.float64,
    )
    hp = METHODS["fedavg"].resolve("paper", STEPS)
    for seed in (0, 1):
        simulated = Privacy(1.0, 1.0, seed=seed)
        yield PrivateDraws(simulated, 0, ("", "fedavg"), hp, everyone).normals(0)(size)


def test_the_sum_cannot_be_recovered_from_what_a_real_run_tells():
    clean = after_one_round(Privacy(1.0, 0.0))
    for privacy, hidden in ((REAL, True), (SIMULATED, False)):
        told = after_one_round(privacy)
        # The server adds the noisy sum over 9 clients to what it sent: the attacker undoes that and takes noise away.
        noisy = (told - clean) * 9
        d = told.numel()
        errors = [float((noisy - guess).square().sum()) for guess in published_noise(d)]
        if hidden:  # squares of d numbers of deviation z C = 1; false alarms are one in a million
            low = stats.chi2.ppf(1e-6, d)
            assert low < float(noisy.square().sum()) < stats.chi2.isf(1e-6, d)
            # twice as much on average: a guess that is wrong adds noise of its own
            assert min(errors) > low
        else:  # the same attack on a simulation gets the sum back, as its name says
            assert min(errors) < 1e-9


def test_simulated_noise_is_that_of_one_run_alone():
    """Else the difference of two runs would be that of their uploads, and name the client that one lacks."""
    _data, everyone = federation()
    base = {
        "privacy": SIMULATED,
        "seed": 0,
        "identity": ("a", "fedavg"),
        "hp": {"lr": 0.1},
        "clients": everyone,
    }

    def drawn(round_=0, **change):
        return PrivateDraws(**base | change).normals(round_)(50)

    made = drawn()
    moved = [SimpleNamespace(name=everyone[0].name, train=everyone[0].train[:-1]), *everyone[1:]]
    others = {
        "a client less": {"clients": everyone[:-1]},
        "a row less": {"clients": moved},
        "another dataset": {"identity": ("b", "fedavg")},
        "another method": {"identity": ("a", "fedprox")},
        "another hyperparameter": {"hp": {"lr": 0.2}},
        "another seed": {"seed": 1},
    }
    for what, change in others.items():
        assert float((drawn(**change) - made).abs().min()) > 0.0, what
    assert float((drawn(1) - made).abs().min()) > 0.0
    assert torch.equal(drawn(), made)


@pytest.mark.parametrize("name", ["fedavg", "fedproto"])
def test_a_round_in_which_nobody_is_drawn_is_noise_alone(name, monkeypatch):
    """Of nine clients each is drawn with a ninth, and with seed 2 none of them is in the first round."""
    # in fedproto, how many own each class
    owners = doubles([3.0, 1.0, 0.5, 0.0, -3.0, 1.01])
    trust = parse_policy(privacy=Privacy(1.5, 2.0, seed=0, allow=("evaluation",)))

    def server_of(height):
        def drawn(n):
            return torch.cat([torch.full((n - 6,), height, dtype=torch.float64), owners])

        monkeypatch.setattr(noise, "simulated_normals", lambda *_key: drawn)
        out = go(name, "opt=sgd bn=false", rounds=1, participation=1, seed=2, trust=trust)
        assert out.records[0].clients == ()
        return out.server

    server = server_of(4.0)
    # 2 x 1.5 x 4 on every number of the first weights, of one client that is expected
    if name == "fedavg":
        still = server_of(0.0)
        for tensor in ("P.W", "P.b", "Q.W"):
            moved = server[tensor] - still[tensor]
            assert torch.allclose(moved, torch.full_like(moved, 12.0))
        return
    # Deviation 3: owners 9, 3, 1.5, 0, -9 and 3.03; those above 3 are known; a prototype is 12 of them.
    assert server["has"].tolist() == [True, False, False, False, False, True]
    assert server["bar"][:, 0].tolist() == pytest.approx([12 / 9, 0.0, 0.0, 0.0, 0.0, 12 / 3.03])


def test_who_takes_part_in_a_real_run_is_drawn_from_the_system_once_a_round():
    draws = PrivateDraws(REAL, 0, ("", "fedavg"), {}, [])
    first = draws.uniforms(0, 1000)
    assert np.array_equal(draws.uniforms(0, 1000), first)  # whoever asks, the round has one sample
    assert not np.array_equal(draws.uniforms(1, 1000), first)
    assert not np.array_equal(
        PrivateDraws(REAL, 0, ("", "fedavg"), {}, []).uniforms(0, 1000), first
    )
    assert stats.kstest(first, "uniform").pvalue > 1e-6
    out = go("fedavg", STEPS, rounds=20, participation=0.4, trust=parse_policy(privacy=REAL))
    assert len({len(r.clients) for r in out.records}) > 1
    # 0.4 of 9 are 3.6 on average: every round is counted as 4, whoever took part.
    assert {r.traffic.clients for r in out.records} == {4}
    assert len({(r.traffic.up, r.traffic.down) for r in out.records}) == 1


@pytest.mark.parametrize(
    ("name", "how", "word"),
    [
        ("fedavg", {}, "evaluation"),
        ("fed3r", {}, "evaluation,rows"),
        ("fedavg", {"on_bad_update": "reject"}, "evaluation,participants"),
    ],
)
def test_what_epsilon_does_not_cover_is_refused_unless_it_is_allowed_by_name(name, how, word):
    settings = "bias=false" if name == "fed3r" else STEPS
    refused(
        lambda: go_all(name, settings, trust=parse_policy(privacy=Privacy(1.0, 1.0), **how)),
        f"--dp-allow {word};",
    )
    for privacy in (replace(REAL, allow=tuple(word.split(","))), Privacy(1.0, 1.0, seed=0)):
        go_all(name, settings, trust=parse_policy(privacy=privacy, **how))


def test_counts_are_refused_before_any_client_is_trained(monkeypatch):
    trained = []
    monkeypatch.setattr(
        "fedcache.federate.engine.run_state.RunState.fit_one", lambda *a: trained.append(a)
    )
    refused(
        lambda: go_all("fedncm", trust=parse_policy(privacy=SIMULATED), execution="sequential"),
        "fedncm",
    )
    assert not trained


@pytest.mark.parametrize("name", tried(sorted(METHODS)))
def test_what_methods_info_says_of_noise_is_what_a_run_does(name):
    """A private run refuses a method exactly if the list says so, and then the list says so of all that it sends."""
    parts = leaving(METHODS[name])
    undescribed = [part.names for part in parts if part.what == UNKNOWN[0]]
    assert undescribed == [], "Method.upload_descriptions describes tensors with new names"
    is_refused = not parts or parts[0].private == "refused"
    assert all((part.private == "refused") == is_refused for part in parts)
    how = {"trust": parse_policy(privacy=SIMULATED), "rounds": 1}
    settings = {"bn": False} if any(h.name == "bn" for h in METHODS[name].hparams) else {}
    if is_refused:
        refused(lambda: go_tiny(name, settings, **how))
    else:
        go_tiny(name, settings, **how)


def test_a_tensor_of_an_own_method_may_have_any_name_and_a_description():
    assert kind_of(METHODS["fedavg"], "middle") == UNKNOWN
    described = ("medians of features", "of a class with one row, that row")
    own = replace(METHODS["fedavg"], upload_descriptions={"middle": described})
    assert kind_of(own, "middle") == described


def test_what_noise_makes_meaningless_is_refused_beside_it():
    for words in ({"max_share": 0.2}, {"aggregate": "median"}):
        refused(partial(parse_policy, privacy=SIMULATED, **words))


# Accounting, by means of our own: nothing below asks dp-accounting for anything but its answer.


def gaussian_epsilon(mu, delta):
    """Epsilon of the Gaussian mechanism with sensitivity / deviation mu (Balle and Wang, ICML 2018, theorem 5)."""

    def excess(epsilon):
        a = mu / 2 - epsilon / mu
        b = -mu / 2 - epsilon / mu
        return stats.norm.cdf(a) - math.exp(epsilon + stats.norm.logcdf(b)) - delta

    return optimize.brentq(excess, 0.0, 500.0)


def sampled_epsilon(settings, delta, step=2e-4, size=1 << 19):
    """Epsilon of Poisson-sampled Gaussians by convolution of their privacy losses with an FFT.

    The pair is P = (1 - q) N(0, z^2) + q N(1, z^2) and Q = N(0, z^2) (Abadi et al., CCS 2016); both directions are
    tried. ``settings`` are (z, q, rounds). Losses are dealt to the two nearest of ``size`` points, which keeps means.
    """
    found = []
    for removed in (True, False):
        spectrum = np.ones(size // 2 + 1, np.complex128)
        for z, q, rounds in settings:
            x = np.linspace(-12 * z, 1 + 12 * z, 600_001)
            width = x[1] - x[0]
            log_q = stats.norm.logpdf(x, 0, z)
            log_p = np.logaddexp(np.log1p(-q) + log_q, np.log(q) + stats.norm.logpdf(x, 1, z))
            loss = log_p - log_q if removed else log_q - log_p
            mass = np.exp(log_p if removed else log_q) * width
            place = loss / step
            low = np.floor(place).astype(np.int64)
            part = place - low
            dealt = np.bincount(low % size, mass * (1 - part), size) + np.bincount(
                (low + 1) % size, mass * part, size
            )
            spectrum *= fft.rfft(dealt / dealt.sum()) ** rounds
        composed = fft.irfft(spectrum, size).clip(min=0.0)
        at = np.arange(size)
        loss = np.where(at < size // 2, at, at - size) * step

        def excess(epsilon, loss=loss, composed=composed):
            above = loss > epsilon
            return float((composed[above] * -np.expm1(epsilon - loss[above])).sum()) - delta

        found.append(optimize.brentq(excess, 0.0, size * step / 2.1) if excess(0.0) > 0 else 0.0)
    return max(found)


WHOLE = ((1.0, 1, 1e-5), (5.0, 100 * 5, 1e-5), (20.0, 1000, 1e-7))
SAMPLED = ((1.0, 0.01, 1000, 1e-5), (2.0, 0.5, 30, 1e-5), (0.8, 0.05, 200, 1e-6))


@pytest.mark.parametrize(("z", "rounds", "delta"), WHOLE)
def test_epsilon_of_all_clients_is_the_closed_form(z, rounds, delta):  # A1
    pytest.importorskip("dp_accounting")
    # T rounds of noise z are one of noise z / sqrt(T).
    exact = gaussian_epsilon(math.sqrt(rounds) / z, delta)
    told = epsilons([Spent(z, 1.0, rounds)], delta)
    assert told["epsilon_pld"] == pytest.approx(exact, rel=0.01)
    assert told["epsilon_rdp"] >= exact * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "share", "rounds", "delta"), SAMPLED)
def test_epsilon_of_a_share_is_that_of_an_independent_convolution(z, share, rounds, delta):  # A1
    pytest.importorskip("dp_accounting")
    told = epsilons([Spent(z, share, rounds)], delta)
    independent = sampled_epsilon([(z, share, rounds)], delta)
    assert told["epsilon_pld"] == pytest.approx(independent, rel=0.01)
    assert told["epsilon_rdp"] >= independent * 0.99


@pytest.mark.slow
def test_epsilon_composes_over_seeds_points_and_unlike_mechanisms():  # A1
    pytest.importorskip("dp_accounting")
    told = Privacy(1.0, 5.0).cost(rounds=100, share=1.0, seeds=5)
    assert "participants_known" not in told
    both = epsilons([Spent(5.0, 1.0, 100), Spent(3.0, 1.0, 20)], 1e-5)
    for cost, squares in (
        (told, 100 / 25),
        (told["composed"], 500 / 25),
        (both, 100 / 25 + 20 / 9),
    ):
        exact = gaussian_epsilon(math.sqrt(squares), 1e-5)
        assert cost["epsilon_pld"] == pytest.approx(exact, rel=0.01)
    mixed = epsilons([Spent(1.0, 0.1, 50), Spent(4.0, 1.0, 10)], 1e-5)
    # A share of 1 is the Gaussian itself: q -> 1 in the pair.
    assert mixed["epsilon_pld"] == pytest.approx(
        sampled_epsilon([(1.0, 0.1, 50), (4.0, 1 - 1e-12, 10)], 1e-5), rel=0.01
    )


def test_sampling_makes_epsilon_smaller_only_while_participants_are_secret():
    pytest.importorskip("dp_accounting")
    secret = REAL.cost(100, 0.1)
    told = replace(REAL, allow=("evaluation", "participants")).cost(100, 0.1)
    assert secret["participants"] == "secret"
    assert told["participants"] == "known"
    assert (
        secret["participants_known"]["epsilon_rdp"]
        == told["epsilon_rdp"]
        > 2 * secret["epsilon_rdp"]
    )
    assert "participants_known" not in told
    assert told["composed"]["epsilon_rdp"] == told["epsilon_rdp"]
    simulated = replace(REAL, seed=3).cost(100, 0.1)  # as much as the run that it simulates
    of_the_noise = {"simulation": True, "noise_from": "--dp-seed 3", "repeatable": True}
    assert simulated == (secret | of_the_noise)


@pytest.mark.parametrize("how", [REAL, replace(REAL, seed=3)])
def test_noise_without_an_accountant_is_refused_and_clipping_alone_is_not(how, monkeypatch):
    monkeypatch.setattr(accounting, "find_spec", lambda name: object())
    how.require()
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    replace(how, noise=0.0).require()
    machine_error(how.require, "dp-accounting")
