"""The options that the fields of the configuration become."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from arrays import ingested
from command import ok

from fedcache import cli
from fedcache.commands.options import RunOptions, SchemeArguments
from fedcache.config import SECTIONS, PartitionConfig, TrainConfig, read_file, resolve

COMMANDS: Any = typer.main.get_command(cli.app)
TRAIN = ("--method", "fedavg", "--scheme", "iid", "--clients", 3, "--participation", "all", "--rounds", 1)


def options_of(command: str) -> dict[str, Any]:
    return {name: p for p in COMMANDS.commands[command].load().params for name in p.opts if not p.hidden}


def test_train_and_grid_have_the_same_options_of_a_run() -> None:
    kinds = (TrainConfig, PartitionConfig, SchemeArguments, RunOptions)
    names = {
        (item.metadata["option"].names or (f"--{item.name.replace('_', '-')}",))[0] for k in kinds for item in fields(k)
    }
    train, grid = options_of("train"), options_of("grid")
    assert names <= set(train)
    assert names <= set(grid)
    for name in names - {"--method"}:
        assert (train[name].help, train[name].show_default) == (grid[name].help, grid[name].show_default)


def test_every_key_of_the_file_is_an_option_of_the_command_of_its_name() -> None:
    for section, kind in SECTIONS.items():
        found = {p.name for p in COMMANDS.commands[section].load().params}
        assert {item.name for item in fields(kind)} <= found


@pytest.mark.slow
def test_older_words_of_execution_mean_the_same(tmp_path: Path) -> None:
    train = ("train", *TRAIN, "--store", ingested(tmp_path))
    for new, old in (("sequential", "loop"), ("batched", "stack")):
        runs = [ok(*train, option, word).data for option in ("--execution", "--lift") for word in (new, old)]
        assert len({run["digest"] for run in runs}) == 1
    file = tmp_path / "fedcache.toml"
    for key in ("execution", "lift"):
        file.write_text(f'[train]\n{key} = "stack"\n')
        assert resolve(TrainConfig, read_file(file)["train"], {}).execution == "batched"
