"""Shared code of the prompt methods: switches, initial prompts, features of prompted texts and images.

Live encoders take one batch axis, so these functions have no leading axes (the ``sequential`` execution); the weights
of both towers are frozen. Only the tensors with the names ``ctx`` (context vectors) and ``v`` (visual prompt) are
trained, averaged and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import UsageError
from fedcache.federate.methods.common import (
    TRAINING,
    Batch,
    Batches,
    ClientData,
    Ctx,
    Hp,
    HParam,
    Loss,
    Tree,
    affine,
    declare,
    minibatches,
    train,
)
from fedcache.heads.prompt import border, canvas, slots, square, weave

PAPER_ROUNDS = 20
"""T_g of ATPFL: the number of rounds in which its learning rate falls along a cosine."""

PAPER_SIDE = 224
PAPER_PROMPT = 30
"""Side of an image and width of a visual prompt, in pixels."""

ENCODE_BYTES = 32 << 20
"""Bytes of normalised images that are encoded at once where no gradient is taken."""

CONTEXT = (
    HParam(
        "n_ctx",
        16,
        "int",
        "number of context vectors of a prompt (D-62); ctx_init=words has one for each word",
        low=1,
    ),
    HParam(
        "ctx_pos",
        "end",
        "choice",
        "position of the class name among the context vectors",
        choices=("end", "middle", "front"),
    ),
    HParam("csc", False, "bool", "each class has separate context vectors"),
    HParam(
        "ctx_init",
        "normal",
        "choice",
        "initial context vectors; normal: N(0, 0.02^2); words: the words before {} in the "
        "backbone's template",
        choices=("normal", "words"),
    ),
)

VISUAL = (
    HParam(
        "vp_template",
        "padding",
        "choice",
        "pixels that the visual prompt covers",
        choices=("padding", "fixed_patch", "random_patch"),
    ),
    HParam(
        "vp_size",
        None,
        "int",
        "width of the border, or side of the patch, in pixels (D-62); 0 for no visual prompt",
        low=0,
        auto="30 of 224, in proportion",
    ),
    HParam(
        "vp_init",
        "zeros",
        "choice",
        "initial visual prompt: zeros, or N(0, 1)",
        choices=("zeros", "randn"),
        official="randn",
    ),
)

SCALE = HParam("scale", 100.0, "float", "factor of the cosines", low=1e-6, auto="the model's own")

SCHEDULE = (
    HParam(
        "sched_unit",
        "round",
        "choice",
        "round: lr follows a cosine over the rounds; none: lr is constant",
        choices=("round", "none"),
    ),
    HParam(
        "sched_rounds",
        None,
        "int",
        "rounds of the cosine's half period",
        low=1,
        auto="those of the run",
    ),
    HParam(
        "warm_rounds", 0, "int", "warm-up rounds before the cosine schedule of lr (D-66)", low=0
    ),
    HParam("warm_lr", 1e-5, "float", "lr of the warm-up rounds", low=0.0),
)

# Adam, its rate and "epoch=20" are the paper's. The 20 epochs are read as local epochs of a round (D-81): with one, a
# few-shot client takes a single step, and prompts hardly move. The paper prints no decay. A few-shot client has less
# than one batch, so a short batch must not be dropped.
PROMPT_TRAINING = declare(TRAINING, SCHEDULE, wd=0.0, drop_last=False, epochs=20)

AUG = (
    HParam(
        "mu_aug",
        0.5,
        "float",
        "weight of the pull towards the global prompts (eq 5, D-62); 0 is tpfl",
        low=0.0,
    ),
    HParam(
        "gamma_aug",
        None,
        "float",
        "temperature of the pull towards the global prompts; the paper prints one Gamma for eqs "
        "2 and 4 (D-82)",
        low=1e-6,
        auto="1/scale, the Gamma of eq 2",
    ),
)


def scheduled(ctx: Ctx) -> Ctx:
    """The context with this round's learning rate: lr (1 + cos(pi t / T)) / 2, after the warm-up."""
    if ctx.round < ctx.count("warm_rounds"):
        return ctx.with_hp(lr=ctx.number("warm_lr"))
    if ctx.hp["sched_unit"] == "none":
        return ctx
    # ``sched_rounds`` is None only outside of runs: ``runs.spec`` replaces None by the run's number of rounds.
    if ctx.hp["sched_rounds"] is None:
        rounds = PAPER_ROUNDS
    else:
        rounds = ctx.count("sched_rounds")
    # Half a period of the cosine: 1 in the first round, 0 in the last and after it.
    share = (1.0 + math.cos(math.pi * min(ctx.round, rounds) / rounds)) / 2.0
    return ctx.with_hp(lr=share * ctx.number("lr"))


