"""Extraction end to end: what a user sees of it, and the promises behind it."""

import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from command import apart, fedcache, ok, python, words_of
from failing_command import must_fail
from heard import Heard
from make_images import random_bytes
from pictures import folder
from PIL import Image
from stopped_extraction import in_small_chunks, stop_extraction
from toy_store import content

import fedcache as fc
from fedcache.errors import Exit
from fedcache.extract import extract_dataset as extraction

SMALL = "--batch 4 --chunk-rows 8 --workers 0"
COUNTS = ("images", "ok", "decoded", "workers", "forward_batches", "kept_chunks", "chunks", "state")


def extract(images, *words, backbones="random-projection"):
    return fedcache(
        f"extract --dataset folder:{images} --backbones {backbones} {SMALL}", *words, "--json"
    )


@pytest.mark.slow
def test_a_finished_extraction_runs_no_forward_pass_and_imports_no_torch(images, own_home):
    words = words_of(
        f"extract --dataset folder:{images} --backbones random-projection {SMALL} --json"
    )
    first = apart(*words, home=own_home)
    assert first.code == 0
    again = extract(images)
    assert again.code == 0
    assert [a["forward_batches"] for a in again.data["arrays"]] == [0]
    assert again.data["decoded"] == 0
    code = (
        "import sys; from fedcache.cli import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules and 'timm' not in sys.modules"
    )
    python(code, *words)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_without_a_readable_image_has_the_size_of_the_others(images, tmp_path, workers):
    (images / "train/ant/000.png").write_bytes(b"no picture")
    words = f"extract --dataset folder:{images} --backbones pixels --batch 1 --workers {workers}"
    done = fedcache(f"{words} --max-bad 1 --store {tmp_path}/pixels.zarr")
    assert done.code == Exit.QUARANTINED
    store = fc.Store.open(tmp_path / "pixels.zarr")
    (key,) = store.arrays
    bad = np.flatnonzero(store.samples.ok == 0)
    assert len(bad) == 1
    assert not store.reader(key).all()[bad].any()


@pytest.mark.parametrize(("place", "batch"), [(0, 1), (-1, 1), (0, 32)])
def test_images_of_several_sizes_are_refused_without_leaving_a_store(images, place, batch):
    file = sorted(images.glob("train/*/*.png"))[place]
    # An image of one pixel would be spread over the size of the others.
    Image.new("RGB", (1, 1)).save(file)
    words = f"extract --dataset folder:{images} --backbones pixels --batch {batch} --workers 0"
    must_fail("pixels:size=64", words)
    assert ok("ls").data["entries"] == []
    assert ok(f"{words} --recipe pixels:size=8").data["arrays"]


def test_a_bad_image_keeps_its_row_and_is_named(images):
    (images / "train/ant/broken.png").write_bytes(b"not a picture")
    done = extract(images)
    store = fc.Store.open(done.data["path"])
    row = list(store.samples.name).index("train/ant/broken.png")
    assert np.flatnonzero(store.samples.ok == 0).tolist() == [row]
    features = store.reader(done.data["arrays"][0]["key"]).all()
    assert np.flatnonzero(~np.isfinite(features).all((1, 2))).tolist() == [row]
    assert np.isnan(features[row]).all()
    (entry,) = done.data["bad"]
    assert entry["row"] == row
    assert entry["name"] == "train/ant/broken.png"
    again = extract(images)  # the second run says the same as the first
    assert again.data["bad"] == [entry]
    # 49 images in batches of 4 are 13, in chunks of 8 are 7.
    of_first = [49, 48, 49, 1, 13, 0, 7, "new"]
    of_second = [49, 48, 0, 0, 0, 7, 7, "complete"]
    for one, counted in ((done, of_first), (again, of_second)):
        assert one.code == 3
        assert one.envelope["status"] == "problem"
        told = {**one.data, **one.data["arrays"][0]}
        assert [told[name] for name in COUNTS] == counted
    assert done.data["rate"] == pytest.approx(49 / done.data["seconds"])
    assert 0 < done.data["busy"] <= 1
    assert [again.data[name] for name in ("seconds", "rate", "busy")] == [0, 0, 0]


