"""Resolved settings of a run: every default in place, every value parsed once, contradictions refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from fedcache.config import PRESETS, SAMPLING, Home, PartitionConfig, TrainConfig, to_table
from fedcache.errors import UsageError, unknown
from fedcache.extract.backbones import lookup
from fedcache.extract.device import known_device
from fedcache.federate.engine.client_data import SHARED_SUMS
from fedcache.federate.engine.hyperparameters import Value, has_batchnorm, with_schedule_rounds
from fedcache.federate.engine.method import ClientOverrides, Method, check_mixed, clients_per_round
from fedcache.federate.engine.run import executors
from fedcache.federate.engine.sampling import UNIFORM, SamplingRule, from_everywhere, parse_sampling
from fedcache.federate.engine.simulated_time import (
    DURATIONS,
    TimingRule,
    parse_timing,
    why_not_asynchronous,
)
from fedcache.federate.partition.scheme import option_names
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.pipeline import NO_ATTACK, TrustPolicy, parse_policy
from fedcache.federate.trust.privacy import DELTA, parse_allowed, parse_privacy
from fedcache.parsing import Facts, Record, seeds_text
from fedcache.plugins import Plugin, plugins, used
from fedcache.runs.store_choice import backbones_of, chosen_arrays
from fedcache.store.store import Store

# Differences of single clients: ``--client-backbones``, ``--client-set``.


def _names_of_clients(train: TrainConfig) -> list[str]:
    """The names in ``--client-backbones``, in order; a name of several clients is repeated."""
    names = []
    for entry in train.client_backbones:
        names += entry.split("+")
    return names


def named_backbones(train: TrainConfig) -> tuple[str, ...]:
    """The backbones of a run: ``--backbones``, else those of all clients."""
    return train.backbones or tuple(dict.fromkeys(_names_of_clients(train)))


def check_named(train: TrainConfig, store: Store, home: Home) -> None:
    """Raise UsageError for a name of ``--client-backbones`` that is neither in the store nor a known backbone.

    The error suggests a similar name.
    """
    have = backbones_of(store, store.arrays)
    for name in _names_of_clients(train):
        backbone = name.partition("@")[0]
        if name not in store.arrays and backbone not in have:
            lookup(backbone, home=home.root)


def client_overrides(
    method: Method,
    train: TrainConfig,
    store: Store,
    keys: Sequence[str],
    widths: Sequence[int],
    clients: int,
) -> dict[int, ClientOverrides]:
    """Differences of each client: entry i of a list of n entries belongs to clients i, i + n, i + 2n, ...

    Raises UsageError for a backbone that the run does not read, or a difference that the method does not allow.

    Args:
        method: of the run; it decides which differences are allowed.
        train: ``client_backbones``, entries like ``a`` or ``a+b``; ``client_set``, key to values.
        store: with the arrays that the entries name.
        keys: arrays of the run, in the order in which they are concatenated.
        widths: of the arrays.
        clients: number of clients.
    """
    # Columns (start, stop) of each backbone in the concatenated row.
    stops = np.cumsum(widths)
    columns_of = {
        key: (int(stop) - width, int(stop))
        for key, stop, width in zip(keys, stops, widths, strict=False)
    }
    columns = []
    for entry in train.client_backbones:
        chosen = chosen_arrays(store, entry.split("+"))
        not_read = [key for key in chosen if key not in columns_of]
        if not_read:
            raise UsageError(
                f"--client-backbones contains {not_read[0]}, but this backbone is not among the run's backbones.",
                "Leave --backbones out, or add all backbones of --client-backbones to it.",
            )
        columns.append(tuple(columns_of[key] for key in chosen))
    # Each value is parsed once, and not for every client.
    typed = {}
    for key, text in train.client_set.items():
        words = str(text).split(",")
        typed[key] = [method.hparam(key).parse(word) for word in words]
    overrides = {}
    for i in range(clients):
        columns_of_client: tuple[tuple[int, int], ...] = ()
        if columns:
            columns_of_client = columns[i % len(columns)]
        settings = {key: values[i % len(values)] for key, values in typed.items()}
        overrides[i] = ClientOverrides(columns_of_client, settings)
    check_mixed(method, overrides, int(stops[-1]), clients)
    return overrides


# The hyperparameters of a run: those of its preset, those that were set, and those that other options imply.


TURNED_OFF: dict[str, tuple[str, Callable[[Mapping[str, Value]], bool]]] = {
    "momentum": ("opt=adam", lambda hp: hp.get("opt") == "adam"),
    **dict.fromkeys(
        ("dim", "z_norm", "bn"), ("head=linear", lambda hp: hp.get("head") == "linear")
    ),
    "bn_mode": ("a model without BatchNorm", lambda hp: "bn" in hp and not has_batchnorm(hp)),
    "reg_bias": ("bias=false", lambda hp: hp.get("bias") is False),
    "shrink": ("head=nb", lambda hp: hp.get("head") == "nb"),
    "rff_sigma": ("rff_dim=0", lambda hp: hp.get("rff_dim") == 0),
}
"""Hyperparameter -> setting under which it has no effect, in words and as a function of all hyperparameters."""


def why_unread(name: str, hp: Mapping[str, Value]) -> str:
    """The setting under which a hyperparameter is not read; "" if it is read."""
    if name in TURNED_OFF:
        words, is_off = TURNED_OFF[name]
        if is_off(hp):
            return words
    return ""


def leaves_batchnorm_out(method: Method, config: TrainConfig) -> bool:
    """Whether a model is trained without BatchNorm because of noise, although no setting requests that.

    Running statistics are uploaded with the weights, and noise on a variance near 0 may make it negative.
    """
    noisy = bool(config.dp_noise) and "bn" not in config.set
    return noisy and has_batchnorm(method.resolve(config.preset, config.set))


def hyperparameters(method: Method, config: TrainConfig) -> dict[str, Value]:
    """Every hyperparameter of a run; a schedule without a length lasts as long as the run."""
    settings = method.resolve(config.preset, config.set)
    if leaves_batchnorm_out(method, config):
        settings["bn"] = False
    return with_schedule_rounds(settings, config.rounds or method.defaults.rounds)


def setting_notes(method: Method, config: TrainConfig) -> list[str]:
    """Notes on the chosen hyperparameters, and on those that were set and are not read."""
    notes = []
    if leaves_batchnorm_out(method, config):
        notes.append(
            f"bn=false: {method.name} is trained without BatchNorm, because --dp-noise could make "
            "BatchNorm's variances negative."
        )
    if config.preset == "tuned" and not method.tuned:
        notes.append(
            f"--preset tuned equals --preset paper for {method.name}, because fedcache has no tuned values "
            "for it."
        )
    hp = hyperparameters(method, config)
    for name, value in config.set.items():
        why = why_unread(name, hp)
        if why:
            notes.append(f"{name}={value} has no effect with {why}.")
    return notes


DTYPES = ("float32", "float64")
PARTICIPATION = "--participation"
EVAL_CLIENTS = "--eval-clients"
LARGEST_SEED = 999_999_999
MOST_SEEDS = 10_000

TRUST_OPTIONS = (
    "aggregate",
    "attack",
    "on_bad_update",
    "byzantine",
    "max_update_norm",
    "max_rows_per_client",
    "max_share",
    "max_row_norm",
    "dp_clip",
    "dp_noise",
    "dp_delta",
    "dp_seed",
    "dp_allow",
)
"""Fields of ``TrainConfig`` about trust; every one can be swept."""

SAMPLING_OPTIONS = (
    "client_sampling",
    "availability",
    "client_dropout",
    "client_clusters",
    "clusters_per_round",
)
"""Fields of ``TrainConfig`` about the sampling of clients, in the order of ``parse_sampling``."""

TIMING_OPTIONS = ("asynchronous", "server_step", "staleness_power", "client_durations")
"""Fields of ``TrainConfig`` about simulated time; every one can be swept."""


def _changed(config: TrainConfig, names: Sequence[str]) -> list[str]:
    """The fields among ``names`` whose value differs from the default."""
    plain = TrainConfig()
    return [name for name in names if getattr(config, name) != getattr(plain, name)]


def options_beyond_sums(config: TrainConfig) -> list[str]:
    """Given options under which a client's part of the model is not its upload alone: ``--dp-noise``, for example."""
    names = (*SAMPLING_OPTIONS, *TIMING_OPTIONS, "client_backbones", "client_set")
    given = [*non_default_options(config), *_changed(config, names)]
    return [_option_of(name) for name in given]


