"""Mistakes as thumbnails: what models were most certain of and wrong about, with the images that they were shown.

Images may be personal data, so nothing here is called unless images are asked for, and a thumbnail is pixels alone: it
is drawn anew, without what a camera wrote into the file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.planning.find_images import ImagePlaces, read_images
from fedcache.report.drawing import percent
from fedcache.report.find_runs import StoredRun
from fedcache.report.run_origin import RunStore
from fedcache.store.store import Store

if TYPE_CHECKING:  # it imports torch, and thumbnails of a store need none
    from fedcache.models.evaluate import Mistake, Mistakes

SIDE = 64
"""Pixels of the longer side of a thumbnail; a smaller image keeps its size."""
MOST_GALLERIES = 4
"""Runs of a section whose mistakes are shown."""


@dataclass(frozen=True)
class Thumbnail:
    """One mistake with its image."""

    uri: str  # data:image/...
    mistake: Mistake
    probability: str  # per cent


@dataclass(frozen=True)
class Gallery:
    """The mistakes of one run."""

    ident: str
    title: str
    says: str
    images: tuple[Thumbnail, ...]
    lost: int = 0  # mistakes whose images are not there any more


def refuse_private(entries: Sequence[StoredRun]) -> None:
    """Refuse runs whose epsilon does not cover who holds which rows. Raises UsageError."""
    private = [e.digest[:8] for e in entries if e.private]
    if private:
        raise UsageError(
            f"{', '.join(private[:5])}{', ...' if len(private) > 5 else ''} promises differential privacy, and its "
            "epsilon does not cover the rows that images show.",
            "Leave --with-images out, or name other runs.",
        )


@dataclass
class ToShow:
    """What a page was to show, for the terminal."""

    mistakes: int = 0  # of whose rows images were looked for
    missing: list[str] = field(default_factory=list)  # sentences on those that are not there


def galleries_of(
    ident: str,
    named: Sequence[tuple[str, StoredRun]],
    source: RunStore | str,
    places: ImagePlaces,
    asked: ToShow,
) -> tuple[list[Gallery], list[str]]:
    """The mistakes of runs of one setting on their own test rows, and sentences on what is not shown.

    Args:
        ident: of the section.
        named: label and run; the first ``MOST_GALLERIES`` are shown.
        source: the store of their rows, or why there is none.
        places: where images are looked for.
        asked: is added to.
    """
    if isinstance(source, str):
        asked.missing.append(f"Mistakes are not shown: {source}.")
        return [], asked.missing[-1:]
    from fedcache.report.run_mistakes import mistakes_of  # computes with torch

    found: list[Gallery] = []
    notes: list[str] = []
    for i, (label, entry) in enumerate(named[:MOST_GALLERIES]):
        try:
            mistakes = mistakes_of(entry, source, places)
            asked.mistakes += len(mistakes.most)
            own = gallery(
                f"{ident}-mistakes{i}",
                label,
                mistakes,
                ("its own test rows", "its own rows"),
                places,
            )
            found = found + own
            asked.missing = asked.missing + lost_of(label, own)
        except FedcacheError as error:
            note = f"Mistakes of {label} are not shown: {error.message} {error.hint}"
            asked.missing += [note] if note not in notes else []
            notes += [note] if note not in notes else []
        else:
            notes += (
                []
                if mistakes.wrong
                else [f"{label} made no mistake on its {mistakes.rows:,} test rows."]
            )
    if len(named) > MOST_GALLERIES:
        notes.append(
            f"Mistakes are shown of {MOST_GALLERIES} runs; report others alone to see theirs."
        )
    return found, notes


def gallery(
    ident: str, label: str, mistakes: Mistakes, on: tuple[str, str], places: ImagePlaces
) -> list[Gallery]:
    """The mistakes of one run as a gallery, none where it made none.

    Raises StoreError, with the dataset that is needed, where no image is at hand.

    Args:
        ident: unique in the page.
        label: of the run.
        mistakes: of its models.
        on: in words, the rows of all models and those of each client's.
        places: where images are looked for.
    """
    if not mistakes.most:
        return []
    images = read_images(Store.open(mistakes.store), [m.row for m in mistakes.most], places)
    shown = tuple(
        Thumbnail(thumbnail_uri(images[m.row]), m, f"{percent(m.probability)} %")
        for m in mistakes.most
        if m.row in images
    )
    says = (
        f"The most confident of {mistakes.wrong:,} mistakes on {on[0]} ({mistakes.rows:,} scored): the class, what it "
        "was taken for, and the probability of that."
    )
    if mistakes.clients:
        says += f" {mistakes.clients:,} clients' own models were asked, each about {on[1]}; whose it was is named."
    lost = len(mistakes.most) - len(shown)
    if lost:
        says += f" {lost} of {len(mistakes.most)} images are not in the dataset any more."
    return [Gallery(ident, f"What {label} got wrong", says, shown, lost)]


def lost_of(label: str, found: Sequence[Gallery]) -> list[str]:
    """A sentence on the images that the galleries of a run lack."""
    return [
        f"{g.lost} of {len(g.images) + g.lost} images of {label}'s mistakes are not in the dataset any more."
        for g in found
        if g.lost
    ]


def thumbnail_uri(image: Image.Image) -> str:
    """An RGB image as a data URI of at most ``SIDE`` pixels: PNG where it was no larger, else JPEG."""
    # pixels alone: no profile, no words of a camera
    small = Image.fromarray(np.array(image.convert("RGB")))
    kind = "jpeg"
    if max(small.size) <= SIDE:
        kind = "png"
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, kind, **({"optimize": True} if kind == "png" else {"quality": 85}))
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
