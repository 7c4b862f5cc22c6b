"""In what single clients differ: ``--client-backbones``, ``--client-set``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedcache.config import Home, TrainConfig
from fedcache.errors import UsageError
from fedcache.extract.backbones import lookup
from fedcache.federate.engine.method import ClientOverrides, Method, check_mixed
from fedcache.runs.store_choice import chosen_arrays
from fedcache.store.store import Store


def named_backbones(train: TrainConfig) -> tuple[str, ...]:
    """The backbones of a run: ``--backbones``, else all that some client has."""
    return train.backbones or tuple(
        dict.fromkeys(name for entry in train.client_backbones for name in entry.split("+"))
    )


def check_named(train: TrainConfig, store: Store, home: Home) -> None:
    """Refuse a name of ``--client-backbones`` that is neither in the store nor any backbone at all.

    Raises UsageError with "did you mean".
    """
    have = {str(a.recipe.get("backbone", key)) for key, a in store.arrays.items()}
    for name in (name for entry in train.client_backbones for name in entry.split("+")):
        if name not in store.arrays and name.partition("@")[0] not in have:
            lookup(name.partition("@")[0], home=home.root)


def client_overrides(
    method: Method,
    train: TrainConfig,
    store: Store,
    keys: Sequence[str],
    widths: Sequence[int],
    clients: int,
) -> dict[int, ClientOverrides]:
    """In what each client differs: entry i of a list belongs to clients i, i + n, i + 2n, ..

    Raises UsageError for a backbone the run does not read, or a difference the method cannot bear.

    Args:
        method: which says what may differ.
        train: ``client_backbones``, entries like ``a`` or ``a+b``; ``client_set``, key to values.
        store: whose arrays the entries name.
        keys: arrays of the run, in the order they are concatenated.
        widths: of each.
        clients: their number.
    """
    stops = np.cumsum(widths)
    place = {
        key: (int(stop) - width, int(stop))
        for key, stop, width in zip(keys, stops, widths, strict=False)
    }
    columns = []
    for entry in train.client_backbones:
        chosen = chosen_arrays(store, entry.split("+"))
        other = [key for key in chosen if key not in place]
        if other:
            raise UsageError(
                f"--client-backbones names {other[0]}, which is not among the run's backbones.",
                "Leave --backbones out, or name all of them there.",
            )
        columns.append(tuple(place[key] for key in chosen))
    values: Mapping[str, list[str]] = {
        key: str(words).split(",") for key, words in train.client_set.items()
    }
    typed = {
        key: [method.hparam(key).parse(word) for word in words] for key, words in values.items()
    }
    own = {
        i: ClientOverrides(
            columns[i % len(columns)] if columns else (),
            {key: words[i % len(words)] for key, words in typed.items()},
        )
        for i in range(clients)
    }
    check_mixed(method, own, int(stops[-1]), clients)
    return own
