"""Files of a store that somebody made up: every content ends in an error of ours."""

import hashlib
import json

import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from json_values import FINITE
from refusal import corruption, refused
from toy_store import KEYS, in_memory, whole, writer

from fedcache.errors import Exit, FedcacheError
from fedcache.store.files import parse_signed, to_signed
from fedcache.store.journal import read_journal
from fedcache.store.store import Store
from fedcache.store.verify import verify


@pytest.fixture(scope="module")
def store():
    with in_memory() as path:
        made = whole(path / "s.zarr")
        fill_flight(made)
        yield made


def fill_flight(made):
    with writer(made, "c-0", recipe={"backbone": "c"}) as w:
        w.write(0, np.ones((4, 1, 3), np.float32))
        w.write(
            2, np.full((4, 1, 3), np.nan, np.float32), dict.fromkeys((8, 9, 10, 11), "truncated")
        )


def use(path):
    """Everything a reader may ask of a store."""
    opened = Store.open(path)
    _ = opened.samples, opened.rows_ok, opened.unfinished(), opened.quarantined(), repr(opened)
    for name in opened.partitions:
        opened.partition(name)
    for slug, entries in opened.texts.items():
        for entry in entries:
            opened.text(slug, entry["templates"])
    for key, info in opened.arrays.items():
        assert len(info.digest) == 64
        opened.reader(key).rows(np.array([0]))
        opened.reader(key).all()
    verify(path)


def refusal(path):
    try:
        use(path)
    except FedcacheError as error:
        return error.code
    return None


def paths_of(value, at=()):
    """Every place of a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else []
    )
    return [at, *(p for k, v in items for p in paths_of(v, (*at, k)))]


def replaced(value, at, new):
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@pytest.mark.slow
@given(data=st.data(), new=FINITE | st.just(1 << 39) | st.just("../../etc"))
@examples(150, 600)
def test_a_manifest_with_any_field_replaced_and_a_digest_that_fits(store, data, new):
    file = store.path / "manifest.json"
    raw = file.read_bytes()
    manifest = parse_signed(raw)
    at = data.draw(st.sampled_from(paths_of(manifest)[1:]))
    try:
        file.write_bytes(to_signed(replaced(manifest, at, new)))
        assert refusal(store.path) in (None, Exit.CORRUPT, Exit.STORE)
    finally:
        file.write_bytes(raw)


@pytest.mark.parametrize(
    ("at", "value", "said", "code"),
    [
        (("dataset", "slug"), 7, "", Exit.CORRUPT),
        (("dataset", "digest"), None, "", Exit.CORRUPT),
        (("dataset", "digest"), ["toy"], "", Exit.CORRUPT),
        (("texts", "a", 0, "id"), "../x", "", Exit.CORRUPT),
        (("texts", "a", 0, "shape"), [3], "", Exit.CORRUPT),
        (("texts", "a", 0, "shape"), [3, 4, 1], "", Exit.CORRUPT),
        (("format",), 3, "format version 3", Exit.STORE),
        # 4 * 2^60 * 2 + 4: one more than fits in 63 bits; no memory is asked for
        (
            ("arrays", KEYS[0], "shape"),
            [14, 1 << 30, 1 << 30],
            "9,223,372,036,854,775,812",
            Exit.CORRUPT,
        ),
    ],
)
def test_a_field_of_a_manifest_that_no_writer_writes_is_refused(place, at, value, said, code):
    path = changed(place, at, value)
    refused(lambda: Store.open(path).reader(KEYS[0]).all(), said, code=code)


@pytest.mark.parametrize("raw", [b"{", b"[" * 10**5, b"\xff", b"[1]"])
def test_a_partition_of_other_bytes_and_a_digest_that_fits(place, raw):
    path = changed(place, ("files", "partitions/p.json"), hashlib.sha256(raw).hexdigest())
    (path / "partitions/p.json").write_bytes(raw)
    corruption(lambda: Store.open(path).partition("p"))


@pytest.mark.slow
@given(
    raw=st.binary(max_size=300)
    | st.text(max_size=100).map(str.encode)
    | FINITE.map(lambda v: json.dumps(v).encode())
)
@examples(150, 300)
def test_a_manifest_of_any_bytes(store, raw):
    file = store.path / "manifest.json"
    kept = file.read_bytes()
    try:
        file.write_bytes(raw)
        corruption(lambda: Store.open(store.path))
    finally:
        file.write_bytes(kept)


@pytest.mark.slow
@given(data=st.data(), new=FINITE, line=st.integers(0, 2))
@examples(80, 400)
def test_a_journal_with_any_field_replaced_and_digests_that_fit(store, data, new, line):
    file = store.path / "journal-c-0.jsonl"
    raw = file.read_bytes()
    lines = raw.splitlines(keepends=True)
    entry = parse_signed(lines[line][:-1])
    at = data.draw(st.sampled_from(paths_of(entry)[1:]))
    try:
        lines[line] = to_signed(replaced(entry, at, new)) + b"\n"
        file.write_bytes(b"".join(lines))
        use(store.path)
        read = read_journal(file)
        assert all(0 <= chunk < read.count for chunk in read.chunks)
    finally:
        file.write_bytes(raw)


@pytest.mark.slow
@given(
    raw=st.binary(max_size=200),
    which=st.sampled_from(["journal-c-0.jsonl", "partitions/p.json", "history.jsonl"]),
)
@examples(75, 300)
def test_journals_partitions_and_histories_of_any_bytes(store, raw, which):
    store.append_history({"event": "x"})
    file = store.path / which
    kept = file.read_bytes()
    try:
        file.write_bytes(raw)
        assert refusal(store.path) in (None, Exit.CORRUPT)
        if which.startswith("journal"):
            with writer(Store.open(store.path), "c-0", recipe={"backbone": "c"}) as w:
                assert w.missing() == [0, 1, 2, 3]
    finally:
        file.unlink(missing_ok=True)
        (store.path / "features/c-0").exists() or fill_flight(store)
        file.write_bytes(kept)


def test_deep_nesting_is_damage_not_a_crash(place):
    nested = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (place / "manifest.json").write_bytes(signed(nested))
    corruption(lambda: Store.open(place))


@pytest.mark.slow
@given(body=st.dictionaries(st.text(max_size=5), FINITE, min_size=1, max_size=5))
@examples(100, 200)
def test_signed_json_comes_back_and_every_other_spelling_is_refused(body):
    raw = to_signed(body)
    assert parse_signed(raw) == body
    for at in range(0, len(raw), 7):
        with pytest.raises(ValueError, match=r"does not match the checksum|is not JSON"):
            parse_signed(raw[:at] + bytes([raw[at] ^ 0x20]) + raw[at + 1 :])


def test_another_spelling_is_refused_although_its_digest_fits():
    assert to_signed({"a": 1}) == signed(b'{"a":1}')
    for text in (
        b'{"a": 1}',
        b'{"b":1,"a":2}',
        b'{"a":1,"a":2}',
        b'{"a":1.0e0}',
        b'{"a":"\\u0061"}',
    ):
        with pytest.raises(ValueError, match="JSON"):
            parse_signed(signed(text))


def signed(body):
    """``to_signed`` of bytes as they are."""
    return body[:-1] + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def changed(path, at, value):
    """A whole store with another value in its manifest."""
    file = whole(path / "s.zarr").path / "manifest.json"
    file.write_bytes(to_signed(replaced(parse_signed(file.read_bytes()), at, value)))
    return file.parent
