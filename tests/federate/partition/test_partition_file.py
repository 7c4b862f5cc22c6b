"""The partition file: what is written is read back, and nothing else is read."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from command import fedcache, ok
from draws import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from partition_rows import DATASET, even_columns
from pictures import folder

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.partition import json_file
from fedcache.federate.partition import partition as module
from fedcache.federate.partition.partition import SCHEMES, Client, Partition, from_payload, load, make
from fedcache.store.files import canonical_json, digest_of

SMALL = even_columns(4, 2, 3, domains=2)
SOUND = make("label-shift", SMALL, clients=2, ratio=2, alpha=5.0, domain=["domain 0", "domain 1"])


def signed(payload: dict) -> dict:
    """The payload with a digest that fits, as someone who edits a file on purpose would make it."""
    content = {key: value for key, value in payload.items() if key != "digest"}
    return {**content, "digest": digest_of(content)}


def changed(**fields) -> dict:
    return signed({**SOUND.to_payload(), **fields})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_saved_is_loaded(scheme, tmp_path):
    args = {"clients": 3} if scheme in ("shards", "lda", "iid", "few-shot", "dirichlet", "flesd") else {}
    args |= {"alpha": 50.0} if scheme in ("lda", "dirichlet", "label-shift") else {}
    args |= {"min_size": 2} if scheme == "lda" else {"ratio": 2.0} if scheme == "label-shift" else {}
    partition = make(scheme, SMALL, seed=5, **args)
    path = tmp_path / "p.json"
    partition.save(path)
    again = load(path, dataset=DATASET, rows=36)
    assert again.digest == partition.digest
    assert again.to_payload() == partition.to_payload() == json.loads(path.read_bytes())
    assert again.args == partition.args
    assert again.default_name() == partition.default_name()
    assert again.describe(SMALL) == partition.describe(SMALL)
    for a, b in zip(again.clients, partition.clients, strict=True):
        assert a.name == b.name
        assert (a.train.dtype, a.test.dtype) == (np.int64, np.int64)
        assert np.array_equal(a.train, b.train)
        assert np.array_equal(a.test, b.test)
    assert path.read_bytes() == canonical_json(partition.to_payload()) + b"\n"
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_the_file_in_full():
    partition = make("iid", even_columns(1, 1, 2), seed=1, clients=1)
    content = {
        "schema": "fedcache.partition/1",
        "scheme": "iid",
        "args": {"clients": 1, "domain": None},
        "seed": 1,
        "dataset": DATASET,
        "clients": [{"name": "client-0", "train": [0, 2], "test": None}],
        "test": [1, 3],
        "pool": 2,
        "dropped": 0,
        "notes": [],
    }
    assert partition.to_payload() == {**content, "digest": digest_of(content)}


def test_a_hundred_clients_tested_on_the_same_rows_hold_them_once():
    columns = even_columns(500, 100, 10)
    payload = make("iid", columns, clients=100).to_payload()
    assert all(client["test"] is None for client in payload["clients"])
    clients = from_payload(payload).clients
    assert all(client.test is clients[0].test for client in clients)
    assert len(canonical_json(payload)) < 60_000


@pytest.mark.parametrize("field", ["scheme", "args", "seed", "dataset", "clients", "test", "pool", "dropped", "notes"])
def test_the_digest_covers_every_field(field):
    other = {
        "scheme": "lda", "args": {}, "seed": 1, "dataset": "other", "pool": 9, "dropped": 9, "notes": ["x"],
        "clients": SOUND.to_payload()["clients"][:1], "test": SOUND.to_payload()["test"][1:],
    }[field]  # fmt: skip
    payload = {**SOUND.to_payload(), field: other}
    assert payload != SOUND.to_payload()
    with pytest.raises(FedcacheError, match="its content has digest") as error:
        from_payload(payload)
    assert error.value.code == Exit.CORRUPT
    assert from_payload(signed(payload)).digest != SOUND.digest


def test_another_dataset_is_a_store_error_that_shows_both(tmp_path):
    SOUND.save(tmp_path / "p.json")
    with pytest.raises(FedcacheError) as error:
        load(tmp_path / "p.json", dataset="e" * 64)
    assert error.value.code == Exit.STORE
    assert "d" * 12 in error.value.message
    assert "e" * 12 in error.value.message


@pytest.mark.parametrize("words", [("train", "--method", "fed3r"), ("shard",)])
def test_the_file_of_a_larger_dataset_is_of_another_dataset(tmp_path, words):
    ok("extract", "--dataset", f"folder:{folder(tmp_path / 'large', train=12)}", "--backbones", "random-projection",
       "--workers", 0)  # fmt: skip
    ok("partition", "--scheme", "iid", "--clients", 2, "--out", tmp_path / "large.json")
    assert ok(*words, "--partition", tmp_path / "large.json").code == 0
    ok("extract", "--dataset", f"folder:{folder(tmp_path / 'small', train=4)}", "--backbones", "random-projection",
       "--workers", 0)  # fmt: skip
    done = fedcache(*words, "--partition", tmp_path / "large.json", "--json")
    assert done.code == Exit.STORE
    assert "was made for the dataset with digest" in done.envelope["error"]["message"]


def test_a_missing_file_is_a_store_error(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(FedcacheError, match="Cannot read partition") as error:
            load(path)
        assert error.value.code == Exit.STORE


def test_a_row_beyond_the_store_is_corruption():
    assert from_payload(SOUND.to_payload(), rows=36).digest == SOUND.digest
    with pytest.raises(FedcacheError, match="expected rows from 0 to 19") as error:
        from_payload(SOUND.to_payload(), dataset=SOUND.dataset, rows=20)
    assert error.value.code == Exit.CORRUPT


CLIENT = {"name": "a", "train": [0], "test": [4]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": "fedcache.partition/3"}, "schema should be"),
        ({"scheme": "../evil"}, "scheme should be"),
        ({"scheme": None}, "scheme should be"),
        ({"args": []}, "args should be"),
        ({"args": {"a": {"b": 1}}}, "args should be"),
        ({"args": {"a": [1]}}, "args should be"),
        ({"args": {"a": 2**70}}, "args should be"),
        ({"seed": True}, "seed should be"),
        ({"seed": -1}, "seed should be"),
        ({"dataset": ""}, "dataset should be"),
        ({"clients": {}}, "clients should be"),
        ({"clients": []}, "it has no clients"),
        ({"clients": [3]}, "client 0 should be name, train and test"),
        ({"clients": [{**CLIENT, "more": 1}]}, "client 0 should be name, train and test"),
        ({"clients": [{**CLIENT, "name": "x" * 300}]}, "client 0 name should be"),
        ({"clients": [{**CLIENT, "train": "0"}]}, "client 0 train should be a list"),
        ({"clients": [{**CLIENT, "train": [True]}]}, "client 0 train holds 'True'"),
        ({"clients": [{**CLIENT, "train": [1.0]}]}, "client 0 train holds '1.0'"),
        ({"clients": [{**CLIENT, "train": [-1]}]}, "client 0 train holds '-1'"),
        ({"clients": [{**CLIENT, "train": [2**60]}]}, "client 0 train holds"),
        ({"clients": [{**CLIENT, "train": [10**400]}]}, "client 0 train holds"),
        ({"clients": [{**CLIENT, "train": []}]}, "client 'a' has 0 training and 1 test rows"),
        ({"clients": [{**CLIENT, "test": []}]}, "client 'a' has 1 training and 0 test rows"),
        ({"clients": [{**CLIENT, "train": [2, 1]}]}, "not ascending"),
        ({"clients": [{**CLIENT, "train": [1, 1]}]}, "not ascending"),
        ({"clients": [CLIENT, CLIENT]}, "2 clients have 1 names"),
        ({"clients": [{**CLIENT, "test": [0]}]}, "row 0 is trained and tested on"),
        ({"clients": [CLIENT, {"name": "b", "train": [4], "test": [5]}]}, "row 4 is trained and tested on"),
        ({"clients": [{**CLIENT, "test": None}], "test": [0, 9]}, "row 0 is trained and tested on"),
        ({"test": [9, 4]}, "not ascending"),
        ({"pool": -1}, "pool should be"),
        ({"dropped": 0.0}, "dropped should be"),
        ({"notes": "x"}, "notes should be"),
        ({"notes": [1]}, "notes should be"),
    ],
)
def test_a_forged_file_is_refused_with_the_field(fields, message):
    with pytest.raises(FedcacheError) as error:
        from_payload(changed(**fields), origin="p.json")
    assert error.value.code == Exit.CORRUPT
    assert error.value.message.startswith("p.json is not a sound partition file")
    assert message in error.value.message


@pytest.mark.parametrize(
    "payload", [None, [], 3, "x", {}, {"schema": "fedcache.partition/1"}, {**SOUND.to_payload(), "x": 1}]
)
def test_other_json_is_refused(payload):
    with pytest.raises(FedcacheError) as error:
        from_payload(payload)
    assert error.value.code == Exit.CORRUPT


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"NaN",
        b"1" * 10_000,
        canonical_json(SOUND.to_payload()).replace(b'"alpha":5.0', b'"alpha":NaN'),
        canonical_json(SOUND.to_payload()).replace(b'"alpha":5.0', b'"alpha":1e999'),
        canonical_json(SOUND.to_payload()).replace(b'"name":"client-0"', b'"name":"\\ud800"'),
    ],
)
def test_bytes_that_are_no_partition_are_refused(raw, tmp_path):
    (tmp_path / "p.json").write_bytes(raw)
    with pytest.raises(FedcacheError) as error:
        load(tmp_path / "p.json")
    assert error.value.code == Exit.CORRUPT


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    SOUND.save(tmp_path / "p.json")
    monkeypatch.setattr(json_file, "LARGEST_FILE", 100)
    with pytest.raises(FedcacheError, match="at most 100 are read as JSON") as error:
        load(tmp_path / "p.json")
    assert error.value.code == Exit.CORRUPT


@pytest.mark.slow
@examples(300, 600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_another_partition(place, bit, tmp_path):
    raw = bytearray(canonical_json(SOUND.to_payload()))
    raw[place % len(raw)] ^= 1 << bit
    (tmp_path / "p.json").write_bytes(raw)
    with pytest.raises(FedcacheError) as error:
        load(tmp_path / "p.json")
    assert error.value.code == Exit.CORRUPT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@examples(200, 400)
@given(data=st.data())
def test_a_replaced_value_is_a_fedcache_error_or_a_partition(data):
    """Any value anywhere in a signed payload: refused as corruption, or a partition that says the same again."""
    payload = copy.deepcopy(SOUND.to_payload())
    where = data.draw(st.sampled_from([*payload, "client", "client train"]))
    value = data.draw(JSON)
    if where == "client":
        payload["clients"][0] = value
    elif where == "client train":
        payload["clients"][0]["train"][0] = value
    else:
        payload[where] = value
    try:
        payload = signed(payload) if where != "digest" else payload
    except ValueError:
        return  # NaN, infinity or half a surrogate: no canonical JSON has them
    try:
        partition = from_payload(payload)
    except FedcacheError as error:
        found = error
    else:
        assert partition.to_payload() == payload
        return
    assert found.code == Exit.CORRUPT


def test_a_partition_made_by_hand_is_checked_too():
    rows = np.arange(4)
    with pytest.raises(FedcacheError, match="int32 with 1 axes") as error:
        Partition("mine", {}, 0, (Client("a", rows[:2].astype(np.int32), rows[2:]),), rows[2:], DATASET, 4, 0)
    assert error.value.code == Exit.USAGE
    mine = Partition("mine", {}, 0, (Client("a", rows[:2], rows[2:]),), rows[2:], DATASET, 4, 0)
    assert mine.default_name() == f"mine-{mine.digest[:8]}"
    assert from_payload(mine.to_payload()).digest == mine.digest


def test_the_public_names_exist():
    assert all(hasattr(module, name) for name in module.__all__)
