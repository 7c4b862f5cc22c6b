"""Hints that are right, several faults in one answer, and lines that say something: through the real command line."""

import os
import subprocess
import sys

import pytest
from arrays import ingested
from command import data_of, fedcache, ok
from failing_command import must_fail
from made_path import place_of

from fedcache.errors import Exit

IID = "--scheme iid --clients 3"


def completed(line, home):
    """What the shell offers for the last word of a line, and that torch was not imported for it."""
    words = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_FEDCACHE_COMPLETE": "complete_bash",
    }
    code = "import sys; sys.modules['torch'] = None; from fedcache.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **words, "FEDCACHE_HOME": str(home)},
    )
    return done.stdout.split()


def test_the_method_is_named_with_or_without_its_option(tmp_path):
    ingested(tmp_path)
    assert data_of(f"train --method fed3r {IID}")["path"] == data_of(f"train fed3r {IID}")["path"]
    assert data_of(f"grid fed3r fedncm {IID}")["reused"] == 1
    must_fail("", "train fed3r --method fedncm")
    must_fail("", "train")


def test_export_takes_its_file_as_an_argument_or_an_option(tmp_path):
    ingested(tmp_path)
    out = tmp_path / "all.npz"
    assert data_of(f"export -o {out}")["path"] == str(out)
    assert fedcache("export").code == fedcache("export a.npz -o b.npz").code == Exit.USAGE


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (f"train fed3r {IID} --device gpu", Exit.USAGE, ["--device cuda"]),
        ("extract --dataset digits -b resnet98,nonesuch", Exit.USAGE, ["'resnet98'", "'nonesuch'"]),
        ("train fed3r --backbones left,right", Exit.STORE, ["'left'", "'right'"]),
        ("grid fed3x,fedavh", Exit.USAGE, ["'fed3r'", "'fedavg'"]),
    ],
)
def test_hints_name_what_is_meant_and_all_that_is_missing(tmp_path, words, code, said):
    ingested(tmp_path)
    done = fedcache(words)
    assert done.code == code
    assert [word for word in said if word not in done.err] == []


def test_a_run_of_one_round_is_one_run_however_often_it_is_scored(tmp_path):
    ingested(tmp_path)
    first = data_of(f"train fed3r {IID}")
    again = data_of(f"train fed3r {IID} --eval-every 1")
    assert again["reused"] is True
    assert again["path"] == first["path"]
    end, each = (data_of(f"train fedavg {IID} --rounds 2 --eval-every {k}")["path"] for k in (0, 1))
    assert end != each
    labels = {e["path"]: e["differs"] for e in data_of("runs list --method fedavg")["entries"]}
    assert labels == {end: "eval_every=0", each: "eval_every=1"}


@pytest.mark.slow
def test_the_shell_completes_values_without_torch(tmp_path, own_home):
    ingested(tmp_path)
    run = place_of(f"train fed3r {IID}").name
    ok(f"runs tag base {run}")
    ok(f"partition {IID} --name thirds")
    for line, offered in (
        ("fedcache tr", ["train"]),
        ("fedcache train --trac", ["--track"]),
        ("fedcache train fed3", ["fed3r", "fed3r-prior"]),
        ("fedcache grid --method fedavg,fedn", [f"fedavg,fed{n}" for n in ("ncm", "nova", "ntd")]),
        (
            "fedcache train -b efficientnet-lite",
            [*(f"efficientnet-lite{n}" for n in range(3)), "efficientnet-lite0-words"],
        ),
        ("fedcache train -d min", ["mine"]),
        ("fedcache train --partition th", ["thirds"]),
        ("fedcache train --scheme fe", ["feature-shift", "feature-label-shift", "few-shot"]),
        (f"fedcache runs show {run[:2]}", [run]),
        ("fedcache runs list --tag ", ["base"]),
    ):
        assert completed(line, own_home) == offered, line
