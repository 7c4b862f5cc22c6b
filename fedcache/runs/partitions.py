"""Partitions of a store: how they are made, saved, loaded, and written as one store per client."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home, PartitionConfig, SharedPartition, TrainConfig
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    StoreError,
    UsageError,
    shell_word,
    unknown,
)
from fedcache.federate.methods import find_method
from fedcache.federate.partition import partition as parts
from fedcache.federate.partition.given import of_ids, of_rows, of_splits
from fedcache.federate.partition.json_file import check_words, words_of
from fedcache.federate.partition.partition import (
    SCHEMES,
    Columns,
    InfeasibleError,
    Partition,
    with_column,
)
from fedcache.federate.partition.scheme import FEWER
from fedcache.parsing import Facts, Record
from fedcache.progress import Detail, Observer
from fedcache.store import export
from fedcache.store.catalog import ingest_command, is_ingested
from fedcache.store.chunks import mapped, read_content
from fedcache.store.files import make_private, sha256_hex
from fedcache.store.manifest import PARTITION_SUFFIXES, partition_file, partition_parts
from fedcache.store.store import Store, column_of
from fedcache.tables.groups import Group

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method

# Damaged files of saved partitions: the command that makes the partition again, and a check that it is the same.


def command_of(store: Store, name: str) -> str:
    """The command that makes a saved partition again.

    Its scheme and arguments can often be read even if its rows are damaged, because they have a seal of their own. If
    they cannot be read, or if the rows came from a file or a shard, the command has the word SCHEME instead.
    """
    command = "fedcache partition --scheme SCHEME"
    with suppress(FedcacheError, OSError, ValueError):
        raw = mapped(store.path / partition_file(store.path, store.manifest, name))
        words = words_of(check_words(read_content(raw), name))
        scheme = SCHEMES.get(words["scheme"])
        # No scheme makes a partition again from which clients were removed later.
        if scheme is not None and "forgotten" not in words["args"]:
            command = scheme.command(words["args"])
            if words["seed"]:
                command += f" --partition-seed {words['seed']}"
    named = f"{command} --name {shell_word(name)}"
    # The user chooses the scheme, so the new partition may assign the rows in another way than the damaged one.
    if "SCHEME" in command:
        return f"{named} --replace"
    return named


def check_same(store: Store, made: Partition, name: str) -> None:
    """Raise UsageError if a new partition differs from the saved one, whose file is damaged."""
    relative, parts = partition_parts(name, made.to_file())
    if store.manifest.files.get(relative) != sha256_hex(*parts):
        raise UsageError(
            f"The stored partition {name!r} of {store.path.name} is damaged. The new partition differs from it and "
            "would not repair it.",
            f"To make the damaged partition again:  {command_of(store, name)};  to store the new "
            "partition instead: --replace",
        )


def columns_of(store: Store) -> Columns:
    """The columns of a store that a partition may use: one value per row, no features."""
    columns = {key: store.column(key) for key in ("label", "domain", "split", "ok", "uid")}
    return Columns(
        **columns,
        classes=store.manifest.classes,
        domains=store.manifest.domains,
        digest=str(store.dataset["digest"]),
        groups=store.group,
    )


def typed_arguments(scheme: str, given: Record) -> Facts:
    """Words from the command line in the types that the scheme declares; ``make`` refuses unknown names later."""
    if scheme not in SCHEMES:
        raise unknown("partition scheme", scheme, SCHEMES)
    kinds = {argument.name: argument.kind for argument in SCHEMES[scheme].arguments}
    return {name: _typed(kinds.get(name), value) for name, value in given.items()}


def _typed(kind: str | None, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # Values that do not fit stay as they are, and the scheme refuses them.
    if kind == "names":
        words = [word.strip() for word in value.split(",")]
        return tuple(filter(None, words))
    if kind == "bool":
        truth = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
        return truth.get(value.lower(), value)
    if kind in ("int", "float"):
        try:
            if kind == "int":
                return int(value)
            return float(value)
        except ValueError:
            return value
    return value


def make_partition(
    store: Store,
    scheme: str | None,
    *,
    seed: int = 0,
    name: str | None = None,
    save: bool = True,
    replace: bool = False,
    base: int | None = None,
    **arguments: Any,
) -> Partition:
    """Assign the store's readable rows to clients and save the partition in the store.

    Raises UsageError for arguments that are unknown, out of range or infeasible (with the value that works), and for a
    name of a partition with other rows.

    Args:
        store: with the rows to assign.
        scheme: one of ``SCHEMES``. It may be None with the argument ``by`` or ``hold_out``; together with them, it
            assigns the rows of every value of the column.
        seed: of the draws.
        name: to save it under; default from scheme, arguments and seed (``dirichlet-a0.1-m100-s0``).
        save: whether to save it.
        replace: whether it may replace another partition of that name.
        base: number of the first classes whose rows are assigned; None for all.
        arguments: of the scheme.
    """
    scheme, arguments = need_scheme(scheme, with_whole_value(store, arguments))
    typed = typed_arguments(scheme, arguments)
    check_held_out_domains(store, typed)
    columns = columns_of(store)
    if base is not None:
        in_base = (columns.label >= 0) & (columns.label < base)
        columns = dataclasses.replace(
            columns,
            ok=(columns.ok == 1) & in_base,
            label=np.where(in_base, columns.label, -1),
            classes=columns.classes[:base],
        )
    made = parts.make(scheme, columns, seed=seed, **typed)
    if save:
        save_partition(store, made, name or made.default_name(), replace=replace)
    return made


def need_scheme(scheme: str | None, arguments: Record) -> tuple[str, Facts]:
    """Scheme and arguments after ``with_column``. Raises UsageError if they name no scheme."""
    chosen, given = with_column(scheme, arguments)
    if chosen is None:
        schemes = " | ".join(SCHEMES)
        raise UsageError("No scheme was given.", f"--scheme {schemes}, or --by COLUMN")
    return chosen, given


def save_partition(store: Store, made: Partition, name: str, *, replace: bool) -> None:
    """Save a partition in its store. Nothing is saved in a published store.

    Raises UsageError if a partition of this name assigns the rows differently, unless ``replace`` is true.
    """
    if store.address is not None:
        return
    if not replace and name in store.partitions:
        try:
            digest = store.partition(name).get("digest")
        except CorruptionError:
            check_same(store, made, name)
        else:
            if digest == made.digest:
                return
            raise UsageError(
                f"{store.path.name} already has a partition {name!r} that assigns the rows differently, and "
                "runs may use it.",
                f"Use another name: --name {shell_word(name)}-2;  or replace the old partition: --replace",
            )
    store.put_partition(name, made.to_file())


LONGEST_KEPT = 100
"""Letters of a name to which ``keep_partition`` adds a digest; a store allows 128 letters."""


def keep_partition(store: Store, parts: Partition, home: Home) -> str:
    """Save a partition, and return its name for ``--partition``.

    Its name has its digest, unless the store has the same partition under the name alone. A published store is not
    changed: the partition becomes a file in ``partitions/`` of the home.
    """
    name = parts.default_name()
    if name in store.partitions and store.partition(name).get("digest") == parts.digest:
        return name
    if store.address is None:
        name = f"{name[:LONGEST_KEPT]}-{parts.digest[:8]}"
        store.put_partition(name, parts.to_file())
        return name
    file = home.root / "partitions" / f"{name}-{parts.digest[:16]}.partition"
    if not file.exists():
        make_private(home.root)
        make_private(file.parent)
        parts.save(file)
    return str(file)


def report_notes(made: Partition, observer: Observer) -> None:
    """Report the notes of a partition; clients with fewer rows than requested are a warning."""
    for note in made.notes:
        if FEWER in note:  # the phrase of every note on clients with fewer rows than requested
            observer.warn(note)
        else:
            observer.note(note)


def need_labels(method: Method, store: Store, rows: NDArray[np.int64] | None) -> None:
    """Refuse training rows without a label if the method reads labels.

    Raises UsageError with the command that adds labels.

    Args:
        method: of the run.
        store: with the training rows.
        rows: the rows assigned to clients. None before rows are assigned: then one label among all rows is enough.
    """
    if "labels" not in method.needs:
        return
    s = store.samples
    if s.label.min(initial=0) >= 0:
        return  # the usual case, found without a copy of rows
    if rows is None:
        # Training and test rows, because some schemes assign both.
        label = s.label[(s.split <= 1) & (s.ok == 1)]
    else:
        label = s.label[rows]
    lacking = int((label < 0).sum())
    some_labels = lacking < len(label)
    if not lacking or (rows is None and some_labels):
        return
    hint = ""
    if some_labels:
        hint = (
            "To leave these rows out, use a scheme that uses labels, for example --scheme dirichlet, or --by COLUMN "
            "with --option unlabelled=drop.\n"
        )
    if is_ingested(store):
        hint += f"Add labels to the file, then:  {ingest_command(store)}"
    else:
        hint += "Give the images a folder per class, or a label column in a .csv:  fedcache datasets info folder:PATH"
    total = len(label)
    raise UsageError(
        f"{method.name} needs labels, but {lacking:,} of the {total:,} rows of {store.path.name} "
        "have none.",
        hint,
    )


def single_class_warning(
    method: Method, label: NDArray[np.int32], classes: Sequence[str]
) -> str | None:
    """A warning if a method that reads labels gets training rows of only one class; None otherwise.

    ``label`` are the labels of the training rows; a negative one is missing.
    """
    found = np.unique(label[label >= 0])
    if "labels" not in method.needs or len(found) != 1:
        return None
    return (
        f"There is only one class among the training rows ({classes[found[0]]}). Every model will predict "
        "this class, so the accuracy is meaningless. To see the counts:  fedcache inspect"
    )


def deciding_method(method: Method, config: PartitionConfig) -> Method:
    """The method whose paper decides what the user leaves open: in a grid of several methods, that of all of them."""
    if isinstance(config, SharedPartition):
        return find_method(config.paper_of)
    return method


def _note_default(
    setting: str, option: str, method: Method, config: PartitionConfig, observer: Observer
) -> None:
    """Note a setting that the method's paper decides. Where it decides for a grid's other methods, it is printed."""
    note = f"{setting} (default of {method.name}'s paper; change with {option})."
    if isinstance(config, SharedPartition):
        observer.note(f"All methods: {note}")
    else:
        observer.note(Detail(note))


def default_partition(
    method: Method, store: Store, config: PartitionConfig, domain: Sequence[str], observer: Observer
) -> tuple[str, Facts]:
    """Scheme and arguments of a partition: those of the user, else those of the method's paper, with a note."""
    method = deciding_method(method, config)
    scheme, arguments = with_column(config.scheme, config.options)
    if scheme is None:
        scheme = method.defaults.scheme
        setting = f"Partition: {scheme}"
        if scheme == "feature-shift" and len(domain or store.samples.domains) == 1:
            scheme = "label-shift"
            setting = (
                "Partition: label-shift instead of feature-shift, because there is one domain,"
            )
        _note_default(setting, "--scheme", method, config, observer)
    if scheme not in SCHEMES:
        raise unknown("partition scheme", scheme, SCHEMES)
    # The default number of clients is that of the method's paper, not that of the scheme.
    defaults = {argument.name: argument.default for argument in SCHEMES[scheme].arguments}
    if config.clients is not None:
        arguments["clients"] = config.clients
    elif defaults.get("clients") is not None and "clients" not in arguments:
        clients = method.defaults.clients
        arguments["clients"] = clients
        _note_default(f"Clients: {clients}", "--clients", method, config, observer)
    if domain and "domain" in defaults:
        arguments["domain"] = tuple(domain)
    return scheme, arguments


