"""Homes that are made one time, with a copy for each test."""

import pytest


def made_once(make, **options):
    """The fixture that is a copy of what ``make(place)`` makes one time; the options are those of ``pytest.fixture``.

    Where a file makes its own, this decorates the function, whose name is then that of the fixture.
    """

    @pytest.fixture(**options)
    def copied(once):
        return once(make)

    return copied
