"""Encoders of texts: BERT-like models and decoder language models of transformers, from a folder.

The feature of a text pools the states of its tokens: the mean without the padding (Reimers and Gurevych,
arXiv:1908.10084) unless ``1_Pooling/config.json`` names the class token, the last token or the maximum.
``--recipe`` chooses another pooling, a hidden layer, the number of tokens and a prompt. ``hf:FOLDER`` is an encoder of
texts if the folder has a tokenizer and no preprocessing of images. Text features of classes are the features of their
prompts, from the same encoder.

The texts of a batch are sorted by their number of tokens and computed in groups of similar length, each padded on the
right to its longest text. So little padding is computed, and a text has the same feature alone and in any batch, up to
rounding. The groups depend only on the batch, so every worker and every resumed extraction computes the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.backbone import (
    Backbone,
    Weights,
    autocast,
    deterministic,
    no_images,
)
from fedcache.extract.backbones.hugging_face import folder_of, open_model, shared_processor
from fedcache.extract.backbones.hugging_face_folder import (
    PREPROCESSING,
    PROMPTS,
    folder_row,
    model_files,
    read_config,
)
from fedcache.extract.backbones.own import Choice, facts_of
from fedcache.extract.backbones.own_inputs import TEMPLATE, TRIAL_TEXTS
from fedcache.extract.digests import stat_key
from fedcache.extract.inputs import Items
from fedcache.extract.recipe import DECODERS, TEXTS, Recipe
from fedcache.parsing import parse_json
from fedcache.plugins import bare_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_TOKENS = 8_192
"""Default limit of a text's tokens. ``max_tokens`` can raise it, for language models to 32,768 or 131,072."""

TOKENS_AT_ONCE = {"cpu": 1_024, "cuda": 16_384}
"""Limit of the tokens, with padding, that are computed together, by device. A text with more tokens runs alone."""

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
"""Steps of a sentence encoder that fedcache can run. It refuses a folder with any other step, such as Dense."""

TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
"""Files from which a tokenizer can be made."""


def reads_texts(folder: Path) -> bool:
    """Whether a folder has a tokenizer and no preprocessing of images."""
    if any((folder / name).is_file() for name in PREPROCESSING):
        return False
    return any((folder / name).is_file() for name in TOKENIZERS)


@dataclass(frozen=True)
class TextOutput:
    """The states that are pooled, and the pooling.

    Attributes:
        pooling: mean, last, cls or max.
        layer: the states after this number of hidden layers (0: the embeddings); None for the model's own output.
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


def derive(name: str, folder: Path, choice: Choice) -> Backbone:
    """The row of a text model in a folder.

    Raises MachineError for an unreadable folder, UsageError for a model that is no encoder of texts.
    """

    def read() -> list[Any]:
        encoder = TextEncoder(name, folder=folder)
        model = encoder.model
        return [encoder.output.pooling, model.width, encoder.length, model.most, model.layers]

    pooling, width, length, most, layers = facts_of(folder, ("texts and layers",), choice, read)
    settings = dict(choice.options)
    output_name = choice.output
    if choice.recorded is not None:
        # The recipe of a store or a model has all settings.
        recorded = TextOutput.of_word(choice.recorded.pooling)
        output_name = None
        if recorded.layer is not None:
            output_name = f"{LAYER}{recorded.layer}"
        settings = {"pooling": recorded.pooling, "max_tokens": str(choice.recorded.size)}
        prompt = choice.recorded.prompt
    else:
        prompt = _prompt_of(name, folder, settings.get("prompt", ""))
    layer = _layer_of(name, output_name, layers, pooling)
    output = TextOutput(settings.get("pooling", pooling), layer)
    tokens = _tokens_of(name, settings.get("max_tokens"), length, most)
    if choice.recorded is None and "max_tokens" in settings:
        _refuse_no_tokens(name, folder, tokens, prompt)
    if output.pooling not in POOLINGS:
        raise unknown(f"pooling of {name}", output.pooling, POOLINGS)
    # The store keeps one set of text features per backbone: those of the model's own output.
    text_width = None
    if output == TextOutput(pooling) and not prompt:
        text_width = width
    recipe = Recipe(
        name, "", size=tokens, pooling=output.word, decoder=DECODERS[TEXTS], prompt=prompt
    )
    row = folder_row(folder, "text_encoder", width, recipe)
    return replace(row, text_width=text_width, template=TEMPLATE, reads=TEXTS)


def _layer_of(name: str, given: str | None, layers: int, pooling: str) -> int | None:
    """The hidden layer of ``output=layer:N``, counted from the embeddings; None for the model's own output."""
    if given is None or given == pooling:
        return None
    number = given.removeprefix(LAYER)
    layer = None
    if given.startswith(LAYER) and number.removeprefix("-").isdecimal():
        layer = int(number)
        if layer < 0:
            layer += layers + 1
    if layer is None or not 0 <= layer <= layers:
        raise UsageError(
            f"Unknown output {given!r} of {name}: it has {layers} hidden layers, and layer:0 means the embeddings.",
            f"--recipe output=layer:{shell_word(layers)}",
        )
    # The states of the last layer are the model's own output.
    if layer == layers:
        return None
    return layer


