"""``extract``: images, texts or rows and backbones to a store, and nothing at all when the store has everything."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import ExtractConfig, Home, to_table
from fedcache.errors import FedcacheError, StoreError, UsageError, all_at_once, shell_word
from fedcache.extract import backbones as registry
from fedcache.extract.augment import parse_policy
from fedcache.extract.compute_features import ExtractionOptions, check_chunk_rows, extract_arrays
from fedcache.extract.datasets import Dataset, holds_of, in_memory, open_dataset, parts_of, peek
from fedcache.extract.datasets.columns import CONTENT, with_keys
from fedcache.extract.datasets.dataset import Context, trained_and_tested
from fedcache.extract.how import jobs_of, resolve_compute
from fedcache.extract.planning import plan as planning
from fedcache.extract.planning.find_store import (
    bring_groups,
    ingested_path,
    keep_groups,
    remember_groups,
)
from fedcache.extract.planning.incremental import (
    IncrementalDataset,
    IncrementalPlan,
    plan_incremental,
)
from fedcache.extract.planning.parts import parse_part, place_of_part
from fedcache.extract.planning.plan import PlannedArray
from fedcache.extract.result import Extraction, check_disk, describe_growth, estimate, summarise
from fedcache.extract.workers.chunk_tasks import ExtractionEngine
from fedcache.process import Stop
from fedcache.progress import Observer, Silent, told_as
from fedcache.store.catalog import (
    clean_up,
    finished_stores,
    place_of_content,
    recall_last,
    remember_last,
    resolve_path,
)
from fedcache.store.files import make_private
from fedcache.store.join import chunks_are_whole, finished_arrays
from fedcache.store.journal import journals
from fedcache.store.manifest import PART, StorePart, part_of
from fedcache.store.samples import INGESTED
from fedcache.store.store import Samples, Store
from fedcache.tables.roles import need_labels
from fedcache.tables.words import counted, some_names

COLUMNS = ("images_key", "label_key", "split_key", "domain_key", "group_key", "no_label")
"""Fields of the configuration that say what columns of the dataset mean."""


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
    engine: ExtractionEngine | None = None,
    images: Any = None,
) -> Extraction:
    """Run every backbone of ``config`` over its dataset, resuming whatever a store already has.

    A finished extraction is recognised from the manifest alone: no image is read, no model is loaded and torch is not
    imported. Of a dataset that has changed, what is new is computed (``planning.incremental``) unless ``fresh``. The
    prompt templates asked for (``config.text``, else the default) become the current ones, which training reads; with
    ``keep_text`` a default leaves a backbone's current text as it is. What is computed is computed on ``engine``, to
    the same bytes. ``images`` are a dataset that the program holds (``datasets.in_memory``), in place of one that the
    configuration names. Where it names a part (``config.part``), that part alone is computed, in a folder beside the
    place of the store, and ``planning.parts.join`` assembles all parts. A part never grows from an earlier store.
    Raises UsageError, StoreError (locked, other dataset), CorruptionError (too many bad images), MachineError
    (weights, device, disk), StoppedError (after a stop).
    """
    observer = observer or Silent()
    part = None
    if config.part is not None:
        part = parse_part(config.part, observer)
        config = replace(config, part=None)
    if engine is not None:
        engine.check_extraction(config.workers)
    planned, skipped = plan_of(config, home, observer, images, rehash=rehash)
    device = config.device
    config = where_it_can_run(
        planning.bare_config(planning.known_config(config, home)), planned, engine, observer
    )
    if not dry_run:
        planned = [pull_if_needed(p, config, home, observer) for p in planned]
    held = None
    if images is not None:
        with told_as(observer, "reading", "images") as progress:
            held, config = images_of_the_program(
                images, config, Context(planning.memory_of(home), progress=progress)
            )
    if held is None:
        spec, config = spec_of(config, home, observer)
        planning.check_reads(planned, spec, holds_of(spec))
    else:
        spec = held.spec
        planning.check_reads(planned, spec, held.holds)
    if store is not None:
        store = resolve_path(home, store)
    where = planning.context_of(config, home, rehash=rehash)
    known = None
    if held is not None:
        known = (held.slug, held.digest)
    elif not rehash:
        known = peek(spec, where)
    if known is not None:
        path = store or place_of_content(home, *known)
        done = finished(path, known[1], planned, config, keep_text=keep_text, dry_run=dry_run)
        if part is not None:
            place = place_of_part(part, path)
            if done is not None:
                observer.note(f"{path.name} has all of the dataset: {part} is not needed.")
            elif not fresh:
                done = finished(
                    place,
                    known[1],
                    planned,
                    config,
                    part,
                    keep_text=keep_text,
                    dry_run=dry_run,
                )
                if done is not None:
                    done.skipped = skipped
                    return done
        if done is not None:
            if not dry_run:
                bring_groups(path, spec, where, observer, held)
            done.skipped = skipped
            if device != "auto":
                observer.note(
                    f"--device {device} was not needed: every array is there, nothing is computed."
                )
            remember_last(home, path, spec)
            return done
    data = held or read_dataset(spec, where, observer)
    say_dataset(data, spec, config.augment, observer)
    if data.may_be_labels:
        raise labels_to_name(spec, data.may_be_labels)
    path = store or place_of_data(home, data, observer)
    if part is not None:
        path = place_of_part(part, path)
    if dry_run:
        alone = fresh or part is not None  # nothing of an earlier store is taken over
        expected = estimate(path, data, planned, config, home, observer, skipped, fresh=alone)
        if part is not None:
            expected.part = str(part)
            expected.seconds /= part.of
        return expected
    options = ExtractionOptions(
        workers=config.workers,
        chunk_rows=config.chunk_rows,
        # Of the dataset: what has vanished is not counted.
        max_bad=planning.parse_max_bad(config.max_bad, len(data.names)),
        wait=wait,
        fresh=fresh,
        stop=stop or Stop(),
        observer=observer,
        engine=engine,
    )
    extraction = compute(path, data, planned, config, home, options, part, keep_text=keep_text)
    extraction.skipped = skipped
    if part is None:
        remember_groups(extraction.store, spec, where)
        remember_last(home, path, spec)
    return extraction


def labels_to_name(spec: str, may_be_labels: Mapping[str, int]) -> FedcacheError:
    """The error of a dataset without labels that has columns which may be them, with the spec that names one."""
    parts = parts_of(spec)
    if parts is None:
        likely = next(iter(may_be_labels))
        named = ""
        if spec.partition(":")[0] in CONTENT:
            named = with_keys(spec, {"--label-key": likely})
        return need_labels(spec, may_be_labels, named)
    chosen: dict[str, str] = {}
    for place in may_be_labels:
        name, _, column = place.partition("/")
        chosen.setdefault(name, column)
    named = ",".join(
        f"{name}={with_keys(one, {'--label-key': chosen.get(name)})}" for name, one in parts.items()
    )
    error = need_labels(spec, may_be_labels)
    return UsageError(
        error.message, f"Name the columns of labels in the spec: --dataset {shell_word(named)}"
    )


def plan_of(
    config: ExtractConfig, home: Home, observer: Observer, images: Any, *, rehash: bool
) -> tuple[list[PlannedArray], list[str]]:
    """As ``planning.plan``; where no backbone is named, a dataset that is not known is named in the same message."""

    def made() -> tuple[list[PlannedArray], list[str]]:
        return planning.plan(config, home, observer, rehash=rehash)

    if not config.backbones and images is None:
        all_at_once([lambda: holds_of(spec_of(config, home, observer)[0]), made])
    return made()


def read_dataset(spec: str, where: Context, observer: Observer) -> Dataset:
    """The dataset of a spec; how far its digests are is told, and so are links that were left out."""
    with told_as(observer, "reading", holds_of(spec)) as progress:
        data = open_dataset(spec, replace(where, progress=progress))
    if data.links_left_out:
        observer.warn(
            f"{counted(data.links_left_out, 'link')} out of the dataset's folder left out; --follow-links reads "
            "what is behind."
        )
    return data


def say_dataset(data: Dataset, spec: str, augment: str | None, observer: Observer) -> None:
    """How a dataset was read, that its views are not flipped, and that test rows are training rows, where some are."""
    observer.note(f"{spec}: {data.reading}")
    if (
        not data.mirror
        and augment is not None
        and any(step.name == "flip" for step in parse_policy(augment))
    ):
        observer.note(
            "Views are not flipped: a mirrored image of this dataset may be of another class."
        )
    if both := trained_and_tested(data):
        verb = "hold"
        if both == 1:
            verb = "holds"
        observer.warn(
            f"{counted(both, 'test row')} {verb} what a training row holds, byte for byte."
        )


def spec_of(config: ExtractConfig, home: Home, observer: Observer) -> tuple[str, ExtractConfig]:
    """The dataset that is meant, with the columns that options name: from here on the spec says them."""
    spec = config.dataset or default_dataset(home, observer)
    if ingested_path(home, spec) is not None and ":" not in spec:
        spec = f"{INGESTED}:{spec}"
    options = {f"--{name.replace('_', '-')}": getattr(config, name) for name in COLUMNS}
    options["--unlabelled"] = "yes" if config.unlabelled else None
    spec = with_keys(spec, options)
    unnamed: dict[str, Any] = dict.fromkeys(COLUMNS)
    return spec, replace(config, **unnamed, unlabelled=False)


def images_of_the_program(
    images: Any, config: ExtractConfig, context: Context
) -> tuple[Dataset, ExtractConfig]:
    """The dataset of images that the program holds, and the configuration without workers where none was asked for.

    Raises UsageError for options that such images do not have, and for workers that cannot be sent them.
    """
    for name in ("layout", *COLUMNS):
        if getattr(config, name) is not None:
            raise UsageError(
                f"{name} says how files are read, and the images are given.", f"Leave {name} out."
            )
    if config.workers and (why := in_memory.can_travel(images)):
        raise UsageError(
            f"The images cannot be sent to {config.workers} workers: {why}.",
            "workers=0 reads them here.",
        )
    data = in_memory.load(images, context)
    if config.limit is not None:
        data = data.part(config.limit)
    return data, replace(config, workers=config.workers or 0)


def place_of_data(home: Home, data: Dataset, observer: Observer) -> Path:
    """Where the store of a dataset lies; the observer is told of one that has the name of a folder before."""
    path = place_of_content(home, data.slug, data.digest)
    if path != home.store(data.slug, data.digest):
        observer.note(
            f"{path.name} holds the same {data.holds}, under the name they had before: it is used."
        )
    return path


def pull_if_needed(
    planned: PlannedArray, config: ExtractConfig, home: Home, observer: Observer
) -> PlannedArray:
    """Download weights that the backbone's own library publishes; size and source are printed first."""
    if planned.weights.path is not None or planned.weights.download is None:
        return planned
    observer.note(f"{planned.backbone.name}: downloading {planned.weights.download}")
    weights = registry.pull(planned.backbone, home=home.root, memory=planning.memory_of(home))
    return replace(
        planned, weights=weights, recipe=planning.recipe_of(planned.backbone, weights, config)
    )


