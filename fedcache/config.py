"""Configuration: all settings, the folders of ``$FEDCACHE_HOME``, and the reader of ``fedcache.toml``.

Each field is a key of ``fedcache.toml`` and an option of the command line, declared once. The option overrides
``fedcache.toml`` of the working directory (or ``--config FILE``), which overrides the default. An unknown section or
key is an error, because ignoring a misspelt hyperparameter would waste a day of training.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence, ValuesView
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from fedcache.errors import UsageError, unknown
from fedcache.parsing import in_a_list, parse_toml

DATA = "Data"
CLIENTS = "Clients"
METHOD = "Method"
TRAINING = "Training"
TRUST = "Trust"
FEATURES = "Features"
PARTICIPATION = "Participation"
COMPUTING = "Computing"
RESULTS = "Results"
"""Panels of the help: the constants from ``DATA`` to ``RESULTS``."""

PANELS = (
    METHOD,
    "Points",
    DATA,
    FEATURES,
    "Rows",
    "Model",
    CLIENTS,
    TRAINING,
    PARTICIPATION,
    TRUST,
    "Result",
    RESULTS,
    COMPUTING,
)
"""All panels in the order in which the help shows them."""


@dataclass(frozen=True)
class OptionInfo:
    """Metadata of a field that is an option of the command line.

    Attributes:
        meaning: help text.
        panel: heading under which the help of a command shows the option.
        short: one-letter form, such as ``-d``.
        name: the long option, if it is not the field's name.
        choices: the words that the option takes, if they are few; the code that uses the value checks them.
        minimum: the smallest number that the option takes.
        default: the default in words, if the field's default does not say it.
        path: whether the value is a path, for completion.
        remote: whether the value may also be the address of a published store.
        split: whether one use of a ``key=value`` option may hold several pairs, comma-separated.
        whole: whether each use is one value, including its commas.
        added: whether pairs of the command line are added to those of the file; else they replace those of the file.
        common: whether ``-h`` shows the option; ``--help-all`` shows every option.
    """

    meaning: str
    panel: str
    short: str = ""
    name: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    default: str = ""
    path: bool = False
    remote: bool = False
    split: bool = False
    whole: bool = False
    added: bool = False
    common: bool = False


ADAPTATIONS = ("t3a", "tent", "tda")
"""Ways in which a model adapts to the rows that it classifies (``models.adapt``)."""

CLIENT_PRIORS = ("none", "classes", "counts", "fitted", "em")
"""Priors that can be added to the scores of a client's test rows.

``none`` changes nothing. ``classes`` masks classes without training rows of the client. ``counts`` adds the log of its
class counts, which masks the same classes. ``fitted`` adds the log of its smoothed class shares. ``em`` adds the
result of ``models.client_prior.estimate_log_prior``.
"""


def option(default: Any, meaning: str, panel: str, *, default_text: str = "", **info: Any) -> Any:
    """A field that is also an option; the default ``{}`` makes a new dictionary for each object.

    Args:
        default: default of the field.
        meaning, panel, info: as of ``OptionInfo``.
        default_text: the default in words.
    """
    metadata = {"option": OptionInfo(meaning, panel, default=default_text, **info)}
    # The default of a field with a factory is given as {}.
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_name(item: Field[Any]) -> str:
    """The long option of a field."""
    declared: str = item.metadata["option"].name
    return declared or "--" + item.name.replace("_", "-")


def option_value(value: object) -> str:
    """A value of a configuration in the form that its option accepts."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return in_a_list(map(str, value))
    return str(value)


def option_words(config: Any, without: Sequence[str] = ()) -> list[str]:
    """The command-line words of a configuration; options at their defaults are left out."""
    words = []
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in without or value in (item.default, None, (), {}):
            continue
        name = option_name(item)
        if value is True:
            words.append(name)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                words += [name, f"{key}={option_value(one)}"]
        elif item.metadata["option"].whole:
            for one in value:
                words += [name, one]
        else:
            words += [name, option_value(value)]
    return words


