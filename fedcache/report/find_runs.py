"""Stored runs for reports and comparisons: how they are found, checked, and labelled by their differences."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from fedcache.config import TrainConfig
from fedcache.errors import CorruptionError, Exit, FedcacheError, StoreError, UsageError, shell_word
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES
from fedcache.parsing import Facts, Record
from fedcache.progress import Observer
from fedcache.runs.directory import (
    OF_TAG,
    PLACES,
    PRUNED,
    WRITTEN,
    ClientColumns,
    DamagedRunError,
    TestRows,
    check_files,
    check_tag,
    client_columns,
    command_again,
    config_changed,
    is_private,
    measured_of,
    read_pruned,
    read_result,
    rounds_of,
    tags_of,
    test_rows,
    train_table,
)
from fedcache.runs.run import is_claimed
from fedcache.runs.score import mean_std, score_for, score_of, values_held_out
from fedcache.store.files import digest_of
from fedcache.tables.table_files import is_number

if TYPE_CHECKING:
    from fedcache.grids.result import Grid, Point
    from fedcache.runs.run import Run

Key = TypeVar("Key")
RunQuery: TypeAlias = "str | Path | Run | Grid | Point"
Result = Record
"""Content of a ``result.json`` file."""

LISTED = "`fedcache runs list` lists the finished runs."
"""Hint for a name that does not belong to a run."""

AS_CLAIMED = ", as reported by the sites"
"""End of a setting's name if its sites scored themselves."""

CLAIMED = (
    "Accuracy, F1 and fairness are claims of the sites: each site scored itself on its own test rows. The server can "
    "limit these values, but cannot check them. They are shown separately from results that were measured here."
)
"""Note on values that sites report about themselves."""

MOST_LISTED = 8
"""Maximum number of runs that an error lists."""

_FACT_FIELDS = ("preset", "rounds", "participation", "dtype", "execution")
"""Fields of a result that are facts of a run (``StoredRun.facts``)."""

_CLIENT_OPTIONS = (
    "client_sampling",
    "availability",
    "client_dropout",
    "client_clusters",
    "clusters_per_round",
    "asynchronous",
    "staleness_power",
    "client_durations",
    "eval_clients",
    "client_prior",
    "stages",
    "base_classes",
    "transfer",
)
USUAL = {f.name: f.default for f in fields(TrainConfig) if f.name in _CLIENT_OPTIONS}
"""Option of participating and scored clients -> its default. A run shows only values that differ from the default."""


@dataclass(frozen=True)
class StoredRun:
    """A finished run.

    Attributes:
        path: its directory.
        result: content of ``result.json``.
        measured: content of ``measured.json``; {} when it is missing.
    """

    path: Path
    result: Result
    measured: Record

    @property
    def method(self) -> str:
        """Its method's name."""
        return str(self.result["method"])

    @cached_property
    def facts(self) -> dict[str, str]:
        """Its settings in words: method, backbones, every hyperparameter. Callers must not change the dictionary."""
        r = self.result
        made = {"method": self.method, "backbones": " + ".join(r["backbones"])}
        config = train_table(self.path)
        for name, usual in USUAL.items():
            if config.get(name) not in (None, usual):
                made[name] = value_words(config[name])
        for name in _FACT_FIELDS:
            if name in r:
                made[name] = str(r[name])
        # The first scored round is the interval between scores. A run with one scored round was scored only at its end.
        scored = [one["round"] for one in r["accuracy"].get("per_round", ())]
        made["eval_every"] = "0"
        if len(scored) > 1:
            made["eval_every"] = str(scored[0])
        for name, value in r["hyperparameters"].items():
            made[f"set.{name}"] = value_words(value)
        for name, value in r.get("trust", {}).items():
            if not isinstance(value, dict | list):
                made[f"trust.{name}"] = value_words(value)
        return made

    @property
    def seeds(self) -> list[int]:
        """Its seeds, in the order in which the result lists their values."""
        return list(map(int, self.result["seeds"]))

    @property
    def redrawn(self) -> bool:
        """Whether seeds have different partitions."""
        return len(set(self.result["partition"]["digests"])) > 1

    def accuracy(self, score: str) -> float | None:
        """Its test accuracy, mean over seeds; ``score`` is client-mean, pooled or own."""
        return score_of(self.result, score).mean

    @property
    def digest(self) -> str:
        """The name of its directory."""
        return self.path.name

    @property
    def key(self) -> str:
        """The key of the run's marks in a page."""
        return self.digest[:10]

    @property
    def pooled_rows(self) -> bool:
        """Whether it is not a federation: one model for all clients, and nothing was sent."""
        if self.result.get("protocol") != "global":
            return False
        # A result without traffic counts as a federation.
        exact = self.result.get("traffic", {}).get("exact", {"up_bytes": 1, "down_bytes": 0})
        return not exact["up_bytes"] + exact["down_bytes"]

    @property
    def seconds(self) -> float | None:
        """Seconds of training over all seeds; None when the measurements are lost."""
        # The file of measurements has no digest, so the value may be anything.
        value = self.measured.get("seconds", {}).get("train")
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        return None

    @property
    def private(self) -> bool:
        """Whether it promises differential privacy: with noise, and not as a simulation."""
        return is_private(self.result)

    @property
    def claimed(self) -> bool:
        """Whether its accuracy was reported by sites that scored themselves, which the server cannot check."""
        return is_claimed(self.result)

    @property
    def setting(self) -> tuple[str, str, bool]:
        """The setting, equal for runs that can be compared: digests of dataset and partition, and ``claimed``.

        If every seed draws its own partition, the digest is that of the scheme and its arguments, so runs with
        different seeds belong to one setting.
        """
        part = self.result["partition"]
        partitions = set(part["digests"])
        if len(partitions) > 1:
            partitions = {digest_of([part.get("scheme"), part.get("args")])}
        return self.result["dataset"]["digest"], "".join(partitions), self.claimed

    @cached_property
    def clients(self) -> ClientColumns:
        """Name, accuracy and classes of every client."""
        return client_columns(self.result, self.path)

    @cached_property
    def test_rows(self) -> dict[int, TestRows] | None:
        """How often each test row was right, by seed; None where the run does not hold it."""
        return test_rows(self.result, self.path)

    @cached_property
    def rounds(self) -> list[Facts]:
        """Its records, seed by seed."""
        return rounds_of(self.path)


