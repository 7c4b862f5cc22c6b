"""Extractions of texts: what changed is computed and nothing else, rows without a text are named, models read texts."""

import numpy as np
import pytest
import tiny_hf
from command import data_of, fedcache, ok
from failing_command import must_fail
from made_path import place_of
from refusal import refused

import fedcache as fc
from fedcache.errors import Exit

WORDS = ["sun", "rain", "wind", "snow", "bread", "soup", "fish", "salt"]


@pytest.fixture
def bag(encoders):
    """The name of a backbone of texts, in the working directory."""
    return f"module:{encoders}:bag"


def sentences(count):
    """Different texts of one of two topics."""
    draw = np.random.default_rng(0)
    return [
        " ".join(draw.choice(WORDS[4 * (i % 2) :][:4], 3)) + f" number {'x' * (i + 1)}"
        for i in range(count)
    ]


def write(path, texts):
    rows = [f"{text},{('weather', 'food')[i % 2]},shop{i % 3}" for i, text in enumerate(texts)]
    path.write_text("text,label,shop\n" + "\n".join(rows) + "\n")


def test_rows_without_a_text_are_quarantined_by_name_and_never_zeros(bag, tmp_path):
    bad = [0, 1, 2, 3, 9]  # four are a whole batch, which reaches no model
    write(tmp_path / "a.csv", ["  " if i in bad else text for i, text in enumerate(sentences(40))])
    words = f"extract --dataset texts:a.csv --backbones {bag} --batch 4 --chunk-rows 8"
    assert fedcache(words).code == Exit.CORRUPT
    done = fedcache(f"{words} --max-bad 5 --json")
    assert done.code == Exit.QUARANTINED
    assert done.data["bad"][3]["reason"] == "the text is empty"
    store = fc.Store.open(done.data["path"])
    (key,) = store.arrays
    rows = store.reader(key).all()[:, 0]
    assert np.flatnonzero(np.isnan(rows).any(1)).tolist() == bad
    assert np.flatnonzero(store.samples.ok == 0).tolist() == bad


@pytest.mark.slow
def test_methods_train_on_texts_and_their_models_read_texts(bag, tmp_path):
    write(tmp_path / "a.csv", sentences(60))
    ok(f"extract --dataset texts:a.csv --backbones {bag}")
    run = data_of("train --method fed3r --preset paper --by shop")
    assert run["accuracy"]["mean"] == 1.0
    assert run["dataset"]["holds"] == "texts"
    (tmp_path / "new.csv").write_text('id,text\nq,"bread soup"\np,"wind, snow"\nr,\n')
    found = fedcache(f"predict {run['path']} new.csv --json")
    assert found.code == Exit.QUARANTINED
    rows = [(row["name"], row["class"]) for row in found.data["rows"]]
    assert rows == [("q", "food"), ("p", "weather"), ("r", None)]
    assert data_of(f"evaluate {run['path']} --dataset texts:a.csv")
    model = fc.load_model(run["path"])
    assert model.predict(["rain and sun", "fish"]) == ["weather", "food"]
    assert model.predict("fish soup") == ["food"]
    refused(lambda: model.predict(["salt", 3]), "is not text")  # type: ignore[list-item]
    must_fail("", "train --method promptfl --dataset texts:a.csv")


def test_a_model_of_rows_predicts_from_a_store(bag):
    draw = np.random.default_rng(0)
    tone = np.arange(60) % 2
    waves = np.sin(np.arange(64) * (0.4 + 0.6 * tone[:, None])) + 0.1 * draw.normal(size=(60, 64))
    np.savez(
        "w.npz",
        waves=waves.astype(np.float32),
        label=np.array(["low", "high"])[tone],
        shop=np.arange(60) % 3,
    )
    name = bag.removesuffix("bag") + "spectrum"
    store = place_of(f"extract --dataset rows:w.npz --backbones {name}")
    run = data_of("train --method fed3r --by shop")
    assert run["accuracy"]["mean"] == 1.0
    must_fail(
        f"fedcache extract --dataset rows:w.npz --backbones {name}", f"predict {run['path']} w.npz"
    )
    assert len(data_of(f"predict {run['path']} --store {store}")["rows"]) == 60


def decoder_rows(done):
    """The features of every array of a store, as bytes, by the recipe's word for its output."""
    store = fc.Store.open(done.data["path"])
    return {
        str(array.recipe["pooling"]): store.reader(key).all().tobytes()
        for key, array in store.arrays.items()
    }


@pytest.mark.slow
def test_layers_of_one_backbone_are_arrays_of_one_command_whoever_computes_them(tmp_path):
    model = tiny_hf.decoder(tmp_path / "qwen")
    texts = sentences(40)
    texts[30] = "  "
    write(tmp_path / "a.csv", texts)
    words = (
        f"extract --dataset texts:{tmp_path}/a.csv --backbones hf:{model} --batch 8 --chunk-rows 8"
        " --max-bad 1 --recipe pooling=last,output=layer:1+layer:-2+layer:-1,max_tokens=30 --json"
    )
    done = [
        fedcache(f"{words} --workers {workers} --store {tmp_path}/s{workers}.zarr")
        for workers in (0, 1, 2)
    ]
    assert {one.code for one in done} == {Exit.QUARANTINED}, done[0].err
    rows = [decoder_rows(one) for one in done]
    assert set(rows[0]) == {"last(layer:1)", "last(layer:2)", "last"}
    assert rows[0] == rows[1] == rows[2]
