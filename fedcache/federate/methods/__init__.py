"""One paper, one file; this is the list."""

from __future__ import annotations

from fedcache.errors import unknown
from fedcache.federate.method import Method
from fedcache.federate.methods import central, clip_zs, fed3r, fedavg, fedncm, fedpcl, fedproto, fedprox, fst_cbdg, solo

METHODS: dict[str, Method] = {
    "central": central.METHOD,
    "clip-zs": clip_zs.METHOD,
    "fed3r": fed3r.METHOD,
    "fedavg": fedavg.METHOD,
    "fedncm": fedncm.METHOD,
    "fedpcl": fedpcl.METHOD,
    "fedproto": fedproto.METHOD,
    "fedprox": fedprox.METHOD,
    "fst-cbdg": fst_cbdg.METHOD,
    "solo": solo.METHOD,
}


def lookup(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
