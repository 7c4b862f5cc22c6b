"""What a cell needs, asked of the code that extracts and trains: nothing is declared ready by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fedcache.config import ExtractConfig, Home
from fedcache.errors import FedcacheError
from fedcache.extract import backbones, datasets
from fedcache.extract.planning.plan import memory_of, roots_of
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES
from fedcache.reproduce.registry import PaperCell, PaperTable

READS: Mapping[str, tuple[str, ...]] = {
    "runs": ("method", "scheme", "weights", "data"),
    "model": ("method",),
    "partition": ("scheme", "data"),
    "entropy": ("weights", "data"),
    "heatmap": ("method", "scheme", "weights", "data", "code"),
    "noise": ("data",),
    "formula": ("code",),
}
"""What each kind of entry needs; ``code`` are the functions in ``CALLS``."""

DIAGNOSTICS = "fedcache.federate.engine.diagnostics"
CALLS: Mapping[str, tuple[str, ...]] = {
    "heatmap": ("fusion_similarity", "linear_cka"),
    "formula": ("flesd_exchange", "generalisation_bound"),
}
"""Functions of ``DIAGNOSTICS`` that a kind calls."""


@dataclass(frozen=True)
class Requirement:
    """Something that is missing.

    Attributes:
        kind: weights | data | method | setting | scheme | code.
        name: of the backbone, dataset, method, ...
        why: what was found.
        command: what would get it.
        fetched: ``extract`` would download it by itself.
    """

    kind: str
    name: str
    why: str
    command: str
    fetched: bool = False

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return dict(self.__dict__)


class RequirementCheck:
    """Asks once for each thing, however many cells need it.

    Args:
        home: where weights and data are looked for.
        weights: ``--weights NAME=FILE``.
        data: ``--data NAME=PATH``.
    """

    def __init__(
        self, home: Home, weights: Mapping[str, str] | None = None, data: Mapping[str, str] | None = None
    ) -> None:
        self.home = home
        self.given = {name: Path(path).expanduser() for name, path in (weights or {}).items()}
        self.roots = roots_of(ExtractConfig(data=data or {}), home)
        self._memory = memory_of(home)
        self._found: dict[tuple[str, str], Requirement | None] = {}

    def missing(self, entry: PaperTable, cell: PaperCell) -> list[Requirement]:
        """What a cell of an entry lacks; [] when it can be measured right now."""
        reads = READS[entry.kind]
        asked: list[Requirement | None] = []
        if "code" in reads:
            asked.append(self._once("code", entry.kind, lambda: _code(entry.kind)))
        if "method" in reads:
            asked.append(self._once("method", cell.method, lambda: _method(cell.method)))
            if asked[-1] is None:
                asked.append(_settings(cell))
        if "scheme" in reads:
            asked.append(_scheme(cell))
        if "weights" in reads:
            asked += [self.weights(name) for name in cell.backbones]
        if "data" in reads:
            asked.append(self._once("data", cell.dataset, lambda: self._data(cell.dataset)))
        return [need for need in asked if need is not None]

    def all_missing(self, entry: PaperTable) -> list[Requirement]:
        """What any cell lacks, each thing once."""
        return unique(need for cell in entry.cells for need in self.missing(entry, cell))

    def weights(self, name: str) -> Requirement | None:
        """What is missing of a backbone."""
        return self._once("weights", name, lambda: self._weights(name))

    def _once(self, kind: str, name: str, ask: Callable[[], Requirement | None]) -> Requirement | None:
        if (kind, name) not in self._found:
            self._found[kind, name] = ask()
        return self._found[kind, name]

    def _weights(self, name: str) -> Requirement | None:
        try:
            row = backbones.lookup(name, home=self.home.root)
            found = backbones.locate(
                row, given=self.given, home=self.home.root, memory=self._memory, offline=self.home.offline
            )
        except FedcacheError as error:
            return Requirement("weights", name, error.message, error.hint)
        if found.download is not None:
            return Requirement(
                "weights", name, f"not here; published {found.download}", f"fedcache backbones pull {name}", True
            )
        return None

    def _data(self, spec: str) -> Requirement | None:
        try:
            known = datasets.info(spec, roots=self.roots, data=self.home.data)
        except FedcacheError as error:
            return Requirement("data", spec, error.message, error.hint)
        if known.get("ready"):
            return None
        return Requirement(
            "data", spec, "its files are not here", str(known.get("needs") or f"fedcache datasets info {spec}")
        )


def unique(needs: Iterable[Requirement]) -> list[Requirement]:
    """Each thing once, in order."""
    return list(dict.fromkeys(needs))


def _method(name: str) -> Requirement | None:
    if name in METHODS:
        return None
    return Requirement("method", name, f"this fedcache has no method {name}", "fedcache methods list")


def _settings(cell: PaperCell) -> Requirement | None:
    """A method that is there but lacks a switch or a value of it."""
    try:
        METHODS[cell.method].resolve(cell.preset, cell.set)
    except FedcacheError as error:
        return Requirement("setting", cell.method, error.message, f"fedcache methods info {cell.method}")
    return None


def _scheme(cell: PaperCell) -> Requirement | None:
    if cell.scheme not in SCHEMES:
        return Requirement(
            "scheme", cell.scheme, f"this fedcache has no scheme {cell.scheme}", "fedcache partition --help"
        )
    try:
        SCHEMES[cell.scheme].resolve({**cell.args, **({"domain": cell.domain} if cell.domain else {})})
    except FedcacheError as error:
        return Requirement("scheme", cell.scheme, error.message, error.hint)
    return None


def _code(kind: str) -> Requirement | None:
    """Whether the functions that measure this kind are there."""
    there = import_module(DIAGNOSTICS) if find_spec(DIAGNOSTICS) is not None else None
    lost = [name for name in CALLS[kind] if not hasattr(there, name)]
    if not lost:
        return None
    what = f"{DIAGNOSTICS}.{lost[0]}"
    return Requirement("code", what, f"this fedcache has no {what}, which a {kind} needs", "Update fedcache.")
