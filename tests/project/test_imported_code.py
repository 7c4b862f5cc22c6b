"""Every place of the package that imports a module by a name, or reads a format that can hold code.

Each is listed with where the name or the file comes from. A new place fails here until somebody has asked whether data
could choose what it runs.
"""

import ast
from collections import Counter

import pytest
from repository_files import ROOT, content

PACKAGE = ROOT / "fedcache"

# Import a module, run text as code or a shell, or open what may hold code, by these names wherever they stand.
IMPORTERS = frozenset(
    [
        "import_module",
        "__import__",
        "entry_points",
        "spec_from_file_location",
        "spec_from_loader",
        "module_from_spec",
        "exec_module",
        "load_module",
        "run_path",
        "run_module",
        "reload",
        "extractall",
        "unpack_archive",
        "read_pickle",
    ]
)
BUILT_IN = {"eval", "exec", "compile"}
LIBRARIES = frozenset(
    [
        "runpy",
        "imp",
        "pkg_resources",
        "yaml",
        "pickle",
        "_pickle",
        "joblib",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
    ]
)
# Readers of formats that can hold code, and what hands words to a shell.
READERS = frozenset(
    [
        "torch.load",
        "torch.jit.load",
        "torch.export.load",
        "np.load",
        "numpy.load",
        "os.system",
        "os.popen",
    ]
)
PICKLE = {"Unpickler", "pickle.load", "pickle.loads"}

KNOWN = {
    "__init__.py __getattr__ import_module": "the fixed table _LATER of fedcache's own modules",
    "cli.py UnloadedCommand.load import_module": "the fixed table of commands, in fedcache.commands",
    "cli.py refused import_module": "written here",
    "commands/options.py _backbones import_module": "written here",
    "commands/options.py _datasets import_module": "written here",
    "commands/options.py _schemes import_module": "written here",
    "commands/options.py _partitions import_module": "written here",
    "commands/options.py _runs import_module": "written here",
    "commands/ui.py ui import_module": "written here",
    "extract/backbones/own_module.py _factory import_module": (
        "a module: name that derive lets through: one that the user named, or that an installed package declares"
    ),
    "extract/datasets/__init__.py module import_module": "the fixed table KINDS, in fedcache.extract.datasets.kinds",
    "federate/methods/__init__.py MethodTable.__getitem__ import_module": "the fixed table NAMES",
    "models/export/program.py onnx_difference import_module": "written here",
    "optional.py needed_library import_module": "names of libraries that callers write",
    "plugins.py _installed entry_points": "packages that the user installed; only a name that they declare is loaded",
    "extract/backbones/checkpoints.py _read_npz np.load": "a checkpoint, without objects",
    "extract/backbones/checkpoints.py load_torch torch.load": "a checkpoint, of tensors and plain data alone",
    "models/export/program.py  joblib": "it writes a file for scikit-learn and reads none",
    "models/export/predict_features.py  np.load": "a program of an exported folder: features, without objects",
    "models/export/predict_features.py  torch.export.load": "the same: the program beside it, which its user runs",
    "models/export/predict_images.py  torch.export.load": "the same",
    "testing/dataset_laws.py  pickle": "the module of the line below",
    "testing/dataset_laws.py workers_read_the_same pickle.loads": "what the line itself has pickled",
    "tables/plain_pickle.py  pickle": "the module of the unpickler below",
    "tables/plain_pickle.py _Unpickler Unpickler": "arrays, lists and words alone; any other name is refused",
}


def places(tree, inside=""):
    """Nodes of a module with the names of the classes and functions around them."""
    for child in ast.iter_child_nodes(tree):
        around = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            around = f"{inside}.{child.name}".removeprefix(".")
        yield around, child
        yield from places(child, around)


def risk_of(node):
    """What a node does of the above; None for all others."""
    if isinstance(node, ast.Name) and node.id in IMPORTERS | BUILT_IN | PICKLE:
        return node.id
    if isinstance(node, ast.Attribute):
        whole = ast.unparse(node)
        if whole in READERS | PICKLE:
            return whole
        return node.attr if node.attr in IMPORTERS | PICKLE else None
    if isinstance(node, ast.keyword) and node.arg == "shell":
        return "shell"
    if isinstance(node, ast.alias) and node.asname and node.name in IMPORTERS | PICKLE:
        return node.name
    if isinstance(node, ast.ImportFrom) and any(
        f"{node.module}.{alias.name}" in READERS for alias in node.names
    ):
        return str(node.module)
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
        found = sorted({name.partition(".")[0] for name in names} & LIBRARIES)
        return found[0] if found else None
    return None


def found_in(source, name):
    for around, node in places(ast.parse(source)):
        risk = risk_of(node)
        if risk is not None:
            yield f"{name} {around} {risk}"


@pytest.mark.slow
def test_every_place_that_could_run_code_is_listed_with_where_its_name_comes_from():
    found = Counter(
        place
        for path in sorted(PACKAGE.rglob("*.py"))
        for place in found_in(content(path), path.relative_to(PACKAGE).as_posix())
    )
    assert sorted(found) == sorted(KNOWN)


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module as load\nmodule = load(name)",
        "__import__(name)",
        "import yaml",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "eval(text)",
        "archive.extractall('x')",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_what_could_run_code_is_seen(source):
    assert list(found_in(source, "x.py"))


@pytest.mark.slow
def test_no_reader_is_allowed_objects_and_no_library_remote_code():
    for path in PACKAGE.rglob("*.py"):
        for _, node in places(ast.parse(content(path))):
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
                assert ast.unparse(node.value) == "False", f"{path}:{node.value.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only", "True") == "True"
                assert "weights_only" in given or given.get("allow_pickle") == "False", (
                    f"{path}:{node.lineno}"
                )


def test_plain_reading_is_let_through():
    assert not list(found_in("subprocess.run(['ls'])\nre.compile('x')\nmodel.eval()", "x.py"))
