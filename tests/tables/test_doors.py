"""One table has one meaning: the same columns give the same dataset whichever command and format they come through."""

import csv
import io
import json
import re
import shlex
import tarfile
import tempfile
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from arrays import normals
from command import data_of, fedcache
from command_lines import every_command
from draws import examples
from failing_command import must_fail
from hypothesis import Phase, example, given
from hypothesis import strategies as st
from made_path import place_of
from make_images import encoded, random_bytes
from opened import open_dataset
from refusal import refused

from fedcache import Store
from fedcache.extract.datasets.columns import in_a_spec
from fedcache.extract.planning.ingest import open_any
from fedcache.parsing import in_a_list, listed
from fedcache.store.content import arrange
from fedcache.store.samples import HELD_OUT
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.roles import ColumnChoice
from fedcache.tables.table_files import EMPTY_CELLS

ROWS = 24
FEATURES = normals(0, ROWS, 3)
IMAGES = random_bytes(1, ROWS, 4, 4, 3)
PNGS = [encoded(image) for image in IMAGES]
TEXTS = [f"a text of its own, number {row}" for row in range(ROWS)]


@dataclass(frozen=True)
class Read:
    """What a command understands of a table."""

    classes: tuple[str, ...]
    labels: list[int]  # of each row, index into ``classes``
    splits: list[int] | None  # of each row; None where test rows are held out of the others
    groups: dict[str, list[str | None]]  # the value of each row
    unused: set[str]
    may_be_labels: dict[str, int]

    @property
    def words(self):
        """The class of each row."""
        return [None if code < 0 else self.classes[code] for code in self.labels]


def array_of(values, *, objects):
    """A column as numpy has it: words of Python where ``objects``, else of numpy; a missing number is NaN."""
    known = [value for value in values if value is not None]
    if any(isinstance(value, bool) for value in known) and len(known) < len(values):
        values = [
            None if value is None else str(value) for value in values
        ]  # numpy has no missing truth value
    if any(isinstance(value, str) for value in values):
        if objects:
            return np.array(values, dtype=object)
        return np.array(["" if value is None else value for value in values], dtype=np.str_)
    if len(known) < len(values):
        return np.array([np.nan if value is None else float(value) for value in values])
    return np.array(known)


def write_npz(path, content, columns):
    arrays = {name: array_of(values, objects=None in values) for name, values in columns.items()}
    np.savez(path, **content, **arrays)  # type: ignore[arg-type]


def write_h5(path, content, columns):
    with h5py.File(path, "w") as file:
        for name, array in content.items():
            file[name] = array
        for name, values in columns.items():
            array = array_of(values, objects=False)
            words = array.dtype.kind == "U"
            file.create_dataset(
                name,
                data=array.tolist() if words else array,
                dtype=h5py.string_dtype() if words else None,
            )


WRITE = {"npz": write_npz, "h5": write_h5}


def write_parquet(path, content, columns):
    pq.write_table(pa.table(content | columns), path)


def write_csv(path, content, columns):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*content, *columns])
        for row in zip(*content.values(), *columns.values(), strict=True):
            writer.writerow(["" if value is None else value for value in row])


KEYS = [f"{row:04d}" for row in range(ROWS)]


def shard(path, keys=KEYS, **parts):
    """Samples whose parts have these endings: words as they are, and what is no word as JSON."""
    with tarfile.open(path, "w") as file:
        for row, key in enumerate(keys):
            held = {"png": PNGS[row]}
            for ending, values in parts.items():
                value = values[row % len(values)]
                held[ending] = (value if isinstance(value, str) else json.dumps(value)).encode()
            for ending, data in held.items():
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return path


def write_tar(path, columns):
    return shard(path, json=[{n: values[i] for n, values in columns.items()} for i in range(ROWS)])


def understood(found, label, splits):
    groups = {name: group.values() for name, group in found.groups.items()}
    unused = set(found.unused)
    return Read(found.classes, label.tolist(), splits, groups, unused, found.may_be_labels)


def of_embeddings(path, choice):
    found = open_embeddings(path, choice)
    made = arrange(found, "mine")  # which completes the splits
    splits = None if "held_out" in made.dataset else made.samples.split.tolist()
    return understood(found, found.labels, splits)


def of_dataset(spec, choice):
    words = {
        "label": choice.label,
        "split": choice.split,
        "group": None if choice.groups is None else in_a_list(choice.groups),
        "no-label": in_a_list(choice.no_label),
        "unlabelled": "yes" if choice.unlabelled else None,
    }
    said = "&".join(f"{word}={in_a_spec(value)}" for word, value in words.items() if value)
    found = open_dataset(f"{spec}?{said}" if said else spec)
    splits = None if HELD_OUT in found.reading else found.split.tolist()
    return understood(found, found.label, splits)


def read_file(kind, path, choice=None):
    """What ingest, or a reader of datasets of this kind, understands of a file."""
    choice = choice or ColumnChoice()
    return of_dataset(f"{kind}:{path}", choice) if kind else of_embeddings(path, choice)


def unreadable(kind, path, *said, choice=None):
    """Such a file is refused with these words."""
    refused(lambda: read_file(kind, path, choice), *said)


def ingest_wide_csv(folder, columns):
    dimensions = {f"f{d}": FEATURES[:, d].tolist() for d in range(FEATURES.shape[1])}
    write_csv(folder / "wide.csv", dimensions, columns)
    return folder / "wide.csv"


def list_of_images(folder, columns):
    for row, png in enumerate(PNGS):
        (folder / f"{row:04d}.png").write_bytes(png)
    write_csv(folder / "list.csv", {"path": [f"{row:04d}.png" for row in range(ROWS)]}, columns)
    return folder / "list.csv"


def made(write, name, content):
    def make(folder, columns):
        write(folder / name, content, columns)
        return folder / name

    return make


def tar_of(folder, columns):
    return write_tar(folder / "shard.tar", columns)


