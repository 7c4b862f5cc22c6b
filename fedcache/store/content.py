"""Embeddings arranged as a store holds them: rows in order, dtypes of the format, recipes and digests; not on disk."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import FedcacheError, UsageError
from fedcache.store.chunks import to_stored_dtype
from fedcache.store.embedding_files import Embeddings, assemble
from fedcache.store.files import digest_of, make_private, sha256_hex
from fedcache.store.manifest import SAFE
from fedcache.store.samples import HELD_OUT, INGESTED, Samples, held_out
from fedcache.store.text_features import slug_of

CHUNK_ROWS = 512

WHERE = Path("from_arrays()")
"""What messages name in the place of a file."""


@dataclass
class Content:
    """Embeddings in the order and the types of a store, not yet on disk."""

    samples: Samples  # the rows, sorted by name
    arrays: dict[str, tuple[NDArray[Any], dict[str, Any]]]  # per key of the store the values [N, V, D] and their recipe
    texts: dict[str, NDArray[np.float32]]  # [C, D] per backbone name, unit rows
    # what the manifest says of the dataset; ``held_out`` names the rule where the file brought no split
    dataset: dict[str, Any]

    @property
    def values(self) -> set[tuple[str, int]]:
        """(digest of the values, views) of every array, whatever it is called."""
        return {value_id(recipe) for _, recipe in self.arrays.values()}


def usable_name(name: str) -> str:
    """The name of a dataset as part of a file name.

    Raises UsageError, for one without a letter or digit, too long, or with signs that a command would split at.
    """
    slug = slug_of(name)
    if not slug.strip("._-") or len(slug) > 100:
        why = "has no letter or digit" if len(slug) <= 100 else f"has {len(slug)} characters, at most 100 are kept"
        raise UsageError(f"The name {name!r} {why}.", "For example --name mine")
    if not re.fullmatch(r"(?!\.)[\w .-]+", name):
        raise UsageError(
            f"The name {name!r} is not usable: letters, digits, spaces, '.', '_' and '-', not beginning with a dot.",
            f"For example --name {slug.strip('._-')}",
        )
    return slug


def arrange(embeddings: Embeddings, name: str) -> Content:
    """Embeddings as a store holds them. Rows are sorted by name; the values are the recipe.

    Without a split, of each (domain, class) the fifth with the smallest uids becomes the test set, as for folders.
    Raises UsageError for names that repeat; CorruptionError for non-finite features, with row numbers.
    """
    count = len(embeddings.names)
    repeated = [name for name, times in Counter(embeddings.names).items() if times > 1]
    if repeated:
        raise UsageError(
            f"{len(repeated)} of {count} names repeat, the first {repeated[0]!r}.",
            "Names must be unique; leave name out to number the rows.",
        )
    order = np.array(sorted(range(count), key=lambda i: embeddings.names[i]))
    # Checked before anything is on disk, and before the rows are sorted: the numbers are those of the file.
    arrays = {key: _storable(key, values)[order] for key, values in embeddings.features.items()}
    uid = np.zeros((count, 16), np.uint8)
    for row in range(count):
        digest = hashlib.sha256()
        for key in sorted(arrays):
            digest.update(np.ascontiguousarray(arrays[key][row]).tobytes())
        uid[row] = np.frombuffer(digest.digest()[:16], np.uint8)
    label, domain = embeddings.labels[order], embeddings.domains[order]
    if embeddings.splits is None:
        split = held_out(label, domain, uid, np.ones(count, bool)).astype(np.uint8)
    else:
        split = embeddings.splits[order]
    samples = Samples(
        uid=uid,
        name=tuple(embeddings.names[i] for i in order),
        label=label,
        domain=domain,
        split=split,
        ok=np.ones(count, np.uint8),
        classes=embeddings.classes,
        domains=embeddings.domain_names,
    ).checked()
    columns = (samples.uid, samples.label, samples.domain, samples.split)
    content = [sha256_hex(np.ascontiguousarray(column).tobytes()) for column in columns]
    texts = [sha256_hex(embeddings.texts[key].tobytes()) for key in sorted(embeddings.texts)]
    whole = digest_of([content, list(samples.name), list(samples.classes), list(samples.domains), *texts])
    dataset = {"slug": slug_of(name), "digest": whole, "template": None, "source": INGESTED}
    if embeddings.splits is None:
        dataset["held_out"] = HELD_OUT
    return Content(samples, dict(_with_recipe(*item) for item in arrays.items()), embeddings.texts, dataset)


def _with_recipe(key: str, values: NDArray[Any]) -> tuple[str, tuple[NDArray[Any], dict[str, Any]]]:
    recipe = {
        "backbone": key,
        "weights": sha256_hex(np.ascontiguousarray(values).tobytes()),
        "source": INGESTED,
        "dtype": values.dtype.name,
        "views": values.shape[1],
    }
    return f"{slug_of(key)}-{digest_of(recipe)[:8]}", (values, recipe)


def value_id(recipe: dict[str, Any]) -> tuple[str, int]:
    """(digest of the values, views) of an ingested array."""
    return str(recipe["weights"]), int(recipe["views"])


def _storable(key: str, values: NDArray[Any]) -> NDArray[Any]:
    """float16 stays, wider floats become float32. Raises CorruptionError, for values that are not finite there."""
    if not SAFE.fullmatch(slug_of(key)):
        raise UsageError(
            f"Features are named {key!r}.", "A name begins with a letter or digit and has at most 110 characters."
        )
    try:
        return to_stored_dtype(values, "float16" if values.dtype == np.float16 else "float32", (), 0, key)
    except FedcacheError as error:
        raise FedcacheError(error.code, error.message, "Mend these rows of the file or leave them out.") from error


def arrange_arrays(
    features: object, text: Mapping[str, Any], columns: Mapping[str, Any], name: str | None, path: str | Path | None
) -> tuple[Content, Path]:
    """The arguments of ``Store.from_arrays`` as the content of a store, and where it goes.

    Args:
        features: by backbone.
        text: by backbone.
        columns: called as in a file, and None where they were not given.
        name: of the dataset; the backbones' names when None.
        path: of the store; under FEDCACHE_HOME when None, in folders that are made.

    Raises:
        UsageError, for shapes or values that do not fit; CorruptionError, for values that are not finite.
    """
    if not isinstance(features, Mapping):
        raise UsageError(
            f"from_arrays() takes features by backbone, not {type(features).__name__}.", 'Give {"mine": X}'
        )
    if not features:
        raise UsageError("from_arrays() was given no features.", 'For example {"mine": X}')
    raw = {f"features/{key}": _array(values) for key, values in features.items()}
    raw |= {f"text/{key}": _array(values) for key, values in text.items()}
    raw |= {key: _array(values) for key, values in columns.items() if values is not None}
    name = name or "-".join(features)
    slug = usable_name(name)
    content = arrange(assemble(WHERE, raw), name)
    if path is not None:
        return content, Path(path).expanduser()
    home = Home.from_environment()
    make_private(home.root)
    make_private(home.stores)
    return content, home.store(slug, content.dataset["digest"])


def _array(values: Any) -> Any:
    """As numpy has it; words that came as objects (pandas) are words, and numbers that did stay refused."""
    made = np.asarray(values)
    if made.dtype.kind in "OT" and made.size and all(isinstance(v, str) for v in made.ravel()):
        return made.astype(np.str_)
    return made
