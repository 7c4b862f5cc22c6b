"""The CLIP without training: its kernel by hand, its ridge by its equation, and its tower under trained prompts."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from checkpoint_files import images
from refusal import machine_error

from fedcache.extract.backbones import lookup, word_clip
from fedcache.extract.backbones.backbone import Weights, text_features
from fedcache.extract.backbones.clip_towers import split_towers
from fedcache.extract.backbones.table import load
from fedcache.extract.backbones.weights import find
from fedcache.extract.backbones.word_clip import LAM, MIX, TextKernel, WordNet, genus_of, pinned
from fedcache.heads.prompt import slots, weave

NAMES = ["dog", "traffic_light", "acoustic guitar", "spaceship", "house"]
NET = WordNet(
    lemmas={"n1": "poodle, poodle dog", "n2": "tabby", "n3": "cat", "n4": "hound"},
    definitions={
        "n1": "an intelligent dog with curls",
        "n2": "a cat with a grey coat",
        "n3": "feline mammals usually having thick soft fur",
        "n4": "any of several breeds of dogs used for hunting",
    },
    classes=["n1", "n2"],
)


def loaded(name, home, **how):
    """The encoder of a backbone whose weights are in a package."""
    row = lookup(name)
    path, _ = find(row, given={}, home=home)
    return load(row, Weights(path, "", "test"), row.recipe, **how)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return loaded("efficientnet-lite0-words", tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def towers(encoder):
    return split_towers("efficientnet-lite0-words", "{}", encoder)


@pytest.mark.parametrize(
    ("lemmas", "definition", "expected"),
    [
        ("poodle, poodle dog", "an intelligent dog with curls", {"poodle", "dog"}),
        ("cats", "feline mammals usually having thick soft fur", {"cat", "usually"}),
        ("salesman", "a man who sells: a job", {"salesman", "man"}),
        ("x1", "", {"x"}),
        ("", "", set()),
    ],
)
def test_the_nouns_that_a_synset_is_a_kind_of(lemmas, definition, expected):
    assert genus_of(lemmas, definition) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dog", ["n1"]),
        ("Dogs", ["n1"]),
        ("grey cat", ["n2"]),  # all words must occur
        ("black cat", ["n2", "n3"]),  # "black" is in no text
        ("spaceship", []),
        ("42", []),
    ],
)
def test_hyponyms_are_found_by_the_last_word(name, expected):
    assert NET.hyponyms(name) == expected


def test_tfidf_by_hand():
    kernel = TextKernel(NET, torch.eye(3), LetterTokens())
    (row,) = kernel.tfidf([Counter(dog=2, cat=1, unheard=1)])
    # "dog" is in n1 and n4, "cat" in n2 and n3, "unheard" in none
    dog = 2 * math.log(4 / 2)
    cat = math.log(4 / 2)
    unheard = math.log(4)
    norm = math.sqrt(dog**2 + cat**2 + unheard**2)
    assert row[kernel.column["dog"]] == pytest.approx(dog / norm)
    assert row[kernel.column["cat"]] == pytest.approx(cat / norm)
    assert int((row != 0).sum()) == 2


class Encoded:
    def __init__(self, ids):
        self.ids = ids


class LetterTokens:
    """One token a text, by its number of letters."""

    def encode_batch(self, texts, add_special_tokens):
        assert not add_special_tokens
        return [Encoded([len(text) % 3]) for text in texts]


def test_text_features_solve_the_ridge_of_the_classifier(encoder):
    """Features of the classes' own texts, made by numpy from the stored kernel, and the equation they must solve."""
    kernel = encoder.tower._kernel
    A = encoder.tower._solution.double().numpy()
    words = kernel.class_words.double().numpy()
    tfidf = kernel.class_tfidf.double().numpy()
    rows = encoder.tower._classifier.double().numpy()
    rows = rows - rows.mean(0)
    W = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    K = (1 - MIX) * words @ words.T + MIX * tfidf @ tfidf.T
    np.testing.assert_allclose(K @ A + LAM * A, W, atol=2e-6)

    synsets = kernel.net.hyponyms("poodle")
    texts = [kernel.net.text(synset) for synset in synsets]
    v = np.zeros(1000)
    for text, synset in zip(texts, synsets, strict=True):
        ids = kernel.tokenizer.encode(text, add_special_tokens=False).ids
        vector = kernel.vectors[ids].double().numpy().mean(0) - kernel.centre.double().numpy()
        bag = kernel.net.bags[synset]
        row = np.zeros(tfidf.shape[1])
        for word, many in bag.items():
            if word in kernel.column:
                row[kernel.column[word]] = many * kernel.net.idf[word]
        norm = math.sqrt(sum((many * kernel.net.idf[word]) ** 2 for word, many in bag.items()))
        v += (1 - MIX) * words @ (vector / np.linalg.norm(vector)) + MIX * tfidf @ row / norm
    feature = (v / np.linalg.norm(v)) @ A
    (found,) = encoder.text(["poodle"]).numpy()
    np.testing.assert_allclose(found, feature / np.linalg.norm(feature), atol=2e-6)


