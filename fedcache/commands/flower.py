"""``fedcache flower``: runs real federations, with every client on its own machine (extra ``flower``)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands.help import COMMON
from fedcache.commands.options import (
    Given,
    RunOptions,
    check_methods,
    command,
    configured,
    pick,
    split_list,
    sweep_lists,
    train_config,
    worded,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.commands.train import model_lines
from fedcache.config import Home, TrainConfig, option
from fedcache.errors import Exit, FedcacheError, UsageError, shell_word
from fedcache.federate.engines.flower import TRAIN
from fedcache.federate.engines.flower.processes import (
    Address,
    make_keys,
    need_flower,
    read_keys,
    run_app,
)
from fedcache.federate.engines.flower.site_names import names_of
from fedcache.grids.result import point_words
from fedcache.parsing import Facts
from fedcache.process import stop_on_signals
from fedcache.runs.run import sites_words

flower = typer.Typer(
    name="flower",
    no_args_is_help=True,
    help="Train over real sites with Flower. Each site keeps its data on its own machine (needs the pip extra flower).",
)

RUN_FIELDS = [
    *worded(pick(TrainConfig, *TRAIN), "method", common=True),
    *pick(RunOptions, "runs", "fresh"),
]
"""Options of ``app`` and ``up``; ``federate.engines.flower.plan`` explains why ``train`` has more options."""

Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        help="key=v1,v2: values of a hyperparameter. All configurations are trained in the same federation. "
        "Repeatable.",
    ),
]
Port = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Port to listen on.")]
KeysDir = Annotated[
    Path | None, typer.Option("--keys", help="Folder of keys (fedcache flower keys).")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Run without TLS and keys, only for tests on loopback.")
]
SuperLink = Annotated[str, typer.Option("--superlink", help="Address of the server, HOST:PORT.")]


@dataclass(frozen=True)
class SiteOptions:
    """Settings of a federation that concern its sites; ``Plan`` has fields of the same names."""

    sites: int = option(2, "Number of sites in the federation.", "", minimum=1, common=True)
    start_with: int | None = option(
        None,
        "Number of connected sites, rejected ones included, with which the run starts after --wait seconds. The run "
        "starts without rejected and silent sites.",
        "",
        minimum=1,
        default_text="all sites",
        common=True,
    )
    like: str = option(
        "",
        "Site whose classes and recipes all other sites must match.",
        "",
        default_text="the classes and recipes of more than half of the sites",
    )
    quorum: int = option(
        1, "Number of sites that must upload in every round.", "", minimum=1, common=True
    )
    wait: float = option(120.0, "Seconds to wait for the sites to connect.", "", common=True)
    timeout: float = option(600.0, "Seconds to wait for the answer of a site.", "")
    secure: bool = option(
        False,
        "Secure aggregation (Flower's SecAgg+): the server sees only sums of the uploads of at least 3 "
        "sites.",
        "",
    )
    secure_bound: float = option(
        8.0, "With --secure: largest absolute value of a number in an upload.", ""
    )


def plan_of(given: Given, sweep: Sequence[str] | None, **fixed: int) -> Any:
    """The plan of a federation from its options and the values of ``--sweep``. ``fixed`` overrides site options."""
    if given["method"]:
        check_methods([given["method"]])
    # Sites compute on their CPU, one client each, so the options of a simulation do not apply. {} is the configuration
    # file, which is not read.
    train = train_config({}, {**given, "execution": "sequential", "device": "cpu"})
    swept = sweep_lists(sweep)
    site_settings = {**asdict(configured(SiteOptions, given)), **fixed}
    runs = ""
    if given["runs"]:
        runs = str(given["runs"].expanduser().resolve())
    from fedcache.federate.engines.flower.plan import Plan

    return Plan(train, swept, runs=runs, fresh=given["fresh"], **site_settings).checked()


@command("flower app", pick(SiteOptions), RUN_FIELDS, within=flower)
def app(
    given: Given,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Directory of the app. Default: ./fedcache-METHOD."),
        COMMON,
    ] = None,
    sweep: Sweep = None,
) -> CommandResult:
    """Write a Flower app that trains one method, or a grid of its hyperparameters, over sites.

    Example: fedcache flower app --method fed3r --sites 3 --out app
    """
    from fedcache.federate.engines.flower.plan import write_app

    plan = plan_of(given, sweep)
    made = write_app(plan, out or Path(f"fedcache-{plan.train.method}"))
    data = {"path": str(made), "config": plan.to_config(), "points": len(plan.points)}
    following = f"fedcache flower run {shell_word(made)} --superlink HOST:PORT --keys KEYS"
    return CommandResult(data, [str(made), following])


@command("flower keys", within=flower)
def keys(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the keys; existing keys are kept.")
    ],
    sites: Annotated[
        list[str] | None, typer.Option(help="Names of the sites, comma-separated.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Addresses or host names under which sites reach the server."),
    ] = None,
) -> CommandResult:
    """Make a local certificate authority, the certificate of the server and a key for every site.

    Example: fedcache flower keys --out keys --sites north,south --host 192.0.2.10
    """
    names = split_list(sites, "--sites")
    hosts = split_list(host, "--host")
    made = make_keys(out, names, hosts)
    path = str(made.path)
    lines = [path, f"fedcache flower server --keys {shell_word(made.path)} --port 8000"]
    folders = {}
    for name in made.nodes:
        folder = str(made.site(name))
        lines.append(f"Copy {folder} to the site {name}. Copy no other file of the keys folder.")
        folders[name] = folder
    return CommandResult({"path": path, "ca": str(made.ca), "sites": folders}, lines)


@command("flower server", within=flower)
def server(
    observer: TerminalObserver,
    keys: KeysDir = None,
    insecure: Insecure = False,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on. Default: all addresses if --keys is given, otherwise loopback.",
        ),
    ] = None,
    port: Port = 8000,
) -> CommandResult:
    """Start the server (Flower's SuperLink) and keep it running. The server never receives features.

    Stop it with Ctrl-C or SIGTERM; the exit code is 0.

    Example: fedcache flower server --keys keys --port 8000
    """
    from fedcache.federate.engines.flower.serving import serve

    _need_keys_or_insecure(keys, insecure)
    with _until_stopped(observer) as stopping:
        serve(keys, host, port or 8000, Home.from_environment(), observer.note, stopping)
    return CommandResult({"stopped": True}, ["The server has stopped."])


@command("flower site", within=flower)
def site(
    observer: TerminalObserver,
    shard: Annotated[
        Path,
        typer.Option(help="Store of this client (from `fedcache shard` or `fedcache extract`)."),
    ],
    superlink: SuperLink,
    keys: Annotated[
        Path | None, typer.Option(help="Folder with the site's ca.crt and node.key.")
    ] = None,
    insecure: Insecure = False,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the client. Default: the name in its store."),
    ] = None,
    masked_only: Annotated[
        bool,
        typer.Option(
            "--masked-only",
            help="Send uploads only under secure aggregation (`fedcache flower app --secure`).",
        ),
    ] = False,
    port: Port = None,
) -> CommandResult:
    """Start a site (Flower's SuperNode) on its own shard and keep it running. The site sends uploads, never features.

    Stop it with Ctrl-C or SIGTERM; the exit code is 0.

    Example: fedcache flower site --shard sites/0-client-0.zarr --superlink 192.0.2.10:8000 --keys north
    """
    from fedcache.federate.engines.flower.serving import attend

    _need_keys_or_insecure(keys, insecure)
    # The site answers requests until a signal comes.
    with _until_stopped(observer) as stopping:
        home = Home.from_environment()
        attend(
            shard,
            superlink,
            keys,
            name,
            port,
            home,
            observer.note,
            stopping,
            masked_only=masked_only,
        )
    return CommandResult({"stopped": True}, ["The site has stopped."])


@command("flower names", within=flower)
def names(
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the server on this machine.")
    ] = 8000,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            help="Site names to release, comma-separated. Afterwards, a site with another key can use the name.",
        ),
    ] = None,
) -> CommandResult:
    """List site names that are bound to a key on the server of this machine, or release names.

    A name belongs to the first key that uses it, also in later runs. The server rejects another key with this name.
    If a site gets a new key, release its name.

    Example: fedcache flower names --forget north
    """
    table = names_of(port, Home.from_environment())
    released = split_list(forget, "--forget")
    if released:
        table.forget(released)
    rows = sorted(table.known().items())
    shown = []
    lines = [f"Server at port {port} of this machine. For another server: --port PORT"]
    if released:
        lines.append(f"Forgotten: {', '.join(released)}.")
    if rows:
        # The whole digests are in the JSON; 16 letters tell keys apart on a screen.
        cells = [(name, key[:16]) for name, key in rows]
        shown.append(TextTable("", ("site", "key (sha256)"), cells))
    else:
        lines.append("No site name has a key.")
    data = {"port": port, "names": dict(rows), "forgotten": list(released)}
    return CommandResult(data, lines, renderables=shown, listing=True)


@command("flower run", within=flower)
def run(
    observer: TerminalObserver,
    app: Annotated[Path, typer.Argument(help="Directory of an app (fedcache flower app).")],
    superlink: SuperLink = "127.0.0.1:8000",
    keys: KeysDir = None,
    insecure: Insecure = False,
) -> CommandResult:
    """Run an app over the sites of a server and show its progress; results go to the server's FEDCACHE_HOME.

    Repeat the command with the same sites to resume after the last complete round, or to get a finished result again.
    With other sites, a new run begins.

    Example: fedcache flower run fedcache-fed3r --superlink 127.0.0.1:8000 --keys keys
    """
    from fedcache.federate.engines.flower.plan import read_app

    _need_keys_or_insecure(keys, insecure)
    read_app(app)  # refuses a directory without a valid app
    ca = None
    if keys is not None:
        ca = read_keys(keys).ca
    address = Address.parse(superlink, ca)
    address.need_loopback("Add --keys KEYS. KEYS is the folder with which the server was started.")
    return _ended(run_app(app.resolve(), address, partial(_notify, observer)))


@command(
    "flower up",
    pick(SiteOptions, "like", "wait", "timeout", "secure", "secure_bound"),
    RUN_FIELDS,
    within=flower,
)
def up(
    observer: TerminalObserver,
    given: Given,
    shards: Annotated[
        Path, typer.Option(help="A directory of client stores (fedcache shard)."), COMMON
    ],
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Use certificates and node keys that are made for this run."),
        COMMON,
    ] = False,
    sweep: Sweep = None,
    port: Port = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for the logs.")] = None,
) -> CommandResult:
    """Try an app on loopback: start a server and one site for each shard of a directory, run the app and clean up.

    Example: fedcache flower up --shards sites --method fed3r
    """
    need_flower()
    from fedcache.federate.engines.flower.serving import up as start

    # A site for each client store. For an empty folder, the number is so large that the plan passes its checks. Then
    # `start` refuses the folder, with the command that makes the stores.
    stores = list(shards.glob("*.zarr"))
    plan = plan_of(given, sweep, sites=len(stores) or 100_000, start_with=1)
    home = Home.from_environment()
    last = start(plan, shards, home, partial(_notify, observer), tls=tls, port=port, keep=logs)
    return _ended(last)


def _need_keys_or_insecure(keys: Path | None, insecure: bool) -> None:
    """Refuse both or none of ``--keys`` and ``--insecure``. Raises UsageError."""
    if (keys is None) != insecure:
        problem = "Neither --keys nor --insecure is given."
        if insecure:
            problem = "Both --keys and --insecure are given."
        raise UsageError(
            problem,
            "fedcache flower keys --out KEYS --sites a,b   makes keys; --insecure is only for loopback.",
        )


def _notify(observer: TerminalObserver, message: Facts) -> None:
    """Pass a warning or a note of a federation to an observer."""
    if "warn" in message:
        observer.warn(str(message["warn"]))
    elif "note" in message:
        observer.note(str(message["note"]))


def _ended(message: Facts) -> CommandResult:
    """The answer of a command: the results in the last message of an app. Raises the error that ended the app."""
    if "error" in message:
        e = message["error"]
        raise FedcacheError(Exit(int(e["code"])), str(e["message"]), str(e["hint"]))
    lines = []
    for run in message["done"]:
        mean = run["result"]["accuracy"]["mean"]
        shown = "not scored"
        if mean is not None:
            shown = f"{100 * mean:.2f} % as reported by the sites"
        shown += ", " + sites_words(run["result"])
        # Nothing was trained for a run that was stored already.
        if run["reused"]:
            shown += " (stored)"
        words = point_words(run["result"]["method"], run["sweep"])
        lines.append(f"{words}: {shown}  {run['path']}")
        lines += model_lines(Path(run["path"]), run["result"])
    return CommandResult({"runs": message["done"]}, lines)


@contextmanager
def _until_stopped(observer: TerminalObserver) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set."""
    stopping = threading.Event()
    with stop_on_signals(stopping.set, observer.note):
        yield stopping
