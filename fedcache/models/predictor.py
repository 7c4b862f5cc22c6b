"""Predictor: scores, probabilities and classes that a saved model gives for rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import FedcacheError, StoreError, UsageError, shell_word
from fedcache.extract.backbones import clip_towers, lookup_recorded
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.planning.find_store import more_features
from fedcache.extract.recipe import OF_VIEWS, Recipe
from fedcache.federate.engine.client_data import FrozenEncoders
from fedcache.federate.engine.evaluate import BLOCK
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import DeployedModel
from fedcache.models.client_prior import ClientPrior, ModelWithPrior
from fedcache.models.saved_model import COLDEST, HOTTEST, SavedModel, check_finite, refused
from fedcache.plugins import MODULE
from fedcache.process import usual_torch_state
from fedcache.store.store import Store

Rows = NDArray[Any]
SHOWN = 20
"""Maximum number of characters of a recipe's value in an error message."""


@dataclass(frozen=True)
class Predictor:
    """One saved model, or several seeds of it as an ensemble, on one device.

    The scores of a method are logits, negative distances or similarities; its classifier takes the class with the
    highest score. Probabilities are the softmax of scores over classes after division by ``softmax_temperature``. The
    probabilities of an ensemble are the means over its members.
    """

    members: tuple[SavedModel, ...]  # one per seed, of the same run
    client: str | None = None  # owner of the model; None for the global model
    # Above 0; None for the temperature that was fitted when the model was trained.
    temperature: float | None = None
    device: str = "cpu"
    method: Method | None = None  # a user's method; None for a method of the package
    # Live encoders, for methods that run some.
    encoders: FrozenEncoders | None = field(default=None, repr=False)
    one_for_all: bool = False  # whether to use the server's model of a method with personal models
    prior: ClientPrior | None = None  # is added to the scores

    def __post_init__(self) -> None:
        if not self.members:
            raise UsageError("An ensemble needs at least one model.", "Give a seed of the run.")
        if self.temperature is not None:
            check_temperature(self.temperature)

    def __getstate__(self) -> dict[str, Any]:
        """The pickled state, without ``deployed``: it holds functions and is made again from the other fields."""
        return {name: value for name, value in self.__dict__.items() if name != "deployed"}

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of scores."""
        return self.members[0].facts.classes

    @property
    def calibrated(self) -> bool:
        """Whether a temperature was given or fitted. Without one a softmax is not a calibrated probability."""
        if self.temperature is not None:
            return True
        return all(m.facts.temperature is not None for m in self.members)

    @property
    def prior_words(self) -> str | None:
        """Kind and client of the prior; None without one."""
        if self.prior is None:
            return None
        return self.prior.words

    @property
    def softmax_temperature(self) -> float:
        """The given temperature, or the fitted one (geometric mean over an ensemble), or 1."""
        if self.temperature is not None:
            return self.temperature
        fitted = [m.facts.temperature or 1.0 for m in self.members]
        if len(fitted) == 1:
            return fitted[0]
        return float(np.exp(np.log(fitted).mean()))

    def check_top(self, top: int, name: str = "--top") -> None:
        """Refuse a ``top`` (classes to list for each row) that is not a whole number from 1 to C. Raises UsageError."""
        C = len(self.classes)
        if not isinstance(top, Integral) or not 1 <= top <= C:
            raise UsageError(
                f"{name} is {top!r}, but the model has {C:,} classes.",
                f"Give a whole number from 1 to {C}.",
            )

    @cached_property
    def deployed(self) -> tuple[DeployedModel, ...]:
        """The members' models, ready to score."""
        models = []
        for member in self.members:
            model = member.deployed(
                self.client,
                method=self.method,
                encoders=self.encoders,
                device=self.device,
                one_for_all=self.one_for_all,
            )
            if self.prior is not None:
                offset = self.prior.offset(self.softmax_temperature).to(self.device)
                model = ModelWithPrior(**vars(model), offset=offset)
            models.append(model)
        return tuple(models)

    def checked(self) -> Predictor:
        """This predictor, after every member's model was built. Raises UsageError, StoreError, as ``deployed``."""
        _ = self.deployed
        return self

    @usual_torch_state()
    def scores(self, *arrays: Rows) -> NDArray[np.float64]:
        """Scores of stored features (one array [N, d] per backbone) or images.

        Returns:
            float64 [E, N, C] for E members; NaN for a row with a missing or infinite feature, and for a row whose
            highest score is not finite.

        Raises StoreError for a model that holds numbers that are not finite.
        """
        N = len(arrays[0])
        out = np.empty((len(self.members), N, len(self.classes)))
        for e, (member, model) in enumerate(zip(self.members, self.deployed, strict=True)):
            for part in _blocks(N):
                x = member.read([a[part] for a in arrays], self.client).to(self.device)
                scores = out[e, part]  # a view: writing to it fills ``out``
                with torch.no_grad():
                    scores[...] = model.scores(x).double().cpu().numpy()
                lost = np.zeros(len(scores), bool)
                # A method may turn NaN into a number, so rows with a missing feature are marked here.
                if x.is_floating_point():
                    lost = torch.isnan(x).any(-1).cpu().numpy()
                # A row with all features has finite scores unless the model has numbers that are not finite.
                if not np.isfinite(scores[~lost].max(-1)).all():
                    check_finite(member.tensors)
                scores[lost] = np.nan
        out[~np.isfinite(out.max(-1))] = np.nan
        return out

    @usual_torch_state()
    def embed(self, *arrays: Rows) -> NDArray[np.float64]:
        """Input of the classifier of one model for these rows, float64 [N, d]; NaN as ``scores``.

        Raises UsageError for an ensemble, because every member has its own embeddings.
        """
        count = len(self.members)
        if count > 1:
            raise UsageError(
                f"{count} models are loaded, and each model gives other embeddings.",
                "Load one seed: seed=0",
            )
        member = self.members[0]
        model = self.deployed[0]
        parts = []
        # If there are no rows, one empty block is embedded, so that the result has the right width.
        for part in _blocks(max(1, len(arrays[0]))):
            x = member.read([a[part] for a in arrays], self.client).to(self.device)
            with torch.no_grad():
                embedded = model.embed(x).double()
            if x.is_floating_point():
                lost = torch.isnan(x).any(-1, keepdim=True)
                embedded = embedded.masked_fill(lost, torch.nan)
            parts.append(embedded.cpu().numpy())
        return np.concatenate(parts)

    def probabilities(self, *arrays: Rows) -> NDArray[np.float64]:
        """Class probabilities [N, C]; NaN for a row without features."""
        return self.mean_probability(self.scores(*arrays))

    @usual_torch_state()
    def mean_probability(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scores [E, N, C] -> probabilities [N, C]."""
        each = torch.from_numpy(scores / self.softmax_temperature).softmax(-1)
        mean: NDArray[np.float64] = each.mean(0).numpy()
        return mean

    def ranking(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scores [E, N, C] -> numbers [N, C] that rank the classes, also if probabilities are rounded to 0.

        These are the scores of one model, and the log-probabilities of an ensemble up to a constant.
        """
        if len(scores) == 1:
            return np.asarray(scores[0])
        each = torch.from_numpy(scores / self.softmax_temperature).log_softmax(-1)
        log_sum: NDArray[np.float64] = each.logsumexp(0).numpy()
        return log_sum

    def predicted(self, scores: NDArray[np.float64]) -> NDArray[np.int64]:
        """Scores [E, N, C] -> int64 [N]: the class of the highest score or, in an ensemble, probability; -1 for NaN."""
        decided = scores[0]
        if len(scores) > 1:
            decided = self.mean_probability(scores)
        lost = np.isnan(decided).any(-1)
        return np.where(lost, -1, decided.argmax(-1))

    def over_store(
        self, store: Store, rows: NDArray[np.int64] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """(rows, scores [E, n, C]) of a store with the model's arrays, block by block.

        Raises StoreError for a store without one of these arrays.
        """
        if rows is None:
            rows = np.arange(store.rows)
        for part, arrays in self.read_store(store, rows):
            yield part, self.scores(*arrays)

    def read_store(
        self, store: Store, rows: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], list[Rows]]]:
        """(rows, features [n, d] of each backbone) of a store with the model's arrays; as ``over_store``."""
        readers = [store.reader(key) for key in array_keys(self.members[0], store)]
        for block in _blocks(len(rows)):
            part = np.asarray(rows[block], np.int64)
            yield part, [reader.rows(part)[:, 0] for reader in readers]


