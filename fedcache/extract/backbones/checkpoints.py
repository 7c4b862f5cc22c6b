"""The one place where a checkpoint is opened. Weights are untrusted: they are read as data and never run.

safetensors and npz hold arrays only. A torch pickle goes through ``torch.load(weights_only=True)`` with an explicit
list of plain data beside torch's own: numpy scalars, and the options of a training script (``argparse.Namespace``).
Anything that needs more is refused, and there is no fallback. The kind of a file is read from its first bytes, because
``model_best.pth.tar`` is no tar and a failed download is no checkpoint.

Scripts wrap a model before they save it, so that all names begin alike (``_orig_mod.``, ``module.``, ``model.``,
``teacher.backbone.``). Such beginnings are taken off where the names fit the model without them.
"""

from __future__ import annotations

import argparse
import re
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

from fedcache.errors import FedcacheError, MachineError, shell_word
from fedcache.store.sealed import SEAL, read_sealed

if TYPE_CHECKING:
    from torch import Tensor, nn

IMPORTED = {"kind": "weights"}
"""What a file that ``import`` wrote is, for its seal."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the weights beside epochs and accuracies."""
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema")
"""Keys under which they keep the moving average of the weights (EMA)."""
NPZ_LIMIT = 16 << 30
"""Bytes an npz may claim to unpack to; the largest published ViT is below 8 GB."""


def read_state(path: Path, *, hub: str | None = None, key: str | None = None) -> dict[str, Tensor]:
    """The tensors, on the CPU and by name, of a safetensors file, an npz of arrays, or a torch checkpoint of tensors.

    Raises MachineError for a file that is missing, damaged, of another kind, or that would run code.

    Args:
        path: of the file.
        hub: a repository with a safetensors file of the same weights, named when a TorchScript archive is refused.
        key: which entry of a torch checkpoint holds the weights; None for the first of ``WRAPPERS``, or the whole file.
    """
    kind = kind_of(path)
    if kind == "torchscript":
        where = f"the safetensors file of {hub} (open_clip_model.safetensors)" if hub else "a safetensors file"
        raise _refuse(
            path,
            "it is a TorchScript archive, which carries code beside the weights",
            f"Use {where} of the same weights, or convert it: {conversion(path, script=True)}",
        )
    readers = {"safetensors": _read_safetensors, "npz": _read_npz, "torch": _read_torch}
    state = _tensors(path, readers[kind](path), key)
    if all(name.startswith("module.") for name in state):  # written by DataParallel
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def kind_of(path: Path) -> str:
    """``safetensors`` | ``npz`` | ``torch`` | ``torchscript``, by content; MachineError says what else it is."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise _refuse(path, f"it cannot be opened ({error.strerror})", "Check the path and its permissions.") from error
    again = "Get the file again: this is what a failed download leaves."
    if not head:
        raise _refuse(path, "it is empty", again)
    if head[8:9] == b"{":  # first, as the eight bytes of length before it may be any
        return "safetensors"
    if head.startswith(b"PK"):
        return _kind_of_zip(path, again)
    if head.startswith(b"\x80"):
        return "torch"
    if head.startswith(b"version https://git-lfs"):
        raise _refuse(path, "it is a Git LFS pointer, not the weights", "Fetch the file itself:  git lfs pull")
    if head.lstrip()[:1] == b"<":
        raise _refuse(path, "it is an HTML or XML page, not weights", again)
    if path.suffix == ".safetensors":
        return "safetensors"
    raise _refuse(
        path,
        f"it is neither safetensors, npz nor a torch checkpoint (it starts with {head[:8]!r})",
        f"Convert it: {conversion(path)}",
    )


def _kind_of_zip(path: Path, again: str) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            claimed = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise _refuse(path, f"its zip directory cannot be read ({error})", again) from error
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        return "torchscript"
    if any(name.endswith("data.pkl") for name in names):
        return "torch"
    if names and all(name.endswith(".npy") for name in names):
        if claimed > NPZ_LIMIT:
            raise _refuse(path, f"it claims to unpack to {claimed:,} bytes, more than {NPZ_LIMIT:,}", again)
        return "npz"
    raise _refuse(path, "it is a zip archive without weights", "Unpack it, and give the checkpoint inside.")


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(path, framework="pt") as file:
            sealed = SEAL in (file.metadata() or {})
        found = read_sealed(path, IMPORTED) if sealed else None
        return load_file(path) if found is None else found.tensors
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OSError, MemoryError) as error:
        raise _refuse(
            path, f"its safetensors header does not describe it ({error})", "Get the file again, or convert it again."
        ) from error


def _read_npz(path: Path) -> Mapping[str, Any]:
    import numpy as np
    import torch

    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(np.ascontiguousarray(archive[name])) for name in archive.files}
    except Exception as error:  # the parser is fed untrusted bytes: whatever it raises means the same
        raise _refuse(
            path, f"its arrays cannot be read as plain numbers ({error})", "Save it again without object arrays."
        ) from error


def _read_torch(path: Path) -> Mapping[str, Any]:
    loaded = load_torch(path)
    if not isinstance(loaded, Mapping):
        raise _refuse(
            path,
            f"it holds a {type(loaded).__name__}, not a state_dict",
            "Save model.state_dict() with safetensors.torch.save_file.",
        )
    return loaded


def load_torch(path: Path) -> Any:
    """Tensors and plain data of a torch file. Raises MachineError for a file that would run code."""
    import torch

    try:
        with torch.serialization.safe_globals(_plain_data()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the parser is fed untrusted bytes: whatever it raises means the same
        raise _refuse(
            path,
            f"it is not a checkpoint of tensors alone ({_cause(error)})",
            f"If you trust where it came from, convert it: {conversion(path)}",
        ) from error


def _cause(error: Exception) -> str:
    """Torch's reason without its advice, which is to run the file."""
    text = str(error)
    asked = re.search(r"GLOBAL ([\w.]+)", text)
    if asked is not None:
        return f"it asks for {asked[1]}"
    lines = (text.partition("WeightsUnpickler error:")[2] or text).strip().splitlines()
    return lines[0] if lines and "weights_only" not in lines[0] else type(error).__name__


