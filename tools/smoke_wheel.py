"""Install the wheel alone into a fresh environment and run the main job there, outside of this repository.

    python tools/smoke_wheel.py                                  # dist/*.whl, this Python, packages from the registry
    python tools/smoke_wheel.py --python python3.12 --python python3.13
    python tools/smoke_wheel.py --borrow --methods fed3r,fedavg --rounds 3    # no download: seconds, for every change

``--borrow`` takes packages from the environment that runs this: those alone that ``fedcache[demo]`` requires, and what
these require, linked one by one. So a package that the wheel needs and does not name is missing there as well. Either
way every file of the wheel is compared with the sum that the wheel has of it, and every module of fedcache that was
loaded must come from the new environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
EXTRA = "demo"
SDIST = (
    "tests/conftest.py",
    "tests/project/test_release.py",
    "tests/golden.json",
    "tools/smoke_wheel.py",
    "benchmarks",
    "docs/index.md",
    "examples",
    "mkdocs.yml",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Dockerfile",
    ".dockerignore",
    ".pre-commit-config.yaml",
    ".ci/run",
    ".github/workflows/test.yml",
    "uv.lock",
    "pyproject.toml",
)
"""What the sdist holds in addition to the package: the tests pass in it."""

PROVE = """
import base64, hashlib, sys
from importlib import metadata
from pathlib import Path

files = [f for f in metadata.files("fedcache") if f.hash is not None]
for file in files:
    found = base64.urlsafe_b64encode(hashlib.sha256(file.locate().read_bytes()).digest()).rstrip(b"=").decode()
    assert found == file.hash.value, f"{file} is not the wheel's"
from fedcache.cli import main
try:
    main(sys.argv[1:])
finally:
    loaded = [m.__file__ for n, m in list(sys.modules.items()) if n.split(".")[0] == "fedcache" and m.__file__]
    strangers = [f for f in loaded if not Path(f).is_relative_to(sys.prefix)]
    assert loaded and not strangers, strangers
    print(f"{len(files)} files are the wheel's, and all {len(loaded)} modules that were loaded are among them.")
"""


def contents_missing(wheel: Path, sdist: Path, root: Path = ROOT) -> list[str]:
    """What the wheel and the sdist lack of the repository: all files of the package, and all that the tests read."""
    package = [
        p for p in (root / "fedcache").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    ]
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    missing = [f"wheel: {n}" for p in package if (n := p.relative_to(root).as_posix()) not in held]
    if not any(name.endswith("licenses/LICENSE") for name in held):
        missing.append("wheel: LICENSE")
    missing += [
        f"wheel: {name} does not belong there" for name in held if not name.startswith("fedcache")
    ]
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [*(p.relative_to(root).as_posix() for p in package), *SDIST]
    missing += [
        f"sdist: {name}"
        for name in wanted
        if not any(n == name or n.startswith(f"{name}/") for n in there)
    ]
    return sorted(missing)


def needed(requirements: Sequence[str], extras: Sequence[str]) -> set[str]:
    """The names of installed packages that requirements lead to, extras and markers minded."""
    found = set()
    seen = set()
    todo = [(Requirement(line), extra) for line in requirements for extra in ("", *extras)]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.add(name)
        for inner in ("", *requirement.extras):
            if (name, inner) not in seen and name != "fedcache":
                seen.add((name, inner))
                todo += [(Requirement(line), inner) for line in metadata.requires(name) or ()]
    return found - {"fedcache"}


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel requires, as it stands in its METADATA."""
    (found,) = metadata.distributions(path=[str(wheel)])
    return found.requires or []


