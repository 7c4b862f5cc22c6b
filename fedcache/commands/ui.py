"""``fedcache ui``: shows stores, runs and grids in the browser."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import command
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.config import Home
from fedcache.errors import MachineError, UsageError


@command("ui")
def ui(
    observer: TerminalObserver,
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port on the loopback address of this machine; 0 takes a free port.",
        ),
    ] = 0,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address without opening a browser.")
    ] = False,
    home: Annotated[
        Path | None,
        typer.Option(help="Fedcache home to show.", show_default="$FEDCACHE_HOME"),
    ] = None,
) -> CommandResult:
    """Show stores, runs and grids live in the browser; compare and report runs there (needs the pip extra ui).

    The page is read-only and only for this machine: its address has a token, and nothing is loaded from a network. If
    fedcache runs on a remote machine, print the address there with --no-open and forward its port to yours:
    ssh -L PORT:127.0.0.1:PORT machine

    Example: fedcache ui
    """
    missing = [name for name in ("matplotlib", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        packages = ", ".join(missing)
        raise MachineError(
            f"`fedcache ui` needs Python packages that are not installed: {packages}.",
            "pip install 'fedcache[ui]'",
        )
    if home is None:
        shown = Home.from_environment()
    else:
        shown = Home(home.expanduser(), offline=True)
        if not shown.root.is_dir():
            raise UsageError(
                f"There is no directory {shown.root}.",
                "Give the directory of a fedcache home:  --home DIRECTORY",
            )
    # Imported only now, because the module imports the packages that were checked above.
    serve = import_module("fedcache.ui.server").serve

    def announce(address: str) -> None:
        observer.note(f"Showing {shown.root}. Press Ctrl-C to stop.")
        observer.close()  # the server prints nothing from here on; a line would say that the command is working
        # With --json, stdout is for the answer at the end.
        stream = sys.stdout
        if observer.as_json:
            stream = sys.stderr
        print(address, file=stream, flush=True)

    address = serve(shown, port, show=not no_open, say=announce)
    return CommandResult({"address": address, "home": str(shown.root)}, ["Ended."])
