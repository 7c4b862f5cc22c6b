"""Plan of a federation: its checks, and its form on disk as a Flower app.

An app is a flat configuration of words and numbers, as Flower requires, and two lines of Python that are equal for all
methods.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedcache.config import TrainConfig, resolve, to_table
from fedcache.errors import UsageError, shell_word
from fedcache.federate.engine.client_data import SHARED_SUMS
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, clients_per_round, keep_down
from fedcache.federate.engines.flower import TRAIN
from fedcache.federate.engines.flower.masking import BOUND, LEAST_SITES, check_secure
from fedcache.federate.engines.flower.sites import Terms
from fedcache.federate.methods import find_method
from fedcache.grids.points import check_sweeps, split_key
from fedcache.parsing import Record, parse_toml
from fedcache.runs.spec import (
    SAMPLING_OPTIONS,
    TIMING_OPTIONS,
    check_participation,
    check_values,
    parse_participation,
    parse_seeds,
    participation_text,
    policy_from_config,
)
from fedcache.store.lock import write_output

IN_PROCESS = "To simulate it in one process: fedcache train --clients-from DIR --method {}"

PACKAGE = "fedcache_app"
NEEDS = "flwr>=1.41,<1.42"
VERSION = "1.0.0"
MARK = "Written by fedcache flower app"

README = """# {name}

{mark}: {method} over {sites} sites.

    fedcache flower run {folder} --superlink HOST:PORT --keys KEYS