def test_non_finite_features_are_refused_with_their_rows(images, monkeypatch):
    from fedcache.extract.batches import BatchRunner

    real = BatchRunner._encode

    def poisoned(self, job, pictures, rows, bad):
        out = real(self, job, pictures, rows, bad)
        if 5 in rows:
            out[rows.index(5)] = np.inf
        return out

    monkeypatch.setattr(BatchRunner, "_encode", poisoned)
    done = extract(images)
    assert done.code == 5
    assert "row 5" in done.envelope["error"]["message"]


def test_a_missing_chunk_file_is_not_stored_already(images):
    done = extract(images)
    (chunk,) = Path(done.data["path"]).glob("features/*/c/2/0/0")
    chunk.unlink()
    for words in ((), ("--dry-run",)):
        again = extract(images, *words)
        assert again.code == 5
        assert f"{chunk} is missing" in again.envelope["error"]["message"]
        assert "fedcache repair" in again.envelope["error"]["hint"]
    ok("repair", done.data["path"])
    assert extract(images).data["decoded"] == 8


@pytest.mark.slow
def test_an_older_manifest_is_told_and_no_array_vanishes(images):
    store = Path(extract(images).data["path"])
    manifest = store / "manifest.json"
    more = f"extract --backbones random-projection:16 {SMALL}"
    older = manifest.read_bytes()
    second = ok(more).data["arrays"][0]["key"]
    newer = manifest.read_bytes()
    manifest.write_bytes(older)
    train = "train --method fedncm --scheme iid --clients 2"
    for words in (f"inspect {store}", f"verify {store}", train):
        must_fail(f"according to the history, {second}", words, code=5)
    manifest.write_bytes(newer)
    assert ok(f"verify {store}").data["problems"] == []
    # What the message says instead works too.
    manifest.write_bytes(older)
    shutil.rmtree(store / f"features/{second}")
    assert ok(more).data["arrays"][0]["key"] == second
    assert ok(f"verify {store}").data["problems"] == []


def test_fresh_computes_stored_features_again_to_the_same_bytes(images):
    path = Path(extract(images).data["path"])
    before = content(path)
    assert extract(images, "--fresh", "--dry-run").data["arrays"][0]["state"] == "to compute"
    assert content(path) == before
    again = extract(images, "--fresh")
    assert again.data["decoded"] == 48
    assert again.data["arrays"][0]["state"] == "new"
    assert content(path) == before
    assert extract(images).data["decoded"] == 0


def test_a_dry_run_says_bytes_and_time_and_writes_nothing(images):
    done = extract(images, "--dry-run")
    assert done.code == 0
    assert done.data["arrays"][0]["bytes"] == 48 * 64 * 2
    assert done.data["rate"] > 0
    assert not Path(done.data["path"]).exists()
    for words in ((), ("--dry-run",)):
        assert extract(images, "--chunk-rows", 6, *words).code == 2  # no multiple of the batch


def test_a_dry_run_plans_the_rest_of_an_unfinished_extraction(images, monkeypatch):
    stop_extraction(in_small_chunks(images), 20)
    counts = []
    monkeypatch.setattr(
        extraction, "expected_seconds", lambda *given: counts.append(given[-1]) or 1
    )
    plan = extract(images, "--dry-run")
    assert plan.data["images"] == 48
    assert "of 6 chunks are already stored" in plan.err
    for words in (("--fresh", "--dry-run"), ("--batch", 8, "--dry-run"), ("--batch", 8)):
        done = extract(images, *words)
        assert done.code == (Exit.OK if "--fresh" in words else Exit.STORE)
    assert "batch is 8 instead of 4" in done.envelope["error"]["message"]
    assert counts == [48 - extract(images).data["arrays"][0]["kept_chunks"] * 8, 48]


