"""``extract`` computes the features of a dataset with backbones and stores them. It keeps features already stored."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from fedcache.extract.compute_features import (
    ExtractionOptions,
    check_chunk_rows,
    extract_arrays,
    make_writers,
    report_kept,
)
from fedcache.extract.datasets import holds_of, in_memory, parts_of, peek
from fedcache.extract.datasets.columns import with_keys
from fedcache.extract.datasets.dataset import (
    Context,
    Dataset,
    UnchangedSource,
    samples_of,
    trained_and_tested,
)
from fedcache.extract.datasets.kinds import CONTENT
from fedcache.extract.device import cores
from fedcache.extract.how import jobs_of, resolve_compute
from fedcache.extract.planning import plan as planning
from fedcache.extract.planning.cost import expected_seconds
from fedcache.extract.planning.find_store import (
    READ_WITH,
    bring_groups,
    dataset_of_store,
    ingested_path,
    keep_groups,
    open_with_progress,
    pinned_store,
    refuse_several_datasets,
    remember_groups,
    resolve_path,
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
from fedcache.store.manifest import PART, VANISHED, Manifest, StorePart, part_of
from fedcache.store.samples import INGESTED
from fedcache.store.store import Store, finished_arrays
from fedcache.store.writer import stored_manifest
from fedcache.tables.roles import need_labels
from fedcache.tables.words import some_names


@dataclass
class Extraction:
    """What ``extract`` did.

    Attributes:
        path: the store.
        dataset: spec, slug and digest.
        arrays: per array {key, backbone, recipe, shape, state before this run, kept chunks, forward batches}.
        images: number of images of the dataset. A store may have more rows: those of images that have vanished.
        ok: number of rows with a readable image.
        bad: {row, name, reason} of every unreadable image of the store, found in this run or before.
        decoded: images decoded in this run.
        seconds: wall time of decoding and the models (0 when nothing was to do).
        rate: images per second.
        busy: share of the cores' time spent in decoding and the models.
        workers: processes that computed.
        skipped: backbones left out by ``skip_missing``.
        text: per backbone with text {backbone, templates, state}. The state is ``computed``, ``made current`` or
            ``current``; in a plan it is ``to compute`` or ``complete``.
        growth: if the dataset had changed: images ``new`` and ``vanished``, ``reused_chunks`` and
            ``forward_passes`` (images, summed over arrays) of this run, or of the plan.
        vanished: rows kept for images that are no longer in the dataset.
        holds: what the dataset holds: images, texts, rows or sounds.
        cut: how many texts of this run each backbone reads only in part; empty if no text was cut.
        part: ``part 1 of 4`` if one part was computed; ``path`` is then its folder, and images, ok and bad count its
            rows alone. None for all of a dataset.
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
        slug = self.dataset["slug"]
        rows = f"{self.ok:,} of {self.images:,} {self.holds}"
        keys = ", ".join(array["key"] for array in self.arrays)
        return f"Extraction({slug}: {rows}, {keys}, {self.path})"


def summarise(
    store: Store,
    planned: Sequence[PlannedArray],
    states: Mapping[str, str],
    stats: ExtractionStats,
) -> Extraction:
    """The figures of an extraction, from the store and the counts of this run, which are empty if nothing ran."""
    arrays = []
    held = finished_arrays(store)
    for item in planned:
        key = item.recipe.key
        info = held[key]
        array = describe_array(item, info.shape, info.dtype, states[key])
        array["kept_chunks"] = stats.kept_chunks.get(key, len(info.chunks))
        array["chunks"] = len(info.chunks)
        array["forward_batches"] = stats.forward_batches[key]
        arrays.append(array)
    dataset = {name: str(store.dataset[name]) for name in ("slug", "digest")}
    out = Extraction(store.path, dataset, arrays)
    if planned:
        out.holds = planned[0].backbone.reads
    listed = store.quarantined()
    out.bad = [entry for entry in listed if entry["reason"] != VANISHED]
    out.vanished = len(listed) - len(out.bad)
    out.images = store.rows - out.vanished
    out.ok = store.rows_ok
    part = part_of(store.dataset)
    if part is not None:
        out.part = str(part)
        out.images, out.bad = rows_of_part(store)
        out.ok = out.images - len(out.bad)
    out.decoded = stats.images
    out.seconds = stats.seconds
    out.rate = stats.rate
    out.busy = stats.busy(cores())
    out.workers = stats.workers
    cut = {item.backbone.name: stats.cut[item.recipe.key] for item in planned}
    out.cut = {name: count for name, count in cut.items() if count}
    return out


