"""Folders of transformers' models are backbones: their features, their preprocessing, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_hf
import torch
import transformers
from checkpoint_files import images
from command import data_of, fedcache
from made_path import place_of
from pictures import folder
from refusal import machine_error, refused
from tolerance import SUMS, close
from weights_at import encoder_at

from fedcache import Store, optional
from fedcache.errors import Exit
from fedcache.extract.backbones import library_caches, lookup
from fedcache.extract.backbones.hugging_face import fetch
from fedcache.extract.backbones.hugging_face_folder import PATTERNS, PROMPTS, read_preprocessing
from fedcache.extract.backbones.own import content_sha256
from fedcache.extract.backbones.text_encoder import TextEncoder

IMAGES = images(3, 16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {kind: tiny_hf.folder(root / kind, kind) for kind in ("vit", "clip", "resnet", "bert")}


def opened(path, output=None):
    row = lookup(f"hf:{path}", output=output)
    return row, encoder_at(row, path)


def pixels():
    """What transformers' own arithmetic makes of the images, in float64."""
    x = (IMAGES.double() / 255 - torch.tensor([0.5] * 3)) / torch.tensor([0.25, 0.5, 1.0])
    return x.permute(0, 3, 1, 2).float()


@pytest.mark.parametrize(
    ("kind", "output", "word", "feature"),
    [
        ("vit", None, "cls", lambda m, x: m(x).last_hidden_state[:, 0]),
        (
            "vit",
            "last_hidden_state",
            "avg(last_hidden_state)",
            lambda m, x: m(x).last_hidden_state.mean(1),
        ),
        ("resnet", None, "pooler_output", lambda m, x: m(x).last_hidden_state.mean((2, 3))),
        (
            "resnet",
            "last_hidden_state",
            "avg(last_hidden_state)",
            lambda m, x: m(x).last_hidden_state.mean((2, 3)),
        ),
        (
            "clip",
            None,
            "image_projection",
            lambda m, x: m.visual_projection(m.vision_model(x).pooler_output),
        ),
    ],
)
def test_the_features_are_transformers_own(saved, kind, output, word, feature):
    row, encoder = opened(saved[kind], output)
    model = transformers.AutoModel.from_pretrained(saved[kind]).eval()
    with torch.inference_mode():
        expected = feature(model, pixels())
    assert row.name == f"hf:{kind}"
    assert row.width == expected.shape[1]
    assert row.recipe.pooling == word
    assert close(encoder.image(IMAGES), expected, SUMS)
    assert expected.std(0).max() > 1e-3
    read = (row.recipe.size, row.recipe.resize, row.recipe.interpolation)
    assert read == (16, "squash", "bilinear")


def test_a_bfloat16_checkpoint_is_computed_in_float32(saved, tmp_path):
    """As ``fedcache inspect`` says; transformers alone would compute in the dtype of the checkpoint."""
    half = transformers.AutoModel.from_pretrained(saved["vit"], dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "vit")
    shutil.copy(saved["vit"] / "preprocessor_config.json", tmp_path / "vit")
    _, encoder = opened(tmp_path / "vit")
    with torch.inference_mode():
        expected = half.float().eval()(pixels()).last_hidden_state[:, 0]
    # One part in 256 is lost in bfloat16; float32 keeps these features to one in a million.
    assert (encoder.image(IMAGES) - expected).abs().max() < 1e-5


def test_features_that_depend_on_the_batch_are_refused(saved, monkeypatch):
    plain = transformers.ViTModel.forward

    def centred(self, *given, **words):
        out = plain(self, *given, **words)
        out.last_hidden_state = out.last_hidden_state - out.last_hidden_state.mean(0)
        return out

    monkeypatch.setattr(transformers.ViTModel, "forward", centred)
    refused(
        lambda: lookup(f"hf:{saved['vit']}"),
        "The features that hf:vit gives an item depend on the other items of its batch",
    )


def test_a_text_tower_gives_unit_rows_of_its_own(saved):
    row, encoder = opened(saved["clip"])
    assert row.text_width == row.width == 8
    model = transformers.CLIPModel.from_pretrained(saved["clip"]).eval()
    # [CLS] a photo of a cat|dog [SEP]
    ids = torch.tensor([[2, 4, 5, 6, 4, 7, 3], [2, 4, 5, 6, 4, 8, 3]])
    with torch.inference_mode():
        expected = model.text_projection(model.text_model(input_ids=ids).pooler_output)
    expected = expected / expected.norm(dim=1, keepdim=True)
    found = encoder.text(["a photo of a cat", "a photo of a dog"])
    assert close(found, expected, SUMS)
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert lookup(f"hf:{saved['vit']}").text_width is None


