"""Which changes of the code make a stored run old: those of what it computes, and no others."""

import shutil

import pytest

from fedcache.federate.methods import METHODS
from fedcache.runs.directory import DETERMINING, digest_of_code
from fedcache.store.files import digest_of_files, tree_digest
from fedcache.store.own_code import ROOT


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package's sources."""
    root = tmp_path_factory.mktemp("package") / "fedcache"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    return root


def changed(root, file, old, new):
    """Whether the digest of the code of fedavg differs while ``old`` is ``new`` in a file."""
    before = digest_of_code(root, "fedavg")
    path = root / file
    text = path.read_text()
    assert text.count(old) >= 1, f"{file} does not hold {old!r}"
    path.write_text(text.replace(old, new, 1))
    try:
        return digest_of_code(root, "fedavg") != before
    finally:
        path.write_text(text)


def test_comments_and_docstrings_leave_stored_runs_valid(package):
    assert not changed(package, "heads/losses.py", "from __future__", "# a remark\nfrom __future__")
    assert not changed(package, "heads/losses.py", '"""', '"""Another word. ')
    assert not changed(package, "federate/engine/method.py", '"""Kind ', '"""Sort ')


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("heads/losses.py", "log_softmax", "softmax"),
        ("store/reader.py", "return ", "return None or "),
        ("runs/features.py", "good & (s.split == 0)", "good & (s.split == 2)"),
        ("runs/features.py", "return ", "return None or "),
    ],
)
def test_a_changed_expression_makes_another_run(package, file, old, new):
    assert changed(package, file, old, new)


def test_every_file_that_determines_a_figure_is_there():
    # A file that was renamed would otherwise leave the digest without a word.
    for name in DETERMINING:
        place = ROOT / name.removesuffix("/**")
        assert any(place.rglob("*.py")) if name.endswith("/**") else place.is_file(), name


@pytest.mark.slow
def test_a_method_is_identified_by_the_method_files_it_imports(package):
    before = {name: digest_of_code(package, name) for name in METHODS}
    path = package / "federate/methods/fedavg.py"
    text = path.read_text()
    path.write_text(text + "\nCHANGED = 1\n")
    after = {name for name in METHODS if digest_of_code(package, name) != before[name]}
    path.write_text(text)
    assert {"fedavg", "fedprox"} <= after
    assert not {"solo", "fed3r", "fedpcl"} & after


def test_the_digest_of_a_tree_is_that_of_what_it_says():
    plain = tree_digest("def f(x):\n    return x + 1\n")
    assert tree_digest('def f(x):\n    """Doc."""\n    # why\n    return (x + 1)\n') == plain
    assert tree_digest("def f(x):\n    return x + 2\n") != plain
    assert tree_digest("def f(x):\n    return 1 + x\n") != plain
    assert tree_digest('x = "a"\n') != tree_digest('x = "b"\n'), (
        "a string that is used is no docstring"
    )
    moved = tree_digest("from fedcache.heads.linear import Tree\n")
    assert tree_digest("from fedcache.heads.maps import Tree\n") == moved
    assert tree_digest("from numpy.linalg import norm\n") != tree_digest("from numpy import norm\n")


def test_a_moved_file_leaves_stored_runs_valid(tmp_path):
    def digest(*names):
        files = [tmp_path / name for name in names]
        for number, file in enumerate(files):
            file.write_text(f"x = {number}\n")
        return digest_of_files(set(files))

    assert digest("a.py", "b.py") == digest("d.py", "c.py")
