"""Presets: ablations of the papers as ready-made grids, ``fedcache grid --ready NAME``, one TOML file each.

A file has ``title``, ``paper``, ``methods``, ``sweep`` (key -> values, as ``--sweep``), ``notes``, and the sections
``[train]`` and ``[partition]`` of fedcache.toml. Options and the configuration file of a user override them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

from fedcache.errors import InternalError, shell_word, unknown
from fedcache.federate.partition.partition import SCHEMES
from fedcache.parsing import Facts, Record


@dataclass(frozen=True)
class GridPreset:
    """A ready-made grid.

    Attributes:
        name: the name that follows ``--ready``.
        title: the varied settings in words.
        paper: paper and place of the ablation.
        methods: names of the methods.
        sweep: hyperparameter, or argument of the run or partition -> values.
        notes: sentences to show before the grid runs.
        train: ``[train]`` of fedcache.toml.
        partition: ``[partition]`` of fedcache.toml.
    """

    name: str
    title: str
    paper: str
    methods: tuple[str, ...]
    sweep: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    train: Record = field(default_factory=dict)
    partition: Record = field(default_factory=dict)

    @property
    def points(self) -> int:
        """Number of runs: combinations of methods and swept values. Each run has all seeds."""
        return len(self.methods) * math.prod(map(len, self.sweep.values()))

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return {
            **vars(self),
            "methods": list(self.methods),
            "sweep": {key: list(values) for key, values in self.sweep.items()},
            "notes": list(self.notes),
            "points": self.points,
            "command": f"fedcache grid --ready {shell_word(self.name)}",
        }

    @property
    def schemes(self) -> tuple[str, ...]:
        """The partition schemes that this grid names or sweeps; () if each method takes the scheme of its paper."""
        if "scheme" in self.sweep:
            return tuple(self.sweep["scheme"])
        return scheme_of_file({"partition": self.partition})

    def unused_arguments(self, schemes: Sequence[str]) -> tuple[str, ...]:
        """Arguments of this grid's partition that do not apply to the ``schemes`` that a user requests instead."""
        if not schemes or not self.schemes:
            return ()
        known: set[str] = set()
        for scheme in schemes:
            if scheme in SCHEMES:
                known.update(argument.name for argument in SCHEMES[scheme].arguments)
        unused = list(self.partition.get("options", {}))
        # If no requested scheme is one of this grid's, none of its options applies, even if names are the same. Else
        # the options of the requested schemes apply.
        if not set(schemes).isdisjoint(self.schemes):
            unused = [option for option in unused if option not in known]
        if "clients" in self.partition and "clients" not in known:
            unused.append("clients")
        return tuple(unused)

    def merged_with(
        self, file: Mapping[str, Record], schemes: Sequence[str] = ()
    ) -> dict[str, Facts]:
        """The sections of a configuration file merged with those of this grid; values of the file take precedence.

        Args:
            file: sections of the configuration file.
            schemes: schemes that a user requests. If this grid uses none of them, the arguments of its partition are
                dropped.
        """
        unused = self.unused_arguments(schemes or scheme_of_file(file))
        options = dict(self.partition.get("options", {}))
        partition = {**self.partition, "options": options}
        for name in unused:
            options.pop(name, None)
            partition.pop(name, None)
        merged = {name: dict(section) for name, section in file.items()}
        merged["train"] = _merged_section(self.train, file.get("train", {}), "set")
        merged["partition"] = _merged_section(partition, file.get("partition", {}), "options")
        return merged


def _merged_section(mine: Record, theirs: Record, table: str) -> Facts:
    """Two sections as one: ``theirs`` takes precedence for each key, also for the keys of the nested ``table``."""
    merged = {**mine, **theirs}
    merged.pop(table, None)
    nested = {**mine.get(table, {}), **theirs.get(table, {})}
    if nested:
        merged[table] = nested
    return merged


def scheme_of_file(file: Mapping[str, Record]) -> tuple[str, ...]:
    """The partition scheme that a configuration file names, if it does."""
    scheme = file.get("partition", {}).get("scheme")
    if scheme is None:
        return ()
    return (str(scheme),)


@cache
def preset_names() -> tuple[str, ...]:
    """The names of all predefined grids."""
    names = [file.name for file in _folder().iterdir()]
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def find_preset(name: str) -> GridPreset:
    """The predefined grid of that name.

    Raises UsageError with "did you mean" for an unknown name; InternalError for a wrong file.
    """
    if name not in preset_names():
        names = [*preset_names(), "list"]
        hint = "fedcache grid --ready list   shows all"
        raise unknown("predefined grid", name, names, hint=hint)
    file = _folder() / f"{name}.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    known = {f.name for f in fields(GridPreset)} - {"name"}
    wrong = sorted(set(data) - known)
    if wrong:
        raise InternalError(
            f"The predefined grid {name}.toml has an unknown key {wrong[0]!r}.", "Please report it."
        )
    data["sweep"] = {k: tuple(v) for k, v in data["sweep"].items()}
    for key in ("methods", "notes"):
        data[key] = tuple(data.get(key, ()))
    return GridPreset(name=name, **data)


def _folder() -> Any:
    return files("fedcache") / "grids"