def _option_of(name: str) -> str:
    """The option of a field: ``--dp-noise`` for ``dp_noise``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class ResolvedRun:
    """Resolved settings of a run. With features, dataset, partitions and code they determine its result."""

    requested: TrainConfig  # as the user requested it, without defaults
    method: str  # name of the method
    # keys of the store's arrays, in the order in which they are concatenated
    arrays: tuple[str, ...]
    rounds: int  # of every seed
    # clients per round: None for all, an int for a number, a float for a share
    participation: int | float | None
    participation_text: str  # the same as text: ``10``, ``0.1``, ``10%``, ``all``
    eval_clients: int | float | None  # clients whose personal models are scored, like participation
    seeds: tuple[int, ...]  # without repeats, in the order given
    settings: Mapping[str, Value]  # every hyperparameter; None if the method chooses it (``auto``)
    sampling: SamplingRule  # how a round's clients are drawn
    trust: TrustPolicy  # how uploads are checked, aggregated and protected
    trust_options: Record = field(default_factory=dict)  # those that are not the default
    # how long clients take, and whether rounds wait for them; None if no time is simulated
    timing: TimingRule | None = None
    device: str = ""  # that computes; "" until it is known
    engine: str = ""  # ``flower`` for a run over sites, "" for a run in this process
    # whether a grid computes this point together with others. The result is equal to the run alone only up to rounding,
    # so the digest is another one.
    together: bool = False

    @property
    def execution(self) -> str:
        """How clients are computed: ``auto`` or the requested execution."""
        return self.requested.execution

    @property
    def plugins(self) -> list[Plugin]:
        """Plug-ins that the run uses: the method, the executor, the rule of aggregation."""
        # ``rule.last`` is the step of ``--aggregate`` that combines uploads; the steps before it are not plug-ins.
        return used(
            {
                "methods": self.method,
                "executors": self.execution,
                "aggregators": self.trust.rule.last,
            }
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        dtype: torch.dtype = getattr(torch, self.requested.dtype)
        return dtype

    @property
    def hyperparameters(self) -> dict[str, Value | str]:
        """The settings as in a result: sorted by name, ``auto`` for a value that the method chooses."""
        ordered = sorted(self.settings.items())
        return {name: "auto" if value is None else value for name, value in ordered}

    def privacy_cost(self, clients: int) -> Facts:
        """The privacy cost of a federation of this many clients; {} for a run without noise."""
        if self.trust.privacy is None:
            return {}
        share = clients_per_round(self.participation, clients) / clients
        return self.trust.privacy.cost(self.rounds, share, len(self.seeds))

    def to_identity(self) -> Facts:
        """The part of a run's identity that its configuration determines, without the seeds, as plain JSON values."""
        requested = self.requested
        identity = {
            "method": self.method,
            "preset": requested.preset,
            "backbones": list(self.arrays),
            "domain": list(requested.domain),
            "rounds": self.rounds,
            "participation": self.participation_text,
            **self.sampling.words(),
            "eval_every": requested.eval_every,
            "execution": self.execution,
            "dtype": requested.dtype,
            "set": self.hyperparameters,
            **self.trust_options,
            "device": self.device,
        }
        # Rare settings are part of the identity only if they are used, so that older results keep their digests.
        if self.timing is not None:
            identity |= self.timing.words()
        if self.eval_clients is not None:
            identity["eval_clients"] = requested.eval_clients
        if requested.client_prior != "none":
            identity["client_prior"] = requested.client_prior
        if requested.stages > 1:
            identity["stages"] = requested.stages
        if requested.base_classes is not None:
            identity["base_classes"] = requested.base_classes
        if requested.client_backbones:
            identity["client_backbones"] = list(requested.client_backbones)
        if requested.client_set:
            identity["client_set"] = {k: str(value) for k, value in requested.client_set.items()}
        if self.engine:
            identity["engine"] = self.engine
        if self.together:
            identity["together"] = True
        return identity

    def to_config(self) -> Facts:
        """The ``[train]`` section that runs the same again."""
        # Paths of files become absolute, so that the section works in every folder.
        config = replace(
            self.requested,
            rounds=self.rounds,
            participation=self.participation_text,
            seeds=seeds_text(self.seeds),
            set=self.hyperparameters,
            availability=from_everywhere(self.requested.availability),
            client_clusters=from_everywhere(self.requested.client_clusters),
            client_durations=_durations_from_everywhere(self.requested.client_durations),
        )
        return to_table(config)


