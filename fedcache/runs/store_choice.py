"""Which store a run trains on: what is complete, what is unfinished, what is only a part, and what is not there yet."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcache.config import ExtractConfig, Home, TrainConfig
from fedcache.errors import StoreError
from fedcache.extract import backbones as registry
from fedcache.extract import datasets
from fedcache.extract.extract_dataset import extract as run_extract
from fedcache.extract.planning.command_lines import UnfinishedArray, extract_command, unfinished_arrays_of
from fedcache.extract.planning.find_store import find_store, no_store_remembered
from fedcache.extract.planning.plan import memory_of, plan, roots_of
from fedcache.progress import Observer
from fedcache.runs.arrays import recipe_options, to_extract, wants_encoders
from fedcache.store.catalog import is_ingested
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.extract.stop import Stop
    from fedcache.federate.engine.method import Method


def needed_arrays(
    method: Method, store: Store, names: Sequence[str], begun: Sequence[UnfinishedArray], home: Home
) -> list[str]:
    """Keys of the unfinished arrays without which the run has not what it was asked to train on."""
    complete = {k: a for k, a in store.arrays.items() if a.dtype != "uint8"}
    if names:
        have = set(complete)
        for a in complete.values():
            have |= {str(a.recipe.get("backbone")), f"{a.recipe.get('backbone')}@{a.recipe.get('size', 0)}"}
        return [u.key for u in begun if any(u.means(name) for name in names if name not in have)]
    if "text" in method.needs or wants_encoders(method):
        if any(store.has_text(str(a.recipe.get("backbone"))) for a in complete.values()):
            return []
        return [u.key for u in begun if u.order and registry.lookup(u.backbone, home=home.root).text_width is not None]
    return [] if complete else [u.key for u in begun]


def complete_array(
    array: UnfinishedArray, store: Store, home: Home, *, extract: bool, observer: Observer, stop: Stop | None
) -> None:
    """Compute the missing chunks of an array.

    Raises:
        StoreError with the command, when ``extract`` is False, or this home does not know how the array was
            ordered, or would compute another one now; as ``extract``.
    """
    state = array.state(store)
    if array.order is None or not extract:
        raise StoreError(f"{state}.", array.command(store, home))
    (planned, *_), _ = plan(array.order, home, observer)
    if planned.recipe.key != array.key:
        raise StoreError(
            f"{state}, and {array.backbone} gives {planned.recipe.key} now: its weights are others.",
            f"With the weights it was begun with:  {array.command(store, home)} --weights {array.backbone}=FILE",
        )
    observer.note(f"{state}: computing them first (--no-extract forbids).")
    run_extract(array.order, home, store=store.path, observer=observer, stop=stop, keep_text=True)


def refuse_partial_store(home: Home, dataset: str, names: Sequence[str]) -> None:
    """Refuse to extract all of a dataset for a run when a part of it (``--limit``) is extracted: it may take hours.

    Raises:
        StoreError, naming the parts and both ways on.
    """
    memory = memory_of(home)
    whole = datasets.peek(dataset, memory=memory, roots=roots_of(ExtractConfig(), home), data=home.data)
    parts = []
    for path in sorted(home.stores.glob("*.zarr")) if whole is not None else []:
        assert whole is not None
        size = path.name.removeprefix(f"{whole[0]}-").partition("-")[0]
        fact = memory.recall(["limited", whole[1], int(size)]) if size.isdecimal() else None
        if isinstance(fact, list) and path == home.store(*fact):
            parts.append(Store.open(path))
    if parts:
        held = {str(a.recipe.get("backbone")) for a in parts[0].arrays.values()}
        wanted = ",".join(names or sorted(held)) or "efficientnet-lite0"
        raise StoreError(
            f"Only a part of {dataset} is extracted: "
            + ", ".join(f"{p.dataset['slug']} ({p.rows:,} images)" for p in parts)
            + ".",
            f"To train on the part: --store {parts[0].path} instead of --dataset {dataset}\n"
            f"To extract all of it: fedcache extract --dataset {shlex.quote(dataset)} --backbones {wanted}",
        )


def find_or_extract(
    method: Method, train: TrainConfig, home: Home, *, extract: bool, observer: Observer, stop: Stop | None = None
) -> tuple[Store, float]:
    """The store to train on, and the seconds of the extraction that was run for it.

    With nothing extracted yet, the extraction the method needs is run first; an unfinished array the run needs is
    completed, one it does not need is left out with a warning.

    Raises:
        StoreError, with the command, for what is missing and may not be extracted; as ``extract``.
    """
    store = find_store(home, path=Path(train.store) if train.store else None, dataset=train.dataset, observer=observer)
    needs_text = "text" in method.needs or wants_encoders(method)
    began = time.perf_counter()
    spent = 0.0
    if store is not None:
        begun = unfinished_arrays_of(store, home)
        keys = needed_arrays(method, store, train.backbones, begun, home)
        for array in begun:
            if array.key in keys:
                complete_array(array, store, home, extract=extract, observer=observer, stop=stop)
            else:
                observer.warn(f"{array.state(store)}; left out. To complete it: {array.command(store, home)}")
        if keys:
            store.refresh()
            spent = time.perf_counter() - began
        if store.arrays and (train.dataset is None or _has(store, train.backbones)):
            return store, spent
        if is_ingested(store):
            return store, spent  # embeddings: there are no images to extract more from
    backbones = train.backbones or (("glyph-clip",) if needs_text else ("efficientnet-lite0",))
    backbones, recipe = to_extract(method, backbones, home)
    more = f"--backbones {','.join(backbones)}{recipe_options(recipe)}"
    dataset = train.dataset or "digits"
    if store is None and train.dataset is not None:
        refuse_partial_store(home, train.dataset, train.backbones)
    if store is not None and train.dataset is None:
        raise StoreError(
            f"{store.path} holds no features that {method.name} could train on yet.",
            extract_command(store, backbones, recipe, home),
        )
    others = no_store_remembered(home) if train.dataset is None else None
    if not extract:
        raise others or StoreError(
            f"There are no features of {dataset} to train on yet.", f"fedcache extract --dataset {dataset} {more}"
        )
    why = f"{method.name} needs text features" if needs_text and not train.backbones else "the default"
    found = "No finished extraction is remembered" if others else "Nothing extracted yet"
    observer.note(f"{found}: extracting {', '.join(backbones)} ({why}) on {dataset} first (--no-extract forbids).")
    names = tuple(b.partition("@")[0] for b in backbones)
    done = run_extract(
        ExtractConfig(dataset=dataset, backbones=names, recipe=recipe),
        home,
        observer=observer,
        stop=stop,
        keep_text=True,  # what the user chose by extract --text stays
    )
    return done.store, time.perf_counter() - began


def _has(store: Store, names: Sequence[str]) -> bool:
    """Whether a store has an array of every name."""
    have = {str(a.recipe.get("backbone")) for a in store.arrays.values()} | set(store.arrays)
    return all(name.partition("@")[0] in have for name in names)
