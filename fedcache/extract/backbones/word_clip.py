"""Image and text towers without training: EfficientNet-Lite 0, and a text tower made of its ImageNet classifier.

The classifier of the image network has a row for each of the 1,000 ImageNet classes, in the space of the image
features. A kernel ridge regression from texts of these classes to the rows gives a row for any other text t:

    K_ij = k(s_i, s_j),  A = (K + LAM I)^-1 W,  f(t) = unit(v(t) A)

- s_i: the text of class i in WordNet, its lemmas and its definition.
- W: the rows of the classifier [1000, 1280], centred and then brought to unit length.
- k(a, b) = (1 - MIX) cos(u_a, u_b) + MIX cos(b_a, b_b). u is the mean of WordLlama's token vectors (Miller, 2024),
  less the mean over the 1,000 texts. b is the bag of words, weighted by tf-idf.
- v(t): the mean of k(h, s_1 .. s_1000) over the hyponyms h of t, at unit length. The hyponyms of "dog" are the synsets
  with a lemma or a definition whose noun is "dog".

MIX, LAM and SCALE were chosen by cross-validation among ImageNet classes alone. The tower knows objects. It does not
know textures and abstract words, because no ImageNet class teaches them.

Context vectors of a trained prompt are averaged and added to the word vector of the class. So their order and number
change nothing, and a ranking of prompt methods on this tower does not carry over to transformers.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import MachineError, shell_word
from fedcache.extract.backbones.backbone import (
    Backbone,
    FrozenEncoder,
    ModuleEncoder,
    Weights,
    hold_weights,
)
from fedcache.extract.backbones.packaged import network
from fedcache.extract.recipe import Recipe
from fedcache.optional import needed_library
from fedcache.store.files import file_sha256

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIX = 0.8
LAM = 3.0
SCALE = 33.5
"""Factor on the cosines. It was fitted to the probabilities of ImageNet classes that the regression left out."""

CLASSES = 1000
WORD = 256
"""Numbers in a row of a prompt, as many as a token vector of WordLlama has."""
ROWS = math.ceil(CLASSES / WORD)
"""Rows that hold the tf-idf kernel of a prompt. Context vectors do not change them."""
CONTEXT = 77
"""Rows of a prompt, as many as CLIP's text tower has tokens."""

TEXTS = {
    "imagenet_synset_to_lemma.txt": "1b8babda187421a4",
    "imagenet_synset_to_definition.txt": "191e227d48fc8c7b",
    "imagenet_synsets.txt": "70002b0ff5de60a3",
}
"""Files of timm with class texts, and the first digits of their sha256: other texts would give other features."""
WORDS = {
    "weights/l2_supercat_256.safetensors": "64b47a2dc493cb8e",
    "tokenizers/l2_supercat_tokenizer_config.json": "93248f2a9ec36c7b",
}
"""Files of the package wordllama. fedcache reads them without importing it, because its loader uses the network."""

_STOP = (
    "a an and any are as at be by especially for from has having in into is it its large not of on one or other some "
    "small than that the to used usually very when which who with"
)
STOP = frozenset(_STOP.split())
"""Words that are ignored, because they have no meaning alone."""
_GENUS_ENDS = (
    "at by consisting for from having in native of on that to used where which who whose with"
)
GENUS_ENDS = frozenset(_GENUS_ENDS.split())
"""Words that follow the main noun of a definition: "with" follows "dog" in "a large dog with a curled tail"."""


