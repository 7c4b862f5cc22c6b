"""Tables with tens of thousands of columns: the cost grows with the columns, and messages stay short."""

import csv
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from conversion_lines import run_conversion
from refusal import refused

import fedcache
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.table_readers import read_table

pytestmark = pytest.mark.slow

ROWS = 4


def wide(path, names):
    """A table of numbers [ROWS, len(names)] and a column ``label``."""
    x = np.arange(ROWS * len(names)).reshape(ROWS, -1) + 0.5
    columns = {**dict(zip(names, x.T, strict=True)), "label": ["c0", "c1"] * (ROWS // 2)}
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        pyarrow.feather.write_feather(pa.table(columns), str(path))
    return path


def lines_run(work):
    """How many lines of fedcache ``work`` runs, each pass of a loop counted: the same on every machine."""
    package = str(Path(fedcache.__file__).parent)
    lines = 0

    def trace(frame, event, _argument):
        nonlocal lines
        if frame.f_code.co_filename.startswith(package):
            lines += event == "line"
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(
    ("ending", "spelt"), [("csv", "f{}"), ("parquet", "f{}"), ("feather", "f{}x")]
)
def test_four_times_the_columns_run_four_times_the_lines(tmp_path, ending, spelt):
    def read(columns):
        names = [*map(spelt.format, range(columns)), "v0", "v1"]
        file = wide(tmp_path / f"{columns}.{ending}", names)
        return lambda: read_table(file, ("f" if spelt == "f{}" else "v",))

    few = read(1500)
    many = read(6000)
    few()  # imports
    # A loop over all columns for each column runs 16 times as many.
    assert lines_run(many) <= 5 * lines_run(few)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dimensions_with_names_of_their_own_are_numbered_by_the_lines_of_the_message(
    tmp_path, ending
):
    genes = [f"GENE{i}{'ABC'[i % 3]}" for i in range(2000)]
    error = refused(lambda: open_embeddings(wide(tmp_path / f"genes.{ending}", genes)), "2,000")
    assert len(str(error)) < 1500
    found = open_embeddings(run_conversion(error))
    whole = found.features["genes-numbered"].whole()[:, 0]
    assert np.array_equal(whole, np.arange(ROWS * 2000).reshape(ROWS, -1) + 0.5)
    assert found.classes == ("c0", "c1")
