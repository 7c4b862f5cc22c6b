"""Checks of a model file: every fact by its type and range, then facts and tensors against one another.

A seal is a checksum that anybody can compute, so the content of a sealed model file cannot be trusted. All of it is
checked here, once, when the file is read. The rest of the package relies on these checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fedcache.errors import StoreError, UsageError
from fedcache.extract.backbones.table import declared
from fedcache.extract.device import DTYPES as COMPUTE_DTYPES
from fedcache.extract.recipe import Recipe
from fedcache.federate.engine.client_data import FEAT_POSTS
from fedcache.models.client_stacks import PREFIX

HINT = "Get the file again from whoever made it; fedcache never writes such a model."

NEWEST = 999
"""Highest format number that a later fedcache may use."""

LARGEST = 2**31
"""Upper limit of counts and numbers of clients and rounds."""
WIDEST = 2**20
"""Upper limit of features of a backbone."""
TALLEST = 8192
"""Upper limit of the height and width of an image, in pixels."""
COLDEST = 1e-9
HOTTEST = 1e9
"""Lowest and highest temperature: beyond them probabilities are 0 and 1, or all equal."""


@dataclass(frozen=True)
class FactKind:
    """The values that a fact may have."""

    allows: Callable[[Any], bool]
    words: str  # the expected values, for an error message


def refused(what: str) -> StoreError:
    """The error for a model file that fedcache cannot have written; ``what`` is wrong with it."""
    return StoreError(f"The model file is not one that fedcache writes: {what}.", HINT)


def check_format(found: Any, current: int) -> None:
    """Refuse a format that is no number, or that a later fedcache wrote. Raises StoreError."""
    if type(found) is not int or not 1 <= found <= NEWEST:
        raise refused(f"its format is {_shown(found)}")
    if found > current:
        raise StoreError(f"The model has format {found}, expected {current}.", "Upgrade fedcache.")


def whole(low: int, high: int) -> FactKind:
    """A whole number from ``low`` to ``high``."""
    return FactKind(
        lambda v: type(v) is int and low <= v <= high, f"a whole number from {low} to {high}"
    )


def one_of(*words: str) -> FactKind:
    """One of some words."""
    return FactKind(lambda v: isinstance(v, str) and v in words, " or ".join(words))


def or_none(kind: FactKind) -> FactKind:
    """A value of ``kind``, or None."""
    return FactKind(lambda v: v is None or kind.allows(v), f"{kind.words}, or null")


def list_of(kind: FactKind) -> FactKind:
    """A list of values of a kind."""
    return FactKind(
        lambda v: isinstance(v, list | tuple) and all(map(kind.allows, v)),
        f"a list, each {kind.words}",
    )


def mapping_to(kind: FactKind) -> FactKind:
    """An object with words as keys."""
    return FactKind(
        lambda v: (
            isinstance(v, Mapping)
            and all(isinstance(k, str) and kind.allows(one) for k, one in v.items())
        ),
        f"an object, each value {kind.words}",
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return (
        value is None
        or isinstance(value, bool | str)
        or (type(value) is int and abs(value) < 2**63)
    )


def _is_override(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"columns", "hp"}:
        return False
    columns = value["columns"]
    if not list_of(list_of(whole(0, WIDEST))).allows(columns):
        return False
    return all(len(pair) == 2 for pair in columns) and SETTINGS.allows(value["hp"])


def _is_temperature(value: Any) -> bool:
    return type(value) in (int, float) and COLDEST <= value <= HOTTEST


WORD = FactKind(lambda v: isinstance(v, str), "a word")
PLAIN = FactKind(_is_plain, "a number, a word, true, false or null")
SETTINGS = mapping_to(PLAIN)
OVERRIDE = FactKind(_is_override, "columns and hp")

FACTS: Mapping[str, FactKind] = {
    "run": WORD,
    "seed": whole(-LARGEST, LARGEST),
    "dataset": WORD,
    "method": WORD,
    "code": WORD,
    "hp": SETTINGS,
    "protocol": one_of("global", "personalised", "everywhere"),
    "rounds": whole(0, LARGEST),
    "dtype": one_of("float32", "float64"),
    "classes": list_of(WORD),
    "keys": list_of(WORD),
    "recipes": list_of(FactKind(lambda v: isinstance(v, Mapping), "an object")),
    "widths": list_of(whole(1, WIDEST)),
    "views": whole(1, LARGEST),
    "feat_post": one_of(*FEAT_POSTS),
    "clients": whole(1, LARGEST),
    "saved": mapping_to(whole(0, LARGEST)),
    "image": or_none(list_of(whole(1, TALLEST))),
    "names": list_of(WORD),
    "template": or_none(WORD),
    "encoder": or_none(whole(0, LARGEST)),
    "overrides": mapping_to(OVERRIDE),
    "computed": list_of(SETTINGS),
    "temperature": or_none(FactKind(_is_temperature, f"a number from {COLDEST:g} to {HOTTEST:g}")),
}
"""Every fact of a model file."""

LATER: Mapping[str, Any] = {
    "names": (),
    "template": None,
    "encoder": None,
    "image": None,
    "computed": (),
    "temperature": None,
}
"""Facts that files of earlier releases may lack -> the value that is then taken."""


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse facts of wrong types and ranges, and facts that contradict one another. Raises StoreError."""
    known = {**LATER, **facts}
    for name, kind in FACTS.items():
        if name not in known:
            raise refused(f"it does not say its {name}")
        if not kind.allows(known[name]):
            raise refused(f"{name} is {_shown(known[name])}, expected {kind.words}")
    classes = known["classes"]
    distinct = len(set(classes))
    if not classes or distinct < len(classes):
        raise refused(f"its {len(classes)} classes are {distinct} different names")
    # One width may stand for all keys; recipes and computed facts are there for every key or for none.
    count = len(known["keys"])
    for name, legal in (("widths", (1, count)), ("recipes", (0, count)), ("computed", (0, count))):
        found = len(known[name])
        if not count or found not in legal:
            raise refused(f"{count} keys have {found} {name}")
    for key, recipe in zip(known["keys"], known["recipes"], strict=False):
        _check_recipe(key, recipe)
    for how in known["computed"]:
        _check_computed(how)
    if known["image"] is not None and len(known["image"]) != 2:
        raise refused(f"image is {_shown(known['image'])}, expected height and width")
    _check_encoder(known)
    _check_clients(known)


