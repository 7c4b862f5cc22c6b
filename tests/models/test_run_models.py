"""Models of runs on disk: which are kept, that they are whole or refused, and that they say what the run scored."""

import csv
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok, words_of
from pictures import folder
from pyarrow import parquet

import fedcache as fc
from fedcache.errors import CorruptionError
from fedcache.extract.recipe import Recipe
from fedcache.models.saved_model import SavedModel
from fedcache.runs import directory, loop
from fedcache.runs.directory import check_models, read_result
from fedcache.runs.run_models import drop, model_file
from fedcache.store.files import file_sha256

IID = words_of("--scheme iid --clients 3")
FED3R = ("train --method fed3r", *IID)
FEDPCL = ("train --method fedpcl", *IID, "--rounds", 2, "--set", "dim=4")


def extracted(place):
    images = folder(place / "shapes", train=12, test=4)
    done = ok(
        "extract --backbones random-projection --workers 0",
        "--dataset",
        f"folder:{images}",
    )
    return Path(done.data["path"])


@pytest.fixture
def store(once):
    return once(extracted)


def trained(*words):
    return Path(ok(*words).data["path"])


def test_rows_and_images_give_the_stored_accuracy_to_the_last_digit(store, tmp_path):
    run = trained(*FED3R)
    stored = json.loads((run / "result.json").read_text())["accuracy"]["mean"]
    rows = ok("predict --split test", run.name[:6], "--store", store)
    held = fc.Store.open(store)
    labels = {
        name: held.samples.classes[c]
        for name, c in zip(held.samples.name, held.samples.label, strict=True)
    }
    assert np.mean([labels[row["name"]] == row["class"] for row in rows.data["rows"]]) == stored
    tests = [n for n, s in zip(held.samples.name, held.samples.split, strict=True) if s == 1]
    root = folder(tmp_path / "shapes", train=12, test=4)  # the same images again
    images = ok("predict", run.name, *[root / name for name in tests], "--workers", 0)
    assert [row["class"] for row in images.data["rows"]] == [
        row["class"] for row in rows.data["rows"]
    ]


@pytest.mark.slow
def test_images_go_through_each_backbone_in_batches_of_the_size_that_its_features_have(
    once, tmp_path
):
    """Another batch size gives other last bits, of which float16 features show some: here of 20 % of the rows."""

    def made(place):
        images = folder(place / "shapes", train=6, test=20)
        words = ("extract", "--dataset", f"folder:{images}", "--workers", 0, "--backbones")
        ok(*words, "random-projection")
        return Path(ok(*words, "glyph-clip", "--batch", 1).data["path"])

    store = once(made)
    run = trained(*FED3R, "--backbones", "random-projection,glyph-clip")
    known = SavedModel.load(model_file(run, 0)).facts.computed
    assert known == tuple({"device": "cpu", "dtype": "float32", "batch": size} for size in (32, 1))
    rows = ok("predict", run, "--store", store).data["rows"]
    held, root = fc.Store.open(store), folder(tmp_path / "again", train=6, test=20)
    found = ok("predict", run, *[root / name for name in held.samples.name], "--workers", 0).data[
        "rows"
    ]
    assert [row["top"] for row in found] == [row["top"] for row in rows]
    other = ok(
        "predict", run, *[root / name for name in held.samples.name], "--workers", 0, "--batch", 32
    ).data["rows"]
    assert [row["top"] for row in other] != [row["top"] for row in rows]


@pytest.mark.usefixtures("store")
def test_a_run_ends_with_the_line_that_predicts():
    assert re.search(r"fedcache predict \w{8} IMAGES$", fedcache(*FED3R).out, re.MULTILINE)
    assert re.search(
        r"fedcache predict \w{8} IMAGES --client NAME$", fedcache(*FEDPCL).out, re.MULTILINE
    )


def test_the_same_run_has_the_same_model_to_the_byte(store):
    run = trained(*FEDPCL, "--seeds", "0,1")
    before = {seed: model_file(run, seed).read_bytes() for seed in (0, 1)}
    assert trained(*FEDPCL, "--seeds", "0,1", "--fresh") == run
    assert {seed: model_file(run, seed).read_bytes() for seed in (0, 1)} == before
    assert before[0] != before[1]


