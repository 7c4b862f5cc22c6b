"""Sites of a federation: the facts that they report, and the selection of the sites that take part.

Features of different recipes must never be averaged. So sites whose facts differ from those of more than half of the
sites are refused, with the difference in words. Without such a majority, ``--like`` must name the site that is right. A
site that reports impossible facts, more rows than ``RowLimits`` accept, or the name of another site is refused; the
other sites are not affected. A name belongs to the first node that took it, and with keys to the same key in all later
runs of the server (``site_names``).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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
from fedcache.parsing import Facts, Record, parse_json
from fedcache.progress import Observer
from fedcache.runs.features import RunFeatures
from fedcache.store.files import digest_of, sha256_hex
from fedcache.tables.words import some_names

# The facts that a site reports: names, counts and digests, never a feature or a label. Each fact is
# checked against the limits below and against the site's other facts; ``RowLimits`` compares the
# numbers of rows of all sites.


COUNTS = {
    "train": (0, 2**53),
    "test": (0, 2**53),
    "owned": (0, 100_000),
    "views": (1, 10_000),
    "rows": (0, 2**53),
    "ok": (0, 2**53),
}
"""Fact -> its minimum and maximum; float64 represents every whole number up to 2^53."""

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
"""Fact -> maximum number of characters."""

LISTS = {
    "classes": (100_000, 1000),
    "domains": (10_000, 1000),
    "keys": (100, 1000),
    "backbones": (100, 1000),
    "recipes": (100, 200),
    "made_from": (100, 20_000),
    "templates": (1000, 10_000),
}
"""Fact -> maximum number of texts, and maximum number of characters of each text."""

WIDTHS = 100
"""Maximum number of feature sets of a site."""
WIDEST = 1_000_000
"""Maximum number of features of a feature set."""


@dataclass(frozen=True)
class SiteFacts:
    """The facts that a site reports about itself."""

    name: str  # of its client; seeds its random streams
    number: int | None  # its place among the shards of one store; None for a store of its own
    train: int  # training rows
    test: int  # test rows
    owned: int  # classes among its training rows
    tests: str  # digest of its test rows; sites with one test set have the same digest
    classes: tuple[str, ...]  # names, in order
    domains: tuple[str, ...]  # names, in the order of its counts
    keys: tuple[str, ...]  # arrays it would train on
    backbones: tuple[str, ...]  # of each array
    recipes: tuple[str, ...]  # digest of the recipe of each array
    made_from: tuple[str, ...]  # the recipe of each array, as canonical JSON
    widths: tuple[int, ...]  # features of each array
    views: int  # stored views per row
    text: str  # digest of the class text features, "" for none
    templates: tuple[str, ...]  # prompt templates of the class text features
    feat_post: str  # transformation of its features
    dataset: str  # digest of its store
    parent: str  # digest of the store it was cut from; "" for a store of its own
    slug: str  # name of the dataset
    rows: int  # of its store
    ok: int  # rows without a defect
    code: str  # digest of the code that its uploads depend on
    version: str  # of fedcache

    @classmethod
    def from_words(cls, words: object) -> SiteFacts:
        """The facts in a message. Raises ValueError, naming the fact, for impossible ones."""
        if not isinstance(words, Mapping):
            raise ValueError("they are not a table")
        values = {f.name: _checked_fact(f.name, words.get(f.name)) for f in fields(cls)}
        made = cls(**values)
        is_plain = made.name.isprintable() and "/" not in made.name
        if not made.name or not is_plain:
            raise ValueError(
                f"name is {made.name!r:.60}, expected printable characters without '/'"
            )
        lengths = {len(made.keys), len(made.backbones), len(made.recipes), len(made.widths)}
        if not made.keys or len(lengths) > 1:
            raise ValueError("it does not have one backbone, recipe and width for each array")
        digests = tuple(sha256_hex(text.encode()) for text in made.made_from)
        if made.recipes != digests:
            raise ValueError("the digests of its recipes are wrong")
        train = made.train
        if train + made.test > made.ok or made.ok > made.rows:
            store = f"a store of {made.rows:,} rows, {made.ok:,} of them readable"
            raise ValueError(
                f"{train:,} training rows and {made.test:,} test rows are impossible in {store}"
            )
        classes = len(made.classes)
        if made.owned > min(train, classes):
            raise ValueError(
                f"it reports training rows of {made.owned} classes, but has only {classes} classes and {train} "
                "training rows"
            )
        return made

    def to_words(self) -> Facts:
        """Plain JSON values."""
        return asdict(self)


def _checked_fact(name: str, value: Any) -> Any:
    """One fact of a site, with a list as a tuple. Raises ValueError for a fact outside its limits."""
    if name == "number":
        sound = value is None or _is_whole(value, 0, 2**53)
        expected = "a whole number or none"
    elif name in COUNTS:
        low, high = COUNTS[name]
        sound = _is_whole(value, low, high)
        expected = f"a whole number from {low} to {high:,}"
    elif name in TEXTS:
        longest = TEXTS[name]
        sound = _is_text(value, longest)
        expected = f"a text of at most {longest} characters"
    elif name == "widths":
        sound = _is_list(value, WIDTHS) and all(_is_whole(n, 1, WIDEST) for n in value)
        expected = f"at most {WIDTHS} numbers from 1 to {WIDEST:,}"
    else:
        most, longest = LISTS[name]
        sound = _is_list(value, most) and all(_is_text(text, longest) for text in value)
        expected = f"at most {most:,} texts of {longest:,} characters"
    if not sound:
        raise ValueError(f"{name} is {value!r:.60}, expected {expected}")
    # JSON has lists. As tuples, equal facts compare equal.
    if isinstance(value, list):
        return tuple(value)
    return value


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _is_list(value: Any, most: int) -> bool:
    return isinstance(value, list | tuple) and len(value) <= most


def _is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # a bool is no number here


def client_of(facts: SiteFacts) -> Client:
    """The client of a site on the server: its name and its number of training rows, in an array without memory."""
    train = np.broadcast_to(np.int64(0), (facts.train,))
    return Client(facts.name, train, np.empty(0, np.int64))


SAME = {
    "classes": "its classes differ from those of the other sites: {}",
    "recipes": "its features have the recipe {}, but the other sites have {}",
    "widths": "its features have the width {}, but the other sites have {}",
    "views": "it stores {} views of an image, but the other sites store {}",
    "text": "its class text features have the digest {}, but the other sites have {}",
    "feat_post": "it uses feat_post {}, but the other sites use {}",
    "code": "its version of the method has code {}, but the other sites have {}",
}
"""Facts that must be equal at all sites -> sentence about a difference. Only the first difference is reported."""

HINTS = {
    "classes": "Extract on that site with the same class names. With --dataset folder:PATH, make an empty folder for "
    "each class that the site lacks.",
    "recipes": "Extract on that site with the same backbone and recipe. To see the recipe: fedcache inspect",
    "widths": "Extract on that site with the same backbone and recipe. To see the recipe: fedcache inspect",
    "views": "Extract on that site with the same --views.",
    "text": "Extract on that site with the same --text templates.",
    "feat_post": "Set it for all sites: fedcache flower app --set feat_post=none",
    "code": "Install the same version of fedcache on all machines: pip install fedcache==VERSION",
}


Problem = tuple[str, str]
"""The reason why a site cannot take part, and a hint."""


def difference(mine: SiteFacts, theirs: SiteFacts) -> Problem | None:
    """The first fact of ``SAME`` in which two sites differ, in words, and a hint; None without a difference."""
    for fact, words in SAME.items():
        own = getattr(mine, fact)
        other = getattr(theirs, fact)
        if own != other:
            shown = [_short(own), _short(other)]
            if fact == "classes":
                shown = [_class_difference(mine, theirs)]
            return words.format(*shown), HINTS[fact]
    return None


def _class_difference(mine: SiteFacts, theirs: SiteFacts) -> str:
    """The class names that only one of two sites has; without such names, the classes after the first difference."""
    words = []
    for one, other in ((mine, theirs), (theirs, mine)):
        known = set(other.classes)
        extra = [name for name in one.classes if name not in known]
        if extra:
            listed = some_names(extra, 8)
            words.append(f"only {one.name} has {listed}")
    if words:
        return "; ".join(words)
    # A site may report a name twice, so the lists can have different lengths.
    same = 0
    for own, other_name in zip(mine.classes, theirs.classes, strict=False):
        if own != other_name:
            break
        same += 1
    own_rest = _short(mine.classes[same:])
    other_rest = _short(theirs.classes[same:])
    return f"the order differs from class {same} on ({own_rest}; {theirs.name}: {other_rest})"


def _short(value: Any) -> str:
    """A value for a message; long digests are cut."""
    if isinstance(value, tuple):
        words = " + ".join(map(_short, value[:4]))
        if len(value) > 4:
            words += " .."
        return words
    text = str(value) or "none"
    if len(text) > 40:
        return text[:12]
    return text


MOST_ROWS = 10_000_000
"""Default limit of a site's training rows, and of its test rows. The server allocates memory for each row, and has
enough for this number."""


@dataclass(frozen=True)
class Member:
    """A participating site and its node."""

    node: int
    facts: SiteFacts
    key: str = ""  # fingerprint of the node's public key

    @property
    def place(self) -> tuple[bool, int, str]:
        """Key for the client order: sites with numbers of shards first, by number; then the others, by name."""
        number = self.facts.number
        return number is None, number or 0, self.facts.name


Refusal = tuple[Member, str, str]
"""A site that cannot take part, the reason, and a hint."""


def compatible_sites(members: Sequence[Member], like: str) -> tuple[list[Member], list[Refusal]]:
    """The largest group of sites with equal facts, in client order, and the refusals of the others.

    Among groups of one size, the group with the first site is taken. With ``like``, the group of the site with that
    name is taken, even if it is smaller. Both lists are empty until the site of ``like`` is there.
    """
    ordered = in_client_order(members)
    kinds = []
    for member in ordered:
        kinds.append(tuple(getattr(member.facts, fact) for fact in SAME))
    named = [m for m in ordered if m.facts.name == like]
    if not kinds or (like and not named):
        return [], []
    # Counter keeps the order of first occurrence, so the first of equally large groups wins.
    usual_kind, _ = Counter(kinds).most_common(1)[0]
    usual = ordered[kinds.index(usual_kind)]
    if named:
        usual = named[0]
    fit = []
    refused = []
    for member in ordered:
        problem = difference(member.facts, usual.facts)
        if problem is None:
            fit.append(member)
        else:
            refused.append((member, *problem))
    return fit, refused


def _of_another_key(member: Member, owners: Mapping[str, str]) -> Problem | None:
    """Why a site cannot have its name, in words, and a hint; None if no other key owns it."""
    name = member.facts.name
    if owners.get(name, member.key) == member.key:
        return None
    return (NAME_BOUND, BOUND_HINT.format(shell_word(name)))


def in_client_order(members: Sequence[Member]) -> list[Member]:
    """The sites in client order; see ``Member.place``."""
    return sorted(members, key=lambda member: member.place)


@dataclass(frozen=True)
class RowLimits:
    """The largest numbers of rows of a site that the server accepts."""

    train: int  # training rows
    test: int  # test rows
    why: str  # source of the numbers, in words

    @classmethod
    def of(cls, members: Sequence[Member], most: int | None) -> RowLimits:
        """``most`` if it is given, else ``FAR_OUT`` times the median of the sites, ``MOST_ROWS`` at most."""
        if most is not None:
            return cls(most, most, "--max-rows-per-client")
        train = far_out_limit([m.facts.train for m in members]) or MOST_ROWS
        test = far_out_limit([m.facts.test for m in members]) or MOST_ROWS
        why = (
            f"{FAR_OUT} times the median over all sites, at most {MOST_ROWS:,}; with fewer than three sites, "
            f"{MOST_ROWS:,}"
        )
        return cls(min(MOST_ROWS, int(train)), min(MOST_ROWS, int(test)), why)

    def problem(self, facts: SiteFacts) -> Problem | None:
        """Which number of a site's rows is too large, in words, and a hint; None if both are accepted."""
        for rows, most, what in (
            (facts.train, self.train, "training"),
            (facts.test, self.test, "test"),
        ):
            if rows > most:
                return (
                    f"it reports {rows:,} {what} rows, but at most {most:,} are accepted ({self.why})",
                    f"If the number is correct: --max-rows-per-client {rows}",
                )
        return None


