"""The public laws over the table of methods, and what every method of the table declares.

The laws themselves are in ``fedcache.testing.method_laws``. Here each is tried on every method, with the optimisers it
has, and in the full draw on its variants too; they run on the tiny federation, where one takes milliseconds.
"""

from dataclasses import replace

import pytest
import torch
from draws import FULL, one_of_each
from federation import (
    VARIANTS,
    cases,
    fitted,
    go_tiny,
    ids,
    run,
    scaled,
    small,
    tiny,
    trial_of_case,
)
from methods_tried import tried
from pairs import fitting, parametrize, served

from fedcache.federate.methods import METHODS
from fedcache.testing.method_laws import METHOD_LAWS


def pytest_generate_tests(metafunc):
    parametrize(metafunc)


ALL = cases() + VARIANTS
KEPT_OPTIMISER = [
    case for case in VARIANTS if case[0] == "solo" and case[1].get("reset_opt") is False
]
"""In the short draw too: the one case whose clients keep the state of their optimiser from round to round."""
ONE_EACH = tried(one_of_each(cases()))
"""For laws that no optimiser can break: one case of every method, all of them in the full draw."""
EVERY_METHOD = one_of_each(
    cases(), lambda case: (case[0], case[0] in ("fedavg", "solo") and case[1]["opt"])
)
"""For laws that an optimiser can break, which is one piece of code for all methods: every optimiser of two methods."""
EACH_AND_OPTIMISERS = tried(EVERY_METHOD)
METHOD = pytest.mark.parametrize("name", tried(METHODS))

DRAWN = ALL if FULL else EACH_AND_OPTIMISERS
"""For laws of what every method has in common: the variants of a method are tried in the full draw."""

SETS_OF_CLIENTS = [case for case in EVERY_METHOD if case[0] == "fedpcl"]
"""In the short draw too: the clients of a point read the same sets of prototypes, and those of points differ."""

LABEL_FREE = {
    "clip-zs",
    "fst-cbdg",
    "flesd",
    "flesd-head",
    "flesd-cc",
    "fedavg-simclr",
    "fedprox-simclr",
    "min-local",
    "non-fl",
}
"""The papers' unsupervised methods, named here so that none of them leaves the law by declaring labels."""

LARGER_STEPS = {
    "perfedavg": {"alpha": 0.5, "beta": 0.5},
    "pfedme": {"eta": 0.5, "lambda": 2.0},
    "fedadagrad": {"lr_g": 0.1},
}
"""Steps of the methods that set theirs by other names than ``opt`` and ``lr``, with which ten rounds are enough."""
PLAIN = [(name, {}) for name in tried(METHODS)]


TRIED = {
    "executions_agree": ALL if FULL else [*EVERY_METHOD, *tried(VARIANTS)],
    "a_grid_point_is_the_run_alone": DRAWN + SETS_OF_CLIENTS,
    "chunks_change_nothing": DRAWN,
    "the_same_seed_gives_the_same_bits": EACH_AND_OPTIMISERS,
    "the_callers_torch_state_changes_nothing": ONE_EACH,
    "a_resumed_run_has_the_same_bits": DRAWN + KEPT_OPTIMISER,
    "executions_may_change_between_rounds": [*EACH_AND_OPTIMISERS, *KEPT_OPTIMISER],
    "the_order_of_clients_does_not_matter": ONE_EACH,
    "who_is_not_sampled_sends_nothing_and_keeps_its_state": ONE_EACH,
    "no_test_row_is_trained_on": ONE_EACH,
    "other_labels_change_nothing": PLAIN,
    "a_missing_row_is_never_read": PLAIN,
    "no_row_leaves_a_client": PLAIN,
    "traffic_adds_up": PLAIN,
    "additive_uploads_add_up": tried(ALL),
    "a_prediction_does_not_see_other_test_rows": DRAWN,
    "training_changes_what_is_kept": PLAIN,
    "classes_that_lie_apart_are_learnt": [
        (name, LARGER_STEPS.get(name, {})) for name in tried(METHODS)
    ],
    "all_rows_count_the_same": PLAIN,
}
"""Law -> the cases it is tried on."""


IN_TURN = {
    "the_callers_torch_state_changes_nothing",
    "the_order_of_clients_does_not_matter",
    "traffic_adds_up",
    "no_test_row_is_trained_on",
    "a_missing_row_is_never_read",
}
"""Laws of what surrounds a round, whoever computes it: the executions take turns over the methods."""

assert TRIED.keys() == METHOD_LAWS.keys()


def the_test_of(name):
    law = METHOD_LAWS[name]
    once = {ids(case): case for case in TRIED[name]}.values()
    spoken_of = [case for case in once if law.applies(trial_of_case(case, "sequential"))]

    @served(spoken_of, law.executions, in_turn=name in IN_TURN)
    def test(case, execution):
        law.holds(trial_of_case(case, execution))

    test.__name__ = test.__qualname__ = f"test_{name}"
    test.__doc__ = law.statement
    return test


for law_name in TRIED:
    globals()[f"test_{law_name}"] = the_test_of(law_name)


def test_dual_serves_sgd_on_features():
    # The one table of exceptions: what is added here must say why in ``dual.serves`` or in the method.
    other = {
        "central",
        "ccvr",
        "fedpft",
        "fst-cbdg",
        "scaffold",
        "flesd-head",
        "flesd-cc",
        "min-local",
        "non-fl",
        "promptfl",
        "fedavg-simclr",
        "fedprox-simclr",
        "tpfl-feat",
        "atpfl-feat",
        "fedavgm",
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "feddyn",
        "fednova",
        "feddisco",
        "ifca",
        "fedclip",
    }
    for name, method in METHODS.items():
        sgd = any(h.name == "opt" and "sgd" in h.choices for h in method.hparams) or name in (
            "pfedme",
            "perfedavg",
        )
        served_by_dual = (
            method.gradient and sgd and "batched" in method.executions and name not in other
        )
        assert ("gram" in method.executions) == served_by_dual, name


def test_every_execution_that_a_method_names_has_a_case():
    # Pairs that cannot be are not collected: none may be missing because an execution refuses all of them.
    for name, method in METHODS.items():
        for execution in method.executions:
            assert any(fitting(case, execution) for case in ALL if case[0] == name), (
                name,
                execution,
            )


WITHOUT_LABELS = sorted(name for name, method in METHODS.items() if "labels" not in method.needs)


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_methods_without_labels_never_read_one(name):
    method = METHODS[name]
    assert set(WITHOUT_LABELS) >= LABEL_FREE
    data, clients = tiny()
    handed = []

    def spy(down, state, lanes, ctx):
        handed.append(lanes.y)
        return method.fit(down, state, lanes, ctx)

    hp = method.resolve("paper", scaled(small(name)))
    run(replace(method, fit=spy), hp, fitted(method, data), clients, rounds=1, dtype=torch.float64)
    assert handed
    assert all(y is None for y in handed)


@METHOD
def test_every_method_that_reads_features_alone_stacks(name):
    method = METHODS[name]
    if {"pixels", "text tower", "image tower"} & method.reads(method.resolve()):
        assert method.executions == ("sequential",)
    else:
        assert "batched" in method.executions
        assert go_tiny(name, {}, execution="batched").execution == "batched"