def where_it_can_run(
    config: ExtractConfig,
    planned: Sequence[PlannedArray],
    engine: ExtractionEngine | None,
    observer: Observer,
) -> ExtractConfig:
    """The configuration with the CPU in place of ``auto``, where a backbone's library computes nowhere else.

    Raises UsageError where another device or dtype was asked for, or an engine for a module in this process's memory.
    """
    here = [p.backbone.name for p in planned if p.backbone.here_only]
    if engine is not None and here:
        raise UsageError(
            f"{', '.join(here)} is in the memory of this process, which no worker of an engine can load.",
            "Leave out the engine, or write a factory:  module:PACKAGE.MODULE:FACTORY",
        )
    names = [p.backbone.name for p in planned if p.backbone.cpu_only]
    if not names:
        return config
    if config.device.startswith("cuda") or config.dtype not in ("auto", "float32"):
        raise UsageError(
            f"{', '.join(names)} is computed on the CPU in float32, and {config.device}, {config.dtype} was asked for.",
            "--device cpu --dtype float32; extract other backbones in a command of their own.",
        )
    if config.device == "auto":
        observer.note(f"Device cpu: the library of {', '.join(names)} computes there.")
    return replace(config, device="cpu")


def default_dataset(home: Home, observer: Observer) -> str:
    """The dataset last extracted, else ``digits``.

    Raises CorruptionError for a damaged note of it, UsageError where it is missing and something was extracted before.
    """
    last = recall_last(home)
    if last is None and (stores := finished_stores(home)):
        named = some_names([store.path.name for store in stores], 5)
        raise UsageError(
            f"No dataset is named, and which was extracted last is not remembered; {home.stores} holds {named}.",
            "Name it, for example:  fedcache extract --dataset digits",
        )
    spec = "digits"
    why = "the offline bundle, as nothing was extracted before"
    if last is not None:
        spec = last[1]
        why = "the one last extracted"
    observer.note(f"Dataset {spec}: {why} (--dataset chooses another).")
    return spec


