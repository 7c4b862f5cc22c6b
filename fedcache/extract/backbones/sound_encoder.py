"""Encoders of sounds: Wav2Vec2, HuBERT, Whisper, AST and similar models of transformers, from a folder.

``hf:FOLDER`` is an encoder of sounds if ``preprocessor_config.json`` names a sampling rate, which the recipe records.
The feature is the mean of the last states over the frames of the sound, or the model's own pooled output if it has one
(AST). Only the encoder of an encoder and decoder (Whisper) runs.

Only sounds with inputs of equal shape are computed together. So nothing is padded beyond the padding of the model's own
feature extractor, and a sound has the same feature alone and in any batch, up to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError, UsageError, unknown
from fedcache.extract.backbones.backbone import (
    Backbone,
    Weights,
    autocast,
    deterministic,
    no_images,
    no_text,
)
from fedcache.extract.backbones.hugging_face import open_model, refuse_missing, shared_processor
from fedcache.extract.backbones.hugging_face_folder import (
    PREPROCESSING,
    folder_row,
    model_files,
    read_config,
)
from fedcache.extract.backbones.own import Choice, facts_of
from fedcache.extract.digests import stat_key
from fedcache.extract.image_files import BadImage
from fedcache.extract.recipe import DECODERS, SOUNDS, Recipe
from fedcache.extract.sounds import decode_sound
from fedcache.optional import reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SECONDS = 30.0
"""Default number of seconds that are read of a sound."""

MOST_SECONDS = 60.0
AT_ONCE = {"cpu": 4, "cuda": 32}
"""Number of sounds in one forward pass, by device."""

EXTRACTOR = "feature extractor"
POOLINGS = ("mean", "max")
POOLED = "pooler_output"
"""The recipe's word for the model's own pooled output."""


def rate_of(folder: Path) -> int | None:
    """Samples per second of a model's input; None for a model that reads no sounds."""
    for name in PREPROCESSING:
        config = read_config(folder, name)
        config = config.get("feature_extractor", config)
        if isinstance(config, dict) and type(config.get("sampling_rate")) is int:
            return int(config["sampling_rate"])
    return None


def derive(name: str, folder: Path, choice: Choice) -> Backbone:
    """The row of a sound model in a folder.

    Raises MachineError for an unreadable folder, UsageError for a model that is no encoder of sounds.
    """
    rate = rate_of(folder) or 0
    if not 1_000 <= rate <= 384_000:
        raise UsageError(
            f"{name} reads {rate:,} samples per second, expected 1,000 to 384,000.",
            "Get the folder again.",
        )

    def read() -> list[Any]:
        recipe = Recipe(name, "", size=rate, rate=rate, pooling="mean")  # one second
        encoder = SoundEncoder(name, folder, recipe)
        width = encoder.trial_width()
        return [width, encoder.pools]

    width, pools = facts_of(folder, ("sounds",), choice, read)
    known: tuple[str, ...] = POOLINGS
    usual = POOLINGS[0]
    if pools:
        known = (*POOLINGS, POOLED)
        usual = POOLED
    settings = dict(choice.options)
    if choice.recorded is not None:
        settings = {"pooling": choice.recorded.pooling, "seconds": str(choice.recorded.size / rate)}
    pooling = settings.get("pooling", usual)
    if pooling not in known:
        raise unknown(f"pooling of {name}", pooling[:40], known)
    recipe = Recipe(
        name,
        "",  # the weights, which are not located yet
        size=_samples_of(name, settings.get("seconds"), rate),
        rate=rate,
        pooling=pooling,
        decoder=DECODERS[SOUNDS],
    )
    return replace(folder_row(folder, "sound_encoder", width, recipe), reads=SOUNDS)


