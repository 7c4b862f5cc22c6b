"""Reads sound files: decodes WAV and FLAC by libsndfile, mixes to one channel, resamples to the rate of the recipe.

The channels of a file are averaged, and scipy's polyphase filter resamples. Of a long file only the beginning is
decoded, so a file costs no more memory than the recipe reads. Raw samples are float32 in [-1, 1].
"""

from __future__ import annotations

import io
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.extract.image_files import BadImage
from fedcache.optional import needed_library

FORMATS = ("FLAC", "RF64", "WAV", "WAVEX")
CHANNELS = 32
"""Maximum number of channels of a sound file."""
RATES = (1_000, 384_000)
"""Lowest and highest rate of a file, in samples per second."""


def need_soundfile() -> Any:
    """The library soundfile. If it is missing, raises MachineError with the command that installs it."""
    return needed_library("soundfile", "Reading sound files", "sound")


def decode_sound(raw: bytes, rate: int, most: int) -> tuple[NDArray[np.float32], bool]:
    """The sound of a file at ``rate`` samples per second, float32 [n] with n <= ``most``, and whether it was cut.

    Raises ``BadImage`` for a file that is empty, damaged, or no WAV or FLAC.
    """
    library = need_soundfile()
    try:
        with library.SoundFile(io.BytesIO(raw)) as file:
            if file.format not in FORMATS:
                raise BadImage(f"it is {file.format}, expected WAV or FLAC")
            if not 1 <= file.channels <= CHANNELS:
                raise BadImage(f"it has {file.channels} channels; the limit is {CHANNELS}")
            if not RATES[0] <= file.samplerate <= RATES[1]:
                raise BadImage(f"it has {file.samplerate:,} samples per second")
            wanted = min(file.frames, math.ceil(most * file.samplerate / rate))
            samples = file.read(wanted, dtype="float32", always_2d=True)
            found = file.samplerate  # of the file, in samples per second
            # Whether the whole file has more than ``most`` samples at ``rate``.
            cut = file.frames * rate > most * found
    except library.LibsndfileError:
        raise BadImage("it is not a readable WAV or FLAC file") from None
    if not wanted:
        raise BadImage("it is empty")
    if len(samples) < wanted or _ends_early(raw):
        raise BadImage("the file ends before its samples do")
    if not np.isfinite(samples).all():
        raise BadImage("it contains NaN or infinite numbers")
    mono = samples.mean(1, dtype=np.float64)
    if found != rate:
        common = math.gcd(found, rate)
        signal = needed_library("scipy.signal", "Resampling", "sound")
        mono = signal.resample_poly(mono, rate // common, found // common)
    return mono[:most].astype(np.float32), cut


def _ends_early(raw: bytes) -> bool:
    """Whether a WAV file is shorter than its header says; libsndfile reads such a file without an error."""
    if raw[:4] != b"RIFF":
        return False
    (size,) = struct.unpack_from("<I", raw, 4)
    # Programs that write into a pipe do not know the size, and write 0 or the largest number. The size is that of the
    # file without its first 8 bytes; one byte of padding at the end may be missing.
    return size not in (0, 2**32 - 1) and size + 8 > len(raw) + 1
