"""What the folder levels of a tree of images mean: pure functions on names.

A level whose names are all in {train, test, val, valid, validation} is the split, the last level left is the class,
and what remains is the domain. A single top folder is entered first, because archives usually have one and the
directory they were made from does not; a split or a lone class is not entered, since it means something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcache.errors import UsageError, unknown
from fedcache.extract.datasets.dataset import ONE_DOMAIN, TEST, TRAIN, VALIDATION

SPLITS = {"train": TRAIN, "test": TEST, "val": VALIDATION, "valid": VALIDATION, "validation": VALIDATION}
"""Split names, compared without case."""

_ROLES = ("split", "domain", "class", "*")


@dataclass(frozen=True)
class Labels:
    """What the names say about each row.

    Attributes:
        layout: role of each folder level, joined by ``/``.
        classes: [N] class name of each row.
        domains: [N] domain name of each row.
        splits: [N] split codes, or None when no level is a split.
    """

    layout: str
    classes: list[str]
    domains: list[str]
    splits: list[int] | None


def parse_layout(text: str) -> tuple[str, ...]:
    """``split/domain/class`` as roles; ``*`` is a level without meaning.

    Raises:
        UsageError, for an unknown role, or not exactly one class, or more than one split.
    """
    roles = tuple(text.strip("/").split("/"))
    for role in roles:
        if role not in _ROLES:
            raise unknown(
                "layout level", role, _ROLES, hint="Levels are split, domain, class and *, as in 'split/class/*'"
            )
    if roles.count("class") != 1 or roles.count("split") > 1:
        raise UsageError(
            f"The layout {text!r} has {roles.count('class')} class levels and {roles.count('split')} split levels; "
            "expected exactly one class and at most one split.",
            "For example --layout domain/class",
        )
    return roles


def enter_top_folder(names: Sequence[str], keep: int = 1) -> int:
    """How many characters of every name belong to single top folders that are entered.

    Args:
        names: paths of images, separated by ``/``.
        keep: folder levels that must be left (the length of a given layout).
    """
    if not names:
        return 0
    depth = min(name.count("/") for name in names)
    first = names[0].split("/")
    length = 0
    for folder in first[: max(0, depth - keep)]:
        prefix = f"{folder}/"
        if folder.lower() in SPLITS or not all(name.startswith(prefix, length) for name in names):
            break
        length += len(prefix)
    return length


def infer(names: Sequence[str], layout: str | None, *, where: str) -> Labels:
    """Class, domain and split of every image, from its folders.

    Args:
        names: paths below the entered top folder.
        layout: the user's override, or None.
        where: what to call the dataset in messages.

    Raises:
        UsageError, when images lie at different depths, or directly at the top, or there is one class.
    """
    roles = parse_layout(layout) if layout is not None else None
    folders = [tuple(name.split("/")[:-1]) for name in names]
    depths = {len(f): name for name, f in zip(names, folders, strict=True)}
    wanted = f"{len(roles)} (--layout {layout})" if roles else "the same number for every image, at least 1"
    if len(depths) > 1 or 0 in depths or (roles is not None and len(roles) not in depths):
        found = "; ".join(f"{n} above {name!r}" for n, name in sorted(depths.items())[:3])
        raise UsageError(
            f"The images of {where} do not lie in one folder per class: folders found: {found}; expected {wanted}.",
            "Move the odd ones out, give --layout (for example domain/class), "
            "or list the images in a CSV with the columns path,label,domain,split and use folder:FILE.csv",
        )
    levels = [set(level) for level in zip(*set(folders), strict=True)]
    if roles is None:
        roles = _guess(levels)
    labels = _labels(folders, roles, where)
    if len(set(labels.classes)) < 2:
        raise UsageError(
            f"{where} was read as {labels.layout} and has one class, {labels.classes[0]!r}; expected at least two.",
            "If the folders mean something else, say so with --layout; images without classes can be listed in a CSV "
            "with an empty label column",
        )
    return labels


def _guess(levels: Sequence[set[str]]) -> tuple[str, ...]:
    roles = ["domain"] * len(levels)
    splits = [i for i, level in enumerate(levels) if all(name.lower() in SPLITS for name in level)]
    if splits and len(levels) > 1:
        roles[splits[0]] = "split"
    last = max(i for i, role in enumerate(roles) if role == "domain")
    roles[last] = "class"
    return tuple(roles)


def _labels(folders: Sequence[tuple[str, ...]], roles: tuple[str, ...], where: str) -> Labels:
    at_class = roles.index("class")
    at_split = roles.index("split") if "split" in roles else None
    at_domain = [i for i, role in enumerate(roles) if role == "domain"]
    splits = None
    if at_split is not None:
        splits = []
        for folder in folders:
            name = folder[at_split]
            if name.lower() not in SPLITS:
                raise unknown("split", name, SPLITS, hint=f"{where} was read as {'/'.join(roles)}; correct --layout")
            splits.append(SPLITS[name.lower()])
    domains = ["/".join(f[i] for i in at_domain) for f in folders] if at_domain else [ONE_DOMAIN] * len(folders)
    return Labels("/".join(roles), [f[at_class] for f in folders], domains, splits)
