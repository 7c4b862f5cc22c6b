"""Tables as other programs write them: wide parquet and CSV, lists in texts, feather, and rows that are not finite."""

import gzip
import io
import json
import shlex

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from arrays import normals
from command import data_of
from conversion_lines import run_conversion
from embedding_file import read_embeddings
from failing_command import must_fail_corrupt
from hypothesis import given
from hypothesis import strategies as st
from refusal import corruption, refused

from fedcache import Store
from fedcache.store.content import arrange
from fedcache.store.verify import verify
from fedcache.tables import table_files as tables
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.roles import ColumnChoice
from fedcache.tables.words import Words

N = 30
D = 5
X = normals(0, N, D)
LABELS = np.arange(N) % 3
WARDS = [None if i % 7 == 0 else f"w{i % 4}" for i in range(N)]
ENDINGS = ("parquet", "csv", "csv.gz", "tsv", "tsv.gz", "feather", "arrow")


def table(prefix="f", **columns):
    """Features in one column per dimension between other columns, in no order."""
    dimensions = {f"{prefix}{i}": X[:, i] for i in reversed(range(D))}
    return pa.table({"ward": WARDS, **dimensions, "label": LABELS, **columns})


def write(path, rows):
    ending = path.name.partition(".")[2]
    if ending == "parquet":
        pq.write_table(rows, path, row_group_size=11)
    elif ending in ("feather", "arrow"):
        pyarrow.feather.write_feather(rows, str(path), chunksize=11)
    else:
        options = pyarrow.csv.WriteOptions(delimiter="\t" if ending.startswith("tsv") else ",")
        made = io.BytesIO()
        pyarrow.csv.write_csv(rows, made, options)
        raw = made.getvalue()
        path.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    return path


@pytest.mark.parametrize("prefix", ["f", "", "x["])
def test_one_column_per_dimension_is_a_matrix(tmp_path, prefix):
    found = read_embeddings(write(tmp_path / "wide.csv", table(prefix)))
    assert np.array_equal(found.features["wide"][:, 0].astype("f4"), X)
    assert found.labels.tolist() == LABELS.tolist()
    assert found.groups["ward"].values() == WARDS


def test_the_same_table_in_every_format_is_the_same_store(tmp_path):
    rows = table(
        visit=[float(i % 3) if i % 5 else None for i in range(N)],
        day=pa.array([19000] * N, pa.date32()),
    )
    made = [arrange(open_embeddings(write(tmp_path / f"wide.{e}", rows)), "wide") for e in ENDINGS]
    assert len({content.dataset["digest"] for content in made}) == 1
    assert len({key for content in made for key in content.arrays}) == 1
    for content in made[1:]:
        assert content.groups.keys() == {"ward", "visit", "day"}
        assert all(content.groups[name].equals(group) for name, group in made[0].groups.items())


def test_numbers_in_names_are_in_the_order_of_numbers_and_from_where_they_begin(tmp_path):
    wide = {
        f"pixel_{i:03}": np.full(N, i) for i in (3, 12, *range(4, 12))
    }  # integers, from 3 to 12
    found = read_embeddings(write(tmp_path / "w.parquet", pa.table(wide)))
    assert found.features["w"][0, 0].tolist() == [float(i) for i in range(3, 13)]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_which_columns_are_features_is_asked_where_several_may_be(tmp_path, ending):
    file = write(tmp_path / f"t.{ending}", table("a", b0=X[:, 0], b1=X[:, 1], y0=LABELS, y1=LABELS))
    refused(lambda: open_embeddings(file), "a0 .. a4, b0 .. b1")
    found = open_embeddings(file, ColumnChoice(features=("b",)))
    assert np.array_equal(found.features["t"].whole()[:, 0].astype("f4"), X[:, :2])
    assert list(found.groups) == ["ward", "y0", "y1"]
    assert "a0" in found.unused
    # A usual word wins: questions q1, q2 beside f0 .. f4.
    found = open_embeddings(write(tmp_path / f"u.{ending}", table(q1=LABELS, q2=LABELS)))
    assert found.features["u"].shape == (N, 1, D)
    assert list(found.groups) == ["ward", "q1", "q2"]
    gap = write(tmp_path / f"g.{ending}", table().drop(["f2"]))
    refused(lambda: open_embeddings(gap), "f2 is missing")
    refused(lambda: open_embeddings(gap, ColumnChoice(features=("zzz",))), "'zzz'")


