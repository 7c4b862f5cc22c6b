"""Plug-ins: entry points of installed packages, and objects given to ``fc.register``.

Tables of fedcache search here for names that they do not have. So fedcache imports no plug-in, and searches no
installed packages, until such a name is requested or a list is shown. A plug-in that cannot be loaded is an error only
if it is requested by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
        "backbones": "an importable function without arguments that returns an nn.Module, or an "
        "nn.Module and its transform",
        "datasets": "a module or object with key(rest, context) and load(rest, context)",
        "partitions": "a partition scheme: fedcache.federate.partition.scheme.Scheme",
        "aggregators": "a function that takes V [m, d] and returns [d]",
        "trackers": "a function that takes a folder and returns a callback for rounds, which has "
        "a method close()",
        "executors": "a class: fedcache.federate.execution.executor.Executor",
    }
)
"""Kind of plug-ins -> what the object must be. Entry points of a kind are in the group ``fedcache.KIND``."""


@dataclass(frozen=True)
class Plugin:
    """An object from an entry point, which is not loaded yet, or an object that this process registered."""

    kind: str  # of ``KINDS``
    name: str
    package: str  # with the entry point; "" for a registered object
    version: str  # of the package
    entry: EntryPoint | None = None
    thing: Any = None  # the registered object

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
        """The object itself. Raises UsageError with the package and its version if it cannot be imported."""
        if self.entry is None:
            return self.thing
        try:
            return self.entry.load()
        except Exception as error:  # the import runs code of others, which may raise anything
            kind = type(error).__name__
            reason = str(error)[:160]
            raise UsageError(
                f"The plug-in {self.name!r} ({self.entry.value}) of {self.origin} cannot be loaded: {kind}: {reason}.",
                f"Fix or remove the package:  pip uninstall {self.package}",
            ) from error

    def loaded(self, expected: type[Any]) -> Any:
        """The object. Raises UsageError like ``load``, and if its kind or name is not the expected one."""
        # An entry point may name a class of the expected kind, or an object.
        thing = self.load()
        if isinstance(thing, type):
            is_expected = issubclass(thing, expected)
        else:
            is_expected = isinstance(thing, expected)
        called = getattr(thing, "name", None)
        other_name = isinstance(called, str) and called != self.name
        if other_name or not is_expected:
            description = f"a {type(thing).__name__}"
            if isinstance(called, str):
                description += f" called {called!r}"
            expected_kind = KINDS[self.kind]
            raise UsageError(
                f"The plug-in {self.name!r} of {self.origin} is {description}. Expected: {expected_kind} whose "
                f"name is {self.name!r}.",
                "Fix the object that the entry point or the call of fc.register refers to.",
            )
        return thing


_registered: dict[str, dict[str, Plugin]] = {kind: {} for kind in KINDS}
_own: dict[str, frozenset[str]] = {}
"""Kind of plug-ins -> fedcache's own names of that kind."""


def offer(kind: str, names: Iterable[str]) -> None:
    """Declare fedcache's own names of a kind. No plug-in may hide them."""
    _own[kind] = frozenset(names)


@cache
def _installed(kind: str) -> dict[str, Plugin]:
    """Plug-ins of entry points by name; if two packages have the same name, the alphabetically first package counts."""
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
    in_order = sorted(found.values(), key=lambda plugin: (plugin.package, plugin.name))
    return {plugin.name: plugin for plugin in in_order}


def plugins(kind: str) -> dict[str, Plugin]:
    """All plug-ins of a kind, by name, without those that have a name of fedcache's own."""
    found = {**_installed(kind), **_registered[kind]}
    for name in _own.get(kind, frozenset()):
        found.pop(name, None)
    return found


def find(kind: str, name: str) -> Plugin | None:
    """The plug-in of that kind and name, or None. For a name of fedcache's own, installed packages are not searched."""
    if name in _own.get(kind, frozenset()):
        return None
    return _registered[kind].get(name) or _installed(kind).get(name)


def used(names: Mapping[str, str]) -> list[Plugin]:
    """The plug-ins that ``names`` refers to, a mapping from kinds to names; names of fedcache's own are left out."""
    found = [find(kind, name) for kind, name in names.items()]
    return [plugin for plugin in found if plugin is not None]


