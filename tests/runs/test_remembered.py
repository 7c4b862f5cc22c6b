"""A request that was answered before is answered again without torch, and only while nothing of it has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from arrays import ingested
from command import Done, fedcache, ok

from fedcache.commands import train as command
from fedcache.runs.directory import read_result, write_result
from fedcache.runs.remembered import Request
from fedcache.runs.run import Run

TRAIN = ("train", "--method", "fed3r", "--scheme", "iid", "--clients", 3)
GRID = (
    "grid",
    "--method",
    "fedavg,fedncm",
    "--sweep",
    "rounds=1,2",
    "--scheme",
    "iid",
    "--clients",
    3,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return ingested(tmp_path)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of ``train`` that were not answered from memory."""
    went: list[str] = []
    before = command.train_asked

    def train_asked(asked: Request, *others: Any) -> Run:
        went.append(str(asked.config.method))
        return before(asked, *others)

    monkeypatch.setattr(command, "train_asked", train_asked)
    return went


def without_torch(*words: object) -> Done:
    """A command in a process of its own, in which torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from fedcache.cli import main; main()"
    line = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=dict(os.environ), check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "words", [TRAIN, pytest.param(GRID, marks=pytest.mark.slow)], ids=["train", "grid"]
)
def test_what_was_just_trained_is_returned_without_torch_and_every_line_is_that_of_the_whole_way(
    own_home: Path, store: Path, words: tuple[object, ...]
) -> None:
    assert fedcache(*words).code == 0
    second = without_torch(*words)
    assert second.code == 0, second.err
    shutil.rmtree(own_home / "digests")
    assert without_torch(*words).code != 0, "torch is needed where nothing is remembered"
    found = fedcache(*words)
    assert (second.out, second.err) == (found.out, found.err)


@pytest.mark.slow
def test_another_request_is_not_answered_from_memory(store: Path, whole: list[str]) -> None:
    ok(*TRAIN)
    assert ok(*TRAIN).data["reused"]
    assert whole == ["fed3r"]
    for more in (
        ("--set", "lam=3"),
        ("--seeds", "1"),
        ("--dataset", "mine"),
        ("--no-model",),
        ("--fresh",),
    ):
        whole.clear()
        ok(*TRAIN, *more)
        assert whole == ["fed3r"], more


def test_a_store_that_was_touched_is_read_again(store: Path, whole: list[str]) -> None:
    ok(*TRAIN)
    file = next(path for path in sorted((store / "features").rglob("*")) if path.is_file())
    raw = bytearray(file.read_bytes())
    file.unlink()
    file.write_bytes(raw)
    assert ok(*TRAIN).data["reused"]
    assert len(whole) == 2
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert fedcache(*TRAIN).code == 5


def test_a_damaged_note_is_no_answer(own_home: Path, store: Path, whole: list[str]) -> None:
    ok(*TRAIN)
    for note in (own_home / "digests").glob("*.json"):
        note.write_bytes(note.read_bytes().replace(b"fact", b"lies"))
    assert ok(*TRAIN).data["reused"]
    assert len(whole) == 2


def test_a_note_is_of_the_result_that_was_seen(store: Path, whole: list[str]) -> None:
    """A whole result of the same digest with other figures, as private noise gives them, was never told of."""
    run = Path(ok(*TRAIN).data["path"])
    write_result(run / "result.json", {**read_result(run / "result.json"), "classes": 4})
    ok(*TRAIN)
    assert len(whole) == 2
