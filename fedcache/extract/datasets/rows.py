"""``rows:FILE``: rows of numbers, such as wave forms, in a .npz, .npy or .h5 file, or in .npy files.

Rows are [N, ...] of any shape, of whole numbers or floats. A ``module:`` encoder whose ``reads`` is ``rows`` receives
them unchanged: nothing is scaled, cut or resized. The array of rows is called ``rows``, ``waves``, ``waveforms``,
``audio``, ``signals``, ``samples``, ``data`` or ``x`` (in upper or lower case), or ``--images-key`` names it. Labels,
splits, domains, class names and groups are found as in ``arrays:FILE``, or named by
``rows:FILE?rows=A&label=B&group=C,D``.

A row with NaN or infinity is quarantined like an unreadable image. A row is identified only by its bytes.
"""

from __future__ import annotations

from typing import Any

from fedcache.extract.datasets import arrays
from fedcache.extract.datasets.arrays import FileArray
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.extract.datasets.row_sources import numbers_of
from fedcache.extract.recipe import ROWS

HOLDS = ROWS
USUAL = ("rows", "waves", "waveforms", "audio", "signals", "samples", "data", "x")
"""Usual names of the column of rows, compared without case; the first name that the file has is used."""


def key(rest: str, context: Context) -> list[Any]:
    """The kind, the columns that the spec names, and the stat of every file."""
    return arrays.key(rest, context, "rows")


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``rows:FILE``; errors as of ``arrays:FILE``."""
    return arrays.load_arrays(NUMBERS, rest, context)


def _fits(array: FileArray) -> bool:
    return array.dtype.kind in "iufb" and len(array.shape) > 1


NUMBERS = arrays.Reading("rows", ROWS, USUAL, _fits, numbers_of)
"""How rows of numbers are read. An array without a usual name is used if no other array has two or more axes."""
