"""``fedcache extract`` computes features, and ``fedcache join`` assembles parts of an extraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import (
    ConfigFile,
    EngineName,
    Given,
    RayAddress,
    SchemeArguments,
    command,
    complete_datasets,
    configured,
    engine_of,
    help_of,
    one_value,
    pick,
    rare,
    scheme_arguments,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import (
    CLIENTS,
    DATA,
    RESULTS,
    ExtractConfig,
    Home,
    PartitionConfig,
    option,
    read_file,
)
from fedcache.errors import Exit, UsageError
from fedcache.extract.datasets import folder_spec
from fedcache.extract.extract_dataset import Extraction, describe_growth
from fedcache.extract.extract_dataset import extract as run
from fedcache.extract.planning.parts import join as join_parts
from fedcache.extract.planning.plan import quoted
from fedcache.extract.recipe import IMAGES, one_of, part_read
from fedcache.parsing import Record, counted, visible
from fedcache.process import keep_freed_memory, stopped_by_signals
from fedcache.runs.partitions import make_partition, write_shards
from fedcache.store.manifest import QUARANTINE, join_command

SHOWN = 10
"""Number of unreadable images that are named on the terminal; quarantine.jsonl names all."""


@dataclass(frozen=True)
class ComputeOptions:
    """Options of ``extract`` outside of the configuration: whether to compute, and what to reuse."""

    dry_run: bool = option(
        False, "Print the plan, its size and its time, without computing.", RESULTS, common=True
    )
    wait: bool = option(False, "Wait if another process is writing the same features.", RESULTS)
    fresh: bool = option(
        False,
        "Compute the features again, also if they are stored, and reuse no earlier store.",
        RESULTS,
    )
    rehash: bool = option(False, "Recompute the cached digests of data and weights.", RESULTS)


@command(
    "extract",
    pick(ExtractConfig),
    rare(pick(PartitionConfig, "clients", "seed", "options")),
    rare(pick(SchemeArguments)),
    pick(ComputeOptions),
)
def extract(
    observer: TerminalObserver,
    given: Given,
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="DATASET",
            help="A folder or an archive of images, or a dataset as for --dataset.",
            autocompletion=complete_datasets,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Store directory to write.",
            rich_help_panel=DATA,
            show_default="$FEDCACHE_HOME/stores/DATASET-DIGEST.zarr",
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="Also write one store per client, with rows assigned by this scheme.",
            rich_help_panel=CLIENTS,
            show_default="none",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help="Where --partition writes the client stores.",
            rich_help_panel=CLIENTS,
            show_default="next to the store",
        ),
    ] = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    config: ConfigFile = None,
) -> CommandResult:
    """Run frozen backbones once over a dataset and keep the features.

    An interrupted extraction resumes; a finished one returns at once. With --part, several processes on one or many
    machines each compute one part; `fedcache join` assembles the parts.

    Example: fedcache extract --dataset folder:photos.zip --backbones efficientnet-lite0 --size 128
    """
    keep_freed_memory()  # for extraction in this process; worker processes call it themselves
    given = {**given, "dataset": dataset_of(named, given["dataset"])}
    compute = configured(ComputeOptions, given)
    section = read_file(config, observer.note).get("extract")
    resolved = configured(ExtractConfig, given, section)
    if partition is None:
        refuse_scheme_options(given, out)
    elif resolved.part is not None:
        raise UsageError(
            "--partition needs a whole store, but --part makes only a part of a store.",
            "Join the parts, then write client stores:  fedcache shard --help",
        )
    cluster = engine_of(engine, ray_address)
    with stopped_by_signals(observer.note) as stop:
        done = run(
            resolved,
            Home.from_environment(),
            store=store,
            observer=observer,
            stop=stop,
            dry_run=compute.dry_run,
            wait=compute.wait,
            fresh=compute.fresh,
            rehash=compute.rehash,
            engine=cluster,
        )
    answer = done.to_dict()
    lines = [describe_line(done), *growth_lines(done), *text_lines(done), *cut_lines(done)]
    lines += bad_lines(done.bad, done.path, done.holds)
    code = Exit.OK
    if not compute.dry_run:
        if done.part is not None:
            following = join_command(done.path)
            lines.append(f"This is {done.part}. When all parts are finished:  {following}")
        if partition is not None:
            count, target = write_client_stores(done, partition, given, out, observer)
            answer["shards"] = str(target)
            lines.append(f"{count} client stores: {target}")
        if done.images > done.ok:
            code = Exit.QUARANTINED
        if done.skipped:
            skipped = ", ".join(done.skipped)
            lines.append(f"Skipped for missing weights: {skipped}")
    lines.append(str(done.path))
    return CommandResult(answer, lines, code, [arrays_table(done)])


@command("join")
def join(
    observer: TerminalObserver,
    parts: Annotated[
        list[Path],
        typer.Argument(help="All parts in any order: folders, or names of `fedcache ls`."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The store to write.",
            show_default="$FEDCACHE_HOME/stores/DATASET-DIGEST.zarr",
        ),
    ] = None,
    max_bad: Annotated[str, typer.Option(help=help_of(ExtractConfig, "max_bad"))] = "1%",
) -> CommandResult:
    """Join the parts of an extraction (`extract --part 1/4` and so on) to one store.

    Except for its history, the store has the same bytes as a store that one process writes. Every chunk is verified.
    Chunks are hard links if parts and store are on one disk, and copies otherwise. Repeat an interrupted join to
    continue it.

    Example: fedcache join node-*/photos.part-*-of-4.zarr -o photos.zarr
    """
    store = join_parts(parts, out, Home.from_environment(), max_bad, observer)
    data = {
        "path": str(store.path),
        "parts": len(parts),
        "dataset": store.dataset,
        "images": store.rows,
        "ok": store.rows_ok,
        "arrays": sorted(store.arrays),
        "text": sorted(store.texts),
    }
    code = Exit.OK
    if store.rows_ok < store.rows:
        code = Exit.QUARANTINED
    joined = counted(len(parts), "part")
    arrays = ", ".join(sorted(store.arrays))
    lines = [f"{joined} joined: {arrays} of {store.rows_ok:,} rows."]
    lines += bad_lines(store.quarantined(), store.path)
    lines.append(str(store.path))
    return CommandResult(data, lines, code)


def dataset_of(named: str | None, spec: str | None) -> str | None:
    """The dataset that was named as an argument or by ``--dataset``. Raises UsageError if they differ."""
    chosen = one_value(named, spec, "--dataset")
    if named is None:
        return chosen
    return folder_spec(named)


def refuse_scheme_options(given: Given, out: str | None) -> None:
    """Raise UsageError if options of a partition scheme are given; for a command without ``--partition``."""
    partition_options = (out, given["clients"], given["seed"])
    if scheme_arguments(given) or any(value is not None for value in partition_options):
        raise UsageError(
            "Options of a partition scheme were given without --partition, which writes one store per "
            "client.",
            "For example --partition iid --clients 10. To make a partition later: fedcache partition --help",
        )


def write_client_stores(
    done: Extraction, scheme: str, given: Given, out: str | None, observer: TerminalObserver
) -> tuple[int, Path]:
    """Assign rows to clients and write one store per client; returns the number of stores and their folder."""
    config = PartitionConfig(scheme, given["clients"], given["seed"] or 0, scheme_arguments(given))
    made = make_partition(done.store, scheme, seed=config.seed, **config.arguments)
    return len(made.clients), write_shards(done.store, made, out, observer)


def describe_line(done: Extraction) -> str:
    """A sentence on the computed features, or on the plan of a dry run."""
    holds = done.holds
    quarantined = ""
    # In a plan that computes features, ``ok`` is 0, because no image was read yet.
    if done.images > done.ok and done.ok:
        quarantined = f", {done.images - done.ok} quarantined"
    if done.decoded:
        rate = f"{done.rate:,.1f} {holds}/s with {counted(done.workers, 'process')}"
        return (
            f"{counted(done.decoded, one_of(holds))} in {done.seconds:,.1f} s: {rate}; reading and the "
            f"model used {done.busy:.0%} of the cores{quarantined}."
        )
    if done.part is not None and not done.images:
        return f"{done.part} holds no {holds}, as there are fewer chunks than parts. Join it like the others."
    plan = f"Plan for {done.images:,} {holds}"
    if done.part is not None:
        plan = f"Plan for {done.part} with {done.images:,} {holds}"
    if done.seconds:
        return f"{plan}: about {done.rate:,.0f} {holds}/s, {done.seconds:,.0f} s."
    if done.growth is not None and not done.growth["forward_passes"]:
        return f"{plan}: all of them have features in the earlier store."
    if any(a["state"] == "to compute" for a in done.arrays):
        return f"{plan}; the speed is unknown because weights are missing."
    if any(t["state"] == "to compute" for t in done.text):
        return (
            f"The features of all {done.images:,} {holds} are stored already; only text features will be "
            "computed."
        )
    images = f"{done.ok:,} of {done.images:,} {holds}{quarantined}"
    if any(t["state"] == "computed" for t in done.text):
        return f"The features of all {holds} were stored already: {images}. Text features were computed."
    return f"All features are stored already: {images}. Nothing was computed."


def growth_lines(done: Extraction) -> list[str]:
    """A sentence on rows added to or removed from the dataset since an earlier extraction; [] without such rows."""
    if done.growth is not None:
        growth = describe_growth(done.growth, done.holds)
        return [f"Compared with the earlier store of this dataset: {growth}."]
    if done.vanished:
        return [
            f"{done.vanished:,} rows of {done.holds} that are no longer in the dataset are kept but not "
            "used."
        ]
    return []


def text_lines(done: Extraction) -> list[str]:
    """A line for each backbone whose current prompt templates change. After a dry run: would change."""
    words = {
        "computed": "computed; these are the current templates now",
        "made current": "stored before; these are the current templates again",
        "to compute": "to be computed",
    }
    lines = []
    for text in done.text:
        state = words.get(text["state"])
        if state is not None:
            lines.append(f"Text of {text['backbone']}: {quoted(text['templates'])}, {state}.")
    return lines


def cut_lines(done: Extraction) -> list[str]:
    """A line for each backbone that reads only a part of some texts or sounds, with their number."""
    recipes = {a["backbone"]: a["recipe"] for a in done.arrays}
    one = one_of(done.holds)
    lines = []
    for name, count in done.cut.items():
        part = part_read(recipes[name])
        lines.append(
            f"{name} reads {part} of a {one}: the rest of {count:,} of the {counted(done.decoded, one)} that this run "
            "read is ignored."
        )
    return lines


def bad_lines(bad: Sequence[Record], store: Path, holds: str = IMAGES) -> list[str]:
    """Names of the first ``SHOWN`` unreadable images, with reasons, and the file with all of them; [] for none."""
    if not bad:
        return []
    images = counted(len(bad), one_of(holds))
    lines = [f"{images} could not be read; training, scoring and export skip unreadable rows:"]
    lines += [f"  {visible(entry['name'])}: {entry['reason']}" for entry in bad[:SHOWN]]
    more = ""
    if len(bad) > SHOWN:
        more = f"and {len(bad) - SHOWN:,} more: "
    return [*lines, f"  {more}{store / QUARANTINE}"]


def arrays_table(done: Extraction) -> object:
    """A table of the arrays of an extraction."""
    rows = []
    for a in done.arrays:
        backbone = f"{a['backbone']}@{a['recipe']['size']}"
        shape = "x".join(map(str, a["shape"]))
        batches = a.get("forward_batches", "")
        rows.append((a["key"], backbone, shape, a["dtype"], a["state"], batches))
    return TextTable(
        "",
        ("array", "backbone", "shape", "dtype", "before this run", "forward batches"),
        rows,
        right=("forward batches",),
    )
