"""Encoders of texts: features are those of the model alone with each text, text features those of prompts."""

import json
import shutil

import numpy as np
import pytest
import tiny_hf
import torch
import transformers
from command import data_of, fedcache
from failing_command import must_fail
from pictures import folder
from refusal import refused
from tolerance import SUMS, close
from weights_at import encoder_at

from fedcache import Store
from fedcache.errors import Exit
from fedcache.extract.backbones import lookup
from fedcache.extract.backbones.own import content_sha256
from fedcache.extract.backbones.text_encoder import TextEncoder, tokens_of
from fedcache.plugins import note_named

WORDS = [
    "a",
    "text",
    "about",
    "cat",
    "dog",
    "bird",
    ".",
    "sleeps",
    "the",
    "in",
    "sun",
    "##s",
    "and",
    "runs",
]
TEXTS = [
    "The cat sleeps.",
    "the dogs and the birds run in the sun and the cat sleeps in the sun and a dog runs",
    "Bird",
    "a dog runs in the sun.",
    "cats and dogs",
    "unheard of",
    "the sun",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_hf.sentence_encoder(tmp_path_factory.mktemp("hf") / "tiny", WORDS)


def csv(path, texts=TEXTS, labels="abababa"):
    lines = [f'"{text}",{label}' for text, label in zip(texts, labels, strict=False)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return path


def by_hand(model, text):
    """The mean of a text's last states: transformers alone, one text at a time, so that there is no padding."""
    net = transformers.AutoModel.from_pretrained(model).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(model)(
        text, truncation=True, max_length=12, return_tensors="pt"
    )
    with torch.inference_mode():
        return net(**tokens).last_hidden_state[0].double().mean(0).numpy()


def rows_of(store, key):
    return store.reader(key).all()[:, 0]


def extracted(path, model, *words):
    done = data_of(
        f"extract --dataset texts:{path} --backbones hf:{model} --recipe dtype=float32", *words
    )
    return Store.open(done["path"]), done["arrays"][0]["key"]


@pytest.mark.slow
def test_stored_features_are_the_mean_of_the_states_of_each_text_alone(model, tmp_path):
    """For every batch size and order of rows."""
    expected = np.stack([by_hand(model, text) for text in TEXTS])
    assert expected.std(0).max() > 1e-2
    turned = csv(tmp_path / "turned.csv", TEXTS[::-1], "abababa"[::-1])
    for batch in (2, 3, 7):
        store, key = extracted(
            turned, model, "--batch", batch, "--store", tmp_path / f"{batch}.zarr"
        )
        assert close(rows_of(store, key)[::-1], expected, SUMS)
    recipe = store.arrays[key].recipe
    told = [recipe[name] for name in ("size", "decoder", "pooling", "backbone", "weights")]
    assert told == [12, "utf-8", "mean", "hf:tiny", content_sha256(model)]
    assert {"transformers", "tokenizers"} <= set(store.arrays[key].how)


def test_text_features_of_classes_are_those_of_prompts_as_texts(model, tmp_path):
    texts = ["the cat sleeps", "a dog runs"] * 5
    path = csv(tmp_path / "t.csv", texts, ["cat", "dog"] * 5)  # type: ignore[arg-type]
    store, _ = extracted(path, model)
    expected = np.stack([by_hand(model, f"a text about {name}.") for name in ("cat", "dog")])
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert close(store.text("hf:tiny"), unit, SUMS)
    again, _ = extracted(path, model, "--text", "the {}")
    assert again.templates("hf:tiny") == ["the {}"]
    assert np.abs(again.text("hf:tiny") - unit).max() > 1e-3


@pytest.mark.slow
def test_texts_that_are_cut_are_counted_and_said_once(model, tmp_path):
    path = csv(tmp_path / "t.csv")
    words = f"extract --dataset texts:{path} --backbones hf:{model}"
    done = fedcache(f"{words} --batch 2")
    # The second text has 19 words, and no other has more than the ten that fit between the two marks.
    assert done.out.count("hf:tiny reads 12 tokens of a text: the rest of 1 of the") == 1
    assert data_of(words)["cut"] == {}  # nothing was computed
    assert data_of(f"{words} --fresh --store {tmp_path / 's.zarr'} --batch 4")["cut"] == {
        "hf:tiny": 1
    }


def test_a_slow_tokenizer_counts_the_same_texts(model):
    encoder = TextEncoder(f"hf:{model}")
    exact = [" ".join(["sun"] * n) for n in (9, 10, 11, 30)]
    assert encoder.items(exact)[1].tolist() == [False, False, True, True]
    fast = transformers.AutoTokenizer.from_pretrained(model)

    def slow(*args, **more):
        return transformers.BatchEncoding({"input_ids": fast(*args, **more)["input_ids"]})

    found = tokens_of(slow, exact, encoder.length)
    expected = encoder.prepare(exact)
    assert found.cut.tolist() == [False, False, True, True]
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.ends.tolist() == expected.ends.tolist()


def test_models_that_number_positions_behind_the_padding_read_fewer_tokens(model, tmp_path):
    config = transformers.RobertaConfig(
        **tiny_hf.SHAPE,
        vocab_size=30,
        intermediate_size=16,
        max_position_embeddings=14,
        pad_token_id=1,
    )
    path = tmp_path / "roberta"
    transformers.RobertaModel(config, add_pooling_layer=False).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(path)
    encoder = TextEncoder(f"hf:{path}")
    assert encoder.length == 12
    assert np.isfinite(encoder.encode_texts([" ".join(["sun"] * 40)])).all()


def test_a_row_is_of_its_folder_and_refuses_what_is_of_images(model, tmp_path):
    row = lookup(f"hf:{model}")
    assert row.reads == "texts"
    assert row.width == 16
    assert row.text_width == 16
    assert row.provider == "text_encoder"
    encoder = encoder_at(row, model)
    refused(
        lambda: encoder.image(torch.zeros(1, 8, 8, 3, dtype=torch.uint8)), "hf:tiny reads texts"
    )
    assert data_of(f"backbones verify hf:{model}")["width"] == 16
    words = f"extract --dataset texts:{csv(tmp_path / 't.csv')} --backbones hf:{model}"
    for option in ("--views 2", "--size 32", "--recipe norm=half", "--recipe output=cls"):
        must_fail("", f"{words} {option}")


def test_a_module_has_no_output_to_choose(tmp_path, encoders):
    words = f"extract --dataset texts:{csv(tmp_path / 't.csv')} --backbones module:{encoders}:bag"
    must_fail("Unknown recipe key 'output'", f"{words} --recipe output=x")


def test_a_backbone_and_a_dataset_of_different_kinds_are_refused_with_the_command(
    model, tmp_path, encoders
):
    texts = f"texts:{csv(tmp_path / 't.csv')}"
    images = f"folder:{folder(tmp_path / 'images', train=2, test=1)}"
    np.save(tmp_path / "w.npy", np.zeros((3, 64), np.float32))
    for dataset, name in (
        (texts, "pixels"),
        (images, f"hf:{model}"),
        (texts, f"module:{encoders}:spectrum"),
        ("rows:w.npy", f"module:{encoders}:bag"),
    ):
        must_fail(
            f"fedcache extract --dataset {dataset} --backbones",
            f"extract --dataset {dataset} --backbones {name}",
        )
    assert not list((tmp_path / "home").glob("stores/*"))


def test_modules_are_given_texts_and_rows_as_they_are(encoders, tmp_path):
    note_named([f"module:{encoders}:{factory}" for factory in ("bag", "spectrum")])
    row = lookup(f"module:{encoders}:bag")
    assert row.reads == "texts"
    assert row.text_width == 256
    assert row.recipe.decoder == "utf-8"
    assert lookup(f"module:{encoders}:spectrum").text_width is None
    numbers = np.arange(30, dtype=np.int16).reshape(5, 2, 3) - 7
    np.savez(tmp_path / "w.npz", rows=numbers, label=np.arange(5) % 2)
    done = data_of(f"extract --dataset rows:w.npz --backbones module:{encoders}:loud --batch 2")
    store = Store.open(done["path"])
    (key,) = store.arrays
    assert rows_of(store, key).tolist() == [[n.max(), n.min()] for n in numbers]
    assert done["holds"] == "rows"


def test_rows_of_another_shape_are_refused_before_a_chunk_is_written(encoders, tmp_path):
    np.savez(tmp_path / "w.npz", rows=np.zeros((5, 65), np.float32), label=np.arange(5) % 2)
    name = f"module:{encoders}:spectrum"
    must_fail(
        "example = torch.zeros((65,), dtype=torch.float32)",
        f"extract --dataset rows:w.npz --backbones {name}",
    )
    assert not list((tmp_path / "home").glob("stores/*"))


def test_files_of_sentence_transformers_that_are_damaged_are_one_sentence(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "m")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(
        json.dumps({"pooling_mode_weightedmean_tokens": True})
    )
    refused(lambda: lookup(f"hf:{path}"), "unknown way")
    (path / "tokenizer.json").write_text("{}")
    (path / "1_Pooling/config.json").write_text("{}")
    done = fedcache(f"backbones verify hf:{path}")
    assert done.code in (Exit.ENVIRONMENT, Exit.USAGE)
    assert "Traceback" not in done.err
