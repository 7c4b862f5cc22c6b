"""Calibration: what is called a probability says how often a prediction is right, and predictions stay the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from command import data_of, fedcache
from draws import examples
from federation import TinyClient, fitted, rows_trained, small
from homes import made_once
from hypothesis import given
from hypothesis import strategies as st
from made_path import extracted, place_of
from methods_tried import tried
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from test_saved_model import facts_of

from fedcache import FedClassifier
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.client_table import ClientTable, RowLists, Validation
from fedcache.federate.trust.pipeline import parse_policy
from fedcache.federate.trust.privacy import Privacy
from fedcache.models.calibrate import consistent_temperature, temperature_of
from fedcache.models.evaluate import bin_sums, calibration_error, fit_temperature
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import ModelFacts, collect

BOUND = 0.1
"""Largest expected calibration error of what is called a probability; 597 test rows alone give about 0.03."""

ONE_MODEL = [
    name for name, method in METHODS.items() if method.protocol(method.resolve()) == "global"
]
CLOSED = [
    name for name in ONE_MODEL if not METHODS[name].gradient and "labels" in METHODS[name].needs
]


def digits():
    """1,797 images of digits as features of two views, and text features near the class means."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(X))
    X = X[order] / 16
    y = y[order]
    views = X[:, None] + rng.normal(0, 0.1, (len(X), 2, X.shape[1]))
    means = np.stack([X[y == k].mean(0) for k in range(10)])
    text = means - means.mean(0)
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    x, texts = (torch.from_numpy(a.astype(np.float32)) for a in (views, text))
    return Data(x=x, y=torch.from_numpy(y), classes=10, widths=(64,), text=texts)


TEST = np.arange(1200, 1797)
PARTS = np.array_split(np.arange(1200), 4)


def dealt(*, validation):
    """Four clients of 300 rows; with ``validation`` every fifth row is one to choose by."""
    names = [f"client-{i}" for i in range(len(PARTS))]
    if not validation:
        return [TinyClient(name, part, TEST) for name, part in zip(names, PARTS, strict=True)]
    held = RowLists.of([part[::5] for part in PARTS])
    train = RowLists.of([np.setdiff1d(part, part[::5]) for part in PARTS])
    return ClientTable.dealt(names, train, TEST, None, Validation.of_clients(held))


def trained(name, *, validation, **words):
    """A run of a method on digits, its outcome and its data."""
    method = METHODS[name]
    data = fitted(method, digits())
    slow = bool(method.needs & {"text tower", "image tower", "pixels", "views"})
    spec = TrainingRun(method, data, dealt(validation=validation), rounds=2 if slow else 8, **words)
    return spec, run(spec, method.resolve(settings=small(name) if slow else None))


def predictor_of(spec, out):
    """The saved model of a run, with the temperature that its training fitted."""
    facts = replace(
        facts_of(out, spec.data),
        temperature=temperature_of(spec, out),
        classes=tuple(map(str, range(10))),
    )
    return Predictor((collect(out, facts, spec.data, None, []),), encoders=spec.data.towers)


def scores_of(spec, out, rows=TEST):
    """Scores [1, n, C] of rows, by default the test rows."""
    model = out.deployed(None)
    with torch.no_grad():
        return model.scores(spec.data.x[rows, 0]).double().numpy()[None]


def error_of(predictor, scores, label):
    """Expected calibration error of the probabilities of the predicted classes."""
    p = predictor.mean_probability(scores)
    return calibration_error(bin_sums(p.max(-1), p.argmax(-1) == label))


SLOW = dict.fromkeys(("flesd", "flesd-head", "tpfl-feat"), pytest.mark.slow)
CASES = [pytest.param(name, True, marks=SLOW.get(name, ())) for name in tried(ONE_MODEL)]
CASES += [pytest.param(name, False) for name in tried(CLOSED)]


@pytest.mark.parametrize(("name", "validation"), CASES)
def test_what_is_called_a_probability_says_how_often_a_prediction_is_right(name, validation):
    spec, out = trained(name, validation=validation)
    predictor = predictor_of(spec, out)
    assert predictor.calibrated
    scores = scores_of(spec, out)
    assert error_of(predictor, scores, spec.data.y.numpy()[TEST]) < BOUND
    assert np.array_equal(predictor.predicted(scores), out.evaluation.predictions)


def test_a_second_training_finds_nearly_the_temperature_of_the_test_rows():
    """Ridge regression of 400 rows of 64 features is much surer of these rows than of others."""
    few = [TinyClient(f"client-{i}", part[:100], TEST) for i, part in enumerate(PARTS)]
    spec = TrainingRun(METHODS["fed3r"], digits(), few)
    out = run(spec, METHODS["fed3r"].resolve(settings={"lam": 1e-3}))
    labels = spec.data.y.numpy()
    rows = rows_trained(few)
    best = consistent_temperature(scores_of(spec, out)[0], labels[TEST])
    seen = consistent_temperature(scores_of(spec, out, rows)[0], labels[rows])
    assert temperature_of(spec, out) == pytest.approx(best, rel=0.3)
    assert seen < 0.6 * best


