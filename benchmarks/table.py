"""What ``make bench`` measures, in the order in which results are shown: one line per target, and who measures it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A target.

    Attributes:
        name: of its row, or the beginning of the names of several rows.
        family: the module of this folder whose ``rows()`` measures it.
        target: what is asked for, for a line that was not measured.
    """

    name: str
    family: str
    target: str


LINES = (
    Line("partition iid, 1e6 x 1e5", "partitions", "<= 10 s, <= 500 MB, <= 12 MB on disk"),
    Line("partition dirichlet, 1e6 x 1e5", "partitions", "<= 10 s, <= 500 MB, <= 12 MB on disk"),
    Line("partition iid, 1e7 x 1e6", "partitions", "<= 60 s, <= 2000 MB, <= 120 MB on disk"),
    Line("partition dirichlet, 1e7 x 1e6", "partitions", "<= 60 s, <= 2000 MB, <= 120 MB on disk"),
    Line("extraction of a folder of JPEGs", "extraction", ">= 0.92 of cores / (decode + forward)"),
    Line("two backbones in one run", "extraction", "<= 1.05 x (decode + sum of forwards)"),
    Line("a backbone that sleeps 1 s a batch", "extraction", "<= 1.25 x batches / processes"),
    Line("what --dry-run expects of it", "extraction", "within 1.25 x of what it takes"),
    Line("second run of the same extraction", "startup", "<= 1.5 s, nothing decoded or computed"),
    Line("store scan", "store", ">= 0.9 of np.memmap"),
    Line("store gather", "store", ">= 0.8 of np.memmap"),
    Line("fedavg linear, C=10, 100 x 50", "executions", ">= 6 x a clean loop"),
    Line("fedavg linear, C=10, 100 x 500", "executions", ">= 3 x a clean loop"),
    Line("fedavg linear, C=100, 100 x 50", "executions", ">= 3 x a clean loop"),
    Line("fedavg linear, C=10, 1000 x 50", "executions", ">= 5 x a clean loop"),
    Line("fedavg beside a loop vectorised by hand", "executions", ">= 1.5 x the loop by hand"),
    Line("grid of 240 fedavg points, C=10", "grids", ">= 15 x clean loops one after another"),
    Line("grid of 240 fedavg points, C=100", "grids", ">= 3 x clean loops one after another"),
    Line("grid of 48 fedpcl points, SGD", "grids", ">= 4 x clean loops one after another"),
    Line(
        "grid of 48 fedpcl points, Adam",
        "grids",
        "never slower than the loop with a fused optimiser",
    ),
    Line("fedpcl with Adam", "grids", ">= 1.5 x a clean loop"),
    Line("saving the best model of a grid of 240", "saving", "<= 1.03 x the grid without models"),
    Line("every method: chosen execution", "methods", ">= 0.95 of the loop, median of 9 pairs"),
    Line("update validation, fedavg, 100 clients", "validation", "< 2 % of a round"),
    Line("fst-cbdg, 10 of 100 clients, seconds", "fst", "<= 3 s on 2 cores for 10 rounds"),
    Line("fst-cbdg, 10 of 100 clients, exact draws", "fst", ">= 2.5 x a clean loop"),
    Line("fst-cbdg, 10 of 100 clients, stratified draws", "fst", ">= 1.5 x the loop"),
    Line("fed3r", "closed", "<= 1.5 x one X'X in float64"),
    Line("fed3r beside RidgeClassifier", "closed", "<= 1 x RidgeClassifier, both float32"),
    Line("ingest of 10^6 x 256", "large", "<= 2 x (copy + sha256)"),
    Line("fed3r of stored rows", "large", "<= 2.5 x one X'X in float32"),
    Line("fedavg on stored rows", "large", "<= 1.25 x in memory"),
    Line("flower simulation, 100 clients, linear", "flower", ">= 50 x a round"),
    Line(
        "memory, fedavg Adam, 1000 clients x 100 classes", "memory", "<= 400 MB above the features"
    ),
    Line("memory, methods with client state", "memory", "<= 1.2 x (state + a chunk's working set)"),
    Line("growth, 10,000 clients, time", "memory", "linear in the clients of a round"),
    Line("growth, 10,000 clients, memory", "memory", "flat in the number of clients"),
    Line("a round of 100 of 10^6 clients", "scale", "<= 1.3 x that of 10^3"),
    Line("memory of 10^6 clients", "scale", "<= 200 MB above that of 10^3"),
    Line("a finished run again", "startup", "<= import torch + 1.5 s"),
    Line("a stored grid of 240 points again", "startup", "<= import torch + 3 s"),
    Line("report of 240 runs", "startup", "<= 3.5 s"),
    Line("a tiny fresh run", "startup", "<= import torch + 1.5 s"),
    Line("fedcache --help", "startup", "<= 0.5 s"),
    Line("import fedcache", "startup", "<= 0.2 s"),
)


def line_of(name: str) -> int | None:
    """The line a row belongs to: that of its name, else the longest line its name begins with."""
    found = [
        i for i, line in enumerate(LINES) if name == line.name or name.startswith(line.name + " ")
    ]
    return max(found, key=lambda i: len(LINES[i].name), default=None)
