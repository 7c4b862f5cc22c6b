"""The models of runs on labelled rows: a dataset, whose missing features are extracted first, a store, or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import ExtractConfig, Home
from fedcache.errors import FedcacheError, StoppedError, StoreError, UsageError
from fedcache.extract.datasets import peek
from fedcache.extract.device import resolve_device
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.extract_dataset import extract
from fedcache.extract.how import note_of_other_devices, resolve_compute_as
from fedcache.extract.planning.find_store import ingested_path, need_store
from fedcache.extract.planning.plan import context_of
from fedcache.federate.partition.partition import Partition
from fedcache.models.evaluate import (
    LabelledRows,
    Mistakes,
    RunEvaluation,
    find_mistakes,
    measure,
    measure_clients,
    rows_of_file,
    rows_of_store,
)
from fedcache.models.predictor import Predictor, array_keys
from fedcache.models.saved_model import EvaluateOptions, ModelOptions, SavedModel
from fedcache.models.sources import read_recipes
from fedcache.process import Stop
from fedcache.progress import Observer, Silent
from fedcache.runs.directory import MODELS, command_saving, result_of, train_table
from fedcache.runs.evaluate_prior import PriorTests, find_run, partition_of_seed
from fedcache.runs.origin import store_behind
from fedcache.runs.predict_run import (
    check_saved,
    check_weights,
    counted,
    open_members,
    predictor_of,
    weights_of,
)
from fedcache.runs.result_files import is_private
from fedcache.runs.store_choice import open_clients
from fedcache.store.catalog import place_of_content, recall_last, remember_last
from fedcache.store.content import row_digests
from fedcache.store.samples import SPLITS
from fedcache.store.store import Store


def evaluate_runs(
    places: Sequence[Path],
    options: ModelOptions,
    request: EvaluateOptions,
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> list[RunEvaluation]:
    """Each run's model on the rows that ``request`` names.

    Raises as ``predict_run.open_predictor``, ``extract`` and ``models.evaluate``; StoppedError after a stop.

    Args:
        places: directories of runs, or model files.
        digests: which of a run's models.
        request: a dataset, a store or a file, and which of its rows.
        config: how what is missing is extracted.
        home: where stores and weights are looked for.
        observer: receives notes, warnings and progress.
        stop: asked between the models of clients, blocks of rows and the chunks of an extraction.
    """
    each = [options] * len(places)
    if options.weights or options.backbone or (options.client is not None and len(places) > 1):
        # What only some models have is known when all were looked at, before the first is measured.
        facts = []
        for place in places:
            with named_in_errors(place, places):
                facts.append(open_members(place, options, Silent())[0].facts)
        check_weights(options, [one.backbones for one in facts])
        personal = any(other.personal for other in facts)
        for i, one in enumerate(facts):
            # One model for all clients is also the model of the client that was named.
            if options.client is not None and personal and not one.personal:
                each[i] = replace(options, client=None)
                name = places[i].name
                observer.note(
                    f"{name}: {one.method} trained one global model, which {options.client} uses too."
                )
    found = []
    for place, own in zip(places, each, strict=True):
        with named_in_errors(place, places):
            found.append(evaluate_run(place, own, request, config, home, observer, stop))
    return found


@contextmanager
def named_in_errors(place: Path, places: Sequence[Path]) -> Iterator[None]:
    """Errors say of which of several models they are."""
    try:
        yield
    except StoppedError:
        raise
    except FedcacheError as error:
        if len(places) > 1:
            error.message = f"{label_of(place)}: {error.message}"
        raise


def evaluate_run(
    place: Path,
    options: ModelOptions,
    request: EvaluateOptions,
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> RunEvaluation:
    """One run; as ``evaluate_runs``."""
    members = open_members(place, options, observer)
    facts = members[0].facts
    each = facts.personal and options.client is None and not options.one_for_all
    names: Sequence[str | None] = [options.client]
    if each:
        names = members[0].clients
    check_saved(place, members[0], options)
    if not names:  # of a file apart from its run
        raise StoreError(
            f"The run has no saved personal models ({facts.clients:,} clients).",
            "Train again with --fresh --save-clients all, or use --global.",
        )
    if each and len(names) == 1:
        options = replace(options, client=names[0])
        each = False
    # The model is measured without the prior, and then with the prior of each client.
    plain = replace(options, client=names[0], client_prior="none")
    first = predictor_of(members, plain, home, config.device)
    rows = labelled_rows(first, options, request, config, home, observer, stop)
    label = label_of(place)

    # Each client's model is checked when its turn comes, so that only one is in memory at a time.
    def models() -> Iterator[tuple[str, Predictor]]:
        observer.start("evaluating", len(names), "clients")
        try:
            for name in names:
                if stop.requested:
                    raise StoppedError(
                        "Stopped before every client's model was evaluated.", "Run it again."
                    )
                yield str(name), replace(first, client=name).checked()
                observer.advance(1)
        finally:
            observer.stop()

    # What cannot be done is refused before anything is measured.
    tests = None
    if options.client_prior != "none":
        own_models = None
        if facts.personal and not options.one_for_all:
            own_models = [name for name in names if name is not None]
        kind = options.client_prior
        tests = PriorTests.of(place, first, rows.source, kind, home, own_models, observer)
    mistakes = None
    if request.with_images:
        clients = []
        if each:
            clients = [str(name) for name in names]
        mistakes = mistakes_on(place, facts.run, first, rows, clients)
    if each:
        figures, spread = measure_clients(models(), rows)
    else:
        with counted(observer, stop, "evaluating", len(rows.rows)) as done:
            figures = measure(first, rows, done=done)
            spread = None
    prior = None
    if tests is not None:
        prior = tests.measured(first, rows, observer, stop)
    # Which model was measured, in words for the answer.
    if each:
        some = ""
        if len(names) < facts.clients:
            some = f" of {facts.clients:,}"
        which = f"{len(names)}{some} personal models, each on all rows"
    elif options.client is not None:
        which = f"of client {options.client}"
    elif facts.personal:
        which = "the model of the server"
    else:
        which = "the global model"
    if len(members) > 1:
        which += f", mean probability of {len(members)} seeds"
    found = RunEvaluation(
        run=label,
        digest=facts.run,
        method=facts.method,
        model=which,
        trained_on=facts.dataset,
        backbones=facts.backbones,
        seeds=tuple(m.facts.seed for m in members),
        softmax_temperature=first.softmax_temperature,
        rows=rows.name,
        left_out=rows.left_out,
        measures=figures,
        clients=spread,
        mistakes=mistakes,
        client_prior=prior,
    )
    if (seen := warning_of_trained_rows(place, members, found.short_run, rows, home)) is not None:
        observer.warn(seen)
    return found


def label_of(place: Path) -> str:
    """The name of a run's directory, or of a model file with the name of its run before it."""
    place = place.resolve()
    if place.is_file() and place.parent.name == MODELS:
        run = place.parents[1].name
        return f"{run}/{place.name}"
    return place.name


