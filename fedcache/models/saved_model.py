"""Model file: the tensors of a trained head, and the facts about the model and its input.

A sealed safetensors file (``store.files``) whose seal holds ``ModelFacts`` and whose tensors are

    features/text            [C, D] class text features, if the method reads them
    features/mean, scale     [D] float64, for ``feat_post=center`` and ``standardize``
    server/NAME              tensors that all clients share
    clients/GROUP/number     [K] int64, clients whose tensors have equal names and shapes (``ClientStacks``)
    clients/GROUP/down/NAME  [K, ...] tensors of their models that replace the server's tensor of that name
    clients/GROUP/own/NAME   [K, ...] tensors that only their models have: a personal head, prototypes, cached features

A prediction from images also needs the frozen backbones. The facts contain their recipes and digests of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.config import ADAPTATIONS, CLIENT_PRIORS, DATASET, option
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    FederatedRunError,
    StoreError,
    UsageError,
    closest,
    shell_word,
    unknown,
)
from fedcache.extract.backbones.table import declared
from fedcache.extract.device import DTYPES as COMPUTE_DTYPES
from fedcache.extract.recipe import Recipe
from fedcache.federate.engine.client_data import (
    FEAT_POSTS,
    SHARED_SUMS,
    Data,
    FrozenEncoders,
    Scaling,
    cut_out,
    prepare_features,
    stack_clients,
)
from fedcache.federate.engine.context import SERVER, ClientRng, Ctx, RunConstants, check_views
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.method import ClientOverrides, Method, keep_down, less_training_state
from fedcache.federate.engine.outcome import (
    DeployedModel,
    TrainingOutput,
    missing_rows,
    no_training_rows,
)
from fedcache.federate.methods import METHODS, NAMES, find_method
from fedcache.federate.trust.update_validation import all_bounded
from fedcache.heads.linear import Tree
from fedcache.optional import reason
from fedcache.parsing import Facts, Record
from fedcache.store.files import explain_disk_errors, is_sealed, read_sealed, sealed_bytes
from fedcache.store.lock import need_folder, write_output
from fedcache.tables.words import some_names

# Stacks of clients' models: tensors of equal shape are stored as one tensor with a row for each client.
#
#     clients/GROUP/number      [K] int64, the clients of a group, in the order in which they were added
#     clients/GROUP/down/NAME   [K, ...] tensors of clients' models that replace the server's tensor of that name
#     clients/GROUP/own/NAME    [K, ...] tensors that only clients' models have
#
# A group consists of all clients whose tensors have the same names, dtypes and shapes. Most methods have one group;
# if a client's model holds its training rows, there is one group for each number of rows. Files of format 1 had
# separate tensors for every client, ``client/NUMBER/own/NAME``. Reading one tensor takes 50 us, so 100,000 clients
# took 10 s.

PREFIX = "clients/"


class ClientTensors:
    """Builder of the stacks; clients are added one after another."""

    def __init__(self) -> None:
        # Outline (names, dtypes and shapes) -> the numbers of the clients that have it, and their tensors by name.
        self._groups: dict[tuple[Any, ...], tuple[list[int], dict[str, list[Tensor]]]] = {}

    def add(self, number: int, tree: Tree) -> None:
        """Add the tensors of a client, ``down/NAME`` and ``own/NAME``; the caller must not change them later."""
        outline = tuple((name, t.dtype, tuple(t.shape)) for name, t in sorted(tree.items()))
        if outline not in self._groups:
            self._groups[outline] = ([], {name: [] for name in sorted(tree)})
        numbers, rows = self._groups[outline]
        numbers.append(number)
        for name, t in tree.items():
            rows[name].append(t)

    def stacked(self) -> Tree:
        """All stacks by their names in a file. The builder is empty afterwards."""
        out = {}
        for group, (numbers, rows) in enumerate(self._groups.values()):
            out[f"{PREFIX}{group}/number"] = torch.tensor(numbers)
            # Rows are freed after each stack, so at most the tensors of one name are in memory twice.
            while rows:
                name, each = rows.popitem()
                out[f"{PREFIX}{group}/{name}"] = torch.stack(each)
        self._groups.clear()
        return out


def of_format_1(tensors: Mapping[str, Tensor]) -> Tree:
    """The tensors of a file of format 1 under the names of format 2; the values are equal."""
    clients: dict[int, Tree] = {}
    out = {}
    for name, t in tensors.items():
        if name.startswith("client/"):
            _, client, last = name.split("/", 2)
            clients.setdefault(int(client), {})[last] = t
        else:
            out[name] = t
    rows = ClientTensors()
    for number in sorted(clients):
        rows.add(number, clients[number])
    return out | rows.stacked()


@dataclass(frozen=True)
class ClientStacks:
    """Stacks of a file, read client by client."""

    groups: dict[str, Tree]  # group -> ``down/NAME`` and ``own/NAME`` [K, ...]
    places: dict[int, tuple[str, int]]  # client's number -> its group and row

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> ClientStacks:
        """The stacks among the tensors of a file."""
        groups: dict[str, Tree] = {}
        places: dict[int, tuple[str, int]] = {}
        for name, t in tensors.items():
            if not name.startswith(PREFIX):
                continue
            _, group, last = name.split("/", 2)
            if last == "number":
                places |= {number: (group, row) for row, number in enumerate(t.tolist())}
            else:
                groups.setdefault(group, {})[last] = t
        return cls(groups, places)

    def group_of(self, number: int | None) -> str:
        """The group of a client; "" for a client that is in no group."""
        if number not in self.places:
            return ""
        return self.places[number][0]

    def tree(self, number: int | None, part: str) -> Tree:
        """Copies of a client's tensors in ``part`` (``down`` or ``own``), by name; {} for a client in no group."""
        if number not in self.places:
            return {}
        group, row = self.places[number]
        copies = {}
        for name, t in self.groups.get(group, {}).items():
            folder, _, last = name.partition("/")
            if folder == part:
                # A copy is aligned in memory. A row is not, and alignment can change the order of torch's sums.
                copies[last] = t[row].clone()
        return copies


# Checks of a model file: every fact by its type and range, then facts and tensors against one
# another.
#
# A seal is a checksum that anyone can compute, so the content of a sealed model file cannot be
# trusted. It is checked here completely, once, when the file is read. The rest of the package
# relies on these checks.

HINT = "Get the file again from its author; fedcache never writes such a model."

NEWEST = 999
"""Largest format number that a file of a later fedcache may have."""

