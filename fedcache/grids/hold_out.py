"""``--hold-out each``: every value of a column is held out in turn, one point of a grid for each."""

from __future__ import annotations

import numpy as np

from fedcache.config import Home, TrainConfig
from fedcache.errors import UsageError, shell_word, unknown
from fedcache.extract.planning.find_store import need_store
from fedcache.parsing import in_a_list, whole_number
from fedcache.progress import Observer
from fedcache.store.store import column_of

EACH = "each"
MOST = 50
"""Maximum number of values that ``--hold-out each`` holds out: each value is one more run of every configuration."""

NAMED = 10
"""Maximum number of values that a message lists."""


def every_value(
    by: str,
    config: TrainConfig,
    home: Home,
    *,
    min_rows: object = 1,
    observer: Observer | None = None,
) -> tuple[str, ...]:
    """The values of a column of the run's store; for the column ``domain`` only the chosen domains.

    A value with fewer than ``min_rows`` rows is not held out, and the observer gets a note. Raises UsageError for a
    column with fewer than two values to hold out, or with more than ``MOST``; StoreError without an extracted store.
    """
    store = need_store(home, path=config.store, dataset=config.dataset)
    column = column_of(store, by)
    words = column.words
    if by == "domain" and config.domain:
        for name in config.domain:
            if name not in words:
                raise unknown("domain", name, words)
        words = tuple(word for word in words if word in config.domain)
    if len(words) < 2:
        raise UsageError(
            f"--hold-out each: the column {by} has only one value, {', '.join(words)}, so no client is "
            "left to train.",
            "Use another column:  --by COLUMN   (`fedcache inspect` lists the columns)",
        )
    # A ``min_rows`` that is not a whole number is rejected later, by the partition.
    least = whole_number(str(min_rows)) or 0
    if least > 1:
        # Readable rows (``ok``) that have a value (codes of other rows are negative).
        codes = column.codes[store.column("ok") == 1]
        counts = np.bincount(codes[codes >= 0], minlength=len(column.words))
        rows_of = dict(zip(column.words, counts.tolist(), strict=True))
        all_words = words
        words = tuple(word for word in all_words if rows_of[word] >= least)
        if len(words) < 2:
            # At least two values have as many rows as the second largest number of rows.
            second = sorted((rows_of[word] for word in all_words), reverse=True)[1]
            raise UsageError(
                f"--hold-out each needs at least two values of {by} with {least:,} rows or more, but there are only "
                f"{len(words)} such values.",
                f"--min-rows {second}",
            )
        small = [word for word in all_words if rows_of[word] < least]
        if small and observer is not None:
            names = ", ".join(small[:NAMED])
            if len(small) > NAMED:
                names += f" and {len(small) - NAMED:,} more"
            observer.note(f"Not held out, because they have fewer than {least:,} rows: {names}.")
    if len(words) > MOST:
        sweep = shell_word(f"hold_out={in_a_list(words[:2])}")
        raise UsageError(
            f"--hold-out each trains one run per value, and the column {by} has {len(words):,} values. For more than "
            f"{MOST} values, you must name the values to hold out.",
            f"Name the values:  --by {shell_word(by)} --sweep {sweep}",
        )
    return words
