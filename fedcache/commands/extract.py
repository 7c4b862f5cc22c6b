"""``fedcache extract``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.allocator import keep_freed_memory
from fedcache.commands import options as o
from fedcache.commands.output import Answer, Story, answer, stopping, table
from fedcache.config import ExtractConfig, read_file, resolve
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.extraction import extract as run
from fedcache.extract.planning.cost import describe_growth
from fedcache.extract.planning.templates import quoted
from fedcache.extract.result import Extraction
from fedcache.extract.stop import Stop
from fedcache.federate.engines.choose import engine_of
from fedcache.runs.partitions import make_partition, partition_flags, write_shards
from fedcache.store.quarantine import NAME

SHOWN = 10
"""Unreadable images that are named on the terminal; quarantine.jsonl names all."""


def extract(
    dataset: o.Dataset = None,
    backbones: o.Backbones = None,
    views: Annotated[
        int | None, typer.Option("--views", min=1, help="Views per image; view 0 is the plain one.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Prompt template with {}; repeat for an ensemble.")
    ] = None,
    recipe: o.Recipe = None,
    size: Annotated[int | None, typer.Option("--size", help="Short for --recipe size=N.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only N images, evenly spaced over the dataset.")
    ] = None,
    layout: o.Layout = None,
    weights: o.Weights = None,
    data: o.Data = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Go on without backbones whose weights are missing.")
    ] = False,
    store: o.StoreDir = None,
    device: o.Device = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Compute dtype: auto | float32 | bfloat16 | float16.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Images per batch; default 32 on a CPU, 256 on a GPU.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Processes; 0 keeps everything in this one.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads per process; default 1.")] = None,
    chunk_rows: Annotated[int | None, typer.Option("--chunk-rows", min=1, help="Rows per chunk file.")] = None,
    max_bad: Annotated[
        str | None, typer.Option("--max-bad", help="Unreadable images to accept: 1% or a number.")
    ] = None,
    engine: o.EngineName = "local",
    ray_address: o.RayAddress = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="Also cut one store per client by this scheme.")
    ] = None,
    clients: o.Clients = None,
    alpha: o.Alpha = None,
    shards: o.Shards = None,
    shots: o.Shots = None,
    option: o.Option = None,
    seed: o.Seed = None,
    out: Annotated[str | None, typer.Option("--out", help="Where --partition writes the client stores.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, bytes and time; compute nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for another writer of the same array.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Reuse nothing: no unfinished arrays, no earlier store.")
    ] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help="Forget remembered digests of data and weights.")] = False,
    config: o.ConfigFile = None,
    json: o.Json = False,
) -> None:
    """Run frozen backbones once over a dataset and keep the features.

    Resumes wherever it was stopped; a finished extraction returns at once.

    Example: fedcache extract --dataset folder:photos.zip --backbones efficientnet-lite0 --size 128
    """

    def call(story: Story) -> Answer:

        keep_freed_memory()  # for what is computed in this process
        flags = {
            "dataset": dataset,
            "backbones": o.listed(backbones, "--backbones"),
            "views": views,
            "text": tuple(text or ()),
            "recipe": o.pairs(recipe, "--recipe", split=True),
            "size": size,
            "limit": limit,
            "layout": layout,
            "weights": o.pairs(weights, "--weights"),
            "data": o.pairs(data, "--data"),
            "skip_missing": skip_missing or None,
            "device": device,
            "dtype": dtype,
            "batch": batch,
            "workers": workers,
            "threads": threads,
            "chunk_rows": chunk_rows,
            "max_bad": max_bad,
        }
        resolved = resolve(ExtractConfig, read_file(config).get("extract", {}), flags)
        if partition is None and any(v is not None for v in (clients, alpha, shards, shots, option, seed, out)):
            raise FedcacheError(
                Exit.USAGE,
                "Options of a scheme were given without --partition, which cuts one store per client.",
                "For example --partition iid --clients 10; or make a partition afterwards: fedcache partition --help",
            )
        where = engine_of(engine, ray_address)
        stop = Stop()
        with stopping(stop.ask, story):
            done = run(
                resolved,
                o.home(),
                store=store,
                observer=story,
                stop=stop,
                dry_run=dry_run,
                wait=wait,
                fresh=fresh,
                rehash=rehash,
                engine=where,
            )
        payload = done.to_dict()
        lines = [describe_line(done), *growth_lines(done), *text_lines(done), *bad_lines(done.bad, done.path)]
        if partition is not None and not dry_run:
            made = make_partition(
                done.store,
                partition,
                seed=seed or 0,
                **partition_flags(clients, alpha, shards, shots, o.pairs(option, "--option")),
            )
            target = write_shards(done.store, made, out, story)
            payload["shards"] = str(target)
            lines.append(f"{len(made.clients)} client stores: {target}")
        code = Exit.QUARANTINED if done.images > done.ok and not dry_run else Exit.OK
        if done.skipped and not dry_run:
            lines.append(f"Skipped for missing weights: {', '.join(done.skipped)}")
        lines.append(str(done.path))
        return Answer(payload, lines, code, [arrays_table(done)])

    answer("extract", json, call)


def describe_line(done: Extraction) -> str:
    """One sentence on what was computed."""

    quarantined = f", {done.images - done.ok} quarantined" if done.images > done.ok and done.ok else ""
    if done.seconds and done.decoded:
        return (
            f"{done.decoded:,} images in {done.seconds:,.1f} s: {done.rate:,.1f} images/s with {done.workers} "
            f"process{'es' if done.workers != 1 else ''}; decoding and the model had {done.busy:.0%} of the cores"
            f"{quarantined}."
        )
    if done.seconds:
        return f"Plan for {done.images:,} images: about {done.rate:,.0f} images/s, {done.seconds:,.0f} s."
    if any(a["state"] == "to compute" for a in done.arrays):
        return f"Plan for {done.images:,} images; their rate is not known, as weights are missing."
    if any(t["state"] == "to compute" for t in done.text):
        return f"The features of all {done.images:,} images are there; only text features are to compute."
    images = f"{done.ok:,} of {done.images:,} images{quarantined}"
    if any(t["state"] == "computed" for t in done.text):
        return f"The features of all images were there: {images}. Text features were computed."
    return f"Everything is there: {images}. Nothing was computed."


def growth_lines(done: Extraction) -> list[str]:
    """What was taken over from an earlier state of the dataset."""

    if done.growth is not None:
        return [f"Since the store it grows from: {describe_growth(done.growth)}."]
    if done.vanished:
        return [f"{done.vanished:,} rows of images that are no longer in the dataset are kept and never used."]
    return []


def text_lines(done: Extraction) -> list[str]:
    """What became of the prompt templates; nothing where they were current before."""

    words = {
        "computed": "computed and current from now on",
        "made current": "current again, as stored",
        "to compute": "to be computed",
    }
    return [
        f"Text of {t['backbone']}: {quoted(t['templates'])}, {words[t['state']]}."
        for t in done.text
        if t["state"] in words
    ]


def bad_lines(bad: Sequence[Mapping[str, Any]], store: Path) -> list[str]:
    """The images that could not be read, by name and reason: the first ten, then where the others are."""

    if not bad:
        return []
    what = "1 image" if len(bad) == 1 else f"{len(bad):,} images"
    lines = [f"{what} could not be read; training, scoring and export leave {'it' if len(bad) == 1 else 'them'} out:"]
    lines += [f"  {entry['name']}: {entry['reason']}" for entry in bad[:SHOWN]]
    more = f"and {len(bad) - SHOWN:,} more: " if len(bad) > SHOWN else ""
    return [*lines, f"  {more}{store / NAME}"]


def arrays_table(done: Extraction) -> object:
    """The arrays of an extraction."""

    rows = [
        (
            a["key"],
            f"{a['backbone']}@{a['recipe']['size']}",
            "x".join(map(str, a["shape"])),
            a["dtype"],
            a["state"],
            a.get("forward_batches", ""),
        )
        for a in done.arrays
    ]
    return table(
        "",
        ("array", "backbone", "shape", "dtype", "before this run", "forward batches"),
        rows,
        right=("forward batches",),
    )
