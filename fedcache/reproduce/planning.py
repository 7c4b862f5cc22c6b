"""Planning of a paper's cells: what each cell needs, what is substituted, and a sentence for each change.

Whether a requirement is met is determined by the code that extracts and trains, not by a list.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from fedcache.config import Home
from fedcache.errors import FedcacheError, InternalError, UsageError, shell_word, unknown
from fedcache.extract import backbones
from fedcache.extract.datasets.listing import info
from fedcache.extract.planning.plan import memory_of, paths_of
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES
from fedcache.parsing import Facts, Record, as_tuples

# The registry: one TOML file for each table or figure, read into plain values and checked.
#
# A cell describes one run: its labels, all settings that determine the run, and the values that the paper prints for
# it. ``[protocol]`` and ``[axes]`` hold settings that cells of a file share. A later setting overrides an earlier
# one, and mappings are merged.

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
    set: Record = field(default_factory=dict)
    backbones: tuple[str, ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)
    dataset: str = ""
    domain: tuple[str, ...] = ()
    scheme: str = ""
    args: Record = field(default_factory=dict)
    rounds: int | None = None
    participation: str | None = None
    seeds: str = "0"
    eval_every: int = 0
    views: int = 1
    augment: str | None = None
    metrics: tuple[str, ...] = ()
    printed: tuple[Printed | None, ...] = ()
    options: Record = field(default_factory=dict)

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
        raise _wrong(name, f"its name is {made.name!r}, expected the name of the file")
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
        raise _wrong(where, f"kind is {data['kind']!r}, expected one of: {kinds}")
    for axis in axes:
        if axis not in data["labels"]:
            raise _wrong(where, f"it has [axes.{axis}], but {axis} is not one of its labels")
    cells = tuple(_cell(c, data, protocol, axes, where) for c in data["cells"])
    # Two cells with the same labels could not be distinguished in the table.
    if len({c.at for c in cells}) < len(cells):
        raise _wrong(where, "two cells have the same labels")
    differences = tuple(_difference(d, cells, where) for d in data.get("differences", ()))
    return PaperTable(**{**as_tuples(data), "cells": cells, "differences": differences})


def _cell(
    own: Record,
    data: Record,
    protocol: Record,
    axes: Record,
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
                raise _wrong(
                    where, f"cell {at} has the {label} {value!r}, which [axes.{label}] lacks"
                )
            layers.append(axes[label][value])
    layers.append({k: v for k, v in own.items() if k not in ("at", "printed")})
    values: Facts = {}
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
    raise _wrong(where, f"printed has {value!r}, expected a number, [mean, std], a text or '-'")


def _difference(data: Record, cells: Sequence[PaperCell], where: str) -> Difference:
    made = Difference(
        tuple(data["of"]),
        tuple(data["minus"]),
        str(data["metric"]),
        Printed(float(data["printed"])),
    )
    for at in (made.of, made.minus):
        if not any(c.at == at and made.metric in c.metrics for c in cells):
            raise _wrong(
                where,
                f"a difference uses {made.metric} of the cell {at}, but there is no such cell with this metric",
            )
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


@dataclass(frozen=True)
class Requirement:
    """Something that is missing.

    Attributes:
        kind: weights | data | method | setting | scheme.
        name: of the backbone, dataset, method, ...
        why: the reason why it counts as missing.
        command: the command that gets it.
        fetched: whether ``extract`` downloads it by itself.
    """

    kind: str
    name: str
    why: str
    command: str
    fetched: bool = False

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return dict(self.__dict__)


class RequirementCheck:
    """Check of what cells need; each weights file and dataset is looked up once, even if several cells need it.

    Args:
        home: home to search for weights and data.
        weights: ``--weights NAME=FILE``.
        data: ``--data NAME=PATH``.

    Attributes:
        missing_weights: function: name of a backbone -> the requirement that is missing, or None if its weights are
            available.
    """

    def __init__(
        self,
        home: Home,
        weights: Mapping[str, str] | None = None,
        data: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self.given = paths_of(weights or {})
        self.roots = paths_of(data or {})
        self._memory = memory_of(home)
        self.missing_weights = cache(self._find_weights)
        self._data = cache(self._find_data)

    def missing(self, entry: PaperTable, cell: PaperCell) -> list[Requirement]:
        """Requirements that a cell of an entry lacks; [] when it can be measured now."""
        reads = READS[entry.kind]
        requirements = []
        if "method" in reads:
            requirements.append(_method(cell))
        if "scheme" in reads:
            requirements.append(_scheme(cell))
        if "weights" in reads:
            requirements += [self.missing_weights(name) for name in cell.backbones]
        if "data" in reads:
            requirements.append(self._data(cell.dataset))
        return [need for need in requirements if need is not None]

    def all_missing(self, entry: PaperTable) -> list[Requirement]:
        """Requirements that any cell lacks, each once."""
        requirements = []
        for cell in entry.cells:
            requirements += self.missing(entry, cell)
        return list(dict.fromkeys(requirements))

    def _find_weights(self, name: str) -> Requirement | None:
        try:
            row = backbones.lookup(name, home=self.home.root)
            found = backbones.locate(
                row,
                given=self.given,
                home=self.home.root,
                memory=self._memory,
                offline=self.home.offline,
            )
        except FedcacheError as error:
            return Requirement("weights", name, error.message, error.hint)
        if found.download is not None:
            why = f"not available locally; published {found.download}"
            command = f"fedcache backbones pull {shell_word(name)}"
            return Requirement("weights", name, why, command, fetched=True)
        return None

    def _find_data(self, spec: str) -> Requirement | None:
        try:
            known = info(spec, roots=self.roots, data=self.home.data)
        except FedcacheError as error:
            return Requirement("data", spec, error.message, error.hint)
        if known.get("ready"):
            return None
        command = str(known.get("needs") or f"fedcache datasets info {shell_word(spec)}")
        return Requirement("data", spec, "its files are not available locally", command)


def _method(cell: PaperCell) -> Requirement | None:
    """The missing method of a cell, or the setting that the method does not know; None if it has both."""
    name = cell.method
    if name not in METHODS:
        why = f"this fedcache has no method {name}"
        return Requirement("method", name, why, "fedcache methods list")
    try:
        METHODS[name].resolve(cell.preset, cell.set)
    except FedcacheError as error:
        command = f"fedcache methods info {shell_word(name)}"
        return Requirement("setting", name, error.message, command)
    return None


def _scheme(cell: PaperCell) -> Requirement | None:
    if cell.scheme not in SCHEMES:
        why = f"this fedcache has no scheme {cell.scheme}"
        return Requirement("scheme", cell.scheme, why, "fedcache partition --help")
    args = dict(cell.args)
    if cell.domain:
        args["domain"] = cell.domain
    try:
        SCHEMES[cell.scheme].resolve(args)
    except FedcacheError as error:
        return Requirement("scheme", cell.scheme, error.message, error.hint)
    return None


DEFAULT = "glyph-clip"
"""Backbone of a substitute run if none is given. It ships with the package and has an image and a text tower."""


@dataclass(frozen=True)
class Options:
    """Options that make an entry depart from its paper. A run on other data, backbones or preprocessing is a proxy.

    Attributes:
        on: a dataset spec in place of the paper's; makes a proxy.
        backbones: backbones in place of the paper's, in the order of its roles (``PaperTable.roles``: the paper's
            backbones that may be replaced); makes a proxy.
        recipe: ``[BACKBONE:]KEY`` -> value, changes of the preprocessing; makes a proxy.
        rounds: rounds of every cell; None for the paper's.
        seeds: seeds of every cell; None for the paper's.
        limit: number of images of the dataset, evenly spaced; makes a proxy.
        only: label -> allowed values; cells with another value are left out.
        weights: ``--weights NAME=FILE``.
        data: ``--data NAME=PATH``.
        device: device of the extraction.
    """

    on: str | None = None
    backbones: tuple[str, ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)
    rounds: int | None = None
    seeds: str | None = None
    limit: int | None = None
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"

    @property
    def proxy(self) -> bool:
        """Whether the data, the backbones or how images are read differ from the paper's."""
        other_images = self.on is not None or self.limit is not None
        other_features = bool(self.backbones or self.recipe)
        return other_images or other_features


