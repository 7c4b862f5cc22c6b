"""Byte sources: the files of a store in a folder, in a bucket or behind a web server.

A source reads and writes whole objects, and reads ranges of them, by their names in the store. It lists nothing, since
the manifest of a store names every object and its checksum. So a plain web server is enough to read a store.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fedcache.config import is_store_address
from fedcache.errors import MachineError, StoreError, UsageError
from fedcache.optional import needed_library, reason
from fedcache.store.chunks import make_directories
from fedcache.store.files import (
    Buffer,
    at_once,
    explain_disk_errors,
    size_of,
    temporary_name,
    write_atomic,
)

T = TypeVar("T")

log = logging.getLogger("fedcache")

WAITS = (0.1, 0.3, 1.0) + (2.0,) * 8
"""Maximum seconds to wait before each further attempt. The actual wait is a random share of it, at least half.

If one of three requests fails, twelve attempts at each of 10,000 chunks succeed with a probability of 98 %.
"""

TIMEOUTS = {"connect_timeout": "10s", "read_timeout": "10s", "timeout": "10m"}
"""Time limits to connect, to get the next bytes of an answer, and to get one object or range."""

SLOW = 0.9
"""Seconds after the first attempt from which a failed request is reported, before it is tried again."""

QUIET = 9.0
"""Seconds in which no second failure of the same store is reported."""


CREDENTIALS = (
    "Check the environment variables: for s3:// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (or "
    "AWS_SKIP_SIGNATURE=true for a public bucket), and AWS_ENDPOINT_URL (https://HOST) for a server other than "
    "Amazon's; for gs:// GOOGLE_APPLICATION_CREDENTIALS; for az:// AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY."
)


CAUSES = (
    "connection refused",
    "timed out",
    "dns error",
    "end of file",
    "error sending request",
    "response body error",
    "connection closed",
    "content-length header missing",
)
"""Causes of obstore's errors, in lower case. A message gives the first cause that the text of the error contains."""


_NEVER = threading.Event()

_ENDING: ContextVar[threading.Event] = ContextVar("_ENDING", default=_NEVER)
"""Set while ``in_threads`` waits for its threads to end before their work is done."""


def ending() -> threading.Event:
    """Whether the call of ``in_threads`` that this thread works for ends early; never set in other threads."""
    return _ENDING.get()


def in_threads(threads: int, call: Callable[..., object], *columns: Iterable[Any]) -> None:
    """Call ``call`` for each item of ``columns``, as ``map`` does, in several threads.

    After an error or Ctrl-C no further call begins, and calls that look at ``ending`` can end early.
    """
    early = threading.Event()
    with ThreadPoolExecutor(threads, initializer=_ENDING.set, initargs=(early,)) as pool:
        try:
            list(pool.map(call, *columns))
        except BaseException:
            early.set()
            raise


def open_source(place: str) -> ByteSource:
    """The source of a folder or an address. Raises MachineError without the extra ``remote``; UsageError."""
    if is_store_address(place):
        return RemoteSource(place)
    return FolderSource(Path(place))


class FolderSource:
    """A folder of this machine. Every object is a file, and a call that writes it returns when it is on the disk.

    Names have ``/`` between their parts. For a missing object, ``get`` and ``get_range`` raise FileNotFoundError, and
    ``size`` is None. Any other failure is a FedcacheError.

    Attributes:
        place: as a user writes it: a folder or an address.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = str(folder)

    def get(self, name: str) -> bytes:
        """A whole object."""
        return self._read(name, lambda file: file.read())

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; fewer at the end of the object."""

        def read(file: Any) -> bytes:
            file.seek(start)
            return bytes(file.read(length))

        return self._read(name, read)

    def _read(self, name: str, read: Callable[[Any], bytes]) -> bytes:
        path = self.folder / name
        try:
            with open(path, "rb", buffering=0, opener=at_once) as file:
                return read(file) or b""  # None for a pipe without data
        except NotADirectoryError as error:
            raise FileNotFoundError(str(path)) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise MachineError(
                f"{path} cannot be read: {error.strerror or error}.",
                "Check its permissions and the disk.",
            ) from error

    def size(self, name: str) -> int | None:
        """Bytes of an object; None for a missing object."""
        path = self.folder / name
        if path.is_file():
            return path.stat().st_size
        return None

    def put(self, name: str, *parts: Buffer) -> None:
        """Write an object, whole or not at all."""
        path = self.folder / name
        with explain_disk_errors(path, size_of(parts)):
            make_directories(path.parent)
            write_atomic(path, *parts)

    def put_if_absent(self, name: str, *parts: Buffer) -> bool:
        """Write an object unless there is one; returns whether it was written."""
        path = self.folder / name
        temporary = temporary_name(Path(name)).as_posix()
        self.put(temporary, *parts)
        try:
            # Unlike a rename, a link does not replace another file.
            os.link(self.folder / temporary, path)
        except FileExistsError:
            return False
        finally:
            (self.folder / temporary).unlink(missing_ok=True)
        return True


