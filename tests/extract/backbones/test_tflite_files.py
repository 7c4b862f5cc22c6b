"""A TFLite file is a backbone, whole or cut before its classifier; the three MobileNets are where their files are."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import images
from command import data_of, fedcache
from failing_command import must_fail_machine
from made_path import place_of
from refusal import machine_error, refused
from tiny_tflite import SCALE, classifier, mean_colour
from tolerance import close
from weights_at import features_of

from fedcache.errors import Exit
from fedcache.extract.backbones import BACKBONES, lookup
from fedcache.extract.backbones.tflite_file import (
    Graph,
    Layer,
    chosen_tensor,
    read_graph,
    with_output,
)
from fedcache.store.files import file_sha256

FILES = os.environ.get("FEDCACHE_MOBILENETS")
"""Folder of the three files of Coral's test data; without it their tests are skipped."""
MOBILENETS = [name for name in BACKBONES if name.startswith("mobilenetv2-")]


def coloured(red, green, blue):
    return torch.tensor([red, green, blue], dtype=torch.uint8).expand(1, 8, 8, 3).clone()


def test_floats_are_normalised_and_cut_before_the_classifier(tmp_path):
    path = classifier(tmp_path / "a.tflite")
    image = coloured(204, 51, 0)
    whole = lookup(f"tflite:{path}", output="scores")
    cut = lookup(f"tflite:{path}", output="penultimate")
    assert whole.width == 4
    assert cut.width == 3
    assert cut.recipe.size == 8
    assert cut.raw is False
    assert whole.recipe.pooling == "scores"
    assert cut.recipe.pooling == "avg(penultimate)"
    # From -1 to 1: 204 -> 0.6, 51 -> -0.6, 0 -> -1; score k is (k + 1) times red.
    assert close(features_of(cut, image), np.array([[0.6, -0.6, -1.0]]), 8 * 8 * 3)
    assert close(features_of(whole, image), np.array([[0.6, 1.2, 1.8, 2.4]]), 8 * 8 * 3)
    assert close(
        features_of(whole, image, norm="unit"), np.array([[0.8, 1.6, 2.4, 3.2]]), 8 * 8 * 3
    )
    chances = features_of(lookup(f"tflite:{path}"), image)
    powers = np.exp([[0.6, 1.2, 1.8, 2.4]])
    assert close(chances, powers / powers.sum(), 8 * 8 * 3)


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_quantised_inputs_get_the_pixels_and_outputs_are_multiplied_out(tmp_path, kind):
    row = lookup(f"tflite:{classifier(tmp_path / 'a.tflite', kind=kind)}", output="colour")
    assert row.raw
    # (200 - 128) / 64 = 1.125, (100 - 128) / 64 = -0.4375, -128 / 64 = -2
    expected = [(value - 128) * SCALE for value in (200, 100, 0)]
    two = torch.cat([coloured(200, 100, 0), coloured(0, 200, 100)])
    assert features_of(row, two).tolist() == [expected, [expected[2], expected[0], expected[1]]]
    refused(lambda: features_of(row, two, norm="half"), "takes unnormalised pixels")


def test_free_sides_behind_the_channels_get_the_size_of_the_recipe(tmp_path):
    row = lookup(f"tflite:{mean_colour(tmp_path / 'a.tflite')}", size=8)
    assert close(features_of(row, coloured(204, 51, 0)), np.array([[0.6, -0.6, -1.0]]), 8 * 8)


def test_the_layer_before_the_classifier_is_found_by_structure():
    # images 0 -> conv (weights 1) -> 2 -> pool -> 3 -> dense (weights 4) -> 5 -> reshape (shape 6) -> 7 -> softmax -> 8
    layers = (
        Layer((0, 1), (2,)),
        Layer((2,), (3,)),
        Layer((3, 4), (5,)),
        Layer((5, 6), (7,)),
        Layer((7,), (8,)),
    )
    names = tuple("abcdefghi")
    graph = Graph(names, frozenset({1, 4}), frozenset({1, 4, 6}), layers, (0,), (8,))
    assert graph.penultimate("m") == 3
    assert chosen_tensor(graph, "m", "penultimate") == 3
    assert chosen_tensor(graph, "m", None) == 8
    assert chosen_tensor(graph, "m", "f") == 5
    for asked in ("b", "a"):  # weights and images are computed by no layer
        refused(lambda asked=asked: chosen_tensor(graph, "m", asked), "Unknown output of m", asked)
    alone = Graph(names, frozenset({1}), frozenset({1}), layers[:1], (0,), (2,))
    refused(lambda: alone.penultimate("m"), "classifier")
    several = Graph(names, frozenset(), frozenset(), layers, (0,), (5, 8))
    refused(lambda: chosen_tensor(several, "m", None), "2 outputs")


