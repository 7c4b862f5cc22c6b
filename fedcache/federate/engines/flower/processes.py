"""Starts Flower's programs as processes that write a log and end with fedcache, and makes the keys of a federation.

``need_flower`` checks the installation before anything is started or imported.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.federate.engines.flower import QUIET
from fedcache.federate.engines.flower.site_names import TABLE, VARIABLE
from fedcache.parsing import Facts, host_and_port
from fedcache.store.files import make_private
from fedcache.store.lock import write_output

LOW = (1, 41)  # the first supported version of Flower
HIGH = (1, 42)  # the first version that is not supported
INSTALL = "pip install 'fedcache[flower]'"

START_WITHIN = 60.0
"""Seconds within which a program must open its port."""

GRACE = 8.0
"""Seconds between the request to stop a process and killing it."""


def need_flower() -> str:
    """Flower's version. Raises MachineError without Flower, or with an unsupported version."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise MachineError("Flower is not installed.", INSTALL) from None
    parts = found.split(".")[:2]
    numbers = tuple(int(part) for part in parts if part.isdigit())
    if not LOW <= numbers < HIGH:
        raise MachineError(
            f"Flower {found} is installed, but fedcache needs 1.41.",
            f"{INSTALL}  (or flwr>=1.41,<1.42)",
        )
    return found


def program(name: str) -> str:
    """The path of one of Flower's programs, in the folder of this Python or on PATH. Raises MachineError."""
    need_flower()
    found = shutil.which(name, path=program_path())
    if found is None:
        raise MachineError(f"The program {name} of Flower was not found next to Python.", INSTALL)
    return found


def environment(flwr_home: Path) -> dict[str, str]:
    """The environment of every Flower process: no telemetry, no update check, no installation, a separate FLWR_HOME."""
    return {
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(flwr_home),
        "PATH": program_path(),  # Flower starts its own programs by name
        "PYTHONUNBUFFERED": "1",
    }


def program_path() -> str:
    """PATH with the folder of this Python in front."""
    programs = str(Path(sys.executable).parent)
    return os.pathsep.join([programs, os.environ.get("PATH", "")])


def end_with_parent(grace: float = GRACE) -> None:
    """End this process of Flower ``grace`` seconds after the end of the process that started it.

    Flower sends a process SIGINT when the process of ``--parent-pid`` has ended. But the process may then wait forever
    for an answer of the killed server, and work in the same directory as the ServerApp of the next start.
    """
    words = sys.argv
    if "--parent-pid" not in words[:-1]:
        return
    parent = int(words[words.index("--parent-pid") + 1])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass
class Process:
    """A running program of Flower."""

    name: str  # for messages
    popen: subprocess.Popen[bytes]
    log: Path  # file of its output

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Stop the program and all of its child processes, by their process numbers."""
        children = descendants(self.popen.pid)
        self.popen.terminate()  # after SIGTERM the program ends its own child processes
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(GRACE)
        self._kill(children)

    def kill(self) -> None:
        """Kill the program and all of its child processes at once."""
        self._kill(descendants(self.popen.pid))

    def _kill(self, children: Mapping[int, str]) -> None:
        """Kill the program and ``children``: process numbers -> start times."""
        self.popen.kill()
        for pid, since in children.items():
            # The start time tells the process from a later one with the same number.
            if since == _start_time(pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(GRACE)


ENDS_WITH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Script that runs a program which Linux kills when its parent ends, even if the parent is killed (1 is
PR_SET_PDEATHSIG). Otherwise a SuperLink could outlive a killed command and keep its port, and the same command would
then fail. Python's ``preexec_fn`` would need no second process, but it can hang with threads."""


def ends_with_us(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that on Linux it ends with the thread that starts it."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-S", "-c", ENDS_WITH, str(os.getpid()), *command]


def start(
    name: str, command: Sequence[str], folder: Path, extra: Mapping[str, str] | None = None
) -> Process:
    """Start a program; its log and its Flower folder are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    env = {**environment(folder / f"{name}.flwr"), **(extra or {})}
    with log.open("wb") as sink:
        popen = subprocess.Popen(
            ends_with_us(command),
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
    return Process(name, popen, log)


def stop_all(processes: Sequence[Process]) -> None:
    """Stop processes, the last started first."""
    # Every process gets the signal before the first one is awaited, so that all end at the same time.
    for process in reversed(processes):
        process.popen.terminate()
    for process in reversed(processes):
        process.stop()


def descendants(pid: int) -> dict[int, str]:
    """Child processes of a process at all levels -> their start times; {} on systems other than Linux."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        child = int(entry.name)
        fields = _stat(child)
        if fields:
            parent = int(fields[1])  # field 4
            children.setdefault(parent, []).append(child)
    found = []
    waiting = [pid]
    while waiting:
        started = children.get(waiting.pop(), [])
        found += started
        waiting += started
    times = {child: _start_time(child) for child in found}
    return {child: since for child, since in times.items() if since}


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from field 3 on, which follows the name of the process; [] if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    _, _, fields = text.rpartition(")")
    return fields.split()


