"""Class names and seeds keep their meaning in every order in which a file or a run lists them."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import ok, words_of
from scipy import stats

import fedcache as fc

LISTED = np.array(["zebra", "ant", "10", "9"])
"""In no order: sorted as words it is 10, 9, ant, zebra."""
GAPS = np.array([9, 2, 40])


def columns(kind, rows):
    """(columns that say the class, its name in every row) of a file."""
    of_four = np.arange(rows) % 4
    if kind == "words in the order that the file lists":
        return {"labels": LISTED[of_four], "classes": LISTED}, LISTED[of_four]
    if kind == "numbers of classes that the file lists":
        return {"labels": of_four, "classes": LISTED}, LISTED[of_four]
    if kind == "words without a list":
        return {"labels": LISTED[of_four]}, LISTED[of_four]
    if kind == "numbers with gaps":
        of_three = GAPS[np.arange(rows) % 3]
        return {"labels": of_three}, of_three.astype(str)
    assert kind == "eleven numbers"
    of_eleven = np.arange(rows) % 11
    return {"labels": of_eleven}, of_eleven.astype(str)


KINDS = (
    "words in the order that the file lists",
    "numbers of classes that the file lists",
    "words without a list",
    "numbers with gaps",
    "eleven numbers",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_has_its_own_name_from_the_file_to_the_prediction(kind, tmp_path):
    rows = 132
    given, words = columns(kind, rows)
    rng = np.random.default_rng(0)
    centre = {word: 5.0 * rng.normal(size=16) for word in dict.fromkeys(words)}
    x = np.stack([centre[word] for word in words]) + rng.normal(size=(rows, 16))
    split = np.where(np.arange(rows) // 11 % 4 == 3, "test", "train")
    file = tmp_path / "own.npz"
    np.savez(file, **{"features/mine": x.astype(np.float32), "split": split, **given})
    path = ok(f"ingest --name own {file}").data["path"]
    samples = fc.Store.open(path).samples
    assert [samples.classes[code] for code in samples.label] == words.tolist()
    run = ok("train --method fed3r --scheme iid --clients 3").data["path"]
    predicted = ok(f"predict {run} --store {path}").data["rows"]
    assert [row["class"] for row in predicted] == words.tolist()
    assert list(fc.load_model(run).predict(x.astype(np.float32))) == words.tolist()


def test_runs_that_list_the_same_seeds_in_different_orders_are_paired_by_seed(tmp_path):
    rng = np.random.default_rng(1)
    y = np.arange(300) % 4
    x = rng.normal(size=(4, 8))[y] + 1.5 * rng.normal(size=(300, 8))
    split = np.where(np.arange(300) % 3 == 0, "test", "train")
    file = tmp_path / "own.npz"
    np.savez(file, **{"features/mine": x.astype(np.float32), "labels": LISTED[y], "split": split})
    ok(f"ingest --name own {file}")
    by_seed = []
    for method, seeds in (("fedavg", "11,1,3,2"), ("solo", "2,3,11,1")):
        words = (
            *words_of("--rounds 2 --scheme iid --clients 3"),
            "--method",
            method,
            "--seeds",
            seeds,
        )
        result = json.loads((Path(ok("train", *words).data["path"]) / "result.json").read_text())
        by_seed.append(
            dict(zip(result["seeds"], result["accuracy"]["client_mean_per_seed"], strict=True))
        )
    first, second = ([values[seed] for seed in (1, 2, 3, 11)] for values in by_seed)
    (pair,) = ok("compare --against fedavg").data["comparisons"][0]["pairs"]
    assert pair["difference"] == pytest.approx(np.mean(second) - np.mean(first))
    assert pair["p"] == pytest.approx(stats.ttest_rel(second, first).pvalue)
