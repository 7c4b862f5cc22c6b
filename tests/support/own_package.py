"""A package that ``fedcache new`` wrote, laid beside the others as pip would lay it."""

import os
import shutil
import subprocess
import sys
import tomllib

from loaded_files import ROOT


def lay(folder, site):
    """Copy the package of ``folder`` into ``site`` with the metadata that pip derives from its pyproject.toml."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    package = project["name"].replace("-", "_")
    site.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder / package, site / package)
    facts = site / f"{package}-{project['version']}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


def python(*words, path):
    """``python WORDS`` in a process of its own, which imports from ``path`` and from here."""
    found = os.pathsep.join([str(path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"},
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
