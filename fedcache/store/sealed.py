"""Sealed files: what fedcache keeps for itself and reads back, whole, unchanged and in its own place, or not at all.

A seal is signed JSON (``files.to_signed``) around the content and around *what the file is*: its kind and whose it is,
as the run and seed of a checkpoint. So a changed digit is found, and also two whole files that were exchanged. Files
with tensors are safetensors; the seal lies in their metadata and holds a digest of the tensors.

What is sealed can be made again. A file that is damaged, another's, or of a release that did not seal it is never read:
the caller forgets it, says so where that costs time, or refuses to go on where it cannot be made again.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import CorruptionError
from fedcache.store.files import parse_signed, read_whole, to_signed, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = ".safetensors"
SEAL = "seal"

LONGEST_HEADER = 100_000_000
"""Bytes of a header, as safetensors allows them."""


@dataclass(frozen=True)
class Sealed:
    """What a sealed file holds."""

    content: Any  # JSON value
    tensors: dict[str, Tensor]  # {} for a file of JSON alone


def write_sealed(
    path: Path, what: Mapping[str, Any], content: Any, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Replace ``path`` by a sealed file, whole or not at all.

    Args:
        path: ends in ``.safetensors`` exactly where there are ``tensors``.
        what, content, tensors: see ``sealed_bytes``.
    """
    if (tensors is not None) != (path.suffix == TENSORS):
        raise ValueError(f"{path.name}: {TENSORS} files hold tensors, and no others do")
    write_atomic(path, sealed_bytes(what, content, tensors))


def sealed_bytes(
    what: Mapping[str, Any], content: Any, tensors: Mapping[str, Tensor] | None = None
) -> bytes:
    """The bytes of a sealed file.

    Args:
        what: what the file is, a JSON object that the reader must know: its kind and whose it is.
        content: any JSON value without NaN.
        tensors: by name, of any shape and dtype; they are written from the CPU.
    """
    if tensors is None:
        return to_signed({"what": dict(what), "content": content})
    from safetensors.torch import save

    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    seal = to_signed({"what": dict(what), "content": content, "tensors": _tensors_digest(plain)})
    return bytes(save(plain, {SEAL: seal.decode()}))


def read_sealed(path: Path, what: Mapping[str, Any]) -> Sealed | None:
    """What a sealed file holds; None where there is no file. Nothing of it is returned before the seal agrees.

    Raises CorruptionError for a file that is not what was written, not sealed, or not ``what``.
    """
    if not path.exists():
        return None
    try:
        return _opened(path, what)
    except FileNotFoundError:
        # removed at this moment, by another process that has ended the same work
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        why = error.args[0] if type(error) is ValueError and error.args else "cannot be read"
        raise CorruptionError(f"{path} {why}.", "Remove it; what it held is made again.") from error


def is_sealed(path: Path) -> bool:
    """Whether a safetensors file that can be opened has a seal; True for what is damaged, so that it is called so."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return SEAL in header.get("__metadata__", {})
    except (OSError, ValueError, AttributeError, RecursionError):
        return True


def content_beside_tensors(path: Path) -> Any:
    """The content of a safetensors file that has a seal; its tensors are not read and so not checked.

    Raises SafetensorError for another file, ValueError for a seal that is not what was written.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return parse_signed((file.metadata() or {})[SEAL].encode())["content"]


def _opened(path: Path, what: Mapping[str, Any]) -> Sealed:
    """As ``read_sealed``, with the errors of whatever reads the bytes; ValueError in words for what the seal says."""
    tensors: dict[str, Tensor] = {}
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is no file")
    if path.suffix != TENSORS:
        seal = parse_signed(read_whole(path))
    else:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                seal = parse_signed((file.metadata() or {})[SEAL].encode())
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        except SafetensorError as error:
            raise ValueError("is not the file that was written") from error
        if seal["tensors"] != _tensors_digest(tensors):
            raise ValueError("holds other tensors than were written")
    if seal["what"] != what:
        raise ValueError("is another file than its name says")
    return Sealed(seal["content"], tensors)


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        digest.update(f"{name}:{t.dtype}:{tuple(t.shape)}\n".encode())
        if t.numel():
            # A tensor of one number may have any stride, which only as_strided takes back to 1.
            digest.update(t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()
