"""Every ready grid expands: its methods, values and backbones exist, and its partitions fit data like digits."""

import pytest
from command import ok, words_of
from failing_command import must_fail
from partition_rows import even_columns
from pictures import folder

from fedcache.config import PartitionConfig, TrainConfig, resolve
from fedcache.extract.backbones import lookup
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import make
from fedcache.grids.points import combinations, partition_of_point, swept_schemes, values_of_place
from fedcache.grids.presets import find_preset, preset_names
from fedcache.reproduce.registry import entry as find_entry

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
        settings = values_of_place(sweep, "set")
        METHODS[method].resolve(config.preset, {**config.set, **settings})
        for backbone in (*sweep.get("backbones", "").split("+"), *config.backbones):
            assert not backbone or lookup(backbone).name
        part = partition_of_point(base, sweep, swept_schemes(points))
        defaults = METHODS[method].defaults
        clients = part.clients or (None if part.scheme == "feature-shift" else defaults.clients)
        # which cuts the public rows out first
        if repr(part) not in tried and part.scheme != "flesd":
            count = (
                {}
                if part.scheme in ("feature-shift", "feature-label-shift")
                else {"clients": clients}
            )
            typed = {
                k: float(v) if k == "alpha" else int(v) if k == "shots" else v
                for k, v in part.options.items()
            }
            # the disjoint few shots of figure 3 go to at most as many clients as there are classes
            rows = MANY_CLASSES if part.scheme == "few-shot" else DIGITS
            assert make(part.scheme or defaults.scheme, rows, seed=0, **count, **typed).clients
            tried.add(repr(part))


def test_a_wrong_name_gets_the_right_one():
    must_fail("fedpcl-terms", "grid --ready fedpcl-term")


def test_ready_grids_of_a_table_have_its_partition():
    for name, entry, datasets in (
        ("fst-terms", "fst-table3", ["CIFAR-10"]),
        ("fst-sampling", "fst-table4", ["CIFAR-10", "CIFAR-100"]),
        ("prompt-clients", "tpfl-fig3", None),
    ):
        grid = find_preset(name)
        points = combinations(grid.methods, grid.sweep)
        base = resolve(PartitionConfig, grid.partition, {})
        parts = [partition_of_point(base, sweep, swept_schemes(points)) for _, sweep in points]
        cells = [
            c
            for c in find_entry(entry).cells
            if datasets is None or c.labels["dataset"] in datasets
        ]
        of_table = [(c.scheme, dict(c.args)) for c in cells]
        of_grid = [(p.scheme, {"clients": p.clients, **p.options}) for p in parts]
        assert all(part in of_table for part in of_grid)
        assert all(part in of_grid for part in of_table)


def test_arguments_hold_for_the_swept_schemes_that_have_them():
    base = PartitionConfig(None, 10, 0, {"shards": 5, "alpha": 0.5, "none": 1})
    points = [("fedavg", {"scheme": name}) for name in ("shards", "iid", "dirichlet")]
    assert swept_schemes(points) == ("shards", "iid", "dirichlet")
    options = [
        partition_of_point(base, sweep, swept_schemes(points)).options for _, sweep in points
    ]
    # ``none`` is nobody's: it stays, and each scheme refuses it
    assert options == [{"shards": 5, "none": 1}, {"none": 1}, {"alpha": 0.5, "none": 1}]
    alone = [
        ("fedavg", {"scheme": "iid"})
    ]  # nothing that is swept has it: it stays, and the scheme refuses it
    assert "shards" in partition_of_point(base, alone[0][1], swept_schemes(alone)).options
    assert partition_of_point(base, {}).options == base.options


@pytest.mark.parametrize("name", [n for n in METHODS if METHODS[n].tuned])
def test_what_preset_tuned_holds_is_a_point_of_the_grid_that_chose_it(name):
    grid, method = find_preset(f"tuned-{name}"), METHODS[name]
    tuned = method.resolve("tuned")
    swept = {
        key.removeprefix("set."): {float(v) for v in values} for key, values in grid.sweep.items()
    }
    assert grid.methods == (name,)
    assert set(method.tuned) <= set(swept)
    for key, values in swept.items():
        assert tuned[key] in values
    assert float(grid.partition["options"]["validation"]) > 0  # never on test rows
    others = {k: v for k, v in tuned.items() if k not in method.tuned}
    assert others == {k: v for k, v in method.resolve("paper").items() if k not in method.tuned}


@pytest.mark.slow
def test_a_ready_grid_runs_and_what_is_said_takes_its_place(tmp_path):
    images = f"folder:{folder(tmp_path / 'shapes', train=12, test=4, domains=('ink', 'chalk'))}"
    words = ("grid --ready fst-sampling --backbones glyph-clip", "--dataset", images)
    short = words_of("--rounds 1 --seeds 0 --clients 2 --participation all --sweep scheme=iid")
    done = ok(*words, *short).data
    assert [(p["method"], p["sweep"]) for p in done["points"]] == [
        ("fst-cbdg", {"sampling": s, "scheme": "iid"}) for s in ("equal", "balanced")
    ]
    for point in done["points"]:
        assert (point["seeds"], point["rounds"], point["partition"]["clients"]) == ([0], 1, 2)
        assert point["hyperparameters"]["sampling"] == point["sweep"]["sampling"]


def test_a_configuration_file_is_laid_over_a_ready_grid():
    file = {
        "train": {"rounds": 3, "set": {"s": 0.5}},
        "partition": {"options": {"alpha": 2.0}},
        "extract": {"views": 2},
    }
    made = find_preset("noise-prototypes").merged_with(file)
    assert made["train"]["set"] == {"noise_on": "proto", "s": 0.5}
    assert (made["train"]["rounds"], made["train"]["participation"]) == (3, "all")
    assert made["partition"] == {"scheme": "label-shift", "clients": 5, "options": {"alpha": 2.0}}


def test_another_scheme_leaves_the_arguments_of_the_grids_own_out():
    grid = find_preset("prompt-clients")
    assert grid.merged_with({})["partition"]["options"] == {"shots": 4, "skew": "disjoint"}
    assert "options" not in grid.merged_with({}, ["dirichlet"])["partition"]
    assert grid.merged_with({"partition": {"options": {"alpha": 1}}}, ["iid"])["partition"][
        "options"
    ] == {"alpha": 1}
    assert find_preset("alpha").unused_arguments(["feature-shift"]) == ("clients",)
    for scheme in ("iid", "label-shift"):
        assert find_preset("alpha").unused_arguments([scheme]) == ()
    # which has shards = 10, for one of the schemes that it sweeps
    swept = find_preset("fst-sampling")
    assert swept.unused_arguments(["iid"]) == ("shards",)
    assert swept.unused_arguments(["iid", "shards"]) == swept.unused_arguments([]) == ()
