"""Figures of the training data: classes per client, features in two dimensions, agreement of backbones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError, unknown
from fedcache.federate.partition.partition import Columns, Partition
from fedcache.report.drawing import (
    INK,
    SERIES,
    Cell,
    Marks,
    Plot,
    legend_below,
    name_places,
    plain,
    short,
    write_drawing,
)
from fedcache.report.figure_grids import squares
from fedcache.report.run_origin import RunStore
from fedcache.store.chunks import array_bytes
from fedcache.store.manifest import read_text, text_of_array

EMBEDDINGS = ("pca", "tsne", "umap", "none")
MOST_POINTS = 600
MOST_PROTOTYPES = 12
"""Clients whose prototypes are drawn."""

MOST_AVERAGED = 1 << 17
"""Training rows of which class means are taken: of more, as many in even blocks. Of more test rows, too."""

ROWS_AT_ONCE = 1 << 12
BLOCKS = 96
"""Blocks of neighbouring rows that are read of very many, evenly spread: neighbours are in one chunk of the store."""
READ_BYTES = 1 << 29
"""Of an array whose chunks are large, what is read of them for one of these samples: a chunk is verified as a whole."""
MOST_CLIENTS = 60
MOST_CLASSES = 60
MOST_LEGEND = 20
"""Classes up to which a legend names their colours and shapes."""
MOST_LISTED = 500
"""Clients whose rows are listed in the data behind a figure."""
MARKERS = ("o", "s", "D", "P", "X", "v")


def check_embedding(name: str) -> None:
    """Refuse an unknown or missing way to two dimensions before any work.

    Raises UsageError; MachineError for umap when it is not installed.
    """
    if name not in EMBEDDINGS:
        raise unknown("embedding", name, EMBEDDINGS)
    if name == "umap":
        try:
            import umap  # noqa: F401
        except ImportError as error:
            raise MachineError(
                "umap-learn is not installed.", "pip install umap-learn, or --embed tsne"
            ) from error


def dots(ident: str, source: RunStore) -> Plot | None:
    """Training rows of every client and class as dots whose area is the count."""
    classes = source.columns.classes
    label = source.columns.label
    clients = source.partition.clients[:MOST_LISTED]
    of = len(source.partition.clients)
    names = [c.name for c in clients]
    held = (label[c.train] for c in clients)
    counts = np.array([np.bincount(y[y >= 0], minlength=len(classes)) for y in held])
    if not counts.size or not counts.max():
        return None
    rows: list[list[Cell]] = [
        [names[i], classes[j], int(counts[i, j])] for i, j in np.argwhere(counts).tolist()
    ]
    shown = counts[:MOST_CLIENTS, :MOST_CLASSES]
    across, down = shown.shape
    description = "Training rows of each client and class; the area of a dot is their number."
    if shown.shape != counts.shape:
        every = counts.shape[1]
        description += f" The first {across} of {of} clients, {down} of {every} classes."
    if of > len(clients):
        description += f" The data contain {len(clients):,} clients."

    def fill(axes: Any, marks: Marks) -> None:
        client, label = np.nonzero(shown)
        # The largest dot nearly fills its cell, whose side is in points.
        cell = 72 * min(4.2 / across, 2.6 / down, 0.3)
        area = (0.95 * cell) ** 2 * shown[client, label] / shown.max()
        made = axes.scatter(
            client, label, s=np.maximum(area, 1.0), color=SERIES[0], alpha=0.8, linewidths=0
        )
        words = []
        for i, j in zip(client, label, strict=True):
            name = classes[j]
            words.append(f"{names[i]}, {name}: {shown[i, j]} rows")
        marks(made, words)
        name_places(axes.set_xticks, names[:across], rotation=90)
        name_places(axes.set_yticks, classes[:down])
        axes.set(xlim=(-0.7, across - 0.3), ylim=(down - 0.3, -0.7))
        _size_legend(axes, float(cell), int(shown.max()))

    columns = ("client", "class", "rows")
    return Plot(ident, "Classes of each client", description, columns, rows, fill, height=3.6)


def _size_legend(axes: Any, cell: float, most: int) -> None:
    """A legend of dot sizes: the largest number of rows, a quarter of it, and one row."""
    from matplotlib.lines import Line2D

    handles = []
    names = []
    for n in sorted({most, max(1, most // 4), 1}, reverse=True):
        size = max(1.0, 0.95 * cell * (n / most) ** 0.5)
        style: dict[str, Any] = {"linestyle": "", "marker": "o", "color": SERIES[0], "alpha": 0.8}
        handles.append(Line2D([], [], markersize=size, **style))
        noun = "rows"
        if n == 1:
            noun = "row"
        names.append(f"{n:,} {noun}")
    axes.figure.legend(
        handles, names, loc="outside lower left", ncols=3, handletextpad=0.4, columnspacing=1.2
    )


def sampled(source: RunStore, key: str) -> NDArray[np.int64]:
    """At most ``MOST_POINTS`` readable, labelled test rows, evenly spread; the same for the same store."""
    columns = source.columns
    ok = source.store.readable().astype(bool)
    tests = source.partition.table.tested_by_clients
    tests = tests[ok[tests] & (columns.label[tests] >= 0)]
    step = max(1, -(-len(tests) // MOST_POINTS))
    spread: NDArray[np.int64] = tests[::step]
    if len(tests) > MOST_AVERAGED or not few_chunks(source, key, spread):
        return even_blocks(tests, min(MOST_POINTS, len(tests)), most_chunks(source, key))
    return spread


def few_chunks(source: RunStore, key: str, rows: NDArray[np.int64]) -> bool:
    """Whether rows are in no more chunks of an array than one sample may read."""
    return len(np.unique(rows // source.store.arrays[key].chunk_rows)) <= most_chunks(source, key)


def averaged_whole(source: RunStore, key: str, rows: NDArray[np.int64]) -> bool:
    """Whether class means are taken of all these rows, and not of a sample."""
    return len(rows) <= MOST_AVERAGED and few_chunks(source, key, rows)


def most_chunks(source: RunStore, key: str) -> int:
    """Chunks of an array that are read for one sample of rows."""
    array = source.store.arrays[key]
    return max(1, READ_BYTES // array_bytes((array.chunk_rows, *array.shape[1:]), array.dtype))


def even_blocks(rows: NDArray[np.int64], most: int, blocks: int = BLOCKS) -> NDArray[np.int64]:
    """At most ``most`` of ascending rows, as at most ``blocks`` evenly spread blocks of neighbours."""
    blocks = min(BLOCKS, most, blocks)
    starts = np.linspace(0, len(rows) - most // blocks, blocks).astype(np.int64)
    spread: NDArray[np.int64] = rows[(starts[:, None] + np.arange(most // blocks)).ravel()]
    return spread


def plane(ident: str, source: RunStore, key: str, how: str) -> Plot | None:
    """Test rows, class prototypes and clients' prototypes of one backbone in two dimensions."""
    columns = source.columns
    rows = sampled(source, key)
    if len(rows) < 3 or how == "none":
        return None
    # Rows that could not be read are NaN, and left out.
    x = source.features(key, rows)
    keep = np.isfinite(x).all(1)
    rows = rows[keep]
    x = x[keep]
    # Rows and means are projected together, so that they share one plane.
    proto, words, global_count = _prototypes(source, key)
    flat = _project(np.concatenate([x, proto]), how)
    points = flat[: len(x)]
    stars = flat[len(x) : len(x) + global_count]
    small = flat[len(x) + global_count :]
    # A legend is readable for some classes only; marks tell the class of a row anyway.
    label = columns.label[rows]
    there = np.unique(label)
    legend = len(there) <= MOST_LEGEND
    name = str(source.store.arrays[key].recipe.get("backbone", key))
    way = how.upper()
    if how == "tsne":
        way = "t-SNE"
    description = f"{len(x)} test rows of {name} by {way}; colours and shapes are classes, "
    # The means of a large store are taken over a sample of its rows.
    train = source.partition.table.train.rows
    of = f"an even sample of {len(train):,} training rows"
    if averaged_whole(source, key, train):
        of = "all clients' training rows"
    description += (
        f"stars the mean of each class over {of}, small triangles those of single clients."
    )

    def fill(axes: Any, marks: Marks) -> None:
        for c in there:
            mine = label == c
            style = {"color": SERIES[c % 10], "marker": MARKERS[(c // 10) % len(MARKERS)]}
            if legend:
                style["label"] = short(columns.classes[c], 12)
            made = axes.scatter(*points[mine].T, s=13, alpha=0.55, linewidths=0, **style)
            marks(made, [f"{columns.classes[c]}, row {r}" for r in rows[mine]])
        if len(small):
            made = axes.scatter(*small.T, s=12, marker="^", color=INK, alpha=0.5, linewidths=0)
            marks(made, words[global_count:])
        made = axes.scatter(*stars.T, s=70, marker="*", color=INK, linewidths=0)
        marks(made, words[:global_count])
        # Names next to the stars, unless there are too many to read.
        if global_count <= 20:
            for word, at in zip(words, stars, strict=False):
                axes.annotate(short(word, 10), at, xytext=(4, 4), textcoords="offset points")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(visible=False)
        if legend:
            letters = max(len(short(columns.classes[c], 12)) for c in there)
            ncols = max(1, 40 // (letters + 5))
            legend_below(axes, ncols=ncols, markerscale=2.2, handletextpad=0.1)

    kinds = ["row"] * len(x) + ["class mean"] * global_count
    kinds += ["client's class mean"] * len(small)
    names = [*(columns.classes[c] for c in label), *words]
    data: list[list[Cell]] = [
        [kind, n, *at] for kind, n, at in zip(kinds, names, flat.tolist(), strict=True)
    ]
    title = f"Features of {name} in two dimensions"
    return Plot(ident, title, description, ("kind", "name", "x", "y"), data, fill, height=4.2)


def _prototypes(source: RunStore, key: str) -> tuple[NDArray[np.float32], list[str], int]:
    """Class means over all training rows, then of the first clients; their names; how many are over all."""
    columns = source.columns
    table = source.partition.table
    sums: dict[int, tuple[NDArray[np.float64], int]] = {}
    own: list[tuple[str, NDArray[np.float64]]] = []
    chunks: set[int] = set()
    for client in table[:MOST_PROTOTYPES]:
        chunks |= set((client.train // source.store.arrays[key].chunk_rows).tolist())
        if own and len(chunks) > most_chunks(source, key):
            break  # their rows lie all over a large store
        for c, mine in _by_class(source, key, client.train):
            name = columns.classes[c]
            own.append((f"{client.name}: {name}", mine.mean(0)))
    rows = table.train.rows
    if not averaged_whole(source, key, rows):
        dealt = np.zeros(len(columns.label), bool)
        dealt[rows] = True  # which sorts nothing
        dealt_rows = np.flatnonzero(dealt)
        rows = even_blocks(
            dealt_rows, min(MOST_AVERAGED, len(dealt_rows)), most_chunks(source, key)
        )
    for start in range(0, len(rows), ROWS_AT_ONCE):
        for c, mine in _by_class(source, key, rows[start : start + ROWS_AT_ONCE]):
            before = sums.get(c, (np.zeros(mine.shape[1]), 0))
            sums[c] = (before[0] + mine.sum(0), before[1] + len(mine))
    found = [(columns.classes[c], sums[c][0] / sums[c][1]) for c in sorted(sums)]
    every = [*found, *own]
    return np.array([p for _, p in every], np.float32), [n for n, _ in every], len(found)


def _by_class(
    source: RunStore, key: str, rows: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Each class among these rows, with the features of its readable rows."""
    x = source.features(key, rows).astype(np.float64)
    y = source.columns.label[rows]
    good = np.isfinite(x).all(1)
    for c in np.unique(y[good & (y >= 0)]):
        yield int(c), x[good & (y == c)]


def _project(x: NDArray[np.float32], how: str) -> NDArray[np.float64]:
    """[N, D] in two dimensions, of unit rows; the same for the same rows."""
    unit = _unit_rows(x)
    if how == "pca":
        return _principal(unit)
    way: Any
    if how == "tsne":
        from sklearn.manifold import TSNE

        way = TSNE(2, init="pca", random_state=0, perplexity=min(30.0, (len(x) - 1) / 3))
    else:
        import umap

        way = umap.UMAP(random_state=0, n_jobs=1)
    flat: NDArray[np.float64] = way.fit_transform(unit)
    return flat


def _unit_rows(x: NDArray[Any]) -> NDArray[Any]:
    """[N, D] rows of length 1; a row of zeros stays one."""
    unit: NDArray[Any] = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return unit


def _principal(x: NDArray[Any]) -> NDArray[np.float64]:
    """[N, 2]: rows [N, D] on their first two principal axes, each turned so that its largest entry is positive.

    As scikit-learn's ``PCA(2, svd_solver="full")``, whose import alone takes longer than a page of figures.
    """
    left, size, axes = np.linalg.svd(x - x.mean(0), full_matrices=False)
    largest = axes[np.arange(len(axes)), np.abs(axes).argmax(1)]
    # one axis alone where rows have one number each
    flat: NDArray[np.float64] = np.zeros((len(x), 2))
    flat[:, : len(axes)] = (left * size * np.sign(largest))[:, :2]
    return flat


def linear_cka(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Linear centred kernel alignment of [N, P] and [N, Q], representations of the same rows (Kornblith et al. 2019).

    |Yc'Xc|^2 / (|Xc'Xc| |Yc'Yc|) with centred columns: 1 for representations equal up to a rotation and a scale; NaN
    where one is constant.
    """
    a = x - x.mean(0)
    b = y - y.mean(0)
    size = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    if size:
        return float(np.linalg.norm(b.T @ a) ** 2 / size)
    return np.nan


def _entropy_bits(
    x: NDArray[np.float64], text: NDArray[np.float64], scale: float
) -> NDArray[np.float64]:
    """Entropy of softmax(scale x.T') of [N, D] and [C, D] (E figure 2): [N] bits, at most log2 C."""
    scores = scale * (x @ text.T)
    scores -= scores.max(1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(1, keepdims=True)
    bits: NDArray[np.float64] = -(p * np.log2(np.maximum(p, np.finfo(float).tiny))).sum(1)
    return bits


def agreement(ident: str, source: RunStore) -> Plot | None:
    """Linear CKA of each backbone's features with all of them together, on every client's training rows."""
    if len(source.fused) < 2:
        return None
    names = [str(source.store.arrays[k].recipe.get("backbone", k)) for k in source.fused]
    clients = source.partition.clients[:MOST_CLIENTS]
    cells: list[tuple[int, int, float, str]] = []
    for i, client in enumerate(clients):
        rows = client.train[:MOST_POINTS]
        parts = [source.features(k, rows) for k in source.fused]
        good = np.isfinite(np.concatenate(parts, 1)).all(1)
        if good.sum() < 3:
            continue
        unit = [_unit_rows(p[good].astype(np.float64)) for p in parts]
        whole = np.concatenate(unit, 1)
        for k, part in enumerate(unit):
            value = linear_cka(part, whole)
            if np.isfinite(value):
                name = names[k]
                cells.append((i, k, value, f"{name}, {client.name}: {value:.3f}"))
    if not cells:
        return None
    description = (
        "Linear CKA between each backbone's features and all of them together, on each client's "
        "training rows: 1 is "
    )
    description += "the same geometry. (Cached features only; `fedcache reproduce fedpcl-figure3` trains projections.)"

    def fill(axes: Any, marks: Marks) -> None:
        squares(axes, marks, cells, small=len(clients) > 8, form="{:.2f}")
        # Many names fit only if they are turned.
        rotation = 90 * (len(clients) > 8)
        name_places(axes.set_xticks, [c.name for c in clients], rotation=rotation)
        name_places(axes.set_yticks, names)
        axes.set(xlim=(-0.5, len(clients) - 0.5), ylim=(len(names) - 0.5, -0.5))

    rows_: list[list[Cell]] = [[names[k], clients[i].name, v] for i, k, v, _ in cells]
    columns = ("backbone", "client", "CKA")
    height = 1.2 + 0.4 * len(names)
    return Plot(
        ident,
        "Fusion: contribution of each backbone",
        description,
        columns,
        rows_,
        fill,
        height=height,
    )


def label_entropy(ident: str, source: RunStore) -> Plot | None:
    """Entropy of the zero-shot soft labels of the test rows, for the first backbone with text features."""
    # The first backbone that has text features.
    for key in source.keys:
        backbone = str(source.store.arrays[key].recipe.get("backbone"))
        if (entry := text_of_array(source.store.manifest, key)) is not None:
            break
    else:
        return None
    rows = sampled(source, key)
    x = source.features(key, rows)
    x = x[np.isfinite(x).all(1)]
    if not len(x):
        return None
    text_rows = read_text(source.store.path, backbone, entry)
    unit, text = (_unit_rows(np.asarray(part, np.float64)) for part in (x, text_rows))
    # FST-CBDG sharpens by a factor of 1; CLIP multiplies similarities by 100.
    scales = {1: "scale 1 (FST-CBDG)", 100: "scale 100 (CLIP's own)"}
    values = {s: _entropy_bits(unit, text, float(s)) for s in scales}
    most = float(np.log2(len(text)))
    description = (
        f"Entropy in bits of the zero-shot labels of {len(x)} test rows by {backbone}; {most:.2f} means "
        "no information."
    )

    def fill(axes: Any, marks: Marks) -> None:
        # The last edge is a little above the maximum, so that it has a bin.
        edges = np.linspace(0, most * 1.0001, 25)
        for i, (s, v) in enumerate(values.items()):
            count, _ = np.histogram(v, edges)
            bars = axes.bar(
                edges[:-1],
                count,
                width=np.diff(edges),
                align="edge",
                color=SERIES[i],
                alpha=0.6,
                label=scales[s],
            )
            for bar, n, a, b in zip(bars, count, edges[:-1], edges[1:], strict=True):
                marks(bar, [f"{scales[s]}: {n} rows from {a:.2f} to {b:.2f} bits"])
        axes.set(xlabel="bits", ylabel="test rows")
        axes.grid(visible=False, axis="x")
        legend_below(axes)

    data: list[list[Cell]] = [[scales[s], float(e)] for s, v in values.items() for e in v]
    return Plot(
        ident, "Entropy of zero-shot labels", description, ("scale", "bits"), data, fill, height=3.0
    )


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
    # Colours tell domains apart where each client has rows of one only.
    coloured: list[int | None] = [*domains]
    if None in of_client:
        coloured = [None]
    for domain in coloured:
        chosen = np.array([domain is None or of_client[i] == domain for i in client], bool)
        colour = "C0"
        name = None
        if domain is not None:
            colour = f"C{domain % 10}"
            name = plain(columns.domains[domain])
        axes.scatter(
            client[chosen],
            label[chosen],
            s=counts[client[chosen], label[chosen]] * scale,
            color=colour,
            label=name,
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