def _start_time(pid: int) -> str:
    """The start time of a process, in ticks since boot; "" if it has ended."""
    fields = _stat(pid)
    if len(fields) > 19:
        return fields[19]  # field 22
    return ""


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken. Raises MachineError, with a port that is free."""
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise MachineError(
                f"Port {port} of {host} cannot be used: {error.strerror}.",
                f"Choose another, for example --port {free_port()}",
            ) from error


def wait_for_port(process: Process, host: str, port: int) -> None:
    """Wait until a process listens. Raises MachineError, with the end of its log, if it ends first or is late."""
    deadline = time.monotonic() + START_WITHIN
    while time.monotonic() < deadline and process.alive:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.2)
    raise failure_of(process, "did not open its port")


def failure_of(process: Process, what: str) -> MachineError:
    """The error for a process that ended by itself. If the process is still alive, ``what`` says how it failed."""
    if not process.alive:
        what = f"ended with {process.popen.returncode}"
    message = f"{process.name} {what}:\n{process.tail()}"
    return MachineError(message, f"The complete log: {process.log}")


# Keys of a federation: a local certificate authority, the server's certificate, and a key for every
# site. They give TLS, and the list of sites that may take part.
#
#     KEYS/ca.crt          certificate of the authority, with which sites check the server
#     KEYS/ca.key          its private key; no running program needs it
#     KEYS/server.crt|key  certificate and key of the server
#     KEYS/nodes/NAME.pub  public key of a site, for the server
#     KEYS/sites/NAME/     node.key and ca.crt: the folder to hand to that site, and nothing else


with suppress(ImportError):  # a dependency of Flower; ``need_flower`` reports it if it is missing
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
        load_ssh_private_key,
    )

DAYS = 825
"""Days for which a certificate is valid, the most that TLS clients accept from a private authority."""

ALWAYS = ("127.0.0.1", "localhost")
"""Hosts that every certificate of a server includes."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Keys:
    """A folder of keys."""

    path: Path  # of the folder

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.path / "ca.crt"

    @property
    def server(self) -> tuple[Path, Path]:
        """Certificate and key of the server."""
        return self.path / "server.crt", self.path / "server.key"

    @property
    def nodes(self) -> dict[str, Path]:
        """Site -> its public key."""
        files = sorted((self.path / "nodes").glob("*.pub"))
        return {file.stem: file for file in files}

    def site(self, name: str) -> Path:
        """The folder to hand to that site."""
        return self.path / "sites" / name


def make_keys(path: Path, sites: Sequence[str], hosts: Sequence[str]) -> Keys:
    """Make the missing keys of a folder; the authority and existing keys stay.

    ``hosts`` are addresses and names at which sites reach the server; loopback is always added. Raises UsageError for
    an illegal name of a site; MachineError without Flower.
    """
    need_flower()
    for name in sites:
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a valid site name.",
                "Use letters, digits, dots, dashes and underscores: --sites a,b",
            )
    keys = Keys(path.expanduser().resolve())
    for folder in (keys.path, keys.path / "nodes", keys.path / "sites"):
        make_private(folder)
    certificate, private = keys.server
    # A certificate is made for its addresses, so new addresses need a new one.
    is_complete = certificate.exists() and keys.ca.exists()
    if hosts or not is_complete:
        ca_key, ca = _authority(keys)
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(private, key)
        addresses = tuple(dict.fromkeys((*hosts, *ALWAYS)))
        write_output(certificate, _signed(key, ca_key, ca, addresses))
    for name in sites:
        folder = keys.site(name)
        make_private(folder)
        write_output(folder / "ca.crt", keys.ca.read_bytes())
        private = folder / "node.key"
        public = keys.path / "nodes" / f"{name}.pub"
        if private.exists() and public.exists():
            continue
        node = ec.generate_private_key(ec.SECP384R1())
        _write_private(private, node, ssh=True)
        raw = node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_output(public, raw + b" " + name.encode() + b"\n")
    return keys


