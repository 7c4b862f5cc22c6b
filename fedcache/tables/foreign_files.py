"""Reads or refuses files of embeddings that other programs for federated learning and retrieval write.

fedcache reads HDF5 with one group for each client (TensorFlow Federated, below), folders of clip-retrieval (``read``),
and LEAF's JSON (``table_files``). It refuses pickles (PFLlib and others), because they could run code, and images,
because an encoder has to read them first. The error of a refused file shows the lines of Python that convert it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, UsageError, shell_word
from fedcache.tables.words import Words, is_matrix, joined_columns, joined_rows, stem_of

CLIENT = "client"
"""Name of the column with the client of each row, which is made for files with a separate part per client."""

ONE_OBJECT = "one Python object"
"""Reason why an array of an npz is not used: it holds one object, such as a dict of settings."""

TRUSTED = "# runs code in the file: only for a file that you trust"
"""Comment in lines of Python that load a pickle."""

PIXELS = ("pixels", "image", "images")
"""Usual names of columns of images in files with a separate part per client."""


BEGIN = "Convert it with Python:"
"""First line of a hint; lines of Python follow it."""

MARK = "    "
"""Beginning of the lines of Python in a hint."""


def conversion(lines: Sequence[str], following: str) -> str:
    """A hint with lines of Python that convert a file, and ``following``, the command that reads the new file.

    >>> print(conversion(["import numpy"], "fedcache ingest new.npz --name NAME"))
    Convert it with Python:
        import numpy
    Then:  fedcache ingest new.npz --name NAME
    """
    indented = [f"{MARK}{line}" for line in lines]
    return "\n".join([BEGIN, *indented, f"Then:  {following}"])


# Files that contain a pickle


def pickled_dict(path: Path, name: str, *, images: bool = False) -> FedcacheError:
    """The error for an npz without features whose array ``name`` is one pickled object.

    The hint has lines of Python that write plain arrays. PFLlib writes one such file for every client, ``train/0.npz``
    with ``x`` and ``y`` in ``data``: then the lines read the files of all clients, and keep the client and split of
    each row. If ``images`` is true, the rows are images and keep their shape.
    """
    array = "features"
    flatten = ".reshape(len(d['y']), -1)"
    if images:
        array = "images"
        flatten = ""
    if name == "data" and path.parent.name.lower() in ("train", "test"):
        folder = path.parent.parent
        out = folder.with_name(f"{folder.resolve().name}-all.npz")
        where = f"pathlib.Path({str(folder)!r})"
        lines = [
            "import numpy, pathlib",
            f"files = sorted(f for s in ('train', 'test') for f in {where}.glob(f'{{s}}/*.npz'))",
            f"held = []  {TRUSTED}",
            "for f in files: held.append(numpy.load(f, allow_pickle=True)['data'].item())",
            "counts = [len(d['y']) for d in held]",
            f"numpy.savez({str(out)!r}, {array}=numpy.concatenate([d['x']{flatten} for d in held]),",
            "    labels=numpy.concatenate([d['y'] for d in held]),",
            "    client=numpy.repeat([f.stem for f in files], counts),",
            "    split=numpy.repeat([f.parent.name for f in files], counts))",
        ]
        content = "client files of PFLlib"
    else:
        out = path.with_name(f"{stem_of(path)}-plain.npz")
        load = f"numpy.load({str(path)!r}, allow_pickle=True)[{name!r}].item()"
        lines = ["import numpy", f"d = {load}  {TRUSTED}"]
        if name == "data":
            lines.append(f"numpy.savez({str(out)!r}, {array}=d['x']{flatten}, labels=d['y'])")
        else:
            lines.append(f"numpy.savez({str(out)!r}, **d)")
        content = ONE_OBJECT
    following = f"fedcache ingest {shell_word(out)} --name NAME"
    if images:
        following = f"fedcache extract --dataset arrays:{shell_word(out)}"
    return UsageError(
        f"{path}: {name} is a pickle ({content}). fedcache never opens pickles, because a pickle may run code.",
        conversion(lines, following),
    )


# Values of ``REFUSED`` below.
_PICKLE = (
    "is a pickle. fedcache never opens pickles, because a pickle may run code.",
    ".parquet",
    (
        "import pandas",
        f"held = pandas.read_pickle({{path!r}})  {TRUSTED}",
        "table = pandas.DataFrame({{name: list(values) for name, values in held.items()}})",
        "table.to_parquet({out!r})",
    ),
)
_TORCH = (
    "contains objects other than tensors and lists by name. fedcache does not open such a file, because a pickle may "
    "run code.",
    ".npz",
    (
        "import numpy, torch",
        f"held = torch.load({{path!r}}, weights_only=False)  {TRUSTED}",
        "held = held if hasattr(held, 'items') else dict(zip(('features', 'labels'), held))",
        "numpy.savez({out!r}, **{{name: numpy.asarray(values) for name, values in held.items()}})",
    ),
)
_MATLAB = (
    "is a MATLAB file, which fedcache does not read.",
    ".npz",
    (
        "import numpy, scipy.io",
        "held = scipy.io.loadmat({path!r})",
        "held = {{name: values for name, values in held.items() if not name.startswith('__')}}",
        "held = {{name: values.ravel() if 1 in values.shape else values for name, values in held.items()}}",
        "numpy.savez({out!r}, **held)",
    ),
)
REFUSED = {".pkl": _PICKLE, ".pickle": _PICKLE, ".mat": _MATLAB, ".pt": _TORCH, ".pth": _TORCH}
"""Ending of files that are refused -> the reason, the ending of the converted file, and lines of Python that convert.

