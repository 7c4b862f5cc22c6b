"""``texts:FILE``: which column is what, dirty cells, rows without a text, and files that are none."""

import csv
import gzip
import hashlib
import io
import os
import pickle
import shutil

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from no_dataset import no_dataset
from opened import open_dataset
from refusal import bad_image, machine_error

from fedcache.extract.datasets import texts

CSV = """text,label,split,site,length
A fine day.,weather,train,north,0.5
"Rain, and
more rain",weather,train,south,1.5
Eggs and ham,food,test,north,2.25
 ,food,train,south,3.5
Bread,,train,,0.5
Ünïcode soup,food,train,north,0.5
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "day.csv"
    path.write_text(CSV, encoding="utf-8")
    return path


def test_a_csv_of_texts_is_read(table):
    data = open_dataset(f"texts:{table}")
    assert data.holds == "texts"
    assert data.slug == "day"
    assert len(data) == 6
    assert data.domains == ("all",)
    assert data.classes == ("food", "weather")
    assert data.label.tolist() == [1, 1, 0, 0, -1, 0]
    assert data.split.tolist() == [0, 0, 1, 0, 0, 0]
    assert data.names == tuple("012345")
    assert data.groups["site"].values() == ["north", "south", "north", "south", None, "north"]
    assert data.source.read(1) == b"Rain, and\nmore rain"
    assert data.uid[2].tobytes() == hashlib.sha256(b"Eggs and ham").digest()[:16]
    assert data.uid[3].tobytes() == hashlib.sha256(b"unreadable\x003").digest()[:16]
    bad_image(data.source.read, 3, "the text is empty")
    assert data.source.read(5) == "Ünïcode soup".encode()
    for told in (
        "5 train, 1 test",
        "1 of 6 rows are unlabelled",
        "1 without a text",
        "site",
        "length",
    ):
        assert told in data.reading
    assert "image" not in data.reading


def test_the_same_table_is_one_dataset_in_every_format_and_under_every_name(table, tmp_path):
    first = open_dataset(f"texts:{table}")
    rows = list(csv.DictReader(io.StringIO(CSV)))
    columns = ("text", "label", "split", "site")
    held = pa.table({name: [row[name].strip() or None for row in rows] for name in columns})
    pa.parquet.write_table(held, tmp_path / "a.parquet", row_group_size=2)
    pa.feather.write_feather(held, tmp_path / "b.feather", compression="uncompressed")
    coded = held.set_column(0, "text", held["text"].dictionary_encode())
    pa.parquet.write_table(coded, tmp_path / "c.parquet")
    large = held.set_column(0, "text", held["text"].cast(pa.large_binary()))
    pa.parquet.write_table(large, tmp_path / "d.parquet")
    with gzip.open(tmp_path / "e.csv.gz", "wt", encoding="utf-8") as file:
        file.write(CSV)
    shutil.copy(table, tmp_path / "other.csv")
    for name in ("a.parquet", "b.feather", "c.parquet", "d.parquet", "e.csv.gz", "other.csv"):
        assert open_dataset(f"texts:{tmp_path / name}").digest == first.digest, name


def test_columns_are_named_in_the_spec_and_rows_are_in_the_order_of_their_names(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "key,text,said,mood,part,place,a,b\ny,no,oh,5,train,down,1,2\nx,no,yes,3,test,up,1,1\n"
    )
    words = "text=said&label=mood&split=part&name=key&domain=place&group=b"
    data = open_dataset(f"texts:{path}?{words}")
    assert data.names == ("x", "y")
    assert data.classes == ("3", "5")
    assert data.domains == ("down", "up")
    assert data.label.tolist() == [0, 1]
    assert data.domain.tolist() == [1, 0]
    assert data.split.tolist() == [1, 0]
    assert list(data.groups) == ["b"]
    assert data.source.read(1) == b"oh"


def test_a_part_and_several_as_domains(table, tmp_path):
    part = open_dataset(f"texts:{table}", limit=3)
    assert part.source.read(0) == b"A fine day."
    assert part.source.read(1) == b"Eggs and ham"
    shutil.copy(table, tmp_path / "two.csv")
    both = open_dataset(f"a=texts:{table},b=texts:{tmp_path / 'two.csv'}")
    assert both.holds == "texts"
    assert both.domains == ("a", "b")
    assert len(both) == 12
    no_dataset(f"a=texts:{table},b=digits", "texts", "images")


def test_a_source_travels_without_its_texts_and_refuses_a_file_that_has_changed(table):
    raw = pickle.dumps(open_dataset(f"texts:{table}").source)
    assert b"ham" not in raw
    assert pickle.loads(raw).read(2) == b"Eggs and ham"
    os.utime(table, ns=(1, 1))
    machine_error(lambda: pickle.loads(raw).read(2), "has changed")


WRONG = [
    ("x.csv", b"a,b\n1,2\n", "", "a, b"),
    ("x.csv", b"text,b\n1,2\n", "?text=body", "'body'"),
    ("x.csv", b"text,b\n1,2\n", "?size=3", "size"),
    ("x.csv", b"text,label\na,b,c\n", "", ".csv"),
    ("x.csv", "text,label\nÜber,b\n".encode("latin-1"), "", "UTF-8"),
    ("x.csv", b"text,label\n", "", "0 rows"),
    ("x.parquet", b"PAR1 not one", "", ".parquet"),
    ("x.txt", b"text\n", "", "'.txt'"),
    ("x.csv", b"text,name\na,1\nb,1\n", "?name=name", "'1'"),
]


def test_what_makes_no_sense_is_one_sentence(tmp_path):
    for name, raw, words, said in WRONG:
        path = tmp_path / name
        path.write_bytes(raw)
        assert "\n" not in no_dataset(f"texts:{path}{words}", said).message


def test_a_column_of_numbers_is_no_text(tmp_path):
    pa.parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "n.parquet")
    no_dataset(f"texts:{tmp_path / 'n.parquet'}", "int64")
    no_dataset(f"texts:{tmp_path / 'none.csv'}", "no file of texts '/")
    no_dataset("texts:?text=a", "no file of texts ''")


def test_more_text_than_a_process_may_hold_is_refused(table, monkeypatch):
    monkeypatch.setattr(texts, "MOST", 40)
    no_dataset(f"texts:{table}", "40 bytes")