def partition_seeds(
    method: Method,
    store: Store,
    train: TrainConfig,
    config: PartitionConfig,
    seeds: Sequence[int],
    *,
    repartition: bool,
    observer: Observer,
    base: int | None = None,
) -> tuple[dict[int, Partition], str | None]:
    """The partition of each seed, and the name of a saved one.

    Without a saved partition, the scheme makes one for all seeds, or one for each with ``repartition``. ``base`` is as
    in ``make_partition``.
    """
    if train.partition is not None:
        loaded = load_partition(store, train.partition)
        # A partition from a file is stored with the run, like one that is made for it, because the file may be removed.
        name: str | None = train.partition.partition("@")[0]
        if name not in store.partitions:
            name = None
        return dict.fromkeys(seeds, loaded), name
    scheme, arguments = default_partition(method, store, config, train.domain, observer)
    made: dict[int, Partition] = {}
    for seed in seeds:
        if not repartition and made:
            made[seed] = next(iter(made.values()))
            continue
        partition_seed = config.seed
        if repartition:
            partition_seed = seed
        try:
            made[seed] = make_partition(
                store, scheme, seed=partition_seed, save=False, base=base, **arguments
            )
        except InfeasibleError as error:
            # Only defaults are scaled down. Values of the user are refused, with the value that works.
            defaults = config.scheme is None and config.clients is None and not config.options
            if not defaults or not error.instead:
                raise
            scaled = ", ".join(f"{name} {value}" for name, value in error.instead.items())
            observer.note(f"{error.message} fedcache uses {scaled} instead.")
            arguments = {**arguments, **error.instead}
            made[seed] = make_partition(
                store, scheme, seed=partition_seed, save=False, base=base, **arguments
            )
    first = next(iter(made.values()))
    observer.note(Detail(first.summary() + "."))
    report_notes(first, observer)
    return made, None


