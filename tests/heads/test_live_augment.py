"""Live augmentation against torchvision's transforms, which the released code of FLESD uses."""

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F  # noqa: N812 - as torchvision's own documentation calls it
from float64 import doubles
from scipy.ndimage import gaussian_filter
from torchvision.transforms import RandomResizedCrop

from fedcache.heads.augment import DRAWS, TRIES, Policy, augment

#                ten areas and shapes         x    y    flip jitter bright contrast saturation hue
STILL = doubles(
    [1.0] * TRIES
    + [0.5] * TRIES
    + [0.5, 0.5, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5]
    # order of the four        grey blur width
    + [0.1, 0.2, 0.3, 0.4]
    + [0.9, 0.9, 0.5]
)
CHANGES = ("x", "y", "flip", "jitter", "bright", "contrast", "saturation", "hue")
PLACES = {**{name: 20 + i for i, name in enumerate(CHANGES)}, "grey": 32, "blur": 33, "width": 34}
FULL = Policy("resized", jitter=0.8, hue=0.4, grey=0.5, blur=0.5)


def drawn(**changed):
    """``STILL`` [1, DRAWS], by which nothing happens, with some numbers changed; ``order`` is that of the steps."""
    u = STILL.clone()
    assert len(u) == DRAWS
    for step, k in enumerate(changed.pop("order", ())):
        u[28 + step] = (k + 1) / 10
    for name, value in changed.items():
        u[PLACES[name]] = value
    return u[None]


def image(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gap(a, b):
    return float((a - b).abs().max())


def test_a_view_depends_on_its_image_and_draws_alone():
    x = image(9, 3, 8, 6)
    u = image(9, DRAWS, seed=1)
    whole = augment(x, u, FULL)
    assert whole.shape == x.shape
    assert 0.0 <= float(whole.min()) < float(whole.max()) <= 1.0
    for i in range(9):
        assert gap(augment(x[i : i + 1], u[i : i + 1], FULL)[0], whole[i]) < 1e-12
    turned = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    assert gap(augment(x[turned], u[turned], FULL), whole[turned]) < 1e-12


def test_draws_of_no_change_give_the_image_and_a_flip_its_mirror():
    x = image(1, 3, 8, 8)
    assert gap(augment(x, drawn(), FULL), x) < 1e-12
    assert gap(augment(x, drawn(flip=0.1), FULL), x.flip(-1)) < 1e-12
    assert torch.equal(augment(x, image(1, DRAWS, seed=3), Policy(flip=False)), x)


def window(x, u, least, monkeypatch):
    """torchvision's own window for the draws: its ``get_params`` with its random numbers replaced."""
    given = iter([v for k in range(TRIES) for v in (float(u[0, k]), float(u[0, TRIES + k]))])
    starts = iter([float(u[0, PLACES["y"]]), float(u[0, PLACES["x"]])])  # it draws the row first

    def uniform_(self, low, high):
        return self.fill_(low + (high - low) * next(given))

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)

    def randint(low, high, size):
        return torch.full(size, low + int(next(starts) * (high - low)))

    monkeypatch.setattr(torch, "randint", randint)
    found = RandomResizedCrop.get_params(x, [least, 1.0], [3 / 4, 4 / 3])
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("size", [(32, 32), (9, 20), (20, 9)])
def test_a_resized_crop_is_torchvisions(size, monkeypatch):
    sides = set()
    for seed in range(60):
        x = image(1, 3, *size, seed=seed)
        u = drawn()
        u[0, : 2 * TRIES + 2] = image(2 * TRIES + 2, seed=100 + seed)
        # nine tenths of a long image fit seldom: the largest centred window
        least = 0.2 if seed % 3 else 0.9
        top, left, height, width = window(x, u, least, monkeypatch)
        theirs = F.resized_crop(x, top, left, height, width, list(size), antialias=False)
        assert gap(augment(x, u, Policy("resized", least)), theirs) < 1e-9, (
            seed,
            top,
            left,
            height,
            width,
        )
        sides.add((height, width))
    assert len(sides) > 20 or size != (32, 32)


