"""What ``extract`` answers a person, of extractions of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import fedcache

from fedcache.commands.extract import arrays_table, bad_lines, describe_line, growth_lines, text_lines
from fedcache.errors import Exit
from fedcache.extract.result import Extraction


def done(**changes: Any) -> Extraction:
    return Extraction(
        **{"path": Path("/s"), "dataset": {"slug": "x"}, "arrays": [], "images": 2000, "ok": 2000, **changes}
    )


TEXT = {"backbone": "glyph-clip", "templates": ["a {}"]}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"seconds": 1234.5, "decoded": 1999, "rate": 1234.56, "workers": 2, "busy": 0.956},
         "1,999 images in 1,234.5 s: 1,234.6 images/s with 2 processes; decoding and the model had 96% of the cores."),
        ({"seconds": 2.0, "decoded": 9, "rate": 4.5, "workers": 1, "busy": 1.0, "ok": 1998},
         "9 images in 2.0 s: 4.5 images/s with 1 process; decoding and the model had 100% of the cores, 2 "
         "quarantined."),
        ({"seconds": 2.0, "decoded": 9, "rate": 4.5, "workers": 1, "busy": 1.0, "ok": 0},
         "9 images in 2.0 s: 4.5 images/s with 1 process; decoding and the model had 100% of the cores."),
        ({"seconds": 3600.4, "rate": 1000.4}, "Plan for 2,000 images: about 1,000 images/s, 3,600 s."),
        ({"arrays": [{"state": "complete"}, {"state": "to compute"}]},
         "Plan for 2,000 images; their rate is not known, as weights are missing."),
        ({"text": [{**TEXT, "state": "to compute"}]},
         "The features of all 2,000 images are there; only text features are to compute."),
        ({"text": [{**TEXT, "state": "computed"}], "ok": 1999},
         "The features of all images were there: 1,999 of 2,000 images, 1 quarantined. Text features were computed."),
        ({"text": [{**TEXT, "state": "current"}], "arrays": [{"state": "complete"}]},
         "Everything is there: 2,000 of 2,000 images. Nothing was computed."),
    ],
)  # fmt: skip
def test_one_sentence_says_what_was_computed(changes: dict[str, Any], line: str) -> None:
    assert describe_line(done(**changes)) == line


def test_what_became_of_an_earlier_state_of_the_dataset_is_said() -> None:
    growth = {"new": 2, "vanished": 1, "reused_chunks": 3, "forward_passes": 4}
    assert growth_lines(done(growth=growth, vanished=1)) == [
        "Since the store it grows from: 2 images new, 1 vanished, 3 chunks reused, 4 forward passes."
    ]
    assert growth_lines(done(vanished=1000)) == [
        "1,000 rows of images that are no longer in the dataset are kept and never used."
    ]
    assert growth_lines(done()) == []


def test_what_became_of_templates_is_said_unless_nothing_did() -> None:
    states = ("computed", "made current", "current", "to compute", "complete")
    assert text_lines(done(text=[{**TEXT, "state": state} for state in states])) == [
        'Text of glyph-clip: "a {}", computed and current from now on.',
        'Text of glyph-clip: "a {}", current again, as stored.',
        'Text of glyph-clip: "a {}", to be computed.',
    ]


def bad(count: int) -> list[dict[str, Any]]:
    return [{"row": i, "name": f"{i}.png\n", "reason": "no picture"} for i in range(count)]


def test_ten_unreadable_images_are_named_and_the_others_found() -> None:
    leave = "could not be read; training, scoring and export leave"
    assert bad_lines([], Path("/s")) == []
    assert bad_lines(bad(1), Path("/s")) == [
        f"1 image {leave} it out:", "  0.png\\x0a: no picture", "  /s/quarantine.jsonl",
    ]  # fmt: skip
    ten = bad_lines(bad(10), Path("/s"))
    assert (ten[0], ten[10], ten[11:]) == (
        f"10 images {leave} them out:", "  9.png\\x0a: no picture", ["  /s/quarantine.jsonl"],
    )  # fmt: skip
    many = bad_lines(bad(1011), Path("/s"))
    assert (many[0], many[11:]) == (f"1,011 images {leave} them out:", ["  and 1,001 more: /s/quarantine.jsonl"])


def test_every_array_is_a_row() -> None:
    array = {"key": "a-1", "backbone": "a", "recipe": {"size": 32}, "shape": [9, 1, 4], "dtype": "float16"}
    table: Any = arrays_table(
        done(arrays=[{**array, "state": "complete"}, {**array, "state": "new", "forward_batches": 7}])
    )
    assert table.columns == ("array", "backbone", "shape", "dtype", "before this run", "forward batches")
    assert table.rows == [
        ("a-1", "a@32", "9x1x4", "float16", "complete", ""), ("a-1", "a@32", "9x1x4", "float16", "new", 7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("--clients", 3),
        ("--alpha", 1),
        ("--shards", 2),
        ("--shots", 4),
        ("--option", "a=1"),
        ("--seed", 1),
        ("--out", "x"),
    ],
)
def test_options_of_a_scheme_without_one_are_refused(words: tuple[object, ...]) -> None:
    refused = fedcache("extract", "--dataset", "digits", "--backbones", "glyph-clip", *words, "--json")
    assert refused.code == Exit.USAGE
    said = "Options of a scheme were given without --partition, which cuts one store per client."
    assert refused.envelope["error"]["message"] == said
