"""``fedcache forget``: trains a run again without one client."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcache.commands.options import RunsDirectory, command, runs_directory
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.commands.runs import RunName
from fedcache.config import Home
from fedcache.errors import shell_word
from fedcache.parsing import counted
from fedcache.process import stopped_by_signals
from fedcache.progress import percent
from fedcache.report.find_runs import find_one
from fedcache.runs.forget import forget_client


@command("forget")
def forget(
    observer: TerminalObserver,
    run: RunName,
    client: Annotated[str, typer.Option(help="Name of the client to forget.")],
    root: RunsDirectory = None,
) -> CommandResult:
    """Train a run again without one client, and check that subtracting the client's upload gives the same model.

    This is exact for methods whose server only adds up one upload of each client. The new run is an ordinary run. The
    client's test rows and features stay in the store.

    Example: fedcache forget 3f9c --client client-03
    """
    place = find_one(run, runs_directory(root), observer)
    home = Home.from_environment()
    with stopped_by_signals(observer.note) as stop:
        done = forget_client(place, client, home, observer, stop)
    accuracy = percent(done.run.accuracy["mean"])
    new = done.run.path
    left = counted(done.run.result["partition"]["clients"], "client")
    lines = [
        f"{done.client} and its {done.rows:,} training rows are forgotten; {left} left, accuracy {accuracy} %",
        "Check: subtracting the client's upload gives the same model. The largest difference is "
        f"{done.difference:.1g} of the largest weight",
        f"Stored in {new}",
        f"Next:  fedcache runs diff {shell_word(place)} {shell_word(new)}",
    ]
    return CommandResult(done.to_dict(), lines)
