"""Figures of the training data: classes per client, features in two dimensions, agreement of backbones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fedcache.errors import MachineError, unknown
from fedcache.federate.partition.partition import Columns, Partition
from fedcache.parsing import Facts, counted
from fedcache.report.drawing import (
    INK,
    SERIES,
    Marks,
    Plot,
    Rows,
    legend_below,
    name_places,
    short,
    write_drawing,
)
from fedcache.report.figure_runs import fit, squares
from fedcache.report.run_origin import RunStore
from fedcache.store.chunks import array_bytes
from fedcache.store.manifest import read_text, text_of_array

Floats = NDArray[np.float64]
RowNumbers = NDArray[np.int64]
"""Numbers of rows in a store."""

EMBEDDINGS = ("pca", "tsne", "umap", "none")
MOST_POINTS = 600
"""Maximum number of sampled test rows, and of a client's training rows from which the agreement is computed."""
MOST_PROTOTYPES = 12
"""Maximum number of clients whose prototypes are drawn."""

MOST_AVERAGED = 1 << 17
"""Maximum number of training rows that are all read for class means. If there are more, evenly spread blocks with this
many rows are read. More test rows than this are also sampled in blocks."""

ROWS_AT_ONCE = 1 << 12
"""Number of rows whose features are in memory at once for class means."""
BLOCKS = 96
"""Maximum number of blocks in a sample. Each block holds neighbours, because neighbours share chunks of the store."""
READ_BYTES = 1 << 29
"""Limit in bytes for one sample of an array. Whole chunks are read and verified, so large chunks allow fewer blocks."""
MOST_CLIENTS = 60
MOST_CLASSES = 60
"""Maximum number of clients and of classes that are drawn."""
MOST_LEGEND = 20
"""Maximum number of classes for which a legend explains colours and shapes."""
MOST_LISTED = 500
"""Maximum number of clients in the data file of a figure."""
MARKERS = ("o", "s", "D", "P", "X", "v")
"""Shapes of the classes: the first ten classes have the first shape, each with its own colour."""


