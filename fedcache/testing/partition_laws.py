"""The laws that every partition scheme must keep, on a small dataset that also has unusable rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from fedcache.errors import FedcacheError
from fedcache.federate.partition.partition import SCHEMES, Partition, make
from fedcache.federate.partition.scheme import VALIDATION, Columns, Scheme
from fedcache.parsing import Record
from fedcache.plugins import forget, register
from fedcache.tables.groups import Group
from fedcache.testing.law import LawBroken, by_name, require

CLASSES = 4
DOMAINS = 2
ROWS = 480


def small_columns() -> Columns:
    """480 rows of 4 classes, 2 domains and 6 sites: a quarter are test rows, some for validation, some unreadable."""
    g = np.random.default_rng(0)
    # The uid of a row is a digest of 16 bytes, as in a store.
    digests = b"".join(hashlib.sha256(b"%d" % i).digest()[:16] for i in range(ROWS))
    uid = np.frombuffer(digests, np.uint8).reshape(ROWS, 16)
    site = Group(g.integers(0, 6, ROWS).astype(np.int32), tuple(f"site {i}" for i in range(6)))
    label = np.tile(np.arange(CLASSES), ROWS // CLASSES).astype(np.int32)
    domain = np.repeat(np.arange(DOMAINS), ROWS // DOMAINS).astype(np.int16)
    split = g.choice(3, ROWS, p=(0.7, 0.25, 0.05)).astype(np.uint8)
    ok = (g.random(ROWS) > 0.02).astype(np.uint8)
    return Columns(
        label,
        domain,
        split,
        ok,
        uid,
        tuple(f"class {i}" for i in range(CLASSES)),
        tuple(f"domain {i}" for i in range(DOMAINS)),
        digest="0" * 64,
        groups=lambda name: {"site": site}[name],
    )


@dataclass(frozen=True)
class SchemeTrial:
    """A scheme with arguments, and the dataset whose rows it assigns."""

    scheme: Scheme
    args: Record
    columns: Columns

    def make(self, seed: int = 0) -> Partition:
        """The partition of a seed. The scheme may be one of fedcache or of a plug-in, or not registered yet."""
        name = self.scheme.name
        if name in SCHEMES and SCHEMES[name] is self.scheme:
            return make(name, self.columns, seed=seed, **self.args)
        # ``make`` finds schemes by name, so an unregistered scheme is registered for this call.
        register("partition", self.scheme)
        try:
            return make(name, self.columns, seed=seed, **self.args)
        finally:
            forget("partitions", name)


def no_row_is_trained_on_twice(trial: SchemeTrial) -> None:
    """Every row is a training row of at most one client."""
    rows = _trained(trial.make())
    repeated = len(rows) - len(np.unique(rows))
    require(repeated == 0, f"{repeated} training rows occur again, in one client or in two")


def every_client_trains(trial: SchemeTrial) -> None:
    """Every client has a unique name, training rows and test rows."""
    partition = trial.make()
    names = [client.name for client in partition.clients]
    require(len(set(names)) == len(names), "two clients have the same name")
    for client in partition.clients:
        require(len(client.train) > 0, f"{client.name} has no training row")
        require(len(client.test) > 0, f"{client.name} has no test row")


def unreadable_and_validation_rows_are_left_out(trial: SchemeTrial) -> None:
    """No row without features and no row of the dataset's validation split is assigned."""
    partition = trial.make()
    columns = trial.columns
    for used in (_trained(partition), _tested(partition)):
        readable = columns.ok[used] == 1
        require(bool(readable.all()), "rows without features are assigned")
        usable = columns.split[used] != VALIDATION
        require(bool(usable.all()), "rows of the validation split are assigned")


def no_test_row_is_trained_on(trial: SchemeTrial) -> None:
    """No training row of a client is a test row of the same or another client."""
    partition = trial.make()
    both = np.intersect1d(_trained(partition), _tested(partition))
    require(not len(both), f"{len(both)} rows are trained on and tested with")


def equal_arguments_give_equal_partitions(trial: SchemeTrial) -> None:
    """The same rows, arguments and seed give the same partition: all draws come from ``streams``."""
    a = trial.make(seed=3)
    b = trial.make(seed=3)
    require(a.digest == b.digest, "two partitions of one seed differ")


def other_seeds_deal_other_rows(trial: SchemeTrial) -> None:
    """Three seeds give three partitions. Declare this law as an exception for a scheme that draws nothing."""
    partitions = set()
    for seed in range(3):
        clients = trial.make(seed).clients
        partitions.add(tuple(client.train.tobytes() for client in clients))
    count = len(partitions)
    require(count == 3, f"three seeds give {count} partitions")


def illegal_values_are_refused(trial: SchemeTrial) -> None:
    """A number below the least value of its argument is refused with a message and a hint."""
    for argument in trial.scheme.arguments:
        if argument.kind not in ("int", "float") or not np.isfinite(argument.low):
            continue
        wrong = argument.low - 1
        setting = f"{argument.name}={wrong}"
        try:
            replace(trial, args={**trial.args, argument.name: wrong}).make()
        except FedcacheError as error:
            require(bool(error.hint), f"the error for {setting} has no hint")
        else:
            raise LawBroken(f"{setting} is accepted, although {argument.low} is the least value")


PARTITION_LAWS = by_name(
    no_row_is_trained_on_twice,
    every_client_trains,
    unreadable_and_validation_rows_are_left_out,
    no_test_row_is_trained_on,
    equal_arguments_give_equal_partitions,
    other_seeds_deal_other_rows,
    illegal_values_are_refused,
)
"""All laws of partition schemes by name."""


def _trained(partition: Partition) -> np.ndarray:
    return np.concatenate([client.train for client in partition.clients])


def _tested(partition: Partition) -> np.ndarray:
    return np.concatenate([partition.test, *(client.test for client in partition.clients)])
