"""Options of the command line: options made from fields of a configuration, and options of several commands."""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fedcache.commands.help import COMMON, names_of, show
from fedcache.commands.output import CommandResult, TerminalObserver, run_command
from fedcache.config import (
    ADDRESSES,
    CLIENTS,
    COMPUTING,
    RESULTS,
    ExtractConfig,
    Home,
    OptionInfo,
    PartitionConfig,
    TrainConfig,
    option,
    option_name,
    refuse_remote,
    resolve,
)
from fedcache.errors import FedcacheError, UsageError, all_at_once, shell_word, unknown
from fedcache.federate.engines.ray import cluster
from fedcache.federate.methods import METHODS, NAMES, unknown_method
from fedcache.parsing import Facts, Record, listed
from fedcache.plugins import note_named, plugins

if TYPE_CHECKING:
    from fedcache.federate.engines.ray.engine import RayEngine

# Shell completion of option values: names of methods, backbones, datasets, stores and runs.
#
# Each source is imported when its own values are requested, and none imports torch, because the
# user waits while typing. A source that cannot be read proposes nothing.

Names = Callable[[str], list[str]]


def _completer(names: Callable[[Home], Iterable[str]], *, several: bool = False) -> Names:
    """A completer of one name; with ``several``, of the last name of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        # The last of several names is completed, and the names before it are not proposed again.
        before = comma = ""
        last = incomplete
        if several:
            before, comma, last = incomplete.rpartition(",")
        given = set(before.split(","))
        try:
            found = [name for name in names(Home.from_environment()) if name not in given]
        # The shell waits for an answer: no proposals are better than an error.
        except (FedcacheError, OSError):
            return []
        return [f"{before}{comma}{name}" for name in found if name.startswith(last)]

    return complete


def _backbones(_home: Home) -> list[str]:
    table = import_module("fedcache.extract.backbones.table")
    return [*table.BACKBONES, *plugins("backbones")]


def _datasets(home: Home) -> list[str]:
    listing = import_module("fedcache.extract.datasets.listing")
    catalog = import_module("fedcache.store.catalog")
    names = [entry["name"] for entry in listing.known(data=home.data)]
    return [*names, *catalog.ingested_stores(home)]


def _partitions(home: Home) -> list[str]:
    catalog = import_module("fedcache.store.catalog")
    names = set()
    for store in catalog.finished_stores(home):
        names.update(store.partitions)
    return sorted(names)


def _runs(home: Home) -> list[str]:
    runs = import_module("fedcache.report.find_runs")
    names: list[str] = runs.names_in(home.runs)
    return names


def _tags(home: Home) -> list[str]:
    return [name.removeprefix("tag:") for name in _runs(home) if name.startswith("tag:")]


complete_methods = _completer(lambda _home: [*NAMES, *plugins("methods")], several=True)
complete_backbones = _completer(_backbones, several=True)
complete_datasets = _completer(_datasets)
complete_runs = _completer(_runs)
complete_tags = _completer(_tags)

OF_FIELDS: dict[str, Names] = {
    "method": complete_methods,
    "backbones": complete_backbones,
    "dataset": complete_datasets,
    "scheme": _completer(
        lambda _home: import_module("fedcache.federate.partition.partition").SCHEMES
    ),
    "store": _completer(lambda home: sorted(path.name for path in home.stores.glob("*.zarr"))),
    "partition": _completer(_partitions),
}
"""Field of a configuration -> the completer of its option."""


def complete_words(words: Iterable[str]) -> Names:
    """A completer of a fixed list of words, also for the last word of a comma-separated list."""
    return _completer(lambda _home: words, several=True)


C = TypeVar("C")

BACKBONE_OPTIONS = frozenset({"backbone", "backbones", "client_backbones", "weights"})
"""Parameters of commands whose values are backbones. Only these can refer to the user's own code."""

POINTS = "Points"
"""The help panel of the options of ``grid`` that choose its configurations."""

Given = Record
"""Name of a field -> the value of its option; None, [] or False if it was not given."""


