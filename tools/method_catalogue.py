"""Write fedcache/report/methods/catalogue.json; `python tools/make_docs.py` does it along with the pages.

    python tools/method_catalogue.py --check    # whether it was made from the sources as they are

What a client sends is counted in rounds of no training at nine pairs of sizes, through which a polynomial in the
feature width W and the classes C is laid; it must then foretell the counts at a tenth pair.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS, NAMES
from fedcache.report.methods import COUNTS, PATH, Sizes, evaluate, sources_digest
from fedcache.report.methods.facts import facts_in_list, traffic_of

WIDTHS = (16, 24, 40)
CLASSES = (3, 4, 6)
ELSEWHERE = (56, 9)
POWERS = tuple(itertools.product(range(3), range(3)))


def polynomial(values: dict[tuple[int, int], int]) -> list[list[int]]:
    """The polynomial of degree two in W and in C with these values at (W, C), solved exactly."""
    rows = [
        [Fraction(w**i * c**j) for i, j in POWERS] + [Fraction(v)] for (w, c), v in values.items()
    ]
    for k in range(len(POWERS)):  # Gauss and Jordan
        pivot = next(r for r in range(k, len(rows)) if rows[r][k])
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for r in range(len(rows)):
            if r != k and rows[r][k]:
                rows[r] = [x - rows[r][k] * y for x, y in zip(rows[r], rows[k], strict=True)]
    return [
        [row[-1].numerator, row[-1].denominator, i, j]
        for row, (i, j) in zip(rows, POWERS, strict=True)
        if row[-1]
    ]


def counted(method: Method, width: int, classes: int) -> dict[str, int]:
    return traffic_of(method, Sizes(width, width, classes))


def entry(method: Method) -> dict[str, Any]:
    """The facts of a method with its counts as polynomials.

    Raises:
        SystemExit: when a count is none; such a method must not stand in the catalogue.
    """
    found = {(w, c): counted(method, w, c) for w in WIDTHS for c in CLASSES}
    counts = {key: polynomial({at: n[key] for at, n in found.items()}) for key in COUNTS}
    there = counted(method, *ELSEWHERE)
    wrong = [key for key in COUNTS if evaluate(counts[key], *ELSEWHERE) != there[key]]
    if wrong:
        raise SystemExit(f"{method.name}: {', '.join(wrong)} is no polynomial of width and classes")
    return {**facts_in_list(method), "counts": counts}


def is_current() -> bool:
    """Whether the catalogue was made from the sources as they are."""
    return bool(json.loads(PATH.read_bytes())["sources"] == sources_digest())


def write(names: Collection[str] = NAMES) -> None:
    """Count the traffic of these methods and write the catalogue, one method a line; other entries stay as they are."""
    stored = {found["name"]: found for found in json.loads(PATH.read_bytes())["methods"]}
    entries = [
        entry(METHODS[name]) if name in names or name not in stored else stored[name]
        for name in NAMES
    ]
    lines = ",\n".join(json.dumps(found, ensure_ascii=False) for found in entries)
    PATH.write_text(
        f'{{"sources": "{sources_digest()}",\n"methods": [\n{lines}\n]}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    if "--check" not in sys.argv:
        write()
    elif not is_current():
        raise SystemExit("the list of methods was made from older sources: make pages")
