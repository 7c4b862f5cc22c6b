"""Starts the programs of a federation: the server's SuperLink, a site's SuperNode, and the command for a run."""

from __future__ import annotations

import json
import os
import re
import shlex
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
    program_path,
    start,
    wait_for_port,
)
from fedcache.federate.engines.flower.site_names import TABLE, VARIABLE
from fedcache.parsing import host_and_port
from fedcache.store.files import make_private

MARK = "fedcache> "
"""Beginning of the log lines that ``server_app`` writes for ``fedcache flower run``; the rest of the line is JSON."""


ANSI = re.compile(r"\x1b\[[0-9;]*m")
"""Codes of colours in Flower's logs."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

EVERYWHERE = "0.0.0.0"  # nosec B104
"""Address that stands for all addresses of this machine. Only a server with TLS and keys listens there."""


@dataclass(frozen=True)
class Address:
    """Address of a SuperLink."""

    host: str  # an address or a name
    port: int
    # Certificate of the authority that signed the certificate of the server; None without TLS.
    ca: Path | None = None

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    @property
    def local_host(self) -> str:
        """The host at which programs on the machine of the SuperLink reach it."""
        if self.host in (EVERYWHERE, "::"):
            return LOOPBACK[0]
        return self.host

    @classmethod
    def parse(cls, text: str, ca: Path | None) -> Address:
        """``HOST:PORT``. Raises UsageError."""
        found = host_and_port(text)
        if found is None:
            raise UsageError(
                f"--superlink {text} is not HOST:PORT.", "For example --superlink 192.0.2.10:8000"
            )
        return cls(*found, ca)

    def need_loopback(self, hint: str) -> None:
        """Refuse an address of another machine without TLS. Raises UsageError with ``hint``."""
        if self.ca is None and self.host not in LOOPBACK:
            raise UsageError(
                f"--insecure is only for loopback, but the address is {self.host}: anyone on the network could read "
                "the messages and take part.",
                hint,
            )

    def check(self) -> bool:
        """Whether a server listens there. Raises MachineError for a wrong certificate, or a server without TLS."""
        try:
            with socket.create_connection((self.host, self.port), timeout=5.0) as plain:
                if self.ca is None:
                    return True
                context = ssl.create_default_context(cafile=str(self.ca))
                with context.wrap_socket(plain, server_hostname=self.host):
                    return True
        except ssl.SSLCertVerificationError as error:
            raise MachineError(
                f"The certificate of {self} was not signed by {self.ca}: {error.verify_message}.",
                "Use ca.crt from the server's folder of keys. If the host name differs from the "
                f"certificate: fedcache flower keys --out KEYS --host {shell_word(self.host)}",
            ) from error
        except ssl.SSLError as error:
            raise MachineError(
                f"{self} does not speak TLS: {error.reason}.",
                "Start it with keys: fedcache flower server --keys KEYS",
            ) from error
        except OSError:
            return False


def start_superlink(address: Address, keys: Keys | None, folder: Path) -> Process:
    """Start the server; with keys it uses TLS and takes known nodes only. Raises MachineError for a taken port."""
    check_port(address.host, address.port)
    # The database keeps the known nodes, so that sites can return after a restart of the server.
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
    # Without keys there is no table of names, because a node has another identity at every start.
    names = ""
    if keys is None:
        command.append("--insecure")
    else:
        names = str(folder / TABLE)
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
    process = start("superlink", command, folder, {VARIABLE: names})
    try:
        wait_for_port(process, address.local_host, address.port)
    except BaseException:  # also Ctrl-C, because no caller can stop it yet
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
    """Start a site, which tries to connect until the server is there. Raises MachineError for a taken port.

    ``config`` of the node has shard, state and name; ``key`` is None without TLS; ``port`` of loopback connects the
    site's own processes.
    """
    check_port("127.0.0.1", port)
    settings = [field + "=" + json.dumps(str(value)) for field, value in config.items()]
    command = [
        program("flower-supernode"),
        "--superlink",
        str(address),
        "--port",
        str(port),
        "--node-config",
        " ".join(settings),
    ]
    if address.ca is None:
        command.append("--insecure")
    else:
        command += ["--root-certificates", str(address.ca)]
    if key is not None:
        command += ["--auth-supernode-private-key", str(key)]
    return start(name, command, folder, with_forks(folder))


FORKING = """#!/bin/sh
exec {python} -c 'import sys
sys.path[:] = filter(None, sys.path)
from fedcache.federate.engines.flower.app_forks import main
main()' "$@"
"""
"""Program that a SuperNode starts as its SuperExec. It imports nothing from the working directory, because that may
contain any file."""


def with_forks(folder: Path) -> dict[str, str]:
    """Environment in which a SuperNode finds ``FORKING``; {} on systems where a fork is not safe after imports."""
    if sys.platform != "linux":
        return {}
    programs = folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    path = programs / "flower-superexec"
    path.write_text(FORKING.format(python=shlex.quote(sys.executable)))
    path.chmod(0o700)
    return {
        "PATH": os.pathsep.join([str(programs), program_path()]),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds, instead of one
    }


@contextmanager
def connection(address: Address) -> Iterator[dict[str, str]]:
    """The environment of ``flwr`` with one connection, ``fedcache``."""
    link: dict[str, Any] = {"address": str(address)}
    if address.ca is None:
        link["insecure"] = True
    else:
        link["root-certificates"] = str(address.ca)
    with tempfile.TemporaryDirectory(prefix="fedcache-flower-") as folder:
        table = {"superlink": {"default": "fedcache", "fedcache": link}}
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
"""Script that runs Flower's command for every key in one process, because importing Flower takes most of the time."""


def register(address: Address, publics: Sequence[Path]) -> None:
    """Register the public keys of nodes at the server; known ones stay. Raises MachineError with Flower's message."""
    if not publics:
        return
    with connection(address) as env:
        result = subprocess.run(
            ends_with_us([sys.executable, "-c", REGISTER, *map(str, publics)]),
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    # Flower reports a known key as a failure too, but it is no problem here.
    failures = "; ".join(line for line in failed if "already" not in line.lower())
    if result.returncode or failures:
        why = failures or result.stderr.strip()[-500:]
        raise MachineError(
            f"Keys were not registered: {why}",
            "fedcache flower keys --out KEYS --sites NAME   makes valid keys.",
        )


def run_app(
    path: Path, address: Address, on_words: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Start a run of an app and follow its log until the run ends; returns the last message, ``done`` or ``error``.

    ``on_words`` is called with every note and warning of the run. Raises MachineError if the run cannot be started or
    ends without such a message.
    """
    if not address.check():
        raise MachineError(
            f"No server is listening at {address}.",
            "Start the server: fedcache flower server --port 8000",
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
            # Lines with the mark are messages of fedcache; the others are Flower's log, kept for an error message.
            for line in process.stdout:
                _, mark, words = line.rstrip("\n").partition(MARK)
                if not mark:
                    lines = [*lines[-30:], ANSI.sub("", line.rstrip())]
                    continue
                try:
                    message = json.loads(words)
                except ValueError:
                    continue
                if "done" in message or "error" in message:
                    last = message
                    break
                on_words(message)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if not last:
        log = "\n".join(line for line in lines if line.strip())
        raise MachineError(
            f"The run ended without a result:\n{log[-1500:]}",
            "Check the log of the server. Run the same command again to resume after the last complete "
            "round.",
        )
    return last
