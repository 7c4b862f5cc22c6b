"""What a run is asked to do, once every default is in place."""

from dataclasses import replace
from functools import partial

import pytest
from refusal import refused
from setting_lines import chosen, set_to

from fedcache.config import PartitionConfig, TrainConfig
from fedcache.federate.methods import METHODS
from fedcache.runs.spec import (
    check_config,
    hyperparameters,
    leaves_batchnorm_out,
    non_default_options,
    parse_participation,
    parse_seeds,
    policy_from_config,
    resolve_run,
    with_schedule_rounds,
)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ("", ""),
        ("on_bad_update=fail", ""),  # what is done where nothing is said
        ("byzantine=0.4", ""),  # the mean expects nobody
        ("byzantine=0.4 aggregate=median", "byzantine=0.4 aggregate=median"),
        ("attack=sign-flip:0.20:10.0", "attack=sign-flip:0.2:10"),
        ({"dp_allow": "rows, evaluation,rows"}, "dp_allow=evaluation,rows"),
    ],
)
def test_options_of_one_meaning_have_one_spelling(config, kept):
    assert non_default_options(TrainConfig(**chosen(config))) == set_to(kept)


def test_seeds_are_a_list_of_at_most_ten_thousand_below_a_thousand_million():
    assert parse_seeds("7,0-2, 1") == (7, 0, 1, 2)
    assert parse_seeds("999999999") == (999_999_999,)
    for text in ("0-10000", "0-9999,10000", "", "1,,2", "3-1", "-1", "a", "1-", "1.5"):
        refused(lambda text=text: parse_seeds(text), f"--seeds {text} ")
    refused(lambda: parse_seeds("5,1000000000"), "--seeds 1000000000")


@pytest.mark.parametrize(
    ("text", "meant"),
    [(None, None), ("all", None), ("1", 1), ("0.1", 0.1), ("25%", 0.25), ("100%", 1.0)],
)
def test_clients_a_round_are_a_number_or_a_share(text, meant):
    found = parse_participation(text)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize("text", ["0", "0.0", "1.1", "101%", "nan", "poisson"])
def test_other_words_for_clients_a_round_are_refused(text):
    refused(lambda: parse_participation(text), f"--participation {text} ")


def test_options_of_which_one_would_be_ignored_are_refused():
    def checked(config, partition):
        asked = TrainConfig(method="fed3r", **set_to(config))
        check_config(asked, PartitionConfig(**set_to(partition)))

    checked("store=a", 'scheme=iid clients=3 options={"shots":2}')
    many = 'options={"alpha":1,"validation":0.2,"grouping":"x"}'
    for config, partition, named in (
        ("store=a dataset=b", "", "--store and --dataset"),
        ("partition=p", "scheme=iid", "--partition and --scheme"),
        ("partition=p", many, "--partition and --alpha, --validation, --option grouping"),
        ("clients_from=d", "clients=3", "--clients-from and --clients"),
    ):
        refused(partial(checked, config, partition), named)


def test_what_an_ordinary_run_does_not_have_is_part_of_the_identity_of_another():
    config = TrainConfig(
        method="fedavg",
        rounds=7,
        domain=("ink",),
        aggregate="median",
        client_backbones=("a", "b"),
        client_set={"dim": 3},
        eval_every=2,
        dtype="float64",
        execution="batched",
    )
    made = replace(
        resolve_run(config, METHODS["fedavg"], {}, ["a"], 5),
        device="cpu",
        engine="flower",
        together=True,
    )
    assert made.to_identity() == {
        "method": "fedavg",
        "preset": "paper",
        "backbones": ["a"],
        "domain": ["ink"],
        "rounds": 7,
        "participation": "all",
        "eval_every": 2,
        "execution": "batched",
        "dtype": "float64",
        "set": {},
        "aggregate": "median",
        "client_backbones": ["a", "b"],
        "client_set": {"dim": "3"},
        "device": "cpu",
        "engine": "flower",
        "together": True,
    }


@pytest.mark.parametrize(
    ("method", "preset", "clients", "text", "rounds"),
    [
        ("fedavg", "paper", 50, "all", 7),
        ("fedavg", "official", 50, "20", 7),  # the released code takes 20, where there are more
        ("fedntd", "paper", 9, "all", 7),
        ("fed3r", "paper", 5, "all", 1),  # one shot
    ],
)
def test_clients_a_round_are_the_papers_where_there_are_so_many(
    method, preset, clients, text, rounds
):
    config = TrainConfig(method=method, preset=preset, rounds=7)
    found = resolve_run(config, METHODS[method], {}, [], clients)
    assert found.participation_text == text
    assert found.rounds == rounds


def test_a_schedule_lasts_as_long_as_the_run_unless_it_says_how_long():
    assert with_schedule_rounds({"sched_rounds": None}, 9) == {"sched_rounds": 9}
    assert with_schedule_rounds({"sched_rounds": 4}, 9) == {"sched_rounds": 4}
    method = METHODS["promptfl"]
    config = TrainConfig(method="promptfl")
    assert hyperparameters(method, config)["sched_rounds"] == method.defaults.rounds
    assert hyperparameters(method, replace(config, rounds=7))["sched_rounds"] == 7
    config = TrainConfig(method="ccvr", rounds=7)
    assert hyperparameters(METHODS["ccvr"], config)["calibrate_at"] == 7


def test_a_private_run_has_no_batchnorm_unless_it_is_asked_for_by_name():
    fedavg = METHODS["fedavg"]
    clipped = {"dp_clip": 1.0, "dp_noise": 0.0}
    noisy = {**clipped, "dp_noise": 2.0, "dp_seed": 0}
    for how, expected in ((noisy, False), (clipped, True)):
        assert hyperparameters(fedavg, TrainConfig(method="fedavg", **how))["bn"] is expected
    asked = TrainConfig(method="fedavg", set={"bn": True}, **noisy)
    assert hyperparameters(fedavg, asked)["bn"] is True
    policy = policy_from_config(asked, fedavg)
    refused(lambda: policy.check(fedavg, hyperparameters(fedavg, asked)), "BatchNorm")
    assert not leaves_batchnorm_out(
        fedavg, TrainConfig(method="fedavg", set={"head": "linear"}, **noisy)
    )


@pytest.mark.parametrize("name", ["clip-zs", "fst-cbdg", "fedavg-simclr", "solo", "fedpcl"])
def test_a_client_prior_needs_labels_one_model_and_class_scores(name):
    config = TrainConfig(method=name, client_prior="counts")
    settings = METHODS[name].resolve("paper", {})
    refused(lambda: resolve_run(config, METHODS[name], settings, ["a"], 5), "--client-prior needs")
