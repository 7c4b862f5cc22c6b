"""``extract``: images and backbones to a store, and nothing at all when the store has everything."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.config import ExtractConfig, Home, to_table
from fedcache.errors import Exit, FedcacheError
from fedcache.extract import backbones as registry
from fedcache.extract.datasets.grown import Grown
from fedcache.extract.datasets.limited import open_limited, peek_limited
from fedcache.extract.planning.cost import check_disk, describe, growth_words
from fedcache.extract.planning.find_store import ingested_path, named_path
from fedcache.extract.planning.incremental import grow
from fedcache.extract.planning.plan import (
    Planned,
    memory_of,
    missing_text,
    parse_max_bad,
    plan,
    recipe_of,
    roots_of,
    store_path,
)
from fedcache.extract.planning.templates import make_current, wanted_text
from fedcache.extract.planning.throughput import way_of
from fedcache.extract.result import Extraction, summary
from fedcache.federate.engines.choose import Engine
from fedcache.federate.engines.ray.extraction import check_workers, helpers
from fedcache.progress import Observer, Silent
from fedcache.store.cleanup import clean_up
from fedcache.store.files import make_private, write_atomic
from fedcache.store.samples import INGESTED
from fedcache.store.store import Samples, Store

if TYPE_CHECKING:
    from fedcache.extract.datasets import Dataset
    from fedcache.extract.stop import Stop

FULL_DISK_MARGIN = 64 << 20


def extract(
    config: ExtractConfig,
    home: Home,
    *,
    store: Path | None = None,
    observer: Observer | None = None,
    stop: Stop | None = None,
    dry_run: bool = False,
    wait: bool = False,
    fresh: bool = False,
    rehash: bool = False,
    keep_text: bool = False,
    engine: Engine | None = None,
) -> Extraction:
    """Run every backbone of ``config`` over its dataset, resuming whatever a store already has.

    A finished extraction is recognised from the manifest alone: no image is read, no model is loaded and torch is
    not imported. Of a dataset that has changed, what is new is computed (``planning.incremental``) unless ``fresh``.
    The prompt templates asked for (``config.text``, else the default) become the current ones, which training reads;
    with ``keep_text`` a default leaves a backbone's current text as it is. What is computed is computed on ``engine``,
    to the same bytes.

    Raises:
        FedcacheError: USAGE, STORE (locked, other dataset), CORRUPT (too many bad images), ENVIRONMENT (weights,
            device, disk), INTERRUPTED (after a stop).
    """
    observer = observer or Silent()
    if engine is not None:
        check_workers(config.workers)
    planned, skipped = plan(config, home, observer, rehash=rehash)
    planned = [pull_if_needed(p, config, home, observer) for p in planned] if not dry_run else planned
    spec = config.dataset or default_dataset(home, observer)
    spec = f"{INGESTED}:{spec}" if ingested_path(home, spec) is not None and ":" not in spec else spec
    store = None if store is None else named_path(home, store)
    where: dict[str, Any] = {
        "memory": memory_of(home, rehash=rehash),
        "roots": roots_of(config, home),
        "data": home.data,
        "layout": config.layout,
    }
    known = None if rehash else peek_limited(spec, config.limit, **where)
    if known is not None:
        path = store or store_path(home, *known)
        done = finished(path, known[1], planned, config, keep_text=keep_text, dry_run=dry_run)
        if done is not None:
            done.skipped = skipped
            if config.device != "auto":
                observer.note(f"--device {config.device} was not needed: every array is there, nothing is computed.")
            remember_last(home, path, spec)
            return done
    data = open_limited(spec, config.limit, **where)
    observer.note(f"{spec}: {data.reading}")
    path = store or store_path(home, data.slug, data.digest)
    if dry_run:
        return describe(path, data, planned, config, home, observer, skipped, fresh=fresh)
    extraction = compute(
        path, data, planned, config, home, observer, stop, wait=wait, fresh=fresh, keep_text=keep_text, engine=engine
    )
    extraction.skipped = skipped
    remember_last(home, path, spec)
    return extraction


def pull_if_needed(planned: Planned, config: ExtractConfig, home: Home, observer: Observer) -> Planned:
    """Download weights that the backbone's own library publishes; size and source are printed first."""
    if planned.weights.path is not None or planned.weights.download is None:
        return planned
    observer.note(f"{planned.backbone.name}: downloading {planned.weights.download}")
    weights = registry.pull(planned.backbone, home=home.root, memory=memory_of(home))
    return Planned(planned.backbone, weights, recipe_of(planned.backbone, weights, config), planned.state)


def default_dataset(home: Home, observer: Observer) -> str:
    """The dataset last extracted, else ``digits``."""
    try:
        spec = json.loads(home.last.read_bytes())["spec"]
        observer.note(f"Dataset {spec}: the one last extracted (--dataset chooses another).")
        return str(spec)
    except (OSError, ValueError, KeyError, TypeError):
        observer.note(
            "Dataset digits: the offline bundle, as nothing was extracted before (--dataset chooses another)."
        )
        return "digits"


def remember_last(home: Home, path: Path, spec: str) -> None:
    """Note the store that commands without ``--dataset`` use."""
    make_private(home.root)
    write_atomic(home.last, json.dumps({"store": str(path.resolve()), "spec": spec}).encode())


