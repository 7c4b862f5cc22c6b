"""Backbones from the user's torch modules: ``module:PACKAGE.MODULE:FACTORY``, and modules handed over in Python.

A factory takes no arguments and returns an ``nn.Module``, or a module and a transform; every process that computes
calls it. Only a factory that the user named is imported (``plugins``); a name from a file runs no code. A module in
memory is known only to this process and runs only here. Both are identified by their tensors and code
(``digest_of_module``), so trained weights or a changed line of ``forward`` make another array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import CorruptionError, FedcacheError, StoreError, UsageError
from fedcache.extract.backbones import own_inputs
from fedcache.extract.backbones.backbone import (
    Backbone,
    FrozenEncoder,
    ModuleEncoder,
    Weights,
    one_row_each,
    triple,
)
from fedcache.extract.backbones.own import Choice, checked_encoder, pooling_of, shape_of
from fedcache.extract.backbones.own_digest import digest_of_parts
from fedcache.extract.recipe import DECODERS, IMAGES, NORMS, TEXTS, UNIT, Recipe
from fedcache.optional import reason
from fedcache.plugins import MODULE, may_be_run, note_named

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZE = 224
"""Default side of the input in pixels, for a module without the attribute ``size``."""

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class OwnModule:
    """A module of the user's, and the preprocessing of its images."""

    module: nn.Module  # never changed, because a copy of it runs
    # from a Pillow image to the module's input, without the batch
    transform: Callable[[Any], Tensor] | None
    size: int
    mean: Triple
    std: Triple
    rank: int  # axes of its output
    width: int
    reads: str = IMAGES
    version: str | None = None  # replaces code and attributes in the digest


_IN_MEMORY: dict[str, OwnModule] = {}
"""Name -> module that ``backbone`` has made known."""
_BUILT: dict[str, tuple[Any, OwnModule]] = {}
"""Spec -> factory and the module it made. A factory is called again only if its name later means another function."""


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
        return derive(module, Choice()).name
    from torch import nn

    if not isinstance(module, nn.Module):
        raise UsageError(
            f"A backbone must be a name or a torch.nn.Module, but got {type(module).__name__}.",
            "For the names, see `fedcache backbones list`.",
        )
    label = name
    if label is None:
        label = type(module).__name__
    if not label or any(sign in label for sign in ":,@\n"):
        raise UsageError(
            f"{label!r} is not a valid name for a backbone.",
            "For example fc.backbone(module, name='mine')",
        )
    label = f"{MODULE}{label.removeprefix(MODULE)}"
    checked = _checked(label, module, transform, size=size, mean=mean, std=std)
    own = replace(checked, version=version)
    _IN_MEMORY[label] = own
    digest_of_module(label, own)  # its errors are raised here and not when an extraction begins
    return label


def derive(name: str, choice: Choice) -> Backbone:
    """The row of ``module:...``. Raises UsageError for a name that is neither a module nor a factory.

    Every such row is made here, so this is the only place that decides which code runs. Raises StoreError, before
    any import, for a factory that the user did not name.
    """
    in_memory = name in _IN_MEMORY
    has_factory = ":" in name.removeprefix(MODULE)
    if has_factory and not in_memory and not may_be_run(name):
        raise StoreError(
            f"A file refers to the Python code {name}. fedcache did not import this code, because your command does "
            "not name it.",
            f"If you trust this code, give {name} in the same command: with --backbone for predict, evaluate and "
            f"export-model, with --backbones for extract and train. In Python:  fc.backbone({name!r})",
        )
    own = _own(name)
    transformed = own.transform is not None
    mean = own.mean
    std = own.std
    if transformed:
        mean, std = UNIT
    text_width = None
    template = None
    if own.reads == TEXTS:
        text_width = own.width
        template = own_inputs.TEMPLATE
    source = f"yours: {name}"
    if in_memory:
        source = "a module in the memory of this process"
    pooling = pooling_of("output", own.rank)
    decoder = DECODERS[own.reads]
    return Backbone(
        name=name,
        provider="own_module",
        width=own.width,
        text_width=text_width,
        recipe=Recipe(
            name, "", size=own.size, mean=mean, std=std, pooling=pooling, decoder=decoder
        ),
        template=template,
        source=source,
        own=True,
        here_only=in_memory,
        raw=transformed,
        reads=own.reads,
    )