NAME_TAKEN = "another node already has this name"
NAME_HINT = (
    "Give it a name that no other site has: fedcache flower site --shard PATH --superlink HOST:PORT "
    "--name NAME. With keys (--keys), a restarted site keeps its name. Without keys it counts as a new "
    "node and joins from the next run."
)
NAME_BOUND = "its name belongs to another key that used the name before"
BOUND_HINT = (
    "If that site has a new key: fedcache flower names --forget {}. Add --port PORT if the server does not "
    "use port 8000. If that site has no new key, give this site another name: fedcache flower site --shard PATH "
    "--superlink HOST:PORT --name NAME."
)

GONE = "its node disconnected"
"""Reason why there is no answer from a node that ended before it answered."""

ANSWER = 60.0
"""Minimum number of seconds that a node has to report its facts, even after ``--wait``: its app must start first."""

LATE = "it did not answer in time"
"""Reason why a run begins without a slow node."""

REQUESTS = 3
"""Number of unanswered requests for facts after which a node counts as silent."""

LOOK_EVERY = 1.0
"""Seconds between two checks for new nodes."""

SITE_THAT_IS_RIGHT = "Choose the site that all other sites must match: --like NAME"

START = "Start the sites: fedcache flower site --shard PATH --superlink HOST:PORT"


