"""Columns of invented datasets for the partition tests."""

import hashlib

import numpy as np
from hypothesis import strategies as st

from fedcache import FedcacheError
from fedcache.federate.partition.partition import Columns, make

DATASET = "d" * 64


def columns_from(label, domain, split, ok, classes, domains):
    rows = len(label)
    uid = np.frombuffer(
        b"".join(hashlib.md5(b"%d" % i).digest() for i in range(rows)), np.uint8
    ).reshape(rows, 16)
    return Columns(
        np.asarray(label, np.int32),
        np.asarray(domain, np.int16),
        np.asarray(split, np.uint8),
        np.asarray(ok, np.uint8),
        uid,
        tuple(f"class {i}" for i in range(classes)),
        tuple(f"domain {i}" for i in range(domains)),
        DATASET,
    )


def even_columns(train, test, classes, domains=1):
    """``train`` and ``test`` rows of every class in every domain, in the order domain, class, split."""
    each = train + test
    label = np.tile(np.repeat(np.arange(classes), each), domains)
    domain = np.repeat(np.arange(domains), each * classes)
    split = np.tile(np.r_[np.zeros(train), np.ones(test)], classes * domains)
    return columns_from(label, domain, split, np.ones(len(label)), classes, domains)


@st.composite
def any_columns(draw):
    """Small datasets with everything that can be odd: absent classes, unknown labels, bad rows, empty splits."""
    rows = draw(st.integers(1, 120))
    classes = draw(st.integers(1, 6))
    domains = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    unknown = draw(st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    label = np.where(rng.random(rows) < unknown, -1, rng.integers(0, classes, rows))
    shares = draw(
        st.sampled_from([(0.6, 0.3, 0.1), (0.5, 0.5, 0.0), (0.9, 0.0, 0.1), (0.0, 1.0, 0.0)])
    )
    split = rng.choice(3, rows, p=shares)
    ok = rng.random(rows) < draw(st.sampled_from([1.0, 0.9]))
    return columns_from(label, rng.integers(0, domains, rows), split, ok, classes, domains)


def attempt(scheme, columns, **args):
    """The partition, or the error that it is refused with."""
    try:
        return make(scheme, columns, **args)
    except FedcacheError as error:
        return error


def some_arguments(draw, scheme):
    """Values in range for a random few of a scheme's arguments, small enough that many are feasible."""
    values = {}
    for argument in scheme.arguments:
        if argument.kind == "names" or not draw(st.booleans()):
            continue
        match argument.kind:
            case "int":
                values[argument.name] = draw(st.integers(1, 12))
            case "float":
                values[argument.name] = draw(
                    st.floats(1.1, 9.0) if argument.name == "ratio" else st.floats(0.05, 50.0)
                )
            case "bool":
                values[argument.name] = draw(st.booleans())
            case "choice":
                values[argument.name] = draw(st.sampled_from(argument.choices))
    return values


NATURAL_ARGUMENTS = (
    {},
    {"by": "class"},
    {"rows": "all"},
    {"unlabelled": "drop"},
    {"tests": "global"},
    {"tests": "held-out-clients"},
    {"rows": "all", "tests": "held-out-clients", "unlabelled": "drop"},
    {"inside": "iid", "clients": 1},
)
"""Of the scheme natural, which refuses most sets of arguments that are drawn at random."""


def drawn_arguments(draw, scheme):
    """Arguments of any scheme, with a number of clients where it has one."""
    if scheme.name == "natural":
        return draw(st.sampled_from(NATURAL_ARGUMENTS))
    args = some_arguments(draw, scheme)
    if "clients" in {argument.name for argument in scheme.arguments}:
        args.setdefault("clients", draw(st.integers(1, 8)))
    return args
