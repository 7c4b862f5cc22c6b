"""A result: what one seed gave, and what all seeds of a run say together."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcache.extract.backbones.rows import PARAMETERS
from fedcache.federate.engine.outcome import Evaluation, TrainingOutput
from fedcache.federate.engine.simulated_time import TimingRule
from fedcache.federate.partition.client_table import (
    ClientRows,
    ClientTable,
    MatchedLists,
    NumberedNames,
)
from fedcache.federate.partition.partition import Partition
from fedcache.plugins import Plugin
from fedcache.progress import VALIDATION_ACCURACY
from fedcache.runs.events import number
from fedcache.runs.features import RunInputs
from fedcache.runs.identity import Identity
from fedcache.runs.result_files import (
    CLIENTS_FILE,
    CLIENTS_IN_RESULT,
    ROWS_FILE,
    ClientColumns,
    TestRows,
    rows_file,
)
from fedcache.runs.spec import ResolvedRun

# Test rows file: how often every test row was classified correctly, sealed, next to a result.


ARRAYS = {"per_client": np.float64, "classes_owned": np.int64, "validation_per_client": np.float64}
"""Fields of a seed's result with an entry for every client."""


@dataclass
class SeedResult:
    """One seed of a run."""

    seed: int  # of init, batches, sampling and noise
    accuracy: float | None  # headline of the last round, a fraction
    per_client: NDArray[np.float64]  # [M] fractions; NaN for a client that was not scored
    mean_client: float | None  # unweighted mean over clients
    macro_f1: float | None  # headline of the last round, a fraction
    by_domain: dict[str, float]  # accuracy per domain name
    fairness: dict[str, float | None]  # spread over clients
    traffic: dict[str, int]  # totals of the run in scalars and bytes
    # scalars one participating client sends and receives in a round, exact (mean) and paper
    per_round: dict[str, float]
    rounds: list[dict[str, Any]]  # records without times
    protocol: str  # global | personalised
    fidelity: str  # exact | cached_views | approx
    execution: str  # how clients were computed: sequential | batched | gram
    chunk: int  # clients at once
    points: int  # of a grid that were computed together; 1 for a run alone
    threads: int
    clients: Sequence[str]
    classes_owned: NDArray[np.int64]  # [M] of each client's training rows
    trainable: int  # scalars of the deployed model that training sets
    warnings: list[str]  # sentences
    seconds: float  # wall time; lives in measured.json only
    measured: dict[str, Any]  # seconds per round; likewise
    attackers: list[str] = field(default_factory=list)  # names of the clients that lied
    # labelled test rows by (label, predicted class); a row that several personal models are scored on counts for each
    confusion: list[list[int]] | None = None
    model: bool = False  # whether its model was saved
    # on validation rows, None where there are none: accuracy (the headline), client_mean and pooled; rows
    validation: dict[str, float | None] | None = None
    validation_per_client: NDArray[np.float64] | None = (
        None  # [M] fractions; NaN for a client that was not scored
    )
    pooled: float | None = (
        None  # accuracy over all test rows of all clients, each scored by the client's model
    )
    zero_shot: float | None = (
        None  # accuracy of the class texts that the method starts from, without training
    )
    client_prior: dict[str, float] | None = None  # accuracy without and with it
    test_rows: TestRows | None = (
        None  # how often each test row was right; None where they are secret or too many
    )
    partition: dict[str, Any] = field(default_factory=dict)  # its ``partition_facts``

    @property
    def choice(self) -> float | None:
        """The primary metric on validation rows, or on test rows if there are none."""
        if self.validation is None:
            return self.accuracy
        return self.validation["accuracy"]

    def to_dict(self) -> dict[str, Any]:
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
    def from_dict(cls, data: Mapping[str, Any]) -> SeedResult:
        """The inverse of ``to_dict``; earlier releases wrote lists."""
        names = data["clients"]
        if isinstance(names, dict):
            clients = NumberedNames(names["numbered"])
        else:
            clients = names
        arrays = {
            name: _unpacked(data[name], kind)
            for name, kind in ARRAYS.items()
            if data.get(name) is not None
        }
        rows = None
        if data.get("test_rows") is not None:
            rows = TestRows.from_dict(data["test_rows"])
        return cls(**{**data, **arrays, "clients": clients, "test_rows": rows})


