"""How to convert a file that fedcache does not read: lines of Python to paste, and the command that follows."""

from __future__ import annotations

from collections.abc import Sequence

BEGIN = "Convert it with Python:"
"""How a hint with lines of Python begins."""

MARK = "    "
"""What a line of Python in a hint begins with."""


def conversion(lines: Sequence[str], following: str) -> str:
    """A hint: lines that convert a file, and the command that takes what they wrote.

    >>> print(conversion(["import numpy"], "fedcache ingest new.npz --name NAME"))
    Convert it with Python:
        import numpy
    Then:  fedcache ingest new.npz --name NAME
    """
    return "\n".join([BEGIN, *(f"{MARK}{line}" for line in lines), f"Then:  {following}"])
