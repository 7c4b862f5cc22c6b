"""``fedcache runs``: which results there are, one of them, what differs, tags, and their removal."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from arrays import ingested
from command import Done, apart, fedcache, ok, start

from fedcache.errors import Exit
from fedcache.runs.directory import read_result
from fedcache.runs.running import LOCK, is_running, running

IID = ("--scheme", "iid", "--clients", 3)


@pytest.fixture
def three(tmp_path: Path, own_home: Path) -> dict[str, str]:
    """Name -> directory of fed3r, of fed3r with another ridge, and of fedncm, on the same rows."""
    ingested(tmp_path)
    asked: dict[str, tuple[Any, ...]] = {"plain": ("fed3r",), "lam": ("fed3r", "--set", "lam=5"), "ncm": ("fedncm",)}
    return {name: ok("train", *words, *IID).data["path"] for name, words in asked.items()}


def rows(done: Done) -> list[dict[str, str]]:
    """A list in a pipe, as a script reads it."""
    head, *lines = (line.split("\t") for line in done.out.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def digest(path: str) -> str:
    return Path(path).name


@pytest.mark.slow
def test_runs_are_listed_by_what_is_asked_for(three: dict[str, str]) -> None:
    told = rows(fedcache("runs", "list"))
    assert [(r["run"], r["method"], r["differs in"]) for r in told] == [
        (digest(three["plain"]), "fed3r", "lam=0.01"),
        (digest(three["lam"]), "fed3r", "lam=5"),
        (digest(three["ncm"]), "fedncm", ""),
    ]
    assert [r["run"] for r in rows(fedcache("runs", "list", "--method", "fedn*"))] == [digest(three["ncm"])]
    assert [r["run"] for r in rows(fedcache("runs", "list", digest(three["lam"])[:6]))] == [digest(three["lam"])]
    assert fedcache("runs", "list", "--dataset", "other").err == "No run is so.\nfedcache runs list\n"
    Path(three["lam"], "rounds.jsonl").write_text("{}")
    Path(three["ncm"], "result.json").unlink()
    states = {e["path"]: e["state"] for e in ok("runs", "list").data["entries"]}
    assert states == {three["plain"]: "finished", three["lam"]: "damaged", three["ncm"]: "unfinished"}
    (left,) = ok("runs", "list", "--state", "unfinished").data["entries"]
    assert (left["method"], left["accuracy"], left["backbones"]) == ("fedncm", None, ["mine"])
    wrong = fedcache("runs", "list", "--state", "finish")
    assert (wrong.code, wrong.err.splitlines()[0]) == (
        Exit.USAGE,
        "fedcache: Unknown --state 'finish'. Did you mean 'finished'?",
    )


@pytest.mark.slow
def test_runs_are_named_by_method_dataset_and_partition(three: dict[str, str]) -> None:
    dataset, partition = (ok("runs", "list").data["entries"][0][key] for key in ("dataset", "partition"))
    for query, names in (("method:fed3r", ("plain", "lam")), ("method:*ncm", ("ncm",)), ("dataset:" + dataset, three),
                         ("partition:" + partition, three), ("partition:iid", three)):  # fmt: skip
        expected = [digest(three[name]) for name in names]
        assert [r["run"] for r in rows(fedcache("runs", "list", query))] == expected, query
    none = fedcache("compare", "method:fedavg")
    assert (none.code, "is of method:fedavg" in none.err) == (Exit.STORE, True)
    meant = fedcache("compare", "fed3r", "fedncm")
    assert (meant.code, meant.err.splitlines()[-1]) == (Exit.USAGE, "method:fed3r   names the runs of that method")


@pytest.mark.slow
def test_a_run_is_shown_with_the_settings_that_are_its_own(three: dict[str, str]) -> None:
    told = ok("runs", "show", digest(three["lam"])[:8]).data
    assert told["settings"] == [{"setting": "set.lam", "value": "5", "default": "0.01"}]
    assert told["figures"]["accuracy"] == read_result(Path(three["lam"], "result.json"))["accuracy"]["mean"]
    assert {f["name"] for f in told["files"]} >= {"config.toml", "result.json", "models/seed-0.safetensors"}
    shown = fedcache("runs", "show", three["plain"]).out
    assert "all of them the method's own" in shown
    again = told["again"].split()[1:]
    assert ok(*again).data["reused"], "the command that is shown names this run"


@pytest.mark.slow
def test_what_differs_between_runs_is_told_and_nothing_else(three: dict[str, str]) -> None:
    told = ok("runs", "diff", digest(three["plain"]), digest(three["lam"])).data
    first, second = told["runs"]
    assert told["settings"] == {"set.lam": {first: "0.01", second: "5"}}
    assert "bytes up" not in told["figures"]
    assert told["figures"]["seconds"].keys() == {first, second}
    three_of_them = fedcache("runs", "diff", *map(digest, three.values())).out.splitlines()
    assert three_of_them[0].split("\t") == ["setting", *(f"{digest(p)[:8]} {m}" for p, m in zip(
        three.values(), ("fed3r", "fed3r", "fedncm"), strict=True))]  # fmt: skip
    more = digest(ok("train", "fed3r", *IID, "--seeds", "0,1").data["path"])
    told = fedcache("runs", "diff", digest(three["plain"]), more)
    assert "bytes up, bytes down, seconds: sums over 1 and 2 seeds." in told.out.splitlines() + told.err.splitlines()
    assert "bytes up, 2 seeds" in fedcache("runs", "show", more).out
    alone = fedcache("runs", "diff", three["plain"], digest(three["plain"])[:7])
    assert (alone.code, "names one run" in alone.err) == (Exit.USAGE, True)


@pytest.mark.slow
def test_tags_find_runs_everywhere_and_change_no_digest(three: dict[str, str]) -> None:
    before = {p: p.read_bytes() for p in Path(three["plain"]).glob("*.*")}
    assert ok("runs", "tag", "base", digest(three["plain"])[:6], digest(three["ncm"])).data["runs"] == [
        three["plain"], three["ncm"],
    ]  # fmt: skip
    assert {p: p.read_bytes() for p in before} == before
    assert ok("train", "fed3r", *IID).data["reused"], "a tagged run is whole"
    assert [e["path"] for e in ok("runs", "list", "--tag", "base").data["entries"]] == [three["plain"], three["ncm"]]
    assert len(ok("compare", "tag:base").data["comparisons"]) == 1
    assert "lam=5" not in fedcache("compare", "tag:base").out
    assert rows(fedcache("runs", "tag"))[0]["runs"] == "2"
    ok("runs", "tag", "base", digest(three["ncm"]), "--remove")
    ok("runs", "tag", "other", "tag:base")
    assert ok("runs", "show", "tag:base").data["tags"] == ["base", "other"]
    missing = fedcache("compare", "tag:nobody")
    assert (missing.code, "there are base, other." in missing.err) == (Exit.STORE, True)
    wrong = fedcache("runs", "tag", "two words", three["ncm"])
    assert (wrong.code, "is no tag" in wrong.err) == (Exit.USAGE, True)


@pytest.mark.slow
def test_damaged_tags_are_named_wherever_runs_are_listed(three: dict[str, str]) -> None:
    for run in ("plain", "ncm"):
        ok("runs", "tag", f"base-{run}", digest(three[run]))
    path, other = Path(three["plain"], "tags.json"), Path(three["ncm"], "tags.json")
    whole = path.read_bytes()
    for damaged in (b"{", b"", b"\xff\x00", whole.replace(b"base", b"case"), other.read_bytes(), whole[:-1]):
        path.write_bytes(damaged)
        shown = fedcache("runs", "show", three["plain"])
        assert (shown.code, f"rm {path}" in shown.err) == (Exit.CORRUPT, True)
        (warning,) = ok("runs", "list").envelope["warnings"]
        assert f"rm {path}" in warning
        assert fedcache("runs", "list", "tag:base-ncm").code == Exit.CORRUPT
    path.write_text('["base", "two"]\n')  # as an earlier release wrote it
    shown = fedcache("runs", "show", three["plain"])
    hint = f"rm {path} && fedcache runs tag base {path.parent.name} && fedcache runs tag two {path.parent.name}"
    assert (shown.code, hint in shown.err) == (Exit.CORRUPT, True)
    path.write_bytes(whole)
    renamed = path.parent.rename(path.parent.with_name("my run"))
    assert ok("runs", "show", renamed).data["tags"] == ["base-plain"], "a directory of any name holds the same run"


@pytest.mark.slow
def test_runs_are_removed_after_a_question_or_with_yes(
    three: dict[str, str], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = digest(three["lam"])
    assert ok("train", "fed3r", "--set", "lam=5", *IID).data["reused"]
    board = own_home / "runs" / "tensorboard" / name
    (board / "seed-0").mkdir(parents=True)
    asked = fedcache("runs", "rm", name)
    assert (asked.code, asked.err.splitlines()[-1]) == (Exit.USAGE, f"fedcache runs rm {name} --yes")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert fedcache("runs", "rm", name).out == "Nothing was removed.\n"
    assert Path(three["lam"]).is_dir()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    done = fedcache("runs", "rm", name)
    assert done.out.startswith("Removed 1 run, ")
    assert "Remove 1 run, " in done.err
    assert not Path(three["lam"]).exists()
    assert not board.exists()
    noted = [p for p in (own_home / "digests").glob("*.json") if name in p.read_text()]
    assert noted == [], "no noted answer names a run that is gone"
    assert ok("train", "fed3r", "--set", "lam=5", *IID).data["reused"] is False, "it is trained again"
    mine = Path(three["ncm"], "notes.txt")
    mine.write_text("mine")
    told = ok("runs", "rm", three["ncm"], "--yes")
    assert "notes.txt is not of the run, and stays." in told.envelope["warnings"][0]
    assert [p.name for p in Path(three["ncm"]).iterdir()] == ["notes.txt"]
    assert fedcache("runs", "rm", "--yes").code == Exit.USAGE, "nothing named is nothing removed"


def test_the_link_to_a_run_goes_and_the_run_stays(three: dict[str, str], own_home: Path) -> None:
    real = own_home.parent / "elsewhere"
    Path(three["ncm"]).rename(real)
    Path(three["ncm"]).symlink_to(real)
    ok("runs", "rm", digest(three["ncm"]), "--yes")
    assert not Path(three["ncm"]).is_symlink()
    assert (real / "result.json").is_file()


def test_a_run_that_is_being_trained_is_not_removed(three: dict[str, str]) -> None:
    folders = [Path(three["plain"]), Path(three["lam"])]
    with running(folders):
        assert [e["state"] for e in ok("runs", "list").data["entries"]] == ["running", "running", "finished"]
        refused = fedcache("runs", "rm", *folders, "--yes")
        assert (refused.code, "is being trained now" in refused.err) == (Exit.USAGE, True)
    assert all((folder / "result.json").is_file() for folder in folders)
    assert not any((folder / LOCK).exists() for folder in folders)
    (folders[0] / LOCK).touch()  # of a process that was killed
    assert not is_running(folders[0])


@pytest.mark.slow
def test_the_run_of_another_process_is_running_until_that_is_killed(tmp_path: Path, own_home: Path) -> None:
    ingested(tmp_path)
    words = ("train", "fedavg", *IID, "--rounds", 100_000, "--set", "batch=2")
    process = start(*words, home=own_home)
    try:
        for _ in range(300):
            states = {e["state"] for e in ok("runs", "list").data["entries"]}
            if states:
                break
            time.sleep(0.1)
        assert states == {"running"}
        (folder,) = (own_home / "runs").iterdir()
        assert apart("runs", "rm", folder.name, "--yes", home=own_home).code == Exit.USAGE
    finally:
        process.kill()
        process.wait()
    assert [e["state"] for e in ok("runs", "list").data["entries"]] == ["unfinished"]
    removed = json.loads(apart("runs", "rm", folder.name, "--yes", "--json", home=own_home).out)
    assert removed["data"]["removed"] == [str(folder)]
    assert not folder.exists()