def _check_recipe(key: str, recipe: Mapping[str, Any]) -> None:
    """Refuse a recipe with unknown fields or values, and one that does not give the key of its array."""
    name = recipe.get("backbone", "")
    if not WORD.allows(name):
        raise refused(f"the backbone of {key} is {_shown(name)}, expected a word")
    if "size" not in recipe:  # ingested embeddings, whose recipe fedcache does not know
        return
    strange = sorted(set(recipe) - {f.name for f in fields(Recipe)})
    if strange:
        raise refused(f"the recipe of {key} has the fields {_shown(strange)}, which no recipe has")
    made = Recipe.from_dict(recipe)
    if made.key != key:
        raise refused(f"its recipe is that of {made.key}, and it was trained on {key}")
    try:
        row = declared(made.backbone)
        if row is not None:
            row.accepts(made)
            made.check_departures(row.recipe)
    except UsageError as error:
        why = error.message.rstrip(".")
        raise refused(f"its recipe is none of {_shown(made.backbone)} ({why})") from error


def _check_computed(how: Mapping[str, Any]) -> None:
    for name, kind in (
        ("device", WORD),
        ("dtype", one_of(*COMPUTE_DTYPES)),
        ("batch", whole(1, WIDEST)),
    ):
        if name in how and not kind.allows(how[name]):
            shown = _shown(how[name])
            raise refused(f"{name} of its features is {shown}, expected {kind.words}")


def _check_encoder(known: Mapping[str, Any]) -> None:
    encoder = known["encoder"]
    template = known["template"]
    recipes = known["recipes"]
    classes = len(known["classes"])
    names = len(known["names"])
    if names not in (0, classes):
        raise refused(f"{classes} classes have {names} names for prompts")
    if encoder is None:
        return
    if encoder >= len(recipes) or "size" not in recipes[encoder]:
        raise refused(f"its encoder is recipe {encoder}, and it has {len(recipes)}")
    if template is None or template.count("{}") != 1:
        raise refused(f"its prompt template is {_shown(template)}, expected one {{}} for the class")