LARGEST = 2**31
"""Upper limit of counts, and of numbers of clients and rounds."""
WIDEST = 2**20
"""Upper limit of the number of features of a backbone."""
TALLEST = 8192
"""Upper limit of the height and width of an image, in pixels."""
COLDEST = 1e-9
HOTTEST = 1e9
"""Lowest and highest temperature that a file or a user may give. Outside this range, probabilities are 0 and 1, or all
of them are equal."""


@dataclass(frozen=True)
class FactKind:
    """The values that a fact may have."""

    allows: Callable[[Any], bool]
    words: str  # the expected values, for an error message


def refused(fault: str) -> StoreError:
    """The error for a model file that fedcache cannot have written."""
    return StoreError(f"The model file was not written by fedcache: {fault}.", HINT)


def check_format(found: Any) -> None:
    """Refuse a format that is not a number, or that a later fedcache wrote. Raises StoreError."""
    if type(found) is not int or not 1 <= found <= NEWEST:
        raise refused(f"its format is {_shown(found)}, expected a number from 1 to {FORMAT}")
    if found > FORMAT:
        raise StoreError(f"The model has format {found}, expected {FORMAT}.", "Upgrade fedcache.")


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

    def allows(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(kind.allows, value))

    return FactKind(allows, f"a list, each {kind.words}")


