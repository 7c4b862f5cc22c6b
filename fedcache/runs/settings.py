"""The hyperparameters of a run: those of its preset, what was set, and what other options imply."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedcache.config import TrainConfig
from fedcache.federate.engine.hyperparameters import Value, has_batchnorm
from fedcache.federate.engine.method import Method

TURNED_OFF: dict[str, tuple[str, Callable[[Mapping[str, Value]], bool]]] = {
    "momentum": ("opt=adam", lambda hp: hp.get("opt") == "adam"),
    "dim": ("head=linear", lambda hp: hp.get("head") == "linear"),
    "z_norm": ("head=linear", lambda hp: hp.get("head") == "linear"),
    "bn": ("head=linear", lambda hp: hp.get("head") == "linear"),
    "bn_mode": ("a model without BatchNorm", lambda hp: "bn" in hp and not has_batchnorm(hp)),
    "reg_bias": ("bias=false", lambda hp: hp.get("bias") is False),
    "rff_sigma": ("rff_dim=0", lambda hp: hp.get("rff_dim") == 0),
}
"""Hyperparameters -> the setting under which they are not read, in words and as a test of all of them."""


def why_unread(name: str, hp: Mapping[str, Value]) -> str:
    """Under which setting a hyperparameter is not read; "" for one that is."""
    words, is_off = TURNED_OFF.get(name, ("", lambda _hp: False))
    return words if is_off(hp) else ""


def leaves_batchnorm_out(method: Method, config: TrainConfig) -> bool:
    """Whether noise takes BatchNorm out of a model that has it, and nobody asked for it by name.

    Running statistics travel with the weights, and noise on a variance near 0 makes it negative.
    """
    noisy = bool(config.dp_noise) and "bn" not in config.set
    return noisy and has_batchnorm(method.resolve(config.preset, config.set))


def hyperparameters(method: Method, config: TrainConfig) -> dict[str, Value]:
    """Every hyperparameter; a schedule of its own accord lasts as long as the run."""
    settings = method.resolve(config.preset, config.set)
    if leaves_batchnorm_out(method, config):
        settings["bn"] = False
    return with_schedule_rounds(settings, config.rounds or method.defaults.rounds)


def with_schedule_rounds(settings: Mapping[str, Value], rounds: int) -> dict[str, Value]:
    """Hyperparameters whose schedule, where nobody says how long it is, is that of so many rounds."""
    if "sched_rounds" in settings and settings["sched_rounds"] is None:
        return {**settings, "sched_rounds": rounds}
    return dict(settings)


def setting_notes(method: Method, config: TrainConfig) -> list[str]:
    """What is to say of the hyperparameters that were chosen, and of those that were set and are not read."""
    notes = []
    if leaves_batchnorm_out(method, config):
        notes.append(
            f"bn=false: {method.name} is trained without BatchNorm, as --dp-noise would make its variances negative."
        )
    if config.preset == "tuned" and not method.tuned:
        notes.append(f"Nothing of {method.name} was tuned: preset tuned is its paper's.")
    hp = hyperparameters(method, config)
    unread = {name: why for name in config.set if (why := why_unread(name, hp))}
    notes += [
        f"{name}={config.set[name]} changes nothing: it is not read under {why}."
        for name, why in unread.items()
    ]
    return notes
