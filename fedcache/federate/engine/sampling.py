"""Client sampling: draws the clients of each round among the available clients, and the clients that drop out."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from io import StringIO
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedcache.config import SAMPLING
from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.context import generator
from fedcache.federate.engine.method import clients_per_round
from fedcache.federate.partition.client_table import RowLists, sorted_by_name
from fedcache.parsing import visible
from fedcache.store.files import file_sha256, sha256_hex

T = TypeVar("T")

# Availability traces: the rounds in which each client is available.


TRACE_COLUMNS = ("client", "first", "last")


@dataclass(frozen=True, eq=False)
class AvailabilityTrace:
    """Rounds in which clients are available; a client without a line is never available."""

    clients: tuple[str, ...]  # of the lines; a client may have several
    first: np.ndarray  # int64, the first round of each line, from 1
    last: np.ndarray  # int64, its last round
    digest: str  # sha256 of the file


def numbers_of(named: Sequence[str], names: Sequence[str], option: str) -> np.ndarray:
    """int64: the numbers of the clients named in a file of ``option``. Raises UsageError for an unknown client."""
    number = {name: i for i, name in enumerate(names)}
    missing = next((name for name in named if name not in number), None)
    if missing is not None:
        raise UsageError(
            f"{option} has a line for the client {visible(missing)!r}, but the partition has no such client.",
            f"Client names of this partition look like {visible(names[0])!r}; `fedcache partition --json` lists them.",
        )
    return np.array([number[name] for name in named], np.int64)


def refuse_lacking(lacking: np.ndarray, names: Sequence[str], option: str, example: str) -> None:
    """Refuse a file of ``option`` without lines for the clients ``lacking``. Raises UsageError."""
    if len(lacking):
        name = visible(names[int(lacking[0])])
        share = f"{len(lacking)} of {len(names)}"
        raise UsageError(
            f"{option} has no line for the client {name!r}. Clients without a line: {share}.",
            f"Write a line for every client that has training rows:  {example}",
        )


def read_trace(path: Path) -> AvailabilityTrace:
    """Read a CSV file with the columns ``client``, ``first`` and ``last``: rounds counted from 1, both included.

    Raises UsageError, naming the line, for any other file.
    """
    example = (
        "Write a line for every period in which a client is available:  client,first,last  and then  "
        "client-0,1,20"
    )
    clients, periods, digest = values_of_clients(
        path, "--availability", TRACE_COLUMNS, example, _period, repeats=True
    )
    bounds = np.array(periods, np.int64)
    return AvailabilityTrace(tuple(clients), bounds[:, 0], bounds[:, 1], digest)


def _period(words: Sequence[str]) -> tuple[int, int]:
    try:
        first, last = map(int, words)
    except ValueError:
        raise ValueError("does not contain a client name and two numbers of rounds") from None
    if not 1 <= first <= last < 2**62:
        raise ValueError("needs two numbers of rounds in ascending order, counted from 1")
    return first, last


def number_in(text: str) -> float | None:
    """The value of an option as a number; None for the name of a file."""
    try:
        return float(text)
    except ValueError:
        return None


def values_of_clients(
    path: Path,
    option: str,
    columns: Sequence[str],
    example: str,
    parse: Callable[[Sequence[str]], T],
    *,
    repeats: bool = False,
) -> tuple[list[str], list[T], str]:
    """The client and the value of every line of a CSV file, and the sha256 of the file.

    Raises UsageError for a file that cannot be read, has other columns or no line, and for an invalid line.

    Args:
        path: of the file.
        option: names the file in errors.
        columns: names in the first line; the first of them is the client.
        example: hint of errors.
        parse: words of a line after the client -> value. Raises ValueError with the fault of the line in words.
        repeats: whether a client may have several lines.
    """
    here = f"{option} {path}"
    try:
        raw = path.read_bytes()
        lines = list(csv.reader(StringIO(raw.decode("utf-8-sig"), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = f"it cannot be read as CSV ({type(error).__name__})"
        if isinstance(error, FileNotFoundError):
            why = "the file does not exist"
        raise UsageError(f"{here}: {why}.", example) from error
    header = []
    if lines:
        header = [word.strip() for word in lines[0]]
    if header != list(columns):
        raise UsageError(f"{here}: the first line is not {','.join(columns)}.", example)
    clients = []
    values = []
    seen = set()
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        client = line[0].strip()
        try:
            values.append(parse(line[1:]))
        except ValueError as error:
            raise UsageError(f"{here}: line {number} {error}.", example) from error
        if client in seen and not repeats:
            raise UsageError(f"{here}: line {number} repeats a client.", example)
        seen.add(client)
        clients.append(client)
    if not clients:
        raise UsageError(f"{here}: the file has no line for any client.", example)
    return clients, values, sha256_hex(raw)


# Clusters of clients, drawn by the seed or named in a file. A round draws some clusters first, and
# then clients of these clusters.


COLUMNS = ("client", "cluster")


@dataclass(frozen=True, eq=False)
class ClusterRule:
    """Clusters of clients, and how many of them take part in a round."""

    count: int  # of clusters
    per_round: int = 1
    named: tuple[str, ...] = ()  # clients of the file; () if the seed of the run draws the clusters
    # int64: the cluster of each of the named clients, from 0.
    given: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    digest: str = ""  # sha256 of the file; "" for none

    def words(self) -> dict[str, str | float]:
        """The rule in the form of a run's identity and result."""
        clusters: str | int = self.count
        if self.digest:
            clusters = f"sha256:{self.digest}"
        return {"client_clusters": clusters, "clusters_per_round": self.per_round}

    def places(self, names: Sequence[str], by_name: np.ndarray, seed: int) -> RowLists:
        """For each cluster, its clients that can train, ascending; a cluster without such a client is left out.

        All clients are assigned in the order of their names, so that the clusters of a partition are equal for every
        method and every order of its clients. Sizes of clusters differ by one at most.

        Args:
            names: of all M clients.
            by_name: int64, the clients that can train, sorted by name.
            seed: of the run.

        Returns:
            Places in ``by_name``.

        Raises UsageError for more clusters than clients, and for a file that names an unknown client or lacks one that
        can train.
        """
        clients = len(names)
        cluster = np.full(clients, -1, np.int64)
        if self.digest:
            cluster[numbers_of(self.named, names, "--client-clusters")] = self.given
        elif self.count > clients:
            why = f"--client-clusters is {self.count}, but there are only {clients} clients"
            fewer = max(1, clients // 10)
            raise UsageError(f"{why}.", f"For example --client-clusters {fewer}")
        else:
            order = sorted_by_name(names, np.arange(clients))
            # A random permutation modulo the number of clusters: sizes differ by one at most.
            permutation = generator(seed, "client-clusters").permutation(clients)
            cluster[order] = permutation % self.count
        # A file must have a line for every client that can train.
        lacking = by_name[cluster[by_name] < 0]
        example = "client,cluster  and then  client-0,north"
        refuse_lacking(lacking, names, "--client-clusters", example)
        # Number the remaining clusters from 0; a cluster may have no client that can train.
        _, renumbered = np.unique(cluster[by_name], return_inverse=True)
        return RowLists.of_sizes(np.argsort(renumbered, kind="stable"), np.bincount(renumbered))


def parse_clusters(clusters: str | None, per_round: int) -> ClusterRule | None:
    """The rule of two options, with ``clusters`` a number or the path of a file; None for no clusters.

    Raises UsageError for illegal values and for a malformed file.
    """
    if clusters is None:
        if per_round != 1:
            raise UsageError(
                "--clusters-per-round needs --client-clusters.",
                "Add for example --client-clusters 10",
            )
        return None
    number = number_in(clusters)
    if number is None:
        path = Path(clusters)
        digest = ""
        with suppress(OSError):  # ``_read_clusters`` raises the error of an unreadable file
            digest = file_sha256(path)
        rule = replace(_read_clusters(path, digest), per_round=per_round)
    elif number >= 1 and number.is_integer():
        rule = ClusterRule(int(number), per_round)
    else:
        raise UsageError(
            f"--client-clusters {clusters}: expected a whole number of at least 1, or a file.",
            "For example 10",
        )
    if not 1 <= per_round <= rule.count:
        why = f"--clusters-per-round is {per_round}, but there are only {rule.count} clusters"
        raise UsageError(f"{why}.", "For example --clusters-per-round 1")
    return rule


@lru_cache(maxsize=1)
def _read_clusters(path: Path, _digest: str) -> ClusterRule:
    """The rule of a CSV file with the columns ``client`` and ``cluster``; clusters are numbered by sorted names.

    The last file is cached by its digest, because a command parses its options several times, and a file of 10^6
    clients takes seconds.
    """
    example = "Write a line for every client:  client,cluster  and then  client-0,north"
    clients, clusters, digest = values_of_clients(
        path, "--client-clusters", COLUMNS, example, _cluster
    )
    numbers = {name: i for i, name in enumerate(sorted(set(clusters)))}
    given = np.array([numbers[name] for name in clusters], np.int64)
    return ClusterRule(len(numbers), 1, tuple(clients), given, digest)


def _cluster(words: Sequence[str]) -> str:
    if len(words) != 1 or not words[0].strip():
        raise ValueError("does not contain a client name and a cluster")
    return words[0].strip()


MANY = 1 << 16
"""Minimum number of clients for which a round's clients are drawn one by one, without a permutation of all clients."""

Participation = int | float | None
"""Clients per round: None for all, an int for a number, a float for a share."""


@dataclass(frozen=True)
class SamplingRule:
    """How the clients of a round are drawn; by default a fixed number, uniformly."""

    # uniform: a fixed number, all sets equally likely. weighted: a fixed number, one after another, each time with
    # probabilities proportional to the rows of the remaining clients. poisson: each client independently, with the
    # share as probability.
    how: str = "uniform"
    available: float = 1.0  # probability that a client is available in a round, independently
    trace: AvailabilityTrace | None = None  # rounds in which each client is available
    dropout: float = 0.0  # probability that a drawn client receives the broadcast and sends nothing
    # A round first draws some of these clusters, and then clients of the drawn clusters.
    clusters: ClusterRule | None = None

    def words(self) -> dict[str, str | float]:
        """Settings that differ from the default, in the form of a run's identity and result."""
        words: dict[str, str | float] = {}
        if self.how != "uniform":
            words["client_sampling"] = self.how
        if self.trace is not None:
            words["availability"] = f"sha256:{self.trace.digest}"
        elif self.available != 1.0:
            words["availability"] = self.available
        if self.dropout:
            words["client_dropout"] = self.dropout
        if self.clusters is not None:
            words |= self.clusters.words()
        return words


UNIFORM = SamplingRule()


def parse_sampling(
    how: str,
    availability: str | None,
    dropout: float,
    clusters: str | None = None,
    clusters_per_round: int = 1,
) -> SamplingRule:
    """The rule of five options: ``availability`` is a share or the path of a trace, ``clusters`` a number or a path.

    Raises UsageError for illegal values and for a malformed file.
    """
    if how not in SAMPLING:
        raise unknown("--client-sampling", how, SAMPLING)
    if not 0.0 <= dropout < 1.0:
        raise UsageError(
            f"--client-dropout {dropout:g}: expected a share from 0 to below 1.", "For example 0.1"
        )
    available = 1.0
    trace = None
    if availability is not None:
        share = number_in(availability)
        if share is None:
            trace = read_trace(Path(availability))
        else:
            available = share
        if not 0.0 < available <= 1.0:
            why = f"--availability {availability}: expected a share above 0, at most 1, or a file"
            raise UsageError(f"{why}.", "For example 0.8")
    rule = parse_clusters(clusters, clusters_per_round)
    return SamplingRule(how, available, trace, dropout, rule)


def from_everywhere(value: str | None) -> str | None:
    """The value of an option that takes a number or a file: the number as it is, or the absolute path of the file."""
    if value is None or number_in(value) is not None:
        return value
    return str(Path(value).resolve())


class ClientSampler:
    """Draws the clients of every round, in client order; repeated calls give the same clients.

    It draws over sorted names, so the order of clients in a partition does not matter.

    Args:
        names: of all M clients.
        eligible: int64, ascending: numbers of the clients that can train.
        seed: of the run.
        rows: float64 [M], training rows.
        rule: how they are drawn.
        uniforms: for a private run, (round, n) -> [n] numbers in [0, 1). Each client is then drawn independently, as
            the privacy accounting assumes. None for a run that follows the rule.

    Raises UsageError for a trace or clusters that the clients do not fit.
    """

    def __init__(
        self,
        names: Sequence[str],
        eligible: np.ndarray,
        seed: int,
        rows: np.ndarray,
        rule: SamplingRule = UNIFORM,
        uniforms: Callable[[int, int], np.ndarray] | None = None,
    ) -> None:
        self.names = names
        self.eligible = eligible
        self.seed = seed
        self.rule = rule
        self._rows = rows
        self._uniforms = uniforms
        # int64: the client of each line of the trace.
        self._lines: np.ndarray | None = None
        if rule.trace is not None:
            self._lines = numbers_of(rule.trace.clients, names, "--availability")
        # None if a round draws all clusters.
        self._clusters: RowLists | None = None
        if rule.clusters is not None:
            clusters = rule.clusters.places(names, self.by_name, seed)
            self._per_round = rule.clusters.per_round
            if self._per_round < len(clusters):
                self._clusters = clusters
        # (round, participation) of the last draw, and the drawn clients.
        self._last: tuple[tuple[int, Participation], list[int]] | None = None

    @cached_property
    def by_name(self) -> np.ndarray:
        """int64: the clients that can train, sorted by name."""
        return sorted_by_name(self.names, self.eligible)

    def sample(self, round_: int, participation: Participation) -> list[int]:
        """The clients of a round (from 0), ascending; without those that drop out."""
        lost = set(self.lost(round_, participation))
        return [c for c in self.drawn(round_, participation) if c not in lost]

    def drawn(self, round_: int, participation: Participation) -> list[int]:
        """The clients that receive the broadcast of a round, ascending."""
        key = (round_, participation)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._draw(round_, participation))
        return self._last[1]

    def lost(self, round_: int, participation: Participation) -> list[int]:
        """The drawn clients that drop out: they send nothing and keep their state."""
        if not self.rule.dropout:
            return []
        drawn = self.drawn(round_, participation)
        # One uniform number for each drawn client, in client order.
        is_lost = generator(self.seed, "dropout", round_).random(len(drawn)) < self.rule.dropout
        return [c for c, drops in zip(drawn, is_lost, strict=True) if drops]

    def _draw(self, round_: int, participation: Participation) -> list[int]:
        # Private runs draw each client independently, and ignore the rule.
        if self._uniforms is not None:
            uniforms = self._uniforms(round_, len(self.by_name))
            return _ascending(self.by_name[uniforms < self.share(participation)])
        available = self._available(round_)
        if self.rule.how == "poisson":
            uniforms = generator(self.seed, "poisson", round_).random(len(available))
            return _ascending(available[uniforms < self.share(participation)])
        count = clients_per_round(participation, len(self.names))
        return _ascending(available[self._places(available, count, round_)])

    def _places(self, available: np.ndarray, count: int, *key: int) -> np.ndarray:
        """int64: places of at most ``count`` drawn clients in ``available``; ``key`` names the stream of draws."""
        count = min(count, len(available))
        rng = generator(self.seed, "sampling", *key)
        if self.rule.how == "weighted":
            return weighted_without_replacement(rng, self._rows[available], count)
        return without_replacement(rng, len(available), count)

    def begin(
        self, round_: int, draw: int, count: int, busy: Sequence[int]
    ) -> list[tuple[int, bool]]:
        """At most ``count`` clients, by name, that begin to train while others are busy; and whether each drops out.

        ``draw`` numbers the draws of one round. Draw 0 without busy clients is the draw of ``sample``.
        """
        key: tuple[int, ...] = (round_,)
        if draw:
            key = (round_, draw)
        available = self._available(round_)
        if busy and self._most_are_free(busy, count):
            # Most clients are free, so busy ones are drawn rarely and rejected. This needs no array of all clients. In
            # this case all clients are available, so places in ``by_name`` are places in ``available``.
            places = self._one_by_one(busy, count, *key)
        else:
            if busy:
                free = np.ones(len(self.names), bool)
                free[list(busy)] = False
                available = available[free[available]]
            places = self._places(available, count, *key)
        drawn = available[np.sort(places)].tolist()
        is_lost = generator(self.seed, "dropout", *key).random(len(drawn)) < self.rule.dropout
        return list(zip(drawn, is_lost.tolist(), strict=True))

    def _most_are_free(self, busy: Sequence[int], count: int) -> bool:
        """Whether most clients are free, so that a client drawn among all of them is usually free."""
        limited = self.rule.available < 1.0 or self.rule.trace is not None
        if limited or self._clusters is not None:
            return False
        if 2 * (len(busy) + count) > len(self.eligible):
            return False
        if self.rule.how != "weighted":
            return True
        busy_rows = self._rows[list(busy)].sum()
        return bool(2 * busy_rows <= self._cumulative_rows[-1])

    def _one_by_one(self, busy: Sequence[int], count: int, *key: int) -> np.ndarray:
        """The places of ``count`` free clients, with a new draw for each busy one; the time does not grow with M."""
        rng = generator(self.seed, "sampling", *key)
        taken = set(busy)
        places = list[int]()
        while len(places) < count:
            # Weighted: the client of a uniformly drawn row, so the probability is proportional to its rows.
            if self.rule.how == "weighted":
                row = rng.random() * self._cumulative_rows[-1]
                place = int(np.searchsorted(self._cumulative_rows, row, "right"))
            else:
                place = int(rng.integers(len(self.by_name)))
            client = int(self.by_name[place])
            if client not in taken:
                taken.add(client)
                places.append(place)
        return np.array(places, np.int64)

    @cached_property
    def _cumulative_rows(self) -> np.ndarray:
        """float64: cumulative sum of the rows of the clients that can train, by name."""
        return np.cumsum(self._rows[self.by_name])

    def _available(self, round_: int) -> np.ndarray:
        """int64, by name: the clients that can train and are available in a round."""
        clients = self.by_name
        if self._clusters is not None:
            clients = self._of_clusters(self._clusters, round_)
        if self.rule.available < 1.0:
            uniforms = generator(self.seed, "availability", round_).random(len(clients))
            clients = clients[uniforms < self.rule.available]
        trace = self.rule.trace
        if trace is not None and self._lines is not None:
            # Clients with a line that includes this round; rounds of a trace count from 1.
            number = round_ + 1
            current = (trace.first <= number) & (number <= trace.last)
            in_trace = np.zeros(len(self.names), bool)
            in_trace[self._lines[current]] = True
            clients = clients[in_trace[clients]]
        return clients

    def _of_clusters(self, clusters: RowLists, round_: int) -> np.ndarray:
        """int64, by name: the clients that can train in the clusters of a round; these clusters are drawn uniformly."""
        rng = generator(self.seed, "clusters", round_)
        drawn = without_replacement(rng, len(clusters), self._per_round)
        places = np.sort(clusters.take(drawn).rows)
        clients_of_round: np.ndarray = self.by_name[places]
        return clients_of_round

    def planned(self, round_: int, participation: Participation) -> int:
        """The planned number of clients in a round; with drawn clusters the largest possible number of any round.

        The number does not depend on the drawn clusters, so a resumed run plans the same number and chooses the same
        execution.
        """
        if self._clusters is None:
            return max(1, len(self.sample(round_, participation)))
        largest = np.sort(self._clusters.sizes)[-self._per_round :]
        most = int(largest.sum())
        return min(most, clients_per_round(participation, len(self.names)))

    def warnings(self, participation: Participation) -> list[str]:
        """Warnings before the first round, about a too small share, too few clients in a trace, and small clusters."""
        warnings = [*self._few_in_trace(), *self._small_clusters(participation)]
        if isinstance(participation, float):
            clients = len(self.names)
            share = participation * clients
            if share < 0.5:
                warnings.append(
                    f"each round has one client, because the share {participation:g} of {clients:,} clients is only "
                    f"{share:.2g} clients"
                )
        return warnings

    def _few_in_trace(self) -> list[str]:
        if self._lines is None:
            return []
        in_trace = len(np.intersect1d(self._lines, self.eligible))
        clients = len(self.eligible)
        if in_trace == clients:
            return []
        return [
            f"the trace has lines for only {in_trace:,} of the {clients:,} clients; all others are never available"
        ]

    def _small_clusters(self, participation: Participation) -> list[str]:
        all_clients = participation is None or self.rule.how == "poisson"
        if self._clusters is None or all_clients:
            return []
        count = clients_per_round(participation, len(self.names))
        sizes = np.sort(self._clusters.sizes)
        least = int(sizes[: self._per_round].sum())
        if least >= count:
            return []
        smallest = f"{self._per_round} smallest of {len(sizes)} clusters have"
        if self._per_round == 1:
            smallest = f"smallest of {len(sizes)} clusters has"
        return [
            f"{count} clients per round were requested, but the {smallest} only {least} clients that can train. "
            "Rounds that draw these clusters have fewer clients"
        ]

    def share(self, participation: Participation) -> float:
        """The expected share of clients in a round."""
        return clients_per_round(participation, len(self.names)) / len(self.names)

    def scored(self, share: Participation) -> list[int] | None:
        """The clients whose personal models ``--eval-clients`` scores, equal in every round; None for all."""
        if share is None:
            return None
        clients = len(self.by_name)
        count = clients_per_round(share, clients)
        drawn = without_replacement(generator(self.seed, "eval-clients"), clients, count)
        return _ascending(self.by_name[drawn])


def without_replacement(rng: np.random.Generator, population: int, count: int) -> np.ndarray:
    """``count`` different numbers below ``population``, all sets equally likely.

    They are the first of a permutation. For ``MANY`` clients or more the numbers are drawn one by one, because a
    permutation would take longer than the round.
    """
    if population < MANY:
        return rng.permutation(population)[:count]
    drawn: np.ndarray = rng.choice(population, count, replace=False, shuffle=False)
    return drawn


def weighted_without_replacement(
    rng: np.random.Generator, weights: np.ndarray, count: int
) -> np.ndarray:
    """``count`` different indices into ``weights``, drawn one after another in proportion to the remaining weights.

    The ``count`` smallest of exponential times with these rates have this distribution (Efraimidis and Spirakis, 2006).
    """
    # Client i has the smallest of the Exponential(w_i) times with probability w_i / sum w. The next smallest time is a
    # draw among the remaining clients in the same way.
    times = rng.standard_exponential(len(weights)) / weights
    if count >= len(weights):  # ``argpartition`` needs a place below the length
        return np.arange(len(weights))
    return np.argpartition(times, count)[:count]


def _ascending(clients: np.ndarray) -> list[int]:
    found: list[int] = np.sort(clients).tolist()
    return found
