"""Tables that a person typed: a row on each line, its cells between bars."""


def rows_of(table):
    """The cells of each row, without the space around them."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
