"""A home on a read-only file system: nothing is written, even if others have left locks in it."""

import errno
import os
import subprocess
import sys

import pytest
from filelock import FileLock

from fedcache.runs.directory import LOCK, is_running
from fedcache.store.lock import is_held

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="file systems are read-only in another way"
)


@pytest.fixture
def read_only(monkeypatch):
    """Files cannot be opened to be written, as on a read-only file system."""
    real = os.open

    def refusing(path, flags, *more, **named):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)


def held_elsewhere(path):
    code = "import filelock, sys\nwith filelock.FileLock(sys.argv[1]):\n    print(flush=True)\n    sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process


def test_a_lock_is_held_while_a_process_with_write_access_holds_it(tmp_path, request):
    with held_elsewhere(tmp_path / LOCK) as process:
        request.getfixturevalue("read_only")
        assert is_held(tmp_path / LOCK)
        assert is_running(tmp_path)
        process.communicate(b"")
    with pytest.raises(OSError, match="Read-only"):
        FileLock(tmp_path / LOCK).acquire()
    assert (tmp_path / LOCK).exists()
    assert not is_held(tmp_path / LOCK)
    assert not is_running(tmp_path)
