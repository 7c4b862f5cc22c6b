"""Encoders of texts: BERT-like models and decoder language models of transformers, from a folder.

The feature of a text pools the states of its tokens: the mean without the padding (Reimers and Gurevych,
arXiv:1908.10084) unless ``1_Pooling/config.json`` names the class token, the last token or the maximum.
``--recipe`` chooses another pooling, a hidden layer, the number of tokens and a prompt. ``hf:FOLDER`` is such an
encoder where the folder has a tokenizer and says nothing of images; text features of classes are those of prompts,
from the same encoder.

The texts of a batch are sorted by their number of tokens and computed in groups of similar length, each padded on the
right to its longest text. So little padding is computed, and a text has the same feature alone and in any batch, up to
rounding. The groups follow from the batch alone: every worker, and every resumed extraction, computes the same bits.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.backbone import Backbone, Weights, deterministic, no_images
from fedcache.extract.backbones.hugging_face import folder_of, open_model, open_tokenizer
from fedcache.extract.backbones.hugging_face_folder import (
    PREPROCESSING,
    PROMPTS,
    architectures_of,
    check_folder,
    model_files,
    read_config,
)
from fedcache.extract.backbones.own import Choice, content_sha256, facts_of
from fedcache.extract.backbones.own_inputs import TEMPLATE, TRIED
from fedcache.extract.digests import stat_key
from fedcache.extract.inputs import Items
from fedcache.extract.recipe import DECODERS, TEXTS, Recipe
from fedcache.parsing import parse_json
from fedcache.plugins import bare_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_TOKENS = 8_192
"""Tokens of a text that are read unless ``max_tokens`` says more; language models allow 32,768 and 131,072."""

TOKENS_AT_ONCE = {"cpu": 1_024, "cuda": 16_384}
"""Tokens of a group, padding included, by device; a longer text is a group of its own."""

POOLINGS = ("mean", "last", "cls", "max")
LAYER = "layer:"
_WORD = re.compile(rf"({'|'.join(POOLINGS)})(?:\({LAYER}(\d{{1,4}})\))?")
POOLING_FILE = "1_Pooling/config.json"
POOLINGS_OF_FILES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
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


@dataclass(frozen=True)
class TextOutput:
    """Which states are pooled, and how.

    Attributes:
        pooling: mean, last, cls or max.
        layer: number of hidden layers below the states (0: the embeddings); None for the model's own output.
    """

    pooling: str
    layer: int | None = None

    @property
    def word(self) -> str:
        """The recipe's word: ``mean``, ``last(layer:9)``."""
        if self.layer is None:
            return self.pooling
        return f"{self.pooling}({LAYER}{self.layer})"

    @classmethod
    def of_word(cls, word: str) -> TextOutput:
        """The inverse of ``word``; UsageError for a word that no recipe of texts has."""
        found = _WORD.fullmatch(word)
        if found is None:
            raise unknown("pooling", word[:40], POOLINGS)
        pooling, layer = found.groups()
        if layer is None:
            return cls(pooling)
        return cls(pooling, int(layer))


