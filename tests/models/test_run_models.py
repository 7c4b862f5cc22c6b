"""Models of runs on disk: which are kept, that they are whole or refused, and that they say what the run scored."""

import csv
import json
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from command import data_of, fedcache, ok
from damage import flip_bit
from failing_command import must_fail, must_fail_corrupt, must_fail_store
from files_now import bytes_of
from homes import made_once
from made_path import extracted, place_of
from pictures import folder
from pyarrow import parquet
from refusal import machine_error, refused

import fedcache as fc
from fedcache.config import SaveModels
from fedcache.federate.execution.memory_estimate import Load
from fedcache.federate.methods import METHODS
from fedcache.models.saved_model import SavedModel
from fedcache.runs import directory, loop
from fedcache.runs.loop import KeptModels, drop
from fedcache.runs.predict_run import model_file
from fedcache.store.files import file_sha256

IID = "--scheme iid --clients 3"
FED3R = f"train --method fed3r {IID}"
FEDPCL = f"train --method fedpcl {IID} --rounds 2 --set dim=4"


def model_of(run):
    """The model of the first seed of a run."""
    return SavedModel.load(model_file(run, 0))


store = made_once(extracted)


def test_the_same_run_has_the_same_model_to_the_byte(store):
    run = place_of(f"{FEDPCL} --seeds 0,1")
    before = [model_file(run, seed).read_bytes() for seed in (0, 1)]
    assert place_of(f"{FEDPCL} --seeds 0,1 --fresh") == run
    assert [model_file(run, seed).read_bytes() for seed in (0, 1)] == before
    assert before[0] != before[1]


def test_a_flipped_bit_and_a_model_of_another_run_are_corruption(store):
    run = place_of(FED3R)
    other = place_of(f"{FED3R} --set lam=1.0")
    path = model_file(run, 0)
    index = run / "models/models.json"
    flip_bit(path, -1)
    train = f"train --config {run / 'config.toml'}"
    again = f"{train} --fresh"
    for command in ("predict", "evaluate"):
        must_fail_corrupt(again, f"{command} {run} --store {store}")
    must_fail_corrupt("--fresh", train)
    assert fedcache(f"predict {path} --store {store}").code == 5  # the file by itself too
    shutil.copy(model_file(other, 0), path)
    assert fedcache(f"predict {run} --store {store}").code == 5
    shutil.copytree(other / "models", run / "models", dirs_exist_ok=True)
    assert fedcache(f"predict {run} --store {store}").code == 5
    index.write_bytes(index.read_bytes()[:-9])
    must_fail_corrupt(again, f"predict {run} --store {store}")
    shutil.rmtree(run)
    shutil.copytree(other, run)
    assert fedcache(f"predict {run} --store {store}").code == 5


def test_the_model_of_the_first_seed_that_is_missing_is_not_replaced_by_that_of_another(store):
    run = place_of(f"{FED3R} --seeds 0,1")
    model_file(run, 0).unlink()
    must_fail_corrupt("seed-0.safetensors is missing", f"predict {run} --store {store}")
    assert data_of(f"predict {run} --store {store} --seed 1")["rows"]


def test_a_run_without_a_model_names_the_command_that_trains_it_again(store):
    run = place_of(f"{FED3R} --no-model")
    assert not (run / "models").exists()
    command = f"train --config {run / 'config.toml'} --fresh"
    must_fail_store(f"fedcache {command}", f"predict {run} --store {store}")
    before = (run / "result.json").read_bytes()
    ok(command)
    assert data_of(f"predict {run} --store {store}")["rows"]
    # a result has the same bits with and without a model
    assert (run / "result.json").read_bytes() == before


def test_a_model_that_other_code_made_is_used_with_a_warning(store, tmp_path):
    model = model_of(place_of(FED3R))
    before = "0123456789abcdef" * 4
    for code, warned in ((model.facts.code, False), (before, True)):
        path = tmp_path / f"{code}.safetensors"
        replace(model, facts=replace(model.facts, code=code)).save(path)
        warnings = ok(f"evaluate {path} --store {store}").warnings
        assert any(before[:8] in line for line in warnings) is warned


def test_a_private_run_saves_no_clients_own_model(store):
    private = f"{IID} --rounds 1 --dp-clip 1 --dp-noise 1 --dp-allow evaluation"
    model = model_of(place_of(f"train --method ditto {private}"))
    assert model.clients == []
    assert not [name for name in model.tensors if name.startswith("clients/")]
    words = f"train --method fedavg --set feat_post=standardize {private}"
    must_fail("statistics", words)
    model = model_of(place_of(f"{words},statistics"))
    assert {"features/mean", "features/scale"} <= set(model.tensors)


