"""Computes the features of files that belong to no dataset, with backbones whose recipes are given.

The files go through the same workers, batches and code as an extraction, into a temporary store that is removed when
the features have been read. So a row has the value that ``extract`` would give it, and a folder of any size needs the
memory of a few batches.
"""

from __future__ import annotations

import heapq
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcache.config import ExtractConfig, Home
from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.extract import backbones as registry
from fedcache.extract.batches import ComputeSettings
from fedcache.extract.compute_features import ExtractionOptions, extract_arrays
from fedcache.extract.datasets import ARCHIVES, archives, texts, tree
from fedcache.extract.datasets.dataset import (
    Dataset,
    Source,
    joined_source,
    order_of_names,
    samples_of,
)
from fedcache.extract.device import resolve_device
from fedcache.extract.how import jobs_of, note_other_devices, resolve_compute_as
from fedcache.extract.image_files import EXTENSIONS, SOUND_ENDINGS, to_convert
from fedcache.extract.images import from_pillow
from fedcache.extract.planning.plan import PlannedArray, memory_of
from fedcache.extract.recipe import IMAGES, SOUNDS, TEXTS, Recipe
from fedcache.parsing import counted
from fedcache.store.files import HOST, make_private
from fedcache.store.store import Store
from fedcache.tables.roles import ONE_DOMAIN

SCRATCH = "scratch"
"""Folder of a home for temporary stores. A killed process may leave a store there, which ``fedcache gc`` removes."""

FEW = 3
"""Maximum number of skipped files that a message names; "..." stands for the others."""


@dataclass(frozen=True)
class NamedImages:
    """Images, texts or sounds, in the order in which a person named them."""

    names: tuple[str, ...]  # path, or path of the archive and path inside it
    source: Source  # row -> encoded image
    left_out: tuple[str, ...] = ()  # sentences on skipped files of folders and archives
    holds: str = IMAGES  # or texts, or sounds


def find_images(
    paths: Sequence[Path], *, follow_links: bool = False, holds: str = IMAGES
) -> NamedImages:
    """The images (or sounds) of files, folders (all levels, sorted by name), zip and tar archives, in the order given.

    Raises UsageError for a path that is not there or holds no image, CorruptionError for a damaged archive. A file that
    turns out to be no image keeps its row and is reported when it is read.
    """
    names = []
    parts: list[tuple[Source, int]] = []
    left_out = []
    endings = EXTENSIONS
    if holds == SOUNDS:
        endings = SOUND_ENDINGS
    for path in paths:
        if not path.exists():
            raise UsageError(
                f"There is no {str(path)!r} (current directory: {Path.cwd()}).",
                f"Give {holds}, folders, .zip or .tar files.",
            )
        if path.is_file() and path.suffix.lower() not in ARCHIVES:
            if archives.is_compressed_tar(path):
                raise archives.refuse_compressed(path)
            names.append(str(path))
            # The user named this file, so it may be a link to any place.
            one_file = tree.FilesSource(path.parent.absolute(), [path.name], None)
            parts.append((one_file, 1))
            continue
        # Links are followed only to files below this folder, unless ``follow_links``.
        within: Path | None = path
        if follow_links:
            within = None
        found = tree.scan(path, within, endings)
        if not found.paths:
            raise UsageError(
                f"{path} contains no {holds}{tree.ignored_text(found.ignored)}.",
                f"Expected files ending in {', '.join(sorted(endings))}.",
            )
        left_out += _left_out(path, found)
        inner_names = [tree.name_of(p) for p in found.paths]
        order = order_of_names(inner_names)
        names += [f"{path}/{inner_names[i]}" for i in order]
        parts.append((found.source(path, order, within), len(order)))
    return NamedImages(tuple(names), joined_source(parts), tuple(left_out), holds)


def find_texts(paths: Sequence[Path]) -> NamedImages:
    """The texts of tables, in the order given, with the names of their rows. Raises the errors of ``texts:FILE``."""
    names = []
    parts = []
    for path in paths:
        row_names, source = texts.open_texts(path)
        if len(paths) > 1:
            row_names = [f"{path}/{name}" for name in row_names]
        names += row_names
        parts.append((source, len(row_names)))
    return NamedImages(tuple(names), joined_source(parts), holds=TEXTS)


def _left_out(path: Path, found: tree.Tree) -> list[str]:
    """A sentence on the skipped files of a folder or archive; none if all of them are hidden."""
    if not set(found.ignored) - {tree.HIDDEN}:
        return []
    few = [tree.name_of(name) for name in heapq.nsmallest(FEW, found.others)]
    if len(found.others) > FEW:
        few.append("...")
    # The names are put behind the most frequent reason other than hidden.
    names = ""
    if few:
        names = f" ({', '.join(few)})"
    clauses = []
    for why, count in found.ignored.most_common():
        clause = f"{count:,} {why}{to_convert(why)}"
        if why != tree.HIDDEN:
            clause += names
            names = ""
        clauses.append(clause)
    total = found.ignored.total()
    files = counted(total, "file")
    listed = ", ".join(clauses)
    return [f"{path}: {files} left out: {listed}."]


def texts_in_memory(given: str | Sequence[str]) -> NamedImages:
    """A text, or several; their names are their numbers. Raises UsageError for anything else, and for no text."""
    if isinstance(given, str):
        given = (given,)
    several = tuple(given)
    if not several or not all(isinstance(text, str) for text in several):
        raise UsageError(
            "The model reads texts, but the input is not text.",
            "Give a text, or a list of at least one text.",
        )
    # A text with a lone surrogate becomes bytes that are not UTF-8, and is reported when it is read.
    encoded = tuple(text.encode("utf-8", "surrogatepass") for text in several)
    names = tuple(map(str, range(len(encoded))))
    return NamedImages(names, _InMemory(encoded), holds=TEXTS)


