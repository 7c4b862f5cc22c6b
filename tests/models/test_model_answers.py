"""What loading, predicting and exporting a model answer where something is missing, damaged or stopped."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import ok
from pictures import folder

import fedcache as fc
from fedcache.config import ExtractConfig, Home
from fedcache.errors import CorruptionError, StoppedError, UsageError
from fedcache.models.request import ModelOptions, PredictOptions
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs.predict_run import open_predictor, predict_rows


def trained(place: Path) -> Path:
    """Photos, and a head that was trained on them."""
    images = folder(place / "shapes", train=6, test=4)
    ok("extract", "-d", f"folder:{images}", "-b", "random-projection", "--size", 8, "--workers", 0)
    return Path(ok("train", "--method", "fed3r", "--scheme", "iid", "--clients", 2).data["path"])


@pytest.fixture
def run(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(trained)


def test_a_model_is_loaded_by_the_first_letters_of_its_run(run: Path) -> None:
    assert fc.load_model(run.name[:6]).classes == fc.load_model(run).classes
    with pytest.raises(UsageError, match="zz"):
        fc.load_model("zz")
    nothing: Any = None
    with pytest.raises(UsageError, match="a NoneType was given"):
        fc.load_model(nothing)


def test_a_damaged_list_of_models_names_the_command_that_makes_it_again(run: Path) -> None:
    index = run / "models" / "models.json"
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(CorruptionError, match=r"models\.json") as caught:
        fc.load_model(run)
    assert caught.value.hint.endswith(
        shlex.join(["fedcache", "train", "--config", str(run / "config.toml"), "--fresh"])
    )


def test_a_stopped_prediction_promises_nothing_that_is_kept(run: Path, tmp_path: Path) -> None:
    images, stop = folder(tmp_path / "new", train=2, test=1), Stop()
    stop.ask()
    home, config = Home.from_environment(), ExtractConfig(workers=0)
    predictor = open_predictor(run, ModelOptions(), home, Silent())
    with pytest.raises(StoppedError, match="predict keeps no part of an answer") as caught:
        list(predict_rows(predictor, [images], ModelOptions(), PredictOptions(), config, home, Silent(), stop))
    assert caught.value.hint == "Run the same command again: it begins anew."


@pytest.mark.slow
def test_the_card_says_by_what_scores_are_divided(run: Path, tmp_path: Path) -> None:
    ok("export-model", run, "-o", tmp_path / "cold", "--temperature", 0.25)
    ok("export-model", run, "-o", tmp_path / "plain")
    said = "Probabilities: softmax of the scores divided by 0.25, as --temperature asked for."
    assert said in (tmp_path / "cold" / "README.md").read_text()
    plain = (tmp_path / "plain" / "README.md").read_text()
    assert "Outputs called probabilities are the softmax of the scores. They are not calibrated." in plain
