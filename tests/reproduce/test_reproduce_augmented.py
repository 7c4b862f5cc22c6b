"""FedPCL's protocols that augment: DomainNet's training images, and the noisy images of table 15."""

import numpy as np
import pytest
from command import data_of
from made_path import place_of
from paper_trees import write_pairs

from fedcache import Store
from fedcache.config import Home
from fedcache.extract.augment import canonical, parse_policy
from fedcache.federate.methods import METHODS
from fedcache.reproduce.planning import RequirementCheck, entry

TINY = "--backbones random-projection:16 --seeds 0 --rounds 2"


def cells(name, *words):
    return [c for c in entry(name).cells if all(any(w in label for label in c.at) for w in words)]


def test_every_domainnet_cell_trains_on_flips_and_rotations_and_lacks_data_and_weights_alone(
    own_home,
):
    looker = RequirementCheck(Home(own_home))
    printed = 0
    for name in ("fedpcl-table3", "fedpcl-table11"):
        for cell in cells(name, "DomainNet"):
            printed += cell.printed[0] is not None
            assert cell.augment == "domainnet"
            assert cell.views == 9
            hp = METHODS[cell.method].resolve(cell.preset, cell.set)
            assert hp["train_view"] == "aug"
            # the released prototype pass reads the training images
            assert cell.method not in ("fedpcl", "fedproto") or hp["proto_view"] == "aug"
            assert {need.kind for need in looker.missing(entry(name), cell)} <= {"data", "weights"}
    assert printed == 7 + 28
    assert [str(step) for step in parse_policy("domainnet")] == ["flip=0.5", "rotate=30"]
    others = [c for c in entry("fedpcl-table11").cells if "DomainNet" not in c.at[0]]
    assert {(c.augment, c.views) for c in others} == {(None, 1)}


@pytest.mark.parametrize("kind", ["Gaussian", "Laplace"])
@pytest.mark.parametrize("p", ["0.1", "0.2"])
def test_a_noisy_image_of_table_15_is_the_papers(kind, p):
    (cell,) = cells("fedpcl-table15", "images", f"{kind}, s 0.2, p {p}")
    assert canonical(cell.augment) == f"{kind.lower()}-noise=51:{p}"  # 0.2 of 255 levels
    hp = METHODS[cell.method].resolve(cell.preset, cell.set)
    views = {"noise_on": "off", "train_view": "aug", "views": "twice", "proto_view": "center"}
    assert {name: hp[name] for name in views} == views


@pytest.mark.slow
def test_table_15_trains_on_noisy_images_and_tests_on_plain_ones(tmp_path):
    root = write_pairs("office10", "office_caltech_10", tmp_path / "here", 3)
    words = f"reproduce fedpcl-table15 {TINY} --data office10={root} --only method=FedPCL"
    made = data_of(words)["cells"]
    assert len({c["runs"][0] for c in made}) == len(made) == 9  # nine runs, none for another
    assert all(cell["run"] for cell in made)
    assert {c["fidelity"] for c in made if "images" in c["labels"].values()} == {"cached_views"}
    store = Store.open(place_of("inspect"))
    noises = [f"{kind}-noise=51:{p}" for kind in ("gaussian", "laplace") for p in (0.1, 0.2)]
    assert {a.recipe.get("augment", "") for a in store.arrays.values()} == {"", *noises}
    plain = [store.reader(key).all()[:, 0] for key in store.arrays]
    # view 0 is the plain image for every policy
    assert all(np.array_equal(plain[0], other) for other in plain[1:])
    assert all(cell["reused"] == len(cell["runs"]) == 1 for cell in data_of(words)["cells"])
