"""A Flower app in a directory: a configuration, and two lines of Python that are the same for every method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedcache.errors import UsageError
from fedcache.federate.engines.flower.plan import Plan
from fedcache.store.files import write_atomic

PACKAGE = "fedcache_app"
NEEDS = "flwr>=1.41,<1.42"
VERSION = "1.0.0"
MARK = "Written by fedcache flower app"

README = """# {name}

{mark}: {method} over {sites} sites.

    fedcache flower run {folder} --superlink HOST:PORT --keys KEYS

`[tool.flwr.app.config]` of pyproject.toml is what it does; the Python in it is the same for every method.
"""


@dataclass(frozen=True)
class App:
    """An app on disk.

    Attributes:
        path: its directory.
        plan: what it does.
    """

    path: Path
    plan: Plan


def write_app(plan: Plan, path: Path) -> App:
    """Write the app of a plan; one that fedcache wrote there before is written over.

    Raises:
        UsageError, when another thing lies there.
    """
    path = path.expanduser().resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not _ours(path):
        raise UsageError(
            f"{path} exists and is no app of fedcache.", "Choose another place: fedcache flower app --out DIR"
        )
    name = f"fedcache-{plan.train.method}"[:32]
    table = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name, "version": VERSION, "description": f"{MARK}: {plan.train.method}", "license": "Apache-2.0",
            "dependencies": [NEEDS],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": [PACKAGE]}}}},
            "flwr": {
                "app": {
                    "publisher": "fedcache",
                    "components": {"serverapp": f"{PACKAGE}.server:app", "clientapp": f"{PACKAGE}.client:app"},
                    "config": plan.to_config(),
                }
            },
        },
    }  # fmt: skip
    files = {
        "pyproject.toml": tomli_w.dumps(table),
        "README.md": README.format(name=name, mark=MARK, method=plan.train.method, sites=plan.sites, folder=path.name),
        f"{PACKAGE}/__init__.py": f'"""{MARK}."""\n',
        f"{PACKAGE}/client.py": 'from fedcache.federate.engines.flower.client_app import app\n\n__all__ = ["app"]\n',
        f"{PACKAGE}/server.py": 'from fedcache.federate.engines.flower.server_app import app\n\n__all__ = ["app"]\n',
    }
    (path / PACKAGE).mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        write_atomic(path / file, content.encode())
    return App(path, plan)


def read_app(path: Path) -> App:
    """The app of a directory.

    Raises:
        UsageError, when there is none.
    """
    import tomllib

    file = path / "pyproject.toml"
    try:
        table = tomllib.loads(file.read_text())
        config = table["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} holds no Flower app.", f"Write one: fedcache flower app --method fed3r --out {path}"
        ) from error
    return App(path.resolve(), Plan.from_config(config))


def _ours(path: Path) -> bool:
    try:
        return MARK in (path / "pyproject.toml").read_text()
    except OSError:
        return False
