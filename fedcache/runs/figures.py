"""Figures of a run by name, as keys and as attributes: ``run.accuracy["mean"]`` is ``run.accuracy.mean``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Figures(Mapping[str, Any]):
    """A part of a result, read-only.

    Args:
        what: its name, for messages: ``accuracy``.
        values: plain JSON values by name.
    """

    def __init__(self, what: str, values: Mapping[str, Any]) -> None:
        self._what, self._values = what, values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return Figures(f"{self._what}.{name}", value) if isinstance(value, Mapping) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"{self.__dict__.get('_what')} has no {name!r}; it has {', '.join(dir(self))}")
        return self[name]

    def __dir__(self) -> list[str]:
        return [k for k in self._values if k.isidentifier()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shown = (f"{k}={v!r}" for k, v in self._values.items() if not isinstance(v, list | Mapping))
        return f"{self._what}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(self._values)


class TrafficFigures(Figures):
    """Traffic of a run, with what most ask for under plain names."""

    @property
    def bytes_up(self) -> int:
        """Bytes that all clients sent in all rounds and seeds, as counted from what was sent."""
        return int(self._values["exact"]["up_bytes"])

    @property
    def bytes_down(self) -> int:
        """Bytes that all clients were sent in all rounds and seeds."""
        return int(self._values["exact"]["down_bytes"])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "bytes_down", "bytes_up"]
