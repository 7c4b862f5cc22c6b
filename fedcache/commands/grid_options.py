"""The options of ``fedcache grid`` besides those of ``train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from fedcache.commands.help import COMMON
from fedcache.commands.options import POINTS, complete_methods
from fedcache.config import COMPUTING, RESULTS, option
from fedcache.grids.sampling import PRUNERS, TRIALS


@dataclass(frozen=True)
class GridOptions:
    """What ``grid`` takes besides what ``train`` does."""

    retrain: bool = option(
        False,
        "Train what was chosen by --validation again, on all training rows: its test figures are the result.",
        POINTS,
        common=True,
    )
    score: str | None = option(
        None,
        "What points are ranked and shown by: the mean over clients, or pooled over test rows.",
        POINTS,
        choices=("client-mean", "pooled"),
        default_text="the methods' headline where it is alike for all, else client-mean",
    )
    trials: int | None = option(
        None,
        "With --sampler optuna: how many points are tried; more than before go on.",
        POINTS,
        minimum=1,
        default_text=str(TRIALS),
    )
    pruner: str = option(
        "none",
        "With --sampler optuna: stop trials that are behind on validation rows, in rounds that --eval-every "
        "scores.",
        POINTS,
        choices=PRUNERS,
    )
    jobs: int = option(
        1,
        "Processes that train points alone; for what cannot be computed together.",
        COMPUTING,
        minimum=1,
        common=True,
    )


Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Methods, comma-separated; they may also be named without this option.",
        rich_help_panel=POINTS,
        show_default="those of --ready",
        autocompletion=complete_methods,
    ),
]
Ready = Annotated[
    str | None,
    typer.Option(
        "--ready",
        help="A grid of the papers' ablations by name; list shows them.",
        rich_help_panel=POINTS,
        show_default="none",
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        help="key=v1,v2: a hyperparameter, or rounds, participation, clients, alpha, shards, shots, aggregate, "
        "attack; of --sampler optuna also key=log:1e-4..1 or 8..64. Repeatable.",
        rich_help_panel=POINTS,
        show_default="those of --ready",
    ),
    COMMON,
]
Sampler = Annotated[
    str,
    typer.Option(
        "--sampler",
        help="grid; random:N[:SEED], N points drawn without repeats; or optuna[:tpe|random|gp[:SEED]], --trials points "
        "chosen one after another by --validation (extra optuna).",
        rich_help_panel=POINTS,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Compute every point alone, with the bits of its single run.",
        rich_help_panel=COMPUTING,
    ),
]
WhichModels = Annotated[
    str,
    typer.Option(
        "--save-models",
        help="Which trained models stay: best (of each method, and of each held-out value), all, or none.",
        metavar="best|all|none",
        rich_help_panel=RESULTS,
    ),
]
