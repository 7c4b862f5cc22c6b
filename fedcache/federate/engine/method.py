"""Method: pure functions, the hyperparameters that the functions read, and declarations of what clients send and of the
settings in which clients may differ.

A variant of a method is ``dataclasses.replace(method, ...)``. The engine or the command line reads every field. Before
an upload is aggregated, it is compared with the declaration of uploads (``federate.trust.update_validation``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from fedcache.config import PRESETS
from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import Ctx, RunConstants
from fedcache.federate.engine.hyperparameters import Hp, HParam, Value
from fedcache.heads.linear import Tree
from fedcache.heads.projection import TRAINED

ON_ROWS = ("sequential", "batched", "gram")
"""Executions for methods whose server combines maps of the features linearly.

Each client trains these maps on its own rows alone.
"""


StatisticKind = Literal[
    "sum",  # [D] sum of the rows
    "class sums",  # [C, D] sum of the rows of each class
    "class means",  # [C, D] mean of the rows of each class
    "gram",  # [D (D + 1) / 2] sum of z z' over the rows z, upper triangle
    "class grams",  # [C, D (D + 1) / 2] the same for each class
    "squares",  # [D] sum of the squared rows
    "class squares",  # [C, D] sum of the squared rows of each class
    "ridge solutions",  # [C, D] the client's own ridge regression, from the gram matrix in the same upload
    "mixture means",  # [C, K, D] means of the K Gaussians of each class
    "mixture deviations",  # [C, K, 1 or D] their standard deviations
    "mixture factors",  # [C, K, D (D + 1) / 2] Cholesky factors of their covariances
    "mixture weights",  # [C, K] their weights, which sum to 1 in each class that the client has
]
"""Kind of a statistic in an upload. Each kind has its own checks (``trust.statistic_checks``)."""


@dataclass(frozen=True)
class Statistic:
    """A tensor that is a statistic of the client's training rows; an upload has at most one of each kind."""

    kind: StatisticKind
    # Number that the client adds to the diagonal of the gram matrix, or of each covariance.
    ridge: float = 0.0
    # Upper bound of the norm of a row, if the method transforms the features first (infinity if no bound is known).
    # None if the rows are the features themselves, whose bound the run knows.
    longest: float | None = None
    # Relative error of products that are computed in a narrower type than the tensor's.
    rounding: float = 0.0


@dataclass(frozen=True)
class UploadTensor:
    """One tensor of an upload."""

    shape: tuple[int, ...]  # without leading axes
    dtype: torch.dtype  # of its numbers
    # Whether it counts training rows of the client: whole numbers, not negative, in sum at most the client's rows.
    counts_rows: bool = False
    # The statistic of the client's rows that it holds; None for anything else, such as weights.
    statistic: Statistic | None = None
    # Whether the server adds it to its tensor of the same name, instead of replacing that tensor.
    is_step: bool = False

    @property
    def without_noise(self) -> bool:
        """Whether ``--dp-noise`` cannot add noise to it."""
        return self.counts_rows or not self.dtype.is_floating_point

    @staticmethod
    def like(t: Tensor) -> UploadTensor:
        """The declaration of a tensor with the shape and the type of ``t``."""
        return UploadTensor(tuple(t.shape), t.dtype)


Uploads = Mapping[str, UploadTensor]
"""Name -> tensor, for everything that a client sends in one round."""


def whole_server(server: Tree, _ctx: Ctx) -> Uploads:
    """Uploads of clients that send every tensor of the server."""
    return {name: UploadTensor.like(t) for name, t in server.items()}


def server_tensors(names: Callable[[Hp], Sequence[str]]) -> Callable[[Tree, Ctx], Uploads]:
    """Uploads of clients that send the server's tensors ``names(hp)``."""

    def uploads(server: Tree, ctx: Ctx) -> Uploads:
        return {name: UploadTensor.like(server[name]) for name in names(ctx.hp)}

    return uploads


def sends_nothing(_server: Tree, _ctx: Ctx) -> Uploads:
    """Uploads of clients that send no tensor."""
    return {}


def clients_per_round(participation: int | float | None, clients: int) -> int:
    """Number of clients per round: all for None, a number for an int, a share (at least one client) for a float.

    Raises FedcacheError, exit 2 for a number below 1 or a share outside (0, 1].
    """
    if participation is None:
        return clients
    is_count = isinstance(participation, int) and participation >= 1
    if not is_count and not 0.0 < participation <= 1.0:
        raise UsageError(
            f"participation is {participation}, expected a number of clients (at least 1) or a share in (0, 1].",
            "For example --participation 10, --participation 0.1 or --participation 100%.",
        )
    if isinstance(participation, int):
        return min(participation, clients)
    return max(1, round(participation * clients))