def remember_orders(
    home: Home, data: Dataset, planned: Sequence[PlannedArray], config: ExtractConfig
) -> None:
    """Note how each array was ordered, so that ``train`` can go on with an unfinished one.

    In the home and not in the store, which says nothing of places.
    """
    memory = planning.memory_of(home)
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
        memory.remember(
            ["order", data.digest, item.recipe.digest], [item.recipe.label, to_table(order)]
        )


def finished(
    path: Path,
    digest: str,
    planned: Sequence[PlannedArray],
    config: ExtractConfig,
    part: StorePart | None = None,
    *,
    keep_text: bool,
    dry_run: bool,
) -> Extraction | None:
    """The extraction that was asked for, when a store, or the part of one, at ``path`` already holds all of it.

    Nobody reads a part before it is joined, so its chunk files are verified.
    """
    try:
        store = Store.open(path, part=part is not None)
    except StoreError:
        return None
    keys = [item.recipe.key for item in planned]
    if store.content != digest or not finished_arrays(store).keys() >= {*keys}:
        return None
    if part is not None and not (part_of(store.dataset) == part and chunks_are_whole(store, keys)):
        return None
    wanted = planning.wanted_text(
        store,
        planned,
        store.manifest.classes,
        store.dataset.get("template"),
        config,
        keep=keep_text,
    )
    wanted = text_of_part(part, wanted)
    if planning.missing_text(store, planned, wanted):
        return None
    done = summarise(store, planned, dict.fromkeys(keys, "complete"), None)
    done.text = planning.make_current(store, planned, {} if dry_run else wanted, ())
    if not dry_run:
        clean_up(store)
    return done


