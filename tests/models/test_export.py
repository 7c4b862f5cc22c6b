"""``fedcache export-model``: what it writes is used without fedcache, and says what ``predict`` says."""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import torch
from command import fedcache, ok
from federation import VARIANTS, ids, scaled, small
from methods_tried import tried
from pictures import folder, picture
from PIL import Image
from safetensors import safe_open

from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.federate.methods import METHODS
from fedcache.models.export.formats import check_place, format_of
from fedcache.models.request import ModelOptions
from fedcache.progress import Silent
from fedcache.report.export_model import agreement
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
    yield root, {
        "one": ok("train", "--method", "fed3r", *both, "--clients", 2, "--scheme", "iid").data["path"],
        "many": ok("train", "--method", "fedproto", "--backbones", "random-projection", "--clients", 2,
                   "--scheme", "iid", "--rounds", 1, "--set", "dim=8").data["path"],
    }  # fmt: skip
    patched.undo()


def images(root):
    return sorted((root / "shapes" / "test").rglob("*.png"))


def without_fedcache(script, *words):
    """Run a script where fedcache cannot be imported."""
    blocked = "import sys; sys.modules['fedcache'] = None; import runpy; sys.argv = sys.argv[1:]; "
    code = blocked + "runpy.run_path(sys.argv[0], run_name='__main__')"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(script), *map(str, words)], capture_output=True, text=True, env=env,
        cwd=Path(script).parent, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_the_card_names_each_dtype_of_the_features_once_and_in_the_order_of_the_alphabet():
    recipes = [SimpleNamespace(dtype=dtype) for dtype in ("uint8", "int64", "float32", "int16", "float16", "float32")]
    moved = SimpleNamespace(scores=0.001, probabilities=0.0001)
    card = agreement(SimpleNamespace(module=SimpleNamespace(saved=SimpleNamespace(recipes=recipes)), libraries=moved))
    assert "Features are rounded to float16 and float32 and int16 and int64 and uint8, as the store" in card
    assert "scores changed by at most 0.001 and probabilities by 0.0001." in card


def said_by_predict(run, paths, *words):
    rows = ok("predict", run, *paths, *words).data["rows"]
    return [(row["class"], row["probability"]) for row in rows]


@pytest.mark.slow
def test_a_folder_classifies_images_without_fedcache(home, tmp_path):
    root, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m")
    script = (tmp_path / "m" / "predict.py").read_text()
    readme = (tmp_path / "m" / "README.md").read_text()
    assert script in readme  # what is shown is what runs
    assert "fedcache" not in script
    assert "## Agreement with predict" in readme
    assert "Features are rounded to float16" in readme
    found = without_fedcache(tmp_path / "m" / "predict.py", *images(root))
    for (path, name, p), (wanted, q), image in zip(
        found, said_by_predict(runs["one"], images(root)), images(root), strict=True
    ):
        assert (path, name) == (str(image), wanted)
        assert abs(float(p) - q) <= 5e-5  # 1.1e-4 where features are not rounded as the store rounds them


@pytest.mark.slow
def test_a_folder_classifies_images_in_batches_with_the_same_figures(home, tmp_path, monkeypatch):
    root, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m")
    some = [str(path) for path in images(root)]
    many = (some * 6)[:70]
    loaded, seen = torch.export.load, []

    def watched(path):
        """The program, telling how many images each call was given."""
        program = loaded(path)
        module = program.module()

        def counting(*inputs):
            seen.append({len(x) for x in inputs})
            return module(*inputs)

        return SimpleNamespace(module=lambda: counting)

    monkeypatch.setattr(torch.export, "load", watched)

    def said(paths):
        monkeypatch.setattr(sys, "argv", ["predict.py", *paths])
        printed = io.StringIO()
        with redirect_stdout(printed):
            runpy.run_path(str(tmp_path / "m" / "predict.py"))
        return [line.split("\t") for line in printed.getvalue().splitlines()]

    together = said(many)
    assert seen == [{32}, {32}, {6}]
    alone = [said([path])[0] for path in some]
    assert [line[0] for line in together] == many
    for (path, name, p), (_, alike, q) in zip(together, (alone * 6)[:70], strict=True):
        assert name == alike, path
        # Batches of other sizes sum in another order, of which float16 features show some.
        assert float(p) == pytest.approx(float(q), abs=5e-5)


