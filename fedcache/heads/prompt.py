"""Prompts: trained vectors among the token embeddings of a class name, or trained values added to an image's pixels.

Zhou et al., "Learning to prompt for vision-language models" (CoOp), IJCV 2022; Bahng et al., "Exploring visual prompts
for adapting large-scale models", 2022. A visual prompt is stored as one vector with a value for each pixel and channel
that it covers. So exactly the prompt is trained, averaged and counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def slots(end: Tensor, n: int, context: int, position: str) -> tuple[Tensor, Tensor]:
    """Indices that build [START, v_1 .. v_n, name, END, padding] from the tokens of each name and the n vectors.

    Args:
        end: int64 [C], position of the end token in each name's own sequence [START, name, END, padding].
        n: number of vectors.
        context: L, tokens of a sequence; ``end + n`` must stay below it.
        position: of the name among the vectors: ``end`` | ``middle`` (after n // 2 of them) | ``front``.

    Returns:
        int64 [C, L], indices into the name's L tokens followed by the n vectors; and int64 [C], the new positions of
        the end token.
    """
    vectors_before = {"end": n, "middle": n // 2, "front": 0}
    before = vectors_before[position]
    # For each position t of the new sequence: START, the vectors before the name, the name, and what follows it.
    t = torch.arange(context, device=end.device)
    name_tokens = (end - 1).unsqueeze(-1)
    # After the name: the other vectors, then END and padding.
    after_name = torch.where(t <= n + name_tokens, context + t - 1 - name_tokens, t - n)
    after_vectors = torch.where(t <= before + name_tokens, t - before, after_name)
    index = torch.where(t <= before, context + t - 1, after_vectors)
    return torch.where(t == 0, 0, index), end + n


def weave(names: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
    """Prompts [C, L, E] of the tokens of names [C, L, E] and vectors; ``index`` is from ``slots``.

    Vectors are [n, E] for all classes, or [C, n, E] if each class has its own.
    """
    C, _, E = names.shape
    vectors = vectors.expand(C, *vectors.shape[-2:])
    tokens = torch.cat([names, vectors], 1)
    return tokens.gather(1, index.unsqueeze(-1).expand(-1, -1, E))


def border(height: int, width: int, p: int) -> Tensor:
    """int64 [6 p (H + W - 2 p)]: places in a flat [3, H, W] within ``p`` pixels of the edge.

    There are 69,840 places for p = 30 in an image of 224 x 224 pixels.
    """
    inside = torch.zeros(height, width, dtype=torch.bool)
    inside[p : height - p, p : width - p] = True
    return _places(~inside)


def square(height: int, width: int, p: int, top: int = 0, left: int = 0) -> Tensor:
    """int64 [3 p^2]: places in a flat [3, H, W] of a p x p patch whose first pixel is (top, left)."""
    inside = torch.zeros(height, width, dtype=torch.bool)
    inside[top : top + p, left : left + p] = True
    return _places(inside)


def _places(covered: Tensor) -> Tensor:
    """Places in a flat [3, H, W] of the pixels that a mask [H, W] covers, in all three channels."""
    return covered.expand(3, -1, -1).flatten().nonzero().squeeze(-1)


def canvas(v: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """[3, H, W] with the prompt ``v`` [P] at its places and 0 elsewhere."""
    flat = v.new_zeros(3 * height * width).index_copy(0, places, v)
    return flat.view(3, height, width)


def l_aug(z: Tensor, z_g: Tensor, z_prev: Tensor, gamma: float | Tensor) -> Tensor:
    """Loss that pulls features z towards z_g and away from z_prev (ATPFL eq 4).

    -log( e^(z.z_g / G) / (e^(z.z_g / G) + e^(z.z_prev / G)) ) = softplus((z.z_prev - z.z_g) / G)

    Args:
        z: [.., N, D] unit rows; in ATPFL the only argument that a gradient reaches.
        z_g: [.., N, D] unit rows made with the prompts received, in FedPGP with the template.
        z_prev: [.., N, D] unit rows made with the client's prompts at the end of its last participation, in FedPGP
            with its prompt now.
        gamma: G, a number or a tensor that broadcasts against [.., N].

    Returns:
        [.., N]; log 2 with zero gradient where ``z_g`` is ``z_prev``.
    """
    gap = (z * (z_prev - z_g)).sum(-1)
    return softplus(gap / gamma)