def _blocks(rows: int) -> Iterator[slice]:
    """Slices of at most ``BLOCK`` rows that cover all rows."""
    return (slice(start, start + BLOCK) for start in range(0, rows, BLOCK))


def check_temperature(value: float) -> None:
    """Refuse a temperature at which all probabilities are rounded to 0, 1 or 1 / C. Raises UsageError."""
    if not isinstance(value, Real) or not COLDEST <= value <= HOTTEST:
        raise UsageError(
            f"The temperature is {value!r}, expected {COLDEST:g} to {HOTTEST:g}.", "For example 1.0"
        )


def array_keys(model: SavedModel, store: Store) -> list[str]:
    """The arrays of a store that a model reads: those of its recipes, with any number of views.

    Raises StoreError, naming the missing backbone and the command that extracts its features.
    """
    keys = []
    for key, recipe in model.facts.inputs:
        needed = _of_one_view(recipe)
        matching = [k for k, a in store.arrays.items() if _of_one_view(a.recipe) == needed]
        if not matching:
            raise _missing_array(store, key, recipe)
        if key in matching:
            keys.append(key)
        else:
            keys.append(matching[0])
    return keys


def _missing_array(store: Store, key: str, recipe: Mapping[str, Any]) -> StoreError:
    """The error for a store without the features of a recipe; it names the differences of a similar array."""
    name = str(recipe.get("backbone", key))
    weights = str(recipe.get("weights", ""))
    similar = [a.recipe for a in store.arrays.values() if a.recipe.get("backbone") == name]
    differences = []
    if similar:
        for key_of_recipe, value in sorted(_of_one_view(recipe).items()):
            other = similar[0].get(key_of_recipe)
            if other != value:
                words = f"{str(other)[:SHOWN]} instead of {str(value)[:SHOWN]}"
                differences.append(f"{key_of_recipe} {words}")
    has = "it has " + (", ".join(store.arrays) or "none")
    if differences:
        has = f"its features of {name} have {', '.join(differences)}"
    message = (
        f"{store.path.name} does not have the features of {name} on which the model was trained"
    )
    if "size" not in recipe:  # ingested embeddings
        return StoreError(f"{message}; {has}.", "Give a store that has these features.")
    if weights != "none":
        message += f" (weights {weights[:12]})"
    hint = f"fedcache backbones import FILE --as {shell_word(name)}"
    if name.startswith(MODULE):  # a look-up would run the user's code just for a hint
        hint = more_features(store, name)
    else:
        with suppress(FedcacheError):  # a backbone that is not installed here
            parsed = Recipe.from_dict(recipe)
            options = lookup_recorded(parsed).options_of(parsed)
            hint = more_features(store, name, recipe=options)
    return StoreError(f"{message}; {has}.", hint)


def _of_one_view(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that determine view 0."""
    return {k: v for k, v in recipe.items() if k not in OF_VIEWS}


def encoders_of(model: SavedModel, home: Home, given: Mapping[str, Path]) -> FrozenEncoders | None:
    """The live encoders of a model that runs some, with the weights that its recipe names; None for other models.

    Raises MachineError, as ``locate_recipe``; StoreError for a backbone without live encoders.
    """
    if model.facts.encoder is None:
        return None
    item = locate_recipe(model.recipes[model.facts.encoder], home, given)
    try:
        return clip_towers.load_towers(
            item.backbone, item.weights, item.recipe, str(model.facts.template)
        )
    except UsageError as error:
        name = item.backbone.name
        raise refused(
            f"its encoders are those of {name}, which cannot be used here ({error.message})"
        ) from error