PICTURES = {"image": [{"bytes": png, "path": None} for png in PNGS]}
DOORS = {
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


TWO = [row % 2 for row in range(ROWS)]


def column(*values):
    """These values again and again, one a row."""
    return [values[row % len(values)] for row in range(ROWS)]


def repeated(columns):
    """Columns with these values again and again."""
    return {name: column(*values) for name, values in columns.items()}


def labelled(columns):
    """The same, and labels."""
    return {"label": TWO, **repeated(columns)}


def parted(name, rows):
    """Arrays of a file whose first 16 rows are for training."""
    return {f"{name}_train": rows[:16], f"{name}_test": rows[16:]}


def through(door, folder, columns, choice=None):
    kind, make = DOORS[door]
    inside = folder / door.replace(" ", "-")
    inside.mkdir(exist_ok=True)
    return read_file(kind, make(inside, columns), choice)


def all_doors(folder, columns, choice=None):
    """What every door reads, which is the same."""
    inside = Path(tempfile.mkdtemp(dir=folder))
    found = {door: through(door, inside, columns, choice) for door in DOORS}
    first = found["ingest npz"]
    for door, read in found.items():
        assert read == first, door
    return first


def options_of(command):
    return {name for option in dict(every_command())[command].params for name in option.opts}


def no_door(folder, columns, *said, choice=None, doors=tuple(DOORS)):
    """Every one of these doors refuses the table, says these words, and names no option that its command has not."""
    for door in doors:
        error = str(refused(lambda door=door: through(door, folder, columns, choice), *said))
        named = set(re.findall(r"--[a-z][a-z-]+", error))
        assert named <= options_of("extract" if DOORS[door][0] else "ingest"), f"{door}: {error}"


def of_words(words):
    """Whether a CSV that holds them says so too: of numbers and "NA" it would make numbers, some of them missing."""
    empty = {cell.lower() for cell in EMPTY_CELLS} | {"none"}
    return any(not word.isdigit() and word.lower() not in empty for word in words)


VALUES = st.one_of(
    st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=6, unique=True),
    st.lists(st.integers(0, 12), min_size=2, max_size=6, unique=True),
    st.just([-1, 0, 1]),
    st.just([-1, 1]),
    st.just([True, False]),
    st.lists(
        st.sampled_from(["none", "NA", "null", "n/a", "fist", "Palm", "10", "9", "é", "a b"]),
        min_size=2,
        max_size=6,
        unique=True,
    ).filter(of_words),
)
LABEL_NAMES = st.sampled_from(
    ["label", "Labels", "y", "target", "class", "cls", "category", "fine_label"]
)
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
@examples(8, 25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_a_table_means_the_same_through_every_door(tmp_path_factory, data):
    rows = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(ROWS)

    def column(values):
        return [values[row % len(values)] for row in rows]

    columns = {}
    named = data.draw(LABEL_NAMES)
    values = data.draw(VALUES)
    columns[named] = column([*values, None] if data.draw(st.booleans()) else values)
    name, words = data.draw(SPLITS)
    columns[name] = column(words)
    columns |= {other: column(kinds) for other, kinds in data.draw(OTHERS).items()}
    read = all_doors(tmp_path_factory.mktemp("doors"), columns)
    # What the table says, read from it by hand: the values that occur, and the row of each.
    assert set(read.classes) == {str(value) for value in values}
    assert read.words == [None if value is None else str(value) for value in columns[named]]
    # No column is dropped without a word.
    roles = {named, *([] if read.splits is None else [name])}
    assert read.unused | set(read.groups) | roles == set(columns)


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ([10**9, 10**9 + 1, -2], ("-2", "1000000000", "1000000001")),
        (["none", "NA", "null"], ("NA", "none", "null")),
        (["10", "9", "b"], ("10", "9", "b")),
        (["1e5", "100000", "7", "8"], ("100000", "1e5", "7", "8")),
        (["1.0", "1", "2", "+1"], ("+1", "1", "1.0", "2")),
        (["-0", "0", "007", "7"], ("-0", "0", "007", "7")),
    ],
)
def test_the_classes_are_the_values_that_occur_in_order(tmp_path, values, classes):
    read = all_doors(tmp_path, {"label": column(*values), "site": column(*values)})
    assert read.classes == classes
    assert read.groups == {"site": [str(value) for value in column(*values)]}


@pytest.mark.parametrize(
    ("values", "no_label", "classes", "labels"),
    [
        ([-1, 0, 4], ("-1",), ("0", "4"), [-1, 0, 1]),
        (["?", "NA", "cat", None], ("NA", "?"), ("cat",), [-1, -1, 0, -1]),
        ([-1.0, 1.0, 4.0], ("-1",), ("1", "4"), [-1, 0, 1]),
        ([-1.0, 1.0, 4.0], (" -1e0",), ("1", "4"), [-1, 0, 1]),
        (["1.0", "1", "2"], ("1.0",), ("1", "2"), [-1, 0, 1]),
    ],
)
def test_the_user_says_which_labels_mean_none(tmp_path, values, no_label, classes, labels):
    read = all_doors(tmp_path, {"label": column(*values)}, ColumnChoice(no_label=no_label))
    assert read.classes == classes
    assert read.labels == column(*labels)