def pinned_name(name: str, digest: str) -> str:
    """``NAME@DIGEST``: a saved partition by its name, which is refused if it has another digest."""
    return f"{name}@{digest[:16]}"


def load_partition(store: Store, name: str) -> Partition:
    """A saved partition by name, or a partition file by path; it must be of this store's dataset.

    Raises UsageError for an unknown name; StoreError for a partition of another dataset, and if ``NAME@DIGEST`` names
    other rows than the partition has now; CorruptionError for a damaged partition.
    """
    pinned = ""
    # A file may have an @ in its path.
    if not Path(name).exists():
        name, _, pinned = name.partition("@")
    loaded = _load_partition(store, name)
    if not loaded.digest.startswith(pinned):
        digest = loaded.digest[:16]
        raise StoreError(
            f"The partition {name!r} of {store.path.name} was replaced by a partition with other rows: the "
            f"digest is now {digest}, expected {pinned}.",
            f"To train on the new partition: --partition {shell_word(name)}",
        )
    return loaded


def _load_partition(store: Store, name: str) -> Partition:
    digest = str(store.dataset["digest"])
    is_saved = name in store.partitions
    means_file = name.endswith(PARTITION_SUFFIXES) or not is_saved
    if means_file and Path(name).is_file():
        return Partition.load(name, dataset=digest, rows=store.rows)
    if not is_saved:
        saved = ", ".join(sorted(store.partitions)) or "none; make one with `fedcache partition`"
        raise unknown("partition", name, store.partitions, hint=f"Saved partitions: {saved}")
    # The manifest has the digest of these bytes, so the digest of the rows is not computed again.
    try:
        raw = store.partition_bytes(name)
        origin = f"partition {name}"
        return Partition.from_file(
            raw, dataset=digest, rows=store.rows, origin=origin, vouched=True
        )
    except CorruptionError as error:
        error.hint = f"To make it again:  {command_of(store, name)}"
        raise