def mistakes_on(
    place: Path, run: str, first: Predictor, rows: LabelledRows, clients: Sequence[str]
) -> Mistakes:
    """The most confident mistakes on rows of a store, of one model or of each client's.

    Raises UsageError for rows that are not of a store, and for those of a private run's own dataset.
    """
    if not isinstance(rows.source, Store):
        raise UsageError(
            "--with-images shows images, but --embeddings has none.", "--dataset folder:photos"
        )
    found = result_of(place, run)
    if (
        found is not None
        and is_private(found)
        and found["dataset"]["digest"] == rows.source.dataset.get("digest")
    ):
        raise UsageError(
            f"{place.name} has differential privacy, but its epsilon does not cover rows of its own "
            "dataset that are shown as images.",
            "Leave --with-images out, or evaluate on another dataset.",
        )
    if not clients:
        return find_mistakes(rows.source, [(None, first, rows.rows)])
    return find_mistakes(
        rows.source, ((name, replace(first, client=name), rows.rows) for name in clients)
    )


MOST_SCORED = 1_000_000
"""Rows that clients' own models score on a page. With more, only every k-th client is scored."""


def mistakes_of_run(place: Path, store: Store, partition: Partition, home: Home) -> Mistakes:
    """The mistakes of a run's first seed on the run's own test rows; each client's model on the rows of its client.

    Args:
        place: the run's directory.
        store: of the run's dataset.
        partition: of the run's first seed.
        home: where weights are looked for.

    Raises StoreError for a run without models, and UsageError for a method of another package that is not installed.
    """
    members = open_members(place, ModelOptions(), Silent())
    facts = members[0].facts
    if not facts.personal:
        predictor = predictor_of(members, ModelOptions(), home, "auto")
        return find_mistakes(store, [(None, predictor, np.asarray(partition.test, np.int64))])
    clients = [c for c in partition.clients if c.name in facts.saved and len(c.test)]
    if not clients:
        raise StoreError(
            f"The run has no saved personal models ({facts.clients:,} clients).",
            command_saving(place, "all"),
        )
    first = predictor_of(members, ModelOptions(client=clients[0].name), home, "auto")
    # Clients may all be tested on the same rows, so the rows are counted once per client.
    step = -(-sum(len(c.test) for c in clients) // MOST_SCORED)
    deals = (
        (c.name, replace(first, client=c.name), np.asarray(c.test, np.int64))
        for c in clients[::step]
    )
    return find_mistakes(store, deals)


def labelled_rows(
    predictor: Predictor,
    options: ModelOptions,
    request: EvaluateOptions,
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> LabelledRows:
    """The labelled rows for a model; arguments as ``evaluate_run``."""
    split = None
    if request.split != "all":
        split = request.split
    if request.embeddings is not None:
        return rows_of_file(Path(request.embeddings), split, predictor)
    if request.store is not None:
        store = need_store(home, path=request.store)
    else:
        store = store_with_features(predictor.members[0], options, config, home, observer, stop)
    return rows_of_store(store, split, predictor.classes)


def store_with_features(
    model: SavedModel,
    choice: ModelOptions,
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> Store:
    """The store of a dataset with what a model reads; what is missing is extracted with the model's own recipes.

    Where ``config`` leaves batch and dtype open they are those of the model's own features, as ``predict`` has them.
    Which dataset was extracted last stays as it was: ``train`` must not take what models are evaluated on.

    Raises MachineError for weights that are not those of the model; as ``extract``.
    """
    spec = str(config.dataset)
    known = ingested_path(home, spec)
    if known is None:
        found = peek(spec, context_of(config, home))
        known = None
        if found is not None:
            known = place_of_content(home, *found)
    if known is not None and known.exists():
        store = Store.open(known)
        try:
            array_keys(model, store)
            return store
        except StoreError:
            if ingested_path(home, spec) is not None:
                raise
    one_view = [recipe.plain() for recipe in read_recipes(model)]
    planned = [locate_recipe(recipe, home, weights_of(choice)) for recipe in one_view]
    computed = model.facts.inputs_computed
    if note := note_of_other_devices(resolve_device(config.device), computed):
        observer.note(note)
    last = recall_last(home)
    try:
        for item, like in zip(planned, computed, strict=True):
            name = item.backbone.name
            weights = {k: v for k, v in choice.weights.items() if k == name}
            options = item.backbone.options_of(item.recipe)
            _, how = resolve_compute_as(config, like, [item.backbone])
            one = replace(
                config,
                backbones=(name,),
                recipe=options,
                weights=weights,
                batch=how.batch,
                dtype=how.dtype,
            )
            store = extract(one, home, observer=observer, stop=stop, keep_text=True).store
    finally:
        if last is not None:
            remember_last(home, *last)
    return store


# Training rows of a run's clients, and the check that a model is not measured on them.


BLOCK = 4096
"""Rows of stored features that are compared at once."""
TRAIN = SPLITS.index("train")
TEST = SPLITS.index("test")


def warning_of_trained_rows(
    place: Path, members: Sequence[SavedModel], label: str, rows: LabelledRows, home: Home
) -> str | None:
    """A warning where a model was trained on some of the rows, as far as that is known; None otherwise.

    Its run is that of the directory, else the one next to the model's file, else one of the home. Rows of the run's own
    dataset are known by their numbers, those of others by their content, and those of a file by their features, where
    the run's store is still there. Where its partition is not, all training rows of the dataset may be meant.

    Args:
        place: the directory of a run, or a model file.
        members: the models of its seeds.
        label: of the model.
        rows: that it was measured on.
        home: where the run and its store are looked for.
    """
    run = find_run(place, members[0].facts.run, home)
    if run is None:
        return None
    with suppress(FedcacheError, OSError):
        return _warning(run, members, label, rows)
    return None


def _warning(
    run: tuple[Path, dict[str, Any]], members: Sequence[SavedModel], label: str, rows: LabelledRows
) -> str | None:
    data = run[1]["dataset"]
    given = None
    if isinstance(rows.source, Store):
        given = rows.source
    itself = given is not None and data["digest"] == given.dataset.get("digest")
    if itself:
        own = given
    else:
        own = store_behind(*run)
    trained = None
    with suppress(FedcacheError, OSError):  # a partition that is gone or damaged
        trained = rows_of_clients(*run, [m.facts.seed for m in members], own)
    was = "may have been"
    if trained is not None:
        was = "was"
    of_all = f"of {len(rows.rows):,} rows"
    # Rows of the same dataset, or of a client's store that was cut from it, are compared by their numbers.
    if given is not None and (
        itself or given.dataset.get("shard", {}).get("parent") == data["digest"]
    ):
        split = given.column("split")
        if itself:
            numbers = np.arange(given.rows)
        else:
            numbers = np.array(given.dataset["shard"]["rows"], np.int64)
        if trained is None:
            seen = split == TRAIN
        else:
            seen = np.isin(numbers, trained)
        if not (same := int(seen[rows.rows].sum())):
            return None
        # A scheme may assign rows of the test split too: then that split does not leave them out.
        advice = ": --split test leaves them out."
        if (seen & (split == TEST)).any():
            advice = "."
        store = given.path.name
        return f"{label} {was} trained on {same:,} {of_all} of {store}{advice}"
    if own is None:
        return None
    if trained is None:
        trained = np.flatnonzero((own.column("split") == TRAIN) & (own.column("ok") == 1))
    # Rows of another dataset are compared by the digests of their content.
    if given is not None:
        digests = _keys(given.column("uid")[rows.rows])
        same = int(np.isin(digests, _keys(own.column("uid")[trained])).sum())
    else:
        same = _same_features(own, trained, members[0], rows)
    if not same:
        return None
    dataset = data["slug"]
    return f"{same:,} {of_all} have the same content as rows of {dataset} that {label} {was} trained on."


def rows_of_clients(
    folder: Path, result: Mapping[str, Any], seeds: Sequence[int], store: Store | None
) -> NDArray[np.int64] | None:
    """The rows, as numbers of the run's dataset, that clients trained on; None where its partition is not known.

    Args:
        folder: the run's directory, which keeps the partitions that were made for it.
        result: of the run.
        seeds: whose rows are meant.
        store: of the dataset, which keeps those that have a name there; None where there is none any more.

    Raises StoreError, CorruptionError for a partition or client store that is not what was written.
    """
    table = train_table(folder)
    digest = str(result["dataset"]["digest"])
    # its partition numbers the rows that any client has, not those of the dataset
    if table.get("clients_from"):
        stores = open_clients(Path(table["clients_from"]))
        if stores[0].dataset["shard"]["parent"] != digest:
            return None
        held = [
            (np.array(s.dataset["shard"]["rows"], np.int64), s.column("split"), s.column("ok"))
            for s in stores
        ]
        return np.unique(
            np.concatenate([numbers[(split == TRAIN) & (ok == 1)] for numbers, split, ok in held])
        )
    found = []
    for seed in seeds:
        partition = partition_of_seed(folder, result, seed, store)
        if partition is None:
            return None
        found.append(partition.table.train.rows)
    return np.unique(np.concatenate(found))


def _same_features(
    store: Store, trained: NDArray[np.int64], model: SavedModel, rows: LabelledRows
) -> int:
    """Number of rows of a file whose features equal those of a training row, by the model's first backbone."""
    assert not isinstance(rows.source, Store)
    reader = store.reader(array_keys(model, store)[0])
    with np.errstate(over="ignore"):  # what does not fit into the stored dtype is no stored row
        digests = [
            row_digests(first.astype(reader.info.dtype))
            for first, *_ in rows.source.of_rows(rows.rows)
        ]
    parts = (trained[start : start + BLOCK] for start in range(0, max(1, len(trained)), BLOCK))
    known = [row_digests(reader.rows(part)[:, 0]) for part in parts]
    return int(np.isin(_keys(np.concatenate(digests)), _keys(np.concatenate(known))).sum())


def _keys(uid: NDArray[np.uint8]) -> NDArray[np.void]:
    """[n, 16] -> [n]: rows of bytes that compare as one value."""
    found: NDArray[np.void] = np.ascontiguousarray(uid).view("V16").ravel()
    return found
