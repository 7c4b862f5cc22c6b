"""Small frozen encoders for methods that train prompts or read images: a few small matrices instead of CLIP.

They follow the protocols ``TextTower``, ``ImageTower`` and ``FrozenEncoders`` of ``federate/engine/client_data.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

SIDES = (4, 3)
"""Height and width of an image with three colours: 36 numbers."""

E = 8
"""Width of the embedding of a token."""

L = 24
"""Number of tokens of a prompt, with padding."""

START = 0
END = 27
"""Tokens at the two ends of a prompt. Letters have the tokens 1 to 26. Padding is ``START`` too."""


def as_images(x: Tensor) -> Tensor:
    """Features [N, V, D] as images uint8 [N, 1, 36]: a fixed projection of view 0; missing rows become black."""
    g = np.random.default_rng(1)
    weights = torch.from_numpy(g.standard_normal((x.shape[-1], 36))).to(x.dtype)
    grey = torch.sigmoid(2.0 * x[:, :1] @ weights) * 255.0
    return grey.nan_to_num(0.0).to(torch.uint8)


class TinyText:
    """Text encoder with letters as tokens; a feature is a nonlinear map of all tokens and positions up to ``END``."""

    width = E
    context = L

    def __init__(self, width: int, dtype: torch.dtype, seed: int = 2) -> None:
        g = np.random.default_rng(seed)
        self.table = torch.from_numpy(g.standard_normal((28, E))).to(dtype)
        self.place = torch.from_numpy(g.standard_normal((L, E))).to(dtype)
        self.out = torch.from_numpy(g.standard_normal((E, width))).to(dtype)
        self.calls = 0  # number of calls of ``encode``

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Prompts as embeddings [B, L, E], and the positions of their ends."""
        device = self.table.device
        tokens = torch.full((len(prompts), L), START)
        end = torch.tensor([len(p) + 1 for p in prompts], device=device).clamp(max=L - 1)
        for row, p in zip(tokens, prompts, strict=True):
            codes = [1 + ord(c) % 26 for c in p][: L - 2]
            row[1 : len(codes) + 1] = torch.tensor(codes, dtype=torch.int64)
            row[len(codes) + 1] = END
        return self.table[tokens.to(device)], end

    def encode(self, embeddings: Tensor, end: Tensor) -> Tensor:
        """Unit features [B, D] of embeddings that end at these positions."""
        self.calls += 1
        upto = (torch.arange(L, device=end.device) <= end[:, None]).to(embeddings.dtype)
        # Each position scales its token by other numbers, so the order of letters matters.
        h = torch.tanh(embeddings.to(self.place.dtype) * (1.0 + self.place))
        mean = (h * upto[..., None]).sum(1) / upto.sum(1, keepdim=True)
        return normalize(torch.tanh(3.0 * mean) @ self.out, dim=-1)

    def to(self, device: str) -> TinyText:
        """The same encoder on another device."""
        made = copy(self)
        made.table = self.table.to(device)
        made.place = self.place.to(device)
        made.out = self.out.to(device)
        return made


class TinyImage:
    """Image encoder: one hidden layer on the flat image, without matrix products, so no bit depends on the batch."""

    def __init__(self, width: int, dtype: torch.dtype, pixels: int = 36, seed: int = 3) -> None:
        g = np.random.default_rng(seed)
        self.dtype = dtype
        self.first = torch.from_numpy(g.standard_normal((pixels, 12)) / 6.0).to(dtype)
        self.second = torch.from_numpy(g.standard_normal((12, width))).to(dtype)
        self.rows = 0  # number of rows that were encoded

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] as numbers [B, 3, H, W] in [-1, 1]."""
        return images.permute(0, 3, 1, 2).to(self.dtype) / 127.5 - 1.0

    def encode(self, x: Tensor) -> Tensor:
        """Unit features [B, D] of normalised images."""
        # While torch exports the model, the number of rows is a symbol that cannot be added up.
        if not torch.compiler.is_exporting():
            self.rows += len(x)
        flat = x.to(self.dtype).flatten(1)[:, :, None]
        h = torch.tanh((self.first * flat).sum(1))
        return normalize((self.second * h[:, :, None]).sum(1), dim=-1)

    def to(self, device: str) -> TinyImage:
        """The same encoder on another device."""
        made = copy(self)
        made.first = self.first.to(device)
        made.second = self.second.to(device)
        return made


class TinyTowers:
    """A text and an image encoder whose features have the same width."""

    name = "tiny"
    template = "it is {}!"
    scale = 50.0

    def __init__(self, width: int, dtype: torch.dtype = torch.float64) -> None:
        self.text = TinyText(width, dtype)
        self.image = TinyImage(width, dtype)

    def to(self, device: str) -> TinyTowers:
        """The same encoders on another device; these encoders for the CPU, on which they are made."""
        if device == "cpu":
            return self
        made = copy(self)
        made.text = self.text.to(device)
        made.image = self.image.to(device)
        return made
