"""Keys, ports and addresses: made once, readable by their owner alone, and refused in one sentence when wrong."""

import os
import socket
import ssl
import subprocess
import threading

import pytest
from refusal import machine_error, refused

from fedcache.federate.engines.flower.processes import (
    Address,
    check_port,
    make_keys,
    read_keys,
    read_site_keys,
    with_forks,
)

pytest.importorskip("flwr", reason="pip install 'fedcache[flower]'")
pytestmark = pytest.mark.engines


def test_keys_are_made_once_and_more_sites_are_added(tmp_path):
    keys = make_keys(tmp_path / "keys", ["north"], ["192.0.2.10", "server.example"])
    before = {p: p.read_bytes() for p in (keys.ca, *keys.server, keys.site("north") / "node.key")}
    assert make_keys(tmp_path / "keys", ["north", "south"], []).nodes.keys() == {"north", "south"}
    assert {p: p.read_bytes() for p in before} == before
    for private in (keys.path / "ca.key", keys.server[1], keys.site("south") / "node.key"):
        assert private.stat().st_mode & 0o077 == 0
    assert {p.name for p in keys.site("south").iterdir()} == {"ca.crt", "node.key"}
    assert read_keys(tmp_path / "keys").ca == keys.ca


def test_an_authority_whose_key_is_elsewhere_is_never_replaced(tmp_path):
    keys = make_keys(tmp_path / "keys", ["north"], [])
    before = {path: path.read_bytes() for path in (keys.ca, *keys.server)}
    (keys.path / "ca.key").unlink()
    assert make_keys(tmp_path / "keys", ["south"], []).nodes.keys() == {"north", "south"}
    refused(lambda: make_keys(tmp_path / "keys", [], ["192.0.2.10"]), "has no ca.key")
    assert {path: path.read_bytes() for path in before} == before


def test_the_server_is_known_by_its_own_authority_alone(tmp_path):
    mine, other = (make_keys(tmp_path / name, ["a"], ()) for name in ("mine", "other"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*map(str, mine.server))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def greet():
            for _ in range(2):
                plain, _who = server.accept()
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        thread = threading.Thread(target=greet)
        thread.start()
        assert Address("127.0.0.1", port, mine.ca).check()
        machine_error(Address("127.0.0.1", port, other.ca).check, "cannot be verified with")
        thread.join()
    assert not Address("127.0.0.1", port, mine.ca).check()  # nobody listens any more


@pytest.mark.parametrize(
    ("lost", "why"), [("node.key", "lacks node.key"), ("ca.crt", "lacks ca.crt")]
)
def test_what_a_site_was_not_handed_is_named(lost, why, tmp_path):
    folder = make_keys(tmp_path / "keys", ["a"], ()).site("a")
    (folder / lost).unlink()
    refused(lambda: read_site_keys(folder), why)
    (folder / lost).write_text("no key")
    refused(lambda: read_site_keys(folder), "is no")


def test_a_name_that_is_a_path_is_refused(tmp_path):
    refused(lambda: make_keys(tmp_path / "keys", ["../a"], ()), "is not a valid site name")


def test_a_port_that_is_taken_is_named_with_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        machine_error(
            lambda: check_port("127.0.0.1", port),
            f"Port {port} of 127.0.0.1 cannot be used",
            "--port",
        )


@pytest.mark.parametrize("text", ["", "host", ":8000", "host:0", "host:99999", "host:x"])
def test_an_address_that_is_none_is_refused(text):
    refused(lambda: Address.parse(text, None), "is not HOST:PORT")
    assert Address.parse("[::1]:8000", None) == Address("::1", 8000)


def test_the_apps_of_a_site_import_nothing_from_the_folder_it_is_started_in(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    env = os.environ | with_forks(tmp_path / "a site's")
    shown = subprocess.check_output(["flower-superexec", "--version"], env=env, cwd=tmp_path)
    assert shown.startswith(b"Flower version")