@dataclass(frozen=True)
class SecureSum:
    """The result of a round of secure aggregation."""

    words: Mapping[int, Record]  # node in the sum -> words that it sent with its vector
    total: Tensor  # [d] float64, the sum of the vectors
    missing: Mapping[int, str]  # node -> why it is not in the sum
    failed: str  # why there is no sum; "" if there is one


Requests = Mapping[int, SiteMessage]
"""Node -> the message that it gets."""

Answers = dict[int, SiteMessage | str]
"""Node -> its answer, or the reason why there is none."""


class Transport(Protocol):
    """Carrier of messages to nodes and back; ``transport.FlowerTransport`` is Flower's.

    Attributes:
        bytes_down: sent so far, without the overhead of the transport.
        bytes_up: received so far, likewise.
    """

    bytes_down: int
    bytes_up: int

    def nodes(self) -> Mapping[int, str]:
        """Nodes that can be reached now, each with the fingerprint of its public key."""

    def ask(self, kind: str, messages: Requests, timeout: float) -> Answers:
        """Send one message to each node; returns the answer of each, or why there is none, in words."""

    def ask_sum(self, messages: Requests, bound: float, number: int, timeout: float) -> SecureSum:
        """As ``ask("fit", ..)``, but the server gets only the sum of the vectors in the answers.

        ``bound`` limits every number of a vector, ``number`` is the round, ``timeout`` is in seconds per exchange.
        """


