"""Participating sites: their descriptions, whether they fit together, and late arrivals.

Features of different recipes must never be averaged, so sites that differ from more than half of them are refused by
digest, with what differs in words; where no such half is, the server must be told which site is right. What a site says
wrongly of itself, or does not say, costs it its place, and nobody else theirs: facts that cannot be, more rows than are
believed, the name of another site. A name is that of the first node that took it, and where sites have keys, that of
the same key in all later runs of the server (``site_names``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedcache.errors import (
    FedcacheError,
    FederatedRunError,
    StoreError,
    shell_word,
)
from fedcache.federate.engine.client_data import Data, longest_row
from fedcache.federate.engine.evaluate import (
    PersonalModels,
    Scores,
    evaluate_global,
    evaluate_personal,
)
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import ClientOverrides, Method
from fedcache.federate.engine.outcome import Evaluation
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.flower.messages import SiteMessage, refusal_of
from fedcache.federate.engines.flower.site_names import SiteNames
from fedcache.federate.partition.partition import Client, Partition
from fedcache.federate.trust.pipeline import FAR_OUT, far_out_limit
from fedcache.parsing import parse_json
from fedcache.runs.features import RunFeatures
from fedcache.store.files import digest_of, sha256_hex

# What a site says of itself: names, counts and digests, each a claim that is checked before
# anything is made of it.
#
# A site says no feature, no label and no row. What it says must fit the table of limits below and
# itself (no more rows than its store has); whether a number of rows can be believed beside those
# of other sites is asked in ``sites``.


COUNTS = {
    "train": (0, 2**53),
    "test": (0, 2**53),
    "owned": (0, 100_000),
    "views": (1, 10_000),
    "rows": (0, 2**53),
    "ok": (0, 2**53),
}
"""Fact -> the smallest and the largest number that it may be; float64 holds every whole number up to 2^53."""

TEXTS = {
    "name": 200,
    "tests": 200,
    "text": 200,
    "feat_post": 40,
    "dataset": 200,
    "parent": 200,
    "slug": 200,
    "code": 200,
    "version": 100,
}
"""Fact -> the most characters that it may have."""

LISTS = {
    "classes": (100_000, 1000),
    "domains": (10_000, 1000),
    "keys": (100, 1000),
    "backbones": (100, 1000),
    "recipes": (100, 200),
    "made_from": (100, 20_000),
    "templates": (1000, 10_000),
}
"""Fact -> the most texts that it may hold, and the most characters of each."""

WIDTHS = 100
WIDEST = 1_000_000
"""The most arrays of a site, and the most features of one."""


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
    made_from: tuple[str, ...]  # these recipes, as canonical JSON
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
    def from_words(cls, words: object) -> SiteFacts:
        """Facts as a message tells them. Raises ValueError, naming the fact, for what cannot be."""
        if not isinstance(words, Mapping):
            raise ValueError("they are no table")
        values = {f.name: _fact(f.name, words.get(f.name)) for f in fields(cls)}
        made = cls(**values)
        if not made.name or "/" in made.name or not made.name.isprintable():
            raise ValueError(
                f"name is {made.name!r:.60}, expected printable characters without '/'"
            )
        if (
            not made.keys
            or len({len(made.keys), len(made.backbones), len(made.recipes), len(made.widths)}) > 1
        ):
            raise ValueError("it does not have one backbone, recipe and width for each array")
        if made.recipes != tuple(sha256_hex(text.encode()) for text in made.made_from):
            raise ValueError("its recipes do not have the digests that it says")
        if made.train + made.test > made.ok or made.ok > made.rows:
            raise ValueError(
                f"it trains on {made.train:,} rows and is scored on {made.test:,}, of a store of {made.rows:,}, "
                f"{made.ok:,} of them sound"
            )
        if made.owned > min(made.train, len(made.classes)):
            raise ValueError(
                f"it owns {made.owned} classes of {len(made.classes)} with {made.train} rows"
            )
        return made

    def to_words(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def _fact(name: str, value: Any) -> Any:
    """One fact as its type. Raises ValueError for one outside its limits."""
    if name == "number":
        sound = value is None or _is_whole(value, 0, 2**53)
        expected = "a whole number or none"
    elif name in COUNTS:
        low, high = COUNTS[name]
        sound = _is_whole(value, low, high)
        expected = f"a whole number from {low} to {high:,}"
    elif name in TEXTS:
        sound = isinstance(value, str) and len(value) <= TEXTS[name]
        expected = f"a text of at most {TEXTS[name]} characters"
    elif name == "widths":
        sound = _is_list(value, WIDTHS) and all(_is_whole(n, 1, WIDEST) for n in value)
        expected = f"at most {WIDTHS} numbers from 1 to {WIDEST:,}"
    else:
        most, longest = LISTS[name]
        sound = _is_list(value, most) and all(
            isinstance(text, str) and len(text) <= longest for text in value
        )
        expected = f"at most {most:,} texts of {longest:,} characters"
    if not sound:
        raise ValueError(f"{name} is {value!r:.60}, expected {expected}")
    # JSON has lists only; facts are tuples, so that equal facts compare as equal.
    if isinstance(value, list):
        return tuple(value)
    return value


def _is_list(value: Any, most: int) -> bool:
    return isinstance(value, list | tuple) and len(value) <= most


def _is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # a bool is no number here


@dataclass(frozen=True, eq=False)
class RowCounts:
    """A client as the server knows it: its name, and how many rows it has. It has no row."""

    name: str
    train: np.ndarray
    test: np.ndarray


def rows_of(facts: SiteFacts) -> RowCounts:
    """The client of a site, for ``RunState``; its rows take no memory."""
    return RowCounts(
        facts.name, np.broadcast_to(np.int64(0), (facts.train,)), np.empty(0, np.int64)
    )


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


def _short(value: Any) -> str:
    """A value as a message shows it: digests by their first digits."""
    if isinstance(value, tuple):
        return " + ".join(_short(v) for v in value[:4]) + (" .." if len(value) > 4 else "")
    text = str(value) or "none"
    if len(text) > 40:
        return text[:12]
    return text


MOST_ROWS = 10_000_000
"""Rows that a site may say it has, for training and for scores each, where nothing else is said: what the server makes
of such a claim still fits into memory."""


@dataclass(frozen=True)
class Member:
    """A site that takes part, and the node it can be reached at."""

    node: int
    facts: SiteFacts
    key: str = ""  # fingerprint of the node's public key


def compatible_sites(
    members: Sequence[Member], like: str = ""
) -> tuple[list[Member], list[tuple[Member, str, str]]]:
    """The largest group of sites that can be taken together, in client order, and the others, each with why and a hint.

    Of equal groups the one with the first site is taken; with ``like`` the group of the site of that name, whatever its
    size, and nobody before that site is there.
    """
    ordered = in_client_order(members)
    kinds = [tuple(getattr(m.facts, what) for what in SAME) for m in ordered]
    named = [m for m in ordered if m.facts.name == like]
    if not kinds or (like and not named):
        return [], []
    # Counter keeps the order of first occurrence, so of equal groups the first is taken.
    usual = [*named, ordered[kinds.index(Counter(kinds).most_common(1)[0][0])]][0]
    fit = []
    refused = []
    for member in ordered:
        problem = difference(member.facts, usual.facts)
        if problem is None:
            fit.append(member)
        else:
            refused.append((member, *problem))
    return fit, refused


def _of_another_key(member: Member, owners: Mapping[str, str]) -> tuple[str, str] | None:
    """Why a site cannot have its name, in words, and a hint; None when no other key has it."""
    name = member.facts.name
    if owners.get(name, member.key) == member.key:
        return None
    return (NAME_BOUND, BOUND_HINT.format(shell_word(name)))


def in_client_order(members: Sequence[Member]) -> list[Member]:
    """Client order: the numbers of shards, then names."""
    return sorted(
        members, key=lambda m: (m.facts.number is None, m.facts.number or 0, m.facts.name)
    )


@dataclass(frozen=True)
class RowLimits:
    """The most rows that a site is believed to have."""

    train: int  # to train on
    test: int  # to be scored on
    why: str  # where the numbers come from, in words

    @classmethod
    def of(cls, members: Sequence[Member], most: int | None) -> RowLimits:
        """``most`` where it is given, else ``FAR_OUT`` times the median of what the sites say, and ``MOST_ROWS``."""
        if most is not None:
            return cls(most, most, "--max-rows-per-client")
        said = [m.facts.train for m in members], [m.facts.test for m in members]
        train, test = (min(MOST_ROWS, int(far_out_limit(rows) or MOST_ROWS)) for rows in said)
        return cls(
            train, test, f"{FAR_OUT} times the median of three sites or more, {MOST_ROWS:,} at most"
        )

    def problem(self, facts: SiteFacts) -> tuple[str, str] | None:
        """What is too much of a site's rows, in words, and a hint; None when they are believed."""
        for rows, most, what in (
            (facts.train, self.train, "train on"),
            (facts.test, self.test, "be scored on"),
        ):
            if rows > most:
                return (
                    f"it claims {rows:,} rows to {what}, and {most:,} are believed ({self.why})",
                    f"If it has them: --max-rows-per-client {rows}",
                )
        return None


