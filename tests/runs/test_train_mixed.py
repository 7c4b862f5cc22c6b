"""Clients of one run that differ, and encoders trained on images, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command import fedcache, ok
from federation import small
from pictures import folder

A, B = "random-projection:16", "random-projection:8"
IID = ("--scheme", "iid", "--clients", 3, "--rounds", 2, "--participation", "all")


def extracted(place: Path) -> Path:
    images = folder(place / "shapes", train=8, test=4)
    done = ok("extract", "--dataset", f"folder:{images}", "--backbones", f"{A},{B},pixels", "--recipe", "pixels:size=8",
              "--workers", 0)  # fmt: skip
    return Path(done.data["path"])


@pytest.fixture(autouse=True)
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(extracted)


@pytest.mark.slow
def test_clients_take_turns_with_backbones() -> None:
    mixed = ok("train", "--method", "solo", *IID, "--client-backbones", f"{A},{B},{A}+{B}").data
    alone = [ok("train", "--method", "solo", *IID, "--backbones", b).data for b in (A, B, f"{A},{B}")]
    assert mixed["accuracy"]["per_client"] == [a["accuracy"]["per_client"][i] for i, a in enumerate(alone)]
    assert mixed["digest"] not in {a["digest"] for a in alone}
    assert mixed["execution"] == "sequential"
    again = ok("train", "--method", "solo", *IID, "--client-backbones", f"{A},{B},{A}+{B}").data
    assert again["reused"]
    assert ok("train", "--method", "fedproto", *IID, "--client-backbones", f"{A},{B}").data["accuracy"]["mean"] >= 0.0


def test_a_mixed_run_is_run_again_by_its_config() -> None:
    first = ok("train", "--method", "fedproto", *IID, "--client-backbones", f"{A},{B}").data
    config = Path(first["path"]) / "config.toml"
    assert "client_backbones" in config.read_text()
    assert ok("train", "--config", config).data["digest"] == first["digest"]


@pytest.mark.slow
def test_clients_take_turns_with_values() -> None:
    mixed = ok("train", "--method", "solo", *IID, "--backbones", A, "--client-set", "dim=4,9").data
    alone = [ok("train", "--method", "solo", *IID, "--backbones", A, "--set", f"dim={d}").data for d in (4, 9)]
    want = [alone[i % 2]["accuracy"]["per_client"][i] for i in range(3)]
    assert mixed["accuracy"]["per_client"] == want


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--method", "fedavg", "--client-backbones", f"{A},{B}"), "Clients of fedavg may differ in nothing"),
        (("--method", "fedproto", "--client-set", "dim=4,8"), "may differ in backbones, not in dim"),
        (("--method", "fedproto", "--client-set", "dmi=4,8"), "Did you mean 'dim'"),
        (("--method", "solo", "--client-set", "dim=0"), "expected an integer of at least 1"),
        (("--method", "solo", "--backbones", A, "--client-backbones", B), "not among the run's backbones"),
        (("--method", "solo", "--client-backbones", f"{A},{B}", "--execution", "batched"), "cannot serve solo"),
    ],
)
def test_what_cannot_differ_is_refused(words: tuple[str, ...], expected: str) -> None:
    done = fedcache("train", *words, *IID)
    assert done.code == 2
    assert expected in done.err


@pytest.mark.slow
def test_an_encoder_is_trained_on_the_images_of_the_store(store: Path) -> None:
    sizes = [word for k, v in small("flesd").items() for word in ("--set", f"{k}={v}")]
    done = ok("train", "--method", "flesd", *IID, *sizes).data
    assert done["fidelity"] == "exact"
    assert done["backbones"] == ["pixels"]
    heads = ok("train", "--method", "flesd-head", *IID, *sizes, "--backbones", A).data
    assert heads["fidelity"] == "approx"
    other = fedcache("train", "--method", "flesd", *IID, *sizes, "--backbones", A)
    assert other.code == 2
    assert "trains on one array of images" in other.err
    wrong = fedcache("train", "--method", "fedavg-simclr", *IID, "--set", "encoder=conv", "--backbones", A)
    assert wrong.code == 2


@pytest.mark.slow
def test_an_encoder_of_bottlenecks_is_trained_as_released(store: Path) -> None:
    changed = {**small("flesd"), "encoder": "resnet50", "stem": "imagenet", "anchors": "all", "hue": 0.1}
    sizes = [word for k, v in changed.items() for word in ("--set", f"{k}={v}")]
    done = ok("train", "--method", "flesd", "--preset", "official", *IID, *sizes).data
    hp = done["hyperparameters"]
    assert (hp["encoder"], hp["augment"], hp["hue"], hp["jitter"]) == ("resnet50", "auto", 0.1, "auto")
    assert (hp["simclr"], hp["bn_views"], hp["key_mode"], hp["ema"]) == ("one_way", "separate", "train", "before")
    assert done["fidelity"] == "exact"
    refused = fedcache("train", "--method", "flesd", *IID, *sizes, "--set", "amp=true")
    assert refused.code == 6
    assert "amp=true trains in bfloat16 on a CUDA GPU, but this run computes on cpu." in refused.err


def test_images_that_are_missing_are_asked_for_with_the_command(tmp_path: Path) -> None:
    images = folder(tmp_path / "more", train=4, test=2)
    ok("extract", "--dataset", f"folder:{images}", "--backbones", A, "--workers", 0)
    done = fedcache("train", "--method", "flesd", *IID)
    assert done.code == 4
    assert "--backbones pixels --recipe size=32" in done.err


def test_a_misspelt_backbone_of_a_client_gets_the_right_one(store: Path) -> None:
    done = fedcache("train", "--method", "solo", *IID, "--client-backbones", f"{A},glyph-clop", "--json")
    assert done.code == 2, done.err
    assert "Did you mean 'glyph-clip'" in done.envelope["error"]["message"]


def test_a_rate_is_expected_of_models_only(tmp_path: Path) -> None:
    images = f"folder:{folder(tmp_path / 'others', train=4, test=2)}"
    words = ("extract", "--fresh", "--dataset", images, "--workers", 0, "--backbones")
    said = ok(*words, "pixels", "--recipe", "size=8").err
    assert "no model runs" in said
    assert "expect about" not in said
    assert "expect about" in ok(*words, A).err
