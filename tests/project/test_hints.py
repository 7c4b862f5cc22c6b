"""Names of files; a shell reads all but the first in another way where they are not quoted."""

import ast
import itertools
import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from command import fedcache
from command_lines import COMMANDS, faults, hints_of_the_package, known_options, spans
from loaded_files import ROOT, content

PACKAGE = ROOT / "fedcache"
PIECES = {
    "kind": "method",
    "inputs": "IMAGES",
    "rows": "--dataset DATASET",
    "whose": "--client NAME",
    "chosen": " --backbones glyph-clip",
    "train_example(opened)": "--method fed3r",
    "ENCODERS[holds]": "hf:FOLDER",
    "_option(strange[0])": "--rounds",
    "_option(key)": "--rounds",
    "making": "fedcache extract --backbones pixels",
    "or_spec": "",
    "self.option": "1/2",
    "found[3]": "2",
}
"""Expressions in f-strings that are no single value but words of a command line, and an example of each."""
QUOTING = ("shell_word(", "shlex.join(", "command_of(", "extract_command(")
"""What makes one word, or a whole command line, of any value."""
HOLE = re.compile("\ue000(\\d+)\ue001")
OPTION = re.compile(r"(?<![\w(-])--[a-z][a-z-]*")
OF_OTHERS = {
    "--force-reinstall",
    "--upgrade",
    "--backend-store-uri",
    "--logdir",
    "--head",
    "--address",
    "--keep",
}
"""Options of pip, MLflow, TensorBoard, Ray and gunzip."""
FREE = "(?:[a-z]+-key|no-label|by|domain|client|name|store|dataset|data|weights|recipe|backbones|partition|out|track)"
"""Options whose values are words of the user: names of columns, clients and stores, and paths."""
WITH_A_VALUE = re.compile(
    f"--{FREE}[ =](?:[\\w./:=,-]|\ue000\\d+\ue001)+|(?:^|  )(?:rm|mv|ls) [^;]*"
)
"""Such an option with its value, or a command of the shell on a path."""
NOT_INSTALLED = re.compile(r"\b(?:tools|examples|docs|benchmarks|tests)/[\w./-]*\w")
"""Paths of the repository that the wheel does not have."""
VARIABLE = re.compile(r"FEDCACHE_[A-Z]\w*")


class Text(NamedTuple):
    """A string of the package, with a mark in the place of each value of an f-string."""

    where: str
    text: str
    values: list[ast.expr]
    message: bool  # of an error: it repeats what was given

    def example(self):
        """The text with a word in the place of each value."""
        return HOLE.sub(
            lambda m: PIECES.get(ast.unparse(self.values[int(m[1])]), "HOLE"), self.text
        )

    def unquoted(self):
        """Values that stand in a command line as they are, and would be several words of a shell."""
        lines = [line for line, _ in spans(self.text) if _is_a_command(line)]
        for line in lines if self.message else [*lines, *WITH_A_VALUE.findall(self.text)]:
            for hole in HOLE.finditer(line):
                value = ast.unparse(self.values[int(hole[1])])
                if not value.startswith(QUOTING) and not value.isupper() and value not in PIECES:
                    yield value


def _is_a_command(line):
    program, word, *_ = [*line.split(), ""]
    return program != "fedcache" or word in COMMANDS.commands


def texts(source, where):
    """The strings of a module but docstrings and patterns; of a choice between constants in an f-string, each."""
    nodes = list(ast.walk(ast.parse(source)))
    _put_back_named_words(nodes)
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    unread = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    unread |= {id(part) for node in nodes if _is_a_pattern(node) for part in node.args}
    messages = {id(part) for node in nodes if _is_an_error(node) for part in ast.walk(node.args[0])}
    unread |= inner
    for node in nodes:
        if id(node) in unread:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(f"{where}:{node.lineno}", node.value, [], id(node) in messages)
        if isinstance(node, ast.JoinedStr):
            for parts in itertools.product(*map(_choices, node.values)):
                yield _joined(f"{where}:{node.lineno}", parts, id(node) in messages)
        if isinstance(node, ast.List) and ast.unparse(node).startswith("['fedcache'"):
            # Up to the words that stand for several.
            words = itertools.takewhile(lambda word: not isinstance(word, ast.Starred), node.elts)
            line = " ".join(w.value if isinstance(w, ast.Constant) else "HOLE" for w in words)
            yield Text(f"{where}:{node.lineno}", f"`{line}`", [], False)


def _put_back_named_words(nodes):
    """In f-strings, replace a name by the word that its function gives it: a constant, or a value that is quoted."""
    for function in nodes:
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = list(ast.walk(function))
        given = {}
        for node in inside:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                given.setdefault(node.targets[0].id, []).append(node.value)
        words = {
            name: values[0] for name, values in given.items() if all(map(_is_one_word, values))
        }
        for node in inside:
            if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
                node.value = words.get(node.value.id, node.value)


def _is_one_word(value):
    if isinstance(value, ast.Constant):
        return str(value.value).isidentifier()
    return ast.unparse(value).startswith(QUOTING)


