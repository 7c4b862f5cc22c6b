"""Damaged stores: every flipped bit is found, and no reader returns a number that is not the one that was written."""

import json
import random
import shutil

import numpy as np
from damage import files_of, flip, found, with_history_and_an_array_in_flight
from toy_store import KEYS, create, fill

from fedcache.errors import Exit, FedcacheError
from fedcache.store.files import to_signed
from fedcache.store.store import Store
from fedcache.store.verify import verify


def everything(path):
    """All that training reads of a store."""
    store = Store.open(path)
    held = store.samples
    columns = (held.label, held.domain, held.split, held.uid, store.readable())
    features = [store.reader(key).all() for key in sorted(store.arrays)]
    numbers = [np.asarray(array).tobytes() for array in (*columns, *features)]
    return held.classes, held.domains, held.name, numbers


def reads(path):
    """What a store gives, or that it is refused for what it is."""
    try:
        return everything(path)
    except FedcacheError as error:
        return "refused" if error.code in (Exit.CORRUPT, Exit.STORE) else error


def test_random_flips_are_found_and_never_read_as_numbers(place, cases):
    path = with_history_and_an_array_in_flight(place / "s.zarr").path
    expected, draw, files = everything(path), random.Random(3), files_of(path)
    sizes = [f.stat().st_size for f in files]
    for _ in range(cases(80, 1000)):
        file = draw.choices(files, sizes)[0] if draw.random() < 0.5 else draw.choice(files)
        raw = flip(file, draw)
        assert found(path), file
        assert reads(path) in ("refused", expected)
        file.write_bytes(raw)
    assert verify(path).problems == []


KINDS = (
    "truncated",
    "extended",
    "zeroed",
    "deleted",
    "half",
    "swapped chunks",
    "swapped manifests",
    "older manifest",
)


def harm(kind, path, other, draw):
    """Change one thing of a store."""
    files = [
        f
        for f in files_of(path)
        if f.stat().st_size > 4 and f.name != "history.jsonl" and "journal" not in f.name
    ]
    file = draw.choice(files)
    raw = file.read_bytes()
    half = len(raw) // 2
    chunks = [f for f in files_of(path / "features" / KEYS[0]) if f.name != "zarr.json"]
    manifest = path / "manifest.json"
    if kind == "deleted":
        file.unlink()
    elif kind == "swapped chunks":
        a, b = draw.sample(chunks, 2)
        x, y = a.read_bytes(), b.read_bytes()
        a.write_bytes(y)
        b.write_bytes(x)
    elif kind == "swapped manifests":
        shutil.copy(other / "manifest.json", manifest)
    elif kind == "older manifest":
        body = json.loads(manifest.read_bytes())
        body.pop("sha256", None)
        body["samples"] = {
            k: (v ^ 1 if isinstance(v, int) else v) for k, v in body["samples"].items()
        }
        manifest.write_bytes(to_signed(body))
    else:
        changed = {
            "truncated": raw[: draw.randrange(len(raw))],
            "extended": raw + draw.randbytes(draw.randrange(1, 64)),
            "zeroed": bytes(len(raw)) if any(raw) else b"\1" * len(raw),
            "half": raw[:half] + draw.randbytes(len(raw) - half),
        }
        file.write_bytes(changed[kind])


def refused(path):
    """Whether verify finds something, or finds no store that it could look at."""
    try:
        return not verify(path).ok
    except FedcacheError as error:
        return error.code in (Exit.CORRUPT, Exit.STORE)


def test_harm_of_every_kind_is_found(place, cases):
    whole = place / "whole.zarr"
    fill(create(whole), KEYS[0])
    fill(Store.open(whole), KEYS[1])
    other = place / "other.zarr"
    fill(create(other), KEYS[1])
    draw = random.Random(4)
    for i in range(cases(48, 304)):
        path = place / "s.zarr"
        shutil.copytree(whole, path)
        kind = KINDS[i % len(KINDS)]
        harm(kind, path, other, draw)
        assert refused(path), kind
        shutil.rmtree(path)
