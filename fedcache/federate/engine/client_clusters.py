"""Clusters of clients, of which a round draws some before it draws clients: dealt by the seed, or named in a file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedcache.errors import UsageError
from fedcache.federate.engine.availability import lines_of_clients, number_in, numbers_of
from fedcache.federate.engine.context import generator
from fedcache.federate.partition.row_lists import NumberedNames, RowLists
from fedcache.store.files import file_sha256
from fedcache.visible_text import visible

COLUMNS = ("client", "cluster")


@dataclass(frozen=True, eq=False)
class ClusterRule:
    """Which clients belong together, and how many of these clusters take part in a round."""

    count: int  # clusters there are
    per_round: int = 1
    named: tuple[str, ...] = ()  # clients of the file; () where the seed of the run deals them
    given: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # the cluster of each, from 0
    digest: str = ""  # sha256 of the file; "" for none

    def words(self) -> dict[str, str | float]:
        """All of it, as a run's identity and its result hold it."""
        return {
            "client_clusters": f"sha256:{self.digest}" if self.digest else self.count,
            "clusters_per_round": self.per_round,
        }

    def places(self, names: Sequence[str], by_name: np.ndarray, seed: int) -> RowLists:
        """Each cluster's clients that can train, ascending; a cluster without one is left out.

        Clients are dealt in the order of their names, all of them, so that clusters of a partition are the same for
        every method and for every order of its clients. Their sizes differ by one at most.

        Args:
            names: of all M clients.
            by_name: int64, the clients that can train, sorted by name.
            seed: of the run.

        Returns:
            Places in ``by_name``.

        Raises UsageError for more clusters than clients, and for a file that names a client that is not there, or lacks
        one that can train.
        """
        cluster = np.full(len(names), -1, np.int64)
        if self.digest:
            cluster[numbers_of(self.named, names, "--client-clusters")] = self.given
        elif self.count > len(names):
            why = f"--client-clusters {self.count}, but there are {len(names)} clients"
            raise UsageError(f"{why}.", f"For example --client-clusters {max(1, len(names) // 10)}")
        else:
            numbered, many = isinstance(names, NumberedNames), range(len(names))
            order = (
                np.arange(len(names))
                if numbered
                else np.array(sorted(many, key=names.__getitem__), np.int64)
            )
            cluster[order] = generator(seed, "client-clusters").permutation(len(names)) % self.count
        lacking = by_name[cluster[by_name] < 0]
        if len(lacking):
            name = visible(names[int(lacking[0])])
            raise UsageError(
                f"--client-clusters has no line of client {name!r}; {len(lacking)} of {len(names)} clients have none.",
                "Every client that has training rows needs one:  client,cluster  and then  client-0,north",
            )
        _, of = np.unique(cluster[by_name], return_inverse=True)
        return RowLists.of_sizes(np.argsort(of, kind="stable"), np.bincount(of))


def parse_clusters(clusters: str | None, per_round: int) -> ClusterRule | None:
    """The rule of two options, of which ``clusters`` is a number or the path of a file; None for no clusters.

    Raises UsageError for values that cannot be, and for a file that is none.
    """
    if clusters is None:
        if per_round != 1:
            raise UsageError(
                "--clusters-per-round is of clusters of clients.",
                "Add for example --client-clusters 10",
            )
        return None
    number = number_in(clusters)
    if number is not None and not (number >= 1 and number.is_integer()):
        raise UsageError(
            f"--client-clusters {clusters}: expected a number from 1, or a file.", "For example 10"
        )
    if number is None:
        path, digest = Path(clusters), ""
        with suppress(OSError):  # the reader says what cannot be read
            digest = file_sha256(path)
        rule = replace(_read_clusters(path, digest), per_round=per_round)
    else:
        rule = ClusterRule(int(number), per_round)
    if not 1 <= per_round <= rule.count:
        why = f"--clusters-per-round {per_round}, but there are {rule.count} clusters"
        raise UsageError(f"{why}.", "For example --clusters-per-round 1")
    return rule


@lru_cache(maxsize=1)
def _read_clusters(path: Path, _digest: str) -> ClusterRule:
    """The rule of a CSV file with the columns ``client`` and ``cluster``; clusters are numbered as names sort.

    A command parses its options several times, and a file of 10^6 clients takes seconds: the last content is kept.
    """
    example = "A line for every client:  client,cluster  and then  client-0,north"
    here = f"--client-clusters {path}"
    lines, digest = lines_of_clients(path, here, COLUMNS, example)
    found: dict[str, str] = {}
    for number, line in lines:
        if len(line) != len(COLUMNS) or not line[1].strip():
            raise UsageError(f"{here}: line {number} is not a client and a cluster.", example)
        if line[0] in found:
            raise UsageError(f"{here}: line {number} names a client again.", example)
        found[line[0]] = line[1].strip()
    numbers = {name: i for i, name in enumerate(sorted(set(found.values())))}
    given = np.array([numbers[name] for name in found.values()], np.int64)
    return ClusterRule(len(numbers), 1, tuple(found), given, digest)
