"""Evaluation of runs' models on labelled rows of a dataset, a store or a file; missing features are extracted first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
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
from fedcache.extract.how import note_other_devices, resolve_compute_as
from fedcache.extract.planning.find_store import ingested_path, need_store
from fedcache.extract.planning.plan import context_of, paths_of
from fedcache.federate.partition.client_table import RowLists
from fedcache.federate.partition.partition import Partition
from fedcache.models.adapt import Adapter
from fedcache.models.evaluate import (
    LabelledRows,
    Mistakes,
    PredictionSets,
    RunEvaluation,
    SetCounts,
    find_mistakes,
    measure,
    measure_clients,
    rows_of_file,
    rows_of_store,
    threshold,
)
from fedcache.models.predictor import Predictor, array_keys, read_recipes
from fedcache.models.saved_model import EvaluateOptions, ModelOptions, SavedModel
from fedcache.parsing import Facts, Record
from fedcache.process import Stop
from fedcache.progress import Observer, Silent, piece_of_work
from fedcache.runs.directory import MODELS, command_saving, is_private, result_of, train_table
from fedcache.runs.origin import store_behind
from fedcache.runs.predict_run import (
    MOST_SCORED,
    OwnRows,
    PriorTests,
    check_saved,
    check_weights,
    counted,
    find_run,
    no_test_rows,
    open_members,
    partition_of_seed,
    predictor_of,
)
from fedcache.runs.store_choice import open_clients
from fedcache.store.catalog import place_of_content, recall_last, remember_last
from fedcache.store.content import row_digests
from fedcache.store.store import Store
from fedcache.tables.splits import TEST, TRAIN

# Prediction sets of a run's global model: calibrated on its validation rows, counted on its clients' own test rows.

LEAVE_OUT = "Leave --coverage out."


def prediction_sets(
    place: Path,
    first: Predictor,
    rows: LabelledRows,
    coverage: float,
    options: ModelOptions,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> PredictionSets:
    """The prediction sets of a global model for the rows of ``rows`` on which clients are tested.

    Raises UsageError for personal models, a client prior or a private run; StoreError without validation rows or test
    rows; StoppedError after a stop; other errors as ``OwnRows.of``.

    Args:
        place: the directory of a run, or a model file.
        first: the model.
        rows: that are evaluated.
        coverage: above 0 and below 1.
        options: that selected the model.
        home: with the run.
        observer: receives progress.
        stop: checked between blocks of rows.
    """
    facts = first.members[0].facts
    if facts.personal and not options.one_for_all:
        raise UsageError(
            f"--coverage needs one global model, but {facts.method} has a model for each client.",
            LEAVE_OUT,
        )
    if options.client_prior != "none":
        raise UsageError(
            "--coverage and --client-prior cannot be combined. --coverage uses one threshold for the scores of one "
            "model, but --client-prior changes these scores for each client.",
            "Leave one of them out.",
        )
    own = OwnRows.of(place, first, rows.source, home, "--coverage")
    if own.private:
        raise UsageError(
            "--coverage cannot be used for a run with differential privacy. --coverage reads validation rows, and the "
            "privacy guarantee of the run (epsilon) does not cover these rows.",
            LEAVE_OUT,
        )
    table = own.partition.table
    lists = RowLists.of([])
    if table.validation is not None:
        # Validation rows that all clients share count as the rows of one client.
        lists = table.validation.own or RowLists.of([table.validation.rows])
    tested = np.intersect1d(table.tested_by_clients, rows.rows)
    # For each row of the store: the number of classes in its set, -1 if it is not tested.
    size = np.full(own.store.rows, -1)
    covered = np.zeros(own.store.rows, bool)
    with counted(observer, stop, "prediction sets", len(lists.rows) + len(tested)) as done:
        parts = [np.empty(0)]
        for part, _, of_truth in _nonconformity(own, first, lists.rows):
            parts.append(of_truth)
            done(len(part))
        scores = np.concatenate(parts)
        known = ~np.isnan(scores)
        clients = len(np.unique(lists.owner[known]))
        if not clients:
            words = ["--method", facts.method, "--store", str(own.store.path)]
            raise StoreError(
                "--coverage needs labelled validation rows, but the run has none.",
                "Train the run again with validation rows:  fedcache train --validation 0.2 "
                + shlex.join(words),
            )
        limit = threshold(scores[known], clients, coverage)
        for part, of_classes, of_truth in _nonconformity(own, first, tested):
            sizes = (of_classes <= limit).sum(-1)
            size[part] = np.where(np.isnan(of_truth), -1, sizes)
            covered[part] = of_truth <= limit
            done(len(part))
    by_client = {}
    without_rows = 0
    # Clients with the same test rows have the same counts.
    of_common = None
    step = max(1, int(table.tests.sizes.sum()) // MOST_SCORED)
    for number in range(0, len(table), step):
        counts = of_common
        if counts is None or not table.shares[number]:
            test = table.test_of(number)
            counts = _counts(size[test], covered[test])
        if table.shares[number]:
            of_common = counts
        if counts.rows:
            by_client[table.names[number]] = counts
        else:
            without_rows += 1
    if not by_client:
        raise no_test_rows()
    return PredictionSets(
        target=coverage,
        threshold=limit,
        calibration_rows=int(known.sum()),
        calibration_clients=clients,
        test_protocol=own.partition.test_protocol,
        clients=by_client,
        without_rows=without_rows,
    )


def _counts(size: NDArray[np.int64], covered: NDArray[np.bool_]) -> SetCounts:
    """The counts of a client's test rows [n]: sizes of their sets, -1 for a row without one, and right sets."""
    known = size >= 0
    sizes = size[known]
    return SetCounts(
        len(sizes),
        int(covered[known].sum()),
        int(sizes.sum()),
        int((sizes == 1).sum()),
        int((sizes == 0).sum()),
    )