@dataclass(frozen=True)
class PlannedCell:
    """A cell as it is run.

    Attributes:
        paper: the cell in the registry.
        cell: the cell as it is run.
        departures: a sentence for each difference between the two.
        refused: why the cell cannot be run, or None.
    """

    paper: PaperCell
    cell: PaperCell
    departures: tuple[str, ...]
    refused: str | None = None


def plan(entry: PaperTable, options: Options, check: RequirementCheck) -> list[PlannedCell]:
    """Every chosen cell as it will be run.

    Raises:
        UsageError for an unknown label or value, for values that no row has together, for ``--backbones`` where the
            entry has no roles, and for the recipe of a backbone without a role.
    """
    mapping = roles(entry, options, check)
    for key in options.recipe:
        # A key is ``BACKBONE:KEY``, or ``KEY`` for all backbones.
        named = key.rpartition(":")[0]
        if named and named not in mapping.values():
            used = ", ".join(mapping.values()) or "no backbone"
            raise UsageError(
                f"--recipe {key} refers to {named!r}, which has no role in {entry.name}.",
                f"Backbones in use: {used}.",
            )
    return [_planned(cell, options, mapping) for cell in chosen(entry, options.only)]


def chosen(entry: PaperTable, only: Mapping[str, tuple[str, ...]]) -> list[PaperCell]:
    """The cells with one of the allowed values for each of these labels."""
    cells = list(entry.cells)
    for label, allowed in only.items():
        if label not in entry.labels:
            raise unknown(f"label of {entry.name}", label, entry.labels)
        values = [c.labels[label] for c in entry.cells]
        for value in allowed:
            if value not in values:
                raise unknown(f"{label} of {entry.name}", value, dict.fromkeys(values))
        cells = [c for c in cells if c.labels[label] in allowed]
    if not cells:
        raise UsageError(
            f"No row of {entry.name} has the values of all --only options together.",
            f"fedcache reproduce info {shell_word(entry.name)}   lists the labels of its rows",
        )
    return cells


