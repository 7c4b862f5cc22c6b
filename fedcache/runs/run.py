"""A finished run for Python and notebooks: figures by name, a one-line summary, facts, and data frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedcache.errors import unknown
from fedcache.notebooks import data_frame, html_facts, percent
from fedcache.parsing import Facts, Record, counted
from fedcache.runs.directory import ClientColumns, client_columns, rounds_of
from fedcache.runs.score import at_chance

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method
    from fedcache.models.model import Model

FRAMES = ("rounds", "clients")


class Figures(Record):
    """A part of a result, read-only. ``what`` is its name for messages, such as ``accuracy``."""

    def __init__(self, what: str, values: Record) -> None:
        self._what = what
        self._values = values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if isinstance(value, Mapping):
            return Figures(f"{self._what}.{name}", value)
        return value

    def __getattr__(self, name: str) -> Any:
        # ``copy`` and ``pickle`` look for special methods before the values are set.
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            names = ", ".join(dir(self))
            raise AttributeError(f"{self._what} has no {name!r}; it has {names}")
        return self[name]

    def __dir__(self) -> list[str]:
        return [name for name in self._values if name.isidentifier()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shown = [
            f"{name}={value!r}"
            for name, value in self._values.items()
            if not isinstance(value, list | Mapping)
        ]
        listed = ", ".join(shown)
        return f"{self._what}({listed})"

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return dict(self._values)


class TrafficFigures(Figures):
    """Traffic of a run, with short names for the exact bytes."""

    @property
    def bytes_up(self) -> int:
        """Bytes that all clients sent in all rounds and seeds, counted from their uploads."""
        return int(self._values["exact"]["up_bytes"])

    @property
    def bytes_down(self) -> int:
        """Bytes that all clients received in all rounds and seeds."""
        return int(self._values["exact"]["down_bytes"])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "bytes_down", "bytes_up"]


def is_claimed(result: Record) -> bool:
    """Whether the sites of a federation reported the accuracy of a result. They did if the result does not say."""
    federation = result.get("federation")
    return federation is not None and "accuracy" in federation.get("claimed", ("accuracy",))


def sites_words(result: Record) -> str:
    """``2 of 3 sites (without: south)``, from the result of a federation; ``3 sites`` if no site was missing."""
    federation = result["federation"]
    sites = federation["sites"]
    expected = federation.get("expected", len(sites))  # results of 0.2.0 lack the number
    words = counted(len(sites), "site")
    # A site that joins late may be one more than was expected.
    if len(sites) < expected:
        words = f"{len(sites)} of {expected} sites"
    absent = {}
    partly = {}
    for missed in federation["missed"]:
        name = missed["site"]
        if name not in sites:
            absent[name] = missed
        elif missed["round"] > 0:
            partly[name] = missed
    notes = []
    for why, names in (
        ("without", absent),
        ("missing, rejected or not scored in some rounds", partly),
    ):
        if names:
            listed = ", ".join(names)
            notes.append(f"{why}: {listed}")
    if notes:
        noted = "; ".join(notes)
        words += f" ({noted})"
    return words


def spread(accuracy: Record) -> str:
    """``0.8123 +- 0.0045``; only the mean for one seed or equal seeds; ``not scored`` without test labels."""
    mean = accuracy["mean"]
    std = accuracy["std"]
    equal = len(set(accuracy.get("per_seed", ()))) == 1
    if mean is None:
        return "not scored"
    if std is None or equal:
        return f"{mean:.4f}"
    return f"{mean:.4f} +- {std:.4f}"


def facts_of(result: Record, measured: Record, path: Path) -> Facts:
    """The main facts of a run, by name; None for facts that the run does not have."""
    part = result["partition"]
    exact = result["traffic"]["exact"]
    seconds = measured.get("seconds", {})
    chance = at_chance(result)
    guess = None
    if chance is not None:
        guess = f"{percent(chance.level)}; the result is no better"
    claimed = ""
    note = None
    if is_claimed(result):
        claimed = " (claimed)"
        note = "each site scored itself; the server cannot check the result"
    trained = None
    if "train" in seconds:
        trained = f"{seconds['train']:,.2f}"
    scheme = part["scheme"]
    rounds = result["rounds"]
    up = exact["up_bytes"]
    return {
        f"accuracy{claimed}": percent(result["accuracy"]["mean"]),
        "a guess": guess,
        "validation accuracy": percent(result.get("validation", {}).get("mean")),
        "std over seeds": percent(result["accuracy"]["std"]),
        f"worst 10 % of clients{claimed}": percent(result["fairness"].get("worst10")),
        f"macro-F1{claimed}": percent(result["macro_f1"]["mean"]),
        "claimed": note,
        "partition": f"{scheme}, {part['clients']} clients",
        "rounds": f"{rounds}, {result['participation']} clients per round",
        "seeds": ", ".join(map(str, result["seeds"])),
        "bytes up, down": f"{up:,}, {exact['down_bytes']:,}",
        "fidelity": result["fidelity"],
        "seconds of training": trained,
        "directory": path,
    }


def values_of(words: Sequence[str | None]) -> list[Any]:
    """Swept words as numbers, if all of them are numbers."""
    for kind in (int, float):
        try:
            return [None if word is None else kind(word) for word in words]
        except ValueError:
            continue
    return list(words)


@dataclass
class Run:
    """A finished run."""

    path: Path  # its directory
    result: Facts  # content of ``result.json``
    measured: Facts  # content of ``measured.json``, from the training that made the result
    reused: bool = False  # whether the result was stored already

    @property
    def accuracy(self) -> Figures:
        """mean, std (over seeds, ddof 1), per_seed and per_client, as fractions; in a federation, sites report them."""
        return Figures(self._label_of("accuracy"), self.result["accuracy"])

    @property
    def validation(self) -> Figures:
        """Accuracy on validation rows: mean, std, per_seed, per_client, client_mean, pooled; {} without such rows."""
        return Figures("validation", self.result.get("validation", {}))

    @property
    def clients(self) -> ClientColumns:
        """Name, accuracy and classes of every client.

        Raises DamagedRunError if the result has a file of many clients that is missing or was changed.
        """
        return client_columns(self.result, self.path)

    @property
    def claimed(self) -> bool:
        """Whether accuracy, F1 and fairness were reported by the sites of a federation, which a server cannot check."""
        return is_claimed(self.result)

    @property
    def traffic(self) -> TrafficFigures:
        """Scalars and bytes up and down, exact and as the paper counts; ``bytes_up`` and ``bytes_down`` are exact."""
        return TrafficFigures("traffic", self.result["traffic"])

    @property
    def fairness(self) -> Figures:
        """Spread of accuracy over clients; the mean of a tail is None if there are too few clients for it."""
        return Figures(self._label_of("fairness"), self.result["fairness"])

    @property
    def trust(self) -> Figures:
        """Aggregation rule, attack, attackers, rejected uploads and privacy; {} for an ordinary run."""
        return Figures("trust", self.result.get("trust", {}))

    def model(
        self,
        seed: int | Literal["all"] | None = None,
        client: str | None = None,
        method: Method | None = None,
        *,
        one_for_all: bool = False,
    ) -> Model:
        """The trained model, ready to classify images or features.

        Args:
            seed: a seed of the run; ``"all"`` for the ensemble of all seeds; None for the first.
            client: name of a client, if the method trains one model for each client.
            method: your own ``Method``, if the run was trained with it.
            one_for_all: whether to load the server's model, if the method trains personal models next to it.

        Raises UsageError for a seed or client that the run does not have, StoreError for a run without models,
        CorruptionError for a file that was changed.
        """
        from fedcache.runs import predict_run

        return predict_run.load_model(self.path, client, seed, method, one_for_all=one_for_all)

    def to_dict(self) -> Facts:
        """The ``data`` of the JSON output."""
        return {
            **self.result,
            "seconds": self.measured.get("seconds", {}),
            "path": str(self.path),
            "reused": self.reused,
        }

    def frame(self, what: str = "rounds") -> Any:
        """A pandas data frame: ``rounds`` with a row per seed and round, or ``clients`` with a row per client.

        The column ``claimed`` says whether the sites of a federation reported the ``accuracy``.

        Raises UsageError for another word; MachineError without pandas.
        """
        if what not in FRAMES:
            raise unknown("frame", what, FRAMES)
        if what == "clients":
            columns = self.clients
            frame: Facts = {"client": list(columns.names), "accuracy": columns.accuracy}
            if columns.validation is not None:
                frame["validation"] = columns.validation
            frame["claimed"] = self.claimed
            frame["classes_owned"] = columns.classes_owned
            return data_frame(frame)
        records = rounds_of(self.path)
        counts: list[int | None] = []
        for record in records:
            if record["clients"] is None:
                counts.append(None)
            else:
                counts.append(len(record["clients"]))
        columns_of_rounds: Facts = {
            "seed": [record["seed"] for record in records],
            "round": [record["round"] for record in records],
            "clients": counts,
            "accuracy": [record["accuracy"] for record in records],
            "claimed": self.claimed,
            "bytes_up": [record["traffic"]["up_bytes"] for record in records],
            "bytes_down": [record["traffic"]["down_bytes"] for record in records],
        }
        diagnostics = [record.get("diagnostics", {}) for record in records]
        for name in dict.fromkeys(chain(*diagnostics)):
            columns_of_rounds[name] = [of_round.get(name) for of_round in diagnostics]
        return data_frame(columns_of_rounds)

    def __repr__(self) -> str:
        accuracy = spread(self.result["accuracy"])
        claimed = ""
        if self.claimed:
            claimed = " (claimed)"
        return f"Run({self._title()}: {accuracy}{claimed}, {self.path})"

    def _repr_html_(self) -> str:
        return html_facts(f"Run: {self._title()}", facts_of(self.result, self.measured, self.path))

    def _label_of(self, figure: str) -> str:
        if self.claimed:
            return f"claimed {figure}"
        return figure

    def _title(self) -> str:
        r = self.result
        dataset = r["dataset"]["slug"]
        backbones = " + ".join(r["backbones"])
        return f"{r['method']} on {dataset}, {backbones}"
