"""Federations over sites without Flower: the same figures as in one process, and what happens when a site fails."""

import dataclasses
import json
import shutil
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from command import data_of
from damage import flip_bit
from failing_command import must_fail, must_fail_machine
from fake_grid import FakeGrid, grid_of, in_round, killed, planned, to_every, together
from hypothesis import given
from hypothesis import strategies as st
from methods_tried import tried
from refusal import refused, training_error
from setting_lines import set_to
from small_sites import Heard, cut, left_out, missed_by
from text_tables import rows_of

from fedcache.commands import flower
from fedcache.config import Home, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engines.flower import processes, serving
from fedcache.federate.engines.flower.messages import (
    MalformedError,
    PackedMessage,
    RawTensor,
    SiteMessage,
    pack,
    unpack,
)
from fedcache.federate.engines.flower.messages import refused as refused_answer
from fedcache.federate.engines.flower.plan import read_app, why_not, write_app
from fedcache.federate.engines.flower.processes import Address, Keys, free_port, start
from fedcache.federate.engines.flower.site import ShardSite
from fedcache.federate.engines.flower.site_names import VARIABLE
from fedcache.federate.methods import METHODS
from fedcache.report.find_runs import open_run
from fedcache.report.run_origin import command_of
from fedcache.runs.directory import rounds_of
from fedcache.runs.loop import train
from fedcache.runs.run import sites_words
from fedcache.store.store import Store

C = 4
D = 6
ROWS = 90
OVER_SITES = [name for name, method in METHODS.items() if why_not(method, method.resolve()) is None]


def store_at(path, dtype=np.float32):
    draw = np.random.default_rng(3)
    y = draw.integers(0, C, ROWS)
    centre = draw.standard_normal((C, D))
    x = (centre[y] + 0.9 * draw.standard_normal((ROWS, D))).astype(dtype)
    return Store.from_arrays(
        {"mine": x}, labels=y, classes=list("abcd"), text={"mine": centre}, path=path
    )


def shards(place):
    """Three shards of one store, of different sizes, the first without one class."""
    store = store_at(place / "whole.zarr")
    made = cut(store, place, 3, "dirichlet", "--alpha", 0.7, "--partition-seed", 4)
    assert any(0 in client["counts"] for client in made["clients"])
    return place / "sites"


def alone(method, sites, tmp_path, **words):
    config = TrainConfig(
        method=method, **{"rounds": 2, "execution": "sequential", **words}, clients_from=str(sites)
    )
    return train(config, Home(tmp_path), runs=tmp_path / "alone")


@pytest.mark.parametrize("method", tried(OVER_SITES))
def test_sites_give_the_result_of_one_process(method, sites, tmp_path, federated):
    run = federated(method)
    reference = alone(method, sites, tmp_path)
    # The partition is said otherwise (sites by the digests of their stores), and sites do not send what they hold.
    reference.result["accuracy"].pop("zero_shot", None)  # of rows that lie at the sites
    for key in reference.result.keys() - {"partition", "digest", "files", "diagnostics"}:
        assert run.result[key] == reference.result[key], key
    assert missed_by(run) == []


@pytest.mark.parametrize(
    "words", [{"participation": "2", "rounds": 5}, {"eval_every": 1}, {"dtype": "float64"}]
)
def test_sampling_scoring_and_types_are_those_of_one_process(words, sites, tmp_path, federated):
    run = federated("fedproto", **words)
    reference = alone("fedproto", sites, tmp_path, **words)
    assert run.result["accuracy"] == reference.result["accuracy"]
    assert run.result["traffic"] == reference.result["traffic"]


@pytest.mark.slow
def test_a_grid_and_its_seeds_travel_in_one_message_each_way(grid, sites, tmp_path):
    runs = together(
        planned("fedavg", sweep={"lr": ("0.1", "0.01")}, seeds="0,1", rounds=1), grid, tmp_path
    )
    assert [kind for kind, _ in grid.log] == ["facts", "fit", "score"]
    for run, lr in zip(runs, (0.1, 0.01), strict=True):
        reference = alone("fedavg", sites, tmp_path, seeds="0,1", rounds=1, set={"lr": lr})
        assert run.result["accuracy"] == reference.result["accuracy"]


