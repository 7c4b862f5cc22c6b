"""Live towers that cost microseconds: the protocol of ``federate/engine/client_data.py`` over a few small matrices."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import normalize

SIDES = (4, 3)
E, L = 8, 24
START, END = 0, 27


def as_images(x):
    """Features [N, V, D] as images uint8 [N, 1, 36]: a fixed projection of view 0; missing rows turn black."""
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal((x.shape[-1], 36))).to(x.dtype)
    return (torch.sigmoid(2.0 * x[:, :1] @ weights) * 255.0).nan_to_num(0.0).to(torch.uint8)


class TinyText:
    """Letters as tokens; the feature is a nonlinear map of the mean of all tokens up to END, order included."""

    width, context = E, L

    def __init__(self, width, dtype, seed=2):
        g = np.random.default_rng(seed)
        draw = lambda *shape: torch.from_numpy(g.standard_normal(shape)).to(dtype)  # noqa: E731
        self.table, self.place, self.out = draw(28, E), draw(L, E), draw(E, width)
        self.calls = 0

    def embed(self, prompts):
        tokens = torch.full((len(prompts), L), START)
        end = torch.tensor([len(p) + 1 for p in prompts]).clamp(max=L - 1)
        for row, p in zip(tokens, prompts, strict=True):
            codes = [1 + ord(c) % 26 for c in p][: L - 2]
            row[1 : len(codes) + 1] = torch.tensor(codes, dtype=torch.int64)
            row[len(codes) + 1] = END
        return self.table[tokens], end

    def encode(self, embeddings, end):
        self.calls += 1
        upto = (torch.arange(L) <= end[:, None]).to(embeddings.dtype)
        h = torch.tanh(embeddings.to(self.place.dtype) * (1.0 + self.place))
        mean = (h * upto[..., None]).sum(1) / upto.sum(1, keepdim=True)
        return normalize(torch.tanh(3.0 * mean) @ self.out, dim=-1)


class TinyImage:
    """One hidden layer on the flat image, row by row, so that a row's bits do not depend on its batch."""

    def __init__(self, width, dtype, pixels=36, seed=3):
        g = np.random.default_rng(seed)
        self.dtype = dtype
        self.first = torch.from_numpy(g.standard_normal((pixels, 12)) / 6.0).to(dtype)
        self.second = torch.from_numpy(g.standard_normal((12, width))).to(dtype)
        self.rows = 0

    def normalise(self, images):
        return images.permute(0, 3, 1, 2).to(self.dtype) / 127.5 - 1.0

    def encode(self, x):
        self.rows += 0 if torch.compiler.is_exporting() else len(x)
        flat = x.to(self.dtype).flatten(1)[:, :, None]
        h = torch.tanh((self.first * flat).sum(1))
        return normalize((self.second * h[:, :, None]).sum(1), dim=-1)


class TinyTowers:
    name, template, scale = "tiny", "it is {}!", 50.0

    def __init__(self, width, dtype=torch.float64):
        self.text, self.image = TinyText(width, dtype), TinyImage(width, dtype)

    def to(self, device):
        return self
