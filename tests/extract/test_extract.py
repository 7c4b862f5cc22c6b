"""Extraction end to end: what a user sees of it, and the promises behind it."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import apart, fedcache, ok, start
from pictures import folder, zipped

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.result import ExtractionStats
from fedcache.store.store import Store

SMALL = ("--batch", 4, "--chunk-rows", 8, "--workers", 0)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return folder(tmp_path / "shapes")


def extract(images: Path, *words: object) -> Any:
    return fedcache(
        "extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", *SMALL, *words, "--json"
    )


def content(store: Path) -> dict[str, str]:
    """sha256 of every file but the history and the locks."""
    return {
        str(f.relative_to(store)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(store.rglob("*"))
        if f.is_file() and f.name != "history.jsonl" and "locks" not in f.parts
    }


def test_features_are_the_projection_of_the_resized_image(images: Path) -> None:
    from fedcache.extract import backbones
    from fedcache.extract.images import decode, resize
    from fedcache.extract.recipe import Recipe

    done = extract(images)
    assert done.code == 0, done.err
    store = Store.open(Path(done.data["path"]))
    key = done.data["arrays"][0]["key"]
    info = store.arrays[key]
    recipe = Recipe.from_dict(info.recipe)
    backbone = backbones.lookup("random-projection")
    weights = backbones.Weights(None, recipe.weights, "seeded")
    encoder = backbones.load(backbone, weights, recipe, device="cpu", dtype="float32")
    import torch

    row = 7
    image = resize(decode((images / store.samples.name[row]).read_bytes()), recipe)
    one = encoder.image(torch.from_numpy(image)[None].repeat(4, 1, 1, 1))[0].numpy()
    assert np.allclose(store.reader(key).rows(np.array([row]))[0, 0], one, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_a_finished_extraction_runs_no_forward_pass_and_imports_no_torch(images: Path, tmp_path: Path) -> None:
    home = os.environ["FEDCACHE_HOME"]
    words = ("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", *SMALL, "--json")
    first = apart(*words, home=home)
    assert first.code == 0, first.err
    again = extract(images)
    assert again.code == 0
    assert [a["forward_batches"] for a in again.data["arrays"]] == [0]
    assert again.data["decoded"] == 0
    import subprocess
    import sys

    code = (
        "import sys; from fedcache.cli import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules and 'timm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_folder_and_zip_make_the_same_features(images: Path, tmp_path: Path) -> None:
    a = extract(images).data
    b = extract(zipped(images, tmp_path / "shapes.zip")).data
    assert a["dataset"]["digest"] == b["dataset"]["digest"]
    assert a["path"] == b["path"]


def test_decoding_happens_once_for_all_backbones(images: Path) -> None:
    done = fedcache(
        "extract",
        "--dataset",
        f"folder:{images}",
        "--backbones",
        "random-projection,pixels",
        "--size",
        16,
        *SMALL,
        "--json",
    )
    assert done.code == 0, done.err
    assert done.data["decoded"] == done.data["images"]
    assert [a["forward_batches"] for a in done.data["arrays"]] == [12, 12]


def test_views_are_seeded_and_the_first_is_the_plain_one(images: Path) -> None:
    plain = Store.open(Path(extract(images).data["path"]))
    done = extract(images, "--views", 3)
    store = Store.open(Path(done.data["path"]))
    key = done.data["arrays"][0]["key"]
    views = store.reader(key).all()
    first = plain.reader(next(k for k in plain.arrays if k != key)).all()
    assert views.shape[1] == 3
    assert np.array_equal(views[:, :1], first)
    assert not np.array_equal(views[:, 1], views[:, 2])


def test_a_bad_image_keeps_its_row_and_is_named(images: Path) -> None:
    (images / "train" / "ant" / "broken.png").write_bytes(b"not a picture")
    done = extract(images)
    assert done.code == 3
    store = Store.open(Path(done.data["path"]))
    row = list(store.samples.name).index("train/ant/broken.png")
    assert store.samples.ok[row] == 0
    assert store.samples.ok.sum() == len(store.samples.ok) - 1
    features = store.reader(done.data["arrays"][0]["key"]).all()
    assert np.isnan(features[row]).all()
    assert np.isfinite(np.delete(features, row, axis=0)).all()
    (entry,) = done.data["bad"]
    assert (entry["row"], entry["name"]) == (row, "train/ant/broken.png")
    assert entry["reason"]
    assert done.envelope["status"] == "problem"  # as exit 3 says
    again = extract(images)
    assert again.code == 3  # the second run says the same as the first
    assert again.data["decoded"] == 0
    assert (again.data["bad"], again.envelope["status"]) == ([entry], "problem")
    told = fedcache("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", *SMALL)
    assert told.code == 3
    assert "1 image could not be read" in told.out
    assert f"  train/ant/broken.png: {entry['reason']}\n" in told.out
    assert str(store.path / "quarantine.jsonl") in told.out


def test_of_many_bad_images_ten_are_named_and_inspect_adds_up(images: Path) -> None:
    for i in range(12):
        (images / "train" / "zebra" / f"bad{i:02}.png").write_bytes(b"no")
    done = fedcache(
        "extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", *SMALL, "--max-bad", 12
    )
    assert done.code == 3
    assert done.out.count("train/zebra/bad") == 10
    assert "and 2 more: " in done.out
    seen = ok("inspect").data
    assert (seen["images"], seen["ok"]) == (60, 48)
    assert seen["splits"] == {"train": 36, "test": 12, "validation": 0}
    assert [e["name"] for e in seen["bad"]] == [f"train/zebra/bad{i:02}.png" for i in range(12)]
    shown = fedcache("inspect").out
    assert "images      48 readable of 60; 36 train, 12 test\n" in shown
    assert f"unreadable  12: {Path(seen['path']) / 'quarantine.jsonl'}\n" in shown


def test_too_many_bad_images_stop_the_run_and_it_can_go_on(images: Path) -> None:
    for i in range(3):
        (images / "train" / "zebra" / f"bad{i}.png").write_bytes(b"no")
    stopped = extract(images, "--max-bad", 1)
    assert stopped.code == 5
    assert "--max-bad" in stopped.envelope["error"]["hint"]
    assert extract(images, "--max-bad", 3).code == 3


def test_an_interrupted_extraction_resumes_to_the_same_bytes(images: Path, tmp_path: Path) -> None:
    """Chunks computed in two goes, with the collector stopped after half of them, equal those of one go."""
    whole = Path(extract(images, "--store", tmp_path / "whole.zarr").data["path"])
    from fedcache.config import ExtractConfig, Home
    from fedcache.errors import Exit, FedcacheError
    from fedcache.extract import extract_dataset as extraction
    from fedcache.process import Stop
    from fedcache.progress import Silent

    class StopAfter(Silent):
        seen = 0
        flag = Stop()

        def advance(self, units: int) -> None:
            self.seen += units
            if self.seen >= 20:
                self.flag.ask()

    config = ExtractConfig(
        dataset=f"folder:{images}", backbones=("random-projection",), batch=4, chunk_rows=8, workers=0
    )
    observer = StopAfter()
    home = Home(Path(os.environ["FEDCACHE_HOME"]))
    part = tmp_path / "part.zarr"
    with pytest.raises(FedcacheError) as caught:
        extraction.extract(config, home, store=part, observer=observer, stop=observer.flag)
    assert caught.value.code is Exit.INTERRUPTED
    with pytest.raises(FedcacheError) as refused:
        Store.open(part).reader(next(iter(Store.open(whole).arrays)))
    assert refused.value.code is Exit.STORE
    done = extraction.extract(config, home, store=part)
    assert done.arrays[0]["kept_chunks"] == 3
    assert done.arrays[0]["forward_batches"] == 6
    assert content(part) == content(whole)


def test_every_batch_has_the_same_size_the_last_one_too(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcache.extract.backbones.encoder import ModuleEncoder

    sizes: list[int] = []
    real = ModuleEncoder.image

    def counted(self: ModuleEncoder, x: Any) -> Any:
        sizes.append(len(x))
        return real(self, x)

    monkeypatch.setattr(ModuleEncoder, "image", counted)
    extract(images, "--limit", 10)  # of batches of 4
    assert set(sizes) == {4}


def test_non_finite_features_are_refused_with_their_rows(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcache.extract.batches import BatchRunner

    real = BatchRunner._encode

    def poisoned(self: BatchRunner, job: Any, pictures: Any, rows: Any, bad: Any) -> Any:
        out = real(self, job, pictures, rows, bad)
        if 5 in rows:
            out[rows.index(5)] = np.inf
        return out

    monkeypatch.setattr(BatchRunner, "_encode", poisoned)
    done = extract(images)
    assert done.code == 5
    assert "row" in done.envelope["error"]["message"]
    assert "5" in done.envelope["error"]["message"]


def test_a_flipped_byte_is_an_error_and_never_a_number(images: Path) -> None:
    done = extract(images)
    store = Path(done.data["path"])
    chunk = next(f for f in sorted((store / "features").rglob("*")) if f.is_file() and "c" in f.parts)
    raw = bytearray(chunk.read_bytes())
    raw[11] ^= 4
    chunk.write_bytes(raw)
    assert fedcache("verify", store).code == 5
    trained = fedcache("train", "--method", "fedncm", "--scheme", "iid", "--clients", 2, "--json")
    assert trained.code == 5
    assert "verify" in trained.envelope["error"]["hint"]


@pytest.mark.slow
def test_an_older_manifest_is_told_and_no_array_vanishes(images: Path) -> None:
    store = Path(extract(images).data["path"])
    older = (store / "manifest.json").read_bytes()
    second = ok("extract", "--backbones", "random-projection:16", *SMALL).data["arrays"][0]["key"]
    newer = (store / "manifest.json").read_bytes()
    (store / "manifest.json").write_bytes(older)
    for words in (
        ("inspect", store),
        ("verify", store),
        ("train", "--method", "fedncm", "--scheme", "iid", "--clients", 2),
    ):
        done = fedcache(*words, "--json")
        assert done.code == 5, words
        assert f"does not list {second}" in done.envelope["error"]["message"]
    (store / "manifest.json").write_bytes(newer)
    assert ok("verify", store).data["problems"] == []
    # What the message says instead works too.
    (store / "manifest.json").write_bytes(older)
    shutil.rmtree(store / "features" / second)
    assert ok("extract", "--backbones", "random-projection:16", *SMALL).data["arrays"][0]["key"] == second
    assert ok("verify", store).data["problems"] == []


def test_a_dry_run_says_bytes_and_time_and_writes_nothing(images: Path) -> None:
    done = extract(images, "--dry-run")
    assert done.code == 0
    assert done.data["arrays"][0]["bytes"] == 48 * 64 * 2
    assert done.data["rate"] > 0
    assert not Path(done.data["path"]).exists()


@pytest.mark.parametrize(("size", "side"), [(("--size", 24), 24), ((), 224)], ids=["resized", "of their own size"])
def test_a_dry_run_counts_the_bytes_of_images(images: Path, size: tuple[object, ...], side: int) -> None:
    words = ("--backbones", "pixels", *size, "--views", 2, "--workers", 0, "--dry-run")
    done = ok("extract", "--dataset", f"folder:{images}", *words)
    assert done.data["arrays"][0]["bytes"] == 48 * 2 * side * side * 3  # before a look at them they count as 224 x 224


def test_limit_takes_rows_evenly_and_is_another_dataset(images: Path) -> None:
    done = extract(images, "--limit", 12)
    store = Store.open(Path(done.data["path"]))
    assert store.rows == 12
    assert set(store.samples.label.tolist()) == {0, 1, 2}
    assert extract(images).data["path"] != done.data["path"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--max-bad", "many"), "1%"),
        (("--text", "a photo"), "{}"),
        (("--dtype", "flot16"), "float16"),
        (("--device", "gpu"), "cuda"),
    ],
)
def test_wrong_values_are_refused_although_there_is_nothing_to_do(
    images: Path, words: tuple[str, str], expected: str
) -> None:
    assert extract(images).code == 0
    done = extract(images, *words)
    assert done.code == 2, done.err
    error = done.envelope["error"]
    assert expected in error["message"] + error["hint"]


def test_a_finished_extraction_needs_no_gpu_and_says_so(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert extract(images, "--device", "cuda").code == 6
    assert extract(images).code == 0
    again = extract(images, "--device", "cuda")
    assert again.code == 0
    assert "--device cuda was not needed" in again.err
    assert "not needed" not in extract(images).err


def test_only_the_command_line_changes_how_its_process_keeps_memory(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedcache as fc

    calls: list[None] = []
    for module in ("commands.extract", "extract.workers.local", "extract.workers.chunk_tasks"):
        monkeypatch.setattr(import_module(f"fedcache.{module}"), "keep_freed_memory", lambda: calls.append(None))
    fc.extract(f"folder:{images}", backbones=["random-projection"], workers=0)
    assert not calls
    assert extract(images).code == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--backbones", "clip-rn5O"), 2, "clip-rn50"),
        (("--recipe", "sise=3"), 2, "size"),
        (("--device", "gpu"), 2, "cuda"),
        (("--max-bad", "many"), 2, "1%"),
        (("--chunk-rows", "6"), 2, "multiple"),
        (("--text", "a photo"), 2, "{}"),
        (("--dataset", "folder:nowhere"), 2, "nowhere"),
        (("--dataset", "digitz"), 2, "digits"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(
    images: Path, words: tuple[str, ...], code: int, expected: str
) -> None:
    base = {"--dataset": f"folder:{images}", "--backbones": "random-projection", "--batch": "4"}
    if "--text" in words:
        base["--backbones"] = "glyph-clip"
    base[words[0]] = words[1]
    done = fedcache("extract", *(w for pair in base.items() for w in pair), "--json")
    assert done.code == code, done.err
    error = done.envelope["error"]
    assert expected in error["message"] + error["hint"]
    assert "Traceback" not in done.err


def test_missing_weights_name_three_places_and_what_works_now(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    words = (
        "extract",
        "--dataset",
        f"folder:{images}",
        "--backbones",
        "resnet18-quickdraw,clip-rn50,random-projection",
    )
    done = fedcache(*words, "--json")
    assert done.code == 6
    error = done.envelope["error"]
    said = error["message"] + error["hint"]
    for word in ("resnet18-quickdraw", "clip-rn50", "--weights", "weights", "Ready now", "--skip-missing"):
        assert word in said
    skipped = fedcache(*words, *SMALL, "--skip-missing", "--json")
    assert skipped.code == 0
    assert skipped.data["skipped"] == ["resnet18-quickdraw", "clip-rn50"]


def test_text_features_of_several_templates_are_unit_means(images: Path) -> None:
    done = ok(
        "extract", "--dataset", f"folder:{images}", "--backbones", "glyph-clip", "--text", "a photo of a {}.",
        "--text", "the word {}.",
    )  # fmt: skip
    store = Store.open(Path(done.data["path"]))
    matrix = store.text("glyph-clip")
    assert matrix.shape == (3, 128)
    assert np.allclose(np.linalg.norm(matrix, axis=1), 1, atol=1e-5)


@pytest.mark.slow
@pytest.mark.full
def test_killed_three_times_and_resumed_is_byte_identical(tmp_path: Path) -> None:
    images = folder(tmp_path / "many", train=96, test=32)  # 384 images, 48 chunks of 8
    words = ("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection,pixels", "--size", 16,
             "--batch", 4, "--chunk-rows", 8, "--workers", 2, "--json")  # fmt: skip
    home = os.environ["FEDCACHE_HOME"]
    whole = apart(*words, "--store", tmp_path / "whole.zarr", home=home)
    assert whole.code == 0, whole.err
    part = tmp_path / "part.zarr"
    for share in (0.25, 0.5, 0.75):
        run = start(*words, "--store", part, home=home)
        while run.poll() is None and chunks(part) < share * 96:
            time.sleep(0.005)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    last = apart(*words, "--store", part, home=home)
    assert last.code == 0, last.err
    assert content(part) == content(tmp_path / "whole.zarr")
    assert not list(part.rglob("*.partial"))


def chunks(store: Path) -> int:
    return (
        sum(1 for f in (store / "features").rglob("*") if f.is_file() and f.name != "zarr.json")
        if store.exists()
        else 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_chunk_and_says_how_to_go_on(tmp_path: Path, number: int) -> None:
    images = folder(tmp_path / "many", train=96, test=32)
    words = ("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection,pixels", "--size", 16,
             "--batch", 4, "--chunk-rows", 8, "--workers", 1, "--json")  # fmt: skip
    run = start(*words, "--store", tmp_path / "s.zarr", home=os.environ["FEDCACHE_HOME"], capture=True)
    while run.poll() is None and chunks(tmp_path / "s.zarr") < 4:
        time.sleep(0.005)
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert '"status": "error"' in out
    assert "same command" in err
    again = apart(*words, "--store", tmp_path / "s.zarr", home=os.environ["FEDCACHE_HOME"])
    assert again.code == 0, again.err


def test_what_a_killed_writer_left_is_swept_and_what_a_live_one_holds_stays(tmp_path: Path) -> None:
    from filelock import FileLock

    images = folder(tmp_path / "images", train=4, test=2)
    words = (
        "extract",
        "--dataset",
        f"folder:{images}",
        "--backbones",
        "random-projection",
        "--size",
        16,
        "--workers",
        0,
    )
    store = Path(ok(*words).data["path"])
    before = {str(f.relative_to(store)) for f in store.rglob("*") if f.name != "history.jsonl"}
    (key,) = (f.name for f in (store / "features").iterdir() if f.is_dir())
    dead, journal = store / "locks" / f"{key}.json", store / f"journal-{key}.jsonl"
    alive, begun = store / "locks" / "other-00000000.json", store / "journal-other-00000000.jsonl"

    def leave(*files: Path) -> None:
        for file in files:
            file.write_text('{"pid": 1, "host": "elsewhere", "started": 0}')

    leave(dead, journal, alive, begun)
    with FileLock(alive.with_suffix(".lock")):
        ok(*words)
        assert not dead.exists()
        assert not journal.exists()
        assert alive.exists()
        assert begun.exists()  # of an array that is not finished
    begun.unlink()
    alive.with_suffix(".lock").unlink(missing_ok=True)
    leave(journal)
    with FileLock(dead.with_suffix(".lock")):
        ok(*words)
        assert journal.exists()
    ok(*words)
    after = {str(f.relative_to(store)) for f in store.rglob("*") if f.name != "history.jsonl" and f.suffix != ".lock"}
    assert after <= before


def test_more_bad_images_found_earlier_than_may_be_end_a_resumed_run_with_the_last_of_them():
    resumed = ExtractionStats(bad={3: "broken", 8: "cut off"})
    resumed.check_bad({}, max_bad=2)
    with pytest.raises(FedcacheError, match=r"2 images could not be read.*the last is row 8: cut off") as caught:
        resumed.check_bad({}, max_bad=1)
    assert caught.value.code is Exit.CORRUPT


def test_a_link_out_of_the_folder_is_left_out_with_a_warning_until_it_is_asked_for(tmp_path: Path) -> None:
    images = folder(tmp_path / "images", train=4, test=2)
    (tmp_path / "secret.png").write_text("password = hunter2")
    (images / "train" / "zebra" / "link.png").symlink_to(tmp_path / "secret.png")
    words = ("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--size", 16,
             "--workers", 0, "--max-bad", 1, "--json")  # fmt: skip
    done = fedcache(*words)
    assert done.code == 0, done.err
    (warning,) = done.envelope["warnings"]
    assert "1 link " in warning
    assert "--follow-links" in warning
    assert done.data["images"] == 18
    asked = fedcache(*words, "--follow-links")
    assert asked.code == 3, asked.err  # it is read, and is no image
    store = Path(asked.data["path"])
    assert asked.data["images"] == 19
    assert "hunter2" not in (store / "quarantine.jsonl").read_text()
    assert "password" not in asked.out + asked.err
    assert not fedcache(*words, "--follow-links").envelope["warnings"]  # at once, as everything is there
    shutil.rmtree(store.parent / done.data["path"].rpartition("/")[2])
    trained = fedcache("train", "--dataset", f"folder:{images}", "--method", "fedncm", "--scheme", "iid",
                       "--clients", 2, "--json")  # fmt: skip
    assert trained.code == 0, trained.err
