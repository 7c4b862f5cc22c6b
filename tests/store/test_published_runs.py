"""Runs on a published store: the same results to the bit from a folder, a web server and a bucket."""

import os
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from arrays import normals
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_store
from files_now import bytes_of
from homes import made_once
from made_path import place_of
from refusal import store_error
from web_server import web_server

from fedcache import Store
from fedcache.errors import Exit
from fedcache.progress import Silent
from fedcache.store import byte_source, publish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

METHODS = ("fedavg --rounds 3", "fed3r", "fedncm")


@pytest.fixture
def bucket(monkeypatch):
    """The address of an empty bucket on this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    # Of moto alone: it forgets no bucket between servers of one process.
    name = f"bucket-{os.urandom(4).hex()}"
    made = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    with urllib.request.urlopen(made):
        pass
    yield f"s3://{name}"
    server.stop()


@made_once
def digits(_folder):
    """The store of some digits, by an encoder with text features."""
    return place_of("extract --dataset digits --backbones glyph-clip --limit 400 --workers 0")


def results(store, runs):
    """What three methods give on a store, without where it is and how long it took."""
    found = []
    runs.mkdir()
    for method in METHODS:
        data = data_of(f"train {method} --clients 4 --no-extract --store {store} --runs {runs}")
        found.append({key: data[key] for key in ("digest", "accuracy", "seeds")})
    return found


def test_three_methods_give_equal_results_wherever_the_store_is(
    digits, published, bucket, tmp_path, monkeypatch
):
    monkeypatch.setattr(publish, "SHARD_BYTES", 1 << 17)
    monkeypatch.setattr(byte_source, "WAITS", (0.01,) * 5)
    here = results(digits, tmp_path / "here")
    ok(f"publish {digits} {bucket}/a/digits")
    assert data_of(f"verify {bucket}/a/digits")["ok"] is True
    assert results(published, tmp_path / "folder") == here
    assert results(f"{bucket}/a/digits", tmp_path / "bucket") == here
    with web_server(published.parent) as server:
        server.fail_every = 3
        assert results(f"{server.address}/digits", tmp_path / "web-runs") == here
    models = bytes_of(tmp_path / "here", "*.safetensors")
    assert len(models) == len(METHODS)
    for other in ("folder", "bucket", "web-runs"):
        assert bytes_of(tmp_path / other, "*.safetensors") == models


def test_a_bucket_refuses_in_one_sentence(bucket, digits, monkeypatch):
    must_fail_store("is not a store", f"inspect {bucket}/nothing")
    missing = fedcache(f"publish {digits} {bucket}-missing/x")
    assert missing.code == Exit.STORE
    assert "the bucket does not exist" in missing.err
    assert missing.err.count("\n") == 2
    other = Store.from_arrays({"mine": [[1.0], [2.0]]}, labels=[0, 1])
    publish.publish(other, f"{bucket}/x", "", Silent())
    store_error(
        lambda: publish.publish(Store.open(digits), f"{bucket}/x", "", Silent()),
        "a publication of another dataset",
    )
    inside = f"publish {bucket}/x {bucket}/x"
    must_fail_store("inside the store", inside)
    must_fail_store("inside the store", f"{inside}/more")
    for endpoint in ("localhost:80", "", "http://localhost:99999"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        must_fail("AWS_ENDPOINT_URL (https://HOST)", f"inspect {bucket}/x")


READ = """
import random, sys
import numpy as np
from fedcache.store import mirror
from fedcache.store.store import Store
mirror.KEPT = 2
there, here = Store.open(sys.argv[1]), Store.open(sys.argv[2])
key, = here.arrays
rows = here.reader(key).all()
size = here.arrays[key].chunk_rows
for number in random.choices(range(len(here.arrays[key].chunks)), k=300):
    found = Store.open(there.path).reader(key).chunk(number)
    assert np.array_equal(found, rows[number * size : number * size + len(found)])
"""


def test_two_processes_share_the_room_of_mirrors(tmp_path, monkeypatch):
    """Each removes chunks that the other is about to read, and both read what was published."""
    x = normals(0, 512 * 12, 8)
    store = Store.from_arrays({"mine": x}, labels=np.arange(len(x)) % 3)
    publish.publish(store, f"{tmp_path}/web/mine", "", Silent())
    monkeypatch.setenv("FEDCACHE_REMOTE_CACHE", str(4 * 512 * 8 * 4))
    with web_server(tmp_path / "web") as server:
        command = [sys.executable, "-c", READ, f"{server.address}/mine", str(store.path)]
        readers = [subprocess.Popen(command) for _ in range(2)]
        assert [reader.wait() for reader in readers] == [0, 0]


@pytest.fixture
def published(digits, tmp_path):
    """A folder with the published digits."""
    ok(f"publish {digits} {tmp_path}/web/digits")
    return tmp_path / "web/digits"


def test_evaluation_prediction_and_grids_read_a_published_store(digits, published, tmp_path):
    run = place_of(f"train fedncm --clients 4 --store {digits}")
    with web_server(published.parent) as server:
        address = f"{server.address}/digits"

        def told(line, store):
            return {
                k: v for k, v in data_of(f"{line} {run} --store {store}").items() if k != "runs"
            }

        for line in ("predict", "evaluate"):
            assert told(line, address) == told(line, digits)
        ok(f"grid fedncm --sweep shots=1,2 --scheme few-shot --clients 4 --store {address}")
        assert data_of(f"export {tmp_path}/rows.npz --store {address}")["rows"] == 400
