"""Reading and writing of small texts: JSON, TOML, lists and names of any origin, and text that is safe to show.

Input that cannot be read raises ValueError or UsageError with a sentence.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedcache.errors import UsageError

Facts = dict[str, Any]
"""Facts by name, as a JSON object holds them: about a run, a round, a grid or a configuration."""
Record = Mapping[str, Any]
"""Facts by name that are only read."""

# Text from elsewhere (names of files, classes, domains, runs), made safe to show on a terminal, in
# a page or a sheet.
#
# A name may contain control characters, which clear a terminal, set its title or reverse the order
# of the text after them. Text for a person shows their numbers instead; data (``--json``, stores)
# keep them.

# C0 without newline and tab, DEL, C1, Arabic letter mark, the marks, embeddings, overrides and isolates of
# bidirectional text, the separators of lines and paragraphs, and surrogates, which no encoding can write.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_HIDDEN = re.compile(f"[{_CONTROLS}]")
_HIDDEN_IN_LINE = re.compile(f"[\t\n{_CONTROLS}]")
# Characters with which a spreadsheet begins a formula.
_FORMULA = tuple("=+-@\t\r＝＋－＠")


def visible(text: str, *, lines: bool = False) -> str:
    r"""The text, with every control character replaced by its number. With ``lines``, line breaks and tabs are kept.

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
    return hidden.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}"


def escape_json(text: str) -> str:
    r"""JSON that means the same, with every control character written as ``\uNNNN``.

    >>> escape_json('"cat\u202e"')
    '"cat\\u202e"'
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def finite(value: Any) -> Any:
    """The value with None for infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(finite, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sheet_cell(value: object) -> object:
    r"""A cell of a CSV file that a spreadsheet does not run as a formula. Numbers are unchanged.

    >>> sheet_cell("=1+1"), sheet_cell("-0.5"), sheet_cell(-0.5), sheet_cell("-")
    ("'=1+1", '-0.5', -0.5, '-')
    """
    if not isinstance(value, str):
        return value
    shown = visible(value)
    if not value.lstrip(" ").startswith(_FORMULA):
        return shown
    if value == "-" or _is_number(value):
        return shown
    return f"'{shown}"


def whole_number(text: str) -> int | None:
    """The number that a text of at most 18 decimal digits writes; None for any other text.

    >>> whole_number("30"), whole_number("-1"), whole_number("²")
    (30, None, None)
    """
    if text.isdecimal() and len(text) <= 18:
        return int(text)
    return None


def host_and_port(text: str) -> tuple[str, int] | None:
    """The two parts of ``HOST:PORT``; None for any other text.

    >>> host_and_port("[::1]:8000"), host_and_port("host:0")
    (('::1', 8000), None)
    """
    host, _, port = text.rpartition(":")
    number = whole_number(port) or 0
    if not host or "/" in host or not 0 < number < 1 << 16:
        return None
    return host.strip("[]"), number


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


DEEPEST = 50
"""Maximum depth of tables and arrays in a TOML text; no file of fedcache is deeper than 4."""


SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names that a file or folder of a store may have."""


def slug_of(name: str) -> str:
    """A name as the name of a folder: every character except letters, digits, ``.``, ``_`` and ``-`` becomes ``_``."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def listed(text: str) -> list[str]:
    """The words of a comma-separated list; a word that contains a comma is written in quotes.

    >>> listed('a, "b,c"')
    ['a', 'b,c']

    Raises UsageError for a line break outside of quotes.
    """
    try:
        words = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:
        raise UsageError(
            f"{text!r} is not a comma-separated list of words, because it has a line break.",
            "Put a word that contains a line break into quotes.",
        ) from None
    return [word.strip() for word in words if word.strip()]


def in_a_list(words: Iterable[str]) -> str:
    """The inverse of ``listed``: words as a comma-separated list.

    >>> in_a_list(["a", "b,c"])
    'a,"b,c"'
    """
    written = io.StringIO()
    csv.writer(written).writerow(words)
    return written.getvalue().removesuffix("\r\n")


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` that raises only ValueError, also for JSON that is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads`` that raises only ValueError, also for tables nested deeper than ``DEEPEST``.

    Deeper tables could be read but neither shown nor written, because ``repr`` and the writer of TOML are recursive.

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
    # The containers of one level of nesting.
    level: list[Any] = [table]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for outer in level:
            values = outer
            if isinstance(outer, dict):
                values = outer.values()
            below += [inner for inner in values if isinstance(inner, dict | list)]
        level = below
        if not level:
            return table
    raise ValueError(too_deep)


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
    """Values of JSON or TOML, with lists replaced by tuples."""
    made = dict(values)
    for key, value in values.items():
        if isinstance(value, list):
            made[key] = tuple(value)
    return made


def as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``as_tuples``."""
    made = dict(values)
    for key, value in values.items():
        if isinstance(value, tuple):
            made[key] = list(value)
    return made


CODE = r"[DT]-[A-Z]?\d+"
"""Code of a difference between a paper and its released code. Only the documentation explains such codes."""


def without_codes(text: str) -> str:
    """A text without codes such as ``D-84`` in brackets; other words in these brackets stay.

    >>> without_codes("BatchNorm (D-02; table 7 of the paper), means (D-06)")
    'BatchNorm (table 7 of the paper), means'
    """
    # First, codes next to other words in brackets are removed: after a comma or semicolon, or at the beginning. Then
    # codes alone in brackets are removed.
    inside = re.sub(rf"[,;]\s+{CODE}(?=[,;:)])|(?<=\()(?:{CODE}[,;:]\s+)+", "", text)
    return re.sub(rf"\s?\({CODE}\)", "", inside)


def counted(n: int, what: str = "value") -> str:
    """A number with its noun: ``1 value``, ``1,000 values``, ``2 classes``."""
    ending = "s"
    if what.endswith("s"):
        ending = "es"
    if n == 1:
        ending = ""
    return f"{n:,} {what}{ending}"


def size(scalars: float | None) -> str:
    """A count with three digits and the unit k, M or G; a dash for None."""
    if scalars is None:
        return "-"
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # A count from 0.9995 units on is rounded to 1 unit, because three digits are shown.
        if scalars >= 0.9995 * factor:
            return f"{scalars / factor:.3g} {unit}"
    return f"{scalars:.3g}"
