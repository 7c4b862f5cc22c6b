"""The options of ``fedcache grid`` that ``fedcache train`` does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from fedcache.commands.options import POINTS, complete_methods
from fedcache.config import COMPUTING, RESULTS, option
from fedcache.grids.sampling import PRUNERS, TRIALS


@dataclass(frozen=True)
class GridOptions:
    """Options that ``grid`` has in addition to those of ``train``."""

    ready: str | None = option(
        None,
        "Name of a predefined grid, from the ablations of the papers; `--ready list` shows all.",
        POINTS,
        default_text="none",
    )
    sweep: tuple[str, ...] = option(
        (),
        "key=v1,v2: values of a hyperparameter, or of rounds, participation, clients, "
        "alpha, shards, shots, aggregate or attack. --sampler optuna also takes a range: "
        "key=log:1e-4..1 or key=8..64. A value with a comma is quoted: 'hold_out=\"Delft, NL\",Rome'. "
        "Repeatable.",
        POINTS,
        whole=True,
        default_text="the values of --ready",
        common=True,
    )
    sampler: str = option(
        "grid",
        "How configurations are chosen: `grid` trains all of them; random:N[:SEED] trains N different ones, drawn at "
        "random; optuna[:tpe|random|gp[:SEED]] searches with --trials configurations, one after another, on "
        "validation rows (needs the pip extra optuna).",
        POINTS,
    )
    retrain: bool = option(
        False,
        "Select one configuration per method on validation rows, then train it again on all "
        "training rows. Its test accuracy after the second training is the final result.",
        POINTS,
        common=True,
    )
    score: str | None = option(
        None,
        "Accuracy by which configurations are ranked: `client-mean` (mean over clients) or `pooled` (over all test "
        "rows).",
        POINTS,
        choices=("client-mean", "pooled"),
        default_text="the primary metric if all methods have the same one, else client-mean",
    )
    trials: int | None = option(
        None,
        "With --sampler optuna: number of configurations to try. A larger number than before continues the "
        "earlier search.",
        POINTS,
        minimum=1,
        default_text=str(TRIALS),
    )
    pruner: str = option(
        "none",
        "With --sampler optuna: stop a trial early if its validation accuracy falls behind. It is checked only in "
        "rounds that --eval-every scores.",
        POINTS,
        choices=PRUNERS,
    )
    jobs: int = option(
        1,
        "Number of processes. Each process trains one configuration at a time. Has no effect on methods that train "
        "several configurations at once in one process.",
        COMPUTING,
        minimum=1,
        common=True,
    )
    exact: bool = option(
        False,
        "Train every configuration separately, which gives results bit-identical to `fedcache train`.",
        COMPUTING,
    )
    save_models: str = option(
        "best",
        "Trained models to keep: `all`, `none`, or `best` (the best of each method and held-out value).",
        RESULTS,
        choices=("best", "all", "none"),
    )


Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Methods, comma-separated. They can also be given as arguments.",
        rich_help_panel=POINTS,
        show_default="the values of --ready",
        autocompletion=complete_methods,
    ),
]
