"""From the paper's cells to those that are run: data and backbones at hand, overrides, a sentence for each change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedcache.errors import UsageError, unknown
from fedcache.extract import backbones
from fedcache.federate.methods import METHODS
from fedcache.reproduce.registry import HEADS, PaperCell, PaperTable, replaceable
from fedcache.reproduce.requirements import RequirementCheck

DEFAULT = "glyph-clip"
"""The backbone that ships with the package and has both towers: what a proxy takes when none is named."""


@dataclass(frozen=True)
class Options:
    """What a user may change.

    Attributes:
        on: a dataset spec in place of the paper's; makes a proxy.
        backbones: in place of the paper's, role by role; makes a proxy.
        recipe: ``[BACKBONE:]KEY`` -> value, how images are read; makes a proxy.
        rounds: of every cell.
        seeds: of every cell.
        limit: so many evenly spaced images of the dataset.
        only: label -> values; cells with another value are left out.
        weights: ``--weights NAME=FILE``.
        data: ``--data NAME=PATH``.
        device: of the extraction.
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
        """Whether what is run is not the paper's own data and backbones, read as the paper reads them."""
        return self.on is not None or bool(self.backbones or self.recipe) or self.limit is not None


@dataclass(frozen=True)
class PlannedCell:
    """A cell as it is run.

    Attributes:
        paper: as the registry has it.
        cell: as it is run.
        departures: a sentence for each difference between the two.
        refused: why it cannot be run, or None.
    """

    paper: PaperCell
    cell: PaperCell
    departures: tuple[str, ...]
    refused: str | None = None


def plan(entry: PaperTable, options: Options, looker: RequirementCheck) -> list[PlannedCell]:
    """Every chosen cell as it will be run.

    Raises:
        UsageError for a label or value that is not there, for ``--backbones`` where none play a role, and for
            a recipe of a backbone that plays none.
    """
    mapping = roles(entry, options, looker)
    for key in options.recipe:
        named = key.rpartition(":")[0]
        if named and named not in mapping.values():
            raise UsageError(
                f"--recipe {key} names {named!r}, which takes no role in {entry.name}.",
                f"In use: {', '.join(mapping.values()) or 'no backbone'}.",
            )
    return [_planned(cell, options, mapping) for cell in chosen(entry, options.only)]


def chosen(entry: PaperTable, only: Mapping[str, tuple[str, ...]]) -> list[PaperCell]:
    """The cells that have, of each label, one of these values."""
    cells = list(entry.cells)
    for label, wanted in only.items():
        if label not in entry.labels:
            raise unknown(f"label of {entry.name}", label, entry.labels)
        values = [c.labels[label] for c in cells]
        for value in wanted:
            if value not in values:
                raise unknown(f"{label} of {entry.name}", value, dict.fromkeys(values))
        cells = [c for c in cells if c.labels[label] in wanted]
    return cells


def roles(entry: PaperTable, options: Options, looker: RequirementCheck) -> dict[str, str]:
    """Paper's backbone -> the one that takes its place; roles without one are absent.

    ``--backbones`` fill the roles in order. Without them each keeps its own backbone if its weights are here; on other
    data, with none of them here, glyph-clip takes the first role.
    """
    named = entry.roles()
    for name in options.backbones:
        backbones.lookup(name, home=looker.home.root)
    if options.backbones and not named:
        raise UsageError(f"{entry.name} uses no backbone that could be replaced.", "Leave --backbones out.")
    if len(options.backbones) > len(named):
        raise UsageError(
            f"{len(options.backbones)} backbones for {len(named)} roles.",
            f"The roles of {entry.name}, in order: {', '.join(named)}",
        )
    if options.backbones:
        return dict(zip(named, options.backbones, strict=False))
    if options.on is None:
        return {role: role for role in named}
    here = {role: role for role in named if looker.weights(role) is None}
    return here or ({named[0]: DEFAULT} if named else {})


