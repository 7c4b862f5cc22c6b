"""``fedcache backbones``: list frozen backbones, and get, import and check their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import ListedName, Weights, command, pairs
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable, yes_or_no
from fedcache.config import Home
from fedcache.errors import FedcacheError, shell_word
from fedcache.extract.backbones import import_weights, known, locate, lookup, pull
from fedcache.extract.backbones.hugging_face import fetch
from fedcache.extract.planning.plan import check_backbone, memory_of, paths_of
from fedcache.parsing import Facts
from fedcache.plugins import HUGGING_FACE, note_named, plugins

backbones = typer.Typer(
    name="backbones", help="Frozen backbones and their weights.", no_args_is_help=True
)


@command("backbones list", within=backbones)
def backbones_list(weights: Weights = None) -> CommandResult:
    """List every backbone, its width and whether its weights are available.

    Example: fedcache backbones list
    """
    home = Home.from_environment()
    files = paths_of(pairs(weights, "--weights"))
    entries = known(given=files, home=home.root, memory=memory_of(home), offline=home.offline)
    rows = []
    for e in entries:
        size = e["size"] or "native"
        rows.append((e["name"], e["width"], size, yes_or_no(e["ready"]), e["about"]))
    shown = TextTable(
        "", ("backbone", "width", "pixels", "ready", "weights"), rows, right=("width", "pixels")
    )
    # Backbones of other packages are not in `entries`, because fedcache has to import them to know their width.
    data = list(entries)
    lines = []
    for plugin in plugins("backbones").values():
        data.append({"name": plugin.name, "origin": plugin.origin, "place": plugin.place})
        lines.append(f"Plug-in: {plugin.name} ({plugin.origin}), the same as module:{plugin.place}")
    return CommandResult({"backbones": data}, lines, renderables=[shown], listing=True)


@command("backbones info", within=backbones)
def backbones_info(name: ListedName) -> CommandResult:
    """Show one backbone: its native recipe and where fedcache looks for its weights.

    Example: fedcache backbones info clip-rn50
    """
    note_named(name)
    home = Home.from_environment()
    backbone = lookup(name, home=home.root)
    # The status is ready, to be downloaded, or missing with the command that gets the weights.
    try:
        located = locate(
            backbone, given={}, home=home.root, memory=memory_of(home), offline=home.offline
        )
        if located.path or not backbone.files:
            status = f"ready: {located.origin}"
        else:
            status = f"to be downloaded: {located.download}"
    except FedcacheError as error:
        status = f"missing. {error.message} {error.hint}"
    recipe = backbone.recipe.to_dict()
    data = {
        "name": backbone.name,
        "provider": backbone.provider,
        "width": backbone.width,
        "text_width": backbone.text_width,
        "source": backbone.source,
        "licence": backbone.licence,
        "recipe": recipe,
        "status": status,
    }
    lines = [
        f"{backbone.name}: {backbone.source}",
        f"features      {backbone.width}",
        f"weights       {status}",
    ]
    if backbone.licence:
        lines.append(f"licence       {backbone.licence}")
    # The lines above already name the backbone and its weights.
    for key, value in recipe.items():
        if key not in ("backbone", "weights"):
            lines.append(f"{key:<14}{value}")
    return CommandResult(data, lines)


@command("backbones import", within=backbones)
def backbones_import(
    observer: TerminalObserver,
    file: Annotated[
        Path, typer.Argument(help="A checkpoint: safetensors, or a state_dict pickle.")
    ],
    name: Annotated[str, typer.Option("--as", help="Backbone that the weights belong to.")],
    key: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Prefix of the weights to use if a checkpoint holds several sets, e.g. state_dict_ema or "
            "module.encoder_q.",
        ),
    ] = None,
) -> CommandResult:
    """Check a checkpoint and save it as safetensors in $FEDCACHE_HOME/weights.

    Example: fedcache backbones import model_best.pth.tar --as resnet18-quickdraw
    """
    path = import_weights(file, name, Home.from_environment().root, key=key, observer=observer)
    lines = [f"{name}: {path}", f"fedcache extract --backbones {shell_word(name)}"]
    return CommandResult({"name": name, "path": str(path)}, lines)


@command("backbones pull", within=backbones)
def backbones_pull(observer: TerminalObserver, name: ListedName) -> CommandResult:
    """Download published weights, after printing their size and source.

    Example: fedcache backbones pull clip-rn50
    """
    home = Home.from_environment()
    if name.startswith(HUGGING_FACE):
        observer.note(
            f"Downloading from the Hugging Face repository {name.removeprefix(HUGGING_FACE)}"
        )
        fetch(name, offline=home.offline)
    backbone = lookup(name, home=home.root)
    located = locate(
        backbone, given={}, home=home.root, memory=memory_of(home), offline=home.offline
    )
    if located.path is None and located.download is not None:
        observer.note(f"Downloading {located.download}")
        located = pull(backbone, home=home.root, memory=memory_of(home))
    path = None
    if located.path:
        path = str(located.path)
    return CommandResult(
        {"name": name, "path": path, "sha256": located.sha256},
        [f"{name}: {located.origin}", f"sha256 {located.sha256}"],
    )


@command("backbones verify", within=backbones)
def backbones_verify(name: ListedName, weights: Weights = None) -> CommandResult:
    """Load a backbone and run it once, to check its weights, shapes and outputs.

    The check fails if weights are missing, if a shape is wrong or if an output is not finite.

    Example: fedcache backbones verify glyph-clip
    """
    note_named(name)
    home = Home.from_environment()
    data: Facts = check_backbone(name, paths_of(pairs(weights, "--weights")), home)
    features = f"{data['width']} features from {data['origin']}"
    digest = data["sha256"][:16]
    return CommandResult(data, [f"{name}: {features}, sha256 {digest}; all outputs are finite."])
