"""``flesd`` with a trunk FC(D, 512) + ReLU and its projection on cached features instead of a convolutional encoder.

This is ``flesd`` on cached features. A small network with two layers replaces the ResNet, and stored augmented views
replace the images. Clients send the similarities of public rows.

This is not the paper's experiment, so it has a name of its own and the fidelity ``cached_views``: each step draws two
of the stored augmentations of a row (extract with --views 4 or more), or two dropout masks of its one view
(``approx``). The equations of a round are those of ``flesd``; the probe reads the trunk.
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods.common import HParam, MethodPage, without
from fedcache.federate.methods.flesd import METHOD as FLESD

METHOD = replace(
    FLESD,
    name="flesd-head",
    summary="FLESD on cached features: a small network instead of a ResNet.",
    hparams=(
        HParam("encoder", "mlp", "choice", "a trunk on cached features", choices=("mlp",)),
        *without(FLESD.hparams, "encoder"),
    ),
    needs=frozenset({"views", "public"}),
    executions=("sequential", "batched"),
    mixed=frozenset({"backbones", "hidden"}),
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            R_k = \frac{h_k(x)}{\lVert h_k(x) \rVert}, \qquad h_k = \text{two layers on cached features},
                \qquad \text{then as FLESD}
        """,
        terms="""
            $h_k$: the network of client $k$; $x$: the cached feature of a public row; $R_k$: its encoding.
        """,
        when="""
            Use it to run FLESD in seconds, after an extraction with `--views 4`. It is not the experiment of the paper.
        """,
        cite=("shi2022flesd",),
    ),
)
