"""Commands about stores under ``FEDCACHE_HOME``: ``ls``, ``inspect``, ``verify``, ``repair``, ``gc``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer

from fedcache.commands.options import (
    OF_FIELDS,
    REMOTE,
    Dataset,
    StorePlace,
    command,
    one_value,
    split_list,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import FILE_NAME, Home, read_file
from fedcache.errors import Exit, FedcacheError, UsageError, unknown
from fedcache.extract.augment import described
from fedcache.extract.planning.find_store import locate_store, need_path, resolve_path
from fedcache.extract.planning.plan import quoted
from fedcache.extract.recipe import IMAGES, held_by, part_read
from fedcache.parsing import Facts, Record, counted, parse_toml, visible
from fedcache.report.find_runs import gather
from fedcache.report.store_card import rows_of_splits
from fedcache.runs.garbage import DEFAULT, KINDS, find_garbage, remove
from fedcache.runs.partitions import check_partitions
from fedcache.runs.privacy_ledger import (
    LEDGER,
    epsilon_words,
    read_releases,
    totals,
    totals_of_datasets,
)
from fedcache.store.catalog import size_of
from fedcache.store.join import rows_of_part
from fedcache.store.lock import write_output
from fedcache.store.manifest import QUARANTINE, VANISHED, join_command, part_of
from fedcache.store.store import Store, finished_arrays
from fedcache.store.verify import VerifyReport
from fedcache.store.verify import repair as repair_store
from fedcache.store.verify import verify as verify_store


@command("ls")
def ls(
    observer: TerminalObserver,
    dataset: Dataset = None,
    privacy: Annotated[
        bool,
        typer.Option(
            "--privacy", help="List the total privacy budget that private runs have spent."
        ),
    ] = False,
) -> CommandResult:
    """List stores and their contents; --dataset shows one dataset.

    `fedcache runs list` lists runs.

    --privacy shows the total epsilon of all runs with --dp-noise on the clients of one partition, over all seeds,
    grid configurations and repeats. For a dataset with several partitions it also shows the total epsilon of any
    single row. Simulations (--dp-seed) release nothing and are not counted.

    Example: fedcache ls --dataset digits
    """
    if privacy and dataset is not None:
        raise UsageError("ls --privacy does not take --dataset.", "fedcache ls --privacy")
    if privacy:
        return list_privacy(observer)
    home = Home.from_environment()
    entries: list[Facts] = []
    rows: list[dict[str, str]] = []
    listed = []
    if dataset is not None:
        listed = [need_path(home, dataset=dataset)]
    elif home.stores.is_dir():
        listed = sorted(home.stores.glob("*.zarr"))
    for path in listed:
        # A store that cannot be opened is listed with its problem; the others are still shown.
        try:
            store = Store.open(path, part=True)
        except FedcacheError as error:
            observer.warn(f"{path.name}: {error.message}")
            entries.append({"name": path.name, "path": str(path), "problem": error.message})
            rows.append({"store": path.name, "rows": error.message})
            continue
        part = part_of(store.dataset)
        arrays = sorted(finished_arrays(store))
        partitions = sorted(store.partitions)
        counts = _group_counts(store, observer)
        size = size_of(path)
        entries.append(
            {
                "name": path.name,
                "path": str(path),
                "dataset": store.dataset["slug"],
                "images": store.rows,
                "ok": store.rows_ok,
                "arrays": arrays,
                "text": sorted(store.texts),
                "groups": counts,
                "partitions": partitions,
                "bytes": size,
            }
        )
        held_rows = f"{store.rows_ok:,} of {store.rows:,}"
        if part is not None:
            entries[-1]["part"] = [part.number, part.of]
            covered, bad = rows_of_part(store)
            held_rows = f"{covered - len(bad):,} of {store.rows:,}, {part}"
        rows.append(
            {
                "store": path.name,
                "rows": held_rows,
                "arrays": ", ".join(arrays),
                "groups": _value_counts(counts),
                "partitions": ", ".join(partitions),
                "size": f"{size / 1e6:,.1f} MB",
            }
        )
    if not entries:
        hint = "fedcache extract --dataset digits --backbones efficientnet-lite0"
        return CommandResult(
            {"entries": []}, [f"No store under {home.stores} yet.", hint], listing=True
        )
    # Without any group or partition, their columns are left out.
    columns = ["store", "rows", "arrays", "groups", "partitions", "size"]
    for name in ("groups", "partitions"):
        if not any(row.get(name) for row in rows):
            columns.remove(name)
    cells = [[row.get(name) for name in columns] for row in rows]
    shown = TextTable("", columns, cells, right=("rows", "size"))
    return CommandResult({"entries": entries}, renderables=[shown], listing=True)


def _group_counts(store: Store, observer: TerminalObserver) -> dict[str, int]:
    """Number of values of each group of a store; a damaged group is a warning."""
    counts = {}
    for name in store.groups:
        try:
            counts[name] = len(store.group(name).words)
        except FedcacheError as error:
            observer.warn(error.message)
    return counts


def list_privacy(observer: TerminalObserver) -> CommandResult:
    """The answer of ``ls --privacy``: the total privacy loss of the runs in the ledger, by partition and by dataset."""
    home = Home.from_environment()
    releases = read_releases(home.root / LEDGER)
    known = {(r.run, r.seed) for r in releases}
    for entry in gather([], home.runs).entries:
        cost = entry.result.get("trust", {}).get("privacy", {})
        run = entry.result["digest"][:16]
        drawn = {(run, seed) for seed in entry.result["seeds"]}
        is_private = cost.get("noise") and not cost.get("simulation", True)
        if is_private and not drawn <= known:
            observer.warn(
                f"Noise of the private run {run} is missing from the ledger: lines were deleted, or the run was "
                "trained under another FEDCACHE_HOME. More privacy was spent than this list shows."
            )
    # One row for each partition, then one for each dataset whose rows are in several partitions.
    spent = totals(releases)
    of_datasets = totals_of_datasets(releases)
    several = [t for t in of_datasets if t.partitions > 1]
    labelled: list[tuple[Any, str, str]] = [(t, t.partition[:8], f"{t.clients:,}") for t in spent]
    labelled += [(t, f"all {t.partitions:,}", "") for t in several]
    rows = []
    for t, partition, clients in labelled:
        counts = [f"{count:,}" for count in (t.runs, t.releases, t.rounds)]
        delta = f"{t.delta:g}"
        rows.append((t.dataset, partition, clients, *counts, delta, epsilon_words(t)))
    if several:
        observer.note(
            "A line `all` bounds the privacy loss of any single data row over all partitions of a dataset. "
            "If every partition keeps all rows of a client together, the line also bounds the loss of this client. "
            "Partitions that differ only in --validation do this."
        )
    names = ("dataset", "partition", "clients", "runs", "seeds", "rounds", "delta", "epsilon")
    shown = []
    lines = []
    if rows:
        shown.append(TextTable("", names, rows, right=names[2:]))
    else:
        lines = [
            "There is no private run in this fedcache home.",
            "fedcache train --method fedavg --dp-clip 1 --dp-noise 1 --dp-allow evaluation",
        ]
    data = {
        "entries": [asdict(total) for total in spent],
        "datasets": [asdict(total) for total in of_datasets],
        "releases": [asdict(r) for r in releases],
    }
    return CommandResult(data, lines, renderables=shown, listing=True)


FIRST = 20
"""Maximum number of unreadable rows that ``inspect`` lists; the quarantine file and ``--json`` list all."""

Where = Annotated[
    str | None,
    typer.Argument(
        help="A store, its name, or the address of a published store. Default: the only store.",
        autocompletion=OF_FIELDS["store"],
    ),
    REMOTE,
]


def _path_of(
    store: str | None, named: str | None, dataset: str | None, observer: TerminalObserver
) -> Path:
    """The directory of the store that a command names; if it names none, that of the only store of the home."""
    home = Home.from_environment()
    path = one_value(store, named, "--store")
    return need_path(home, path=path, dataset=dataset, observer=observer)


@command("inspect")
def inspect(
    observer: TerminalObserver,
    store: Where = None,
    named: StorePlace = None,
    dataset: Dataset = None,
) -> CommandResult:
    """Show the contents of a store: dataset, recipes, how features were computed, unfinished extractions.

    Example: fedcache inspect
    """
    opened = Store.open(_path_of(store, named, dataset, observer), part=True)
    part = part_of(opened.dataset)
    infos = finished_arrays(opened)
    samples = opened.samples
    # Readable rows of each split.
    splits = dict(rows_of_splits(samples))
    # Rows that vanished from the dataset keep their number, but are not counted.
    listed = opened.quarantined()
    if part is not None:
        covered, listed = rows_of_part(opened)
    bad = [entry for entry in listed if entry["reason"] != VANISHED]
    vanished = len(listed) - len(bad)
    arrays = []
    for key, info in infos.items():
        arrays.append(
            {
                "name": key,
                "backbone": info.recipe.get("backbone"),
                "shape": list(info.shape),
                "dtype": info.dtype,
                "chunk_rows": info.chunk_rows,
                "chunks": len(info.chunks),
                "recipe": info.recipe,
                "how": info.how,
            }
        )
    unfinished = [u for u in opened.unfinished() if u["name"] not in infos]
    counts = _group_counts(opened, observer)
    data = {
        "path": opened.place,
        "dataset": opened.dataset,
        "images": opened.rows - vanished,
        "ok": opened.rows_ok,
        "vanished": vanished,
        "classes": list(samples.classes),
        "domains": list(samples.domains),
        "splits": splits,
        "bad": bad,
        "arrays": arrays,
        "unfinished": unfinished,
        "groups": counts,
        "text": sorted(opened.texts),
        "text_templates": {name: opened.templates(name) for name in sorted(opened.texts)},
        "partitions": sorted(opened.partitions),
    }
    holds = held_by(info.recipe for info in infos.values())
    # Names come from files and folders, and may contain control characters.
    classes = [visible(name) for name in samples.classes[:12]]
    more = ""
    if len(samples.classes) > 12:
        more = " ..."
    of_splits = ", ".join(f"{count:,} {name}" for name, count in splits.items() if count)
    rows = opened.rows - vanished
    slug = opened.dataset["slug"]
    lines = [
        opened.place,
        f"dataset     {slug}  {opened.dataset['digest']}",
        f"{holds:<12}{opened.rows_ok:,} readable of {rows:,}; {of_splits}",
    ]
    if part is not None:
        data["part"] = [part.number, part.of]
        join = join_command(opened.path)
        lines.insert(1, f"part        {part.number} of {part.of}: {covered:,} rows; {join}")
    # The first unreadable rows with their reasons; the file next to the store has all.
    if bad:
        quarantine = opened.path / QUARANTINE
        lines.append(f"unreadable  {len(bad):,}: {quarantine}")
    for entry in bad[:FIRST]:
        row = entry["row"]
        name = visible(entry["name"])
        reason = visible(entry["reason"])
        lines.append(f"            row {row:,} ({name}): {reason}")
    if len(bad) > FIRST:
        others = len(bad) - FIRST
        lines.append(f"            and {others:,} more, which {QUARANTINE} and --json list")
    if vanished:
        lines.append(f"vanished    {vanished:,} rows of {holds} that were removed from the dataset")
    if "held_out" in opened.dataset:
        lines.append(f"test set    {opened.dataset['held_out']}")
    shown_classes = ", ".join(classes)
    domains = ", ".join(map(visible, samples.domains))
    partitions = ", ".join(sorted(opened.partitions)) or "none"
    lines += [
        f"classes     {len(samples.classes)}: {shown_classes}{more}",
        f"domains     {domains}",
    ]
    if counts:
        lines.append(f"groups      {_value_counts(counts)}")
    lines += text_of(opened) or ["text        none"]
    lines.append(f"partitions  {partitions}")
    for array in unfinished:
        name = array["name"]
        kept = f"{array['kept']} of {array['chunks']}"
        lines.append(
            f"unfinished  {name}: {kept} chunks; to resume, repeat the extract, ingest or join command that began it"
        )
    tables = []
    if arrays:
        tables.append(table_of_arrays(arrays))
    return CommandResult(data, lines, renderables=tables)


def _value_counts(groups: Mapping[str, int]) -> str:
    """Groups with their numbers of values."""
    return ", ".join(f"{name} ({counted(count, 'value')})" for name, count in groups.items())


def table_of_arrays(arrays: Sequence[Record]) -> Any:
    """A table of a store's arrays: shape, dtype, preprocessing, weights, and how they were computed."""
    rows = []
    for a in arrays:
        recipe = a["recipe"]
        computed = ", ".join(f"{k} {v}" for k, v in sorted(a["how"].items()))
        shape = "x".join(map(str, a["shape"]))
        weights = str(recipe.get("weights", ""))[:12]
        prepared = preprocessing_of(recipe)
        rows.append((a["name"], shape, a["dtype"], prepared, weights, computed))
    return TextTable(
        "", ("array", "shape", "dtype", "preprocessing", "weights", "how it was computed"), rows
    )


