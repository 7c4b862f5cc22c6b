"""Comparisons and reports of chosen runs: the functions of ``fedcache compare`` and ``fedcache report``, shown here."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedcache.errors import FedcacheError
from fedcache.progress import Silent
from fedcache.report.compare import compare_entries
from fedcache.report.comparison_output import Sheet, caption, differences, sentences, values
from fedcache.report.find_runs import gather
from fedcache.report.page import write_report
from fedcache.store.files import digest_of

KEPT = 8
"""Reports that are kept while the page is served; the oldest goes first."""


def comparison(paths: Sequence[Path], root: Path, over: str, metric: str) -> dict[str, Any]:
    """What ``fedcache compare`` shows of some runs: tables as words, captions, sentences, and the command.

    Raises FedcacheError, as ``compare``.
    """
    made = compare_entries(gather(list(paths), root), over=over, metric=metric)
    tables = []
    for one in made.tables:
        beside = differences(one)
        sheets = [_sheet(values(one)), *([] if beside is None else [_sheet(beside)])]
        tables.append(
            {
                "setting": one.setting,
                "caption": caption(one).removeprefix(f"{one.setting}: "),
                "sheets": sheets,
                "notes": sentences(one),
            }
        )
    words = ["fedcache", "compare", *(p.name for p in paths)]
    words += ([] if over == "seeds" else ["--over", over]) + (
        [] if metric == "accuracy" else ["--score", metric]
    )
    return {
        "tables": tables,
        "said": list(made.said),
        "left_out": [[left.path.name, left.sentence, left.hint] for left in made.left_out],
        "command": shlex.join(words),
    }


def _sheet(sheet: Sheet) -> dict[str, Any]:
    return {
        "columns": list(sheet.columns),
        "rows": [list(row) for row in sheet.rows],
        "best": sorted(sheet.best),
        "alike": sorted(sheet.alike),
    }


class StretchOfWork(Silent):
    """How far a report is, as its observer was told last."""

    def __init__(self) -> None:
        self.what, self.done, self.total = "reading runs", 0, 0

    def start(self, what: str, total: int, unit: str) -> None:
        """Another stretch."""
        self.what, self.done, self.total = what, 0, total

    def advance(self, units: int) -> None:
        """So many more units."""
        self.done += units


class ReportShelf:
    """Reports of chosen runs, written one at a time beside the server, into a folder that is removed with this object.

    Args:
        root: directory of the runs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder: TemporaryDirectory[str] | None = None  # none before the first report
        self._made: dict[str, dict[str, Any]] = {}
        self._at_work: dict[str, StretchOfWork] = {}
        self._one, self._lock = threading.Lock(), threading.Lock()

    def ask(self, paths: Sequence[Path]) -> dict[str, Any]:
        """The report of these runs: ``state`` is working, ready or failed; the first call for it begins it.

        What is ready has ``id``, for ``file``, and what failed ``problem`` and ``hint``. Runs that were written anew
        since have another report.
        """
        ident = digest_of([[p.name, _time_of(p / "result.json")] for p in paths])[:16]
        command = shlex.join(["fedcache", "report", *(p.name for p in paths), "-o", "report.html"])
        with self._lock:
            if ident not in self._made and ident not in self._at_work:
                self._at_work[ident] = StretchOfWork()
                threading.Thread(target=self._write, args=(ident, list(paths)), daemon=True).start()
            if (work := self._at_work.get(ident)) is not None:
                told = {"what": work.what, "done": work.done, "total": work.total}
                return {"state": "working", "id": ident, "command": command, **told}
            return {"id": ident, "command": command, **self._made[ident]}

    def file(self, ident: str) -> Path | None:
        """The file of a report that is ready; None for every other name."""
        return self._place(ident) if self._made.get(ident, {}).get("state") == "ready" else None

    def close(self) -> None:
        """Remove what was written."""
        if self._folder is not None:
            self._folder.cleanup()

    def _place(self, ident: str) -> Path:
        self._folder = self._folder or TemporaryDirectory(prefix="fedcache-ui-")
        return Path(self._folder.name) / f"{ident}.html"

    def _write(self, ident: str, paths: list[Path]) -> None:
        out = self._place(ident)
        try:
            with self._one:
                made = write_report(paths, out, self.root, observer=self._at_work[ident])
            done = {
                "state": "ready",
                "runs": made.runs,
                "left_out": made.left_out,
                "bytes": made.bytes,
            }
        except FedcacheError as error:
            done = {"state": "failed", "problem": error.message, "hint": error.hint}
        except (
            Exception
        ) as error:  # a thread has nobody to raise to, and the page would wait for ever
            done = {
                "state": "failed",
                "problem": f"This is a bug in fedcache: {type(error).__name__}: {error}",
                "hint": "Please report it, with what `fedcache report` says of the same runs.",
            }
        with self._lock:
            del self._at_work[ident]
            self._made[ident] = done
            while len(self._made) > KEPT:
                old = next(iter(self._made))
                del self._made[old]
                self._place(old).unlink(missing_ok=True)


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
