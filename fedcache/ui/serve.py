"""The server of the page: a socket of loopback, one process, until it is told to stop."""

from __future__ import annotations

import html
import secrets
import socket
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn

from fedcache.config import Home
from fedcache.errors import MachineError
from fedcache.ui.server import Pages

LOOPBACK = "127.0.0.1"


def open_socket(port: int) -> socket.socket:
    """A listening socket of loopback; port 0 takes a free one. Raises MachineError for a port that cannot be had."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((LOOPBACK, port))
    except OSError as error:
        made.close()
        raise MachineError(
            f"Port {port} of {LOOPBACK} cannot be had: {error.strerror}.",
            "--port 0 takes one that is free.",
        ) from error
    return made


def serve(home: Home, port: int, *, show: bool, say: Callable[[str], None]) -> str:
    """Serve the page of a home until SIGINT or SIGTERM.

    Args:
        home: that is shown.
        port: of loopback; 0 takes a free one.
        show: whether to open it in the browser of this machine.
        say: told the address, once it can be opened.

    Returns:
        the address it had.
    """
    with open_socket(port) as sock, TemporaryDirectory(prefix="fedcache-ui-") as folder:
        token = secrets.token_urlsafe(24)
        pages = Pages(home, Path(folder))
        address = f"http://{LOOPBACK}:{sock.getsockname()[1]}/{token}/"
        sock.listen(128)
        config = uvicorn.Config(
            pages.app(token),
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
            proxy_headers=False,
            ws="none",
        )
        server = uvicorn.Server(config)
        pages.ended = lambda: server.should_exit
        say(address)
        if show:
            open_in_browser(address, Path(folder))
        with suppress(KeyboardInterrupt):  # uvicorn gives the signal back once it has ended
            server.run(sockets=[sock])
    return address


def open_in_browser(address: str, folder: Path) -> bool:
    """Open an address in the browser; whether there is one.

    The browser is given a file that only this user can read and that leads to the address: the arguments of a process
    are there for every user of the machine to read, and the token would be among them.
    """
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0;url={html.escape(address)}">',
        "utf-8",
    )
    try:
        return webbrowser.open(page.as_uri())
    except webbrowser.Error:
        return False
