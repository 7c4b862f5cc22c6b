"""Text from elsewhere (names of files, classes, domains, runs), made safe to show on a terminal, in a page or a sheet.

A name may hold characters that are commands and not letters: to clear a terminal, to set its title, to turn the order
of what follows. Where text leaves fedcache for a person they are shown by number; data (``--json``, stores) keep them.
"""

from __future__ import annotations

import re

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
