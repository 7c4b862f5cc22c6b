"""What a federation is asked to do, as an app's configuration holds it: flat words and numbers, for Flower."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fedcache.config import TrainConfig, resolve, to_table
from fedcache.errors import UsageError
from fedcache.federate.engines.flower.sites import Terms
from fedcache.federate.engines.flower.supported_methods import check_suited
from fedcache.federate.methods import find_method
from fedcache.grids.sweeps import check_sweeps, split_key
from fedcache.runs.spec import check_participation, check_values, parse_participation, parse_seeds

TRAIN = (
    "method", "preset", "backbones", "rounds", "participation", "seeds", "eval_every", "dtype", "aggregate",
    "on_bad_update", "byzantine", "max_update_norm",
)  # fmt: skip
"""Fields of ``TrainConfig`` that an app has."""


@dataclass(frozen=True)
class Plan:
    """A run, or a grid of runs that travel together, and how long the server waits.

    Attributes:
        train: of every point; ``lift`` is ``sequential``, as each site is one client.
        sweep: hyperparameter -> values.
        sites: how many the federation is of.
        start_with: how many are enough to begin when ``wait`` is over; None for all.
        quorum: sites without whose sound uploads a round does not count.
        wait: seconds for the sites to come.
        timeout: seconds for an answer.
        runs: directory of results, on the server's machine; "" for the one under its FEDCACHE_HOME.
        fresh: run again although results are there.
        answer: file that is told how it ended, on the server's machine; "" for none.
    """

    train: TrainConfig
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sites: int = 2
    start_with: int | None = None
    quorum: int = 1
    wait: float = 120.0
    timeout: float = 600.0
    runs: str = ""
    fresh: bool = False
    answer: str = ""

    @property
    def terms(self) -> Terms:
        """How the server waits."""
        first = self.sites if self.start_with is None else self.start_with
        return Terms(self.sites, first, self.quorum, self.wait, self.timeout)

    @property
    def points(self) -> list[tuple[dict[str, str], TrainConfig]]:
        """Every combination of the swept values, and its configuration."""
        made = []
        for values in itertools.product(*self.sweep.values()):
            swept = dict(zip(self.sweep, values, strict=True))
            named = {split_key(k)[1]: v for k, v in swept.items()}
            made.append((swept, replace(self.train, set={**self.train.set, **named})))
        return made

    def checked(self) -> Plan:
        """Itself, when everything can be.

        Raises:
            UsageError.
        """
        if self.train.method is None:
            raise UsageError("No method was named.", "For example --method fed3r")
        method = find_method(self.train.method)
        check_suited(method, method.resolve(self.train.preset, self.train.set), self.train)
        check_values(self.train)
        parse_seeds(self.train.seeds)
        parse_participation(self.train.participation)
        check_sweeps([self.train.method], self.sweep)
        strange = [k for k in self.sweep if split_key(k)[0] != "set" or split_key(k)[1] == "feat_post"]
        if strange:
            raise UsageError(
                f"--sweep {strange[0]}: a grid that travels in one message varies what heads are trained with.",
                f"Run it once for each: fedcache flower app --{strange[0].replace('_', '-')} VALUE",
            )
        for _, config in self.points:
            check_suited(method, method.resolve(config.preset, config.set), config)
        for name, value, low in (
            ("--sites", self.sites, 1),
            ("--quorum", self.quorum, 1),
            ("--start-with", self.terms.start_with, 1),
        ):
            if not low <= value <= self.sites:
                raise UsageError(f"{name} {value}, and there are {self.sites} sites.", f"From {low} to {self.sites}.")
        check_participation(self.train, self.sites)
        for name, seconds, usual in (("--wait", self.wait, 120), ("--timeout", self.timeout, 600)):
            if not seconds > 0:
                raise UsageError(f"{name} {seconds:g} is not above 0.", f"For example {name} {usual}")
        return self

    def to_config(self) -> dict[str, str | int | float | bool]:
        """Flat, for ``[tool.flwr.app.config]``; ``flwr run --run-config`` changes what is in it."""
        table = to_table(self.train)
        made: dict[str, str | int | float | bool] = {}
        for name in TRAIN:
            value = table.get(name, "")
            made[name.replace("_", "-")] = ",".join(value) if isinstance(value, list) else value
        made["set"] = " ".join(f"{k}={v}" for k, v in self.train.set.items())
        made["sweep"] = " ".join(f"{k}={','.join(v)}" for k, v in self.sweep.items())
        for item in fields(self):
            if item.name in ("train", "sweep"):
                continue
            value = getattr(self, item.name)
            made[item.name.replace("_", "-")] = "" if value is None else value
        return made

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_config``; what is "" was not given.

        Raises:
            UsageError.
        """
        given = {k.replace("-", "_"): v for k, v in config.items() if v != ""}
        settings = dict(pair.split("=", 1) for pair in str(given.pop("set", "")).split())
        sweep = {k: tuple(v.split(",")) for k, v in (p.split("=", 1) for p in str(given.pop("sweep", "")).split())}
        own = {f.name for f in fields(cls)}
        train = {k: v for k, v in given.items() if k not in own}
        for name in ("rounds", "participation", "seeds", "byzantine", "max_update_norm"):
            if name in train:  # `--run-config seeds=3` is a number to Flower
                train[name] = str(train[name]) if name in ("participation", "seeds") else train[name]
        section = {**train, "set": settings, "lift": "sequential", "device": "cpu"}
        try:
            rest = {k: v for k, v in given.items() if k in own}
            return cls(resolve(TrainConfig, section, {}, "the app's configuration"), sweep, **rest).checked()
        except TypeError as error:
            raise UsageError(
                f"The app's configuration has a wrong value: {error}.", "Write it anew: fedcache flower app"
            ) from error