Labelled = tuple[str, StoredRun]
Named = Sequence[Labelled]
"""Runs with their labels, in the order in which they are shown."""


@dataclass(frozen=True)
class LeftOut:
    """A named run that cannot be shown.

    Attributes:
        path: its directory.
        why: the reason.
        hint: the command that helps.
        exit: exit code if no other run can be shown.
    """

    path: Path
    why: str
    hint: str
    exit: Exit = Exit.STORE

    @property
    def sentence(self) -> str:
        """The run's name, and why it is left out."""
        # A reason may begin with a file of the run (``/result.json is damaged``) or end with a full stop.
        reason = self.why.strip("/ ").rstrip(".")
        return f"{self.path.name} {reason}."


@dataclass(frozen=True)
class Gathered:
    """Runs, and what was left out."""

    entries: list[StoredRun]
    left_out: list[LeftOut] = field(default_factory=list)


def measured_alone(found: Gathered) -> Gathered:
    """The runs without those whose figures are claimed, if there are runs with measured figures."""
    kept = [e for e in found.entries if not e.claimed]
    if not kept or len(kept) == len(found.entries):
        return found
    why = "has results claimed by its sites, which are not averaged with measured results"
    hint = "To compare runs of federations with each other, give only these runs."
    claimed = [LeftOut(e.path, why, hint) for e in found.entries if e.claimed]
    return Gathered(kept, found.left_out + claimed)


def gather(queries: Sequence[RunQuery], root: Path) -> Gathered:
    """The runs of the queries, or all of ``root`` if there is none.

    Args:
        queries: directories of a run or of many, first letters of a digest, tags, names of a method, dataset or
            partition, ``Run``, ``Grid`` or ``Point`` objects.
        root: where digests are looked up.

    Raises:
        UsageError for a name that is no run; StoreError for a selection (``dataset:NAME``) without a run.
    """
    queries = [_with_kind(one, root) for one in queries]
    entries = []
    left_out = []
    seen = set()
    for path in _paths(queries, root):
        directory = path.resolve()
        if directory in seen:
            continue
        seen.add(directory)
        run = open_run(path)
        if isinstance(run, StoredRun):
            entries.append(run)
        else:
            left_out.append(run)
    # If the queries name no single run (there are only selections, or no queries), only the newest of equal runs are
    # taken.
    if all(isinstance(one, str) and selector(one) is not None for one in queries):
        entries, old = _newest(entries)
        left_out += old
    return Gathered(entries, left_out)


def need_finished(found: Gathered, root: Path) -> None:
    """Refuse to write a file that would show no run.

    Args:
        found: the runs, and those that cannot be shown.
        root: where they were looked for.

    Raises:
        StoreError if there is no run; FedcacheError, with the exit code of the first run that was left out, if there
        are runs but none can be shown.
    """
    if found.entries:
        return
    if found.left_out:
        first = found.left_out[0]
        raise FedcacheError(
            first.exit, f"No run can be shown: {first.sentence} Nothing was written.", first.hint
        )
    raise StoreError(
        f"There is no finished run under {root}. Nothing was written.",
        "fedcache train --method fed3r",
    )


