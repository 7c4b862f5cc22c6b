"""The three programs of a federation: the server's SuperLink, a site's SuperNode, and the command that starts a run."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.federate.engines.flower.processes import (
    Keys,
    Process,
    check_port,
    ends_with_us,
    environment,
    program,
    start,
    wait_for_port,
)
from fedcache.federate.engines.flower.site_names import TABLE, VARIABLE
from fedcache.store.files import make_private

MARK = "fedcache> "
"""Begins the lines of a run's log that are for ``fedcache flower run``; JSON follows. ``server_app`` writes them."""


ANSI = re.compile(r"\x1b\[[0-9;]*m")
"""Colours in Flower's logs."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

EVERYWHERE = "0.0.0.0"  # nosec B104
"""Every address of this machine: where a server with TLS and keys listens, and no other."""


@dataclass(frozen=True)
class Address:
    """Where a SuperLink listens."""

    host: str  # an address or a name
    port: int  # of it
    ca: Path | None = None  # the certificate it is checked with; None without TLS

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, ca: Path | None) -> Address:
        """``HOST:PORT``. Raises UsageError."""
        host, sign, port = text.rpartition(":")
        if not sign or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(
                f"--superlink {text} is not HOST:PORT.", "For example --superlink 192.0.2.10:8000"
            )
        return cls(host.strip("[]"), int(port), ca)

    def need_loopback(self, mend: str) -> None:
        """Refuse to leave the machine without TLS. Raises UsageError."""
        if self.ca is None and self.host not in LOOPBACK:
            raise UsageError(
                f"--insecure at {self.host}: anybody in the network could read what is sent, and take part.",
                mend,
            )

    def check(self) -> bool:
        """Whether somebody listens there. Raises MachineError, when the certificate is another's."""
        try:
            with socket.create_connection((self.host, self.port), timeout=5.0) as plain:
                if self.ca is None:
                    return True
                context = ssl.create_default_context(cafile=str(self.ca))
                with context.wrap_socket(plain, server_hostname=self.host):
                    return True
        except ssl.SSLCertVerificationError as error:
            raise MachineError(
                f"The certificate of {self} does not hold against {self.ca}: {error.verify_message}.",
                f"Take ca.crt from the server's folder of keys; another host than the certificate's: "
                f"fedcache flower keys --out KEYS --host {shell_word(self.host)}",
            ) from error
        except ssl.SSLError as error:
            raise MachineError(
                f"{self} does not speak TLS: {error.reason}.",
                "Start it with keys: fedcache flower server --keys KEYS",
            ) from error
        except OSError:
            return False


def start_superlink(address: Address, keys: Keys | None, folder: Path) -> Process:
    """Start the server, with keys by TLS and for known nodes alone. Raises MachineError, when the port is taken."""
    check_port(address.host, address.port, "--port")
    # What it knows of nodes outlives it, so that sites find it again after a restart.
    make_private(folder)
    command = [
        program("flower-superlink"),
        "--host",
        address.host,
        "--port",
        str(address.port),
        "--database",
        str(folder / "superlink.db"),
    ]
    if keys is None:
        command.append("--insecure")
    else:
        certificate, private = map(str, keys.server)
        command += [
            "--ssl-ca-certfile",
            str(keys.ca),
            "--ssl-certfile",
            certificate,
            "--ssl-keyfile",
            private,
            "--enable-supernode-auth",
        ]
    # Without keys a node is another one at every start, and no name can be kept for it.
    names = ""
    if keys is not None:
        names = str(folder / TABLE)
    process = start("superlink", command, folder, {VARIABLE: names})
    try:
        wait_for_port(
            process,
            "127.0.0.1" if address.host in (EVERYWHERE, "::") else address.host,
            address.port,
        )
    except BaseException:  # also Ctrl-C: nobody else knows of it yet
        process.stop()
        raise
    return process


def start_supernode(
    address: Address,
    config: Mapping[str, str],
    key: Path | None,
    folder: Path,
    port: int,
    name: str = "site",
) -> Process:
    """Start a site; it looks for the server until it is there. Raises MachineError, when the port is taken.

    ``config`` of the node has shard, state and name; ``key`` is None without TLS; ``port`` is of loopback, for the
    site's own processes.
    """
    check_port("127.0.0.1", port, "--port")
    words = " ".join(f"{k}={json.dumps(str(v))}" for k, v in config.items())
    command = [
        program("flower-supernode"),
        "--superlink",
        str(address),
        "--port",
        str(port),
        "--node-config",
        words,
    ]
    command += ["--insecure"] if address.ca is None else ["--root-certificates", str(address.ca)]
    if key is not None:
        command += ["--auth-supernode-private-key", str(key)]
    return start(name, command, folder)


@contextmanager
def connection(address: Address) -> Iterator[dict[str, str]]:
    """The environment of ``flwr`` with one connection, ``fedcache``."""
    with tempfile.TemporaryDirectory(prefix="fedcache-flower-") as folder:
        trust = {"insecure": True} if address.ca is None else {"root-certificates": str(address.ca)}
        table = {
            "superlink": {"default": "fedcache", "fedcache": {"address": str(address), **trust}}
        }
        (Path(folder) / "config.toml").write_text(tomli_w.dumps(table))
        yield environment(Path(folder))


REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[1:]:
    try:
        app(["supernode", "register", key, "fedcache"], standalone_mode=False)
    except Exception as error:
        print("FAILED", key, getattr(error, "message", error), flush=True)
"""
"""Flower's own command for one key after the other: importing it takes longer than all of them."""


def register(address: Address, publics: Sequence[Path]) -> None:
    """Tell the server of nodes' keys, also of those it knows already. Raises MachineError, with what Flower says."""
    if not publics:
        return
    with connection(address) as env:
        done = subprocess.run(
            ends_with_us([sys.executable, "-c", REGISTER, *map(str, publics)]),
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    said = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("FAILED") and "already" not in line.lower()
    ]
    if done.returncode or said:
        raise MachineError(
            f"Keys were not registered: {'; '.join(said) or done.stderr.strip()[-500:]}",
            "fedcache flower keys --out KEYS --sites NAME   makes some that can be.",
        )


def run_app(path: Path, address: Address, told: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start a run of an app and follow its log until it ends; returns its last words, ``done`` or ``error``.

    ``told`` is called with every note and warning of the run. Raises MachineError, when the run cannot be started or is
    lost on its way.
    """
    if not address.check():
        raise MachineError(
            f"Nothing listens at {address}.", "Start the server: fedcache flower server --port 8000"
        )
    last: dict[str, Any] = {}
    lines: list[str] = []
    with connection(address) as env:
        process = subprocess.Popen(
            ends_with_us([program("flwr"), "run", str(path), "fedcache", "--stream"]),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                _, mark, words = line.rstrip("\n").partition(MARK)
                if not mark:
                    lines = [*lines[-30:], ANSI.sub("", line.rstrip())]
                    continue
                try:
                    found = json.loads(words)
                except ValueError:
                    continue
                if "done" in found or "error" in found:
                    last = found
                    break
                told(found)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if not last:
        raise MachineError(
            "The run ended without a word of how:\n"
            + "\n".join(x for x in lines if x.strip())[-1500:],
            "Look at the server's log; the same command again goes on after the last whole round.",
        )
    return last