def mapping_to(kind: FactKind) -> FactKind:
    """An object with words as keys, and values of a kind."""

    def allows(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(isinstance(k, str) and kind.allows(one) for k, one in value.items())

    return FactKind(allows, f"an object, each value {kind.words}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if type(value) is int:
        return abs(value) < 2**63
    return value is None or isinstance(value, bool | str)


def _is_override(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"columns", "hp"}:
        return False
    columns = value["columns"]
    if not list_of(list_of(whole(0, WIDEST))).allows(columns):
        return False
    return all(len(pair) == 2 for pair in columns) and SETTINGS.allows(value["hp"])


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
    "temperature": or_none(
        FactKind(
            lambda v: type(v) in (int, float) and COLDEST <= v <= HOTTEST,
            f"a number from {COLDEST:g} to {HOTTEST:g}",
        )
    ),
}
"""Every fact of a model file -> its allowed values."""

LATER: Record = {
    "names": (),
    "template": None,
    "encoder": None,
    "image": None,
    "computed": (),
    "temperature": None,
}
"""Facts that files of earlier releases may lack -> the value that fedcache uses instead."""


def check_facts(facts: Record) -> None:
    """Refuse facts of wrong types and ranges, and facts that contradict one another. Raises StoreError."""
    known = {**LATER, **facts}
    for name, kind in FACTS.items():
        if name not in known:
            raise refused(f"its metadata lacks {name}")
        if not kind.allows(known[name]):
            raise refused(f"{name} is {_shown(known[name])}, expected {kind.words}")
    classes = known["classes"]
    distinct = len(set(classes))
    if not classes or distinct < len(classes):
        raise refused(f"it has {len(classes)} classes with only {distinct} different names")
    # One width may stand for all keys; recipes and computed facts exist for every key or for none.
    count = len(known["keys"])
    legal = {"widths": (1, count), "recipes": (0, count), "computed": (0, count)}
    for name, counts in legal.items():
        found = len(known[name])
        if not count or found not in counts:
            raise refused(
                f"it has {count} keys of feature sets and {found} {name}, which do not fit together"
            )
    for key, recipe in zip(known["keys"], known["recipes"], strict=False):
        _check_recipe(key, recipe)
    for how in known["computed"]:
        _check_computed(how)
    if known["image"] is not None and len(known["image"]) != 2:
        raise refused(f"image is {_shown(known['image'])}, expected height and width")
    _check_encoder(known)
    _check_clients(known)


def _check_recipe(key: str, recipe: Record) -> None:
    """Refuse a recipe with unknown fields or values, and a recipe that does not give the key of its array."""
    name = recipe.get("backbone", "")
    if not WORD.allows(name):
        raise refused(f"the backbone of {key} is {_shown(name)}, expected a name")
    if "size" not in recipe:  # ingested embeddings, with a recipe that fedcache does not know
        return
    strange = sorted(set(recipe) - {f.name for f in fields(Recipe)})
    if strange:
        raise refused(f"the recipe of {key} has unknown fields: {_shown(strange)}")
    parsed = Recipe.from_dict(recipe)
    if parsed.key != key:
        raise refused(f"its recipe belongs to {parsed.key}, but it was trained on {key}")
    try:
        row = declared(parsed.backbone)
        if row is not None:
            row.accepts(parsed)
            parsed.check_departures(row.recipe)
    except UsageError as error:
        why = error.message.rstrip(".")
        raise refused(f"its recipe is not valid for {_shown(parsed.backbone)} ({why})") from error


def _check_computed(how: Record) -> None:
    kinds = {"device": WORD, "dtype": one_of(*COMPUTE_DTYPES), "batch": whole(1, WIDEST)}
    for name, kind in kinds.items():
        if name in how and not kind.allows(how[name]):
            shown = _shown(how[name])
            raise refused(f"{name} of its features is {shown}, expected {kind.words}")


def _check_encoder(known: Record) -> None:
    encoder = known["encoder"]
    template = known["template"]
    recipes = known["recipes"]
    classes = len(known["classes"])
    names = len(known["names"])
    if names not in (0, classes):
        raise refused(f"it has {classes} classes, but {names} class names for prompts")
    if encoder is None:
        return
    if encoder >= len(recipes) or "size" not in recipes[encoder]:
        raise refused(
            f"its encoder has the number {encoder}, which is not the number of a backbone among its {len(recipes)} "
            "recipes (numbers begin at 0)"
        )
    if template is None or template.count("{}") != 1:
        raise refused(
            f"its prompt template is {_shown(template)}, expected exactly one {{}} for the class"
        )


def _check_clients(known: Record) -> None:
    saved = known["saved"]
    clients = known["clients"]
    if saved and known["protocol"] == "global":
        raise refused(f"it is a global model, but it also contains models of {len(saved)} clients")
    # A client that joined later has the number after the last one.
    numbers = sorted(saved.values())
    if len(set(numbers)) < len(saved) or any(number > clients for number in numbers):
        raise refused(
            f"its saved clients have the numbers {_shown(numbers)}, but there are {clients} clients"
        )
    width = sum(known["widths"])
    for number, override in known["overrides"].items():
        # Number -1 has the settings for rows without a client.
        known_client = number.isdecimal() and int(number) <= clients
        if number != "-1" and not known_client:
            raise refused(
                f"it has settings of client {_shown(number)}, but there are {clients} clients"
            )
        if any(not 0 <= start < stop <= width for start, stop in override["columns"]):
            columns = _shown(override["columns"])
            raise refused(
                f"client {number} reads the columns {columns}, but there are {width} columns"
            )


def check_tensors(facts: Any, tensors: Mapping[str, Tensor], *, stacked: bool) -> None:
    """Refuse tensors that do not belong to the facts. Raises StoreError.

    Args:
        facts: of the same file, checked.
        tensors: by name.
        stacked: whether the file lists the number of every saved client, as format 2 does.
    """
    expected = {"features/text"}
    # Centred and standardised features need the mean and the scale of the training rows.
    if facts.feat_post in SHARED_SUMS:
        scaling = ("features/mean", "features/scale")
        expected |= {*scaling}
        for name in scaling:
            t = tensors.get(name, torch.empty(0))
            one_per_feature = t.dtype == torch.float64 and tuple(t.shape) == (facts.width,)
            if not one_per_feature or not bool(t.isfinite().all()):
                raise refused(
                    f"the setting feat_post={facts.feat_post} needs a tensor {name} of {facts.width} finite float64 "
                    "numbers, but the file has no such tensor"
                )
        if not bool((tensors["features/scale"] > 0).all()):
            raise refused("features/scale contains numbers that are not above 0")
    text = tensors.get("features/text")
    classes = len(facts.classes)
    if text is not None:
        one_per_class = text.dim() == 2 and len(text) == classes
        if not one_per_class or not text.is_floating_point():
            raise refused(
                f"features/text is {type_of(text)}, expected a row of floats for each of {classes} classes"
            )
    for name in tensors:
        if not name.startswith(("server/", PREFIX)) and name not in expected:
            raise refused(
                f"it contains {_shown(name)}, but its metadata does not mention this tensor"
            )
    _check_stacks(facts, tensors, stacked=stacked)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model with a number that is not finite, because rows would have no score. Raises StoreError."""
    for name, t in tensors.items():
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise refused(f"{name} contains numbers that are not finite")


def _check_stacks(facts: Any, tensors: Mapping[str, Tensor], *, stacked: bool) -> None:
    """Refuse stacks of clients' tensors that do not have one row for each saved client."""
    rows = {}  # group -> number of its clients
    listed = []
    stacks = []  # group, name and tensor of each stack
    for name, t in tensors.items():
        if not name.startswith(PREFIX):
            continue
        group, _, last = name.removeprefix(PREFIX).partition("/")
        if last == "number":
            if t.dtype != torch.int64 or t.dim() != 1:
                raise refused(f"{name} is {type_of(t)}, expected a list of whole numbers")
            rows[group] = len(t)
            listed += t.tolist()
        elif last.startswith(("down/", "own/")):
            stacks.append((group, name, t))
        else:
            raise refused(f"it contains {_shown(name)}, which is not a tensor of a client")
    for group, name, t in stacks:
        stacked_rows = group in rows and t.dim() >= 1
        if not stacked_rows or len(t) != rows[group]:
            raise refused(
                f"{name} has shape {list(t.shape)}, expected a row for each client in {PREFIX}{group}/number"
            )
    # Files of format 1 have no tensors for a client whose model equals the server's.
    saved = sorted(facts.saved.values())
    listed.sort()
    complete = listed == saved
    allowed = not stacked and set(listed) <= set(saved)
    if not complete and not allowed:
        held = _shown(listed)
        raise refused(
            f"it contains tensors of clients {held}, but its metadata lists clients {_shown(saved)}"
        )


def type_of(t: Any) -> str:
    """Dtype and shape of a tensor or an array, for an error message."""
    return f"{t.dtype} {list(t.shape)}"


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."


FORMAT = 2
"""Files of format 1 are read too; their tensors have other names (``of_format_1``)."""
KIND = {"kind": "model"}
"""Identity of a model file, which its reader expects."""
COMPUTED = ("device", "dtype", "batch")
"""Facts about the computation of features that a model file contains, because they affect the last bits of features."""
AS_BYTES = 'Images must be uint8. To convert values from 0 to 1:  model.predict((255 * images).astype("uint8"))'
"""Hint for images that are passed as floats."""


@dataclass(frozen=True)
class ModelFacts:
    """Description of a saved model: everything in its file except the tensors."""

    run: str  # digest of the run that made it
    seed: int  # of that run
    dataset: str  # name of the training dataset
    method: str
    code: str  # digest of the code of the method
    hp: Record  # resolved hyperparameters
    protocol: str  # global | personalised | everywhere
    rounds: int  # that were trained
    dtype: str  # float32 | float64
    classes: tuple[str, ...]  # names, in the order of scores
    keys: tuple[str, ...]  # of the arrays in the store, in the order in which they are concatenated
    recipes: tuple[Record, ...]  # of these arrays
    widths: tuple[int, ...]  # number of features of each array
    views: int  # stored views per row
    feat_post: str  # transformation of the features before the method reads them
    clients: int  # of the partition
    saved: Mapping[str, int]  # name -> number of the clients whose models are in the file
    image: tuple[int, int] | None = None  # (H, W) of a model that reads images
    names: tuple[str, ...] = ()  # class names in prompts, for a model with live encoders
    template: str | None = None  # prompt template of live encoders
    encoder: int | None = None  # index in ``recipes`` of the live encoders
    # Number of a client -> columns and hyperparameters in which it differs from the others.
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)
    # Device, dtype and batch that computed each array, {} for ingested arrays; () if unknown.
    computed: tuple[Record, ...] = ()
    # Scores are divided by it before the softmax; fitted at the end of training (``models.calibrate``), or None.
    temperature: float | None = None

    @property
    def width(self) -> int:
        """D, features of all backbones together, or the bytes of an image."""
        return sum(self.widths)

    @property
    def inputs(self) -> tuple[tuple[str, Record], ...]:
        """Key and recipe of each array that a prediction reads; for a model of images only the images."""
        every = tuple(zip(self.keys, self._known_recipes, strict=True))
        if self.image is None:
            return every
        return every[-1:]

    @property
    def inputs_computed(self) -> tuple[Record, ...]:
        """Device, dtype and batch that computed each of ``inputs``; {} if unknown."""
        known = self.computed or ({},) * len(self.keys)
        if self.image is None:
            return known
        return known[-1:]

    @property
    def personal(self) -> bool:
        """Whether every client has its own model, and there is no global model."""
        return self.protocol != "global"

    @property
    def _known_recipes(self) -> tuple[Record, ...]:
        """A recipe for each key; {} if unknown."""
        return self.recipes or ({},) * len(self.keys)

    @property
    def backbones(self) -> tuple[str, ...]:
        """Names, in the order in which features are concatenated; the key if the recipe is unknown."""
        pairs = zip(self._known_recipes, self.keys, strict=True)
        return tuple(str(recipe.get("backbone", key)) for recipe, key in pairs)

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        overrides = {str(number): asdict(own) for number, own in self.overrides.items()}
        return {**plain, "format": FORMAT, "overrides": overrides}

    @classmethod
    def from_dict(cls, data: Record) -> ModelFacts:
        """The inverse of ``to_dict``. Raises StoreError for another format, and for impossible facts."""
        if not isinstance(data, Mapping):
            raise refused("its metadata is not an object")
        values = dict(data)
        check_format(values.pop("format", None))
        known = {f.name for f in fields(cls)}
        strange = ", ".join(sorted(map(str, set(values) - known)))
        if strange:
            raise refused(f"it has the unknown metadata {strange[:60]}")
        check_facts(values)
        for name in ("classes", "keys", "recipes", "widths", "names", "computed"):
            values[name] = tuple(values.get(name, ()))
        if values.get("image") is not None:
            values["image"] = tuple(values["image"])
        overrides = {}
        for client, one in values["overrides"].items():
            columns = tuple((start, stop) for start, stop in one["columns"])
            overrides[int(client)] = ClientOverrides(columns, one["hp"])
        values["overrides"] = overrides
        return cls(**values)