@pytest.mark.parametrize(
    ("columns", "splits"),
    [
        ({"is_test": [True, False]}, [1, 0]),
        ({"is_test": ["1", "0"]}, [1, 0]),
        ({"isTest": ["yes", "no"]}, [1, 0]),
        ({"test": ["T", "F"]}, [1, 0]),
        ({"in_test": ["true", "False"]}, [1, 0]),
        ({"is_test": [1.0, 0.0]}, [1, 0]),
        # The rows that no column marks are of the first split without a column, in the order train, test, validation.
        ({"is_test": [1, 0, 0], "is_train": [0, 1, 0]}, [1, 0, 2]),
        ({"is_train": [1, 0, 0], "is_val": ["no", "yes", "no"]}, [0, 2, 1]),
        ({"train": [0, 1, 0], "test": [1, 0, 0], "val": [0, 0, 1]}, [1, 0, 2]),
        ({"fold": ["train", "Test", "val"]}, [0, 1, 2]),
        # Without test rows a fifth of the training rows is held out.
        ({"split": ["train"]}, None),
        ({"is_test": [False]}, None),
    ],
)
def test_the_words_for_yes_and_no_are_read_alike(tmp_path, columns, splits):
    read = all_doors(tmp_path, labelled(columns))
    assert read.splits == (None if splits is None else column(*splits))
    assert read.groups == {}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"is_test": [1, 0, None]}, ("no value of is_test", "row 2", "--group-key is_test")),
        ({"is_test": ["yes", "no", "maybe"]}, ("'maybe'", "row 2", "--group-key is_test")),
        ({"inTrain": ["a", "b", "c"]}, ("'a'", "row 0", "--group-key inTrain")),
        ({"set": ["train", "test", "holdout"]}, ("'holdout'", "row 2", "--group-key set")),
        ({"split": ["train", "test", "morning"]}, ("'morning'", "row 2", "--split-key NAME")),
        (
            {"splitt": ["train", "test", "val"]},
            ("the values of splitt are names of splits", "--split-key splitt"),
        ),
        ({"is_test": [0.5, 0.25, 1.0]}, ("is_test is", "--group-key is_test")),
        (
            {"is_test": [1, 0, 0], "is_train": [1, 1, 0]},
            ("contradict each other", "row 0", "--split-key is_test"),
        ),
        (
            {"is_train": [1, 0, 0], "test": [0, 1, 0], "val": [0, 0, 0]},
            ("8 rows have no mark in any", "row 2"),
        ),
        ({"split": ["test", "val"]}, ("no training",)),
    ],
)
def test_a_column_named_like_a_split_that_says_none_stops_every_door(tmp_path, columns, said):
    no_door(tmp_path, labelled(columns), *said)


@pytest.mark.parametrize(
    ("columns", "choice"),
    [
        ({"fold": [10, 11, 12]}, ColumnChoice()),
        # A value, and whether a row is usable.
        ({"val": [0, 1, 2], "is_valid": [0, 1, 2]}, ColumnChoice()),
        ({"is_test": ["yes", "no", "maybe"]}, ColumnChoice(groups=("is_test",))),
        ({"name": ["x", "y", "z"]}, ColumnChoice()),
    ],
)
def test_a_column_named_like_a_split_is_a_group_if_the_user_says_so(tmp_path, columns, choice):
    table = repeated(columns)
    read = all_doors(tmp_path, {"label": TWO, **table}, choice)
    groups = {name: [str(value) for value in values] for name, values in table.items()}
    assert read.splits is None
    assert read.groups == groups


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
def test_the_name_of_the_column_says_what_its_truth_values_mean(tmp_path, name, values, splits):
    read = all_doors(tmp_path, labelled({name: values}), ColumnChoice(split=name))
    assert read.splits == column(*splits)


@pytest.mark.parametrize("name", ["part", "not_train"])
def test_a_name_that_does_not_say_it_is_refused(tmp_path, name):
    no_door(tmp_path, labelled({name: [0, 1, 1]}), name, choice=ColumnChoice(split=name))


def test_a_value_of_its_own_in_every_row_is_a_group_only_when_asked_for(tmp_path):
    when = [f"2026-01-{1 + row:02d}T10:00:00" for row in range(ROWS)]
    columns = {"label": TWO, "note": TEXTS, "when": when}
    read = all_doors(tmp_path, columns)
    assert read.groups == {}
    assert read.unused == {"note", "when"}
    assert all_doors(tmp_path, columns, ColumnChoice(groups=("when",))).groups == {"when": when}


@pytest.mark.parametrize("name", ["病院", "cell type", "R&D", "a,b", "100%"])
def test_any_column_of_few_values_may_be_the_labels(tmp_path, name):
    columns = {name: column("flu", "cold", "none"), "age": column(*range(4))}
    assert all_doors(tmp_path, columns).may_be_labels == {name: 3, "age": 4}
    assert all_doors(tmp_path, columns, ColumnChoice(label=name)).classes == ("cold", "flu", "none")
    assert all_doors(tmp_path, columns, ColumnChoice(unlabelled=True)).may_be_labels == {}


@pytest.mark.parametrize(
    ("columns", "classes", "groups"),
    [
        ({"Label": ["x", "y"], "label": ["a", "b", "c"]}, ("a", "b", "c"), ["Label"]),
        ({"cls": ["x", "y"], "label": ["a", "b", "c"]}, ("a", "b", "c"), ["cls"]),
        ({"label": [None], "class": ["a", "b"]}, ("a", "b"), []),
        # Blanks around a name are no part of it.
        ({" Label": [0, 1], " site": ["x", "y"]}, ("0", "1"), ["site"]),
    ],
)
def test_of_two_columns_that_may_be_the_labels_the_same_is_taken(
    tmp_path, columns, classes, groups
):
    read = all_doors(tmp_path, repeated(columns))
    assert read.classes == classes
    assert list(read.groups) == groups


def test_groups_are_called_like_their_columns_or_it_is_said(tmp_path):
    site = column("x", "y")
    other = column("u", "u", "v")
    columns = {
        "label": TWO,
        "a b": other,
        "a_b": site,
        "_site": site,
        "h\u00f4pital": other,
        "a,b": site,
    }
    read = all_doors(tmp_path, columns)
    assert read.groups == {"a_b": site, "site": site, "h_pital": other}
    assert read.unused == {"a b", "a,b"}
    assert all_doors(tmp_path, columns, ColumnChoice(groups=("a,b",))).groups == {"a_b": site}


# Shapes and names of columns


def test_a_table_of_numbers_beside_the_labels_is_not_the_labels(tmp_path):
    columns = {"labels": [[row, row + 1] for row in range(ROWS)], "category": column("a", "b")}
    for door in DOORS:
        if door != "ingest h5":
            read = through(door, tmp_path, columns)
            assert (read.classes, read.groups, read.unused) == (("a", "b"), {}, {"labels"}), door


def test_what_a_table_of_arrow_holds_is_the_same_to_every_door_that_reads_one(tmp_path):
    codes = column(0, 1, 2)
    beasts = ("ant", "bee", "cat")
    words = column(*beasts)
    kinds = [
        (pa.array([Decimal(code) for code in codes], pa.decimal128(5, 0)), ("0", "1", "2")),
        (pa.array([word.encode() for word in words], pa.binary()), beasts),
        (pa.array(words, pa.string_view()), beasts),
        (pa.array([[word] for word in words]), beasts),
        (pa.array(words).dictionary_encode(), beasts),
    ]
    for held, classes in kinds:
        for door in ("ingest parquet", "hf", "texts parquet"):
            read = through(door, tmp_path, {"label": held, "site": held})
            assert (read.classes, read.labels, list(read.groups)) == (classes, codes, ["site"]), (
                held.type
            )


