"""Runs both towers of a loaded CLIP, differentiable with respect to their inputs but not their weights.

The image tower is the encoder of the extraction without its ``inference_mode``, so it gives the same features as the
extraction before they are stored. The text tower runs open_clip's ``encode_text`` from the token embeddings on. Under a
causal mask the end token does not depend on later positions, so these are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcache.errors import UsageError
from fedcache.extract.backbones import word_clip
from fedcache.extract.backbones.backbone import (
    Backbone,
    ModuleEncoder,
    Weights,
    deterministic,
    no_text,
)
from fedcache.extract.backbones.table import load
from fedcache.extract.backbones.word_clip import WordEncoder, WordTextTower
from fedcache.extract.recipe import IMAGES, Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ClipTextTower:
    """The text tower of an open_clip ``CLIP``, or the ``TextTransformer`` of a ``CustomTextCLIP``.

    Raises UsageError for a tower whose feature is not that of one end token (Hugging Face's, SigLIP's, CoCa's).
    """

    def __init__(self, name: str, encoder: ModuleEncoder) -> None:
        clip: Any = encoder.module
        tower = getattr(clip, "text", clip)
        self._encoder = encoder
        self._tower = tower
        self._pool = getattr(tower, "text_pool_type", None) or getattr(tower, "pool_type", None)
        self._eos = getattr(tower, "text_eos_id", None) or getattr(tower, "eos_id", None)
        masks_padding = getattr(tower, "use_pad_mask", False)
        has_class_token = getattr(tower, "cls_emb", None) is not None
        reads_end_token = self._pool in ("argmax", "eos") and not masks_padding
        if not hasattr(tower, "token_embedding") or not reads_end_token or has_class_token:
            raise UsageError(
                f"Prompts cannot be trained with {name}, because its text feature is not the output at the end token. "
                f"Its text tower is {type(tower).__name__} with pooling {self._pool!r}.",
                "Use clip-rn50, clip-vit-b-16, clip-vit-b-32 or glyph-clip, or another open_clip model whose text "
                "feature is the output at the end token.",
            )

    @property
    def width(self) -> int:
        """E, the width of a token embedding."""
        return int(self._tower.token_embedding.weight.shape[1])

    @property
    def context(self) -> int:
        """L, the tokens of a prompt, start and end included."""
        return int(self._tower.positional_embedding.shape[0])

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Prompts as embeddings [B, L, E], and int64 [B]: the position of each end token; padding follows it."""
        import torch

        assert self._encoder.tokenize is not None
        tokens = self._encoder.tokenize(list(prompts)).to(self._encoder.device)
        if self._pool == "argmax":
            end = tokens.argmax(-1)  # the end token has the largest number
        else:
            end = torch.eq(tokens, self._eos or 0).int().argmax(-1)
        embeddings: Tensor = self._tower.token_embedding(tokens)
        return embeddings, end

    def encode(self, embeddings: Tensor, end: Tensor) -> Tensor:
        """Unit text features [B, D] float32 of embeddings [B, L, E] that end at positions [B]; differentiable."""
        import torch
        from torch import nn

        tower = self._tower
        x = embeddings.to(tower.token_embedding.weight.dtype)
        mask = tower.attn_mask
        if mask is not None:  # causal
            length = int(end.max()) + 1
            x = x[:, :length]
            mask = mask[:length, :length]
        with deterministic():
            x = x + tower.positional_embedding[: x.shape[1]]
            x = tower.transformer(x, attn_mask=mask)
            # The feature of a prompt is the state at its end token.
            rows = torch.arange(len(x), device=x.device)
            x = tower.ln_final(x[rows, end])
            project = tower.text_projection
            if isinstance(project, nn.Linear):
                x = project(x)
            elif project is not None:
                x = x @ project
        return nn.functional.normalize(x.float(), dim=-1)


class ClipImageTower:
    """The image tower of a loaded encoder."""

    def __init__(self, encoder: ModuleEncoder) -> None:
        self._encoder = encoder

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> normalised float32 [B, 3, H, W], by the recipe's mean and std."""
        return self._encoder.normalise(images)

    def encode(self, x: Tensor) -> Tensor:
        """Unit image features [B, D] float32 of normalised images [B, 3, H, W]; differentiable."""
        from torch.nn.functional import normalize

        return normalize(self._encoder.features(x.float()), dim=-1)


@dataclass(frozen=True)
class ClipTowers:
    """Both towers of one backbone, in float32, and the ``encoder`` that both run on."""

    name: str
    template: str  # prompt template with ``{}`` for the class name
    scale: float  # exp(logit_scale), the trained factor of its cosines
    text: ClipTextTower | WordTextTower
    image: ClipImageTower
    encoder: ModuleEncoder

    def to(self, device: str | torch.device) -> ClipTowers:
        """The same towers on another device; moved, not copied."""
        self.encoder.to(device)
        return self


def split_towers(name: str, template: str, encoder: ModuleEncoder) -> ClipTowers:
    """The towers of a loaded encoder; UsageError without a text tower, or if it cannot read trained prompts."""
    if encoder.tokenize is None:
        raise no_text(name)
    image = ClipImageTower(encoder)
    if isinstance(encoder, WordEncoder):
        return ClipTowers(name, template, word_clip.SCALE, encoder.tower, image, encoder)
    clip: Any = encoder.module
    scale = float(clip.logit_scale.exp().reshape(-1)[0])
    return ClipTowers(name, template, scale, ClipTextTower(name, encoder), image, encoder)


def load_towers(backbone: Backbone, weights: Weights, recipe: Recipe, template: str) -> ClipTowers:
    """Load a backbone as two live towers; arguments and errors are those of ``backbones.load`` and ``split_towers``."""
    encoder = load(backbone, weights, recipe)
    if backbone.reads != IMAGES:
        raise UsageError(
            f"{backbone.name} reads {backbone.reads}. Trained prompts need the image tower and the text tower of a "
            "CLIP model.",
            "Use a method with fixed prompts: clip-zs or fst-cbdg.",
        )
    if not isinstance(encoder, ModuleEncoder):
        raise no_text(backbone.name)
    return split_towers(backbone.name, template, encoder)