def check_place(path: Path) -> None:
    """Refuse a model file that does not end in .safetensors, or whose folder does not exist. Raises UsageError."""
    if path.suffix != ".safetensors":
        raise UsageError(
            f"{path} is not a model file.",
            f"A model file ends in .safetensors: {path.with_suffix('.safetensors')}",
        )
    need_folder(path)


def computed_as(how: Sequence[Record]) -> tuple[Record, ...]:
    """The value of ``ModelFacts.computed`` for arrays whose computation has these records."""
    computed = []
    for record in how:
        computed.append({name: record[name] for name in COMPUTED if name in record})
    return tuple(computed)


@dataclass(frozen=True)
class SavedModel:
    """The models of one seed of a run: the server's model, and clients' personal models."""

    facts: ModelFacts
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def clients(self) -> list[str]:
        """Names of the clients whose models are saved; [] for a global model."""
        return list(self.facts.saved)

    def save(self, path: str | Path) -> None:
        """Write the file atomically; equal models give equal bytes.

        Raises UsageError, as ``check_place``; MachineError for a path that cannot be written.
        """
        file = Path(path)
        check_place(file)
        raw = sealed_bytes(KIND, self.facts.to_dict(), self.tensors)
        with explain_disk_errors(file, len(raw)):
            write_output(file, raw)

    @classmethod
    def load(cls, path: Path) -> SavedModel:
        """Read a model file.

        Raises StoreError for a file that is missing, of another format, or with impossible content; CorruptionError
        for a file whose bytes do not match its seal.
        """
        try:
            sealed = read_sealed(path, KIND)
        except CorruptionError as error:
            if path.is_file() and not is_sealed(path):
                raise StoreError(
                    f"{path} is not the model file of a run. It may be an exported head or another "
                    "safetensors file.",
                    "Give the directory of a run. `fedcache runs list` shows all runs.",
                ) from error
            raise CorruptionError(
                error.message,
                "To write the file again, repeat the command that trained the run, and add --fresh. To write the model "
                "of a new client again:  fedcache personalise --help",
            ) from error
        if sealed is None:
            raise StoreError(
                f"There is no model at {path}.", "`fedcache train` saves one with every run."
            )
        facts = ModelFacts.from_dict(sealed.content)
        tensors = sealed.tensors
        stacked = sealed.content["format"] == FORMAT
        # Files of format 1 hold the tensors of each client separately.
        if not stacked:
            try:
                tensors = of_format_1(tensors)
            except ValueError as error:
                raise refused("it contains tensors of a client without a number") from error
        check_tensors(facts, tensors, stacked=stacked)
        return cls(facts, tensors)

    def tree(self, folder: str) -> Tree:
        """The tensors whose names begin with ``folder`` (``features/`` or ``server/``), by the rest of the name."""
        inside = {name: t for name, t in self.tensors.items() if name.startswith(folder)}
        return {name.removeprefix(folder): t for name, t in inside.items()}

    @cached_property
    def client_stacks(self) -> ClientStacks:
        """The clients' own tensors; indexed once, because a caller may read all clients one after another."""
        return ClientStacks.of(self.tensors)

    def find_method(self, own: Method | None = None) -> Method:
        """The method that predicts: a method of the package, or the user's ``own``.

        Raises StoreError for a method that is not installed, UsageError if ``own`` is another method than the model's.
        """
        if own is not None:
            method = self.facts.method
            if own.name != method:
                raise UsageError(
                    f"The model was trained by {method}, not by {own.name}.",
                    "Give the method that trained the model.",
                )
            return own
        if self.facts.method not in METHODS:
            raise StoreError(
                f"The model was trained by {self.facts.method}, a custom method.",
                "Load it from Python:  fedcache.load_model(path, method=METHOD)",
            )
        return find_method(self.facts.method)

    def number_of(self, client: str | None) -> int | None:
        """The number of a client by its name; None for a global model.

        Raises UsageError for a client that is not saved, for any client of a run with a global model, and for None
        if each client has its own model.
        """
        facts = self.facts
        if not facts.personal:
            if client is not None:
                raise UsageError(
                    f"{facts.method} trained one global model, so {client!r} has no personal model.",
                    "Leave --client out.",
                )
            return None
        # If the file holds the model of a single client, no name is needed.
        if client is None and len(facts.saved) == 1:
            return next(iter(facts.saved.values()))
        if client is not None and client in facts.saved:
            return facts.saved[client]
        hint = f"--client NAME, one of: {some_names(self.clients, 5)}"
        if client is None:
            if not self.clients:
                hint = "No personal model is saved. Train with --save-clients all"
            raise UsageError(
                f"{facts.method} trained one model per client, but no client was given.", hint
            )
        if not self.clients:
            raise StoreError(
                f"The run has no saved personal models ({facts.clients:,} clients).",
                f"Train again with --fresh --save-clients {client}",
            )
        near = closest(client, sorted(self.clients))
        if near is not None:
            hint = f"--client {shell_word(near)}"
        raise unknown("client", client, self.clients, hint=hint)

    def deployed(
        self,
        client: str | None = None,
        *,
        method: Method | None = None,
        encoders: FrozenEncoders | None = None,
        device: str = "cpu",
        one_for_all: bool = False,
    ) -> DeployedModel:
        """The model of a client, or the global model, as it was scored at the end of the run.

        Raises UsageError, StoreError, as ``number_of`` and ``find_method``; StoreError for hyperparameters and tensors
        with which the method of the package cannot score.

        Args:
            client: its name; None for the global model.
            method: a user's method.
            encoders: live encoders, for a model with ``facts.encoder``.
            device: of the computation.
            one_for_all: whether to take the server's model of a method that also trains personal models.
        """
        used = self.find_method(method)
        named = None
        number = None
        if not one_for_all:
            number = self.number_of(client)
        if number is not None:
            # Without a name, ``number_of`` took the only saved client.
            named = (client or self.clients[0], number)
        ctx = self.context(named, encoders=encoders, device=device)
        personal = self.client_stacks.tree(number, "own")
        down = self.tree("server/") | self.client_stacks.tree(number, "down")
        down = {k: t.to(device) for k, t in down.items()}
        personal = {k: t.to(device) for k, t in personal.items()}
        model = DeployedModel(used, down, personal, no_training_rows(used.name), ctx)
        if method is None:
            check_settings(used, ctx.hp, self.facts.protocol)
            # Clients of one group have tensors of the same names and shapes, so one of them is checked for all.
            group = self.client_stacks.group_of(number)
            if (one_for_all, group) not in self._checked:
                _check_scores(model, needs_client=one_for_all and self.facts.personal)
                self._checked.add((one_for_all, group))
        return model

    @cached_property
    def _checked(self) -> set[tuple[bool, str]]:
        """The models whose tensors were checked: ``one_for_all`` and the group of the client."""
        return set()

    def context(
        self,
        client: tuple[str, int] | None,
        *,
        encoders: FrozenEncoders | None = None,
        device: str = "cpu",
    ) -> Ctx:
        """The context of a client's model after the last round.

        Args:
            client: its name and number; None for the server's model.
            encoders: live encoders.
            device: of the computation.
        """
        facts = self.facts
        dtype = getattr(torch, facts.dtype)
        name = SERVER
        ids: tuple[int, ...] = ()
        if client is not None:
            name, number = client
            ids = (number,)
        # A client may read only some columns and may have its own hyperparameters.
        overrides = self.overrides(*ids)
        width = facts.width
        if overrides.columns:
            width = sum(stop - start for start, stop in overrides.columns)
        text = self.tensors.get("features/text")
        if text is not None:
            text = text.to(device, dtype)
        env = RunConstants(
            classes=len(facts.classes),
            width=width,
            views=facts.views,
            clients=facts.clients,
            text=text,
            dtype=dtype,
            device=torch.device(device),
            names=facts.names,
            image=facts.image,
            towers=encoders,
        )
        rng = ClientRng(facts.seed, facts.rounds, (name,), axes=0, dtype=dtype, device=env.device)
        return Ctx(
            lead=(), hp={**facts.hp, **overrides.hp}, env=env, rng=rng, ids=ids, round=facts.rounds
        )

    def overrides(self, number: int | None = None) -> ClientOverrides:
        """Columns and settings of a client; None for a row without a client, whose settings have the number -1."""
        if number is None:
            number = -1
        return self.facts.overrides.get(number, ClientOverrides())

    def read(self, arrays: Sequence[np.ndarray], client: str | None = None) -> Tensor:
        """Rows in the form in which the model reads them.

        Raises StoreError for another number of features than in training.

        Args:
            arrays: view 0 of the stored features, [N, d] of each backbone, in the order of ``facts.keys``; for a model
                that reads images uint8 [N, H, W, 3].
            client: name of the client, whose model may read only some columns.

        Returns:
            [N, D] in the dtype of the model, or uint8 [N, H W 3]. Infinite and missing features are NaN.
        """
        facts = self.facts
        if facts.image is not None:
            return self._read_images(arrays[-1])
        found = tuple(a.shape[-1] for a in arrays)
        if found != facts.widths:
            widths = " + ".join(map(str, facts.widths))
            wrong = " + ".join(map(str, found))
            names = " + ".join(facts.backbones)
            raise StoreError(
                f"The model needs features of the widths {widths} ({names}), but these have {wrong}.",
                "Give features of the same backbones in the same order.",
            )
        of_one_view = [_finite(np.asarray(a))[:, None] for a in arrays]
        prepared, _ = prepare_features(of_one_view, facts.feat_post, scaling=self.scaling)
        number = None
        if client is not None or len(facts.saved) == 1:
            number = self.number_of(client)
        x = self.own_columns(prepared[:, 0], number)
        return x.to(getattr(torch, facts.dtype))

    def own_columns(self, x: Tensor, number: int | None = None) -> Tensor:
        """The columns of features [N, D] that the model of a client reads, by its number; as ``overrides``."""
        overrides = self.overrides(number)
        if not overrides.columns:
            return x
        return torch.cat([x[:, start:stop] for start, stop in overrides.columns], -1)

    @property
    def scaling(self) -> Scaling | None:
        """The statistics of ``feat_post=center`` and ``standardize``; None for other ``feat_post``."""
        if self.facts.feat_post not in SHARED_SUMS:
            return None
        mean = self.tensors["features/mean"].numpy()
        return Scaling(mean, self.tensors["features/scale"].numpy())

    def _read_images(self, images: np.ndarray) -> Tensor:
        H, W = self.facts.image or (0, 0)
        rows = np.asarray(images)
        if rows.shape[1:] != (H, W, 3) or rows.dtype != np.uint8:
            hint = AS_BYTES
            if rows.dtype == np.uint8:
                hint = "Give images of that size."
            raise StoreError(
                f"The model reads images uint8 [N, {H}, {W}, 3], found {type_of(rows)}.", hint
            )
        return torch.from_numpy(np.ascontiguousarray(rows)).view(len(rows), H * W * 3)

    @property
    def recipes(self) -> list[Recipe]:
        """The recipe of each backbone's features."""
        return [Recipe.from_dict(recipe) for recipe in self.facts.recipes]


