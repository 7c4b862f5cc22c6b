"""``fedcache runs``: which results there are, one of them, what differs, tags, and their removal."""

import io
import sys
from pathlib import Path

import pytest
from arrays import ingested
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_corrupt

from fedcache.errors import Exit
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs.directory import LOCK, is_running, owning

IID = "--scheme iid --clients 3"


@pytest.fixture
def three(tmp_path):
    """Name -> directory of fed3r, of fed3r with another ridge, and of fedncm, on the same rows."""
    ingested(tmp_path)
    asked = {"plain": "fed3r", "lam": "fed3r --set lam=5", "ncm": "fedncm"}
    return {name: data_of(f"train {words} {IID}")["path"] for name, words in asked.items()}


def rows(done):
    """A list in a pipe, as a script reads it."""
    head, *lines = (line.split("\t") for line in done.out.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def digest(path):
    return Path(path).name


@pytest.mark.slow
def test_runs_are_listed_by_what_is_asked_for(three):
    told = rows(fedcache("runs list"))
    assert [(r["run"], r["method"], r["differs in"]) for r in told] == [
        (digest(three["plain"]), "fed3r", "lam=auto"),
        (digest(three["lam"]), "fed3r", "lam=5"),
        (digest(three["ncm"]), "fedncm", ""),
    ]
    dataset, partition = (
        data_of("runs list")["entries"][0][key] for key in ("dataset", "partition")
    )
    for query, names in (
        (("--method", "fedn*"), ("ncm",)),
        ((digest(three["lam"])[:6],), ("lam",)),
        (("--dataset", "other"), ()),
        (("method:fed3r",), ("plain", "lam")),
        ((f"dataset:{dataset}",), three),
        ((f"partition:{partition}",), three),
    ):
        found = [entry["path"] for entry in data_of("runs list", *query)["entries"]]
        assert found == [three[name] for name in names], query
    assert fedcache("compare method:fedavg").code == Exit.STORE
    Path(three["lam"], "rounds.jsonl").write_text("{}")
    Path(three["ncm"], "result.json").unlink()
    states = {e["path"]: e["state"] for e in data_of("runs list")["entries"]}
    assert states == {
        three["plain"]: "finished",
        three["lam"]: "damaged",
        three["ncm"]: "unfinished",
    }
    (left,) = data_of("runs list --state unfinished")["entries"]
    assert left["method"] == "fedncm"
    assert left["accuracy"] is None
    assert left["backbones"] == ["mine"]
    must_fail("", "runs list --state finish")


@pytest.mark.slow
def test_a_run_is_shown_with_the_settings_that_are_its_own(three):
    told = data_of("runs show", digest(three["lam"])[:8])
    assert told["settings"] == [{"setting": "set.lam", "value": "5", "default": "auto"}]
    assert {f["name"] for f in told["files"]} >= {
        "config.toml",
        "result.json",
        "models/seed-0.safetensors",
    }
    assert data_of(*told["again"].split()[1:])["reused"], "the command that is shown names this run"


@pytest.mark.slow
def test_what_differs_between_runs_is_told_and_nothing_else(three):
    told = data_of("runs diff", digest(three["plain"]), digest(three["lam"]))
    first, second = told["runs"]
    assert told["settings"] == {"set.lam": {first: "auto", second: "5"}}
    assert told["figures"]["seconds"].keys() == {first, second}
    more = digest(data_of(f"train fed3r {IID} --seeds 0,1")["path"])
    assert more == digest(three["plain"])
    assert "sums over 2 and 1 seeds" in fedcache(f"runs diff {more}", digest(three["lam"])).err
    must_fail("", "runs diff", three["plain"], digest(three["plain"])[:7])


@pytest.mark.slow
def test_tags_find_runs_everywhere_and_change_no_digest(three):
    pair = [three["plain"], three["ncm"]]
    before = {p: p.read_bytes() for p in Path(three["plain"]).glob("*.*")}
    assert (
        data_of("runs tag base", digest(three["plain"])[:6], digest(three["ncm"]))["runs"] == pair
    )
    assert {p: p.read_bytes() for p in before} == before
    assert data_of(f"train fed3r {IID}")["reused"], "a tagged run is whole"
    assert [e["path"] for e in data_of("runs list --tag base")["entries"]] == pair
    assert rows(fedcache("runs tag"))[0]["runs"] == "2"
    ok("runs tag base", digest(three["ncm"]), "--remove")
    ok("runs tag other tag:base")
    assert data_of("runs show tag:base")["tags"] == ["base", "other"]
    assert fedcache("compare tag:nobody").code == Exit.STORE


@pytest.mark.slow
def test_damaged_tags_are_named_wherever_runs_are_listed(three):
    for run in ("plain", "ncm"):
        ok("runs tag", f"base-{run}", digest(three[run]))
    path = Path(three["plain"], "tags.json")
    other = Path(three["ncm"], "tags.json")
    whole = path.read_bytes()
    for damaged in (
        b"{",
        b"",
        whole.replace(b"base", b"case"),
        other.read_bytes(),
        b'["base", "two"]\n',
    ):
        path.write_bytes(damaged)
        must_fail_corrupt(f"rm {path}", "runs show", three["plain"])
        (warning,) = ok("runs list").warnings
        assert f"rm {path}" in warning
        assert fedcache("runs list tag:base-ncm").code == Exit.CORRUPT
    path.write_bytes(whole)
    renamed = path.parent.rename(path.parent.with_name("my run"))
    assert data_of("runs show", renamed)["tags"] == ["base-plain"], (
        "a directory of any name holds the same run"
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
def test_runs_are_removed_after_a_question_or_with_yes(three, own_home, monkeypatch):
    name = digest(three["lam"])
    board = own_home / f"runs/tensorboard/{name}"
    (board / "seed-0").mkdir(parents=True)
    asked = fedcache(f"runs rm {name}")
    assert asked.code == Exit.USAGE
    assert asked.err.splitlines()[-1] == f"fedcache runs rm {name} --yes"
    for answer, kept in (("n", True), ("y", False)):
        monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
        assert fedcache(f"runs rm {name}").code == 0
        assert Path(three["lam"]).exists() is board.exists() is kept
    assert data_of(f"train fed3r --set lam=5 {IID}")["reused"] is False, "it is trained again"
    Path(three["ncm"], "notes.txt").write_text("mine")
    assert "notes.txt" in ok("runs rm", three["ncm"], "--yes").warnings[0]
    assert [p.name for p in Path(three["ncm"]).iterdir()] == ["notes.txt"]
    assert fedcache("runs rm --yes").code == Exit.USAGE, "nothing named is nothing removed"


def test_the_link_to_a_run_goes_and_the_run_stays(three, own_home):
    real = own_home.parent / "elsewhere"
    Path(three["ncm"]).rename(real)
    Path(three["ncm"]).symlink_to(real)
    ok("runs rm", digest(three["ncm"]), "--yes")
    assert not Path(three["ncm"]).is_symlink()
    assert (real / "result.json").is_file()


def test_a_run_that_is_being_trained_is_not_removed(three):
    folders = [Path(three["plain"]), Path(three["lam"])]
    with owning(folders, Silent(), Stop()):
        assert [e["state"] for e in data_of("runs list")["entries"]] == [
            "running",
            "running",
            "finished",
        ]
        must_fail("", "runs rm", *folders, "--yes")
    assert all((folder / "result.json").is_file() for folder in folders)
    (folders[0] / LOCK).touch()  # of a process that was killed
    assert not any(is_running(folder) for folder in folders)
