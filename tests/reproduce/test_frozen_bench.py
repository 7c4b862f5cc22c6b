"""``reproduce frozen-bench``: settings chosen on validation rows, ranks with a critical difference, stored runs."""

import json
import math
from pathlib import Path

import pytest
from command import ok, words_of
from failing_command import must_fail
from pictures import folder
from refusal import refused

from fedcache.errors import FedcacheError
from fedcache.federate.methods import METHODS
from fedcache.reproduce.frozen_bench.measure import BenchScore, Block
from fedcache.reproduce.frozen_bench.page import as_json, markdown, rankings, study_data
from fedcache.reproduce.frozen_bench.study import TEXTS, label_of, parse_study, read_study

TINY = {
    "title": "Which?",
    "rounds": 2,
    "participation": "all",
    "seeds": "0-1",
    "search_seeds": "0",
    "validation": "0.5",
    "limit": 100,
    "data": {"shapes": {"dataset": "digits"}},
    "backbones": {"glyph-clip": {}},
    "partitions": {
        "iid": {"scheme": "iid", "clients": 2},
        "skewed": {"scheme": "dirichlet", "clients": 2},
    },
    "treatments": {
        "fed3r": {"family": "one round", "search": {"lam": ["0.1", "1"]}},
        "ncm": {"method": "fedncm", "family": "one round"},
        "fedavg": {"family": "many rounds"},
        "clip-zs": {"family": "class texts"},
    },
}
HERE = Path(__file__).parents[2]


def blocks(count):
    return [
        Block("shapes", "glyph-clip" if i % 2 else "pixels", "iid" if i < 2 else "skewed")
        for i in range(count)
    ]


def scores(*table):
    """One seed each; None is a treatment that could not be trained."""
    return [
        BenchScore(block, label, (value,), value, {}, 1, 10.0, 0.5, ("ab",))
        if value is not None
        else BenchScore(block, label, why_not="no")
        for label, values in table
        for block, value in zip(blocks(len(values)), values, strict=True)
    ]


def test_the_methods_that_read_stored_features_are_compared():
    study = read_study()
    compared = {t.method for t in study.treatments.values()}
    features = {name for name, m in METHODS.items() if m.needs <= {"labels", *TEXTS} and m.needs}
    assert compared <= features
    # A new method is compared when the study is run again, which takes hours.
    assert len(features - compared) <= 3
    assert len(study.treatments) >= 55
    fixed = {
        label
        for label, t in study.treatments.items()
        if t.points == 1 and METHODS[t.method].gradient
    }
    assert fixed <= {"lp-plus-plus"}, "rates are chosen, where there are some"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"treatments": {"fedavgg": {"family": "x"}}}, "fedavgg"),
        ({"treatments": {"fedavg": {"family": "x", "search": {"nonsense": ["1"]}}}}, "nonsense"),
        ({"partitions": {"odd": {"scheme": "iid", "options": {"alpha": 1}}}}, "alpha"),
    ],
)
def test_a_wrong_file_is_named(change, words):
    with pytest.raises(FedcacheError, match=words):
        parse_study({**TINY, **change})


def test_data_have_short_names_and_parts_are_chosen_by_them():
    study = read_study()
    found = {
        spec: label_of(spec)
        for spec in ("digits", "folder:/a/pacs/", "arrays:b/medical.npz", "paper:office10")
    }
    assert list(found.values()) == ["digits", "pacs", "medical", "office10"]
    assert list(study.with_data(["digits", "mine=folder:/a/pacs"]).data) == ["digits", "mine"]
    refused(lambda: study.with_data(["folder:/a/pacs", "folder:/b/pacs"]), "pacs")
    part = study.only({"treatment": ["fedavg", "fed3r"], "partition": ["iid"]})
    assert (list(part.treatments), list(part.partitions)) == (["fed3r", "fedavg"], ["iid"])


def test_ranks_by_hand():
    rows = scores(
        ("fed3r", (0.9, 0.8, 0.7, 0.6)),
        ("ncm", (0.8, 0.8, 0.6, 0.5)),
        ("fedavg", (0.7, 0.9, None, 0.4)),
    )
    found = rankings(parse_study(TINY), rows)
    whole = found[0]
    # ranks: block 1: 1 2 3; block 2: 2.5 2.5 1; block 3: 1 2 3 (not trained is last); block 4: 1 2 3
    ranks = {s.treatment: s.rank for s in whole.standings}
    assert ranks == {"fed3r": 5.5 / 4, "ncm": 8.5 / 4, "fedavg": 10 / 4}
    by = {s.treatment: s for s in whole.standings}
    assert (by["fed3r"].mean, by["fedavg"].mean) == (pytest.approx(0.75), pytest.approx(2 / 3))
    assert by["fedavg"].failed == 1
    assert by["fedavg"].difference == pytest.approx((-0.2 + 0.1 - 0.2) / 3)
    # q(0.05, 3, infinity) / sqrt 2 is 2.343, as in Demsar's table 5
    assert whole.cd == pytest.approx(2.343 * math.sqrt(3 * 4 / (6 * 4)), abs=2e-3)
    assert whole.alike == ("fed3r", "ncm", "fedavg")
    assert [r.title for r in found[1:]] == ["partition iid", "partition skewed"]