NAME_TAKEN = "another node has that name, and keeps it"
NAME_HINT = (
    "Give it one that no other site has: fedcache flower site --shard PATH --superlink HOST:PORT --name NAME. A site "
    "that was restarted keeps its name by its key (--keys); without keys it is a new node, and takes part from the "
    "next run on."
)
NAME_BOUND = "its name belongs to another key, which took part under it before"
BOUND_HINT = (
    "If that site has a new key: fedcache flower names --forget {}. Else give this one a name of its own: "
    "fedcache flower site --shard PATH --superlink HOST:PORT --name NAME."
)

GONE = "its node went away"
"""Why a node does not answer that was ended while it was asked."""

ANSWER = 60.0
"""Seconds that a node is given to say what it has also where ``wait`` is over: its app must start first."""

ASKED = 3
"""How often a node is asked what it has before it counts as one that says nothing."""

SITE_THAT_IS_RIGHT = "Say which site the others must agree with: --like NAME"

START = "Start the sites: fedcache flower site --shard PATH --superlink HOST:PORT"


@dataclass(frozen=True)
class SecureSum:
    """What a server learns of a round of secure aggregation."""

    words: Mapping[
        int, Mapping[str, Any]
    ]  # node -> what it says beside its vector, for those that are in the sum
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

    def nodes(self) -> Mapping[int, str]:
        """Nodes that can be reached now, each with the fingerprint of its public key."""

    def ask(
        self, kind: str, messages: Mapping[int, SiteMessage], timeout: float
    ) -> dict[int, SiteMessage | str]:
        """Send one message to each node: what each answers, or why it does not, in words."""

    def ask_sum(
        self, messages: Mapping[int, SiteMessage], bound: float, number: int, timeout: float
    ) -> SecureSum:
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
    max_rows: int | None = (
        None  # the most rows that a site is believed to have; None for ``RowLimits``' own
    )
    like: str = (
        ""  # name of the site that the others must agree with; "" for more than half of them
    )


