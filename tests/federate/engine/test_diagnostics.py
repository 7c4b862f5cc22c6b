"""Diagnostics: the numbers checked in the papers, references written another way, and limits."""

import math

import numpy as np
import pytest
import torch
from float64 import eye, normal
from refusal import refused
from scipy.stats import entropy
from torch.nn.functional import normalize

from fedcache.extract.backbones import BACKBONES
from fedcache.extract.backbones.rows import PARAMETERS
from fedcache.federate.engine.outcome import (
    entropy_bits,
    flesd_exchange,
    fusion_similarity,
    generalisation_bound,
)
from fedcache.report.figure_data import linear_cka


def unit(*shape, seed=0):
    return normalize(normal(*shape, seed=seed), dim=-1)


# 500 rows of 5 clients, 10 classes, delta 0.05
@pytest.mark.parametrize(
    ("dimension", "printed", "corrected"), [(100, 42.82371, 0.80662), (513, 43.10113, 1.08404)]
)
def test_the_bound_of_theorem_4_1(dimension, printed, corrected):
    bound = generalisation_bound(500, 5, 10, dimension, 0.05)
    assert generalisation_bound(500, 5, 10, dimension) == bound
    assert bound.printed == pytest.approx(printed, abs=5e-6)
    assert bound.corrected == pytest.approx(corrected, abs=5e-6)
    assert bound.printed - bound.capacity == pytest.approx(42.10130, abs=5e-6)
    assert bound.corrected - bound.capacity == pytest.approx(0.08420, abs=5e-6)


def test_only_the_corrected_bound_falls_with_rows():
    few, many = (generalisation_bound(n, 5, 10, 100) for n in (500, 5000))
    assert many.corrected < few.corrected
    assert many.printed > few.printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    # the hint's number of rows is the smallest that works
    [
        ((565, 5, 10, 1537), "at least 566"),
        ((0, 5, 10, 10), "rows"),
        ((500, 5, 10, 10, 1.0), "delta"),
    ],
)
def test_a_bound_that_says_nothing_is_refused(arguments, message):
    refused(lambda: generalisation_bound(*arguments), message)
    assert generalisation_bound(566, 5, 10, 1537).capacity > 0


def test_what_flesd_sends():  # T-X6: 10,000 public rows, 512 features, ResNet-18
    once = flesd_exchange(10_000, 512, 11_689_512, 1)
    assert once.representations == 5_120_000
    assert once.weights == 11_689_512
    assert not flesd_exchange(10_000, 512, 5_120_000, 1).cheaper  # the inequality is strict
    cheap = [flesd_exchange(10_000, 512, 11_689_512, rounds, 10).cheaper for rounds in range(1, 30)]
    assert cheap == sorted(cheap, reverse=True)  # monotone in T
    assert cheap.count(True) == 22  # 5.12 T < 116.9
    assert flesd_exchange(10_000, 512, 1, 3, 7).weights == 7
    refused(lambda: flesd_exchange(10, -1, 5, 1), "width")


def test_zero_shot_labels_are_nearly_uniform():  # T-X7
    x = unit(1000, 512)
    text = unit(10, 512, seed=1)

    def labelled(x, scale=1.0):
        return entropy_bits(torch.softmax(scale * x @ text.mT, -1))

    bits = labelled(x)
    assert bits.shape == (1000,)
    assert float(bits.mean()) > 0.99 * math.log2(10)
    assert labelled(0 * x).tolist() == pytest.approx([math.log2(10)] * 1000)
    assert float(labelled(text, 100.0).max()) < 1e-6
    p = np.exp(2.0 * (x[0] @ text.T).numpy())
    assert float(labelled(x[:1], 2.0)) == pytest.approx(entropy(p, base=2))


def test_fusion_similarity_is_the_mean_cosine_of_owned_classes():
    single = normal(3, 4, 5, 6).abs()
    fused = normal(4, 5, 6, seed=1).abs()
    owned = torch.rand(4, 5, generator=torch.Generator().manual_seed(2)) < 0.6
    owned[:, 0] = True
    cosine = torch.cosine_similarity(single, fused, dim=-1)
    want = np.average(cosine, axis=-1, weights=owned.expand_as(cosine))
    shares = fusion_similarity(single, fused, owned)
    assert shares.numpy() == pytest.approx(want / want.sum(0))
    assert shares.sum(0).tolist() == pytest.approx([1.0] * 4)  # T-X8


def test_one_backbone_has_all_the_similarity():  # T-X8
    fused = normal(4, 5, 6).abs()
    owned = torch.ones(4, 5, dtype=torch.bool)
    assert fusion_similarity(normal(1, 4, 5, 6, seed=1).abs(), fused, owned).tolist() == [[1.0] * 4]
    owned[2] = False
    assert fusion_similarity(fused[None], fused, owned).isnan().tolist() == [
        [False, False, True, False]
    ]


def test_alignment_is_hsic_and_blind_to_rotation_and_scale():  # T-X8
    x = normal(40, 6)
    y = normal(40, 9, seed=1) + 3.0
    centre = eye(40) - 1 / 40
    a = centre @ x @ x.T @ centre
    b = centre @ y @ y.T @ centre
    hsic = float((a * b).sum() / math.sqrt(float((a * a).sum() * (b * b).sum())))
    turned = 5.0 * x @ torch.linalg.qr(normal(6, 6, seed=2))[0] + 1.0
    x = x.numpy()
    y = y.numpy()
    turned = turned.numpy()
    assert linear_cka(x, y) == pytest.approx(hsic)
    assert linear_cka(y, x) == pytest.approx(hsic)
    assert linear_cka(x, turned) == pytest.approx(1.0)
    assert linear_cka(turned, y) == pytest.approx(hsic)
    assert math.isnan(linear_cka(np.ones((40, 2)), y))


def image_tower(name):
    """The layers that compute the features, without memory."""
    import open_clip
    import timm
    import torchvision

    from fedcache.extract.backbones import cnn, glyph_clip

    row = BACKBONES[name]
    with torch.device("meta"):
        if row.provider in ("timm", "packaged", "word_clip"):
            return timm.create_model(row.architecture, pretrained=False, num_classes=0)
        if row.provider == "torchvision":
            return torchvision.models.get_model(name, weights=None).features
        if row.provider == "metadataset":
            model = torchvision.models.resnet18(weights=None)
            model.conv1 = torch.nn.Conv2d(3, 64, 5, bias=False)
            model.fc = torch.nn.Identity()
            return model
        if row.provider == "open_clip":
            config = open_clip.get_model_config(row.architecture)
            return open_clip.CLIP(
                **{k: config[k] for k in ("embed_dim", "vision_cfg", "text_cfg")}
            ).visual
        if row.provider == "glyph_clip":
            return glyph_clip.build().visual
        # norms are folded into the layers before them, which leaves their biases
        if row.provider == "tflite_file":
            layers = torchvision.models.mobilenet_v2(weights=None).features
            for layer in layers.modules():
                if isinstance(layer, torch.nn.BatchNorm2d):
                    del layer.weight
            return layers
        return {"cnn": cnn.build, "pixels": torch.nn.Identity}[row.provider]()


@pytest.mark.parametrize("name", [n for n in BACKBONES if n != "random-projection"])
def test_the_fixed_parameters_are_those_of_the_image_tower(name):
    assert PARAMETERS[name] == sum(p.numel() for p in image_tower(name).parameters())
