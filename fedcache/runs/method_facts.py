"""Facts about the methods of this package, stored in the home so that reports start without importing torch.

``compare``, ``report`` and ``runs`` compare a stored run with the preset of its method. A method's file imports torch,
which takes seconds, so each fact is read from the method once and again after any file of the package has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedcache.config import PRESETS
from fedcache.errors import FedcacheError
from fedcache.extract.digests import remembered_of_package
from fedcache.federate.methods import NAMES, find_method


def usual_settings(method: str, preset: str) -> dict[str, Any]:
    """Every hyperparameter of a preset. Raises UsageError for an unknown method or preset."""
    return _of_method(
        method, ["preset", method, preset], lambda: find_method(method).resolve(preset)
    )


def usual_preset(method: str) -> str:
    """The preset that a run without ``--preset`` says it has; of an unknown method the paper's."""

    def read() -> dict[str, Any]:
        return {"preset": PRESETS[0] if find_method(method).usual else "paper"}

    try:
        return str(_of_method(method, ["usual preset", method], read)["preset"])
    except FedcacheError:
        return "paper"


def usual_run(method: str) -> dict[str, Any]:
    """Rounds and participation of a method's paper. Raises UsageError for an unknown method."""

    def read() -> dict[str, Any]:
        usual = find_method(method).defaults
        participation: str | float = "all"
        if usual.participation is not None:
            participation = usual.participation
        return {"rounds": usual.rounds, "participation": participation}

    return _of_method(method, ["run", method], read)


def draws_nothing(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a method gives the same for every seed when all clients take part; False for an unknown method.

    Its uploads add up to those of one client with all rows, for every seed, and no client takes a gradient step.
    """

    def read() -> dict[str, Any]:
        found = find_method(method)
        every = {**found.resolve("paper"), **settings}
        return {"draws nothing": not found.gradient and found.additive(every)}

    key = ["draws nothing", method, repr(sorted(settings.items()))]
    try:
        return bool(_of_method(method, key, read)["draws nothing"])
    except FedcacheError:
        return False


def _of_method(method: str, key: list[str], read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A fact about a method. Methods from outside the package are not cached, as their files may change."""
    if method in NAMES:
        return remembered_of_package(key, read)
    return read()
