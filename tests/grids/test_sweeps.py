"""What a sweep's keys mean: each value is looked at before anything is trained."""

from __future__ import annotations

import pytest
from command import fedcache, ok
from pictures import folder

from fedcache.errors import Exit, FedcacheError
from fedcache.grids.points import combinations, point_groups, split_key, typed_sweep_values, values_of_place


@pytest.mark.parametrize(
    ("methods", "sweeps", "message"),
    [
        (["fedavg"], {"rounds": ["0", "1"]}, "'0' is not a number of at least 1"),
        (["fedavg"], {"rounds": ["1.5"]}, "'1.5' is not a number of at least 1"),
        (["fedavg"], {"clients": ["10", "x"]}, "'x' is not a whole number"),
        (["fedavg"], {"shots": ["2.5"]}, "'2.5' is not a whole number"),
        (["fedavg"], {"alpha": ["0.5", "nan"]}, "'nan' is not a number above 0"),
        (["fedavg"], {"alpha": ["0"]}, "'0' is not a number above 0"),
        (["fedavg"], {"scheme": ["iid", "foo"]}, "scheme"),
        (["fedavg"], {"participation": ["0", "0.5"]}, "participation"),
        (["fedavg"], {"backbones": ["foo"]}, "backbone"),
        (["fedavg"], {"aggregate": ["median", "medain"]}, "medain"),
        (["fedavg"], {"attack": ["sign-flip:2"]}, "sign-flip:2"),
        (["fedavg"], {"byzantine": ["x"]}, "'x' is not a number"),
        (["fedavg"], {"max_share": ["-0.1"]}, "'-0.1' is not a number of at least 0"),
        (["fedavg"], {"dp-noise": ["inf"]}, "'inf' is not a number of at least 0"),
        (["fedavg"], {"dp_seed": ["-1"]}, "'-1' is not a whole number of at least 0"),
        (["fedavg"], {"max_rows_per_client": ["0"]}, "'0' is not a whole number of at least 1"),
        (["fedavg"], {"lr": []}, "--sweep lr has no values"),
        (["fedavg"], {"seeds": ["0", "1"]}, "--sweep seeds: seeds are not swept, every point runs all of them"),
        (["fedavg"], {"eval-every": ["1"]}, "--sweep eval-every: eval_every is the same for all points"),
        (["fedavg"], {"lr": ["0.1", "0.10"]}, "twice: 0.1 and 0.10"),
        (["fedavg"], {"lr": ["0.1", "0.1"]}, "twice"),
        (["fedavg"], {"clients": ["8", "08"]}, "twice: 8 and 08"),
        (["fedavg"], {"lr": ["0.1"], "set.lr": ["0.2"]}, "--sweep lr and --sweep set.lr are the same"),
        (["fedavg", "perfedavg"], {"alpha": ["0.1"]}, "perfedavg has a hyperparameter of that name too"),
        (["fedavg"], {"partition.lr": ["0.1"]}, "lr"),
        (["fedavg"], {"set.alpha": ["0.1"]}, "alpha"),
    ],
)
def test_values_that_cannot_be_are_refused_before_anything_runs(methods, sweeps, message):
    with pytest.raises(FedcacheError) as error:
        combinations(methods, sweeps)
    assert error.value.code is Exit.USAGE
    assert message in str(error.value)
    assert error.value.hint


def test_a_swept_backbone_is_a_known_name_or_an_array_with_its_digest():
    points = combinations(["fedavg"], {"backbones": ["glyph-clip+pixels", "mine-0a1b2c3d", "glyph-clip+mine-0a1b2c3d"]})
    assert [sweep["backbones"] for _, sweep in points][1] == "mine-0a1b2c3d"
    for wrong in ("mine", "mine-0a1b2c3g", "mine-", "glyph-clip+mine", "0a1b2c3d"):
        with pytest.raises(FedcacheError, match="backbone"):
            combinations(["fedavg"], {"backbones": ["glyph-clip", wrong]})


def test_a_name_that_scheme_and_method_have_is_told_apart():
    assert split_key("alpha") == split_key("partition.alpha") == ("partition", "alpha")
    assert split_key("set.alpha") == ("set", "alpha")
    assert values_of_place({"set.alpha": "1", "partition.alpha": "2", "rounds": "3"}, "partition") == {"alpha": "2"}
    apart = point_groups(combinations(["perfedavg"], {"partition.alpha": ["0.1", "5"]}))
    assert apart == [[0], [1]]
    together = point_groups(combinations(["perfedavg"], {"set.alpha": ["0.1", "5"]}))
    assert together == [[0, 1]]


@pytest.mark.slow
def test_every_point_of_a_swept_alpha_has_its_own_rows(tmp_path):
    images = folder(tmp_path / "images", train=12, test=4)
    ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--size", 16)
    words = ("--scheme", "dirichlet", "--clients", 4, "--rounds", 1)
    done = ok("grid", "--method", "perfedavg", *words, "--sweep", "partition.alpha=0.1,50", "--set", "alpha=0.02")
    points = done.data["points"]
    assert [p["partition"]["args"]["alpha"] for p in points] == [0.1, 50.0]
    assert [p["hyperparameters"]["alpha"] for p in points] == [0.02, 0.02]
    assert points[0]["digest"] != points[1]["digest"]
    refused = fedcache("grid", "--method", "fedavg", *words, "--set", "lr=1", "--sweep", "lr=0.1,0.2", "--json")
    assert refused.code == 2
    assert "both" in refused.envelope["error"]["message"] or "--set and in --sweep" in refused.out


def test_values_of_a_run_have_the_type_of_its_option():
    words = {"rounds": "3", "byzantine": "1", "max_share": "0.5", "max_rows_per_client": "7", "dp_clip": "2",
             "dp_noise": "0", "dp_delta": "1e-6", "dp_seed": "4", "max_update_norm": "9", "max_row_norm": "2",
             "attack": "nan:0.2"}  # fmt: skip
    found = typed_sweep_values(words)
    assert found == {"rounds": 3, "byzantine": 1.0, "max_share": 0.5, "max_rows_per_client": 7, "dp_clip": 2.0,
                     "dp_noise": 0.0, "dp_delta": 1e-6, "dp_seed": 4, "max_update_norm": 9.0,
                     "max_row_norm": 2.0}  # fmt: skip
    whole = {key for key, value in found.items() if type(value) is int}
    assert whole == {"rounds", "max_rows_per_client", "dp_seed"}
    with pytest.raises(FedcacheError, match="--sweep rounds: 'x' is no number"):
        typed_sweep_values({"rounds": "x"})


def test_what_is_written_twice_is_named_with_the_values_that_are_left():
    with pytest.raises(FedcacheError) as error:
        combinations(["fedavg"], {"lr": ["1", "2", "1.0", "3"]})
    assert error.value.message == "--sweep lr names a value twice: 1 and 1.0."
    assert error.value.hint == "--sweep lr=1,2,3"
