"""Tiny models of transformers with random weights, saved as folders."""

import json

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", "cat", "dog", "."]
PLAIN = {
    "do_resize": True,
    "size": {"height": 16, "width": 16},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.5, 1.0],
}


def folder(path, kind, seed=0):
    """A saved model: vit, clip, resnet or bert; images of 16 px."""
    torch.manual_seed(seed)
    vision = {**SHAPE, "intermediate_size": 16, "image_size": 16, "patch_size": 8}
    text = {
        **SHAPE,
        "vocab_size": len(WORDS),
        "intermediate_size": 16,
        "max_position_embeddings": 12,
    }
    if kind == "vit":
        model = transformers.ViTModel(transformers.ViTConfig(**vision), add_pooling_layer=False)
    elif kind == "clip":
        # The feature of a text is that of its end, [SEP].
        text |= {"eos_token_id": WORDS.index("[SEP]"), "bos_token_id": 2, "pad_token_id": 0}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        model = transformers.CLIPModel(config)
    elif kind == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        )
        model = transformers.ResNetModel(config)
    else:
        model = transformers.BertModel(transformers.BertConfig(**text), add_pooling_layer=False)
    model.eval().save_pretrained(path)
    if kind != "bert":
        (path / "preprocessor_config.json").write_text(json.dumps(PLAIN))
    if kind in ("clip", "bert"):
        tokenizer(path)
    return path


def save_tokenizer(made, path):
    """Saved as one with [CLS] before and [SEP] after a text."""
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    fast.save_pretrained(path)


def decoder(path):
    """A decoder language model (Qwen2) of three layers with random weights; each byte of a text is a token."""
    torch.manual_seed(1)
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    config = transformers.Qwen2Config(
        **{**SHAPE, "num_hidden_layers": 3},
        vocab_size=len(vocabulary),
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=80,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.Qwen2Model(config).eval().save_pretrained(path)
    made = transformers.Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(vocabulary)}, merges=[]
    )
    made.save_pretrained(path)
    return path


def tokenizer(path):
    """A tokenizer of whole words, with [CLS] before and [SEP] after a text."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(made, path)


def sentence_encoder(path, words):
    """A BERT of some thousand parameters with a WordPiece vocabulary of the words given, in small letters.

    A word that is not among them is cut into its first letter and "##" pieces, where these are among them.
    """
    torch.manual_seed(0)
    vocabulary = [*WORDS[:4], *dict.fromkeys(words)]
    config = transformers.BertConfig(
        **SHAPE, vocab_size=len(vocabulary), intermediate_size=16, max_position_embeddings=12
    )
    transformers.BertModel(config, add_pooling_layer=False).eval().save_pretrained(path)
    made = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    save_tokenizer(made, path)
    return path
