"""Run the notebooks of examples/, each in a home of its own: `python tools/run_notebooks.py [--write] [NAME..]`.

Nothing is written back into a notebook: the repository holds them without outputs. `--write` writes each with what it
printed as a page of docs/examples/. Exits 1 when a cell raises.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PAGES = EXAMPLES.parent / "docs" / "examples"
LIMIT = 300
"""Seconds for a cell; a notebook takes less than thirty on two idle cores."""


def page(book: nbformat.NotebookNode, name: str, home: str) -> str:
    """A notebook as Markdown: its texts, its code, and under each cell what it printed.

    Args:
        book: the notebook.
        name: its file.
        home: a directory to be written as $FEDCACHE_HOME.

    Raises:
        ValueError: for an output that is no text; pages show none.
    """
    lines = []
    for cell in book.cells:
        if cell.cell_type == "markdown":
            lines += [cell.source, ""]
            continue
        lines += ["```python", cell.source, "```", ""]
        printed = ""
        for output in cell.outputs:
            if output.get("name") == "stderr":  # progress, and warnings of this machine
                continue
            if output.output_type == "stream":
                printed += output.text
            elif "text/plain" in output.get("data", {}):
                printed += output.data["text/plain"]
            else:
                raise ValueError(f"{name}: an output of {output.output_type} that is no text")
        printed = re.sub(r"/\S*/(?=\w+\.npz)", "", printed.replace(home, "$FEDCACHE_HOME"))
        if printed.strip():
            lines += ["```text", printed.rstrip(), "```", ""]
    first, *rest = lines
    title, _, text = first.partition("\n")
    where = f"The notebook `examples/{name}`, with what it printed."
    return "\n".join([title, "", where, text, *rest]).rstrip() + "\n"


def run(path: Path, home: Path, *, write: bool = False) -> float:
    """Seconds that the notebook took; ``write`` makes its page.

    Raises:
        CellExecutionError: with the traceback of the cell.
    """
    began = time.perf_counter()
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(
        book, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    manager = client.create_kernel_manager()
    # Sockets in a folder of this user's, where TCP would be open to everybody on the machine.
    manager.transport = "ipc"
    manager.ip = str(home / "kernel")
    quiet = {"FEDCACHE_HOME": str(home), "FEDCACHE_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    client.execute(env={**os.environ, **quiet})
    if write:
        PAGES.joinpath(f"{path.stem}.md").write_text(
            page(book, path.name, str(home)), encoding="utf-8"
        )
    return time.perf_counter() - began


def main() -> None:
    write = "--write" in sys.argv
    wanted = [EXAMPLES / name for name in sys.argv[1:] if name != "--write"] or sorted(
        EXAMPLES.glob("*.ipynb")
    )
    failed = []
    for path in wanted:
        with tempfile.TemporaryDirectory() as home:
            try:
                print(f"{path.name}: {run(path, Path(home), write=write):.1f} s", flush=True)
            except CellExecutionError as error:
                failed.append(path.name)
                print(f"{path.name}: {error}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
