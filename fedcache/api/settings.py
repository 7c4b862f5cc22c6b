"""From a configuration to a setting: method, store, features, partitions.

What is left out comes from rules, and each choice is said aloud.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcache.api import live
from fedcache.api.partitions import load_partition, make_partition, need_labels
from fedcache.api.sources import store_for
from fedcache.api.stores import more_features
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.federate.partition import InfeasibleError, Partition
from fedcache.progress import Observer
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.extract.stop import Stop
    from fedcache.federate.clients import Data
    from fedcache.federate.method import Method, Value

TEXT_ORDER = ("clip-rn50", "clip-vit-b-16", "clip-vit-b-32", "glyph-clip")


@dataclass
class Setting:
    """Everything a run needs, resolved.

    Attributes:
        method: with ``hp`` its hyperparameters.
        data: features of all rows, on the device that computes.
        keys: the arrays they come from, in order.
        features: their recipe digests, and the text features' digest.
        partitions: one per seed.
        names: the saved name of each, or ``partition-<seed>`` for one made for this run.
    """

    method: Method
    hp: dict[str, Value]
    feat_post: str
    data: Data
    keys: list[str]
    backbones: list[str]
    features: list[str]
    dataset: dict[str, Any]
    domains: tuple[str, ...]
    partitions: dict[int, Partition]
    named: str | None
    seconds: dict[str, float] = field(default_factory=dict)


def find_method(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    from fedcache.federate.methods import METHODS

    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def parse_seeds(text: str) -> list[int]:
    """``0,1,2`` or ``0-4`` as numbers, without repeats, in the order given.

    Raises:
        FedcacheError: USAGE.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if (
            match is None
            or (match[2] and int(match[2]) < int(match[1]))
            or (match[2] and int(match[2]) - int(match[1]) > 9999)
        ):
            raise FedcacheError(
                Exit.USAGE, f"--seeds {text} is not a list of seeds.", "For example --seeds 0,1,2 or --seeds 0-4"
            )
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(seeds))


def parse_participation(text: str | None) -> int | float | None:
    """``all``, a number of clients, or a share (``0.1``, ``100%``).

    Raises:
        FedcacheError: USAGE.
    """
    if text is None or text == "all":
        return None
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
        elif re.fullmatch(r"\d+", text):
            if int(text) > 0:
                return int(text)
            share = 0.0
        else:
            share = float(text)
        if 0 < share <= 1:
            return share
    except ValueError:
        pass
    raise FedcacheError(
        Exit.USAGE,
        f"--participation {text} is neither a number of clients nor a share.",
        "For example 10, 0.1, 10% or all",
    )


def chosen_arrays(store: Store, names: Sequence[str], *, pixels: bool = False) -> list[str]:
    """Array keys for ``--backbones``: the names given, or every array of features, in stored order.

    A name with several variants in the store is ambiguous; ``name@size`` or the array's own key chooses one.

    Raises:
        FedcacheError: STORE when the store lacks one; USAGE when a name means several.
    """
    info = {k: a for k, a in store.arrays.items() if pixels or a.dtype != "uint8"}
    if not info:
        raise FedcacheError(
            Exit.STORE,
            f"{store.path.name} holds no features yet.",
            more_features(store, "efficientnet-lite0"),
        )
    if not names:
        by_name: dict[str, list[str]] = {}
        for key in info:
            by_name.setdefault(str(info[key].recipe.get("backbone", key)), []).append(key)
        return [chosen_arrays(store, [name])[0] for name in by_name]
    chosen = []
    for name in names:
        labels = {
            k: (str(a.recipe.get("backbone", k)), f"{a.recipe.get('backbone', k)}@{a.recipe.get('size', 0)}")
            for k, a in info.items()
        }
        found = [k for k, both in labels.items() if name == k or name in both]
        if not found:
            have = ", ".join(both[1] for both in labels.values())
            raise FedcacheError(
                Exit.STORE,
                f"{store.path.name} has no features of {name!r}; it has {have}.",
                more_features(store, name.partition("@")[0]),
            )
        if len(found) > 1:
            options = ", ".join(labels[k][1] if len({labels[f][1] for f in found}) == len(found) else k for k in found)
            raise FedcacheError(
                Exit.USAGE, f"{name!r} means {len(found)} arrays of the store.", f"Choose with --backbones: {options}"
            )
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


