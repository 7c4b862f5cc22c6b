"""One dataset as other programs write it: the same rows, labels and clients, or lines that convert it."""

import json
import pickle

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import torch
from arrays import normals
from conversion_lines import run_conversion
from failing_command import must_fail
from opened import open_dataset
from refusal import refused

from fedcache.extract.planning.ingest import open_any
from fedcache.tables.roles import ColumnChoice
from fedcache.tables.words import FileRows

N = 24
D = 5
X = normals(0, N, D).round(3)
Y = np.array([0, 1, 2] * 8)
CLIENTS = ["u1"] * 6 + ["u10"] * 8 + ["u2"] * 10
EACH = {client: [i for i, c in enumerate(CLIENTS) if c == client] for client in ("u1", "u10", "u2")}


def rows_of(found, *, clients):
    """What each row holds, without its place in the file."""
    (features,) = found.features.values()
    x = features.whole() if isinstance(features, FileRows) else features
    words = [found.classes[code] for code in found.labels]
    held = found.groups["client"].values() if clients else [None] * len(words)
    return set(zip(map(tuple, x[:, 0].astype("f4").tolist()), words, held, strict=True))


def expected(*, clients):
    held = CLIENTS if clients else [None] * N
    return set(zip(map(tuple, X.tolist()), map(str, Y), held, strict=True))


def clip_retrieval(folder):
    for name in ("img_emb", "metadata"):
        (folder / name).mkdir(parents=True)
    for part, rows in ((2, slice(0, 10)), (10, slice(10, N))):  # 2 comes before 10
        np.save(folder / f"img_emb/img_emb_{part}.npy", X[rows])
        held = {"label": Y[rows], "client": CLIENTS[rows]}
        pd.DataFrame(held).to_parquet(folder / f"metadata/metadata_{part}.parquet")


HELD = {"features": X, "labels": Y, "client": CLIENTS}
TENSORS = {"features": torch.tensor(X), "labels": torch.tensor(Y), "client": CLIENTS}
RECORDS = pd.DataFrame(
    {"embedding": [x.astype(float).round(3).tolist() for x in X], "label": Y, "client": CLIENTS}
)


def write_leaf(path, x):
    """The rows ``x`` of each client as LEAF has them."""
    users = {u: {"x": [x[i] for i in rows], "y": Y[rows].tolist()} for u, rows in EACH.items()}
    counts = [len(rows) for rows in EACH.values()]
    path.write_text(json.dumps({"users": [*EACH], "num_samples": counts, "user_data": users}))


def write_tff(path, name, x):
    with h5py.File(path, "w") as file:
        for user, rows in EACH.items():
            file[f"examples/{user}/{name}"] = x[rows]
            file[f"examples/{user}/label"] = Y[rows]


READ = {
    "leaf.json": lambda path: write_leaf(path, X.tolist()),
    "tff.h5": lambda path: write_tff(path, "embedding", X),
    "r.jsonl": lambda path: RECORDS.to_json(path, orient="records", lines=True),
    "lines.json": lambda path: RECORDS.to_json(path, orient="records", lines=True),
    "r.json": lambda path: RECORDS.to_json(path, orient="records"),
    "dict.pt": lambda path: torch.save({**TENSORS, "epoch": 3}, path),
    "rows.pth": lambda path: torch.save(
        {**TENSORS, "features": [*TENSORS["features"]], "labels": Y.tolist()}, path
    ),
    "pair.pt": lambda path: torch.save((TENSORS["features"], TENSORS["labels"]), path),
    "clip": clip_retrieval,
}
"""File or folder that is read -> what writes it."""


@pytest.mark.parametrize("name", READ)
def test_a_dataset_of_another_program_has_the_same_rows_labels_and_clients(tmp_path, name):
    READ[name](tmp_path / name)
    found = open_any(tmp_path / name, ColumnChoice())
    clients = name != "pair.pt"
    assert rows_of(found, clients=clients) == expected(clients=clients)


def pfllib(path):
    for split, start in (("train", 0), ("test", 1)):
        folder = path.parents[2] / f"pfl/{split}"
        folder.mkdir(parents=True)
        for user, rows in EACH.items():
            part = rows[start::2]
            np.savez(folder / f"{user}.npz", data={"x": X[part], "y": Y[part]})


REFUSED = {
    "pfl/train/u1.npz": pfllib,
    "pfl": lambda path: pfllib(path / "train/u1.npz"),
    "p.npz": lambda path: np.savez(path, held=HELD),
    "t.pkl": RECORDS.to_pickle,
    "d.pickle": lambda path: path.write_bytes(pickle.dumps(HELD)),
    "m.mat": lambda path: scipy.io.savemat(
        path, {**HELD, "labels": Y[:, None], "client": np.array(CLIENTS)}
    ),
    "arrays.pt": lambda path: torch.save({**HELD, "client": np.array(CLIENTS)}, path),
    "columns.json": RECORDS.to_json,
}
"""File or folder that is refused -> what writes it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_read_is_refused_with_lines_that_convert_it(tmp_path, name):
    REFUSED[name](tmp_path / name)
    caught = refused(lambda: open_any(tmp_path / name, ColumnChoice()))
    found = open_any(run_conversion(caught), ColumnChoice())
    got = rows_of(found, clients="client" in found.groups)
    if name == "m.mat":  # which pads words with blanks
        got = {(x, y, client.strip()) for x, y, client in got}
    assert got == expected(clients=True)
    if name.startswith("pfl"):
        assert np.bincount(found.splits).tolist() == [12, 12]


def test_images_of_clients_are_converted_for_the_encoders(tmp_path):
    pixels = np.random.default_rng(1).random((N, 28, 28)).astype("f4")
    path = tmp_path / "emnist.h5"
    write_tff(path, "pixels", pixels)
    ingested = refused(lambda: open_any(path, ColumnChoice()))
    refused(lambda: open_dataset(f"arrays:{path}"), ingested.hint)
    data = open_dataset(f"arrays:{run_conversion(ingested)}")
    clients = data.groups["client"].values()
    got = {
        (data.source.read(i).tobytes(), data.classes[data.label[i]], clients[i]) for i in range(N)
    }
    images = (255 * pixels).round().astype("u1")
    assert got == {(images[i].tobytes(), str(Y[i]), CLIENTS[i]) for i in range(N)}


def test_texts_of_leaf_are_read_as_texts(tmp_path):
    path = tmp_path / "shakespeare.json"
    write_leaf(path, [f"text {i}" for i in range(N)])
    refused(lambda: open_any(path, ColumnChoice()), "texts")
    data = open_dataset(f"texts:{path}")
    assert len(data) == N
    assert sorted(data.groups["client"].values()) == sorted(CLIENTS)


@pytest.mark.parametrize("ending", ["pkl", "xyz", "json", "jsonl", "pt"])
def test_files_that_say_nothing_are_refused_in_words(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    path.write_bytes(b"\x00\x01 nothing")
    assert "Did you mean" not in str(must_fail("", f"ingest {path} --name x"))


def test_a_folder_that_no_program_wrote_is_refused_with_what_to_give(tmp_path):
    np.save(tmp_path / "a.npy", X)
    refused(lambda: open_any(tmp_path, ColumnChoice()), f"fedcache ingest {tmp_path / 'a.npy'}")
