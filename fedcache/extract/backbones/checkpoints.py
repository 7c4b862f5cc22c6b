"""The one place where a checkpoint is opened. Weights are untrusted: they are read as data and never run.

safetensors and npz hold arrays only. A torch pickle goes through ``torch.load(weights_only=True)`` with an explicit
list of numpy scalars beside torch's own; anything that needs more is refused, and there is no fallback. The kind of
a file is read from its first bytes, because ``model_best.pth.tar`` is no tar and a failed download is no checkpoint.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import FedcacheError, MachineError
from fedcache.store.sealed import SEAL, read_sealed

if TYPE_CHECKING:
    from torch import Tensor, nn

SCRIPT = "tools/convert_checkpoint.py"
IMPORTED = {"kind": "weights"}
"""What a file that ``import`` wrote is, for its seal."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the weights beside epochs and accuracies."""
NPZ_LIMIT = 16 << 30
"""Bytes an npz may claim to unpack to; the largest published ViT is below 8 GB."""


def read_state(path: Path, *, hub: str | None = None) -> dict[str, Tensor]:
    """The tensors, on the CPU and by name, of a safetensors file, an npz of arrays, or a torch checkpoint of tensors.

    ``hub``, a repository with a safetensors file of the same weights, is named when a TorchScript archive is refused.
    Raises MachineError for a file that is missing, damaged, of another kind, or that would run code.
    """
    kind = kind_of(path)
    if kind == "torchscript":
        where = f"the safetensors file of {hub} (open_clip_model.safetensors)" if hub else "a safetensors file"
        raise _refuse(
            path,
            "it is a TorchScript archive, which carries code beside the weights",
            f"Use {where} of the same weights, or convert it in a sandbox:  python {SCRIPT} {path} OUT.safetensors",
        )
    readers = {"safetensors": _read_safetensors, "npz": _read_npz, "torch": _read_torch}
    state = _tensors(path, readers[kind](path))
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
        f"Convert it in a sandbox:  python {SCRIPT} {path} OUT.safetensors",
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
        with torch.serialization.safe_globals(_numpy_scalars()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the parser is fed untrusted bytes: whatever it raises means the same
        raise _refuse(
            path,
            f"it is not a checkpoint of tensors alone ({_cause(error)})",
            f"If you trust where it came from, convert it in a sandbox:  python {SCRIPT} {path} OUT.safetensors",
        ) from error


def _cause(error: Exception) -> str:
    """Torch's reason without its advice, which is to run the file."""
    text = str(error)
    asked = re.search(r"GLOBAL ([\w.]+)", text)
    if asked is not None:
        return f"it asks for {asked[1]}"
    lines = (text.partition("WeightsUnpickler error:")[2] or text).strip().splitlines()
    return lines[0] if lines and "weights_only" not in lines[0] else type(error).__name__


def _numpy_scalars() -> list[Any]:
    """Numpy scalars such as a best accuracy, as both spellings of numpy's module pickle them; no arrays, no objects."""
    import numpy as np
    from numpy._core.multiarray import scalar

    kinds = [type(np.dtype(name)) for name in ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")]
    spellings = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    return [np.dtype, *((scalar, name) for name in spellings), *kinds]


def _tensors(path: Path, loaded: Mapping[str, Any]) -> dict[str, Tensor]:
    import torch

    for wrapper in WRAPPERS:
        if isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
            break
    others = sorted(str(name) for name, value in loaded.items() if not isinstance(value, torch.Tensor))
    if others or not loaded:
        found = f"beside tensors it holds {_few(others)}" if others else "it holds no tensors"
        raise _refuse(
            path, f"{found}, so it is no state_dict", f"A state_dict, alone or under {_few(list(WRAPPERS))}, is needed."
        )
    return {str(name): value for name, value in loaded.items()}


def load_strict(
    module: nn.Module, state: Mapping[str, Tensor], *, backbone: str, path: Path, ignore: tuple[str, ...] = ()
) -> None:
    """Load ``state`` into ``module``, whose parameters keep their dtype; every tensor must be there, be known and fit.

    ``ignore`` are prefixes of names that may be there or not, in file and model (a classifier that is not used). Raises
    MachineError, naming what is missing, unexpected or of another shape.
    """
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


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _refuse(path: Path, why: str, hint: str) -> FedcacheError:
    return MachineError(f"{path} is not loaded: {why}.", hint)
