"""FLESD's entries: what was released, and images of ImageNet-100 at one size."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedcache import Store
from fedcache.config import Home
from fedcache.extract.datasets import paper
from fedcache.federate.methods import METHODS
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.reproduce.planning import Options, entry
from fedcache.reproduce.runner import Workbench, short_batches


@pytest.mark.parametrize("name", ["flesd-table1", "flesd-fig2", "flesd-fig4", "flesd-fig5"])
def test_what_they_run_is_what_was_released(name):
    small = {"encoder": "conv", "stem": "cifar", "batch": 1024, "tau": 0.4, "esd_batch": 256}
    large = {"encoder": "resnet50", "stem": "imagenet", "batch": 128, "tau": 0.2, "esd_batch": 128}
    # Batches and temperatures of the release's README, tiny_imagenet.sh and imagenet100.sh.
    released = {
        "CIFAR10": small,
        "CIFAR100": small,
        "Tiny-IN": {**small, "batch": 256, "esd_batch": 128},
        "IN-100": large,
    }
    for cell in entry(name).cells:
        hp = METHODS[cell.method].resolve(cell.preset, cell.set)
        assert cell.preset == "official"
        assert hp["augment"] == ("supervised" if cell.method == "local-supervised" else "auto")
        assert hp["drop_last"] is False, "the released local loader keeps its last batch"
        if name == "flesd-table1":
            wanted = {k: v for k, v in released[cell.labels["dataset"]].items() if k in hp}
            assert {k: hp[k] for k in wanted} == wanted, cell.at


@pytest.mark.slow
def test_images_of_imagenet_100_are_stored_at_one_size(tmp_path):
    known = paper.read("imagenet100")
    root = tmp_path / "ILSVRC2012"
    for n, folder in enumerate(known.folders):
        for split in ("train", "val"):
            (root / split / folder).mkdir(parents=True)
            pixels = np.full((11 + n % 5, 12 + n % 7, 3), n, np.uint8)
            Image.fromarray(pixels).save(root / split / folder / f"{folder}_{split}.JPEG")
    cell = next(c for c in entry("flesd-table1").cells if c.labels["dataset"] == "IN-100")
    options = Options(data={"imagenet100": str(root)})
    bench = Workbench(Home(tmp_path / "home"), options, Silent(), Stop(), tmp_path, tmp_path)
    found = bench.features(cell)
    store = Store.open(found.path)
    (array,) = store.arrays.values()
    assert array.shape == (200, 1, 224, 224, 3)
    assert array.recipe["crop_pct"] == 0.875
    assert array.recipe["interpolation"] == "bilinear"
    assert abs(int(store.reader(found.keys[0]).all()[-1].mean()) - 99) <= 2


def test_a_proxy_whose_public_rows_fill_no_queue_takes_them_all():
    cell = next(c for c in entry("flesd-table1").cells if c.method == "flesd")
    for proxy, public, changed in (
        (True, 300, {"anchors": "all", "esd_drop_last": False}),
        (True, 8333, {}),
        (False, 300, {}),
    ):
        clients = [SimpleNamespace(train=np.arange(n)) for n in (public, 900)]
        settings, said = short_batches(cell, SimpleNamespace(clients=clients), proxy=proxy)
        assert settings == (cell.set | changed)
        assert len(said) == bool(changed) + proxy  # a substitute says its steps
