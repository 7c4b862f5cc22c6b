"""One paper, one file; this is the list.

The file of a method is its name with underscores, and its ``METHOD`` is the method: adding one adds a line here.
"""

from __future__ import annotations

from importlib import import_module

from fedcache.errors import unknown
from fedcache.federate.engine.method import Method

NAMES = (
    "atpfl",
    "atpfl-feat",
    "central",
    "clip-zs",
    "ditto",
    "fed-tip-proto",
    "fed3r",
    "fed3r-prior",
    "fedavg",
    "fedavg-scratch",
    "fedavg-simclr",
    "fedcgs",
    "fedcof",
    "fedncm",
    "fedntd",
    "fedpcl",
    "fedpft",
    "fedproto",
    "fedprox",
    "fedprox-simclr",
    "fedrep",
    "flesd",
    "flesd-cc",
    "flesd-head",
    "fst-cbdg",
    "local-prompt",
    "local-supervised",
    "min-local",
    "moon",
    "non-fl",
    "perfedavg",
    "pfedme",
    "promptfl",
    "scaffold",
    "solo",
    "supcon",
    "tip-local",
    "tpfl",
    "tpfl-feat",
)


def module_of(name: str) -> str:
    """The dotted name of the file that declares a method."""
    return f"{__name__}.{name.replace('-', '_')}"


METHODS: dict[str, Method] = {name: import_module(module_of(name)).METHOD for name in NAMES}


def lookup(name: str) -> Method:
    """The method of that name; exit 2 with "did you mean" when there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
