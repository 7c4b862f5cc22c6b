"""Layout of the package: the direction of imports, import cycles, parameter lists and unique class names."""

import ast
import re
import sys

import pytest
from loaded_files import ROOT, content, tool

# The number of faults of each kind that are allowed. There is no limit on lines: such limits were met by packing code.
# Those of size and density are in tools/house.py.
INSIDE_FUNCTIONS = 40  # each to keep torch out of start-up


@pytest.fixture(scope="module")
def house():
    return tool("house")


@pytest.mark.slow
def test_imports_go_down_in_one_direction_and_stand_at_the_top(house):
    found = house.imports(house.modules())
    assert len(found) > 1000
    inside = [f"{i.source}:{i.line} imports {i.target}" for i in found if i.kind == "function"]
    assert house.against_layers(found) == house.circles(found) == []
    assert len(inside) <= INSIDE_FUNCTIONS, inside


@pytest.mark.slow
def test_parameter_lists_are_short_and_class_names_are_unique(house):
    assert house.sizes(house.modules()) == {"parameters": [], "class": []}


needs_python_311 = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="an f-string is one token in Python 3.11 alone"
)


@pytest.mark.slow
@needs_python_311
def test_the_code_does_not_grow_and_the_package_gets_no_denser(house):
    tokens = house.grouped_tokens()
    larger = {group: n for group, n in tokens.items() if n > house.TOKENS[group]}
    assert larger == {}, "raise TOKENS in tools/house.py and give the reason in the commit"
    density = house.mass(house.modules().values()).density()
    assert density.pop("comment lines") >= house.COMMENTS
    assert {what: n for what, n in density.items() if n > house.DENSITY[what]} == {}


@needs_python_311
def test_size_does_not_depend_on_layout(house, tmp_path):
    dense = tmp_path / "dense.py"
    # The same statements: packed, and laid out with a docstring and a comment.
    dense.write_text('a, b = 1, 2; c = a if b else f"{a + b + a + b:d}"\n')
    loose = tmp_path / "loose.py"
    loose.write_text(
        '"""Text."""\n\n# why\na, b = 1, 2\nc = (\n    a\n    if b\n    else f"{a + b + a + b:d}"\n)\n'
    )
    packed = house.mass([dense])
    laid_out = house.mass([loose])
    assert packed.conditional == 1
    assert packed.tuples == 1
    assert packed.comments == 0
    assert laid_out.conditional == 1
    assert laid_out.tuples == 1
    assert laid_out.comments == 1
    assert laid_out.tokens - 2 == packed.tokens - 1 == 14  # the parentheses; the semicolon
    assert packed.strings == laid_out.strings == 0
    loose.write_text('x = f"{a + b + a + b + a}"\n')
    assert house.mass([loose]).strings == 1


@pytest.mark.slow
@pytest.mark.full
def test_commands_run_functions_of_few_files(house):
    found = house.files_run()
    assert {command: n for command, n in found.items() if n > house.FILES_RUN[command]} == {}


def test_faults_are_seen(house, tmp_path):
    """An import upwards, an import cycle, an import inside a function, a long parameter list, a duplicate name."""
    package = tmp_path / "fedcache"
    (package / "store").mkdir(parents=True)
    (package / "runs").mkdir()
    many = ", ".join(f"a{i}" for i in range(house.MOST_PARAMETERS + 1))
    for place in (package, package / "store", package / "runs"):
        (place / "__init__.py").touch()
    (package / "store/low.py").write_text(
        "from fedcache.runs import high\n\n\nclass Same:\n    pass\n"
    )
    (package / "runs/high.py").write_text(
        f"def f({many}):\n    from fedcache.store import low\n\n\nclass Same:\n    pass\n"
    )
    known = house.modules(tmp_path)
    found = house.imports(known)
    assert house.against_layers(found) == [
        "fedcache.store.low:1 imports fedcache.runs.high (module)"
    ]
    assert set(house.circles(found)[0]) == {"fedcache.runs.high", "fedcache.store.low"}
    assert [i.target for i in found if i.kind == "function"] == ["fedcache.store.low"]
    faults = house.sizes(known)
    assert {kind: len(which) for kind, which in faults.items()} == {"parameters": 1, "class": 1}


def test_the_page_on_architecture_names_files_that_are_there():
    page = content("docs/design/architecture.md")
    package = ROOT / "fedcache"
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page))
    assert len(named) > 30
    assert [n for n in named if not (package / n).is_file() and not (ROOT / n).is_file()] == []


PUBLIC = (
    "fedcache",
    "fedcache.config",
    "fedcache.errors",
    "fedcache.federate.methods",
    "fedcache.testing",
)


def test_the_contract_imports_the_public_api_alone():
    """A rewrite of the package leaves tests/contract as it is."""
    wrong = []
    for path in sorted((ROOT / "tests/contract").glob("*.py")):
        for node in ast.walk(ast.parse(content(path))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            wrong += [
                f"{path.name}: {name}"
                for name in names
                if re.match(r"fedcache\b(?!\.testing\.)", name) and name not in PUBLIC
            ]
    assert not wrong
