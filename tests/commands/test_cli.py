"""The command line as a whole: help, envelopes, exit codes, start-up."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from command import fedcache, ok
from pictures import folder

from fedcache import cli
from fedcache.errors import Exit

COMMANDS = (
    ("demo",),
    ("extract",),
    ("ingest",),
    ("partition",),
    ("shard",),
    ("train",),
    ("grid",),
    ("ls",),
    ("inspect",),
    ("verify",),
    ("repair",),
    ("export",),
    ("doctor",),
    ("config",),
    ("methods", "list"),
    ("methods", "info"),
    ("backbones", "list"),
    ("backbones", "info"),
    ("backbones", "import"),
    ("backbones", "pull"),
    ("backbones", "verify"),
    ("datasets", "list"),
    ("datasets", "info"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_refuses_an_unknown_flag(command: tuple[str, ...]) -> None:
    shown = fedcache(*command, "--help")
    assert shown.code == 0
    assert "--json" in shown.out
    wrong = fedcache(*command, "--jsn-no-such-flag", "--json")
    assert wrong.code == 2
    assert wrong.envelope["status"] == "error"
    assert wrong.envelope["error"]["code"] == 2
    assert wrong.envelope["error"]["hint"]
    assert "Traceback" not in wrong.err


def test_an_unknown_command_is_a_usage_error() -> None:
    done = fedcache("extrakt", "--json")
    assert done.code == 2
    assert "extract" in done.err


@pytest.mark.parametrize("words", [("methods", "list"), ("backbones", "list"), ("datasets", "list"), ("ls",)])
def test_lists_have_names(words: tuple[str, ...]) -> None:
    data = ok(*words).data
    (key,) = data
    assert key in ("methods", "backbones", "datasets", "entries")
    assert all("name" in entry for entry in data[key])


def test_the_table_of_commands_says_what_the_commands_say() -> None:
    program: Any = typer.main.get_command(cli.app)
    for entry in cli.COMMANDS:
        loaded = program.commands[entry.name].load()
        assert (loaded.name, " ".join(loaded.help.partition("\n\n")[0].split())) == (entry.name, entry.summary)


def test_a_short_h_is_help() -> None:
    for words in ((), ("train",), ("methods",), ("methods", "list")):
        assert fedcache(*words, "-h").out == fedcache(*words, "--help").out != ""


HEAVY = {"torch", "timm", "open_clip", "zarr", "h5py", "sklearn", "matplotlib", "torchvision"}


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (("--help",), {"numpy", *HEAVY}),
        (("methods", "list"), HEAVY),
        (("train", "--method", "fedpc"), HEAVY),
        (("ls",), HEAVY),
        *(
            pytest.param(tuple(line.split()), HEAVY, marks=pytest.mark.slow)
            for line in (
                "grid --method fedpc --sweep lr=1",
                "backbones list",
                "datasets list",
                "doctor",
                "train --help",
                "flower up --help",
                "demo --help",
            )
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_command_is_quick_because_it_imports_only_what_it_needs(words: tuple[str, ...], heavy: set[str]) -> None:
    code = (
        "import sys\nfrom fedcache.cli import main\n"
        f"try: main({list(words)!r})\n"
        f"except SystemExit: print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    "words", [("inspect", "nowhere.zarr"), ("verify", "nowhere.zarr"), ("export", "x.npz"), ("shard", "-p", "x")]
)
def test_a_store_that_is_not_there_is_exit_4_with_the_command(words: tuple[str, ...]) -> None:
    done = fedcache(*words, "--json")
    assert done.code == 4
    assert "fedcache extract" in done.envelope["error"]["hint"]


def test_config_is_merged_and_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fedcache.toml"
    path.write_text('[train]\nmethod = "fed3r"\nroundz = 3\n')
    done = fedcache("config", "--config", path, "--json")
    assert done.code == 2
    assert "rounds" in done.envelope["error"]["message"]
    path.write_text('[train]\nmethod = "fed3r"\nrounds = 3\n')
    assert ok("config", "--config", path).data["train"]["rounds"] == 3
    path.write_text("[train\n")
    assert fedcache("config", "--config", path, "--json").code == 2


def test_config_shows_every_key_with_its_meaning_and_can_be_read_again(tmp_path: Path) -> None:
    from dataclasses import fields

    from fedcache.config import SECTIONS

    path = tmp_path / "fedcache.toml"
    path.write_text('[train]\nbackbones = ["a", "b"]\n[train.set]\nlr = 0.5\n[extract.recipe]\nsize = "64"\n')
    found = ok("config", "--config", path).data
    shown = fedcache("config", "--config", path).out
    for section, kind in SECTIONS.items():
        assert list(found[section]) == [f.name for f in fields(kind)]
        for name, value in found[section].items():
            place = (
                f"[{section}.{name}]"
                if name in ("recipe", "weights", "data", "options", "set", "client_set")
                else f"{name} = "
            )
            (line,) = [line for line in shown.partition(f"[{section}]")[2].splitlines() if place in line][:1]
            assert line.startswith("# ") == (value is None), line
            assert value is not None or len(line.partition("  # ")[2]) > 10, line
    assert found["train"]["rounds"] is None
    path.write_text(shown)
    assert ok("config", "--config", path).data == found


@pytest.mark.slow
def test_inspect_verify_export_and_ingest_agree(tmp_path: Path) -> None:
    images = folder(tmp_path / "shapes", train=4, test=2)
    store = ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--workers", 0).data[
        "path"
    ]
    seen = ok("inspect", store).data
    assert seen["images"] == seen["ok"] == 18
    assert seen["splits"] == {"train": 12, "test": 6, "validation": 0}
    assert ok("verify", store).data["problems"] == []
    for ending in ("npz", "h5", "parquet", "safetensors"):
        out = tmp_path / f"features.{ending}"
        assert ok("export", out, "--store", store).data["rows"] == 18
        back = ok("ingest", out, "--name", f"mine-{ending}").data
        assert back["images"] == 18
        run = ok("train", "--method", "fedncm", "--scheme", "iid", "--clients", 2).data
        assert run["dataset"]["slug"].startswith("mine")


def test_options_that_would_be_ignored_and_empty_names_are_refused(tmp_path: Path) -> None:
    images = folder(tmp_path / "shapes", train=2, test=1)
    done = fedcache(
        "extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--clients", 3, "--json"
    )
    assert done.code == 2
    assert "--partition" in done.envelope["error"]["message"]
    assert fedcache("ingest", "x.npz", "--name", "", "--json").code == 2


@pytest.mark.slow
def test_partition_prints_saves_and_draws(tmp_path: Path) -> None:
    images = folder(tmp_path / "shapes", train=9, test=2)
    ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--workers", 0)
    done = ok(
        "partition",
        "--scheme",
        "dirichlet",
        "--clients",
        3,
        "--alpha",
        0.5,
        "--out",
        tmp_path / "p.json",
        "--plot",
        tmp_path / "p.png",
    )
    assert sum(c["train"] for c in done.data["clients"]) == 27
    assert "clients" not in fedcache("partition", "--scheme", "iid", "--clients", 3).out.splitlines()[2]
    assert "the first 20 of 25 clients" in fedcache("partition", "--scheme", "iid", "--clients", 25).out
    plan = fedcache("extract", "--backbones", "random-projection,clip-rn50", "--dry-run")
    assert "their rate is not known, as weights are missing" in plan.out, "what is there already changes nothing"
    assert (tmp_path / "p.png").stat().st_size > 1000
    again = ok("train", "--method", "fed3r", "--partition", tmp_path / "p.json").data
    assert again["partition"]["digest"] == done.data["digest"]
    wrong = fedcache("partition", "--scheme", "dirichlet", "--alpa", 1, "--json")
    assert wrong.code == 2
    nowhere = fedcache("partition", "--scheme", "iid", "--clients", 2, "--out", tmp_path / "no" / "p.json", "--json")
    assert nowhere.code == 6
    assert "Traceback" not in nowhere.err
    infeasible = fedcache("partition", "--scheme", "iid", "--clients", 1000, "--json")
    assert infeasible.code == 2
    assert "27" in infeasible.envelope["error"]["hint"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_command_that_handles_no_signal_ends_with_130_by_either(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedcache.commands import runs

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runs, "listed", lambda *_: signal.raise_signal(number))
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # by shells, of what they run in the background
    try:
        done = fedcache("runs", "list")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert done.code == Exit.INTERRUPTED
    assert "Traceback" not in done.err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_program_that_is_told_to_stop_while_it_starts_exits_as_one_that_was_stopped() -> None:
    code = """
import os, runpy, signal, sys

class Stopped:
    def find_spec(name, path, target=None):
        if name == "fedcache.cli":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stopped)
sys.argv = ["fedcache", "ls"]
runpy.run_module("fedcache", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["fedcache"] == "fedcache.__main__:main"
