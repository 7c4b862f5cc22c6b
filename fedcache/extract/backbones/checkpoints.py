"""The only module that opens checkpoints. Weights are untrusted: they are read as data and never run.

safetensors and npz hold arrays only. A torch pickle is read by ``torch.load(weights_only=True)`` with an explicit
list of plain data in addition to torch's own: numpy scalars, and the options of a training script
(``argparse.Namespace``). A file that needs more is refused, and there is no fallback. The kind of a file is read
from its first bytes, because ``model_best.pth.tar`` is not a tar file and a failed download is not a checkpoint.

Training scripts save several models in one file, under their own names: ``module.encoder_q.``, ``teacher.backbone.``,
``state_dict_ema``. The weights of a backbone are tensors of its shapes, with one prefix before each of its names. A
prefix may consist of keys of the file and of words in names; both end in a dot and are treated alike.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word
from fedcache.store.files import SEAL, read_sealed
from fedcache.tables.words import some_names

if TYPE_CHECKING:
    from torch import Tensor, nn

IMPORTED = {"kind": "weights"}
"""Seal of every file that ``fedcache backbones import`` writes: its kind."""
USUAL = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the weights; a moving average (EMA) of them may have another key."""
NPZ_LIMIT = 16 << 30
"""Limit in bytes for the unpacked arrays of an npz file; the largest published ViT is below 8 GB."""


def read_state(path: Path, *, hub: str | None = None, key: str | None = None) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, an npz of arrays, or a torch checkpoint, on the CPU and by name.

    The name of a tensor inside of mappings is its keys, joined by dots. Other values are left out.

    Raises MachineError for a file that is missing, damaged, of another kind, or that would run code.

    Args:
        path: of the file.
        hub: a repository with a safetensors file of the same weights, named when a TorchScript archive is refused.
        key: the beginning of the requested names, such as ``state_dict_ema``; or a part of them, if no name begins
            with it. Other tensors are left out.
    """
    kind = kind_of(path)
    if kind == "torchscript":
        where = "a safetensors file"
        if hub:
            where = f"the safetensors file of {hub} (open_clip_model.safetensors)"
        raise _refuse(
            path,
            "it is a TorchScript archive, which contains code in addition to the weights",
            f"Use {where} with the same weights, or convert this file: {conversion(path, script=True)}",
        )
    readers = {"safetensors": _read_safetensors, "npz": _read_npz, "torch": _read_torch}
    state = dict(_tensors_in(readers[kind](path)))
    if not state:
        raise _refuse(
            path, "it contains no tensors", "Save a state_dict: the result of model.state_dict()."
        )
    if key is None:
        return state
    chosen = {name: tensor for name, tensor in state.items() if name.startswith(f"{key}.")}
    if not chosen:  # the key may leave out what comes before it in the names
        chosen = {name: tensor for name, tensor in state.items() if f".{key}." in name}
    if chosen:
        return chosen
    prefixes = sorted({name.partition(".")[0] for name in state if "." in name})
    raise _refuse(
        path,
        f"it has no weights under {key!r}",
        f"Keys of the file: {some_names(prefixes, 4) or 'none'}. Leave out --key to list the weights that fit.",
    )


def _tensors_in(loaded: Mapping[Any, Any], start: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested mappings with their names."""
    import torch

    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            yield f"{start}{name}", value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value, f"{start}{name}.")


