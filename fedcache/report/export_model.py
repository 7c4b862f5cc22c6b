"""The model of a run, written in the format of others with its card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.models.export.formats import PROGRAMS, Parts, check_place, format_of, size_of, write
from fedcache.models.export.program import make_program
from fedcache.models.request import ExportOptions, ModelOptions
from fedcache.progress import Observer
from fedcache.report.model_card import model_card, run_result
from fedcache.runs.directory import read_result
from fedcache.runs.predict_run import open_predictor, weights_of


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
        raise UsageError("-o says where the model goes; found none.", "For example -o model.onnx, or -o FOLDER")
    if asked.seed == "all":
        raise UsageError("An exported model is that of one seed.", "--seed 0")
    out = Path(wanted.out)
    kind = format_of(out, wanted.kind)
    check_place(out, kind, wanted.force)
    predictor = open_predictor(place, asked, home, observer, "cpu")
    found = run_result(place)
    card = model_card(predictor, None if found is None else read_result(found), home)
    program = make_program(predictor, home, weights_of(asked)) if kind in PROGRAMS else None
    said = write(out, kind, Parts(predictor, card, program))
    return ExportedModel(out, kind, size_of(out), said)
