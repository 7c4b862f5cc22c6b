"""Live towers give what the extraction gave, with a gradient to their inputs and none to their weights."""

import hashlib
from functools import cache
from pathlib import Path

import open_clip
import pytest
import torch
from checkpoint_files import images
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from refusal import refused
from tolerance import SUMS, close
from torch import nn
from torch.nn.functional import normalize

from fedcache.extract.backbones import Weights, glyph_clip, lookup
from fedcache.extract.backbones.backbone import clip_encoder
from fedcache.extract.backbones.clip_towers import load_towers, split_towers
from fedcache.extract.recipe import NORMS, Recipe
from fedcache.heads.prompt import slots, weave

FILE = Path(glyph_clip.__file__).with_name("glyph_clip.safetensors")
RECIPE = Recipe("tiny-clip", "none", size=8, mean=NORMS["clip"][0], std=NORMS["clip"][1])
PROMPTS = ["a photo of a cat.", "dog", "a low resolution photo of a fire truck on a street"]
CONTEXT = 20


@cache
def tokenizer():
    return open_clip.SimpleTokenizer(context_length=CONTEXT)


def small_clip(kind):
    """A random open_clip model of 16 channels, as an encoder; ``kind`` chooses the class or a trait of the text."""
    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=4, image_size=8)
    traits = {"eos": {"pool_type": "eos", "eos_id": 49407}, "both ways": {"no_causal_mask": True}}
    traits |= {"last": {"pool_type": "last"}, "cls": {"embed_cls": True}}
    words = CLIPTextCfg(
        context_length=CONTEXT,
        vocab_size=49408,
        width=16,
        heads=2,
        layers=2,
        **traits.get(kind, {}),
    )
    model = (CustomTextCLIP if kind in ("custom", "cls") else CLIP)(12, vision, words)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)

    return clip_encoder("tiny-clip", model, tokenizer(), RECIPE, device="cpu", dtype="float32")


def glyph():
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    row = glyph_clip.BACKBONE
    return load_towers(row, Weights(FILE, digest, "the package"), row.recipe, str(row.template))


@pytest.fixture(scope="module", params=["clip", "custom", "eos", "both ways", "glyph-clip"])
def towers(request):
    if request.param == "glyph-clip":
        return glyph()
    return split_towers("tiny-clip", "a photo of a {}.", small_clip(request.param))


def test_untrained_prompts_have_the_text_features_of_the_extraction(towers):
    embeddings, end = towers.text.embed(PROMPTS)
    assert embeddings.shape == (3, towers.text.context, towers.text.width)
    live = towers.text.encode(embeddings, end)
    assert close(live, towers.encoder.text(PROMPTS), SUMS)
    alone = torch.cat([towers.text.encode(*towers.text.embed([p])) for p in PROMPTS])
    assert close(live, alone, SUMS)  # a prompt's feature does not depend on longer ones


def test_images_have_the_features_of_the_extraction_bit_for_bit(towers):
    recipe = RECIPE if towers.name == "tiny-clip" else glyph_clip.BACKBONE.recipe
    seen = images(5, recipe.size)
    normalised = towers.image.normalise(seen)
    live = towers.image.encode(normalised)
    assert torch.equal(live, normalize(towers.encoder.image(seen), dim=-1))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (recipe.mean, recipe.std))
    assert close(normalised, (seen.permute(0, 3, 1, 2) / 255 - mean) / std, 4)


def test_inputs_take_a_gradient_and_weights_none(towers):
    embeddings, end = towers.text.embed(PROMPTS)
    leaf = embeddings.clone().requires_grad_()
    target = torch.linspace(-1, 1, 3 * towers.text.encode(leaf, end).shape[-1]).view(3, -1)
    (towers.text.encode(leaf, end) * target).sum().backward()
    for row, last in zip(leaf.grad, end.tolist(), strict=True):
        assert float(row[1:last].abs().min(-1).values.max()) > 0
        if towers.text._tower.attn_mask is not None:
            assert float(row[last + 1 :].abs().sum()) == 0.0  # what follows END is never read
    side = 8 if towers.name == "tiny-clip" else 32
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0)).requires_grad_()
    z = towers.image.encode(x)
    (z * torch.linspace(-1, 1, z.numel()).view_as(z)).sum().backward()
    assert float(x.grad.abs().sum()) > 0
    assert torch.allclose(z.norm(dim=-1), torch.ones(2))
    assert not any(
        p.requires_grad or p.grad is not None for p in towers.encoder.module.parameters()
    )


def test_the_gradient_of_a_context_vector_is_a_finite_difference(towers):
    tokens, end = towers.text.embed(["cat", "dog house"])
    index, ends = slots(end, 2, towers.text.context, "end")
    g = torch.Generator().manual_seed(1)
    v = torch.randn(2, towers.text.width, generator=g)
    step = torch.randn(2, towers.text.width, generator=g)
    target = torch.randn(2, towers.encoder.text(["x"]).shape[-1], generator=g)

    def value(vectors):
        return (towers.text.encode(weave(tokens, vectors, index), ends) * target).sum()

    leaf = v.clone().requires_grad_()
    (grad,) = torch.autograd.grad(value(leaf), leaf)
    h = 1e-2
    numeric = float(value(v + h * step) - value(v - h * step)) / (2 * h)
    assert float((grad * step).sum()) == pytest.approx(numeric, rel=0.02, abs=2e-3)


def test_words_before_the_name_are_the_templates_tokens(towers):
    # T-T1: the prompt made of the words' embeddings is the tokenised template, token for token.
    before = "a photo of a "
    after = "."
    names = ["cat", "ice cream"]
    words, end = towers.text.embed([before])
    vectors = words[0, 1 : int(end)]
    tokens, ends = towers.text.embed([n + after for n in names])
    index, moved = slots(ends, len(vectors), towers.text.context, "end")
    filled, wanted = towers.text.embed([before + n + after for n in names])
    assert torch.equal(moved, wanted)
    assert torch.equal(weave(tokens, vectors, index), filled)


def test_the_scale_is_the_models_own():
    encoder = small_clip("clip")
    assert split_towers("x", "{}", encoder).scale == pytest.approx(
        float(encoder.module.logit_scale.exp())
    )


def test_backbones_without_a_text_tower_of_one_end_token_are_refused():
    for kind in ("last", "cls"):
        refused(lambda kind=kind: split_towers("tiny-clip", "{}", small_clip(kind)), "tiny-clip")
    for name, sha256 in (("pixels", "none"), ("random-projection", "seed:0")):
        row = lookup(name)
        weights = Weights(None, sha256, "drawn")
        refused(lambda row=row, weights=weights: load_towers(row, weights, row.recipe, "{}"), name)
