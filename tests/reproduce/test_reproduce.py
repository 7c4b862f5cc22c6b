"""``reproduce`` tells the truth about what is here and what was run."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from command import ok, words_of
from failing_command import must_fail
from pictures import folder
from PIL import Image
from small_entry import SMALL

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.federate.methods import METHODS
from fedcache.reproduce.metrics import Measurement, over_seeds
from fedcache.reproduce.planning import READS, Options, RequirementCheck, plan
from fedcache.reproduce.registry import entry, names, parse
from fedcache.reproduce.render import markdown, rows
from fedcache.reproduce.runner import reproduce

TINY = words_of("--backbones random-projection:16 --seeds 0 --rounds 2")


def test_over_seeds_is_the_sample_std_and_nothing_where_a_seed_lacks_it():
    assert over_seeds([1.0, 2.0, 3.0]) == Measurement(2.0, 1.0, 3)
    assert over_seeds([1.0]) == Measurement(1.0, None, 1)
    assert over_seeds([[1.0, 2.0], [3.0, 4.0]]).curve == (2.0, 3.0)


@pytest.fixture
def images(tmp_path):
    """Three domains, two of which are called as in Digit-5."""
    return f"folder:{folder(tmp_path / 'shapes', train=12, test=4, domains=('mnist', 'MNIST_M', 'chalk'))}"


@pytest.mark.slow
def test_a_proxy_end_to_end_and_again_from_what_is_stored(images, tmp_path):
    words = ("reproduce fedpcl-table2 --on", images, *TINY)
    first = ok(*words, "-o", tmp_path / "t.md").data
    assert first["proxy"] is True
    assert len(first["cells"]) == 16
    for cell in first["cells"]:
        assert cell["run"] == (cell["protocol"]["method"] in METHODS)
        assert cell["run"] or all(value["got"] is None for value in cell["values"].values())
    pcl = next(c for c in first["cells"] if c["labels"] == {"backbones": "1", "method": "FedPCL"})
    values = pcl["values"]
    assert values["domain:mnist"]["printed"] == {"mean": 82.75, "std": 0.40, "text": None}
    assert 0 < values["domain:mnist-m"]["got"]["mean"] <= 100, "MNIST_M is the paper's MNIST-M"
    assert values["domain:svhn"]["got"]["mean"] is None
    assert values["params"]["got"]["mean"] == 3 * 256
    said = " ".join([*first["departures"], *pcl["departures"]])
    for departure in (
        "random-projection:16 instead of resnet18-quickdraw-maxpool",
        "2 instead of 100",
        "short batches",
    ):
        assert departure in said
    again = ok(*words).data
    assert all(c["reused"] == len(c["runs"]) for c in again["cells"])
    assert [c["values"] for c in again["cells"]] == [c["values"] for c in first["cells"]]


@pytest.mark.slow
def test_a_label_may_be_given_with_several_values_and_images_be_read_in_another_way(
    images,
):
    words = (
        "reproduce fedpcl-table5 --on",
        images,
        *TINY,
        "--only",
        "loss=FedPCL",
        "--only",
        "loss=Cross Entropy",
    )
    done = ok(*words, "--recipe", "random-projection:16:size=16").data
    assert [c["labels"]["loss"] for c in done["cells"]] == ["Cross Entropy", "FedPCL"]
    assert "images: random-projection:16:size 16" in done["departures"]
    assert all(
        c["protocol"]["recipe"] == {"random-projection:16:size": "16"} for c in done["cells"]
    )


def test_a_run_of_a_cell_is_an_ordinary_run(images):
    done = ok("reproduce fedpcl-table5 --on", images, *TINY, "--only", "loss=FedPCL").data
    (cell,) = done["cells"]
    path = Path(cell["runs"][0])
    assert path.parent == Path(os.environ["FEDCACHE_HOME"]) / "runs"
    again = ok("train", "--config", path / "config.toml").data
    assert 100 * again["accuracy"]["client_mean"] == pytest.approx(
        cell["values"]["client_mean"]["got"]["mean"]
    )


@pytest.mark.slow
def test_the_papers_own_data_is_no_proxy_and_departures_are_said(images, own_home):
    e = parse(SMALL.replace("DATA", images), "small")
    report = reproduce(e, Home(own_home))
    a, b = report.lines
    assert not report.proxy
    assert a.measured["client_mean"].n == 2
    assert "nonesuch" in b.why_not
    assert not b.measured
    assert len(rows(report)) == 2, "a difference with a row that was not run is not shown"
    fewer = reproduce(e, Home(own_home), Options(rounds=1))
    assert rows(fewer)[0][0] == "departs"
    assert "rounds: 1 instead of 2" in markdown(fewer)


@pytest.mark.slow
def test_only_a_proxy_is_scaled_down(images, own_home):
    scheme = 'scheme = "iid"\nargs = { clients = 500 }\nparticipation = "400"'
    text = SMALL.replace('scheme = "feature-shift"\nargs = { shots = 4, tests = 2 }', scheme)
    e = parse(text.replace("DATA", images), "small")
    with pytest.raises(FedcacheError, match="108 rows"):  # 3 domains x 3 classes x 12
        reproduce(e, Home(own_home))
    report = reproduce(e, Home(own_home), Options(on=images))
    assert report.lines[0].measured["client_mean"].mean is not None
    said = " ".join(report.departures)
    assert "partition: clients 108 instead of 500" in said
    assert "participation: all 108 clients instead of 400" in said


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("fedpcl-tabel2",), 2, "fedpcl-table2"),
        (("info",), 2, "fedpcl-table2"),
        (words_of("fedpcl-table5 --only los=FedPCL"), 2, "loss"),
        (words_of("fedpcl-table5 --on digist"), 2, "digits"),
        (words_of("fedpcl-table5 --on digits --on digits"), 2, "one dataset"),
        (words_of("fst-fig2 --on digits --backbones glyph-clip,cnn2"), 2, "clip-rn50"),
        (("fedpcl-table5",), 6, "--on digits"),
    ],
)
def test_wrong_words_and_missing_things_get_the_next_command(words, code, expected):
    must_fail(expected, "reproduce", *words, code=code)


@pytest.mark.slow
def test_list_tells_the_truth(own_home):
    def listed():
        return {e["name"]: e for e in ok("reproduce list").data["entries"]}

    before = listed()
    assert list(before) == list(names())
    for name, found in before.items():
        needs = {(n["kind"], n["name"]) for n in found["missing"]}
        assert found["ready"] == (not needs) == (found["status"] == "ready")
        methods = (
            {c.method for c in entry(name).cells} if "method" in READS[entry(name).kind] else set()
        )
        assert {n for k, n in needs if k == "method"} == methods - set(METHODS)
        assert all(n["command"] for n in found["missing"])
    assert before["fedpcl-table7"]["ready"]
    lacked = [
        n for n in before["fedpcl-table12"]["missing"] if n["name"] == "resnet18-birds-maxpool"
    ]
    assert "fedcache backbones import FILE --as resnet18-birds" in lacked[0]["command"]
    (own_home / "weights").mkdir(parents=True)
    (own_home / "weights" / "resnet18-birds.pth.tar").write_bytes(b"weights")
    after = {n["name"] for n in listed()["fedpcl-table12"]["missing"]}
    assert "resnet18-birds-maxpool" not in after
    assert "resnet18-aircraft-maxpool" in after


def test_the_layers_are_those_that_methods_build():
    cells = ok("reproduce fedpcl-table7").data["cells"]
    assert all(c["values"]["details"]["same"] for c in cells)


def test_tables_of_sizes_and_the_dots_need_no_backbone(images):
    sizes = ok("reproduce fedpcl-table8 --on", images).data["cells"]
    measured = {c["labels"]["dataset"]: c["values"]["per_class"]["got"]["mean"] for c in sizes}
    assert (measured["MNIST"], measured["MNIST-M"], measured["SVHN"]) == (10, 10, None)
    dots = ok("reproduce fedpcl-fig4 --on", images, "--only", "setting=feature shift").data[
        "cells"
    ][0]["values"]
    assert dots["sizes"]["got"]["text"] == "30, 30, 30"
    assert Path(dots["dots"]["got"]["text"]).read_bytes().startswith(b"\x89PNG")


def test_noise_pictures_are_the_image_and_what_noise_makes_of_it(images):
    cells = ok("reproduce fedpcl-fig6 --on", images).data["cells"]
    drawn = {
        tuple(c["labels"].values()): np.asarray(
            Image.open(c["values"]["picture"]["got"]["text"]), np.float64
        )
        / 255
        for c in cells
    }
    root = Path(images.removeprefix("folder:")) / "train"
    clean = drawn["none", "0"]
    assert any(
        np.array_equal(np.asarray(Image.open(p), np.float64) / 255, clean)
        for p in root.rglob("*.png")
    )
    inside = (clean > 0.3) & (clean < 0.5)  # clipping at 0 and 1 biases the rest
    for kind, p in (("Gaussian", 0.1), ("Gaussian", 0.2), ("Laplace", 0.1), ("Laplace", 0.2)):
        e = drawn[kind, str(p)] - (1 - p) * clean
        spread = 0.2 * (math.sqrt(2) if kind == "Laplace" else 1.0)
        assert 0.5 * spread < e[inside].std() < 1.1 * spread, (kind, p)
    for kind in (
        "Gaussian",
        "Laplace",
    ):  # the same draw: what differs is (0.9 - 0.8) x, to the rounding of two pictures
        one, two = drawn[kind, "0.1"], drawn[kind, "0.2"]
        free = (one > 0) & (one < 1) & (two > 0) & (two < 1)
        assert free.mean() > 0.5
        assert np.abs(one - two - 0.1 * clean)[free].max() <= 1.001 / 255


@pytest.mark.slow
def test_entropy_is_in_bits_and_below_its_bound(images):
    values = ok("reproduce fst-fig2 --on", images).data["cells"][0]["values"]
    assert values["entropy_bound"]["got"]["mean"] == pytest.approx(math.log2(3))
    assert (
        0.9 * math.log2(3)
        < values["entropy_least"]["got"]["mean"]
        <= values["entropy_mean"]["got"]["mean"]
    )
    assert values["entropy_mean"]["got"]["mean"] <= math.log2(3)


def test_formulas_and_heatmaps_are_measured(images):
    cost = ok("reproduce flesd-eq11")
    words = ("--on", images, *TINY[:2], *TINY[4:], "--only", "dataset=Digit-5")
    fusion = ok("reproduce fedpcl-fig3", *words)
    values = cost.data["cells"][0]["values"]
    assert values["flesd_scalars"]["difference"] == values["averaging_scalars"]["difference"] == 0
    assert values["cheaper"]["same"] is True
    # one backbone alone is all of them together: cosine 1 in a column of one row, and CKA 1
    for metric in ("heatmap", "cka"):
        text = fusion.data["cells"][0]["values"][metric]["got"]["text"]
        assert text.startswith("random-projection:16 1.000 1.000 1.000"), metric


def test_the_bound_of_theorem_41_is_that_worked_by_hand_for_the_engine():
    done = ok("reproduce fedpcl-theorem41").data
    assert not done["proxy"]
    small = {name: value["got"]["mean"] for name, value in done["cells"][0]["values"].items()}
    expected = {"bound_printed": 42.82371, "bound_corrected": 0.80662, "bound_capacity": 0.72242}
    assert small == pytest.approx(expected, abs=1e-5)


def test_a_head_on_cached_views_takes_the_place_of_an_encoder_on_images():
    planned = plan(
        entry("flesd-table1"),
        Options(on="digits", backbones=("glyph-clip",)),
        RequirementCheck(Home.from_environment()),
    )
    for p in planned:
        assert p.cell.backbones == ("glyph-clip",)
        assert p.cell.views == 8
        assert p.cell.set["encoder"] == "mlp"
        assert p.cell.method == ("flesd-head" if p.paper.method == "flesd" else p.paper.method)
        network = "ResNet-50" if p.paper.labels["dataset"] == "IN-100" else "ResNet-18"
        assert any(
            f"head on 8 cached views instead of a {network}" in said for said in p.departures
        )
        METHODS[p.cell.method].resolve(p.cell.preset, p.cell.set)
    same = plan(
        entry("flesd-table1"), Options(on="digits"), RequirementCheck(Home.from_environment())
    )
    assert {p.cell.backbones for p in same} == {("pixels",)}
    assert {p.cell.views for p in same} == {1}
