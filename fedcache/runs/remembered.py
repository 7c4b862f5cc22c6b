"""What is remembered so that a command that computes nothing starts without torch, whose import takes seconds.

An answer is noted when a command that trains has found all it was asked for, with each line it said on the way. The
same request is answered by it as long as all that could make another answer is untouched: the files of the package, of
the store and of what the request names (path, size, times, inode), Python and the folders of installed packages, the
variables ``FEDCACHE_*``, and which store is meant. Results are read and checked as ever. Whatever does not fit, a
damaged note or result too, takes the whole way, which finds the answer again or says what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from fedcache.config import PRESETS, Home, TrainConfig
from fedcache.errors import FedcacheError
from fedcache.extract.digests import files_below, package_state, remembered_of_package
from fedcache.extract.planning.find_store import locate_store
from fedcache.extract.planning.plan import memory_of
from fedcache.federate.methods import NAMES, find_method, wants_encoders
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import check_files, check_models, has_model, measured_of, read_result
from fedcache.runs.run import Run
from fedcache.store.files import file_sha256, sha256_hex

QUICK = 1.0
"""Seconds of loading up to which what was just trained is asked for once more at once, to note the answer. What loads
longer is noted when it is asked for again."""

Labelled = Sequence[tuple[Any, Run]]
"""Runs, each with what a command knows it by: any JSON value."""


class Heard(Silent):
    """An observer that keeps the lines that are said, and passes everything on."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.said: list[list[str]] = []  # [note | warn, text]
        self._observer = observer or Silent()
        for passed_on in ("start", "told", "advance", "stop"):
            setattr(self, passed_on, getattr(self._observer, passed_on))

    def note(self, text: str) -> None:
        """Kept and passed on."""
        self.said.append(["note", text])
        self._observer.note(text)

    def warn(self, text: str) -> None:
        """Kept and passed on."""
        self.said.append(["warn", text])
        self._observer.warn(text)


class Request:
    """What a command that trains is asked for.

    Args:
        words: everything that was asked, as plain values whose ``repr`` tells them apart.
        config: of it, for where the rows come from.
        home: where stores are.
        runs: directory of results.
    """

    def __init__(self, words: Sequence[Any], config: TrainConfig, home: Home, runs: Path) -> None:
        self.config, self.home, self.runs, self._asked = config, home, runs, [*words, config]
        self._key = [
            "answer",
            sha256_hex(repr((*words, config, home, str(runs.resolve()))).encode()),
        ]
        self._before: str | None = None  # the state in which an answer was looked for

    def answer(self, observer: Observer) -> Labelled | None:
        """The runs that answer the request, after the lines that the whole way says; None where it has to be gone."""
        self._before = self._state()
        found = memory_of(self.home).recall(self._key)
        if self._before is None or found is None or found["state"] != self._before:
            return None
        runs = []
        for label, name, digest, with_model in found["runs"]:
            run = _whole_run(self.runs / name, digest)
            if run is None or has_model(run.path) != with_model:
                return None
            runs.append((label, run))
        for kind, text in found["said"]:
            getattr(observer, kind)(text)
        return runs

    def note(
        self, runs: Labelled, heard: Heard, again: Callable[[Observer], Labelled] | None
    ) -> None:
        """Note the answer where all of it was found. What was trained just now is found by ``again``, where that is
        given and loads quickly; ``again`` must train nothing.

        Runs on a GPU are never noted, which has to be there, nor those of methods that read more than is compared.
        """
        state, loading = (
            self._before,
            {run.measured.get("seconds", {}).get("load", 0.0) for _, run in runs},
        )
        with suppress(FedcacheError, OSError):  # the result is there, noted or not
            if state is None or not all(run.reused for _, run in runs):
                if again is None or sum(loading) > QUICK:
                    return
                state, heard = self._state(), Heard()
                runs = again(heard)
            methods = {str(run.result["method"]) for _, run in runs}
            if (
                state is None
                or not all(run.reused for _, run in runs)
                or any(map(_needs_more, methods))
            ):
                return
            listed = [
                [label, r.path.name, file_sha256(r.path / "result.json"), has_model(r.path)]
                for label, r in runs
            ]
            memory_of(self.home).remember(
                self._key, {"state": state, "said": heard.said, "runs": listed}
            )
            for method in methods:
                for preset in PRESETS:  # what is said of a result compares them
                    usual_settings(method, preset)
            for _, run in runs:  # a report asks whether seeds change it
                draws_nothing(str(run.result["method"]), run.result["hyperparameters"])

    def _state(self) -> str | None:
        """Digest of what the answer depends on and the request does not say; None where no answer is noted."""
        config, heard = self.config, Heard()
        if config.device not in ("auto", "cpu"):
            return None
        try:
            rows = (
                Path(config.clients_from)
                if config.clients_from
                else locate_store(
                    self.home,
                    path=Path(config.store) if config.store else None,
                    dataset=config.dataset,
                    observer=heard,
                    look_only=True,
                )
            )
            if rows is None:
                return None
            words = {
                one for word in _strings_in(self._asked) for one in (word, word.partition("@")[0])
            }
            named = [path for path in map(Path, sorted(words - {""})) if path.is_file()]
            files = [list(files_below(place)) for place in (rows, *named)]
        except (FedcacheError, OSError):
            return None
        variables = sorted(item for item in os.environ.items() if item[0].startswith("FEDCACHE_"))
        return sha256_hex(repr([package_state(), variables, heard.said, files]).encode())


