"""The Python API: what a notebook calls. The environment is read here as the command line reads it.

Arguments that are None, or empty, were not given: they take the defaults of the command of the same name. The modules
that compute are imported when a function is called, so that importing fedcache brings neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedcache.calls.keywords import fields_of, names_checked
from fedcache.config import ExtractConfig, SaveModels, TrainConfig
from fedcache.progress import Observer

if TYPE_CHECKING:
    from fedcache.calls.backbones import Backbones
    from fedcache.calls.runs import Queries
    from fedcache.calls.training import Methods
    from fedcache.federate.engine.method import Method
    from fedcache.federate.partition.partition import Partition
    from fedcache.grids.result import Grid
    from fedcache.models.evaluate import RunEvaluation
    from fedcache.models.model import Model
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
    """Run frozen backbones over a dataset; returns at once when the store has everything.

    Args:
        dataset: a spec of ``fedcache datasets list``, [(image, label)], a torch Dataset, a dict of splits; None: last.
        name: of the dataset, by which ``Store.open`` and ``--dataset`` find it; None for that of its folder or file.
        backbones: one name or several, or torch modules; ``store``: directory, not the one under FEDCACHE_HOME.
        size: pixels of the side, where it is not the backbone's native one; ``recipe`` holds other departures.
        views: of each image, others drawn by ``augment``; ``text``: class templates; limit: rows, evenly spaced.
        device: ``auto``, ``cpu`` or ``cuda``, which never falls back; ``layout``: of folder levels.
        dtype, batch, workers, threads, chunk_rows: how it is computed; see ``fedcache extract --help``.
        max_bad: images that may be unreadable, ``"1%"`` or a number; weights: backbone -> file; data: name -> folder.
        no_label: labels that mean that none is known (``"-1"``); ``unlabelled``: no column holds labels.
        images_key, label_key, split_key, domain_key, group_key: columns of ``arrays:FILE`` and its like.
        skip_missing: leave out backbones without weights; ``part``: ``"1/4"`` computes a part for ``join``, alone.
        follow_links: also read what links lead to outside of the dataset's folder; ``observer``: receives progress
            messages.

    Raises FedcacheError as the command, with its exit code and hint.
    """
    given = fields_of(ExtractConfig, locals())
    from fedcache.calls import stores

    return stores.extract(given, store, observer)


@names_checked
def join(
    parts: Sequence[Store | str | Path],
    *,
    store: str | Path | None = None,
    max_bad: str = "1%",
    observer: Observer | None = None,
) -> Store:
    """Assemble all parts of a store that ``extract(part="1/4")`` and so on made, on this or other machines.

    Args:
        parts: all of them, in any order; ``store``: another place for the store than that of its dataset.
        max_bad: images of all parts that may be unreadable, ``"1%"`` or a number; ``observer``: receives progress
            messages.

    Raises StoreError for parts that are missing, given twice, unfinished or of other data, recipes or weights, and
    CorruptionError for a damaged one.
    """
    from fedcache.calls import stores

    return stores.join(parts, store, max_bad, observer)


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
    """Bring your own embeddings (npz, npy, h5, parquet, CSV, TSV, feather, safetensors) into a store.

    Args:
        file: of features and labels; ``store``: another place for it; ``replace``: drop other content of that ``name``.
        features_key, label_key, split_key, name_key, domain_key: columns that are not found by their names.
        no_label: labels that mean that none is known (-1, "NA"); ``unlabelled``: no column holds labels.
        group_key: the only groups; ``drop_nan``: leave out rows that are not finite; ``observer``: receives progress
            messages.

    Raises UsageError, StoreError, CorruptionError.
    """
    from fedcache.calls import stores

    # The names of columns, in the order of `ColumnChoice`.
    keys = (
        features_key,
        label_key,
        split_key,
        name_key,
        domain_key,
        group_key,
        no_label,
        unlabelled,
    )
    return stores.ingest(
        file, name, store, keys, replace=replace, drop_nan=drop_nan, observer=observer
    )


@names_checked
def partition(
    store: AnyStore | None,
    scheme: Any = None,
    *,
    seed: int = 0,
    name: str | None = None,
    **arguments: Any,
) -> Partition:
    """Assign the rows of a store to clients, and save the partition in the store.

    Args:
        store: a store or its path; None for the only one.
        scheme: a name as for ``fedcache partition``, or None with ``by=COLUMN``. Instead, the client of each row in the
            order of ``Store.samples.name``, a dict of rows, a CSV of ``name,client[,split]``, or a function of the
            store that returns one of these.
        seed: seed of the random draws.
        name: name under which the partition is saved.
        arguments: arguments of the scheme (clients, alpha, shards, ...). ``replace=True`` replaces a partition of the
            same name that has other rows.

    Raises UsageError if the scheme does not have an argument, if the rows do not allow its value, or if the name
    belongs to a partition with other rows.
    """
    from fedcache.calls import stores

    return stores.partition(store, scheme, seed, name, **arguments)


def shard(store: AnyStore | None, parts: Partition, out: str | Path | None = None) -> Path:
    """Write one ordinary store per client; returns their directory.

    Args:
        store: a store or its path; None for the only one.
        parts: the partition.
        out: another directory for the stores.
    """
    from fedcache.calls import stores

    return stores.shard(store, parts, out)


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
    """Train a federated method on cached features; the same run again returns the stored result.

        fc.train("fedavg", store, parts, eval_every=1, on_round=lambda r: print(r.seed, r.round, r.accuracy))

    Args:
        method: a name of ``fedcache methods list``, or a ``Method`` of your own from a file that can be read: the
            digest of that file and of your files it imports is part of the run's identity.
        store: a store or its path; None is the only one; ``parts``: a partition, name or None (the paper's).
        seeds: one or several; ``settings``: of the method, over its ``preset`` (``paper``, ``official`` or ``tuned``).
        dataset: whose store is meant, where ``store`` is None; ``domain``: only these domains of it.
        backbones: of the store; () for all that the method can use; ``clients_from``: a directory of client stores.
        rounds: None for the paper's; ``eval_every``: also score after every k-th round.
        participation, eval_clients: a round's, and scored clients: a number, share (0.1, ``"10%"``) or ``"all"``.
        client_prior: also score with the log class prior of each client, as in ``evaluate``.
        client_sampling, availability, client_dropout: ``uniform``, ``weighted``, ``poisson``; share or trace; share.
        client_clusters, clusters_per_round, asynchronous, server_step, staleness_power, client_durations: see --help.
        execution: ``auto``, ``sequential``, ``batched`` or ``gram``: how the clients of a round are computed.
        device: ``auto``, ``cpu`` or ``cuda``, which never falls back; ``dtype``: ``float32`` or ``float64``.
        client_backbones, client_set: backbones, and hyperparameter -> values, with which clients take turns.
        aggregate, attack, on_bad_update, byzantine, max_update_norm, max_rows_per_client, max_share, max_row_norm: for
            bad uploads, as in ``fedcache train --help``.
        dp_clip, dp_noise, dp_delta, dp_seed, dp_allow: privacy of clients, as in ``fedcache train --help``.
        on_round: called with a ``Round`` after every round, stored ones first; when it raises the run continues
        without.
        observer: receives progress messages; ``track``: ``mlflow`` and others, as ``--track``; ``fresh``: run again
            what is stored.
        save_model: keep what was trained, for ``Run.model`` and ``fedcache predict``; ``save_clients``: the clients
            whose own models are kept: ``"all"``, ``"none"`` or names, comma-separated; None for all up to 256 MB.

    Raises FedcacheError as the command, with its exit code and hint.
    """
    # The names of parameters are those of the configuration.
    given = fields_of(TrainConfig, locals())
    models = "none"
    if save_model:
        models = "all"
    from fedcache.calls import training

    return training.train(
        method,
        store,
        parts,
        seeds,
        settings,
        given,
        SaveModels(models, save_clients),
        observer=observer,
        on_round=on_round,
        track=track,
        fresh=fresh,
    )


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
        methods: names or your own; store, parts, seeds, settings, observer, on_round, track, fresh: as in ``train``.
        sampler, trials, pruner, exact, jobs, save_models, save_clients, retrain, score: as in ``fedcache grid --help``.
        options: other keywords of ``train``, for all points; sweeps: hyperparameters, rounds, hold_out, validation, ...
    Raises once all other points are kept: CorruptionError for a damaged one, FederatedRunError for one not trained.
    """
    from fedcache.calls import training

    return training.grid(
        methods,
        training.train_config(store, parts, seeds, settings, options or {}),
        sweeps,
        observer=observer,
        on_round=on_round,
        track=track,
        jobs=jobs,
        fresh=fresh,
        sampling=(sampler, trials, pruner),
        exact=exact,
        save=SaveModels(save_models, save_clients),
        retrain=retrain,
        score=score,
    )


def load_model(
    source: str | Path | Run,
    client: str | None = None,
    seed: int | Literal["all"] | None = None,
    method: Method | None = None,
    *,
    one_for_all: bool = False,
    client_prior: Literal["none", "classes", "counts", "fitted"] = "none",
) -> Model:
    """The trained model of a finished run: ``fc.load_model("model.safetensors").predict("photos/")``.

    Args:
        source: a ``Run``, the directory of one or the first letters of its digest, or a model file.
        client: whose model, where a method trains one for each client; ``method``: one of your own that the run was of.
        seed: one of the run's, ``"all"`` for the ensemble of all; None for the first.
        one_for_all: the server's model, where a method trains personal ones in addition to it.
        client_prior: the log class prior of ``client`` is added to the scores, as ``evaluate`` does.

    Raises UsageError for a seed or client that is not there, StoreError for a run without models, CorruptionError for a
    file that is not what was written.
    """
    given = dict(locals())
    from fedcache.calls import models

    return models.load_model(**given)


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
    out: str | Path | None = None,
    with_images: bool = False,
    options: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> RunEvaluation:
    """Measure the model of a finished run on labelled data: ``fc.evaluate(run, "folder:photos").accuracy``.

    Args:
        source, client, seed, one_for_all: whose model, as in ``load_model``; without ``client`` each client's in turn.
        dataset: of which what the model reads is extracted; or rows of a ``store``, or a file of ``embeddings``.
        split: of these rows: all, train, test or validation; ``temperature``: scores are divided by it, None for that
            fitted in training.
        client_prior: each client's own test rows are also scored with its own class counts: ``classes`` masks the
            classes that it does not have, ``counts`` adds the log counts, ``fitted`` the log of smoothed shares,
            ``em`` that of shares estimated from the scores of these rows. The accuracy without and with it is
            ``found.client_prior``.
        out: a .html, .csv or .json file of all figures; ``with_images``: the page also shows mistakes.
        options: other keywords of ``extract``; ``observer``: receives progress messages.

    Raises FedcacheError as the command, with its exit code and hint.
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
    """Make the model of a client that was not there: ``fc.personalise(run, "new.zarr").model().predict("cat.jpg")``.

    Args:
        source: a ``Run``, the directory of one, or a model file; ``seed``: one of the run's.
        store: the client's rows; ``name``: the client's, None for that of the shard or store.
        out: the model's file, None for ``NAME.safetensors``; one that is there is kept.
        settings, rounds: in place of the run's; weights, device, observer: as in ``extract``.

    Raises FedcacheError as the command, with its exit code and hint.
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
        runs: ``Run`` and ``Grid`` objects, directories or first letters of digests; None is all runs of the home.
        over: unit of the tests: ``seeds``, ``clients``, or ``settings`` (datasets and partitions); None by what varies.
        metric: accuracy, client_mean, pooled, macro_f1, ...; ``test``: ``wilcoxon`` or ``ttest``, None by ``over``.
        against: what all are compared with: a name in the table, a method, a run; None is the best.
        pairs: ``best``, or ``all`` pairs; ``level`` of intervals, tests decide at 1 - level; ``root`` of the runs.
    """
    from fedcache.calls import runs as finished

    return finished.compare(
        runs, root, over=over, metric=metric, test=test, against=against, pairs=pairs, level=level
    )


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
        runs: runs, grids, points, directories or first letters of digests; None for all of ``FEDCACHE_HOME``.
        out: the file; ``title``: its heading; ``embed``: pca | tsne | umap | none; ``score``: client-mean | pooled.
        with_images: show what runs got wrong, with images of their ``data``: dataset -> folder, where it has moved.
    """
    from fedcache.calls import runs as finished

    folders = None
    if with_images:
        folders = data or {}
    return finished.report(runs, out, title, embed, score, folders)