@pytest.mark.parametrize("label", [["0.5", "1.0", "inf"], ["[1, 0]", "[0, 1]", "[0, 0]"]])
def test_measurements_and_lists_in_a_csv_are_no_classes(tmp_path, label):
    doors = ("ingest csv", "folder csv", "texts csv")
    no_door(tmp_path, {"label": column(*label)}, "label", doors=doors)
    for door in doors:
        read = through(door, tmp_path, {"label": column("a", "b"), "box": column(*label)})
        assert (read.groups, read.unused) == ({}, {"box"}), door


def test_a_column_called_label_is_a_group_of_a_table_without_labels(tmp_path):
    columns = {"label": column("a", "b"), "empty": [None] * ROWS}
    read = all_doors(tmp_path, columns, ColumnChoice(unlabelled=True))
    assert read.classes == ()
    assert read.groups == {"label": columns["label"]}
    assert read.unused == {"empty"}


OF_ARRAYS = (("", "X", FEATURES), ("arrays", "x", IMAGES), ("rows", "rows", FEATURES))


def test_lines_may_end_in_a_carriage_return_and_files_may_not_be_empty(tmp_path):
    for door, (kind, make) in DOORS.items():
        path = make(tmp_path, {"label": column("a", "b")})
        if door.endswith("csv"):
            path.write_bytes(path.read_bytes().replace(b"\r\n", b"\r"))
            assert read_file(kind, path).classes == ("a", "b")
        path.write_bytes(b"")
        unreadable(kind, path, "is empty")


def test_rows_of_one_split_and_of_no_split_are_refused(tmp_path):
    path = tmp_path / "e.npz"
    for kind, name, array in OF_ARRAYS:
        arrays = parted(name, array)
        write_npz(path, {name: array, **arrays}, {"y_train": [0] * 16, "y_test": [1] * 8})
        unreadable(kind, path, "split")
        # A column without a split beside splits is named as not used.
        write_npz(path, arrays, {"y_train": [0, 1] * 8, "y_test": [1, 0] * 4, "y": [0] * 5})
        read = read_file(kind, path)
        assert read.classes == ("0", "1")
        assert read.unused == {"y"}


# Class names


def named_codes(table, names):
    """A table whose label is a ClassLabel of Hugging Face, or a list of one."""
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    if pa.types.is_list(table.schema.field("label").type):
        features = {"label": {"feature": features["label"], "length": 1, "_type": "Sequence"}}
    return table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


def test_class_names_of_the_file_are_read_by_every_door(tmp_path):
    names = [
        "walrus",
        "crane",
        "ant",
        "crane",
    ]  # in no order, one without a row, one twice as in ImageNet
    label = column(0, 2, 3, -1)
    expected = (("walrus", "crane #1", "ant", "crane #3"), label, set())
    for word in ("class_names", "classes", "label_names"):
        for kind, name, array in OF_ARRAYS:
            path = tmp_path / f"of{kind}.npz"
            write_npz(path, {name: array, word: np.array(names)}, {"y": label})
            read = read_file(kind, path)
            assert (read.classes, read.labels, read.unused) == expected
    for kind, content in (
        ("", {"embedding": FEATURES.tolist()}),
        ("hf", PICTURES),
        ("texts", {"text": TEXTS}),
    ):
        path = tmp_path / f"of{kind}.parquet"
        for values in (label, [[code] for code in label]):
            pq.write_table(named_codes(pa.table({**content, "label": values}), names), path)
            read = read_file(kind, path)
            assert (read.classes, read.labels, read.unused) == expected
    for owner in ("/", "y"):
        for kind, name, array in OF_ARRAYS:
            path = tmp_path / f"of{kind}.h5"
            write_h5(path, {name: array}, {"y": label, "site": TWO})
            with h5py.File(path, "a") as file:
                file[owner].attrs["class_names"] = names
                file["site"].attrs["classes"] = ["north", "south"]
                if owner != "/":
                    file.attrs["class_names"] = ["of", "another", "column", "of", "it"]
            read = read_file(kind, path)
            assert (read.classes, read.labels) == expected[:2]
            others = {"site/classes"} if owner == "/" else {"site/classes", "class_names"}
            assert list(read.groups) == ["site"]
            assert read.unused == others


def test_as_many_class_names_as_rows_are_the_names_of_numbers(tmp_path):
    columns = {"label": [*reversed(range(ROWS))], "classes": [f"c{row}" for row in range(ROWS)]}
    read = all_doors(tmp_path, columns)
    assert read.classes == tuple(columns["classes"])
    assert read.labels == columns["label"]


def write_arrow(path, table):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("train", "test", "classes"),
    [
        (["cat", "fox"], ["cat", "dog", "fox"], ("cat", "dog", "fox")),
        (["cat", "dog", "fox"], ["cat", "fox"], ("cat", "fox", "dog")),
        (["dog", "cat"], ["cat", "dog"], ("cat", "dog")),
        ([], ["cat", "dog"], ("cat", "dog")),
        (["cat", "dog"], [], ("cat", "dog")),
    ],
)
def test_a_row_has_the_class_name_that_its_own_file_lists(tmp_path, ending, train, test, classes):
    words = []
    for split, names in (("test", test), ("train", train)):  # in the order of their names
        of_file = names or test or train  # a file without a list has that of the others
        table = named_codes(pa.table({**PICTURES, "label": column(*range(len(of_file)))}), names)
        if ending == "arrow":
            write_arrow(tmp_path / f"{split}-0.arrow", table)
        else:
            pq.write_table(table, tmp_path / f"{split}-0.parquet")
        words += column(*of_file)
    read = read_file("hf", tmp_path)
    assert read.classes == classes
    assert read.words == words


