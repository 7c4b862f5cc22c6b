"""Metadata of a configuration field as an option of the command line."""

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
    """Metadata of a field that is an option of the command line.

    Attributes:
        meaning: one sentence.
        panel: heading under which the help of a command shows it.
        short: its one-letter form, ``-d``.
        name: the long option in place of the field's own name.
        choices: the words it takes, where they are few; their check is where they are used.
        minimum: the smallest number it takes.
        default: in words, where the field's default does not say it.
        path: whether it is a path, for completion.
        remote: whether it may also be the address of a published store.
        split: whether one use of a ``key=value`` option may hold several pairs, comma-separated.
        once: whether a key that comes twice is refused.
        whole: whether each use is one value, commas and all.
        added: whether pairs of the command line are added to those of the file; else they replace them.
    """

    meaning: str
    panel: str
    short: str = ""
    name: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    default: str = ""
    path: bool = False
    remote: bool = False
    split: bool = False
    once: bool = False
    whole: bool = False
    added: bool = False


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
    return own or "--" + item.name.replace("_", "-")


def option_value(value: object) -> str:
    """A value of a configuration as its option takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
