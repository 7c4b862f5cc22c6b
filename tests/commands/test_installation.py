"""``doctor``, shell completion, and tables on narrow terminals."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from arrays import embeddings
from command import environment, fedcache
from rich.console import Console

import fedcache as fc
from fedcache.commands import doctor
from fedcache.commands.output import TextTable
from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.extract import backbones
from fedcache.store.lock import hold_lock


def entries() -> dict[str, dict[str, str]]:
    return {e["name"]: e for e in fedcache("doctor", "--json").data["entries"]}


@pytest.mark.slow
def test_doctor_looks_at_everything_and_says_what_mends_it(own_home: Path) -> None:
    found = entries()
    assert {
        "Python",
        "torch",
        "google-crc32c",
        "extra plots",
        "torch + torchvision",
        "device",
        "CUDA",
        "weights",
        "FEDCACHE_HOME",
        "locks",
    } <= set(found)
    assert {e["status"] for e in found.values()} <= {"ok", "warn", "fail"}
    assert all(e["hint"] for e in found.values() if e["status"] != "ok"), found
    assert "efficientnet-lite0" in found["weights"]["found"]
    assert str(own_home) in found["FEDCACHE_HOME"]["found"]


def test_an_import_that_fails_is_told_with_what_mends_it() -> None:
    def rows(code: str) -> list[dict[str, str]]:
        words = [sys.executable, "-c", code]
        pipe = subprocess.PIPE
        return doctor.torch_rows(subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True))

    assert [row["status"] for row in rows("import no_such_torch")] == ["fail", "fail", "fail"]
    devices = '{"devices": {"built": null, "usable": false, "gpus": [], "auto": ["cpu", "2 cores", "no GPU"]}}'
    found = rows(
        f"print({devices!r}); raise RuntimeError('operator torchvision::nms does not exist')"
    )
    assert [row["status"] for row in found] == ["fail", "ok", "ok"]
    assert "--force-reinstall torch torchvision" in found[0]["hint"]


def test_a_package_that_is_missing_names_the_line_that_installs_it() -> None:
    row = doctor.package("no-such-package-here", (1, 2))
    assert row["status"] == "fail"
    assert row["hint"] == "pip install 'no-such-package-here>=1.2'"


@pytest.mark.parametrize(
    ("found", "low", "status"),
    [("2.10.0+cpu", (2, 10), "ok"), ("2.9.1", (2, 10), "fail"), ("3.1", (3, 1, 1), "fail")],
)
def test_a_version_is_compared_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch, found: str, low: tuple[int, ...], status: str
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda _: found)
    row = doctor.package("x", low)
    assert row["status"] == status
    assert row["hint"] == (
        "" if status == "ok" else f"pip install -U 'x>={'.'.join(map(str, low))}'"
    )


def test_doctor_asks_for_what_an_installation_asks_for() -> None:
    """Else doctor calls an installation good that pip refuses, or passes over an extra."""
    project = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    asked = dict(line.split(",")[0].split(">=") for line in project["dependencies"])
    low = {name: ".".join(map(str, floor)) for name, floor in doctor.CORE.items()}
    assert low == {name: asked[name] for name in low}
    ours = {
        "docs",
        "browser",
        "notebooks",
        "audit",
        "release",
        "dev",
    }  # for who works on fedcache itself
    extras = {
        name: lines for name, lines in project["optional-dependencies"].items() if name not in ours
    }
    assert {name: list(packages) for name, packages in doctor.EXTRAS.items()} == {
        name: [line.split(">=")[0] for line in lines] for name, lines in extras.items()
    }


BUILT: dict[str, object] = {
    "built": "12.8",
    "usable": False,
    "gpus": [],
    "auto": ["cpu", "2 cores", "no GPU"],
}


@pytest.mark.parametrize(
    ("changes", "smi", "device", "cuda"),
    [
        ({}, True, ("warn", "cpu"), ("warn", "CUDA 12.8")),
        (
            {"usable": True, "gpus": ["A", "B"], "auto": ["cuda", "A", "it is there"]},
            True,
            ("ok", "cuda (A)"),
            ("ok", "A, B"),
        ),
        ({"error": "driver too old"}, True, ("fail", "driver too old"), ("fail", "driver too old")),
    ],
)
def test_what_torch_says_of_devices_is_told(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    smi: bool,
    device: tuple[str, str],
    cuda: tuple[str, str],
) -> None:
    monkeypatch.setattr(
        doctor.shutil, "which", lambda _name: "/usr/bin/nvidia-smi" if smi else None
    )
    found = {**BUILT, **changes}
    for row, (status, said) in ((doctor.device_row(found), device), (doctor.cuda_row(found), cuda)):
        assert row["status"] == status
        assert said in row["found"]
        assert bool(row["hint"]) is (status != "ok")


def test_a_full_disk_and_a_home_without_weights_are_told(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(own_home)
    monkeypatch.setattr(doctor, "ROOM", 1 << 60)
    assert doctor.place(home)["status"] == "fail"
    assert "fedcache gc" in doctor.place(home)["hint"]
    monkeypatch.setattr(backbones, "known", lambda **_: [{"name": "a", "ready": False}])
    assert doctor.weights(home)["status"] == "warn"

    def broken(**_: object) -> None:
        raise UsageError("backbones.toml holds no rows.", "Mend it.")

    monkeypatch.setattr(backbones, "known", broken)
    assert doctor.weights(home)["status"] == "fail"


@pytest.mark.slow
def test_live_and_stale_locks_are_told_apart(own_home: Path) -> None:
    def told() -> dict[str, dict[str, str]]:
        return {row["name"]: row for row in doctor.locks(Home(own_home))}

    x, y, _ = embeddings()
    store = fc.Store.from_arrays({"mine": x}, labels=y)
    place = store.path / "locks" / "manifest.lock"
    assert set(told()) == {"locks"}
    with hold_lock(place, "it", wait=False):
        live = told()["lock"]
        assert live["status"] == "warn"
        assert store.path.name in live["found"]
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for host, stale in ((socket.gethostname(), True), ("another-host", False)):
        place.with_suffix(".json").write_text(
            json.dumps({"pid": gone.pid, "host": host, "started": 1})
        )
        assert ("stale locks" in told()) is stale, "who lives on another host is not known here"


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown(tmp_path: Path, shell: str) -> None:
    env = {**environment(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    words = [sys.executable, "-m", "fedcache", "--show-completion", shell]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert "_FEDCACHE_COMPLETE=" in done.stdout


CELLS = (
    "/a/very/long/path/that/fits/nowhere/at/all/" + "x" * 40,
    "words that can be broken",
    "12,345",
)


def drawn(width: int, *rows: tuple[str, ...]) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(TextTable("", ("path", "says", "n"), rows, right=("n",)))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 60, 80, 160])
def test_no_width_loses_a_cell(width: int) -> None:
    lines = drawn(width, CELLS, CELLS)
    assert all(len(line) <= width for line in lines)
    asked, found = (Counter("".join(words).replace(" ", "")) for words in ((*CELLS, *CELLS), lines))
    assert asked <= found, asked - found
