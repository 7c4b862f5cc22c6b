"""Points of a grid as one program, against clean loops one after another; one thread.

A clean loop of every point would take minutes, so a few points are run and scaled: points differ in numbers alone and
cost the same. What is scaled says so in its row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks import clean
from benchmarks.measure import Row, at_least, best, in_turn, make_row, pairs, quartiles

LINEAR = {"head": "linear", "opt": "sgd", "momentum": 0.9, "batch": 32}
POINTS = [
    {**LINEAR, "lr": 0.01 * 1.2**i, "wd": 1e-5 * 2.0**j} for i in range(24) for j in range(10)
]
"""Learning rate x weight decay."""


def compared(
    name: str,
    target: str,
    bar: float,
    calls: dict[str, Any],
    scale: dict[str, float],
    other: str,
    detail: str,
    times: int = 5,
) -> Row:
    """The row of a grid; times of contenders that ran fewer points are scaled to all of them."""
    seconds = in_turn(calls, times)
    scaled = {k: [t * scale.get(k, 1.0) for t in s] for k, s in seconds.items()}
    spread = quartiles(pairs(scaled, other, "grid"))
    measured = best(scaled, other, "grid")
    each = []
    for contender, taken in scaled.items():
        part = f" (scaled from 1/{scale[contender]:g} of the points)" if contender in scale else ""
        each.append(f"{contender} {min(taken):.2f} s{part}")
    return make_row(
        name,
        target,
        measured,
        spread,
        measured >= bar,
        detail=f"best of {times}: {', '.join(each)}; {detail}",
    )


def fedavg(C: int, rounds: int, bar: float) -> Row:
    """240 points, learning rate x weight decay, on 100 clients of 50 rows."""
    f = clean.federation(100, 50, C)
    parts = f.cut()
    few = POINTS[::20]

    def one_after_another() -> None:
        for p in few:
            clean.fedavg(parts, C, rounds, clean.sgd(p["lr"], wd=p["wd"]))

    calls = {"clean loops": one_after_another, "grid": partial(f.grid, "fedavg", POINTS, rounds)}
    execution = f.grid("fedavg", POINTS, 1)[0]
    detail = f"100 clients x 50 rows, D=1024, {rounds} rounds; "
    detail += f"execution {execution.execution}, {execution.points} points at once, 1 thread"
    name = f"grid of 240 fedavg points, C={C}"
    target = f">= {bar:g} x clean loops one after another"
    return compared(
        name, target, bar, calls, {"clean loops": len(POINTS) / len(few)}, "clean loops", detail
    )


def fedpcl(opt: str, rounds: int = 3) -> Row:
    """48 points, learning rate x temperature, on 5 clients of 100 rows and 1,536 features."""
    C = 10
    f = clean.federation(5, 100, C, 1536)
    parts = f.cut()
    tests = f.scored()
    rates = [(0.05 if opt == "sgd" else 1e-4) * 1.3**i for i in range(8)]
    same = {"opt": opt, "denominator": "include"}  # cross-entropy, as the clean loop
    points = [{**same, "lr": lr, "tau": 0.05 * 1.2**j} for lr in rates for j in range(6)]
    few = points[::6]
    scale = len(points) / len(few)

    def loops(make: Any, **how: Any) -> None:
        for p in few:
            clean.fedpcl(parts, C, rounds, make(p["lr"], **how), tau=p["tau"], tests=tests)

    def engine_loops() -> None:
        for p in few:
            f.ours("fedpcl", p, "sequential", rounds)

    calls = {
        "engine's loop": engine_loops,
        "grid": partial(f.grid, "fedpcl", points, rounds),
    }
    found = f.grid("fedpcl", points, 1)[0]
    detail = f"5 x 100 rows, 1536-256, {C} classes, {rounds} rounds; "
    detail += f"execution {found.execution}, {found.points} points, 1 thread"
    if opt == "sgd":
        name = "grid of 48 fedpcl points, SGD"
        calls["clean loops"] = partial(loops, clean.sgd)
        target = ">= 4 x clean loops one after another"
        other = "clean loops"
        bar = 4.0
    else:
        name = "grid of 48 fedpcl points, Adam"
        calls["clean loops"] = partial(loops, clean.adam)
        calls["clean loops, fused"] = partial(loops, clean.adam, fused=True)
        target = ">= 0.95 of clean loops with a fused optimiser"
        other = "clean loops, fused"
        bar = 0.95
    of_some_points = {contender: scale for contender in calls if contender != "grid"}
    return compared(name, target, bar, calls, of_some_points, other, detail)


def fedpcl_alone(rounds: int = 10) -> Row:
    """One run of FedPCL with Adam against a clean loop, and against one with a fused optimiser."""
    f = clean.federation(5, 100, 10, 1536)
    parts = f.cut()
    tests = f.scored()
    # As the clean loop.
    settings = {"opt": "adam", "lr": 1e-3, "denominator": "include", "bn": False}
    calls = {
        "clean loop": lambda: clean.fedpcl(parts, 10, rounds, clean.adam(), tests=tests),
        "clean loop, fused": lambda: clean.fedpcl(
            parts, 10, rounds, clean.adam(fused=True), tests=tests
        ),
        "fedpcl": lambda: f.ours("fedpcl", settings, "auto", rounds),
    }
    least = fedpcl_floor(parts, rounds)
    detail = (
        f"5 x 100 rows, 1536-256, 10 classes, {rounds} rounds, 1 thread; products "
        f"and Adam alone {1e3 * least:.0f} ms"
    )
    name = "fedpcl with Adam"
    target = ">= 1.5 x a clean loop"
    return at_least(name, target, 1.5, calls, "clean loop", "fedpcl", detail=detail)


def fedpcl_floor(parts: list[tuple[torch.Tensor, torch.Tensor]], rounds: int) -> float:
    """Seconds of the projections, their gradients, torch's fused Adam and the embeddings of all rows, each alone.

    Clients train from the second round on, in batches of 32, 32, 32 and 4 rows.
    """
    own = [torch.randn(256, 1536) for _ in parts]
    for W in own:
        W.grad = torch.randn(256, 1536)
    optimisers = [torch.optim.Adam([W], lr=1e-3, weight_decay=1e-4, fused=True) for W in own]
    x = parts[0][0][:32].clone()
    du = torch.randn(32, 256)
    steps = [n for _ in range(rounds - 1) for n in (32, 32, 32, 4)]

    def products() -> None:
        for W in own:
            for n in steps:
                torch.mm(x[:n], W.mT)
                torch.mm(du[:n].mT, x[:n], out=W.grad)

    def adam() -> None:
        for optimiser in optimisers:
            for _ in steps:
                optimiser.step()

    def embeddings() -> None:
        for _ in range(rounds):
            for (rows, _), W in zip(parts, own, strict=True):
                torch.mm(rows, W.mT)

    taken = in_turn({"products": products, "adam": adam, "embeddings": embeddings}, 5)
    return sum(min(seconds) for seconds in taken.values())


def rows() -> list[Row]:
    torch.set_num_threads(1)
    return [fedavg(10, 3, 15.0), fedavg(100, 2, 3.0), fedpcl("sgd"), fedpcl("adam"), fedpcl_alone()]