def _planned(paper: PaperCell, options: Options, mapping: Mapping[str, str]) -> PlannedCell:
    """One cell with the options applied."""
    cell, said = paper, []
    if options.on is not None and paper.dataset:
        cell = replace(cell, dataset=options.on)
        said.append(f"data: {options.on} instead of {paper.dataset}")
    if options.limit is not None and paper.dataset:
        said.append(f"data: {options.limit} evenly spaced images")
    alone = paper.backbones == ("pixels",)
    taken = [b if b == "pixels" and (not alone or not replaceable(paper)) else mapping.get(b) for b in paper.backbones]
    left = tuple(dict.fromkeys(b for b in taken if b is not None))
    pairs = list(zip(paper.backbones, taken, strict=True))
    said += [f"backbone: {new} instead of {old}" for old, new in pairs if new is not None and new != old]
    gone = [old for old, new in pairs if new is None]
    if gone:
        said.append(f"backbones: none in place of {', '.join(gone)}")
    changed = left != paper.backbones
    if changed and paper.recipe:
        kept = {f"{b}:{k}": v for b in left if b in paper.backbones for k, v in paper.recipe.items()}
        cell = replace(cell, recipe=kept)
        others = ", ".join(b for b in left if b not in paper.backbones)
        said.append(f"images: as {others} takes them, not {_pairs(paper.recipe)}")
    cell = replace(cell, backbones=left)
    wanted = {k: v for k, v in options.recipe.items() if left and k.rpartition(":")[0] in ("", *left)}
    if wanted:
        cell = replace(cell, recipe={**cell.recipe, **wanted})
        said.append(f"images: {_pairs(wanted)}")
    if alone and left and left != ("pixels",):
        cell, heads = _as_head(cell)
        said.append(heads)
    if _one_shot(paper.method):
        cell = replace(cell, rounds=None)
    elif options.rounds is not None and options.rounds != paper.rounds and paper.method:
        cell = replace(cell, rounds=options.rounds)
        said.append(f"rounds: {options.rounds} instead of {paper.rounds or _rounds(paper.method)}")
    if options.seeds is not None and options.seeds != paper.seeds:
        cell = replace(cell, seeds=options.seeds)
        said.append(f"seeds: {options.seeds} instead of {paper.seeds}")
    refused = "no backbone is named in place of its own" if paper.backbones and not left else None
    return PlannedCell(paper, cell, tuple(said), refused)


VIEWS = 8
"""Stored views of an image where a head on features takes the place of an encoder on images; it wants four or more."""


def _as_head(cell: PaperCell) -> tuple[PaperCell, str]:
    """A cell that trains an encoder on images, as a head on cached views; and the sentence that says so."""
    method = HEADS.get(cell.method, cell.method)
    made = replace(cell, method=method, set={**cell.set, "encoder": "mlp"}, views=VIEWS)
    return made, f"encoder: {method} trains a head on {VIEWS} cached views instead of a ResNet-18 on images"


def _one_shot(method: str) -> bool:
    return method in METHODS and METHODS[method].one_shot


def _rounds(method: str) -> str:
    return str(METHODS[method].defaults.rounds) if method in METHODS else "the method's own"


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items())


def match_domains(wanted: Sequence[str], have: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The dataset's domains that are meant, ``MNIST-M`` being ``mnistm``; the first one where none is meant.

    Returns:
        names of the dataset, and a sentence for each that has another name.
    """
    found, said = [], []
    for name in wanted:
        same = find_domain(name, have)
        if same is None:
            same = have[0]
            said.append(f"domain: {same} instead of {name}")
        found.append(same)
    return tuple(dict.fromkeys(found)), said


def find_domain(name: str, have: Sequence[str]) -> str | None:
    """The domain whose letters and digits are those of ``name``, or None."""
    return next((h for h in have if _letters(h) == _letters(name)), None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