@dataclass(frozen=True)
class Terms:
    """How many sites a federation needs, and how long it waits for them."""

    sites: int  # number of sites
    start_with: int  # sites that are enough to begin when ``wait`` is over
    quorum: int = 1  # least valid uploads of a round
    wait: float = 120.0  # seconds for the sites to come
    timeout: float = 600.0  # seconds for an answer
    max_rows: int | None = None  # limit of a site's rows; None as ``RowLimits.of``
    like: str = ""  # name of the site that the others must agree with; "" for the majority


@dataclass
class MissedSite:
    """A site that was missing in a round, and why; or a site that joined in a round."""

    round: int
    site: str
    why: str


class Sites:
    """The participating sites; ``observer`` gets the lines of the log."""

    def __init__(
        self,
        transport: Transport,
        terms: Terms,
        observer: Observer,
        names: SiteNames | None = None,
    ) -> None:
        self.transport = transport
        self.terms = terms
        self.observer = observer
        self.names = names or SiteNames()
        self.members: list[Member] = []  # in client order
        self.missed: list[MissedSite] = []  # sites that were missing in some step
        self.joined: list[MissedSite] = []  # sites that arrived after the beginning
        self._request: Facts = {}
        self._met: set[int] = set()  # nodes that have reported facts, or get no more requests
        # node -> number of requests for its facts that it did not answer
        self._silent = Counter[int]()
        self._labels: dict[int, str] = {}  # node -> the name that its key owns, else its number

    def gather(self, request: Record) -> list[Member]:
        """Wait for the sites, send them ``request``, and take those with equal facts, in client order.

        Raises StoreError if sites lack the requested arrays or differ; FederatedRunError if too few come.
        """
        self._request = dict(request)
        arrived = []
        reasons: list[FedcacheError | str] = []
        deadline = time.monotonic() + self.terms.wait
        self.observer.note(f"Waiting for {self.terms.sites} sites.")
        if self.names.path is None:
            self.observer.note(
                "Without keys, a site name belongs to the first node that uses it, and only for this run."
            )
        else:
            owned = len(self.names.known())
            self.observer.note(f"A name belongs to the first key that uses it. {owned} are taken.")
        while True:
            arrived += self._request_facts(0, reasons, max(deadline - time.monotonic(), ANSWER))
            kept, differing, rejected = self._select_members(arrived)
            # ``--like`` names the group of sites, or more than half of them are in one group.
            decided = bool(self.terms.like) or len(arrived) > 2 * len(differing)
            now = time.monotonic()
            late = now >= deadline
            if decided and len(kept) >= self.terms.sites:
                break
            if late and decided and len(kept) >= self.terms.start_with:
                break
            # A slow node gets all its requests before the run begins without it.
            if late and (not self._slow_nodes() or now >= deadline + REQUESTS * ANSWER):
                break
            time.sleep(LOOK_EVERY)
        for node in self._slow_nodes():
            self.missed.append(MissedSite(0, self._labels[node], LATE))
        for member, why, hint in (*differing, *rejected):
            self._refuse(0, member.facts.name, why, hint)
        if not decided and differing:
            raise self._no_majority(arrived, differing)
        needed = self.terms.sites
        if late:
            # Nodes that are there and cannot take part count as present, so that one of them cannot block all others.
            here = self._met | set(self._silent)
            needed = max(1, self.terms.start_with - (len(here) - len(kept)))
        count = len(kept)
        if count < needed:
            for member, why, hint in rejected:
                name = member.facts.name
                reasons.append(FederatedRunError(f"Site {name!r}: {why}.", hint))
            raise self._too_few_sites(kept, differing, reasons)
        if count < self.terms.sites:
            self.observer.warn(
                f"{count} of {self.terms.sites} sites are connected; late sites can join during "
                f"the run.{self._absent(kept)}"
            )
        self.members = kept
        self._bind(kept)
        limits = RowLimits.of(kept, self.terms.max_rows)
        most = f"{limits.train:,} training rows and {limits.test:,} test rows"
        self.observer.note(f"A site may have at most {most} ({limits.why}).")
        return kept

    def _select_members(
        self, arrived: Sequence[Member]
    ) -> tuple[list[Member], list[Refusal], list[Refusal]]:
        """The sites that take part, those that differ from them, and those that are rejected for another reason.

        ``arrived`` is in the order of arrival.
        """
        fit, differing = compatible_sites(arrived, self.terms.like)
        limits = RowLimits.of(fit, self.terms.max_rows)
        owners = self.names.known()
        accepted = []
        rejected = []
        for member in fit:
            problem = limits.problem(member.facts) or _of_another_key(member, owners)
            if problem is None:
                accepted.append(member)
            else:
                rejected.append((member, *problem))
        # A name belongs to the first node that arrived with it.
        nodes = {member.node for member in accepted}
        first: dict[str, int] = {}
        for member in arrived:
            if member.node in nodes:
                first.setdefault(member.facts.name, member.node)
        kept = []
        for member in accepted:
            if first[member.facts.name] == member.node:
                kept.append(member)
            else:
                rejected.append((member, NAME_TAKEN, NAME_HINT))
        return kept, differing, rejected

    def _slow_nodes(self) -> set[int]:
        """Connected nodes that left a request for their facts without an answer, and get another one."""
        return set(self._silent) & set(self.transport.nodes()) - self._met

    def absences(self, earlier: Sequence[Facts] = ()) -> Facts:
        """Missing sites and late sites, as JSON for a result or a checkpoint.

        ``earlier`` has the metadata of the checkpoints from which a run resumed.
        """
        found: Facts = {}
        for kind, entries in (("missed", self.missed), ("joined", self.joined)):
            found[kind] = []
            before = itertools.chain(*(meta.get(kind, []) for meta in earlier))
            for entry in (*before, *map(asdict, entries)):
                # The checkpoints of several seeds have the same entries.
                if entry not in found[kind]:
                    found[kind].append(entry)
        return found

    def _bind(self, members: Sequence[Member]) -> None:
        self.names.bind({m.facts.name: m.key for m in members})

    def _refuse(self, round_: int, name: str, why: str, hint: str) -> None:
        self.observer.warn(f"site {name!r} is rejected: {why}. {hint}")
        self.missed.append(MissedSite(round_, name, f"rejected: {why}"))

    def miss(self, round_: int, name: str, why: str, warning: str) -> None:
        """Note a site that is missing in a round, with a warning in the log; equal entries are noted once."""
        entry = MissedSite(round_, name, why)
        if entry not in self.missed:
            self.missed.append(entry)
        self.observer.warn(warning)

    def _request_facts(
        self, round_: int, reasons: list[FedcacheError | str], wait: float
    ) -> list[Member]:
        """The new nodes that report their facts in a round; the reasons why others do not are added to ``reasons``.

        Nodes have ``wait`` seconds to answer, or the terms' timeout if that is less.
        """
        arrived = []
        here = self.transport.nodes()
        requests = {node: SiteMessage(self._request) for node in sorted(set(here) - self._met)}
        if not requests:
            return []
        timeout = min(wait, self.terms.timeout)
        owned = {key: name for name, key in self.names.known().items()}
        for node, key in here.items():
            self._labels[node] = owned.get(key, f"node {node}")
        for node, answer in self.transport.ask("facts", requests, timeout).items():
            # A slow node, or one whose answer was lost, is asked again up to ``REQUESTS`` times. A node that went away
            # is asked again when it is back; its key makes it the same node.
            label = self._labels[node]
            if isinstance(answer, str):
                if answer != GONE:
                    self._silent[node] += 1
                if self._silent[node] >= REQUESTS:
                    self._met.add(node)
                    self.missed.append(MissedSite(round_, label, answer))
                reasons.append(answer)
                self.observer.warn(
                    f"{label} sent no description: {answer}. If it sends none again, restart this site."
                )
                continue
            self._met.add(node)
            refusal = refusal_of(answer)
            if refusal is not None:
                reasons.append(refusal)
                self.missed.append(MissedSite(round_, label, refusal.message))
                self.observer.warn(f"{label} cannot take part: {refusal.message} {refusal.hint}")
                continue
            try:
                facts = SiteFacts.from_words(answer.words.get("facts"))
            except ValueError as error:
                why = f"its description is malformed: {error}"
                reasons.append(why)
                self.missed.append(MissedSite(round_, label, f"rejected: {why}"))
                self.observer.warn(
                    f"{label} is left out, because its description is invalid: {error}."
                )
                continue
            # A slow node is not missing any more.
            self.missed = [m for m in self.missed if m != MissedSite(0, label, LATE)]
            arrived.append(Member(node, facts, here[node]))
            rows = f"{facts.train:,} training rows, {facts.test:,} test rows"
            self.observer.note(f"Site {facts.name!r}: {rows}.")
        return arrived

    def _no_majority(self, arrived: Sequence[Member], refused: Sequence[Refusal]) -> FedcacheError:
        """The error for sites without a majority that agrees."""
        refused_nodes = {member.node for member, *_ in refused}
        agreeing = (m.facts.name for m in in_client_order(arrived) if m.node not in refused_nodes)
        first = next(agreeing)
        member, why, hint = refused[0]
        other = member.facts.name
        return StoreError(
            f"{len(arrived)} sites are connected, but at most half of them match each other. For example, site "
            f"{other!r} differs from {first!r}: {why}.",
            f"{hint} {SITE_THAT_IS_RIGHT}.",
        )

    def _too_few_sites(
        self,
        kept: Sequence[Member],
        refused: Sequence[Refusal],
        reasons: Sequence[FedcacheError | str],
    ) -> FedcacheError:
        """The error for too few sites; it shows the first reason, and the log has all of them."""
        names = ", ".join(m.facts.name for m in kept) or "none"
        terms = self.terms
        count = f"{len(kept)} of {terms.sites} sites"
        state = f"{count} are connected after {terms.wait:g} s: {names}.{self._absent(kept)}"
        if refused:
            member, why, hint = refused[0]
            return StoreError(f"{state} Site {member.facts.name!r} is rejected: {why}.", hint)
        if reasons:
            problem = reasons[0]
            if isinstance(problem, FedcacheError):
                return FedcacheError(problem.code, f"{state} {problem.message}", problem.hint)
            return FederatedRunError(f"{state} A node sent no description: {problem}.", START)
        if not kept and terms.like:
            state += f" The site {terms.like!r}, which all other sites must match (--like), is not connected."
        return FederatedRunError(state, START)

    def _absent(self, present: Sequence[Member]) -> str:
        """A sentence about sites of earlier runs that are not among ``present``; "" without such sites."""
        absent = self.names.known().keys() - {member.facts.name for member in present}
        if not absent:
            return ""
        listed = ", ".join(sorted(absent))
        return f" Sites of earlier runs that are missing: {listed}."

    def text(self, digest: str, classes: int) -> Tensor:
        """The class text features [C, D] of that digest, which all sites have, from the first site that sends them.

        Raises FederatedRunError if no site sends them.
        """
        why = ""
        for member in self.members:
            answer = self.ask("text", {member.node: SiteMessage(self._request)})[member.node]
            if isinstance(answer, str):
                why = answer
            else:
                sent = None
                if answer.trees:
                    sent = answer.trees[0].get("text")
                if sent is None or sent.dtype != torch.float32 or sent.shape[:-1] != (classes,):
                    why = "it sent no text features"
                elif sha256_hex(sent.numpy().tobytes()) == digest:
                    return sent
                else:
                    why = "it sent text features that differ from the announced digest"
            self.observer.warn(
                f"site {member.facts.name!r} could not send the class text features: {why}."
            )
        raise FederatedRunError(
            f"No site sent the text features of the classes (sites asked: {len(self.members)}). "
            f"The last site failed: {why}.",
            "Run again; finished work is kept.",
        )

    def newcomers(self, round_: int) -> list[Member]:
        """Late sites that agree with the members, and whose rows and name are accepted; the others are refused."""
        fresh: list[Member] = []
        for member in in_client_order(self._request_facts(round_, [], self.terms.wait)):
            facts = member.facts
            present = [*self.members, *fresh]
            limits = RowLimits.of([*present, member], self.terms.max_rows)
            problem = (
                difference(facts, self.members[0].facts)
                or limits.problem(facts)
                or _of_another_key(member, self.names.known())
            )
            if problem is None and facts.name in (m.facts.name for m in present):
                problem = NAME_TAKEN, NAME_HINT
            if problem is None:
                fresh.append(member)
            else:
                self._refuse(round_, facts.name, *problem)
        if fresh:
            self._bind(fresh)
        return fresh

    def ask(self, kind: str, messages: Requests) -> Answers:
        """``Transport.ask`` with the terms' timeout."""
        return self.transport.ask(kind, messages, self.terms.timeout)


