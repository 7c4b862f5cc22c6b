"""The command line: names, one-line help and panels of all commands; each command's code is in ``commands/``.

The module of a command is imported only when the command is called or its own help is shown. So ``fedcache --help`` is
fast, and no command waits for the imports of another.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from fedcache import __version__
from fedcache.commands import output
from fedcache.errors import Exit
from fedcache.process import replace_closed_streams, sigterm_interrupts

MAIN = "Extract and train"
STORES = "Stores"
HELP = "This installation"
LISTS = "Stored results and lists"


class CommandEntry(NamedTuple):
    """A command, or a group of commands, before its module is imported.

    Attributes:
        name: name as it is typed; the function or ``typer.Typer`` of the command has the same name.
        module: module of this function, below ``fedcache.commands``.
        panel: the heading in ``fedcache --help``.
        summary: the first paragraph of the command's docstring; a test checks that they are equal.
    """

    name: str
    module: str
    panel: str
    summary: str


COMMANDS = (
    CommandEntry(
        "demo",
        "demo",
        MAIN,
        "Extract and partition the offline digits, train one method of each kind; write one table and one report.",
    ),
    CommandEntry(
        "extract",
        "extract",
        MAIN,
        "Run frozen backbones once over a dataset and keep the features.",
    ),
    CommandEntry(
        "join",
        "extract",
        MAIN,
        "Join the parts of an extraction (`extract --part 1/4` and so on) to one store.",
    ),
    CommandEntry("ingest", "exchange", MAIN, "Import your own embeddings into a store."),
    CommandEntry(
        "partition",
        "partition",
        MAIN,
        "Assign the rows of a store to clients and save the assignment.",
    ),
    CommandEntry(
        "shard",
        "partition",
        MAIN,
        "Write one ordinary store per client, so that each store can be moved to another machine.",
    ),
    CommandEntry("train", "train", MAIN, "Train a federated method on cached features."),
    CommandEntry(
        "grid",
        "train",
        MAIN,
        "Train every combination of methods, sweeps and seeds; finished combinations are not trained "
        "again.",
    ),
    CommandEntry(
        "predict",
        "predict",
        MAIN,
        "Classify images, texts, embeddings or rows of a store with a trained model.",
    ),
    CommandEntry(
        "evaluate",
        "evaluate",
        MAIN,
        "Evaluate trained models on labelled data: accuracy, F1, confusion matrix, calibration.",
    ),
    CommandEntry(
        "personalise",
        "predict",
        MAIN,
        "Make the personal model of a new client that took no part in training.",
    ),
    CommandEntry(
        "forget",
        "forget",
        MAIN,
        "Train a run again without one client, and check that subtracting the client's upload gives the same model.",
    ),
    CommandEntry(
        "export-model",
        "predict",
        MAIN,
        "Export a trained model for plain torch, ONNX, torch.export, safetensors or scikit-learn.",
    ),
    CommandEntry(
        "compare",
        "compare",
        MAIN,
        "Compare finished runs: means, intervals, paired tests (Holm), ranks (Friedman, Nemenyi).",
    ),
    CommandEntry(
        "figure",
        "report",
        MAIN,
        "Draw one figure of runs for a paper, with embedded fonts.",
    ),
    CommandEntry(
        "report",
        "report",
        MAIN,
        "Write one self-contained HTML file of runs: tables, curves, clients, costs, grids, confusions, features.",
    ),
    CommandEntry(
        "ui",
        "ui",
        MAIN,
        "Show stores, runs and grids live in the browser; compare and report runs there (needs the pip extra ui).",
    ),
    CommandEntry(
        "reproduce",
        "reproduce",
        MAIN,
        "Reproduce a table or figure of a paper: prints the published value, the measured value and the "
        "difference.",
    ),
    CommandEntry(
        "flower",
        "flower",
        MAIN,
        "Train over real sites with Flower. Each site keeps its data on its own machine (needs the pip extra flower).",
    ),
    CommandEntry(
        "ls",
        "stores",
        STORES,
        "List stores and their contents; --dataset shows one dataset.",
    ),
    CommandEntry(
        "use",
        "stores",
        STORES,
        "Choose the store that commands in this folder use if --dataset and --store are not given.",
    ),
    CommandEntry(
        "inspect",
        "stores",
        STORES,
        "Show the contents of a store: dataset, recipes, how features were computed, unfinished "
        "extractions.",
    ),
    CommandEntry(
        "verify", "stores", STORES, "Read every byte of a store and compare it with the manifest."
    ),
    CommandEntry(
        "repair",
        "stores",
        STORES,
        "Remove damaged files that can be recomputed; the store's extract command then recomputes only these files.",
    ),
    CommandEntry(
        "gc", "stores", STORES, "List files that are no longer used; --delete removes them."
    ),
    CommandEntry(
        "export",
        "exchange",
        STORES,
        "Write the features, labels, domains, splits and groups of readable rows, and text features, to one file.",
    ),
    CommandEntry(
        "publish",
        "exchange",
        STORES,
        "Publish a store as a few large files that fedcache, zarr and xarray can read over a network.",
    ),
    CommandEntry(
        "doctor",
        "doctor",
        HELP,
        "Check this installation: versions, cores and memory, GPU, folders, offline setting, extras.",
    ),
    CommandEntry(
        "config",
        "doctor",
        HELP,
        "Print every setting in the form of fedcache.toml, with the values that are in effect.",
    ),
    CommandEntry(
        "runs", "runs", LISTS, "Stored results: list, show, compare settings, tag, remove."
    ),
    CommandEntry("methods", "methods", LISTS, "Federated methods and their hyperparameters."),
    CommandEntry("backbones", "backbones", LISTS, "Frozen backbones and their weights."),
    CommandEntry("datasets", "datasets", LISTS, "Datasets and where they come from."),
    CommandEntry("new", "new", LISTS, "Start a package for your own method, backbone or dataset."),
)


class UnloadedCommand(TyperCommand):
    """A command whose module is not imported yet: its name, help and panel for ``fedcache --help`` and completion."""

    def __init__(self, entry: CommandEntry) -> None:
        super().__init__(entry.name, help=entry.summary, rich_help_panel=entry.panel)
        self.entry = entry

    def load(self) -> Any:
        """Import the module of the command, and return the command itself or its group."""
        attribute = self.entry.name.replace("-", "_")
        module = import_module(f"fedcache.commands.{self.entry.module}")
        loaded = getattr(module, attribute)
        if isinstance(loaded, typer.Typer):
            return typer.main.get_group(loaded)
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(self.entry.name)(loaded)
        return typer.main.get_command(single)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """A context of the loaded command, which the parser uses from here on."""
        return self.load().make_context(info_name, args, parent, **extra)


class Program(TyperGroup):
    """``fedcache``: the commands of ``COMMANDS``."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for entry in COMMANDS:
            self.add_command(UnloadedCommand(entry))

    def load_all(self) -> dict[str, Any]:
        """Every command with its parameters, by name, in the order of the help; for documentation and tests."""
        return {name: command.load() for name, command in self.commands.items()}  # type: ignore[attr-defined]


