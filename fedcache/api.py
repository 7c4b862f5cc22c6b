"""The Python API: what a notebook calls. The environment is read here as the command line reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedcache.config import ExtractConfig, Home, TrainConfig, resolve
from fedcache.errors import Exit, FedcacheError
from fedcache.extract import extraction
from fedcache.extract.planning.find_store import need_store
from fedcache.extract.planning.ingest import ingest_file
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import Partition
from fedcache.grids import grid as grids
from fedcache.grids import points
from fedcache.progress import Observer
from fedcache.runs import loop as training
from fedcache.runs import partitions
from fedcache.runs.events import OnRound
from fedcache.runs.run import Run
from fedcache.runs.trackers import tracking
from fedcache.store.store import Store

AnyStore: TypeAlias = Store | str | Path


def extract(
    dataset: str | None = None,
    backbones: str | Sequence[str] = (),
    *,
    store: str | Path | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Store:
    """Run frozen backbones over a dataset; returns at once when the store has everything.

    Args:
        dataset: ``digits``, ``folder:PATH``, ``torchvision:NAME``, ``paper:NAME``, or ``a=SPEC,b=SPEC``;
            None is the last one.
        backbones: names.
        store: directory, instead of the one under FEDCACHE_HOME.
        observer: told the story; silent by default.
        options: fields of ``ExtractConfig`` (size, views, recipe, device, weights, limit, ...).

    Raises:
        FedcacheError: as the command, with its exit code and hint.
    """
    names = (backbones,) if isinstance(backbones, str) else tuple(backbones)
    config = resolve(
        ExtractConfig, {}, {"dataset": dataset, "backbones": names, **_plain(options, ExtractConfig)}, "extract()"
    )
    done = extraction.extract(config, Home.from_environment(), store=Path(store) if store else None, observer=observer)
    return done.store


def ingest(
    file: str | Path,
    name: str,
    *,
    store: str | Path | None = None,
    replace: bool = False,
    observer: Observer | None = None,
) -> Store:
    """Bring your own embeddings (npz, npy, h5, parquet, safetensors) straight into a store; see ``ingest_file``."""
    place = Path(store) if store else None
    return ingest_file(Home.from_environment(), Path(file), name, place, replace=replace, observer=observer)


def partition(
    store: AnyStore | None, scheme: str, *, seed: int = 0, name: str | None = None, **arguments: Any
) -> Partition:
    """Deal the rows of a store to clients; the partition is saved in the store.

    Args:
        store: a store or its path; None is the last one extracted.
        scheme: iid, shards, dirichlet, lda, feature-shift, label-shift, feature-label-shift, few-shot, flesd.
        seed: of the draws.
        name: to save it under.
        arguments: of the scheme (clients, alpha, shards, shots, ...).
    """
    return partitions.make_partition(_opened(store), scheme, seed=seed, name=name, **arguments)


def shard(store: AnyStore | None, parts: Partition, out: str | Path | None = None) -> Path:
    """Write one ordinary store per client; returns their directory."""
    from fedcache.progress import Silent

    return partitions.write_shards(_opened(store), parts, out, Silent())


def train(
    method: str | Method,
    store: AnyStore | None = None,
    parts: Partition | str | None = None,
    *,
    seeds: int | Iterable[int] = 0,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    on_round: OnRound | None = None,
    track: str | None = None,
    fresh: bool = False,
    **options: Any,
) -> Run:
    """Train a federated method on cached features; the same run again returns the stored result.

        fc.train("fedavg", store, parts, eval_every=1, on_round=lambda r: print(r.seed, r.round, r.accuracy))

    Args:
        method: a name of ``fedcache methods list``, or a ``Method`` of your own from a file that can be read: the
            digest of that file and of your files it imports is part of the run's identity.
        store: a store or its path; None is the last one extracted.
        parts: a partition, the name of a saved one, or None for the setting of the method's paper.
        seeds: one or several.
        settings: hyperparameters of the method.
        observer: told the story.
        on_round: called with a ``Round`` after every round; those of a stored result, or of before a checkpoint, come
            first and say ``stored``. It changes nothing of the result. When it raises, that is warned of, it is not
            called again, and the run goes on: tracking never costs a training.
        track: ``tensorboard`` or ``tensorboard:DIR``, as ``--track``.
        fresh: run again although the result is there.
        options: fields of ``TrainConfig`` (backbones, rounds, participation, preset, lift, ...).

    Raises:
        FedcacheError: as the command, with its exit code and hint.
    """
    own = None if isinstance(method, str) or METHODS.get(method.name) is method else method
    name = method if isinstance(method, str) else method.name
    config, home = _config(name, store, parts, seeds, settings, options), Home.from_environment()
    with tracking(track, home, None, observer) as hooks:
        return training.train(
            config,
            home,
            method=own,
            observer=observer,
            hooks=(*hooks, *([on_round] if on_round else [])),
            fresh=fresh,
        )


def grid(
    methods: str | Sequence[str],
    store: AnyStore | None = None,
    parts: Partition | str | None = None,
    *,
    seeds: int | Iterable[int] = 0,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    on_round: OnRound | None = None,
    track: str | None = None,
    fresh: bool = False,
    options: Mapping[str, Any] | None = None,
    sampler: str = "grid",
    exact: bool = False,
    jobs: int = 1,
    **sweeps: Sequence[Any],
) -> points.Grid:
    """Train every combination: ``grid("fedavg", store, parts, lr=[0.1, 0.01], rounds=[5, 10])``.

    ``sampler``, ``exact`` and ``jobs`` are those of ``fedcache grid``, ``on_round`` and ``track`` those of ``train``;
    a ``Round`` says which point it is of.

    Raises:
        FedcacheError: once all other points are trained and kept: CORRUPT when a stored point is damaged, FEDERATED
            when one could not be trained.
    """
    names = (methods,) if isinstance(methods, str | Method) else tuple(methods)
    if mine := next((m for m in names if isinstance(m, Method)), None):
        raise FedcacheError(
            Exit.USAGE,
            f"grid() takes methods by name, and got the Method {mine.name}.",
            "A method of your own is trained point by point: fc.train(method, store, parts, settings={'lr': 0.1})",
        )
    config = _config(None, store, parts, seeds, settings, options or {})
    words = {
        key: tuple(str(v) for v in (values if isinstance(values, list | tuple | range) else [values]))
        for key, values in sweeps.items()
    }
    home = Home.from_environment()
    with tracking(track, home, None, observer) as hooks:
        request = grids.request_grid(names, words, config, home, fresh=fresh, sampler=sampler, exact=exact)
        done = grids.grid(request, jobs=jobs, observer=observer, hooks=(*hooks, *([on_round] if on_round else [])))
    lost = [*done.damaged, *done.failed]
    if lost:
        raise FedcacheError(done.code, "\n".join(p.message for p in lost), lost[0].hint)
    return done


def _opened(store: AnyStore | None) -> Store:
    if isinstance(store, Store):
        return store
    return need_store(Home.from_environment(), path=Path(store) if store is not None else None)


def _config(
    method: str | None,
    store: AnyStore | None,
    parts: Partition | str | None,
    seeds: int | Iterable[int],
    settings: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> TrainConfig:
    chosen = (seeds,) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:
        raise FedcacheError(Exit.USAGE, "seeds is empty.", "For example seeds=range(3)")
    path = store.path if isinstance(store, Store) else store
    flags: dict[str, Any] = {
        "method": method,
        "seeds": ",".join(map(str, chosen)),
        "set": dict(settings or {}),
        "store": str(path) if path is not None else None,
        **_plain(options, TrainConfig),
    }
    if isinstance(parts, Partition):
        opened = _opened(store)
        name = parts.default_name()
        if name not in opened.partitions or opened.partition(name).get("digest") != parts.digest:
            name = f"{name}-{parts.digest[:8]}"
            opened.put_partition(name, parts.to_payload())
        flags["partition"] = name
    elif parts is not None:
        flags["partition"] = parts
    return resolve(TrainConfig, {}, flags, "train()")


def _plain(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Options with lists as tuples; an unknown one is refused with "did you mean"."""
    from fedcache.errors import unknown

    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    for name in options:
        if name not in known:
            raise unknown("option", name, known)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
