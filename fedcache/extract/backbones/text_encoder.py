"""Encoders of texts: BERT-like models of transformers from a folder, pooled as sentence-transformers says.

The feature of a text is the mean of its tokens' last states without the padding (Reimers and Gurevych,
arXiv:1908.10084), unless ``1_Pooling/config.json`` names the class token or the maximum. ``hf:FOLDER`` is one where the
folder has a tokenizer and says nothing of images; text features of classes are those of prompts, from the same encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError, UsageError, unknown
from fedcache.extract.backbones.backbone import Backbone, Weights
from fedcache.extract.backbones.encoder import deterministic, no_images
from fedcache.extract.backbones.hugging_face import folder_of, open_model, open_tokenizer
from fedcache.extract.backbones.hugging_face_folder import PREPROCESSING, check_folder, read_config
from fedcache.extract.backbones.own import Choice, content_sha256, facts_of
from fedcache.extract.backbones.own_inputs import TEMPLATE, TRIED
from fedcache.extract.inputs import DECODERS, TEXTS, Items
from fedcache.extract.recipe import Recipe
from fedcache.parsing import parse_json
from fedcache.store.own_names import bare_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BATCH = 32
POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
MODULES = ("Transformer", "Pooling", "Normalize")
"""Steps of a sentence encoder that are known; another (Dense) would be left out without a word."""

TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
"""Files of which a tokenizer is made."""


def reads_texts(folder: Path) -> bool:
    """Whether a folder has a tokenizer and does not say how images are made ready."""
    of_images = any((folder / name).is_file() for name in PREPROCESSING)
    return not of_images and any((folder / name).is_file() for name in TOKENIZERS)


def derive(name: str, choice: Choice) -> Backbone:
    """The row of ``hf:...`` of texts; MachineError for what cannot be read, UsageError for what is no such encoder."""
    folder = folder_of(name, choice)
    bare = bare_name(name)
    check_folder(folder, bare)

    def read() -> list[Any]:
        encoder = TextEncoder(bare, folder=folder)
        return [encoder.pooling, encoder.width, encoder.length]

    pooling, width, length = facts_of(
        folder, ("texts",), choice, read, identity=content_sha256(folder)
    )
    if choice.output not in (None, pooling):
        raise unknown(f"output of {bare}", str(choice.output), (pooling,))
    return Backbone(
        name=bare,
        provider="text_encoder",
        width=width,
        text_width=width,
        recipe=Recipe(bare, "", size=length, pooling=pooling, decoder=DECODERS[TEXTS]),
        source=f"yours: {folder}",
        files=("config.json",),
        template=TEMPLATE,
        architecture=", ".join(
            map(str, read_config(folder, "config.json").get("architectures") or [])
        ),
        own=True,
        place=str(folder),
        reads=TEXTS,
    )


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> TextEncoder:
    """The model in evaluation mode, once it has given finite features of the backbone's width for two texts."""
    encoder = TextEncoder(
        backbone.name, folder=weights.file(backbone.name), device=device, dtype=dtype
    )
    features, _ = encoder.items(TRIED)
    if features.shape != (2, backbone.width) or not bool(features.isfinite().all()):
        raise MachineError(
            f"{backbone.name} gives {list(features.shape)} for two texts, expected [2, {backbone.width}], all finite.",
            "Get the folder again.",
        )
    return encoder


