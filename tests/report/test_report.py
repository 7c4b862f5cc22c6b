"""The HTML report: whole, self-contained, escaped, true to the results, and a page also when there is nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import fedcache, ok
from pictures import folder

import fedcache as fc
from fedcache.errors import MachineError
from fedcache.report import page, render
from fedcache.report.drawing import draw
from fedcache.report.figures.runs import confusion
from fedcache.report.find_runs import StoredRun, gather
from fedcache.report.model_card import accuracy_lines
from fedcache.report.run_names import by_setting, differing, labels
from fedcache.report.run_origin import command_of
from fedcache.runs.directory import read_result, write_result
from fedcache.runs.origin import store_behind

IID = ("--scheme", "iid", "--clients", 4, "--participation", "all")
TWO = "random-projection,random-projection:16"
HOSTILE = "<img src=x onerror=alert(1)>"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart: every tag is closed, and what it holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, str] = {}
        self.hidden: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.hidden.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.hidden[-1] += data

    def figures(self) -> dict[str, list[list[str]]]:
        """id of every figure -> the rows of its CSV."""
        ids = [str(a["id"]) for t, a in self.tags if t == "figure"]
        return {i: list(csv.reader(io.StringIO(h))) for i, h in zip(ids, self.hidden, strict=True)}


def extracted(place: Path) -> Path:
    images = folder(place / "shapes", train=12, test=4)
    (images / "train").rename(images / "kept")
    for split in ("kept", "test"):
        first = sorted((images / split).iterdir())[0]
        first.rename(images / split / HOSTILE.replace("/", "∕"))
    (images / "kept").rename(images / "train")
    done = ok(
        "extract", "--dataset", f"folder:{images}", "--backbones", "random-projection,random-projection:16", "--size", 8
    )
    return Path(done.data["path"])


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(extracted)


def made(tmp_path: Path, *words: object) -> tuple[Page, str, dict[str, Any]]:
    out = tmp_path / "r.html"
    done = ok("report", *words, "-o", out)
    text = out.read_text(encoding="utf-8")
    return Page(text), text, done.data


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_report_is_whole_escaped_and_asks_for_nothing(tmp_path: Path) -> None:
    ok("train", "--method", "fedavg", "--backbones", "random-projection", *IID, "--rounds", 3, "--eval-every", 1,
       "--seeds", "0,1")  # fmt: skip
    ok("train", "--method", "fed3r", "--backbones", "random-projection,random-projection:16", *IID)
    page, text, told = made(tmp_path)
    assert told == {
        "path": str(tmp_path / "r.html"),
        "runs": 2,
        "left_out": 0,
        "bytes": len(text.encode()),
        "images": 0,
        "mistakes": 0,
    }
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    links = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href") and v]
    assert links
    assert all(v.startswith("#") for v in links)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", text)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert [t for t, _ in page.tags].count("script") == 1
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(v[1:] in ids for v in links)
    assert made(tmp_path)[1] == text  # the same runs give the same bytes


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_the_data_behind_figures_are_the_results(tmp_path: Path) -> None:
    run = ok("train", "--method", "fedavg", "--backbones", "random-projection", *IID, "--rounds", 3, "--eval-every", 1,
             "--seeds", "0,1").data  # fmt: skip
    closed = ok("train", "--method", "fed3r", "--backbones", "random-projection,random-projection:16", *IID).data
    page, text, _ = made(tmp_path)
    found = page.figures()
    curves = found["s0-curves"][1:]
    last = {int(s): float(a) for _, s, r, a in curves if r == "3"}
    assert [last[0], last[1]] == pytest.approx(run["accuracy"]["per_seed"], rel=1e-5)
    told = dict(re.findall(r"fedavg: round (\d), ([\d.]+) %", text))
    assert list(told) == ["1", "2", "3"]
    assert float(told["3"]) == pytest.approx(100 * run["accuracy"]["mean"], abs=0.006)
    assert len(set(run["accuracy"]["per_client"])) == 1, "one model on the same rows for every client"
    assert "s0-clients" not in found, "which is no figure of clients"
    confusion = next(rows for i, rows in found.items() if "confusion" in i)[1:]
    best = max(closed, run, key=lambda r: r["accuracy"]["mean"])  # of equals fed3r, the first by name
    assert sum(int(n) for *_, n in confusion) == sum(map(sum, best["confusion"]))
    right = sum(int(n) for a, b, n in confusion if a == b)
    assert right / sum(int(n) for *_, n in confusion) == pytest.approx(best["accuracy"]["mean"])
    dots = found["s0-dots"][1:]
    assert sum(int(n) for *_, n in dots) == 36  # training rows: 3 classes of 12
    assert HOSTILE.replace("/", "∕") in {name for _, name, _ in dots}
    assert {"s0-plane0", "s0-plane1", "s0-fusion"} <= found.keys()
    cost = {row[0]: float(row[1]) for row in found["s0-bytes"][1:]}
    exact = closed["traffic"]["exact"]
    assert cost["fed3r"] == exact["up_bytes"] + exact["down_bytes"]
    assert f"{100 * best['accuracy']['mean']:.2f}" in text


@pytest.mark.slow
def test_a_grid_is_a_heatmap_with_its_best_point(tmp_path: Path, store: Path) -> None:
    done = ok("grid", "--method", "fedavg", "--store", store.name, "--backbones", "random-projection", *IID,
              "--rounds", 1, "--set", "opt=sgd", "--sweep", "lr=0.1,0.01,0.001",
              "--sweep", "batch=4,8").data  # fmt: skip
    page, text, told = made(tmp_path)
    assert told["runs"] == 6
    rows = page.figures()["s0-grid-0"]
    assert rows[0] == ["batch", "lr", "accuracy"]
    assert {(a, b) for b, a, _ in rows[1:]} == {(a, b) for a in ("0.1", "0.01", "0.001") for b in ("4", "8")}
    best = max(p["accuracy"]["mean"] for p in done["points"])
    assert max(float(a) for *_, a in rows[1:]) == pytest.approx(best, rel=1e-5)
    assert "fedavg: lr and batch" in text
    titles = re.findall(r"<title>([^<]*)</title>", text)
    assert sum("lr=0.01, batch=4" in t or "batch=4, lr=0.01" in t for t in titles) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_the_printed_command_gives_the_same_run(tmp_path: Path, own_home: Path) -> None:
    ok("train", "--method", "fedavg", "--backbones", "random-projection", "--scheme", "dirichlet", "--alpha", 0.5,
       "--clients", 3, "--participation", 2, "--rounds", 2, "--set", "lr=0.02", "--set", "batch=4", "--seeds", "1,2",
       "--preset", "official", "--attack", "sign-flip:0.4")  # fmt: skip
    spec = json.loads((own_home / "last.json").read_text())["content"]["spec"]
    ok("train", "--method", "fedncm", "--dataset", spec, "--backbones", "random-projection", *IID)
    ok("partition", "--scheme", "iid", "--clients", 3, "--name", "mine")
    ok("train", "--method", "fed3r", "--backbones", "random-projection:16", "--partition", "mine")
    for entry in gather([], own_home / "runs").entries:
        found = store_behind(entry.path, entry.result)
        assert found is not None
        words = shlex.split(command_of(entry, found.path.name))
        assert words[0] == "fedcache"
        again = ok(*words[1:]).data
        assert again["reused"], words
        assert again["digest"] == entry.result["digest"]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_what_cannot_be_shown_is_named_with_what_helps(tmp_path: Path, own_home: Path) -> None:
    for lr in (0.1, 0.2, 0.3):
        ok("train", "--method", "fedavg", "--backbones", "random-projection", *IID, "--rounds", 1, "--set", f"lr={lr}")
    damaged, unfinished, whole = sorted((own_home / "runs").iterdir())
    raw = bytearray((damaged / "result.json").read_bytes())
    raw[40] ^= 1
    (damaged / "result.json").write_bytes(raw)
    (unfinished / "result.json").unlink()
    _, text, told = made(tmp_path)
    assert (told["runs"], told["left_out"]) == (1, 2)
    assert damaged.name in text
    assert "--fresh runs it again" in text
    assert f"fedcache train --config {unfinished / 'config.toml'}" in text
    listed = ok("ls", "--runs")
    assert [e["name"] for e in listed.data["entries"]] == [whole.name]
    assert len(listed.data["left_out"]) == 2
    resumed = ok("train", "--config", unfinished / "config.toml")
    assert resumed.data["path"] == str(unfinished)


@pytest.mark.slow
def test_partitions_of_one_scheme_are_different_settings_with_names_of_their_own(tmp_path: Path, store: Path) -> None:
    for words in (("--alpha", 0.3), ("--alpha", 5), ("--alpha", 0.3, "--seed", 1)):
        for method in ("fed3r", "fedncm"):
            ok("train", "--method", method, "--store", store.name, "--backbones", "random-projection",
               "--scheme", "dirichlet", "--clients", 3, *words)  # fmt: skip
    page, text, _ = made(tmp_path)
    titles = re.findall(r"<h2>(shapes, [^<]*)</h2>", text)
    assert len(set(titles)) == 3
    assert {s for _, s, _ in page.figures()["across"][1:]} == set(titles)
    assert len(page.figures()["across"]) == 1 + 6


@pytest.mark.slow
def test_the_newest_of_runs_that_differ_in_the_code_alone_is_shown(tmp_path: Path, store: Path, own_home: Path) -> None:
    words = ("train", "--method", "fed3r", "--store", store.name, "--backbones", "random-projection", *IID)
    new = Path(ok(*words).data["path"])
    old = own_home / "runs" / ("0" * 16)
    shutil.copytree(new, old)
    result = read_result(old / "result.json")
    write_result(old / "result.json", {**result, "code": "f" * 64, "digest": "0" * 64})
    os.utime(old / "config.toml", (1, 1))
    _, text, told = made(tmp_path)
    assert (told["runs"], told["left_out"]) == (1, 1)
    assert "is the same run by older code" in text
    assert made(tmp_path, new, old)[2]["runs"] == 2  # named, it is shown


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("noise", "drawn"), [(("--dp-allow", "evaluation"), False), (("--dp-seed", "0"), True)])
def test_rows_and_features_are_drawn_of_a_private_run_only_where_it_is_a_simulation(
    tmp_path: Path, noise: tuple[str, str], drawn: bool
) -> None:
    private = ("--dp-clip", 1, "--dp-noise", 1, *noise)
    ok("train", "--method", "fedavg", "--backbones", "random-projection", "--rounds", 1, *IID, *private)
    page, text, _ = made(tmp_path)
    assert ("s0-dots" in page.figures(), "s0-plane0" in page.figures()) == (drawn, drawn)
    assert ("its epsilon covers neither who holds which rows" in text) is not drawn


@pytest.mark.slow
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    "bad", ['{"seconds": null}', '{"seconds": {"train": "abc"}}', "[]", '{"seconds": {"train": NaN}}']
)
def test_lost_measurements_are_a_dash(tmp_path: Path, bad: str) -> None:
    run = ok("train", "--method", "fed3r", "--backbones", "random-projection", *IID).data
    (Path(run["path"]) / "measured.json").write_text(bad)
    page, _, told = made(tmp_path)
    assert told["runs"] == 1
    assert "s0-seconds" not in page.figures()


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_settings_stand_apart_and_results_of_before_have_less(tmp_path: Path, own_home: Path) -> None:
    ok("train", "--method", "fed3r", "--backbones", "random-projection", *IID)
    ok("train", "--method", "fed3r", "--backbones", "random-projection:16", "--scheme", "iid", "--clients", 2)
    ok("train", "--method", "fedncm", "--backbones", "random-projection:16", "--scheme", "iid", "--clients", 2)
    old = sorted((own_home / "runs").iterdir())[0] / "result.json"
    result = read_result(old)
    for key in ("confusion", "class_names"):
        del result[key]
    write_result(old, result)
    page, text, _ = made(tmp_path)
    assert [a["id"] for t, a in page.tags if t == "section" and a.get("id")] == [
        "verdict",
        "s0",
        "s1",
        "across",
        "again",
    ]
    assert "stand apart and are not averaged" in text
    recipes = re.findall(r'<th scope="row">(random-projection\S*)</th><td>(.*?)</td>', text)
    assert [re.findall(r"backbone ([^,]+)", told) for _, told in recipes] == [
        ["random-projection"], ["random-projection:16"]
    ], "of both settings"  # fmt: skip
    assert "Results of earlier versions hold no confusion matrix" in text
    assert len(page.figures()["across"]) == 1 + 4  # two methods in two settings


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nothing-like-it",), 2, "There is no run 'nothing-like-it'"),
        (("-o", "away/r.html"), 2, "does not exist"),
        (("-o", "r.pdf"), 2, "is no HTML file"),
        (("--embed", "tnse"), 2, "Did you mean 'tsne'"),
        (("--embed", "umap"), 6, "umap-learn"),
        (("--runs", "nowhere"), 2, "There is no directory nowhere"),
        (("",), 2, "empty name"),
    ],
)
def test_wrong_words_are_answered(
    words: tuple[str, ...], code: int, said: str, monkeypatch: Any, tmp_path: Path
) -> None:

    monkeypatch.setitem(sys.modules, "umap", None)
    monkeypatch.chdir(tmp_path)
    done = fedcache("report", *words, "--json")
    assert done.code == code
    assert said in json.dumps(done.envelope["error"])
    assert list(tmp_path.glob("*.html")) == []


@pytest.mark.slow
def test_python_takes_runs_grids_points_and_paths(tmp_path: Path, store: Path) -> None:
    parts = fc.partition(store, "iid", clients=3)
    run = fc.train("fed3r", store, parts, backbones=["random-projection:16"])
    grid = fc.grid("fed3r", store, parts, lam=[0.1, 1.0], options={"backbones": ("random-projection:16",)})
    done = fc.report([run, grid.best(), grid, run.path], tmp_path / "report.html", title="Mine & yours", embed="tsne")
    assert done.runs == 3
    assert repr(done).startswith("Report(")
    assert "<h1>Mine &amp; yours</h1>" in (tmp_path / "report.html").read_text()
    with pytest.raises(fc.FedcacheError, match="int is no run"):
        fc.report([3], tmp_path / "report.html")
    with pytest.raises(fc.FedcacheError, match="no run in what was given"):
        fc.report([], tmp_path / "report.html")
    assert fc.report(iter([run]), tmp_path / "report.html").runs == 1
    with pytest.raises(fc.FedcacheError, match="features by backbone"):
        fc.Store.from_arrays([[1.0]])  # type: ignore[arg-type]
    crane = fc.Store.from_arrays({"x": [[1.0], [2.0], [3.0]]}, labels=[0, 1, 1], classes=["crane", "crane"])
    assert crane.samples.classes == ("crane #0", "crane #1")


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_labels_tell_runs_apart_and_name_what_differs_alone(own_home: Path) -> None:
    ok(
        "grid",
        "--method",
        "fedavg,fedprox",
        "--backbones",
        "random-projection:16",
        *IID,
        "--rounds",
        1,
        "--sweep",
        "lr=0.1,0.2",
    )
    ok("train", "--method", "fed3r", "--backbones", "random-projection", *IID)
    (entries,) = by_setting(gather([], own_home / "runs").entries)
    assert sorted(labels(entries)) == ["fed3r", "fedavg lr=0.1", "fedavg lr=0.2", "fedprox lr=0.1", "fedprox lr=0.2"]
    assert differing(entries)[:2] == ["method", "backbones"]
    (one,) = gather([entries[0].digest[:10]], own_home / "runs").entries
    assert one.digest == entries[0].digest


def test_a_drawing_has_named_colours_own_ids_words_and_whole_numbers() -> None:
    def fill(axes: Any, marks: Any) -> None:
        marks(axes.scatter([0, 1], [0.123456789, 1]), ["a < b", "second & last"])
        axes.set_xticks([0, 1], ["0.00012345", "<b>"])

    svg = draw("f7", fill, says="of <two>")
    assert "#0f00" not in svg
    assert "var(--s0, #2563eb)" in svg
    assert svg.count("<title>") == 2
    assert "<title>a &lt; b</title>" in svg
    assert "0.00012345" in svg  # numbers of the drawing are cut, those that are read are not
    ids = re.findall(r'id="([^"]*)"', svg)
    assert all(i.startswith("f7-") for i in ids)
    meant = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', svg)
    assert meant
    assert {one or other for one, other in meant} <= set(ids), "what clips and what is used are its own"
    assert 'aria-label="of &lt;two&gt;"' in svg


def test_of_many_classes_the_most_frequent_mistakes_are_listed() -> None:
    table = np.diag(np.full(40, 9))
    for mistake, (i, j) in enumerate([(3, 7), (7, 3), (0, 39), *((k, k + 1) for k in range(10, 30))]):
        table[i, j] = 100 - mistake
    entry = StoredRun(Path("x"), {"confusion": table.tolist()}, {})
    drawn = confusion("c", "fedavg", entry)
    assert drawn is not None
    places = [drawn.svg.find(f"{i} taken for {j}: ") for i, j in ((3, 7), (7, 3), (0, 39), (10, 11), (21, 22))]
    assert places == sorted(places)
    assert min(places) > 0
    assert "22 taken for 23: " not in drawn.svg, "fifteen are listed"
    table = np.diag(np.full(40, 9))
    assert confusion("c", "fedavg", StoredRun(Path("x"), {"confusion": table.tolist()}, {})) is None


def test_the_card_gives_every_seed_its_interval_and_the_mean_of_several() -> None:
    base = {"protocol": "global", "seeds": [0, 1, 2], "confusion": [[9, 3], [3, 15]]}
    accuracy = {"per_seed": [0.8, None, 0.123], "mean": 0.5, "std": None}
    assert accuracy_lines({**base, "accuracy": accuracy}) == [
        "Seed 0: 80.00 %, one model on the global test rows (10); 95 % Wilson interval 49.02 to 94.33 %.",
        "Seed 2: 12.30 %, one model on the global test rows.",
        "Mean of 3 seeds: 50.00 %, standard deviation 0.00 points.",
    ]
    none = {"per_seed": [None], "mean": None, "std": None}
    assert accuracy_lines({**base, "seeds": [0], "accuracy": none}) == ["No row was scored."]


def test_versions_of_what_is_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "VERSIONS", ("numpy", "no-such-package-as-this"))
    assert render._versions() == [("numpy", np.__version__)]


def test_a_report_needs_a_folder_it_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.os, "access", lambda *_: False)
    with pytest.raises(MachineError) as caught:
        page.write_report([], tmp_path / "r.html", tmp_path)
    assert caught.value.message == f"{tmp_path} cannot be written to."
