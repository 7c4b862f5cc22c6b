"""Stores that golden files hold."""

import json
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def lay_golden(path, name):
    """Write the files of the store of a golden file."""
    for file, words in json.loads((GOLDEN / name).read_text()).items():
        kind, _, body = words.partition(":")
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(bytes.fromhex(body) if kind == "hex" else body.encode())