def register(kind: str, thing: Any, name: str | None = None) -> str:
    """Make an object known to this process under its name; it replaces an earlier object of the same name.

    Args:
        kind: a key of ``KINDS``, in the plural or the singular.
        thing: the object that ``KINDS`` describes.
        name: None for the object's own ``name``.

    Returns:
        The name.

    Raises:
        UsageError for an unknown kind, an object without a name, and a name of fedcache's own.
    """
    # `method` and `methods` mean the same.
    plural = kind
    if kind not in KINDS:
        plural = f"{kind}s"
    if plural not in KINDS:
        raise unknown("kind of plug-in", kind, KINDS)
    if name is None:
        name = getattr(thing, "name", None)
    if not isinstance(name, str) or not name.strip():
        raise UsageError(
            f"The {plural.removesuffix('s')} has no name.",
            'For example fc.register("method", METHOD, "mine")',
        )
    # Worker processes import a backbone again, by its module and name.
    if plural == "backbones" and not _is_importable(thing):
        kind_of_thing = type(thing).__name__
        raise UsageError(
            f"The backbone {name!r} is a {kind_of_thing}, expected {KINDS[plural]}.",
            "Pass a module in memory directly: fc.extract(backbones=[fc.backbone(module, name='mine')])",
        )
    # A name of fedcache's own always means fedcache's own object.
    if name in _own.get(plural, frozenset()):
        raise UsageError(f"{name!r} is one of fedcache's own {plural}.", "Give it another name.")
    _registered[plural][name] = Plugin(plural, name, package="", version="", thing=thing)
    return name


def _is_importable(thing: Any) -> bool:
    """Whether another process can import a callable by its module and name."""
    module = getattr(thing, "__module__", None)
    # The names of lambdas and of functions inside functions contain "<".
    name = getattr(thing, "__qualname__", "")
    return callable(thing) and module not in (None, "__main__") and "<" not in name


class PluginTable(Mapping[str, T]):
    """A table of fedcache's own objects by name, which also finds plug-ins by name.

    It lists only its own objects. Raises UsageError if a plug-in cannot be loaded or is not of the type ``expected``.
    """

    def __init__(self, kind: str, own: Mapping[str, T], expected: type[Any]) -> None:
        self._kind = kind
        self._things = dict(own)
        self._expected = expected
        offer(kind, own)

    def __getitem__(self, name: str) -> T:
        if name in self._things:
            return self._things[name]
        plugin = find(self._kind, name)
        if plugin is None:
            raise KeyError(name)
        thing: T = plugin.loaded(self._expected)
        return thing

    def __contains__(self, name: object) -> bool:
        if name in self._things:
            return True
        return isinstance(name, str) and find(self._kind, name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)


def forget(kind: str, name: str) -> None:
    """Remove a registration; an unknown name is ignored."""
    _registered[kind].pop(name, None)


# Names of a user's own backbones: a prefix, and a file, a folder or a place in the user's code.
#
# Stores and recipes name such a backbone without its folders (``bare_name``), so two sites with the
# same model in different folders have the same recipe, and a store does not reveal folders. A name
# that an installed package gives to a factory stands for ``module:`` and the place of that
# factory.
#
# A ``module:`` name is Python code that is imported and called, so data must never choose one. It
# is accepted only if the user wrote it in the command or passed it to a function in this process,
# or if an installed package declares it as a backbone. Names in models, stores, runs and
# ``fedcache.toml`` give no permission.

MODULE = "module:"
ONNX = "onnx:"
TFLITE = "tflite:"
HUGGING_FACE = "hf:"
PREFIXES = (MODULE, ONNX, TFLITE, HUGGING_FACE)

_CODE_NAME = re.compile(rf"{MODULE}[\w.]+:[\w.]+")
_named: set[str] = set()
"""Names with ``module:`` that the user wrote or passed in this process."""


def note_named(given: Any) -> None:
    """Note the ``module:`` backbones that the user named in a command, or passed to a function of the Python API.

    ``given`` is a word or a list of words, each with names of backbones: ``a,b+c``, ``a@SIZE``, ``a=PATH``. Other
    values are ignored. Never pass a value that was read from a file, nor a path: others may have chosen these names.
    """
    if isinstance(given, str):
        for word in re.split("[,+]", given):
            name = re.split("[@=]", word)[0].strip()
            if _CODE_NAME.fullmatch(name):
                _named.add(name)
    elif isinstance(given, list | tuple):
        for one in given:
            note_named(one)


def may_be_run(name: str) -> bool:
    """Whether the user named this ``module:`` backbone in this process, or installed a package that declares it."""
    if name in _named:
        return True
    return any(name == f"{MODULE}{plugin.place}" for plugin in plugins("backbones").values())


def bare_name(name: str) -> str:
    """A backbone's name in stores: only the last part of a path, but both parts of a Hugging Face repository.

    A folder whose path has two parts has the same name as a repository with these parts, with or without a last slash.

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
    path = PurePath(rest.replace("\\", "/"))
    return f"{prefix}:{path.name}"
