"""Swept values that change nothing: which are trained without, refused or said, and by what points are ranked."""

import pytest
from arrays import ingested
from command import data_of
from failing_command import must_fail
from refusal import refused
from setting_lines import set_to, swept
from text_tables import rows_of

import fedcache as fc
from fedcache.config import TrainConfig
from fedcache.grids.points import points_that_differ, settings_for
from fedcache.grids.result import without_effect
from fedcache.runs.score import score_of


def test_a_key_reaches_the_methods_that_have_it_and_the_others_are_named():
    points, said = points_that_differ(
        ["fedavg", "fed3r"], swept("lr=0.1,1 rounds=1"), TrainConfig(set={"lam": "2"})
    )
    assert points == [
        ("fedavg", {"lr": "0.1", "rounds": "1"}),
        ("fedavg", {"lr": "1", "rounds": "1"}),
        ("fed3r", {"rounds": "1"}),
    ]
    assert ["fed3r" in line and "lr" in line for line in said] == [True, False]
    assert ["fedavg" in line and "lam" in line for line in said] == [False, True]
    given = {"lam": "2", "feat_post": "l2"}
    assert settings_for("fed3r", ["fedavg", "fed3r"], given) == given
    assert settings_for("fedavg", ["fedavg", "fed3r"], given) == {"feat_post": "l2"}
    assert settings_for("fedavg", ["fedavg"], {"lam": "2"}) == {"lam": "2"}, (
        "what none has is refused by name"
    )


@pytest.mark.parametrize(
    ("method", "key", "values", "settings"),
    rows_of(
        """
        fedavg | momentum | 0.5,1      |
        fedavg | bn_mode  | avg,local  | bn=false
        fed3r  | reg_bias | true,false |
        gh-ofl | shrink   | 0.1,0.2    | head=nb
        """
    ),
)
def test_a_sweep_of_what_is_not_read_is_refused(method, key, values, settings):
    config = TrainConfig(set=set_to(settings))
    refused(
        lambda: points_that_differ([method], swept(f"{key}={values}"), config), f"--sweep {key}"
    )


def test_what_one_setting_turns_off_is_trained_once_there():
    points, said = points_that_differ(
        ["fedavg"], swept("opt=adam,sgd momentum=0.5,0"), TrainConfig()
    )
    assert points == [
        ("fedavg", {"opt": "adam"}),
        ("fedavg", {"opt": "sgd", "momentum": "0.5"}),
        ("fedavg", {"opt": "sgd", "momentum": "0"}),
    ]
    assert len(said) == 1
    assert "opt=adam" in said[0]


def test_settings_without_an_effect_on_any_figure_are_found():
    def points(*means):
        settings = [{"lr": lr, "wd": wd} for lr in "12" for wd in "01"]
        return [
            ("m", sweep, {"accuracy": {"mean": mean}})
            for sweep, mean in zip(settings, means, strict=True)
        ]

    assert without_effect(points(0.5, 0.5, 0.6, 0.6)) == ["wd"]
    assert without_effect(points(0.5, 0.5, 0.6, 0.7)) == []


@pytest.mark.slow
def test_a_grid_is_ranked_by_the_score_that_is_asked_for(tmp_path):
    ingested(tmp_path)
    dealt = "--scheme dirichlet --alpha 0.3 --clients 3 --rounds 1"
    words = f"grid fedavg,solo --sweep lr=0.1,0.001 {dealt}"
    for score in ("pooled", "client-mean"):
        data = data_of(f"{words} --score {score}")
        figures = {p["digest"]: score_of(p, score).mean for p in data["points"]}
        assert data["score"] == score
        assert figures[data["best"]["digest"]] == max(v for v in figures.values() if v is not None)
    # one score for one model and models of clients
    assert data_of(words)["score"] == "client-mean"
    assert data_of(f"grid fedavg,fed3r {dealt}")["score"] == "own"
    must_fail("", f"{words} --score median")
    grid = fc.grid(["fedavg", "solo"], rounds=[1], scheme=["iid"], clients=[3], score="pooled")
    assert grid.scored_by == "pooled"
