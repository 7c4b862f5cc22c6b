"""A method in a file of the user's own: it trains by ``fc.train``, and every change of it is another run."""

import importlib
import sys
from dataclasses import replace

import pytest
from arrays import ingested
from command import data_of
from refusal import refused

import fedcache as fc
from fedcache.errors import UsageError
from fedcache.federate.methods import METHODS
from fedcache.plugins import forget
from fedcache.runs.directory import own_digest

FILE = """
from dataclasses import replace
from functools import partial
from fedcache.federate.methods.fedavg import METHOD as FEDAVG
from my_helper import FACTOR

def aggregate(server, up, ctx):
    return {**server, **{k: FACTOR * t for k, t in up.items()}}

def shrinking(factor):
    def shrunk(server, up, ctx):
        return {**server, **{k: factor * t for k, t in up.items()}}
    return replace(FEDAVG, name="mine", aggregate=shrunk)

def bound_to_itself(depth):
    def again(server, up, ctx):
        return again(server, up, ctx) if depth < 0 else aggregate(server, up, ctx)
    return replace(FEDAVG, name="mine", aggregate=again)

METHOD = replace(FEDAVG, name="mine", aggregate=aggregate)
RENAMED = replace(FEDAVG, name="mine")
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write both files and import the method's anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # a file that changes within a second has a stale cache
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget():
        for name in ("my_method", "my_helper"):
            sys.modules.pop(name, None)

    def made(file=FILE, helper="FACTOR = 0.5\n"):
        (tmp_path / "my_method.py").write_text(file)
        (tmp_path / "my_helper.py").write_text(helper)
        forget()
        importlib.invalidate_caches()
        return importlib.import_module("my_method")

    yield made
    forget()


@pytest.mark.slow
def test_a_method_of_ones_own_trains_and_is_found_again(tmp_path, write):
    store = ingested(tmp_path)
    parts = fc.partition(store, "iid", clients=3)

    def train(method):
        return fc.train(method, store, parts, rounds=2)

    module = write()
    run = train(module.METHOD)
    assert run.result["method"] == "mine"
    assert run.result["code"] == own_digest(module.METHOD)
    assert train(write().METHOD).reused, "the same files imported again"
    assert not train(write(FILE.replace("FACTOR *", "-FACTOR *")).METHOD).reused
    assert not train(write(helper="FACTOR = 0.25\n").METHOD).reused
    renamed = train(write().RENAMED)
    known = train("fedavg")
    assert renamed.accuracy == known.accuracy
    assert renamed.path != known.path
    assert train(METHODS["fedavg"]).path == known.path, "the object that comes along is its name"
    assert data_of("gc --kind old-runs")["garbage"] == []


@pytest.mark.slow
def test_the_digest_changes_with_everything_that_is_bound(write):
    module = write()
    plain = own_digest(module.METHOD)
    others = [
        own_digest(module.shrinking(0.5)),
        own_digest(module.shrinking(0.25)),
        own_digest(module.bound_to_itself(1)),
        own_digest(module.bound_to_itself(2)),
        own_digest(replace(module.METHOD, one_shot=True)),
        own_digest(replace(module.METHOD, hparams=module.METHOD.hparams[:-1])),
        own_digest(replace(module.METHOD, predict=METHODS["fedncm"].predict)),
        own_digest(replace(module.METHOD, aggregate=module.partial(module.aggregate, ctx=1))),
    ]
    assert len({plain, *others}) == 1 + len(others)
    assert plain == own_digest(write().METHOD)
    assert own_digest(write(FILE + "# a remark\n").METHOD) != plain


def test_the_digest_covers_the_file_of_a_bound_dataclass(tmp_path, write):
    """The method's own file does not import it: what its methods compute would change unseen."""
    module = write()
    code = "from dataclasses import dataclass\n@dataclass\nclass Rate:\n    r: float = 0.5\n"
    found = []
    for text in (code, code + "    def half(self):\n        return self.r / 2\n"):
        (tmp_path / "my_rate.py").write_text(text)
        sys.modules.pop("my_rate", None)
        importlib.invalidate_caches()
        rate = importlib.import_module("my_rate").Rate()
        found.append(
            own_digest(replace(module.METHOD, aggregate=module.partial(module.aggregate, ctx=rate)))
        )
    sys.modules.pop("my_rate")
    assert found[0] != found[1]


def test_what_has_no_honest_digest_is_refused(tmp_path, write):
    module = write()
    typed = {}
    exec(FILE, typed)  # as a notebook's cell does
    bound = module.partial(module.aggregate, object())
    for method, said in (
        (replace(module.METHOD, name="fedavg"), "fedavg"),
        (typed["METHOD"], "cannot be read"),
        (replace(module.METHOD, predict=bound), "type object"),
    ):
        with pytest.raises(UsageError, match=said):
            fc.train(method)
    (tmp_path / "my_method.py").write_text(FILE.replace("FACTOR *", "3 * FACTOR *"))
    refused(lambda: fc.train(module.METHOD), "my_method.py")
    refused(lambda: fc.grid(module.METHOD, lr=[0.1], jobs=2), "mine")


def test_a_method_of_ones_own_is_a_point_of_a_grid_like_any_other(tmp_path, write):
    store = ingested(tmp_path)
    module = write()
    parts = fc.partition(store, "iid", clients=3)
    done = fc.grid([module.METHOD, "fedavg"], store, parts, options={"rounds": 2}, lr=[0.1, 0.01])
    assert [point.method for point in done.points] == ["mine", "mine", "fedavg", "fedavg"]
    alone = fc.train(module.METHOD, store, parts, rounds=2, settings={"lr": 0.1})
    assert alone.accuracy.mean == done.points[0].run.accuracy.mean
    forget("methods", "mine")
    refused(
        lambda: fc.grid(replace(module.METHOD, name="fedavg"), store, parts, lr=[0.1]), "'fedavg'"
    )
