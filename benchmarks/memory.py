"""Peak memory above the features, each case in a process of its own; and how a round grows to 10,000 clients."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import clean
from benchmarks.measure import Row, in_own_process, make_row
from fedcache.federate.engine.local_training import GATHER_BYTES
from fedcache.federate.execution.memory_estimate import WORKING_SET

MB = 1e6
POOL = 20_000  # rows that many clients share, so that the features do not grow with the clients
ADAM = {"head": "linear", "opt": "adam", "lr": 1e-3, "reset_opt": True}
LINEAR = {"head": "linear", "opt": "sgd", "lr": 0.1}
STATEFUL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("solo", {"head": "linear", "opt": "adam", "reset_opt": False}),
    ("fedpcl", {"opt": "sgd", "lr": 0.05, "dim": 64}),
)
"""Each client of the first keeps W, b and Adam's moments (20 classes); of the second a projection 1024 -> 64."""


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"this system does not tell {field}")


def measured(
    made: Any, method: str, settings: dict[str, Any], rounds: int, **how: Any
) -> dict[str, Any]:
    """Peak of a run above what the process holds with the features, its states' bytes and seconds a round."""
    torch.set_num_threads(1)
    warm = clean.federation(4, 8, made.data.classes, 64)
    warm.ours(method, settings)  # code and libraries are not the run's
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status("VmRSS")
    out = made.ours(method, settings, rounds=rounds, **how)
    peak = status("VmHWM") - before
    # Several tensors may share one block of memory.
    held = {t.data_ptr(): t.nbytes for c in out.states for t in out.states.held(c)}
    packed = 0
    if out.execution == "gram":
        rows = [len(c.train) for c in made.clients]
        packed = sum(rows) * made.data.x.shape[2] * 4 + sum(n * n * 4 for n in rows)
    return {
        "peak": peak,
        "state": sum(held.values()),
        "packed": packed,
        "execution": out.execution,
        "seconds": min(r.seconds for r in out.records),
    }


def case(words: list[str]) -> dict[str, Any]:
    """One case, in this process."""
    kind = words[0]
    if kind == "adam":
        return measured(clean.federation(1000, 20, 100), "fedavg", ADAM, 2)
    if kind == "state":
        method, settings = STATEFUL[int(words[1])]
        return measured(clean.federation(1000, 20, 20), method, settings, 2)
    total = int(words[1])
    sampled = int(words[2])
    made = clean.federation(1, POOL, 10)
    g = np.random.default_rng(0)
    nothing = np.empty(0, np.int64)
    clients = [clean.Rows(f"c{i}", g.integers(0, POOL, 50), nothing) for i in range(total)]
    made = replace(made, clients=clients)
    return measured(made, "fedavg", LINEAR, 3, participation=sampled, execution="batched")


def rows() -> list[Row]:
    adam = in_own_process("memory", "adam")
    peak = adam["peak"] / MB
    detail = f"20 rows a client, 2 rounds, execution {adam['execution']}; "
    detail += "VmHWM of a process above what it held with the features"
    made = [
        make_row(
            "memory, fedavg Adam, 1000 clients x 100 classes",
            "<= 400 MB above the features",
            peak,
            [],
            peak <= 400.0,
            detail=detail,
        )
    ]
    ratios = []
    described = []
    chunk = WORKING_SET + GATHER_BYTES
    for number, (method, _) in enumerate(STATEFUL):
        found = in_own_process("memory", "state", number)
        ratios.append(found["peak"] / (found["state"] + found["packed"] + chunk))
        packed = ""
        if found["packed"]:
            packed = f" and {found['packed'] / MB:.0f} MB of packed rows with their Gram matrices"
        described.append(
            f"{method} ({found['execution']}) peak {found['peak'] / MB:.0f} MB for {found['state'] / MB:.0f} MB state"
            f"{packed} ({ratios[-1]:.2f})"
        )
    worst = max(ratios)
    detail = f"1,000 clients x 20 rows, D=1024; a chunk is allowed {chunk / MB:.0f} MB; {'; '.join(described)}"
    made.append(
        make_row(
            "memory, methods with client state",
            "<= 1.2 x (state + a chunk's working set)",
            worst,
            [],
            worst <= 1.2,
            detail=detail,
        )
    )
    return made + growth()


def growth() -> list[Row]:
    """A run of 10,000 clients against one of 2,000, both over ``POOL`` rows."""
    big = {k: in_own_process("memory", "clients", 10_000, k) for k in (250, 500, 1000)}
    small = in_own_process("memory", "clients", 2_000, 1000)
    each = {k: v["seconds"] / k * 1e3 for k, v in big.items()}
    linear = each[1000] / each[250]
    times = ", ".join(f"{k} of 10,000: {v['seconds'] * 1e3:.0f} ms" for k, v in big.items())
    time = make_row(
        "growth, 10,000 clients, time",
        "a client's share of a round <= 1.25 x from 250 to 1,000 of them",
        linear,
        [],
        linear <= 1.25,
        detail=f"fedavg linear C=10, 50 rows,  {big[1000]['execution']}, best of 3: {times}",
    )
    ratio = big[1000]["peak"] / small["peak"]
    flat = make_row(
        "growth, 10,000 clients, memory",
        "<= 1.2 x that of 2,000 clients, 1,000 a round",
        ratio,
        [],
        ratio <= 1.2,
        detail=f"peak {big[1000]['peak'] / MB:.0f} MB for 10,000 and {small['peak'] / MB:.0f} MB for 2,000 clients",
    )
    return [time, flat]


if __name__ == "__main__":
    print(json.dumps(case(sys.argv[1:])))
