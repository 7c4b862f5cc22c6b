"""Names of backbones for functions of the Python interface, such as ``fc.extract(backbones=[module])``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedcache.errors import UsageError
from fedcache.extract.backbones import own_module

if TYPE_CHECKING:
    from torch import nn

    Backbones = str | nn.Module | Sequence[str | nn.Module]


def backbone_names(backbones: Any) -> tuple[str, ...]:
    """Names of backbones; modules among them are registered. Raises UsageError for two backbones with one name."""
    given = [backbones]
    if isinstance(backbones, list | tuple):
        given = list(backbones)
    # Name -> the text or module that has it.
    source_of: dict[str, Any] = {}
    for one in given:
        # A module is registered under its name; a text may hold several names.
        if isinstance(one, str):
            names = one.split(",")
        else:
            names = [own_module.backbone(one)]
        for name in names:
            # Two texts may repeat a name. A module needs a name of its own.
            earlier = source_of.get(name, one)
            both_are_names = isinstance(one, str) and isinstance(earlier, str)
            if earlier is not one and not both_are_names:
                raise UsageError(
                    f"Two backbones are called {name}.",
                    "Rename one of them: fc.backbone(module, name='another')",
                )
            source_of[name] = one
    stripped = [name.strip() for name in source_of]
    return tuple(name for name in stripped if name)
