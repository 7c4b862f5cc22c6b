"""What is said and settled before a run is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from arrays import ingested
from command import ok

PAPERS_ROUNDS = "Rounds 100: the setting of fedavg's paper (--rounds chooses)."
PAPERS_SHARE = "Clients a round {}: the setting of {}'s paper (--participation chooses)."


@pytest.mark.parametrize(
    ("words", "notes", "warnings"),
    [
        (("fedavg",), [PAPERS_ROUNDS, PAPERS_SHARE.format("all", "fedavg")], []),
        (("fedavg", "--rounds", 1, "--participation", 2), [], []),
        (("fed3r",), [PAPERS_SHARE.format("all", "fed3r")], []),
        (("fed3r", "--rounds", 1, "--participation", "all"), [], []),
        (
            ("fed3r", "--rounds", 3, "--participation", "all"),
            [],
            ["fed3r takes one round; --rounds 3 changes nothing."],
        ),
        (("central", "--rounds", 1), [], []),
    ],
)
def test_what_the_paper_settles_is_said_unless_it_was_asked_for(
    tmp_path: Path, words: tuple[object, ...], notes: list[str], warnings: list[str]
) -> None:
    ingested(tmp_path)
    done = ok("train", "--method", *words, "--scheme", "iid", "--clients", 3)
    assert [line for line in done.err.splitlines() if "paper (--" in line] == notes
    assert done.envelope["warnings"] == warnings
