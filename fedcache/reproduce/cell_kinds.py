"""Cells that are not measured by a run: one thin function for each kind."""

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
"""Metric -> value, and departures that only showed while measuring."""


def model(cell: PaperCell, _bench: Workbench) -> Measured:
    """A trained layer in words, from the tensors that the head really makes."""
    widths = [lookup(name).width for name in cell.backbones]
    head = head_of(METHODS[cell.method].resolve(cell.preset, cell.set))
    made = head.init(torch.zeros, sum(widths), int(cell.options["classes"]))
    # Row 1 of the table is the projection, row 2 the classifier behind it.
    if cell.at == ("1",):
        out, into = made["P.W"].shape
        inputs = str(into)
        if len(set(widths)) == 1 and sum(widths) == into:
            count = len(widths)
            inputs = f"{widths[0]} x {count}"
        parts = [f"FC({inputs}, {out})", "ReLU"]
        if head.bn:
            features = len(made["P.gain"])
            parts.append(f"BN({features})")
        if head.z_norm:
            parts.append("L2")
        return {"details": ", ".join(parts)}, []
    out, into = made["Q.W"].shape
    return {"details": f"FC({into}, {out})"}, []


def partition(cell: PaperCell, workbench: Workbench) -> Measured:
    """Clients and their training rows, from labels and domains alone; no image is decoded."""
    columns = workbench.columns(cell)
    proxy = workbench.options.proxy
    cell, departures = with_known_domains(cell, columns, proxy=proxy)
    seed = parse_seeds(cell.seeds)[0]
    dealt = partition_cell(cell, columns, seed, proxy=proxy)
    rows = dealt.partition.describe(columns)
    if "domain_of" in cell.options:
        name = find_domain(str(cell.options["domain_of"]), columns.domains)
        rows = [r for r in rows if r.client == name]
    # How many rows of a class a client has: one number where all have as many, else the range.
    owned = sorted({c for r in rows for c in r.counts if c})
    classes = None
    if rows:
        classes = float(rows[0].classes)
    per_class: Value | None = None
    if len(owned) == 1:
        per_class = float(owned[0])
    elif owned:
        most = owned[-1]
        per_class = f"{owned[0]} to {most}"
    values: dict[str, Value | None] = {
        "clients_of": float(len(rows)),
        "classes_of": classes,
        "per_class": per_class,
        "sizes": ", ".join(str(r.train) for r in rows),
        "total": float(sum(r.train for r in rows)),
    }
    # The picture is drawn only where the entry asks for it.
    if "dots" in cell.metrics:
        path = _picture(cell, workbench)
        draw(dealt.partition, columns, path)
        values["dots"] = str(path)
    return {m: values[m] for m in cell.metrics}, [*departures, *dealt.departures]


def entropy(cell: PaperCell, workbench: Workbench) -> Measured:
    """Entropy in bits of softmax(I.T) over random training rows: mean, smallest, and the bound log2 C."""
    found = workbench.features(cell)
    store = Store.open(found.path)
    pool = np.flatnonzero((found.columns.split == 0) & (found.columns.ok == 1))
    expected = int(cell.options["rows"])
    rng = np.random.default_rng(parse_seeds(cell.seeds)[0])
    rows = np.sort(rng.choice(pool, min(expected, len(pool)), replace=False))
    # float64 is not needed: entropies are shown with three decimals.
    features = np.array(store.reader(found.keys[0]).rows(rows), np.float32)
    images = torch.from_numpy(features)[:, 0]
    if (entry := text_of_array(store.manifest, found.keys[0])) is None:
        raise StoreError(
            f"{cell.backbones[0]} has no text features.",
            "Name one that has, for example glyph-clip.",
        )
    text = torch.from_numpy(np.array(read_text(store.path, cell.backbones[0], entry), np.float32))
    bits = entropy_bits(torch.softmax(normalize(images, dim=-1) @ text.T, -1))
    if len(rows) < expected:
        departures = [f"rows: {len(rows)} instead of {expected}"]
    else:
        departures = []
    return {
        "entropy_bound": float(np.log2(len(text))),
        "entropy_mean": float(bits.mean()),
        "entropy_least": float(bits.min()),
    }, departures