``format`` fills in ``{path}`` and ``{out}`` in the lines, so other braces are doubled.
"""


def refused_file(path: Path, ending: str) -> FedcacheError:
    """The error for a refused file, with the lines that convert it; ``ending`` is a key of ``REFUSED``."""
    why, new_ending, lines = REFUSED[ending]
    out = path.with_name(f"{stem_of(path)}{new_ending}")
    filled = [line.format(path=str(path), out=str(out)) for line in lines]
    following = f"fedcache ingest {shell_word(out)} --name NAME"
    return UsageError(f"{path} {why}", conversion(filled, following))


# HDF5 with a group for each client

_OF_CLIENT = re.compile(r"examples/(.+)/([^/]+)")


def clients_of(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """client -> column -> name of the dataset, for an HDF5 file of TensorFlow Federated; {} for another file."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = _OF_CLIENT.fullmatch(name)
        if match is None:
            return {}
        found.setdefault(match[1], {})[match[2]] = name
    return found


def refuse_client_images(path: Path, columns: Sequence[str]) -> None:
    """Raise UsageError if the clients of a file have images, with the lines that make one file for ``arrays:FILE``."""
    image = next((name for name in PIXELS if name in columns), None)
    if image is None:
        return
    out = path.with_name(f"{stem_of(path)}-images.npz")
    others = [name for name in columns if name != image]
    lines = [
        "import h5py, numpy",
        f"clients = h5py.File({str(path)!r})['examples']",
        f"held = {{c: numpy.concatenate([g[c][()] for g in clients.values()]) for c in {[image, *others]!r}}}",
        f"x = held.pop({image!r})",
        "x = x if x.dtype == 'uint8' else (255 * x).round().astype('uint8')",
        f"counts = [len(g[{image!r}]) for g in clients.values()]",
        f"numpy.savez({str(out)!r}, images=x, client=numpy.repeat(list(clients), counts), **held)",
    ]
    raise UsageError(
        f"{path} contains images of clients (TensorFlow Federated), not embeddings.",
        conversion(lines, f"fedcache extract --dataset arrays:{shell_word(out)}"),
    )


def joined_clients(path: Path, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns, joined over all clients, and a column ``CLIENT``; for a file without clients, the same columns."""
    clients = clients_of([*columns])
    if not clients:
        return dict(columns)
    names = list(next(iter(clients.values())))
    refuse_client_images(path, names)
    for client, name_of in clients.items():
        if name_of.keys() != set(names):
            found = ", ".join(name_of)
            expected = ", ".join(names)
            raise UsageError(
                f"{path}: the client {client} has {found}, but the first client has {expected}.",
                "Write the same columns for every client.",
            )
    joined = {}
    for name in names:
        parts = [columns[name_of[name]] for name_of in clients.values()]
        joined[name] = end_to_end(path, name, parts)
    counts = [_rows_of(columns[name_of[names[0]]]) for name_of in clients.values()]
    client_of = np.repeat(np.arange(len(clients), dtype=np.int32), counts)
    joined[CLIENT] = Words(client_of, tuple(clients))
    return joined


def end_to_end(path: Path, name: str, parts: Sequence[Any]) -> Any:
    """One column from its parts, one after another. Raises UsageError for rows of different shapes."""
    # Features and images are matrices; all other columns have one value for each row.
    if all(map(is_matrix, parts)):
        return joined_rows(path, name, parts)
    return joined_columns(parts, [_rows_of(part) for part in parts])


def _rows_of(column: Any) -> int:
    if column.shape:
        return int(column.shape[0])
    return 0  # a single value belongs to no row
