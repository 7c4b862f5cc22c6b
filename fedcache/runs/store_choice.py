"""Choice of a run's store and feature sets, with notes about unfinished, partial and missing ones."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedcache.config import ExtractConfig, Home, TrainConfig
from fedcache.errors import StoreError, UsageError, all_at_once, closest, shell_word
from fedcache.extract import backbones as registry
from fedcache.extract import datasets
from fedcache.extract.augment import described
from fedcache.extract.extract_dataset import extract as run_extract
from fedcache.extract.planning.find_store import (
    UnfinishedArray,
    extract_command,
    locate_store,
    more_features,
    no_store_remembered,
    store_of_dataset,
    unfinished_arrays_of,
)
from fedcache.extract.planning.plan import memory_of, plan
from fedcache.extract.recipe import OF_VIEWS, Recipe
from fedcache.federate.methods import wants_encoders
from fedcache.plugins import bare_name
from fedcache.progress import Detail, Observer
from fedcache.store.catalog import finished_stores, is_ingested
from fedcache.store.files import digest_of
from fedcache.store.manifest import TEXT_ORDER, ArrayInfo, match_arrays, names_of
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.federate.engine.hyperparameters import Hp
    from fedcache.federate.engine.method import Method
    from fedcache.process import Stop

INPUT = ("size", "resize", "interpolation", "crop_pct")
"""What determines an encoder's input image; normalisation happens after it."""


def chosen_arrays(store: Store, names: Sequence[str], *, pixels: bool = False) -> list[str]:
    """Array keys for ``--backbones``: the names given, or every array of features, in stored order.

    A name with several variants in the store is ambiguous; ``name@size`` or the array's own key chooses one, and of
    arrays that differ in their views alone ``name@size`` is the one without augmentations. Raises StoreError when the
    store lacks one; UsageError when a name means several.
    """
    info = {k: a for k, a in store.arrays.items() if pixels or a.dtype != "uint8"}
    if not info:
        problem = "has no features yet"
        if store.arrays:
            problem = "has the images themselves (pixels) and no features"
        raise StoreError(
            f"{store.path.name} {problem}.", more_features(store, "efficientnet-lite0")
        )
    if not names:
        by_name: dict[str, list[str]] = {}
        for key in info:
            by_name.setdefault(str(info[key].recipe.get("backbone", key)), []).append(key)
        return [chosen_arrays(store, [name])[0] for name in by_name]

    def key_of(name: str) -> str:
        labels = {k: names_of(k, a)[1:] for k, a in info.items()}
        found = _matching(info, name)
        if not found:
            have = ", ".join(both[1] for both in labels.values())
            raise StoreError(
                f"{store.path.name} has no features of {name!r}; it has {have}.",
                more_features(store, name.partition("@")[0]),
            )
        if len(found) > 1:
            # Keys are shown where two arrays have the same name and size.
            options = [labels[k][1] for k in found]
            if len(set(options)) < len(found):
                options = [f"{k} ({_difference(info[k])})" for k in found]
            raise UsageError(
                f"{name!r} matches {len(found)} feature sets of the store.",
                f"Choose with --backbones: {', '.join(options)}",
            )
        return found[0]

    return list(dict.fromkeys(all_at_once(partial(key_of, name) for name in names)))


def _matching(arrays: Mapping[str, ArrayInfo], name: str) -> list[str]:
    """Keys that a name may mean: of a sized one only the plain array, where the others have more views of the same."""
    found = match_arrays(arrays, name)
    plain = [key for key in found if arrays[key].shape[1] == 1]
    same = {
        digest_of({k: v for k, v in arrays[key].recipe.items() if k not in OF_VIEWS})
        for key in found
    }
    if "@" in name and len(plain) == len(same) == 1:
        return plain
    return found


def _difference(array: ArrayInfo) -> str:
    """Differences of arrays of one backbone and size in words: the width, and the views and their augmentation."""
    words = f"width {array.shape[-1]}"
    views = array.shape[1]
    if views != 1:
        words += f", {views} views by {described(array.recipe.get('augment', ''))}"
    return words


def array_name(store: Store, key: str) -> str:
    """The name of an array for ``--backbones`` that stays unambiguous when other sizes or views are extracted."""
    _, backbone, sized = names_of(key, store.arrays[key])
    if sized.endswith("@0"):  # an array that was ingested: nobody said what size its images had
        sized = backbone
    array = store.arrays[key]
    # none draws their views
    plain = array.shape[1] == 1 or array.dtype == "uint8" or "decoder" not in array.recipe
    if plain and _matching(store.arrays, sized) == [key]:
        return sized
    return key


