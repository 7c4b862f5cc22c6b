"""Model of a finished run for Python code: images or features in; class names, scores and embeddings out."""

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
from fedcache.extract.recipe import TEXTS
from fedcache.models.predictor import Predictor, named_predictions, predict_images, reads_of_model
from fedcache.models.saved_model import AS_BYTES, SavedModel, type_of
from fedcache.notebooks import html_facts
from fedcache.parsing import Facts
from fedcache.process import Stop, usual_torch_state
from fedcache.progress import Observer, Silent
from fedcache.tables.words import some_names

Features = Any
"""Float features [N, D], with several backbones concatenated or as one array each; or, for a method that trains on
images, uint8 [N, H, W, 3] of the size it was trained on."""


@dataclass(frozen=True, repr=False)
class Model:
    """One trained model, or an ensemble of several seeds; it can be pickled and sent to other processes.

        model = fc.train("fed3r", store, parts).model()
        model.predict(["cat.jpg", "photos/"])
        model.scores(features)

    Attributes:
        predictor: computes the scores.
        home: where the weights of backbones are looked for.
        observer: receives the messages about images; silent by default.
    """

    predictor: Predictor
    home: Home
    observer: Observer = field(default_factory=Silent)

    def __getstate__(self) -> Facts:
        """The pickled state, with a silent observer."""
        return {**self.__dict__, "observer": Silent()}

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of scores."""
        return self.predictor.classes

    @property
    def state(self) -> dict[str, Tensor]:
        """Every tensor of the model file by its name. Raises UsageError for an ensemble."""
        return dict(self._only_member("state").tensors)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model file, which ``fedcache.load_model`` and ``fedcache predict`` read. Returns its path.

        It holds the models of all clients that the run saved. Raises UsageError for an ensemble, for a model with a
        client prior, and for a file that exists unless ``overwrite``; otherwise as ``SavedModel.save``.
        """
        model = self._only_member("a file")
        if self.predictor.prior is not None:
            raise UsageError(
                "A model file cannot contain a client prior.",
                "Export the model (fedcache export-model), or give client_prior when you load the file.",
            )
        if not overwrite and Path(path).exists():
            raise UsageError(
                f"{path} exists already.", "model.save(path, overwrite=True) replaces it."
            )
        model.save(path)
        return Path(path)

    @usual_torch_state()
    def predict(self, images: Any, top: int | None = None) -> list[Any]:
        """The class of every image, or of every row of features.

        Features of images are computed by the backbones of the model, as in ``fedcache predict``.

        Args:
            images: a path or several (images, folders with all levels, .zip, .tar), Pillow images, arrays uint8
                [N, H, W, 3] or [H, W, 3]; or features, floats [N, D]. For a model of texts, one text or several.
            top: number of classes to name; None for only the best class.

        Returns:
            N names; with ``top`` N lists of (name, probability), the best first. An unreadable item is None, or [].

        Raises:
            UsageError for paths without images or arrays of another type; StoreError for another number of features,
            or for images if the model was trained on embeddings of an unknown backbone; MachineError for missing
            weights.
        """
        if top is not None:
            self.predictor.check_top(top, "top")
        # Strings are texts to classify if the model reads texts; otherwise they are paths of images.
        texts = isinstance(_first(images), str)
        if texts and reads_of_model(self.predictor.members[0]) == TEXTS:
            named: NamedImages | None = texts_in_memory(images)
        else:
            named = _images(images)
        count = top or 1
        if named is None:
            scores = self.predictor.scores(*self._arrays(images))
            names = [str(i) for i in range(scores.shape[1])]
            predictions = named_predictions(self.predictor, names, scores, count)
        else:
            config = ExtractConfig()
            predictions = predict_images(
                self.predictor, named, config, self.home, self.observer, Stop(), top=count
            )
        if top is None:
            return [next(iter(row.classes), None) for row in predictions]
        return [list(zip(row.classes, row.probabilities, strict=True)) for row in predictions]

    def scores(self, X: Features) -> NDArray[np.float64]:
        """Scores float64 [N, C] of features, [E, N, C] of an ensemble; the classifier takes the highest score.

        Raises StoreError for another number of features than the model reads.
        """
        scores = self.predictor.scores(*self._arrays(X))
        if len(scores) == 1:
            return np.asarray(scores[0])
        return scores

    def probabilities(self, X: Features, temperature: float | None = None) -> NDArray[np.float64]:
        """Softmax of scores / temperature, float64 [N, C]; the mean over an ensemble. Raises as ``scores``.

        None takes the temperature that was fitted when the model was trained. Without a fitted temperature
        (``model.predictor.calibrated`` is False) it is 1, and the probabilities are not calibrated.
        """
        predictor = self.predictor
        if temperature is not None:
            predictor = replace(predictor, temperature=temperature)
        return predictor.probabilities(*self._arrays(X))

    def embed(self, X: Features) -> NDArray[np.float64]:
        """Input of the classifier for these features, float64 [N, d].

        For a method with a trained projection or encoder this is its output; for other methods it is the features after
        the run's ``feat_post``. Raises as ``scores``; UsageError for an ensemble.
        """
        return self.predictor.embed(*self._arrays(X))

    def _only_member(self, purpose: str) -> SavedModel:
        """The model of the only seed. Raises UsageError for an ensemble, with the purpose as the subject."""
        count = len(self.predictor.members)
        if count > 1:
            raise UsageError(
                f"{purpose.capitalize()} needs one seed, but {count} are loaded.",
                "Load one seed: seed=0",
            )
        return self.predictor.members[0]

    def _arrays(self, X: Features) -> list[np.ndarray]:
        """Features as one array for each backbone, [N, d] each; images as one array."""
        facts = self.predictor.members[0].facts
        item = _first(X)
        if isinstance(item, str | Path):
            raise UsageError(
                f"{str(item)!r} is a path, but features must be numbers.",
                "model.predict(paths) classifies images.",
            )
        if facts.image is not None:
            return [np.asarray(X)]
        if isinstance(X, list | tuple) and np.ndim(item) >= 2:
            parts = [np.asarray(a) for a in X]
        else:
            parts = [np.asarray(X)]
        # One array with the concatenated features of all backbones is split into one array for each backbone.
        first = parts[0]
        if len(parts) == 1 and first.ndim == 2 and first.shape[1] == facts.width:
            parts = np.split(first, np.cumsum(facts.widths)[:-1], axis=1)
        # Features are floats, integers or truth values.
        fits = all(p.ndim == 2 and p.dtype.kind in "fiub" for p in parts)
        if not fits or tuple(p.shape[-1] for p in parts) != facts.widths:
            hint = f"store.Xy({list(facts.backbones)!r}) returns such features from a store."
            # Two mistakes are common: a single row without its axis, and images instead of features.
            if first.shape == (facts.width,):
                hint = "For one row:  model.scores(x[None])"
            elif first.ndim in (3, 4) and first.shape[-1] == 3:
                hint = AS_BYTES
            found = type(X).__name__
            if first.ndim:
                found = " and ".join(map(type_of, parts))
            reads = " + ".join(facts.backbones)
            raise StoreError(
                f"The model reads features of shape [N, {facts.width}] ({reads}), found {found}.",
                hint,
            )
        return parts

    def _facts(self) -> Facts:
        members = self.predictor.members
        f = members[0].facts
        return {
            "method": f.method,
            "dataset": f.dataset,
            "reads": " + ".join(f.backbones),
            "classes": some_names(f.classes, 8),
            "client": self.predictor.client,
            "client prior": self.predictor.prior_words,
            "seeds": ", ".join(str(m.facts.seed) for m in members),
            "run": f.run[:12],
            "bytes": f"{sum(m.bytes for m in members):,}",
        }

    def __repr__(self) -> str:
        known = self._facts()
        details = f"{len(self.classes)} classes"
        if known["client"] is not None:
            details += f", client {known['client']}"
        if known["client prior"] is not None:
            details += f", client prior {known['client prior']}"
        title = "{method} on {dataset}, {reads}".format(**known)
        return f"Model({title}: {details}, seed {known['seeds']})"

    def _repr_html_(self) -> str:
        return html_facts(repr(self), self._facts())


def _first(given: Any) -> Any:
    """The first item of a list or tuple; anything else, also an empty list, as it is."""
    if isinstance(given, list | tuple) and given:
        return given[0]
    return given


def _images(given: Any) -> NamedImages | None:
    """Paths, arrays or Pillow images as images with names; None for features."""
    if isinstance(given, str | Path):
        return find_images([Path(given)])
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8:
            return None
        if given.ndim == 3 and given.shape[2] == 3:
            return images_in_memory([given])
        return images_in_memory(list(given))
    if not isinstance(given, Sequence):
        # Tensors, tables and Pillow images convert to arrays; only Pillow images have ``getexif``.
        if hasattr(given, "__array__") and not hasattr(given, "getexif"):
            return None
        return images_in_memory([given])
    if given and all(isinstance(one, str | Path) for one in given):
        return find_images([Path(one) for one in given])
    if given:
        # Arrays are images if they are uint8 and have at least two axes; all other arrays are features.
        first = np.asarray(given[0])
        if first.dtype != np.uint8 or first.ndim == 1:
            return None
    return images_in_memory(given)
