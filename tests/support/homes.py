"""Homes that are made one time, with a copy for each test."""

import pytest


def made_once(make, **options):
    """The fixture that is a copy of what ``make`` makes one time; the options are those of ``pytest.fixture``."""

    @pytest.fixture(**options)
    def copied(once):
        return once(make)

    return copied