def test_texts_are_ranked_where_there_are_some_and_nowhere_else():
    study = parse_study(TINY)
    rows = scores(("fed3r", (0.9, 0.8)), ("ncm", (0.8, 0.7)), ("fedavg", (0.7, 0.6)))
    rows += [BenchScore(blocks(2)[1], "clip-zs", (0.95,), 0.9, {}, 1, 0.0, 0.0, ("cd",))]
    found = {r.title: [s.treatment for s in r.standings] for r in rankings(study, rows)}
    assert found["all data, from features and labels"] == ["fed3r", "ncm", "fedavg"]
    assert found["where there are class texts"] == ["clip-zs", "fed3r", "ncm", "fedavg"]


def test_the_page_is_made_of_the_values_alone():
    study = parse_study(TINY)
    rows = scores(
        ("fed3r", (0.9, 0.8, 0.7)), ("ncm", (0.8, 0.7, None)), ("fedavg", (0.7, 0.6, 0.5))
    )
    data = study_data(study, rows, {"command": "C", "version": "V", "runs_seconds": 1.0})
    again = json.loads(as_json(data))
    assert markdown(again) == markdown(data)
    page = markdown(data)
    assert "| ncm | 80.00 | not trained |" in page


def test_the_published_page_is_that_of_the_published_values():
    data = json.loads((HERE / "docs" / "frozen-bench.json").read_text(encoding="utf-8"))
    assert (HERE / "docs" / "frozen-bench.md").read_text(encoding="utf-8") == markdown(data)
    trained = [s for s in data["scores"] if s["values"]]
    assert len({s["treatment"] for s in trained}) >= 55


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (words_of("frozen-bench --only treatment=fedavgg"), "fedavg"),
        (words_of("frozen-bench --backbones glyph-clop"), "glyph-clip"),
        (words_of("frozen-bench -o nowhere/page.md"), "mkdir"),
    ],
)
def test_wrong_words_are_answered(words, expected):
    must_fail(expected, "reproduce", *words)


@pytest.mark.slow
def test_settings_are_chosen_by_validation_and_a_second_call_trains_nothing(own_home, tmp_path):
    images = (
        f"shapes=folder:{folder(tmp_path / 'shapes', train=20, test=8, domains=('chalk', 'ink'))}"
    )
    only = [f"--only=treatment={name}" for name in ("fed3r", "fedncm", "solo linear")]
    only += [f"--only=partition={name}" for name in ("iid", "domains")]
    words = (
        "reproduce frozen-bench --on",
        images,
        "--backbones",
        "random-projection:16",
        "--rounds",
        1,
        "--seeds",
        "0,1",
        *only,
        "-o",
        tmp_path / "page.md",
    )
    done = ok(*words)
    data = json.loads((tmp_path / "page.json").read_text())
    assert (tmp_path / "page.md").read_text() == markdown(data)
    results = {}
    for file in (own_home / "runs").glob("*/result.json"):
        result = json.loads(file.read_text())
        results[result["digest"]] = result
    assert len(data["scores"]) == 6
    for score in data["scores"]:
        found = [results[digest] for digest in score["runs"]]
        assert score["values"] == [r["accuracy"]["client_mean"] for r in found]
        assert score["pooled"] == pytest.approx(sum(r["accuracy"]["pooled"] for r in found) / 2)
        assert [r["seeds"] for r in found] == [[0], [1]]
        assert all("validation" not in r for r in found), (
            "the runs that are compared train on all training rows"
        )
        method, scheme = found[0]["method"], found[0]["partition"]["scheme"]
        tried = [r for r in results.values() if "validation" in r and r["method"] == method]
        tried = [r for r in tried if r["partition"]["scheme"] == scheme]
        assert len(tried) == (score["points"] if score["points"] > 1 else 0)
        if tried:
            settings = {name: float(value) for name, value in score["settings"].items()}
            chosen = next(r for r in tried if settings.items() <= r["hyperparameters"].items())
            assert chosen["validation"]["mean"] == max(r["validation"]["mean"] for r in tried)
    # All treatments of a block and seed have one partition.
    for part in ("iid", "domains"):
        runs = [
            [results[d] for d in s["runs"]]
            for s in data["scores"]
            if s["block"]["partition"] == part
        ]
        for seed in (0, 1):
            assert len({r[seed]["partition"]["digest"] for r in runs}) == 1
    before = {p: p.stat().st_mtime_ns for p in (own_home / "runs").glob("*/result.json")}
    assert ok(*words).data == done.data
    assert {p: p.stat().st_mtime_ns for p in (own_home / "runs").glob("*/result.json")} == before
