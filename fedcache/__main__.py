"""The program ``fedcache``, also as ``python -m fedcache``.

SIGTERM is handled before the command line is imported, so a program that is stopped while it starts also exits with
130. Before this module runs, Python itself ends the process with 143.
"""

from __future__ import annotations

import sys

from fedcache.process import INTERRUPTED, sigterm_interrupts


def main() -> None:
    """Run the command line and exit."""
    try:
        with sigterm_interrupts():
            from fedcache.cli import main as run_command_line

            run_command_line()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