def test_texts_are_the_mean_of_their_tokens_without_padding(saved):
    encoder = TextEncoder(f"hf:{saved['bert']}")
    found = encoder.encode_texts(["a cat", "a photo of a dog ."])
    assert found.shape == (2, 16)
    # Each text alone has no padding: its row is the plain mean of transformers' states.
    ids = ([2, 4, 7, 3], [2, 4, 5, 6, 4, 8, 9, 3])
    for row, one in zip(found, ids, strict=True):
        with torch.inference_mode():
            states = encoder.model.module(input_ids=torch.tensor([one])).last_hidden_state
        assert close(row, states.mean(1)[0], SUMS)
    assert encoder.encode_texts([]).shape == (0, 16)
    for wrong in ("a cat", [1]):
        refused(lambda wrong=wrong: encoder.encode_texts(wrong), "list of strings")  # type: ignore[arg-type]


def test_sentence_transformers_files_say_how_to_pool(saved, tmp_path):
    path = shutil.copytree(saved["bert"], tmp_path / "s")
    (path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    types = ("Transformer", "Pooling", "Normalize")
    steps = [{"type": f"sentence_transformers.models.{name}"} for name in types]
    (path / "modules.json").write_text(json.dumps(steps))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    encoder = TextEncoder(f"hf:{path}")
    assert encoder.output.pooling == "cls"
    assert encoder.model.unit is True
    assert encoder.length == 4
    assert close(np.linalg.norm(encoder.encode_texts(["a cat"]), axis=1), [1.0], SUMS)
    with torch.inference_mode():
        state = encoder.model.module(input_ids=torch.tensor([[2, 4, 5, 3]])).last_hidden_state[0, 0]
    expected = (state / state.norm()).numpy()
    # cut to four tokens
    assert close(encoder.encode_texts(["a photo of a dog ."])[0], expected, SUMS)
    told = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (path / "1_Pooling/config.json").write_text(json.dumps(told))
    assert lookup(f"hf:{path}").recipe.pooling == "last"
    (path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    refused(lambda: TextEncoder(f"hf:{path}"), "unknown way", "Dense")


@pytest.mark.slow
def test_one_folder_has_one_name_however_it_is_spelled(saved, here, monkeypatch):
    images = folder(here / "images", train=6, test=2)
    path = shutil.copytree(saved["vit"], here / "models/vit")
    words = f"extract --dataset folder:{images} --backbones"
    made = data_of(f"{words} hf:models/vit")
    (first,) = made["arrays"]
    assert {"transformers", "torch"} <= set(Store.open(made["path"]).arrays[first["key"]].how)
    spelled = {
        f"hf:{path}": Path("/"),
        f"hf:{path}/": here,
        "hf:vit": path.parent,
        "hf:./vit/": path.parent,
    }
    for name, place in spelled.items():
        monkeypatch.chdir(place)
        again = data_of(f"{words} {name} --recipe {name}:output=cls")
        assert again["decoded"] == 0
        assert [array["key"] for array in again["arrays"]] == [first["key"]]
        run = place_of(f"train --method fed3r --backbones {name} --clients 2 --scheme iid")
    # With another preprocessing it is another array, which a model of the first does not read.
    predict = ("predict", run, next((images / "test").rglob("*.png")))
    assert data_of(*predict)["rows"]
    edited("0.25", "0.3")(path / "preprocessor_config.json")
    assert fedcache(*predict).code == Exit.ENVIRONMENT
    assert len(Store.open(place_of(f"{words} hf:{path}")).arrays) == 2
    # A name that means another folder from here is not taken, even if it meant the right one elsewhere.
    other = here / "elsewhere/models/vit"
    shutil.copytree(tiny_hf.folder(here / "other", "vit", seed=1), other)
    monkeypatch.chdir(here / "elsewhere")
    (own,) = data_of(f"{words} hf:{path}")["arrays"]
    assert own["recipe"]["backbone"] == "hf:vit"
    assert own["recipe"]["weights"] == content_sha256(path)


def test_a_repository_is_found_in_the_cache_and_only_there(saved, no_network, monkeypatch):
    name = "hf:someone/tiny-vit"
    missing = fedcache(f"backbones verify {name}")
    assert missing.code == Exit.ENVIRONMENT
    assert no_network == []
    assert f"fedcache backbones pull {name}" in missing.err
    with monkeypatch.context() as patch:
        patch.setenv("FEDCACHE_OFFLINE", "1")
        assert fedcache(f"backbones pull {name}").code == Exit.ENVIRONMENT
    assert not no_network
    assert fedcache(f"backbones pull {name}").code == Exit.ENVIRONMENT
    assert no_network
    no_network.clear()
    cache = library_caches().huggingface / "models--someone--tiny-vit"
    blobs = cache / "blobs"
    snapshot = cache / "snapshots/c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(saved["vit"].iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(blobs / str(number))
    assert data_of(f"backbones verify {name}")["width"] == 16


def test_pulling_asks_for_the_files_that_count_and_nothing_else(saved, monkeypatch):
    asked = {}

    class Hub:
        @staticmethod
        def snapshot_download(repository, **words):
            asked.update(words, repository=repository)
            return str(saved["vit"])

    monkeypatch.setattr(optional, "import_module", lambda name: Hub)
    assert fetch("hf:someone/tiny-vit", offline=False) == saved["vit"]
    assert asked == {
        "repository": "someone/tiny-vit",
        "allow_patterns": [*PATTERNS, PROMPTS],
        "cache_dir": library_caches().huggingface,
    }
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in PATTERNS)
    machine_error(lambda: fetch("hf:tiny-vit", offline=False), "is not the name of a repository")


def edited(old, new):
    """A change of a text file."""

    def edit(file):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    return edit


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("model.safetensors", lambda f: f.write_bytes(f.read_bytes()[:200]), "transformers"),
        (
            "model.safetensors",
            lambda f: f.rename(f.with_name("pytorch_model.bin")),
            "pytorch_model.bin",
        ),
        (
            "model.safetensors",
            lambda f: f.symlink_to(shutil.move(f, f.parents[1] / f.name)),
            "link",
        ),
        ("config.json", Path.unlink, "A model's folder needs config.json"),
        ("config.json", lambda f: f.write_text("{"), "JSON"),
        ("config.json", edited("{", '{"auto_map": {"AutoModel": "evil.Model"},'), "its own code"),
        ("config.json", edited('hidden_layers": 1', 'hidden_layers": 2'), "missing"),
        ("preprocessor_config.json", Path.unlink, "A model's folder needs config.json"),
    ],
)
def test_damaged_and_hostile_folders_are_a_sentence(saved, tmp_path, file, damage, said):
    path = shutil.copytree(saved["vit"], tmp_path / "m")
    damage(path / file)
    done = fedcache(f"backbones verify hf:{path}")
    assert done.code in (Exit.ENVIRONMENT, Exit.USAGE)
    assert said in done.err
    assert "Traceback" not in done.err


