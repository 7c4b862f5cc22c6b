"""``fedcache partition`` assigns rows to clients, and ``fedcache shard`` writes one store per client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.help import COMMON
from fedcache.commands.options import (
    OF_FIELDS,
    ConfigFile,
    Dataset,
    Given,
    SchemeArguments,
    StorePlace,
    command,
    partition_config,
    pick,
    split_list,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import Home, PartitionConfig, TrainConfig, read_file
from fedcache.errors import UsageError, shell_word
from fedcache.extract.planning.find_store import more_features, need_store
from fedcache.federate.partition.partition import ClientRow
from fedcache.report.figure_data import draw
from fedcache.runs.partitions import (
    columns_of,
    given_partition,
    hints_name_the_store,
    load_partition,
    make_partition,
    need_scheme,
    report_notes,
    write_shards,
)
from fedcache.runs.store_choice import train_example

LISTED = 100_000
"""Maximum number of clients that ``--json`` describes."""

SHOWN = 20
"""Maximum number of clients that the terminal shows."""

MANY_ROWS = 1_000_000
"""Number of rows from which a note says that rows are being assigned, because this takes seconds."""


@command("partition", pick(PartitionConfig), pick(SchemeArguments), pick(TrainConfig, "domain"))
def partition(
    observer: TerminalObserver,
    given: Given,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name under which the partition is saved.",
            show_default="made of scheme, clients and seed",
        ),
        COMMON,
    ] = None,
    clients_csv: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Read the assignment of rows to clients from a CSV file with the columns name,client[,split].",
            show_default="none",
        ),
        COMMON,
    ] = None,
    dataset: Dataset = None,
    store: StorePlace = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Also write the partition to a file, which can be shared without the data. The file is "
            "JSON if its name ends in .json.",
        ),
        COMMON,
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw a figure of clients and classes (png, svg or pdf)."),
        COMMON,
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Replace a partition of the same name that assigns the rows differently.",
        ),
    ] = False,
    config: ConfigFile = None,
) -> CommandResult:
    """Assign the rows of a store to clients and save the assignment.

    Example: fedcache partition --scheme dirichlet --clients 100 --alpha 0.1 --plot dots.png
    Example: fedcache partition --by hospital_id --min-rows 20
    """
    resolved = partition_config(read_file(config, observer.note), given)
    arguments = resolved.arguments
    domains = split_list(given["domain"], "--domain")
    if domains:
        arguments["domain"] = domains
    if clients_csv is not None and resolved.scheme is not None:
        raise UsageError("--from and --scheme are both given.", "Leave one of them out.")
    if clients_csv is None:
        need_scheme(resolved.scheme, arguments)  # before a store is looked for
    opened = need_store(Home.from_environment(), path=store, dataset=dataset, observer=observer)
    if opened.address is not None and out is None:
        raise UsageError(
            f"{opened.address} is a published store, in which no partition can be saved.",
            "Save it to a file:  -o FILE.partition",
        )
    if opened.rows >= MANY_ROWS:
        observer.note(f"Assigning {opened.rows:,} rows to clients ...")
    options = {
        "seed": resolved.seed,
        "name": name,
        "replace": replace,
        **arguments,
    }
    with hints_name_the_store(dataset=dataset, store=store):
        if clients_csv is not None:
            made = given_partition(opened, clients_csv, **options)
        else:
            made = make_partition(opened, resolved.scheme, **options)
    saved = name or made.default_name()
    if opened.address is not None:
        saved = str(out)
    columns = columns_of(opened)
    if out is not None:
        made.save(out)
    if plot is not None:
        draw(made, columns, plot)
    clients = len(made.clients)
    most = SHOWN
    if observer.as_json:
        most = LISTED
    rows = made.describe(columns, most)
    validated = made.validation is not None
    described = []
    for r in rows:
        client = {
            "name": r.client,
            "train": r.train,
            "test": r.test,
            "classes": r.classes,
            "counts": list(r.counts),
        }
        if validated:
            client["validation"] = r.validation
        described.append(client)
    data = {
        "name": saved,
        "scheme": made.scheme,
        "args": dict(made.args),
        "seed": made.seed,
        "digest": made.digest,
        "dropped": made.dropped,
        "notes": list(made.notes),
        "store": opened.place,
        "clients": described,
        "clients_left_out": clients - len(rows),
    }
    if made.validation is not None:
        data["validation"] = len(made.validation)
    report_notes(made, observer)
    saved_name = shell_word(saved)
    following = f"fedcache train --partition {saved_name} {train_example(opened)}"
    if opened.address is not None:
        following += f" --store {shell_word(opened.address)}"
    lines = [made.summary(), f"Saved as {saved}:  {following}"]
    if plot is not None:
        lines.append(str(plot))
    shown = table_of_clients(rows, clients, validated=validated)
    return CommandResult(data, lines, renderables=[shown])


def table_of_clients(rows: Sequence[ClientRow], clients: int, *, validated: bool) -> TextTable:
    """The rows of each client, or of the first ``SHOWN`` clients.

    Args:
        rows: rows of the first clients, or of all clients.
        clients: number of all clients.
        validated: whether the clients have validation rows.
    """
    title = ""
    if clients > SHOWN:
        title = f"the first {len(rows)} of {clients} clients"
    names = ["client", "train", "test", "classes", "rows of each class"]
    if validated:
        names.insert(2, "validation")
    cells = []
    for r in rows:
        counts = ""
        # More classes would make the cell too wide.
        if len(r.counts) <= 20:
            counts = " ".join(map(str, r.counts))
        cell = [r.client, r.train, r.test, r.classes, counts]
        if validated:
            cell.insert(2, r.validation)
        cells.append(cell)
    return TextTable(title, names, cells, right=names[1:-1])


@command("shard")
def shard(
    observer: TerminalObserver,
    partition: Annotated[
        str,
        typer.Option(
            "--partition",
            "-p",
            help="Name of a saved partition, or a partition file.",
            autocompletion=OF_FIELDS["partition"],
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for the client stores.", show_default="next to the store"
        ),
    ] = None,
    dataset: Dataset = None,
    store: StorePlace = None,
) -> CommandResult:
    """Write one ordinary store per client, so that each store can be moved to another machine.

    Example: fedcache shard --partition iid-m10-s0 --out sites
    """
    opened = need_store(Home.from_environment(), path=store, dataset=dataset, observer=observer)
    loaded = load_partition(opened, partition)
    target = write_shards(opened, loaded, out, observer)
    made = sorted(str(p) for p in target.glob("*.zarr"))
    following = f"fedcache train --clients-from {shell_word(target)} --method fed3r"
    # Arrays of uint8 are pixels, not features.
    if all(a.dtype == "uint8" for a in opened.arrays.values()):
        more = more_features(opened, "efficientnet-lite0")
        following = (
            f"Training on client stores needs features, but these stores have none. First run {more}, then "
            "shard again."
        )
    lines = [f"{len(made)} client stores in {target}", following]
    return CommandResult({"path": str(target), "stores": made}, lines)
