"""The trust policy of a run: aggregation of uploads, refusal of malformed ones, simulated attacks, and noise."""

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
"""The share of clients that robust rules expect to lie where nothing is said."""

NO_ATTACK = "none"
"""The word for no attack, for sweeps."""

ON_BAD = ("fail", "reject")

WITHOUT_COUNTS = {"bias": "false", "class_weight": "none"}
"""Switches, and the values under which a method sends no counts."""


SIMULATE = "--dp-seed 0"
"""What makes a private run a simulation."""


@dataclass(frozen=True)
class TrustPolicy:
    """What a run does with uploads; the default is the method's own mean, and an error for a malformed upload."""

    rule: RobustRule = MEAN  # how uploads are taken together
    attack: Attack | None = None  # who lies, and how
    on_bad: str = "fail"  # fail | reject, for uploads that update validation refuses
    byzantine: float = BYZANTINE  # the share of a round's clients that ``rule`` expects to lie
    max_norm: float | None = (
        None  # the largest norm of an update that is accepted, None for no bound
    )
    privacy: Privacy | None = None  # clipping and noise
    max_rows: int | None = None  # the most rows that a client may have, None for no bound
    max_share: float | None = (
        None  # the largest share of a round's weight that a client may have, None for no bound
    )
    max_row_norm: float | None = (
        None  # the longest row that statistics may be made of, None for no bound
    )

    @property
    def plain(self) -> bool:
        """Whether uploads are only checked, so that they need not be kept one by one."""
        plain = self.rule.text == "mean" and self.attack is None and self.privacy is None
        return (
            plain and self.on_bad == "fail" and self.max_norm is None and self.max_row_norm is None
        )

    @property
    def protects(self) -> bool:
        """Whether there is noise that nobody can repeat."""
        return self.privacy is not None and self.privacy.protects

    @property
    def secret_participants(self) -> bool:
        """Whether nobody may be told who took part in a round."""
        return self.privacy is not None and self.privacy.keeps_participants_secret

    def check(self, method: Method, hp: Hp) -> None:
        """Refuse what the method's uploads do not allow. Raises UsageError, with the reason."""
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
            self._check_untold()
            self._check_covered(method, hp, self.privacy)

    def _check_untold(self) -> None:
        """Refuse bounds of which it would be told whom they concern. Raises UsageError."""
        bounds = (
            ("--max-update-norm", self.max_norm),
            ("--max-rows-per-client", self.max_rows),
            ("--max-row-norm", self.max_row_norm),
        )
        for name, given in bounds:
            if given is not None:
                raise UsageError(
                    f"{name} with --dp-noise would tell something of single clients that epsilon does not cover.",
                    f"Leave it out: --dp-clip bounds what every client can do; or simulate: {SIMULATE}",
                )

    def _check_covered(self, method: Method, hp: Hp, privacy: Privacy) -> None:
        """Refuse a private run that would tell more than its epsilon covers, unless that is allowed by name."""
        uncovered = ["evaluation"]
        if "sum" in method.pool(hp).values():
            uncovered.append("rows")
        if self.on_bad == "reject":  # a rejected upload is named with its round
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
        """Refuse bounds that no upload falls under, and uploads that hold more than what noise is added to.

        Raises UsageError, naming the tensors.
        """
        if self.max_row_norm is not None and not any(t.statistic for t in declared().values()):
            raise UsageError(
                f"{method.name} takes no --max-row-norm: its clients send no statistics of their rows.",
                "Bound its updates instead: --max-update-norm",
            )
        # of counts no more than 0 or 1 is taken, with noise
        if self.privacy is None or method.merges == "classes":
            return
        beside = sorted(
            n for n, t in declared().items() if t.counts_rows or not t.dtype.is_floating_point
        )
        if beside:
            switches = [
                f"--set {h.name}={w}" for h in method.hparams if (w := WITHOUT_COUNTS.get(h.name))
            ]
            own = "Another method"
            if switches:
                own = f"{' '.join(switches)}, or another method"
            raise UsageError(
                f"{method.name} sends {', '.join(beside)} beside what noise is added to.",
                f"{own}: fedavg, fedprox, fedproto, or fed3r without a bias.",
            )

    def weighs_by_rows(self, method: Method, hp: Hp) -> bool:
        """Whether a client with more rows has more to say."""
        votes = self.rule is not MEAN or self.privacy is not None
        by_rows = (
            bool({"mean", "sum"} & set(method.pool(hp).values())) or method.merges == "classes"
        )
        return by_rows and not votes and not method.central and method.uploads is not sends_nothing

    def check_round(self, clients: int) -> None:
        """Refuse a rule that a round of so many clients cannot carry, before anything is trained.

        Raises UsageError, with the number that can.
        """
        if self.rule is not MEAN:
            self.rule.check(clients, self.liars_of(clients))

    def liars_of(self, clients: int) -> int:
        """f: how many of so many clients the rule expects to lie."""
        return int(self.byzantine * clients + 1e-9)

    @property
    def options_given(self) -> str:
        """The options that differ from the default, in words."""
        found = (
            ("--aggregate", self.rule.text != "mean"),
            ("--attack", self.attack is not None),
            ("--dp-clip", self.privacy is not None),
            ("--on-bad-update", self.on_bad != "fail"),
            ("--max-update-norm", self.max_norm is not None),
            ("--max-rows-per-client", self.max_rows is not None),
            ("--max-share", self.max_share is not None),
            ("--max-row-norm", self.max_row_norm is not None),
        )
        return ", ".join(name for name, given in found if given)

    def refused(self, method: Method, why: str) -> FedcacheError:
        """The error of a method that these options have no meaning for."""
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
    # in one process a malformed upload is a bug, or an attack that is studied
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
    if aggregate == MEAN.text:
        rule = MEAN
    else:
        rule = parse_rule(aggregate)
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
        None if attack in (None, NO_ATTACK) else parse_attack(str(attack)),
        on_bad_update,
        byzantine,
        max_update_norm,
        privacy,
        max_rows_per_client,
        max_share,
        max_row_norm,
    )
