"""One paper, one file; this is the list."""

from __future__ import annotations

from fedcache.errors import unknown
from fedcache.federate.method import Method
from fedcache.federate.methods import clip_zs, fed3r, fedavg, fedncm, fedprox, solo

METHODS: dict[str, Method] = {
    "clip-zs": clip_zs.METHOD,
    "fed3r": fed3r.METHOD,
    "fedavg": fedavg.METHOD,
    "fedncm": fedncm.METHOD,
    "fedprox": fedprox.METHOD,
    "solo": solo.METHOD,
}


def lookup(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
