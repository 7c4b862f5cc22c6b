"""What a page holds of images: galleries of mistakes, and for whom there are none.

What makes them is ``galleries``, which pages without images start without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedcache.errors import UsageError
from fedcache.models.evaluate import Mistake
from fedcache.report.find_runs import StoredRun


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