def test_files_of_one_table_may_have_other_columns_and_types_of_numbers(tmp_path):
    label = column(0, 1, None)
    write_parquet(tmp_path / "train-0.parquet", PICTURES, {"label": label, "site": TWO})
    write_parquet(tmp_path / "test-0.parquet", PICTURES, {"label": TWO, "empty": [None] * ROWS})
    write_parquet(
        tmp_path / "train-1.parquet", PICTURES, {"label": [None] * ROWS, "empty": [None] * ROWS}
    )
    read = read_file("hf", tmp_path)
    assert read.classes == ("0", "1")
    assert read.unused == {"empty"}
    assert read.labels == [*TWO, *(-1 if code is None else code for code in label), *[-1] * ROWS]
    assert read.groups == {"site": [*[None] * ROWS, *map(str, TWO), *[None] * ROWS]}


def test_class_names_that_are_numbers_are_whole_numbers(tmp_path):
    torch.save(
        {"X": torch.tensor(FEATURES), "y": column(0, 1, 2), "class_names": [2, 1, 0]},
        tmp_path / "e.pt",
    )
    assert open_any(tmp_path / "e.pt", ColumnChoice()).classes == ("2", "1", "0")


def test_every_entry_of_a_torch_file_is_used_or_named(tmp_path):
    alone = {"epoch": 3, "model": "vit", "config": {"lr": {"head": 0.1}}, "none": None}
    torch.save({**alone, "X": torch.tensor(FEATURES), "y": TWO}, tmp_path / "e.pt")
    found = open_any(tmp_path / "e.pt", ColumnChoice())
    assert found.unused == dict.fromkeys(alone, "one value") | {"config": "one Python object"}
    torch.save(alone, tmp_path / "e.pt")
    refused(
        lambda: open_any(tmp_path / "e.pt", ColumnChoice()), "objects other than tensors and lists"
    )


# Shapes and splits in the names of arrays


@pytest.mark.parametrize("ending", WRITE)
def test_a_column_vector_is_a_column(tmp_path, ending):
    label = np.arange(ROWS)[:, None] % 3
    path = tmp_path / f"e.{ending}"
    for values in (
        label,
        label.astype("f4"),
        np.array(["a", "b", "c"])[label] if ending == "npz" else label,
    ):
        WRITE[ending](path, {"X": FEATURES, "images": IMAGES, "y": values, "site": values}, {})
        ours = read_file("", path)
        theirs = read_file("arrays", path)
        assert ours.labels == theirs.labels == column(0, 1, 2)
        assert ours.groups["site"] == theirs.groups["site"]


@pytest.mark.parametrize(
    ("pattern", "ending"),
    [
        ("{name}_{split}", "npz"),
        ("{split}_{name}", "h5"),
        ("{split}/{name}", "h5"),
        ("{name}/{split}", "h5"),
    ],
)
def test_training_and_test_rows_in_one_file_are_read_by_every_door(tmp_path, pattern, ending):
    label = column(7, 281, 999)
    site = column("a", "b")
    write = WRITE[ending]
    words = [str(x) for x in label[16:] + label[:16]]
    for kind, content, array in (*OF_ARRAYS, ("", "data", FEATURES)):
        held = {"other": FEATURES[:5]}
        columns = {}
        for split, rows in (("train", slice(0, 16)), ("test", slice(16, ROWS))):
            held[pattern.format(name=content, split=split)] = array[rows]
            columns[pattern.format(name="is_test", split=split)] = [split == "test"] * len(
                array[rows]
            )
            columns[pattern.format(name="y", split=split)] = label[rows]
            columns[pattern.format(name="site", split=split)] = site[rows]
        path = tmp_path / f"{kind}{content}.{ending}"
        write(path, held, columns)
        read = read_file(kind, path)
        assert read.splits == [1] * 8 + [0] * 16  # in the order of the names of the splits
        assert read.classes == ("7", "281", "999")
        assert read.unused == {"other", "is_test"}
        assert read.words == words
        assert read.groups == {"site": site[16:] + site[:16]}


@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_two_arrays_of_one_split_are_joined_with_their_own_columns(tmp_path, ending):
    parts = {
        "train": slice(0, 10),
        "val": slice(10, 14),
        "dev": slice(14, 20),
        "test": slice(20, ROWS),
    }
    label = [
        f"{word}-{row % 2}" for word, rows in parts.items() for row in range(rows.stop - rows.start)
    ]
    # An HDF5 file lists its arrays in the order of their names.
    validation = ["val", "dev"] if ending == "npz" else ["dev", "val"]
    words = [x for word in ("test", "train", *validation) for x in label[parts[word]]]
    write = WRITE[ending]
    for kind, content, array in OF_ARRAYS:
        # The columns are not in the order of their arrays.
        columns = {f"y_{word}": label[rows] for word, rows in reversed(parts.items())}
        path = tmp_path / f"file{kind}.{ending}"
        write(path, {f"{content}_{word}": array[rows] for word, rows in parts.items()}, columns)
        read = read_file(kind, path)
        assert read.words == words
        assert read.splits == [1] * 4 + [0] * 10 + [2] * 10


def test_a_column_goes_with_the_array_of_its_split_unless_there_are_two(tmp_path):
    arrays = {"X_train": FEATURES[:10], "X_val": FEATURES[10:16]}
    columns = {"y_train": ["a"] * 10, "y_validation": ["b"] * 6}
    write_npz(tmp_path / "e.npz", arrays, columns)
    assert read_file("", tmp_path / "e.npz").labels == [0] * 10 + [1] * 6
    write_npz(tmp_path / "two.npz", {**arrays, "X_dev": FEATURES[16:22]}, columns)
    unreadable("", tmp_path / "two.npz", "y_validation")
    write_npz(tmp_path / "twice.npz", arrays, {**columns, "y_val": ["c"] * 6})
    unreadable("", tmp_path / "twice.npz", "y_validation")


def test_features_of_two_splits_are_those_of_the_file(tmp_path):
    write_npz(tmp_path / "e.npz", parted("X", FEATURES), parted("y", TWO))
    store = Store.open(place_of(f"ingest {tmp_path}/e.npz --name two"))
    assert np.array_equal(store.reader(*store.arrays).all()[:, 0], np.roll(FEATURES, 8, axis=0))
    assert store.samples.split.tolist() == [1] * 8 + [0] * 16


