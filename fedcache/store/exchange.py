"""Features in and out: npz, npy, h5, parquet and safetensors, never a pickle.

One layout for all: ``features/<name>`` [N, D] (or [N, V, D]) per backbone, ``labels``, ``domain``, ``split`` [N], and
``name`` where the format has strings, with the class and domain names. What ``export`` writes, ``ingest`` reads; it
also takes class text features, ``text/<name>`` [C, D], where the format has arrays of another length.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.store.chunks import stored
from fedcache.store.disk_errors import writing
from fedcache.store.embedding_files import Embeddings
from fedcache.store.file_formats import WRITERS
from fedcache.store.files import digest_of, sha256_hex
from fedcache.store.manifest import SAFE
from fedcache.store.samples import HELD_OUT, INGESTED, held_out
from fedcache.store.store import Samples, Store, slug_of

CHUNK_ROWS = 512


@dataclass
class Content:
    """Embeddings in the order and the types of a store, not yet on disk.

    Attributes:
        samples: the rows, sorted by name.
        arrays: per key of the store the values [N, V, D] and their recipe.
        texts: [C, D] per backbone name, unit rows.
        dataset: what the manifest says of the dataset; ``held_out`` names the rule where the file brought no split.
    """

    samples: Samples
    arrays: dict[str, tuple[NDArray[Any], dict[str, Any]]]
    texts: dict[str, NDArray[np.float32]]
    dataset: dict[str, Any]

    @property
    def values(self) -> set[tuple[str, int]]:
        """(digest of the values, views) of every array, whatever it is called."""
        return {_values_of(recipe) for _, recipe in self.arrays.values()}


def export(store: Store, out: Path, keys: Sequence[str]) -> int:
    """Write the readable rows of some arrays to a file; its ending chooses the format.

    Returns:
        rows written.

    Raises:
        FedcacheError: USAGE for an unknown ending or a folder that is not there.
    """
    if out.suffix not in WRITERS:
        raise unknown("file ending", out.suffix, WRITERS)
    if not out.parent.is_dir():
        raise FedcacheError(Exit.USAGE, f"The folder {out.parent} does not exist.", f"mkdir -p {out.parent}")
    s = store.samples
    good = np.flatnonzero(s.ok == 1)
    columns: dict[str, Any] = {f"features/{key}": store.reader(key).rows(good) for key in keys}
    columns |= {"labels": s.label[good], "domain": s.domain[good], "split": s.split[good]}
    names = [s.name[i] for i in good]
    meta = {"classes": list(s.classes), "domains": list(s.domains), "dataset": store.dataset["slug"]}
    temporary = out.with_name(f".{out.name}.partial{out.suffix}")
    with writing(out, sum(values.nbytes for values in columns.values())):
        try:
            WRITERS[out.suffix](temporary, columns, names, meta)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return len(good)


def usable_name(name: str) -> str:
    """The name of a dataset as part of a file name.

    Raises:
        FedcacheError: USAGE, for one without a letter or digit, too long, or with signs that a command would split at.
    """
    slug = slug_of(name)
    if not slug.strip("._-") or len(slug) > 100:
        why = "has no letter or digit" if len(slug) <= 100 else f"has {len(slug)} characters, at most 100 are kept"
        raise FedcacheError(Exit.USAGE, f"The name {name!r} {why}.", "For example --name mine")
    if not re.fullmatch(r"(?!\.)[\w .-]+", name):
        raise FedcacheError(
            Exit.USAGE,
            f"The name {name!r} is not usable: letters, digits, spaces, '.', '_' and '-', not beginning with a dot.",
            f"For example --name {slug.strip('._-')}",
        )
    return slug


def arrange(embeddings: Embeddings, name: str) -> Content:
    """Embeddings as a store holds them. Rows are sorted by name; the values are the recipe.

    Without a split, of each (domain, class) the fifth with the smallest uids becomes the test set, as for folders.

    Raises:
        FedcacheError: USAGE for names that repeat; CORRUPT for non-finite features, with row numbers.
    """
    count = len(embeddings.names)
    repeated = [name for name, times in Counter(embeddings.names).items() if times > 1]
    if repeated:
        raise FedcacheError(
            Exit.USAGE,
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
    content = [
        hashlib.sha256(np.ascontiguousarray(getattr(samples, c)).tobytes()).hexdigest()
        for c in ("uid", "label", "domain", "split")
    ]
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


def _values_of(recipe: dict[str, Any]) -> tuple[str, int]:
    return str(recipe["weights"]), int(recipe["views"])


def is_ingested(store: Store) -> bool:
    """Whether a store was made from a file of embeddings: no image is known of it."""
    return store.dataset.get("source") == INGESTED


def already_there(store: Store, content: Content) -> bool:
    """Whether a store holds all of some content, under whatever name its file was."""
    same = bool(store.dataset["digest"] == content.dataset["digest"])
    return same and content.values <= _held(store) and all(store.has_text(name) for name in content.texts)


def begun(store: Store, content: Content) -> bool:
    """Whether a store holds nothing but some content, of which an interrupted ingest left out a part."""
    return bool(store.dataset["digest"] == content.dataset["digest"]) and _held(store) <= content.values


def _held(store: Store) -> set[tuple[str, int]]:
    return {_values_of(info.recipe) for info in store.arrays.values()}


def ingest(embeddings: Embeddings, path: Path, name: str) -> Store:
    """Embeddings as a store at ``path``; what an interrupted ingest left there is completed.

    Raises:
        FedcacheError: as ``arrange`` and ``Store.create``.
    """
    return write(arrange(embeddings, name), path)


def write(content: Content, path: Path) -> Store:
    """Arranged embeddings as a store at ``path``; what an interrupted ingest left there is completed.

    Raises:
        FedcacheError: STORE, when another dataset lies at ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    store = Store.create(path, content.samples, dataset=content.dataset)
    for name, matrix in content.texts.items():
        if not store.has_text(name):
            store.put_text(name, [], matrix, {"backbone": name, "source": INGESTED})
    for key, (values, recipe) in content.arrays.items():
        with store.writer(
            key,
            shape=values.shape,
            dtype=values.dtype.name,
            chunk_rows=CHUNK_ROWS,
            recipe=recipe,
            how={"source": INGESTED},
        ) as writer:
            for chunk in writer.missing():
                writer.write(chunk, values[chunk * CHUNK_ROWS : (chunk + 1) * CHUNK_ROWS])
            writer.complete()
    return Store.open(path)


def _storable(key: str, values: NDArray[Any]) -> NDArray[Any]:
    """Features in the dtype they are stored in: float16 stays, wider floats become float32.

    Raises:
        FedcacheError: CORRUPT, for values that are not finite there.
    """
    if not SAFE.fullmatch(slug_of(key)):
        raise FedcacheError(
            Exit.USAGE,
            f"Features are named {key!r}.",
            "A name begins with a letter or digit and has at most 110 characters.",
        )
    try:
        return stored(values, "float16" if values.dtype == np.float16 else "float32", (), 0, key)
    except FedcacheError as error:
        raise FedcacheError(error.code, error.message, "Mend these rows of the file or leave them out.") from error
