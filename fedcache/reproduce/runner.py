"""Measurement of the cells of an entry, with the results next to the printed values.

Each cell and seed is one ordinary run under ``$FEDCACHE_HOME/runs``: a second call reads stored runs, a killed call
continues, and every metric has a std over seeds. A cell that was not run is never shown with a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from fedcache.config import ExtractConfig, Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, MachineError, StoreError, UsageError, shell_word
from fedcache.extract import datasets
from fedcache.extract.backbones import lookup
from fedcache.extract.datasets import Context, Dataset, open_dataset
from fedcache.extract.extract_dataset import extract
from fedcache.extract.images import decode
from fedcache.extract.planning.plan import memory_of, paths_of
from fedcache.extract.recipe import slug
from fedcache.extract.workers.chunk_tasks import ExtractionEngine
from fedcache.federate.engine import outcome as diagnostics
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.outcome import entropy_bits
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.methods import METHODS
from fedcache.federate.methods.common.model import head_of
from fedcache.federate.partition.partition import Columns, InfeasibleError, Partition, make
from fedcache.heads.projection import embed
from fedcache.parsing import Facts, Record
from fedcache.process import Stop
from fedcache.progress import EachOnce, Observer, Silent, progress_of
from fedcache.report.figure_data import draw, linear_cka
from fedcache.reproduce.metrics import (
    AgainstPrinted,
    Measurement,
    Value,
    compare,
    measure,
    over_seeds,
    show_measured,
    show_metric,
    subtract,
)
from fedcache.reproduce.planning import (
    READS,
    Difference,
    Options,
    PaperCell,
    PaperTable,
    PlannedCell,
    Requirement,
    RequirementCheck,
    find_domain,
    match_domains,
    plan,
)
from fedcache.runs.features import Preparation
from fedcache.runs.loop import prepare_run, row_source, train
from fedcache.runs.partitions import columns_of
from fedcache.runs.spec import parse_participation, parse_seeds
from fedcache.runs.store_choice import pixel_recipe
from fedcache.store.files import make_private
from fedcache.store.manifest import read_text, text_of_array
from fedcache.store.store import Store

# Measurement of cells whose values do not come from stored runs, with a function for each kind of cell.

# Preparation of the data of a cell: the store with its features, or only the images, and the partition.

DOMAIN_CLIENTS = ("feature-shift", "feature-label-shift")
"""Schemes in which each domain is a client, so that the dataset determines the number of clients."""


class WarningsOnly(EachOnce):
    """Observer that passes on progress and warnings (each once), but not the notes of every single run."""

    def note(self, text: str) -> None:
        """Leave out the note."""

    def ended(self, path: Path, result: Record) -> None:
        """Leave out the result."""


@dataclass(frozen=True)
class Features:
    """A store, the keys of a cell's arrays in it, and the names by which training finds these arrays."""

    path: Path
    keys: tuple[str, ...]
    names: tuple[str, ...]
    columns: Columns


class ReproductionEngine(ExtractionEngine, Protocol):
    """Cluster that extracts features and trains runs in place of this process: ``--engine``."""

    def run_configurations(
        self,
        todo: Sequence[tuple[TrainConfig, PartitionConfig]],
        home: Home,
        runs: Path,
        observer: Observer,
        stop: Stop,
    ) -> set[Path]:
        """Train and store runs; return the directories of the new ones."""