# Choices and help texts of options below.
SAMPLING = ("uniform", "weighted", "poisson")
BAD_UPDATES = ("fail", "reject")
DATASET = (
    "A dataset such as digits or folder:PATH (`fedcache datasets list` shows all kinds), or the "
    "name of an ingested dataset. a=SPEC,b=SPEC joins two datasets as the domains a and b."
)
BACKBONES = (
    "Backbones, comma-separated: names of `fedcache backbones list`, or your own as onnx:FILE, "
    "tflite:FILE, hf:PATH or module:MODULE:FACTORY."
)

FILE_NAME = "fedcache.toml"


@dataclass(frozen=True)
class ExtractConfig:
    """``[extract]`` of fedcache.toml: every field is the long option of the same name."""

    dataset: str | None = option(
        None,
        DATASET,
        DATA,
        short="-d",
        default_text="the dataset extracted last, else digits",
        common=True,
    )
    name: str | None = option(
        None,
        "Name for the dataset. Later commands take it as --dataset NAME.",
        DATA,
        default_text="the name of the folder or file",
        common=True,
    )
    backbones: tuple[str, ...] = option(
        (),
        BACKBONES,
        FEATURES,
        short="-b",
        default_text="none; name at least one",
        common=True,
    )
    views: int = option(
        1,
        "Views to store per image; view 0 is the image without augmentation.",
        FEATURES,
        minimum=1,
    )
    augment: str | None = option(
        None,
        "Random augmentation of the extra views of each image, e.g. flip=0.5,rotate=30. View 0 is the image itself.",
        FEATURES,
        default_text="simclr",
    )
    text: tuple[str, ...] = option(
        (),
        "Prompt with {} for the class name. Repeat the option to average over several prompts.",
        FEATURES,
        whole=True,
        default_text='the prompt of the backbone, e.g. "a photo of a {}."',
        common=True,
    )
    recipe: Mapping[str, str] = option(
        {},
        "Changes of the preprocessing, comma-separated: key=value for all backbones, NAME:key=value for one. Keys "
        "are size, resize, interpolation, crop_pct and norm for images; pooling, max_tokens and prompt for texts; "
        "pooling and seconds for sounds; dtype for all; and output for your own model files.",
        FEATURES,
        split=True,
        default_text="the published preprocessing of each backbone",
    )
    size: int | None = option(
        None,
        "Width and height of the model's input in pixels, the same as --recipe size=N.",
        FEATURES,
        default_text="the size of the backbone, e.g. 224",
        common=True,
    )
    limit: int | None = option(
        None,
        "Use only N images, evenly spaced over the dataset.",
        DATA,
        minimum=1,
        default_text="all images",
        common=True,
    )
    layout: str | None = option(
        None,
        "Meaning of the folder levels, e.g. domain/class; client/class makes a group called client.",
        DATA,
        default_text="detected from the folder names",
        common=True,
    )
    images_key: str | None = option(
        None,
        "Column that holds the inputs: images, texts, numeric arrays or file paths.",
        DATA,
        default_text="detected by name",
    )
    label_key: str | None = option(
        None,
        "Column of the labels.",
        DATA,
        default_text="detected by name, e.g. label, y, target or class",
        common=True,
    )
    split_key: str | None = option(
        None,
        "Column that assigns rows to train, test and validation.",
        DATA,
        default_text="detected by name",
    )
    domain_key: str | None = option(
        None, "Column of the domains.", DATA, default_text="detected by name"
    )
    group_key: str | None = option(
        None,
        "Columns to keep as groups, e.g. hospital,scanner; each can define the clients (--by).",
        DATA,
        default_text="every column that can be a group",
    )
    no_label: str | None = option(
        None,
        'Values of the label column that mean "no label", e.g. -1 or NA,?.',
        DATA,
        default_text="empty values",
    )
    unlabelled: bool = option(
        False, "Treat the dataset as unlabelled, even if a column looks like labels.", DATA
    )
    follow_links: bool = option(
        False, "Also follow links to files outside the dataset's folder.", DATA
    )
    device: str = option(
        "auto",
        "Device of the model. `cuda` uses the first GPU and all others of its kind, and fails if there is no "
        "GPU. `cuda:0,cuda:2` uses only these two.",
        COMPUTING,
        choices=("auto", "cpu", "cuda"),
        common=True,
    )
    dtype: str = option(
        "auto",
        "Number type in which the model computes.",
        COMPUTING,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    batch: int | None = option(
        None,
        "Number of images in a batch.",
        COMPUTING,
        minimum=1,
        default_text="32 on a CPU, 256 on a GPU",
    )
    workers: int | None = option(
        None,
        "Number of worker processes; 0 computes in this process.",
        COMPUTING,
        minimum=0,
        default_text="depends on the amount of work and the CPU cores",
    )
    threads: int = option(1, "Threads per worker process.", COMPUTING, minimum=1)
    torch_compile: bool = option(
        False,
        "Compile image models with torch.compile. This needs a C++ compiler and up to a minute for each model. On a "
        "CPU it saved at most 10 % of the models' time.",
        COMPUTING,
    )
    chunk_rows: int | None = option(
        None,
        "Rows per chunk file of the store.",
        COMPUTING,
        minimum=1,
        default_text="depends on the width of the features",
    )
    part: str | None = option(
        None,
        "Compute only one part of the dataset, e.g. 1/4, in a separate folder. `fedcache join` assembles the parts. "
        "`auto` reads the part from SLURM_ARRAY_TASK_ID, or from RANK and WORLD_SIZE.",
        COMPUTING,
        default_text="the whole dataset",
    )
    max_bad: str = option(
        "1%", "Stop if more images than this are unreadable: a share (1%) or a number.", DATA
    )
    weights: Mapping[str, str] = option(
        {},
        "NAME=FILE: local weights of a backbone. Repeatable.",
        FEATURES,
        default_text="searched by name",
        common=True,
    )
    data: Mapping[str, str] = option(
        {},
        "NAME=PATH: where a named dataset is stored. Repeatable.",
        DATA,
        default_text="searched under FEDCACHE_HOME",
    )
    skip_missing: bool = option(False, "Skip backbones whose weights are missing.", FEATURES)


@dataclass(frozen=True)
class PartitionConfig:
    """``[partition]`` of fedcache.toml. ``options`` are the arguments of the scheme (``alpha``, ``shards``, ...)."""

    scheme: str | None = option(
        None,
        "How rows are assigned to clients: iid, shards, dirichlet, lda, feature-shift, label-shift, "
        "feature-label-shift, few-shot, flesd or natural.",
        CLIENTS,
        short="-s",
        default_text="from the paper of the first method, e.g. dirichlet for fed3r",
        common=True,
    )
    clients: int | None = option(
        None,
        "Number of clients.",
        CLIENTS,
        short="-m",
        minimum=1,
        default_text="from the paper of the first method, e.g. 100 for fed3r",
        common=True,
    )
    seed: int = option(0, "Random seed of the partition.", CLIENTS, name="--partition-seed")
    options: Mapping[str, Any] = option(
        {},
        "key=value: an argument of the scheme that has no separate option. Repeatable.",
        CLIENTS,
        name="--option",
        added=True,
        default_text="none",
    )

    def __post_init__(self) -> None:
        for key in self.options:
            if key in RESERVED or (key == "clients" and self.clients is not None):
                raise UsageError(
                    f"{key} is a setting of the partition, so --option cannot set it.",
                    "fedcache partition --help   lists the options.",
                )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the scheme, with the number of clients if it is given."""
        given = dict(self.options)
        if self.clients is not None:
            given["clients"] = self.clients
        return given


RESERVED = ("store", "scheme", "seed", "name", "save", "replace")
"""Settings of a partition. No scheme has an argument with one of these names."""


PRESETS = ("default", "paper", "official", "tuned")
"""Presets of hyperparameters.

``paper`` has the paper's values. ``default`` has them too, except where they are known to fail. ``official`` has the
values of the released code. ``tuned`` has the paper's values, except for some tuned numbers,
which are mostly learning rates.
"""


@dataclass(frozen=True)
class SharedPartition(PartitionConfig):
    """The partition of a grid of several methods. The paper of one of them decides what the user leaves open.

    It decides for all methods, because accuracies on different partitions cannot be compared.
    """

    paper_of: str = ""


@dataclass(frozen=True)
class TrainConfig:
    """``[train]`` of fedcache.toml, and of the ``config.toml`` in the directory of a run, which repeats the run."""

    method: str | None = option(
        None,
        "Federated method; `fedcache methods list` shows all.",
        METHOD,
        default_text="none; name one",
    )
    preset: str = option(
        PRESETS[0],
        "Hyperparameter values: `paper` (those of the paper), `default` (the same, except values that are known to "
        "fail), `official` (those of the released code) or `tuned` (those of the paper, with tuned learning rates).",
        METHOD,
        choices=PRESETS,
    )
    dataset: str | None = option(
        None, DATASET, DATA, short="-d", default_text="the dataset of the store", common=True
    )
    store: str | None = option(
        None,
        "Store directory, a name of `fedcache ls`, or the address of a published store.",
        DATA,
        path=True,
        remote=True,
        default_text="the only store",
    )
    backbones: tuple[str, ...] = option(
        (), BACKBONES, DATA, short="-b", default_text="all backbones of the store", common=True
    )
    domain: tuple[str, ...] = option(
        (), "Use only these domains, comma-separated.", DATA, default_text="all domains"
    )
    partition: str | None = option(
        None,
        "A saved partition (`fedcache partition`), or a partition file.",
        CLIENTS,
        short="-p",
        default_text="made by --scheme",
        common=True,
    )
    clients_from: str | None = option(
        None,
        "Directory of client stores (`fedcache shard`).",
        CLIENTS,
        default_text="none; clients come from the partition",
    )
    rounds: int | None = option(
        None,
        "Rounds of training.",
        TRAINING,
        short="-r",
        minimum=1,
        default_text="from the method's paper, e.g. 100 for fedavg, 1 for fed3r",
        common=True,
    )
    participation: str | None = option(
        None,
        "Clients per round: a number, a share (0.1 or 10%) or `all`. With --asynchronous, it is the number of "
        "clients that train at the same time.",
        PARTICIPATION,
        default_text="from the method's paper, e.g. all for fedavg",
        common=True,
    )
    client_sampling: str = option(
        "uniform",
        "How clients are sampled each round: `uniform` (fixed number), `weighted` (fixed number; clients with more "
        "rows are drawn more often) or `poisson` (each client independently).",
        PARTICIPATION,
        choices=SAMPLING,
    )
    availability: str | None = option(
        None,
        "Availability of clients: the share of rounds in which each client is available (0.8), or a CSV file with "
        "the columns client,first,last (first and last round).",
        PARTICIPATION,
        default_text="always",
    )
    client_dropout: float = option(
        0.0, "Share of each round's clients that drop out and send nothing.", PARTICIPATION
    )
    client_clusters: str | None = option(
        None,
        "Number of clusters of clients, or a CSV file with the columns client,cluster. Each "
        "round first draws clusters, then clients of these clusters.",
        PARTICIPATION,
        default_text="none",
    )
    clusters_per_round: int = option(
        1, "Number of clusters to draw for each round.", PARTICIPATION, minimum=1
    )
    asynchronous: int | None = option(
        None,
        "Train asynchronously (FedBuff): the server takes a step after every N updates, without waiting "
        "for the other clients.",
        PARTICIPATION,
        minimum=1,
        default_text="off: the server waits for all clients of a round",
    )
    server_step: float = option(
        1.0,
        "With --asynchronous: step size of the server on the mean of the N updates.",
        PARTICIPATION,
    )
    staleness_power: float = option(
        0.5,
        "With --asynchronous: the exponent a. An update that is t server steps old has the weight (1+t)^-a.",
        PARTICIPATION,
    )
    client_durations: str | None = option(
        None,
        "Simulated training time of clients: half-normal, equal, rows (proportional to the rows), or a "
        "CSV file with the columns client,duration.",
        PARTICIPATION,
        default_text="half-normal with --asynchronous, else no simulated time",
    )
    seeds: str = option(
        "0",
        "Random seeds, e.g. 0,1,2 or 0-4; at most 10,000 seeds, each below 10^9.",
        TRAINING,
        common=True,
    )
    eval_every: int = option(
        0,
        "Score the model after every N-th round; 0 scores only the final model.",
        TRAINING,
        minimum=0,
    )
    eval_clients: str | None = option(
        None,
        "Number or share of clients whose personal models are scored. The clients are drawn once.",
        TRAINING,
        default_text="all clients",
    )
    client_prior: str = option(
        "none",
        "Also report the accuracy with a class prior of each client added to the scores of its test rows. Only for "
        "methods with one global model.",
        TRAINING,
        choices=CLIENT_PRIORS,
    )
    stages: int = option(
        1,
        "Also score the method while the classes arrive in N stages (class-incremental learning). Only for one-round "
        "methods whose uploads are sums over labelled rows.",
        TRAINING,
        minimum=1,
    )
    base_classes: str | None = option(
        None,
        "Number of classes to train on, or `half`: the first ones are used. The other classes are also scored, by "
        "their texts (base-to-new generalisation).",
        TRAINING,
        default_text="all classes",
    )
    transfer: tuple[str, ...] = option(
        (),
        "Also score the test rows of these stores, comma-separated. Their classes are scored by their texts "
        "(cross-dataset transfer).",
        TRAINING,
        remote=True,
        default_text="no other store",
    )
    execution: str = option(
        "auto",
        "How clients are trained: `sequential` (one by one), `batched` (many at once) or `gram` (on products of each "
        "client's rows with each other, which is cheap for clients with few rows). `auto` selects the cheapest mode "
        "that the method supports.",
        COMPUTING,
        choices=("auto", "sequential", "batched", "gram"),
    )
    device: str = option(
        "auto",
        "Device of the training. `cuda` fails if there is no GPU.",
        COMPUTING,
        choices=("auto", "cpu", "cuda"),
        common=True,
    )
    dtype: str = option(
        "float32", "Number type of features and heads.", COMPUTING, choices=("float32", "float64")
    )
    set: Mapping[str, Any] = option(
        {},
        "key=value: a hyperparameter of the method; `fedcache methods info METHOD` lists them. Repeatable.",
        METHOD,
        added=True,
        default_text="the values of --preset",
        common=True,
    )
    client_backbones: tuple[str, ...] = option(
        (),
        "Backbones of the clients in turn. a,b,a+b: the first client uses a, the second b, the third both, the fourth "
        "a again, and so on. Only for methods that allow different backbones.",
        CLIENTS,
        default_text="--backbones for every client",
    )
    client_set: Mapping[str, Any] = option(
        {},
        "key=v1,v2: the first client uses the value v1, the second v2, and so on in turn. Repeatable.",
        CLIENTS,
        default_text="the same values for every client",
    )
    aggregate: str = option(
        "mean",
        "How the server combines uploads: mean | median | trimmed:0.1 | geomedian | krum | multikrum:5 | nnm+RULE | "
        "clip:1.0. `mean` is the rule of the method itself.",
        TRUST,
    )
    attack: str | None = option(
        None,
        "Simulate malicious clients: NAME:SHARE:SCALE, e.g. sign-flip:0.2:10 for a fifth of the clients. NAME is "
        "sign-flip | ipm | alie | mimic | gaussian | label-flip | nan. SCALE is the attack's factor (only sign-flip, "
        "ipm, gaussian).",
        TRUST,
        default_text="none",
    )
    on_bad_update: str | None = option(
        None,
        "What to do with an invalid upload: `fail` ends the run, `reject` leaves the upload out.",
        TRUST,
        choices=BAD_UPDATES,
        default_text="fail; reject with Flower",
    )
    byzantine: float = option(0.2, "Share of malicious clients that --aggregate assumes.", TRUST)
    max_update_norm: float | None = option(
        None,
        "Treat updates with a norm above this as invalid (see --on-bad-update).",
        TRUST,
        default_text="no limit",
    )
    max_rows_per_client: int | None = option(
        None,
        "Leave out clients with more training rows than this.",
        TRUST,
        minimum=1,
        default_text="no limit; with Flower 10 times the median over sites",
    )
    max_share: float | None = option(
        None,
        "Largest share of the total weight of a round that one client can have.",
        TRUST,
        default_text="no limit: weights are proportional to the number of rows",
    )
    max_row_norm: float | None = option(
        None,
        "Largest possible norm of a feature row. An uploaded statistic is invalid if rows of at most this norm "
        "cannot produce it.",
        TRUST,
        default_text="the largest norm of the method's normalised features; no limit for other features",
    )
    dp_clip: float | None = option(
        None,
        "Differential privacy: clip each update to this norm.",
        TRUST,
        default_text="no differential privacy",
    )
    dp_noise: float | None = option(
        None,
        "Standard deviation of the Gaussian noise on the sum of clipped updates, as a multiple of --dp-clip.",
        TRUST,
        default_text="none",
    )
    dp_delta: float | None = option(
        None, "The delta for which epsilon is reported.", TRUST, default_text="1e-5"
    )
    dp_seed: int | None = option(
        None,
        "Use seeded, reproducible noise for simulation. It provides no privacy protection.",
        TRUST,
        minimum=0,
        default_text="noise from the operating system",
    )
    dp_allow: str | None = option(
        None,
        "Facts that the run may publish although epsilon does not cover them, comma-separated: "
        "evaluation,participants,rows,statistics.",
        TRUST,
        default_text="nothing",
    )


SECTIONS: dict[str, type] = {
    "extract": ExtractConfig,
    "partition": PartitionConfig,
    "train": TrainConfig,
}


ADDRESSES = ("track", "mirror", "superlink", "ray_address")
"""Arguments that may be an address with a scheme: of a tracking server, a mirror, a Flower or a Ray server."""

STORE_SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "https", "http")
"""Schemes of addresses of published stores. ``fedcache publish`` cannot write to the last two, https and http."""

# A scheme has two letters or more, because one letter before the colon is a drive of Windows.
# One slash is enough after the scheme of a store: ``s3:/bucket/x`` is a typing error, not a folder ``s3:``.
_SCHEMES = "|".join(STORE_SCHEMES)
_REMOTE_TEXT = re.compile(rf"(?:^|[=:,])((?:{_SCHEMES})(?=:/)|[A-Za-z][A-Za-z0-9+.-]+(?=://))")
# A Path has lost one or both of the slashes.
_REMOTE_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/|$)")
_STORE_ADDRESS = re.compile(rf"(?:{_SCHEMES})://[^/]")


def is_store_address(value: object) -> TypeGuard[str]:
    """Whether a text is the address of a published store.

    >>> [is_store_address(text) for text in ("s3://bucket/digits", "stores/digits.zarr", "s3://")]
    [True, False, False]
    """
    return isinstance(value, str) and _STORE_ADDRESS.match(value) is not None


def refuse_remote(value: object, name: str, *, remote: bool = False) -> None:
    """Refuse an address such as ``s3://bucket/x``, which would be taken for a local folder named ``s3:``.

    Args:
        value: a text, a path, or a list or mapping of them; any other value is accepted.
        name: name of the option, argument or variable, for the message.
        remote: whether the value may be the address of a published store.

    Raises:
        UsageError for an address within the text.
    """
    if remote and is_store_address(value):
        return
    # The items of containers are checked; other values are no address.
    items = value
    if isinstance(value, Mapping):
        items = value.values()
    if isinstance(items, list | tuple | ValuesView):
        for item in items:
            refuse_remote(item, name, remote=remote)
    found = None
    if isinstance(value, Path):
        found = _REMOTE_PATH.match(str(value))
    elif isinstance(value, str):
        found = _REMOTE_TEXT.search(value)
    if found is None:
        return
    if remote and isinstance(value, str):
        known = ", ".join(f"{scheme}://" for scheme in STORE_SCHEMES)
        raise UsageError(
            f"{name}: {value} is not the address of a store.",
            f"Give a local path, or an address that begins with one of {known}, such as s3://bucket/digits",
        )
    raise UsageError(
        f"{name} needs a local path, but {found[1]}:// is an address.",
        "Copy or mount the data and give the local path. Only published stores can be read from an address. In Python, "
        "this address is a str, not a Path.",
    )


@dataclass(frozen=True)
class Home:
    """``$FEDCACHE_HOME``: stores and results. They are data, not a cache that may be deleted at any time."""

    root: Path
    offline: bool = False

    @classmethod
    def from_environment(cls) -> Home:
        """``FEDCACHE_HOME``, else the XDG data directory; ``FEDCACHE_OFFLINE`` forbids downloads."""
        offline = os.environ.get("FEDCACHE_OFFLINE", "") not in ("", "0")
        root = os.environ.get("FEDCACHE_HOME")
        if root:
            refuse_remote(root, "FEDCACHE_HOME")
            return cls(Path(root).expanduser(), offline)
        from platformdirs import user_data_path

        return cls(user_data_path("fedcache"), offline)

    @property
    def stores(self) -> Path:
        """Feature stores."""
        return self.root / "stores"

    def store(self, slug: str, digest: str) -> Path:
        """``stores/<slug>-<8 hex of the content digest>.zarr``."""
        return self.stores / f"{slug}-{digest[:8]}.zarr"

    def stores_of(self, slug: str) -> list[Path]:
        """The stores of datasets with this name, one for each content, in the order of digests.

        If there are none, it is the first part of a store that is not joined yet, whose error names the command.
        """
        stem = f"{slug}-" + "[0-9a-f]" * 8
        parts = sorted(self.stores.glob(f"{stem}.part-*.zarr"))
        return sorted(self.stores.glob(f"{stem}.zarr")) or parts[:1]

    @property
    def runs(self) -> Path:
        """Results."""
        return self.root / "runs"

    @property
    def data(self) -> Path:
        """Datasets found by name."""
        return self.root / "data"

    @property
    def digests(self) -> Path:
        """Cached digests of files, so that unchanged files are not read again."""
        return self.root / "digests"

    @property
    def last(self) -> Path:
        """File that records which store was extracted last."""
        return self.root / "last.json"


@dataclass(frozen=True)
class SaveModels:
    """Trained models to keep.

    Attributes:
        which: points of a grid whose models are kept: ``all``, ``best`` (of each method) or ``none``.
        clients: clients whose personal models are kept: ``all``, ``none`` or names, comma-separated; None for all, up
            to a limit in bytes.
    """

    which: str = "all"
    clients: str | None = None


C = TypeVar("C")


def read_file(
    path: Path | None, note: Callable[[str], None] = lambda _text: None
) -> dict[str, dict[str, Any]]:
    """The sections of a configuration file; {} when ``path`` is None and the working directory has none.

    Raises UsageError if the file is missing, is not TOML, or has an unknown section. ``note`` receives a sentence with
    the path of a file that is used without being named.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.exists():
            return {}
        note(f"Using settings from {path.resolve()}; options of the command line override them.")
    try:
        data = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"Cannot read {path}: {error.strerror}.",
            "Give the path of a file that you can read: --config FILE",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{path} is not valid TOML: {error}.", "Fix that line, then run the command again."
        ) from error
    for name, section in data.items():
        if name not in SECTIONS:
            raise unknown(f"section in {path}", name, SECTIONS)
        if not isinstance(section, dict):
            raise UsageError(
                f"{path}: {name} must be a table.", f"Write [{name}] on a separate line."
            )
    return data