@pytest.mark.parametrize(
    ("ending", "show"),
    [("csv", json.dumps), ("parquet", lambda row: str(np.array(row))), ("csv", " {} ".format)],
)
def test_lists_in_texts_are_features(tmp_path, ending, show):
    given = X.astype(float).round(3)
    texts = [show(row) for row in given.tolist()]
    texts[4] = ""
    given[4] = np.nan
    rows = pa.table({"embedding": texts, "label": LABELS})
    found = open_embeddings(write(tmp_path / f"l.{ending}", rows)).features["l"]
    assert np.array_equal(found.whole(), given[:, None], equal_nan=True)


@pytest.mark.parametrize(
    "texts",
    [
        ["[1, 2]", "[1, 2, 3]"],
        ["[1, 2]", "[1, two]"],
        ["[1 ... 2]"] * 2,
        ["[1, 2]", "[[1, 2]]"],
        ["[" * 5000, "[1]"],
    ],
)
def test_texts_that_are_no_lists_of_one_length_are_refused(tmp_path, texts):
    file = write(tmp_path / "l.csv", pa.table({"embedding": texts, "label": [0, 1]}))
    refused(lambda: read_embeddings(file), file)


WRITTEN = ["", *shlex.split("0 1 -7 2.0 1.0 -0.0 NA nan x true 1e3 1000 007 +1 -0 inf")]


@given(st.lists(st.sampled_from(WRITTEN), min_size=1))
def test_two_words_of_a_csv_never_become_one_number(words):
    typed = Words.of(words).typed()
    known = {word for word in words if word.lower() not in ("", "na", "nan")}
    if isinstance(typed, Words):
        assert typed.values() == words
    else:
        assert isinstance(typed, np.ndarray)
        assert {w: float(v) for w, v in zip(words, typed, strict=True) if v == v} == {
            w: float(w) for w in known
        }
        assert len(np.unique(typed[~np.isnan(typed.astype(float))])) == len(known)
    if known and known <= {"0", "1", "-7", "1000"}:
        assert isinstance(typed, np.ndarray)


def test_a_csv_of_excel_and_pandas_is_read(tmp_path):
    file = tmp_path / "e.csv"
    ids = (2**60, 2**60 + 1)  # which a float would make one of
    file.write_text(
        f'\ufeff;f0;f1;label;ward;patient\n0;1.5;2;cat;"north; old";{ids[0]}\n1;3;;dog;;{ids[1]}\n2;1;1;dog;;\n',
        encoding="utf-8",
    )
    found = read_embeddings(file)
    features = found.features["e"][:, 0]
    assert np.array_equal(features, [[1.5, 2], [3, np.nan], [1, 1]], equal_nan=True)
    assert found.classes == ("cat", "dog")
    assert found.groups["ward"].values() == ["north; old", None, None]
    assert "--group-key patient" in found.unused["patient"]
    asked = open_embeddings(file, ColumnChoice(groups=("patient",)))
    assert asked.groups["patient"].values() == [*map(str, ids), None]
    large = Words.of([str(2**54), "", "NA"]).typed()  # which a float would round
    assert large.values() == [str(2**54), None, None]


