"""What sites say of themselves: what cannot be costs a site its place and nobody else, what can be is bounded."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from draws import examples, one_of_each
from fake_grid import FakeGrid, grid_of, planned, silent, to_every, together
from hypothesis import given
from hypothesis import strategies as st
from json_values import json_values
from refusal import store_error, training_error
from setting_lines import set_to
from small_sites import Heard, left_out, mean_accuracy, missed_by, sharded

from fedcache.errors import Exit
from fedcache.federate.engines.flower.messages import (
    MalformedError,
    PackedMessage,
    RawTensor,
    SiteMessage,
    pack,
    refusal_of,
    unpack,
)
from fedcache.federate.engines.flower.server import ServerJob, checked_counts
from fedcache.federate.engines.flower.sites import (
    Member,
    RowLimits,
    SiteFacts,
    Sites,
    Terms,
    difference,
)
from fedcache.store.files import digest_of, sha256_hex
from fedcache.store.store import Store

C = 4
D = 8
SITES = 6
LIAR = "client-3"

GOOD = SiteFacts(
    name="north",
    number=None,
    train=30,
    test=10,
    owned=2,
    tests="ab",
    classes=("a", "b", "c", "d"),
    domains=("x",),
    keys=("mine-1",),
    backbones=("mine",),
    recipes=(digest_of({"backbone": "mine"}),),
    made_from=('{"backbone":"mine"}',),
    widths=(8,),
    views=1,
    text="",
    templates=(),
    feat_post="none",
    dataset="cd",
    parent="",
    slug="s",
    rows=50,
    ok=45,
    code="ef",
    version="1",
)


def shards(place):
    """Six shards of one store, of about 30 training rows each."""
    return sharded(place, SITES, rows=300, classes=C, width=D)


def federated(grid, place, heard=None, **words):
    settings = set_to("head=linear lr=0.1 opt=sgd epochs=2")
    asked = {"method": "fedavg", "rounds": 3, "set": settings, "sites": SITES, **words}
    (run,) = together(planned(**asked), grid, place, heard)
    return run


def node_of(grid, name):
    """The node of the shard of a client."""
    return next(
        n
        for n, site in grid.sites.items()
        if Store.open(site.path).dataset["shard"]["client"] == name
    )


def two_sites(sites, state):
    """A federation of client-0 and the site that may lie, and the node of the latter."""
    grid = grid_of(sites, state)
    liar = node_of(grid, LIAR)
    grid.sites = {node: grid.sites[node] for node in (node_of(grid, "client-0"), liar)}
    return grid, liar


def claiming(sites, state, claim, factor=1.0):
    """Six sites; one says other facts, and multiplies its uploads by a factor."""
    grid = grid_of(sites, state)

    def meddle(kind, _number, packed):
        message = unpack(packed)
        words = json.loads(json.dumps(message.words))
        if kind == "facts":
            words["facts"] |= claim
        by = factor if kind == "fit" else 1.0
        return pack(
            SiteMessage(words, [{k: t * by for k, t in tree.items()} for tree in message.trees])
        )

    grid.meddle[node_of(grid, LIAR)] = meddle
    return grid


def without_liar(sites, tmp_path, **words):
    grid = grid_of(sites, tmp_path / "fewer-state")
    del grid.sites[node_of(grid, LIAR)]
    return mean_accuracy(federated(grid, tmp_path / "fewer", sites=SITES - 1, **words))


def rows(claim):
    """A claim of so many training rows, with a store that is large enough for it."""
    return {"train": claim, "rows": claim, "ok": claim, "test": 0, "owned": 1}


WRONG = [
    {"train": 10**18},
    {"train": -1},
    {"train": math.nan},
    {"views": True},
    {"train": "9"},
    {"views": 0},
    {"widths": [2**40]},
    {"widths": list(range(1, 200))},
    {"classes": "abcd"},
    {"classes": ["a"] * 100_001},
    {"name": "a/b"},
    {"name": "north\u202e"},
    {"owned": 5},
    {"train": 45, "test": 1},
    {"ok": 51},
    {"keys": []},
    {"templates": ["x" * 10_001]},
    {"made_from": []},
]


ANY = json_values()
facts = st.fixed_dictionaries({}, optional={f.name: ANY for f in dataclasses.fields(SiteFacts)})


@pytest.mark.slow
@examples(200, 2000)
@given(words=ANY | facts, outline=ANY, number=ANY)
def test_what_a_node_says_is_facts_a_round_or_a_refusal(words, outline, number):
    for said in (words, GOOD.to_words() | words if isinstance(words, dict) else words):
        try:
            made = SiteFacts.from_words(said)
        except ValueError:
            continue
        assert 0 <= made.train + made.test <= made.ok <= made.rows <= 2**53
        assert RowLimits.of([Member(1, made)], None).problem(made) is None or made.rows > 10_000_000
    job = ServerJob("a1", None, 1, None, lambda *_: None)
    for said in (words, {"id": "a1", "round": number, "outline": outline}):
        try:
            assert type(job.answered(0, said)) is int
        except ValueError:
            continue
    assert isinstance(job.outline, dict)


raw = st.builds(
    RawTensor,
    st.sampled_from(["float32", "int64", "bool", "object", ""]),
    st.lists(st.integers(-2, 3) | st.sampled_from([2**31, 2**63, 2**70]), max_size=3).map(tuple),
    st.binary(max_size=24),
)
entry = st.fixed_dictionaries({"at": st.sampled_from(["0", "1", "x"]) | ANY, "shape": ANY})
shaped = st.fixed_dictionaries(
    {
        "at": st.sampled_from(["0", "1"]),
        "shape": st.lists(st.integers(0, 3) | st.sampled_from([2**63, 2**70]), max_size=3),
    }
)
trees = ANY | st.lists(st.dictionaries(st.text(max_size=3), entry | shaped, max_size=2), max_size=2)


@pytest.mark.slow
@examples(200, 5000)
@given(words=ANY, trees=trees, zero=raw, zero_rows=raw, one=raw)
def test_what_a_node_sends_is_a_message_or_malformed(words, trees, zero, zero_rows, one):
    told = json.dumps({**(words if isinstance(words, dict) else {"jobs": words}), "trees": trees})
    try:
        message = unpack(PackedMessage(told, {"0": zero, "0/rows": zero_rows, "1": one}))
    except MalformedError:
        return
    refusal_of(message)
    assert isinstance(checked_counts(message, 0, GOOD), str)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ("abcde", ["only south has e"]),
        ("abc", ["only north has d"]),
        ("abcx", ["only south has x", "only north has d"]),
        ("abdc", ["from class 2 on"]),
        ("abcdd", ["from class 4 on"]),
    ],
)
def test_a_difference_of_classes_names_the_classes(classes, words):
    """Long lists that begin alike must not read alike."""
    south = dataclasses.replace(GOOD, name="south", classes=tuple(classes))
    found, hint = difference(south, GOOD)
    for word in words:
        assert word in found
    assert "empty folder" in hint


def test_what_a_site_holds_is_what_most_of_them_say():
    job = ServerJob("a1", None, 1, None, lambda *_: None)
    for client, width in enumerate((3, 3, 2**40)):
        job.answered(
            client, {"id": "a1", "round": 1, "outline": {"W": [2, width], "rows/q": [client, 2]}}
        )
    assert {k: tuple(t.shape) for k, t in job.outline.items()} == {"W": (2, 3)}


def test_a_refusal_has_the_exit_code_of_what_a_site_may_lack():
    for code, known in ((0, 7), (4, 4), ("4", 7), (True, 7)):
        error = refusal_of(SiteMessage({"refused": {"code": code, "message": "m", "hint": "h"}}))
        assert error is not None
        assert error.code is Exit(known)


def test_a_claim_that_is_not_believed_costs_that_site_its_place_and_no_other(sites, tmp_path):
    run = federated(claiming(sites, tmp_path / "state", rows(10**9), -5.0), tmp_path, Heard())
    assert mean_accuracy(run) == without_liar(sites, tmp_path)
    assert left_out(run) == [LIAR]
    training_error(
        lambda: federated(grid_of(sites, tmp_path / "few"), tmp_path, max_rows_per_client=3),
        "max-rows-per-client",
    )


@pytest.mark.slow
def test_test_rows_that_are_claimed_do_not_decide_the_accuracy(sites, tmp_path):
    """A million rows, all of them right: the site is refused, and what sites score themselves is marked."""
    grid = claiming(
        sites, tmp_path / "state", {"test": 10**6, "rows": 10**6 + 99, "ok": 10**6 + 99}
    )
    run = federated(grid, tmp_path)
    assert mean_accuracy(run) == without_liar(sites, tmp_path) < 1.0
    assert "test rows, but at most" in missed_by(run)[0]["why"]
    assert "accuracy" in run.result["federation"]["claimed"]


def test_a_name_is_that_of_the_first_node_and_another_is_refused(sites, tmp_path):
    for late in ({}, {900: 3}):
        place = tmp_path / str(len(late))
        heard = Heard()
        grid = grid_of(sites, place / "state")
        grid.sites[900], grid.hidden = grid.sites[node_of(grid, LIAR)], late
        grid.meddle[900] = lambda kind, _n, packed: (
            packed if kind == "facts" else "it must not be asked"
        )
        run = federated(grid, place, heard)
        assert heard.said(f"site {LIAR!r} is rejected")
        assert mean_accuracy(run) == mean_accuracy(
            federated(grid_of(sites, place / "s"), place / "r")
        )
        assert not any(900 in nodes for kind, nodes in grid.log if kind != "facts")


def test_class_text_comes_from_a_site_that_sends_what_it_said():
    text = torch.arange(6.0).reshape(3, 2)
    digest = sha256_hex(text.numpy().tobytes())
    answers = {
        1: "gone",
        2: SiteMessage({}, [{"text": text + 1}]),
        3: SiteMessage({}, [{"text": text.long()}]),
        4: SiteMessage({}, []),
        5: SiteMessage({}, [{"text": text}]),
    }

    def ask(_kind, messages, _timeout):
        return {node: answers[node] for node in messages}

    heard = Heard()
    found = Sites(SimpleNamespace(bytes_up=0, bytes_down=0, ask=ask), Terms(5, 5), heard)
    found.members = [Member(node, GOOD) for node in answers]
    assert torch.equal(found.text(digest, 3), text)
    assert len(heard.lines) == 4
    found.members.pop()
    training_error(lambda: found.text(digest, 3))


RULES = ("median", "trimmed:0.2", "geomedian", "krum", "nnm+median", "clip:1.0")
MATRIX = [
    (rule, claim, factor)
    for rule in RULES
    for claim, factor in ((10**9, -5.0), (10**9, 1.0), (10, -5.0))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "claim", "factor"),
    [*one_of_each(MATRIX), ("median", 2**63, -5.0), ("median", math.nan, -5.0)],
)
def test_no_claim_of_one_of_six_sites_moves_a_rule_by_more_than_three_points(
    rule, claim, factor, sites, tmp_path
):
    """The operator has allowed any claim below 2^53, so that it is the rule that protects."""
    words = {"aggregate": rule, "byzantine": 0.17, "max_rows_per_client": 10**10, "rounds": 8}
    run = federated(claiming(sites, tmp_path / "state", rows(claim), factor), tmp_path, **words)
    assert mean_accuracy(run) > without_liar(sites, tmp_path, **words) - 0.03
    liar = {LIAR, f"node {node_of(grid_of(sites, tmp_path), LIAR)}"}
    assert set(left_out(run)) <= liar


@pytest.mark.slow
@pytest.mark.parametrize(
    "claim",
    one_of_each([{"classes": ["z", "y", "x", "w"]}, {"views": 2}], bool),
    ids=lambda c: next(iter(c)),
)
def test_a_site_that_differs_from_most_costs_nobody_else_the_start(claim, sites, tmp_path):
    run = federated(claiming(sites, tmp_path / "state", claim), tmp_path)
    assert mean_accuracy(run) == without_liar(sites, tmp_path)
    assert left_out(run) == [LIAR]


@pytest.mark.slow
def test_of_two_sites_that_differ_nobody_knows_which_is_right_unless_it_is_said(sites, tmp_path):
    def pair(state):
        grid = claiming(sites, state, {"views": 2})
        grid.sites = {node: grid.sites[node] for node in (node_of(grid, "client-0"), *grid.meddle)}
        return grid

    store_error(
        lambda: federated(pair(tmp_path / "state"), tmp_path, sites=2), "views", "--like NAME"
    )
    run = federated(pair(tmp_path / "told"), tmp_path, sites=2, like="client-0")
    assert run.result["clients"] == ["client-0"]


@pytest.mark.slow
def test_a_site_that_is_silent_once_is_asked_again_and_joins_when_it_answers(sites, tmp_path):
    """It loses the first answer, one at the start, and is no reason for the others to wait."""

    def silent_until(until):
        grid = grid_of(sites, tmp_path / f"state-{until}")
        grid.meddle[node_of(grid, LIAR)] = to_every("facts", silent, last=until)
        return grid

    once_lost = silent_until(1)
    joined = federated(once_lost, tmp_path / "1", sites=SITES - 1, rounds=4)
    assert LIAR in joined.result["clients"]
    assert missed_by(joined) == []
    never = silent_until(math.inf)
    run = federated(never, tmp_path / "n", rounds=6)
    assert mean_accuracy(run) == without_liar(sites, tmp_path, rounds=6)
    for grid, asked in ((once_lost, 2), (never, 3)):
        assert (
            sum(node_of(grid, LIAR) in nodes for kind, nodes in grid.log if kind == "facts")
            == asked
        )


@pytest.mark.parametrize("lost", [1, 2])
def test_a_run_does_not_begin_without_a_slow_site_that_still_gets_requests(lost, sites, tmp_path):
    grid, slow = two_sites(sites, tmp_path / "state")
    grid.meddle[slow] = to_every("facts", silent, last=lost)
    run = federated(grid, tmp_path, sites=2, rounds=1)
    assert run.result["clients"] == ["client-0", LIAR]
    assert run.result["federation"]["joined"] == left_out(run) == []


@pytest.mark.parametrize(
    "answer",
    [
        silent(None),
        pack(SiteMessage({"refused": {"code": 4, "message": "It has no rows.", "hint": ""}})),
    ],
    ids=["silent", "refuses"],
)
def test_a_result_names_every_node_that_the_run_began_without(answer, sites, tmp_path):
    grid, lost = two_sites(sites, tmp_path / "state")
    grid.meddle[lost] = lambda _kind, _number, _packed: answer
    run = federated(grid, tmp_path, sites=2, rounds=1)
    assert run.result["clients"] == ["client-0"]
    assert left_out(run) == [f"node {lost}"]


@pytest.mark.slow
def test_what_a_site_has_is_not_waited_for_longer_than_the_sites_are(sites, tmp_path):
    given = []

    class Patient(FakeGrid):
        def ask(self, kind, messages, timeout):
            if kind == "facts":
                given.append(timeout)
            return super().ask(kind, messages, timeout)

    for wait, at_most in (
        (0.01, 60.0),
        (90.0, 90.0),
    ):  # a minute, in which an app starts, or as long as sites may take
        where = tmp_path / str(wait)
        federated(Patient(grid_of(sites, where / "state").sites), where, wait=wait, timeout=600.0)
        assert at_most - 5 < given.pop() <= at_most


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: str(w)[:40])
def test_a_fact_outside_its_limits_is_refused_and_named(wrong):
    words = GOOD.to_words()
    assert SiteFacts.from_words(json.loads(json.dumps(words))) == GOOD
    with pytest.raises(ValueError, match=r"it |expected|are wrong|are impossible") as caught:
        SiteFacts.from_words(words | wrong)
    assert len(str(caught.value)) < 200
