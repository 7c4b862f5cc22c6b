"""Predictor: scores, probabilities and classes that a saved model gives for rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import ExtractConfig, Home
from fedcache.errors import FedcacheError, StoppedError, StoreError, UsageError, shell_word, unknown
from fedcache.extract.backbones import clip_towers, lookup_recorded
from fedcache.extract.compute_features import ExtractionOptions
from fedcache.extract.embed_images import (
    NamedImages,
    embedded,
    find_images,
    find_texts,
    locate_recipe,
)
from fedcache.extract.planning.find_store import more_features
from fedcache.extract.recipe import OF_VIEWS, ROWS, TEXTS, Recipe, held_by
from fedcache.federate.engine.client_data import FrozenEncoders
from fedcache.federate.engine.evaluate import BLOCK
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import DeployedModel
from fedcache.models.client_prior import ClientPrior, ModelWithPrior
from fedcache.models.saved_model import COLDEST, HOTTEST, SavedModel, check_finite, refused
from fedcache.optional import need_arrow
from fedcache.parsing import Facts, Record, escape_json, sheet_cell
from fedcache.plugins import MODULE
from fedcache.process import Stop, usual_torch_state
from fedcache.progress import Observer
from fedcache.store.lock import need_folder, output_file
from fedcache.store.store import Store
from fedcache.tables.embeddings import Embeddings
from fedcache.tables.splits import SPLIT_NAMES
from fedcache.tables.words import FileRows, blocks_of

# Predictions: the best classes of each row with their probabilities, and the files that hold them.

FORMATS = (".csv", ".jsonl", ".parquet")
ROW_GROUP = 1 << 16
"""Number of rows of a .parquet file that are written at once."""
NO_FEATURES = "some of its features are not finite"
"""Reason that is given for a row that cannot be classified because of its features."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one row."""

    name: str  # of the image, or of the row
    classes: tuple[str, ...]  # the best first; () for a row that could not be read
    probabilities: tuple[float, ...]  # of these classes
    reason: str = ""  # why the row could not be read

    def to_dict(self) -> Facts:
        """Plain JSON values; ``top`` has the best classes with their probabilities."""
        top = [[c, p] for c, p in zip(self.classes, self.probabilities, strict=True)]
        best: list[Any] = [None, None]
        if top:
            best = top[0]
        return {
            "name": self.name,
            "class": best[0],
            "probability": best[1],
            "top": top,
            "reason": self.reason,
        }


def best_of(
    names: Sequence[str],
    classes: Sequence[str],
    predicted: NDArray[np.int64],
    probability: NDArray[np.float64],
    ranking: NDArray[np.float64],
    top: int,
    reasons: Mapping[int, str],
) -> Iterator[Prediction]:
    """The ``top`` classes of each row, ``predicted`` first.

    Args:
        names: of the N rows.
        classes: C names.
        predicted: [N], -1 for a row without scores.
        probability: [N, C].
        ranking: [N, C], the order of the classes: higher is more probable. It also orders classes whose probabilities
            are rounded to 0.
        top: number of classes, from 1 to C.
        reasons: number of a row -> why it has no scores.
    """
    # A row without scores (-1) takes class 0 here, which is not used below.
    best_class = np.maximum(predicted, 0)[:, None]
    order = best_class
    if top > 1:
        # The predicted class comes first, even if rounding makes another class equally probable.
        falling = np.negative(ranking)
        np.put_along_axis(falling, best_class, -np.inf, 1)
        order = np.argsort(falling, 1, kind="stable")[:, :top]
    chosen = order.tolist()
    probabilities = np.take_along_axis(probability, order, 1).tolist()
    for row, name in enumerate(names):
        if row in reasons or predicted[row] < 0:
            yield Prediction(name, (), (), reasons.get(row, NO_FEATURES))
        else:
            best = [classes[c] for c in chosen[row]]
            yield Prediction(name, tuple(best), tuple(probabilities[row]))


def check_out(path: Path) -> None:
    """Refuse an unknown file ending and a folder that cannot be written, before anything is computed.

    Raises UsageError.
    """
    if path.suffix.lower() not in FORMATS:
        raise unknown("file ending", path.suffix, FORMATS)
    if path.is_dir():
        raise UsageError(f"{path} is a directory.", f"-o {path / 'classes.csv'}")
    need_folder(path)
    if path.suffix.lower() == ".parquet":
        need_arrow(str(path))


def write_predictions(path: Path, predictions: Iterable[Prediction], top: int) -> None:
    """Write rows as they come to a .csv, .jsonl or .parquet file, whole or not at all. Raises as ``check_out``.

    Names in a .csv are escaped so that no program runs them as a formula (``sheet_cell``); the other files hold names
    unchanged.
    """
    check_out(path)
    columns = list(_flat({"name": "", "top": [], "reason": ""}, top))  # the same for every row
    with output_file(path) as file:
        if path.suffix.lower() == ".parquet":
            _write_parquet(file, columns, predictions, top)
        elif path.suffix.lower() == ".jsonl":
            for row in predictions:
                line = escape_json(json.dumps(row.to_dict(), ensure_ascii=False))
                file.write(line.encode() + b"\n")
        else:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            writer = csv.writer(text)
            writer.writerow(columns)
            for row in predictions:
                cells = _flat(row.to_dict(), top).values()
                writer.writerow([sheet_cell(cell) for cell in cells])
            text.detach()  # flushes, and leaves the file open for ``output_file``


