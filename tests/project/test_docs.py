"""The documentation says what the code says: generated pages, links, command lines, tables, examples."""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import tiny_hf
import tiny_sounds
from arrays import ingested
from command import fedcache, ok
from command_lines import commands, refused
from loaded_files import ROOT, content, tool

import fedcache as fc
from fedcache.errors import Exit

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r'^--8<-- "(.+?)"$', re.MULTILINE)
INDENTED = re.compile(r"^ {4}(fedcache .*)$", re.MULTILINE)
INLINE = re.compile(r"`(fedcache [^`\n]+)`")


MAKE_DOCS = tool("make_docs")
MEANINGS = MAKE_DOCS.MEANINGS
PAGES = sorted(
    path
    for path in (ROOT / "README.md", *DOCS.rglob("*.md"))
    if "design" not in path.parts and not MAKE_DOCS.is_made(path.relative_to(ROOT).as_posix())
)
"""The pages that people write. `make docs` makes the others, and checks the links of all."""


def text(path):
    """A page with the files that it includes."""
    return INCLUDE.sub(lambda m: content(m[1]), content(path))


def test_every_include_of_a_page_is_one_that_the_build_expands():
    # A formatter once made arithmetic of two of them, and the pages showed that in place of their examples.
    assert not {page.name for page in PAGES if re.search(r"-\s*8\s*<", text(page))}


def test_every_command_has_an_example_and_every_option_a_meaning():
    for command in MAKE_DOCS.all_commands():
        says, example = command.description
        assert says, command.name
        assert example.startswith(f"fedcache {command.name}"), (
            f"{command.name}: its docstring ends with no Example:"
        )
        meanings = [param.help or "" for param in command.params if param.name != "help"]
        assert [text for text in meanings if " " not in text] == []


# links


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_a_page_outside_the_site_links_what_is_in_the_repository(name):
    body = FENCE.sub("", content(name))
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", body)]
    local = [target for target in targets if target and not re.match(r"[a-z]+://|mailto:", target)]
    assert local
    assert [
        target for target in local if not (ROOT / target).exists() or MAKE_DOCS.is_made(target)
    ] == []


# command lines


def lines(page):
    """The command lines of a page's shell blocks, indented blocks and literals, and whether they are whole."""
    body = re.sub(r"<!--.*?-->|\\\n", " ", page, flags=re.DOTALL)
    for kind, block in FENCE.findall(body):
        if kind in ("sh", "bash", "console", ""):
            yield from ((line.removeprefix("$ "), True) for line in block.splitlines())
    outside = FENCE.sub("", body)
    yield from ((line, True) for line in INDENTED.findall(outside))
    yield from ((found, False) for found in INLINE.findall(outside) if "[" not in found)


def check_lines(pages):
    """Parse every command line of pages, by name; how many there are."""
    wrong = []
    seen = 0
    for name, page in pages.items():
        for line, whole in lines(page):
            for words in commands(line) if "fedcache " in line else ():
                problem = refused(words)
                seen += 1
                # a literal may name a command alone
                if problem and (whole or not problem.startswith("Missing")):
                    wrong.append(f"{name}: {line.strip()}: {problem}")
    assert not wrong
    return seen


@pytest.mark.slow
def test_command_lines_of_pages_that_people_write():
    assert check_lines({path.name: content(path) for path in PAGES}) > 250


@pytest.mark.slow
def test_command_lines_of_pages_that_are_made():
    assert check_lines(MAKE_DOCS.pages()) > 100


# docs/troubleshooting.md


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_code():
    files = sorted((ROOT / "fedcache").rglob("*.py"))
    code = "".join(re.sub(r'"\s*\n\s*f?"', "", content(path)) for path in files)
    rows = [line for line in content("docs/troubleshooting.md").splitlines() if "`" in line]
    symptoms = [line.split(" | ")[0] for line in rows if line.startswith("| ")]
    quoted = [message for symptom in symptoms for message in re.findall(r"`(.+?)`", symptom)]
    pieces = [piece.strip() for message in quoted for piece in message.split("...")]
    assert len(quoted) > 25
    assert [piece for piece in pieces if piece not in code] == []


# tables


def test_every_exit_code_has_a_meaning_and_its_example_leaves_with_it():
    assert list(MEANINGS) == list(Exit)
    for code in [e for e, m in MEANINGS.items() if not m.given]:
        assert fedcache(*shlex.split(MEANINGS[code].example)[1:]).code == code


