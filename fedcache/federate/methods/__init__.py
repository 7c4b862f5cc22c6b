"""One paper, one file; this is the list."""

from __future__ import annotations

from fedcache.errors import unknown
from fedcache.federate.method import Method
from fedcache.federate.methods import (
    central,
    clip_zs,
    fed3r,
    fedavg,
    fedavg_simclr,
    fedncm,
    fedpcl,
    fedproto,
    fedprox,
    fedprox_simclr,
    flesd,
    flesd_cc,
    flesd_head,
    fst_cbdg,
    min_local,
    non_fl,
    solo,
)

METHODS: dict[str, Method] = {
    "central": central.METHOD,
    "clip-zs": clip_zs.METHOD,
    "fed3r": fed3r.METHOD,
    "fedavg": fedavg.METHOD,
    "fedavg-simclr": fedavg_simclr.METHOD,
    "fedncm": fedncm.METHOD,
    "fedpcl": fedpcl.METHOD,
    "fedproto": fedproto.METHOD,
    "fedprox": fedprox.METHOD,
    "fedprox-simclr": fedprox_simclr.METHOD,
    "flesd": flesd.METHOD,
    "flesd-cc": flesd_cc.METHOD,
    "flesd-head": flesd_head.METHOD,
    "fst-cbdg": fst_cbdg.METHOD,
    "min-local": min_local.METHOD,
    "non-fl": non_fl.METHOD,
    "solo": solo.METHOD,
}


def lookup(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
