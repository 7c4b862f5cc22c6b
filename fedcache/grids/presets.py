"""Ablations of the papers as grids that need no switches: ``fedcache grid --ready NAME``, one TOML file each.

A file has ``title``, ``paper``, ``methods``, ``sweep`` (key -> values, as ``--sweep``), ``notes``, and the sections
``[train]`` and ``[partition]`` of fedcache.toml. Whatever a user says besides takes their place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

from fedcache.errors import InternalError, shell_word, unknown
from fedcache.federate.partition.partition import SCHEMES


@dataclass(frozen=True)
class GridPreset:
    """A grid of the package."""

    name: str  # after ``--ready``
    title: str  # what it varies
    paper: str  # where the ablation stands
    methods: tuple[str, ...]  # names
    sweep: Mapping[
        str, tuple[str, ...]
    ]  # hyperparameter, or argument of the run or partition -> values
    notes: tuple[str, ...] = ()  # what to know before it runs
    train: Mapping[str, Any] = field(default_factory=dict)  # ``[train]`` of fedcache.toml
    partition: Mapping[str, Any] = field(default_factory=dict)  # ``[partition]`` of fedcache.toml

    @property
    def points(self) -> int:
        """Runs of the product, each over all seeds."""
        count = len(self.methods)
        for values in self.sweep.values():
            count *= len(values)
        return count

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "methods": list(self.methods),
            "sweep": {k: list(v) for k, v in self.sweep.items()},
            "notes": list(self.notes),
            "points": self.points,
            "command": f"fedcache grid --ready {shell_word(self.name)}",
        }

    @property
    def schemes(self) -> tuple[str, ...]:
        """The partition schemes it names, or sweeps; () where each method takes its paper's."""
        own = self.partition.get("scheme")
        return tuple(self.sweep.get("scheme", () if own is None else (own,)))

    def unused_arguments(self, schemes: Sequence[str]) -> tuple[str, ...]:
        """Arguments of this grid's schemes that mean nothing to the ``schemes`` that are asked for instead."""
        if not schemes or not self.schemes:
            return ()
        known = {
            a.name for scheme in schemes if scheme in SCHEMES for a in SCHEMES[scheme].arguments
        }
        other = not set(schemes) & set(self.schemes)  # then a name in common means nothing
        clients = ("clients",) if "clients" in self.partition and "clients" not in known else ()
        return (
            *clients,
            *(o for o in self.partition.get("options", {}) if other or o not in known),
        )

    def merged_with(
        self, file: Mapping[str, Mapping[str, Any]], schemes: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """The sections of a configuration file over those of this grid; ``set`` and ``options`` are merged.

        Args:
            file: sections.
            schemes: asked for besides; others than this grid's leave the arguments of this grid's out.
        """
        merged = {name: dict(section) for name, section in file.items()}
        gone = self.unused_arguments(schemes or of_file(file))
        partition = {k: v for k, v in self.partition.items() if k not in gone and k != "options"}
        if options := {k: v for k, v in self.partition.get("options", {}).items() if k not in gone}:
            partition["options"] = options
        for name, inner, own in (("train", "set", self.train), ("partition", "options", partition)):
            mine = own
            theirs = file.get(name, {})
            both = {**mine.get(inner, {}), **theirs.get(inner, {})}
            merged[name] = {**mine, **theirs, **({inner: both} if both else {})}
        return merged


def of_file(file: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The partition scheme that a configuration file names, if it does."""
    scheme = file.get("partition", {}).get("scheme")
    if scheme is None:
        return ()
    return (str(scheme),)


@cache
def preset_names() -> tuple[str, ...]:
    """The names of all ready grids."""
    return tuple(
        sorted(
            f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml")
        )
    )


def find_preset(name: str) -> GridPreset:
    """The ready grid of that name.

    Raises UsageError with "did you mean" when there is none; InternalError when its file is wrong.
    """
    if name not in preset_names():
        raise unknown(
            "ready grid",
            name,
            [*preset_names(), "list"],
            hint="fedcache grid --ready list   shows all",
        )
    data = tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    known = {f.name for f in fields(GridPreset)} - {"name"}
    if wrong := sorted(set(data) - known):
        raise InternalError(
            f"The ready grid {name}.toml has an unknown key {wrong[0]!r}.", "Please report it."
        )
    sweep = {k: tuple(v) for k, v in data.pop("sweep").items()}
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return GridPreset(**{**plain, "name": name, "sweep": sweep})


def _folder() -> Any:
    return files("fedcache") / "grids"
