"""What the page's server lets in, and what it answers of homes as they come: empty, whole, damaged, at work."""

import json
import os
import re
import shutil
import time
from urllib.parse import quote, unquote, unquote_plus

import pytest
from command import data_of, ok
from homes import made_once
from made_path import extracted, place_of
from ui_client import Client

from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.runs.directory import LOCK, WRITTEN, owning, read_result, write_result
from fedcache.store.files import first_of, read_sealed_lines, write_sealed, write_sealed_lines
from fedcache.store.lock import this_process
from fedcache.ui import server

IID = "--scheme iid --clients 4"


@made_once
def run(place):
    """A home with one store, two finished runs of one setting, and a grid of two points."""
    extracted(place, "random-projection --size 8")
    words = f"{IID} --rounds 3 --eval-every 1 --set batch=4 --seeds 0,1"
    made = place_of(f"train --method fedavg {words}")
    ok(f"train --method fed3r {IID} --seeds 0,1")
    ok(f"grid --method fedprox {words} --sweep mu=0.1,1")
    return made


@pytest.fixture
def client(run, own_home):
    made = Client(own_home)
    made.read()
    return made


def in_progress(run, name):
    """A copy of a finished run as one that is not: without a result, with a checkpoint of seed 0."""
    import torch

    left = run.parent / name
    left.mkdir()
    shutil.copy(run / "config.toml", left)
    write_sealed(left / WRITTEN, {"kind": "files of a run"}, {"config.toml": ""})
    traffic = {"up_bytes": 100, "down_bytes": 10}
    each = {"clients": [0], "seconds": 2.0, "traffic": traffic, "diagnostics": {}}
    records = [{**each, "round": 1, "accuracy": None}, {**each, "round": 2, "accuracy": 0.2}]
    state = json.dumps({"round": 2, "records": records})
    tensors = {"server/w": torch.zeros(3)}
    write_sealed(left / "checkpoint-0.safetensors", {"kind": "checkpoint"}, state, tensors)
    return left


@pytest.mark.slow
def test_only_who_knows_the_token_on_this_machine_is_answered(client):
    assert client.ask("/").code == 200
    for token in ("", "T0ken", "t0ken%00"):
        assert client.ask("/runs", token=token).code == 403, token
    for host in ("127.0.0.1", "localhost:99", "[::1]"):
        assert client.ask("/", headers={"host": host}).code == 200, host
    for host in ("", "evil.example", "127.0.0.1.evil.example:4321", "0.0.0.0"):
        assert client.ask("/", headers={"host": host}).code == 403, host
    for site in ("cross-site", "same-site"):
        assert client.ask("/", headers={"sec-fetch-site": site}).code == 403
    for method in ("POST", "OPTIONS"):
        assert client.ask("/runs", method=method).code == 405


def test_every_answer_forbids_other_sources_frames_and_keeping(client, run):
    paths = ("/", "/static/ui.css", "/runs", f"/run?name={run.name}", "/run?name=x", "/nothing")
    for path in paths:
        head = client.ask(path).headers
        for part in ("default-src 'none'", "script-src 'self';", "frame-ancestors 'none'"):
            assert part in head["content-security-policy"]
        assert head["cache-control"] == "no-store"
        assert head["referrer-policy"] == "no-referrer"
        assert head["x-content-type-options"] == "nosniff"
        assert not {"set-cookie", "access-control-allow-origin"} & head.keys()


def test_no_path_leads_out_of_the_home(client, own_home):
    (own_home.parent / "secret.txt").write_text("secret")
    for path in (
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/base.html.j2",
        "/run?name=%2e%2e",
        "/store?name=..%2f..",
        "/grid?name=..%2f..%2fx",
        "/report/../x.html",
        "/images?name=..%2fruns",
    ):
        for asked in (path, unquote(path)):
            found = client.ask(asked)
            assert found.code == 404, asked
            assert b"secret" not in found.body


