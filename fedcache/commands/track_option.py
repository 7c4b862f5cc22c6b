"""The option of ``train`` and ``grid`` that says where else results are written."""

from __future__ import annotations

from typing import Annotated

import typer

Track = Annotated[
    str | None,
    typer.Option(
        "--track",
        help="tensorboard[:DIR]: also write accuracy, bytes and settings of every seed there; default "
        "<runs>/tensorboard (extra tensorboard).",
    ),
]