@dataclass(frozen=True)
class SchemeArguments:
    """Arguments of partition schemes that have an option of their own; ``PartitionConfig.options`` holds them."""

    alpha: float | None = option(
        None,
        "Concentration of the Dirichlet draws; smaller values give more skewed clients.",
        CLIENTS,
        default_text="0.1 for dirichlet and lda, 0.5 for few-shot, else 1",
        common=True,
    )
    shards: int | None = option(
        None, "Label shards per client, for the scheme shards.", CLIENTS, default_text="2"
    )
    shots: int | None = option(
        None,
        "Rows per class, for the schemes few-shot, feature-shift, label-shift and feature-label-shift.",
        CLIENTS,
        default_text="4 for few-shot, else 10",
    )
    by: str | None = option(
        None,
        "Make one client for each value of this column: a group column, domain or class. If "
        "--scheme is also given, the scheme divides the rows of each value among several clients.",
        CLIENTS,
        default_text="none; --scheme makes the clients",
        common=True,
    )
    hold_out: str | None = option(
        None,
        "With --by: values of the column, comma-separated. All rows with these values are the "
        "test set.",
        CLIENTS,
        default_text="none",
    )
    min_rows: int | None = option(
        None,
        "With --by: leave out clients with fewer rows than this, training rows and the client's own test rows "
        "together.",
        CLIENTS,
        default_text="1",
    )
    max_clients: int | None = option(
        None,
        "With --by: draw at most this many clients at random.",
        CLIENTS,
        default_text="all clients",
    )
    tests: str | None = option(
        None,
        "With --by, the source of the test rows: `within` (some rows of every client), `held-out-clients` (all rows "
        "of some clients) or `global` (one test set for all clients). For feature-shift, label-shift and "
        "feature-label-shift: number of test rows per class.",
        CLIENTS,
        default_text="within with --by; 200 for feature-shift, 100 for label-shift and feature-label-shift",
    )
    validation: str | None = option(
        None,
        "Validation rows to select on: a share (0.2) of every client's training rows, or `split` for the "
        "dataset's own validation split. They are used neither for training nor for testing.",
        CLIENTS,
        default_text="none",
        common=True,
    )


@dataclass(frozen=True)
class RunOptions:
    """Options of ``train`` and ``grid`` outside of the configuration: the directory of results, and what to compute."""

    repartition: bool = option(False, "Draw a new partition for every seed.", CLIENTS)
    runs: str | None = option(
        None,
        "Directory of results.",
        RESULTS,
        path=True,
        default_text="$FEDCACHE_HOME/runs",
    )
    track: tuple[str, ...] = option(
        (),
        "Also log every round, all parameters and the final metrics to tensorboard, mlflow, wandb or trackio. Each "
        "needs the extra of the same name, and shows every seed as a separate run. To choose where it stores them, "
        "append :DIR, or :URL for mlflow. Repeatable.",
        RESULTS,
        default_text="nowhere",
        whole=True,
    )
    no_model: bool = option(
        False,
        "Do not save the trained model. `fedcache predict` will not be available for this run.",
        RESULTS,
    )
    save_clients: str | None = option(
        None,
        "Clients whose personal models are saved: `all`, `none`, or names, comma-separated.",
        RESULTS,
        default_text="all, up to 256 MB per seed",
    )
    no_extract: bool = option(False, "Fail instead of extracting missing features.", RESULTS)
    dry_run: bool = option(
        False, "Do not train; show the execution mode and the estimated peak memory.", RESULTS
    )
    fresh: bool = option(False, "Train again even if the result exists.", RESULTS)
    verbose: bool = option(
        False, "Also print every choice that fedcache made and all metrics.", RESULTS, short="-v"
    )


def _short_help(context: typer.Context, value: bool) -> None:
    if value and not context.resilient_parsing:
        show(context, everything=False)


def _full_help(context: typer.Context, value: bool) -> None:
    if value and not context.resilient_parsing:
        show(context, everything=True)


Help = Annotated[
    bool,
    typer.Option(
        "--help",
        "-h",
        help="Show the options that are used most.",
        callback=_short_help,
        is_eager=True,
        expose_value=False,
        hidden=True,
    ),
]
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        help="Show every option.",
        callback=_full_help,
        is_eager=True,
        expose_value=False,
        hidden=True,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="Configuration file.", show_default="./fedcache.toml, if it exists"
    ),
]


def help_of(kind: type, name: str) -> str:
    """The help of a field's option, for commands that declare the same option themselves."""
    (item,) = pick(kind, name)
    meaning: str = item.metadata["option"].meaning
    return meaning


def pick(kind: type, *names: str) -> list[Field[Any]]:
    """The named fields of a configuration, as options for a command; all fields if no names are given."""
    return [item for item in fields(kind) if not names or item.name in names]


def bare(items: Sequence[Field[Any]]) -> list[Field[Any]]:
    """Copies of fields without a help panel and without a text for the default."""
    return worded(items, None, panel="", default="")


def rare(items: Sequence[Field[Any]]) -> list[Field[Any]]:
    """Copies of fields as options that only ``--help-all`` shows."""
    return worded(items, None, common=False)


