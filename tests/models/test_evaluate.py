"""Figures of labelled rows: against scikit-learn, by hand, and with what may not be scored left out."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from refusal import store_error
from scipy.special import softmax
from sklearn.metrics import confusion_matrix, f1_score, log_loss, precision_recall_fscore_support

from fedcache.heads.losses import MASKED
from fedcache.models import evaluate
from fedcache.models.evaluate import (
    BINS,
    LabelledRows,
    LeftOutRows,
    RightRows,
    calibration_error,
    fit_temperature,
    matched,
    measure,
    measure_clients,
)
from fedcache.models.predictor import Predictor, rows_of_split


class Fixed(Predictor):
    """A predictor whose scores are given."""

    def __init__(self, classes):
        members = (SimpleNamespace(facts=SimpleNamespace(classes=classes, temperature=None)),)
        super().__init__(members)


class Given(LabelledRows):
    """Rows whose scores are known, in blocks of seven."""

    def scores(self, predictor):
        for start in range(0, self.source.shape[1], 7):
            yield self.source[:, start : start + 7]


def given_rows(scores, label, domain=None, kind=Given):
    n = len(label)
    domain = np.zeros(n, np.int64) if domain is None else domain
    return kind("r", np.arange(n), label, domain, ("d0", "d1"), LeftOutRows(), scores)


def measured(scores, label, domain=None):
    """Figures of a model of the classes a, b, c ... whose scores are known."""
    return measure(Fixed("abcde"[: scores.shape[2]]), given_rows(scores, label, domain))


def drawn(seed, n=60, C=4, members=1):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, C, n)
    scores = rng.normal(size=(members, n, C)) * 2
    scores[:, np.arange(n), label] += 1.5
    return scores, label, rng.integers(0, 2, n)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 5))
@examples(20, 300)
def test_figures_are_those_of_scikit_learn(seed, n, C):
    scores, label, domain = drawn(seed, n, C)
    m = measured(scores, label, domain)
    p = softmax(scores[0], -1)
    guess = scores[0].argmax(-1)
    assert m.all.accuracy == (guess == label).mean()
    there = np.unique(label)
    assert m.macro_f1 == pytest.approx(
        f1_score(label, guess, average="macro", labels=there, zero_division=0)
    )
    assert m.nll == pytest.approx(log_loss(label, p, labels=range(C)))
    found = precision_recall_fscore_support(label, guess, labels=there, zero_division=0)
    for c, *wanted in zip(m.by_class, *found, strict=True):
        assert [c.precision or 0.0, c.recall, c.f1, c.rows] == pytest.approx(wanted)
    table = np.zeros((C, C), int)
    for truth, predicted, rows in m.confusion:
        table["abcde".index(truth), "abcde".index(predicted)] = rows
    assert np.array_equal(table, confusion_matrix(label, guess, labels=range(C)))


def test_calibration_error_by_hand():
    """Two rows in (13/15, 14/15] at 0.9, one right; one row at 1.0, right: 2/3 |0.5 - 0.9| + 1/3 |1 - 1| = 4/15."""
    p = np.array([[0.9, 0.1], [0.9, 0.1], [1 - 1e-15, 1e-15]])
    m = measured(np.log(p)[None], np.array([0, 1, 0]))
    assert m.ece == pytest.approx(4 / 15)
    assert m.bins[:13] == ((0, 0.0, 0.0),) * 13
    assert m.bins[13:] == ((2, pytest.approx(0.9), 0.5), (1, pytest.approx(1.0), 1.0))
    assert np.isnan(calibration_error(np.zeros((BINS, 3))))


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 3))
@examples(10, 100)
def test_no_temperature_has_less_nll_than_the_fitted_one(seed, members):
    scores, label, _ = drawn(seed, members=members)
    t = fit_temperature(scores, label)
    assert t is not None

    def nll(value):
        return log_loss(label, softmax(scores / value, -1).mean(0), labels=range(4))

    assert t.nll == pytest.approx(nll(t.value))
    for other in np.geomspace(0.05, 50, 40):
        assert t.nll <= nll(other) + 1e-9
    assert measured(scores, label).temperature == t


@pytest.mark.parametrize("absent", [MASKED, MASKED / 5])
def test_a_class_that_is_never_predicted_has_probability_0(absent):
    """Two rows of class 0 with p = 1/2 each, and one of class 2, which the model does not know; log 2 without it."""
    scores = np.array([[[0.0, 0.0, absent]] * 3])
    with_it = measured(scores, np.array([0, 0, 2]))
    assert with_it.nll == np.inf
    assert with_it.temperature is None
    assert measured(scores[:, :2], np.array([0, 0])).nll == pytest.approx(np.log(2))
    # Where no class is known all are as likely.
    assert measured(np.full((1, 1, 2), absent), np.array([0])).nll == np.log(2)


def test_a_temperature_undoes_a_scale():
    scores, label, _ = drawn(3)
    plain = fit_temperature(scores, label)
    hot = fit_temperature(scores * 100, label)
    assert hot.value == pytest.approx(100 * plain.value, rel=1e-3)
    assert not hot.at_limit


def test_classes_are_matched_by_name_and_what_is_not_scored_is_counted():
    label = np.array([-1] * 10 + [0, 1, 2, 2, -1, 0, 1])
    readable = np.array([1, 1, 1, 1, 1, 0, 1], bool)
    codes = (label, np.zeros(17, np.int64))
    names = (("dog", "cat", "emu"), ("one",))
    rows = matched("r", np.arange(10, 17), codes, readable, names, ("cat", "cow", "dog"), [])
    assert rows.rows.tolist() == [10, 11, 16]
    assert rows.label.tolist() == [2, 0, 0]
    assert rows.left_out == LeftOutRows(unlabelled=1, unreadable=1, unknown={"emu": 2})
    store_error(
        lambda: matched("r", np.arange(10, 17), codes, readable, names, ("cow",), []), "cow"
    )


def test_rows_without_a_score_are_counted_and_not_right():
    m = measured(np.array([[[1.0, 0.0], [np.nan, np.nan], [0.0, 1.0]]]), np.array([0, 0, 0]))
    assert m.all.rows == 2
    assert m.all.right == 1
    assert m.unscored == 1
    assert m.temperature is not None
    assert m.temperature.rows == 2


def test_of_more_scores_than_are_kept_every_third_fits_the_temperature(monkeypatch):
    scores, label, _ = drawn(5)
    scores[:, [6, 7]] = np.nan  # rows 0, 3, 6 ... are kept; of the two without a score it is one
    whole = measured(scores, label)
    monkeypatch.setattr(evaluate, "MOST_KEPT", 8 * 60 * 4 // 3)
    found = measured(scores, label)
    kept = np.setdiff1d(np.arange(0, 60, 3), [6])
    assert found.temperature == fit_temperature(scores[:, kept], label[kept])
    assert found.temperature.rows == 19
    assert whole.temperature.rows == 58


def test_clients_models_are_counted_together_and_their_accuracies_apart():
    (first, label, domain), (second, *_) = drawn(1), drawn(2)
    one = measured(first, label, domain)
    other = measured(second, label, domain)
    pending = iter((first, second))

    class Turns(Given):
        def scores(self, predictor):
            yield next(pending)

    turns = given_rows(first, label, domain, kind=Turns)
    both, spread = measure_clients([("x", Fixed("abcd")), ("y", Fixed("abcd"))], turns)
    assert spread.clients == {"x": one.all.accuracy, "y": other.all.accuracy}
    assert both.all.rows == 120
    assert both.all.accuracy == pytest.approx(spread.mean)
    assert both.all.interval is None  # rows that several models predict are not independent
    for mean in ("macro_f1", "nll", "ece"):
        assert getattr(both, mean) == pytest.approx((getattr(one, mean) + getattr(other, mean)) / 2)
    for (n, c, r), (m, d, t), (total, confidence, right) in zip(
        one.bins, other.bins, both.bins, strict=True
    ):
        assert total == n + m
        assert confidence * total == pytest.approx(n * c + m * d)
        assert right * total == pytest.approx(n * r + m * t)


def test_an_interval_is_of_the_rows_of_one_model():
    assert evaluate.right_rows(np.zeros(0, bool)) == RightRows(0, 0)

    found = evaluate.right_rows(np.array([True] * 8 + [False] * 2))
    assert found.interval == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson 1927, by hand


def test_a_store_whose_images_have_all_vanished_is_not_a_matter_of_splits():
    store = SimpleNamespace(path=Path("mine.zarr"), vanished=lambda: np.ones(3, bool))
    hint = store_error(lambda: rows_of_split(store, "all"), "still in the dataset").hint
    assert "--split" not in hint
