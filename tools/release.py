"""The version and the address of the project, in every file that has them.

    python tools/release.py check                              # what is missing for a release; exit 1 if anything is
    python tools/release.py set 0.2.0 --date 2026-11-24        # Unreleased becomes the section of that version,
                                                               # with the notes of changes/
    python tools/release.py set 0.3.0.dev0                     # opens the next Unreleased
    python tools/release.py address https://HOST/OWNER/NAME    # project URLs, citation and documentation

A version that ends with .dev0 is under way, and the changelog begins with Unreleased; every other is the newest section
of the changelog, with its date. ``tests/project/test_release.py`` holds this at every change.
"""

from __future__ import annotations

import argparse
import datetime
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(\.dev0)?")


def read(name: str, root: Path) -> str:
    """A file of the repository."""
    return (root / name).read_text(encoding="utf-8")


def replace(name: str, pattern: str, new: str, root: Path) -> None:
    """Replace one line of a file; SystemExit where there is not exactly one of it."""
    text, found = re.subn(pattern, lambda _: new, read(name, root), flags=re.MULTILINE)
    if found != 1:
        raise SystemExit(f"{name} has {found} lines like {pattern}, expected one")
    (root / name).write_text(text, encoding="utf-8")


def versions(root: Path = ROOT) -> dict[str, str]:
    """The version as each file has it; "" where it has none."""

    def one(name: str, pattern: str) -> str:
        found = re.search(pattern, read(name, root), re.MULTILINE)
        if found:
            return found[1]
        return ""

    return {
        "pyproject.toml": tomllib.loads(read("pyproject.toml", root))["project"]["version"],
        "fedcache/__init__.py": one("fedcache/__init__.py", r'^__version__ = "(.+)"$'),
        "CITATION.cff": one("CITATION.cff", r"^version: (.+)$"),
        "uv.lock": one("uv.lock", r'^name = "fedcache"\nversion = "(.+)"$'),
    }


def disagreements(root: Path = ROOT) -> list[str]:
    """Sentences on files that do not agree; true of a version under way too."""
    found = versions(root)
    version = found["pyproject.toml"]
    wrong = [
        f"{name} says {other or 'no version'}, pyproject.toml {version}"
        for name, other in found.items()
        if other != version
    ]
    section = re.search(r"^## (.+)$", read("CHANGELOG.md", root), re.MULTILINE)
    first = section[1] if section else "nothing"
    dated = re.fullmatch(rf"{re.escape(version)} - (\d{{4}}-\d\d-\d\d)", first)
    if version.endswith(".dev0") != (first == "Unreleased") or (
        first != "Unreleased" and dated is None
    ):
        wrong.append(f"CHANGELOG.md begins with {first!r}, the version is {version}")
    released = re.search(r"^date-released: (.+)$", read("CITATION.cff", root), re.MULTILINE)
    if (released[1] if released else None) != (dated[1] if dated else None):
        wrong.append("CITATION.cff and CHANGELOG.md have different dates")
    return wrong


def missing(root: Path = ROOT) -> list[str]:
    """Sentences on what a release still needs."""
    project = tomllib.loads(read("pyproject.toml", root))["project"]
    wrong = disagreements(root)
    if project["version"].endswith(".dev0"):
        wrong.append(
            f"{project['version']} is under way: python tools/release.py set {project['version'][:-5]}"
        )
    if "urls" not in project:
        wrong.append(
            "no address of the repository is known: python tools/release.py address https://HOST/OWNER/NAME"
        )
    return wrong


KINDS = ("added", "changed", "fixed", "removed")


def collect_notes(root: Path) -> str:
    """Notes of ``changes/NAME.KIND.md`` as a changelog section; the files are deleted."""
    found = []
    for kind in KINDS:
        notes = sorted((root / "changes").glob(f"*.{kind}.md"))
        if not notes:
            continue
        found.append(f"### {kind.capitalize()}\n")
        for note in notes:
            found.append(note.read_text(encoding="utf-8").strip() + "\n")
            note.unlink()
        found.append("\n")
    return "".join(found)


def set_version(version: str, date: str, root: Path = ROOT) -> None:
    """Write a version into every file that has it. SystemExit for what is no version or no day."""
    if not VERSION.fullmatch(version):
        raise SystemExit(f"{version!r} is no version like 0.2.0 or 0.3.0.dev0")
    datetime.date.fromisoformat(date)
    old = versions(root)["uv.lock"]
    replace("pyproject.toml", r'^version = ".+"$', f'version = "{version}"', root)
    replace("fedcache/__init__.py", r'^__version__ = ".+"$', f'__version__ = "{version}"', root)
    replace(
        "uv.lock",
        rf'^name = "fedcache"\nversion = "{re.escape(old)}"$',
        f'name = "fedcache"\nversion = "{version}"',
        root,
    )
    under_way = version.endswith(".dev0")
    dated = "" if under_way else f"\ndate-released: {date}"
    replace(
        "CITATION.cff", r"^version: .+$(\ndate-released: .+$)?", f"version: {version}{dated}", root
    )
    if not under_way:
        notes = collect_notes(root)
        heading = f"## {version} - {date}"
        if notes:
            heading = f"{heading}\n\n{notes.rstrip()}"
        replace("CHANGELOG.md", r"^## Unreleased$", heading, root)
    elif "\n## Unreleased\n" not in read("CHANGELOG.md", root):
        text = read("CHANGELOG.md", root)
        (root / "CHANGELOG.md").write_text(
            text.replace("\n## ", "\n## Unreleased\n\n## ", 1), encoding="utf-8"
        )


def set_address(address: str, root: Path = ROOT) -> None:
    """Write the address of the repository into every file that names it; the old one goes."""
    if not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", address):
        raise SystemExit(f"{address!r} is no address like https://HOST/OWNER/NAME")
    places = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    table = "\n".join(
        ["[project.urls]", *(f'{name} = "{address}{end}"' for name, end in places.items())]
    )
    text = re.sub(r"\[project\.urls\]\n(?:\w+ = .*\n)+\n", "", read("pyproject.toml", root))
    (root / "pyproject.toml").write_text(
        text.replace("[project.scripts]\n", f"{table}\n\n[project.scripts]\n"), encoding="utf-8"
    )
    for name, key, after in (
        ("CITATION.cff", "repository-code", "license: "),
        ("mkdocs.yml", "repo_url", "docs_dir: "),
    ):
        text = re.sub(rf"^{key}: .*\n", "", read(name, root), flags=re.MULTILINE)
        (root / name).write_text(
            text.replace(f"\n{after}", f"\n{key}: {address}\n{after}", 1), encoding="utf-8"
        )


def main() -> None:
    """Check, set the version, or set the address."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="what is missing for a release")
    setting = commands.add_parser("set", help="write a version")
    setting.add_argument("version")
    setting.add_argument("--date", default=datetime.date.today().isoformat(), help="of the release")
    commands.add_parser("address", help="write the address of the repository").add_argument(
        "address"
    )
    options = parser.parse_args()
    if options.command == "set":
        set_version(options.version, options.date)
    elif options.command == "address":
        set_address(options.address)
    elif wrong := missing():
        raise SystemExit("\n".join(wrong))
    else:
        print(f"{versions()['pyproject.toml']} can be released.")


if __name__ == "__main__":
    main()
