"""Ask the page's application in this process, without a socket, and by the real command."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command import start

from fedcache.config import Home
from fedcache.ui.server import Pages

TOKEN = "t0ken"


@dataclass
class Answer:
    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


class Client:
    """The application of a home, asked as uvicorn asks it."""

    def __init__(self, home: Path) -> None:
        self.pages = Pages(Home(home, offline=True))
        self.app = self.pages.app(TOKEN)

    def ask(
        self,
        path: str,
        *,
        token: str = TOKEN,
        method: str = "GET",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """The answer to a path after the token."""
        plain, _, query = path.partition("?")
        given = {"host": "127.0.0.1:4321", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": f"/{token}{plain}" if token else plain,
            "raw_path": plain.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "server": ("127.0.0.1", 4321),
            "client": ("127.0.0.1", 5),
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
        }
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        head = {k.decode(): v.decode("latin-1") for k, v in sent[0]["headers"]}
        return Answer(sent[0]["status"], head, b"".join(m.get("body", b"") for m in sent[1:]))

    def changes(self, since: int = 0) -> Any:
        """What changed, once everything that waits is read."""
        self.pages._looked = 0.0  # another window may have asked just now, and then nobody looks
        found = self.ask(f"/api/changes?since={since}").data
        while found["waiting"]:
            found = self.ask(f"/api/changes?since={since}").data
        return found


@contextmanager
def served(home: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of ``fedcache ui`` in a process of its own, and the process."""
    process = start("ui", "--no-open", home=home, capture=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        yield address, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(20)
        process.communicate()
