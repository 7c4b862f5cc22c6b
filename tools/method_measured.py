"""What docs/frozen-bench.json says of a method, as lines of its page: accuracy by partition, rank, bytes, seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcache.progress import byte_size

MEASURED = Path(__file__).resolve().parent.parent / "docs" / "frozen-bench.json"
NOT_THERE = "Not measured in [the comparison of methods on frozen features](../frozen-bench.md)."


@cache
def bench() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def treatments(method: str) -> dict[str, Mapping[str, Any]]:
    """The treatments of the comparison that are of a method: the method with some of its settings fixed."""
    return {
        name: t for name, t in bench()["protocol"]["treatments"].items() if t["method"] == method
    }


def measured(method: str) -> list[str]:
    """The section of a method's page, without its title."""
    tried = treatments(method)
    if not tried:
        return [NOT_THERE]
    protocol = bench()["protocol"]
    partitions = list(protocol["partitions"])
    rows = [_row(name, treatment, partitions) for name, treatment in tried.items()]
    shown = [row for row in rows if row]
    if not shown:
        return [NOT_THERE]
    blocks = [score["block"] for score in bench()["scores"] if score["treatment"] in tried]
    data, backbones = (sorted({block[key] for block in blocks}) for key in ("data", "backbone"))
    head = ("setting", *partitions, "rank", "sent by a client", "seconds")
    return [
        f"Accuracy in %, mean over clients, by how rows are dealt; {', '.join(data)} with {', '.join(backbones)}, "
        f"{protocol['rounds']} rounds, seeds {protocol['seeds']}; what is chosen is chosen on validation rows "
        "([all methods, and how it was measured](../frozen-bench.md)).",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in shown),
        "",
        "Bytes and seconds are of a whole training, as means over the blocks; a rank is the mean over blocks.",
    ]


def _row(name: str, treatment: Mapping[str, Any], partitions: list[str]) -> tuple[str, ...]:
    scores = [
        score for score in bench()["scores"] if score["treatment"] == name and score["values"]
    ]
    if not scores:
        return ()
    by = {part: [s for s in scores if s["block"]["partition"] == part] for part in partitions}
    accuracy = [
        f"{100 * fmean(fmean(s['values']) for s in of):.1f}" if of else "" for of in by.values()
    ]
    setting = ", ".join(settings(treatment)) or "as in the paper"
    sent, seconds = (fmean(score[key] for score in scores) for key in ("bytes_up", "seconds"))
    return (setting, *accuracy, _rank(name), byte_size(round(sent)), f"{seconds:.2f}")


def settings(treatment: Mapping[str, Any]) -> list[str]:
    """What is fixed in a treatment, and what was chosen on validation rows in every block."""
    chosen = [f"`{key}` chosen" for key in treatment["search"]]
    return [f"`{key}={_shown(value)}`" for key, value in treatment["set"].items()] + chosen


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value}"


def _rank(name: str) -> str:
    """In the first ranking, which is of all blocks, that has the treatment."""
    for ranking in bench()["rankings"]:
        for standing in ranking["standings"]:
            if standing["treatment"] == name:
                return f"{standing['rank']:.1f} of {len(ranking['standings'])}"
    return ""
