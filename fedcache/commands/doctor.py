"""``fedcache doctor`` checks the installation, and ``fedcache config`` prints all settings."""

from __future__ import annotations

import os
import re
import shutil
import sys
import typing
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from fedcache.commands.options import ConfigFile, command
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import SECTIONS, Home, OptionInfo, read_file, resolve, to_table
from fedcache.errors import Exit, shell_word
from fedcache.extract.backbones.backbone import library_caches
from fedcache.extract.device import cores, resolve_device

ROOM = 1 << 30
"""Minimum of free bytes on the home's disk for ``doctor``; a store of 60,000 images takes a tenth of it."""
REQUIREMENT = re.compile(r"([\w-]+)[^;]*?>=([\d.]+)(?:.*extra == .([\w-]+))?")
"""A requirement in the package's metadata: name, minimum version, and the extra that needs it."""
OF_DEVELOPERS = {"audit", "browser", "dev", "docs", "notebooks", "release"}
"""Extras that only developers of fedcache need."""

Row = dict[str, str]


@command("doctor")
def doctor() -> CommandResult:
    """Check this installation: versions, cores and memory, GPU, folders, offline setting, extras.

    Each line says ok, warn or fail, and how to fix a problem. The exit code is 6 if a line says fail.

    Example: fedcache doctor
    """
    home = Home.from_environment()
    checks = [*packages(), machine(), device(), home_row(home), torch_cache(), offline(home)]
    checks += extras()
    # A missing extra is a warning, which does not make the command fail.
    bad = [c for c in checks if c["status"] == "fail"]
    rows = [(c["name"], c["status"], c["found"], c["hint"]) for c in checks]
    shown = TextTable("", ("what", "status", "found", "what to do"), rows)
    lines = [f"Problems found: {len(bad)}."]
    data = {"entries": checks, "problems": len(bad)}
    code = Exit.OK
    if bad:
        code = Exit.ENVIRONMENT
    return CommandResult(data, lines, code, [shown], listing=True)


@command("config")
def config(observer: TerminalObserver, config: ConfigFile = None) -> CommandResult:
    """Print every setting in the form of fedcache.toml, with the values that are in effect.

    Settings without a value are commented out and explained; with --json they are null.

    Example: fedcache config > fedcache.toml
    """
    sections = read_file(config)
    home = Home.from_environment()
    shown = {}
    lines = []
    for name, kind in SECTIONS.items():
        # The defaults, overridden by the values of the file; {} are the options of the command line, which are none.
        made: Any = resolve(kind, sections.get(name, {}), {})
        # With --json, settings without a value are null; as TOML they would be left out.
        empty = dict.fromkeys(item.name for item in fields(made))
        shown[name] = {**empty, **to_table(made)}
        lines += [*to_toml(name, made), ""]
    observer.note(f"FEDCACHE_HOME is {home.root}.")
    return CommandResult({"home": str(home.root), "offline": home.offline, **shown}, lines[:-1])


SHAPES: Mapping[Any, str] = {int | None: "NUMBER", str | None: '"TEXT"'}
"""Type of a setting -> a placeholder for its value in TOML."""


def to_toml(section: str, config: Any) -> list[str]:
    """A configuration as lines of TOML; a setting without a value is commented out, with its meaning."""
    import tomli_w

    # Values come first; settings without a value follow as comments, and tables last, as TOML requires.
    values = to_table(config)
    plain = {k: v for k, v in values.items() if not isinstance(v, dict)}
    lines = tomli_w.dumps({section: plain}).rstrip().splitlines() or [f"[{section}]"]
    tables = []
    hints = typing.get_type_hints(type(config))
    for item in fields(config):
        if item.name in values:
            if item.name not in plain:
                table = tomli_w.dumps({section: {item.name: values[item.name]}})
                tables += ["", *table.rstrip().splitlines()]
            continue
        info: OptionInfo = item.metadata["option"]
        meaning = info.meaning
        if info.default:
            meaning += f" Default: {info.default}."
        hint = hints[item.name]
        if typing.get_origin(hint) is Mapping:
            tables += ["", f"# [{section}.{item.name}]  # {meaning}"]
        else:
            shape = SHAPES.get(hint, '["TEXT", "TEXT"]')
            lines.append(f"# {item.name} = {shape}  # {meaning}")
    return [*lines, *tables]


