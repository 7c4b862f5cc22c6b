"""Live frozen encoders, as methods see them: two towers of one CLIP whose inputs take a gradient, whose weights do not.

``federate`` never loads a model; what satisfies these protocols arrives as an argument of ``engine.run``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class TextTower(Protocol):
    """A text encoder that reads token embeddings, so that some of them can be trained."""

    @property
    def width(self) -> int:
        """E, the width of a token embedding."""

    @property
    def context(self) -> int:
        """L, the tokens of a prompt, start and end included."""

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Prompts as embeddings [B, L, E], and int64 [B]: the position of each end token; padding follows it."""

    def encode(self, embeddings: Tensor, end: Tensor) -> Tensor:
        """Unit text features [B, D] of embeddings [B, L, E] that end at positions [B]; differentiable."""


class ImageTower(Protocol):
    """An image encoder that reads normalised images, so that something can be added to them."""

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> normalised float [B, 3, H, W]."""

    def encode(self, x: Tensor) -> Tensor:
        """Unit image features [B, D] of normalised images [B, 3, H, W]; differentiable."""


class FrozenEncoders(Protocol):
    """Both towers of one backbone.

    Attributes:
        name: of the backbone.
        template: prompt template with ``{}`` for the class name.
        scale: the factor of cosines in its logits (100 for CLIP).
    """

    @property
    def name(self) -> str:
        """Name of the backbone."""

    @property
    def template(self) -> str:
        """Prompt template with ``{}`` for the class name."""

    @property
    def scale(self) -> float:
        """The factor of cosines in its logits (100 for CLIP)."""

    @property
    def text(self) -> TextTower:
        """The text tower."""

    @property
    def image(self) -> ImageTower:
        """The image tower."""

    def to(self, device: str) -> FrozenEncoders:
        """The same towers on another device."""
