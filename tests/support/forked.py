"""Commands and scripts in forks of one process that has imported what they need.

Such a start takes milliseconds instead of two processor seconds, so that a kill falls into the work and not into
imports.
"""

import multiprocessing
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from command import Done, environment, words_of

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "dp_accounting",
        "fedcache.commands.extract",
        "fedcache.commands.train",
        "fedcache.federate.methods.fedavg",
        "fedcache.grids.train_grid",
        "fedcache.runs.loop",
        "sklearn.datasets",
    ]
)


def _run(program, words, folder, surroundings, sinks, begun):
    os.setsid()
    # An extraction in this process may have started the server, with SIGINT blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(surroundings)
    for number, sink in enumerate(sinks, 1):
        os.dup2(os.open(sink, os.O_WRONLY | os.O_CREAT), number)
    begun.send(os.getpid())
    sys.argv = [str(program), *words]
    run = runpy.run_path
    if program == "fedcache":
        run = runpy.run_module
    run(str(program), run_name="__main__")


class Forked:
    """What the tests use of ``subprocess.Popen``."""

    def __init__(self, program, words, home):
        kept = tempfile.mkdtemp(prefix="output-", dir=Path(home).parent)
        self.sinks = [Path(kept, name) for name in ("out", "err")]
        begun, sends = CONTEXT.Pipe(duplex=False)
        asked = (program, tuple(map(str, words)), Path.cwd(), environment(home), self.sinks, sends)
        self.process = CONTEXT.Process(target=_run, args=asked)
        self.process.start()
        sends.close()
        self.pid = begun.recv()

    def poll(self):
        return self.process.exitcode

    returncode = property(poll)

    def kill(self):
        """Kill its process group, which may just have ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()

    def wait(self, timeout=None):
        self.process.join(timeout)
        assert not self.process.is_alive()
        return self.returncode

    def communicate(self, timeout=None):
        self.wait(timeout)
        return tuple(sink.read_text() for sink in self.sinks)


def start(line, *words, home):
    """``fedcache LINE WORDS`` in a process group of its own, left running."""
    return Forked("fedcache", [*words_of(str(line)), *words], home)


def script(path, *words, home):
    """A file of Python in a process group of its own, left running."""
    return Forked(path, words, home)


def apart(line, *words, home):
    """``fedcache LINE WORDS`` in a process of its own, to its end."""
    run = start(line, *words, home=home)
    out, err = run.communicate(timeout=280)
    return Done(run.returncode, out, err)


class Kills:
    """Kills of a kind of command at a drawn share, from 0.3 to ``latest``, of the time that it takes."""

    def __init__(self, words, home, seed, latest):
        began = time.monotonic()
        whole = apart(*words, home=home)
        assert whole.code == 0, whole.err
        self.seconds = time.monotonic() - began
        self.home = home
        self.draw = random.Random(seed)
        self.latest = latest
        self.number = 0

    def of(self, words, times):
        """Start a command up to ``times`` times and yield after each kill, until it ends before one."""
        for attempt in range(times):
            run = start(*words, home=self.home)
            began = time.monotonic()
            run.process.join(self.draw.uniform(0.3, self.latest) * self.seconds)
            if run.poll() is not None:
                if attempt == 0:
                    # The machine has become faster since the first command.
                    self.seconds = time.monotonic() - began
                return
            run.kill()
            self.number += 1
            yield
