"""Server of the page. It answers only GET and HEAD requests, of its own pages, with a token, for loopback host names.

The token is part of the path, so relative links keep it and no cookie is needed. Requests without the token learn
nothing, not even which paths exist. Another host name that resolves to this machine (DNS rebinding) is refused by the
``Host`` header. Response headers forbid the browser to load anything from elsewhere, to send a referrer and to cache.
"""

from __future__ import annotations

import asyncio
import html
import secrets
import shlex
import socket
import threading
import time
import webbrowser
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from jinja2 import PackageLoader
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedcache.config import Home
from fedcache.errors import Exit, FedcacheError, MachineError, UsageError, shell_word
from fedcache.grids.record import FOLDER
from fedcache.parsing import size
from fedcache.progress import percent
from fedcache.report.compare import compare_entries
from fedcache.report.comparison_output import caption, sentences, sheets
from fedcache.report.find_runs import gather
from fedcache.report.page import answer_of_runs, overview_of, write_report
from fedcache.report.render import Section, html_environment
from fedcache.store.files import digest_of
from fedcache.store.manifest import VANISHED
from fedcache.tables.splits import SPLIT_NAMES
from fedcache.tables.words import some_names
from fedcache.ui.index import Facts, GridIndex, RunIndex, differing, matches, read_details
from fedcache.ui.stores import PAGE, StoreIndex

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Host names, with any port, that a browser may use on this machine or at the end of an ssh tunnel."""
MOST_ANSWERED = 200
"""Maximum number of runs whose results the overview shows; these are the newest."""
OFTEN = 0.3
"""Minimum number of seconds between two looks at the home, however many windows are open."""

OWN_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts allow-downloads"
)
"""Content security policies: of the server's own pages, and of a report.

A report may have inline scripts here, because the report's own policy allows only one script, by its digest. A report
cannot send requests to this server.
"""
HEADERS = {
    "content-security-policy": OWN_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of responses that set no others."""

PAGES = (
    "overview",
    "runs",
    "run",
    "grids",
    "grid",
    "stores",
    "store",
    "images",
    "compare",
    "report",
)
"""Pages, each with a template of the same name; the first is the start page."""


class Guard:
    """Application that passes on requests of its own pages that have the token, and refuses all other requests.

    Args:
        app: receives the request, with the path after the token.
        token: token of the address.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # websockets and lifespan events are ignored
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {name.encode(): value.encode() for name, value in HEADERS.items()}
                # Headers that the response sets itself take precedence.
                headers |= dict(message["headers"])
                message = {**message, "headers": list(headers.items())}
            await send(message)

        path = scope["path"].removeprefix(f"/{self.token}")
        inside = {**scope, "path": path, "raw_path": path.encode()}
        answer = self._refused(scope) or self.app
        await answer(inside, receive, with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        """The response to a request that is refused; None for one that is passed on."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        name, _, port = host.rpartition(":")
        # A host without a port may contain colons, such as ``[::1]``.
        if not port.isdigit():
            name = host
        if name.lower() not in HOSTS:
            return PlainTextResponse("Open this page in a browser on this machine.\n", 403)
        # The path of `OPTIONS *` has no slash.
        first = scope["path"].lstrip("/").partition("/")[0]
        if not secrets.compare_digest(first.encode(), self.token.encode()):
            words = "The address needs the token that `fedcache ui` prints.\n"
            return PlainTextResponse(words, 403)
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return PlainTextResponse("This request came from another page.\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is read-only.\n", 405)
        return None


