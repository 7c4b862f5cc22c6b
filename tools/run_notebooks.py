"""Run the notebooks of examples/, each in a home of its own: `python tools/run_notebooks.py [NAME..]`.

Nothing is written back: the repository holds them without outputs. Exits 1 when a cell raises.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LIMIT = 300
"""Seconds for a cell; a notebook takes less than thirty on two idle cores."""


def run(path: Path, home: Path) -> float:
    """Seconds that the notebook took.

    Raises:
        CellExecutionError: with the traceback of the cell.
    """
    began = time.perf_counter()
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(book, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    manager = client.create_kernel_manager()
    # Sockets in a folder of this user's, where TCP would be open to everybody on the machine.
    manager.transport, manager.ip = "ipc", str(home / "kernel")
    quiet = {"FEDCACHE_HOME": str(home), "FEDCACHE_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    client.execute(env={**os.environ, **quiet})
    return time.perf_counter() - began


def main() -> None:
    wanted = [EXAMPLES / name for name in sys.argv[1:]] or sorted(EXAMPLES.glob("*.ipynb"))
    failed = []
    for path in wanted:
        with tempfile.TemporaryDirectory() as home:
            try:
                print(f"{path.name}: {run(path, Path(home)):.1f} s", flush=True)
            except CellExecutionError as error:
                failed.append(path.name)
                print(f"{path.name}: {error}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