def scale(ctx: Ctx) -> float | Tensor:
    """The factor of the cosines."""
    if ctx.hp["scale"] is None:
        return ctx.towers.scale
    return ctx.number("scale")


def pull_temperature(ctx: Ctx) -> float | Tensor:
    """Gamma of ATPFL's eq 4: ``gamma_aug`` if it is set, else the Gamma of eq 2, which is 1 / ``scale``."""
    if ctx.hp["gamma_aug"] is None:
        return 1.0 / scale(ctx)
    return ctx.number("gamma_aug")


@dataclass(frozen=True)
class Names:
    """The class names as tokens, with room for context vectors.

    Attributes:
        tokens: [C, L, E] embeddings of START, name, END and padding.
        index: int64 [C, L], from ``slots``.
        end: int64 [C], positions of END in the prompts.
    """

    tokens: Tensor
    index: Tensor
    end: Tensor

    def prompts(self, vectors: Tensor) -> Tensor:
        """[C, L, E] with the context vectors [n, E] or [C, n, E]."""
        return weave(self.tokens, vectors, self.index)


def class_names(ctx: Ctx, n: int) -> Names:
    """The tokens of every class name and of the template's text after ``{}``, with room for ``n`` vectors.

    As in CoOp, this text stays in the prompt; in most templates it is a full stop.

    Raises:
        UsageError, when a prompt does not fit the text tower.
    """
    tower = ctx.towers.text
    text_after = ctx.towers.template.partition("{}")[2]
    tokens, end = tower.embed([name + text_after for name in ctx.env.names])
    # The tower reads a fixed number of tokens; the longest name leaves the least room for vectors.
    last = int(end.max())
    room = tower.context - 1 - last
    if n > room:
        longest = ctx.env.names[int(end.argmax())]
        fix = "Shorten the class name, or use another --backbones."
        if room > 0:
            fix = f"--set n_ctx={room}"
            # With ctx_init=words, the number of words in the template decides, not n_ctx.
            if ctx.hp.get("ctx_init") == "words":
                fix = f"--set ctx_init=normal {fix}"
        raise UsageError(
            f"{ctx.towers.name} reads only {tower.context} tokens, so the prompt of class {longest!r} is too long: a "
            f"start token, {n} context vectors, a class name of at least {last - 1} tokens and an end token.",
            fix,
        )
    index, ends = slots(end, n, tower.context, str(ctx.hp["ctx_pos"]))
    return Names(tokens.to(ctx.env.dtype), index, ends)


def init_context(ctx: Ctx, purpose: str = "ctx") -> Tensor:
    """Context vectors [n, E], or [C, n, E] with ``csc``: one draw for all, or the template's words.

    ``purpose`` names the stream of the draw, for methods with several prompts.
    """
    tower = ctx.towers.text
    if ctx.hp["ctx_init"] == "words":
        tokens, end = tower.embed([ctx.towers.template.partition("{}")[0]])
        # Without START, which is token 0, and END.
        words = tokens[0, 1 : int(end)].to(ctx.env.dtype)
        if ctx.hp["csc"]:
            return words.expand(ctx.env.classes, *words.shape).clone()
        return words.clone()
    shape: tuple[int, ...] = (ctx.count("n_ctx"), tower.width)
    if ctx.hp["csc"]:
        shape = (ctx.env.classes, *shape)
    return 0.02 * ctx.rng.shared(purpose, lambda g: g.standard_normal(shape))


