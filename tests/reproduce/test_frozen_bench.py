"""``reproduce frozen-bench``: settings chosen on validation rows, ranks with a critical difference, stored runs."""

import json
import math
from dataclasses import replace

import pytest
from command import data_of
from failing_command import must_fail
from files_now import times_of
from loaded_files import content
from pictures import folder
from refusal import refused

from fedcache import FedcacheError, register
from fedcache.config import Home
from fedcache.federate.methods import METHODS
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.reproduce.frozen_bench.measure import BenchRun, BenchScore, Block
from fedcache.reproduce.frozen_bench.page import markdown, rankings, study_data
from fedcache.reproduce.frozen_bench.study import TEXTS, label_of, parse_study, read_study
from fedcache.reproduce.planning import Options

TINY = {
    "title": "Which?",
    "rounds": 2,
    "participation": "all",
    "seeds": "0-1",
    "search_seeds": "0",
    "validation": "0.5",
    "extend": 2,
    "client_prior": "fitted",
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


def scores(**treatments):
    """Of each treatment the values of some blocks, one seed each; None is one that could not be trained."""
    made = []
    for label, values in treatments.items():
        for i, value in enumerate(values):
            block = Block("shapes", ("pixels", "glyph-clip")[i % 2], ("iid", "skewed")[i // 2])
            if value is None:
                made.append(BenchScore(block, label, why_not="no"))
            else:
                made.append(BenchScore(block, label, (value,), value, bytes_up=10.0, seconds=0.5))
    return made


def test_the_methods_that_read_stored_features_are_compared():
    treatments = read_study().treatments
    compared = {t.method for t in treatments.values()}
    features = {name for name, m in METHODS.items() if m.needs <= {"labels", *TEXTS} and m.needs}
    assert compared <= features
    # A new method is compared when the study is run again, which takes hours.
    assert len(features - compared) <= 3
    assert len(treatments) >= 55
    fixed = set()
    for label, treatment in treatments.items():
        method = METHODS[treatment.method]
        # A method without labels has no labels to choose its rates by.
        if treatment.points == 1 and method.gradient and "labels" in method.needs:
            fixed.add(label)
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
        parse_study(TINY | change)


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
    register("method", replace(METHODS["fedncm"], name="mine"))
    assert study.only({"treatment": ["mine"]}).treatments["mine"].is_global
    part = study.only({"treatment": ["fedavg", "fed3r"], "partition": ["iid"]})
    assert list(part.treatments) == ["fed3r", "fedavg"]
    assert list(part.partitions) == ["iid"]


def test_ranks_by_hand():
    rows = scores(
        fed3r=(0.9, 0.8, 0.7, 0.6), ncm=(0.8, 0.8, 0.6, 0.5), fedavg=(0.7, 0.9, None, 0.4)
    )
    iid, _one_model, skewed, _one_model_of_skewed = rankings(parse_study(TINY), rows)
    # Blocks of iid: ranks 1 2 3, and 2.5 2.5 1. Blocks of skewed: 1 2 3 (not trained is last), and 1 2 3.
    ranks = {s.treatment: s.rank for s in iid.standings}
    assert ranks == {"fed3r": 1.75, "ncm": 2.25, "fedavg": 2.0}
    by = {s.treatment: s for s in skewed.standings}
    assert {name: s.rank for name, s in by.items()} == {"fed3r": 1.0, "ncm": 2.0, "fedavg": 3.0}
    assert by["fed3r"].mean == pytest.approx(0.65)
    assert by["fedavg"].mean == pytest.approx(0.4)
    assert by["fedavg"].failed == 1
    assert by["fedavg"].difference == pytest.approx(-0.2)
    assert by["fedavg"].interval is None, "one data set tells nothing about others"
    assert [iid.title, _one_model.title, skewed.title] == [
        "partition iid",
        "partition iid: one model, without prior",
        "partition skewed",
    ]


def test_one_model_is_compared_with_personal_models_after_it_has_the_client_prior():
    study = parse_study({**TINY, "treatments": {**TINY["treatments"], "solo": {"family": "own"}}})
    block = Block("shapes", "pixels", "skewed")
    rows = [
        BenchScore(block, "fed3r", (0.7, 0.5), 0.6, with_prior=(0.9, 0.9), edges=("lam",)),
        BenchScore(block, "ncm", (0.65, 0.65), 0.65),
        BenchScore(block, "solo", (0.8, 0.8), 0.8),
    ]
    with_prior, without = rankings(study, rows)
    assert [s.treatment for s in with_prior.standings] == ["fed3r", "solo", "ncm"]
    assert [s.treatment for s in without.standings] == ["ncm", "fed3r"], "no personal models"
    first = with_prior.standings[0]
    assert first.mean == pytest.approx(0.9)
    assert first.without_prior == pytest.approx(0.6)
    assert first.unstable == 1
    assert first.edges == 1


def test_a_difference_has_an_interval_over_data_sets_and_not_over_blocks():
    rows = []
    for data, difference in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        for backbone in ("pixels", "glyph-clip"):
            block = Block(data, backbone, "iid")
            rows.append(BenchScore(block, "fed3r", (0.9,), 0.9))
            rows.append(BenchScore(block, "ncm", (0.9 - difference,), 0.5))
    second = rankings(parse_study(TINY), rows)[0].standings[1]
    # Student's interval of -0.1, -0.2, -0.3 with two degrees of freedom: t = 4.303.
    half = 4.303 * 0.1 / math.sqrt(3)
    assert second.difference == pytest.approx(-0.2)
    assert second.interval == (pytest.approx(-0.2 - half, 1e-3), pytest.approx(-0.2 + half, 1e-3))


def test_blocks_that_a_treatment_was_not_measured_in_have_no_rank():
    iid = rankings(parse_study(TINY), scores(fed3r=(0.9, 0.8), ncm=(0.8, 0.9), fedavg=(0.7,)))[0]
    assert len(iid.blocks) == 1
    assert [(s.treatment, s.rank, s.failed) for s in iid.standings] == [
        ("fed3r", 1.0, 0),
        ("ncm", 2.0, 0),
        ("fedavg", 3.0, 0),
    ]


def test_texts_are_ranked_where_there_are_some_and_nowhere_else():
    rows = scores(fed3r=(0.9, 0.8), ncm=(0.8, 0.7), fedavg=(0.7, 0.6))
    rows += scores(**{"clip-zs": (0.0, 0.95)})[1:]  # the second block alone has class texts
    found = {r.title: [s.treatment for s in r.standings] for r in rankings(parse_study(TINY), rows)}
    assert found["partition iid"] == ["fed3r", "ncm", "fedavg"]
    assert found["partition iid: data with class texts"] == ["clip-zs", "fed3r", "ncm", "fedavg"]


@pytest.mark.parametrize(
    ("key", "values", "accuracy", "chosen", "edges"),
    [
        ("lr", ("0.03", "0.1"), lambda x: -abs(x - 0.3), "0.33", ()),
        ("lr", ("0.03", "0.1"), lambda x: -abs(x - 0.01), "0.009", ()),
        ("lr", ("0.03", "0.1"), lambda x: x, "1.1", ("lr",)),
        ("lr", ("0.03", "0.1"), lambda _x: 0.5, "0.03", ()),  # a tie is no improvement
        ("momentum", ("0.5", "0.9"), lambda x: x, "0.9", ("momentum",)),  # 1.6 is not allowed
    ],
)
def test_values_beyond_a_range_are_tried_while_validation_improves(
    key, values, accuracy, chosen, edges, tmp_path, monkeypatch
):
    def best(_bench, _block, _store, _treatment, searched):
        value = max(searched[key], key=lambda text: accuracy(float(text)))
        return {key: value}, accuracy(float(value))

    monkeypatch.setattr(BenchRun, "_best", best)
    study = parse_study(
        {**TINY, "treatments": {"fedavg": {"family": "x", "search": {key: values}}}}
    )
    bench = BenchRun(study, Home(tmp_path), Options(), tmp_path, Silent(), Stop())
    found = bench._choose(Block("a", "b", "c"), None, study.treatments["fedavg"])
    assert found.settings == {key: chosen}
    assert found.edges == edges


def test_the_published_page_is_that_of_the_published_values():
    data = json.loads(content("docs/frozen-bench.json"))
    assert content("docs/frozen-bench.md") == markdown(data)
    trained = [s for s in data["scores"] if s["values"]]
    assert len({s["treatment"] for s in trained}) >= 55


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--only treatment=fedavgg", "fedavg"),
        ("--backbones glyph-clop", "glyph-clip"),
        ("-o nowhere/page.md", "mkdir"),
        ("--add nowhere.json", "nowhere.json"),
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
    done = data_of(*words)
    data = json.loads((tmp_path / "page.json").read_text())
    assert (tmp_path / "page.md").read_text() == markdown(data)

    before = times_of(own_home, "*/result.json")
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
    assert data_of(*words) == done
    assert times_of(own_home, "*/result.json") == before
    # Results of one call can be added to another call, which trains only what they lack.
    added = data_of(f"reproduce frozen-bench --rounds 1 --seeds 0,1 --add {tmp_path}/page.json")
    assert added["scores"] == data["scores"]
    assert added["rankings"] == data["rankings"]
    assert times_of(own_home, "*/result.json") == before


def written(place, **changes):
    """A small result file of the study, with changes to its parts."""
    study = read_study()
    data = study_data(
        study, [BenchScore(Block("digits", "pixels", "iid"), "fed3r", (0.5,), 0.5)], {}
    )
    place.write_text(json.dumps(data | changes))
    return place


def test_an_added_result_may_have_a_method_that_fedcache_does_not_know(tmp_path):
    data = json.loads(written(tmp_path / "theirs.json").read_text())
    treatments = data["protocol"]["treatments"]
    treatments["new"] = {**treatments["fed3r"], "method": "new"}
    data["scores"][0] |= {"treatment": "new", "values": [0.75]}
    theirs = written(tmp_path / "theirs.json", **data)
    first = written(tmp_path / "first.json")
    line = "reproduce frozen-bench --only partition=iid"
    added = data_of(f"{line} --add {theirs} --add {first} -o {tmp_path}/both.md")
    standings = added["rankings"][0]["standings"]
    assert [(s["treatment"], s["mean"]) for s in standings] == [("new", 0.75), ("fed3r", 0.5)]
    assert "| new |" in (tmp_path / "both.md").read_text()


def test_results_that_cannot_be_compared_are_refused_by_name(tmp_path):
    good = json.loads(written(tmp_path / "good.json").read_text())
    other_rounds = {**good["protocol"], "rounds": 21}
    treatments = good["protocol"]["treatments"]
    other_fed3r = {**treatments, "fed3r": {**treatments["fed3r"], "family": "x"}}
    (score,) = good["scores"]
    rows = {**score, "treatment": "fedavg", "partitions": ["cd"]}
    for changes, named in (
        ({"schema": "fedcache.frozen-bench/1"}, "frozen-bench/1"),
        ({"protocol": other_rounds}, "rounds 21"),
        ({"protocol": {**good["protocol"], "treatments": other_fed3r}}, "fed3r"),
        ({"scores": [{**score, "values": [1.5]}]}, "1.5"),
        ({"scores": [{**score, "colour": 1}]}, "colour"),
        ({"scores": [{**score, "treatment": "unheard"}]}, "unheard"),
        ({"scores": [{**score, "bytes_up": math.nan}]}, "bytes_up"),
        ({"protocol": {**good["protocol"], "treatments": {"fed3r": "x"}}}, "no result"),
        ({"protocol": {**good["protocol"], "recipe": {"size": "64"}}}, "recipe"),
        ({"scores": [{**score, "partitions": ["ab"]}, rows]}, "have different rows of"),
        ({"scores": [score, score]}, "which was already given"),
    ):
        must_fail(named, "reproduce frozen-bench --add", written(tmp_path / "bad.json", **changes))
    must_fail("--add", f"reproduce fedpcl-table5 --add {tmp_path}/good.json")
