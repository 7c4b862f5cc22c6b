"""Tables with tens of thousands of columns: the cost grows with the columns, and messages stay short."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from conversion_lines import run_conversion

import fedcache
from fedcache.errors import UsageError
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.table_readers import read_table

ROWS = 4


def wide(path, names):
    """A table of numbers [ROWS, len(names)] and a column ``label``."""
    x = np.arange(ROWS * len(names)).reshape(ROWS, -1) + 0.5
    if path.suffix == ".csv":
        lines = [",".join([*names, "label"])]
        lines += [",".join([*map(str, row), f"c{i % 2}"]) for i, row in enumerate(x.tolist())]
        path.write_text("\n".join(lines) + "\n")
        return path
    rows = pa.table(
        {
            **{name: x[:, i] for i, name in enumerate(names)},
            "label": [f"c{i % 2}" for i in range(ROWS)],
        }
    )
    if path.suffix == ".parquet":
        pq.write_table(rows, path)
    else:
        pyarrow.feather.write_feather(rows, str(path))
    return path


def lines_run(work):
    """How many lines of fedcache ``work`` runs, each pass of a loop counted: the same on every machine."""
    package = str(Path(fedcache.__file__).parent)
    lines = 0

    def trace(frame, event, _argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "spelt"), [("csv", "f{}"), ("parquet", "f{}"), ("feather", "f{}x")]
)
def test_four_times_the_columns_run_four_times_the_lines(tmp_path, ending, spelt):
    def read(columns):
        file = wide(
            tmp_path / f"{columns}.{ending}",
            [*(spelt.format(i) for i in range(columns)), "v0", "v1"],
        )
        return lambda: read_table(file, ("f" if spelt == "f{}" else "v",))

    few = read(1500)
    many = read(6000)
    few()  # imports
    # A loop over all columns for each column runs 16 times as many.
    assert lines_run(many) <= 5 * lines_run(few)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dimensions_with_names_of_their_own_are_numbered_by_the_lines_of_the_message(
    tmp_path, ending
):
    genes = [f"GENE{i}{'ABC'[i % 3]}" for i in range(2000)]
    with pytest.raises(UsageError) as refused:
        open_embeddings(wide(tmp_path / f"genes.{ending}", genes))
    assert "2,000" in refused.value.message
    assert len(str(refused.value)) < 1500
    found = open_embeddings(run_conversion(refused.value))
    whole = found.features["genes-numbered"].whole()[:, 0]
    assert np.array_equal(whole, np.arange(ROWS * 2000).reshape(ROWS, -1) + 0.5)
    assert found.classes == ("c0", "c1")