def check_partitions(store: Store) -> dict[Path, str]:
    """Problems of saved partitions whose files match the manifest, such as a wrong digest of their rows.

    Returns:
        a sentence for each partition that is not one of this store, or whose rows have another digest, by its file.
    """
    digest = str(store.dataset["digest"])
    problems = {}
    for name in store.partitions:
        raw = store.partition_bytes(name)
        file = store.path / partition_file(store.path, store.manifest, name)
        try:
            Partition.from_file(raw, dataset=digest, rows=store.rows, origin=f"partition {name}")
        except FedcacheError as error:
            problems[file] = f"{error.message} Remove the file; then:  fedcache repair"
    return problems


def write_shards(
    store: Store,
    partition: Partition,
    out: str | Path | None,
    observer: Observer,
) -> Path:
    """Write one ordinary store per client: its training, test and validation rows, every array and text feature.

    Returns:
        the directory of the stores, for ``train --clients-from``.
    """
    if out:
        target = Path(out)
    elif store.address is not None:
        raise UsageError(
            f"{store.address} is a published store, so nothing is written next to it.",
            "Name a folder:  --out DIR",
        )
    else:
        target = store.path.with_name(f"{store.path.stem}-{partition.default_name()}")
    observer.note(f"Writing {len(partition.clients)} client stores to {target}.")
    clients = list(partition.clients)
    rows = [(client.name, client.train, client.test) for client in clients]
    validation = [client.validation for client in clients]
    export.write_shards(store, rows, target, validation)
    return target


