"""``fedcache doctor`` and ``fedcache config``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import typer

from fedcache.commands import options as o
from fedcache.commands.doctor_checks import examine
from fedcache.commands.output import Answer, Story, answer, table
from fedcache.config import SECTIONS, read_file, resolve, to_table, to_toml
from fedcache.errors import Exit


def doctor(json: o.Json = False) -> None:
    """Check this installation: versions, torch and torchvision, device, CUDA, extras, weights, home, locks.

    Each line is ok, warn (works, but look) or fail, with the command that mends it; a fail is exit 6.

    Example: fedcache doctor
    """

    def call(story: Story) -> Answer:
        home = o.home()
        checks = examine(home)
        bad = [c for c in checks if c["status"] == "fail"]
        rows = [(c["name"], c["status"], c["found"], c["hint"]) for c in checks]
        lines = [f"{len(bad)} problem{'s' if len(bad) != 1 else ''} found." if bad else "No problem found."]
        shown = table("", ("what", "status", "found", "what to do"), rows)
        return Answer({"entries": checks, "problems": len(bad)}, lines, Exit.ENVIRONMENT if bad else Exit.OK, [shown])

    answer("doctor", json, call)


def config(context: typer.Context, config: o.ConfigFile = None, json: o.Json = False) -> None:
    """Print every setting as fedcache.toml would hold it, merged with the file that is in force.

    What has no value yet is commented out, with its meaning; with --json it is null.

    Example: fedcache config > fedcache.toml
    """

    def call(story: Story) -> Answer:
        sections = read_file(config)
        merged: dict[str, Any] = {name: resolve(kind, sections.get(name, {}), {}) for name, kind in SECTIONS.items()}
        home = o.home()
        shown = {
            name: {**dict.fromkeys(f.name for f in fields(made)), **to_table(made)} for name, made in merged.items()
        }
        commands = context.find_root().command.load_all()  # type: ignore[attr-defined]
        lines: list[str] = []
        for name, made in merged.items():  # every section is a command, every key its long option
            meanings = {word: getattr(p, "help", "") for p in commands[name].params for word in p.opts}
            lines += [*to_toml(name, made, meanings), ""]
        story.note(f"FEDCACHE_HOME is {home.root}.")
        return Answer({"home": str(home.root), "offline": home.offline, **shown}, lines[:-1])

    answer("config", json, call)
