"""Results: the result of one seed, and the result of a run over all its seeds."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcache.extract.backbones.rows import PARAMETERS
from fedcache.federate.engine.outcome import Evaluation, TrainingOutput
from fedcache.federate.engine.simulated_time import TimingRule
from fedcache.federate.partition.client_table import (
    Client,
    ClientTable,
    MatchedLists,
    NumberedNames,
)
from fedcache.federate.partition.partition import Partition
from fedcache.parsing import Facts, Record, as_lists
from fedcache.plugins import Plugin
from fedcache.progress import VALIDATION_ACCURACY
from fedcache.runs.base_to_new import harmonic_mean
from fedcache.runs.directory import (
    CLIENTS_FILE,
    CLIENTS_IN_RESULT,
    ROWS_FILE,
    ClientColumns,
    Identity,
    TestRows,
    rows_file,
)
from fedcache.runs.events import number
from fedcache.runs.features import RunInputs
from fedcache.runs.score import mean_std
from fedcache.runs.spec import ResolvedRun

ARRAYS = {"per_client": np.float64, "classes_owned": np.int64, "validation_per_client": np.float64}
"""Fields of a seed's result with one value per client -> their dtypes."""


@dataclass
class SeedResult:
    """One seed of a run."""

    seed: int  # of init, batches, sampling and noise
    accuracy: float | None  # primary metric of the last round, a fraction
    per_client: NDArray[np.float64]  # [M] fractions; NaN for a client that was not scored
    mean_client: float | None  # unweighted mean over clients
    macro_f1: float | None  # of the last round, a fraction
    by_domain: dict[str, float]  # accuracy per domain name
    fairness: dict[str, float | None]  # spread over clients
    traffic: dict[str, int]  # totals of the run in scalars and bytes
    # scalars and bytes that one client sends and receives in a round, means over clients and rounds; scalars also as
    # the paper counts
    per_round: dict[str, float]
    rounds: list[Facts]  # records without times
    protocol: str  # global | personalised | everywhere
    fidelity: str  # exact | cached_views | approx
    execution: str  # how clients were computed: sequential | batched | gram
    chunk: int  # clients computed at once
    points: int  # configurations of a grid computed together; 1 for a run alone
    threads: int
    clients: Sequence[str]  # names
    classes_owned: NDArray[np.int64]  # [M] classes among each client's training rows
    trainable: int  # scalars of the deployed model that training sets
    warnings: list[str]  # sentences
    seconds: float  # wall time; stored in measured.json only
    measured: Facts  # seconds per round; stored in measured.json only
    attackers: list[str] = field(default_factory=list)  # names of the clients that attacked
    # labelled test rows by (label, predicted class); a row counts once for every model that is scored on it
    confusion: list[list[int]] | None = None
    model: bool = False  # whether its model was saved
    # accuracy (the primary metric), client_mean and pooled on validation rows; None if there are none
    validation: dict[str, float | None] | None = None
    # [M] fractions; NaN for a client that was not scored
    validation_per_client: NDArray[np.float64] | None = None
    # accuracy over all test rows of all clients, each row scored by the model of its client
    pooled: float | None = None
    # accuracy of the class texts that the method starts from, without training
    zero_shot: float | None = None
    client_prior: dict[str, float] | None = None  # accuracy without and with the client prior
    stages: Facts | None = None  # ``stage_scores``; None for a single stage
    base_to_new: dict[str, Any] | None = None  # as ``base_to_new``; None if the run has all classes
    transfer: dict[str, float] | None = None  # as ``transfer``; None without other datasets
    # how often each test row was classified correctly; None if the rows are secret or too many
    test_rows: TestRows | None = None
    partition: Facts = field(default_factory=dict)  # its ``partition_facts``

    @property
    def choice(self) -> float | None:
        """The primary metric on validation rows, or on test rows if there are none."""
        if self.validation is None:
            return self.accuracy
        return self.validation["accuracy"]

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        names: object = list(self.clients)
        # Names that are numbers in order are stored as their count: there may be a million.
        if isinstance(self.clients, NumberedNames):
            names = {"numbered": len(self.clients)}
        arrays = {name: _packed(plain[name]) for name in ARRAYS if plain[name] is not None}
        rows = None
        if self.test_rows is not None:
            rows = self.test_rows.to_dict()
        return {**plain, **arrays, "clients": names, "test_rows": rows}

    @classmethod
    def from_dict(cls, data: Record) -> SeedResult:
        """The inverse of ``to_dict``."""
        values = dict(data)
        names = data["clients"]
        if isinstance(names, dict):
            values["clients"] = NumberedNames(names["numbered"])
        for name, kind in ARRAYS.items():
            if data.get(name) is not None:
                values[name] = _unpacked(data[name], kind)
        rows = None
        if data.get("test_rows") is not None:
            rows = TestRows.from_dict(data["test_rows"])
        return cls(**{**values, "test_rows": rows})


