"""A partition as dots: clients across, classes up, the area of a dot is the number of training rows (FedPCL, figure 4).

Where every client holds one domain the colour says which, so that a shift of features shows as colour and a shift of
labels as size. Where clients mix domains there is one colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.federate.partition.partition import Columns, Partition
from fedcache.report.drawing import plain, write_drawing

CELL = 0.42  # inches between two clients or classes in a small figure
WIDEST = 14.0  # inches of a large one, whose dots shrink instead
MOST_NAMES = 40  # more names than this on an axis cannot be read


def draw(partition: Partition, columns: Columns, path: Path) -> None:
    """Draw a partition; equal partitions give equal files.

    Args:
        partition: of the dataset of ``columns``.
        columns: its labels, domains and names.
        path: ends in .png, .svg or .pdf.

    Raises:
        FedcacheError: usage error for another ending or a missing directory; environment error without matplotlib.
    """
    counts = partition.counts(columns)
    size = min(WIDEST, CELL * counts.shape[0]) + 2.6, min(WIDEST, CELL * counts.shape[1]) + 1.2
    write_drawing(path, size, lambda axes: _fill(axes, partition, columns, counts))


def _fill(axes: Any, partition: Partition, columns: Columns, counts: np.ndarray) -> None:
    """The dots of [M, C] counts, the names on the axes and a legend."""
    clients, classes = counts.shape
    client, label = np.nonzero(counts)
    of_client = client_domains(partition, columns)
    scale = dot_scale(counts)
    domains = sorted({d for d in of_client if d is not None})
    for domain in domains if None not in of_client else [None]:
        chosen = np.array([domain is None or of_client[i] == domain for i in client], bool)
        axes.scatter(
            client[chosen],
            label[chosen],
            s=counts[client[chosen], label[chosen]] * scale,
            color="C0" if domain is None else f"C{domain % 10}",
            label=None if domain is None else plain(columns.domains[domain]),
            linewidths=0,
            alpha=0.85,
        )
    _name(axes.set_xticks, [c.name for c in partition.clients], rotation=90)
    _name(axes.set_yticks, columns.classes)
    axes.set(
        xlim=(-0.6, clients - 0.4), ylim=(-0.6, classes - 0.4), xlabel="client", ylabel="class"
    )
    axes.set_title(plain(partition.default_name(), 80), parse_math=False)
    axes.grid(visible=True, linewidth=0.3, alpha=0.5)
    axes.set_axisbelow(True)
    if len(domains) > 1 and None not in of_client:
        legend = axes.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, title="domain"
        )
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
            text.set_parse_math(False)
            handle.set_sizes([30.0])


def dot_scale(counts: np.ndarray) -> float:
    """Points squared for each row: the largest dot of [M, C] counts just fits between its neighbours."""
    cell = 72.0 * min(CELL, WIDEST / max(counts.shape))
    return float((0.9 * cell) ** 2 / counts.max())


def client_domains(partition: Partition, columns: Columns) -> list[int | None]:
    """The one domain of each client's training rows, None for a client that mixes several."""
    found = [np.unique(columns.domain[client.train]) for client in partition.clients]
    return [int(domains[0]) if len(domains) == 1 else None for domains in found]


def _name(set_ticks: Any, names: Sequence[str], **style: Any) -> None:
    """Name the places of an axis, all of them or every so many."""
    step = -(-len(names) // MOST_NAMES)
    places = range(0, len(names), step)
    set_ticks(list(places), [plain(names[i]) for i in places], parse_math=False, **style)
