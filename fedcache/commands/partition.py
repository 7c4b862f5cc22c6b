"""``fedcache partition`` and ``fedcache shard``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands import options as o
from fedcache.commands.output import Answer, Story, answer, table
from fedcache.config import PartitionConfig, read_file, resolve
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.planning.find_store import need_store
from fedcache.federate.partition.partition import SCHEMES
from fedcache.report.partition_dots import draw
from fedcache.runs.partitions import (
    columns_of,
    load_partition,
    make_partition,
    partition_flags,
    report_notes,
    write_shards,
)


def partition(
    scheme: o.Scheme = None,
    clients: o.Clients = None,
    alpha: o.Alpha = None,
    shards: o.Shards = None,
    shots: o.Shots = None,
    option: o.Option = None,
    domain: o.Domain = None,
    seed: o.Seed = None,
    name: Annotated[str | None, typer.Option("--name", help="Name to save it under.")] = None,
    dataset: o.Dataset = None,
    store: o.StoreDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the partition file here, to share without the data.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw clients x classes as dots (png, svg or pdf).")
    ] = None,
    config: o.ConfigFile = None,
    json: o.Json = False,
) -> None:
    """Assign the rows of a store to clients and save who holds what.

    Example: fedcache partition --scheme dirichlet --clients 100 --alpha 0.1 --plot dots.png
    """

    def call(story: Story) -> Answer:

        given = partition_flags(None, alpha, shards, shots, o.pairs(option, "--option"))
        if domain:
            given["domain"] = o.listed(domain, "--domain")
        flags = {"scheme": scheme, "clients": clients, "seed": seed}
        resolved = resolve(PartitionConfig, read_file(config).get("partition", {}), flags)
        if resolved.scheme is None:
            raise FedcacheError(Exit.USAGE, "No scheme was named.", f"--scheme {' | '.join(SCHEMES)}")
        opened = need_store(o.home(), path=store, dataset=dataset, observer=story)
        arguments = {**resolved.options, **given}
        if resolved.clients is not None:
            arguments["clients"] = resolved.clients
        made = make_partition(opened, resolved.scheme, seed=resolved.seed, name=name, **arguments)
        saved = name or made.default_name()
        columns = columns_of(opened)
        if out is not None:
            made.save(out)
        if plot is not None:
            draw(made, columns, plot)
        rows = made.describe(columns)
        data = {
            "name": saved,
            "scheme": made.scheme,
            "args": dict(made.args),
            "seed": made.seed,
            "digest": made.digest,
            "dropped": made.dropped,
            "notes": list(made.notes),
            "store": str(opened.path),
            "clients": [
                {"name": r.client, "train": r.train, "test": r.test, "classes": r.classes, "counts": list(r.counts)}
                for r in rows
            ],
        }
        report_notes(made, story)
        lines = [made.summary(), f"Saved as {saved}:  fedcache train --partition {saved} --method fed3r"]
        if plot is not None:
            lines.append(str(plot))
        few = rows if len(rows) <= 24 else rows[:20]
        cells = [
            (r.client, r.train, r.test, r.classes, " ".join(map(str, r.counts)) if len(r.counts) <= 20 else "")
            for r in few
        ]
        title = "" if len(few) == len(rows) else f"the first {len(few)} of {len(rows)} clients"
        shown = table(
            title,
            ("client", "train", "test", "classes", "rows of each class"),
            cells,
            right=("train", "test", "classes"),
        )
        return Answer(data, lines, Exit.OK, [shown])

    answer("partition", json, call)


def shard(
    partition: Annotated[
        str, typer.Option("--partition", "-p", help="Name of a saved partition, or a partition file.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the client stores.")] = None,
    dataset: o.Dataset = None,
    store: o.StoreDir = None,
    json: o.Json = False,
) -> None:
    """Write one ordinary store per client, so that each can live on its own machine.

    Example: fedcache shard --partition iid-m10-s0 --out sites
    """

    def call(story: Story) -> Answer:

        opened = need_store(o.home(), path=store, dataset=dataset, observer=story)
        loaded = load_partition(opened, partition)
        target = write_shards(opened, loaded, out, story)
        made = sorted(str(p) for p in target.glob("*.zarr"))
        return Answer(
            {"path": str(target), "stores": made},
            [
                f"{len(made)} client stores in {target}",
                f"fedcache train --clients-from {shlex.quote(str(target))} --method fed3r",
            ],
        )

    answer("shard", json, call)