def _packed(values: NDArray[Any]) -> str:
    """An array as base64 of its little-endian bytes."""
    little_endian = values.dtype.newbyteorder("<")
    raw = values.astype(little_endian).tobytes()
    return base64.b64encode(raw).decode()


def _unpacked(packed: str, dtype: type) -> NDArray[Any]:
    """The inverse of ``_packed``."""
    little_endian = np.dtype(dtype).newbyteorder("<")
    raw = base64.b64decode(packed)
    return np.frombuffer(raw, little_endian).astype(dtype)


def seed_result(
    outcome: TrainingOutput, inputs: RunInputs, seconds: float, *, secret: bool = False
) -> SeedResult:
    """The result of one seed.

    ``secret`` leaves out which clients took part in each round, the time of each round (it depends on the number of
    these clients), and the outcomes of single test rows.
    """
    rounds = [
        {
            "seed": outcome.seed,
            "round": r.round,
            "clients": None if secret else list(r.clients),
            "accuracy": number(r.accuracy),
            "diagnostics": {name: number(value) for name, value in r.diagnostics.items()},
            "traffic": r.traffic.to_dict(),
        }
        for r in outcome.records
    ]
    evaluation = outcome.evaluation
    domains = inputs.domains
    by_domain = {}
    for number_of_domain, accuracy in sorted(evaluation.by_domain.items()):
        name = str(number_of_domain)
        if number_of_domain < len(domains):
            name = domains[number_of_domain]
        by_domain[name] = accuracy
    validation = None
    validation_per_client = None
    if evaluation.validation is not None:
        on_validation = evaluation.validation
        validation = {
            "accuracy": number(on_validation.accuracy),
            "client_mean": number(on_validation.mean_accuracy),
            "pooled": number(on_validation.pooled),
        }
        validation_per_client = on_validation.client_accuracy
    confusion = None
    if evaluation.counts is not None:
        confusion = evaluation.counts.tolist()
    seconds_of_rounds = []
    test_rows = None
    partition = inputs.partitions[outcome.seed]
    if not secret:
        seconds_of_rounds = [r.seconds for r in outcome.records]
        test_rows = count_test_rows(evaluation, partition.clients, inputs.data.y)
    return SeedResult(
        seed=outcome.seed,
        accuracy=number(evaluation.accuracy),
        per_client=evaluation.client_accuracy,
        mean_client=number(evaluation.mean_accuracy),
        macro_f1=number(evaluation.macro_f1),
        by_domain=by_domain,
        fairness={name: number(value) for name, value in outcome.fairness.items()},
        traffic=outcome.traffic.totals(),
        per_round=outcome.traffic.per_client_round(),
        rounds=rounds,
        protocol=outcome.protocol,
        fidelity=outcome.fidelity,
        execution=outcome.execution,
        chunk=outcome.chunk,
        points=outcome.points,
        threads=outcome.threads,
        clients=outcome.clients,
        classes_owned=np.asarray(outcome.classes_owned, np.int64),
        trainable=outcome.trainable,
        warnings=list(outcome.warnings),
        seconds=seconds,
        measured={"rounds": seconds_of_rounds, "total": seconds},
        attackers=list(outcome.attackers),
        confusion=confusion,
        validation=validation,
        validation_per_client=validation_per_client,
        pooled=number(evaluation.pooled),
        zero_shot=number(outcome.zero_shot),
        test_rows=test_rows,
        partition=partition_facts(partition),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean over seeds; None if a value is missing."""
    return mean_std(values)[0]


def _spread(values: Sequence[float | None]) -> Facts:
    """Mean and standard deviation over seeds, and the value of each seed."""
    mean, std = mean_std(values)
    return {"mean": mean, "std": std, "per_seed": values}


STAGE_FIGURES = ("average", "final", "forgetting")
"""Figures of ``loop.stage_scores`` that a result has as means over seeds."""


def _means(of_seeds: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Mean over seeds of every value that the first seed has, by name."""
    return {name: _mean([values.get(name) for values in of_seeds]) for name in of_seeds[0]}


def summarise(
    inputs: RunInputs, spec: ResolvedRun, identity: Identity, seeds: Sequence[SeedResult]
) -> Facts:
    """``result.json`` of a run: only values that are equal if the run is repeated, so no times and no paths."""
    first = seeds[0]
    clients = columns_of_seeds(seeds)
    # The values of single clients. If there are many clients, a file next to the result has these values.
    named: ClientColumns | None = clients
    names: list[str] | None = list(first.clients)
    classes_owned = clients.classes_owned
    owned = {"per_client": classes_owned.tolist()}
    if len(first.clients) > CLIENTS_IN_RESULT:
        named = None
        names = None
        owned = {"least": float(classes_owned.min()), "most": float(classes_owned.max())}
    owned["mean"] = float(classes_owned.mean())
    # Parameters of the backbones; None if one of them is not in ``PARAMETERS``.
    fixed = None
    if all(name in PARAMETERS for name in inputs.backbones):
        fixed = sum(PARAMETERS[name] for name in inputs.backbones)
    last_rounds = [seed.rounds[-1].get("diagnostics", {}) for seed in seeds]
    result = {
        "method": spec.method,
        "preset": spec.requested.preset,
        "hyperparameters": spec.hyperparameters,
        "fidelity": first.fidelity,
        "protocol": first.protocol,
        "dataset": inputs.dataset,
        "backbones": list(inputs.backbones),
        "arrays": list(inputs.features.arrays),
        "text_templates": list(inputs.features.templates),
        "widths": list(inputs.data.widths),
        "classes": inputs.data.classes,
        "class_names": list(inputs.classes),
        "partition": partition_section(inputs.partition_name, [seed.partition for seed in seeds]),
        "rounds": spec.rounds,
        "participation": spec.participation_text,
        "seeds": [seed.seed for seed in seeds],
        "accuracy": _accuracy(seeds, named, spec.eval_clients is not None),
        "macro_f1": _spread([seed.macro_f1 for seed in seeds]),
        "parameters": {"trainable": first.trainable, "fixed": fixed},
        "classes_owned": owned,
        "clients": names,
        "fairness": _means([seed.fairness for seed in seeds]),
        "traffic": _traffic(seeds),
        "confusion": _confusion(seeds),
        **_trust(spec, seeds),
        "diagnostics": _means(last_rounds),
        "execution": first.execution,
        "chunk": first.chunk,
        "points": first.points,
        "threads": first.threads,
        "dtype": spec.requested.dtype,
        "device": spec.device,
        "features": list(identity.features),
        "code": identity.code,
        "digest": identity.digest,
    }
    # A result has these sections only if the run uses them.
    sampling = spec.sampling.words()
    if sampling:
        result["participants"] = sampling
    if spec.timing is not None:
        result["timing"] = _timing(spec.timing, seeds)
    if first.validation:
        result["validation"] = _validation(seeds, named)
    if spec.plugins:
        result["plugins"] = [_plugin(p) for p in spec.plugins]
    return result


def _plugin(plugin: Plugin) -> dict[str, str]:
    return {
        "kind": plugin.kind,
        "name": plugin.name,
        "package": plugin.package,
        "version": plugin.version,
    }


def _timing(rule: TimingRule, seeds: Sequence[SeedResult]) -> Facts:
    """Simulated time: its rule, the end of the last round (mean over seeds), and the staleness of all updates."""
    ends = [seed.rounds[-1]["diagnostics"]["simulated_time"] for seed in seeds]
    section: Facts = {**rule.words(), "simulated_time": _mean(ends)}
    if rule.buffer is not None:
        updates = 0
        total = 0.0  # staleness of all updates
        most = []  # in each round
        for record in chain.from_iterable(seed.rounds for seed in seeds):
            values = record["diagnostics"]
            if "staleness_max" in values:
                count = len(record["clients"])
                updates += count
                total += values["staleness_mean"] * count
                most.append(values["staleness_max"])
        section["updates"] = updates
        section["staleness_mean"] = total / max(1, updates)
        section["staleness_max"] = max(most, default=None)
    return section


def partition_facts(partition: Partition) -> Facts:
    """How the rows of one seed were assigned to clients, as plain JSON values."""
    validation_rows = 0
    if partition.validation is not None:
        validation_rows = len(partition.validation)
    return {
        "scheme": partition.scheme,
        "args": as_lists(partition.args),
        "seed": partition.seed,
        "digest": partition.digest,
        "clients": len(partition.clients),
        "dropped": partition.dropped,
        "test_rows": len(partition.test),
        "validation_rows": validation_rows,
    }


def partition_section(name: str | None, facts: Sequence[Record]) -> Facts:
    """The partition of a run from the facts of its seeds; every seed has the scheme of the first."""
    digests = [of_seed["digest"] for of_seed in facts]
    section = {"name": name, **facts[0], "digests": digests}
    # Removed, because a result has this number as ``rows`` in its section ``validation``.
    section.pop("validation_rows", None)
    return section


def columns_of_seeds(seeds: Sequence[SeedResult]) -> ClientColumns:
    """Columns of all clients, means over seeds."""
    per_seed = np.stack([seed.per_client for seed in seeds])
    # The values of each client are contiguous, so that they are summed in the order of a mean of this client alone.
    accuracy = np.ascontiguousarray(per_seed.T).mean(1)
    owned = np.array([seed.classes_owned for seed in seeds], np.float64).mean(0)
    known = [seed.validation_per_client for seed in seeds if seed.validation_per_client is not None]
    validation = None
    if len(known) == len(seeds):
        validation = np.stack(known).mean(0)
    return ClientColumns(seeds[0].clients, accuracy, owned, per_seed, validation)


def files_of_clients(seeds: Sequence[SeedResult]) -> dict[str, bytes]:
    """File name -> content, of files next to a result: its test rows, and its columns of clients if they are many."""
    files = {}
    if len(seeds[0].clients) > CLIENTS_IN_RESULT:
        columns = columns_of_seeds(seeds)
        files[CLIENTS_FILE] = columns.to_parquet([seed.seed for seed in seeds])
    rows = rows_file({seed.seed: seed.test_rows for seed in seeds})
    if rows is not None:
        files[ROWS_FILE] = rows
    return files


def _accuracy(seeds: Sequence[SeedResult], clients: ClientColumns | None, drawn: bool) -> Facts:
    """Accuracy on test rows.

    ``clients`` are None if the result does not name each client. ``drawn`` is true if only some of the personal models
    were scored.
    """
    first = seeds[0]
    client_means = [seed.mean_client for seed in seeds]
    pooled = [seed.pooled for seed in seeds]
    section = {
        **_spread([seed.accuracy for seed in seeds]),
        "per_domain": _means([seed.by_domain for seed in seeds]),
        "client_mean": _mean(client_means),
        "client_mean_per_seed": client_means,
        "pooled": _mean(pooled),
        "pooled_per_seed": pooled,
        "per_round": _curve(seeds),
    }
    if clients is not None:
        section["per_client"] = [number(value) for value in clients.accuracy.tolist()]
    if drawn:
        section["eval_clients"] = [_drawn_clients(seed) for seed in seeds]
    if first.zero_shot is not None:
        section["zero_shot"] = _mean([seed.zero_shot for seed in seeds])
    priors = [seed.client_prior for seed in seeds if seed.client_prior is not None]
    if priors:
        section["client_prior"] = _means(priors)
    stages = [seed.stages for seed in seeds if seed.stages is not None]
    if stages:
        section["stages"] = {
            **_means([{name: found[name] for name in STAGE_FIGURES} for found in stages]),
            "per_seed": stages,
        }
    generalised = [seed.base_to_new for seed in seeds if seed.base_to_new is not None]
    if generalised:
        base = _mean([found["base"] for found in generalised])
        new = _mean([found["new"] for found in generalised])
        section["base_to_new"] = {
            "base": base,
            "new": new,
            "harmonic_mean": harmonic_mean(base, new),
            "per_seed": generalised,
        }
    transferred = [seed.transfer for seed in seeds if seed.transfer is not None]
    if transferred:
        section["transfer"] = {"mean": _means(transferred), "per_seed": transferred}
    return section


def _validation(seeds: Sequence[SeedResult], clients: ClientColumns | None) -> Facts:
    """Accuracy on validation rows, like ``_accuracy``; ``rows`` is their number in the first seed's partition."""
    of_seeds = [seed.validation or {} for seed in seeds]
    curves: list[dict[int, float | None]] = []  # of each seed: round -> accuracy
    for seed in seeds:
        by_round = {}
        for record in seed.rounds:
            diagnostics = record["diagnostics"]
            if VALIDATION_ACCURACY in diagnostics:
                by_round[record["round"]] = diagnostics[VALIDATION_ACCURACY]
        curves.append(by_round)
    curve = []
    for round_ in curves[0]:
        curve.append({"round": round_, "mean": _mean([each.get(round_) for each in curves])})
    section = {
        **_spread([values.get("accuracy") for values in of_seeds]),
        "client_mean": _mean([values.get("client_mean") for values in of_seeds]),
        "pooled": _mean([values.get("pooled") for values in of_seeds]),
        "per_round": curve,
        "rows": seeds[0].partition["validation_rows"],
    }
    if clients is not None:
        per_client = []
        if clients.validation is not None:
            per_client = clients.validation.tolist()
        section["per_client"] = [number(value) for value in per_client]
    return section


def _drawn_clients(seed: SeedResult) -> dict[str, float | int | None]:
    """Number of scored clients, how many of them took part in some round, and the standard error of their mean.

    The error is s / sqrt(n) sqrt(1 - n / M), because clients are drawn without replacement. It is None for fewer than
    two clients, and if none of them took part, because their models are then untrained. How many took part is None if
    the participants are secret.
    """
    scored = ~np.isnan(seed.per_client)
    participants = [record["clients"] for record in seed.rounds]
    trained = None
    if None not in participants:
        distinct = set(chain.from_iterable(participants))
        trained = int(scored[list(distinct)].sum())
    known = seed.per_client[scored]
    n = len(known)
    error = None
    if n > 1 and trained != 0:
        correction = np.sqrt(1 - n / len(scored))
        error = float(known.std(ddof=1) / np.sqrt(n) * correction)
    return {"scored": n, "trained": trained, "standard_error": error}


def _traffic(seeds: Sequence[SeedResult]) -> Facts:
    """Totals over seeds; the traffic of one client in a round is that of the first seed."""
    per_round = seeds[0].per_round
    totals = {name: sum(seed.traffic[name] for seed in seeds) for name in seeds[0].traffic}
    return {
        "up": totals["up"],
        "down": totals["down"],
        "paper": {
            "up": totals["paper_up"],
            "down": totals["paper_down"],
            "per_client_round": {"up": per_round["paper_up"], "down": per_round["paper_down"]},
        },
        "exact": {
            "up": totals["up"],
            "down": totals["down"],
            "up_bytes": totals["up_bytes"],
            "down_bytes": totals["down_bytes"],
            "per_client_round": {"up": per_round["up"], "down": per_round["down"]},
        },
        "unit": "scalars, summed over rounds, clients and seeds",
    }


def _curve(seeds: Sequence[SeedResult]) -> list[Facts]:
    """Mean accuracy over seeds of every scored round, and the end of the round if time is simulated."""
    scored = []
    for seed in seeds:
        scored.append(
            {record["round"]: record for record in seed.rounds if record["accuracy"] is not None}
        )
    curve = []
    for round_ in scored[0]:
        of_seeds = [by_round.get(round_, {}) for by_round in scored]
        point = {"round": round_, "mean": _mean([record.get("accuracy") for record in of_seeds])}
        ends = [record.get("diagnostics", {}).get("simulated_time") for record in of_seeds]
        if None not in ends:
            point["simulated_time"] = _mean(ends)
        curve.append(point)
    return curve


def _rejected(seeds: Sequence[SeedResult]) -> int:
    """Number of uploads that validation rejected, over all seeds and rounds."""
    rejected = 0
    for record in chain.from_iterable(seed.rounds for seed in seeds):
        rejected += record.get("diagnostics", {}).get("rejected") or 0
    return int(rejected)


def _confusion(seeds: Sequence[SeedResult]) -> list[list[int]] | None:
    """Counts over all seeds; None if a seed has none (a run begun by an earlier version)."""
    known = [seed.confusion for seed in seeds if seed.confusion is not None]
    if len(known) < len(seeds):
        return None
    summed: list[list[int]] = np.sum(known, axis=0).tolist()
    return summed


def _trust(spec: ResolvedRun, seeds: Sequence[SeedResult]) -> Facts:
    """The section on trust of a result, which holds its options and their effects; {} for an ordinary run."""
    section = dict(spec.trust_options)
    if not section:
        return {}
    if "attack" in section:
        section["attackers"] = [list(seed.attackers) for seed in seeds]
    if section.get("on_bad_update") == "reject":
        section["rejected"] = _rejected(seeds)
    cost = spec.privacy_cost(len(seeds[0].clients))
    if cost:
        section["privacy"] = dict(cost)
    return {"trust": section}


# How often each test row was classified correctly, from the predictions of an evaluation.

MOST_ROWS = 100_000
"""Maximum number of distinct test rows for a result to have their file.

With more rows, a 95 % interval over test rows extends less than 0.4 points to each side, so it is not needed.
"""
MOST_SCORED = 1 << 21
"""Maximum number of (client, test row) pairs for a result to have their file."""


def count_test_rows(
    evaluation: Evaluation, clients: Sequence[Client], labels: Tensor
) -> TestRows | None:
    """The test rows of an evaluation; None if predictions were not kept, or above ``MOST_ROWS`` or ``MOST_SCORED``.

    Args:
        evaluation: of ``clients``.
        clients: rows of each client; their test rows were evaluated.
        labels: int64 [N] of all rows of the store; a row with -1 has no label and is not scored.
    """
    # ``sizes`` is None for one global model. Its rows are distinct; those of personal models may repeat.
    too_many = evaluation.sizes is None and len(evaluation.rows) > MOST_ROWS
    if not len(evaluation.rows) or not evaluation.whole or too_many:
        return None
    if evaluation.sizes is None:
        lists = _one_model(evaluation, ClientTable.tests_only(clients))
    else:
        lists = (evaluation.rows, evaluation.predictions, evaluation.sizes)
    if lists is None:
        return None
    rows, guesses, sizes = lists
    if len(rows) > MOST_SCORED:
        return None
    truth = labels.cpu().numpy()[rows]
    # Rows without a label, or without a prediction (-1), are not scored.
    known = (truth >= 0) & (guesses >= 0)
    owner = np.repeat(np.arange(len(sizes)), sizes)[known]
    right = (truth == guesses)[known]
    per_client = np.bincount(owner, minlength=len(sizes))
    scored_clients = max(1, int((per_client > 0).sum()))
    # The mean over clients gives a test row this weight: every scored client counts once.
    weight = 1.0 / (per_client[owner] * scored_clients)
    distinct, place = np.unique(rows[known], return_inverse=True)
    count = len(distinct)
    if not 0 < count <= MOST_ROWS:
        return None
    return TestRows(
        distinct,
        np.bincount(place[right], minlength=count),
        np.bincount(place, minlength=count),
        np.bincount(place[right], weight[right], count),
        np.bincount(place, weight, count),
    )


def _one_model(
    evaluation: Evaluation, table: ClientTable
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The test rows of all clients, the predictions of one model for them, and the number of rows of each entry.

    An entry is one client. A client that shares the common test rows has two: an empty one at its place, and one with
    the common rows at the end. None above ``MOST_SCORED`` rows.
    """
    if int(table.test_sizes.sum()) > MOST_SCORED:
        return None
    if isinstance(table.tests, MatchedLists):
        every = table.tests.together(0, len(table))
        rows = every.rows
        sizes = every.sizes
    else:
        shared = int(table.shares.sum())
        rows = np.concatenate([table.tests.rows, np.tile(table.common, shared)])
        sizes = np.concatenate([table.tests.sizes, np.full(shared, len(table.common))])
    predictions = evaluation.predictions[np.searchsorted(evaluation.rows, rows)]
    return rows, predictions, sizes
