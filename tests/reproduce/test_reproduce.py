"""``reproduce`` tells the truth about what is here and what was run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from command import data_of, words_of
from failing_command import must_fail
from pictures import folder
from PIL import Image
from small_entry import SMALL

from fedcache.config import Home
from fedcache.federate.methods import METHODS
from fedcache.reproduce.planning import READS, Options, RequirementCheck, entry, names, parse, plan
from fedcache.reproduce.render import markdown, rows
from fedcache.reproduce.runner import reproduce

TINY = words_of("--backbones random-projection:16 --seeds 0 --rounds 2")


@pytest.fixture
def images(tmp_path):
    """Three domains; two have names of Digit-5."""
    return f"folder:{folder(tmp_path / 'shapes', domains=('mnist', 'MNIST_M', 'chalk'))}"


def cells_of(*words):
    return data_of("reproduce", *words)["cells"]


@pytest.mark.slow
def test_a_proxy_end_to_end_and_again_from_what_is_stored(images, tmp_path):
    words = ("reproduce fedpcl-table2 --on", images, *TINY)
    first = data_of(*words, "-o", tmp_path / "t.md")
    assert first["proxy"] is True
    assert len(first["cells"]) == 16
    for cell in first["cells"]:
        assert cell["run"] == (cell["protocol"]["method"] in METHODS)
        assert cell["run"] or all(value["got"] is None for value in cell["values"].values())
    pcl = next(c for c in first["cells"] if c["labels"] == {"backbones": "1", "method": "FedPCL"})
    got = {name: value["got"]["mean"] for name, value in pcl["values"].items()}
    assert pcl["values"]["domain:mnist"]["printed"] == {"mean": 82.75, "std": 0.40, "text": None}
    assert 0 < got["domain:mnist-m"] <= 100, "MNIST_M is the paper's MNIST-M"
    assert got["domain:svhn"] is None
    assert got["params"] == 3 * 256
    said = " ".join([*first["departures"], *pcl["departures"]])
    assert "`random-projection:16` instead of `resnet18-quickdraw-maxpool`" in said
    assert "short batches" in said
    again = data_of(*words)
    assert all(c["reused"] == len(c["runs"]) for c in again["cells"])
    assert [c["values"] for c in again["cells"]] == [c["values"] for c in first["cells"]]


def test_a_run_of_a_cell_is_an_ordinary_run(images, own_home):
    words = ("fedpcl-table5", "--on", images, *TINY, "--recipe", "random-projection:16:size=16")
    labels = ("--only", "loss=FedPCL", "--only", "loss=Cross Entropy")
    cells = cells_of(*words, *labels)
    assert [c["labels"]["loss"] for c in cells] == ["Cross Entropy", "FedPCL"]
    for cell in cells:
        assert cell["protocol"]["recipe"] == {"random-projection:16:size": "16"}
    path = Path(cell["runs"][0])
    assert path.parent == own_home / "runs"
    again = data_of(f"train --config {path}/config.toml")
    got = cell["values"]["client_mean"]["got"]["mean"]
    assert 100 * again["accuracy"]["client_mean"] == pytest.approx(got)


@pytest.mark.slow
def test_a_proxy_of_table_3_has_controls_intervals_curves_and_steps(images):
    words = words_of("--backbones glyph-clip --only dataset=CIFAR-10 --seeds 0-2 --rounds 2")
    cells = cells_of("fst-table3", "--on", images, *words, "--only", "partition=IID")
    assert all(cell["run"] for cell in cells)
    trained = [cell for cell in cells if "curve" in cell["values"]]
    fixed = {cell["labels"]["loss"] for cell in cells} - {c["labels"]["loss"] for c in trained}
    assert fixed == {"CLIP-ZS", "control: centred zero-shot", "control: soft-means"}
    for cell in trained:
        got = cell["values"]["accuracy"]["got"]
        assert got["half"] == pytest.approx(4.302653 * got["std"] / 3**0.5, abs=1e-6)
        curve = cell["values"]["curve"]["got"]["curve"]
        assert len(curve) == 2
        assert curve[-1] == pytest.approx(got["mean"])
        # Clients of fewer than 50 rows take one step.
        assert "steps per client and local epoch (median): 1" in cell["departures"]
    (bias,) = [c for c in cells if c["labels"]["loss"] == "control: class bias alone"]
    result = json.loads((Path(bias["runs"][0]) / "result.json").read_text())
    assert result["traffic"]["exact"]["per_client_round"]["up"] == result["classes"]


@pytest.mark.slow
def test_the_papers_own_data_is_no_proxy_and_departures_are_said(images, own_home):
    e = parse(SMALL.replace("DATA", images), "small")
    report = reproduce(e, Home(own_home))
    a, b = report.lines
    assert not report.proxy
    assert a.measured["client_mean"].n == 2
    assert "nonesuch" in b.why_not
    assert len(rows(report)) == 2, "a difference with a row that was not run is not shown"
    fewer = reproduce(e, Home(own_home), Options(rounds=1))
    assert rows(fewer)[0][0] == "departs"
    assert "rounds 1 instead of 2" in markdown(fewer)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("fedpcl-tabel2", 2, "fedpcl-table2"),
        ("info", 2, "fedpcl-table2"),
        ("fedpcl-table5 --only los=FedPCL", 2, "loss"),
        ("fedpcl-table5 --on digist", 2, "digits"),
        ("fedpcl-table5 --on digits --on digits", 2, "one dataset"),
        ("fst-fig2 --on digits --backbones glyph-clip,cnn2", 2, "clip-rn50"),
        ("fedpcl-table5", 6, "--on digits"),
    ],
)
def test_wrong_words_and_missing_things_get_the_next_command(words, code, expected):
    must_fail(expected, f"reproduce {words}", code=code)


@pytest.mark.slow
def test_list_tells_the_truth(own_home):
    def listed():
        return {e["name"]: e for e in data_of("reproduce list")["entries"]}

    before = listed()
    assert list(before) == list(names())
    for name, found in before.items():
        needs = {(n["kind"], n["name"]) for n in found["missing"]}
        assert found["ready"] == (not needs) == (found["status"] == "ready")
        reads_methods = "method" in READS[entry(name).kind]
        methods = {c.method for c in entry(name).cells} if reads_methods else set()
        assert {n for k, n in needs if k == "method"} == methods - set(METHODS)
        assert all(n["command"] for n in found["missing"])
    assert before["fedpcl-table7"]["ready"]
    (own_home / "weights").mkdir(parents=True)
    (own_home / "weights/resnet18-birds.pth.tar").write_bytes(b"weights")

    def lacked(entries):
        return {n["name"]: n["command"] for n in entries["fedpcl-table12"]["missing"]}

    command = "fedcache backbones import FILE --as resnet18-birds"
    assert command in lacked(before)["resnet18-birds-maxpool"]
    after = lacked(listed())
    assert "resnet18-birds-maxpool" not in after
    assert "resnet18-aircraft-maxpool" in after


def test_the_layers_are_those_that_methods_build():
    assert all(c["values"]["details"]["same"] for c in data_of("reproduce fedpcl-table7")["cells"])


def test_tables_of_sizes_and_the_dots_need_no_backbone(images):
    sizes = cells_of("fedpcl-table8", "--on", images)
    measured = {c["labels"]["dataset"]: c["values"]["per_class"]["got"]["mean"] for c in sizes}
    assert measured["MNIST"] == 10
    assert measured["MNIST-M"] == 10
    assert measured["SVHN"] is None
    (cell,) = cells_of("fedpcl-fig4", "--on", images, "--only", "setting=feature shift")
    texts = {name: value["got"]["text"] for name, value in cell["values"].items()}
    assert texts["sizes"] == "30, 30, 30"
    assert Path(texts["dots"]).read_bytes().startswith(b"\x89PNG")


def test_noise_pictures_are_the_image_and_what_noise_makes_of_it(images):
    def pixels(path):
        return np.asarray(Image.open(path), np.float64) / 255

    drawn = {
        tuple(c["labels"].values()): pixels(c["values"]["picture"]["got"]["text"])
        for c in cells_of("fedpcl-fig6", "--on", images)
    }
    root = Path(images.removeprefix("folder:")) / "train"
    clean = drawn["none", "0"]
    assert any(np.array_equal(pixels(p), clean) for p in root.rglob("*.png"))
    inside = (clean > 0.3) & (clean < 0.5)  # clipping at 0 and 1 biases the rest
    for kind, spread in (("Gaussian", 0.2), ("Laplace", 0.2 * math.sqrt(2))):
        one = drawn[kind, "0.1"]
        two = drawn[kind, "0.2"]
        for noisy, p in ((one, 0.1), (two, 0.2)):
            e = noisy - (1 - p) * clean
            assert 0.5 * spread < e[inside].std() < 1.1 * spread, (kind, p)
        # the same draw: what differs is (0.9 - 0.8) x, to the rounding of two pictures
        free = (one > 0) & (one < 1) & (two > 0) & (two < 1)
        assert free.mean() > 0.5
        assert np.abs(one - two - 0.1 * clean)[free].max() <= 1.001 / 255


def test_formulas_and_heatmaps_are_measured(images):
    values = cells_of("flesd-eq11")[0]["values"]
    assert values["flesd_scalars"]["difference"] == values["averaging_scalars"]["difference"] == 0
    assert values["cheaper"]["same"] is True
    words = ("--on", images, *TINY[:2], *TINY[4:], "--only", "dataset=Digit-5")
    fusion = cells_of("fedpcl-fig3", *words)[0]["values"]
    # one backbone alone is all of them together: cosine 1 in a column of one row, and CKA 1
    for metric in ("heatmap", "cka"):
        text = fusion[metric]["got"]["text"]
        assert text.startswith("random-projection:16 1.000 1.000 1.000"), metric
    entropy = cells_of("fst-fig2", "--on", images)[0]["values"]
    least, mean, bound = (
        entropy[f"entropy_{name}"]["got"]["mean"] for name in ("least", "mean", "bound")
    )
    assert bound == pytest.approx(math.log2(3)), "entropy is in bits"
    assert 0.9 * bound < least <= mean <= bound


def test_the_bound_of_theorem_41_is_that_worked_by_hand_for_the_engine():
    done = data_of("reproduce fedpcl-theorem41")
    assert not done["proxy"]
    small = {name: value["got"]["mean"] for name, value in done["cells"][0]["values"].items()}
    expected = {"bound_printed": 42.82371, "bound_corrected": 0.80662, "bound_capacity": 0.72242}
    assert small == pytest.approx(expected, abs=1e-5)


def test_a_head_on_cached_views_takes_the_place_of_an_encoder_on_images():
    def cells(**options):
        looker = RequirementCheck(Home.from_environment())
        return plan(entry("flesd-table1"), Options(on="digits", **options), looker)

    for p in cells(backbones=("glyph-clip",)):
        assert p.cell.backbones == ("glyph-clip",)
        assert p.cell.views == 8
        assert p.cell.set["encoder"] == "mlp"
        assert p.cell.method == ("flesd-head" if p.paper.method == "flesd" else p.paper.method)
        network = "ResNet-50" if p.paper.labels["dataset"] == "IN-100" else "ResNet-18"
        assert f"head on 8 cached views instead of a {network}" in " ".join(p.departures)
        METHODS[p.cell.method].resolve(p.cell.preset, p.cell.set)
    assert {(p.cell.backbones, p.cell.views) for p in cells()} == {(("pixels",), 1)}
