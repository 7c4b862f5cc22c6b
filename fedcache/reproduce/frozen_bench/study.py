"""Study file: one TOML file of data, backbones, partitions and treatments, read and checked."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from fedcache.errors import InternalError, UsageError, unknown
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES

NAME = "frozen-bench"
AXES = ("data", "backbone", "partition", "treatment")
"""What ``--only`` may name."""
TEXTS = frozenset({"text", "text tower"})
"""Needs that only backbones with a text tower meet."""


@dataclass(frozen=True)
class BenchData:
    """One set of images.

    Attributes:
        dataset: a spec.
    """

    dataset: str


@dataclass(frozen=True)
class BenchBackbone:
    """One frozen backbone.

    Attributes:
        data: labels of the data it is for; () for all.
    """

    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchPartition:
    """A scheme that assigns rows to clients.

    Attributes:
        scheme: of the partition.
        clients: how many; None where the data say.
        options: arguments of the scheme.
        domains: how many domains the data must have.
    """

    scheme: str
    clients: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    domains: int = 1


@dataclass(frozen=True)
class BenchTreatment:
    """A method with settings.

    Attributes:
        method: its name.
        family: treatments that are of a kind.
        set: hyperparameters, the same everywhere.
        search: hyperparameter -> the values of which validation rows choose one, in every block.
    """

    method: str
    family: str
    set: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """Combinations that are tried."""
        return math.prod(len(values) for values in self.search.values())

    @property
    def reads_texts(self) -> bool:
        """Whether it needs a backbone with a text tower."""
        hp = METHODS[self.method].resolve("paper", self.set)
        return bool(METHODS[self.method].reads(hp) & TEXTS) or hp.get("init") == "text"


@dataclass(frozen=True)
class Study:
    """The protocol of the study; a block is one combination of data, backbone and partition.

    Attributes:
        title: the question.
        rounds: of every treatment that has rounds.
        participation: clients a round.
        seeds: of the runs that are compared; each draws its own partition, the same for every treatment.
        search_seeds: of the runs on validation rows.
        validation: share of every client's training validation rows.
        limit: so many images of each data set, evenly spaced.
        data: label -> images.
        backbones: by name.
        partitions: label -> how rows are assigned.
        treatments: label -> method and settings.
    """

    title: str
    rounds: int
    participation: str
    seeds: str
    search_seeds: str
    validation: str
    limit: int | None
    data: Mapping[str, BenchData]
    backbones: Mapping[str, BenchBackbone]
    partitions: Mapping[str, BenchPartition]
    treatments: Mapping[str, BenchTreatment]

    def only(self, labels: Mapping[str, Sequence[str]]) -> Study:
        """The part with these values of these axes.

        Raises:
            UsageError with "did you mean" for an axis or value that is not there.
        """
        changed: dict[str, Any] = {}
        for axis, values in labels.items():
            if axis not in AXES:
                raise unknown(f"label of {NAME}", axis, AXES)
            if axis == "data":
                name = axis
            else:
                name = f"{axis}s"
            have: Mapping[str, Any] = getattr(self, name)
            for value in values:
                if value not in have:
                    raise unknown(f"{axis} of {NAME}", value, have)
            changed[name] = {label: have[label] for label in have if label in values}
        return replace(self, **changed)

    def with_data(self, specs: Sequence[str]) -> Study:
        """The study on these data sets: each a spec, or ``LABEL=SPEC``.

        Raises:
            UsageError for two of one label.
        """
        found: dict[str, BenchData] = {}
        for text in specs:
            label, equals, spec = text.partition("=")
            # ``a=SPEC,b=SPEC`` is one data set of two domains: it needs a label too
            if not equals or ":" in label:
                label = label_of(text)
                spec = text
            if label in found:
                raise UsageError(
                    f"Two data sets are called {label}.", f"Name them: --on {label}-2={spec}"
                )
            found[label] = BenchData(spec)
        if found:
            return replace(self, data=found)
        return self


def label_of(spec: str) -> str:
    """A short name of a dataset: the last part of its spec, without the ending of a file."""
    last = spec.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    if last.rsplit(".", 1)[0]:
        return last.rsplit(".", 1)[0]
    return last


@cache
def read_study() -> Study:
    """The study of the package. Raises InternalError, naming what is wrong in its file."""
    text = (files("fedcache.reproduce.frozen_bench") / f"{NAME}.toml").read_text(encoding="utf-8")
    return parse_study(tomllib.loads(text))


def parse_study(data: Mapping[str, Any]) -> Study:
    """A study from the values of a file.

    Raises:
        InternalError for an unknown key, scheme, method or setting.
    """
    plain = {f.name for f in fields(Study)}
    for key in plain ^ set(data):
        if key in data:
            raise _wrong(f"unknown key {key}")
        raise _wrong(f"missing {key}")
    made = {
        **data,
        "data": {k: BenchData(**v) for k, v in data["data"].items()},
        "backbones": {
            k: BenchBackbone(tuple(v.get("data", ()))) for k, v in data["backbones"].items()
        },
        "partitions": {k: BenchPartition(**v) for k, v in data["partitions"].items()},
        "treatments": {k: _treatment(k, v) for k, v in data["treatments"].items()},
    }
    for label, deal in made["partitions"].items():
        if deal.scheme == "natural":
            continue
        if deal.scheme not in SCHEMES:
            raise _wrong(f"partition {label}: no scheme {deal.scheme}")
        SCHEMES[deal.scheme].resolve(dict(deal.options))
    return Study(**made)


def _treatment(label: str, data: Mapping[str, Any]) -> BenchTreatment:
    name = data.get("method", label)
    if name not in METHODS:
        raise _wrong(f"treatment {label}: no method {name}")
    made = BenchTreatment(
        name,
        data["family"],
        data.get("set", {}),
        {k: tuple(v) for k, v in data.get("search", {}).items()},
    )
    METHODS[name].resolve("paper", made.set)
    for key, values in made.search.items():
        for value in values:
            METHODS[name].hparam(key).parse(value)
    return made


def _wrong(what: str) -> InternalError:
    return InternalError(f"The file {NAME}.toml is wrong: {what}.", "Please report it.")