def test_an_empty_cell_of_a_feature_is_nan(tmp_path):
    cells = ["", "NA", "nan", "None", "?", "null"]
    rows = "".join(f"{cell},4,1\n" for cell in cells)
    (tmp_path / "c.csv").write_text(f"f0,f1,label\n1,2,0\n{rows}")
    values = read_embeddings(tmp_path / "c.csv").features["c"][:, 0]
    assert np.array_equal(values, [[1, 2], *[[np.nan, 4]] * len(cells)], equal_nan=True)


HOSTILE = {
    "a row of numbers": b"0.1,0.2,7\n0.3,0.4,8\n",
    "'f0' occurs twice": b"f0,f0,label\n1,2,3\n",
    "0 rows": b"f0,f1,label\n",
    "CSV": b"f0,f1,label\n1,2\n1,2,3\n",
    "UTF": b"f0,f1,label\n1,2,\xff\xfe\n",
    "'x'": b"f0,f1,label\n" + b"1,2,3\n" * 9 + b"1,x,3\n",
    "": b"f0,f1,label\n" + b"\0" * 100,
    "straddling": b"f0,f1,label\n1,2," + b"a" * 5000,
}


@pytest.mark.parametrize("why", HOSTILE)
def test_a_csv_that_cannot_be_read_is_refused_in_words(tmp_path, why, monkeypatch):
    monkeypatch.setattr(tables, "TEXT_BLOCK", 48)
    for name, raw in (("h.csv", HOSTILE[why]), ("h.csv.gz", gzip.compress(HOSTILE[why]))):
        file = tmp_path / name
        file.write_bytes(raw)
        refused(lambda file=file: read_embeddings(file), file, why)


@pytest.mark.parametrize("ending", ["parquet", "feather", "csv.gz"])
def test_a_torn_or_foreign_table_is_refused_in_words(tmp_path, ending):
    file = write(tmp_path / f"t.{ending}", table())
    torn = file.read_bytes()[:-20]
    for bad in (b"PK\x03\x04", b"ARROW1\0\0" + b"\xff" * 64, b"hello, world\n" * 9, torn):
        file.write_bytes(bad)
        refused(lambda: read_embeddings(file), file)


# Rows that are not finite


@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_rows_that_are_not_finite_are_named_and_left_out_when_asked(tmp_path, ending):
    bad = X.copy()
    places = [3, 8, 29]
    bad[places, [1, 2, 0]] = [np.nan, np.inf, -np.inf]
    file = tmp_path / f"d.{ending}"
    if ending == "npz":
        np.savez(file, features=bad, label=LABELS)
    else:
        write(file, pa.table({**{f"f{i}": bad[:, i] for i in range(D)}, "label": LABELS}))
    line = f"ingest {file} --name dirty --label-key label"
    assert must_fail_corrupt("3, 8, 29", line)["hint"].endswith(f"fedcache {line} --drop-nan")
    made = data_of(f"{line} --drop-nan")
    assert made["images"] == N
    assert made["ok"] == N - 3
    store = Store.open(made["path"])
    listed = [(e["row"], e["name"]) for e in store.quarantined()]
    assert listed == [(row, f"{row:02}") for row in places]
    good = np.delete(np.arange(N), places)
    assert np.array_equal(store.reader(*store.arrays).rows(good)[:, 0], X[good])
    assert not (store.samples.split[places] == 1).any()  # none is a test row
    assert verify(store.path).ok


def test_a_row_that_one_backbone_lacks_keeps_the_features_of_the_others(tmp_path):
    a = X.copy()
    b = X.astype("f2")
    a[2], b[4, 0] = np.nan, np.inf
    names = [f"{N - i:02}" for i in range(N)]  # against the order of the rows
    store = Store.from_arrays(
        {"a": a, "b": b}, names=names, drop_nan=True, path=tmp_path / "s.zarr"
    )
    assert [e["name"] for e in store.quarantined()] == [names[4], names[2]]
    assert store.readable().sum() == N - 2
    for key in store.arrays:
        assert np.isnan(store.reader(key).all()[:, 0]).all(axis=1).sum() == 1
    corruption(
        lambda: Store.from_arrays(
            {"a": np.full((3, 2), np.nan)}, drop_nan=True, path=tmp_path / "t.zarr"
        ),
        "Every row of a",
    )


