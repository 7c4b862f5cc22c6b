"""What a module of the user's is known by: a digest of its tensors, what it holds, and the code that is reached."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from fedcache.errors import UsageError
from fedcache.extract.backbones.own_objects import ReachedObjects, is_users_class
from fedcache.optional import reason
from fedcache.store.files import digest_of, sha256_hex
from fedcache.store.own_code import NoDigestError

if TYPE_CHECKING:
    from torch import nn

PLAIN = (type(None), bool, int, float, str)
"""Types of attributes that are part of a module's identity as they are."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def digest_of_parts(name: str, module: nn.Module, transform: Any) -> str:
    """sha256 over a module's tensors (names, dtypes, shapes, bytes), attributes and code, and those of its transform.

    Attributes are plain values, functions, hooks, and objects that pickle could keep; code is the files of its classes,
    the user's files they import, and the bytecode of classes that were defined in no file, with what their functions
    read. Raises UsageError for what has no digest.
    """
    code = ReachedObjects(f"the backbone {name}", module)
    parts: list[Any] = [_tensors(name, module)]
    try:
        for path, part in module.named_modules():
            parts.append([path, code.classes(part), _attributes(part, code)])
        parts.append(None if transform is None else _described_transform(name, transform, code))
    except RecursionError as error:
        raise UsageError(
            f"The backbone {name} holds lists or objects in one another without an end, whose digest is not known.",
            "Make them inside forward, or hold them as plain lists of numbers.",
        ) from error
    return digest_of([parts, sorted(code.sources.values())])


def _tensors(name: str, module: nn.Module) -> list[list[Any]]:
    """Name, dtype, shape and sha256 of every parameter and buffer, buffers that are not saved among them."""
    import torch

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    made = []
    for key, tensor in sorted(tensors.items()):
        try:
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            raw = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
        ) as error:  # sparse, quantised, not there yet
            raise UsageError(
                f"{key} of {name} is a {tensor.layout} tensor whose bytes cannot be read: {reason(error)}",
                "Give a module with dense tensors; a lazy module must have seen an image.",
            ) from error
        made.append([key, str(tensor.dtype), list(tensor.shape), sha256_hex(raw)])
    return made


def _attributes(module: nn.Module, code: ReachedObjects) -> list[Any]:
    """What a module holds beside its tensors and parts."""
    from torch import nn

    # what torch.compile adds is of this process; the module inside is a part
    if _is_compiled(module):
        return []
    torchs = set(vars(nn.Module())) - set(HOOKS)
    made = []
    for key, value in sorted(vars(module).items()):
        if key not in torchs:
            shown = list(value.values()) if key in HOOKS and isinstance(value, Mapping) else value
            made.append([key, code.attribute(module, shown)])
    return made


def _described_transform(name: str, transform: Any, code: ReachedObjects) -> Any:
    """A transform as JSON that differs where it does something else."""
    parts = getattr(transform, "transforms", None)
    if isinstance(parts, list | tuple):  # Compose, of torchvision and others
        return [
            code.classes(transform),
            *(_described_transform(name, part, code) for part in parts),
        ]
    if isinstance(transform, FunctionType | MethodType | BuiltinFunctionType | partial):
        return code.describe(transform)
    shown = repr(transform)
    held = _held_by(transform)
    if is_users_class(type(transform)):
        says_all = all(repr(value) in shown for value in held.values())
    else:  # torchvision's and timm's say all numbers that they hold, and no functions
        says_all = not any(
            callable(value) and not isinstance(value, type) for value in held.values()
        )
    if " at 0x" not in shown and says_all:
        return [code.classes(transform), shown]
    slots = any(vars(kind).get("__slots__") for kind in type(transform).__mro__)
    if not slots and all(isinstance(value, PLAIN) for value in held.values()):
        return [code.classes(transform), code.describe(held)]
    try:
        return code.describe(transform)
    except NoDigestError as error:
        raise UsageError(
            f"The transform of {name} is a {type(transform).__name__}, whose digest is not known.",
            "Give a function from a file of its own, or a torchvision transform.",
        ) from error


def _held_by(transform: Any) -> dict[str, Any]:
    """Attributes of a transform, without those that every module has."""
    from torch import nn

    own = vars(nn.Module()) if isinstance(transform, nn.Module) else {}
    return {
        key: value for key, value in getattr(transform, "__dict__", {}).items() if key not in own
    }


def _is_compiled(module: nn.Module) -> bool:
    return (
        f"{type(module).__module__}.{type(module).__qualname__}"
        == "torch._dynamo.eval_frame.OptimizedModule"
    )
