"""Choice of a run's store and feature sets, with notes about unfinished, partial and missing ones."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedcache.config import ExtractConfig, Home, TrainConfig, option_words
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
"""Fields of a recipe that determine the input image of an encoder before it is normalised."""


def needs_text(method: Method) -> bool:
    """Whether a method reads text features or runs live encoders; both need one backbone with a text encoder."""
    return "text" in method.needs or wants_encoders(method)


def backbones_of(store: Store, keys: Iterable[str]) -> tuple[str, ...]:
    """Names of the backbones that made some arrays of a store; the key of an array without a backbone."""
    arrays = store.arrays
    return tuple(str(arrays[key].recipe.get("backbone", key)) for key in keys)


def _backbone_of(array: ArrayInfo) -> str:
    """The backbone that made an array; "None" for an array without one."""
    return str(array.recipe.get("backbone"))


def _with_text(store: Store, keys: Iterable[str]) -> list[str]:
    """The arrays among ``keys`` whose backbone has text features in the store."""
    arrays = store.arrays
    return [key for key in keys if store.has_text(_backbone_of(arrays[key]))]


def chosen_arrays(store: Store, names: Sequence[str], *, pixels: bool = False) -> list[str]:
    """Array keys for ``--backbones``: the given names, or one array of every backbone, in stored order.

    A name with several variants in the store is ambiguous; ``name@size`` or the array's own key selects one. If arrays
    differ only in their views, ``name@size`` is the one without augmentations. Raises StoreError if the store lacks a
    name; UsageError if a name is ambiguous.
    """
    info = {key: array for key, array in store.arrays.items() if pixels or array.dtype != "uint8"}
    if not info:
        problem = "has no features yet"
        if store.arrays:
            problem = "has images (pixels) but no features"
        raise StoreError(
            f"{store.path.name} {problem}.", more_features(store, "efficientnet-lite0")
        )
    if not names:
        backbones = dict.fromkeys(backbones_of(store, info))
        return [chosen_arrays(store, [name])[0] for name in backbones]
    sized = {key: names_of(key, array)[2] for key, array in info.items()}

    def key_of(name: str) -> str:
        matches = _matching(info, name)
        if not matches:
            have = ", ".join(sized.values())
            place = store.address or store.path.name
            raise StoreError(
                f"{place} has no features of {name!r}; it has {have}.",
                more_features(store, name.partition("@")[0]),
            )
        if len(matches) > 1:
            # Keys are shown if two arrays have the same name and size.
            options = [sized[key] for key in matches]
            if len(set(options)) < len(matches):
                options = [f"{key} ({_difference(info[key])})" for key in matches]
            listed = ", ".join(options)
            raise UsageError(
                f"{name!r} matches {len(matches)} feature sets of the store.",
                f"Choose with --backbones: {listed}",
            )
        return matches[0]

    keys = all_at_once(partial(key_of, name) for name in names)
    return list(dict.fromkeys(keys))


def _matching(arrays: Mapping[str, ArrayInfo], name: str) -> list[str]:
    """Keys of the arrays that a name may mean.

    If the name has a size and the arrays differ only in their views, only the one without augmentations is meant.
    """
    matches = match_arrays(arrays, name)
    plain = [key for key in matches if arrays[key].shape[1] == 1]
    digests = set()  # of the recipes without their fields about views
    for key in matches:
        recipe = arrays[key].recipe
        of_one_view = {option: value for option, value in recipe.items() if option not in OF_VIEWS}
        digests.add(digest_of(of_one_view))
    if "@" in name and len(plain) == len(digests) == 1:
        return plain
    return matches


def _difference(array: ArrayInfo) -> str:
    """Words that distinguish arrays of one backbone and size: the width, and the views and their augmentation."""
    words = f"width {array.shape[-1]}"
    views = array.shape[1]
    if views != 1:
        words += f", {views} views by {described(array.recipe.get('augment', ''))}"
    return words


def array_name(store: Store, key: str) -> str:
    """The name of an array for ``--backbones`` that stays unambiguous when other sizes or views are extracted."""
    array = store.arrays[key]
    _, backbone, sized = names_of(key, array)
    if sized.endswith("@0"):  # an ingested array, whose image size is not known
        sized = backbone
    # fedcache drew no views for an array with one view, for images, and for ingested arrays, which have no decoder.
    plain = array.shape[1] == 1 or array.dtype == "uint8" or "decoder" not in array.recipe
    if plain and _matching(store.arrays, sized) == [key]:
        return sized
    return key


def arrays_for(
    method: Method, hp: Hp, store: Store, names: Sequence[str], observer: Observer
) -> list[str]:
    """The arrays a method trains on: exactly one with text features for a text method, one or more for others.

    Raises StoreError if the store lacks an array, with the command that makes it; UsageError if a text method has
    several.
    """
    # Methods that train an encoder read images; all others read features.
    if "pixels" in method.reads(hp) and not wants_encoders(method):
        return [image_array(method, store, names)]
    names = without_images(method, names)
    keys = chosen_arrays(store, names)
    if not needs_text(method):
        if not names:
            listed = " + ".join(keys)
            observer.note(
                Detail(f"Backbones: {listed} (all of the store; change with --backbones).")
            )
        return keys
    # Methods with text read one backbone, whose text and image features belong together.
    with_text = _with_text(store, keys)
    if not with_text:
        where = " + ".join(names) or store.path.name
        hint = (
            "Text features are computed from class names, but this dataset has no classes. Extract the dataset with "
            "labels."
        )
        if is_ingested(store) or store.samples.classes:
            hint = more_features(store, "glyph-clip", "text/NAME")
        raise StoreError(f"{method.name} needs text features, but {where} has none.", hint)
    if names and len(with_text) > 1:
        raise UsageError(
            f"{method.name} needs exactly one backbone with text features, got {len(with_text)}.",
            f"--backbones {shell_word(names[0])}",
        )
    # If there are several, ``TEXT_ORDER`` decides.
    key_by_backbone = dict(zip(backbones_of(store, with_text), with_text, strict=True))
    first = next((key_by_backbone[name] for name in TEXT_ORDER if name in key_by_backbone), None)
    if first is None and len(with_text) > 1:
        example = shell_word(next(iter(key_by_backbone)))
        listed = ", ".join(key_by_backbone)
        raise UsageError(
            f"Several backbones have text features: {listed}.",
            f"--backbones {example}",
        )
    key = first or with_text[0]
    if not names:
        observer.note(
            Detail(
                f"Backbone: {key} ({method.name} uses one backbone with text features; change with "
                "--backbones)."
            )
        )
    return [key]


def common_arrays(stores: Sequence[Store], config: TrainConfig, reads_text: bool) -> list[str]:
    """The arrays to train on; every client must have them with the same digest of their recipe."""
    first = stores[0]
    keys = chosen_arrays(first, config.backbones)
    # As for a single store, a method with text reads one backbone.
    if reads_text:
        keys = _with_text(first, keys)[:1]
        if not keys:
            raise StoreError(
                f"{first.path.name} has no text features.",
                "Extract a backbone with text features, then run `fedcache shard` again.",
            )
    # The same name is not enough, because other weights make other features.
    for store in stores:
        for key in keys:
            if key not in store.arrays or store.arrays[key].digest != first.arrays[key].digest:
                first_name = first.path.name
                raise StoreError(
                    f"{store.path.name} has no features {key}, but {first_name} has them.",
                    "Run `fedcache shard` again, so that all clients have the same features.",
                )
    return keys


def image_array(method: Method, store: Store, names: Sequence[str]) -> str:
    """The one array of images a method trains an encoder on: that of ``--backbones``, or the store's only one."""
    images = [key for key, array in store.arrays.items() if array.dtype == "uint8"]
    if not images:
        store_name = store.path.name
        raise StoreError(
            f"{method.name} trains on images, but {store_name} has none.",
            more_features(store, "pixels", recipe={"size": "32"}),
        )
    chosen = chosen_arrays(store, names or ("pixels",), pixels=True)
    if len(chosen) > 1 or chosen[0] not in images:
        named = ", ".join(chosen)
        raise UsageError(
            f"{method.name} trains on exactly one feature set of images, got {named}.",
            f"--backbones {shell_word(images[0])}",
        )
    return chosen[0]


