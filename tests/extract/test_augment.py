"""Augmentation policies: what they may say, what each step does by hand, and that they are part of a recipe."""

from dataclasses import replace

import numpy as np
import pytest
from given_draws import Drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from make_images import pixels
from PIL import Image
from refusal import refused

from fedcache.extract.augment import LONGEST, Step, canonical, parse_policy
from fedcache.extract.batches import input_key
from fedcache.extract.images import apply_step, crop_box, resize, view
from fedcache.extract.recipe import VERSION, Recipe

IMAGE = Image.fromarray(pixels(0, 40, 56))
RECIPE = Recipe("b", "none", size=24, crop_pct=0.875, views=4, view_seed=7)
UID = bytes(range(16))


def done(image, text, *shares, mirror=True):
    """An image after the one step of a policy, with given draws, which must all be made."""
    (step,), draw = parse_policy(text), Drawn(*shares)
    made = np.array(apply_step(image, step, draw, mirror=mirror))
    assert draw.shares == []
    return made


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("simclr", ""),
        ("crop=0.5:1,flip=0.5,jitter=0.8:0.4:0.4:0.4", ""),
        ("domainnet", "flip=0.5,rotate=30"),
        (" flip , rotate=30.0 ", "flip=0.5,rotate=30"),
        ("rotate=30,flip", "rotate=30,flip=0.5"),  # another order is another policy
        ("gaussian-noise=51:0.1", "gaussian-noise=51:0.1"),
        ("domainnet,gaussian-noise=1e1", "flip=0.5,rotate=30,gaussian-noise=10:0"),
        ("rotate=-0", "rotate=0"),
    ],
)
def test_one_policy_has_one_text(text, one):
    assert canonical(text) == one
    assert parse_policy(canonical(text)) == parse_policy(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flp=0.5", "Did you mean 'flip'"),
        ("domainnet=3", "'domainnet'"),
        ("flip,,rotate=3", "''"),
        ("rotate", "rotate=DEGREES, with DEGREES from 0 to 180"),
        ("rotate=200", "DEGREES from 0 to 180"),
        ("rotate=nan", "DEGREES from 0 to 180"),
        ("flip=half", "P from 0 to 1"),
        ("flip=0.5:1", "P from 0 to 1"),
        ("gaussian-noise=0.2:2", "S from 0 to 255, P from 0 to 1"),
        ("crop=0.9:0.5", "LOW is larger than HIGH"),
        ("flip,crop", "crop"),
        (",".join(["flip"] * (LONGEST + 1)), f"{LONGEST}"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_what_can(text, said):
    refused(lambda: canonical(text), said)


def test_the_default_policy_leaves_recipes_as_they_were_and_another_is_another_array():
    assert "augment" not in RECIPE.to_dict()
    # Written by the release before there were policies.
    assert RECIPE.digest == "22b44598ee1a7e4d7f4d029b66d86a04cc52d9008af47e111b4874abb82a41e0"
    assert RECIPE.with_policy("simclr") == RECIPE
    other = RECIPE.with_policy("domainnet")
    assert other.augment == "flip=0.5,rotate=30"
    assert other.key != RECIPE.key
    assert input_key(other) != input_key(RECIPE)
    assert Recipe.from_dict(other.to_dict()) == other
    assert Recipe.from_dict(RECIPE.to_dict()) == RECIPE
    assert other.plain() == RECIPE.plain() == replace(RECIPE, views=1, view_seed=0)
    assert "flip=0.5,rotate=30" in repr(other)


def test_a_policy_without_views_and_one_for_a_single_backbone_are_refused():
    refused(lambda: replace(RECIPE, views=1).with_policy("flip"), "--views 2 --augment flip")
    refused(lambda: RECIPE.override({"augment": "flip"}))


@pytest.mark.parametrize(
    "policy", ["simclr", "domainnet", "gaussian-noise=20:0.1", "crop=0.2:0.4,grey=1,blur=1"]
)
def test_a_view_is_keyed_by_seed_image_number_and_policy(policy):
    recipe = RECIPE.with_policy(policy)
    made = [view(IMAGE, recipe, UID, v) for v in (3, 1, 2)]
    assert np.array_equal(made[1], view(IMAGE, recipe, UID, 1))
    assert np.array_equal(view(IMAGE, recipe, UID, 0), resize(IMAGE, RECIPE))
    assert all(image.shape == (24, 24, 3) and image.dtype == np.uint8 for image in made)
    others = (recipe.override({"view_seed": "8"}), RECIPE.with_policy("rotate=90"))
    assert not any(np.array_equal(view(IMAGE, other, UID, 3), made[0]) for other in others)
    assert not np.array_equal(view(IMAGE, recipe, bytes(16), 3), made[0])


def test_steps_of_no_strength_give_the_plain_image():
    nothing = "flip=0,rotate=0,jitter=0,grey=0,blur=0,gaussian-noise=0,laplace-noise=0"
    assert np.array_equal(view(IMAGE, RECIPE.with_policy(nothing), UID, 1), resize(IMAGE, RECIPE))


def test_geometry_by_hand():
    square = Image.fromarray(pixels(1, 9, 9))
    x = np.array(square)
    assert np.array_equal(done(square, "flip=0.5", 0.49), x[:, ::-1])
    assert np.array_equal(done(square, "flip=0.5", 0.5), x)
    # a digit; the draw is made all the same
    assert np.array_equal(done(square, "flip=1", 0.0, mirror=False), x)
    # anticlockwise, as torchvision's
    assert np.array_equal(done(square, "rotate=90", 1.0), np.rot90(x))
    assert np.array_equal(done(square, "rotate=90", 0.0), np.rot90(x, -1))
    turned = done(Image.new("RGB", (41, 41), (255, 255, 255)), "rotate=45", 1.0)
    assert turned[0, 0].tolist() == turned[-1, 0].tolist() == [0, 0, 0]  # black corners
    assert turned[20, 20].tolist() == turned[0, 20].tolist() == [255, 255, 255]
    assert set(np.unique(turned)) == {0, 255}  # nearest neighbour: nothing between


def test_rotation_is_torchvisions():
    functional = pytest.importorskip("torchvision.transforms.functional")
    for share in (0.0, 0.21, 0.77):
        wanted = np.array(functional.rotate(IMAGE, -30 + 60 * share))
        assert np.array_equal(done(IMAGE, "rotate=30", share), wanted)


def test_colours_by_hand():
    grey = Image.new("RGB", (8, 8), (100, 100, 100))
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    assert np.all(done(grey, "jitter=1:0.5:0:0", 0.0, 1.0, 0.5, 0.5) == 150)  # brightness times 1.5
    # grey has no saturation to lose
    assert np.all(done(grey, "jitter=1:0:0:1", 0.0, 0.5, 0.5, 0.0) == 100)
    # not chosen, and all draws made
    assert np.all(done(grey, "jitter=0.3:0.5:0:0", 0.3, 1.0, 0.5, 0.5) == 100)
    half = done(red, "jitter=1:0:0:0:0.5", 0.0, 0.5, 0.5, 0.5, 1.0)[
        0, 0
    ]  # of the circle; Pillow has 255 steps of it
    assert np.abs(half.astype(int) - [0, 255, 255]).max() <= 6
    assert np.all(done(red, "grey=0.2", 0.1) == 76)  # ITU-R 601: 0.299 of 255
    assert np.array_equal(done(red, "grey=0.2", 0.2), np.array(red))


def test_blur_spreads_a_point_and_keeps_its_sum():
    x = np.zeros((31, 31, 3), np.uint8)
    x[15, 15] = 255
    spread = done(Image.fromarray(x), "blur=1:2:2", 0.0, 0.5).astype(int)
    at = np.arange(31) - 15
    weight = spread[..., 0] / spread[..., 0].sum()
    assert spread[15, 15, 0] == spread.max() < 20
    # variance 2^2, in levels that are whole
    assert (weight.sum(0) * at**2).sum() == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize(("name", "variance"), [("gaussian-noise", 1.0), ("laplace-noise", 2.0)])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_noise_has_the_mean_and_variance_of_its_paper(name, variance, share):
    flat = Image.new("RGB", (200, 200), (120, 130, 140))
    made = np.array(
        apply_step(flat, Step(name, (10.0, share)), np.random.default_rng(0), mirror=True)
    ).astype(float)
    for channel, level in enumerate((120, 130, 140)):
        # 40,000 values: the error of the mean is 0.05 to 0.07, of the variance below 1.2 %.
        assert made[..., channel].mean() == pytest.approx((1 - share) * level, abs=0.3)
        assert made[..., channel].var() == pytest.approx(100 * variance + 1 / 12, rel=0.04)
    assert len({made[0, 0, 0], made[0, 1, 0], made[1, 0, 0], made[5, 5, 0]}) > 1


def test_noise_is_cut_to_what_a_pixel_can_be():
    white = Image.new("RGB", (50, 50), (255, 255, 255))
    made = np.array(
        apply_step(
            white, Step("gaussian-noise", (51.0, 0.0)), np.random.default_rng(0), mirror=True
        )
    )
    assert made.max() == 255
    assert 0.45 < (made == 255).mean() < 0.55  # what lies above is cut


def test_what_a_step_draws_does_not_depend_on_chance_before_it():
    policy = RECIPE.with_policy("flip=0.5,jitter=0.5,gaussian-noise=20")
    flat = Image.new("RGB", (24, 24), (128, 128, 128))
    assert len({view(flat, policy, UID, 1, mirror=m).tobytes() for m in (True, False)}) == 1


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9))
@settings(max_examples=60)
def test_any_image_has_views_of_the_size_asked_for(height, width, v):
    image = Image.new("RGB", (width, height))
    assert view(image, RECIPE, UID, v).shape == (24, 24, 3)
    assert view(image, Recipe("pixels", "none", size=0), UID, v).shape == (height, width, 3)


