"""Every place of the package that imports a module by a name, or reads a format that can hold code.

Each is listed with where the name or the file comes from. A new place fails here until somebody has asked whether data
could choose what it runs.
"""

import ast
import re
from collections import Counter

import pytest
from loaded_files import ROOT, content

PACKAGE = ROOT / "fedcache"

# Import a module, run text as code or a shell, or open what may hold code.
RISK = re.compile(
    r"\b(?:import_module|__import__|entry_points|spec_from_\w+|module_from_spec|exec_module|load_module|run_path"
    r"|run_module|reload|extractall|unpack_archive|read_pickle|Unpickler|os\.system|os\.popen)\b"
    r"|\b(?:import|from) (?:[\w., ]*, )?"
    r"(?:runpy|imp|pkg_resources|yaml|_?pickle|joblib|dill|cloudpickle|marshal|shelve)\b"
    r"|(?<![\w.'\"-])(?:eval|exec|compile)\b(?!['\"-])|\bshell="
    r"|\b(?:torch|torch\.jit|torch\.export|np|numpy|pickle)\.loads?\b"
    r"|from (?:torch|numpy)[\w.]* import .*\bload\b"
)

KNOWN = {
    "__init__.py import_module": 2,  # the fixed table _LATER of fedcache's own modules
    "cli.py import_module": 3,  # the fixed table of commands, in fedcache.commands, and a name written here
    "commands/options.py import_module": 7,  # names written here
    "commands/ui.py import_module": 2,  # a name written here
    # a module: name that derive lets through: one that the user named, or that an installed package declares
    "extract/backbones/own_module.py import_module": 2,
    "extract/datasets/__init__.py import_module": 2,  # the fixed table KINDS, in fedcache.extract.datasets.kinds
    "federate/methods/__init__.py import_module": 2,  # the fixed table NAMES
    "federate/methods/pfedme.py eval": 2,  # a docstring; the name of a hyperparameter
    "testing/backbone_laws.py eval": 1,  # a message
    "optional.py import_module": 2,  # names of libraries that callers write
    "plugins.py entry_points": 2,  # packages that the user installed; only a name that they declare is loaded
    "extract/backbones/checkpoints.py np.load": 1,  # a checkpoint, without objects
    # a checkpoint, of tensors and plain data alone; a docstring and a message
    "extract/backbones/checkpoints.py torch.load": 3,
    "extract/backbones/checkpoints.py torch.jit.load": 1,  # a message
    "models/export/program.py import_module": 1,  # written here
    "models/export/program.py import joblib": 1,  # it writes a file for scikit-learn and reads none
    "models/export/program.py torch.export.load": 1,  # a docstring
    "models/export/predict_features.py np.load": 1,  # a program of an exported folder: features, without objects
    "models/export/predict_features.py torch.export.load": 1,  # the same: the program beside it, which its user runs
    "models/export/predict_images.py torch.export.load": 1,  # the same
    "runs/directory.py np.load": 1,  # a docstring
    "tables/foreign_files.py numpy.load": 2,  # messages
    "tables/foreign_files.py read_pickle": 1,  # a message
    "tables/foreign_files.py torch.load": 1,  # a message
    "testing/dataset_laws.py import pickle": 1,  # the module of the line below
    "testing/dataset_laws.py pickle.loads": 1,  # what the line itself has pickled
    "tables/plain_pickle.py import pickle": 1,  # the module of the unpickler below
    "tables/plain_pickle.py Unpickler": 1,  # arrays, lists and words alone; any other name is refused
}


@pytest.mark.slow
def test_every_place_that_could_run_code_is_listed_with_where_its_name_comes_from():
    found = Counter(
        f"{path.relative_to(PACKAGE).as_posix()} {risk}"
        for path in PACKAGE.rglob("*.py")
        for risk in RISK.findall(ast.unparse(ast.parse(content(path))))
    )
    assert found == KNOWN


@pytest.mark.parametrize(
    "source",
    [
        "importlib.import_module(name)",
        "from importlib import import_module as load",
        "__import__(name)",
        "import yaml",
        "from pickle import loads",
        "torch.load(path)",
        "from torch import load",
        "eval(text)",
        "archive.extractall('x')",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_what_could_run_code_is_seen(source):
    assert RISK.search(source)


@pytest.mark.slow
def test_no_reader_is_allowed_objects_and_no_library_remote_code():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(content(path))):
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
                assert ast.unparse(node.value) == "False", f"{path}:{node.value.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only", "True") == "True"
                assert "weights_only" in given or given.get("allow_pickle") == "False", (
                    f"{path}:{node.lineno}"
                )


def test_plain_reading_is_let_through():
    assert not RISK.search("subprocess.run(['ls'])\nre.compile('x')\nmodel.eval()")