def after(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, under their names without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def kind_of(path: Path) -> str:
    """``safetensors`` | ``npz`` | ``torch`` | ``torchscript``, by content; MachineError for another kind of file."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise _refuse(
            path, f"it cannot be opened ({error.strerror})", "Check the path and its permissions."
        ) from error
    again = "Get the file again; a failed download leaves an empty file."
    if not head:
        raise _refuse(path, "it is empty", again)
    # safetensors is tested first: its first eight bytes are the length of the header, and may look like another kind.
    if head[8:9] == b"{":
        return "safetensors"
    if head.startswith(b"PK"):
        return _kind_of_zip(path, again)
    if head.startswith(b"\x80"):
        return "torch"  # a pickle without a zip archive, from an old version of torch
    if head.startswith(b"version https://git-lfs"):
        raise _refuse(
            path, "it is a Git LFS pointer, not the weights", "Fetch the file itself:  git lfs pull"
        )
    if head.lstrip()[:1] == b"<":
        raise _refuse(path, "it is an HTML or XML page, not weights", again)
    if path.suffix == ".safetensors":
        return "safetensors"  # damaged, which its reader reports
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
            raise _refuse(
                path,
                f"according to its header it unpacks to {claimed:,} bytes; the limit is {NPZ_LIMIT:,}",
                again,
            )
        return "npz"
    raise _refuse(
        path, "it is a zip archive without weights", "Unpack it and give the checkpoint inside."
    )


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(path, framework="pt") as file:
            is_sealed = SEAL in (file.metadata() or {})
        if is_sealed:
            found = read_sealed(path, IMPORTED)
            if found is not None:
                return found.tensors
        return load_file(path)
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        OSError,
        MemoryError,
    ) as error:
        raise _refuse(
            path,
            f"its safetensors header does not match the file ({error})",
            "Get the file again, or convert it again.",
        ) from error


def _read_npz(path: Path) -> Mapping[str, Any]:
    import numpy as np
    import torch

    try:
        tensors = {}
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                array = np.ascontiguousarray(archive[name])
                tensors[name] = torch.from_numpy(array)
        return tensors
    except Exception as error:
        # The parser reads untrusted bytes, so any error means that the file cannot be read.
        raise _refuse(
            path,
            f"its arrays are not arrays of numbers ({error})",
            "Save it again without object arrays.",
        ) from error


def _read_torch(path: Path) -> Mapping[str, Any]:
    loaded = load_torch(path)
    if not isinstance(loaded, Mapping):
        raise _refuse(
            path,
            f"it contains a {type(loaded).__name__}, expected a state_dict",
            "Save model.state_dict() with safetensors.torch.save_file.",
        )
    return loaded


def load_torch(path: Path) -> Any:
    """Tensors and plain data of a torch file. Raises MachineError for a file that would run code."""
    import torch

    try:
        with torch.serialization.safe_globals(_plain_data()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # The parser reads untrusted bytes, so any error means that the file cannot be read.
        raise _refuse(
            path,
            f"it contains objects that are not tensors ({_cause(error)})",
            f"If you trust its origin, convert the file: {conversion(path)}",
        ) from error


def _cause(error: Exception) -> str:
    """The cause in an error of torch, without torch's advice, which is to run the code of the file."""
    text = str(error)
    missing_global = re.search(r"GLOBAL ([\w.]+)", text)
    if missing_global is not None:
        return f"it needs {missing_global[1]}"
    _, _, cause = text.partition("WeightsUnpickler error:")
    lines = (cause or text).strip().splitlines()
    if lines and "weights_only" not in lines[0]:
        return lines[0]
    return type(error).__name__


def _plain_data() -> list[Any]:
    """Objects that a torch file may contain besides tensors, for ``torch.serialization.safe_globals``.

    These are the options of a training script with their paths, and numpy scalars such as a best accuracy, which
    versions of numpy pickle under two names; no arrays and no other objects.
    """
    import numpy as np
    from numpy._core.multiarray import scalar

    names = ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")
    kinds = [type(np.dtype(name)) for name in names]
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    scalars = [(scalar, f"{module}.scalar") for module in modules]
    paths = [(PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")]
    return [argparse.Namespace, *paths, np.dtype, *scalars, *kinds]


def conversion(path: Path, *, script: bool = False) -> str:
    """A command that writes the weights of a refused file as safetensors; it runs the code in that file.

    ``script`` is True for TorchScript. The command needs only torch and safetensors.
    """
    read = f"torch.jit.load({str(path)!r}, map_location='cpu').state_dict()"
    if not script:
        read = f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)"
    code = (
        f"import torch; from safetensors.torch import save_file; w = {read}; "
        "w = w.get('state_dict', w.get('model', w)); "
        "save_file({k: v.clone().contiguous() for k, v in w.items()}, 'OUT.safetensors')"
    )
    return f"run this in a container without network, because it runs code of the file:  python -c {shell_word(code)}"


@dataclass(frozen=True)
class Taken:
    """Which tensors of a file are the weights of a backbone."""

    prefix: str  # stands before the model's names in the file: "", or words that end in a dot
    also: tuple[str, ...]  # other prefixes that have all tensors of the model
    left: tuple[str, ...]  # names of tensors that are not used

    def sentence(self, path: Path, backbone: str) -> str:
        """A message for the user; "" if the whole file is used and its names are those of the model."""
        if not self.prefix and not self.also and not self.left:
            return ""
        where = "tensors without a prefix"
        if self.prefix:
            where = f"tensors under {self.prefix.rstrip('.')}"
        sentence = f"{path}: the weights of {backbone} are {where}."
        if self.left:
            count = len(self.left)
            names = some_names(self.left, 4)
            sentence += f" Other tensors, not used: {count:,} ({names})."
        for other in self.also:
            place = other.rstrip(".")
            command = import_command(path, backbone, other)
            sentence += f" The file also holds weights of {backbone} under {place}, for example averaged ones (EMA),"
            sentence += f" which are not used. To use them:  {command}"
        return sentence


def import_command(path: Path, backbone: str, prefix: str) -> str:
    """The command that imports the weights under one prefix of a file."""
    key = prefix.rstrip(".")
    return f"fedcache backbones import {shell_word(path)} --as {shell_word(backbone)} --key {shell_word(key)}"


def load_strict(
    module: nn.Module,
    state: Mapping[str, Tensor],
    *,
    backbone: str,
    path: Path,
    ignore: tuple[str, ...] = (),
    taken: list[Taken] | None = None,
) -> None:
    """Load weights into ``module``, whose parameters keep their dtype. Names and shapes of all tensors must agree.

    Only tensors under the prefix that ``weights_in`` finds are used.

    Args:
        module: of the backbone.
        state: tensors of the file, of ``read_state``.
        backbone: its name, for messages.
        path: of the file, for messages.
        ignore: prefixes of names that are ignored in file and model (a classifier that is not used).
        taken: receives an entry for the tensors that were used.

    Raises:
        MachineError, listing tensors that are missing, unexpected or of another shape; UsageError for a file with the
            weights of several such models.
    """
    found = weights_in(state, module, backbone=backbone, path=path, ignore=ignore)
    if taken is not None:
        taken.append(found)
    wanted = {
        name: tensor for name, tensor in module.state_dict().items() if not name.startswith(ignore)
    }
    below = after(found.prefix, state)
    # Other copies of the weights may have longer prefixes. Their tensors are not unexpected.
    copies = [
        other.removeprefix(found.prefix) for other in found.also if other.startswith(found.prefix)
    ]
    unused = (*ignore, *copies)
    given = {name: tensor for name, tensor in below.items() if not name.startswith(unused)}
    # ``num_batches_tracked`` is not read in evaluation, and checkpoints older than torch 0.4.1 do not have it.
    absent = sorted(wanted.keys() - given.keys())
    missing = [name for name in absent if not name.endswith("num_batches_tracked")]
    unexpected = sorted(given.keys() - wanted.keys())
    shapes = [
        f"{name} has shape {tuple(given[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in given and given[name].shape != tensor.shape
    ]
    faults = [
        f"{len(names)} {what}: {some_names(names, 4)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    if faults:
        under = ""
        if found.prefix:
            under = f" under {found.prefix.rstrip('.')}"
        listed = "; ".join(faults)
        raise _refuse(
            path,
            f"its tensors{under} are not the tensors of {backbone} ({listed})",
            f"Give a file with weights of {backbone}.",
        )
    module.load_state_dict(given, strict=False)


def weights_in(
    state: Mapping[str, Tensor],
    module: nn.Module,
    *,
    backbone: str,
    path: Path,
    ignore: tuple[str, ...] = (),
) -> Taken:
    """Find the prefix under which a file has all tensors of a module, with its shapes.

    If no prefix has all of them, it is the prefix with the most. If several have all, it is the one that all others
    begin with, or the only one under one of the usual keys. Arguments as of ``load_strict``.

    Raises UsageError for several prefixes of equal rank.
    """
    wanted = {
        name: tensor.shape
        for name, tensor in module.state_dict().items()
        if not name.startswith(ignore) and not name.endswith("num_batches_tracked")
    }
    # For each prefix: how many names of the model follow it in the file, and how many of these have the right shape.
    named = Counter({"": 0})
    fitting: Counter[str] = Counter()
    for name, tensor in state.items():
        for prefix in _prefixes(name):
            rest = name[len(prefix) :]
            if rest in wanted:
                named[prefix] += 1
                fitting[prefix] += tensor.shape == wanted[rest]
    whole = [prefix for prefix, count in fitting.items() if count == len(wanted)]
    if not whole:
        most = max(named.values())
        nearest = [prefix for prefix, count in named.items() if count == most]
        whole = [_main_one(nearest) or nearest[0]]
    found = _main_one(whole)
    if found is None:
        shown = ", ".join(prefix.rstrip(".") for prefix in whole)
        commands = [import_command(path, backbone, prefix) for prefix in whole]
        raise UsageError(
            f"{path} contains {len(whole)} sets of weights that fit {backbone}: {shown}.",
            f"Choose one:  {'  or  '.join(commands)}",
        )
    also = tuple(prefix for prefix in whole if prefix != found)
    left = tuple(name for name in state if not name.startswith((found, *also)))
    return Taken(found, also, left)


def _prefixes(name: str) -> Iterator[str]:
    """Possible prefixes of a name before the name of a module's tensor: "", and every beginning up to a dot."""
    yield ""
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()]


def _main_one(prefixes: Sequence[str]) -> str | None:
    """The main prefix among several; None if there is no main one."""
    found = _outermost(prefixes)
    if found is not None:
        return found
    for key in USUAL:
        under = [prefix for prefix in prefixes if prefix.startswith(f"{key}.")]
        if under:
            return _outermost(under)
    return None


def _outermost(prefixes: Sequence[str]) -> str | None:
    """The prefix that all others begin with; None without one."""
    shortest = min(prefixes, key=len)
    if all(prefix.startswith(shortest) for prefix in prefixes):
        return shortest
    return None


def weights_named(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor] | None:
    """The tensors with the prefix that stands before ``name`` in the file, without it; None if no name ends so.

    For files whose names are not those of the module, so that ``weights_in`` cannot find the prefix.
    """
    prefixes = [
        found.removesuffix(name) for found in state if found == name or found.endswith(f".{name}")
    ]
    if not prefixes:
        return None
    prefix = _main_one(prefixes)
    if prefix is None:
        return None
    return after(prefix, state)


def _refuse(path: Path, why: str, hint: str) -> FedcacheError:
    return MachineError(f"{path} is not loaded: {why}.", hint)
