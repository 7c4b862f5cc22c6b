"""Run a command where nothing can leave the machine, and count what tries.

In a network namespace of its own there is loopback alone, and the kernel counts what it has no route for. The only name
server is a thread here: it writes down every name and knows none.

    unshare --map-root-user --net --mount python quiet.py REPORT COMMAND ...
"""

import fcntl
import json
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SETUP = """
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount --bind "$1/hosts" /etc/hosts
"""
SIOCSIFFLAGS, UP = 0x8914, 0x1


def names(query):
    """The name that a query asks for."""
    at, parts = 12, []
    while query[at]:
        parts.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace"))
        at += 1 + query[at]
    return ".".join(parts)


def serve(line, asked):
    """Answer that there is no such name."""
    while True:
        query, sender = line.recvfrom(4096)
        asked.append(names(query))
        line.sendto(query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12:], sender)


def tried():
    """Connections and datagrams to addresses that are not of this machine: the kernel found no route for them."""
    names, values = (
        ln.split() for ln in Path("/proc/net/snmp").read_text().splitlines() if ln.startswith("Ip:")
    )
    six = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return int(values[names.index("OutNoRoutes")]) + int(six["Ip6OutNoRoutes"])


def main(report, command):
    """Run the command; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        (Path(folder) / "hosts").write_text(
            f"127.0.0.1 localhost {socket.gethostname()}\n::1 localhost\n"
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP))
        subprocess.run(["sh", "-ec", SETUP, "sh", folder], check=True)
    line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    line.bind(("127.0.0.1", 53))
    asked = []
    threading.Thread(target=serve, args=(line, asked), daemon=True).start()
    before = tried()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    run = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    code = run.wait()
    Path(report).write_text(json.dumps({"asked": asked, "tried": tried() - before}))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
