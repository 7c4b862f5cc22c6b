"""Display in notebooks: small HTML tables of plain text, and columns as pandas frames if pandas is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fedcache.errors import MachineError
from fedcache.parsing import visible

MOST_ROWS = 30
"""Maximum number of rows that a table shows in a notebook."""


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table of plain text. Rows after the first ``MOST_ROWS`` are counted, not shown."""
    all_rows = list(rows)
    head = "".join(f"<th>{_cell(c)}</th>" for c in columns)
    lines = []
    for row in all_rows[:MOST_ROWS]:
        cells = "".join(f"<td>{_cell(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    more = len(all_rows) - MOST_ROWS
    if more > 0:
        lines.append(f'<tr><td colspan="{len(columns)}">and {more:,} more</td></tr>')
    # ``html_facts`` passes empty column names, for a table without a header.
    top = ""
    if any(columns):
        top = f"<thead><tr>{head}</tr></thead>"
    body = "".join(lines)
    return f"<table><caption>{_cell(title)}</caption>{top}<tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    """A value as text of HTML; None is empty."""
    if value is None:
        return ""
    return escape(visible(str(value)))


def html_facts(title: str, facts: Mapping[str, Any]) -> str:
    """A table of names and values; values that are None are left out."""
    known = [(name, value) for name, value in facts.items() if value is not None]
    return html_table(title, ("", ""), known)


def data_frame(columns: Mapping[str, Any]) -> Any:
    """Columns of equal length as a ``pandas.DataFrame``.

    Raises:
        MachineError if pandas is not installed; nothing else in fedcache needs it.
    """
    try:
        import pandas
    except ImportError as error:
        raise MachineError(
            "frame() makes a pandas DataFrame, but pandas is not installed.", "pip install pandas"
        ) from error
    return pandas.DataFrame(dict(columns))


def percent(value: float | None) -> str | None:
    """A fraction as per cent with two decimals and a per cent sign; None for None."""
    if value is None:
        return None
    return f"{100 * value:.2f} %"
