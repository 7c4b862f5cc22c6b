"""One dataset as other programs write it: the same rows, labels and clients, or lines that convert it."""

import json
import pickle

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import torch
from command import fedcache
from conversion_lines import run_conversion
from opened import open_dataset
from refusal import refused

from fedcache.errors import UsageError
from fedcache.extract.digests import DigestMemory
from fedcache.extract.planning.ingest import open_any
from fedcache.tables.roles import ColumnChoice
from fedcache.tables.words import FileRows

N, D = 24, 5
X = np.random.default_rng(0).normal(size=(N, D)).astype("f4").round(3)
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


def leaf(root):
    users = {u: {"x": X[rows].tolist(), "y": Y[rows].tolist()} for u, rows in EACH.items()}
    counts = [len(rows) for rows in EACH.values()]
    path = root / "leaf.json"
    path.write_text(json.dumps({"users": [*EACH], "num_samples": counts, "user_data": users}))
    return path


def tff(root):
    with h5py.File(root / "tff.h5", "w") as file:
        for user, rows in EACH.items():
            file[f"examples/{user}/embedding"] = X[rows]
            file[f"examples/{user}/label"] = Y[rows]
    return root / "tff.h5"


def records(root):
    return pd.DataFrame(
        {"embedding": [x.astype(float).round(3).tolist() for x in X], "label": Y, "client": CLIENTS}
    )


def jsonl(root):
    records(root).to_json(root / "r.jsonl", orient="records", lines=True)
    return root / "r.jsonl"


def json_lines(root):
    records(root).to_json(root / "lines.json", orient="records", lines=True)
    return root / "lines.json"


def json_records(root):
    records(root).to_json(root / "r.json", orient="records")
    return root / "r.json"


def torch_dict(root):
    held = {"features": torch.tensor(X), "labels": torch.tensor(Y), "client": CLIENTS, "epoch": 3}
    torch.save(held, root / "t.pt")
    return root / "t.pt"


def torch_rows(root):
    held = {"features": [*torch.tensor(X)], "labels": Y.tolist(), "client": CLIENTS}
    torch.save(held, root / "rows.pth")
    return root / "rows.pth"


def torch_pair(root):
    torch.save((torch.tensor(X), torch.tensor(Y)), root / "pair.pt")
    return root / "pair.pt"


def clip_retrieval(root):
    folder = root / "clip"
    (folder / "img_emb").mkdir(parents=True)
    (folder / "metadata").mkdir()
    for part, rows in ((2, slice(0, 10)), (10, slice(10, N))):  # 2 comes before 10
        np.save(folder / "img_emb" / f"img_emb_{part}.npy", X[rows])
        held = {"label": Y[rows], "client": CLIENTS[rows]}
        pd.DataFrame(held).to_parquet(folder / "metadata" / f"metadata_{part}.parquet")
    return folder


