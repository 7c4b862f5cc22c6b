"""Comparisons and reports of chosen runs: the functions of ``fedcache compare`` and ``fedcache report``, shown here."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError
from fedcache.report.compare import compare_entries
from fedcache.report.find_runs import gather
from fedcache.store.files import digest_of


def comparison(paths: Sequence[Path], over: str, metric: str) -> dict[str, Any]:
    """What ``fedcache compare`` finds of some runs, or the ``trouble`` that it has with them, and its command."""
    score = metric.replace("_", "-")
    words = ["fedcache", "compare", *(p.name for p in paths), "--over", over, "--score", score]
    found = {"made": None, "command": shlex.join(words)}
    try:
        made = compare_entries(gather(list(paths), Path()), over=over, metric=metric)
        return {**found, "made": made}
    except FedcacheError as error:
        return {**found, "trouble": error.message, "hint": error.hint}


class ReportShelf:
    """Reports of chosen runs, written one at a time beside the server.

    Args:
        root: directory of the runs.
        folder: where the reports are written.

    Attributes:
        ready: how many were written, or could not be.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.ready = 0
        self._reports: dict[str, dict[str, Any]] = {}
        self._one = threading.Lock()
        self._lock = threading.Lock()

    def request(self, paths: Sequence[Path]) -> dict[str, Any]:
        """The report of these runs, which the first call for it begins.

        ``path`` is the file once it is written; what failed has ``problem`` and ``hint``. Runs that were written anew
        since have another report.
        """
        ident = digest_of([[p.name, p.stat().st_mtime_ns] for p in paths])[:16]
        command = shlex.join(["fedcache", "report", *(p.name for p in paths), "-o", "report.html"])
        with self._lock:
            if ident not in self._reports:
                self._reports[ident] = {"id": ident, "command": command}
                threading.Thread(target=self._write, args=(ident, list(paths)), daemon=True).start()
            return self._reports[ident]

    def file(self, ident: str) -> Path | None:
        """The file of a report that is ready; None for every other name."""
        path = self._reports.get(ident, {}).get("path")
        if path is None:
            return None
        return Path(path)

    def _write(self, ident: str, paths: list[Path]) -> None:
        # The report's sections import torch, which the other pages do not need.
        from fedcache.report.page import write_report

        try:
            with self._one:
                made = write_report(paths, self.folder / f"{ident}.html", self.root)
            found = made.to_dict()
        except FedcacheError as error:
            found = {"problem": error.message, "hint": error.hint}
        except Exception as error:  # nobody waits for a thread, and the page would wait for ever
            problem = f"This is a bug in fedcache: {type(error).__name__}: {error}"
            hint = "Please report it, with what `fedcache report` says of the same runs."
            found = {"problem": problem, "hint": hint}
        with self._lock:
            self._reports[ident] = {**self._reports[ident], **found}
            self.ready += 1
