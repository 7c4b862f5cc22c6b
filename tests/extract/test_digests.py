"""What a home remembers so that nothing is read twice: sealed, and forgotten when it is not what was written."""

import json
import shutil

import pytest
from command import data_of, fedcache, ok
from damage import flip_bit
from draws import examples
from failing_command import must_fail, must_fail_corrupt
from hypothesis import given
from hypothesis import strategies as st
from json_values import FINITE
from made_path import place_of
from pictures import folder

from fedcache.extract import digests
from fedcache.extract.backbones import lookup
from fedcache.extract.digests import DigestMemory, package_state, remembered_of_package
from fedcache.store.files import canonical_json


@examples(40, 1000)
@given(key=st.lists(FINITE, min_size=1, max_size=3), fact=FINITE)
def test_a_fact_is_recalled_as_it_was(key, fact, tmp_path_factory):
    memory = DigestMemory(tmp_path_factory.mktemp("home") / "digests")
    memory.remember(key, fact)
    assert memory.recall(key) == json.loads(json.dumps(fact))
    assert DigestMemory(memory.root, rehash=True).recall(key) is None


@examples(40, 1000)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_fact_is_forgotten(place, bit, tmp_path_factory):
    memory = DigestMemory(tmp_path_factory.mktemp("home") / "digests")
    memory.remember(["uids", 1, "a"], {"uid": "AAAA", "unreadable": 3})
    (file,) = memory.root.iterdir()
    flip_bit(file, place, bit=bit)
    assert memory.recall(["uids", 1, "a"]) is None


def test_a_fact_about_something_else_is_forgotten(tmp_path):
    memory = DigestMemory(tmp_path / "digests")
    memory.remember(["a"], 1)
    (a,) = memory.root.iterdir()
    raw = a.read_bytes()
    memory.remember(["b"], 2)
    (b,) = set(memory.root.iterdir()) - {a}
    b.write_bytes(raw)
    assert memory.recall(["b"]) is None
    a.write_bytes(canonical_json({"key": ["a"], "fact": 1}))  # of a release that did not seal
    assert memory.recall(["a"]) is None
    a.write_text("[" * 100_000)
    assert memory.recall(["a"]) is None


@pytest.fixture
def words(tmp_path):
    images = folder(tmp_path / "images", train=6, test=2)
    return f"extract --dataset folder:{images} --workers 0 --backbones random-projection"


def test_damaged_memories_change_no_store(words, own_home):
    """A changed character of a remembered uid was a changed image and a second store; broken base64 was exit 10."""
    first = place_of(words)
    whole = {file: file.read_bytes() for file in (own_home / "digests").iterdir()}
    for size, character in ((8, b"A"), (16, b"?"), (24, None)):
        for file, raw in whole.items():
            at = raw.index(b'"uid":"') + 10 if b'"uid":"' in raw else len(raw) // 2
            file.write_bytes(
                bytes(len(raw)) if character is None else raw[:at] + character + raw[at + 1 :]
            )
        assert place_of(f"{words},pixels --size {size}") == first
    assert len(list((own_home / "stores").glob("*.zarr"))) == 1


def test_a_damaged_recipe_is_derived_again(tmp_path):
    row = lookup("random-projection:16", home=tmp_path)
    (file,) = (tmp_path / "recipes").iterdir()
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b'"width":16', b'"width":17'))
    assert file.read_bytes() != raw
    assert lookup("random-projection:16", home=tmp_path) == row
    assert file.read_bytes() == raw
    other = lookup("random-projection:32", home=tmp_path)
    (second,) = set((tmp_path / "recipes").iterdir()) - {file}
    shutil.copy(file, second)
    assert lookup("random-projection:32", home=tmp_path) == other


@pytest.mark.slow
def test_another_dataset_is_not_taken_for_the_one_last_extracted(words, own_home):
    ok(words)
    last = own_home / "last.json"
    raw = last.read_bytes()
    for bad in (raw.replace(b"images", b"imagos"), b"", canonical_json(json.loads(raw)["content"])):
        last.write_bytes(bad)
        for line in ("extract --backbones pixels", "train --method fed3r", "inspect"):
            must_fail_corrupt(str(last), line)
        ok("methods info fed3r")
    last.unlink()
    # it extracted digits and trained on them
    assert fedcache("train --method fed3r").code == 4
    must_fail("", "extract --backbones pixels")
    assert data_of(words)["path"] == json.loads(raw)["content"]["store"]
    assert last.read_bytes() == raw


def test_an_older_note_of_the_last_store_is_told(words, own_home, tmp_path):
    """A whole older file has a seal of its own; but its dataset was extracted again since."""
    ok(words)
    old = (own_home / "last.json").read_bytes()
    place = tmp_path / "images/train/ant"
    shutil.copy(place / "000.png", place / "more.png")
    grown = place_of(words)
    train = "train --method fed3r --scheme iid --clients 2"
    assert ok(train).warnings == []
    (own_home / "last.json").write_bytes(old)
    (warning,) = ok(train).warnings
    assert f"--store {grown.name}" in warning


def test_what_the_package_says_is_read_once_until_a_file_of_it_changes(
    own_home, tmp_path, monkeypatch
):
    package = tmp_path / "package"
    monkeypatch.setattr(digests, "ROOT", package)
    package.mkdir()
    source = package / "ridge.py"
    read = []
    source.write_text("x = 1")

    def words():
        read.append(source.read_text())
        return [read[-1]]

    def asked():
        package_state.cache_clear()  # each command is a process
        read.clear()
        return remembered_of_package(["words"], words), len(read)

    assert [asked(), asked()] == [(["x = 1"], 1)] * 2, "a home that is not there remembers nothing"
    assert not own_home.exists()
    own_home.mkdir()
    assert asked() == (["x = 1"], 1)
    assert asked() == (["x = 1"], 0)
    source.write_text("x = 2")
    assert asked() == (["x = 2"], 1)
    assert asked() == (["x = 2"], 0)
    package_state.cache_clear()