def moved(
    server: Tree, states: Mapping[int, Tree], _labels: Mapping[int, Tensor], ctx: Ctx
) -> dict[str, float]:
    """Euclidean distances of the prompts from their first values; means over clients if each has its own prompts.

    Returns:
        ``context_moved`` of the context vectors, and ``visual_moved`` of the visual prompt where there is one; {} while
        no client has prompts.
    """
    if "ctx" in server:
        prompts = [server]
    else:
        prompts = [states[c] for c in sorted(states)]
    if not prompts:
        return {}
    distances = {"context_moved": [distance(p["ctx"], init_context(ctx)) for p in prompts]}
    if "v" in prompts[0]:
        distances["visual_moved"] = [distance(p["v"], init_visual(ctx)) for p in prompts]
    return {name: sum(norms) / len(norms) for name, norms in distances.items()}


def distance(a: Tensor, b: Tensor) -> float:
    """The Euclidean norm of a - b over all numbers."""
    return float(torch.linalg.vector_norm((a - b).double()))


def prompt_size(ctx: Ctx) -> int:
    """Border or side of the visual prompt, in pixels."""
    if ctx.hp["vp_size"] is not None:
        return ctx.count("vp_size")
    side = min(ctx.image)
    return max(1, round(PAPER_PROMPT * side / PAPER_SIDE))


def places(ctx: Ctx, at: Sequence[int] = (0, 0)) -> Tensor:
    """Places of the values that a visual prompt covers; a patch begins at ``at``, which is (top, left)."""
    height, width = ctx.image
    p = prompt_size(ctx)
    if ctx.hp["vp_template"] == "padding":
        covered = border(height, width, p)
    else:
        covered = square(height, width, p, *at)
    return covered.to(ctx.env.device)


def corner(generator: np.random.Generator, ctx: Ctx) -> np.ndarray:
    """A uniform (top, left) for the patch."""
    room = np.array(ctx.image) - prompt_size(ctx)
    return generator.integers(0, room + 1)


def init_visual(ctx: Ctx) -> Tensor:
    """The visual prompt [P]: zeros, or one draw for all."""
    n = len(places(ctx))
    if ctx.hp["vp_init"] == "zeros":
        return ctx.zeros(n)
    return ctx.rng.shared("visual", lambda g: g.standard_normal(n))


def check(hp: Hp, ctx: Ctx) -> None:
    """Refuse prompts that do not fit the text tower, a template without words, and too large visual prompts.

    Raises:
        UsageError.
    """
    n = init_context(ctx).shape[-2]
    if not n:
        raise UsageError(
            f"ctx_init=words, but the template {ctx.towers.template!r} has no words before {{}}.",
            "Use --set ctx_init=normal, or extract text features with another --text.",
        )
    class_names(ctx, n)
    # 0 for no visual prompt; some methods have no visual prompt and no ``vp_size``.
    if hp.get("vp_size", 0) == 0:
        return
    height, width = ctx.image
    p = prompt_size(ctx)
    most = min(height, width)
    if hp["vp_template"] == "padding":
        most = most // 2
    if p > most:
        raise UsageError(
            f"A {hp['vp_template']} prompt of {p} pixels does not fit an image of {height} x {width}.",
            f"Use --set vp_size={most} or less.",
        )


def text_features(vectors: Tensor, names: Names, ctx: Ctx) -> Tensor:
    """Unit class features g(v, c) [C, D] under context vectors."""
    return ctx.towers.text.encode(names.prompts(vectors), names.end).to(ctx.env.dtype)


def frozen_text(vectors: Tensor, names: Names, ctx: Ctx) -> Tensor:
    """``text_features`` without a gradient."""
    with torch.no_grad():
        return text_features(vectors, names, ctx)


def class_features(vectors: Tensor, ctx: Ctx) -> Tensor:
    """Unit class features [C, D] of the prompts with these context vectors, without a gradient."""
    names = class_names(ctx, vectors.shape[-2])
    return frozen_text(vectors, names, ctx)


