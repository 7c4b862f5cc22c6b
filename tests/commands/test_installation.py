"""``doctor``, shell completion, and tables on narrow terminals."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from arrays import embeddings
from command import environment, fedcache, ok
from pty_run import on_a_terminal, plain
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
    assert "GB free" in found["FEDCACHE_HOME"]["found"]


@pytest.mark.slow
def test_a_failed_check_is_exit_6_and_a_warning_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    row = doctor.check
    for status, code, status_of_all in (("warn", 0, "ok"), ("fail", 6, "problem")):
        monkeypatch.setattr(doctor, "start_torch", nullcontext)
        monkeypatch.setattr(doctor, "torch_rows", lambda _, status=status: [row("torch", status, "x", "y")])
        done = fedcache("doctor", "--json")
        assert (done.code, done.envelope["status"]) == (code, status_of_all)
        assert done.data["problems"] == (code == 6)


def test_an_import_that_fails_is_told_with_what_mends_it() -> None:
    def told(code: str) -> list[tuple[str, str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return [(row["status"], row["hint"]) for row in doctor.torch_rows(process)]

    assert [status for status, _ in told("import no_such_torch")] == ["fail", "fail", "fail"]
    devices = '{"devices": {"built": null, "usable": false, "gpus": [], "auto": ["cpu", "2 cores", "no GPU"]}}'
    pair, device, cuda = told(f"print({devices!r}); raise RuntimeError('operator torchvision::nms does not exist')")
    assert pair[0] == "fail"
    assert "--force-reinstall torch torchvision" in pair[1]
    assert (device[0], cuda[0]) == ("ok", "ok")


def test_a_torchvision_built_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "_C.so").write_bytes(b"not what this torch can load")
    monkeypatch.setattr(doctor, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(folder)]))
    with pytest.raises(OSError, match="torchvision") as info:
        doctor.load_operators(torch)
    row = doctor.pair_row(None, str(info.value))
    assert row["status"] == "fail"
    assert "--force-reinstall torch torchvision" in row["hint"]


def test_a_package_that_is_too_old_or_missing_names_the_line_that_installs_it() -> None:
    assert doctor.package("zarr", (99, 0))["status"] == "fail"
    assert doctor.package("zarr", (99, 0))["hint"] == "pip install -U 'zarr>=99.0'"
    assert doctor.package("no-such-package-here", (1, 2))["hint"] == "pip install 'no-such-package-here>=1.2'"


def test_a_version_is_compared_by_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, low, status in (("2.10.0+cpu", (2, 10), "ok"), ("2.9.1", (2, 10), "fail"), ("3.1", (3, 1, 1), "fail")):
        monkeypatch.setattr(doctor, "installed", lambda _, found=found: found)
        wanted = ".".join(map(str, low))
        told = found if status == "ok" else f"{found}, needs {wanted}"
        hint = "" if status == "ok" else f"pip install -U 'x>={wanted}'"
        assert doctor.package("x", low) == {"name": "x", "status": status, "found": told, "hint": hint}


def test_doctor_asks_for_what_an_installation_asks_for() -> None:
    """Else doctor calls an installation good that pip refuses, or passes over an extra."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = dict(line.split(",")[0].split(">=") for line in project["dependencies"])
    low = {name: ".".join(map(str, floor)) for name, floor in doctor.CORE.items()}
    assert low == {name: asked[name] for name in low}
    ours = {"docs", "browser", "notebooks", "audit", "release", "dev"}  # for who works on fedcache itself
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ours}
    assert {name: list(packages) for name, packages in doctor.EXTRAS.items()} == {
        name: [line.split(">=")[0] for line in lines] for name, lines in extras.items()
    }


def test_an_extra_that_is_absent_is_a_warning_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"demo": ("one", "two", "three"), "ray": ("one",)})
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0" if name == "one" else None)
    assert doctor.extras() == [
        doctor.check("extra demo", "warn", "without two, three", "pip install 'fedcache[demo]'"),
        doctor.check("extra ray", "ok", "one"),
    ]


BUILT: dict[str, object] = {"built": "12.8", "usable": False, "gpus": [], "auto": ["cpu", "2 cores", "no GPU"]}
SEE = "See the line on torch above."


