"""The study as plain JSON values, written and read, and as a page in Markdown.

Every number comes from stored runs, listed by digest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import scipy

from fedcache.errors import UsageError
from fedcache.parsing import Facts, Record, counted
from fedcache.progress import byte_size
from fedcache.report.comparison import interval
from fedcache.reproduce.frozen_bench.measure import BenchScore, Block, check_same_rows
from fedcache.reproduce.frozen_bench.study import BenchPartition, BenchTreatment, Study
from fedcache.reproduce.planning import settings_text
from fedcache.reproduce.render import markdown_row
from fedcache.runs.spec import parse_seeds

SCHEMA = "fedcache.frozen-bench/2"
SHARED = (
    "rounds",
    "participation",
    "seeds",
    "search_seeds",
    "validation",
    "extend",
    "client_prior",
    "limit",
    "recipe",
)
"""Fields that apply to all runs of a study."""


def protocol_of(study: Study) -> Facts:
    """The protocol of the study as plain values."""
    return {
        "title": study.title,
        **{field: getattr(study, field) for field in SHARED},
        "data": dict(study.data),
        "partitions": {label: asdict(made) for label, made in study.partitions.items()},
        "treatments": {label: asdict(treatment) for label, treatment in study.treatments.items()},
    }


def study_data(study: Study, scores: Sequence[BenchScore], facts: Record) -> Facts:
    """All data of the study: protocol, scores with the digests of their runs, rankings.

    Args:
        study: the study.
        scores: of every treatment in every block.
        facts: of the call: command, version, seconds.
    """
    return {
        "schema": SCHEMA,
        **facts,
        "protocol": protocol_of(study),
        "rankings": [asdict(ranked) for ranked in rankings(study, scores)],
        "scores": [asdict(score) for score in scores],
    }


def as_json(data: Record) -> str:
    """The data as JSON text, with one ranking or score on a line."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value, indent=1)
        if key in ("rankings", "scores"):
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            text = f"[\n{rows}\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    body = ",\n".join(parts)
    return f"{{\n{body}\n}}\n"


def summary_rows(ranked: Record) -> list[tuple[str, ...]]:
    """One row per treatment of a ranking, as text; the columns are ``SUMMARY``."""
    rows: list[tuple[str, ...]] = []
    for place, s in enumerate(ranked["standings"]):
        difference = ""
        # The first treatment has no difference, because it is the one with which all others are compared.
        if place > 0:
            difference = f"{100 * s['difference']:+.2f}" + _interval(s["interval"])
        without_prior = ""
        if s["without_prior"] is not None:
            without_prior = f"{100 * s['without_prior']:.2f}"
        rows.append(
            (
                s["treatment"],
                s["family"],
                f"{s['rank']:.1f}",
                f"{100 * s['mean']:.2f}",
                without_prior,
                f"{100 * s['worst']:.2f}",
                difference,
                byte_size(round(s["bytes_up"])),
                f"{s['seconds']:.2f}",
                str(s["unstable"] or ""),
                str(s["edges"] or ""),
                str(s["failed"] or ""),
            )
        )
    return rows


SUMMARY = (
    "treatment",
    "family",
    "mean rank",
    "accuracy (%)",
    "without prior (%)",
    "lowest (%)",
    "minus the first (points)",
    "sent by a client",
    "seconds",
    "unstable",
    "at an edge",
    "not trained",
)


def sentences(ranked: Record) -> list[str]:
    """The sentence above the table of a ranking."""
    count = len(ranked["standings"])
    blocks = counted(len(ranked["blocks"]), "block")
    return [f"{count} treatments, {blocks} (combinations of data and backbone)."]


