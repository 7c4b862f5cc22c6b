"""What the page may ask for: a token before every path, loopback names as the host, GET alone, nothing from elsewhere.

The token stands in the path, so links that are relative keep it and nothing needs a cookie; whoever does not know it
learns nothing, not even which paths there are. A name that resolves to this machine (DNS rebinding) is refused by its
``Host``. The browser is told to load nothing from anywhere else, to tell no other page where it came from, and to keep
nothing.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import fedcache
from fedcache.config import Home
from fedcache.errors import FedcacheError, UsageError
from fedcache.grids.record import FOLDER
from fedcache.ui.answers import ReportShelf, comparison
from fedcache.ui.grids import GridIndex
from fedcache.ui.run_facts import read_details
from fedcache.ui.run_index import RunIndex
from fedcache.ui.stores import StoreIndex
from fedcache.visible_text import escape_json

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""As which a browser on this machine, or at the end of an ssh tunnel to it, calls the server; any port."""
STATIC = {
    "ui.css": "text/css",
    "page.js": "text/javascript",
    "views.js": "text/javascript",
    "draw.js": "text/javascript",
}
MOST_CHOSEN = 1000
"""Runs of a comparison or a report."""
OFTEN = 0.3
"""Seconds between looks at the home, however many windows ask."""

OWN_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts allow-downloads"
)
"""A report is one file with its script inside, which its own policy names by digest; it may not ask this server."""

