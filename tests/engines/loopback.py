"""One federation of three sites with TLS and keys, and everything that is asked of it; a line of JSON for each answer.

python loopback.py SITES FOLDER: started by ``test_flower.py``, in a network of its own where that is allowed.
"""

import json
import os
import sys
import time
from pathlib import Path

from fedcache.config import Home, TrainConfig
from fedcache.errors import FedcacheError
from fedcache.federate.engines.flower import serving
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.processes import make_keys, register
from fedcache.federate.engines.flower.serving import attend, open_loopback
from fedcache.federate.engines.flower.site_names import TABLE, SiteNames
from fedcache.runs.loop import train

FULL = os.environ.get("FEDCACHE_CASES") == "full"
RUNS = {"fed3r": 1, "fedpcl": 2, "half-step": 2, **({"fedavg": 1, "fst-cbdg": 1} if FULL else {})}
began = time.monotonic()


class Never:
    """An event that nobody sets, for a minute."""

    def __init__(self):
        self.last = time.monotonic() + 100

    def wait(self, seconds):
        time.sleep(seconds)
        return time.monotonic() > self.last


def tell(name, **words):
    print(
        json.dumps({"name": name, "seconds": round(time.monotonic() - began, 1), **words}),
        flush=True,
    )


def plan(method, rounds, **words):
    train = {k: words.pop(k) for k in ("set", "backbones") if k in words}
    config = TrainConfig(method=method, rounds=rounds, execution="sequential", **train)
    return Plan(config, sites=3, **words).checked()


def reference(method, rounds, sites, home):
    config = TrainConfig(method=method, rounds=rounds, clients_from=str(sites))
    return train(config, home, runs=home.root / "alone")


def refused(shard, address, keys, home):
    serving.KEY_WAIT = 30.0
    try:
        attend(shard, str(address), keys, None, None, home, lambda _text: None, Never())
    except FedcacheError as error:
        return {"code": int(error.code), "message": error.message, "hint": error.hint}
    return {}


def main(sites, folder):
    home = Home.from_environment()
    shards = sorted(sites.glob("*.zarr"))
    loopback = open_loopback(folder, [p.stem for p in shards], tls=True)
    tell("open")
    try:
        for shard in shards:
            loopback.add(shard, home)
        for method, rounds in RUNS.items():
            last = loopback.run(plan(method, rounds), lambda _words: None)
            tell(method, last=last, alone=reference(method, rounds, sites, home).accuracy.mean)

        last = loopback.run(plan("fed3r", 1, secure=True), lambda _words: None)
        tell("secure", last=last, alone=reference("fed3r", 1, sites, home).accuracy.mean)

        last = loopback.run(plan("fed3r", 1, backbones=["pixels"], wait=5.0), lambda _words: None)
        tell("no-features", last=last)

        # A site is killed between its broadcast and its upload.
        gone = shards[1].stem

        def kill(words):
            if "round 1 of" in str(words) and loopback.nodes[gone].alive:
                time.sleep(3)
                loopback.nodes[gone].kill()

        tell("killed", last=loopback.run(plan("fedavg", 2, set={"lr": "0.02"}), kill))

        # The killed site's shard, served by another key that the server knows.
        tell("names", known=SiteNames(folder / TABLE).known())
        register(loopback.address, [make_keys(folder / "keys", ["other"], ()).nodes["other"]])
        loopback.add(shards[1], home, called="other")
        last = loopback.run(plan("fedncm", 1, start_with=2, wait=60.0), lambda _words: None)
        tell("another-key", last=last)

        mixed = make_keys(folder / "strangers", ["stranger"], ()).site("stranger")
        (mixed / "ca.crt").write_bytes((folder / "keys" / "ca.crt").read_bytes())
        tell("unknown-key", **refused(shards[1], loopback.address, mixed, home))
    finally:
        loopback.stop()
    tell("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