def resolve_run(
    config: TrainConfig,
    method: Method,
    settings: Mapping[str, Value],
    arrays: Sequence[str],
    clients: int,
) -> ResolvedRun:
    """The configuration that determines a result, with every default filled in.

    ``clients`` is the number of clients. Raises UsageError for a value that is not allowed, and for a trust policy that
    the method's uploads do not allow.
    """
    if config.preset == PRESETS[0] and not method.usual:
        # For a method without ``usual`` values, preset ``default`` equals ``paper``. Results then have the name
        # "paper", as in earlier versions.
        config = replace(config, preset="paper")
    text = participation_text(config, method, clients)
    participation = parse_participation(text)
    trust = policy_from_config(config, method)
    if config.client_prior != "none":
        is_private = trust.privacy is not None
        if is_private or not takes_client_prior(method, settings):
            raise UsageError(
                "--client-prior needs a method that reads labels and has one global model with class scores. "
                "--client-prior cannot be used with differential privacy.",
                "Leave --client-prior out.",
            )
    why = ""
    if config.stages > 1:
        why = why_not_sums(config, method, settings, clients)
        if not why and "labels" not in method.reads(settings):
            why = f"{method.name} reads no labels"
    if why:
        raise UsageError(
            f"--stages cannot be used, because {why}.",
            "For example fedcache train fed3r --stages 5",
        )
    rounds = config.rounds or method.defaults.rounds
    if method.one_shot:
        rounds = 1
    if rounds == 1:  # only the end can be scored, so every ``eval_every`` is the same run
        config = replace(config, eval_every=0)
    return ResolvedRun(
        requested=config,
        method=method.name,
        arrays=tuple(arrays),
        rounds=rounds,
        participation=participation,
        participation_text=text,
        eval_clients=eval_clients(config, method, settings),
        seeds=parse_seeds(config.seeds),
        settings=dict(settings),
        sampling=sampling_from_config(config, method),
        timing=timing_from_config(config, method, settings),
        trust=trust,
        trust_options=non_default_options(config),
    )


