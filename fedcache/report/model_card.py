"""Export of a model with its model card: training data, accuracy, and the data that left the clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.extract.planning.plan import paths_of
from fedcache.extract.recipe import IMAGES
from fedcache.federate.methods import METHODS
from fedcache.models.export.program import (
    BATCH,
    DRAWS,
    LIBRARIES,
    PROGRAMS,
    ModelProgram,
    Parts,
    check_place,
    format_of,
    make_program,
    write,
)
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import ExportOptions, ModelOptions, SavedModel
from fedcache.parsing import Facts
from fedcache.progress import Observer, percent, percent_range
from fedcache.report.find_runs import Result
from fedcache.report.methods import Sizes
from fedcache.report.methods.facts import leaving, rows_in_models
from fedcache.report.store_card import backbone_lines, section_lines
from fedcache.report.verdict import describe_trust
from fedcache.runs.directory import ClientColumns, client_columns, read_result, run_folder
from fedcache.runs.predict_run import open_predictor
from fedcache.runs.score import values_held_out, wilson
from fedcache.store.catalog import size_of
from fedcache.tables.words import some_names

SHOWN = 20
"""Maximum number of classes that are listed."""


def model_card(
    predictor: Predictor,
    result: Result | None,
    home: Home,
    clients: ClientColumns | None = None,
) -> str:
    """The card as Markdown; ``result`` and ``clients`` are the run's, or None for a model file without its run."""
    saved = predictor.members[0]
    facts = saved.facts
    client = predictor.client
    whose = "the global model"
    if client is not None:
        whose = f"the personal model of client {client}"
    # Accuracy and privacy are results of the run, which a model file alone does not contain.
    unknown_run = ["Unknown, because the run is not available."]
    accuracy = unknown_run
    privacy = unknown_run
    if result is not None:
        accuracy = accuracy_lines(result, client, clients)
        privacy = _privacy(result)
    parts = {
        "Trained on": [
            *_data(saved, result),
            # A model file without recipes gets no lines on backbones.
            *backbone_lines(zip(facts.keys, facts.recipes, strict=False), home),
            f"Features: feat_post {facts.feat_post}, computed in {facts.dtype}.",
            _temperature(predictor),
        ],
        "Accuracy": accuracy,
        "Data that left the clients": left_lines(saved, result),
        "Privacy spent": privacy,
    }
    # A client's own model may reveal something about that client's rows.
    personal = predictor.deployed[0].personal
    if client is not None and personal:
        tensors = []
        for name, tensor in personal.items():
            shape = ", ".join(map(str, tensor.shape))
            tensors.append(f"{name} [{shape}]")
        own = ", ".join(tensors)
        parts["What the model reveals about a client"] = [
            f"It contains tensors that were computed only from the rows of {client} ({own}). Share it only with "
            "people who are allowed to know these rows.",
            *_held_rows(predictor),
        ]
    if predictor.prior is not None:
        parts["Client prior"] = [
            f"The scores include a class prior ({predictor.prior.words}), which discloses training class counts of "
            f"{predictor.prior.client}. Share the model only with people who are allowed to know these counts."
        ]
    run = facts.run[:16]
    listed = some_names(facts.classes, SHOWN)
    lines = [
        "# Model card",
        "",
        f"Method {facts.method}, {whose}; seed {facts.seed} of run {run}, {facts.rounds} rounds over "
        f"{facts.clients:,} clients.",
        f"{len(facts.classes):,} classes: {listed}.",
    ]
    lines += section_lines(parts)
    return "\n".join(lines) + "\n"


def _temperature(predictor: Predictor) -> str:
    """Whether probabilities are calibrated, and how."""
    if not predictor.calibrated:
        return (
            "Outputs called probabilities are the softmax of the scores. They are not calibrated."
        )
    words = f"Probabilities: softmax of the scores divided by {predictor.softmax_temperature:g}"
    if predictor.temperature is not None:
        return f"{words}, as set by --temperature."
    return f"{words}, the temperature that was fitted after training on rows that the model had not seen."