def markdown(data: Record) -> str:
    """The page in Markdown, from the values of ``study_data``."""
    p = data["protocol"]
    scores = data["scores"]
    count = len(scores)
    runs = sum(len(s["runs"]) for s in scores)
    seconds = data["runs_seconds"]
    command = data["command"]
    images = "all images"
    if p["limit"]:
        images = f"at most {p['limit']} images"
    participation = p["participation"]
    validation = p["validation"]
    search_seed = p["search_seeds"]
    unstable = 100 * UNSTABLE
    extend = p["extend"]
    prior = p["client_prior"]
    edges = _edges(scores)
    datasets = "; ".join(dict.fromkeys(str(s["block"]["data"]) for s in scores))
    backbones = ", ".join(dict.fromkeys(s["block"]["backbone"] for s in scores))
    lines = [
        f"# {p['title']}",
        "",
        f"`{command}` with fedcache {data['version']}: {count} comparisons, {runs} runs, {seconds:,.0f} s "
        "of training (without the search). Every number is the mean of stored runs; the JSON file of the "
        "same name next to this page lists their digests.",
        "",
        f"Rows: {images} of each data set. Rounds: {p['rounds']}, participation {participation}. "
        f"Settings: every combination of a treatment's search is trained without a share of {validation} of each "
        f"client's training rows (seed {search_seed}), and scored on the left-out rows. If the best value is at an "
        f"end of its range, up to {extend} values beyond this end are tried, as long as validation improves. "
        f"The best combination is trained on all training rows with seeds {p['seeds']}. Each seed has its own "
        "partition, which all treatments share. Test rows are never used for selection.",
        "",
        "**Accuracy** is the mean over clients. Where the partition has matched tests, a client is scored on test rows "
        "with the class shares of its own training rows. Personal models learn these shares. So a model for all "
        f"clients is scored with the client prior `{prior}`, for which each client sends its class counts; "
        "the column *without prior* has the accuracy of the same model without it. The second table of each partition "
        "ranks models for all clients without the prior.",
        "",
        "The interval of a difference takes each data set as one observation, because blocks of one data set share "
        "images. With fewer than three data sets there is none. `fedcache compare --over settings` tests the same "
        "runs over their partitions. *Unstable* counts blocks in which two seeds differ by more than "
        f"{unstable:.0f} points. *At an edge* counts blocks in which a chosen value is at the end of the values that "
        f"were tried, so a better value may exist. This is the case for {edges}.",
        "",
        f"Data: {datasets}. Backbones: {backbones}.",
    ]
    for ranked in data["rankings"]:
        title = ranked["title"][0].upper() + ranked["title"][1:]
        lines += ["", f"## {title}", "", *sentences(ranked), ""]
        lines += _table(SUMMARY, summary_rows(ranked))
    lines += [
        "",
        "## Block by block",
        "",
        "Accuracy in %, standard deviation over seeds (none if all seeds agree), accuracy with the client prior after "
        "an arrow, and the chosen settings.",
        "",
    ]
    lines += [*_blocks(scores), ""]
    return "\n".join(lines)


def _edges(scores: Sequence[Record]) -> str:
    """The share of searched scores with a value at an edge, in words."""
    searched = [s for s in scores if s["values"] and s["points"] > 1]
    at_edge = sum(bool(s["edges"]) for s in searched)
    share = 100 * at_edge / max(1, len(searched))
    count = len(searched)
    return f"{at_edge} of {count} searches ({share:.1f} %)"


def _blocks(scores: Sequence[Record]) -> list[str]:
    """One table for each data set and backbone: a column for each partition."""
    lines = []
    pairs = dict.fromkeys((s["block"]["data"], s["block"]["backbone"]) for s in scores)
    for data, backbone in pairs:
        partitions: dict[str, None] = {}
        by_treatment: dict[str, dict[str, Record]] = {}
        for s in scores:
            block = s["block"]
            if block["data"] == data and block["backbone"] == backbone:
                partitions[block["partition"]] = None
                by_treatment.setdefault(s["treatment"], {})[block["partition"]] = s
        rows = []
        for treatment, found in by_treatment.items():
            values = [_value(found.get(partition)) for partition in partitions]
            rows.append((treatment, *values))
        lines += [f"### {data}, {backbone}", "", *_table(("treatment", *partitions), rows), ""]
    failed = [s for s in scores if s["why_not"]]
    if failed:
        lines += ["### Not trained", ""]
        for s in failed:
            where = ", ".join((*s["block"].values(), s["treatment"]))
            lines.append(f"- {where}: {s['why_not']}")
    return lines


