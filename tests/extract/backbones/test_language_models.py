"""Decoder language models and choices of ``--recipe``: features are those of transformers with each text alone."""

import json
import shutil

import numpy as np
import pytest
import tiny_hf
import torch
import transformers
from failing_command import must_fail
from refusal import refused
from tolerance import close
from weights_at import encoder_at

from fedcache import Recipe
from fedcache.extract.backbones import lookup, lookup_recorded
from fedcache.extract.backbones.own import content_sha256
from fedcache.extract.backbones.text_encoder import Tokens, groups_by_length, pool

TEXTS = [
    "the cat sleeps",
    "a dog runs in the sun and the cat sleeps in the sun",
    "sun",
    "a dog and a cat",
    "the the the",
]
ALMOST = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_hf.decoder(tmp_path_factory.mktemp("hf") / "qwen")


def apart(found, expected):
    """How far rows lie apart at most, as a part of their norm."""
    far = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(far.max())


def states(folder, text, layer=None):
    """The states [T, D] of a text alone, by transformers."""
    net = transformers.AutoModel.from_pretrained(folder, dtype="float32").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.inference_mode():
        out = net(**tokens, output_hidden_states=True)
    if layer is None:
        return out.last_hidden_state[0]
    return out.hidden_states[layer][0]


def opened(folder, output=None, **options):
    """The encoder that an extraction with such a recipe loads."""
    return encoder_at(lookup(f"hf:{folder}", output=output, options=options), folder)


POOLED = {
    "mean": lambda s: s.mean(0),
    "last": lambda s: s[-1],
    "cls": lambda s: s[0],
    "max": lambda s: s.amax(0),
}


@pytest.mark.parametrize("pooling", POOLED)
def test_each_pooling_is_that_of_transformers_for_the_text_alone(model, pooling):
    expected = torch.stack([POOLED[pooling](states(model, text)) for text in TEXTS])
    assert apart(opened(model, pooling=pooling).encode_texts(TEXTS), expected.numpy()) < ALMOST
    assert expected.std(0).min() > 1e-3


@pytest.mark.slow
def test_the_side_on_which_a_tokenizer_pads_changes_nothing(model, tmp_path):
    left = shutil.copytree(model, tmp_path / "left")
    config = json.loads((left / "tokenizer_config.json").read_text())
    (left / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "left"}))
    right = opened(model, pooling="last").encode_texts(TEXTS)
    assert np.array_equal(opened(left, pooling="last").encode_texts(TEXTS), right)


def test_layers_are_counted_from_either_end(model):
    expected = torch.stack([states(model, text, 1)[-1] for text in TEXTS]).numpy()
    for output in ("layer:1", "layer:-3"):
        encoder = opened(model, output, pooling="last")
        assert apart(encoder.encode_texts(TEXTS), expected) < ALMOST
        assert encoder.output.word == "last(layer:1)"
    # The last layer is the model's own output, and has its recipe.
    assert lookup(f"hf:{model}", output="layer:-1").recipe == lookup(f"hf:{model}").recipe
    for wrong in ("layer:4", "layer:-5", "layer:x", "cls"):
        refused(
            lambda wrong=wrong: lookup(f"hf:{model}", output=wrong),
            "Unknown output ",
            ": it has 3 hidden layers",
        )


def test_max_tokens_cuts_and_counts(model):
    features, cut = opened(model, max_tokens="4").items(TEXTS)
    assert cut.tolist() == [True, True, False, True, True]
    assert close(features[1], states(model, "a do").mean(0), 16)
    for wrong in ("0", "81", "x", "-1"):
        refused(
            lambda wrong=wrong: lookup(f"hf:{model}", options={"max_tokens": wrong}),
            "reads 1 to 80 tokens",
        )


