"""Catalogue of methods, read from ``catalogue.json`` without importing torch or any method.

The file is written by ``tools/make_docs.py``. Counts of scalars and bytes are kept as polynomials of the feature width
W and the number of classes C, so that they are exact for any store. The file says from which sources it was made; where
those have changed since, the facts are computed from the methods themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import fedcache
from fedcache.report.methods.sizes import Sizes

PATH = Path(__file__).with_name("catalogue.json")
COUNTS = ("up", "up_bytes", "paper_up", "down", "down_bytes", "paper_down", "first_down")
"""What is counted of one client in one round: sent and received, in scalars, in bytes, and as the paper counts."""

SOURCES = (
    "federate/methods",
    "federate/engine/method.py",
    "federate/engine/outcome.py",
    "heads",
    "report/methods/facts.py",
)
"""Files and folders below the package that the facts depend on."""

Term = Sequence[int]
"""(numerator, denominator, power of W, power of C) of one term of a polynomial."""


def sources_digest() -> str:
    """sha256 over the names and bytes of ``SOURCES``: some 80 small files, a few milliseconds."""
    root = Path(fedcache.__file__).parent
    digest = hashlib.sha256()
    for source in SOURCES:
        place = root / source
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            raw = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def evaluate(terms: Iterable[Term], width: int, classes: int) -> int:
    """The value of a polynomial, which is a whole number at whole sizes.

    >>> evaluate([(1, 2, 2, 0), (1, 2, 1, 0), (1, 1, 1, 1)], 512, 10)  # W (W + 1) / 2 + W C
    136448
    """
    return int(sum(Fraction(top, low) * width**w * classes**c for top, low, w, c in terms))


def width_of(entry: dict[str, Any], sizes: Sizes) -> int:
    """The W of a method: methods that read text take the backbone that has text, the others all backbones."""
    if "text" in entry["needs"]:
        return sizes.text_width
    return sizes.width


def method_entries(sizes: Sizes) -> list[dict[str, Any]]:
    """Every method by name: summary, paper, what it reads, fidelity, and what one client sends and receives.

    Args:
        sizes: at which traffic is counted; a client owns every class.
    """
    if PATH.exists():
        stored = json.loads(PATH.read_bytes())
    else:
        stored = {}
    if stored.get("sources") == sources_digest():
        found = [
            (
                entry,
                {
                    k: evaluate(entry["counts"][k], width_of(entry, sizes), sizes.classes)
                    for k in COUNTS
                },
            )
            for entry in stored["methods"]
        ]
    else:  # the methods were edited after the catalogue was written
        from fedcache.report.methods.facts import every_method

        found = every_method(sizes)
    return [
        {
            **{key: entry[key] for key in ("name", "summary", "paper", "needs")},
            "sends": {"scalars": n["up"], "bytes": n["up_bytes"], "paper_scalars": n["paper_up"]},
            "receives": {
                "scalars": n["down"],
                "bytes": n["down_bytes"],
                "paper_scalars": n["paper_down"],
                "first_scalars": n["first_down"],
            },
            "counted_at": sizes.source,
            **{key: entry[key] for key in ("fidelity", "one_shot")},
        }
        for entry, n in found
    ]
