"""One table has one meaning: the same columns give the same dataset whichever command and format they come through."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from command import fedcache, ok
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from make_images import encoded
from refusal import refused

from fedcache.errors import Exit
from fedcache.extract.datasets import open_dataset
from fedcache.extract.datasets.dataset import Dataset
from fedcache.extract.digests import DigestMemory
from fedcache.extract.planning.torch_embeddings import open_any
from fedcache.parsing import in_a_list
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
        "group": None if choice.groups is None else in_a_list(choice.groups),
        "no-label": in_a_list(choice.no_label),
        "unlabelled": "yes" if choice.unlabelled else None,
    }
    escaped = {word: value.replace("%", "%25").replace("&", "%26") for word, value in words.items() if value}
    said = "&".join(f"{word}={value}" for word, value in escaped.items())
    path = Path(spec.partition(":")[2])
    found: Dataset = open_dataset(f"{spec}?{said}" if said else spec, memory=DigestMemory(path.parent / "digests"))
    splits = None if HELD_OUT in found.reading else found.split.tolist()
    groups = {name: group.values() for name, group in found.groups.items()}
    return Read(
        found.classes, found.label.tolist(), splits, groups, set(found.unused), dict(found.may_be_labels)
    )  # fmt: skip


def read_file(kind: str, path: Path, choice: ColumnChoice | None = None) -> Read:
    """What ingest, or a reader of datasets of this kind, understands of a file."""
    choice = choice or ColumnChoice()
    return of_dataset(f"{kind}:{path}", choice) if kind else of_embeddings(path, choice)


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


def through(door: str, folder: Path, columns: Columns, choice: ColumnChoice | None = None) -> Read:
    kind, make = DOORS[door]
    inside = folder / door.replace(" ", "-")
    inside.mkdir(exist_ok=True)
    path = make(inside, columns)
    return read_file(kind, path, choice)


def all_doors(folder: Path, columns: Columns, choice: ColumnChoice | None = None) -> Read:
    """What every door reads, which is the same."""
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
        ([10**9, 10**9 + 1, -2], ("-2", "1000000000", "1000000001")),
        (["none", "NA", "null"], ("NA", "none", "null")),
        (["10", "9", "b"], ("10", "9", "b")),
    ],
)
def test_the_classes_are_the_values_that_occur_in_order(
    tmp_path: Path, values: list[Any], classes: tuple[str, ...]
) -> None:
    columns = {"label": [values[row % 3] for row in range(ROWS)]}
    assert all_doors(tmp_path, columns).classes == classes


@pytest.mark.parametrize("words", [["1e5", "100000", "7", "8"], ["1.0", "1", "2", "+1"], ["-0", "0", "007", "7"]])
def test_two_words_are_two_values_through_every_door(tmp_path: Path, words: list[str]) -> None:
    columns = {"label": [words[row % 4] for row in range(ROWS)], "site": [words[row % 4 - 1] for row in range(ROWS)]}
    read = all_doors(tmp_path, columns)
    assert read.classes == tuple(sorted(words))
    assert read.groups == {"site": columns["site"]}


def test_the_user_says_which_labels_mean_none(tmp_path: Path) -> None:
    columns = {"label": [[-1, 0, 4][row % 3] for row in range(ROWS)]}
    read = all_doors(tmp_path, columns, ColumnChoice(no_label=("-1",)))
    assert read.classes == ("0", "4")
    assert read.labels[:3] == [-1, 0, 1]
    words = {"label": [["?", "NA", "cat", None][row % 4] for row in range(ROWS)]}
    (tmp_path / "words").mkdir()
    read = all_doors(tmp_path / "words", words, ColumnChoice(no_label=("NA", "?")))
    assert (read.classes, read.labels[:4]) == (("cat",), [-1, -1, 0, -1])


@pytest.mark.parametrize(
    ("name", "yes_no"),
    [
        ("is_test", (True, False)),
        ("is_test", ("1", "0")),
        ("isTest", ("yes", "no")),
        ("test", ("T", "F")),
        ("in_test", ("true", "False")),
        ("is_test", (1.0, 0.0)),
    ],
)
def test_the_words_for_yes_and_no_are_read_alike(tmp_path: Path, name: str, yes_no: tuple[Any, Any]) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], name: [yes_no[row < 10] for row in range(ROWS)]}
    assert all_doors(tmp_path, columns).splits == [0] * 10 + [1] * 14


@pytest.mark.parametrize(
    ("flags", "splits"),
    [
        # The rows that no column marks are of the first split without a column, in the order train, test, validation.
        ({"is_test": [1, 0, 0], "is_train": [0, 1, 0]}, [1, 0, 2]),
        ({"is_train": [1, 0, 0], "is_val": ["no", "yes", "no"]}, [0, 2, 1]),
        ({"train": [0, 1, 0], "test": [1, 0, 0], "val": [0, 0, 1]}, [1, 0, 2]),
    ],
)
def test_columns_that_each_mark_a_split_are_combined(
    tmp_path: Path, flags: dict[str, list[Any]], splits: list[int]
) -> None:
    columns: Columns = {name: values * (ROWS // 3) for name, values in flags.items()}
    read = all_doors(tmp_path, {"label": [row % 2 for row in range(ROWS)], **columns})
    assert (read.splits, read.groups) == (splits * (ROWS // 3), {})


@pytest.mark.parametrize("name", ["fold", "partition"])
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
        ({"inTrain": ["a", "b", "c"]}, ("'a'", "row 0", "--group-key inTrain")),
        ({"set": ["train", "test", "holdout"]}, ("'holdout'", "row 2", "--group-key set")),
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
        refused(lambda door=door: through(door, tmp_path, table), *said)


def test_a_column_named_like_a_split_is_a_group_if_the_user_says_so(tmp_path: Path) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], "is_test": ["yes", "no", "maybe"] * (ROWS // 3)}
    read = all_doors(tmp_path, columns, ColumnChoice(groups=("is_test",)))
    assert (read.splits, list(read.groups)) == (None, ["is_test"])


@pytest.mark.parametrize(
    ("name", "values", "splits"),
    [
        ("in_train", [1, 1, 0], [0, 0, 1]),
        ("train_set", ["yes", "no", "no"], [0, 1, 1]),
        # Without test rows the validation rows are the test set.
        ("is_val", [1, 0, 0], [1, 0, 0]),
        ("part", [0, 1, 2], [0, 1, 2]),
        ("part", ["train", "test", "val"], [0, 1, 2]),
    ],
)
def test_the_name_of_the_column_says_what_its_truth_values_mean(
    tmp_path: Path, name: str, values: list[Any], splits: list[int]
) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], name: values * (ROWS // 3)}
    assert all_doors(tmp_path, columns, ColumnChoice(split=name)).splits == splits * (ROWS // 3)


@pytest.mark.parametrize("name", ["part", "not_train"])
def test_a_name_that_does_not_say_it_is_refused(tmp_path: Path, name: str) -> None:
    columns = {"label": [row % 2 for row in range(ROWS)], name: [0, 1, 1] * (ROWS // 3)}
    for door in DOORS:
        refused(lambda door=door: through(door, tmp_path, columns, ColumnChoice(split=name)), name)


@pytest.mark.parametrize("values", [[0, 1, 2], [True, True, False]])
def test_val_and_is_valid_alone_mark_no_rows(tmp_path: Path, values: list[Any]) -> None:
    # A value, and whether a row is usable.
    columns: Columns = dict.fromkeys(("val", "is_valid"), values * (ROWS // 3))
    read = all_doors(tmp_path, {"label": [row % 2 for row in range(ROWS)], **columns})
    assert (read.splits, list(read.groups)) == (None, ["val", "is_valid"])


@pytest.mark.parametrize("columns", [{"split": ["train"]}, {"is_test": [False]}])
def test_without_test_rows_a_fifth_of_the_training_rows_is_held_out(tmp_path: Path, columns: Columns) -> None:
    table = {"label": [row % 2 for row in range(ROWS)], **{name: values * ROWS for name, values in columns.items()}}
    assert all_doors(tmp_path, table).splits is None


def test_a_table_without_training_rows_is_refused(tmp_path: Path) -> None:
    table = {"label": [row % 2 for row in range(ROWS)], "split": ["test", "val"] * (ROWS // 2)}
    for door in DOORS:
        refused(lambda door=door: through(door, tmp_path, table), "no training")


def test_a_value_of_its_own_in_every_row_is_a_group_only_when_asked_for(tmp_path: Path) -> None:
    when = [f"2026-01-{1 + row:02d}T10:00:00" for row in range(ROWS)]
    columns: Columns = {"label": [row % 2 for row in range(ROWS)], "note": TEXTS, "when": when}
    read = all_doors(tmp_path, columns)
    assert (read.groups, read.unused) == ({}, {"note", "when"})
    (tmp_path / "asked").mkdir()
    assert all_doors(tmp_path / "asked", columns, ColumnChoice(groups=("when",))).groups == {"when": when}


@pytest.mark.slow
def test_a_column_that_may_be_the_labels_is_named_by_every_door(tmp_path: Path) -> None:
    diagnosis = [["flu", "cold", "none"][row % 3] for row in range(ROWS)]
    columns: Columns = {"diagnosis": diagnosis, "age": [row % 5 for row in range(ROWS)]}
    assert all_doors(tmp_path, columns).may_be_labels == {"diagnosis": 3, "age": 5}
    (tmp_path / "none").mkdir()
    assert all_doors(tmp_path / "none", columns, ColumnChoice(unlabelled=True)).may_be_labels == {}


@pytest.mark.parametrize("name", ["病院", "cell type", "R&D", "a,b", "100%"])
def test_any_column_of_few_values_may_be_the_labels(tmp_path: Path, name: str) -> None:
    columns: Columns = {name: [["flu", "cold", "none"][row % 3] for row in range(ROWS)]}
    assert all_doors(tmp_path, columns).may_be_labels == {name: 3}
    (tmp_path / "chosen").mkdir()
    assert all_doors(tmp_path / "chosen", columns, ColumnChoice(label=name)).classes == ("cold", "flu", "none")


def test_the_column_that_is_suggested_can_be_named(tmp_path: Path) -> None:
    for name in ("cell type", "R&D", "a,b"):
        write_npz(tmp_path / "i.npz", {"images": IMAGES, "X": FEATURES}, {name: ["a", "b"] * (ROWS // 2)})
        for words in (("ingest", tmp_path / "i.npz", "--name", "mine"),
                      ("extract", "--dataset", f"arrays:{tmp_path / 'i.npz'}", "--backbones", "pixels", "--size", "8",
                       "--workers", 0)):  # fmt: skip
            said = fedcache(*words)
            assert said.code == Exit.USAGE
            (suggested,) = re.findall(r"--label-key ('[^']*'|\S+)", said.err.split("labels:")[1].split(";")[0])[:1]
            chosen = ok(*words, "--label-key", *shlex.split(suggested), *["--replace"][: words[0] == "ingest"])
            assert Store.open(chosen.data["path"]).samples.classes == ("a", "b")


def test_groups_are_called_like_their_columns_or_it_is_said(tmp_path: Path) -> None:
    site = ["x", "y"] * (ROWS // 2)
    other = ["u", "u", "v"] * (ROWS // 3)
    columns: Columns = {"label": [row % 2 for row in range(ROWS)], "a b": other, "a_b": site, "_site": site,
                        "h\u00f4pital": other, "a,b": site}  # fmt: skip
    read = all_doors(tmp_path, columns)
    assert read.groups == {"a_b": site, "site": site, "h_pital": other}
    assert read.unused == {"a b", "a,b"}
    (tmp_path / "asked").mkdir()
    assert all_doors(tmp_path / "asked", columns, ColumnChoice(groups=("a,b",))).groups == {"a_b": site}
    write_npz(tmp_path / "e.npz", {"X": FEATURES}, columns)
    assert any(
        note.startswith("h\u00f4pital is the group h_pital") for note in open_embeddings(tmp_path / "e.npz").notes
    )


def test_of_two_columns_of_one_name_the_exact_one_is_taken(tmp_path: Path) -> None:
    columns: Columns = {"Label": ["x", "y"] * (ROWS // 2), "label": ["a", "b", "c"] * (ROWS // 3)}
    read = all_doors(tmp_path, columns)
    assert (read.classes, read.groups) == (("a", "b", "c"), {"Label": columns["Label"]})
    neither = {"Label": columns["Label"], "LABEL": columns["label"]}
    for door in DOORS:
        refused(lambda door=door: through(door, tmp_path, neither), "may each be the column", "--label-key")


# Shapes and names of columns


def test_blanks_around_names_are_no_part_of_them(tmp_path: Path) -> None:
    rows = range(ROWS)
    read = all_doors(
        tmp_path,
        {" Label": [row % 3 for row in rows], "is_test ": [row % 2 for row in rows], " site": ["x", "y"] * (ROWS // 2)},
    )
    assert (read.classes, read.splits, list(read.groups)) == (("0", "1", "2"), [0, 1] * (ROWS // 2), ["site"])


def test_an_empty_column_is_not_the_labels_if_another_one_is(tmp_path: Path) -> None:
    columns: Columns = {"label": [None] * ROWS, "class": ["a", "b"] * (ROWS // 2)}
    assert all_doors(tmp_path, columns).classes == ("a", "b")


def test_a_table_of_numbers_beside_the_labels_is_not_the_labels(tmp_path: Path) -> None:
    pairs = [[row, row + 1] for row in range(ROWS)]
    columns: Columns = {"labels": pairs, "category": ["a", "b"] * (ROWS // 2)}
    for door in DOORS:
        if door != "ingest h5":
            read = through(door, tmp_path, columns)
            assert (read.classes, read.groups, read.unused) == (("a", "b"), {}, {"labels"}), door


def test_names_that_repeat_name_no_rows(tmp_path: Path) -> None:
    columns: Columns = {"label": [row % 2 for row in range(ROWS)], "name": ["x", "y", "z"] * (ROWS // 3)}
    assert all_doors(tmp_path, columns).groups == {"name": columns["name"]}


def test_what_a_table_of_arrow_holds_is_the_same_to_every_door_that_reads_one(tmp_path: Path) -> None:
    codes = [row % 3 for row in range(ROWS)]
    words = [["ant", "bee", "cat"][code] for code in codes]
    kinds = {
        "decimal": (pa.array([Decimal(code) for code in codes], pa.decimal128(5, 0)), ("0", "1", "2")),
        "binary": (pa.array([word.encode() for word in words], pa.binary()), ("ant", "bee", "cat")),
        "string view": (pa.array(words, pa.string_view()), ("ant", "bee", "cat")),
        "lists of one": (pa.array([[word] for word in words]), ("ant", "bee", "cat")),
        "dictionary": (pa.array(words).dictionary_encode(), ("ant", "bee", "cat")),
    }
    for kind, (column, classes) in kinds.items():
        for name, content in (("e", {"embedding": FEATURES.tolist()}), ("h", PICTURES), ("t", {"text": TEXTS})):
            pq.write_table(pa.table({**content, "label": column, "site": column}), tmp_path / f"{name}.parquet")
        for read in (
            read_file("", tmp_path / "e.parquet"),
            read_file("hf", tmp_path / "h.parquet"),
            read_file("texts", tmp_path / "t.parquet"),
        ):
            assert (read.classes, read.labels, list(read.groups)) == (classes, codes, ["site"]), kind


def test_words_and_numbers_in_one_column_of_json_are_words(tmp_path: Path) -> None:
    label = [[1, "1", "x", 2.5, None, True][row % 6] for row in range(ROWS)]
    rows = [{"embedding": FEATURES[row].tolist(), "path": f"{row:04d}.png", "label": label[row]} for row in range(ROWS)]
    for row, png in enumerate(PNGS):
        (tmp_path / f"{row:04d}.png").write_bytes(png)
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "e.json").write_text(json.dumps(rows))
    listed = "\n".join(json.dumps({key: row[key] for key in ("path", "label")}) for row in rows)
    (tmp_path / "list.jsonl").write_text(listed)
    for read in (
        read_file("", tmp_path / "e.jsonl"),
        read_file("", tmp_path / "e.json"),
        read_file("folder", tmp_path / "list.jsonl"),
        through("webdataset", tmp_path, {"label": label}),
    ):
        assert (read.classes, read.labels[:6]) == (("1", "2.5", "True", "x"), [0, 0, 3, 1, -1, 2])


@pytest.mark.parametrize("label", [["0.5", "1.0", "inf"], ["[1, 0]", "[0, 1]", "[0, 0]"]])
def test_measurements_and_lists_in_a_csv_are_no_classes(tmp_path: Path, label: list[str]) -> None:
    columns: Columns = {"label": label * (ROWS // 3)}
    for door in ("ingest csv", "folder csv", "texts csv"):
        refused(lambda door=door: through(door, tmp_path, columns), "label")
    columns = {"label": ["a", "b"] * (ROWS // 2), "box": label * (ROWS // 3)}
    for door in ("ingest csv", "folder csv", "texts csv"):
        read = through(door, tmp_path, columns)
        assert (read.groups, read.unused) == ({}, {"box"}), door


def test_a_column_called_label_is_a_group_of_a_table_without_labels(tmp_path: Path) -> None:
    columns: Columns = {"label": ["a", "b"] * (ROWS // 2), "empty": [None] * ROWS}
    read = all_doors(tmp_path, columns, ColumnChoice(unlabelled=True))
    assert (read.classes, read.groups, read.unused) == ((), {"label": columns["label"]}, {"empty"})


def test_lines_may_end_in_a_carriage_return_and_files_may_not_be_empty(tmp_path: Path) -> None:
    columns: Columns = {"label": ["a", "b"] * (ROWS // 2)}
    for door in ("ingest csv", "folder csv", "texts csv"):
        path = DOORS[door][1](tmp_path, columns)
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\r"))
        kind = DOORS[door][0]
        read = read_file(kind, path)
        assert read.classes == ("a", "b")
    for kind, make in DOORS.values():
        path = make(tmp_path, columns)
        path.write_bytes(b"")
        refused(lambda kind=kind, path=path: read_file(kind, path), "is empty")


def test_rows_of_one_split_and_of_no_split_are_refused(tmp_path: Path) -> None:
    more = {"y_train": [0] * 16, "y_test": [1] * 8}
    for kind, name, array in (("", "X", FEATURES), ("arrays", "x", IMAGES), ("rows", "rows", FEATURES)):
        arrays = {name: array, f"{name}_train": array[:16], f"{name}_test": array[16:]}
        write_npz(tmp_path / "e.npz", arrays, more)
        refused(lambda kind=kind: read_file(kind, tmp_path / "e.npz"), "split")


def test_a_column_without_a_split_beside_splits_is_named_as_not_used(tmp_path: Path) -> None:
    columns: Columns = {"y_train": [0, 1] * 8, "y_test": [1, 0] * 4, "y": [0] * 5}
    for kind, name, array in (("", "X", FEATURES), ("arrays", "x", IMAGES), ("rows", "rows", FEATURES)):
        write_npz(tmp_path / "e.npz", {f"{name}_train": array[:16], f"{name}_test": array[16:]}, columns)
        path = tmp_path / "e.npz"
        read = read_file(kind, path)
        assert (read.classes, read.unused) == (("0", "1"), {"y"})


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
            read_file("", tmp_path / "e.npz"),
            read_file("arrays", tmp_path / "i.npz"),
            read_file("rows", tmp_path / "r.npz"),
        ):
            assert (read.classes, read.labels, read.unused) == (*expected, set())
    plain = {"label": label}
    pq.write_table(named_codes(pa.table({"embedding": FEATURES.tolist(), **plain}), names), tmp_path / "e.parquet")
    pq.write_table(named_codes(pa.table({**PICTURES, **plain}), names), tmp_path / "h.parquet")
    pq.write_table(named_codes(pa.table({"text": TEXTS, **plain}), names), tmp_path / "t.parquet")
    for read in (
        read_file("", tmp_path / "e.parquet"),
        read_file("hf", tmp_path / "h.parquet"),
        read_file("texts", tmp_path / "t.parquet"),
    ):
        assert (read.classes, read.labels) == expected


def test_class_names_that_are_numbers_are_whole_numbers(tmp_path: Path) -> None:
    torch.save({"X": torch.tensor(FEATURES), "y": [0, 1, 2] * (ROWS // 3), "class_names": [2, 1, 0]}, tmp_path / "e.pt")
    assert open_any(tmp_path / "e.pt", ColumnChoice()).classes == ("2", "1", "0")


# Shapes and splits in the names of arrays


@pytest.mark.parametrize("write", [write_npz, write_h5])
def test_a_column_vector_is_a_column(tmp_path: Path, write: Callable[..., None]) -> None:
    label = np.arange(ROWS)[:, None] % 3
    path = tmp_path / f"e.{'npz' if write is write_npz else 'h5'}"
    for values in (label, label.astype("f4"), np.array(["a", "b", "c"])[label] if write is write_npz else label):
        columns = {"y": values, "site": values}
        write(path, {"X": FEATURES, "images": IMAGES, **columns}, {})
        ours = read_file("", path)
        theirs = read_file("arrays", path)
        assert ours.labels == theirs.labels == [row % 3 for row in range(ROWS)]
        assert ours.groups["site"] == theirs.groups["site"]


def test_one_hot_labels_are_refused_and_no_hint_changes_a_label(tmp_path: Path) -> None:
    write_npz(tmp_path / "e.npz", {"X": FEATURES, "images": IMAGES, "y": np.eye(4)[np.arange(ROWS) % 4]}, {})
    write_npz(tmp_path / "i.npz", {"X": FEATURES, "images": IMAGES, "y": np.eye(4, dtype=int)[np.arange(ROWS) % 4]}, {})
    for name in ("e.npz", "i.npz"):
        path = tmp_path / name
        refused(lambda path=path: read_file("", path), "exactly one 1", ".argmax(1)")
        refused(lambda path=path: read_file("arrays", path), "exactly one 1", ".argmax(1)")


@pytest.mark.parametrize(
    ("pattern", "ending"),
    [("{name}_{split}", "npz"), ("{split}_{name}", "h5"), ("{split}/{name}", "h5"), ("{name}/{split}", "h5")],
)
def test_training_and_test_rows_in_one_file_are_read_by_every_door(tmp_path: Path, pattern: str, ending: str) -> None:
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
        reads.append(read_file(kind, path))
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
        reads.append(read_file(kind, path))
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
    assert read_file("", tmp_path / "e.npz").labels == [0] * 10 + [1] * 6
    write_npz(tmp_path / "two.npz", {**arrays, "X_dev": FEATURES[16:22]}, columns)
    refused(lambda: read_file("", tmp_path / "two.npz"), "which rows y_validation belongs to")
    write_npz(tmp_path / "twice.npz", arrays, {**columns, "y_val": ["c"] * 6})
    refused(lambda: read_file("", tmp_path / "twice.npz"), "which rows y_validation belongs to")


def test_features_of_two_splits_are_those_of_the_file(tmp_path: Path) -> None:
    write_npz(tmp_path / "e.npz", {"X_train": FEATURES[:16], "X_test": FEATURES[16:]},
              {"y_train": [row % 2 for row in range(16)], "y_test": [row % 2 for row in range(8)]})  # fmt: skip
    made_store = ok("ingest", tmp_path / "e.npz", "--name", "two").data
    store = Store.open(made_store["path"])
    assert np.array_equal(store.reader(*store.arrays).all()[:, 0], np.concatenate([FEATURES[16:], FEATURES[:16]]))
    assert (store.samples.split == [1] * 8 + [0] * 16).all()


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    label = ["ant", "bee", "lion"] * (ROWS // 3)
    write_npz(tmp_path / "e.npz", {"X": FEATURES, "classes": np.array(["ant", "bee"])}, {"label": label})
    refused(lambda: read_file("", tmp_path / "e.npz"), "'lion'", "ant, bee")
    measured = {"label": label, "domain": [0.5, 1.0] * (ROWS // 2)}
    large = {"label": [2.0**60, 2.0**61] * (ROWS // 2)}
    for door in ("ingest npz", "arrays npz", "rows npz", "hf", "texts parquet"):
        refused(lambda door=door: through(door, tmp_path, measured), ": domain holds", "--domain-key")
        refused(lambda door=door: through(door, tmp_path, large), "2^53" if "npz" in door else "label")


def test_a_command_that_fails_is_not_advised_again(tmp_path: Path) -> None:
    write_npz(tmp_path / "e.npz", {"X": FEATURES}, {"label": [0, 1] * (ROWS // 2), "split": ["a", "b"] * (ROWS // 2)})
    for words in ((), ("--label-key", "nothing"), ("--split-key", "nothing"), ("--split-key", "label")):
        said = fedcache("ingest", tmp_path / "e.npz", "--name", "mine", *words)
        assert said.code == Exit.USAGE
        assert "Then:" not in said.err


def test_files_without_a_split_in_their_name_are_named_if_no_other_has_training_rows(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    (tmp_path / "w").mkdir()
    columns: Columns = {"label": [0, 1] * (ROWS // 2)}
    for name in ("site_a", "site_val", "test_site"):
        write_parquet(tmp_path / "h" / f"{name}.parquet", PICTURES, columns)
        write_tar(tmp_path / "w" / f"{name}.tar", columns)
    refused(lambda: read_file("hf", tmp_path / "h"), "site_a.parquet would be left out", "train-0000")
    refused(lambda: read_file("webdataset", tmp_path / "w"), "site_a.tar would be", "train-0000")


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
        read = read_file("", tmp_path / "e.parquet")
        assert (read.unused, read.groups, len(read.classes)) == ({name}, {}, 3)