# Partitions that the user makes: a mapping, an array, a function or a CSV for the rows of a store.


CSV = ".csv"
_FIRST_LINE = "The first line of the file must be: name,client   or: name,client,split"


def is_given(clients: object) -> bool:
    """Whether ``clients`` assigns rows to clients itself, and is not the name of a scheme."""
    if isinstance(clients, str | Path):
        return str(clients).lower().endswith(CSV)
    return clients is not None


def given_partition(
    store: Store,
    clients: object,
    /,
    *,
    seed: int = 0,
    name: str | None = None,
    replace: bool = False,
    **arguments: Any,
) -> Partition:
    """A partition from the user's own assignment of rows, saved in the store.

    Args:
        store: with the rows to assign.
        clients: name -> rows (``given.of_rows``); or the client of each row in the order of ``Store.samples.name`` (a
            pandas Series whose index names the rows is matched by name); or a CSV of ``name,client[,split]`` with the
            names of the rows; or a function that takes the store and returns one of these.
        seed: of the draws that ``arguments`` need.
        name: to save it under.
        replace: whether it may replace another partition of that name.
        arguments: ``validation``; and those of the scheme ``natural`` (``tests``, ``min_rows``, ``max_clients``) if
            ``clients`` has one value for each row.

    Raises:
        UsageError for unknown rows or names, and arguments that do not fit the form of ``clients``.
    """
    if callable(clients):
        clients = _returned(clients(store))
    columns = columns_of(store)
    typed = typed_arguments("natural", arguments)
    split = None
    if isinstance(clients, str | Path):
        clients, split = read_clients(Path(clients), store)
    # A mapping and a CSV with splits give the test rows; values of a column do not.
    rows_are_given = isinstance(clients, Mapping) or split is not None
    validation = None
    if rows_are_given:
        validation = typed.pop("validation", None)
    if rows_are_given and typed:
        argument = next(iter(typed))
        raise UsageError(
            f"{argument} and the rows of each client are both given.",
            "Leave one of them out.",
        )
    if isinstance(clients, Mapping):
        made = of_rows(columns, clients, validation)
    elif split is not None:
        assert isinstance(clients, Group)
        made = of_splits(columns, clients, split, validation)
    else:
        named = _by_name(clients, store)
        if named is not None:
            clients = named
        made = of_ids(columns, clients, seed=seed, **typed)
        # If the names of rows are numbers, their order is clear, and no note is needed.
        numbered = all(word.rpartition("/")[2].isdigit() for word in store.samples.name)
        if named is None and not numbered:
            first = store.samples.name[0]
            note = f"clients are assigned in the order of the row names; the first row is {first!r}"
            made = dataclasses.replace(made, notes=(*made.notes, note))
    save_partition(store, made, name or _free_name(store, made, replace), replace=replace)
    return made