@pytest.mark.parametrize(("keep", "left"), [("best", 1), ("all", 3), ("none", 0)])
def test_a_grid_keeps_the_models_that_are_asked_for(store, keep, left):
    words = f"grid --method fedavg --sweep lr=0.0001,0.5,0.1 {IID} --rounds 2 --save-models {keep}"

    def with_models():
        return [p for p in data_of(words)["points"] if (Path(p["path"]) / "models").exists()]

    kept = with_models()
    assert len(kept) == left
    assert [p["path"] for p in with_models()] == [p["path"] for p in kept]
    if keep == "best":
        assert kept[0]["digest"] == data_of(words)["best"]["digest"]


def test_a_grid_keeps_the_model_of_a_run_that_is_two_points(store):
    """A method of one round has one run for every number of rounds."""
    points = data_of(f"grid --method fed3r --sweep rounds=1,2 {IID}")["points"]
    (path,) = {p["path"] for p in points}
    assert (Path(path) / "models/models.json").is_file()


def test_models_that_are_removed_while_a_run_is_checked_are_no_damage(store, monkeypatch):
    run = place_of(FED3R)

    def removed(path):
        drop(run)
        return file_sha256(path)

    monkeypatch.setattr(directory, "file_sha256", removed)
    directory.check_models(run, directory.read_result(run / "result.json"))
    assert not (run / "models").exists()


def test_a_save_that_fails_leaves_no_result_and_the_run_goes_on_from_there(store, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "seal", fails)
        assert fedcache(f"{FEDPCL} --seeds 0,1").code != 0
    (run,) = (store.parents[1] / "runs").iterdir()
    assert not (run / "result.json").exists()
    whole = model_file(run, 0).read_bytes()
    model_file(run, 1).write_bytes(whole[:100])  # torn: its seed begins again
    assert place_of(f"{FEDPCL} --seeds 0,1") == run
    assert model_file(run, 0).read_bytes() == whole
    assert data_of(f"predict {run} --seed all --client client-0 --store {store}")["rows"]


def test_weights_that_are_not_those_of_the_model_are_refused(store, tmp_path):
    model = model_of(place_of(FED3R))
    (recipe,) = model.facts.recipes
    made = {**recipe, "weights": "seed:7"}
    facts = replace(model.facts, keys=(fc.Recipe.from_dict(made).key,), recipes=(made,))
    replace(model, facts=facts).save(tmp_path / "m.safetensors")
    images = folder(tmp_path / "shapes", train=1, test=1)
    for words, code in ((f"{images} --workers 0", 6), (f"--store {store}", 4)):
        must_fail("seed:7", f"predict {tmp_path}/m.safetensors {words}", code=code)


def test_features_of_another_recipe_are_told_with_the_command_that_makes_those_of_the_run(
    store, tmp_path
):
    run = place_of(FED3R)
    images = folder(tmp_path / "other", train=2, test=2)
    words = "extract --backbones random-projection --workers 0 --recipe size=16 --dataset"
    other = place_of(f"{words} folder:{images}")
    error = must_fail_store("size 16 instead of 32", f"predict {run} --store {other}")
    ok(*shlex.split(error["hint"])[1:], "--workers", 0)
    assert len(data_of(f"predict {run} --store {other}")["rows"]) == 12


@pytest.mark.slow
def test_predictions_are_written_in_three_formats(store, own_home, tmp_path):
    run = place_of(FED3R)
    images = folder(tmp_path / "shapes", train=1, test=1)
    (images / "zz.png").write_bytes(b"no image")
    words = f"predict --top 2 --workers 0 --json {run} {images} -o {tmp_path}/out"
    for ending in ("csv", "jsonl", "parquet"):
        done = fedcache(f"{words}.{ending}")
        assert done.code == 3  # one image could not be read
    table = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    columns = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert lines == done.data["rows"]
    assert [row["class"] or None for row in table] == [line["class"] for line in lines]
    for row, line in zip(columns, lines, strict=True):
        assert row["class"] == line["class"]
        two = [row["probability"], row["probability_2"]]
        assert line["reason"] or two == [p for _, p in line["top"]]
    # nothing is left over
    assert not list((own_home / "scratch").iterdir())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", 2),
        ("--store s photo.jpg", 2),
        ("photo.jpg -o out.xlsx", 2),
        ("photo.jpg -o nowhere/out.csv", 2),
        ("photo.jpg --client a --global", 2),
        ("photos.tar.gz", 2),  # said before any image is read
        ("photo.jpg", 5),  # it is no image, and there is no other
    ],
)
def test_what_cannot_be_predicted_is_refused(store, here, words, code):
    run = place_of(FED3R)
    (here / "photo.jpg").write_bytes(b"no image")
    (here / "photos.tar.gz").write_bytes(b"")
    assert fedcache(f"predict {run} {words}").code == code