def derive(name: str, choice: Choice) -> Backbone:
    """The row of ``hf:...`` of texts; MachineError for what cannot be read, UsageError for what is no such encoder."""
    folder = folder_of(name, choice)
    bare = bare_name(name)
    check_folder(folder, bare)

    def read() -> list[Any]:
        encoder = TextEncoder(bare, folder=folder)
        model = encoder.model
        return [encoder.output.pooling, model.width, encoder.length, model.most, model.layers]

    facts = facts_of(folder, ("texts and layers",), choice, read, identity=content_sha256(folder))
    pooling, width, length, most, layers = facts
    settings = dict(choice.options)
    output_name = choice.output
    if choice.recorded is not None:
        # The recipe of a store or a model says everything, in words of its own.
        recorded = TextOutput.of_word(choice.recorded.pooling)
        output_name = None
        if recorded.layer is not None:
            output_name = f"{LAYER}{recorded.layer}"
        settings = {"pooling": recorded.pooling, "max_tokens": str(choice.recorded.size)}
        prompt = choice.recorded.prompt
    else:
        prompt = _prompt_of(bare, folder, settings.get("prompt", ""))
    output = TextOutput(
        settings.get("pooling", pooling), _layer_of(bare, output_name, layers, pooling)
    )
    tokens = _tokens_of(bare, settings.get("max_tokens"), length, most)
    if output.pooling not in POOLINGS:
        raise unknown(f"pooling of {bare}", output.pooling, POOLINGS)
    # The store keeps one set of text features per backbone: those of the model's own output.
    text_width = None
    if output == TextOutput(pooling) and not prompt:
        text_width = width
    return Backbone(
        name=bare,
        provider="text_encoder",
        width=width,
        text_width=text_width,
        recipe=Recipe(
            bare, "", size=tokens, pooling=output.word, decoder=DECODERS[TEXTS], prompt=prompt
        ),
        source=f"yours: {folder}",
        files=("config.json",),
        template=TEMPLATE,
        architecture=architectures_of(folder),
        own=True,
        place=str(folder),
        reads=TEXTS,
    )


def _layer_of(name: str, given: str | None, layers: int, pooling: str) -> int | None:
    """The hidden layer of ``output=layer:N``, counted from the embeddings; None for the model's own output."""
    if given in (None, pooling):
        return None
    number = str(given).removeprefix(LAYER)
    at = None
    if str(given).startswith(LAYER) and number.removeprefix("-").isdecimal():
        at = int(number)
        if at < 0:
            at += layers + 1
    if at is None or not 0 <= at <= layers:
        raise UsageError(
            f"Unknown output {given!r} of {name}: it has {layers} hidden layers; layer:0 is the "
            "embeddings.",
            f"--recipe output=layer:{shell_word(layers)}",
        )
    # The states of the last layer are the model's own output.
    return None if at == layers else at


def _tokens_of(name: str, given: str | None, length: int, most: int) -> int:
    """Tokens that are read of a text: those requested, or ``length``, the folder's own."""
    if given is None:
        return length
    if not given.isdecimal() or not 1 <= int(given) <= most:
        raise UsageError(
            f"{name} reads 1 to {most:,} tokens, but the recipe has max_tokens={given}.",
            f"--recipe max_tokens={shell_word(most)}",
        )
    return int(given)


def _prompt_of(name: str, folder: Path, given: str) -> str:
    """The text that stands before each text: that of a name in the folder's file, or the text given.

    Raises UsageError for a single word that the file does not name, and where the folder pools without its prompt.
    """
    known = read_config(folder, PROMPTS).get("prompts")
    if not isinstance(known, dict):
        known = {}
    found = known.get(given, given)
    if given not in (*known, *known.values()) and re.fullmatch(r"[\w.-]+", given):
        raise unknown(f"prompt of {name}", given, known)
    if found and read_config(folder, POOLING_FILE).get("include_prompt") is False:
        raise UsageError(
            f"{name} excludes the tokens of its prompt from pooling (include_prompt), which fedcache does "
            "not support.",
            "Leave prompt out.",
        )
    return str(found)


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> TextEncoder:
    """The model in evaluation mode, once it has given finite features of the backbone's width for two texts."""
    folder = weights.file(backbone.name)
    encoder = TextEncoder(backbone.name, folder=folder, device=device, dtype=dtype, recipe=recipe)
    features, _ = encoder.items(TRIED)
    if features.shape != (2, backbone.width) or not bool(features.isfinite().all()):
        raise MachineError(
            f"{backbone.name} gives {list(features.shape)} for two texts, expected [2, {backbone.width}], all finite.",
            "Get the folder again.",
        )
    return encoder


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of N texts, one text after another.

    Attributes:
        ids: int64 [T] of all texts.
        ends: int64 [N + 1], where each text ends; the first is 0.
        cut: bool [N], texts that had more tokens.
        bad: why a text, by its place, has no feature.
    """

    ids: NDArray[np.int64]
    ends: NDArray[np.int64]
    cut: NDArray[np.bool_]
    bad: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.cut)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [N] tokens of each text."""
        return np.diff(self.ends)


