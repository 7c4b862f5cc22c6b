"""Many images: what is exported says what ``predict`` says, where fedcache cannot be imported.

They are a thousand in the full draw.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from command import data_of, ok
from draws import FULL
from homes import made_once
from made_path import place_of
from opened import open_dataset

import fedcache as fc
from fedcache.extract.images import decode

TRAIN = 300
TEST = 1000 if FULL else 250
SIDE = 64
BATCH = 32

OTHERS = """
import importlib.abc, importlib.util, runpy, sys

class Nothing(importlib.abc.MetaPathFinder):
    "Stands before every other finder, editable installs and paths included."
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fedcache":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())

import joblib, numpy, torch

folder, graph, head, features, found, *images = sys.argv[1:]
sys.argv = [folder + "/predict.py"]
shown = runpy.run_path(sys.argv[0])
inputs = shown["facts"]["inputs"]
x = [torch.cat([shown["pixels"](path, how) for path in images]) for how in inputs]
blocks = [[part[i : i + %(batch)d] for part in x] for i in range(0, len(images), %(batch)d)]
held = {}
with torch.no_grad():
    answers = [shown["model"](*block) for block in blocks]
held["torch_scores"], held["torch"] = (torch.cat(part).numpy() for part in zip(*answers))
import onnxruntime
session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
named = [{how["name"]: part.numpy() for how, part in zip(inputs, block)} for block in blocks]
answers = [session.run(["scores", "probabilities"], one) for one in named]
held["onnx_scores"], held["onnx"] = (numpy.concatenate(part) for part in zip(*answers))
made = joblib.load(head)
held["sklearn"] = made.predict_proba(numpy.load(features))
numpy.savez(found, classes=made.classes_, **held)
assert not [name for name in sys.modules if name.partition(".")[0] == "fedcache"]
try:
    import fedcache
except ModuleNotFoundError:
    print("no fedcache here")
""" % {"batch": BATCH}  # noqa: UP031 - the script is full of braces


@made_once
def images(place):
    """Digits as files: some to train on, and a thousand."""
    digits = open_dataset("digits")
    rows = np.linspace(0, len(digits.label) - 1, TRAIN + TEST).astype(int)
    train = np.random.default_rng(0).permutation(len(rows)) < TRAIN
    for number, row in enumerate(rows):
        split = "train" if train[number] else "test"
        file = place / f"images/{split}/digit {digits.label[row]}/{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        decode(digits.source.read(int(row))).save(file)
    return place / "images"


def answers_of_others(files, run, work, features):
    """Of the folder, the graph and the estimator in a process that has no fedcache; and what export-model says."""
    ok(f"export-model {run} -o {work}/m")
    said = data_of(f"export-model {run} -o {work}/m.onnx")
    ok(f"export-model {run} -o {work}/m.joblib")
    np.save(work / "x.npy", features)
    (work / "others.py").write_text(OTHERS)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    words = ["m", "m.onnx", "m.joblib", "x.npy", "found.npz"]
    done = subprocess.run(
        [sys.executable, "-I", "others.py", *words, *map(str, files)],
        capture_output=True,
        text=True,
        env=env,
        cwd=work,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no fedcache here\n"
    return dict(np.load(work / "found.npz")), said["moved_by_libraries"]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "feat_post"), [("float16", "none"), ("float16", "standardize"), ("float32", "none")]
)
def test_many_images_without_fedcache(images, tmp_path, dtype, feat_post):
    """Scores to 1e-4 of the largest, of features kept as float32 to 1e-5, and probabilities as scores over temperature.

    Both beyond what rounding moves, as ``export-model`` measures it.

    The folder's program runs the very kernels of ``predict`` on batches of the same size: where it did not round
    features as the store does, most rows would differ by more than 1e-5.
    """
    words = f"--recipe size={SIDE},dtype={dtype} --workers 0"
    names = ("efficientnet-lite0", "random-projection")
    path = place_of(f"extract -d folder:{images} {words} --backbones {','.join(names)}")
    store = fc.Store.open(path)
    keys = [
        key
        for name in names
        for key, a in store.arrays.items()
        if a.dtype == dtype and a.recipe["backbone"] == name
    ]
    words = f"--store {path} --backbones {','.join(keys)} --set feat_post={feat_post}"
    run = place_of(f"train --method fed3r --clients 5 --scheme iid {words}")
    model = fc.load_model(run)
    samples = store.samples
    files = [images / samples.name[row] for row in np.flatnonzero(samples.split == 1)]
    assert len(files) == TEST
    rows = [dict(row) for row in model.predict(files, top=len(model.classes))]
    wanted = np.array([[row[name] for name in model.classes] for row in rows])
    X, _ = store.Xy(keys, split="test")
    scores = model.scores(X)
    # what is compared below is what predict says
    assert np.abs(model.probabilities(X) - wanted).max() <= 1e-7

    found, moved = answers_of_others(files, run, tmp_path, X)
    assert list(found["classes"]) == list(model.classes)
    assert np.abs(found["sklearn"] - wanted).max() <= 1e-6
    size = max(1.0, np.abs(scores).max())
    allowed, room = (1e-4, moved["scores"]) if dtype == "float16" else (1e-5, 0.0)
    temperature = min(1.0, model.predictor.softmax_temperature)
    for name in ("torch", "onnx"):
        assert np.abs(found[name] - wanted).max() <= (allowed * size + room) / temperature, name
        assert np.abs(found[f"{name}_scores"] - scores).max() <= allowed * size + room, name
    near = np.abs(found["torch_scores"] - scores).max(-1) <= 1e-5 * size
    assert near.mean() >= 0.9
