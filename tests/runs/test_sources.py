"""Which store a run trains on, when the one that is meant is unfinished, only a part, or elsewhere."""

import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok
from failing_command import must_fail
from pictures import folder

import fedcache as fc
from fedcache.errors import Exit, StoreError
from fedcache.runs.store_choice import open_clients
from fedcache.store.export import write_shards
from fedcache.store.store import Store

SMALL = "--batch 4 --chunk-rows 8 --workers 0"
IID = "--scheme iid --clients 3"
FED3R = f"train --method fed3r {IID}"


@pytest.fixture
def images(tmp_path):
    return folder(tmp_path / "shapes with a space", train=12, test=4)


def extract(images, *words):
    return Path(ok(f"extract {SMALL} --dataset", f"folder:{images}", *words).data["path"])


def reopened(path, prefix):
    """Damage one chunk of an array and repair the store: the array is unfinished again."""
    key = next(k for k in Store.open(path).arrays if k.startswith(prefix))
    chunk = next(
        f for f in sorted((path / "features" / key).rglob("*")) if f.is_file() and "c" in f.parts
    )
    chunk.write_bytes(b"damaged")
    fedcache(f"repair {path}")
    assert [u["name"] for u in Store.open(path).unfinished()] == [key]
    return key


def follow(done):
    """Run the command that an error's hint or a warning gives."""
    text = (
        done.envelope["error"]["hint"] if "error" in done.envelope else done.envelope["warnings"][0]
    )
    return fedcache(*shlex.split(text[text.index("fedcache extract") :])[1:], "--json")


@pytest.mark.slow
def test_text_of_other_weights_is_not_taken_for_that_of_the_images(images, tmp_path):
    path = extract(images, "--backbones", "glyph-clip")
    ok(f"train --method clip-zs {IID}")
    store, page = Store.open(path), tmp_path / "page.html"
    drawn = f"report --embed none -o {page}"
    ok(drawn)
    before = page.read_bytes()
    (entry,) = store.texts["glyph-clip"]
    other = (
        np.random.default_rng(0).standard_normal(store.text("glyph-clip").shape).astype(np.float32)
    )
    store.put_text("glyph-clip", entry["templates"], other, {**entry["meta"], "weights": "0" * 64})
    for method in ("clip-zs", "fst-cbdg"):  # a stored result too: which it is depends on the text
        done = fedcache(f"train --method {method} {IID} --json")
        assert done.code == Exit.STORE
        assert (
            "text features of glyph-clip were made with weights 000000000000"
            in done.envelope["error"]["message"]
        )
    ok(drawn)
    assert page.read_bytes() == before
    assert follow(done).code == 0
    assert ok(f"train --method clip-zs {IID}").data["reused"]


@pytest.mark.slow
def test_without_extraction_the_exact_command_is_given(images):
    path = extract(
        images,
        "--backbones",
        "random-projection,glyph-clip",
        "--recipe",
        "random-projection:size=16",
        "--recipe",
        "norm=half",
        "--max-bad",
        "3",
        "--text",
        "a {}.",
        "--text",
        "the {}.",
    )
    for prefix, name in (("random", "random-projection@16"), ("glyph", "glyph-clip")):
        key = reopened(path, prefix)
        done = fedcache(f"{FED3R} --backbones", name, "--no-extract", "--json")
        assert done.code == 4, done.err
        assert key in done.envelope["error"]["message"]
        resumed = follow(done)
        assert resumed.code == 0, resumed.err
        (array,) = resumed.data["arrays"]
        assert array["key"] == key
        assert array["forward_batches"] == 2
        assert not Store.open(path).unfinished()


@pytest.mark.slow
def test_an_unfinished_array_that_is_not_needed_is_left_out_aloud(images):
    path = extract(images, "--backbones", "random-projection,glyph-clip")
    key = reopened(path, "glyph")
    done = ok(FED3R)
    assert len(done.data["arrays"]) == 1
    (warning,) = done.envelope["warnings"]
    assert key in warning
    assert key in {Path(g["path"]).name for g in ok("gc --days 0").data["garbage"]}
    assert follow(done).code == 0
    assert len(ok(FED3R).data["arrays"]) == 2


