"""Trust policy of a run: aggregation of uploads, refusal of invalid ones, simulated attacks, and noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.federate.engine.hyperparameters import Hp, has_batchnorm
from fedcache.federate.engine.method import Method, Uploads, sends_nothing
from fedcache.federate.trust.attacks import Attack, parse_attack
from fedcache.federate.trust.privacy import UNCOVERED, Privacy
from fedcache.federate.trust.robust_rules import MEAN, RobustRule, parse_rule

BYZANTINE = 0.2
"""Default share of attackers that robust rules expect."""

NO_ATTACK = "none"
"""Value of a sweep of ``attack`` for a point without one."""

ON_BAD = ("fail", "reject")

WITHOUT_COUNTS = {"bias": "false", "class_weight": "none"}
"""Hyperparameter -> the value with which a method sends no counts."""


SIMULATE = "--dp-seed 0"
"""Option that turns a private run into a simulation."""


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
    max_row_norm: float | None = (
        None  # norm of a row that statistics must respect, None for no bound
    )

    @property
    def plain(self) -> bool:
        """Whether uploads are only checked, so that they need not be kept one by one."""
        changes = (self.attack, self.privacy, self.max_norm, self.max_row_norm)
        unchanged = all(option is None for option in changes)
        return unchanged and self.rule.text == "mean" and self.on_bad == "fail"

    @property
    def protects(self) -> bool:
        """Whether there is real noise, which nobody can repeat."""
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
            raise self.refused(method, "it is trained in one place and nothing is sent")
        changed = self.rule.text != "mean" or self.privacy is not None or self.max_share is not None
        if changed and "stack" in set(method.pool(hp).values()) and method.merges != "classes":
            raise self.refused(
                method, "its server keeps what each client sends and takes no mean of it"
            )
        if self.privacy is not None and self.privacy.noise and has_batchnorm(hp):
            raise UsageError(
                f"{method.name} takes no --dp-noise with bn=true: noise makes variances of BatchNorm negative.",
                "Leave bn out, a private run trains without BatchNorm; or --set bn=false",
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
                    f"{name} with --dp-noise would tell something of single clients that epsilon does not cover.",
                    f"Leave it out: --dp-clip bounds what every client can do; or simulate: {SIMULATE}",
                )

    def _check_covered(self, method: Method, hp: Hp, privacy: Privacy) -> None:
        """Refuse a private run that reveals facts outside of its epsilon, unless ``--dp-allow`` names them."""
        uncovered = ["evaluation"]
        if "sum" in method.pool(hp).values():
            uncovered.append("rows")
        if self.on_bad == "reject":  # warnings name rejected clients with their round
            uncovered.append("participants")
        of_all_rows = {"row norms", "row counts"} & method.reads(hp)
        if hp.get("feat_post") == "standardize" or of_all_rows:
            uncovered.append("statistics")
        missing = [word for word in uncovered if word not in privacy.allow]
        if missing:
            what = "; ".join(f"{word} ({UNCOVERED[word]})" for word in missing)
            allow = ",".join(sorted({*missing, *privacy.allow}))
            raise UsageError(
                f"{method.name} with --dp-noise would tell what epsilon does not cover: {what}.",
                f"Say that this may be known: --dp-allow {allow};  or simulate: {SIMULATE}",
            )

    def check_uploads(self, method: Method, declared: Callable[[], Uploads]) -> None:
        """Refuse bounds that apply to no tensor of an upload, and private runs with tensors that get no noise.

        Raises UsageError, naming the tensors.
        """
        if self.max_row_norm is not None and not any(t.statistic for t in declared().values()):
            raise UsageError(
                f"{method.name} takes no --max-row-norm: its clients send no statistics of their rows.",
                "Bound its updates instead: --max-update-norm",
            )
        # Methods that merge classes get noise on their counts, too.
        if self.privacy is None or method.merges == "classes":
            return
        without_noise = ", ".join(
            sorted(
                n for n, t in declared().items() if t.counts_rows or not t.dtype.is_floating_point
            )
        )
        if without_noise:
            switches = " ".join(
                f"--set {h.name}={WITHOUT_COUNTS[h.name]}"
                for h in method.hparams
                if h.name in WITHOUT_COUNTS
            )
            instead = "Another method"
            if switches:
                instead = f"{switches}, or another method"
            raise UsageError(
                f"{method.name} sends {without_noise} beside what noise is added to.",
                f"{instead}: fedavg, fedprox, fedproto, or fed3r without a bias.",
            )

    def weighs_by_rows(self, method: Method, hp: Hp) -> bool:
        """Whether a client with more rows has more weight."""
        if method.central or method.uploads is sends_nothing:
            return False
        if self.rule is not MEAN or self.privacy is not None:
            return False
        return method.merges == "classes" or bool({"mean", "sum"} & set(method.pool(hp).values()))

    def check_round(self, clients: int) -> None:
        """Refuse a rule that needs more clients in a round, before anything is trained.

        Raises UsageError, with the number that it needs.
        """
        if self.rule is not MEAN:
            self.rule.check(clients, self.liars_of(clients))

    def liars_of(self, clients: int) -> int:
        """f: number of attackers among so many clients that the rule expects."""
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
            f"{method.name} takes no {self.options_given}: {why}.",
            "Methods that do: fedavg, fedprox, fedproto, fed3r and all others that average or add uploads.",
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
    """From the words of the command line. Raises UsageError."""
    # In one process an invalid upload is a bug, or part of a simulated attack.
    on_bad_update = on_bad_update or ON_BAD[0]
    if on_bad_update not in ON_BAD:
        raise unknown("--on-bad-update", on_bad_update, ON_BAD)
    if not 0.0 <= byzantine < 0.5:
        raise UsageError(
            f"--byzantine {byzantine:g}: expected a share from 0 to below 0.5.", "For example 0.2"
        )
    if max_update_norm is not None and not max_update_norm > 0:
        raise UsageError(
            f"--max-update-norm {max_update_norm:g} is not above 0.", "For example 100"
        )
    if max_row_norm is not None and not max_row_norm > 0:
        raise UsageError(f"--max-row-norm {max_row_norm:g} is not above 0.", "For example 100")
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
            f"--aggregate {aggregate} and --dp-clip are both given: noise is accounted for a sum of clipped uploads, "
            "and no other rule takes that sum.",
            "Leave one of them out; --dp-clip bounds every upload by itself.",
        )
    if privacy is not None and max_share is not None:
        raise UsageError(
            "--max-share and --dp-clip are both given: under noise every client weighs the same.",
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
