"""Ask the page's application in this process, without a socket, and by the real command."""

import asyncio
import html
import re
import signal
from contextlib import contextmanager
from dataclasses import dataclass

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
    def words(self):
        """What a person reads of a page, each run of white space as one space."""
        text = self.body.decode().partition("<main")[2].partition("</main>")[0].partition(">")[2]
        return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


class Client:
    """The application of a home, asked as uvicorn asks it."""

    def __init__(self, home):
        self.pages = Pages(Home(home, offline=True), home.parent)
        self.app = self.pages.app(TOKEN)

    def ask(self, path, *, token=TOKEN, method="GET", headers=None):
        """The answer to a path after the token."""
        plain, _, query = path.partition("?")
        given = {"host": "127.0.0.1:4321", **(headers or {})}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": f"/{token}{plain}" if token else plain,
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
        }
        sent = []

        given_body = False

        async def receive():
            nonlocal given_body
            if given_body:
                await asyncio.Event().wait()  # a window that stays open
            given_body = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        head = {k.decode(): v.decode("latin-1") for k, v in sent[0]["headers"]}
        return Answer(sent[0]["status"], head, b"".join(m.get("body", b"") for m in sent[1:]))

    def read(self):
        """Every run of the home, once all that waits is read."""
        self.pages._looked = 0.0  # another window may have asked just now, and then nobody looks
        self.pages.look()
        while self.pages.runs.waiting:
            self.pages.look()
        return self.pages.runs.every()


@contextmanager
def served(home):
    """The address of ``fedcache ui`` in a process of its own, and the process."""
    process = start("ui --no-open", home=home, capture=True)
    address = process.stdout.readline().strip()
    try:
        yield address, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(20)
        process.communicate()
