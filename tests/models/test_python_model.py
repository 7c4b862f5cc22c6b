"""The model of a run in Python: what it says of images, wherever they are, of features, and what it is saved as."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import joblib
import numpy as np
import pytest
import torch
from heard import Heard
from pictures import folder
from PIL import Image
from refusal import refused, store_error
from sent import sent
from tolerance import close

import fedcache as fc
from fedcache.federate.engine.evaluate import BLOCK
from fedcache.federate.methods import METHODS
from fedcache.progress import Silent

STORE = "random-projection"


def extracted(place):
    images = folder(place / "shapes")
    return fc.extract(f"folder:{images}", backbones=[STORE], workers=0).path


@pytest.fixture
def store(once):
    return fc.Store.open(once(extracted))


@pytest.fixture
def run(store):
    return fc.train("fed3r", store, fc.partition(store, "iid", clients=3))


@pytest.fixture
def model(run):
    return run.model()


@pytest.fixture
def rows(store):
    """The features of the test rows."""
    return store.Xy(split="test")[0]


def pictures(place):
    return sorted(p for p in folder(place / "shapes", train=2, test=1).rglob("*.png"))


def test_features_of_the_test_rows_give_the_stored_accuracy(store, run):
    model = run.model()
    X, y = store.Xy(split="test")
    assert np.mean(np.array(model.predict(X)) == np.array(model.classes)[y]) == run.accuracy.mean
    assert np.allclose(model.probabilities(X).sum(1), 1.0)
    assert np.array_equal(model.scores(X).argmax(1), model.probabilities(X, 0.5).argmax(1))
    # an embedding is what the classifier reads
    W, b = (model.state[k].double().numpy() for k in ("server/W", "server/b"))
    assert close(model.embed(X) @ W.T + b, model.scores(X), X.shape[1])


def test_many_rows_are_scored_in_blocks_and_each_as_if_alone(store, run):
    model, (X, _) = run.model(), store.Xy()
    many = np.resize(X, (BLOCK + 3, X.shape[1]))
    again = np.arange(len(many)) % len(X)
    assert close(model.scores(many), model.scores(X)[again], X.shape[1])
    assert close(model.embed(many), model.embed(X)[again], X.shape[1])


@pytest.mark.slow
def test_the_same_images_as_files_a_folder_pillow_images_and_arrays_have_the_same_classes(
    run, tmp_path
):
    model = run.model()
    paths = pictures(tmp_path)
    held = [Image.open(p) for p in paths]
    arrays = np.stack([np.asarray(image.convert("RGB")) for image in held])
    from_files = model.predict(paths, top=3)
    assert model.predict(tmp_path / "shapes", top=3) == from_files
    assert model.predict(held, top=3) == from_files
    assert model.predict(arrays, top=3) == from_files
    assert model.predict(arrays[0]) == model.predict(held[0]) == [from_files[0][0][0]]


def test_a_turned_or_transparent_picture_in_memory_is_read_as_its_file(run, tmp_path):
    model = run.model()
    path = pictures(tmp_path)[0]
    turned = Image.open(path).convert("RGB").resize((30, 20))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    clear = Image.open(path).convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    clear.save(tmp_path / "clear.png")
    for name in ("turned.png", "clear.png"):
        file = tmp_path / name
        assert model.predict([Image.open(file)], top=3) == model.predict([file], top=3)
    (tmp_path / "text.png").write_text("no image")
    assert model.predict([tmp_path / "text.png", file]) == [None, *model.predict([file])]


def test_a_saved_model_says_the_same_without_its_run_and_is_not_written_over(rows, run, tmp_path):
    model = run.model()
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"another")
    refused(lambda: model.save(path))
    assert path.read_bytes() == b"another"
    assert model.save(str(path), overwrite=True) == path
    for other in (path, run, run.path, run.path.name[:6]):
        assert np.array_equal(fc.load_model(other).scores(rows), model.scores(rows))


def test_a_client_has_its_own_model_and_seeds_are_an_ensemble(store):
    parts = fc.partition(store, "iid", clients=3)
    run = fc.train("fedpcl", store, parts, seeds=[0, 1], rounds=2, settings={"dim": 4})
    X, y = store.Xy(split="test")
    name = run.result["clients"][1]
    members = [run.model(seed=s, client=name) for s in (0, 1)]
    right = [np.mean(model.scores(X).argmax(1) == y) for model in members]
    assert np.mean(right) == pytest.approx(run.accuracy.per_client[1], abs=1e-12)
    assert members[0].embed(X).shape == (len(X), 4)
    both = run.model(seed="all", client=name)
    assert both.scores(X).shape == (2, len(X), len(both.classes))
    assert np.allclose(both.probabilities(X), sum(m.probabilities(X) for m in members) / 2)
    for call in (run.model, lambda: run.model(seed=7, client=name), lambda: both.embed(X)):
        refused(call)


def test_what_a_model_does_not_read_is_refused(rows, run, model, tmp_path):
    for call, code in (
        (lambda: model.scores(np.zeros((3, 5))), 4),
        (lambda: model.embed("photo.jpg"), 2),
        (lambda: model.scores(np.full((2, 192), "a")), 4),
        (lambda: model.predict(tmp_path / "nothing.png"), 2),
        (lambda: model.predict(np.zeros((2, 8, 8, 4), np.uint8)), 2),
        (lambda: model.predict(tmp_path, top=4), 2),
        (lambda: model.probabilities(rows, temperature="1"), 2),
        (lambda: model.save(tmp_path / "m.npz"), 2),
        (lambda: fc.load_model(run, client=0), 2),
    ):
        refused(call, code=code)


def test_a_row_with_a_feature_that_is_no_finite_number_has_no_class(rows, model):
    expected = model.predict(rows)
    # the last is infinite as the float32 that models read
    for value in (np.nan, np.inf, -np.inf, 1e300):
        Z = rows.astype(np.float64)
        Z[1, 3] = value
        assert model.predict(Z) == [expected[0], None, *expected[2:]]
        assert model.predict(Z, top=2)[1] == []
        for found in (model.scores(Z), model.probabilities(Z), model.embed(Z)):
            assert np.isnan(found[1]).all()
            assert np.isfinite(found[[0, 2]]).all()


def test_the_order_of_classes_is_that_of_scores_where_probabilities_are_too_small_to_differ(
    rows, model
):
    order = model.scores(rows).argsort(1)[:, ::-1]
    cold = replace(model, predictor=replace(model.predictor, temperature=1e-5))
    # two of three classes, of some rows at least
    assert (model.probabilities(rows, 1e-5) == 0.0).sum() > len(rows)
    names = [[cold.classes[c] for c in row] for row in order]
    assert [[name for name, _ in row] for row in cold.predict(rows, top=3)] == names


def test_no_rows_have_no_classes_and_no_embeddings(rows, model):
    none = rows[:0]
    assert model.embed(none).shape == (0, rows.shape[1])
    assert model.scores(none).shape == model.probabilities(none).shape == (0, 3)
    assert model.predict(none) == []


@pytest.mark.slow
def test_a_model_goes_to_another_process_and_comes_back_the_same(rows, model, tmp_path):
    scores = model.scores(rows)  # what was made ready to score is no part of what is sent
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert np.array_equal(pool.submit(model.scores, rows).result(), scores)
    joblib.dump(model, tmp_path / "m.joblib")
    assert np.array_equal(joblib.load(tmp_path / "m.joblib").scores(rows), scores)
    # whoever listens stays where it is
    assert type(sent(replace(model, observer=Heard())).observer) is Silent


def test_a_method_of_ones_own_is_given_again(store, rows):
    own = replace(METHODS["fedncm"], name="mine", embed=lambda _down, _own, x, _ctx: torch.relu(x))
    run = fc.train(own, store, fc.partition(store, "iid", clients=3))
    store_error(run.model, "a custom method")
    assert (run.model(method=own).embed(rows) >= 0.0).all()
    assert fc.load_model(run, method=own).predict(rows) == run.model(method=own).predict(rows)