@pytest.mark.parametrize(
    ("write", "clients"),
    [
        (leaf, True),
        (tff, True),
        (jsonl, True),
        (json_lines, True),
        (json_records, True),
        (torch_dict, True),
        (torch_rows, True),
        (torch_pair, False),
        (clip_retrieval, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_dataset_of_another_program_has_the_same_rows_labels_and_clients(
    tmp_path, write, clients
):
    found = open_any(write(tmp_path), ColumnChoice())
    assert rows_of(found, clients=clients) == expected(clients=clients)


def pfllib(root):
    for split in ("train", "test"):
        (root / "pfl" / split).mkdir(parents=True)
    for user, rows in EACH.items():
        for split, part in (("train", rows[::2]), ("test", rows[1::2])):
            np.savez(root / "pfl" / split / f"{user}.npz", data={"x": X[part], "y": Y[part]})
    return root / "pfl" / "train" / "u1.npz"


def pfllib_folder(root):
    return pfllib(root).parents[1]


def pickled_npz(root):
    np.savez(root / "p.npz", held={"features": X, "labels": Y, "client": CLIENTS})
    return root / "p.npz"


def pickled_table(root):
    records(root).to_pickle(root / "t.pkl")
    return root / "t.pkl"


def pickled_dict(root):
    (root / "d.pickle").write_bytes(pickle.dumps({"features": X, "labels": Y, "client": CLIENTS}))
    return root / "d.pickle"


def matlab(root):
    scipy.io.savemat(
        root / "m.mat", {"features": X, "labels": Y[:, None], "client": np.array(CLIENTS)}
    )
    return root / "m.mat"


def torch_arrays(root):
    torch.save({"features": X, "labels": Y, "client": np.array(CLIENTS)}, root / "arrays.pt")
    return root / "arrays.pt"


def json_columns(root):
    records(root).to_json(root / "columns.json")
    return root / "columns.json"


REFUSED = [
    pfllib,
    pfllib_folder,
    pickled_npz,
    pickled_table,
    pickled_dict,
    matlab,
    torch_arrays,
    json_columns,
]


@pytest.mark.slow
@pytest.mark.parametrize("write", REFUSED, ids=lambda write: write.__name__)
def test_a_file_that_is_not_read_is_refused_with_lines_that_convert_it(tmp_path, write):
    file = write(tmp_path)
    with pytest.raises(UsageError) as caught:
        open_any(file, ColumnChoice())
    found = open_any(run_conversion(caught.value), ColumnChoice())
    got = rows_of(found, clients="client" in found.groups)
    if write is matlab:  # which pads words with blanks
        got = {(x, y, client.strip()) for x, y, client in got}
    assert got == expected(clients=True)
    if write in (pfllib, pfllib_folder):
        assert found.splits is not None
        assert np.bincount(found.splits).tolist() == [12, 12]


def test_images_of_clients_are_converted_for_the_encoders(tmp_path):
    pixels = np.random.default_rng(1).random((N, 28, 28)).astype("f4")
    path = tmp_path / "emnist.h5"
    with h5py.File(path, "w") as file:
        for user, rows in EACH.items():
            file[f"examples/{user}/pixels"] = pixels[rows]
            file[f"examples/{user}/label"] = Y[rows]
    memory = DigestMemory(tmp_path / "digests")
    with pytest.raises(UsageError) as ingested:
        open_any(path, ColumnChoice())
    refused(lambda: open_dataset(f"arrays:{path}", memory=memory), ingested.value.hint)
    data = open_dataset(f"arrays:{run_conversion(ingested.value)}", memory=memory)
    held = zip(
        map(data.source.read, range(N)), data.label, data.groups["client"].values(), strict=True
    )
    got = {(image.tobytes(), data.classes[label], client) for image, label, client in held}  # type: ignore[union-attr]
    images = (255 * pixels).round().astype("u1")
    assert got == {
        (image.tobytes(), str(y), client)
        for image, y, client in zip(images, Y, CLIENTS, strict=True)
    }


def test_texts_of_leaf_are_read_as_texts(tmp_path):
    users = {
        u: {"x": [f"text {i}" for i in rows], "y": Y[rows].tolist()} for u, rows in EACH.items()
    }
    path = tmp_path / "shakespeare.json"
    path.write_text(json.dumps({"users": [*EACH], "num_samples": [6, 8, 10], "user_data": users}))
    with pytest.raises(UsageError, match="texts"):
        open_any(path, ColumnChoice())
    data = open_dataset(f"texts:{path}", memory=DigestMemory(tmp_path / "digests"))
    assert len(data) == N
    assert sorted(data.groups["client"].values()) == sorted(CLIENTS)


@pytest.mark.parametrize("ending", ["pkl", "xyz", "json", "jsonl", "pt"])
def test_files_that_say_nothing_are_refused_in_words(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    path.write_bytes(b"\x00\x01 nothing")
    said = fedcache(f"ingest {path} --name x")
    assert said.code == 2
    assert "Did you mean" not in said.err


def test_a_folder_that_no_program_wrote_is_refused_with_what_to_give(tmp_path):
    np.save(tmp_path / "a.npy", X)
    refused(lambda: open_any(tmp_path, ColumnChoice()), f"fedcache ingest {tmp_path / 'a.npy'}")