FULL_DISK_MARGIN = 64 << 20
"""Bytes that must stay free on the disk after the features are written."""


def check_disk(
    path: Path, data: Dataset, planned: Sequence[PlannedArray], part: StorePart | None
) -> None:
    """Raise MachineError, before any work, if the disk cannot hold the arrays, or the rows of ``part`` in them."""
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    need = sum(array_bytes(len(data.names), p) for p in planned)
    if part is not None:
        need = math.ceil(need / part.of)
    if need + FULL_DISK_MARGIN > free:
        raise MachineError(
            f"The features need {need:,} bytes plus a margin of {FULL_DISK_MARGIN:,}, but {parent} has {free:,} free.",
            "Free some space, choose another place with --store or FEDCACHE_HOME, or extract fewer backbones or views.",
        )


def describe_growth(growth: Mapping[str, int], holds: str) -> str:
    """The numbers of ``Extraction.growth`` in one clause."""
    new = counted(growth["new"], one_of(holds))
    vanished = growth["vanished"]
    chunks = counted(growth["reused_chunks"], "chunk")
    passes = counted(growth["forward_passes"], "forward pass")
    return f"{new} new, {vanished:,} vanished, {chunks} reused, {passes}"


def estimate(
    path: Path,
    data: Dataset,
    planned: Sequence[PlannedArray],
    config: ExtractConfig,
    home: Home,
    options: ExtractionOptions,
    part: StorePart | None,
) -> Extraction:
    """``--dry-run``: what would be computed, its bytes, and its time, for which a few batches are timed here."""
    device, settings = resolve_compute(config, [item.backbone for item in planned])
    jobs = jobs_of(planned, data, device, settings)
    observer = options.observer
    earlier = plan_incremental(
        path,
        data,
        jobs,
        home,
        chunk_rows=options.chunk_rows,
        # A part takes over nothing of an earlier store.
        fresh=options.fresh or part is not None,
        observer=observer,
    )
    whole = {}
    # Images that exist now. In the order of an earlier store, the data also has rows of images that have vanished.
    present = np.ones(len(data), np.uint8)
    if earlier is not None:
        data = earlier.data
        whole = earlier.whole
        present = earlier.data.ok
    rows = len(data)
    out = Extraction(path, {"slug": data.slug, "digest": data.digest}, [])
    out.holds = data.holds
    meta: dict[str, Any] = {**out.dataset}
    if part is not None:
        out.part = str(part)
        meta[PART] = part.record()
    found = stored_manifest(path, meta)
    # Without a store, this one is only in memory.
    store = Store(path, found or Manifest(meta, rows, rows, data.classes, data.domains, {}))
    writers = make_writers(store, data, jobs, settings, options, earlier)
    covered = np.zeros(rows, bool)
    images = 0  # to compute, summed over arrays
    todo = []
    for job, item in zip(jobs, planned, strict=True):
        writer = writers[job.key]
        if found is not None:
            writer.look()
        size = writer.chunk_rows
        own = slice(writer.own.start * size, writer.own.stop * size)
        covered[own] = True
        state = "complete"
        missing = writer.missing()
        if missing:
            state = "to compute"
            todo.append(job)
        for chunk in missing:
            if chunk >= whole.get(writer.key, 0):
                images += int(present[chunk * size : (chunk + 1) * size].sum())
        array = describe_array(item, writer.shape, writer.dtype, state)
        array["bytes"] = array_bytes(len(covered[own]), item)
        out.arrays.append(array)
    report_kept(writers, observer)
    out.images = int(present[covered].sum())
    if part is None and not todo:
        out.ok = store.rows_ok
    if earlier is not None and earlier.parent is not None:
        earlier.reused = sum(whole.values())
        out.growth = earlier.result(images)
        out.vanished = len(earlier.data.vanished)
        observer.note(f"The new store would start from {earlier.parent.path.name}.")
    wanted = wanted_text(store, planned, data.classes, data.template, config, part, keep=False)
    lacking = missing_text(store, planned, wanted)
    for item in planned:
        key = item.recipe.key
        if key in wanted:
            state = "complete"
            if key in lacking:
                state = "to compute"
            out.text.append(
                {"backbone": item.backbone.name, "templates": list(wanted[key]), "state": state}
            )
    # A backbone without weights files can always be timed; another one only if its weights are on this machine.
    ready = all(job.weights.path is not None or not job.backbone.files for job in todo)
    if ready and images:
        # Rows of one array, on average over the arrays.
        rows = math.ceil(images / len(todo))
        out.seconds = expected_seconds(data, todo, settings, options.workers, rows)
        if out.seconds:
            out.rate = rows / out.seconds
        observer.note(
            f"Estimated from a few batches on this machine: about {out.rate:,.0f} {data.holds}/s."
        )
    return out


