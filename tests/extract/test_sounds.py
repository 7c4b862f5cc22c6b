"""Decoding of sound files: channels, rates, and files that are refused."""

import io

import numpy as np
import pytest
import soundfile
from tiny_sounds import tone

from fedcache.extract.image_files import BadImage
from fedcache.extract.sounds import decode_sound


def encoded(samples, rate, kind="WAV", subtype=None):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_channels_are_averaged(kind):
    left = tone(200, 0.1, 4000)
    raw = encoded(np.stack([left, np.zeros_like(left)], 1), 4000, kind)
    found, cut = decode_sound(raw, 4000, 10_000)
    assert found.dtype == np.float32
    assert found.shape == (400,)
    assert cut is False
    assert np.abs(found - left / 2).max() < 2**-15


def test_a_tone_keeps_its_pitch_at_another_rate():
    raw = encoded(tone(500, 1.0, 44_100), 44_100, subtype="FLOAT")
    found, _ = decode_sound(raw, 16_000, 100_000)
    expected = tone(500, 1.0, 16_000)
    assert found.shape == expected.shape
    # The filter has no samples before the first and behind the last.
    assert np.abs(found - expected)[200:-200].max() < 1e-3


def test_a_long_file_is_read_to_the_limit_and_no_further(monkeypatch):
    asked = []
    plain = soundfile.SoundFile.read

    def read(self, frames, **words):
        asked.append(frames)
        return plain(self, frames, **words)

    monkeypatch.setattr(soundfile.SoundFile, "read", read)
    raw = encoded(tone(200, 3.0, 8000), 8000)
    found, cut = decode_sound(raw, 4000, 2000)
    assert len(found) == 2000
    assert cut is True
    assert asked == [4000]
    assert decode_sound(raw, 4000, 12_000)[1] is False


REFUSED = {
    "an empty file": (b"", "not a readable WAV or FLAC file"),
    "noise": (b"RIFF" + bytes(range(200)), "not a readable WAV or FLAC file"),
    "a WAV without samples": (encoded(np.zeros(0, np.float32), 4000), "it is empty"),
    "half a WAV": (encoded(tone(200, 1.0), 4000)[:5000], "ends before its samples do"),
    "half a FLAC": (encoded(tone(200, 4.0), 4000, "FLAC")[:6000], "FLAC|ends before"),
    "another format": (encoded(tone(200, 1.0), 8000, "OGG"), "it is OGG"),
    "too many channels": (encoded(np.zeros((9, 33), np.float32), 4000), "33 channels"),
    "too low a rate": (encoded(tone(2, 1.0, 100), 100), "100 samples per second"),
    "no channel": (
        encoded(tone(200, 0.1), 4000).replace(b"\1\0\1\0", b"\1\0\0\0", 1),
        "not a readable WAV",
    ),
    "NaN": (
        encoded(np.full(9, np.nan, np.float32), 4000, subtype="FLOAT"),
        "NaN or infinite numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused_have_a_reason(name):
    raw, reason = REFUSED[name]
    with pytest.raises(BadImage, match=reason):
        decode_sound(raw, 4000, 100_000)
