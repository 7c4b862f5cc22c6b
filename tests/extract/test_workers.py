"""Worker processes that die: the call that waits for them ends with an error, whenever and however they ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import python
from refusal import machine_error, stopped

from fedcache import process
from fedcache.extract.workers import processes
from fedcache.extract.workers.processes import WorkerProcesses
from fedcache.process import INTERRUPTED, Stop

MORE_THAN_A_PIPE = b"x" * (1 << 20)


def keep(_):
    """What a worker needs at its start, far more than a pipe holds."""


class HalfSent:
    """A value whose answer is cut: the worker dies after the first bytes are in the pipe."""

    def __reduce__(self):
        import multiprocessing.connection as connection

        def cut(self, buf):
            os.write(self._handle, (len(buf)).to_bytes(4, "big") + bytes(buf[:1000]))  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

        connection.Connection._send_bytes = cut  # type: ignore[method-assign]
        return bytes, (MORE_THAN_A_PIPE,)


def half_an_answer():
    return HalfSent()


def end_at_start(*_):
    os._exit(1)


on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="workers are forks of a server on Linux"
)


@pytest.fixture
def stillborn(monkeypatch):
    """Pools of workers that end before they read anything, as a signal to the group ends those that are starting."""
    monkeypatch.setattr(processes, "start_worker", end_at_start)
    return lambda count, needed, stop: WorkerProcesses(count, keep, (needed,), stop)


def test_a_worker_that_dies_before_it_reads_what_it_needs_is_noticed(stillborn):
    pool = stillborn(2, MORE_THAN_A_PIPE, Stop())
    machine_error(lambda: pool.ask(os.getpid), "worker ended")
    pool.close()


@pytest.mark.slow
@on_linux
def test_workers_start_again_after_their_server_was_ended(monkeypatch):
    """A signal to the whole group ends the server too, before or after it has started workers."""
    for name in ("first", "second"):
        monkeypatch.setenv("HERE", name)
        pool = WorkerProcesses(2, keep, (b"",), Stop())
        assert pool.ask(os.getenv, "HERE") == name
        pool.close()
        ended = forkserver._forkserver._forkserver_pid
        os.kill(ended, signal.SIGKILL)
        while forkserver._forkserver._forkserver_pid == ended:
            process.worker_context()


STARTED = """
import os, sys, time
from multiprocessing import forkserver
from fedcache.process import worker_context
sys.path.insert(0, "/first/of/all")
before = dict(os.environ)
worker_context()
assert dict(os.environ) == before
server = f"/proc/{forkserver._forkserver._forkserver_pid}"
while "forkserver" not in open(f"{server}/cmdline").read():
    time.sleep(0.01)  # it is still a copy of this process
(blocked,) = [line.split()[1] for line in open(f"{server}/status") if line.startswith("SigBlk")]
variables = open(f"{server}/environ").read().split(chr(0))
print(int(blocked, 16), *[word for word in variables if word.startswith("PYTHON")])
"""


@on_linux
def test_the_first_server_of_a_process_ignores_ctrl_c_and_imports_from_where_its_caller_does():
    blocked, *variables = python(STARTED).split()
    assert int(blocked) >> (signal.SIGINT - 1) & 1
    assert "PYTHONSAFEPATH=1" in variables
    assert any(word.startswith("PYTHONPATH=/first/of/all:") for word in variables)


INTERRUPTED_EARLY = """
import sys
from multiprocessing import forkserver
from fedcache.process import worker_context
sys.path.insert(0, sys.argv[1])
worker_context("slow")
print(forkserver._forkserver._forkserver_pid, flush=True)
raise KeyboardInterrupt
"""


def running(pid):
    """Whether a process exists and has not ended; an ended one remains until its parent asks for its state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@on_linux
def test_a_server_that_still_imports_ends_with_its_process(tmp_path):
    """After Ctrl-C, the server imported for as long as torch takes, which can be longer than five seconds."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    words = [sys.executable, "-c", INTERRUPTED_EARLY, str(tmp_path)]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with run.stdout:
        server = int(run.stdout.readline())
    run.wait(60)
    deadline = time.monotonic() + 10
    while running(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(server)


@on_linux
def test_workers_whose_server_ends_before_they_start_are_an_error_of_the_machine():
    pool = WorkerProcesses(1, keep, (b"",), Stop())
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (server, signal.SIGKILL)).start()
    machine_error(lambda: pool.ask(os.getpid), "worker ended")
    pool.close()


@pytest.mark.slow
def test_a_worker_that_dies_in_the_middle_of_an_answer_is_noticed_and_the_pool_ends():
    pool = WorkerProcesses(1, keep, (MORE_THAN_A_PIPE,), Stop())
    machine_error(lambda: pool.ask(half_an_answer), "worker ended")
    thread = pool.pool._executor_manager_thread
    pool.close()
    thread.join(200)
    assert not thread.is_alive()  # the interpreter waits for it when it ends


def test_workers_that_end_after_a_request_to_stop_are_no_failure_of_the_machine(stillborn):
    stop = Stop()
    stop.ask()
    pool = stillborn(1, b"", stop)
    stopped(lambda: pool.ask(os.getpid), "Stopped on request")
    pool.close()


DEAF = """
import sys, time
from fedcache.process import Stop, stop_on_signals
with stop_on_signals(Stop().ask, print):
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass  # code that swallows it, as the end of a write that blocks does
"""


SLOW_TO_END = """
import sys, time
from fedcache.process import Stop, stop_on_signals
class Late:
    def __del__(self, sleep=time.sleep):
        sleep(60)  # as libraries that take seconds to be taken apart; no thread runs any more
