"""glyph-CLIP: a CLIP of 1.8 million parameters that ships with the package and never saw an image from the world.

Image and text towers are open_clip's ``CLIP`` class, trained together on characters drawn from free fonts
(``tools/train_glyph_clip.py``; the model card is ``glyph_clip.md``). The model reads digits, written or printed, well
enough that every method which needs aligned image and text features can be run and tested offline.

The tokenizer has one token per UTF-8 byte, so it needs no vocabulary file, upper and lower case differ, and every class
name can be encoded. The model has learned only single characters and the words for digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedcache.errors import UsageError
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights, clip_encoder
from fedcache.extract.recipe import NORMS, Recipe

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 128
SIDE = 32
CONTEXT = 48
START = 256
END = 257
VOCABULARY = 258

_MEAN, _STD = NORMS["half"]

BACKBONE = Backbone(
    name="glyph-clip",
    provider="glyph_clip",
    width=WIDTH,
    text_width=WIDTH,
    recipe=Recipe(
        "glyph-clip",
        "",
        size=SIDE,
        resize="squash",
        mean=_MEAN,
        std=_STD,
        pooling="image_projection",
    ),
    source="ships with fedcache: a small CLIP trained on characters drawn from fonts",
    files=("glyph_clip.safetensors", "extract/backbones/glyph_clip.safetensors"),
    template="a photo of the number {}.",
    architecture="ModifiedResNet-1-1-1-1 and a text transformer of two layers",
    wheel="fedcache",
    distribution="fedcache",
    size=3_650_578,
    sha256=(
        (
            "glyph_clip.safetensors",
            "b2af10d73cc14957ef52a05ae841bb017470a6356e649e9c519bb485379999c7",
        ),
    ),
    fixed=True,
    licence="Apache-2.0",
)


def tokenize(prompts: Sequence[str]) -> Tensor:
    """int64 [C, 48] of C texts: bytes between a start and an end token, then zeros.

    A prompt longer than 46 bytes loses its last bytes, as in every CLIP. Raises UsageError if two different prompts
    would become equal.
    """
    import torch

    tokens = torch.zeros(len(prompts), CONTEXT, dtype=torch.int64)
    seen: dict[bytes, str] = {}
    most = CONTEXT - 2
    for row, prompt in enumerate(prompts):
        text = prompt.encode()[:most]
        first = seen.setdefault(text, prompt)
        if first != prompt:
            raise UsageError(
                f"glyph-clip reads only the first {most} bytes of a prompt, and these are equal in {first!r} and "
                f"{prompt!r}.",
                'Shorten the template, for example --text "{}", or the class names.',
            )
        tokens[row, : len(text) + 2] = torch.tensor([START, *text, END])
    return tokens


def build() -> Any:
    """The towers with random weights: open_clip's ``CLIP``, float32.

    Image: a ModifiedResNet of one bottleneck per stage, 16 channels wide, for 32 px, with attention pooling. Text: a
    causal transformer of two layers, 128 wide, four heads. Both end in a projection to 128.
    """
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=[1, 1, 1, 1], width=16, image_size=SIDE)
    text = CLIPTextCfg(context_length=CONTEXT, vocab_size=VOCABULARY, width=128, heads=4, layers=2)
    return CLIP(WIDTH, vision, text)


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """Both towers. The file has float16 weights; they are computed in float32, or under autocast in ``dtype``."""
    model = build()
    weights.load_into(model, backbone.name)
    return clip_encoder(backbone.name, model, tokenize, recipe, device=device, dtype=dtype)
