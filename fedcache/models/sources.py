"""Sources of rows for prediction: images or texts, a store, or a file of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import ExtractConfig, Home
from fedcache.errors import StoppedError, StoreError, UsageError, shell_word, unknown
from fedcache.extract.compute_features import ExtractionOptions
from fedcache.extract.datasets.dataset import SPLIT_WORDS
from fedcache.extract.embed_images import (
    NamedImages,
    embedded,
    find_images,
    find_texts,
    locate_recipe,
)
from fedcache.extract.inputs import ROWS, TEXTS, held_by
from fedcache.extract.recipe import Recipe
from fedcache.models.predictions import Prediction, best_of
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import SavedModel
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.store.store import Store
from fedcache.tables.embeddings import Embeddings
from fedcache.tables.words import FileRows, blocks_of


def read_recipes(model: SavedModel) -> list[Recipe]:
    """How each input of a model is made from an image, in the order in which ``Predictor.scores`` takes them.

    Raises StoreError for a model of embeddings whose backbone fedcache does not know.
    """
    if not has_known_backbones(model):
        raise StoreError(
            f"The model was trained on embeddings of {' + '.join(model.facts.backbones) or 'no known backbone'}, and "
            "how they are made from images is not known here.",
            "fedcache predict RUN --embeddings FILE   takes such embeddings.",
        )
    return [Recipe.from_dict(recipe) for _, recipe in model.facts.inputs]


def has_known_backbones(model: SavedModel) -> bool:
    """Whether the recipes say how each input is made from an image; those of ingested embeddings do not."""
    return bool(model.facts.inputs) and all("size" in recipe for _, recipe in model.facts.inputs)


def reads_of_model(model: SavedModel) -> str:
    """What the backbones of a model read: images, texts or rows; images of one whose backbones are not known."""
    return held_by(recipe for _, recipe in model.facts.inputs)


def find_inputs(
    model: SavedModel, paths: Sequence[Path], *, follow_links: bool = False
) -> NamedImages:
    """The images of files, folders and archives, or the texts of tables, as the model reads them.

    Raises UsageError as ``find_images`` and ``find_texts``, and for a model of rows of numbers.
    """
    kind = reads_of_model(model)
    if kind == ROWS:
        names = model.facts.backbones
        raise UsageError(
            f"The model reads rows of numbers through {' + '.join(names)}, which predict takes from a store.",
            f"fedcache extract --dataset rows:{shell_word(paths[0])} --backbones {shell_word(','.join(names))}, "
            "then  fedcache predict RUN --store STORE",
        )
    if kind == TEXTS:
        return find_texts(paths)
    return find_images(paths, follow_links=follow_links, holds=kind)


def predict_images(
    predictor: Predictor,
    images: NamedImages,
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    stop: Stop,
    *,
    top: int,
    weights: Mapping[str, Path] | None = None,
) -> Iterator[Prediction]:
    """Images, files or pixels in memory, in their order.

    Raises MachineError for weights that are not those of the model, StoppedError after a stop. ``top`` is the number of
    classes to name; ``weights`` are files by backbone.
    """
    for sentence in images.left_out:
        observer.warn(sentence)
    model = predictor.members[0]
    planned = [locate_recipe(recipe, home, weights) for recipe in read_recipes(model)]
    options = ExtractionOptions(
        workers=config.workers,
        chunk_rows=None,
        max_bad=len(images.names),
        wait=False,
        fresh=False,
        stop=stop,
        observer=observer,
    )
    try:
        with embedded(images, planned, model.facts.inputs_computed, config, home, options) as store:
            reasons = {int(entry["row"]): str(entry["reason"]) for entry in store.quarantined()}
            for rows, scores in predictor.over_store(store):
                yield from _named(
                    predictor, [images.names[r] for r in rows], rows, scores, top, reasons
                )
    except StoppedError as error:
        # an extraction would go on; what is made here is gone with its store
        said = f"{error.message.partition(';')[0]}; predict keeps no part of an answer."
        raise StoppedError(said, "Run the same command again: it begins anew.") from error


def predict_store(
    predictor: Predictor, store: Store, rows: NDArray[np.int64], *, top: int
) -> Iterator[Prediction]:
    """Rows of a store, int [n], in their order. Raises StoreError for a store without the model's arrays."""
    reasons = {int(entry["row"]): str(entry["reason"]) for entry in store.quarantined()}
    for part, scores in predictor.over_store(store, rows):
        yield from _named(
            predictor, [store.samples.name[r] for r in part], part, scores, top, reasons
        )