def _held_rows(predictor: Predictor) -> list[str]:
    """A warning where a client's model holds each of its training rows; [] for other models."""
    method = predictor.method or METHODS.get(predictor.members[0].facts.method)
    if method is None:
        return []
    held = rows_in_models(method)
    if not held:
        return []
    names = " and ".join(held)
    return [
        f"Tensors with every single training row of {predictor.client}, its features and its class: {names}. "
        "Anyone with this file has the features of this client."
    ]


def _data(saved: SavedModel, result: Result | None) -> list[str]:
    """Sentences on the dataset and the partition."""
    if result is None:
        return [f"Dataset {saved.facts.dataset}."]
    data = result["dataset"]
    part = result["partition"]
    lines = []
    # Held-out values come first, because they decide what the test set is.
    held = values_held_out(result)
    if held:
        column = part["args"].get("by") or "domain"
        listed = ", ".join(held)
        lines.append(
            f"Held out: {column} {listed}. Its rows are the test set and were not used for training."
        )
    holds = data.get("holds", IMAGES)
    args = ", ".join(f"{k} {_words(v)}" for k, v in part["args"].items() if v is not None)
    rows = data["ok"]
    clients = part["clients"]
    dropped = part["dropped"]
    lines.append(f"Dataset {data['slug']}, digest {data['digest']}, {rows:,} {holds}.")
    lines.append(
        f"Partition {part['scheme']} ({args}), seed {part['seed']}: {clients:,} clients, {dropped:,} rows left out; "
        f"digest {part['digest']}."
    )
    return lines


