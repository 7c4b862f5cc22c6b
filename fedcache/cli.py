"""The command line: one typer app, each command in ``commands/``. Importing it imports no torch."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from fedcache import __version__
from fedcache.commands import (
    backbones_datasets,
    compare,
    demo,
    doctor,
    extract,
    flower,
    gc,
    methods,
    output,
    partition,
    report,
    reproduce,
    stores,
    train,
)
from fedcache.errors import Exit, FedcacheError

app = typer.Typer(
    name="fedcache",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
    help="Run every frozen backbone once, then federate on the cached features in seconds.",
    epilog="Start with:  fedcache demo    Results and stores live under $FEDCACHE_HOME.",
)

MAIN, STORES, LISTS, HELP = "Extract and train", "Stores", "What there is", "This installation"
for panel, commands in (
    (MAIN, (demo.demo, extract.extract, stores.ingest, partition.partition, partition.shard, train.train, train.grid)),
    (MAIN, (compare.compare, report.report, reproduce.reproduce)),
    (STORES, (stores.ls, stores.inspect, stores.verify, stores.repair, gc.gc, stores.export)),
    (HELP, (doctor.doctor, doctor.config)),
):
    for command in commands:
        app.command(rich_help_panel=panel)(command)
for group in (methods.methods, backbones_datasets.backbones, backbones_datasets.datasets):
    app.add_typer(group, rich_help_panel=LISTS)
app.add_typer(flower.flower, rich_help_panel=MAIN)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit.

    Usage errors of the parser leave with exit 2 like all others, and with the envelope when ``--json`` was among the
    arguments, so that a script never has to read prose.
    """
    arguments = sys.argv[1:] if argv is None else argv
    code: Any
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="fedcache")
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except OSError as error:  # of help and --version; commands see to their own
        code = output.unwritable(error)
    except SystemExit as left:
        # click and rich leave with 1 when the reader of help has enough; nothing of fedcache leaves with 1.
        code = output.unwritable(BrokenPipeError()) if left.code == 1 else left.code
    except Exception as error:  # the parser's errors; those of commands never get here
        if not hasattr(error, "format_message"):
            raise
        name = next((a for a in arguments if not a.startswith("-")), "fedcache")
        context = getattr(error, "ctx", None)
        hint = f"See `{context.command_path} --help`." if context is not None else "See `fedcache --help`."
        message = error.format_message() or "No command was given."
        output.fail(name, "--json" in arguments, FedcacheError(Exit.USAGE, message, hint))
        code = Exit.USAGE
    sys.exit(int(code or 0))
