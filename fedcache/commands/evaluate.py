"""``fedcache evaluate``: measures trained models on labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands.options import Given, command, complete_runs, configured, pick, rare, worded
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.commands.predict import check_apart, check_one_named, find_model
from fedcache.config import ExtractConfig, Home
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.models.evaluate import RunEvaluation
from fedcache.models.saved_model import BATCH_OF_THE_RUN, EvaluateOptions, ModelOptions
from fedcache.process import stopped_by_signals
from fedcache.progress import percent, percent_range
from fedcache.report.evaluation import check_request, write_evaluations

# Options of the extraction of features.
EXTRACTION = pick(
    ExtractConfig,
    "layout",
    "limit",
    "data",
    "max_bad",
    "device",
    "batch",
    "workers",
    "threads",
    "follow_links",
)
EXTRACTION = worded(rare(EXTRACTION), "batch", default=BATCH_OF_THE_RUN)
# Options that choose the model.
MODEL = worded(
    pick(ModelOptions), "client", default="the global model, or each client's personal model"
)
MODEL = worded(
    MODEL,
    "client_prior",
    meaning="Also score each client's own test rows with a prior from the client's class shares.",
)
SHOWN = 12
"""Number of classes and domains that are printed; -o writes all of them."""

RunNames = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Runs or model files: directories, digests or their first letters, tag:NAME if one run has the tag, or "
        ".safetensors files.",
        autocompletion=complete_runs,
    ),
]


@command("evaluate", EXTRACTION, MODEL, pick(EvaluateOptions))
def evaluate(observer: TerminalObserver, given: Given, run: RunNames) -> CommandResult:
    """Evaluate trained models on labelled data: accuracy, F1, confusion matrix, calibration.

    Classes are matched by name. For a dataset, fedcache first extracts features with the recipes and weights of the
    run. For a method with personal models, each model is evaluated on all rows; --client or --global selects one
    model.

    Example: fedcache evaluate 3f9c 81ab --dataset folder:photos -o evaluation.html
    """
    model = configured(ModelOptions, given)
    request = configured(EvaluateOptions, given)
    config = configured(ExtractConfig, given)
    # Exactly one option names the rows to evaluate on.
    rows = {
        "--dataset": request.dataset,
        "--store": request.store,
        "--embeddings": request.embeddings,
    }
    check_one_named(
        rows, "the data to evaluate on", "fedcache evaluate RUN --dataset folder:photos"
    )
    out = given["out"]
    check_request(out, with_images=request.with_images)
    places = [find_model(name, given["runs"], observer) for name in run]
    for place in places:
        # The evaluation must not overwrite what it reads.
        check_apart(out, place, model, [request.embeddings])
    from fedcache.runs.evaluate_run import evaluate_runs

    home = Home.from_environment()
    with stopped_by_signals(observer.note) as stop:
        evaluations = evaluate_runs(places, model, request, config, home, observer, stop)
    if out is not None:
        images = None
        if request.with_images:
            images = ImagePlaces(home, config.data)
        write_evaluations(out, evaluations, images, observer)
    return evaluation_answer(evaluations, out)


def evaluation_answer(evaluations: list[RunEvaluation], out: Path | None) -> CommandResult:
    """The answer: a table of all runs, and for a single run also its classes and domains."""
    lines = list(dict.fromkeys(f"On {e.rows}." for e in evaluations))
    columns = (
        "run",
        "method",
        "model",
        "rows",
        "accuracy %",
        "95 % interval",
        "macro-F1 %",
        "ECE %",
        "NLL",
        "best temperature",
    )
    right = ("rows", *columns[4:])
    tables = [TextTable("", columns, [_cells(e) for e in evaluations], right)]
    # Sentences name their run if there are several.
    for e in evaluations:
        prefix = ""
        if len(evaluations) > 1:
            prefix = f"{e.label}: "
        lines += [prefix + sentence for sentence in e.sentences()]
    if len(evaluations) == 1:
        tables += details(evaluations[0])
    written = None
    if out is not None:
        written = str(out)
        lines.append(written)
    data = {"runs": [e.to_dict() for e in evaluations], "out": written}
    return CommandResult(data, lines, renderables=tables)


def _cells(e: RunEvaluation) -> list[Any]:
    """The row of a run in the table."""
    m = e.measures
    interval = ""
    # Personal models have a spread over clients, one global model has an interval over test rows.
    if e.clients is not None:
        if e.clients.std is not None:
            interval = f"std {100 * e.clients.std:.2f}"
    else:
        interval = percent_range(m.all.interval)
    best = ""
    if m.temperature is not None:
        best = f"{m.temperature.value:.4g}"
    return [
        e.short_run,
        e.method,
        e.model,
        f"{m.all.rows:,}",
        percent(e.accuracy),
        interval,
        percent(m.macro_f1),
        percent(m.ece),
        f"{m.nll:.4f}",
        best,
    ]


def details(e: RunEvaluation) -> list[TextTable]:
    """A table of the domains, if there are several, and a table of the classes with the lowest accuracy.

    The accuracy of a class is its recall.
    """
    made = []
    if len(e.measures.by_domain) > 1:
        domains = [
            (name, f"{domain.rows:,}", percent(domain.accuracy))
            for name, domain in list(e.measures.by_domain.items())[:SHOWN]
        ]
        columns: tuple[str, ...] = ("domain", "rows", "accuracy %")
        made.append(TextTable("", columns, domains, columns[1:]))
    worst = sorted(e.measures.by_class, key=lambda c: c.recall or 0.0)[:SHOWN]
    rows = []
    for c in worst:
        scores = map(percent, (c.recall, c.precision, c.f1))
        rows.append((c.name, f"{c.rows:,}", *scores))
    columns = ("class", "rows", "accuracy %", "precision %", "F1 %")
    title = ""
    if len(e.measures.by_class) > SHOWN:
        title = f"The {SHOWN} classes with the lowest accuracy"
    return [*made, TextTable(title, columns, rows, columns[1:])]
