"""Augmentation policies: the random steps that make the views of an image, as a short text that is part of a recipe.

A policy is an ordered list of steps, written ``flip=0.5,rotate=30``; a step's numbers are separated by colons. Numbers
at the end of a step may be left out if they have defaults. Steps work on pixels of the recipe's size unless stated
otherwise:

    crop=LOW:HIGH         a random resized crop of the decoded image, first or not at all: area share U[LOW, HIGH],
                          aspect ratio log-uniform in [3/4, 4/3], resized with the recipe's filter. Without a
                          crop, the steps start from view 0, the image without augmentation
    flip=P                left to right with probability P, unless a mirrored image would be another class (digits)
    rotate=DEGREES        about the centre by U[-DEGREES, DEGREES], nearest neighbour, black corners, as torchvision's
                          ``RandomRotation`` by default
    jitter=P:B:C:S:H      with probability P, in this order: brightness times U[1 - B, 1 + B], contrast times
                          U[1 - C, 1 + C], saturation times U[1 - S, 1 + S], hue turned by U[-H, H] of the circle
    grey=P                grey with probability P
    blur=P:LOW:HIGH       with probability P Gaussian blur of standard deviation U[LOW, HIGH] pixels (Pillow's)
    gaussian-noise=S:P    (1 - P) x + e with e ~ N(0, S^2) at every value of every pixel, in levels of 0 to 255; P
                          is no probability here
    laplace-noise=S:P     the same with e ~ Laplace(0, S), whose variance is 2 S^2

Pixels stay whole levels of 0 to 255: after each step, fractions are rounded and other levels are cut to the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from fedcache.errors import UsageError, unknown

LONGEST = 16
"""Maximum number of steps of a policy."""


@dataclass(frozen=True)
class Number:
    """One number of a step."""

    name: str
    low: float  # least value
    high: float  # greatest value
    default: float | None = None  # value of a number that is left out; None if it must be given


@dataclass(frozen=True)
class Step:
    """One step of a policy."""

    name: str  # a key of ``NUMBERS``
    values: tuple[float, ...]  # its numbers, all of them

    def __str__(self) -> str:
        numbers = [repr(float(value)).removesuffix(".0") for value in self.values]
        return f"{self.name}={':'.join(numbers)}"


_CHANCE = Number("P", 0.0, 1.0, 0.5)
_NOISE = (Number("S", 0.0, 255.0), Number("P", 0.0, 1.0, 0.0))
NUMBERS: dict[str, tuple[Number, ...]] = {
    "crop": (Number("LOW", 0.01, 1.0, 0.5), Number("HIGH", 0.01, 1.0, 1.0)),
    "flip": (_CHANCE,),
    "rotate": (Number("DEGREES", 0.0, 180.0),),
    "jitter": (
        Number("P", 0.0, 1.0, 0.8),
        Number("B", 0.0, 1.0, 0.4),
        Number("C", 0.0, 1.0, 0.4),
        Number("S", 0.0, 1.0, 0.4),
        Number("H", 0.0, 0.5, 0.0),
    ),
    "grey": (Number("P", 0.0, 1.0, 0.2),),
    "blur": (_CHANCE, Number("LOW", 0.0, 20.0, 0.1), Number("HIGH", 0.0, 20.0, 2.0)),
    "gaussian-noise": _NOISE,
    "laplace-noise": _NOISE,
}
"""The steps and their numbers, in the order in which they are written."""

POLICIES = {
    "simclr": "crop=0.5:1,flip=0.5,jitter=0.8:0.4:0.4:0.4:0",
    "domainnet": "flip=0.5,rotate=30",
}
"""Policies with a name: the default of views, and the training transform for DomainNet in FedPCL's released code."""

DEFAULT = "simclr"


@cache
def parse_policy(text: str) -> tuple[Step, ...]:
    """The steps of a policy. A name in ``POLICIES`` stands for the steps of that policy, "" for the default policy.

    >>> [str(step) for step in parse_policy("domainnet,gaussian-noise=25")]
    ['flip=0.5', 'rotate=30', 'gaussian-noise=25:0']

    Raises UsageError for an unknown step, for invalid numbers, and for a crop that is not first.
    """
    steps: list[Step] = []
    for part in (text or DEFAULT).split(","):
        word = part.strip()
        name = word.partition("=")[0]
        if word in POLICIES:
            steps += parse_policy(POLICIES[word])
        elif name in NUMBERS:
            steps.append(Step(name, _numbers(word)))
        else:
            raise unknown("augmentation", name, (*POLICIES, *NUMBERS))
    if any(step.name == "crop" for step in steps[1:]):
        raise UsageError(
            "--augment crops the decoded image before any other step, so the augmentation must begin with crop.",
            "crop,...",
        )
    if len(steps) > LONGEST:
        raise UsageError(
            f"--augment has {len(steps)} steps, but at most {LONGEST} are allowed.",
            "Leave out some steps.",
        )
    return tuple(steps)


def canonical(text: str) -> str:
    """The canonical text of a policy, for recipes: every number of every step, or "" for the default policy.

    >>> canonical("rotate=30.0"), canonical("crop,flip,jitter"), canonical("simclr")
    ('rotate=30', '', '')

    Raises as ``parse_policy``.
    """
    steps = parse_policy(text)
    if steps == parse_policy(DEFAULT):
        return ""
    return ",".join(map(str, steps))


def described(text: str) -> str:
    """A canonical policy as messages show it: ``simclr`` for ""."""
    return text or DEFAULT


def _numbers(word: str) -> tuple[float, ...]:
    """All numbers of a step that is written ``flip`` or ``flip=0.5``."""
    name, equals, text = word.partition("=")
    wanted = NUMBERS[name]
    form = f"{name}={':'.join(n.name for n in wanted)}"
    given = []
    if equals:
        given = text.split(":")
    too_many = len(given) > len(wanted)
    values = []
    for place, number in enumerate(wanted):
        value = number.default
        if place < len(given):
            try:
                value = float(given[place])
            except ValueError:
                value = math.nan  # in no range, so it is refused below
        if too_many or value is None or not number.low <= value <= number.high:
            ranges = ", ".join(f"{n.name} from {n.low:g} to {n.high:g}" for n in wanted)
            raise UsageError(
                f"--augment {word} is not valid. Expected {form}, with {ranges}.",
                "For example --augment flip=0.5",
            )
        values.append(value + 0.0)  # makes 0 of -0, so that both give the same text
    by_name = dict(zip([number.name for number in wanted], values, strict=True))
    if "LOW" in by_name and by_name["LOW"] > by_name["HIGH"]:
        raise UsageError(
            f"In --augment {word}, LOW is larger than HIGH.",
            f"Write {form}, with the smaller number first.",
        )
    return tuple(values)
