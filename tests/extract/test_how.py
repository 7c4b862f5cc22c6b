"""An unfinished array is gone on with by the code that began it, and by no other."""

from dataclasses import replace

import numpy as np
import pytest
from command import apart, fedcache, ok
from failing_command import must_fail_corrupt, must_fail_machine, must_fail_store
from make_images import write_directory
from refusal import machine_error
from torch._inductor import config as inductor
from weights_at import located

from fedcache import Store
from fedcache.config import ExtractConfig
from fedcache.errors import Exit
from fedcache.extract import how
from fedcache.extract.backbones import Weights, load, lookup
from fedcache.extract.backbones.backbone import ModuleEncoder
from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.device import Device
from fedcache.extract.how import COMPUTES_FEATURES, FOLDER, features_code_digest
from fedcache.store.journal import journals


@pytest.fixture
def sources(tmp_path):
    """A copy of the code that computes features."""
    names = (*COMPUTES_FEATURES, "backbones/pixels.py", "backbones/random.py")
    return write_directory(
        tmp_path / "code", {name: (FOLDER / name).read_bytes() for name in names}
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "other"),
    [
        ("images.py", "from __future__", "# a remark\nfrom __future__", False),
        ("images.py", "ASPECT = (3 / 4, 4 / 3)", "ASPECT = (4 / 5, 5 / 4)", True),
        ("backbones/backbone.py", "255 * std", "256 * std", True),
        ("backbones/random.py", "inputs**0.5", "inputs**0.25", True),
    ],
)
def test_what_computes_features_is_told_from_what_is_said_about_it(sources, file, old, new, other):
    features_code_digest.cache_clear()
    before = {name: features_code_digest(name, sources) for name in ("random", "pixels")}
    assert before["random"] == features_code_digest("random")
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    features_code_digest.cache_clear()
    assert (features_code_digest("random", sources) != before["random"]) is other
    if file == "backbones/random.py":  # another backbone's file is no part of it
        assert features_code_digest("pixels", sources) == before["pixels"]


def test_an_unfinished_array_of_other_code_is_not_resumed(images, tmp_path, monkeypatch):
    words = (
        f"extract --dataset folder:{images} --backbones random-projection --batch 4 "
        f"--chunk-rows 8 --workers 0 --store {tmp_path / 's.zarr'} --json"
    )
    for n in range(3):
        (images / f"train/ant/zz{n}.png").write_bytes(b"not a picture")
    assert fedcache(f"{words} --max-bad 0").code == Exit.CORRUPT
    (journal,) = journals(tmp_path / "s.zarr")
    assert journal.header["how"]["code"] == features_code_digest("random")
    kept = journal.chunks.keys()
    assert kept

    with monkeypatch.context() as patch:
        patch.setattr(how, "features_code_digest", lambda provider: "0" * 16)
        must_fail_store("--fresh", f"{words} --max-bad 9")
        assert journals(tmp_path / "s.zarr")[0].chunks.keys() == kept  # nothing was touched
        fresh = fedcache(f"{words} --max-bad 9 --fresh")
    assert fresh.code == Exit.QUARANTINED
    (array,) = Store.open(tmp_path / "s.zarr").arrays.values()
    assert array.how["code"] == "0" * 16
    # A finished array is used no matter how it was computed: ``how`` is no part of the look-up.
    again = fedcache(f"{words} --max-bad 9")
    assert again.code == Exit.QUARANTINED
    assert again.data["decoded"] == 0


def test_what_values_depend_on_is_the_device_the_batch_the_code_and_the_libraries(monkeypatch):
    monkeypatch.setattr(how, "version", lambda name: f"{name} 1")
    for name, libraries in (
        ("efficientnet-lite0", {"timm"}),
        ("glyph-clip", {"open_clip_torch"}),
        ("pixels", set()),
    ):
        backbone = lookup(name)
        always = {name: f"{name} 1" for name in {"torch", "pillow", "numpy"} | libraries}
        always |= {
            "dtype": "float32",
            "batch": 8,
            "threads": 2,
            "code": features_code_digest(backbone.provider),
        }
        settings = ComputeSettings("cpu", "float32", 8, 2)
        cpu = how.how_record(Device("cpu", "its name", ""), settings, backbone)
        gpu = how.how_record(Device("cuda", "its name", ""), settings, backbone)
        assert cpu == {"device": "cpu", **always}
        assert gpu == {"device": "cuda", "gpu": "its name", **always}
        compiled = {} if name == "pixels" else {"torch-compile": "on"}
        settings = replace(settings, compiled=True)
        assert how.how_record(Device("cpu", "", ""), settings, backbone) == (cpu | compiled)


