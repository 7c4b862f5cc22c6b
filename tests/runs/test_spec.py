"""What a run is asked to do, once every default is in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.methods import METHODS
from fedcache.runs.settings import hyperparameters, leaves_batchnorm_out, with_schedule_rounds
from fedcache.runs.spec import (
    check_config,
    check_participation,
    non_default_options,
    parse_participation,
    parse_seeds,
    policy_from_config,
    resolve_run,
)


def refused(message: str, hint: str, call: Any, *args: Any) -> None:
    with pytest.raises(FedcacheError) as caught:
        call(*args)
    assert (caught.value.code, caught.value.message, caught.value.hint) == (Exit.USAGE, message, hint)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({}, {}),
        ({"attack": "none"}, {}),
        ({"on_bad_update": "fail"}, {}),  # what is done where nothing is said
        ({"byzantine": 0.4}, {}),  # the mean expects nobody
        ({"byzantine": 0.4, "aggregate": "median"}, {"byzantine": 0.4, "aggregate": "median"}),
        ({"attack": "sign-flip:0.20:10.0"}, {"attack": "sign-flip:0.2:10"}),
        ({"on_bad_update": "reject", "max_share": 0.5}, {"on_bad_update": "reject", "max_share": 0.5}),
        ({"dp_clip": 1.0}, {"dp_clip": 1.0, "dp_delta": 1e-5}),
        ({"dp_clip": 1.0, "dp_delta": 1e-6}, {"dp_clip": 1.0, "dp_delta": 1e-6}),
        ({"dp_allow": "rows, evaluation,rows"}, {"dp_allow": "evaluation,rows"}),
    ],
)
def test_options_of_one_meaning_have_one_spelling(config: dict[str, Any], kept: dict[str, Any]) -> None:
    assert non_default_options(TrainConfig(**config)) == kept


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", (0,)), ("7,0-2,1", (7, 0, 1, 2)), (" 3 , 3", (3,)), ("999999999", (999_999_999,))]
)
def test_seeds_are_a_list_without_repeats(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


def test_seeds_are_at_most_ten_thousand_below_a_thousand_million() -> None:
    example = "For example --seeds 0,1,2 or --seeds 0-4"
    assert len(parse_seeds("0-9999")) == len(parse_seeds("0-5000,3-9999")) == 10_000
    for text in ("0-10000", "0-9999,10000", "0-999999999"):
        refused(f"--seeds {text} are more than 10,000 seeds.", example, parse_seeds, text)
    for text in ("", "1,,2", "3-1", "-1", "a", "1-", "1.5"):
        refused(f"--seeds {text} is not a list of seeds.", example, parse_seeds, text)
    refused("--seeds 1000000000: a seed is at most 999,999,999.", example, parse_seeds, "5,1000000000")


@pytest.mark.parametrize(
    ("text", "meant"), [(None, None), ("all", None), ("10", 10), ("1", 1), ("0.1", 0.1), ("1.0", 1.0), ("25%", 0.25),
                        ("100%", 1.0)]
)  # fmt: skip
def test_clients_a_round_are_a_number_or_a_share(text: str | None, meant: int | float | None) -> None:
    found = parse_participation(text)
    assert (found, type(found)) == (meant, type(meant))


@pytest.mark.parametrize("text", ["0", "0.0", "1.1", "101%", "-1", "nan", "some", "%", ""])
def test_other_words_for_clients_a_round_are_refused(text: str) -> None:
    words = f"--participation {text} is neither a number of clients nor a share."
    refused(words, "For example 10, 0.1, 10% or all", parse_participation, text)


def test_how_clients_are_drawn_is_another_option() -> None:
    words = "--participation poisson is neither a number of clients nor a share."
    refused(words, "How clients are drawn is --client-sampling poisson", parse_participation, "poisson")


def test_no_more_clients_are_asked_for_than_there_are() -> None:
    check_participation(TrainConfig(participation="3"), 3)
    check_participation(TrainConfig(participation="100%"), 3)
    message, hint = "--participation 4, but there are 3 clients.", "For example --participation all"
    refused(message, hint, check_participation, TrainConfig(participation="4"), 3)


LEAVE = "Leave one of them out."
DEALT = "A saved partition is dealt, and its validation rows are chosen."
HOLDS, ALL = "A store holds its dataset.", "The client stores are all there is."


@pytest.mark.parametrize(
    ("config", "partition", "message"),
    [
        ({"store": "a", "dataset": "b"}, {}, f"--store and --dataset are both given. {HOLDS}"),
        ({"partition": "p"}, {"scheme": "iid"}, f"--partition and --scheme are both given. {DEALT}"),
        ({"partition": "p"}, {"clients": 3}, f"--partition and --clients are both given. {DEALT}"),
        ({"partition": "p"}, {"options": {"alpha": 1, "validation": 0.2, "grouping": "x"}},
         f"--partition and --alpha, --validation, --option grouping are both given. {DEALT}"),
        ({"clients_from": "d"}, {"clients": 3},
         "--clients-from and --clients are both given. The stores are dealt."),
        *(({"clients_from": "d", key: "x"}, {},
           f"--clients-from and another store, dataset or partition are both given. {ALL}")
          for key in ("store", "dataset", "partition")),
    ],
)  # fmt: skip
def test_options_of_which_one_would_be_ignored_are_refused(
    config: dict[str, Any], partition: dict[str, Any], message: str
) -> None:
    refused(message, LEAVE, check_config, TrainConfig(method="fed3r", **config), PartitionConfig(**partition))


def test_options_that_go_together_are_taken() -> None:
    for config in ({"store": "a"}, {"dataset": "b"}, {"partition": "p", "store": "a"}, {"clients_from": "d"}):
        check_config(TrainConfig(method="fed3r", **config), PartitionConfig())
    check_config(TrainConfig(store="a", device="cpu"), PartitionConfig("iid", 3, 0, {"shots": 2}))


def test_every_default_of_the_paper_is_in_place() -> None:
    plain, fedavg = TrainConfig(method="fedavg", seeds="3,1"), METHODS["fedavg"]
    made = resolve_run(plain, fedavg, {"lr": 0.1, "auto": None}, ["a", "b"], 50)
    assert (made.method, made.arrays, made.rounds, made.seeds) == ("fedavg", ("a", "b"), 100, (3, 1))
    assert (made.participation, made.participation_text) == (None, "all")
    assert made.hyperparameters == {"auto": "auto", "lr": 0.1}
    assert made.dtype is torch.float32
    assert (made.execution, made.trust_options, made.privacy_cost(50)) == ("auto", {}, {})
    assert made.to_identity() == {
        "method": "fedavg", "preset": "paper", "backbones": ["a", "b"], "domain": [], "rounds": 100,
        "participation": "all", "seeds": "3,1", "eval_every": 0, "execution": "auto", "dtype": "float32",
        "set": {"auto": "auto", "lr": 0.1}, "device": "",
    }  # fmt: skip
    assert made.to_config().items() >= {"rounds": 100, "participation": "all", "seeds": "3,1"}.items()


def test_what_an_ordinary_run_does_not_have_is_part_of_the_identity_of_another() -> None:
    config = TrainConfig(
        method="fedavg", rounds=7, domain=("ink",), aggregate="median", client_backbones=("a", "b"),
        client_set={"dim": 3}, eval_every=2, dtype="float64", execution="stack",
    )  # fmt: skip
    made = replace(resolve_run(config, METHODS["fedavg"], {}, ["a"], 5), device="cpu", engine="flower", together=True)
    assert made.to_identity() == {
        "method": "fedavg", "preset": "paper", "backbones": ["a"], "domain": ["ink"], "rounds": 7,
        "participation": "all", "seeds": "0", "eval_every": 2, "execution": "batched", "dtype": "float64", "set": {},
        "aggregate": "median", "client_backbones": ["a", "b"], "client_set": {"dim": "3"}, "device": "cpu",
        "engine": "flower", "together": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "preset", "asked", "clients", "text"),
    [
        ("fedavg", "paper", None, 50, "all"),
        ("fedavg", "official", None, 50, "20"),  # the released code takes 20, where there are more
        ("fedavg", "official", None, 20, "all"),
        ("fedavg", "official", "0.5", 50, "0.5"),
        ("fedntd", "paper", None, 100, "10"),
        ("fedntd", "paper", None, 10, "10"),
        ("fedntd", "paper", None, 9, "all"),
        ("fedntd", "paper", "3", 9, "3"),
    ],
)
def test_clients_a_round_are_the_papers_where_there_are_so_many(
    method: str, preset: str, asked: str | None, clients: int, text: str
) -> None:
    config = TrainConfig(method=method, preset=preset, participation=asked)
    assert resolve_run(config, METHODS[method], {}, [], clients).participation_text == text


@pytest.mark.parametrize(
    ("method", "rounds", "made"), [("fedavg", None, 100), ("fedavg", 7, 7), ("fed3r", None, 1), ("fed3r", 7, 1)]
)
def test_a_one_shot_method_has_one_round_whatever_is_asked(method: str, rounds: int | None, made: int) -> None:
    assert resolve_run(TrainConfig(method=method, rounds=rounds), METHODS[method], {}, [], 5).rounds == made


def test_a_schedule_lasts_as_long_as_the_run_unless_it_says_how_long() -> None:
    assert with_schedule_rounds({"sched_rounds": None, "lr": 1.0}, 9) == {"sched_rounds": 9, "lr": 1.0}
    assert with_schedule_rounds({"sched_rounds": 4}, 9) == {"sched_rounds": 4}
    assert with_schedule_rounds({"lr": 1.0}, 9) == {"lr": 1.0}
    method = next(m for m in METHODS.values() if "sched_rounds" in m.resolve())
    config = TrainConfig(method=method.name)
    assert hyperparameters(method, config)["sched_rounds"] == method.defaults.rounds
    assert hyperparameters(method, replace(config, rounds=7))["sched_rounds"] == 7
    assert hyperparameters(method, replace(config, set={"sched_rounds": "3"}))["sched_rounds"] == 3


def test_a_private_run_has_no_batchnorm_unless_it_is_asked_for_by_name() -> None:
    noisy, clipped = {"dp_clip": 1.0, "dp_noise": 2.0, "dp_seed": 0}, {"dp_clip": 1.0, "dp_noise": 0.0}
    for how, expected in ((noisy, False), (clipped, True), ({}, True)):
        assert hyperparameters(METHODS["fedavg"], TrainConfig(method="fedavg", **how))["bn"] is expected
    asked = TrainConfig(method="fedavg", set={"bn": True}, **noisy)
    assert hyperparameters(METHODS["fedavg"], asked)["bn"] is True  # and the trust policy refuses it
    with pytest.raises(FedcacheError, match="noise makes variances of BatchNorm negative") as caught:
        policy_from_config(asked, METHODS["fedavg"]).check(METHODS["fedavg"], hyperparameters(METHODS["fedavg"], asked))
    assert "a private run trains without BatchNorm" in caught.value.hint
    linear = TrainConfig(method="fedavg", set={"head": "linear"}, **noisy)
    assert not leaves_batchnorm_out(METHODS["fedavg"], linear)