@pytest.mark.slow
def test_predictions_are_not_written_over_what_they_are_made_of(store, tmp_path):
    run = place_of(FED3R)
    mine = tmp_path / "emb.parquet"
    link = tmp_path / "link.parquet"
    x, _ = fc.Store.open(store).Xy()
    parquet.write_table(pa.table({"features": x.tolist()}), mine)
    link.symlink_to(mine)
    before = bytes_of(run)
    features = mine.read_bytes()
    for words in (
        f"--embeddings {mine} -o {mine}",
        f"--embeddings {mine} -o {link}",
        f"--store {store} -o {run}/rounds.jsonl",
    ):
        must_fail("", f"predict {run} {words}")
    assert bytes_of(run) == before
    assert mine.read_bytes() == features
    assert len(data_of(f"predict {run} --embeddings {mine} -o {run}/new.parquet")["rows"]) == len(x)


def test_an_exported_model_is_not_written_over_the_model(store, tmp_path):
    run = place_of(FED3R)
    mine = shutil.copy(model_file(run, 0), tmp_path / "m.safetensors")
    before = bytes_of(run)
    model = mine.read_bytes()
    for place, out in ((mine, mine), (run, model_file(run, 0)), (run, run)):
        must_fail("", f"export-model --force {place} -o {out}")
    assert bytes_of(run) == before
    assert mine.read_bytes() == model
    head = tmp_path / "head.safetensors"
    ok(f"export-model {mine} -o {head}")
    assert fedcache(f"predict {head} photo.png").code == 4  # it is whole, and no model of fedcache


def test_a_model_file_has_the_one_seed_that_it_holds(store):
    run = place_of(f"{FED3R} --seeds 0,1")
    file = model_file(run, 1)
    for seed in (0, "all"):
        must_fail("seed 1", f"predict {file} --store {store} --seed {seed}")
    refused(lambda: fc.load_model(file, seed=0), "seed 1")
    named = data_of(f"predict --seed 1 {file} --store {store}")["rows"]
    for model in (file, f"--seed 1 {run}"):
        assert named == data_of(f"predict {model} --store {store}")["rows"]


def test_a_client_whose_model_was_not_saved_is_told_from_one_that_is_not_there(store):
    run = place_of(f"{FEDPCL} --save-clients client-1")
    for place in (run, model_file(run, 0)):
        error = must_fail("'client-2'", f"predict {place} --client client-2 --store {store}")
    ok(*shlex.split(error["hint"])[1:])
    assert model_of(run).clients == ["client-1", "client-2"]  # none is lost
    ok(f"predict {run} --client client-2 --store {store}")
    for words in ("--client nobody", "--global", ""):  # fedpcl has no model for all
        must_fail("", f"predict {run} {words} --store {store}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--weights glyph-clip=w.pt", "glyph-clip"),
        ("--top 4", "--top is 4"),
        ("--temperature inf", "inf"),
    ],
)
def test_what_a_model_cannot_do_is_refused_with_what_it_can(store, words, said):
    must_fail(said, f"predict {place_of(FED3R)} --store {store} {words}")


def test_a_probe_is_counted_in_addition_to_the_rows_of_a_client():
    """pfedprompt saves the class features of its prompt, and each client's 5 rows of 3 numbers of 4 bytes."""
    load = Load(10, 1, rows=np.array([5]), width=3, itemsize=4)
    kept = KeptModels(SaveModels("all", "all"))
    peak = SimpleNamespace(above=0, working=0)
    needed = 4 * (2 * 10 + 5 * 3 * 4 + 10)
    room = partial(kept.check_room, METHODS["pfedprompt"], load, peak, ["client-1"])
    room(needed)
    machine_error(lambda: room(needed - 1), "--save-clients")
