"""Plug-ins: entry points of installed packages, and objects given to ``fc.register``.

Tables of fedcache ask here for a name that is not their own, so that nothing is imported, and no installed package is
looked at, before such a name is requested or a list is shown. A plug-in that cannot be loaded is an error only if it
is requested by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeVar

from fedcache.errors import UsageError, unknown

T = TypeVar("T")

KINDS = MappingProxyType(
    {
        "methods": "a federated method: fedcache.Method",
        "backbones": "a function without arguments, in a module, that returns an nn.Module, or one and its transform",
        "datasets": "a module or object with key(rest, context) and load(rest, context)",
        "partitions": "a partition scheme: fedcache.federate.partition.scheme.Scheme",
        "aggregators": "a function of V [m, d] that returns [d]",
        "trackers": "a function of a folder that returns a hook, called with each round, with a method close()",
        "executors": "a class: fedcache.federate.execution.executor.Executor",
    }
)
"""Description of a plug-in of each kind. Entry points of a kind are the group ``fedcache.KIND``."""


@dataclass(frozen=True)
class Plugin:
    """One thing from outside, not yet loaded where it is an entry point."""

    kind: str  # of ``KINDS``
    name: str
    package: str  # that brings it; "" for what this process registered
    version: str  # of the package
    entry: EntryPoint | None = None
    thing: Any = None  # what was registered

    @property
    def origin(self) -> str:
        """``package 1.2``, or ``registered here``."""
        if self.package:
            return f"{self.package} {self.version}"
        return "registered here"

    @property
    def place(self) -> str:
        """``package.module:attribute`` of the definition."""
        if self.entry is not None:
            return self.entry.value
        module = self.thing.__module__
        return f"{module}:{self.thing.__qualname__}"

    def load(self) -> Any:
        """The thing itself. Raises UsageError with the package and its version, when it cannot be imported."""
        if self.entry is None:
            return self.thing
        try:
            return self.entry.load()
        except Exception as error:  # whatever the code of others raises when it is imported
            kind = type(error).__name__
            reason = str(error)[:160]
            raise UsageError(
                f"The plug-in {self.name!r} ({self.entry.value}) of {self.origin} cannot be loaded: {kind}: {reason}.",
                f"Fix or remove the package:  pip uninstall {self.package}",
            ) from error

    def loaded(self, expected: type[Any]) -> Any:
        """The thing, where it is what it should be. Raises UsageError as ``load``, and for anything else."""
        # An entry point may name a class of the expected kind, or an object.
        thing = self.load()
        if isinstance(thing, type):
            good = issubclass(thing, expected)
        else:
            good = isinstance(thing, expected)
        called = getattr(thing, "name", None)
        if not good or (isinstance(called, str) and called != self.name):
            found = f"a {type(thing).__name__}"
            if isinstance(called, str):
                found += f" called {called!r}"
            expected_kind = KINDS[self.kind]
            raise UsageError(
                f"The plug-in {self.name!r} of {self.origin} is {found}, expected {expected_kind} of that name.",
                "Fix the object that the entry point names or that was registered.",
            )
        return thing


_registered: dict[str, dict[str, Plugin]] = {kind: {} for kind in KINDS}
_own: dict[str, frozenset[str]] = {}


def offer(kind: str, names: Iterator[str] | list[str] | tuple[str, ...]) -> None:
    """Say which names of a kind are fedcache's own: no plug-in may hide them."""
    _own[kind] = frozenset(names)


@cache
def _installed(kind: str) -> dict[str, Plugin]:
    """Entry points by name; of two packages with one name the first in the order of their names."""
    found: dict[str, Plugin] = {}
    for entry in entry_points(group=f"fedcache.{kind}"):
        package = ""
        version = ""
        if entry.dist is not None:
            package = entry.dist.name
            version = entry.dist.version
        plugin = Plugin(kind, entry.name, package, version, entry)
        if entry.name not in found or package < found[entry.name].package:
            found[entry.name] = plugin
    return dict(sorted(found.items(), key=lambda item: (item[1].package, item[0])))


def plugins(kind: str) -> dict[str, Plugin]:
    """All plug-ins of a kind, by name, without those that have a name of fedcache's own."""
    own = _own.get(kind, frozenset())
    return {
        name: p for name, p in {**_installed(kind), **_registered[kind]}.items() if name not in own
    }


def find(kind: str, name: str) -> Plugin | None:
    """The plug-in of that kind and name, or None; of a name of fedcache's own no package is looked at."""
    if name in _own.get(kind, frozenset()):
        return None
    return _registered[kind].get(name) or _installed(kind).get(name)


def used(names: Mapping[str, str]) -> list[Plugin]:
    """The plug-ins among these names, by kind."""
    return [plugin for kind, name in names.items() if (plugin := find(kind, name)) is not None]


