"""Every method in every format: what others read there predicts what the model predicts, or it is refused by name."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from draws import one_of_each
from federation import VARIANTS, cases, ids
from methods_tried import tried
from PIL import Image
from refusal import refused
from safetensors.torch import load_file
from test_export_program import LINEAR, trained
from test_saved_model import rows_of

from fedcache.errors import MachineError, UsageError
from fedcache.extract import images
from fedcache.extract.recipe import Recipe
from fedcache.federate.methods import METHODS
from fedcache.heads.losses import MASKED
from fedcache.models.export import program
from fedcache.models.export.program import AnswerGap, Parts, make_program, write

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="the extra export is not installed")

SHORT = one_of_each(cases(), lambda case: (METHODS[case[0]].needs, METHODS[case[0]].protocol))


def written(case, dtype=torch.float32):
    """(parts, (rows as a reader of the file gives them, scores, probabilities)) of nine rows."""
    predictor, data = trained(case, dtype)
    model = predictor.members[0]
    rows = rows_of(model, data, np.arange(9))
    given = rows.float()
    if model.facts.image is not None:
        H, W = model.facts.image
        given = rows.view(-1, H, W, 3).permute(0, 3, 1, 2).contiguous()
    with torch.no_grad():
        scores = predictor.deployed[0].scores(rows).double()
    return (
        Parts(predictor, "card", make_program(predictor, home=None)),
        given,
        scores,
        scores.softmax(-1),
    )


def same(scores, probabilities, wanted_scores, wanted):
    live = wanted_scores > MASKED / 2
    size = max(1.0, float(wanted_scores[live].abs().max()))
    assert bool(((scores.double() - wanted_scores).abs()[live] <= 1e-5 * size).all())
    assert bool((scores[~live] <= MASKED / 2).all())
    assert float((probabilities.double() - wanted).abs().max()) <= 1e-5 * size


def torch_reads(path, given):
    return torch.export.load(path).module()(given)


def onnx_reads(path, given):
    onnxruntime = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [
        torch.from_numpy(t)
        for t in session.run(None, {session.get_inputs()[0].name: given.numpy()})
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORT, ids=ids)
def test_a_method_in_every_format(case, tmp_path):
    name = case[0]
    parts, given, scores, wanted = written(case)
    predictor = parts.predictor
    write(tmp_path / "m.pt2", "torch", parts)
    same(*torch_reads(tmp_path / "m.pt2", given), scores, wanted)
    if HAS_ONNX:
        write(tmp_path / "m.onnx", "onnx", parts)
        same(*onnx_reads(tmp_path / "m.onnx", given), scores, wanted)
    said = write(tmp_path / "m.safetensors", "safetensors", parts)
    held = load_file(tmp_path / "m.safetensors")
    for group, tree in (
        ("server", predictor.deployed[0].down),
        ("own", predictor.deployed[0].personal),
    ):
        for key, t in tree.items():
            assert torch.equal(held[f"{group}/{key}"], t)
    linear = name in LINEAR and predictor.members[0].facts.image is None
    assert said["linear"] == ("linear/weight" in held) == linear
    if not linear:
        refused(lambda: write(tmp_path / "m.joblib", "sklearn", parts), name)
        assert not (tmp_path / "m.joblib").exists()
        return
    write(tmp_path / "m.joblib", "sklearn", parts)
    made = joblib.load(tmp_path / "m.joblib")
    assert list(made.classes_) == ["a", "b", "c"]
    # the model's own scores are float32
    size = max(1.0, float(scores[scores > MASKED / 2].abs().max()))
    assert np.abs(made.predict_proba(given.double().numpy()) - wanted.numpy()).max() <= 1e-6 * size


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in tried(cases() + VARIANTS) if c not in SHORT], ids=ids)
@pytest.mark.full
def test_a_method_as_a_graph(case, tmp_path):
    parts, given, scores, wanted = written(case)
    write(tmp_path / "m.onnx", "onnx", parts)
    same(*onnx_reads(tmp_path / "m.onnx", given), scores, wanted)


@needs_onnx
@pytest.mark.slow
def test_what_onnxruntime_cannot_compute_is_refused_by_name(tmp_path):
    """It has no convolution in float64."""
    parts, *_ = written(next(c for c in cases() if c[0] == "fedavg-scratch"), torch.float64)
    refused(lambda: write(tmp_path / "m.onnx", "onnx", parts), "fedavg-scratch")
    assert not list(tmp_path.iterdir())
    write(tmp_path / "m.pt2", "torch", parts)  # as the hint says


class Session:
    """Answers as onnxruntime would, with the scores of the program times a factor."""

    program: Any = None
    factor = 1.0

    def __init__(self, raw, providers):
        assert (raw, providers) == (b"graph", ["CPUExecutionProvider"])

    def run(self, names, given):
        assert names == ["scores", "probabilities"]
        with torch.no_grad():
            scores, p = Session.program.module(
                *(torch.from_numpy(given[i.name]) for i in Session.program.inputs)
            )
        return [(Session.factor * scores).numpy(), p.numpy()]


@pytest.mark.parametrize(
    ("factor", "raised"),
    [
        (1.0, None),
        (1.01, MachineError),
        (float("nan"), MachineError),
        ("no operator\nfor it", UsageError),
    ],
)
def test_a_graph_is_written_where_it_agrees(factor, raised, tmp_path, monkeypatch):
    predictor, _ = trained(next(case for case in cases() if case[0] == "fedncm"), torch.float32)
    parts = Parts(predictor, "card", make_program(predictor, home=None))
    told = {}

    def export(program, **words):
        if isinstance(factor, str):
            raise RuntimeError(factor)
        assert (program, words["input_names"]) == (parts.program.exported, ["features"])
        return SimpleNamespace(
            model=SimpleNamespace(metadata_props=told),
            model_proto=SimpleNamespace(SerializeToString=lambda: b"graph"),
        )

    monkeypatch.setattr(torch.onnx, "export", export)
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=Session))
    monkeypatch.setattr(Session, "program", parts.program)
    monkeypatch.setattr(Session, "factor", factor)
    if raised is None:
        said = write(tmp_path / "m.onnx", "onnx", parts)
        assert said["difference"] == {"scores": 0.0, "probabilities": 0.0}
        assert (tmp_path / "m.onnx").read_bytes() == b"graph"
        assert told == parts.metadata
        return
    with pytest.raises(raised):
        write(tmp_path / "m.onnx", "onnx", parts)
    assert not list(tmp_path.iterdir())


def test_weights_beyond_one_onnx_file_are_refused(tmp_path, monkeypatch):
    predictor, _ = trained(next(case for case in cases() if case[0] == "fedncm"), torch.float32)
    program = make_program(predictor, home=None)
    held = [*program.exported.state_dict.values(), *program.exported.constants.values()]
    assert program.bytes == sum(t.nbytes for t in held) > 0
    monkeypatch.setattr("fedcache.models.export.program.MOST_ONNX", program.bytes - 1)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: pytest.fail("made the graph first"))
    with pytest.raises(UsageError):
        write(tmp_path / "m.onnx", "onnx", Parts(predictor, "card", program))


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("grey16", {"resize": "crop", "crop_pct": 0.8, "interpolation": "bicubic"}),
        ("turned", {"resize": "squash", "interpolation": "bilinear"}),
        ("grey", {"resize": "none"}),
    ],
)
def test_the_script_of_a_folder_reads_an_image_as_fedcache_does(
    image, words, tmp_path, monkeypatch, capsys
):
    g, path = np.random.default_rng(0), tmp_path / "image.png"
    shape = (12, 12) if image == "grey" else (33, 21, 3)
    if image == "grey16":
        Image.fromarray(g.integers(0, 65536, (33, 21), dtype=np.uint16)).save(path)
    else:
        exif = Image.Exif()
        exif[0x0112] = 6 if image == "turned" else 1
        Image.fromarray(g.integers(0, 256, shape, dtype=np.uint8)).save(path, exif=exif)
    recipe = Recipe(
        backbone="b", weights="none", size=12, **({} if words["resize"] == "none" else words)
    )
    wanted = images.resize(images.decode(path.read_bytes()), recipe)
    how = {"height": 12, "width": 12, "crop_pct": 1.0, "interpolation": "bicubic", **words}
    (tmp_path / "model.json").write_text(json.dumps({"inputs": [how], "classes": ["cat", "dog"]}))
    seen = []

    def model(x):
        seen.append(x)
        return torch.zeros(len(x), 2), torch.tensor([[0.25, 0.75]] * len(x))

    monkeypatch.setattr(torch.export, "load", lambda place: SimpleNamespace(module=lambda: model))
    monkeypatch.setattr(sys, "argv", ["predict.py", str(path), str(path)])
    script = Path(program.__file__).parent / "predict_images.py"
    code = compile(script.read_text(), str(script), "exec")
    # beside the files of the folder
    exec(code, {"__file__": str(tmp_path / "predict.py"), "__name__": "it"})
    assert np.array_equal(seen[0].permute(0, 2, 3, 1).numpy(), np.stack([wanted, wanted]))
    assert capsys.readouterr().out == f"{path}\tdog\t0.750000\n" * 2


def test_what_is_installed_for_the_tests_holds_onnx():
    """Without it the tests of graphs are skipped, and nobody sees it."""
    told = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    (ours,) = [
        line
        for line in told["project"]["optional-dependencies"]["dev"]
        if line.startswith("fedcache[")
    ]
    assert "export" in ours.removeprefix("fedcache[").rstrip("]").split(",")


def test_a_class_that_is_never_predicted_has_no_difference():
    a, b = torch.tensor([[1.0, MASKED]]), torch.tensor([[1.5, 1.0001 * MASKED]])
    p = torch.tensor([[1.0, 0.0]])
    assert AnswerGap.of((a, p), (b, p)) == AnswerGap(0.5, 0.0)
    assert np.isnan(AnswerGap.of((a * np.nan, p), (b, p)).scores)