def arrays_for(method: Method, store: Store, names: Sequence[str], observer: Observer) -> list[str]:
    """The arrays a method trains on: text methods take exactly one backbone with text, others concatenate."""
    names = live.without_images(method, names)
    if "text" not in method.needs and not live.wants_towers(method):
        keys = chosen_arrays(store, names)
        if not names:
            observer.note(f"Backbones: all of the store, {' + '.join(keys)} (--backbones chooses).")
        return keys
    with_text = [k for k in chosen_arrays(store, names) if store.has_text(str(store.arrays[k].recipe.get("backbone")))]
    if not with_text:
        raise FedcacheError(
            Exit.STORE,
            f"{method.name} needs text features, and {' + '.join(names) or store.path.name} has none.",
            more_features(store, "glyph-clip", "text/NAME"),
        )
    if names and len(with_text) > 1:
        raise FedcacheError(
            Exit.USAGE,
            f"{method.name} takes exactly one backbone with text, got {len(with_text)}.",
            f"--backbones {names[0]}",
        )
    backbone = {str(store.arrays[k].recipe["backbone"]): k for k in with_text}
    first = next((backbone[n] for n in TEXT_ORDER if n in backbone), None)
    if first is None and len(with_text) > 1:
        raise FedcacheError(
            Exit.USAGE,
            f"Several backbones have text features: {', '.join(backbone)}.",
            f"--backbones {next(iter(backbone))}",
        )
    key = first or with_text[0]
    if not names:
        observer.note(f"Backbone: {key}, for {method.name} takes one with text features (--backbones chooses).")
    return [key]


def feat_post_for(hp: Mapping[str, Value], asked: bool, preset: str, store: Store, keys: Sequence[str]) -> str:
    """``feat_post`` of a run: the method's value, unless what is known of the backbones says better.

    Nobody asked and the method does nothing: CLIP features go to the sphere (l2) when every backbone has a text tower,
    and the released FedPCL's ResNets give signs (D-01) under the official preset.
    """
    chosen = str(hp.get("feat_post") or "none")
    if asked or chosen != "none":
        return chosen
    names = [str(store.arrays[k].recipe.get("backbone")) for k in keys]
    if preset == "official" and all(n.startswith("resnet18-") for n in names):
        return "sign"
    return "l2" if all(store.has_text(n) for n in names) else "none"


def load_features(
    method: Method, hp: Mapping[str, Value], store: Store, keys: Sequence[str], feat_post: str, train: np.ndarray
) -> tuple[Data, list[str]]:
    """Read the arrays, apply ``feat_post``, and take the text features of a backbone that has some.

    Returns:
        data, and the digests of what it was made from.
    """
    import torch

    from fedcache.federate.clients import Data, prepare
    from fedcache.store.files import sha256_hex

    arrays = [store.reader(key).all() for key in keys]
    for key, array in zip(keys, arrays, strict=True):
        if array.ndim != 3:
            raise FedcacheError(
                Exit.USAGE, f"{key} holds images, and {method.name} needs features.", "Choose other --backbones."
            )
    x = prepare(arrays, feat_post, train)
    samples = store.samples
    digests = [str(store.arrays[key].digest) for key in keys]
    text = None
    backbone = str(store.arrays[keys[0]].recipe.get("backbone"))
    if len(keys) == 1 and store.has_text(backbone):
        matrix = store.text(backbone)
        how = "text" if hp.get("init") == "auto" and hp.get("head") == "linear" else hp.get("init")
        if "text" in method.needs or how == "text":
            text = torch.from_numpy(np.array(matrix, np.float32))
            digests.append(sha256_hex(np.ascontiguousarray(matrix).tobytes()))
    return Data(
        x=x,
        y=torch.from_numpy(samples.label.astype(np.int64)),
        classes=len(samples.classes),
        text=text,
        widths=tuple(a.shape[2] for a in arrays),
        domain=torch.from_numpy(samples.domain.astype(np.int64)),
    ), digests


def default_partition(
    method: Method, store: Store, config: PartitionConfig, domain: Sequence[str], observer: Observer
) -> tuple[str, dict[str, Any]]:
    """Scheme and arguments: those given, else the method's paper, and what the paper's scheme needs of the data."""
    from fedcache.federate.partition import SCHEMES

    scheme, arguments = config.scheme, dict(config.options)
    if scheme is None:
        scheme = method.defaults.scheme
        if scheme == "feature-shift" and len(domain or store.samples.domains) == 1:
            scheme = "label-shift"
            observer.note(
                f"Partition label-shift: {method.name}'s paper shifts features, and there is one domain only."
            )
        else:
            observer.note(f"Partition {scheme}: the setting of {method.name}'s paper (--scheme chooses).")
    if scheme not in SCHEMES:
        raise unknown("partition scheme", scheme, SCHEMES)
    known = {a.name for a in SCHEMES[scheme].arguments}
    if config.clients is not None:
        arguments["clients"] = config.clients
    elif "clients" in known and "clients" not in arguments:
        arguments["clients"] = method.defaults.clients
        observer.note(f"Clients {method.defaults.clients}: the setting of {method.name}'s paper (--clients chooses).")
    if domain and "domain" in known:
        arguments["domain"] = tuple(domain)
    return scheme, arguments


