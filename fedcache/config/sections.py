"""What can be configured: each field is a key of ``fedcache.toml`` and an option of the command line, declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptionInfo:
    """How a field is an option of the command line.

    Attributes:
        meaning: one sentence.
        panel: heading under which the help of a command shows it.
        short: its one-letter form, ``-d``.
        names: long options in place of the field's own name; of several, the last are hidden aliases.
        choices: the words it takes, where they are few; their check is where they are used.
        minimum: the smallest number it takes.
        default: what is done without it, in words, where the field's default does not say it.
        path: whether it is a path, for completion.
        split: whether one use of a ``key=value`` option may hold several pairs, comma-separated.
        once: whether a key that comes twice is refused.
        whole: whether each use is one value, commas and all.
    """

    meaning: str
    panel: str
    short: str = ""
    names: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    default: str = ""
    path: bool = False
    split: bool = False
    once: bool = False
    whole: bool = False


def option(default: Any, meaning: str, panel: str, *, said: str = "", **info: Any) -> Any:
    """A field that is an option too; ``{}`` as its default is a new dictionary.

    Args:
        default: of the field.
        meaning: as of ``OptionInfo``, like ``panel`` and ``info``.
        said: the default in words.
    """
    metadata = {"option": OptionInfo(meaning, panel, default=said, **info)}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


DATA, CLIENTS, METHOD, TRAINING, TRUST = "Data", "Clients", "Method", "Training", "Trust"
FEATURES, COMPUTING, RESULTS = "Features", "Computing", "Results"
"""Panels of the help."""

DATASET = "digits, folder:PATH, torchvision:NAME, paper:NAME, a=SPEC,b=SPEC as domains, or a name given to ingest."
BACKBONES = "Names, comma-separated; see `fedcache backbones list`."


@dataclass(frozen=True)
class ExtractConfig:
    """``[extract]`` of fedcache.toml: every field is the long option of the same name."""

    dataset: str | None = option(None, DATASET, DATA, short="-d", said="the last one")
    backbones: tuple[str, ...] = option((), BACKBONES, FEATURES, short="-b", said="none; name one or several")
    views: int = option(1, "Views per image; view 0 is the plain one.", FEATURES, minimum=1)
    text: tuple[str, ...] = option(
        (), "Prompt template with {}; repeat for an ensemble.", FEATURES, whole=True, said="the backbone's own"
    )
    recipe: Mapping[str, str] = option(
        {},
        "key=value or NAME:key=value, comma-separated: size, resize, interpolation, crop_pct, norm, dtype.",
        FEATURES,
        split=True,
        said="the backbone's own",
    )
    size: int | None = option(None, "Short for --recipe size=N.", FEATURES, said="the backbone's own")
    limit: int | None = option(
        None, "Only N images, evenly spaced over the dataset.", DATA, minimum=1, said="all images"
    )
    layout: str | None = option(
        None, "Meaning of the folder levels, e.g. domain/class or split/class.", DATA, said="recognised"
    )
    device: str = option(
        "auto", "Where the model runs; cuda never falls back.", COMPUTING, choices=("auto", "cpu", "cuda")
    )
    dtype: str = option("auto", "Compute dtype.", COMPUTING, choices=("auto", "float32", "bfloat16", "float16"))
    batch: int | None = option(None, "Images per batch.", COMPUTING, minimum=1, said="32 on a CPU, 256 on a GPU")
    workers: int | None = option(
        None, "Processes; 0 keeps everything in this one.", COMPUTING, minimum=0, said="chosen by work and cores"
    )
    threads: int = option(1, "Threads per process.", COMPUTING, minimum=1)
    chunk_rows: int | None = option(None, "Rows per chunk file.", COMPUTING, minimum=1, said="by the width of features")
    max_bad: str = option("1%", "Unreadable images to accept: 1% or a number.", DATA)
    weights: Mapping[str, str] = option(
        {}, "NAME=FILE, a backbone's local weights; repeatable.", FEATURES, said="looked for by name"
    )
    data: Mapping[str, str] = option(
        {}, "NAME=PATH, where a named dataset lies; repeatable.", DATA, said="under FEDCACHE_HOME"
    )
    skip_missing: bool = option(False, "Go on without backbones whose weights are missing.", FEATURES)


@dataclass(frozen=True)
class PartitionConfig:
    """``[partition]`` of fedcache.toml. ``options`` are the arguments of the scheme (``alpha``, ``shards``, ...)."""

    scheme: str | None = option(
        None,
        "iid, shards, dirichlet, lda, feature-shift, label-shift, feature-label-shift, few-shot or flesd.",
        CLIENTS,
        short="-s",
        said="the method's paper's",
    )
    clients: int | None = option(
        None, "Number of clients.", CLIENTS, short="-m", minimum=1, said="the method's paper's, or the scheme's"
    )
    seed: int = option(0, "Seed of the partition.", CLIENTS)
    options: Mapping[str, Any] = option(
        {},
        "Any other argument of the scheme: key=value; repeatable.",
        CLIENTS,
        names=("--option",),
        said="the scheme's",
    )


@dataclass(frozen=True)
class SchemeArguments:
    """Arguments of partition schemes that have an option of their own; ``PartitionConfig.options`` holds them."""

    alpha: float | None = option(
        None, "Concentration of Dirichlet schemes; small is skewed.", CLIENTS, said="the scheme's"
    )
    shards: int | None = option(None, "Label shards per client (scheme shards).", CLIENTS, said="the scheme's")
    shots: int | None = option(
        None, "Examples per class (few-shot, feature-shift, feature-label-shift).", CLIENTS, said="the scheme's"
    )


@dataclass(frozen=True)
class TrainConfig:
    """``[train]`` of fedcache.toml, and the ``config.toml`` every run writes to re-run itself."""

    method: str | None = option(None, "See `fedcache methods list`.", METHOD, said="none; name one")
    preset: str = option(
        "paper", "Equations as printed, or as in the released code.", METHOD, choices=("paper", "official")
    )
    dataset: str | None = option(None, DATASET, DATA, short="-d", said="that of the store")
    store: str | None = option(
        None,
        "Store directory or a name of `fedcache ls`, instead of the one under FEDCACHE_HOME.",
        DATA,
        path=True,
        said="the last one extracted",
    )
    backbones: tuple[str, ...] = option((), BACKBONES, DATA, short="-b", said="all of the store")
    domain: tuple[str, ...] = option((), "Only these domains, comma-separated.", DATA, said="all")
    partition: str | None = option(
        None, "A saved partition, or a partition file.", CLIENTS, short="-p", said="made by --scheme"
    )
    clients_from: str | None = option(
        None, "A directory of client stores (fedcache shard).", CLIENTS, said="clients of a partition"
    )
    rounds: int | None = option(None, "Rounds of training.", TRAINING, short="-r", minimum=1, said="the paper's")
    participation: str | None = option(
        None, "Clients a round: a number, a share (0.1, 10%) or all.", TRAINING, said="the paper's"
    )
    seeds: str = option("0", "0,1,2 or 0-4; at most 10,000, each below 10^9.", TRAINING)
    eval_every: int = option(0, "Also score after every k-th round; 0 scores the end alone.", TRAINING, minimum=0)
    lift: str = option(
        "auto",
        "How clients are computed: one by one, many in one batch, or in a basis of their rows.",
        TRAINING,
        names=("--execution", "--lift"),
        choices=("auto", "sequential", "batched", "gram"),
    )
    device: str = option(
        "auto", "Where training runs; cuda never falls back.", TRAINING, choices=("auto", "cpu", "cuda")
    )
    dtype: str = option("float32", "Of features and heads.", TRAINING, choices=("float32", "float64"))
    set: Mapping[str, Any] = option(
        {}, "key=value of the method; see `fedcache methods info`. Repeatable.", METHOD, once=True, said="the preset's"
    )
    client_backbones: tuple[str, ...] = option(
        (), "a,b,a+b: clients take turns with these, where the method allows it.", CLIENTS, said="--backbones"
    )
    client_set: Mapping[str, Any] = option(
        {}, "key=v1,v2: clients take turns with these values. Repeatable.", CLIENTS, once=True, said="alike"
    )
    aggregate: str = option(
        "mean",
        "mean | median | trimmed:0.1 | geomedian | krum | multikrum:5 | nnm+RULE | clip:1.0: how uploads are "
        "combined; mean is the method's own.",
        TRUST,
    )
    attack: str | None = option(
        None,
        "sign-flip | ipm | alie | mimic | gaussian | label-flip | nan, as name:share:scale: clients that lie.",
        TRUST,
        said="none",
    )
    on_bad_update: str = option(
        "fail", "Malformed uploads end the run, or are left out.", TRUST, choices=("fail", "reject")
    )
    byzantine: float = option(0.2, "The share of liars that --aggregate expects.", TRUST)
    max_update_norm: float | None = option(None, "Updates with a larger norm are malformed.", TRUST, said="no limit")
    dp_clip: float | None = option(
        None, "Differential privacy: the norm updates are cut to.", TRUST, said="no differential privacy"
    )
    dp_noise: float | None = option(
        None, "Gaussian noise on their sum, as a multiple of --dp-clip.", TRUST, said="none"
    )
    dp_delta: float | None = option(None, "The delta for which epsilon is given.", TRUST, said="1e-5")


@dataclass(frozen=True)
class RunOptions:
    """What ``train`` and ``grid`` take besides the configuration: where results go, and whether to compute at all."""

    repartition: bool = option(False, "Every seed draws its own partition.", CLIENTS)
    runs: str | None = option(
        None,
        "Directory of results, instead of the one under FEDCACHE_HOME.",
        RESULTS,
        path=True,
        said="$FEDCACHE_HOME/runs",
    )
    track: str | None = option(
        None,
        "tensorboard[:DIR]: also write accuracy, bytes and settings of every seed there, in "
        "<runs>/tensorboard without DIR (extra tensorboard).",
        RESULTS,
        said="nowhere",
    )
    no_extract: bool = option(False, "Fail instead of extracting what is missing.", RESULTS)
    dry_run: bool = option(False, "Show how it would be computed and its peak of memory; train nothing.", RESULTS)
    fresh: bool = option(False, "Run again although the result is there.", RESULTS)


SECTIONS: dict[str, type] = {"extract": ExtractConfig, "partition": PartitionConfig, "train": TrainConfig}