@pytest.mark.parametrize(
    ("changes", "smi", "device", "cuda"),
    [
        ({}, False, ("ok", "cpu (2 cores): no GPU", ""), ("ok", "no GPU: torch (CUDA 12.8) finds none", "")),
        ({}, True,
         ("warn", "cpu: no GPU", "An NVIDIA GPU may be there: install torch with CUDA from pytorch.org."),
         ("warn", "an NVIDIA GPU may be there, but torch (CUDA 12.8) finds none", "nvidia-smi")),
        ({"built": None}, False, ("ok", "cpu (2 cores): no GPU", ""),
         ("ok", "torch is built without CUDA; training needs none", "")),
        ({"usable": True, "gpus": ["A", "B"], "auto": ["cuda", "A", "it is there"]}, True,
         ("ok", "cuda (A): it is there", ""), ("ok", "12.8: A, B", "")),
        ({"error": "driver too old"}, True, ("fail", "driver too old", SEE), ("fail", "driver too old", SEE)),
    ],
)  # fmt: skip
def test_what_torch_says_of_devices_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    smi: bool,
    device: tuple[str, ...],
    cuda: tuple[str, ...],
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: "/usr/bin/nvidia-smi" if smi else None)
    found = {**BUILT, **changes}
    assert doctor.device_row(found) == doctor.check("device", *device)
    assert doctor.cuda_row(found) == doctor.check("CUDA", *cuda)


def test_a_pair_that_does_not_fit_is_told_from_another_failure() -> None:
    again = "pip install --force-reinstall torch torchvision"
    assert doctor.pair_row("2.10 0.25", "") == doctor.check("torch + torchvision", "ok", "2.10 0.25")
    other = doctor.check("torch + torchvision", "fail", "last", f"{again} timm open_clip_torch")
    assert doctor.pair_row(None, "first\nlast\n") == other
    assert doctor.pair_row(None, "")["found"] == "no message"
    for err in ("operator nms does not exist", "torchvision is broken"):
        assert doctor.pair_row(None, err)["hint"].endswith(f"Install both together: {again}")


def test_settings_are_written_as_toml_with_the_meaning_of_what_is_left_out() -> None:
    from fedcache.config import PartitionConfig

    made = doctor.to_toml("partition", PartitionConfig("iid", options={"shots": 3}))
    assert made == [
        "[partition]",
        'scheme = "iid"',
        "seed = 0",
        "# clients = NUMBER  # Number of clients. Default: the method's paper's, or the scheme's.",
        "",
        "[partition.options]",
        "shots = 3",
    ]
    empty = doctor.to_toml("partition", PartitionConfig())
    assert (
        empty[-1]
        == "# [partition.options]  # Any other argument of the scheme: key=value; repeatable. Default: the scheme's."
    )
    assert any(line.startswith('# scheme = "TEXT"  # iid, shards') for line in empty)


def test_a_home_that_may_not_be_written_is_told(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: asked.append(place) or False)
    row = doctor.place(Home(own_home / "not" / "there"))
    assert row == doctor.check(
        "FEDCACHE_HOME", "fail", f"{own_home / 'not' / 'there'} is not writable", "export FEDCACHE_HOME=~/fedcache"
    )
    assert asked == [own_home.parent], "the nearest folder that exists"


