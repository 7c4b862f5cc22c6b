"""A private run in processes of their own, which say when they wait and can be held in a round."""

import os
import time
from pathlib import Path

import numpy as np
from arrays import around, rows_ingested
from forked import script

from fedcache.config import TrainConfig

CONFIG = TrainConfig(
    method="fedavg",
    rounds=4,
    participation="0.5",
    seeds="0,1",
    dp_clip=1.0,
    dp_noise=2.0,
    dp_allow="evaluation",
    eval_every=1,
)

TRAINED = f"""
import os, sys, time
from pathlib import Path
from fedcache.config import Home, TrainConfig
from fedcache.progress import Silent
from fedcache.runs.loop import train

pause, folder = sys.argv[1], Path(sys.argv[2])

class Told(Silent):
    def note(self, text):
        if "Waiting until that training ends" in text:
            (folder / f"waiting-{{os.getpid()}}").touch()

def hold(told):
    if pause and told.round == int(pause) and told.seed == 0 and not told.stored:
        (folder / "paused").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)

run = train({CONFIG!r}, Home(Path(os.environ["FEDCACHE_HOME"])), observer=Told(), hooks=[hold])
print(run.result["confusion"], run.result["accuracy"]["per_seed"], run.result["files"]["rounds.jsonl"])
"""


def ingested(place, width=8):
    """A store of 200 rows of 5 classes that can be learnt, a quarter of them test rows."""
    x, y = around(5, 40, 2, width)
    return rows_ingested(place, x, y, np.arange(200) % 4 == 0)


def home():
    return Path(os.environ["FEDCACHE_HOME"])


def started(folder, pause=""):
    """The run in a process of its own; it stops inside the hook of round ``pause`` until ``go`` exists."""
    program = folder / "train.py"
    if not program.exists():
        program.write_text(TRAINED)
    return script(program, pause, folder, home=home())


def until(reached):
    """Wait until something has happened; the test's own time limit ends it."""
    while not reached():
        time.sleep(0.01)


def held_owner(folder, round_):
    """A process that trains the run and is held in the hook of a round."""
    owner = started(folder, str(round_))
    until(lambda: (folder / "paused").exists() or owner.poll() is not None)
    return owner


def until_all_wait(folder, others):
    """Each of the others has said that it waits, or has ended instead."""
    until(
        lambda: all(
            (folder / f"waiting-{one.pid}").exists() or one.poll() is not None for one in others
        )
    )
