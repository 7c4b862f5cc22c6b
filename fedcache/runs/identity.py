"""What determines a result, and its digest: the name of a run's directory.

A stored result is returned again only while nothing that determines it has changed. Part of that is the code itself.
Its digest is taken from the syntax trees, so comments, docstrings, formatting and the place of a file are free to
change, and every expression that could change a figure is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedcache.store.code_digest import digest_of_files
from fedcache.store.files import digest_of

ROOT = Path(__file__).resolve().parents[1]

DETERMINING = (
    "heads/**",
    "federate/engine/**",
    "federate/execution/**",
    "federate/partition/**",
    "federate/trust/**",
    "federate/methods/common/**",
    "runs/arrays.py",
    "runs/client_overrides.py",
    "runs/encoders.py",
    "runs/features.py",
    "runs/partitions.py",
    "runs/results.py",
    "runs/shard_rows.py",
    "runs/store_rows.py",
    "store/chunks.py",
    "store/reader.py",
    "store/samples.py",
    "extract/batches.py",
    "extract/images.py",
    "extract/views.py",
    "extract/text.py",
    "extract/backbones/encoder.py",
    "extract/backbones/clip_towers.py",
)
"""Files under fedcache/ that determine the figures of every method: the reader of features, the partition, training,
evaluation, and the decoding of images. Of the methods' own files only those that a method uses are added."""


@dataclass(frozen=True)
class Identity:
    """What determines a result.

    Attributes:
        config: method, preset, every hyperparameter, rounds, participation, seeds, execution, dtype, ... resolved.
        features: recipe digests in the order they are concatenated, and the text features' digest.
        dataset: content digest.
        partitions: digest per seed.
        code: ``code_digest``.
    """

    config: Mapping[str, Any]
    features: Sequence[str]
    dataset: str
    partitions: Sequence[str]
    code: str

    @property
    def digest(self) -> str:
        """sha256 over all of it."""
        return digest_of(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "config": dict(self.config),
            "features": list(self.features),
            "dataset": self.dataset,
            "partitions": list(self.partitions),
            "code": self.code,
        }


@cache
def code_digest(method: str) -> str:
    """sha256 over the code that determines the results of a method.

    Other methods' files are left out, so that adding one does not make every stored result old.

    Args:
        method: its name; "" for what all methods share.
    """
    return digest_of_code(ROOT, method)


def digest_of_code(root: Path, method: str) -> str:
    """``code_digest`` of the package whose folder is ``root``."""
    files = {path for pattern in DETERMINING for path in _matching(root, pattern)}
    files |= _with_imports(root / "federate" / "methods", method.replace("-", "_"))
    return digest_of_files(files)


def _matching(root: Path, pattern: str) -> Iterator[Path]:
    if pattern.endswith("/**"):
        return (root / pattern.removesuffix("/**")).rglob("*.py")
    return root.glob(pattern)


def _with_imports(folder: Path, name: str) -> set[Path]:
    """A method's file and the method files it imports, directly or through others."""
    seen: set[Path] = set()
    todo = [name]
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedcache.federate.methods"):
                place = (node.module or "").removeprefix("fedcache.federate.methods").strip(".")
                todo += [alias.name for alias in node.names] if not place else [place]
    return seen