def test_empty_lists_are_rows_that_are_not_finite(tmp_path):
    lists = pa.array([[1.0, 2.0], None, [3.0, None], [5.0, 6.0]], pa.list_(pa.float32()))
    fixed = pa.array([None, [1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"features/a": lists, "features/b": fixed}), tmp_path / "e.parquet")
    found = read_embeddings(tmp_path / "e.parquet").features
    empty = [np.nan] * 2
    for name, rows in (
        ("a", [[1, 2], empty, [3, np.nan], [5, 6]]),
        ("b", [empty, [1, 2], [3, 4], empty]),
    ):
        assert np.array_equal(found[name][:, 0], rows, equal_nan=True)


@pytest.mark.parametrize(
    ("why", "place", "cells"),
    [
        ("'oops'", 0, {3: "n/a", 5: "oops"}),
        ("'1,5'", 3, dict.fromkeys(range(N), "1,5")),
        ("is empty", D - 1, dict.fromkeys(range(N), "")),
    ],
)
def test_the_column_that_keeps_others_from_being_features_is_named(tmp_path, why, place, cells):
    wide = {f"f{i}": [f"{v:.3f}" for v in X[:, i]] for i in range(D)}
    for row, cell in cells.items():
        wide[f"f{place}"][row] = cell
    file = tmp_path / "wide.csv"
    lines = [[*wide, "label"], *zip(*wide.values(), map(str, LABELS), strict=True)]
    file.write_text("".join(";".join(line) + "\n" for line in lines))
    refused(lambda: read_embeddings(file), f"f{place}", why)


# One CSV, written as Excel and others write it


DIALECT = [
    ("f0", "f1", "label", "ward", "a, b, c, d, e"),
    *[(f"{i}.5", str(i), "äb"[i % 2], f"w, {i % 2}", "x") for i in range(12)],
]


def in_dialect(separator):
    return "".join(
        separator.join(f'"{cell}"' if "," in cell else cell for cell in row) + "\r\n"
        for row in DIALECT
    )


def digest(path):
    content = arrange(open_embeddings(path), "t")
    assert content.samples.classes == ("b", "ä")
    assert content.groups["ward"].words == ("w, 0", "w, 1")
    return str(content.dataset["digest"])


@pytest.mark.parametrize(
    ("separator", "encoding", "first", "ending"),
    [
        (";", "utf-8", "", ".csv"),
        ("\t", "utf-8", "sep={}\r\n", ".csv"),
        (",", "utf-8-sig", "", ".csv"),
        (";", "utf-8-sig", "sep={}\r\n", ".csv.gz"),
        (";", "utf-16", "", ".csv"),
        ("\t", "utf-16", "sep={}\r\n", ".csv.gz"),
        (",", "utf-16-be", "sep={}\r\n", ".csv"),
        ("\t", "utf-16-be", "", ".csv.gz"),
    ],
)
def test_a_csv_means_the_same_however_it_is_written(tmp_path, separator, encoding, first, ending):
    plain = tmp_path / "plain.csv"
    plain.write_text(in_dialect(","), "utf-8")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    raw = (mark + first.format(separator) + in_dialect(separator)).encode(encoding)
    other = tmp_path / f"other{ending}"
    other.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    assert digest(other) == digest(plain)


def test_another_encoding_is_refused_with_the_lines_that_convert_it(tmp_path):
    plain = tmp_path / "plain.csv"
    other = tmp_path / "other.csv.gz"
    plain.write_text(in_dialect(";"), "utf-8")
    other.write_bytes(gzip.compress(in_dialect(";").encode("cp1252")))
    assert digest(run_conversion(refused(lambda: open_embeddings(other), "UTF-8"))) == digest(plain)
