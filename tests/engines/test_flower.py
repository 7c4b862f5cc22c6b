"""A real federation through Flower on loopback: three sites, TLS, node keys, five methods, and what is refused.

One deployment serves all tests, because a message takes seconds. It runs in a network of its own
with nothing but loopback where that is allowed, and every Python in it notes the names and addresses it asks for.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import apart
from own_package import lay

pytest.importorskip("flwr", reason="pip install 'fedcache[flower]'")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(2000)]

LATER = pytest.mark.full
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LONGEST = 1900  # a third of it on two cores that have nothing else to do


def offline():
    """The words that run a command where only loopback is; none where the system does not allow it."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return []
    words = [
        "unshare",
        "--map-root-user",
        "--net",
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "sh",
    ]
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    return words if tried.returncode == 0 else []


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the federation answered, by name."""
    place = tmp_path_factory.mktemp("federation")
    home, sites, reached = place / "home", place / "sites", place / "reached"
    site = lay(new_package(place / "half-step", home), place / "site")
    for words in (
        "extract --dataset digits --backbones glyph-clip --limit 900",
        "partition --scheme dirichlet --clients 3 --alpha 0.5 --name three",
        f"shard --partition three --out {sites}",
    ):
        done = apart(words, home=home)
        assert done.code == 0, done.err
    env = {
        **os.environ,
        "FEDCACHE_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "FEDCACHE_TEST_REACHED": str(reached),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "watched"), str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [
        *offline(),
        sys.executable,
        str(HERE / "loopback.py"),
        str(sites),
        str(place / "logs"),
    ]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LONGEST, check=False, cwd=place
    )
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            words = json.loads(line)
            found[words["name"]] = words
    assert "end" in found, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found["reached"] = {
        "hosts": reached.read_text().splitlines() if reached.exists() else [],
        "programs": sorted(set(Path(f"{reached}.seen").read_text().split())),
    }
    return found


def result(words):
    (run,) = words["last"]["done"]
    return run["result"]


def accuracy(words):
    return float(result(words)["accuracy"]["mean"])


def new_package(folder, home):
    """A method of a package that ``fedcache new`` writes."""
    done = apart("new method", folder.name, "--out", folder, home=home)
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize(
    "method",
    [
        "fed3r",
        "fedpcl",
        "half-step",
        *(pytest.param(m, marks=LATER) for m in ("fedavg", "fst-cbdg")),
    ],
)
def test_sites_through_flower_give_the_accuracy_of_one_process(method, told):
    words = told[method]
    assert accuracy(words) == pytest.approx(words["alone"], abs=1e-5)
    assert result(words)["federation"]["missed"] == []


def test_the_accuracy_of_a_round_says_over_how_many_sites(capsys):
    from fedcache.federate.engines.flower.server_app import Logged

    shown = []
    for scored in ({}, {"scored": 2.0}):
        Logged().round_done(
            SimpleNamespace(
                stored=False,
                seed=0,
                round=1,
                rounds=1,
                point="",
                accuracy=0.5,
                diagnostics=scored,
            )
        )
        shown.append(capsys.readouterr().out)
    assert "2 sites" in shown[1]
    assert "2 sites" not in shown[0]


def test_a_server_that_is_given_sums_alone_gives_the_accuracy_of_one_process(told):
    words = told["secure"]
    assert accuracy(words) == pytest.approx(words["alone"], abs=1e-5)
    federation = result(words)["federation"]
    assert federation["missed"] == []
    assert federation["uploads"].startswith("only sums (SecAgg+)")


def test_a_site_that_is_killed_in_a_round_is_survived(told):
    words = told["killed"]
    missed = result(words)["federation"]["missed"]
    assert missed[0]["round"] == 2
    assert "disconnected" in missed[0]["why"]
    assert accuracy(words) > 0.3


def test_a_name_belongs_to_the_key_that_the_site_proved_that_it_has(told):
    known = told["names"]["known"]
    assert len(known) == len(set(known.values())) == 3
    missed = result(told["another-key"])["federation"]["missed"]
    assert [m["why"] for m in missed] == [
        "rejected: its name belongs to another key that used the name before"
    ]
    assert missed[0]["site"] in known


def test_what_ends_a_run_comes_back_as_one_sentence(told):
    error = told["no-features"]["last"]["error"]
    assert error["code"] == 4
    assert "0 of 3 sites are connected" in error["message"]
    assert "pixels" in error["message"]
    assert "fedcache extract" in error["hint"]


def test_an_unknown_key_is_refused_in_one_sentence(told):
    assert told["unknown-key"]["code"] == 6
    assert "does not know this site's key" in told["unknown-key"]["message"]
    assert "fedcache flower keys" in told["unknown-key"]["hint"]


def test_no_name_is_looked_up_and_nothing_but_loopback_is_reached(told):
    assert told["reached"]["hosts"] == []
    for program in (
        "flower-superlink",
        "flower-supernode",
        "fork",  # the app of a message
        "flwr-serverapp",
        "flwr",
    ):
        assert program in told["reached"]["programs"]  # and all of them were watched
