"""The model of a run, written in the format of others with its card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcache.config import Home
from fedcache.errors import UsageError
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
    size_of,
    write,
)
from fedcache.models.saved_model import ExportOptions, ModelOptions, SavedModel
from fedcache.progress import Observer
from fedcache.report.model_card import model_card, run_result
from fedcache.runs.client_columns import client_columns
from fedcache.runs.directory import read_result
from fedcache.runs.predict_run import (
    check_saved,
    check_weights,
    open_members,
    predictor_of,
    weights_of,
)


@dataclass(frozen=True)
class ExportedModel:
    """What was written."""

    path: Path
    kind: str  # folder | onnx | torch | safetensors | sklearn
    bytes: int
    said: dict[str, Any]  # of the format, plain JSON values


def export_model(
    place: Path, asked: ModelOptions, wanted: ExportOptions, home: Home, observer: Observer
) -> ExportedModel:
    """Write one model of a run; nothing is written where anything is refused.

    Args:
        place: the directory of a run, or a model file.
        asked: client, seed and temperature.
        wanted: where to, and the format.
        home: where weights are looked for.
        observer: warned of a model that other code made.

    Raises:
        UsageError: no place to write to, several seeds, or a method that the format cannot hold.
        StoreError: a run without a model, or something that would be written over.
        CorruptionError: a damaged model or result.
        MachineError: weights or packages that are not here.
    """
    if wanted.out is None:
        raise UsageError(
            "-o says where the model goes; found none.", "For example -o model.onnx, or -o FOLDER"
        )
    if asked.seed == "all":
        raise UsageError("An exported model is that of one seed.", "--seed 0")
    out = Path(wanted.out)
    kind = format_of(out, wanted.kind)
    check_place(out, kind, wanted.force)
    members = open_members(place, asked, observer)
    check_saved(place, members[0], asked)
    check_weights(asked, [members[0].facts.backbones])
    predictor = predictor_of(members, named(members[0], asked), home, "cpu")
    found = run_result(place)
    program = None
    if kind in PROGRAMS:
        program = make_program(predictor, home, weights_of(asked))
    result = None
    if found is not None:
        result = read_result(found)
    if found is None or result is None:
        columns = None
    else:
        columns = client_columns(result, found.parent)
    card = model_card(predictor, result, home, columns)
    if program is not None and program.module.encoders:
        card += agreement(program)
    said = write(out, kind, Parts(predictor, card, program))
    return ExportedModel(out, kind, size_of(out), said)


def named(saved: SavedModel, asked: ModelOptions) -> ModelOptions:
    """With the client's name where the model of one client alone is there, so that facts and card say whose it is."""
    if (
        asked.client is None
        and not asked.one_for_all
        and saved.facts.personal
        and len(saved.clients) == 1
    ):
        return replace(asked, client=saved.clients[0])
    return asked


def agreement(program: ModelProgram) -> str:
    """The section of a card on how far another library's answers may lie from these."""
    dtypes = sorted({recipe.dtype for recipe in program.module.saved.recipes})
    moved = program.libraries
    lines = [
        "",
        "## Agreement with predict",
        "",
        f"Features are rounded to {' and '.join(dtypes)}, as the store of the run keeps them. Libraries sum in "
        "different orders, so a feature near the middle between two such numbers is rounded up by one and down by "
        f"another. With every feature of {BATCH} drawn images moved {DRAWS} times, each by up to {LIBRARIES:.0e} of "
        f"itself, scores changed by at most {moved.scores:.1g} and probabilities by {moved.probabilities:.1g}.",
    ]
    if "float16" in dtypes:
        lines.append(
            "A run on features kept as float32 (`fedcache extract --recipe dtype=float32`) is free of it."
        )
    return "\n".join(lines) + "\n"
