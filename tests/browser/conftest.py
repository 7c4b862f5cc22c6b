"""Chromium without a network, and reports of real runs to open in it."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import ok
from homes import made_once
from made_path import extracted, place_of
from pictures import folder

from fedcache.runs.directory import read_result, write_result

QUIET = """
    --no-sandbox --disable-gpu --disable-quic --disable-background-networking --disable-component-update --disable-sync
"""
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium():
    """A running browser, Debian's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = next((p for n in NAMES if (p := shutil.which(n))), None)
    if program is None:
        pytest.fail("No Chromium on the path: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=QUIET.split())
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Opens an address or a file in a window; at the end it has told the console nothing and asked no other host."""

    @contextmanager
    def window(place, size="light"):
        address = place.as_uri() if isinstance(place, Path) else place
        ours = ("/".join(address.split("/")[:3]), "data:", "blob:")
        said = []
        context = chromium.new_context(
            viewport={"width": {"light": 1240, "dark": 1440}.get(size, 390), "height": 900},
            color_scheme="dark" if "dark" in size else "light",
            offline=address.startswith("file:"),
            accept_downloads=True,
        )
        page = context.new_page()
        page.on("console", lambda m: said.append(f"console {m.type}: {m.text}"))
        page.on("pageerror", lambda e: said.append(f"error: {e}"))
        page.on("dialog", lambda d: said.append(f"dialog: {d.message}"))
        page.on("request", lambda r: None if r.url.startswith(ours) else said.append(r.url))
        page.goto(address)
        page.wait_for_selector("h1")
        yield page
        assert said == []
        context.close()

    return window


def made_demo(place):
    """A report of runs in two settings, with curves, two backbones and a class whose name is a script."""
    images = folder(place / "shapes", train=16, test=6)
    for split in ("train", "test"):
        sorted((images / split).iterdir())[0].rename(images / split / "<script>alert(1)<∕script>")
    ok(
        f"extract --dataset folder:{images} --backbones random-projection,random-projection:16 "
        "--size 8"
    )
    iid = "--scheme iid --clients 12 --participation all"
    ok(
        f"train --method fedavg --backbones random-projection {iid} --rounds 4 --eval-every 1 "
        "--seeds 0-2 --set batch=2 --set bn=false --set lr=0.00001"
    )
    ok(f"train --method fed3r --backbones random-projection,random-projection:16 {iid}")
    ok("train --method fed3r --backbones random-projection --scheme iid --clients 3")
    return report(place)


def made_grid(place):
    """A report of 240 points: one trained run, and 239 results that differ from it in numbers and the accuracy."""
    extracted(place, "random-projection --size 8")
    iid = "--scheme iid --clients 4"
    made = place_of(f"train fedavg {iid} --rounds 2 --set batch=2 --eval-every 1 --seeds 0-2")
    result = read_result(made / "result.json")
    for i in range(1, 240):
        copy = shutil.copytree(made, made.with_name(f"{i:016x}"))
        values = {
            "lr": [0.3, 0.1, 0.03, 0.01, 0.003, 0.001][i % 6],
            "wd": [0.0, 1e-4, 1e-3, 1e-2][i // 6 % 4],
            "momentum": 0.05 + i // 24 / 10,
        }
        mean = 0.3 + i / 500
        per_seed = [mean - 0.01, mean, mean + 0.01]
        changed = {
            "digest": f"{i:016x}{result['digest'][16:]}",
            "accuracy": {**result["accuracy"], "mean": mean, "per_seed": per_seed},
            "hyperparameters": {**result["hyperparameters"], **values},
        }
        write_result(copy / "result.json", {**result, **changed})
    made_of = report(place)
    assert made_of.read_text(encoding="utf-8").count("<tr data-run") == 240
    return made_of


def made_mistakes(place):
    """A report with the images of what a run got wrong, of classes whose names are long."""
    images = folder(place / "shapes", train=4, test=8, classes=6)
    for split in ("train", "test"):
        for of_class in sorted((images / split).iterdir()):
            of_class.rename(f"{of_class}-with_a_name_that_has_no_room_in_a_narrow_column")
    ok(f"extract --dataset folder:{images} --backbones random-projection --size 8")
    ok("train --method fed3r --preset paper --scheme iid --clients 4")
    return report(place, "--with-images")


def report(place, *words):
    """All runs of the home as a page."""
    ok(f"report -o {place}/report.html", *words)
    return place / "report.html"


demo = made_once(made_demo)
grid = made_once(made_grid)
mistakes = made_once(made_mistakes)