def partitions_for(
    method: Method,
    store: Store,
    train: TrainConfig,
    config: PartitionConfig,
    seeds: Sequence[int],
    *,
    repartition: bool,
    observer: Observer,
) -> tuple[dict[int, Partition], str | None]:
    """One partition per seed: the saved one, or one made by the scheme (the same for all seeds, or drawn by each)."""
    if train.partition is not None:
        if config.scheme is not None:
            raise FedcacheError(
                Exit.USAGE,
                "--partition and --scheme are both given.",
                "Give one: a saved partition, or a scheme to make one.",
            )
        loaded = load_partition(store, train.partition)
        return dict.fromkeys(seeds, loaded), train.partition
    scheme, arguments = default_partition(method, store, config, train.domain, observer)
    made: dict[int, Partition] = {}
    for seed in seeds:
        own = seed if repartition else config.seed
        if not repartition and made:
            made[seed] = next(iter(made.values()))
            continue
        try:
            made[seed] = make_partition(store, scheme, seed=own, save=False, **arguments)
        except InfeasibleError as error:
            # Only what the rules chose is scaled down; what the user asked for is refused with the value that works.
            chosen_by_user = config.scheme is not None or config.clients is not None or bool(config.options)
            if chosen_by_user or not error.instead:
                raise
            observer.note(f"{error.message} Scaled down: {', '.join(f'{k} {v}' for k, v in error.instead.items())}.")
            arguments = {**arguments, **error.instead}
            made[seed] = make_partition(store, scheme, seed=own, save=False, **arguments)
    first = next(iter(made.values()))
    observer.note(first.summary() + ".")
    for note in first.notes:
        observer.note(note)
    return made, None


def prepare_run(
    train: TrainConfig,
    partition: PartitionConfig,
    home: Home,
    *,
    repartition: bool,
    extract: bool,
    observer: Observer,
    stop: Stop,
) -> tuple[Setting, Store]:
    """Resolve method, store, features and partitions, and say each choice that was not the user's."""
    if train.method is None:
        from fedcache.federate.methods import METHODS

        raise FedcacheError(Exit.USAGE, "No method was named.", f"--method {' | '.join(METHODS)}")
    method = find_method(train.method)
    hp = live.with_rounds(method.resolve(train.preset, train.set), train.rounds or method.defaults.rounds)
    seeds = parse_seeds(train.seeds)
    began = time.perf_counter()
    store, extracted = store_for(method, train, home, extract=extract, observer=observer, stop=stop)
    seconds = {"extract": extracted}
    keys = arrays_for(method, store, train.backbones, observer)
    need_labels(method, store, None)
    brought = live.bring(method, store, keys[0], home)
    if train.domain:
        for name in train.domain:
            if name not in store.samples.domains:
                raise unknown("domain", name, store.samples.domains)
    made, named = partitions_for(method, store, train, partition, seeds, repartition=repartition, observer=observer)
    rows = np.concatenate([c.train for c in next(iter(made.values())).clients])
    need_labels(method, store, rows)
    if (store.samples.label[next(iter(made.values())).test] < 0).all():
        observer.note("No test row has a label: the models are made, and nothing is scored.")
    feat_post = feat_post_for(hp, "feat_post" in train.set, train.preset, store, keys)
    hp = {**hp, **({"feat_post": feat_post} if "feat_post" in hp else {})}
    if brought is None or brought.images is None:
        data, digests = load_features(method, hp, store, keys, feat_post, rows)
    else:
        keys = [*keys, brought.images]
        data, digests = live.load_images(store, brought.images), [str(store.arrays[k].digest) for k in keys]
    if brought is not None:
        data, digests = brought.attach(data, store), [*digests, brought.digest]
    seconds["load"] = time.perf_counter() - began - extracted
    dataset = {
        "slug": str(store.dataset["slug"]),
        "digest": str(store.dataset["digest"]),
        "rows": store.rows,
        "ok": store.rows_ok,
    }
    backbones = [str(store.arrays[k].recipe.get("backbone", k)) for k in keys]
    return Setting(
        method, hp, feat_post, data, keys, backbones, digests, dataset, store.samples.domains, made, named, seconds
    ), store
