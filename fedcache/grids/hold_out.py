"""``--hold-out each``: every value of a column is held out in turn, one point of a grid for each."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedcache.config import Home, TrainConfig
from fedcache.errors import UsageError
from fedcache.extract.planning.find_store import need_store
from fedcache.store.groups import column_of

EACH = "each"
MOST = 50
"""Values of a column that are held out in turn without being named: each is a point of every method and setting."""


def every_value(by: str, config: TrainConfig, home: Home) -> tuple[str, ...]:
    """The values of a column of the store that is meant; of domains, those that are chosen.

    Raises UsageError for a column with one value, or with more than ``MOST``; StoreError where nothing is extracted.
    """
    path = None if config.store is None else Path(config.store)
    words: tuple[str, ...] = column_of(need_store(home, path=path, dataset=config.dataset), by).words
    if by == "domain" and config.domain:
        words = tuple(word for word in words if word in config.domain)
    if len(words) < 2:
        raise UsageError(
            f"--hold-out each: the column {by} has one value, {', '.join(words)}, so nobody is left to train.",
            "Another column:  --by COLUMN   (fedcache inspect shows them)",
        )
    if len(words) > MOST:
        some = ",".join([word for word in words if "," not in word][:2]) or "VALUE,VALUE"
        raise UsageError(
            f"--hold-out each: the column {by} has {len(words):,} values, and each would be held out in a run of its "
            f"own; more than {MOST} are not meant by a single word.",
            f"Name those that are to be held out in turn:  --by {by} --sweep {shlex.quote(f'hold_out={some}')}",
        )
    return words
