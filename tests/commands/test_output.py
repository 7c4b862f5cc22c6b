"""What the observer of the command line prints, and how errors and answers leave the process."""

import json
import math

import pytest

from fedcache.commands.output import (
    CommandResult,
    TerminalObserver,
    described,
    envelope,
    fail,
    show,
)
from fedcache.errors import Exit, StoreError


def test_notes_and_warnings_are_lines_on_stderr_and_warnings_are_kept(capsys):
    observer = TerminalObserver()
    observer.note("a note\x1b[2J")
    observer.warn("careful")
    assert capsys.readouterr() == ("", "a note\\x1b[2J\nwarning: careful\n")
    assert observer.warnings == ["careful"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StoreError("No store.", "Make one."), Exit.STORE, "No store."),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "Stopped"),
        (FileNotFoundError(2, "No such file or directory", "x.bin"), Exit.ENVIRONMENT, "x.bin"),
        (OSError("odd"), Exit.ENVIRONMENT, "odd"),
        (MemoryError(), Exit.ENVIRONMENT, "memory"),
    ],
)
def test_an_error_is_told_as_one_that_a_user_can_act_on(capsys, error, code, said):
    told = described(error)
    assert told.code == code
    assert said in told.message
    assert told.hint
    assert capsys.readouterr() == ("", ""), "no traceback of what was thought of"


def test_an_envelope_is_one_line_of_json_without_nan(capsys):
    values = {"n": math.nan, "deep": [(1, math.inf), {2: "\x1b"}], "x": 0.5}
    envelope("train", "ok", {"data": values}, ["w"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "\x1b" not in out
    assert json.loads(out) == {
        "schema": 1,
        "command": "train",
        "status": "ok",
        "warnings": ["w"],
        "data": {"n": None, "deep": [[1, None], {"2": "\x1b"}], "x": 0.5},
    }


@pytest.mark.parametrize(
    ("code", "status"), [(Exit.OK, "ok"), (Exit.QUARANTINED, "problem"), (Exit.CORRUPT, "problem")]
)
def test_an_answer_is_lines_or_an_envelope(capsys, code, status):
    result = CommandResult({"a": 1}, ["one\x07", "two\nthree"], code)
    show("ls", False, result, ["w"])
    assert capsys.readouterr().out == "one\\x07\ntwo\nthree\n"
    show("ls", True, result, ["w"])
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == status
    assert told["data"] == {"a": 1}
    assert told["warnings"] == ["w"]


def test_a_failure_is_on_stderr_and_with_json_on_stdout_too(capsys):
    error = StoreError("No store\x07.", "Make one.")
    fail("ls", False, error)
    assert capsys.readouterr() == ("", "fedcache: No store\\x07.\nMake one.\n")
    fail("ls", True, error, ["w"])
    told = capsys.readouterr()
    assert told.err == "fedcache: No store\\x07.\nMake one.\n"
    assert json.loads(told.out) == {
        "schema": 1,
        "command": "ls",
        "status": "error",
        "warnings": ["w"],
        "error": {"code": 4, "name": "STORE", "message": "No store\x07.", "hint": "Make one."},
    }
