"""Files that commands write: what is said of a full disk, and that none has a name before it is complete."""

import os
import re
from pathlib import Path

import pytest
from command import ok
from failing_command import must_fail_machine
from made_path import extracted, place_of

from fedcache.store import files

IID = "--scheme iid --clients 2"
SAID = re.compile(
    r"The disk is full: (\S+) needs (at least )?([\d,]+) bytes and ([\d,]+ bytes are|none is) free\."
)


def trained(place):
    extracted(place, "random-projection:8", train=6, test=3)
    ok(f"train fed3r {IID}")
    return place_of(f"train fedncm {IID}")


@pytest.fixture
def run(once, own_home):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full, a file that takes nothing")
    once(trained)
    return next((own_home / "runs").iterdir())


def fill_disk(monkeypatch):
    """From now on every file that is written whole goes to /dev/full, which refuses it as a full disk does."""

    def refused(path):
        temporary = path.with_name(f".{path.name}.1-00000000.partial")
        temporary.symlink_to("/dev/full")
        return temporary

    def full(_):
        return Path("/dev/full").open("w+b")

    monkeypatch.setattr(files, "temporary_name", refused)
    monkeypatch.setattr(files, "open_unnamed", full)


def filled(line, run, home, out):
    """The line with the places that its capital words stand for."""
    places = {"RUN": run, "STORE": next((home / "stores").glob("*.zarr")), "OUT": out}
    for name, place in places.items():
        line = line.replace(name, str(place))
    return line


WRITES = [
    "predict RUN --store STORE -o OUT/p.csv",
    "evaluate RUN --store STORE -o OUT/e.json",
    "export-model RUN -o OUT/m.safetensors --format safetensors",
    "report -o OUT/page.html",
    "compare -o OUT/c.md",
    "export OUT/f.h5",
    "export OUT/f.parquet",
]


@pytest.mark.parametrize(
    "words",
    [
        f"train fedavg {IID} --rounds 1",
        f"partition {IID} --name two --partition-seed 5",
        "runs tag mine RUN",
        *WRITES,
    ],
)
def test_a_full_disk_is_told_with_what_is_needed_and_free(
    run, own_home, tmp_path, monkeypatch, words
):
    out = tmp_path / "out"
    out.mkdir()
    asked = filled(words, run, own_home, out)
    fill_disk(monkeypatch)
    error = must_fail_machine("Free some space and run the same command again", asked)
    found = SAID.match(error["message"])
    assert found is not None, error
    assert found[3] != "0"
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        *WRITES,
        "predict RUN --store STORE -o OUT/p.parquet",
        "export-model RUN -o OUT/m",
        "figure confusion -o OUT/confusion.svg",
        f"partition {IID} --replace -o OUT/two.npz --plot OUT/two.svg",
        "export OUT/f.npz",
        "export OUT/f.safetensors",
    ],
)
def test_no_output_has_a_name_before_it_is_complete(run, own_home, tmp_path, monkeypatch, words):
    out = tmp_path / "out"
    out.mkdir()
    if (unnamed := files.open_unnamed(out)) is None:
        pytest.skip("every file has a name here")
    unnamed.close()
    asked = filled(words, run, own_home, out)
    named = set()
    link = os.link

    def recorded(source, target, **how):
        # Whoever is killed before this moment leaves what is in the folder now.
        assert {p for p in out.rglob("*") if p.is_file()} == named
        link(source, target, **how)
        if out in Path(target).parents:
            named.add(Path(target))

    monkeypatch.setattr(os, "link", recorded)
    ok(asked)
    assert named
    assert {p for p in out.rglob("*") if p.is_file()} == named