def worded(items: Sequence[Field[Any]], name: str | None, **words: Any) -> list[Field[Any]]:
    """Copies of fields for commands in which the option needs another help text.

    Args:
        items: fields of a configuration.
        name: name of the only field to change; None to change all fields.
        words: new values of ``meaning``, ``default``, ``panel`` or ``common`` in the ``OptionInfo`` of the fields.
    """
    made = []
    for item in items:
        if name in (None, item.name):
            item = copy(item)
            item.metadata = MappingProxyType({"option": replace(item.metadata["option"], **words)})
        made.append(item)
    return made


Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        help=help_of(TrainConfig, "dataset"),
        autocompletion=complete_datasets,
    ),
    COMMON,
]
RunQuery = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN",
        help="Runs: directories, names in `fedcache runs list` or their first letters, tag:NAME, method:NAME, "
        "dataset:NAME or partition:NAME. Default: all runs.",
        autocompletion=complete_runs,
    ),
]
RunsDirectory = Annotated[
    Path | None,
    typer.Option("--runs", help="Directory of results, instead of $FEDCACHE_HOME/runs."),
]
ListedName = Annotated[str, typer.Argument(help="A name from the list.")]
REMOTE = "may be the address of a published store"
"""Mark in the annotation of a parameter that may be the address of a published store."""

StoreDir = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="Store directory, or a name of `fedcache ls`.",
        autocompletion=OF_FIELDS["store"],
    ),
]
StorePlace = Annotated[
    str | None,
    typer.Option("--store", help=help_of(TrainConfig, "store"), autocompletion=OF_FIELDS["store"]),
    REMOTE,
]
Backbones = Annotated[
    list[str] | None,
    typer.Option(
        "--backbones",
        "-b",
        help=help_of(ExtractConfig, "backbones"),
        autocompletion=complete_backbones,
    ),
]
Weights = Annotated[
    list[str] | None, typer.Option("--weights", help=help_of(ExtractConfig, "weights"))
]
Data = Annotated[list[str] | None, typer.Option("--data", help=help_of(ExtractConfig, "data"))]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        help="`local`, or `ray` for processes on one or several machines (needs the pip extra ray). Both give "
        "byte-identical results.",
        rich_help_panel=COMPUTING,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="Address of a Ray cluster, HOST:PORT. Run the command on a node of the cluster. "
        "Every path must exist on all nodes.",
        show_default="a local cluster",
        rich_help_panel=COMPUTING,
    ),
]


def command(
    name: str | Callable[..., str],
    *groups: Sequence[Field[Any]],
    within: typer.Typer | None = None,
) -> Callable[[Callable[..., CommandResult]], Callable[..., None]]:
    """Turn a function that returns a ``CommandResult`` into a command.

    The command has the parameters of the function, ``--json``, and an option for every field of the groups. The
    function may also have the parameters ``observer`` (receives notes and progress), ``given`` (the values of the
    fields by name) and ``as_json``.

    Args:
        name: name of the command in the JSON output, or a function that returns it for the values of the parameters.
        groups: fields of configurations.
        within: the group of commands to which the command is added, under the last word of its name.
    """
    items = list(itertools.chain.from_iterable(groups))
    generated = [parameter(item) for item in items]
    json = _switch("json", Json)
    helps = [_switch("help", Help), _switch("help_all", HelpAll)]

    def decorate(function: Callable[..., CommandResult]) -> Callable[..., None]:
        hints = typing.get_type_hints(function, include_extras=True)
        accepted = inspect.signature(function).parameters
        # The parameters that are options or arguments; the wrapper below passes observer, given and as_json.
        declared = [
            p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY)
            for p in accepted.values()
            if p.name not in ("observer", "given", "as_json")
        ]
        spelled = {p.name: _spelled(p) for p in (*declared, *generated)}
        remote = {p.name for p in declared if REMOTE in p.annotation.__metadata__}
        remote |= {item.name for item in items if item.metadata["option"].remote}

        def wrapper(**values: Any) -> None:
            given = {p.name: values.pop(p.name) for p in generated}
            as_json = values.pop("json")
            for shown in helps:
                values.pop(shown.name, None)
            every_value = {**values, **given}
            note_named([every_value[key] for key in every_value if key in BACKBONE_OPTIONS])

            def call(observer: TerminalObserver) -> CommandResult:
                for key, value in every_value.items():
                    if key not in ADDRESSES:
                        refuse_remote(value, spelled[key], remote=key in remote)
                available = {**values, "given": given, "observer": observer, "as_json": as_json}
                return function(
                    **{key: value for key, value in available.items() if key in accepted}
                )

            called_as = name
            if not isinstance(called_as, str):
                called_as = called_as(**values)
            run_command(called_as, as_json, call)

        # typer reads the name, the help text and the options from these attributes.
        wrapper.__name__ = function.__name__
        wrapper.__doc__ = function.__doc__
        wrapper.__module__ = __name__
        # Options on computing come last in the help. Some are declared by the function itself.
        computing = [
            p for p in declared if p.annotation.__metadata__[0].rich_help_panel == COMPUTING
        ]
        others = [p for p in declared if p not in computing]
        all_parameters = [*others, *generated, *computing, json, *helps]
        wrapper.__signature__ = inspect.Signature(all_parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in all_parameters}
        if within is not None:
            within.command(str(name).split()[-1])(wrapper)
        return wrapper

    return decorate


