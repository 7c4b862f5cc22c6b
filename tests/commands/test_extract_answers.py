"""What ``extract`` answers a person, of extractions of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from failing_command import must_fail

from fedcache.commands.extract import describe_line
from fedcache.extract.result import Extraction


def done(**changes: Any) -> Extraction:
    return Extraction(
        **{
            "path": Path("/s"),
            "dataset": {"slug": "x"},
            "arrays": [],
            "images": 2000,
            "ok": 2000,
            **changes,
        }
    )


TEXT = {"backbone": "glyph-clip", "templates": ["a {}"]}


RAN = {"seconds": 1234.5, "decoded": 1999, "rate": 1234.56, "workers": 2, "busy": 0.956}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (RAN, ["1,999 images", "1,234.5 s", "1,234.6 images/s", "2 processes", "96%"]),
        ({"seconds": 3600.4, "rate": 1000.4}, ["Plan for 2,000", "1,000 images/s", "3,600 s"]),
        (
            {"text": [{**TEXT, "state": "computed"}], "ok": 1999},
            ["1,999 of 2,000", "1 quarantined", "Text features"],
        ),
        (
            {"text": [{**TEXT, "state": "current"}], "arrays": [{"state": "complete"}]},
            ["Nothing was computed"],
        ),
    ],
)
def test_one_sentence_says_what_was_computed(changes: dict[str, Any], said: list[str]) -> None:
    line = describe_line(done(**changes))
    assert [words for words in said if words not in line] == []


@pytest.mark.parametrize("words", ["--clients 3", "--option a=1", "--partition-seed 1", "--out x"])
def test_options_of_a_scheme_without_one_are_refused(words: str) -> None:
    must_fail("--partition", f"extract --dataset digits --backbones glyph-clip {words}")
