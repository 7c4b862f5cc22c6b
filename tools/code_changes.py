"""A change of a line of code that finds its place however the formatter laid the line out."""

from __future__ import annotations

import re


def changed(text: str, old: str, new: str, where: str) -> str:
    """``text`` with ``new`` in the place of ``old``, which must stand in it once.

    Spaces, line breaks and a comma before a closing bracket make no difference.
    Raises ValueError, which names ``where``, for code that is not there or stands there several times.
    """
    parts = re.findall(r"\w+|[^\w\s]", old)
    pattern = r"\s*".join(
        r",?\s*" + re.escape(part) if part in ")]}" else re.escape(part) for part in parts
    )
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise ValueError(f"{where} holds {old!r} {len(found)} times, expected once.")
    place = found[0]
    return text[: place.start()] + new.strip() + text[place.end() :]
