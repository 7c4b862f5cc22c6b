"""No malformed upload of any method reaches ``aggregate``, and what a run does about one is its choice."""

import math
from dataclasses import replace
from functools import cache, partial
from random import Random

import pytest
import torch
from federation import (
    difference,
    federation,
    fitted,
    go,
    go_all,
    run,
    scaled,
    server_gap,
    small,
    tiny,
    wide,
)
from float64 import doubles
from methods_tried import tried
from pairs import fitting
from refusal import refused, training_error
from setting_lines import set_to
from text_tables import rows_of

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.method import UploadTensor, sends_nothing
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.pipeline import parse_policy
from fedcache.federate.trust.update_validation import UpdateValidation, counts_rows, largest

SENDING = [n for n, m in METHODS.items() if not m.central and m.uploads is not sends_nothing]


def sending(method, change):
    """The method whose clients send ``change(up, down, data, ctx)`` in the place of an upload."""

    def fit(down, state, data, ctx):
        state, up = method.fit(down, state, data, ctx)
        return state, change(up, down, data, ctx)

    return replace(method, fit=fit)


@cache
def upload(name):
    """What the first client of a run really sends, and what it holds."""
    found = []

    def spy(up, _down, data, _ctx):
        found.append((up, float(data.n[0])))
        return up

    how = {"rounds": 1, "participation": 3, "execution": "sequential", "dtype": torch.float32}
    go(sending(METHODS[name], spy), scaled(small(name)), *tiny(), **how)
    return found[0]


def declared(up):
    """The declaration of an upload that is known to be sound."""
    return {n: replace(UploadTensor.like(t), counts_rows=counts_rows(n)) for n, t in up.items()}


def first_float(up):
    return next(n for n, t in sorted(up.items()) if t.is_floating_point() and not counts_rows(n))


NUMBERS = {
    "nan": lambda _dtype: math.nan,
    "inf": lambda _dtype: math.inf,
    "huge": lambda dtype: torch.finfo(dtype).max,
}
TENSORS = {
    "shape": lambda t: t.flatten()[:-1],
    "dtype": lambda t: t.double() if t.dtype != torch.float64 else t.float(),
    "integers": torch.Tensor.long,
    "no tensor": torch.Tensor.tolist,
}
KINDS = (*NUMBERS, *TENSORS, "extra", "missing", "nothing")


def spoilt(kind, up):
    """A copy of an upload with one thing wrong."""
    if kind == "nothing":
        return None
    up = {k: t.clone() for k, t in up.items()}
    name = first_float(up)
    t = up[name]
    if kind in NUMBERS:
        t.view(-1)[-1] = NUMBERS[kind](t.dtype)
    elif kind in TENSORS:
        up[name] = TENSORS[kind](t)
    elif kind == "extra":
        up["bonus"] = torch.zeros(1)
    else:
        del up[name]
    return up


@pytest.mark.parametrize("name", tried(SENDING))
def test_every_methods_own_uploads_pass_and_malformed_ones_do_not(name):
    up, rows = upload(name)
    validation = UpdateValidation(declared(up), 3)
    assert validation.problem(up, rows) is None
    assert validation.problem(up, rows, sent_in=3) is None
    assert "round 2" in validation.problem(up, rows, sent_in=2)
    for kind in KINDS:
        if kind != "huge" or name != "fedpft":
            assert validation.problem(spoilt(kind, up), rows), kind
    for count in (n for n in up if counts_rows(n)):
        for value, word in (
            (-1.0, "negative"),
            (1e18, "the client has"),
            (0.5, "not a whole number"),
            (math.nan, "not finite"),
            (math.inf, "not finite"),
        ):
            if not up[count].is_floating_point() and value != round(
                value if math.isfinite(value) else 0.5
            ):
                continue
            lied = {k: t.clone() for k, t in up.items()}
            lied[count].view(-1)[0] = value
            assert word in validation.problem(lied, rows)
        none = {k: torch.zeros_like(t) if k == count else t for k, t in up.items()}
        assert validation.problem(none, rows) is None  # a client may own no class


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_could_make_a_sum_overflow_is_refused_and_one_below_is_sound(dtype):
    for part, sound in ((1.01, False), (0.99, True)):
        huge = {"W": torch.full((2, 2), part * largest(dtype), dtype=dtype), "b": torch.zeros(1)}
        validation = UpdateValidation(declared(huge), 1)
        assert (validation.problem(huge, 1.0) is None) == sound
        # the sum of the squares is infinite, so it is looked at twice
        assert not validation.is_sound(huge, 1.0)
        assert sound or "can be summed without overflow" in validation.problem(huge, 1.0)