@pytest.mark.slow
def test_a_folder_reads_what_predict_reads_and_names_what_it_cannot(home, tmp_path, monkeypatch, capsys):
    _, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m")
    g, place = np.random.default_rng(0), tmp_path / "photos"
    place.mkdir()
    Image.fromarray(g.integers(0, 65536, (40, 30), dtype=np.uint16)).save(place / "grey of 16 bits.png")
    Image.fromarray(g.integers(0, 256, (40, 30, 4), dtype=np.uint8)).save(place / "see-through.png")
    Image.fromarray(g.integers(0, 256, (40, 30), dtype=np.uint8)).save(place / "grey.png")
    paths = sorted(place.iterdir())
    (tmp_path / "none.png").write_bytes(b"no image")
    words = [str(paths[0]), str(tmp_path / "none.png"), *map(str, paths[1:]), str(paths[0])]
    # Pillow refuses an image of more than twice its limit, here set so low that a small one is such an image.
    limit = Image.MAX_IMAGE_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    Image.fromarray(g.integers(0, 256, (60, 50), dtype=np.uint8)).save(tmp_path / "none, a bomb.png")
    words.insert(2, str(tmp_path / "none, a bomb.png"))
    monkeypatch.setattr(sys, "argv", ["predict.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "m" / "predict.py"))
    assert ended.value.code == 1
    said = capsys.readouterr()
    found = [line.split("\t") for line in said.out.splitlines()]
    assert [line[0] for line in found] == [word for word in words if "none" not in word]
    damaged, bomb = said.err.splitlines()
    assert damaged.startswith(f"{tmp_path / 'none.png'}\t-\t")
    assert bomb.startswith(f"{tmp_path / 'none, a bomb.png'}\t-\t")
    assert "decompression bomb" in bomb
    monkeypatch.setattr(sys, "argv", ["predict.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "m" / "predict.py"), run_name="__main__")
    assert (ended.value.code, capsys.readouterr().err) == (2, "usage: python predict.py IMAGE...\n")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    for (_, name, p), (wanted, q) in zip(found, said_by_predict(runs["one"], [*paths, paths[0]]), strict=True):
        assert name == wanted
        assert float(p) == pytest.approx(q, abs=5e-5)


@pytest.mark.slow
def test_the_card_says_what_the_result_says(home, tmp_path):
    _, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        card = file.metadata()["card"]
    assert "Agreement" not in card  # it holds no backbone
    result = json.loads((Path(runs["one"]) / "result.json").read_text())
    for words in (
        result["dataset"]["digest"], result["partition"]["digest"], f"{100 * result['accuracy']['mean']:.2f} %",
        "Wilson interval", "licence of the weights: Apache-2.0", "licence of the weights: not known",
        "No noise was added", "bytes up",
    ):  # fmt: skip
        assert words in card, words


@pytest.mark.slow
def test_one_clients_model_says_so_and_is_that_clients(home, tmp_path):
    root, runs = home
    out = tmp_path / "m.pt2"
    ok("export-model", runs["many"], "-o", out, "--client", "client-1")
    extra = {"README.md": "", "model.json": ""}
    model = torch.export.load(out, extra_files=extra).module()
    facts = json.loads(extra["model.json"])
    assert facts["client"] == "client-1"
    assert "Give it to nobody" in extra["README.md"]
    from PIL import Image

    paths = images(root)
    side = facts["inputs"][0]["height"]
    kernel = Image.Resampling[facts["inputs"][0]["interpolation"].upper()]
    x = np.stack([np.array(Image.open(p).convert("RGB").resize((side, side), kernel)) for p in paths])
    probability = model(torch.from_numpy(x).permute(0, 3, 1, 2))[1]
    for row, (name, p) in zip(probability, said_by_predict(runs["many"], paths, "--client", "client-1"), strict=True):
        assert facts["classes"][int(row.argmax())] == name
        assert abs(float(row.max()) - p) <= 1e-4


def test_the_card_says_that_a_model_holds_a_clients_rows_one_by_one(home, monkeypatch):
    root, runs = home
    monkeypatch.setenv("FEDCACHE_HOME", str(root / "home"))
    clip = ("--dataset", f"folder:{root / 'shapes'}", "--backbones", "glyph-clip", "--scheme", "iid", "--clients", 2)
    cached = ok("train", "--method", "tip-local", *clip).data["path"]
    for run, says in ((cached, True), (runs["many"], False)):
        predictor = open_predictor(Path(run), ModelOptions(client="client-1"), Home.from_environment(), Silent())
        card = model_card(predictor, None, Home.from_environment())
        assert "made of that client's rows" in card
        assert ("keys and label hold every training row of client-1 one by one" in card) is says
        part = predictor.deployed[0].personal
        rows = {t.shape[0] for t in part.values()}
        assert (rows == {12} and part["keys"].shape == (12, 128)) is says  # 24 training rows of 2 clients


@pytest.mark.parametrize("case", tried(VARIANTS), ids=ids)
def test_no_switch_makes_a_model_hold_rows_that_the_default_does_not(case):
    name, settings = case
    assert rows_in_models(METHODS[name], scaled({**small(name), **settings})) == rows_in_models(METHODS[name])


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
    ok("export", tmp_path / "features.npz", "--store", next((root / "home" / "stores").glob("*.zarr")))
    held = np.load(tmp_path / "features.npz", allow_pickle=False)
    x = np.concatenate([np.asarray(held[k], np.float64).reshape(len(held[k]), -1) for k in FEATURES(held)], -1)
    rows = ok("predict", runs["one"], "--embeddings", tmp_path / "features.npz").data["rows"]
    made = joblib.load(tmp_path / "m.joblib")
    assert list(made.predict(x)) == [row["class"] for row in rows]
    assert np.abs(made.predict_proba(x).max(-1) - [row["probability"] for row in rows]).max() <= 1e-6
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["classes"]) == ["10", "ant", "zebra"]
        assert "Model card" in file.metadata()["card"]
        assert file.get_tensor("linear/weight").shape == (3, 192)


def FEATURES(held):  # noqa: N802
    """Names of the arrays of features in a file, glyph-clip first, as the run joined them."""
    return sorted(k for k in held if k.startswith("features"))


def test_a_method_that_is_not_linear_is_refused_by_name(home, tmp_path):
    done = fedcache("export-model", home[1]["many"], "-o", tmp_path / "m.joblib", "--client", "client-0")
    assert done.code == 2
    assert "fedproto" in done.err
    assert not (tmp_path / "m.joblib").exists()


@pytest.mark.slow
def test_onnx_says_what_torch_says(home, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    _, runs = home
    ok("export-model", runs["one"], "-o", tmp_path / "m.onnx")
    ok("export-model", runs["one"], "-o", tmp_path / "m.pt2")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    drawn = np.stack([np.array(picture(seed, seed % 3, 32)) for seed in range(120)]).transpose(0, 3, 1, 2)
    x = {i.name: drawn for i in session.get_inputs()}
    assert [i.shape[1:] for i in session.get_inputs()] == [[3, 32, 32]] * 2
    (probabilities,) = session.run(["probabilities"], x)
    wanted = torch.export.load(tmp_path / "m.pt2").module()(*(torch.from_numpy(v) for v in x.values()))[1]
    assert np.abs(probabilities - wanted.numpy()).max() <= 1e-4
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == ["10", "ant", "zebra"]
    assert {i["resize"] for i in json.loads(facts["inputs"])} == {"squash"}
    assert "Model card" in facts["card"]


def test_onnx_without_its_packages_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from fedcache.errors import MachineError

    with pytest.raises(MachineError) as found:
        check_place(tmp_path / "m.onnx", "onnx", False)
    assert found.value.hint == "pip install 'fedcache[export]'"


@pytest.mark.slow
def test_nothing_is_written_over_without_force(home, tmp_path):
    _, runs = home
    mine = tmp_path / "m.safetensors"
    mine.write_text("mine")
    done = fedcache("export-model", runs["one"], "-o", mine)
    assert done.code == 4
    assert mine.read_text() == "mine"
    ok("export-model", runs["one"], "-o", mine, "--force")
    taken = tmp_path / "d"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert fedcache("export-model", runs["one"], "-o", taken).code == 4
    assert [p.name for p in taken.iterdir()] == ["notes.txt"]
    ok("export-model", runs["one"], "-o", taken, "--force")
    assert (taken / "notes.txt").read_text() == "mine"  # other files of a folder stay
    assert (taken / "model.pt2").exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), "-o says where"),
        (("-o", "m.zip"), "file ending"),
        (("-o", "m.onnx", "--format", "pickle"), "pickle"),
        (("-o", "m.pt2", "--seed", "all"), "one seed"),
        (("-o", "m.pt2", "--seed", "7"), "no seed 7"),
        (("-o", "m.pt2", "--client", "client-0"), "one model for all"),
        (("-o", "m.npz", "--format", "folders"), "folders"),
        (("-o", ".", "--format", "onnx"), "is a folder"),
        (("-o", "m.onnx", "--format", "torch"), "m.onnx ends in .onnx, and --format torch writes a .pt2 file."),
        (("-o", "m.PT2", "--format", "folder"), "m.PT2 ends in .pt2, and --format folder writes a folder."),
    ],
)
def test_what_makes_no_sense_is_refused(home, tmp_path, monkeypatch, words, found):
    monkeypatch.chdir(tmp_path)
    done = fedcache("export-model", home[1]["one"], *words)
    assert done.code == 2
    assert found in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("--client", "nobody"), ()], ids=["unknown", "none"])
