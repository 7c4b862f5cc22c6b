"""Homes that are made one time, with a copy for each test."""

import pytest


def made_once(make):
    """The fixture that is a copy of what ``make`` makes one time."""

    @pytest.fixture
    def copied(once):
        return once(make)

    return copied