def _plain_data() -> list[Any]:
    """Numpy scalars such as a best accuracy, as both spellings of numpy's module pickle them, and the options of a
    training script with their paths; no arrays and no other objects.
    """
    import numpy as np
    from numpy._core.multiarray import scalar

    kinds = [type(np.dtype(name)) for name in ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")]
    spellings = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    paths = [(PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")]
    return [argparse.Namespace, *paths, np.dtype, *((scalar, name) for name in spellings), *kinds]


def conversion(path: Path, *, script: bool = False) -> str:
    """The command that writes the weights of a file that fedcache refuses as safetensors; it runs code of the file.

    ``script`` is True for TorchScript. The command needs torch and safetensors alone.
    """
    read = f"torch.jit.load({str(path)!r}, map_location='cpu').state_dict()"
    if not script:
        read = f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)"
    code = (
        f"import torch; from safetensors.torch import save_file; w = {read}; "
        "w = w.get('state_dict', w.get('model', w)); "
        "save_file({k: v.clone().contiguous() for k, v in w.items()}, 'OUT.safetensors')"
    )
    return f"in a container without network, because this runs code of the file:  python -c {shell_word(code)}"


def averaged_in(path: Path) -> str | None:
    """Key of the averaged weights (EMA) in a checkpoint that also holds plain weights; None without averaged weights.

    Also None for a file that cannot be read: loading it raises the error.
    """
    try:
        if kind_of(path) != "torch":
            return None
        loaded = _read_torch(path)
    except FedcacheError:
        return None
    if not any(isinstance(loaded.get(name), Mapping) for name in WRAPPERS):
        return None
    return next((name for name in AVERAGED if isinstance(loaded.get(name), Mapping)), None)


def averaged_sentence(path: Path, name: str, key: str) -> str:
    """What is said of a checkpoint whose averaged weights, under ``key``, are not used for the backbone ``name``."""
    words = shlex.join(["fedcache", "backbones", "import", str(path), "--as", name, "--key", key])
    return f"{path} also holds averaged weights (EMA) under {key}, which are not used. To use them:  {words}"


def _tensors(path: Path, loaded: Mapping[str, Any], key: str | None) -> dict[str, Tensor]:
    import torch

    inside = [name for name, value in loaded.items() if isinstance(name, str) and isinstance(value, Mapping)]
    if key is not None and key not in inside:
        raise _refuse(path, f"it has no weights under {key!r}", f"It has: {_few(inside) or 'none under any key'}.")
    wrapper = key or next((name for name in WRAPPERS if name in inside), None)
    if wrapper is not None:
        loaded = loaded[wrapper]
    others = sorted(str(name) for name, value in loaded.items() if not isinstance(value, torch.Tensor))
    if others or not loaded:
        found = f"beside tensors it holds {_few(others)}" if others else "it holds no tensors"
        hint = f"A state_dict, alone or under {_few(list(WRAPPERS))}, is needed."
        if wrapper is None and inside:
            command = shlex.join(["fedcache", "backbones", "import", str(path), "--as", "NAME", "--key", inside[0]])
            hint += f" For other keys:  {command}"
        raise _refuse(path, f"{found}, so it is no state_dict", hint)
    return {str(name): value for name, value in loaded.items()}


def load_strict(
    module: nn.Module, state: Mapping[str, Tensor], *, backbone: str, path: Path, ignore: tuple[str, ...] = ()
) -> None:
    """Load ``state`` into ``module``, whose parameters keep their dtype; every tensor must be there, be known and fit.

    ``ignore`` are prefixes of names that may be there or not, in file and model (a classifier that is not used). What
    all names of the file begin with is taken off, as ``unwrapped`` does. Raises MachineError, naming what is missing,
    unexpected or of another shape.
    """
    state = unwrapped(state, module, ignore)
    wanted = {k: v for k, v in module.state_dict().items() if not k.startswith(ignore)}
    given = {k: v for k, v in state.items() if not k.startswith(ignore)}
    # Counts batches seen in training; absent from checkpoints older than torch 0.4.1 and unread in evaluation.
    missing = sorted(k for k in wanted.keys() - given.keys() if not k.endswith("num_batches_tracked"))
    unexpected = sorted(given.keys() - wanted.keys())
    shapes = [
        f"{k} {tuple(given[k].shape)} instead of {tuple(v.shape)}"
        for k, v in wanted.items()
        if k in given and given[k].shape != v.shape
    ]
    faults = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    found = "; ".join(f"{len(names)} {what}: {_few(names)}" for what, names in faults if names)
    if found:
        raise _refuse(
            path, f"its tensors are not those of {backbone} ({found})", f"Give the weights of {backbone} itself."
        )
    module.load_state_dict(given, strict=False)


def unwrapped(state: Mapping[str, Tensor], module: nn.Module, ignore: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Tensors under the names of the module, without what all names of the file begin with.

    Words that end in a dot are taken off one by one until every name of the module is there. The names stay as they are
    where that is never so. Arguments as of ``load_strict``.
    """
    wanted = {k for k in module.state_dict() if not k.startswith(ignore) and not k.endswith("num_batches_tracked")}
    found = dict(state)
    while not wanted <= found.keys():
        first = {name.partition(".")[0] for name in found if not name.startswith(ignore)}
        if len(first) != 1:
            return dict(state)
        prefix = f"{first.pop()}."
        shorter = {name.removeprefix(prefix): t for name, t in found.items()}
        if shorter.keys() == found.keys():
            return dict(state)
        found = shorter
    return found


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _refuse(path: Path, why: str, hint: str) -> FedcacheError:
    return MachineError(f"{path} is not loaded: {why}.", hint)
