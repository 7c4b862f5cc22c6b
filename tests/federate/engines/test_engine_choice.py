"""``--engine ray`` without Ray: what is refused, and the chunk tasks that its workers compute."""

import random
import socket
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from command import fedcache, words_of
from failing_command import must_fail, must_fail_machine
from pictures import folder
from refusal import machine_error
from toy_store import content, samples

from fedcache.errors import Exit
from fedcache.extract import compute_features as extraction_run
from fedcache.extract.workers import chunk_tasks
from fedcache.extract.workers.chunk_tasks import ChunkWorker, plan_tasks
from fedcache.federate.engines.ray import cluster, engine
from fedcache.store.store import Store

COMMANDS = [
    "extract --dataset digits --backbones random-projection",
    "grid --method fedavg",
    "reproduce fedpcl-table5 --on digits",
]
SMALL = words_of("--backbones random-projection,pixels --size 16 --batch 4")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(cluster, "need_ray", lambda: None)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_engines_are_refused_before_any_work(command, monkeypatch, installed):
    must_fail("Did you mean 'ray'?", f"{command} --engine rey")
    must_fail("--engine ray", f"{command} --ray-address 10.0.0.1:6379")
    for word in ("10.0.0.1", "ray://10.0.0.1:10001", "h:0"):
        must_fail("", f"{command} --engine ray --ray-address {word}")
    monkeypatch.undo()
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    must_fail_machine("pip install 'fedcache[ray]'", f"{command} --engine ray")


def test_an_address_where_no_cluster_answers_is_told_at_once(monkeypatch):
    monkeypatch.setattr(cluster, "ANSWER_WITHIN", 0.3)
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for line, words in ((closed, "No Ray cluster answers"), (silent, "is not a Ray cluster")):
            machine_error(
                partial(cluster.check_address, f"127.0.0.1:{line.getsockname()[1]}"), words
            )


class Clumsy:
    """Workers in this process. A call may be computed twice, its first result lost; answers come in any order."""

    slots = 3

    def __init__(self, spec, seed):
        self.worker, self.draw = ChunkWorker(spec), random.Random(seed)
        self.ready = []

    @property
    def waiting(self):
        return len(self.ready)

    def submit(self, tag, *args):
        for _ in range(self.draw.randint(1, 2)):
            answer = chunk_tasks.compute(self.worker, *args)
        self.ready.insert(self.draw.randint(0, len(self.ready)), (tag, answer))

    def wait(self, seconds):
        return [self.ready.pop()]

    def ask(self, *args):
        return chunk_tasks.compute(self.worker, *args)


@pytest.fixture
def clumsy(installed, monkeypatch):
    """Workers as ``Clumsy`` in the place of a cluster."""
    made = []

    @contextmanager
    def open_pool(address, spec, workers, observer):
        made.append(Clumsy(spec, len(made)))
        yield made[-1]

    monkeypatch.setattr(engine, "open_pool", open_pool)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("decoders", [0, 2])
def test_tasks_computed_twice_and_in_any_order_make_the_same_store(
    tmp_path, clumsy, monkeypatch, decoders
):
    images = folder(tmp_path / "shapes")
    (images / "train/ant/broken.png").write_bytes(b"not a picture")
    words = ("extract", "--dataset", f"folder:{images}", *SMALL, "--chunk-rows", 8, "--json")
    whole = tmp_path / "whole.zarr"
    apart = tmp_path / "apart.zarr"
    assert fedcache(*words, "--workers", 0, "--store", whole).code == Exit.QUARANTINED
    make_spec = chunk_tasks.make_spec
    monkeypatch.setattr(
        extraction_run, "make_spec", lambda *a: replace(make_spec(*a), decoders=decoders)
    )
    assert fedcache(*words, "--engine", "ray", "--store", apart).code == Exit.QUARANTINED
    assert content(apart) == content(whole)


@pytest.mark.parametrize("sizes", [(8, 32), (12, 20)])
def test_tasks_cover_what_is_missing_once_and_share_no_image(sizes):
    def writer(chunk_rows, seed):
        count = -(-101 // chunk_rows)
        left = sorted(random.Random(seed).sample(range(count), max(1, count // 2)))
        return SimpleNamespace(chunk_rows=chunk_rows, missing=lambda: left)

    for seed in range(20):
        writers = {"a": writer(sizes[0], seed), "b": writer(sizes[1], seed + 99)}
        batches = extraction_run.plan_batches(writers, 101, 4)
        made = plan_tasks(writers, batches, 101, 4)
        assert sorted(c for r in made for c in r.chunks) == sorted(
            (k, c) for k, w in writers.items() for c in w.missing()
        )
        assert [b for r in made for b in r.batches] == batches  # each batch once, in order
        for r in made:
            for key, chunk in r.chunks:
                size = writers[key].chunk_rows
                wanted = set(range(chunk * size // 4, -(-min((chunk + 1) * size, 101) // 4)))
                assert wanted <= {b for b, keys in r.batches if key in keys}


@pytest.fixture
def writer(tmp_path):

    store = Store.create(
        tmp_path / "s.zarr",
        samples(20),
        dataset={"slug": "toy", "digest": "0" * 64, "template": None},
    )
    with store.writer(
        "a", shape=(20, 1, 3), dtype="float32", chunk_rows=8, recipe={"backbone": "a"}, how={}
    ) as made:
        yield made


def test_nothing_of_a_helper_counts_before_it_is_committed(writer):
    rows = np.arange(24, dtype=np.float32).reshape(8, 1, 3)
    written = writer.for_workers().write(0, rows)
    assert written.file.exists()
    assert writer.missing() == [0, 1, 2]
    writer.commit(written)
    assert writer.missing() == [1, 2]
    assert not written.file.exists()
    left = writer.for_workers().write(1, rows)  # of a helper that was given up
    writer.remove_uncommitted()
    assert not left.file.exists()


def test_a_helper_or_a_driver_that_does_not_share_the_path_is_told(writer, tmp_path, monkeypatch):
    monkeypatch.setattr("fedcache.store.writer.time.sleep", lambda seconds: None)
    writer.for_workers().check()
    for other in (
        replace(writer.for_workers(), store=tmp_path / "elsewhere"),
        replace(writer.for_workers(), header="0" * 64),
    ):
        machine_error(other.check, "has no access to the store")
    written = writer.for_workers().write(0, np.zeros((8, 1, 3), np.float32))
    written.file.unlink()
    machine_error(lambda: writer.commit(written), "is missing", "all nodes share")