@pytest.mark.parametrize("name", ["dog", "snake", "truck", "guitar"])
def test_a_word_is_nearest_to_classes_of_its_kind(encoder, name):
    """Of the three classifier rows that are nearest to a class text, at least two are hyponyms of it."""
    net = encoder.tower._kernel.net
    rows = encoder.tower._classifier
    rows = torch.nn.functional.normalize(rows - rows.mean(0), dim=1)
    nearest = (rows @ encoder.text([name])[0]).topk(3).indices.tolist()
    kinds = set(net.hyponyms(name))
    assert sum(net.classes[i] in kinds for i in nearest) >= 2


def test_image_features_are_those_of_the_network_alone(encoder, tmp_path):
    alone = loaded("efficientnet-lite0", tmp_path)
    seen = images(2, 64)
    assert torch.equal(encoder.image(seen), alone.image(seen))


def test_bfloat16_weights_are_cast_once(tmp_path):
    held = loaded("efficientnet-lite0-words", tmp_path, dtype="bfloat16")
    assert held.module.conv_head.weight.dtype is torch.bfloat16


def test_prompts_without_context_are_the_class_texts(encoder, towers):
    rows, end = towers.text.embed(NAMES)
    expected = text_features(encoder, NAMES, ["{}"])
    np.testing.assert_allclose(towers.text.encode(rows, end).numpy(), expected, atol=1e-6)


def test_the_hyponyms_of_a_prompt_are_found_once(towers, monkeypatch):
    first, _ = towers.text.embed(NAMES)
    monkeypatch.delattr(TextKernel, "of")
    again, _ = towers.text.embed(NAMES[::-1])
    assert torch.equal(again.flip(0), first)


def test_order_and_number_of_context_vectors_change_nothing(towers):
    rows, end = towers.text.embed(NAMES)
    vector = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    features = []
    for count, position in ((1, "end"), (4, "end"), (4, "middle"), (16, "front")):
        index, ends = slots(end, count, towers.text.context, position)
        features.append(towers.text.encode(weave(rows, vector.expand(count, -1), index), ends))
    for found in features[1:]:
        torch.testing.assert_close(found, features[0], atol=1e-6, rtol=0)
    assert float((features[0] - towers.text.encode(rows, end)).abs().max()) > 1e-3


def test_a_gradient_reaches_the_context(encoder, towers):
    encoder.text(NAMES)  # in inference mode, whose tensors no backward pass takes
    rows, end = towers.text.embed(NAMES)
    context = torch.zeros(4, 256, requires_grad=True)
    index, ends = slots(end, 4, towers.text.context, "end")
    towers.text.encode(weave(rows, context, index), ends)[:, 0].sum().backward()
    assert float(context.grad.abs().max()) > 0


def test_missing_and_other_words_are_refused():
    machine_error(lambda: pinned("no_such_words", "", {"a.txt": "0"}), "no_such_words")
    machine_error(
        lambda: pinned("timm", "data/_info", dict.fromkeys(word_clip.TEXTS, "0000")),
        "imagenet_synset_to_lemma.txt",
    )
