"""FedClassifier beside scikit-learn: its own checks, its tools, and the same models as the engine's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import FULL
from methods_tried import changed_methods, tried
from refusal import refused
from sent import sent
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedcache as fc
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.client_table import Client
from fedcache.models.fed_classifier import FedClassifier

ON_FEATURES = sorted(name for name, m in METHODS.items() if not m.reads(m.resolve()) - {"labels"})
FAST = {"epochs": 1, "dim": 8}


def small(name):
    declared = {h.name for h in METHODS[name].hparams}
    return {k: v for k, v in FAST.items() if k in declared}


@pytest.fixture(scope="module")
def digits():
    """Training and test rows, training and test labels."""
    X, y = load_digits(return_X_y=True)
    return train_test_split(X / 16.0, y, test_size=0.3, random_state=0)


ONE_MODEL = [
    name for name in ON_FEATURES if METHODS[name].protocol(METHODS[name].resolve()) == "global"
]
"""Methods that train one model for all clients. The others cannot predict a row without the name of its client."""
ROUNDS = {"fedntd": 500}
"""Where the rounds of the paper are too few to learn the small data of three checks."""
TRAINED = [name for name in ONE_MODEL if METHODS[name].gradient]
DRAWN = TRAINED if FULL else sorted(changed_methods() & {*TRAINED})


@parametrize_with_checks([FedClassifier()])  # no check is exempted
def test_every_check_of_scikit_learn_passes(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([FedClassifier(name, rounds=ROUNDS.get(name)) for name in DRAWN])
def test_every_check_passes_for_methods_that_train(estimator, check):
    check(estimator)


def test_small_data_has_fewer_clients_unless_told_otherwise():
    X, y = load_digits(return_X_y=True)
    for rows, clients in ((30, 1), (100, 5), (400, 10)):
        assert len(FedClassifier("fedncm").fit(X[:rows], y[:rows]).clients_) == clients


def test_the_default_learns_digits_and_any_deal_of_rows_gives_its_model(digits):
    X, other, y, labels = digits
    first = FedClassifier().fit(X, y)
    assert first.score(other, labels) > 0.91
    how = {"scheme": "dirichlet", "scheme_options": {"alpha": 0.1}, "clients": 5}
    skewed = FedClassifier(**how, random_state=1).fit(X, y)
    by_label = FedClassifier().fit(X, y, groups=[f"site {c}" for c in y])
    for same in (skewed, by_label):  # ridge from summed statistics is exact for every partition
        assert np.allclose(same.decision_function(other), first.decision_function(other), atol=1e-4)


def test_a_setting_that_follows_from_the_rounds_is_that_of_a_run(digits):
    X, _, y, _ = digits
    with_default = FedClassifier("ccvr", rounds=2, clients=3).fit(X, y)
    given = FedClassifier("ccvr", {"calibrate_at": 2}, rounds=2, clients=3).fit(X, y)
    assert np.array_equal(with_default.decision_function(X), given.decision_function(X))


@pytest.mark.parametrize("name", tried(ON_FEATURES))
def test_every_method_on_features_fits_and_predicts_its_own_labels(name):
    X, y = load_digits(return_X_y=True)
    X = X[y < 3][:90] / 16.0
    y = np.array(["nought", "one", "two"])[y[y < 3][:90]]
    groups = np.arange(90) % 3
    found = FedClassifier(name, small(name), rounds=2).fit(X, y, groups=groups)
    given = groups if found.model_.facts.personal else None
    assert set(found.predict(X, given)) <= {"nought", "one", "two"}
    assert np.allclose(found.predict_proba(X, given).sum(1), 1.0)
    assert found.decision_function(X, given).shape == (90, 3)


def no_fit(said, *args, **options):
    """Such a classifier refuses to be fitted with these words."""
    refused(lambda: FedClassifier(*args, **options).fit(np.eye(4), [0, 1, 0, 1]), said)


@pytest.mark.parametrize("name", tried(sorted(set(METHODS) - set(ON_FEATURES))))
def test_a_method_that_reads_more_than_features_is_refused_by_name(name):
    no_fit(f"{name} also needs", name)


@pytest.mark.parametrize("clients", [0, -1])
def test_a_number_of_clients_below_one_is_refused(clients):
    no_fit(f"is {clients}", clients=clients)


def test_a_temperature_of_zero_is_refused():
    no_fit("temperature", temperature=0.0)


def test_it_predicts_what_the_engine_predicts():
    X, y = load_digits(return_X_y=True)
    X = X / 16.0
    settings = small("fedavg")
    method = METHODS["fedavg"]
    found = FedClassifier("fedavg", settings, 3, participation=0.5, clients=4, random_state=7)
    found.fit(X, y)
    clients = [
        Client(f"client-{i}", np.sort(c.train), np.empty(0, np.int64))
        for i, c in enumerate(found._assigned_clients(y, 7))
    ]
    x = torch.from_numpy(X.astype(np.float32))[:, None]
    data = Data(x, torch.from_numpy(y), 10, widths=(64,))
    out = run(TrainingRun(method, data, clients, 3, 0.5, 7), method.resolve("paper", settings))
    assert np.array_equal(out.predict(data.x).numpy(), found.predict(X))


def test_a_pickle_and_a_saved_model_say_the_same(digits, tmp_path):
    X, other, y, _ = digits
    found = FedClassifier(settings={"feat_post": "standardize"}).fit(X, y)
    assert np.array_equal(sent(found).predict(other), found.predict(other))
    found.model_.save(tmp_path / "m.safetensors")
    loaded = fc.load_model(tmp_path / "m.safetensors")
    assert np.array_equal(loaded.scores(other.astype(np.float32)), found.decision_function(other))


def test_a_personal_method_asks_whose_model_and_a_method_of_ones_own_is_taken():
    X, y = load_digits(return_X_y=True)
    X = X[:120] / 16.0
    y = y[:120]
    found = FedClassifier("solo", small("solo"), 2).fit(X, y, groups=np.arange(120) % 2)
    refused(lambda: found.predict(X), "groups")
    named, own = (
        FedClassifier(method).fit(X, y).predict(X)
        for method in ("fedncm", replace(METHODS["fedncm"], name="mine"))
    )
    assert np.array_equal(own, named)


@pytest.mark.parametrize("missing", [None, np.datetime64("NaT")])
def test_a_row_of_no_client_is_refused(missing):
    X = np.eye(4)
    y = [0, 1, 0, 1]
    groups = ["a", "nan", missing, "b"]
    solo = FedClassifier("solo", small("solo"), 1)
    refused(lambda: solo.fit(X, y, groups=groups), "row 2")
    solo.fit(X, y, groups=["a", "nan", "a", "nan"])  # a word is a name
    refused(lambda: solo.predict(X, groups=groups), "row 2")


def test_nothing_is_written(own_home):
    FedClassifier().fit(np.eye(4), [0, 1, 0, 1]).predict(np.eye(4))
    assert not own_home.exists() or not any(own_home.iterdir())
