"""The live view: rounds, accuracy, bytes and time left while a run trains, and what it does not invent."""

import json
import os
import re
import struct
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from arrays import ingested
from command import environment, ok, words_of
from made_path import place_of
from refusal import stopped
from stops import StopsAfter

from fedcache.commands import output
from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.grids.train_grid import grid, request_grid
from fedcache.progress import Round, Silent, byte_size
from fedcache.runs.loop import train

TRAIN = "train --method fedavg --scheme iid --clients 3 --participation all"


@pytest.fixture
def mine(tmp_path):
    return ingested(tmp_path)


def lines_of(err):
    return [line for line in err.splitlines() if line.startswith("training ")]


def test_a_line_says_round_seed_accuracy_exact_bytes_rate_and_time_left(mine, monkeypatch):
    # a line for every round, where a file gets one per 10 seconds
    monkeypatch.setattr(output, "LINE_EVERY", 0.0)
    done = ok(f"{TRAIN} --rounds 4 --seeds 0-1 --eval-every 2")
    lines = lines_of(done.err)
    assert len(lines) == 8
    assert "round 1 of 4, seed 1 of 2" in lines[0]
    assert "accuracy" not in lines[0], "nothing is measured yet, and nothing is invented"
    run = Path(done.data["path"])
    told = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert f"accuracy {100 * told[1]['accuracy']:.2f} %, " in lines[1]
    assert f"accuracy {100 * told[1]['accuracy']:.2f} % in round 2, " in lines[2]
    assert f"accuracy {100 * told[3]['accuracy']:.2f} % in round 4 of seed 1, " in lines[4]
    for traffic, line in (
        (told[0]["traffic"], lines[0]),
        (done.data["traffic"]["exact"], lines[-1]),
    ):
        assert (
            f"{byte_size(traffic['up_bytes'])} up, {byte_size(traffic['down_bytes'])} down" in line
        )
    assert all(re.search(r"[\d.,]+ rounds/s, \d+:\d\d left$", line) for line in lines), lines


def test_the_view_changes_no_bit_of_a_result(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "LINE_EVERY", 0.0)
    watched = place_of(f"{TRAIN} --rounds 3 --runs {tmp_path}/watched")
    config = TrainConfig(method="fedavg", rounds=3, participation="all", store=str(mine))
    silent = train(
        config,
        Home.from_environment(),
        partition=PartitionConfig("iid", 3),
        runs=tmp_path / "silent",
    )
    for name in ("result.json", "rounds.jsonl"):
        assert (watched / name).read_bytes() == (silent.path / name).read_bytes()


class Told(Silent):
    def __init__(self):
        self.rounds = []

    def round_done(self, round_):
        self.rounds.append(round_)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "batched", "gram"])
def test_every_execution_tells_every_round_once_also_of_a_run_that_is_resumed(mine, execution):
    config = TrainConfig(
        method="fedavg",
        store=str(mine),
        rounds=4,
        seeds="0,1",
        participation="all",
        execution=execution,
        eval_every=2,
        set={"head": "linear", "opt": "sgd", "batch": "8", "reset_opt": "false"},
    )
    home = Home.from_environment()
    dealt = PartitionConfig("iid", 3)
    sweeps = {"lr": ("0.1", "0.02")}

    def rounds_of(name, stop=None):
        request = request_grid(
            ["fedavg"], sweeps, config, home, partition=dealt, runs=home.root / name
        )
        if stop is None:
            grid(request, observer=(told := Told()))
            return told.rounds
        stopped(lambda: grid(request, observer=stop, stop=stop.flag))
        return []

    whole = rounds_of("whole")
    rounds_of("parts", StopsAfter(3))
    rest = rounds_of("parts")
    again = rounds_of("parts")

    def of_a_point(rounds, point):
        return [
            replace(r, path=Path(), stored=False, points_done=0) for r in rounds if r.point == point
        ]

    names = {r.point for r in whole}
    assert len(names) == 2
    for point in names:
        told = of_a_point(whole, point)
        assert [(r.seed, r.round) for r in told] == [(s, r) for s in (0, 1) for r in (1, 2, 3, 4)]
        assert [r.accuracy is not None for r in told] == [False, True] * 4
        assert of_a_point(rest, point) == of_a_point(again, point) == told
        assert told[3].sent_bytes == sum(r.up_bytes for r in told[:4])
    assert not any(r.stored for r in whole)
    assert 0 < sum(r.stored for r in rest) < len(rest)
    assert all(r.stored for r in again)


def test_rounds_that_were_read_do_not_make_the_rest_look_fast():
    progress = output.WorkProgress("training", 100, "rounds")
    begun = progress.begun
    read = Round(Path(), "fedavg", 0, 1, 1, 90, 100, None, {}, 10, 20, 900, 1800, stored=True)
    progress.add_round(read)
    progress.advance(90, begun + 0.001)
    assert "left" not in progress.words(begun + 0.001)
    for i in range(1, 6):
        progress.add_round(replace(read, round=90 + i, stored=False))
        progress.advance(1, begun + 2.0 * i)
    assert progress.words(begun + 10.0).endswith("0.5 rounds/s, 0:10 left")


def on_a_terminal(line, home, env):
    """(exit code, everything that was drawn) of ``fedcache LINE`` on a terminal of 60 columns."""
    import fcntl
    import pty
    import termios

    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        kept = environment(home) | {"TERM": "xterm-256color"}
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
            kept.pop(name, None)
        os.execve(sys.executable, [sys.executable, "-m", "fedcache", *words_of(line)], kept | env)
    drawn = b""
    with suppress(OSError):  # how Linux says that the other side is closed
        while part := os.read(fd, 65536):
            drawn += part
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), drawn.decode()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="terminals of this kind are of Unix")
@pytest.mark.parametrize(
    ("env", "drawn", "coloured"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_a_narrow_terminal_gets_whole_words(mine, own_home, env, drawn, coloured):
    code, out = on_a_terminal(f"{TRAIN} --rounds 60 --seeds 0-1 --eval-every 1", own_home, env)
    assert code == 0, out
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", out)) is coloured, "a colour"
    assert ("\x1b[2K" in out) is drawn, "a line that is drawn again"
    assert ("\x1b[1A\x1b[2K" in out.rpartition("round 60 of 60")[2]) is drawn, (
        "and that goes when the run has ended"
    )
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert ("round 60 of 60, seed 2 of 2, accuracy" in text) is drawn
    assert (re.search(r"training .* \d+%", text) is not None) is drawn, "how much is done"
    for line in text.replace("\r", "\n").splitlines():
        if line.startswith(("round ", "training ")):
            assert len(line) <= 60, line
