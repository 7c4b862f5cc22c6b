"""The study as plain JSON values and as a page in Markdown. Every number comes from stored runs, listed by digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy

from fedcache.parsing import as_lists, counted
from fedcache.progress import byte_size
from fedcache.report.statistics import holm, interval, p_value, ranking
from fedcache.reproduce.frozen_bench.measure import BenchScore, Block
from fedcache.reproduce.frozen_bench.study import Study
from fedcache.reproduce.planning import settings_text
from fedcache.reproduce.render import markdown_row

SCHEMA = "fedcache.frozen-bench/1"
SHARED = ("rounds", "participation", "seeds", "search_seeds", "validation", "limit")
"""Fields that apply to all runs of a study."""


def study_data(
    study: Study, scores: Sequence[BenchScore], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """All data of the study: protocol, scores with the digests of their runs, rankings.

    Args:
        study: the study.
        scores: of every treatment in every block.
        facts: of the call: command, version, seconds.
    """
    partitions = {}
    for label, bench_partition in study.partitions.items():
        partitions[label] = {
            "scheme": bench_partition.scheme,
            "clients": bench_partition.clients,
            **bench_partition.options,
        }
    treatments = {}
    for label, treatment in study.treatments.items():
        treatments[label] = {
            "method": treatment.method,
            "family": treatment.family,
            "set": dict(treatment.set),
            "search": as_lists(treatment.search),
        }
    protocol = {
        "title": study.title,
        **{field: getattr(study, field) for field in SHARED},
        "data": dict(study.data),
        "partitions": partitions,
        "treatments": treatments,
    }
    return {
        "schema": SCHEMA,
        **facts,
        "protocol": protocol,
        "rankings": [asdict(ranked) for ranked in rankings(study, scores)],
        "scores": [asdict(score) for score in scores],
    }


def as_json(data: Mapping[str, Any]) -> str:
    """The data as JSON text, one score on a line."""
    others = {key: value for key, value in data.items() if key != "scores"}
    # The last two characters, a line break and a brace, are removed, so that the scores can be added below.
    start = json.dumps(others, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(score)}" for score in data["scores"])
    return f'{start},\n "scores": [\n{rows}\n ]\n}}\n'


def summary_rows(ranked: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per treatment of a ranking, as text; the columns are ``SUMMARY``."""
    rows: list[tuple[str, ...]] = []
    for place, s in enumerate(ranked["standings"]):
        difference = ""
        # The first treatment has no difference, because it is the one with which all others are compared.
        if place > 0:
            difference = f"{100 * s['difference']:+.2f}" + _interval(s["interval"])
        p = ""
        if s["p"] is not None:
            p = f"{s['p']:.3g}"
        rows.append(
            (
                s["treatment"],
                s["family"],
                f"{s['rank']:.1f}",
                f"{100 * s['mean']:.2f}",
                f"{100 * s['pooled']:.2f}",
                f"{100 * s['worst']:.2f}",
                difference,
                p,
                byte_size(round(s["bytes_up"])),
                f"{s['seconds']:.2f}",
                str(s["failed"] or ""),
            )
        )
    return rows


SUMMARY = (
    "treatment",
    "family",
    "mean rank",
    "accuracy (%)",
    "pooled (%)",
    "lowest (%)",
    "minus the first (points)",
    "p (Holm)",
    "sent by a client",
    "seconds",
    "not trained",
)


def sentences(ranked: Mapping[str, Any]) -> list[str]:
    """Sentences above the table of a ranking."""
    count = len(ranked["standings"])
    blocks = counted(len(ranked["blocks"]), "block")
    lines = [f"{count} treatments, {blocks} (combinations of data, backbone and partition)."]
    if ranked["cd"] is not None:
        cd = f"{ranked['cd']:.1f} apart (Nemenyi, {100 * LEVEL:.0f} %)"
        alike = len(ranked["alike"])
        p = ranked["p"]
        lines.append(
            f"Friedman's chi-squared {ranked['statistic']:.1f}, p {p:.2g}. Two mean ranks differ significantly "
            f"only if they are more than {cd}. By this test, {alike} of the {count} treatments, including the "
            "first, do not differ from the first."
        )
    return lines


