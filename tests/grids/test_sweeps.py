"""What a sweep's keys mean: each value is looked at before anything is trained."""

import pytest
from refusal import refused
from setting_lines import swept
from text_tables import rows_of

from fedcache.grids.points import (
    combinations,
    point_groups,
    split_key,
    typed_sweep_values,
    values_of_place,
)


@pytest.mark.parametrize(
    ("sweeps", "message"),
    rows_of(
        """
        rounds=0,1              | '0'
        alpha=0.5,nan           | 'nan'
        scheme=iid,foo          | scheme
        backbones=foo           | backbone
        aggregate=median,medain | medain
        max_share=-0.1          | '-0.1'
        dp_seed=-1              | '-1'
        lr=                     | lr has no values
        seeds=0,1               | seeds
        lr=0.1,0.10             | 0.1 and 0.10
        lr=0.1 set.lr=0.2       | lr and --sweep set.lr
        partition.lr=0.1        | lr
        """
    ),
)
def test_values_that_cannot_be_are_refused_before_anything_runs(sweeps, message):
    refused(lambda: combinations(["fedavg"], swept(sweeps)), message)


def test_a_swept_backbone_is_a_known_name_or_an_array_with_its_digest():
    names = ["glyph-clip+pixels", "mine-0a1b2c3d", "glyph-clip+mine-0a1b2c3d"]
    points = combinations(["fedavg"], {"backbones": names})
    assert [sweep["backbones"] for _, sweep in points] == names
    for wrong in ("mine", "mine-0a1b2c3g", "mine-", "glyph-clip+mine", "0a1b2c3d"):
        refused(lambda wrong=wrong: combinations(["fedavg"], {"backbones": [wrong]}), "backbone")


def test_a_name_that_scheme_and_method_have_is_distinguished():
    refused(lambda: combinations(["fedavg", "perfedavg"], swept("alpha=0.1")), "perfedavg")
    assert split_key("alpha") == split_key("partition.alpha") == ("partition", "alpha")
    assert split_key("set.alpha") == ("set", "alpha")
    sweep = {"set.alpha": "1", "partition.alpha": "2", "rounds": "3", "lr": "4"}
    assert values_of_place(sweep, "partition") == {"alpha": "2"}
    assert values_of_place(sweep, "set") == {"alpha": "1", "lr": "4"}
    apart = point_groups(combinations(["perfedavg"], swept("partition.alpha=0.1,5")))
    assert apart == [[0], [1]]
    assert point_groups(combinations(["perfedavg"], swept("set.alpha=0.1,5"))) == [[0, 1]]


def test_values_of_a_run_have_the_type_of_its_option():
    found = typed_sweep_values(
        {"rounds": "3", "byzantine": "1", "dp_delta": "1e-6", "dp_seed": "4", "attack": "nan"}
    )
    assert found == {"rounds": 3, "byzantine": 1.0, "dp_delta": 1e-6, "dp_seed": 4}
    assert [type(value) for value in found.values()] == [int, float, float, int]
    refused(lambda: typed_sweep_values({"rounds": "x"}), "rounds")


def test_what_is_written_twice_is_named_with_the_values_that_are_left():
    error = refused(lambda: combinations(["fedavg"], swept("lr=1,2,1.0,3")))
    assert error.hint == "--sweep lr=1,2,3"
