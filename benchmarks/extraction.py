"""Extraction from a folder of JPEGs against what decoding and the models take alone, image by image, on one core.

The pictures are drawn, six whole chunks of them: smooth colours with fine noise, 256 x 256, about 15 kB each. The parts
are measured with the package's own decoder and encoders in a process with one thread, before every extraction; the
extraction is the command itself with its default arrangement of processes, and the median of these pairs is the row's
number. On a GPU the same row would be held against the slower of decoding and the model; here it all runs on the CPU.

With two backbones the question is what is done besides: the parts are those that the extraction itself measured, and
images are decoded once. The detail also says what the parts take alone, on all cores at the same time.

A backbone that sleeps a second a batch stands for a GPU, or for many cores: whether as many batches are under way as
there are workers depends on no processor then, and neither does what ``--dry-run`` says beforehand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import Row, cores, make_row, quartiles
from fedcache.config import ExtractConfig, Home
from fedcache.extract.batches import BatchRunner, ComputeSettings, FeatureJob
from fedcache.extract.datasets import Context, open_dataset
from fedcache.extract.planning.plan import memory_of, plan
from fedcache.process import keep_freed_memory
from fedcache.progress import Silent

IMAGES = 3_072
SIZE = 96
BATCH = 32
MEASURED = 6  # batches at a time
TIMES = 5
ONE = ("efficientnet-lite0",)
TWO = ("efficientnet-lite0", "efficientnet-lite2")


def draw(folder: Path) -> float:
    """``IMAGES`` pictures of two classes; their mean size in kB."""
    g = np.random.default_rng(0)
    total = 0
    for i in range(IMAGES):
        place = folder / f"class-{i % 2}" / f"{i:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(g.integers(0, 256, (8, 8, 3), np.uint8)).resize(
            (256, 256), Image.Resampling.BICUBIC
        )
        fine = np.asarray(coarse, np.int16) + g.integers(-12, 13, (256, 256, 1))
        Image.fromarray(fine.clip(0, 255).astype(np.uint8)).save(place, quality=80)
        total += place.stat().st_size
    return total / IMAGES / 1e3


class Parts:
    """Decoding and the forward passes of some backbones, alone, on one core."""

    def __init__(self, folder: Path, home: Path, backbones: tuple[str, ...]) -> None:
        torch.set_num_threads(1)
        spec = f"folder:{folder}"
        config = ExtractConfig(dataset=spec, backbones=backbones, size=SIZE)
        where = Home(home)
        planned, _ = plan(config, where, Silent())
        self.data = open_dataset(spec, Context(memory_of(where), data=where.data))
        jobs = [
            FeatureJob(p.recipe.key, p.backbone, p.weights, p.recipe, self.data.mirror)
            for p in planned
        ]
        settings = ComputeSettings("cpu", "float32", BATCH, 1)
        self.runner = BatchRunner(
            jobs, self.data.source, self.data.uid, len(self.data.names), settings
        )
        self.keys = [j.key for j in jobs]
        self.runner.compute(0, self.keys)

    def seconds(self, first: int) -> tuple[float, float]:
        """Seconds an image of decoding and of all forward passes, of ``MEASURED`` batches from ``first`` on."""
        decode = forward = 0.0
        for b in range(first, first + MEASURED):
            done = self.runner.compute(b, self.keys)
            decode += done.decode_seconds
            forward += sum(done.forward_seconds.values())
        images = MEASURED * BATCH
        return decode / images, forward / images


def extract(options: str, spec: str, store: Path, cwd: Path | None = None, **env: str) -> Any:
    """The answer of one ``fedcache extract``, with more variables of the environment."""
    words = ["--dataset", spec, "--store", str(store), "--json", *options.split()]
    line = [sys.executable, "-m", "fedcache", "extract", *words]
    environment = {**os.environ, **env}
    done = subprocess.run(
        line, env=environment, cwd=cwd, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)["data"]


_parts: Parts | None = None


def _begin(*where: Any) -> None:
    global _parts
    keep_freed_memory()  # as the workers of an extraction do
    _parts = Parts(*where)


def _seconds(first: int) -> tuple[float, float]:
    assert _parts is not None
    return _parts.seconds(first)


def turns(
    folder: Path, home: Path, backbones: tuple[str, ...]
) -> tuple[list[Any], list[Any], list[dict[str, Any]]]:
    """(decode, forward) seconds an image on one core, the same on all cores at once, and extractions, in turn."""
    alone = []
    together = []
    done = []
    with get_context("spawn").Pool(cores(), _begin, (folder, home, backbones)) as pool:
        for i in range(TIMES):
            first = MEASURED * i
            alone.append(pool.apply(_seconds, (first,)))
            each = pool.map(_seconds, [first] * cores(), chunksize=1)
            together.append(np.mean(each, axis=0))
            options = f"--backbones {','.join(backbones)} --size {SIZE}"
            store = home / f"{len(backbones)}-{i}.zarr"
            done.append(extract(options, f"folder:{folder}", store, FEDCACHE_HOME=str(home)))
    return alone, together, done


SLEEPING = """
import time
import torch


