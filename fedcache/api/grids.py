"""``grid``: the product of methods, sweeps and seeds, each point an ordinary run.

Every point has its own digest, so a grid that was killed runs only what is missing, and a point that was trained alone
before is not trained again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcache.api.runs import DamagedRunError
from fedcache.api.settings import find_method
from fedcache.api.training import Run, train
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.stop import Stop
from fedcache.progress import Observer, Silent

RUN_KEYS = ("rounds", "participation", "backbones", "domain")
PARTITION_KEYS = ("scheme", "clients", "alpha", "shards", "shots")


@dataclass
class Point:
    """One combination: a method, the swept values, and its run over all seeds."""

    method: str
    sweep: dict[str, str]
    run: Run


@dataclass
class Lost:
    """A point without a result: its stored run is damaged, or its training failed. What was found, and what to do."""

    method: str
    sweep: dict[str, str]
    message: str
    hint: str


@dataclass
class Grid:
    """All points of a grid, in the order of the product; damaged and failed ones are apart.

    Attributes:
        points: those with a result.
        damaged: those whose stored run is damaged.
        failed: those that could not be trained.
    """

    points: list[Point]
    damaged: list[Lost] = field(default_factory=list)
    failed: list[Lost] = field(default_factory=list)

    @property
    def code(self) -> Exit:
        """CORRUPT when a stored run is damaged, else FEDERATED when a point failed, else OK."""
        return Exit.CORRUPT if self.damaged else Exit.FEDERATED if self.failed else Exit.OK

    @property
    def reused(self) -> int:
        """Points whose result was there already."""
        return sum(p.run.reused for p in self.points)

    def best(self) -> Point:
        """The point of the highest mean accuracy; the first of equals."""
        return max(self.points, key=lambda p: p.run.accuracy["mean"] or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The ``data`` of the envelope."""
        best = self.best()
        return {
            "points": [{"method": p.method, "sweep": p.sweep, **p.run.to_dict()} for p in self.points],
            "damaged": [asdict(d) for d in self.damaged],
            "failed": [asdict(f) for f in self.failed],
            "reused": self.reused,
            "best": {"method": best.method, "sweep": best.sweep, "digest": best.run.result["digest"]},
        }

    def __repr__(self) -> str:
        best = self.best()
        return f"Grid({len(self.points)} points, best {best.method} {best.sweep} {best.run.accuracy['mean']})"


def combinations(methods: Sequence[str], sweeps: Mapping[str, Sequence[str]]) -> list[tuple[str, dict[str, str]]]:
    """Every (method, swept values), checked before anything runs: names, legal values, no repeats.

    Raises:
        FedcacheError: USAGE.
    """
    for key, values in sweeps.items():
        if key in ("seed", "seeds"):
            raise FedcacheError(
                Exit.USAGE,
                f"--sweep {key}: seeds are not swept, every point runs all of them.",
                f"--seeds {','.join(values) or '0,1,2'} (with --repartition each of them draws its own partition)",
            )
        if not values:
            raise FedcacheError(Exit.USAGE, f"--sweep {key} has no values.", f"For example --sweep {key}=a,b")
        if len(set(values)) < len(values):
            raise FedcacheError(
                Exit.USAGE, f"--sweep {key} names a value twice.", f"--sweep {key}={','.join(dict.fromkeys(values))}"
            )
    for name in methods:
        method = find_method(name)
        for key, values in sweeps.items():
            if key not in (*RUN_KEYS, *PARTITION_KEYS):
                for value in values:
                    method.hparam(key).parse(value)
    names = list(dict.fromkeys(methods))
    return [
        (m, dict(zip(sweeps, values, strict=True))) for m in names for values in itertools.product(*sweeps.values())
    ]


def grid(
    methods: Sequence[str],
    sweeps: Mapping[str, Sequence[str]],
    config: TrainConfig,
    home: Home,
    *,
    partition: PartitionConfig | None = None,
    runs: Path | None = None,
    repartition: bool = False,
    extract: bool = True,
    fresh: bool = False,
    observer: Observer | None = None,
    stop: Stop | None = None,
) -> Grid:
    """Train every point; see ``train`` for the arguments.

    A point whose stored run is damaged, or whose training diverges, does not stop the others; it is in
    ``Grid.damaged`` or ``Grid.failed``.

    Raises:
        FedcacheError: as ``train``; a stop is honoured between rounds, and finished points are kept. CORRUPT or
            FEDERATED, when no point has a result.
    """
    observer, stop = observer or Silent(), stop or Stop()
    base = partition or PartitionConfig()
    todo = combinations(methods, sweeps)
    points: list[Point] = []
    damaged: list[Lost] = []
    failed: list[Lost] = []
    for number, (name, sweep) in enumerate(todo, 1):
        observer.note(
            f"Point {number} of {len(todo)}: {name} {' '.join(f'{k}={v}' for k, v in sweep.items())}".rstrip()
        )
        settings = {k: v for k, v in sweep.items() if k not in (*RUN_KEYS, *PARTITION_KEYS)}
        values: dict[str, Any] = {k: v for k, v in sweep.items() if k in RUN_KEYS}
        if "rounds" in values:
            values["rounds"] = int(values["rounds"])
        for key in ("backbones", "domain"):
            if key in values:
                values[key] = tuple(values[key].split("+"))
        point = replace(config, method=name, set={**config.set, **settings}, **values)
        try:
            run = train(
                point,
                home,
                partition=_dealt(base, sweep),
                runs=runs,
                repartition=repartition,
                extract=extract,
                fresh=fresh,
                observer=observer,
                stop=stop,
            )
        except DamagedRunError as error:
            observer.warn(error.message)
            damaged.append(Lost(name, sweep, error.message, error.hint))
            continue
        except FedcacheError as error:
            if error.code is not Exit.FEDERATED:
                raise
            observer.warn(error.message)
            failed.append(Lost(name, sweep, error.message, error.hint))
            continue
        points.append(Point(name, sweep, run))
    done, lost = Grid(points, damaged, failed), [*damaged, *failed]
    if lost and not points:
        raise FedcacheError(done.code, "\n".join(p.message for p in lost), lost[0].hint)
    return done


def _dealt(base: PartitionConfig, sweep: Mapping[str, str]) -> PartitionConfig:
    """The partition of a point: the base with the swept scheme, clients and arguments."""
    options = {**base.options, **{k: sweep[k] for k in ("alpha", "shards", "shots") if k in sweep}}
    clients = int(sweep["clients"]) if "clients" in sweep else base.clients
    return PartitionConfig(sweep.get("scheme", base.scheme), clients, base.seed, options)
