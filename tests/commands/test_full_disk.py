"""A full disk: every command that writes says what it needs and what is free, and leaves with exit 6."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from command import fedcache, ok
from pictures import folder

from fedcache.errors import Exit
from fedcache.store import files
from fedcache.store.machine import full_disk

IID = ("--scheme", "iid", "--clients", 2)
SAID = re.compile(r"The disk is full: (\S+) needs ([\d,]+|more than [\d,]+) bytes and [\d,]+ are free")


def trained(place: Path) -> Path:
    images = folder(place / "shapes", train=6, test=3)
    ok("extract", "--dataset", f"folder:{images}", "-b", "random-projection:8", "--workers", 0)
    ok("train", "fed3r", *IID)
    return Path(ok("train", "fedncm", *IID).data["path"])


@pytest.fixture
def run(once: Callable[[Callable[[Path], Path]], Path], own_home: Path) -> Path:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full, a file that takes nothing")
    once(trained)
    return next((own_home / "runs").iterdir())


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every file that is written whole goes to /dev/full, which refuses it as a full disk does."""

    def refused(path: Path) -> Path:
        temporary = path.with_name(f".{path.name}.1-00000000.partial")
        temporary.symlink_to("/dev/full")
        return temporary

    monkeypatch.setattr(files, "_temporary", refused)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "fedavg", *IID, "--rounds", 1),
        ("grid", "--method", "fedavg", "--sweep", "lr=0.1,0.2", "--rounds", 1, *IID),
        ("partition", *IID, "--name", "two", "--seed", 5),
        ("predict", "RUN", "--store", "STORE", "-o", "OUT/p.csv"),
        ("predict", "RUN", "--store", "STORE", "-o", "OUT/p.jsonl"),
        ("evaluate", "RUN", "--store", "STORE", "-o", "OUT/e.json"),
        ("export-model", "RUN", "-o", "OUT/m.safetensors", "--format", "safetensors"),
        ("report", "-o", "OUT/page.html"),
        ("compare", "-o", "OUT/c.md"),
        ("runs", "tag", "mine", "RUN"),
    ],
    ids=lambda words: " ".join(map(str, words[:1])),
)
def test_a_full_disk_is_told_with_what_is_needed_and_free(
    run: Path, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    store = next((own_home / "stores").glob("*.zarr"))
    asked = [str(w).replace("RUN", str(run)).replace("STORE", str(store)).replace("OUT", str(out)) for w in words]
    fill_disk(monkeypatch)
    done = fedcache(*asked, "--json")
    assert done.code == Exit.ENVIRONMENT, done.err
    error = done.envelope["error"]
    found = SAID.match(error["message"])
    assert found is not None, error
    assert found[2] != "0"
    assert "Free some space and run the same command again" in error["hint"]
    assert list(out.iterdir()) == []


def test_what_a_full_disk_needs_is_the_file_and_never_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    known = full_disk(files.FullDiskError(full, tmp_path / "a", 1234))
    assert f"{tmp_path / 'a'} needs 1,234 bytes and " in known.message
    assert f"{tmp_path / 'b'} needs 99 bytes and " in full_disk(full, tmp_path / "b", 99).message
    assert "needs more than " in full_disk(full, tmp_path / "b").message
    assert "needs more than " in full_disk(full).message