def _words(value: object) -> str:
    """An argument of a partition as text; a list as its values."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


_SCORED_ON = {
    "global": "one model on the global test rows",
    "personalised": "each client's model on its own test rows",
    "everywhere": "each client's model on all test rows",
}


def accuracy_lines(
    result: Result, client: str | None = None, clients: ClientColumns | None = None
) -> list[str]:
    """Accuracy of every seed, with a Wilson interval for one model with a known number of test rows."""
    a = result["accuracy"]
    over = _SCORED_ON[result["protocol"]]
    lines = []
    # The number of test rows is known for one model only.
    rows = test_rows(result)
    for seed, value in zip(result["seeds"], a["per_seed"], strict=True):
        if value is None:
            continue
        line = f"Seed {seed}: {percent(value)} %, {over}"
        interval = wilson(value, rows)
        if interval is not None:
            ends = percent_range(interval)
            line += f" ({rows:,}); 95 % Wilson interval {ends} %"
        lines.append(f"{line}.")
    if len(a["per_seed"]) > 1 and a["mean"] is not None:
        deviation = percent(a["std"] or 0.0)
        seeds = len(a["per_seed"])
        lines.append(
            f"Mean of {seeds} seeds: {percent(a['mean'])} %, standard deviation {deviation} points."
        )
    if client is not None and clients is not None:
        own = clients.accuracy_of(client)
        if own is not None:
            lines.append(f"Client {client}: {percent(own)} %, mean over seeds.")
    return lines or ["No row was scored."]


def test_rows(result: Result) -> int | None:
    """Test rows of one seed of a run with one model for all; None where they are not known."""
    confusion = result.get("confusion")
    if result["protocol"] != "global" or confusion is None:
        return None
    # The confusion matrix sums over seeds.
    total: int = sum(sum(row) for row in confusion)
    seeds = len(result["seeds"])
    if total and total % seeds == 0:
        return total // seeds
    return None


def left_lines(saved: SavedModel, result: Result | None) -> list[str]:
    """Sentences on the traffic of a client: its numbers, and each kind of tensor that it sent."""
    lines = []
    if result is not None:
        exact = result["traffic"]["exact"]
        each = exact["per_client_round"]
        up = exact["up_bytes"]
        down = exact["down_bytes"]
        lines.append(
            f"A client sent {each['up']:,.0f} scalars a round and received {each['down']:,.0f}; in total "
            f"{up:,} bytes up and {down:,} bytes down over the run."
        )
    facts = saved.facts
    method = METHODS.get(facts.method)
    if method is None:
        lines.append(f"{facts.method} is a custom method; its code shows what it sends.")
        return lines
    # Uploads are counted at the widths of the model. The width of a model that reads images is a number of bytes, so
    # its uploads are counted at the default sizes.
    sizes = None
    if facts.image is None:
        sizes = Sizes(facts.width, facts.width, len(facts.classes))
    parts = leaving(method, sizes)
    if not parts:
        lines.append("Nothing is sent.")
    return lines + [f"Sent: {part.what} ({part.reveals})." for part in parts]


def _privacy(result: Result) -> list[str]:
    """Sentences on robust aggregation, attacks and the privacy cost."""
    trust = result.get("trust", {})
    lines = describe_trust(trust)
    if trust.get("privacy"):
        return lines
    return [*lines, "No noise was added, so no epsilon bounds what uploads reveal."]


@dataclass(frozen=True)
class ExportedModel:
    """The exported file or folder.

    Attributes:
        path: of the file or folder.
        kind: folder | onnx | torch | safetensors | sklearn.
        bytes: its size.
        written: facts of the format, as plain JSON values.
    """

    path: Path
    kind: str
    bytes: int
    written: Facts


def export_model(
    place: Path, options: ModelOptions, request: ExportOptions, home: Home, observer: Observer
) -> ExportedModel:
    """Write one model of a run. Nothing is written if an error is raised.

    Args:
        place: the directory of a run, or a model file.
        options: client, seed and temperature.
        request: the output path, and the format.
        home: where weights are looked for.
        observer: warned of a model that other code made.

    Raises:
        UsageError: no output path, several seeds, or a method that the format cannot hold.
        StoreError: a run without a model, or an existing file that would be overwritten.
        CorruptionError: a damaged model or result.
        MachineError: missing weights or packages.
    """
    if request.out is None:
        raise UsageError(
            "Missing option --out: where to write the model.",
            "For example -o model.onnx, or -o FOLDER",
        )
    if options.seed == "all":
        raise UsageError("An exported model has exactly one seed.", "--seed 0")
    out = Path(request.out)
    kind = format_of(out, request.kind)
    check_place(out, kind, request.force)
    # All checks are done before the program is made, which takes longest.
    predictor = named(open_predictor(place, options, home, observer))
    program = None
    if kind in PROGRAMS:
        program = make_program(predictor, home, paths_of(options.weights))
    # A model file without its run gets a card without the results of the run.
    result = None
    columns = None
    folder = run_folder(place)
    if (folder / "result.json").is_file():
        result = read_result(folder / "result.json")
        columns = client_columns(result, folder)
    card = model_card(predictor, result, home, columns)
    if program is not None and program.module.encoders:
        card += agreement(program)
    written = write(out, kind, Parts(predictor, card, program))
    return ExportedModel(out, kind, size_of(out), written)


def named(predictor: Predictor) -> Predictor:
    """The predictor with the name of its client, if it holds the personal model of one client only."""
    saved = predictor.members[0]
    if predictor.client is None and not predictor.one_for_all and saved.facts.personal:
        return replace(predictor, client=saved.clients[0])
    return predictor


def agreement(program: ModelProgram) -> str:
    """The section of a card on differences between libraries."""
    dtypes = sorted({recipe.dtype for recipe in program.module.saved.recipes})
    kinds = " and ".join(dtypes)
    moved = program.libraries
    lines = [
        "",
        "## Agreement with predict",
        "",
        f"Features are rounded to {kinds}, as in the store of the run. Libraries sum in different orders, "
        f"so one library may round a feature up where another library rounds it down. fedcache changed "
        f"every feature of {BATCH} random images {DRAWS} times, each time by up to {LIBRARIES:.0e} of its "
        f"value. Scores changed by at most {moved.scores:.1g} and probabilities by at most "
        f"{moved.probabilities:.1g}.",
    ]
    if "float16" in dtypes:
        lines.append(
            "A run on features kept as float32 (`fedcache extract --recipe dtype=float32`) does not have "
            "this rounding."
        )
    return "\n".join(lines) + "\n"
