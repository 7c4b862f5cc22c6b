"""``--hold-out each``: every value of a column is held out in turn, one point of a grid for each."""

from __future__ import annotations

import numpy as np

from fedcache.config import Home, TrainConfig
from fedcache.errors import UsageError, shell_word
from fedcache.extract.planning.find_store import need_store
from fedcache.progress import Observer
from fedcache.store.store import column_of

EACH = "each"
MOST = 50
"""Values of a column that are held out in turn without being named: each is a point of every method and setting."""

NAMED = 10
"""Values that are named in a message."""


def every_value(
    by: str,
    config: TrainConfig,
    home: Home,
    *,
    min_rows: object = 1,
    observer: Observer | None = None,
) -> tuple[str, ...]:
    """The values of a column of the store that is meant; of domains, those that are chosen.

    A value with less than ``min_rows`` rows is not held out, which the observer is told. Raises UsageError for a column
    with one such value, or with more than ``MOST``; StoreError where nothing is extracted.
    """
    store = need_store(home, path=config.store, dataset=config.dataset)
    column = column_of(store, by)
    words: tuple[str, ...] = column.words
    if by == "domain" and config.domain:
        words = tuple(word for word in words if word in config.domain)
    if len(words) < 2:
        raise UsageError(
            f"--hold-out each: the column {by} has one value, {', '.join(words)}, so nobody is left to train.",
            "Another column:  --by COLUMN   (`fedcache inspect` shows them)",
        )
    # another value is refused when rows are dealt
    if str(min_rows).isdigit() and (least := int(str(min_rows))) > 1:
        codes = column.codes[store.column("ok") == 1]
        counts = np.bincount(codes[codes >= 0], minlength=len(column.words))
        rows = dict(zip(column.words, counts.tolist(), strict=True))
        words, small = (
            tuple(w for w in words if (rows[w] >= least) is enough) for enough in (True, False)
        )
        if len(words) < 2:
            second = sorted((rows[word] for word in (*words, *small)), reverse=True)[1]
            raise UsageError(
                f"--hold-out each: two values of {by} are needed that have {least:,} rows or more, and there are "
                f"{len(words)}.",
                f"--min-rows {second}",
            )
        if small and observer is not None:
            more = ""
            if len(small) > NAMED:
                more = f" and {len(small) - NAMED:,} more"
            observer.note(
                f"Less than {least:,} rows, and so not held out: {', '.join(small[:NAMED])}{more}."
            )
    if len(words) > MOST:
        some = ",".join([word for word in words if "," not in word][:2]) or "VALUE,VALUE"
        raise UsageError(
            f"--hold-out each: the column {by} has {len(words):,} values, and each would be held out in a run of its "
            f"own; more than {MOST} are not meant by a single word.",
            "Name those that are to be held out in turn:  "
            f"--by {shell_word(by)} --sweep {shell_word(f'hold_out={some}')}",
        )
    return words
