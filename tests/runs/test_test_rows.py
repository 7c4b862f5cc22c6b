"""What a result says of every test row: sums that are its accuracies, one file that is read whole or not at all."""

import json
import zipfile

import numpy as np
import pytest
import torch
from command import fedcache
from hypothesis import given
from hypothesis import strategies as st
from made_path import place_of
from refusal import corruption

from fedcache.errors import Exit
from fedcache.federate.engine import evaluate
from fedcache.federate.engine.client_data import Data
from fedcache.federate.partition.client_table import Client, ClientTable
from fedcache.runs import directory
from fedcache.runs import results as counting
from fedcache.runs.directory import ROWS_FILE, TestRows, file_digest, read_result
from fedcache.runs.results import count_test_rows

ROWS = 12


def data(labels):
    return Data(torch.zeros(len(labels), 1, 1), torch.from_numpy(labels), 3)


@st.composite
def scored(draw):
    """Labels, clients (some share the common rows) and the predictions of each client's model."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = rng.integers(-1 if draw(st.booleans()) else 0, 3, ROWS)
    common = np.sort(rng.choice(ROWS, 5, replace=False))
    tests = [
        common
        if draw(st.booleans())
        else np.sort(rng.choice(ROWS, rng.integers(0, 6), replace=False))
        for _ in range(draw(st.integers(1, 4)))
    ]
    clients = [Client(f"c{i}", np.arange(2), t) for i, t in enumerate(tests)]
    return labels, ClientTable.of(clients, common), rng.integers(0, 3, (len(tests), ROWS))


def one_hot(guesses):
    table = torch.eye(3)[torch.from_numpy(guesses)]
    return lambda rows: table[rows]


@given(scored(), st.booleans())
def test_the_sums_over_rows_are_the_accuracies(made, one):
    labels, table, guesses = made
    if one:
        found = evaluate.evaluate_global(one_hot(guesses[0]), data(labels), table)
    else:
        found = evaluate.evaluate_personal(lambda c: one_hot(guesses[c]), data(labels), table)
    rows = count_test_rows(found, table, torch.from_numpy(labels))
    if rows is None:
        assert np.isnan(found.mean_accuracy)
        return
    assert rows.share.sum() == pytest.approx(found.mean_accuracy)
    assert rows.weight.sum() == pytest.approx(1.0)
    assert rows.right.sum() / rows.scored.sum() == pytest.approx(found.pooled)
    assert (np.diff(rows.rows) > 0).all()
    again = TestRows.from_dict(json.loads(json.dumps(rows.to_dict())))
    assert all(np.array_equal(getattr(again, n), getattr(rows, n)) for n in rows.to_dict())


def test_rows_of_two_clients_by_hand():
    labels = np.array([0, 1, 2, -1])
    clients = [
        Client("a", np.arange(1), np.array([0, 1, 3])),
        Client("b", np.arange(1), np.array([1, 2])),
    ]
    guesses = np.array([[0, 0, 0, 0], [1, 1, 1, 1]])
    table = ClientTable.of(clients, np.empty(0, np.int64))
    rows = count_test_rows(
        evaluate.evaluate_personal(lambda i: one_hot(guesses[i]), data(labels), table),
        table,
        torch.from_numpy(labels),
    )
    assert rows.rows.tolist() == [0, 1, 2]  # 3 has no label
    assert rows.right.tolist() == [1, 1, 0]
    assert rows.scored.tolist() == [1, 2, 1]
    assert rows.share.tolist() == [0.25, 0.25, 0.0]
    assert rows.weight.tolist() == [0.25, 0.5, 0.25]


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY\x02\x00" + bytes(70), b"\x93NUMPY\x01\x00\x04\x00{1}\n" + bytes(8)]
)
def test_a_file_of_other_arrays_is_damaged_and_no_bug(content, tmp_path):
    """The digest is right, so what wrote it was no fedcache that this one reads."""
    with zipfile.ZipFile(tmp_path / ROWS_FILE, "w") as file:
        for name in ("rows", "right", "scored", "share", "weight"):
            file.writestr(f"{name}_0.npy", content)
    raw = (tmp_path / ROWS_FILE).read_bytes()
    corruption(
        lambda: directory.test_rows(
            {"seeds": [0], "files": {ROWS_FILE: file_digest(ROWS_FILE, raw)}}, tmp_path
        ),
        "test-rows.npz was changed after fedcache wrote it",
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fed3r"])
def test_a_run_of_the_command_line_has_the_file_and_a_damaged_one_is_refused(
    rows, monkeypatch, method
):
    words = (
        f"train --method {method} --scheme dirichlet --alpha 0.5 --clients 4 --rounds 2 "
        "--seeds 0,1 --option test_protocol=matched"
    )
    run = place_of(words)
    result = read_result(run / "result.json")
    found = directory.test_rows(result, run)
    means = [float(r.share.sum()) for r in found.values()]
    assert means == pytest.approx(result["accuracy"]["client_mean_per_seed"])
    pooled = [r.right.sum() / r.scored.sum() for r in found.values()]
    assert pooled == pytest.approx(result["accuracy"]["pooled_per_seed"])
    file = run / ROWS_FILE
    file.write_bytes(file.read_bytes()[:-1])
    assert fedcache(words).code == Exit.CORRUPT
    monkeypatch.setattr(counting, "MOST_ROWS", 3)
    without = read_result(place_of(f"{words} --fresh") / "result.json")
    assert ROWS_FILE not in without["files"]
    assert without["accuracy"] == result["accuracy"]
