"""Opens the dataset that a spec names: its images, texts, rows or sounds, with labels, domains and splits.

A spec is ``digits``, files of the user (``kinds.FILES``), ``torchvision:NAME``, ``paper:NAME``, or several of them
named as domains of one dataset: ``mnist=torchvision:MNIST,svhn=torchvision:SVHN``. The reader of a kind is imported
when a dataset of that kind is requested. torch is never imported, and torchvision only to load one of its datasets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedcache.errors import UsageError, shell_word, unknown
from fedcache.extract.datasets import columns, kinds
from fedcache.extract.datasets.columns import from_rows
from fedcache.extract.datasets.dataset import READING, Context, Dataset, Source, join
from fedcache.extract.digests import DigestMemory
from fedcache.extract.image_files import BadImage
from fedcache.extract.recipe import IMAGES
from fedcache.plugins import KINDS as PLUGINS
from fedcache.plugins import find, offer
from fedcache.store.samples import INGESTED

__all__ = [
    "BadImage",
    "Context",
    "Dataset",
    "Source",
    "facts_of",
    "from_rows",
    "holds_of",
    "open_dataset",
    "peek",
]

ARCHIVES = (".zip", ".tar")
"""Endings of archives of images."""
HELD = "python"
"""Kind of datasets that a Python program passes in memory; no spec can name one."""
offer("datasets", [*kinds.KINDS, INGESTED])
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*=")


def module(name: str) -> Any:
    """A module of this package, imported when it is first needed."""
    return import_module(f"fedcache.extract.datasets.{name}")


def known_names() -> list[str]:
    """The specs of all datasets that ``listing.known`` lists."""
    return [row["name"] for row in module("listing").known()]


def kind_of(spec: str) -> tuple[str, str]:
    """The kind of a spec and the rest behind the colon; UsageError for a spec that names no dataset."""
    kind, _, rest = spec.partition(":")
    is_known = kind in kinds.KINDS or find("datasets", kind) is not None
    if is_known and (rest or kind == "digits"):
        return kind, rest
    # The spec is invalid. The code below finds out why: embeddings, images in memory, a path, or a misspelt name.
    if kind == INGESTED:
        raise UsageError(
            f"{spec!r} contains embeddings, not images.",
            f"fedcache train --dataset {shell_word(spec)} --method fedavg   trains on them. "
            "To extract images, give --dataset digits or folder:PATH.",
        )
    if kind == HELD:
        raise UsageError(
            f"The images of {spec!r} were passed from Python, so fedcache cannot read them again.",
            "To resume, call fc.extract(images, ...) from Python with the same images. Or choose another dataset "
            "with --dataset.",
        )
    if spec and spec not in kinds.KINDS and Path(spec).expanduser().exists():
        raise UsageError(
            f"{spec!r} is a path, not the name of a dataset.",
            f"To use the images in it: --dataset folder:{shell_word(spec)}",
        )
    names = known_names()
    if kind in kinds.KINDS:
        files = kinds.KINDS[kind].files
        expected = f"{kind}:NAME"
        if files is not None:
            expected = files.spec
        raise UsageError(
            f"{spec!r} is incomplete; expected {expected}.",
            "fedcache datasets list",
        )
    # A name without its kind, such as `cifar10` for `torchvision:cifar10`.
    bare = {
        name.partition(":")[2]: name for name in names if ":" in name and name not in kinds.FILES
    }
    near = [full for name, full in bare.items() if name.lower() == spec.lower()]
    if near:
        full = bare.get(spec, near[0])
        raise UsageError(
            f"Unknown dataset {spec!r}. Did you mean {full!r}?", f"--dataset {shell_word(full)}"
        )
    raise unknown("dataset", spec, names, hint="fedcache datasets list   shows all")


def folder_spec(text: str) -> str:
    """The spec of a dataset that the user wrote: ``folder:PATH`` for a path of a folder or archive, else the text."""
    path = Path(text).expanduser()
    archive = path.is_file() and path.name.lower().endswith(ARCHIVES)
    if (path.is_dir() or archive) and text not in kinds.KINDS:
        return f"folder:{text}"
    return text


def parts_of(spec: str) -> dict[str, str] | None:
    """``{name: spec}`` of ``NAME=SPEC,NAME=SPEC``, or None for a single spec."""
    if not _NAMED.match(spec):
        return None
    parts = {}
    for piece in re.split(rf",(?={_NAMED.pattern})", spec):
        name, _, member = piece.partition("=")
        if name in parts:
            raise UsageError(
                f"The domain {name!r} is given twice in {spec!r}.", "Give each domain another name"
            )
        parts[name] = member
    return parts


def open_dataset(spec: str, context: Context) -> Dataset:
    """Open a dataset: number its images, without decoding any.

    The first time, every byte is read for the uids; they are remembered until a file changes.

    Args:
        spec: ``digits[:synth=N]``, ``folder:PATH``, ``arrays:FILE``, ``idx:FOLDER``, ``hf:PATH``,
            ``webdataset:PATTERN``, ``texts:FILE``, ``rows:FILE``, ``torchvision:NAME``, ``paper:NAME``, or
            ``NAME=SPEC,NAME=SPEC``.
        context: remembered digests, and the options with which it is opened.

    Raises:
        UsageError for an invalid spec or a folder without a clear meaning, MachineError for missing files or packages,
            CorruptionError for damaged or hostile archives.
    """
    memory = context.memory
    parts = parts_of(spec)
    if parts is None:
        whole = _open_one(spec, context)
    else:
        members = {name: _open_one(member, context) for name, member in parts.items()}
        whole = join(spec, members)
        facts = {name: (d.slug, d.digest) for name, d in members.items()}
        memory.remember(_joint_key(facts), [whole.slug, whole.digest])
    if context.limit is None:
        return whole
    limited = whole.part(context.limit)
    memory.remember(["limited", whole.digest, context.limit], [limited.slug, limited.digest])
    return limited


def peek(spec: str, context: Context) -> tuple[str, str] | None:
    """(slug, content digest) of a dataset that was opened before and has not changed; no image is read.

    Costs one ``stat`` for an archive and one for each file of a directory. None if the dataset must be opened first.
    Raises the errors of ``open_dataset`` that can be found without reading an image.
    """
    memory = context.memory
    # In ``found``, a single spec has the name "".
    found = {}
    parts = parts_of(spec)
    for name, member in (parts or {"": spec}).items():
        fact = _recall(memory, _key(member, context))
        if fact is None:
            return None
        found[name] = fact
    if parts:
        whole = _recall(memory, _joint_key(found))
    else:
        whole = found[""]
    if whole is None or context.limit is None:
        return whole
    return _recall(memory, ["limited", whole[1], context.limit])


def facts_of(spec: str, context: Context) -> list[Any]:
    """JSON values that determine everything read from a dataset, including its groups; errors as of ``peek``."""
    parts = parts_of(spec) or {"": spec}
    keys = [[name, _key(member, context)] for name, member in parts.items()]
    return [keys, context.limit]


def holds_of(spec: str) -> str:
    """What a dataset's rows are (images, texts, rows or sounds), found by its spec alone; errors as of ``peek``."""
    parts = parts_of(spec) or {"": spec}
    first, *_ = [kind_of(member)[0] for member in parts.values()]
    return str(getattr(_reader(first), "HOLDS", IMAGES))