def preprocessing_of(recipe: Record) -> str:
    """The preprocessing of a recipe in words; its steps differ for images, texts, sounds and rows."""
    side = recipe.get("size")
    if side is None:  # ingested embeddings: fedcache did no preprocessing
        return "as given"
    kind = held_by([recipe])
    if kind == IMAGES:
        resize = recipe.get("resize")
        interpolation = recipe.get("interpolation")
        activation = recipe.get("activation")
        return f"{resize} {side}, {interpolation}, {activation}" + views_of(recipe)
    words = f"{kind} as they are"
    # The size is 0 for a user's module of texts or rows, which reads whole items.
    if side:
        pooling = recipe.get("pooling")
        words = f"{kind}, {part_read(recipe)}, {pooling}"
    rate = recipe.get("rate")
    if rate:
        words += f", {rate:,} Hz"
    prompt = recipe.get("prompt")
    if prompt:
        words += f", prompt {visible(prompt)}"
    return words + views_of(recipe)


def views_of(recipe: Record) -> str:
    """The end of a phrase: number of views of an image, and augmentation; "" if the plain image is the only view."""
    # Ingested embeddings have no decoder; fedcache drew no views of them.
    if recipe.get("views", 1) == 1 or "decoder" not in recipe:
        return ""
    augmentation = described(str(recipe.get("augment", "")))
    return f", {recipe['views']} views by {augmentation}"


