"""Commands that write a file of runs write nothing where no run can be shown, and an earlier file stays as it is."""

import pytest
from command import fedcache
from failing_command import must_fail_store

WRITERS = {
    "report": ("report", "-o", "page.html"),
    "figure": ("figure", "curves", "-o", "page.pdf"),
    "compare": ("compare", "-o", "page.md"),
    "diagram": ("compare", "--plot", "page.svg"),
}


@pytest.mark.parametrize("runs", ["none", "unfinished", "damaged"])
@pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
def test_no_file_is_written_of_no_run(words, runs, own_home, tmp_path):
    name = {"unfinished": "config.toml", "damaged": "result.json"}.get(runs)
    if name is not None:
        run = own_home / "runs/0123456789abcdef"
        run.mkdir(parents=True)
        (run / name).write_text("[train]\n")
    file = tmp_path / words[-1]
    file.write_text("an earlier page")
    assert fedcache(*words[:-1], file).code == (5 if runs == "damaged" else 4)
    assert file.read_text() == "an earlier page"


@pytest.mark.parametrize(
    "words", [*WRITERS.values(), ("compare",), ("runs", "list")], ids=lambda w: " ".join(w[:2])
)
def test_a_selection_without_a_run_is_the_error_of_a_home_without_runs(words, tmp_path):
    asked = [tmp_path / word if word.startswith("page.") else word for word in words]
    must_fail_store("fed3r", *asked, "method:fed3r")
    assert not list(tmp_path.glob("page.*"))
