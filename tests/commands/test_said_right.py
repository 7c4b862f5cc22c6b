"""Hints that are right, several faults in one answer, and lines that say something: through the real command line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from arrays import ingested
from command import fedcache, ok
from rich.console import Console

import fedcache as fc
from fedcache.commands.output import TextTable
from fedcache.errors import Exit

IID = ("--scheme", "iid", "--clients", 3)


def completed(line: str, home: Path) -> list[str]:
    """What the shell offers for the last word of a line, and that torch was not imported for it."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_FEDCACHE_COMPLETE": "complete_bash"}
    code = "import sys; sys.modules['torch'] = None; from fedcache.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, **words, "FEDCACHE_HOME": str(home)})  # fmt: skip
    return done.stdout.split()


def test_the_method_is_named_with_or_without_its_option(tmp_path: Path) -> None:
    ingested(tmp_path)
    first = ok("train", "fed3r", *IID).data
    assert ok("train", "--method", "fed3r", *IID).data["path"] == first["path"]
    assert ok("grid", "fed3r", "fedncm", *IID).data["reused"] == 1
    two = fedcache("train", "fed3r", "--method", "fedncm")
    assert (two.code, "fed3r and --method fedncm are both given." in two.err) == (Exit.USAGE, True)
    none = fedcache("train")
    assert (none.code, "fedcache train METHOD, of afl," in none.err) == (Exit.USAGE, True)


def test_old_names_of_options_work_and_say_the_new_ones(tmp_path: Path) -> None:
    ingested(tmp_path)
    old = fedcache("train", "fed3r", *IID, "--seed", 3, "--lift", "sequential", "--json")
    new = ok("train", "fed3r", *IID, "--partition-seed", 3, "--execution", "sequential")
    assert "--seed is called --partition-seed now; the old name will go." in old.err
    assert "--lift is called --execution now; the old name will go." in old.err
    assert new.data["path"] == old.data["path"]
    assert "is called" not in new.err
    out = tmp_path / "all.npz"
    assert ok("export", "-o", out).data["path"] == str(out)
    assert fedcache("export").code == fedcache("export", "a.npz", "-o", "b.npz").code == Exit.USAGE


def test_hints_name_what_is_meant_and_all_that_is_missing(tmp_path: Path) -> None:
    ingested(tmp_path)
    gpu = fedcache("train", "fed3r", *IID, "--device", "gpu")
    assert (gpu.code, gpu.err.splitlines()[-2:]) == (
        Exit.USAGE, ["fedcache: Unknown device 'gpu'. A GPU is called 'cuda'.", "--device cuda"],
    )  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES" in fedcache("train", "fed3r", *IID, "--device", "cuda:1").err
    two = fedcache("extract", "--dataset", "digits", "--backbones", "resnet98,nonesuch")
    assert (two.code, "'resnet98'" in two.err, "'nonesuch'" in two.err) == (Exit.USAGE, True, True)
    assert two.err.count("Known: ") == 1
    lacking = fedcache("train", "fed3r", "--backbones", "left,right")
    assert (lacking.code, "'left'" in lacking.err, "'right'" in lacking.err) == (Exit.STORE, True, True)
    methods = fedcache("grid", "fed3x,fedavh")
    assert "'fed3x'. Did you mean 'fed3r'?\nUnknown method 'fedavh'. Did you mean 'fedavg'?" in methods.err


def test_lines_that_would_say_the_same_twice_are_left_out(tmp_path: Path) -> None:
    ingested(tmp_path)
    one_test_set = fedcache("train", "fed3r", "--scheme", "dirichlet", "--clients", 3, "--alpha", 1).out
    assert "one model on the global test rows" in one_test_set
    for line in ("over clients mean", "client mean", "left out for want"):
        assert line not in one_test_set
    own = fedcache("train", "solo", *IID, "--rounds", 1, "--set", "bn=false").out
    assert "over clients mean" in own


