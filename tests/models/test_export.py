"""``fedcache export-model``: what it writes is used without fedcache, and says what ``predict`` says."""

import io
import json
import runpy
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import torch
from arrays import embeddings, ingested
from command import data_of, fedcache, ok
from draws import FULL
from failing_command import must_fail, must_fail_machine
from federation import VARIANTS, scaled, small
from homes import made_once
from loaded_files import content
from made_path import place_of, run_of
from pictures import folder, picture
from PIL import Image
from safetensors import safe_open
from trap import Trap

import fedcache as fc
from fedcache.config import Home
from fedcache.federate.methods import METHODS
from fedcache.models.saved_model import ModelOptions
from fedcache.progress import Silent
from fedcache.report.methods.facts import rows_in_models
from fedcache.report.model_card import model_card
from fedcache.runs.predict_run import open_predictor


@made_once
def shapes(place):
    """Two backbones over a folder of images; runs of a method with one model, and of one with a model per client."""
    images = folder(place / "shapes", train=8)
    ok(f"extract -d folder:{images} --backbones glyph-clip,random-projection --workers 0")
    iid = "--clients 2 --scheme iid"
    ok(f"train --method fed3r --backbones glyph-clip,random-projection {iid}")
    ok(f"train --method fedproto --backbones random-projection {iid} --rounds 1 --set dim=8")
    return images


def images(shapes):
    return sorted((shapes / "test").rglob("*.png"))


def said_by_predict(paths):
    rows = data_of("predict", run_of("fed3r"), *paths)["rows"]
    return [(row["class"], row["probability"]) for row in rows]


@pytest.mark.slow
def test_a_folder_classifies_images_in_batches_with_the_same_figures(shapes, tmp_path, monkeypatch):
    ok(f"export-model {run_of('fed3r')} -o {tmp_path}/m")
    script = (tmp_path / "m/predict.py").read_text()
    assert script in (tmp_path / "m/README.md").read_text()  # what is shown is what runs
    some = [str(path) for path in images(shapes)]
    many = (some * 6)[:70]
    few = some if FULL else some[:3]
    loaded = torch.export.load
    seen = []

    def watched(path):
        """The program, telling how many images each call was given."""
        module = loaded(path).module()

        def counting(*inputs):
            seen.append({len(x) for x in inputs})
            return module(*inputs)

        return SimpleNamespace(module=lambda: counting)

    monkeypatch.setattr(torch.export, "load", watched)
    together = said_by_script(tmp_path / "m", many, monkeypatch)
    assert seen == [{32}, {32}, {6}]
    assert [line[0] for line in together] == many
    alone = [said_by_script(tmp_path / "m", [path], monkeypatch)[0] for path in few]
    wanted = said_by_predict(some)
    # 1.1e-4 where features are not rounded as the store rounds them. Batches of other sizes sum in another order, of
    # which float16 features show some.
    for lines, said in ((alone, wanted[: len(few)]), (together, (wanted * 6)[:70])):
        for (path, name, p), (known, q) in zip(lines, said, strict=True):
            assert name == known, path
            assert float(p) == pytest.approx(q, abs=5e-5)


def test_the_card_says_that_a_model_holds_a_clients_rows_one_by_one(shapes, own_home):
    clip = f"--backbones glyph-clip --scheme iid --clients 2 --dataset folder:{shapes}"
    home = Home(own_home)
    for run, says in ((place_of(f"train tip-local {clip}"), True), (run_of("fedproto"), False)):
        predictor = open_predictor(run, ModelOptions(client="client-1"), home, Silent())
        card = model_card(predictor, None, home)
        assert "computed only from the rows of client-1" in card
        assert (
            "training row of client-1, its features and its class: keys and label." in card
        ) is says
        part = predictor.deployed[0].personal
        rows = {t.shape[0] for t in part.values()}
        # 24 training rows of 2 clients
        assert (rows == {12} and part["keys"].shape == (12, 128)) is says


@pytest.mark.slow
def test_no_switch_makes_a_model_hold_rows_that_the_default_does_not():
    for name, settings in VARIANTS:
        held = rows_in_models(METHODS[name], scaled(small(name) | settings))
        assert held == rows_in_models(METHODS[name]), name


@pytest.mark.slow
def test_the_documentation_names_the_methods_whose_models_hold_rows():
    held = {name: rows_in_models(method) for name, method in METHODS.items()}
    # a new one is to be told of as well
    assert {name for name, names in held.items() if names} == {"pfedprompt", "tip-local"}
    page = content("docs/from-run-to-prediction.md")
    named = page.partition("**: also the features and the class of every training row")[0]
    named = named.rpartition("**With")[2]
    for name, names in held.items():
        assert (f"`{name}`" in named) == bool(names)