def remember_orders(home: Home, data: Dataset, planned: Sequence[Planned], config: ExtractConfig) -> None:
    """Note how each array was ordered, so that ``train`` can go on with an unfinished one.

    In the home and not in the store, which says nothing of places.
    """
    memory = memory_of(home)
    for item in planned:
        name = item.backbone.name
        order = replace(
            config,
            dataset=data.spec,
            backbones=(name,),
            recipe={k: v for k, v in config.recipe.items() if k.rpartition(":")[0] in ("", name)},
            weights={k: v for k, v in config.weights.items() if k == name},
            skip_missing=False,
        )
        memory.remember(["order", data.digest, item.recipe.digest], [item.recipe.label, to_table(order)])


def finished(
    path: Path,
    digest: str,
    planned: Sequence[Planned],
    config: ExtractConfig,
    *,
    keep_text: bool,
    dry_run: bool,
) -> Extraction | None:
    """The extraction that was asked for, when a store at ``path`` already holds all of it."""
    try:
        store = Store.open(path)
    except FedcacheError as error:
        if error.code is Exit.STORE:
            return None
        raise
    if store.content != digest or any(p.recipe.key not in store.arrays for p in planned):
        return None
    template = store.dataset.get("template")
    wanted = wanted_text(store, planned, template, config, keep=keep_text)
    if wanted.keys() & missing_text(store, planned, template, config).keys():
        return None
    done = summary(store, planned, {p.recipe.key: "complete" for p in planned}, None)
    done.text = make_current(store, planned, {} if dry_run else wanted, ())
    if not dry_run:
        clean_up(store)
    return done


def compute(
    path: Path,
    data: Dataset,
    planned: Sequence[Planned],
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    stop: Stop | None,
    *,
    wait: bool,
    fresh: bool,
    keep_text: bool,
    engine: Engine | None = None,
) -> Extraction:
    """Create or open the store and compute what it lacks."""
    from fedcache.extract.batches import Job
    from fedcache.extract.run import check_chunk_rows, extract_arrays
    from fedcache.extract.stop import Stop

    device, how, records = way_of(config, planned)
    observer.note(f"Device {device.kind} ({device.name}): {device.why}.")
    max_bad = parse_max_bad(config.max_bad, len(data.names))  # of the dataset; what has vanished is not counted
    if config.chunk_rows is not None:
        check_chunk_rows(config.chunk_rows, how.batch, planned[0].recipe.key)
    growth = grow(path, data, planned, records, home, chunk_rows=config.chunk_rows, fresh=fresh, observer=observer)
    if growth is not None:
        data = growth.data
        if growth.parent is not None:
            observer.note(f"Grows from {growth.parent.path.name}: {growth_words(growth.plan(planned))}.")
    check_disk(path, data, planned)
    make_private(home.stores) if path.parent == home.stores else path.parent.mkdir(parents=True, exist_ok=True)
    store = Store.create(
        path,
        samples_of(data),
        dataset={**dataset_meta(data), **(growth.meta() if growth else {})},
        reasons=growth.data.vanished if growth else None,
    )
    if growth is not None:
        growth.carry_text(store)
    remember_orders(home, data, planned, config)
    wanted = wanted_text(store, planned, data.template, config, keep=keep_text)
    text = {k: v for k, v in missing_text(store, planned, data.template, config).items() if k in wanted}
    states = {p.recipe.key: "complete" if p.recipe.key in store.arrays else "new" for p in planned}
    jobs = [Job(p.recipe.key, p.backbone.name, p.weights, p.recipe, data.mirror) for p in planned]
    tally = extract_arrays(
        store,
        data,
        jobs,
        how,
        records,
        workers=config.workers,
        chunk_rows=config.chunk_rows,
        as_before=growth.chunk_rows if growth else {},
        adopt=growth.adopt if growth else None,
        max_bad=max_bad,
        text=text,
        wait_for=wait,
        fresh=fresh,
        stop=stop or Stop(),
        observer=observer,
        elsewhere=helpers(engine, how, config.workers, observer) if engine is not None else None,
    )
    for key, kept in tally.kept_chunks.items():
        if states[key] == "new" and kept:
            grew = growth is not None and key in growth.whole
            states[key] = f"{kept} chunks reused" if grew else f"resumed at {kept} chunks"
    store.append_history(
        {
            "event": "extract",
            "time": time.time(),
            "keys": [j.key for j in jobs],
            "images": tally.images,
            "seconds": tally.seconds,
            "rate": tally.rate,
            "workers": tally.workers,
            "device": device.name,
        }
    )
    done = summary(Store.open(path), planned, states, tally)
    clean_up(done.store)
    done.text = make_current(done.store, planned, wanted, text)
    if growth is not None and growth.parent is not None:
        done.growth = growth.done(tally.forward_images)
    return done


def samples_of(data: Dataset) -> Samples:
    """The store's samples of a dataset; every row that is there starts as readable."""
    import numpy as np

    return Samples(
        uid=data.uid,
        name=data.names,
        label=data.label,
        domain=data.domain,
        split=data.split,
        ok=data.ok if isinstance(data, Grown) else np.ones(len(data.names), np.uint8),
        classes=data.classes,
        domains=data.domains,
    )


def dataset_meta(data: Dataset) -> dict[str, Any]:
    """What the manifest says of the dataset: content, never a location."""
    return {"slug": data.slug, "digest": data.digest, "template": data.template}