Pooling = Literal["mean", "uniform", "sum", "stack"]
Protocol = Literal["global", "personalised", "everywhere"]


@dataclass(frozen=True)
class Defaults:
    """The setting of the method's paper, which is used unless the user names another."""

    rounds: int  # number of rounds; 1 for one-shot methods
    # Clients per round: None for all, an int for a number, a float for a share.
    participation: int | float | None
    clients: int  # number of clients
    scheme: str  # name of the partition scheme
    # Clients per round in the released code, if it differs from the paper (D-14), else None.
    official_participation: int | None = None


Count = Callable[[Tree, Ctx], int]
Init = Callable[[Ctx], Tree]
Enter = Callable[[Tree, ClientData, Ctx], Tree]
Fit = Callable[[Tree, Tree, ClientData, Ctx], tuple[Tree, Tree]]
Predict = Callable[[Tree, Tree, ClientData, Tensor, Ctx], Tensor]
Embed = Callable[[Tree, Tree, Tensor, Ctx], Tensor]
Server = Callable[[Tree, Ctx], Tree]
Deploy = Callable[[Tree, Tree, ClientData, Ctx], Tree]
Settle = Callable[[Hp, RunConstants], Hp]
PersonalPart = Callable[[Tree, Tree, ClientData, Ctx], Tree]
Diagnose = Callable[[Tree, Mapping[int, Tree], Mapping[int, Tensor], Ctx], dict[str, float]]
Aggregate = Callable[[Tree, Tree, Ctx], Tree]
Scorer = Callable[[Tensor], Tensor]
ZeroShot = Callable[[Ctx], Scorer | None]
DeclareUploads = Callable[[Tree, Ctx], Uploads]


def no_state(_down: Tree, _data: ClientData, _ctx: Ctx) -> Tree:
    """Empty state of a client that keeps nothing between rounds."""
    return {}


def send_all(server: Tree, _ctx: Ctx) -> Tree:
    """Broadcast of all tensors of the server."""
    return server


def keep_down(down: Tree, _state: Tree, _data: ClientData, _ctx: Ctx) -> Tree:
    """Deploy the broadcast unchanged."""
    return down


def less_training_state(_down: Tree, state: Tree, _data: ClientData, _ctx: Ctx) -> Tree:
    """The tensors of a client, except optimiser state and tensors under ``rows/``, which only training reads."""
    return {name: t for name, t in state.items() if not name.startswith(("opt/", "rows/"))}


def features_as_read(_down: Tree, _personal: Tree, x: Tensor, _ctx: Ctx) -> Tensor:
    """Embedding of a classifier that reads the features themselves."""
    return x


def no_zero_shot(_ctx: Ctx) -> None:
    """No zero-shot classifier: the method does not start from class texts."""


def replace_names(server: Tree, up: Tree, _ctx: Ctx) -> Tree:
    """The pooled upload replaces the tensors of the same names."""
    return {**server, **up}


def numel(tree: Tree, _ctx: Ctx) -> int:
    """Number of floats in a tree. Masks of rows do not count, because the rows that are sent imply them."""
    return sum(t.numel() for t in tree.values() if t.is_floating_point())


def count_of(*names: str) -> Callable[[Tree, Tree], int]:
    """(server, state) -> scalars of the tensors with these names; a tensor that is in both counts once."""

    def count(server: Tree, state: Tree) -> int:
        both = {**state, **server}
        return sum(t.numel() for name, t in both.items() if name in names)

    return count


head_weights = count_of(*TRAINED)
"""Counts the scalars of a head's trained tensors."""


def average(hp: Hp) -> Mapping[str, Pooling]:
    """Pool every tensor (each name begins with the prefix "") by the ``agg`` switch: weighted by n_i, or uniform."""
    if hp.get("agg") == "uniform":
        return {"": "uniform"}
    return {"": "mean"}


def as_pooled(pooled: Tree, _ctx: Ctx) -> Tree:
    """Prepare nothing: points of a grid share no computation."""
    return pooled


def as_given(hp: Hp, _env: RunConstants) -> Hp:
    """Leave the hyperparameters unchanged: none depends on the data of the run."""
    return hp


def global_model(_hp: Hp) -> Protocol:
    """Protocol with one model, which is scored on every client's test rows."""
    return "global"


