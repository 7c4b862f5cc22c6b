"""The public laws hold for what is right and fail for what is wrong: each wrong method breaks the law that names it."""

from dataclasses import replace

import pytest
import torch
from refusal import refused
from torch import nn

from fedcache import testing
from fedcache.extract.backbones import own_module
from fedcache.federate.execution.executor import Sequential
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES
from fedcache.testing import LawBroken, check_all, less_exceptions
from fedcache.testing.law import Check

FEDAVG = METHODS["fedavg"]
NCM = METHODS["fedncm"]
LINEAR = {"head": "linear", "opt": "sgd", "lr": 0.05}


def broken(checks):
    """Names of the laws that fail, without their executions."""
    names = set()
    for check in checks:
        try:
            check()
        except LawBroken:
            names.add(check.name.partition("[")[0])
    return names


def changed_upload(change):
    """FedAvg, whose upload is changed by a function (up, data, ctx) -> up."""

    def fit(down, state, data, ctx):
        kept, up = FEDAVG.fit(down, state, data, ctx)
        return kept, change(up, data, ctx)

    return replace(FEDAVG, name="wrong", fit=fit)


def drawn_elsewhere(up, _data, _ctx):
    return {**up, "W": up["W"] + torch.rand(1, dtype=up["W"].dtype)}


def row_of_a_client(up, data, _ctx):
    x, _ = data.full()
    return {**up, "W": up["W"] * 0.0 + x[..., :1, :]}


def by_rows(up, data, _ctx):
    x, _ = data.full()
    return {**up, "W": x}


def not_described(up, _data, _ctx):
    return {**up, "extra": up["W"]}


def last_counts_double(server, up, _ctx):
    weights = torch.ones(len(up["W"]), dtype=up["W"].dtype)
    weights[-1] = 2.0
    return server | {
        k: torch.einsum("m,m...->...", weights, t) / weights.sum() for k, t in up.items()
    }


def mean_of_a_client(down, state, data, ctx):
    kept, up = NCM.fit(down, state, data, ctx)
    return kept, {**up, "sum": up["sum"] / up["count"].clamp(min=1.0).unsqueeze(-1)}


def mean_of_the_store(up, data, _ctx):
    return {**up, "W": up["W"] + data.x.mean()}


def by_one_number(up, _data, ctx):
    return {k: t * (1.0 + float(ctx.hp["lr"])) for k, t in up.items()}


def centred_scores(down, state, data, x, ctx):
    return FEDAVG.predict(down, state, data, x - x.mean(-2, keepdim=True), ctx)


def negated_scores(down, state, data, x, ctx):
    return -FEDAVG.predict(down, state, data, x, ctx)


class Counter:
    """State that no checkpoint holds."""

    calls = 0


def counted(server, up, _ctx):
    Counter.calls += 1
    return server | {k: t * (1.0 + 0.01 * Counter.calls) for k, t in up.items()}


def over_all_clients(up, _data, ctx):
    return {**up, "W": up["W"] - up["W"].mean(0) * 0.1} if len(ctx.lead) else up


WRONG = {
    "every client one vote": (
        replace(FEDAVG, pool=lambda _hp: {"": "uniform"}),
        "all_rows_count_the_same",
    ),
    "an upload not described": (changed_upload(not_described), "executions_agree"),
    "draws of its own": (changed_upload(drawn_elsewhere), "the_same_seed_gives_the_same_bits"),
    "a row leaves": (changed_upload(row_of_a_client), "no_row_leaves_a_client"),
    "as many as rows": (
        replace(changed_upload(by_rows), uploads=None, aggregate=lambda server, _up, _ctx: server),
        "no_row_leaves_a_client",
    ),
    "the last client counts double": (
        replace(
            FEDAVG,
            pool=lambda _hp: {"": "stack"},
            aggregate=last_counts_double,
            executions=("sequential",),
        ),
        "the_order_of_clients_does_not_matter",
    ),
    "state that is not saved": (
        replace(FEDAVG, aggregate=counted),
        "a_resumed_run_has_the_same_bits",
    ),
    "clients mixed": (changed_upload(over_all_clients), "executions_agree"),
    "said to be additive": (replace(NCM, fit=mean_of_a_client), "additive_uploads_add_up"),
    "other rows read": (changed_upload(mean_of_the_store), "no_test_row_is_trained_on"),
    "row 0 read": (changed_upload(mean_of_the_store), "a_missing_row_is_never_read"),
    "labels not declared": (replace(FEDAVG, needs=frozenset()), "other_labels_change_nothing"),
    "one number for a grid": (changed_upload(by_one_number), "a_grid_point_is_the_run_alone"),
    "scores of a batch": (
        replace(FEDAVG, predict=centred_scores),
        "a_prediction_does_not_see_other_test_rows",
    ),
    "the sign of scores": (
        replace(FEDAVG, predict=negated_scores),
        "classes_that_lie_apart_are_learnt",
    ),
    "nothing is learnt": (
        replace(FEDAVG, aggregate=lambda server, _up, _ctx: server),
        "training_changes_what_is_kept",
    ),
    "clients mixed in chunks": (changed_upload(over_all_clients), "chunks_change_nothing"),
}


