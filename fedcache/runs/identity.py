"""Identity of a run: everything that determines its result, and the digest that names its directory.

A stored result is returned again only if nothing that determines it has changed. This includes the code of fedcache.
The digest of the code is computed from its syntax trees. So comments, docstrings, formatting and the place of a file
may change, but a changed expression makes another run.

The functions of a user's own method are in other files. ``store/own_code.py`` computes their digest, so that a changed
line or a changed number makes another run, as it does for the methods of fedcache.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.config import PRESETS
from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.digests import remembered_of_package
from fedcache.federate.methods import METHODS, NAMES, find_method
from fedcache.plugins import Plugin, find
from fedcache.store.files import digest_of, digest_of_files, sha256_hex
from fedcache.store.own_code import ROOT, ReachedCode

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method


DETERMINING = (
    "heads/**",
    "federate/engine/**",
    "federate/execution/**",
    "federate/partition/**",
    "federate/trust/**",
    "federate/methods/common/**",
    "runs/features.py",
    "runs/partitions.py",
    "runs/results.py",
    "runs/row_sources.py",
    "runs/store_choice.py",
    "store/chunks.py",
    "store/reader.py",
    "store/samples.py",
    "extract/batches.py",
    "extract/images.py",
    "extract/backbones/backbone.py",
    "extract/backbones/clip_towers.py",
    "extract/backbones/word_clip.py",
)
"""Files of the package that determine the results of every method: reading of features, partition, training, evaluation
and decoding of images. The files that a method uses are added to them."""


@dataclass(frozen=True)
class Identity:
    """The parts that determine the result of each seed, without the seed itself."""

    # method, every hyperparameter, rounds, participation, execution, dtype, ... resolved; no seed
    config: Mapping[str, Any]
    # digests of the recipes, in the order in which features are concatenated, and of the text features
    features: Sequence[str]
    dataset: str  # content digest
    partition: str  # digest of the partition, or of the scheme by which every seed draws its own
    code: str  # ``code_digest``

    @property
    def digest(self) -> str:
        """sha256 over all parts."""
        return digest_of(asdict(self))


@cache
def code_digest(method: str) -> str:
    """sha256 over the code that determines the results of a method.

    The files of other methods are left out, so that a new method does not invalidate every stored result. The name ""
    gives the digest of the code that all methods share.
    """
    return remembered_of_package(["code", method], lambda: digest_of_code(ROOT, method))


def digest_of_code(root: Path, method: str) -> str:
    """``code_digest`` of the package whose folder is ``root``."""
    files = _with_imports(root / "federate" / "methods", method.replace("-", "_"))
    for pattern in DETERMINING:
        files |= set(root.glob(pattern.replace("/**", "/**/*.py")))
    return digest_of_files(files)


def _with_imports(folder: Path, name: str) -> set[Path]:
    """The file of a method, and the method files that it imports directly or through others."""
    package = "fedcache.federate.methods"
    seen = set()
    todo = [name]
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path in seen or not path.exists():
            continue
        seen.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = node.module or ""
            if not module.startswith(package):
                continue
            relative = module.removeprefix(package).strip(".")
            if relative:
                todo.append(relative)
            else:
                todo += [alias.name for alias in node.names]
    return seen


def code_of(method: Method) -> str:
    """The code digest of a method's runs: ``code_digest`` for a method of fedcache, ``own_digest`` for another."""
    if method.name in NAMES and METHODS.get(method.name) is method:
        return code_digest(method.name)
    return own_digest(method)


def own_digest(method: Method) -> str:
    """sha256 over the code of fedcache, the files of the user's method, and everything bound to its functions.

    For a plug-in, the files are those of its package, wherever it is installed, and its name and version are included.
    Raises UsageError if the method's name is taken, if its source cannot be read or is not the code that runs, or if
    a value without a digest is bound to it.
    """
    if method.name in NAMES:
        raise UsageError(
            f"Your Method has the name {method.name!r}, but fedcache has another method of this name.",
            f"Give your method another name: dataclasses.replace(method, name='my-{method.name}')",
        )
    plugin = find("methods", method.name)
    folders: tuple[Path, ...] = ()
    if plugin is not None:
        folders = _place_of(plugin)
    code = ReachedCode(f"the method {method.name!r}", folders)
    description = code.describe(method)
    # If the user's functions reach no method of fedcache, "" stands for the code that all methods share.
    base = sorted(code_digest(name) for name in code.methods or {""})
    parts = [base, sorted(code.sources.values()), description]
    if plugin is not None and plugin.package:
        parts += [plugin.package, plugin.version]
    return digest_of(parts)


def _place_of(plugin: Plugin) -> tuple[Path, ...]:
    """The folder or single file of a plug-in's package.

    () for a plug-in that was registered in this process, for a package without a file, and for fedcache itself.
    """
    top = ""
    if plugin.entry is not None:
        top = plugin.entry.module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None or Path(file).resolve().is_relative_to(ROOT):
        return ()
    place = Path(file).resolve()
    if place.name == "__init__.py":
        return (place.parent,)
    return (place,)


def code_with_plugins(code: str, used: Sequence[Plugin]) -> str:
    """A run's code digest with the package, version and source of every plug-in other than its method."""
    parts: list[Any] = [code]
    for plugin in used:
        if plugin.kind != "methods":
            source = _source_digest(plugin)
            parts.append([plugin.kind, plugin.name, plugin.package, plugin.version, source])
    if len(parts) == 1:
        return code
    return digest_of(parts)


def _source_digest(plugin: Plugin) -> str:
    """sha256 of the source file of a plug-in; "" if it cannot be read."""
    try:
        file = inspect.getsourcefile(plugin.load()) or ""
        return sha256_hex(Path(file).read_bytes())
    except (OSError, TypeError):
        return ""


# Facts about the methods of this package, stored in the home so that reports start without importing torch.
#
# ``compare``, ``report`` and ``runs`` compare a stored run with the preset of its method. The file of a method imports
# torch, which takes seconds. So each fact is read from the method once, and again after a file of the package changed.


def usual_settings(method: str, preset: str) -> dict[str, Any]:
    """Every hyperparameter of a preset. Raises UsageError for an unknown method or preset."""
    key = ["preset", method, preset]
    return _of_method(method, key, lambda: find_method(method).resolve(preset))


def usual_preset(method: str) -> str:
    """The preset in the result of a run without ``--preset``; "paper" for an unknown method."""

    def read() -> dict[str, Any]:
        preset = "paper"
        if find_method(method).usual:
            preset = PRESETS[0]
        return {"preset": preset}

    try:
        return str(_of_method(method, ["usual preset", method], read)["preset"])
    except FedcacheError:
        return "paper"


def usual_run(method: str) -> dict[str, Any]:
    """Rounds and participation of a method's paper. Raises UsageError for an unknown method."""

    def read() -> dict[str, Any]:
        usual = find_method(method).defaults
        participation: str | float = "all"
        if usual.participation is not None:
            participation = usual.participation
        return {"rounds": usual.rounds, "participation": participation}

    return _of_method(method, ["run", method], read)


def draws_nothing(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a method has the same result for every seed if all clients take part; False for an unknown method.

    For such a method, the sum of uploads is that of one client with all rows, and no client takes a gradient step.
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
    """A fact about a method. Facts about methods of other packages are not cached, because their files may change."""
    if method in NAMES:
        return remembered_of_package(key, read)
    return read()
