"""Which arrays of a store a run trains on, from stores of which only the list of arrays matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcache.config import ExtractConfig, Home, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.backbones import lookup
from fedcache.extract.planning.find_store import UnfinishedArray
from fedcache.federate.methods import METHODS
from fedcache.progress import Silent
from fedcache.runs import store_choice
from fedcache.runs.store_choice import (
    array_name,
    arrays_for,
    chosen_arrays,
    common_arrays,
    feat_post_for,
    image_array,
    images_for,
    needed_arrays,
    pixel_recipe,
    recipe_options,
    to_extract,
    train_example,
)
from fedcache.store.manifest import ArrayInfo

ADD = "Add {} to the file, then:  fedcache ingest FILE --name mine --replace --store s.zarr"


def shelf(*keys: str, text: tuple[str, ...] = (), name: str = "s.zarr", **recipes: dict[str, Any]) -> Any:
    """An ingested store with arrays ``backbone@size/variant``; those of pixels hold images.

    ``text`` names the backbones with text features.
    """
    arrays = {}
    for key in keys:
        backbone, _, size = key.partition("/")[0].partition("@")
        recipe: dict[str, Any] = {"backbone": backbone, "size": int(size or 0)}
        kind = "uint8" if backbone == "pixels" else "float16"
        arrays[key] = ArrayInfo({**recipe, **recipes.get(backbone, {})}, {}, (9, 1, 4), kind, 8, (0, 0))
    return SimpleNamespace(
        arrays=arrays, path=Path(name), dataset={"slug": "mine", "source": "ingested", "digest": "d"},
        has_text=lambda backbone: backbone in text,
    )  # fmt: skip


class Heard(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def refused(code: Exit, message: str, hint: str, call: Any, *args: Any) -> None:
    with pytest.raises(FedcacheError) as caught:
        call(*args)
    assert (caught.value.code, caught.value.message, caught.value.hint) == (code, message, hint)


SEVERAL = ("a@16", "b@32", "a@24/x", "c@8/1", "c@8/2", "pixels@32")


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (("b",), ["b@32"]),
        (("a@24", "b", "a@16"), ["a@24/x", "b@32", "a@16"]),
        (("c@8/2", "b@32", "b"), ["c@8/2", "b@32"]),
    ],
)
def test_backbones_are_named_by_name_size_or_key(names: tuple[str, ...], keys: list[str]) -> None:
    assert chosen_arrays(shelf(*SEVERAL), names) == keys


def test_without_names_all_features_are_taken_in_stored_order() -> None:
    assert chosen_arrays(shelf("b@32", "pixels@8", "a"), ()) == ["b@32", "a"]


def test_a_name_of_several_or_of_no_array_is_refused_with_those_there_are() -> None:
    store = shelf(*SEVERAL)
    usage, absent = Exit.USAGE, Exit.STORE
    options = "Choose with --backbones: "
    refused(usage, "'a' means 2 arrays of the store.", f"{options}a@16, a@24", chosen_arrays, store, ["b", "a"])
    refused(usage, "'a' means 2 arrays of the store.", f"{options}a@16, a@24", chosen_arrays, store, [])
    refused(usage, "'c@8' means 2 arrays of the store.", f"{options}c@8/1 (width 4), c@8/2 (width 4)",
            chosen_arrays, store, ["c@8"])  # fmt: skip
    have = "s.zarr has no features of 'd@9'; it has a@16, b@32, a@24, c@8, c@8."
    refused(absent, have, ADD.format("features/NAME"), chosen_arrays, store, ["d@9"])
    refused(absent, "s.zarr holds no features yet.", ADD.format("features/NAME"), chosen_arrays, shelf("pixels@8"), [])


@pytest.mark.parametrize(
    ("key", "name"),
    [("a@16", "a@16"), ("c@8/1", "c@8/1"), ("b", "b")],  # the size, where it tells; what was ingested has none
)
def test_an_array_is_named_so_that_another_size_is_not_meant(key: str, name: str) -> None:
    assert array_name(shelf("a@16", "c@8/1", "c@8/2", "b"), key) == name


def test_a_sized_name_means_the_plain_array_and_views_are_named_by_their_key() -> None:
    store = shelf("a@16/plain", "a@16/views", "a@24")
    views = store.arrays["a@16/views"]
    drawn = {**views.recipe, "views": 4, "decoder": "pillow"}
    store.arrays["a@16/plain"] = replace(views, recipe={**drawn, "views": 1})
    store.arrays["a@16/views"] = replace(views, recipe={**drawn, "augment": "flip=0.5"}, shape=(9, 4, 4))
    assert chosen_arrays(store, ["a@16", "a@16/views"]) == ["a@16/plain", "a@16/views"]
    assert [array_name(store, key) for key in store.arrays] == ["a@16", "a@16/views", "a@24"]
    del store.arrays["a@16/plain"]
    assert array_name(store, "a@16/views") == "a@16/views"  # though nothing else has that size yet
    store.arrays["a@16/other"] = replace(views, recipe=drawn, shape=(9, 4, 4))
    with pytest.raises(FedcacheError, match="'a@16' means 2 arrays") as caught:
        chosen_arrays(store, ["a@16"])
    for words in ("a@16/views (width 4, 4 views by flip=0.5)", "a@16/other (width 4, 4 views by simclr)"):
        assert words in caught.value.hint


def told(method: str, store: Any, *names: str) -> tuple[list[str], list[str]]:
    heard = Heard()
    return arrays_for(METHODS[method], METHODS[method].resolve(), store, names, heard), heard.notes


def test_a_method_of_features_takes_all_arrays_and_says_so() -> None:
    store = shelf("a@16", "b@32", "pixels@8")
    note = "Backbones: all of the store, a@16 + b@32 (--backbones chooses)."
    assert told("fedavg", store) == (["a@16", "b@32"], [note])
    assert told("fedavg", store, "b", "a") == (["b@32", "a@16"], [])
    assert told("fedavg-scratch", store) == (["pixels@8"], [])


@pytest.mark.parametrize("method", ["clip-zs", "promptfl", "tpfl"])  # text features, a text tower, an image tower too
def test_a_method_with_text_takes_one_backbone(method: str) -> None:
    note = f"Backbone: {{}}, for {method} takes one with text features (--backbones chooses)."
    store = shelf("a@16", "glyph-clip@32", "clip-rn50@224", text=("glyph-clip", "clip-rn50"))
    assert told(method, store) == (["clip-rn50@224"], [note.format("clip-rn50@224")])
    assert told(method, store, "glyph-clip") == (["glyph-clip@32"], [])
    assert told(method, store, "a", "glyph-clip") == (["glyph-clip@32"], [])
    assert told(method, shelf("b", "a", text=("a",))) == (["a"], [note.format("a")])
    both = f"{method} takes exactly one backbone with text, got 2."
    refused(Exit.USAGE, both, "--backbones clip-rn50", told, method, store, "clip-rn50", "glyph-clip")
    unranked = "Several backbones have text features: b, a."
    refused(Exit.USAGE, unranked, "--backbones b", told, method, shelf("b", "a", text=("a", "b")))
    none = f"{method} needs text features, and {{}} has none."
    refused(Exit.STORE, none.format("s.zarr"), ADD.format("text/NAME"), told, method, shelf("a", "b"))
    refused(Exit.STORE, none.format("a + b"), ADD.format("text/NAME"), told, method, shelf("a", "b"), "a", "b")


def test_images_named_beside_an_image_tower_are_not_a_backbone() -> None:
    store = shelf("glyph-clip@32", "pixels@32", text=("glyph-clip",))
    assert told("tpfl", store, "glyph-clip", "pixels@32") == (["glyph-clip@32"], [])
    with pytest.raises(FedcacheError, match="has no features of 'pixels@32'"):
        told("promptfl", store, "glyph-clip", "pixels@32")


def test_every_client_store_must_have_the_same_arrays() -> None:
    first, second = shelf("a@16", "b", text=("b",)), shelf("b", "a@16", name="t.zarr", text=("b",))
    assert common_arrays([first, second], TrainConfig(), False) == ["a@16", "b"]
    assert common_arrays([first, second], TrainConfig(backbones=("b",)), False) == ["b"]
    assert common_arrays([first, second], TrainConfig(), True) == ["b"]
    again = "Shard again, so that all clients have the same features."
    for other in (shelf("a@16", name="t.zarr"), shelf("a@16", "b", name="t.zarr", b={"views": 2})):
        refused(
            Exit.STORE, "t.zarr lacks b, which s.zarr has.", again, common_arrays, [first, other], TrainConfig(), False
        )
    lacking = (Exit.STORE, "s.zarr has no text features.", "Extract a backbone with text, then shard again.")
    refused(*lacking, common_arrays, [shelf("a"), second], TrainConfig(), True)


def test_an_encoder_is_trained_on_one_array_of_images() -> None:
    method = METHODS["fedavg-scratch"]
    store = shelf("a", "pixels@8", "pixels@16")
    assert image_array(method, store, ["pixels@16"]) == "pixels@16"
    assert image_array(method, shelf("a", "pixels@8"), []) == "pixels@8"
    one = "fedavg-scratch trains on one array of images, got {}."
    refused(Exit.USAGE, one.format("a"), "--backbones pixels@8", image_array, method, store, ["a"])
    both = one.format("pixels@8, pixels@16")
    refused(Exit.USAGE, both, "--backbones pixels@8", image_array, method, store, ["pixels@8", "pixels@16"])
    none = "fedavg-scratch trains on images, and s.zarr has none."
    refused(Exit.STORE, none, ADD.format("features/NAME"), image_array, method, shelf("a"), [])


def test_live_images_are_those_that_the_encoder_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = lookup("glyph-clip").recipe.to_dict()
    same = {k: recipe[k] for k in ("size", "resize", "interpolation", "crop_pct")}
    monkeypatch.setattr(store_choice, "extract_command", lambda _store, names, options: f"{names} {options}")
    fits = shelf("glyph-clip@32", "pixels@32", **{"glyph-clip": recipe}, pixels=same)
    assert images_for(fits, "glyph-clip@32") == "pixels@32"
    for key, value in (("size", 16), ("resize", "crop"), ("interpolation", "box"), ("crop_pct", 0.5)):
        assert same[key] != value
        other = shelf("glyph-clip@32", "pixels@32", **{"glyph-clip": recipe}, pixels={**same, key: value})
        size = value if key == "size" else 32
        has = f"s.zarr has no images as glyph-clip takes them (32 px, squash); it has pixels@{size}."
        hint = f"['pixels'] {pixel_recipe(lookup('glyph-clip').recipe)}"
        refused(Exit.STORE, has, hint, images_for, other, "glyph-clip@32")
    bare = shelf("glyph-clip@32", **{"glyph-clip": recipe})
    with pytest.raises(FedcacheError, match=r"; it has none\.\n"):
        images_for(bare, "glyph-clip@32")


CLIPS, RESNETS = ("glyph-clip", "clip-rn50"), ("resnet18-birds", "resnet18-aircraft")


@pytest.mark.parametrize(
    ("value", "requested", "preset", "keys", "post"),
    [
        ("none", False, "paper", CLIPS, "l2"),
        ("none", False, "official", CLIPS, "l2"),
        ("none", True, "paper", CLIPS, "none"),
        ("standardize", False, "paper", CLIPS, "standardize"),
        (None, False, "paper", CLIPS, "l2"),
        ("none", False, "paper", (*CLIPS, "a"), "none"),
        ("none", False, "official", RESNETS, "sign"),
        ("none", False, "paper", RESNETS, "none"),
        ("none", False, "official", (*RESNETS, "a"), "none"),
    ],
)
def test_what_is_done_to_features_follows_their_backbones(
    value: str | None, requested: bool, preset: str, keys: tuple[str, ...], post: str
) -> None:
    heard, store = Heard(), shelf(*CLIPS, *RESNETS, "a", text=CLIPS)
    hp: dict[str, Any] = {} if value is None else {"feat_post": value}
    assert feat_post_for(hp, requested, preset, store, keys, heard) == post
    assert feat_post_for(hp, requested, preset, store, keys) == post
    other = "" if value is None else " (--set feat_post=none leaves features as they are)"
    usual = f"feat_post {post}: what is usual for features of {' + '.join(keys)}{other}."
    assert heard.notes == ([usual] if post in ("l2", "sign") else [])


def begun(backbone: str, order: bool = True) -> UnfinishedArray:
    label = f"{backbone}@32" if order else None
    return UnfinishedArray(f"{backbone}-12345678", 1, 2, label, ExtractConfig(backbones=(backbone,)) if order else None)


GLYPH, RANDOM = "glyph-clip-12345678", "random-projection-12345678"


@pytest.mark.parametrize(
    ("method", "stored", "text", "names", "keys"),
    [
        ("fedavg", ("a",), (), (), []),  # the run has features
        ("fedavg", (), (), (), [GLYPH, RANDOM]),
        ("fedavg", ("pixels@8",), (), (), [GLYPH, RANDOM]),
        ("fedavg", ("a",), (), ("a", "glyph-clip"), [GLYPH]),
        ("fedavg", ("glyph-clip@16",), (), ("glyph-clip",), []),
        ("fedavg", ("glyph-clip@16",), (), ("glyph-clip@16",), []),
        ("fedavg", ("glyph-clip@16",), (), ("glyph-clip@32",), [GLYPH]),
        ("clip-zs", ("a",), (), (), [GLYPH]),  # the one with a text tower
        ("clip-zs", ("a",), ("a",), (), []),
        ("promptfl", ("a",), (), (), [GLYPH]),
    ],
)
def test_an_unfinished_array_is_needed_where_the_run_has_no_other(
    tmp_path: Path, method: str, stored: tuple[str, ...], text: tuple[str, ...], names: tuple[str, ...], keys: list[str]
) -> None:
    waiting = [begun("glyph-clip"), begun("random-projection")]
    assert needed_arrays(METHODS[method], shelf(*stored, text=text), names, waiting, Home(tmp_path)) == keys
    unknown = [begun("glyph-clip", order=False)]
    found = needed_arrays(METHODS["clip-zs"], shelf("a"), (), unknown, Home(tmp_path))
    assert found == [], "whether it has a text tower is not known of an array that this home did not order"


def test_what_is_extracted_first_is_what_the_method_reads(tmp_path: Path) -> None:
    home, glyph = Home(tmp_path), lookup("glyph-clip").recipe
    pixels = {"pixels:size": "32", "pixels:resize": "squash"}
    assert pixel_recipe(glyph).items() >= pixels.items()
    assert recipe_options(pixels) == " --recipe pixels:size=32 --recipe pixels:resize=squash"
    assert to_extract(METHODS["fedavg"], ("a", "b"), home) == (("a", "b"), {})
    assert to_extract(METHODS["fedavg-scratch"], ("a",), home) == (("pixels",), {"size": "32"})
    assert to_extract(METHODS["tpfl"], (), home) == (("glyph-clip", "pixels"), pixel_recipe(glyph))
    other = pixel_recipe(lookup("clip-rn50").recipe)
    assert other["pixels:size"] == "224"
    assert to_extract(METHODS["tpfl"], ("clip-rn50@224", "pixels"), home) == (("clip-rn50@224", "pixels"), other)


@pytest.mark.parametrize(
    ("keys", "method"),
    [(("pixels@8",), "fedavg-scratch"), (("pixels@8", "a"), "fed3r"), (("a",), "fed3r"), ((), "fed3r")],
)
def test_the_example_of_a_message_can_train_on_what_the_store_holds(keys: tuple[str, ...], method: str) -> None:
    assert train_example(shelf(*keys)) == f"--method {method}"
