"""``extract``: images, texts or rows and backbones to a store, and nothing at all when the store has everything."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import FILE_NAME, ExtractConfig, Home, to_table
from fedcache.errors import (
    FedcacheError,
    MachineError,
    StoreError,
    UsageError,
    all_at_once,
    shell_word,
)
from fedcache.extract import backbones as registry
from fedcache.extract.augment import parse_policy
from fedcache.extract.compute_features import ExtractionOptions, check_chunk_rows, extract_arrays
from fedcache.extract.datasets import holds_of, in_memory, open_dataset, parts_of, peek
from fedcache.extract.datasets.columns import with_keys
from fedcache.extract.datasets.dataset import Context, Dataset, trained_and_tested
from fedcache.extract.datasets.kinds import CONTENT
from fedcache.extract.device import cores
from fedcache.extract.how import jobs_of, resolve_compute
from fedcache.extract.planning import plan as planning
from fedcache.extract.planning.cost import expected_seconds
from fedcache.extract.planning.find_store import (
    bring_groups,
    dataset_of_store,
    ingested_path,
    keep_groups,
    pinned_store,
    remember_groups,
    resolve_path,
    several_datasets,
    slug_in,
    store_of_dataset,
)
from fedcache.extract.planning.incremental import (
    IncrementalDataset,
    IncrementalPlan,
    plan_incremental,
)
from fedcache.extract.planning.parts import parse_part, place_of_part
from fedcache.extract.planning.plan import (
    PlannedArray,
    array_bytes,
    describe_array,
    missing_text,
    wanted_text,
)
from fedcache.extract.recipe import IMAGES, one_of
from fedcache.extract.workers.chunk_tasks import ExtractionEngine
from fedcache.extract.workers.local import ExtractionStats
from fedcache.parsing import counted
from fedcache.process import Stop
from fedcache.progress import Observer, Silent, progress_of
from fedcache.store.catalog import (
    clean_up,
    finished_stores,
    ingested_stores,
    place_of_content,
    recall_last,
    remember_last,
)
from fedcache.store.content import usable_name
from fedcache.store.files import make_private
from fedcache.store.join import chunks_are_whole, rows_of_part
from fedcache.store.journal import journals
from fedcache.store.manifest import PART, VANISHED, StorePart, part_of
from fedcache.store.samples import INGESTED
from fedcache.store.store import Samples, Store, finished_arrays
from fedcache.tables.roles import need_labels
from fedcache.tables.words import some_names


@dataclass
class Extraction:
    """What ``extract`` did.

    Attributes:
        path: the store.
        dataset: spec, slug and digest.
        arrays: per array {key, backbone, recipe, shape, state before, kept chunks, forward batches}.
        images: of the dataset; rows of images that have vanished are not counted.
        ok: rows whose image was readable.
        bad: {row, name, reason} of every unreadable image of the store, found in this run or before.
        decoded: images decoded in this run.
        seconds: wall time of decoding and the models (0 when nothing was to do).
        rate: images per second.
        busy: share of the cores' time spent in decoding and the models.
        skipped: backbones left out by ``skip_missing``.
        text: per backbone with text {backbone, templates, state}: computed | made current | current, and in a plan
            to compute | complete.
        growth: where the dataset had changed: images ``new`` and ``vanished``, ``reused_chunks`` and
            ``forward_passes`` (images, summed over arrays) of this run, or of the plan.
        vanished: rows kept for images that are no longer in the dataset.
        holds: what the dataset holds: images, texts or rows.
        cut: how many texts of this run each backbone reads only in part; empty if no text was cut.
        part: ``part 1 of 4`` where one part was computed; ``path`` is then its folder, and images, ok and bad are
            of its rows. None for all of a dataset.
    """

    path: Path
    dataset: dict[str, str]
    arrays: list[dict[str, Any]]
    images: int = 0
    ok: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    decoded: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    busy: float = 0.0
    workers: int = 0
    skipped: list[str] = field(default_factory=list)
    text: list[dict[str, Any]] = field(default_factory=list)
    growth: dict[str, Any] | None = None
    vanished: int = 0
    holds: str = IMAGES
    cut: dict[str, int] = field(default_factory=dict)
    part: str | None = None

    @property
    def store(self) -> Store:
        """The store, or the part of one, opened."""
        return Store.open(self.path, part=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "path": str(self.path)}

    def __repr__(self) -> str:
        names = ", ".join(a["key"] for a in self.arrays)
        return f"Extraction({self.dataset['slug']}: {self.ok:,} of {self.images:,} {self.holds}, {names}, {self.path})"


def summarise(
    store: Store,
    planned: Sequence[PlannedArray],
    states: Mapping[str, str],
    stats: ExtractionStats | None,
) -> Extraction:
    """The figures of an extraction, from the store and what was computed."""
    arrays = []
    held = finished_arrays(store)
    for item in planned:
        key = item.recipe.key
        info = held[key]
        kept = len(info.chunks)
        computed = 0
        if stats is not None:
            kept = stats.kept_chunks.get(key, 0)
            computed = stats.forward_batches[key]
        arrays.append(
            {
                **describe_array(item, info.shape, info.dtype, states[key]),
                "kept_chunks": kept,
                "chunks": len(info.chunks),
                "forward_batches": computed,
            }
        )
    out = Extraction(store.path, {k: str(store.dataset[k]) for k in ("slug", "digest")}, arrays)
    out.holds = planned[0].backbone.reads if planned else IMAGES
    listed = store.quarantined()
    out.bad = [entry for entry in listed if entry["reason"] != VANISHED]
    out.vanished = len(listed) - len(out.bad)
    out.images = store.rows - out.vanished
    out.ok = store.rows_ok
    if (part := part_of(store.dataset)) is not None:
        out.part = str(part)
        out.images, out.bad = rows_of_part(store)
        out.ok = out.images - len(out.bad)
    if stats is not None:
        out.decoded = stats.images
        out.seconds = stats.seconds
        out.rate = stats.rate
        out.busy = stats.busy(cores())
        out.workers = stats.workers
        cut = {item.backbone.name: stats.cut[item.recipe.key] for item in planned}
        out.cut = {name: count for name, count in cut.items() if count}
    return out


FULL_DISK_MARGIN = 64 << 20


def check_disk(
    path: Path, data: Dataset, planned: Sequence[PlannedArray], part: StorePart | None
) -> None:
    """Refuse before any work what the disk cannot hold of the arrays, or of a part of them."""
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    need = sum(array_bytes(len(data.names), p) for p in planned)
    if part is not None:
        need = math.ceil(need / part.of)
    if need + FULL_DISK_MARGIN > free:
        raise MachineError(
            f"The features need {need:,} bytes plus a margin of {FULL_DISK_MARGIN:,}, but {parent} has "
            f"{free:,} free.",
            "Free some space, choose another place with --store or FEDCACHE_HOME, or extract fewer backbones or views.",
        )


def describe_growth(growth: Mapping[str, int], holds: str = IMAGES) -> str:
    """Numbers of rows that are new, gone, taken over and to compute, in one clause."""
    chunks = counted(growth["reused_chunks"], "chunk")
    passes = counted(growth["forward_passes"], "forward pass")
    return f"{counted(growth['new'], one_of(holds))} new, {growth['vanished']:,} vanished, {chunks} reused, {passes}"


def estimate(
    path: Path,
    data: Dataset,
    planned: Sequence[PlannedArray],
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    skipped: list[str],
    *,
    fresh: bool,
) -> Extraction:
    """``--dry-run``: what would be computed, its bytes, and the time by timing a few batches here."""
    try:
        store: Store | None = Store.open(path)
    except StoreError:
        store = None
    jobs = jobs_of(planned, data, *resolve_compute(config, [p.backbone for p in planned]))
    earlier = plan_incremental(
        path, data, jobs, home, chunk_rows=config.chunk_rows, fresh=fresh, observer=observer
    )
    present = len(data.names)
    if earlier is not None:
        data = earlier.data
    todo = [p for p in planned if store is None or p.recipe.key not in store.arrays]
    arrays = []
    for p in planned:
        shape = (len(data.names), p.recipe.views, p.backbone.width)
        state = "complete"
        if p in todo:
            state = "to compute"
        size = array_bytes(len(data.names), p)
        arrays.append({**describe_array(p, shape, p.recipe.dtype, state), "bytes": size})
    out = Extraction(
        path, {"slug": data.slug, "digest": data.digest}, arrays, images=present, skipped=skipped
    )
    out.holds = data.holds
    if store is not None and not todo:
        out.ok = store.rows_ok
    images = len(todo) * present
    if earlier is not None and earlier.parent is not None:
        out.growth = earlier.expected(p.recipe.key for p in todo)
        out.vanished = len(earlier.data.vanished)
        images = out.growth["forward_passes"]
        observer.note(
            f"Would grow from {earlier.parent.path.name}: {describe_growth(out.growth, data.holds)}."
        )
    wanted = wanted_text(store, planned, data.classes, data.template, config, keep=False)
    lacking = missing_text(store, planned, wanted)
    for p in planned:
        if p.recipe.key in wanted:
            state = "complete"
            if p.recipe.key in lacking:
                state = "to compute"
            templates = list(wanted[p.recipe.key])
            out.text.append({"backbone": p.backbone.name, "templates": templates, "state": state})
    ready = all(p.weights.path is not None or not p.backbone.files for p in todo)
    if ready and images:
        rows = math.ceil(images / len(todo))
        out.seconds = expected_seconds(data, todo, config, rows)
        if out.seconds:
            out.rate = rows / out.seconds
        observer.note(
            f"Estimated from a few batches on this machine: about {out.rate:,.0f} {data.holds}/s."
        )
    return out


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
    prompt templates requested (``config.text``, else the default) become the current ones, which training reads; with
    ``keep_text`` a default leaves a backbone's current text as it is. What is computed is computed on ``engine``, to
    the same bytes. ``images`` are a dataset that the program holds (``datasets.in_memory``), in place of one that the
    configuration names. Where it names a part (``config.part``), that part alone is computed, in a folder next to the
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
        with progress_of(observer, "reading", "images") as progress:
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
    if known is not None and config.name is not None:
        store = store or named_place(home, config.name, known[1])
    if known is not None:
        path = store or place_of_content(home, *known)
        done = finished(path, known[1], planned, config, keep_text=keep_text, dry_run=dry_run)
        if part is not None:
            place = place_of_part(part, path)
            if done is not None:
                observer.note(f"{path.name} has the whole dataset, so {part} is not needed.")
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
                    f"--device {device} has no effect, because all features are stored already."
                )
            remember_last(home, path, spec)
            return done
    data = held or read_dataset(spec, where, observer)
    say_dataset(data, spec, config.augment, observer)
    if data.may_be_labels:
        raise labels_to_name(spec, data.may_be_labels)
    if config.name is not None:
        store = store or named_place(home, config.name, data.digest)
        data = replace(data, slug=usable_name(config.name))
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
        # Rows of the dataset, without images that have vanished.
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
        error.message,
        f"Give the label columns in the dataset specification: --dataset {shell_word(named)}",
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
    """The dataset of a spec; reports progress of its digests, and links that were left out."""
    with progress_of(observer, "reading", holds_of(spec)) as progress:
        data = open_dataset(spec, replace(where, progress=progress))
    if data.links_left_out:
        observer.warn(
            f"{counted(data.links_left_out, 'link')} to files outside the dataset's folder left out (to "
            "read them: --follow-links)."
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
            "Views are not flipped, because a mirrored image of this dataset may belong to another class."
        )
    if both := trained_and_tested(data):
        verb = "hold"
        if both == 1:
            verb = "holds"
        observer.warn(
            f"{counted(both, 'test row')} {verb} the content of a training row, byte for byte."
        )


def spec_of(config: ExtractConfig, home: Home, observer: Observer) -> tuple[str, ExtractConfig]:
    """The dataset that is meant, with the columns that options name: from here on the spec says them."""
    config = replace(config, dataset=config.dataset or default_dataset(home, observer))
    config = of_named_store(config, home)
    spec = str(config.dataset)
    if ingested_path(home, spec) is not None and ":" not in spec:
        spec = f"{INGESTED}:{spec}"
    options = {f"--{name.replace('_', '-')}": getattr(config, name) for name in COLUMNS}
    options["--unlabelled"] = None
    if config.unlabelled:
        options["--unlabelled"] = "yes"
    if any(options.values()):
        spec = with_keys(spec, options)
    unnamed: dict[str, Any] = dict.fromkeys(COLUMNS)
    return spec, replace(config, **unnamed, unlabelled=False)


def of_named_store(config: ExtractConfig, home: Home) -> ExtractConfig:
    """The configuration with the dataset of the store that it names, and the options that this was read with."""
    path = store_of_dataset(home, str(config.dataset))
    if path is None:
        return config
    known = dataset_of_store(Store.open(path), home)
    if known is None:
        return config
    read_with = ("dataset", "limit", "layout", "follow_links", "data", "name")
    return replace(config, **{key: getattr(known, key) for key in read_with})


def named_place(home: Home, name: str, digest: str) -> Path:
    """The place of the store of a dataset that is named, ``mine-1a2b3c4d.zarr``.

    Raises UsageError where the name is that of embeddings, or a store has the same content under another name.
    """
    slug = usable_name(name)
    if slug in ingested_stores(home):
        raise UsageError(
            f"{name} is the name of embeddings that were ingested.", "Choose another --name."
        )
    place = place_of_content(home, slug, digest)
    if place != home.store(slug, digest):
        raise UsageError(
            f"{place.name} holds the same content under the name it had before.",
            f"fedcache inspect {shell_word(place.name)}   shows it; leave --name out to add features to it.",
        )
    return place


def images_of_the_program(
    images: Any, config: ExtractConfig, context: Context
) -> tuple[Dataset, ExtractConfig]:
    """The dataset of images that the program holds, and the configuration without workers where none was requested.

    Raises UsageError for options that such images do not have, and for workers that cannot be sent them.
    """
    for name in ("layout", *COLUMNS):
        if getattr(config, name) is not None:
            raise UsageError(
                f"{name} applies to reading files, but the images are given in memory.",
                f"Leave {name} out.",
            )
    if config.workers and (why := in_memory.can_travel(images)):
        raise UsageError(
            f"The images cannot be sent to {config.workers} workers: {why}.",
            "Use workers=0 to read them in this process.",
        )
    data = in_memory.load(images, context)
    if config.limit is not None:
        data = data.part(config.limit)
    return data, replace(config, workers=config.workers or 0)


def place_of_data(home: Home, data: Dataset, observer: Observer) -> Path:
    """Where the store of a dataset lies; the observer reports a store with the name of an earlier folder."""
    path = place_of_content(home, data.slug, data.digest)
    if path != home.store(data.slug, data.digest):
        observer.note(
            f"{path.name} contains the same {data.holds} under their earlier name and is used."
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

    Raises UsageError where another device or dtype was requested, or an engine for a module in this process's memory.
    """
    here = [p.backbone.name for p in planned if p.backbone.here_only]
    if engine is not None and here:
        raise UsageError(
            f"{', '.join(here)} is only in the memory of this process, so workers of an engine cannot "
            "load it.",
            "Leave out the engine, or write a factory:  module:PACKAGE.MODULE:FACTORY",
        )
    names = [p.backbone.name for p in planned if p.backbone.cpu_only]
    if not names:
        return config
    if config.device.startswith("cuda") or config.dtype not in ("auto", "float32"):
        raise UsageError(
            f"{', '.join(names)} is computed on the CPU in float32, but {config.device} and "
            f"{config.dtype} were requested.",
            "--device cpu --dtype float32; extract other backbones in a separate command.",
        )
    if config.device == "auto":
        observer.note(
            f"Device cpu, because the library of {', '.join(names)} supports only the CPU."
        )
    return replace(config, device="cpu")


