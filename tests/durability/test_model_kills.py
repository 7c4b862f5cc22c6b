"""kill -9 while models are saved: a run has no result, or a result with whole models; the end is the same bits."""

import json
import random
import shutil
import time
from pathlib import Path
from shlex import split

from command import data_of
from files_now import files_now
from forked import apart, start

from fedcache.runs.predict_run import load_seed

SEEDS = 4
TRAIN = split(
    f"train --method ditto --scheme iid --clients 20 --rounds 1 --seeds 0-{SEEDS - 1} "
    "--set dim=1500 --set epochs=1 --json"
)


def models_in(runs):
    (folder,) = runs.glob("*/models")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_training_killed_while_it_saves_has_no_result_or_whole_models(tmp_path, home, cases, rows):
    """Models of 8 MB a seed; a kill comes as soon as so many files are there or begun, or a little later."""
    words = (*TRAIN, "--store", rows(64))
    assert apart(*words, "--runs", tmp_path / "whole", home=home).code == 0
    expected = models_in(tmp_path / "whole")
    assert set(expected) == {"models.json", *(f"seed-{seed}.safetensors" for seed in range(SEEDS))}
    draw, killed, wanted, runs = random.Random(5), 0, cases(3, 40), home / "runs"
    while killed < wanted:
        shutil.rmtree(runs, ignore_errors=True)
        for _ in range(2):
            run, files, later = start(*words, home=home), draw.randint(1, SEEDS + 1), draw.random()
            # files that are being written are counted too
            while run.poll() is None and len(files_now(runs, "*/models/*")) < files:
                time.sleep(0.001)
            time.sleep(0.1 * later**2)
            if run.poll() is None:
                run.kill()
                killed += 1
            for result in runs.glob("*/result.json"):
                for seed in json.loads(result.read_text())["seeds"]:
                    assert load_seed(result.parent, seed).clients  # whole, and of this result
        again = apart(*words, home=home)
        assert again.code == 0, again.err
        assert {k: v for k, v in models_in(runs).items() if not k.endswith(".partial")} == expected
        left = set(runs.glob("*/models/.*.partial"))
        assert left <= {Path(one["path"]) for one in data_of("gc")["garbage"]}
