"""What a person asks of a model in error is refused in words that can be followed, and nothing is written over."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from command import fedcache, ok
from pyarrow import parquet
from refusal import refused
from test_run_models import IID, extracted, trained

import fedcache as fc
from fedcache.models.saved_model import SavedModel
from fedcache.runs.run_models import model_file

FEDPCL = ("train --method fedpcl", *IID, "--rounds", 1, "--set", "dim=4")


@pytest.fixture
def store(once):
    return once(extracted)


def fed3r(*words):
    return trained("train --method fed3r", *IID, *words)


def embeddings_for(run, path):
    """Ten rows of features for the model of a run, in a parquet file."""
    width = sum(SavedModel.load(model_file(run, 0)).facts.widths)
    x = np.random.default_rng(0).standard_normal((10, width)).astype(np.float32)
    parquet.write_table(
        pa.table({"features": pa.FixedSizeListArray.from_arrays(x.ravel(), width)}), path
    )
    return path


def contents(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_predictions_are_not_written_over_what_they_are_made_of(store, tmp_path):
    run = fed3r()
    mine = embeddings_for(run, tmp_path / "emb.parquet")
    (tmp_path / "link.parquet").symlink_to(mine)
    before, features = contents(run), mine.read_bytes()
    for words in (
        ("predict", run, "--embeddings", mine, "-o", mine),
        ("predict", run, "--embeddings", mine, "-o", tmp_path / "link.parquet"),
        ("predict", run, "--store", store, "-o", run / "rounds.jsonl"),
        ("evaluate", run, "--store", store, "-o", run / "result.json"),
    ):
        assert fedcache(*words).code == 2
    assert (contents(run), mine.read_bytes()) == (before, features)
    assert (
        len(ok("predict", run, "--embeddings", mine, "-o", run / "new.parquet").data["rows"]) == 10
    )


def test_an_exported_model_is_not_written_over_the_model(store, tmp_path):
    run = fed3r()
    mine = Path(shutil.copy(model_file(run, 0), tmp_path / "m.safetensors"))
    before, model = contents(run), mine.read_bytes()
    for place, out in ((mine, mine), (run, model_file(run, 0)), (run, run)):
        assert fedcache("export-model --force", place, "-o", out).code == 2
    assert (contents(run), mine.read_bytes()) == (before, model)
    ok("export-model", mine, "-o", tmp_path / "other.safetensors")


def test_a_model_file_has_the_one_seed_that_it_holds(store):
    run = fed3r("--seeds", "0,1")
    file = model_file(run, 1)
    for seed in (0, "all"):
        done = fedcache("predict", file, "--store", store, "--seed", seed)
        assert done.code == 2
        assert "seed 1" in done.err
    refused(lambda: fc.load_model(file, seed=0), "seed 1")
    named = ok("predict --seed 1", file, "--store", store).data["rows"]
    assert named == ok("predict", file, "--store", store).data["rows"]
    assert named == ok("predict --seed 1", run, "--store", store).data["rows"]


def test_a_client_whose_model_was_not_saved_is_told_from_one_that_is_not_there(store):
    run = trained(*FEDPCL, "--save-clients", "client-1")
    for place in (run, model_file(run, 0)):
        done = fedcache("predict --client client-2 --json", place, "--store", store)
        assert done.code == 2
        assert "'client-2'" in done.envelope["error"]["message"]
    assert fedcache(*shlex.split(done.envelope["error"]["hint"])[1:]).code == 0
    assert SavedModel.load(model_file(run, 0)).clients == ["client-1", "client-2"]  # none is lost
    ok("predict --client client-2", run, "--store", store)
    for words in (("--client", "nobody"), ("--global",), ()):  # fedpcl has no model for all
        assert fedcache("predict", run, *words, "--store", store).code == 2


def test_an_exported_head_is_not_called_damaged(store, tmp_path):
    run = fed3r()
    head, damaged = tmp_path / "head.safetensors", tmp_path / "seed-0.safetensors"
    ok("export-model", run, "-o", head)
    assert fedcache("predict", head, "photo.png").code == 4
    raw = model_file(run, 0).read_bytes()
    for cut in (raw[:-1], raw[:4], b"", bytes([255] * 8) + raw[8:]):
        damaged.write_bytes(cut)
        assert fedcache("predict", damaged, "photo.png").code == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weights", "glyph-clip=w.pt"), "glyph-clip"),
        (("--top", 4), "--top is 4"),
        (("--temperature", "inf"), "inf"),
    ],
)
def test_what_a_model_cannot_do_is_refused_with_what_it_can(store, words, said):
    done = fedcache("predict", fed3r(), "--store", store, *words)
    assert done.code == 2
    assert said in done.err
