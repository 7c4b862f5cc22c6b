"""Plug-ins: what an installed package or ``fc.register`` brings is used by name, and is part of a run's identity."""

import importlib
import sys

import pytest
import torch
from arrays import small_store
from command import data_of, fedcache
from homes import made_once
from opened import open_dataset, peek
from pictures import folder
from refusal import refused

import fedcache as fc
from fedcache import plugins
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.digests import DigestMemory
from fedcache.federate.engine.run import executors
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES
from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.runs.directory import code_of

CODE = '''
"""Means of every class, shrunk towards the mean of all: the method of a package."""
from dataclasses import replace

import torch

from fedcache.extract.datasets import folder
from fedcache.federate.execution.executor import Sequential
from fedcache.federate.methods.fedncm import METHOD as NCM
from fedcache.federate.partition.partition import SCHEMES
from fedcache.runs.directory import code_of


def aggregate(server, up, ctx):
    return NCM.aggregate(server, up, ctx)


METHOD = replace(NCM, name="outside-ncm", aggregate=aggregate, summary="Class means, from another package.")
SCHEME = replace(SCHEMES["iid"], name="outside-iid")


def middle(V, f):
    return V.sort(0).values[len(V) // 2]


def wrong(V):
    return V


class Pictures:
    key = staticmethod(folder.key)
    load = staticmethod(folder.load)


class Plain(Sequential):
    name = "outside-loop"


class Log:
    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "rounds.txt").open("w")

    def __call__(self, round_):
        self.file.write(f"{round_.round}\\n")

    def close(self):
        self.file.close()
'''
ENTRIES = """[fedcache.methods]
outside-ncm = outside_pkg.things:METHOD
outside-gone = outside_pkg.missing:METHOD
outside-odd = outside_pkg.things:middle
fedavg = outside_pkg.things:METHOD
[fedcache.partitions]
outside-iid = outside_pkg.things:SCHEME
[fedcache.aggregators]
outside-middle = outside_pkg.things:middle
outside-wrong = outside_pkg.things:wrong
[fedcache.datasets]
outside-pictures = outside_pkg.things:Pictures
outside-nothing = outside_pkg.things:middle
[fedcache.executors]
outside-loop = outside_pkg.things:Plain
[fedcache.trackers]
outside-log = outside_pkg.things:Log
"""


def install(place, version="1.2"):
    """A package as pip would leave it, below ``place``; returns the file of its code."""
    package = place / "outside_pkg"
    facts = place / "outside_pkg-1.2.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    facts.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "things.py").write_text(CODE)
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: outside-pkg\nVersion: {version}\n"
    )
    (facts / "entry_points.txt").write_text(ENTRIES)
    return package / "things.py"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of ``sys.path`` with the package in it."""
    install(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(f"{tmp_path}/site-packages")
    plugins._installed.cache_clear()
    yield tmp_path / "site-packages"
    plugins._installed.cache_clear()
    forget_modules()


def forget_modules():
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside_pkg"]:
        del sys.modules[name]


store = made_once(small_store)


def train(store, words):
    return data_of(f"train --store {store} --scheme iid --clients 4 {words}")


def test_a_method_of_a_package_trains_by_its_name_and_is_shown_as_from_outside(site, store):
    own = train(store, "--method fedncm")
    theirs = train(store, "--method outside-ncm")
    assert theirs["accuracy"] == own["accuracy"]
    assert theirs["plugins"] == [
        {"kind": "methods", "name": "outside-ncm", "package": "outside-pkg", "version": "1.2"}
    ]
    assert "plugins" not in own
    listed = {m["name"]: m.get("origin") for m in data_of("methods list")["methods"]}
    assert listed["outside-ncm"] == "outside-pkg 1.2"
    assert listed["fedncm"] is None
    assert listed["fedavg"] is None  # which the package cannot take
    assert "outside-ncm" not in list(METHODS)  # nothing is imported to list fedcache's own


def test_package_version_and_code_are_part_of_the_identity(site):
    def digest():
        plugins._installed.cache_clear()
        forget_modules()
        importlib.invalidate_caches()
        return code_of(METHODS["outside-ncm"])

    first = digest()
    install(site, version="1.3")
    second = digest()
    things = install(site)
    assert digest() == first != second
    things.write_text(CODE.replace("len(V) // 2", "len(V) // 20"))
    assert digest() not in (first, second)


@pytest.mark.slow
def test_scheme_executor_aggregator_and_tracker_of_a_package_are_used_by_name(
    site, store, tmp_path
):
    fedavg = "--method fedavg --rounds 2"
    plain = train(store, f"{fedavg} --execution sequential")
    loop = train(store, f"{fedavg} --execution outside-loop")
    assert loop["accuracy"] == plain["accuracy"]
    assert loop["execution"] == "outside-loop"
    assert loop["digest"] != plain["digest"]
    robust = train(store, f"{fedavg} --aggregate outside-middle")
    assert robust["plugins"][0]["kind"] == "aggregators"
    train(store, f"{fedavg} --track outside-log:{tmp_path}")
    assert (tmp_path / "rounds.txt").read_text().split() == ["1", "2"]
    dealt = data_of(f"partition --store {store} --scheme outside-iid --clients 3")
    assert dealt["scheme"] == "outside-iid"
    assert "outside-iid" not in list(SCHEMES)
    assert "outside-loop" not in executors()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--method outside-gone", "outside_pkg.missing:METHOD"),
        ("--method outside-odd", "outside-pkg 1.2"),
        ("--method outside-nmc", "'outside-ncm'"),
        ("--method fedavg --aggregate outside-wrong", "(4, "),
        ("--method fedavg --track outside-lg", "'outside-log'"),
    ],
)
def test_what_is_broken_is_named_with_its_package(site, store, words, said):
    done = fedcache(f"train --store {store} --scheme iid --clients 4 --rounds 1 {words}")
    assert done.code != Exit.OK
    assert said in done.err


def test_a_kind_of_datasets_is_read_by_its_package(site, tmp_path):
    images = folder(tmp_path / "images", train=2, test=1)
    memory = DigestMemory(tmp_path / "digests")
    theirs = open_dataset(f"outside-pictures:{images}", memory=memory)
    assert theirs.digest == open_dataset(f"folder:{images}", memory=memory).digest
    assert peek(f"outside-pictures:{images}", memory=memory) == (theirs.slug, theirs.digest)
    assert "outside-pictures:REST" in [row["name"] for row in data_of("datasets list")["datasets"]]
    assert "outside-pkg 1.2" in data_of(f"datasets info outside-pictures:{images}")["about"]
    refused(
        lambda: open_dataset("outside-nothing:x", memory=memory),
        "'outside-nothing' of outside-pkg 1.2",
    )


def test_register_is_for_this_process_and_refuses_what_is_taken():
    def halves(V):
        return V.mean(0) / 2

    assert fc.register("aggregator", halves, "halves") == "halves"
    try:
        V = torch.arange(6.0, dtype=torch.float64).view(3, 2)
        assert torch.equal(parse_rule("halves")(V, 0), V.mean(0) / 2)
        assert torch.equal(parse_rule("clip:100+halves")(V, 0), V.mean(0) / 2)
    finally:
        plugins.forget("aggregators", "halves")
    refused(lambda: parse_rule("halves"), "Unknown rule")
    for kind, given in (("method", METHODS["fedavg"]), ("methodes", "x"), ("tracker", object())):
        with pytest.raises(FedcacheError):
            fc.register(kind, given)