class TextEncoder:
    """Texts -> features.

    Args:
        name: ``hf:FOLDER`` or ``hf:ORG/NAME``, from local files.
        home: where the place of a folder is remembered.
        folder: of the model, where it is known.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast, weights stay float32.

    Attributes:
        name: without folders.
        weights: sha256 over the files of the model.
        width: D of its features.
        length: tokens that it reads.
        pooling: mean, cls or max.
        unit: whether rows are made unit.

    Raises:
        MachineError for what is not here or cannot be read, UsageError for a pooling that is not known.
    """

    def __init__(
        self,
        name: str,
        home: Path | None = None,
        *,
        folder: Path | None = None,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
    ) -> None:
        import torch

        self.folder = folder or folder_of(name, Choice(home))
        self.name = bare_name(name)
        self.device = torch.device(device)
        self.compute: torch.dtype = getattr(torch, dtype)
        self.pooling, self.unit = _pooling(self.folder, self.name)
        self.model, missing = open_model(self.name, self.folder)
        lost = [key for key in missing if "pooler" not in key]
        if (
            lost
            or not hasattr(self.model, "get_input_embeddings")
            or hasattr(self.model, "get_image_features")
        ):
            why = "it is no encoder of texts alone"
            if lost:
                why = f"{len(lost)} tensors are missing, such as {lost[0]}"
            raise UsageError(
                f"{self.name} gives no features of texts: {why}.",
                "Name a sentence encoder or a BERT.",
            )
        self.model = self.model.requires_grad_(False).to(self.device)
        self.tokenizer = open_tokenizer(self.name, self.folder)
        self.length = self._most_tokens()
        self.width = int(self.model.config.hidden_size)

    @cached_property
    def weights(self) -> str:
        """sha256 over the files of the model."""
        return content_sha256(self.folder)

    def _most_tokens(self) -> int:
        """Tokens of the longest text that the model reads whole."""
        most = int(getattr(self.model.config, "max_position_embeddings", 512))
        # RoBERTa and MPNet number positions from behind that of the padding on.
        padding = getattr(getattr(self.model, "embeddings", None), "padding_idx", None)
        most -= 0 if padding is None else int(padding) + 1
        told = read_config(self.folder, "sentence_bert_config.json").get("max_seq_length")
        return max(
            1,
            min(
                most,
                int(told or most),
                int(getattr(self.tokenizer, "model_max_length", most) or most),
            ),
        )

    def encode_texts(self, texts: list[str]) -> NDArray[np.float32]:
        """Features [N, D] float32 of N texts, in their order; each is cut to what the model reads.

        A text has the same features whatever texts are encoded with it, up to rounding. Raises UsageError for what is
        no list of texts.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UsageError(
                "Texts are a list of strings.", 'encode_texts(["a first text", "a second"])'
            )
        blocks = [
            self.items(texts[at : at + BATCH])[0].cpu().numpy()
            for at in range(0, len(texts), BATCH)
        ]
        if blocks:
            return np.concatenate(blocks)
        return np.zeros((0, self.width), np.float32)

    def items(self, items: Items) -> tuple[Tensor, NDArray[np.bool_]]:
        """See ``ItemEncoder.items``: all texts at once, filled up to the longest."""
        import torch

        texts = [str(text) for text in items]
        given = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt"
        )
        ids = given["input_ids"].to(self.device)
        mask = given["attention_mask"].to(self.device)
        whole = self.compute is torch.float32
        with (
            torch.inference_mode(),
            deterministic(),
            nullcontext() if whole else torch.autocast(self.device.type, dtype=self.compute),
        ):
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        with torch.inference_mode():
            real = mask[..., None].to(states.dtype)
            if self.pooling == "cls":
                rows = states[:, 0]
            elif self.pooling == "max":
                rows = states.masked_fill(real == 0, -torch.inf).amax(1)
            else:
                rows = (states * real).sum(1) / real.sum(1).clamp_min(1e-9)
            if self.unit:
                rows = torch.nn.functional.normalize(rows, dim=-1)
        return rows, self._cut(texts, given, mask.sum(1).cpu().numpy())

    def _cut(self, texts: Sequence[str], given: Any, lengths: NDArray[Any]) -> NDArray[np.bool_]:
        """Which texts have more tokens than are read."""
        if given.encodings is not None:  # a fast tokenizer keeps what it cut off
            return np.array([bool(encoding.overflowing) for encoding in given.encodings], bool)
        full = lengths >= self.length
        for row in np.flatnonzero(full).tolist():
            full[row] = (
                len(self.tokenizer(texts[row], truncation=False, verbose=False)["input_ids"])
                > self.length
            )
        found: NDArray[np.bool_] = full
        return found

    def image(self, x: Tensor) -> Tensor:
        """It reads no images."""
        raise no_images(self.name, TEXTS)

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``: the features of prompts as texts, unit rows."""
        import torch

        return torch.nn.functional.normalize(self.items(list(prompts))[0], dim=-1)


def _pooling(folder: Path, name: str) -> tuple[str, bool]:
    """How tokens become a row, and whether it is made unit; the mean, and no, where no file says otherwise."""
    told = read_config(folder, "1_Pooling/config.json")
    chosen = [
        POOLINGS.get(key, key)
        for key, value in told.items()
        if key.startswith("pooling_mode") and value is True
    ]
    steps = _steps(folder)
    unknown_steps = [step for step in steps if step not in MODULES]
    if unknown_steps or len(chosen) > 1 or not set(chosen) <= set(POOLINGS.values()):
        found = ", ".join([*unknown_steps, *chosen])
        raise UsageError(
            f"{name} pools its tokens in a way that is not known ({found}).",
            "One of: mean, class token, maximum.",
        )
    return (chosen[0] if chosen else "mean"), "Normalize" in steps


def _steps(folder: Path) -> list[str]:
    """The last part of each module's type in ``modules.json``."""
    path = folder / "modules.json"
    try:
        found: Any
        found = []
        if path.is_file():
            found = parse_json(path.read_bytes())
        return [str(step["type"]).rpartition(".")[2] for step in found]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} cannot be read ({error}).", "Get the folder again.") from error
