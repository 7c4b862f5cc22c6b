"""The keywords of the Python API as configurations: checked by name, and without those that were not given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fedcache.config import Home, TrainConfig, resolve
from fedcache.errors import UsageError, unknown

if TYPE_CHECKING:
    from fedcache.federate.partition.partition import Partition
    from fedcache.store.store import Store

    AnyStore = Store | str | Path

P = ParamSpec("P")
R = TypeVar("R")


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse a misspelt keyword with "did you mean"; ``lift`` is the former name of ``execution``."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        words: dict[str, Any] = given
        if "lift" in words and "execution" in known:
            words["execution"] = words.pop("lift")
        for name in words:
            if name not in known:
                raise unknown("option", name, known)
        return function(*args, **given)

    return checked


def fields_of(config: type, given: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Those of some keywords that are fields of a configuration and were given, as its values.

    Args:
        config: the dataclass.
        given: keywords.
        strict: whether others are refused.

    Raises:
        UsageError, for another keyword under ``strict``.
    """
    known: Mapping[str, Any] = config.__dataclass_fields__  # type: ignore[attr-defined]
    given = {"lift" if name == "execution" else name: value for name, value in given.items()}
    if strict and (wrong := [name for name in given if name not in known]):
        raise unknown("option", wrong[0], known)
    made = {name: given[name] for name in known if name not in ("method", "store", "seeds", "set") and name in given}
    # A template holds commas, so a text is one value; lists of names may be written with commas.
    made["text"] = (made["text"],) if isinstance(made.get("text"), str) else made.get("text")
    made = {k: str(v) if isinstance(v, Path) else tuple(v) if isinstance(v, list) else v for k, v in made.items()}
    return {k: v for k, v in made.items() if v is not None}


def opened(store: AnyStore | None) -> Store:
    """A store, also by its path; None is the one last used."""
    if store is not None and not isinstance(store, str | Path):
        return store
    from fedcache.extract.planning.find_store import need_store

    return need_store(Home.from_environment(), path=Path(store) if store is not None else None)


def train_config(
    store: AnyStore | None,
    parts: Partition | str | None,
    seeds: int | Iterable[int],
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> TrainConfig:
    """The configuration of ``train``; a partition that the store does not hold is saved in it."""
    chosen = (seeds,) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:
        raise UsageError("seeds is empty.", "For example seeds=range(3)")
    path = store if store is None or isinstance(store, str | Path) else store.path
    flags: dict[str, Any] = {
        **given,
        "seeds": ",".join(map(str, chosen)),
        "set": dict(settings or {}),
        "store": str(path) if path is not None else None,
    }
    if isinstance(parts, str):
        flags["partition"] = parts
    elif parts is not None:
        held = opened(store)
        name = parts.default_name()
        if name not in held.partitions or held.partition(name).get("digest") != parts.digest:
            name = f"{name}-{parts.digest[:8]}"
            held.put_partition(name, parts.to_payload())
        flags["partition"] = name
    return resolve(TrainConfig, {}, flags, "train()")