def markdown(data: Mapping[str, Any]) -> str:
    """The page in Markdown, from the values of ``study_data``."""
    p = data["protocol"]
    scores = data["scores"]
    count = len(scores)
    runs = sum(len(s["runs"]) for s in scores)
    seconds = data["runs_seconds"]
    command = data["command"]
    images = p["limit"] or "all"
    participation = p["participation"]
    validation = p["validation"]
    search_seed = p["search_seeds"]
    datasets = "; ".join(dict.fromkeys(str(s["block"]["data"]) for s in scores))
    backbones = ", ".join(dict.fromkeys(s["block"]["backbone"] for s in scores))
    lines = [
        f"# {p['title']}",
        "",
        f"`{command}` with fedcache {data['version']}: {count} comparisons, {runs} runs, {seconds:,.0f} s "
        "of training (without the search). Every number is the mean of stored runs; the JSON file of the "
        "same name next to this page lists their digests.",
        "",
        f"Rows: {images} images of each data set. Rounds: {p['rounds']}, participation {participation}. "
        f"Settings: every combination of a treatment's search is trained without a share of {validation} of each "
        f"client's training rows (seed {search_seed}), and scored on the left-out rows. The best one is trained on "
        f"all training rows with seeds {p['seeds']}. Each seed has its own partition, which all treatments share. "
        "Test rows are never used for selection. Accuracy is the mean over clients, each scored on test rows with "
        "the classes of its own training rows.",
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
        "Accuracy in %, standard deviation over seeds (none if all seeds agree), and the chosen settings.",
        "",
    ]
    lines += [*_blocks(scores), ""]
    return "\n".join(lines)


