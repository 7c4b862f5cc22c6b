"""Text features: prompts as written, ensembles as CLIP makes them."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused
from tolerance import close

from fedcache.extract.backbones.backbone import prompts, text_features


class Lines:
    """A text tower whose features are looked up, so that the arithmetic can be followed by hand."""

    def __init__(self, rows):
        self.rows = rows

    def text(self, lines):
        return torch.tensor([self.rows[line] for line in lines], dtype=torch.float32)


def test_class_names_are_read_as_words():
    assert prompts(["fire_truck", "Jack-o'-lantern", "{}"], "a {}, see {}: {0}") == [
        "a fire truck, see fire truck: {0}",
        "a Jack-o'-lantern, see Jack-o'-lantern: {0}",
        "a {}, see {}: {0}",
    ]


def test_an_ensemble_is_the_unit_mean_of_unit_features():
    # unit rows (1, 0) and (0, 1), for every length; the mean is (.5, .5), of norm 1/sqrt 2 -> (1, 1)/sqrt 2
    tower = Lines(
        {"a cat": [3.0, 0.0], "the cat": [0.0, 0.2], "a dog": [-2.0, 0.0], "the dog": [-5.0, 0.0]}
    )
    features = text_features(tower, ["cat", "dog"], ["a {}", "the {}"])
    assert features.dtype == np.float32
    assert np.allclose(features, [[2**-0.5, 2**-0.5], [-1.0, 0.0]])


def test_what_cannot_be_encoded_is_refused():
    for classes, templates in ((["cat"], ["a photo"]), ([], ["a {}"]), (["cat"], [])):
        refused(
            lambda classes=classes, templates=templates: text_features(
                Lines({}), classes, templates
            )
        )


def test_features_without_direction_are_refused():
    for second in ([-1.0, 0.0], [float("nan"), 0.0], [0.0, 0.0]):
        tower = Lines({"a cat": [1.0, 0.0], "the cat": second})
        refused(lambda tower=tower: text_features(tower, ["cat"], ["a {}", "the {}"]), "norm")


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_rows_are_unit_and_the_order_of_templates_does_not_matter(classes, templates, seed):
    rng = np.random.default_rng(seed)
    names = [f"c{i}" for i in range(classes)]
    forms = [f"{t} {{}}" for t in range(templates)]
    tower = Lines(
        {line: list(rng.standard_normal(7) + 3) for form in forms for line in prompts(names, form)}
    )
    features = text_features(tower, names, forms)
    assert features.shape == (classes, 7)
    assert close(np.linalg.norm(features, axis=1), np.ones(classes), 7)
    assert close(features, text_features(tower, names, forms[::-1]), 7)
