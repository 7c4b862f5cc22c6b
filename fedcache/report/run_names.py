"""What runs are called: their setting, what tells them apart, the shortest label of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fedcache.report.find_runs import AS_CLAIMED, USUAL, StoredRun, facts
from fedcache.report.select_runs import partition_words

_ALWAYS = ("method", "backbones")


def by_setting(entries: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Entries of one dataset and partition together, in the order they first appear."""
    groups: dict[tuple[str, str, bool], list[StoredRun]] = {}
    for entry in entries:
        groups.setdefault(entry.setting, []).append(entry)
    return list(groups.values())


def setting_name(entry: StoredRun) -> str:
    """Dataset and partition of an entry in words."""
    drawn = ""
    if len(set(entry.result["partition"]["digests"])) > 1:
        drawn = ", redrawn for every seed"
    name = partition_words(entry.result)
    return f"{entry.result['dataset']['slug']}, {name}{drawn}{AS_CLAIMED if entry.claimed else ''}"


def setting_names(groups: Sequence[Sequence[StoredRun]]) -> list[str]:
    """A name for each setting; equal words of different content are told apart by digests."""
    words = [setting_name(g[0]) for g in groups]
    twice = {w for w, count in Counter(words).items() if count > 1}
    return [
        f"{w} (dataset {g[0].setting[0][:8]}, partition {g[0].setting[1][:8]})" if w in twice else w
        for w, g in zip(words, groups, strict=True)
    ]


def differing(entries: Sequence[StoredRun]) -> list[str]:
    """Names of the facts that are not the same in all entries that have them, method and backbones first.

    Where a run says nothing of who takes part, that is as usual.
    """
    told = [facts(e) for e in entries]
    names = list(dict.fromkeys(name for f in told for name in f))
    varied = [n for n in names if len({f.get(n) for f in told if n in f or n in USUAL}) > 1]
    # A hyperparameter whose values differ only between methods says nothing that the method's name does not.
    free = [n for n in varied if n in _ALWAYS or n in USUAL or _varies_within(n, told)]
    return sorted(free, key=lambda n: (n not in _ALWAYS, n not in USUAL, names.index(n)))


def _varies_within(name: str, told: Sequence[Mapping[str, str]]) -> bool:
    seen: dict[str, set[str]] = {}
    for f in told:
        if name in f:
            seen.setdefault(f["method"], set()).add(f[name])
    return any(len(values) > 1 for values in seen.values())


def label_of(entry: StoredRun, names: Sequence[str]) -> str:
    """The method and the facts of these names, in words."""
    told = facts(entry)
    rest = [
        told[n] if n in _ALWAYS else f"{n.removeprefix('set.')}={told[n]}"
        for n in names
        if n in told
    ]
    return " ".join(rest if "method" in names else [told["method"], *rest])


def labels(entries: Sequence[StoredRun]) -> list[str]:
    """The shortest names that tell entries apart: the method, and what differs among runs of that method.

    Equal settings that were computed in different ways (alone and in a grid) get the digest too.
    """
    made = [""] * len(entries)
    for method in dict.fromkeys(e.method for e in entries):
        mine = [i for i, e in enumerate(entries) if e.method == method]
        for i, label in zip(mine, _within([entries[i] for i in mine]), strict=True):
            made[i] = label
    return made


def _within(entries: Sequence[StoredRun]) -> list[str]:
    used: list[str] = []
    made = [label_of(e, used) for e in entries]
    for name in differing(entries):
        tried = [label_of(e, [*used, name]) for e in entries]
        if len(set(tried)) > len(set(made)):
            used = [*used, name]
            made = tried
    counts = Counter(made)
    return [
        f"{m} ({e.digest[:8]})" if counts[m] > 1 else m for m, e in zip(made, entries, strict=True)
    ]