PROXY_SET = "proxy"
"""Value of ``--backbones`` that stands for substitutes of the paper's backbones with publicly available weights."""

STAND_INS = {
    "resnet18-quickdraw-maxpool": "mobilenetv2-imagenet",
    "resnet18-aircraft-maxpool": "mobilenetv2-insects",
    "resnet18-birds-maxpool": "mobilenetv2-birds",
}
"""FedPCL's backbone -> its substitute, which has another architecture and was trained on other images."""


def roles(entry: PaperTable, options: Options, check: RequirementCheck) -> dict[str, str]:
    """Paper's backbone -> the backbone that is used in its place; a backbone that is left out is no key.

    ``--backbones`` replace the paper's backbones in order; the word ``proxy`` means ``STAND_INS``. Without this option
    the paper's backbones are used. On other data only those with available weights are used; if there are none,
    glyph-clip takes the first role.
    """
    named = entry.roles()
    if options.backbones == (PROXY_SET,):
        mapping = {role: STAND_INS[role] for role in named if role in STAND_INS}
        if not mapping:
            known = ", ".join(STAND_INS)
            replaced = ", ".join(named) or "none"
            raise UsageError(
                f"--backbones {PROXY_SET} has substitutes only for {known}. {entry.name} uses none of these backbones.",
                f"Name the substitutes yourself: --backbones A,B. Backbones of {entry.name}, in order: {replaced}",
            )
        return mapping
    if options.backbones:
        for name in options.backbones:
            backbones.lookup(name, home=check.home.root)
        if not named:
            raise UsageError(
                f"{entry.name} uses no backbone that can be replaced.", "Leave --backbones out."
            )
        count = len(options.backbones)
        if count > len(named):
            listed = ", ".join(named)
            raise UsageError(
                f"{count} backbones are given for {len(named)} roles.",
                f"The roles of {entry.name}, in order: {listed}",
            )
        return dict(zip(named, options.backbones, strict=False))
    if options.on is None:
        return {role: role for role in named}
    available = {role: role for role in named if check.missing_weights(role) is None}
    if not available and named:
        available = {named[0]: DEFAULT}
    return available


