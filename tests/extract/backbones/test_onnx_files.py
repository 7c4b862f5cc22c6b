"""An ONNX file is a backbone: what it computes, what it cannot say, and what is refused in a sentence."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import images
from command import data_of
from failing_command import must_fail, must_fail_machine
from pictures import folder
from refusal import corruption, machine_error, refused
from tiny_onnx import encoder
from tolerance import close
from weights_at import features_of, located

import fedcache as fc
from fedcache import optional
from fedcache.extract.backbones import load, lookup, own
from fedcache.plugins import bare_name
from fedcache.store.files import file_sha256

GREY = torch.full((3, 8, 8, 3), 51, dtype=torch.uint8)
"""Three images that are 51 everywhere: 0.2 of 255."""


@pytest.mark.parametrize(("layout", "batch"), [("NCHW", "N"), ("NHWC", 2), ("NCHW", 1)])
def test_floats_are_normalised_and_other_batches_filled_up(tmp_path, layout, batch):
    row = lookup(f"onnx:{encoder(tmp_path / 'a.onnx', layout=layout, batch=batch)}")
    assert row.name == "onnx:a.onnx"
    assert row.width == 6
    assert row.recipe.size == 8
    assert row.fixed is True
    assert row.raw is False
    assert row.recipe.pooling == "y"
    # Without a norm 2 * 0.2 = 0.4; by ImageNet's 2 * (0.2 - mean) / std; from 0 to 255 2 * 51 = 102.
    assert close(features_of(row, GREY, norm="unit"), np.full((3, 6), 0.4), 8 * 8)
    mean = np.array([0.485, 0.456, 0.406])
    std = np.array([0.229, 0.224, 0.225])
    assert close(features_of(row, GREY), np.tile(2 * (0.2 - mean) / std, (3, 2)), 8 * 8)
    assert close(features_of(row, GREY, norm="bytes"), np.full((3, 6), 102.0), 8 * 8)


def test_bytes_are_given_as_they_are(tmp_path):
    row = lookup(f"onnx:{encoder(tmp_path / 'a.onnx', kind='uint8', layout='NHWC')}")
    assert row.raw
    assert features_of(row, GREY).tolist() == [[102.0] * 6] * 3
    refused(lambda: features_of(row, GREY, norm="imagenet"), "takes unnormalised pixels")


def test_half_floats_are_cast(tmp_path):
    row = lookup(f"onnx:{encoder(tmp_path / 'a.onnx', kind='float16')}")
    halves = np.full((3, 6), 2 * float(np.float16(0.2)))
    assert close(features_of(row, GREY, norm="unit"), halves, 8 * 8)


@pytest.mark.parametrize(("output", "layout"), [("m", "NCHW"), ("m", "NHWC"), ("t", "NCHW")])
def test_maps_and_tokens_are_averaged_and_the_recipe_says_so(tmp_path, output, layout):
    path = encoder(tmp_path / "a.onnx", layout=layout, outputs=output)
    row = lookup(f"onnx:{path}")
    assert row.width == 6
    assert row.recipe.pooling == f"avg({output})"
    images = torch.arange(8 * 8 * 3, dtype=torch.uint8).reshape(1, 8, 8, 3)
    # Channel c holds c, c + 3, .. c + 189: mean c + 94.5; times 2.
    assert close(features_of(row, images, norm="bytes")[0], [189.0, 191.0, 193.0] * 2, 8 * 8)


@pytest.mark.parametrize(("output", "batch"), [("b", "N"), ("l", 2)])
def test_features_that_depend_on_the_batch_are_refused(tmp_path, output, batch):
    # A file of two images at a time is filled up with copies of the last one, and what it gives depends on that.
    path = encoder(tmp_path / "a.onnx", outputs=output, batch=batch)
    refused(lambda: lookup(f"onnx:{path}"), "onnx:a.onnx")
    assert lookup(f"onnx:{encoder(tmp_path / 'one.onnx', outputs='l', batch=1)}").width == 6


def test_rows_without_numbers_and_outputs_without_rows_are_refused(tmp_path):
    for output, words in (
        ("z", "onnx:a.onnx gives empty rows"),
        ("s", "The output s of onnx:a.onnx"),
    ):
        path = encoder(tmp_path / "a.onnx", outputs=output)
        refused(lambda path=path: lookup(f"onnx:{path}"), words)


def test_one_of_several_outputs_is_chosen_by_name(tmp_path):
    images = folder(tmp_path / "images", train=3, test=1)
    path = encoder(tmp_path / "several.onnx", outputs="my")
    words = f"extract --dataset folder:{images} --backbones onnx:{path}"
    for more, said in (
        ((), "--recipe onnx:several.onnx:output=m"),
        (("--recipe", "output=x"), "x"),
    ):
        must_fail(said, words, *more)
    found = [
        data_of(f"{words} --recipe {prefix}output={name}")["arrays"][0]["recipe"]["pooling"]
        for prefix, name in (("", "y"), ("onnx:several.onnx:", "m"), (f"onnx:{path}:", "m"))
    ]
    assert found == ["y", "avg(m)", "avg(m)"]


def test_a_file_of_any_size_is_asked_for_one(tmp_path):
    path = encoder(tmp_path / "a.onnx", size="side")
    fixed = encoder(tmp_path / "fixed.onnx")
    assert lookup(f"onnx:{path}").recipe.size == 224
    assert lookup(f"onnx:{path}").fixed is False
    images = folder(tmp_path / "images", train=3, test=1)
    words = f"extract --dataset folder:{images} --size 12 --backbones"
    assert data_of(f"{words} onnx:{path}")["arrays"][0]["recipe"]["size"] == 12
    must_fail("", f"{words} onnx:{fixed}")


@pytest.mark.slow
def test_extract_train_and_predict_by_either_name(here, monkeypatch):
    images = folder(here / "images", train=6, test=2)
    place = here / "models"
    place.mkdir()
    encoder(place / "mine.onnx")
    words = f"extract --dataset folder:{images} --backbones"
    first = data_of(f"{words} onnx:models/mine.onnx")
    (array,) = first["arrays"]
    assert array["recipe"]["backbone"] == "onnx:mine.onnx"
    assert array["recipe"]["weights"] == file_sha256(place / "mine.onnx")
    stored = fc.Store.open(first["path"])
    assert not any(str(here).encode() in p.read_bytes() for p in stored.path.rglob("*.json"))
    assert {"onnxruntime", "threads", "code"} <= set(stored.arrays[array["key"]].how)
    monkeypatch.chdir("/")  # from elsewhere it is found where it lay
    assert data_of(f"{words} onnx:mine.onnx")["decoded"] == 0
    for name in ("onnx:mine.onnx", "onnx:models/mine.onnx", "onnx:mine.onnx@8"):
        trained = data_of(f"train --method fed3r --backbones {name} --clients 2 --scheme iid")
    assert data_of(f"predict {trained['path']}", next((images / "test").rglob("*.png")))["rows"]
    (entry,) = (e for e in data_of("backbones list")["backbones"] if e["yours"])
    assert entry["name"] == "onnx:mine.onnx"
    assert entry["ready"] is True
    assert data_of("backbones verify onnx:mine.onnx")["width"] == 6


def test_a_file_that_changes_under_an_extraction_is_refused(tmp_path):
    row = lookup(f"onnx:{encoder(tmp_path / 'a.onnx')}")
    weights = located(row)
    encoder(tmp_path / "a.onnx", weight=3.0)
    corruption(lambda: load(row, weights, row.recipe), "sha256")
    corruption(lambda: own.unchanged_bytes(Path(row.place), weights.sha256), "changed")


def test_two_files_of_one_name_in_one_command_are_refused(tmp_path):
    for place, weight in (("one", 2.0), ("two", 3.0)):
        (tmp_path / place).mkdir()
        encoder(tmp_path / f"{place}/e.onnx", weight=weight)
    refused(
        lambda: fc.extract(
            "digits", [f"onnx:{tmp_path}/one/e.onnx", f"onnx:{tmp_path}/two/e.onnx"]
        ),
        "Two files are called onnx:e.onnx",
    )


def test_a_damaged_file_is_a_sentence(tmp_path):
    path = encoder(tmp_path / "a.onnx")
    raw = path.read_bytes()
    for size in (0, 40, len(raw) - 4):
        path.write_bytes(raw[:size])
        must_fail_machine(str(path), f"extract --dataset digits --backbones onnx:{path}")


def test_weights_beside_the_file_are_refused_wherever_one_stands(here, monkeypatch):
    # The current folder is where onnxruntime would look.
    encoder(here / "a.onnx", external=True)
    assert (here / "a.bin").exists()
    caught = machine_error(lambda: lookup("onnx:a.onnx"), "its weights are in separate files")
    _, code, path = shlex.split(caught.hint.partition("python ")[2])
    assert path == f"{here}/a.onnx"
    monkeypatch.setattr("sys.argv", ["-c", path])
    exec(code)
    assert lookup("onnx:one.onnx").width > 0, "the file that the hint writes can be used"


def test_names_without_a_file_are_a_sentence(tmp_path):
    for name in ("onnx:", "onnx:/", "onnx:a@b.onnx"):
        refused(lambda name=name: lookup(name, home=tmp_path))
    machine_error(lambda: lookup("onnx:absent.onnx", home=tmp_path), "onnx:absent.onnx")


def test_another_device_or_dtype_is_refused(tmp_path):
    path = encoder(tmp_path / "a.onnx")
    must_fail(
        "is computed on the CPU in float32",
        f"extract --dataset digits --backbones onnx:{path} --dtype bfloat16",
    )


def test_what_was_read_of_a_file_is_remembered_until_it_changes(tmp_path, monkeypatch):
    path = encoder(tmp_path / "a.onnx")
    home = tmp_path / "home"
    row = lookup(f"onnx:{path}", home=home)
    with monkeypatch.context() as patch:
        patch.setattr(optional, "import_module", lambda name: pytest.fail("read again"))
        assert lookup(f"onnx:{path}", home=home) == row
        assert lookup("onnx:a.onnx", home=home) == row
    encoder(path, outputs="m")
    assert lookup("onnx:a.onnx", home=home).recipe.pooling == "avg(m)"


def test_names_of_stores_are_without_folders():
    names = {
        "onnx:/a/b.onnx": "onnx:b.onnx",
        "tflite:c.tflite": "tflite:c.tflite",
        "hf:./x/y": "hf:y",
        "hf:org": "hf:org",
        "hf:org/m": "hf:org/m",
        "module:a.b:c": "module:a.b:c",
        "timm:a/b": "timm:a/b",
        "onnx:C:\\m\\e.onnx": "onnx:e.onnx",
    }
    assert {name: bare_name(name) for name in names} == names
    assert all(bare_name(bare) == bare for bare in names.values())


@pytest.mark.slow
@pytest.mark.full
def test_an_exported_efficientnet_gives_timms_features(tmp_path):
    """The same pixels through torch and through the file that torch.onnx writes of the same network."""
    row = lookup("efficientnet-lite0")
    weights = located(row)
    network = load(row, weights, row.recipe)
    program = torch.onnx.export(
        network.module,
        (torch.zeros(2, 3, 224, 224),),
        dynamo=True,
        input_names=["pixels"],
        output_names=["features"],
        dynamic_shapes=({0: torch.export.Dim("N", min=1, max=64)},),
        external_data=False,
        verbose=False,
    )
    program.save(f"{tmp_path}/lite0.onnx", external_data=False)
    file = lookup(f"onnx:{tmp_path / 'lite0.onnx'}")
    assert file.width == 1280
    assert file.recipe.size == 224
    assert file.recipe.pooling == "features"
    recipe = file.recipe.override({"norm": "half"})
    assert recipe.mean == row.recipe.mean
    assert recipe.std == row.recipe.std
    seen = images(3, 224)
    theirs = features_of(file, seen, norm="half")
    ours = network.image(seen).numpy()
    assert np.abs(ours).max() > 1
    assert np.abs(theirs - ours).max() < 1e-4