def text_of(store: Store) -> list[str]:
    """The text features of each backbone: the current templates, and how many others are stored."""
    lines = []
    for name, entries in sorted(store.texts.items()):
        # The last templates are the current ones; the others are kept, so that they need not be computed again.
        templates = entries[-1]["templates"]
        current = quoted(templates) or "from the ingested file"
        change = ""
        if templates:
            change = " (change with fedcache extract --text TEMPLATE)"
        others = len(entries) - 1
        more = ""
        if others:
            more = f"; {others} more stored"
        lines.append(f"text        {name}: {current}{change}{more}")
    return lines


@command("verify")
def verify(
    observer: TerminalObserver,
    store: Where = None,
    named: StorePlace = None,
    dataset: Dataset = None,
) -> CommandResult:
    """Read every byte of a store and compare it with the manifest.

    Example: fedcache verify
    """
    path = _path_of(store, named, dataset, observer)
    report = verify_store(path)
    if report.ok:  # else the report already names the damaged file
        partitions = check_partitions(Store.open(path, part=True))
        for file, problem in partitions.items():
            report.add(file, problem)
    return CommandResult(report.to_dict(), report.lines(), _exit_of(report))


def _exit_of(report: VerifyReport) -> Exit:
    """The exit code of a check: 0, or 5 for a store with damaged files."""
    if report.ok:
        return Exit.OK
    return Exit.CORRUPT


