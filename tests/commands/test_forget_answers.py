"""``fedcache forget``: the new run is that of clients that never met the forgotten one, and it is proved or refused."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from command import data_of, ok
from failing_command import must_fail, must_fail_corrupt, must_fail_store, must_fail_training
from federation import small
from homes import made_once
from made_path import extracted

import fedcache as fc
from fedcache.federate.execution import executor
from fedcache.federate.methods import METHODS

ADDITIVE = [name for name, method in METHODS.items() if method.additive(method.resolve())]


@made_once
def parts(place):
    """The saved partition ``sites`` of three domains, each a client."""
    store = extracted(place, "glyph-clip", train=8, domains=("ink", "chalk", "oil"))
    ok("partition --scheme feature-shift --name sites")
    return store / "partitions/sites.partition"


def trained(words):
    return data_of(f"train --method {words}")["digest"][:16]


def rows_of(clients, field):
    return {client.name: getattr(client, field).tolist() for client in clients}


@pytest.mark.parametrize("method", ADDITIVE)
def test_the_new_run_is_that_of_clients_that_never_met_the_forgotten_one(parts, method, tmp_path):
    settings = "".join(f"--set {key}={value} " for key, value in small(method).items())
    words = f"{method} --set feat_post=l2 {settings}--seeds 0,1 --partition"
    run = trained(f"{words} sites")
    done = fc.forget(run, "ink")
    assert done.difference < 1e-6
    assert done.rows == 24
    assert done.run.result["partition"]["args"]["forgotten"] == ["ink"]
    whole = fc.Partition.load(parts)
    others = [client for client in whole.clients if client.name != "ink"]
    replace(whole, clients=others).save(tmp_path / "others.partition")
    never = trained(f"{words} {tmp_path / 'others.partition'}")
    X, _ = fc.Store.open(parts.parents[1]).Xy("glyph-clip", split=None)
    for seed in (0, 1):
        expected = fc.load_model(never, seed=seed).scores(X)
        np.testing.assert_array_equal(done.run.model(seed).scores(X), expected)
    again = data_of(f"forget {run} --client ink")
    assert again["run"]["reused"]
    assert again["difference"] == done.difference


def test_a_method_that_says_it_adds_up_and_does_not_fails(parts):
    ncm = METHODS["fedncm"]

    def by_clients(down, state, data, ctx):
        state, up = ncm.fit(down, state, data, ctx)
        return state, {**up, "sum": up["sum"] + 0.1 * ctx.env.clients}

    fc.register("method", replace(ncm, name="by-clients", fit=by_clients))
    run = trained("by-clients --partition sites")
    must_fail_training(
        "by-clients declares that its model depends only on the sum of all uploads. This is wrong",
        f"forget {run} --client ink",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fedavg --rounds 1", "one upload"),
        ("afl", "one upload"),
        ("fed3r --aggregate median", "--aggregate"),
        ("fed3r --dp-clip 1 --dp-noise 1 --dp-seed 0", "--dp-clip"),
        ("fed3r --participation 2", "take part"),
        ("soft-means", "feat_post=center"),
    ],
)
def test_refusals_come_with_a_command_that_works(parts, words, said):
    run = trained(f"{words} --partition sites")
    ok(must_fail(said, f"forget {run} --client ink")["hint"].partition("fedcache ")[2])


def test_a_client_is_forgotten_once_and_never_the_last_one(parts):
    run = trained("fed3r --partition sites")
    must_fail("chalk, ink, oil", f"forget {run} --client inc")
    for client in ("ink", "chalk"):
        done = data_of(f"forget {run} --client {client}")
        run = done["run"]["digest"][:16]
    assert done["run"]["partition"]["args"]["forgotten"] == ["chalk", "ink"]
    must_fail("already", f"forget {run} --client ink")
    must_fail("only client", f"forget {run} --client oil")


def test_validation_and_test_rows_leave_with_the_client(parts, own_home, monkeypatch):
    monkeypatch.setattr(executor, "TOGETHER_FROM", 2)  # as if there were many clients
    made = "--scheme dirichlet --clients 6 --option test_protocol=matched --validation 0.2"
    run = trained(f"fed3r {made}")
    place = own_home / f"runs/{run}/partition-0.partition"
    whole = fc.Partition.load(place)
    assert data_of(f"forget {run} --client client-2")["difference"] < 1e-6
    few = fc.Partition.load(next(parts.parent.glob("*-without-client-2-*")))
    gone = whole.clients[2]
    others = [client for client in whole.clients if client.name != gone.name]
    for field in ("train", "test", "validation"):
        assert rows_of(few.clients, field) == rows_of(others, field)
    assert few.dropped - whole.dropped == len(gone.train) + len(gone.validation)
    place.unlink()
    must_fail_corrupt(place.name, f"forget {run} --client client-1")


def test_a_run_whose_store_is_gone_is_refused(parts):
    run = trained("fed3r --partition sites")
    shutil.rmtree(parts.parents[1])
    must_fail_store("store", f"forget {run} --client ink")