def test_errors_name_what_is_wrong(tmp_path):
    write_npz(
        tmp_path / "e.npz",
        {"X": FEATURES, "classes": np.array(["ant", "bee"])},
        {"label": column("ant", "bee", "lion")},
    )
    unreadable("", tmp_path / "e.npz", "'lion'", "ant, bee")
    large = {"label": column(2.0**60, 2.0**61)}
    doors = ("ingest npz", "arrays npz", "rows npz", "hf", "texts parquet")
    no_door(
        tmp_path,
        large,
        "label holds floats of 2^53 or more (they may be rounded), expected",
        doors=doors,
    )
    parts = {"label": TWO, "part": column(0.5, 0.25)}
    said = "part cannot be a group: numbers with decimals."
    no_door(tmp_path, parts, said, choice=ColumnChoice(groups=("part",)))
    no_door(tmp_path, {"label": TWO, " label": TWO}, "column 'label' occurs twice", "of its own")
    no_door(tmp_path, {"Label": TWO, "LABEL": TWO}, "could be the column", "--label-key")


def test_a_column_without_a_name_is_named_as_such(tmp_path):
    for door in ("ingest npz", "arrays npz", "ingest csv", "folder csv", "hf", "webdataset"):
        read = through(door, tmp_path, {"label": TWO, "": column("a", "b")})
        assert (read.groups, read.unused) == ({}, {""}), door


@pytest.mark.parametrize("split", ["train", "test"])
def test_names_that_say_one_split_of_all_rows_leave_it_to_the_columns(tmp_path, split):
    label = column("a", "b")
    for door, (kind, make) in DOORS.items():
        inside = tmp_path / door
        inside.mkdir()
        path = make(inside, {"label": label, "is_test": TWO})
        path = path.rename(inside / f"{split}{path.suffix}")
        for place in (path, inside) if kind in ("hf", "webdataset") else (path,):
            read = read_file(kind, place)
            assert (read.splits, read.groups) == (TWO, {}), door
    for kind, content, array in OF_ARRAYS:
        path = tmp_path / f"of{kind}.npz"
        columns = {f"y_{split}": label, f"is_test_{split}": TWO}
        write_npz(path, {f"{content}_{split}": array}, columns)
        assert read_file(kind, path).splits == TWO


def test_the_column_that_the_user_names_says_the_split_and_names_do_not(tmp_path):
    part = column("train", "test", "test")
    columns = {"label": TWO, "part": part}
    places = [("hf", tmp_path / "h"), ("webdataset", tmp_path / "w")]
    for _, place in places:
        place.mkdir()
    for split in ("train", "test", "other"):
        write_parquet(tmp_path / f"h/{split}-0.parquet", PICTURES, columns)
        write_tar(tmp_path / f"w/{split}-0.tar", columns)
    for kind, content, array in OF_ARRAYS:
        held = {f"{content}_{split}": array for split in ("train", "test", "val")}
        of_splits = {
            f"{name}_{split}": values
            for name, values in columns.items()
            for split in ("train", "test", "val")
        }
        path = tmp_path / f"of{kind}.npz"
        write_npz(path, held, of_splits)
        places.append((kind, path))
    for kind, place in places:
        read = read_file(kind, place, ColumnChoice(split="part"))
        assert read.splits == 3 * [int(word == "test") for word in part], kind


def test_a_column_of_test_rows_beside_the_splits_is_named_and_no_group(tmp_path):
    columns = {
        "label": column("a", "b"),
        "split": column("train", "test", "val"),
        "is_val": column(0, 0, 1),
    }
    assert all_doors(tmp_path, columns).unused == {"is_val"}
    columns["is_test"] = column(0, 0, 1)
    read = all_doors(tmp_path, columns)
    assert read.groups == {}
    assert read.unused == {"is_test", "is_val"}
    kept = all_doors(tmp_path, columns, ColumnChoice(groups=("is_test",)))
    assert list(kept.groups) == ["is_test"]


def samples_of(*words):
    """The samples of the store that a command makes."""
    return Store.open(place_of(*words)).samples


def extraction(spec):
    return ("extract", "--dataset", spec, "--backbones", "pixels", "--size", "8", "--workers", 0)


def test_files_without_a_split_in_their_name_are_named_if_no_other_has_training_rows(tmp_path):
    (tmp_path / "h").mkdir()
    (tmp_path / "w").mkdir()
    columns = {"label": TWO}
    for name in ("site_a", "site_val", "test_site"):
        write_parquet(tmp_path / f"h/{name}.parquet", PICTURES, columns)
        write_tar(tmp_path / f"w/{name}.tar", columns)
    unreadable("hf", tmp_path / "h", "unknown: site_a.parquet.", "train-0000")
    unreadable("webdataset", tmp_path / "w", "unknown: site_a.tar.", "train-0000")


# What a user is told, and that nothing is written before


def test_labels_of_another_name_are_asked_for_before_anything_is_written(tmp_path):
    columns = {"diagnosis": column("flu", "cold")}
    write_npz(tmp_path / "e.npz", {"X": FEATURES}, columns)
    write_npz(tmp_path / "i.npz", {"images": IMAGES}, columns)
    doors = (
        ("ingest", tmp_path / "e.npz", "--name", "mine"),
        extraction(f"arrays:{tmp_path / 'i.npz'}"),
    )
    for words in doors:
        must_fail("--label-key diagnosis", *words)
    assert not data_of("ls")["entries"]
    for words in doors:
        assert samples_of(*words, "--unlabelled").classes == ()
    # Features of the class names make a store useful without labels.
    write_npz(tmp_path / "t.npz", {"features/a": FEATURES, "text/a": FEATURES[:2]}, columns)
    assert data_of(f"ingest {tmp_path}/t.npz --name texts")["groups"] == ["diagnosis"]


# Tables that are written in an odd way: what is refused says what to do, and what it says to do works


# Options that hints name


