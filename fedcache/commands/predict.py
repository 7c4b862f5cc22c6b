"""``fedcache predict``: classifies new images, texts or embeddings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands.options import (
    Given,
    command,
    complete_runs,
    configured,
    pick,
    runs_directory,
    worded,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import ExtractConfig, Home
from fedcache.errors import CorruptionError, Exit, UsageError, shell_word
from fedcache.models.predictor import Prediction, check_out, write_predictions
from fedcache.models.saved_model import (
    BATCH_OF_THE_RUN,
    ONE_SEED,
    ExportOptions,
    ModelOptions,
    PersonaliseOptions,
    PredictOptions,
)
from fedcache.parsing import Facts
from fedcache.process import stopped_by_signals
from fedcache.progress import percent, percent_range
from fedcache.report.find_runs import find_one
from fedcache.runs.directory import is_of_run
from fedcache.store.manifest import was_store

# Options of the extraction of features.
EXTRACTION = worded(
    pick(ExtractConfig, "device", "batch", "workers", "threads", "follow_links"),
    "batch",
    default=BATCH_OF_THE_RUN,
)
SHOWN = 20
"""Number of rows that are printed; -o writes all of them."""
UNCALIBRATED = (
    "These scores are not probabilities of being right: no temperature was fitted when the model was "
    "trained. `fedcache evaluate` fits a temperature on labelled rows. Apply it with `--temperature`."
)

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run or model file: a directory, a digest or its first letters, tag:NAME if one run has the tag, or a "
        ".safetensors file.",
        autocompletion=complete_runs,
    ),
]


@command("predict", EXTRACTION, pick(ModelOptions), pick(PredictOptions))
def predict(
    observer: TerminalObserver,
    given: Given,
    run: RunName,
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Images, folders, .zip or .tar files; tables if the model reads texts, sounds if it reads sounds.",
        ),
    ] = None,
) -> CommandResult:
    """Classify images, texts, embeddings or rows of a store with a trained model.

    Images are processed by the same backbones as in the run, in batches of the same size. Rows are printed in the
    given order; files that cannot be read are listed with a reason.

    Example: fedcache predict 3f9c photos/ cat.jpg --top 3 -o classes.csv
    """
    model = configured(ModelOptions, given)
    rows = configured(PredictOptions, given)
    config = configured(ExtractConfig, given)
    inputs = {"IMAGE": images, "--store": rows.store, "--embeddings": rows.embeddings}
    check_one_named(inputs, "the data to classify", "fedcache predict RUN photo.jpg")
    if rows.split != "all" and rows.store is None:
        raise UsageError("--split needs --store.", "Leave --split out.")
    out = given["out"]
    if out is not None:
        check_out(out)
    place = find_model(run, given["runs"], observer)
    check_apart(out, place, model, [*(images or ()), rows.embeddings])
    from fedcache.runs import predict_run

    home = Home.from_environment()
    with stopped_by_signals(observer.note) as stop:
        answer = Answer(keep_all=observer.as_json)
        predictor = predict_run.open_predictor(place, model, home, observer, config.device)
        predictions = predict_run.predict_rows(
            predictor, images or (), model, rows, config, home, observer, stop
        )
        counted = answer.counting(predictions)
        if out is not None:
            write_predictions(out, counted, rows.top)
        # The generator computes and counts rows as they are read, and without -o nothing has read them yet.
        deque(counted, maxlen=0)
    return predictions_answer(answer, rows.top, out, calibrated=predictor.calibrated)


@dataclass
class Answer:
    """The answer of predictions: the first rows and the counts; all rows only for ``--json``."""

    keep_all: bool
    rows: int = 0
    lost: int = 0  # rows that could not be read
    first_lost: Prediction | None = None
    # the first ``SHOWN`` rows; with ``keep_all`` all rows
    shown: list[Prediction] = field(default_factory=list)

    def counting(self, rows: Iterable[Prediction]) -> Iterator[Prediction]:
        """Yield the rows unchanged, and count each of them."""
        for row in rows:
            self.rows += 1
            if row.reason:
                self.lost += 1
                self.first_lost = self.first_lost or row
            if self.keep_all or self.rows <= SHOWN:
                self.shown.append(row)
            yield row


def check_one_named(inputs: Mapping[str, object], what: str, example: str) -> None:
    """Check that exactly one of the options that name the rows is given. Raises UsageError.

    Args:
        inputs: option -> its value; an empty value was not given.
        what: the rows in words, for the message.
        example: a correct command.
    """
    given = [name for name, value in inputs.items() if value]
    if len(given) != 1:
        *others, last = inputs
        options = ", ".join(others)
        found = " and ".join(given) or "none"
        raise UsageError(
            f"Give exactly one of {options} or {last} for {what}. Given: {found}.",
            f"For example  {example}",
        )


def find_model(run: str, runs: Path | None, observer: TerminalObserver) -> Path:
    """The directory of a run, or a model file. ``runs`` is the directory of runs; None: that of the fedcache home.

    Raises UsageError for a name that is neither.
    """
    if run.endswith(".safetensors"):
        return Path(run)
    if Path(run).is_file():
        raise UsageError(
            f"{run} is a file, but not a model of a run.",
            "The first argument is RUN: a directory, a name in `fedcache runs list` or its first letters, or "
            "a .safetensors file.",
        )
    return find_one(run, runs_directory(runs), observer)


def check_apart(
    out: Path | None, place: Path, model: ModelOptions, files: Iterable[str | Path | None] = ()
) -> None:
    """Refuse to overwrite inputs of a command, and files of any run or store. Raises UsageError.

    A new file in the directory of a run or store is allowed. So is a file in the directory of a run that is not one of
    the run's own files, such as an earlier result of -o.

    Args:
        out: the file of the result; None if nothing is written.
        place: the directory of a run, or a model file.
        model: options of the model, which name local weights.
        files: other files that are read; None for one that was not named.
    """
    if out is None:
        return
    target = out.resolve()
    owned = target.is_file() and _is_owned(target)
    files_read = [*model.weights.values(), *files]
    read = [place, *(Path(path).expanduser() for path in files_read if path is not None)]
    if target in [path.resolve() for path in read]:
        overwritten = "an input of this command"
    elif owned:
        overwritten = "a file of a run or of a store"
    else:
        return
    raise UsageError(f"-o {out} would overwrite {overwritten}.", "Choose another file for -o.")


def _is_owned(file: Path) -> bool:
    """Whether a file is inside a store, or one of the files that fedcache wrote into the directory of a run."""
    is_run_file = is_of_run(file.name)
    for above in file.parents:
        if was_store(above):
            return True
        if is_run_file and (above / "result.json").is_file():
            return True
    return False


def predictions_answer(
    answer: Answer, top: int, out: Path | None, *, calibrated: bool
) -> CommandResult:
    """The answer: a table of the first predictions, and the number of rows.

    Raises CorruptionError if none of the rows could be read.

    Args:
        answer: the counted rows.
        top: number of classes that are named for a row.
        out: the file that holds all rows; None for none.
        calibrated: whether the softmax of a class is called a probability; else it is called a score.
    """
    first = answer.first_lost
    lost = answer.lost
    if first is not None and lost == answer.rows:
        raise CorruptionError(
            f"{first.name} could not be read: {first.reason}. Rows that could be read: 0 of {lost:,}.",
            "Give image files that an image viewer can open.",
        )
    rows = answer.shown[:SHOWN]
    word = "score"
    if calibrated:
        word = "probability"
    ranks = []
    for rank in range(top):
        column = "class"
        if top > 1:
            column = f"class {rank + 1}"
        ranks += [column, word]
    columns = ["name", *ranks]
    cells = [_cells(row, top) for row in rows]
    # Most tables have no reasons, so their column is left out.
    if any(row.reason for row in rows):
        columns.append("reason")
        for row, cell in zip(rows, cells, strict=True):
            cell.append(row.reason)
    shown = TextTable("", columns, cells)
    counts = f"{answer.rows - lost:,} classified"
    if lost:
        counts += f", {lost:,} could not be read"
    lines = [counts]
    if answer.rows > SHOWN:
        more = f"{answer.rows - SHOWN:,} more"
        if out is None:
            lines.append(f"{more}; -o FILE.csv writes all.")
        else:
            lines.append(f"{more} in {out}")
    elif out is not None:
        lines.append(str(out))
    if not calibrated:
        lines.append(UNCALIBRATED)
    data: Facts = {
        "rows": [row.to_dict() for row in answer.shown],
        "out": None,
        "calibrated": calibrated,
    }
    if out is not None:
        data["out"] = str(out)
    code = Exit.OK
    if lost:
        code = Exit.QUARANTINED
    return CommandResult(data, lines, code, [shown])


def _cells(row: Prediction, top: int) -> list[Any]:
    """The cells of a row without its reason: its name, then ``top`` classes and probabilities, padded with ""."""
    cells = []
    if row.reason:
        cells.append("-")
    else:
        for name, probability in zip(row.classes, row.probabilities, strict=True):
            cells += [name, f"{probability:.3f}"]
    padding = [""] * (2 * top - len(cells))
    return [row.name, *cells, *padding]


# ``fedcache personalise``: makes the personal model of a new client.

MODEL = worded(pick(ModelOptions, "seed", "weights", "runs"), "seed", meaning=ONE_SEED)


@command("personalise", pick(PersonaliseOptions), MODEL, pick(ExtractConfig, "device"))
def personalise(observer: TerminalObserver, given: Given, run: RunName) -> CommandResult:
    """Make the personal model of a new client that took no part in training.

    The new client receives the last message of the run's server. It trains its personal part of the model on its
    training rows, as the clients of the run did, and sends nothing. fedcache evaluates the model on the test rows of
    the store and writes it to a file.

    Example: fedcache personalise 3f9c --store newcomer.zarr -o newcomer.safetensors
    """
    model = configured(ModelOptions, given)
    request = configured(PersonaliseOptions, given)
    if request.store is None:
        raise UsageError(
            "Missing option --store, which names the rows of the new client.",
            "--store newcomer.zarr",
        )
    # The run is looked up before torch is imported, so that a wrong name is refused at once.
    place = find_model(run, given["runs"], observer)
    from fedcache.runs.predict_run import personalise_run

    device = given.get("device") or "auto"
    home = Home.from_environment()
    with stopped_by_signals(observer.note) as stop:
        personal = personalise_run(place, model, request, device, home, observer, stop)
    trained = ""
    if personal.rounds:
        trained = f" in {personal.rounds} rounds"
    rows = f"{personal.rows:,} rows{trained}"
    lines = [f"{personal.client}: a model of {personal.method} from {rows}"]
    if personal.measures is not None:
        measured = personal.measures.all
        interval = ""
        if measured.interval is not None:
            interval = f" ({percent_range(measured.interval)})"
        accuracy = percent(measured.accuracy)
        lines.append(f"accuracy {accuracy} %{interval} on {measured.rows:,} test rows of the store")
    lines += [
        str(personal.path),
        f"Next:  fedcache predict {shell_word(personal.path)} photo.jpg",
    ]
    return CommandResult(personal.to_dict(), lines)


# ``fedcache export-model``: exports trained models for other programs.


@command("export-model", worded(pick(ModelOptions), "seed", meaning=ONE_SEED), pick(ExportOptions))
def export_model(observer: TerminalObserver, given: Given, run: RunName) -> CommandResult:
    """Export a trained model for plain torch, ONNX, torch.export, safetensors or scikit-learn.

    An exported folder, .onnx or .pt2 file includes the frozen backbones and reads images. A .safetensors or .joblib
    file (.joblib: linear heads only) reads features. Each export includes a model card. ONNX needs the extra export.

    Example: fedcache export-model 3f9c -o model.onnx
    """
    model = configured(ModelOptions, given)
    request = configured(ExportOptions, given)
    place = find_model(run, given["runs"], observer)
    check_apart(given["out"], place, model)
    from fedcache.report.model_card import export_model as write_model

    done = write_model(place, model, request, Home.from_environment(), observer)
    data = {
        "path": str(done.path),
        "format": done.kind,
        "bytes": done.bytes,
        **done.written,
    }
    megabytes = done.bytes / 1e6
    lines = [f"{done.kind}, {megabytes:,.2f} MB: {done.path}"]
    for entry in done.written.get("inputs", []):
        shape = f"[N, {entry['width']}]"
        if entry["kind"] == "images":
            height = entry["height"]
            shape = f"uint8 [N, 3, {height}, {entry['width']}]"
        backbones = ", ".join(entry["backbones"]) or "no known backbone"
        lines.append(f"  reads {entry['name']} {shape} ({backbones})")
    if "difference" in done.written:
        # The largest differences between the exported program and the trained model, measured on random rows.
        template = "{scores:.1g} and probabilities by {probabilities:.1g}"
        gap = template.format(**done.written["difference"])
        lines.append(f"  on random rows, scores differ from this model's by at most {gap}")
        moved = done.written["moved_by_libraries"]
        if moved["scores"]:
            gap = template.format(**moved)
            lines.append(f"  rounding differences of another library can change scores by {gap}")
    return CommandResult(data, lines)
