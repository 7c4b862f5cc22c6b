"""kill -9 of the server and of sites of a real federation on loopback: nothing runs on, and the end is the same."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from arrays import around
from command import apart, environment, words_of
from draws import FULL

pytest.importorskip("flwr", reason="pip install 'fedcache[flower]'")
from fedcache.federate.engines.flower.processes import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(7200)]

MARK = "FEDCACHE_TEST_MARK"
ROUNDS = 2
LINES, SECONDS = 7, 8.0
"""That a run tells of itself before its last round ends, and that a message to a site takes."""

SITES = ("north", "south")
GONE = 30.0
"""Seconds after a kill in which everything that a command has started is gone."""


@dataclass
class Started:
    """A command that was left running."""

    popen: subprocess.Popen[str]
    mark: str  # in the environment of all that it starts
    log: Path

    @classmethod
    def of(cls, line, *words, home, log, mark):
        with log.open("a") as sink:
            popen = subprocess.Popen(
                [sys.executable, "-m", "fedcache", *words_of(line), *map(str, words)],
                stdout=sink,
                stderr=sink,
                text=True,
                env={**environment(home), MARK: mark},
                start_new_session=True,
            )
        return cls(popen, mark, log)

    def kill(self):
        """Kill the command alone: what it has started has to notice."""
        self.popen.kill()
        self.popen.wait()

    def left(self):
        """Command lines of what it has started and still runs."""
        found, word = [], f"{MARK}={self.mark}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if word in (place / "environ").read_bytes().split(b"\0"):
                    found.append((place / "cmdline").read_text().replace("\0", " "))
        return found

    def nothing_left(self):
        """Assert that all of it ends."""
        last = time.monotonic() + GONE
        while self.left() and time.monotonic() < last:
            time.sleep(0.2)
        assert self.left() == []


@dataclass
class Federation:
    """Two sites with TLS and keys, each with a home of its own, and the server's."""

    root: Path
    port: int = field(default_factory=free_port)
    started: int = 0
    running: list[Started] = field(default_factory=list)

    @property
    def home(self):
        return self.root / "server"

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self, name, *words, home):
        self.started += 1
        log = self.root / "logs" / f"{self.started}-{name}.log"
        log.parent.mkdir(exist_ok=True)
        self.running.append(
            Started.of(*words, home=home, log=log, mark=f"{self.port}-{self.started}")
        )
        return self.running[-1]

    def server(self):
        line = f"flower server --host 127.0.0.1 --port {self.port} --keys"
        return self.start("server", line, self.root / "keys", home=self.home)

    def site(self, number):
        shard = sorted((self.root / "sites").glob("*.zarr"))[number]
        keys = self.root / "keys" / "sites" / SITES[number]
        line = f"flower site --superlink {self.address} --shard"
        home = self.root / SITES[number]
        return self.start(SITES[number], line, shard, "--keys", keys, home=home)

    @cached_property
    def app(self):
        """What is run again and again."""
        out = self.root / "app"
        line = (
            f"flower app --method scaffold --timeout 300 --json --rounds {ROUNDS} --sites 2 --out"
        )
        done = apart(line, out, home=self.home)
        assert done.code == 0, done.err
        return out

    def run(self):
        line = f"flower run --json --superlink {self.address}"
        return self.start("run", line, self.app, "--keys", self.root / "keys", home=self.home)

    def listens(self):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0),
        ):
            return True
        return False

    def wait_for_a_moment(self, run, draw):
        """Until a run has told so many lines of its story, and up to some seconds more."""
        lines, more = draw.randrange(LINES), draw.uniform(0.0, SECONDS)
        while run.popen.poll() is None and len(run.log.read_text().splitlines()) < lines:
            self.tend()
        last = time.monotonic() + more
        while run.popen.poll() is None and time.monotonic() < last:
            self.tend()

    def tend(self):
        """Start the second site again where the server refused it, not having missed the killed one yet (exit 6)."""
        time.sleep(0.05)
        if self.second.popen.poll() == 6:
            assert "killed less than a minute ago" in self.second.log.read_text()
            self.site(1)

    @property
    def second(self):
        return next(one for one in reversed(self.running) if one.log.stem.endswith(SITES[1]))

    def end(self, run):
        """Wait until a run has ended; its exit code."""
        last = time.monotonic() + 900
        while run.popen.poll() is None and time.monotonic() < last:
            self.tend()
        return run.popen.poll()

    def result(self):
        found = list((self.home / "runs").glob("*/result.json"))
        return found[0].read_bytes() if found else None

    def finish(self):
        """The result of the app, run to its end; it is put aside, so that the next run makes it again."""
        done = self.run()
        assert self.end(done) == 0, done.log.read_text()
        found = self.result()
        assert found is not None
        (self.home / "runs").rename(self.home / f"runs-{self.started}")
        return found

    def stop(self):
        for one in self.running:
            if one.popen.poll() is None:
                one.popen.send_signal(signal.SIGTERM)
        for one in self.running:
            one.popen.wait(60)
            one.nothing_left()

    def left_files(self):
        """Files of a killed process in any home."""
        return {p for name in ("server", *SITES) for p in (self.root / name).rglob(".*.partial")}

    def named_by_gc(self):
        found = set()
        for name in ("server", *SITES):
            answer = apart("gc --json", home=self.root / name)
            found |= {Path(one["path"]) for one in json.loads(answer.out)["data"]["garbage"]}
        return found


