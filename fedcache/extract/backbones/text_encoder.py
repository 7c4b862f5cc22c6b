"""Encoders of texts: BERT-like models of transformers from a folder, pooled as sentence-transformers says.

The feature of a text is the mean of its tokens' last states without the padding (Reimers and Gurevych,
arXiv:1908.10084), unless ``1_Pooling/config.json`` names the class token or the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.extract.backbones.hugging_face import folder_of, open_model, open_tokenizer
from fedcache.extract.backbones.hugging_face_folder import read_config
from fedcache.extract.backbones.own import Choice, content_sha256
from fedcache.parsing import parse_json
from fedcache.store.own_names import bare_name

BATCH = 32
POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
MODULES = ("Transformer", "Pooling", "Normalize")
"""Steps of a sentence encoder that are known; another (Dense) would be left out without a word."""


class TextEncoder:
    """Texts -> features.

    Args:
        name: ``hf:FOLDER`` or ``hf:ORG/NAME``, from local files.
        home: where the place of a folder is remembered.

    Attributes:
        name: without folders.
        weights: sha256 over the files of the model.
        width: D of its features.
        pooling: mean, cls or max.
        unit: whether rows are made unit.

    Raises:
        MachineError for what is not here or cannot be read, UsageError for a pooling that is not known.
    """

    def __init__(self, name: str, home: Path | None = None) -> None:
        folder = folder_of(name, Choice(home))
        self.name, self.weights = bare_name(name), content_sha256(folder)
        self.pooling, self.unit = _pooling(folder, self.name)
        self.model, missing = open_model(self.name, folder)
        lost = [key for key in missing if "pooler" not in key]
        if lost or not hasattr(self.model, "get_input_embeddings") or hasattr(self.model, "get_image_features"):
            why = f"{len(lost)} tensors are missing, such as {lost[0]}" if lost else "it is no encoder of texts alone"
            raise UsageError(f"{self.name} gives no features of texts: {why}.", "Name a sentence encoder or a BERT.")
        self.tokenizer = open_tokenizer(self.name, folder)
        most = int(getattr(self.model.config, "max_position_embeddings", 512))
        self.length = min(most, int(read_config(folder, "sentence_bert_config.json").get("max_seq_length") or most))
        self.width = int(self.model.config.hidden_size)

    def encode_texts(self, texts: list[str]) -> NDArray[np.float32]:
        """Features [N, D] float32 of N texts, in their order; each is cut to what the model reads.

        A text has the same features whatever texts are encoded with it, up to rounding. Raises UsageError for what is
        no list of texts.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UsageError("Texts are a list of strings.", 'encode_texts(["a first text", "a second"])')
        blocks = [self._block(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)]
        return np.concatenate(blocks) if blocks else np.zeros((0, self.width), np.float32)

    def _block(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import torch

        given = self.tokenizer(list(texts), padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        with torch.inference_mode():
            states = self.model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state
            mask = given["attention_mask"][..., None].to(states.dtype)
            if self.pooling == "cls":
                rows = states[:, 0]
            elif self.pooling == "max":
                rows = states.masked_fill(mask == 0, -torch.inf).amax(1)
            else:
                rows = (states * mask).sum(1) / mask.sum(1).clamp_min(1e-9)
            rows = torch.nn.functional.normalize(rows, dim=-1) if self.unit else rows
        found: NDArray[np.float32] = rows.float().numpy()
        return found


def _pooling(folder: Path, name: str) -> tuple[str, bool]:
    """How tokens become a row, and whether it is made unit; the mean, and no, where no file says otherwise."""
    told = read_config(folder, "1_Pooling/config.json")
    chosen = [POOLINGS.get(key, key) for key, value in told.items() if key.startswith("pooling_mode") and value is True]
    steps = _steps(folder)
    unknown_steps = [step for step in steps if step not in MODULES]
    if unknown_steps or len(chosen) > 1 or not set(chosen) <= set(POOLINGS.values()):
        found = ", ".join([*unknown_steps, *chosen])
        raise UsageError(
            f"{name} pools its tokens in a way that is not known ({found}).", "One of: mean, class token, maximum."
        )
    return (chosen[0] if chosen else "mean"), "Normalize" in steps


def _steps(folder: Path) -> list[str]:
    """The last part of each module's type in ``modules.json``."""
    path = folder / "modules.json"
    try:
        found: Any = parse_json(path.read_bytes()) if path.is_file() else []
        return [str(step["type"]).rpartition(".")[2] for step in found]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} cannot be read ({error}).", "Get the folder again.") from error
