"""The files of fedcache whose functions a command runs, in the order in which each is first entered.

    python tools/trace_files.py train --method fedavg --rounds 3

What runs while a file is imported does not count: importing a file is not following it (``--imports`` counts it too).
What runs in another process is not seen.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "fedcache")


def importing(frame: FrameType | None) -> bool:
    """Whether a frame runs on behalf of a module that is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def trace(arguments: list[str], imports: bool = False) -> dict[str, str]:
    """File -> the function by which it was first entered, of a command in this process.

    Args:
        arguments: of the command.
        imports: whether functions that run while a file is imported count too.
    """
    entered: dict[str, str] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if (
            event != "call"
            or code.co_filename in entered
            or not code.co_filename.startswith(PACKAGE)
        ):
            return
        if code.co_name != "<module>" and (imports or not importing(frame)):
            entered[code.co_filename] = code.co_name

    from fedcache.cli import main

    sys.setprofile(note)
    try:
        main(arguments)
    except SystemExit as left:
        if left.code:
            raise
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(ROOT)): function for name, function in entered.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    words = [word for word in sys.argv[1:] if word != "--imports"]
    found = trace(words, "--imports" in sys.argv)
    for number, (name, function) in enumerate(found.items(), 1):
        print(f"{number:3} {name}: {function}", file=sys.stderr)
