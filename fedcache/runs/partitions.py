"""Partitions of a store: made, saved in it, drawn, and cut into one store per client."""

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

from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    StoreError,
    UsageError,
    shell_word,
    unknown,
)
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
from fedcache.progress import Detail, Observer
from fedcache.store import export
from fedcache.store.catalog import ingest_command, is_ingested
from fedcache.store.chunks import mapped, read_content
from fedcache.store.files import sha256_hex
from fedcache.store.manifest import PARTITION_SUFFIXES, partition_file, partition_parts
from fedcache.store.store import Store, column_of
from fedcache.tables.groups import Group

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method

# A saved partition whose file is damaged: the command that makes it again, and whether what was
# made is that one.


@contextmanager
def with_its_command(store: Store, name: str) -> Iterator[None]:
    """Errors of a damaged partition name the command that makes it again, as far as its words can still be read."""
    try:
        yield
    except CorruptionError as error:
        error.hint = f"To make it again:  {command_of(store, name)}"
        raise


def command_of(store: Store, name: str) -> str:
    """The command that makes a saved partition; its words are sealed apart from its rows, so that these may be damaged.

    Where they cannot be read, or where a file or a shard said the rows, the scheme is left to the user.
    """
    made = "fedcache partition --scheme SCHEME"
    with suppress(FedcacheError, OSError, ValueError):
        raw = mapped(store.path / partition_file(store.path, store.manifest, name))
        words = words_of(check_words(read_content(raw), name))
        if words["scheme"] in SCHEMES:
            made = SCHEMES[words["scheme"]].command(words["args"])
            if words["seed"]:
                made += f" --partition-seed {words['seed']}"
    command = f"{made} --name {shell_word(name)}"
    if "SCHEME" in made:
        return f"{command} --replace"
    return command


def check_same(store: Store, made: Partition, name: str) -> None:
    """Let a partition take the place of the damaged one that it is, and of no other. Raises UsageError."""
    relative, parts = partition_parts(name, made.to_file())
    if store.manifest.files.get(relative) != sha256_hex(*parts):
        raise UsageError(
            f"The partition {name!r} of {store.path.name} is damaged, and the new one differs from it.",
            f"To make it again:  {command_of(store, name)};  to replace it: --replace",
        )


def columns_of(store: Store) -> Columns:
    """The columns of a store that a partition may use: one entry per row, no features."""
    columns = {key: store.column(key) for key in ("label", "domain", "split", "ok", "uid")}
    held = store.manifest
    digest = str(store.dataset["digest"])
    return Columns(
        **columns, classes=held.classes, domains=held.domains, digest=digest, groups=store.group
    )


