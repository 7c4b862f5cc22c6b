"""Folders of short tones, and tiny audio encoders of transformers with random weights."""

import numpy as np
import soundfile
import torch
import transformers

RATE = 16_000


def tone(pitch, seconds, rate=RATE):
    """A tone, float32 [n]."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * pitch * time)).astype(np.float32)


def tones(path, count=6):
    """A folder of two classes, low and high, of tones between 0.3 and 0.5 s, half of them FLAC."""
    for number in range(count):
        name, pitch = (("low", 200), ("high", 900))[number % 2]
        (path / name).mkdir(parents=True, exist_ok=True)
        ending = ("wav", "flac")[number % 2]
        wave = tone(pitch + 7 * number, 0.3 + 0.1 * (number % 3))
        soundfile.write(path / name / f"{number}.{ending}", wave, RATE)
    return path


def encoder(path, kind):
    """A saved model: wav2vec2, whisper (2 s) or ast, that hears 16,000 samples per second."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    extractor: transformers.SequenceFeatureExtractor
    if kind == "wav2vec2":
        config = transformers.Wav2Vec2Config(
            **small,
            intermediate_size=16,
            conv_dim=(8, 8),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )
        model = transformers.Wav2Vec2Model(config)
        extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    elif kind == "whisper":
        config = transformers.WhisperConfig(
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_mel_bins=8,
            max_source_positions=100,
            max_target_positions=8,
            vocab_size=20,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            decoder_start_token_id=0,
        )
        model = transformers.WhisperModel(config)
        extractor = transformers.WhisperFeatureExtractor(
            feature_size=8, sampling_rate=RATE, chunk_length=2
        )
    else:
        config = transformers.ASTConfig(
            **small, intermediate_size=16, max_length=32, num_mel_bins=16, patch_size=8
        )
        model = transformers.ASTModel(config)
        extractor = transformers.ASTFeatureExtractor(
            sampling_rate=RATE, num_mel_bins=16, max_length=32
        )
    model.eval().save_pretrained(path)
    extractor.save_pretrained(path)
    return path
