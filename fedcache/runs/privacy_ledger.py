"""Privacy ledger: one sealed line in ``privacy.jsonl`` of the home for every seed whose noise was drawn.

Epsilon composes: two releases about the same clients reveal more than one, whether they are seeds, points of a grid,
repeats with ``--fresh`` or other methods. A line is written when the first round of a seed has ended, before the round
is stored or reported. No line is written if training resumes from the last checkpoint, or if a stored result is
returned. Simulations release nothing and are not in the ledger. Each line has its number and the digest of the line
before, so a line that is lost from the middle is noticed. ``privacy-count.json`` has the number of lines, so a line
that is lost from the end is noticed.

``privacy-rounds/`` has the number of reported rounds of every seed in training. A run that resumes from an older
checkpoint draws noise for reported rounds again, and that is another release. If somebody restores an older copy of the
whole home, the later releases are missing in it, and this cannot be noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fedcache.errors import CorruptionError, FedcacheError
from fedcache.federate.trust.accounting import Spent, epsilons
from fedcache.parsing import Facts, Record
from fedcache.store.files import (
    SealedLines,
    explain_disk_errors,
    make_private,
    read_sealed,
    read_sealed_lines,
    write_sealed,
)
from fedcache.store.lock import hold_lock

LEDGER = "privacy.jsonl"
"""File of the ledger in a fedcache home."""

COUNT = "privacy-count.json"
"""File with the ledger's number of lines. It is written after each line, so a kill can leave it one too low."""

COUNT_HEADER = {"kind": "number of lines of the ledger of privacy"}
"""Header of ``COUNT``, for its seal."""

ROUNDS = "privacy-rounds"
"""Folder of files with the number of published rounds, one for each seed in training."""


@dataclass(frozen=True)
class Release:
    """One seed of a run with noise from the operating system."""

    run: str  # first 16 characters of the run's digest
    method: str
    seed: int
    dataset: str  # slug
    dataset_digest: str
    partition: str  # digest
    clients: int
    clip: float
    noise: float
    share: float  # of the clients in a round; 1.0 if the participants are published
    rounds: int
    delta: float  # of the epsilon that the run reported
    time: float  # seconds since 1970


@dataclass(frozen=True)
class Total:
    """All releases about the clients of one partition."""

    dataset: str  # slug
    dataset_digest: str
    partition: str  # digest
    clients: int
    releases: int
    runs: int  # of the releases
    rounds: int  # of all releases
    delta: float  # smallest delta of the releases
    epsilon_pld: float | None  # of all releases together; None if there is no bound
    epsilon_rdp: float | None


@dataclass(frozen=True)
class DatasetTotal:
    """Total of all releases about the rows of one dataset, over all partitions."""

    dataset: str  # slug
    partitions: int
    releases: int
    runs: int  # of the releases
    rounds: int  # of all releases
    delta: float  # smallest delta of the releases
    epsilon_pld: float | None  # of all releases together; None if there is no bound
    epsilon_rdp: float | None


def epsilon_words(total: Total | DatasetTotal) -> str:
    """The tighter epsilon of a total as text."""
    for epsilon in (total.epsilon_pld, total.epsilon_rdp):
        if epsilon is not None:
            return f"{epsilon:.3g}"
    return "no bound"


def record_release(ledger: Path, release: Release) -> None:
    """Append one line.

    Raises CorruptionError if the last line is damaged or lines are missing, MachineError if it cannot be written.
    """
    make_private(ledger.parent)
    with hold_lock(ledger.parent / "locks" / "privacy.lock", "the ledger of privacy", wait=True):
        try:
            lines = SealedLines(ledger)
        except (OSError, ValueError) as error:
            raise _damaged(ledger, error) from error
        _check_count(ledger, lines.count, _read_count(ledger))
        with explain_disk_errors(ledger, 0):
            lines.append(asdict(release))
            write_sealed(ledger.with_name(COUNT), COUNT_HEADER, lines.count)


