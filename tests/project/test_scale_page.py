"""docs/scale.md says what the code does: bytes of messages, files of a store."""

import loaded_files
import numpy as np
import pytest
from repository_files import content

import fedcache as fc


@pytest.fixture(scope="module")
def tool():
    return loaded_files.tool("make_scale")


def test_the_page_is_that_of_the_code(tool):
    text = content("docs/scale.md")
    assert text == tool.page(text), "run: python tools/make_scale.py"


@pytest.mark.parametrize(
    ("method", "numbers", "width"),
    [
        ("fedavg", lambda D, C: (D + 1) * C, 4),
        ("fedncm", lambda D, C: D * C, 8),
        ("fed3r", lambda D, C: D * (D + 1) // 2 + C * D, 8),
    ],
)
def test_an_upload_is_as_large_as_the_formula_says(tool, method, numbers, width):
    for D, C in ((16, 3), (33, 5)):
        words = len(tool.pack(tool.SiteMessage({}, [tool.wire(method, D, C).upload])).words)
        told = tool.wire(method, D, C).up - words
        assert told - width * numbers(D, C) in range(8 * C + 9), (
            "nothing but class counts comes on top"
        )


def test_a_store_has_the_files_and_bytes_that_the_page_multiplies_out(tool, tmp_path):
    rows = tool.chunk_rows_for(64, 2 * 16)
    store = fc.Store.from_arrays(
        {"mine": np.zeros((1100, 16), np.float32)}, path=tmp_path / "s.zarr"
    )
    (info,) = store.arrays.values()
    chunks = [p for p in (store.path / "features").rglob("c/*/0/*") if p.is_file()]
    assert info.chunk_rows == rows
    assert len(chunks) == -(-1100 // rows) == 3
    assert {p.stat().st_size for p in chunks} == {
        tool.array_bytes((rows, 1, 16), info.dtype) + tool.CRC_BYTES
    }
