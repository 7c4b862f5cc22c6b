"""Recipe: everything that determines a feature's value, and nothing else.

Every backbone has one native recipe, with the preprocessing that belongs to its weights. Each departure from it is
explicit and makes another recipe with another digest. How a feature was computed (device, compute dtype, batch,
threads, library versions) is recorded next to the recipe and is never part of it, so features made on a GPU can be used
on a laptop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from fedcache.errors import StoreError, UsageError, shell_word, unknown
from fedcache.extract.augment import canonical
from fedcache.store.files import digest_of

VERSION = 1
"""Version of fedcache's own decoding, resizing and views. It is raised when a change of the code alters features."""

OF_VIEWS = ("views", "view_seed", "augment")
"""Fields of a recipe that do not affect view 0."""

OPTIONAL = ("augment", "prompt", "rate")
"""Fields of a recipe that its digest omits if they are empty."""

UNIT = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""Mean and std with which inputs keep their range from 0 to 1."""
BYTES = ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))
"""Mean and std with which inputs keep their range from 0 to 255."""
NORMS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "unit": UNIT,
    "bytes": BYTES,
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}

IMAGES = "images"
TEXTS = "texts"
ROWS = "rows"
SOUNDS = "sounds"
DECODERS = {IMAGES: "pillow", TEXTS: "utf-8", ROWS: "numpy", SOUNDS: "soundfile"}
"""``Recipe.decoder`` of each kind of input."""
ACTIVATIONS = ("native", "quickgelu")

# Keys that ``Recipe.override`` accepts with these values; ``_RANGES`` has its keys of numbers.
_CHOICES = {
    "resize": ("crop", "squash"),
    "interpolation": ("bicubic", "bilinear"),
    "norm": tuple(NORMS),
    "dtype": ("float16", "float32"),
}
_LARGEST = 2**20  # limit for sizes, rates and numbers of views in files


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_triple(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))


# Values that ``Recipe.from_dict`` accepts; files may come from untrusted people.
_STORED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("backbone", "weights", "pooling", "augment", "prompt"),
        lambda value: isinstance(value, str),
    ),
    "activation": lambda value: value in ACTIVATIONS,
    "decoder": lambda value: value in DECODERS.values(),
    "size": lambda value: _is_whole(value) and value <= _LARGEST,
    "resize": lambda value: value in _CHOICES["resize"],
    "interpolation": lambda value: value in _CHOICES["interpolation"],
    "crop_pct": lambda value: _is_number(value) and 0.01 <= value <= 2,
    "mean": _is_triple,
    "std": lambda value: _is_triple(value) and 0 not in value,
    "rate": lambda value: _is_whole(value) and value <= _LARGEST,
    "views": lambda value: _is_whole(value) and 1 <= value <= _LARGEST,
    "view_seed": _is_whole,
    "dtype": lambda value: value in ("float16", "float32", "uint8"),
    "version": _is_whole,
}
_RANGES = {"size": (8, 2048), "crop_pct": (0.1, 1.0), "views": (1, 64), "view_seed": (0, 2**31 - 1)}
RECIPE_KEYS = (*_CHOICES, *_RANGES)
"""Keys of ``--recipe`` that ``Recipe.override`` takes."""


@dataclass(frozen=True)
class Recipe:
    """What determines a feature's value.

    Attributes:
        backbone: name as the user writes it (``clip-rn50``, ``timm:resnet50``).
        weights: sha256 of the weights file, or ``seed:<n>`` for seeded random weights, or ``none``.
        size: side of the square input, in pixels; 0 keeps the size of the decoded image (only ``pixels``, and only if
            all images have one size). For texts the number of tokens that are read, if it is known; for sounds the
            number of samples.
        resize: ``crop`` resizes the short side to round(size / crop_pct) and crops the centre; ``squash`` resizes
            both sides to ``size``.
        interpolation: ``bicubic`` | ``bilinear`` (Pillow's filters, always antialiased).
        crop_pct: see ``resize``.
        mean: per channel, on [0, 1] inputs.
        std: per channel.
        pooling: layer or token of the feature, in the backbone's words (``avg``, ``cls``, ``image_projection``).
        activation: variant of the activation where weights exist for several (``quickgelu``), else ``native``.
        views: number of views; view 0 is the deterministic one.
        view_seed: seed of views 1.. (0 when ``views`` is 1).
        augment: policy of views 1.., the text of ``augment.canonical``; "" for the default policy, which is no part of
            the digest.
        decoder: the library that decodes images; another one gives other pixels. For texts ``utf-8``, for rows of
            numbers ``numpy``, and for sounds ``soundfile``.
        dtype: stored dtype, ``float16`` | ``float32`` | ``uint8`` (``pixels``).
        version: of fedcache's own preprocessing.
        prompt: words that are put before each text; "" for none, which is no part of the digest.
        rate: samples per second to which each sound is resampled; 0 for other inputs, which is no part of the digest.
    """

    backbone: str
    weights: str
    size: int
    resize: str = "crop"
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    mean: tuple[float, float, float] = UNIT[0]
    std: tuple[float, float, float] = UNIT[1]
    pooling: str = "avg"
    activation: str = "native"
    views: int = 1
    view_seed: int = 0
    augment: str = ""
    decoder: str = "pillow"
    dtype: str = "float16"
    version: int = VERSION
    prompt: str = ""
    rate: int = 0

    @cached_property
    def digest(self) -> str:
        """sha256 over every field; fields of ``OPTIONAL`` are left out if they are empty."""
        return digest_of(self.to_dict())

    @property
    def key(self) -> str:
        """Name of the array in the store: ``<slug>-<8 hex of the digest>``."""
        return f"{slug(self.backbone)}-{self.digest[:8]}"

    @property
    def label(self) -> str:
        """``backbone@size``, by which the command line distinguishes two variants of one backbone."""
        return f"{self.backbone}@{self.size}"

    def __repr__(self) -> str:
        size = "own size"  # of each image
        if self.decoder != "pillow":
            size = self.decoder
            if self.size:
                size += f", {part_read(self.to_dict())}"
        elif self.size:
            size = f"{self.size} px {self.resize}"
        views = "1 view"
        if self.views > 1:
            views = f"{self.views} views"
        if self.augment:
            views += f" ({self.augment})"
        return f"Recipe({self.backbone}: {size}, {views}, {self.dtype}, {self.digest[:8]})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        data = asdict(self)
        # Empty optional fields are left out, so that digests of recipes from before these fields stay valid.
        for name in OPTIONAL:
            if not data[name]:
                del data[name]
        data["mean"] = list(self.mean)
        data["std"] = list(self.std)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """The inverse of ``to_dict``.

        Raises StoreError for a key that this version does not know (a newer fedcache wrote it), and for values that no
        recipe has.
        """
        known = {field.name for field in fields(cls)}
        extra = sorted(set(data) - known)
        if extra:
            listed = ", ".join(extra)
            raise StoreError(
                f"A recipe in the store has fields that this version of fedcache does not know: {listed}.",
                "Upgrade fedcache, or extract the features again with this version.",
            )
        for name, allows in _STORED.items():
            if name in data:
                valid = allows(data[name])
            else:  # ``to_dict`` leaves out empty optional fields
                valid = name in (*OPTIONAL, "version")
            if not valid:
                shown = str(data.get(name))[:40]
                raise StoreError(
                    f"A recipe in the file has an invalid {name}: {shown!r}.",
                    "Get the file again from its author, or extract again.",
                )
        # JSON has lists where a recipe has tuples.
        values = dict(data)
        values["mean"] = tuple(values["mean"])
        values["std"] = tuple(values["std"])
        return cls(**values)

    def plain(self) -> Recipe:
        """The recipe of view 0 alone."""
        return replace(self, views=1, view_seed=0, augment="")

    def with_policy(self, augment: str) -> Recipe:
        """The recipe with an augmentation policy (``fedcache.extract.augment``).

        Raises UsageError for an invalid policy, and for a recipe whose only view is the plain image.
        """
        policy = canonical(augment)
        if self.views == 1:
            raise UsageError(
                f"--augment {augment} has no effect, because the only view is view 0, the image without "
                "augmentation.",
                f"Give the number of views to store, including view 0:  --views 2 --augment {augment}",
            )
        return replace(self, augment=policy)

    def override(self, options: Mapping[str, str]) -> Recipe:
        """The recipe with ``--recipe key=value`` departures applied.

        Keys: size, resize, interpolation, crop_pct, norm (unit | bytes | half | imagenet | clip), dtype, views,
        view_seed.

        >>> native = Recipe("clip-rn50", "", size=224)
        >>> small = native.override({"size": "96"})
        >>> small.label, small.key == native.key
        ('clip-rn50@96', False)

        Raises UsageError for an unknown key or a value out of range.
        """
        changed: dict[str, Any] = {}
        for name, text in options.items():
            if name == "augment":
                raise UsageError(
                    "All backbones share one augmentation policy.", f"Write --augment {text}"
                )
            if name not in RECIPE_KEYS:
                raise unknown("recipe key", name, RECIPE_KEYS)
            if name in _RANGES:
                changed[name] = _number(name, text)
                continue
            if text not in _CHOICES[name]:
                raise unknown(name, text, _CHOICES[name])
            if name == "norm":
                changed["mean"], changed["std"] = NORMS[text]
            else:
                changed[name] = text
        return replace(self, **changed)

    def check_departures(self, native: Recipe) -> None:
        """Raise UsageError for a recipe that no command makes from the native recipe of its backbone."""
        for name in ("pooling", "activation", "decoder", "prompt", "rate"):
            value = getattr(self, name)
            expected = getattr(native, name)
            if value != expected:
                shown = str(value)[:40]
                raise UsageError(
                    f"The recipe has {name} {shown!r}, but {self.backbone} has {name} {expected!r}.",
                    "",
                )
        options = self.departures(native)
        # The numbers of a norm were checked when the recipe was read. Its name may be unknown in this release.
        options.pop("norm", None)
        native.override(options)
        if self.augment and canonical(self.augment) != self.augment:
            raise UsageError(
                f"The recipe has an invalid augmentation policy: {self.augment[:40]!r}.", ""
            )

    def departures(self, native: Recipe) -> dict[str, str]:
        """The options with which ``native.override`` gives this recipe, up to the weights.

        >>> native = Recipe("clip-rn50", "", size=224)
        >>> native.override({"size": "96", "norm": "clip"}).departures(native)
        {'size': '96', 'norm': 'clip'}
        """
        found = {
            name: str(getattr(self, name))
            for name in (*_RANGES, *_CHOICES)
            if name != "norm" and getattr(self, name) != getattr(native, name)
        }
        norm = (self.mean, self.std)
        if norm != (native.mean, native.std):
            names = {values: name for name, values in NORMS.items()}
            found["norm"] = names.get(norm, "unknown")
        return found


def _number(name: str, text: str) -> int | float:
    """The value of a key of ``_RANGES``. Raises UsageError for a text that is no number of its range."""
    low, high = _RANGES[name]
    try:
        value: int | float
        if name == "crop_pct":
            value = float(text)
        else:
            value = int(text)
    except ValueError:
        value = low - 1  # out of range, for the error below
    if not low <= value <= high:
        raise UsageError(
            f"recipe {name}={text} is not a number from {low} to {high}.",
            f"For example --recipe {shell_word(name)}={shell_word(high)}",
        )
    return value


def part_read(recipe: Mapping[str, Any]) -> str:
    """How much of a text or a sound a recipe reads: ``512 tokens``, ``30 s``."""
    if "rate" in recipe:
        return f"{recipe['size'] / recipe['rate']:g} s"
    return f"{recipe['size']:,} tokens"


def slug(name: str) -> str:
    """``name`` with everything outside [A-Za-z0-9._-] turned into ``_`` (file names, array names).

    >>> slug("open_clip:ViT-B-32@openai")
    'open_clip_ViT-B-32_openai'
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def reads_of(recipe: Recipe) -> str:
    """The kind of items that a recipe reads, a key of ``DECODERS``."""
    for kind, decoder in DECODERS.items():
        if decoder == recipe.decoder:
            return kind
    return IMAGES


def held_by(recipes: Iterable[Mapping[str, Any]]) -> str:
    """The kind of items of a store with these recipes; images if no recipe names another."""
    return next((reads_of(Recipe.from_dict(r)) for r in recipes if "decoder" in r), IMAGES)


def one_of(kind: str) -> str:
    """The singular of a kind: image, text, row or sound."""
    return kind.removesuffix("s")