def everywhere(_hp: Hp) -> Protocol:
    """Protocol with a model for each client; each model is scored on all clients' test rows."""
    return "everywhere"


def personal_model(_hp: Hp) -> Protocol:
    """Protocol with a model for each client; each model is scored on its client's test rows."""
    return "personalised"


def personal_if(condition: Callable[[Hp], object]) -> Callable[[Hp], Protocol]:
    """``personal_model`` if the condition is true of the hyperparameters, else ``global_model``."""

    def protocol(hp: Hp) -> Protocol:
        if condition(hp):
            return "personalised"
        return "global"

    return protocol


Family = Literal[
    "One round, closed form",
    "Many rounds, one model",
    "A model for each client",
    "Prototypes and contrast",
    "With class texts",
    "Prompts",
    "Training the encoder itself",
    "References",
]
"""The headings under which the documentation lists the methods."""


@dataclass(frozen=True)
class MethodPage:
    """Text of a method's documentation page that cannot be derived from its code. Line breaks in it do not count.

    Attributes:
        family: heading of the list of methods.
        formula: equations in LaTeX.
        when: when to use the method, and when not; Markdown, formulas between dollar signs.
        cite: keys of docs/papers.bib.
        terms: the symbols of the formula that the family's introduction does not explain.
    """

    family: Family
    formula: str
    when: str
    cite: tuple[str, ...]
    terms: str = ""


