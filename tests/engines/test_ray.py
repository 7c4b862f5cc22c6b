"""``--engine ray`` on the real command line: killed workers, lost nodes and Ctrl-C change no byte, and nothing calls
home.

Where the system allows it, every command runs where nothing can leave the machine (``quiet.py``), and every name it
looks up is written down.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from command import apart, environment, words_of
from draws import one_of_each
from files_now import files_now
from own_package import lay
from pictures import folder
from toy_store import content

from fedcache.federate.engines.ray import cluster

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: make test-engines"
)

HERE = Path(__file__).parent
BACKBONES = "random-projection,pixels"
CHUNKS = 2 * 48
APART = ("unshare", "--map-root-user", "--net", "--mount")


@pytest.fixture
def words(tmp_path):
    """An extraction of 384 images in 48 chunks for each of two backbones."""
    images = folder(tmp_path / "many", train=96, test=32)
    return (
        *words_of("extract --size 16 --batch 4 --chunk-rows 8 --json"),
        "--dataset",
        f"folder:{images}",
        "--backbones",
        BACKBONES,
    )


@pytest.fixture
def home():
    return os.environ["FEDCACHE_HOME"]


def chunks(store):
    return len(files_now(store, "features/*/c/*/0"))


class Quiet:
    """Commands that cannot reach anything, and what they tried."""

    def __init__(self, tmp_path, home, *, apart):
        self.apart = apart
        self.report = tmp_path / "report.json"
        user = tmp_path / "user"  # of a user who has told Ray nothing
        user.mkdir(exist_ok=True)
        self.env = {**environment(home), "HOME": str(user)}
        for name in [n for n in self.env if n.startswith("RAY_")]:
            del self.env[name]

    def start(self, *command, **more):
        """A command in a process group of its own."""
        quiet = (
            [*APART, sys.executable, str(HERE / "quiet.py"), str(self.report)] if self.apart else []
        )
        line = [*quiet, *map(str, command)]
        return subprocess.Popen(
            line,
            env={**self.env, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def fedcache(self, *words):
        return self.start(sys.executable, "-m", "fedcache", *words)

    def end(self, run, code=0):
        """What it said, after it has ended as it should and tried nothing."""
        try:
            out, err = run.communicate(timeout=400)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
        assert run.returncode == code, err + out
        if not self.apart:
            return out, err
        found = json.loads(self.report.read_text())
        assert found == {"asked": [], "tried": 0}, found
        return out, err


@pytest.fixture
def half_step(tmp_path, home, monkeypatch):
    """The method of a package that ``fedcache new`` wrote, which every process finds."""
    done = apart("new method half-step", "--out", tmp_path / "half-step", home=home)
    assert done.code == 0, done.err
    site = lay(tmp_path / "half-step", tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    return "half-step"


@pytest.fixture
def quiet(tmp_path, home):
    known = shutil.which("unshare") is not None
    allowed = (
        known and not subprocess.run([*APART, "true"], check=False, capture_output=True).returncode
    )
    return Quiet(tmp_path, home, apart=allowed)


@pytest.fixture
def whole(words, tmp_path, home):
    """The store as one process makes it."""
    store = tmp_path / "whole.zarr"
    done = apart(*words, "--workers", 0, "--store", store, home=home)
    assert done.code == 0, done.err
    return store


def until(reached, store, run):
    while run.poll() is None and chunks(store) < reached:
        time.sleep(0.005)
    assert run.poll() is None, "it ended before anything could be done to it"


def family(run):
    one = psutil.Process(run.pid)
    return [one, *one.children(recursive=True)]


def computing_worker(run):
    """A process of Ray that computes a batch at this moment; between two batches its title is another one."""
    while run.poll() is None:
        for process in family(run):
            with suppress(psutil.NoSuchProcess):
                if "ray::call" in " ".join(process.cmdline()):
                    return process
    raise AssertionError("it ended before a worker could be killed")


def left(processes):
    """Those that have not ended, a while later."""
    _, alive = psutil.wait_procs(processes, timeout=20)
    return [" ".join(p.cmdline()) for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def folders(processes):
    """Temporary folders of the clusters that one of the processes drives."""
    return [
        f
        for p in processes
        for f in Path(cluster._short_parent()).glob(f"{cluster.PREFIX}{p.pid}-*")
    ]


def test_what_would_leave_the_machine_is_seen(quiet):
    if not quiet.apart:
        pytest.skip("this system lets no one have a network of their own")
    code = "import socket\ntry: socket.getaddrinfo('telemetry.example', 80)\nexcept OSError: pass"
    quiet.start(sys.executable, "-c", code).communicate(timeout=60)
    assert "telemetry.example" in json.loads(quiet.report.read_text())["asked"]
    code = (
        "import socket; s = socket.socket(); s.settimeout(1)\ntry: "
        "s.connect(('192.0.2.9', 80))\nexcept OSError: pass"
    )
    quiet.start(sys.executable, "-c", code).communicate(timeout=60)
    assert json.loads(quiet.report.read_text())["tried"] == 1


def test_a_killed_worker_changes_no_byte(words, whole, tmp_path, quiet):
    store = tmp_path / "ray.zarr"
    run = quiet.fedcache(*words, "--engine", "ray", "--workers", 2, "--store", store)
    until(20, store, run)
    everybody = family(run)
    assert len(folders(everybody)) == 1
    computing_worker(run).kill()
    out, err = quiet.end(run)
    assert content(store) == content(whole)
    assert [a["forward_batches"] for a in json.loads(out)["data"]["arrays"]] == [96, 96]
    assert re.search(r"2 processes \(threads each: 1\): expect about [\d,]+ images/s", err)
    assert not left(everybody)
    assert not folders(everybody)
    assert not (tmp_path / "user" / ".ray").exists(), "a token of ours is no file of the user's"
    again = quiet.fedcache(*words, "--engine", "ray", "--store", store)
    assert json.loads(quiet.end(again)[0])["data"]["decoded"] == 0


@pytest.mark.full
def test_ctrl_c_ends_what_is_begun_and_the_same_command_goes_on(words, whole, tmp_path, quiet):
    store = tmp_path / "ray.zarr"
    run = quiet.fedcache(*words, "--engine", "ray", "--store", store)
    until(20, store, run)
    everybody = family(run)
    # as a terminal does: the driver, Ray's processes and the workers
    os.killpg(run.pid, signal.SIGINT)
    _, err = quiet.end(run, 130)
    assert "Run the same command again" in err
    assert not left(everybody)
    assert 20 <= chunks(store) < CHUNKS
    assert not list(store.rglob("*.partial"))
    local = quiet.fedcache(*words, "--store", store)  # with another engine, for that matter
    kept = [a["kept_chunks"] for a in json.loads(quiet.end(local)[0])["data"]["arrays"]]
    assert sum(kept) >= 20
    assert content(store) == content(whole)


ACTORS = """
import sys
from fedcache.federate.engines.ray import engine
from fedcache.cli import main
engine.needs_gpus, engine._gpus = lambda settings: True, lambda: 2
main(sys.argv[1:])
"""


@pytest.mark.full
def test_an_actor_that_dies_is_replaced(words, whole, tmp_path, quiet):
    """Actors as for GPUs, which Ray only counts: here they are CPUs by another name, decoding beside the model."""
    store = tmp_path / "ray.zarr"
    run = quiet.start(sys.executable, "-c", ACTORS, *words, "--engine", "ray", "--store", store)
    until(20, store, run)
    actor = next(p for p in family(run) if "ray::GpuActor" in " ".join(p.cmdline()))
    actor.kill()
    quiet.end(run)
    assert content(store) == content(whole)


@pytest.mark.full
def test_two_nodes_survive_the_loss_of_one(words, whole, tmp_path, quiet):
    store = tmp_path / "ray.zarr"
    (tmp_path / "user" / "ray_bootstrap_config.yaml").write_text("{}\n")  # as in docs/scale
    run = quiet.start(
        sys.executable,
        HERE / "two_nodes.py",
        store / "features",
        20,
        sys.executable,
        "-m",
        "fedcache",
        *words,
        "--engine",
        "ray",
        "--store",
        store,
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_USAGE_STATS_REPORT_URL="http://127.0.0.1:9",
    )
    _, err = quiet.end(run)
    assert "lost a node" in err
    assert re.search(r"Ray: 2 tasks at once on 2 nodes of the Ray cluster at 127.0.0.1:\d+", err)
    assert content(store) == content(whole)


@pytest.mark.parametrize(
    "extra", [(), pytest.param(("--jobs", 2), marks=pytest.mark.full)], ids=["programs", "points"]
)
def test_a_ray_grid_is_the_local_grid(whole, tmp_path, home, half_step, quiet, extra):
    words = (
        *words_of(
            "grid --scheme iid --clients 4 --rounds 3 --seeds 0,1 --backbones random-projection --json"
        ),
        "--method",
        f"{half_step},fed3r",
        "--store",
        whole,
        *extra,
    )
    swept = words_of("--sweep rounds=2,3 --sweep clients=2,4")
    here, there = tmp_path / "here", tmp_path / "there"
    local = apart(*words, *swept, "--runs", here, home=home)
    assert local.code == 0, local.err
    out, err = quiet.end(quiet.fedcache(*words, *swept, "--runs", there, "--engine", "ray"))
    assert "Ray: " in err
    found = json.loads(out)["data"]["points"]
    assert [(p["sweep"], p["digest"]) for p in found] == [
        (p["sweep"], p["digest"]) for p in local.data["points"]
    ]
    for name in ("result.json", "rounds.jsonl"):
        mine, theirs = (
            {f.parent.name: f.read_bytes() for f in at.glob(f"*/{name}")} for at in (here, there)
        )
        assert mine == theirs
        assert len(mine) == len({p["digest"] for p in found})


@pytest.mark.parametrize(
    "method",
    one_of_each(["fedrep", "fedavg", "fed3r"], bool),
)
def test_clients_that_workers_train_give_the_run_of_one_process(
    whole, tmp_path, home, quiet, method
):
    same = (
        *words_of(
            "train --backbones random-projection --clients 40 --scheme iid --seeds 0-1 --participation 20 --json"
        ),
        "--method",
        method,
    )
    same += () if method == "fed3r" else ("--rounds", 2)
    quiet.end(quiet.fedcache(*same, "--execution", "sequential", "--runs", tmp_path / "here"))
    out, err = quiet.end(quiet.fedcache(*same, "--engine", "ray", "--runs", tmp_path / "there"))
    assert "the clients of each round" in err
    path = Path(json.loads(out)["data"]["path"])
    assert (path / "result.json").read_bytes() == (
        tmp_path / "here" / path.name / "result.json"
    ).read_bytes()
    _, err = quiet.end(quiet.fedcache(*same, "--engine", "ray", "--execution", "gram"), code=2)
    assert "--engine ray trains clients one by one" in err
