"""Upload pipeline: the steps from uploads to the pooled upload, in every execution and engine.

    uploads -> update validation -> attack simulation -> clipping and noise, or robust rule -> pooled upload

With the default policy (``UploadPipeline``) each upload is validated and added to a running float64 sum as it arrives,
so memory does not grow with the number of clients. A policy that compares uploads with one another keeps those of a
round until the last one has arrived (``BufferedUploads``). The result has the form that ``Method.aggregate`` expects.
Uploads may have a leading axis of grid points; stacked uploads are put in client order.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FedcacheError, FederatedRunError, InternalError, UsageError, unknown
from fedcache.federate.engine.client_data import SHARED_SUMS
from fedcache.federate.engine.hyperparameters import Hp, has_batchnorm
from fedcache.federate.engine.method import Method, Pooling, StatisticKind, Uploads, sends_nothing
from fedcache.federate.trust.attacks import Attack, parse_attack
from fedcache.federate.trust.privacy import UNCOVERED, Noise, Privacy
from fedcache.federate.trust.robust_rules import MEAN, RobustRule, parse_rule
from fedcache.federate.trust.update_validation import (
    UpdateValidation,
    is_bounded,
    largest_number,
    largest_to_train_from,
    not_finite,
)
from fedcache.heads.linear import Tree
from fedcache.heads.ridge import gram, nearest_gram

BYZANTINE = 0.2
"""Default share of malicious clients that robust rules assume."""

NO_ATTACK = "none"
"""Value of a sweep of ``attack`` for configurations without an attack."""

ON_BAD = ("fail", "reject")

WITHOUT_COUNTS = {"bias": "false", "class_weight": "none"}
"""Hyperparameter -> the value that stops a method from sending counts of rows."""


SIMULATE = "--dp-seed 0"
"""Option that turns a private run into a simulation."""


def without_noise(method: Method, uploads: Uploads) -> list[str]:
    """Names of the uploaded tensors that would get no noise. A private run refuses a method that has any."""
    # Methods that merge classes get noise on their counts, too.
    if method.merges == "classes":
        return []
    return sorted(name for name, t in uploads.items() if t.without_noise)


@dataclass(frozen=True)
class TrustPolicy:
    """Treatment of the uploads of a run; by default the method's own mean, and an error for an invalid upload."""

    rule: RobustRule = MEAN  # aggregation rule
    attack: Attack | None = None  # simulated attack
    on_bad: str = "fail"  # fail | reject, for uploads that update validation refuses
    byzantine: float = BYZANTINE  # share of attackers in a round that ``rule`` expects
    max_norm: float | None = None  # largest accepted norm of an update, None for no bound
    privacy: Privacy | None = None  # clipping and noise
    max_rows: int | None = None  # largest accepted number of a client's rows, None for no bound
    max_share: float | None = None  # cap on a client's share of a round's weight, None for no cap
    # largest norm of a data row that a client's statistics may imply, None for no bound
    max_row_norm: float | None = None

    @property
    def plain(self) -> bool:
        """Whether each upload can be added as it arrives. Otherwise ``BufferedUploads`` keeps those of a round."""
        # Bounds on norms are checked only by ``BufferedUploads``, after a simulated attack.
        need_all = (self.attack, self.privacy, self.max_norm, self.max_row_norm)
        none_given = all(option is None for option in need_all)
        return none_given and self.rule.text == "mean" and self.on_bad == "fail"

    @property
    def protects(self) -> bool:
        """Whether there is real noise, which cannot be repeated."""
        return self.privacy is not None and self.privacy.protects

    @property
    def secret_participants(self) -> bool:
        """Whether the participants of a round must stay secret."""
        return self.privacy is not None and self.privacy.keeps_participants_secret

    def check(self, method: Method, hp: Hp) -> None:
        """Refuse options that the method's uploads do not support. Raises UsageError, with the reason."""
        if not self.options_given:
            return
        if method.central:
            raise self.refused(method, "it is trained in one place, and nothing is sent")
        changed = self.rule.text != "mean" or self.privacy is not None or self.max_share is not None
        if changed and "stack" in method.pool(hp).values() and method.merges != "classes":
            reason = "its server keeps every client's upload and does not average them"
            # If the default hyperparameters need no stack, the given ones are the reason.
            if "stack" not in method.pool(method.resolve()).values():
                reason = f"with these hyperparameters, {reason}"
            raise self.refused(method, reason)
        if self.privacy is not None and self.privacy.noise and has_batchnorm(hp):
            raise UsageError(
                f"{method.name} does not support --dp-noise with bn=true, because noise makes variances "
                "of BatchNorm negative.",
                "Use --set bn=false, or leave bn out, because a private run trains without BatchNorm by default",
            )
        if self.privacy is not None and self.protects:
            self._check_bounds()
            self._check_covered(method, hp, self.privacy)

    def _check_bounds(self) -> None:
        """Refuse bounds whose messages would reveal single clients. Raises UsageError."""
        bounds = {
            "--max-update-norm": self.max_norm,
            "--max-rows-per-client": self.max_rows,
            "--max-row-norm": self.max_row_norm,
        }
        for name, value in bounds.items():
            if value is not None:
                raise UsageError(
                    f"{name} reveals information about single clients that the epsilon of --dp-noise does not cover.",
                    f"Leave {name} out, because --dp-clip already bounds every client; or simulate: {SIMULATE}",
                )

    def _check_covered(self, method: Method, hp: Hp, privacy: Privacy) -> None:
        """Refuse a private run that reveals facts outside of its epsilon, unless ``--dp-allow`` names them."""
        uncovered = ["evaluation"]
        if "sum" in method.pool(hp).values():
            uncovered.append("rows")
        if self.on_bad == "reject":  # warnings name rejected clients with their round
            uncovered.append("participants")
        of_all_rows = {"row norms", "row counts"} & method.reads(hp)
        if hp.get("feat_post") in SHARED_SUMS or of_all_rows:
            uncovered.append("statistics")
        missing = [word for word in uncovered if word not in privacy.allow]
        if missing:
            what = "; ".join(f"{word} ({UNCOVERED[word]})" for word in missing)
            allow = ",".join(sorted({*missing, *privacy.allow}))
            raise UsageError(
                f"{method.name} with --dp-noise would reveal data that epsilon does not cover: {what}.",
                f"To allow this: --dp-allow {allow};  or simulate: {SIMULATE}",
            )

    def check_uploads(self, method: Method, forms: Sequence[Callable[[], Uploads]]) -> None:
        """Refuse bounds that apply to no tensor of an upload, and private runs with tensors that get no noise.

        ``forms`` return the declared uploads of the rounds that differ. Raises UsageError, naming the tensors.
        """
        if self.max_row_norm is not None:
            tensors = [tensor for declared in forms for tensor in declared().values()]
            if not any(tensor.statistic for tensor in tensors):
                raise UsageError(
                    f"{method.name} does not support --max-row-norm, because its clients send no statistics "
                    "of their rows.",
                    "Limit the norm of updates instead: --max-update-norm",
                )
        if self.privacy is None:
            return
        uncovered = [name for declared in forms for name in without_noise(method, declared())]
        bare = ", ".join(dict.fromkeys(uncovered))
        if bare:
            names = [h.name for h in method.hparams if h.name in WITHOUT_COUNTS]
            switches = " ".join(f"--set {name}={WITHOUT_COUNTS[name]}" for name in names)
            instead = "Use another method"
            if switches:
                instead = f"Use {switches}, or another method"
            raise UsageError(
                f"{method.name} would send {bare} without noise.",
                f"{instead}: fedavg, fedprox, fedproto, or fed3r without a bias.",
            )

    def weighs_by_rows(self, method: Method, hp: Hp) -> bool:
        """Whether a client with more rows has more weight."""
        if method.central or method.uploads is sends_nothing:
            return False
        if self.rule is not MEAN or self.privacy is not None:
            return False
        if method.merges == "classes":
            return True
        return not {"mean", "sum"}.isdisjoint(method.pool(hp).values())

    def check_round(self, clients: int) -> None:
        """Refuse a rule that needs more clients in a round, before anything is trained.

        Raises UsageError, with the number that it needs.
        """
        if self.rule is not MEAN:
            self.rule.check(clients, self.attackers_of(clients))

    def attackers_of(self, clients: int) -> int:
        """f: number of attackers that the rule expects among so many clients."""
        # In float64 a product may be slightly below a whole number: 0.29 x 100, for example.
        return int(self.byzantine * clients + 1e-9)

    @property
    def options_given(self) -> str:
        """The options that differ from the default, in words."""
        is_set = {
            "--aggregate": self.rule.text != "mean",
            "--attack": self.attack is not None,
            "--dp-clip": self.privacy is not None,
            "--on-bad-update": self.on_bad != "fail",
            "--max-update-norm": self.max_norm is not None,
            "--max-rows-per-client": self.max_rows is not None,
            "--max-share": self.max_share is not None,
            "--max-row-norm": self.max_row_norm is not None,
        }
        return ", ".join(name for name, given in is_set.items() if given)

    def refused(self, method: Method, why: str) -> FedcacheError:
        """The error for a method that does not support these options."""
        return UsageError(
            f"{method.name} does not support {self.options_given}: {why}.",
            "Use a method that averages or adds uploads, such as fedavg, fedprox, fedproto or fed3r.",
        )