def template_features(template: str, ctx: Ctx) -> Tensor:
    """Unit class features [C, D] of a template with the class names in place of ``{}``, without a gradient."""
    tower = ctx.towers.text
    with torch.no_grad():
        tokens, end = tower.embed([template.replace("{}", name) for name in ctx.env.names])
        return tower.encode(tokens, end).to(ctx.env.dtype)


def zero_shot(ctx: Ctx) -> Callable[[Tensor], Tensor]:
    """The zero-shot classifier of the template: scores [N, C] of features [N, D], or of images uint8 [N, H W 3]."""
    T = template_features(ctx.towers.template, ctx)
    if ctx.env.image is None:
        return lambda x: affine(x, T)

    def scores(x: Tensor) -> Tensor:
        with torch.no_grad():
            blocks = torch.split(x, _at_once(ctx))
            return torch.cat([affine(image_features(part, None, ctx), T) for part in blocks])

    return scores


def image_features(x: Tensor, painted: Tensor | None, ctx: Ctx) -> Tensor:
    """Unit features f(x + v) [B, D] of images uint8 [B, H W 3] under a visual prompt [3, H, W] (None: without)."""
    tower = ctx.towers.image
    images = tower.normalise(x.view(-1, *ctx.image, 3))
    if painted is not None:
        images = images + painted
    return tower.encode(images).to(ctx.env.dtype)


def paint(p: Batch, ctx: Ctx, at: Sequence[int] = (0, 0)) -> Tensor | None:
    """The visual prompt of parameters ``p`` as an image [3, H, W]; None when they have none."""
    if "v" in p:
        return canvas(p["v"], places(ctx, at), *ctx.image)
    return None


def _at_once(ctx: Ctx) -> int:
    """Number of images that take about ``ENCODE_BYTES``."""
    image_bytes = 4 * 3 * math.prod(ctx.image)
    return max(1, ENCODE_BYTES // image_bytes)


def encode_rows(data: ClientData, p: Batch, ctx: Ctx) -> Tensor:
    """Unit features [n, D] of a client's rows under the visual prompt of ``p``, without a gradient."""
    with torch.no_grad():
        painted = paint(p, ctx)
        rows = torch.split(data.positions(), _at_once(ctx))
        parts = [image_features(data.take(i), painted, ctx) for i in rows]
    return torch.cat(parts)


def encode_images(x: Tensor, p: Batch, ctx: Ctx) -> Tensor:
    """Unit features [N, D] of images uint8 [N, H W 3]; a random patch has another position for each block of images."""
    blocks: tuple[Tensor, ...] = (x,)
    # An exported program must read any number of rows, so it cannot have a loop over blocks.
    if not torch.compiler.is_exporting():
        blocks = torch.split(x, _at_once(ctx))
    parts = []
    with torch.no_grad():
        for number, block in enumerate(blocks):
            painted = paint(p, ctx, _patch_position(ctx, number))
            parts.append(image_features(block, painted, ctx))
    return torch.cat(parts)


def _patch_position(ctx: Ctx, *key: int) -> Sequence[int]:
    """(top, left) of the patch in this forward pass: drawn for a random patch, else (0, 0)."""
    if ctx.hp["vp_template"] != "random_patch":
        return (0, 0)
    drawn = ctx.rng.each("patch", lambda g, _client: corner(g, ctx), *key)
    return cast(list[int], drawn.tolist())


def train_prompts(loss: Loss, p: Batch, data: ClientData, ctx: Ctx) -> Batch:
    """A client's local epochs on its prompts ``p`` (and kept ``opt/`` state), at this round's learning rate."""
    now = scheduled(ctx)
    names = tuple(k for k in p if not k.startswith("opt/"))

    def batches(_p: Batch, epoch: int) -> Batches:
        for t, (k, batch) in enumerate(minibatches(data, now, epoch)):
            if "v" in p:
                # The position of the visual prompt on the images of this batch.
                batch["at"] = torch.tensor(_patch_position(now, epoch, t))
            yield k, batch

    # {} instead of the broadcast, which the losses of these methods do not read.
    return train(p, names, ctx.count("epochs"), loss, {}, data, now, batches=batches)
