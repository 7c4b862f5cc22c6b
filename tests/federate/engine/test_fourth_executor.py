"""Executions that are not of the package: this file adds them, and they keep every law that the others keep."""

from pathlib import Path

import pytest
from federation import go_tiny
from loaded_files import load_file
from pairs import parametrize

from fedcache.federate.engine.run import executors, registered
from fedcache.federate.execution.executor import Batched, Executor

laws = load_file(Path(__file__).parents[2] / "contract/test_method_laws.py")
NAME = "last-first"


class LastFirst(Executor):
    """One client after another, the last one first."""

    name = NAME

    @classmethod
    def serves(cls, method, hp, load):
        return ""

    def one_round(self, ids, downs):
        traffic = []
        for point, down in zip(self.batch.points, downs, strict=True):
            pipeline = point.upload_pipeline(ids, down, self.batch.participation)
            sent = []
            for client in reversed(ids):
                upload = point.fit_one(down, client)
                pipeline.add(upload, client)
                sent.insert(0, point.upload_size(upload))
            traffic.append(point.finish(ids, down, point.pooled(pipeline, ids), sent))
        return traffic


class Summed(Batched):
    """``batched`` as it pools on a GPU: all uploads of a chunk by one sum over its clients."""

    name = "summed"

    @classmethod
    def serves(cls, method, hp, load):
        return Batched.serves(method, hp, load)

    def sums_uploads(self, up, clients):
        return True


@pytest.fixture(autouse=True)
def the_others():
    with registered(LastFirst, Summed):
        yield


def pytest_generate_tests(metafunc):
    with registered(LastFirst, Summed):
        parametrize(metafunc, [NAME, Summed.name])


for name, law in vars(laws).items():
    if hasattr(law, "pairs"):
        globals()[name] = law


def test_it_is_asked_for_by_its_name_and_never_chosen_by_itself():
    assert go_tiny("fedavg", execution=NAME).execution == NAME
    assert go_tiny("fedavg").execution != NAME


def test_it_is_known_where_it_is_registered_alone():
    before = set(executors())
    with registered(type("Fifth", (LastFirst,), {"name": "fifth"})):
        assert set(executors()) == before | {"fifth"}
    assert set(executors()) == before
