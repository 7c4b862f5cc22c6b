"""One table has one meaning: the same columns give the same dataset whichever command and format they come through."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import fedcache, ok
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from make_images import encoded
from refusal import refused

from fedcache.errors import Exit
from fedcache.extract.datasets import open_dataset
from fedcache.extract.datasets.dataset import Dataset
from fedcache.extract.digests import DigestMemory
from fedcache.store.content import arrange
from fedcache.store.samples import HELD_OUT
from fedcache.store.store import Store
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.roles import ColumnChoice

ROWS = 24
FEATURES = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("f4")
IMAGES = np.random.default_rng(1).integers(0, 255, (ROWS, 4, 4, 3), dtype=np.uint8)
PNGS = [encoded(image) for image in IMAGES]
TEXTS = [f"a text of its own, number {row}" for row in range(ROWS)]

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Read:
    """What a command understands of a table."""

    classes: tuple[str, ...]
    labels: list[int]  # of each row, index into ``classes``
    splits: list[int] | None  # of each row; None where test rows are held out of the others
    groups: dict[str, list[str | None]]  # the value of each row
    unused: set[str]
    may_be_labels: dict[str, int]


def array_of(values: Sequence[Any], *, objects: bool) -> np.ndarray:
    """A column as numpy has it: words of Python where ``objects``, else of numpy; a missing number is NaN."""
    known = [value for value in values if value is not None]
    if any(isinstance(value, bool) for value in known) and len(known) < len(values):
        values = [None if value is None else str(value) for value in values]  # numpy has no missing truth value
    if any(isinstance(value, str) for value in values):
        if objects:
            return np.array(values, dtype=object)
        return np.array(["" if value is None else value for value in values], dtype=np.str_)
    if len(known) < len(values):
        return np.array([np.nan if value is None else float(value) for value in values])
    return np.array(known)


def write_npz(path: Path, content: dict[str, Any], columns: Columns) -> None:
    arrays = {name: array_of(values, objects=None in values) for name, values in columns.items()}
    np.savez(path, **content, **arrays)  # type: ignore[arg-type]


def write_h5(path: Path, content: dict[str, Any], columns: Columns) -> None:
    with h5py.File(path, "w") as file:
        for name, array in content.items():
            file[name] = array
        for name, values in columns.items():
            array = array_of(values, objects=False)
            words = array.dtype.kind == "U"
            file.create_dataset(name, data=array.tolist() if words else array,
                                dtype=h5py.string_dtype() if words else None)  # fmt: skip


def write_parquet(path: Path, content: dict[str, Any], columns: Columns) -> None:
    pq.write_table(pa.table({**content, **columns}), path)


def write_csv(path: Path, content: dict[str, Any], columns: Columns) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*content, *columns])
        for row in zip(*content.values(), *columns.values(), strict=True):
            writer.writerow(["" if value is None else value for value in row])


def write_tar(path: Path, columns: Columns) -> None:
    with tarfile.open(path, "w") as file:
        for row in range(ROWS):
            fields = {name: values[row] for name, values in columns.items()}
            for ending, data in (("png", PNGS[row]), ("json", json.dumps(fields).encode())):
                info = tarfile.TarInfo(f"{row:04d}.{ending}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


def of_embeddings(path: Path, choice: ColumnChoice) -> Read:
    found = open_embeddings(path, choice)
    made = arrange(found, "mine")  # which completes the splits
    splits = None if "held_out" in made.dataset else made.samples.split.tolist()
    groups = {name: group.values() for name, group in found.groups.items()}
    return Read(found.classes, found.labels.tolist(), splits, groups, set(found.left_out), found.may_be_labels)


def of_dataset(spec: str, choice: ColumnChoice) -> Read:
    words = {
        "label": choice.label,
        "split": choice.split,
        "group": None if choice.groups is None else ",".join(choice.groups),
        "no-label": ",".join(choice.no_label),
        "unlabelled": "yes" if choice.unlabelled else None,
    }
    said = "&".join(f"{word}={value}" for word, value in words.items() if value)
    path = Path(spec.partition(":")[2])
    found: Dataset = open_dataset(f"{spec}?{said}" if said else spec, memory=DigestMemory(path.parent / "digests"))
    splits = None if HELD_OUT in found.reading else found.split.tolist()
    groups = {name: group.values() for name, group in found.groups.items()}
    return Read(
        found.classes, found.label.tolist(), splits, groups, set(found.unused), dict(found.may_be_labels)
    )  # fmt: skip


def ingest_wide_csv(folder: Path, columns: Columns) -> Path:
    dimensions = {f"f{d}": FEATURES[:, d].tolist() for d in range(FEATURES.shape[1])}
    write_csv(folder / "wide.csv", dimensions, columns)
    return folder / "wide.csv"


def list_of_images(folder: Path, columns: Columns) -> Path:
    for row, png in enumerate(PNGS):
        (folder / f"{row:04d}.png").write_bytes(png)
    write_csv(folder / "list.csv", {"path": [f"{row:04d}.png" for row in range(ROWS)]}, columns)
    return folder / "list.csv"


def made(write: Callable[..., None], name: str, content: dict[str, Any]) -> Callable[[Path, Columns], Path]:
    def make(folder: Path, columns: Columns) -> Path:
        write(folder / name, content, columns)
        return folder / name

    return make


def tar_of(folder: Path, columns: Columns) -> Path:
    write_tar(folder / "shard.tar", columns)
    return folder / "shard.tar"


PICTURES = {"image": [{"bytes": png, "path": None} for png in PNGS]}
DOORS: dict[str, tuple[str, Callable[[Path, Columns], Path]]] = {
    "ingest npz": ("", made(write_npz, "e.npz", {"embeddings": FEATURES})),
    "ingest h5": ("", made(write_h5, "e.h5", {"embeddings": FEATURES})),
    "ingest parquet": ("", made(write_parquet, "e.parquet", {"embedding": FEATURES.tolist()})),
    "ingest csv": ("", ingest_wide_csv),
    "arrays npz": ("arrays", made(write_npz, "i.npz", {"images": IMAGES})),
    "arrays h5": ("arrays", made(write_h5, "i.h5", {"images": IMAGES})),
    "rows npz": ("rows", made(write_npz, "r.npz", {"rows": FEATURES})),
    "hf": ("hf", made(write_parquet, "h.parquet", PICTURES)),
    "folder csv": ("folder", list_of_images),
    "texts parquet": ("texts", made(write_parquet, "t.parquet", {"text": TEXTS})),
    "texts csv": ("texts", made(write_csv, "t.csv", {"text": TEXTS})),
    "webdataset": ("webdataset", tar_of),
}


def through(door: str, folder: Path, columns: Columns, choice: ColumnChoice) -> Read:
    kind, make = DOORS[door]
    inside = folder / door.replace(" ", "-")
    inside.mkdir(exist_ok=True)
    path = make(inside, columns)
    return of_dataset(f"{kind}:{path}", choice) if kind else of_embeddings(path, choice)


def all_doors(folder: Path, columns: Columns, choice: ColumnChoice | None = None) -> Read:
    """What every door reads, which is the same."""
    choice = choice or ColumnChoice()
    found = {door: through(door, folder, columns, choice) for door in DOORS}
    first = found["ingest npz"]
    for door, read in found.items():
        assert read == first, door
    return first


VALUES = st.one_of(
    st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=6, unique=True),
    st.lists(st.integers(0, 12), min_size=2, max_size=6, unique=True),
    st.just([-1, 0, 1]),
    st.just([-1, 1]),
    st.just([True, False]),
    st.lists(st.sampled_from(["none", "NA", "null", "n/a", "fist", "Palm", "10", "9", "é", "a b"]),
             min_size=2, max_size=6, unique=True).filter(lambda words: any(not w.isdigit() for w in words)),
)  # fmt: skip
LABEL_NAMES = st.sampled_from(["label", "Labels", "y", "target", "class", "cls", "category", "fine_label"])
SPLITS = st.sampled_from(
    [
        ("split", ["train", "test"]),
        ("Split", ["training", "t10k", "dev"]),
        ("subset", ["tr", "te", "val"]),
        ("subset", ["easy", "hard"]),
        ("split", [0, 1, 2]),
        ("is_test", [False, True]),
        ("is_train", [True, False]),
        ("test", [0, 1]),
        ("test_site", ["x", "y"]),
        ("train_hospital", [3, 7]),
        ("site_val", ["b", None]),
    ]
)
OTHERS = st.dictionaries(
    st.sampled_from(["hospital", "site", "age_group", "fold", "note", "measure"]),
    st.one_of(
        VALUES,
        st.just(["north", None, "south"]),
        st.just([0.5, 1.25]),
        st.just(TEXTS),
        st.just(list(range(100, 100 + ROWS))),
    ),
    max_size=3,
)


# Every example writes and reads twelve files, so that shrinking one would take minutes.
@settings(max_examples=25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_a_table_means_the_same_through_every_door(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(ROWS)

    def column(values: Sequence[Any]) -> list[Any]:
        return [values[row % len(values)] for row in rows]

    columns: Columns = {}
    named = data.draw(LABEL_NAMES)
    values = data.draw(VALUES)
    columns[named] = column([*values, None] if data.draw(st.booleans()) else values)
    name, words = data.draw(SPLITS)
    columns[name] = column(words)
    columns |= {other: column(kinds) for other, kinds in data.draw(OTHERS).items()}
    read = all_doors(tmp_path_factory.mktemp("doors"), columns)
    # What the table says, read from it by hand: the values that occur, and the row of each.
    assert set(read.classes) == {str(value) for value in values}
    said = [None if code < 0 else read.classes[code] for code in read.labels]
    assert said == [None if value is None else str(value) for value in columns[named]]
    # No column is dropped without a word.
    roles = {named, *([] if read.splits is None else [name])}
    assert read.unused | set(read.groups) | roles == set(columns)


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ([7, 281, 999], ("7", "281", "999")),
        ([10**9, 10**9 + 1, 5], ("5", "1000000000", "1000000001")),
        ([-2, -1, 0], ("-2", "-1", "0")),
        (["none", "NA", "null"], ("NA", "none", "null")),
        (["10", "9", "b"], ("10", "9", "b")),
    ],
)
def test_the_classes_are_the_values_that_occur_in_order(
    tmp_path: Path, values: list[Any], classes: tuple[str, ...]
) -> None:
    columns = {"label": [values[row % 3] for row in range(ROWS)]}
    assert all_doors(tmp_path, columns).classes == classes


@pytest.mark.parametrize(
    "words",
    [["1e5", "100000", "7", "8"], ["1.0", "1", "2"], ["+1", "1"], ["-0", "0"], ["2e3", "7"], ["007", "7"],
     ["1.", "1.0", "3"]],
)  # fmt: skip
def test_two_words_are_two_values_through_every_door(tmp_path: Path, words: list[str]) -> None:
    columns = {"label": [words[row % len(words)] for row in range(ROWS)], "site": list(reversed(words)) * ROWS}
    columns["site"] = columns["site"][:ROWS]
    read = all_doors(tmp_path, columns)
    assert read.classes == tuple(sorted(words))
    assert read.groups == {"site": columns["site"]}


def test_words_of_json_stay_words(tmp_path: Path) -> None:
    columns = {"label": ["1", "NA", "2"] * (ROWS // 3), "site": ["nan", "1.0", "none"] * (ROWS // 3)}
    read = through("webdataset", tmp_path, columns, ColumnChoice())
    assert read == through("ingest npz", tmp_path, columns, ColumnChoice())
    assert (read.classes, read.groups) == (("1", "2", "NA"), {"site": columns["site"]})


def test_the_user_says_which_labels_mean_none(tmp_path: Path) -> None:
    columns = {"label": [[-1, 0, 4][row % 3] for row in range(ROWS)]}
    read = all_doors(tmp_path, columns, ColumnChoice(no_label=("-1",)))
    assert read.classes == ("0", "4")
    assert read.labels[:3] == [-1, 0, 1]
    words = {"label": [["?", "NA", "cat", None][row % 4] for row in range(ROWS)]}
    (tmp_path / "words").mkdir()
    read = all_doors(tmp_path / "words", words, ColumnChoice(no_label=("NA", "?")))
    assert (read.classes, read.labels[:4]) == (("cat",), [-1, -1, 0, -1])


def test_a_test_column_keeps_the_users_test_rows_out_of_training(tmp_path: Path) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], "is_test": [row >= 10 for row in range(ROWS)]}
    assert all_doors(tmp_path, columns).splits == [0] * 10 + [1] * 14


@pytest.mark.parametrize("yes_no", [("1", "0"), ("yes", "no"), ("T", "F"), ("Y", "n"), ("true", "False"), (1.0, 0.0)])
@pytest.mark.parametrize("name", ["is_test", "isTest", "test", "in_test"])
def test_the_words_for_yes_and_no_are_read_alike(tmp_path: Path, name: str, yes_no: tuple[Any, Any]) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], name: [yes_no[row < 10] for row in range(ROWS)]}
    assert all_doors(tmp_path, columns).splits == [0] * 10 + [1] * 14


@pytest.mark.parametrize(
    ("flags", "splits"),
    [
        # The rows that no column marks are of the first split without a column, in the order train, test, validation.
        ({"is_test": [1, 0, 0], "is_train": [0, 1, 0]}, [1, 0, 2]),
        ({"is_test": [True, False, False], "is_val": [False, True, False]}, [1, 2, 0]),
        ({"is_train": [1, 0, 0], "is_val": ["no", "yes", "no"]}, [0, 2, 1]),
        ({"train": [0, 1, 0], "test": [1, 0, 0], "val": [0, 0, 1]}, [1, 0, 2]),
        ({"test": [1, 0, 0], "val": [0, 1, 0]}, [1, 2, 0]),
    ],
)
def test_columns_that_each_mark_a_split_are_combined(
    tmp_path: Path, flags: dict[str, list[Any]], splits: list[int]
) -> None:
    columns: Columns = {name: values * (ROWS // 3) for name, values in flags.items()}
    read = all_doors(tmp_path, {"label": [row % 2 for row in range(ROWS)], **columns})
    assert (read.splits, read.groups) == (splits * (ROWS // 3), {})


@pytest.mark.parametrize("name", ["set", "fold", "partition", "phase", "subset"])
def test_a_column_that_holds_words_of_splits_alone_says_the_split(tmp_path: Path, name: str) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], name: ["train", "Test", "val"] * (ROWS // 3)}
    assert all_doors(tmp_path, columns).splits == [0, 1, 2] * (ROWS // 3)
    (tmp_path / "numbers").mkdir()
    other = {"label": columns["label"], name: [10, 11, 12] * (ROWS // 3)}
    assert all_doors(tmp_path / "numbers", other).groups == {name: ["10", "11", "12"] * (ROWS // 3)}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"is_test": [1, 0, None]}, ("no value of is_test", "row 2", "--group-key is_test")),
        ({"is_test": ["yes", "no", "maybe"]}, ("'maybe'", "row 2", "--group-key is_test")),
        ({"is_val": [0, 1, 2]}, ("'2'", "row 2", "--group-key is_val")),
        ({"inTrain": ["a", "b", "c"]}, ("'a'", "row 0", "--group-key inTrain")),
        ({"test": ["yes", "no", None]}, ("no value of test", "row 2", "--group-key test")),
        ({"set": ["train", "test", "holdout"]}, ("'holdout'", "row 2", "--group-key set")),
        ({"fold": ["train", "test", None]}, ("no value of fold", "row 2", "--group-key fold")),
        ({"split": ["train", "test", "morning"]}, ("'morning'", "row 2", "--split-key NAME")),
        ({"splitt": ["train", "test", "val"]}, ("splitt holds words of splits", "--split-key splitt")),
        ({"is_test": [0.5, 0.25, 1.0]}, ("is_test is", "--group-key is_test")),
        ({"is_test": [1, 0, 0], "is_train": [1, 1, 0]}, ("contradict each other", "row 0", "--split-key is_test")),
        ({"is_train": [1, 0, 0], "test": [0, 1, 0], "val": [0, 0, 0]}, ("8 rows are marked by none", "row 2")),
    ],
)
def test_a_column_named_like_a_split_that_says_none_stops_every_door(
    tmp_path: Path, columns: Columns, said: tuple[str, ...]
) -> None:
    table = {"label": [row % 2 for row in range(ROWS)]}
    table |= {name: values * (ROWS // 3) for name, values in columns.items()}
    for door in DOORS:
        refused(lambda door=door: through(door, tmp_path, table, ColumnChoice()), *said)


def test_a_column_named_like_a_split_is_a_group_if_the_user_says_so(tmp_path: Path) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], "is_test": ["yes", "no", "maybe"] * (ROWS // 3)}
    read = all_doors(tmp_path, columns, ColumnChoice(groups=("is_test",)))
    assert (read.splits, list(read.groups)) == (None, ["is_test"])


@pytest.mark.parametrize(
    ("name", "values", "splits"),
    [
        ("in_train", [1, 1, 0], [0, 0, 1]),
        ("is_training", [True, False, True], [0, 1, 0]),
        ("train_set", ["yes", "no", "no"], [0, 1, 1]),
        # Without test rows the validation rows are the test set.
        ("is_val", [1, 0, 0], [1, 0, 0]),
        ("val", ["1", "0", "0"], [1, 0, 0]),
        ("my_split", [0, 1, 1], [0, 1, 1]),
        ("part", [0, 1, 2], [0, 1, 2]),
        ("part", ["train", "test", "val"], [0, 1, 2]),
    ],
)
def test_the_name_of_the_column_says_what_its_truth_values_mean(
    tmp_path: Path, name: str, values: list[Any], splits: list[int]
) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], name: values * (ROWS // 3)}
    assert all_doors(tmp_path, columns, ColumnChoice(split=name)).splits == splits * (ROWS // 3)


@pytest.mark.parametrize("name", ["part", "not_train", "train_or_test", "fold"])
def test_a_name_that_does_not_say_it_is_refused(tmp_path: Path, name: str) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], name: [0, 1, 1] * (ROWS // 3)}
    for door in DOORS:
        refused(lambda door=door: through(door, tmp_path, columns, ColumnChoice(split=name)), "does not say", "is_test")


@pytest.mark.parametrize("columns", [{"split": ["train"]}, {"is_test": [False]}, {"is_train": ["yes"]}])
def test_without_test_rows_a_fifth_of_the_training_rows_is_held_out(tmp_path: Path, columns: Columns) -> None:
    table = {"label": [row % 2 for row in range(ROWS)], **{name: values * ROWS for name, values in columns.items()}}
    assert all_doors(tmp_path, table).splits is None


def test_a_table_without_training_rows_is_refused(tmp_path: Path) -> None:
    table = {"label": [row % 2 for row in range(ROWS)], "split": ["test", "val"] * (ROWS // 2)}
    for door in DOORS:
        refused(lambda door=door: through(door, tmp_path, table, ColumnChoice()), "no training")


def test_a_value_of_its_own_in_every_row_is_a_group_only_when_asked_for(tmp_path: Path) -> None:
    when = [f"2026-01-{1 + row:02d}T10:00:00" for row in range(ROWS)]
    columns: Columns = {"label": [row % 2 for row in range(ROWS)], "note": TEXTS, "when": when}
    read = all_doors(tmp_path, columns)
    assert (read.groups, read.unused) == ({}, {"note", "when"})
    (tmp_path / "asked").mkdir()
    assert all_doors(tmp_path / "asked", columns, ColumnChoice(groups=("when",))).groups == {"when": when}


@pytest.mark.slow
def test_a_column_that_may_be_the_labels_is_named_by_every_door(tmp_path: Path) -> None:
    columns: Columns = {
        "diagnosis": [["flu", "cold", "none"][row % 3] for row in range(ROWS)], "age": [row % 5 for row in range(ROWS)]
    }  # fmt: skip
    assert all_doors(tmp_path, columns).may_be_labels == {"diagnosis": 3, "age": 5}
    (tmp_path / "chosen").mkdir()
    assert all_doors(tmp_path / "chosen", columns, ColumnChoice(label="diagnosis")).classes == ("cold", "flu", "none")
    (tmp_path / "none").mkdir()
    assert all_doors(tmp_path / "none", columns, ColumnChoice(unlabelled=True)).may_be_labels == {}


# Class names


def named_codes(table: pa.Table, names: list[str]) -> pa.Table:
    """A table whose label is a ClassLabel of Hugging Face."""
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def test_class_names_of_the_file_are_read_by_every_door(tmp_path: Path) -> None:
    names = ["walrus", "crane", "ant", "crane"]  # in no order, one without a row, one twice as in ImageNet
    label = [[0, 2, 3, -1][row % 4] for row in range(ROWS)]
    expected = (("walrus", "crane #1", "ant", "crane #3"), [[0, 2, 3, -1][row % 4] for row in range(ROWS)])
    for word in ("class_names", "classes", "label_names"):
        more = {word: np.array(names)}
        write_npz(tmp_path / "e.npz", {"X": FEATURES, **more}, {"y": label})
        write_npz(tmp_path / "i.npz", {"x": IMAGES, **more}, {"y": label})
        write_npz(tmp_path / "r.npz", {"x": FEATURES, **more}, {"y": label})
        for read in (
            of_embeddings(tmp_path / "e.npz", ColumnChoice()),
            of_dataset(f"arrays:{tmp_path / 'i.npz'}", ColumnChoice()),
            of_dataset(f"rows:{tmp_path / 'r.npz'}", ColumnChoice()),
        ):
            assert (read.classes, read.labels, read.unused) == (*expected, set())
    plain = {"label": label}
    pq.write_table(named_codes(pa.table({"embedding": FEATURES.tolist(), **plain}), names), tmp_path / "e.parquet")
    pq.write_table(named_codes(pa.table({**PICTURES, **plain}), names), tmp_path / "h.parquet")
    pq.write_table(named_codes(pa.table({"text": TEXTS, **plain}), names), tmp_path / "t.parquet")
    for read in (
        of_embeddings(tmp_path / "e.parquet", ColumnChoice()),
        of_dataset(f"hf:{tmp_path / 'h.parquet'}", ColumnChoice()),
        of_dataset(f"texts:{tmp_path / 't.parquet'}", ColumnChoice()),
    ):
        assert (read.classes, read.labels) == expected


# Shapes and splits in the names of arrays


@pytest.mark.parametrize("write", [write_npz, write_h5])
def test_a_column_vector_is_a_column(tmp_path: Path, write: Callable[..., None]) -> None:
    label = np.arange(ROWS)[:, None] % 3
    path = tmp_path / f"e.{'npz' if write is write_npz else 'h5'}"
    for values in (label, label.astype("f4"), np.array(["a", "b", "c"])[label] if write is write_npz else label):
        columns = {"y": values, "site": values}
        write(path, {"X": FEATURES, "images": IMAGES, **columns}, {})
        ours = of_embeddings(path, ColumnChoice())
        theirs = of_dataset(f"arrays:{path}", ColumnChoice())
        assert ours.labels == theirs.labels == [row % 3 for row in range(ROWS)]
        assert ours.groups["site"] == theirs.groups["site"]


def test_one_hot_labels_are_refused_and_no_hint_changes_a_label(tmp_path: Path) -> None:
    write_npz(tmp_path / "e.npz", {"X": FEATURES, "images": IMAGES, "y": np.eye(4)[np.arange(ROWS) % 4]}, {})
    write_npz(tmp_path / "i.npz", {"X": FEATURES, "images": IMAGES, "y": np.eye(4, dtype=int)[np.arange(ROWS) % 4]}, {})
    for name in ("e.npz", "i.npz"):
        path = tmp_path / name
        refused(lambda path=path: of_embeddings(path, ColumnChoice()), "exactly one 1", ".argmax(1)")
        refused(lambda path=path: of_dataset(f"arrays:{path}", ColumnChoice()), "exactly one 1", ".argmax(1)")


@pytest.mark.parametrize("pattern", ["{name}_{split}", "{split}_{name}", "{split}/{name}", "{name}/{split}"])
@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_training_and_test_rows_in_one_file_are_read_by_every_door(tmp_path: Path, pattern: str, ending: str) -> None:
    if "/" in pattern and ending == "npz":
        pytest.skip("names of arrays in an npz have no levels")
    label = [[7, 281, 999][row % 3] for row in range(ROWS)]
    site = [["a", "b"][row % 2] for row in range(ROWS)]
    reads = []
    for kind, content, array in (("", "X", FEATURES), ("", "data", FEATURES), ("arrays", "x", IMAGES),
                                 ("rows", "data", FEATURES)):  # fmt: skip
        arrays, columns = {}, {}
        for split, rows in (("train", slice(0, 16)), ("test", slice(16, ROWS))):
            arrays[pattern.format(name=content, split=split)] = array[rows]
            columns[pattern.format(name="y", split=split)] = label[rows]
            columns[pattern.format(name="site", split=split)] = site[rows]
        arrays["other"] = FEATURES[:5]
        path = tmp_path / f"{kind}{content}.{ending}"
        (write_h5 if ending == "h5" else write_npz)(path, arrays, columns)
        reads.append(of_dataset(f"{kind}:{path}", ColumnChoice()) if kind else of_embeddings(path, ColumnChoice()))
    for read in reads:
        assert read == reads[0]
    assert reads[0].splits == [1] * 8 + [0] * 16  # in the order of the names of the splits
    assert reads[0].classes == ("7", "281", "999")
    assert [reads[0].classes[code] for code in reads[0].labels] == [str(x) for x in label[16:] + label[:16]]
    assert reads[0].groups == {"site": site[16:] + site[:16]}
    assert reads[0].unused == {"other"}


@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_two_arrays_of_one_split_are_joined_with_their_own_columns(tmp_path: Path, ending: str) -> None:
    parts = {"train": slice(0, 10), "val": slice(10, 14), "dev": slice(14, 20), "test": slice(20, ROWS)}
    label = [f"{word}-{row % 2}" for word, rows in parts.items() for row in range(rows.stop - rows.start)]
    reads = []
    for kind, content, array in (("", "X", FEATURES), ("arrays", "x", IMAGES), ("rows", "data", FEATURES)):
        # The columns are not in the order of their arrays.
        arrays = {f"{content}_{word}": array[rows] for word, rows in parts.items()}
        columns = {f"y_{word}": label[rows] for word, rows in reversed(parts.items())}
        path = tmp_path / f"file{kind}.{ending}"
        (write_h5 if ending == "h5" else write_npz)(path, arrays, columns)
        reads.append(of_dataset(f"{kind}:{path}", ColumnChoice()) if kind else of_embeddings(path, ColumnChoice()))
    for read in reads:
        assert read == reads[0]
        # An HDF5 file lists its arrays in the order of their names.
        validation = ["val", "dev"] if ending == "npz" else ["dev", "val"]
        words = [x for word in ("test", "train", *validation) for x in label[parts[word]]]
        assert [read.classes[code] for code in read.labels] == words
        assert read.splits == [1] * 4 + [0] * 10 + [2] * 10


def test_a_column_goes_with_the_array_of_its_split_unless_there_are_two(tmp_path: Path) -> None:
    arrays = {"X_train": FEATURES[:10], "X_val": FEATURES[10:16]}
    columns = {"y_train": ["a"] * 10, "y_validation": ["b"] * 6}
    write_npz(tmp_path / "e.npz", arrays, columns)
    assert of_embeddings(tmp_path / "e.npz", ColumnChoice()).labels == [0] * 10 + [1] * 6
    write_npz(tmp_path / "two.npz", {**arrays, "X_dev": FEATURES[16:22]}, columns)
    refused(lambda: of_embeddings(tmp_path / "two.npz", ColumnChoice()), "which rows y_validation belongs to")
    write_npz(tmp_path / "twice.npz", arrays, {**columns, "y_val": ["c"] * 6})
    refused(lambda: of_embeddings(tmp_path / "twice.npz", ColumnChoice()), "which rows y_validation belongs to")


def test_features_of_two_splits_are_those_of_the_file(tmp_path: Path) -> None:
    write_npz(tmp_path / "e.npz", {"X_train": FEATURES[:16], "X_test": FEATURES[16:]},
              {"y_train": [row % 2 for row in range(16)], "y_test": [row % 2 for row in range(8)]})  # fmt: skip
    made_store = ok("ingest", tmp_path / "e.npz", "--name", "two").data
    store = Store.open(made_store["path"])
    assert np.array_equal(store.reader(*store.arrays).all()[:, 0], np.concatenate([FEATURES[16:], FEATURES[:16]]))
    assert (store.samples.split == [1] * 8 + [0] * 16).all()


# What a user is told, and that nothing is written before


def test_labels_of_another_name_are_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    diagnosis = [["flu", "cold"][row % 2] for row in range(ROWS)]
    write_npz(tmp_path / "e.npz", {"X": FEATURES}, {"diagnosis": diagnosis})
    said = fedcache("ingest", tmp_path / "e.npz", "--name", "mine")
    assert said.code == Exit.USAGE
    assert "diagnosis has 2 values" in said.err
    assert "--label-key diagnosis" in said.err
    write_npz(tmp_path / "i.npz", {"images": IMAGES}, {"diagnosis": diagnosis})
    words = ("extract", "--dataset", f"arrays:{tmp_path / 'i.npz'}", "--backbones", "pixels", "--size", "8",
             "--workers", 0)  # fmt: skip
    said = fedcache(*words)
    assert said.code == Exit.USAGE
    assert "--label-key diagnosis" in said.err
    assert not ok("ls").data["entries"]
    ok("ingest", tmp_path / "e.npz", "--name", "mine", "--label-key", "diagnosis")
    ok("ingest", tmp_path / "e.npz", "--name", "none", "--unlabelled")
    assert Store.open(ok(*words, "--label-key", "diagnosis").data["path"]).samples.classes == ("cold", "flu")
    assert Store.open(ok(*words, "--unlabelled").data["path"]).samples.classes == ()
    # Features of the class names make a store useful without labels.
    write_npz(tmp_path / "t.npz", {"features/a": FEATURES, "text/a": FEATURES[:2]}, {"diagnosis": diagnosis})
    assert ok("ingest", tmp_path / "t.npz", "--name", "texts").data["groups"] == ["diagnosis"]


def test_no_label_is_one_option_of_ingest_and_extract(tmp_path: Path) -> None:
    label = [[-1, 0, 4][row % 3] for row in range(ROWS)]
    write_npz(tmp_path / "e.npz", {"X": FEATURES}, {"y": label})
    write_npz(tmp_path / "i.npz", {"x": IMAGES}, {"y": label})
    said = fedcache("ingest", tmp_path / "e.npz", "--name", "plain")
    assert "-1 is a class, of 8 rows. If it means that no label is known: --no-label -1" in said.err
    ours = Store.open(ok("ingest", tmp_path / "e.npz", "--name", "mine", "--no-label", "-1").data["path"])
    words = ("extract", "--dataset", f"arrays:{tmp_path / 'i.npz'}", "--backbones", "pixels", "--size", "8",
             "--workers", 0, "--no-label", "-1")  # fmt: skip
    theirs = Store.open(ok(*words).data["path"])
    assert ours.samples.classes == theirs.samples.classes == ("0", "4")
    assert ours.samples.label.tolist() == theirs.samples.label.tolist()


def test_a_column_of_sentences_beside_embeddings_is_no_error(tmp_path: Path) -> None:
    for name in ("text", "sentence", "texts", "content"):
        columns = {name: TEXTS, "label": [row % 3 for row in range(ROWS)]}
        write_parquet(tmp_path / "e.parquet", {"embedding": FEATURES.tolist()}, columns)
        read = of_embeddings(tmp_path / "e.parquet", ColumnChoice())
        assert (read.unused, read.groups, len(read.classes)) == ({name}, {}, 3)