def test_a_run_of_one_round_is_one_run_however_often_it_is_scored(tmp_path: Path) -> None:
    ingested(tmp_path)
    first = ok("train", "fed3r", *IID).data
    again = ok("train", "fed3r", *IID, "--eval-every", 1).data
    assert (again["reused"], again["path"]) == (True, first["path"])
    end, each = (ok("train", "fedavg", *IID, "--rounds", 2, "--eval-every", k).data["path"] for k in (0, 1))
    assert end != each
    labels = {e["path"]: e["differs"] for e in ok("runs", "list", "--method", "fedavg").data["entries"]}
    assert labels == {end: "eval_every=0", each: "eval_every=1"}


def test_a_part_of_a_dataset_is_named_like_any_other(tmp_path: Path, own_home: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", x_train=rng.integers(0, 255, (60, 8, 8), np.uint8), y_train=np.arange(60) % 2)
    spec = f"arrays:{tmp_path / 'images.npz'}"
    made = ok("extract", "--dataset", spec, "--limit", 40, "--backbones", "random-projection:16").data
    name = fc.Store.open(made["path"]).dataset["slug"]
    assert name.endswith("-40")
    assert ok("ls", "--dataset", name).data["entries"][0]["path"] == made["path"]
    (own_home / "last.json").unlink()
    run = ok("train", "fed3r", "--dataset", name, *IID).data
    assert run["dataset"]["slug"] == name
    assert ok("grid", "fed3r", "--dataset", name, *IID).data["reused"] == 1
    whole = fedcache("train", "fed3r", "--dataset", spec, *IID)
    assert f"To train on the part: --dataset {name}" in whole.err
    more = fedcache("train", "fed3r", "--dataset", name, "--backbones", "random-projection:8", "--no-extract")
    assert f"fedcache extract --dataset {spec}" in more.err
    assert "--limit 40" in more.err


@pytest.mark.slow
def test_the_shell_completes_values_without_torch(tmp_path: Path, own_home: Path) -> None:
    ingested(tmp_path)
    run = Path(ok("train", "fed3r", *IID).data["path"]).name
    ok("runs", "tag", "base", run)
    ok("partition", *IID, "--name", "thirds")
    assert completed("fedcache train fed3", own_home) == ["fed3r", "fed3r-prior"]
    assert completed("fedcache grid --method fedavg,fedn", own_home) == [
        f"fedavg,fed{n}" for n in ("ncm", "nova", "ntd")
    ]
    assert completed("fedcache train -b efficientnet-lite", own_home) == [f"efficientnet-lite{n}" for n in range(3)]
    assert completed("fedcache train -d min", own_home) == ["mine"]
    assert completed("fedcache train --partition th", own_home) == ["thirds"]
    assert completed("fedcache train --scheme fe", own_home) == ["feature-shift", "feature-label-shift", "few-shot"]
    assert completed("fedcache train --device c", own_home) == ["cpu", "cuda"]
    assert completed(f"fedcache runs show {run[:2]}", own_home) == [run]
    assert completed("fedcache runs diff tag", own_home) == ["tag:base"]
    assert completed("fedcache runs list --tag ", own_home) == ["base"]


@pytest.mark.slow
def test_every_list_in_a_pipe_is_tab_separated(tmp_path: Path) -> None:
    ingested(tmp_path)
    ok("train", "fed3r", *IID)
    for words in (("ls",), ("runs", "list"), ("methods", "list"), ("backbones", "list"), ("datasets", "list"),
                  ("grid", "--ready", "list")):  # fmt: skip
        head, *lines = fedcache(*words).out.splitlines()
        assert lines, words
        assert {line.count("\t") for line in lines} == {head.count("\t")}, words
    entries = json.loads(fedcache("methods", "list", "--json").out)["data"]["methods"]
    names = [line.split("\t")[0] for line in fedcache("methods", "list").out.splitlines()[1:]]
    assert names == [e["name"] for e in entries if "summary" in e]


def test_no_word_of_a_table_is_folded_at_any_width() -> None:
    words = ["digits-300-63fb48be.zarr", "efficientnet-lite0-7fd4fb8b, glyph-clip-b6b8bc8f", "1.3 MB"]
    for width in range(20, 140):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(TextTable("", ("store", "arrays", "size"), [words, words]))
        shown = console.export_text()
        fits = max(map(len, " ".join(words).split())) + len("arrays: ") <= width
        if fits:
            assert all(word.strip(",") in shown for word in " ".join(words).split()), shown
        assert all(len(line) <= width for line in shown.splitlines())