class RemoteSource:
    """A bucket (S3, Google Cloud, Azure) or a web server, through obstore.

    Requests that fail by an error of the server or the network, or whose body ends early, are tried again a few times.
    Settings of a bucket (keys, region, endpoint) are those of the usual environment variables, ``AWS_*`` for S3.
    """

    # The process that made the first source; its threads send all requests.
    _process: ClassVar[int] = 0

    def __init__(self, address: str) -> None:
        self.place = address.rstrip("/")
        # Results contain the address, and they are shown and shared.
        if "?" in address or re.match(r"\w+://[^/]*:[^/]*@", address):
            raise UsageError(
                "fedcache does not accept an address with a password or with '?', because results would store the "
                "password or key that it contains.",
                "Serve the store without a password, or publish it to a bucket and set the bucket's keys in the "
                "environment.",
            )
        if not RemoteSource._process:
            RemoteSource._process = os.getpid()
        self._need_own_threads()
        stores = needed_library("obstore.store", self.place, "remote")
        scheme = self.place.partition("://")[0]
        settings: dict[str, Any] = {
            # ``_tried`` repeats requests, and explains their errors.
            "retry_config": {"max_retries": 0},
            "client_options": {**TIMEOUTS, "allow_http": _allows_http(scheme)},
        }
        try:
            if scheme in ("http", "https"):
                self._store = stores.HTTPStore.from_url(self.place, **settings)
            else:
                self._store = stores.from_url(self.place, **settings)
        except Exception as error:
            raise UsageError(
                f"{self.place} cannot be opened ({reason(error)}).",
                f"Addresses look like s3://bucket/digits or https://host/digits. {CREDENTIALS}",
            ) from error
        self._lock = threading.Lock()
        self._reported = -QUIET  # time of the last report of a slow failure
        self._ranges = True  # until the server refuses a request for a range
        # Name and content of the object read last from a server without ranges.
        self._whole: tuple[str, bytes] = ("", b"")

    def _need_own_threads(self) -> None:
        """Refuse to send requests from a forked process, in which they would never end. Raises MachineError."""
        if RemoteSource._process != os.getpid():
            raise MachineError(
                f"{self.place} cannot be read in a forked process.",
                'Start processes with the spawn method: DataLoader(..., multiprocessing_context="spawn")',
            )

    def get(self, name: str) -> bytes:
        """See ``FolderSource``."""
        return self._tried(name, lambda: bytes(self._store.get(name).bytes()))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See ``FolderSource``.

        A server without ranges sends the whole object, which is kept for the next range.
        """

        def read() -> bytes | None:
            try:
                found = bytes(self._store.get_range(name, start=start, length=length))
            except Exception as error:
                # The server answered with the whole object.
                if type(error).__name__ == "NotSupportedError":
                    return None
                if _status(error) == 416:  # the object ends before this range
                    return b""
                raise
            # An answer is short because its connection was cut, or because the object is too small.
            if len(found) != length and self._store.head(name)["size"] >= start + length:
                raise ConnectionError(f"only {len(found):,} of {length:,} bytes arrived")
            return found

        if self._ranges:
            found = self._tried(name, read)
            if found is not None:
                return found
            self._ranges = False
        with self._lock:
            if self._whole[0] != name:
                self._whole = (name, self.get(name))
            return self._whole[1][start : start + length]

    def size(self, name: str) -> int | None:
        """See ``FolderSource``."""
        try:
            return int(self._tried(name, lambda: self._store.head(name)["size"]))
        except FileNotFoundError:
            return None

    def put(self, name: str, *parts: Buffer) -> None:
        """See ``FolderSource``."""
        raw = b"".join(parts)
        self._write(name, lambda: self._store.put(name, raw))

    def put_if_absent(self, name: str, *parts: Buffer) -> bool:
        """See ``FolderSource``."""
        raw = b"".join(parts)

        def write() -> bool:
            try:
                self._store.put(name, raw, mode="create")
            except Exception as error:
                if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
                    return False
                raise
            return True

        # An earlier attempt whose answer was lost may have written the object.
        return self._write(name, write) or self.get(name) == raw

    def _write(self, name: str, call: Callable[[], T]) -> T:
        """``_tried`` for a call that writes. Raises StoreError for a missing bucket."""
        try:
            return self._tried(name, call)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.place} cannot be written: the bucket does not exist.",
                "Create the bucket or check the address, then run the same command again.",
            ) from error

    def _tried(self, name: str, call: Callable[[], T]) -> T:
        """The result of a call, tried again after temporary errors.

        Raises FileNotFoundError; StoreError for a refused access; MachineError.
        """
        self._need_own_threads()
        began = time.monotonic()
        for wait in (*WAITS, None):
            try:
                return call()
            except FileNotFoundError:
                raise
            except BaseException as error:
                why = _in_words(error)
                # obstore's Rust code panics at a setting that it cannot parse, such as an endpoint without http://.
                if type(error).__name__ == "PanicException":
                    raise UsageError(
                        f"{self.place} cannot be opened ({why}).", CREDENTIALS
                    ) from error
                if not isinstance(error, Exception):
                    raise
                if _is_refusal(error):
                    hint = CREDENTIALS
                    if self.place.startswith("http"):
                        hint = "Check the address. fedcache sends no password to a web server."
                    raise StoreError(
                        f"{self.place} does not allow access to {name} ({why}).", hint
                    ) from error
                if wait is None or ending().is_set() or not _may_pass(error):
                    raise MachineError(
                        f"{self.place} did not return {name} ({why}).",
                        "Check the address and the network, then run the same command again.",
                    ) from error
                now = time.monotonic()
                # Many threads read at the same time; one line is enough.
                if now - began > SLOW and now - self._reported > QUIET:
                    self._reported = now
                    log.warning("%s does not answer (%s); trying again.", self.place, why)
            ending().wait(wait * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")


ByteSource = FolderSource | RemoteSource
"""The objects of one store."""


def _allows_http(scheme: str) -> bool:
    """Whether requests may use plain HTTP: if the address or an S3 endpoint in the environment does."""
    endpoints = (os.environ.get("AWS_ENDPOINT_URL", ""), os.environ.get("AWS_ENDPOINT", ""))
    return scheme == "http" or any(place.startswith("http://") for place in endpoints)


def _status(error: BaseException) -> int:
    """The HTTP status in an error's text; 0 without one."""
    found = re.search(r"\bstatus(?: code)?:? (\d{3})\b", str(error))
    if found is None:
        return 0
    return int(found[1])


def _is_refusal(error: Exception) -> bool:
    """Whether the server refuses the credentials, or requires credentials."""
    refused = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    return refused or _status(error) in (401, 403)


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    if _in_words(error) == "content-length header missing":
        return False
    status = _status(error)
    # A status of 400 to 499 means that the request itself is wrong, except for these three.
    return not 400 <= status < 500 or status in (408, 425, 429)


def _in_words(error: BaseException) -> str:
    """The cause of an error, without addresses and the source lines that obstore prints."""
    status = _status(error)
    if status:
        return f"status {status}"
    text = str(error).lower()
    for words in CAUSES:
        if words in text:
            return words
    return reason(error)[:200]
