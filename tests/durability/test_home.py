"""A home after a long story: whichever file is changed, no command gives another figure without a word."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "attack_home.py"


def attacked(*words):
    """What ``tools/attack_home.py`` prints, and that nothing was wrong."""
    done = subprocess.run(
        [sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ": 0 WRONG" in done.stdout
    return done.stdout


def test_every_kind_of_file_that_is_kept_in_a_home_is_attacked(tmp_path):
    """A kind of file that a command writes or reads, and that the tool does not list, fails here."""
    script = f"""
import json, os, sys
sys.path.insert(0, {str(TOOL.parent)!r})
import attack_home as tool
os.chdir({str(tmp_path)!r})
with tool.search_that_prunes():
    story = tool.tell(tool.Path({str(tmp_path)!r}))
unknown = tool.unlisted(story)
(story.home / "runs" / "new-kind.json").write_text("{{}}")
(story.home / "runs" / "new-kind.json").unlink()
there = {{tool.kind_of(name) for name in story.files()}}
print(json.dumps([unknown, tool.unlisted(story), sorted(tool.KINDS.keys() - there)]))
"""
    home = {"FEDCACHE_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **home},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    unknown, with_a_new_kind, never_made = json.loads(done.stdout.splitlines()[-1])
    assert unknown == []
    assert with_a_new_kind == ["runs/new-kind.json"], (
        "a file that was there for a moment is seen too"
    )
    assert never_made == [], "a kind of which the story makes no file is never attacked"


def test_no_file_of_a_home_is_changed_unseen(cases):
    count = cases(40, 500)
    assert f"{count} mutations" in attacked("--count", count)


@pytest.mark.parametrize("kind", ["result", pytest.param("finished seed", marks=pytest.mark.full)])
def test_no_digit_that_is_kept_between_commands_is_changed_unseen(kind, cases):
    shown = attacked("--count", cases(12, 100), "--seed", 1, "--only", kind, "--how", "digit")
    assert f"| {kind} |" in shown