def images_for(store: Store, key: str) -> str:
    """The array of images that the backbone of array ``key`` can read without resizing them.

    Raises StoreError, with the command that makes them.
    """
    recipe = Recipe.from_dict(store.arrays[key].recipe)
    images = {key: array.recipe for key, array in store.arrays.items() if array.dtype == "uint8"}
    for pixels, stored in images.items():
        if all(stored.get(option) == getattr(recipe, option) for option in INPUT):
            return pixels
    sizes = [f"{stored.get('backbone')}@{stored.get('size')}" for stored in images.values()]
    has = ", ".join(sizes) or "none"
    needed = f"{recipe.size} px, {recipe.resize}"
    name = store.path.name
    raise StoreError(
        f"{recipe.backbone} needs images of {needed}, but {name} has {has}.",
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
    """``feat_post`` of a run: the requested value or the method's, else the usual one of the backbones, with a note.

    The usual value is used if none was requested and the method's is ``none``. It is ``l2`` (unit vectors) if every
    backbone has text features, as CLIP has. It is ``sign`` (D-01) for the ResNets of the released FedPCL under the
    official preset.
    """
    chosen = str(hp.get("feat_post") or "none")
    if requested or chosen != "none":
        return chosen
    names = [_backbone_of(store.arrays[key]) for key in keys]
    if preset == "official" and all(name.startswith("resnet18-") for name in names):
        chosen = "sign"
    elif all(store.has_text(name) for name in names):
        chosen = "l2"
    if chosen != "none" and observer is not None:
        advice = ""
        if "feat_post" in hp:
            advice = " (--set feat_post=none leaves features as they are)"
        backbones = " + ".join(names)
        observer.note(Detail(f"feat_post: {chosen} (default for features of {backbones}{advice})."))
    return chosen


def train_example(store: Store) -> str:
    """``--method NAME`` of a method that can train on the arrays of a store, for messages."""
    only_images = all(array.dtype == "uint8" for array in store.arrays.values())
    if store.arrays and only_images:
        return "--method fedavg-scratch"
    return "--method fed3r"


def without_images(method: Method, names: Sequence[str]) -> tuple[str, ...]:
    """The names of ``--backbones``. For a method with an image encoder, ``pixels`` (its images) is left out."""
    if "image tower" not in method.needs:
        return tuple(names)
    return tuple(name for name in names if name.partition("@")[0] != "pixels")


def to_extract(
    method: Method, backbones: Sequence[str], home: Home
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Backbones and recipe options of the extraction that a method needs.

    The images for an image encoder are stored in its input size.
    """
    if "image tower" not in method.needs:
        if "pixels" in method.needs:
            return ("pixels",), {"size": "32"}
        return tuple(backbones), {}
    towers = without_images(method, backbones) or ("glyph-clip",)
    recipe = registry.lookup(towers[0].partition("@")[0], home=home.root).recipe
    return (*towers, "pixels"), pixel_recipe(recipe)


def pixel_recipe(recipe: Recipe) -> dict[str, str]:
    """``--recipe`` options that store images in the input size of an encoder with this recipe."""
    plain = registry.lookup("pixels").recipe
    options = {}
    for field in INPUT:
        value = getattr(recipe, field)
        if value != getattr(plain, field):
            options[f"pixels:{field}"] = str(value)
    return options


def needed_arrays(
    method: Method, store: Store, names: Sequence[str], begun: Sequence[UnfinishedArray], home: Home
) -> list[str]:
    """Keys of the unfinished arrays that the run needs."""
    complete = {key: array for key, array in store.arrays.items() if array.dtype != "uint8"}
    if names:
        # A backbone may be named alone or with its size; an array by its key.
        have = set(complete)
        for array in complete.values():
            name = _backbone_of(array)
            size = array.recipe.get("size", 0)
            have |= {name, f"{name}@{size}"}
        missing = [name for name in names if name not in have]
        return [array.key for array in begun if any(map(array.means, missing))]
    # Methods with text need a backbone with a text encoder; any such backbone will do.
    if needs_text(method):
        if _with_text(store, complete):
            return []
        begun = [
            array
            for array in begun
            if array.order
            and registry.lookup(array.backbone, home=home.root).text_width is not None
        ]
    elif complete:
        return []
    return [array.key for array in begun]


def complete_array(
    array: UnfinishedArray,
    store: Store,
    home: Home,
    *,
    extract: bool,
    observer: Observer,
    stop: Stop,
) -> None:
    """Compute the missing chunks of an array.

    Raises StoreError with the command to run, if ``extract`` is False, if this home does not know the options of the
    array's extraction, or if they would now make another array; other errors as ``extract``.
    """
    state = array.state(store)
    command = array.command(store, home)
    if array.order is None or not extract:
        raise StoreError(f"{state}.", command)
    (planned, *_), _ = plan(array.order, home, observer)
    key = planned.recipe.key
    if key != array.key:
        backbone = shell_word(array.backbone)
        raise StoreError(
            f"{state}, but the weights of {array.backbone} changed. The changed weights would make another feature "
            f"set, {key}.",
            f"To continue with the earlier weights:  {command} --weights {backbone}=FILE",
        )
    observer.note(
        f"{state}. fedcache computes the missing features first (--no-extract prevents this)."
    )
    run_extract(array.order, home, store=store.path, observer=observer, stop=stop, keep_text=True)


def refuse_partial_store(home: Home, dataset: str, names: Sequence[str]) -> None:
    """Refuse to extract all of a dataset for a run if a part of it (``--limit``) is extracted: it may take hours.

    Raises StoreError with the parts, and the commands for a part and for all.
    """
    memory = memory_of(home)
    whole = datasets.peek(dataset, datasets.Context(memory, data=home.data))
    if whole is None:
        return
    slug, digest = whole
    parts = []
    # The name of a store of --limit has the number of its images; the home remembers these stores.
    for path in sorted(home.stores.glob("*.zarr")):
        size = path.name.removeprefix(f"{slug}-").partition("-")[0]
        fact = None
        if size.isdecimal():
            # The slug and the digest of the part.
            fact = memory.recall(["limited", digest, int(size)])
        if isinstance(fact, list) and path == home.store(*fact):
            parts.append(Store.open(path))
    if parts:
        have = {_backbone_of(array) for array in parts[0].arrays.values()}
        example = ",".join(names or sorted(have)) or "efficientnet-lite0"
        sizes = []
        for part in parts:
            name = part.dataset["slug"]
            sizes.append(f"{name} ({part.rows:,} images)")
        listed = ", ".join(sizes)
        first = shell_word(parts[0].dataset["slug"])
        raise StoreError(
            f"Only a part of {dataset} is extracted: {listed}.",
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
    stop: Stop,
) -> tuple[Store, float]:
    """The store to train on, and the seconds of the extraction that was run for it.

    If nothing is extracted yet, the packaged digits are extracted, or a dataset and backbones that are both named. An
    unfinished array that the run needs is completed. Another unfinished array is left out with a warning.

    Raises StoreError with the command to run, if something is missing that may not be extracted; other errors as
    ``extract``.
    """
    path = locate_store(home, path=train.store, dataset=train.dataset, observer=observer)
    store = None
    if path is not None:
        store = Store.open(path)
    began = time.perf_counter()
    spent = 0.0
    if store is not None:
        begun = unfinished_arrays_of(store, home)
        keys = needed_arrays(method, store, train.backbones, begun, home)
        for array in begun:
            if array.key in keys:
                complete_array(array, store, home, extract=extract, observer=observer, stop=stop)
            elif not train.backbones:  # no warning on other arrays if the user named some
                command = array.command(store, home)
                observer.warn(
                    f"{array.state(store)}, so these features are not used. To delete the features: "
                    f"`fedcache gc --days 0`. To complete them: {command}"
                )
        if keys:
            store.refresh()
            spent = time.perf_counter() - began
        have = {*store.arrays, *map(_backbone_of, store.arrays.values())}
        # The name of a user's model may be a path, which stores shorten.
        lacking = []
        for name in train.backbones:
            names = {name.partition("@")[0], bare_name(name).partition("@")[0]}
            if names.isdisjoint(have):
                lacking.append(name)
        # Without --dataset, no other store is looked for: ``chosen_arrays`` refuses names that the store lacks.
        if store.arrays and (train.dataset is None or not lacking):
            return store, spent
        if is_ingested(store):
            return store, spent  # embeddings: there are no images to extract more features from
    # Nothing to train on yet. The packaged digits take seconds; other images are extracted if backbones are named.
    packaged = train.dataset in (None, "digits")
    backbones: Sequence[str] = train.backbones
    if not backbones:
        backbones = ("efficientnet-lite0",)
        if packaged or needs_text(method):
            backbones = ("glyph-clip",)
    backbones, recipe = to_extract(method, backbones, home)
    dataset = train.dataset or "digits"
    order = ExtractConfig(dataset=dataset, backbones=tuple(backbones), recipe=recipe)
    command = shlex.join(["fedcache", "extract", *option_words(order)])
    if store is None:
        if train.dataset is not None:
            refuse_partial_store(home, train.dataset, train.backbones)
    elif train.dataset is None or store_of_dataset(home, train.dataset) is not None:
        raise StoreError(
            f"{store.path} does not contain features that {method.name} can train on.",
            extract_command(store, backbones, recipe, home),
        )
    no_store = None
    if train.dataset is None:
        no_store = no_store_remembered(home)
    if no_store is not None and finished_stores(home):
        raise no_store  # another dataset is extracted, and digits instead of it would be another run
    if not extract or not (packaged or train.backbones):
        raise no_store or StoreError(f"The dataset {dataset} has no features yet.", command)
    if store is None and train.partition is not None and not Path(train.partition).exists():
        name = train.partition.partition("@")[0]  # refused now, and not after the extraction
        raise StoreError(
            f"There is no partition {name!r}, because the dataset {dataset} has no features yet.",
            f"{command}, then  fedcache partition --name {shell_word(name)}",
        )
    why = ""
    if not train.backbones:
        why = " (the default)"
        if needs_text(method):
            why = f" ({method.name} needs text features)"
    reason = "Nothing extracted yet"
    if no_store:
        reason = "There is no finished extraction"
    listed = ", ".join(backbones)
    observer.note(
        f"{reason}: extracting {listed}{why} on {dataset} first (--no-extract prevents this)."
    )
    without_sizes = tuple(name.partition("@")[0] for name in backbones)
    extraction = run_extract(
        replace(order, backbones=without_sizes),
        home,
        observer=observer,
        stop=stop,
        keep_text=True,  # texts that the user chose by extract --text stay
    )
    return extraction.store, time.perf_counter() - began


# ``--clients-from DIR``: the stores of a directory, one for each client.


def client_paths(folder: Path) -> list[Path]:
    """The client stores in a directory, sorted by name.

    Raises StoreError if there is no such directory, with the name of a similar one, and if it has no stores.
    """
    if not folder.is_dir():
        neighbours = []
        if folder.parent.is_dir():
            neighbours = [path.name for path in folder.parent.iterdir() if path.is_dir()]
        message = f"There is no directory {folder}."
        near = closest(folder.name, neighbours)
        if near:
            message += f" Did you mean {near!r}?"
        raise StoreError(
            message, "fedcache shard --partition NAME --out DIR   makes client stores."
        )
    paths = sorted(folder.glob("*.zarr"))
    if not paths:
        raise StoreError(
            f"{folder} contains no client stores.",
            "fedcache shard --partition NAME --out DIR   makes them.",
        )
    return paths


def open_clients(folder: Path) -> list[Store]:
    """The stores of a directory in client order.

    Raises StoreError if there are none, or if they are not shards of one dataset with the same classes.
    """
    stores = [Store.open(path) for path in client_paths(folder)]
    for store in stores:
        if "shard" not in store.dataset:
            raise StoreError(
                f"{store.path} is not a client store.",
                "fedcache shard --partition NAME --out DIR",
            )
    # Clients are numbered as in the partition, regardless of the order of the files.
    stores.sort(key=lambda store: int(store.dataset["shard"]["number"]))
    first = stores[0]
    shards = [store.dataset["shard"] for store in stores]
    numbers = [int(shard["number"]) for shard in shards]
    names = [str(shard["client"]) for shard in shards]
    for kind, keys in (("number", list(map(str, numbers))), ("name", names)):
        repeated, times = Counter(keys).most_common(1)[0]
        if times > 1:
            paths = [
                str(store.path) for store, key in zip(stores, keys, strict=True) if key == repeated
            ]
            listed = ", ".join(paths)
            raise StoreError(
                f"{len(paths)} stores belong to the same client ({kind} {repeated}): {listed}.",
                "Keep one of them, and remove or move the others.",
            )
    # Without a missing client, another federation would be trained.
    last = max(numbers)
    missing = sorted(set(range(last + 1)) - set(numbers))
    if missing:
        raise StoreError(
            f"{folder} has no store of client {missing[0]}: it has {len(stores)} stores, with numbers up to {last}.",
            "fedcache shard --partition NAME --out DIR   writes the missing client stores.",
        )
    # Labels and rows are numbers in the parent store, so all stores need the same parent and classes.
    parent = shards[0]["parent"]
    classes = first.samples.classes
    for store in stores[1:]:
        difference = ""
        if store.dataset["shard"]["parent"] != parent:
            difference = "parent dataset"
        elif store.samples.classes != classes:
            difference = "classes"
        if difference:
            raise StoreError(
                f"{store.path.name} and {first.path.name} differ in {difference}.",
                "Make all client stores from one store, with one partition.",
            )
    return stores
