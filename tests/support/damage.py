"""A toy store with every kind of file, and bits of it that flip."""

import numpy as np
from toy_store import KEYS, create, fill

from fedcache.errors import Exit, FedcacheError
from fedcache.store.verify import verify


def with_history_and_an_array_in_flight(path):
    store = create(path)
    fill(store, KEYS[0])
    store.put_text(
        "a", ["{}"], np.eye(3, 2, dtype=np.float32), {"backbone": "a", "weights": "none"}
    )
    store.put_partition("p", {"clients": []})
    store.append_history({"event": "extract", "seconds": 1e-05})
    store.append_history({"event": "extract", "seconds": 2.5})
    fill(store, KEYS[1], chunks=3)
    return store


def flip_bit(file, at=0.5, bit=0):
    """Change one bit of a file, in byte number ``at``; a fraction is a share of the length."""
    raw = bytearray(file.read_bytes())
    if isinstance(at, float):
        at = int(at * len(raw))
    raw[at] ^= 1 << bit
    file.write_bytes(raw)


def flip(file, draw):
    raw = file.read_bytes()
    flip_bit(file, draw.randrange(len(raw)), draw.randrange(8))
    return raw


def files_of(path):
    return [f for f in sorted(path.rglob("*")) if f.is_file() and "locks" not in f.parts]


def found(path):
    try:
        return not verify(path).ok
    except FedcacheError as error:
        return error.code is Exit.CORRUPT
