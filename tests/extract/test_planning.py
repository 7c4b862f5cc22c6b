"""What an extraction will do and is expected to take, before it is begun: by hand, without images or weights."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from heard import Heard
from refusal import machine_error, refused, store_error
from toy_store import create

from fedcache.config import ExtractConfig, Home, option_words
from fedcache.errors import MachineError
from fedcache.extract import extract_dataset
from fedcache.extract.backbones import Weights, lookup
from fedcache.extract.batches import ComputedBatch, ComputeSettings
from fedcache.extract.datasets.dataset import Dataset, domain_column, join
from fedcache.extract.extract_dataset import pull_if_needed
from fedcache.extract.planning import cost
from fedcache.extract.planning import plan as planning
from fedcache.extract.planning.find_store import UnfinishedArray
from fedcache.extract.planning.incremental import (
    IncrementalPlan,
    find_earlier_rows,
    in_earlier_order,
)
from fedcache.extract.planning.plan import (
    PlannedArray,
    array_bytes,
    missing_text,
    parse_max_bad,
    recipe_of,
    wanted_text,
)
from fedcache.extract.recipe import Recipe
from fedcache.progress import Silent
from fedcache.store.manifest import StorePart
from fedcache.store.samples import Samples


def test_the_time_to_expect_is_counted_from_a_few_batches_after_the_models_are_warm(monkeypatch):
    done = []

    class Timed:
        """Workers that know how long batches took: 2 s of forward passes, and 1, 9 and 3 s of decoding."""

        def __init__(self, *_): ...

        def warm(self):
            done.append("warm")

        def submit(self, batch, keys):
            done.append(batch)
            future = Future()
            decoding = (1.0, 9.0, 3.0)[batch]
            future.set_result(ComputedBatch({}, {}, 4, decoding, {"a": 1.5, "b": 0.5}))
            return future

        def close(self): ...

    settings = ComputeSettings("cpu", "float32", 4, 1)
    backbone = SimpleNamespace(here_only=False)
    jobs = [SimpleNamespace(key=key, backbone=backbone) for key in ("a", "b")]
    monkeypatch.setattr(cost, "InProcess", Timed)
    monkeypatch.setattr(cost, "cores", lambda: 8)
    data = SimpleNamespace(names=list(range(1000)))
    # 25 batches by three processes are nine rounds of 3 s + 2 s
    assert cost.expected_seconds(data, jobs, settings, 3, 100) == pytest.approx(45.0)
    assert done == ["warm", 0, 1, 2]


def planned(name, **changes):
    backbone = lookup(name)
    return PlannedArray(
        backbone, Weights(None, "w", "here"), replace(backbone.recipe, weights="w", **changes)
    )


def test_the_bytes_of_an_array_are_those_of_its_numbers():
    assert array_bytes(10, planned("glyph-clip")) == 10 * 128 * 2  # float16 of width 128
    assert array_bytes(10, planned("glyph-clip", views=3, dtype="float32")) == 10 * 3 * 128 * 4
    assert array_bytes(10, planned("pixels", size=32, views=2)) == 10 * 2 * 32 * 32 * 3
    assert array_bytes(10, planned("pixels")) == 10 * 224 * 224 * 3  # before a look at them


def test_a_disk_must_hold_all_features_and_some_to_spare(tmp_path, monkeypatch):
    free = 2 * 10 * 128 * 2 + (64 << 20)
    data = SimpleNamespace(names=range(10))
    place = tmp_path / "not/there"

    def check(free, part=None):
        monkeypatch.setattr(
            extract_dataset.shutil,
            "disk_usage",
            lambda at: SimpleNamespace(free=free if at == tmp_path else 0),
        )
        extract_dataset.check_disk(place, data, [planned("glyph-clip")] * 2, part)

    check(free)
    machine_error(lambda: check(free - 1), "5,120", tmp_path)
    check(free - 2560, StorePart(1, 2))
    machine_error(lambda: check(free - 2561, StorePart(1, 2)), "2,560")


def test_so_many_images_may_be_unreadable():
    for text, rows, most in (
        ("0", 9, 0),
        ("7", 9, 7),
        ("1%", 1000, 10),
        ("1%", 5, 1),
        ("0%", 500, 0),
        ("2.5%", 99, 2),
    ):
        assert parse_max_bad(text, rows) == most
    for text in ("many", "-1", "101%", "-1%", "%", "1.5", "nan%"):
        refused(lambda text=text: parse_max_bad(text, 100), f"--max-bad {text}")


def recipe(name, **options):
    config = ExtractConfig(dataset="x", backbones=("random-projection", "pixels"), **options)
    return recipe_of(lookup(name), Weights(None, "w", ""), config)


def test_options_of_a_recipe_are_of_all_backbones_or_of_one():
    plain = recipe("random-projection")
    assert plain == replace(lookup("random-projection").recipe, weights="w")
    assert recipe("random-projection", size=16, views=2) == replace(plain, size=16, views=2)
    both = recipe(
        "random-projection", size=16, recipe={"size": "8", "random-projection:resize": "crop"}
    )
    assert both == replace(plain, size=8, resize="crop")
    assert recipe("random-projection", recipe={"pixels:size": "8"}) == plain
    assert recipe("random-projection", recipe={"dtype": "float32"}).dtype == "float32"
    assert recipe("pixels", size=8, recipe={"dtype": "float32"}).dtype == "uint8", (
        "images stay what they are"
    )
    refused(
        lambda: recipe("random-projection", recipe={"glyph-clip:size": "8"}), "glyph-clip:size=8"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": {"glyph-clp": "x"}}, "Did you mean 'glyph-clip'"),
        ({"device": "gpu"}, "'gpu'"),
        ({"dtype": "flot16"}, "Did you mean 'float16'"),
        ({"text": ("a photo",)}, "a photo"),
        ({"recipe": {"sise": "3"}}, "sise"),
        ({"recipe": {"size": "2049"}}, "size=2049"),
    ],
)
def test_a_wrong_value_is_refused_before_weights_are_sought(tmp_path, monkeypatch, options, said):
    monkeypatch.setattr(
        planning.registry, "locate", lambda *_, **__: pytest.fail("looked for weights first")
    )
    config = ExtractConfig(**{"dataset": "x", "backbones": ("random-projection",), **options})
    refused(lambda: planning.plan(config, Home(tmp_path), Silent()), said)


def test_missing_weights_are_named_all_at_once_or_skipped(tmp_path, monkeypatch):
    def locate(backbone, *, given, home, memory, offline):
        assert given == {"pixels": Path("/w")}
        assert home == tmp_path
        assert offline is True
        if backbone.name in ("pixels", "glyph-clip"):
            raise MachineError(f"No {backbone.name}.", f"Get {backbone.name}.")
        return Weights(None, "w", "here")

    monkeypatch.setattr(planning.registry, "locate", locate)
    names = ("pixels", "random-projection", "glyph-clip", "random-projection")
    config = ExtractConfig(dataset="x", backbones=names, weights={"pixels": "/w"})
    home = Home(tmp_path, offline=True)

    asked = replace(config, backbones=("pixels", "glyph-clip"))
    said = ("No pixels.", "No glyph-clip.", "Get pixels.", "Get glyph-clip.")
    for each, words in ((config, said), (asked, said), (replace(asked, skip_missing=True), ())):
        machine_error(lambda each=each: planning.plan(each, home, Silent()), *words)
    heard = Heard()
    (one,), skipped = planning.plan(replace(config, skip_missing=True), home, heard)
    assert one == planned("random-projection")
    assert skipped == ["pixels", "glyph-clip"]
    assert "No pixels." in heard.warnings[0]
    assert "No glyph-clip." in heard.warnings[1]


@pytest.mark.parametrize(
    ("template", "asked", "keep", "stored", "wanted"),
    [
        ("of {}.", (), False, (), ("of {}.",)),  # the dataset's own
        (None, (), False, (), ("a photo of the number {}.",)),  # the backbone's own
        ("of {}.", ("a {}", "the {}"), False, (), ("a {}", "the {}")),
        ("of {}.", (), True, ("other",), None),  # what is there stays
        ("of {}.", ("a {}",), True, ("other",), ("a {}",)),
    ],
)
def test_templates_are_those_asked_for_else_the_datasets_else_the_backbones(
    template, asked, keep, stored, wanted
):
    def has_text(name, templates=None, *, weights):
        assert weights == "w"
        return name == "glyph-clip" and (
            bool(stored) if templates is None else tuple(templates) == stored
        )

    store = SimpleNamespace(has_text=has_text)
    arrays = [planned("glyph-clip"), planned("pixels")]
    key = arrays[0].recipe.key
    found = wanted_text(
        store, arrays, "c", template, ExtractConfig(dataset="x", text=asked), None, keep=keep
    )
    assert found == ({} if wanted is None else {key: wanted})
    assert missing_text(store, arrays, {key: ("other",)}) == ({} if stored else {key: ("other",)})
    open_clip = PlannedArray(lookup("clip-rn50"), arrays[0].weights, lookup("clip-rn50").recipe)
    (last,) = wanted_text(
        store, [open_clip], "c", None, ExtractConfig(dataset="x"), None, keep=False
    ).values()
    assert last == ("a photo of a {}.",), "a backbone without a template of its own"


def test_the_arguments_of_an_extraction_make_it_again():
    config = ExtractConfig(
        dataset="folder:a b",
        backbones=("x", "y"),
        recipe={"size": "8", "x:resize": "crop"},
        text=("a {}", "the {}"),
        limit=9,
        follow_links=True,
        data={"n": "/p"},
        max_bad="3",
    )
    pairs = [
        ("--dataset", "folder:a b"),
        ("--backbones", "x,y"),
        ("--recipe", "size=8"),
        ("--recipe", "x:resize=crop"),
        ("--text", "a {}"),
        ("--text", "the {}"),
        ("--limit", "9"),
        ("--data", "n=/p"),
        ("--max-bad", "3"),
    ]
    words = option_words(config)
    words.remove("--follow-links")
    assert sorted(zip(words[::2], words[1::2], strict=True)) == sorted(pairs)
    assert option_words(ExtractConfig()) == []


def test_a_word_may_mean_an_unfinished_array():
    ordered = UnfinishedArray(
        "glyph-clip-0a1b2c3d", 2, 6, "glyph-clip@32", ExtractConfig(backbones=("glyph-clip",))
    )
    other = replace(ordered, label=None, order=None)
    assert ordered.backbone == "glyph-clip"
    assert other.backbone == "glyph-clip"
    assert "2 of 6 chunks" in ordered.state(SimpleNamespace(path="s.zarr"))
    # Whether it is meant where the home ordered it as glyph-clip@32, and where it did not.
    for word, known, unknown in (
        ("glyph-clip-0a1b2c3d", True, True),
        ("glyph-clip", True, True),
        ("glyph-clip@32", True, True),
        ("glyph-clip@16", False, True),
        ("pixels@32", False, False),
    ):
        assert ordered.means(word) == known
        assert other.means(word) == unknown


def rows_now():
    """Four images: b is new, and d has other bytes than before."""
    return Dataset(
        spec="folder:x",
        slug="x",
        classes=("cat", "dog", "owl"),
        domains=("ink", "pen"),
        names=("a", "b", "c", "d"),
        label=np.array([0, 1, 2, 1], np.int32),
        domain=np.array([0, 1, 1, 0], np.int16),
        split=np.array([0, 0, 1, 2], np.uint8),
        uid=np.repeat(np.array([[1], [2], [3], [9]], np.uint8), 16, 1),
        template="a {}",
        reading="",
        source=SimpleNamespace(read=lambda row: row),
    )


def rows_before():
    """Five rows of a store, in an order of its own; the last had vanished already, under a name that is back."""
    return Samples(
        uid=np.repeat(np.array([[3], [4], [5], [1], [2]], np.uint8), 16, 1),
        name=("c", "d", "e", "a", "b"),
        label=np.array([1, 0, 2, 1, -1], np.int32),
        domain=np.array([1, 0, 1, 0, 0], np.int16),
        split=np.array([1, 1, 0, 0, 2], np.uint8),
        ok=np.array([1, 1, 1, 1, 0], np.uint8),
        classes=("owl", "dog", "newt"),
        domains=("pen", "brush"),
    )


def test_rows_of_an_earlier_store_keep_their_places_and_new_ones_follow():
    data = rows_now()
    before = rows_before()
    rows = find_earlier_rows(data, before, np.array([False, False, False, False, True]))
    assert rows.tolist() == [2, -1, -1, 0, -1]  # d has other bytes, e is gone, b never comes back
    made = in_earlier_order(data, before, rows)
    assert made.names == ("c", "d", "e", "a", "b", "b", "d")
    # Of the rows that are lost: dog and newt of before, which is no class any more; no label; pen is domain 1 now.
    assert made.label.tolist() == [2, 2, -1, 0, -1, 1, 1]
    assert made.domain.tolist() == [1, 1, 0, 0, 1, 1, 0]
    assert made.split.tolist() == [1, 1, 0, 0, 2, 0, 2]
    assert made.uid[:, 0].tolist() == [3, 4, 5, 1, 2, 2, 9]
    assert made.ok.tolist() == [1, 0, 0, 1, 0, 1, 1]
    assert list(made.vanished) == [1, 2, 4]
    assert made.new == 2
    assert made.known == 5
    assert made.content == data.digest
    assert [made.source.read(row) for row in (0, 3, 5, 6)] == [2, 0, 1, 3]
    grown = in_earlier_order(data, before, rows, known=3)
    assert grown.new == 4
    assert grown.known == 3
    assert grown.digest == made.digest != data.digest


def test_text_features_are_carried_over_with_the_numbers_of_their_own_weights(tmp_path):
    parent, store, other = (
        create(tmp_path / f"{name}.zarr") for name in ("before", "now", "other")
    )
    one = np.eye(3, 4, dtype=np.float32)
    two = np.eye(3, 4, 1, dtype=np.float32)
    for weights, matrix in (("v", one), ("w", two)):
        parent.put_text(
            "a", ["a {}"], matrix, {"backbone": "a", "weights": weights, "classes": ["x", "y", "z"]}
        )
    data = SimpleNamespace(classes=("x", "y", "z"))
    others = SimpleNamespace(classes=("x", "y", "w"))
    IncrementalPlan(data, parent).carry_text(store)
    assert store.texts == parent.texts, "also in their order: the last are current"
    assert np.array_equal(store.text("a"), two)
    assert store.use_text("a", ["a {}"], weights="v")
    IncrementalPlan(data, parent).carry_text(store)
    assert np.array_equal(store.text("a"), one), "what is there stays as it is"
    IncrementalPlan(others, parent).carry_text(other)
    IncrementalPlan(data, None).carry_text(other)
    assert other.texts == {}, "of other classes, or of no earlier store"


def test_rows_of_a_dataset_are_named_once_in_order_and_a_part_keeps_their_share():
    data = rows_now()
    for names in (("a", "a", "c", "d"), ("b", "a", "c", "d")):
        with pytest.raises(ValueError, match="names"):
            replace(data, names=names)
    assert data.part(4) is data.part(9) is data
    part = data.part(2)
    assert (part.names, part.slug, part.label.tolist()) == (("a", "b"), "x-2", [0, 1]), (
        "class 1 has two of four rows"
    )


def test_a_part_of_classes_that_take_turns_has_rows_of_each():
    rows = np.arange(60)
    turns = replace(
        rows_now(),
        classes=tuple("abcdef"),
        names=tuple(f"{row:02d}" for row in rows),
        label=(rows % 6).astype(np.int32),
        domain=np.zeros(60, np.int16),
        split=np.where(rows < 48, 0, 1).astype(np.uint8),
        uid=np.repeat(rows.astype(np.uint8)[:, None], 16, 1),
    )
    part = turns.part(10)
    assert sorted(np.bincount(part.label, minlength=6).tolist()) == [1, 1, 2, 2, 2, 2]
    assert np.bincount(part.split).tolist() == [8, 2]
    assert list(part.names) == sorted(part.names)
    assert turns.part(3).label.tolist() == [0, 20 % 6, 40 % 6], (
        "fewer rows than classes are the evenly spaced ones"
    )


def test_more_domains_than_a_store_can_number_are_refused():
    names = [f"d{i}" for i in range(32_767)]
    assert domain_column(np.array([0, 32_766]), names).tolist() == [0, 32_766]
    refused(lambda: domain_column(np.array([0]), [*names, "more"]), "32,768", "32,767")
    refused(lambda: join("many", dict.fromkeys(names[:256], rows_now())), "256", "255")


def test_a_recipe_of_a_newer_release_is_refused():
    known = recipe("pixels").to_dict()
    assert Recipe.from_dict(known) == recipe("pixels")
    store_error(lambda: Recipe.from_dict({**known, "zoom": 2, "blur": 1}), "blur, zoom")


def test_weights_that_a_library_publishes_are_fetched_before_they_are_needed(tmp_path, monkeypatch):
    here = planned("pixels")
    pulled = []
    said = []
    observer = SimpleNamespace(note=said.append)
    assert pull_if_needed(here, ExtractConfig(), Home(tmp_path), observer) is here
    missing = replace(here, weights=Weights(None, "", "timm", download="timm/model.bin, 5 MB"))

    def pull(backbone, *, home, memory):
        pulled.append((backbone.name, home))
        return Weights(tmp_path / "file", "ab" * 32, "timm")

    monkeypatch.setattr(extract_dataset.registry, "pull", pull)
    config = ExtractConfig(dataset="x", backbones=("pixels",), size=9)
    found = pull_if_needed(missing, config, Home(tmp_path), observer)
    assert pulled == [("pixels", tmp_path)]
    assert "timm/model.bin, 5 MB" in said[0]
    assert found.weights.sha256 == found.recipe.weights == "ab" * 32
    assert found.recipe.size == 9
