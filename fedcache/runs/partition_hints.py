"""Hints that hold a command for the store that the user named, and not for the one last used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedcache.errors import FedcacheError, shell_word

_DEALS = re.compile(r"fedcache partition(?= --(?!help))")


@contextmanager
def hints_name_the_store(*, dataset: str | None, store: str | Path | None) -> Iterator[None]:
    """What is raised inside is raised on, its commands ``fedcache partition`` with the option that was given.

    Args:
        dataset: of ``--dataset``; None where it was not given.
        store: of ``--store``, likewise.
    """
    try:
        yield
    except FedcacheError as error:
        given = {"--dataset": dataset, "--store": None if store is None else str(store)}
        words = [
            word for option, value in given.items() if value is not None for word in (option, value)
        ]
        command = " ".join(["fedcache partition", *map(shell_word, words)])
        error.hint = _DEALS.sub(lambda _: command, error.hint)
        raise