@command("repair")
def repair(
    observer: TerminalObserver,
    store: Where = None,
    named: StorePlace = None,
    dataset: Dataset = None,
) -> CommandResult:
    """Remove damaged files that can be recomputed; the store's extract command then recomputes only these files.

    Example: fedcache repair
    """
    path = _path_of(store, named, dataset, observer)
    done = repair_store(path)
    report = verify_store(path)
    lines = [*(done or ["Nothing was repaired."]), *report.lines()]
    return CommandResult({"repaired": done, **report.to_dict()}, lines, _exit_of(report))


@command("gc")
def gc(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Kinds of files, comma-separated: leftovers | given-up | old-runs | old-stores | models. "
            "Default: leftovers,given-up.",
        ),
    ] = None,
    days: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Days without progress after which unfinished work counts as abandoned.",
        ),
    ] = 7.0,
    delete: Annotated[
        bool,
        typer.Option(
            "--delete", help="Delete the listed files; without this option nothing is deleted."
        ),
    ] = False,
) -> CommandResult:
    """List files that are no longer used; --delete removes them.

    leftovers are files of killed processes and files that no manifest lists. given-up are idle runs without a result,
    unfinished extractions and idle copies of published stores. old-runs are results of an older version of the code.
    old-stores are earlier contents of a dataset of the same name. models are the trained models of finished runs;
    their results are kept.

    Example: fedcache gc --kind leftovers,given-up,old-runs
    """
    chosen = split_list(kind, "--kind") or DEFAULT
    for name in chosen:
        if name not in KINDS:
            raise unknown("--kind", name, KINDS)
    garbage = find_garbage(Home.from_environment(), chosen, idle_days=days)
    if not garbage:
        line = f"Nothing to delete among {', '.join(chosen)}."
        return CommandResult({"garbage": [], "bytes": 0, "deleted": delete}, [line])
    total = sum(g.bytes for g in garbage)
    size = f"{counted(len(garbage), 'item')}, {total / 1e6:,.1f} MB"
    data = {"garbage": [g.to_dict() for g in garbage], "bytes": total, "deleted": delete}
    rows = [(str(g.path), g.kind, g.why, f"{g.bytes / 1e6:,.1f}") for g in garbage]
    shown = TextTable("", ("path", "kind", "why", "MB"), rows, right=("MB",))
    if delete:
        remove(garbage)
        return CommandResult(data, [f"Deleted {size}."], renderables=[shown])
    # The command that deletes exactly the listed files.
    words = ["fedcache", "gc"]
    if tuple(chosen) != tuple(DEFAULT):
        words += ["--kind", ",".join(chosen)]
    command = shlex.join([*words, "--delete"])
    return CommandResult(
        data, [f"{size}. Delete them:  {command}"], renderables=[shown], listing=True
    )


