"""What a run got wrong, as thumbnails: the right rows with the right words, and no image that was not asked for."""

import base64
import io
import re
from html import unescape

import numpy as np
import pytest
from command import data_of, ok
from draws import examples
from failing_command import must_fail
from homes import made_once
from hypothesis import given
from hypothesis import strategies as st
from made_path import place_of
from pictures import HOSTILE, folder, hostile_folder
from PIL import Image

import fedcache as fc
from fedcache.report.render import SIDE, thumbnail_uri
from fedcache.runs.partitions import load_partition

IID = "--scheme iid --clients 4 --participation all"
PRIVATE = "--dp-clip 1 --dp-noise 1"


@made_once
def store(place):
    images = hostile_folder(place / "shapes", train=8, test=5, classes=6)
    return place_of(f"extract -d folder:{images} -b random-projection --size 8")


def shown(text):
    """(name, class, taken for, probability, client, image) of every thumbnail of a page."""
    pattern = (
        r'<img src="data:image/(?:png|jpeg);base64,([^"]+)" width="64" height="64" alt="([^"]*)"[^>]*><p>(.*?)<br>.*?'
        r"<strong>(.*?)</strong><br>([\d.]+) %(?:<br><small>(.*?)</small>)?</p>"
    )
    found = re.findall(pattern, text)
    assert len(found) == text.count("<img ")
    return [
        (
            unescape(name),
            unescape(truth),
            unescape(other),
            p,
            client,
            Image.open(io.BytesIO(base64.b64decode(raw))),
        )
        for raw, name, truth, other, p, client in found
    ]


def wrong_rows(model, store, rows):
    """(-probability, name, class, taken for) of the rows that a model gets wrong, by its own figures."""
    x = store.reader(next(iter(store.arrays))).rows(rows)[:, 0]
    p = model.probabilities(x)
    s = store.samples
    predicted = model.scores(x).argmax(1)
    return [
        (-p[i, predicted[i]], s.name[r], s.classes[s.label[r]], s.classes[predicted[i]])
        for i, r in enumerate(rows)
        if predicted[i] != s.label[r]
    ]


def page_of(tmp_path, *words):
    out = tmp_path / "page.html"
    ok("report", *words, "--embed", "none", "-o", out)
    return out.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_most_confident_mistakes_of_one_model_with_their_images(store, tmp_path):
    run = data_of(f"train --method fed3r --preset paper {IID}")
    assert "<img" not in page_of(tmp_path)  # nobody asked
    text = page_of(tmp_path, "--with-images")
    found = shown(text)
    held = fc.Store.open(store)
    expected = sorted(
        wrong_rows(fc.load_model(run["path"]), held, np.flatnonzero(held.samples.split == 1))
    )
    assert 3 < len(expected) <= 24
    assert [(n, t, o, p) for n, t, o, p, *_ in found] == [
        (n, t, o, f"{-100 * p:.2f}") for p, n, t, o in expected
    ]
    assert HOSTILE not in text


@pytest.mark.slow
def test_of_clients_own_models_each_is_asked_about_its_own_rows(store, tmp_path):
    ok(f"partition --store {store} --scheme dirichlet --clients 4 --alpha 1 --name four")
    words = "--partition four --participation all --rounds 2 --set batch=4 --seeds 0,1"
    run = data_of(f"train --method fedrep {words}")
    held = fc.Store.open(store)
    expected = []
    parts = load_partition(held, "four").to_payload()
    for client in parts["clients"]:
        model = fc.load_model(run["path"], client["name"])  # of the first seed
        rows = np.array(parts["test"] if client["test"] is None else client["test"])
        expected += [(*found, client["name"]) for found in wrong_rows(model, held, rows)]
    found = shown(page_of(tmp_path, "--with-images"))
    assert len(found) == min(24, len(expected)) > 3
    told = {(n, t, o, p, c) for n, t, o, p, c, _ in found}
    assert told <= {(n, t, o, f"{-100 * p:.2f}", c) for p, n, t, o, c in expected}
    surest = [-100 * e[0] for e in sorted(expected)]
    assert [float(p) for _, _, _, p, *_ in found] == pytest.approx(surest[: len(found)], abs=0.006)


@pytest.mark.slow
def test_a_dataset_that_has_moved_is_named_and_a_changed_image_is_not_shown(tmp_path):
    images = folder(tmp_path / "own", train=6, classes=6)
    ok(f"extract -d folder:{images} -b random-projection --size 8")
    ok(f"train --method fed3r --preset paper {IID}")
    there = shown(page_of(tmp_path, "--with-images"))
    assert there
    moved = images.rename(tmp_path / "moved")
    text = page_of(tmp_path, "--with-images")
    assert "<img" not in text
    assert "--data own=PATH" in text
    found = ("--with-images", "--data", f"own={moved}")
    assert [t[:5] for t in shown(page_of(tmp_path, *found))] == [t[:5] for t in there]
    Image.new("RGB", (24, 24), (1, 2, 3)).save(moved / there[0][0])
    assert [t[0] for t in shown(page_of(tmp_path, *found))] == [t[0] for t in there[1:]]


@pytest.mark.slow
def test_images_of_a_private_run_are_refused_and_those_of_a_simulation_shown(store, tmp_path):
    simulated = place_of(f"train --method fedavg --rounds 1 {IID} {PRIVATE} --dp-seed 0")
    assert shown(page_of(tmp_path, simulated, "--with-images"))
    private = place_of(f"train --method fedavg --rounds 1 {IID} {PRIVATE} --dp-allow evaluation")
    model = f"{private}/models/seed-0.safetensors"
    for words in (
        f"report {private}",
        "report",
        f"evaluate {private} --store {store}",
        f"evaluate {model} --store {store}",
    ):
        must_fail("", f"{words} --with-images -o {tmp_path}/no.html")


@pytest.mark.slow
def test_evaluate_shows_mistakes_on_another_dataset(store, tmp_path):
    run = data_of(f"train --method fed3r --preset paper {IID}")["path"]
    other = folder(tmp_path / "other", train=1, test=6, classes=6)
    page = tmp_path / "e.html"
    words = f"evaluate {run} -d folder:{other} --workers 0 --split test"
    told = data_of(f"{words} --with-images -o {page}")["runs"][0]["measures"]
    found = shown(page.read_text())
    assert len(found) == min(24, told["rows"] - told["right"]) > 0
    for name, truth, predicted, _, _, image in found:
        assert name.split("/")[1] == truth != predicted
        assert np.array_equal(
            np.asarray(image.convert("RGB")), np.asarray(Image.open(other / name))
        )


@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    mode=st.sampled_from(["RGB", "L", "RGBA", "P"]),
)
@examples(30, 300)
def test_a_thumbnail_is_small_and_pixels_alone(width, height, mode):
    image = Image.new(mode, (width, height))
    image.info |= {"icc_profile": b"a profile" * 50, "comment": b"at home", "dpi": (300, 300)}
    image.getexif()[0x010E] = "a name"
    head, raw = thumbnail_uri(image).split(",")
    made = Image.open(io.BytesIO(base64.b64decode(raw)))
    made.load()
    assert max(made.size) == min(SIDE, max(width, height))
    assert head == (
        "data:image/png;base64" if max(width, height) <= SIDE else "data:image/jpeg;base64"
    )
    assert not dict(made.getexif())
    assert not {"icc_profile", "comment", "exif"} & set(made.info)