def pinned(package: str, folder: str, files: Mapping[str, str]) -> list[Path]:
    """Paths of files of an installed package, which is not imported.

    ``files`` maps names to the first digits of the sha256. Raises MachineError for a missing file or another version of
    it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MachineError(
            f"The class texts of efficientnet-lite0-words need {package}, which is not installed.",
            "pip install 'fedcache[words]'",
        )
    found = []
    for name, digest in files.items():
        path = Path(spec.submodule_search_locations[0], folder, name)
        if not path.is_file() or not file_sha256(path).startswith(digest):
            raise MachineError(
                f"{path} is missing, or is not the file that efficientnet-lite0-words was made with (its sha256 begins "
                f"with {digest}). Another file would give other features.",
                f"Install another version of the package: pip install {shell_word(package)}",
            )
        found.append(path)
    return found


def singular(word: str) -> str:
    """The word without the s of a plural."""
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def words_of(text: str) -> list[str]:
    """Lower-case words of a text, in the singular."""
    return [singular(word) for word in re.findall("[a-z]+", text.lower())]


def genus_of(lemmas: str, definition: str) -> set[str]:
    """Nouns for the kind of a synset: the last word of each lemma, and the main noun of its definition."""
    found = set()
    for lemma in lemmas.split(","):
        words = words_of(lemma)
        if words:
            found.add(words[-1])
    noun = None
    for word in re.findall("[a-z-]+|[,;(:]", definition.lower()):
        if word in GENUS_ENDS or word in ",;(:":
            break
        noun = word
    if noun is not None:
        found.add(singular(noun))
    return found


@dataclass(frozen=True)
class WordNet:
    """The synsets of ImageNet: id -> lemmas, id -> definition, and the ids of the 1,000 classes in their order."""

    lemmas: Mapping[str, str]
    definitions: Mapping[str, str]
    classes: Sequence[str]

    @staticmethod
    def load() -> WordNet:
        """The lists of the installed timm."""
        lemma_file, definition_file, class_file = pinned("timm", "data/_info", TEXTS)
        return WordNet(_table(lemma_file), _table(definition_file), class_file.read_text().split())

    def text(self, synset: str) -> str:
        """The text of a synset: its lemmas and its definition."""
        return f"{self.lemmas[synset]}: {self.definitions.get(synset, '')}"

    @cached_property
    def bags(self) -> dict[str, Counter[str]]:
        """Id -> bag of words of its text."""
        return {synset: bag_of(self.text(synset)) for synset in self.lemmas}

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """Noun -> ids of the synsets of this kind."""
        found = defaultdict(list)
        for synset, lemmas in self.lemmas.items():
            for noun in genus_of(lemmas, self.definitions.get(synset, "")):
                found[noun].append(synset)
        return found

    @cached_property
    def idf(self) -> dict[str, float]:
        """Word -> log(number of synsets / number of synsets with the word in their text)."""
        counts: Counter[str] = Counter()
        for bag in self.bags.values():
            counts.update(bag.keys())
        return {word: math.log(len(self.lemmas) / count) for word, count in counts.items()}

    def hyponyms(self, name: str) -> list[str]:
        """Ids of the synsets that are a kind of ``name``.

        For a name of several words, only the synsets with all of these words in their text, if there are any.
        """
        words = words_of(name)
        if not words:
            return []
        found = self.kinds.get(words[-1], [])
        wanted = {word for word in words if word not in STOP}
        exact = [synset for synset in found if wanted <= self.bags[synset].keys()]
        return exact or found


def bag_of(text: str) -> Counter[str]:
    """Number of occurrences of each word in a text, without the ignored words."""
    return Counter(word for word in words_of(text) if word not in STOP)


def _table(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)


class TextKernel:
    """Both parts of the kernel between any texts and the texts of the 1,000 classes.

    Args:
        net: texts of the classes.
        vectors: WordLlama's token vectors [32000, 256].
        tokenizer: texts -> numbers of tokens.
    """

    def __init__(self, net: WordNet, vectors: Tensor, tokenizer: Any) -> None:
        self.net = net
        self.vectors = vectors
        self.tokenizer = tokenizer
        known: set[str] = set()
        for synset in net.classes:
            known.update(net.bags[synset])
        self.column = {word: column for column, word in enumerate(sorted(known))}
        texts = [net.text(synset) for synset in net.classes]
        means = self.means(texts)
        self.centre = means.mean(0)
        self.class_words = _unit(means - self.centre)
        self.class_tfidf = self.tfidf([net.bags[synset] for synset in net.classes])

    @staticmethod
    def load() -> TextKernel:
        """The kernel from the files of the installed packages."""
        from safetensors.torch import load_file

        vectors, tokens = pinned("wordllama", "", WORDS)
        tokenizers = needed_library("tokenizers", "The text tower of WordLlama", "words")
        tokenizer = tokenizers.Tokenizer.from_file(str(tokens))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        net = WordNet.load()
        return TextKernel(net, load_file(vectors)["embedding.weight"].float(), tokenizer)

    def means(self, texts: Sequence[str]) -> Tensor:
        """Mean of the token vectors of each text, [B, 256]; zeros for a text without tokens."""
        import torch

        rows = []
        for encoded in self.tokenizer.encode_batch(list(texts), add_special_tokens=False):
            row = self.vectors[encoded.ids].sum(0) / max(len(encoded.ids), 1)
            rows.append(row)
        return torch.stack(rows)

    def tfidf(self, bags: Sequence[Mapping[str, int]]) -> Tensor:
        """Unit tf-idf vectors [B, words of the classes]; a word that no class has changes only the norm."""
        import torch

        rows = torch.zeros(len(bags), len(self.column))
        # A word of no synset counts like a word of one synset.
        unseen = math.log(len(self.net.lemmas))
        for row, bag in zip(rows, bags, strict=True):
            weights = {word: count * self.net.idf.get(word, unseen) for word, count in bag.items()}
            norm = math.sqrt(sum(weight**2 for weight in weights.values()))
            for word, weight in weights.items():
                if word in self.column:
                    row[self.column[word]] = weight / norm
        return rows

    def of(self, prompt: str) -> tuple[Tensor, Tensor]:
        """The word vector [256] and the tf-idf kernel with the classes [1000] of a prompt.

        Both are means over the hyponyms of the prompt; without hyponyms, those of the prompt itself.
        """
        net = self.net
        synsets = net.hyponyms(prompt)
        texts = [net.text(synset) for synset in synsets]
        bags = [net.bags[synset] for synset in synsets]
        if not synsets:
            texts = [prompt]
            bags = [bag_of(prompt)]
        words = _unit(self.means(texts) - self.centre).mean(0)
        kernel = (self.tfidf(bags) @ self.class_tfidf.T).mean(0)
        return words, kernel


def _unit(rows: Tensor) -> Tensor:
    import torch

    unit: Tensor = torch.nn.functional.normalize(rows, dim=-1)
    return unit


def ridge(kernel: TextKernel, classifier: Tensor) -> Tensor:
    """A [1000, 1280] of the module's equation, float32, from a classifier's weights [1000, 1280]."""
    import torch

    rows = classifier.double()
    targets = _unit(rows - rows.mean(0))
    words = kernel.class_words.double()
    tfidf = kernel.class_tfidf.double()
    K = (1 - MIX) * words @ words.T + MIX * tfidf @ tfidf.T
    K.diagonal().add_(LAM)
    solution: Tensor = torch.linalg.solve(K, targets)
    return solution.float()


class WordTextTower:
    """Text tower of prompts as rows of 256 numbers: [START, END, the word vector, the tf-idf kernel, padding].

    Context vectors are inserted between START and END. The files of words are read with the first prompt.

    Args:
        classifier: weights [1000, 1280] of the image network's classifier.
        device: returns the device on which features are computed; called at each use.
    """

    width = WORD
    context = CONTEXT

    def __init__(self, classifier: Tensor, device: Callable[[], torch.device]) -> None:
        self._classifier = classifier
        self._device = device
        # Prompt -> its word vector and kernel. Finding the hyponyms takes long, and methods embed the same class names
        # for every client in every round.
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    # Tensors that are made in inference mode cannot be used in a later backward pass, so both properties leave this
    # mode.

    @cached_property
    def _kernel(self) -> TextKernel:
        import torch

        with torch.inference_mode(False):
            return TextKernel.load()

    @cached_property
    def _solution(self) -> Tensor:
        import torch

        with torch.inference_mode(False):
            return ridge(self._kernel, self._classifier)

    def tokenize(self, prompts: Sequence[str]) -> Tensor:
        """Word vector and tf-idf kernel of each prompt, [B, 1 + ROWS, 256]."""
        import torch

        tokens = torch.zeros(len(prompts), (1 + ROWS) * WORD)
        for row, prompt in zip(tokens, prompts, strict=True):
            if prompt not in self._known:
                self._known[prompt] = self._kernel.of(prompt)
            words, kernel = self._known[prompt]
            row[:WORD] = words
            row[WORD : WORD + CLASSES] = kernel
        return tokens.view(len(prompts), 1 + ROWS, WORD)

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See ``engine.client_data.TextTower``."""
        import torch

        tokens = self.tokenize(prompts).to(self._device())
        # Rows 0 and 1 are START and END, which are zero.
        rows = tokens.new_zeros(len(prompts), CONTEXT, WORD)
        rows[:, 2 : 2 + tokens.shape[1]] = tokens
        return rows, torch.ones(len(prompts), dtype=torch.int64, device=rows.device)

    def encode(self, embeddings: Tensor, end: Tensor) -> Tensor:
        """See ``engine.client_data.TextTower``; the context is the mean of the rows between START and END."""
        import torch

        places = torch.arange(embeddings.shape[1], device=embeddings.device)
        inside = (places > 0) & (places < end.unsqueeze(-1))  # [B, L]
        count = inside.sum(-1, keepdim=True).clamp(min=1)
        context = (embeddings * inside.unsqueeze(-1)).sum(1) / count
        # The word vector and the kernel are the rows after END.
        rows = end.unsqueeze(-1) + torch.arange(1, 2 + ROWS, device=end.device)  # [B, 1 + ROWS]
        tokens = embeddings.gather(1, rows.unsqueeze(-1).expand(-1, -1, WORD))
        words = tokens[:, :1] + context.unsqueeze(1)
        return self.features(torch.cat([words, tokens[:, 1:]], 1))

    def features(self, tokens: Tensor) -> Tensor:
        """Unit text features [B, 1280] of word vectors and tf-idf kernels [B, 1 + ROWS, 256]; differentiable."""
        tokens = tokens.float()
        words = tokens[:, 0] @ self._kernel.class_words.T.to(tokens.device)
        tfidf = tokens[:, 1:].flatten(1)[:, :CLASSES]
        kernel = _unit((1 - MIX) * words + MIX * tfidf)
        return _unit(kernel @ self._solution.to(tokens.device))


class WordEncoder(ModuleEncoder):
    """The image network and its text tower.

    Args:
        name: of the backbone.
        network: with its classifier of 1,000 classes, which is removed.
        recipe, device, dtype: as for ``ModuleEncoder``.
    """

    def __init__(
        self, name: str, network: Any, recipe: Recipe, *, device: str | torch.device, dtype: str
    ) -> None:
        classifier = network.classifier.weight.detach().clone()
        self.tower = WordTextTower(classifier, lambda: self.device)
        network.reset_classifier(0)
        super().__init__(
            name,
            network,
            recipe,
            device=device,
            dtype=dtype,
            text=self.tower.features,
            tokenize=self.tower.tokenize,
        )
        if dtype != "float32":
            hold_weights(network, self.compute)  # the text tower uses no layer of the network


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str | torch.device, dtype: str
) -> FrozenEncoder:
    """Both towers, for any input size. The packages with the words are read with the first prompt."""
    whole = network(backbone, weights, classes=CLASSES)
    return WordEncoder(backbone.name, whole, recipe, device=device, dtype=dtype)
