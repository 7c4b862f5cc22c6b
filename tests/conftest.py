"""What holds for every test: nothing leaves the machine, and nothing touches the user's own folders."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """How many examples property tests draw goes into the report, for docs/trust.md."""
    for item in items:
        if (mark := item.get_closest_marker("cases")) is not None:
            item.user_properties.append(("cases", mark.args[0]))


LOOPBACK = ("localhost", "127.0.0.1", "::1")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuse hosts other than loopback as an unplugged machine does, and fail the test that tried.

    Yields:
        the hosts tried so far; a test of what happens without a network clears it.
    """
    tried: list[str] = []

    def guarded(name: str) -> None:
        real = getattr(socket.socket, name)

        def connect(self: socket.socket, address: Any) -> Any:
            if self.family != getattr(socket, "AF_UNIX", None) and address[0] not in LOOPBACK:
                tried.append(str(address))
                raise OSError(errno.ENETUNREACH, "Network is unreachable (refused by the tests)")
            return real(self, address)

        monkeypatch.setattr(socket.socket, name, connect)

    guarded("connect")
    guarded("connect_ex")
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host is not None and host not in LOOPBACK:
            tried.append(str(host))
            raise socket.gaierror(socket.EAI_AGAIN, "Name resolution is refused by the tests")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield tried
    assert not tried, f"tried to reach {tried}"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and library caches of the test's own."""
    home = tmp_path / "home"
    monkeypatch.setenv("FEDCACHE_HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for name in ("FEDCACHE_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return home
