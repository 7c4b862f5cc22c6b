"""``fedcache export-model``: what it writes is used without fedcache, and says what ``predict`` says."""

import io
import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import torch
from command import fedcache, ok, words_of
from federation import VARIANTS, scaled, small
from pictures import folder, picture
from PIL import Image
from safetensors import safe_open

from fedcache.config import Home
from fedcache.federate.methods import METHODS
from fedcache.models.saved_model import ModelOptions
from fedcache.progress import Silent
from fedcache.report.methods.facts import rows_in_models
from fedcache.report.model_card import model_card
from fedcache.runs.predict_run import open_predictor


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two backbones over a folder of images; runs of a method with one model, and of one with a model per client."""
    root = tmp_path_factory.mktemp("export")
    patched = pytest.MonkeyPatch()
    patched.setenv("FEDCACHE_HOME", str(root / "home"))
    folder(root / "shapes", train=8, test=4)
    both = ("--backbones", "glyph-clip,random-projection")
    ok("extract", "-d", f"folder:{root / 'shapes'}", *both, "--workers", 0)
    yield (
        root,
        {
            "one": ok("train --method fed3r", *both, "--clients", 2, "--scheme", "iid").data[
                "path"
            ],
            "many": ok(
                "train --method fedproto --backbones random-projection --clients 2 --scheme iid --rounds 1 --set dim=8",
            ).data["path"],
        },
    )
    patched.undo()


def images(root):
    return sorted((root / "shapes" / "test").rglob("*.png"))


def said_by_predict(run, paths, *words):
    rows = ok("predict", run, *paths, *words).data["rows"]
    return [(row["class"], row["probability"]) for row in rows]


@pytest.mark.slow
def test_a_folder_classifies_images_in_batches_with_the_same_figures(home, tmp_path, monkeypatch):
    root, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m")
    script = (tmp_path / "m" / "predict.py").read_text()
    assert script in (tmp_path / "m" / "README.md").read_text()  # what is shown is what runs
    some = [str(path) for path in images(root)]
    many = (some * 6)[:70]
    loaded, seen = torch.export.load, []

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
    alone = [said_by_script(tmp_path / "m", [path], monkeypatch)[0] for path in some]
    assert [line[0] for line in together] == many
    for (_, name, p), (wanted, q) in zip(alone, said_by_predict(runs["one"], some), strict=True):
        assert name == wanted
        # 1.1e-4 where features are not rounded as the store rounds them
        assert float(p) == pytest.approx(q, abs=5e-5)
    for (path, name, p), (_, alike, q) in zip(together, (alone * 6)[:70], strict=True):
        assert name == alike, path
        # Batches of other sizes sum in another order, of which float16 features show some.
        assert float(p) == pytest.approx(float(q), abs=5e-5)


def test_the_card_says_that_a_model_holds_a_clients_rows_one_by_one(home, monkeypatch):
    root, runs = home
    monkeypatch.setenv("FEDCACHE_HOME", str(root / "home"))
    clip = (
        *words_of("--backbones glyph-clip --scheme iid --clients 2"),
        "--dataset",
        f"folder:{root / 'shapes'}",
    )
    cached = ok("train --method tip-local", *clip).data["path"]
    for run, says in ((cached, True), (runs["many"], False)):
        predictor = open_predictor(
            Path(run), ModelOptions(client="client-1"), Home.from_environment(), Silent()
        )
        card = model_card(predictor, None, Home.from_environment())
        assert "made of that client's rows" in card
        assert ("keys and label hold every training row of client-1 one by one" in card) is says
        part = predictor.deployed[0].personal
        rows = {t.shape[0] for t in part.values()}
        # 24 training rows of 2 clients
        assert (rows == {12} and part["keys"].shape == (12, 128)) is says


def test_no_switch_makes_a_model_hold_rows_that_the_default_does_not():
    for name, settings in VARIANTS:
        held = rows_in_models(METHODS[name], scaled({**small(name), **settings}))
        assert held == rows_in_models(METHODS[name]), name


@pytest.mark.slow
def test_the_documentation_names_the_methods_whose_models_hold_rows():
    held = {name: rows_in_models(method) for name, method in METHODS.items()}
    assert {name for name, names in held.items() if names} == {
        "pfedprompt",
        "tip-local",
    }  # a new one is to be told of as well
    page = (Path(__file__).parents[2] / "docs" / "from-run-to-prediction.md").read_text()
    for name, names in held.items():
        assert (f"A client's model of `{name}` holds more" in page) == bool(names)


def test_tensors_and_estimator_of_a_linear_head(home, tmp_path):
    root, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m.safetensors")
    ok("export-model", runs["one"], "-o", tmp_path / "m.joblib")
    ok(
        "export",
        tmp_path / "features.npz",
        "--store",
        next((root / "home" / "stores").glob("*.zarr")),
    )
    held = np.load(tmp_path / "features.npz", allow_pickle=False)
    x = np.concatenate(
        [np.asarray(held[k], np.float64).reshape(len(held[k]), -1) for k in FEATURES(held)], -1
    )
    rows = ok("predict", runs["one"], "--embeddings", tmp_path / "features.npz").data["rows"]
    made = joblib.load(tmp_path / "m.joblib")
    assert list(made.predict(x)) == [row["class"] for row in rows]
    assert (
        np.abs(made.predict_proba(x).max(-1) - [row["probability"] for row in rows]).max() <= 1e-6
    )
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["classes"]) == ["10", "ant", "zebra"]
        assert file.get_tensor("linear/weight").shape == (3, 192)


def FEATURES(held):  # noqa: N802
    """Names of the arrays of features in a file, glyph-clip first, as the run joined them."""
    return sorted(k for k in held if k.startswith("features"))


@pytest.mark.slow
def test_nothing_is_written_over_without_force(home, tmp_path):
    _, runs = home
    mine = tmp_path / "m.safetensors"
    mine.write_text("mine")
    done = fedcache("export-model", runs["one"], "-o", mine)
    assert done.code == 4
    assert mine.read_text() == "mine"
    ok("export-model --force", runs["one"], "-o", mine)
    taken = tmp_path / "d"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert fedcache("export-model", runs["one"], "-o", taken).code == 4
    ok("export-model --force", runs["one"], "-o", taken)
    assert (taken / "notes.txt").read_text() == "mine"  # other files of a folder stay
    assert (taken / "model.pt2").exists()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("-o", "m.zip"),
        words_of("-o m.pt2 --seed all"),
        words_of("-o m.pt2 --client client-0"),
        words_of("-o . --format onnx"),
    ],
)
def test_what_makes_no_sense_is_refused(home, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert fedcache("export-model", home[1]["one"], *words).code == 2
    assert not list(tmp_path.iterdir())


class Opened:
    """Makes a folder when a pickle of it is opened."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.mark.slow