def _switch(name: str, annotation: Any) -> inspect.Parameter:
    """A flag that every command has."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation
    )


def _spelled(declared: inspect.Parameter) -> str:
    """A parameter as a user types it: ``--store``, or ``PATH`` for an argument."""
    for name in names_of(declared):
        if name.startswith("--"):
            return name
    return str(declared.annotation.__metadata__[0].metavar or declared.name.upper())


LONGEST_WORDS = 16
"""Maximum length, in characters, of a list of words (``a|b``) that the help shows in place of an option's type."""


def parameter(item: Field[Any]) -> inspect.Parameter:
    """A field as a parameter of a command, as typer reads it."""
    info: OptionInfo = item.metadata["option"]
    shown: str | bool | None = info.default
    if isinstance(item.default, str | int | float):
        shown = str(item.default)
    is_flag = item.default is False
    if is_flag or not shown:
        shown = False
    # A list of words that does not fit the narrow column of a small terminal is moved to the text, which wraps.
    words = "|".join(info.choices)
    meaning = info.meaning
    if len(words) > LONGEST_WORDS:
        words = "<word>"
        # A meaning that explains each word needs no list of them.
        if not all(choice in meaning for choice in info.choices):
            choices = " | ".join(info.choices)
            sentence = meaning[:1].lower() + meaning[1:]
            meaning = f"{choices}: {sentence}"
    completion = OF_FIELDS.get(item.name)
    if info.choices:
        completion = complete_words(info.choices)
    if str(item.type).startswith("Mapping"):
        words = "KEY=VALUE"
    names = [option_name(item)]
    if info.short:
        names.append(info.short)
    made = typer.Option(
        *names,
        help=meaning,
        metavar=words or None,
        min=info.minimum,
        show_default=shown,
        rich_help_panel=info.panel or None,
        autocompletion=completion,
    )
    kind = value_type(item)
    marks = [made]
    if info.common:
        marks.append(COMMON)
    annotation: Any = Annotated[(kind, *marks)]
    default = None
    if is_flag:
        default = False
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


VALUE_TYPES: Record = {"int": int | None, "float": float | None, "str": str | None}


def value_type(item: Field[Any]) -> Any:
    """The type that typer reads for a field: a list of texts for a tuple or a mapping."""
    declared = str(item.type).removesuffix(" | None")
    info: OptionInfo = item.metadata["option"]
    if info.path and not info.remote:
        return Path | None
    if declared == "bool":
        return bool
    return VALUE_TYPES.get(declared, list[str] | None)


def flags_of(kind: type, given: Record) -> Facts:
    """The options of a configuration that the user gave.

    A repeatable option is returned as a dict of ``key=value`` pairs or as a tuple of values.

    Raises:
        UsageError for an empty list, and for a value without ``=`` where a ``key=value`` pair is expected.
    """
    flags = {}
    for item in fields(kind):
        value = given.get(item.name)
        # None, and a flag that is off, were not given: the file or the default decides.
        if value is None or value is False:
            continue
        info: OptionInfo = item.metadata["option"]
        # typer gives options that may be repeated as lists of words.
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            if str(item.type).startswith("Mapping"):
                value = pairs(value, option_name(item), split=info.split)
            elif not info.whole:
                value = split_list(value, option_name(item))
        flags[item.name] = value
    return flags


def split_list(values: Sequence[str] | None, name: str = "--backbones") -> tuple[str, ...]:
    """Repeated and comma-separated values as one tuple.

    Args:
        values: as given; None or an empty sequence if the option was left out.
        name: name of the option, for the message.

    Raises:
        UsageError for an option with an empty list, such as ``,``.
    """
    found = []
    for value in values or ():
        found += listed(value)
    if values and not found:
        words = ",".join(values)
        raise UsageError(
            f"{name} {words!r} is an empty list.", f"{name} NAME,NAME, or leave {name} out"
        )
    return tuple(found)


