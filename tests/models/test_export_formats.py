"""Every method in every format: what others read there predicts what the model predicts, or it is refused by name."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from draws import one_of_each
from federation import VARIANTS, cases, ids
from safetensors.torch import load_file
from test_export_program import LINEAR, trained
from test_saved_model import rows_of

from fedcache.errors import MachineError, UsageError
from fedcache.federate.methods import METHODS
from fedcache.heads.losses import MASKED
from fedcache.models.export.formats import Parts, write
from fedcache.models.export.program import AnswerGap, make_program

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
    return Parts(predictor, "card", make_program(predictor, home=None)), given, scores, scores.softmax(-1)


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
    return [torch.from_numpy(t) for t in session.run(None, {session.get_inputs()[0].name: given.numpy()})]


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORT, ids=ids)
def test_a_method_in_every_format(case, tmp_path):
    name = case[0]
    parts, given, scores, wanted = written(case)
    predictor = parts.predictor
    write(tmp_path / "m.pt2", "torch", parts)
    same(*torch_reads(tmp_path / "m.pt2", given), scores, wanted)
    write(tmp_path / "folder", "folder", parts)
    same(*torch_reads(tmp_path / "folder" / "model.pt2", given), scores, wanted)
    if HAS_ONNX:
        write(tmp_path / "m.onnx", "onnx", parts)
        same(*onnx_reads(tmp_path / "m.onnx", given), scores, wanted)
    said = write(tmp_path / "m.safetensors", "safetensors", parts)
    held = load_file(tmp_path / "m.safetensors")
    for group, tree in (("server", predictor.deployed[0].down), ("own", predictor.deployed[0].personal)):
        for key, t in tree.items():
            assert torch.equal(held[f"{group}/{key}"], t)
    linear = name in LINEAR and predictor.members[0].facts.image is None
    assert said["linear"] == ("linear/weight" in held) == linear
    if not linear:
        with pytest.raises(UsageError, match=name) as refused:
            write(tmp_path / "m.joblib", "sklearn", parts)
        assert "model.onnx" in refused.value.hint
        assert not (tmp_path / "m.joblib").exists()
        return
    write(tmp_path / "m.joblib", "sklearn", parts)
    made = joblib.load(tmp_path / "m.joblib")
    assert list(made.classes_) == ["a", "b", "c"]
    size = max(1.0, float(scores[scores > MASKED / 2].abs().max()))  # the model's own scores are float32
    assert np.abs(made.predict_proba(given.double().numpy()) - wanted.numpy()).max() <= 1e-6 * size


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in cases() + VARIANTS if c not in SHORT], ids=ids)
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
    with pytest.raises(UsageError, match="predict of fedavg-scratch cannot be made an ONNX graph") as refused:
        write(tmp_path / "m.onnx", "onnx", parts)
    assert "model.pt2" in refused.value.hint
    assert not list(tmp_path.iterdir())
    write(tmp_path / "m.pt2", "torch", parts)  # as the hint says


@needs_onnx
@pytest.mark.slow
def test_a_graph_with_other_numbers_is_not_written(tmp_path, monkeypatch):
    """A module that is changed after its program was made stands for an operator that another library reads apart."""
    parts, *_ = written(next(c for c in cases() if c[0] == "fedncm"))
    program = parts.program
    predict = program.module.predict
    monkeypatch.setattr(program.module, "predict", lambda x: tuple(1.01 * t for t in predict(x)))
    with pytest.raises(MachineError, match="nothing is written") as refused:
        write(tmp_path / "m.onnx", "onnx", parts)
    assert "model.pt2" in refused.value.hint
    assert not list(tmp_path.iterdir())


def test_what_is_installed_for_the_tests_holds_onnx():
    """Without it the tests of graphs are skipped, and nobody sees it."""
    told = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    (ours,) = [line for line in told["project"]["optional-dependencies"]["dev"] if line.startswith("fedcache[")]
    assert "export" in ours.removeprefix("fedcache[").rstrip("]").split(",")


def test_a_class_that_is_never_predicted_has_no_difference():
    a, b = torch.tensor([[1.0, MASKED]]), torch.tensor([[1.5, 1.0001 * MASKED]])
    p = torch.tensor([[1.0, 0.0]])
    assert AnswerGap.of((a, p), (b, p)) == AnswerGap(0.5, 0.0)
    assert np.isnan(AnswerGap.of((a * np.nan, p), (b, p)).scores)