def _free_name(store: Store, made: Partition, replace: bool) -> str:
    """The default name of a partition; its digest is added if a saved partition of that name has other rows."""
    name = made.default_name()
    if replace or name not in store.partitions:
        return name
    if store.partition(name).get("digest") == made.digest:
        return name
    digest = made.digest[:8]
    return f"{name}-{digest}"


def _by_name(clients: Any, store: Store) -> Group | None:
    """The client of each row, if ``clients`` is a pandas Series with row names in its index; None for other values.

    Rows that it does not name belong to no client. Raises UsageError for an unknown or repeated name.
    """
    index = getattr(clients, "index", None)
    # The `index` of a list is a method, that of a pandas Series is not.
    if index is None or callable(index):
        return None
    if not hasattr(index, "tolist") or not hasattr(clients, "tolist"):
        return None
    names = index.tolist()
    if not names or not all(isinstance(name, str) for name in names):
        return None
    # Rows are matched by name, so that their order does not matter.
    row_of = {name: row for row, name in enumerate(store.samples.name)}
    unknown_names = [name for name in names if name not in row_of]
    if unknown_names or len(set(names)) < len(names):
        first = Counter(names).most_common(1)[0][0]
        wrong = "which occurs more than once"
        if unknown_names:
            first = unknown_names[0]
            wrong = f"which is not a row of {store.path.name} (unknown names in all: {len(unknown_names):,})"
        example = store.samples.name[0]
        raise UsageError(
            f"The index of the pandas Series of clients contains {first!r}, {wrong}.",
            f"Use each row name of the store only once, for example {example!r}. Or give the "
            "values alone, series.to_numpy(), in the order of Store.samples.name.",
        )
    values: list[Any] = [None] * store.rows
    for name, client in zip(names, clients.tolist(), strict=True):
        values[row_of[name]] = client
    return Group.of(values)


def _returned(clients: object) -> object:
    """The return value of a user's function of the store. Raises UsageError if it does not assign rows to clients."""
    usable = isinstance(clients, Iterable)
    if isinstance(clients, str | Path):
        usable = is_given(clients)
    if not usable:
        raise UsageError(
            f"The function that assigns rows to clients returned {clients!r:.60}.",
            'It must return a dictionary with the rows of each client, such as {"north": [0, 1], "south": [2, 3]}; or '
            "a list with the client of each row of the store; or the path of a .csv file with the columns name,client "
            "or name,client,split.",
        )
    return clients