def _open_one(spec: str, context: Context) -> Dataset:
    key = _key(spec, context)
    kind, rest = kind_of(spec)
    found: Dataset = _reader(kind).load(rest, context)
    context.memory.remember(key, [found.slug, found.digest])
    return found


def _key(spec: str, context: Context) -> list[Any]:
    kind, rest = kind_of(spec)
    # --layout gives the meaning of folders. Only kinds whose main column holds paths read folders.
    if context.layout is not None and kinds.CONTENT.get(kind) != "path":
        raise UsageError(
            f"--layout {context.layout} was given, but it applies only to folder:PATH and sound:PATH, not to {spec}.",
            "Leave --layout out",
        )
    version: Any = READING
    if kind in kinds.CONTENT:
        version = [READING, columns.READING]
    # Another version of a plug-in may read other rows from the same files.
    origin = []
    plugin = find("datasets", kind)
    if plugin is not None:
        origin.append(plugin.origin)
    return ["dataset", version, kind, *origin, *_reader(kind).key(rest, context)]


def _reader(kind: str) -> Any:
    """The reader of a kind of datasets: a module of this package, or one of a plug-in.

    Raises UsageError for a plug-in that cannot be loaded or has no ``key`` and ``load``.
    """
    if kind in kinds.KINDS:
        return module(kinds.KINDS[kind].module)
    plugin = find("datasets", kind)
    reader = None
    origin = ""
    if plugin is not None:
        reader = plugin.load()
        origin = f" of {plugin.origin}"
    if not all(callable(getattr(reader, name, None)) for name in ("key", "load")):
        raise UsageError(
            f"The dataset kind {kind!r}{origin} does not have both functions `key` and `load`.",
            f"Expected {PLUGINS['datasets']}.",
        )
    return reader


def _recall(memory: DigestMemory, key: list[Any]) -> tuple[str, str] | None:
    fact = memory.recall(key)
    if isinstance(fact, list) and len(fact) == 2:
        return (str(fact[0]), str(fact[1]))
    return None


def _joint_key(members: Mapping[str, tuple[str, str]]) -> list[Any]:
    return ["joint", READING, [[name, *fact] for name, fact in members.items()]]
