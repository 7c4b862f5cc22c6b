"""The hyperparameters of a run: those of its preset, what was set, and what other options imply."""

from __future__ import annotations

from collections.abc import Mapping

from fedcache.config import TrainConfig
from fedcache.federate.engine.hyperparameters import Value, has_batchnorm
from fedcache.federate.engine.method import Method


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