def test_points_that_differ_at_the_server_share_one_upload(sites, tmp_path):
    one = grid_of(sites, tmp_path / "one")
    many = grid_of(sites, tmp_path / "many")
    together(planned("fed3r"), one, tmp_path / "a")
    together(planned("fed3r", sweep={"lam": ("1e-3", "1e-2", "1e-1")}), many, tmp_path / "b")
    grown = many.bytes_up - one.bytes_up
    assert grown < one.bytes_up  # counts and words of two more points, and no Gram matrix


def test_a_prototype_of_an_absent_class_does_not_travel():
    proto = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    packed = pack(SiteMessage({}, [{"proto": proto}]))
    assert packed.arrays["0"].shape == (2, 2)
    assert torch.equal(unpack(packed).trees[0]["proto"], proto)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@pytest.mark.slow
@pytest.mark.cases(100)
@given(
    shape=shapes,
    kind=st.sampled_from(["float32", "float64", "int64", "uint8", "bool"]),
    seed=st.integers(0, 99),
)
def test_trees_come_back_bit_for_bit(shape, kind, seed):
    draw = np.random.default_rng(seed)
    values = torch.from_numpy(
        np.asarray((draw.standard_normal(shape) * (draw.random(shape) < 0.5)).astype(kind))
    )
    trees = [{"a": values}, {"b": values, "c": torch.ones(1)}]
    back = unpack(pack(SiteMessage({"round": 3, "x": None}, trees)))
    assert back.words == {"round": 3, "x": None}
    for tree, other in zip(trees, back.trees, strict=True):
        for name, t in tree.items():
            assert other[name].dtype == t.dtype
            assert other[name].shape == t.shape
            assert other[name].numpy().tobytes() == t.numpy().tobytes()


GOOD = pack(SiteMessage({"round": 1}, [{"W": torch.arange(6.0).reshape(2, 3)}]))
RAW = GOOD.arrays["0"]


def test_a_malformed_message_is_refused_for_every_fault():
    for packed in MALFORMED.values():
        with pytest.raises(MalformedError):
            unpack(packed)


def changed(packed, change):
    """An answer with another tree in it."""
    message = unpack(packed)
    words = json.loads(json.dumps(message.words))
    trees = [dict(tree) for tree in message.trees]
    change(words, trees)
    return pack(SiteMessage(words, trees))


def first(name, value):
    def change(_words, trees):
        trees[0][name] = value(trees[0].get(name, torch.zeros(1)))

    return change


def late(words, _trees):
    words["jobs"][0]["round"] = 7


BAD = {
    "W is nan": first("W", lambda t: torch.full_like(t, torch.nan)),
    "W has shape": first("W", lambda t: t[:-1].clone()),
    "not part of the schema": first("extra", lambda t: t),
    "it answers round 7": late,
    "it lacks W": lambda _w, trees: trees[0].pop("W"),
}
"""What is wrong -> how an upload of fedavg's linear head is made so."""


@pytest.mark.parametrize("why", BAD)
def test_the_gate_stands_before_every_upload(why, grid, federated):
    grid.meddle[102] = in_round(2, lambda packed: changed(packed, BAD[why]))
    run = federated("fedavg", set={"head": "linear"})
    (missed,) = missed_by(run)
    assert missed["site"] == "client-0"
    assert why in missed["why"]
    assert run.result["trust"] == {"on_bad_update": "reject", "rejected": 1}


