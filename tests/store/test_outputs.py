"""Files of ``-o``: a killed process leaves nothing where files need no name, and elsewhere what ``gc`` names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import data_of, environment, ok

from fedcache.store import lock
from fedcache.store.files import open_unnamed, write_sealed
from fedcache.store.lock import NOTE_KIND, NOTES, output_file, this_process, write_output

KILLED = """
import os, signal, sys
from pathlib import Path
from fedcache.store.lock import output_file
if sys.argv[2] == "named":
    del os.O_TMPFILE
with output_file(Path(sys.argv[1])) as file:
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_while_writing(path, home, how):
    """Start a process that writes an output and kills itself half way."""
    home.mkdir(exist_ok=True)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), how], env=environment(home), check=False
    )
    assert killed.returncode == -9


def need_files_without_names(folder):
    """Skip the test where the system or the disk of a folder has none."""
    file = open_unnamed(folder)
    if file is None:
        pytest.skip("every file has a name here")
    file.close()


@pytest.fixture
def out(tmp_path, own_home):
    """An output that a process was writing when it was killed, on a system where every file has a name."""
    path = tmp_path / "there/p[1].csv"
    path.parent.mkdir()
    kill_while_writing(path, own_home, "named" if hasattr(os, "O_TMPFILE") else "as it is")
    assert [p.name.endswith(".partial") for p in path.parent.iterdir()] == [True]
    return path


@pytest.mark.parametrize("earlier", [True, False], ids=["over an earlier file", "a new file"])
def test_a_killed_process_leaves_nothing_beside_its_output(tmp_path, own_home, earlier):
    path = tmp_path / "there/p.csv"
    path.parent.mkdir()
    need_files_without_names(path.parent)
    if earlier:
        path.write_text("an earlier answer")
    kill_while_writing(path, own_home, "as it is")
    assert [p.read_text() for p in path.parent.iterdir()] == ["an earlier answer"] * earlier
    write_output(path, b"whole")
    assert [p.read_bytes() for p in path.parent.iterdir()] == [b"whole"]


def test_an_output_takes_the_place_of_a_link_and_leaves_the_file_behind_it(tmp_path):
    kept = tmp_path / "kept.csv"
    kept.write_text("mine")
    for name, target in (("p.csv", kept), ("q.csv", tmp_path / "nowhere.csv")):
        path = tmp_path / name
        path.symlink_to(target)
        write_output(path, b"whole")
        assert not path.is_symlink()
        assert path.read_bytes() == b"whole"
    assert {p.name for p in tmp_path.glob("*.csv")} == {"p.csv", "q.csv", "kept.csv"}
    assert kept.read_text() == "mine"


def test_a_folder_in_the_place_of_an_output_stays_and_nothing_is_left(tmp_path):
    (tmp_path / "there/p.csv").mkdir(parents=True)
    with pytest.raises(OSError, match=r"p\.csv"):
        write_output(tmp_path / "there/p.csv", b"whole")
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["p.csv"]


def test_the_next_command_removes_what_a_killed_one_left(out):
    write_output(out, b"whole")
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert out.read_bytes() == b"whole"


def test_gc_names_what_a_killed_command_left_outside_the_home_and_removes_it(out, own_home):
    other = out.with_name(f".other.csv.{2**22 + 1}-00000000.partial")  # of no fedcache of this home
    other.touch()
    (left,) = out.parent.glob(".p*.partial")
    named = {Path(g["path"]): g["why"] for g in data_of("gc")["garbage"]}
    assert named[left] == "partial output of a killed process"
    ok("gc --delete")
    assert list(out.parent.iterdir()) == [other]
    assert list((own_home / NOTES).iterdir()) == []


def test_an_output_that_is_being_written_is_left_alone(tmp_path, own_home):
    own_home.mkdir(exist_ok=True)
    path = tmp_path / "p.csv"
    with output_file(path) as first:
        first.write(b"first")
        assert f"{tmp_path}/.p" not in str(data_of("gc")["garbage"])
        write_output(path, b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list((own_home / NOTES).iterdir()) == []


def test_what_another_host_writes_is_left_alone(out, monkeypatch):
    (left,) = out.parent.iterdir()
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(lock, "HOST", "abcdef", raising=False)
    ok("gc --delete")
    write_output(out, b"whole")
    assert sorted(out.parent.iterdir()) == sorted([left, out])


def test_a_note_can_name_no_file_but_a_partial_one(tmp_path, own_home):
    (own_home / NOTES).mkdir(parents=True)
    kept = tmp_path / "kept.csv"
    kept.write_text("mine")
    dead = {**this_process(), "pid": 2**22 + 1}
    write_sealed(own_home / f"{NOTES}/a.json", NOTE_KIND, {"path": str(kept), **dead})
    ok("gc --delete")
    assert kept.read_text() == "mine"


def test_outputs_are_written_where_the_home_cannot_be(tmp_path, own_home):
    own_home.write_text("a file where the home would be")
    write_output(tmp_path / "p.csv", b"whole")
    assert (tmp_path / "p.csv").read_bytes() == b"whole"
    # Its permissions are those of an ordinary file.
    assert (tmp_path / "p.csv").stat().st_mode == own_home.stat().st_mode
