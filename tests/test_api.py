"""The Python API, as the README shows it."""

import copy
import inspect
import re
import subprocess
import sys

import numpy as np
import pytest
from command import python
from pictures import folder
from refusal import refused, store_error
from sent import sent
from sklearn.linear_model import Ridge

import fedcache as fc
from fedcache.calls.keywords import as_keywords
from fedcache.config import ExtractConfig, TrainConfig


def test_the_whole_job_in_ten_lines(tmp_path):
    images = folder(tmp_path / "shapes", train=8, test=3, classes=6)
    store = fc.extract(f"folder:{images}", backbones=["random-projection"], size=16, workers=0)
    parts = fc.partition(store, "dirichlet", clients=3, alpha=0.5, seed=0)
    run = fc.train("fed3r", store, parts)
    # Fed3R sums the statistics of a ridge regression, so the clients together are one regression on all their rows.
    X, y = store.Xy()
    lam = run.result["diagnostics"]["lam"]
    ridge = Ridge(lam, fit_intercept=False).fit(X.astype(np.float64), np.eye(6)[y])
    unseen, truth = store.Xy(split="test")
    right = np.mean(ridge.predict(unseen).argmax(1) == truth)
    assert run.accuracy["mean"] == right == pytest.approx(17 / 18)
    assert run.traffic["exact"]["up_bytes"] > 0
    assert "mean" in run.fairness
    assert copy.copy(run.accuracy) == sent(run.accuracy) == run.accuracy
    grid = fc.grid("fedavg", store, parts, seeds=range(2), lr=[0.1, 0.01], options={"rounds": 2})
    assert len(grid.points) == 4 - 2
    best = max(p.run.accuracy["mean"] for p in grid.points)
    assert grid.best().run.accuracy["mean"] == pytest.approx(best)
    assert len(list(fc.shard(store, parts).glob("*.zarr"))) == 3


PUBLIC = {
    "Extraction",
    "FedClassifier",
    "FedcacheError",
    "Grid",
    "Method",
    "Model",
    "Partition",
    "Recipe",
    "Round",
    "Run",
    "Store",
    "__version__",
    "backbone",
    "compare",
    "evaluate",
    "extract",
    "forget",
    "grid",
    "ingest",
    "join",
    "load_model",
    "partition",
    "personalise",
    "register",
    "report",
    "shard",
    "train",
}
FUNCTIONS = [
    getattr(fc, name) for name in sorted(PUBLIC) if name.islower() and name != "__version__"
]


def test_completion_shows_the_public_names():
    assert set(dir(fc)) == set(fc.__all__) == PUBLIC
    assert all(getattr(fc, name) is not None for name in PUBLIC)


def test_a_function_is_a_function_with_a_signature_and_a_docstring():
    for function in FUNCTIONS:
        assert inspect.isfunction(function)
        parameters = inspect.signature(function).parameters
        assert all(p.annotation is not inspect.Parameter.empty for p in parameters.values())
        said = (inspect.getdoc(function) or "").partition("Args:")[2]
        assert [name for name in parameters if not re.search(rf"\b{name}\b", said)] == [], function


def test_train_has_an_argument_for_every_option_of_the_command():
    fields = set(TrainConfig.__dataclass_fields__) - {"store", "partition", "set", "execution"}
    assert fields | {"parts", "settings", "execution"} <= set(
        inspect.signature(fc.train).parameters
    )
    assert set(ExtractConfig.__dataclass_fields__) <= set(inspect.signature(fc.extract).parameters)


@pytest.mark.parametrize(
    "first", ["fedcache.extract.recipe", "fedcache.api", "fedcache.extract.backbones"]
)
def test_functions_stay_functions_after_every_import(first):
    code = (
        f"import {first}\nimport sys, inspect, fedcache as fc\n"
        "assert not {'torch', 'numpy'} & set(sys.modules) or 'backbones' in sys.argv[1]\n"
        "import fedcache.extract.planning, fedcache.report.methods\n"
        "from fedcache.extract import recipe\nfrom fedcache.progress import percent\n"
        "assert inspect.isfunction(fc.extract) and inspect.isfunction(fc.report)\n"
    )
    python(code, first)


