"""A home after a long story: whichever file is changed, no command gives another figure without a word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "attack_home.py"


def attacked(*words: object) -> str:
    """What ``tools/attack_home.py`` prints, and that nothing was wrong."""
    done = subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ": 0 WRONG" in done.stdout
    return done.stdout


def test_no_file_of_a_home_is_changed_unseen(cases: Callable[[int, int], int]) -> None:
    count = cases(40, 500)
    assert f"{count} mutations" in attacked("--count", count)


@pytest.mark.parametrize("kind", ["finished seed", "result"])
def test_no_digit_that_is_kept_between_commands_is_changed_unseen(kind: str, cases: Callable[[int, int], int]) -> None:
    shown = attacked("--count", cases(12, 100), "--seed", 1, "--only", kind, "--how", "digit")
    assert f"| {kind} |" in shown
