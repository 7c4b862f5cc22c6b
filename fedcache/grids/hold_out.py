"""``--hold-out each``: every value of a column is held out in turn, one point of a grid for each."""

from __future__ import annotations

from pathlib import Path

from fedcache.config import Home, TrainConfig
from fedcache.errors import UsageError
from fedcache.extract.planning.find_store import need_store
from fedcache.store.groups import column_of

EACH = "each"


def every_value(by: str, config: TrainConfig, home: Home) -> tuple[str, ...]:
    """The values of a column of the store that is meant; of domains, those that are chosen.

    Raises UsageError for a column with one value; StoreError where nothing is extracted.
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
    return words