def _newest(entries: Sequence[StoredRun]) -> tuple[list[StoredRun], list[LeftOut]]:
    """The newest of runs that differ only in the code version, and the others as left out.

    A run by older code is kept if it has a seed that no run by the newest code has.
    """
    keys = [_identity(e) for e in entries]
    codes = [e.result.get("code") for e in entries]
    # Entries are sorted, the oldest first, so the last code of a key is the newest.
    newest_code = dict(zip(keys, codes, strict=True))
    newest_seeds: dict[object, set[int]] = {}
    for key, code, entry in zip(keys, codes, entries, strict=True):
        if code == newest_code[key]:
            newest_seeds.setdefault(key, set()).update(entry.seeds)
    kept = []
    old = []
    why = "is an older result of the same run, made by older code"
    hint = "Give the name of the run to show it, or remove such runs:  fedcache gc --kind old-runs"
    for key, code, entry in zip(keys, codes, entries, strict=True):
        has_own_seed = not newest_seeds[key].issuperset(entry.seeds)
        if code == newest_code[key] or has_own_seed:
            kept.append(entry)
        else:
            old.append(LeftOut(entry.path, why, hint))
    return kept, old


def _identity(entry: StoredRun) -> tuple[object, ...]:
    """A key that is equal for runs that differ only in their seeds and in the code version."""
    features = tuple(entry.result["features"])
    return entry.setting, features, tuple(sorted(entry.facts.items()))


def every_run(queries: Sequence[str], root: Path) -> list[StoredRun | LeftOut]:
    """The named runs, or all of ``root`` if none is named, oldest first.

    They include unfinished and damaged runs, and runs by older code.

    Raises UsageError for a name that is no run; StoreError for a selection (``dataset:NAME``) without a run.
    """
    paths = []
    for name in queries:
        paths += _named(name, root, LISTED)
    if not queries:
        paths = _inside(root)
    distinct = {path.resolve(): path for path in paths}
    return [open_run(path) for path in distinct.values()]


def names_in(root: Path) -> list[str]:
    """Names of the runs of a directory: their directories, and ``tag:NAME`` of each tag."""
    found = _inside(root)
    names = [path.name for path in found]
    names += [f"{OF_TAG}{tag}" for tag in _tags_in(found)]
    return names


def _tags_in(paths: Iterable[Path]) -> list[str]:
    """All tags of some runs, sorted."""
    tags: set[str] = set()
    for path in paths:
        tags.update(tags_of(path))
    return sorted(tags)


def find_one(name: str, root: Path, observer: Observer | None = None) -> Path:
    """The directory of the one run to which a path, or the first letters of a digest, belong.

    If several finished runs differ only in seeds or code version, the newest is taken, with a note.

    Raises UsageError for no run or several runs; StoreError for a selection (``dataset:NAME``) without a run.
    """
    found = _named(name, root, LISTED)
    if len(found) == 1:
        return found[0]
    opened = [open_run(path) for path in found]
    runs = [run for run in opened if isinstance(run, StoredRun)]
    if not runs:
        raise UsageError(
            f"{name} contains {len(found)} runs, expected one.",
            "Give a run of `fedcache runs list`.",
        )
    newest = runs[-1]
    count = len(runs)
    if len({_identity(run) for run in runs}) == 1:
        if observer is not None:
            observer.note(
                f"{name} matches {count} runs with the same settings. fedcache uses the newest: {newest.digest[:8]}."
            )
        return newest.path
    lines = []
    newest_first = runs[-MOST_LISTED:][::-1]
    names = differing(newest_first)
    for run in newest_first:
        lines.append(f"  {run.digest[:8]}  {label_of(run, names)} on {setting_name(run)}")
    listed = "\n".join(lines)
    raise UsageError(
        f"{name} matches {count} runs with different settings. The newest are:\n{listed}",
        f"Give the name of one of them, for example {newest.digest[:8]}.",
    )


def several(runs: object) -> list[RunQuery]:
    """The argument of a call as a list of queries. None means all runs and becomes [].

    Raises UsageError for an empty list, which means no run.
    """
    if runs is None:
        return []
    given: list[Any] = [runs]
    if not isinstance(runs, str | Path) and isinstance(runs, Iterable):
        given = list(runs)
    if not given:
        raise UsageError(
            "The given object contains no run.", "Give None to use all runs of FEDCACHE_HOME."
        )
    return given


def _paths(queries: Sequence[RunQuery], root: Path) -> Iterable[Path]:
    if not queries:
        yield from _inside(root)
    for one in queries:
        if isinstance(one, str | Path):
            yield from _named(one, root)
            continue
        # Grids have points, points have a run, and runs have a path. Importing their classes would import torch.
        points = getattr(one, "points", None)
        if points is not None:
            yield from (point.run.path for point in points)
            continue
        run = getattr(one, "run", None)
        if run is not None:
            yield run.path
            continue
        path = getattr(one, "path", None)
        if not isinstance(path, Path):
            raise UsageError(
                f"{type(one).__name__} is not a run.", "Give runs, grids, directories or digests."
            )
        yield path