class Pages:
    """The pages of the server, and the functions that their templates call.

    Args:
        home: the home that is shown; nothing in it is changed.
        folder: folder for the reports that are requested.

    Attributes:
        version: grows by one when a look at the home finds a change.
        ended: whether the server is about to end; streams of events then end too.
    """

    def __init__(self, home: Home, folder: Path) -> None:
        self.home = home
        self.runs = RunIndex(home.runs)
        self.stores = StoreIndex(home)
        self.grids = GridIndex(home.root / FOLDER, self.runs)
        self.reports = ReportShelf(home.runs, folder)
        self.version = 0
        self.ended: Callable[[], bool] = lambda: False
        # The state of the home at the last look; a different state makes a new version.
        self._state: object = None
        self._looked = 0.0  # time of the last look
        self._looking = threading.Lock()
        # The facts and the details of the run that was shown last.
        self._details: tuple[object, Facts] = (None, {})
        self._answers: dict[str, tuple[object, Section | None]] = {}  # group -> its runs and answer
        self._templates = html_environment(PackageLoader("fedcache.ui", "pages"))
        self._templates.filters |= {
            "percent": percent,
            "shell": shell_word,
            "size": _size,
            "time": _time,
            "when": _when,
        }
        self._templates.globals |= {
            "home": self,
            "need": _need,
            "comparison": comparison,
            "overview_of": overview_of,
            "caption": caption,
            "sheets": sheets,
            "sentences": sentences,
            "VANISHED": VANISHED,
            "SPLITS": SPLIT_NAMES,
            "PAGE": PAGE,
        }

    def app(self, token: str) -> ASGIApp:
        """The application behind the guard."""
        first, *others = PAGES
        routes = [
            Route("/", partial(self.page, first)),
            *(Route(f"/{name}", partial(self.page, name)) for name in others),
            Route("/events", self.events),
            Route("/report/{ident}.html", self.report_file),
            Mount("/static", StaticFiles(packages=[("fedcache.ui", "static")])),
        ]
        return Guard(Starlette(routes=routes), token)

    def look(self) -> None:
        """Read the home, unless it was read less than ``OFTEN`` seconds ago and no run is waiting to be read."""
        with self._looking:
            just_read = time.monotonic() - self._looked < OFTEN
            if just_read and not self.runs.waiting:
                return
            self.runs.look()
            state = (
                self.runs.version,
                self.runs.waiting,
                self.stores.lines(),
                self.grids.lines(),
                self.reports.ready,
            )
            if state != self._state:
                self._state = state
                self.version += 1
            self._looked = time.monotonic()

    def page(self, name: str, request: Request) -> Response:
        """A page of the home as it is now, or a page that describes the problem."""
        self.look()
        every = sorted(self.runs.every(), key=lambda r: r["changed"], reverse=True)
        # All facts that a page may show; its template uses some of them.
        facts = {
            "page": name,
            "words": dict(request.query_params),
            "runs": every,
            "states": Counter(r["state"] for r in every),
            "apart": differing(every),
            "grids": self.grids.lines(),
            "stores": self.stores.lines(),
        }
        code = 200
        # For damaged files and names that no longer exist, a page shows the problem and a hint.
        try:
            text = self._templates.get_template(f"{name}.html.j2").render(facts)
        except (FedcacheError, OSError) as error:
            if isinstance(error, UsageError):
                code = 404
            problem = getattr(error, "message", str(error))
            facts |= {"problem": problem, "hint": getattr(error, "hint", "")}
            text = self._templates.get_template("problem.html.j2").render(facts)
        return Response(text, code, media_type="text/html; charset=utf-8")

    def events(self, request: Request) -> Response:
        """Events with the version of the home: one at once, and one after every change while the page is open."""

        async def versions() -> AsyncIterator[str]:
            sent = 0
            while not self.ended() and not await request.is_disconnected():
                await run_in_threadpool(self.look)
                if sent != self.version:
                    sent = self.version
                    yield f"data: {sent}\n\n"
                pause = 0.5
                if self.runs.waiting:
                    pause = 0.1
                await asyncio.sleep(pause)

        return StreamingResponse(versions(), media_type="text/event-stream")

    def report_file(self, request: Request) -> Response:
        """The file of a finished report."""
        path = self.reports.file(request.path_params["ident"])
        if path is None:
            return PlainTextResponse("There is no such report.\n", 404)
        return FileResponse(path, headers={"content-security-policy": REPORT_POLICY})

    def answers(self, finished: Sequence[Facts]) -> list[Section]:
        """The results of the benchmark settings that were trained last, the newest first.

        Args:
            finished: runs, the newest first.
        """
        groups: dict[str, list[tuple[str, float]]] = {}
        for run in finished:
            groups.setdefault(run["group"], []).append((run["name"], run["changed"]))
        found: list[Section] = []
        count = 0
        for group, runs in groups.items():
            count += len(runs)
            if found and count > MOST_ANSWERED:
                break
            # An answer is made again when a run was added or written again.
            newest = runs[:MOST_ANSWERED]
            if self._answers.get(group, (None,))[0] != newest:
                paths = [self.runs.root / name for name, _ in newest]
                self._answers[group] = newest, answer_of_runs(paths)
            answer = self._answers[group][1]
            if answer is not None:
                found.append(answer)
        return found

    def find(self, words: Mapping[str, str]) -> list[Facts]:
        """The runs that match the words of ``filter`` and the ``state``, sorted by ``sort`` with ``order`` up or down.

        Raises UsageError for facts that have no order.
        """
        key = words["sort"]
        found = [r for r in self.runs.every() if matches(r, words["filter"])]
        if words["state"]:
            found = [r for r in found if r["state"] == words["state"]]
        known = [r for r in found if r.get(key) is not None]
        try:
            known.sort(key=lambda r: r[key], reverse=words["order"] == "down")
        except TypeError:
            raise UsageError(f"Runs cannot be sorted by {key}.", "") from None
        return known + [r for r in found if r.get(key) is None]

    def run(self, name: str) -> tuple[Facts, Facts] | None:
        """The facts and details of a run. Raises FedcacheError for a damaged one."""
        facts = self.runs.facts(name)
        if facts is None:
            return None
        if "problem" in facts:
            raise FedcacheError(Exit.CORRUPT, facts["problem"], facts["hint"])
        if self._details[0] is not facts:
            self._details = facts, read_details(self.runs.root / name)
        return facts, self._details[1]

    def chosen(self, words: str) -> list[Path]:
        """The directories of runs, from their names with commas between. Raises UsageError for unknown names."""
        names = words.split(",")
        lost = [name for name in names if self.runs.facts(name) is None]
        if lost:
            names_of_lost = some_names(lost, 5) or "This choice"
            problem = f"{names_of_lost} is no longer a run of this fedcache home."
            raise UsageError(problem, "Choose again.")
        return [self.runs.root / name for name in names]


