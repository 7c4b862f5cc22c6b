"""The registry: one TOML file for each table or figure, read into plain values and checked.

A cell describes one run: its labels, all settings that determine the run, and the values that the paper prints for it.
``[protocol]`` and ``[axes]`` hold settings that cells of a file share. A later setting overrides an earlier one, and
mappings are merged.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

from fedcache.errors import FedcacheError, InternalError, unknown
from fedcache.federate.methods import METHODS
from fedcache.parsing import as_tuples

READS: Mapping[str, tuple[str, ...]] = {
    "runs": ("method", "scheme", "weights", "data"),
    "model": ("method",),
    "partition": ("scheme", "data"),
    "entropy": ("weights", "data"),
    "heatmap": ("method", "scheme", "weights", "data"),
    "noise": ("data",),
    "formula": (),
}
"""Kind of an entry -> its requirements."""

MERGED = ("set", "args", "recipe", "options")


@dataclass(frozen=True)
class Printed:
    """A printed value of a paper.

    Attributes:
        mean: the number, in the unit of its metric (per cent for accuracies); None for a text.
        std: its spread over runs, where printed.
        text: a text, as in tables of layers and of sizes.
    """

    mean: float | None = None
    std: float | None = None
    text: str | None = None


@dataclass(frozen=True)
class PaperCell:
    """One run of a table: its labels, its settings and its printed values.

    Attributes:
        labels: name of the column -> value.
        method: name on the command line; "" where nothing is trained.
        preset: paper | official | tuned.
        set: hyperparameters that differ from the preset.
        backbones: names, in the order of concatenation.
        recipe: departures from the backbones' native recipes.
        dataset: a spec.
        domain: domains that are assigned; () for all.
        scheme: partition scheme; "" where nothing is assigned.
        args: arguments of the scheme.
        rounds: None for the method's own.
        participation: clients a round, None for the method's own.
        seeds: seeds of the runs; each draws its own partition.
        eval_every: rounds between scores, for curves.
        views: stored augmentations of each image, the plain one included.
        augment: policy by which the views are drawn; None for the default.
        metrics: names of the metrics to measure.
        printed: one value per metric; None where nothing is printed.
        options: settings of kinds other than ``runs``.
    """

    labels: Mapping[str, str]
    method: str = ""
    preset: str = "paper"
    set: Mapping[str, Any] = field(default_factory=dict)
    backbones: tuple[str, ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)
    dataset: str = ""
    domain: tuple[str, ...] = ()
    scheme: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    rounds: int | None = None
    participation: str | None = None
    seeds: str = "0"
    eval_every: int = 0
    views: int = 1
    augment: str | None = None
    metrics: tuple[str, ...] = ()
    printed: tuple[Printed | None, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def at(self) -> tuple[str, ...]:
        """The values of the labels."""
        return tuple(self.labels.values())


@dataclass(frozen=True)
class Difference:
    """A statement about two cells: ``metric`` of one minus that of the other."""

    of: tuple[str, ...]
    minus: tuple[str, ...]
    metric: str
    printed: Printed


@dataclass(frozen=True)
class PaperTable:
    """A table or figure.

    Attributes:
        name: name for ``fedcache reproduce``.
        title: a few words.
        paper: the paper, and the number of the table in it.
        kind: how its cells are measured, a key of ``READS``.
        setting: the protocol in words.
        labels: columns that tell rows apart.
        metrics: columns of numbers.
        printed_seeds: runs behind a printed mean; 0 where that makes no sense.
        not_given: details that the paper omits, and the values used instead.
        notes: contradictions in the paper, and other remarks.
        cells: the rows.
        differences: statements about two rows.
    """

    name: str
    title: str
    paper: str
    kind: str
    setting: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    printed_seeds: int
    not_given: tuple[str, ...]
    notes: tuple[str, ...]
    cells: tuple[PaperCell, ...]
    differences: tuple[Difference, ...]

    def roles(self) -> tuple[str, ...]:
        """The backbones that may be replaced, in order of appearance.

        ``pixels`` may be replaced only if it is the only backbone of a cell, and the method can also train on features.
        """
        named = []
        for cell in self.cells:
            for backbone in cell.backbones:
                if backbone != "pixels" or replaceable(cell):
                    named.append(backbone)
        return tuple(dict.fromkeys(named))


HEADS = {"flesd": "flesd-head"}
"""Method that trains an encoder on images -> its version on features, if that has a name of its own."""


def replaceable(cell: PaperCell) -> bool:
    """Whether features may take the place of a cell's images."""
    if cell.backbones != ("pixels",):
        return False
    if cell.method in HEADS or cell.method not in METHODS:
        return True
    encoders = [h for h in METHODS[cell.method].hparams if h.name == "encoder"]
    return not encoders or "mlp" in encoders[0].choices


@cache
def names() -> tuple[str, ...]:
    """The names of all entries, papers together and numbers in order."""
    found = []
    for file in _folder().iterdir():
        if file.name.endswith(".toml"):
            found.append(file.name.removesuffix(".toml"))
    return tuple(sorted(found, key=_place))


