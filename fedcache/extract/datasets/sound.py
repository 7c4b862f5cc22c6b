"""``sound:PATH``: WAV and FLAC files in a directory, a .zip or a .tar, one folder per class (extra ``sound``).

Folders, ``metadata.csv``, lists, splits and ``--layout`` have the same meaning as for ``folder:PATH``. A file that
cannot be decoded keeps its row, and the extraction quarantines it. A sound is identified by the bytes of its file.
"""

from __future__ import annotations

from typing import Any

from fedcache.extract.datasets import folder
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.extract.recipe import SOUNDS
from fedcache.extract.sounds import need_soundfile

HOLDS = SOUNDS


def key(rest: str, context: Context) -> list[Any]:
    """The facts that ``folder:PATH`` has, marked as those of sounds."""
    return ["sound", *folder.key(rest, context)]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``sound:PATH``; errors as of ``folder:PATH``, and MachineError without the library."""
    need_soundfile()
    return folder.load_files(rest, context, SOUNDS)
