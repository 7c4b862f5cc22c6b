"""``reproduce frozen-bench``: settings chosen on validation rows, ranks with a critical difference, stored runs."""

import json
import math
from pathlib import Path

import pytest
from command import ok
from failing_command import must_fail
from pictures import folder
from refusal import refused

from fedcache.errors import FedcacheError
from fedcache.federate.methods import METHODS
from fedcache.reproduce.frozen_bench.measure import BenchScore, Block
from fedcache.reproduce.frozen_bench.page import markdown, rankings
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


def scores(**treatments):
    """Of each treatment the values of some blocks, one seed each; None is one that could not be trained."""
    made = []
    for label, values in treatments.items():
        for i, value in enumerate(values):
            backbone, part = ("pixels", "glyph-clip")[i % 2], ("iid", "skewed")[i // 2]
            block = Block("shapes", backbone, part)
            if value is None:
                made.append(BenchScore(block, label, why_not="no"))
            else:
                made.append(BenchScore(block, label, (value,), value, {}, 1, 10.0, 0.5, ("ab",)))
    return made


def test_the_methods_that_read_stored_features_are_compared():
    treatments = read_study().treatments
    compared = {t.method for t in treatments.values()}
    features = {name for name, m in METHODS.items() if m.needs <= {"labels", *TEXTS} and m.needs}
    assert compared <= features
    # A new method is compared when the study is run again, which takes hours.
    assert len(features - compared) <= 3
    assert len(treatments) >= 55
    fixed = {
        label for label, t in treatments.items() if t.points == 1 and METHODS[t.method].gradient
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
    for spec, label in (
        ("digits", "digits"),
        ("folder:/a/pacs/", "pacs"),
        ("arrays:b/medical.npz", "medical"),
        ("paper:office10", "office10"),
    ):
        assert label_of(spec) == label
    assert list(study.with_data(["digits", "mine=folder:/a/pacs"]).data) == ["digits", "mine"]
    refused(lambda: study.with_data(["folder:/a/pacs", "folder:/b/pacs"]), "pacs")
    part = study.only({"treatment": ["fedavg", "fed3r"], "partition": ["iid"]})
    assert (list(part.treatments), list(part.partitions)) == (["fed3r", "fedavg"], ["iid"])


def test_ranks_by_hand():
    rows = scores(
        fed3r=(0.9, 0.8, 0.7, 0.6), ncm=(0.8, 0.8, 0.6, 0.5), fedavg=(0.7, 0.9, None, 0.4)
    )
    whole, *parts = rankings(parse_study(TINY), rows)
    # ranks: block 1: 1 2 3; block 2: 2.5 2.5 1; block 3: 1 2 3 (not trained is last); block 4: 1 2 3
    by = {s.treatment: s for s in whole.standings}
    ranks = {name: s.rank for name, s in by.items()}
    assert ranks == {"fed3r": 5.5 / 4, "ncm": 8.5 / 4, "fedavg": 10 / 4}
    assert (by["fed3r"].mean, by["fedavg"].mean) == (pytest.approx(0.75), pytest.approx(2 / 3))
    assert by["fedavg"].failed == 1
    assert by["fedavg"].difference == pytest.approx((-0.2 + 0.1 - 0.2) / 3)
    # q(0.05, 3, infinity) / sqrt 2 is 2.343, as in Demsar's table 5
    assert whole.cd == pytest.approx(2.343 * math.sqrt(3 * 4 / (6 * 4)), abs=2e-3)
    assert whole.alike == ("fed3r", "ncm", "fedavg")
    assert [r.title for r in parts] == ["partition iid", "partition skewed"]


def test_two_treatments_have_their_mean_rank_over_all_blocks():
    rows = scores(fed3r=(0.9, 0.6, 0.6), ncm=(0.8, 0.7, 0.7))
    whole, *_ = rankings(parse_study(TINY), rows)
    assert [(s.treatment, s.rank) for s in whole.standings] == [("ncm", 4 / 3), ("fed3r", 5 / 3)]
    assert whole.cd is None


def test_texts_are_ranked_where_there_are_some_and_nowhere_else():
    rows = scores(fed3r=(0.9, 0.8), ncm=(0.8, 0.7), fedavg=(0.7, 0.6))
    rows += scores(**{"clip-zs": (0.0, 0.95)})[1:]
    found = {r.title: [s.treatment for s in r.standings] for r in rankings(parse_study(TINY), rows)}
    assert found["all data, from features and labels"] == ["fed3r", "ncm", "fedavg"]
    assert found["where there are class texts"] == ["clip-zs", "fed3r", "ncm", "fedavg"]


def test_the_published_page_is_that_of_the_published_values():
    data = json.loads((HERE / "docs" / "frozen-bench.json").read_text(encoding="utf-8"))
    assert (HERE / "docs" / "frozen-bench.md").read_text(encoding="utf-8") == markdown(data)
    trained = [s for s in data["scores"] if s["values"]]
    assert len({s["treatment"] for s in trained}) >= 55


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--only treatment=fedavgg", "fedavg"),
        ("--backbones glyph-clop", "glyph-clip"),
        ("-o nowhere/page.md", "mkdir"),
    ],
)
def test_wrong_words_are_answered(words, expected):
    must_fail(expected, f"reproduce frozen-bench {words}")


@pytest.mark.slow
def test_settings_are_chosen_by_validation_and_a_second_call_trains_nothing(own_home, tmp_path):
    images = folder(tmp_path / "shapes", train=20, test=8, domains=("chalk", "ink"))
    only = [f"--only=treatment={name}" for name in ("fed3r", "fedncm", "solo linear")]
    only += [f"--only=partition={name}" for name in ("iid", "domains")]
    line = "reproduce frozen-bench --backbones random-projection:16 --rounds 1 --seeds 0,1 --on"
    words = (line, f"shapes=folder:{images}", *only, "-o", tmp_path / "page.md")
    done = ok(*words)
    data = json.loads((tmp_path / "page.json").read_text())
    assert (tmp_path / "page.md").read_text() == markdown(data)

    def files():
        return {p: p.stat().st_mtime_ns for p in (own_home / "runs").glob("*/result.json")}

    before = files()
    results = {r["digest"]: r for r in (json.loads(file.read_text()) for file in before)}
    assert len(data["scores"]) == 6
    dealt = {}
    for score in data["scores"]:
        found = [results[digest] for digest in score["runs"]]
        assert score["values"] == [r["accuracy"]["client_mean"] for r in found]
        assert score["pooled"] == pytest.approx(sum(r["accuracy"]["pooled"] for r in found) / 2)
        assert [r["seeds"] for r in found] == [[0], [1]]
        for seed, r in enumerate(found):
            assert "validation" not in r, "runs that are compared train on all training rows"
            place = (score["block"]["partition"], seed)
            dealt.setdefault(place, set()).add(r["partition"]["digest"])
        kind = (found[0]["method"], found[0]["partition"]["scheme"])
        tried = [
            r
            for r in results.values()
            if "validation" in r and (r["method"], r["partition"]["scheme"]) == kind
        ]
        assert len(tried) == (score["points"] if score["points"] > 1 else 0)
        if tried:
            settings = {name: float(value) for name, value in score["settings"].items()}
            chosen = next(r for r in tried if settings.items() <= r["hyperparameters"].items())
            assert chosen["validation"]["mean"] == max(r["validation"]["mean"] for r in tried)
    # All treatments of a block and seed have one partition.
    assert [len(digests) for digests in dealt.values()] == [1] * 4
    assert ok(*words).data == done.data
    assert files() == before