def test_a_finished_extraction_needs_no_gpu_and_says_so(images, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert extract(images, "--device", "cuda").code == 6
    assert extract(images).code == 0
    again = extract(images, "--device", "cuda", "--dtype", "bfloat16")
    assert again.code == 0
    for option in ("--device cuda", "--dtype bfloat16"):
        assert f"{option} has no effect" in again.err


def test_an_image_that_changes_after_its_digest_is_not_stored(images, monkeypatch):
    changed = images / "train/ant/000.png"

    def change(*_):
        changed.write_bytes((images / "train/zebra/000.png").read_bytes())

    monkeypatch.setattr(extraction, "check_disk", change)
    done = extract(images)
    assert done.code == Exit.QUARANTINED
    (bad,) = done.data["bad"]
    assert bad["name"] == "train/ant/000.png"
    assert bad["reason"] == "changed since the extraction began"


def test_features_of_another_number_type_make_another_run(images, tmp_path):
    runs = set()
    for dtype in ("float32", "bfloat16"):
        store = tmp_path / f"{dtype}.zarr"
        extract(images, "--dtype", dtype, "--store", store)
        runs.add(ok(f"train fedncm --store {store} --clients 3").data["digest"])
    assert len(runs) == 2


def test_only_the_command_line_changes_how_its_process_keeps_memory(images, monkeypatch):
    calls = []
    for module in (
        "commands.extract",
        "extract.workers.batch_workers",
        "extract.workers.chunk_tasks",
    ):
        monkeypatch.setattr(
            import_module(f"fedcache.{module}"), "keep_freed_memory", lambda: calls.append(None)
        )
    fc.extract(f"folder:{images}", backbones=["random-projection"], workers=0)
    assert not calls
    assert extract(images).code == 0
    assert len(calls) == 1


def test_an_extraction_with_nothing_to_do_sweeps_what_a_killed_writer_left(images):
    done = extract(images)
    journal = Path(done.data["path"]) / f"journal-{done.data['arrays'][0]['key']}.jsonl"
    journal.touch()
    assert extract(images).data["decoded"] == 0
    assert not journal.exists()


def test_a_link_out_of_the_folder_is_left_out_with_a_warning_until_it_is_asked_for(tmp_path):
    images = folder(tmp_path / "images", train=4, test=2)
    (tmp_path / "secret.png").touch()
    (images / "train/zebra/link.png").symlink_to(tmp_path / "secret.png")
    words = f"extract --dataset folder:{images} --backbones random-projection --size 16 --workers 0 --max-bad 1 --json"
    done = fedcache(words)
    (warning,) = done.warnings
    assert "--follow-links" in warning
    assert done.code == 0
    assert done.data["images"] == 18
    asked = fedcache(f"{words} --follow-links")
    assert asked.code == 3
    assert asked.data["images"] == 19  # it is read, and is no image
    assert not asked.warnings


def test_images_without_classes_have_features_and_it_is_said_that_they_have_no_text_features(
    tmp_path,
):
    np.save(tmp_path / "im.npy", random_bytes(0, 6, 8, 8, 3))
    done = fedcache(f"extract --dataset arrays:{tmp_path / 'im.npy'} --backbones glyph-clip")
    assert done.code == Exit.OK
    assert "no text features" in done.err
    told = ok("inspect").data
    assert told["ok"] == 6
    assert told["classes"] == []
    assert told["text"] == []
    must_fail(
        "clip-zs needs text features",
        "train --method clip-zs --scheme iid --clients 2",
        code=Exit.STORE,
    )


def test_test_rows_that_hold_what_a_training_row_holds_are_said():
    rows = [(Image.fromarray(x), i % 2) for i, x in enumerate(random_bytes(0, 30, 8, 8, 3))]
    for first, said in ((20, 0), (18, 1)):
        heard = Heard()
        given = {"train": rows[:20], "test": rows[first:]}
        fc.extract(given, ["random-projection"], size=8, observer=heard)
        assert len([warning for warning in heard.warnings if "2 test rows" in warning]) == said
