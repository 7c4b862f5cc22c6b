"""Embeddings in a torch file: a dict of tensors, lists and numbers by name, as ``torch.save`` writes it.

The file goes through the one function of the package that opens torch files, which runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError
from fedcache.extract.backbones.checkpoints import load_torch
from fedcache.tables.embeddings import Embeddings, assemble, open_embeddings
from fedcache.tables.foreign_files import ONE_OBJECT, refused_file
from fedcache.tables.roles import ColumnChoice
from fedcache.tables.words import Unread, as_column, ending_of, objects_of

ENDINGS = (".pt", ".pth")


def open_any(path: Path, choice: ColumnChoice) -> Embeddings:
    """A file of embeddings of any format, torch's too; errors as ``open_embeddings``."""
    if ending_of(path) not in ENDINGS or not path.is_file():
        return open_embeddings(path, choice)
    return assemble(path, read_torch(path), choice)


def read_torch(path: Path) -> dict[str, Any]:
    """Columns by name. Raises UsageError for a file that holds other things."""
    try:
        held = load_torch(path)
    except FedcacheError as error:
        raise refused_file(path, ".pt") from error
    found = _columns(held, "")
    if not any(column.shape for column in found.values()):
        raise refused_file(path, ".pt")
    return found


def _columns(held: Any, prefix: str) -> dict[str, Any]:
    """Columns of a tensor, of (features, labels), or of a dict, also of one dict for each split."""
    import torch

    if isinstance(held, torch.Tensor):
        values = held.detach().cpu()
        if values.dtype == torch.bfloat16:
            values = values.float()
        return {prefix.removesuffix("/") or "features": as_column(values.numpy())}
    if (
        isinstance(held, tuple | list)
        and len(held) == 2
        and all(isinstance(part, torch.Tensor) for part in held)
    ):
        return {**_columns(held[0], f"{prefix}features/"), **_columns(held[1], f"{prefix}labels/")}
    if isinstance(held, Mapping):
        found: dict[str, Any] = {}
        for name, value in held.items():
            found |= _columns(value, f"{prefix}{name}/")
        if any(column.shape for column in found.values()) or not prefix:
            return found
    if prefix and isinstance(held, Sequence) and not isinstance(held, str | bytes):
        return {prefix.removesuffix("/"): _column_of_list(held)}
    # such as an epoch
    what = "one value"
    if isinstance(held, Mapping):
        what = ONE_OBJECT
    return {prefix.removesuffix("/"): Unread((), type(held).__name__, what)}


def _column_of_list(values: Sequence[Any]) -> Any:
    """A list of words or numbers, or of rows of the same length."""
    import torch

    if values and all(isinstance(value, torch.Tensor) for value in values):
        rows = [value.detach().cpu().float().numpy() for value in values]
        if len({row.shape for row in rows}) == 1:
            return as_column(np.stack(rows))
    return objects_of(values)