def checks_of(law, *method_and_settings):
    """The checks of one law."""
    checks = testing.method_laws(*method_and_settings)
    return [check for check in checks if check.name.startswith(f"{law}[")]


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_method_breaks_its_law(what):
    method, law = WRONG[what]
    right = METHODS[method.name.replace("wrong", "fedavg")]
    settings = LINEAR if method.gradient else None
    assert broken(checks_of(law, method, settings)) == {law}
    assert broken(checks_of(law, right)) == set()


# They declare ``uneven_rows`` and train one model by plain steps.
@pytest.mark.parametrize("name", ["feddisco", "feddyn", "fedclip", "scaffold", "fedavg-simclr"])
def test_where_rows_do_not_count_the_same_the_law_fails(name):
    method = METHODS[name]
    assert method.uneven_rows
    law = "all_rows_count_the_same"
    assert broken(checks_of(law, replace(method, uneven_rows=""))) == {law}


@pytest.mark.slow
def test_what_fails_says_method_execution_law_and_figure():
    with pytest.raises(LawBroken) as info:
        testing.check_method(WRONG["every client one vote"][0], LINEAR)
    for words in ("fedavg", "all_rows_count_the_same[sequential]", "\nFound: "):
        assert words in str(info.value)


def test_a_right_method_keeps_all_laws_that_speak_of_it():
    held = testing.check_method("fedncm")
    assert "additive_uploads_add_up[sequential]" in held
    assert len(held) == len(testing.method_laws(NCM)) == len(set(held))


@pytest.mark.slow
def test_laws_are_left_out_by_name_with_a_reason():
    wrong = WRONG["every client one vote"][0]
    reason = {"all_rows_count_the_same": "every site has one vote"}
    assert testing.check_method(wrong, LINEAR, exceptions=reason)
    refused(lambda: testing.method_laws(wrong, exceptions={"all_rows_count_the_sam": "a typo"}))
    with pytest.raises(ValueError, match="left out without a reason"):
        testing.method_laws(wrong, exceptions={"all_rows_count_the_same": " "})


def test_all_that_fails_is_said_at_once():
    def fails():
        raise LawBroken("it does not")

    laws = {"one": fails, "two": lambda: None, "three": fails}
    checks = [Check("It", name, f"{name}.", law) for name, law in laws.items()]
    with pytest.raises(LawBroken) as info:
        check_all(checks)
    assert str(info.value).split("\n\n") == [
        f"It breaks the law {name}: {name}.\nFound: it does not." for name in ("one", "three")
    ]
    assert check_all(
        less_exceptions(checks, {"one": "a", "three": "b"}, ["one", "two", "three"])
    ) == ["two"]


def test_a_method_can_be_run_on_a_federation_of_ones_own():
    data, clients = testing.make_federation(sizes=(3, 9), classes=4, width=7)
    out = testing.run_method("fedavg", {"head": "linear", "batch": 2}, (data, clients), rounds=1)
    assert out.server["W"].shape == (4, 7)


DRAW_NOTHING = {"other_seeds_deal_other_rows": "it draws nothing"}
SCHEMES_TRIED = {
    "feature-shift": ({}, DRAW_NOTHING),
    "natural": ({"by": "site"}, DRAW_NOTHING),
    "few-shot": ({"shots": 2, "clients": 4}, {}),
    "label-shift": ({"clients": 4}, {}),
    "feature-label-shift": ({}, {}),
    "given": None,
}


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_keeps_the_laws_of_partitions(name):
    found = SCHEMES_TRIED.get(name, ({"clients": 4}, {}))
    if found is None:
        pytest.skip("its rows are given, not dealt")
    args, exceptions = found
    assert len(testing.check_partition(name, exceptions=exceptions, **args)) == len(
        testing.PARTITION_LAWS
    ) - len(exceptions)


def dealt_wrongly(change):
    """The scheme iid, whose clients' rows are changed by a function (lists, pool) -> lists."""
    own = SCHEMES["iid"]

    def deal(pool, args, streams):
        dealt = own.deal(pool, args, streams)
        return replace(dealt, train=change([rows.copy() for rows in dealt.train], pool))

    return replace(own, name="wrong", deal=deal, arguments=own.arguments[:-1])


def twice(rows, _pool):
    return [rows[0], *rows]


def with_test_rows(rows, pool):
    return [*rows[1:], pool.test]


def unseeded(rows, _pool):
    return [rows[i] for i in torch.randperm(len(rows)).tolist()]


def always_the_same(rows, pool):
    return [pool.train[i :: len(rows)] for i in range(len(rows))]


WRONG_SCHEMES = {
    "no_row_is_trained_on_twice": twice,
    "no_test_row_is_trained_on": with_test_rows,
    "equal_arguments_give_equal_partitions": unseeded,
    "other_seeds_deal_other_rows": always_the_same,
}