@given(st.integers(2, 300), st.integers(2, 300), st.integers(0, 10_000))
@settings(max_examples=100)
def test_a_crop_lies_inside_and_keeps_half_the_area_unless_the_image_is_long(height, width, seed):
    left, top, right, bottom = crop_box((width, height), (0.5, 1.0), np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    # A side that does not fit is cut: the other is then at least sqrt(0.5 * area * 3/4).
    expected = min(0.5 * height * width, min(height, width) * (0.375 * height * width) ** 0.5)
    assert (right - left + 1) * (bottom - top + 1) >= expected * 0.98
    if max(height, width) <= 1.2 * min(height, width) and min(height, width) > 40:
        assert (right - left) * (bottom - top) >= 0.42 * height * width


@pytest.mark.parametrize(
    ("size", "shares", "box"),
    [
        # 3/4 of 100 x 80 is 6,000; between 3/4 and 4/3 lies 1, so 77 x 77; half of the 24 and of the 4 places
        ((100, 80), (0.5, 0.5, 0.5, 0.5), (12, 2, 89, 79)),
        # half of the area at 4/3: sqrt(4,000 * 4 / 3) = 73.03 by sqrt(4,000 * 3 / 4) = 54.77; the first and last places
        ((100, 80), (0.0, 1.0, 0.0, 0.999), (0, 25, 73, 80)),
        # the whole area at 3/4: 77.46 by 103.28, which is cut to the 80 that are there
        ((100, 80), (1.0, 0.0, 0.999, 0.999), (23, 0, 100, 80)),
        ((1, 1), (0.0, 0.0, 0.999, 0.999), (0, 0, 1, 1)),
        (
            (1, 400),
            (0.0, 1.0, 0.5, 0.5),
            (0, 194, 1, 206),
        ),  # sqrt(200 * 3 / 4) = 12.25 high, 389 places
    ],
)
def test_a_crop_by_hand(size, shares, box):
    assert crop_box(size, (0.5, 1.0), Drawn(*shares)) == box


def test_the_operations_are_those_of_this_recipe_version():
    # Recorded with VERSION 1 and Pillow 13: a change of operations, order or ranges shows here.
    small = view(
        Image.fromarray(pixels(3, 12, 12)), Recipe("b", "none", size=3, view_seed=1), UID, 1
    )
    assert VERSION == 1
    assert small.tolist() == RECORDED


RECORDED = [
    [[148, 161, 179], [167, 202, 185], [159, 146, 169]],
    [[197, 196, 165], [164, 189, 170], [167, 155, 169]],
    [[204, 204, 192], [186, 176, 176], [190, 184, 195]],
]