@dataclass(frozen=True)
class _InMemory:
    """Texts as UTF-8, images as uint8 [H, W] or [H, W, 3], or Pillow images."""

    items: tuple[bytes | NDArray[np.uint8] | Image.Image, ...]

    def read(self, row: int) -> bytes | NDArray[np.uint8]:
        """The text or the pixels of a row; raises ``BadImage``."""
        item = self.items[row]
        if isinstance(item, Image.Image):
            return np.asarray(from_pillow(item))
        return item


def images_in_memory(images: Sequence[Any]) -> NamedImages:
    """Images as arrays uint8 [H, W] or [H, W, 3], or as Pillow images; their names are their numbers.

    A Pillow image is read as its file would be: upright, transparency on white. Raises UsageError for anything else.
    """
    made = tuple(_checked(image, number) for number, image in enumerate(images))
    if not made:
        raise UsageError("No image was given.", "Give at least one image.")
    names = tuple(map(str, range(len(made))))
    return NamedImages(names, _InMemory(made))


def _checked(image: Any, number: int) -> NDArray[np.uint8] | Image.Image:
    """A Pillow image, or pixels as an array. Raises UsageError for anything else."""
    if isinstance(image, Image.Image):
        return image
    pixels = np.asarray(image)
    is_gray = pixels.ndim == 2
    is_rgb = pixels.ndim == 3 and pixels.shape[2] == 3
    if pixels.dtype != np.uint8 or not (is_gray or is_rgb):
        described = type(image).__name__
        if pixels.ndim:
            shape = list(pixels.shape)
            described = f"{pixels.dtype} {shape}"
        raise UsageError(
            f"Image {number} is {described}, expected uint8 [H, W] or [H, W, 3].",
            "(255 * image).astype('uint8')   converts an image in [0, 1].",
        )
    return pixels


def locate_recipe(
    recipe: Recipe, home: Home, given: Mapping[str, Path] | None = None
) -> PlannedArray:
    """The backbone of a recipe, with the weights whose digest the recipe contains.

    ``given`` are the files of ``--weights`` by backbone. Raises MachineError if the weights are missing or differ;
    other errors as ``lookup_recorded``.
    """
    files = given or {}
    backbone = registry.lookup_recorded(recipe, home=home.root, file=files.get(recipe.backbone))
    weights = registry.locate(
        backbone, given=files, home=home.root, memory=memory_of(home), offline=home.offline
    )
    if weights.path is None and weights.download is not None:
        raise MachineError(
            f"The weights of {backbone.name} are not on this machine. The features of the run were computed on "
            "another machine.",
            f"fedcache backbones pull {shell_word(backbone.name)}",
        )
    if weights.sha256 != recipe.weights:
        raise MachineError(
            f"{recipe.label} was made with weights whose sha256 begins with {recipe.weights[:12]}, but the sha256 "
            f"of the weights found ({weights.origin}) begins with {weights.sha256[:12]}.",
            f"fedcache backbones import FILE --as {shell_word(backbone.name)}  selects the right file.",
        )
    return PlannedArray(backbone, weights, recipe)


@contextmanager
def embedded(
    images: NamedImages,
    planned: Sequence[PlannedArray],
    computed: Sequence[Mapping[str, Any]],
    config: ExtractConfig,
    home: Home,
    options: ExtractionOptions,
) -> Iterator[Store]:
    """A store with view 0 of every image through every backbone, for as long as the context lasts.

    Row i is the i-th image; arrays have the keys of the recipes with one view. Raises as ``extract``.

    Args:
        images: to be read.
        planned: backbones, weights and recipes.
        computed: for each backbone: device, dtype and batch with which existing features were computed, so that the
            new ones agree with them; {} if there are none.
        config: options that take precedence over ``computed``.
        home: holds the temporary store.
        options: of the extraction.
    """
    N = len(images.names)
    one_view = [replace(item, recipe=item.recipe.plain()) for item in planned]
    # Names sort in the order in which the images were named.
    numbers = tuple(f"{row:012d}" for row in range(N))
    data = Dataset(
        spec="images",
        slug="images",
        classes=(),
        domains=(ONE_DOMAIN,),
        names=numbers,
        label=np.full(N, -1, np.int32),
        domain=np.zeros(N, np.int16),
        split=np.zeros(N, np.uint8),
        uid=np.zeros((N, 16), np.uint8),  # it seeds only the views after the first
        template=None,
        reading="",
        source=images.source,
        holds=images.holds,
    )
    samples = samples_of(data, np.ones(N, np.uint8))
    place = make_private(home.root / SCRATCH)
    folder = Path(
        tempfile.mkdtemp(prefix=f".predict.{os.getpid()}-{HOST}-", suffix=".partial", dir=place)
    )
    try:
        device = resolve_device(config.device)
        options.observer.note(f"Device {device.kind} ({device.name}): {device.why}.")
        note_other_devices(device, computed, options.observer)
        dataset = {"slug": "images", "digest": data.digest}
        store = Store.create(folder / "images.zarr", samples, dataset=dataset)
        items_of: dict[ComputeSettings, list[PlannedArray]] = {}
        for item, conditions in zip(one_view, computed, strict=True):
            _, settings = resolve_compute_as(config, conditions, [item.backbone])
            items_of.setdefault(settings, []).append(item)
        for settings, items in items_of.items():
            jobs = jobs_of(items, data, device, settings)
            extract_arrays(store, data, jobs, settings, options, earlier=None, text={})
        yield Store.open(store.path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