def arrays_for(
    method: Method, hp: Hp, store: Store, names: Sequence[str], observer: Observer
) -> list[str]:
    """The arrays a method trains on: text methods take exactly one backbone with text, others concatenate.

    Raises StoreError for what the store lacks, with the command that makes it; UsageError for more than one.
    """
    # Methods that train an encoder read images; all others read features.
    if "pixels" in method.reads(hp) and not wants_encoders(method):
        return [image_array(method, store, names)]
    names = without_images(method, names)
    if "text" not in method.needs and not wants_encoders(method):
        keys = chosen_arrays(store, names)
        if not names:
            observer.note(
                Detail(
                    f"Backbones: {' + '.join(keys)} (all of the store; change with --backbones)."
                )
            )
        return keys
    # Methods with text read one backbone, whose text and image features belong together.
    with_text = [
        k
        for k in chosen_arrays(store, names)
        if store.has_text(str(store.arrays[k].recipe.get("backbone")))
    ]
    if not with_text:
        where = " + ".join(names) or store.path.name
        hint = "Text features describe classes, but this dataset has no classes: extract it with labels."
        if is_ingested(store) or store.samples.classes:
            hint = more_features(store, "glyph-clip", "text/NAME")
        raise StoreError(f"{method.name} needs text features, but {where} has none.", hint)
    if names and len(with_text) > 1:
        raise UsageError(
            f"{method.name} needs exactly one backbone with text features, got {len(with_text)}.",
            f"--backbones {shell_word(names[0])}",
        )
    # Of several, the usual order decides, unless the user named one.
    backbone = {str(store.arrays[k].recipe["backbone"]): k for k in with_text}
    first = next((backbone[n] for n in TEXT_ORDER if n in backbone), None)
    if first is None and len(with_text) > 1:
        example = shell_word(next(iter(backbone)))
        raise UsageError(
            f"Several backbones have text features: {', '.join(backbone)}.",
            f"--backbones {example}",
        )
    key = first or with_text[0]
    if not names:
        observer.note(
            Detail(
                f"Backbone: {key} ({method.name} uses one with text features; change with --backbones)."
            )
        )
    return [key]


def common_arrays(stores: Sequence[Store], config: TrainConfig, needs_text: bool) -> list[str]:
    """The arrays to train on; every client must have them, by the digest of their recipe."""
    first = stores[0]
    keys = chosen_arrays(first, config.backbones)
    # As for a single store, a method with text reads one backbone.
    if needs_text:
        keys = [k for k in keys if first.has_text(str(first.arrays[k].recipe.get("backbone")))][:1]
        if not keys:
            raise StoreError(
                f"{first.path.name} has no text features.",
                "Extract a backbone with text, then shard again.",
            )
    # The same name is not enough: other weights give other features.
    for store in stores:
        for key in keys:
            if key not in store.arrays or store.arrays[key].digest != first.arrays[key].digest:
                has = first.path.name
                raise StoreError(
                    f"{store.path.name} lacks {key}, which {has} has.",
                    "Shard again, so that all clients have the same features.",
                )
    return keys


def image_array(method: Method, store: Store, names: Sequence[str]) -> str:
    """The one array of images a method trains an encoder on: that of ``--backbones``, or the store's only one."""
    images = [k for k, a in store.arrays.items() if a.dtype == "uint8"]
    if not images:
        held = store.path.name
        raise StoreError(
            f"{method.name} trains on images, but {held} has none.",
            more_features(store, "pixels", recipe={"size": "32"}),
        )
    chosen = chosen_arrays(store, names or ("pixels",), pixels=True)
    if len(chosen) > 1 or chosen[0] not in images:
        named = ", ".join(chosen)
        raise UsageError(
            f"{method.name} trains on one set of images, got {named}.",
            f"--backbones {shell_word(images[0])}",
        )
    return chosen[0]


def images_for(store: Store, key: str) -> str:
    """The array of images that the backbone of array ``key`` takes as they are.

    Raises StoreError, with the command that makes them.
    """
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    found = {k: a.recipe for k, a in store.arrays.items() if a.dtype == "uint8"}
    for pixels, other in found.items():
        if all(other.get(k) == getattr(recipe, k) for k in INPUT):
            return pixels
    has = ", ".join([f"{r.get('backbone')}@{r.get('size')}" for r in found.values()]) or "none"
    taken = f"{recipe.size} px, {recipe.resize}"
    name = store.path.name
    raise StoreError(
        f"{name} has no images of the size that {recipe.backbone} needs ({taken}); it has {has}.",
        extract_command(store, ["pixels"], pixel_recipe(recipe)),
    )