def link(names: set[str], site: Path) -> None:
    """Put packages of this environment into another one's folder, as links."""
    for name in sorted(names):
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            source = Path(str(metadata.distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)


def run(
    words: Sequence[object],
    *,
    quiet: bool = False,
    folder: Path | None = None,
    home: Path | None = None,
) -> str:
    """The output of a program that must succeed; this repository and this environment are not on its path."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHON", "VIRTUAL_ENV", "FEDCACHE_"))
    }
    clean |= {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "2"}
    if home:
        clean["FEDCACHE_HOME"] = str(home)
    done = subprocess.run(
        [str(w) for w in words], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(map(str, words))[:200]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    if not quiet:
        print(done.stdout.rstrip())
    return done.stdout


def install(wheel: Path, python: Path, *, borrow: bool) -> None:
    """The wheel into an environment: with packages of this one, or with those of the registry."""
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    if borrow:
        site = Path(
            run(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], quiet=True
            ).strip()
        )
        link(needed(requirements_of(wheel), [EXTRA]), site)
        run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], quiet=True)
    elif uv.exists():
        run([uv, "pip", "install", "--quiet", "--python", python, f"{wheel}[{EXTRA}]"], quiet=True)
    else:
        run([*pip, "install", "--quiet", f"{wheel}[{EXTRA}]"], quiet=True)
    run([*pip, "check"])


def smoke(wheel: Path, interpreter: str, demo: Sequence[str], *, borrow: bool) -> None:
    """One Python: install, ``--version``, ``doctor``, ``demo``."""
    with tempfile.TemporaryDirectory(prefix="fedcache-smoke-") as name:
        folder = Path(name)
        began = time.monotonic()
        environment = folder / "venv"
        outside = folder / "outside"
        home = folder / "home"
        outside.mkdir()
        run([interpreter, "-m", "venv", "--without-pip", environment], quiet=True)
        python = environment / "bin" / "python"
        command = environment / "bin" / "fedcache"
        install(wheel, python, borrow=borrow)
        installed = time.monotonic()
        version = run([command, "--version"], folder=outside, home=home, quiet=True).strip()
        if wheel.name.split("-")[1] != version:
            raise SystemExit(f"{wheel.name} says that it is {version}")
        looked = json.loads(
            run([command, "doctor", "--json"], folder=outside, home=home, quiet=True)
        )
        if looked["data"]["problems"]:
            raise SystemExit(
                json.dumps(
                    [e for e in looked["data"]["entries"] if e["status"] == "fail"], indent=1
                )
            )
        proof = folder / "prove.py"
        proof.write_text(PROVE, encoding="utf-8")
        run([python, proof, "demo", *demo], folder=outside, home=home)
        print(
            f"-- fedcache {version} on Python {run([python, '-V'], quiet=True).split()[1]}: installed in "
            f"{installed - began:.0f} s, doctor and demo in {time.monotonic() - installed:.0f} s"
        )


def runs(interpreter: str) -> bool:
    """Whether it is there: a version manager leaves names of versions on the path that are not installed."""
    try:
        return subprocess.run([interpreter, "-V"], capture_output=True).returncode == 0
    except OSError:
        return False


def built(ending: str) -> Path:
    """The one archive of fedcache in dist/ with this ending; SystemExit where there are others or none."""
    found = list(DIST.glob(f"fedcache-{ending}"))
    if len(found) != 1:
        raise SystemExit(
            f"{DIST} holds {len(found)} of fedcache-{ending}, expected one: make wheels"
        )
    return found[0]


def main() -> None:
    """Smoke-test the wheel of dist/ on every interpreter that is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", action="append", default=[], help="interpreter; passed over if not there"
    )
    parser.add_argument(
        "--borrow", action="store_true", help="packages from the environment that runs this"
    )
    parser.add_argument("--methods", help="of fedcache demo")
    parser.add_argument("--rounds", help="of fedcache demo")
    options = parser.parse_args()
    wheel = built("*.whl")
    if missing := contents_missing(wheel, built("*.tar.gz")):
        raise SystemExit("\n".join(missing))
    demo = []
    if options.methods:
        demo += ["--methods", options.methods]
    if options.rounds:
        demo += ["--rounds", options.rounds]
    wanted = options.python or [sys.executable]
    there = [name for name in wanted if runs(name)]
    print(
        f"not found here, and not tried: {', '.join(n for n in wanted if n not in there) or 'none'}"
    )
    if not there:
        raise SystemExit("No interpreter was found.")
    for name in there:
        smoke(wheel, name, demo, borrow=options.borrow)


if __name__ == "__main__":
    main()