COLUMNS = ("images_key", "label_key", "split_key", "domain_key", "group_key", "no_label")
"""Fields of the configuration that give columns of the dataset a role."""


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
    """Run every backbone of ``config`` over its dataset, and resume an extraction that a store holds in part.

    A finished extraction is recognised from the manifest alone: no image is read, no model is loaded and torch is not
    imported. If the dataset has changed, only its new images are computed (``planning.incremental``) unless ``fresh``.
    The prompt templates requested (``config.text``, else the default) become the current ones, which training reads;
    with ``keep_text`` the default templates do not replace a backbone's current ones. ``engine`` computes features in
    other processes or on other machines, with the same bytes. ``images`` are a dataset in the memory of the calling
    program (``datasets.in_memory``); the configuration then names none. With ``config.part``, only that part is
    computed, in a folder next to the place of the store, and ``planning.parts.join`` assembles all parts. A part never
    takes over rows of an earlier store. Raises UsageError, StoreError (locked, other dataset), CorruptionError (too
    many bad images), MachineError (weights, device, disk), StoppedError (after a stop).
    """
    observer = observer or Silent()
    part = None
    if config.part is not None:
        part = parse_part(config.part, observer)
        config = replace(config, part=None)
    if engine is not None:
        engine.check_extraction(config.workers)
    planned, skipped = plan_of(config, home, observer, images, rehash=rehash)
    requested_device = config.device  # where_it_can_run may replace auto by cpu
    config = planning.bare_config(planning.known_config(config, home))
    config = where_it_can_run(config, planned, engine, observer)
    if not dry_run:
        planned = [pull_if_needed(p, config, home, observer) for p in planned]
    program_data = None
    if images is None:
        spec, config = spec_of(config, home, observer)
        holds = holds_of(spec)
    else:
        with progress_of(observer, "reading", "images") as progress:
            memory_context = Context(planning.memory_of(home), progress=progress)
            program_data, config = images_of_the_program(images, config, memory_context)
            spec = program_data.spec
            holds = program_data.holds
    planning.check_reads(planned, spec, holds)
    if store is not None:
        store = resolve_path(home, store)
    context = planning.context_of(config, home, rehash=rehash)
    known = None
    if program_data is not None:
        known = (program_data.slug, program_data.digest)
    elif not rehash:
        known = peek(spec, context)
    # Return here if the extraction is finished: look for the whole store first, then for the requested part.
    if known is not None:
        slug, digest = known
        # --store takes precedence over the place that --name gives.
        if config.name is not None:
            store = store or named_place(home, config.name, digest)
        path = store or place_of_content(home, slug, digest)
        done = finished(path, digest, planned, config, keep_text=keep_text, dry_run=dry_run)
        if part is not None:
            part_path = place_of_part(part, path)
            if done is not None:
                observer.note(f"{path.name} has the whole dataset, so {part} is not needed.")
            elif not fresh:
                done_part = finished(
                    part_path, digest, planned, config, part, keep_text=keep_text, dry_run=dry_run
                )
                if done_part is not None:
                    done_part.skipped = skipped
                    return done_part
        if done is not None and (part is not None or not fresh):
            if not dry_run:
                bring_groups(path, spec, context, observer, program_data)
            done.skipped = skipped
            for option, value in (("--device", requested_device), ("--dtype", config.dtype)):
                if value != "auto":
                    observer.note(
                        f"{option} {value} has no effect, because all features are stored already. --fresh computes "
                        "them again."
                    )
            remember_last(home, path, spec)
            return done
    data = program_data or read_dataset(spec, context, observer)
    report_dataset(data, spec, config.augment, observer)
    if data.may_be_labels:
        raise labels_to_name(spec, data.may_be_labels)
    if config.name is not None:
        store = store or named_place(home, config.name, data.digest)
        data = replace(data, slug=usable_name(config.name))
    path = store or place_of_data(home, data, observer)
    if part is not None:
        path = place_of_part(part, path)
    options = ExtractionOptions(
        workers=config.workers,
        chunk_rows=config.chunk_rows,
        # A share such as 1% is one of the images that exist now, without those that have vanished.
        max_bad=planning.parse_max_bad(config.max_bad, len(data.names)),
        wait=wait,
        fresh=fresh,
        stop=stop or Stop(),
        observer=observer,
        engine=engine,
    )
    if dry_run:
        extraction = estimate(path, data, planned, config, home, options, part)
    else:
        extraction = compute(path, data, planned, config, home, options, part, keep_text=keep_text)
    extraction.skipped = skipped
    if part is None and not dry_run:
        remember_groups(extraction.store, spec, context)
        remember_last(home, path, spec)
    return extraction


