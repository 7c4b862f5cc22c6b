"""The model card that every exported model carries: what it was trained on, how well, and at whose cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scipy

from fedcache.config import Home
from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.backbones import lookup_recorded
from fedcache.extract.inputs import IMAGES, reads_of
from fedcache.extract.recipe import Recipe
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
    size_of,
    write,
)
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import ExportOptions, ModelOptions, SavedModel
from fedcache.progress import Observer
from fedcache.report.methods.facts import leaving, rows_in_models
from fedcache.report.methods.sizes import Sizes
from fedcache.runs.client_columns import ClientColumns, client_columns
from fedcache.runs.directory import read_result
from fedcache.runs.predict_run import (
    check_saved,
    check_weights,
    open_members,
    predictor_of,
    weights_of,
)
from fedcache.runs.privacy_ledger import describe_trust
from fedcache.runs.score import values_held_out
from fedcache.visible_text import first_few

LEVEL = 0.95
SHOWN = 20
"""Classes that are named."""


def model_card(
    predictor: Predictor,
    result: Mapping[str, Any] | None,
    home: Home,
    clients: ClientColumns | None = None,
) -> str:
    """Markdown; ``result`` and ``clients`` are the run's, None for a model file whose run is not at hand."""
    accuracy = [] if result is None else accuracy_lines(result, predictor.client, clients)
    saved = predictor.members[0]
    facts = saved.facts
    whose = (
        "the one for all clients"
        if predictor.client is None
        else f"that of client {predictor.client} alone"
    )
    few = first_few(facts.classes, SHOWN)
    lines = [
        "# Model card",
        "",
        f"Method {facts.method}, {whose}; seed {facts.seed} of run {facts.run[:16]}, {facts.rounds} rounds over "
        f"{facts.clients:,} clients.",
        f"{len(facts.classes):,} classes: {few}.",
        "",
        "## Trained on",
        "",
        *_data(saved, result),
        *_backbones(saved, home),
        f"Features: feat_post {facts.feat_post}, computed with in {facts.dtype}.",
        *_temperature(predictor),
        "",
        "## Accuracy",
        "",
        *(accuracy or ["Not known: the run is not at hand."]),
        "",
        "## What left the clients",
        "",
        *left_lines(saved, result),
        "",
        "## Privacy spent",
        "",
        *_privacy(result),
    ]
    if predictor.client is not None and predictor.deployed[0].personal:
        own = ", ".join(
            f"{k} [{', '.join(map(str, t.shape))}]"
            for k, t in predictor.deployed[0].personal.items()
        )
        lines += [
            "",
            "## What it tells of a client",
            "",
            f"It holds tensors of {predictor.client} alone ({own}), made of that client's rows. Give it to nobody who "
            "may not know them.",
            *_held_rows(predictor),
        ]
    return "\n".join(lines) + "\n"


def _temperature(predictor: Predictor) -> list[str]:
    """Whether probabilities are calibrated, and by what."""
    if not predictor.calibrated:
        return [
            "Outputs called probabilities are the softmax of the scores. They are not calibrated."
        ]
    words = f"Probabilities: softmax of the scores divided by {predictor.softmax_temperature:g}"
    if predictor.temperature is not None:
        return [f"{words}, as --temperature asked for."]
    return [
        f"{words}, the temperature fitted when training ended to rows that the model had not seen."
    ]


def _held_rows(predictor: Predictor) -> list[str]:
    """A warning where a client's model holds its training rows one by one."""
    method = predictor.method or METHODS.get(predictor.members[0].facts.method)
    held = () if method is None else rows_in_models(method)
    if not held:
        return []
    return [
        f"{' and '.join(held)} hold{'s' * (len(held) == 1)} every training row of {predictor.client} one by one: "
        "features and class of each, not a sum over them. Whoever has this file has that client's features."
    ]


def _data(saved: SavedModel, result: Mapping[str, Any] | None) -> list[str]:
    if result is None:
        return [f"Dataset {saved.facts.dataset}."]
    data = result["dataset"]
    part = result["partition"]
    args = ", ".join(f"{k} {_words(v)}" for k, v in part["args"].items() if v is not None)
    held = values_held_out(result)
    column = part["args"].get("by") or "domain"
    first = (
        f"Held out: {column} {', '.join(held)}. Its rows were not trained on and are the test set."
    )
    return [
        *([first] if held else []),
        f"Dataset {data['slug']}, digest {data['digest']}, {data['ok']:,} {data.get('holds', IMAGES)}.",
        f"Partition {part['scheme']} ({args}), seed {part['seed']}: {part['clients']:,} clients, "
        f"{part['dropped']:,} rows left out; digest {part['digest']}.",
    ]


