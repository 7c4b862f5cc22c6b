"""Robust rules, attacks and privacy on the real command line: what the result says, and what is refused in words."""

import runpy
import sys
from pathlib import Path

import pytest
from command import data_of, ok
from failing_command import must_fail, must_fail_machine, must_fail_training

pytestmark = pytest.mark.usefixtures("shapes")
DEALT = "--scheme iid --clients 5"
WORDS = f"{DEALT} --rounds 2 --participation all"


@pytest.mark.slow
def test_the_result_says_what_was_done_and_an_ordinary_one_does_not():
    plain = data_of(f"train --method fedavg {WORDS}")
    assert "trust" not in plain
    done = data_of(
        f"train --method fedavg {WORDS} --aggregate median --attack sign-flip:0.2:10 "
        "--byzantine 0.3 --seeds 0,1"
    )
    trust = done["trust"]
    said = {"aggregate": "median", "attack": "sign-flip:0.2:10", "byzantine": 0.3}
    assert said.items() <= trust.items()
    assert [len(names) for names in trust["attackers"]] == [1, 1]
    assert done["digest"] != plain["digest"]
    assert done["diagnostics"]["rejected"] == 0.0
    assert data_of("train --config", Path(done["path"]) / "config.toml")["digest"] == done["digest"]


@pytest.mark.slow
def test_rules_are_swept_and_rejections_are_counted_and_named():
    done = ok(
        f"grid --method fedavg,fedproto {WORDS} --attack nan:0.2 --on-bad-update reject "
        "--sweep aggregate=mean,median,trimmed:0.2"
    )
    assert [p["diagnostics"]["rejected"] for p in done.data["points"]] == [1.0] * 6
    assert "is rejected: " in "".join(done.warnings)
    must_fail_training("--on-bad-update reject", f"train --method fedavg {WORDS} --attack nan:0.2")


def test_privacy_is_accounted_or_refused(monkeypatch):
    words = f"train --method fedavg {WORDS} --dp-clip 1 --dp-noise 1 --dp-allow evaluation"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "dp_accounting", None)
        must_fail_machine("fedcache[dp]", words)
    pytest.importorskip("dp_accounting")
    told = data_of(words)["trust"]["privacy"]
    assert told["rounds"] == 2
    assert told["share"] == 1.0
    assert 0 < told["epsilon_pld"] <= told["epsilon_rdp"]


@pytest.mark.parametrize(
    "words",
    [
        "train --method fedavg --clients 2 --aggregate krum --dry-run",
        "grid --method fedavg,fedpcl --clients 5 --aggregate median",
        "grid --method fedavg --sweep clients=5,2 --aggregate krum",
    ],
)
def test_what_a_round_cannot_carry_is_refused_before_anything_is_trained(words):
    must_fail("", f"{words} --scheme iid --rounds 2 --participation all")
    assert data_of("runs list")["entries"] == []


def test_rejections_leave_fewer_liars_to_expect_and_name_the_round_when_too_few_are_left():
    words = (
        "train --method fedavg --scheme iid --clients 10 --rounds 2 --participation all "
        "--on-bad-update reject"
    )
    kept = data_of(f"{words} --attack nan:0.2 --aggregate multikrum:8")
    assert kept["trust"]["rejected"] == 4  # two clients in two rounds
    lost = must_fail_training("Round 1: 2 uploads", f"{words} --attack nan:0.8 --aggregate krum")
    assert lost["message"].count("'client-") == 5  # and no more, of ten thousand clients


def test_classes_of_few_owners_are_named():
    scheme = "--scheme shards --shards 1 --clients 6"
    words = f"train --method fedproto {scheme} --rounds 1 --participation all"
    assert "so few clients" in "".join(ok(f"{words} --aggregate median").warnings)
    must_fail_training("Round 1, class 0", f"{words} --aggregate krum")


def test_fedcgs_and_noisy_fed3r_stay_definite():
    assert data_of(f"train --method fedcgs {DEALT} --aggregate median")["accuracy"]["mean"] > 0
    pytest.importorskip("dp_accounting")
    noisy = data_of(
        f"train --method fed3r {DEALT} --participation all --dp-clip 1 --dp-noise 1 "
        "--dp-allow rows,evaluation"
    )
    assert noisy["accuracy"]["mean"] is not None


def test_the_example_gets_the_row_back(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples/invert_head.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "label 0. From its update: label 0" in said
    assert float(said.split("own row: ")[1].split()[0]) < 1e-12