def _nonconformity(
    own: OwnRows, first: Predictor, rows: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], Any, Any]]:
    """Yield rows [n], and 1 - p [n, C] of their classes and [n] of their labels; NaN without scores or a label."""
    for part, scores in first.over_store(own.store, rows):
        of_classes = 1 - first.mean_probability(scores)
        label = own.label[part]
        of_truth = np.take_along_axis(of_classes, label[:, None], 1)[:, 0]
        yield part, of_classes, np.where(label < 0, np.nan, of_truth)


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
        options: select the models of a run.
        request: a dataset, a store or a file, and the rows in it.
        config: of the extraction of missing features.
        home: with stores and weights.
        observer: receives notes, warnings and progress.
        stop: checked between the models of clients, blocks of rows and the chunks of an extraction.
    """
    options_of_runs = [options] * len(places)
    one_client = options.client is not None and len(places) > 1
    if options.weights or options.backbone or one_client:
        # All models are opened before the first is measured, because an option may fit only some of them.
        facts_of_runs = []
        for place in places:
            with named_in_errors(place, places):
                members = open_members(place, options, Silent())
                facts_of_runs.append(members[0].facts)
        check_weights(options, [facts.backbones for facts in facts_of_runs])
        some_personal = any(facts.personal for facts in facts_of_runs)
        for i, facts in enumerate(facts_of_runs):
            # If some runs have a model for each client, a global model counts as the model of the named client too.
            if options.client is not None and some_personal and not facts.personal:
                options_of_runs[i] = replace(options, client=None)
                name = places[i].name
                observer.note(
                    f"{name}: {facts.method} trained one global model. Client {options.client} uses this model, too."
                )
    evaluations = []
    for place, of_run in zip(places, options_of_runs, strict=True):
        with named_in_errors(place, places):
            evaluations.append(evaluate_run(place, of_run, request, config, home, observer, stop))
    return evaluations


@contextmanager
def named_in_errors(place: Path, places: Sequence[Path]) -> Iterator[None]:
    """Add the name of a model to errors, if there are several models."""
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
    """Evaluate one run; arguments and errors as ``evaluate_runs``."""
    members = open_members(place, options, observer)
    facts = members[0].facts
    each_client = facts.personal and options.client is None and not options.one_for_all
    names: Sequence[str | None] = [options.client]
    if each_client:
        names = members[0].clients
    check_saved(place, members[0], options)
    if not names:  # a model file without its run
        raise StoreError(
            f"The run saved none of the personal models of its {facts.clients:,} clients.",
            "Train again with --fresh --save-clients all, or use --global.",
        )
    # The only personal model is measured like that of a named client.
    if each_client and len(names) == 1:
        options = replace(options, client=names[0])
        each_client = False
    # The model is measured without the prior, and then with the prior of each client.
    plain = replace(options, client=names[0], client_prior="none")
    first = predictor_of(members, plain, home, config.device)
    rows = labelled_rows(first, options, request, config, home, observer, stop)
    label = label_of(place)

    # Each client's model is made just before it is used, so that only one is in memory at a time.
    def models() -> Iterator[tuple[str, Predictor]]:
        with piece_of_work(observer, "evaluating", len(names), "clients"):
            for name in names:
                if stop.requested:
                    raise StoppedError(
                        "Stopped before every client's model was evaluated.",
                        "Run the same command again.",
                    )
                yield str(name), replace(first, client=name).checked()
                observer.advance(1)

    adapter = None
    if request.adapt is not None:
        if each_client or options.client_prior != "none" or request.coverage is not None:
            raise UsageError(
                "--adapt measures one model and cannot be combined with --client-prior, --coverage or "
                "the models of all clients.",
                "Leave the other options out, and choose a model with --client NAME or --global.",
            )
        adapter = Adapter.of(first, request.adapt, request.set)
    sets = None
    if request.coverage is not None:
        sets = prediction_sets(place, first, rows, request.coverage, options, home, observer, stop)
    # Priors and images that are not possible are refused before anything is measured.
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
        if each_client:
            clients = [str(name) for name in names]
        mistakes = mistakes_on(place, facts.run, first, rows, clients)
    if each_client:
        figures, spread = measure_clients(models(), rows)
    else:
        with counted(observer, stop, "evaluating", len(rows.rows)) as done:
            figures = measure(first, rows, done=done)
            spread = None
    adaptation = None
    if adapter is not None:
        with counted(observer, stop, "adapting", len(rows.rows)) as done:
            adaptation = adapter.measured(rows, figures.all, done)
    prior = None
    if tests is not None:
        prior = tests.measured(first, rows, observer, stop)
    # The measured model in words, for the answer.
    if each_client:
        of_all = ""
        if len(names) < facts.clients:
            of_all = f" of {facts.clients:,}"
        measured = f"{len(names)}{of_all} personal models, each on all rows"
    elif options.client is not None:
        measured = f"of client {options.client}"
    elif facts.personal:
        measured = "the model of the server"
    else:
        measured = "the global model"
    if len(members) > 1:
        measured += f", mean probability of {len(members)} seeds"
    evaluation = RunEvaluation(
        run=label,
        digest=facts.run,
        method=facts.method,
        model=measured,
        trained_on=facts.dataset,
        backbones=facts.backbones,
        seeds=tuple(member.facts.seed for member in members),
        softmax_temperature=first.softmax_temperature,
        rows=rows.name,
        left_out=rows.left_out,
        measures=figures,
        clients=spread,
        mistakes=mistakes,
        client_prior=prior,
        prediction_sets=sets,
        adaptation=adaptation,
    )
    warning = warning_of_trained_rows(place, members, evaluation.short_run, rows, home)
    if warning is not None:
        observer.warn(warning)
    return evaluation


def label_of(place: Path) -> str:
    """The name of a run's directory, or ``RUN/FILE`` for a model file in one."""
    place = place.resolve()
    if place.is_file() and place.parent.name == MODELS:
        run = place.parents[1].name
        return f"{run}/{place.name}"
    return place.name


