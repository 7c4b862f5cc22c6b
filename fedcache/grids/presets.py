"""Presets: ablations of the papers as ready-made grids, ``fedcache grid --ready NAME``, one TOML file each.

A file has ``title``, ``paper``, ``methods``, ``sweep`` (key -> values, as ``--sweep``), ``notes``, and the sections
``[train]`` and ``[partition]`` of fedcache.toml. Options and the configuration file of a user override them.
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
    """A ready-made grid."""

    name: str  # after ``--ready``
    title: str  # the varied settings in words
    paper: str  # paper and place of the ablation
    methods: tuple[str, ...]  # names
    # hyperparameter, or argument of the run or partition -> values
    sweep: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()  # shown before it runs
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
        """The partition schemes that it names or sweeps; () if each method takes the scheme of its paper."""
        if "scheme" in self.sweep:
            return tuple(self.sweep["scheme"])
        return of_file({"partition": self.partition})

    def unused_arguments(self, schemes: Sequence[str]) -> tuple[str, ...]:
        """Arguments of this grid's partition that do not apply to the ``schemes`` that a user requests instead."""
        if not schemes or not self.schemes:
            return ()
        known = {
            a.name for scheme in schemes if scheme in SCHEMES for a in SCHEMES[scheme].arguments
        }
        # Options of another scheme do not apply, even if an option of the requested one has the same name.
        other = not set(schemes) & set(self.schemes)
        unused = [o for o in self.partition.get("options", {}) if other or o not in known]
        if "clients" in self.partition and "clients" not in known:
            unused.append("clients")
        return tuple(unused)

    def merged_with(
        self, file: Mapping[str, Mapping[str, Any]], schemes: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """The sections of a configuration file over those of this grid; ``set`` and ``options`` are merged.

        Args:
            file: sections.
            schemes: schemes that a user requests; without one of this grid's, the arguments of its partition are
                dropped.
        """
        merged = {name: dict(section) for name, section in file.items()}
        gone = self.unused_arguments(schemes or of_file(file))
        options = {k: v for k, v in self.partition.get("options", {}).items() if k not in gone}
        partition = {k: v for k, v in self.partition.items() if k not in gone}
        partition["options"] = options
        for name, inner, mine in (
            ("train", "set", self.train),
            ("partition", "options", partition),
        ):
            theirs = file.get(name, {})
            # The file takes precedence, key by key.
            merged[name] = {**mine, **theirs}
            both = {**mine.get(inner, {}), **theirs.get(inner, {})}
            merged[name].pop(inner, None)
            if both:
                merged[name][inner] = both
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

    Raises UsageError with "did you mean" for an unknown name; InternalError for a wrong file.
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
    data["sweep"] = {k: tuple(v) for k, v in data["sweep"].items()}
    for key in ("methods", "notes"):
        data[key] = tuple(data.get(key, ()))
    return GridPreset(name=name, **data)


def _folder() -> Any:
    return files("fedcache") / "grids"
