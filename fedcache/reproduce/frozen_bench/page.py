"""The study as plain JSON values, and the page made of them. Every number is of stored runs, listed by digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedcache.parsing import counted
from fedcache.progress import byte_size
from fedcache.report.statistics import Ranking, holm, interval, p_value, ranking
from fedcache.reproduce.frozen_bench.measure import BenchScore, Block
from fedcache.reproduce.frozen_bench.study import Study
from fedcache.reproduce.render import markdown_row

SCHEMA = "fedcache.frozen-bench/1"
SHARED = ("rounds", "participation", "seeds", "search_seeds", "validation", "limit")
"""Fields of a study that hold for all its runs."""


def study_data(
    study: Study, scores: Sequence[BenchScore], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """All data of the study: protocol, scores with the digests of their runs, rankings.

    Args:
        study: what was compared.
        scores: of every treatment in every block.
        facts: of the call: command, version, seconds.
    """
    return {
        "schema": SCHEMA,
        **facts,
        "protocol": {
            "title": study.title,
            **{
                k: getattr(study, k)
                for k in ("rounds", "participation", "seeds", "search_seeds", "validation", "limit")
            },
            "data": {k: v.dataset for k, v in study.data.items()},
            "partitions": {
                k: {"scheme": v.scheme, "clients": v.clients, **v.options}
                for k, v in study.partitions.items()
            },
            "treatments": {
                k: {
                    "method": v.method,
                    "family": v.family,
                    "set": dict(v.set),
                    "search": {name: list(values) for name, values in v.search.items()},
                }
                for k, v in study.treatments.items()
            },
        },
        "rankings": [one.to_dict() for one in rankings(study, scores)],
        "scores": [s.to_dict() for s in scores],
    }


def as_json(data: Mapping[str, Any]) -> str:
    """The values as text, one score on a line."""
    rest = json.dumps({k: v for k, v in data.items() if k != "scores"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(score)}" for score in data["scores"])
    return f'{rest[:-2]},\n "scores": [\n{rows}\n ]\n}}\n'


def summary_rows(ranked: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per treatment of a ranking, as text; the columns are ``SUMMARY``."""
    rows: list[tuple[str, ...]] = []
    for place, s in enumerate(ranked["standings"]):
        difference = ""
        # The first is what the others are compared with.
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
    """Sentences to read with a ranking."""
    count = len(ranked["standings"])
    blocks = counted(len(ranked["blocks"]), "block")
    lines = [f"{count} treatments, {blocks} of data, backbone and partition."]
    if ranked["cd"] is not None:
        cd = f"{ranked['cd']:.1f} (Nemenyi, {100 * LEVEL:.0f} %)"
        alike = len(ranked["alike"])
        p = ranked["p"]
        lines.append(
            f"Friedman's chi-squared {ranked['statistic']:.1f}, p {p:.2g}. Mean ranks closer than {cd} do "
            f"not differ significantly: {alike} of {count} are that close to the first."
        )
    return lines


def markdown(data: Mapping[str, Any]) -> str:
    """The page."""
    p = data["protocol"]
    count = len(data["scores"])
    runs = sum(len(s["runs"]) for s in data["scores"])
    seconds = data["runs_seconds"]
    command = data["command"]
    images = p["limit"] or "all"
    participation = p["participation"]
    validation = p["validation"]
    search_seed = p["search_seeds"]
    datasets = "; ".join(dict.fromkeys(str(s["block"]["data"]) for s in data["scores"]))
    backbones = ", ".join(dict.fromkeys(s["block"]["backbone"] for s in data["scores"]))
    lines = [
        f"# {p['title']}",
        "",
        f"`{command}` with fedcache {data['version']}: {count} comparisons, {runs} runs, {seconds:,.0f} s "
        "of training (without the search). Every number is the mean of stored runs; the JSON file of the "
        "same name next to this page lists their digests.",
        "",
        f"Rows: {images} images of each data set. Rounds: {p['rounds']}, participation {participation}. "
        f"Settings: every combination of a treatment's search is trained without {validation} of each "
        f"client's training rows (seed {search_seed}) and scored on these rows; the best is trained on "
        f"all training rows with seeds {p['seeds']}, each with its own partition, which all treatments "
        "share. Test rows are never used for selection. Accuracy is the mean over clients, each scored "
        "on test rows with the classes of its own training rows.",
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
        "Accuracy in %, standard deviation over seeds (none where all give the same), and the chosen settings.",
        "",
    ]
    lines += _blocks(data["scores"])
    return "\n".join([*lines, ""])


