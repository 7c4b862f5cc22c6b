"""Run the real command line on a terminal of a given width."""

from __future__ import annotations

import os
import re
import struct
import sys


def on_a_terminal(*words, home, width=60, env=None):
    """(exit code, everything that was drawn) of ``fedcache WORDS``."""
    import fcntl
    import pty
    import termios

    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        kept = {
            k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
        }
        kept |= {
            "FEDCACHE_HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "TERM": "xterm-256color",
            **(env or {}),
        }
        os.execve(sys.executable, [sys.executable, "-m", "fedcache", *map(str, words)], kept)
    drawn = b""
    while True:
        try:
            part = os.read(fd, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        drawn += part
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), drawn.decode()


def plain(drawn):
    """Without the sequences that move and colour."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
