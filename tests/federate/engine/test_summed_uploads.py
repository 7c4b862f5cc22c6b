"""Uploads of a chunk pooled by one sum over its clients, as on a GPU, are those pooled one by one."""

from __future__ import annotations

import pytest
import test_engine_laws as laws
from pairs import parametrize

from fedcache.federate.execution.batched import Batched
from fedcache.federate.execution.choose import registered

NAME = "summed"


class Summed(Batched):
    """``batched`` as it computes on a GPU."""

    name = NAME

    @classmethod
    def serves(cls, method, hp, load):
        return Batched.serves(method, hp, load)

    def sums_uploads(self):
        return True


@pytest.fixture(autouse=True)
def the_summed():
    with registered(Summed):
        yield


def pytest_generate_tests(metafunc):
    with registered(Summed):
        parametrize(metafunc, [NAME])


for name, law in vars(laws).items():
    if hasattr(law, "pairs"):
        globals()[name] = law