@pytest.mark.parametrize(
    "columns",
    [
        {"split": ["a", "b", "c"]},
        {"domain": [0.5, 0.25, 1.0]},
        {"label": [0.5, 0.25, 1.0]},
        {"Domain": [1, 2, 3], "DOMAIN": [1, 2, 3]},
    ],
)
def test_the_hint_of_a_refusal_names_an_option(tmp_path, columns):
    no_door(tmp_path, labelled(columns), "--")


def test_columns_and_values_are_options_of_extract(tmp_path):
    columns = {
        "y": column(-1, 0, 4),
        "split": column("a", "b"),
        "part": column("train", "test"),
        "hospital": column("x", "x", "y"),
    }
    write_npz(tmp_path / "i.npz", {"images": IMAGES}, columns)
    extract = extraction(f"arrays:{tmp_path / 'i.npz'}")
    options = ("--split-key", "part", "--no-label", "-1", "--domain-key", "hospital")
    samples = samples_of(*extract, *options)
    assert samples.domains == ("x", "y")
    assert samples.split.tolist() == TWO
    assert samples.classes == ("0", "4")
    assert samples.label[:3].tolist() == [-1, 0, 1]


# Splits in the names of arrays


@pytest.mark.parametrize("ending", WRITE)
@pytest.mark.parametrize("name", ["y", "label", "diagnosis"])
def test_labels_without_a_split_in_their_name_stop_every_door(tmp_path, ending, name):
    write = WRITE[ending]
    for kind, content, array in OF_ARRAYS:
        path = tmp_path / f"file{kind}.{ending}"
        arrays = parted(content, array)
        write(path, arrays, {name: TWO})

        splits = f"{name}_train and {name}_test"
        unreadable(kind, path, "could be the labels", splits, "--unlabelled")
        said = ("no split in its name", splits)
        unreadable(kind, path, *said, choice=ColumnChoice(label=name))
        unreadable(kind, path, said[0], choice=ColumnChoice(groups=(name,)))
        assert read_file(kind, path, ColumnChoice(unlabelled=True)).unused == {name}
        write(path, arrays, parted(name, TWO))
        assert read_file(kind, path, ColumnChoice(label=name)).classes == ("0", "1")


def test_features_of_another_name_with_a_split_in_it_are_suggested_whole(tmp_path):
    arrays = {"train_images": FEATURES[:16], "val_images": FEATURES[16:]}
    write_npz(tmp_path / "f.npz", arrays, {"train_labels": TWO[:16], "val_labels": TWO[16:]})
    words = ("ingest", tmp_path / "f.npz", "--name", "mine")
    (suggested,) = re.findall(r"--features-key \S+", fedcache(*words).err)
    samples = samples_of(*words, *suggested.split())
    assert np.bincount(samples.split).tolist() == [16, 8]
    assert samples.classes == ("0", "1")


def test_the_column_of_one_split_is_not_taken_for_all_rows(tmp_path):
    arrays = {"train_scans": FEATURES[:16], "val_scans": FEATURES[16:], "y": TWO[:16]}
    write_npz(tmp_path / "f.npz", arrays, {})
    said = ("the rows of val_scans would be lost", " scans uses the rows of all splits")
    refused(
        lambda: of_embeddings(tmp_path / "f.npz", ColumnChoice(features=("train_scans",))), *said
    )
    refused(
        lambda: of_dataset(f"rows:{tmp_path / 'f.npz'}?rows=train_scans", ColumnChoice()), *said
    )


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(
            lambda word: word.strip()
        )
    )
)
@example(["a,b", '"q"', 'the "best"', "it's"])
def test_a_list_of_words_is_read_as_it_is_written(words):
    assert listed(in_a_list(words)) == [word.strip() for word in words]


# Parts of the samples of a webdataset


def of_shard(path, choice=None):
    return of_dataset(f"webdataset:{path}", choice or ColumnChoice())


def test_texts_that_differ_in_every_sample_are_no_labels(tmp_path):
    captions = [f"a photo of {row}" for row in range(ROWS)]
    path = shard(tmp_path / "b.tar", txt=captions, json=[{"breed": "a"}, {"breed": "b"}])
    beside = of_shard(path)
    assert beside.classes == ()
    assert beside.unused == {"txt"}
    assert beside.may_be_labels == {"breed": 2}
    assert of_shard(path, ColumnChoice(label="breed", groups=("txt",))).groups == {"txt": captions}
    # A class may have one sample alone: .cls is the label in any case, and so is .txt where texts repeat.
    assert len(of_shard(shard(tmp_path / "c.tar", cls=KEYS)).classes) == ROWS
    assert of_shard(shard(tmp_path / "d.tar", txt=["a cat", "a dog"])).classes == ("a cat", "a dog")


def test_no_part_of_a_sample_is_dropped_without_a_word(tmp_path):
    both = of_shard(
        shard(tmp_path / "a.tar", cls=["0", "1"], json=[{"cls": "a", "site": "x"}, {"cls": "b"}])
    )
    assert both.classes == ("0", "1")
    assert list(both.groups) == ["site"]
    assert both.unused == {"cls of .json"}
    bare = of_shard(shard(tmp_path / "b.tar", json=[3, 4]))
    assert bare.classes == ()
    assert bare.may_be_labels == {"json": 2}
    assert of_shard(tmp_path / "b.tar", ColumnChoice(label="json")).classes == ("3", "4")
    assert of_shard(shard(tmp_path / "c.tar", json=[[3, 4], None])).unused == {"json"}


@pytest.mark.parametrize(
    "words", [("train", "test"), ("Training", "t10k"), ("data/train", "data/test")]
)
def test_folders_of_all_samples_that_are_named_like_splits_are_the_splits(tmp_path, words):
    split = [0] * 16 + [1] * 8
    keys = [f"{words[split[row]]}/{key}" for row, key in enumerate(KEYS)]
    path = shard(tmp_path / "s.tar", keys, cls=["0", "1"])
    data = open_dataset(f"webdataset:{path}")
    assert sorted(data.names) == sorted(f"s/{key}" for key in keys)
    for row, name in enumerate(data.names):
        number = int(name[-4:])
        assert data.split[row] == split[number]
        assert data.label[row] == number % 2
        assert data.source.read(row) == PNGS[number]
    # One sample without a split in its folders leaves all without.
    assert of_shard(shard(tmp_path / "t.tar", [*keys[:-1], KEYS[-1]])).splits is None


