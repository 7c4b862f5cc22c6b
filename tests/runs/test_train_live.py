"""Methods with live towers from the command line: which images, which weights, and what is refused."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from command import data_of, fedcache, ok
from homes import made_once
from made_path import place_of
from pictures import folder

from fedcache.store.store import Store

SMALL = "--batch 4 --chunk-rows 8 --workers 0"
IID = "--scheme iid --clients 2 --participation all --rounds 2"
ONE = "--set epochs=1"  # each step runs a tower


def extracted(place):
    """Three classes with features and text features of glyph-clip, and no images yet."""
    images = folder(place / "shapes", train=8)
    return place_of(f"extract --dataset folder:{images} --backbones glyph-clip {SMALL}")


store = made_once(extracted)


def refused(line):
    """Exit code, message and hint."""
    error = (done := fedcache(f"{line} {IID} --json")).error
    return done.code, error["message"], error["hint"]


@pytest.mark.slow
def test_images_that_are_missing_come_by_the_command_that_is_named(store):
    code, message, hint = refused("train --method tpfl")
    assert code == 4
    assert "has none" in message
    ok(f"extract --store {store} --backbones pixels --recipe pixels:size=24 {SMALL}")
    assert "has pixels@24" in refused("train --method tpfl")[1]
    ok(*shlex.split(hint)[1:])
    done = data_of(f"train --method tpfl {IID} {ONE} --backbones glyph-clip,pixels")
    assert done["backbones"] == ["glyph-clip", "pixels"]
    assert done["fidelity"] == "exact"
    assert done["traffic"]["paper"]["per_client_round"]["up"] == 16 * 128 + 6 * 4 * (64 - 8)
    again = data_of("train --config", Path(done["path"]) / "config.toml")
    assert again["accuracy"] == done["accuracy"]


@pytest.mark.slow
def test_nothing_extracted_brings_tower_and_images(tmp_path):
    images = folder(tmp_path / "shapes", train=4, test=2)
    # Nothing is extracted unless backbones are named.
    code, _, hint = refused(f"train --method atpfl --dataset folder:{images}")
    assert code == 4
    assert hint.endswith(
        "--backbones glyph-clip,pixels --recipe pixels:size=32 --recipe pixels:resize=squash"
    )
    named = "--backbones glyph-clip"
    done = data_of(f"train --method atpfl --dataset folder:{images} {named} {IID} {ONE}")
    held = Store.open(next((tmp_path / "home/stores").glob("*.zarr")))
    assert {k.split("-")[0] for k in held.arrays} == {"glyph", "pixels"}
    assert done["backbones"] == ["glyph-clip", "pixels"]


@pytest.mark.slow
def test_methods_that_ask_the_text_tower_train_and_predict(store):
    for words, whose in (
        ("tofa", "--client client-1"),
        (f"fedtpg {ONE}", ""),
        (f"pfedprompt {ONE}", "--client client-1"),
    ):
        done = data_of(f"train --method {words} {IID}")
        assert done["accuracy"]["zero_shot"] is not None
        assert len(data_of(f"predict {done['path']} --store {store} {whose}")["rows"]) > 0


def test_prompts_that_do_not_fit_are_exit_2(store):
    longest = max(Store.open(store).samples.classes, key=len)
    code, message, hint = refused("train --method promptfl --set n_ctx=46")
    assert code == 2
    assert repr(longest) in message
    assert f"n_ctx={48 - 2 - len(longest) - 1}" in hint  # the template ends with a full stop


def test_features_of_other_weights_are_exit_6(store, monkeypatch):
    from fedcache.extract import backbones

    located = backbones.locate

    def other(row, **where):
        found = located(row, **where)  # type: ignore[arg-type]
        return backbones.Weights(found.path, "f" * 64, found.origin)

    monkeypatch.setattr(backbones, "locate", other)
    code, message, _ = refused("train --method promptfl")
    assert code == 6
    assert "ffffffffffff" in message


def test_live_features_are_the_cached_ones(store):
    # T-T2: against the float16 cache to 1e-3 in logits / 100.
    import torch

    from fedcache.config import Home
    from fedcache.federate.methods import METHODS
    from fedcache.runs.features import encoders_of_run, read_images
    from fedcache.runs.store_choice import images_for

    recipe = "pixels:size=32,pixels:resize=squash"
    ok(f"extract --store {store} --backbones pixels --recipe {recipe} {SMALL}")
    held = Store.open(store)
    key = next(k for k in held.arrays if k.startswith("glyph"))
    encoders = encoders_of_run(METHODS["tpfl"], held, key, Home.from_environment())
    pixels = read_images(held, [images_for(held, key)]).data.x.view(-1, 32, 32, 3)
    tower = encoders.towers.image
    live = tower.encode(tower.normalise(pixels))
    cached = held.reader(key).all()[:, 0].astype(np.float32)
    cached /= np.linalg.norm(cached, axis=-1, keepdims=True)
    text = torch.from_numpy(held.text("glyph-clip").copy())
    assert float((live @ text.T - torch.from_numpy(cached) @ text.T).abs().max()) < 1e-3
