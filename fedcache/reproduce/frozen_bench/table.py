"""What the scores say: ranks with a critical difference, differences from the best, costs. Numbers in, dataclasses out.

A treatment that could not be trained in a block has the last rank there, so that failing is never an advantage; its
means are over the blocks in which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedcache.report.statistics import Ranking, holm, interval, p_value, ranking
from fedcache.reproduce.frozen_bench.measure import BenchScore, Block
from fedcache.reproduce.frozen_bench.study import Study

LEVEL = 0.95
"""Of intervals, and of the critical difference."""


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
    values = np.array([[_mean(found.get((t, b))) for b in blocks] for t in labels])
    # what was not trained is below all that was
    ranked = ranking(np.nan_to_num(values, nan=-1.0), LEVEL)
    if ranked is not None:
        ranks = ranked.ranks
    else:
        ranks = tuple(float(1 + (values[:, 0] > v[0]).sum()) for v in values)
    order = sorted(range(len(labels)), key=lambda i: (ranks[i], labels[i]))
    first = values[order[0]]
    both = [
        values[i][k] - first[k]
        for i in order
        for k in [np.isfinite(values[i]) & np.isfinite(first)]
    ]
    tests: list[float | None] = [
        None if n == 0 or len(d) < 2 else p_value("wilcoxon", d) for n, d in enumerate(both)
    ]
    standings = tuple(
        _standing(
            study, labels[i], ranks[i], values[i], [found.get((labels[i], b)) for b in blocks], d, p
        )
        for i, d, p in zip(order, both, holm(tests), strict=True)
    )
    return BenchRanking(
        title,
        blocks,
        standings,
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
    return Standing(
        label,
        study.treatments[label].family,
        rank,
        mean=float(values[np.isfinite(values)].mean()),
        worst=float(values[np.isfinite(values)].min()),
        difference=float(difference.mean()) if len(difference) else 0.0,
        interval=interval(difference, LEVEL),
        p=p,
        pooled=float(np.mean([s.pooled or 0.0 for s in known])),
        bytes_up=float(np.mean([s.bytes_up or 0.0 for s in known])),
        seconds=float(np.mean([s.seconds or 0.0 for s in known])),
        failed=len(scores) - len(known),
    )
