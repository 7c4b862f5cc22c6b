"""Every predefined grid expands: its methods, values and backbones exist, and its partitions fit data like digits."""

import pytest
from command import data_of
from failing_command import must_fail
from partition_rows import even_columns
from pictures import folder

from fedcache.config import PartitionConfig, TrainConfig, resolve
from fedcache.extract.backbones import lookup
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import make
from fedcache.grids.points import combinations, partition_of_point, swept_schemes, values_of_place
from fedcache.grids.presets import find_preset, preset_names
from fedcache.reproduce.planning import entry as find_entry

DIGITS = even_columns(160, 60, 10, domains=4)
MANY_CLASSES = even_columns(20, 4, 100)


@pytest.mark.parametrize("name", preset_names())
def test_a_ready_grid_expands(name):
    grid = find_preset(name)
    config = resolve(TrainConfig, grid.train, {})
    base = resolve(PartitionConfig, grid.partition, {})
    points = combinations(grid.methods, grid.sweep)
    assert len(points) == grid.points > 1
    tried = set()
    for method, sweep in points:
        METHODS[method].resolve(config.preset, config.set | values_of_place(sweep, "set"))
        for backbone in (*sweep.get("backbones", "").split("+"), *config.backbones):
            assert not backbone or lookup(backbone).name
        part = partition_of_point(base, sweep, swept_schemes(points))
        defaults = METHODS[method].defaults
        clients = part.clients or (None if part.scheme == "feature-shift" else defaults.clients)
        # which cuts the public rows out first
        if repr(part) not in tried and part.scheme != "flesd":
            of_domains = part.scheme in ("feature-shift", "feature-label-shift")
            count = {} if of_domains else {"clients": clients}
            types = {"alpha": float, "shots": int}
            typed = {k: types.get(k, lambda v: v)(v) for k, v in part.options.items()}
            # the disjoint few shots of figure 3 go to at most as many clients as there are classes
            rows = MANY_CLASSES if part.scheme == "few-shot" else DIGITS
            assert make(part.scheme or defaults.scheme, rows, seed=0, **count, **typed).clients
            tried.add(repr(part))


def test_predefined_grids_of_a_table_have_its_partition():
    for name, entry, datasets in (
        ("fst-terms", "fst-table3", ["CIFAR-10"]),
        ("fst-sampling", "fst-table4", ["CIFAR-10", "CIFAR-100"]),
        ("prompt-clients", "tpfl-fig3", None),
    ):
        grid = find_preset(name)
        points = combinations(grid.methods, grid.sweep)
        base = resolve(PartitionConfig, grid.partition, {})
        parts = [partition_of_point(base, sweep, swept_schemes(points)) for _, sweep in points]
        of_table = [
            (c.scheme, dict(c.args))
            for c in find_entry(entry).cells
            if datasets is None or c.labels["dataset"] in datasets
        ]
        of_grid = [(p.scheme, {"clients": p.clients, **p.options}) for p in parts]
        assert all(part in of_table for part in of_grid)
        assert all(part in of_grid for part in of_table)


def test_arguments_hold_for_the_swept_schemes_that_have_them():
    base = PartitionConfig(None, 10, 0, {"shards": 5, "alpha": 0.5, "none": 1})
    schemes = ("shards", "iid", "dirichlet")
    assert swept_schemes([("fedavg", {"scheme": name}) for name in schemes]) == schemes
    options = [partition_of_point(base, {"scheme": name}, schemes).options for name in schemes]
    # ``none`` is nobody's: it stays, and each scheme refuses it
    assert options == [{"shards": 5, "none": 1}, {"none": 1}, {"alpha": 0.5, "none": 1}]
    # nothing that is swept has it: it stays, and the scheme refuses it
    assert "shards" in partition_of_point(base, {"scheme": "iid"}, ("iid",)).options


@pytest.mark.parametrize("name", [n for n in METHODS if METHODS[n].tuned])
def test_what_preset_tuned_holds_is_a_point_of_the_grid_that_chose_it(name):
    grid = find_preset(f"tuned-{name}")
    method = METHODS[name]
    tuned = method.resolve("tuned")
    paper = method.resolve("paper")
    swept = {key.removeprefix("set.") for key in grid.sweep}
    assert grid.methods == (name,)
    assert set(method.tuned) <= swept
    for key, values in grid.sweep.items():
        assert tuned[key.removeprefix("set.")] in map(float, values)
    assert float(grid.partition["options"]["validation"]) > 0  # never on test rows
    assert {k for k in tuned if tuned[k] != paper[k]} <= set(method.tuned)


@pytest.mark.slow
def test_a_ready_grid_runs_and_what_is_said_takes_its_place(tmp_path):
    images = f"folder:{folder(tmp_path / 'shapes', domains=('ink', 'chalk'))}"
    words = f"grid --ready fst-sampling --backbones glyph-clip --dataset {images}"
    short = "--rounds 1 --seeds 0 --clients 2 --participation all --sweep scheme=iid"
    points = data_of(f"{words} {short}")["points"]
    assert [p["sweep"]["sampling"] for p in points] == ["equal", "balanced"]
    for point in points:
        assert point["method"] == "fst-cbdg"
        assert point["sweep"]["scheme"] == "iid"
        assert point["seeds"] == [0]
        assert point["rounds"] == 1
        assert point["partition"]["clients"] == 2
        assert point["hyperparameters"]["sampling"] == point["sweep"]["sampling"]
    must_fail("fst-sampling", "grid --ready fst-samplin")


def test_a_configuration_file_is_laid_over_a_ready_grid():
    file = {"train": {"rounds": 3, "set": {"s": 0.5}}, "partition": {"options": {"alpha": 2.0}}}
    made = find_preset("noise-prototypes").merged_with(file)
    assert made["train"]["set"] == {"noise_on": "proto", "s": 0.5}
    assert made["train"]["rounds"] == 3
    assert made["train"]["participation"] == "all"
    assert made["partition"] == {"scheme": "label-shift", "clients": 5, "options": {"alpha": 2.0}}


def test_another_scheme_leaves_the_arguments_of_the_grids_own_out():
    grid = find_preset("prompt-clients")
    assert grid.merged_with({})["partition"]["options"] == {"shots": 4, "skew": "disjoint"}
    assert "options" not in grid.merged_with({}, ["dirichlet"])["partition"]
    own = {"partition": {"options": {"alpha": 1}}}
    assert grid.merged_with(own, ["iid"])["partition"]["options"] == {"alpha": 1}
    assert find_preset("alpha").unused_arguments(["feature-shift"]) == ("clients",)
    for scheme in ("iid", "label-shift"):
        assert find_preset("alpha").unused_arguments([scheme]) == ()
    # which has shards = 10, for one of the schemes that it sweeps
    swept = find_preset("fst-sampling")
    assert swept.unused_arguments(["iid"]) == ("shards",)
    assert swept.unused_arguments(["iid", "shards"]) == swept.unused_arguments([]) == ()