@dataclass
class Workbench:
    """Everything that measuring a cell needs; features and images are prepared once and shared by cells.

    Attributes:
        home: home with stores, runs, weights and data.
        options: options of the call.
        observer: receives notes, warnings and progress.
        halt: set by a signal handler to end the reproduction.
        pictures: folder for pictures that are drawn.
        runs: directory of results.
        engine: a cluster that extracts, or None.
        made: directories of runs that this command made, on this machine or ahead on the cluster.
    """

    home: Home
    options: Options
    observer: Observer
    halt: Stop
    pictures: Path
    runs: Path
    engine: ReproductionEngine | None = None
    made: set[Path] = field(default_factory=set)
    _features: dict[tuple[Any, ...], Features] = field(default_factory=dict)
    _images: dict[str, Dataset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.quiet = WarningsOnly(self.observer)

    def features(self, cell: PaperCell) -> Features:
        """The store with every backbone of a cell; missing features are extracted first.

        Raises:
            FedcacheError: as ``extract``.
        """
        recipe = tuple(sorted(cell.recipe.items()))
        key = (cell.dataset, cell.backbones, recipe, cell.views, cell.augment)
        if key not in self._features:
            config = ExtractConfig(
                dataset=cell.dataset,
                backbones=cell.backbones,
                recipe={**cell.recipe, **recipe_of_pixels(cell, self.home)},
                views=cell.views,
                augment=cell.augment,
                limit=self.options.limit,
                weights=self.options.weights,
                data=self.options.data,
                device=self.options.device,
            )
            done = extract(
                config, self.home, observer=self.observer, stop=self.halt, engine=self.engine
            )
            store = done.store
            keys = tuple(a["key"] for a in done.arrays)
            stored_backbones = [str(a.recipe.get("backbone")) for a in store.arrays.values()]
            names = []
            for backbone, array in zip(cell.backbones, keys, strict=True):
                # Training finds the pixels next to an encoder by itself.
                if backbone == "pixels" and len(keys) > 1:
                    continue
                # An array is named by its key if the store has several of its backbone.
                if stored_backbones.count(backbone) == 1:
                    names.append(backbone)
                else:
                    names.append(array)
            self._features[key] = Features(done.path, keys, tuple(names), columns_of(store))
        return self._features[key]

    def images(self, cell: PaperCell) -> Dataset:
        """The dataset of a cell, opened."""
        if cell.dataset not in self._images:
            with progress_of(self.observer, f"reading {cell.dataset}", "images") as progress:
                context = Context(
                    memory_of(self.home),
                    paths_of(self.options.data),
                    self.home.data,
                    progress=progress,
                    limit=self.options.limit,
                )
                self._images[cell.dataset] = open_dataset(cell.dataset, context)
        return self._images[cell.dataset]

    def columns(self, cell: PaperCell) -> Columns:
        """The columns from which a partition of a cell's images is made. All images count as readable."""
        d = self.images(cell)
        return Columns(
            d.label,
            d.domain,
            d.split,
            np.ones(len(d), np.uint8),
            d.uid,
            d.classes,
            d.domains,
            d.digest,
        )


def recipe_of_pixels(cell: PaperCell, home: Home) -> dict[str, str]:
    """``--recipe`` options that store ``pixels`` in the size in which the encoder next to them reads images."""
    encoders = [b for b in cell.backbones if b != "pixels"]
    if not encoders or "pixels" not in cell.backbones:
        return {}
    return pixel_recipe(lookup(encoders[0], home=home.root).recipe)


@dataclass(frozen=True)
class CellPartition:
    """A partition, the arguments of its scheme, and a sentence for each difference from the arguments of the cell."""

    partition: Partition
    args: Record
    departures: tuple[str, ...]


def with_known_domains(
    cell: PaperCell, columns: Columns, *, proxy: bool
) -> tuple[PaperCell, list[str]]:
    """The cell with its domains as the dataset calls them.

    Raises:
        UsageError, when the paper's own dataset lacks the domain.
    """
    lost = [d for d in cell.domain if find_domain(d, columns.domains) is None]
    if lost and not proxy:
        first = lost[0]
        domains = ", ".join(columns.domains)
        raise UsageError(
            f"{cell.dataset} has no domain {first}; it has {domains}.",
            f"fedcache datasets info {shell_word(cell.dataset)}",
        )
    found, departures = match_domains(cell.domain, columns.domains)
    return replace(cell, domain=found), departures


def partition_cell(cell: PaperCell, columns: Columns, seed: int, *, proxy: bool) -> CellPartition:
    """The cell's partition. With ``proxy`` it is scaled down, with a note, if the dataset has too few rows.

    Raises:
        UsageError for too few rows; with ``proxy`` only if no scaled-down partition fits either.
    """
    args = dict(cell.args)
    domain = {}
    if cell.domain:
        domain = {"domain": cell.domain}
    # Each attempt takes the values that the scheme proposes; some schemes need several attempts.
    for _ in range(4):
        try:
            made = make(cell.scheme, columns, seed=seed, **args, **domain)
        except InfeasibleError as error:
            changes = {k: v for k, v in error.instead.items() if args.get(k) != v}
            if not proxy or not changes:
                raise
            args |= changes
            continue
        departures = []
        for key, value in args.items():
            usual = cell.args.get(key, "the default")
            if value != cell.args.get(key):
                departures.append(f"{key} {value} instead of {usual} in the partition")
        if proxy and cell.scheme in DOMAIN_CLIENTS:
            clients = len(made.clients)
            departures.append(f"{clients} clients, the domains of `{cell.dataset}`")
        departures += [f"in the partition, {note}" for note in made.notes]
        return CellPartition(made, args, tuple(departures))
    raise UsageError(
        f"The partition scheme {cell.scheme} does not fit these rows, also not with the scaled-down settings that "
        "fedcache tried.",
        "Give more data with --on.",
    )


def short_batches(cell: PaperCell, partition: Partition, *, proxy: bool) -> tuple[Facts, list[str]]:
    """The settings of a cell, adapted to a small dataset, and their differences from the paper.

    Only a proxy is adapted: it also trains on short batches if the smallest client has fewer rows than a batch, and it
    replaces FLESD's queue of keys if the public rows cannot fill the queue. With another number of rows, clients also
    take another number of steps, so the steps of a proxy are named.
    """
    hp = METHODS[cell.method].resolve(cell.preset, cell.set)
    settings = dict(cell.set)
    departures: list[str] = []
    if not proxy:
        return settings, departures
    # These settings leave out batches that are not full; the smallest client may have no full batch.
    dropping = [key for key in ("drop_last", "proto_drop_last") if hp.get(key)]
    batch = hp.get("batch")
    least = min(len(c.train) for c in partition.clients)
    no_full_batch = isinstance(batch, int) and least < batch
    if dropping and no_full_batch:
        settings |= dict.fromkeys(dropping, False)
        departures.append(
            f"short batches are used, because the smallest client has {least} rows and a batch has {batch}"
        )
    if isinstance(batch, int):
        steps = [len(batch_sizes(len(c.train), {**hp, **settings})) for c in partition.clients]
        departures.append(f"steps per client and local epoch (median): {np.median(steps):g}")
    # The first client holds FLESD's public rows; they must fill the queue twice.
    public = len(partition.clients[0].train)
    queue = hp.get("queue")
    too_few_keys = isinstance(queue, int) and public < 2 * queue
    if hp.get("anchors") == "queue" and too_few_keys:
        settings |= {"anchors": "all", "esd_drop_last": False}
        departures.append(
            f"all {public} public rows as anchors, because they are too few for a queue of {queue}"
        )
    return settings, departures


Measured = tuple[dict[str, Value | None], list[str]]
"""Metric -> value, and deviations that became known only during the measurement."""


def model(cell: PaperCell, _bench: Workbench) -> Measured:
    """Description of a trained layer, from the tensors that the head creates."""
    widths = [lookup(name).width for name in cell.backbones]
    head = head_of(METHODS[cell.method].resolve(cell.preset, cell.set))
    made = head.init(torch.zeros, sum(widths), int(cell.options["classes"]))
    # Row 1 of FedPCL's table 7 is the projection, row 2 the classifier behind it.
    if cell.at == ("1",):
        outputs, inputs = made["P.W"].shape
        words = str(inputs)
        if len(set(widths)) == 1 and sum(widths) == inputs:
            count = len(widths)
            words = f"{widths[0]} x {count}"
        parts = [f"FC({words}, {outputs})", "ReLU"]
        if head.bn:
            features = len(made["P.gain"])
            parts.append(f"BN({features})")
        if head.z_norm:
            parts.append("L2")
        return {"details": ", ".join(parts)}, []
    outputs, inputs = made["Q.W"].shape
    return {"details": f"FC({inputs}, {outputs})"}, []


def partition(cell: PaperCell, workbench: Workbench) -> Measured:
    """Clients and their training rows, from labels and domains alone; no image is decoded."""
    columns = workbench.columns(cell)
    proxy = workbench.options.proxy
    cell, departures = with_known_domains(cell, columns, proxy=proxy)
    seed = parse_seeds(cell.seeds)[0]
    assigned = partition_cell(cell, columns, seed, proxy=proxy)
    rows = assigned.partition.describe(columns)
    if "domain_of" in cell.options:
        name = find_domain(str(cell.options["domain_of"]), columns.domains)
        rows = [r for r in rows if r.client == name]
    classes = None
    if rows:
        classes = float(rows[0].classes)
    # Number of rows that a client has of a class: one number if it is the same for all clients and classes, else the
    # range.
    counts: set[int] = set()
    for row in rows:
        counts.update(row.counts)
    owned = sorted(counts - {0})
    per_class: Value | None = None
    if len(owned) == 1:
        per_class = float(owned[0])
    elif owned:
        most = owned[-1]
        per_class = f"{owned[0]} to {most}"
    values = {
        "clients_of": float(len(rows)),
        "classes_of": classes,
        "per_class": per_class,
        "sizes": ", ".join(str(r.train) for r in rows),
        "total": float(sum(r.train for r in rows)),
    }
    # The picture is drawn only if it is one of the cell's metrics.
    if "dots" in cell.metrics:
        path = _picture(cell, workbench)
        draw(assigned.partition, columns, path)
        values["dots"] = str(path)
    return {m: values[m] for m in cell.metrics}, [*departures, *assigned.departures]


def entropy(cell: PaperCell, workbench: Workbench) -> Measured:
    """Entropy in bits of softmax(I.T) over random training rows: mean, minimum, and the upper bound log2 C."""
    found = workbench.features(cell)
    store = Store.open(found.path)
    readable_training = (found.columns.split == 0) & (found.columns.ok == 1)
    pool = np.flatnonzero(readable_training)
    expected = int(cell.options["rows"])
    rng = np.random.default_rng(parse_seeds(cell.seeds)[0])
    rows = np.sort(rng.choice(pool, min(expected, len(pool)), replace=False))
    # float64 is not needed: entropies are shown with three decimals.
    features = np.array(store.reader(found.keys[0]).rows(rows), np.float32)
    images = torch.from_numpy(features)[:, 0]
    entry = text_of_array(store.manifest, found.keys[0])
    if entry is None:
        raise StoreError(
            f"{cell.backbones[0]} has no text features.",
            "Use a backbone with text features, for example glyph-clip.",
        )
    text_features = np.array(read_text(store.path, cell.backbones[0], entry), np.float32)
    text = torch.from_numpy(text_features)
    similarity = normalize(images, dim=-1) @ text.T
    bits = entropy_bits(torch.softmax(similarity, -1))
    departures = []
    if len(rows) < expected:
        departures.append(f"{len(rows)} rows instead of {expected}")
    return {
        "entropy_bound": float(np.log2(len(text))),
        "entropy_mean": float(bits.mean()),
        "entropy_least": float(bits.min()),
    }, departures


def noise(cell: PaperCell, workbench: Workbench) -> Measured:
    """Picture of (1 - p) x + s e for an image x with values in [0, 1] and noise e of scale 1, clipped to [0, 1]."""
    data = workbench.images(cell)
    name = str(cell.options["class_of"])
    departures = []
    # If other data lack the class, their first class takes its place.
    if name not in data.classes:
        departures.append(f"class `{data.classes[0]}` instead of `{name}`")
        name = data.classes[0]
    of_class = data.label == data.classes.index(name)
    rows = np.flatnonzero(of_class & (data.split == 0))
    if not len(rows):
        raise UsageError(
            f"{cell.dataset} has no training image of {name}.", "Use another dataset: --on DATASET"
        )
    image = decode(data.source.read(int(rows[0])))
    x = np.asarray(image, np.float64) / 255
    rng = np.random.default_rng(parse_seeds(cell.seeds)[0])
    p = float(cell.set["p"])
    s = float(cell.set["s"])
    if cell.set.get("noise") == "laplace":
        e = rng.laplace(size=x.shape)
    else:
        e = rng.standard_normal(x.shape)
    noisy = np.clip((1 - p) * x + s * e, 0, 1)
    path = _picture(cell, workbench)
    pixels = np.round(noisy * 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return {"picture": str(path)}, departures


def formula(cell: PaperCell, _bench: Workbench) -> Measured:
    """A formula at the numbers of a cell.

    Either FedPCL's theorem 4.1: the bound as printed, the bound with McDiarmid's constants corrected, and the term that
    both share. Or FLESD's equation 11: the scalars that clients upload as representations and as averaged weights, and
    whether representations cost less.
    """
    options = cell.options
    if "bound_printed" in cell.metrics:
        bound = diagnostics.generalisation_bound(**options)
        return {f"bound_{key}": float(value) for key, value in bound.__dict__.items()}, []
    cost = diagnostics.flesd_exchange(
        public=options["public_rows"],
        width=options["width"],
        weights=options["weights"],
        rounds=options["rounds"],
        average_rounds=options["averaging_rounds"],
    )
    cheaper = "no"
    if cost.cheaper:
        cheaper = "yes"
    return {
        "flesd_scalars": float(cost.representations),
        "averaging_scalars": float(cost.weights),
        "cheaper": cheaper,
    }, []


def heatmap(cell: PaperCell, workbench: Workbench) -> Measured:
    """Similarity of FedPCL's models on single backbones to its model on all: s_ki of figure 3, and linear CKA.

    The models are trained here and not kept, because a stored result holds no weights.
    """
    found = workbench.features(cell)
    seed = parse_seeds(cell.seeds)[0]
    proxy = workbench.options.proxy
    assigned = partition_cell(cell, found.columns, seed, proxy=proxy)
    # One model for each backbone, and at the end one that reads all.
    models = [trained(cell, workbench, (name,), assigned) for name in found.names]
    models.append(trained(cell, workbench, found.names, assigned))
    clients = assigned.partition.clients
    by_model = []
    for states, _ in models:
        by_model.append(torch.stack([state["proto"] for state in states]))
    # Prototypes [K + 1, M, C, D] of the M clients by each model: K single backbones, and all of them together.
    proto = torch.stack(by_model)
    states_of_all, _ = models[-1]
    owned = torch.stack([state["count"] > 0 for state in states_of_all])
    s = diagnostics.fusion_similarity(proto[:-1], proto[-1], owned)
    # Projections of each client's training rows by each model.
    projections = []
    for states, inputs in models:
        head = head_of(inputs.settings, "projection")
        x = inputs.data.x
        of_clients = []
        for state, client in zip(states, clients, strict=True):
            of_clients.append(embed(head, state, x[client.train, 0])[0])
        projections.append(of_clients)
    *single, of_all = projections
    cka = []
    for of_clients in single:
        pairs = zip(of_clients, of_all, strict=True)
        cka.append([linear_cka(a.double().numpy(), b.double().numpy()) for a, b in pairs])
    names = [client.name for client in clients]
    _, short = short_batches(cell, assigned.partition, proxy=proxy)
    departures = [*assigned.departures, *short]
    if len(found.names) == 1:
        departures.append("only one backbone, so there is nothing to compare")
    return {
        "heatmap": _matrix(found.names, names, s.tolist()),
        "cka": _matrix(found.names, names, cka),
    }, departures


def trained(
    cell: PaperCell, workbench: Workbench, names: tuple[str, ...], assigned: CellPartition
) -> tuple[list[Any], Any]:
    """The final state of each client of a run on the backbones ``names``, and the inputs of the run."""
    found = workbench.features(cell)
    seed = parse_seeds(cell.seeds)[0]
    settings, _ = short_batches(cell, assigned.partition, proxy=workbench.options.proxy)
    config = TrainConfig(
        method=cell.method,
        preset=cell.preset,
        store=str(found.path),
        backbones=names,
        seeds=str(seed),
        set=settings,
    )
    part = PartitionConfig(cell.scheme, None, seed, assigned.args)
    preparation = Preparation(workbench.home, workbench.quiet, workbench.halt, extract=False)
    # The heatmap needs the models and not only their scores, so the engine is called without a run's directory.
    inputs = prepare_run(config, row_source(config, part, preparation))
    spec = TrainingRun(
        inputs.method,
        inputs.data,
        inputs.partitions[seed].clients,
        rounds=int(cell.rounds or 1),
        participation=parse_participation(cell.participation),
        seed=seed,
    )
    outcome = run(spec, inputs.settings)
    return [outcome.states[i] for i in sorted(outcome.states)], inputs


def _matrix(backbones: tuple[str, ...], clients: list[str], values: list[list[float]]) -> str:
    """A matrix as text: a row for each backbone, a number for each client."""
    rows = []
    for backbone, row in zip(backbones, values, strict=True):
        numbers = " ".join(f"{v:.3f}" for v in row)
        rows.append(f"{backbone} {numbers}")
    table = "; ".join(rows)
    return f"{table} (columns {', '.join(clients)})"


def _picture(cell: PaperCell, workbench: Workbench) -> Path:
    """The path of a cell's picture, in a folder that is created if it is missing."""
    for folder in (workbench.home.root, workbench.pictures.parent, workbench.pictures):
        make_private(folder)
    name = slug("-".join(cell.at))
    return workbench.pictures / f"{name}.png"


MEASURES: Mapping[str, Callable[[PaperCell, Workbench], Measured]] = {
    "model": model,
    "partition": partition,
    "entropy": entropy,
    "noise": noise,
    "formula": formula,
    "heatmap": heatmap,
}


ENDS_ALL = (Exit.INTERRUPTED, Exit.BUG, Exit.CORRUPT)
"""Exit codes of errors that end a reproduction. After other errors, it continues with the next cell."""


@dataclass
class ReproducedCell:
    """One row of a report.

    Attributes:
        planned: the cell of the paper and the one that was run.
        measured: metric -> its measurement; empty when the cell was not run.
        departures: sentences.
        why_not: why it was not run; "" when it was.
        runs: directories of its runs, one per seed.
        reused: how many of these runs were stored already.
        fidelity: exact | cached_views | approx, "" where nothing is trained.
        same_as: in a proxy, labels of the earlier row that is the same measurement as this one; () for none. Two rows
            become the same measurement if they differ only in something that the proxy replaces.
    """

    planned: PlannedCell
    measured: dict[str, Measurement] = field(default_factory=dict)
    departures: list[str] = field(default_factory=list)
    why_not: str = ""
    runs: list[Path] = field(default_factory=list)
    reused: int = 0
    fidelity: str = ""
    same_as: tuple[str, ...] = ()

    @property
    def cell(self) -> PaperCell:
        """The cell as it is in the paper."""
        return self.planned.paper


@dataclass
class Reproduction:
    """Answer of ``reproduce NAME``.

    Attributes:
        entry: of the registry.
        proxy: whether data or backbones are not the paper's.
        on: the dataset spec that replaces the paper's, or None.
        lines: one per cell, in the registry's order.
        departures: sentences that are true of every line.
    """

    entry: PaperTable
    proxy: bool
    on: str | None
    lines: list[ReproducedCell]
    departures: list[str]

    def compared(self, line: ReproducedCell, index: int) -> AgainstPrinted:
        """Got minus printed of one metric of a line."""
        metric = line.cell.metrics[index]
        printed = line.cell.printed[index]
        return compare(printed, self.entry.printed_seeds, line.measured.get(metric, Measurement()))

    def difference(self, difference: Difference) -> Measurement:
        """The measured difference of two cells."""
        # If lines have equal labels, the first one counts.
        found = {line.cell.at: line.measured for line in reversed(self.lines)}
        if difference.of not in found or difference.minus not in found:
            return Measurement()
        a = found[difference.of].get(difference.metric, Measurement())
        b = found[difference.minus].get(difference.metric, Measurement())
        return subtract(a, b)


def reproduce(
    entry: PaperTable,
    home: Home,
    options: Options | None = None,
    *,
    runs: Path | None = None,
    observer: Observer | None = None,
    stop: Stop | None = None,
    engine: ReproductionEngine | None = None,
) -> Reproduction:
    """Run every cell of an entry that can be run here.

    Args:
        entry: from ``registry.entry``.
        home: where stores, runs, weights and data are.
        options: changes of the paper's protocol.
        runs: directory of results instead of ``home.runs``.
        observer: receives notes, warnings and progress.
        stop: set by a signal handler; honoured where no finished round is lost.
        engine: a cluster that extracts and trains, to the same bits.

    Raises:
        UsageError for options that do not fit; MachineError when no cell can be run, naming what is missing;
            StoppedError after a stop, resumable; and the first cell's error if every cell failed.
    """
    options = options or Options()
    observer = observer or Silent()
    stop = stop or Stop()
    check = RequirementCheck(home, options.weights, options.data)
    # Each planned cell with the requirements that it lacks.
    todo = []
    for p in plan(entry, options, check):
        # Files that extraction fetches are not missing, and data given with --on is checked when it is opened.
        lack = [n for n in check.missing(entry, p.cell) if not n.fetched]
        if options.on is not None:
            lack = [n for n in lack if n.kind != "data"]
        todo.append((p, lack))
    if options.on is not None:  # a word that is no dataset is refused at once
        context = datasets.Context(memory_of(home), check.roots, home.data)
        datasets.peek(options.on, context)
    ready = [p for p, lack in todo if not p.refused and not lack]
    if not ready:
        raise _nothing_can_run(entry, todo)
    pictures = home.root / "reproduce" / entry.name
    workbench = Workbench(home, options, observer, stop, pictures, runs or home.runs, engine)
    if engine is not None and entry.kind == "runs":
        _train_on_cluster(ready, workbench, engine)
    lines: list[ReproducedCell] = []
    errors = []
    for number, (p, lack) in enumerate(todo, 1):
        labels = ", ".join(p.paper.at)
        where = f"{number} of {len(todo)}: {labels}"
        why_not = p.refused
        if lack and why_not is None:
            missing = ", ".join(f"{n.kind} {n.name}" for n in lack)
            why_not = f"missing {missing}"
        if why_not is None:
            try:
                # In a proxy, several cells may be the same measurement, which is then made only once.
                twin = None
                if options.proxy:
                    twin = _earlier_twin(lines, p.cell)
                line = _measure_cell(entry, p, workbench, twin)
            except FedcacheError as error:
                if error.code in ENDS_ALL:
                    raise
                errors.append(error)
                why_not = error.message
        if why_not is not None:
            lines.append(ReproducedCell(p, why_not=why_not))
            observer.note(f"{where}: not run, {why_not}")
            continue
        # The cell was measured: every other case has a ``why_not``.
        lines.append(line)
        metric = line.cell.metrics[0]
        stored = ""
        if line.reused:
            runs_of_cell = len(line.runs)
            stored = f" ({line.reused} of {runs_of_cell} runs were stored already)"
        measured = show_measured(line.measured[metric], metric)
        observer.note(f"{where}: {show_metric(metric)} {measured}{stored}")
    if errors and not any(line.measured for line in lines):
        raise errors[0]
    return Reproduction(entry, options.proxy, options.on, lines, _take_out_shared(lines))


def _nothing_can_run(
    entry: PaperTable, todo: Sequence[tuple[PlannedCell, Sequence[Requirement]]]
) -> FedcacheError:
    """The error of an entry without a cell that can be run."""
    # Each missing requirement is named once, and so is the command that gets it.
    needs = list(dict.fromkeys(need for _, lack in todo for need in lack))
    missing = "; ".join(f"{n.kind} {n.name}" for n in needs)
    if not missing:
        missing = next(p.refused or "" for p, _ in todo)
    commands = []
    for need in needs:
        # The list of backbones that are ready is left out.
        command = need.command.split(" Ready now:")[0]
        if need.command and command not in commands:
            commands.append(command)
    # If a cell lacks only weights or data, its protocol can be tried on data that are available offline.
    kinds = [{n.kind for n in lack} for _, lack in todo if lack]
    if any(of_cell <= {"weights", "data"} for of_cell in kinds):
        chosen = ""
        if entry.roles():
            chosen = " --backbones glyph-clip"
        commands.append(
            f"To run the same protocol on available data:  fedcache reproduce {shell_word(entry.name)} "
            f"--on digits{chosen}"
        )
    return MachineError(
        f"No row of {entry.name} can be run on this machine. Missing: {missing}.",
        "\n".join(commands) or f"fedcache reproduce info {shell_word(entry.name)}",
    )


def _earlier_twin(lines: Sequence[ReproducedCell], cell: PaperCell) -> ReproducedCell | None:
    """The first row that was run and is the same measurement as ``cell``: only labels and printed values differ."""
    measurement = replace(cell, labels={}, printed=())
    for line in lines:
        of_line = replace(line.planned.cell, labels={}, printed=())
        if of_line == measurement and not line.why_not:
            return line
    return None


def _measure_cell(
    entry: PaperTable, planned: PlannedCell, workbench: Workbench, twin: ReproducedCell | None
) -> ReproducedCell:
    """Measure one cell. ``twin`` is an earlier row that is the same measurement, or None.

    The runs of a twin are read again. If its values do not come from runs, they are copied or computed again.
    """
    line = ReproducedCell(planned, departures=list(planned.departures))
    if twin is not None:
        line.same_as = twin.cell.at
    if entry.kind == "runs":
        _train(line, workbench)
        return line
    # Only kinds that read data take long, so only their values are copied. Others are computed again.
    if twin is not None and "data" in READS[entry.kind]:
        line.departures += [d for d in twin.departures if d not in twin.planned.departures]
        line.measured = dict(twin.measured)
        return line
    values, departures = MEASURES[entry.kind](planned.cell, workbench)
    line.departures += departures
    line.measured = {m: over_seeds([values.get(m)]) for m in planned.cell.metrics}
    return line


RunRequest = tuple[TrainConfig, PartitionConfig]
"""Configuration and partition of an ordinary run of a cell, which is one seed."""


def _requests_of(planned: PlannedCell, workbench: Workbench) -> tuple[list[RunRequest], list[str]]:
    """The runs of a cell, and the departures that preparing them showed."""
    proxy = workbench.options.proxy
    features = workbench.features(planned.cell)
    cell, departures = with_known_domains(planned.cell, features.columns, proxy=proxy)
    requests = []
    # Every seed has its own partition, so every seed is a run of its own.
    for seed in parse_seeds(cell.seeds):
        assigned = partition_cell(cell, features.columns, seed, proxy=proxy)
        participation, fewer = _participation(cell, len(assigned.partition.clients), proxy)
        settings, short = short_batches(cell, assigned.partition, proxy=proxy)
        departures += [*assigned.departures, *fewer, *short]
        options = dict(assigned.args)
        if cell.domain:
            options["domain"] = cell.domain
        config = TrainConfig(
            method=cell.method,
            preset=cell.preset,
            store=str(features.path),
            backbones=features.names,
            rounds=cell.rounds,
            participation=participation,
            seeds=str(seed),
            eval_every=cell.eval_every,
            set=settings,
        )
        # The partition takes the number of clients as a field of its own.
        clients = options.pop("clients", None)
        requests.append((config, PartitionConfig(cell.scheme, clients, seed, options)))
    return requests, departures


def _train_on_cluster(
    planned: Sequence[PlannedCell], workbench: Workbench, engine: ReproductionEngine
) -> None:
    """Make the runs of all cells on a cluster. Measuring the cells later finds these runs.

    A run that fails here fails again when its cell is measured, and is reported then.
    """
    requests = []
    for one in planned:
        try:
            of_cell, _ = _requests_of(one, workbench)
            requests += [request for request in of_cell if request not in requests]
        except FedcacheError as error:
            if error.code in ENDS_ALL:
                raise
    if requests:
        workbench.made |= engine.run_configurations(
            requests, workbench.home, workbench.runs, workbench.observer, workbench.halt
        )


def _train(line: ReproducedCell, workbench: Workbench) -> None:
    """One ordinary run for each seed, each with its own partition."""
    requests, departures = _requests_of(line.planned, workbench)
    values: dict[str, list[Value | None]] = {m: [] for m in line.planned.cell.metrics}
    for config, partition in requests:
        done = train(
            config,
            workbench.home,
            partition=partition,
            runs=workbench.runs,
            extract=False,
            observer=workbench.quiet,
            stop=workbench.halt,
        )
        line.runs.append(done.path)
        # Runs that this command made, here for an earlier row or on a cluster, do not count as reused.
        if done.reused:
            line.reused += done.path not in workbench.made
        else:
            workbench.made.add(done.path)
        line.fidelity = str(done.result["fidelity"])
        departures += _feat_post(line.cell, done.result)
        for metric in values:
            values[metric].append(measure(metric, done))
    line.departures = list(dict.fromkeys([*line.departures, *departures]))
    line.measured = {metric: over_seeds(of_seeds) for metric, of_seeds in values.items()}


def _participation(cell: PaperCell, clients: int, proxy: bool) -> tuple[str | None, list[str]]:
    """Clients per round, ``all`` if a scaled-down proxy has fewer; and the departure."""
    requested = cell.participation
    if not proxy or requested is None or not requested.isdigit():
        return requested, []
    if int(requested) > clients:
        return "all", [f"all {clients} clients per round instead of {requested}"]
    return requested, []


def _feat_post(paper: PaperCell, result: Facts) -> list[str]:
    """The departure of an official run whose features are not signs.

    The released code of FedPCL replaces the features of its ResNets by their signs (D-01).
    """
    feat_post = result["hyperparameters"].get("feat_post")
    only_resnets = all(b.startswith("resnet18-") for b in paper.backbones)
    if paper.preset == "official" and only_resnets and feat_post not in ("sign", None):
        return [f"feat_post `{feat_post}` instead of `sign`"]
    return []


def _take_out_shared(lines: Sequence[ReproducedCell]) -> list[str]:
    """The departures that all measured lines share. They are removed from the lines."""
    measured = [line for line in lines if not line.why_not]
    if not measured:
        return []
    common = []
    for departure in measured[0].departures:
        if all(departure in line.departures for line in measured):
            common.append(departure)
    for line in measured:
        line.departures = [d for d in line.departures if d not in common]
    return common