def sweep_lists(sweep: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Each key of ``--sweep`` options and its comma-separated values. Raises the errors of ``pairs``."""
    return {key: tuple(listed(text)) for key, text in pairs(sweep, "--sweep").items()}


def configured(kind: type[C], given: Given, section: Record | None = None) -> C:
    """A configuration from the options of a command, which override a section of a file. Raises as ``resolve``."""
    return resolve(kind, section or {}, flags_of(kind, given))


# Option -> an example for messages.
EXAMPLES = {"--sweep": "lr=0.1,0.01", "--set": "lr=0.1"}


def pairs(values: Sequence[str] | None, name: str, *, split: bool = False) -> dict[str, str]:
    """``key=value`` options as a dict.

    Args:
        values: as given.
        name: name of the option, for the message.
        split: whether one value may hold several pairs, comma-separated.

    Raises UsageError for a pair without ``=``, and for a repeated key.
    """
    out: dict[str, str] = {}
    given = values or ()
    if split:
        given = split_list(values, name)
    for value in given:
        key, _, text = (part.strip() for part in value.partition("="))
        if not key or not text:
            example = EXAMPLES.get(name, "key=value")
            raise UsageError(f"{name} {value!r} is not key=value.", f"For example {name} {example}")
        if key in out:
            hint = "Give one value."
            if name == "--sweep":
                hint = f"Give all values in one option: {name} {key}={out[key]},{text}"
            if name == "--set":
                both = shell_word(f"{key}={out[key]},{text}")
                hint = f"Give one value. To train with each value:  fedcache grid --sweep {both}"
            raise UsageError(f"{name} {key} is given twice.", hint)
        out[key] = text
    return out


def train_config(file: Mapping[str, Record], given: Given) -> TrainConfig:
    """Section ``[train]`` of a file, overridden by options; an option that names data replaces the data of the file."""
    section = dict(file.get("train", {}))
    if given.get("store") or given.get("dataset") or given.get("clients_from"):
        section.pop("store", None)
        section.pop("dataset", None)
    return configured(TrainConfig, given, section)


def partition_config(file: Mapping[str, Record], given: Given) -> PartitionConfig:
    """Section ``[partition]`` of a file, overridden by options, which include the arguments of the scheme."""
    options = {**given, "options": scheme_arguments(given)}
    return configured(PartitionConfig, options, file.get("partition"))


def scheme_arguments(given: Given) -> Facts:
    """The arguments of the scheme that were given, by their own options or by ``--option``."""
    arguments = {}
    for item in fields(SchemeArguments):
        value = given.get(item.name)
        if value is not None:
            arguments[item.name] = value
    for key, text in pairs(given.get("options"), "--option").items():
        arguments[key.replace("-", "_")] = text
    return arguments


def one_value(argument: str | None, value: str | None, name: str) -> str | None:
    """The value of an argument or of the option ``name``. Raises UsageError if both are given and differ."""
    if argument is not None and value is not None and argument != value:
        raise UsageError(f"{argument} and {name} {value} are both given.", "Leave one of them out.")
    return argument or value


def check_methods(names: Sequence[str]) -> None:
    """Refuse a misspelt method before torch is imported. Raises UsageError, with "did you mean"."""

    def check_one(name: str) -> None:
        if "," in name:
            raise UsageError(
                f"{name!r} names several methods, but only one is possible here.",
                f"fedcache grid {shell_word(name)}   trains several on the same rows",
            )
        if name not in METHODS:
            raise unknown_method(name)

    all_at_once(partial(check_one, name) for name in names)


def runs_directory(folder: Path | None) -> Path:
    """The directory of runs: the named one, or else that of the fedcache home.

    Raises UsageError if the named directory does not exist.
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"There is no directory {folder}.", "See `fedcache runs list`.")
    return folder or Home.from_environment().runs


ENGINES = ("local", "ray")


def engine_of(name: str, address: str | None) -> RayEngine | None:
    """The engine that ``--engine`` and ``--ray-address`` choose; None for ``local``, which is this machine without Ray.

    Raises UsageError for an unknown engine, a wrong address, or an address without Ray; MachineError when Ray is not
    installed or the address does not answer.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "local":
        if address is not None:
            raise UsageError(
                f"--ray-address {address} needs --engine ray.",
                f"--engine ray --ray-address {address}",
            )
        return None
    cluster.need_ray()
    if address is not None:
        cluster.check_address(address)
    from fedcache.federate.engines.ray.engine import RayEngine  # imports torch

    return RayEngine(address)