def test_tensors_and_estimator_of_a_linear_head(shapes, tmp_path):
    run = run_of("fed3r")
    ok(f"export-model {run} -o {tmp_path}/m.safetensors")
    ok(f"export-model {run} -o {tmp_path}/m.joblib")
    store = place_of("inspect")
    ok(f"export {tmp_path}/features.npz --store {store}")
    x, _ = fc.Store.open(store).Xy(["glyph-clip", "random-projection"], split=None)
    rows = data_of(f"predict {run} --embeddings {tmp_path}/features.npz")["rows"]
    made = joblib.load(tmp_path / "m.joblib")
    assert list(made.predict(x)) == [row["class"] for row in rows]
    found = made.predict_proba(x.astype(np.float64)).max(-1)
    assert np.abs(found - [row["probability"] for row in rows]).max() <= 1e-6
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["classes"]) == ["10", "ant", "zebra"]
        assert file.get_tensor("linear/weight").shape == (3, 192)


@pytest.mark.slow
def test_nothing_is_written_over_without_force(shapes, tmp_path):
    mine = tmp_path / "m.safetensors"
    notes = tmp_path / "d/notes.txt"
    notes.parent.mkdir()
    for place, taken in ((mine, mine), (notes.parent, notes)):
        taken.write_text("mine")
        words = f"export-model {run_of('fed3r')} -o {place}"
        assert fedcache(words).code == 4
        assert taken.read_text() == "mine"
        ok(f"{words} --force")
    assert notes.read_text() == "mine"  # other files of a folder stay
    assert (notes.parent / "model.pt2").exists()


@pytest.mark.parametrize(
    "words",
    ["", "-o m.zip", "-o m.pt2 --seed all", "-o m.pt2 --client client-0", "-o . --format onnx"],
)
def test_what_makes_no_sense_is_refused(shapes, here, words):
    before = list(here.iterdir())
    must_fail("", f"export-model {run_of('fed3r')} {words}")
    assert list(here.iterdir()) == before


@pytest.mark.slow
def test_embeddings_of_no_known_backbone_are_exported_as_a_head(tmp_path, monkeypatch):
    ingested(tmp_path)
    run = place_of("train --method fedncm --clients 2 --scheme iid")
    picture(0, 0).save(tmp_path / "a.png")
    assert fedcache(f"predict {run} {tmp_path}/a.png").code == 4
    x, *_ = embeddings()
    np.save(tmp_path / "x.npy", x)
    found = data_of(f"export-model {run} -o {tmp_path}/m")
    assert [i["kind"] for i in found["inputs"]] == ["features"]
    rows = data_of(f"predict {run} --embeddings {tmp_path}/x.npy")["rows"]
    lines = said_by_script(tmp_path / "m", [tmp_path / "x.npy"], monkeypatch)
    assert [name for _, name, _ in lines] == [row["class"] for row in rows]
    found = np.array([float(p) for *_, p in lines])
    assert np.abs(found - [row["probability"] for row in rows]).max() <= 1e-4
    # What is no array, and one of another width, are named; the others are classified all the same.
    np.save(tmp_path / "narrow.npy", x[:, 1:])
    np.save(tmp_path / "pickle.npy", np.array([Trap(tmp_path / "opened")], object))
    lost = [f"{tmp_path}/{name}" for name in ("missing.npy", "narrow.npy", "pickle.npy")]
    assert said_by_script(tmp_path / "m", [tmp_path / "x.npy"], monkeypatch, lost) == lines
    assert not (tmp_path / "opened").exists()


def said_by_script(place, paths, monkeypatch, lost=()):
    """The lines that the script of an exported folder prints, in cells; it ends with 1 where it names lost files."""
    out = io.StringIO()
    err = io.StringIO()
    ends = pytest.raises(SystemExit, match=r"^1$") if lost else nullcontext()
    with monkeypatch.context() as patched, redirect_stdout(out), redirect_stderr(err), ends:
        patched.setattr(sys, "argv", ["predict.py", *map(str, (*lost, *paths))])
        runpy.run_path(f"{place}/predict.py", run_name="__main__")
    errors = err.getvalue().splitlines()
    assert [line.split("\t")[0] for line in errors if "\t-\t" in line] == [*lost]
    return [line.split("\t") for line in out.getvalue().splitlines()]


def test_without_the_extra_no_graph_is_written(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    must_fail_machine("fedcache[export]", f"export-model {run_of('fed3r')} -o {tmp_path}/m.onnx")
    assert not list(tmp_path.glob("m.*"))


@pytest.mark.slow
def test_a_folder_names_the_images_that_it_cannot_read_and_classifies_the_others(
    shapes, tmp_path, monkeypatch
):
    ok(f"export-model {run_of('fed3r')} -o {tmp_path}/m")
    good = images(shapes)[0]
    damaged = tmp_path / "none.png"
    bomb = tmp_path / "none, a bomb.png"
    damaged.write_bytes(b"no image")
    # Pillow refuses an image of more than twice its limit, here set so low that a small one is such an image.
    picture(0, 0, 200).save(bomb)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    lost = [str(damaged), str(bomb)]
    ((path, name, _),) = said_by_script(tmp_path / "m", [good], monkeypatch, lost)
    assert path == str(good)
    assert name == said_by_predict([good])[0][0]
