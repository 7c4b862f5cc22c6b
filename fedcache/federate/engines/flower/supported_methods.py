"""Which methods and options a federation over sites can have, decided before anything is sent."""

from __future__ import annotations

from fedcache.config import TrainConfig
from fedcache.errors import UsageError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, keep_down

IN_PROCESS = "In one process it runs: fedcache train --clients-from DIR --method {}"


def why_not(method: Method, hp: Hp) -> str | None:
    """What keeps a method from running over sites, in words; None for one that exchanges only uploads."""
    needs = method.reads(hp)
    if method.central:
        return "it trains on all clients' rows in one place"
    if "public" in needs:
        return "its clients share a public set of rows"
    if live := sorted(needs & {"pixels", "text tower", "image tower"}):
        return f"its clients need {' and '.join(live)}, and shards hold features"
    if method.deploy is not keep_down:
        return "its models are scored after a probe on all clients' rows"
    if method.protocol(hp) == "everywhere":
        return "its models are scored on all clients' rows"
    if hp.get("feat_post") == "standardize":
        return "feat_post=standardize takes mean and variance over all clients' rows"
    return None


def check_suited(method: Method, hp: Hp, config: TrainConfig) -> None:
    """Refuse what cannot run over sites.

    Raises:
        UsageError, with the reason.
    """
    if (why := why_not(method, hp)) is not None:
        raise UsageError(f"{method.name} does not run over sites: {why}.", IN_PROCESS.format(method.name))
    if config.attack is not None:
        raise UsageError(
            "--attack makes clients lie in a simulation; sites are real.",
            IN_PROCESS.format(method.name) + f" --attack {config.attack}",
        )
    if config.dp_clip is not None or config.dp_noise is not None:
        raise UsageError(
            "--dp-clip draws its noise from the run's seed, which every site is told, so here it would hide nothing.",
            IN_PROCESS.format(method.name) + " --dp-clip 1 --dp-noise 1 shows what noise costs",
        )
    given = [
        name
        for name, value in (
            ("--client-backbones", config.client_backbones),
            ("--client-set", config.client_set),
            ("--domain", config.domain),
            ("--partition", config.partition),
        )
        if value
    ]
    if given:
        raise UsageError(f"{', '.join(given)} deals what sites already hold.", "Leave it out: every site is a client.")