def reported_rounds(ledger: Path, run: str, seed: int) -> int | None:
    """Number of reported rounds of a seed in training; None if it is not known."""
    try:
        found = read_sealed(_rounds_file(ledger, run, seed), _rounds_header(run, seed))
    except CorruptionError:
        return None
    if found is None:
        return None
    return int(found.content)


def keep_reported_rounds(ledger: Path, run: str, seed: int, rounds: int) -> None:
    """Record the number of reported rounds of a seed; ``record_release`` must be called before the first round.

    Raises MachineError if the number cannot be written.
    """
    path = _rounds_file(ledger, run, seed)
    with explain_disk_errors(path, 0):
        make_private(path.parent)
        write_sealed(path, _rounds_header(run, seed), rounds)


def forget_reported_rounds(ledger: Path, run: str, seed: int) -> None:
    """Remove the number of reported rounds of a seed that has ended."""
    _rounds_file(ledger, run, seed).unlink(missing_ok=True)


def _rounds_file(ledger: Path, run: str, seed: int) -> Path:
    return ledger.parent / ROUNDS / f"{run}-{seed}.json"


def _rounds_header(run: str, seed: int) -> Facts:
    return {"kind": "number of published rounds", "run": run, "seed": seed}


def read_releases(ledger: Path) -> list[Release]:
    """Every release, in the order in which they were made; [] without a ledger. Raises CorruptionError."""
    names = {field.name for field in fields(Release)}
    while True:  # until no other process writes a line while the ledger is read
        count = _read_count(ledger)
        try:
            lines = read_sealed_lines(ledger)
        except (OSError, ValueError) as error:
            raise _damaged(ledger, error) from error
        if _read_count(ledger) == count:
            break
    for number, line in enumerate(lines, 1):
        if set(line) != names:
            why = f"is damaged: line {number} was written by another release of fedcache"
            raise _damaged(ledger, ValueError(why))
    _check_count(ledger, len(lines), count)
    return [Release(**line) for line in lines]


def totals(releases: Iterable[Release]) -> list[Total]:
    """Totals for each partition of each dataset, in the order of their first releases.

    Raises MachineError if dp-accounting is not installed.
    """
    groups: dict[tuple[str, str], list[Release]] = {}
    for release in releases:
        key = (release.dataset_digest, release.partition)
        groups.setdefault(key, []).append(release)
    return [
        Total(
            dataset=group[0].dataset,
            dataset_digest=digest,
            partition=partition,
            clients=group[0].clients,
            **_together(group),
        )
        for (digest, partition), group in groups.items()
    ]


def totals_of_datasets(releases: Iterable[Release]) -> list[DatasetTotal]:
    """Totals for the rows of each dataset over all partitions, in the order of first releases.

    Releases are about the same rows if the dataset has the same name (it may have grown in between) or the same content
    (it may have been stored under two names). Raises MachineError if dp-accounting is not installed.
    """
    # A release joins every group with common rows, so that several groups may become one.
    groups: list[list[Release]] = []
    for release in releases:
        joined = [release]
        separate = []
        for group in groups:
            same_name = any(other.dataset == release.dataset for other in group)
            same_content = any(other.dataset_digest == release.dataset_digest for other in group)
            if same_name or same_content:
                joined = [*group, *joined]
            else:
                separate.append(group)
        groups = [*separate, joined]
    of_datasets = []
    for group in sorted(groups, key=lambda group: min(release.time for release in group)):
        names = dict.fromkeys(release.dataset for release in group)
        partitions = {(release.dataset_digest, release.partition) for release in group}
        total = DatasetTotal(
            dataset=", ".join(names), partitions=len(partitions), **_together(group)
        )
        of_datasets.append(total)
    return of_datasets


def _together(group: Sequence[Release]) -> Facts:
    """Fields that ``Total`` and ``DatasetTotal`` share, for a group of releases."""
    delta = min(release.delta for release in group)
    spent = (Spent(release.noise, release.share, release.rounds) for release in group)
    return {
        "releases": len(group),
        "runs": len({release.run for release in group}),
        "rounds": sum(release.rounds for release in group),
        "delta": delta,
        **epsilons(spent, delta),
    }