def test_embeddings_of_no_known_backbone_are_exported_as_a_head(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDCACHE_HOME", str(tmp_path / "home"))
    g = np.random.default_rng(3)
    y = g.integers(0, 3, 90)
    x = (np.eye(3)[y] @ g.standard_normal((3, 6)) + 0.3 * g.standard_normal((90, 6))).astype(
        np.float32
    )
    np.savez(
        tmp_path / "e.npz", features=x, label=y, split=(np.arange(90) % 3 == 0).astype(np.int64)
    )
    ok("ingest --name mine", tmp_path / "e.npz")
    run = ok("train --method fedncm --clients 2 --scheme iid").data["path"]
    picture(0, 0).save(tmp_path / "a.png")
    assert fedcache("predict", run, tmp_path / "a.png").code == 4
    np.save(tmp_path / "x.npy", x)
    found = ok("export-model", run, "-o", tmp_path / "m").data
    assert [i["kind"] for i in found["inputs"]] == ["features"]
    rows = ok("predict", run, "--embeddings", tmp_path / "x.npy").data["rows"]
    lines = said_by_script(tmp_path / "m", [tmp_path / "x.npy"], monkeypatch)
    assert [name for _, name, _ in lines] == [row["class"] for row in rows]
    assert (
        max(abs(float(p) - row["probability"]) for (_, _, p), row in zip(lines, rows, strict=True))
        <= 1e-4
    )
    # What is no array, and one of another width, are named; the others are classified all the same.
    np.save(tmp_path / "narrow.npy", x[:, 1:])
    np.save(tmp_path / "pickle.npy", np.array([Opened(tmp_path / "opened")], object))
    lost = [str(tmp_path / name) for name in ("missing.npy", "narrow.npy", "pickle.npy")]
    monkeypatch.setattr(sys, "argv", ["predict.py", *lost, str(tmp_path / "x.npy")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "m" / "predict.py"), run_name="__main__")
    assert ended.value.code == 1
    again = capsys.readouterr()
    assert [line.split("\t") for line in again.out.splitlines()] == lines
    assert [line.split("\t-\t")[0] for line in again.err.splitlines() if "\t-\t" in line] == lost
    assert not (tmp_path / "opened").exists()


def said_by_script(place, paths, monkeypatch):
    """The lines that the script of an exported folder prints, in cells."""
    printed = io.StringIO()
    with monkeypatch.context() as patched, redirect_stdout(printed):
        patched.setattr(sys, "argv", ["predict.py", *map(str, paths)])
        runpy.run_path(str(place / "predict.py"))
    return [line.split("\t") for line in printed.getvalue().splitlines()]


def test_without_the_extra_no_graph_is_written(home, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = fedcache("export-model", home[1]["one"], "-o", tmp_path / "m.onnx")
    assert done.code == 6
    assert "fedcache[export]" in done.err
    assert not list(tmp_path.glob("m.*"))


@pytest.mark.slow
def test_a_folder_names_the_images_that_it_cannot_read_and_classifies_the_others(
    home, tmp_path, monkeypatch, capsys
):
    root, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m")
    good, damaged, bomb = images(root)[0], tmp_path / "none.png", tmp_path / "none, a bomb.png"
    damaged.write_bytes(b"no image")
    # Pillow refuses an image of more than twice its limit, here set so low that a small one is such an image.
    picture(0, 0, 200).save(bomb)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    monkeypatch.setattr(sys, "argv", ["predict.py", str(damaged), str(bomb), str(good)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "m" / "predict.py"))
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert [line.split("\t")[0] for line in said.err.splitlines()] == [str(damaged), str(bomb)]
    ((path, name, p),) = [line.split("\t") for line in said.out.splitlines()]
    ((wanted, q),) = said_by_predict(runs["one"], [good])
    assert (path, name) == (str(good), wanted)
    assert float(p) == pytest.approx(q, abs=5e-5)