def _blocks(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table for each data set and backbone: a column for each partition."""
    lines = []
    pairs = dict.fromkeys((s["block"]["data"], s["block"]["backbone"]) for s in scores)
    for data, backbone in pairs:
        partitions: dict[str, None] = {}
        by_treatment: dict[str, dict[str, Mapping[str, Any]]] = {}
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


def _value(score: Mapping[str, Any] | None) -> str:
    """A cell of a table: mean accuracy in %, its standard deviation over seeds, and the chosen settings."""
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
"""Confidence level of intervals and of the critical difference."""


@dataclass(frozen=True)
class Standing:
    """A treatment over the blocks of one ranking.

    Attributes:
        treatment: its label.
        family: its family.
        rank: mean rank over the blocks; 1 is best.
        mean: accuracy, mean over the blocks in which it was trained; a fraction.
        pooled: accuracy over the test rows of all clients together, mean over the same blocks.
        worst: its lowest accuracy in a block.
        difference: its accuracy minus that of the first treatment, mean over the blocks that both have.
        interval: of that difference over blocks, as ``statistics.interval``; None with fewer than three.
        p: of Wilcoxon's signed-rank test of these differences, corrected for all treatments (Holm); None for the first.
        bytes_up: per client, mean over the blocks.
        seconds: of training, mean over the blocks.
        failed: blocks in which it could not be trained.
    """

    treatment: str
    family: str
    rank: float
    mean: float
    pooled: float
    worst: float
    difference: float
    interval: tuple[float, float] | None
    p: float | None
    bytes_up: float
    seconds: float
    failed: int


@dataclass(frozen=True)
class BenchRanking:
    """Treatments by mean rank over the blocks that all of them have.

    Attributes:
        title: the selection of treatments and blocks, in words.
        blocks: the blocks of the ranking.
        standings: the best rank first.
        statistic: Friedman's chi-squared.
        p: p value of the statistic.
        cd: Nemenyi's critical difference of mean ranks; None with fewer than three treatments or two blocks.
        alike: labels of treatments whose mean rank is within the critical difference of the first.
    """

    title: str
    blocks: tuple[Block, ...]
    standings: tuple[Standing, ...]
    statistic: float | None
    p: float | None
    cd: float | None
    alike: tuple[str, ...]


def rankings(study: Study, scores: Sequence[BenchScore]) -> list[BenchRanking]:
    """Rankings of treatments that need no class texts, over all blocks and per partition; and of all treatments.

    All treatments are ranked only over the blocks that have class texts.
    """
    text_treatments = {label for label, t in study.treatments.items() if t.reads_texts}
    plain = [s for s in scores if s.treatment not in text_treatments]
    made = [_ranked(study, "all data, from features and labels", plain)]
    for partition in study.partitions:
        part = [s for s in plain if s.block.partition == partition]
        made.append(_ranked(study, f"partition {partition}", part))
    blocks_with_texts = {s.block for s in scores if s.treatment in text_treatments}
    if blocks_with_texts:
        with_texts = [s for s in scores if s.block in blocks_with_texts]
        made.append(_ranked(study, "where there are class texts", with_texts))
    return [ranked for ranked in made if ranked is not None]


def _ranked(study: Study, title: str, scores: Sequence[BenchScore]) -> BenchRanking | None:
    """The ranking of the treatments of these scores; None without a block or a trained treatment."""
    blocks = tuple(dict.fromkeys(s.block for s in scores))
    labels = list(dict.fromkeys(s.treatment for s in scores if s.values))
    if not blocks or not labels:
        return None
    found = {(s.treatment, s.block): s for s in scores}
    scores_of = {}
    means = []
    for label in labels:
        of_label = [found.get((label, block)) for block in blocks]
        scores_of[label] = of_label
        means.append([_mean(score) for score in of_label])
    # Accuracy of each treatment (row) in each block (column).
    values = np.array(means)
    # A treatment that was not trained in a block ranks below all treatments that were.
    known = np.nan_to_num(values, nan=-1.0)
    ranked = ranking(known, LEVEL)
    if ranked is not None:
        ranks = ranked.ranks
    else:
        # With fewer than three treatments or two blocks, there is no test of ranks, but there are mean ranks.
        ranks = tuple(scipy.stats.rankdata(-known, axis=0).mean(1).tolist())
    order = sorted(range(len(labels)), key=lambda i: (ranks[i], labels[i]))
    first = values[order[0]]
    # Differences from the first, in the blocks where both were trained.
    differences = []
    tests = []
    for place, i in enumerate(order):
        both_trained = np.isfinite(values[i]) & np.isfinite(first)
        difference = (values[i] - first)[both_trained]
        p = None
        if place > 0 and len(difference) > 1:
            p = p_value("wilcoxon", difference)
        differences.append(difference)
        tests.append(p)
    standings = []
    for i, difference, p in zip(order, differences, holm(tests), strict=True):
        label = labels[i]
        standings.append(
            _standing(study, label, ranks[i], values[i], scores_of[label], difference, p)
        )
    if ranked is None:
        return BenchRanking(title, blocks, tuple(standings), None, None, None, ())
    best = ranks[order[0]]
    alike = tuple(labels[i] for i in order if ranks[i] - best <= ranked.cd)
    return BenchRanking(
        title, blocks, tuple(standings), ranked.statistic, ranked.p, ranked.cd, alike
    )


def _mean(score: BenchScore | None) -> float:
    if score is None or not score.values:
        return np.nan
    return float(np.mean(score.values))


def _standing(
    study: Study,
    label: str,
    rank: float,
    values: np.ndarray,
    scores: Sequence[BenchScore | None],
    difference: np.ndarray,
    p: float | None,
) -> Standing:
    known = [s for s in scores if s is not None and s.values]
    finite = values[np.isfinite(values)]
    mean_difference = 0.0
    if len(difference):
        mean_difference = float(difference.mean())
    return Standing(
        label,
        study.treatments[label].family,
        rank,
        mean=float(finite.mean()),
        worst=float(finite.min()),
        difference=mean_difference,
        interval=interval(difference, LEVEL),
        p=p,
        pooled=float(np.mean([s.pooled or 0.0 for s in known])),
        bytes_up=float(np.mean([s.bytes_up or 0.0 for s in known])),
        seconds=float(np.mean([s.seconds or 0.0 for s in known])),
        failed=len(scores) - len(known),
    )