app = typer.Typer(
    name="fedcache",
    cls=Program,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Run every frozen backbone once, then federate on the cached features in seconds.",
    epilog="Start with:  fedcache demo    Results and stores are kept in $FEDCACHE_HOME.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


def refused(error: Any, arguments: list[str]) -> Exit:
    """Print the error of a command line that the parser refuses, and return the exit code.

    Without a command, the error has no message, because the help is already printed.
    """
    if not error.format_message():
        return Exit.OK
    guesses = import_module("fedcache.commands.guesses")
    name = next((a for a in arguments if not a.startswith("-")), "fedcache")
    output.fail(name, "--json" in arguments, guesses.answer(error, arguments))
    return Exit.USAGE


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit.

    Usage errors of the parser exit with 2 like all others. With ``--json`` among the arguments they also print the
    JSON output, so that scripts do not have to read prose.
    """
    replace_closed_streams()
    arguments = argv
    if arguments is None:
        arguments = sys.argv[1:]
    code: Any
    try:
        with sigterm_interrupts():
            code = app(args=arguments, standalone_mode=False, prog_name="fedcache")
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except OSError as error:  # from printing help or the version; commands handle their own errors
        code = output.unwritable(error)
    except SystemExit as exited:
        # click and rich exit with 1 if the reader of the help closes the pipe; fedcache itself never exits with 1.
        code = exited.code
        if code == 1:
            code = output.unwritable(BrokenPipeError())
    except Exception as error:  # errors of the parser; errors of commands never get here
        if not hasattr(error, "format_message"):
            raise
        code = refused(error, arguments)
    sys.exit(int(code or 0))
