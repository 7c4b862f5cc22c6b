"""What is said and settled before a run is trained."""

import pytest
from arrays import ingested
from command import ok


@pytest.mark.parametrize(
    ("words", "notes", "warnings"),
    [
        (("fedavg",), ["Rounds 100", "Clients a round all"], []),
        (("fed3r",), ["Clients a round all"], []),
        (("fed3r", "--rounds", 3, "--participation", "all"), [], ["--rounds 3"]),
        (("fedavg", "--rounds", 1, "--participation", 2), [], []),
    ],
)
def test_what_the_paper_settles_is_said_unless_it_was_asked_for(tmp_path, words, notes, warnings):
    ingested(tmp_path)
    done = ok("train --method", *words, "--scheme", "iid", "--clients", 3)
    assert "dataset last extracted" in done.err
    said = [line for line in done.err.splitlines() if "paper (--" in line]
    assert [line.partition(":")[0] for line in said] == notes
    warned = done.envelope["warnings"]
    assert len(warned) == len(warnings)
    assert all(words in line for words, line in zip(warnings, warned, strict=True))