def test_an_update_above_the_bound_is_malformed_and_one_below_is_not():
    method = METHODS["fedavg"]
    settings = "opt=sgd lr=0.1"
    norms = []

    def spy(up, down, _data, _ctx):
        norms.append(math.sqrt(sum(float(((up[k] - down[k]) ** 2).sum()) for k in up)))
        return up

    how = {"rounds": 1, "execution": "sequential"}
    go_all(sending(method, spy), settings, **how)
    for bound in sorted(norms)[1:-1:2]:
        trust = parse_policy(on_bad_update="reject", max_update_norm=bound * (1 + 1e-9))
        out = go_all(method, settings, trust=trust, **how)
        assert (
            out.records[0].diagnostics["rejected"] == sum(n > bound * (1 + 1e-9) for n in norms) > 0
        )


def in_lane(up, name, ctx, victim):
    """A copy of a tensor of an upload, and the view of it that is one client's: all of it where there is no batch."""
    t = up[name].expand(*ctx.lead, *up[name].shape[len(ctx.lead) :]).clone()
    return t, t.select(len(ctx.lead) - 1, ctx.ids.index(victim)) if ctx.lead else t


def without_rows(clients, victim):
    """The clients; one has no training rows."""
    return [replace(c, train=c.train[:0]) if i == victim else c for i, c in enumerate(clients)]


def liar(method, kind, victim, when=None):
    """The method with one client whose upload is malformed; in a batch a number is spoilt in its lane alone."""

    def fit(down, state, data, ctx):
        state, up = method.fit(down, state, data, ctx)
        if victim not in ctx.ids or (when is not None and ctx.round != when):
            return state, up
        if kind not in NUMBERS or not ctx.lead:
            return state, spoilt(kind, up)
        name = first_float(up)
        t, own = in_lane(up, name, ctx, victim)
        own[:] = NUMBERS[kind](t.dtype)
        return state, {**up, name: t}  # ``spoilt`` may send nothing at all

    return replace(method, fit=fit)


SERVED = [(n, Random(n).choice(METHODS[n].executions)) for n in SENDING]
"""Every method once, with one of its executions, which no other method changes."""


@pytest.mark.parametrize(("name", "execution"), tried(SERVED))
def test_by_default_every_execution_refuses_malformed_uploads_and_names_client_and_round(
    name, execution
):
    data, clients = wide() if execution == "gram" else tiny()
    _, settings = fitting((name, small(name)), execution)
    alone = ("no tensor", "nothing") if execution == "sequential" else ()
    for kind in ("missing", "extra", "shape", "dtype", "nan", "huge", *alone):
        if kind == "huge" and name == "fedpft":
            continue  # its numbers are float16, which float64 adds any number of
        # A batch comes from one call, so its names and shapes are those of all its clients: here it is of one.
        chunk = {} if execution == "sequential" or kind in ("nan", "huge") else {"chunk": 1}
        lying = partial(go_all, liar(METHODS[name], kind, 1), scaled(settings))
        training_error(
            partial(lying, data, clients, rounds=1, execution=execution, **chunk),
            f"client 1 ({clients[1].name!r})",
            "ound 1",
        )


@pytest.mark.parametrize("execution", ["sequential", "batched", "gram"])
def test_who_counts_more_rows_than_it_holds_is_named_also_among_others(execution):
    def lie(up, _down, _data, ctx):
        if 3 in ctx.ids:
            t, own = in_lane(up, "count", ctx, 3)
            own[..., 0] = 1e6
            up = {**up, "count": t}
        return up

    lying = sending(METHODS["fedproto"], lie)
    training_error(
        lambda: go_all(lying, "opt=sgd lr=0.01", rounds=1, execution=execution),
        "client 3 ('client-3')",
    )


@pytest.mark.parametrize(
    ("sound", "rows", "counts"),
    rows_of(
        """
        sound |    7 | 3.0002 4.0
              |    9 | 2.9996 4.0
        sound | 2000 | 1000.05 1000.05
              | 2000 | 1001.0 1000.0
              |    5 | 1.0 -1.0
        """
    ),
)
def test_numbers_of_rows_are_whole_and_no_more_than_there_are_up_to_rounding(sound, rows, counts):
    # a ten-thousandth is rounding: up to 0.0003 of 3, 0.0008 of a sum of 7, and 0.3 of 2000
    up = {"count": doubles([float(n) for n in counts.split()])}
    assert (UpdateValidation(declared(up), 1).problem(up, int(rows)) is None) == bool(sound)


@pytest.mark.parametrize("name", tried(sorted(METHODS)))
def test_what_a_method_declares_is_what_it_sends_under_every_switch(name):
    # A run refuses what is not declared, so that it runs is the law.
    method = METHODS[name]
    assert method.uploads is not None
    data, clients = tiny(views=4)
    data = fitted(method, data)
    base = {k: v for k, v in scaled(small(name)).items() if k in {h.name for h in method.hparams}}
    base |= {
        k: 1 for k in ("epochs", "esd_epochs", "probe_epochs", "K", "personal_epochs") if k in base
    }
    variants = [{}]
    for h in method.hparams:
        values = h.choices if h.kind == "choice" else ("true", "false") if h.kind == "bool" else ()
        variants += [{h.name: v} for v in values if v != h.default and h.name not in CHEAP_TO_SKIP]
    if "rff_dim" in {h.name for h in method.hparams}:
        variants += [{"rff_dim": 4}, set_to("rff_dim=4 bias=true class_weight=local")]
    ran = 0
    for variant in variants:
        hp = method.resolve("paper", base | variant)
        try:
            run(method, hp, data, clients, rounds=1, participation=3, execution="sequential")
            ran += 1
        except FedcacheError as error:
            assert error.code in (Exit.USAGE, Exit.STORE), (variant, str(error))  # noqa: PT017
    assert ran > len(variants) // 2


