"""Robust rules, attacks and privacy on the real command line: what the result says, and what is refused in words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command import fedcache, ok
from pictures import folder

WORDS = ("--scheme", "iid", "--clients", 5, "--rounds", 2, "--participation", "all")


@pytest.fixture
def store(tmp_path: Path) -> None:
    images = folder(tmp_path / "images", train=12, test=4)
    ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--size", 16)


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

    words = ("train", "--method", "fedavg", *WORDS, "--dp-clip", 1, "--dp-noise", 1)
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


def test_the_example_gets_the_row_back(capsys: pytest.CaptureFixture[str]) -> None:
    import runpy

    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "invert_head.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "label 0. From its update: label 0" in said
    assert float(said.split("own row: ")[1].split()[0]) < 1e-12
