"""The study: data, backbones, partitions and treatments, which are read from one TOML file and checked."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files

from fedcache.errors import InternalError, UsageError, unknown
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES
from fedcache.parsing import Facts, Record

NAME = "frozen-bench"
AXES = ("data", "backbone", "partition", "treatment")
"""Labels that ``--only`` selects by."""
TEXTS = frozenset({"text", "text tower"})
"""Inputs of methods that only backbones with a text tower provide."""


@dataclass(frozen=True)
class BenchPartition:
    """A scheme that assigns rows to clients.

    Attributes:
        scheme: name of the partition scheme.
        clients: number of clients; None where the data determine it.
        options: arguments of the scheme.
        domains: smallest number of domains that the data must have.
    """

    scheme: str
    clients: int | None = None
    options: Record = field(default_factory=dict)
    domains: int = 1


@dataclass(frozen=True)
class BenchBackbone:
    """The data that a backbone is used for.

    Attributes:
        data: labels of the only data that it is used for; () for all.
        skip: labels of data that it is not used for.
        replaces: a backbone with the same image features, which is left out where this one is used; "" for none.
    """

    data: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    replaces: str = ""

    def reads(self, label: str) -> bool:
        """Whether it is used for the data of this label."""
        if self.data and label not in self.data:
            return False
        return label not in self.skip


@dataclass(frozen=True)
class BenchTreatment:
    """A method with settings.

    Attributes:
        method: name of the method.
        family: name of a group of similar treatments.
        is_global: whether it trains one model for all clients.
        reads_texts: whether it needs a backbone with a text tower.
        set: hyperparameters, the same in every block.
        search: hyperparameter -> its candidates in ascending order; in every block, validation rows choose one.
    """

    method: str
    family: str
    is_global: bool
    reads_texts: bool
    set: Record = field(default_factory=dict)
    search: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """Number of combinations that are tried first."""
        return math.prod(len(values) for values in self.search.values())


@dataclass(frozen=True)
class Study:
    """The protocol of the study; a block is one combination of data, backbone and partition.

    Attributes:
        title: the question.
        rounds: of every treatment that has rounds.
        participation: clients a round.
        seeds: seeds of the runs that are compared; each draws its own partition, the same for every treatment.
        search_seeds: seeds of the runs that are scored on validation rows.
        validation: share of every client's training rows that is held out for validation.
        extend: number of values beyond each end of a searched range that are tried while validation improves.
        client_prior: client prior with which methods with one global model are scored in addition.
        limit: number of images of each data set, evenly spaced.
        data: label -> spec of the dataset.
        backbones: name -> the data that it is used for.
        partitions: label -> how rows are assigned.
        treatments: label -> method and settings.
        recipe: fields of the backbones' recipes that a user changes.
    """

    title: str
    rounds: int
    participation: str
    seeds: str
    search_seeds: str
    validation: str
    extend: int
    client_prior: str
    limit: int | None
    data: Mapping[str, str]
    backbones: Mapping[str, BenchBackbone]
    partitions: Mapping[str, BenchPartition]
    treatments: Mapping[str, BenchTreatment]
    recipe: Mapping[str, str] = field(default_factory=dict)

    def only(self, labels: Mapping[str, Sequence[str]]) -> Study:
        """The part of the study with these labels; ``labels`` is axis -> values.

        Raises:
            UsageError with "did you mean" for an unknown axis or value.
        """
        changed: Facts = {}
        for axis, values in labels.items():
            if axis not in AXES:
                raise unknown(f"label of {NAME}", axis, AXES)
            # The fields are called data, backbones, partitions and treatments.
            name = f"{axis}s"
            if axis == "data":
                name = axis
            have: Record = getattr(self, name)
            if axis == "treatment":
                # A method that is no treatment of the study, such as one of a plugin, is added with its default values.
                own = [value for value in values if value not in have and value in METHODS]
                have = {**have, **{value: treatment_of(value, "added", {}, {}) for value in own}}
            for value in values:
                if value not in have:
                    raise unknown(f"{axis} of {NAME}", value, have)
            changed[name] = {label: have[label] for label in have if label in values}
        return replace(self, **changed)

    def with_data(self, specs: Sequence[str]) -> Study:
        """The study on these data sets: each a spec, or ``LABEL=SPEC``.

        Raises:
            UsageError for two data sets with the same label.
        """
        found = {}
        for text in specs:
            label, equals, spec = text.partition("=")
            # A text with a colon before its first ``=``, such as ``folder:a=b``, is a spec without a label. One data
            # set of two domains, ``a=SPEC,b=SPEC``, is given as ``LABEL=a=SPEC,b=SPEC``, because without a label it
            # would be read as the data set ``a``.
            if not equals or ":" in label:
                label = label_of(text)
                spec = text
            if label in found:
                raise UsageError(
                    f"Two data sets are called {label}.",
                    f"Give one of them another label: --on {label}-2={spec}",
                )
            found[label] = spec
        if found:
            return replace(self, data=found)
        return self


def label_of(spec: str) -> str:
    """A short name of a dataset: the last part of its spec, without the ending of a file."""
    last = spec.rstrip("/").rsplit("/", 1)[-1]
    last = last.rsplit(":", 1)[-1]
    stem = last.rsplit(".", 1)[0]
    return stem or last


@cache
def read_study() -> Study:
    """The study of the package. Raises InternalError, naming what is wrong in its file."""
    file = files("fedcache.reproduce.frozen_bench") / f"{NAME}.toml"
    return parse_study(tomllib.loads(file.read_text(encoding="utf-8")))


def parse_study(data: Record) -> Study:
    """A study from the values of a file.

    Raises:
        InternalError for an unknown key, scheme, method or setting.
    """
    names = {f.name for f in fields(Study)} - {"recipe"}
    for key in names ^ set(data):
        if key in data:
            raise _wrong(f"unknown key {key}")
        raise _wrong(f"missing {key}")
    made = {
        **data,
        "data": {label: source["dataset"] for label, source in data["data"].items()},
        "backbones": {k: BenchBackbone(**v) for k, v in data["backbones"].items()},
        "partitions": {k: BenchPartition(**v) for k, v in data["partitions"].items()},
        "treatments": {k: _treatment(k, v) for k, v in data["treatments"].items()},
    }
    for label, bench_partition in made["partitions"].items():
        if bench_partition.scheme == "natural":
            continue
        if bench_partition.scheme not in SCHEMES:
            raise _wrong(f"partition {label}: no scheme {bench_partition.scheme}")
        SCHEMES[bench_partition.scheme].resolve(dict(bench_partition.options))
    return Study(**made)


def _treatment(label: str, data: Record) -> BenchTreatment:
    name = data.get("method", label)
    if name not in METHODS:
        raise _wrong(f"treatment {label}: no method {name}")
    search = {key: tuple(values) for key, values in data.get("search", {}).items()}
    settings = data.get("set", {})
    made = treatment_of(name, data["family"], settings, search)
    for key, values in search.items():
        for value in values:
            METHODS[name].hparam(key).parse(value)
    return made


def treatment_of(
    name: str, family: str, settings: Record, search: Mapping[str, Sequence[str]]
) -> BenchTreatment:
    """A method with settings. Raises UsageError for an unknown hyperparameter or value."""
    method = METHODS[name]
    hp = method.resolve("paper", settings)
    reads_texts = bool(method.reads(hp) & TEXTS) or hp.get("init") == "text"
    is_global = method.protocol(hp) == "global"
    return BenchTreatment(name, family, is_global, reads_texts, settings, search)


def _wrong(what: str) -> InternalError:
    return InternalError(f"The file {NAME}.toml is wrong: {what}.", "Please report it.")