def takes_client_prior(method: Method, settings: Mapping[str, Value]) -> bool:
    """Whether a client prior can be added: to the class scores of one global model of a method that reads labels."""
    is_global = method.protocol(settings) == "global"
    has_class_scores = not method.by_similarity(settings)
    return is_global and has_class_scores and "labels" in method.reads(settings)


def why_not_sums(
    config: TrainConfig, method: Method, settings: Mapping[str, Value], clients: int
) -> str:
    """Why the model of a run is not a function of sums over the rows of all its clients; "" if it is."""
    if not (method.one_shot and method.additive(settings)):
        return f"the server of {method.name} does not compute the sum of one upload per client"
    given = ", ".join(options_beyond_sums(config))
    if given:
        return f"with {given}, its server does not compute a plain sum of all uploads"
    participation = parse_participation(participation_text(config, method, clients))
    if clients_per_round(participation, clients) < clients:
        return "only some clients take part"
    feat_post = settings.get("feat_post")
    if feat_post in SHARED_SUMS:
        return f"feat_post={feat_post} changes all features by means over the rows of all clients"
    return ""


def sampling_from_config(config: TrainConfig, method: Method | None = None) -> SamplingRule:
    """The sampling rule of a round's clients; reads the files of ``--availability`` and ``--client-clusters``.

    Raises UsageError for values that are not allowed, and for a private run or a method without rounds of clients.
    """
    given = _changed(config, SAMPLING_OPTIONS)
    if not given:
        return UNIFORM
    option = _option_of(given[0])
    if config.dp_clip is not None:
        why = "changes how clients are drawn, but in a private run each client must be drawn independently"
        raise UsageError(f"{option} {why}.", "Leave it out.")
    if method is not None and method.central:
        raise UsageError(
            f"{method.name} trains on the rows of all clients together, so {option} has no effect.",
            "Leave it out.",
        )
    return parse_sampling(*(getattr(config, name) for name in SAMPLING_OPTIONS))