def _tokens_of(name: str, given: str | None, length: int, most: int) -> int:
    """Number of tokens that are read of a text: the requested number, or ``length``, the limit of the folder."""
    if given is None:
        return length
    if not given.isdecimal() or not 1 <= int(given) <= most:
        raise UsageError(
            f"{name} reads 1 to {most:,} tokens, but the recipe has max_tokens={given}.",
            f"--recipe max_tokens={shell_word(most)}",
        )
    return int(given)


def _refuse_no_tokens(name: str, folder: Path, tokens: int, prompt: str) -> None:
    """Raise UsageError if the tokens that are added to every text, and those of the prompt, leave none for the text."""
    stamp = str([stat_key(path) for path in model_files(folder)])
    tokenizer, lock = shared_processor(name, folder, stamp, "tokenizer")
    with lock:
        added = len(tokenizer(prompt, verbose=False)["input_ids"])
    fewest = added + 1
    if tokens < fewest:
        raise UsageError(
            f"max_tokens={tokens} is too small: {name} adds {added} tokens to every text, so no token is left for "
            "the text.",
            f"--recipe max_tokens={shell_word(fewest)}",
        )


def _prompt_of(name: str, folder: Path, given: str) -> str:
    """The prompt before each text: the one with the given name in the folder's file, or the given text itself.

    Raises UsageError for a single word that is not a name in the file, and for a folder that pools without its prompt.
    """
    known = read_config(folder, PROMPTS).get("prompts")
    if not isinstance(known, dict):
        known = {}
    found = known.get(given, given)
    is_known = given in (*known, *known.values())
    if not is_known and re.fullmatch(r"[\w.-]+", given):
        raise unknown(f"prompt of {name}", given, known)
    if found and read_config(folder, POOLING_FILE).get("include_prompt") is False:
        raise UsageError(
            f"{name} excludes the tokens of its prompt from pooling (include_prompt), which fedcache does "
            "not support.",
            "Leave out prompt in --recipe.",
        )
    return str(found)


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> TextEncoder:
    """The model in evaluation mode, after a check that it gives finite features of the backbone's width."""
    folder = weights.file(backbone.name)
    encoder = TextEncoder(backbone.name, folder=folder, device=device, dtype=dtype, recipe=recipe)
    features, _ = encoder.items(TRIAL_TEXTS)
    unusable = int((~features.isfinite()).sum())
    shape = [*features.shape]
    if shape != [2, backbone.width] or unusable:
        raise MachineError(
            f"For two texts, {backbone.name} gives features of shape {shape} with {unusable} NaN or "
            f"infinite numbers. Expected the shape [2, {backbone.width}] and only finite numbers.",
            "Get the folder of the model again.",
        )
    return encoder


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of N texts, one text after another.

    Attributes:
        ids: int64 [T] of all texts.
        ends: int64 [N + 1], the end of each text in ``ids``, after a first 0.
        cut: bool [N], texts that had more tokens.
        bad: place of a text without a feature -> reason.
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


def tokenised(
    name: str, folder: Path, stamp: str, length: int, prompt: str, texts: Sequence[str]
) -> Tokens:
    """The tokens of N texts, in the process or thread that reads them; a text without a token is bad.

    Args:
        name: of the backbone, for messages.
        folder: of the model.
        stamp: of the model's files; a process reads the tokenizer once per stamp.
        length: largest number of tokens of a text.
        prompt: added before every text.
        texts: N texts.

    Raises MachineError for a tokenizer that fails.
    """
    tokenizer, lock = shared_processor(name, folder, stamp, "tokenizer")
    prompted = [prompt + str(text) for text in texts]
    # A tokenizer stores its maximum length, so only one thread may use it at a time.
    with lock:
        return tokens_of(tokenizer, prompted, length)


