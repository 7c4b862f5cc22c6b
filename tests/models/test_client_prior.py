"""Client prior: its laws, and the concentration that a fit recovers."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusal import refused
from scipy.stats import dirichlet_multinomial

from fedcache.federate.partition.partition import Client, Partition
from fedcache.heads.losses import MASKED
from fedcache.models.client_prior import (
    ClientPrior,
    ClientPriors,
    add_offset,
    class_counts,
    estimate_log_prior,
    fit_concentration,
)
from fedcache.runs import loop


def scores_of(seed, rows=40, classes=6):
    return np.random.default_rng(seed).normal(size=(rows, classes))


def planted(k, shares, clients, rows, seed=0):
    """Class counts [clients, C] of clients whose class shares are drawn from Dirichlet(k shares)."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.multinomial(rows, rng.dirichlet(k * shares)) for _ in range(clients)])


def predict_with_prior(scores, log_prior, temperature=1.0):
    """The predicted classes, as a deployed model with that prior gives them."""
    offset = ClientPrior("a", "counts", log_prior).offset(temperature)
    return add_offset(torch.from_numpy(scores), offset).argmax(-1).numpy()


def test_none_adds_nothing_and_predicts_as_the_model():
    log_prior = ClientPriors.of("none", np.array([[0, 1, 9, 3, 2, 0]])).log_prior(0)
    scores = torch.from_numpy(scores_of(0, rows=1_000))
    assert torch.equal(add_offset(scores, ClientPrior("a", "none", log_prior).offset(2.5)), scores)


@pytest.mark.parametrize("rows", [1, 3, 500])
@pytest.mark.parametrize("owned", [0b000001, 0b101010, 0b111111])
def test_equal_counts_predict_as_the_clients_classes(rows, owned):
    owned = np.array([owned >> c & 1 for c in range(6)])
    counts = rows * owned[None]
    scores = scores_of(rows)
    found = [
        predict_with_prior(scores, ClientPriors.of(kind, counts).log_prior(0))
        for kind in ("classes", "counts")
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] == np.where(owned, scores, -np.inf).argmax(-1)).all()


def test_counts_are_the_bayes_rule_of_other_class_shares():
    """A model of equal class shares, with the log of a client's counts, is that client's own posterior."""
    likelihood = np.random.default_rng(1).dirichlet(np.ones(5), size=50)
    counts = np.array([[7, 0, 1, 2, 10]])
    posterior = likelihood * counts[0] / counts.sum()
    # any constant of a row may be missing from its log-probabilities
    logs = np.log(likelihood) + np.linspace(-3, 3, 50)[:, None]
    log_prior = ClientPriors.of("counts", counts).log_prior(0)
    found = predict_with_prior(4.0 * logs, log_prior, temperature=4.0)
    assert (found == posterior.argmax(-1)).all()


@pytest.mark.parametrize("k", [0.3, 2.0, 30.0])
def test_a_planted_concentration_is_recovered(k):
    shares = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    counts = planted(k, shares, clients=300, rows=80)
    assert ClientPriors.of("fitted", counts).concentration == pytest.approx(k, rel=0.2)


def test_the_fit_is_the_maximum_of_scipys_likelihood():
    shares = np.array([0.5, 0.3, 0.2])
    counts = planted(4.0, shares, clients=40, rows=25)

    def likelihood(k):
        return dirichlet_multinomial.logpmf(counts, k * shares, counts.sum(1)).sum()

    best = fit_concentration(counts, shares)
    assert likelihood(best) > max(likelihood(0.95 * best), likelihood(best / 0.95))


def test_clients_that_do_not_differ_and_clients_of_one_class_are_the_ends_of_the_search():
    shares = np.array([0.5, 0.5])
    assert fit_concentration(np.array([[50, 50]] * 5), shares) > 0.9e6
    assert fit_concentration(np.array([[90, 0], [0, 90]] * 5), shares) < 1.1e-3


def test_fitted_is_the_smoothed_share_of_the_client():
    counts = np.array([[3, 1, 0, 0], [0, 5, 5, 0]])
    priors = ClientPriors.of("fitted", counts)
    k = priors.concentration
    pooled = counts.sum(0) / counts.sum()
    shares = np.exp(priors.log_prior(0))
    assert shares == pytest.approx((counts[0] + k * pooled) / (4 + k))
    assert shares.sum() == pytest.approx(1)
    assert shares[2] > 0, "another client has the class"
    assert shares[3] == 0, "no client has it"


