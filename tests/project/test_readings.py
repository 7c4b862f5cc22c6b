"""The page of readings: every number that code and docs refer to has a row, and every switch in it exists."""

import re

from repository_files import ROOT, content

from fedcache.federate.methods import METHODS

OF_PARTITIONS = {"sharing", "test_protocol"}


def test_every_number_of_a_reading_has_one_row_and_every_switch_exists():
    lines = content("docs/readings.md").splitlines()
    rows = [line.split("|") for line in lines if re.match(r"\| D-\d+ \|", line)]
    numbers = [row[1].strip() for row in rows]
    assert len(set(numbers)) == len(numbers)
    files = [p for kind in ("py", "toml", "md") for p in (ROOT / "fedcache").rglob(f"*.{kind}")]
    used = set()
    for path in [*files, *(ROOT / "docs").glob("*.md")]:
        used |= set(re.findall(r"\bD-\d+\b", content(path)))
    assert used <= set(numbers)
    settings = {h.name for name in METHODS for h in METHODS[name].hparams}
    switches = {word for row in rows for word in re.findall(r"`([a-z_A-Z0-9]+)", row[-2])}
    assert switches - settings - OF_PARTITIONS == set()
