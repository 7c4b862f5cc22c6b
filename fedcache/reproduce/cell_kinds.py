"""Measurement of cells whose values do not come from stored runs, with a function for each kind of cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import StoreError, UsageError
from fedcache.extract.backbones import lookup
from fedcache.extract.images import decode
from fedcache.extract.recipe import slug
from fedcache.federate.engine import outcome as diagnostics
from fedcache.federate.engine.outcome import entropy_bits
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.methods import METHODS
from fedcache.federate.methods.common.model import head_of
from fedcache.heads.projection import embed
from fedcache.report.figure_data import draw, linear_cka
from fedcache.reproduce.metrics import Value
from fedcache.reproduce.planning import find_domain
from fedcache.reproduce.prepare import (
    CellPartition,
    Workbench,
    partition_cell,
    short_batches,
    with_known_domains,
)
from fedcache.reproduce.registry import PaperCell
from fedcache.runs.loop import prepare_run, row_source
from fedcache.runs.row_sources import Preparation
from fedcache.runs.spec import parse_participation, parse_seeds
from fedcache.store.files import make_private
from fedcache.store.manifest import read_text, text_of_array
from fedcache.store.store import Store

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