@dataclass(frozen=True)
class Tokenizing:
    """Texts -> ``Tokens``, in whichever process or thread reads the texts. Picklable.

    Attributes:
        name: of the backbone, for messages.
        folder: of the model.
        stamp: of its files, by which a process that has read the tokenizer knows it again.
        length: most tokens of a text.
        prompt: stands before every text.
    """

    name: str
    folder: Path
    stamp: str
    length: int
    prompt: str = ""

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """The tokens of N texts; a text without a token is bad. Raises MachineError for a tokenizer that fails."""
        tokenizer, lock = _tokenizer(self.name, self.folder, self.stamp)
        # A tokenizer holds its length and must not be asked by two threads at once.
        with lock:
            return tokens_of(tokenizer, [self.prompt + str(text) for text in texts], self.length)


def tokens_of(tokenizer: Any, texts: Sequence[str], length: int) -> Tokens:
    """The tokens of N texts by a tokenizer of transformers, each cut to ``length``."""
    given = tokenizer(list(texts), truncation=True, max_length=length, verbose=False)
    rows = given["input_ids"]
    ends = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate([np.asarray(row, np.int64) for row in rows])
    bad = {at: "the tokenizer finds no token in it" for at, row in enumerate(rows) if not row}
    if given.encodings is not None:  # a fast tokenizer keeps what it cut off
        cut = [bool(encoding.overflowing) for encoding in given.encodings]
    else:
        cut = [
            len(row) >= length and len(tokenizer(text, verbose=False)["input_ids"]) > length
            for row, text in zip(rows, texts, strict=True)
        ]
    return Tokens(ids, ends, np.array(cut, bool), bad)


@lru_cache(maxsize=4)
def _tokenizer(name: str, folder: Path, stamp: str) -> tuple[Any, threading.Lock]:
    """The tokenizer of a folder, read once in a process, and what keeps its users apart."""
    return open_tokenizer(name, folder), threading.Lock()


