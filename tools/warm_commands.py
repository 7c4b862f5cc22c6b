"""The program ``fedcache`` in forks of one process that has imported what commands need.

A command started so takes milliseconds instead of two processor seconds, nearly all of them for importing torch. The
command reads and writes what its caller gave it, in the caller's folder and environment.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMPORTED = (
    "fedcache.commands.extract",
    "fedcache.commands.train",
    "fedcache.federate.methods.fedavg",
    "fedcache.grids.train_grid",
    "fedcache.runs.loop",
    "sklearn.datasets",
)
LONGEST = 1 << 20
"""Bytes of a request: words, folder and environment."""
PROGRAM = f"""#!{sys.executable} -IS
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({{address!r}})
link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {LONGEST})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(link, [request], [0, 1, 2])
sys.exit(link.recv(1)[0])
"""


@contextmanager
def program(folder: Path, root: Path) -> Iterator[Path]:
    """A file in ``folder`` that is the program ``fedcache`` of the checkout ``root`` as long as the context is open."""
    address = folder / "commands"
    words = [sys.executable, __file__, str(address)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            path = folder / "fedcache"
            path.write_text(PROGRAM.format(address=str(address)))
            path.chmod(0o755)
            yield path
        finally:
            server.terminate()


def serve(address: str) -> None:
    """Run the commands that come, each in a process of its own, until this one is ended."""
    for name in IMPORTED:
        __import__(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            link, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(link)
            link.close()


def answer(link: socket.socket) -> None:
    """Run the command of a request in another fork, and send its exit code when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, _, _ = socket.recv_fds(link, LONGEST, 3)
    command = os.fork()
    if command == 0:
        link.close()
        run(*json.loads(request), files)
    status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    link.send(bytes([status % 256]))
    os._exit(0)


def run(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """Become the command."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["fedcache", *words]
    sys.path[0] = folder
    runpy.run_module("fedcache", run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1])