def usual_settings(method: str, preset: str) -> dict[str, Any]:
    """Every hyperparameter of a preset, remembered for this package. Raises UsageError for what is unknown."""
    return _of_method(
        method, ["preset", method, preset], lambda: find_method(method).resolve(preset)
    )


def usual_run(method: str) -> dict[str, Any]:
    """Rounds and participation of a method's paper, remembered likewise. Raises UsageError for an unknown method."""

    def read() -> dict[str, Any]:
        usual = find_method(method).defaults
        return {
            "rounds": usual.rounds,
            "participation": "all" if usual.participation is None else usual.participation,
        }

    return _of_method(method, ["run", method], read)


def draws_nothing(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a method gives the same for every seed when all clients take part; False for an unknown method.

    Its uploads add up to those of one client with all rows, for every seed, and nobody takes a step.
    """

    def read() -> dict[str, Any]:
        found = find_method(method)
        every = {**found.resolve("paper"), **settings}
        return {"draws nothing": not found.gradient and found.additive(every)}

    key = ["draws nothing", method, repr(sorted(settings.items()))]
    try:
        return bool(_of_method(method, key, read)["draws nothing"])
    except FedcacheError:
        return False


def _of_method(method: str, key: list[str], read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``read`` says of a method, remembered for this package where the method is of it."""
    return (
        remembered_of_package(key, read) if method in NAMES else read()
    )  # somebody's own is in memory


def _strings_in(value: Any) -> Iterator[str]:
    """Every word of a request, any of which may name a file: a partition, a trace, also among swept values."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _strings_in(asdict(value))
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _strings_in(one)


def _needs_more(method: str) -> bool:
    """Whether a method's results depend on files that are not compared: weights of live encoders, somebody's code."""
    return method not in NAMES or wants_encoders(find_method(method))


def _whole_run(folder: Path, digest: str) -> Run | None:
    """The run in a folder, if its result is the file of that sha256, and whole with all that it promises."""
    path = folder / "result.json"
    try:
        if file_sha256(path) != digest:
            return None
        result = read_result(path)
        check_files(folder, result)
        check_models(folder, result)
    except (FedcacheError, OSError):
        return None
    measured = measured_of(folder, result)
    return None if measured is None else Run(folder, result, measured, reused=True)