class Sleeping(torch.nn.Module):
    size = 8

    def forward(self, x):
        time.sleep(1.0)
        return x.mean((2, 3))


make = Sleeping
"""
SLEEPS = 8_192
ARRANGED = ((256, 4), (256, 8), (512, 8))
"""Batches and processes of the sleeping backbone."""


def asleep(folder: Path, batch: int, workers: int) -> tuple[float, float, float]:
    """Seconds of an extraction with the sleeping backbone: ideal, measured, and estimated by ``--dry-run``."""
    options = f"--backbones module:sleeping:make --batch {batch} --workers {workers}"
    answer = partial(
        extract,
        spec=f"arrays:{folder / 'images.npz'}",
        store=folder / f"{batch}-{workers}.zarr",
        cwd=folder,
        FEDCACHE_HOME=str(folder / "home"),
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    expected = answer(f"{options} --dry-run")["seconds"]
    took = answer(options)["seconds"]
    return SLEEPS / batch / workers, took, expected


def sleeping_rows() -> list[Row]:
    """How long a backbone that sleeps takes, and how long ``--dry-run`` says."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sleeping.py").write_text(SLEEPING)
        images = np.random.default_rng(0).integers(0, 256, (SLEEPS, 8, 8, 3), np.uint8)
        np.savez(folder / "images.npz", images=images)
        found = [asleep(folder, *arranged) for arranged in ARRANGED]
    each = [
        f"batch {batch}, {workers} processes: {took:.2f} s of {ideal:.0f} s, {expected:.2f} s expected"
        for (batch, workers), (ideal, took, expected) in zip(ARRANGED, found, strict=True)
    ]
    detail = f"{SLEEPS:,} images; " + "; ".join(each)
    slower = [took / ideal for ideal, took, _ in found]
    wrong = [max(expected / took, took / expected) for _, took, expected in found]
    first = make_row(
        "a backbone that sleeps 1 s a batch",
        "<= 1.25 x batches / processes",
        max(slower),
        quartiles(slower),
        max(slower) <= 1.25,
        detail=detail,
    )
    second = make_row(
        "what --dry-run expects of it",
        "within 1.25 x of what it takes",
        max(wrong),
        quartiles(wrong),
        max(wrong) <= 1.25,
        detail=detail,
    )
    return [first, second]


def rows() -> list[Row]:
    return [*picture_rows(), *sleeping_rows()]


def picture_rows() -> list[Row]:
    """Pictures in a folder, by one backbone and by two."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "pictures"
        home = Path(temporary) / "home"
        size = draw(folder)
        alone, together, done = turns(folder, home, ONE)
        _, both, twice = turns(folder, home, TWO)
    about = f"{IMAGES:,} JPEGs of 256 x 256, {size:.0f} kB each, at {SIZE} px"
    n = cores()
    limits = [n / (d + f) for d, f in alone]
    shares = [e["rate"] / limit for e, limit in zip(done, limits, strict=True)]
    measured = median(shares)
    decode, forward = min(alone, key=sum)
    at_once = min(sum(parts) for parts in together)
    reachable = n / at_once
    detail = (
        f"{about}, {ONE[0]}: best of {TIMES} {max(e['rate'] for e in done):.0f} images/s with {done[0]['workers']} "
        f"processes; on one core decoding {decode * 1e3:.2f} ms and the model {forward * 1e3:.2f} ms an image, so "
        f"{n} cores give {max(limits):.0f}; starting the processes is not in the rate"
    )
    first = make_row(
        "extraction of a folder of JPEGs",
        ">= 0.92 of cores / (decode + forward)",
        measured,
        quartiles(shares),
        measured >= 0.92,
        detail=detail,
        roofline=(
            f"With all {n} cores at work, decoding and the model take {at_once * 1e3:.2f} ms an image, which is "
            f"{reachable:.0f} images/s or {reachable / max(limits):.2f} of the number from one core alone; the "
            f"extraction has {max(e['rate'] for e in done) / reachable:.2f} of this"
        ),
    )
    total = [e["seconds"] * n / e["images"] for e in twice]
    alone_too = median([t / (d + f) for t, (d, f) in zip(total, both, strict=True)])
    # busy: decoding and forward passes, as a share of all core time
    ratios = [1.0 / e["busy"] for e in twice]
    measured = median(ratios)
    decoded = twice[0]["decoded"]
    detail = (
        f"{about}, {' + '.join(TWO)}: {min(total) * 1e3:.2f} core-ms an image, {alone_too:.3f} x what the parts take "
        f"alone on all cores at once; {decoded:,} of {IMAGES:,} images decoded"
    )
    second = make_row(
        "two backbones in one run",
        "<= 1.05 x (decode + sum of forwards)",
        measured,
        quartiles(ratios),
        measured <= 1.05 and decoded == IMAGES,
        detail=detail,
    )
    return [first, second]