def test_a_store_elsewhere_is_completed_in_place(images, tmp_path, monkeypatch):
    path = extract(images, "--backbones", "random-projection", "--store", tmp_path / "mine.zarr")
    key = reopened(path, "random")
    with monkeypatch.context() as patch:  # a home that did not order the array cannot complete it
        patch.setenv("FEDCACHE_HOME", str(tmp_path / "another"))
        error = must_fail(key, f"{FED3R} --store", path, code=4)
        assert f"fedcache extract --store {path} --backbones random-projection" in error["hint"]
    done = fedcache(f"{FED3R} --store", path, "--no-extract", "--json")
    assert f"--store {path}" in done.envelope["error"]["hint"]
    assert ok(f"{FED3R} --store", path).data["rounds"] == 1
    assert not (Path(os.environ["FEDCACHE_HOME"]) / "stores").exists()


def test_a_part_of_what_the_folder_held_before_is_not_offered(images):
    old = extract(images, "--backbones", "random-projection", "--limit", 24)
    first = next(images.rglob("*.png"))
    (first.parent / "another.png").write_bytes(first.read_bytes() + b"\0")
    extract(images, "--backbones", "random-projection", "--limit", 8)
    error = fedcache(f"{FED3R} --dataset", f"folder:{images}", "--json").envelope["error"]
    assert "8 images" in error["message"]
    assert str(old) not in error["hint"]


@pytest.mark.slow
def test_a_part_of_a_dataset_is_neither_used_silently_nor_passed_over(images):
    spec = f"folder:{images}"
    path = extract(images, "--backbones", "random-projection", "--limit", 24)
    done = fedcache(f"{FED3R} --dataset", spec, "--json")
    assert done.code == 4, done.err
    error = done.envelope["error"]
    assert "24 images" in error["message"]
    part = path.name.rpartition("-")[0]
    assert f"--dataset {part}\n" in error["hint"]
    assert ok(f"{FED3R} --dataset", part).data["dataset"]["rows"] == 24
    assert follow(done).code == 0
    assert ok(f"{FED3R} --dataset", spec).data["dataset"]["rows"] == 48


@pytest.mark.slow
def test_hints_for_what_a_part_lacks_run_as_they_are(images, tmp_path):
    extract(images, "--backbones", "glyph-clip", "--limit", 24)
    elsewhere = extract(
        images, "--backbones", "glyph-clip", "--limit", 24, "--store", tmp_path / "mine.zarr"
    )
    store = next((Path(os.environ["FEDCACHE_HOME"]) / "stores").glob("*.zarr"))
    for path in (store, elsewhere):
        train = f"train {IID} --store {path} --rounds 1"
        for words in (
            "--method tpfl --backbones glyph-clip",  # images as a tower reads them
            "--method fed3r --backbones random-projection",  # features
        ):
            done = fedcache(f"{train} {words} --json")
            assert done.code == 4, (words, done.err)
            assert "--limit 24" in done.envelope["error"]["hint"]
            assert follow(done).code == 0, words
            ok(f"{train} {words} --dry-run")
    assert len(list((Path(os.environ["FEDCACHE_HOME"]) / "stores").glob("*.zarr"))) == 1


def test_client_stores_of_two_datasets_are_refused(tmp_path):
    """The second store already is looked at, and the message names it."""
    rows = np.arange(20) % 4
    for name, names in (("a", ("x", "y")), ("b", ("x", "z"))):
        store = fc.Store.from_arrays(
            {"mine": rows[:, None] / 1.0}, labels=rows % 2, classes=names, name=name
        )
        write_shards(
            store,
            [(c, np.arange(i, 20, 2), np.arange(2)) for i, c in enumerate("pq")],
            tmp_path / name,
        )
    assert [s.dataset["shard"]["client"] for s in open_clients(tmp_path / "a")] == ["p", "q"]
    shutil.rmtree(tmp_path / "a" / "1-q.zarr")
    (tmp_path / "b" / "1-q.zarr").rename(tmp_path / "a" / "1-q.zarr")
    with pytest.raises(StoreError, match=r"^1-q\.zarr and 0-p\.zarr"):
        open_clients(tmp_path / "a")