def default_dataset(home: Home, observer: Observer) -> str:
    """The dataset last extracted, else ``digits``.

    Raises CorruptionError for a damaged note of it, UsageError where it is missing and something was extracted before.
    """
    if (pinned := pinned_store()) is not None:
        spec = pinned.get("dataset") or slug_in(Path(pinned["store"]))
        observer.note(f"Dataset {spec}: the one that {FILE_NAME} of this folder names.")
        return spec
    if (unclear := several_datasets(home)) is not None:
        raise unclear
    last = recall_last(home)
    if last is None and (stores := finished_stores(home)):
        named = some_names([store.path.name for store in stores], 5)
        raise UsageError(
            "No dataset was given, and fedcache does not know which one was extracted last; "
            f"{home.stores} contains {named}.",
            "Give one, for example:  fedcache extract --dataset digits",
        )
    spec = "digits"
    why = "the offline dataset, because there is no store yet"
    if last is not None:
        spec = last[1]
        why = "the dataset extracted last"
    observer.note(f"Dataset: {spec} ({why}; change with --dataset).")
    return spec


def remember_orders(
    home: Home, data: Dataset, planned: Sequence[PlannedArray], config: ExtractConfig
) -> None:
    """Note how each array was ordered, so that ``train`` can continue with an unfinished one.

    In the home and not in the store, which says nothing of places.
    """
    memory = planning.memory_of(home)
    for item in planned:
        name = item.backbone.name
        # Options of this backbone, and those of all backbones.
        recipe = {}
        for key, value in config.recipe.items():
            if key.rpartition(":")[0] in ("", name):
                recipe[key] = value
        order = replace(
            config,
            dataset=data.spec,
            backbones=(name,),
            recipe=recipe,
            weights={key: path for key, path in config.weights.items() if key == name},
            skip_missing=False,
        )
        key_of_order = ["order", data.digest, item.recipe.digest]
        memory.remember(key_of_order, [item.recipe.label, to_table(order)])


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
    """The extraction that was requested, when a store, or the part of one, at ``path`` already holds all of it.

    No command reads a part before it is joined, so its chunk files are verified.
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
    if dry_run:
        done.text = planning.make_current(store, planned, {}, ())
    else:
        done.text = planning.make_current(store, planned, wanted, ())
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
            "The dataset has no classes, so it has no text features, which some methods need."
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
    # The manifest describes the content of the dataset, never its location.
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