def test_a_full_disk_and_a_home_without_weights_are_told(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(own_home)
    monkeypatch.setattr(doctor, "ROOM", 1 << 60)
    assert doctor.place(home)["status"] == "fail"
    assert "fedcache gc" in doctor.place(home)["hint"]
    monkeypatch.setattr(backbones, "known", lambda **_: [{"name": "a", "ready": False}])
    assert doctor.weights(home)["status"] == "warn"
    assert "0 of 1" in doctor.weights(home)["found"]

    def broken(**_: object) -> None:
        raise UsageError("backbones.toml holds no rows.", "Mend it.")

    monkeypatch.setattr(backbones, "known", broken)
    told = doctor.weights(home)
    assert (told["status"], told["found"], told["hint"]) == ("fail", "backbones.toml holds no rows.", "Mend it.")


def test_a_process_of_a_lock_lives_unless_the_system_knows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, here = tmp_path / "x.json", {"host": socket.gethostname(), "pid": os.getpid()}

    def lives(who: object, error: type[BaseException] | None = None) -> bool:
        def kill(_pid: int, _signal: int) -> None:
            if error is not None:
                raise error

        note.write_text(json.dumps(who))
        with monkeypatch.context() as patched:
            patched.setattr(doctor.os, "kill", kill)
            return doctor._lives(note)

    assert lives(here)
    assert lives(here, PermissionError)
    assert not lives(here, ProcessLookupError)
    assert not lives(here, OverflowError)
    assert lives({**here, "host": "another"}, ProcessLookupError)
    assert lives({"host": here["host"]})
    assert lives({**here, "pid": "x"})


def test_a_torch_that_fails_says_so_where_devices_are_listed() -> None:
    def fails() -> bool:
        raise RuntimeError("driver too old")

    assert doctor.devices_of(SimpleNamespace(cuda=SimpleNamespace(is_available=fails))) == {"error": "driver too old"}


@pytest.mark.slow
def test_live_and_stale_locks_are_told_apart(own_home: Path) -> None:
    def told() -> dict[str, dict[str, str]]:
        return {row["name"]: row for row in doctor.locks(Home(own_home))}

    x, y, _ = embeddings()
    store = fc.Store.from_arrays({"mine": x}, labels=y)
    place = store.path / "locks" / "manifest.lock"
    assert told()["locks"]["found"] == "nobody is writing"
    with hold_lock(place, "it", wait=False):
        live = told()["lock"]
        assert live["status"] == "warn"
        assert "another thread of this process" in live["found"]
        assert store.path.name in live["found"]
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    import socket

    place.with_suffix(".json").write_text(json.dumps({"pid": gone.pid, "host": socket.gethostname(), "started": 1}))
    stale = told()["stale locks"]
    assert entries()["stale locks"] == stale
    assert stale["status"] == "ok"
    assert "1 left by killed processes: manifest of mine-" in stale["found"]
    place.with_suffix(".json").write_text(json.dumps({"pid": gone.pid, "host": "another-host", "started": 1}))
    assert "stale locks" not in told(), "who lives on another host is not known here"


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_completes(tmp_path: Path, shell: str) -> None:
    def run(*words: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedcache", *words], capture_output=True, text=True, check=False,
            env={**environment(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **env},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "_FEDCACHE_COMPLETE=" in run("--show-completion", shell)
    if shell == "bash":
        line = {"COMP_WORDS": "fedcache tr", "COMP_CWORD": "1"}
        assert run(_FEDCACHE_COMPLETE="complete_bash", **line).split() == ["train"]
        line = {"COMP_WORDS": "fedcache train --tra", "COMP_CWORD": "2"}
        assert run(_FEDCACHE_COMPLETE="complete_bash", **line).split() == ["--track"]


CELLS = ("/a/very/long/path/that/fits/nowhere/at/all/" + "x" * 40, "words that can be broken", "12,345")


def drawn(width: int, *rows: tuple[str, ...]) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(TextTable("", ("path", "says", "n"), rows, right=("n",)))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 100, 160])
def test_no_width_loses_a_cell(width: int) -> None:
    lines = drawn(width, CELLS, CELLS)
    assert all(len(line) <= width for line in lines)
    asked, found = (Counter("".join(words).replace(" ", "")) for words in ((*CELLS, *CELLS), lines))
    assert asked <= found, asked - found


def test_a_narrow_terminal_gets_blocks_and_breaks_no_word() -> None:
    lines = drawn(
        60,
        ("pip install 'fedcache[tensorboard]'", "a-word-of-thirty-letters-at-all", "another-of-about-thirty-letters"),
    )
    assert lines[0] == "path: pip install 'fedcache[tensorboard]'"
    assert lines[1] == "says: a-word-of-thirty-letters-at-all"
    table = drawn(80, ("short", "words", "1"), ("a", "b", "12"))
    assert [line for line in table if line.strip(" \u2500")] == [
        " path    says     n ",
        " short   words    1 ",
        " a       b       12 ",
    ]  # one blank before the first column and after the last, not two
    assert drawn(60, ("short", "words", "1"))[1].split() == ["path", "says", "n"], "what fits is a table"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="terminals of this kind are of Unix")
def test_the_list_of_backbones_is_whole_at_60_columns_and_without_colour(own_home: Path) -> None:
    every = ok("backbones", "list").data["backbones"]
    code, out = on_a_terminal("backbones", "list", home=own_home, width=60, env={"NO_COLOR": "1"})
    assert code == 0
    text = plain(out)
    assert all(e["name"] in text for e in every)
    assert "\x1b[3" not in out
    assert all(len(line) <= 60 for line in text.replace("\r", "").splitlines())


@pytest.mark.slow
def test_doctor_explains_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcache.store import files

    def refused(_path: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("FEDCACHE_HOME", str(home))
    monkeypatch.setattr(files, "_temporary", refused)
    monkeypatch.setattr(os, "access", lambda *_: False)
    rows = entries()
    assert rows["FEDCACHE_HOME"]["status"] == "fail"
    assert "is not writable" in rows["FEDCACHE_HOME"]["found"]
    assert rows["weights"]["status"] == "ok"