@pytest.mark.parametrize("name", ["pixels", "random-projection", "cnn2", "glyph-clip"])
def test_what_is_recorded_as_compiled_is_what_can_be_compiled(name):
    row = lookup(name)
    assert isinstance(load(row, located(row), row.recipe), ModuleEncoder) == row.is_torch_model


def test_features_are_computed_as_others_were_where_this_device_can():
    asked = ExtractConfig(device="cpu")
    assert how.resolve_compute_as(asked, {}) == how.resolve_compute(asked)
    gpu = {"device": "cuda", "dtype": "float16", "batch": 3}
    assert how.resolve_compute_as(asked, gpu) == how.resolve_compute(asked)
    _, found = how.resolve_compute_as(asked, {"device": "cpu", "dtype": "float16", "batch": 3})
    assert found.dtype == "float16"
    assert found.batch == 3
    _, found = how.resolve_compute_as(
        replace(asked, dtype="float32", batch=5), {**gpu, "device": "cpu"}
    )
    assert (found.dtype, found.batch) == ("float32", 5), "what is asked for goes first"


@pytest.mark.slow
@pytest.mark.full
def test_compiled_models_give_the_same_features_and_are_recorded(images, own_home, tmp_path):
    """In a worker too, which leaves nothing behind: Python would warn of locks that belong to the system."""
    words = (
        f"extract --dataset folder:{images} --backbones random-projection:4 --batch 8 --workers 1"
    )
    plain = tmp_path / "plain.zarr"
    ok(f"{words} --store {plain}")
    compiled = tmp_path / "compiled.zarr"
    done = apart(f"{words} --torch-compile --store {compiled}", home=own_home)
    assert done.code == 0
    assert "Warning" not in done.err
    before = Store.open(plain)
    after = Store.open(compiled)
    (key,) = before.arrays
    stored = [np.asarray(store.reader(key).all()) for store in (before, after)]
    assert np.allclose(*stored, atol=1e-3)
    assert after.arrays[key].how["torch-compile"] == "on"
    assert "torch-compile" not in before.arrays[key].how


@pytest.mark.parametrize(("rows", "kept"), [(1000, False), (8, True)])
def test_settings_may_change_until_the_first_chunk_is_stored(images, tmp_path, rows, kept):
    """A refused command leaves the options with which ``train`` completes the array: no unreadable image."""
    (images / "train/ant/zz.png").write_bytes(b"not a picture")
    store = tmp_path / "s.zarr"
    words = f"extract --dataset folder:{images} --backbones random-projection --workers 0"
    words += f" --chunk-rows {rows}"
    must_fail_corrupt("--max-bad", f"{words} --batch 4 --max-bad 0 --store {store}")
    assert bool(journals(store)[0].chunks) == kept
    other = fedcache(f"{words} --batch 8 --max-bad 9 --store {store}")
    assert other.code == (Exit.STORE if kept else Exit.QUARANTINED)
    if kept:
        must_fail_corrupt("--max-bad", f"train fed3r --store {store}")


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_is_refused_by_name():
    row = lookup("cnn2")
    encoder = load(row, Weights(None, "seed:0", ""), row.recipe)
    with inductor.patch({"cpp.cxx": ("no-compiler",)}):
        machine_error(lambda: encoder.compile_image_model(2, 64), "cnn2")


@pytest.mark.parametrize("option", ["", "--dry-run"])
def test_a_batch_beyond_memory_is_refused_before_any_work(option, images, tmp_path):
    store = tmp_path / "s.zarr"
    words = f"extract --dataset folder:{images} --backbones random-projection --batch 100000000 {option}"
    must_fail_machine("of memory", f"{words} --store {store}")
    assert not store.exists()


def test_the_proposed_batch_leaves_room_for_other_batches():
    row = lookup("random-projection")
    job = FeatureJob("a", row, Weights(None, "", ""), row.recipe)
    refusal = machine_error(lambda: how.refuse_large_batch([job], 1 << 20, 8 << 20))
    proposed = int(refusal.hint.split()[-1])
    how.refuse_large_batch([job], proposed, 1 << 20)
    machine_error(lambda: how.refuse_large_batch([job], 2 * proposed, 1 << 20))