def _planned(paper: PaperCell, options: Options, mapping: Mapping[str, str]) -> PlannedCell:
    """One cell with the options applied."""
    cell = paper
    departures = []
    if options.on is not None and paper.dataset:
        cell = replace(cell, dataset=options.on)
        departures.append(f"data `{options.on}` instead of `{paper.dataset}`")
    # A cell has no field for the limit; ``prepare`` applies it when it extracts.
    if options.limit is not None and paper.dataset:
        departures.append(f"data of only {options.limit} evenly spaced images")
    replacements = []
    for backbone in paper.backbones:
        new = mapping.get(backbone)
        # Pixels stay if the cell also has other backbones, or if its method trains only on images (``replaceable``).
        if backbone == "pixels" and not replaceable(paper):
            new = backbone
        replacements.append(new)
    in_use = tuple(dict.fromkeys(b for b in replacements if b is not None))
    removed = []
    for old, new in zip(paper.backbones, replacements, strict=True):
        if new is None:
            removed.append(f"`{old}`")
        elif new != old:
            departures.append(f"backbone `{new}` instead of `{old}`")
    if removed:
        departures.append(f"no backbone instead of {', '.join(removed)}")
    if in_use != paper.backbones and paper.recipe:
        # The paper's recipe stays with the paper's backbones; new backbones read images in their own way.
        kept: dict[str, str] = {}
        new_backbones = []
        for backbone in in_use:
            if backbone in paper.backbones:
                kept |= {f"{backbone}:{key}": value for key, value in paper.recipe.items()}
            else:
                new_backbones.append(backbone)
        cell = replace(cell, recipe=kept)
        if new_backbones:
            readers = ", ".join(new_backbones)
            usual_recipe = settings_text(paper.recipe)
            departures.append(f"images as {readers} reads them, not with {usual_recipe}")
    cell = replace(cell, backbones=in_use)
    recipe = {}
    for key, value in options.recipe.items():
        # A key without a backbone applies to all of them.
        backbone = key.rpartition(":")[0]
        if in_use and backbone in ("", *in_use):
            recipe[key] = value
    if recipe:
        cell = replace(cell, recipe={**cell.recipe, **recipe})
        departures.append(f"images with {settings_text(recipe)}")
    only_pixels = paper.backbones == ("pixels",)
    if only_pixels and in_use and in_use != ("pixels",):
        cell, heads = _as_head(cell)
        departures.append(heads)
    method = METHODS.get(paper.method)
    usual: object = paper.rounds
    if usual is None:
        usual = "the method's own"
        if method is not None:
            usual = method.defaults.rounds
    if method is not None and method.one_shot:
        cell = replace(cell, rounds=None)
    elif options.rounds not in (None, usual) and paper.method:
        cell = replace(cell, rounds=options.rounds)
        departures.append(f"rounds {options.rounds} instead of {usual}")
    if options.seeds is not None and options.seeds != paper.seeds:
        cell = replace(cell, seeds=options.seeds)
        departures.append(f"seeds {options.seeds} instead of {paper.seeds}")
    refused = None
    if paper.backbones and not in_use:
        refused = "no backbone replaces the paper's backbone"
    return PlannedCell(paper, cell, tuple(departures), refused)


VIEWS = 8
"""Number of stored views per image if a head on features replaces an encoder on images; a head needs four or more."""


def _as_head(cell: PaperCell) -> tuple[PaperCell, str]:
    """Replace the encoder that a cell trains on images by a head on cached views; return the cell and the departure."""
    method = HEADS.get(cell.method, cell.method)
    changed = replace(cell, method=method, set={**cell.set, "encoder": "mlp"}, views=VIEWS)
    network = "ResNet-18"
    if cell.set.get("encoder") == "resnet50":
        network = "ResNet-50"
    departure = f"{method} trains a head on {VIEWS} cached views instead of a {network} on images"
    return changed, departure


def settings_text(values: Record) -> str:
    """Settings in words: ``lr 0.1, epochs 5``."""
    return ", ".join(f"{key} {value}" for key, value in values.items())


def match_domains(names: Sequence[str], have: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Match names of domains with the dataset's; ``MNIST-M`` matches ``mnistm``.

    Returns:
        The dataset's names, and a sentence for each name without a match, which the first domain replaces.
    """
    found = []
    departures = []
    for name in names:
        match = find_domain(name, have)
        if match is None:
            match = have[0]
            departures.append(f"domain `{match}` instead of `{name}`")
        found.append(match)
    return tuple(dict.fromkeys(found)), departures


def find_domain(name: str, have: Sequence[str]) -> str | None:
    """The domain whose letters and digits are those of ``name``, or None."""
    letters = _letters(name)
    return next((domain for domain in have if _letters(domain) == letters), None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