@dataclass
class MissedSite:
    """A site without which a round was made, and why."""

    round: int
    site: str
    why: str


class Sites:
    """Who takes part; ``say`` is told the story, a line at a time."""

    def __init__(
        self,
        transport: Transport,
        terms: Terms,
        say: Callable[[str], None],
        names: SiteNames | None = None,
    ) -> None:
        self.transport = transport
        self.terms = terms
        self.say = say
        self.names = names or SiteNames()
        self.members: list[Member] = []  # in client order
        self.missed: list[MissedSite] = []  # sites without which something was done
        self.joined: list[MissedSite] = []  # sites that came after the beginning
        self._question: dict[str, Any] = {}
        self._met: set[int] = set()  # nodes that have said what they have, or are asked no more
        # node -> how often it was asked what it has, and said nothing
        self._silent: Counter[int] = Counter()

    def gather(self, question: Mapping[str, Any]) -> list[Member]:
        """Wait for the sites, ask them ``question``, and take those that fit together, in client order.

        Raises StoreError when sites lack what was asked for or differ; FederatedRunError when too few come.
        """
        self._question = dict(question)
        came: list[Member] = []
        lacking: list[FedcacheError | str] = []
        last = time.monotonic() + self.terms.wait
        self.say(f"Waiting for {self.terms.sites} sites.")
        if self.names.path is None:
            self.say(
                "A name is that of the first node that takes it, in this run alone: sites have no keys here."
            )
        else:
            owned = len(self.names.known())
            self.say(f"A name belongs to the first key that takes part under it: {owned} have one.")
        while True:
            came += self._ask_facts(lacking, max(last - time.monotonic(), ANSWER))
            kept, refused, disbelieved = self._judged(came)
            decided = bool(self.terms.like) or len(came) > 2 * len(refused)
            if (decided and len(kept) >= self.terms.sites) or time.monotonic() >= last:
                break
            time.sleep(self.terms.poll)
        for member, why, hint in (*refused, *disbelieved):
            self._refuse(0, member.facts.name, why, hint)
        if not decided and refused:
            raise self._undecided(came, refused)
        # Who is there and cannot take part is not waited for: else one site could keep all others from beginning.
        here = self._met | set(self._silent)
        enough = self.terms.start_with - (len(here) - len(kept))
        if len(kept) < (max(1, enough) if time.monotonic() >= last else self.terms.sites):
            lacking += [
                FederatedRunError(f"Site {m.facts.name!r}: {why}.", hint)
                for m, why, hint in disbelieved
            ]
            raise self._too_few(kept, refused, lacking)
        if len(kept) < self.terms.sites:
            self.say(
                f"warning: {len(kept)} of {self.terms.sites} sites came; those that come later join then."
            )
        self.members = kept
        self._bind(kept)
        limits = RowLimits.of(kept, self.terms.max_rows)
        most = f"{limits.train:,} rows to train on and {limits.test:,} to be scored on"
        self.say(f"A site is believed to have at most {most}: {limits.why}.")
        return kept

    def _judged(
        self, came: Sequence[Member]
    ) -> tuple[list[Member], list[tuple[Member, str, str]], list[tuple[Member, str, str]]]:
        """Of the nodes, in the order in which they came: who takes part, who differs, and who is not believed."""
        fit, refused = compatible_sites(came, self.terms.like)
        limits = RowLimits.of(fit, self.terms.max_rows)
        owners = self.names.known()
        believed = []
        disbelieved = []
        for member in fit:
            problem = limits.problem(member.facts) or _of_another_key(member, owners)
            if problem is None:
                believed.append(member)
            else:
                disbelieved.append((member, *problem))
        # A name belongs to the first node that came with it.
        nodes = {member.node for member in believed}
        first: dict[str, int] = {}
        for member in came:
            if member.node in nodes:
                first.setdefault(member.facts.name, member.node)
        kept = [m for m in believed if first[m.facts.name] == m.node]
        taken = [(m, NAME_TAKEN, NAME_HINT) for m in believed if first[m.facts.name] != m.node]
        return kept, refused, [*disbelieved, *taken]

    def _bind(self, members: Sequence[Member]) -> None:
        self.names.bind({m.facts.name: m.key for m in members})

    def _refuse(self, round_: int, name: str, why: str, hint: str) -> None:
        self.say(f"warning: site {name!r} is refused: {why}. {hint}")
        self.missed.append(MissedSite(round_, name, f"refused: {why}"))

    def miss(self, round_: int, name: str, why: str, warning: str) -> None:
        """Note that a site is missing in a round, with a warning in the log; the same entry is noted once."""
        entry = MissedSite(round_, name, why)
        if entry not in self.missed:
            self.missed.append(entry)
            self.say(f"warning: {warning}")

    def _ask_facts(self, lacking: list[FedcacheError | str], wait: float) -> list[Member]:
        """Those of the nodes that have come since that say what they have; why others do not goes to ``lacking``.

        Nodes are given ``wait`` seconds, or the terms' timeout where that is less.
        """
        came = []
        here = self.transport.nodes()
        new = sorted(set(here) - self._met)
        questions = {n: SiteMessage(self._question) for n in new}
        timeout = min(wait, self.terms.timeout)
        for node, answer in (
            self.transport.ask("facts", questions, timeout) if new else {}
        ).items():
            # A site that was ended meanwhile is asked again when it is back: its key makes it the same node. One that
            # is slow, or lost one answer, is asked again a few times.
            if isinstance(answer, str) and answer != GONE:
                self._silent[node] += 1
            if not isinstance(answer, str) or self._silent[node] >= ASKED:
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
                facts = SiteFacts.from_words(answer.words.get("facts"))
            except ValueError as error:
                why = f"its facts are malformed: {error}"
                lacking.append(why)
                self.missed.append(MissedSite(0, f"node {node}", f"refused: {why}"))
                self.say(
                    f"warning: node {node} takes no part: what it says of itself cannot be: {error}."
                )
                continue
            came.append(Member(node, facts, here[node]))
            self.say(
                f"Site {facts.name!r}: {facts.train:,} rows to train on, {facts.test:,} to be scored on."
            )
        return came

    def _undecided(
        self, came: Sequence[Member], refused: Sequence[tuple[Member, str, str]]
    ) -> FedcacheError:
        """Why nobody knows which sites are right."""
        others = {member.node for member, *_ in refused}
        first = next(m for m in in_client_order(came) if m.node not in others).facts.name
        member, why, hint = refused[0]
        other = member.facts.name
        return StoreError(
            f"{len(came)} sites came, and no more than half of them can be taken together: beside {first!r}, site "
            f"{other!r} differs: {why}.",
            f"{hint} {SITE_THAT_IS_RIGHT}.",
        )

    def _too_few(
        self,
        kept: Sequence[Member],
        refused: Sequence[tuple[Member, str, str]],
        lacking: Sequence[FedcacheError | str],
    ) -> FedcacheError:
        names = ", ".join(m.facts.name for m in kept) or "none"
        terms = self.terms
        state = f"{len(kept)} of {terms.sites} sites take part after {terms.wait:g} s: {names}."
        # The first reason is the one that is shown; the log has all of them.
        if refused:
            member, why, hint = refused[0]
            return StoreError(f"{state} Site {member.facts.name!r} is refused: {why}.", hint)
        if lacking:
            problem = lacking[0]
            if isinstance(problem, FedcacheError):
                return FedcacheError(problem.code, f"{state} {problem.message}", problem.hint)
            return FederatedRunError(f"{state} A node says nothing of itself: {problem}.", START)
        if not kept and terms.like:
            state += (
                f" None that came is {terms.like!r}, with which the others must agree (--like)."
            )
        return FederatedRunError(state, START)

    def text(self, digest: str, classes: int) -> Tensor:
        """The class text features [C, D] of that digest, which all sites have, from the first that sends them.

        Raises FederatedRunError, when none does.
        """
        why = ""
        for member in self.members:
            answer = self.ask("text", {member.node: SiteMessage(self._question)})[member.node]
            if isinstance(answer, str):
                why = answer
            else:
                sent = None
                if answer.trees:
                    sent = answer.trees[0].get("text")
                if sent is None or sent.dtype != torch.float32 or sent.shape[:-1] != (classes,):
                    why = "it sent none"
                elif sha256_hex(sent.numpy().tobytes()) == digest:
                    return sent
                else:
                    why = "it sent others than it said"
            self.say(
                f"warning: site {member.facts.name!r} was asked for the class text features: {why}."
            )
        raise FederatedRunError(
            f"No site of {len(self.members)} sent the class text features; the last because {why}.",
            "Run again; what was computed is kept.",
        )

    def newcomers(self, round_: int) -> list[Member]:
        """Sites that have come since, fit to the members, are believed, and have a name of their own."""
        fresh: list[Member] = []
        came = in_client_order(self._ask_facts([], self.terms.wait))
        if came:
            owners = self.names.known()
        else:
            owners = {}
        for member in came:
            everybody = [*self.members, *fresh]
            found = difference(member.facts, self.members[0].facts)
            found = found or RowLimits.of([*everybody, member], self.terms.max_rows).problem(
                member.facts
            )
            found = found or _of_another_key(member, owners)
            if found is None and member.facts.name in (m.facts.name for m in everybody):
                found = NAME_TAKEN, NAME_HINT
            if found is not None:
                self._refuse(round_, member.facts.name, *found)
            else:
                fresh.append(member)
        if fresh:
            self._bind(fresh)
        return fresh

    def ask(self, kind: str, messages: Mapping[int, SiteMessage]) -> dict[int, SiteMessage | str]:
        """See ``Transport.ask``, with the terms' timeout."""
        if messages:
            return self.transport.ask(kind, messages, self.terms.timeout)
        return {}