@dataclass(frozen=True)
class Method:
    """A federated method.

    Shapes: every per-client tensor has exactly ``len(ctx.lead)`` leading axes, each full or 1; functions address core
    axes from the end.

    Attributes:
        name: name on the command line.
        paper: citation.
        summary: one sentence.
        hparams: declared hyperparameters.
        defaults: the paper's setting.
        init: (ctx) -> server; no leading axes, called once.
        fit: (down, state, data, ctx) -> (state, up); ``down`` is the broadcast, ``up`` is everything that a client
            sends.
        uploads: (server, ctx) -> name, shape and type of every tensor of ``up``, with which every upload is compared.
            None derives them from the result of ``fit`` on a few rows of noise.
        personal_part: (down, state, data, ctx) -> all that a client's deployed model holds in addition to ``down``:
            tensors of its state, a model adapted to its rows, or a cache of its rows. Made once per model, and saved
            with it.
        predict: (down, personal part, data, x, ctx) -> scores [.., N, C]; a global model has an empty personal part. A
            model that reads ``data``, the client's rows, can be evaluated but not saved.
        embed: (down, personal part, x, ctx) -> [.., N, d], the input of the classifier in ``predict``: the output of a
            projection or an encoder, or the features themselves. Scores are a function of it.
        enter: (down, data, ctx) -> state, at a client's first participation. Its names do not change later, and
            names under ``rows/`` have one row per sample.
        broadcast: (server, ctx) -> down.
        pool: (hp) -> name prefix of ``up`` -> mean (weights n_i) | uniform | sum | stack.
        aggregate: (server, pooled up, ctx) -> server.
        prepare: (pooled up, ctx) -> pooled up, with intermediate results of the server's step. Called once for the
            points of a grid that share their uploads: they differ only in floats that ``fit`` does not read, and no
            intermediate result may depend on these floats.
        additive: (hp) -> True if the pooled upload equals the upload of one client that has all clients' rows, for
            every seed.
        merges: "classes" if the server merges stacked prototypes class by class by their counts, so that a robust
            rule can replace this step; "" if it does more with the stacked uploads.
        protocol: (hp) -> how it is evaluated.
        deploy: (down, state, all clients' labelled training rows, ctx) -> down, before a model is scored: a linear
            probe. It is part of evaluation, so only ``predict`` reads its result.
        headline: whether the accuracy of personal models is the mean or the minimum over clients.
        executions: how clients may be computed. A method that reads only features must allow ``batched``; ``ON_ROWS``
            adds ``gram``.
        mixed: settings that may differ between the clients of one run: ``backbones``, and names of hyperparameters.
        needs: inputs that clients read: ``labels``, ``text`` (class text features), ``views`` (stored augmentations),
            ``pixels`` (images instead of features), ``text tower`` and ``image tower`` (live frozen encoders),
            ``public`` (client 0 is the public set: all clients read its rows, and it does not train), ``row norms``
            (the mean length of all training rows: each client sends and receives one number before the first round),
            ``row counts`` (the mean number of a client's training rows, with the same traffic).
            Without ``labels`` the engine passes data without labels.
        needs_for: (hp) -> inputs that clients read under these switches; None if they are always ``needs``.
        text_travels: False if only the server reads the class text features, so they are not sent to clients.
        gradient: False for clients that take no gradient step.
        one_shot: True if the method has exactly one round.
        central: True if all clients' rows are one training set (no traffic).
        paper_count: (width, classes, clients, hp) -> scalars (up, down) per client and round as papers count them; None
            if the paper counts exactly the scalars that are sent.
        sent: (one client's up, ctx) -> number of scalars that are sent; rows of classes that the client does not have
            may be left out.
        received: (down, ctx) -> number of scalars that are received.
        trainable: (server, one client's state) -> number of trained scalars in a deployed model.
        fidelity: (hp, views stored) -> exact | cached_views | approx.
        diagnose: (server, states, labels of each client's rows, ctx) -> numbers to log when a round is evaluated.
        zero_shot: (ctx) -> a function from rows x [N, D] (or images) to scores [N, C]: the zero-shot classifier of the
            class texts from which the method starts. Its accuracy is reported in addition to the method's accuracy.
            None if the method does not start from class texts.
        reads_test: (hp) -> True if ``predict`` gets the client's labelled test rows instead of its training rows: a
            leak that some released code has. The engine warns about it.
        by_similarity: (hp) -> True if ``predict`` returns similarities to prototypes. They have no scale to which
            log-probabilities could be added, so the method takes no client prior.
        scores_new_classes: (hp) -> True if no tensor of the server depends on the classes of the training, so that the
            model scores other classes by their texts (``--base-classes``).
        caution: (hp) -> warnings at the start of a run under these switches.
        notice: (pooled up, ctx) -> a sentence that a user should know about this round, or "". The engine shows the
            first one of a run as a warning.
        settle: (hp, constants of the run) -> hp, with a number for ``auto`` if the number follows from the data.
        check: (hp, ctx) -> None; raises if the switches and the data do not fit together.
        uneven_rows: why rows of different clients count differently in one full step of every client; "" if they
            count the same, so that the averaged step is the step on all rows together.
        depends_on_origin: the reason, as text, why the predictions of a one-round method change when the same number is
            added to all features (when the origin of the feature space moves), for example because scores are cosines.
            "" if the predictions do not change.
        upload_descriptions: name of an uploaded tensor -> (what it holds, what it reveals of the client's rows). Names
            that several methods use are described in ``report.methods.facts``.
        page: text of the documentation page; None for a method outside fedcache.
    """

    name: str
    paper: str
    summary: str
    hparams: tuple[HParam, ...]
    defaults: Defaults
    init: Init
    fit: Fit
    predict: Predict
    paper_count: Callable[[int, int, int, Hp], tuple[int, int]] | None
    uploads: DeclareUploads | None = None
    enter: Enter = no_state
    deploy: Deploy = keep_down
    personal_part: PersonalPart = less_training_state
    embed: Embed = features_as_read
    broadcast: Server = send_all
    pool: Callable[[Hp], Mapping[str, Pooling]] = average
    aggregate: Aggregate = replace_names
    prepare: Server = as_pooled
    merges: Literal["", "classes"] = ""
    additive: Callable[[Hp], bool] = lambda _hp: False
    protocol: Callable[[Hp], Protocol] = global_model
    needs: frozenset[str] = field(default_factory=lambda: frozenset({"labels"}))
    needs_for: Callable[[Hp], frozenset[str]] | None = None
    headline: Literal["mean", "min"] = "mean"
    executions: tuple[str, ...] = ("sequential", "batched")
    mixed: frozenset[str] = frozenset()
    text_travels: bool = True
    gradient: bool = True
    one_shot: bool = False
    central: bool = False
    sent: Count = numel
    received: Count = numel
    trainable: Callable[[Tree, Tree], int] = head_weights
    fidelity: Callable[[Hp, int], str] = lambda _hp, _views: "exact"
    diagnose: Diagnose = lambda _server, _states, _labels, _ctx: {}
    zero_shot: ZeroShot = no_zero_shot
    reads_test: Callable[[Hp], bool] = lambda _hp: False
    by_similarity: Callable[[Hp], bool] = lambda _hp: False
    scores_new_classes: Callable[[Hp], bool] = lambda _hp: False
    caution: Callable[[Hp], Sequence[str]] = lambda _hp: ()
    notice: Callable[[Tree, Ctx], str] = lambda _up, _ctx: ""
    settle: Settle = as_given
    check: Callable[[Hp, Ctx], None] = lambda _hp, _ctx: None
    uneven_rows: str = ""
    depends_on_origin: str = ""
    upload_descriptions: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    page: MethodPage | None = None

    def __repr__(self) -> str:
        return f"Method({self.name}: {self.summary} {self.paper})"

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain JSON values, without its functions."""
        made: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, frozenset):
                made[f.name] = sorted(value)
            elif isinstance(value, str | bool | tuple):
                made[f.name] = value
        return {
            **made,
            "executions": list(self.executions),
            "hparams": [asdict(h) for h in self.hparams],
            "defaults": asdict(self.defaults),
        }

    def reads(self, hp: Hp) -> frozenset[str]:
        """Inputs that clients read under these switches."""
        if self.needs_for is None:
            return self.needs
        return self.needs_for(hp)

    def faithful(self, hp: Hp, views: int) -> str:
        """``fidelity`` under these switches; training on stored augmentations is ``cached_views`` at best."""
        fidelity = self.fidelity(hp, views)
        if fidelity == "exact" and hp.get("train_view") == "aug":
            return "cached_views"
        return fidelity

    def cautions(self, hp: Hp) -> list[str]:
        """The warnings of a run under these switches."""
        cautions = list(self.caution(hp))
        if self.reads_test(hp):
            leak = (
                f"{self.name} trains on labelled test rows before it is scored on the same rows. Its accuracy is "
                "therefore not a test accuracy and cannot be compared with other methods"
            )
            cautions.insert(0, leak)
        return cautions

    @property
    def tuned(self) -> tuple[str, ...]:
        """Names of the hyperparameters in which preset ``tuned`` differs from the paper's."""
        return tuple(h.name for h in self.hparams if h.tuned is not None)

    @property
    def usual(self) -> tuple[str, ...]:
        """Names of the hyperparameters in which preset ``default`` differs from the paper's."""
        return tuple(h.name for h in self.hparams if h.usual is not None)

    def hparam(self, name: str) -> HParam:
        """The declared hyperparameter of that name; exit 2 with "did you mean" if there is none."""
        for h in self.hparams:
            if h.name == name:
                return h
        names = [h.name for h in self.hparams]
        listed = ", ".join(sorted(names))
        raise unknown(
            f"hyperparameter of {self.name}", name, names, hint=f"{self.name} reads: {listed}"
        )

    def resolve(
        self, preset: str = PRESETS[0], settings: Mapping[str, Value] | None = None
    ) -> dict[str, Value]:
        """All hyperparameters: the preset, then ``settings`` (words or typed values).

        Raises FedcacheError, exit 2 for an unknown preset or key, or an illegal value.
        """
        if preset not in PRESETS:
            raise unknown("preset", preset, PRESETS)
        # Settings come last: they replace values of the preset, and each is checked against its declaration.
        hp = {h.name: h.of_preset(preset) for h in self.hparams}
        for key, value in (settings or {}).items():
            hp[key] = self.hparam(key).parse(value)
        return hp


