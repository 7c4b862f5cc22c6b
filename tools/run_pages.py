"""Run the code of README.md and docs/tutorials/, in order: `python tools/run_pages.py [--write] [PAGE..]`.

A page has a home and a working directory of its own, in a process of its own; the store of digits that README.md made
is in every home, so that digits are drawn and extracted once. A block of `sh` is run by bash, a block of `python` in
one namespace for the page. The block of `text` after one of them is what it prints: the same lines in the same order.
Their numbers may differ, but percentages agree within a point; a line `...` stands for any others. `--write` puts
the lines of this run there (all lines where the block holds `?` alone).

Lines of shell that set up the machine (`SETUP`) are left out: the checks have an installation already.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import warm_commands  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.md")))
SETUP = ("pip ", "make ", "python3 -m venv")
"""How lines begin that install fedcache or are themselves what runs this."""
FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d.,:]*\d|\d")
DIGEST = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,64}\b")
PERCENT = re.compile(r"(\d+\.\d+)(?= ?%)")
POINT = 1.0
ELLIPSIS = "..."
ALL = "?"


class PageError(Exception):
    """A block that fails, or that prints something else than its page shows."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, its text, and where the text begins and ends in the page."""

    kind: str
    body: str
    start: int
    end: int


def blocks(page: str) -> list[Block]:
    return [Block(m[1], m[2], *m.span(2)) for m in FENCE.finditer(page)]


def pairs(page: str) -> Iterator[tuple[Block, Block | None]]:
    """Every block that is run, with the block of its output where nothing but space is between them.

    Raises:
        PageError: for a block of no kind that is run or shown.
    """
    found = blocks(page)
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.kind not in ("sh", "python", "text", "console", "bibtex", "toml", "math"):
            raise PageError(
                f"a block of {block.kind or 'no kind'}: say sh, python, text, or console for one not run"
            )
        if block.kind in ("sh", "python"):
            near = following is not None and following.kind == "text"
            near = near and page[block.end : following.start].split() == ["```", "```text"]
            yield block, following if near else None


def alike(line: str) -> str:
    """A line without what differs from run to run: numbers, digests, the width of columns."""
    # A time may be short on one machine, and an accuracy of 100 % on one processor has no interval.
    line = re.sub(r"less than (?=0.1 s)| \(95 % interval [^)]*\)", "", line)
    line = re.sub(r"[─━]{2,}", "─", NUMBER.sub("#", DIGEST.sub("#", line)))
    return " ".join(line.split())


def matched(shown: str, printed: str, *, check: bool = True) -> str:
    """The shown lines as they were printed this time.

    Raises:
        PageError: naming the first line that was not printed.
    """
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    if shown.strip() == ALL:
        return "".join(f"{line}\n" for line in lines)
    at = 0
    out = []
    free = False
    for line in shown.splitlines():
        if line.strip() in (ELLIPSIS, ""):
            free = free or line.strip() == ELLIPSIS
            out.append(line)
            continue
        reach = range(at, len(lines) if free else min(at + 1, len(lines)))
        found = next((i for i in reach if alike(lines[i]) == alike(line)), None)
        if found is None:
            raise PageError(f"shows {line!r}, printed {chr(10).join(lines[at : at + 8])}")
        for old, new in zip(PERCENT.findall(line), PERCENT.findall(lines[found]), strict=True):
            if check and abs(float(old) - float(new)) > POINT:
                raise PageError(f"shows {old} %, printed {new} %: {lines[found]}")
        out.append(lines[found])
        at = found + 1
        free = False
    if at < len(lines) and not free:
        raise PageError(f"printed more than it shows: {lines[at]!r}")
    return "".join(f"{line}\n" for line in out)


def shell(body: str, work: Path) -> str:
    lines = [line for line in body.splitlines() if not line.startswith(SETUP)]
    code = "\n".join(lines)
    words = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(words, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PageError(
            f"exit {done.returncode} of\n{code}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def run(path: Path, home: Path, fedcache: Path, *, write: bool = False) -> float:
    """Run a page; seconds it took. The environment and the folder of this process are those of the page from then on.

    Args:
        path: the page.
        home: for FEDCACHE_HOME and, in `work/`, the working directory.
        fedcache: the program that the commands of the page run.
        write: put what is printed into the page.

    Raises:
        PageError: for a block that fails or prints something else.
    """
    began = time.perf_counter()
    page = path.read_text(encoding="utf-8")
    work = home / "work"
    programs = home / "bin"
    work.mkdir(parents=True, exist_ok=True)
    programs.mkdir(exist_ok=True)
    if not (work / "examples").exists():
        (work / "examples").symlink_to(ROOT / "examples")  # pages are read in a clone
    (programs / "fedcache").symlink_to(fedcache)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    os.environ |= {
        "FEDCACHE_HOME": str(home),
        "FEDCACHE_OFFLINE": "1",
        "COLUMNS": "110",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
    }
    os.chdir(work)
    sys.path.insert(0, str(work))
    namespace = {"__name__": "page"}
    out = []
    done = 0
    for block, shown in pairs(page):
        try:
            if block.kind == "sh":
                printed = shell(block.body, work)
            else:
                printed = python(block.body, namespace)
            printed = printed.replace(str(home), "$FEDCACHE_HOME")
            text = matched(shown.body, printed, check=not write) if shown else ""
        except Exception as error:
            line = page[: block.start].count("\n") + 1
            raise PageError(f"{path.name}, line {line}: {error}") from error
        if shown:
            out += [page[done : shown.start], text]
            done = shown.end
    if write:
        path.write_text("".join(out) + page[done:], encoding="utf-8")
    return time.perf_counter() - began


def python(body: str, namespace: dict[str, Any]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(body, "<page>", "exec"), namespace)
    return output.getvalue()


def apart(path: Path, home: Path, *words: str) -> str:
    """Run a page in a process of its own; what it says.

    Raises:
        PageError: when it fails.
    """
    call = [sys.executable, __file__, str(path), "--home", str(home), *words]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PageError(done.stderr.strip().rpartition("PageError: ")[2])
    return done.stdout.strip()


def every(home: Path, *words: str) -> Iterator[str]:
    """Run README.md, then the tutorials two at a time; a line of each."""
    first, *others = PAGES
    yield apart(first, home / first.stem, *words)
    for path in others:
        # Only digits: the photos of a page would be taken for a later version of the README's.
        for store in (home / first.stem / "stores").glob("digits-*"):
            shutil.copytree(store, home / path.stem / "stores" / store.name, copy_function=os.link)
        shutil.copytree(
            home / first.stem / "digests", home / path.stem / "digests", copy_function=os.link
        )
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda path: apart(path, home / path.stem, *words), others)


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("page", nargs="*", type=Path)
    words.add_argument("--write", action="store_true", help="put what is printed into the pages")
    words.add_argument("--home", type=Path, help="where to run one page")
    words.add_argument("--fedcache", type=Path, help="the program that the commands of a page run")
    given = words.parse_args()
    if given.home:
        (path,) = given.page
        seconds = run(path.resolve(), given.home, given.fedcache, write=given.write)
        print(f"{path.name}: {seconds:.1f} s")
        return
    with tempfile.TemporaryDirectory() as home, warm_commands.program(Path(home), ROOT) as fedcache:
        chosen = ["--fedcache", str(fedcache), *["--write"] * given.write]
        if not given.page:
            for line in every(Path(home), *chosen):
                print(line, flush=True)
        for path in given.page:
            print(apart(path, Path(home) / path.stem, *chosen), flush=True)


if __name__ == "__main__":
    main()