def weights_of(backbone: Backbone) -> Weights:
    """Weights without a file, with the digest of a module's tensors and code."""
    name = backbone.name
    if backbone.here_only:
        place = "in the memory of this process"
    else:
        place = f"built by {name.removeprefix(MODULE)}"
    digest = digest_of_module(name, _own(name))
    return Weights(None, digest, place)


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """A copy of the module in evaluation mode; CorruptionError if its digest is not that of ``weights``."""
    own = _own(backbone.name)
    found = digest_of_module(backbone.name, own)
    if weights.sha256 and found != weights.sha256:
        raise CorruptionError(
            f"The weights or the code of {backbone.name} changed during the command: digest {found[:12]}, at the "
            f"start {weights.sha256[:12]}.",
            "A factory must return the same weights in every call: load them from a file, or draw them "
            "after torch.manual_seed(0).",
        )
    if own.reads != IMAGES:
        of_items = own_inputs.OwnItemEncoder(backbone.name, own.module, device=device, dtype=dtype)
        of_items.trial_width()
        return of_items
    encoder = _encoder(backbone.name, own, recipe, device=device, dtype=dtype)
    return checked_encoder(encoder, backbone, recipe, dtype)


def _own(name: str) -> OwnModule:
    """The module of a name: one in memory, or the one that its factory returns."""
    if name in _IN_MEMORY:
        return _IN_MEMORY[name]
    place, _, attribute = name.removeprefix(MODULE).partition(":")
    if not attribute:
        raise UsageError(
            f"{name} is not registered in this process.",
            f"fc.backbone(module, name={place!r})   registers it; module:PACKAGE.MODULE:FACTORY works in "
            "every process.",
        )
    factory = _factory(name, place, attribute)
    if name in _BUILT:
        built_by, own = _BUILT[name]
        if built_by is factory:
            return own
    try:
        made = factory()
    except FedcacheError:
        raise
    # The user's code may raise any error, which becomes a message.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{attribute}() of {place} fails: {reason(error)}",
            "Fix the function. fedcache calls it without arguments.",
        ) from error
    if not isinstance(made, tuple) or len(made) != 2:
        made = (made, None)
    module, transform = made
    own = _checked(name, module, transform)
    _BUILT[name] = (factory, own)
    return own