def _named(
    name: str | Path,
    root: Path,
    hint: str = "`fedcache runs list` lists the names of runs. If you give no name, all runs are used.",
) -> list[Path]:
    """Directories of the runs to which a tag, a selection, a path or the first letters of a name belong.

    Raises UsageError and StoreError, with ``hint`` where no run has this name.
    """
    text = str(name)
    if not text:
        raise UsageError(
            "The given name of a run is empty.", "`fedcache runs list` lists the names."
        )
    if text.startswith(OF_TAG):
        tag = text.removeprefix(OF_TAG)
        found = [path for path in _inside(root) if tag in tags_of(path)]
        if found:
            return found
        known = ", ".join(_tags_in(_inside(root))) or "none"
        raise StoreError(
            f"No run under {root} has the tag {tag!r}. Known tags: {known}.",
            f"fedcache runs tag {shell_word(check_tag(tag))} RUN   adds the tag",
        )
    takes = selector(text)
    if takes is not None:
        found = [path for path, result in _results(root) if takes(result)]
        if found:
            return found
        raise StoreError(
            f"No finished run under {root} matches {name}.",
            "fedcache runs list   lists all runs",
        )
    path = Path(name)
    if path.is_dir():
        if is_run(path):
            return [path]
        return _inside(path)
    if path.name in ("result.json", "config.toml") and path.exists():
        return [path.parent]
    matches = [path for path in _inside(root) if path.name.startswith(text)]
    if len(matches) == 1:
        return matches
    if matches:
        shown = ", ".join(path.name for path in matches[:5])
        raise UsageError(
            f"{text!r} matches {len(matches)} runs: {shown}.", "Give more letters of the name."
        )
    # The name of a method, dataset or partition needs a prefix.
    kind = _kind_of(text, root)
    if kind is not None:
        hint = f"{kind}:{name}   selects the runs of that {kind}"
    elif text in METHODS:
        hint = f"fedcache train {shell_word(name)}   trains a run"
    raise UsageError(
        f"There is no run {text!r}: no directory has this name, and no run under {root} has a name "
        "that begins with it.",
        hint,
    )


def _kind_of(name: str, root: Path) -> str | None:
    """method | dataset | partition: the kind of a name in some finished run; None for a name that no run has."""
    for kind, names in OF.items():
        if any(name in names(result) for _, result in _results(root)):
            return kind
    return None


def _with_kind(query: RunQuery, root: Path) -> RunQuery:
    """``fed3r`` as ``method:fed3r``, unless it is a directory or the first letters of a run.

    The same for datasets and partitions.
    """
    if not isinstance(query, str) or not query or ":" in query:
        return query
    if Path(query).exists():
        return query
    if any(path.name.startswith(query) for path in _inside(root)):
        return query
    kind = _kind_of(query, root)
    if kind is None:
        return query
    return f"{kind}:{query}"


def _results(root: Path) -> Iterator[tuple[Path, Facts]]:
    """Directories of finished runs with their results, oldest first; those that cannot be read are left out."""
    for path in _inside(root):
        with suppress(FedcacheError, OSError):
            if (path / "result.json").exists():
                yield path, read_result(path / "result.json")


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run, whole or not."""
    return any((path / name).exists() for name in ("result.json", "config.toml", WRITTEN))


def _inside(folder: Path) -> list[Path]:
    """Directories of runs in a folder, oldest first."""
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if path.is_dir()]
    runs = [path for path in folders if not path.name.startswith(".") and is_run(path)]
    return sorted(runs, key=lambda path: (_begun(path), path))


def _begun(path: Path) -> float:
    """Seconds of the file clock at which a run was begun; 0 where that is not known."""
    config = path / "config.toml"
    if config.exists():
        return config.stat().st_mtime
    return 0.0


def open_run(path: Path) -> StoredRun | LeftOut:
    """The run of a directory, or why it cannot be shown."""
    file = path / "result.json"
    if not file.exists():
        return _unfinished(path)
    try:
        result = read_result(file)
        if not isinstance(result.get("accuracy"), dict) or "method" not in result:
            raise DamagedRunError(file, "is not the result of a run")
        check_files(path, result)
    except FedcacheError as error:
        return LeftOut(path, error.message.removeprefix(str(path)), error.hint, error.code)
    return StoredRun(path, result, measured_of(path, result) or {})


def _unfinished(path: Path) -> LeftOut:
    """The reason why a run has no result, and how to resume it."""
    config = path / "config.toml"
    if not config.exists():
        return LeftOut(
            path,
            "is not finished, and its config.toml is missing",
            "Run the command that started it again.",
        )
    try:
        pruned = read_pruned(path)
    except CorruptionError as error:
        hint = f"rm {shell_word(path / PRUNED)}"
        return LeftOut(path, f"is not finished: {error.message}", hint)
    why = "is not finished"
    if pruned is not None:
        rounds = pruned["rounds"]
        why += f": a search stopped it after round {pruned['round']} of {rounds}"
    if config_changed(path):
        why += "; its config.toml was changed since the run started"
    return LeftOut(path, why, "To resume it:  " + command_again(path))


def value_words(value: object) -> str:
    """A setting as labels and tables show it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def partition_name(result: Result) -> str:
    """The name of a saved partition, or the one that its scheme and arguments would give it."""
    part = result["partition"]
    scheme = SCHEMES.get(part["scheme"])
    if part["name"]:
        return str(part["name"])
    if scheme is None:
        return str(part["scheme"])
    return scheme.default_name(part["args"], part["seed"])


