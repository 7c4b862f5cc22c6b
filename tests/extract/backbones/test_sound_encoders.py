"""Encoders of sounds: features are those of transformers for each sound alone."""

import shutil

import numpy as np
import pytest
import soundfile
import tiny_sounds
import torch
import transformers
from command import data_of, fedcache, ok
from failing_command import must_fail_machine
from refusal import refused
from tiny_sounds import RATE, tone
from tolerance import SUMS, close

from fedcache import Recipe, Store
from fedcache.errors import Exit
from fedcache.extract.backbones import lookup, lookup_recorded

KINDS = ("wav2vec2", "whisper", "ast")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    return {kind: tiny_sounds.encoder(folder / kind, kind) for kind in KINDS}


def by_hand(folder, kind, wave):
    """The feature of a sound alone, by transformers."""
    net = transformers.AutoModel.from_pretrained(folder).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    given = extractor(wave, sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        if kind == "ast":
            return net(**given).pooler_output[0].numpy()
        if kind == "wav2vec2":
            return net(**given).last_hidden_state[0].mean(0).numpy()
        # 100 frames are 2 s, so each is 0.02 s
        states = net.encoder(given["input_features"]).last_hidden_state[0]
        return states[: int(np.ceil(len(wave) / (RATE / 50)))].mean(0).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stored_features_are_those_of_each_sound_alone(models, kind, tmp_path):
    folder = tiny_sounds.tones(tmp_path / "tones")
    rows = []
    for words in ("--workers 0", "--batch 2 --workers 2"):
        done = data_of(
            f"extract --dataset sound:{folder} --backbones hf:{models[kind]} {words}"
            f" --recipe dtype=float32 --store {tmp_path}/{len(rows)}.zarr"
        )
        store = Store.open(done["path"])
        (key,) = store.arrays
        rows.append(store.reader(key).all()[:, 0])
    waves = [soundfile.read(folder / name, dtype="float32")[0] for name in store.samples.name]
    expected = np.stack([by_hand(models[kind], kind, wave) for wave in waves])
    assert close(rows[0], expected, SUMS)
    assert close(rows[1], expected, SUMS)
    assert expected.std(0).max() > 1e-3
    recipe = store.arrays[key].recipe
    assert recipe["decoder"] == "soundfile"
    assert recipe["rate"] == RATE
    assert recipe["size"] == 30 * RATE
    assert recipe["pooling"] == ("pooler_output" if kind == "ast" else "mean")
    assert {"soundfile", "scipy", "transformers"} <= set(store.arrays[key].how)
    assert done["holds"] == "sounds"
    assert list(store.samples.classes) == ["high", "low"]


@pytest.mark.slow
def test_files_that_cannot_be_decoded_are_quarantined_and_long_ones_counted(models, tmp_path):
    folder = tiny_sounds.tones(tmp_path / "tones")
    whole = (folder / "low/0.wav").read_bytes()
    (folder / "low/empty.wav").write_bytes(b"")
    (folder / "low/short.wav").write_bytes(whole[: len(whole) // 2])
    soundfile.write(folder / "low/silent.wav", np.zeros(0, np.float32), RATE)
    soundfile.write(folder / "low/brief.wav", tone(200, 24 / RATE), RATE)
    soundfile.write(folder / "high/long.wav", tone(900, 1.0), RATE)
    words = (
        f"extract --dataset sound:{folder} --backbones hf:{models['wav2vec2']} --max-bad 4"
        " --recipe seconds=0.6"
    )
    done = fedcache(f"{words} --json")
    assert done.code == Exit.QUARANTINED
    assert {row["name"]: row["reason"] for row in done.data["bad"]} == {
        "low/empty.wav": "it is not a readable WAV or FLAC file",
        "low/short.wav": "the file ends before its samples do",
        "low/silent.wav": "it is empty",
        "low/brief.wav": "the sound has only 24 samples at 16,000 Hz; the model needs at least 25",
    }
    assert done.data["cut"] == {"hf:wav2vec2": 1}
    again = fedcache(f"{words} --fresh --store {tmp_path}/s.zarr")
    assert "hf:wav2vec2 reads 0.6 s of a sound: the rest of 1 of the " in again.out


@pytest.mark.slow
def test_a_model_of_sounds_predicts_files(models, tmp_path):
    folder = tiny_sounds.tones(tmp_path / "tones", 24)
    ok(f"extract --dataset sound:{folder} --backbones hf:{models['wav2vec2']}")
    run = data_of("train --method fed3r --clients 2")
    soundfile.write(tmp_path / "new.wav", tone(930, 0.4), RATE)
    found = data_of(f"predict {run['path']} {tmp_path}/new.wav {folder}/low")
    assert len(found["rows"]) == 13
    assert found["rows"][0]["class"] in ("high", "low")


@pytest.mark.slow
def test_choices_are_in_the_recipe_and_find_their_row_again(models, tmp_path):
    name = f"hf:{models['wav2vec2']}"
    options = {"pooling": "max", "seconds": "2.5"}
    row = lookup(name, home=tmp_path / "home", options=options)
    recipe = Recipe.from_dict(row.recipe.to_dict())
    assert recipe.pooling == "max"
    assert recipe.size == 40_000
    assert row.text_width is None
    assert lookup_recorded(recipe, home=tmp_path / "home").recipe == recipe
    assert row.options_of(recipe) == options
    for wrong, said in (
        ({"seconds": "61"}, "reads 0.1 to 60 seconds"),
        ({"seconds": "x"}, "reads 0.1 to 60 seconds"),
        ({"pooling": "pooler_output"}, "Unknown pooling"),
    ):
        refused(lambda wrong=wrong: lookup(name, options=wrong), said)


def test_a_damaged_feature_extractor_is_one_sentence(models, tmp_path):
    folder = shutil.copytree(models["wav2vec2"], tmp_path / "m")
    told = '{"sampling_rate": 16000, "feature_extractor_type": "NoSuchExtractor"}'
    (folder / "preprocessor_config.json").write_text(told)
    must_fail_machine(
        "The feature extractor of hf:m cannot be read",
        f"backbones verify hf:{folder}",
    )
