"""Results as ``result.json`` holds them, with what reports read of each."""

import itertools
from pathlib import Path

import numpy as np

from fedcache.report.find_runs import StoredRun

NUMBERS = itertools.count()


def stored(*, records=(), **result):
    """A run of one seed that holds what is given."""
    made = {"method": "m", "backbones": ["b"], "hyperparameters": {}, "seeds": [0], **result}
    entry = StoredRun(Path(f"{next(NUMBERS):010}"), made, {})
    entry.__dict__["rounds"] = [
        {"seed": seed, "round": number, "accuracy": accuracy} for seed, number, accuracy in records
    ]
    return entry


def point(mean, validation=None, **hyperparameters):
    """A run of a grid with these settings and accuracies."""
    accuracy = {"mean": mean, "per_seed": [mean]}
    made = stored(accuracy=accuracy, hyperparameters=hyperparameters)
    if validation is not None:
        made.result["validation"] = {"mean": validation}
    return made


def result_of(method, per_seed, partition="p", **more):
    """The result of two clients, with these accuracies of seeds 0, 1, ..., on a partition of this name and digest."""
    mean = None if None in per_seed else float(np.mean(per_seed))
    # Results of one model have its accuracy on all test rows, and none of clients here.
    of_clients = [None] * len(per_seed)
    accuracy = {
        "mean": mean,
        "per_seed": list(per_seed),
        "per_client": [None, None],
        "client_mean": None,
        "client_mean_per_seed": of_clients,
        "pooled": mean,
        "pooled_per_seed": list(per_seed),
    }
    if more.get("protocol", "global") != "global":
        accuracy |= {
            "client_mean": mean,
            "client_mean_per_seed": list(per_seed),
            "pooled": None,
            "pooled_per_seed": of_clients,
        }
    return {
        "method": method,
        "backbones": ["b"],
        "features": ["f"],
        "hyperparameters": {},
        "dataset": {"slug": "digits", "digest": "d" * 64, "ok": 200},
        "partition": {
            "scheme": "iid",
            "name": partition,
            "args": {"clients": 3},
            "seed": 0,
            "clients": 3,
            "digests": [partition] * len(per_seed),
        },
        "seeds": list(range(len(per_seed))),
        "clients": ["north", "south"],
        "accuracy": accuracy,
        "classes": 0,
        "classes_owned": {"per_client": [None, None]},
        "macro_f1": {"mean": mean, "per_seed": list(per_seed)},
        "fairness": {"worst10": mean, "worst40": mean},
        "protocol": "global",
        "fidelity": "exact",
        **more,
    }
