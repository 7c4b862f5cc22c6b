"""The images a run was tested on, given to ``predict`` as files, have the accuracy that the run stored.

To the last digit, for every method on three backbones, every seed and every client: a set of digits is extracted,
trained on, and its test images are written as PNG files, which then go through the command line as a person's own
would. One backbone is extracted in batches of another size than usual, which changes the last bits of its features.
The short draw tries one method of each kind; ``make nightly`` all of them on all backbones.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from command import ok, words_of
from draws import one_of_each
from federation import small
from opened import open_dataset

from fedcache.config import Home
from fedcache.extract.images import decode
from fedcache.extract.planning.plan import memory_of
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import Partition
from fedcache.runs.run_models import has_model
from fedcache.store.store import Store

pytestmark = pytest.mark.slow

ROWS = 240
TEST = 1
FILES = "digits-as-files"

# Three ways to say which rows a client is tested on: the same for all, its own domain, and rows like its own.
SCHEMES = {
    "random-projection": words_of("--scheme iid --clients 3"),
    "efficientnet-lite0": words_of(
        "--scheme feature-shift --domain mnist,optdigits,synth --option shots=8 --option tests=4"
    ),
    "glyph-clip": words_of(
        "--scheme dirichlet --clients 3 --alpha 1.0 --option test_protocol=matched"
    ),
}
TOWERS, IMAGES = {"text", "text tower", "image tower"}, {"pixels"}


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
    reads, deploys = method.needs & (TOWERS | IMAGES), method.protocol(method.resolve())
    return (deploys, frozenset(reads), backbone if deploys == "personalised" else "")


def extracted(place):
    """A store of some digits, and its test images as files under their names."""
    words = ("--dataset", "digits", "--limit", ROWS, "--views", 2, "--workers", 0, "--recipe")
    ok("extract", *words, "size=32", "--backbones", "efficientnet-lite0", "--batch", 8)
    images = "pixels:size=32,pixels:resize=squash,pixels:views=1"
    done = ok("extract", *words, images, "--backbones", "random-projection,glyph-clip,pixels")
    data = open_dataset("digits", memory=memory_of(Home.from_environment()), limit=ROWS)
    for row in np.flatnonzero(data.split == TEST):
        path = place / FILES / f"{data.names[row]}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        decode(data.source.read(int(row))).save(path)
    return Path(done.data["path"])


@pytest.fixture
def store(once):
    return once(extracted)


@pytest.fixture
def files(store, tmp_path_factory):
    """The folder of the test images."""
    (found,) = (tmp_path_factory.getbasetemp() / "once").glob(f"*/{FILES}")
    return found


def predicted(run, out, *words):
    """Name of a row -> its predicted class and the probability, as ``predict RUN ... -o`` writes them."""
    ok("predict", run, *words, "-o", out)
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
    sizes = [
        word
        for k, v in {**small(name), "epochs": 1}.items()
        for word in ("--set", f"{k}={v}")
        if k in {h.name for h in METHODS[name].hparams}
    ]
    scheme = SCHEMES.get(backbone, SCHEMES["random-projection"])
    run = Path(
        ok(
            "train",
            "--method",
            name,
            "--backbones",
            backbone,
            *scheme,
            "--rounds",
            2,
            "--seeds",
            "0,1",
            *sizes,
        ).data["path"]
    )
    result = json.loads((run / "result.json").read_text())
    assert has_model(run)
    accuracy = {}
    for seed, client, rows in models_of(run, result):
        which = ("--seed", seed, *(() if client is None else ("--client", client)))
        by_row = predicted(run, tmp_path / "rows.csv", "--store", store, "--split", "test", *which)
        by_file = predicted(run, tmp_path / "files.csv", files, "--workers", 0, *which)
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