late = Late()
with stop_on_signals(Stop().ask, print):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "number", "status"),
    [
        (SLOW_TO_END, signal.SIGINT, -signal.SIGALRM),
        (DEAF, signal.SIGINT, 130),
        (DEAF, signal.SIGTERM, 130),
    ],
)
def test_the_second_signal_ends_a_process_that_does_not_listen(code, number, status):
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(number)
    time.sleep(0.1)
    assert run.poll() is None  # the first only asks
    run.send_signal(number)
    assert run.wait(50) == status
    run.stdout.close()


ENDING = """
import signal, sys
from fedcache.process import Stop, stop_on_signals
with stop_on_signals(Stop().ask, print):
    signal.raise_signal(signal.SIGTERM)
try:
    signal.raise_signal(signal.SIGTERM)  # what was to be put in order is
    while True:
        pass
except KeyboardInterrupt:
    sys.exit(9)
"""


def test_a_second_signal_after_the_work_ends_the_process_without_another_word():
    run = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, timeout=200, check=False
    )
    assert run.returncode == INTERRUPTED
    assert run.stderr == b""


def test_a_worker_leaves_signals_to_its_parent_and_takes_what_it_is_sent(monkeypatch):
    done = []
    monkeypatch.setattr(
        processes.signal, "signal", lambda number, what: done.append((number, what))
    )
    monkeypatch.setattr(
        processes.signal, "pthread_sigmask", lambda how, which: done.append((how, which))
    )
    monkeypatch.setattr(processes, "die_with_parent", lambda: done.append("watched"))
    sent = SimpleNamespace(recv=lambda: ({"PATH": "of the caller"}, ("a", 2)))
    monkeypatch.setattr(processes.os, "environ", {"FROM_BEFORE": "1"})
    processes.start_worker(lambda *given: done.append(given), sent, threading.Lock())
    s = signal
    assert done == [
        (s.SIGINT, s.SIG_IGN),
        (s.SIG_UNBLOCK, {s.SIGINT}),
        (s.SIGTERM, s.SIG_DFL),
        "watched",
        ("a", 2),
    ]
    assert processes.os.environ == {"PATH": "of the caller"}


def test_a_worker_ends_with_its_parent(monkeypatch):
    done = []
    monkeypatch.setattr(processes.connection, "wait", done.append)
    monkeypatch.setattr(processes.os, "_exit", done.append)
    monkeypatch.setattr(
        processes.threading, "Thread", lambda target, daemon: SimpleNamespace(start=target)
    )
    for parent in (None, SimpleNamespace(sentinel=7)):
        monkeypatch.setattr(processes, "parent_process", lambda parent=parent: parent)
        assert not done
        processes.die_with_parent()
    assert done == [[7], 1]


def test_a_process_that_ends_at_once_ends_its_workers(monkeypatch):
    killed = []
    ended = []
    child = SimpleNamespace(kill=lambda: killed.append(1))
    monkeypatch.setattr("multiprocessing.active_children", lambda: [child, child])
    monkeypatch.setattr(process.os, "_exit", ended.append)
    monkeypatch.setattr(process.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", 7)
    process.end_at_once()
    assert killed == [1, 1, (7, signal.SIGKILL)]
    assert ended == [130]


def test_memory_is_kept_only_where_the_c_library_can(monkeypatch):
    # as malloc.h names them: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    most = {-3: 2**31 - 1, -1: 2**31 - 1}
    for able, kept in (({-3, -1}, True), ({-1}, False), ({-3}, False)):
        library = SimpleNamespace(mallopt=lambda n, v, able=able: n in able and v == most[n])
        monkeypatch.setattr("ctypes.CDLL", lambda _name, library=library: library)
        assert process.keep_freed_memory() is kept
    monkeypatch.setattr("ctypes.CDLL", lambda _name: SimpleNamespace())
    assert process.keep_freed_memory() is False
    process.return_freed_memory()  # does nothing there


def test_freed_memory_is_returned_by_glibc_alone(monkeypatch):
    asked = []
    monkeypatch.setattr("ctypes.CDLL", lambda _name: SimpleNamespace(malloc_trim=asked.append))
    process.return_freed_memory()
    assert asked == [0]