def test_the_result_format_names_every_key_of_a_result(tmp_path):
    store = fc.Store.open(ingested(tmp_path))
    run = fc.train("fed3r", store, fc.partition(store, "iid", clients=4))
    free = ("hyperparameters", "diagnostics", "files")  # their keys are the method's and the run's
    found = json.loads((run.path / "result.json").read_text())
    keys = set(found) | {
        f"{key}.{below}"
        for key, value in found.items()
        if isinstance(value, dict) and key not in free
        for below in value
    }
    page = content("docs/result-format.md").partition("## result.json")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    # of runs with attacks, robust rules or privacy, with simulated time, that score a part of the clients, with rows to
    # choose by, with plug-ins, on texts or rows, and that start from class texts
    seldom = {
        "accuracy.zero_shot",
        "accuracy.client_prior",
        "accuracy.stages",
        "accuracy.base_to_new",
        "accuracy.transfer",
        "trust",
        "participants",
        "timing",
        "accuracy.eval_clients",
        "validation",
        "plugins",
        "dataset.holds",
    }
    assert told - keys == seldom
    assert keys - told == set()


def test_the_python_pages_show_every_public_name_once():
    listed = [
        name
        for page in DOCS.glob("python/*.md")
        for name in re.findall(r"^::: (\S+)", content(page), re.M)
    ]
    shown = set(listed)
    assert len(listed) == len(shown)
    public = {f"{module}.{name}" for name, module in fc._LATER.items()}
    public |= {"fedcache.errors.FedcacheError", "fedcache.progress.Round"}
    public |= {
        f"fedcache.api.{n}"
        for n, f in vars(fc).items()
        if n in fc.__all__ and inspect.isfunction(f)
    }
    assert public <= shown
    for path in shown:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


# examples


@pytest.mark.slow
def test_the_examples_of_docstrings_are_true():
    tried = 0
    for path in sorted((ROOT / "fedcache").rglob("*.py")):
        if ">>>" not in content(path):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            result = doctest.testmod(importlib.import_module(name))
        assert not result.failed, said.getvalue()
        tried += result.attempted
    assert tried >= 10


# docs/texts.md: its commands run as they are written, on the data that its example makes


NAME = "texts_and_sound"


@pytest.mark.slow
def test_the_example_runs_as_it_is_written(here, monkeypatch):
    shutil.copy(ROOT / f"examples/{NAME}.py", here)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    blocks = content("docs/texts.md").split("```sh\n")[1:]
    commands = [
        shlex.split(line) for block in blocks for line in block.partition("```")[0].splitlines()
    ]
    assert [words[0] for words in commands].count("fedcache") == len(commands) - 1
    best = {}
    topics = runpy.run_path(f"{ROOT}/examples/{NAME}.py")["TOPICS"]
    words = sorted({word for topic in topics.values() for word in topic.split()})
    try:
        for command in commands:
            if command[0] == "python":
                runpy.run_path(command[1], run_name="__main__")
                continue
            # whose model is not here: a tiny one in its place
            if any(word.startswith("hf:") for word in command):
                folder = Path(next(word for word in command if word.startswith("hf:"))[3:])
                folder.mkdir(parents=True)
                if folder.name.startswith("wav2vec2"):
                    tiny_sounds.encoder(folder, "wav2vec2")
                    tiny_sounds.tones(here / "recordings")
                elif folder.name.startswith("qwen2"):
                    tiny_hf.decoder(folder)
                else:
                    tiny_hf.sentence_encoder(folder, words)
            done = ok(*command[1:]) if command[1] != "report" else fedcache(*command[1:])
            assert done.code == 0
            if command[1] == "grid":
                rows = {p["method"]: p["accuracy"]["mean"] for p in done.data["points"]}
                best[command[command.index("--by") + 1]] = rows
    finally:
        sys.modules.pop(NAME, None)
    # Four topics: chance is 0.25. Of the tones fed3r is right on more than nine of ten.
    assert set(best["site"]) == {"fed3r", "fedavg", "fst-cbdg"}
    assert min(best["site"].values()) > 0.7, best
    assert best["microphone"]["fed3r"] > 0.9, best
    assert (here / "texts.html").stat().st_size > 10_000
