"""Sites in this process behind a transport that packs and unpacks every message, and can fail as a network does."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

from fedcache.config import Home, TrainConfig
from fedcache.federate.engines.flower.masking import levels_for
from fedcache.federate.engines.flower.messages import (
    MalformedError,
    PackedMessage,
    pack,
    refusal_of,
    unpack,
)
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.server import federate
from fedcache.federate.engines.flower.site import ShardSite
from fedcache.federate.engines.flower.sites import SecureSum
from fedcache.progress import Silent

Meddle = Callable[[str, int, PackedMessage], "PackedMessage | str"]
"""(kind, number of the question, answer) -> another answer, or why there is none."""


def as_is(_kind, _number, packed):
    return packed


def to_every(kind, instead, first=1, last=math.inf):
    """Sends ``instead(answer)`` in the place of each answer of a kind, from the first to the last."""

    def meddle(asked, number, packed):
        return instead(packed) if asked == kind and first <= number <= last else packed

    return meddle


def in_round(number, instead):
    """Sends ``instead(answer)`` in the place of the answer to this fit."""
    return to_every("fit", instead, number, number)


def killed(_answer):
    return "it was killed"


def silent(_answer):
    return "it did not answer within 1 s"


@dataclass
class FakeGrid:
    """A transport over sites that are here.

    Attributes:
        sites: node -> site.
        hidden: node -> how many looks for nodes it stays away for.
        meddle: node -> what is done to its answers.
        log: (kind, nodes) of every question.
        keys: node -> fingerprint of its key, where it is not that of its number.
    """

    sites: dict[int, ShardSite]
    hidden: dict[int, int] = field(default_factory=dict)
    meddle: dict[int, Meddle] = field(default_factory=dict)
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    keys: dict[int, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0

    def nodes(self):
        self.hidden = {node: left - 1 for node, left in self.hidden.items() if left > 0}
        return {
            node: self.keys.get(node, f"key of {node}")
            for node in self.sites
            if node not in self.hidden
        }

    def ask(self, kind, messages, timeout):
        self.log.append((kind, tuple(messages)))
        number = sum(k == kind for k, _ in self.log)
        found = {}
        for node, message in messages.items():
            packed = pack(message)
            self.bytes_down += packed.bytes
            answer = pack(self.sites[node].answer(kind, unpack(packed)))
            back = self.meddle.get(node, as_is)(kind, number, answer)
            if isinstance(back, str):
                found[node] = back
                continue
            self.bytes_up += back.bytes
            try:
                found[node] = unpack(back)
            except MalformedError as error:
                found[node] = f"its answer is malformed: {error}"
        return found

    def ask_sum(self, messages, bound, number, timeout):
        """The sum of vectors that were rounded as SecAgg+ rounds them; nothing is masked here."""
        found = self.ask("fit", messages, timeout)
        sound = {n: a for n, a in found.items() if not isinstance(a, str) and refusal_of(a) is None}
        step = 2 * bound / levels_for(len(messages))
        total = torch.zeros(0, dtype=torch.float64)
        for answer in sound.values():
            vector = torch.cat([tree["vector"] for tree in answer.trees])
            total = (vector / step).round() * step + (total if len(total) else 0.0)
        missing = {
            n: a if isinstance(a, str) else str(refusal_of(a))
            for n, a in found.items()
            if n not in sound
        }
        failed = (
            ""
            if 3 * len(sound) >= 2 * len(messages)
            else "too few sites were left in the masked uploads"
        )
        return SecureSum({n: a.words for n, a in sound.items()}, total, missing, failed)


def grid_of(folder, state):
    """One node for each store of a directory, numbered from 100 in another order than the clients'."""
    stores = sorted(folder.glob("*.zarr"), reverse=True)
    return FakeGrid({100 + i: ShardSite(path, state / path.stem) for i, path in enumerate(stores)})


def planned(method, **words):
    """Two rounds of a method over three sites; each word belongs to the plan or to its training."""
    own = {f.name for f in fields(Plan)}
    train = {"rounds": 2, "execution": "sequential"}
    train |= {k: v for k, v in words.items() if k not in own}
    rest = {"sites": 3, "wait": 0.01, **{k: v for k, v in words.items() if k in own}}
    return Plan(TrainConfig(method=method, **train), **rest).checked()


def together(asked, grid, place, heard=None, names=None):
    """The runs of a plan, below a place."""
    asked = replace(asked, runs=f"{place}/runs")
    return federate(asked, grid, Home(place), heard or Silent(), names)