@pytest.mark.parametrize(
    ("method", "words"), [("solo", {}), ("fedavg", {"aggregate": "median", "max_update_norm": 1e6})]
)
def test_no_upload_of_one_site_ends_a_run_where_nothing_is_said(method, words, grid, federated):
    grid.meddle[102] = to_every(
        "fit", lambda packed: changed(packed, BAD["not part of the schema"])
    )
    grid.meddle[101] = in_round(2, lambda _: PackedMessage("?", {}))
    run = federated(method, **words)
    assert set(left_out(run)) == {"client-0", "client-1"}
    assert any("malformed" in m["why"] for m in missed_by(run))
    assert run.result["trust"]["rejected"] > 0


def test_a_plan_without_sites_is_refused_with_a_number_that_works():
    for word in ("sites", "quorum"):
        refused(lambda word=word: planned("fedavg", **{word: 0}), f"--{word} is 0")
    hint = refused(lambda: planned("fedavg", sites=0)).hint
    planned("fedavg", sites=int(hint.rpartition("--sites ")[2]))


def test_secure_sums_have_nothing_to_leave_out():
    assert [c.on_bad_update for _, c in planned("fed3r", secure=True).points] == ["fail"]
    assert [c.on_bad_update for _, c in planned("fed3r").points] == ["reject"]
    refused(lambda: planned("fed3r", secure=True, on_bad_update="reject"), "--on-bad-update")


@pytest.mark.slow
def test_a_site_that_dies_is_left_out_and_the_rest_goes_on(grid, sites, tmp_path, federated):
    grid.meddle[100] = lambda kind, n, packed: (
        "its node disconnected" if kind != "facts" and n > 1 else packed
    )
    run = federated("fedavg", rounds=3)
    assert [m["round"] for m in missed_by(run)] == [2, 3]
    again = grid_of(sites, tmp_path / "state")
    # what lacked a site is not what was asked for
    (whole,) = together(planned("fedavg", rounds=3), again, tmp_path)
    assert not whole.reused
    assert whole.result["accuracy"] == alone("fedavg", sites, tmp_path, rounds=3).result["accuracy"]
    assert together(planned("fedavg", rounds=3), again, tmp_path)[0].reused


@pytest.mark.slow
def test_a_round_below_the_quorum_ends_the_run_and_it_goes_on_later(grid, sites, tmp_path):
    asked = planned("fedpcl", rounds=3, quorum=3)
    grid.meddle[100] = in_round(2, lambda _: "its node disconnected")
    training_error(lambda: together(asked, grid, tmp_path), "2 of 3 sites")
    again = grid_of(sites, tmp_path / "state")
    (run,) = together(asked, again, tmp_path)
    assert [kind for kind, _ in again.log].count("fit") == 2
    assert run.result["accuracy"] == alone("fedpcl", sites, tmp_path, rounds=3).result["accuracy"]


@pytest.mark.slow
def test_an_answer_that_is_lost_leaves_no_trace_at_the_site(sites, tmp_path):
    """The site has fitted round 2 and nobody knows: its next fit begins from what it held after round 1."""
    lost = grid_of(sites, tmp_path / "a")
    never = grid_of(sites, tmp_path / "b")
    lost.meddle[100] = in_round(2, lambda _: "lost")
    (first_run,) = together(planned("ditto", rounds=3), lost, tmp_path / "1")
    site = never.sites[100]
    asked = []

    def answer(kind, message):
        asked.append(kind)
        if asked.count("fit") == 2 and kind == "fit":
            return SiteMessage({"refused": {"code": 7, "message": "lost", "hint": ""}})
        return site.answer(kind, message)

    never.sites[100] = SimpleNamespace(answer=answer)
    (second_run,) = together(planned("ditto", rounds=3), never, tmp_path / "2")
    assert first_run.result["accuracy"] == second_run.result["accuracy"]


