"""The images a run was tested on, given to ``predict`` as files, have the accuracy that the run stored.

To the last digit, for every method on three backbones, every seed and every client: a set of digits is extracted,
trained on, and its test images are written as PNG files, which then go through the command line as a person's own
would. One backbone is extracted in batches of another size than usual, which changes the last bits of its features.
The short draw tries one method of each kind; ``make nightly`` all of them on all backbones.
"""

import csv
import json

import numpy as np
import pytest
from command import ok
from draws import FULL, one_of_each
from federation import small
from homes import made_once
from made_path import place_of
from opened import open_dataset

from fedcache import Partition, Store
from fedcache.extract.images import decode
from fedcache.federate.methods import METHODS

pytestmark = pytest.mark.slow

ROWS = 240 if FULL else 120
TEST = 1
FILES = "digits-as-files"

# Three ways to say which rows a client is tested on: the same for all, its own domain, and rows like its own.
SCHEMES = {
    "random-projection": "--scheme iid --clients 3",
    "efficientnet-lite0": "--scheme feature-shift --domain mnist,optdigits,synth "
    f"--option shots={ROWS // 30} --option tests={ROWS // 60}",
    "glyph-clip": "--scheme dirichlet --clients 3 --alpha 1.0 --option test_protocol=matched",
}
TOWERS = {"text", "text tower", "image tower"}
IMAGES = {"pixels"}


def backbones_for(name):
    """Those that a method can be trained on: where it needs texts the one that has them."""
    needs = METHODS[name].needs
    if needs & TOWERS:
        return ["glyph-clip"]
    return ["pixels"] if needs & IMAGES else list(SCHEMES)


CASES = [(name, backbone) for name in METHODS for backbone in backbones_for(name)]


def kind(case):
    """What a method reads to train and what it deploys; of models of clients' own on features also the backbone."""
    name, backbone = case
    method = METHODS[name]
    reads = method.needs & (TOWERS | IMAGES)
    deploys = method.protocol(method.resolve())
    return (deploys, frozenset(reads), backbone if deploys == "personalised" else "")


@made_once
def store(place):
    """A store of some digits, and its test images as files under their names."""
    words = f"extract --dataset digits --limit {ROWS} --views 2 --workers 0"
    ok(f"{words} --recipe size=32 --backbones efficientnet-lite0 --batch 8")
    images = "pixels:size=32,pixels:resize=squash,pixels:views=1"
    store = place_of(f"{words} --recipe {images} --backbones random-projection,glyph-clip,pixels")
    data = open_dataset("digits", limit=ROWS)
    for row in np.flatnonzero(data.split == TEST):
        path = place / FILES / f"{data.names[row]}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        decode(data.source.read(int(row))).save(path)
    return store


@pytest.fixture
def files(store, tmp_path_factory):
    """The folder of the test images."""
    (found,) = (tmp_path_factory.getbasetemp() / "once").glob(f"*/{FILES}")
    return found


def predicted(words, out):
    """Name of a row -> its predicted class and the probability, as ``predict RUN ... -o`` writes them."""
    ok(f"predict {words} -o {out}")
    with out.open(newline="", encoding="utf-8") as file:
        return {row["name"]: (row["class"], row["probability"]) for row in csv.DictReader(file)}


def models_of(run, result):
    """Seed, client (None: the one for all) and tested rows of every model that a run scored."""
    for seed in result["seeds"]:
        parts = Partition.load(run / f"partition-{seed}.partition").to_payload()
        shared = parts["test"] or []
        tests = [shared if c["test"] is None else c["test"] for c in parts["clients"]]
        union = sorted(set().union(*tests))
        if result["protocol"] == "global":
            yield seed, None, union
            continue
        for client, own in zip(result["clients"], tests, strict=True):
            yield seed, client, union if result["protocol"] == "everywhere" else own


@pytest.mark.parametrize(("name", "backbone"), one_of_each(CASES, kind))
def test_images_and_rows_have_the_stored_accuracy_to_the_last_digit(
    store, files, tmp_path, name, backbone
):
    held = Store.open(store).samples
    declared = {h.name for h in METHODS[name].hparams}
    sizes = " ".join(
        f"--set {k}={v}" for k, v in {**small(name), "epochs": 1}.items() if k in declared
    )
    scheme = SCHEMES.get(backbone, SCHEMES["random-projection"])
    run = place_of(f"train {name} --backbones {backbone} {scheme} --rounds 2 --seeds 0,1 {sizes}")
    result = json.loads((run / "result.json").read_text())
    accuracy = {}
    for seed, client, rows in models_of(run, result):
        which = f"{run} --seed {seed}" + (f" --client {client}" if client is not None else "")
        by_row = predicted(f"{which} --store {store} --split test", tmp_path / "rows.csv")
        by_file = predicted(f"{which} {files} --workers 0", tmp_path / "files.csv")
        assert {
            n.removeprefix(f"{files}/").removesuffix(".png"): c for n, c in by_file.items()
        } == by_row
        right = [by_row[held.name[r]][0] == held.classes[held.label[r]] for r in rows]
        accuracy.setdefault(seed, []).append(sum(right) / len(right))
    stored = result["accuracy"]
    if result["protocol"] == "global":
        assert [found for (found,) in accuracy.values()] == stored["per_seed"]
    else:
        assert np.mean(list(accuracy.values()), axis=0).tolist() == stored["per_client"]
        headline = np.min if METHODS[name].headline == "min" else np.mean
        assert [float(headline(found)) for found in accuracy.values()] == stored["per_seed"]
