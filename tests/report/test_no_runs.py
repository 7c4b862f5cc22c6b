"""Commands that write a file of runs write nothing where no run can be shown, and an earlier file stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import fedcache

WRITERS = {
    "report": ("report", "-o", "page.html"),
    "figure": ("figure", "curves", "-o", "page.pdf"),
    "compare": ("compare", "-o", "page.md"),
    "diagram": ("compare", "--plot", "page.svg"),
}


@pytest.mark.parametrize("earlier", [True, False], ids=["over an earlier file", "a new file"])
@pytest.mark.parametrize(("runs", "code"), [("none", 4), ("unfinished", 4), ("damaged", 5)])
@pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
def test_no_file_is_written_of_no_run(
    words: tuple[str, ...], runs: str, code: int, earlier: bool, own_home: Path, tmp_path: Path
) -> None:
    name = {"unfinished": "config.toml", "damaged": "result.json"}.get(runs)
    if name is not None:
        run = own_home / "runs" / "0123456789abcdef"
        run.mkdir(parents=True)
        (run / name).write_text("[train]\n")
    file = tmp_path / words[-1]
    if earlier:
        file.write_text("an earlier page")
    done = fedcache(*words[:-1], file, "--json")
    assert done.code == code
    assert "Nothing was written" in done.envelope["error"]["message"]
    assert done.envelope["error"]["hint"]
    assert [p.read_text() for p in tmp_path.glob("page.*")] == ["an earlier page"] * earlier


@pytest.mark.parametrize("selection", ["dataset:d2", "method:fed3r", "partition:iid", "tag:mine"])
@pytest.mark.parametrize("words", [*WRITERS.values(), ("compare",), ("runs", "list")], ids=lambda w: " ".join(w[:2]))
def test_a_selection_without_a_run_is_the_error_of_a_home_without_runs(
    words: tuple[str, ...], selection: str, own_home: Path, tmp_path: Path
) -> None:
    asked = [tmp_path / word if word.startswith("page.") else word for word in words]
    done = fedcache(*asked, selection, "--json")
    assert done.code == 4
    assert selection.partition(":")[2] in done.envelope["error"]["message"]
    assert done.envelope["error"]["hint"].startswith("fedcache ")
    assert not list(tmp_path.glob("page.*"))