def _need(facts: Any) -> Any:
    """The facts of a run, grid or store; UsageError (404) for None, which means an unknown name."""
    if facts is None:
        raise UsageError("There is no page of that name.", "")
    return facts


def _size(count: float | None) -> str:
    if count is None:
        return ""
    return f"{size(count)}B"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


LOOPBACK = "127.0.0.1"


def open_socket(port: int) -> socket.socket:
    """A socket bound to a port of loopback; port 0 takes a free one. Raises MachineError if the port cannot be used."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((LOOPBACK, port))
    except OSError as error:
        made.close()
        raise MachineError(
            f"Port {port} of {LOOPBACK} cannot be used: {error.strerror}.",
            "--port 0 uses a free port.",
        ) from error
    return made


def serve(home: Home, port: int, *, show: bool, say: Callable[[str], None]) -> str:
    """Serve the page of a home until SIGINT or SIGTERM.

    Args:
        home: the home that is shown.
        port: port of loopback; 0 takes a free one.
        show: whether to open the page in the browser of this machine.
        say: receives the address, once it can be opened.

    Returns:
        The address of the page.
    """
    with open_socket(port) as sock, TemporaryDirectory(prefix="fedcache-ui-") as folder:
        token = secrets.token_urlsafe(24)
        pages = Pages(home, Path(folder))
        number = sock.getsockname()[1]
        address = f"http://{LOOPBACK}:{number}/{token}/"
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
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
            server.run(sockets=[sock])
    return address


def open_in_browser(address: str, folder: Path) -> bool:
    """Open an address in the browser, and return whether a browser was started.

    The browser gets a file that only this user can read and that redirects to the address. Every user of the machine
    can read the arguments of a process, so the address with its token must not be one.
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


def comparison(paths: Sequence[Path], over: str, metric: str) -> Facts:
    """The comparison of some runs (``made``) with its command; if it fails, the ``trouble`` and a ``hint``."""
    score = metric.replace("_", "-")
    names = [path.name for path in paths]
    command = shlex.join(["fedcache", "compare", *names, "--over", over, "--score", score])
    try:
        made = compare_entries(gather(list(paths), Path()), over=over, metric=metric)
        return {"made": made, "command": command}
    except FedcacheError as error:
        return {"made": None, "command": command, "trouble": error.message, "hint": error.hint}


class ReportShelf:
    """Reports of chosen runs, written one at a time by threads of the server.

    Args:
        root: directory of the runs.
        folder: directory of the reports.

    Attributes:
        ready: number of reports that were written or failed.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.ready = 0
        self._reports: dict[str, Facts] = {}
        self._writing = threading.Lock()  # only one report is written at a time
        self._lock = threading.Lock()  # held while ``_reports`` is changed

    def request(self, paths: Sequence[Path]) -> Facts:
        """The report of these runs; the first call starts to write it.

        ``path`` is the file of the report once it is written. A failed report has ``problem`` and ``hint``. If one of
        the runs has been written again since the last call, a new report is written.
        """
        ident = digest_of([[p.name, p.stat().st_mtime_ns] for p in paths])[:16]
        names = [path.name for path in paths]
        command = shlex.join(["fedcache", "report", *names, "-o", "report.html"])
        with self._lock:
            if ident not in self._reports:
                self._reports[ident] = {"id": ident, "command": command}
                writer = threading.Thread(
                    target=self._write, args=(ident, list(paths)), daemon=True
                )
                writer.start()
            return self._reports[ident]

    def file(self, ident: str) -> str | None:
        """The path of a finished report; None for any other name."""
        path: str | None = self._reports.get(ident, {}).get("path")
        return path

    def _write(self, ident: str, paths: list[Path]) -> None:
        try:
            with self._writing:
                made = write_report(paths, self.folder / f"{ident}.html", self.root)
            found = made.to_dict()
        except FedcacheError as error:
            found = {"problem": error.message, "hint": error.hint}
        except Exception as error:  # an error that ends the thread would leave the page waiting
            problem = f"This is a bug in fedcache: {type(error).__name__}: {error}"
            hint = "Please report it, with the output of `fedcache report` for the same runs."
            found = {"problem": problem, "hint": hint}
        with self._lock:
            self._reports[ident] = {**self._reports[ident], **found}
            self.ready += 1