# The rows of sites on the server: numbers, widths, digests and counts, without the rows.
#
# For scores, sites send confusion counts: the number of rows of each label and predicted class. The
# server makes one row for each count and scores these rows with the evaluation of the in-process
# engine, so every figure is equal. Sites with copies of one global test set are counted once for a
# global model. Other rows that several sites test are counted for each of them.


class SiteRows:
    """``RowSource`` of a federation, which has no rows.

    It has the facts of the sites, in client order, and the class text features [C, D], if any.
    """

    def __init__(self, facts: Sequence[SiteFacts], text: torch.Tensor | None) -> None:
        self.facts = list(facts)
        self.text = text
        self._stores = digest_of([[f.name, f.dataset] for f in facts])

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """0 seconds, because the server extracts nothing."""
        return 0.0

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """The arrays of the first site; all sites have arrays of the same recipes."""
        return list(self.facts[0].keys)

    def partitions(
        self, method: Method, seeds: Sequence[int]
    ) -> tuple[dict[int, Partition], str | None]:
        """Every site is a client with one training row and one test row, which stand for all of its rows.

        The digest of the stores identifies the real rows.
        """
        train = np.zeros(1, np.int64)
        test = np.ones(1, np.int64)
        partition = Partition(
            scheme="sites",
            args={"stores": self._stores},
            seed=0,
            clients=tuple(Client(f.name, train, test) for f in self.facts),
            test=test,
            dataset=str(self.dataset()["digest"]),
            pool=sum(f.train for f in self.facts),
            dropped=0,
        )
        return dict.fromkeys(seeds, partition), None

    def feat_post(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]
    ) -> str:
        """The transformation of features, equal at every site."""
        return self.facts[0].feat_post

    def read(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """Features without rows: widths, views and classes."""
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
        digests = first.recipes
        if first.text:
            digests = (*digests, first.text)
        recipes = tuple(parse_json(text.encode()) for text in first.made_from)
        return RunFeatures(tuple(arrays), data, digests, first.templates, recipes, first.feat_post)

    def overrides(
        self, method: Method, features: RunFeatures, clients: int
    ) -> dict[int, ClientOverrides]:
        """No overrides, because the plan of a federation refuses settings of single clients."""
        return {}

    def dataset(self) -> Facts:
        """The store that all shards were cut from, or all stores together."""
        first = self.facts[0]
        digest = self._stores
        if first.parent and all(f.parent == first.parent for f in self.facts):
            digest = first.parent
        return {
            "slug": first.slug,
            "digest": digest,
            "rows": sum(f.rows for f in self.facts),
            "ok": sum(f.ok for f in self.facts),
        }

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Domains of all sites, and the classes that they have in common."""
        return tuple(domain_names(self.facts)), self.facts[0].classes

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        return self.facts[0].backbones

    def choices(self, arrays: Sequence[str]) -> Facts:
        """Nothing, because the app of a federation repeats the choices."""
        return {}


def score_counts(
    run: RunState, facts: Sequence[SiteFacts], counts: Mapping[int, Tensor]
) -> tuple[Evaluation, Data]:
    """The evaluation of a run, and the labels and domains of the rows that the counts stand for.

    ``counts`` are int64 [domains, C, C + 1] of every client that answered; the last class is no prediction.
    """
    C = run.env.classes
    personal = run.method.protocol(run.hp) != "global"
    names = domain_names(facts)
    empty = np.empty(0, np.int64)
    label = [empty]
    domain = [empty]
    guess = [empty]
    clients = []
    first: dict[str, np.ndarray] = {}  # test set -> its rows
    start = 0
    for i, site in enumerate(facts):
        if i not in counts:
            clients.append(Client(site.name, empty, empty))
            continue
        # One global model has one prediction for a row of a test set that several sites hold.
        key = site.tests
        if personal:
            key = str(i)
        if key not in first:
            # As many rows of each cell (domain, label, prediction) as the site counted.
            flat = counts[i].numpy().reshape(-1)
            cell = np.repeat(np.arange(len(flat)), flat)
            domain_label = cell // (C + 1)
            predicted_class = cell % (C + 1)
            label.append(domain_label % C)
            codes = np.array([names.index(name) for name in site.domains], np.int64)
            domain.append(codes[domain_label // C])
            guess.append(np.where(predicted_class == C, -1, predicted_class))
            first[key] = np.arange(start, start + len(cell))
            start += len(cell)
        clients.append(Client(site.name, first[key], first[key]))  # training rows are not read
    y = torch.from_numpy(np.concatenate(label))
    predicted = torch.from_numpy(np.concatenate(guess))
    domains = torch.from_numpy(np.concatenate(domain))
    data = Data(torch.empty(len(y), 1, 0), y, C, domain=domains)

    def scores(rows: Tensor) -> Tensor:
        answer = predicted[rows]
        hot = one_hot(answer.clamp(min=0), C).double()
        hot[answer < 0] = torch.nan  # no prediction
        return hot

    def model(_client: int) -> Scores:
        return scores

    if personal:
        evaluation = evaluate_personal(model, data, clients, headline=run.method.headline)
    else:
        evaluation = evaluate_global(scores, data, clients)
    return evaluation, data


def domain_names(facts: Sequence[SiteFacts]) -> list[str]:
    """Names of the domains of all sites, in the order of their first occurrence."""
    return list(dict.fromkeys(name for site in facts for name in site.domains))
