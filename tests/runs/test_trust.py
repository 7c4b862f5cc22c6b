"""Robust rules, attacks and privacy on the real command line: what the result says, and what is refused in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command import fedcache, ok
from pictures import folder

WORDS = ("--scheme", "iid", "--clients", 5, "--rounds", 2, "--participation", "all")


def extracted(place: Path) -> Path:
    images = folder(place / "images", train=12, test=4)
    return Path(
        ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--size", 16).data["path"]
    )


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(extracted)


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_the_result_says_what_was_done_and_an_ordinary_one_does_not(tmp_path: Path) -> None:
    plain = ok("train", "--method", "fedavg", *WORDS).data
    assert "trust" not in plain
    done = ok("train", "--method", "fedavg", *WORDS, "--aggregate", "median", "--attack", "sign-flip:0.2:10",
              "--byzantine", 0.3, "--seeds", "0,1").data  # fmt: skip
    trust = done["trust"]
    assert trust["aggregate"] == "median"
    assert trust["attack"] == "sign-flip:0.2:10"
    assert trust["byzantine"] == 0.3
    assert [len(names) for names in trust["attackers"]] == [1, 1]
    assert done["digest"] != plain["digest"]
    assert done["diagnostics"]["rejected"] == 0.0
    run = Path(os.environ["FEDCACHE_HOME"]) / "runs" / done["digest"][:16]
    again = ok("train", "--config", run / "config.toml").data
    assert again["digest"] == done["digest"]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_rules_are_swept_and_rejections_are_counted_and_named() -> None:
    done = ok("grid", "--method", "fedavg,fedproto", *WORDS, "--attack", "nan:0.2", "--on-bad-update", "reject",
              "--sweep", "aggregate=mean,median,trimmed:0.2")  # fmt: skip
    assert len(done.data["points"]) == 6
    assert {p["diagnostics"]["rejected"] for p in done.data["points"]} == {1.0}
    assert any("is rejected: " in w for w in done.envelope["warnings"])
    failed = fedcache("train", "--method", "fedavg", *WORDS, "--attack", "nan:0.2", "--json")
    assert failed.code == 7
    error = failed.envelope["error"]
    assert "Round 1: the upload of client" in error["message"]
    assert "--on-bad-update reject" in error["hint"]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--aggregate", "medain"), 2, "median"),
        (("--aggregate", "krum"), 2, "at least"),
        (("--attack", "sign-flip:2"), 2, "sign-flip:0.2"),
        (("--on-bad-update", "ignore"), 2, "fail"),
        (("--byzantine", "0.5"), 2, "below 0.5"),
        (("--max-update-norm", "-1"), 2, "above 0"),
        (("--max-row-norm", "0"), 2, "above 0"),
        (("--max-row-norm", "5"), 2, "its clients send no statistics of their rows"),
        (("--dp-clip", "1"), 2, "--dp-noise"),
        (("--dp-delta", "0.1"), 2, "--dp-clip"),
    ],
)
def test_wrong_words_are_answered(words: tuple[str, ...], code: int, said: str) -> None:
    extra = ("--byzantine", "0.4") if "krum" in words else ()
    done = fedcache("train", "--method", "fedavg", *WORDS, *words, *extra, "--json")
    assert done.code == code, done.out + done.err
    error = done.envelope["error"]
    assert said in error["message"] + error["hint"]
    refused = fedcache("train", "--method", "fedpcl", *WORDS, "--aggregate", "median", "--json")
    assert refused.code == 2
    assert "takes no mean" in refused.envelope["error"]["message"]


@pytest.mark.usefixtures("store")
def test_privacy_is_accounted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    words = ("train", "--method", "fedavg", *WORDS, "--dp-clip", 1, "--dp-noise", 1, "--dp-allow", "evaluation")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "dp_accounting", None)
        missing = fedcache(*words, "--json")
    assert missing.code == 6
    assert "fedcache[dp]" in missing.envelope["error"]["hint"]
    pytest.importorskip("dp_accounting")
    told = ok(*words).data["trust"]["privacy"]
    assert told["rounds"] == 2
    assert told["share"] == 1.0
    assert 0 < told["epsilon_pld"] <= told["epsilon_rdp"]
    assert json.dumps(told)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fed3r"])
def test_noise_and_another_rule_exclude_each_other(method: str) -> None:
    words = ("train", "--method", method, *WORDS, "--dp-clip", 1, "--dp-noise", 0, "--aggregate", "median", "--json")
    done = fedcache(*words)
    assert done.code == 2
    assert "--dp-clip" in done.envelope["error"]["message"]
    assert fedcache(*words[:-3], "--json").code == 0


@pytest.mark.usefixtures("store")
def test_what_a_round_cannot_carry_is_refused_before_anything_is_trained() -> None:
    few = ("--scheme", "iid", "--clients", 2, "--rounds", 2, "--participation", "all")
    for words in (("--dry-run",), ()):
        done = fedcache("train", "--method", "fedavg", *few, "--aggregate", "krum", *words, "--json")
        assert done.code == 2
        assert "needs at least 3 clients a round" in done.envelope["error"]["message"]
    told = fedcache("grid", "--method", "fedavg,fedpcl", *WORDS, "--aggregate", "median", "--json")
    assert told.code == 2
    assert told.envelope["error"]["message"].startswith("fedpcl: fedpcl takes no --aggregate")
    swept = fedcache("grid", "--method", "fedavg", "--scheme", "iid", "--rounds", 2, "--participation", "all",
                     "--aggregate", "krum", "--sweep", "clients=5,2", "--json")  # fmt: skip
    assert swept.code == 2
    assert swept.envelope["error"]["message"].startswith("fedavg clients=2: ")
    assert ok("ls", "--runs").data["entries"] == []


@pytest.mark.usefixtures("store")
def test_rejections_leave_fewer_liars_to_expect_and_name_the_round_when_too_few_are_left() -> None:
    words = ("train", "--method", "fedavg", "--scheme", "iid", "--clients", 10, "--rounds", 2, "--participation", "all",
             "--attack", "nan:0.2", "--on-bad-update", "reject")  # fmt: skip
    kept = ok(*words, "--aggregate", "multikrum:8")
    assert kept.data["trust"]["rejected"] == 4  # two clients in two rounds
    assert "4 uploads were rejected" in fedcache(*words, "--aggregate", "multikrum:8").out
    half = [w if w != "nan:0.2" else "nan:0.8" for w in words]
    lost = fedcache(*half, "--aggregate", "krum", "--json")
    assert lost.code == 7
    message = lost.envelope["error"]["message"]
    assert "Round 1: 2 uploads are left after 8 were rejected ('client-" in message
    assert message.count("'client-") == 5  # and no more, of ten thousand clients


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_one_attack_has_one_spelling_and_none_is_a_word() -> None:
    words = ("train", "--method", "fedavg", *WORDS)
    short, long = ok(*words, "--attack", "sign-flip").data, ok(*words, "--attack", "sign-flip:0.2:10").data
    assert short["digest"] == long["digest"]
    assert ok(*words, "--byzantine", 0.3).data["digest"] == ok(*words).data["digest"]
    swept = ok(
        "grid", "--method", "fedavg", *WORDS, "--sweep", "attack=none,sign-flip", "--sweep", "on-bad-update=fail"
    )
    assert [("attack" in p.get("trust", {})) for p in swept.data["points"]] == [False, True]
    assert swept.data["points"][0]["digest"]
    nobody = ok(*words, "--attack", "sign-flip:0.01")
    assert nobody.data["trust"]["attackers"] == [[]]
    assert any("nobody lies" in w for w in nobody.envelope["warnings"])


@pytest.mark.usefixtures("store")
def test_classes_of_few_owners_are_named() -> None:
    words = ("train", "--method", "fedproto", "--scheme", "shards", "--shards", 1, "--clients", 6, "--rounds", 1,
             "--participation", "all")  # fmt: skip
    told = ok(*words, "--aggregate", "median")
    assert any("so few owners" in w for w in told.envelope["warnings"])
    refused = fedcache(*words, "--aggregate", "krum", "--json")
    assert refused.code == 7
    assert "Round 1, class 0" in refused.envelope["error"]["message"]


@pytest.mark.usefixtures("store")
def test_fedcgs_and_noisy_fed3r_stay_definite() -> None:
    assert ok("train", "--method", "fedcgs", *WORDS[:4], "--aggregate", "median").data["accuracy"]["mean"] > 0
    pytest.importorskip("dp_accounting")
    words = ("train", "--method", "fed3r", *WORDS[:4], "--participation", "all", "--dp-clip", 1, "--dp-noise", 1,
             "--dp-allow", "rows,evaluation")  # fmt: skip
    assert ok(*words).data["accuracy"]["mean"] is not None
    assert "Privacy: epsilon" in fedcache(*words).out


def test_epsilon_that_means_nothing_costs_no_memory() -> None:
    pytest.importorskip("dp_accounting")
    from fedcache.federate.trust.privacy import Privacy

    spent = Privacy(1.0, 1e-3).cost(30, 1.0)
    assert spent["epsilon_pld"] is None
    assert spent["epsilon_rdp"] > 1e6


def test_the_example_gets_the_row_back(capsys: pytest.CaptureFixture[str]) -> None:
    import runpy

    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "invert_head.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "label 0. From its update: label 0" in said
    assert float(said.split("own row: ")[1].split()[0]) < 1e-12
