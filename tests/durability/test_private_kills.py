"""kill -9 of private training: no round that was told is made again, and what was spent is written down."""

import json
import random
import shutil
import time

import pytest
from forked import script

from fedcache.runs.privacy_ledger import read_releases

ROUNDS = 60
TELL = f"""
import json, os, sys
import fedcache as fc
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
fc.train("fedavg", sys.argv[2], fc.partition(sys.argv[2], "iid", clients=8), seeds=range(2), rounds={ROUNDS},
         participation=0.5, eval_every=1, dp_clip=1.0, dp_noise=1.0, dp_allow="evaluation",
         on_round=lambda r: os.write(out, (json.dumps([r.seed, r.round, r.accuracy]) + "\\n").encode()))
"""


def test_killed_private_training_makes_no_told_round_twice(tmp_path, home, cases, rows):
    pytest.importorskip("dp_accounting")
    store = rows(8)
    draw, killed, number, wanted = random.Random(3), 0, 0, cases(4, 40)
    tells = tmp_path / "tell.py"
    tells.write_text(TELL)
    while killed < wanted:
        number += 1
        told, ledger = tmp_path / f"told-{number}.jsonl", home / "privacy.jsonl"
        ledger.unlink(missing_ok=True)
        ledger.with_name("privacy-count.json").unlink(missing_ok=True)
        shutil.rmtree(home / "runs", ignore_errors=True)
        starts = 0
        while True:
            starts += 1
            run = script(tells, told, store, home=home)
            seen = told.stat().st_size if told.exists() else 0
            while (
                starts <= 3
                and run.poll() is None
                and (not told.exists() or told.stat().st_size == seen)
            ):
                time.sleep(0.005)  # until it tells a round, which may be an old one
            time.sleep(draw.uniform(0.0, 0.6) if starts <= 3 else 0.0)
            if starts > 3 or run.poll() is not None:
                assert run.wait(timeout=280) == 0, run.communicate()
                break
            run.kill()
            killed += 1
        heard = {}
        for line in told.read_bytes().splitlines():
            seed, round_, accuracy = json.loads(line)
            heard.setdefault((seed, round_), set()).add(accuracy)
        assert len(heard) == 2 * ROUNDS
        assert all(len(accuracies) == 1 for accuracies in heard.values())
        releases = read_releases(ledger)
        assert {r.seed for r in releases} == {0, 1}
        # one more where the kill fell between ledger and checkpoint
        assert 2 <= len(releases) <= 2 + starts