def _check_clients(known: Mapping[str, Any]) -> None:
    saved = known["saved"]
    clients = known["clients"]
    if saved and known["protocol"] == "global":
        raise refused(f"it is one model for all, and has models of {len(saved)} clients")
    # A client that joined later has the number after the last one.
    numbers = sorted(saved.values())
    if len(set(numbers)) < len(saved) or any(number > clients for number in numbers):
        raise refused(f"{len(saved)} saved clients of {clients} have the numbers {_shown(numbers)}")
    width = sum(known["widths"])
    for number, own in known["overrides"].items():
        # Number -1 holds the settings for rows without a client.
        if number != "-1" and (not number.isdecimal() or int(number) > clients):
            raise refused(f"it has settings of client {_shown(number)} of {clients}")
        if any(not 0 <= start < stop <= width for start, stop in own["columns"]):
            columns = _shown(own["columns"])
            raise refused(f"client {number} reads columns {columns} of {width}")


def check_tensors(facts: Any, tensors: Mapping[str, Tensor], *, stacked: bool) -> None:
    """Refuse tensors that do not belong to the facts. Raises StoreError.

    Args:
        facts: of the same file, checked.
        tensors: by name.
        stacked: whether the file lists the number of every saved client, as format 2 does.
    """
    # Standardised features need the mean and the scale of the training rows.
    expected = {"features/text"}
    if facts.feat_post == "standardize":
        scaling = ("features/mean", "features/scale")
        expected |= {*scaling}
        for name in scaling:
            t = tensors.get(name, torch.empty(0))
            if (
                t.dtype != torch.float64
                or tuple(t.shape) != (facts.width,)
                or not bool(t.isfinite().all())
            ):
                raise refused(
                    f"{name} is missing or is not {facts.width} numbers, which feat_post standardize needs"
                )
        if not bool((tensors["features/scale"] > 0).all()):
            raise refused("features/scale holds numbers that are not above 0")
    text = tensors.get("features/text")
    classes = len(facts.classes)
    if text is not None and (
        text.dim() != 2 or len(text) != classes or not text.is_floating_point()
    ):
        shape = list(text.shape)
        raise refused(f"features/text is {shape}, expected a row for each of {classes} classes")
    for name in tensors:
        if not name.startswith(("server/", PREFIX)) and name not in expected:
            raise refused(f"it holds {_shown(name)}, which its facts do not tell of")
    _check_stacks(facts, tensors, stacked=stacked)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model with a number that is not finite, which leaves rows without a score. Raises StoreError."""
    for name, t in tensors.items():
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise refused(f"{name} holds numbers that are not finite")


def _check_stacks(facts: Any, tensors: Mapping[str, Tensor], *, stacked: bool) -> None:
    """Refuse stacks of clients' tensors that are not one row for each saved client."""
    rows: dict[str, int] = {}  # group -> its clients
    listed: list[int] = []
    stacks = {name: t for name, t in tensors.items() if name.startswith(PREFIX)}
    for name, t in stacks.items():
        group, _, last = name.removeprefix(PREFIX).partition("/")
        if last == "number":
            if t.dtype != torch.int64 or t.dim() != 1:
                raise refused(f"{name} is {type_of(t)}, expected a list of whole numbers")
            rows[group] = len(t)
            listed += t.tolist()
        elif not last.startswith(("down/", "own/")):
            raise refused(f"it holds {_shown(name)}, which is nothing of a client")
    for name, t in stacks.items():
        group, _, last = name.removeprefix(PREFIX).partition("/")
        if last != "number" and (group not in rows or t.dim() < 1 or len(t) != rows[group]):
            raise refused(f"{name} is {list(t.shape)}, expected a row for each client of its group")
    # Files of format 1 have no tensors for a client whose model equals the server's.
    saved = sorted(facts.saved.values())
    listed.sort()
    if listed != saved and (stacked or not set(listed) <= set(saved)):
        held = _shown(listed)
        raise refused(
            f"it holds tensors of clients {held}, and says that clients {_shown(saved)} are saved"
        )


def type_of(t: Any) -> str:
    """Dtype and shape of a tensor or an array, for an error message."""
    return f"{t.dtype} {list(t.shape)}"


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
