"""The short and the full draw: how many examples and which of many alike a test tries.

FEDCACHE_CASES=full asks for the full one (``make nightly``); the numbers go into docs/trust.md.
"""

import os
from operator import itemgetter

import pytest
from hypothesis import settings

FULL = os.environ.get("FEDCACHE_CASES") == "full"


def one_of_each(things, kind=itemgetter(0)):
    """The first of ``things`` of every kind, by default by their first part; all of them in the full draw."""
    every = list(things)
    return every if FULL else list({kind(thing): thing for thing in reversed(every)}.values())[::-1]


def examples(few, every, **words):
    """``@settings`` with ``few`` examples, or ``every`` with FEDCACHE_CASES=full."""
    count = every if FULL else few

    def decorate(test):
        return pytest.mark.cases(count)(settings(max_examples=count, **words)(test))

    return decorate