def _value(score: Record | None) -> str:
    """A cell of a table: mean accuracy in %, its standard deviation over seeds, with prior, and the chosen settings."""
    if score is None:
        return ""
    if not score["values"]:
        return "not trained"
    values = 100 * np.array(score["values"])
    words = f"{values.mean():.2f}"
    # A treatment that draws nothing gives the same with every seed.
    if len(values) > 1 and np.ptp(values):
        deviation = values.std(ddof=1)
        words += f" ({deviation:.2f})"
    if score["with_prior"]:
        words += f" -> {100 * np.mean(score['with_prior']):.2f}"
    chosen = settings_text(score["settings"])
    if chosen:
        words += f" [{chosen}]"
    return words


def _interval(found: Sequence[float] | None) -> str:
    if found is None:
        return ""
    low, high = found
    return f" [{100 * low:+.2f}, {100 * high:+.2f}]"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_row(cells) for cells in (columns, ["---"] * len(columns), *rows)]


LEVEL = 0.95
"""Confidence level of intervals."""
UNSTABLE = 0.1
"""A treatment is unstable in a block if its accuracies with two seeds differ by more than this, as a fraction."""


@dataclass(frozen=True)
class Standing:
    """A treatment over the blocks of one ranking.

    Attributes:
        treatment: its label.
        family: its family.
        rank: mean rank over the blocks; 1 is best.
        mean: accuracy by which treatments are ranked, mean over the blocks in which it was trained; a fraction.
        without_prior: the same without the client prior; None if ``mean`` has no client prior.
        worst: its lowest accuracy in a block.
        difference: its accuracy minus that of the first treatment: mean over data sets of the means over their blocks.
        interval: of that difference over data sets, as ``statistics.interval``; None with fewer than three data sets.
        bytes_up: per client, mean over the blocks.
        seconds: of training, mean over the blocks.
        unstable: number of blocks in which it is unstable.
        edges: number of blocks in which a chosen value is the last one that was tried.
        failed: number of blocks in which it could not be trained.
    """

    treatment: str
    family: str
    rank: float
    mean: float
    without_prior: float | None
    worst: float
    difference: float
    interval: tuple[float, float] | None
    bytes_up: float
    seconds: float
    unstable: int
    edges: int
    failed: int


@dataclass(frozen=True)
class BenchRanking:
    """Treatments by mean rank over the blocks of one partition.

    Attributes:
        title: the partition and the selection of treatments, in words.
        blocks: the blocks of the ranking.
        standings: the best rank first.
    """

    title: str
    blocks: tuple[Block, ...]
    standings: tuple[Standing, ...]


def rankings(study: Study, scores: Sequence[BenchScore]) -> list[BenchRanking]:
    """Up to three rankings per partition: of all treatments without class texts, of one model, and with class texts.

    There is no ranking over all partitions, because its winner would depend on the number of partitions of each kind.
    A model for all clients is scored with the client prior, since personal models learn the class shares of their
    client. The second ranking of a partition has only models for all clients, without the prior.
    """
    text_treatments = {label for label, t in study.treatments.items() if t.reads_texts}
    global_treatments = {label for label, t in study.treatments.items() if t.is_global}
    blocks_with_texts = {s.block for s in scores if s.treatment in text_treatments}
    made = []
    for partition in study.partitions:
        part = [s for s in scores if s.block.partition == partition]
        plain = [s for s in part if s.treatment not in text_treatments]
        made.append(_ranked(study, f"partition {partition}", plain))
        one_model = [replace(s, with_prior=()) for s in plain if s.treatment in global_treatments]
        made.append(_ranked(study, f"partition {partition}: one model, without prior", one_model))
        with_texts = [s for s in part if s.block in blocks_with_texts]
        made.append(_ranked(study, f"partition {partition}: data with class texts", with_texts))
    return [ranked for ranked in made if ranked is not None]


