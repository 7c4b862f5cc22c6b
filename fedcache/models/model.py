"""The model of a finished run, as Python code uses it: images or features in, names, scores and embeddings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcache.config import ExtractConfig, Home
from fedcache.errors import StoreError, UsageError
from fedcache.extract.embed_images import (
    NamedImages,
    find_images,
    images_in_memory,
    texts_in_memory,
)
from fedcache.extract.inputs import TEXTS
from fedcache.models.predictions import best_of
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import AS_BYTES, SavedModel
from fedcache.models.sources import predict_images, reads_of_model
from fedcache.notebooks import html_facts
from fedcache.process import Stop
from fedcache.progress import Observer, Silent
from fedcache.torch_state import usual_torch_state

Features = Any
"""Float features [N, D], those of several backbones side by side or as one array each; or, for a method that trains on
images, uint8 [N, H, W, 3] of the size it was trained on."""


@dataclass(frozen=True, repr=False)
class Model:
    """One trained model, or several seeds of it as an ensemble; it can be pickled, and so sent to other processes.

        model = fc.train("fed3r", store, parts).model()
        model.predict(["cat.jpg", "photos/"])
        model.scores(features)

    Attributes:
        predictor: computes the scores.
        home: where the weights of backbones are looked for.
        observer: told the story of images; silent by default.
    """

    predictor: Predictor
    home: Home
    observer: Observer = field(default_factory=Silent)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: whoever listens stays behind."""
        return {**self.__dict__, "observer": Silent()}

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of scores."""
        return self.predictor.classes

    @property
    def state(self) -> dict[str, Tensor]:
        """Every tensor of the model file by its name. Raises UsageError for an ensemble."""
        return dict(self._alone("state").tensors)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model file, which ``fedcache.load_model`` and ``fedcache predict`` read; returns its path.

        It holds the models of all clients that the run saved. Raises UsageError for an ensemble, a file that is there
        already unless ``overwrite``; otherwise as ``SavedModel.save``.
        """
        model = self._alone("a file")
        if not overwrite and Path(path).exists():
            raise UsageError(
                f"{path} is there already.", "model.save(path, overwrite=True) takes its place."
            )
        model.save(path)
        return Path(path)

    @usual_torch_state()
    def predict(self, images: Any, top: int | None = None) -> list[Any]:
        """The class of every image, or of every row of features.

        Images go through the very backbones that the model was trained on, as ``fedcache predict`` does.

        Args:
            images: a path or several (images, folders with all levels, .zip, .tar), Pillow images, arrays uint8
                [N, H, W, 3] or [H, W, 3]; or features, floats [N, D]. Of a model of texts a text or several.
            top: how many classes to name; None for the best alone.

        Returns:
            N names; with ``top`` N lists of (name, probability), the best first. What cannot be read is None, or [].

        Raises:
            UsageError for paths without images or arrays of another type; StoreError for another number of features,
            or for images where the model was trained on embeddings of an unknown backbone; MachineError for weights
            that are not here.
        """
        if top is not None:
            self.predictor.check_top(top, "top")
        if reads_of_model(self.predictor.members[0]) == TEXTS and _are_texts(images):
            named: NamedImages | None = texts_in_memory(images)
        else:
            named = _images(images)
        wanted = top or 1
        if named is None:
            scores = self.predictor.scores(*self._arrays(images))
            names = [str(i) for i in range(scores.shape[1])]
            p = self.predictor.mean_probability(scores)
            ranking = self.predictor.ranking(scores)
            found = list(
                best_of(
                    names, self.classes, self.predictor.predicted(scores), p, ranking, wanted, {}
                )
            )
        else:
            found = list(
                predict_images(
                    self.predictor,
                    named,
                    ExtractConfig(),
                    self.home,
                    self.observer,
                    Stop(),
                    top=wanted,
                )
            )
        if top is None:
            return [row.classes[0] if row.classes else None for row in found]
        return [list(zip(row.classes, row.probabilities, strict=True)) for row in found]

    def scores(self, X: Features) -> NDArray[np.float64]:
        """Scores float64 [N, C] of features: what the method's classifier maximises; [E, N, C] of an ensemble.

        Raises StoreError for another number of features than the model reads.
        """
        found = self.predictor.scores(*self._arrays(X))
        scores: NDArray[np.float64] = found[0] if len(found) == 1 else found
        return scores

    def probabilities(self, X: Features, temperature: float | None = None) -> NDArray[np.float64]:
        """Softmax of scores / temperature, float64 [N, C]; of an ensemble the mean. Raises as ``scores``.

        None is the temperature that was fitted when the model was trained. Where none was fitted
        (``model.predictor.calibrated`` is False) it is 1, and the numbers are no probabilities of being right.
        """
        # The ready models stay with the predictor that has them; the copy only divides.
        copy = replace(self.predictor, temperature=temperature)
        return copy.mean_probability(self.predictor.scores(*self._arrays(X)))

    def embed(self, X: Features) -> NDArray[np.float64]:
        """What the classifier reads of features, float64 [N, d].

        That is the output of the trained projection or encoder, for a method that has one, else the features after
        the run's ``feat_post``. Raises as ``scores``; UsageError for an ensemble.
        """
        return self.predictor.embed(*self._arrays(X))

    def _alone(self, what: str) -> SavedModel:
        members = self.predictor.members
        if len(members) > 1:
            raise UsageError(
                f"{what.capitalize()} is of one seed, and {len(members)} are loaded.", "seed=0"
            )
        return members[0]

    def _arrays(self, X: Features) -> list[np.ndarray]:
        facts = self.predictor.members[0].facts
        if isinstance(path := X[0] if isinstance(X, list | tuple) and X else X, str | Path):
            raise UsageError(
                f"{str(path)!r} is a path, and features are numbers.",
                "model.predict(paths) classifies images.",
            )
        if facts.image is not None:
            return [np.asarray(X)]
        parts = (
            [np.asarray(X)]
            if not isinstance(X, list | tuple) or np.ndim(X[0]) < 2
            else [np.asarray(a) for a in X]
        )
        if len(parts) == 1 and parts[0].ndim == 2 and parts[0].shape[1] == facts.width:
            parts = np.split(parts[0], np.cumsum(facts.widths)[:-1], axis=1)
        fits = tuple(p.shape[-1] if p.ndim == 2 else None for p in parts) == facts.widths
        if not fits or any(p.dtype.kind not in "fiub" for p in parts):
            hint = f"store.Xy({list(facts.backbones)!r}) gives such features of a store."
            if parts[0].shape == (facts.width,):
                hint = "model.scores(x[None])   of one row."
            elif parts[0].ndim in (3, 4) and parts[0].shape[-1] == 3:
                hint = AS_BYTES
            found = " and ".join(
                f"{p.dtype} {list(p.shape)}" if p.ndim else type(X).__name__ for p in parts
            )
            raise StoreError(
                f"The model reads features [N, {facts.width}] ({' + '.join(facts.backbones) or 'embeddings'}), found "
                f"{found}.",
                hint,
            )
        return parts

    def _facts(self) -> dict[str, Any]:
        members = self.predictor.members
        f = members[0].facts
        return {
            "method": f.method,
            "dataset": f.dataset,
            "reads": " + ".join(f.backbones) or f"{f.width} features",
            "classes": ", ".join(f.classes[:8]) + (", ..." if len(f.classes) > 8 else ""),
            "client": self.predictor.client,
            "seeds": ", ".join(str(m.facts.seed) for m in members),
            "run": f.run[:12],
            "bytes": f"{sum(m.bytes for m in members):,}",
        }

    def __repr__(self) -> str:
        known = self._facts()
        whose = f", client {known['client']}" if known["client"] is not None else ""
        return (
            f"Model({known['method']} on {known['dataset']}, {known['reads']}: {len(self.classes)} classes{whose}, "
            f"seed {known['seeds']})"
        )

    def _repr_html_(self) -> str:
        return html_facts(repr(self), self._facts())


def _are_texts(given: Any) -> bool:
    """Whether these are words and not features."""
    return isinstance(given, str) or (
        isinstance(given, list | tuple) and bool(given) and isinstance(given[0], str)
    )


def _images(found: Any) -> NamedImages | None:
    """What a person means by images; None for features."""
    if isinstance(found, str | Path):
        return find_images([Path(found)])
    if isinstance(found, np.ndarray):
        if found.dtype != np.uint8:
            return None
        return images_in_memory([found] if found.ndim == 3 and found.shape[2] == 3 else list(found))
    if not isinstance(found, Sequence):
        if hasattr(found, "__array__") and not hasattr(found, "getexif"):
            return None
        return images_in_memory([found])
    if found and all(isinstance(one, str | Path) for one in found):
        return find_images([Path(one) for one in found])
    first = np.asarray(found[0]) if found else np.empty(0, np.uint8)
    if (first.dtype == np.uint8 and first.ndim != 1) or not found:
        return images_in_memory(found)
    return None
