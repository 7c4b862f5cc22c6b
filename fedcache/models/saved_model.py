"""A trained head as one file: the tensors that predict, and all that says how their input is made.

A sealed safetensors file (``store.sealed``) whose seal holds ``ModelFacts`` and whose tensors are

    features/text            [C, D] class text features, where the method reads some
    features/mean, scale     [D] float64, of ``feat_post=standardize``
    server/NAME              what all clients share
    clients/GROUP/number     [K] int64, clients whose tensors are alike (``models.client_stacks``)
    clients/GROUP/down/NAME  [K, ...] what their models have in the place of the server's tensor of that name
    clients/GROUP/own/NAME   [K, ...] what only their models have: a personal head, prototypes, a cache of features

Nothing else is needed but the frozen backbones, whose recipes and weights' digests are among the facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcache.config import DATASET
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    StoreError,
    UsageError,
    closest,
    shell_word,
    unknown,
)
from fedcache.extract.recipe import Recipe
from fedcache.federate.engine.client_data import Data, FrozenEncoders, Scaling, prepare_features
from fedcache.federate.engine.context import SERVER, ClientRng, Ctx, RunConstants
from fedcache.federate.engine.deployed import DeployedModel, no_training_rows
from fedcache.federate.engine.method import ClientOverrides, Method
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.federate.methods import METHODS, NAMES, find_method
from fedcache.heads.linear import Tree
from fedcache.models.check_facts import check_facts, check_format, check_tensors, refused
from fedcache.models.client_stacks import ClientStacks, ClientTensors, of_format_1
from fedcache.option_info import option
from fedcache.optional import reason
from fedcache.store.files import explain_disk_errors
from fedcache.store.outputs import write_output
from fedcache.store.sealed import is_sealed, read_sealed, sealed_bytes

FORMAT = 2
"""Earlier ones are read too; of 1, tensors have other names (``client_stacks.of_format_1``)."""
KIND = {"kind": "model"}
COMPUTED = ("device", "dtype", "batch")
"""What a model keeps of how its features were computed: another value of these gives other last bits."""
AS_BYTES = (
    'Images have bytes; of values from 0 to 1:  model.predict((255 * images).astype("uint8"))'
)
"""What helps whoever gives images as floats."""


@dataclass(frozen=True)
class ModelFacts:
    """What a saved model is, besides its tensors."""

    run: str  # digest of the run that made it
    seed: int  # of that run
    dataset: str  # name of the dataset it was trained on
    method: str
    code: str  # digest of the code of the method
    hp: Mapping[str, Any]  # resolved hyperparameters
    protocol: str  # global | personalised | everywhere
    rounds: int  # that were trained
    dtype: str  # float32 | float64
    classes: tuple[str, ...]  # names, in the order of scores
    keys: tuple[str, ...]  # of the arrays in the store, in the order in which they are concatenated
    recipes: tuple[Mapping[str, Any], ...]  # of these arrays
    widths: tuple[int, ...]  # features of each
    views: int  # stored views per row
    feat_post: str  # what is done to features
    clients: int  # of the partition
    saved: Mapping[str, int]  # name -> number of the clients whose models are in the file
    image: tuple[int, int] | None = None  # (H, W) of a model that reads images
    names: tuple[str, ...] = ()  # class names as prompts have them, of a model with live encoders
    template: str | None = None  # prompt template of live encoders
    encoder: int | None = None  # which of ``recipes`` the live encoders are
    # in what single clients differ: number -> columns and hyperparameters
    overrides: Mapping[int, ClientOverrides] = field(default_factory=dict)
    # device, dtype and batch that each of these arrays was computed with, {} of ingested ones; () where nobody knows
    computed: tuple[Mapping[str, Any], ...] = ()
    # by which scores are divided before the softmax, fitted when training ended (``models.calibrate``); None without
    temperature: float | None = None

    @property
    def width(self) -> int:
        """D, features of all backbones together, or the bytes of an image."""
        return sum(self.widths)

    @property
    def inputs(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Key and recipe of each array that is read to predict: of a model that reads images that of the images."""
        every = tuple(zip(self.keys, self._known_recipes, strict=True))
        if self.image is None:
            return every
        return every[-1:]

    @property
    def inputs_computed(self) -> tuple[Mapping[str, Any], ...]:
        """How each of ``inputs`` was computed: device, dtype and batch, or {}."""
        known = self.computed or ({},) * len(self.keys)
        if self.image is None:
            return known
        return known[-1:]

    @property
    def personal(self) -> bool:
        """Whether every client has a model of its own, and there is no one model for all."""
        return self.protocol != "global"

    @property
    def _known_recipes(self) -> tuple[Mapping[str, Any], ...]:
        """One for each key: {} where nobody knows it."""
        return self.recipes or ({},) * len(self.keys)

    @property
    def backbones(self) -> tuple[str, ...]:
        """Names, in the order in which features are concatenated; a key where nobody knows a recipe."""
        pairs = zip(self._known_recipes, self.keys, strict=True)
        return tuple(str(recipe.get("backbone", key)) for recipe, key in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **plain,
            "format": FORMAT,
            "overrides": {str(c): asdict(o) for c, o in self.overrides.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFacts:
        """The inverse of ``to_dict``. Raises StoreError for another format, and for facts of no model."""
        if not isinstance(data, Mapping):
            raise refused("its facts are no object")
        values = dict(data)
        found = values.pop("format", None)
        known = {f.name for f in fields(cls)}
        check_format(found, FORMAT)
        strange = sorted(map(str, set(values) - known))
        if strange:
            raise refused(f"it has the facts {', '.join(strange)[:60]}, which no model has")
        check_facts(values)
        for name in ("classes", "keys", "recipes", "widths", "names", "computed"):
            values[name] = tuple(values.get(name, ()))
        values["image"] = None if values.get("image") is None else tuple(values["image"])
        values["overrides"] = {
            int(c): ClientOverrides(tuple((a, b) for a, b in o["columns"]), o["hp"])
            for c, o in values["overrides"].items()
        }
        return cls(**values)


def check_place(path: Path) -> None:
    """Refuse a model file that does not end in .safetensors, or whose folder is not there. Raises UsageError."""
    if path.suffix != ".safetensors":
        raise UsageError(
            f"{path} is no model file.",
            f"One ends in .safetensors: {path.with_suffix('.safetensors')}",
        )
    if not path.parent.is_dir():
        raise UsageError(f"The directory {path.parent} does not exist.", f"mkdir -p {path.parent}")


def computed_as(how: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """``ModelFacts.computed`` of arrays with these records of how they were computed."""
    return tuple({name: record[name] for name in COMPUTED if name in record} for record in how)


@dataclass(frozen=True)
class SavedModel:
    """The models of one seed of a run: the server's, and those of the clients that have their own."""

    facts: ModelFacts
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """That the tensors take."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def clients(self) -> list[str]:
        """Names of the clients whose models are there; [] for one model for all."""
        return list(self.facts.saved)

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all; the same model has the same bytes.

        Raises UsageError, as ``check_place``; MachineError for a place where the system lets nothing be written.
        """
        check_place(Path(path))
        raw = sealed_bytes(KIND, self.facts.to_dict(), self.tensors)
        with explain_disk_errors(Path(path), len(raw)):
            write_output(Path(path), raw)

    @classmethod
    def load(cls, path: Path) -> SavedModel:
        """Read a model file.

        Raises StoreError for a file that is missing, of another format, or that claims what no model is;
        CorruptionError for one that is not what was written.
        """
        try:
            found = read_sealed(path, KIND)
        except CorruptionError as error:
            if path.is_file() and not is_sealed(path):
                raise StoreError(
                    f"{path} is no model that a run has sealed: an exported head, or another safetensors file.",
                    "Give the directory of the run that it was made of; fedcache runs list lists them.",
                ) from error
            raise CorruptionError(
                error.message,
                "A run's is made again by its command with --fresh, a client's by fedcache personalise.",
            ) from error
        if found is None:
            raise StoreError(
                f"There is no model at {path}.", "`fedcache train` saves one with every run."
            )
        facts = ModelFacts.from_dict(found.content)
        tensors = found.tensors
        stacked = found.content["format"] == FORMAT
        if not stacked:
            try:
                tensors = of_format_1(tensors)
            except ValueError as error:
                raise refused("it holds tensors of a client without a number") from error
        check_tensors(facts, tensors, stacked=stacked)
        return cls(facts, tensors)

    def tree(self, folder: str) -> Tree:
        """The tensors in ``features/`` or ``server/`` by their last name."""
        return {
            name.removeprefix(folder): t
            for name, t in self.tensors.items()
            if name.startswith(folder)
        }

    @cached_property
    def client_stacks(self) -> ClientStacks:
        """What clients' models have of their own; sorted out once, as all may be asked for one after another."""
        return ClientStacks.of(self.tensors)

    def find_method(self, own: Method | None = None) -> Method:
        """The method that predicts: one of the package, or the user's ``own``.

        Raises StoreError for a method that is not there, UsageError for another one than the model's.
        """
        if own is not None:
            if own.name != self.facts.method:
                raise UsageError(
                    f"The model is of {self.facts.method}, not of {own.name}.", "Give that method."
                )
            return own
        if self.facts.method not in METHODS:
            raise StoreError(
                f"The model is of {self.facts.method}, a method of somebody's own.",
                "Load it from Python:  fedcache.load_model(path, method=METHOD)",
            )
        return find_method(self.facts.method)

    def number_of(self, client: str | None) -> int | None:
        """The number of a client by its name; None for the one model for all.

        Raises UsageError for a client that is not saved, one of a run with a single model, or none where each has its
        own.
        """
        facts = self.facts
        if not facts.personal:
            if client is not None:
                raise UsageError(
                    f"{facts.method} trained one model for all clients; there is none of {client!r}.",
                    "Leave --client out.",
                )
            return None
        if client is None and len(facts.saved) == 1:
            return next(iter(facts.saved.values()))
        few = ", ".join(self.clients[:5]) + (", ..." if len(self.clients) > 5 else "")
        if client is None:
            raise UsageError(
                f"{facts.method} trained a model for each client, and no client is named.",
                f"--client NAME, one of: {few}"
                if self.clients
                else "Train with --save-clients all; none is saved.",
            )
        if client not in facts.saved:
            if not self.clients:
                raise StoreError(
                    f"The run saved no client's model ({facts.clients:,} clients).",
                    f"Train again with --fresh --save-clients {client}",
                )
            near = closest(client, sorted(self.clients))
            if near is None:
                hint = f"--client NAME, one of: {few}"
            else:
                hint = f"--client {shell_word(near)}"
            raise unknown("client", client, self.clients, hint=hint)
        return facts.saved[client]

    def deployed(
        self,
        client: str | None = None,
        *,
        method: Method | None = None,
        encoders: FrozenEncoders | None = None,
        device: str = "cpu",
        one_for_all: bool = False,
    ) -> DeployedModel:
        """The model of a client, or the one for all, as it was scored when the run ended.

        Raises UsageError, StoreError, as ``number_of`` and ``find_method``; StoreError for hyperparameters and tensors
        with which the method of the package cannot score.

        Args:
            client: its name; None for the one model for all.
            method: one of the user's own.
            encoders: live ones, for a model whose ``facts.encoder`` says which.
            device: where it computes.
            one_for_all: the server's model of a method that trains personal ones beside it.
        """
        facts = self.facts
        used = self.find_method(method)
        if one_for_all:
            number = None
        else:
            number = self.number_of(client)
        # Where no client is named and one is there, it is that one's model.
        named = None
        if number is not None:
            named = (client or self.clients[0], number)
        ctx = self.context(named, encoders=encoders, device=device)
        down = self.tree("server/") | self.client_stacks.tree(number, "down")
        part = self.client_stacks.tree(number, "own")
        down, part = ({k: t.to(device) for k, t in tree.items()} for tree in (down, part))
        made = DeployedModel(used, down, part, no_training_rows(used.name), ctx)
        # Clients of one group have tensors of the same names and shapes, so one of them is tried for all.
        alike = (
            one_for_all,
            self.client_stacks.places.get(-1 if number is None else number, ("", 0))[0],
        )
        if method is None:  # clients of one group may have settings of their own
            check_settings(used, ctx.hp, facts.protocol)
        if method is None and alike not in self._tried:
            _check_scores(made, needs_client=one_for_all and facts.personal)
            self._tried.add(alike)
        return made

    @cached_property
    def _tried(self) -> set[tuple[bool, str]]:
        """Which models have scored a row."""
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
            client: its name and number; None for the server's.
            encoders: live ones.
            device: where it computes.
        """
        facts = self.facts
        dtype = getattr(torch, self.facts.dtype)
        name, ids = (SERVER, ()) if client is None else (client[0], (client[1],))
        own = facts.overrides.get(-1 if client is None else client[1], ClientOverrides())
        env = RunConstants(
            classes=len(facts.classes),
            width=sum(b - a for a, b in own.columns) if own.columns else facts.width,
            views=facts.views,
            clients=facts.clients,
            text=self._on(self.tensors.get("features/text"), device),
            dtype=dtype,
            device=torch.device(device),
            names=facts.names,
            image=facts.image,
            towers=encoders,
        )
        rng = ClientRng(facts.seed, facts.rounds, (name,), 0, dtype, torch.device(device))
        return Ctx((), {**facts.hp, **own.hp}, env, rng, ids, facts.rounds)

    @staticmethod
    def _on(t: Tensor | None, device: str) -> Tensor | None:
        if t is None:
            return None
        return t.to(device)

    def read(self, arrays: Sequence[np.ndarray], client: str | None = None) -> Tensor:
        """Rows as the model reads them.

        Raises StoreError for another number of features than the model was trained on.

        Args:
            arrays: view 0 of the stored features, [N, d] of each backbone, in the order of ``facts.keys``; for a model
                that reads images uint8 [N, H, W, 3].
            client: one whose model reads some columns only.

        Returns:
            [N, D] in the dtype of the model, or uint8 [N, H W 3]. An infinite feature is NaN, as one that is
            missing.
        """
        facts = self.facts
        if facts.image is not None:
            return self._read_images(arrays[-1])
        found = tuple(a.shape[-1] for a in arrays)
        if found != facts.widths:
            raise StoreError(
                f"The model reads {' + '.join(map(str, facts.widths))} features ({' + '.join(facts.backbones)}), "
                f"found {' + '.join(map(str, found))}.",
                "Give features of the same backbones in the same order.",
            )
        whole = [_finite(np.asarray(a))[:, None] for a in arrays]
        x = prepare_features(whole, facts.feat_post, scaling=self.scaling)[0][:, 0]
        if client is None and len(facts.saved) != 1:
            number = None
        else:
            number = self.number_of(client)
        own = facts.overrides.get(-1 if number is None else number, ClientOverrides())
        if own.columns:
            x = torch.cat([x[:, a:b] for a, b in own.columns], -1)
        return x.to(getattr(torch, facts.dtype))

    @property
    def scaling(self) -> Scaling | None:
        """The numbers of ``feat_post=standardize``; None for the others."""
        if self.facts.feat_post != "standardize":
            return None
        return Scaling(*(self.tensors[f"features/{name}"].numpy() for name in ("mean", "scale")))

    def _read_images(self, images: np.ndarray) -> Tensor:
        H, W = self.facts.image or (0, 0)
        rows = np.asarray(images)
        if rows.shape[1:] != (H, W, 3) or rows.dtype != np.uint8:
            raise StoreError(
                f"The model reads images uint8 [N, {H}, {W}, 3], found {rows.dtype} {list(rows.shape)}.",
                "Give images of that size." if rows.dtype == np.uint8 else AS_BYTES,
            )
        return torch.from_numpy(np.ascontiguousarray(rows)).view(len(rows), H * W * 3)

    @property
    def recipes(self) -> list[Recipe]:
        """How each backbone's features are made from an image."""
        return [Recipe.from_dict(recipe) for recipe in self.facts.recipes]


def _finite(features: np.ndarray) -> np.ndarray:
    """Features with NaN in the place of what is infinite, in itself or as the float32 that models read."""
    beyond = np.abs(features) > np.finfo(np.float32).max
    if beyond.any():
        return np.where(beyond, np.nan, features)
    return features


def check_settings(method: Method, hp: Mapping[str, Any], protocol: str) -> None:
    """Refuse hyperparameters that the method does not take, and another protocol than follows. Raises StoreError."""
    declared = {h.name: h for h in method.hparams}
    for name in hp.keys() & declared.keys():
        value = hp[name]
        try:
            same = declared[name].parse(value) == value
        except FedcacheError:
            same = False
        if not same:
            raise refused(
                f"{name} of {method.name} is {str(value)[:40]!r}, expected {declared[name].legal()}"
            )
    try:
        wanted = method.protocol(hp)
    except (KeyError, TypeError) as error:
        raise refused(f"{method.name} lacks hyperparameters ({reason(error)})") from error
    if protocol != wanted:
        raise refused(
            f"its protocol is {protocol}, and that of {method.name} with its settings is {wanted}"
        )


def _check_scores(model: DeployedModel, *, needs_client: bool) -> None:
    """Let a model score one row, so that tensors of other shapes than the method's are known before any answer.

    Raises StoreError where it cannot; UsageError for a server that has nothing that predicts by itself, if
    ``needs_client``.
    """
    env = model.ctx.env
    if env.image is None:
        size = env.width
    else:
        size = 3 * env.image[0] * env.image[1]
    row = torch.zeros(1, size, dtype=env.dtype if env.image is None else torch.uint8)
    try:
        with torch.no_grad():
            begun = model.method.broadcast(model.method.init(model.ctx), model.ctx)
            scores = model.scores(row.to(env.device))
    except (FedcacheError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of the package meets tensors of any shape, names and types
        if needs_client and isinstance(error, KeyError):
            raise UsageError(
                f"{model.method.name} has no model for all: its server holds what clients share, and no classifier.",
                "--client NAME takes the model of a client.",
            ) from None
        raise refused(
            f"{model.method.name} cannot score with its tensors ({reason(error)})"
        ) from error
    for name in begun.keys() & model.down.keys():
        # A tensor of one number would be spread over all without an error.
        found = model.down[name]
        wanted = begun[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise refused(
                f"{name} of {model.method.name} is {found.dtype} {list(found.shape)}, expected {wanted.dtype} "
                f"{list(wanted.shape)}"
            )
    if tuple(scores.shape) != (1, env.classes) or not scores.is_floating_point():
        raise refused(
            f"{model.method.name} scores {list(scores.shape[1:])} classes with its tensors, of {env.classes}"
        )


# What a run trained as one ``SavedModel``: the server's tensors, and the model of each client that
# is to be saved.


MOST_BYTES = 256 << 20
"""Personal models of one seed that are saved without being asked for; ``--save-clients`` saves any."""


@dataclass(frozen=True)
class Collected:
    """A model, and what there is to say about it."""

    model: SavedModel
    notes: tuple[str, ...]  # sentences


def collect(
    out: TrainingOutput,
    facts: ModelFacts,
    data: Data,
    scaling: Scaling | None,
    clients: str | None = None,
) -> Collected | None:
    """The models of a seed; None where the one model for all is not there.

    Raises UsageError for a client in ``clients`` that the run has not.

    Args:
        out: of the seed.
        facts: of the run; ``saved`` is filled in here.
        data: what was trained on, for its text features.
        scaling: the numbers of ``feat_post=standardize``.
        clients: ``--save-clients``: all, none, or names, comma-separated; None for all up to ``MOST_BYTES``.
    """
    tensors: dict[str, Tensor] = {}
    if data.text is not None:
        tensors["features/text"] = data.text
    if scaling is not None:
        tensors |= {
            "features/mean": torch.from_numpy(scaling.mean),
            "features/scale": torch.from_numpy(scaling.scale),
        }
    notes: list[str] = []
    if not facts.personal:
        one = out.deployed(None)
        if one is None:
            return None
        check_saved(one, data)
        tensors |= {f"server/{name}": t for name, t in one.down.items()}
        return Collected(SavedModel(facts, owned(tensors)), ())
    saved: dict[str, int] = {}
    rows = ClientTensors()
    shared = out.broadcast()
    left_out = 0
    tensors = owned(tensors | {f"server/{name}": t for name, t in shared.items()})
    for number in chosen_clients(out.clients, clients):
        own = out.deployed(number)
        if own is None:
            continue
        if not saved:
            check_saved(own, data)
        one_client = client_tensors(own, shared)
        size = sum(t.numel() * t.element_size() for t in one_client.values())
        if clients is None and not saved and size * len(out.clients) > MOST_BYTES:
            left_out = size * len(out.clients)
            break
        saved[out.clients[number]] = number
        rows.add(number, owned(one_client))
    if left_out:
        notes.append(
            f"Models of {len(out.clients):,} clients would take {left_out / 1e6:,.0f} MB and are not saved: "
            "--fresh --save-clients all, or the names of some, saves them."
        )
    return Collected(
        SavedModel(replace(facts, saved=saved), tensors | rows.stacked()), tuple(notes)
    )


def client_tensors(model: DeployedModel, shared: Tree) -> Tree:
    """What a client's model has in the place of what all share (``down/NAME``), and beside it (``own/NAME``)."""
    own = {f"down/{k}": t for k, t in model.down.items() if t is not shared.get(k)}
    return own | {f"own/{k}": t for k, t in model.personal.items()}


def chosen_clients(names: Sequence[str], asked: str | None) -> list[int]:
    """The numbers of the clients that ``--save-clients`` names.

    Raises UsageError for a name that no client has.
    """
    if asked in (None, "all"):
        return list(range(len(names)))
    if asked == "none":
        return []
    numbers = {name: i for i, name in enumerate(names)}
    wanted = [part.strip() for part in str(asked).split(",") if part.strip()]
    for name in wanted:
        if name not in numbers:
            raise unknown(
                "client", name, list(numbers), hint="--save-clients all | none | NAME,NAME"
            )
    return sorted({numbers[name] for name in wanted})


def check_saved(model: DeployedModel, data: Data) -> None:
    """Refuse a user's own method whose ``predict`` reads what a file does not hold; UsageError says what to do."""
    if model.method.name in NAMES and METHODS[model.method.name] is model.method:
        return  # a test holds it for every method of the package
    x = data.x[:1, 0, : model.ctx.env.width]
    if x.is_floating_point():
        x = x.to(model.ctx.env.dtype)
    apart = replace(model, data=no_training_rows(model.method.name))
    with torch.no_grad():
        scores = apart.scores(x)
    if scores.shape[-1] != data.classes:
        raise UsageError(
            f"predict of {model.method.name} gives {scores.shape[-1]} scores for {data.classes} classes.",
            "Return scores [N, C].",
        )


def owned(tree: Tree) -> Tree:
    """Copies on the CPU that share no memory with one another, as a file wants them."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tree.items()}


# What may be asked of the model of a run, as options of ``predict``, ``evaluate`` and
# ``export-model``.


MODEL = "Model"
ROWS = "Rows"
RESULT = "Result"
"""Panels of the help."""

BATCH_OF_THE_RUN = "that of the run's features"
"""The batch in which images are computed unless ``--batch`` says one, in words."""

ONE_SEED = "A seed of the run."
"""What ``--seed`` is to the commands that make one model of one."""


@dataclass(frozen=True)
class ModelOptions:
    """Which model of a run."""

    client: str | None = option(
        None,
        "Whose model, of a method that trains one for each client.",
        MODEL,
        said="the one for all",
    )
    one_for_all: bool = option(
        False,
        "The server's model, where a method trains personal ones beside it.",
        MODEL,
        name="--global",
    )
    seed: str | None = option(
        None, "A seed of the run, or all: their mean probability.", MODEL, said="the run's first"
    )
    temperature: float | None = option(
        None,
        "Scores are divided by it before the softmax.",
        MODEL,
        said="that fitted in training, or 1",
    )
    weights: Mapping[str, str] = option(
        {}, "NAME=FILE, a backbone's local weights; repeatable.", MODEL, said="looked for by name"
    )
    backbone: tuple[str, ...] = option(
        (), "A module: backbone that the model reads and whose code you trust.", MODEL, said="none"
    )
    runs: str | None = option(
        None,
        "Directory of the runs, instead of the one under FEDCACHE_HOME.",
        MODEL,
        path=True,
        said="$FEDCACHE_HOME/runs",
    )

    def __post_init__(self) -> None:
        # Python code may say client=0: a name as any other, which is found or refused with those that are there.
        if self.client is not None:
            object.__setattr__(self, "client", str(self.client))


@dataclass(frozen=True)
class PredictOptions:
    """Which rows, and where what is said of them goes."""

    store: str | None = option(
        None,
        "Rows of a store, by directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        remote=True,
        said="none",
    )
    split: str = option(
        "all", "Which rows of --store.", ROWS, choices=("all", "train", "test", "validation")
    )
    embeddings: str | None = option(
        None,
        "Features in place of images: .npz, .npy, .h5, .parquet or .safetensors.",
        ROWS,
        path=True,
        said="none",
    )
    top: int = option(1, "Classes to name for each row.", RESULT, minimum=1)
    out: str | None = option(
        None,
        "Write all rows here: FILE.csv, .jsonl or .parquet.",
        RESULT,
        short="-o",
        path=True,
        said="nowhere",
    )


@dataclass(frozen=True)
class EvaluateOptions:
    """On which labelled rows models are evaluated, and where the figures go."""

    dataset: str | None = option(None, DATASET, ROWS, short="-d", said="none")
    store: str | None = option(
        None,
        "Rows of a store, by directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        remote=True,
        said="none",
    )
    embeddings: str | None = option(
        None,
        "Features with labels: .npz, .h5, .parquet or .safetensors.",
        ROWS,
        path=True,
        said="none",
    )
    split: str = option(
        "all", "Which of these rows.", ROWS, choices=("all", "train", "test", "validation")
    )
    with_images: bool = option(
        False, "In FILE.html also the images of the most confident mistakes.", RESULT
    )
    out: str | None = option(
        None,
        "Write everything here: FILE.html, .csv or .json.",
        RESULT,
        short="-o",
        path=True,
        said="nowhere",
    )


@dataclass(frozen=True)
class PersonaliseOptions:
    """Whose model is made, of which rows, and where it goes."""

    store: str | None = option(
        None,
        "The new client's rows: a store, by directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        remote=True,
        said="none; name one",
    )
    name: str | None = option(
        None, "Of the new client.", MODEL, said="that of the shard, or of the store"
    )
    set: Mapping[str, str] = option(
        {},
        "key=value of the method, in place of the run's. Repeatable.",
        MODEL,
        once=True,
        said="the run's",
    )
    rounds: int | None = option(
        None,
        "Of local training, each of the run's number of epochs.",
        MODEL,
        minimum=0,
        said="the run's",
    )
    out: str | None = option(
        None,
        "The model file, .safetensors; one that is there is kept.",
        RESULT,
        short="-o",
        path=True,
        said="NAME.safetensors",
    )


@dataclass(frozen=True)
class ExportOptions:
    """Where an exported model goes, and how it is written."""

    out: str | None = option(
        None,
        "A folder, or a file ending in .onnx, .pt2, .safetensors or .joblib.",
        RESULT,
        short="-o",
        path=True,
        said="none; say one",
    )
    kind: str | None = option(
        None,
        "What is written.",
        RESULT,
        name="--format",
        said="that of the ending of -o",
        choices=("folder", "onnx", "torch", "safetensors", "sklearn"),
    )
    force: bool = option(False, "Write over what is there; other files of a folder stay.", RESULT)