# Numbers and words in JSON


def readings_of_json(folder, label):
    """What every door that reads JSON understands of these labels, which are those of ``site`` too."""
    list_of_images(folder, {})
    rows = [
        {"path": f"{row:04d}.png", "text": TEXTS[row], "label": value, "site": value}
        for row, value in enumerate(label)
    ]
    with_features = [{"embedding": FEATURES[i].tolist(), **row} for i, row in enumerate(rows)]
    (folder / "e.jsonl").write_text("\n".join(map(json.dumps, with_features)))
    (folder / "e.json").write_text(json.dumps(with_features))
    yield through("webdataset", folder, {"label": label, "site": label})
    yield read_file("", folder / "e.json")
    for kind in ("", "folder", "texts"):
        yield read_file(kind, folder / "e.jsonl")


def test_words_and_numbers_in_one_column_of_json_are_words(tmp_path):
    for read in readings_of_json(tmp_path, column(1, "1", "x", 2.5, None, True)):
        assert read.classes == ("1", "2.5", "True", "x")
        assert read.labels[:6] == [0, 0, 3, 1, -1, 2]


def test_large_floats_of_json_are_no_integers(tmp_path):
    refused(lambda: list(readings_of_json(tmp_path, column(1e20, 1.5e20))), "2^53")


@pytest.mark.parametrize(
    "ids", [[2**63, 2**64 - 1], [2**63 - 1, 2**63 + 1], [10**20 + 1, 10**20, 5], [-(10**19), 7]]
)
def test_integers_of_any_size_are_the_classes_that_they_are(tmp_path, ids):
    label = column(*ids)
    decimals = pa.array(map(Decimal, label), pa.decimal128(38, 0))
    for read in (
        *readings_of_json(tmp_path, label),
        through("ingest parquet", tmp_path, {"label": decimals, "site": decimals}),
        through("ingest csv", tmp_path, {"label": label, "site": label}),
    ):
        assert read.classes == tuple(map(str, sorted(ids)))
        assert read.words == [str(value) for value in label]
        assert read.groups["site"] == [str(value) for value in label]


# Names that a shell or a spec reads otherwise


ODD_NAMES = [
    "my diag",
    "it's",
    "a;b",
    "$HOME",
    "a|b",
    "#c",
    '"q"',
    "a,b",
    "R&D",
    "what?",
    "?label=x",
    "100%",
    "-x",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_suggested_column_of_any_name_can_be_pasted(tmp_path, name):
    folder = tmp_path / "my tables"
    folder.mkdir()
    file = folder / f"i{name}.npz"
    write_npz(file, {"images": IMAGES, "X": FEATURES}, {name: column("a", "b")})
    hint = fedcache(*extraction(f"arrays:{file}")).err.split("column of labels: ")[1]
    options, _, rest = hint.partition(", in a spec ")
    (whole,) = shlex.split(rest.partition(". If there are no labels")[0])
    assert samples_of(*extraction(whole)).classes == ("a", "b")
    assert data_of("datasets", "info", f"arrays:{file}", *shlex.split(options))["classes"] == [
        "a",
        "b",
    ]
    words = ("ingest", file, "--name", "mine")
    suggested, _, _ = fedcache(*words).err.split("column of labels: ")[1].partition(". If there")
    assert samples_of(*words, *shlex.split(suggested)).classes == ("a", "b")


def test_the_columns_of_a_spec_stay_when_labels_are_suggested(tmp_path):
    write_npz(tmp_path / "i.npz", {"a": IMAGES, "b": IMAGES[::-1]}, {"diagnosis": column("a", "b")})
    spec = f"arrays:{tmp_path / 'i.npz'}?images=b"
    assert f"{spec}&label=diagnosis" in fedcache(*extraction(spec)).err


def test_each_of_several_datasets_names_its_own_labels(tmp_path):
    write_npz(tmp_path / "a.npz", {"images": IMAGES}, {"diagnosis": column("a", "b")})
    write_npz(tmp_path / "b.npz", {"images": IMAGES[::-1]}, {"my grade": column("a", "b")})
    both = extraction(f"one=arrays:{tmp_path / 'a.npz'},two=arrays:{tmp_path / 'b.npz'}")
    error = must_fail("two/my grade has 2 values", *both)
    (suggested,) = re.findall(r"--dataset (.+)", error["hint"])
    store = Store.open(place_of(*extraction(*shlex.split(suggested))))
    assert store.samples.classes == ("a", "b")
    assert store.samples.domains == ("one", "two")


# Equal tables are refused in equal words


def test_a_list_for_each_row_gets_the_hint_of_one_hot_labels(tmp_path):
    one_hot = np.eye(3, dtype=int)[column(0, 1, 2)].tolist()
    doors = set(DOORS) - {"ingest h5", "ingest csv", "rows npz", "folder csv", "texts csv"}
    no_door(tmp_path, {"label": one_hot}, "labels.argmax(1)", doors=doors)


def test_a_number_alone_is_one_value_through_every_door_of_arrays(tmp_path):
    for ending, write in WRITE.items():
        for kind, content, array in OF_ARRAYS:
            path = tmp_path / f"{kind}e.{ending}"
            write(path, {content: array, "n": np.array(7)}, {"label": TWO})
            assert read_file(kind, path).unused == {"n"}


@pytest.mark.parametrize("name", ["class_to_idx", "config", "data"])
def test_a_dict_beside_the_rows_of_an_npz_is_not_used_and_the_rows_are(tmp_path, name):
    path = tmp_path / "e.npz"
    for kind, content, array in OF_ARRAYS:
        write_npz(path, {name: np.array({"a": 0}), content: array}, {"label": TWO})
        read = read_file(kind, path)
        assert (read.labels, read.unused) == (TWO, {name}), kind
        write_npz(path, {name: np.array({"x": array, "y": TWO})}, {})
        unreadable(kind, path, "is a pickle", "allow_pickle=True")


def test_a_list_of_columns_with_a_line_break_outside_of_quotes_is_refused():
    refused(lambda: listed("site\nward"))
    assert listed('"site\nward",clinic') == ["site\nward", "clinic"]
