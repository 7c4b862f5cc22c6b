"""A web server over a folder, as far as object stores and web hosts differ: ranges, and requests that fail."""

import mimetypes
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class WebServer:
    """What a server does, and what it was asked."""

    folder: Path
    address: str = ""
    ranges: bool = True
    fail_every: int = (
        0  # of so many requests one fails: in turns with 503, and in the middle of the body
    )
    stalled: int = 0  # that many requests get no answer for three seconds
    status: int = 0  # of every answer, where it is not 0
    stop_after: int | None = None  # bytes of a body, after which it hangs up
    tells_length: bool = True
    leads_to: str = ""  # target of the redirect of /moved
    asked: list[str] = field(default_factory=list)
    wanted: str | None = None  # the range of the last request


@contextmanager
def web_server(folder, context=None):
    """A server of a folder, on the loopback interface; with TLS where a context is given."""
    made = WebServer(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_): ...

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, *, body):
            made.asked.append(self.path)
            wanted = self.headers.get("Range")  # another thread may answer another request
            made.wanted = wanted
            number = len(made.asked)
            if number <= made.stalled:
                time.sleep(3)
            file = made.folder / self.path.lstrip("/")
            fails = bool(made.fail_every) and number % made.fail_every == 0
            status = made.status
            if not status and fails and number % (2 * made.fail_every) == 0:
                status = 503
            if not status and not file.is_file():
                status = 404
            if self.path == "/moved":
                status = 302
            if status:
                self.send_response(status)
                self.send_header("Location", made.leads_to)  # which counts with 302 alone
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            raw = file.read_bytes()
            if wanted and made.ranges:
                size = len(raw)
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start = int(first) if first else size - int(last)
                if start >= size:
                    self.send_error(416)
                    return
                raw = raw[start : int(last) + 1 if first and last else None]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{start + len(raw) - 1}/{size}")
            else:
                self.send_response(200)
            self.send_header("Content-Type", str(mimetypes.guess_type(file)[0]))
            if made.tells_length:
                self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            sent = len(raw) // 2 if fails else made.stop_after
            if body:
                # A client that asked for a range of what comes whole hangs up.
                with suppress(ConnectionError):
                    self.wfile.write(raw[:sent])
            if sent is not None or not made.tells_length:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