@pytest.mark.parametrize("harm", ["lost", "a digit", "another site's", "not sealed"])
def test_a_site_does_not_go_on_from_a_state_that_is_not_what_it_wrote(grid, sites, harm, federated):
    """scaffold's control variates decide its figures: changed ones gave .253 in the place of .955, and no word."""

    def damage(packed):
        (file,) = grid.sites[100].state.rglob("after-2.safetensors")
        raw = file.read_bytes()
        if harm == "lost":
            file.unlink()
        elif harm == "a digit":
            flip_bit(file, -1)
        elif harm == "another site's":
            (other,) = grid.sites[101].state.rglob("after-2.safetensors")
            shutil.copy(other, file)
        else:  # as an earlier release wrote it
            file.write_bytes(safetensors.torch.save(safetensors.torch.load(raw)))
        return packed

    grid.meddle[100] = in_round(2, damage)
    run = federated("scaffold", rounds=3)
    missed = missed_by(run)
    # Neither fitted nor scored with what is not its own.
    assert [m["round"] for m in missed] == [3, 3]
    assert all("after round 2" in m["why"] for m in missed)


@pytest.mark.parametrize("host", [None, "::", "192.0.2.1"])
def test_a_server_on_all_addresses_registers_its_sites_over_loopback(host, tmp_path, monkeypatch):
    at = []
    ended = Event()
    ended.set()
    keys = SimpleNamespace(ca=tmp_path / "ca.crt", nodes={"a": tmp_path / "a.pub"})
    process = SimpleNamespace(log="log", stop=lambda: None)
    monkeypatch.setattr(serving, "need_flower", lambda: None)
    monkeypatch.setattr(serving, "read_keys", lambda _path: keys)
    monkeypatch.setattr(serving, "start_superlink", lambda *_: process)
    monkeypatch.setattr(serving, "register", lambda address, _publics: at.append(address))
    serving.serve(tmp_path, host, 9000, Home(tmp_path), lambda _words: None, ended)
    assert at == [Address("192.0.2.1" if host == "192.0.2.1" else "127.0.0.1", 9000, keys.ca)]


REFUSED = "Failed to activate SuperNode."


