"""Damaged stores: every flipped bit is found, and no reader returns a number that is not the one that was written."""

import random
import shutil

import numpy as np
import pytest
from damage import files_of, flip, found, with_history_and_an_array_in_flight
from toy_store import KEYS, create, fill, in_memory

from fedcache.errors import Exit, FedcacheError
from fedcache.store.store import Store
from fedcache.store.verify import verify


@pytest.fixture
def place():
    with in_memory() as path:
        yield path


def everything(path):
    """All that training reads of a store."""
    store = Store.open(path)
    held = store.samples
    out = {"classes": held.classes, "domains": held.domains, "names": held.name}
    for column in ("label", "domain", "split", "uid"):
        out[column] = np.asarray(getattr(held, column)).tobytes()
    out["ok"] = np.asarray(store.readable()).tobytes()
    for key in sorted(store.arrays):
        out[key] = np.array(store.reader(key).all()).tobytes()
    return out


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
    chunks = [
        f for f in (path / "features" / KEYS[0]).rglob("*") if f.is_file() and f.name != "zarr.json"
    ]
    if kind == "truncated":
        file.write_bytes(raw[: draw.randrange(len(raw))])
    elif kind == "extended":
        file.write_bytes(raw + draw.randbytes(draw.randrange(1, 64)))
    elif kind == "zeroed":
        file.write_bytes(bytes(len(raw)) if any(raw) else b"\1" * len(raw))
    elif kind == "deleted":
        file.unlink()
    elif kind == "half":
        file.write_bytes(raw[: len(raw) // 2] + draw.randbytes(len(raw) - len(raw) // 2))
    elif kind == "swapped chunks":
        a, b = draw.sample(chunks, 2)
        x, y = a.read_bytes(), b.read_bytes()
        a.write_bytes(y)
        b.write_bytes(x)
    elif kind == "swapped manifests":
        shutil.copy(other / "manifest.json", path / "manifest.json")
    else:
        import json

        from fedcache.store.files import to_signed

        body = json.loads((path / "manifest.json").read_bytes())
        body.pop("sha256", None)
        body["samples"] = {
            k: (v ^ 1 if isinstance(v, int) else v) for k, v in body["samples"].items()
        }
        (path / "manifest.json").write_bytes(to_signed(body))


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
