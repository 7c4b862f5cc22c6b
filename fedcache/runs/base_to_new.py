"""Base-to-new generalisation: train on the base classes, and also score new classes by their texts.

Zhou et al., "Conditional prompt learning for vision-language models" (CoCoOp), CVPR 2022. The first half of the
classes, in the order of their labels, are the base classes: ceil(C / 2) of C, as in the released code
(``subsample_classes`` of github.com/KaiyangZhou/CoOp). The run has only rows of these classes. Its accuracy is that on
their test rows, among the base classes. Then the trained tensors get the texts of the other classes, the new classes.
The new accuracy is that on the test rows of the new classes, among the new classes. H = 2 base new / (base + new) is
the harmonic mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.config import TrainConfig
from fedcache.errors import StoreError, UsageError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.evaluate import predict_rows
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import DeployedModel, TrainingOutput
from fedcache.federate.engine.run import TrainingRun, new_run
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import Partition
from fedcache.parsing import whole_number
from fedcache.runs.features import NewClasses, RunFeatures, StoreRows
from fedcache.store.samples import Samples
from fedcache.tables.splits import TEST


def check_base_to_new(
    method: Method, settings: Mapping[str, Value], config: TrainConfig, *, one_store: bool
) -> None:
    """Raise UsageError if new classes are requested of a method that cannot score them, or without one store."""
    if config.transfer:
        option = "--transfer"
    elif config.base_classes is not None:
        option = "--base-classes"
    else:
        return
    if not generalises(method, settings):
        suited = [m.name for m in METHODS.values() if generalises(m, m.resolve())]
        listed = ", ".join(suited)
        raise UsageError(
            f"{option} needs one global model that scores classes without training rows by their texts. "
            f"{method.name} with these settings has no such model.",
            f"Methods with such a model: {listed}.",
        )
    if not one_store:
        raise UsageError(
            f"{option} cannot be combined with client stores or sites.",
            "Train on one store with the rows of all clients.",
        )


def generalises(method: Method, settings: Mapping[str, Value]) -> bool:
    """Whether a method has one global model that scores classes by their texts alone."""
    return method.scores_new_classes(settings) and method.protocol(settings) == "global"


def count_base_classes(option: str, classes: Sequence[str]) -> int:
    """Number of base classes: ``half`` (rounded up), or the given number.

    Raises UsageError for another word, and if no base class or no new class would be left.
    """
    total = len(classes)
    count = whole_number(option)
    if option == "half":
        count = math.ceil(total / 2)
    if count is None or not 0 < count < total:
        raise UsageError(
            f"--base-classes is {option!r}, but there are {total:,} classes, and at least one must be a base class "
            "and one a new class.",
            "--base-classes half",
        )
    return count


class BaseClassRows(StoreRows):
    """A ``RowSource``: one store, of whose rows a run has those of the base classes."""

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Find the store, and count its base classes. Raises UsageError as ``count_base_classes``."""
        seconds = super().open(method, settings)
        self.base = count_base_classes(str(self.config.base_classes), self.store.samples.classes)
        return seconds

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the domains and of the base classes."""
        domains, classes = super().names()
        return domains, classes[: self.base]

    def partitions(
        self, method: Method, seeds: Sequence[int]
    ) -> tuple[dict[int, Partition], str | None]:
        """As ``StoreRows.partitions``; raises UsageError for training rows of new classes and for a held-out value."""
        assert self.base is not None  # set by ``open``
        by_seed, name = super().partitions(method, seeds)
        if (self.store.samples.label[self._trained_rows] >= self.base).any():
            raise UsageError(
                f"The partition {self.config.partition} has training rows of new classes.",
                "Leave --partition out, or leave --base-classes out.",
            )
        if "hold_out" in next(iter(by_seed.values())).args:
            raise UsageError(
                "--base-classes scores the new classes on all rows of the test split, but with --hold-out the base "
                "classes are scored on other rows.",
                "Leave out --hold-out or --base-classes.",
            )
        return by_seed, name

    def read(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """The features, in which rows of new classes have no label, and the new classes."""
        features = super().read(method, settings, arrays, feat_post)
        assert self.base is not None
        data, new = split_data(features.data, self.base, self.store.samples, self.config.domain)
        return replace(features, data=data, new_classes=new)


def split_data(
    data: Data, base: int, samples: Samples, domains: Sequence[str]
) -> tuple[Data, NewClasses]:
    """The data of the first ``base`` classes, in which other rows have no label, and the new classes.

    The test rows are ``rows_to_test``. ``domains`` are those of the run; () for all. Raises StoreError if the new
    classes have no test rows.
    """
    rows = rows_to_test(samples, base, domains)
    if not len(rows):
        raise StoreError(
            "The new classes have no test rows.", "Use another number of --base-classes."
        )
    text = None
    text_of_base = None
    if data.text is not None:
        text_of_base = data.text[:base]
        text = data.text[base:]
    label = samples.label[rows].astype(np.int64) - base
    found = NewClasses(label, rows, data.classes - base, text, data.names[base:])
    y = data.y.where(data.y < base, -1)
    kept = replace(data, y=y, classes=base, text=text_of_base, names=data.names[:base])
    return kept, found


def rows_to_test(samples: Samples, first: int, domains: Sequence[str]) -> NDArray[np.int64]:
    """The test rows of classes from the number ``first`` on; all of their rows if the store has no test split.

    ``domains`` as in ``split_data``.
    """
    readable = samples.ok == 1
    if domains:
        names = np.array(samples.domains)[samples.domain]
        readable &= np.isin(names, domains)
    tested = readable & (samples.label >= first)
    if (readable & (samples.split == TEST)).any():
        tested &= samples.split == TEST
    return np.flatnonzero(tested)


def base_to_new(run: TrainingRun, out: TrainingOutput, new: NewClasses) -> dict[str, Any]:
    """Accuracies as fractions, ``base``, ``new``, ``harmonic_mean``, and ``new_rows``, test rows of new classes.

    Args:
        run: on the base classes.
        out: of the run, with one global model.
        new: the other classes.
    """
    base = out.evaluation.global_accuracy
    none_absent = torch.zeros(new.classes, dtype=torch.bool)
    predicted = predictions(deployed_to(out, new), run, new.rows, none_absent)
    accuracy = float((predicted == new.label).mean())
    return {
        "base": base,
        "new": accuracy,
        "harmonic_mean": harmonic_mean(base, accuracy),
        "new_rows": len(new.rows),
    }


def deployed_to(out: TrainingOutput, new: NewClasses) -> DeployedModel:
    """The global model of a run with the texts of new classes."""
    model = out.deployed(None)
    assert model is not None
    ctx = with_new_classes(model.ctx, new)
    with torch.no_grad():
        down = model.method.deploy(out.broadcast(), {}, model.data, ctx)
    return replace(model, down=down, ctx=ctx)


def with_new_classes(ctx: Ctx, new: NewClasses) -> Ctx:
    """A context with the new classes instead of the base classes."""
    env = ctx.env
    text = new.text
    if text is not None and env.text is not None:
        text = text.to(env.text)
    return replace(ctx, env=replace(env, classes=new.classes, text=text, names=new.names))


def check_new_classes(run: TrainingRun, hp: Mapping[str, Value], new: NewClasses) -> None:
    """Raise UsageError, before the training, for new classes whose names the method cannot use."""
    ctx = new_run(run, hp).server_ctx()
    run.method.check(hp, with_new_classes(ctx, new))


def predictions(
    model: DeployedModel, spec: TrainingRun, rows: NDArray[np.int64], absent: Tensor
) -> NDArray[np.int64]:
    """int64 [n]: the predicted class of each row; never one of the ``absent`` classes, bool [C]."""
    x = spec.data.x
    absent = absent.to(x.device)

    def scores(numbers: Tensor) -> Tensor:
        features = x[numbers, 0]  # the first view of each row
        if features.is_floating_point():
            features = features.to(spec.dtype)
        return model.scores(features).masked_fill(absent, -torch.inf)

    return predict_rows(scores, x.device, rows)


def harmonic_mean(base: float | None, new: float | None) -> float | None:
    """2 base new / (base + new); 0 if both are 0, None if one is unknown."""
    if base is None or new is None:
        return None
    if not base + new:
        return 0.0
    return 2 * base * new / (base + new)
