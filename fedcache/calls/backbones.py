"""Modules of Python as backbones, as ``fc.backbone`` and ``fc.extract(backbones=[module])`` take them."""

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
        module: maps [B, 3, size, size] to [B, D]; [B, T, D] and [B, D, H, W] are averaged. What runs is a copy in
            evaluation mode. Or ``module:PACKAGE.MODULE:FACTORY``: from now on a model or store that names this factory
            may have it called in this process.
        name: None for that of its class.
        transform: from a Pillow image (RGB, already size x size) to the module's input without the batch; None scales
            to [0, 1] and normalises by ``mean`` and ``std``.
        size, mean, std: of its input; None for the module's attributes of these names, else 224 and ImageNet's.
        version: for a module whose code is in no file, as in a notebook: stands for its code, its transform and all
            that it holds besides tensors. Change it when they change. None digests source files and held objects.

    Returns:
        its name, ``module:NAME``, which ``extract``, ``train`` and all other functions take in this process.

    Raises UsageError for what is no module, fails on two images, or holds something whose digest is not known.
    """
    if isinstance(module, str):
        if not module.startswith(MODULE):
            raise UsageError(
                f"{module!r} is not a module: backbone; only module: backbones need permission.",
                "fc.backbone('module:PACKAGE.MODULE:FACTORY')",
            )
        note_named(module)
        return lookup(module).name
    return own_module.register(
        module, name, transform=transform, size=size, mean=mean, std=std, version=version
    )


def backbone_names(backbones: Any) -> tuple[str, ...]:
    """Names of backbones, with modules among them made known to this process; UsageError for two of one name."""
    given = [backbones]
    if isinstance(backbones, list | tuple):
        given = list(backbones)
    made: dict[str, Any] = {}
    for one in given:
        # A module is registered under its name; a text may hold several names.
        if isinstance(one, str):
            names = one.split(",")
        else:
            names = [own_module.register(one)]
        for name in names:
            earlier = made.get(name, one)
            both_are_names = isinstance(one, str) and isinstance(earlier, str)
            if earlier is not one and not both_are_names:
                raise UsageError(
                    f"Two backbones are called {name}.",
                    "fc.backbone(module, name='another') gives one another name.",
                )
            made[name] = one
    return tuple(name.strip() for name in made if name.strip())
