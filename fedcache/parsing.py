"""JSON and TOML of any origin: every input that cannot be read is a ValueError in words.

Also the names of files that are made from words of a user.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedcache.errors import UsageError

# Text from elsewhere (names of files, classes, domains, runs), made safe to show on a terminal, in
# a page or a sheet.
#
# A name may hold characters that are commands and not letters: to clear a terminal, to set its
# title, to turn the order of what follows. Where text leaves fedcache for a person they are shown
# by number; data (``--json``, stores) keep them.

# C0 but not newline and tab, DEL, C1, Arabic letter mark, the marks, embeddings, overrides and isolates of
# bidirectional text, the separators of lines and paragraphs, and surrogates, which no encoding can write.
_COMMANDS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_HIDDEN = re.compile(f"[{_COMMANDS}]")
_HIDDEN_IN_LINE = re.compile(f"[\t\n{_COMMANDS}]")
_FORMULA = tuple("=+-@\t\r＝＋－＠")


def visible(text: str, *, lines: bool = False) -> str:
    r"""The text with every character that is a command shown by its number; with ``lines``, new lines and tabs stay.

    >>> visible("cat\x1b[2J\u202etxt.exe")
    'cat\\x1b[2J\\u202etxt.exe'
    >>> visible("two\nlines"), visible("two\nlines", lines=True)
    ('two\\x0alines', 'two\nlines')
    """
    if text.isascii() and text.isprintable():  # nearly all texts
        return text
    hidden = _HIDDEN_IN_LINE
    if lines:
        hidden = _HIDDEN
    return hidden.sub(_number, text)


def _number(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}"


def escape_json(text: str) -> str:
    r"""JSON that means the same, with every character that is a command written as ``\uNNNN``.

    >>> escape_json('"cat\u202e"')
    '"cat\\u202e"'
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def sheet_cell(value: object) -> object:
    r"""A cell of a CSV: a spreadsheet shows it and does not run it as a formula. Numbers are as they were.

    >>> sheet_cell("=1+1"), sheet_cell("-0.5"), sheet_cell(-0.5), sheet_cell("-")
    ("'=1+1", '-0.5', -0.5, '-')
    """
    if not isinstance(value, str):
        return value
    shown = visible(value)
    if not value.lstrip(" ").startswith(_FORMULA) or value == "-" or _is_number(value):
        return shown
    return f"'{shown}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


DEEPEST = 50
"""Tables and arrays inside one another that a TOML may have; no file of fedcache has more than 4."""


SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names that can be those of a file or folder in a store."""


def slug_of(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def listed(text: str) -> list[str]:
    """The words of a list with commas; a word with a comma in it is written in quotes.

    >>> listed('a, "b,c"')
    ['a', 'b,c']

    Raises UsageError for a line break outside of quotes.
    """
    try:
        words = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:
        raise UsageError(
            f"{text!r} is not a list of words with commas between them: it has a line break.",
            "Put a word that has a line break in it into quotes.",
        ) from None
    return [word.strip() for word in words if word.strip()]


def in_a_list(words: Iterable[str]) -> str:
    """The words as ``listed`` takes them.

    >>> in_a_list(["a", "b,c"])
    'a,"b,c"'
    """
    written = io.StringIO()
    csv.writer(written).writerow(words)
    return written.getvalue().removesuffix("\r\n")


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` that knows one error: ValueError, also for nesting that Python cannot follow."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads`` that knows one error: ValueError, also for tables nested deeper than ``DEEPEST``.

    Deep tables can be read and then neither shown nor written: ``repr`` and TOML's writer follow them by recursion.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    >>> parse_toml("a." * 51 + "b = 1")
    Traceback (most recent call last):
    ValueError: it is nested more than 50 deep
    """
    too_deep = f"it is nested more than {DEEPEST} deep"
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level: list[Any] = [table]
    for _ in range(DEEPEST + 1):
        level = [
            inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)
        ]
        if not level:
            return table
    raise ValueError(too_deep)


def _inside(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    if isinstance(outer, dict):
        return outer.values()
    return outer


def seeds_text(seeds: Iterable[int]) -> str:
    """Seeds as ``--seeds`` reads them, in rising order.

    >>> seeds_text([5, 0, 2, 1])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    words = []
    for part in parts:
        word = str(part[0])
        if len(part) > 1:
            word = f"{word}-{part[-1]}"
        words.append(word)
    return ",".join(words)


def as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of JSON or TOML with their lists as tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``as_tuples``."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


CODE = r"[DT]-[A-Z]?\d+"
"""A number of the list of disagreements between papers and code, which only the documentation explains."""


def without_codes(text: str) -> str:
    """A text without codes such as ``D-84`` in brackets; other words in the same brackets stay.

    >>> without_codes("BatchNorm (D-02; table 7 of the paper), means (D-06)")
    'BatchNorm (table 7 of the paper), means'
    """
    inside = re.sub(rf"[,;]\s+{CODE}(?=[,;:)])|(?<=\()(?:{CODE}[,;:]\s+)+", "", text)
    return re.sub(rf"\s?\({CODE}\)", "", inside)


def counted(n: int, what: str = "value") -> str:
    """``1 value``, ``1,000 values``, ``2 classes``."""
    ending = "s"
    if what.endswith("s"):
        ending = "es"
    if n == 1:
        ending = ""
    return f"{n:,} {what}{ending}"


def size(scalars: float | None) -> str:
    """A count with a unit of thousands."""
    if scalars is None:
        return "-"
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if scalars >= 0.9995 * factor:  # what three digits round up to it
            return f"{scalars / factor:.3g} {unit}"
    return f"{scalars:.3g}"