def _words(value: object) -> str:
    """An argument of a partition; of several values each."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


def _backbones(saved: SavedModel, home: Home) -> list[str]:
    """Each recipe on a line, with the licence of its weights."""
    lines = []
    for key, told in zip(saved.facts.keys, saved.facts.recipes, strict=False):
        if "size" not in told:  # embeddings of somebody's own
            lines.append(
                f"Embeddings {told.get('backbone', key)}, made elsewhere; licence of the weights: not known."
            )
            continue
        recipe = Recipe.from_dict(told)
        try:
            licence = lookup_recorded(recipe, home=home.root).licence
        except FedcacheError:  # a backbone of another installation
            licence = ""
        kind = reads_of(recipe)
        side = (
            f"{recipe.size} px {recipe.resize}, {recipe.interpolation}"
            if recipe.size
            else f"{kind} as they are"
        )
        side = f"{recipe.size} tokens of a text" if recipe.size and kind != IMAGES else side
        lines.append(
            f"Backbone {recipe.backbone}, weights {recipe.weights or 'not known'}, {side}, recipe "
            f"{recipe.digest[:16]}; licence of the weights: {licence or 'not known'}."
        )
    return lines


def accuracy_lines(
    result: Mapping[str, Any], client: str | None = None, clients: ClientColumns | None = None
) -> list[str]:
    """Accuracy of every seed, with a Wilson interval where one model met a known number of rows."""
    a = result["accuracy"]
    protocol = result["protocol"]
    over = {
        "global": "one model on the global test rows",
        "personalised": "each client's model on its own test rows",
        "everywhere": "each client's model on all test rows",
    }[protocol]
    lines = []
    rows = test_rows(result)
    for seed, value in zip(result["seeds"], a["per_seed"], strict=True):
        if value is None:
            continue
        correct = None if rows is None else value * rows
        if correct is None or rows is None or abs(correct - round(correct)) > 1e-6:
            lines.append(f"Seed {seed}: {100 * value:.2f} %, {over}.")
            continue
        ci = scipy.stats.binomtest(round(correct), rows).proportion_ci(LEVEL, method="wilson")
        lines.append(
            f"Seed {seed}: {100 * value:.2f} %, {over} ({rows:,}); 95 % Wilson interval {100 * ci.low:.2f} to "
            f"{100 * ci.high:.2f} %."
        )
    if len(a["per_seed"]) > 1 and a["mean"] is not None:
        lines.append(
            f"Mean of {len(a['per_seed'])} seeds: {100 * a['mean']:.2f} %, standard deviation "
            f"{100 * (a['std'] or 0.0):.2f} points."
        )
    own = None if client is None or clients is None else clients.accuracy_of(client)
    lines += [] if own is None else [f"Client {client}: {100 * own:.2f} %, mean over seeds."]
    return lines or ["No row was scored."]


def test_rows(result: Mapping[str, Any]) -> int | None:
    """Test rows of one seed of a run with one model for all; None where they are not known."""
    confusion = result.get("confusion")
    if result["protocol"] != "global" or confusion is None:
        return None
    total: int = sum(sum(row) for row in confusion)
    seeds = len(result["seeds"])
    if total and total % seeds == 0:
        return total // seeds
    return None


def left_lines(saved: SavedModel, result: Mapping[str, Any] | None) -> list[str]:
    """What a client sent, in numbers and in kind."""
    lines = []
    if result is not None:
        exact = result["traffic"]["exact"]
        each = exact["per_client_round"]
        lines.append(
            f"A client sent {each['up']:,.0f} scalars a round and received {each['down']:,.0f}; all together "
            f"{exact['up_bytes']:,} bytes up and {exact['down_bytes']:,} down over the run."
        )
    facts = saved.facts
    method = METHODS.get(facts.method)
    if method is None:
        return [
            *lines,
            f"{facts.method} is a method of somebody's own; see its code for what it sends.",
        ]
    parts = (
        leaving(method, Sizes(facts.width, facts.width, len(facts.classes)))
        if facts.image is None
        else leaving(method)
    )
    lines += [f"Sent: {part.what} ({part.tells})." for part in parts] or ["Nothing is sent."]
    return lines


def _privacy(result: Mapping[str, Any] | None) -> list[str]:
    if result is None:
        return ["Not known: the run is not at hand."]
    trust = result.get("trust", {})
    lines = describe_trust(trust)
    if trust.get("privacy"):
        return lines
    return [*lines, "No noise was added, so no epsilon bounds what uploads tell."]


def run_result(place: Path) -> Path | None:
    """The result beside a model, None for a file whose run is not at hand."""
    found = place / "result.json" if place.is_dir() else place.parent.parent / "result.json"
    if found.is_file():
        return found
    return None


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
    program = make_program(predictor, home, weights_of(asked)) if kind in PROGRAMS else None
    result = None if found is None else read_result(found)
    columns = None if found is None or result is None else client_columns(result, found.parent)
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