def feat_post_for(
    hp: Hp,
    requested: bool,
    preset: str,
    store: Store,
    keys: Sequence[str],
    observer: Observer | None = None,
) -> str:
    """``feat_post`` of a run: the method's value, unless what is known of the backbones says better, which is said.

    Where it was not requested and the method does nothing, CLIP features go to the sphere (l2) when every backbone has
    a text tower, and the released FedPCL's ResNets give signs (D-01) under the official preset.
    """
    chosen = str(hp.get("feat_post") or "none")
    if requested or chosen != "none":
        return chosen
    names = [str(store.arrays[k].recipe.get("backbone")) for k in keys]
    if preset == "official" and all(n.startswith("resnet18-") for n in names):
        chosen = "sign"
    elif all(store.has_text(n) for n in names):
        chosen = "l2"
    if chosen != "none" and observer is not None:
        other = ""
        if "feat_post" in hp:
            other = " (--set feat_post=none leaves features as they are)"
        backbones = " + ".join(names)
        observer.note(Detail(f"feat_post: {chosen} (default for features of {backbones}{other})."))
    return chosen


def train_example(store: Store) -> str:
    """``--method NAME`` of one that can train on what a store holds, for messages."""
    only_images = store.arrays and all(a.dtype == "uint8" for a in store.arrays.values())
    if only_images:
        return "--method fedavg-scratch"
    return "--method fed3r"


def without_images(method: Method, names: Sequence[str]) -> Sequence[str]:
    """Names of ``--backbones`` without the images of an image tower, which may be named or not."""
    return tuple(
        n for n in names if "image tower" not in method.needs or n.partition("@")[0] != "pixels"
    )