def parse_policy(
    aggregate: str = "mean",
    attack: str | None = None,
    on_bad_update: str | None = None,
    byzantine: float = BYZANTINE,
    max_update_norm: float | None = None,
    privacy: Privacy | None = None,
    max_rows_per_client: int | None = None,
    max_share: float | None = None,
    max_row_norm: float | None = None,
) -> TrustPolicy:
    """The settings that the options of the command line give. Raises UsageError."""
    # In one process all clients are simulated, so an invalid upload is nearly always a bug or a divergence. By default
    # it ends the run.
    on_bad_update = on_bad_update or ON_BAD[0]
    if on_bad_update not in ON_BAD:
        raise unknown("--on-bad-update", on_bad_update, ON_BAD)
    if not 0.0 <= byzantine < 0.5:
        raise UsageError(
            f"--byzantine {byzantine:g}: expected a share from 0 to below 0.5.", "For example 0.2"
        )
    for name, norm in (("--max-update-norm", max_update_norm), ("--max-row-norm", max_row_norm)):
        if norm is not None and not norm > 0:  # also refuses NaN
            raise UsageError(f"{name} {norm:g} is not above 0.", "For example 100")
    if max_rows_per_client is not None and max_rows_per_client < 1:
        raise UsageError(
            f"--max-rows-per-client {max_rows_per_client} is not above 0.", "For example 10000"
        )
    if max_share is not None and not 0.0 < max_share <= 1.0:
        raise UsageError(
            f"--max-share {max_share:g}: expected a share above 0, at most 1.", "For example 0.2"
        )
    rule = MEAN
    if aggregate != MEAN.text:
        rule = parse_rule(aggregate)
    simulated = None
    if attack not in (None, NO_ATTACK):
        simulated = parse_attack(str(attack))
    if privacy is not None and rule.text != "mean":
        raise UsageError(
            f"--aggregate {aggregate} and --dp-clip are both given, but epsilon is valid only for a sum of clipped "
            "uploads, and only --aggregate mean computes this sum.",
            "Leave one of them out; --dp-clip already bounds every upload.",
        )
    if privacy is not None and max_share is not None:
        raise UsageError(
            "--max-share and --dp-clip are both given, but with --dp-clip every client has the same weight.",
            "Leave --max-share out.",
        )
    return TrustPolicy(
        rule,
        simulated,
        on_bad_update,
        byzantine,
        max_update_norm,
        privacy,
        max_rows_per_client,
        max_share,
        max_row_norm,
    )


