"""Texts and sound without a download: two encoders of one's own, and data to try them on.

``python texts_and_sound.py`` writes reviews.csv, 400 sentences on four topics from five sites, and tones.npz, 200 wave
forms of four pitches from four microphones. ``words`` and ``spectrum`` make the encoders:
``--backbones module:texts_and_sound:words``.
"""

from __future__ import annotations

import csv
import random
import re
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 512
RATE = 8000  # samples per second
PITCHES = {"A3": 220.0, "E4": 330.0, "A4": 440.0, "E5": 660.0}
TOPICS = {
    "sport": "sport goal match team player coach league score",
    "food": "food soup bread cheese cook salt oven taste",
    "music": "music song band guitar tune drum concert singer",
    "travel": "travel train hotel flight road map ticket coast",
}
COMMON = "the a of and we it was with in on very good"


class Words(nn.Module):
    """A bag of words: each is hashed to one of ``WIDTH`` places, and its count is the feature there."""

    reads = "texts"

    def forward(self, texts: list[str]) -> Tensor:
        """[B, WIDTH] unit rows of B texts."""
        rows, places = [], []
        for row, text in enumerate(texts):
            found = [zlib.crc32(word.encode()) % WIDTH for word in re.findall(r"\w+", text.lower())]
            rows += [row] * len(found)
            places += found
        counts = torch.zeros(len(texts), WIDTH)
        counts.index_put_(
            (torch.tensor(rows), torch.tensor(places)), torch.ones(len(rows)), accumulate=True
        )
        return nn.functional.normalize(counts, dim=1)


class Spectrum(nn.Module):
    """How strong each frequency of a wave form is; its phase does not count."""

    reads = "rows"
    example = torch.zeros(800)  # one row as the dataset holds them: its shape and type

    def forward(self, waves: Tensor) -> Tensor:
        """[B, 401] of wave forms [B, 800]."""
        return torch.fft.rfft(waves).abs()


def words() -> nn.Module:
    """The encoder of texts."""
    return Words()


def spectrum() -> nn.Module:
    """The encoder of wave forms."""
    return Spectrum()


def write_sentences(path: str = "reviews.csv", rows: int = 400) -> None:
    """Sentences of three words of a topic, often its name, one of any topic and six common ones."""
    draw = random.Random(0)
    every = " ".join(TOPICS.values()).split()
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "site"])
        for number in range(rows):
            topic = list(TOPICS)[number % len(TOPICS)]
            found = draw.choices([topic] * 4 + TOPICS[topic].split(), k=3) + draw.choices(every)
            found += draw.choices(COMMON.split(), k=6)
            draw.shuffle(found)
            table.writerow([" ".join(found), topic, f"site{draw.randrange(5)}"])


def write_tones(path: str = "tones.npz", rows: int = 200) -> None:
    """A tenth of a second of a tone with a phase of its own, in noise of half its strength."""
    draw = np.random.default_rng(0)
    seconds = np.arange(800) / RATE
    pitch = np.arange(rows) % len(PITCHES)
    phase = draw.uniform(0, 2 * np.pi, (rows, 1))
    waves = np.sin(2 * np.pi * np.array(list(PITCHES.values()))[pitch, None] * seconds + phase)
    waves += 0.5 * draw.normal(size=waves.shape)
    np.savez(
        path,
        waves=waves.astype(np.float32),
        label=np.array(list(PITCHES))[pitch],
        microphone=draw.integers(4, size=rows),
    )


if __name__ == "__main__":
    write_sentences()
    write_tones()