def test_a_flipped_bit_and_a_model_of_another_run_are_corruption(store):
    run, other = trained(*FED3R), trained(*FED3R, "--set", "lam=1.0")
    path = model_file(run, 0)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    found = fedcache("predict --json", run, "--store", store)
    assert found.code == 5
    assert "--fresh" in found.envelope["error"]["hint"]
    assert fedcache("predict", path, "--store", store).code == 5  # the file by itself too
    shutil.copy(model_file(other, 0), path)
    assert fedcache("predict", run, "--store", store).code == 5
    shutil.rmtree(run / "models")
    shutil.copytree(other / "models", run / "models")
    assert fedcache("predict", run, "--store", store).code == 5


def test_a_run_without_a_model_names_the_command_that_trains_it_again(store):
    run = trained(*FED3R, "--no-model")
    assert not (run / "models").exists()
    found = fedcache("predict --json", run, "--store", store)
    assert found.code == 4
    assert (
        f"fedcache train --config {run / 'config.toml'} --fresh" in found.envelope["error"]["hint"]
    )
    before = (run / "result.json").read_bytes()
    ok("train --fresh", "--config", run / "config.toml")
    assert ok("predict", run, "--store", store).data["rows"]
    # a result has the same bits with and without a model
    assert (run / "result.json").read_bytes() == before


DITTO = ("train --method ditto --scheme iid --clients 2 --rounds 1 --set head=linear",)


def test_a_model_that_other_code_made_is_used_with_a_warning(store, tmp_path):
    model = SavedModel.load(model_file(trained(*DITTO), 0))
    model.save(tmp_path / "same.safetensors")
    before = "0123456789abcdef" * 4
    replace(model, facts=replace(model.facts, code=before)).save(tmp_path / "other.safetensors")
    for name, warned in (("same", False), ("other", True)):
        done = fedcache("evaluate", tmp_path / f"{name}.safetensors", "--store", store)
        assert done.code == 0, done.err
        assert (f"({before[:8]})" in done.err and f"({model.facts.code[:8]})" in done.err) is warned


def test_the_directory_of_a_run_with_the_files_of_another_is_refused_by_every_reader(
    store,
):
    run, other = trained(*FED3R), trained(*FED3R, "--set", "lam=1.0")
    shutil.rmtree(run)
    shutil.copytree(other, run)
    assert fedcache("predict", run, "--store", store).code == 5
    listed = ok("runs list").data
    finished = [e["path"] for e in listed["entries"] if e["state"] == "finished"]
    assert finished == [str(other)]
    assert [e["path"] for e in listed["left_out"]] == [str(run)]
    # a copy under a name of one's own is a run like any other
    shutil.copytree(other, run.parent / "elsewhere")
    assert ok("predict", run.parent / "elsewhere", "--store", store).data["rows"]


def test_a_private_run_saves_no_clients_own_model(store):
    private = words_of("--dp-clip 1 --dp-noise 1 --dp-allow evaluation")
    run = trained("train --method ditto", *IID, "--rounds", 1, *private)
    assert SavedModel.load(model_file(run, 0)).clients == []
    assert not [
        name for name in SavedModel.load(model_file(run, 0)).tensors if name.startswith("clients/")
    ]
    words = (
        "train --method fedavg",
        *IID,
        "--rounds",
        1,
        *private,
        "--set",
        "feat_post=standardize",
        "--json",
    )
    refused = fedcache(*words)
    assert refused.code == 2
    assert "statistics" in refused.envelope["error"]["message"]
    model = SavedModel.load(
        model_file(trained(*words[:-4], "evaluation,statistics", *words[-3:-1]), 0)
    )
    assert {"features/mean", "features/scale"} <= set(model.tensors)


@pytest.mark.parametrize(("keep", "left"), [("best", 1), ("all", 3), ("none", 0)])
def test_a_grid_keeps_the_models_that_are_asked_for(store, keep, left):
    words = ("grid --method fedavg --sweep lr=0.0001,0.5,0.1", *IID, "--rounds", 2)
    assert fedcache(*words, "--save-models", "some").code == 2
    points = ok(*words, "--save-models", keep).data["points"]
    kept = [p for p in points if (Path(p["path"]) / "models" / "models.json").exists()]
    assert len(kept) == left
    if keep == "best":
        assert kept[0]["accuracy"]["mean"] == max(p["accuracy"]["mean"] for p in points)
    again = ok(*words, "--save-models", keep).data["points"]
    assert [p["path"] for p in again if (Path(p["path"]) / "models").exists()] == [
        p["path"] for p in kept
    ]


def test_a_grid_keeps_the_model_of_a_run_that_is_two_points(store):
    """A method of one round has one run for every number of rounds."""
    points = ok("grid --method fed3r --sweep rounds=1,2", *IID).data["points"]
    (path,) = {p["path"] for p in points}
    assert (Path(path) / "models" / "models.json").is_file()