def timing_from_config(
    config: TrainConfig, method: Method | None = None, settings: Mapping[str, Value] | None = None
) -> TimingRule | None:
    """The rule of simulated time; None if no time is simulated. Reads the file of ``--client-durations``.

    Raises UsageError for values that are not allowed, and for an asynchronous server that does not use the plain mean
    of uploads.
    """
    if config.asynchronous is None:
        given = _changed(config, ("server_step", "staleness_power"))
        if given:
            option = _option_of(given[0])
            raise UsageError(
                f"{option} has an effect only with --asynchronous.",
                "Add for example --asynchronous 10",
            )
        if config.client_durations is None:
            return None
    rule = parse_timing(
        config.asynchronous, config.server_step, config.staleness_power, config.client_durations
    )
    if method is not None and method.central:
        raise UsageError(
            f"{method.name} trains on the rows of all clients together, so there is no time per client.",
            "Leave --asynchronous and --client-durations out.",
        )
    if rule.buffer is None:
        # The time of a round depends on its slowest client, so it would reveal something about the participants.
        if config.dp_clip is not None:
            raise UsageError(
                "The run is private, but --client-durations would reveal which clients took part.",
                "Leave it out.",
            )
        return rule
    given = sorted(non_default_options(config))
    if given:
        option = _option_of(given[0])
        raise UsageError(
            f"--asynchronous uses the plain mean of uploads, but {option} is given.",
            "Leave one of them out.",
        )
    if config.client_sampling == "poisson":
        raise UsageError(
            "--asynchronous needs a fixed number of clients in training, but with --client-sampling "
            "poisson the number varies.",
            "Use --client-sampling uniform or --client-sampling weighted.",
        )
    if method is None:
        return rule
    if settings is None:
        settings = method.resolve()
    why = why_not_asynchronous(method, settings)
    if why:
        raise UsageError(
            f"{method.name} does not support --asynchronous: {why}.",
            "These methods support it: fedavg, fedprox, fedrep and others.",
        )
    return rule


def _durations_from_everywhere(durations: str | None) -> str | None:
    """The value of ``--client-durations``; the name of a file becomes an absolute path."""
    if durations is None or durations in DURATIONS:
        return durations
    return str(Path(durations).resolve())


