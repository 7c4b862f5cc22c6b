"""The partition file: what is written is read back, and nothing else is read."""

import copy
import json

import numpy as np
import pytest
from draws import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from json_values import json_values
from partition_rows import DATASET, even_columns
from refusal import corruption, refused, store_error
from setting_lines import cases_of, chosen
from text_tables import rows_of

from fedcache.errors import CorruptionError
from fedcache.federate.partition import json_file
from fedcache.federate.partition.partition import SCHEMES, Client, Partition, from_payload, make
from fedcache.store.files import canonical_json, digest_of

load = Partition.load
SMALL = even_columns(4, 2, 3, domains=2)
SOUND = make("label-shift", SMALL, clients=2, ratio=2, alpha=5.0, domain=["domain 0", "domain 1"])


def signed(payload):
    """The payload with a digest that fits, as someone who edits a file on purpose would make it."""
    content = {key: value for key, value in payload.items() if key != "digest"}
    return {**content, "digest": digest_of(content)}


def changed(**fields):
    return signed(SOUND.to_payload() | fields)


FEASIBLE = dict(
    cases_of(
        """
        lda         clients=3 alpha=50.0 min_size=2
        label-shift alpha=50.0 ratio=2.0
        dirichlet   clients=3 alpha=50.0
        shards      clients=3
        iid         clients=3
        few-shot    clients=3
        flesd       clients=3
        """
    )
)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_saved_is_loaded(scheme, tmp_path):
    partition = make(scheme, SMALL, seed=5, **FEASIBLE.get(scheme, {}))
    path = tmp_path / "p.json"
    partition.save(path)
    again = load(path, dataset=DATASET, rows=36)
    assert again.digest == partition.digest
    assert again.to_payload() == partition.to_payload() == json.loads(path.read_bytes())
    assert again.args == partition.args
    assert again.describe(SMALL) == partition.describe(SMALL)
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


@pytest.mark.parametrize(
    ("field", "other"),
    {
        "scheme": "lda",
        "args": {},
        "seed": 1,
        "dataset": "other",
        "pool": 9,
        "dropped": 9,
        "notes": ["x"],
        "clients": SOUND.to_payload()["clients"][:1],
        "test": SOUND.to_payload()["test"][1:],
    }.items(),
)
def test_the_digest_covers_every_field(field, other):
    payload = {**SOUND.to_payload(), field: other}
    corruption(lambda: from_payload(payload), "digest")
    assert from_payload(signed(payload)).digest != SOUND.digest


def test_another_dataset_and_a_missing_file_are_store_errors(tmp_path):
    SOUND.save(tmp_path / "p.json")
    # Also where rows are beyond this store: a file of a larger dataset is sound, and of another dataset.
    for rows in (None, 20):
        store_error(
            lambda rows=rows: load(tmp_path / "p.json", dataset="e" * 64, rows=rows), "d" * 12
        )
    for path in (tmp_path / "none.json", tmp_path):
        store_error(lambda path=path: load(path), "partition")


def test_a_row_beyond_the_store_is_corruption():
    assert from_payload(SOUND.to_payload(), rows=36).digest == SOUND.digest
    corruption(
        lambda: from_payload(SOUND.to_payload(), dataset=SOUND.dataset, rows=20), "from 0 to 19"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *rows_of(
            """
            schema="fedcache.partition/3"                            | schema
            args={"a":{"b":1}}                                       | args
            seed=true                                                | seed
            clients=[{"name":"a","train":[0],"test":[4],"more":1}]   | client 0
            clients=[{"name":"a","train":[true],"test":[4]}]         | 'True'
            clients=[{"name":"a","train":[1,1],"test":[4]}]          | not ascending
            test=[9,4]                                               | not ascending
            dropped=0.0                                              | dropped
            """
        ),
        ({"clients": [{"name": "a", "train": [10**400], "test": [4]}]}, "client 0 train"),
    ],
)
def test_a_forged_file_is_refused_with_the_field(fields, message):
    corruption(lambda: from_payload(changed(**chosen(fields)), origin="p.json"), message)


SOUND_JSON = canonical_json(SOUND.to_payload())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"NaN",
        b'{"schema":"fedcache.partition/1"}',
        SOUND_JSON.replace(b'"alpha":5.0', b'"alpha":NaN'),
        SOUND_JSON.replace(b'"alpha":5.0', b'"alpha":1e999'),
        SOUND_JSON.replace(b'"name":"client-0"', b'"name":"\\ud800"'),
    ],
)
def test_bytes_that_are_no_partition_are_refused(raw, tmp_path):
    (tmp_path / "p.json").write_bytes(raw)
    corruption(lambda: load(tmp_path / "p.json"))


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    SOUND.save(tmp_path / "p.json")
    monkeypatch.setattr(json_file, "LARGEST_FILE", 100)
    corruption(lambda: load(tmp_path / "p.json"), "100")


@pytest.mark.slow
@examples(300, 600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_another_partition(place, bit, tmp_path):
    raw = bytearray(canonical_json(SOUND.to_payload()))
    raw[place % len(raw)] ^= 1 << bit
    (tmp_path / "p.json").write_bytes(raw)
    corruption(lambda: load(tmp_path / "p.json"))


@pytest.mark.slow
@examples(200, 400)
@given(data=st.data())
def test_a_replaced_value_is_a_fedcache_error_or_a_partition(data):
    """Any value anywhere in a signed payload: refused as corruption, or a partition that says the same again."""
    payload = copy.deepcopy(SOUND.to_payload())
    where = data.draw(st.sampled_from([*payload, "client", "client train"]))
    value = data.draw(json_values())
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
    except CorruptionError:
        return
    assert partition.to_payload() == payload


def test_a_partition_made_by_hand_is_checked_too():
    rows = np.arange(4)

    def by_hand(train):
        return Partition("mine", {}, 0, (Client("a", train, rows[2:]),), rows[2:], DATASET, 4, 0)

    refused(lambda: by_hand(rows[:2].astype(np.int32)), "int32")
    mine = by_hand(rows[:2])
    assert mine.default_name() == f"mine-{mine.digest[:8]}"
    assert from_payload(mine.to_payload()).digest == mine.digest