def test_max_tokens_leave_room_for_the_text(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompt = "a do a"
    added = len(tokenizer(prompt)["input_ids"])
    assert opened(model, max_tokens=str(added + 1), prompt=prompt).items(TEXTS)[1].any()
    refused(
        lambda: lookup(f"hf:{model}", options={"max_tokens": str(added), "prompt": prompt}),
        "no token is left for the text",
        f"max_tokens={added + 1}",
    )


def test_prompts_come_from_the_models_file_or_as_a_text(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "prompted")
    told = {"prompts": {"query": "find : ", "document": ""}}
    before = content_sha256(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
    assert content_sha256(folder) == before
    expected = states(folder, f"find : {TEXTS[0]}").mean(0)
    for prompt in ("query", "find : "):
        assert close(opened(folder, prompt=prompt).items(TEXTS[:1])[0][0], expected, 16)
    plain = lookup(f"hf:{folder}").recipe
    assert lookup(f"hf:{folder}", options={"prompt": "document"}).recipe == plain
    assert "prompt" not in plain.to_dict()
    refused(
        lambda: lookup(f"hf:{folder}", options={"prompt": "quary"}),
        "Unknown prompt of hf:prompted 'quary'",
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"include_prompt": false}')
    refused(lambda: lookup(f"hf:{folder}", options={"prompt": "query"}), "include_prompt")


def test_a_stored_recipe_finds_its_row_again(model, tmp_path):
    home = tmp_path / "home"
    options = {"pooling": "last", "max_tokens": "9", "prompt": "find : "}
    row = lookup(f"hf:{model}", home=home, output="layer:-2", options=options)
    recipe = Recipe.from_dict(row.recipe.to_dict())
    assert lookup_recorded(recipe, home=home).recipe == recipe
    assert row.options_of(recipe) == {**options, "output": "layer:2"}
    assert recipe.pooling == "last(layer:2)"
    assert recipe.prompt == "find : "
    assert row.text_width is None


def test_recipes_of_texts_without_choices_keep_their_digest():
    recipe = Recipe("hf:minilm", "ab", size=256, pooling="mean", decoder="utf-8")
    assert recipe.digest == "314632f1e60c1a300e911c658431e9f68a2c2f75aeea40c6dc491570a5de8e24"


def test_keys_that_texts_do_not_have_are_refused_with_those_they_have(model, tmp_path):
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"{t},{t[0]}\n" for t in TEXTS))
    words = f"extract --dataset texts:{tmp_path / 't.csv'} --backbones hf:{model} --recipe"
    must_fail("max_tokens, output, pooling, prompt", f"{words} pool=last")
    must_fail("Did you mean 'last'?", f"{words} pooling=lst")
    must_fail(
        "Unknown recipe key 'pooling'",
        "extract --dataset digits --backbones pixels --recipe pooling=last",
    )


def log_normal_lengths(count):
    """Token numbers as those of reviews: half of them below 120, cut at 512."""
    drawn = np.random.default_rng(0).lognormal(np.log(120), 0.75, count)
    return np.clip(drawn, 3, 512).astype(np.int64)


@pytest.mark.parametrize(("rows", "tokens"), [(256, 1024), (4096, 16384)])
def test_log_normal_lengths_cost_little_padding(rows, tokens):
    """As a batch on a CPU and one on a GPU."""
    lengths = log_normal_lengths(32768)
    computed = 0
    seen = []
    for first in range(0, len(lengths), rows):
        batch = lengths[first : first + rows]
        for places in groups_by_length(batch, tokens):
            computed += len(places) * batch[places].max()
            seen.append(first + places)
    assert computed <= 1.05 * lengths.sum()
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(len(lengths)))


def test_outputs_of_one_backbone_share_a_forward(model):
    one = opened(model, pooling="last")
    two = opened(model, "layer:1")
    assert one.model is two.model
    calls = []
    handle = one.model.module.register_forward_hook(lambda *_: calls.append(1))
    try:
        tokens = one.prepare(TEXTS)
        first, _ = one.items(tokens)
        second, _ = two.items(tokens)
    finally:
        handle.remove()
    assert len(calls) == 1
    assert apart(first.numpy(), opened(model, pooling="last").encode_texts(TEXTS)) < ALMOST
    assert apart(second.numpy(), opened(model, "layer:1").encode_texts(TEXTS)) < ALMOST


def test_pooling_looks_at_tokens_alone():
    # two texts of 1 and 2 tokens, padded to 3
    states = torch.tensor([[[1.0], [9.0], [9.0]], [[1.0], [3.0], [9.0]]])
    lengths = torch.tensor([1, 2])
    mask = torch.arange(3) < lengths[:, None]
    found = {name: pool(states, mask, lengths, name)[:, 0].tolist() for name in POOLED}
    assert found == {"mean": [1, 2], "last": [1, 3], "cls": [1, 1], "max": [1, 3]}


def test_a_text_without_a_token_has_a_reason_and_no_feature(model):
    encoder = opened(model)
    tokens = encoder.prepare(["c", "dog"])
    features, _ = encoder.items(
        Tokens(tokens.ids[:1], np.array([0, 1, 1]), tokens.cut[:2], {1: ""})
    )
    assert torch.isfinite(features[0]).all()
    assert torch.isnan(features[1]).all()
