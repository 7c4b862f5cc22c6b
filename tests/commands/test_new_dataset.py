"""docs/add-a-dataset.md: what ``fedcache new dataset`` writes works as it stands, and keeps the laws."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import data_of, fedcache
from failing_command import must_fail
from own_package import python
from PIL import Image

import fedcache as fc
from fedcache import plugins, testing
from fedcache.errors import Exit
from fedcache.extract.datasets import BadImage, from_rows
from fedcache.testing import LawBroken

LABELS = ("zebra", "ant", "10", "9", "zebra", "ant", "10", "9")


@pytest.fixture
def reader(installed):
    """The package ``my-format``, installed; gives its folder."""
    return installed("dataset", "my-format")


@pytest.fixture
def listed(tmp_path):
    """A dataset of eight images: two are for testing, and one is missing."""
    rows = []
    for i, label in enumerate(LABELS):
        Image.new("RGB", (16, 16), (30 * i, 200 - 20 * i, 90)).save(tmp_path / f"{7 - i}.png")
        split = "test" if i in (2, 5) else "train"
        rows.append(
            {"image": f"{7 - i}.png", "label": label, "split": split, "clinic": f"c\u2028{i % 2}"}
        )
    rows.append({"image": "missing.png", "label": "ant", "split": "train", "clinic": "c\u20280"})
    file = tmp_path / "list.jsonl"
    # A JSON string may contain U+2028, which ends no line.
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    return f"my-format:{file}"


@pytest.mark.slow
def test_a_new_reader_keeps_the_laws_and_trains_by_its_name(reader, listed):
    assert testing.check_dataset(listed) == list(testing.DATASET_LAWS)
    found = testing.open_dataset(listed)
    # Rows are in the order of their names, and the files count down.
    assert [found.classes[label] for label in found.label] == [*LABELS[::-1], "ant"]
    assert found.split.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert sorted(found.groups) == ["clinic"]
    assert data_of(f"datasets info {listed}")["classes"] == list(found.classes)
    words = f"extract --dataset {listed} --backbones random-projection:8 --max-bad 50% --json"
    first = fedcache(words)
    assert first.code == Exit.QUARANTINED
    assert first.data["decoded"] == len(LABELS) + 1
    assert fedcache(words).data["decoded"] == 0
    trained = data_of(f"train fed3r --scheme iid --clients 2 --dataset {listed}")
    assert 0.0 <= trained["accuracy"]["mean"] <= 1.0


@pytest.mark.slow
def test_the_tests_that_are_written_pass(reader, site):
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", reader, path=site)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_file_that_is_missing_is_named(reader):
    must_fail("nowhere.jsonl", "extract --dataset my-format:nowhere.jsonl --backbones pixels")
    must_fail("'cifar10'", "datasets info paper:cifr10")
    must_fail("", "new dataset folder")


@pytest.mark.parametrize("line", ["no JSON", '{"picture": "a.png"}', "3"])
def test_a_line_without_an_image_is_named(reader, tmp_path, line):
    (tmp_path / "l.jsonl").write_text(f'{{"image": "a.png"}}\n{line}\n')
    must_fail("line 2", f"extract --dataset my-format:{tmp_path}/l.jsonl --backbones pixels")


class Wrong:
    """A reader with one fault."""

    def __init__(self, fault):
        self.fault = fault
        self.calls = 0

    def key(self, rest, _context):
        self.calls += self.fault == "key"
        return [rest, self.calls]

    def load(self, rest, context):
        self.calls += 1
        labels = ["a", "b", "a", "b"]
        if self.fault == "labels" and self.calls % 2:
            labels.reverse()
        return from_rows(
            f"wrong:{rest}",
            Path(rest),
            tuple("0123"),
            Pixels(self.fault),
            {"label": labels},
            context,
        )


class Pixels:
    """Four images; some cannot be read, or change."""

    def __init__(self, fault):
        self.fault = fault
        self.read_before = 0

    def __getstate__(self):
        return {"fault": "unpickled" if self.fault == "pickle" else self.fault, "read_before": 0}

    def read(self, row):
        if self.fault == "unreadable":
            raise BadImage("no bytes")
        self.read_before += self.fault == "content"
        shade = row + self.read_before + 100 * (self.fault == "unpickled")
        return np.full((4, 4, 3), shade, np.uint8)


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("labels", "a_second_reading_is_the_same_dataset"),
        ("content", "a_row_is_known_by_its_content"),
        ("unreadable", "rows_are_of_the_kind_that_it_holds"),
        ("pickle", "workers_read_the_same"),
        ("key", "the_key_is_plain_and_stays"),
    ],
)
def test_a_reader_with_a_fault_breaks_the_law_about_it(fault, law):
    fc.register("dataset", Wrong(fault), "wrong")
    try:
        checks = {check.name: check for check in testing.dataset_laws("wrong:there")}
        with pytest.raises(LawBroken):
            checks[law]()
    finally:
        plugins.forget("datasets", "wrong")