@pytest.fixture
def federation(tmp_path):
    x, y = around(4, 60, 2)
    np.savez(
        tmp_path / "rows.npz", features=x, labels=y, split=(np.arange(240) % 5 == 0).astype(int)
    )
    home = tmp_path / "cutting"
    for words in (
        f"ingest --name rows {tmp_path}/rows.npz",
        f"partition --scheme dirichlet --alpha 1 --name two --clients {len(SITES)}",
        f"shard --partition two --out {tmp_path}/sites",
        f"flower keys --out {tmp_path}/keys --sites {','.join(SITES)}",
    ):
        done = apart(f"{words} --json", home=home)
        assert done.code == 0, done.err
    made = Federation(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def reference(federation):
    """The server, with both sites, and the result of a federation that nothing disturbs."""
    server = federation.server()
    while not federation.listens():
        assert server.popen.poll() is None, server.log.read_text()
        time.sleep(0.1)
    for number in range(len(SITES)):
        federation.site(number)
    return server, federation.finish()


def test_a_killed_server_leaves_nothing_and_goes_on_to_the_same_result(federation, record_property):
    """kill -9 of ``fedcache flower server`` at any moment of its life, up to three times on the way of each run."""
    server, expected = reference(federation)
    server.kill()
    server.nothing_left()
    draw, killed, wanted = random.Random(5), 0, 10 if FULL else 1
    record_property("cases", wanted)
    while killed < wanted:
        for _ in range(min(3, wanted - killed)):
            server, run = federation.server(), None
            starting = time.monotonic() + draw.choice([draw.uniform(0.0, 5.0), 60.0, 60.0, 60.0])
            while time.monotonic() < starting and not federation.listens():
                time.sleep(0.05)
            if federation.listens():
                run = federation.run()
                federation.wait_for_a_moment(run, draw)
            server.kill()
            killed += 1
            server.nothing_left()
            if run is not None:
                assert run.popen.wait(120) in (0, 6), run.log.read_text()
                run.nothing_left()
            assert federation.left_files() <= federation.named_by_gc()
            if federation.result() is not None:
                break
        server = federation.server()
        while not federation.listens():
            time.sleep(0.1)
        assert federation.finish() == expected
        server.kill()
        server.nothing_left()
    assert federation.left_files() <= federation.named_by_gc()


@pytest.mark.skipif(
    not FULL, reason="minutes of waiting for Flower to miss a node; in make nightly"
)
def test_a_killed_site_costs_itself_alone_and_comes_back(federation, record_property):
    """kill -9 of ``fedcache flower site`` at any moment; started again, the same command has the same result."""
    _server, expected = reference(federation)
    draw, killed, wanted = random.Random(6), 0, 10
    record_property("cases", wanted)
    while killed < wanted:
        run = federation.run()
        for _ in range(min(3, wanted - killed)):
            federation.wait_for_a_moment(run, draw)
            if run.popen.poll() is not None:
                break
            lost = federation.second
            lost.kill()
            killed += 1
            lost.nothing_left()
            time.sleep(draw.choice([0.0, 10.0, 60.0]))
            federation.site(1)
        if federation.end(run) == 0:
            once = json.loads(federation.result() or b"{}")
            assert {m["site"] for m in once["federation"]["missed"]} <= {"client-1"}
        else:  # it was away for all of --wait, and this run is of two sites
            assert run.popen.returncode == 7
            assert "1 of 2 sites are connected after 120 s: client-0." in run.log.read_text()
        assert federation.finish() == expected
    assert federation.left_files() <= federation.named_by_gc()
