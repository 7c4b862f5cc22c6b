"""Results of several seeds, summed up by hand, and what is said of uploads and of noise."""

import json
import math
from dataclasses import fields

import numpy as np
import pytest

from fedcache.federate.engine.simulated_time import TimingRule
from fedcache.federate.partition.client_table import NumberedNames
from fedcache.runs import results
from fedcache.runs.results import SeedResult, columns_of_seeds
from fedcache.runs.score import mean_std


def seed(number, accuracies, **changes):
    """A seed whose rounds gave these accuracies, of two clients."""
    rounds = [{"round": i + 1, "accuracy": a} for i, a in enumerate(accuracies)]
    whole = {
        **dict.fromkeys(field.name for field in fields(SeedResult)),
        "seed": number,
        "accuracy": accuracies[-1],
        "mean_client": 0.5,
        "by_domain": {"ink": 0.5},
        "rounds": rounds,
        "traffic": {
            "up": 10,
            "down": 20,
            "paper_up": 6,
            "paper_down": 8,
            "up_bytes": 40,
            "down_bytes": 80,
        },
        "per_round": {"up": 5.0, "down": 10.0, "paper_up": 3.0, "paper_down": 4.0},
        "clients": ["p", "q"],
        "per_client": np.array([0.25, None], float),
        "classes_owned": np.array([1, 2]),
    }
    return SeedResult(**whole | changes)


def test_mean_and_deviation_of_known_values_alone():
    assert mean_std([1.0, 3.0]) == (2.0, math.sqrt(2.0))  # ddof 1
    assert mean_std([4.0]) == (4.0, None)
    assert mean_std([]) == mean_std([1.0, None]) == (None, None)


def test_accuracy_is_taken_over_seeds_clients_domains_and_rounds():
    first = seed(0, (None, 0.5, 0.7))
    second = seed(
        4,
        (None, 0.7, None),
        accuracy=0.9,
        per_client=np.array([0.75, 1.0]),
        mean_client=0.7,
        by_domain={"ink": 1.0},
    )
    found = results._accuracy([first, second], columns_of_seeds([first, second]), drawn=False)
    assert found["mean"] == pytest.approx(0.8)
    assert found["std"] == pytest.approx(math.sqrt(0.02))
    assert found["per_seed"] == [0.7, 0.9]
    assert found["per_client"] == [0.5, None]
    assert found["per_domain"] == {"ink": 0.75}
    assert found["client_mean"] == pytest.approx(0.6)
    assert found["per_round"] == [
        {"round": 2, "mean": pytest.approx(0.6)},
        {"round": 3, "mean": None},
    ]


def test_traffic_is_summed_over_seeds_and_a_round_is_that_of_the_first():
    other = seed(1, (1.0,))
    other.traffic = {k: v + 1 for k, v in other.traffic.items()}
    other.per_round = {}
    assert results._traffic([seed(0, (1.0,)), other]) == {
        "up": 21,
        "down": 41,
        "paper": {"up": 13, "down": 17, "per_client_round": {"up": 3.0, "down": 4.0}},
        "exact": {
            "up": 21,
            "down": 41,
            "up_bytes": 81,
            "down_bytes": 161,
            "per_client_round": {"up": 5.0, "down": 10.0},
        },
        "unit": "scalars, summed over rounds, clients and seeds",
    }


def timed(number, *rounds):
    """A seed whose rounds had these clients, ended then, and whose updates were so old on average and at most."""
    made = seed(number, (0.5,) * len(rounds))
    for record, (clients, end, mean, most) in zip(made.rounds, rounds, strict=True):
        old = {} if mean is None else {"staleness_mean": mean, "staleness_max": most}
        record |= {"clients": clients, "diagnostics": {"simulated_time": end, **old}}
    return made


def test_staleness_is_a_mean_over_updates_and_time_one_over_seeds():
    first = timed(0, ([], 0.5, None, 0), (["p", "q", "p"], 2.0, 1.0, 3))
    second = timed(1, (["q"], 1.0, 5.0, 5), ([], 7.0, None, 0))
    rule = TimingRule(durations="equal", buffer=2, step=0.5, power=1.0)
    assert results._timing(rule, [first, second]) == {
        "asynchronous": 2,
        "server_step": 0.5,
        "staleness_power": 1.0,
        "client_durations": "equal",
        "simulated_time": 4.5,  # the ends 2.0 and 7.0
        "updates": 4,
        "staleness_mean": (3 * 1.0 + 1 * 5.0) / 4,
        "staleness_max": 5,
    }
    idle = results._timing(rule, [timed(0, ([], 2.0, None, 0))])
    assert idle["updates"] == 0
    assert idle["staleness_mean"] == 0.0
    assert idle["staleness_max"] is None
    assert results._timing(TimingRule(durations="equal"), [first, second]) == {
        "client_durations": "equal",
        "simulated_time": 4.5,
    }


@pytest.mark.parametrize("clients", [["p", "q"], NumberedNames(2)], ids=["named", "numbered"])
def test_a_seed_is_read_as_it_was_written(clients):
    written = seed(3, (None, 0.5), clients=clients, attackers=["q"], confusion=[[1, 0], [2, 3]])
    found = SeedResult.from_dict(json.loads(json.dumps(written.to_dict())))
    assert list(found.clients) == list(clients)
    assert type(found.clients) is type(clients)
    assert np.array_equal(found.per_client, [0.25, np.nan], equal_nan=True)
    assert found.per_client.dtype == np.float64
    assert found.classes_owned.dtype == np.int64
    assert found.classes_owned.tolist() == [1, 2]
    assert {**found.to_dict(), "clients": 0} == {**written.to_dict(), "clients": 0}