def labels_to_name(spec: str, may_be_labels: Mapping[str, int]) -> FedcacheError:
    """The error for a dataset without labels that has columns which may hold them; the hint has a spec with labels."""
    parts = parts_of(spec)
    if parts is None:
        likely = next(iter(may_be_labels))
        spec_with_label = ""
        if spec.partition(":")[0] in CONTENT:
            spec_with_label = with_keys(spec, {"--label-key": likely})
        return need_labels(spec, may_be_labels, spec_with_label)
    # Columns of several datasets are written NAME/COLUMN; the first column of each is chosen.
    chosen: dict[str, str] = {}
    for written in may_be_labels:
        name, _, column = written.partition("/")
        chosen.setdefault(name, column)
    labelled = []
    for name, part_spec in parts.items():
        with_label = with_keys(part_spec, {"--label-key": chosen.get(name)})
        labelled.append(f"{name}={with_label}")
    error = need_labels(spec, may_be_labels)
    joined = shell_word(",".join(labelled))
    return UsageError(
        error.message,
        f"Give the label columns in the dataset specification: --dataset {joined}",
    )


def plan_of(
    config: ExtractConfig, home: Home, observer: Observer, images: Any, *, rehash: bool
) -> tuple[list[PlannedArray], list[str]]:
    """As ``planning.plan``; if no backbone is given and the dataset is unknown too, one error reports both."""

    def make_plan() -> tuple[list[PlannedArray], list[str]]:
        return planning.plan(config, home, observer, rehash=rehash)

    def kind_of_dataset() -> str:
        spec, _ = spec_of(config, home, observer)
        return holds_of(spec)

    if not config.backbones and images is None:
        all_at_once([kind_of_dataset, make_plan])
    return make_plan()


