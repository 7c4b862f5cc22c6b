"""Predictions of saved models: scores of rows, probabilities, and the images behind them."""

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
from torch import Tensor

from fedcache.config import Home
from fedcache.errors import FedcacheError, StoreError, UsageError, shell_word
from fedcache.extract.backbones import clip_towers, lookup_recorded
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.planning.find_store import more_features
from fedcache.extract.recipe import OF_VIEWS, Recipe
from fedcache.federate.engine.client_data import FrozenEncoders
from fedcache.federate.engine.deployed import DeployedModel
from fedcache.federate.engine.evaluate import BLOCK
from fedcache.federate.engine.method import Method
from fedcache.models.check_facts import COLDEST, HOTTEST, check_finite, refused
from fedcache.models.saved_model import SavedModel
from fedcache.store.own_names import MODULE
from fedcache.store.store import Store
from fedcache.torch_state import usual_torch_state

Rows = NDArray[Any]
SHOWN = 20
"""Letters of a recipe's value that an error shows."""


@dataclass(frozen=True)
class Predictor:
    """One saved model, or several seeds of it as an ensemble, on one device.

    The scores of a method are what its paper's classifier maximises: logits, negative distances or similarities.
    Probabilities are their softmax over classes after division by ``softmax_temperature``; an ensemble's are the means
    of its members'.
    """

    members: tuple[SavedModel, ...]  # one per seed, of the same run
    client: str | None = None  # whose model; None for the one for all
    temperature: float | None = (
        None  # > 0; None for the one that was fitted when the model was trained
    )
    device: str = "cpu"
    method: Method | None = None  # a user's own
    # live ones, for methods that run some
    encoders: FrozenEncoders | None = field(default=None, repr=False)
    one_for_all: bool = False  # the server's model of a method that trains personal ones beside it

    def __post_init__(self) -> None:
        if not self.members:
            raise UsageError("An ensemble needs a model.", "Name a seed of the run.")
        if self.temperature is not None:
            check_temperature(self.temperature)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not the models that are ready to score, which hold functions and are made of the rest."""
        return {name: value for name, value in self.__dict__.items() if name != "deployed"}

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of scores."""
        return self.members[0].facts.classes

    @property
    def calibrated(self) -> bool:
        """Whether a temperature was given or fitted, without which a softmax is no probability of being right."""
        return self.temperature is not None or all(
            m.facts.temperature is not None for m in self.members
        )

    @property
    def softmax_temperature(self) -> float:
        """What scores are divided by: what was given, or fitted; of an ensemble the geometric mean; 1 without."""
        if self.temperature is not None:
            return self.temperature
        fitted = [m.facts.temperature or 1.0 for m in self.members]
        if len(fitted) == 1:
            return fitted[0]
        return float(np.exp(np.log(fitted).mean()))

    def check_top(self, top: int, name: str = "--top") -> None:
        """Refuse to name more classes for a row than there are, none, or a part of one. Raises UsageError."""
        C = len(self.classes)
        if not isinstance(top, Integral) or not 1 <= top <= C:
            raise UsageError(
                f"{name} is {top!r}, and the model has {C:,} classes.",
                f"A whole number from 1 to {C}.",
            )

    @cached_property
    def deployed(self) -> tuple[DeployedModel, ...]:
        """The members' models, ready to score."""
        return tuple(
            m.deployed(
                self.client,
                method=self.method,
                encoders=self.encoders,
                device=self.device,
                one_for_all=self.one_for_all,
            )
            for m in self.members
        )

    def checked(self) -> Predictor:
        """Itself, with every member's model made. Raises UsageError, StoreError, as ``SavedModel.deployed``."""
        _ = self.deployed
        return self

    @usual_torch_state()
    def scores(self, *arrays: Rows) -> NDArray[np.float64]:
        """Scores of stored features (one array [N, d] per backbone) or images.

        Returns:
            float64 [E, N, C] for E members; NaN for a row with a feature that is missing or infinite, and for one whose
            highest score is no finite number, of which nothing can be said.

        Raises StoreError where that is the fault of the model, whose own numbers are not finite.
        """
        N = len(arrays[0])
        out = np.empty((len(self.members), N, len(self.classes)))
        for e, (member, model) in enumerate(zip(self.members, self.deployed, strict=True)):
            for start in range(0, N, BLOCK):
                x = member.read([a[start : start + BLOCK] for a in arrays], self.client).to(
                    self.device
                )
                with torch.no_grad():
                    out[e, start : start + BLOCK] = model.scores(x).double().cpu().numpy()
                scores = out[e, start : start + BLOCK]
                lost = np.zeros(len(scores), bool)
                # a missing row has no scores, whatever a method makes of NaN
                if x.is_floating_point():
                    lost = torch.isnan(x).any(-1).cpu().numpy()
                if not np.isfinite(scores[~lost].max(-1)).all():
                    check_finite(member.tensors)
                scores[lost] = np.nan
        out[~np.isfinite(out.max(-1))] = np.nan
        return out

    @usual_torch_state()
    def embed(self, *arrays: Rows) -> NDArray[np.float64]:
        """What the classifier of one model reads of rows, float64 [N, d]; NaN as ``scores``.

        Raises UsageError for an ensemble, whose members have embeddings of their own.
        """
        if len(self.members) > 1:
            raise UsageError(
                f"{len(self.members)} models have as many embeddings.", "Load one seed: seed=0"
            )
        (member,), (model,), parts = self.members, self.deployed, []
        for start in range(0, max(1, len(arrays[0])), BLOCK):
            x = member.read([a[start : start + BLOCK] for a in arrays], self.client).to(self.device)
            with torch.no_grad():
                made = model.embed(x).double()
            if x.is_floating_point():
                made = made.masked_fill(torch.isnan(x).any(-1, keepdim=True), torch.nan)
            parts.append(made.cpu().numpy())
        return np.concatenate(parts)

    def probabilities(self, *arrays: Rows) -> NDArray[np.float64]:
        """Class probabilities [N, C]; NaN for a row without features."""
        return self.mean_probability(self.scores(*arrays))

    @usual_torch_state()
    def mean_probability(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """[E, N, C] scores -> [N, C] probabilities."""
        p: Tensor = torch.from_numpy(scores / self.softmax_temperature).softmax(-1).mean(0)
        found: NDArray[np.float64] = p.numpy()
        return found

    def ranking(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """[E, N, C] scores -> [N, C], the higher the more probable: also where probabilities are too small to differ.

        That is the scores of one model, and the log of an ensemble's probabilities.
        """
        if len(scores) == 1:
            return np.asarray(scores[0])
        each: Tensor = torch.from_numpy(scores / self.softmax_temperature).log_softmax(-1)
        found: NDArray[np.float64] = each.logsumexp(0).numpy()
        return found

    def predicted(self, scores: NDArray[np.float64]) -> NDArray[np.int64]:
        """[E, N, C] scores -> int64 [N]: the class of the highest score, or probability in an ensemble; -1 for NaN."""
        if len(scores) == 1:
            decided = scores[0]
        else:
            decided = self.mean_probability(scores)
        lost = np.isnan(decided).any(-1)
        return np.where(lost, -1, np.where(np.isnan(decided), -np.inf, decided).argmax(-1))

    def over_store(
        self, store: Store, rows: NDArray[np.int64] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """(rows, scores [E, n, C]) of a store that has the model's arrays, block by block.

        Raises StoreError for a store that lacks one.
        """
        keys = array_keys(self.members[0], store)
        readers = [store.reader(key) for key in keys]
        if rows is None:
            wanted = np.arange(store.rows)
        else:
            wanted = np.asarray(rows, np.int64)
        for start in range(0, len(wanted), BLOCK):
            part = wanted[start : start + BLOCK]
            yield part, self.scores(*(reader.rows(part)[:, 0] for reader in readers))


def check_temperature(value: float) -> None:
    """Refuse a temperature with which no probability can be told from 0, 1 or 1 / C. Raises UsageError."""
    if not isinstance(value, Real) or not COLDEST <= value <= HOTTEST:
        raise UsageError(
            f"The temperature is {value!r}, expected {COLDEST:g} to {HOTTEST:g}.", "For example 1.0"
        )


def array_keys(model: SavedModel, store: Store) -> list[str]:
    """The arrays of a store that hold what a model reads: those of its recipes, with any number of views.

    Raises StoreError, naming the backbone that lacks and the command that extracts it.
    """
    found = []
    for wanted, recipe in model.facts.inputs:
        same = [key for key, a in store.arrays.items() if _same_value(a.recipe, recipe)]
        if not same:
            raise _lacks(store, wanted, recipe)
        found.append(wanted if wanted in same else same[0])
    return found


def _lacks(store: Store, wanted: str, recipe: Mapping[str, Any]) -> StoreError:
    """The error of a store without the features of a recipe: in what those of the same backbone differ from it."""
    name = str(recipe.get("backbone", wanted))
    weights = str(recipe.get("weights", ""))
    alike = [a.recipe for a in store.arrays.values() if a.recipe.get("backbone") == name]
    apart = [
        f"{key} {str(found.get(key))[:SHOWN]} in place of {str(recipe[key])[:SHOWN]}"
        for found in alike[:1]
        for key in sorted(recipe)
        if found.get(key) != recipe[key] and key not in OF_VIEWS
    ]
    if apart:
        has = f"its {name} has {', '.join(apart)}"
    else:
        has = f"it has {', '.join(store.arrays) or 'none'}"
    message = f"{store.path.name} has no features of {name} as the model was trained on"
    if "size" not in recipe:  # somebody's own embeddings
        return StoreError(f"{message}; {has}.", "Name a store that has them.")
    message += f" (weights {weights[:12]})" if weights != "none" else ""
    if name.startswith(MODULE):  # code, which no hint is worth running for
        return StoreError(f"{message}; {has}.", more_features(store, name))
    with suppress(FedcacheError):  # a backbone of another installation
        made = Recipe.from_dict(recipe)
        options = lookup_recorded(made).options_of(made)
        return StoreError(f"{message}; {has}.", more_features(store, name, recipe=options))
    return StoreError(
        f"{message}; {has}.", f"fedcache backbones import FILE --as {shell_word(name)}"
    )


def _same_value(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether view 0 of two recipes is the same value."""
    return {k: v for k, v in found.items() if k not in OF_VIEWS} == {
        k: v for k, v in wanted.items() if k not in OF_VIEWS
    }


def encoders_of(
    model: SavedModel, home: Home, given: Mapping[str, Path] | None = None
) -> FrozenEncoders | None:
    """The live encoders of a model that runs some, with the weights that its recipe names; None for the others.

    Raises MachineError, as ``locate_recipe``; StoreError for a backbone that has none.
    """
    if model.facts.encoder is None:
        return None
    item = locate_recipe(model.recipes[model.facts.encoder], home, given)
    try:
        return clip_towers.load_towers(
            item.backbone, item.weights, item.recipe, str(model.facts.template)
        )
    except UsageError as error:
        raise refused(
            f"its live encoders are {item.backbone.name}, which has none ({error.message})"
        ) from error
