"""The command that makes a stored run again, word for word, from configurations written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedcache.federate.methods import METHODS
from fedcache.report.find_runs import StoredRun
from fedcache.report.page import recipes_of
from fedcache.report.run_origin import command_of, store_of_run

DEALT = {"scheme": "dirichlet", "name": "", "args": {"alpha": 0.5, "clients": 3, "least": None}, "seed": 0,
         "digests": ["p"]}  # fmt: skip


def stored(folder: Path, config: str | None, *, preset: str = "paper", **result: Any) -> StoredRun:
    """A run of fedavg with lr 0.02, for 5 rounds with seeds 0 and 1."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.toml").write_text(config)
    usual = {k: ("auto" if v is None else v) for k, v in METHODS["fedavg"].resolve(preset).items()}
    made = {
        "method": "fedavg", "rounds": 5, "seeds": [0, 1], "hyperparameters": {**usual, "lr": 0.02},
        "dataset": {"slug": "shapes", "digest": "d" * 64}, "partition": DEALT, "arrays": ["a-0"],
    }  # fmt: skip
    return StoredRun(folder, {**made, **result}, {})


DIGITS = '[train]\ndataset = "digits"\n'
START = "fedcache train --method fedavg"
PARTITION = "--scheme dirichlet --clients 3 --option alpha=0.5"
LAST = "--rounds 5 --seeds 0,1"


@pytest.mark.parametrize(
    ("config", "store", "result", "words"),
    [
        (DIGITS, "", {}, f"{START} --dataset digits {PARTITION} {LAST} --set lr=0.02"),
        ("[train]\nrounds = 5\n", "", {}, f"{START} --dataset shapes {PARTITION} {LAST} --set lr=0.02"),
        (DIGITS, "s.zarr", {}, f"{START} --store s.zarr {PARTITION} {LAST} --set lr=0.02"),
        (DIGITS + 'preset = "official"\n', "s", {}, f"{START} --preset official --store s {PARTITION} {LAST}"),
        (DIGITS + 'clients_from = "sites"\n', "s", {}, f"{START} --clients-from sites {LAST} --set lr=0.02"),
        (DIGITS + 'partition = "mine"\n', "s", {}, f"{START} --store s --partition mine {LAST} --set lr=0.02"),
        (DIGITS + 'partition = "a/b.json"\n', "s", {}, f"{START} --store s {PARTITION} {LAST} --set lr=0.02"),
        # each seed with a partition of its own, from seed 4 on; a scheme without clients or other arguments
        (DIGITS, "s", {"partition": {**DEALT, "args": {}, "seed": 4, "digests": ["p", "q"]}},
         f"{START} --store s --scheme dirichlet --seed 4 --repartition {LAST} --set lr=0.02"),
        # one round that nobody asked for is that of a closed form
        (DIGITS, "s", {"rounds": 1}, f"{START} --store s {PARTITION} --seeds 0,1 --set lr=0.02"),
        (DIGITS + "rounds = 1\n", "s", {"rounds": 1},
         f"{START} --store s {PARTITION} --rounds 1 --seeds 0,1 --set lr=0.02"),
        # choices of the table that are no defaults; lists with commas, switches in small letters
        (DIGITS + 'participation = "2"\ndtype = "float32"\nbackbones = ["a", "b"]\nunknown = 1\n', "s", {},
         f"{START} --store s {PARTITION} {LAST} --participation 2 --backbones a,b --set lr=0.02"),
        (DIGITS + "[train.client_set]\nlr = [0.1, 0.2]\n", "s", {"hyperparameters": {"own": True}, "method": "gone"},
         f"fedcache train --method gone --store s {PARTITION} {LAST} --set own=true --client-set lr=0.1,0.2"),
        (None, "s", {}, ""),
        ("no table", "s", {}, ""),
        ("[other]\n", "s", {}, ""),
    ],
)  # fmt: skip
def test_the_command_of_a_run_word_for_word(
    config: str | None, store: str, result: dict[str, Any], words: str, tmp_path: Path
) -> None:
    preset = "official" if config is not None and "official" in config else "paper"
    entry = stored(tmp_path / "run", config, preset=preset, **result)
    if preset == "official":
        words += " --set lr=0.02"
    assert command_of(entry, store) == words


def test_runs_without_a_store_say_why_and_have_no_recipes(tmp_path: Path) -> None:
    gone = stored(tmp_path / "runs" / "a", DIGITS)
    sites = stored(tmp_path / "runs" / "b", DIGITS + 'clients_from = "sites"\n')
    why = store_of_run([sites, gone])
    assert why == "no store of dataset dddddddddddddddd is here any more"
    assert recipes_of(why) == {}
    assert store_of_run([sites]) == "these runs were made from clients' own stores"