# The rows of sites as the server knows them: their numbers, widths, digests and counts, and no
# row.
#
# For scores, sites send how many rows of each label they took for each class. The counts are dealt
# out again as rows, one for each, and scored by the evaluation of the in-process engine, so every
# figure is the same number. Sites with one test set (a global one that each has a copy of) are
# counted once for a global model; test sets that overlap otherwise are counted as often as they
# are held.


class SiteRows:
    """A ``RowSource``: what sites say of themselves, in client order, and the class text features [C, D], if any."""

    def __init__(self, facts: Sequence[SiteFacts], text: torch.Tensor | None) -> None:
        self.facts = list(facts)
        self.text = text
        self._stores = digest_of([[f.name, f.dataset] for f in facts])

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Nothing is extracted for sites here."""
        return 0.0

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """Those of the first site; all have them by the same recipes."""
        return list(self.facts[0].keys)

    def partitions(
        self, method: Method, seeds: Sequence[int]
    ) -> tuple[dict[int, Partition], str | None]:
        """Every site is a client. One row stands for all of its own; the digest of the stores says which they are."""
        one = np.zeros(1, np.int64)
        none = np.ones(1, np.int64)
        partition = Partition(
            scheme="sites",
            args={"stores": self._stores},
            seed=0,
            clients=tuple(Client(f.name, one, none) for f in self.facts),
            test=none,
            dataset=str(self.dataset()["digest"]),
            pool=sum(f.train for f in self.facts),
            dropped=0,
        )
        return dict.fromkeys(seeds, partition), None

    def feat_post(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]
    ) -> str:
        """What every site does to its features."""
        return self.facts[0].feat_post

    def read(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """Widths, views and classes of features that have no row."""
        first = self.facts[0]
        data = Data(
            x=torch.empty(0, first.views, sum(first.widths)),
            y=torch.empty(0, dtype=torch.int64),
            classes=len(first.classes),
            text=self.text,
            widths=first.widths,
            domain=torch.empty(0, dtype=torch.int64),
            backbones=first.backbones,
            longest_row=longest_row(first.feat_post, first.widths),
        )
        digests = (*first.recipes, *((first.text,) if first.text else ()))
        recipes = tuple(parse_json(text.encode()) for text in first.made_from)
        return RunFeatures(tuple(arrays), data, digests, first.templates, recipes, first.feat_post)

    def overrides(
        self, method: Method, features: RunFeatures, clients: int
    ) -> dict[int, ClientOverrides]:
        """None: they were refused."""
        return {}

    def dataset(self) -> dict[str, Any]:
        """The store that all shards were cut from, or all stores together."""
        first = self.facts[0]
        parents = {f.parent for f in self.facts}
        return {
            "slug": first.slug,
            "digest": first.parent if parents == {first.parent} and first.parent else self._stores,
            "rows": sum(f.rows for f in self.facts),
            "ok": sum(f.ok for f in self.facts),
        }

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Domains of all sites, and the classes that they have in common."""
        return tuple(domain_names(self.facts)), self.facts[0].classes

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        return self.facts[0].backbones

    def choices(self, arrays: Sequence[str]) -> dict[str, Any]:
        """None: a federation is run again by its app."""
        return {}


