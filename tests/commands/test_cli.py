"""The command line as a whole: help, envelopes, exit codes, start-up."""

import signal
import tomllib
from dataclasses import fields

import pytest
import typer.main
from command import data_of, fedcache, python
from failing_command import must_fail, must_fail_store
from loaded_files import content
from made_path import place_of
from pictures import folder

from fedcache import cli
from fedcache.commands import runs
from fedcache.config import SECTIONS
from fedcache.errors import Exit


def test_the_table_of_commands_says_what_the_commands_say():
    program = typer.main.get_command(cli.app)
    for entry in cli.COMMANDS:
        loaded = program.commands[entry.name].load()
        assert loaded.name == entry.name
        assert " ".join(loaded.help.partition("\n\n")[0].split()) == entry.summary


@pytest.mark.parametrize("words", ["", "methods list"])
def test_a_short_h_is_help(words):
    assert fedcache(f"{words} -h").out == fedcache(f"{words} --help").out != ""


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
            for line in ("grid --method fedpc --sweep lr=1", "backbones list", "flower up --help")
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_command_is_quick_because_it_imports_only_what_it_needs(words, heavy):
    code = (
        "import sys\nfrom fedcache.cli import main\n"
        f"try: main({list(words)!r})\n"
        f"except SystemExit: print(sorted({heavy!r} & set(sys.modules)))"
    )
    assert python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words",
    [
        "inspect nowhere.zarr",
        "verify nowhere.zarr",
        "export x.npz",
        "shard -p x",
        "train fed3r --store nowhere.zarr",
    ],
)
def test_a_store_that_is_not_there_is_exit_4_with_the_command(words):
    must_fail_store("fedcache extract", words)


def test_config_is_merged_and_a_misspelt_key_is_refused(tmp_path):
    path = tmp_path / "fedcache.toml"
    path.write_text('[train]\nmethod = "fed3r"\nroundz = 3\n')
    must_fail("rounds", f"config --config {path}")
    path.write_text('[train]\nmethod = "fed3r"\nrounds = 3\n')
    assert data_of(f"config --config {path}")["train"]["rounds"] == 3
    path.write_text("[train\n")
    assert fedcache(f"config --config {path} --json").code == 2


def test_config_shows_every_key_and_can_be_read_again(tmp_path):
    path = tmp_path / "fedcache.toml"
    path.write_text(
        '[train]\nbackbones = ["a", "b"]\n[train.set]\nlr = 0.5\n[extract.recipe]\nsize = "64"\n'
    )
    found = data_of(f"config --config {path}")
    for section, kind in SECTIONS.items():
        assert list(found[section]) == [field.name for field in fields(kind)]
    path.write_text(fedcache(f"config --config {path}").out)
    assert data_of(f"config --config {path}") == found


@pytest.mark.slow
def test_inspect_verify_export_and_ingest_agree(tmp_path):
    images = folder(tmp_path / "shapes", train=4, test=2)
    words = f"--dataset folder:{images} --backbones random-projection --workers 0"
    store = place_of(f"extract {words}")
    seen = data_of(f"inspect {store}")
    assert seen["images"] == seen["ok"] == 18
    assert seen["splits"] == {"train": 12, "test": 6, "validation": 0}
    assert data_of(f"verify {store}")["problems"] == []
    for ending in ("npz", "h5", "parquet", "safetensors"):
        out = tmp_path / f"features.{ending}"
        assert data_of(f"export {out} --store {store}")["rows"] == 18
        assert data_of(f"ingest {out} --name mine-{ending}")["images"] == 18
        run = data_of(f"train --method fedncm --scheme iid --clients 2 --dataset mine-{ending}")
        assert run["dataset"]["slug"].startswith("mine")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_command_that_handles_no_signal_ends_with_130_by_either(number, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runs, "listed", lambda *_: signal.raise_signal(number))
    # by shells, of what they run in the background
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = fedcache("runs list")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert done.code == Exit.INTERRUPTED
    assert "Traceback" not in done.err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_program_that_is_told_to_stop_while_it_starts_exits_as_one_that_was_stopped():
    code = """
import os, runpy, signal, sys

class Stopped:
    def find_spec(name, path, target=None):
        if name == "fedcache.cli":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stopped)
sys.argv = ["fedcache", "ls"]
try:
    runpy.run_module("fedcache", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(end.code)
"""
    assert python(code) == "130\n"
    project = tomllib.loads(content("pyproject.toml"))
    assert project["project"]["scripts"]["fedcache"] == "fedcache.__main__:main"
