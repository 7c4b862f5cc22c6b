"""``fedcache use``: choose the store that commands in a folder use without ``--dataset`` and ``--store``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from fedcache.commands.options import OF_FIELDS, command
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.config import FILE_NAME, Home, read_file
from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.planning.find_store import locate_store, need_path, resolve_path
from fedcache.parsing import parse_toml
from fedcache.store.lock import write_output
from fedcache.store.store import Store

SECTION = "train"
"""The section of fedcache.toml into which ``fedcache use`` writes the store."""


@command("use")
def use(
    observer: TerminalObserver,
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="A store of `fedcache ls`, or the name of its dataset.",
            autocompletion=OF_FIELDS["store"],
        ),
    ],
) -> CommandResult:
    """Choose the store that commands in this folder use if --dataset and --store are not given.

    The command writes the name into fedcache.toml of this folder.

    Example: fedcache use digits
    """
    home = Home.from_environment()
    place = resolve_path(home, Path(store), to_read=True)
    if not (place / "manifest.json").exists():
        place = need_path(home, dataset=store, observer=observer)
    opened = Store.open(place)
    key, name = pin_of(opened, home)
    file = Path(FILE_NAME)
    text = ""
    if file.exists():
        read_file(file)  # refuses a file that fedcache cannot read
        text = file.read_text(encoding="utf-8")
    changed = with_pin(text, key, name)
    try:
        is_set = parse_toml(changed).get(SECTION, {}).get(key) == name
    except ValueError:  # for example a file with the section as an inline table
        is_set = False
    if not is_set:
        line = tomli_w.dumps({key: name}).strip()
        raise UsageError(
            f"fedcache cannot write this setting into {FILE_NAME} of this folder.",
            f"Write {line} below [{SECTION}] yourself.",
        )
    write_output(file, changed.encode())
    line = (
        f"Commands in this folder now use {opened.path.name}, because {file} has {key} = {name!r}."
    )
    data = {"path": str(opened.path), "file": str(file.resolve()), key: name}
    return CommandResult(data, [line])


def pin_of(store: Store, home: Home) -> tuple[str, str]:
    """The key and value of fedcache.toml for a store.

    This is the name of the dataset if the name finds the store. Else it is the file name of a store in the home, or the
    path of another store.
    """
    slug = str(store.dataset["slug"])
    with suppress(FedcacheError):
        found = locate_store(home, dataset=slug)
        if found is not None and found.resolve() == store.path.resolve():
            return "dataset", slug
    if store.path.resolve().parent == home.stores.resolve():
        return "store", store.path.name
    return "store", str(store.path.resolve())


def with_pin(text: str, key: str, name: str) -> str:
    """A configuration file with another dataset or store in ``[train]``; every other line stays as it is.

    >>> print(with_pin("[train]\\nstore = 'old'\\nrounds = 3\\n", "dataset", "digits"), end="")
    [train]
    dataset = "digits"
    rounds = 3
    """
    line = tomli_w.dumps({key: name}).strip()
    lines = text.splitlines()
    header = f"[{SECTION}]"
    # A comment may follow the header of a section.
    headers = [one.partition("#")[0].strip() for one in lines]
    if header not in headers:
        if lines:
            lines.append("")
        return "\n".join([*lines, header, line, ""])
    start = headers.index(header) + 1
    end = start
    while end < len(lines) and not (headers[end].startswith("[") and headers[end].endswith("]")):
        end += 1
    other_lines = [one for one in lines[start:end] if not _names_a_store(one)]
    return "\n".join([*lines[:start], line, *other_lines, *lines[end:], ""])


def _names_a_store(line: str) -> bool:
    key = line.partition("=")[0].strip()
    return key in ("dataset", "store")
