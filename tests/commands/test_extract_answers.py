"""What ``extract`` answers a person, of extractions of every kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command import fedcache

from fedcache.commands.extract import bad_lines, describe_line, growth_lines, text_lines
from fedcache.errors import Exit
from fedcache.extract.result import Extraction


def done(**changes: Any) -> Extraction:
    return Extraction(
        **{"path": Path("/s"), "dataset": {"slug": "x"}, "arrays": [], "images": 2000, "ok": 2000, **changes}
    )


TEXT = {"backbone": "glyph-clip", "templates": ["a {}"]}


RAN = {"seconds": 1234.5, "decoded": 1999, "rate": 1234.56, "workers": 2, "busy": 0.956}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (RAN, ["1,999 images", "1,234.5 s", "1,234.6 images/s", "2 processes", "96%"]),
        ({**RAN, "workers": 1, "ok": 1998}, ["1 process;", "2 quarantined"]),
        ({"seconds": 3600.4, "rate": 1000.4}, ["Plan for 2,000", "1,000 images/s", "3,600 s"]),
        ({"arrays": [{"state": "complete"}, {"state": "to compute"}]}, ["Plan for 2,000", "not known"]),
        ({"text": [{**TEXT, "state": "to compute"}]}, ["only text features"]),
        ({"text": [{**TEXT, "state": "computed"}], "ok": 1999}, ["1,999 of 2,000", "1 quarantined", "Text features"]),
        ({"text": [{**TEXT, "state": "current"}], "arrays": [{"state": "complete"}]}, ["Nothing was computed"]),
    ],
)
def test_one_sentence_says_what_was_computed(changes: dict[str, Any], said: list[str]) -> None:
    line = describe_line(done(**changes))
    assert [words for words in said if words not in line] == []


def test_what_became_of_an_earlier_state_of_the_dataset_is_said() -> None:
    growth = {"new": 2, "vanished": 1, "reused_chunks": 3, "forward_passes": 4}
    (line,) = growth_lines(done(growth=growth, vanished=1))
    assert re.findall(r"\d+", line) == ["2", "1", "3", "4"]
    (line,) = growth_lines(done(vanished=1000))
    assert "1,000 rows" in line
    assert growth_lines(done()) == []


def test_what_became_of_templates_is_said_unless_nothing_did() -> None:
    states = ("computed", "made current", "current", "to compute", "complete")
    lines = text_lines(done(text=[{**TEXT, "state": state} for state in states]))
    assert [words in line for words, line in zip(("computed", "again", "to be"), lines, strict=True)] == [True] * 3


def bad(count: int) -> list[dict[str, Any]]:
    return [{"row": i, "name": f"{i}.png\n", "reason": "no picture"} for i in range(count)]


def test_ten_unreadable_images_are_named_and_the_others_counted() -> None:
    assert bad_lines([], Path("/s")) == []
    lines = bad_lines(bad(10), Path("/s"))
    assert lines[10:] == ["  9.png\\x0a: no picture", "  /s/quarantine.jsonl"]
    many = bad_lines(bad(1011), Path("/s"))
    assert len(many) == 12
    assert "1,001 more" in many[-1]


@pytest.mark.parametrize("words", [("--clients", 3), ("--option", "a=1"), ("--seed", 1), ("--out", "x")])
def test_options_of_a_scheme_without_one_are_refused(words: tuple[object, ...]) -> None:
    refused = fedcache("extract", "--dataset", "digits", "--backbones", "glyph-clip", *words, "--json")
    assert refused.code == Exit.USAGE
    assert "--partition" in refused.envelope["error"]["message"]