PREPROCESSING = [
    ({"size": 224, "do_center_crop": False}, (224, "squash", 1.0)),
    (
        {
            "size": {"shortest_edge": 256},
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
        },
        (224, "crop", 224 / 256),
    ),
    ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (224, "crop", 0.875)),
    ({"size": 2048}, (2048, "squash", 1.0)),
    ({"size": {"shortest_edge": 224}}, None),
    ({"size": {"height": 224, "width": 112}}, None),
    ({"size": {"height": 256, "width": 256}, "crop_size": 224, "do_center_crop": True}, None),
    ({"resample": 0}, None),
    ({"rescale_factor": 1.0}, None),
    ({"do_resize": False}, None),
    ({"image_std": [1, 0, 1]}, None),
    ({"size": 2049}, None),
]


def test_preprocessing_is_read_or_refused(tmp_path):
    for told, expected in PREPROCESSING:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(tiny_hf.PLAIN | told))
        if expected is None:
            refused(lambda: read_preprocessing(tmp_path, "m"))
        else:
            found = read_preprocessing(tmp_path, "m")
            assert (found.size, found.resize, found.crop_pct) == expected


def test_what_counts_is_what_is_digested(saved, tmp_path):
    path = shutil.copytree(saved["vit"], tmp_path / "m")
    before = content_sha256(path)
    (path / "README.md").write_text("a card")
    (path / "flax_model.msgpack").write_bytes(b"x")
    assert content_sha256(path) == before == content_sha256(saved["vit"])
    (path / "tokenizer.json").write_text("{}")
    assert content_sha256(path) != before
