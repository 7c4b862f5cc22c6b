"""Class, domain and split of every image, from what the levels of its folders mean.

A level whose names are all words for a split (train, test, val, dev, ..) is the split, the last level left is the
class, and what remains is the domain. Folders that are named like splits are never taken for classes. A single top
folder is entered first, because archives usually have one and the directory they were made from does not; a split or a
lone class is not entered, since it means something.

A layout may give a level another name, such as client: the level is then a group of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedcache.errors import UsageError, closest, shell_word, unknown
from fedcache.extract.datasets.dataset import ONE_DOMAIN, TRAIN
from fedcache.parsing import SAFE
from fedcache.tables.groups import usable_group_name
from fedcache.tables.splits import SPLIT_WORDS

MISSPELT = 0.75
"""Likeness from which on a word is taken for a role that was misspelt."""

_ROLES = ("split", "domain", "class", "*")


@dataclass(frozen=True)
class Labels:
    """What is known of each row."""

    layout: str  # role of each folder level, joined by ``/``, or the columns that are used
    classes: list[str]  # [N] class name of each row; empty unknown
    domains: list[str]  # [N] domain name of each row
    splits: list[int] | None  # [N] split codes, or None when nothing says what they are
    groups: dict[str, list[str]] = field(
        default_factory=dict
    )  # [N] words by the name of a group; empty unknown


def parse_layout(text: str) -> tuple[str, ...]:
    """``split/domain/class`` as roles, ``*`` for a level without meaning and any other word for a group of that name.

    Raises UsageError for all but one class and one split, for a level named twice, and for what is no name.
    """
    roles = tuple(text.strip("/").split("/"))
    for role in roles:
        if role in _ROLES:
            continue
        if near := closest(role, _ROLES, MISSPELT):
            raise UsageError(
                f"Unknown layout level {role!r}. Did you mean {near!r}?",
                "Levels are split, domain, class and *; another word, such as client, makes a group of that name.",
            )
        if not SAFE.fullmatch(role) or roles.count(role) > 1:
            raise UsageError(
                f"The layout {text!r} has a level {role!r}: names are letters, digits, '.', '_' and '-', each once.",
                "--layout client/class",
            )
        usable_group_name(role)
    if roles.count("class") != 1 or roles.count("split") > 1:
        raise UsageError(
            f"The layout {text!r} has {roles.count('class')} class levels and {roles.count('split')} split levels; "
            "expected exactly one class and at most one split.",
            "For example --layout domain/class",
        )
    return roles


def enter_top_folder(names: Sequence[str], keep: int = 1) -> int:
    """How many characters of names belong to single top folders that are entered, leaving ``keep`` folder levels."""
    if not names:
        return 0
    depth = min(name.count("/") for name in names)
    first = names[0].split("/")
    length = 0
    for folder in first[: max(0, depth - keep)]:
        prefix = f"{folder}/"
        if folder.lower() in SPLIT_WORDS or not all(
            name.startswith(prefix, length) for name in names
        ):
            break
        length += len(prefix)
    return length


def infer(
    names: Sequence[str], layout: str | None, *, where: str, tables: Sequence[str] = ()
) -> Labels:
    """Class, domain and split of every image of ``where``, from the folders below the entered top folder.

    ``tables`` are lists among the images, which may say what they are. Raises UsageError when images lie at different
    depths, or directly at the top, or there is one class.
    """
    roles = parse_layout(layout) if layout is not None else None
    folders = [tuple(name.split("/")[:-1]) for name in names]
    depths = {len(f): name for name, f in zip(names, folders, strict=True)}
    wanted = (
        f"{len(roles)} (--layout {layout})"
        if roles
        else "the same number for every image, at least 1"
    )
    if len(depths) > 1 or 0 in depths or (roles is not None and len(roles) not in depths):
        found = "; ".join(f"{n} above {name!r}" for n, name in sorted(depths.items())[:3])
        raise UsageError(
            f"The images of {where} do not lie in one folder per class: folders found: {found}; expected {wanted}.",
            _with_tables(
                tables,
                "Move the odd ones out, give --layout (for example domain/class), "
                "or list the images in a CSV with the columns path,label,domain,split and use folder:FILE.csv",
            ),
        )
    levels = [set(level) for level in zip(*set(folders), strict=True)]
    if roles is None:
        roles = _guess(levels)
        _refuse_splits_as_classes(levels[roles.index("class")], where, tables)
    labels = _labels(folders, roles, where)
    if len(set(labels.classes)) < 2:
        raise UsageError(
            f"{where} was read as {labels.layout} and has one class, {labels.classes[0]!r}; expected at least two.",
            _with_tables(
                tables,
                "If the folders mean something else, say so with --layout; images without classes can be listed in a "
                "CSV with an empty label column",
            ),
        )
    return labels


def _with_tables(tables: Sequence[str], hint: str) -> str:
    """A hint, after the commands that read lists of images that stand among them."""
    commands = [
        f"If it lists the images:  fedcache datasets info folder:{shell_word(table)}"
        for table in sorted(tables)[:4]
    ]
    return "\n".join([*commands, hint])


def _refuse_splits_as_classes(names: set[str], where: str, tables: Sequence[str]) -> None:
    """Refuse a level as the class where its names are words for splits, or hold one for training and one for tests."""
    codes = {SPLIT_WORDS.get(name.lower()) for name in names}
    if None in codes and not (TRAIN in codes and len(codes) > 2):
        return
    raise UsageError(
        f"The folders of {where} are named like splits ({', '.join(sorted(names)[:4])}), and none names a class.",
        _with_tables(
            tables,
            "Put each class into a folder of its own, such as train/cat; or say in metadata.csv, with the columns "
            "file_name and label, what each image is. If these names are classes: --layout class",
        ),
    )


def _guess(levels: Sequence[set[str]]) -> tuple[str, ...]:
    roles = ["domain"] * len(levels)
    splits = [
        i for i, level in enumerate(levels) if all(name.lower() in SPLIT_WORDS for name in level)
    ]
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
        hint = f"{where} was read as {'/'.join(roles)}; correct --layout"
        splits = _split_codes([folder[at_split] for folder in folders], hint)
    domains = (
        ["/".join(f[i] for i in at_domain) for f in folders]
        if at_domain
        else [ONE_DOMAIN] * len(folders)
    )
    groups = {role: [f[i] for f in folders] for i, role in enumerate(roles) if role not in _ROLES}
    return Labels("/".join(roles), [f[at_class] for f in folders], domains, splits, groups)


def _split_codes(words: Sequence[str], hint: str) -> list[int]:
    for word in words:
        if word.lower() not in SPLIT_WORDS:
            raise unknown("split", word, SPLIT_WORDS, hint=hint)
    return [SPLIT_WORDS[word.lower()] for word in words]
