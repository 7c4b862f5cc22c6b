"""FedAvg of SimCLR encoders, a baseline of FLESD (table 1): local contrast of views, then the average of the weights.

Clients train an image encoder without labels: SimCLR pulls two augmentations of one image together, and pushes those of
different images apart. The server averages the encoders. A linear probe on labelled rows measures the result.

Shi et al., "Towards communication-efficient and privacy-preserving federated representation learning" (FLESD); eq 3 is
the local loss. The released code averages uniformly (D-36), contrasts in one direction (D-30) and normalises images
differently in training and inference (D-37; here, both are the same). Only the probe reads labels.
"""

from __future__ import annotations

from fedcache.federate.methods.common import (
    AGG,
    Defaults,
    Method,
    MethodPage,
    declare,
    server_tensors,
    simclr,
)

METHOD = Method(
    name="fedavg-simclr",
    paper="baseline of FLESD (Shi et al., 2022)",
    summary="FedAvg of SimCLR encoders that are trained without labels; a linear probe scores "
    "the encoder.",
    hparams=(simclr.ENCODER, *declare(simclr.SIMCLR, epochs=20), AGG, *simclr.PROBE),
    defaults=Defaults(rounds=10, participation=None, clients=6, scheme="flesd"),
    init=simclr.init,
    enter=simclr.enter,
    fit=simclr.fit_with(simclr.loss, send=True),
    uploads=server_tensors(simclr.names),
    predict=simclr.predict,
    embed=simclr.embed,
    deploy=simclr.probe,
    check=simclr.check,
    needs=frozenset({"views"}),
    needs_for=simclr.needs,
    received=simclr.parameters,
    trainable=simclr.trainable,
    fidelity=simclr.fidelity,
    diagnose=simclr.watch,
    paper_count=None,
    uneven_rows="a row is contrasted with the other rows of its batch",
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            \ell_i = -\log \frac{e^{z_i \cdot z_i' / \tau}}{\sum_{a \neq i} e^{z_i \cdot z_a / \tau}},
                \qquad w \leftarrow \sum_k a_k w_k
        """,
        terms=r"""
            $z_i$, $z_i'$: the embeddings of two augmentations of image $i$; $\tau$: the temperature; $w_k$, $a_k$: the
            encoder and the weight of client $k$.
        """,
        when="""
            Use it as a baseline for FLESD. It averages encoders that are trained without labels.
        """,
        cite=("shi2022flesd", "chen2020simclr"),
    ),
)