def score_counts(
    run: RunState, facts: Sequence[SiteFacts], counts: Mapping[int, Tensor]
) -> tuple[Evaluation, Data]:
    """The evaluation of a run, and the labels that its rows are numbers of.

    ``counts`` are int64 [domains, C, C + 1] of every client that answered; the last class is no prediction.
    """
    C = run.env.classes
    own = run.method.protocol(run.hp) != "global"
    names = domain_names(facts)
    label = []
    domain = []
    guess = []
    clients = []
    first: dict[str, np.ndarray] = {}
    start = 0
    for i, known in enumerate(facts):
        if i not in counts:
            clients.append(RowCounts(known.name, np.empty(0, np.int64), np.empty(0, np.int64)))
            continue
        if own:
            key = str(i)
        else:
            key = known.tests
        if key not in first:
            flat = counts[i].numpy().reshape(-1)
            cell = np.repeat(np.arange(len(flat)), flat)
            place = cell // (C + 1)
            taken = cell % (C + 1)
            label.append(place % C)
            domain.append(np.array([names.index(d) for d in known.domains], np.int64)[place // C])
            guess.append(np.where(taken == C, -1, taken))
            first[key] = np.arange(start, start + len(cell))
            start += len(cell)
        clients.append(RowCounts(known.name, first[key], first[key]))
    y, of, predicted = (
        np.concatenate([np.empty(0, np.int64), *parts]) for parts in (label, domain, guess)
    )
    data = Data(torch.empty(len(y), 1, 0), torch.from_numpy(y), C, domain=torch.from_numpy(of))

    def scores(rows: Tensor) -> Tensor:
        answer = torch.from_numpy(predicted)[rows]
        hot = one_hot(answer.clamp(min=0), C).double()
        hot[answer < 0] = torch.nan
        return hot

    if not own:
        return evaluate_global(scores, data, clients), data

    def model(_client: int) -> Scores:
        return scores

    return evaluate_personal(
        PersonalModels(model), data, clients, headline=run.method.headline
    ), data


def domain_names(facts: Sequence[SiteFacts]) -> list[str]:
    """Names of the domains of all sites, in the order in which they are first told."""
    return list(dict.fromkeys(name for known in facts for name in known.domains))
