"""``fedcache new``: a package with a method, backbone or dataset of the user, ready to be installed and tested."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedcache.commands.options import command
from fedcache.commands.output import CommandResult
from fedcache.errors import MachineError, StoreError, UsageError, shell_word
from fedcache.extract.backbones import BACKBONES
from fedcache.extract.datasets.kinds import KINDS
from fedcache.federate.methods import METHODS

new = typer.Typer(
    name="new",
    help="Start a package for your own method, backbone or dataset.",
    no_args_is_help=True,
)

TEMPLATES = Path(__file__).parent / "templates"
LONGEST = 60
"""Maximum number of characters of a package's name."""

PLACES = {"method": "method:METHOD", "backbone": "encoder:build", "dataset": "reader"}
"""Kind -> MODULE:OBJECT or MODULE of the package, as the entry point names it."""

DESCRIPTIONS = {
    "method": "A federated method for fedcache: FedAvg whose server moves only part of the way to the average.",
    "backbone": "A frozen backbone for fedcache: two layers of fixed random filters.",
    "dataset": "A reader of datasets for fedcache: images listed in a file of JSON lines.",
}
"""Kind -> description of the package."""

Name = Annotated[
    str,
    typer.Argument(
        help="Name of the package, and of the method, backbone or dataset: letters, digits and hyphens."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder to create. It must not exist. Default: ./NAME."),
]


@command("new method", within=new)
def new_method(name: Name, out: Out = None) -> CommandResult:
    """Create a package with a working method, an entry point and the tests that every method must pass.

    The example is FedAvg whose server moves only part of the way to the average. Replace it by your method.

    Example: fedcache new method half-step
    """
    following = f"fedcache grid --method fedavg,{shell_word(name)}"
    return new_package("method", name, out, METHODS, following)


@command("new backbone", within=new)
def new_backbone(name: Name, out: Out = None) -> CommandResult:
    """Create a package with a working backbone, an entry point and the tests that every backbone must pass.

    The example has two layers of fixed random filters. Replace them by your module.

    Example: fedcache new backbone my-encoder
    """
    following = f"fedcache extract --dataset digits --backbones {shell_word(name)}"
    return new_package("backbone", name, out, BACKBONES, following)


@command("new dataset", within=new)
def new_dataset(name: Name, out: Out = None) -> CommandResult:
    """Create a package with a working dataset reader, an entry point and the tests that every dataset reader must pass.

    The example reads a file of JSON lines that lists images. Replace it by a reader of your format.

    Example: fedcache new dataset my-format
    """
    following = f"fedcache extract --dataset {shell_word(name)}:FILE"
    return new_package("dataset", name, out, KINDS, following)


def new_package(
    kind: str, name: str, out: Path | None, existing: Mapping[str, object], following: str
) -> CommandResult:
    """Write a package. The answer lists the written files and the next commands; the last command is ``following``."""
    folder = write_package(kind, name, out, existing)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    data = {"kind": kind, "name": name, "folder": str(folder), "files": files}
    lines = [
        f"{folder}:",
        *(f"  {file}" for file in files),
        "",
        "Next:",
        f"  pip install -e {shell_word(folder)}",
        f"  python -m pytest {shell_word(folder)}",
        f"  {following}",
    ]
    return CommandResult(data, lines)


def write_package(kind: str, name: str, out: Path | None, existing: Mapping[str, object]) -> Path:
    """Write the package of a kind under a valid and free name, whole or not at all. Returns its folder.

    Raises UsageError for an invalid name, StoreError for a folder that exists, MachineError for a folder that cannot
    be written.
    """
    package = package_of(kind, name, existing)
    folder = (out or Path(name)).expanduser().absolute()
    if folder.exists():
        raise StoreError(
            f"{folder} exists already. Nothing was written.",
            f"Name another folder: --out {shell_word(name)}-2",
        )
    # Values for the ${words} of the templates.
    words = {
        "name": name,
        "package": package,
        "kind": kind,
        "title": name.replace("-", " ").capitalize(),
        "place": PLACES[kind],
        "description": DESCRIPTIONS[kind],
    }
    code = PLACES[kind].partition(":")[0]
    # File of the package -> its template in commands/templates.
    files = {
        "pyproject.toml": "pyproject.toml",
        "README.md": f"{kind}/README.md",
        f"{package}/__init__.py": "__init__.py",
        f"{package}/{code}.py": f"{kind}/{code}.py",
        f"tests/test_{package}.py": f"{kind}/test_laws.py",
    }
    # The package is written to a temporary folder and then moved, so an interrupted command leaves no part of it.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as made:
            whole = Path(made) / "package"
            for place, template in files.items():
                file = whole / place
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(rendered(template, words), encoding="utf-8")
            shutil.move(whole, folder)
    except OSError as error:
        raise MachineError(
            f"{folder} cannot be written: {error.strerror or error}.",
            "Name another folder: --out FOLDER",
        ) from error
    return folder


def package_of(kind: str, name: str, existing: Mapping[str, object]) -> str:
    """The name of the Python package for a plug-in with this name.

    Raises UsageError for an invalid or taken name; the hint proposes another name.
    """
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > LONGEST:
        # Propose the nearest valid name.
        likely = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
        likely = likely.lstrip("0123456789-")[:LONGEST] or f"my-{kind}"
        raise UsageError(
            f"{name!r} is not a valid name: names begin with a lower-case letter and contain lower-case "
            f"letters, digits and single hyphens, at most {LONGEST} characters.",
            f"fedcache new {kind} {shell_word(likely)}",
        )
    if name in existing:
        raise UsageError(
            f"fedcache has a {kind} called {name}.", f"fedcache new {kind} my-{shell_word(name)}"
        )
    # The package is imported by its name, which must not hide another package.
    reserved = {*keyword.kwlist, *sys.stdlib_module_names, "fedcache", "torch", "tests"}
    if package in reserved:
        raise UsageError(
            f"A package called {package} would hide a module of Python or another installed package.",
            f"fedcache new {kind} my-{shell_word(name)}",
        )
    return package


def rendered(template: str, words: Mapping[str, str]) -> str:
    """A template with its ``${words}`` filled in; each of them must be known."""
    text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(words)
