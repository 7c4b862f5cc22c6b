"""Clients of one run that differ, and encoders trained on images, from the command line."""

from pathlib import Path

import pytest
from command import data_of
from failing_command import must_fail
from federation import small
from homes import made_once
from made_path import extracted

A = "random-projection:16"
B = "random-projection:8"
IID = "--scheme iid --clients 3 --rounds 2 --participation all"


def mixed(place):
    return extracted(place, f"{A},{B},pixels --recipe pixels:size=8", train=8)


store = made_once(mixed, autouse=True)


@pytest.mark.slow
def test_clients_take_turns_with_backbones():
    mixed = data_of(f"train --method solo {IID} --client-backbones {A},{B},{A}+{B}")
    alone = [data_of(f"train --method solo {IID} --backbones {b}") for b in (A, B, f"{A},{B}")]
    assert mixed["accuracy"]["per_client"] == [
        a["accuracy"]["per_client"][i] for i, a in enumerate(alone)
    ]
    assert mixed["execution"] == "sequential"
    config = Path(mixed["path"]) / "config.toml"
    assert data_of(f"train --config {config}")["reused"]


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
    done = data_of(f"train --method flesd {IID} {sizes}")
    assert done["fidelity"] == "exact"
    assert done["backbones"] == ["pixels"]
    heads = data_of(f"train --method flesd-head {IID} {sizes} --backbones {A}")
    assert heads["fidelity"] == "approx"
    must_fail("", f"train --method flesd {IID} {sizes} --backbones {A}")
