"""``fedcache doctor`` and ``fedcache config``."""

from __future__ import annotations

from typing import Any

from fedcache.commands import options as o
from fedcache.commands.output import Answer, Story, answer, table
from fedcache.config import SECTIONS, read_file, resolve, to_table
from fedcache.errors import Exit


def doctor(json: o.Json = False) -> None:
    """Check this installation: versions, torch and torchvision, device, home, weights, optional extras.

    Example: fedcache doctor
    """

    def call(story: Story) -> Answer:
        from fedcache.commands.checks import examine

        home = o.home()
        checks = examine(home)
        bad = [c for c in checks if c["status"] == "problem"]
        rows = [(c["name"], c["status"], c["found"], c["hint"]) for c in checks]
        lines = [f"{len(bad)} problem{'s' if len(bad) != 1 else ''} found." if bad else "No problem found."]
        shown = table("", ("what", "status", "found", "what to do"), rows)
        return Answer({"entries": checks, "problems": len(bad)}, lines, Exit.ENVIRONMENT if bad else Exit.OK, [shown])

    answer("doctor", json, call)


def config(config: o.ConfigFile = None, json: o.Json = False) -> None:
    """Print every setting as fedcache.toml would hold it, merged with the file that is in force.

    Example: fedcache config > fedcache.toml
    """

    def call(story: Story) -> Answer:
        import tomli_w

        sections = read_file(config)
        shown: dict[str, Any] = {
            name: to_table(resolve(kind, sections.get(name, {}), {})) for name, kind in SECTIONS.items()
        }
        home = o.home()
        data = {"home": str(home.root), "offline": home.offline, **shown}
        story.note(f"FEDCACHE_HOME is {home.root}.")
        return Answer(data, tomli_w.dumps(shown).rstrip().splitlines())

    answer("config", json, call)