def without(table: Record, names: Container[str]) -> Facts:
    """The entries of a table, without those of some names."""
    return {name: value for name, value in table.items() if name not in names}


def name_without_hold_out(result: Result) -> str:
    """The name of a saved partition, or the default name of the scheme without the held-out value."""
    part = result["partition"]
    args = without(part.get("args", {}), ("hold_out",))
    return partition_name({**result, "partition": {**part, "args": args}})


def partition_words(result: Result) -> str:
    """A partition as labels show it: its name, and ``hold_out=VALUE`` where the run holds out values of a column."""
    held = values_held_out(result)
    if held:
        values = ",".join(held)
        return f"{name_without_hold_out(result)}, hold_out={values}"
    return partition_name(result)


OF: Mapping[str, Callable[[Result], tuple[str, ...]]] = MappingProxyType(
    {
        "method": lambda r: (r["method"],),
        "dataset": lambda r: (r["dataset"]["slug"],),
        "partition": lambda r: (partition_name(r), r["partition"]["scheme"]),
    }
)
"""First word of a selection -> function that gives the names to compare with the pattern after the colon."""


def selector(query: str) -> Callable[[Result], bool] | None:
    """A function that says whether a selection takes a result; None for a query that is not a selection."""
    kind, colon, pattern = query.partition(":")
    if not colon or not pattern or kind not in OF:
        return None
    return lambda result: any(fnmatchcase(name, pattern) for name in OF[kind](result))


_SHOWN_FIRST = ("method", "backbones")
"""Facts that come first in a label, as values without names."""