def tokens_of(tokenizer: Any, texts: Sequence[str], length: int) -> Tokens:
    """The tokens of N texts by a tokenizer of transformers, each cut to ``length``."""
    tokenized = tokenizer(list(texts), truncation=True, max_length=length, verbose=False)
    rows = tokenized["input_ids"]
    ends = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate([np.asarray(row, np.int64) for row in rows])
    bad = {
        place: "the tokenizer finds no token in this text"
        for place, row in enumerate(rows)
        if not row
    }
    if tokenized.encodings is not None:  # a fast tokenizer keeps the tokens that it cut off
        cut = [bool(encoding.overflowing) for encoding in tokenized.encodings]
    else:
        cut = []
        for row, text in zip(rows, texts, strict=True):
            is_cut = False
            if len(row) >= length:
                all_tokens = tokenizer(text, verbose=False)["input_ids"]
                is_cut = len(all_tokens) > length
            cut.append(is_cut)
    return Tokens(ids, ends, np.array(cut, bool), bad)


def groups_by_length(lengths: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Places of texts in groups of similar length, the longest first; texts without a token are in no group.

    Rows times the longest of a group are at most ``most``, unless a single text is longer.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.count_nonzero(lengths)]
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        count = max(1, most // longest)
        yield order[start : start + count]
        start += count


class TextModel:
    """A model of texts in evaluation mode: ``Tokens`` -> features of every requested output, in one forward pass.

    Encoders of one folder and device share it (``open_texts_model``), so layers and poolings of a backbone that are
    extracted together cost one forward pass and one copy of the weights.

    Attributes:
        width: D of its features.
        most: largest number of tokens of a text.
        layers: number of its hidden layers.
        outputs: the outputs that are pooled in each forward pass.
        unit: whether rows are brought to unit length, as the folder declares.

    Raises:
        UsageError for a model that is not an encoder of texts alone, MachineError for an unreadable folder.
    """

    def __init__(self, name: str, folder: Path, device: torch.device, compute: torch.dtype) -> None:
        self.device = device
        self.compute = compute
        self.module, missing = open_model(name, folder)
        config = self.module.config
        # Features of texts do not depend on the pooler.
        lost = [key for key in missing if "pooler" not in key]
        has_decoder = getattr(config, "is_encoder_decoder", False)
        reads_tokens = hasattr(self.module, "get_input_embeddings")
        reads_images = hasattr(self.module, "get_image_features")
        if lost or has_decoder or reads_images or not reads_tokens:
            why = "it is not a text encoder"
            if lost:
                count = len(lost)
                why = f"{count} tensors are missing, such as {lost[0]}"
            raise UsageError(
                f"{name} gives no features of texts: {why}.",
                "Choose a sentence encoder, a BERT or a decoder language model.",
            )
        config.use_cache = False  # of keys and values, which only the next token of a decoder needs
        self.module = self.module.requires_grad_(False).to(device)
        self.width = int(config.hidden_size)
        self.layers = int(getattr(config, "num_hidden_layers", 0))
        self.most = int(getattr(config, "max_position_embeddings", 512))
        # RoBERTa and MPNet begin to number positions after that of the padding.
        embeddings = getattr(self.module, "embeddings", None)
        padding = getattr(embeddings, "padding_idx", None)
        if padding is not None:
            self.most -= int(padding) + 1
        self.padding = max(0, int(getattr(config, "pad_token_id", None) or 0))
        self.unit = "Normalize" in _steps(folder)
        self.outputs: set[TextOutput] = set()
        self._latest: tuple[Tokens, dict[TextOutput, Tensor]] | None = None

    def rows(self, tokens: Tokens, output: TextOutput) -> Tensor:
        """Features [N, D] float32 of an output; NaN for a text without a token.

        The first request for a batch of tokens computes all outputs in one forward pass; each output is returned once.
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
                with autocast(self.device, self.compute):
                    out = self.module(
                        input_ids=ids, attention_mask=mask.long(), output_hidden_states=layered
                    )
                index = torch.from_numpy(places).to(self.device)
                for output, rows in found.items():
                    states = out.last_hidden_state
                    if output.layer is not None:
                        states = out.hidden_states[output.layer]
                    pooled = pool(states.float(), mask, lengths, output.pooling)
                    if self.unit:
                        pooled = torch.nn.functional.normalize(pooled, dim=-1)
                    rows[index] = pooled
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


def pool(states: Tensor, mask: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Features [n, D] of states [n, L, D].

    ``mask`` [n, L] is True for states of tokens, which are the first ``lengths`` [n] of each text.
    """
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
"""Models that encoders of this process use, by folder, stamp of its files, device and compute dtype."""


def open_texts_model(
    name: str, folder: Path, stamp: str, device: torch.device, compute: torch.dtype
) -> TextModel:
    """The model of a folder: the one that another encoder of this process uses, or a new one."""
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
        folder: of the model; None to find it by name.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast, weights stay float32.
        recipe: with tokens, pooling, layer and prompt; None for the folder's own.

    Attributes:
        name: without folders.
        model: may be shared with other encoders.
        output: the states that are pooled, and the pooling.
        length: number of tokens that it reads of a text.
        prepare: texts -> tokens; picklable, for the process that reads texts.

    Raises:
        MachineError for a missing or unreadable folder, UsageError for an unknown pooling.
    """

    def __init__(
        self,
        name: str,
        *,
        folder: Path | None = None,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        recipe: Recipe | None = None,
    ) -> None:
        import torch

        self.folder = folder or folder_of(name, Choice())
        self.name = bare_name(name)
        self.output = TextOutput(pooling_of_folder(self.folder, self.name))
        stamp = str([stat_key(path) for path in model_files(self.folder)])
        tokenizer, _ = shared_processor(self.name, self.folder, stamp, "tokenizer")
        self.model = open_texts_model(
            self.name, self.folder, stamp, torch.device(device), getattr(torch, dtype)
        )
        own_limit = read_config(self.folder, "sentence_bert_config.json").get("max_seq_length")
        allowed = getattr(tokenizer, "model_max_length", None)
        limits = [self.model.most, MOST_TOKENS]
        for limit in (own_limit, allowed):
            if limit:
                limits.append(int(limit))
        self.length = max(1, min(limits))
        prompt = ""
        if recipe is not None:
            self.output = TextOutput.of_word(recipe.pooling)
            self.length = recipe.size
            prompt = recipe.prompt
        self.model.outputs.add(self.output)
        self.prepare = partial(tokenised, self.name, self.folder, stamp, self.length, prompt)

    @property
    def width(self) -> int:
        """D of its features."""
        return self.model.width

    def encode_texts(self, texts: list[str]) -> NDArray[np.float32]:
        """Features [N, D] float32 of N texts, in their order; each text is cut to ``length`` tokens.

        A text has the same features alone and with other texts, up to rounding. Raises UsageError unless ``texts`` is a
        list of texts.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UsageError(
                "Texts must be a list of strings.", 'encode_texts(["a first text", "a second"])'
            )
        if not texts:
            return np.zeros((0, self.width), np.float32)
        features, _ = self.items(texts)
        return features.cpu().numpy()

    def items(self, items: Items | Tokens) -> tuple[Tensor, NDArray[np.bool_]]:
        """See ``ItemEncoder.items``; texts are tokenised first."""
        if isinstance(items, Tokens):
            tokens = items
        else:
            tokens = self.prepare(list(items))
        return self.model.rows(tokens, self.output), tokens.cut

    def image(self, x: Tensor) -> Tensor:
        """See ``FrozenEncoder.image``. The model reads no images: always UsageError."""
        raise no_images(self.name, TEXTS)

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``: the features of prompts as texts, unit rows."""
        import torch

        features, _ = self.items(list(prompts))
        return torch.nn.functional.normalize(features, dim=-1)


def pooling_of_folder(folder: Path, name: str) -> str:
    """The pooling of a folder; the mean if no file names one. Raises UsageError for an unknown pooling or step."""
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
            "Choose a model that pools by mean, class token, last token or maximum.",
        )
    if chosen:
        return chosen[0]
    return "mean"


def _steps(folder: Path) -> list[str]:
    """The last part of each module's type in ``modules.json``; [] without this file."""
    path = folder / "modules.json"
    try:
        if not path.is_file():
            return []
        steps = parse_json(path.read_bytes())
        return [str(step["type"]).rpartition(".")[2] for step in steps]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} cannot be read ({error}).", "Get the folder again.") from error