@pytest.mark.parametrize("law", WRONG_SCHEMES)
def test_a_wrong_scheme_breaks_its_law(law):
    assert law in broken(testing.partition_laws(dealt_wrongly(WRONG_SCHEMES[law]), clients=8))


class Wrong(nn.Module):
    size = 8
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __init__(self, change):
        super().__init__()
        self.change, self.scale = change, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.change(x.flatten(1)[:, ::16] * self.scale)


def right(x):
    return x


def of_the_batch(x):
    return x - x.mean(0)


def dropped(x):
    return nn.functional.dropout(x, 0.5, training=True)


def constant(x):
    return x * 0.0 + 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "laws"), [(right, set()), (constant, {"items_are_distinguished"})]
)
def test_a_wrong_backbone_breaks_its_law(change, laws, tmp_path):
    name = own_module.backbone(Wrong(change), f"law-{change.__name__}")
    assert broken(testing.backbone_laws(name, home=tmp_path)) == laws


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_the_batch, "depend on the other items of its batch"),
        (dropped, "different features if"),
    ],
)
def test_what_depends_on_chance_or_on_the_batch_is_no_backbone(change, said):
    refused(lambda: own_module.backbone(Wrong(change), "law-wrong"), said)


ENCODERS = """
import torch
from torch import nn


class Text(nn.Module):
    reads = "texts"

    def forward(self, texts):
        rows = [torch.tensor([float(ord(c)) for c in text]) for text in texts]
        return torch.stack([torch.stack([r.mean(), r.std(), torch.tensor(float(len(r)))]) for r in rows])


class Padded(Text):
    def forward(self, texts):
        longest = max(map(len, texts))
        return super().forward([text.ljust(longest) if len(texts) > 2 else text for text in texts])


class Loudness(nn.Module):
    reads = "rows"
    example = torch.zeros(8, dtype=torch.int16)

    def forward(self, rows):
        return torch.stack([rows.float().mean(1), rows.float().abs().amax(1)], 1)


class Written(Loudness):
    example = torch.zeros(8)

    def forward(self, rows):
        return super().forward(rows.sub_(1.0) if len(rows) > 2 else rows)


text, padded, loudness, written = Text, Padded, Loudness, Written
"""


@pytest.mark.parametrize(
    ("name", "laws"),
    [
        ("text", set()),
        ("padded", {"an_item_does_not_see_its_batch"}),
        ("loudness", set()),
        ("written", {"the_items_are_left_as_they_are", "the_same_items_give_the_same_bits"}),
    ],
)
def test_backbones_of_texts_and_of_rows_are_held_to_them_too(name, laws, tmp_path, monkeypatch):
    (tmp_path / "law_encoders.py").write_text(ENCODERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert broken(testing.backbone_laws(f"module:law_encoders:{name}", home=tmp_path)) == laws


@pytest.mark.slow
def test_a_shipped_backbone_keeps_the_laws(tmp_path):
    assert len(testing.check_backbone("glyph-clip", home=tmp_path)) == len(testing.BACKBONE_LAWS)


@pytest.mark.parametrize(
    "rule", ["mean", "median", "trimmed:0.2", "geomedian", "krum", "multikrum", "nnm+median"]
)
def test_the_rules_keep_the_laws_of_aggregators(rule):
    assert len(testing.check_aggregator(rule)) == len(testing.AGGREGATOR_LAWS)


def first(V):
    return V[0]


def noisy(V):
    return V.mean(0) + torch.rand(1, dtype=V.dtype)


def shrunk(V):
    return V.mean(0) * 0.9


@pytest.mark.parametrize(
    ("rule", "laws"),
    [
        (first, {"clients_have_no_order"}),
        (noisy, set(testing.AGGREGATOR_LAWS) - {"uploads_are_left_as_they_are"}),
        (shrunk, {"agreement_is_returned", "a_shift_moves_the_result"}),
        ("clip:1+mean", {"a_shift_moves_the_result"}),
    ],
)
def test_a_wrong_rule_breaks_its_laws(rule, laws):
    assert broken(testing.aggregator_laws(rule)) == laws


class Right(Sequential):
    name = "right"


class LastLeftOut(Sequential):
    """Forgets the last client of every round."""

    name = "last-left-out"

    def one_round(self, ids, downs):
        return super().one_round(list(ids)[:-1], downs)


class FadesOthers(Sequential):
    """Halves what the clients keep that were not sampled."""

    name = "fades-others"

    def one_round(self, ids, downs):
        found = super().one_round(ids, downs)
        for point in self.batch.points:
            for client in set(point.states) - set(ids):
                point.states[client] = {
                    k: t / 2 if t.is_floating_point() else t
                    for k, t in point.states[client].items()
                }
        return found


@pytest.mark.slow
def test_an_executor_keeps_the_laws_of_methods_or_breaks_them():
    assert "executions_agree[fedncm]" in testing.check_executor(Right, ["fedncm"])
    assert "executions_agree" in broken(testing.executor_laws(LastLeftOut, ["fedncm"]))
    assert "who_is_not_sampled_sends_nothing_and_keeps_its_state" in broken(
        testing.executor_laws(FadesOthers, ["fedrep"])
    )
