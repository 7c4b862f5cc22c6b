"""FedAvg of SimCLR encoders, a baseline of FLESD (table 1): local contrast of views, then the average of the weights.

Shi et al., "Towards communication-efficient and privacy-preserving federated representation learning" (FLESD), eq 3 for
the local loss; the released code averages uniformly (D-36), contrasts in one direction (D-30) and normalises training
and inference differently (D-37; here once). Labels are read by the probe alone.
"""

from __future__ import annotations

from fedcache.federate.engine.method import Defaults, Method, server_tensors
from fedcache.federate.methods.common.simclr import (
    ENCODER,
    PROBE,
    SIMCLR,
    check,
    enter,
    fidelity,
    fit_with,
    init,
    loss,
    names,
    needs,
    parameters,
    predict,
    probe,
    trainable,
    watch,
)
from fedcache.federate.methods.common.switches import AGG, declare

METHOD = Method(
    name="fedavg-simclr",
    paper="baseline of FLESD (Shi et al., 2022)",
    summary="Average SimCLR encoders; a linear probe scores the result.",
    hparams=(ENCODER, *declare(SIMCLR, epochs=20), AGG, *PROBE),
    defaults=Defaults(rounds=10, participation=None, clients=6, scheme="flesd"),
    init=init,
    enter=enter,
    fit=fit_with(loss, send=True),
    uploads=server_tensors(names),
    predict=predict,
    deploy=probe,
    check=check,
    needs=frozenset({"views"}),
    needs_for=needs,
    received=parameters,
    trainable=trainable,
    fidelity=fidelity,
    diagnose=watch,
    paper_count=None,
)