def noise(cell: PaperCell, workbench: Workbench) -> Measured:
    """(1 - p) x + e of one image with values in [0, 1], e of scale s: drawn, clipped and saved."""
    data = workbench.images(cell)
    name = str(cell.options["class_of"])
    departures = []
    # Other data may lack the class; then the first one takes its place.
    if name not in data.classes:
        departures.append(f"class: {data.classes[0]} instead of {name}")
        name = data.classes[0]
    rows = np.flatnonzero((data.label == data.classes.index(name)) & (data.split == 0))
    if not len(rows):
        raise UsageError(f"{cell.dataset} has no training image of {name}.", "Try --on.")
    x = np.asarray(decode(data.source.read(int(rows[0]))), np.float64) / 255
    rng = np.random.default_rng(parse_seeds(cell.seeds)[0])
    p = float(cell.set["p"])
    s = float(cell.set["s"])
    if cell.set.get("noise") == "laplace":
        e = rng.laplace(size=x.shape)
    else:
        e = rng.standard_normal(x.shape)
    noisy = np.clip((1 - p) * x + s * e, 0, 1)
    path = _picture(cell, workbench)
    Image.fromarray(np.round(noisy * 255).astype(np.uint8)).save(path)
    return {"picture": str(path)}, departures


def formula(cell: PaperCell, _bench: Workbench) -> Measured:
    """A formula at the numbers of a cell.

    FedPCL's theorem 4.1 as printed, with McDiarmid's constants corrected, and the term both share; or FLESD's equation
    11: what each way sends up, and whether representations cost less.
    """
    o = cell.options
    if "bound_printed" in cell.metrics:
        # The bound needs all options; the exchange of FLESD has names of its own for them.
        found = diagnostics.generalisation_bound(**o)
        return {f"bound_{key}": float(value) for key, value in found.__dict__.items()}, []
    cost = diagnostics.flesd_exchange(
        public=o["public_rows"],
        width=o["width"],
        weights=o["weights"],
        rounds=o["rounds"],
        average_rounds=o["averaging_rounds"],
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
    """FedPCL on each backbone alone and on all: s_ki of figure 3, and linear CKA of the same projections.

    These models are trained here and not kept: a stored result holds no weights.
    """
    found = workbench.features(cell)
    dealt = partition_cell(
        cell, found.columns, parse_seeds(cell.seeds)[0], proxy=workbench.options.proxy
    )
    # One model for each backbone, and at the end one that reads all.
    models = [trained(cell, workbench, (name,), dealt) for name in found.names]
    models.append(trained(cell, workbench, found.names, dealt))
    clients = dealt.partition.clients
    by_model = []
    for states, _ in models:
        by_model.append(torch.stack([s["proto"] for s in states]))
    # Prototypes of all clients by each model: [K, M, C, D].
    proto = torch.stack(by_model)
    owned = torch.stack([s["count"] > 0 for s in models[-1][0]])
    s = diagnostics.fusion_similarity(proto[:-1], proto[-1], owned)
    projected = []
    for states, of in models:
        head = head_of(of.settings, "projection")
        x = of.data.x
        projected.append(
            [embed(head, state, x[c.train, 0])[0] for state, c in zip(states, clients, strict=True)]
        )
    *alone, of_all = projected
    cka = []
    for one in alone:
        pairs = zip(one, of_all, strict=True)
        cka.append([linear_cka(a.double().numpy(), b.double().numpy()) for a, b in pairs])
    names = [c.name for c in clients]
    short = short_batches(cell, dealt.partition, proxy=workbench.options.proxy)[1]
    departures = [*dealt.departures, *short]
    if len(found.names) == 1:
        departures.append("one backbone: there is nothing to compare")
    return {
        "heatmap": _matrix(found.names, names, s.tolist()),
        "cka": _matrix(found.names, names, cka),
    }, departures


def trained(
    cell: PaperCell, workbench: Workbench, names: tuple[str, ...], dealt: CellPartition
) -> tuple[list[Any], Any]:
    """The clients' final states of a run on some of the backbones, and its inputs."""
    found = workbench.features(cell)
    seed = parse_seeds(cell.seeds)[0]
    config = TrainConfig(
        method=cell.method,
        preset=cell.preset,
        store=str(found.path),
        backbones=names,
        seeds=str(seed),
        set=short_batches(cell, dealt.partition, proxy=workbench.options.proxy)[0],
    )
    part = PartitionConfig(cell.scheme, None, seed, dealt.args)
    preparation = Preparation(workbench.home, workbench.quiet, workbench.halt, extract=False)
    # The models are needed and not only their scores, so the engine is called without a run's directory.
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
    """A row for each backbone, a number for each client."""
    rows = []
    for backbone, row in zip(backbones, values, strict=True):
        numbers = " ".join(f"{v:.3f}" for v in row)
        rows.append(f"{backbone} {numbers}")
    table = "; ".join(rows)
    return f"{table} (columns {', '.join(clients)})"


def _picture(cell: PaperCell, workbench: Workbench) -> Path:
    """The path of a cell's picture."""
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
