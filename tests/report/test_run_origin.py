"""The command that makes a stored run again, from configurations written by hand, and the store of its rows."""

import re

import numpy as np
import pytest

import fedcache as fc
from fedcache.federate.methods import METHODS
from fedcache.report.find_runs import StoredRun, gather
from fedcache.report.page import recipes_of
from fedcache.report.run_origin import RunStore, command_of, store_of_run
from fedcache.runs.origin import store_behind

DEALT = {
    "scheme": "dirichlet",
    "name": "",
    "args": {"alpha": 0.5, "clients": 3, "least": None},
    "seed": 0,
    "digests": ["p"],
}


def stored(folder, config, *, preset="paper", **result):
    """A run of fedavg with lr 0.02, for 5 rounds with seeds 0 and 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config)
    usual = {k: ("auto" if v is None else v) for k, v in METHODS["fedavg"].resolve(preset).items()}
    made = {
        "method": "fedavg",
        "rounds": 5,
        "seeds": [0, 1],
        "hyperparameters": {**usual, "lr": 0.02},
        "dataset": {"slug": "shapes", "digest": "d" * 64},
        "partition": DEALT,
        "arrays": ["a-0"],
    }
    return StoredRun(folder, made | result, {})


DIGITS = '[train]\ndataset = "digits"\n'
START = "fedcache train --method fedavg"
PARTITION = "--scheme dirichlet --clients 3 --option alpha=0.5"
LAST = "--rounds 5 --seeds 0,1"


@pytest.mark.parametrize(
    ("config", "store", "result", "words"),
    [
        (DIGITS, "s.zarr", {}, f"{START} --store s.zarr {PARTITION} {LAST} --set lr=0.02"),
        (
            DIGITS + 'preset = "official"\n',
            "s",
            {},
            f"{START} --preset official --store s {PARTITION} {LAST}",
        ),
        (
            DIGITS + 'clients_from = "sites"\n',
            "s",
            {},
            f"{START} --clients-from sites {LAST} --set lr=0.02",
        ),
        (
            DIGITS + 'partition = "mine"\n',
            "s",
            {},
            f"{START} --store s --partition mine {LAST} --set lr=0.02",
        ),
        # each seed with a partition of its own, from seed 4 on; a scheme without clients or other arguments
        (
            DIGITS,
            "s",
            {"partition": {**DEALT, "args": {}, "seed": 4, "digests": ["p", "q"]}},
            f"{START} --store s --scheme dirichlet --partition-seed 4 --repartition {LAST} --set lr=0.02",
        ),
        # one round that nobody asked for is that of a closed form
        (DIGITS, "s", {"rounds": 1}, f"{START} --store s {PARTITION} --seeds 0,1 --set lr=0.02"),
        # choices of the table that are no defaults; lists with commas, switches in small letters
        (
            DIGITS
            + 'participation = "2"\ndtype = "float32"\nbackbones = ["a", "b"]\nunknown = 1\n',
            "s",
            {},
            f"{START} --store s {PARTITION} {LAST} --participation 2 --backbones a,b --set lr=0.02",
        ),
        (
            DIGITS + "[train.client_set]\nlr = [0.1, 0.2]\n",
            "s",
            {"hyperparameters": {"own": True}, "method": "gone"},
            f"fedcache train --method gone --store s {PARTITION} {LAST} --set own=true --client-set lr=0.1,0.2",
        ),
    ],
)
def test_the_command_of_a_run_word_for_word(config, store, result, words, tmp_path):
    preset = "official" if "official" in config else "paper"
    entry = stored(tmp_path / "run", config, preset=preset, **result)
    if preset == "official":
        words += " --set lr=0.02"
    assert command_of(entry, store) == words


def test_the_source_of_runs_is_the_store_the_partition_and_the_arrays_of_all_of_them(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=(40, d)).astype(np.float32)
        for name, d in (("a", 3), ("b", 4), ("c", 5))
    }
    store = fc.Store.from_arrays(arrays, labels=np.arange(40) % 2, name="mine")
    parts = fc.partition(store, "iid", clients=2)
    one, both = (fc.train("fed3r", store, parts, backbones=names) for names in (["a"], ["c", "a"]))
    entries = gather([one, both], tmp_path).entries
    found = store_of_run(entries)
    assert isinstance(found, RunStore)
    assert found.store.path == store.path
    assert found.partition.digest == parts.digest
    width = {key: store.arrays[key].shape[-1] for key in store.arrays}
    assert [width[key] for key in found.keys] == [3, 5], (
        "in the order of the runs, without what none read"
    )
    assert [width[key] for key in found.fused] == [5, 3], (
        "as the run that read most together has them"
    )
    assert recipes_of(found).keys() == set(found.keys)
    # Made again under the same name: the rows are not those that the runs were trained on.
    name = one.result["partition"]["name"]
    store.put_partition(name, fc.partition(store, "iid", clients=2, seed=1).to_file())
    assert "replaced" in str(store_of_run(entries))
    for run in (one, both):  # configurations of earlier releases have the name alone
        config = run.path / "config.toml"
        config.write_text(re.sub(f"({name})@[0-9a-f]+", r"\1", config.read_text()))
    assert "replaced" in str(store_of_run(entries))
    # A run that keeps its partition still has it.
    parts.save(one.path / "partition-0.partition")
    kept = store_of_run(entries)
    assert isinstance(kept, RunStore)
    assert kept.partition.digest == parts.digest


def test_the_store_behind_a_run_is_found_in_its_home_among_damaged_and_other_ones(own_home):
    rows = {"a": np.ones((6, 3), np.float32)}
    meant = fc.Store.from_arrays(rows, labels=[0, 1] * 3, name="mine")
    other = fc.Store.from_arrays(rows, labels=[1, 0] * 3, name="a-other")
    (own_home / f"stores/a-{str(meant.dataset['digest'])[:8]}.zarr").mkdir()
    (own_home / "stores/b.zarr").mkdir()
    run = own_home / "runs/r"
    for store in (meant, other):
        assert store_behind(run, {"dataset": store.dataset}).path == store.path
    place = meant.path.rename(own_home / "stores/z.zarr")
    assert store_behind(run, {"dataset": meant.dataset}).path == place, "its name does not count"
    assert store_behind(run, {"dataset": {"digest": "0" * 64}}) is None
