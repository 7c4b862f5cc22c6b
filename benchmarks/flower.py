"""Flower's simulation of 100 clients of 50 rows with a linear head, against a round of the engine on the same features.

Flower gets an environment of its own, made by pip in a temporary folder (FLOWER_VENV keeps it in a place of yours), and
finds this environment's torch behind its own packages, so that both compute with the same one. Telemetry is off. Flower
uses every core; the engine one thread or all, whichever is faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks import clean
from benchmarks.executions import SETTINGS
from benchmarks.measure import Row, cores, make_row, quartiles, seconds_of

HERE = Path(__file__).resolve().parent
NEEDS = "flwr[simulation]>=1.41,<1.42"
ROUNDS = 6
NAME = "flower simulation, 100 clients, linear"
TARGET = ">= 50 x a round"
BAR = 50.0


def environment(place: Path) -> Path:
    """The Python of an environment with Flower.

    Raises:
        subprocess.SubprocessError: pip could not make it.
    """
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", NEEDS]
        subprocess.run(pip, check=True, capture_output=True, timeout=600)
        own = Path(torch.__file__).resolve().parents[1]
        (next(place.glob("lib/python*/site-packages")) / "zz-behind.pth").write_text(f"{own}\n")
    return python


def simulate(python: Path, made: clean.Federation, folder: Path) -> list[float]:
    """Seconds of every round of Flower's simulation."""
    file = folder / "federation.npz"
    parts = made.cut()
    np.savez(
        file,
        x=torch.stack([x for x, _ in parts]).numpy(),
        y=torch.stack([y for _, y in parts]).numpy(),
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_HOME": str(folder / "flwr"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    code = "import flower_app; flower_app.main()"
    done = subprocess.run(
        [str(python), "-c", code, str(file), str(ROUNDS)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
    )
    if done.returncode:
        raise RuntimeError(
            f"Flower's simulation ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])["rounds"]


def products(made: clean.Federation) -> float:
    """Seconds of the two products that a round cannot do without, in one thread."""
    torch.set_num_threads(1)
    x = torch.cat([x for x, _ in made.cut()])
    W = torch.randn(made.data.classes, x.shape[1])
    A = torch.randn(len(x), made.data.classes)
    return min(seconds_of(lambda: (W @ x.mT, A.mT @ x)) for _ in range(20))


def rows() -> list[Row]:
    torch.set_num_threads(1)
    made = clean.federation(100, 50, 10)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            python = environment(Path(os.environ.get("FLOWER_VENV") or folder / "venv"))
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()[-200:]
            row = make_row(NAME, TARGET, None, [], False)
            return [
                {**row, "error": f"skipped: pip cannot install {NEEDS} here: {reason or error}"}
            ]
        version = subprocess.run(
            [str(python), "-c", "import flwr; print(flwr.__version__)"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        theirs = simulate(python, made, folder)[1:]  # the first round starts the actors
    each = {}
    for threads in sorted({1, cores()}):
        torch.set_num_threads(threads)
        out = made.ours("fedavg", SETTINGS, rounds=4 * ROUNDS)
        each[threads] = [r.seconds for r in out.records[1:]]
    best = min(each, key=lambda t: min(each[t]))
    ours = each[best]
    measured = min(theirs) / min(ours)
    middle = float(np.median(ours))
    detail = (
        f"Flower {version}: best of {len(theirs)} rounds {min(theirs):.2f} s on {cores()} cores; "
        f"execution {out.execution}: {len(ours)} rounds, best {min(ours) * 1e3:.1f} ms on {best} of {cores()} threads, "
        "one after the other, as Flower needs processes of its own"
    )
    spread = quartiles([t / middle for t in theirs])
    why = (
        f"{BAR:g} x is {min(theirs) / BAR * 1e3:.1f} ms a round; multiplying all rows with the broadcast and "
        f"with the result takes {products(made) * 1e3:.1f} ms and drawing for 100 clients 1; the target was set where "
        f"Flower took 2.1 to 3.4 s a round, and with rows in its actors' memory it takes {min(theirs):.2f} s"
    )
    return [make_row(NAME, TARGET, measured, spread, measured >= BAR, detail=detail, roofline=why)]
