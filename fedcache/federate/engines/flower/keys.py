"""A local certificate authority, the server's certificate, and a key for every site: TLS and who may take part.

KEYS/ca.crt           what everybody checks the server with
KEYS/ca.key           signs; stays where it is, and nobody needs it to run
KEYS/server.crt|key   the server's
KEYS/nodes/NAME.pub   what the server knows a site by
KEYS/sites/NAME/      node.key and ca.crt: hand this folder to that site, and nothing else
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.errors import UsageError, shell_word
from fedcache.federate.engines.flower.processes import need_flower
from fedcache.store.files import make_private
from fedcache.store.outputs import write_output

with suppress(ImportError):  # it comes with Flower: ``need_flower`` says what to install
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
"""Of validity: what TLS clients accept at most of a certificate that is not the web's."""

ALWAYS = ("127.0.0.1", "localhost")
"""What every certificate of a server is also for."""
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
        return {p.stem: p for p in sorted((self.path / "nodes").glob("*.pub"))}

    def site(self, name: str) -> Path:
        """What that site is handed."""
        return self.path / "sites" / name


def make_keys(path: Path, sites: Sequence[str], hosts: Sequence[str]) -> Keys:
    """Make what is missing of a folder of keys; the authority and the keys that are there stay.

    ``hosts`` are addresses and names at which sites reach the server; loopback is always among them. Raises UsageError
    for a site's name that is none; MachineError without Flower.
    """
    need_flower()
    for name in sites:
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name of a site.",
                "Letters, digits, dots, dashes and underscores: --sites a,b",
            )
    keys = Keys(path.expanduser().resolve())
    for folder in (keys.path, keys.path / "nodes", keys.path / "sites"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private(folder)
    ca_key, ca = _authority(keys)
    certificate, private = keys.server
    if hosts or not certificate.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(private, key)
        write_output(certificate, _signed(key, ca_key, ca, tuple(dict.fromkeys((*hosts, *ALWAYS)))))
    for name in sites:
        folder = keys.site(name)
        make_private(folder)
        write_output(folder / "ca.crt", keys.ca.read_bytes())
        if (folder / "node.key").exists() and (keys.path / "nodes" / f"{name}.pub").exists():
            continue
        node = ec.generate_private_key(ec.SECP384R1())
        _write_private(folder / "node.key", node, ssh=True)
        public = node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_output(keys.path / "nodes" / f"{name}.pub", public + b" " + name.encode() + b"\n")
    return keys


def read_keys(path: Path) -> Keys:
    """The keys of a folder, for a server. Raises UsageError, when something is missing."""
    keys = Keys(path.expanduser().resolve())
    missing = [p.name for p in (keys.ca, *keys.server) if not p.exists()]
    if missing:
        raise UsageError(
            f"{path} lacks {', '.join(missing)}.",
            f"fedcache flower keys --out {shell_word(path)} --sites a,b,c --host ADDRESS",
        )
    return keys


def read_site_keys(path: Path) -> tuple[Path, Path]:
    """Certificate and node's key that a site was handed. Raises UsageError, when something is missing or no key."""
    need_flower()
    ca, key = path.expanduser().resolve() / "ca.crt", path.expanduser().resolve() / "node.key"
    hint = "Take it from the folder of keys: KEYS/sites/NAME has ca.crt and node.key (fedcache flower keys --out KEYS)"
    for file in (ca, key):
        if not file.exists():
            raise UsageError(f"{path} lacks {file.name}.", hint)
    try:
        x509.load_pem_x509_certificate(ca.read_bytes())
    except ValueError as error:
        raise UsageError(f"{ca} is no certificate.", hint) from error
    try:
        load_ssh_private_key(key.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{key} is no private key.", hint) from error
    return ca, key


def _authority(keys: Keys) -> tuple[Any, Any]:
    """Key and certificate of the authority, made once."""
    path = keys.path / "ca.key"
    if path.exists() and keys.ca.exists():
        return load_pem_private_key(path.read_bytes(), None), x509.load_pem_x509_certificate(
            keys.ca.read_bytes()
        )
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedcache local authority")
    made = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
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
    made = (
        _builder(_name("fedcache server"), ca.subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
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
    """A private key, readable by its owner alone."""
    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    write_output(path, key.private_bytes(Encoding.PEM, form, NoEncryption()))
    path.chmod(0o600)
