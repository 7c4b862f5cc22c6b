"""The sites of a federation: waiting for them, taking those that fit, and those that come late or come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedcache.errors import Exit, FedcacheError, FederatedRunError, StoreError
from fedcache.federate.engines.flower.messages import SiteMessage
from fedcache.federate.engines.flower.site_facts import (
    Member,
    SiteFacts,
    compatible_sites,
    difference,
    duplicate_name_error,
    in_client_order,
)

START = "Start the sites: fedcache flower site --shard PATH --superlink HOST:PORT"


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


@dataclass(frozen=True)
class Terms:
    """How a federation waits.

    Attributes:
        sites: how many it is of.
        start_with: how many are enough to begin when ``wait`` is over.
        quorum: sites without whose sound uploads a round does not count.
        wait: seconds for the sites to come.
        timeout: seconds for an answer.
        poll: seconds between looks for new nodes.
    """

    sites: int
    start_with: int
    quorum: int = 1
    wait: float = 120.0
    timeout: float = 600.0
    poll: float = 1.0


@dataclass
class MissedSite:
    """A site without which a round was made, and why."""

    round: int
    site: str
    why: str


class Sites:
    """Who takes part.

    Args:
        transport: brings messages.
        terms: how long it waits, and for how many.
        say: told the story, a line at a time.

    Attributes:
        members: in client order.
        missed: sites without which something was done.
        joined: sites that came after the beginning.
    """

    def __init__(self, transport: Transport, terms: Terms, say: Callable[[str], None]) -> None:
        self.transport, self.terms, self.say = transport, terms, say
        self.members: list[Member] = []
        self.missed: list[MissedSite] = []
        self.joined: list[MissedSite] = []
        self._question: dict[str, Any] = {}
        self._met: set[int] = set()

    def gather(self, question: Mapping[str, Any]) -> list[Member]:
        """Wait for the sites, ask what they have, and take those that fit together, in client order.

        Args:
            question: the words of ``facts``.

        Raises:
            StoreError when sites lack what was asked for or differ; FederatedRunError when too few come.
        """
        self._question = dict(question)
        came: dict[int, Member] = {}
        lacking: dict[int, FedcacheError | str] = {}
        last = time.monotonic() + self.terms.wait
        self.say(f"Waiting for {self.terms.sites} sites.")
        while True:
            self._ask_facts(set(self.transport.nodes()) - self._met, came, lacking)
            kept, refused = compatible_sites(list(came.values()))
            if len(kept) >= self.terms.sites:
                break
            if time.monotonic() >= last:
                break
            time.sleep(self.terms.poll)
        if twice := duplicate_name_error(kept):
            raise twice
        for member, why, hint in refused:
            self.say(f"warning: site {member.facts.name!r} is refused: {why}. {hint}")
            self.missed.append(MissedSite(0, member.facts.name, f"refused: {why}"))
        enough = self.terms.sites if time.monotonic() < last else self.terms.start_with
        if len(kept) < enough:
            raise self._too_few(kept, refused, lacking)
        if len(kept) < self.terms.sites:
            self.say(f"warning: {len(kept)} of {self.terms.sites} sites came; those that come later join then.")
        self.members = kept
        return kept

    def _ask_facts(self, nodes: set[int], came: dict[int, Member], lacking: dict[int, FedcacheError | str]) -> None:
        if not nodes:
            return
        answers = self.ask("facts", {n: SiteMessage(self._question) for n in nodes})
        for node, answer in answers.items():
            self._met.add(node)
            if isinstance(answer, str):
                lacking[node] = answer
                self.say(f"warning: a node says nothing of itself: {answer}.")
                continue
            if (refusal := refusal_of(answer)) is not None:
                lacking[node] = refusal
                self.say(f"warning: a site cannot take part: {refusal.message} {refusal.hint}")
                continue
            try:
                facts = SiteFacts.from_words(answer.words["facts"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                lacking[node] = f"its facts are malformed: {error}"
                continue
            came[node] = Member(node, facts)
            self.say(f"Site {facts.name!r}: {facts.train:,} rows to train on, {facts.test:,} to be scored on.")

    def _too_few(
        self,
        kept: Sequence[Member],
        refused: Sequence[tuple[Member, str, str]],
        lacking: Mapping[int, FedcacheError | str],
    ) -> FedcacheError:
        names = ", ".join(m.facts.name for m in kept) or "none"
        said = f"{len(kept)} of {self.terms.sites} sites take part after {self.terms.wait:g} s: {names}."
        for member, why, hint in refused:
            return StoreError(f"{said} Site {member.facts.name!r} is refused: {why}.", hint)
        for problem in lacking.values():
            if isinstance(problem, FedcacheError):
                return FedcacheError(problem.code, f"{said} {problem.message}", problem.hint)
            return FederatedRunError(f"{said} A node says nothing of itself: {problem}.", START)
        return FederatedRunError(said, START)

    def text(self) -> Tensor:
        """The class text features, from the first site; all sites have those of the same digest.

        Raises:
            FederatedRunError.
        """
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
        new = set(self.transport.nodes()) - self._met
        came: dict[int, Member] = {}
        self._ask_facts(new, came, {})
        fresh: list[Member] = []
        for member in in_client_order(list(came.values())):
            name = member.facts.name
            place = next((i for i, m in enumerate(self.members) if m.facts.name == name), None)
            if (found := difference(member.facts, self.members[0].facts)) is not None:
                self.say(f"warning: site {name!r} is refused: {found[0]}. {found[1]}")
                self.missed.append(MissedSite(round_, name, f"refused: {found[0]}"))
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


def refusal_of(answer: SiteMessage) -> FedcacheError | None:
    """The error that a site answers with, or None."""
    found = answer.words.get("refused")
    if not isinstance(found, dict):
        return None
    code = found.get("code")
    known = Exit(code) if code in list(Exit) else Exit.FEDERATED
    return FedcacheError(known, str(found.get("message"))[:2000], str(found.get("hint"))[:2000])
