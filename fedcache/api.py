"""The Python API: functions with the names of the commands. They read the environment as the command line does.

An argument that is None or empty takes the default of the command of the same name. The modules that compute are
imported when a function is called, so importing fedcache imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedcache.calls.keywords import names_checked
from fedcache.progress import Observer

if TYPE_CHECKING:
    from fedcache.calls.backbones import Backbones
    from fedcache.calls.runs import Queries
    from fedcache.calls.training import Methods
    from fedcache.federate.engine.method import Method
    from fedcache.federate.partition.partition import Partition
    from fedcache.grids.result import Grid
    from fedcache.models.evaluate import RunEvaluation
    from fedcache.report.compare import Comparisons
    from fedcache.report.page import Report
    from fedcache.runs.events import OnRound
    from fedcache.runs.predict_run import Personalised
    from fedcache.runs.run import Run
    from fedcache.store.store import Store

    AnyStore = Store | str | Path


@names_checked
def extract(
    dataset: Any = None,
    backbones: Backbones = (),
    *,
    name: str | None = None,
    store: str | Path | None = None,
    size: int | None = None,
    views: int | None = None,
    augment: str | None = None,
    text: str | Sequence[str] = (),
    recipe: Mapping[str, str] | None = None,
    limit: int | None = None,
    layout: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch: int | None = None,
    workers: int | None = None,
    threads: int | None = None,
    torch_compile: bool | None = None,
    chunk_rows: int | None = None,
    max_bad: str | None = None,
    weights: Mapping[str, str] | None = None,
    data: Mapping[str, str] | None = None,
    skip_missing: bool | None = None,
    follow_links: bool | None = None,
    images_key: str | None = None,
    label_key: str | None = None,
    split_key: str | None = None,
    domain_key: str | None = None,
    group_key: str | None = None,
    no_label: str | None = None,
    unlabelled: bool | None = None,
    part: str | None = None,
    observer: Observer | None = None,
) -> Store:
    """Run frozen backbones over a dataset and store the features; stored features are not computed again.

    Args:
        dataset: a spec of ``fedcache datasets list``, a list of (image, label), a torch Dataset, or a dict of splits;
            None for the dataset of the last extraction.
        backbones: one name or several, or torch modules.
        name: name of the dataset, by which ``Store.open`` and ``--dataset`` find it; None for the name of its folder or
            file.
        store: directory of the store; None for one under FEDCACHE_HOME.
        size: side of the images in pixels; None for the backbone's native size.
        views: number of stored views of each image; all but the first are augmented.
        augment: augmentation policy of the views.
        text: prompt templates for class names.
        recipe: other changes of the preprocessing, key -> value, as for ``--recipe``.
        limit: number of rows to use, evenly spaced over the dataset; None for all.
        layout: meaning of the folder levels, as for ``--layout``.
        device: ``auto``, ``cpu`` or ``cuda``; ``cuda`` never falls back to the CPU.
        dtype, batch, workers, threads, torch_compile, chunk_rows: how features are computed; see ``fedcache
            extract --help``.
        max_bad: largest share (``"1%"``) or number of unreadable images.
        weights: backbone -> file of its weights.
        data: name of a dataset -> its folder.
        skip_missing: whether to leave out backbones without weights.
        follow_links: whether to follow links to files outside the dataset's folder.
        images_key, label_key, split_key, domain_key, group_key: columns of ``arrays:FILE`` and similar datasets.
        no_label: values of the label column that mean "no label", such as ``"-1"``.
        unlabelled: whether to treat the dataset as unlabelled.
        part: ``"1/4"`` computes only the first of four parts, which ``join`` assembles.
        observer: receives progress messages.

    Raises the FedcacheError of the command, with its exit code and hint.
    """
    # The arguments by name, collected first, because the import adds a local variable. Other functions do the same.
    given = dict(locals())
    from fedcache.calls import stores

    return stores.extract(given)


@names_checked
def ingest(
    file: str | Path,
    name: str,
    *,
    store: str | Path | None = None,
    replace: bool = False,
    drop_nan: bool = False,
    features_key: str | Sequence[str] = (),
    label_key: str | None = None,
    split_key: str | None = None,
    name_key: str | None = None,
    domain_key: str | None = None,
    group_key: str | Sequence[str] | None = None,
    no_label: str | int | Sequence[str | int] = (),
    unlabelled: bool = False,
    observer: Observer | None = None,
) -> Store:
    """Import your own embeddings (npz, npy, h5, parquet, CSV, TSV, feather, safetensors) into a store.

    Args:
        file: file with features and labels.
        name: name of the dataset.
        store: directory of the store; None for one under FEDCACHE_HOME.
        replace: whether to replace a stored dataset of the same ``name``.
        drop_nan: whether to leave out rows with features that are not finite.
        features_key, label_key, split_key, name_key, domain_key: names of the columns, needed if fedcache does
            not detect them by name.
        group_key: the only columns to keep as groups; None for every column that can be a group.
        no_label: labels that mean "no label", such as -1 or "NA".
        unlabelled: whether to treat the dataset as unlabelled.
        observer: receives progress messages.

    Raises UsageError, StoreError, CorruptionError.
    """
    given = dict(locals())
    from fedcache.calls import stores

    return stores.ingest(given)


@names_checked
def train(
    method: str | Method,
    store: AnyStore | None = None,
    parts: Partition | str | None = None,
    *,
    seeds: int | Iterable[int] = 0,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    dataset: str | None = None,
    backbones: str | Sequence[str] = (),
    domain: str | Sequence[str] = (),
    clients_from: str | Path | None = None,
    rounds: int | None = None,
    participation: int | float | str | None = None,
    client_sampling: str | None = None,
    availability: float | str | Path | None = None,
    client_dropout: float | None = None,
    client_clusters: int | str | Path | None = None,
    clusters_per_round: int | None = None,
    asynchronous: int | None = None,
    server_step: float | None = None,
    staleness_power: float | None = None,
    client_durations: str | Path | None = None,
    eval_every: int | None = None,
    eval_clients: int | float | str | None = None,
    client_prior: str | None = None,
    stages: int | None = None,
    base_classes: str | None = None,
    transfer: Sequence[AnyStore] = (),
    execution: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    client_backbones: Sequence[str] = (),
    client_set: Mapping[str, str] | None = None,
    aggregate: str | None = None,
    attack: str | None = None,
    on_bad_update: str | None = None,
    byzantine: float | None = None,
    max_update_norm: float | None = None,
    max_rows_per_client: int | None = None,
    max_share: float | None = None,
    max_row_norm: float | None = None,
    dp_clip: float | None = None,
    dp_noise: float | None = None,
    dp_delta: float | None = None,
    dp_seed: int | None = None,
    dp_allow: str | None = None,
    observer: Observer | None = None,
    on_round: OnRound | None = None,
    track: str | Sequence[str] | None = None,
    fresh: bool = False,
    save_model: bool = True,
    save_clients: str | None = None,
) -> Run:
    """Train a federated method on cached features. A second call with the same arguments returns the stored result.

        fc.train("fedavg", store, parts, eval_every=1, on_round=lambda r: print(r.seed, r.round, r.accuracy))

    Args:
        method: a name of ``fedcache methods list``, or your own ``Method`` from a readable file. fedcache identifies
            the run by the content of this file and of your own files that it imports, among other things.
        store: a store or its path; None for the only one.
        parts: a partition or the name of a saved one; None for the partition of the method's paper.
        seeds: one seed or several.
        settings: hyperparameters of the method; they override those of the preset.
        preset: ``default``, ``paper``, ``official`` or ``tuned``.
        dataset: dataset whose store is used if ``store`` is None.
        backbones: backbones of the store; () for all that the method can use.
        domain: domains to use; () for all.
        clients_from: directory of client stores.
        rounds: rounds of training; None for those of the paper.
        participation: clients per round: a number, a share (0.1, ``"10%"``) or ``"all"``.
        client_sampling: how clients are sampled each round: ``uniform``, ``weighted`` or ``poisson``.
        availability: share of the rounds in which each client is available, or a CSV file of rounds.
        client_dropout: share of each round's clients that drop out.
        client_clusters, clusters_per_round: clusters of clients, as in ``fedcache train --help``.
        asynchronous, server_step, staleness_power, client_durations: asynchronous training, as in ``fedcache train
            --help``.
        eval_every: also score after every k-th round; 0 for the final model only.
        eval_clients: clients whose personal models are scored: a number, a share or ``"all"``.
        client_prior: also score with each client's log class prior, as in ``evaluate``.
        base_classes: train on the first classes only, ``"half"`` or a number of them, and also score the other classes
            by their texts.
        transfer: stores, or their names or paths, whose test rows are also scored, by the texts of their classes.
        stages: also score while the classes arrive in this number of stages, as in ``fedcache train --help``.
        execution: how the clients of a round are computed: ``auto``, ``sequential``, ``batched`` or ``gram``.
        device: ``auto``, ``cpu`` or ``cuda``; ``cuda`` never falls back to the CPU.
        dtype: ``float32`` or ``float64``.
        client_backbones: backbones that are assigned to clients in turn.
        client_set: hyperparameter -> values that are assigned to clients in turn.
        aggregate, attack, on_bad_update, byzantine, max_update_norm, max_rows_per_client, max_share, max_row_norm:
            protection against bad uploads, as in ``fedcache train --help``.
        dp_clip, dp_noise, dp_delta, dp_seed, dp_allow: differential privacy, as in ``fedcache train --help``.
        observer: receives progress messages.
        on_round: function that is called with a ``Round`` after every round, first for stored rounds. If it raises an
            exception, it is not called again and the run continues.
        track: trackers such as ``mlflow``, as for ``--track``.
        fresh: whether to train again even if the result is stored.
        save_model: whether to keep the trained model, for ``Run.model`` and ``fedcache predict``.
        save_clients: clients whose personal models are kept: ``"all"``, ``"none"`` or names, comma-separated; None for
            all, up to 256 MB.

    Raises the FedcacheError of the command, with its exit code and hint.
    """
    given = dict(locals())
    from fedcache.calls import training

    return training.train(given)


@names_checked
def grid(
    methods: Methods,
    store: AnyStore | None = None,
    parts: Partition | str | None = None,
    *,
    fresh: bool = False,
    seeds: int | Iterable[int] = 0,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    on_round: OnRound | None = None,
    track: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    sampler: str = "grid",
    trials: int | None = None,
    pruner: str = "none",
    exact: bool = False,
    jobs: int = 1,
    save_models: str = "best",
    save_clients: str | None = None,
    retrain: bool = False,
    score: str | None = None,
    **sweeps: Any,
) -> Grid:
    """Train every combination: ``grid("fedavg", store, parts, lr=[0.1, 0.01], rounds=[5, 10])``.

    Args:
        methods: names of methods, or your own.
        store, parts, seeds, settings, observer, on_round, track, fresh: as in ``train``.
        options: other keywords of ``train``, for all configurations.
        sampler, trials, pruner, exact, jobs, save_models, save_clients, retrain, score: as in ``fedcache grid --help``.
        sweeps: values to combine: of hyperparameters, rounds, hold_out, validation, ...

    Raises CorruptionError if the result of a configuration is damaged, and FederatedRunError if a configuration could
    not be trained. Both are raised after all other configurations are finished and stored.
    """
    given = dict(locals())
    from fedcache.calls import training

    return training.grid(given)


@names_checked
def evaluate(
    source: str | Path | Run,
    dataset: str | None = None,
    *,
    store: AnyStore | None = None,
    embeddings: str | Path | None = None,
    split: str = "all",
    client: str | None = None,
    seed: int | Literal["all"] | None = None,
    one_for_all: bool = False,
    temperature: float | None = None,
    client_prior: Literal["none", "classes", "counts", "fitted", "em"] = "none",
    coverage: float | None = None,
    adapt: Literal["t3a", "tent", "tda"] | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    with_images: bool = False,
    options: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> RunEvaluation:
    """Measure the model of a finished run on labelled data: ``fc.evaluate(run, "folder:photos").accuracy``.

    Args:
        source, seed, one_for_all: the model, as in ``load_model``.
        dataset: dataset to evaluate on; fedcache first extracts the features that the model reads.
        store: store to evaluate on, in place of a dataset.
        embeddings: file of embeddings to evaluate on, in place of a dataset.
        split: rows to use: all, train, test or validation.
        client: client whose personal model is evaluated; None for each client's model in turn.
        temperature: number that divides the scores; None for the temperature that was fitted in training.
        client_prior: also score each client's own test rows with a prior from its class counts. ``classes`` masks the
            classes that the client does not have, ``counts`` adds the log counts, ``fitted`` adds the log of smoothed
            shares, and ``em`` adds the log of shares estimated from the scores of these rows. ``client_prior`` of
            the returned evaluation has the accuracy without and with the prior.
        coverage: also make prediction sets of a global model that contain the true class with at least this
            probability, calibrated on the run's validation rows; ``prediction_sets`` of the returned evaluation.
        adapt, settings: also measure one linear model with this test-time adaptation and these settings of it;
            ``adaptation`` of the returned evaluation has the accuracy without and with it.
        out: .html, .csv or .json file to write with all figures.
        with_images: whether the page also shows images of mistakes.
        options: other keywords of ``extract``.
        observer: receives progress messages.

    Raises the FedcacheError of the command, with its exit code and hint.
    """
    given = dict(locals())
    from fedcache.calls import models

    return models.evaluate(given)


@names_checked
def personalise(
    source: str | Path | Run,
    store: AnyStore,
    out: str | Path | None = None,
    *,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    weights: Mapping[str, str] | None = None,
    device: str | None = None,
    observer: Observer | None = None,
) -> Personalised:
    """Make the model of a new client: ``fc.personalise(run, "new.zarr").model().predict("cat.jpg")``.

    Args:
        source: a ``Run``, the directory of a run, or a model file.
        store: store with the rows of the client.
        out: file to write the model to; None for ``NAME.safetensors``. An existing file is not replaced.
        name: name of the client; None for the name of the shard or store.
        settings, rounds: hyperparameters and rounds that replace those of the run.
        seed: a seed of the run; None for the first.
        weights, device, observer: as in ``extract``.

    Raises the FedcacheError of the command, with its exit code and hint.
    """
    given = dict(locals())
    from fedcache.calls import models

    return models.personalise(given)


def compare(
    runs: Queries = None,
    *,
    over: str | None = None,
    metric: str = "accuracy",
    test: str | None = None,
    against: str | Run | None = None,
    pairs: str = "best",
    level: float = 0.95,
    root: str | Path | None = None,
) -> Comparisons:
    """Compare finished runs: ``fc.compare(grid)``, ``fc.compare([a, b], over="clients")``. Raises UsageError.

    Args:
        runs: ``Run`` and ``Grid`` objects, directories or first letters of digests; None for all runs of
            ``FEDCACHE_HOME``.
        over: unit of the tests: ``seeds``, ``clients`` or ``settings`` (datasets and partitions). None chooses
            the unit by what differs between the runs.
        metric: accuracy, client_mean, pooled, macro_f1, ...
        test: ``wilcoxon`` or ``ttest``; None chooses the test by ``over``.
        against: reference that all runs are compared with: a name in the table, a method or a run; None for the best
            run.
        pairs: ``best`` compares all runs with the reference, ``all`` compares every pair.
        level: confidence level of intervals; tests use the significance level 1 - ``level``.
        root: directory of the runs; None for the runs of ``FEDCACHE_HOME``.
    """
    given = dict(locals())
    from fedcache.calls import runs as run_calls

    return run_calls.compare(**given)


def report(
    runs: Queries = None,
    out: str | Path = "report.html",
    *,
    title: str = "",
    embed: str = "pca",
    score: str | None = None,
    with_images: bool = False,
    data: Mapping[str, str] | None = None,
) -> Report:
    """Write one self-contained HTML file of runs. Raises UsageError, MachineError.

    Args:
        runs: runs, grids, points of grids, directories or first letters of digests; None for all runs of
            ``FEDCACHE_HOME``.
        out: file to write.
        title: title of the page.
        embed: projection of the features: pca | tsne | umap | none.
        score: accuracy of all runs: client-mean | pooled; None for the primary metric, if all methods share it.
        with_images: whether to show images of the runs' mistakes.
        data: dataset -> its folder, for images of datasets that have moved.
    """
    given = dict(locals())
    from fedcache.calls import runs as run_calls

    return run_calls.report(**given)