def eval_clients(
    config: TrainConfig, method: Method, settings: Mapping[str, Value]
) -> int | float | None:
    """Number of personal models that are scored; None for all, as for a method with one global model."""
    if config.eval_clients is None or method.protocol(settings) == "global":
        return None
    return parse_share(config.eval_clients, EVAL_CLIENTS)


def participation_text(config: TrainConfig, method: Method, clients: int) -> str:
    """The requested participation, else that of the method's paper or released code if there are enough clients."""
    if config.participation is not None:
        return config.participation
    usual = method.defaults.participation
    official = method.defaults.official_participation
    if config.preset == "official" and official is not None and clients > official:
        usual = official
    too_many = isinstance(usual, int) and usual > clients
    if usual is None or too_many:
        return "all"
    return str(usual)


def parse_seeds(text: str) -> tuple[int, ...]:
    """``0,1,2`` or ``0-4`` as numbers, without repeats, in the order given.

    >>> parse_seeds("7,0-2,1")
    (7, 0, 1, 2)

    Raises UsageError, also for a seed above ``LARGEST_SEED`` or more than ``MOST_SEEDS``.
    """
    example = "For example --seeds 0,1,2 or --seeds 0-4"
    # A dict keeps the order and drops repeats.
    seeds = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,99})(?:-([0-9]{1,99}))?\s*", part)
        if match is None:
            raise UsageError(f"--seeds {text} is not a list of seeds.", example)
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UsageError(f"--seeds {text} is not a list of seeds.", example)
        if last > LARGEST_SEED:
            raise UsageError(f"--seeds {last}: a seed is at most {LARGEST_SEED:,}.", example)
        # A huge range is refused before it is made.
        is_huge = last - first >= MOST_SEEDS
        if not is_huge:
            seeds.update(dict.fromkeys(range(first, last + 1)))
        if is_huge or len(seeds) > MOST_SEEDS:
            raise UsageError(f"--seeds {text} has more than {MOST_SEEDS:,} seeds.", example)
    return tuple(seeds)


def parse_participation(text: str | None) -> int | float | None:
    """``all``, a number of clients, or a share (``0.1``, ``100%``).

    >>> parse_participation("10"), parse_participation("10%"), parse_participation("all")
    (10, 0.1, None)

    Raises UsageError.
    """
    return parse_share(text, PARTICIPATION)


def parse_share(text: str | None, option: str) -> int | float | None:
    """The value of an option with a number or a share of clients, as in ``parse_participation``. Raises UsageError."""
    if text is None or text == "all":
        return None
    # `10` is a number of clients, `1.0` and `100%` are the share of all clients.
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
        elif re.fullmatch(r"\d+", text):
            if int(text) > 0:
                return int(text)
            share = 0.0
        else:
            share = float(text)
        if 0 < share <= 1:
            return share
    except ValueError:
        pass
    hint = "For example 10, 0.1, 10% or all"
    if text in SAMPLING:
        hint = f"To choose how clients are drawn: --client-sampling {text}"
    raise UsageError(f"{option} {text} is neither a number of clients nor a share.", hint)


