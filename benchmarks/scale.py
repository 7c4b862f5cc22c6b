"""A round of 100 clients of a thousand to a million, and Fed3R of ten thousand to ten million rows, with their floors.

Each number of clients runs in a process of its own, so that its memory is its own: 10^6 rows x 256 in float16, eight
for every client. The floors are a clean loop over the 100 clients of a round, and one X'X in float32.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import clean
from benchmarks.large import product
from benchmarks.measure import Row, in_own_process, make_row, seconds_of
from benchmarks.memory import status
from fedcache.federate.engine.client_data import Data, StoredRows
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.client_table import ClientTable, NumberedNames, RowLists
from fedcache.process import keep_freed_memory, return_freed_memory

N = 1_000_000
D = 256
C = 100
OWN = 8
TESTS = 10_000
SAMPLED = 100
ROUNDS = 20
TIMES = 3
CLIENTS = (10**3, 10**4, 10**5, 10**6)
ROWS = (10**4, 10**5, 10**6, 10**7)
NARROW = 64
AXES = ("many-clients", "many-rows")
LINEAR: dict[str, Any] = {"head": "linear", "opt": "sgd", "lr": 0.1, "batch": 32, "epochs": 1}


def features(rows: int, width: int) -> Data:
    """Random rows in float16, cast when they are read."""
    g = torch.Generator().manual_seed(0)
    x = torch.empty(rows, 1, width, dtype=torch.float16)
    block = torch.randn(min(rows, 100_000), width, generator=g)
    for start in range(0, rows, len(block)):
        x[start : start + len(block), 0] = block.roll(start // len(block), 1)
    return Data(x=StoredRows(x), y=torch.randint(C, (rows,), generator=g), classes=C)


def sharing(clients: int) -> ClientTable:
    """Clients with ``OWN`` rows each, which others may have too, and test rows that all share."""
    rows = np.random.default_rng(0).integers(0, N - TESTS, clients * OWN)
    train = RowLists(rows, np.arange(clients + 1, dtype=np.int64) * OWN)
    return ClientTable.dealt(NumberedNames(clients), train, np.arange(N - TESTS, N), None)


def training(data: Data, clients: ClientTable) -> tuple[TrainingRun, Any]:
    """Some rounds of FedAvg with ``SAMPLED`` clients each, and their hyperparameters."""
    method = METHODS["fedavg"]
    # ``gram`` would be chosen for a thousand: it keeps products of all clients' rows, which pays where they come again.
    spec = TrainingRun(method, data, clients, ROUNDS, participation=SAMPLED, execution="batched")
    return spec, method.resolve("paper", LINEAR)


def round_of(clients: int) -> dict[str, float]:
    """Seconds of a round of ``SAMPLED`` clients, of a clean loop over as many, and the peak of clients and run."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as the commands do
    data = features(N, D)
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status("VmRSS")
    table = sharing(clients)
    out = run(*training(data, table))
    peak = status("VmHWM") - before
    parts = [
        (data.x[torch.from_numpy(table[i].train), 0], data.y[table[i].train])
        for i in range(SAMPLED)
    ]
    loop = seconds_of(lambda: clean.fedavg(parts, C, ROUNDS, clean.sgd())) / ROUNDS
    return {"seconds": median(r.seconds for r in out.records), "loop": loop, "peak": peak}


def apart(clients: int) -> dict[str, float]:
    """``round_of`` in processes of their own: the best times, and the highest peak."""
    made = [in_own_process("scale", clients) for _ in range(TIMES)]
    return {k: (max if k == "peak" else min)(one[k] for one in made) for k in made[0]}


def rows() -> list[Row]:
    """How a round and the memory grow from the fewest to the most clients."""
    found = {clients: apart(clients) for clients in (CLIENTS[0], CLIENTS[-1])}
    few, many = found.values()
    times = many["seconds"] / few["seconds"]
    more = (many["peak"] - few["peak"]) / 1e6
    each = "; ".join(
        f"{clients:,}: {f['seconds'] * 1e3:.1f} ms a round, a clean loop {f['loop'] * 1e3:.1f} ms, peak "
        f"{f['peak'] / 1e6:.0f} MB"
        for clients, f in found.items()
    )
    detail = f"fedavg linear, batched, {N:,} x {D} float16, {OWN} rows a client, best of {TIMES} processes: {each}"
    return [
        make_row(
            "a round of 100 of 10^6 clients",
            "<= 1.3 x that of 10^3",
            times,
            [],
            times <= 1.3,
            detail=detail,
        ),
        make_row(
            "memory of 10^6 clients",
            "<= 200 MB above that of 10^3",
            more,
            [],
            more <= 200.0,
            detail=detail,
        ),
    ]


def curves() -> dict[str, dict[str, list[float]]]:
    """axis -> {x, and seconds of what is drawn over it, the floor among them}."""
    found = [apart(clients) for clients in CLIENTS]
    by_clients = {
        "x": list(map(float, CLIENTS)),
        "a round of 100 clients": [f["seconds"] for f in found],
        "a clean loop over these": [f["loop"] for f in found],
    }
    by_rows = {
        "x": list(map(float, ROWS)),
        "fed3r, float32": [],
        "one X'X in float32": [],
    }
    torch.set_num_threads(1)
    for rows_ in ROWS:
        data = features(rows_, NARROW)
        method = METHODS["fed3r"]
        parts = np.array_split(np.arange(rows_ - 1000), SAMPLED)
        table = ClientTable.dealt(
            NumberedNames(SAMPLED), RowLists.of(parts), np.arange(rows_ - 1000, rows_), None
        )
        spec = TrainingRun(method, data, table, 1)
        hp = method.resolve("paper", {"lam": 1.0, "precision": "float32"})
        by_rows["fed3r, float32"].append(
            min(run(spec, hp).records[0].seconds for _ in range(TIMES))
        )
        x = data.x.stored[: rows_ - 1000, 0]  # type: ignore[union-attr]
        floor = min(seconds_of(partial(product, x)) for _ in range(TIMES))
        by_rows["one X'X in float32"].append(floor)
    return dict(zip(AXES, (by_clients, by_rows), strict=True))


if __name__ == "__main__":
    print(json.dumps(round_of(int(sys.argv[1]))))
