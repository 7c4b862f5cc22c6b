"""Which arrays of a store a run trains on, from stores that are only lists of arrays here."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from heard import Heard
from refusal import refused, store_error

from fedcache.config import TrainConfig
from fedcache.federate.methods import METHODS
from fedcache.runs.store_choice import (
    array_name,
    arrays_for,
    chosen_arrays,
    common_arrays,
    feat_post_for,
    image_array,
)
from fedcache.store.manifest import ArrayInfo


def shelf(*keys, text=(), name="s.zarr", **recipes):
    """An ingested store with arrays ``backbone@size/variant``; those of pixels hold images.

    ``text`` names the backbones with text features.
    """
    arrays = {}
    for key in keys:
        backbone, _, size = key.partition("/")[0].partition("@")
        recipe = {"backbone": backbone, "size": int(size or 0)}
        kind = "uint8" if backbone == "pixels" else "float16"
        arrays[key] = ArrayInfo(recipe | recipes.get(backbone, {}), {}, (9, 1, 4), kind, 8, (0, 0))
    return SimpleNamespace(
        arrays=arrays,
        address=None,
        path=Path(name),
        dataset={"slug": "mine", "source": "ingested", "digest": "d"},
        has_text=lambda backbone: backbone in text,
    )


SEVERAL = ("a@16", "b@32", "a@24/x", "c@8/1", "c@8/2", "pixels@32")


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ((), ["a@16", "b@32", "c@8/1"]),
        (("a@24", "b", "a@16"), ["a@24/x", "b@32", "a@16"]),
        (("c@8/2", "b@32", "b"), ["c@8/2", "b@32"]),
    ],
)
def test_backbones_are_named_by_name_size_or_key(names, keys):
    store = shelf(*SEVERAL) if names else shelf("a@16", "b@32", "pixels@8", "c@8/1")
    assert chosen_arrays(store, names) == keys


def test_a_name_of_several_or_of_no_array_is_refused_with_those_there_are():
    store = shelf(*SEVERAL)
    for names in (["b", "a"], []):
        error = refused(lambda names=names: chosen_arrays(store, names), "'a' matches 2")
        assert error.hint.endswith("--backbones: a@16, a@24")
    error = refused(lambda: chosen_arrays(store, ["c@8"]), "'c@8' matches 2")
    assert error.hint.endswith("c@8/1 (width 4), c@8/2 (width 4)")
    store_error(lambda: chosen_arrays(store, ["d@9"]), "'d@9'; it has a@16, b@32")


def test_a_sized_name_means_the_plain_array_and_views_are_named_by_their_key():
    store = shelf("a@16/plain", "a@16/views", "a@24")
    views = store.arrays["a@16/views"]
    drawn = {**views.recipe, "views": 4, "decoder": "pillow"}
    store.arrays["a@16/plain"] = replace(views, recipe={**drawn, "views": 1})
    flipped = {**drawn, "augment": "flip=0.5"}
    store.arrays["a@16/views"] = replace(views, recipe=flipped, shape=(9, 4, 4))
    assert chosen_arrays(store, ["a@16", "a@16/views"]) == ["a@16/plain", "a@16/views"]
    assert [array_name(store, key) for key in store.arrays] == ["a@16", "a@16/views", "a@24"]
    del store.arrays["a@16/plain"]
    assert array_name(store, "a@16/views") == "a@16/views"  # though nothing else has that size yet


def told(method, store, *names):
    heard = Heard()
    return arrays_for(METHODS[method], METHODS[method].resolve(), store, names, heard), heard.notes


def test_a_method_of_features_takes_all_arrays_and_says_so():
    store = shelf("a@16", "b@32", "pixels@8")
    keys, (note,) = told("fedavg", store)
    assert keys == ["a@16", "b@32"]
    assert "a@16 + b@32" in note
    assert told("fedavg", store, "b", "a") == (["b@32", "a@16"], [])


# text features, a text tower, an image tower too
@pytest.mark.parametrize("method", ["clip-zs", "promptfl", "tpfl"])
def test_a_method_with_text_takes_one_backbone(method):
    store = shelf("a@16", "glyph-clip@32", "clip-rn50@224", text=("glyph-clip", "clip-rn50"))
    keys, (note,) = told(method, store)
    assert keys == ["clip-rn50@224"]
    assert "clip-rn50@224" in note
    assert told(method, store, "glyph-clip") == (["glyph-clip@32"], [])
    assert told(method, shelf("b", "a", text=("a",)))[0] == ["a"]
    error = refused(lambda: told(method, store, "clip-rn50", "glyph-clip"), "got 2")
    assert error.hint == "--backbones clip-rn50"
    store_error(lambda: told(method, shelf("a", "b")), "s.zarr has none")


def test_every_client_store_must_have_the_same_arrays():
    first = shelf("a@16", "b", text=("b",))
    second = shelf("b", "a@16", name="t.zarr", text=("b",))
    assert common_arrays([first, second], TrainConfig(), False) == ["a@16", "b"]
    assert common_arrays([first, second], TrainConfig(), True) == ["b"]
    other = shelf("a@16", "b", name="t.zarr", b={"views": 2})
    store_error(
        lambda: common_arrays([first, other], TrainConfig(), False), "t.zarr has no features b"
    )


def test_an_encoder_is_trained_on_one_array_of_images():
    method = METHODS["fedavg-scratch"]
    store = shelf("a", "pixels@8", "pixels@16")
    assert image_array(method, store, ["pixels@16"]) == "pixels@16"
    assert image_array(method, shelf("a", "pixels@8"), []) == "pixels@8"
    for names in (["a"], ["pixels@8", "pixels@16"]):
        error = refused(lambda names=names: image_array(method, store, names), ", ".join(names))
        assert error.hint == "--backbones pixels@8"
    store_error(lambda: image_array(method, shelf("a"), []), "s.zarr has none")


CLIPS = ("glyph-clip", "clip-rn50")
RESNETS = ("resnet18-birds", "resnet18-aircraft")


@pytest.mark.parametrize(
    ("value", "preset", "keys", "post"),
    [
        ("none", "paper", CLIPS, "l2"),
        ("standardize", "paper", CLIPS, "standardize"),
        ("none", "paper", (*CLIPS, "a"), "none"),
        ("none", "official", RESNETS, "sign"),
    ],
)
def test_what_is_done_to_features_follows_their_backbones(value, preset, keys, post):
    heard = Heard()
    store = shelf(*CLIPS, *RESNETS, "a", text=CLIPS)
    assert feat_post_for({"feat_post": value}, False, preset, store, keys, heard) == post
    assert bool(heard.notes) == (post in ("l2", "sign"))
