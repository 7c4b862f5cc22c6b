"""``fedcache predict``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcache.commands.options import Given, StoreDir, Weights, command, flags_of, pairs, pick, runs_directory
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import ExtractConfig, Home, resolve
from fedcache.errors import CorruptionError, Exit, UsageError
from fedcache.process import Stop, stop_on_signals

if TYPE_CHECKING:
    from fedcache.models.predictions import Prediction
    from fedcache.models.predictor import Predictor

COMPUTED = pick(ExtractConfig, "device", "batch", "workers", "threads", "follow_links")
SHOWN = 20
"""Rows that are printed; -o writes all of them."""

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Directory, first letters of its digest, or a model file.")]
Client = Annotated[
    str | None, typer.Option("--client", help="Whose model, of a method that trains one for each client.")
]
Seed = Annotated[str | None, typer.Option("--seed", help="A seed of the run, or all: their mean probability.")]
Temperature = Annotated[
    float, typer.Option("--temperature", help="Scores are divided by it before the softmax; see fedcache evaluate.")
]


@command("predict", COMPUTED)
def predict(
    observer: TerminalObserver,
    given: Given,
    run: RunName,
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="IMAGE", help="Images, folders, .zip or .tar files.")
    ] = None,
    client: Client = None,
    one_for_all: Annotated[
        bool, typer.Option("--global", help="The server's model, where a method trains personal ones beside it.")
    ] = False,
    seed: Seed = None,
    store: StoreDir = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Of the rows of --store: train, test or validation.")
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            "--embeddings", help="Features in place of images: .npz, .npy, .h5, .parquet or .safetensors."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Classes to name for each row.")] = 1,
    temperature: Temperature = 1.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all rows here: FILE.csv, .jsonl or .parquet.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--runs", help="Directory of the runs, instead of the one under FEDCACHE_HOME.")
    ] = None,
    weights: Weights = None,
) -> CommandResult:
    """Classify images, rows of a store or embeddings with the model of a finished run.

    Images go through the very backbones that the run was trained on. Rows come in the order in which they were named;
    what cannot be read is named with a reason.

    Example: fedcache predict 3f9c photos/ cat.jpg --top 3 -o classes.csv
    """
    from fedcache.models.predictions import check_out, write_predictions
    from fedcache.models.sources import predict_embeddings, predict_images, predict_store

    asked = [name for name, value in (("IMAGE", images), ("--store", store), ("--embeddings", embeddings)) if value]
    if len(asked) != 1:
        found = "none" if not asked else " and ".join(asked)
        raise UsageError(
            f"What is to be classified is named by one of IMAGE, --store and --embeddings; found {found}.",
            "For example  fedcache predict RUN photo.jpg",
        )
    if out is not None:
        check_out(out)
    home, stop = Home.from_environment(), Stop()
    given_weights = {k: Path(v).expanduser() for k, v in pairs(weights, "--weights").items()}
    predictor = open_predictor(
        run, folder, client, seed, temperature, str(given["device"] or "auto"), given_weights,
        one_for_all=one_for_all, home=home,
    )  # fmt: skip
    with stop_on_signals(stop.ask, observer.note):
        if images:
            config = resolve(ExtractConfig, {}, flags_of(ExtractConfig, given))
            rows = list(predict_images(predictor, images, config, home, observer, stop, top=top, weights=given_weights))
        elif store is not None:
            rows = list(predict_store(predictor, home, store, split, top=top))
        else:
            assert embeddings is not None
            rows = list(predict_embeddings(predictor, embeddings, top=top))
    if out is not None:
        write_predictions(out, rows, top)
    lost = [row for row in rows if row.reason]
    if lost and len(lost) == len(rows):
        raise CorruptionError(
            f"None of {len(rows):,} rows could be read; the first: {lost[0].name}: {lost[0].reason}.",
            "Give images that a viewer opens.",
        )
    shown = TextTable("", ("name", *_ranks(top)), [_cells(row, top) for row in rows[:SHOWN]])
    lines = [f"{len(rows) - len(lost):,} classified" + (f", {len(lost):,} could not be read" if lost else "")]
    if len(rows) > SHOWN:
        lines.append(f"{len(rows) - SHOWN:,} more" + (f" in {out}" if out is not None else "; -o FILE.csv writes all."))
    elif out is not None:
        lines.append(str(out))
    data = {"rows": [row.to_dict() for row in rows], "out": None if out is None else str(out)}
    return CommandResult(data, lines, Exit.QUARANTINED if lost else Exit.OK, [shown])


def open_predictor(
    run: str,
    folder: Path | None,
    client: str | None,
    seed: str | None,
    temperature: float,
    device: str,
    weights: Mapping[str, Path],
    *,
    one_for_all: bool,
    home: Home,
) -> Predictor:
    """The model that the options name.

    Raises UsageError, StoreError, CorruptionError, as ``runs.run_models.load_seed``.
    """
    from fedcache.extract.device import resolve_device
    from fedcache.models.predictor import Predictor, encoders_of
    from fedcache.models.saved_model import SavedModel
    from fedcache.report.find_runs import find_one
    from fedcache.runs.run_models import load_seed, seeds_of

    if one_for_all and client is not None:
        raise UsageError("--client and --global are two models.", "Leave one out.")
    if run.endswith(".safetensors"):
        members: tuple[SavedModel, ...] = (SavedModel.load(Path(run)),)
    else:
        path = find_one(run, runs_directory(folder))
        members = tuple(load_seed(path, number) for number in seeds_of(path, seed))
    where = "cpu" if device == "auto" else resolve_device(device).kind
    encoders = encoders_of(members[0], home, weights)
    encoders = None if encoders is None else encoders.to(where)
    return Predictor(members, client, temperature, device=where, encoders=encoders, one_for_all=one_for_all).checked()


def _ranks(top: int) -> list[str]:
    """Names of the columns of the best classes."""
    return [name for rank in range(top) for name in ((f"class {rank + 1}" if top > 1 else "class"), "probability")]


def _cells(row: Prediction, top: int) -> list[Any]:
    """A row for a person."""
    if row.reason:
        return [row.name, f"- ({row.reason})", *[""] * (2 * top - 1)]
    cells = [c for name, p in zip(row.classes, row.probabilities, strict=True) for c in (name, f"{p:.3f}")]
    return [row.name, *cells, *[""] * (2 * top - len(cells))]
