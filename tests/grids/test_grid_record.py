"""The record of a grid: its points and how each ended, and the command that makes the grid again."""

import shlex
from pathlib import Path

import pytest
from arrays import ingested
from command import data_of
from failing_command import must_fail
from refusal import corruption

from fedcache.grids.record import FOLDER, read_record
from fedcache.store.files import first_of, write_sealed_lines
from fedcache.store.lock import still_runs, this_process
from fedcache.ui.server import GridIndex, RunIndex

IID = "--scheme iid --clients 3"


@pytest.mark.parametrize(
    ("words", "points"),
    [
        ("--sweep lr=0.1,0.01 --sweep rounds=2 --seeds 0,1", 2),
        ("--sweep lr=0.1,0.01,0.001 --sampler random:2:7 --rounds 1", 2),
        ("--sweep opt=sgd,adam --sweep momentum=0.5,0.9 --rounds 1", 3),
    ],
    ids=["all", "drawn", "not-always-read"],
)
def test_a_grid_leaves_its_points_the_command_of_these_and_how_each_ended(
    once, own_home, words, points
):
    once(ingested)
    done = data_of(f"grid fedavg {words} {IID}")
    (path,) = (own_home / FOLDER).iterdir()
    found = read_record(path)
    assert found["points"] == [(p["method"], p["sweep"]) for p in done["points"]]
    assert len(found["points"]) == points
    ends = {number: line["run"] for number, line in found["ends"].items()}
    assert ends == {number: Path(p["path"]).name for number, p in enumerate(done["points"])}
    assert found["ended"] >= found["started"]
    assert "error" not in found
    # The command that is kept is the grid itself: nothing is trained again, and no second record comes.
    program, *again = shlex.split(found["command"])
    assert program == "fedcache"
    assert data_of(*again)["reused"] == points
    assert [p.name for p in (own_home / FOLDER).iterdir()] == [path.name]


def test_a_grid_that_ends_early_says_so_and_one_that_cannot_write_its_record_goes_on(
    once, own_home
):
    once(ingested)
    (own_home / FOLDER).write_text("a file where the folder would be")
    assert data_of(f"grid fed3r {IID} --sweep lam=1,2")["reused"] == 0
    (own_home / FOLDER).unlink()
    must_fail("", f"grid fedavg {IID} --sweep lr=0.1,0.2 --domain nowhere")
    (path,) = (own_home / FOLDER).iterdir()
    found = read_record(path)
    assert "nowhere" in found["error"]
    assert found["ends"] == {}


def test_a_record_that_is_being_written_is_read_as_far_as_it_goes_and_a_damaged_one_is_refused(
    tmp_path,
):
    path = tmp_path / "a.jsonl"
    told = {"process": {}, "started": 1.0, "command": "", "runs": ""}
    told["points"] = [["fedavg", {}], ["fed3r", {}]]
    first = first_of({"kind": "record of a grid", "grid": "a"})
    write_sealed_lines(path, [told, {"point": 1, "run": "aa"}], first)
    whole = path.read_bytes()
    for torn in (b"", b'{"point": 0, "ru'):
        path.write_bytes(whole + torn)
        assert list(read_record(path)["ends"]) == [1]
    for broken in (
        b"",
        whole[:40],
        whole.replace(b"fed3r", b"fed4r"),
        whole[whole.index(b"\n") + 1 :],
    ):
        path.write_bytes(broken)
        corruption(lambda: read_record(path), "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(whole)  # the record of another grid
    corruption(lambda: read_record(tmp_path / "b.jsonl"))
    assert read_record(tmp_path / "none") is None


def test_the_page_of_grids_names_a_damaged_record_and_how_to_remove_it(tmp_path):
    (tmp_path / FOLDER).mkdir()
    path = tmp_path / FOLDER / "a.jsonl"
    path.write_text('{"points": []}\n')
    (line,) = GridIndex(tmp_path / FOLDER, RunIndex(tmp_path / "runs")).lines()
    assert line["state"] == "damaged"
    assert f"rm {path}" in line["problem"]


def test_a_process_is_told_from_a_later_one_with_its_number():
    me = this_process()
    assert still_runs(me) is True
    assert still_runs({**me, "pid": 2**22 + 1}) is False
    assert still_runs({**me, "host": "elsewhere"}) is None
    if me["started"]:
        assert still_runs({**me, "started": me["started"] - 1}) is False