Scope = MutableMapping[str, Any]
App = Callable[
    [Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]


class Guard:
    """Hands on what a page that knows the token asks; refuses everything else alike.

    Args:
        app: is handed the request, with the path after the token.
        token: of the address.
    """

    def __init__(self, app: App, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """One request."""
        if scope["type"] != "http":  # no websocket, and no part in the server's life
            return
        refused = self._refused(scope)
        if refused is not None:
            await refused(scope, receive, send)
            return
        path = scope["path"].removeprefix(f"/{self.token}")

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                named = {name for name, _ in message["headers"]}
                extra = [h for h in _headers(OWN_POLICY) if h[0] not in named]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() not in HOSTS:
            return _refusal("This page is for a browser on this machine.", 403)
        first = (
            scope["path"].lstrip("/").partition("/")[0]
        )  # `OPTIONS *` has a path without a slash
        if not secrets.compare_digest(first.encode(), self.token.encode()):
            return _refusal(
                "The address of this page has a token, which `fedcache ui` prints.", 403
            )
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return _refusal("Another page asked for this.", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return _refusal("This page only reads.", 405)
        return None


def _refusal(text: str, code: int) -> Response:
    return PlainTextResponse(
        text + "\n", code, headers={k.decode(): v.decode() for k, v in _headers(OWN_POLICY)}
    )


def _headers(policy: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cache-control", b"no-store"),
    ]


class Pages:
    """The answers of the server.

    Args:
        home: that is shown; nothing in it is changed.
    """

    def __init__(self, home: Home) -> None:
        self.home, self.runs, self.stores = home, RunIndex(home.runs), StoreIndex(home)
        self.grids, self.reports = GridIndex(home.root / FOLDER, self.runs), ReportShelf(home.runs)
        self._looked, self._looking = 0.0, threading.Lock()

    def app(self, token: str) -> App:
        """The application behind the guard."""
        routes = [
            Route("/", self.page),
            Route("/static/{name}", self.static),
            Route("/api/changes", self.changes),
            Route("/api/run/{name}", self.run),
            Route("/api/grid/{name}", self.grid),
            Route("/api/store/{name}", self.store),
            Route("/api/store/{name}/images", self.images),
            Route("/api/compare", self.compare),
            Route("/api/report", self.report),
            Route("/report/{ident}.html", self.report_file),
        ]
        return Guard(Starlette(routes=routes), token)

    def look(self) -> None:
        """Look at the home, unless somebody did just now."""
        with self._looking:
            if self.runs.waiting or time.monotonic() - self._looked > OFTEN:
                self.runs.look()
                self._looked = time.monotonic()

    def page(self, _request: Request) -> Response:
        """The one page; its script asks for the rest."""
        return Response(_static("index.html"), media_type="text/html; charset=utf-8")

    def static(self, request: Request) -> Response:
        """A file of the page."""
        name = request.path_params["name"]
        kind = STATIC.get(name)
        return (
            _missing()
            if kind is None
            else Response(_static(name), media_type=f"{kind}; charset=utf-8")
        )

    def changes(self, request: Request) -> Response:
        """What changed of the runs since a version, and all stores and grids as lines."""
        self.look()
        found = self.runs.changes(_whole(request.query_params.get("since", "0")))
        return _json(
            {
                **found,
                "stores": self.stores.lines(),
                "grids": self.grids.lines(),
                "now": time.time(),
                "home": str(self.home.root),
                "program": f"fedcache {fedcache.__version__}",
            }
        )

    def run(self, request: Request) -> Response:
        """One run."""
        name = request.path_params["name"]
        path = self.runs.path(name)
        if path is None:
            return _missing()
        return _json({"run": self.runs.facts(name), "path": str(path), **read_details(path)})

    def grid(self, request: Request) -> Response:
        """One grid with its points."""
        self.look()
        found = self.grids.grid(request.path_params["name"])
        return _missing() if found is None else _json(found)

    def store(self, request: Request) -> Response:
        """One store."""
        found = self.stores.details(request.path_params["name"])
        return _missing() if found is None else _json(found)

    def images(self, request: Request) -> Response:
        """Thumbnails of a store, which somebody asked for."""
        start = _whole(request.query_params.get("start", "0"))
        return self._told(lambda: self.stores.images(request.path_params["name"], start))

    def compare(self, request: Request) -> Response:
        """A comparison of chosen runs."""
        over, metric = (
            request.query_params.get("over", "seeds"),
            request.query_params.get("metric", "accuracy"),
        )
        return self._told(lambda: comparison(self._chosen(request), self.home.runs, over, metric))

    def report(self, request: Request) -> Response:
        """How far the report of chosen runs is; asking begins it."""
        return self._told(lambda: self.reports.ask(self._chosen(request)))

    def report_file(self, request: Request) -> Response:
        """A report that is ready."""
        path = self.reports.file(request.path_params["ident"])
        if path is None:
            return _missing()
        headers = {k.decode(): v.decode() for k, v in _headers(REPORT_POLICY)}
        return Response(path.read_bytes(), headers=headers, media_type="text/html; charset=utf-8")

    def _chosen(self, request: Request) -> list[Path]:
        """The runs that a request names. Raises UsageError for none, too many, and names that are no run."""
        names = [n for n in request.query_params.get("runs", "").split(",") if n]
        if not 0 < len(names) <= MOST_CHOSEN:
            hint = "The command line takes any number."
            raise UsageError(f"{len(names)} runs are chosen, expected 1 to {MOST_CHOSEN:,}.", hint)
        found = {name: self.runs.path(name) for name in names}
        if lost := [name for name, path in found.items() if path is None]:
            raise UsageError(
                f"{', '.join(lost[:5])} is no run of this home any more.", "Choose again."
            )
        return [path for path in found.values() if path is not None]

    def _told(self, call: Callable[[], dict[str, Any] | None]) -> Response:
        """An answer, or the error in words with its hint."""
        try:
            found = call()
        except FedcacheError as error:
            return _json({"problem": error.message, "hint": error.hint})
        return _missing() if found is None else _json(found)


def _missing() -> Response:
    return _json({"problem": "There is nothing of that name here.", "hint": ""}, 404)


def _json(value: Any, code: int = 200) -> Response:
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(escape_json(text), code, media_type="application/json")


def _plain(value: Any) -> Any:
    """The value with None where JSON has no number."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole(text: str) -> int:
    """A whole number of a query; 0 for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _static(name: str) -> str:
    return files("fedcache.ui").joinpath("static", name).read_text(encoding="utf-8")
