"""A run's result as one line, as facts and as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcache.errors import unknown
from fedcache.notebooks import data_frame, percent
from fedcache.runs.directory import rounds_of

FRAMES = ("rounds", "clients")


def spread(accuracy: Mapping[str, Any]) -> str:
    """``0.8123 +- 0.0045``, without the second where there is one seed; ``not scored`` without test labels."""
    mean, std = accuracy["mean"], accuracy["std"]
    if mean is None:
        return "not scored"
    return f"{mean:.4f}" if std is None else f"{mean:.4f} +- {std:.4f}"


def facts_of(result: Mapping[str, Any], measured: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a person looks for first, by name; None for what the run does not have."""
    part, exact, seconds = result["partition"], result["traffic"]["exact"], measured.get("seconds", {})
    return {
        "accuracy": percent(result["accuracy"]["mean"]),
        "std over seeds": percent(result["accuracy"]["std"]),
        "worst 10 % of clients": percent(result["fairness"].get("worst10")),
        "macro-F1": percent(result["macro_f1"]["mean"]),
        "partition": f"{part['scheme']}, {part['clients']} clients",
        "rounds": f"{result['rounds']}, {result['participation']} clients a round",
        "seeds": ", ".join(map(str, result["seeds"])),
        "bytes up, down": f"{exact['up_bytes']:,}, {exact['down_bytes']:,}",
        "fidelity": result["fidelity"],
        "seconds of training": f"{seconds['train']:,.2f}" if "train" in seconds else None,
        "directory": path,
    }


def frame_of(path: Path, result: Mapping[str, Any], what: str) -> Any:
    """See ``Run.frame``."""
    if what not in FRAMES:
        raise unknown("frame", what, FRAMES)
    if what == "clients":
        return data_frame(
            {
                "client": result["clients"],
                "accuracy": result["accuracy"]["per_client"],
                "classes_owned": result["classes_owned"]["per_client"],
            }
        )
    records = rounds_of(path)
    watched = dict.fromkeys(k for r in records for k in r.get("diagnostics", {}))
    return data_frame(
        {
            "seed": [r["seed"] for r in records],
            "round": [r["round"] for r in records],
            "clients": [len(r["clients"]) for r in records],
            "accuracy": [r["accuracy"] for r in records],
            "bytes_up": [r["traffic"]["up_bytes"] for r in records],
            "bytes_down": [r["traffic"]["down_bytes"] for r in records],
            **{k: [r.get("diagnostics", {}).get(k) for r in records] for k in watched},
        }
    )


def values_of(words: Sequence[str | None]) -> list[Any]:
    """Swept words as numbers where all of them are."""
    for kind in (int, float):
        try:
            return [None if w is None else kind(w) for w in words]
        except ValueError:
            continue
    return list(words)