def test_a_client_that_is_not_there_is_refused_with_those_that_are(home, tmp_path, words):
    done = fedcache("export-model", home[1]["many"], "-o", tmp_path / "m.pt2", *words)
    assert done.code == 2
    assert "--client" in done.err
    assert "client-0" in done.err
    assert not list(tmp_path.glob("m.*"))


@pytest.mark.parametrize("format_", ["onnx", "torch", "safetensors", "sklearn", "folder"])
def test_what_is_missing_or_in_the_way_writes_nothing(home, tmp_path, monkeypatch, format_):
    """The extra is missing (exit 6), and a file stands where the folder of the file would be (exit 2)."""
    (tmp_path / "file").write_text("mine")
    if format_ == "onnx":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        done = fedcache("export-model", home[1]["one"], "-o", tmp_path / "m.onnx")
        assert done.code == 6
        assert "pip install 'fedcache[export]'" in done.err
    else:
        done = fedcache("export-model", home[1]["one"], "-o", tmp_path / "file" / "d" / "m", "--format", format_)
        assert done.code == 2
        assert "file is a file" in done.err
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir() if p.name != "home"] == ["file"]


def test_a_model_of_one_client_alone_says_whose_it_is(home, tmp_path, monkeypatch):
    """No client is named, and one is saved: ``predict`` takes that one, and so does the export."""
    root, _ = home
    monkeypatch.setenv("FEDCACHE_HOME", str(root / "home"))
    run = ok("train", "--method", "fedproto", "--backbones", "random-projection", "--clients", 2, "--scheme", "iid",
             "--rounds", 1, "--set", "dim=8", "--save-clients", "client-1", "--fresh").data["path"]  # fmt: skip
    ok("export-model", run, "-o", tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert file.metadata()["client"] == "client-1"
        assert "that of client client-1 alone" in file.metadata()["card"]


def test_a_run_without_a_model_and_a_damaged_one(home, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(home[1]["one"], copy)
    file = copy / "models" / "seed-0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    done = fedcache("export-model", copy, "-o", tmp_path / "m.pt2")
    assert done.code == 5
    shutil.rmtree(copy / "models")
    done = fedcache("export-model", copy, "-o", tmp_path / "m.pt2")
    assert done.code == 4
    assert "fedcache train" in done.err
    assert "--fresh" in done.err


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
    x = (np.eye(3)[y] @ g.standard_normal((3, 6)) + 0.3 * g.standard_normal((90, 6))).astype(np.float32)
    np.savez(tmp_path / "e.npz", features=x, label=y, split=(np.arange(90) % 3 == 0).astype(np.int64))
    ok("ingest", tmp_path / "e.npz", "--name", "mine")
    run = ok("train", "--method", "fedncm", "--clients", 2, "--scheme", "iid").data["path"]
    (tmp_path / "photos").mkdir()
    picture(0, 0).save(tmp_path / "photos" / "a.png")
    refused = fedcache("predict", run, tmp_path / "photos")
    assert (refused.code, "is not known here" in refused.err) == (4, True)
    np.save(tmp_path / "x.npy", x)
    found = ok("export-model", run, "-o", tmp_path / "m").data
    assert [i["kind"] for i in found["inputs"]] == ["features"]
    rows = ok("predict", run, "--embeddings", tmp_path / "x.npy").data["rows"]
    monkeypatch.setattr(sys, "argv", ["predict.py", str(tmp_path / "x.npy")])
    said = io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(str(tmp_path / "m" / "predict.py"))
    lines = [line.split("\t") for line in said.getvalue().splitlines()]
    assert [name for _, name, _ in lines] == [row["class"] for row in rows]
    # What is no array, and one of another width, are named; the others are classified all the same.
    (tmp_path / "none.npy").write_bytes(b"")
    np.save(tmp_path / "narrow.npy", x[:, 1:])
    np.save(tmp_path / "pickle.npy", np.array([Opened(tmp_path / "opened")], object))
    lost = [str(tmp_path / name) for name in ("missing.npy", "none.npy", "narrow.npy", "pickle.npy")]
    for words, code in (([*lost, str(tmp_path / "x.npy")], 1), ([], 2)):
        monkeypatch.setattr(sys, "argv", ["predict.py", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(tmp_path / "m" / "predict.py"), run_name="__main__")
        again = capsys.readouterr()
        assert ended.value.code == code
        if words:
            assert again.out == said.getvalue()
            assert [line.split("\t-\t")[0] for line in again.err.splitlines() if "\t-\t" in line] == lost
        else:
            assert again.err == "usage: python predict.py FEATURES.npy...\n"
    assert not (tmp_path / "opened").exists()
    assert max(abs(float(p) - row["probability"]) for (_, _, p), row in zip(lines, rows, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m", "folder"),
        ("m.onnx", "onnx"),
        ("m.pt2", "torch"),
        ("m.safetensors", "safetensors"),
        ("m.joblib", "sklearn"),
    ],
)
def test_the_ending_says_the_format(tmp_path, name, kind):
    assert format_of(tmp_path / name, None) == kind


def test_a_folder_is_a_folder_whatever_its_name_ends_in(tmp_path):
    place = tmp_path / "m.onnx"
    with pytest.raises(UsageError, match=r"m\.onnx ends in \.onnx, and --format folder writes a folder") as caught:
        format_of(place, "folder")
    assert caught.value.hint.endswith("or --format onnx")
    assert format_of(place, "onnx") == "onnx"
    place.mkdir()
    assert format_of(place, "folder") == format_of(place, None) == "folder"