def entry(name: str) -> PaperTable:
    """The entry of that name.

    Raises:
        UsageError with "did you mean" for an unknown name; InternalError when the file of the entry is wrong.
    """
    if name not in names():
        raise unknown("table or figure", name, names(), hint="fedcache reproduce list   shows all")
    made = parse((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)
    if made.name != name:
        raise _wrong(name, f"its name is {made.name!r}")
    return made


def entries() -> list[PaperTable]:
    """All entries."""
    return [entry(name) for name in names()]


def parse(text: str, where: str) -> PaperTable:
    """An entry from the text of its file.

    Args:
        text: TOML.
        where: name of the file, for messages.

    Raises:
        InternalError, naming what is wrong; the files are part of the package.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(where, str(error)) from error
    # The protocol applies to all cells; an axis adds the settings of each of its labels.
    protocol = data.pop("protocol", {})
    axes = data.pop("axes", {})
    known = {f.name for f in fields(PaperTable)}
    for key in data:
        if key not in known:
            raise _wrong(where, f"unknown key {key!r}")
    for key in known - {"differences"} - set(data):
        raise _wrong(where, f"{key} is missing")
    if data["kind"] not in READS:
        kinds = ", ".join(READS)
        raise _wrong(where, f"kind {data['kind']!r} is none of {kinds}")
    for axis in axes:
        if axis not in data["labels"]:
            raise _wrong(where, f"[axes.{axis}] is no label")
    cells = tuple(_cell(c, data, protocol, axes, where) for c in data["cells"])
    # Two cells with the same labels could not be distinguished in the table.
    if len({c.at for c in cells}) < len(cells):
        raise _wrong(where, "two cells have the same labels")
    differences = tuple(_difference(d, cells, where) for d in data.get("differences", ()))
    return PaperTable(**{**as_tuples(data), "cells": cells, "differences": differences})


def _cell(
    own: Mapping[str, Any],
    data: Mapping[str, Any],
    protocol: Mapping[str, Any],
    axes: Mapping[str, Any],
    where: str,
) -> PaperCell:
    """A cell: its own settings, merged with the settings that it shares with other cells."""
    at = own.get("at", [])
    expected = len(data["labels"])
    if len(at) != expected:
        raise _wrong(where, f"cell {at} has {len(at)} labels, expected {expected}")
    # Later layers win: metrics of the table, its protocol, its axes, and the cell itself.
    layers = [{"metrics": data["metrics"]}, protocol]
    labels = dict(zip(data["labels"], at, strict=True))
    for label, value in labels.items():
        if label in axes:
            if value not in axes[label]:
                raise _wrong(where, f"cell {at}: [axes.{label}] has no {value!r}")
            layers.append(axes[label][value])
    layers.append({k: v for k, v in own.items() if k not in ("at", "printed")})
    values: dict[str, Any] = {}
    known = {f.name for f in fields(PaperCell)} - {"labels", "printed"}
    for layer in layers:
        for key, value in layer.items():
            if key not in known:
                raise _wrong(where, f"cell {at}: unknown key {key!r}")
            # Mappings are merged key by key; other values are replaced.
            if key in MERGED:
                value = {**values.get(key, {}), **value}
            values[key] = value
    # "-" is no printed value: a cell without ``printed`` has no number in the paper.
    metrics = len(values["metrics"])
    printed = own.get("printed", ["-"] * metrics)
    if len(printed) != metrics:
        raise _wrong(where, f"cell {at} prints {len(printed)} values for {metrics} metrics")
    numbers = tuple(_printed(p, where) for p in printed)
    return PaperCell(labels=labels, printed=numbers, **as_tuples(values))


def _printed(value: Any, where: str) -> Printed | None:
    """A printed value from the file: ``[mean, std]``, a number, a text, or ``-`` for none."""
    match value:
        case "-":
            return None
        case str():
            return Printed(text=value)
        case bool():
            pass  # a bool is an int for Python, but no printed value
        case int() | float():
            return Printed(float(value))
        case [int() | float() as mean, int() | float() as std]:
            return Printed(float(mean), float(std))
    raise _wrong(where, f"{value!r} is no printed value")


def _difference(data: Mapping[str, Any], cells: Sequence[PaperCell], where: str) -> Difference:
    made = Difference(
        tuple(data["of"]),
        tuple(data["minus"]),
        str(data["metric"]),
        Printed(float(data["printed"])),
    )
    for at in (made.of, made.minus):
        if not any(c.at == at and made.metric in c.metrics for c in cells):
            raise _wrong(where, f"a difference names {at} with {made.metric}, which no cell has")
    return made


def _folder() -> Any:
    return files("fedcache.reproduce") / "registry"


def _place(name: str) -> tuple[str, str, int, str]:
    """Sort key of an entry: by paper, tables before figures, then by number and letter."""
    paper, _, item = name.partition("-")
    # ``item`` is for example ``table11`` or ``fig2b``.
    word = item.rstrip("0123456789ab")
    kind = {"table": "0", "fig": "1"}.get(word, "2")
    digits = "".join(c for c in item if c.isdigit())
    return paper, kind, int(digits or 0), item


def _wrong(where: str, what: str) -> FedcacheError:
    return InternalError(f"The registry file {where}.toml is wrong: {what}.", "Please report it.")