def _is_a_pattern(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")


def _is_an_error(node):
    return (
        isinstance(node, ast.Call) and bool(node.args) and ast.unparse(node.func).endswith("Error")
    )


def _choices(part):
    value = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(value, ast.IfExp):
        return [*_choices(value.body), *_choices(value.orelse)]
    return [value]


def _joined(where, parts, message):
    text = ""
    values = []
    for part in parts:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        text += f"\ue000{len(values)}\ue001"
        values.append(part)
    return Text(where, text, values, message)


# It takes seconds, and every process of pytest imports this file.
@cache
def texts_of_the_package():
    return [
        text
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in texts(content(path), str(path.relative_to(ROOT)))
    ]


VARIABLES = {
    word
    for path in PACKAGE.rglob("*.py")
    for word in re.findall(r"(?:environ|VARIABLE).*\"(FEDCACHE_\w+)\"", content(path))
}


def lost_options(text):
    said = text.example()
    # A text that is an option and no more is a word for another program, which fedcache starts.
    return (
        []
        if OPTION.fullmatch(said)
        else [word for word in OPTION.findall(said) if word not in known_options() | OF_OTHERS]
    )


def lost_files(text):
    """Files of the repository that a text names, and that somebody who installed the wheel does not have."""
    found = NOT_INSTALLED.findall(text.example())
    known = [
        name for name in found if Path(name).suffix in (".py", ".md") or (ROOT / name).exists()
    ]
    return [name for name in known if "HOLE" not in name]  # those are of the user's own package


def lost_variables(text):
    return [name for name in VARIABLE.findall(text.text) if name not in VARIABLES]


LAWS = {
    "command lines that cannot be run": lambda text: list(faults(text.example())),
    "values that are not quoted": lambda text: list(text.unquoted()),
    "options that no command has": lost_options,
    "files that the wheel does not have": lost_files,
    "variables that nothing reads": lost_variables,
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_every_hint_can_be_typed_as_it_is_printed(law):
    wrong = [f"{text.where}: {fault}" for text in texts_of_the_package() for fault in law(text)]
    assert not wrong, "\n".join(wrong)


def test_the_law_reads_the_hints_of_the_package():
    lines = [line for text in texts_of_the_package() for line, _ in spans(text.text)]
    assert len([line for line in lines if line.startswith("fedcache ")]) > 250


def test_a_fault_is_seen():
    for source, law in PLANTED:
        assert any(LAWS[law](text) for text in texts(f"hint = {source}", "planted")), source


def test_a_hint_that_is_right_has_no_fault():
    for source in RIGHT:
        for text in texts(f"hint = {source}", "planted"):
            assert not [fault for law in LAWS.values() for fault in law(text)], source


NAMES = ("plain", "two words", "it's", "-x", "a;b", "$HOME")
"""Names of files; a shell reads all but the first in another way where they are not quoted."""


@pytest.mark.parametrize("name", NAMES)
def test_hints_about_files_of_any_name_can_be_typed(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    for ending in ("pkl", "mat", "pt"):
        (folder / f"{name}.{ending}").write_bytes(b"nothing that can be read")
    (folder / f"{name}.csv").write_text("text,number\na sentence,1\nanother one,2\n")
    (folder / "photo.psd").write_bytes(b"no image that is read")
    (folder / f"{name}.zarr").mkdir()
    (folder / f"{name}.zarr/manifest.json").write_text("{")
    calls = [
        ("ingest", folder / f"{name}.{ending}", "--name", "rows")
        for ending in ("pkl", "mat", "pt", "csv")
    ]
    calls += [("ingest", folder, "--name", "rows"), ("verify", folder / f"{name}.zarr")]
    calls += [
        ("extract", "--dataset", f"folder:{folder}", "--backbones", "pixels"),
        ("train", "--dataset", folder),
    ]
    calls += [
        ("train", "fed3r", "--no-extract", f"--dataset={name}"),
        ("runs", "show", f"tag:{name}"),
    ]
    calls += [("flower", "server", "--keys", folder), ("train", "fed3r", "--clients-from", folder)]
    with hints_of_the_package() as seen:
        assert all(fedcache(*words).code for words in calls)
    lines = [line for hint in seen for line, _ in spans(hint)]
    assert len(lines) >= 8, seen
    assert not [fault for hint in seen for fault in faults(hint)]
    assert [word for line in lines for word in shlex.split(line) if name in word]


PLANTED = [
    ('"fedcache train --metod fed3r"', "command lines that cannot be run"),
    ('"Start with:  fedcache extrakt --dataset digits"', "command lines that cannot be run"),
    ('"fedcache shard --partition NAME --out DIR makes them."', "command lines that cannot be run"),
    ('"fedcache train --method fedavgg"', "command lines that cannot be run"),
    ('"fedcache train --rounds many"', "command lines that cannot be run"),
    ("\"pip install 'fedcache[nosuch]'\"", "command lines that cannot be run"),
    ("\"python -c 'import numpy as'\"", "command lines that cannot be run"),
    (
        "f\"fedcache {'extract' if new else 'extrakt'} --dataset digits\"",
        "command lines that cannot be run",
    ),
    ('shlex.join(["fedcache", "train", "--confg", str(path)])', "command lines that cannot be run"),
    ("f'fedcache ingest {path} --name NAME'", "values that are not quoted"),
    ("f'Remove it:  rm {path}'", "values that are not quoted"),
    ("f'Another one: --label-key {column}'", "values that are not quoted"),
    ('"Say --label-column NAME"', "options that no command has"),
    ('"See docs/texts.md"', "files that the wheel does not have"),
    ('"Set FEDCACHE_PLACE"', "variables that nothing reads"),
]


RIGHT = [
    "f'fedcache ingest {shell_word(path)} --name NAME'",
    '"fedcache datasets list   lists what each dataset needs"',
    '"this fedcache reads format 3"',
    '"fedcache has a method of that name"',
    '"(`fedcache inspect` shows them)"',
    '"With a file:  fedcache backbones import FILE --as NAME."',
    '"fedcache compare RUN RUN ... --over settings"',
]