@pytest.mark.parametrize(
    ("logs", "wait", "ends"),
    [
        ([REFUSED, REFUSED, None], 90.0, None),
        ([REFUSED] * 50, 0.1, "does not know this site's key"),
        (["Another error."], 90.0, "Another error."),
    ],
    ids=["known later", "never known", "another error"],
)
def test_a_site_whose_key_is_refused_tries_again_for_a_while(
    logs, wait, ends, sites, tmp_path, monkeypatch
):
    """The server registers keys some seconds after it opens its port. A log of None stands for a site that runs."""
    started = []
    stop = Event()

    def supernode(*_words):
        log = logs[len(started)]
        started.append(log)
        if log is None:
            stop.set()
        return SimpleNamespace(
            name="site",
            popen=SimpleNamespace(returncode=1),
            alive=log is None,
            log="log",
            tail=lambda *_lines: log,
            stop=lambda: None,
        )

    monkeypatch.setattr(serving, "need_flower", lambda: None)
    monkeypatch.setattr(serving, "read_site_keys", lambda _path: ("ca.crt", "node.key"))
    monkeypatch.setattr(serving, "start_supernode", supernode)
    monkeypatch.setattr(serving, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(serving, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(serving, "KEY_WAIT", wait)
    monkeypatch.setattr(Address, "check", lambda _address: True)
    shard = next(sites.glob("*.zarr"))
    words = (shard, "192.0.2.1:8000", tmp_path, None, None, Home(tmp_path), lambda _text: None)
    if ends is None:
        serving.attend(*words, stop)
        assert started == logs
        return
    error = refused(lambda: serving.attend(*words, stop), code=Exit.ENVIRONMENT)
    assert ends in error.message
    assert (len(started) > 1) == (logs[0] == REFUSED)


@pytest.mark.parametrize("method", ["fedavg", "fedpcl"])
def test_a_site_that_comes_late_joins_unless_the_method_keeps_a_place_for_each(
    method, grid, federated
):
    grid.hidden = {101: 4}
    run = federated(method, rounds=5, start_with=2)
    if method == "fedpcl":
        assert run.result["federation"]["joined"] == []
        assert "the method cannot add sites" in missed_by(run)[0]["why"]
        return
    (joined,) = run.result["federation"]["joined"]
    assert joined["site"] == "client-1"
    assert joined["round"] > 1
    assert run.result["clients"] == ["client-0", "client-2", "client-1"]


def test_a_result_of_fewer_sites_names_the_missing_ones(grid, tmp_path, federated):
    other = Store.from_arrays(
        {"mine": np.ones((9, D), np.float32)}, labels=[0, 1, 2] * 3, path=tmp_path / "other.zarr"
    )
    grid.sites[101] = ShardSite(other.path, tmp_path / "s", "south")
    run = federated("fed3r")
    words = "2 of 3 sites (without: south)"
    assert data_of(f"runs show {run.path}")["sites"] == words
    (entry,) = data_of(f"runs list {run.path}")["entries"]
    assert entry["sites"] == words
    done = [{"path": str(run.path), "reused": False, "sweep": {}, "result": run.result}]
    assert words in flower._ended({"done": done}).lines[0]


def test_an_unfinished_federation_is_resumed_by_the_command_that_began_it(grid, sites, tmp_path):
    grid.meddle[101] = in_round(2, killed)
    # Round 3 has one site of the two that it needs.
    for node in (100, 102):
        grid.meddle[node] = in_round(3, killed)
    asked = planned("fedavg", quorum=2, rounds=3)
    with pytest.raises(FedcacheError):
        together(asked, grid, tmp_path)
    found = data_of(f"runs list --runs {tmp_path}/runs")["left_out"]
    assert "fedcache flower run" in found[0]["hint"]
    grid.meddle.clear()
    (run,) = together(asked, grid, tmp_path)
    assert [(m["round"], m["site"]) for m in missed_by(run)] == [(2, "client-1")]
    assert "fedcache flower run" in data_of(f"runs show {run.path}")["again"]
    assert "fedcache flower run" in command_of(open_run(run.path), "")
    # A run in one process over the same stores has a command.
    reference = alone("fed3r", sites, tmp_path)
    assert data_of(f"runs show {reference.path}")["again"].startswith("fedcache train --config")


def test_a_run_resumes_only_with_the_same_sites_and_the_hint_says_so(
    grid, tmp_path, monkeypatch, federated
):
    grid.meddle[101] = in_round(2, killed)
    with pytest.raises(FedcacheError):
        federated("fedavg", quorum=3)
    heard = Heard()
    del grid.sites[101]
    federated("fedavg", heard, sites=2)
    assert not any("resuming" in note for note in heard.notes)
    monkeypatch.setattr(processes, "program", lambda _name: "/bin/echo")
    monkeypatch.setattr(Address, "check", lambda _address: True)
    error = refused(
        lambda: processes.run_app(tmp_path, Address("127.0.0.1", 9), print), code=Exit.ENVIRONMENT
    )
    assert "same sites" in error.hint


def test_a_round_counts_the_scored_sites_and_a_site_that_is_not_scored_is_told_once(
    grid, federated
):
    grid.meddle[101] = to_every("score", killed)
    heard = Heard()
    run = federated("fedavg", heard)
    *_, last = rounds_of(run.path)
    assert last["diagnostics"]["scored"] == 2
    assert len([w for w in heard.warnings if "client-1" in w]) == 1


@pytest.mark.parametrize(
    ("secure", "tensors"),
    [
        # Half of the symmetric gram matrix, 21 numbers; 21 + 24 + 4 = 49.
        (False, {"class_sum": [C, D], "gram": [D * (D + 1) // 2], "target_sum": [C]}),
        (True, {"vector": [49]}),
    ],
)
def test_a_site_lists_everything_that_it_sends(secure, tensors, grid, federated):
    federated("fed3r", secure=secure, secure_bound=64.0)
    for node, site in grid.sites.items():
        sent = [json.loads(line) for line in (site.state / "sent.jsonl").read_text().splitlines()]
        assert [one["message"] for one in sent] == [k for k, nodes in grid.log if node in nodes]
        assert [one["tensors"] for one in sent if one["message"] == "fit"] == [[tensors]]


def test_a_site_that_misses_a_round_is_told_once_and_named(grid, federated):
    grid.meddle[101] = in_round(2, killed)
    heard = Heard()
    run = federated("fedavg", heard, rounds=3)
    assert "scored" not in rounds_of(run.path)[-1]["diagnostics"]
    assert len([w for w in heard.warnings if "client-1" in w]) == 1
    assert (
        sites_words(run.result)
        == "3 sites (missing, rejected or not scored in some rounds: client-1)"
    )


def test_a_warning_of_a_run_is_not_repeated_when_a_site_joins(grid, tmp_path):
    grid.hidden = {101: 4}
    asked = planned("fedproto", rounds=6, start_with=2, aggregate="median")
    heard = Heard()
    (run,) = together(asked, grid, tmp_path, heard)
    assert [joined["site"] for joined in run.result["federation"]["joined"]] == ["client-1"]
    assert len([w for w in heard.warnings if "cannot protect" in w]) == 1, heard.warnings


@pytest.mark.slow
def test_features_of_another_recipe_are_refused_by_digest(grid, sites, tmp_path):
    heard = Heard()
    other = store_at(tmp_path / "other.zarr", np.float16)
    grid.sites[99] = ShardSite(other.path, tmp_path / "s", "stranger")
    for late in ({}, {99: 3}):
        grid.hidden = late
        (run,) = together(planned("fedavg", rounds=4), grid, tmp_path / f"{len(late)}", heard)
        assert heard.said("site 'stranger' is rejected")
        assert run.result["clients"] == ["client-0", "client-1", "client-2"]


def test_stores_of_their_own_are_sites_under_the_names_they_are_given(tmp_path):
    stores = [store_at(tmp_path / f"{i}.zarr") for i in range(3)]
    named = zip("cab", stores, strict=True)
    grid = FakeGrid(
        {i: ShardSite(store.path, tmp_path / name, name) for i, (name, store) in enumerate(named)}
    )
    (run,) = together(planned("fedncm"), grid, tmp_path)
    assert run.result["clients"] == ["a", "b", "c"]
    assert run.result["dataset"]["rows"] == 3 * ROWS
    refused(
        lambda: together(
            planned("fedncm", sites=1),
            FakeGrid({0: ShardSite(stores[0].path, tmp_path / "x")}),
            tmp_path,
        )
    )


IMPOSSIBLE = rows_of(
    """
    central  |                                 | in one place
    promptfl |                                 | shards have only features
    fedavg   | set={"feat_post":"standardize"} | all clients' rows
    clip-zs  | set={"feat_post":"center"}      | feat_post=center
    fedavg   | attack=sign-flip:0.2            | sites are real
    fedavg   | asynchronous=2                  | --asynchronous
    fedavg   | dp_clip=1.0 dp_noise=1.0        | correct predictions
    fedavg   | sweep={"rounds":["1","2"]}      | only hyperparameters of the training
    fedavg   | quorum=4                        | --quorum is 4
    """
)


@pytest.mark.parametrize(("method", "words", "why"), IMPOSSIBLE)
def test_what_cannot_run_over_sites_is_refused_before_anything_is_sent(method, words, why):
    refused(lambda: planned(method, **set_to(words)), why)


def test_without_keys_nothing_leaves_the_machine():
    for host in ("10.0.0.1", "0.0.0.0", "server.example"):
        refused(partial(Address(host, 8000).need_loopback, "take keys"), host)
    Address("10.0.0.1", 8000, Path("ca.crt")).need_loopback("take keys")
    Address("127.0.0.1", 8000).need_loopback("take keys")


def test_an_app_is_its_plan(tmp_path):
    asked = planned("fedavg", sweep={"lr": ("0.1", "0.01")}, set={"epochs": 2}, start_with=2)
    write_app(asked, tmp_path / "app")
    assert read_app(tmp_path / "app").to_config() == asked.to_config()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    refused(lambda: write_app(asked, tmp_path / "mine"), "is not a fedcache app")


def test_the_command_line_says_what_is_missing(sites, monkeypatch):
    must_fail("", "flower app --method central")
    must_fail("", "flower server")  # neither keys nor --insecure

    def absent(_name):
        raise PackageNotFoundError

    monkeypatch.setattr("fedcache.federate.engines.flower.processes.version", absent)
    shard = next(sites.glob("*.zarr"))
    for words in (
        ("flower site --superlink 127.0.0.1:8000 --insecure --shard", shard),
        ("flower server --insecure",),
    ):
        must_fail_machine("fedcache[flower]", *words)


def test_a_refusal_says_which_file_and_not_where_it_lies(sites, tmp_path, federated):
    harmed = sorted(sites.glob("*.zarr"))[0]
    chunk = next(
        p for p in sorted((harmed / "features").rglob("*")) if p.is_file() and "c" in p.parts
    )
    flip_bit(chunk, 9)
    heard = Heard()
    federated("fed3r", heard)
    assert [line for line in heard.lines if "features/" in line or chunk.name in line]
    assert not any(str(tmp_path) in line for line in heard.lines)
    told = refused_answer(
        FedcacheError(
            Exit.CORRUPT, "/home/me/s.zarr/c/0 is damaged; see https://a.org/b/c.", "rm /srv/x/y"
        )
    )
    assert told.words["refused"]["message"] == "0 is damaged; see https://a.org/b/c."
    assert told.words["refused"]["hint"] == "rm y"


def told(old, new):
    """A good message whose words say something else."""
    return PackedMessage(GOOD.words.replace(old, new), GOOD.arrays)


def sent(**changed):
    """A good message whose array is another one."""
    return PackedMessage(GOOD.words, {"0": dataclasses.replace(RAW, **changed)})


def at_rows(*rows):
    """A good message which says at which rows its array belongs."""
    return PackedMessage(
        GOOD.words,
        {"0": RAW, "0/rows": RawTensor("int32", (len(rows),), np.array(rows, "<i4").tobytes())},
    )


MALFORMED = {
    "deep": PackedMessage("[" * 100_000, GOOD.arrays),
    "no array": PackedMessage(GOOD.words, {}),
    "another shape": told("[2, 3]", "[3, 2]"),
    "a huge shape": told("[2, 3]", "[1000000000000, 3]"),
    "cut": sent(data=RAW.data[:-1]),
    "objects": sent(dtype="object"),
    "a huge array": sent(shape=(10**9, 10**9)),
    "a row too far": at_rows(0, 2),
    "rows out of order": at_rows(1, 0),
}


@pytest.mark.parametrize("secure", [False, True])
def test_a_server_ends_with_whoever_waits_for_it_and_keeps_names_where_sites_have_keys(
    secure, tmp_path, monkeypatch
):
    begun = []
    told = {}

    def wait(process, *_rest):
        begun.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "program", lambda _name: "sleep")
    monkeypatch.setattr(
        processes,
        "start",
        lambda name, _command, folder, extra: (
            told.update(extra) or start(name, ["sleep", "60"], folder, extra)
        ),
    )
    monkeypatch.setattr(processes, "wait_for_port", wait)
    keys = Keys(tmp_path / "keys") if secure else None
    with pytest.raises(KeyboardInterrupt):
        processes.start_superlink(Address("127.0.0.1", free_port()), keys, tmp_path / "server")
    assert not begun[0].alive
    assert told[VARIABLE] == (f"{tmp_path}/server/names.json" if secure else "")
