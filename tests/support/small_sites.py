"""Sites that tests of federations share: shards of one small store, and an observer that keeps the story."""

import numpy as np
from command import data_of, ok
from heard import Heard as Heard

from fedcache import Store


def missed_by(run):
    """Sites that a federation went on without, each with its round and why."""
    return run.result["federation"]["missed"]


def left_out(run):
    """The names of those sites, once for each round."""
    return [missed["site"] for missed in missed_by(run)]


def mean_accuracy(run):
    """The accuracy of a run, its mean over clients and seeds."""
    return float(run.result["accuracy"]["mean"])


def sharded(place, clients, scheme="iid", *options, rows, classes=3, width=6):
    """Stores of so many clients, which share the rows of one store, by default evenly."""
    draw = np.random.default_rng(3)
    y = draw.integers(0, classes, rows)
    x = (
        1.1 * draw.standard_normal((classes, width))[y] + draw.standard_normal((rows, width))
    ).astype(np.float32)
    store = Store.from_arrays(
        {"mine": x}, labels=y, classes=list("abcd")[:classes], path=place / "whole.zarr"
    )
    cut(store, place, clients, scheme, *options)
    return place / "sites"


def cut(store, place, clients, scheme, *options):
    """Cut a store into shards in ``place / "sites"``; returns what the partition command answers."""
    words = f"partition --store {store.path} --scheme {scheme} --clients {clients} --name cut"
    made = data_of(words, *options)
    ok(f"shard --store {store.path} -p cut --out {place}/sites")
    return made
