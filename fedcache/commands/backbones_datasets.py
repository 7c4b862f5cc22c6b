"""``fedcache backbones`` and ``datasets``: what there is, and whether it would work right now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands import options as o
from fedcache.commands.output import Answer, Story, answer, table

backbones = typer.Typer(name="backbones", help="Frozen backbones and their weights.", no_args_is_help=True)
datasets = typer.Typer(name="datasets", help="Datasets and where they come from.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name from the list.")]


@backbones.command("list")
def backbones_list(weights: o.Weights = None, json: o.Json = False) -> None:
    """Every backbone, its width and whether its weights are at hand.

    Example: fedcache backbones list
    """

    def call(story: Story) -> Answer:
        from fedcache.extract.backbones import known
        from fedcache.extract.planning.plan import memory_of

        home = o.home()
        given = {k: Path(v).expanduser() for k, v in o.pairs(weights, "--weights").items()}
        entries = known(given=given, home=home.root, memory=memory_of(home), offline=home.offline)
        rows = [
            (e["name"], e["width"], e["size"] or "native", "yes" if e["ready"] else "no", e["about"]) for e in entries
        ]
        shown = table("", ("backbone", "width", "pixels", "ready", "weights"), rows, right=("width", "pixels"))
        return Answer({"backbones": entries}, [], renderables=[shown])

    answer("backbones list", json, call)


@backbones.command("info")
def backbones_info(name: Name, json: o.Json = False) -> None:
    """One backbone: its native recipe and where its weights are looked for.

    Example: fedcache backbones info clip-rn50
    """

    def call(story: Story) -> Answer:
        from fedcache.errors import FedcacheError
        from fedcache.extract.backbones import locate, lookup
        from fedcache.extract.planning.plan import memory_of

        home = o.home()
        backbone = lookup(name, home=home.root)
        try:
            found = locate(backbone, given={}, home=home.root, memory=memory_of(home), offline=home.offline)
            status = (
                f"ready: {found.origin}" if found.path or not backbone.files else f"to be downloaded: {found.download}"
            )
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
        lines = [f"{backbone.name}: {backbone.source}", f"features      {backbone.width}", f"weights       {status}"]
        lines += [f"licence       {backbone.licence}"] if backbone.licence else []
        lines += [f"{key:<14}{value}" for key, value in recipe.items() if key not in ("backbone", "weights")]
        return Answer(data, lines)

    answer("backbones info", json, call)


@backbones.command("import")
def backbones_import(
    file: Annotated[Path, typer.Argument(help="A checkpoint: safetensors, or a state_dict pickle.")],
    name: Annotated[str, typer.Option("--as", help="The backbone whose weights these are.")],
    json: o.Json = False,
) -> None:
    """Check a checkpoint and keep it as safetensors under $FEDCACHE_HOME/weights.

    Example: fedcache backbones import model_best.pth.tar --as resnet18-quickdraw
    """

    def call(story: Story) -> Answer:
        from fedcache.extract.backbones import import_weights

        path = import_weights(file, name, o.home().root)
        return Answer({"name": name, "path": str(path)}, [f"{name}: {path}", f"fedcache extract --backbones {name}"])

    answer("backbones import", json, call)


@backbones.command("pull")
def backbones_pull(name: Name, json: o.Json = False) -> None:
    """Download published weights; the size and source are printed first.

    Example: fedcache backbones pull clip-rn50
    """

    def call(story: Story) -> Answer:
        from fedcache.errors import Exit, FedcacheError
        from fedcache.extract.backbones import locate, lookup, pull
        from fedcache.extract.planning.plan import memory_of

        home = o.home()
        backbone = lookup(name, home=home.root)
        found = locate(backbone, given={}, home=home.root, memory=memory_of(home), offline=home.offline)
        if found.path is None and found.download is not None:
            if home.offline:
                raise FedcacheError(
                    Exit.ENVIRONMENT, "FEDCACHE_OFFLINE is set.", "Unset it, or give --weights NAME=FILE."
                )
            story.note(f"Downloading {found.download}")
            found = pull(backbone, home=home.root, memory=memory_of(home))
        path = str(found.path) if found.path else None
        return Answer(
            {"name": name, "path": path, "sha256": found.sha256}, [f"{name}: {found.origin}", f"sha256 {found.sha256}"]
        )

    answer("backbones pull", json, call)


@backbones.command("verify")
def backbones_verify(name: Name, weights: o.Weights = None, json: o.Json = False) -> None:
    """Load a backbone and run it once: weights complete, shapes right, output finite.

    Example: fedcache backbones verify glyph-clip
    """

    def call(story: Story) -> Answer:
        from fedcache.extract.planning.plan import check_backbone

        home = o.home()
        given = {k: Path(v).expanduser() for k, v in o.pairs(weights, "--weights").items()}
        data: dict[str, Any] = check_backbone(name, given, home)
        return Answer(
            data, [f"{name}: {data['width']} features from {data['origin']}, sha256 {data['sha256'][:16]}; finite."]
        )

    answer("backbones verify", json, call)


@datasets.command("list")
def datasets_list(json: o.Json = False) -> None:
    """Every dataset and what it needs.

    Example: fedcache datasets list
    """

    def call(story: Story) -> Answer:
        from fedcache.extract.datasets import known

        entries = known(data=o.home().data)
        rows = [(e["name"], e["about"], e["needs"], "yes" if e["ready"] else "no") for e in entries]
        return Answer(
            {"datasets": entries}, [], renderables=[table("", ("dataset", "what it is", "needs", "ready"), rows)]
        )

    answer("datasets list", json, call)


@datasets.command("info")
def datasets_info(name: Name, data: o.Data = None, layout: o.Layout = None, json: o.Json = False) -> None:
    """One dataset: what it is; a spec such as folder:PATH is read and counted.

    Example: fedcache datasets info paper:cifar10
    """

    def call(story: Story) -> Answer:
        from fedcache.config import ExtractConfig
        from fedcache.extract.datasets import info, open_dataset
        from fedcache.extract.datasets.papers import full
        from fedcache.extract.planning.plan import memory_of, roots_of

        home = o.home()
        roots = roots_of(ExtractConfig(data=o.pairs(data, "--data")), home)
        found = info(full(name), roots=roots, data=home.data)
        if name.startswith("folder:"):
            read = open_dataset(name, memory=memory_of(home), roots=roots, data=home.data, layout=layout)
            found = {
                **found,
                "name": name,
                "reading": read.reading,
                "images": len(read),
                "classes": list(read.classes),
                "domains": list(read.domains),
                "digest": read.digest,
            }
        return Answer(found, [line for key, value in found.items() for line in _told(key, value)])

    answer("datasets info", json, call)


def _told(key: str, value: Any) -> list[str]:
    """One line, or one for each of a list of sentences or tables."""
    if not isinstance(value, list) or key in ("classes", "domains", "splits"):
        return [f"{key:<12}{', '.join(value) if isinstance(value, list) else value}"]
    rows = [_flat(row) for row in value]
    return [f"{key if i == 0 else '':<12}{row}" for i, row in enumerate(rows)]


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(held)}" for key, held in value.items() if held)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@datasets.command("check")
def datasets_check(
    name: Name,
    path: Annotated[Path, typer.Argument(help="The folder into which it was unpacked.")],
    json: o.Json = False,
) -> None:
    """What is missing or miscounted in a copy of a paper's dataset (exit 4 missing, 5 wrong).

    Example: fedcache datasets check cifar10 ~/data/cifar10
    """

    def call(story: Story) -> Answer:
        from fedcache.errors import Exit
        from fedcache.extract.datasets.papers import check

        report = check(name.removeprefix("paper:"), path)
        found = [f"missing: {text}" for text in report["missing"]] + [f"wrong: {text}" for text in report["wrong"]]
        counts = ", ".join(f"{n:,} {word}" for word, n in report["counts"].items())
        lines = [f"{report['name']} in {report['path']}: {report['layout'] or 'no layout is recognised'}"]
        lines += [f"counts: {counts}"] if counts else []
        lines += found or ["Everything is there."]
        if found:
            lines.append(f"fedcache datasets info {report['name']}   says how to get it")
        code = Exit.STORE if report["missing"] else Exit.CORRUPT if report["wrong"] else Exit.OK
        return Answer(report, lines, code=code)

    answer("datasets check", json, call)


@datasets.command("pull")
def datasets_pull(
    name: Name,
    mirror: Annotated[
        str | None, typer.Option("--from", help="An address below which the same files lie (paper:NAME).")
    ] = None,
    json: o.Json = False,
) -> None:
    """Download a dataset that is published at a lasting address; nothing is ever downloaded unasked.

    Example: fedcache datasets pull cifar10
    """

    def call(story: Story) -> Answer:
        from fedcache.errors import Exit, FedcacheError
        from fedcache.extract.datasets import pull
        from fedcache.extract.datasets.papers import check, full

        home = o.home()
        if home.offline:
            raise FedcacheError(Exit.ENVIRONMENT, "FEDCACHE_OFFLINE is set.", "Unset it to download.")
        spec = full(name)
        folder = pull(spec, data=home.data, say=story.note, mirror=mirror)
        lines = [str(folder)]
        left: list[str] = []
        if spec.startswith("paper:"):
            report = check(spec.removeprefix("paper:"), folder)
            left = report["missing"]
            lines += [f"layout: {report['layout']}"] if report["layout"] else []
            lines += [f"still missing: {text}" for text in left]
        lines.append(
            f"fedcache datasets info {name}   says how to get the rest"
            if left
            else f"fedcache extract --dataset {spec}"
        )
        return Answer({"name": spec, "path": str(folder), "missing": left}, lines)

    answer("datasets pull", json, call)
