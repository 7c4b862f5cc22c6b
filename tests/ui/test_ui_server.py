"""What the page's server lets in, and what it answers of homes as they come: empty, whole, damaged, at work."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from command import ok
from pictures import folder
from ui_client import Client

from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs.directory import WRITTEN, read_result, write_result
from fedcache.runs.running import LOCK, owning
from fedcache.store.lock import this_process
from fedcache.store.sealed import write_sealed
from fedcache.store.sealed_lines import first_of, read_sealed_lines, write_sealed_lines
from fedcache.ui import run_index

IID = ("--scheme", "iid", "--clients", 4)


def trained(place: Path) -> Path:
    """A home with one store, two finished runs of one setting, and a grid of two points."""
    images = folder(place / "shapes", train=12, test=4)
    ok(
        "extract",
        "--dataset",
        f"folder:{images}",
        "--backbones",
        "random-projection",
        "--size",
        8,
        "--workers",
        0,
    )
    words = (*IID, "--rounds", 3, "--eval-every", 1, "--set", "batch=4", "--seeds", "0,1")
    made = ok("train", "--method", "fedavg", *words).data
    ok("train", "--method", "fed3r", *IID, "--seeds", "0,1")
    ok("grid", "--method", "fedprox", *words, "--sweep", "mu=0.1,1")
    return Path(made["path"])


@pytest.fixture
def run(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(trained)


@pytest.fixture
def client(run: Path, own_home: Path) -> Client:
    return Client(own_home)


def in_progress(run: Path, name: str, *, rounds: int = 3) -> Path:
    """A copy of a finished run as one that is not: without a result, with a checkpoint of seed 0."""
    import torch

    left = run.parent / name
    left.mkdir()
    shutil.copy(run / "config.toml", left)
    write_sealed(left / WRITTEN, {"kind": "files of a run"}, {"config.toml": ""})
    records = [
        {
            "round": r,
            "clients": [0],
            "seconds": 2.0,
            "accuracy": r / 10 if r > 1 else None,
            "traffic": {"up_bytes": 100, "down_bytes": 10},
            "diagnostics": {},
        }
        for r in range(1, rounds)
    ]
    kept = left / "checkpoint-0.safetensors"
    write_sealed(
        kept,
        {"kind": "checkpoint"},
        json.dumps({"round": rounds - 1, "records": records}),
        {"server/w": torch.zeros(3)},
    )
    return left


@pytest.mark.slow
def test_only_who_knows_the_token_on_this_machine_is_answered(client: Client) -> None:
    assert client.ask("/").code == 200
    for token in ("", "T0ken", "t0ken%00"):
        assert client.ask("/api/changes", token=token).code == 403, token
    for host in ("127.0.0.1", "localhost:99", "[::1]"):
        assert client.ask("/", headers={"host": host}).code == 200, host
    for host in ("", "evil.example", "127.0.0.1.evil.example:4321", "0.0.0.0"):
        assert client.ask("/", headers={"host": host}).code == 403, host
    for site in ("cross-site", "same-site"):
        assert client.ask("/", headers={"sec-fetch-site": site}).code == 403
    for method in ("POST", "OPTIONS"):
        assert client.ask("/api/changes", method=method).code == 405


def test_every_answer_forbids_other_sources_frames_and_keeping(client: Client) -> None:
    name = client.changes()["runs"][0]["name"]
    for path in (
        "/",
        "/static/ui.css",
        "/api/changes",
        f"/api/run/{name}",
        "/api/run/none",
        "/nothing",
    ):
        head = client.ask(path).headers
        policy = head["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert head["cache-control"] == "no-store"
        assert head["referrer-policy"] == "no-referrer"
        assert head["x-content-type-options"] == "nosniff"
        assert not {"set-cookie", "access-control-allow-origin"} & head.keys()


def test_no_path_leads_out_of_the_home(client: Client, own_home: Path) -> None:
    (own_home.parent / "secret.txt").write_text("secret")
    for path in (
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/index.html",
        "/api/run/%2e%2e",
        "/api/store/..%2f..",
        "/api/grid/..%2f..%2fx",
        "/report/../x.html",
        "/api/store/..%2fruns/images",
    ):
        for asked in (path, unquote(path)):
            found = client.ask(asked)
            assert found.code == 404, asked
            assert b"secret" not in found.body


def test_an_empty_home_and_one_that_is_not_there_are_answered(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        found = Client(place).changes()
        assert (found["runs"], found["stores"], found["grids"], found["waiting"]) == ([], [], [], 0)
    assert not (tmp_path / "none").exists(), "who only reads makes nothing"


def test_figures_are_those_of_the_results(client: Client, run: Path) -> None:
    found = {r["name"]: r for r in client.changes()["runs"]}
    result = read_result(run / "result.json")
    mine = found[run.name]
    assert (mine["accuracy"], mine["std"]) == (
        result["accuracy"]["mean"],
        result["accuracy"]["std"],
    )
    assert mine["sent"] == result["traffic"]["exact"]["up_bytes"]
    details = client.ask(f"/api/run/{run.name}").data
    assert {seed: len(curve) for seed, curve in details["curves"].items()} == {"0": 3, "1": 3}
    _, *measure = next(
        shlex.split(words) for what, words in details["commands"] if what == "Measure it"
    )
    assert ok(*measure).data


def test_a_grid_at_work_shows_the_run_of_a_point_that_has_not_ended(
    client: Client, run: Path, own_home: Path
) -> None:
    (line,) = client.changes()["grids"]
    path = own_home / "grids" / f"{line['name']}.jsonl"
    sealed_for = first_of({"kind": "record of a grid", "grid": path.stem})
    first, one, *_ = read_sealed_lines(path, sealed_for)
    write_sealed_lines(
        path, [{**first, "process": this_process(), "started": time.time() - 5}, one], sealed_for
    )
    other = next(
        p for p in client.ask(f"/api/grid/{line['name']}").data["points"] if p["run"] is None
    )
    assert other["state"] == "waiting"
    ended = [r for r in client.changes()["runs"] if r["method"] == "fedprox"]
    mu = {r["name"]: client.ask(f"/api/run/{r['name']}").data["settings"]["mu"] for r in ended}
    source = (
        own_home
        / "runs"
        / next(name for name, value in mu.items() if value == other["sweep"]["mu"])
    )
    with owning([in_progress(source, "b" * 16)], Silent(), Stop()):
        client.changes()
        grid = client.ask(f"/api/grid/{line['name']}").data
        (line,) = client.changes()["grids"]
    assert grid["state"] == "running"
    assert [p["state"] for p in grid["points"]] == ["finished", "running"]
    assert grid["points"][1]["run"] == "b" * 16
    assert line["share"] == pytest.approx((1 + 2 / 6) / 2)
    assert line["left"] == pytest.approx(8.0)


def test_a_run_at_work_is_read_from_its_checkpoint_and_one_that_was_killed_is_stopped(
    client: Client, run: Path
) -> None:
    version = client.changes()["version"]
    left = in_progress(run, "a" * 16)
    with owning([left], Silent(), Stop()):
        found = client.changes(version)
    (mine,) = found["runs"]
    assert (mine["state"], mine["done"], mine["total"], mine["accuracy"]) == ("running", 2, 6, 0.2)
    assert (mine["sent"], mine["received"], mine["left"]) == (
        200,
        20,
        8.0,
    )  # 2 s a round, 4 rounds to go
    assert client.ask(f"/api/run/{left.name}").data["curves"] == {"0": [[2, 0.2]]}
    (
        left / LOCK
    ).touch()  # killed: the system ends the lock and leaves its file, and the page knows
    (mine,) = client.changes(found["version"])["runs"]
    assert (mine["state"], mine["left"], mine["done"]) == ("stopped", None, 2)


@pytest.mark.parametrize("what", ["result", "rounds", "config", "checkpoint"])
def test_a_damaged_run_is_named_and_hides_no_other(client: Client, run: Path, what: str) -> None:
    count = len(client.changes()["runs"])
    left = in_progress(run, "c" * 16)
    if what in ("result", "rounds"):
        shutil.copytree(run, left, dirs_exist_ok=True)
        result = {**read_result(run / "result.json"), "digest": left.name + "0" * 48}
        if what == "result":
            result["accuracy"] = 3
        else:
            (left / "rounds.jsonl").write_text("{}\n")
        write_result(left / "result.json", result)
    else:
        name = {"checkpoint": "checkpoint-0.safetensors", "config": "config.toml"}[what]
        (left / name).write_bytes(b"\x00 not what was written")
    fresh = Client(client.pages.home.root)
    found = fresh.changes()["runs"]
    mine = {r["name"]: r for r in found}[left.name]
    assert len(found) == count + 1
    if what in ("result", "config"):
        assert mine["state"] == "damaged"
        assert mine["hint"]
    if what == "checkpoint":
        assert mine["done"] == 0
    if what == "rounds":
        assert "rounds.jsonl" in fresh.ask(f"/api/run/{left.name}").data["problem"]


def test_a_comparison_is_that_of_the_command_line(client: Client) -> None:
    names = sorted(
        r["name"] for r in client.changes()["runs"] if r["method"] in ("fedavg", "fed3r")
    )
    made = client.ask(f"/api/compare?runs={','.join(names)}").data
    told = ok("compare", *names).data
    (table,), (other,) = made["tables"], told["comparisons"]
    means = {row[0]: row[1].split(" ")[0] for row in table["sheets"][0]["rows"]}
    assert means == {t["name"]: f"{100 * t['mean']:.2f}" for t in other["treatments"]}


@pytest.mark.slow
def test_a_report_is_written_beside_the_server_and_is_that_of_the_command_line(
    client: Client, tmp_path: Path
) -> None:
    names = [r["name"] for r in client.changes()["runs"]]
    path = f"/api/report?runs={','.join(names)}"
    found = client.ask(path).data
    assert found["state"] == "working"
    end = time.monotonic() + 200
    while found["state"] == "working" and time.monotonic() < end:
        time.sleep(0.2)
        found = client.ask(path).data
    assert found["state"] == "ready", found
    answer = client.ask(f"/report/{found['id']}.html")
    ok("report", *names, "-o", tmp_path / "own.html")
    same = answer.body == (tmp_path / "own.html").read_bytes()
    assert same, "pytest would compare half a megabyte line by line"
    kept = client.pages.reports.file(found["id"])
    assert kept is not None
    client.pages.reports.close()
    assert not kept.parent.exists()


def test_a_store_is_described_and_its_images_come_when_they_are_asked_for(client: Client) -> None:
    (line,) = client.changes()["stores"]
    told = ok("inspect", line["name"]).data
    details = client.ask(f"/api/store/{line['name']}").data
    assert [name for name, _ in details["classes"]] == told["classes"]
    assert sum(n for _, n in details["classes"]) == told["ok"]
    made = client.ask(f"/api/store/{line['name']}/images?start=4").data
    assert all(i["uri"].startswith("data:image/") for i in made["images"])


@pytest.mark.slow
def test_a_look_at_ten_thousand_runs_asks_for_a_share_of_their_times_and_reads_none(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first reading a look takes as many operations as there are changes, and a thirtieth of the runs."""
    count = 10_000
    for i in range(count):
        (own_home / "runs" / f"{i:016x}").mkdir(parents=True)
    monkeypatch.setattr(
        run_index, "read_run", lambda path: {"name": path.name, "state": "finished", "changed": 0.0}
    )
    monkeypatch.setattr(run_index, "RECENT", 0)
    index = run_index.RunIndex(own_home / "runs")
    index.look()
    while index.waiting:
        index.look()
    assert index.reads == count
    version = index.version
    for _ in range(3):
        stats, reads = index.stats, index.reads
        index.look()
        assert index.stats - stats <= 1 + -(-count // run_index.SHARE)
        assert index.reads == reads
    assert index.changes(version)["runs"] == []
    # Within so many looks every run that was written anew is found, and it alone is read and told.
    changed = own_home / "runs" / f"{77:016x}"
    os.utime(changed, ns=(1, 1))
    for _ in range(run_index.SHARE):
        index.look()
    assert index.reads == count + 1
    # An answer is a part of all, and the parts are all.
    seen: set[str] = set()
    since = 0
    while True:
        part = index.changes(since)
        assert len(part["runs"]) <= run_index.MOST
        seen |= {r["name"] for r in part["runs"]}
        since = part["version"]
        if not part["more"]:
            break
    assert len(seen) == count


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
@pytest.mark.timeout(60)  # a page that opens a pipe waits for ever
def test_a_pipe_in_the_place_of_any_file_hides_and_hinders_nothing(
    client: Client, run: Path, own_home: Path
) -> None:
    names = [
        "result.json",
        "config.toml",
        "measured.json",
        "rounds.jsonl",
        "files.json",
        "tags.json",
        "running.lock",
        "clients.parquet",
        "seed-0.json",
        "checkpoint-0.safetensors",
        "models/models.json",
    ]
    for number, name in enumerate(names):  # runs that are whole but for one file
        copy = run.with_name(f"{number:016x}")
        shutil.copytree(run, copy)
        place = copy / name
        place.unlink(missing_ok=True)
        os.mkfifo(place)
        if name.startswith(("seed", "checkpoint", "running")):  # which an unfinished run has
            (copy / "result.json").unlink(missing_ok=True)
    os.mkfifo(own_home / "grids" / "pipe.jsonl")
    for _ in range(3):
        changes = client.ask("/api/changes?since=0")
        assert changes.code == 200
    assert run.name in {r["name"] for r in changes.data["runs"]}
    for number in range(len(names)):
        assert client.ask(f"/api/run/{number:016x}").code in (200, 404)