CHEAP_TO_SKIP = {"amp", "feat_post", "train_view", "flip", "vp_template", "vp_init", "proto_infer"}
"""Switches of what is read or predicted, which cost a run with towers and change nothing that is sent.

``amp`` needs a CUDA GPU."""


def test_a_method_that_declares_nothing_is_checked_against_what_it_makes_of_noise():
    method = METHODS["fedproto"]
    undeclared = replace(method, uploads=None)
    assert difference(go_all(undeclared, rounds=2), go_all(method, rounds=2)) == 0.0
    training_error(
        lambda: go_all(liar(undeclared, "missing", 1, when=1), rounds=2, execution="sequential"),
        "proto",
    )

    refused(lambda: go_all(replace(undeclared, fit=lambda *_words: 1 / 0)), "uploads=")


@pytest.mark.parametrize("kind", ["nan", "huge", "shape", "missing"])
@pytest.mark.parametrize(
    ("name", "execution"), [("fedavg", "sequential"), ("fedproto", "batched"), ("fed3r", "batched")]
)
def test_a_run_without_the_liar_is_the_run_in_which_it_is_rejected(name, kind, execution):
    data, clients = federation()
    method = METHODS[name]
    trust = parse_policy(on_bad_update="reject")
    how = {"rounds": 2, "execution": execution, "chunk": 1, "trust": trust}
    out = go_all(liar(method, kind, 1), **how)
    assert server_gap(out, go_all(method, {}, data, without_rows(clients, 1), **how)) < 1e-12
    assert {r.diagnostics["rejected"] for r in out.records} == {1.0}
    assert f"client 1 ({clients[1].name!r})" in out.warnings[-1]


def test_all_uploads_refused_ends_the_run_and_keeps_the_model():
    data, clients = federation()
    trust = parse_policy(on_bad_update="reject", max_update_norm=1e-9)
    training_error(
        lambda: go_all(
            "fedavg", "bn=false", data, clients[:8], execution="sequential", trust=trust
        ),
        "all 8 uploads",
    )


def one_spoils(method, victim, error):
    """The method whose server step fails while one client's upload is among the others: one class sum is a million.

    What is declared of the upload does not say that it is a statistic, so nothing is wrong with it by itself.
    """

    def lie(up, _down, _data, ctx):
        if ctx.ids == (victim,):
            up = {**up, "sum": up["sum"].index_fill(0, torch.tensor([0]), 1e6)}
        return up

    def aggregate(server, up, ctx):
        if bool((up["sum"][0] > 1e4).any()):
            raise error
        return method.aggregate(server, up, ctx)

    def uploads(server, ctx):
        return {n: replace(t, statistic=None) for n, t in method.uploads(server, ctx).items()}

    return replace(sending(method, lie), aggregate=aggregate, uploads=uploads)


@pytest.mark.parametrize("error", [ValueError, torch.linalg.LinAlgError])
@pytest.mark.parametrize("on_bad", [None, "reject", "fail"])
def test_no_numerical_error_leaves_the_servers_step(error, on_bad):
    data, clients = federation()
    method = METHODS["fedncm"]
    bad = one_spoils(method, 3, error("singular"))
    # A rule that keeps uploads, or a policy that rejects; with the defaults of one process sums alone are kept.
    trust = parse_policy("trimmed:0", on_bad_update=on_bad) if on_bad else parse_policy()
    how = {"execution": "sequential", "trust": trust}
    if on_bad == "reject":
        out = go_all(bad, **how)
        assert difference(out, go_all(method, {}, data, without_rows(clients, 3), **how)) < 1e-12
        assert out.records[0].diagnostics["rejected"] == 1.0
        assert "client 3 ('client-3')" in out.warnings[-1]
        return
    caught = training_error(lambda: go_all(bad, **how), "singular")
    assert ("client 3 ('client-3')" in caught.message) == (on_bad == "fail")


def test_a_server_that_keeps_a_place_for_each_client_takes_a_round_in_which_one_is_rejected():
    _, clients = federation()
    spoilt_one = liar(METHODS["fedpcl"], "nan", 1)
    trust = parse_policy(on_bad_update="reject")
    out = go_all(spoilt_one, small("fedpcl"), rounds=1, execution="sequential", trust=trust)
    assert float(out.server["counts"][1].sum()) == 0.0
    others = [i for i in out.records[0].clients if i != 1]
    assert len(others) > 5
    assert all(float(out.server["counts"][i].sum()) == len(clients[i].train) for i in others)