def test_import_keeps_the_file_itself(tmp_path, own_home):
    path = classifier(tmp_path / "mine.tflite")
    kept = place_of(f"backbones import {path} --as tflite:mine.tflite")
    assert kept == own_home / "weights/mine.tflite"
    assert kept.read_bytes() == path.read_bytes()
    path.unlink()
    assert data_of("backbones verify tflite:mine.tflite")["width"] == 4


def test_a_damaged_file_is_a_sentence(tmp_path):
    path = classifier(tmp_path / "a.tflite")
    raw = path.read_bytes()
    for size in (0, 3, 7, 100, len(raw) // 2, 9 * len(raw) // 10):
        path.write_bytes(raw[:size])
        done = fedcache(f"backbones verify tflite:{path}")
        assert done.code in (Exit.ENVIRONMENT, Exit.USAGE)
        assert "a.tflite" in done.err
        assert "Traceback" not in done.err


def test_every_number_that_leads_on_is_compared(tmp_path):
    raw = classifier(tmp_path / "a.tflite").read_bytes()
    graph = read_graph(raw, tmp_path, "a")
    assert graph.names == ("images", "colour", "weights", "bias", "scores", "chances")
    assert graph.inputs == (0,)
    assert graph.outputs == (5,)
    assert graph.weights == frozenset({2})
    changed = with_output(raw, 77, "a")
    assert sum(a != b for a, b in zip(raw, changed, strict=True)) == 1
    machine_error(lambda: read_graph(changed, tmp_path, "a"), "77 of a list with 6")
    assert read_graph(with_output(raw, 1, "a"), tmp_path, "a").outputs == (1,)


def test_the_named_files_are_pinned_and_missing_ones_say_how_to_bring_them():
    assert MOBILENETS == ["mobilenetv2-imagenet", "mobilenetv2-birds", "mobilenetv2-insects"]
    for name in MOBILENETS:
        row = BACKBONES[name]
        ((file, digest),) = row.sha256
        assert row.width == 1280
        assert row.recipe.size == 224
        assert row.raw is True
        assert row.cpu_only is True
        assert len(digest) == 64
        must_fail_machine(file, f"extract --dataset digits --backbones {name}")


def test_another_file_is_never_a_named_backbone(tmp_path, own_home):
    """Its name does not count: its digest is pinned, and another model is one of the user's."""
    path = classifier(tmp_path / "mine.tflite")
    name, (expected,) = "mobilenetv2-birds", dict(BACKBONES["mobilenetv2-birds"].sha256).values()
    kept = own_home / f"weights/{name}.tflite"
    done = [fedcache(f"backbones import {path} --as {name}")]
    assert not kept.exists()
    done += [fedcache(f"extract --dataset digits --backbones {name} --weights {name}={path}")]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(path.read_bytes())
    done += [fedcache(f"backbones verify {name}")]
    for one in done:
        assert one.code == Exit.ENVIRONMENT
        for said in (
            f"is not the published file of {name}",
            file_sha256(path),
            expected,
            "--backbones tflite:",
        ):
            assert said in one.err


@pytest.mark.skipif(
    not FILES, reason="FEDCACHE_MOBILENETS names no folder of the three TFLite files"
)
@pytest.mark.parametrize("name", MOBILENETS)
def test_the_features_are_what_the_classifier_reads(name):
    """Features times the classifier's numbers, in float64, are its scores to within the steps of their quantisation."""
    import importlib

    row = BACKBONES[name]
    path = Path(str(FILES)) / row.files[0]
    seen = images(2, 224)
    features = features_of(row, seen, path)
    assert features.shape == (2, 1280)
    assert features.min() >= 0  # after a ReLU6
    assert len(np.unique(features)) > 20
    graph = read_graph(path.read_bytes(), path, name)
    (dense,) = [layer for layer in graph.layers if graph.penultimate(name) in layer.inputs]
    scores = lookup(f"tflite:{path}", output=graph.names[dense.outputs[0]])
    interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter(str(path))
    details = {d["index"]: d for d in interpreter.get_tensor_details()}
    weights, bias = (
        (interpreter.get_tensor(t).astype(np.float64) - details[t]["quantization"][1])
        * details[t]["quantization"][0]
        for t in dense.inputs[1:]
    )
    expected = features @ weights.reshape(len(bias), 1280).T + bias
    step = details[dense.outputs[0]]["quantization"][0]
    assert np.abs(features_of(scores, seen) - expected).max() < 0.51 * step
