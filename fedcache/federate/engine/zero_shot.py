"""The accuracy that a method which starts from class texts has without any training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcache.federate.engine.evaluate import evaluate_global
from fedcache.federate.engine.run_state import RunState


def zero_shot_accuracy(job: RunState, chosen: Sequence[int] | None = None) -> float | None:
    """Accuracy (a fraction) of the zero-shot classifier on the very rows that the method is scored on.

    Of personal models' own test rows it is the mean over clients, as theirs is; else that of all test rows.

    Args:
        job: the run; its method says what zero-shot is.
        chosen: clients whose personal models are scored; None for all.

    Returns:
        None where the method does not start from class texts, or clients differ in the features that they have.
    """
    if job.own:
        return None
    scores = job.method.zero_shot(job.server_ctx())
    if scores is None:
        return None
    found = evaluate_global(lambda rows: scores(job.data.x[rows, 0]), job.data, job.clients)
    if job.method.protocol(job.hp) != "personalised":
        return found.global_accuracy
    of_clients = (
        found.client_accuracy
        if chosen is None
        else found.client_accuracy[np.asarray(chosen, np.int64)]
    )
    known = of_clients[~np.isnan(of_clients)]
    return float(known.mean()) if len(known) else None
