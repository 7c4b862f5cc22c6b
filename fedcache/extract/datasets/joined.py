"""Several datasets as the domains of one: ``mnist=torchvision:MNIST,svhn=torchvision:SVHN``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.extract.datasets import dataset
from fedcache.extract.datasets.dataset import Dataset, Source
from fedcache.extract.recipe import slug as safe


class JoinedSource:
    """Reads each row from the source ``which`` it came from (uint8 [N]), where it is row ``row`` (int64 [N])."""

    def __init__(self, sources: list[Source], which: NDArray[np.uint8], row: NDArray[np.int64]) -> None:
        self.sources = sources
        self.which = which
        self.row = row

    def read(self, row: int) -> bytes | NDArray[np.uint8]:
        """The image of a row; raises ``BadImage``."""
        return self.sources[int(self.which[row])].read(int(self.row[row]))


def join(spec: str, members: Mapping[str, Dataset]) -> Dataset:
    """One dataset whose domains are the members, with names prefixed by the domain.

    A member that has several domains itself gives ``NAME/domain`` each. Class names must be the same set in all;
    their order is the first member's. Rows are in order of the prefixed names.

    Raises:
        UsageError, with the differences, when the class names do not agree.
    """
    if len(members) > 255:
        raise UsageError(f"{len(members)} datasets are named as domains; at most 255.", "Join fewer")
    first_name, first = next(iter(members.items()))
    for name, member in members.items():
        _check_classes(first_name, first, name, member)
    domains: list[str] = []
    names: list[str] = []
    columns: dict[str, list[NDArray[np.generic]]] = {c: [] for c in ("label", "domain", "split", "uid", "which", "row")}
    for at, (name, member) in enumerate(members.items()):
        place = {c: i for i, c in enumerate(first.classes)}
        to = np.array([*(place[c] for c in member.classes), -1], dtype=np.int32)  # label -1 picks the last: unknown
        columns["label"].append(to[member.label])
        columns["domain"].append(member.domain + np.int16(len(domains)))
        columns["split"].append(member.split)
        columns["uid"].append(member.uid)
        columns["which"].append(np.full(len(member), at, dtype=np.uint8))
        columns["row"].append(np.arange(len(member), dtype=np.int64))
        domains += [name] if len(member.domains) == 1 else [f"{name}/{d}" for d in member.domains]
        names += [f"{name}/{n}" for n in member.names]
    order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
    whole = {c: np.concatenate(parts)[order] for c, parts in columns.items()}
    split = whole["split"].astype(np.uint8)
    templates = {member.template for member in members.values()}
    reading = dataset.counts(split, first.classes, domains)
    return Dataset(
        spec=spec,
        slug=safe("-".join(members))[:64],
        classes=first.classes,
        domains=tuple(domains),
        names=tuple(names[i] for i in order),
        label=whole["label"].astype(np.int32),
        domain=dataset.domain_column(whole["domain"].astype(np.int64), domains),
        split=split,
        uid=whole["uid"].astype(np.uint8),
        template=templates.pop() if len(templates) == 1 else None,
        reading="\n".join([reading, *(f"  {name} = {member.reading}" for name, member in members.items())]),
        source=JoinedSource(
            [m.source for m in members.values()], whole["which"].astype(np.uint8), whole["row"].astype(np.int64)
        ),
        mirror=all(member.mirror for member in members.values()),
    )


def _check_classes(first_name: str, first: Dataset, name: str, member: Dataset) -> None:
    missing = sorted(set(first.classes) - set(member.classes))
    extra = sorted(set(member.classes) - set(first.classes))
    if missing or extra:
        parts = [
            f"only {who} has {', '.join(map(repr, some[:5]))}{f' and {len(some) - 5} more' if len(some) > 5 else ''}"
            for who, some in ((first_name, missing), (name, extra))
            if some
        ]
        raise UsageError(
            f"The classes of {first_name} ({len(first.classes)}) and {name} ({len(member.classes)}) differ: "
            f"{'; '.join(parts)}.",
            "Domains of one dataset share their class names: rename the folders, or list the images in a CSV",
        )
