"""The HTML report: whole, self-contained, escaped, true to the results, and a page also when there is nothing."""

import csv
import io
import json
import os
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser

import pytest
from command import data_of, ok
from damage import flip_bit
from failing_command import must_fail
from homes import made_once
from made_path import place_of
from pictures import hostile_folder

import fedcache as fc
from fedcache.report import page
from fedcache.report.find_runs import gather
from fedcache.report.run_origin import command_of
from fedcache.runs.directory import read_result, write_result
from fedcache.runs.origin import store_behind

IID = "--scheme iid --clients 4 --participation all"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart: every tag is closed, and what it holds."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tags = []
        self.data = {}
        self.hidden = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.hidden.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "pre":
            self.hidden[-1] += data

    def figures(self):
        """id of every figure -> the rows of its CSV."""
        ids = [str(a["id"]) for t, a in self.tags if t == "figure"]
        return {i: list(csv.reader(io.StringIO(h))) for i, h in zip(ids, self.hidden, strict=True)}


@made_once
def store(place):
    images = hostile_folder(place / "shapes", train=12, test=4)
    return place_of(
        f"extract --dataset folder:{images} --backbones random-projection,random-projection:16 "
        "--size 8"
    )


def made(tmp_path, *words):
    out = tmp_path / "r.html"
    done = data_of("report", *words, "-o", out)
    text = out.read_text(encoding="utf-8")
    return Page(text), text, done


@pytest.mark.slow
def test_a_report_is_whole_escaped_asks_for_nothing_and_has_the_results(store, tmp_path):
    run = data_of(
        f"train --method fedavg --backbones random-projection {IID} --rounds 3 "
        "--eval-every 1 --seeds 0,1"
    )
    closed = data_of(
        f"train --method fed3r --backbones random-projection,random-projection:16 {IID}"
    )
    page, text, _ = made(tmp_path)
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    links = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href") and v]
    assert all(v.startswith("#") for v in links)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", text)
    policy = next(
        a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(v[1:] in ids for v in links)
    assert made(tmp_path)[1] == text  # the same runs give the same bytes
    found = page.figures()
    last = {int(s): float(a) for _, s, r, a in found["s0-curves"][1:] if r == "3"}
    assert [last[0], last[1]] == pytest.approx(run["accuracy"]["per_seed"], rel=1e-5)
    confusion = next(rows for i, rows in found.items() if "confusion" in i)[1:]
    # of equals fed3r, the first by name
    best = max(closed, run, key=lambda r: r["accuracy"]["mean"])
    assert sum(int(n) for *_, n in confusion) == sum(map(sum, best["confusion"]))
    assert sum(int(row[-1]) for row in found["s0-dots"][1:]) == 36  # training rows: 3 classes of 12
    cost = {row[0]: float(row[1]) for row in found["s0-bytes"][1:]}
    exact = closed["traffic"]["exact"]
    assert cost["fed3r"] == exact["up_bytes"] + exact["down_bytes"]


@pytest.mark.slow
def test_the_printed_command_gives_the_same_run(store, own_home):
    ok(
        "train --method fedavg --backbones random-projection --scheme dirichlet --alpha 0.5 --clients 3 "
        "--participation 2 --rounds 2 --set lr=0.02 --set batch=4 --seeds 1,2 --preset official --attack sign-flip:0.4"
    )
    spec = json.loads((own_home / "last.json").read_text())["content"]["spec"]
    ok(f"train --method fedncm {IID} --backbones random-projection --dataset", spec)
    ok("partition --scheme iid --clients 3 --name mine")
    ok("train --method fed3r --backbones random-projection:16 --partition mine")
    for entry in gather([], own_home / "runs").entries:
        words = shlex.split(command_of(entry, store_behind(entry.path, entry.result).path.name))
        again = data_of(*words[1:])
        assert again["reused"], words
        assert again["digest"] == entry.result["digest"]


@pytest.mark.slow
def test_what_cannot_be_shown_is_named_with_what_helps(store, tmp_path, own_home):
    for lr in (0.1, 0.2, 0.3):
        ok(f"train --method fedavg --backbones random-projection {IID} --rounds 1 --set lr={lr}")
    damaged, unfinished, whole = sorted((own_home / "runs").iterdir())
    flip_bit(damaged / "result.json", 40)
    (unfinished / "result.json").unlink()
    _, text, told = made(tmp_path)
    assert told["runs"] == 1
    assert told["left_out"] == 2
    assert damaged.name in text
    assert f"fedcache train --config {unfinished / 'config.toml'}" in text
    assert [e["name"] for e in data_of("runs list --state finished")["entries"]] == [whole.name]


@pytest.mark.slow
def test_the_newest_of_runs_that_differ_in_the_code_alone_is_shown(tmp_path, store, own_home):
    new = place_of(f"train --method fed3r --store {store.name} --backbones random-projection {IID}")
    old = own_home / "runs" / ("0" * 16)
    shutil.copytree(new, old)
    result = read_result(old / "result.json")
    write_result(old / "result.json", {**result, "code": "f" * 64, "digest": "0" * 64})
    os.utime(old / "config.toml", (1, 1))
    _, text, told = made(tmp_path)
    assert told["runs"] == 1
    assert told["left_out"] == 1
    assert "is an older result of the same run, made by older code" in text
    assert made(tmp_path, new, old)[2]["runs"] == 2  # named, it is shown


@pytest.mark.parametrize(
    ("noise", "drawn"), [("--dp-allow evaluation", False), ("--dp-seed 0", True)]
)
def test_rows_and_features_are_drawn_of_a_private_run_only_where_it_is_a_simulation(
    store, tmp_path, noise, drawn
):
    private = f"--dp-clip 1 --dp-noise 1 {noise}"
    ok(f"train --method fedavg --backbones random-projection --rounds 1 {IID} {private}")
    page, text, _ = made(tmp_path)
    assert ("s0-dots" in page.figures()) == drawn
    assert ("s0-plane0" in page.figures()) == drawn
    assert ("epsilon does not cover the partition" in text) is not drawn


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("nothing-like-it", 2, "nothing-like-it"),
        ("-o r.pdf", 2, "r.pdf"),
        ("--embed tnse", 2, "'tsne'"),
        ("--embed umap", 6, "umap-learn"),
    ],
)
def test_wrong_words_are_answered(words, code, said, monkeypatch, here):
    monkeypatch.setitem(sys.modules, "umap", None)
    must_fail(said, f"report {words}", code=code)
    assert list(here.glob("*.html")) == []


@pytest.mark.slow
def test_python_takes_runs_grids_points_and_paths(tmp_path, store):
    parts = fc.partition(store, "iid", clients=3)
    run = fc.train("fed3r", store, parts, backbones=["random-projection:16"])
    grid = fc.grid(
        "fed3r", store, parts, lam=[0.1, 1.0], options={"backbones": ("random-projection:16",)}
    )
    out = tmp_path / "report.html"
    done = fc.report([run, grid.best(), grid, run.path], out, title="Mine & yours", embed="tsne")
    assert done.runs == 3
    assert "<h1>Mine &amp; yours</h1>" in out.read_text()


def test_settings_are_in_the_order_of_the_numbers_in_their_names(monkeypatch):
    monkeypatch.setattr(page, "setting_name", str)
    ordered = ["digits, alpha=0.5", "digits, alpha=2", "digits, alpha=10", "digits, iid"]
    shuffled = [ordered[i] for i in (3, 2, 0, 1)]
    assert sorted(shuffled, key=page.order_of_setting) == ordered
