"""Options that several commands share, declared once, and the environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedcache.config import Home
from fedcache.errors import Exit, FedcacheError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file; default ./fedcache.toml.")]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        help="digits, folder:PATH, torchvision:NAME, paper:NAME, a=SPEC,b=SPEC as domains, or a name given to ingest.",
        show_default=False,
    ),
]
StoreDir = Annotated[
    Path | None,
    typer.Option("--store", help="Store directory or a name of `fedcache ls`, instead of the one under FEDCACHE_HOME."),
]
Backbones = Annotated[
    list[str] | None, typer.Option("--backbones", "-b", help="Names, comma-separated; see `fedcache backbones list`.")
]
Device = Annotated[str | None, typer.Option("--device", help="auto | cpu | cuda; cuda never falls back.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the partition.")]
Scheme = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        "-s",
        help="iid, shards, dirichlet, lda, feature-shift, label-shift, feature-label-shift, few-shot or flesd.",
    ),
]
Clients = Annotated[int | None, typer.Option("--clients", "-m", help="Number of clients.", min=1)]
Alpha = Annotated[float | None, typer.Option("--alpha", help="Concentration of Dirichlet schemes; small is skewed.")]
Shards = Annotated[int | None, typer.Option("--shards", help="Label shards per client (scheme shards).")]
Shots = Annotated[
    int | None, typer.Option("--shots", help="Examples per class (few-shot, feature-shift, feature-label-shift).")
]
Option = Annotated[
    list[str] | None, typer.Option("--option", help="Any other argument of the scheme: key=value; repeatable.")
]
Domain = Annotated[list[str] | None, typer.Option("--domain", help="Only these domains, comma-separated.")]
Weights = Annotated[
    list[str] | None, typer.Option("--weights", help="NAME=FILE, a backbone's local weights; repeatable.")
]
Data = Annotated[list[str] | None, typer.Option("--data", help="NAME=PATH, where a named dataset lies; repeatable.")]
Recipe = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        help="key=value or NAME:key=value, comma-separated: size, resize, interpolation, crop_pct, norm, dtype.",
    ),
]
Layout = Annotated[
    str | None, typer.Option("--layout", help="Meaning of the folder levels, e.g. domain/class or split/class.")
]

EngineName = Annotated[
    str, typer.Option("--engine", help="local, or ray (extra ray): processes of one or several machines, same bytes.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="HOST:PORT of a Ray cluster whose nodes share all paths, joined from one of them; default a local one.",
    ),
]


def home() -> Home:
    """The home of this run."""
    return Home.from_environment()


def listed(values: Sequence[str] | None, name: str = "--backbones") -> tuple[str, ...]:
    """Repeated and comma-separated values as one tuple.

    Args:
        values: as given; None or none at all is an option that was left out.
        name: of the option, for the message.

    Raises:
        FedcacheError: USAGE, for an option that was given and names nothing, as ``,``.
    """
    found = tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())
    if values and not found:
        raise FedcacheError(
            Exit.USAGE, f"{name} {','.join(values)!r} names nothing.", f"{name} NAME,NAME, or leave {name} out"
        )
    return found


def pairs(values: Sequence[str] | None, name: str, *, split: bool = False, once: bool = False) -> dict[str, str]:
    """``key=value`` options as a dict.

    Args:
        values: as given.
        name: of the option, for the message.
        split: whether one value may hold several pairs, comma-separated.
        once: whether a key that comes twice is refused; else the last one holds.

    Raises:
        FedcacheError: USAGE, for a pair without ``=``, or a repeated key under ``once``.
    """
    out: dict[str, str] = {}
    for value in listed(values, name) if split else values or ():
        key, sign, rest = value.partition("=")
        if not sign or not key.strip() or not rest.strip():
            example = {"--sweep": "lr=0.1,0.01", "--set": "lr=0.1"}.get(name, "key=value")
            raise FedcacheError(Exit.USAGE, f"{name} {value!r} is not key=value.", f"For example {name} {example}")
        if once and key.strip() in out:
            raise FedcacheError(
                Exit.USAGE,
                f"{name} {key.strip()} is given twice.",
                f"Leave one out; several values in turn:  fedcache grid --sweep {key.strip()}=.."
                if name == "--set"
                else f"Give its values at once: {name} {key.strip()}={out[key.strip()]},{rest.strip()}",
            )
        out[key.strip()] = rest.strip()
    return out
