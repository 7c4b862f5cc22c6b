"""Local prompts: every client learns its two prompts alone; the lower bound of TPFL's tables ("Local").

Every client learns a text prompt and a visual prompt on its own rows, as in ``tpfl``, and sends nothing. The prompts of
each client are scored on the test rows of all clients.

This is ``tpfl`` without the server; the reported accuracy is the mean over clients. TPFL's text reports gains of up to
18.5 points over local prompts, but its tables show a gain of 54.6 points (D-63).
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods import tpfl
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    MethodPage,
    Tree,
    everywhere,
    keep_optimiser,
    sends_nothing,
    without,
)


def enter(_down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own prompts; all start from the same draw."""
    p = tpfl.init(ctx)
    return {**p, **keep_optimiser(p, tuple(p), ctx)}


def prompts_of(state: Tree) -> Tree:
    """The client's prompts, without the state of its optimiser."""
    return {k: t for k, t in state.items() if not k.startswith("opt/")}


def fit(_down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """``epochs`` of tpfl's eq 2, from the client's last prompts; nothing is sent."""
    prompts = prompts_of(state)
    kept = {k: t for k, t in state.items() if k not in prompts}
    kept, p = tpfl.fit(prompts, kept, data, ctx)
    return {**p, **kept}, {}


def deploy(_down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The client's prompts and their class features."""
    return tpfl.deploy(prompts_of(state), {}, data, ctx)


METHOD = replace(
    tpfl.METHOD,
    name="local-prompt",
    summary="Every client learns a text prompt and a visual prompt alone, scored on all test rows; "
    "needs images.",
    hparams=without(tpfl.METHOD.hparams, "agg"),
    init=lambda _ctx: {},
    enter=enter,
    fit=fit,
    uploads=sends_nothing,
    deploy=deploy,
    protocol=everywhere,
    paper_count=lambda *_: (0, 0),
    page=MethodPage(
        family="Prompts",
        formula=r"""
            (\mathrm{ctx}_i, v_i) = \mathrm{arg}\min_{\mathrm{ctx}, v}\ -\frac{1}{n_i} \sum_{x \in D_i} \log
                \mathrm{softmax}_{y}\big(100 \cos(f(x + v), g(\mathrm{ctx}, c))\big)
        """,
        terms=r"""
            $f$: the image encoder; $g$: the text encoder; $v$: the visual prompt on the pixels;
            $\mathrm{ctx}$: the text prompt; $D_i$: client $i$'s $n_i$ rows.
        """,
        when="""
            Use it as the lower bound for `tpfl`. It needs the images, not only their features.
        """,
        cite=("zhao2023tpfl",),
    ),
)