def mistakes_on(
    place: Path, run: str, first: Predictor, rows: LabelledRows, clients: Sequence[str]
) -> Mistakes:
    """The most confident mistakes on rows of a store, of one model or of the models of ``clients``.

    Raises UsageError for rows that are not in a store, and for rows of a private run's own dataset.
    """
    if not isinstance(rows.source, Store):
        raise UsageError(
            "--with-images needs images, but --embeddings names a file without images.",
            "--dataset folder:photos",
        )
    result = result_of(place, run)
    if result is not None and is_private(result):
        own_digest = result["dataset"]["digest"]
        if rows.source.dataset.get("digest") == own_digest:
            raise UsageError(
                f"--with-images cannot show the dataset of {place.name}, because the run has differential privacy, and "
                "its privacy guarantee (epsilon) does not cover images.",
                "Leave --with-images out, or evaluate on another dataset.",
            )
    if not clients:
        return find_mistakes(rows.source, [(None, first, rows.rows)])
    models = ((name, replace(first, client=name), rows.rows) for name in clients)
    return find_mistakes(rows.source, models)


def mistakes_of_run(place: Path, store: Store, partition: Partition, home: Home) -> Mistakes:
    """The mistakes of a run's first seed on the run's own test rows; personal models score the rows of their client.

    Args:
        place: the run's directory.
        store: of the run's dataset.
        partition: of the run's first seed.
        home: with weights.

    Raises StoreError for a run without models, and UsageError for a method of another package that is not installed.
    """
    members = open_members(place, ModelOptions(), Silent())
    facts = members[0].facts
    if not facts.personal:
        predictor = predictor_of(members, ModelOptions(), home, "auto")
        return find_mistakes(store, [(None, predictor, np.asarray(partition.test, np.int64))])
    clients = [
        client for client in partition.clients if client.name in facts.saved and len(client.test)
    ]
    if not clients:
        raise StoreError(
            f"The run saved none of the personal models of its {facts.clients:,} clients.",
            command_saving(place, "all"),
        )
    first = predictor_of(members, ModelOptions(client=clients[0].name), home, "auto")
    # A row counts once for each client that is tested on it.
    test_rows = sum(len(client.test) for client in clients)
    step = -(-test_rows // MOST_SCORED)
    models = (
        (client.name, replace(first, client=client.name), np.asarray(client.test, np.int64))
        for client in clients[::step]
    )
    return find_mistakes(store, models)


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
    """The store of a dataset with the arrays that a model reads; missing ones are extracted with the model's recipes.

    If ``config`` gives no batch and dtype, they are those of the model's own features, as in ``predict``. The dataset
    that the home remembers as last extracted stays the same, because ``train`` must not use a dataset of evaluation.

    Raises MachineError for weights that are not those of the model; other errors as ``extract``.
    """
    spec = str(config.dataset)
    folder = ingested_path(home, spec)
    if folder is None:
        found = peek(spec, context_of(config, home))
        if found is not None:
            folder = place_of_content(home, *found)
    if folder is not None and folder.exists():
        store = Store.open(folder)
        try:
            array_keys(model, store)
            return store
        except StoreError:
            # An ingested dataset has no images from which missing features could be extracted.
            if ingested_path(home, spec) is not None:
                raise
    one_view = [recipe.plain() for recipe in read_recipes(model)]
    planned = [locate_recipe(recipe, home, paths_of(choice.weights)) for recipe in one_view]
    computed = model.facts.inputs_computed
    note_other_devices(resolve_device(config.device), computed, observer)
    last = recall_last(home)
    try:
        for item, record in zip(planned, computed, strict=True):
            name = item.backbone.name
            weights = {key: path for key, path in choice.weights.items() if key == name}
            options = item.backbone.options_of(item.recipe)
            _, how = resolve_compute_as(config, record, [item.backbone])
            of_backbone = replace(
                config,
                backbones=(name,),
                recipe=options,
                weights=weights,
                batch=how.batch,
                dtype=how.dtype,
            )
            extraction = extract(of_backbone, home, observer=observer, stop=stop, keep_text=True)
            store = extraction.store
    finally:
        if last is not None:
            remember_last(home, *last)
    return store


# Training rows of a run's clients, and a warning if a model is evaluated on them.


BLOCK = 4096
"""Number of rows of stored features that are compared at once."""


def warning_of_trained_rows(
    place: Path, members: Sequence[SavedModel], label: str, rows: LabelledRows, home: Home
) -> str | None:
    """A warning if a model was trained on some of the rows; None if it was not, or if its training rows are unknown.

    Rows of the run's own dataset are compared by their numbers, rows of other datasets by their content, and rows of a
    file by their features, if the run's store still exists. Without the run's partition, all training rows of its
    dataset are compared, and the warning says that the model may have been trained on them.

    Args:
        place: the directory of a run, or a model file.
        members: the models of its seeds.
        label: name of the model.
        rows: on which the model was measured.
        home: with the run and its store.
    """
    run = find_run(place, members[0].facts.run, home)
    if run is None:
        return None
    with suppress(FedcacheError, OSError):
        return _warning(run, members, label, rows)
    return None


def _warning(
    run: tuple[Path, Facts], members: Sequence[SavedModel], label: str, rows: LabelledRows
) -> str | None:
    """The warning of ``warning_of_trained_rows``; ``run`` has the run's directory and its result."""
    folder, result = run
    data = result["dataset"]
    evaluated = None
    own = None  # the store on which the run was trained
    shard = {}
    if isinstance(rows.source, Store):
        evaluated = rows.source
        shard = evaluated.dataset.get("shard", {})
        if evaluated.dataset.get("digest") == data["digest"]:
            own = evaluated
    is_own = own is not None
    if not is_own:
        own = store_behind(folder, result)
    trained = None
    with suppress(FedcacheError, OSError):  # a partition that is gone or damaged
        seeds = [member.facts.seed for member in members]
        trained = rows_of_clients(folder, result, seeds, own)
    was = "may have been"
    if trained is not None:
        was = "was"
    of_all = f"of {len(rows.rows):,} rows"
    # Rows of the same dataset, or of a client store that was made from it, are compared by their numbers.
    is_part = shard.get("parent") == data["digest"]
    if evaluated is not None and (is_own or is_part):
        split = evaluated.column("split")
        if trained is None:
            seen = split == TRAIN
        elif is_own:
            seen = np.isin(np.arange(evaluated.rows), trained)
        else:
            seen = np.isin(np.array(shard["rows"], np.int64), trained)
        common = int(seen[rows.rows].sum())
        if not common:
            return None
        advice = ". To leave these rows out: --split test"
        # A scheme may assign rows of the test split too, and then --split test does not help.
        if (seen & (split == TEST)).any():
            advice = "."
        store = evaluated.path.name
        return f"{label} {was} trained on {common:,} {of_all} of {store}{advice}"
    if own is None:
        return None
    if trained is None:
        trained = np.flatnonzero((own.column("split") == TRAIN) & (own.column("ok") == 1))
    # Rows of another dataset are compared by the digests of their content, rows of a file by their features.
    if evaluated is not None:
        digests = _keys(evaluated.column("uid")[rows.rows])
        trained_digests = _keys(own.column("uid")[trained])
        common = int(np.isin(digests, trained_digests).sum())
    else:
        common = _same_features(own, trained, members[0], rows)
    if not common:
        return None
    dataset = data["slug"]
    return f"{common:,} {of_all} have the same content as rows of {dataset} that {label} {was} trained on."


def rows_of_clients(
    folder: Path, result: Record, seeds: Sequence[int], store: Store | None
) -> NDArray[np.int64] | None:
    """Numbers in the run's dataset of the rows that clients trained on; None if its partition is not known.

    Args:
        folder: the run's directory, which has the partitions that were made for the run.
        result: of the run.
        seeds: the rows of these seeds are returned.
        store: of the dataset, which has the saved partitions; None if the store is gone.

    Raises StoreError; CorruptionError for a partition or client store that was changed.
    """
    table = train_table(folder)
    digest = str(result["dataset"]["digest"])
    row_lists = []
    # The partition of a run of --clients-from numbers the rows of all client stores, and not those of the dataset.
    if table.get("clients_from"):
        stores = open_clients(Path(table["clients_from"]))
        if stores[0].dataset["shard"]["parent"] != digest:
            return None
        for client_store in stores:
            numbers = np.array(client_store.dataset["shard"]["rows"], np.int64)
            train = client_store.column("split") == TRAIN
            row_lists.append(numbers[train & (client_store.column("ok") == 1)])
        return np.unique(np.concatenate(row_lists))
    for seed in seeds:
        partition = partition_of_seed(folder, result, seed, store)
        if partition is None:
            return None
        row_lists.append(partition.table.train.rows)
    return np.unique(np.concatenate(row_lists))


def _same_features(
    store: Store, trained: NDArray[np.int64], model: SavedModel, rows: LabelledRows
) -> int:
    """Number of rows of a file whose features equal those of a training row, by the model's first backbone."""
    assert not isinstance(rows.source, Store)
    reader = store.reader(array_keys(model, store)[0])
    digests = []
    # A value that overflows the stored dtype becomes infinite, and is in no stored row.
    with np.errstate(over="ignore"):
        for first, *_ in rows.source.of_rows(rows.rows):
            digests.append(row_digests(first.astype(reader.info.dtype)))
    trained_digests = []
    # At least one block is read, so that there is an array to concatenate.
    for start in range(0, max(1, len(trained)), BLOCK):
        features = reader.rows(trained[start : start + BLOCK])
        trained_digests.append(row_digests(features[:, 0]))
    same = np.isin(_keys(np.concatenate(digests)), _keys(np.concatenate(trained_digests)))
    return int(same.sum())


def _keys(uid: NDArray[np.uint8]) -> NDArray[np.void]:
    """Digests [n, 16] as [n] values that can be compared."""
    return np.ascontiguousarray(uid).view("V16").ravel()