def register(kind: str, thing: Any, name: str | None = None) -> str:
    """Make a thing known to this process under its name; the same name again takes its place.

    Args:
        kind: of ``KINDS``, in the plural or the singular.
        thing: what ``KINDS`` says of it.
        name: None for the thing's own ``name``.

    Returns:
        its name.

    Raises:
        UsageError for an unknown kind, a thing without a name, and a name of fedcache's own.
    """
    # `method` and `methods` mean the same.
    if kind in KINDS:
        many = kind
    else:
        many = f"{kind}s"
    if many not in KINDS:
        raise unknown("kind of plug-in", kind, KINDS)
    if name is None:
        name = getattr(thing, "name", None)
    called = name
    if not isinstance(called, str) or not called.strip():
        raise UsageError(
            f"The {many.removesuffix('s')} has no name.",
            'For example fc.register("method", METHOD, "mine")',
        )
    # Backbones are looked up again by workers, which import them by their place.
    if many == "backbones" and not _is_found_again(thing):
        kind_of_thing = type(thing).__name__
        raise UsageError(
            f"The backbone {called!r} is a {kind_of_thing}, expected {KINDS[many]}.",
            "Pass a module in memory directly: fc.extract(backbones=[fc.backbone(module, name='mine')])",
        )
    # A name of fedcache's own always means fedcache's own.
    if called in _own.get(many, frozenset()):
        raise UsageError(f"{called!r} is one of fedcache's own {many}.", "Give it another name.")
    _registered[many][called] = Plugin(many, called, "", "", None, thing)
    return called


def _is_found_again(thing: Any) -> bool:
    """Whether another process can import it by its module and name."""
    parts = (getattr(thing, "__module__", None), getattr(thing, "__qualname__", ""))
    return callable(thing) and parts[0] not in (None, "__main__") and "<" not in parts[1]


class PluginTable(Mapping[str, T]):
    """A table of fedcache's own things by name, which also finds plug-ins by name.

    It lists its own things alone. Raises UsageError where a plug-in cannot be loaded or is no ``expected``.
    """

    def __init__(self, kind: str, own: Mapping[str, T], expected: type[Any]) -> None:
        self._kind = kind
        self._things = dict(own)
        self._expected = expected
        offer(kind, list(own))

    def __getitem__(self, name: str) -> T:
        if name in self._things:
            return self._things[name]
        plugin = find(self._kind, name)
        if plugin is None:
            raise KeyError(name)
        thing: T = plugin.loaded(self._expected)
        return thing

    def __contains__(self, name: object) -> bool:
        return name in self._things or (
            isinstance(name, str) and find(self._kind, name) is not None
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)


def forget(kind: str, name: str) -> None:
    """Take back a registration; nothing happens where there is none."""
    _registered[kind].pop(name, None)


# Names of backbones that a user brings: a prefix, and a file, a folder or a place in the user's
# own code.
#
# In a store and in a recipe such a backbone has its bare name, without folders: two sites that
# keep one model in different places have one recipe, and a store says nothing of places. A name
# that an installed package gives to a factory stands for ``module:`` and the place of that
# factory.
#
# A ``module:`` name is Python code that is imported and called, so data must never choose one. It
# counts only if the user wrote it in the command or passed it to a function in this process, or if
# an installed package declares it as a backbone. Names in models, stores, runs and
# ``fedcache.toml`` count for nothing.

MODULE = "module:"
ONNX = "onnx:"
TFLITE = "tflite:"
HUGGING_FACE = "hf:"
PREFIXES = (MODULE, ONNX, TFLITE, HUGGING_FACE)

_CODE_NAME = re.compile(rf"{MODULE}[\w.]+:[\w.]+")
_named: set[str] = set()
"""The ``module:`` names that the user wrote or passed in this process."""


def note_named(given: Any) -> None:
    """Note the ``module:`` backbones that the user named in a command, or passed to a function of the Python API.

    ``given`` is a word or a list of words, each with names of backbones: ``a,b+c``, ``a@SIZE``, ``a=PATH``. Anything
    else names nothing. Never pass what was read from a file, nor a path: strangers choose the names of their files.
    """
    if isinstance(given, str):
        names = [re.split("[@=]", name)[0].strip() for name in re.split("[,+]", given)]
        _named.update(name for name in names if _CODE_NAME.fullmatch(name))
    elif isinstance(given, list | tuple):
        for one in given:
            note_named(one)


def may_be_run(name: str) -> bool:
    """Whether the user named this ``module:`` backbone in this process, or installed a package that declares it."""
    if name in _named:
        return True
    return any(name == f"{MODULE}{plugin.place}" for plugin in plugins("backbones").values())


def bare_name(name: str) -> str:
    """A backbone's name as stores spell it: of a path its last part, of ``hf:`` also a repository's two parts.

    A folder named by two parts is called as a repository of that name would be, with or without a slash at the end.

    >>> [bare_name(n) for n in ("onnx:models/enc.onnx", "hf:/srv/dinov2/", "hf:facebook/dinov2-base/", "clip-rn50")]
    ['onnx:enc.onnx', 'hf:dinov2', 'hf:facebook/dinov2-base', 'clip-rn50']
    """
    prefix, colon, rest = name.partition(":")
    if not colon:
        alias, at, size = name.partition("@")
        plugin = find("backbones", alias)
        if plugin is None:
            return name
        return f"{MODULE}{plugin.place}{at}{size}"
    if prefix + colon not in PREFIXES or prefix + colon == MODULE:
        return name
    if prefix + colon == HUGGING_FACE and not rest.startswith((".", "/", "~")):
        org, _, model = rest.rstrip("/").partition("/")
        if org and model and "/" not in model:
            return f"{HUGGING_FACE}{org}/{model}"
    return f"{prefix}:{PurePath(rest.replace(chr(92), '/')).name}"
