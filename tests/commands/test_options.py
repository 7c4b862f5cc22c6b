"""The options that the fields of the configuration become."""

from dataclasses import fields

import pytest
from arrays import ingested
from command import data_of
from command_lines import COMMANDS
from failing_command import must_fail
from made_path import place_of

from fedcache.commands.options import RunOptions, SchemeArguments
from fedcache.config import SECTIONS, PartitionConfig, TrainConfig, option_name


def options_of(command):
    return {
        name: p for p in COMMANDS.commands[command].load().params for name in p.opts if not p.hidden
    }


def test_train_and_grid_have_the_same_options_of_a_run():
    kinds = (TrainConfig, PartitionConfig, SchemeArguments, RunOptions)
    names = {option_name(item) for k in kinds for item in fields(k)}
    train = options_of("train")
    grid = options_of("grid")
    assert names <= set(train)
    assert names <= set(grid)
    for name in names - {"--method"}:
        assert train[name].help == grid[name].help
        assert train[name].show_default == grid[name].show_default


def test_every_key_of_the_file_is_an_option_of_the_command_of_its_name():
    for section, kind in SECTIONS.items():
        found = {p.name for p in COMMANDS.commands[section].load().params}
        assert {item.name for item in fields(kind)} <= found


@pytest.mark.parametrize("command", ["train", "grid", "extract"])
def test_every_option_with_a_value_says_its_default_and_stands_in_a_panel(command):
    for name, param in options_of(command).items():
        if not name.startswith("-") or param.is_flag or name in ("--config", "--help", "-h"):
            continue
        assert param.show_default, name
        assert param.rich_help_panel, name


@pytest.mark.slow
def test_a_grid_takes_a_device_and_client_stores(tmp_path):
    store = ("--store", ingested(tmp_path))
    name = data_of("partition --scheme iid --clients 3", *store)["name"]
    sites = place_of("shard --partition", name, *store, "--out", tmp_path / "sites")
    common = f"--method fedavg --rounds 1 --participation all --device cpu --clients-from {sites}"
    alone = data_of(f"train {common} --set lr=0.1")
    points = data_of(f"grid {common} --sweep lr=0.1,0.02")["points"]
    assert points[0]["accuracy"]["mean"] == pytest.approx(alone["accuracy"]["mean"], abs=1e-6)
    must_fail("", f"grid {common} --sweep clients=2,3")