def _packed(values: NDArray[Any]) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _unpacked(packed: str | list[Any], dtype: type) -> NDArray[Any]:
    if isinstance(packed, list):
        return np.array(packed, dtype)  # None becomes NaN
    return np.frombuffer(base64.b64decode(packed), np.dtype(dtype).newbyteorder("<")).astype(dtype)


def seed_result(
    outcome: TrainingOutput, inputs: RunInputs, seconds: float, *, secret: bool = False
) -> SeedResult:
    """The result of one seed as JSON values.

    ``secret`` leaves out who took part in which round, and the time of each, which tells how many they were.
    """
    # What each round says of its clients tells who took part; a private run that keeps this secret stores none of it.
    rounds = [
        {
            "seed": outcome.seed,
            "round": r.round,
            "clients": None if secret else list(r.clients),
            "accuracy": number(r.accuracy),
            "diagnostics": {k: number(v) for k, v in r.diagnostics.items()},
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
        chosen_by = evaluation.validation
        validation = {
            "accuracy": number(chosen_by.accuracy),
            "client_mean": number(chosen_by.mean_accuracy),
            "pooled": number(chosen_by.pooled),
        }
        validation_per_client = chosen_by.client_accuracy
    confusion = None
    if evaluation.counts is not None:
        confusion = evaluation.counts.tolist()
    seconds_of_rounds: list[float] = []
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
        fairness={k: number(v) for k, v in outcome.fairness.items()},
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


def mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds (ddof 1); None where a value is missing or there is one seed only."""
    if not values or any(v is None for v in values):
        return None, None
    known = np.array(values, np.float64)
    deviation = None
    if len(known) > 1:
        deviation = float(known.std(ddof=1))
    return float(known.mean()), deviation


def summarise(
    inputs: RunInputs, spec: ResolvedRun, identity: Identity, seeds: Sequence[SeedResult]
) -> dict[str, Any]:
    """``result.json`` of a run: promised values only."""
    first = seeds[0]
    clients = columns_of_seeds(seeds)
    # With many clients, what each of them has is in a file next to the result, and not in it.
    named: ClientColumns | None = clients
    names: list[str] | None = list(first.clients)
    owned: dict[str, Any] = {"per_client": clients.classes_owned.tolist()}
    if len(first.clients) > CLIENTS_IN_RESULT:
        named = None
        names = None
        owned = {
            "least": float(clients.classes_owned.min()),
            "most": float(clients.classes_owned.max()),
        }
    owned["mean"] = float(clients.classes_owned.mean())
    fixed = None
    parameters = [PARAMETERS.get(name) for name in inputs.backbones]
    if None not in parameters:
        fixed = sum(n for n in parameters if n is not None)
    f1, f1_std = mean_std([s.macro_f1 for s in seeds])
    last = [s.rounds[-1].get("diagnostics", {}) for s in seeds]
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
        "partition": partition_section(inputs.partition_name, [s.partition for s in seeds]),
        "rounds": spec.rounds,
        "participation": spec.participation_text,
        "seeds": [s.seed for s in seeds],
        "accuracy": _accuracy(seeds, named, spec.eval_clients is not None),
        "macro_f1": {"mean": f1, "std": f1_std, "per_seed": [s.macro_f1 for s in seeds]},
        "parameters": {"trainable": first.trainable, "fixed": fixed},
        "classes_owned": owned,
        "clients": names,
        "fairness": {k: mean_std([s.fairness[k] for s in seeds])[0] for k in first.fairness},
        "traffic": _traffic(seeds),
        "confusion": _summed([s.confusion for s in seeds]),
        **trust_section(
            spec.trust_options,
            spec.privacy_cost(len(first.clients)),
            [s.attackers for s in seeds],
            _rejected(seeds),
        ),
        "diagnostics": {k: mean_std([values.get(k) for values in last])[0] for k in last[0]},
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
    # What most runs do not have is left out of their results.
    if words := spec.sampling.words():
        result["participants"] = words
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


def _timing(rule: TimingRule, seeds: Sequence[SeedResult]) -> dict[str, Any]:
    """Simulated time: its rule, the end of the last round (mean over seeds), and the age of updates over all seeds."""
    diagnostics = [[r["diagnostics"] for r in s.rounds] for s in seeds]
    section: dict[str, Any] = {
        **rule.words(),
        "simulated_time": mean_std([d[-1]["simulated_time"] for d in diagnostics])[0],
    }
    if rule.buffer is not None:
        counted = [
            (d["staleness_mean"], d["staleness_max"], len(r["clients"]))
            for s in seeds
            for r in s.rounds
            if "staleness_max" in (d := r["diagnostics"])
        ]
        updates = sum(count for _, _, count in counted)
        section["updates"] = updates
        section["staleness_mean"] = sum(mean * count for mean, _, count in counted) / max(
            1, updates
        )
        section["staleness_max"] = max((most for _, most, _ in counted), default=None)
    return section


def partition_facts(partition: Partition) -> dict[str, Any]:
    """How the rows of one seed were assigned to clients, as plain JSON values."""
    validation_rows = 0
    if partition.validation is not None:
        validation_rows = len(partition.validation)
    return {
        "scheme": partition.scheme,
        "args": {k: list(v) if isinstance(v, tuple) else v for k, v in partition.args.items()},
        "seed": partition.seed,
        "digest": partition.digest,
        "clients": len(partition.clients),
        "dropped": partition.dropped,
        "test_rows": len(partition.test),
        "validation_rows": validation_rows,
    }


def partition_section(name: str | None, facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The partition of a run from the facts of its seeds; every seed has the scheme of the first."""
    first = {key: value for key, value in facts[0].items() if key != "validation_rows"}
    return {"name": name, **first, "digests": [one["digest"] for one in facts]}


def columns_of_seeds(seeds: Sequence[SeedResult]) -> ClientColumns:
    """Columns of all clients, means over seeds."""
    per_seed = np.stack([s.per_client for s in seeds])
    owned = np.array([s.classes_owned for s in seeds], np.float64).mean(0)
    held = [s.validation_per_client for s in seeds if s.validation_per_client is not None]
    if len(held) < len(seeds):
        validation = None
    else:
        validation = np.stack(held).mean(0)
    return ClientColumns(
        seeds[0].clients, np.ascontiguousarray(per_seed.T).mean(1), owned, per_seed, validation
    )


def files_of_clients(seeds: Sequence[SeedResult]) -> dict[str, bytes]:
    """Files next to a result, by name: columns of clients that are too many for it, and test rows."""
    made = {}
    if len(seeds[0].clients) > CLIENTS_IN_RESULT:
        made[CLIENTS_FILE] = columns_of_seeds(seeds).to_parquet([s.seed for s in seeds])
    rows = rows_file({s.seed: s.test_rows for s in seeds})
    if rows is not None:
        made[ROWS_FILE] = rows
    return made


def _accuracy(
    seeds: Sequence[SeedResult], clients: ClientColumns | None, drawn: bool
) -> dict[str, Any]:
    """``clients`` where a result names each; ``drawn`` says whether only some of the personal models were scored."""
    first = seeds[0]
    mean, std = mean_std([s.accuracy for s in seeds])
    found = {
        "mean": mean,
        "std": std,
        "per_seed": [s.accuracy for s in seeds],
        "per_domain": {
            name: mean_std([s.by_domain.get(name) for s in seeds])[0] for name in first.by_domain
        },
        "client_mean": mean_std([s.mean_client for s in seeds])[0],
        "client_mean_per_seed": [s.mean_client for s in seeds],
        "pooled": mean_std([s.pooled for s in seeds])[0],
        "pooled_per_seed": [s.pooled for s in seeds],
        "per_round": _curve(seeds),
    }
    if clients is not None:
        found["per_client"] = [number(a) for a in clients.accuracy.tolist()]
    if drawn:
        found["eval_clients"] = [_drawn_clients(s) for s in seeds]
    if first.zero_shot is not None:
        found["zero_shot"] = mean_std([s.zero_shot for s in seeds])[0]
    priors = [s.client_prior for s in seeds if s.client_prior is not None]
    if priors:
        found["client_prior"] = {k: mean_std([p[k] for p in priors])[0] for k in priors[0]}
    return found


def _validation(seeds: Sequence[SeedResult], clients: ClientColumns | None) -> dict[str, Any]:
    """Figures on validation rows, as those of ``_accuracy``; ``rows`` are those of the first seed's partition."""
    found = [s.validation or {} for s in seeds]
    mean, std = mean_std([f.get("accuracy") for f in found])
    by_round = [
        {
            r["round"]: r["diagnostics"][VALIDATION_ACCURACY]
            for r in s.rounds
            if VALIDATION_ACCURACY in r["diagnostics"]
        }
        for s in seeds
    ]
    figures = {
        "mean": mean,
        "std": std,
        "per_seed": [f.get("accuracy") for f in found],
        "client_mean": mean_std([f.get("client_mean") for f in found])[0],
        "pooled": mean_std([f.get("pooled") for f in found])[0],
        "per_round": [
            {"round": r, "mean": mean_std([known.get(r) for known in by_round])[0]}
            for r in by_round[0]
        ],
        "rows": seeds[0].partition["validation_rows"],
    }
    if clients is not None:
        each = []
        if clients.validation is not None:
            each = clients.validation.tolist()
        figures["per_client"] = [number(a) for a in each]
    return figures


def _drawn_clients(seed: SeedResult) -> dict[str, float | int | None]:
    """Number of scored clients, how many of them took part in some round, and the standard error of their mean.

    Drawn without replacement: s / sqrt(n) sqrt(1 - n / M); None for fewer than two, and where none of them took part.
    """
    scored = ~np.isnan(seed.per_client)
    participants = [r["clients"] for r in seed.rounds]
    trained = None
    if None not in participants:
        trained = int(scored[list({c for clients in participants for c in clients})].sum())
    known = seed.per_client[scored]
    n = len(known)
    error = None
    if n > 1 and trained != 0:
        error = float(known.std(ddof=1) / np.sqrt(n) * np.sqrt(1 - n / len(scored)))
    return {"scored": n, "trained": trained, "standard_error": error}


def _traffic(seeds: Sequence[SeedResult]) -> dict[str, Any]:
    """Totals over seeds; what one client sends in a round is that of the first seed."""
    per_round = seeds[0].per_round
    totals = {k: sum(s.traffic[k] for s in seeds) for k in seeds[0].traffic}
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


def _curve(seeds: Sequence[SeedResult]) -> list[dict[str, Any]]:
    """Mean accuracy over seeds of every round that was scored, the last among them, and its end in simulated time."""
    scored = [{r["round"]: r for r in s.rounds if r["accuracy"] is not None} for s in seeds]
    curve = []
    for round_ in scored[0]:
        of_seeds = [by_round.get(round_, {}) for by_round in scored]
        ends = [r.get("diagnostics", {}).get("simulated_time") for r in of_seeds]
        if None in ends:
            time = {}
        else:
            time = {"simulated_time": mean_std(ends)[0]}
        curve.append(
            {"round": round_, "mean": mean_std([r.get("accuracy") for r in of_seeds])[0], **time}
        )
    return curve


def _rejected(seeds: Sequence[SeedResult]) -> int:
    """Uploads that validation refused, over all seeds and rounds."""
    return int(sum(r.get("diagnostics", {}).get("rejected") or 0 for s in seeds for r in s.rounds))


def _summed(matrices: Sequence[list[list[int]] | None]) -> list[list[int]] | None:
    """Counts over all seeds; None where a seed has none (a run begun by an earlier version)."""
    known = [m for m in matrices if m is not None]
    if len(known) < len(matrices):
        return None
    summed: list[list[int]] = np.sum(known, axis=0).tolist()
    return summed


def trust_section(
    options: Mapping[str, Any],
    cost: Mapping[str, Any],
    attackers: Sequence[Sequence[str]],
    rejected: int = 0,
) -> dict[str, Any]:
    """The part of a result that says what was done; {} for an ordinary run.

    ``attackers`` are names for each seed; ``rejected`` counts uploads that validation refused in all of them.
    """
    section = dict(options)
    if not section:
        return {}
    if "attack" in section:
        section["attackers"] = [list(names) for names in attackers]
    if section.get("on_bad_update") == "reject":
        section["rejected"] = rejected
    if cost:
        section["privacy"] = dict(cost)
    return {"trust": section}


# From the predictions of an evaluation to what it says of every test row.

MOST_ROWS = 100_000
"""Different test rows up to which a result has the file: of more, an interval is narrower than 0.4 points."""
MOST_SCORED = 1 << 21
"""Pairs of client and test row up to which they are added up."""


def count_test_rows(
    found: Evaluation, clients: Sequence[ClientRows], labels: Tensor
) -> TestRows | None:
    """The test rows of an evaluation; None where predictions were not kept, and above ``MOST_ROWS`` or ``MOST_SCORED``.

    Args:
        found: of these clients.
        clients: whose test rows they are.
        labels: int64 [N] of all rows of the store, -1 where unknown: such a row is not scored.
    """
    too_many = found.sizes is None and len(found.rows) > MOST_ROWS
    if not len(found.rows) or not found.whole or too_many:
        return None
    if isinstance(clients, ClientTable):
        table = clients
    else:
        table = ClientTable.of(clients, np.empty(0, np.int64))
    if found.sizes is None:
        lists = _one_model(found, table)
    else:
        lists = (found.rows, found.predictions, found.sizes)
    if lists is None:
        return None
    rows, guesses, sizes = lists
    if len(rows) > MOST_SCORED:
        return None
    truth = labels.cpu().numpy()[rows]
    known = (truth >= 0) & (guesses >= 0)
    owner = np.repeat(np.arange(len(sizes)), sizes)[known]
    right = (truth == guesses)[known]
    per_client = np.bincount(owner, minlength=len(sizes))
    each = 1.0 / (per_client[owner] * max(1, int((per_client > 0).sum())))
    distinct, place = np.unique(rows[known], return_inverse=True)
    if not 0 < len(distinct) <= MOST_ROWS:
        return None
    count = len(distinct)
    return TestRows(
        distinct,
        np.bincount(place[right], minlength=count),
        np.bincount(place, minlength=count),
        np.bincount(place[right], each[right], count),
        np.bincount(place, each, count),
    )


def _one_model(
    found: Evaluation, table: ClientTable
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Rows and predictions of one model, client by client, and how many each has; None for too many of them."""
    if int(table.test_sizes.sum()) > MOST_SCORED:
        return None
    if isinstance(table.tests, MatchedLists):
        every = table.tests.together(0, len(table))
        rows = every.rows
        sizes = every.sizes
    else:  # the lists of clients that share the common rows are empty
        shared = int(table.shares.sum())
        rows = np.concatenate([table.tests.rows, np.tile(table.common, shared)])
        sizes = np.concatenate([table.tests.sizes, np.full(shared, len(table.common))])
    return rows, found.predictions[np.searchsorted(found.rows, rows)], sizes
