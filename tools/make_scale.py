"""Make the computed tables of docs/scale/large.md: costs of a round and of a store at sizes that were never run.

    OMP_NUM_THREADS=1 python tools/make_scale.py [--measure]

Bytes come from real messages of the methods, files and sizes from the layout of real stores. Seconds are products of
constants that were measured on one machine for one message and one image. --measure measures the constants of a message
again and prints them; copy them to SECONDS below.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedcache.extract.workers.local import chunk_rows_for
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.flower.messages import SiteMessage, pack, unpack
from fedcache.federate.methods import find_method
from fedcache.federate.partition.partition import Client
from fedcache.store.chunks import CRC_BYTES, array_bytes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale" / "large.md"
BEGIN = "<!-- made by tools/make_scale.py -->"
END = "<!-- end of the tables of tools/make_scale.py -->"

WIDTH = 1280
CLASSES = 10
BATCH = 64
METHODS: dict[str, dict[str, Value]] = {
    "fedavg": {"head": "linear"},
    "fedproto": {},
    "fedncm": {},
    "fed3r": {},
    "fst-cbdg": {},
}
SITES = (10, 1_000, 100_000, 1_000_000)
IMAGES = (10_000, 1_000_000, 100_000_000, 1_000_000_000)

SECONDS = {
    "fedavg": (5.5e-5, 9.2e-6, 2.2e-5),
    "fedproto": (2.9e-5, 8.8e-6, 4.7e-5),
    "fedncm": (2.4e-6, 1.0e-5, 5.1e-5),
    "fed3r": (2.4e-6, 1.6e-4, 3.3e-4),
    "fst-cbdg": (5.5e-5, 9.0e-6, 2.0e-5),
}
"""Per site and round: seconds to pack the broadcast, to unpack the upload and to pool it. One core of an AMD EPYC."""

IMAGE_MS = 5.4
"""One core, a JPEG of 256 x 256 at 96 px through efficientnet-lite0: docs/performance.md."""

SAMPLE_BYTES = 56
ROW_MEMORY = 26
"""Bytes of a row's columns: on disk the name (27 characters), label, domain, split and uid; in memory without the name,
which training does not read. Taken from a store of 1,000,000 rows."""


@dataclass(frozen=True)
class Wire:
    """The messages of one round with one site.

    Attributes:
        down: bytes that are sent to the site.
        up: bytes that the site sends.
        run: the run on the server.
        tree: the broadcast.
        upload: the upload.
    """

    down: int
    up: int
    run: RunState
    tree: dict[str, torch.Tensor]
    upload: dict[str, torch.Tensor]


def wire(name: str, width: int = WIDTH, classes: int = CLASSES) -> Wire:
    """The second message of a run to a site that owns all classes, and its answer; the first message may be empty."""
    draw = np.random.default_rng(0)
    rows = 16 * classes
    x = torch.from_numpy(draw.standard_normal((rows, 1, width), np.float32))
    text = torch.from_numpy(draw.standard_normal((classes, width), np.float32))
    y = torch.arange(rows) % classes
    data = Data(
        x / x.norm(dim=-1, keepdim=True),
        y,
        classes,
        text=text / text.norm(dim=-1, keepdim=True),
        widths=(width,),
        domain=torch.zeros(rows, dtype=torch.int64),
    )
    everything = np.arange(rows)
    nothing = np.empty(0, np.int64)
    method = find_method(name)
    run = RunState(
        method,
        method.resolve("paper", METHODS.get(name, {})),
        data,
        [Client(f"client-{i}", everything, nothing) for i in range(2)],
        0,
        torch.float32,
    )
    run.start()
    for _ in range(1 if method.one_shot else 2):
        tree = run.down()
        ups = [run.fit_one(tree, client) for client in range(2)]
        pipeline = run.upload_pipeline([0, 1], tree, None)
        for client, up in enumerate(ups):
            pipeline.add(up, client)
        run.finish([0, 1], tree, run.pooled(pipeline, [0, 1]), [run.upload_size(up) for up in ups])
    return Wire(
        pack(SiteMessage({}, [tree])).bytes,
        pack(SiteMessage({}, [ups[0]])).bytes,
        run,
        tree,
        ups[0],
    )


def measure(name: str, repeats: int = 50) -> tuple[float, float, float]:
    """Seconds to pack a broadcast, to unpack an upload and to pool it."""
    made = wire(name)
    packed = pack(SiteMessage({}, [made.upload]))

    def typical(call: object) -> float:
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()  # type: ignore[operator]
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def pooled() -> None:
        pipeline = made.run.upload_pipeline(range(2), made.tree, None)
        for client in range(2):
            pipeline.add(made.upload, client)

    return (
        typical(lambda: pack(SiteMessage({}, [made.tree]))),
        typical(lambda: unpack(packed)),
        typical(pooled) / 2,
    )


def section() -> str:
    """The text between the markers of the page."""
    lines = [
        f"One round over sites with {WIDTH} features and {CLASSES} classes, every class at every site. The text parts "
        "of the messages are not counted:",
        "",
        "| method | bytes down, per site | bytes up, per site | "
        + " | ".join(f"{n:,} sites" for n in SITES)
        + " |",
        "|---|---|---|" + "---|" * len(SITES),
    ]
    for name in METHODS:
        made = wire(name)
        seconds = sum(SECONDS[name])
        cells = [f"{size((made.down + made.up) * n)}, {duration(seconds * n)}" for n in SITES]
        lines.append(f"| {name} | {made.down:,} | {made.up:,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"One feature set with {WIDTH} features in float16, in chunks of "
        f"{chunk_rows_for(BATCH, 2 * WIDTH)} rows (default):",
        "",
        "| images | features | chunk files | files of 16,384 rows | columns on disk | columns in memory | core hours "
        "| GPU hours at 1,000 / 10,000 images/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = chunk_rows_for(BATCH, 2 * WIDTH)
    one = array_bytes((rows, 1, WIDTH), "float16") + CRC_BYTES
    for n in IMAGES:
        hours = [n / rate / 3600 for rate in (1000 / IMAGE_MS, 1_000, 10_000)]
        lines.append(
            f"| {n:,} | {size(-(-n // rows) * one)} | {-(-n // rows):,} | {-(-n // 16_384):,} | "
            f"{size(n * SAMPLE_BYTES)} | {size(n * ROW_MEMORY)} | {digits(hours[0])} | "
            f"{digits(hours[1])} / {digits(hours[2])} |"
        )
    return "\n".join(lines) + "\n"


def digits(value: float) -> str:
    """A number with at least two digits and without an exponent."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}"


def size(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{digits(count)} {unit}"
        count /= 1000
    return f"{digits(count)} TB"


def duration(seconds: float) -> str:
    """A duration with its unit."""
    if seconds < 1:
        return f"{digits(1000 * seconds)} ms"
    if seconds < 120:
        return f"{digits(seconds)} s"
    return f"{digits(seconds / 60)} min"


def page(text: str) -> str:
    """The page with new tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}{END}{after}"


def main() -> None:
    """Write the page, or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        torch.set_num_threads(1)
        for name in METHODS:
            print(f'    "{name}": ({", ".join(f"{s:.2g}" for s in measure(name))}),')
        return
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