def _samples_of(name: str, given: str | None, rate: int) -> int:
    """Number of samples that are read of a sound. Raises UsageError for a number of seconds outside the limits."""
    try:
        seconds = float(given or SECONDS)
    except ValueError:
        seconds = 0.0  # below the limit, so it is refused
    if not 0.1 <= seconds <= MOST_SECONDS:
        raise UsageError(
            f"{name} reads 0.1 to {MOST_SECONDS:g} seconds, but the recipe has seconds={given}.",
            f"--recipe seconds={SECONDS:g}",
        )
    return round(seconds * rate)


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> SoundEncoder:
    """The model in evaluation mode, after a check that it gives finite features of the backbone's width."""
    folder = weights.file(backbone.name)
    encoder = SoundEncoder(backbone.name, folder, recipe, device=device, dtype=dtype)
    width = encoder.trial_width()
    if width != backbone.width:
        raise MachineError(
            f"{backbone.name} gives {width} numbers for a sound, expected {backbone.width}.",
            "Get the folder again.",
        )
    return encoder


@dataclass(frozen=True, eq=False)
class Sounds:
    """N sounds after a model's feature extractor.

    Attributes:
        inputs: float32 of each; shape [0] for a bad sound.
        samples: int64 [N], number of samples that were read of each.
        cut: bool [N], sounds that have more samples.
        bad: place of a sound without a feature -> reason.
    """

    inputs: list[NDArray[np.float32]]
    samples: NDArray[np.int64]
    cut: NDArray[np.bool_]
    bad: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Hearing:
    """Encoded sound files -> ``Sounds``. Picklable, for the process or thread that reads the files.

    Attributes:
        name: of the backbone, for messages.
        folder: of the model.
        stamp: of the model's files; a process reads the feature extractor once per stamp.
        rate: samples per second.
        most: number of samples that are read of a sound.
    """

    name: str
    folder: Path
    stamp: str
    rate: int
    most: int

    def __call__(self, files: Sequence[bytes | None]) -> Sounds:
        """N sounds, from the bytes of their files. A file that cannot be decoded is bad; None gets an empty input.

        None is a file that could not be read, for which the caller has the reason already.
        """
        inputs = []
        samples = np.zeros(len(files), np.int64)
        cut = np.zeros(len(files), bool)
        bad = {}
        for place, raw in enumerate(files):
            extracted = np.zeros(0, np.float32)
            try:
                if raw is not None:
                    wave, cut[place] = decode_sound(raw, self.rate, self.most)
                    samples[place] = len(wave)
                    extracted = self.extract(wave)
            except BadImage as error:
                bad[place] = str(error)
            inputs.append(extracted)
        return Sounds(inputs, samples, cut, bad)

    def extract(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        """The model's input for a sound [n]: samples [n], or a spectrogram. BadImage for a sound that is too short."""
        fewest = fewest_samples(self.folder)
        samples = len(wave)
        if samples < fewest:
            raise BadImage(
                f"the sound has only {samples} samples at {self.rate:,} Hz; the model needs at least {fewest}"
            )
        extractor, lock = shared_processor(self.name, self.folder, self.stamp, EXTRACTOR)
        with lock:
            extracted = extractor(wave, sampling_rate=self.rate, return_tensors="np")
        batch = extracted[extractor.model_input_names[0]]
        return np.asarray(batch[0], np.float32)


@cache
def fewest_samples(folder: Path) -> int:
    """The length of a sound from which the convolutions of a model (Wav2Vec2, HuBERT) make one frame; 1 without any."""
    config = read_config(folder, "config.json")
    samples = 1
    layers = zip(config.get("conv_kernel", ()), config.get("conv_stride", ()), strict=True)
    for kernel, stride in reversed(list(layers)):
        samples = (samples - 1) * stride + kernel
    return samples


class SoundEncoder:
    """Sounds -> features.

    Args:
        name: of the backbone.
        folder: of the model.
        recipe: with rate, number of samples and pooling.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast, weights stay float32.

    Attributes:
        pools: whether the model has its own pooled output, known after it has run.
        prepare: encoded files -> ``Sounds``; picklable, for the process that reads files.

    Raises:
        MachineError for an unreadable folder.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        recipe: Recipe,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
    ) -> None:
        import torch

        self.name = name
        self.recipe = recipe
        self.device = torch.device(device)
        self.compute: torch.dtype = getattr(torch, dtype)
        self.pools = False
        model, missing = open_model(name, folder)
        refuse_missing(
            name,
            folder,
            [key for key in missing if "pooler" not in key and "masked_spec" not in key],
        )
        if getattr(model.config, "is_encoder_decoder", False):
            model = model.get_encoder()
        self.module = model.requires_grad_(False).to(self.device)
        stamp = str([stat_key(path) for path in model_files(folder)])
        self.prepare = Hearing(name, folder, stamp, recipe.rate, recipe.size)
        extractor, _ = shared_processor(name, folder, stamp, EXTRACTOR)
        # Whisper pads every sound with silence to this number of samples.
        self.filled = int(getattr(extractor, "n_samples", 0))

    def items(self, items: Sounds) -> tuple[Tensor, NDArray[np.bool_]]:
        """See ``ItemEncoder.items``; NaN for a bad sound."""
        import torch

        by_shape = defaultdict(list)
        for place, extracted in enumerate(items.inputs):
            if extracted.size:
                by_shape[extracted.shape].append(place)
        rows: dict[int, Tensor] = {}
        most = AT_ONCE[self.device.type]
        for places in by_shape.values():
            for first in range(0, len(places), most):
                group = places[first : first + most]
                x = np.stack([items.inputs[place] for place in group])
                features = self._features(x, items.samples[group])
                rows.update(zip(group, features, strict=True))
        width = max((len(row) for row in rows.values()), default=0)
        missing = torch.full((width,), torch.nan, device=self.device)
        all_rows = [rows.get(place, missing) for place in range(len(items))]
        return torch.stack(all_rows), items.cut

    def _features(self, x: NDArray[np.float32], samples: NDArray[np.int64]) -> Tensor:
        """Features [n, D] of inputs of one shape [n, ...], which have ``samples`` [n] samples."""
        import torch

        with torch.inference_mode(), deterministic():
            with autocast(self.device, self.compute):
                out = self.module(torch.from_numpy(x).to(self.device))
            pooled = getattr(out, POOLED, None)
            self.pools = pooled is not None
            if self.recipe.pooling == POOLED:
                if pooled is None:
                    raise UsageError(
                        f"{self.name} does not define a pooling.", "--recipe pooling=mean"
                    )
                features: Tensor = pooled.float()
                return features
            states = out.last_hidden_state.float()
            frames = np.full(len(x), states.shape[1])
            if self.filled:
                share = np.minimum(samples / self.filled, 1)
                frames = np.ceil(states.shape[1] * share).astype(int)
            # One by one, because sounds of one input shape may have different numbers of frames.
            pooled_rows = []
            for of_sound, count in zip(states, frames, strict=True):
                if self.recipe.pooling == "max":
                    pooled_rows.append(of_sound[:count].amax(0))
                else:
                    pooled_rows.append(of_sound[:count].mean(0))
            return torch.stack(pooled_rows)

    def trial_width(self) -> int:
        """The width of the features of two sounds. Raises UsageError if the model fails or a feature is not finite."""
        import torch

        rate = self.recipe.rate
        time = np.arange(min(self.recipe.size, rate)) / rate
        waves = [np.sin(2 * np.pi * pitch * time).astype(np.float32) for pitch in (220, 440)]
        samples = np.array([len(wave) for wave in waves])
        inputs = [self.prepare.extract(wave) for wave in waves]
        try:
            features, _ = self.items(Sounds(inputs, samples, np.zeros(2, bool), {}))
        except UsageError:
            raise
        except Exception as error:
            # The files are untrusted, so any error means that the model cannot be used.
            raise UsageError(
                f"{self.name} fails on two sounds of {time.size / rate:g} s: {reason(error)}",
                "Choose an audio encoder, such as Wav2Vec2 or Whisper, or another length: --recipe seconds=N",
            ) from error
        if not bool(torch.isfinite(features).all()):
            raise UsageError(
                f"{self.name} gives NaN or infinite numbers for two sounds.",
                "Get the folder again.",
            )
        return int(features.shape[1])

    def image(self, x: Tensor) -> Tensor:
        """See ``FrozenEncoder.image``. The model reads no images: always UsageError."""
        raise no_images(self.name, SOUNDS)

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``. The model has no text tower: always UsageError."""
        raise no_text(self.name)
