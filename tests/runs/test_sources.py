"""Which store a run trains on, when the one that is meant is unfinished, only a part, or elsewhere."""

import shlex
from pathlib import Path

import pytest
from command import data_of, fedcache, ok
from failing_command import must_fail_store
from made_path import place_of
from pictures import folder

from fedcache.store.store import Store

SMALL = "--batch 4 --chunk-rows 8 --workers 0"
IID = "--scheme iid --clients 3"
FED3R = f"train --method fed3r {IID}"


@pytest.fixture
def images(tmp_path):
    return folder(tmp_path / "shapes with a space")


def extract(images, words):
    return place_of(f"extract {SMALL} {words} --dataset", f"folder:{images}")


def reopened(path, prefix):
    """Damage one chunk of an array and repair the store: the array is unfinished again."""
    key = next(k for k in Store.open(path).arrays if k.startswith(prefix))
    chunks = path / "features" / key / "c"
    next(file for file in chunks.rglob("*") if file.is_file()).write_bytes(b"damaged")
    fedcache(f"repair {path}")
    assert [u["name"] for u in Store.open(path).unfinished()] == [key]
    return key


def follow(done):
    """Run the command that an error's hint or a warning gives."""
    text = done.error["hint"] if "error" in done.envelope else done.warnings[0]
    return fedcache(*shlex.split(text[text.index("fedcache extract") :])[1:], "--json")


@pytest.mark.slow
def test_text_of_other_weights_is_not_taken_for_that_of_the_images(images):
    path = extract(images, "--backbones glyph-clip")
    ok(f"train --method clip-zs {IID}")
    store = Store.open(path)
    (entry,) = store.texts["glyph-clip"]
    other = store.text("glyph-clip")[::-1]
    store.put_text("glyph-clip", entry["templates"], other, {**entry["meta"], "weights": "0" * 64})
    for method in ("clip-zs", "fst-cbdg"):  # a stored result too: which it is depends on the text
        done = fedcache(f"train --method {method} {IID} --json")
        assert "weights 000000000000" in done.error["message"]
    assert follow(done).code == 0
    assert data_of(f"train --method clip-zs {IID}")["reused"]


@pytest.mark.slow
def test_without_extraction_the_exact_command_is_given(images):
    path = extract(
        images,
        "--backbones random-projection,glyph-clip --recipe random-projection:size=16 "
        "--recipe norm=half --max-bad 3 --text 'a {}.' --text 'the {}.'",
    )
    for prefix, name in (("random", "random-projection@16"), ("glyph", "glyph-clip")):
        key = reopened(path, prefix)
        done = fedcache(f"{FED3R} --no-extract --json --backbones {name}")
        assert done.code == 4
        assert key in done.error["message"]
        (array,) = follow(done).data["arrays"]
        assert array["key"] == key
        assert array["forward_batches"] == 2
        assert not Store.open(path).unfinished()


@pytest.mark.slow
def test_an_unfinished_array_that_is_not_needed_is_left_out_aloud(images):
    key = reopened(extract(images, "--backbones random-projection,glyph-clip"), "glyph")
    done = ok(FED3R)
    assert len(done.data["arrays"]) == 1
    (warning,) = done.warnings
    assert key in warning
    assert key in {Path(g["path"]).name for g in data_of("gc --days 0")["garbage"]}
    assert follow(done).code == 0
    assert len(data_of(FED3R)["arrays"]) == 2


def test_a_store_elsewhere_is_completed_in_place(images, tmp_path, monkeypatch, own_home):
    path = extract(images, f"--backbones random-projection --store {tmp_path}/mine.zarr")
    key = reopened(path, "random")
    with monkeypatch.context() as patch:  # a home that did not order the array cannot complete it
        patch.setenv("FEDCACHE_HOME", f"{tmp_path}/another")
        error = must_fail_store(key, f"{FED3R} --store {path}")
        assert f"fedcache extract --store {path} --backbones random-projection" in error["hint"]
    must_fail_store(f"--store {path}", f"{FED3R} --no-extract --store {path}")
    assert data_of(f"{FED3R} --store {path}")["rounds"] == 1
    assert not (own_home / "stores").exists()


def test_a_part_of_what_the_folder_held_before_is_not_offered(images):
    old = extract(images, "--backbones random-projection --limit 24")
    first = next(images.rglob("*.png"))
    (first.parent / "another.png").write_bytes(first.read_bytes() + b"\0")
    extract(images, "--backbones random-projection --limit 8")
    error = must_fail_store("8 images", f"{FED3R} --dataset", f"folder:{images}")
    assert str(old) not in error["hint"]


@pytest.mark.slow
def test_a_part_of_a_dataset_is_neither_used_silently_nor_passed_over(images):
    spec = f"folder:{images}"
    path = extract(images, "--backbones random-projection --limit 24")
    done = fedcache(f"{FED3R} --json --dataset", spec)
    part = path.name.rpartition("-")[0]
    assert f"--dataset {part}\n" in done.error["hint"]
    assert data_of(f"{FED3R} --dataset", part)["dataset"]["rows"] == 24
    assert follow(done).code == 0
    assert data_of(f"{FED3R} --dataset", spec)["dataset"]["rows"] == 48


@pytest.mark.slow
def test_hints_for_what_a_part_lacks_run_as_they_are(images, tmp_path):
    words = "--backbones glyph-clip --limit 24"
    store = extract(images, words)
    elsewhere = extract(images, f"{words} --store {tmp_path}/mine.zarr")
    for path in (store, elsewhere):
        train = f"train {IID} --store {path} --rounds 1"
        for words in (
            "--method tpfl --backbones glyph-clip",  # images as a tower reads them
            "--method fed3r --backbones random-projection",  # features
        ):
            done = fedcache(f"{train} {words} --json")
            assert done.code == 4, (words, done.err)
            assert "--limit 24" in done.error["hint"]
            assert follow(done).code == 0, words
            ok(f"{train} {words} --dry-run")
    assert len(list(store.parent.glob("*.zarr"))) == 1
