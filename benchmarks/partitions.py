"""``fedcache partition`` for very many clients, from the shell: seconds, peak memory, the file, and numpy's floor.

The floor is a permutation of the rows and a sort of one number for each, which no partition can do without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import fedcache as fc
from benchmarks.measure import Row, in_own_process, make_row, quartiles, seconds_of

MB = 1e6
CLASSES = 100
FEATURES = 8
TIMES = 3
SCHEMES = {
    "iid": "--scheme iid",
    "dirichlet": "--scheme dirichlet --alpha 0.3 --option fill=true",
}
SIZES = (
    # rows, clients, seconds, bytes of memory, bytes on disk
    (10**6, 10**5, 10.0, 500 * MB, 12 * MB),
    (10**7, 10**6, 60.0, 2000 * MB, 120 * MB),
)


def peak_of(words: list[str]) -> tuple[float, int]:
    """Seconds and peak bytes of a process, which must succeed."""
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {process.returncode}")
    return time.perf_counter() - began, used.ru_maxrss * 1024


def floor(rows: int) -> float:
    """Seconds of a permutation of so many rows and of a sort."""
    rng = np.random.default_rng(0)
    return seconds_of(lambda: np.sort(rng.permutation(rows)))


def made_store(rows: int) -> Path:
    """A store of random rows, a fifth of them for testing, in the home of this process."""
    rng = np.random.default_rng(0)
    columns = {
        "features": rng.normal(size=(rows, FEATURES)).astype(np.float16),
        "labels": rng.integers(0, CLASSES, rows).astype(np.int32),
        "split": (np.arange(rows) % 5 == 0).astype(np.int64),
    }
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "rows.npz", **columns)
        del columns
        return fc.ingest(Path(folder) / "rows.npz", f"rows{rows}").path


def rows() -> list[Row]:
    made = []
    for count, clients, bar, most, largest in SIZES:
        # In a process of its own: the peak of a child begins with that of the process that starts it.
        store = Path(in_own_process("partitions", count))
        at_best = floor(count)
        for scheme, words in SCHEMES.items():
            seconds = []
            peak = 0
            name = f"{scheme}{clients}"
            for number in range(TIMES):
                line = (
                    f"-m fedcache partition {words} --clients {clients} --partition-seed {number}"
                )
                line += f" --name {name} --replace --store"
                taken, used = peak_of([sys.executable, *line.split(), str(store)])
                seconds.append(taken)
                peak = max(peak, used)
            size = (store / "partitions" / f"{name}.partition").stat().st_size
            detail = f"whole process, best of {TIMES}; at most {peak / MB:.0f} MB, {size / MB:.1f} MB on disk; "
            detail += f"permutation and sort of the rows {at_best:.2f} s"
            met = min(seconds) <= bar and peak <= most and size <= largest
            target = f"<= {bar:g} s, <= {most / MB:g} MB, <= {largest / MB:g} MB on disk"
            title = f"partition {scheme}, {count:.0e} x {clients:.0e}".replace("e+0", "e")
            made.append(
                make_row(title, target, min(seconds), quartiles(seconds), met, detail=detail)
            )
    return made


if __name__ == "__main__":
    print(json.dumps(str(made_store(int(sys.argv[1])))))
