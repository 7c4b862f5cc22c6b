"""Lists the datasets that a spec can name, describes each in detail, and downloads datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.extract.datasets import digits, download, hf, kind_of, paper, papers, torchvision
from fedcache.extract.datasets.dataset import Context
from fedcache.extract.datasets.kinds import FILES, KINDS
from fedcache.extract.digests import DigestMemory
from fedcache.plugins import plugins
from fedcache.tables.splits import SPLIT_NAMES, TEST


def pull(
    spec: str,
    *,
    data: Path,
    roots: Mapping[str, Path] | None = None,
    say: Callable[[str], None] = lambda text: None,
    mirror: str | None = None,
) -> Path:
    """Download a dataset to where ``open_dataset`` will find it, and return the folder. Called only on request.

    Args:
        spec: ``torchvision:NAME``, ``hf:NAME`` or ``paper:NAME``.
        data: ``$FEDCACHE_HOME/data``.
        roots: ``--data NAME=PATH``.
        say: receives the size and source of each file; not called for ``torchvision:NAME``.
        mirror: another address below which files of the same names are; only for ``paper:NAME``.

    Raises UsageError for a spec that has no download, MachineError when it cannot be downloaded.
    """
    kind, _, name = spec.partition(":")
    context = _context(roots, data)
    root = context.root_of(kind, name) or data / name
    if kind == "paper":
        paper_entry = paper.read(name)
        if not paper_entry.pulls:
            raise MachineError(
                f"fedcache cannot download {paper_entry.title}, because it has no permanent address. Download it "
                "yourself.",
                "\n".join(papers.steps(paper_entry)),
            )
        download.pull(paper_entry, root, say=say, mirror=mirror)
    elif kind == "hf" and not mirror:
        hf.pull(name, root, say)
    elif kind == "torchvision" and not mirror:
        torchvision.pull(name, root)
    else:
        problem = "cannot be downloaded"
        expected = "torchvision:NAME, hf:NAME or paper:NAME"
        if mirror:
            problem = "cannot be downloaded from another address"
            expected = "paper:NAME"
        raise UsageError(
            f"{spec!r} {problem}; expected {expected}.",
            "fedcache datasets list   lists what each dataset needs",
        )
    return root


def _context(roots: Mapping[str, Path] | None, data: Path | None) -> Context:
    """The context for a search for datasets on the disk."""
    return Context(DigestMemory(data or Path()), roots or {}, data)


def known(
    *, roots: Mapping[str, Path] | None = None, data: Path | None = None
) -> list[dict[str, Any]]:
    """The datasets that can be named, as ``{"name", "about", "needs", "ready"}``; a ready one can be opened now."""
    context = _context(roots, data)
    rows = []

    def add(name: str, about: str, needs: str, ready: bool) -> None:
        rows.append({"name": name, "about": about, "needs": needs, "ready": ready})

    offline = "four domains of ten digits, made offline from installed packages"
    add("digits", offline, 'pip install "fedcache[demo]"', digits.ready())
    for spec, files in FILES.items():
        add(spec, files.about, "your files", True)
    for plugin in plugins("datasets").values():
        add(f"{plugin.name}:REST", f"a reader of {plugin.origin}", "its files", True)
    # For a dataset of the papers: the command that downloads it, or the command that says how to get it.
    for name in paper.NAMES:
        paper_entry = paper.read(name)
        command = "info"
        if paper_entry.pulls:
            command = "pull"
        get = f"fedcache datasets {command} {shell_word(name)}"
        add(f"paper:{name}", paper_entry.about, get, papers.ready(name, context))
    for name, entry in torchvision.TABLE.items():
        if entry.pulls:
            get = f"fedcache datasets pull torchvision:{shell_word(name)}"
        else:
            get = f"--data {shell_word(name)}=DIR"
        add(f"torchvision:{name}", entry.about, get, torchvision.ready(name, context))
    return rows


def info(
    name: str, *, roots: Mapping[str, Path] | None = None, data: Path | None = None
) -> dict[str, Any]:
    """The entry of ``known`` for one dataset, with details: classes, splits, and versions or the folder to look in."""
    kind, rest = kind_of(name)
    entries = {row["name"]: row for row in known(roots=roots, data=data)}
    context = _context(roots, data)
    if kind == "digits":
        _, _, versions, _ = digits.key(rest, context)
        return {
            **entries["digits"],
            "classes": list(digits.CLASSES),
            "domains": list(digits.DOMAINS),
            "splits": ["train", "test"],
            "made_from": versions,
            "note": "with other versions of these packages the pixels, and therefore the dataset, may differ",
        }
    files = None
    if kind in KINDS:
        files = KINDS[kind].files
    if files is not None:
        return {**entries[files.spec], "note": files.note}
    plugin_entry = entries.get(f"{kind}:REST")
    if plugin_entry is not None:
        return {**plugin_entry, "note": "the reader defines REST"}
    if kind == "paper":
        details = papers.info(rest, context)  # refuses an unknown name
        return {**entries[name], **details}
    entry = torchvision.entry_of(rest)
    looked_in = ""
    root = context.root_of("torchvision", rest)
    if root is not None:
        looked_in = str(root / entry.files)
    codes = {code for _, code in entry.splits}
    codes.add(TEST)  # a dataset without a test set gets one
    return {
        **entries[name],
        "classes": list(entry.classes) or "splits of torchvision",
        "domains": ["all"],
        "splits": [word for code, word in enumerate(SPLIT_NAMES) if code in codes],
        "looked_in": looked_in,
    }