def check_embedding(name: str) -> None:
    """Refuse an unknown projection to two dimensions, or one that is not installed, before any work.

    Raises UsageError for an unknown name; MachineError for umap when it is not installed.
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
    table = source.partition.table
    clients = len(table)
    names = table.names[:MOST_LISTED]
    counts = source.partition.counts(source.columns, MOST_LISTED)
    if not counts.size or not counts.max():
        return None
    rows: Rows = [
        [names[i], classes[j], int(counts[i, j])] for i, j in np.argwhere(counts).tolist()
    ]
    shown = counts[:MOST_CLIENTS, :MOST_CLASSES]
    across, down = shown.shape
    description = "Training rows of each client and class; the area of a dot shows their number."
    if shown.shape != counts.shape:
        every = counts.shape[1]
        description += f" The first {across} of {clients} clients, {down} of {every} classes."
    if clients > len(names):
        description += f" The data contain {len(names):,} clients."

    def fill(axes: Any, marks: Marks) -> None:
        x, y = np.nonzero(shown)
        # The largest dot nearly fills its cell, whose side is in points.
        cell = 72 * min(4.2 / across, 2.6 / down, 0.3)
        area = (0.95 * cell) ** 2 * shown[x, y] / shown.max()
        made = axes.scatter(x, y, s=np.maximum(area, 1.0), color=SERIES[0], alpha=0.8, linewidths=0)
        words = []
        for i, j in zip(x, y, strict=True):
            name = classes[j]
            held = counted(shown[i, j], "row")
            words.append(f"{names[int(i)]}, {name}: {held}")
        marks(made, words)
        name_places(axes.set_xticks, names[:across], rotation=90)
        name_places(axes.set_yticks, classes[:down])
        axes.set(xlim=(-0.7, across - 0.3), ylim=(down - 0.3, -0.7))
        _size_legend(axes, cell, int(shown.max()))

    columns = ("client", "class", "rows")
    return Plot(ident, "Classes of each client", description, columns, rows, fill, height=3.6)


def _size_legend(axes: Any, cell: float, most: int) -> None:
    """A legend of dot sizes: the largest number of rows, a quarter of it, and one row."""
    from matplotlib.lines import Line2D

    handles = []
    names = []
    for n in sorted({most, max(1, most // 4), 1}, reverse=True):
        size = max(1.0, 0.95 * cell * (n / most) ** 0.5)
        style: Facts = {"linestyle": "", "marker": "o", "color": SERIES[0], "alpha": 0.8}
        handles.append(Line2D([], [], markersize=size, **style))
        names.append(counted(n, "row"))
    axes.figure.legend(
        handles, names, loc="outside lower left", ncols=3, handletextpad=0.4, columnspacing=1.2
    )


def sampled(source: RunStore, key: str) -> RowNumbers:
    """At most ``MOST_POINTS`` readable, labelled test rows, evenly spread; the same for the same store."""
    columns = source.columns
    ok = source.store.readable().astype(bool)
    tests = source.partition.table.tested_by_clients
    tests = tests[ok[tests] & (columns.label[tests] >= 0)]
    step = max(1, -(-len(tests) // MOST_POINTS))
    spread: RowNumbers = tests[::step]
    if len(tests) > MOST_AVERAGED or not few_chunks(source, key, spread):
        return even_blocks(tests, min(MOST_POINTS, len(tests)), most_chunks(source, key))
    return spread


def few_chunks(source: RunStore, key: str, rows: RowNumbers) -> bool:
    """Whether rows are in no more chunks of an array than one sample may read."""
    chunks = np.unique(rows // source.store.arrays[key].chunk_rows)
    return len(chunks) <= most_chunks(source, key)


def averaged_whole(source: RunStore, key: str, rows: RowNumbers) -> bool:
    """Whether class means are over all these rows, and not over a sample."""
    return len(rows) <= MOST_AVERAGED and few_chunks(source, key, rows)


def most_chunks(source: RunStore, key: str) -> int:
    """Maximum number of chunks of an array that are read for one sample of rows."""
    array = source.store.arrays[key]
    shape = (array.chunk_rows, *array.shape[1:])
    return max(1, READ_BYTES // array_bytes(shape, array.dtype))


def even_blocks(rows: RowNumbers, most: int, blocks: int) -> RowNumbers:
    """At most ``most`` of ascending rows, as at most ``blocks`` evenly spread blocks of neighbours."""
    blocks = min(BLOCKS, most, blocks)
    length = most // blocks
    starts = np.linspace(0, len(rows) - length, blocks).astype(np.int64)
    places = starts[:, None] + np.arange(length)
    spread: RowNumbers = rows[places.ravel()]
    return spread


def plane(ident: str, source: RunStore, key: str, how: str) -> Plot | None:
    """Test rows, class prototypes and clients' prototypes of one backbone in two dimensions."""
    columns = source.columns
    rows = sampled(source, key)
    if len(rows) < 3 or how == "none":
        return None
    # Rows that could not be read are NaN; they are left out.
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
    # A legend of many classes cannot be read; the tooltip of a mark shows the class of its row.
    label = columns.label[rows]
    present = np.unique(label)
    legend = len(present) <= MOST_LEGEND
    name = source.store.arrays[key].recipe.get("backbone", key)
    method = how.upper()
    if how == "tsne":
        method = "t-SNE"
    # The means of a large store are over a sample of its rows.
    train = source.partition.table.train.rows
    averaged = f"an even sample of {len(train):,} training rows"
    if averaged_whole(source, key, train):
        averaged = "all clients' training rows"
    description = (
        f"{len(x)} test rows of {name} by {method}; colours and shapes are classes, stars the mean of each "
        f"class over {averaged}, small triangles the class means of single clients."
    )

    def fill(axes: Any, marks: Marks) -> None:
        for c in present:
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
            letters = max(len(short(columns.classes[c], 12)) for c in present)
            ncols = max(1, 40 // (letters + 5))
            legend_below(axes, ncols=ncols, markerscale=2.2, handletextpad=0.1)

    kinds = ["row"] * len(x)
    kinds += ["class mean"] * global_count
    kinds += ["client's class mean"] * len(small)
    names = [columns.classes[c] for c in label]
    names += words
    data = [
        [kind, name_of_point, *at]
        for kind, name_of_point, at in zip(kinds, names, flat.tolist(), strict=True)
    ]
    title = f"Features of {name} in two dimensions"
    return Plot(ident, title, description, ("kind", "name", "x", "y"), data, fill, height=4.2)


def _prototypes(source: RunStore, key: str) -> tuple[NDArray[np.float32], list[str], int]:
    """Prototypes: class means over all training rows, then those of the first clients.

    Returns the [K, D] means, their names, and how many of them are over all training rows.
    """
    columns = source.columns
    table = source.partition.table
    names_of_clients = []
    means_of_clients: list[Floats] = []
    chunks = set()
    for client in table[:MOST_PROTOTYPES]:
        chunks |= set((client.train // source.store.arrays[key].chunk_rows).tolist())
        # The rows of a client may be in all chunks of a large store: then fewer clients are drawn.
        if means_of_clients and len(chunks) > most_chunks(source, key):
            break
        for c, mine in _by_class(source, key, client.train):
            name = columns.classes[c]
            names_of_clients.append(f"{client.name}: {name}")
            means_of_clients.append(mine.mean(0))
    rows = table.train.rows
    if not averaged_whole(source, key, rows):
        # A mask gives ascending rows without sorting them.
        assigned = np.zeros(len(columns.label), bool)
        assigned[rows] = True
        ascending = np.flatnonzero(assigned)
        count = min(MOST_AVERAGED, len(ascending))
        rows = even_blocks(ascending, count, most_chunks(source, key))
    # Class -> sum of its features, and its number of rows.
    sums: dict[int, tuple[Floats, int]] = {}
    for start in range(0, len(rows), ROWS_AT_ONCE):
        for c, mine in _by_class(source, key, rows[start : start + ROWS_AT_ONCE]):
            total, count = sums.get(c, (np.zeros(mine.shape[1]), 0))
            sums[c] = (total + mine.sum(0), count + len(mine))
    names = []
    means = []
    for c in sorted(sums):
        total, count = sums[c]
        names.append(columns.classes[c])
        means.append(total / count)
    means_of_all = np.array(means + means_of_clients, np.float32)
    return means_of_all, names + names_of_clients, len(means)


def _by_class(source: RunStore, key: str, rows: RowNumbers) -> Iterator[tuple[int, Floats]]:
    """Each class among these rows, with the features of its readable rows."""
    x = source.features(key, rows).astype(np.float64)
    y = source.columns.label[rows]
    good = np.isfinite(x).all(1)
    for c in np.unique(y[good & (y >= 0)]):
        yield int(c), x[good & (y == c)]


def _project(x: NDArray[np.float32], how: str) -> Floats:
    """[N, D] in two dimensions, of unit rows; the same for the same rows."""
    unit = _unit_rows(x)
    if how == "pca":
        return _principal(unit)
    projection: Any
    if how == "tsne":
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (len(x) - 1) / 3)
        projection = TSNE(2, init="pca", random_state=0, perplexity=perplexity)
    else:
        import umap

        projection = umap.UMAP(random_state=0, n_jobs=1)
    flat: Floats = projection.fit_transform(unit)
    return flat


def _unit_rows(x: NDArray[Any]) -> NDArray[Any]:
    """[N, D] rows of length 1; a row of zeros stays one."""
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    unit: NDArray[Any] = x / np.maximum(lengths, 1e-12)
    return unit


def _principal(x: NDArray[Any]) -> Floats:
    """[N, 2]: rows [N, D] on their first two principal axes, each turned so that its largest entry is positive.

    As scikit-learn's ``PCA(2, svd_solver="full")``, whose import alone takes longer than a page of figures.
    """
    left, size, axes = np.linalg.svd(x - x.mean(0), full_matrices=False)
    largest = axes[np.arange(len(axes)), np.abs(axes).argmax(1)]
    turned = left * size * np.sign(largest)
    # With D = 1 there is one axis only, and the second column stays 0.
    flat = np.zeros((len(x), 2))
    flat[:, : len(axes)] = turned[:, :2]
    return flat


def linear_cka(x: Floats, y: Floats) -> float:
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


def _entropy_bits(x: Floats, text: Floats, scale: float) -> Floats:
    """Entropy of softmax(scale x.T') of [N, D] and [C, D] (FST-CBDG figure 2): [N] bits, at most log2 C."""
    p = scipy.special.softmax(scale * (x @ text.T), 1)
    bits: Floats = scipy.special.entr(p).sum(1) / np.log(2)
    return bits


def agreement(ident: str, source: RunStore) -> Plot | None:
    """Linear CKA of each backbone's features with all of them together, on every client's training rows."""
    if len(source.fused) < 2:
        return None
    names = [source.store.arrays[k].recipe.get("backbone", k) for k in source.fused]
    clients = source.partition.clients[:MOST_CLIENTS]
    cells = []
    for i, client in enumerate(clients):
        rows = client.train[:MOST_POINTS]
        parts = [source.features(key, rows) for key in source.fused]
        readable = np.isfinite(np.concatenate(parts, 1)).all(1)
        if readable.sum() < 3:
            continue
        unit = [_unit_rows(part[readable].astype(np.float64)) for part in parts]
        whole = np.concatenate(unit, 1)
        for k, (name, part) in enumerate(zip(names, unit, strict=True)):
            value = linear_cka(part, whole)
            if np.isfinite(value):
                cells.append((i, k, value, f"{name}, {client.name}: {value:.3f}"))
    if not cells:
        return None
    description = (
        "Linear CKA between the features of each backbone and the features of all backbones together, on each "
        "client's training rows: 1 is the same geometry. (Cached features only; `fedcache reproduce fedpcl-fig3` "
        "trains projections.)"
    )

    def fill(axes: Any, marks: Marks) -> None:
        many = len(clients) > 8
        squares(axes, marks, cells, small=many, form="{:.2f}")
        # Many names fit only if they are turned.
        rotation = 0
        if many:
            rotation = 90
        name_places(axes.set_xticks, [c.name for c in clients], rotation=rotation)
        name_places(axes.set_yticks, names)
        fit(axes, len(clients), len(names))

    data = [[names[k], clients[i].name, value] for i, k, value, _ in cells]
    title = "Fusion: contribution of each backbone"
    columns = ("backbone", "client", "CKA")
    height = 1.2 + 0.4 * len(names)
    return Plot(ident, title, description, columns, data, fill, height=height)


def label_entropy(ident: str, source: RunStore) -> Plot | None:
    """Entropy of the zero-shot soft labels of the test rows, for the first backbone with text features."""
    for key in source.keys:
        entry = text_of_array(source.store.manifest, key)
        if entry is not None:
            break
    else:
        return None
    backbone = source.store.arrays[key].recipe["backbone"]
    rows = sampled(source, key)
    x = source.features(key, rows)
    x = x[np.isfinite(x).all(1)]
    if not len(x):
        return None
    text_rows = read_text(source.store.path, backbone, entry)
    unit = _unit_rows(np.asarray(x, np.float64))
    text = _unit_rows(np.asarray(text_rows, np.float64))
    # FST-CBDG sharpens by a factor of 1; CLIP multiplies similarities by 100.
    scales = {1.0: "scale 1 (FST-CBDG)", 100.0: "scale 100 (CLIP's own)"}
    values = {name: _entropy_bits(unit, text, scale) for scale, name in scales.items()}
    most = float(np.log2(len(text)))
    description = (
        f"Entropy in bits of the zero-shot labels of {len(x)} test rows by {backbone}; {most:.2f} bits "
        "mean no information."
    )

    def fill(axes: Any, marks: Marks) -> None:
        # The last edge is a little above the maximum, so that it has a bin.
        edges = np.linspace(0, most * 1.0001, 25)
        starts = edges[:-1]
        ends = edges[1:]
        for i, (scale, bits) in enumerate(values.items()):
            counts, _ = np.histogram(bits, edges)
            style = {"width": np.diff(edges), "align": "edge", "color": SERIES[i], "alpha": 0.6}
            bars = axes.bar(starts, counts, label=scale, **style)
            for bar, count, start, end in zip(bars, counts, starts, ends, strict=True):
                inside = counted(count, "row")
                marks(bar, [f"{scale}: {inside} from {start:.2f} to {end:.2f} bits"])
        axes.set(xlabel="bits", ylabel="test rows")
        axes.grid(visible=False, axis="x")
        legend_below(axes)

    data: Rows = []
    for scale, bits in values.items():
        data += [[scale, float(value)] for value in bits]
    title = "Entropy of zero-shot labels"
    return Plot(ident, title, description, ("scale", "bits"), data, fill, height=3.0)


CELL = 0.42
"""Inches between two clients or classes in a small figure."""
WIDEST = 14.0
"""Maximum width and height of a figure in inches. More clients or classes make the dots smaller."""
MOST_NAMES = 40
"""Maximum number of readable names on an axis."""
LONGEST_NAME = 24


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
    clients, classes = counts.shape
    width = min(WIDEST, CELL * clients) + 2.6
    height = min(WIDEST, CELL * classes) + 1.2
    write_drawing(path, (width, height), lambda axes: _fill(axes, partition, columns, counts))


def _fill(axes: Any, partition: Partition, columns: Columns, counts: np.ndarray) -> None:
    """The dots of [M, C] counts, the names on the axes and a legend."""
    clients, classes = counts.shape
    client, label = np.nonzero(counts)
    of_client = client_domains(partition, columns)
    scale = dot_scale(counts)
    domains = sorted({d for d in of_client if d is not None})
    # Domains have colours if every client has rows of one domain only. Otherwise all dots have one colour (``None``).
    coloured: list[int | None] = [*domains]
    if None in of_client:
        coloured = [None]
    for domain in coloured:
        chosen = np.array([domain is None or of_client[i] == domain for i in client], bool)
        colour = "C0"
        name = None
        if domain is not None:
            colour = f"C{domain % 10}"
            name = short(columns.domains[domain], LONGEST_NAME)
        x = client[chosen]
        y = label[chosen]
        area = counts[x, y] * scale
        axes.scatter(x, y, s=area, color=colour, label=name, linewidths=0, alpha=0.85)
    names = [c.name for c in partition.clients]
    style = {"most": MOST_NAMES, "longest": LONGEST_NAME, "parse_math": False}
    name_places(axes.set_xticks, names, rotation=90, **style)
    name_places(axes.set_yticks, columns.classes, **style)
    axes.set(
        xlim=(-0.6, clients - 0.4), ylim=(-0.6, classes - 0.4), xlabel="client", ylabel="class"
    )
    axes.set_title(short(partition.default_name(), 80), parse_math=False)
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
    """The one domain of each client's training rows; None for a client with rows of several domains, or with none."""
    found = []
    for client in partition.clients:
        domains = np.unique(columns.domain[client.train])
        domain = None
        if len(domains) == 1:
            domain = int(domains[0])
        found.append(domain)
    return found
