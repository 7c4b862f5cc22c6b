"""What a field of a configuration says of itself as an option of the command line."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any

DATA = "Data"
CLIENTS = "Clients"
METHOD = "Method"
TRAINING = "Training"
TRUST = "Trust"
FEATURES = "Features"
PARTICIPATION = "Participation"
COMPUTING = "Computing"
RESULTS = "Results"
"""Panels of the help."""


@dataclass(frozen=True)
class OptionInfo:
    """How a field is an option of the command line."""

    meaning: str  # one sentence
    panel: str  # heading under which the help of a command shows it
    short: str = ""  # its one-letter form, ``-d``
    name: str = ""  # the long option in place of the field's own name
    choices: tuple[
        str, ...
    ] = ()  # the words it takes, where they are few; their check is where they are used
    minimum: int | None = None  # the smallest number it takes
    default: str = (
        ""  # what is done without it, in words, where the field's default does not say it
    )
    path: bool = False  # whether it is a path, for completion
    split: bool = (
        False  # whether one use of a ``key=value`` option may hold several pairs, comma-separated
    )
    once: bool = False  # whether a key that comes twice is refused
    whole: bool = False  # whether each use is one value, commas and all


def option(default: Any, meaning: str, panel: str, *, said: str = "", **info: Any) -> Any:
    """A field that is an option too; ``{}`` as its default is a new dictionary.

    Args:
        default: of the field.
        meaning: as of ``OptionInfo``, like ``panel`` and ``info``.
        said: the default in words.
    """
    metadata = {"option": OptionInfo(meaning, panel, default=said, **info)}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_name(item: Field[Any]) -> str:
    """The long option of a field."""
    own: str = item.metadata["option"].name
    return own or f"--{item.name.replace('_', '-')}"


def option_value(value: object) -> str:
    """A value of a configuration as its option takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
