"""Deployed tensors of a run: the ones that predict, apart from the run that made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from fedcache.errors import UsageError
from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.method import Method
from fedcache.heads.linear import Tree


@dataclass(frozen=True)
class DeployedModel:
    """What a run deploys for one client, or one model for all."""

    method: Method
    down: Tree  # what the server sent, or what evaluation trained on it (a probe)
    personal: Tree  # the client's own part; {} for one model for all
    data: ClientData  # rows of the client, for methods of a user's own that read them to predict
    ctx: Ctx  # without leading axes

    def scores(self, x: Tensor) -> Tensor:
        """Features [R, D] (or images uint8 [R, H W 3]) -> scores [R, C]."""
        return self.method.predict(self.down, self.personal, self.data, x, self.ctx)

    def embed(self, x: Tensor) -> Tensor:
        """The same rows -> [R, d], what the classifier behind ``scores`` reads."""
        return self.method.embed(self.down, self.personal, x, self.ctx)


def no_training_rows(method: str) -> ClientData:
    """The data of a model that was taken out of its run: reading any attribute raises UsageError."""
    return missing_rows(
        f"predict of {method} reads the client's training rows, which a saved model does not hold.",
        "Let personal_part of the method return what predict needs of them.",
    )


def missing_rows(message: str, hint: str) -> ClientData:
    """Stand-in for rows that are not there: reading any attribute raises UsageError with this message."""
    return cast(ClientData, _MissingRows(message, hint))


class _MissingRows:
    def __init__(self, *words: str) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        raise UsageError(*self._words)
