"""Catalogue of methods for ``fedcache methods``, read from ``catalogue.json`` without importing torch.

The file is written by ``tools/make_docs.py``. Counts of scalars and bytes are kept as polynomials of the feature width
W and the number of classes C, so that they are exact for any store. The file contains a digest of the sources that it
was made from. If these have changed, the facts are computed from the methods themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import fedcache
from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.parsing import Facts
from fedcache.store.catalog import last_store
from fedcache.store.manifest import TEXT_ORDER
from fedcache.store.store import Store

PATH = Path(__file__).with_name("catalogue.json")
COUNTS = ("up", "up_bytes", "paper_up", "down", "down_bytes", "paper_down", "first_down")
"""Counts of one client in one round, sent and received: in scalars, in bytes, and as the paper counts.

``first_down`` is what a client receives in the first round, in scalars.
"""

SOURCES = (
    "federate/methods",
    "federate/engine/method.py",
    "federate/engine/outcome.py",
    "heads",
    "report/methods/facts.py",
)
"""Files and folders of the package on which the facts depend."""

Term = Sequence[int]
"""(numerator, denominator, power of W, power of C) of one term of a polynomial."""

CountedMethod = tuple[Facts, dict[str, int]]
"""The facts of a method, and the count of each of ``COUNTS``."""


@dataclass(frozen=True)
class Sizes:
    """The feature widths and the number of classes at which traffic is counted.

    Attributes:
        width: D, all backbones together.
        text_width: D of the backbone that methods with text features read.
        classes: C.
        source: the store that has these sizes, and the sizes, in words.
    """

    width: int = 512
    text_width: int = 512
    classes: int = 10
    source: str = "512 features, 10 classes as an example"


def current_sizes(home: Home) -> Sizes:
    """The sizes of the store last used, else 512 features and 10 classes (one ResNet-18 of FedPCL's table)."""
    try:
        last = last_store(home)
        if last is None:
            return Sizes()
        store = Store.open(last[0])
    except FedcacheError:
        return Sizes()
    widths = {}
    for array in store.arrays.values():
        # Arrays of uint8 hold pixels, not features. Features have the shape (rows, views, width).
        if array.dtype != "uint8":
            widths[str(array.recipe.get("backbone"))] = array.shape[2]
    if not widths:
        return Sizes()
    # Methods without text read all backbones. Methods with text read one, chosen as in training.
    first = next(iter(widths))
    with_text = next((name for name in TEXT_ORDER if name in widths), first)
    width = sum(widths.values())
    classes = len(store.samples.classes)
    backbones = " + ".join(widths)
    source = f"{store.path.name}: {backbones}, {width} features, {classes} classes"
    return Sizes(width, widths[with_text], classes, source)


def sources_digest() -> str:
    """sha256 over the names and bytes of ``SOURCES``: some 80 small files, a few milliseconds."""
    root = Path(fedcache.__file__).parent
    digest = hashlib.sha256()
    for source in SOURCES:
        place = root / source
        paths = [place]
        if place.is_dir():
            paths = sorted(place.rglob("*.py"))
        for path in paths:
            raw = path.read_bytes()
            name = path.relative_to(root).as_posix()
            digest.update(f"{name} {len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def evaluate(terms: Iterable[Term], width: int, classes: int) -> int:
    """The value of a polynomial, which is a whole number at whole sizes.

    >>> evaluate([(1, 2, 2, 0), (1, 2, 1, 0), (1, 1, 1, 1)], 512, 10)  # W (W + 1) / 2 + W C
    136448
    """
    total = sum(Fraction(top, low) * width**w * classes**c for top, low, w, c in terms)
    return int(total)


def width_of(entry: Facts, sizes: Sizes) -> int:
    """The W of a method: the width of the backbone with text if the method reads text, else of all backbones."""
    if "text" in entry["needs"]:
        return sizes.text_width
    return sizes.width


def stored_counts(sizes: Sizes) -> list[CountedMethod] | None:
    """The facts and counts of every method by ``catalogue.json``; None if methods were edited after it was written.

    In that case ``facts.every_method`` counts them, which takes seconds and imports torch.
    """
    if not PATH.exists():
        return None
    stored = json.loads(PATH.read_bytes())
    if stored["sources"] != sources_digest():
        return None
    found = []
    for entry in stored["methods"]:
        width = width_of(entry, sizes)
        counts = {key: evaluate(entry["counts"][key], width, sizes.classes) for key in COUNTS}
        found.append((entry, counts))
    return found


def method_entries(counted: Iterable[CountedMethod], sizes: Sizes) -> list[Facts]:
    """An entry for every method: name, summary, paper, inputs, fidelity, and traffic of one client.

    Args:
        counted: facts and counts of every method, for a client that owns every class.
        sizes: the sizes for which they were counted.
    """
    entries = []
    for facts, count in counted:
        made = {key: facts[key] for key in ("name", "summary", "paper", "needs")}
        made["sends"] = {
            "scalars": count["up"],
            "bytes": count["up_bytes"],
            "paper_scalars": count["paper_up"],
        }
        made["receives"] = {
            "scalars": count["down"],
            "bytes": count["down_bytes"],
            "paper_scalars": count["paper_down"],
            "first_scalars": count["first_down"],
        }
        made["counted_at"] = sizes.source
        made["fidelity"] = facts["fidelity"]
        made["one_shot"] = facts["one_shot"]
        entries.append(made)
    return entries