def typed_arguments(scheme: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Words from the command line as the types the scheme declares; unknown names are left for ``make`` to refuse."""
    if scheme not in parts.SCHEMES:
        raise unknown("partition scheme", scheme, parts.SCHEMES)
    kinds = {a.name: a.kind for a in parts.SCHEMES[scheme].arguments}
    return {name: _typed(kinds.get(name), value) for name, value in given.items()}


def _typed(kind: str | None, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # Values that do not fit stay as they are: the scheme refuses them with its own words.
    if kind == "names":
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if kind == "bool":
        return {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}.get(
            value.lower(), value
        )
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
    **arguments: Any,
) -> Partition:
    """Assign the store's readable rows to clients and save the partition in the store.

    Raises UsageError, for arguments that are unknown, out of range or infeasible (with the value that works), and for a
    name that other rows have.

    Args:
        store: whose rows are assigned.
        scheme: one of ``SCHEMES``; None where ``by`` or ``hold_out`` says it; in addition to those it assigns every
        value's rows.
        seed: of the draws.
        name: to save it under; default from scheme, arguments and seed (``dirichlet-a0.1-m100-s0``).
        save: whether to save it.
        replace: whether it may take the place of another partition of that name.
        arguments: of the scheme.
    """
    scheme, arguments = need_scheme(scheme, with_whole_value(store, arguments))
    typed = typed_arguments(scheme, arguments)
    check_held_out_domains(store, typed)
    made = parts.make(scheme, columns_of(store), seed=seed, **typed)
    if save:
        save_partition(store, made, name or made.default_name(), replace=replace)
    return made


def need_scheme(scheme: str | None, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Scheme and arguments as ``with_column`` understands them. Raises UsageError where they name no scheme."""
    chosen, given = with_column(scheme, arguments)
    if chosen is None:
        schemes = " | ".join(parts.SCHEMES)
        raise UsageError("No scheme was given.", f"--scheme {schemes}, or --by COLUMN")
    return chosen, given


def save_partition(store: Store, made: Partition, name: str, *, replace: bool = False) -> None:
    """Keep a partition in its store; a published store keeps none.

    Raises UsageError for a name that other rows have, unless they are replaced.
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
                f"{store.path.name} has a partition {name!r} with other rows, which runs may refer to.",
                f"Another name: --name {shell_word(name)}-2;  or replace it: --replace",
            )
    store.put_partition(name, made.to_file())


def report_notes(made: Partition, observer: Observer) -> None:
    """Report the notes of a partition; clients with fewer rows than requested are a warning."""
    for note in made.notes:
        if FEWER in note:
            observer.warn(note)
        else:
            observer.note(note)


def need_labels(method: Method, store: Store, rows: NDArray[np.int64] | None) -> None:
    """Refuse training rows without a label where the method reads labels.

    Raises UsageError, with what to add and the command that brings it.

    Args:
        method: what it reads.
        store: whose rows are trained on.
        rows: the rows assigned to clients; None before any are, when one label among all training rows will do.
    """
    if "labels" not in method.needs:
        return
    s = store.samples
    if s.label.min(initial=0) >= 0:
        return  # the usual case, without a gather of all rows
    # Train and test: some schemes assign both.
    if rows is None:
        label = s.label[(s.split <= 1) & (s.ok == 1)]
    else:
        label = s.label[rows]
    lacking = int((label < 0).sum())
    if not lacking or (rows is None and lacking < len(label)):
        return
    hint = ""
    if lacking < len(label):
        hint = (
            "A scheme that uses labels leaves these rows out, for example --scheme dirichlet; so does "
            "--by COLUMN with --option unlabelled=drop.\n"
        )
    if is_ingested(store):
        hint += f"Add labels to the file, then:  {ingest_command(store)}"
    else:
        hint += "Give the images a folder per class, or a label column in a .csv:  fedcache datasets info folder:PATH"
    rows_in_all = len(label)
    raise UsageError(
        f"{method.name} needs labels, but {lacking:,} of the {rows_in_all:,} rows of {store.path.name} "
        "have none.",
        hint,
    )


def single_class_warning(
    method: Method, label: NDArray[np.int32], classes: Sequence[str]
) -> str | None:
    """A warning where a method that reads labels gets training rows of one class only; None otherwise.

    ``label`` are those of the training rows, negative where there is none.
    """
    found = np.unique(label[label >= 0])
    if "labels" not in method.needs or len(found) != 1:
        return None
    return (
        f"There is only one class among the training rows ({classes[found[0]]}). Every model will predict "
        "this class, so the accuracy is meaningless. To see the counts:  fedcache inspect"
    )


def default_partition(
    method: Method, store: Store, config: PartitionConfig, domain: Sequence[str], observer: Observer
) -> tuple[str, dict[str, Any]]:
    """Scheme and arguments: those given, else the method's paper, and what the paper's scheme needs of the data."""
    # What the user names wins; what is left open is the setting of the method's paper, and is said.
    scheme, arguments = with_column(config.scheme, config.options)
    if scheme is None:
        scheme = method.defaults.scheme
        if scheme == "feature-shift" and len(domain or store.samples.domains) == 1:
            scheme = "label-shift"
            observer.note(
                Detail(
                    f"Partition: label-shift, because the feature shift of {method.name}'s paper needs more "
                    "than one domain."
                )
            )
        else:
            observer.note(
                Detail(
                    f"Partition: {scheme} (default of {method.name}'s paper; change with --scheme)."
                )
            )
    if scheme not in parts.SCHEMES:
        raise unknown("partition scheme", scheme, parts.SCHEMES)
    # The number of clients belongs to the method's paper, not to the scheme.
    known = {a.name: a.default for a in parts.SCHEMES[scheme].arguments}
    if config.clients is not None:
        arguments["clients"] = config.clients
    elif known.get("clients") is not None and "clients" not in arguments:
        clients = method.defaults.clients
        arguments["clients"] = clients
        observer.note(
            Detail(f"Clients: {clients} (default of {method.name}'s paper; change with --clients).")
        )
    if domain and "domain" in known:
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
) -> tuple[dict[int, Partition], str | None]:
    """One partition per seed: the saved one, or one made by the scheme (the same for all seeds, or drawn by each)."""
    if train.partition is not None:
        if config.scheme is not None:
            raise UsageError(
                "--partition and --scheme are both given.",
                "Give only one: a saved partition, or a scheme to make one.",
            )
        loaded = load_partition(store, train.partition)
        # A partition that was read from a file is kept with the run, as one that is made for it: the file may go.
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
        own = config.seed
        if repartition:
            own = seed
        try:
            made[seed] = make_partition(store, scheme, seed=own, save=False, **arguments)
        except InfeasibleError as error:
            # Only what the rules chose is scaled down; what the user requested is refused with the value that works.
            chosen_by_user = (
                config.scheme is not None or config.clients is not None or bool(config.options)
            )
            if chosen_by_user or not error.instead:
                raise
            scaled = ", ".join(f"{k} {v}" for k, v in error.instead.items())
            observer.note(f"{error.message} Scaled down to {scaled}.")
            arguments = {**arguments, **error.instead}
            made[seed] = make_partition(store, scheme, seed=own, save=False, **arguments)
    first = next(iter(made.values()))
    observer.note(Detail(first.summary() + "."))
    report_notes(first, observer)
    return made, None


def pinned_name(name: str, digest: str) -> str:
    """``NAME@DIGEST``: a saved partition by its name, as long as it has that digest."""
    return f"{name}@{digest[:16]}"


def load_partition(store: Store, name: str) -> Partition:
    """A saved partition by name, or a partition file by path; it must be of this store's dataset.

    Raises UsageError for an unknown name; StoreError for one of another dataset, or that was made again with other rows
    where ``NAME@DIGEST`` names those it had; CorruptionError for a damaged one.
    """
    pinned = ""
    # A file may have an @ in its path.
    if not Path(name).exists():
        name, _, pinned = name.partition("@")
    loaded = _load_partition(store, name)
    if not loaded.digest.startswith(pinned):
        digest = loaded.digest[:16]
        raise StoreError(
            f"The partition {name!r} of {store.path.name} was replaced by one with other rows: its digest "
            f"is {digest}, not {pinned}.",
            f"To train on the new one: --partition {shell_word(name)}",
        )
    return loaded


def _load_partition(store: Store, name: str) -> Partition:
    digest = str(store.dataset["digest"])
    if Path(name).is_file() and (name.endswith(PARTITION_SUFFIXES) or name not in store.partitions):
        return Partition.load(name, dataset=digest, rows=store.rows)
    if name not in store.partitions:
        raise unknown(
            "partition",
            name,
            store.partitions,
            hint="Saved partitions: "
            + (", ".join(sorted(store.partitions)) or "none; make one with `fedcache partition`"),
        )
    # The manifest vouches for the bytes, so that nobody waits for the digest of the JSON once more.
    with with_its_command(store, name):
        raw = store.partition_bytes(name)
        origin = f"partition {name}"
        return Partition.from_file(
            raw, dataset=digest, rows=store.rows, origin=origin, vouched=True
        )


def check_partitions(store: Store) -> dict[Path, str]:
    """Problems of saved partitions whose files match the manifest: a wrong digest of their rows.

    Returns:
        a sentence for each that is no partition of the store, or whose rows have another digest, by its file.
    """
    wrong = {}
    for name in store.partitions:
        raw = store.partition_bytes(name)
        file = store.path / partition_file(store.path, store.manifest, name)
        try:
            Partition.from_file(
                raw,
                dataset=str(store.dataset["digest"]),
                rows=store.rows,
                origin=f"partition {name}",
            )
        except FedcacheError as error:
            wrong[file] = f"{error.message} Remove the file; then:  fedcache repair"
    return wrong


def write_shards(
    store: Store,
    partition: Partition,
    out: str | Path | None,
    observer: Observer,
    name: str | None = None,
) -> Path:
    """One ordinary store per client: its training, test and validation rows, every array and text feature.

    Returns:
        the directory that holds them, as ``train --clients-from`` takes it.
    """
    if out:
        target = Path(out)
    elif store.address is not None:
        raise UsageError(
            f"{store.address} is a published store, so nothing is written next to it.",
            "Name a folder:  --out DIR",
        )
    else:
        name = name or partition.default_name()
        target = store.path.with_name(f"{store.path.stem}-{name}")
    observer.note(f"Writing {len(partition.clients)} client stores to {target}.")
    clients = list(partition.clients)
    rows = [(c.name, c.train, c.test) for c in clients]
    export.write_shards(store, rows, target, [c.validation for c in clients])
    return target


# Partitions that a user brings: a mapping, an array, a function or a CSV, on the rows of a store.


CSV = ".csv"
_FIRST_LINE = "Its first line should be: name,client   or: name,client,split"


def is_given(clients: object) -> bool:
    """Whether this says who holds which rows, and is not the name of a scheme."""
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
        store: whose rows are assigned.
        clients: name -> rows (``given.of_rows``), the client of each row in the order of ``Store.samples.name`` (a
            pandas Series whose index names the rows is taken by name), a CSV of ``name,client[,split]`` with the
            names of the rows, or a function that takes the store and returns one of these.
        seed: of what is drawn by ``arguments``.
        name: to save it under.
        replace: whether it may take the place of another partition of that name.
        arguments: of the scheme ``natural`` (``tests``, ``min_rows``, ``max_clients``), where clients are values; and
            ``validation``.

    Raises:
        UsageError for rows or names that are not there, and arguments that do not go with the form.
    """
    if callable(clients):
        clients = _returned(clients(store))
    columns = columns_of(store)
    typed = typed_arguments("natural", arguments)
    split = None
    if isinstance(clients, str | Path):
        clients, split = read_clients(Path(clients), store)
    # A mapping and a CSV with splits say which rows are for tests; values of a column do not.
    rows_are_given = isinstance(clients, Mapping) or split is not None
    validation = None
    if rows_are_given:
        validation = typed.pop("validation", None)
    if rows_are_given and typed:
        raise UsageError(
            f"{next(iter(typed))} is given together with the rows of each client.",
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
        numbered = all(word.rpartition("/")[2].isdigit() for word in store.samples.name)
        if named is None and not numbered:
            first = store.samples.name[0]
            note = f"clients are given in the order of the rows by name: the first is {first!r}"
            made = _with_note(made, note)
    save_partition(store, made, name or _free_name(store, made, replace), replace=replace)
    return made


def _with_note(made: Partition, note: str) -> Partition:
    return dataclasses.replace(made, notes=(*made.notes, note))


def _free_name(store: Store, made: Partition, replace: bool) -> str:
    """The partition's own name, with its digest behind where a saved one of that name has other rows."""
    name = made.default_name()
    if (
        replace
        or name not in store.partitions
        or store.partition(name).get("digest") == made.digest
    ):
        return name
    digest = made.digest[:8]
    return f"{name}-{digest}"


def _by_name(clients: Any, store: Store) -> Group | None:
    """The client of each row where a pandas Series names the rows in its index; None for clients in the rows' order.

    Rows that it does not name belong to no client. Raises UsageError for a name that no row has, or that comes twice.
    """
    # Only a pandas Series with names in its index is meant; a list has an `index` too, which is a method.
    index = getattr(clients, "index", None)
    if (
        index is None
        or callable(index)
        or not (hasattr(index, "tolist") and hasattr(clients, "tolist"))
    ):
        return None
    names = index.tolist()
    if not names or not all(isinstance(name, str) for name in names):
        return None
    # Rows are matched by name, so that their order does not matter.
    place = {name: row for row, name in enumerate(store.samples.name)}
    unknown_names = [name for name in names if name not in place]
    if unknown_names or len(set(names)) < len(names):
        if unknown_names:
            first = unknown_names[0]
            wrong = f"which is not the name of a row ({len(unknown_names):,} such names)"
        else:
            first = Counter(names).most_common(1)[0][0]
            wrong = "twice"
        example = store.samples.name[0]
        raise UsageError(
            f"The index of the clients has {first!r}, {wrong}.",
            f"Use the row names of the store, for example {example!r}; clients.to_numpy() is read in the "
            "order of Store.samples.name.",
        )
    values: list[Any] = [None] * store.rows
    for name, client in zip(names, clients.tolist(), strict=True):
        values[place[name]] = client
    return Group.of(values)


def _returned(clients: object) -> object:
    """The return value of a user's function of the store. Raises UsageError if it names no clients."""
    if (isinstance(clients, str | Path) and not is_given(clients)) or not isinstance(
        clients, str | Path | Iterable
    ):
        raise UsageError(
            f"The function of the store returned {clients!r:.60}.",
            'It must return the rows of each client, {"north": [0, 1], "south": [2, 3]}; the client of '
            "each row, as a list as long as the store; or the path of a .csv file with "
            "name,client[,split].",
        )
    return clients


def read_clients(path: Path, store: Store) -> tuple[Group, np.ndarray | None]:
    """The client of each row by a CSV, and the split of each (-1 where the CSV has no line) if it says so.

    Raises UsageError, with the line, for another header, a name that no row has or that comes twice, and other splits.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except FileNotFoundError:
        raise UsageError(
            f"There is no file {path}.",
            f"Give a CSV file that assigns rows to clients. {_FIRST_LINE}",
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} could not be read: {error.strerror}.", "Give a CSV file that you may read."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV file in UTF-8: {error}.", _FIRST_LINE) from None
    # The first line names the columns: without the split, the scheme chooses test rows.
    head = []
    if lines:
        head = [column.strip().lower() for column in lines[0]]
    example = store.samples.name[0]
    if head not in (["name", "client"], ["name", "client", "split"]):
        columns = ", ".join(head) or "(none)"
        raise UsageError(f"{path} has the columns {columns}.", _FIRST_LINE)
    has_splits = len(head) == 3
    if len(lines) < 2:
        line = f"{example},north"
        if has_splits:
            line += ",train"
        raise UsageError(
            f"{path} has no line after its first line, {','.join(head)}.",
            f"Add a line for each row that a client holds, for example {line}",
        )
    # Every line is checked, and the first wrong one is named with its number.
    place = {name: row for row, name in enumerate(store.samples.name)}
    client = [""] * store.rows
    split = np.full(store.rows, -1, np.int8)
    codes = {"train": 0, "training": 0, "test": 1, "validation": 2, "val": 2, "valid": 2}
    for number, cells in enumerate(lines[1:], start=2):
        fields = [cell.strip() for cell in cells]
        if len(fields) != len(head):
            raise UsageError(f"Line {number:,} of {path} has {len(fields)} fields.", _FIRST_LINE)
        row = place.get(fields[0])
        if row is None:
            called = fields[0]
            raise UsageError(
                f"Line {number:,} of {path}: {store.path.name} has no row called {called!r}.",
                f"Use the row names of the store, for example {example!r}; `fedcache export` shows them.",
            )
        if client[row]:
            raise UsageError(
                f"Line {number:,} of {path} names {fields[0]!r} again.", "Give each row one client."
            )
        client[row] = fields[1]
        if has_splits:
            if fields[2].lower() not in codes:
                raise unknown(
                    "split",
                    fields[2],
                    codes,
                    hint=f"Line {number:,} of {path}: the split must be train, test or validation.",
                )
            split[row] = codes[fields[2].lower()]
    if has_splits:
        return Group.of(client), split
    return Group.of(client), None


# Hints that hold a command for the store that the user named, and not for the one last used.


_DEALS = re.compile(r"fedcache partition(?= --(?!help))")


@contextmanager
def hints_name_the_store(*, dataset: str | None, store: str | Path | None) -> Iterator[None]:
    """Add ``--dataset`` or ``--store`` to ``fedcache partition`` in the hints of errors raised inside.

    Args:
        dataset: of ``--dataset``; None where it was not given.
        store: of ``--store``, likewise.
    """
    try:
        yield
    except FedcacheError as error:
        words = ["fedcache partition"]
        for option, value in (("--dataset", dataset), ("--store", store)):
            if value is not None:
                words += [option, shell_word(value)]
        command = " ".join(words)
        error.hint = _DEALS.sub(lambda _: command, error.hint)
        raise


# The values that ``hold_out`` names: their column, and a value with a comma in it.


def with_whole_value(store: Store, arguments: dict[str, Any]) -> dict[str, Any]:
    """``hold_out`` as one value where the whole word is one that has a comma in it, and not several values."""
    word = arguments.get("hold_out")
    by = arguments.get("by") or "domain"
    if not isinstance(word, str) or "," not in word or not isinstance(by, str):
        return arguments
    values = column_of(store, by).words
    several = all(part.strip() in values for part in word.split(","))
    if word.strip() in values and not several:
        return {**arguments, "hold_out": (word.strip(),)}
    return arguments


def check_held_out_domains(store: Store, arguments: Mapping[str, Any]) -> None:
    """Check held-out values: without a named column they must be domains.

    Raises UsageError for another value, with the columns that hold it.
    """
    values = arguments.get("hold_out")
    if arguments.get("by") is not None or not isinstance(values, tuple | list):
        return
    for value in values:
        if value in store.samples.domains:
            continue
        # Name the columns that hold the value, as one of them is probably meant.
        words = {
            "class": store.samples.classes,
            **{name: store.group(name).words for name in store.groups},
        }
        holding = [name for name, known in words.items() if value in known]
        hint = "--by COLUMN names another column."
        if holding:
            options = " or ".join(f"--by {shell_word(name)}" for name in holding[:4])
            hint = f"{value!r} is a value of another column: {options}"
        domains = ", ".join(store.samples.domains[:12])
        raise UsageError(
            unknown("value of domain", str(value), store.samples.domains).message,
            f"Without --by, --hold-out takes domains: {domains}. {hint}",
        )