def _factory(name: str, place: str, attribute: str) -> Callable[[], Any]:
    """The function that a spec names. Installed packages take precedence over files of the working directory."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = import_module(place)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # an import runs the user's code
        raise UsageError(
            f"{name} cannot be imported: {reason(error)}",
            "Write module:PACKAGE.MODULE:FACTORY. PACKAGE must be installed or in the working directory.",
        ) from error
    if not callable(found):
        raise UsageError(
            f"{name} is {type(found).__name__}, expected a function without arguments that returns an nn.Module.",
            f"def {attribute.rpartition('.')[2]}(): return my_module",
        )
    made: Callable[[], Any] = found
    return made


def _checked(
    name: str,
    module: Any,
    transform: Any,
    *,
    size: int | None = None,
    mean: Any = None,
    std: Any = None,
) -> OwnModule:
    """A module with its attributes, after a check that it gives features. Raises UsageError."""
    import torch
    from torch import nn

    if not isinstance(module, nn.Module) or not (transform is None or callable(transform)):
        what = type(module).__name__
        if transform is not None:
            what += f" and {type(transform).__name__}"
        raise UsageError(
            f"{name} returns {what}, expected an nn.Module, or a module and a transform.",
            "return module   or   return module, transform",
        )
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UsageError(
            f"{name} contains TorchScript, for which fedcache cannot compute a digest.",
            "Give the original nn.Module, or export the model with torch.onnx.export(...) and give onnx:FILE.",
        )
    if own_inputs.kind_of(name, module) != IMAGES:
        given = {"transform": transform, "size": size, "mean": mean, "std": std}
        for option, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{name} reads {module.reads}, but {option} applies only to images.",
                    f"Leave out {option}.",
                )
        encoder = own_inputs.OwnItemEncoder(name, module, device="cpu", dtype="float32")
        width = encoder.trial_width()
        # Size 0 and the norm UNIT, because these items have no pixels.
        return OwnModule(module, None, 0, *UNIT, encoder.rank, width, encoder.kind)
    side = size
    if side is None:
        side = getattr(module, "size", None)
    if side is None:  # the attribute is missing, or None
        side = SIZE
    if isinstance(side, bool) or not isinstance(side, int) or not 8 <= side <= 2048:
        raise UsageError(
            f"The size of {name} is {side!r}, expected a number of pixels from 8 to 2048.",
            "size=224",
        )
    if mean is None:
        mean = getattr(module, "mean", None)
    if std is None:
        std = getattr(module, "std", None)
    usual_mean, usual_std = NORMS["imagenet"]
    mean = _triple(name, "mean", mean, usual_mean)
    std = _triple(name, "std", std, usual_std)
    if 0 in std:
        raise UsageError(f"std of {name} contains a zero.", "std=(0.229, 0.224, 0.225)")
    # One run of the module shows the number of axes of its output, and its width.
    untried = OwnModule(module, transform, side, mean, std, rank=2, width=0)
    ranks: list[int] = []
    recipe = Recipe(name, "", size=side, mean=mean, std=std)
    of_images = _encoder(name, untried, recipe, device="cpu", dtype="float32", ranks=ranks)
    width = shape_of(of_images, name, side)[1]
    return replace(untried, rank=ranks[0], width=width)


def _triple(name: str, word: str, value: Any, default: Triple) -> Triple:
    if value is None:
        return default
    try:
        return triple(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{word} of {name} is {str(value)[:60]!r}, expected three numbers.", f"{word}={default}"
        ) from error


def _encoder(
    name: str,
    own: OwnModule,
    recipe: Recipe,
    *,
    device: str,
    dtype: str,
    ranks: list[int] | None = None,
) -> FrozenEncoder:
    """The encoder over a copy of the module; each output appends its number of axes to ``ranks``."""
    module = own_inputs.copied(name, own.module)

    def image(x: Tensor) -> Tensor:
        features = own_inputs.checked_output(name, module(x), x.shape[0], IMAGES)
        if ranks is not None:
            ranks.append(features.ndim)
        return one_row_each(features)

    if own.transform is None:
        return ModuleEncoder(name, module, recipe, device=device, dtype=dtype, image=image)
    return _Transformed(
        name, module, recipe, own.transform, device=device, dtype=dtype, image=image
    )


class _Transformed(ModuleEncoder):
    """An encoder whose inputs a transform of the user's makes, image by image."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        recipe: Recipe,
        transform: Callable[[Any], Tensor],
        *,
        device: str,
        dtype: str,
        image: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(name, module, recipe, device=device, dtype=dtype, image=image)
        self._transform = transform

    def normalise(self, x: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> the results of the transform for each image, stacked."""
        import torch
        from PIL import Image

        inputs = []
        for image in x.cpu().numpy():
            transformed = self._transform(Image.fromarray(image))
            inputs.append(torch.as_tensor(transformed))
        return torch.stack(inputs).to(self.device)


def digest_of_module(name: str, own: OwnModule) -> str:
    """sha256 of a module and its transform; see ``digest_of_parts``."""
    return digest_of_parts(name, own.module, own.transform, own.version)
