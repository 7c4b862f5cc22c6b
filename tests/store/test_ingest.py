"""Your own embeddings, as a user brings them: a test set, a name, the next command, and stores by name."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import Done, fedcache, ok
from federation import small
from pictures import folder
from safetensors.numpy import save_file

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.evaluate import evaluate_global
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import Client
from fedcache.store.samples import HELD_OUT
from fedcache.store.store import Store

ROWS = 60
LABELS = np.arange(ROWS) % 3
FEATURES = (np.eye(4, dtype=np.float32)[LABELS] * 3 + np.random.default_rng(0).normal(size=(ROWS, 4))).astype("f4")
SPLIT = (np.arange(ROWS) % 6 == 0).astype(np.int64)
TEXT = np.eye(4, dtype=np.float32)[:3]
IID = ("--scheme", "iid", "--clients", 3)


def npz(path: Path, **columns: Any) -> Path:
    np.savez(path, allow_pickle=False, **columns)
    return path


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    return npz(tmp_path / "labelled.npz", X=FEATURES, labels=LABELS)


def failed(done: Done, code: int) -> str:
    """The message and the hint of a command that must end with ``code``."""
    assert done.code == code, done.err + done.out
    assert "Traceback" not in done.err
    error = done.envelope["error"]
    return str(error["message"] + "\n" + error["hint"])


def run_line(line: str, *more: object) -> Done:
    """A command as it was printed."""
    program, *words = shlex.split(line)
    assert program == "fedcache"
    return ok(*words, *more)


def write_npz(path: Path, columns: dict[str, Any]) -> None:
    np.savez(path, allow_pickle=False, **columns)


def write_h5(path: Path, columns: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
        file["made"] = 2024  # a scalar that means nothing to us


def write_parquet(path: Path, columns: dict[str, Any]) -> None:
    fields = {k: pa.array(list(map(list, v))) if v.ndim == 2 else pa.array(v) for k, v in columns.items()}
    fields["labels"] = pa.array([f"class {i}" for i in columns["labels"]]).dictionary_encode()
    pq.write_table(pa.table(fields), path)


def write_safetensors(path: Path, columns: dict[str, Any]) -> None:
    save_file(columns, path)


@pytest.mark.parametrize("write", [write_npz, write_h5, write_parquet, write_safetensors])
def test_without_a_split_a_fifth_of_each_class_is_held_out_and_the_printed_command_trains(
    tmp_path: Path, write: Any
) -> None:
    file = tmp_path / f"e.{write.__name__.removeprefix('write_')}"
    write(file, {"embeddings": FEATURES.astype(np.float64), "labels": LABELS})
    said = fedcache("ingest", file, "--name", "mine")
    assert said.code == 0, said.err
    assert said.out.count(HELD_OUT) == 1
    assert run_line(said.out.splitlines()[-1], "--rounds", 2).data["dataset"]["slug"] == "mine"
    store = Store.open(ok("inspect", "--dataset", "mine").data["path"])
    assert store.dataset["held_out"] == HELD_OUT
    s = store.samples
    for label in range(3):
        of_class = np.flatnonzero(s.label == label)
        by_uid = sorted(of_class, key=lambda row: bytes(s.uid[row]))
        assert len(of_class) == 20
        assert set(by_uid[:4]) == set(of_class[s.split[of_class] == 1])


def test_a_split_of_the_file_is_kept(tmp_path: Path) -> None:
    file = npz(tmp_path / "e.npz", X=FEATURES, y=LABELS, split=SPLIT)
    said = fedcache("ingest", file, "--name", "mine")
    assert HELD_OUT not in said.out
    store = Store.open(ok("inspect", "mine").data["path"])
    assert store.samples.split.tolist() == SPLIT.tolist()
    assert "held_out" not in store.dataset
    alltrain = npz(tmp_path / "t.npz", X=FEATURES, y=LABELS, split=0 * SPLIT)
    assert HELD_OUT in " ".join(ok("ingest", alltrain, "--name", "train-only").data["notes"])


@pytest.mark.parametrize("given", [False, True], ids=["home", "--store"])
def test_a_method_that_reads_labels_says_how_to_add_them(tmp_path: Path, given: bool) -> None:
    file = npz(tmp_path / "e.npz", X=FEATURES)
    place = ("--store", tmp_path / "own place.zarr") if given else ()
    made = ok("ingest", file, "--name", "bare", *place).data
    with_labels = npz(tmp_path / "with.npz", X=FEATURES, labels=LABELS)
    for words in ((), IID):
        said = failed(fedcache("train", "--method", "fedavg", *words, *place, "--json"), 2)
        assert "fedavg needs labels" in said
        assert "Add labels" in said
        command = said.split("then:  ")[1]
        assert command == made["next"]
    run_line(command.replace("FILE", str(with_labels)))
    assert ok("train", "--method", "fed3r", *IID, *place).data["accuracy"]["mean"] > 0.5


def test_labels_of_some_rows_are_enough_where_rows_are_dealt_by_class(tmp_path: Path) -> None:
    file = npz(tmp_path / "e.npz", X=FEATURES, y=np.where(np.arange(ROWS) % 2, LABELS, -1))
    following = ok("ingest", file, "--name", "half", "--no-label", "-1").data["next"]
    assert run_line(following, "--rounds", 2).data["accuracy"]["mean"] is not None
    said = failed(fedcache("train", "--method", "fedavg", *IID, "--json"), 2)
    assert "--scheme dirichlet" in said


@pytest.mark.slow
def test_methods_without_labels_train_on_text_features_and_invent_no_score(tmp_path: Path) -> None:
    free = [name for name, method in METHODS.items() if not method.needs & {"labels", "pixels"}]
    assert free
    labels = np.where(SPLIT == 1, LABELS, -1)
    ok("ingest", npz(tmp_path / "t.npz", X=FEATURES, text=2 * TEXT, y=labels, split=SPLIT), "--name", "tested")
    unknown = npz(tmp_path / "u.npz", **{"features/clip": FEATURES, "text/clip": TEXT})
    following = ok("ingest", unknown, "--name", "unknown").data["next"]
    assert run_line(following).data["accuracy"]["mean"] is None
    for name in free:
        sizes = [word for k, v in small(name).items() for word in ("--set", f"{k}={v}")]
        words = ("train", "--method", name, *IID, "--rounds", 2, "--participation", "all", *sizes)
        scored = ok(*words, "--dataset", "tested").data["accuracy"]["mean"]
        if "text" in METHODS[name].needs:
            assert scored > 0.5
        else:
            assert scored is None  # a probe needs labelled training rows
        blind = ok(*words, "--dataset", "unknown").data["accuracy"]
        assert blind["mean"] is blind["client_mean"] is None
        assert blind["per_domain"] == {}
    assert "nothing is scored" in fedcache(*words, "--dataset", "unknown").err
    ok("ingest", npz(tmp_path / "n.npz", X=FEATURES, y=LABELS), "--name", "no-text")
    said = failed(fedcache("train", "--method", "clip-zs", "--json"), 4)
    assert "text/NAME" in said
    assert "fedcache ingest FILE --name no-text --replace" in said


def test_rows_without_a_label_are_not_scored() -> None:
    # rows 0, 1, 3 have labels 0, 1, 1 and are predicted 0, 0, 1: client a has 1 of 2, client b 1 of 1, in all 2 of 3
    data = Data(*map(_tensor, (np.eye(2)[[0, 0, 1, 1]][:, None], np.array([0, 1, -1, 1]))), classes=2)
    none = np.empty(0, np.int64)
    clients = [Client("a", none, np.array([0, 1])), Client("b", none, np.array([2, 3])), Client("c", none, none + 0)]
    found = evaluate_global(lambda rows: data.x[rows, 0], data, [*clients, Client("d", none, np.array([2]))])
    assert found.client_accuracy.tolist()[:2] == [0.5, 1.0]
    assert np.isnan(found.client_accuracy[2:]).all()
    assert found.global_accuracy == pytest.approx(2 / 3)


def _tensor(values: Any) -> Any:
    import torch

    return torch.from_numpy(values)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mine", "ingested:mine"])
def test_the_name_is_a_dataset_everywhere(labelled: Path, tmp_path: Path, spec: str) -> None:
    made = ok("ingest", labelled, "--name", "mine").data["path"]
    ok("ingest", npz(tmp_path / "o.npz", X=-FEATURES, y=LABELS), "--name", "other")  # the one last used
    on = ("--dataset", spec)
    assert ok("inspect", *on).data["path"] == made
    assert ok("verify", *on).data["path"] == made
    assert ok("repair", *on).data["path"] == made
    assert [e["path"] for e in ok("ls", *on).data["entries"]] == [made]
    assert ok("export", tmp_path / "out.npz", *on).data["rows"] == ROWS
    saved = ok("partition", *IID, *on).data
    assert saved["store"] == made
    assert len(ok("shard", "--partition", saved["name"], "--out", tmp_path / "sites", *on).data["stores"]) == 3
    run = ("--method", "fed3r", "--partition", saved["name"])
    assert ok("train", *run, *on).data["dataset"]["slug"] == "mine"
    assert ok("grid", *run, "--sweep", "rounds=1", *on).data["points"][0]["dataset"]["slug"] == "mine"


def test_unknown_names_are_answered_with_ingested_ones(labelled: Path) -> None:
    ok("ingest", labelled, "--name", "flowers")
    for spec in ("flowrs", "ingested:flowrs"):
        assert "'flowers'" in failed(fedcache("train", "--method", "fedavg", "--dataset", spec, "--json"), 2)
    assert "'digits'" in failed(fedcache("inspect", "--dataset", "digit", "--json"), 2)
    assert "both given" in failed(fedcache("inspect", "flowers", "--dataset", "flowers", "--json"), 2)
    for spec in ("flowers", "ingested:flowers"):
        said = failed(fedcache("extract", "--dataset", spec, "--backbones", "random-projection", "--json"), 2)
        assert "no images" in said
    said = failed(
        fedcache("train", "--method", "fedavg", "--dataset", "flowers", "--backbones", "clip-rn50", "--json"), 4
    )
    assert "fedcache ingest FILE --name flowers" in said


def test_a_name_that_is_a_dataset_of_its_own_is_told_apart(labelled: Path) -> None:
    following = ok("ingest", labelled, "--name", "digits").data["next"]
    assert "ingested:digits" in following
    assert run_line(following, "--rounds", 2).data["dataset"]["rows"] == ROWS


def test_the_same_file_again_is_there_already_and_another_is_refused(labelled: Path, tmp_path: Path) -> None:
    first = ok("ingest", labelled, "--name", "mine").data["path"]
    ok("partition", *IID, "--name", "mine-too")
    before = {f: f.stat().st_mtime_ns for f in Path(first).rglob("*") if f.is_file()}
    copy = shutil.copy(labelled, tmp_path / "copy.npz")
    for file in (labelled, copy):
        again = fedcache("ingest", file, "--name", "mine", "--json")
        assert again.code == 0
        assert "there already" in again.err
        assert again.data["path"] == first
    assert before == {f: f.stat().st_mtime_ns for f in Path(first).rglob("*") if f.is_file()}
    other = npz(tmp_path / "other.npz", X=FEATURES[:30], y=LABELS[:30])
    said = failed(fedcache("ingest", other, "--name", "mine", "--json"), 2)
    assert "60 rows" in said
    assert "30 rows" in said
    assert before == {f: f.stat().st_mtime_ns for f in Path(first).rglob("*") if f.is_file()}
    replaced = run_line(said.split("partitions:  ")[1]).data
    assert replaced["images"] == 30
    assert [e["images"] for e in ok("ls").data["entries"]] == [30]
    assert not Path(first).exists()


def test_a_store_of_one_s_own_is_replaced_in_place_and_one_of_images_never(labelled: Path, tmp_path: Path) -> None:
    place = tmp_path / "mine.zarr"
    following = ok("ingest", labelled, "--name", "mine", "--store", place).data["next"]
    assert run_line(following, "--rounds", 2).data["dataset"]["rows"] == ROWS
    other = npz(tmp_path / "other.npz", X=FEATURES[:30], y=LABELS[:30])
    assert "--store" in failed(fedcache("ingest", other, "--name", "mine", "--store", place, "--json"), 2)
    assert ok("ingest", other, "--name", "mine", "--store", place, "--replace").data["images"] == 30
    assert ok("verify", place).data["ok"]
    assert not list(tmp_path.glob(".*"))
    images = folder(tmp_path / "shapes", train=2, test=1)
    extracted = ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--workers", 0).data
    failed(fedcache("ingest", other, "--name", "mine", "--store", extracted["path"], "--replace", "--json"), 4)
    assert ok("verify", extracted["path"]).data["ok"]


def test_an_interrupted_ingest_goes_on(labelled: Path) -> None:
    made = Path(ok("ingest", labelled, "--name", "mine").data["path"])
    chunk = next(made.glob("features/*/c/0/0/0"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    ok("repair", "mine")
    assert ok("inspect", "mine").data["arrays"] == []
    again = fedcache("ingest", labelled, "--name", "mine", "--json")
    assert "there already" not in again.err
    assert ok("verify", "mine").data["ok"]
    assert len(ok("inspect", "mine").data["arrays"]) == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "repair"])
def test_a_store_that_lost_its_manifest_is_damage_and_other_places_are_not(
    labelled: Path, tmp_path: Path, command: str
) -> None:
    made = Path(ok("ingest", labelled, "--name", "mine").data["path"])
    manifest = (made / "manifest.json").read_bytes()
    (made / "manifest.json").unlink()
    said = failed(fedcache(command, made, "--json"), 5)
    assert "manifest.json is missing" in said
    assert f"mv {made} {made}.damaged" in said
    failed(fedcache("train", "--method", "fedavg", "--store", made, "--json"), 5)
    assert "manifest.json is missing" in failed(fedcache("ingest", labelled, "--name", "mine", "--json"), 5)
    assert "manifest.json is missing" in ok("ls").data["entries"][0]["problem"]
    shutil.rmtree(made / "samples")
    failed(fedcache(command, made, "--json"), 5)  # its zarr.json still says what it was
    (made / "manifest.json").write_bytes(manifest)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    assert "a directory but not a fedcache store" in failed(fedcache(command, tmp_path / "photos", "--json"), 4)
    assert "a file, not a fedcache store" in failed(fedcache(command, labelled, "--json"), 4)


def test_names_that_ls_prints_are_stores(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path(ok("ingest", labelled, "--name", "mine").data["path"])
    ok("ingest", npz(tmp_path / "o.npz", X=-FEATURES, y=LABELS), "--name", "other")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name in (made.name, made.stem):
        assert ok("inspect", name).data["path"] == str(made)
        assert ok("verify", name).data["path"] == str(made)
        assert ok("export", "out.npz", "--store", name).data["rows"] == ROWS
        assert ok("partition", *IID, "--store", name).data["store"] == str(made)
        assert ok("train", "--method", "fed3r", *IID, "--store", name).data["dataset"]["slug"] == "mine"
    near = failed(fedcache("inspect", f"{made.stem[:-1]}.zarr", "--json"), 4)
    assert repr(made.name) in near
    here = work / made.name
    shutil.copytree(made, here)
    assert ok("inspect", made.stem).data["path"] == made.name, "the working directory comes first"
    (here / "manifest.json").unlink()
    failed(fedcache("inspect", made.stem, "--json"), 5)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"X": FEATURES.astype(int), "y": LABELS}, "float32"),
        ({"X": FEATURES[:, :0], "y": LABELS}, "(60, 0)"),
        ({"X": FEATURES[:0], "y": LABELS[:0]}, "0 rows"),
        ({"X": FEATURES, "y": np.eye(3)[LABELS]}, "argmax"),
        ({"y": LABELS}, "has no features"),
        ({"X": FEATURES, "features": FEATURES}, "both features"),
        ({"X": FEATURES, "split": np.repeat("fold 3", ROWS)}, "fold 3"),
        ({"X": FEATURES, "y": LABELS, "text": TEXT[:, :2]}, "[classes, 4]"),
        ({"X": FEATURES, "y": LABELS, "text": TEXT[:2]}, "2 rows for 3 classes"),
        ({"X": FEATURES, "y": LABELS, "text/other": TEXT}, "text/odd"),
    ],
)
def test_a_file_that_does_not_fit_is_answered_with_the_next_command(
    tmp_path: Path, columns: dict[str, Any], words: str
) -> None:
    file = npz(tmp_path / "odd.npz", **columns)
    said = failed(fedcache("ingest", file, "--name", "my own", "--json"), 2)
    assert words in said
    again = shlex.join(["fedcache", "ingest", str(file), "--name", "my own"])
    assert said.endswith(again) or "--features-key" in said or "--split-key" in said
    assert not list(Path(os.environ["FEDCACHE_HOME"]).glob("stores/*"))


def test_words_as_bytes_and_endings_in_capitals_are_read(tmp_path: Path) -> None:
    file = npz(tmp_path / "e.npz", X=FEATURES, y=np.array([b"cat", b"dog", b"eel"])[LABELS])
    made = ok("ingest", file.rename(tmp_path / "E.NPZ"), "--name", "mine").data["path"]
    assert Store.open(made).samples.classes == ("cat", "dog", "eel")
