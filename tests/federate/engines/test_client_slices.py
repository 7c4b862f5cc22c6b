"""Clients that are trained in slices by workers: the run is the sequential one, to the bit."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from federation import cases, difference, fitted, ids, tiny
from methods_tried import tried

from fedcache.federate.engine.run import TrainingRun, new_run, run
from fedcache.federate.engines.ray import engine
from fedcache.federate.execution import executor
from fedcache.federate.methods import METHODS

PLAIN = [case for case in cases() if not METHODS[case[0]].central]


class Workers:
    """Two workers without a cluster: what is submitted is computed when it is waited for, the last one first."""

    slots = 2

    def __init__(self, spec, hp):
        self.held = SimpleNamespace(job=lambda seed: new_run(spec, hp))
        self.cluster = SimpleNamespace(ray=SimpleNamespace(put=lambda tree: tree))
        self.waiting, self.most = [], 0

    def submit(self, tag, *args):
        self.waiting.append((tag, args))
        self.most = max(self.most, len(self.waiting))

    def wait(self, seconds):
        tag, args = self.waiting.pop()
        return [(tag, engine.fit_slice(self.held, *args))]


def over_workers(spec, hp):
    """The outcome of a run on two workers, and the workers."""
    workers = Workers(spec, hp)
    with ExitStack() as opened:
        engine.over_ray(opened, lambda: workers)
        return run(spec, hp), workers


def same(one, other):
    assert one.traffic == other.traffic
    assert difference(one, other) == 0.0


@pytest.mark.parametrize("case", tried(PLAIN), ids=ids)
def test_every_method_is_the_sequential_run(case):
    data, clients = tiny(views=4)
    method = METHODS[case[0]]
    hp = method.resolve("paper", case[1])
    spec = TrainingRun(
        method, fitted(method, data), clients, 2, participation=2, execution="sequential"
    )
    made, workers = over_workers(spec, hp)
    same(made, run(spec, hp))
    assert workers.most
    assert not workers.waiting


def test_sums_of_many_clients_travel_in_place_of_their_uploads(monkeypatch):
    monkeypatch.setattr(executor, "TOGETHER_ROWS", 100)
    data, clients = tiny(sizes=(3,) * 120)
    hp = METHODS["fed3r"].resolve()
    spec = TrainingRun(METHODS["fed3r"], data, clients, execution="sequential")
    made, workers = over_workers(spec, hp)
    same(made, run(spec, hp))
    # two for each worker, of the pieces that 120 clients of three rows make
    assert workers.most == 4
