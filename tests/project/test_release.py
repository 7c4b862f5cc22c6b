"""What a release is made of agrees: version, changelog, citation, lock file, workflows, container, archives."""

import re
import shutil
import tomllib

import pytest
import yaml
from loaded_files import ROOT, content, tool
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GITHUB = ROOT / ".github"
PUBLIC = {"pypi.org", "files.pythonhosted.org"}
NAMED = (
    "pyproject.toml",
    "CITATION.cff",
    "CHANGELOG.md",
    "uv.lock",
    "mkdocs.yml",
    "fedcache/__init__.py",
)


RELEASE = tool("release")


def parsed(path):
    return yaml.safe_load(content(path))


@pytest.fixture
def copy(tmp_path):
    """The files that have a version or an address."""
    for name in NAMED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


# version and address


def test_every_file_has_the_same_version_and_the_changelog_agrees():
    assert RELEASE.disagreements() == []


def test_a_release_is_named_and_dated_everywhere_and_the_next_one_opens(copy):
    if not RELEASE.versions(copy)["pyproject.toml"].endswith(".dev0"):
        RELEASE.set_version("8.0.0.dev0", "2026-12-24", copy)
    RELEASE.set_version("9.1.0", "2026-12-24", copy)
    assert RELEASE.disagreements(copy) == []
    assert set(RELEASE.versions(copy).values()) == {"9.1.0"}
    assert "\n## 9.1.0 - 2026-12-24\n" in content(copy / "CHANGELOG.md")
    assert parsed(copy / "CITATION.cff")["date-released"].isoformat() == "2026-12-24"
    RELEASE.set_version("9.2.0.dev0", "2026-12-25", copy)
    assert RELEASE.disagreements(copy) == []
    assert re.findall(r"^## (.+)$", content(copy / "CHANGELOG.md"), re.MULTILINE)[:2] == [
        "Unreleased",
        "9.1.0 - 2026-12-24",
    ]


def test_a_release_collects_the_notes_of_changes(copy):
    (copy / "changes").mkdir()
    (copy / "changes/zebra.fixed.md").write_text("- The second fix.\n")
    (copy / "changes/ant.fixed.md").write_text("- The first fix.\n")
    (copy / "changes/new.added.md").write_text("- A feature.\n")
    RELEASE.set_version("8.0.0.dev0", "2026-12-24", copy)
    RELEASE.set_version("9.1.0", "2026-12-24", copy)
    assert (
        "\n## 9.1.0 - 2026-12-24\n\n### Added\n- A feature.\n\n### Fixed\n- The first fix.\n- The second fix.\n"
    ) in content(copy / "CHANGELOG.md")
    assert list((copy / "changes").iterdir()) == []


def test_a_file_that_was_forgotten_is_named(copy):
    RELEASE.replace("CITATION.cff", r"^version: .+$", "version: 0.0.1", copy)
    version = RELEASE.versions(copy)["pyproject.toml"]
    assert RELEASE.disagreements(copy) == [f"CITATION.cff says 0.0.1, pyproject.toml {version}"]


# the lock file


def test_the_lock_file_is_of_this_pyproject_and_names_public_registries_alone():
    locked = tomllib.loads(content("uv.lock"))
    project = tomllib.loads(content("pyproject.toml"))["project"]
    ours = next(p for p in locked["package"] if p["name"] == "fedcache")
    declared = [("", line) for line in project["dependencies"]]
    declared += [
        (extra, line) for extra, lines in project["optional-dependencies"].items() for line in lines
    ]
    wanted = {(extra, *requirement(line)) for extra, line in declared}
    held = set()
    for entry in ours["metadata"]["requires-dist"]:
        extra = re.search(r"extra == '(.+?)'", entry.get("marker", ""))
        held.add(
            (extra[1] if extra else "", *requirement(entry["name"] + entry.get("specifier", "")))
        )
    assert {w for w in wanted ^ held if w[1] != "fedcache"} == set(), "make lock"
    assert set(re.findall(r"https?://([^/\"]+)", content("uv.lock"))) == PUBLIC
    files = [
        f
        for p in locked["package"]
        for f in [*p.get("wheels", []), *([p["sdist"]] if "sdist" in p else [])]
    ]
    assert len(files) > 1000
    assert all(f["hash"].startswith("sha256:") for f in files)


# files that other programs read


def targets():
    return set(re.findall(r"^([a-z][a-z-]*):", content("Makefile"), re.MULTILINE))


def steps():
    for path in sorted((GITHUB / "workflows").glob("*.yml")):
        for job in parsed(path)["jobs"].values():
            for step in job["steps"]:
                yield path.name, job, step


def made(job, line):
    """The targets of a line ``make ...``, those of a matrix written out."""
    words = re.sub(
        r"\$\{\{ matrix\.(\w+) \}\}", lambda m: " ".join(job["strategy"]["matrix"][m[1]]), line
    ).split()[1:]
    return [word for word in words if "=" not in word]


def test_workflows_call_targets_of_the_makefile():
    called = {}
    for name, job, step in steps():
        for line in step.get("run", "").splitlines():
            assert line.startswith("make ") or name == "wheels.yml", line
            if line.startswith("make "):
                called.setdefault(name, set()).update(made(job, line))
    assert set(called) == {"test.yml", "docs.yml", "wheels.yml", "nightly.yml"}
    assert {n: sorted(found - targets()) for n, found in called.items() if found - targets()} == {}
    assert {"test", "long", "browser"} <= called["test.yml"]
    assert {"smoke-wheel", "sbom"} <= called["wheels.yml"]
    assert set(re.findall(r"^make ([a-z-]+)", content(".ci/run"), re.MULTILINE)) <= targets()


def test_workflows_may_do_no_more_than_they_need():
    for path in (GITHUB / "workflows").glob("*.yml"):
        assert parsed(path)["permissions"] == {"contents": "read"}, path.name
        assert all("timeout-minutes" in job for job in parsed(path)["jobs"].values()), path.name
    for name, _, step in steps():
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), (
                name,
                step["uses"],
            )


def test_the_container_copies_what_is_there_and_runs_without_root():
    text = content("Dockerfile")
    project = tomllib.loads(content("pyproject.toml"))["project"]
    copied = [
        w
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for w in line.split()[:-1]
    ]
    assert set(copied) == {n[1:] for n in content(".dockerignore").split() if n.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    extras = re.search(r"^ARG EXTRAS=(.+)$", text, re.MULTILINE)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["1000"]


# archives


def requirement(line):
    """Normalised name and sorted versions of ``Name[extra]>=1,<2``."""
    found = Requirement(line)
    return canonicalize_name(found.name), str(found.specifier)


def test_notes_of_changes_are_list_items_for_the_changelog():
    for note in (ROOT / "changes").glob("[!R]*"):
        assert note.name.split(".")[-2] in RELEASE.KINDS, note.name
        lines = content(note).splitlines()
        assert lines[0].startswith("- "), f"{note.name} begins with no list item"
        assert all(line.startswith(("- ", "  ")) for line in lines if line), note.name