# ``fedcache use``: choose the store that commands in a folder use without ``--dataset`` and ``--store``.

SECTION = "train"
"""The section of fedcache.toml into which ``fedcache use`` writes the store."""


@command("use")
def use(
    observer: TerminalObserver,
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="A store of `fedcache ls`, or the name of its dataset.",
            autocompletion=OF_FIELDS["store"],
        ),
    ],
) -> CommandResult:
    """Choose the store that commands in this folder use if --dataset and --store are not given.

    The command writes the name into fedcache.toml of this folder.

    Example: fedcache use digits
    """
    home = Home.from_environment()
    place = resolve_path(home, Path(store), to_read=True)
    if not (place / "manifest.json").exists():
        place = need_path(home, dataset=store, observer=observer)
    opened = Store.open(place)
    key, name = pin_of(opened, home)
    file = Path(FILE_NAME)
    text = ""
    if file.exists():
        read_file(file)  # refuses a file that fedcache cannot read
        text = file.read_text(encoding="utf-8")
    changed = with_pin(text, key, name)
    try:
        is_set = parse_toml(changed).get(SECTION, {}).get(key) == name
    except ValueError:  # for example a file with the section as an inline table
        is_set = False
    if not is_set:
        line = tomli_w.dumps({key: name}).strip()
        raise UsageError(
            f"fedcache cannot write this setting into {FILE_NAME} of this folder.",
            f"Write {line} below [{SECTION}] yourself.",
        )
    write_output(file, changed.encode())
    line = (
        f"Commands in this folder now use {opened.path.name}, because {file} has {key} = {name!r}."
    )
    data = {"path": str(opened.path), "file": str(file.resolve()), key: name}
    return CommandResult(data, [line])


def pin_of(store: Store, home: Home) -> tuple[str, str]:
    """The key and value of fedcache.toml for a store.

    This is the name of the dataset if the name finds the store. Else it is the file name of a store in the home, or the
    path of another store.
    """
    slug = str(store.dataset["slug"])
    with suppress(FedcacheError):
        found = locate_store(home, dataset=slug)
        if found is not None and found.resolve() == store.path.resolve():
            return "dataset", slug
    if store.path.resolve().parent == home.stores.resolve():
        return "store", store.path.name
    return "store", str(store.path.resolve())


def with_pin(text: str, key: str, name: str) -> str:
    """A configuration file with another dataset or store in ``[train]``; every other line stays as it is.

    >>> print(with_pin("[train]\\nstore = 'old'\\nrounds = 3\\n", "dataset", "digits"), end="")
    [train]
    dataset = "digits"
    rounds = 3
    """
    line = tomli_w.dumps({key: name}).strip()
    lines = text.splitlines()
    header = f"[{SECTION}]"
    # A comment may follow the header of a section.
    headers = [one.partition("#")[0].strip() for one in lines]
    if header not in headers:
        if lines:
            lines.append("")
        return "\n".join([*lines, header, line, ""])
    start = headers.index(header) + 1
    end = start
    while end < len(lines) and not (headers[end].startswith("[") and headers[end].endswith("]")):
        end += 1
    other_lines = [one for one in lines[start:end] if not _names_a_store(one)]
    return "\n".join([*lines[:start], line, *other_lines, *lines[end:], ""])


def _names_a_store(line: str) -> bool:
    key = line.partition("=")[0].strip()
    return key in ("dataset", "store")