def test_options_are_told_as_keywords_and_commands_as_they_are():
    for told, in_python in TOLD.items():
        assert as_keywords(told, lambda name: name != "elsewhere") == in_python


def test_an_error_of_a_function_names_keywords(tmp_path):
    store = fc.Store.from_arrays({"mine": np.eye(12)}, labels=LABELS, path=tmp_path / "s.zarr")
    caught = refused(
        lambda: fc.grid("fedncm", store, fc.partition(store, "iid", clients=2), retrain=True)
    )
    assert caught.hint.endswith("validation=0.2")
    run = fc.train("fedncm", store, fc.partition(store, "iid", clients=2))
    refused(lambda: fc.personalise(run, store, lr=0.1), "lr")


@pytest.mark.slow
def test_a_script_without_a_guard_extracts_once(tmp_path):
    """Spawned workers import the caller's script; ours must not run it again."""
    images = folder(tmp_path / "shapes", train=150, test=10)
    script = tmp_path / "script.py"
    script.write_text(
        "import fedcache as fc\n"
        f"print(fc.extract('folder:{images}', backbones=['random-projection'], workers=2, batch=16).rows)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["480"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fc.train(3), "method name"),
        (lambda: fc.train("fedavg", parts=5), "a partition"),
        (lambda: fc.train("fedavg", rounds="two"), "rounds in train() is 'two'"),
        (lambda: fc.train("fedavg", rouns=3), "rounds"),
        (lambda: fc.grid([3]), "method is 3"),
        (lambda: fc.grid("fed3r", hold_out="each", by=["a", "b"]), "one column"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(own_home, call, said):
    refused(call, said)
    assert not (own_home / "runs").exists()


def test_an_unknown_option_may_be_a_hyperparameter():
    caught = refused(lambda: fc.train("fedavg", momentum=0.5), "'momentum'")
    assert caught.hint.startswith("settings={'momentum': 0.5}")


GUESSES = [
    (lambda: fc.train("fed3r", lam=10), "settings={'lam': 10}"),
    (lambda: fc.train("fed3r", scheme="dirichlet"), "parts=fc.partition(store, scheme="),
    (lambda: fc.train("fed3r", by="hospital"), "parts=fc.partition(store, by="),
    (
        lambda: fc.ingest(np.zeros((4, 2)), [0, 1, 0, 1]),
        "fc.Store.from_arrays({'mine': X}, labels=y",
    ),
]


@pytest.mark.parametrize(("call", "hint"), GUESSES)
def test_a_guess_is_answered_with_the_call_that_works(call, hint):
    assert len(refused(call, hint).hint.splitlines()) == 1


def test_a_store_is_opened_by_the_name_of_its_dataset():
    made = fc.Store.from_arrays({"mine": np.eye(12)}, labels=LABELS, name="plain")
    for name in ("plain", made.path.name, made.path.stem):
        assert fc.Store.open(name).path == made.path
    store_error(lambda: fc.Store.open("other"), "other does not exist")


def test_the_default_name_of_arrays_is_a_usable_one():
    names = ["timm:resnet50", *(f"hf:someone/model-{i}@main" for i in range(9))]
    made = fc.Store.from_arrays(dict.fromkeys(names, np.eye(12)), labels=LABELS)
    assert made.path.name.startswith("timm_resnet50-hf_someone_model-0_main-")
    assert len(made.arrays) == len(names)


LABELS = [0, 1] * 6
TOLD = {
    "Take some out:  --validation 0.2": "Take some out:  validation=0.2",
    "--set lr=0.1": "settings={'lr': 0.1}",
    "One column:  --by 'two words' --fresh": "One column:  by='two words' fresh=True",
    "fed3r needs only one round; --rounds 5 has no effect.": "fed3r needs only one round; rounds 5 has no effect.",
    "fedcache partition --min-rows 3": "fedcache partition --min-rows 3",
    "Another:  --elsewhere 3, a - b, x--y": "Another:  --elsewhere 3, a - b, x--y",
}
