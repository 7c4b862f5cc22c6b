"""Hyperparameters that a method declares, and the parsing of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedcache.errors import FedcacheError, UsageError

Value = float | int | bool | str | None
Hp = Mapping[str, Value | Tensor]
"""Resolved hyperparameters; a float swept over a grid is a tensor of shape [G, 1]."""

Kind = Literal["float", "int", "bool", "choice"]


def with_schedule_rounds(settings: Mapping[str, Value], rounds: int) -> dict[str, Value]:
    """Hyperparameters whose schedule has the length of the run, unless a setting gives its length."""
    unset = [k for k in ("sched_rounds", "calibrate_at") if settings.get(k, rounds) is None]
    return {**settings, **dict.fromkeys(unset, rounds)}


def has_batchnorm(hp: Hp) -> bool:
    """Whether a model of these switches has BatchNorm. A linear head never has it, also with ``bn``."""
    return bool(hp.get("bn")) and hp.get("head") != "linear"


_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True)
class HParam:
    """One declared hyperparameter."""

    name: str  # the key of ``--set key=value``
    # Value of the ``paper`` preset, and of ``default`` if ``usual`` is None.
    default: Value
    kind: Kind  # ``float`` (may be swept), ``int``, ``bool`` or ``choice``
    # One sentence; D-nn is the question about the paper (docs/readings.md) that it decides.
    help: str
    choices: tuple[str, ...] = ()  # the legal words of a ``choice``
    low: float | None = None  # smallest legal number
    high: float | None = None  # largest legal number
    official: Value = None  # value of the released code if it differs, else None
    # Value of the preset ``default`` if the paper's value is known to fail, else None.
    usual: Value = None
    # Value of the preset ``tuned``, selected on validation rows; None if that preset takes the paper's value.
    tuned: Value = None
    auto: str = ""  # meaning of ``auto``; makes None (written ``auto``) a legal value
    # True if the clients' ``Method.fit`` reads it. False if only the server or the evaluation reads it: then it cannot
    # change an upload, so the points of a grid that differ only in such hyperparameters share their uploads.
    fit: bool = True

    def of_preset(self, preset: str) -> Value:
        """The value in a preset of ``config.PRESETS``."""
        by_preset = {"default": self.usual, "official": self.official, "tuned": self.tuned}
        value = by_preset.get(preset)
        if value is None:
            return self.default
        return self.parse(value)

    def parse(self, value: Value) -> Value:
        """The typed value of a word from the command line or a file. Raises UsageError for an illegal value."""
        if self.auto and (value is None or value == "auto"):
            return None
        read = self._read(value)
        if isinstance(read, (int, float)) and not isinstance(read, bool):
            below = self.low is not None and read < self.low
            above = self.high is not None and read > self.high
            if below or above or not math.isfinite(read):
                raise self._refuse(value)
        return read

    def legal(self) -> str:
        """The legal values in words."""
        if self.kind == "choice":
            words = " | ".join(self.choices)
        elif self.kind == "bool":
            words = "true | false"
        else:
            name = {"float": "a number", "int": "an integer"}[self.kind]
            words = name
            if self.low is not None and self.low == self.high:
                words = f"{self.low:g}"
            elif self.low is not None and self.high is not None:
                words = f"{name} from {self.low:g} to {self.high:g}"
            elif self.low is not None:
                words = f"{name} of at least {self.low:g}"
        if self.auto:
            return f"{words}, or auto, which means {self.auto}"
        return words

    def _read(self, value: Value) -> Value:
        if self.kind == "choice":
            if value in self.choices:
                return value
        elif self.kind == "bool":
            if isinstance(value, bool):
                return value
            if str(value).lower() in _WORDS:
                return _WORDS[str(value).lower()]
        elif value is not None and not isinstance(value, bool):
            try:
                number = float(value)
                if self.kind == "float":
                    return number
                if number.is_integer():
                    return int(number)
            except (ValueError, OverflowError):
                pass
        raise self._refuse(value)

    def _refuse(self, value: Value) -> FedcacheError:
        legal = self.legal()
        default = self.show()
        return UsageError(
            f"Hyperparameter {self.name!r} is {value!r}, expected {legal}.",
            f"Set it with --set {self.name}={default}  ({self.help})",
        )

    def show_preset(self, preset: str) -> str:
        """The value of a preset as it is written after ``--set key=``."""
        value = self.of_preset(preset)
        if value is None:
            return "auto"
        return self.show(value)

    def show(self, value: Value = None) -> str:
        """A value (the default when None) as it is written after ``--set key=``."""
        if value is None:
            value = self.default
        if value is None:
            return "auto"
        if isinstance(value, bool):
            return str(value).lower()
        return str(value)