def groups_by_length(lengths: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Places of texts in groups of similar length, the longest first; texts without a token are in none.

    Rows times the longest of a group are at most ``most``, unless a single text is longer.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.count_nonzero(lengths)]
    at = 0
    while at < len(order):
        count = max(1, most // int(lengths[order[at]]))
        yield order[at : at + count]
        at += count


class TextModel:
    """A model of texts in evaluation mode: ``Tokens`` -> features of every output requested, in one forward.

    Encoders of one folder and device share it (``open_texts_model``), so layers and poolings of a backbone that are
    extracted together cost one forward and one copy of the weights.

    Attributes:
        width: D of its features.
        most: tokens of the longest text that it reads whole.
        layers: number of its hidden layers.
        outputs: that are pooled of each forward.
        unit: whether rows are made unit, as the folder says.

    Raises:
        UsageError for what is no encoder of texts alone, MachineError for what cannot be read.
    """

    def __init__(self, name: str, folder: Path, device: torch.device, compute: torch.dtype) -> None:
        self.device = device
        self.compute = compute
        self.module, missing = open_model(name, folder)
        config = self.module.config
        lost = [key for key in missing if "pooler" not in key]
        if (
            lost
            or getattr(config, "is_encoder_decoder", False)
            or not hasattr(self.module, "get_input_embeddings")
            or hasattr(self.module, "get_image_features")
        ):
            why = "it is not a text encoder"
            if lost:
                count = len(lost)
                why = f"{count} tensors are missing, such as {lost[0]}"
            raise UsageError(
                f"{name} gives no features of texts: {why}.",
                "Choose a sentence encoder, a BERT or a decoder language model.",
            )
        config.use_cache = False  # keys and values of a decoder, which only the next token needs
        self.module = self.module.requires_grad_(False).to(device)
        self.width = int(config.hidden_size)
        self.layers = int(getattr(config, "num_hidden_layers", 0))
        self.most = int(getattr(config, "max_position_embeddings", 512))
        # RoBERTa and MPNet number positions from behind that of the padding on.
        padding = getattr(getattr(self.module, "embeddings", None), "padding_idx", None)
        if padding is not None:
            self.most -= int(padding) + 1
        self.padding = max(0, int(getattr(config, "pad_token_id", None) or 0))
        self.unit = "Normalize" in _steps(folder)
        self.outputs: set[TextOutput] = set()
        self._latest: tuple[Tokens, dict[TextOutput, Tensor]] | None = None

    def rows(self, tokens: Tokens, output: TextOutput) -> Tensor:
        """Features [N, D] float32 of an output; NaN for a text without a token.

        The first output requested computes all of them, in one forward; each is handed out once.
        """
        latest = self._latest
        if latest is None or latest[0] is not tokens or output not in latest[1]:
            latest = (tokens, self._compute(tokens))
            self._latest = latest
        return latest[1].pop(output)

    def _compute(self, tokens: Tokens) -> dict[TextOutput, Tensor]:
        import torch

        layered = any(output.layer is not None for output in self.outputs)
        with torch.inference_mode(), deterministic():
            shape = (len(tokens), self.width)
            found = {
                output: torch.full(shape, torch.nan, device=self.device) for output in self.outputs
            }
            for places in groups_by_length(tokens.lengths, TOKENS_AT_ONCE[self.device.type]):
                ids, lengths = self._padded(tokens, places)
                mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
                with self._autocast():
                    out = self.module(
                        input_ids=ids, attention_mask=mask.long(), output_hidden_states=layered
                    )
                at = torch.from_numpy(places).to(self.device)
                for output, rows in found.items():
                    states = out.last_hidden_state
                    if output.layer is not None:
                        states = out.hidden_states[output.layer]
                    pooled = pool(states.float(), mask, lengths, output.pooling)
                    if self.unit:
                        pooled = torch.nn.functional.normalize(pooled, dim=-1)
                    rows[at] = pooled
        return found

    def _padded(self, tokens: Tokens, places: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Tokens [n, L] of some texts, padded on the right, and the lengths [n], on the device."""
        import torch

        lengths = tokens.lengths[places]
        ids = np.full((len(places), int(lengths.max())), self.padding, np.int64)
        for row, (place, length) in enumerate(zip(places, lengths, strict=True)):
            start = tokens.ends[place]
            ids[row, :length] = tokens.ids[start : start + length]
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(lengths).to(self.device)

    def _autocast(self) -> Any:
        import torch

        if self.compute is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)


def pool(states: Tensor, mask: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Features [n, D] of states [n, L, D], of which ``mask`` [n, L] are tokens, the first ``lengths`` [n]."""
    import torch

    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    real = mask[..., None]
    if pooling == "max":
        return states.masked_fill(~real, -torch.inf).amax(1)
    return (states * real).sum(1) / lengths[:, None]


_OPEN: WeakValueDictionary[tuple[str, ...], TextModel] = WeakValueDictionary()
"""Models that an encoder of this process holds, by folder, stamp of its files, device and compute dtype."""


def open_texts_model(
    name: str, folder: Path, stamp: str, device: torch.device, compute: torch.dtype
) -> TextModel:
    """The model of a folder: the one that another encoder of this process holds, or a new one."""
    key = (str(folder), stamp, str(device), str(compute))
    model = _OPEN.get(key)
    if model is None:
        model = TextModel(name, folder, device, compute)
        _OPEN[key] = model
    return model


class TextEncoder:
    """Texts -> features.

    Args:
        name: ``hf:FOLDER`` or ``hf:ORG/NAME``, from local files.
        home: where the place of a folder is remembered.
        folder: of the model, where it is known.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast, weights stay float32.
        recipe: says tokens, pooling, layer and prompt; None for the folder's own.

    Attributes:
        name: without folders.
        weights: sha256 over the files of the model.
        model: may be shared with other encoders.
        output: which states are pooled, and how.
        length: tokens that it reads of a text.
        prepare: texts -> tokens; picklable, for the process that reads texts.

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
        recipe: Recipe | None = None,
    ) -> None:
        import torch

        self.folder = folder or folder_of(name, Choice(home))
        self.name = bare_name(name)
        self.output = TextOutput(pooling_of_folder(self.folder, self.name))
        stamp = str([stat_key(path) for path in model_files(self.folder)])
        tokenizer, _ = _tokenizer(self.name, self.folder, stamp)
        self.model = open_texts_model(
            self.name, self.folder, stamp, torch.device(device), getattr(torch, dtype)
        )
        own_limit = read_config(self.folder, "sentence_bert_config.json").get("max_seq_length")
        allowed = getattr(tokenizer, "model_max_length", None)
        self.length = max(
            1, min(self.model.most, MOST_TOKENS, *(int(n) for n in (own_limit, allowed) if n))
        )
        prompt = ""
        if recipe is not None:
            self.output = TextOutput.of_word(recipe.pooling)
            self.length = recipe.size
            prompt = recipe.prompt
        self.model.outputs.add(self.output)
        self.prepare = Tokenizing(self.name, self.folder, stamp, self.length, prompt)

    @cached_property
    def weights(self) -> str:
        """sha256 over the files of the model."""
        return content_sha256(self.folder)

    @property
    def width(self) -> int:
        """D of its features."""
        return self.model.width

    def encode_texts(self, texts: list[str]) -> NDArray[np.float32]:
        """Features [N, D] float32 of N texts, in their order; each is cut to what the model reads.

        A text has the same features whatever texts are encoded with it, up to rounding. Raises UsageError for what is
        no list of texts.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UsageError(
                "Texts must be a list of strings.", 'encode_texts(["a first text", "a second"])'
            )
        if not texts:
            return np.zeros((0, self.width), np.float32)
        rows: NDArray[np.float32] = self.items(texts)[0].cpu().numpy()
        return rows

    def items(self, items: Items | Tokens) -> tuple[Tensor, NDArray[np.bool_]]:
        """See ``ItemEncoder.items``; texts are tokenised first."""
        tokens = items if isinstance(items, Tokens) else self.prepare(list(items))
        return self.model.rows(tokens, self.output), tokens.cut

    def image(self, x: Tensor) -> Tensor:
        """It reads no images."""
        raise no_images(self.name, TEXTS)

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``: the features of prompts as texts, unit rows."""
        import torch

        return torch.nn.functional.normalize(self.items(list(prompts))[0], dim=-1)


def pooling_of_folder(folder: Path, name: str) -> str:
    """How tokens become a row; the mean where no file says otherwise. UsageError for what is not known."""
    config = read_config(folder, POOLING_FILE)
    chosen = [
        POOLINGS_OF_FILES.get(key, key)
        for key, value in config.items()
        if key.startswith("pooling_mode") and value is True
    ]
    unknown_steps = [step for step in _steps(folder) if step not in MODULES]
    if unknown_steps or len(chosen) > 1 or not set(chosen) <= set(POOLINGS):
        found = ", ".join([*unknown_steps, *chosen])
        raise UsageError(
            f"{name} pools its tokens in an unknown way ({found}).",
            "One of: mean, class token, last token, maximum.",
        )
    return chosen[0] if chosen else "mean"


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