def resolve(
    kind: type[C], section: Mapping[str, Any], given: Mapping[str, Any], where: str = FILE_NAME
) -> C:
    """A checked configuration, from a section that options override.

    Args:
        kind: the dataclass of the configuration.
        section: section of a file, or keywords of the Python API. Keys are names of fields or of options; the value
            None means that a key was not given.
        given: name of a field -> value of its option. None or an empty value means that the option was not given.
        where: the place of the section, for messages.

    Raises:
        UsageError for an unknown key, a value of the wrong type, or a value below the minimum of its option.
    """
    hints = typing.get_type_hints(kind)
    known = field_names(kind)
    by_name = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in section.items():
        key = known.get(name.replace("-", "_"))
        if key is None:
            raise unknown(f"key in {where}", name, hints)
        if value is None:
            continue
        if key in values and values[key] != value:
            raise UsageError(
                f"{where} gives {key} under two names, with different values.", f"Remove {name}."
            )
        values[key] = _typed(by_name[key], name, value, hints[key], where)
    for key, value in given.items():
        if value in (None, (), [], {}):
            continue
        typed = _typed(by_name[key], key, value, hints[key], "the command line")
        if by_name[key].metadata["option"].added:
            typed = {**values.get(key, {}), **typed}
        values[key] = typed
    for name, value in values.items():
        info = by_name[name].metadata["option"]
        refuse_remote(value, name, remote=info.remote)
        least = info.minimum
        if least is not None and isinstance(value, int | float) and value < least:
            raise UsageError(
                f"{name} is {value}, expected at least {least}.", f"For example {name}={least}"
            )
    return kind(**values)


