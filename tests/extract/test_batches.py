"""One batch, whoever computes it: inputs, bad rows, the short last batch, and decoders that feed the models."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pictures import picture
from refusal import corruption, machine_error

from fedcache.extract.backbones import Weights, lookup
from fedcache.extract.batches import (
    BatchRunner,
    ComputeSettings,
    FeatureJob,
    decode_batch,
    input_key,
)
from fedcache.extract.compute_features import feature_shape
from fedcache.extract.image_files import BadImage
from fedcache.extract.workers import batch_workers, chunk_tasks, gpu, local
from fedcache.extract.workers.batch_workers import CpuWorkers, InProcess
from fedcache.extract.workers.gpu import GpuFeeder
from fedcache.extract.workers.local import open_workers
from fedcache.process import Stop

SETTINGS = ComputeSettings("cpu", "float32", 4, 1)


class Pictures:
    """Ten squares of 8 and one of 6 pixels; row 2 is no image."""

    def read(self, row):
        if row == 2:
            raise BadImage("torn")
        out = io.BytesIO()
        picture(row, row % 3, side=6 if row == 10 else 8).save(out, "png")
        return out.getvalue()


UID = np.arange(11 * 16, dtype=np.uint8).reshape(11, 16)


def job(name="random-projection:4", key="a", **changed):
    row = lookup(name)
    weights = Weights(None, "none" if name == "pixels" else "seed:0", "seeded")
    recipe = replace(row.recipe, weights=weights.sha256, **changed)
    return FeatureJob(key, row, weights, recipe, how={"device": "cpu"})


def data():
    return SimpleNamespace(source=Pictures(), uid=UID, names=[str(i) for i in range(10)])


def test_each_row_is_decoded_once_for_recipes_with_the_same_input():
    one = job(size=8).recipe
    two = job(size=8, mean=(0.5, 0.5, 0.5)).recipe
    other = job(size=4, views=3).recipe
    assert input_key(one) == input_key(two) != input_key(other)
    inputs, bad, _ = decode_batch(Pictures(), range(1, 4), UID[1:4], [one, two, other], True)
    shapes = {input_key(one): (3, 1, 8, 8, 3), input_key(other): (3, 3, 4, 4, 3)}
    assert {key: values.shape for key, values in inputs.items()} == shapes
    assert bad == {2: "torn"}
    assert all(
        not values[1].any() and values[0].any() and values[2].any() for values in inputs.values()
    )
    assert np.array_equal(inputs[input_key(one)][0, 0], np.asarray(picture(1, 1, side=8)))
    blank, bad, _ = decode_batch(Pictures(), [2], UID[2:3], [other, job("pixels").recipe], True)
    assert [v.shape for v in blank.values()] == [(1, 3, 4, 4, 3), (1, 1, 1, 1, 3)]


def test_a_batch_is_the_projection_of_its_pixels_and_bad_rows_are_nan():
    import torch

    runner = BatchRunner([job(size=8, views=2), job("pixels", "p")], Pictures(), UID, 10, SETTINGS)
    assert [list(runner.rows_of(b)) for b in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    made = runner.compute(0, ["a", "p"])
    kinds = {key: (x.shape, x.dtype) for key, x in made.features.items()}
    assert kinds == {"a": ((4, 2, 4), np.float32), "p": ((4, 1, 8, 8, 3), np.uint8)}
    assert np.isnan(made.features["a"]).all((1, 2)).tolist() == [False, False, True, False]
    assert made.bad == {2: "torn"}
    assert made.decoded == 4
    assert made.forward_seconds.keys() == runner.warm().keys() == {"a", "p"}
    # the last batch is filled up with its last row, so that two rows are as of a batch of four
    last = runner.compute(2, ["a"])
    x = torch.from_numpy(np.stack([np.asarray(picture(r, r % 3, side=8)) for r in (8, 9, 9, 9)]))
    assert np.array_equal(last.features["a"][:, 0], runner.encoders["a"].image(x)[:2].numpy())


@pytest.mark.parametrize(
    ("device", "asked", "tasks", "cores", "kind", "count"),
    [
        ("cpu", None, 11, 4, InProcess, 1),
        ("cpu", None, 12, 4, CpuWorkers, 2),  # of two threads each
        ("cpu", 3, 1, 4, CpuWorkers, 3),
        ("cpu", 0, 99, 4, InProcess, 1),
        ("cuda", None, 1, 4, GpuFeeder, 3),
        ("cuda", 2, 1, 4, GpuFeeder, 2),
    ],
)
def test_the_workers_of_a_device(device, asked, tasks, cores, kind, count, monkeypatch):
    asked_for = []

    def pool(processes, *_):
        asked_for.append(processes)
        return SimpleNamespace(close=lambda: None)

    for module in (batch_workers, gpu):
        monkeypatch.setattr(module, "WorkerProcesses", pool)
    monkeypatch.setattr(batch_workers, "make_runner", lambda *_: None)
    monkeypatch.setattr(gpu, "BatchRunner", lambda *_: None)
    monkeypatch.setattr(local, "CudaStages", lambda _: SimpleNamespace(close=lambda: None))
    made = open_workers(
        [],
        data(),
        replace(SETTINGS, device=device, threads=2),
        workers=asked,
        tasks=tasks,
        cores=cores,
        stop=Stop(),
    )
    assert type(made) is kind
    assert made.workers == count
    assert asked_for == ([] if kind is InProcess else [count])
    assert made.depth == (1 if kind is InProcess else 2 * count + 2)
    made.close()


def test_a_node_that_would_compute_in_another_way_is_refused(monkeypatch):
    mine = {"device": "cpu", "torch": "2"}
    monkeypatch.setattr(chunk_tasks, "how_record", lambda *_: mine)
    monkeypatch.setattr(chunk_tasks.socket, "gethostname", lambda: "node3")
    unfinished = {"a": SimpleNamespace(check=lambda: None)}

    def check(how=mine, arrays=unfinished, probe=None, **changed):
        jobs = [replace(job(), how=how, **changed)]
        chunk_tasks._check_machine(
            SimpleNamespace(
                source=Pictures(), jobs=jobs, arrays=arrays, probe=probe, settings=SETTINGS
            )
        )

    whole = chunk_tasks._uid_or_none(Pictures(), 1)
    check()
    check({"torch": "1"}, arrays={})  # of an array that is finished
    check(probe=(1, whole))
    machine_error(lambda: check({"device": "cpu", "torch": "1"}), "node3 ", "torch 1, torch 2")
    machine_error(lambda: check(probe=(3, whole)), "node3")
    nowhere = Weights(Path("/nowhere/w.pt"), "seed:0", "")
    machine_error(lambda: check(weights=nowhere), "node3 ", "/nowhere/w.pt")


def test_the_size_of_pixels_as_they_are_is_that_of_the_first_image_that_opens():
    class Wide(Pictures):
        def read(self, row):
            if row != 3:
                raise BadImage("torn")
            out = io.BytesIO()
            picture(0, 0, side=8).resize((7, 5)).save(out, "png")
            return out.getvalue()

    images = data()
    images.source = Wide()
    assert feature_shape(job("pixels", dtype="uint8", size=0), images) == (10, 1, 5, 7, 3)
    assert feature_shape(job("pixels", dtype="uint8", size=9, views=2), images) == (10, 2, 9, 9, 3)
    assert feature_shape(job(views=2), images) == (10, 2, 4)
    images.names = images.names[:3]
    corruption(
        lambda: feature_shape(job("pixels", dtype="uint8", size=0), images), "None of the images"
    )
