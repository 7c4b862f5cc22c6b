"""Model files of values that no model has: the file is said to be wrong, and not the images or this version."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from command import Done, fedcache, ok, words_of
from torch import Tensor

from fedcache.errors import Exit
from fedcache.models.saved_model import KIND
from fedcache.store.sealed import read_sealed, write_sealed

AGAIN = "Get the file again from whoever made it"


class Made(NamedTuple):
    """A model, and the store that it reads."""

    model: Path
    store: Path


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    images = np.random.default_rng(0).integers(0, 255, (30, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "m.npz", images=images, labels=np.arange(30) % 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCACHE_HOME", str(folder / "home"))
        spec = f"arrays:{folder / 'm.npz'}"
        backbone = "random-projection:16"
        store = ok("extract --workers 0", "--dataset", spec, "--backbones", backbone).data["path"]
        words = (*words_of("--rounds 1 --scheme iid --clients 2"), "--store", store)
        run = Path(ok("train fedavg", *words).data["path"])
    (model,) = (run / "models").glob("*.safetensors")
    return Made(model, Path(store))


def predict(
    good: Made, path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]
) -> Done:
    """What predict says of a model that was changed and sealed again, as anybody can."""
    held = read_sealed(good.model, KIND)
    assert held is not None
    facts = copy.deepcopy(held.content)
    tensors = dict(held.tensors)
    change(facts, tensors)
    write_sealed(path, KIND, facts, tensors)
    return fedcache("predict", path, "--store", good.store)


def test_a_model_that_was_not_changed_predicts(good, tmp_path):
    assert predict(good, tmp_path / "m.safetensors", lambda facts, tensors: None).code == 0


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_the_fault_of_the_model(good, tmp_path, number):
    def change(facts, tensors):
        for name, tensor in tensors.items():
            if name.startswith("server/"):
                tensors[name] = torch.full_like(tensor, number)

    done = predict(good, tmp_path / "m.safetensors", change)
    assert done.code == Exit.STORE
    assert "holds numbers that are not finite" in done.err
    assert AGAIN in done.err


@pytest.mark.parametrize("number", [-2, None, True, [2]])
def test_a_format_that_no_version_has_is_no_reason_to_upgrade(good, tmp_path, number):
    done = predict(
        good, tmp_path / "m.safetensors", lambda facts, tensors: facts.update(format=number)
    )
    assert done.code == Exit.STORE
    assert AGAIN in done.err
    assert "Upgrade" not in done.err


def test_fields_that_no_model_has_are_the_fault_of_the_file(good, tmp_path):
    path = tmp_path / "m.safetensors"
    for done in (
        predict(good, path, lambda facts, tensors: facts.update(zoom=2)),
        predict(good, path, lambda facts, tensors: facts["recipes"][0].update(zoom=2)),
    ):
        assert done.code == Exit.STORE
        assert "zoom" in done.err
        assert AGAIN in done.err
        assert "in the store" not in done.err