def field_names(kind: type) -> dict[str, str]:
    """Allowed name of a field in ``fedcache.toml`` and in Python -> the field; the option's name is also allowed."""
    found = {}
    for item in fields(kind):
        found[option_name(item).removeprefix("--").replace("-", "_")] = item.name
        found[item.name] = item.name
    return found


def _typed(item: Field[Any], name: str, value: Any, hint: Any, where: str) -> Any:
    """``value`` as the field's type. Raises UsageError for a value of another type; the message has value and type."""
    if isinstance(hint, types.UnionType):
        choices = typing.get_args(hint)
    else:
        choices = (hint,)
    is_bool = type(value) is bool  # for Python, a bool is also an int
    for choice in choices:
        origin = typing.get_origin(choice) or choice
        if origin is tuple:
            # A value of an option with whole words may contain commas, such as a prompt template.
            if isinstance(value, str) and item.metadata["option"].whole:
                return (value,)
            if isinstance(value, str):
                parts = [part.strip() for part in value.split(",")]
                return tuple(part for part in parts if part)
            if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
                return tuple(value)
        elif origin is Mapping and isinstance(value, Mapping):
            _, value_type = typing.get_args(choice)
            if value_type is not str:
                return dict(value)
            if all(isinstance(key, str) and _is_text(entry) for key, entry in value.items()):
                return {key: str(entry) for key, entry in value.items()}
        elif origin in (bool, int) and type(value) is origin:
            return value
        elif origin is float and isinstance(value, int | float) and not is_bool:
            return float(value)
        elif origin is str and _is_text(value):
            return str(value)
    names = [getattr(c, "__name__", str(c)) for c in choices if c is not types.NoneType]
    expected = " or ".join(names)
    raise UsageError(
        f"{name} in {where} is {value!r}; expected {expected}.",
        "See `fedcache config` for every key and its value.",
    )


def _is_text(value: Any) -> bool:
    """Whether a value stands for a text: a text, a number or a path."""
    return isinstance(value, str | int | float | Path) and type(value) is not bool


def to_table(config: Any) -> dict[str, Any]:
    """A configuration as a TOML table: None and empty values are left out."""
    table = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if value in (None, (), {}):
            continue
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        table[item.name] = value
    return table
