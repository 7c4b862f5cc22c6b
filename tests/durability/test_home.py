"""A home after a long story: whichever file is changed, no command gives another figure without a word."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked import script

TOOL = Path(__file__).resolve().parents[2] / "tools" / "attack_home.py"


def attacked(*words):
    """What ``tools/attack_home.py`` prints, and that nothing was wrong.

    The tool refuses a file whose kind it does not list, and a listed kind that has no file in the home.
    """
    done = subprocess.run(
        [sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert ": 0 WRONG" in done.stdout
    return done.stdout


def test_a_file_of_an_unknown_kind_that_was_there_for_a_moment_is_seen(tmp_path, home):
    (tmp_path / "watch.py").write_text(f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(TOOL.parent)!r})
import attack_home
story = attack_home.Story(Path({str(tmp_path)!r}))
attack_home.watched(story)
new = story.home / "runs" / "new-kind.json"
new.parent.mkdir(parents=True)
new.write_text("{{}}")
new.unlink()
print(*attack_home.unlisted(story))
""")
    out, err = script(tmp_path / "watch.py", home=home).communicate(timeout=280)
    assert out == "runs/new-kind.json\n", err


def test_no_file_of_a_home_is_changed_unseen(cases):
    count = cases(20, 500)
    assert f"{count} mutations" in attacked("--count", count)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["result", "finished seed"])
def test_no_digit_that_is_kept_between_commands_is_changed_unseen(kind, cases):
    shown = attacked("--count", cases(12, 100), "--seed", 1, "--only", kind, "--how", "digit")
    assert f"| {kind} |" in shown