def test_models_that_are_removed_while_a_run_is_checked_are_no_damage(store, monkeypatch):
    run = trained(*FED3R)

    def removed(path):
        drop(run)
        return file_sha256(path)

    with monkeypatch.context() as patched:
        patched.setattr(directory, "file_sha256", removed)
        check_models(run, read_result(run / "result.json"))
    assert not (run / "models").exists()


def test_a_save_that_fails_leaves_no_result_and_the_run_goes_on_from_there(store, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "seal", fails)
        assert fedcache(*FEDPCL, "--seeds", "0,1").code != 0
    (run,) = list((store.parents[1] / "runs").iterdir())
    assert not (run / "result.json").exists()
    whole = model_file(run, 0).read_bytes()
    model_file(run, 1).write_bytes(whole[:100])  # torn: its seed begins again
    assert trained(*FEDPCL, "--seeds", "0,1") == run
    assert model_file(run, 0).read_bytes() == whole
    assert ok("predict --seed all --client client-0", run, "--store", store).data["rows"]


def test_weights_that_are_not_those_of_the_model_are_refused(store, tmp_path):
    model = SavedModel.load(model_file(trained(*FED3R), 0))
    (recipe,) = model.facts.recipes
    made = {**recipe, "weights": "seed:7"}
    other = replace(
        model, facts=replace(model.facts, keys=(Recipe.from_dict(made).key,), recipes=(made,))
    )
    other.save(tmp_path / "other.safetensors")
    images = folder(tmp_path / "shapes", train=1, test=1)
    for words, code in (((images, "--workers", 0), 6), (("--store", store), 4)):
        found = fedcache("predict", tmp_path / "other.safetensors", *words)
        assert found.code == code
        assert "seed:7" in found.err


def test_features_of_another_recipe_are_told_with_the_command_that_makes_those_of_the_run(
    store, tmp_path
):
    run = trained(*FED3R)
    images = folder(tmp_path / "other", train=2, test=2)
    words = ("extract --backbones random-projection --workers 0", "--dataset", f"folder:{images}")
    other = ok(*words, "--recipe", "size=16").data["path"]
    done = fedcache("predict --json", run, "--store", other)
    assert done.code == 4
    assert "its random-projection has size 16 in place of 32" in done.envelope["error"]["message"]
    command = shlex.split(done.envelope["error"]["hint"])
    assert command[:2] == ["fedcache", "extract"]
    ok(*command[1:], "--workers", 0)
    assert len(ok("predict", run, "--store", other).data["rows"]) == 12


@pytest.mark.slow
def test_predictions_are_written_in_three_formats(store, tmp_path):
    run = trained(*FED3R)
    images = folder(tmp_path / "shapes", train=1, test=1)
    (images / "zz.png").write_bytes(b"no image")
    for ending in ("csv", "jsonl", "parquet"):
        done = fedcache(
            "predict --top 2 --workers 0 --json",
            run,
            images,
            "-o",
            tmp_path / f"out.{ending}",
        )
        assert done.code == 3  # one image could not be read
    table = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    columns = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert lines == done.data["rows"]
    for in_csv, in_parquet, line in zip(table, columns, lines, strict=True):
        assert (in_csv["class"] or None) == in_parquet["class"] == line["class"]
        assert [in_parquet["probability"], in_parquet["probability_2"]] == [
            p for _, p in line["top"]
        ] or line["reason"]
    # nothing is left over
    assert not list((Path(os.environ["FEDCACHE_HOME"]) / "scratch").iterdir())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (words_of("--store s photo.jpg"), 2),
        (words_of("photo.jpg -o out.xlsx"), 2),
        (words_of("photo.jpg -o nowhere/out.csv"), 2),
        (("photo.jpg", "--client", "a", "--global"), 2),
        (("photos.tar.gz",), 2),  # said before any image is read
        (("photo.jpg",), 5),  # it is no image, and there is no other
    ],
)
def test_what_cannot_be_predicted_is_refused(store, tmp_path, monkeypatch, words, code):
    run = trained(*FED3R)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(b"no image")
    (tmp_path / "photos.tar.gz").write_bytes(b"")
    assert fedcache("predict", run, *words).code == code


def test_a_damaged_list_of_models_names_the_command_that_makes_it_again(store):
    run = trained(*FED3R)
    index = run / "models" / "models.json"
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(CorruptionError, match=r"models\.json") as caught:
        fc.load_model(run)
    assert caught.value.hint.endswith(f"fedcache train --config {run / 'config.toml'} --fresh")
