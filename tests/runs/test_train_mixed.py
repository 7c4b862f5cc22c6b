"""Clients of one run that differ, and encoders trained on images, from the command line."""

from pathlib import Path

import pytest
from command import ok
from failing_command import must_fail
from federation import small
from made_path import place_of
from pictures import folder

A = "random-projection:16"
B = "random-projection:8"
IID = "--scheme iid --clients 3 --rounds 2 --participation all"


def extracted(place):
    images = folder(place / "shapes", train=8)
    words = f"--backbones {A},{B},pixels --recipe pixels:size=8 --workers 0"
    return place_of(f"extract --dataset folder:{images} {words}")


@pytest.fixture(autouse=True)
def store(once):
    return once(extracted)


@pytest.mark.slow
def test_clients_take_turns_with_backbones():
    mixed = ok(f"train --method solo {IID} --client-backbones {A},{B},{A}+{B}").data
    alone = [ok(f"train --method solo {IID} --backbones {b}").data for b in (A, B, f"{A},{B}")]
    assert mixed["accuracy"]["per_client"] == [
        a["accuracy"]["per_client"][i] for i, a in enumerate(alone)
    ]
    assert mixed["execution"] == "sequential"
    config = Path(mixed["path"]) / "config.toml"
    assert ok(f"train --config {config}").data["reused"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"--method fedavg --client-backbones {A},{B}", "fedavg"),
        ("--method fedproto --client-set dim=4,8", "dim"),
        (f"--method solo --backbones {A} --client-backbones {B}", "backbones"),
        (f"--method solo --client-backbones {A},{B} --execution batched", "solo"),
        (f"--method solo --client-backbones {A},glyph-clop", "'glyph-clip'"),
    ],
)
def test_what_cannot_differ_is_refused(words, named):
    must_fail(named, f"train {words} {IID}")


@pytest.mark.slow
def test_an_encoder_is_trained_on_the_images_of_the_store(store):
    sizes = " ".join(f"--set {k}={v}" for k, v in small("flesd").items())
    done = ok(f"train --method flesd {IID} {sizes}").data
    assert done["fidelity"] == "exact"
    assert done["backbones"] == ["pixels"]
    heads = ok(f"train --method flesd-head {IID} {sizes} --backbones {A}").data
    assert heads["fidelity"] == "approx"
    must_fail("", f"train --method flesd {IID} {sizes} --backbones {A}")