def read_dataset(spec: str, context: Context, observer: Observer) -> Dataset:
    """The dataset of a spec. Reports how far its files have been hashed, and how many links were left out."""
    data = open_with_progress(spec, context, observer)
    if data.links_left_out:
        observer.warn(
            f"{counted(data.links_left_out, 'link')} to files outside the dataset's folder left out (to "
            "read them: --follow-links)."
        )
    return data


def report_dataset(data: Dataset, spec: str, augment: str | None, observer: Observer) -> None:
    """Report how a dataset was read, whether flips are left out, and how many test rows equal training rows."""
    observer.note(f"{spec}: {data.reading}")
    if not data.mirror and augment is not None:
        steps = [step.name for step in parse_policy(augment)]
        if "flip" in steps:
            observer.note(
                "The augmented views are not flipped, because a mirrored image of this dataset may belong to another "
                "class."
            )
    both = trained_and_tested(data)
    if both:
        rows = counted(both, "test row")
        observer.warn(f"{rows} with exactly the same content as a training row.")


def spec_of(config: ExtractConfig, home: Home, observer: Observer) -> tuple[str, ExtractConfig]:
    """The spec of the dataset, and the configuration without the options for columns, which the spec contains now."""
    config = replace(config, dataset=config.dataset or default_dataset(home, observer))
    config = of_named_store(config, home)
    spec = str(config.dataset)
    if ingested_path(home, spec) is not None and ":" not in spec:
        spec = f"{INGESTED}:{spec}"
    options = {}
    for name in COLUMNS:
        option = "--" + name.replace("_", "-")
        options[option] = getattr(config, name)
    if config.unlabelled:
        options["--unlabelled"] = "yes"
    if any(options.values()):
        spec = with_keys(spec, options)
    no_columns: dict[str, Any] = dict.fromkeys(COLUMNS)
    return spec, replace(config, **no_columns, unlabelled=False)


def of_named_store(config: ExtractConfig, home: Home) -> ExtractConfig:
    """The configuration; if ``config.dataset`` names a store, with the dataset and reading options of that store."""
    path = store_of_dataset(home, str(config.dataset))
    if path is None:
        return config
    known = dataset_of_store(Store.open(path, part=True), home)
    if known is None:
        return config
    return replace(config, **{key: getattr(known, key) for key in READ_WITH})


def named_place(home: Home, name: str, digest: str) -> Path:
    """The path of the store of a dataset with a name given by the user, ``mine-1a2b3c4d.zarr``.

    Raises UsageError if embeddings have this name, or a store has the same content under another name.
    """
    slug = usable_name(name)
    if slug in ingested_stores(home):
        raise UsageError(
            f"{name} is already the name of ingested embeddings.", "Choose another --name."
        )
    place = place_of_content(home, slug, digest)
    if place != home.store(slug, digest):
        raise UsageError(
            f"This dataset is already stored, under the name {place.name}.",
            f"To add features to that store, leave out --name. To see it: fedcache inspect {shell_word(place.name)}",
        )
    return place


def images_of_the_program(
    images: Any, config: ExtractConfig, context: Context
) -> tuple[Dataset, ExtractConfig]:
    """The dataset of images that the program holds, and the configuration with 0 workers unless some were requested.

    Raises UsageError for options that apply to files alone, and for workers if the images cannot be sent to them.
    """
    for name in ("layout", *COLUMNS):
        if getattr(config, name) is not None:
            raise UsageError(
                f"{name} applies only to files, but the images are given in memory.",
                f"Leave {name} out.",
            )
    if config.workers:
        why = in_memory.can_travel(images)
        if why is not None:
            raise UsageError(
                f"The images cannot be sent to {config.workers} workers: {why}.",
                "Use workers=0 to read them in this process.",
            )
    data = in_memory.load(images, context)
    if config.limit is not None:
        data = data.part(config.limit)
    return data, replace(config, workers=config.workers or 0)