@pytest.mark.parametrize("planted", [[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])
def test_em_recovers_a_planted_prior(planted):
    """Gaussian classes, so that the posterior under the training prior is exact."""
    rng = np.random.default_rng(0)
    trained = np.array([0.2, 0.3, 0.5, 0.0])
    y = rng.choice(3, size=20_000, p=planted)
    distance = (rng.normal(size=y.size) + 1.5 * y)[:, None] - 1.5 * np.arange(4)
    posterior = np.exp(-(distance**2) / 2) * trained
    posterior /= posterior.sum(1, keepdims=True)
    posterior[7] = np.nan
    found = np.exp(estimate_log_prior(posterior, trained))
    assert (found * trained)[:3] == pytest.approx(planted, abs=0.02)
    assert found[3] == 0, "the model has not learned it"
    assert estimate_log_prior(posterior[:0], trained).tolist() == [0, 0, 0, -np.inf]


@pytest.mark.parametrize(
    ("k", "rows", "warned"), [(1e6, 100, True), (10, 20, True), (10, 1_000, False), (1, 100, False)]
)
def test_a_mask_is_warned_of_where_it_excludes_classes_that_a_client_has(k, rows, warned):
    """The expected share of excluded rows is the one that planted class shares give."""
    rng = np.random.default_rng(0)
    future = rng.dirichlet(np.full(100, k / 100), size=300)
    counts = np.stack([rng.multinomial(rows, shares) for shares in future])
    said = ClientPriors.of("classes", counts).caution()
    excluded = 100 * (future * (counts == 0)).sum(1).mean()
    assert warned == (said is not None) == (excluded > 5)
    if said is not None:
        assert "--client-prior fitted" in said
        assert float(said.split("right class of ")[1].split(" %")[0]) == pytest.approx(
            excluded, abs=2
        )
    assert ClientPriors.of("fitted", counts).caution() is None


def test_class_counts_leave_unknown_labels_out():
    label = np.array([0, 1, 1, -1, 2])
    train = [np.array([0, 1, 3]), np.array([], np.int64), np.array([1, 2, 4])]
    assert class_counts(train, label, 4).tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 2, 1, 0]]


def test_a_client_without_labelled_rows_has_no_prior_of_its_own():
    counts = np.array([[0, 0], [3, 1]])
    for kind in ("classes", "counts"):
        assert ClientPriors.of(kind, counts).log_prior(0).tolist() == [0, 0]
    assert np.exp(ClientPriors.of("fitted", counts).log_prior(0)) == pytest.approx([0.75, 0.25])
    refused(lambda: ClientPriors.of("counts", counts[:1]), "no client has any")


def test_models_that_exclude_the_clients_classes_keep_their_own_scores():
    prior = np.array([0.0, -np.inf, -np.inf])
    for lowest in (-np.inf, 0.1 * MASKED):
        scores = np.array([[lowest, -1.0, -2.0], [-3.0, -1.0, -2.0]])
        assert predict_with_prior(scores, prior).tolist() == [1, 0]


def test_memory_is_clients_by_classes():
    """A thousand clients that share 20,000 rows: rows of all clients would be 160 MB."""
    label = np.random.default_rng(0).integers(0, 10, 20_000)
    train = [np.arange(i, 20_000, 1_000) for i in range(1_000)]
    tracemalloc.start()
    priors = ClientPriors.of("fitted", class_counts(train, label, 10))
    for client in range(1_000):
        priors.log_prior(client)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


def test_a_sample_of_clients_without_test_rows_has_no_accuracy(monkeypatch):
    monkeypatch.setattr(loop, "MOST_SCORED", 1)  # only the first client is scored
    monkeypatch.setattr(loop, "scores_of_rows", lambda *_: np.zeros((1, 2)))
    rows = np.arange(6)
    clients = (Client("a", rows[:2], rows[4:5]), Client("b", rows[2:4], rows[5:]))
    partition = Partition("mine", {}, 0, clients, rows[4:], "d" * 64, 6, 0)
    label = torch.tensor([0, 1, 0, 1, -1, 1])  # the test row of the first client has no label
    spec = SimpleNamespace(data=SimpleNamespace(y=label, classes=2))
    out = SimpleNamespace(deployed=lambda _: "model")
    figures, _ = loop.prior_accuracy(spec, out, partition, "counts", 1.0)
    assert figures is None
