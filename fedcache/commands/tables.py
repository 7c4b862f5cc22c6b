"""Tables of plain text that fit: columns where words fit into them, else one block of lines per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

NARROW = 80
"""Columns below which a table whose words do not fit is written as blocks; above, long words (paths) are folded."""


@dataclass(frozen=True)
class Fitted:
    """A table as wide as the terminal allows; no cell is ever cut.

    Args:
        title: above it, or "".
        columns: their names.
        rows: their cells; None is empty.
        right: names of the columns that are aligned to the right.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    right: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement
        from rich.text import Text

        made = self.table()
        needs = Measurement.get(console, options.update(max_width=10_000), made).minimum
        if options.max_width >= NARROW or needs <= options.max_width:
            yield made
            return
        for row in self.rows:
            for name, cell in zip(self.columns, row, strict=True):
                if cell is not None and str(cell) != "":
                    yield Text(f"{name}: {cell}", overflow="fold")
            yield Text("")

    def table(self) -> Table:
        """The table with its columns; a word longer than its column goes on in the next line."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        made = Table(title=self.title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for column in self.columns:
            made.add_column(column, justify="right" if column in self.right else "left", overflow="fold")
        for row in self.rows:
            made.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
        return made
