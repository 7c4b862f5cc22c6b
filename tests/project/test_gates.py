"""Gates on the sources: what no module may do, whoever wrote it."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fedcache"
AUDITED = PACKAGE / "extract" / "backbones" / "checkpoints.py"
WRITES = PACKAGE / "models" / "export" / "formats.py"
PLAIN = PACKAGE / "tables" / "plain_pickle.py"
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "__import__"}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute, else what is known of its end."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(source: str) -> list[str]:
    """What the gate refuses in a module, by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.partition(".")[0] in PICKLES or name in ("torch.load", "torch.jit.load", "numpy.load", "os.system"):
                found.append(f"{node.lineno}: imports {name}")  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {k.arg: k.value for k in node.keywords}
        value = {k: v.value for k, v in keywords.items() if isinstance(v, ast.Constant)}
        if name in CALLS or name.endswith(("torch.load", "jit.load", "os.system", "os.popen")):
            found.append(f"{node.lineno}: calls {name}")
        if name in ("np.load", "numpy.load", "np.memmap.load") and value.get("allow_pickle") is not False:
            found.append(f"{node.lineno}: {name} without allow_pickle=False")
        if name.endswith(("yaml.load", "yaml.unsafe_load", "read_pickle", ".extractall", "unpack_archive")):
            found.append(f"{node.lineno}: calls {name}")
        if "shell" in keywords and value.get("shell") is not False:
            found.append(f"{node.lineno}: {name} with shell")
        if value.get("weights_only") is False or value.get("allow_pickle") is True:
            found.append(f"{node.lineno}: {name} opens pickles")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x')",
        "np.load('x', allow_pickle=True)",
        "torch.jit.load('x')",
        "import yaml\nyaml.load('x')",
        "subprocess.run('ls', shell=True)",
        "archive.extractall('x')",
        "eval('1')",
        "exec('1')",
        "anything(weights_only=False)",
    ],
)
def test_the_gate_sees_what_it_is_for(source: str) -> None:
    assert faults(source)


def test_the_gate_lets_plain_reading_through() -> None:
    assert not faults("np.load('x', allow_pickle=False)\nsubprocess.run(['ls'])\nre.compile('x')\nmodel.eval()")


@pytest.mark.slow
def test_only_the_audited_modules_may_open_what_can_run_code() -> None:
    found = {
        str(path.relative_to(PACKAGE)): faults(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in (AUDITED, PLAIN, WRITES)
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_module_that_writes_an_estimator_reads_none() -> None:
    source = WRITES.read_text()
    assert [line.partition(": ")[2] for line in faults(source)] == ["imports joblib"]
    calls = [dotted(n.func) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    assert [name for name in calls if name.startswith("joblib.")] == ["joblib.dump"]


def test_the_audited_module_has_one_torch_load_and_it_reads_tensors_only() -> None:
    calls = [n for n in ast.walk(ast.parse(AUDITED.read_text())) if isinstance(n, ast.Call)]
    loads = [c for c in calls if dotted(c.func) == "torch.load"]
    assert len(loads) == 1
    assert ast.unparse(next(k.value for k in loads[0].keywords if k.arg == "weights_only")) == "True"
    arrays = [c for c in calls if dotted(c.func) == "np.load"]
    assert [ast.unparse(k.value) for c in arrays for k in c.keywords if k.arg == "allow_pickle"] == ["False"]


def test_plain_pickles_are_read_by_an_unpickler_that_looks_nothing_up() -> None:
    tree = ast.parse(PLAIN.read_text())
    assert faults(PLAIN.read_text()) == [f"{line}: imports pickle" for line in _lines_of(tree, "pickle")]
    used = {dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and dotted(n).startswith("pickle.")}
    assert used == {"pickle.Unpickler", "pickle.UnpicklingError"}
    (only,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and "pickle.Unpickler" in map(dotted, n.bases))
    assert [n.name for n in only.body if isinstance(n, ast.FunctionDef)] == ["find_class"]
    assert "super()" not in ast.unparse(only)
    calls = [dotted(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert "pickle.Unpickler" not in calls
    assert not {"getattr", "globals", "vars"} & set(calls)


def _lines_of(tree: ast.Module, module: str) -> list[int]:
    return [n.lineno for n in tree.body if isinstance(n, ast.Import) and n.names[0].name == module]


def test_no_module_is_named_for_nothing() -> None:
    assert [p for p in PACKAGE.rglob("*.py") if p.name in ("utils.py", "base.py", "helpers.py", "common.py")] == []


@pytest.mark.slow
def test_what_recognises_a_finished_extraction_imports_no_torch() -> None:
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


def test_no_test_reaches_another_machine(no_network: list[str]) -> None:
    with socket.socket() as line, pytest.raises(OSError, match="unreachable"):
        line.connect(("192.0.2.1", 80))
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("example.invalid", 80)
    assert len(no_network) == 2
    no_network.clear()
