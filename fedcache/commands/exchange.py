"""Commands that exchange features with other programs and people: ``ingest``, ``export`` and ``publish``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import (
    OF_FIELDS,
    REMOTE,
    Backbones,
    Dataset,
    Given,
    StoreDir,
    StorePlace,
    command,
    configured,
    pick,
    split_list,
)
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.config import Home
from fedcache.errors import UsageError, shell_word
from fedcache.extract.planning.find_store import need_store
from fedcache.extract.planning.ingest import describe_ingested, ingest_file
from fedcache.progress import byte_size
from fedcache.report.store_card import store_card
from fedcache.runs.store_choice import chosen_arrays
from fedcache.store.export import export as write_file
from fedcache.store.publish import check_target
from fedcache.store.publish import publish as publish_store
from fedcache.tables.roles import ColumnChoice


@command("ingest", pick(ColumnChoice))
def ingest(
    observer: TerminalObserver,
    given: Given,
    file: Annotated[
        Path,
        typer.Argument(
            help="File with features and labels (npz, npy, h5, parquet, csv, tsv, feather, json, jsonl, "
            "safetensors or pt), or an output folder of clip-retrieval."
        ),
    ],
    name: Annotated[
        str,
        typer.Option(help="Name of the dataset, for --dataset NAME in other commands."),
    ],
    store: StoreDir = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Replace the stored dataset of the same name. Its partitions are deleted.",
        ),
    ] = False,
    drop_nan: Annotated[
        bool,
        typer.Option(
            "--drop-nan", help="Leave out rows with NaN or infinite features, and list them."
        ),
    ] = False,
) -> CommandResult:
    """Import your own embeddings into a store.

    Columns are detected by name: features (embeddings, X, features/BACKBONE, text/BACKBONE, or columns f0 .. f511),
    labels (label, y, target, class), split, is_train, is_test, name (id, path), domain, class_names. Names of
    arrays may contain the split (X_train, y_test, train/data). Every other column of words or whole numbers becomes a
    group column for --by, unless nearly every row has a different value. Without a split, the test set is a fifth of
    each class: the rows with the smallest uids.

    Example: fedcache ingest embeddings.npz --name mine
    """
    home = Home.from_environment()
    choice = configured(ColumnChoice, given)
    done = ingest_file(
        home,
        file,
        name,
        store,
        replace=replace,
        choice=choice,
        drop_nan=drop_nan,
        observer=observer,
    )
    made = done.store
    lines, following = describe_ingested(made, home, name)
    data = {
        "path": str(made.path),
        "dataset": made.dataset,
        "images": made.rows,
        "ok": made.rows_ok,
        "arrays": sorted(made.arrays),
        "groups": made.groups,
        "not_used": done.left_out,
        "columns": done.notes,
        "notes": lines,
        "next": following,
    }
    return CommandResult(data, [*lines, str(made.path), following])


@command("export")
def export(
    observer: TerminalObserver,
    out: Annotated[
        Path | None,
        typer.Argument(
            help="File to write: .npz, .h5, .parquet or .safetensors.",
        ),
    ] = None,
    named: Annotated[
        Path | None, typer.Option("--out", "-o", help="The same as the argument OUT.")
    ] = None,
    store: StorePlace = None,
    dataset: Dataset = None,
    backbones: Backbones = None,
) -> CommandResult:
    """Write the features, labels, domains, splits and groups of readable rows, and text features, to one file.

    Example: fedcache export features.parquet --backbones efficientnet-lite0
    """
    files = [path for path in (out, named) if path is not None]
    if len(files) != 1:
        raise UsageError(
            f"export writes one file, but {len(files)} are given.", "fedcache export features.npz"
        )
    opened = need_store(Home.from_environment(), path=store, dataset=dataset, observer=observer)
    keys = chosen_arrays(opened, split_list(backbones))
    out = files[0]
    rows = write_file(opened, out, keys)
    line = f"{rows:,} rows of {', '.join(keys)}: {out}"
    return CommandResult({"path": str(out), "rows": rows, "arrays": keys}, [line])


@command("publish")
def publish(
    observer: TerminalObserver,
    store: Annotated[
        str,
        typer.Argument(
            help="A store, its name, or the address of a published store.",
            autocompletion=OF_FIELDS["store"],
        ),
        REMOTE,
    ],
    target: Annotated[
        str,
        typer.Argument(help="A folder, or a bucket and prefix: s3://, gs:// or az://."),
        REMOTE,
    ],
    anonymous_names: Annotated[
        bool,
        typer.Option(
            "--anonymous-names",
            help="Replace row names by numbers, because file names can be names of people.",
        ),
    ] = False,
) -> CommandResult:
    """Publish a store as a few large files that fedcache, zarr and xarray can read over a network.

    Run the same command again to complete an interrupted publication, or to publish a store that has changed. Names
    of rows, classes and groups are published with the features; --anonymous-names replaces the names of rows.

    Example: fedcache publish digits-1a2b3c4d.zarr s3://bucket/digits
    """
    place = check_target(target)
    home = Home.from_environment()
    opened = need_store(home, path=store)
    card = store_card(opened, home, anonymous_names=anonymous_names)
    made = publish_store(opened, place, card, observer, anonymous_names=anonymous_names)
    arrays = ", ".join(opened.arrays)
    size = byte_size(made.bytes)
    lines = [
        f"Published {opened.rows:,} rows of {arrays}: {made.files:,} files, {size}. "
        f"This command wrote {made.written:,} of the files.",
        f"fedcache inspect {shell_word(made.place)}",
    ]
    return CommandResult(made.to_dict(), lines)
