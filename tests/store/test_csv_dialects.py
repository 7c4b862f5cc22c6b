"""One CSV, written as Excel and others write it: separators, encodings and first lines do not change what it means."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from conversion_lines import run_conversion

from fedcache.errors import UsageError
from fedcache.store.content import arrange
from fedcache.tables.embeddings import open_embeddings

ROWS = [
    ("f0", "f1", "label", "ward", "a, b, c, d, e"),
    *[(f"{i}.5", str(i), "äb"[i % 2], f"w, {i % 2}", "x") for i in range(12)],
]


def written(separator: str) -> str:
    return "".join(separator.join(f'"{cell}"' if "," in cell else cell for cell in row) + "\r\n" for row in ROWS)


def digest(path: Path) -> str:
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
def test_a_csv_means_the_same_however_it_is_written(
    tmp_path: Path, separator: str, encoding: str, first: str, ending: str
) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text(written(","), "utf-8")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    raw = (mark + first.format(separator) + written(separator)).encode(encoding)
    other = tmp_path / f"other{ending}"
    other.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    assert digest(other) == digest(plain)


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_another_encoding_is_refused_with_the_lines_that_convert_it(tmp_path: Path, ending: str) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text(written(";"), "utf-8")
    raw = written(";").encode("cp1252")
    other = tmp_path / f"other{ending}"
    other.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    with pytest.raises(UsageError, match="UTF-8") as refused:
        open_embeddings(other)
    assert digest(run_conversion(refused.value)) == digest(plain)