def test_no_temperature_is_fitted_without_rows_that_the_model_has_not_seen():
    # a second training takes as long again
    assert temperature_of(*trained("fedavg", validation=False)) is None
    assert temperature_of(*trained("fedrep", validation=True)) is None  # a model for each client
    # labels are not read
    assert temperature_of(*trained("clip-zs", validation=False)) is None
    # 16 rows are held out
    few = [TinyClient("a", np.arange(40), TEST), TinyClient("b", np.arange(40, 80), TEST)]
    spec = replace(trained("fed3r", validation=False)[0], clients=few)
    assert temperature_of(spec, run(spec, METHODS["fed3r"].resolve())) is None


def test_a_private_run_releases_no_temperature():
    spec, out = trained("fedncm", validation=True)
    assert temperature_of(spec, out) is not None
    private = parse_policy(privacy=Privacy(bound=1.0, noise=1.0))
    assert temperature_of(replace(spec, trust=private), out) is None


def test_single_rows_with_extreme_scores_do_not_move_the_temperature():
    """Pixels that are always black have variances near 0: rows where they are not have scores of -10^6 and below."""
    X, y = load_digits(return_X_y=True)
    data = replace(
        digits(), x=torch.from_numpy(X[:, None].astype(np.float32) / 16), y=torch.from_numpy(y)
    )
    spec = TrainingRun(METHODS["gh-ofl"], data, dealt(validation=True))
    out = run(spec, METHODS["gh-ofl"].resolve())
    scores = scores_of(spec, out)
    label = y[TEST]
    predictor = predictor_of(spec, out)
    assert error_of(predictor, scores, label) < BOUND
    least = replace(predictor, temperature=fit_temperature(scores, label).value)
    assert error_of(least, scores, label) > 5 * BOUND


def test_rows_that_are_all_predicted_right_ask_for_no_temperature_of_zero():
    scores = np.array([[1.0, 0.0, -1.0]] * 30)
    found = consistent_temperature(scores, np.zeros(30, np.int64))
    assert softmax(scores[0] / found)[0] == pytest.approx(31 / 32, rel=1e-5)


@given(st.integers(0, 10_000), st.integers(20, 80), st.integers(2, 6))
@examples(20, 300)
def test_the_mean_probability_of_predictions_is_their_accuracy(seed, n, C):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, C)) * 10 ** rng.uniform(-3, 3)
    label = np.where(rng.random(n) < rng.random(), scores.argmax(-1), rng.integers(0, C, n))
    mean = softmax(scores / consistent_temperature(scores, label), -1).max(-1).mean()
    accuracy = ((scores.argmax(-1) == label).sum() + 1) / (n + 2)
    assert mean == pytest.approx(max(accuracy, 1 / C), rel=1e-3)


def test_equal_scores_have_no_temperature_that_makes_them_sure():
    assert consistent_temperature(np.zeros((30, 2)), np.zeros(30, np.int64)) is None


def test_an_ensemble_divides_by_the_geometric_mean_of_its_temperatures():
    (model,) = predictor_of(*trained("fed3r", validation=False)).members
    members = [replace(model, facts=replace(model.facts, temperature=t)) for t in (0.1, 0.4)]
    assert Predictor(tuple(members)).softmax_temperature == pytest.approx(0.2)
    assert Predictor(tuple(members), temperature=3.0).softmax_temperature == 3.0
    facts = model.facts.to_dict()
    del facts["temperature"]  # of an earlier release
    assert not Predictor((members[0], replace(model, facts=ModelFacts.from_dict(facts)))).calibrated


def test_probabilities_of_a_scikit_learn_classifier_are_calibrated():
    X, y = load_digits(return_X_y=True)
    X, rest, y, truth = train_test_split(X, y, test_size=0.4, random_state=0)
    found = FedClassifier().fit(X, y)
    p = found.predict_proba(rest)
    assert calibration_error(bin_sums(p.max(1), p.argmax(1) == truth)) < BOUND
    plain = FedClassifier(temperature=1.0).fit(X, y)
    assert np.array_equal(plain.decision_function(rest), found.decision_function(rest))


@made_once
def store(place):
    return extracted(place, train=40, test=10, classes=6)


IID = "--scheme iid --clients 3"


@pytest.mark.parametrize("words", ["fed3r", "fedavg --rounds 2 --validation 0.2"])
def test_predict_and_evaluate_divide_by_the_fitted_temperature(store, words):
    run = place_of(f"train {words} {IID}")
    rows = f"{run} --store {store} --split test"
    found = data_of(f"predict {rows}")
    assert found["calibrated"]
    (figures,) = data_of(f"evaluate {rows}")["runs"]
    temperature = figures["softmax_temperature"]
    assert temperature != 1.0
    assert data_of(f"predict {rows} --temperature {temperature}")["rows"] == found["rows"]


@pytest.mark.parametrize(
    "words",
    [
        "fedavg --rounds 2",
        "fed3r --dp-clip 1 --dp-noise 0.1 --dp-allow evaluation,rows,statistics --validation 0.2",
    ],
)
def test_what_is_not_calibrated_is_called_a_score(store, words):
    rows = f"{place_of(f'train {words} {IID}')} --store {store}"
    found = fedcache(f"predict {rows}").out
    assert "score" in found
    assert "probability" not in found
    assert not data_of(f"predict {rows}")["calibrated"]