def _ranked(study: Study, title: str, scores: Sequence[BenchScore]) -> BenchRanking | None:
    """The ranking of the treatments of these scores; None without a block or a trained treatment."""
    labels = list(dict.fromkeys(s.treatment for s in scores if s.values))
    found = {(s.treatment, s.block): s for s in scores}
    # In a block where a treatment was not measured, the others have no rank relative to it.
    blocks = []
    for block in dict.fromkeys(s.block for s in scores):
        if all((label, block) in found for label in labels):
            blocks.append(block)
    if not blocks or not labels:
        return None
    # Accuracy of each treatment (row) in each block (column).
    values = np.full((len(labels), len(blocks)), np.nan)
    for row, label in enumerate(labels):
        for column, block in enumerate(blocks):
            score = found[label, block]
            if score.values:
                values[row, column] = np.mean(score.with_prior or score.values)
    # A treatment that was not trained in a block ranks below all treatments that were.
    known = np.nan_to_num(values, nan=-1.0)
    ranks = scipy.stats.rankdata(-known, axis=0).mean(1)
    order = sorted(range(len(labels)), key=lambda i: (ranks[i], labels[i]))
    standings = []
    for i in order:
        label = labels[i]
        of_label = [found[label, block] for block in blocks]
        differences = _by_data_set(blocks, values[i] - values[order[0]])
        standings.append(_standing(study, label, float(ranks[i]), values[i], of_label, differences))
    return BenchRanking(title, tuple(blocks), tuple(standings))


def _by_data_set(blocks: Sequence[Block], values: np.ndarray) -> np.ndarray:
    """The mean of the values [B] of each data set, without NaN.

    Blocks of one data set share images. So only data sets are independent, and only they are compared in intervals.
    """
    by_data: dict[str, list[float]] = {}
    for block, value in zip(blocks, values, strict=True):
        if np.isfinite(value):
            by_data.setdefault(block.data, []).append(float(value))
    return np.array([np.mean(of_data) for of_data in by_data.values()])


def _standing(
    study: Study,
    label: str,
    rank: float,
    values: np.ndarray,
    scores: Sequence[BenchScore],
    differences: np.ndarray,
) -> Standing:
    trained = [s for s in scores if s.values]
    finite = values[np.isfinite(values)]
    mean_difference = 0.0
    if len(differences):
        mean_difference = float(differences.mean())
    without_prior = None
    if any(s.with_prior for s in trained):
        without_prior = float(np.mean([np.mean(s.values) for s in trained]))
    return Standing(
        label,
        study.treatments[label].family,
        rank,
        mean=float(finite.mean()),
        without_prior=without_prior,
        worst=float(finite.min()),
        difference=mean_difference,
        interval=interval(differences, LEVEL),
        bytes_up=float(np.mean([s.bytes_up or 0.0 for s in trained])),
        seconds=float(np.mean([s.seconds or 0.0 for s in trained])),
        unstable=sum(float(np.ptp(s.values)) > UNSTABLE for s in trained),
        edges=sum(bool(s.edges) for s in trained),
        failed=len(scores) - len(trained),
    )


# Results of other calls, machines or people, whose scores are taken over.


@dataclass(frozen=True)
class EarlierResults:
    """The study with the data and treatments of the files, and all scores of the files."""

    study: Study
    scores: tuple[BenchScore, ...]


def add_results(study: Study, paths: Sequence[Path]) -> EarlierResults:
    """Read the results that ``frozen-bench -o`` wrote, and check that they can be compared with the study.

    Raises:
        UsageError for a file that is no such result, that has another protocol or another treatment of the same label,
            and for two files that score the same treatment in the same block.
    """
    scores: dict[tuple[Block, str], BenchScore] = {}
    for path in paths:
        found = _read(path)
        study = _joined(study, found, path)
        for score in found.scores:
            key = (score.block, score.treatment)
            if key in scores:
                raise UsageError(
                    f"{path} has a score of {score.treatment} in the block {score.block}, which was already given.",
                    f"If another file also has this score, leave one of the two files out: --add {path}",
                )
            scores[key] = score
    made = EarlierResults(study, tuple(scores.values()))
    check_same_rows(made.scores)
    return made