def check(name: str, status: str, found: str, hint: str = "") -> Row:
    """A row of the table; the status is ``ok``, ``warn`` or ``fail`` (something will not work)."""
    return {"name": name, "status": status, "found": found, "hint": hint}


def requirements() -> dict[str, dict[str, str]]:
    """Extra ("" for the core) -> package -> minimum version, from the metadata of the installed fedcache."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    if installed("fedcache") is None:
        return found  # fedcache runs from a folder of its sources
    for line in requires("fedcache") or ():
        match = REQUIREMENT.match(line)
        if match:
            extra = match[3] or ""
            found[extra][match[1]] = match[2]
    return found


def installed(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages() -> list[Row]:
    """Python, and the packages that fedcache requires."""
    rows = [check("Python", "ok", sys.version.split()[0])]
    rows += [package(name, least) for name, least in requirements()[""].items()]
    return rows


def package(name: str, least: str) -> Row:
    """The row of a package. ``least`` is the oldest version that fedcache accepts."""
    found = installed(name)
    if found is not None and _numbers(found) >= _numbers(least):
        return check(name, "ok", found)
    message = "not installed"
    if found:
        message = f"{found}, needs {least}"
    requirement = shell_word(f"{name}>={least}")
    return check(name, "fail", message, f"pip install -U {requirement}")


def _numbers(version: str) -> list[int]:
    """The first three numbers of a version, for comparisons; ``2.10rc1`` is 2, 10, 1."""
    public = version.split("+")[0]
    return [int(number) for number in re.findall(r"\d+", public)[:3]]


def extras() -> list[Row]:
    """Optional extras; a missing one is a warning."""
    rows = []
    for extra, needed in requirements().items():
        # Users do not need the extras of developers.
        if not extra or extra in OF_DEVELOPERS:
            continue
        missing = [name for name in needed if installed(name) is None]
        if missing:
            found = f"without {', '.join(missing)}"
            requirement = shell_word(f"fedcache[{extra}]")
            rows.append(check(f"extra {extra}", "warn", found, f"pip install {requirement}"))
        else:
            rows.append(check(f"extra {extra}", "ok", ", ".join(needed)))
    return rows


def machine() -> Row:
    """Cores that this process may use, and the memory of the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return check("machine", "ok", f"{cores()} cores, {memory / 1e9:,.1f} GB memory")


def device() -> Row:
    """The device of ``--device auto``, with the reason. A broken torch does not end the other checks."""
    try:
        import torchvision  # noqa: F401  fails if it was built for another torch

        found = resolve_device("auto")
    except Exception as error:
        hint = "pip install --force-reinstall torch torchvision"
        return check("device", "fail", str(error).partition("\n")[0], hint)
    name = f"{found.kind} ({found.name})"
    message = f"{name}: {found.why}"
    if found.kind == "cpu" and shutil.which("nvidia-smi"):
        hint = "This machine may have an NVIDIA GPU: install torch with CUDA from pytorch.org."
        return check("device", "warn", message, hint)
    return check("device", "ok", message)


def _existing(folder: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def home_row(home: Home) -> Row:
    """The home directory: whether it is writable, and its free space."""
    folder = _existing(home.root)
    free = shutil.disk_usage(folder).free
    found = f"{home.root}, {free / 1e9:,.1f} GB free"
    if not os.access(folder, os.W_OK):
        return check(
            "FEDCACHE_HOME", "fail", f"{found}, not writable", "export FEDCACHE_HOME=~/fedcache"
        )
    if free < ROOM:
        hint = "fedcache gc   lists files that can be deleted; or export FEDCACHE_HOME to a larger disk"
        return check("FEDCACHE_HOME", "fail", found, hint)
    return check("FEDCACHE_HOME", "ok", found)


def torch_cache() -> Row:
    """The folder in which torch keeps downloaded weights."""
    cache = library_caches().torch
    if os.access(_existing(cache), os.W_OK):
        return check("torch cache", "ok", str(cache))
    return check("torch cache", "warn", f"{cache}, not writable", "export TORCH_HOME=~/torch")


def offline(home: Home) -> Row:
    """Whether fedcache may download."""
    if home.offline:
        return check("offline", "ok", "yes: downloads are disabled", "unset FEDCACHE_OFFLINE")
    return check("offline", "ok", "no: commands may download requested files")
