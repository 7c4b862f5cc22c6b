"""Loaded by every Python of a federation under test: notes each name that is looked up and each address reached."""

import os
import sys
from pathlib import Path

PLACE = os.environ.get("FEDCACHE_TEST_REACHED")
LOOPBACK = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "")
LOOKED_UP = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")


def note(event, arguments):
    if event in LOOKED_UP:
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto"):
        # a path is a socket of this machine
        host = arguments[1][0] if isinstance(arguments[1], tuple) else ""
    else:
        return
    host = host.decode() if isinstance(host, bytes) else str(host or "")
    if host.split("%")[0] not in LOOPBACK:
        with Path(PLACE).open("a") as file:
            file.write(f"{event} {host} by {' '.join(sys.argv)[:120]}\n")


def seen(program):
    with Path(f"{PLACE}.seen").open("a") as file:
        file.write(f"{program}\n")


if PLACE:
    seen(Path(sys.orig_argv[1]).name if len(sys.orig_argv) > 1 else "?")
    os.register_at_fork(after_in_child=lambda: seen("fork"))
    sys.addaudithook(note)
