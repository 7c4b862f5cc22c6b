"""From a configuration to a setting: method, store, features, partitions.

What is left out comes from rules, and each choice is said aloud.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.extract.planning.templates import say_templates
from fedcache.federate.partition.partition import InfeasibleError, Partition
from fedcache.progress import Observer
from fedcache.runs import encoders
from fedcache.runs.client_overrides import check_named, named_backbones, own_of
from fedcache.runs.features import arrays_for, feat_post_for, load_features
from fedcache.runs.partitions import load_partition, make_partition, need_labels, only_class, tell_notes
from fedcache.runs.store_choice import store_for
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.extract.stop import Stop
    from fedcache.federate.engine.client_data import Data
    from fedcache.federate.engine.client_overrides import ClientOverrides
    from fedcache.federate.engine.hyperparameters import Value
    from fedcache.federate.engine.method import Method

LARGEST_SEED = 999_999_999
MOST_SEEDS = 10_000


@dataclass
class Memo:
    """What the settings of one grid share: features and partitions, read and dealt once.

    Attributes:
        features: of the last arrays read; grids keep arrays together, so one is enough.
        partitions: by everything that determines them.
        said: warnings that were given.
    """

    features: tuple[Any, Any] | None = None
    partitions: dict[Any, Any] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)


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
        own: in what single clients differ.
        templates: of the text the run uses.
        classes: names of the classes.
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
    own: dict[int, ClientOverrides] = field(default_factory=dict)
    templates: list[str] = field(default_factory=list)
    classes: tuple[str, ...] = ()


def find_method(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    from fedcache.federate.methods import METHODS

    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def parse_seeds(text: str) -> list[int]:
    """``0,1,2`` or ``0-4`` as numbers, without repeats, in the order given.

    >>> parse_seeds("7,0-2,1")
    [7, 0, 1, 2]

    Raises:
        FedcacheError: USAGE, also for a seed above ``LARGEST_SEED`` or more than ``MOST_SEEDS``.
    """
    example = "For example --seeds 0,1,2 or --seeds 0-4"
    seeds: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,99})(?:-([0-9]{1,99}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise FedcacheError(Exit.USAGE, f"--seeds {text} is not a list of seeds.", example)
        if last > LARGEST_SEED:
            raise FedcacheError(Exit.USAGE, f"--seeds {last}: a seed is at most {LARGEST_SEED:,}.", example)
        if last - first < MOST_SEEDS:
            seeds.update(dict.fromkeys(range(first, last + 1)))
        if last - first >= MOST_SEEDS or len(seeds) > MOST_SEEDS:
            raise FedcacheError(Exit.USAGE, f"--seeds {text} are more than {MOST_SEEDS:,} seeds.", example)
    return list(seeds)


def parse_participation(text: str | None) -> int | float | None:
    """``all``, a number of clients, or a share (``0.1``, ``100%``).

    >>> parse_participation("10"), parse_participation("10%"), parse_participation("all")
    (10, 0.1, None)

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


def default_partition(
    method: Method, store: Store, config: PartitionConfig, domain: Sequence[str], observer: Observer
) -> tuple[str, dict[str, Any]]:
    """Scheme and arguments: those given, else the method's paper, and what the paper's scheme needs of the data."""
    from fedcache.federate.partition.partition import SCHEMES

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
    tell_notes(first, observer)
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
    memo: Memo | None = None,
    method: Method | None = None,
) -> tuple[Setting, Store]:
    """Resolve method, store, features and partitions, and say each choice that was not the user's.

    ``method`` is one of the user's own, in the place of the one that is named.
    """
    memo = memo or Memo()
    if train.method is None:
        from fedcache.federate.methods import METHODS

        raise FedcacheError(Exit.USAGE, "No method was named.", f"--method {' | '.join(METHODS)}")
    method = method or find_method(train.method)
    hp = encoders.with_rounds(method.resolve(train.preset, train.set), train.rounds or method.defaults.rounds)
    seeds = parse_seeds(train.seeds)
    began = time.perf_counter()
    store, extracted = store_for(method, train, home, extract=extract, observer=observer, stop=stop)
    seconds = {"extract": extracted}
    check_named(train, store, home)
    keys = arrays_for(method, hp, store, named_backbones(train), observer)
    need_labels(method, store, None)
    brought = encoders.bring(method, store, keys[0], home)
    if train.domain:
        for name in train.domain:
            if name not in store.samples.domains:
                raise unknown("domain", name, store.samples.domains)
    dealt = (store.path, method.defaults, train.partition, train.domain, str(partition), tuple(seeds), repartition)
    if dealt not in memo.partitions:
        memo.partitions[dealt] = partitions_for(
            method, store, train, partition, seeds, repartition=repartition, observer=observer
        )
    made, named = memo.partitions[dealt]
    rows = np.concatenate([c.train for c in next(iter(made.values())).clients])
    need_labels(method, store, rows)
    alone = only_class(method, store.samples.label[rows], store.samples.classes)
    if alone is not None and alone not in memo.said:
        memo.said.add(alone)
        observer.warn(alone)
    if (store.samples.label[next(iter(made.values())).test] < 0).all():
        observer.note("No test row has a label: the models are made, and nothing is scored.")
    said = None if "pixels" in method.reads(hp) else observer  # no features are read
    feat_post = feat_post_for(hp, "feat_post" in train.set, train.preset, store, keys, said)
    hp = {**hp, **({"feat_post": feat_post} if "feat_post" in hp else {})}
    if brought is not None and brought.images is not None:
        keys = [*keys, brought.images]
    if "pixels" in method.reads(hp):
        data, digests = encoders.load_images(store, keys[-1]), [str(store.arrays[k].digest) for k in keys]
        templates: list[str] = []
    else:
        of = rows.tobytes() if feat_post == "standardize" else b""
        read = (store.path, tuple(keys), feat_post, of, method.needs, hp.get("init"), hp.get("head"))
        if memo.features is None or memo.features[0] != read:
            memo.features = None  # the old ones go before the new ones come
            memo.features = (read, load_features(method, hp, store, keys, feat_post, rows, observer))
        data, digests, templates = memo.features[1]
    if brought is not None:
        data, digests = brought.attach(data, store), [*digests, brought.digest]
        templates = templates or [brought.towers.template]
    say_templates(templates, observer)
    if not method.reads(hp) & {"labels", "text"} and (store.samples.label[rows] < 0).all():
        observer.note("No training row has a label: no linear probe can be trained, and nothing is scored.")
    if "views" in method.reads(hp) and data.x.shape[1] < 3:
        observer.note(
            f"Views stored of each image: {data.x.shape[1]}. {method.name} wants augmentations: approx; "
            "fedcache extract --views 8 stores some."
        )
    own = own_of(method, train, store, keys, data.widths, len(next(iter(made.values())).clients))
    seconds["load"] = time.perf_counter() - began - extracted
    dataset = {
        "slug": str(store.dataset["slug"]),
        "digest": str(store.dataset["digest"]),
        "rows": store.rows,
        "ok": store.rows_ok,
    }
    backbones = [str(store.arrays[k].recipe.get("backbone", k)) for k in keys]
    return Setting(
        method=method,
        hp=hp,
        feat_post=feat_post,
        data=data,
        keys=keys,
        backbones=backbones,
        features=digests,
        dataset=dataset,
        domains=store.samples.domains,
        partitions=made,
        named=named,
        seconds=seconds,
        own=own,
        templates=templates,
        classes=store.samples.classes,
    ), store
