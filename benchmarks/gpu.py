"""The same on a GPU: training there against the clean loop there, and against the chosen execution on one core.

``python -m benchmarks --gpu`` writes benchmarks/results-gpu.json, which ``--page`` shows. The targets are the CPU's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import clean, scale
from benchmarks.executions import CASES, SETTINGS
from benchmarks.grids import POINTS, compared
from benchmarks.measure import (
    Row,
    at_least,
    at_most,
    hardware,
    in_turn,
    make_row,
)
from benchmarks.runner import shown as line_of_row
from fedcache.federate.engine.run import run
from fedcache.process import keep_freed_memory

RESULTS = Path(__file__).resolve().parent / "results-gpu.json"


def against_loop(
    name: str,
    bar: float,
    here: clean.Federation,
    method: str,
    settings: dict[str, Any],
    rounds: int,
    loop: Callable[[clean.Federation], Any],
    **how: Any,
) -> Row:
    """The row of a method: the chosen execution on the GPU against the clean loop ``loop`` there."""
    there = here.to("cuda")
    found = there.ours(method, settings, "auto", rounds, **how)
    ours = f"chosen execution {found.execution}"
    calls = {
        "clean loop": partial(loop, there),
        ours: partial(there.ours, method, settings, "auto", rounds, **how),
        "on one core": partial(here.ours, method, settings, "auto", rounds, **how),
    }
    detail = f"{rounds} rounds; the clean loop is on the GPU too"
    return at_least(
        name, f">= {bar:g} x a clean loop", bar, calls, "clean loop", ours, times=3, detail=detail
    )


def trained() -> Iterator[Row]:
    """Runs of methods that take steps."""
    for C, M, n, several, bar in CASES:
        rounds = several if M * n <= 10_000 else 2

        def loop(f: clean.Federation, C: int = C, rounds: int = rounds) -> Any:
            return clean.fedavg(f.cut(), C, rounds, clean.sgd())

        f = clean.federation(M, n, C)
        yield against_loop(
            f"fedavg linear, C={C}, {M} x {n}", bar, f, "fedavg", SETTINGS, rounds, loop
        )
    f = clean.federation(100, 500, 10, 1024, text=True)
    yield against_loop(
        "fst-cbdg, 10 of 100 clients, exact draws",
        2.5,
        f,
        "fst-cbdg",
        {},
        10,
        lambda f: clean.fst_cbdg(f.cut(), f.data.text, 10, clean.sgd(0.01, wd=1e-5)),
        participation=10,
    )
    settings = {"opt": "adam", "lr": 1e-3, "denominator": "include", "bn": False}
    for M in (5, 50):
        yield against_loop(
            f"fedpcl with Adam, {M} clients",
            1.5,
            clean.federation(M, 100, 10, 1536),
            "fedpcl",
            settings,
            5,
            lambda f: clean.fedpcl(f.cut(), 10, 5, clean.adam(), tests=f.scored()),
        )


def grid() -> Row:
    """240 points of FedAvg as one program; the clean loop runs one of them, and is scaled."""
    here = clean.federation(100, 50, 10)
    there = here.to("cuda")
    found = there.grid("fedavg", POINTS, 1)[0]
    calls = {
        "clean loops": lambda: clean.fedavg(there.cut(), 10, 3, clean.sgd()),
        "grid": lambda: there.grid("fedavg", POINTS, 3),
        "on one core": lambda: here.grid("fedavg", POINTS, 3),
    }
    detail = f"100 clients x 50 rows, D=1024, 3 rounds; execution {found.execution}, {found.points} points at once"
    name = "grid of 240 fedavg points, C=10"
    target = ">= 15 x clean loops one after another"
    return compared(
        name, target, 15.0, calls, {"clean loops": len(POINTS)}, "clean loops", detail, times=3
    )


def closed() -> Iterator[Row]:
    """Fed3R against the product X'X on the GPU, in float64 and in float32."""
    here = clean.federation(100, 500, 10, 1024)
    there = here.to("cuda")
    x = there.data.x[:50_000, 0]

    def product(dtype: torch.dtype) -> Tensor:
        z = x.to(dtype)
        return z.mT @ z

    for precision, dtype, bar in (("float64", torch.float64, 1.5), ("float32", torch.float32, 2.5)):
        settings = {"lam": 0.01, "precision": precision}
        calls = {
            "X'X": partial(product, dtype),
            "fed3r": partial(there.ours, "fed3r", settings),
            "on one core": partial(here.ours, "fed3r", settings),
        }
        seconds = in_turn(calls, 5)
        detail = "50,000 x 1,024, 100 clients; solved and scored in float64"
        target = f"<= {bar:g} x one X'X in {precision}"
        yield at_most(f"fed3r ({precision})", target, bar, seconds, "fed3r", "X'X", detail)


def growth() -> Row:
    """A round of 100 of 10^6 clients against one of 10^3, with 10^6 rows on the GPU."""
    data = scale.features(scale.N, scale.D).to("cuda")
    found = {}
    for clients in (scale.CLIENTS[0], scale.CLIENTS[-1]):
        spec, hp = scale.training(data, scale.sharing(clients))
        run(spec, hp)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        out = run(spec, hp)
        records = sorted(r.seconds for r in out.records)
        found[clients] = records, torch.cuda.max_memory_allocated() - held, out.execution
    few, many = (records for records, *_ in found.values())
    ratio = many[len(many) // 2] / few[len(few) // 2]
    detail = "; ".join(
        f"{clients:,}: median round {records[len(records) // 2] * 1e3:.1f} ms, {execution}, peak {peak / 1e6:.0f} MB "
        "above the features"
        for clients, (records, peak, execution) in found.items()
    )
    return make_row(
        "a round of 100 of 10^6 clients",
        "<= 1.3 x that of 10^3",
        ratio,
        [],
        ratio <= 1.3,
        detail=f"fedavg linear, 1,000,000 x 256 float16, 100 classes, 8 rows a client; {detail}",
    )


def bench() -> int:
    """Measure all rows, write them and print them; the exit code."""
    if not torch.cuda.is_available():
        print("torch sees no GPU: fedcache doctor says why.", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    keep_freed_memory()
    name = f"{torch.cuda.get_device_name()}, {hardware()}"
    made = []
    for rows in (trained(), closed(), iter([grid()]), iter([growth()])):
        for row in rows:
            made.append({**row, "hardware": name})
            print(line_of_row(row), flush=True)
            RESULTS.write_text(json.dumps({"hardware": name, "rows": made}, indent=1) + "\n")
    if all(row["met"] for row in made):
        return 0
    return 1
