"""Asynchronous rounds and simulated time from the command line and from Python: identity, results, grids, refusals."""

from pathlib import Path

import numpy as np
import pytest
from command import data_of
from failing_command import must_fail
from made_path import place_of
from text_tables import rows_of

from fedcache.runs.directory import rounds_of

pytestmark = pytest.mark.usefixtures("rows")
M = 12
WORDS = f"--scheme iid --clients {M} --rounds 4 --participation 6 --set head=linear"


def test_an_asynchronous_run_is_another_run_and_says_what_was_simulated():
    plain = data_of(f"train --method fedavg {WORDS}")
    assert "timing" not in plain
    done = data_of(f"train --method fedavg --asynchronous 3 --eval-every 2 --seeds 0,1 {WORDS}")
    assert done["digest"] != plain["digest"]
    timing = done["timing"]
    assert timing["asynchronous"] == 3
    assert timing["client_durations"] == "half-normal"
    rounds = rounds_of(Path(done["path"]))
    last = [r["diagnostics"]["simulated_time"] for r in rounds if r["round"] == 4]
    assert timing["simulated_time"] == pytest.approx(np.mean(last))
    assert timing["updates"] == 2 * 4 * 3
    stale = [r["diagnostics"]["staleness_mean"] for r in rounds]
    assert timing["staleness_mean"] == pytest.approx(np.mean(stale))
    assert timing["staleness_max"] == max(r["diagnostics"]["staleness_max"] for r in rounds) > 0
    curve = done["accuracy"]["per_round"]
    assert [p["round"] for p in curve] == [2, 4]
    assert curve[1]["simulated_time"] == timing["simulated_time"] > curve[0]["simulated_time"]


@pytest.mark.slow
def test_the_configuration_of_an_asynchronous_run_runs_it_again(tmp_path):
    slow = tmp_path / "slow.csv"
    slow.write_text("client,duration\n" + "".join(f"client-{i:02},{1 + i % 3}\n" for i in range(M)))

    def train(file):
        words = f"--asynchronous 2 --client-durations {file} --server-step 0.5 --staleness-power 1"
        return place_of(f"train --method fedprox {words} {WORDS}")

    done = train(slow)
    assert data_of(f"train --config {done}/config.toml")["reused"]
    moved = slow.rename(tmp_path / "moved.csv")
    assert train(moved) == done
    moved.write_text(moved.read_text().replace("client-00,1", "client-00,9"))
    assert train(moved) != done


@pytest.mark.parametrize(
    ("words", "why"),
    rows_of(
        """
        --asynchronous 0                          | --asynchronous
        --asynchronous 13                         | 12 clients
        --asynchronous 2 --server-step 0          | --server-step 0
        --server-step 0.5                         | --server-step
        --asynchronous 2 --aggregate median       | --aggregate
        --asynchronous 2 --dp-clip 1 --dp-noise 1 | --dp-clip
        --method central --client-durations equal | central
        """
    ),
)
def test_what_does_not_go_with_asynchronous_rounds_is_answered(words, why):
    must_fail(why, f"train --method fedavg --scheme iid --clients {M} {words}")


@pytest.mark.parametrize("method", ["scaffold", "fed3r", "solo", "central"])
def test_methods_whose_uploads_cannot_wait_are_refused(method):
    must_fail(method, f"train --method {method} --asynchronous 2 --scheme iid --clients {M}")
    assert data_of(f"methods info {method}")["asynchronous"] is False
