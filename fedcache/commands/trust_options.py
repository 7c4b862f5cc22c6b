"""The options of ``train`` and ``grid`` that say what is done with uploads."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Uploads"

Aggregate = Annotated[
    str | None,
    typer.Option(
        "--aggregate",
        help="mean | median | trimmed:0.1 | geomedian | krum | multikrum:5 | nnm+RULE | clip:1.0: how uploads are "
        "taken together; default the method's mean.",
        rich_help_panel=PANEL,
    ),
]
AttackOption = Annotated[
    str | None,
    typer.Option(
        "--attack",
        help="sign-flip | ipm | alie | mimic | gaussian | label-flip | nan, as name:share:scale: clients that lie.",
        rich_help_panel=PANEL,
    ),
]
OnBad = Annotated[
    str | None,
    typer.Option(
        "--on-bad-update", help="fail | reject: malformed uploads end the run, or are left out.", rich_help_panel=PANEL
    ),
]
Byzantine = Annotated[
    float | None,
    typer.Option(
        "--byzantine", help="The share of liars that --aggregate expects; default 0.2.", rich_help_panel=PANEL
    ),
]
MaxNorm = Annotated[
    float | None,
    typer.Option("--max-update-norm", help="Updates with a larger norm are malformed.", rich_help_panel=PANEL),
]
Clip = Annotated[
    float | None,
    typer.Option("--dp-clip", help="Differential privacy: the norm updates are cut to.", rich_help_panel=PANEL),
]
Noise = Annotated[
    float | None,
    typer.Option("--dp-noise", help="Gaussian noise on their sum, as a multiple of --dp-clip.", rich_help_panel=PANEL),
]
Delta = Annotated[
    float | None,
    typer.Option("--dp-delta", help="The delta that epsilon is told for; default 1e-5.", rich_help_panel=PANEL),
]