def check_participation(config: TrainConfig, clients: int) -> None:
    """Raise UsageError if options need more clients than there are."""
    for option, text in (
        (PARTICIPATION, config.participation),
        (EVAL_CLIENTS, config.eval_clients),
    ):
        requested = parse_share(text, option)
        if isinstance(requested, int) and requested > clients:
            raise UsageError(
                f"{option} is {requested}, but there are only {clients} clients.",
                f"For example {option} all",
            )
    if (config.asynchronous or 0) > clients:
        why = "the server never collects two updates of the same client for one step"
        example = max(1, clients // 2)
        raise UsageError(
            f"--asynchronous is {config.asynchronous}, but there are only {clients} clients, and {why}.",
            f"For example --asynchronous {example}",
        )


def check_config(config: TrainConfig, partition: PartitionConfig) -> None:
    """Refuse wrong values, and pairs of options that contradict each other, before an extraction takes minutes.

    Raises UsageError with the value, or with both options.
    """
    # Options that assign rows; a saved partition assigns them already.
    scheme_options = []
    if partition.scheme is not None:
        scheme_options.append("--scheme")
    if partition.clients is not None:
        scheme_options.append("--clients")
    scheme_options += option_names(partition.options)
    listed = ", ".join(scheme_options)
    saved = config.partition is not None
    shards = config.clients_from is not None
    two_datasets = config.store is not None and config.dataset is not None
    other_source = bool(config.store or config.dataset or config.partition)
    contradictions = (
        (two_datasets, "--store and --dataset", "A store belongs to one dataset."),
        (
            saved and scheme_options,
            f"--partition and {listed}",
            "A saved partition has fixed clients and validation rows.",
        ),
        (
            shards and scheme_options,
            f"--clients-from and {listed}",
            "Client stores have fixed rows.",
        ),
        (
            shards and other_source,
            "--clients-from and another store, dataset or partition",
            "Client stores replace a store, a dataset and a partition.",
        ),
    )
    for both_given, names, why in contradictions:
        if both_given:
            raise UsageError(f"{names} are both given. {why}", "Leave one of them out.")
    check_values(config)


def check_values(config: TrainConfig) -> None:
    """Raise UsageError for values that are not allowed."""
    executions = ("auto", *executors(), *plugins("executors"))
    if config.dtype not in DTYPES:
        raise unknown("dtype", config.dtype, DTYPES)
    if config.execution not in executions:
        raise unknown("execution", config.execution, executions)
    if config.device != "auto":
        known_device(config.device)
    # Parsing refuses wrong values; the results are needed only when the run is resolved.
    policy_from_config(config)
    parse_participation(config.participation)
    parse_share(config.eval_clients, EVAL_CLIENTS)
    sampling_from_config(config)
    timing_from_config(config)


def policy_from_config(config: TrainConfig, method: Method | None = None) -> TrustPolicy:
    """The trust policy of a configuration.

    Raises UsageError for wrong values, and for a method whose uploads do not allow the policy; MachineError if noise is
    requested and its accounting is not installed.
    """
    privacy = None
    options = (config.dp_clip, config.dp_noise, config.dp_delta, config.dp_seed, config.dp_allow)
    if any(option is not None for option in options):
        privacy = parse_privacy(*options)
    if privacy is not None:
        privacy.require()  # before anything is trained
    trust = parse_policy(
        config.aggregate,
        config.attack,
        config.on_bad_update,
        config.byzantine,
        config.max_update_norm,
        privacy,
        config.max_rows_per_client,
        config.max_share,
        config.max_row_norm,
    )
    if method is not None:
        # --set is left out, because it may name hyperparameters of other methods. The policy is checked again with all
        # hyperparameters before the run is trained (``RunState``).
        trust.check(method, hyperparameters(method, replace(config, set={})))
    return trust


def non_default_options(config: TrainConfig) -> Facts:
    """Trust options that differ from the defaults, for a result's identity; {} for an ordinary run.

    Equal options have equal text, so that equal runs have the same identity.
    """
    options = {name: getattr(config, name) for name in _changed(config, TRUST_OPTIONS)}
    if options.get("attack") == NO_ATTACK:
        del options["attack"]
    elif "attack" in options:
        options["attack"] = parse_attack(options["attack"]).text
    if options.get("on_bad_update") == "fail":  # the default
        del options["on_bad_update"]
    if config.aggregate == "mean":
        options.pop("byzantine", None)  # the mean has no number of expected attackers
    if config.dp_clip is not None and "dp_delta" not in options:
        options["dp_delta"] = DELTA
    if "dp_allow" in options:
        options["dp_allow"] = ",".join(parse_allowed(options["dp_allow"]))
    return options
