"""Identity of a run: everything that determines its result, and the digest that names its directory.

A stored result is returned again only while nothing that determines it has changed. Part of that is the code itself.
Its digest is taken from the syntax trees, so comments, docstrings, formatting and the place of a file are free to
change, and every expression that could change a figure is not.

The functions of a user's own method come from files that fedcache has never seen. ``store/own_code.py`` digests them,
so that a changed line or a changed number is another run, as it is for the methods that come along.
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
"""Files under fedcache/ that determine the figures of every method: the reader of features, the partition, training,
evaluation, and the decoding of images. Of the methods' own files only those that a method uses are added."""


@dataclass(frozen=True)
class Identity:
    """The parts that determine the result of each seed, without the seed itself."""

    # method, every hyperparameter, rounds, participation, execution, dtype, ... resolved; no seed
    config: Mapping[str, Any]
    features: Sequence[
        str
    ]  # recipe digests in the order they are concatenated, and the text features' digest
    dataset: str  # content digest
    # digest of the partition, or of how every seed draws its own
    partition: str
    code: str  # ``code_digest``

    @property
    def digest(self) -> str:
        """sha256 over all of it."""
        return digest_of(asdict(self))


@cache
def code_digest(method: str) -> str:
    """sha256 over the code that determines the results of a method.

    Other methods' files are left out, so that adding one does not make every stored result old. "" stands for what all
    methods share.
    """
    return remembered_of_package(["code", method], lambda: digest_of_code(ROOT, method))


def digest_of_code(root: Path, method: str) -> str:
    """``code_digest`` of the package whose folder is ``root``."""
    files = {
        path for pattern in DETERMINING for path in root.glob(pattern.replace("/**", "/**/*.py"))
    }
    files |= _with_imports(root / "federate" / "methods", method.replace("-", "_"))
    return digest_of_files(files)


def _with_imports(folder: Path, name: str) -> set[Path]:
    """A method's file and the method files it imports, directly or through others."""
    seen: set[Path] = set()
    todo = [name]
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "fedcache.federate.methods"
            ):
                place = (node.module or "").removeprefix("fedcache.federate.methods").strip(".")
                if place:
                    todo.append(place)
                else:
                    todo += [alias.name for alias in node.names]
    return seen


def code_of(method: Method) -> str:
    """The code digest of a method's runs: ``code_digest`` of one that comes along, ``own_digest`` of any other."""
    own = method.name in NAMES and METHODS.get(method.name) is method
    if own:
        return code_digest(method.name)
    return own_digest(method)


def own_digest(method: Method) -> str:
    """sha256 over fedcache's part, the files the method is written in, and everything bound to its functions.

    Of a plug-in all files of its package are the user's, wherever it is installed, and its name and version count too.
    Raises UsageError, when its name is taken, its source cannot be read or is not what runs, or something is bound to
    it that has no digest.
    """
    if method.name in NAMES:
        raise UsageError(
            f"This Method is called {method.name!r} but is not the {method.name} of fedcache.",
            f"Give it another name: dataclasses.replace(method, name='my-{method.name}')",
        )
    plugin = find("methods", method.name)
    folders: tuple[Path, ...] = ()
    if plugin is not None:
        folders = _place_of(plugin)
    code = ReachedCode(f"the method {method.name!r}", folders)
    description = code.describe(method)
    base = sorted(code_digest(name) for name in code.methods or {""})
    made = [base, sorted(code.sources.values()), description]
    if plugin is not None and plugin.package:
        made += [plugin.package, plugin.version]
    return digest_of(made)


def _place_of(plugin: Plugin) -> tuple[Path, ...]:
    """The folder or single file of a plug-in's package; () for a thing that was registered in this process."""
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
    """A run's code digest with what comes from outside besides its method: package, version and source file of each."""
    others = [p for p in used if p.kind != "methods"]
    if not others:
        return code
    return digest_of(
        [code, *([p.kind, p.name, p.package, p.version, _source_digest(p)] for p in others)]
    )


def _source_digest(plugin: Plugin) -> str:
    """sha256 of the file that a plug-in is written in; "" where there is none to read."""
    try:
        return sha256_hex(Path(inspect.getsourcefile(plugin.load()) or "").read_bytes())
    except (OSError, TypeError):
        return ""


# Facts about the methods of this package, stored in the home so that reports start without
# importing torch.
#
# ``compare``, ``report`` and ``runs`` compare a stored run with the preset of its method. A
# method's file imports torch, which takes seconds, so each fact is read from the method once and
# again after any file of the package has changed.


def usual_settings(method: str, preset: str) -> dict[str, Any]:
    """Every hyperparameter of a preset. Raises UsageError for an unknown method or preset."""
    return _of_method(
        method, ["preset", method, preset], lambda: find_method(method).resolve(preset)
    )


def usual_preset(method: str) -> str:
    """The preset that a run without ``--preset`` says it has; of an unknown method the paper's."""

    def read() -> dict[str, Any]:
        return {"preset": PRESETS[0] if find_method(method).usual else "paper"}

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
    """Whether a method gives the same for every seed when all clients take part; False for an unknown method.

    Its uploads add up to those of one client with all rows, for every seed, and no client takes a gradient step.
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
    """A fact about a method. Methods from outside the package are not cached, as their files may change."""
    if method in NAMES:
        return remembered_of_package(key, read)
    return read()
