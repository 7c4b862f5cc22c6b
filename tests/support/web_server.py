"""A web server over a folder, as far as object stores and web hosts differ: ranges, and requests that fail."""

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
    asked: list[str] = field(default_factory=list)


@contextmanager
def web_server(folder):
    """A server of a folder, on the loopback interface."""
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
            if status:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            raw = file.read_bytes()
            wanted = self.headers.get("Range") if made.ranges else None
            if wanted:
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
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if body:
                # A client that asked for a range of what comes whole hangs up.
                with suppress(ConnectionError):
                    self.wfile.write(raw[: len(raw) // 2] if fails else raw)
            if fails:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
