"""Lines of Python that a message gives to convert a file, run as a user would run them."""

import re
from pathlib import Path

from command import python

from fedcache.tables.foreign_files import BEGIN, MARK


def run_conversion(error):
    """Run the lines of a hint in a process of their own, and return the file that the command after them takes."""
    lines = error.hint.splitlines()
    assert lines[0] == BEGIN, error.hint
    script = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    python("\n".join(script))
    found = re.search(r"(?:give |ingest |arrays:|texts:|folder:)'?([^ ']+)", lines[-1])
    assert found is not None, lines[-1]
    return Path(found[1])