def place_of_data(home: Home, data: Dataset, observer: Observer) -> Path:
    """The path of the store of a dataset. Reports it if the dataset is already stored under another name."""
    path = place_of_content(home, data.slug, data.digest)
    if path != home.store(data.slug, data.digest):
        observer.note(
            f"These {data.holds} are already stored, under the name {path.name}. fedcache uses that store."
        )
    return path


def pull_if_needed(
    planned: PlannedArray, config: ExtractConfig, home: Home, observer: Observer
) -> PlannedArray:
    """Download weights that the backbone's own library publishes; size and source are printed first."""
    if planned.weights.path is not None or planned.weights.download is None:
        return planned
    backbone = planned.backbone
    observer.note(f"{backbone.name}: downloading {planned.weights.download}")
    weights = registry.pull(backbone, home=home.root, memory=planning.memory_of(home))
    recipe = planning.recipe_of(backbone, weights, config)
    return PlannedArray(backbone, weights, recipe)


def where_it_can_run(
    config: ExtractConfig,
    planned: Sequence[PlannedArray],
    engine: ExtractionEngine | None,
    observer: Observer,
) -> ExtractConfig:
    """The configuration, with the CPU as its device if a backbone's library computes nowhere else.

    Raises UsageError if another device or dtype was requested, or an engine for a module in this process's memory.
    """
    only_here = ", ".join(item.backbone.name for item in planned if item.backbone.here_only)
    if engine is not None and only_here:
        raise UsageError(
            f"{only_here} exists only in the memory of this process, so the processes of the engine cannot load it.",
            "Leave out the engine, or write a function that returns the module, and give its name:  "
            "module:PACKAGE.MODULE:FACTORY",
        )
    cpu_only = ", ".join(item.backbone.name for item in planned if item.backbone.cpu_only)
    if not cpu_only:
        return config
    if config.device.startswith("cuda") or config.dtype not in ("auto", "float32"):
        raise UsageError(
            f"{cpu_only} is computed on the CPU in float32, but {config.device} and {config.dtype} were requested.",
            "--device cpu --dtype float32; extract other backbones in a separate command.",
        )
    if config.device == "auto":
        observer.note(f"Device cpu, because the library of {cpu_only} supports only the CPU.")
    return replace(config, device="cpu")


def default_dataset(home: Home, observer: Observer) -> str:
    """The dataset that fedcache.toml of this folder names, else the one extracted last, else ``digits``.

    Raises StoreError if the home has stores of several datasets, CorruptionError for a damaged note of the last
    extraction, and UsageError if there is no such note although a store exists.
    """
    pinned = pinned_store()
    if pinned is not None:
        spec = pinned.get("dataset") or slug_in(Path(pinned["store"]))
        observer.note(f"Using dataset {spec}, set by {FILE_NAME} of this folder.")
        return spec
    refuse_several_datasets(home)
    last = recall_last(home)
    if last is not None:
        _, spec = last
        why = "the dataset extracted last"
    else:
        stores = finished_stores(home)
        if stores:
            named = some_names([store.path.name for store in stores], 5)
            raise UsageError(
                "No dataset was given, and fedcache does not know which one was extracted last; "
                f"{home.stores} contains {named}.",
                "Give one, for example:  fedcache extract --dataset digits",
            )
        spec = "digits"
        why = "the offline dataset, because there is no store yet"
    observer.note(f"Dataset: {spec} ({why}; change with --dataset).")
    return spec