def read_clients(path: Path, store: Store) -> tuple[Group, np.ndarray | None]:
    """The client of each row, and its split code (-1 for a row without a line), as a CSV gives them.

    The splits are None if the CSV has no column of splits. Raises UsageError with the line for another header, an
    unknown or repeated name, and an unknown split.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except FileNotFoundError:
        raise UsageError(
            f"There is no file {path}.",
            f"Give a CSV file with the client of each row. {_FIRST_LINE}",
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} could not be read: {error.strerror}.", "Give a CSV file that you may read."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV file in UTF-8: {error}.", _FIRST_LINE) from None
    # The first line names the columns. Without a column of splits, the scheme draws the test rows.
    head = []
    if lines:
        head = [column.strip().lower() for column in lines[0]]
    example = store.samples.name[0]
    if head not in (["name", "client"], ["name", "client", "split"]):
        columns = ", ".join(head) or "(none)"
        raise UsageError(f"The first line of {path} has the wrong columns: {columns}.", _FIRST_LINE)
    has_splits = len(head) == 3
    if len(lines) < 2:
        example_line = f"{example},north"
        if has_splits:
            example_line += ",train"
        first_line = ",".join(head)
        raise UsageError(
            f"{path} has only its first line, {first_line}.",
            f"Add a line for each row that a client holds, for example {example_line}",
        )
    row_of = {name: row for row, name in enumerate(store.samples.name)}
    client = [""] * store.rows
    split = np.full(store.rows, -1, np.int8)
    codes = {"train": 0, "training": 0, "test": 1, "validation": 2, "val": 2, "valid": 2}
    for number, cells in enumerate(lines[1:], start=2):
        fields = [cell.strip() for cell in cells]
        if len(fields) != len(head):
            raise UsageError(
                f"Line {number:,} of {path} has {len(fields)} values, but the first line names {len(head)} columns.",
                "Give one value for each column. Put a value that contains a comma into double quotes.",
            )
        name = fields[0]
        row = row_of.get(name)
        if row is None:
            raise UsageError(
                f"Line {number:,} of {path}: {store.path.name} has no row called {name!r}.",
                f"Use the row names of the store, for example {example!r}; `fedcache export` shows them.",
            )
        if client[row]:
            raise UsageError(
                f"Line {number:,} of {path} repeats the row {name!r}.",
                "Give each row only one client.",
            )
        client[row] = fields[1]
        if has_splits:
            code = codes.get(fields[2].lower())
            if code is None:
                raise unknown(
                    "split",
                    fields[2],
                    codes,
                    hint=f"Line {number:,} of {path}: the split must be train, test or validation.",
                )
            split[row] = code
    group = Group.of(client)
    if has_splits:
        return group, split
    return group, None


# Hints with a command for the store that the user named, and not for the last one used.


_PARTITION_COMMAND = re.compile(r"fedcache partition(?= --(?!help))")
"""``fedcache partition`` before an option other than ``--help``."""


@contextmanager
def hints_name_the_store(*, dataset: str | None, store: str | Path | None) -> Iterator[None]:
    """Add ``--dataset`` or ``--store`` to ``fedcache partition`` in the hints of errors raised inside.

    Args:
        dataset: value of ``--dataset``; None if it was not given.
        store: value of ``--store``; None if it was not given.
    """
    try:
        yield
    except FedcacheError as error:
        words = ["fedcache partition"]
        for option, value in (("--dataset", dataset), ("--store", store)):
            if value is not None:
                words += [option, shell_word(value)]
        command = " ".join(words)
        error.hint = _PARTITION_COMMAND.sub(lambda _: command, error.hint)
        raise


# The values of the argument ``hold_out``.


def with_whole_value(store: Store, arguments: Facts) -> Facts:
    """Arguments in which ``hold_out`` is one value, if its text is a value with a comma and not several values."""
    word = arguments.get("hold_out")
    by = arguments.get("by") or "domain"
    if not isinstance(word, str) or "," not in word or not isinstance(by, str):
        return arguments
    values = column_of(store, by).words
    several = all(part.strip() in values for part in word.split(","))
    if word.strip() in values and not several:
        return {**arguments, "hold_out": (word.strip(),)}
    return arguments


def check_held_out_domains(store: Store, arguments: Record) -> None:
    """Raise UsageError if a held-out value is not a domain, unless the argument ``by`` names another column.

    The error names the columns that have the value.
    """
    values = arguments.get("hold_out")
    if arguments.get("by") is not None or not isinstance(values, tuple | list):
        return
    for value in values:
        if value in store.samples.domains:
            continue
        values_of = {"class": store.samples.classes}
        for name in store.groups:
            values_of[name] = store.group(name).words
        columns = [name for name, known in values_of.items() if value in known]
        hint = "To hold out values of another column: --by COLUMN"
        if columns:
            options = " or ".join(f"--by {shell_word(name)}" for name in columns[:4])
            hint = f"{value!r} is a value of another column: {options}"
        domains = ", ".join(store.samples.domains[:12])
        raise UsageError(
            unknown("value of domain", str(value), store.samples.domains).message,
            f"Without --by, --hold-out takes domains: {domains}. {hint}",
        )
