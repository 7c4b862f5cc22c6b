"""What clients are dealt: partitions of a store, made, saved in it, drawn, and cut into one store per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from fedcache.federate.partition.natural import with_column
from fedcache.federate.partition.partition import Columns, InfeasibleError, Partition
from fedcache.federate.partition.scheme import FEWER
from fedcache.progress import Observer
from fedcache.runs.damaged_partition import check_same, with_its_command
from fedcache.runs.held_out_values import check_held_out_domains, with_whole_value
from fedcache.store import export
from fedcache.store.catalog import ingest_command, is_ingested
from fedcache.store.manifest import PARTITION_SUFFIXES
from fedcache.store.sidecars import partition_file
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method


def columns_of(store: Store) -> Columns:
    """What a partition may know of a store: one entry per row, no features."""
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
    """Deal the store's readable rows to clients and save the partition in the store.

    Raises UsageError, for arguments that are unknown, out of range or infeasible (with the value that works), and for a
    name that other rows have.

    Args:
        store: whose rows are dealt.
        scheme: one of ``SCHEMES``; None where ``by`` or ``hold_out`` says it; beside those it deals every value's rows.
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
        raise UsageError(
            "No scheme was named.", f"--scheme {' | '.join(parts.SCHEMES)}, or --by COLUMN"
        )
    return chosen, given


def save_partition(store: Store, made: Partition, name: str, *, replace: bool = False) -> None:
    """Keep a partition in its store. Raises UsageError for a name that other rows have, unless they are replaced."""
    if not replace and name in store.partitions:
        try:
            digest = store.partition(name).get("digest")
        except CorruptionError:
            check_same(store, made, name)
        else:
            if digest == made.digest:
                return
            raise UsageError(
                f"{store.path.name} has a partition {name!r} with other rows, which runs may name.",
                f"Another name: --name {shell_word(name)}-2;  or in its place: --replace",
            )
    store.put_partition(name, made.to_file())


def report_notes(made: Partition, observer: Observer) -> None:
    """The notes of a partition; clients with fewer rows than were asked for are warned of."""
    for note in made.notes:
        (observer.warn if FEWER in note else observer.note)(note)


def need_labels(method: Method, store: Store, rows: NDArray[np.int64] | None) -> None:
    """Refuse training rows without a label where the method reads labels.

    Raises UsageError, with what to add and the command that brings it.

    Args:
        method: what it reads.
        store: whose rows are trained on.
        rows: the rows dealt to clients; None before any are, when one label among all training rows will do.
    """
    if "labels" not in method.needs:
        return
    s = store.samples
    if s.label.min(initial=0) >= 0:
        return  # the usual case, without a gather of all rows
    # Train and test: some schemes deal both.
    label = s.label[(s.split <= 1) & (s.ok == 1)] if rows is None else s.label[rows]
    lacking = int((label < 0).sum())
    if not lacking or (rows is None and lacking < len(label)):
        return
    raise UsageError(
        f"{method.name} needs labels, and {lacking:,} of the {len(label):,} rows of {store.path.name} have none.",
        (
            ""
            if lacking == len(label)
            else "A scheme that deals by class leaves them out, for example --scheme dirichlet; --by COLUMN does so "
            "with --option unlabelled=drop.\n"
        )
        + (
            f"Add labels to the file, then:  {ingest_command(store)}"
            if is_ingested(store)
            else "Give the images a folder per class, or a label column in a .csv:  fedcache datasets info folder:PATH"
        ),
    )


def single_class_warning(
    method: Method, label: NDArray[np.int32], classes: Sequence[str]
) -> str | None:
    """What is to be warned of where a method that reads labels is given training rows of one class only.

    ``label`` are those of the training rows, negative where there is none.
    """
    found = np.unique(label[label >= 0])
    if "labels" not in method.needs or len(found) != 1:
        return None
    return (
        f"There is only one class among the training rows ({classes[found[0]]}): whatever is trained says that one, "
        "and its accuracy says nothing. The counts:  fedcache inspect"
    )


def default_partition(
    method: Method, store: Store, config: PartitionConfig, domain: Sequence[str], observer: Observer
) -> tuple[str, dict[str, Any]]:
    """Scheme and arguments: those given, else the method's paper, and what the paper's scheme needs of the data."""
    scheme, arguments = with_column(config.scheme, config.options)
    if scheme is None:
        scheme = method.defaults.scheme
        if scheme == "feature-shift" and len(domain or store.samples.domains) == 1:
            scheme = "label-shift"
            observer.note(
                f"Partition label-shift: {method.name}'s paper shifts features, and there is one domain only."
            )
        else:
            observer.note(
                f"Partition {scheme}: the setting of {method.name}'s paper (--scheme chooses)."
            )
    if scheme not in parts.SCHEMES:
        raise unknown("partition scheme", scheme, parts.SCHEMES)
    known = {a.name: a.default for a in parts.SCHEMES[scheme].arguments}
    if config.clients is not None:
        arguments["clients"] = config.clients
    elif known.get("clients") is not None and "clients" not in arguments:
        arguments["clients"] = method.defaults.clients
        observer.note(
            f"Clients {method.defaults.clients}: the setting of {method.name}'s paper (--clients chooses)."
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
                "Give one: a saved partition, or a scheme to make one.",
            )
        loaded = load_partition(store, train.partition)
        # A partition that was read from a file is kept with the run, as one that is made for it: the file may go.
        name = train.partition.partition("@")[0]
        return dict.fromkeys(seeds, loaded), name if name in store.partitions else None
    scheme, arguments = default_partition(method, store, config, train.domain, observer)
    made: dict[int, Partition] = {}
    for seed in seeds:
        own = seed if repartition else config.seed
        if not repartition and made:
            made[seed] = next(iter(made.values()))
            continue
        try:
            made[seed] = make_partition(store, scheme, seed=own, save=False, **arguments)
        except InfeasibleError as error:
            # Only what the rules chose is scaled down; what the user asked for is refused with the value that works.
            chosen_by_user = (
                config.scheme is not None or config.clients is not None or bool(config.options)
            )
            if chosen_by_user or not error.instead:
                raise
            observer.note(
                f"{error.message} Scaled down: {', '.join(f'{k} {v}' for k, v in error.instead.items())}."
            )
            arguments = {**arguments, **error.instead}
            made[seed] = make_partition(store, scheme, seed=own, save=False, **arguments)
    first = next(iter(made.values()))
    observer.note(first.summary() + ".")
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
    name, _, pinned = (
        name.partition("@") if "@" in name and not Path(name).exists() else (name, "", "")
    )
    loaded = _load_partition(store, name)
    if not loaded.digest.startswith(pinned):
        raise StoreError(
            f"The partition {name!r} of {store.path.name} was made again with other rows: it has digest "
            f"{loaded.digest[:16]}, not {pinned}.",
            f"To train on it as it is now: --partition {shell_word(name)}",
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
    """What is wrong with saved partitions whose files are those of the manifest: the digests that reading believes.

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
    """One ordinary store per client: its rows to train, test and choose by, every array and text feature.

    Returns:
        the directory that holds them, as ``train --clients-from`` takes it.
    """
    target = (
        Path(out)
        if out
        else store.path.with_name(f"{store.path.stem}-{name or partition.default_name()}")
    )
    observer.note(f"Writing {len(partition.clients)} client stores to {target}.")
    clients = list(partition.clients)
    rows = [(c.name, c.train, c.test) for c in clients]
    export.write_shards(store, rows, target, [c.validation for c in clients])
    return target