def remember_orders(
    home: Home, data: Dataset, planned: Sequence[PlannedArray], config: ExtractConfig
) -> None:
    """Remember the options with which each array was requested, so that ``train`` can complete an unfinished one.

    They are stored in the home, because a store contains no paths.
    """
    memory = planning.memory_of(home)
    for item in planned:
        name = item.backbone.name
        # Keep the options of this backbone, and those without a backbone's name, which apply to all.
        recipe = {
            key: value
            for key, value in config.recipe.items()
            if key.rpartition(":")[0] in ("", name)
        }
        weights = {}
        if name in config.weights:
            weights[name] = config.weights[name]
        order = replace(
            config,
            dataset=data.spec,
            backbones=(name,),
            recipe=recipe,
            weights=weights,
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
    """The requested extraction, if the store or the part of a store at ``path`` already holds all of it; else None.

    Chunk files of a part are verified, because no command reads them before parts are joined. Those of a store are
    only listed. Raises CorruptionError if one is missing or has another size.
    """
    try:
        store = Store.open(path, part=part is not None)
    except StoreError:
        return None
    keys = [item.recipe.key for item in planned]
    if store.content != digest or not finished_arrays(store).keys() >= {*keys}:
        return None
    if part is None:
        for key in keys:
            store.reader(key).check_files()
    elif part_of(store.dataset) != part or not chunks_are_whole(store, keys):
        return None
    classes = store.manifest.classes
    template = store.dataset.get("template")
    wanted = wanted_text(store, planned, classes, template, config, part, keep=keep_text)
    if missing_text(store, planned, wanted):
        return None
    done = summarise(store, planned, dict.fromkeys(keys, "complete"), ExtractionStats())
    if not dry_run:
        # (): this run computed no text features.
        done.text = planning.make_current(store, planned, wanted, ())
        clean_up(store)
    return done


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
    parent = None
    if earlier is not None:
        data = earlier.data
        parent = earlier.parent
        if parent is not None:
            new = counted(earlier.data.new, one_of(data.holds))
            observer.note(f"The new store starts from {parent.path.name}; {new} will be added.")
    check_disk(path, data, planned, part)
    data = replace(data, source=UnchangedSource(data.source, data.uid))
    is_new = not path.exists()
    store = open_or_create(path, data, home, earlier, part, observer)
    wanted = wanted_text(store, planned, data.classes, data.template, config, part, keep=keep_text)
    if not data.classes and any(item.backbone.text_width is not None for item in planned):
        observer.note(
            "The dataset has no classes, so it has no text features, which some methods need."
        )
    text = missing_text(store, planned, wanted)
    states = dict.fromkeys([job.key for job in jobs], "new")
    if not options.fresh:
        states |= dict.fromkeys(states.keys() & store.arrays.keys(), "complete")
    try:
        stats = extract_arrays(
            store,
            data,
            jobs,
            settings,
            options,
            earlier=earlier,
            text=text,
            # A command that is refused must not replace the options with which an array can be completed.
            when_open=partial(remember_orders, home, data, planned, config),
        )
    except UsageError:
        # The images themselves were refused. If this call created the store and it holds nothing, it is removed.
        is_empty = not Store.open(path, part=True).arrays
        if is_new and is_empty and not any(journal.chunks for journal in journals(path)):
            shutil.rmtree(path)
        raise
    for key, kept in stats.kept_chunks.items():
        if states[key] == "new" and kept:
            chunks = counted(kept, "chunk")
            states[key] = f"resumed at {chunks}"
            # Chunks that were kept in a new array come from the earlier store.
            if earlier is not None and key in earlier.whole:
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
    store = Store.open(path, part=True)
    done = summarise(store, planned, states, stats)
    clean_up(store)
    done.text = planning.make_current(store, planned, wanted, text)
    if earlier is not None and parent is not None:
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
    """The store of ``data`` at ``path``, or a part of it, created if there is none.

    It gets the groups of the data, and the text features of an earlier store.
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
    samples = samples_of(data, ok)
    # The manifest describes the content of the dataset, never its location.
    meta: dict[str, Any] = {"slug": data.slug, "digest": data.digest, "template": data.template}
    # ``content`` is the digest of the dataset in its own order; ``grown`` is the digest of the earlier store.
    if earlier is not None:
        meta["content"] = earlier.data.content
        meta["grown"] = None
        if earlier.parent:
            meta["grown"] = earlier.parent.dataset["digest"]
    if part is not None:
        meta[PART] = part.record()
    store = Store.create(path, samples, dataset=meta, reasons=reasons)
    if earlier is not None:
        earlier.carry_text(store)
    keep_groups(store, data.groups, data.spec, observer)
    return store