def rows_of_split(store: Store, split: str | None) -> NDArray[np.int64]:
    """The rows of a split, None is all, without those whose image has gone from the dataset.

    Raises UsageError for an unknown split, StoreError for an empty one.
    """
    if split is not None and split not in SPLIT_WORDS:
        raise unknown("split", split, SPLIT_WORDS)
    chosen = ~store.vanished()
    if split is not None:
        chosen &= store.samples.split == SPLIT_WORDS.index(split)
    rows = np.flatnonzero(chosen)
    if not len(rows):
        raise StoreError(f"{store.path.name} has no rows of split {split}.", "Leave --split out.")
    return rows.astype(np.int64)


def predict_embeddings(
    predictor: Predictor, held: Embeddings, path: Path, *, top: int
) -> Iterator[Prediction]:
    """Every row of an opened file of features, ``path``; errors as ``features_of_file``, UsageError for damage."""
    features = features_of_file(predictor.members[0], held.features, path)
    start = 0
    for arrays in features.blocks():
        rows = np.arange(start, start + len(arrays[0]))
        start += len(rows)
        yield from _named(
            predictor,
            held.names[start - len(rows) : start],
            rows,
            predictor.scores(*arrays),
            top,
            {},
        )


def _named(
    predictor: Predictor,
    names: Sequence[str],
    rows: NDArray[np.int64],
    scores: NDArray[np.float64],
    top: int,
    reasons: Mapping[int, str],
) -> Iterator[Prediction]:
    lost = {i: reasons[int(row)] for i, row in enumerate(rows) if int(row) in reasons}
    predicted = predictor.predicted(scores)
    p = predictor.mean_probability(scores)
    yield from best_of(names, predictor.classes, predicted, p, predictor.ranking(scores), top, lost)


BLOCK = 1 << 14
"""Rows that are read at once."""

Rows = NDArray[Any]


@dataclass(frozen=True)
class FileFeatures:
    """Features in the order of a model's backbones, which can be read as often as they are asked for.

    >>> whole = np.arange(12.0).reshape(4, 1, 3)
    >>> [[a.shape for a in arrays] for arrays in FileFeatures((whole,), (2,)).of_rows(np.array([0, 3]))]
    [[(2, 2), (2, 1)]]
    """

    columns: tuple[FileRows | Rows, ...]  # [N, V, d] each; view 0 is what a model reads
    cuts: tuple[int, ...] = ()  # where the one matrix of all backbones is cut

    def blocks(self) -> Iterator[list[Rows]]:
        """[n, d] of each backbone, all rows in order. Raises UsageError for a damaged file."""
        for parts in zip(*(blocks_of(column, BLOCK) for column in self.columns), strict=True):
            first = [part[:, 0] for part in parts]
            yield [*np.split(first[0], self.cuts, axis=-1)] if self.cuts else first

    def of_rows(self, rows: NDArray[np.int64]) -> Iterator[list[Rows]]:
        """The same of some rows, int [n] ascending; a block without any of them is passed over."""
        start = 0
        for arrays in self.blocks():
            end = start + len(arrays[0])
            part = rows[slice(*np.searchsorted(rows, (start, end)))] - start
            start = end
            if len(part):
                yield [array[part] for array in arrays]


def features_of_file(model: SavedModel, columns: Mapping[str, Any], path: Path) -> FileFeatures:
    """The features that a model reads: one column per backbone, or one matrix of all of them side by side.

    Args:
        model: whose backbones say which and in which order.
        columns: [N, V, d] by name.
        path: of the file, for messages.

    Raises UsageError for a model of images, StoreError for another number of features.
    """
    facts = model.facts
    if facts.image is not None:
        raise UsageError(
            f"{facts.method} reads images, not embeddings.", "fedcache predict RUN photo.jpg"
        )
    for known in (facts.keys, facts.backbones):
        if known and all(name in columns for name in known):
            return FileFeatures(tuple(columns[name] for name in known))
    if len(columns) == 1:
        (whole,) = columns.values()
        if whole.shape[-1] == facts.width:
            return FileFeatures((whole,), tuple(map(int, np.cumsum(facts.widths)[:-1])))
    if len(columns) == len(facts.widths):
        return FileFeatures(tuple(columns.values()))
    raise StoreError(
        f"{path} has features {', '.join(f'{n} [{v.shape[-1]}]' for n, v in columns.items())}, the model reads "
        f"{', '.join(f'{n} [{w}]' for n, w in zip(facts.backbones or facts.keys, facts.widths, strict=True))}.",
        "Name the columns features/<backbone>, or give one matrix of all backbones side by side.",
    )