`[tool.flwr.app.config]` in pyproject.toml configures this app. The Python code is the same for every method.
"""


def why_not(method: Method, hp: Hp) -> str | None:
    """Why a method cannot run over sites, in words; None for one that exchanges only uploads."""
    needs = method.reads(hp)
    if method.central:
        return "it trains on all clients' rows in one place"
    if "public" in needs:
        return "its clients share a public set of rows"
    live = " and ".join(sorted(needs & {"pixels", "text tower", "image tower"}))
    if live:
        return f"its clients need {live}, but shards have only features"
    if method.deploy is not keep_down:
        return "its models are scored by a probe that is trained on all clients' rows"
    if method.protocol(hp) == "everywhere":
        return "its models are scored on all clients' rows"
    feat_post = hp.get("feat_post")
    if feat_post in SHARED_SUMS:
        return f"feat_post={feat_post} takes means over all clients' rows"
    if "row norms" in needs:
        return "rff_sigma=auto takes the mean length of all clients' rows: --set rff_sigma=NUMBER"
    if "row counts" in needs:
        return "its clients need the mean number of rows over all clients"
    return None


def check_suited(method: Method, hp: Hp, config: TrainConfig) -> None:
    """Refuse methods and options that cannot run over sites. Raises UsageError, with the reason."""
    simulation = IN_PROCESS.format(method.name)
    why = why_not(method, hp)
    if why is not None:
        raise UsageError(f"{method.name} cannot run over sites: {why}.", simulation)
    if config.attack is not None:
        raise UsageError(
            "--attack simulates malicious clients, but the sites are real.",
            f"{simulation} --attack {shell_word(config.attack)}",
        )
    if config.dp_clip is not None or config.dp_noise is not None:
        raise UsageError(
            "--dp-clip and --dp-noise cannot be used over sites, because they protect only uploads. Sites also report "
            "their numbers of rows, classes and correct predictions, and see in which rounds they take part.",
            f"{simulation} --dp-clip 1 --dp-noise 1 --dp-seed 0   shows how much accuracy the noise costs",
        )
    # Sampling and timing are options of a simulation, so only their defaults are accepted.
    plain = TrainConfig()
    options = {}
    for name in (*SAMPLING_OPTIONS, *TIMING_OPTIONS):
        value = getattr(config, name)
        if value != getattr(plain, name):
            options[_option(name)] = shell_word(value)
    if options:
        words = [f"{option} {value}" for option, value in options.items()]
        raise UsageError(
            f"{', '.join(options)} simulates participation or training time, but the sites are real.",
            " ".join([simulation, *words]),
        )
    of_partition = ("client_backbones", "client_set", "domain", "partition")
    given = [_option(name) for name in of_partition if getattr(config, name)]
    if given:
        raise UsageError(
            f"{', '.join(given)} assigns rows to clients, but the sites already have their rows.",
            "Leave it out: every site is a client.",
        )


def _option(name: str) -> str:
    """The option of the command line that sets a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Plan:
    """A run, or a grid of runs that share their messages, and how long the server waits."""

    train: TrainConfig  # of every point; ``execution`` is ``sequential``: each site is one client
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # hyperparameter -> values
    sites: int = 2  # number of sites
    start_with: int | None = None  # sites that are enough when ``wait`` is over; None for all
    like: str = ""  # name of the site that the others must agree with; "" for the majority
    quorum: int = 1  # least valid uploads of a round
    wait: float = 120.0  # seconds for the sites to come
    timeout: float = 600.0  # seconds for an answer
    runs: str = ""  # directory of results, on the server; "" for runs in the server's home
    fresh: bool = False  # run again although results are stored
    secure: bool = False  # whether the server gets only the sum of a round's uploads
    secure_bound: float = BOUND  # largest absolute value in an upload with ``secure``
    answer: str = ""  # not used, but apps contain it

    @property
    def terms(self) -> Terms:
        """The waiting times and numbers of sites."""
        start_with = self.start_with
        if start_with is None:
            start_with = self.sites
        return Terms(
            self.sites,
            start_with,
            self.quorum,
            self.wait,
            self.timeout,
            max_rows=self.train.max_rows_per_client,
            like=self.like,
        )

    @property
    def points(self) -> list[tuple[dict[str, str], TrainConfig]]:
        """Every combination of the swept values, and its configuration.

        By default an invalid upload is left out of its round. With secure aggregation it ends the run, because it
        cannot be taken out of a sum.
        """
        on_bad = self.train.on_bad_update
        if on_bad is None and self.secure:
            on_bad = "fail"
        made = []
        for values in itertools.product(*self.sweep.values()):
            swept = dict(zip(self.sweep, values, strict=True))
            settings = dict(self.train.set)
            for key, value in swept.items():
                _, name = split_key(key)
                settings[name] = value
            config = replace(self.train, set=settings, on_bad_update=on_bad or "reject")
            made.append((swept, config))
        return made

    def checked(self) -> Plan:
        """This plan, after all checks. Raises UsageError."""
        if self.train.method is None:
            raise UsageError("No method was given.", "For example --method fed3r")
        method = find_method(self.train.method)
        hp = method.resolve(self.train.preset, self.train.set)
        check_suited(method, hp, self.train)
        check_values(self.train)
        parse_seeds(self.train.seeds)
        parse_participation(self.train.participation)
        check_sweeps([self.train.method], self.sweep)
        for key in self.sweep:
            section, name = split_key(key)
            # A message has one ``feat_post`` for all points, so a sweep cannot change it.
            if section != "set" or name == "feat_post":
                raise UsageError(
                    f"--sweep {key}: only hyperparameters of the training can be swept in a federation.",
                    f"Make one app per value: fedcache flower app {_option(key)} VALUE",
                )
        for _, config in self.points:
            hp = method.resolve(config.preset, config.set)
            check_suited(method, hp, config)
        terms = self.terms
        if terms.sites < 1:
            raise UsageError(
                f"--sites is {terms.sites}, but a run needs a site.", "For example --sites 2"
            )
        for name, value in (
            ("--quorum", terms.quorum),
            ("--start-with", terms.start_with),
        ):
            if not 1 <= value <= self.sites:
                raise UsageError(
                    f"{name} is {value}, but there are {self.sites} sites.",
                    f"Give a number from 1 to {self.sites}.",
                )
        check_participation(self.train, self.sites)
        if self.secure:
            self._check_secure(method)
        for name, seconds, usual in (("--wait", self.wait, 120), ("--timeout", self.timeout, 600)):
            if not seconds > 0:
                raise UsageError(
                    f"{name} {seconds:g} is not above 0.", f"For example {name} {usual}"
                )
        return self

    def _check_secure(self, method: Method) -> None:
        """Refuse a plan that secure aggregation does not support or would not protect. Raises UsageError."""
        for _, config in self.points:
            hp = method.resolve(config.preset, config.set)
            policy = policy_from_config(config, method)
            check_secure(method, hp, policy)
        participation = parse_participation(participation_text(self.train, method, self.sites))
        per_round = clients_per_round(participation, self.sites)
        if min(self.sites, per_round) < LEAST_SITES:
            raise UsageError(
                f"--secure needs at least {LEAST_SITES} sites per round, because a sum of fewer reveals "
                "single uploads.",
                f"--sites {LEAST_SITES} or more, and --participation all",
            )
        # Two sums over different sites differ by the uploads of single sites.
        if per_round < self.sites:
            raise UsageError(
                f"--secure needs all sites in every round, but only {per_round} of {self.sites} are drawn. The "
                "difference of two sums over different sites would reveal single uploads.",
                "--participation all",
            )
        if method.one_shot and len(parse_seeds(self.train.seeds)) > 1:
            raise UsageError(
                f"--secure allows only one seed of {method.name}, because a site sends the same upload for every seed. "
                "If a site drops out after one seed, the sums of two seeds differ by the upload of this site, and "
                "so reveal it.",
                "--seeds 0",
            )
        if not 0 < self.secure_bound < float("inf"):
            raise UsageError(
                f"--secure-bound {self.secure_bound:g} is not above 0.", f"For example {BOUND:g}"
            )

    def to_config(self) -> dict[str, str | int | float | bool]:
        """The plan as a flat table for ``[tool.flwr.app.config]``; ``flwr run --run-config`` can override it."""
        table = to_table(self.train)
        values = {name: table.get(name, "") for name in TRAIN if name != "set"}
        settings = [f"{name}={value}" for name, value in self.train.set.items()]
        values["set"] = " ".join(settings)
        sweeps = [key + "=" + ",".join(swept) for key, swept in self.sweep.items()]
        values["sweep"] = " ".join(sweeps)
        for f in fields(self):
            if f.name not in ("train", "sweep"):
                values[f.name] = getattr(self, f.name)
        made: dict[str, str | int | float | bool] = {}
        for name, value in values.items():
            if value is None:
                value = ""
            elif isinstance(value, list):
                value = ",".join(value)
            made[name.replace("_", "-")] = value
        return made

    @classmethod
    def from_config(cls, config: Record) -> Plan:
        """The inverse of ``to_config``; "" stands for an option at its default. Raises UsageError."""
        given = {}
        for option, value in config.items():
            if value != "":
                given[option.replace("-", "_")] = value
        settings = _pairs(given.pop("set", ""))
        swept = _pairs(given.pop("sweep", ""))
        sweep = {key: tuple(values.split(",")) for key, values in swept.items()}
        # Flower turns words like `--run-config seeds=3` into numbers.
        for name in ("participation", "seeds", "like"):
            if name in given:
                given[name] = str(given[name])
        plan_fields = {}
        for f in fields(cls):
            if f.name in given:
                plan_fields[f.name] = given.pop(f.name)
        section = {**given, "set": settings, "execution": "sequential", "device": "cpu"}
        try:
            made = resolve(TrainConfig, section, {}, "the app's configuration")
            return cls(made, sweep, **plan_fields).checked()
        except TypeError as error:
            raise UsageError(
                f"The configuration of the app has an invalid value: {error}.",
                "Make the app again: fedcache flower app",
            ) from error


