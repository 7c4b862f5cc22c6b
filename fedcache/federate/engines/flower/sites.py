"""Who takes part: what sites say of themselves, whether they can be taken together, and those that come late.

A site says names, counts and digests, never a feature, a label or a row. Features of different recipes must never be
averaged, so sites that differ from the most of them are refused by digest, with what differs in words.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedcache.errors import FedcacheError, FederatedRunError, StoreError
from fedcache.federate.engines.flower.messages import SiteMessage, refusal_of

MOST_NAME = 200
"""Characters of a site's name."""


@dataclass(frozen=True)
class SiteFacts:
    """What a site says of itself."""

    name: str  # of its client; keys its random streams
    number: int | None  # its place among the shards of one store; None for a store of its own
    train: int  # rows it trains on
    test: int  # rows it is scored on
    owned: int  # classes among its training rows
    tests: str  # digest of which rows those of ``test`` are; sites with the same have the same test set
    classes: tuple[str, ...]  # names, in order
    domains: tuple[str, ...]  # names, in the order in which it counts
    keys: tuple[str, ...]  # arrays it would train on
    backbones: tuple[str, ...]  # their names
    recipes: tuple[str, ...]  # their recipes' digests, in that order
    widths: tuple[int, ...]  # features of each
    views: int  # stored views per row
    text: str  # digest of the class text features, "" for none
    templates: tuple[str, ...]  # what they were made from
    feat_post: str  # what is done to features
    dataset: str  # digest of its own content
    parent: str  # digest of the store it was cut from; "" for a store of its own
    slug: str  # name of the dataset
    rows: int  # of its store
    ok: int  # rows without a defect
    code: str  # digest of the code its uploads depend on
    version: str  # of fedcache

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> SiteFacts:
        """Facts as a message tells them; ValueError for what cannot be."""
        values = {f.name: words[f.name] for f in fields(cls)}
        for f in fields(cls):
            if str(f.type).startswith("tuple"):
                values[f.name] = tuple(values[f.name])
        made = cls(**values)
        numbers = (made.train, made.test, made.owned, made.views, made.rows, made.ok, *made.widths)
        if not all(type(n) is int and n >= 0 for n in numbers) or not (made.number is None or type(made.number) is int):
            raise ValueError("its counts are no numbers")
        if not isinstance(made.name, str) or not made.name or len(made.name) > MOST_NAME or "/" in made.name:
            raise ValueError("it has no name")
        return made

    def to_words(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Member:
    """A site that takes part, and the node it can be reached at."""

    node: int
    facts: SiteFacts


@dataclass(frozen=True, eq=False)
class RowCounts:
    """A client as the server knows it: its name, and how many rows it has. It has no row."""

    name: str
    train: np.ndarray
    test: np.ndarray


def rows_of(facts: SiteFacts) -> RowCounts:
    """The client of a site, for ``RunState``; its rows take no memory."""
    return RowCounts(facts.name, np.broadcast_to(np.int64(0), (facts.train,)), np.empty(0, np.int64))


SAME = {
    "classes": "its classes are {}, and the others' {}",
    "recipes": "its features come from recipe {}, and the others' from {}",
    "widths": "its features are {} wide, and the others' {}",
    "views": "it stores {} views of an image, and the others {}",
    "text": "its class text features have digest {}, and the others' {}",
    "feat_post": "it would do {} to its features, and the others {}",
    "code": "its fedcache computes this method with code {}, and the others' with {}",
}
"""What all sites must have in common, in the order in which differences are told."""

MEND = {
    "classes": "Cut all shards from one store, or extract with the same class names.",
    "recipes": "Extract there with the same backbone and recipe: fedcache extract --help, fedcache inspect.",
    "widths": "Extract there with the same backbone and recipe: fedcache extract --help, fedcache inspect.",
    "views": "Extract there with the same --views.",
    "text": "Extract there with the same --text templates.",
    "feat_post": "Say which: fedcache flower app --set feat_post=none",
    "code": "Install the same fedcache on all machines: pip install fedcache==VERSION",
}


def difference(mine: SiteFacts, theirs: SiteFacts) -> tuple[str, str] | None:
    """The first thing in which a site differs from one it would be taken together with, in words, and a hint."""
    for what, words in SAME.items():
        values = getattr(mine, what), getattr(theirs, what)
        if values[0] != values[1]:
            return words.format(*map(_short, values)), MEND[what]
    return None


def compatible_sites(members: Sequence[Member]) -> tuple[list[Member], list[tuple[Member, str, str]]]:
    """The largest group of sites that can be taken together, in client order, and the others, each with why and a hint.

    Of equal groups the one with the first site is taken.
    """
    ordered = in_client_order(members)
    kinds = [tuple(getattr(m.facts, what) for what in SAME) for m in ordered]
    if not kinds:
        return [], []
    usual = ordered[kinds.index(Counter(kinds).most_common(1)[0][0])]
    found = [(member, difference(member.facts, usual.facts)) for member in ordered]
    return [m for m, why in found if why is None], [(m, *why) for m, why in found if why is not None]


def in_client_order(members: Sequence[Member]) -> list[Member]:
    """Client order: the numbers of shards, then names."""
    return sorted(members, key=lambda m: (m.facts.number is None, m.facts.number or 0, m.facts.name))


def duplicate_name_error(members: Sequence[Member]) -> FedcacheError | None:
    """Two sites of one name: an error that names them."""
    for name, count in Counter(m.facts.name for m in members).items():
        if count > 1:
            return FederatedRunError(
                f"{count} sites say that they are {name!r}: names key the random draws and must differ.",
                "Stop all but one of them, or give each a name: fedcache flower site --name NAME",
            )
    return None


def _short(value: Any) -> str:
    """A value as a message shows it: digests by their first digits."""
    if isinstance(value, tuple):
        return " + ".join(_short(v) for v in value[:4]) + (" .." if len(value) > 4 else "")
    text = str(value) or "none"
    return text[:12] if len(text) > 40 else text


START = "Start the sites: fedcache flower site --shard PATH --superlink HOST:PORT"


@dataclass(frozen=True)
class SecureSum:
    """What a server learns of a round of secure aggregation."""

    words: Mapping[int, Mapping[str, Any]]  # node -> what it says beside its vector, for those that are in the sum
    total: Tensor  # [d] float64, the sum of their vectors
    missing: Mapping[int, str]  # node -> why it is not in the sum
    failed: str  # why there is no sum at all; "" when there is one


class Transport(Protocol):
    """What brings messages to nodes and back; ``transport.FlowerTransport`` is Flower's.

    Attributes:
        bytes_down: sent so far, without what the transport adds.
        bytes_up: received so far.
    """

    bytes_down: int
    bytes_up: int

    def nodes(self) -> list[int]:
        """Nodes that can be reached now."""

    def ask(self, kind: str, messages: Mapping[int, SiteMessage], timeout: float) -> dict[int, SiteMessage | str]:
        """Send one message to each node: what each answers, or why it does not, in words."""

    def ask_sum(self, messages: Mapping[int, SiteMessage], bound: float, number: int, timeout: float) -> SecureSum:
        """As ``ask("fit", ..)``, of which only the sum of the answers' vectors is learnt.

        ``bound`` is that of every number, ``number`` that of the round, ``timeout`` that of each exchange in seconds.
        """


@dataclass(frozen=True)
class Terms:
    """How a federation waits."""

    sites: int  # how many it is of
    start_with: int  # how many are enough to begin when ``wait`` is over
    quorum: int = 1  # sites without whose sound uploads a round does not count
    wait: float = 120.0  # seconds for the sites to come
    timeout: float = 600.0  # seconds for an answer
    poll: float = 1.0  # seconds between looks for new nodes


@dataclass
class MissedSite:
    """A site without which a round was made, and why."""

    round: int
    site: str
    why: str


class Sites:
    """Who takes part; ``say`` is told the story, a line at a time."""

    def __init__(self, transport: Transport, terms: Terms, say: Callable[[str], None]) -> None:
        self.transport, self.terms, self.say = transport, terms, say
        self.members: list[Member] = []  # in client order
        self.missed: list[MissedSite] = []  # sites without which something was done
        self.joined: list[MissedSite] = []  # sites that came after the beginning
        self._question: dict[str, Any] = {}
        self._met: set[int] = set()

    def gather(self, question: Mapping[str, Any]) -> list[Member]:
        """Wait for the sites, ask them ``question``, and take those that fit together, in client order.

        Raises StoreError when sites lack what was asked for or differ; FederatedRunError when too few come.
        """
        self._question = dict(question)
        came: list[Member] = []
        lacking: list[FedcacheError | str] = []
        last = time.monotonic() + self.terms.wait
        self.say(f"Waiting for {self.terms.sites} sites.")
        while True:
            came += self._ask_facts(lacking)
            kept, refused = compatible_sites(came)
            if len(kept) >= self.terms.sites or time.monotonic() >= last:
                break
            time.sleep(self.terms.poll)
        if twice := duplicate_name_error(kept):
            raise twice
        for member, why, hint in refused:
            self._refuse(0, member.facts.name, why, hint)
        enough = self.terms.sites if time.monotonic() < last else self.terms.start_with
        if len(kept) < enough:
            raise self._too_few(kept, refused, lacking)
        if len(kept) < self.terms.sites:
            self.say(f"warning: {len(kept)} of {self.terms.sites} sites came; those that come later join then.")
        self.members = kept
        return kept

    def _refuse(self, round_: int, name: str, why: str, hint: str) -> None:
        self.say(f"warning: site {name!r} is refused: {why}. {hint}")
        self.missed.append(MissedSite(round_, name, f"refused: {why}"))

    def _ask_facts(self, lacking: list[FedcacheError | str]) -> list[Member]:
        """Those of the nodes that have come since that say what they have; why others do not goes to ``lacking``."""
        came = []
        new = set(self.transport.nodes()) - self._met
        for node, answer in self.ask("facts", {n: SiteMessage(self._question) for n in new}).items():
            self._met.add(node)
            if isinstance(answer, str):
                lacking.append(answer)
                self.say(f"warning: a node says nothing of itself: {answer}.")
                continue
            if (refusal := refusal_of(answer)) is not None:
                lacking.append(refusal)
                self.say(f"warning: a site cannot take part: {refusal.message} {refusal.hint}")
                continue
            try:
                facts = SiteFacts.from_words(answer.words["facts"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                lacking.append(f"its facts are malformed: {error}")
                continue
            came.append(Member(node, facts))
            self.say(f"Site {facts.name!r}: {facts.train:,} rows to train on, {facts.test:,} to be scored on.")
        return came

    def _too_few(
        self, kept: Sequence[Member], refused: Sequence[tuple[Member, str, str]], lacking: Sequence[FedcacheError | str]
    ) -> FedcacheError:
        names = ", ".join(m.facts.name for m in kept) or "none"
        said = f"{len(kept)} of {self.terms.sites} sites take part after {self.terms.wait:g} s: {names}."
        for member, why, hint in refused:
            return StoreError(f"{said} Site {member.facts.name!r} is refused: {why}.", hint)
        for problem in lacking:
            if isinstance(problem, FedcacheError):
                return FedcacheError(problem.code, f"{said} {problem.message}", problem.hint)
            return FederatedRunError(f"{said} A node says nothing of itself: {problem}.", START)
        return FederatedRunError(said, START)

    def text(self) -> Tensor:
        """The class text features, from the first site; all have those of one digest. Raises FederatedRunError."""
        node = self.members[0].node
        answer = self.ask("text", {node: SiteMessage(self._question)})[node]
        if isinstance(answer, str) or not answer.trees or "text" not in answer.trees[0]:
            why = answer if isinstance(answer, str) else "it sent none"
            raise FederatedRunError(
                f"Site {self.members[0].facts.name!r} was asked for the class text features: {why}.",
                "Run again; what was computed is kept.",
            )
        return answer.trees[0]["text"]

    def newcomers(self, round_: int) -> list[Member]:
        """Sites that have come since and are not of the members yet; one that came back takes its place again."""
        fresh: list[Member] = []
        for member in in_client_order(self._ask_facts([])):
            name = member.facts.name
            place = next((i for i, m in enumerate(self.members) if m.facts.name == name), None)
            if (found := difference(member.facts, self.members[0].facts)) is not None:
                self._refuse(round_, name, *found)
            elif place is not None and self.members[place].facts == member.facts:
                self.members[place] = member
                self.say(f"Site {name!r} is back.")
            elif place is not None or name in (m.facts.name for m in fresh):
                self.say(f"warning: another node says that it is {name!r}; it is refused.")
            else:
                fresh.append(member)
        return fresh

    def ask(self, kind: str, messages: Mapping[int, SiteMessage]) -> dict[int, SiteMessage | str]:
        """See ``Transport.ask``, with the terms' timeout."""
        return self.transport.ask(kind, messages, self.terms.timeout) if messages else {}
