"""The study as plain JSON values, and the page made of them. Every number is of stored runs, listed by digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcache.progress import byte_size
from fedcache.reproduce.frozen_bench.measure import BenchScore
from fedcache.reproduce.frozen_bench.study import Study
from fedcache.reproduce.frozen_bench.table import LEVEL, rankings
from fedcache.reproduce.render import markdown_row

SCHEMA = "fedcache.frozen-bench/1"
SHARED = ("rounds", "participation", "seeds", "search_seeds", "validation", "limit")
"""Fields of a study that hold for all its runs."""


def study_data(
    study: Study, scores: Sequence[BenchScore], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that is known: protocol, scores with the digests of their runs, rankings.

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
    return [
        (
            s["treatment"],
            s["family"],
            f"{s['rank']:.1f}",
            f"{100 * s['mean']:.2f}",
            f"{100 * s['pooled']:.2f}",
            f"{100 * s['worst']:.2f}",
            "" if n == 0 else f"{100 * s['difference']:+.2f}{_interval(s['interval'])}",
            "" if s["p"] is None else f"{s['p']:.3g}",
            byte_size(round(s["bytes_up"])),
            f"{s['seconds']:.2f}",
            str(s["failed"] or ""),
        )
        for n, s in enumerate(ranked["standings"])
    ]


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
    """What must be read with a ranking."""
    count = len(ranked["standings"])
    blocks = len(ranked["blocks"])
    said = [
        f"{count} treatments, {blocks} block{'s' * (blocks != 1)} of data, backbone and partition."
    ]
    if ranked["cd"] is not None:
        said.append(
            f"Friedman's chi-squared {ranked['statistic']:.1f}, p {ranked['p']:.2g}. Mean ranks closer than "
            f"{ranked['cd']:.1f} (Nemenyi, {100 * LEVEL:.0f} %) are not told apart: "
            f"{len(ranked['alike'])} of {count} are that close to the first."
        )
    return said


def markdown(data: Mapping[str, Any]) -> str:
    """The page."""
    p = data["protocol"]
    lines = [
        f"# {p['title']}",
        "",
        f"`{data['command']}` with fedcache {data['version']}: {len(data['scores'])} comparisons, "
        f"{sum(len(s['runs']) for s in data['scores'])} runs, {data['runs_seconds']:,.0f} s of training (without the "
        "search). Every number is the mean of stored runs; the JSON file beside this page, of the same name, lists "
        "their digests.",
        "",
        f"Rows: {p['limit'] or 'all'} images of each data set. Rounds: {p['rounds']}, participation "
        f"{p['participation']}. Settings: every combination of a treatment's search is trained without "
        f"{p['validation']} of each client's training rows (seed {p['search_seeds']}) and scored on these rows; the "
        f"best is trained on all training rows with seeds {p['seeds']}, each with a partition of its own that all "
        "treatments share. Test rows choose nothing. Accuracy is the mean over clients, each scored on test rows with "
        "the classes of its own training rows.",
        "",
        "Data: " + "; ".join(dict.fromkeys(f"{s['block']['data']}" for s in data["scores"])) + ". "
        "Backbones: "
        + ", ".join(dict.fromkeys(s["block"]["backbone"] for s in data["scores"]))
        + ".",
    ]
    for ranked in data["rankings"]:
        lines += [
            "",
            f"## {ranked['title'][0].upper()}{ranked['title'][1:]}",
            "",
            *sentences(ranked),
            "",
        ]
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
        rows = [
            (label, *(_value(found.get((label, deal))) for deal in deals))
            for label in dict.fromkeys(s["treatment"] for s in part)
        ]
        lines += [f"### {data}, {backbone}", "", *_table(("treatment", *deals), rows), ""]
    failed = [s for s in scores if s["why_not"]]
    if failed:
        lines += ["### Not trained", ""]
        lines += [
            f"- {', '.join(s['block'].values())}, {s['treatment']}: {s['why_not']}" for s in failed
        ]
    return lines


def _value(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return ""
    if not score["values"]:
        return "not trained"
    values = 100 * np.array(score["values"])
    # no draw: no spread to tell
    spread = ""
    if len(values) > 1 and np.ptp(values):
        spread = f" ({values.std(ddof=1):.2f})"
    chosen = ", ".join(f"{k} {v}" for k, v in score["settings"].items())
    return f"{values.mean():.2f}{spread}" + (f" [{chosen}]" if chosen else "")


def _interval(found: Sequence[float] | None) -> str:
    if found is None:
        return ""
    return f" [{100 * found[0]:+.2f}, {100 * found[1]:+.2f}]"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_row(cells) for cells in (columns, ["---"] * len(columns), *rows)]