def _write_parquet(
    file: BinaryIO, columns: Sequence[str], predictions: Iterable[Prediction], top: int
) -> None:
    """Write row groups of at most ``ROW_GROUP`` rows."""
    import pyarrow as pa
    from pyarrow import parquet

    types = []
    for column in columns:
        kind = pa.string()
        if column.startswith("probability"):
            kind = pa.float64()
        types.append((column, kind))
    schema = pa.schema(types)
    flat = (_flat(row.to_dict(), top) for row in predictions)
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(flat, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))


def _flat(row: Record, top: int) -> Facts:
    """A row with columns for each rank: ``name``, ``class``, ``probability``, ``class_2``, ..., ``reason``."""
    flat = {"name": row["name"]}
    # A row that could not be read has no classes.
    empty = [(None, None)] * (top - len(row["top"]))
    for rank, (best, probability) in enumerate([*row["top"], *empty], 1):
        end = f"_{rank}"
        if rank == 1:
            end = ""
        flat[f"class{end}"] = best
        flat[f"probability{end}"] = probability
    flat["reason"] = row["reason"]
    return flat


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

    def __getstate__(self) -> Facts:
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
        return each.mean(0).numpy()

    def ranking(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scores [E, N, C] -> numbers [N, C] that rank the classes, also if probabilities are rounded to 0.

        These are the scores of one model, and the log-probabilities of an ensemble up to a constant.
        """
        if len(scores) == 1:
            return np.asarray(scores[0])
        each = torch.from_numpy(scores / self.softmax_temperature).log_softmax(-1)
        return each.logsumexp(0).numpy()

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
    return keys_of_inputs(model.facts.inputs, store)


def keys_of_inputs(inputs: Sequence[tuple[str, Record]], store: Store) -> list[str]:
    """The arrays of a store with these recipes, given with the keys that they have elsewhere; as ``array_keys``."""
    keys = []
    for key, recipe in inputs:
        needed = _of_one_view(recipe)
        matching = [k for k, a in store.arrays.items() if _of_one_view(a.recipe) == needed]
        if not matching:
            raise _missing_array(store, key, recipe)
        if key in matching:
            keys.append(key)
        else:
            keys.append(matching[0])
    return keys


def _missing_array(store: Store, key: str, recipe: Record) -> StoreError:
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


def _of_one_view(recipe: Record) -> Facts:
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
            f"it uses the encoders of {name}, but {name} cannot read trained prompts ({error.message})"
        ) from error


# Sources of rows for prediction: images or texts, a store, or a file of embeddings.


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
            yield from predict_store(predictor, store, images.names, None, top)
    except StoppedError as error:
        # The message of an extraction promises to resume, but here the store with the features is deleted.
        stopped = error.message.partition(";")[0]
        raise StoppedError(
            f"{stopped}; predict keeps no partial output.",
            "Run the same command again to start over.",
        ) from error


def predict_store(
    predictor: Predictor,
    store: Store,
    names: Sequence[str],
    rows: NDArray[np.int64] | None,
    top: int,
) -> Iterator[Prediction]:
    """Predictions for ``rows`` of a store, int [n] (None for all), in their order; ``names`` are those of all its rows.

    Raises StoreError as ``Predictor.over_store``.
    """
    reasons = {int(entry["row"]): str(entry["reason"]) for entry in store.quarantined()}
    for part, scores in predictor.over_store(store, rows):
        lost = {i: reasons[row] for i, row in enumerate(part.tolist()) if row in reasons}
        of_part = [names[r] for r in part]
        yield from named_predictions(predictor, of_part, scores, top, lost)


def rows_of_split(store: Store, split: str) -> NDArray[np.int64]:
    """The rows of a split (``all`` for every row), without rows whose image is no longer in the dataset.

    Raises UsageError for an unknown split, StoreError for an empty one.
    """
    if split not in ("all", *SPLIT_NAMES):
        raise unknown("split", split, SPLIT_NAMES)
    chosen = ~store.vanished()
    if split != "all":
        chosen &= store.samples.split == SPLIT_NAMES.index(split)
    rows = np.flatnonzero(chosen)
    if not len(rows):
        found = f"no rows of the split {split}"
        hint = "Leave --split out."
        if split == "all":
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


FILE_BLOCK = 1 << 14
"""Number of rows that are read at once."""


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
        of_columns = [blocks_of(column, FILE_BLOCK) for column in self.columns]
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


def features_of_file(model: SavedModel, columns: Record, path: Path) -> FileFeatures:
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