@dataclass(frozen=True)
class ResultFile:
    """The checked parts of a result file.

    Attributes:
        shared: values of ``SHARED``.
        data: label -> spec of the dataset.
        partitions: label -> how rows are assigned.
        treatments: label -> method and settings.
        scores: of treatments in blocks.
    """

    shared: Facts
    data: dict[str, str]
    partitions: dict[str, BenchPartition]
    treatments: dict[str, BenchTreatment]
    scores: list[BenchScore]


def _read(path: Path) -> ResultFile:
    """Read and check a file. Raises UsageError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']}, but {SCHEMA} is needed")
        protocol = found["protocol"]
        partitions = protocol["partitions"]
        treatments = protocol["treatments"]
        made = ResultFile(
            shared={name: protocol[name] for name in SHARED},
            data={str(label): str(spec) for label, spec in protocol["data"].items()},
            partitions={label: BenchPartition(**v) for label, v in partitions.items()},
            treatments={label: BenchTreatment(**v) for label, v in treatments.items()},
            scores=[_score(value) for value in found["scores"]],
        )
        for score in made.scores:
            for label, known in (
                (score.block.data, made.data),
                (score.block.partition, made.partitions),
                (score.treatment, made.treatments),
            ):
                if label not in known:
                    raise ValueError(f"a score has the label {label}, which its protocol lacks")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "--add RESULT.json") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no result of frozen-bench: {error}.",
            "fedcache reproduce frozen-bench -o bench.md   writes such a file, bench.json",
        ) from None
    return made


def _score(value: Record) -> BenchScore:
    """A score from JSON values. Raises ValueError or TypeError for values that are not those of a score."""
    values = dict(value)
    block = {axis: str(label) for axis, label in value["block"].items()}
    values["block"] = Block(**block)
    values["treatment"] = str(value["treatment"])
    for name in ("edges", "runs", "partitions"):
        values[name] = tuple(map(str, value[name]))
    for name in ("values", "with_prior"):
        values[name] = tuple(map(float, value[name]))
    for name in ("pooled", "bytes_up", "seconds"):
        if value[name] is not None:
            values[name] = float(value[name])
            if not math.isfinite(values[name]):
                raise ValueError(f"{name} is {value[name]}, expected a finite number")
    values["points"] = int(value["points"])
    score = BenchScore(**values)
    for accuracy in (*score.values, *score.with_prior):
        if not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"an accuracy of {score.treatment} is {accuracy}, expected 0 to 1")
    return score


def _joined(study: Study, found: ResultFile, path: Path) -> Study:
    """The study with the data and treatments of a file. Raises UsageError where they contradict each other."""
    for name, theirs in found.shared.items():
        ours = getattr(study, name)
        if name == "seeds":
            theirs = parse_seeds(str(theirs))
            ours = parse_seeds(ours)
        if theirs != ours:
            raise UsageError(
                f"{path} was measured with {name} {theirs}, but this call has {ours}.",
                "Measure all results with the same protocol:  fedcache reproduce info frozen-bench",
            )
    for ours, theirs in (
        (study.partitions, found.partitions),
        (study.treatments, found.treatments),
    ):
        for label, made in theirs.items():
            # JSON has lists where the study has tuples.
            if label in ours and json.dumps(asdict(ours[label])) != json.dumps(asdict(made)):
                raise UsageError(
                    f"{path} defines {label} differently from this call or from another file.",
                    "Give each definition a label of its own.",
                )
    return replace(
        study,
        data={**found.data, **study.data},
        partitions={**study.partitions, **found.partitions},
        treatments={**study.treatments, **found.treatments},
    )
