"""Tables that are written in an odd way: what is refused says what to do, and what it says to do works."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok
from command_lines import COMMANDS
from test_doors import DOORS, IMAGES, ROWS, Columns, through, write_npz

from fedcache.errors import FedcacheError
from fedcache.store.store import Store
from fedcache.tables.roles import ColumnChoice

TWO = [row % 2 for row in range(ROWS)]


def extraction(spec: str) -> tuple[object, ...]:
    return ("extract", "--dataset", spec, "--backbones", "pixels", "--size", "8", "--workers", 0)


def options_of(command: str) -> set[str]:
    found = COMMANDS.commands[command]
    loaded = found.load() if hasattr(found, "load") else found
    return {name for option in loaded.params for name in option.opts}


def refusal(door: str, folder: Path, columns: Columns, choice: ColumnChoice | None = None) -> str:
    with pytest.raises(FedcacheError) as caught:
        through(door, folder, columns, choice or ColumnChoice())
    return str(caught.value)


# Options that hints name


@pytest.mark.parametrize(
    "columns",
    [
        {"split": ["a", "b", "c"]},
        {"is_test": [1, 0, None]},
        {"is_test": [1, 0, 0], "is_train": [1, 1, 0]},
        {"part": ["train", "test", "val"]},
        {"domain": [0.5, 0.25, 1.0]},
        {"label": [0.5, 0.25, 1.0]},
        {"Domain": [1, 2, 3], "DOMAIN": [1, 2, 3]},
    ],
)
def test_every_option_of_a_refusal_is_one_of_the_command_that_reads_the_table(tmp_path: Path, columns: Columns) -> None:
    table = {"label": TWO, **{name: values * (ROWS // 3) for name, values in columns.items()}}
    for door, (kind, _) in DOORS.items():
        said = refusal(door, tmp_path, table)
        named = set(re.findall(r"--[a-z][a-z-]+", said))
        assert named, said
        assert named <= options_of("extract" if kind else "ingest"), f"{door}: {said}"


def test_the_column_of_the_split_and_of_the_domain_are_options_of_extract(tmp_path: Path) -> None:
    columns = {"label": TWO, "split": ["a", "b"] * (ROWS // 2), "part": ["train", "test"] * (ROWS // 2),
               "hospital": ["x", "x", "y"] * (ROWS // 3)}  # fmt: skip
    write_npz(tmp_path / "i.npz", {"images": IMAGES}, columns)
    spec = f"arrays:{tmp_path / 'i.npz'}"
    named = ("--split-key", "part", "--domain-key", "hospital")
    made = ok(*extraction(spec), *named)
    store = Store.open(made.data["path"])
    assert (store.samples.split == np.array([0, 1] * (ROWS // 2))).all()
    assert store.samples.domains == ("x", "y")
    assert ok("datasets", "info", spec, *named).data["domains"] == ["x", "y"]
    assert "--split-key" in fedcache(*extraction(spec)).err