def _finite(features: np.ndarray) -> np.ndarray:
    """Features with NaN instead of numbers that are infinite or too large for float32, the dtype that models read."""
    beyond = np.abs(features) > np.finfo(np.float32).max
    if beyond.any():
        return np.where(beyond, np.nan, features)
    return features


def check_settings(method: Method, hp: Record, protocol: str) -> None:
    """Refuse illegal hyperparameters, and a protocol that does not follow from them. Raises StoreError."""
    for h in method.hparams:
        if h.name not in hp:
            continue
        value = hp[h.name]
        try:
            # A value that parsing would change was not written by a run.
            same = h.parse(value) == value
        except FedcacheError:
            same = False
        if not same:
            shown = repr(str(value)[:40])
            raise refused(f"{h.name} of {method.name} is {shown}, expected {h.legal()}")
    try:
        expected = method.protocol(hp)
    except (KeyError, TypeError) as error:
        raise refused(f"{method.name} has missing hyperparameters ({reason(error)})") from error
    if protocol != expected:
        raise refused(
            f"its protocol is {protocol}, but {method.name} with the hyperparameters in the file has the protocol "
            f"{expected}"
        )


def _check_scores(model: DeployedModel, *, needs_client: bool) -> None:
    """Score one row of zeros, to find tensors of wrong shapes before any prediction.

    Raises StoreError for a model that cannot score; with ``needs_client`` UsageError for a server without a classifier.
    """
    env = model.ctx.env
    name = model.method.name
    if env.image is None:
        row = torch.zeros(1, env.width, dtype=env.dtype)
    else:
        height, width = env.image
        row = torch.zeros(1, 3 * height * width, dtype=torch.uint8)
    try:
        with torch.no_grad():
            # The tensors with which a run begins. The stored tensors must have the same dtypes and shapes.
            initial = model.method.broadcast(model.method.init(model.ctx), model.ctx)
            scores = model.scores(row.to(env.device))
    except (FedcacheError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Tensors of wrong shapes, names and types raise errors of many kinds.
        if needs_client and isinstance(error, KeyError):
            raise UsageError(
                f"{name} has no global model: its server has only the shared part of the model, without a classifier.",
                "Use the personal model of a client: --client NAME",
            ) from None
        raise refused(f"{name} cannot score with its tensors ({reason(error)})") from error
    for tensor in initial.keys() & model.down.keys():
        # Scoring does not fail for every wrong shape: a tensor with a single number would be broadcast.
        found = type_of(model.down[tensor])
        expected = type_of(initial[tensor])
        if found != expected:
            raise refused(f"{tensor} of {name} is {found}, expected {expected}")
    if tuple(scores.shape) != (1, env.classes) or not scores.is_floating_point():
        shape = list(scores.shape[1:])
        raise refused(
            f"with its tensors, {name} gives scores of shape {shape} for {env.classes} classes"
        )


# From the output of a training to a ``SavedModel``: the server's tensors, and the models of the
# clients to save.


MOST_BYTES = 256 << 20
"""Limit in bytes for the personal models of one seed that are saved by default; ``--save-clients`` has no limit."""


def collect(
    out: TrainingOutput,
    facts: ModelFacts,
    data: Data,
    scaling: Scaling | None,
    notes: list[str],
    clients: str | None = None,
) -> SavedModel | None:
    """The models of a seed; None for a run with a global model that ended without it.

    Raises UsageError for a client in ``clients`` that the run does not have.

    Args:
        out: of the seed.
        facts: of the run; ``saved`` is filled in here.
        data: of the training, for its text features.
        scaling: the statistics of ``feat_post=center`` and ``standardize``.
        notes: gets a sentence if models are not saved.
        clients: ``--save-clients``: all, none, or names, comma-separated; None for all up to ``MOST_BYTES``.
    """
    tensors = {}
    if data.text is not None:
        tensors["features/text"] = data.text
    tensors |= scaling_tensors(scaling)
    if not facts.personal:
        model = out.deployed(None)
        if model is None:
            return None
        check_saved(model, data)
        tensors |= {f"server/{name}": t for name, t in model.down.items()}
        return SavedModel(facts, owned(tensors))
    saved: dict[str, int] = {}
    stacks = ClientTensors()
    shared = out.broadcast()
    tensors = owned(tensors | {f"server/{name}": t for name, t in shared.items()})
    for number in chosen_clients(out.clients, clients):
        model = out.deployed(number)
        if model is None:
            continue
        if not saved:
            check_saved(model, data)
        one_client = client_tensors(model, shared)
        # The first client stands for all, because models of most methods have the same size.
        all_clients = sum(t.nbytes for t in one_client.values()) * len(out.clients)
        by_default = clients is None and not saved
        if by_default and all_clients > MOST_BYTES:
            megabytes = all_clients / 1e6
            notes.append(
                f"The personal models of {len(out.clients):,} clients are not saved, because they would take "
                f"{megabytes:,.0f} MB. To save the models: --fresh --save-clients all, or the names of some clients."
            )
            break
        saved[out.clients[number]] = number
        stacks.add(number, owned(one_client))
    return SavedModel(replace(facts, saved=saved), tensors | stacks.stacked())


def scaling_tensors(scaling: Scaling | None) -> Tree:
    """The tensors of ``feat_post=center`` and ``standardize`` in a saved model; {} for other transformations."""
    if scaling is None:
        return {}
    return {
        "features/mean": torch.from_numpy(scaling.mean),
        "features/scale": torch.from_numpy(scaling.scale),
    }


def client_tensors(model: DeployedModel, shared: Tree) -> Tree:
    """A client's tensors: ``down/NAME`` replaces a shared tensor, ``own/NAME`` is added to the shared ones."""
    # A tensor that was not replaced is the shared object itself.
    replaced = {f"down/{k}": t for k, t in model.down.items() if t is not shared.get(k)}
    return replaced | {f"own/{k}": t for k, t in model.personal.items()}


def chosen_clients(names: Sequence[str], choice: str | None) -> list[int]:
    """The numbers of the clients that ``--save-clients`` chooses.

    Raises UsageError for a name that no client has.
    """
    if choice in (None, "all"):
        return list(range(len(names)))
    if choice == "none":
        return []
    numbers = {name: i for i, name in enumerate(names)}
    chosen = {part.strip() for part in str(choice).split(",")} - {""}
    for name in chosen:
        if name not in numbers:
            raise unknown(
                "client", name, list(numbers), hint="--save-clients all | none | NAME,NAME"
            )
    return sorted(numbers[name] for name in chosen)


def check_saved(model: DeployedModel, data: Data) -> None:
    """Refuse a user's method with a ``predict`` that reads data that a model file does not hold. Raises UsageError."""
    name = model.method.name
    if name in NAMES and METHODS[name] is model.method:
        return  # a test checks every method of the package
    x = data.x[:1, 0, : model.ctx.env.width]
    if x.is_floating_point():
        x = x.to(model.ctx.env.dtype)
    without_data = replace(model, data=no_training_rows(name))
    with torch.no_grad():
        count = without_data.scores(x).shape[-1]
    if count != data.classes:
        raise UsageError(
            f"predict of {name} gives {count} scores for {data.classes} classes.",
            "Return scores [N, C].",
        )


def owned(tree: Tree) -> Tree:
    """Copies on the CPU that share no memory with one another, which safetensors requires."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tree.items()}


def in_double(tree: Mapping[str, Tensor]) -> Tree:
    """The same tensors, with floats as float64."""
    floats = {name: t.double() for name, t in tree.items() if t.is_floating_point()}
    return {**tree, **floats}


# Options of ``predict``, ``evaluate``, ``export-model`` and ``personalise``.


MODEL = "Model"
ROWS = "Rows"
RESULT = "Result"
"""Panels of the help: model, rows and result."""

BATCH_OF_THE_RUN = "the batch size of the run's extraction"
"""Text of the help for the default of ``--batch``."""

ONE_SEED = "Seed of the run."
"""Help of ``--seed`` for commands that use the model of one seed."""


@dataclass(frozen=True)
class ModelOptions:
    """Which model of a run."""

    client: str | None = option(
        None,
        "Use the personal model of this client.",
        MODEL,
        default_text="none; the global model",
        common=True,
    )
    one_for_all: bool = option(
        False,
        "Use the server's model. Only for a method that also trains personal models.",
        MODEL,
        name="--global",
        common=True,
    )
    seed: str | None = option(
        None,
        "Seed of the run, or `all` to average the probabilities of all seeds.",
        MODEL,
        default_text="the first seed of the run",
        common=True,
    )
    temperature: float | None = option(
        None,
        "Divide the scores by this temperature before the softmax.",
        MODEL,
        default_text="the temperature fitted in training, else 1",
    )
    client_prior: str = option(
        "none",
        "Add the log class prior of --client to the scores.",
        MODEL,
        choices=CLIENT_PRIORS,
        common=True,
    )
    weights: Mapping[str, str] = option(
        {},
        "NAME=FILE: local weights of a backbone. Repeatable.",
        MODEL,
        default_text="searched by name",
    )
    backbone: tuple[str, ...] = option(
        (),
        "Allow the model to load this backbone, module:PACKAGE.MODULE:FACTORY. This runs its Python code, so name "
        "only code that you trust.",
        MODEL,
        default_text="none",
    )
    runs: str | None = option(
        None,
        "Directory of results.",
        MODEL,
        path=True,
        default_text="$FEDCACHE_HOME/runs",
    )

    def __post_init__(self) -> None:
        # Python code may pass client=0; names of clients are text.
        if self.client is not None:
            object.__setattr__(self, "client", str(self.client))


@dataclass(frozen=True)
class PredictOptions:
    """Which rows are predicted, and where the predictions go."""

    store: str | None = option(
        None,
        "Predict the rows of a store: a directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        remote=True,
        default_text="none",
        common=True,
    )
    split: str = option(
        "all",
        "Split of --store to use.",
        ROWS,
        choices=("all", "train", "test", "validation"),
    )
    embeddings: str | None = option(
        None,
        "Predict from features instead of images: .npz, .npy, .h5, .parquet or .safetensors.",
        ROWS,
        path=True,
        default_text="none",
        common=True,
    )
    top: int = option(1, "Number of classes to list for each row.", RESULT, minimum=1, common=True)
    out: str | None = option(
        None,
        "Write all predictions to FILE.csv, .jsonl or .parquet.",
        RESULT,
        short="-o",
        path=True,
        default_text="not written",
        common=True,
    )


@dataclass(frozen=True)
class EvaluateOptions:
    """Which labelled rows models are evaluated on, and where the figures go."""

    dataset: str | None = option(None, DATASET, ROWS, short="-d", default_text="none", common=True)
    store: str | None = option(
        None,
        "Evaluate on the rows of a store: a directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        remote=True,
        default_text="none",
        common=True,
    )
    embeddings: str | None = option(
        None,
        "Evaluate on features with labels: .npz, .h5, .parquet or .safetensors.",
        ROWS,
        path=True,
        default_text="none",
        common=True,
    )
    split: str = option(
        "all",
        "Split of these rows to use.",
        ROWS,
        choices=("all", "train", "test", "validation"),
        common=True,
    )
    coverage: float | None = option(
        None,
        "Also make prediction sets with this coverage. Needs one global model and a run with --validation.",
        RESULT,
        default_text="no prediction sets",
        common=True,
    )
    adapt: str | None = option(
        None,
        "Also measure the accuracy with test-time adaptation of a linear head, in the order of the rows.",
        RESULT,
        choices=ADAPTATIONS,
        default_text="no adaptation",
        common=True,
    )
    set: Mapping[str, str] = option(
        {},
        "key=value: a setting of --adapt, such as order=shuffled. Repeatable.",
        RESULT,
        default_text="the values of the released code",
    )
    with_images: bool = option(
        False,
        "Also show the images of the most confident mistakes in FILE.html.",
        RESULT,
        common=True,
    )
    out: str | None = option(
        None,
        "Write all results to FILE.html, .csv or .json.",
        RESULT,
        short="-o",
        path=True,
        default_text="not written",
        common=True,
    )

    def __post_init__(self) -> None:
        c = self.coverage
        if c is not None and not (isinstance(c, Real) and 0 < c < 1):
            raise UsageError(
                f"--coverage is {c!r}, expected a number above 0 and below 1.",
                "--coverage 0.9",
            )
        if self.set and self.adapt is None:
            raise UsageError(
                f"--set {next(iter(self.set))} is a setting of --adapt, which is not given.",
                f"--adapt {ADAPTATIONS[0]}",
            )


@dataclass(frozen=True)
class PersonaliseOptions:
    """The new client, its rows, and the file of its model."""

    store: str | None = option(
        None,
        "Rows of the new client: a store directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        remote=True,
        default_text="none; required",
    )
    name: str | None = option(
        None,
        "Name of the new client.",
        MODEL,
        default_text="the client name in the store, else the name of the store",
    )
    set: Mapping[str, str] = option(
        {},
        "key=value: a hyperparameter that differs from the run. Repeatable.",
        MODEL,
        default_text="the values of the run",
    )
    rounds: int | None = option(
        None,
        "Rounds of local training; each round trains the run's number of epochs.",
        MODEL,
        minimum=0,
        default_text="the rounds of the run",
    )
    out: str | None = option(
        None,
        "Model file to write, .safetensors. An existing file is never overwritten.",
        RESULT,
        short="-o",
        path=True,
        default_text="NAME.safetensors",
    )


@dataclass(frozen=True)
class ExportOptions:
    """Where an exported model goes, and how it is written."""

    out: str | None = option(
        None,
        "Folder, or file ending in .onnx, .pt2, .safetensors or .joblib.",
        RESULT,
        short="-o",
        path=True,
        default_text="none; required",
    )
    kind: str | None = option(
        None,
        "Output format.",
        RESULT,
        name="--format",
        default_text="by the ending of --out",
        choices=("folder", "onnx", "torch", "safetensors", "sklearn"),
    )
    force: bool = option(
        False, "Overwrite an existing file; other files of a folder are kept.", RESULT
    )


# Personalisation: a model for a client that took no part in the training.
#
# A new client receives the broadcast that the server sent after the last round. It then runs the steps of every
# client: ``enter``, then ``fit`` for as many rounds as the run had, with the run's hyperparameters and the draws of a
# client of that name. Its uploads are discarded. Some methods need no training, because their personal part is a
# function of the broadcast and the client's rows (steps of adaptation, a cache, its own ridge regression). For these,
# and for methods without a broadcast, personalising a client of the run from its own rows gives exactly its model in
# the run.


@dataclass(frozen=True)
class NewClient:
    """A client that took no part in the training."""

    name: str
    x: Tensor  # [N, V, D] features as the model reads them, or images uint8 [N, 1, H W 3]
    label: Tensor  # int64 [N], index of the model's class; -1 if unknown
    train: NDArray[np.int64]  # training rows; labelled if the method reads labels


def settled(model: SavedModel, method: Method, settings: Record) -> Facts:
    """The hyperparameters of the new client: those of the run, replaced by ``settings`` (words or typed values).

    Raises UsageError for a method that has no personal part under these hyperparameters, or learns from test rows; and
    as ``Method.hparam``.
    """
    facts = model.facts
    hp = dict(facts.hp)
    for name, value in settings.items():
        hp[name] = method.hparam(name).parse(value)
    if "global" in (facts.protocol, method.protocol(hp)):
        why = " with these settings."
        if not facts.personal:
            why = (
                ", because it trained one global model. A new client can use this model unchanged."
            )
        raise UsageError(
            f"{facts.method} makes no personal models{why}",
            "To use the model of the run on the store of a client:  fedcache predict RUN --store SHARD",
        )
    if method.reads_test(hp):
        raise UsageError(
            f"No model can be made for a new client, because the models of {facts.method} adapt to labelled test rows, "
            "and a new client has no such rows.",
            "--set adapt_on=train",
        )
    return hp


def trains(method: Method) -> bool:
    """Whether the personal part is trained round by round. Otherwise the broadcast and the rows determine it."""
    return method.personal_part is less_training_state


def personalise(
    model: SavedModel,
    client: NewClient,
    *,
    settings: Record | None = None,
    rounds: int | None = None,
    encoders: FrozenEncoders | None = None,
    device: str = "cpu",
    each_round: Callable[[], None] = lambda: None,
) -> SavedModel:
    """A model with the personal part of only ``client``.

    Raises UsageError as ``settled``, for a method that needs other clients' rows, and for settings that do not fit the
    broadcast of the run's server; StoreError for a client without rows and a model that lacks tensors of the broadcast;
    FederatedRunError for training that diverges.

    Args:
        model: of a run of a personalised method.
        client: the new client. With the name of a client of the run it gets the draws of that client.
        settings: hyperparameters that replace those of the run.
        rounds: of local training, each with the run's number of epochs; None for as many as the run had.
        encoders: live encoders, for a model that runs some.
        device: of the computation.
        each_round: called before every round; an exception that it raises ends the training.
    """
    facts = model.facts
    method = model.find_method()
    hp = settled(model, method, settings or {})
    n = len(client.train)
    if not n:
        raise StoreError(
            f"{client.name} has no labelled training rows.",
            "Give a store with labelled training rows.",
        )
    if trains(method) and method.gradient and "batch" in hp:
        batch = int(hp["batch"])
        # A client with more rows than two batches is checked as if it had two: more rows give no fewer batches.
        if not batch_sizes(min(n, 2 * batch), hp):
            raise StoreError(
                f"{client.name} has {n} rows, too few for one batch of {batch}.", "--set batch=1"
            )
    # A new client has the number after the last one. Columns and settings of single clients of the run do not apply.
    number = facts.saved.get(client.name, facts.clients)
    base = replace(model, facts=replace(facts, hp=hp, overrides={}))
    ctx = base.context((client.name, number), encoders=encoders, device=device)
    ctx = replace(ctx, env=replace(ctx.env, views=client.x.shape[1]))
    check_views(hp, ctx.env.views)
    down = {k: t.to(device) for k, t in model.tree("server/").items()}
    label = None
    if "labels" in method.reads(hp):
        label = client.label.to(device)
    x = client.x.to(device)
    # ``data`` holds copies of the training rows; ``seen`` refers to the same rows in ``x``, as in the scores of a run.
    (data,) = cut_out(x, label, [client.train])
    seen = stack_clients(x, label, [client.train], 0)
    if rounds is None:
        rounds = facts.rounds
    if not trains(method):
        rounds = 0
    try:
        state = method.enter(down, data, ctx)
        # The server's tensors stay as they are, so the client's own tensors are trained beside these.
        frozen = frozenset(down.keys() - state.keys())
        for number_of_round in range(rounds):
            each_round()
            # With the draws of this round.
            rng = replace(ctx.rng, round=number_of_round)
            of_round = replace(ctx, round=number_of_round, rng=rng, frozen=frozen)
            state, _ = method.fit(down, state, data, of_round)
        deployed = down
        if method.deploy is not keep_down:
            # A probe would be trained on the labelled rows of all clients.
            absent = missing_rows(
                f"The classifier of {method.name} is a probe that is trained on the labelled rows of all clients. "
                "These rows are not available here.",
                "Train again with the new client as one of the clients.",
            )
            deployed = method.deploy(down, state, absent, ctx)
        with torch.no_grad():
            part = method.personal_part(deployed, state, seen, ctx)
    except KeyError as error:
        raise StoreError(
            f"{method.name} needs {error} to make a personal model, but the run did not store it.",
            "Train the run again with --fresh and this version of fedcache.",
        ) from error
    except RuntimeError as error:
        if not settings:
            raise
        words = ", ".join(f"{k}={v}" for k, v in settings.items())
        raise UsageError(
            f"{words} cannot be used, because it does not fit the tensors that the server of the run sends to clients: "
            f"{error}",
            "Leave --set out.",
        ) from error
    personal = DeployedModel(method, deployed, part, no_training_rows(method.name), ctx)
    tensors = owned(client_tensors(personal, down))
    floats = {k: t for k, t in tensors.items() if t.is_floating_point()}
    if not all_bounded(floats):
        raise FederatedRunError(
            f"The training of {client.name} diverged.", "Try a smaller learning rate: --set lr=0.01"
        )
    shared = {k: t for k, t in model.tensors.items() if not k.startswith(PREFIX)}
    stacks = ClientTensors()
    stacks.add(number, tensors)
    new_facts = replace(base.facts, saved={client.name: number})
    return SavedModel(new_facts, {**shared, **stacks.stacked()})