def test_an_empty_home_and_one_that_is_not_there_are_answered(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        client = Client(place)
        assert client.read() == []
        assert "Nothing is here yet" in client.ask("/").words
        for page in ("runs", "grids", "stores"):
            assert f"There is no {page[:-1]} yet" in client.ask(f"/{page}").words
    assert not (tmp_path / "none").exists(), "who only reads makes nothing"


def test_a_page_shows_the_figures_of_a_result_and_commands_that_work(client, run):
    accuracy = read_result(run / "result.json")["accuracy"]
    page = client.ask(f"/run?name={run.name}")
    assert f"accuracy % {100 * accuracy['mean']:.2f}" in page.words
    for seed, score in enumerate(accuracy["per_seed"]):
        assert f"seed {seed} {100 * score:.2f}" in page.words
    assert page.body.count(b'data-run="seed 0"') > 0, "a line of the curves is a seed"
    assert data_of(re.search(f"fedcache (evaluate {run.name} .*?) Copy", page.words)[1])


def test_names_of_a_dataset_are_text_on_every_page(client, run):
    facts = client.pages.runs.facts(run.name)
    facts["dataset"] = facts["settings"]["lr"] = "<script>alert(1)</script>"
    for path in ("/runs", f"/run?name={run.name}", f"/runs?filter={quote('<script>')}"):
        body = client.ask(path).body
        assert b"<script>alert" not in body
        assert b"&lt;script&gt;" in body


def test_runs_are_filtered_by_words_and_state_and_sorted_by_each_column(client, run):
    left = in_progress(run, "a" * 16)
    every = {r["name"]: r for r in client.read()}

    def names(words):
        return re.findall(r'href="run\?name=(\w+)"', client.ask(f"/runs?{words}").body.decode())

    assert names("state=stopped") == [left.name]
    (found,) = names("filter=fedprox+mu%3D0.1+iid")
    assert every[found]["settings"]["mu"] == "0.1"
    columns = set(re.findall(r"sort=([^&\"]+)", client.ask("/runs").body.decode()))
    assert {"method", "accuracy", "changed", "state"} < columns
    for column in columns:
        key = unquote_plus(column)
        values = [every[n].get(key) for n in names(f"sort={column}&order=up")]
        known = sorted(v for v in values if v is not None)
        assert values == known + [None] * (len(every) - len(known)), "what is not known comes last"
    refused = client.ask("/runs?sort=settings")
    assert refused.code == 404
    assert "cannot be sorted by settings" in refused.body.decode()


def test_the_overview_names_the_best_run_of_the_newest_setting_as_the_report_does(client):
    done = data_of("train --method fedncm --scheme iid --clients 3")
    client.read()
    page = client.ask("/")
    assert (
        f"Best method for the newest setting: shapes, iid-m3-s0 fedncm : {100 * done['accuracy']['mean']:.2f} %"
        in page.words
    )
    assert "Best in 2 settings (sure in" in page.words
    for name in ("Selected by", "How sure", "Cost"):
        assert name in page.words


def test_a_grid_at_work_shows_the_run_of_a_point_that_has_not_ended(client, run, own_home):
    (line,) = client.pages.grids.lines()
    ended = line["points"]
    path = own_home / f"grids/{line['name']}.jsonl"
    sealed_for = first_of({"kind": "record of a grid", "grid": path.stem})
    first, one, *_ = read_sealed_lines(path, sealed_for)
    at_work = {**first, "process": this_process(), "started": time.time() - 5}
    write_sealed_lines(path, [at_work, one], sealed_for)
    (line,) = client.pages.grids.lines()
    (other,) = (p for p in line["points"] if p["run"] is None)
    assert other["state"] == "waiting"
    (source,) = (p["run"] for p in ended if p["sweep"] == other["sweep"])
    with owning([in_progress(own_home / f"runs/{source}", "b" * 16)], Silent(), Stop()):
        client.read()
        (line,) = client.pages.grids.lines()
        page = client.ask(f"/grid?name={line['name']}")
    assert [p["state"] for p in line["points"]] == ["finished", "running"]
    assert line["points"][1]["run"] == "b" * 16
    assert line["share"] == pytest.approx((1 + 2 / 6) / 2)
    assert "1 of 2 configurations done, 1 running" in page.words
    assert "about 8 s left" in page.words


def test_a_run_at_work_is_read_from_its_checkpoint_and_one_that_was_killed_is_stopped(client, run):
    version = client.pages.version
    left = in_progress(run, "a" * 16)
    with owning([left], Silent(), Stop()):
        client.read()
        page = client.ask(f"/run?name={left.name}")
        assert "fedavg running" in page.words
        # 2 s a round, and 4 rounds to go
        assert "2 of 6 rounds, accuracy 20.00 % in round 2, 200B up, 8 s left" in page.words
        assert f"fedcache train --config {left / 'config.toml'}" in page.words
    assert client.pages.version > version
    # Killed: the system ends the lock and leaves its file, and the page knows.
    (left / LOCK).touch()
    client.read()
    page = client.ask(f"/run?name={left.name}")
    assert "fedavg stopped" in page.words
    assert "2 of 6 rounds, accuracy 20.00 % in round 2, 200B up" in page.words
    assert "left" not in page.words


@pytest.mark.parametrize("what", ["result", "rounds", "config", "checkpoint"])
def test_a_damaged_run_is_named_and_hides_no_other(client, run, what):
    count = len(client.read())
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
    found = fresh.read()
    mine = {r["name"]: r for r in found}[left.name]
    assert len(found) == count + 1
    page = fresh.ask(f"/run?name={left.name}")
    if what == "checkpoint":
        assert mine["done"] == 0
        return
    assert mine["state"] == "damaged"
    assert f"{mine['problem']} {mine['hint']}" in page.words
    if what == "rounds":
        assert "rounds.jsonl" in page.words


def test_a_comparison_is_that_of_the_command_line(client):
    names = sorted(r["name"] for r in client.read() if r["method"] in ("fedavg", "fed3r"))
    page = client.ask(f"/compare?runs={','.join(names)}")
    (table,) = data_of(re.search("fedcache (compare .*?) Copy", page.words)[1])["comparisons"]
    for one in table["treatments"]:
        assert f"{one['name']} {100 * one['mean']:.2f}" in page.words
    wrong = client.ask(f"/compare?runs={names[0]}&over=nothing")
    assert "Pair values over" in wrong.words, "another choice can be made"


@pytest.mark.slow
def test_a_report_is_written_beside_the_server_and_is_that_of_the_command_line(client, tmp_path):
    names = [r["name"] for r in client.read()]
    path = f"/report?runs={','.join(names)}"
    assert "is being written" in client.ask(path).words
    version = client.pages.version
    end = time.monotonic() + 200
    while "is being written" in client.ask(path).words and time.monotonic() < end:
        time.sleep(0.2)
    client.read()
    assert client.pages.version > version, "a window that shows it is told"
    (ident,) = re.findall(rb'src="report/(\w+).html"', client.ask(path).body)
    answer = client.ask(f"/report/{ident.decode()}.html")
    ok("report", *names, "-o", tmp_path / "own.html")
    same = answer.body == (tmp_path / "own.html").read_bytes()
    assert same, "pytest would compare half a megabyte line by line"


def test_a_store_is_described_and_its_images_come_when_they_are_asked_for(client):
    (line,) = client.pages.stores.lines()
    told = data_of("inspect", line["name"])
    page = client.ask(f"/store?name={line['name']}")
    assert f"{told['ok']} of {told['images']}" in page.words
    for name in told["classes"]:
        assert re.search(rf"{name} \d", page.words)
    assert b"<img" not in page.body
    images = client.ask(f"/images?name={line['name']}&start=4").body
    assert images.count(b'<img src="data:image/') == 24


@pytest.mark.slow
def test_a_look_at_ten_thousand_runs_asks_for_a_share_of_their_times_and_reads_none(
    own_home, monkeypatch
):
    """After the first reading a look takes as many operations as there are changes, and a thirtieth of the runs."""
    count = 10_000
    for i in range(count):
        (own_home / f"runs/{i:016x}").mkdir(parents=True)
    monkeypatch.setattr(server, "read_run", lambda path: {"name": path.name, "state": "finished"})
    monkeypatch.setattr(server, "RECENT", 0)
    runs = server.RunIndex(own_home / "runs")
    runs.look()
    while runs.waiting:
        runs.look()
    assert runs.reads == count
    version = runs.version
    for _ in range(3):
        stats = runs.stats
        reads = runs.reads
        runs.look()
        assert runs.stats - stats <= 1 + -(-count // server.SHARE)
        assert runs.reads == reads
    assert runs.version == version
    # Within so many looks every run that was written anew is found, and it alone is read.
    os.utime(own_home / f"runs/{77:016x}", ns=(1, 1))
    for _ in range(server.SHARE):
        runs.look()
    assert runs.reads == count + 1
    assert len(runs.every()) == count


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
@pytest.mark.timeout(60)  # a page that opens a pipe waits for ever
def test_a_pipe_in_the_place_of_any_file_hides_and_hinders_nothing(client, run, own_home):
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
    os.mkfifo(own_home / "grids/pipe.jsonl")
    for _ in range(3):
        assert run.name in {r["name"] for r in client.read()}
        assert client.ask("/runs").code == 200
    for number in range(len(names)):
        assert client.ask(f"/run?name={number:016x}").code in (200, 404)
