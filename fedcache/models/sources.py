"""Sources of rows for prediction: images or texts, a store, or a file of embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import ExtractConfig, Home
from fedcache.errors import StoppedError, StoreError, UsageError, shell_word, unknown
from fedcache.extract.compute_features import ExtractionOptions
from fedcache.extract.embed_images import (
    NamedImages,
    embedded,
    find_images,
    find_texts,
    locate_recipe,
)
from fedcache.extract.recipe import ROWS, TEXTS, Recipe, held_by
from fedcache.models.predictions import Prediction, best_of
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import SavedModel
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.store.store import Store
from fedcache.tables.embeddings import Embeddings
from fedcache.tables.splits import SPLIT_NAMES
from fedcache.tables.words import FileRows, blocks_of


def read_recipes(model: SavedModel) -> list[Recipe]:
    """The recipe of each input of a model, in the order in which ``Predictor.scores`` takes the inputs.

    Raises StoreError for a model of embeddings whose backbone fedcache does not know.
    """
    if not has_known_backbones(model):
        names = " + ".join(model.facts.backbones)
        raise StoreError(
            f"The model was trained on embeddings of {names}, but fedcache cannot compute these embeddings from "
            "images.",
            "fedcache predict RUN --embeddings FILE   reads such embeddings.",
        )
    return [Recipe.from_dict(recipe) for _, recipe in model.facts.inputs]


def has_known_backbones(model: SavedModel) -> bool:
    """Whether every recipe describes how to compute the input; recipes of ingested embeddings do not."""
    inputs = model.facts.inputs
    return bool(inputs) and all("size" in recipe for _, recipe in inputs)


def reads_of_model(model: SavedModel) -> str:
    """Whether the backbones of a model read images, texts or rows; images for a model without known backbones."""
    return held_by(recipe for _, recipe in model.facts.inputs)


def find_inputs(model: SavedModel, paths: Sequence[Path], *, follow_links: bool) -> NamedImages:
    """The images of files, folders and archives, or the texts of tables, as the model reads them.

    Raises UsageError as ``find_images`` and ``find_texts``, and for a model of rows of numbers.
    """
    kind = reads_of_model(model)
    if kind == ROWS:
        file = shell_word(paths[0])
        backbones = shell_word(",".join(model.facts.backbones))
        names = " + ".join(model.facts.backbones)
        raise UsageError(
            f"The backbone {names} of the model reads rows of numbers. predict can read such rows only from a store.",
            f"fedcache extract --dataset rows:{file} --backbones {backbones}, then  fedcache predict RUN --store STORE",
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
    """Predictions for images, files or pixels in memory, in their order.

    Raises MachineError for other weights than those of the model, StoppedError after a stop. ``top`` is the number of
    classes to name; ``weights`` are files by backbone.
    """
    for sentence in images.left_out:
        observer.warn(sentence)
    model = predictor.members[0]
    planned = [locate_recipe(recipe, home, weights) for recipe in read_recipes(model)]
    options = ExtractionOptions(
        workers=config.workers,
        chunk_rows=None,
        max_bad=len(images.names),  # a damaged image gets a prediction with a reason
        wait=False,
        fresh=False,
        stop=stop,
        observer=observer,
    )
    try:
        with embedded(images, planned, model.facts.inputs_computed, config, home, options) as store:
            yield from _over_store(predictor, store, images.names, None, top)
    except StoppedError as error:
        # The message of an extraction promises to resume, but here the store with the features is deleted.
        stopped = error.message.partition(";")[0]
        raise StoppedError(
            f"{stopped}; predict keeps no partial output.",
            "Run the same command again to start over.",
        ) from error


def predict_store(
    predictor: Predictor, store: Store, rows: NDArray[np.int64], *, top: int
) -> Iterator[Prediction]:
    """Predictions for rows of a store, int [n], in their order. Raises StoreError as ``Predictor.over_store``."""
    return _over_store(predictor, store, store.samples.name, rows, top)


def _over_store(
    predictor: Predictor,
    store: Store,
    names: Sequence[str],
    rows: NDArray[np.int64] | None,
    top: int,
) -> Iterator[Prediction]:
    """Predictions for ``rows`` of a store (None for all); ``names`` are the names of all its rows."""
    reasons = {int(entry["row"]): str(entry["reason"]) for entry in store.quarantined()}
    for part, scores in predictor.over_store(store, rows):
        lost = {i: reasons[row] for i, row in enumerate(part.tolist()) if row in reasons}
        of_part = [names[r] for r in part]
        yield from named_predictions(predictor, of_part, scores, top, lost)


def rows_of_split(store: Store, split: str | None) -> NDArray[np.int64]:
    """The rows of a split (None for all), without rows whose image is no longer in the dataset.

    Raises UsageError for an unknown split, StoreError for an empty one.
    """
    if split is not None and split not in SPLIT_NAMES:
        raise unknown("split", split, SPLIT_NAMES)
    chosen = ~store.vanished()
    if split is not None:
        chosen &= store.samples.split == SPLIT_NAMES.index(split)
    rows = np.flatnonzero(chosen)
    if not len(rows):
        found = f"no rows of the split {split}"
        hint = "Leave --split out."
        if split is None:
            found = "no rows whose image is still in the dataset"
            hint = "Extract the dataset again:  fedcache extract -d DATASET"
        raise StoreError(f"{store.path.name} has {found}.", hint)
    return rows.astype(np.int64)


def predict_embeddings(
    predictor: Predictor, table: Embeddings, path: Path, *, top: int
) -> Iterator[Prediction]:
    """Predictions for every row of ``table``, the opened file ``path``.

    Raises as ``features_of_file``; UsageError for a damaged file.
    """
    features = features_of_file(predictor.members[0], table.features, path)
    start = 0
    for arrays in features.blocks():
        end = start + len(arrays[0])
        names = table.names[start:end]
        yield from named_predictions(predictor, names, predictor.scores(*arrays), top)
        start = end


def named_predictions(
    predictor: Predictor,
    names: Sequence[str],
    scores: NDArray[np.float64],
    top: int,
    reasons: Mapping[int, str] | None = None,
) -> Iterator[Prediction]:
    """Predictions for N rows with these names and scores [E, N, C], as ``best_of``."""
    return best_of(
        names,
        predictor.classes,
        predicted=predictor.predicted(scores),
        probability=predictor.mean_probability(scores),
        ranking=predictor.ranking(scores),
        top=top,
        reasons=reasons or {},
    )


BLOCK = 1 << 14
"""Number of rows that are read at once."""

Rows = NDArray[Any]


@dataclass(frozen=True)
class FileFeatures:
    """Features of a file in the order of a model's backbones, read block by block and as often as needed.

    >>> whole = np.arange(12.0).reshape(4, 1, 3)
    >>> [[a.shape for a in arrays] for arrays in FileFeatures((whole,), (2,)).of_rows(np.array([0, 3]))]
    [[(2, 2), (2, 1)]]
    """

    columns: tuple[FileRows | Rows, ...]  # [N, V, d] each; a model reads view 0
    cuts: tuple[int, ...] = ()  # columns at which one matrix of all backbones is split

    def blocks(self) -> Iterator[list[Rows]]:
        """Features [n, d] of each backbone, all rows in order. Raises UsageError for a damaged file."""
        of_columns = [blocks_of(column, BLOCK) for column in self.columns]
        for parts in zip(*of_columns, strict=True):
            arrays = [part[:, 0] for part in parts]
            if self.cuts:
                arrays = np.split(arrays[0], self.cuts, axis=-1)
            yield arrays

    def of_rows(self, rows: NDArray[np.int64]) -> Iterator[list[Rows]]:
        """Features of some rows, int [n] ascending; blocks without any of these rows are skipped."""
        start = 0
        for arrays in self.blocks():
            end = start + len(arrays[0])
            low, high = np.searchsorted(rows, (start, end))
            part = rows[low:high] - start
            start = end
            if len(part):
                yield [array[part] for array in arrays]


def features_of_file(model: SavedModel, columns: Mapping[str, Any], path: Path) -> FileFeatures:
    """The features that a model reads: one column per backbone, or one matrix with all of them concatenated.

    Args:
        model: its backbones give names and order of the columns.
        columns: [N, V, d] by name.
        path: of the file, for messages.

    Raises UsageError for a model of images, StoreError for another number of features.
    """
    facts = model.facts
    if facts.image is not None:
        raise UsageError(
            f"{facts.method} reads images, not embeddings.", "fedcache predict RUN photo.jpg"
        )
    for names in (facts.keys, facts.backbones):
        if names and all(name in columns for name in names):
            return FileFeatures(tuple(columns[name] for name in names))
    if len(columns) == 1:
        (whole,) = columns.values()
        if whole.shape[-1] == facts.width:
            ends = np.cumsum(facts.widths).tolist()
            return FileFeatures((whole,), tuple(ends[:-1]))
    if len(columns) == len(facts.widths):
        return FileFeatures(tuple(columns.values()))
    found = _with_widths(columns, [column.shape[-1] for column in columns.values()])
    reads = _with_widths(facts.backbones, facts.widths)
    raise StoreError(
        f"The features of {path} are {found}, but the model reads {reads}.",
        "Name the columns features/<backbone>, or give one matrix of all backbones side by side.",
    )


def _with_widths(names: Iterable[str], widths: Iterable[int]) -> str:
    pairs = zip(names, widths, strict=True)
    return ", ".join(f"{name} [{width}]" for name, width in pairs)