@dataclass(frozen=True)
class ClientOverrides:
    """How one client differs from the run's configuration."""

    # Ranges [start, stop) of the concatenated features that the client has, in order; () for all.
    columns: tuple[tuple[int, int], ...] = ()
    hp: Mapping[str, Value] = field(default_factory=dict)  # its own values of some hyperparameters


def check_mixed(
    method: Method, overrides: Mapping[int, ClientOverrides], width: int, clients: int
) -> None:
    """Refuse differences that the method does not allow, and columns or clients that do not exist.

    Raises FedcacheError, exit 2.
    """
    differing = {name for o in overrides.values() for name in o.hp}
    if any(o.columns for o in overrides.values()):
        differing.add("backbones")
    refused = ", ".join(sorted(differing - method.mixed))
    if refused:
        allowed = ", ".join(sorted(method.mixed)) or "nothing"
        raise UsageError(
            f"All clients of {method.name} need the same {refused}; only {allowed} may differ between clients.",
            f"Give every client the same {refused}, or choose a method that exchanges no weights, for example "
            "flesd-head.",
        )
    # Every range must be within the concatenated features and not empty.
    for client, o in overrides.items():
        inside = all(0 <= start < stop <= width for start, stop in o.columns)
        if not inside or not 0 <= client < clients:
            raise UsageError(
                f"The range of columns {o.columns} of client {client} is not valid: there are {clients} clients and "
                f"{width} columns.",
                "Give ranges [start, stop) within the concatenated features.",
            )
