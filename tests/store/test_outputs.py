"""Files of ``-o``: what a killed process leaves is removed by the next command, and named by ``gc``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command import environment, ok

from fedcache.store.outputs import NOTES, output_file, write_output

KILLED = """
import os, signal, sys
from pathlib import Path
from fedcache.store.outputs import output_file
with output_file(Path(sys.argv[1])) as file:
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def out(tmp_path: Path, own_home: Path) -> Path:
    """An output that a process was writing when it was killed."""
    own_home.mkdir(exist_ok=True)
    path = tmp_path / "there" / "p[1].csv"
    path.parent.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment(own_home), check=False)
    assert killed.returncode == -9
    assert [p.name.endswith(".partial") for p in path.parent.iterdir()] == [True]
    return path


def test_the_next_command_removes_what_a_killed_one_left(out: Path) -> None:
    write_output(out, b"whole")
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert out.read_bytes() == b"whole"


def test_gc_names_what_a_killed_command_left_outside_the_home_and_removes_it(out: Path, own_home: Path) -> None:
    other = out.with_name(f".other.csv.{2**22 + 1}-00000000.partial")  # of no fedcache of this home
    other.touch()
    (left,) = out.parent.glob(".p*.partial")
    named = {Path(g["path"]): g["why"] for g in ok("gc").data["garbage"]}
    assert named[left] == "a killed process was writing an output"
    ok("gc", "--delete")
    assert list(out.parent.iterdir()) == [other]
    assert list((own_home / NOTES).iterdir()) == []


def test_an_output_that_is_being_written_is_left_alone(tmp_path: Path, own_home: Path) -> None:
    own_home.mkdir(exist_ok=True)
    path = tmp_path / "p.csv"
    with output_file(path) as first:
        first.write(b"first")
        assert "garbage" in ok("gc").data
        assert not [g for g in ok("gc").data["garbage"] if str(tmp_path / ".p") in g["path"]]
        write_output(path, b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list((own_home / NOTES).iterdir()) == []


def test_a_note_can_name_no_file_but_a_partial_one(tmp_path: Path, own_home: Path) -> None:
    from fedcache.store.outputs import WHAT
    from fedcache.store.sealed import write_sealed

    (own_home / NOTES).mkdir(parents=True)
    kept = tmp_path / "kept.csv"
    kept.write_text("mine")
    write_sealed(own_home / NOTES / "a.json", WHAT, {"path": str(kept), "pid": 2**22 + 1})
    ok("gc", "--delete")
    assert kept.read_text() == "mine"


def test_outputs_are_written_where_the_home_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").write_text("a file where the home would be")
    write_output(tmp_path / "p.csv", b"whole")
    assert (tmp_path / "p.csv").read_bytes() == b"whole"