def read_keys(path: Path) -> Keys:
    """The keys of a folder, for a server. Raises UsageError for a missing file."""
    keys = Keys(path.expanduser().resolve())
    files = (keys.ca, *keys.server)
    missing = ", ".join(file.name for file in files if not file.exists())
    if missing:
        raise UsageError(
            f"{path} lacks {missing}.",
            f"fedcache flower keys --out {shell_word(path)} --sites a,b,c --host ADDRESS",
        )
    return keys


def read_site_keys(path: Path) -> tuple[Path, Path]:
    """The files ca.crt and node.key of a site. Raises UsageError for a missing or malformed file."""
    need_flower()
    folder = path.expanduser().resolve()
    ca = folder / "ca.crt"
    key = folder / "node.key"
    hint = (
        "Copy KEYS/sites/NAME, which has ca.crt and node.key, from the folder that `fedcache flower keys "
        "--out KEYS` made."
    )
    for file in (ca, key):
        if not file.exists():
            raise UsageError(f"{path} lacks {file.name}.", hint)
    try:
        x509.load_pem_x509_certificate(ca.read_bytes())
    except ValueError as error:
        raise UsageError(f"{ca} is not a certificate.", hint) from error
    try:
        load_ssh_private_key(key.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{key} is not a private key.", hint) from error
    return ca, key


def _authority(keys: Keys) -> tuple[Any, Any]:
    """Key and certificate of the authority, made once.

    Raises UsageError if one of the two files is missing, because a new authority would lock out all sites.
    """
    path = keys.path / "ca.key"
    missing = [file.name for file in (path, keys.ca) if not file.exists()]
    if len(missing) == 1:
        raise UsageError(
            f"{keys.path} has no {missing[0]}, which signs certificates of the server.",
            f"Put {missing[0]} back. Or make new keys in another folder, and give every site its new keys.",
        )
    if not missing:
        ca_key = load_pem_private_key(path.read_bytes(), None)
        return ca_key, x509.load_pem_x509_certificate(keys.ca.read_bytes())
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedcache local authority")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_private(path, key)
    write_output(keys.ca, made.public_bytes(Encoding.PEM))
    return key, made


def _signed(key: Any, ca_key: Any, ca: Any, hosts: Sequence[str]) -> bytes:
    """The server's certificate, for these addresses and names."""
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    purpose = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    made = (
        _builder(_name("fedcache server"), ca.subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(purpose, critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    raw: bytes = made.public_bytes(Encoding.PEM)
    return raw


def _name(common: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common)])


def _builder(subject: Any, issuer: Any, public: Any) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(*, sign: bool) -> Any:
    """Permitted uses of a key: to sign certificates, or else to prove the server's identity."""
    return x509.KeyUsage(
        digital_signature=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_private(path: Path, key: Any, *, ssh: bool = False) -> None:
    """Write a private key that only its owner can read."""
    form = PrivateFormat.PKCS8
    if ssh:
        form = PrivateFormat.OpenSSH
    write_output(path, key.private_bytes(Encoding.PEM, form, NoEncryption()))
    path.chmod(0o600)


# Starts the programs of a federation: the server's SuperLink, a site's SuperNode, and the command for a run.

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
                f"The certificate of {self} cannot be verified with {self.ca}: {error.verify_message}.",
                "Use ca.crt from the server's folder of keys. If the certificate is for another host name: "
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
    link: Facts = {"address": str(address)}
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


def run_app(path: Path, address: Address, on_words: Callable[[Facts], None]) -> Facts:
    """Start a run of an app and follow its log until the run ends; returns the last message, ``done`` or ``error``.

    ``on_words`` is called with every note and warning of the run. Raises MachineError if the run cannot be started or
    ends without such a message.
    """
    if not address.check():
        raise MachineError(
            f"No server is listening at {address}.",
            "Start the server: fedcache flower server --port 8000",
        )
    last: Facts = {}
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
        assert process.stdout is not None
        try:
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
            process.stdout.close()
    if not last:
        log = "\n".join(line for line in lines if line.strip())
        raise MachineError(
            f"The run ended without a result:\n{log[-1500:]}",
            "Check the log of the server. Run the same command again with the same sites to resume after the last "
            "complete round. With other sites, a new run begins.",
        )
    return last
