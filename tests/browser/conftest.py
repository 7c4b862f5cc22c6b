"""Chromium without a network, and reports of real runs to open in it."""

import json
import shutil
from pathlib import Path

import pytest
from command import ok
from pictures import folder

from fedcache.runs.directory import read_result, write_result

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium():
    """A running browser, Debian's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = next((p for n in NAMES if (p := shutil.which(n))), None)
    if program is None:
        pytest.fail("No Chromium on the path: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def demo(tmp_path):
    """A report of runs in two settings, with curves, two backbones and a class whose name is a script."""
    images = folder(tmp_path / "shapes", train=16, test=6)
    for split in ("train", "test"):
        first = sorted((images / split).iterdir())[0]
        first.rename(images / split / "<script>alert(1)<∕script>")
    ok(
        f"extract --dataset folder:{images} --backbones random-projection,random-projection:16 "
        "--size 8",
    )
    iid = "--scheme iid --clients 12 --participation all"
    ok(
        f"train --method fedavg --backbones random-projection {iid} --rounds 4 --eval-every 1 "
        "--seeds 0-2 --set batch=2 --set bn=false --set lr=0.00001",
    )
    ok(f"train --method fed3r --backbones random-projection,random-projection:16 {iid}")
    ok(
        "train --method fed3r --backbones random-projection --scheme iid --clients 3",
    )
    return report(tmp_path)


@pytest.fixture
def grid(tmp_path, own_home):
    """A report of 240 points: one trained run, and 239 results that differ from it in numbers and the accuracy."""
    images = folder(tmp_path / "shapes", train=12, test=4)
    ok(f"extract --dataset folder:{images} --backbones random-projection --size 8")
    made = Path(
        ok(
            "train --method fedavg --scheme iid --clients 4 --rounds 2 --set batch=2 "
            "--eval-every 1 --seeds 0-2",
        ).data["path"]
    )
    result = read_result(made / "result.json")
    for i in range(1, 240):
        copy = shutil.copytree(made, own_home / "runs" / f"{i:016x}")
        values = {
            "lr": [0.3, 0.1, 0.03, 0.01, 0.003, 0.001][i % 6],
            "wd": [0.0, 1e-4, 1e-3, 1e-2][i // 6 % 4],
            "momentum": 0.05 + i // 24 / 10,
        }
        mean = 0.3 + i / 500
        accuracy = {
            **result["accuracy"],
            "mean": mean,
            "per_seed": [mean - 0.01, mean, mean + 0.01],
        }
        write_result(
            copy / "result.json",
            {
                **result,
                "digest": f"{i:016x}{result['digest'][16:]}",
                "accuracy": accuracy,
                "hyperparameters": {**result["hyperparameters"], **values},
            },
        )
    made_of = report(tmp_path)
    assert made_of.read_text(encoding="utf-8").count("<tr data-run") == 240
    return made_of


@pytest.fixture
def mistakes(tmp_path):
    """A report with the images of what a run got wrong, of classes whose names are long."""
    images = folder(tmp_path / "shapes", train=4, test=8, classes=6)
    for split in ("train", "test"):
        for place in sorted((images / split).iterdir()):
            place.rename(
                place.with_name(f"{place.name}-with_a_name_that_has_no_room_in_a_narrow_column")
            )
    ok(f"extract --dataset folder:{images} --backbones random-projection --size 8")
    ok("train --method fed3r --preset paper --scheme iid --clients 4")
    return report(tmp_path, "--with-images")


def report(tmp_path: Path, *words: str) -> Path:
    """All runs of the home as a page."""
    done = ok(f"report -o {tmp_path}/report.html", *words)
    assert json.dumps(done.data)
    return tmp_path / "report.html"