def by_setting(entries: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Entries of one dataset and partition together, in the order they first appear."""
    return list(grouped(entries, lambda e: e.setting).values())


def grouped(
    entries: Iterable[StoredRun], key: Callable[[StoredRun], Key]
) -> dict[Key, list[StoredRun]]:
    """Entries with the same key together, in the order in which they first appear."""
    groups: dict[Key, list[StoredRun]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def setting_name(entry: StoredRun) -> str:
    """Dataset and partition of an entry in words."""
    dataset = entry.result["dataset"]["slug"]
    words = f"{dataset}, {partition_words(entry.result)}"
    if entry.redrawn:
        words += ", redrawn for every seed"
    if entry.claimed:
        words += AS_CLAIMED
    return words


def setting_names(groups: Sequence[Sequence[StoredRun]]) -> list[str]:
    """A name for each setting; equal names are distinguished by their differences."""
    known = []
    digests = []
    for group in groups:
        result = group[0].result
        part = result["partition"]
        each = {
            "rows": result["dataset"].get("ok"),
            **part.get("args", {}),
            "seed": part.get("seed"),
        }
        known.append({name: value_words(value) for name, value in each.items()})
        dataset, partition, _ = group[0].setting
        digests.append(f"dataset {dataset[:8]}, partition {partition[:8]}")
    return distinguished([setting_name(g[0]) for g in groups], known, digests)


def distinguished(
    names: Sequence[str], known: Sequence[Mapping[str, str]], digests: Sequence[str]
) -> list[str]:
    """The names; equal ones get the facts that differ between them, or their digests if no fact tells them apart.

    Args:
        names: of runs or settings.
        known: facts of each in words.
        digests: of each in words.
    """
    made = list(names)
    for name in set(names):
        twins = [i for i, other in enumerate(names) if other == name]
        keys = dict.fromkeys(itertools.chain(*(known[i] for i in twins)))
        differing_keys = [key for key in keys if len({known[i].get(key) for i in twins}) > 1]
        for i in twins:
            words = [f"{key}={known[i][key]}" for key in differing_keys if key in known[i]]
            if words:
                listed = ", ".join(words)
                made[i] = f"{name} ({listed})"
    counts = Counter(made)
    for i, name in enumerate(made):
        if counts[name] > 1:
            made[i] = f"{name} ({digests[i]})"
    return made


def differing(entries: Sequence[StoredRun]) -> list[str]:
    """Names of the facts that are not the same in all entries that have them.

    Method and backbones are first, and numbers last: a choice such as ``head`` says more about a run than a rate.
    A fact of ``USUAL`` that an entry lacks has its default there.
    """
    known = [e.facts for e in entries]
    names = list(dict.fromkeys(itertools.chain(*known)))
    varied = []
    numbers = set()
    for name in names:
        values = {f.get(name) for f in known if name in f or name in USUAL}
        if len(values) < 2:
            continue
        # A hyperparameter whose values differ only between methods adds nothing to the names of the methods.
        if name in _SHOWN_FIRST or name in USUAL or _varies_within(name, known):
            varied.append(name)
            if all(value is None or is_number(value) for value in values):
                numbers.add(name)
    return sorted(
        varied, key=lambda name: (name not in _SHOWN_FIRST, name not in USUAL, name in numbers)
    )


def _varies_within(name: str, known: Sequence[Mapping[str, str]]) -> bool:
    """Whether a fact has several values among the runs of one method."""
    seen: dict[str, set[str]] = {}
    for f in known:
        if name in f:
            seen.setdefault(f["method"], set()).add(f[name])
    return any(len(values) > 1 for values in seen.values())


def label_of(entry: StoredRun, names: Sequence[str]) -> str:
    """The method and the facts of these names, in words."""
    known = entry.facts
    words = []
    if "method" not in names:
        words.append(entry.method)
    for name in names:
        if name not in known:
            continue
        word = known[name]
        if name not in _SHOWN_FIRST:
            short = name.removeprefix("set.")
            word = f"{short}={word}"
        words.append(word)
    return " ".join(words)


def labels(entries: Sequence[StoredRun]) -> list[str]:
    """The shortest names that tell entries apart: the method, and the facts that differ among runs of that method.

    Runs with equal facts get the options of their configuration that differ, or the digest where none differs.
    """
    made = [""] * len(entries)
    for method in dict.fromkeys(e.method for e in entries):
        mine = [i for i, e in enumerate(entries) if e.method == method]
        for i, label in zip(mine, _labels_of_method([entries[i] for i in mine]), strict=True):
            made[i] = label
    return made


def _labels_of_method(entries: Sequence[StoredRun]) -> list[str]:
    """Labels of runs of one method; a fact is added to all labels if it tells more runs apart."""
    used: list[str] = []
    made = [label_of(e, used) for e in entries]
    for name in differing(entries):
        tried = [label_of(e, [*used, name]) for e in entries]
        if len(set(tried)) > len(set(made)):
            used = [*used, name]
            made = tried
    if len(set(made)) == len(made):
        return made
    known = []
    for entry in entries:
        options = without(train_table(entry.path), (*PLACES, "set"))
        known.append({name: value_words(value) for name, value in options.items()})
    return distinguished(made, known, [e.digest[:8] for e in entries])


# Groups of runs: runs of equal settings and different seeds as one run, and leave-one-out runs with their mean.
#
# Earlier versions stored one result for each list of seeds. For a comparison these results are one run: one row, whose
# mean is over all seeds. If two results hold the same seed, both have the same values for it.
#
# The figures of each seed are exact. A result holds figures of clients, classes and costs only as a mean or a sum over
# its seeds. To merge them, each result is weighted by the number of seeds that it adds. The merged figure is exact,
# unless a result shares some but not all of its seeds with another.

NO_SETTING = {
    *PLACES,
    "method",
    "preset",
    "set",
    "backbones",
    "seeds",
    "rounds",
    "participation",
    "execution",
    "device",
}
"""Names in ``config.toml`` that do not separate runs. Most of them are compared as values in the result instead. Seeds
are not compared, and a preset is only another name for hyperparameters."""
OUTCOMES = {"simulated_time", "updates", "staleness_mean", "staleness_max"}
"""Values in a result's ``timing`` that are measured; its other values are settings."""


@dataclass(frozen=True)
class MergedRun(StoredRun):
    """Runs of equal settings as one. ``path`` and everything that is not a figure are those of the first run.

    Attributes:
        members: the runs that add seeds, the one with most seeds first.
        added: for each member, the seeds that no earlier member has.
    """

    members: tuple[StoredRun, ...]
    added: tuple[tuple[int, ...], ...]

    @property
    def exact(self) -> bool:
        """Whether figures of clients, classes and costs are exact: each member adds all of its seeds."""
        seeds = [run.seeds for run in self.members]
        return list(map(len, seeds)) == list(map(len, self.added))

    @cached_property
    def clients(self) -> ClientColumns:
        """Name, accuracy and classes of every client, means over the seeds."""
        weights = [len(new) for new in self.added]
        columns = [run.clients for run in self.members]
        names = columns[0].names
        accuracy = np.average([c.accuracy for c in columns], 0, weights)
        classes_owned = np.average([c.classes_owned for c in columns], 0, weights)
        validations = [c.validation for c in columns if c.validation is not None]
        validation = None
        if len(validations) == len(columns):
            validation = np.average(validations, 0, weights)
        # Only means are merged, so there are no accuracies by seed.
        no_seeds = np.empty((0, len(names)))
        return ClientColumns(names, accuracy, classes_owned, no_seeds, validation)

    @cached_property
    def test_rows(self) -> dict[int, TestRows] | None:
        """How often each test row was right, by seed; None where a run does not hold it."""
        made: dict[int, TestRows] = {}
        for run, new in zip(self.members, self.added, strict=True):
            found = run.test_rows
            if found is None:
                return None
            made |= {seed: found[seed] for seed in new}
        return made

    @cached_property
    def rounds(self) -> list[Facts]:
        """Its records, seed by seed."""
        made = []
        for run, new in zip(self.members, self.added, strict=True):
            made += [record for record in run.rounds if record["seed"] in new]
        return made


def merge_seeds(found: Gathered) -> Gathered:
    """Runs of equal settings as one run each, at the place of the first of them."""
    groups = grouped(found.entries, settings_key)
    return replace(found, entries=[merged(group) for group in groups.values()])


def settings_key(run: StoredRun) -> str:
    """A key that is equal for runs that differ only in their seeds.

    The name of a preset does not count; the hyperparameters that it stands for do. A run with noise for privacy is
    never merged, because its epsilon is that of its own seeds.
    """
    result = run.result
    # The number of rejected uploads is an outcome and no setting.
    facts = without(run.facts, ("preset", "trust.rejected"))
    settings = without(train_table(run.path), NO_SETTING)
    timing = without(result.get("timing") or {}, OUTCOMES)
    participants = result.get("participants")
    kinds = [result.get(name) for name in ("features", "code", "device", "protocol")]
    private = ""
    if result.get("trust", {}).get("privacy"):
        private = run.digest
    key = [run.setting, facts, settings, timing, participants, kinds, private]
    return json.dumps(key, default=str)


def merged(runs: Sequence[StoredRun]) -> StoredRun:
    """Runs of equal settings as one run; if one of them has all seeds, that run.

    Of two runs with the same number of seeds the later one comes first.
    """
    # The run with most seeds comes first. The list is sorted upwards and reversed, so the later of equal ones is first.
    order = sorted(runs, key=lambda run: len(run.seeds))[::-1]
    members = []
    added = []
    seen: set[int] = set()
    for run in order:
        new = tuple(seed for seed in run.seeds if seed not in seen)
        if not new:
            continue
        members.append(run)
        added.append(new)
        seen.update(new)
    first = members[0]
    if len(members) == 1:
        return first
    result = _result(members, added)
    measured = _measured(members, added)
    return MergedRun(first.path, result, measured, tuple(members), tuple(added))


def _result(runs: Sequence[StoredRun], added: Sequence[Sequence[int]]) -> Facts:
    """The result of the first run, with figures that are over all runs."""
    results = [run.result for run in runs]
    weights = [len(new) for new in added]
    shares = _shares(results, added)

    def per_seed(part: str, name: str) -> list[Any]:
        """The values of all seeds; [] where a result lacks them."""
        made = []
        for result, new in zip(results, added, strict=True):
            values = (result.get(part) or {}).get(name)
            if values is None or len(values) != len(result["seeds"]):
                return []
            by_seed = dict(zip(result["seeds"], values, strict=True))
            made += [by_seed[seed] for seed in new]
        return made

    def of_seeds(part: str) -> Facts:
        """Means over seeds of all values in a part of the result. Values by seed give exact means and deviations."""
        made: Facts = _mean_of([result[part] for result in results], weights)
        for name in results[0][part]:
            if name == "per_seed" or name.endswith("_per_seed"):
                made[name] = per_seed(part, name)
                # The mean of ``client_mean_per_seed`` is ``client_mean``, and that of ``per_seed`` is ``mean``.
                mean = name.removesuffix("per_seed").removesuffix("_") or "mean"
                made[mean] = mean_std(made[name])[0]
        if "std" in made:
            made["std"] = mean_std(made["per_seed"])[1]
        return made

    made = dict(results[0])
    made["seeds"] = list(itertools.chain(*added))
    digests = per_seed("partition", "digests")
    if digests:
        made["partition"] = {**results[0]["partition"], "digests": digests}
    for part in ("accuracy", "validation", "macro_f1"):
        if all(part in result for result in results):
            made[part] = of_seeds(part)
    if "eval_clients" in results[0]["accuracy"]:
        made["accuracy"]["eval_clients"] = per_seed("accuracy", "eval_clients")
    for part in ("fairness", "classes_owned", "diagnostics"):
        if all(part in result for result in results):
            made[part] = _mean_of([result[part] for result in results], weights)
    if all("traffic" in result for result in results):
        made["traffic"] = _traffic(results, shares)
    if "rejected" in made.get("trust", {}):
        rejected = _total([result["trust"].get("rejected", 0) for result in results], shares)
        made["trust"] = {**made["trust"], "rejected": rejected}
    if all(result.get("confusion") for result in results):
        made["confusion"] = _total([result["confusion"] for result in results], shares)
    else:
        made.pop("confusion", None)
    return made


def _traffic(results: Sequence[Result], shares: Sequence[float]) -> Facts:
    """Sums over the seeds; numbers per client and round are those of the first run."""
    first = results[0]["traffic"]
    made = _total([result["traffic"] for result in results], shares)
    for part in ("exact", "paper"):
        if "per_client_round" in first.get(part, {}):
            made[part]["per_client_round"] = first[part]["per_client_round"]
    return dict(made)


def _measured(runs: Sequence[StoredRun], added: Sequence[Sequence[int]]) -> Facts:
    """Measurements of the first run, with the seconds of training of all seeds if they are known for every run."""
    times = [run.seconds for run in runs]
    known = [time for time in times if time is not None]
    seconds = dict(runs[0].measured.get("seconds", {}))
    seconds.pop("train", None)
    if len(known) == len(times):
        shares = _shares([run.result for run in runs], added)
        seconds["train"] = sum(time * share for time, share in zip(known, shares, strict=True))
    return {**runs[0].measured, "seconds": seconds}


def _shares(results: Sequence[Result], added: Sequence[Sequence[int]]) -> list[float]:
    """For each run, the number of seeds that it adds as a share of its seeds."""
    return [len(new) / len(result["seeds"]) for result, new in zip(results, added, strict=True)]


def _mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Weighted means of the numbers in equal structures; other values are those of the first structure."""
    first = values[0]
    if isinstance(first, Mapping):
        means = dict(first)
        for key in first:
            # A key that is not in all of them keeps its first value.
            if all(key in value for value in values):
                means[key] = _mean_of([value[key] for value in values], weights)
        return means
    if isinstance(first, list):
        same_length = all(isinstance(value, list) and len(value) == len(first) for value in values)
        if same_length:
            return [_mean_of(items, weights) for items in zip(*values, strict=True)]
    if any(value is None for value in values):
        return None
    if isinstance(first, bool | str | list):
        return first
    if all(value == first for value in values):
        return first
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / sum(weights)


def _total(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """Sums of the counts in equal structures, each times its share; other values are those of the first structure."""
    first = values[0]
    if isinstance(first, Mapping):
        totals = {}
        for key in first:
            if all(key in value for value in values):
                totals[key] = _total([value[key] for value in values], shares)
        return totals
    if isinstance(first, list):
        return [_total(items, shares) for items in zip(*values, strict=True)]
    if isinstance(first, bool | str) or any(value is None for value in values):
        return first
    return round(sum(value * share for value, share in zip(values, shares, strict=True)))


# Leave-one-out runs: the same partition with each value of a column held out in turn, as one
# group with its mean.


HELD_OUT = "held-out values"
"""Name of the blocks if runs that each hold out one value are compared."""


@dataclass(frozen=True)
class HeldOutGroup:
    """Runs that differ in the held-out value, and in methods and settings.

    Attributes:
        title: dataset and partition in words.
        column: the column whose values are held out.
        values: the held-out values, in the order in which they first appear.
        entries: the runs.
    """

    title: str
    column: str
    values: tuple[str, ...]
    entries: tuple[StoredRun, ...]

    @property
    def score(self) -> str:
        """The one score of all runs."""
        return score_for(e.result for e in self.entries)

    def rows(self) -> dict[str, dict[str, StoredRun]]:
        """Label -> held-out value -> run, for each method with its settings. Of equal runs the last one is taken."""
        names = differing(self.entries)
        made: dict[str, dict[str, StoredRun]] = {}
        for entry in self.entries:
            row = made.setdefault(label_of(entry, names), {})
            row[value_of(entry)] = entry
        return made

    def accuracies(self, score: str | None = None) -> dict[str, dict[str, float | None]]:
        """The accuracy of each row on each value; None for a value that it lacks."""
        used = score or self.score
        found = {}
        for name, row in self.rows().items():
            found[name] = dict.fromkeys(self.values)
            for value, run in row.items():
                found[name][value] = run.accuracy(used)
        return found


def value_of(entry: StoredRun) -> str:
    """The values that a run holds out, in words; "" for none."""
    return ",".join(values_held_out(entry.result))


def mean_over_values(accuracy: Mapping[str, float | None]) -> float | None:
    """The mean over held-out values; None where the accuracy on one of them is missing."""
    return mean_std(list(accuracy.values()))[0]


def held_out_groups(entries: Sequence[StoredRun]) -> list[HeldOutGroup]:
    """The groups of two or more held-out values among some runs, in the order in which they first appear."""
    held_out = [e for e in entries if values_held_out(e.result)]
    made = []
    for group in grouped(held_out, group_key).values():
        values = tuple(dict.fromkeys(map(value_of, group)))
        if len(values) < 2:
            continue
        first = group[0].result
        column = first["partition"]["args"].get("by") or "domain"
        dataset = first["dataset"]["slug"]
        title = f"{dataset}, {name_without_hold_out(first)}, each {column} held out in turn"
        if group[0].claimed:
            title += AS_CLAIMED
        made.append(HeldOutGroup(title, column, values, tuple(group)))
    return made


def group_key(entry: StoredRun) -> str:
    """A key that is equal for runs of one setting; leave-one-out runs of one group also have one common key."""
    if not values_held_out(entry.result):
        return json.dumps(entry.setting)
    dataset = entry.result["dataset"]["digest"]
    part = entry.result["partition"]
    args = without(part["args"], ("hold_out",))
    # If every seed redraws the partition, the seed of the first partition does not separate groups.
    seed = "redrawn"
    if len(set(part["digests"])) == 1:
        seed = part["seed"]
    return json.dumps([dataset, part["scheme"], args, seed, entry.claimed], default=str)