def text_of_part(
    part: StorePart | None, wanted: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """The wanted text features that a part is to have: they depend on no row, so the first part has all of them."""
    if part is not None and part.number > 1:
        return {}
    return wanted


def compute(
    path: Path,
    data: Dataset,
    planned: Sequence[PlannedArray],
    config: ExtractConfig,
    home: Home,
    options: ExtractionOptions,
    part: StorePart | None,
    *,
    keep_text: bool,
) -> Extraction:
    """Create or open the store, or the part of one, and compute what it lacks."""
    observer = options.observer
    device, settings = resolve_compute(config, [p.backbone for p in planned])
    observer.note(f"Device {device.kind} ({device.name}): {device.why}.")
    if options.chunk_rows is not None:
        check_chunk_rows(options.chunk_rows, settings.batch, planned[0].recipe.key)
    jobs = jobs_of(planned, data, device, settings)
    earlier = None
    # The order of rows must be the same in all parts, and other machines may have other earlier stores.
    if part is None:
        earlier = plan_incremental(
            path,
            data,
            jobs,
            home,
            chunk_rows=options.chunk_rows,
            fresh=options.fresh,
            observer=observer,
        )
    if earlier is not None:
        data = earlier.data
        if earlier.parent is not None:
            expected = describe_growth(earlier.expected(job.key for job in jobs), data.holds)
            observer.note(f"Grows from {earlier.parent.path.name}: {expected}.")
    check_disk(path, data, planned, part)
    is_new = not path.exists()
    store = open_or_create(path, data, home, earlier, part, observer)
    remember_orders(home, data, planned, config)
    wanted = planning.wanted_text(
        store, planned, data.classes, data.template, config, keep=keep_text
    )
    wanted = text_of_part(part, wanted)
    if not data.classes and any(item.backbone.text_width is not None for item in planned):
        observer.note(
            "The dataset has no classes, so there are no text features, which some methods need."
        )
    text = planning.missing_text(store, planned, wanted)
    states = {job.key: "complete" if job.key in store.arrays else "new" for job in jobs}
    try:
        stats = extract_arrays(store, data, jobs, settings, options, earlier=earlier, text=text)
    except UsageError:
        # Refused for what the images turned out to be: a store that was made for this and holds nothing goes too.
        if (
            is_new
            and not Store.open(path, part=True).arrays
            and not any(journal.chunks for journal in journals(path))
        ):
            shutil.rmtree(path)
        raise
    for key, kept in stats.kept_chunks.items():
        if states[key] == "new" and kept:
            reused = earlier is not None and key in earlier.whole
            chunks = counted(kept, "chunk")
            states[key] = f"resumed at {chunks}"
            if reused:
                states[key] = f"{chunks} reused"
    store.append_history(
        {
            "event": "extract",
            "time": time.time(),
            "keys": [j.key for j in jobs],
            "images": stats.images,
            "seconds": stats.seconds,
            "rate": stats.rate,
            "workers": stats.workers,
            "device": device.name,
        }
    )
    done = summarise(Store.open(path, part=True), planned, states, stats)
    clean_up(done.store)
    done.text = planning.make_current(done.store, planned, wanted, text)
    if earlier is not None and earlier.parent is not None:
        done.growth = earlier.result(stats.forward_images)
    return done


def open_or_create(
    path: Path,
    data: Dataset,
    home: Home,
    earlier: IncrementalPlan | None,
    part: StorePart | None,
    observer: Observer,
) -> Store:
    """The store of ``data`` at ``path``, or part of it, made where there is none.

    It has the groups of the data, and text features of an earlier store.
    """
    if path.parent == home.stores:
        make_private(home.stores)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    ok = np.ones(len(data), np.uint8)
    reasons = None
    if isinstance(data, IncrementalDataset):
        ok = data.ok
        reasons = data.vanished
    samples = Samples(
        uid=data.uid,
        name=data.names,
        label=data.label,
        domain=data.domain,
        split=data.split,
        ok=ok,
        classes=data.classes,
        domains=data.domains,
    )
    # Of the dataset the manifest says the content, never a location.
    meta: dict[str, Any] = {"slug": data.slug, "digest": data.digest, "template": data.template}
    if earlier is not None:
        origin = None
        if earlier.parent:
            origin = earlier.parent.dataset["digest"]
        meta |= {"content": earlier.data.content, "grown": origin}
    if part is not None:
        meta[PART] = part.record()
    store = Store.create(path, samples, dataset=meta, reasons=reasons)
    if earlier is not None:
        earlier.carry_text(store)
    keep_groups(store, data.groups, data.spec, observer)
    return store
