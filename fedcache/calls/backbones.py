"""Torch modules as backbones, for ``fc.backbone`` and ``fc.extract(backbones=[module])``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedcache.errors import UsageError
from fedcache.extract.backbones import lookup, own_module
from fedcache.plugins import MODULE, note_named

if TYPE_CHECKING:
    from torch import Tensor, nn

    Backbones = str | nn.Module | Sequence[str | nn.Module]


def backbone(
    module: nn.Module | str,
    name: str | None = None,
    *,
    transform: Callable[[Any], Tensor] | None = None,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    version: str | None = None,
) -> str:
    """Make a torch module a backbone of this process: ``fc.extract("digits", [fc.backbone(net, "mine", size=64)])``.

    Args:
        module: maps [B, 3, size, size] to [B, D]; outputs [B, T, D] and [B, D, H, W] are averaged. fedcache runs a copy
            in evaluation mode. Or the text ``module:PACKAGE.MODULE:FACTORY``. Models and stores that name this factory
            may then call the factory in this process.
        name: name of the backbone; None for the name of its class.
        transform: maps a Pillow image (RGB, already size x size) to the module's input without the batch dimension.
            None scales to [0, 1] and normalises by ``mean`` and ``std``.
        size, mean, std: side in pixels and normalisation of the input; None for the module's attributes of these names,
            else 224 and the values of ImageNet.
        version: a version that stands for the module's code, its transform and all its objects besides tensors. Change
            the version when any of these changes. Needed for code that is in no file, as in a notebook. With None,
            fedcache digests the source files and the objects.

    Returns:
        The name ``module:NAME``, which all functions accept in this process.

    Raises UsageError for an object that is no module, for a module that fails on two images, and for one with objects
    that cannot be digested.
    """
    if isinstance(module, str):
        if not module.startswith(MODULE):
            raise UsageError(
                f"{module!r} does not begin with 'module:'. Only names that begin with 'module:' can be allowed.",
                "fc.backbone('module:PACKAGE.MODULE:FACTORY')",
            )
        note_named(module)
        return lookup(module).name
    return own_module.register(
        module, name, transform=transform, size=size, mean=mean, std=std, version=version
    )


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
            names = [own_module.register(one)]
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
