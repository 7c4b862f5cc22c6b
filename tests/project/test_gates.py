"""Gates on the sources: what no module may do, whoever wrote it."""

import ast
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fedcache"
PLAIN = PACKAGE / "tables" / "plain_pickle.py"


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute, else what is known of its end."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_plain_pickles_are_read_by_an_unpickler_that_looks_nothing_up():
    tree = ast.parse(PLAIN.read_text())
    used = {
        dotted(n)
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and dotted(n).startswith("pickle.")
    }
    assert used == {"pickle.Unpickler", "pickle.UnpicklingError"}
    (only,) = (
        n
        for n in tree.body
        if isinstance(n, ast.ClassDef) and "pickle.Unpickler" in map(dotted, n.bases)
    )
    assert [n.name for n in only.body if isinstance(n, ast.FunctionDef)] == ["find_class"]
    assert "super()" not in ast.unparse(only)
    calls = [dotted(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert "pickle.Unpickler" not in calls
    assert not {"getattr", "globals", "vars"} & set(calls)


def test_no_module_is_named_for_nothing():
    assert [
        p
        for p in PACKAGE.rglob("*.py")
        if p.name in ("utils.py", "base.py", "helpers.py", "common.py")
    ] == []


@pytest.mark.slow
def test_what_recognises_a_finished_extraction_imports_no_torch():
    modules = ("", ".cli", ".api", ".extract.backbones", ".store", ".config")
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module('fedcache' + module)\n"
        "    for heavy in ('torch', 'timm', 'open_clip', 'torchvision', 'huggingface_hub', 'sklearn'):\n"
        "        assert heavy not in sys.modules, (module, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_test_reaches_another_machine(no_network):
    with socket.socket() as line, pytest.raises(OSError, match="unreachable"):
        line.connect(("192.0.2.1", 80))
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("example.invalid", 80)
    assert len(no_network) == 2
    no_network.clear()
