"""Names of files, classes, domains and runs that command a terminal, a page or a spreadsheet are shown by number."""

import csv
import html
import io
import json
import re
import unicodedata

import pytest
from command import fedcache
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from pictures import picture

from fedcache.models.predictor import Prediction, write_predictions
from fedcache.parsing import escape_json, sheet_cell, visible

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J"
BIDI = "txt\u202egpj"
FORMULA = "=1+1"
CLASSES = (f"a{TITLE}", f"b{CLEAR}\x9b2J", BIDI, FORMULA, "[red]e\u2066\u2028", "two\nlines")
EXTRACT = "extract --backbones random-projection --size 16 --workers 0 --max-bad 5 --dataset"
COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@pytest.fixture
def hostile(tmp_path):
    """Images of two domains whose folders and files have such names; one image of them is broken."""
    root = tmp_path / "images"
    for split, count in (("train", 4), ("test", 2)):
        for d, domain in enumerate((f"ink{CLEAR}", f"={BIDI}")):
            for c, name in enumerate(CLASSES):
                place = root / split / domain / name
                place.mkdir(parents=True)
                for i in range(count):
                    picture(100 * d + 10 * c + i, c).save(place / f"{i}{CLEAR}.png")
    (root / f"train/ink{CLEAR}" / CLASSES[0] / f"broken{TITLE}.png").write_bytes(b"no image")
    return root


def shown(done, code=0):
    """What a person sees, which holds no command."""
    assert done.code == code
    assert COMMANDS.findall(done.out + done.err) == []
    return done.out + done.err


@pytest.mark.slow
def test_no_command_prints_a_name_that_commands_the_terminal(hostile, tmp_path):
    runs = tmp_path / "runs"
    page = tmp_path / "r.html"
    assert "\\x1b]0;owned\\x07.png" in shown(fedcache(EXTRACT, f"folder:{hostile}"), code=3)
    assert "a\\x1b]0;owned\\x07" in shown(fedcache("inspect"))
    shown(fedcache("ls"))
    shown(fedcache("partition --scheme iid --clients 3 --name", f"p{CLEAR}"), code=2)
    shown(fedcache(f"partition --scheme iid --clients 3 --plot {tmp_path}/p{CLEAR}.svg"))
    for method in ("fedavg", "fedncm"):
        shown(
            fedcache(
                f"train --method {method} --scheme iid --clients 3 --seeds 0,1 --rounds 2 "
                f"--participation all --runs {runs}"
            )
        )
    for form in ((), ("--format", "markdown"), ("--format", "latex")):
        shown(fedcache("compare", runs, *form))
    assert "\nlines" not in shown(fedcache("inspect"))
    shown(fedcache("report", runs, "-o", page, "--title", f"runs {BIDI}{CLEAR}", "--embed", "none"))
    text = page.read_text(encoding="utf-8")
    assert COMMANDS.findall(text) == []
    assert "runs txt\\u202egpj\\x1b[2J" in text
    assert "a\\x1b]0;owned\\x07" in text
    for cell in _cells_of_figures(text):
        assert not cell.startswith(("=", "@", "+", "\t", "\r")), cell
        assert not cell.startswith("-") or cell == "-" or float(cell) <= 0, cell


def _cells_of_figures(page):
    """The cells of the tables behind the figures, as a spreadsheet would read them."""
    tables = [
        html.unescape(table) for table in re.findall(r"<pre hidden>(.*?)</pre>", page, re.DOTALL)
    ]
    assert len(tables) > 3
    return [cell for table in tables for row in csv.reader(io.StringIO(table)) for cell in row]


def test_no_refusal_repeats_what_commands_the_terminal(tmp_path):
    shown(fedcache(f"train --method fed{CLEAR}"), code=2)
    shown(fedcache(f"report x{TITLE} -o {tmp_path}/r.html"), code=2)
    shown(fedcache(f"extract --dataset folder:/no/{TITLE} --backbones pixels"), code=2)
    shown(fedcache(f"no{CLEAR}"), code=2)
    shown(fedcache(f"inspect no{BIDI}"), code=4)


def test_json_holds_the_names_exactly_and_escaped(hostile):
    done = fedcache(EXTRACT, f"folder:{hostile}", "--json")
    assert COMMANDS.findall(done.out) == []
    shown(fedcache("inspect"))
    assert [bad["name"] for bad in done.data["bad"]] == [
        f"train/ink{CLEAR}/{CLASSES[0]}/broken{TITLE}.png"
    ]
    assert fedcache("inspect --json").data["classes"] == sorted(CLASSES)


@pytest.mark.slow
@examples(50, 1000)
@given(st.text())
def test_what_is_visible_has_no_command_and_letters_stay(text):
    for lines in (False, True):
        made = visible(text, lines=lines)
        made.encode()  # a lone surrogate could not be
        assert COMMANDS.findall(made) == []
        assert not (not lines and {"\n", "\t"} & set(made))
    if all(unicodedata.category(c)[0] in "LMNPSZ" and c not in "\u2028\u2029" for c in text):
        assert visible(text) == text


@given(st.text())
def test_json_means_the_same_when_its_commands_are_escaped(text):
    made = escape_json(json.dumps({text: [text]}, ensure_ascii=False))
    assert COMMANDS.findall(made) == []
    assert json.loads(made) == {text: [text]}


@pytest.mark.parametrize(
    "cell", ["+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "=cmd|'/C calc'!A0"]
)
def test_a_sheet_runs_no_cell(cell):
    assert not str(sheet_cell(cell)).lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r"))


@given(st.one_of(st.integers(), st.floats(allow_nan=False)))
def test_numbers_of_a_sheet_stay_numbers(number):
    assert sheet_cell(number) == number
    assert sheet_cell(repr(number)) == repr(number)


def test_predictions_in_a_file_are_no_formulas_and_command_no_terminal(tmp_path):
    rows = [
        Prediction("=HYPERLINK(1).png", ("\x1b[31mred", "plain"), (0.75, 0.25)),
        Prediction("\u202egnp.x", (), (), "+bad"),
    ]
    write_predictions(tmp_path / "p.csv", rows, 2)
    raw = (tmp_path / "p.csv").read_text()
    assert list(csv.reader(raw.splitlines()))[1:] == [
        ["'=HYPERLINK(1).png", "\\x1b[31mred", "0.75", "plain", "0.25", ""],
        ["\\u202egnp.x", "", "", "", "", "'+bad"],
    ]
    rows.append(Prediction("k\u00e4se.png", ("gouda",), (1.0,)))
    write_predictions(tmp_path / "p.jsonl", rows, 2)
    raw = (tmp_path / "p.jsonl").read_text("utf-8")
    assert not set(raw) & {"\x1b", "\u202e"}
    assert "k\u00e4se.png" in raw, "letters are written as they are"
    read = [json.loads(line)["name"] for line in raw.splitlines()]
    assert read == ["=HYPERLINK(1).png", "\u202egnp.x", "k\u00e4se.png"]
