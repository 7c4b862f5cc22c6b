"""Every method in every format: what others read there predicts what the model predicts, or it is refused by name."""

import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import torch
from draws import one_of_each
from federation import VARIANTS, cases, ids
from methods_tried import tried
from PIL import Image
from refusal import machine_error, refused
from safetensors.torch import load_file
from test_export_program import LINEAR, first, nine_rows, trained

from fedcache import Recipe
from fedcache.extract import images
from fedcache.federate.methods import METHODS
from fedcache.heads.losses import MASKED
from fedcache.models.export import program
from fedcache.models.export.program import AnswerGap, Parts, make_program, write


def kind_of(case):
    """What a model reads besides features, and how many models a method has."""
    method = METHODS[case[0]]
    return method.needs - {"labels", "views"}, method.protocol(method.resolve(settings=case[1]))


SHORT = one_of_each(cases(), kind_of)


def written(case, dtype=torch.float32):
    """(parts, (rows as a reader of the file gives them, scores, probabilities)) of nine rows."""
    predictor, data = trained(case, dtype)
    rows, given = nine_rows(predictor, data)
    with torch.no_grad():
        scores = predictor.deployed[0].scores(rows).double()
    parts = Parts(predictor, "card", make_program(predictor, home=None))
    return parts, given, scores, scores.softmax(-1)


def same(scores, probabilities, wanted_scores, wanted):
    live = wanted_scores > MASKED / 2
    size = max(1.0, float(wanted_scores[live].abs().max()))
    assert bool(((scores.double() - wanted_scores).abs()[live] <= 1e-5 * size).all())
    assert bool((scores[~live] <= MASKED / 2).all())
    assert float((probabilities.double() - wanted).abs().max()) <= 1e-5 * size


def check_graph(path, parts, given, scores, wanted):
    """onnxruntime gives the scores and probabilities of the model."""
    import onnxruntime

    write(path, "onnx", parts)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map.items() >= parts.metadata.items()
    answers = session.run(None, {session.get_inputs()[0].name: given.numpy()})
    same(*map(torch.from_numpy, answers), scores, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORT, ids=ids)
def test_a_method_in_every_format(case, tmp_path):
    name = case[0]
    parts, given, scores, wanted = written(case)
    predictor = parts.predictor
    write(tmp_path / "m.pt2", "torch", parts)
    same(*torch.export.load(tmp_path / "m.pt2").module()(given), scores, wanted)
    check_graph(tmp_path / "m.onnx", parts, given, scores, wanted)
    said = write(tmp_path / "m.safetensors", "safetensors", parts)
    held = load_file(tmp_path / "m.safetensors")
    made = predictor.deployed[0]
    for group, tree in (("server", made.down), ("own", made.personal)):
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


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in tried(cases() + VARIANTS) if c not in SHORT], ids=ids)
@pytest.mark.full
def test_a_method_as_a_graph(case, tmp_path):
    check_graph(tmp_path / "m.onnx", *written(case))


@pytest.mark.slow
def test_what_onnxruntime_cannot_compute_is_refused_by_name(tmp_path):
    """It has no convolution in float64."""
    parts, *_ = written(first("fedavg-scratch"), torch.float64)
    refused(lambda: write(tmp_path / "m.onnx", "onnx", parts), "fedavg-scratch")
    assert not list(tmp_path.iterdir())
    write(tmp_path / "m.pt2", "torch", parts)  # as the hint says


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_graph_with_other_scores_is_not_written(factor, tmp_path, monkeypatch):
    import onnxruntime

    run = onnxruntime.InferenceSession.run

    def wrong(*given):
        scores, probabilities = run(*given)
        return factor * scores, probabilities

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", wrong)
    parts, *_ = written(first("fedncm"))
    machine_error(lambda: write(tmp_path / "m.onnx", "onnx", parts))
    assert not list(tmp_path.iterdir())


def test_weights_beyond_one_onnx_file_and_what_onnx_lacks_are_refused(tmp_path, monkeypatch):
    parts, *_ = written(first("fedncm"))
    exported = parts.program.exported
    held = [*exported.state_dict.values(), *exported.constants.values()]
    assert parts.program.bytes == sum(t.nbytes for t in held) > 0

    def lacks(*_, **__):
        raise RuntimeError("no operator\nfor it")

    monkeypatch.setattr(torch.onnx, "export", lacks)
    refused(lambda: write(tmp_path / "m.onnx", "onnx", parts), "no operator")
    monkeypatch.setattr(program, "MOST_ONNX", parts.program.bytes - 1)
    refused(lambda: write(tmp_path / "m.onnx", "onnx", parts), "an .onnx file can hold only 2 GB")


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("uint16", (33, 21), {"resize": "crop", "crop_pct": 0.8, "interpolation": "bicubic"}),
        ("uint8", (33, 21, 3), {"resize": "squash", "interpolation": "bilinear"}),
        ("uint8", (12, 12), {"resize": "none"}),
    ],
)
def test_the_script_of_a_folder_reads_an_image_as_fedcache_does(
    dtype, shape, words, tmp_path, monkeypatch
):
    path = tmp_path / "image.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    g = np.random.default_rng(0)
    Image.fromarray(g.integers(0, np.iinfo(dtype).max, shape, dtype=dtype)).save(path, exif=exif)
    given = {} if words["resize"] == "none" else words
    recipe = Recipe(backbone="b", weights="none", size=12, **given)
    how = {"height": 12, "width": 12, "crop_pct": 1.0, "interpolation": "bicubic", **words}
    monkeypatch.setattr(torch.export, "load", lambda _: SimpleNamespace(module=lambda: None))
    monkeypatch.setattr(sys, "argv", ["predict.py"])
    (tmp_path / "model.json").write_text("{}")
    script = Path(program.__file__).with_name("predict_images.py")
    read = runpy.run_path(shutil.copy(script, tmp_path))["pixels"]
    wanted = images.resize(images.decode(path.read_bytes()), recipe)
    assert np.array_equal(read(path, how)[0].permute(1, 2, 0).numpy(), wanted)


def test_a_class_that_is_never_predicted_has_no_difference():
    a = torch.tensor([[1.0, MASKED]])
    b = torch.tensor([[1.5, 1.0001 * MASKED]])
    assert AnswerGap.of((a, a), (b, a)) == AnswerGap(0.5, 0.0)