def _blocks(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table for each data set and backbone: a column for each partition."""
    lines: list[str] = []
    places = dict.fromkeys((s["block"]["data"], s["block"]["backbone"]) for s in scores)
    for data, backbone in places:
        part = [
            s for s in scores if (s["block"]["data"], s["block"]["backbone"]) == (data, backbone)
        ]
        deals = list(dict.fromkeys(s["block"]["partition"] for s in part))
        found = {(s["treatment"], s["block"]["partition"]): s for s in part}
        rows = []
        for label in dict.fromkeys(s["treatment"] for s in part):
            rows.append((label, *(_value(found.get((label, deal))) for deal in deals)))
        lines += [f"### {data}, {backbone}", "", *_table(("treatment", *deals), rows), ""]
    failed = [s for s in scores if s["why_not"]]
    if failed:
        lines += ["### Not trained", ""]
        for s in failed:
            block = ", ".join(s["block"].values())
            treatment = s["treatment"]
            lines.append(f"- {block}, {treatment}: {s['why_not']}")
    return lines


def _value(score: Mapping[str, Any] | None) -> str:
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
    chosen = ", ".join(f"{k} {v}" for k, v in score["settings"].items())
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
"""Level of intervals and of the critical difference."""


@dataclass(frozen=True)
class Standing:
    """A treatment over the blocks of one ranking.

    Attributes:
        treatment: its label.
        family: of it.
        rank: mean rank over the blocks; 1 is best.
        mean: accuracy, mean over the blocks in which it was trained; a fraction.
        pooled: over the test rows of all clients together, mean over the same blocks.
        worst: its lowest accuracy in a block.
        difference: its accuracy minus that of the first of the ranking, mean over the blocks that both have.
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
        title: what is ranked.
        blocks: where.
        standings: the best rank first.
        statistic: Friedman's chi-squared, and its p.
        p: its p.
        cd: Nemenyi's critical difference of mean ranks; None with fewer than three treatments or two blocks.
        alike: labels that the critical difference does not tell from the first.
    """

    title: str
    blocks: tuple[Block, ...]
    standings: tuple[Standing, ...]
    statistic: float | None
    p: float | None
    cd: float | None
    alike: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def rankings(study: Study, scores: Sequence[BenchScore]) -> list[BenchRanking]:
    """Everything that reads features and labels alone, over all blocks; and with class texts, where there are some."""
    reading = {label for label, t in study.treatments.items() if t.reads_texts}
    texts = {s.block for s in scores if s.treatment in reading}
    made = [
        _ranked(
            study,
            "all data, from features and labels",
            [s for s in scores if s.treatment not in reading],
        )
    ]
    for deal in study.partitions:
        part = [s for s in scores if s.treatment not in reading and s.block.partition == deal]
        made.append(_ranked(study, f"partition {deal}", part))
    if texts:
        made.append(
            _ranked(study, "where there are class texts", [s for s in scores if s.block in texts])
        )
    return [one for one in made if one is not None]


def _ranked(study: Study, title: str, scores: Sequence[BenchScore]) -> BenchRanking | None:
    blocks = tuple(dict.fromkeys(s.block for s in scores))
    labels = list(dict.fromkeys(s.treatment for s in scores if s.values))
    if not blocks or not labels:
        return None
    found = {(s.treatment, s.block): s for s in scores}
    of_label = {t: [found.get((t, b)) for b in blocks] for t in labels}
    values = np.array([list(map(_mean, of_label[t])) for t in labels])
    # A treatment that was not trained in a block ranks below all that were.
    ranked = ranking(np.nan_to_num(values, nan=-1.0), LEVEL)
    if ranked is not None:
        ranks = ranked.ranks
    else:
        ranks = tuple(float(1 + (values[:, 0] > v[0]).sum()) for v in values)
    order = sorted(range(len(labels)), key=lambda i: (ranks[i], labels[i]))
    first = values[order[0]]
    # Differences from the first, in the blocks where both were trained.
    both = []
    tests: list[float | None] = []
    for place, i in enumerate(order):
        difference = (values[i] - first)[np.isfinite(values[i]) & np.isfinite(first)]
        p = None
        if place > 0 and len(difference) > 1:
            p = p_value("wilcoxon", difference)
        both.append(difference)
        tests.append(p)
    standings = []
    for i, difference, p in zip(order, both, holm(tests), strict=True):
        label = labels[i]
        standings.append(
            _standing(study, label, ranks[i], values[i], of_label[label], difference, p)
        )
    return BenchRanking(
        title,
        blocks,
        tuple(standings),
        *_friedman(ranked),
        _alike(ranked, [labels[i] for i in order], ranks),
    )


def _mean(score: BenchScore | None) -> float:
    if score is None or not score.values:
        return np.nan
    return float(np.mean(score.values))


def _friedman(ranked: Ranking | None) -> tuple[float | None, float | None, float | None]:
    if ranked is None:
        return (None, None, None)
    return (ranked.statistic, ranked.p, ranked.cd)


def _alike(
    ranked: Ranking | None, labels: Sequence[str], ranks: Sequence[float]
) -> tuple[str, ...]:
    if ranked is None:
        return ()
    best = sorted(ranks)
    return tuple(
        label for label, rank in zip(labels, best, strict=True) if rank - best[0] <= ranked.cd
    )


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