def test_a_draw_that_rounds_to_one_stays_inside_the_image():
    x = image(2, 3, 8, 8).float()
    ones = torch.ones(2, DRAWS)
    for policy in (Policy("padded"), Policy("resized"), FULL):
        assert torch.isfinite(augment(x, ones, policy)).all()
        assert torch.isfinite(augment(x, torch.zeros(2, DRAWS), policy)).all()


@pytest.mark.parametrize(("x0", "y0"), [(0, 0), (4, 4), (8, 8), (3, 7)])
def test_a_padded_crop_is_torchvisions(x0, y0):
    x = image(1, 3, 10, 12)
    theirs = F.crop(F.pad(x, [4]), y0, x0, 10, 12)
    u = drawn(x=(x0 + 0.5) / 9, y=(y0 + 0.5) / 9)
    assert torch.equal(augment(x, u, Policy("padded")), theirs)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (1, 3, 0, 2)])
def test_colours_are_jittered_as_torchvision_does(order):
    # torchvision's grey weighs red by 0.2989, Pillow's, which the released code uses, by 0.299.
    steps = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    policy = Policy(jitter=0.8, hue=0.2)
    for seed in range(8):
        x = image(1, 3, 6, 5, seed=seed)
        at = image(4, seed=50 + seed)
        by = dict(zip(("bright", "contrast", "saturation", "hue"), at.tolist(), strict=True))
        factor = [0.2 + 1.6 * f for f in at[:3].tolist()]
        factor.append(0.2 * (2 * float(at[3]) - 1))
        # ``order`` of the draws is the rank of each step's number: step k comes when its turn is drawn.
        wanted = x
        for k in np.argsort(order):
            wanted = steps[k](wanted, factor[k])
        assert gap(augment(x, drawn(jitter=0.79, order=order, **by), policy), wanted) < 2e-3, seed
        # a fifth keeps its colours
        assert gap(augment(x, drawn(jitter=0.81, order=order, **by), policy), x) == 0.0


def test_hue_is_torchvisions():
    x = image(64, 3, 4, 4)
    x[0] = 0.3  # a grey image has no hue
    x[1, 0], x[1, 1], x[1, 2] = 1.0, 0.0, 0.0
    u = STILL.repeat(64, 1)
    u[:, PLACES["jitter"]] = 0.0
    for draw in (0.0, 0.25, 0.5, 0.9, 1.0):
        u[:, PLACES["hue"]] = draw
        wanted = F.adjust_hue(x, 0.4 * (2 * draw - 1))
        assert gap(augment(x, u, Policy(hue=0.4)), wanted) < 2e-6  # torchvision turns in float32


def test_grey_takes_the_colour_of_its_share():
    x = image(1, 3, 5, 5)
    policy = Policy(grey=0.2)
    weights = doubles([0.299, 0.587, 0.114]).view(3, 1, 1)
    assert (
        gap(augment(x, drawn(grey=0.19), policy), (x * weights).sum(1, keepdim=True).expand_as(x))
        < 1e-12
    )
    assert gap(augment(x, drawn(grey=0.21), policy), x) == 0.0


@pytest.mark.parametrize("width", [0.0, 0.3, 1.0])
def test_blur_is_a_gaussian_of_its_width(width):
    x = image(1, 3, 24, 20)
    policy = Policy(blur=0.5)
    sigma = 0.1 + 1.9 * width
    view = augment(x, drawn(blur=0.49, width=width), policy)[0]
    wanted = np.stack([gaussian_filter(c, sigma, mode="nearest", radius=6) for c in x[0].numpy()])
    assert gap(view, torch.from_numpy(wanted)) < 1e-9
    assert gap(augment(x, drawn(blur=0.51, width=width), policy), x) == 0.0
