"""``fedcache doctor`` and ``fedcache config``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fedcache.commands.doctor_checks import examine
from fedcache.commands.options import ConfigFile, Json
from fedcache.commands.output import CommandResult, TerminalObserver, run_command, table
from fedcache.config import SECTIONS, Home, read_file, resolve, to_table, to_toml
from fedcache.errors import Exit


def doctor(json: Json = False) -> None:
    """Check this installation: versions, torch and torchvision, device, CUDA, extras, weights, home, locks.

    Each line is ok, warn (works, but look) or fail, with the command that mends it; a fail is exit 6.

    Example: fedcache doctor
    """

    def call(observer: TerminalObserver) -> CommandResult:
        home = Home.from_environment()
        checks = examine(home)
        bad = [c for c in checks if c["status"] == "fail"]
        rows = [(c["name"], c["status"], c["found"], c["hint"]) for c in checks]
        lines = [f"{len(bad)} problem{'s' if len(bad) != 1 else ''} found." if bad else "No problem found."]
        shown = table("", ("what", "status", "found", "what to do"), rows)
        return CommandResult(
            {"entries": checks, "problems": len(bad)}, lines, Exit.ENVIRONMENT if bad else Exit.OK, [shown]
        )

    run_command("doctor", json, call)


def config(config: ConfigFile = None, json: Json = False) -> None:
    """Print every setting as fedcache.toml would hold it, merged with the file that is in force.

    What has no value yet is commented out, with its meaning; with --json it is null.

    Example: fedcache config > fedcache.toml
    """

    def call(observer: TerminalObserver) -> CommandResult:
        sections = read_file(config)
        merged: dict[str, Any] = {name: resolve(kind, sections.get(name, {}), {}) for name, kind in SECTIONS.items()}
        home = Home.from_environment()
        shown = {
            name: {**dict.fromkeys(f.name for f in fields(made)), **to_table(made)} for name, made in merged.items()
        }
        lines = [line for name, made in merged.items() for line in (*to_toml(name, made), "")]
        observer.note(f"FEDCACHE_HOME is {home.root}.")
        return CommandResult({"home": str(home.root), "offline": home.offline, **shown}, lines[:-1])

    run_command("config", json, call)