class UploadPool:
    """A running aggregate of uploads.

    Args:
        rules: name prefix -> mean (weights n_i) | uniform | sum | stack; the longest matching prefix decides.
        clients: number of uploads; stacks are allocated for all of them at the first one.
    """

    def __init__(self, rules: Mapping[str, Pooling], clients: int) -> None:
        self._clients = clients
        self._rules = sorted(rules.items(), key=lambda item: -len(item[0]))
        self._sums: dict[str, Tensor] = {}
        self._stacks: dict[str, tuple[list[int], Tensor]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._weight = 0.0
        self._count = 0

    def rule(self, name: str) -> Pooling:
        """How the upload of that name is pooled."""
        for prefix, rule in self._rules:
            if name.startswith(prefix):
                return rule
        raise InternalError(
            f"The method does not declare how to combine the upload {name!r}.",
            "In the pool of the Method, add an entry for a prefix of this name.",
        )

    def add(self, up: Tree, weight: float, client: int, scale: float = 1.0) -> None:
        """Add a client's upload with its weight n_i (not yet divided by N); ``scale`` multiplies summed tensors."""
        self._weight += weight
        self._count += 1
        for name, t in up.items():
            first = self._shapes.setdefault(name, t.shape)
            if first != t.shape:
                shape = tuple(t.shape)
                raise FederatedRunError(
                    f"Client {client} uploads {name} with shape {shape}, but another client uploads it with shape "
                    f"{tuple(first)}.",
                    "Uploads that are combined need the same shape: pad them and send a mask.",
                )
            self._dtypes[name] = t.dtype
            if self.rule(name) == "stack":
                if name not in self._stacks:
                    empty = t.new_empty((self._clients, *t.shape))
                    self._stacks[name] = ([], empty)
                order, stack = self._stacks[name]
                stack[len(order)] = t
                order.append(client)
            else:
                self._accumulate(name, t, self.factor(name, weight, scale))

    def factor(self, name: str, weight: float, scale: float = 1.0) -> float:
        """The factor of a client's tensor in the sum; arguments as ``add``."""
        factors = {"mean": weight, "sum": scale}
        return factors.get(self.rule(name), 1.0)

    def weigh(self, weights: Sequence[float]) -> None:
        """Count clients whose uploads arrive only as sums."""
        self._weight += sum(weights)
        self._count += len(weights)

    def add_sum(self, name: str, total: Tensor, dtype: torch.dtype) -> None:
        """Add a tensor that is already summed over some clients, each times its ``factor``.

        ``weigh`` counts these clients.
        """
        self._dtypes[name] = dtype
        self._accumulate(name, total, 1.0)

    def _accumulate(self, name: str, t: Tensor, weight: float) -> None:
        total = self._sums.get(name)
        if total is None:
            total = torch.zeros(t.shape, dtype=torch.float64, device=t.device)
            self._sums[name] = total
        total.add_(t, alpha=weight)

    def done(self) -> Tree:
        """Means and sums in the dtype of the uploads, stacks [k, ..] in client order."""
        out = {}
        for name, (order, stack) in self._stacks.items():
            out[name] = stack[: len(order)]
            # A stack in another order is sorted, which costs a copy.
            if order != sorted(order):
                out[name] = stack[np.argsort(order, kind="stable")]
        scales = {"mean": self._weight, "uniform": float(self._count), "sum": 1.0}
        for name, total in self._sums.items():
            pooled = total / scales[self.rule(name)]
            out[name] = pooled.to(self._dtypes[name])
        return out


@dataclass(frozen=True)
class RejectedUpload:
    """An upload that did not reach ``aggregate``; ``round`` counts from 1."""

    round: int
    client: int
    why: str


@dataclass(frozen=True)
class UploadRound:
    """Facts about a round that are known before its uploads arrive."""

    method: Method
    hp: Hp  # its hyperparameters
    policy: TrustPolicy
    expected: Uploads  # declared form of an upload
    broadcast: Tree  # sent to the clients
    number: int  # of the round, from 1
    seed: int  # of the run
    names: Sequence[str]  # of all clients of the run
    rows: Sequence[float] | np.ndarray  # n_i of all clients of the run
    weights: Mapping[int, float]  # weights of the clients that ``--max-share`` reduces
    clients: int  # number of clients in the round
    expected_clients: float  # mean number of clients in a round, for the accounting of noise
    expected_rows: float  # training rows of all eligible clients
    attackers: frozenset[int]  # clients of a simulated attack
    noise: Noise  # for the sum of a private run
    longest: float | None  # upper bound of the norm of a training row; None if unknown


class UploadPipeline:
    """Takes the uploads of one round, one client at a time, in batches of clients, or as sums over some clients.

    Attributes:
        rejected: uploads that were left out, under ``--on-bad-update reject``.
        unprotected_classes: classes with so few owners that the rule expects no attacker among them.
    """

    def __init__(self, round_: UploadRound) -> None:
        self.round = round_
        self.policy = round_.policy
        self.method = round_.method
        self.expected = round_.expected
        self.validation = UpdateValidation(round_.expected, round_.number, round_.longest)
        self._pool = UploadPool(self.method.pool(round_.hp), max(1, round_.clients))
        self.rejected: list[RejectedUpload] = []
        self.unprotected_classes = 0

    def rule(self, name: str) -> Pooling:
        """The pooling rule of a tensor; an engine may sum it over clients unless the rule is ``stack``."""
        return self._pool.rule(name)

    def factors(self, name: str, clients: Sequence[int]) -> list[float]:
        """The factors of the uploads of some clients in a sum."""
        factors = []
        for client in clients:
            weight = self.weight(client)
            scale = self._scale(client, weight)
            factors.append(self._pool.factor(name, weight, scale))
        return factors

    def weight(self, client: int) -> float:
        """The weight of a client in a mean: its number of rows, or less under ``--max-share``."""
        return self.round.weights.get(client, self.round.rows[client])

    def _scale(self, client: int, weight: float) -> float:
        """The factor of a client's summed tensors: 1, or less under ``--max-share``."""
        rows = self.round.rows[client]
        if weight != rows:
            return weight / rows
        return 1.0

    def _add(self, pool: UploadPool, up: Tree, client: int, weight: float) -> None:
        """Add an upload to a pool. A reduced weight also reduces stacked counts, which the server uses as weights."""
        scale = self._scale(client, weight)
        if scale != 1.0:
            up = dict(up)
            for name, declared in self.expected.items():
                if declared.counts_rows and pool.rule(name) == "stack":
                    up[name] = up[name] * scale
        pool.add(up, weight, client, scale)

    def accepts_batch(
        self,
        up: object,
        clients: Sequence[int],
        lead: tuple[int, ...],
        coordinates: Mapping[str, tuple[int, ...]] | None,
    ) -> bool:
        """Validate names, shapes, types and counts of a batch of clients at once, before it is taken apart.

        Raises FederatedRunError, naming the round and the first client with an invalid upload.

        Args:
            up: result of ``fit``.
            clients: on the axis of clients, in this order.
            lead: the leading axes, (M,) or (G, M).
            coordinates: name -> shape, for tensors that an execution writes as coefficients of other bases
                (``execution.gram``), so that they do not have the declared shape.

        Returns:
            False if all of them are rejected, so that there is nothing to ``add``.
        """
        why = self.validation.structure_problem(up, lead, coordinates)
        # One call of ``fit`` made the batch, so all its clients have the same names and shapes.
        if why is not None:
            self.rejected += [self._rejection(client, why) for client in sorted(clients)]
            return False
        self._check_counts(up, clients)
        return True

    def _check_counts(self, up: object, clients: Sequence[int]) -> None:
        """Refuse a batch with invalid counts of rows. Raises FederatedRunError, naming the first such client."""
        assert isinstance(up, dict)
        rows = [self.round.rows[c] for c in clients]
        wrong = self.validation.count_problems(up, rows)
        if wrong:
            client, why = min((clients[place], why) for place, why in wrong.items())
            raise self.validation.refusal(client, self.round.names[client], why)

    def add(self, up: Tree, client: int, *, validated: bool = False) -> None:
        """Take the upload of one client, which may have a leading axis of grid points.

        Raises FederatedRunError for an invalid upload, naming client and round; a policy that keeps uploads raises it
        in ``pooled``. With ``validated`` the upload was checked before.
        """
        rows = self.round.rows[client]
        # ``is_sound`` is fast, and may be False for a valid upload with large numbers. The slow checks decide.
        if not validated and not self.validation.is_sound(up, rows):
            name = self.round.names[client]
            why = self.validation.malformed(up, rows)
            if why:
                raise self.validation.refusal(client, name, why)
            for tensor, t in up.items():
                if t.is_floating_point() and not is_bounded(t):
                    number = self.round.number
                    raise not_finite(tensor, t, number, (client, name), self.method, self.round.hp)
        self._add(self._pool, up, client, self.weight(client))

    def add_weights(self, clients: Sequence[int]) -> None:
        """Count clients whose uploads arrive only as sums."""
        self._pool.weigh([self.weight(c) for c in clients])

    def add_together(self, up: Tree, clients: Sequence[int]) -> bool:
        """Take the sum of some clients' uploads, for an additive method and a policy that only sums.

        An invalid upload makes the sum invalid: a number that is not finite stays so, and counts of rows add up. For an
        invalid sum this returns False and takes nothing. The caller then adds the uploads one by one, which names the
        client.
        """
        rows = sum(self.round.rows[c] for c in clients)
        # A client of reduced weight has a factor of its own, so its upload is needed alone.
        if self.round.weights or not self.validation.is_sound(up, rows):
            return False
        for name, t in up.items():
            self.add_sum(name, t, t.dtype)
        self.add_weights(clients)
        return True

    def add_sum(self, name: str, total: Tensor, dtype: torch.dtype) -> None:
        """Add a tensor that is already summed over some clients, each times its factor, for a policy that only sums.

        Raises FederatedRunError for another shape or dtype than the declared one.
        """
        expected = self.expected[name]
        lead = total.dim() - len(expected.shape)
        core = tuple(total.shape[lead:])
        if core != expected.shape or dtype != expected.dtype:
            found = f"sums of {name} have shape {core} and {dtype}"
            declared = f"{expected.shape} and {expected.dtype}"
            raise FederatedRunError(
                f"Round {self.round.number}: {found}, expected {declared}.", "Please report this."
            )
        self._pool.add_sum(name, total, dtype)

    def pooled(self) -> Tree:
        """The pooled upload of the round, after all steps of the policy.

        Raises FederatedRunError for a refused upload under ``--on-bad-update fail``, and if all are rejected.
        """
        return self._pool.done()

    def warnings(self, rejected_before: int, unprotected_before: int) -> list[str]:
        """Warnings about rejected uploads, and about classes that the rule does not protect.

        Args:
            rejected_before: rejected uploads in earlier rounds. Warnings name only the first rejected uploads of a run.
            unprotected_before: unprotected classes in earlier rounds. Only the first round with any gives a warning.
        """
        return []

    def _rejection(self, client: int, why: str) -> RejectedUpload:
        """The record of an invalid upload. Raises its refusal under ``--on-bad-update fail``."""
        if self.policy.on_bad == "fail":
            raise self.validation.refusal(client, self.round.names[client], why)
        return RejectedUpload(self.round.number, client, why)


# Weights of clients in means by rows: a limit on the number of rows, and a cap on the share.
#
# In a federation of real sites a number of rows is only a claim, and a large claim dominates a mean
# by rows. So a number far above the others gives a warning or is refused, and ``--max-share`` caps
# the share of a client.


FAR_OUT = 10
"""A number of rows is far out if it exceeds the median by this factor.

The numbers of rows of honest clients differ by about one order of magnitude. In a log-normal distribution with sigma
1, which is as wide as those of federated benchmarks, 1 % of the clients exceed the median by this factor.
"""

ROUNDING = 1e-12
"""Relative rounding error of a share."""

NAMED = 3
"""Maximum number of clients that get separate warnings, the clients with most rows first."""

FEWEST = 3
"""Minimum number of clients for a median. If there are two, a wrong number may be either of them."""


def far_out_limit(rows: Sequence[float] | np.ndarray) -> float | None:
    """The largest number of rows that is not far out: ``FAR_OUT`` times the median over clients with rows.

    The lower median is at most the largest honest number, unless more than half of the clients claim more. None for
    fewer than ``FEWEST`` clients.
    """
    known = np.asarray(rows, np.float64)
    known = known[known > 0]
    if len(known) < FEWEST:
        return None
    return FAR_OUT * float(np.quantile(known, 0.5, method="lower"))


def capped_weights(rows: Sequence[float], share: float) -> list[float]:
    """min(n_i, t), with the largest t for which no weight is more than ``share`` of their sum.

    Args:
        rows: n_i of the clients of a round, each at least 0.
        share: S in (0, 1]. If S m <= 1 for the m clients with rows, these have equal weights.
    """
    n = np.asarray(rows, np.float64)
    rising = np.sort(n[n > 0])
    if not len(rising):
        return [0.0] * len(n)
    if share * len(rising) <= 1.0:
        return [float(w) for w in np.minimum(n, rising[0])]
    # With the k largest cut to t and the sum b_k of the others, t = S (k t + b_k). The loop finds the smallest k for
    # which no other client is above t.
    k = 0
    largest = rising[::-1]
    below = np.cumsum(rising)[::-1]
    while largest[k] * (1.0 - k * share) > share * below[k] * (1.0 + ROUNDING):
        k += 1
    if not k:
        return list(rows)
    cap = share * below[k] / (1.0 - k * share)
    return [float(w) for w in np.minimum(n, cap)]


def reduced_weights(rows: Mapping[int, float], share: float | None) -> dict[int, float]:
    """Client -> its capped weight, for the clients of a round that the cap reduces."""
    if share is None:
        return {}
    capped = capped_weights(list(rows.values()), share)
    weights = dict(zip(rows, capped, strict=True))
    return {client: weight for client, weight in weights.items() if weight != rows[client]}


def weight_warnings(
    names: Mapping[int, str] | Sequence[str],
    clients: np.ndarray,
    rows: np.ndarray,
    share: float | None,
) -> list[str]:
    """Warnings about the largest clients, for methods that average or add uploads by rows.

    Args:
        names: of all clients, by number.
        clients: int64 [k], numbers of the eligible clients.
        rows: float64 [k], n_i of these.
        share: the cap on a client's share, None for no cap.
    """
    all_rows = float(rows.sum())
    limit = far_out_limit(rows)
    if share is not None:
        is_large = rows > share * all_rows
    elif limit is not None:
        is_large = (rows > limit) | (rows > all_rows / 2)
    else:
        is_large = np.zeros(len(rows), bool)
    warnings = []
    places = np.flatnonzero(is_large)
    largest_first = places[np.argsort(-rows[places], kind="stable")]
    for place in largest_first[:NAMED].tolist():
        c = int(clients[place])
        n = float(rows[place])
        fraction = n / all_rows
        has = f"client {c} ({names[c]!r}) has {n:,.0f} rows, {fraction:.0%} of all rows"
        if share is None:
            warnings.append(
                f"{has}, more than half of all rows or {FAR_OUT} times the median. Its upload dominates, because "
                "uploads are weighted by rows (--max-share 0.2 limits its weight, --aggregate median gives every "
                "client one vote)"
            )
        else:
            warnings.append(f"{has}: --max-share {share:g} limits its weight in every round")
    return warnings


# Policies that compare uploads with one another: attack simulation, clipping and noise, robust
# rules, rejection, and a bound on norms.
#
# They keep the uploads of a round until the last one has arrived, and work on a matrix V [m, d] with
# a row for each client. A row holds updates (upload minus broadcast) where the method pools means,
# statistics divided by the number of rows where it pools sums, and the prototypes of a class where
# the server merges them by class (``Method.merges``).


SECOND_MOMENTS: frozenset[StatisticKind] = frozenset(
    {"gram", "class grams", "squares", "class squares"}
)
"""Kinds of statistics that are sums of squares or products. With the sums of the same rows they give a variance, which
must not be negative.
"""

FAR_FROM_OTHERS = 1e3
"""An upload may be rejected if its change exceeds the median change of the other uploads by this factor.

Honest clients with different rows, steps and learning rates change a model by amounts that differ by about two orders
of magnitude.
"""

COMPARABLE = 3
"""Minimum number of uploads for this comparison. Of two uploads, neither has a majority."""

NAMED_REJECTIONS = 5
"""Maximum number of rejected uploads that the warnings of a run list. Its records count all of them."""


class UploadLayout:
    """Layout of a row of V: all floats of an upload without counts, tensor by tensor in the order of names.

    Args:
        expected: declared form of an upload.
        broadcast: an averaged tensor is replaced in V by its difference from the broadcast one.
        rules: name -> pooling rule; a summed tensor is divided in V by the number of the client's rows.
        counts: whether V has summed counts of rows too, so that a rule treats them like the sums they belong to.
    """

    def __init__(
        self,
        expected: Uploads,
        broadcast: Tree,
        rules: Mapping[str, Pooling],
        *,
        counts: bool = False,
    ) -> None:
        self.rules = rules
        self.expected = expected
        self.names = []
        self.base = {}
        for name, declared in sorted(expected.items()):
            # Counts that are not summed are weights of uploads, on which no rule votes.
            left_out = declared.counts_rows and not (counts and rules[name] == "sum")
            if left_out or not declared.dtype.is_floating_point:
                continue
            self.names.append(name)
            sent = broadcast.get(name)
            # The server takes the mean of new values as the next broadcast. A step is a difference already.
            is_new_value = rules[name] in ("mean", "uniform") and not declared.is_step
            if is_new_value and sent is not None and tuple(sent.shape) == declared.shape:
                self.base[name] = sent.double()

    def vector(self, up: Tree, rows: float) -> Tensor:
        """The row of V of an upload, float64 [d]; ``rows`` is the number of the client's training rows."""
        parts = []
        for name in self.names:
            t = self.change(name, up[name].double())
            if self.rules[name] == "sum":
                t = t / rows
            parts.append(t.flatten())
        if parts:
            return torch.cat(parts)
        return torch.zeros(0, dtype=torch.float64)

    def tree(self, v: Tensor, rows: float, template: Tree) -> Tree:
        """The inverse of ``vector``; counts and integers are those of ``template``."""
        out = dict(template)
        start = 0
        for name in self.names:
            shape = self.expected[name].shape
            size = math.prod(shape)
            t = v[start : start + size].view(shape)
            start += size
            if self.rules[name] == "sum":
                t = t * rows
            if name in self.base:
                t = t + self.base[name]
            out[name] = t.to(self.expected[name].dtype)
        return out

    def change(self, name: str, t: Tensor) -> Tensor:
        """A tensor of an upload; if it replaces a broadcast tensor, its difference from that one."""
        if name in self.base:
            return t.double() - self.base[name]
        return t

    @property
    def size(self) -> int:
        """d, numbers in a row."""
        return sum(math.prod(self.expected[name].shape) for name in self.names)


@dataclass
class _KeptUpload:
    """An upload that waits for the end of its round."""

    client: int
    rows: float
    tree: Tree
    validated: bool = False


class BufferedUploads(UploadPipeline):
    """The pipeline of a policy that is not plain."""

    def __init__(self, round_: UploadRound) -> None:
        super().__init__(round_)
        self._kept: list[_KeptUpload] = []

    def rule(self, name: str) -> Pooling:
        """``stack``, so that an engine adds the uploads one by one."""
        return "stack"

    def _check_counts(self, up: object, clients: Sequence[int]) -> None:
        """Nothing here: ``pooled`` validates each upload, so that one can be rejected alone."""

    def add(self, up: Tree, client: int, *, validated: bool = False) -> None:
        """Keep the upload of one client; ``pooled`` validates it."""
        copied = up
        # A copy, because an executor may write the next client's upload to the same memory.
        if isinstance(up, dict):
            copied = dict(up)
            for name, t in up.items():
                if isinstance(t, Tensor):
                    copied[name] = t.clone()
        self._kept.append(_KeptUpload(client, self.round.rows[client], copied, validated))

    def pooled(self) -> Tree:
        """The pooled upload of the round. Raises as ``UploadPipeline.pooled``."""
        self._kept.sort(key=lambda kept: kept.client)
        if not self._kept and not self.rejected:
            # Only a private round can have no clients. It has noise as any other, so that nobody sees that it is empty.
            assert self.policy.privacy is not None
            return self._combined()
        if not self.expected:
            raise self.policy.refused(self.method, "its clients send nothing")
        layout = self._layout()
        self._reject(lambda kept: self.validation.malformed(kept.tree, kept.rows))
        if self.policy.attack is not None:
            self._simulate_attack(layout)
        self._reject(self._problem)
        self._reject(lambda kept: self._too_long(layout, kept))
        self._reject_far_out(layout)
        self.rejected.sort(key=lambda rejected: rejected.client)
        if not self._kept:
            count = len(self.rejected)
            why = self.rejected[0].why
            raise FederatedRunError(
                f"Round {self.round.number}: all {count} uploads were rejected, so there is nothing to "
                f"aggregate. The first was rejected because {why}.",
                "Lower the learning rate, or check the data of the clients.",
            )
        return self._combined()

    def _combined(self) -> Tree:
        """The pooled upload of the kept uploads, by noise or by the rule."""
        changed = self.policy.rule.text != "mean" or self.policy.privacy is not None
        if self.method.merges == "classes" and changed:
            return self._merged_classes()
        if self.policy.privacy is not None:
            return self._private()
        return self._aggregated()

    def suspects(self) -> list[int]:
        """The clients whose uploads are kept, by falling distance from the median of all uploads.

        Empty for a private run, which cannot leave an upload out, because its noise is drawn once for a round.
        """
        if self.policy.privacy is not None or len(self._kept) < 2:
            return []
        V = self._matrix(self._layout())
        far = torch.zeros(len(V))
        # Uploads of counts alone have no numbers in V, and no median.
        if V.shape[1]:
            middle = V.median(0).values
            far = (V - middle).norm(dim=1)
        order = far.argsort(descending=True, stable=True).tolist()
        return [self._kept[i].client for i in order]

    def without(self, client: int, why: str) -> tuple[BufferedUploads, Tree]:
        """The same round with that client's upload rejected, and its pooled upload.

        Raises FederatedRunError or UsageError if the rule needs more uploads than are left.
        """
        remaining = copy.copy(self)
        remaining._kept = [kept for kept in self._kept if kept.client != client]
        remaining.rejected = [*self.rejected, RejectedUpload(self.round.number, client, why)]
        remaining.rejected.sort(key=lambda rejected: rejected.client)
        remaining.unprotected_classes = 0
        return remaining, remaining._combined()

    def _problem(self, kept: _KeptUpload) -> str | None:
        """Why the numbers of an upload are invalid, in words; None for a valid one.

        Statistics of simulated attackers are not checked. In a private run those of no client are: it clips them, and a
        rejection would reveal the name of a client, which epsilon does not cover.
        """
        if kept.validated:
            return None
        statistics = not self._simulated(kept) and self.policy.privacy is None
        return self.validation.problem(kept.tree, kept.rows, statistics=statistics)

    def warnings(self, rejected_before: int, unprotected_before: int) -> list[str]:
        """The first rejected uploads of a run, and the first round with unprotected classes."""
        warnings = []
        if self.unprotected_classes and not unprotected_before:
            rule = self.policy.rule.text
            warnings.append(
                f"round {self.round.number}: {self.unprotected_classes} classes have so few clients that "
                f"--aggregate {rule} cannot protect their prototypes"
            )
        for r in self.rejected[: max(0, NAMED_REJECTIONS - rejected_before)]:
            who = f"client {r.client} ({self.round.names[r.client]!r})"
            warnings.append(f"round {r.round}: the upload of {who} is rejected: {r.why}")
        return warnings

    def _layout(self, *, counts: bool = False) -> UploadLayout:
        rules = {name: self._pool.rule(name) for name in self.expected}
        return UploadLayout(self.expected, self.round.broadcast, rules, counts=counts)

    def _reject(self, problem: Callable[[_KeptUpload], str | None]) -> None:
        sound = []
        for kept in self._kept:
            why = problem(kept)
            if why is None:
                sound.append(kept)
            else:
                self.rejected.append(self._rejection(kept.client, why))
        self._kept = sound

    def _too_long(self, layout: UploadLayout, kept: _KeptUpload) -> str | None:
        """In words, that the norm of an update is above the bound of the policy; None if it is not."""
        bound = self.policy.max_norm
        if bound is None:
            return None
        norm = float(layout.vector(kept.tree, kept.rows).norm())
        if norm <= bound:
            return None
        return f"its update has norm {norm:.4g}, above the allowed {bound:g}"

    def _reject_far_out(self, layout: UploadLayout) -> None:
        """Reject uploads after which no honest client could train from the model.

        Such an upload has a tensor whose change (``UploadLayout.change``) exceeds ``largest_to_train_from``, and
        ``FAR_FROM_OTHERS`` times the median of the other uploads. Statistics have their own checks, and a private run
        clips its uploads.
        """
        # With ``fail`` a rejection ends the run, which is not needed if a robust rule copes with such an upload.
        rule_copes = self.policy.rule.text != "mean" and self.policy.on_bad == "fail"
        if len(self._kept) < COMPARABLE or self.policy.privacy is not None or rule_copes:
            return
        reasons: dict[int, str] = {}
        for name in layout.names:
            if self.expected[name].statistic is not None:
                continue
            changes = (layout.change(name, kept.tree[name]) for kept in self._kept)
            sizes = [largest_number(change) for change in changes]
            safe = largest_to_train_from(self.expected[name].dtype)
            for i, size in enumerate(sizes):
                other_sizes = sorted(sizes[:i] + sizes[i + 1 :])
                # The upper median, so that one client with a tiny change cannot make another one far out.
                usual = other_sizes[len(other_sizes) // 2]
                kept = self._kept[i]
                if size > max(safe, FAR_FROM_OTHERS * usual) and not self._simulated(kept):
                    why = f"{name} changes by {size:.2g}; the median change of the other uploads is {usual:.2g}"
                    reasons.setdefault(kept.client, why)
        self._reject(lambda kept: reasons.get(kept.client))

    def _simulated(self, kept: _KeptUpload) -> bool:
        """Whether a simulated attacker sent this upload. It is not rejected, so that it reaches the rule under test."""
        return self.policy.attack is not None and kept.client in self.round.attackers

    def _matrix(self, layout: UploadLayout) -> Tensor:
        """V [m, d] of the kept uploads; one row of zeros for a round without clients."""
        rows = [layout.vector(kept.tree, kept.rows) for kept in self._kept]
        return torch.stack(rows or [torch.zeros(layout.size, dtype=torch.float64)])

    def _stacked(self, name: str) -> Tensor:
        """A tensor of the kept uploads [m, ..] in float64; zeros with m = 1 for a round without clients."""
        tensors = [kept.tree[name].double() for kept in self._kept]
        shape = self.expected[name].shape
        return torch.stack(tensors or [torch.zeros(shape, dtype=torch.float64)])

    def _simulate_attack(self, layout: UploadLayout) -> None:
        """Replace the uploads of the attackers, who know the honest uploads of all clients."""
        attack = self.policy.attack
        if attack is None or not layout.names or not self._kept:
            return
        is_attacker = torch.tensor([kept.client in self.round.attackers for kept in self._kept])
        V = attack(self._matrix(layout), is_attacker, self.round.seed, self.round.number - 1)
        for i in is_attacker.nonzero().flatten().tolist():
            kept = self._kept[i]
            tree = layout.tree(V[i], kept.rows, kept.tree)
            self._kept[i] = _KeptUpload(kept.client, kept.rows, tree)

    def _aggregated(self) -> Tree:
        """The upload pooled by the rule; tensors outside of the layout are pooled as the method declares."""
        rule = self.policy.rule
        pool = UploadPool(self.method.pool(self.round.hp), len(self._kept))
        weights = [kept.rows for kept in self._kept]
        # Rejected clients are gone, so the shares are capped among the remaining clients.
        if self.policy.max_share is not None:
            weights = capped_weights(weights, self.policy.max_share)
        for kept, weight in zip(self._kept, weights, strict=True):
            self._add(pool, kept.tree, kept.client, weight)
        pooled = pool.done()
        if rule.text == "mean":
            return pooled
        # Rejected clients count as attackers that the rule need not expect any more.
        rejected = len(self.rejected)
        expected_attackers = self.policy.attackers_of(len(self._kept) + rejected)
        attackers = max(0, expected_attackers - rejected)
        self._check_rule(rule, len(self._kept), attackers)
        layout = self._layout(counts=True)
        # Sums are scaled to m clients of median size, because an attacker can claim any number of rows.
        total = len(self._kept) * statistics.median(kept.rows for kept in self._kept)
        kinds = {t.statistic.kind for t in self.expected.values() if t.statistic}
        V = self._matrix(layout)
        # Second moments must stay consistent with the first ones.
        if kinds & SECOND_MOMENTS:
            row = rule.of_moments(V, attackers)
        else:
            row = rule(V, attackers)
        return _with_definite_gram(layout.tree(row, total, pooled))

    def _check_rule(self, rule: RobustRule, m: int, f: int, of_class: str = "") -> None:
        """Refuse a rule that needs more uploads than are left in a round.

        Raises FederatedRunError, with the round and the rejected clients. m uploads are left, and f attackers are
        expected among them; ``of_class`` names the class, if any.
        """
        try:
            rule.check(m, f)
        except FedcacheError as error:
            if not self.rejected and not of_class:
                raise
            left = f"{m} uploads are left"
            names = [repr(self.round.names[r.client]) for r in self.rejected[:5]]
            gone = ", ".join(names)
            if gone:
                left += f" after {len(self.rejected)} were rejected ({gone})"
            raise FederatedRunError(
                f"Round {self.round.number}{of_class}: {left}. {error.message}", error.hint
            ) from error

    def _private(self) -> Tree:
        """The noisy sum of the clipped rows, divided by the expected number of clients; all weights are equal."""
        privacy = self.policy.privacy
        assert privacy is not None
        layout = self._layout()
        total = privacy.noisy_sum(self._matrix(layout), self.round.noise)
        mean = total / self.round.expected_clients
        # {}: every tensor of a private upload is in the layout.
        return _with_definite_gram(layout.tree(mean, self.round.expected_rows, {}))

    def _prototype_names(self) -> tuple[str, str]:
        """Names of the prototypes and of their counts, for a server that merges by class."""
        counts = [name for name, t in self.expected.items() if t.counts_rows]
        prototypes = [name for name in self.expected if name not in counts]
        return prototypes[0], counts[0]

    def _merged_classes(self) -> Tree:
        """Prototypes merged class by class into one set, which ``aggregate`` gets as the only upload."""
        proto, count = self._prototype_names()
        P = self._stacked(proto)  # [m, C, P]
        N = self._stacked(count)  # [m, C]
        if self.policy.privacy is not None:
            means, total = self._private_classes(P, (N > 0).double())
        else:
            means, total = self._robust_classes(P, N)
        expected = self.expected
        return {
            proto: means.unsqueeze(0).to(expected[proto].dtype),
            count: total.unsqueeze(0).to(expected[count].dtype),
        }

    def _robust_classes(self, P: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
        """The rule applied to the owners of each class: prototypes [C, P], and rows [C] of all owners."""
        means = torch.zeros_like(P[0])
        for c in range(P.shape[1]):
            owners = (N[:, c] > 0).nonzero().flatten()
            m = len(owners)
            if m:
                f = self.policy.attackers_of(m)
                if self.policy.byzantine > 0 and f == 0:
                    self.unprotected_classes += 1
                self._check_rule(self.policy.rule, m, f, f", class {c}")
                means[c] = self.policy.rule(P[owners, c], f)
        return means, N.sum(0)

    def _private_classes(self, P: Tensor, owns: Tensor) -> tuple[Tensor, Tensor]:
        """Private prototypes [C, P] and numbers of owners [C]; classes with too few owners are 0.

        ``owns`` [m, C] is 1 where a client has the class. Noise is added to the sums of both together.
        """
        privacy = self.policy.privacy
        assert privacy is not None
        m, C, width = P.shape
        owned = P * owns.unsqueeze(-1)
        V = torch.cat([owned.reshape(m, -1), owns], 1)
        total = privacy.noisy_sum(V, self.round.noise)
        sums = total[: C * width].view(C, width)
        owners = total[C * width :]
        # A class without owners still gets noise, of about one deviation, so a class has owners only above that. Below
        # half an owner it has none.
        known = owners > max(0.5, privacy.deviation)
        means = sums / owners.clamp(min=0.5).unsqueeze(-1)
        means = torch.where(known.unsqueeze(-1), means, 0.0)
        return means, owners * known


def _with_definite_gram(pooled: Tree) -> Tree:
    """The pooled upload with its matrix ``gram`` replaced by the nearest positive semi-definite one.

    Noise, and rules that work on single coordinates, can make the matrix indefinite. If the upload also has class sums
    and counts, the scatter within classes is made positive semi-definite instead of the matrix.
    """
    # ``heads.ridge.gram`` stores the matrix as a vector, its upper triangle. A ``gram`` of another form is left alone.
    if "gram" not in pooled or pooled["gram"].dim() != 1:
        return pooled
    between = torch.zeros_like(pooled["gram"])
    if {"class_sum", "count"} <= pooled.keys():
        roots = pooled["count"].clamp(min=1.0).sqrt()
        between = gram(pooled["class_sum"] / roots.unsqueeze(-1))
    within = nearest_gram(pooled["gram"] - between)
    return {**pooled, "gram": within + between}