def to_extract(
    method: Method, backbones: Sequence[str], home: Home
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Backbones and recipe options of the extraction a method needs: an image tower's images are stored as it reads
    them.
    """
    if "image tower" not in method.needs:
        if "pixels" in method.needs:
            return ("pixels",), {"size": "32"}
        return tuple(backbones), {}
    towers = tuple(without_images(method, backbones)) or ("glyph-clip",)
    recipe = registry.lookup(towers[0].partition("@")[0], home=home.root).recipe
    return (*towers, "pixels"), pixel_recipe(recipe)


def pixel_recipe(recipe: Recipe) -> dict[str, str]:
    """``--recipe`` options that store images as an encoder of this recipe takes them."""
    plain = registry.lookup("pixels").recipe
    return {
        f"pixels:{k}": str(getattr(recipe, k))
        for k in INPUT
        if getattr(recipe, k) != getattr(plain, k)
    }


def recipe_options(recipe: Mapping[str, str]) -> str:
    """`` --recipe key=value`` for each, as it is written after a command."""
    return "".join(f" --recipe {shell_word(f'{k}={v}')}" for k, v in recipe.items())


def needed_arrays(
    method: Method, store: Store, names: Sequence[str], begun: Sequence[UnfinishedArray], home: Home
) -> list[str]:
    """Keys of the unfinished arrays that the run needs."""
    complete = {k: a for k, a in store.arrays.items() if a.dtype != "uint8"}
    if names:
        # A backbone may be named alone or with its size; an array by its key.
        have = set(complete)
        for a in complete.values():
            name = str(a.recipe.get("backbone"))
            size = a.recipe.get("size", 0)
            have |= {name, f"{name}@{size}"}
        return [u.key for u in begun if any(u.means(name) for name in names if name not in have)]
    # Methods with text need a backbone with a text tower; any one will do.
    if "text" in method.needs or wants_encoders(method):
        if any(store.has_text(str(a.recipe.get("backbone"))) for a in complete.values()):
            return []
        return [
            u.key
            for u in begun
            if u.order and registry.lookup(u.backbone, home=home.root).text_width is not None
        ]
    if complete:
        return []
    return [u.key for u in begun]


def complete_array(
    array: UnfinishedArray,
    store: Store,
    home: Home,
    *,
    extract: bool,
    observer: Observer,
    stop: Stop | None,
) -> None:
    """Compute the missing chunks of an array.

    Raises StoreError with the command, when ``extract`` is False, or this home does not know how the array was ordered,
    or would compute another one now; as ``extract``.
    """
    state = array.state(store)
    command = array.command(store, home)
    if array.order is None or not extract:
        raise StoreError(f"{state}.", command)
    (planned, *_), _ = plan(array.order, home, observer)
    key = planned.recipe.key
    if key != array.key:
        weights = shell_word(array.backbone)
        raise StoreError(
            f"{state}, but {array.backbone} now gives {key}, because its weights changed.",
            f"To continue with the earlier weights:  {command} --weights {weights}=FILE",
        )
    observer.note(f"{state}. fedcache computes them first (--no-extract prevents this).")
    run_extract(array.order, home, store=store.path, observer=observer, stop=stop, keep_text=True)


def refuse_partial_store(home: Home, dataset: str, names: Sequence[str]) -> None:
    """Refuse to extract all of a dataset for a run when a part of it (``--limit``) is extracted: it may take hours.

    Raises StoreError, naming the parts and both ways on.
    """
    memory = memory_of(home)
    whole = datasets.peek(dataset, datasets.Context(memory, data=home.data))
    if whole is None:
        return
    parts = []
    # Stores with --limit have the number of images in their name; the home remembers which are such.
    for path in sorted(home.stores.glob("*.zarr")):
        size = path.name.removeprefix(f"{whole[0]}-").partition("-")[0]
        fact = None
        if size.isdecimal():
            fact = memory.recall(["limited", whole[1], int(size)])
        if isinstance(fact, list) and path == home.store(*fact):
            parts.append(Store.open(path))
    if parts:
        held = {str(a.recipe.get("backbone")) for a in parts[0].arrays.values()}
        example = ",".join(names or sorted(held)) or "efficientnet-lite0"
        listed = []
        for part in parts:
            slug = part.dataset["slug"]
            listed.append(f"{slug} ({part.rows:,} images)")
        first = shell_word(parts[0].dataset["slug"])
        raise StoreError(
            f"Only a part of {dataset} is extracted: {', '.join(listed)}.",
            f"To train on the part: --dataset {first}\n"
            f"To extract all of it: fedcache extract --dataset {shell_word(dataset)} --backbones {shell_word(example)}",
        )


def find_or_extract(
    method: Method,
    train: TrainConfig,
    home: Home,
    *,
    extract: bool,
    observer: Observer,
    stop: Stop | None = None,
) -> tuple[Store, float]:
    """The store to train on, and the seconds of the extraction that was run for it.

    With nothing extracted yet, the packaged digits are extracted, or a dataset and backbones that are both named. An
    unfinished array the run needs is completed, one it does not need is left out with a warning.

    Raises StoreError, with the command, for what is missing and may not be extracted; as ``extract``.
    """
    path = locate_store(home, path=train.store, dataset=train.dataset, observer=observer)
    store = None
    if path is not None:
        store = Store.open(path)
    needs_text = "text" in method.needs or wants_encoders(method)
    began = time.perf_counter()
    spent = 0.0
    if store is not None:
        begun = unfinished_arrays_of(store, home)
        keys = needed_arrays(method, store, train.backbones, begun, home)
        for array in begun:
            if array.key in keys:
                complete_array(array, store, home, extract=extract, observer=observer, stop=stop)
            elif not train.backbones:  # anyone who names some is not told of others
                command = array.command(store, home)
                observer.warn(
                    f"{array.state(store)}and is left out (to delete it: `fedcache gc --days 0`). To "
                    f"complete it: {command}"
                )
        if keys:
            store.refresh()
            spent = time.perf_counter() - began
        have = {str(a.recipe.get("backbone")) for a in store.arrays.values()} | set(store.arrays)
        has_all = all(
            {n.partition("@")[0] for n in (name, bare_name(name))} & have
            for name in train.backbones
        )
        if store.arrays and (train.dataset is None or has_all):
            return store, spent
        if is_ingested(store):
            return store, spent  # embeddings: there are no images to extract more from
    # Nothing to train on yet. The packaged digits take seconds; other images are extracted if backbones are named.
    packaged = train.dataset in (None, "digits")
    backbones: Sequence[str] = train.backbones
    if not backbones:
        backbones = ("efficientnet-lite0",)
        if needs_text or packaged:
            backbones = ("glyph-clip",)
    backbones, recipe = to_extract(method, backbones, home)
    dataset = train.dataset or "digits"
    words = ["--dataset", dataset, "--backbones", ",".join(backbones)]
    making = shlex.join(["fedcache", "extract", *words]) + recipe_options(recipe)
    if store is None and train.dataset is not None:
        refuse_partial_store(home, train.dataset, train.backbones)
    if store is not None and (
        train.dataset is None or store_of_dataset(home, train.dataset) is not None
    ):
        raise StoreError(
            f"{store.path} has no features yet that {method.name} can train on.",
            extract_command(store, backbones, recipe, home),
        )
    others = None
    if train.dataset is None:
        others = no_store_remembered(home)
    if others is not None and finished_stores(home):
        raise others  # something was extracted: to train on digits in its place would be another run
    if not extract or not (packaged or train.backbones):
        raise others or StoreError(f"The dataset {dataset} has no features yet.", making)
    if store is None and train.partition is not None and not Path(train.partition).exists():
        name = train.partition.partition("@")[0]  # said now, and not after the extraction
        raise StoreError(
            f"There is no partition {name!r}, because the dataset {dataset} has no features yet.",
            f"{making}, then  fedcache partition --name {shell_word(name)}",
        )
    why = "the default"
    if needs_text and not train.backbones:
        why = f"{method.name} needs text features"
    found = "Nothing extracted yet"
    if others:
        found = "There is no finished extraction"
    named_backbones = ", ".join(backbones)
    observer.note(
        f"{found}: extracting {named_backbones} ({why}) on {dataset} first (--no-extract prevents this)."
    )
    names = tuple(b.partition("@")[0] for b in backbones)
    done = run_extract(
        ExtractConfig(dataset=dataset, backbones=names, recipe=recipe),
        home,
        observer=observer,
        stop=stop,
        keep_text=True,  # what the user chose by extract --text stays
    )
    return done.store, time.perf_counter() - began


# ``--clients-from DIR``: the stores of a directory, one for each client.


def check_client_folder(folder: Path) -> None:
    """Refuse what is no directory, with the name of one that is meant. Raises StoreError."""
    if not folder.is_dir():
        beside = []
        if folder.parent.is_dir():
            beside = [p.name for p in folder.parent.iterdir() if p.is_dir()]
        message = f"There is no directory {folder}."
        if near := closest(folder.name, beside):
            message += f" Did you mean {near!r}?"
        raise StoreError(
            message, "fedcache shard --partition NAME --out DIR   makes client stores."
        )


def open_clients(folder: Path) -> list[Store]:
    """The stores of a directory in client order.

    Raises StoreError, when there are none, or they are not shards of one dataset with the same classes.
    """
    check_client_folder(folder)
    paths = sorted(folder.glob("*.zarr"))
    if not paths:
        raise StoreError(
            f"{folder} contains no client stores.",
            "fedcache shard --partition NAME --out DIR   makes them.",
        )
    stores = [Store.open(p) for p in paths]
    for store in stores:
        if "shard" not in store.dataset:
            raise StoreError(
                f"{store.path} is not a client store.",
                "fedcache shard --partition NAME --out DIR",
            )
    # Clients are numbered as in the partition, whatever order the files have.
    stores.sort(key=lambda s: int(s.dataset["shard"]["number"]))
    first = stores[0]
    numbers = [int(s.dataset["shard"]["number"]) for s in stores]
    names = [str(s.dataset["shard"]["client"]) for s in stores]
    for what, keys in (("number", [str(n) for n in numbers]), ("name", names)):
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            same = [str(s.path) for s, key in zip(stores, keys, strict=True) if key == twice]
            paths_of_twins = ", ".join(same)
            raise StoreError(
                f"{len(same)} stores belong to the same client, with the {what} {twice}: {paths_of_twins}.",
                "Keep one of them, and remove or move the others.",
            )
    # A client that is missing would train another federation without saying so.
    last = max(numbers)
    gone = sorted(set(range(last + 1)) - set(numbers))
    if gone:
        first_lost = gone[0]
        raise StoreError(
            f"{folder} lacks client {first_lost}: it has {len(stores)} stores, numbered up to {last}.",
            "fedcache shard --partition NAME --out DIR   writes what is missing.",
        )
    # Labels and rows are numbers in the parent: all stores must mean the same by them.
    for store in stores[1:]:
        for what, a, b in (
            ("parent dataset", first.dataset["shard"]["parent"], store.dataset["shard"]["parent"]),
            ("classes", first.samples.classes, store.samples.classes),
        ):
            if a != b:
                names_of_both = f"{store.path.name} and {first.path.name}"
                raise StoreError(
                    f"{names_of_both} differ in {what}.",
                    "Make all client stores from one store, with one partition.",
                )
    return stores