def _read_count(ledger: Path) -> int:
    """Number of lines that the ledger should have; 0 before the first line."""
    try:
        count = read_sealed(ledger.with_name(COUNT), COUNT_HEADER)
    except CorruptionError as error:
        why = f"is damaged: {COUNT}, which records its number of lines, was changed"
        raise _damaged(ledger, ValueError(why)) from error
    if count is None:
        return 0
    return int(count.content)


def _check_count(ledger: Path, lines: int, count: int) -> None:
    """Refuse a ledger that has lost lines at its end, or the file with their number."""
    # A kill after a line was written, and before its count was, leaves the count one too low.
    if lines not in (count, count + 1):
        why = f"is damaged: it has {lines} complete lines, but {COUNT} records {count}"
        raise _damaged(ledger, ValueError(why))


def _damaged(ledger: Path, error: OSError | ValueError) -> FedcacheError:
    """The error of a damaged ledger. The text of a ValueError continues the sentence that begins with the path."""
    why = str(error)
    if isinstance(error, OSError):
        why = f"cannot be read ({error.strerror})"
    aside = ledger.parent / "privacy.damaged"
    return CorruptionError(
        f"{ledger} {why}. It is therefore unknown how much privacy has been spent.",
        f"Restore the ledger and {COUNT} from a copy. Or start a new ledger, and write down yourself how much "
        f"privacy was spent before: mkdir {aside} && mv {ledger.parent}/privacy*.json* {aside}",
    )


# The privacy of a run as text.


def describe_privacy(cost: Record) -> str:
    """The privacy guarantee of a run and its limits as text; ``cost`` is that of ``ResolvedRun.privacy_cost``."""
    if not cost["noise"]:
        return "Privacy: none, because updates are clipped but no noise is added."
    together = cost["composed"]
    known = cost.get("participants_known")  # the cost if the participants of rounds are known
    figures = f"epsilon {_tight(cost)}"
    renyi = _number(cost["epsilon_rdp"])
    # Seeds train on the same rows, so they cost more together than each alone.
    seeds = cost["seeds"]
    if seeds > 1:
        figures += f" for each of {seeds} seeds and {_tight(together)} for all seeds together"
        renyi += f" and {_number(together['epsilon_rdp'])}"
    delta = cost["delta"]
    figures += f" (by Renyi divergence {renyi}), delta {delta:g}; {cost['rounds']} rounds, "
    figures += f"each client takes part in a round with probability {cost['share']:g}."
    # Noise that can be reproduced gives no protection. The cost is that of the same noise from the operating system.
    if cost["simulation"]:
        secret = ""
        if known:
            secret = f" This assumes that the participants of each round stay secret (otherwise {_tight(known)})."
        return (
            f"Simulation of privacy: anyone can reproduce the noise of {cost['noise_from']}, so it gives no "
            f"protection. With noise from the operating system, the result would be {figures}{secret}"
        )
    # Sampling amplifies privacy only while the participants are secret.
    secret = ""
    if known:
        secret = f" Participation is kept secret (otherwise {_tight(known)})."
    if cost["participants"] == "known":
        secret = " Participation is published, so client sampling gives no extra privacy."
    allowed = ", ".join(cost["allowed"])
    return (
        f"Privacy: {figures}{secret} The noise comes from the operating system, so the run cannot be repeated bit "
        f"for bit. Published although epsilon does not cover it (--dp-allow): {allowed}."
    )


def _tight(figures: Record) -> str:
    """Epsilon by privacy loss distributions, as text."""
    if figures["epsilon_pld"] is None:
        return "too large to be worth computing"
    return _number(figures["epsilon_pld"])


def _number(epsilon: float | None) -> str:
    if epsilon is None:
        return "without bound"
    return f"{epsilon:.3g}"