def _pairs(text: Any) -> dict[str, str]:
    """The names and values of a text such as ``lr=0.1 head=linear``."""
    return dict(pair.split("=", 1) for pair in str(text).split())


def write_app(plan: Plan, path: Path) -> Path:
    """Write the app of a plan, also over an older app; returns its directory.

    Raises UsageError for a path with other files.
    """
    path = path.expanduser().resolve()
    is_used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if is_used and not _is_app(path):
        raise UsageError(
            f"{path} exists, but is not a fedcache app.",
            "Choose another place: fedcache flower app --out DIR",
        )
    name = f"fedcache-{plan.train.method}"[:32]
    # Flower packs this folder and sends it to the sites, which import fedcache from their own installation.
    table = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": VERSION,
            "description": f"{MARK}: {plan.train.method}",
            "license": "Apache-2.0",
            "dependencies": [NEEDS],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": [PACKAGE]}}}},
            "flwr": {
                "app": {
                    "publisher": "fedcache",
                    "components": {
                        "serverapp": f"{PACKAGE}.server:app",
                        "clientapp": f"{PACKAGE}.client:app",
                    },
                    "config": plan.to_config(),
                }
            },
        },
    }
    files = {
        "pyproject.toml": tomli_w.dumps(table),
        "README.md": README.format(
            name=name, mark=MARK, method=plan.train.method, sites=plan.sites, folder=path.name
        ),
        f"{PACKAGE}/__init__.py": f'"""{MARK}."""\n',
        f"{PACKAGE}/client.py": 'from fedcache.federate.engines.flower.client_app import app\n\n__all__ = ["app"]\n',
        f"{PACKAGE}/server.py": 'from fedcache.federate.engines.flower.server_app import app\n\n__all__ = ["app"]\n',
    }
    (path / PACKAGE).mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        write_output(path / file, content.encode())
    return path


def read_app(path: Path) -> Plan:
    """The plan of the app in a directory. Raises UsageError for a directory without an app."""
    file = path / "pyproject.toml"
    try:
        table = parse_toml(file.read_text())
        config = table["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a Flower app.",
            f"Make one: fedcache flower app --method fed3r --out {shell_word(path)}",
        ) from error
    return Plan.from_config(config)


def _is_app(path: Path) -> bool:
    """Whether fedcache wrote an app into the directory."""
    try:
        return MARK in (path / "pyproject.toml").read_text()
    except OSError:
        return False
