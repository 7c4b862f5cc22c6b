"""Messages through Flower: one to each site, and what comes back, or why nothing did."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcache.federate.engines.flower.messages import (
    MalformedError,
    PackedMessage,
    RawTensor,
    SiteMessage,
    pack,
    unpack,
)
from fedcache.federate.engines.flower.secure_aggregation import secure_sum
from fedcache.federate.engines.flower.sites import GONE, SecureSum
from fedcache.store.files import sha256_hex

STYPE = "fedcache.raw"
"""How the bytes of an array are to be read: as they lie, little endian."""

KINDS = {
    "facts": "query.facts",
    "text": "query.text",
    "fit": "train.fit",
    "score": "evaluate.score",
}
"""What is asked for -> Flower's type of the message."""

PULL_EVERY = 0.5
"""Seconds between looks for answers; the grid's own ``send_and_receive`` looks every three."""

WHY = {
    1: "its app could not be loaded: is the same fedcache installed there?",
    2: "its app ended with an exception; its log has it",
    5: GONE,
    8: "its app was killed",
}
"""Flower's error codes, in words."""


def to_record(packed: PackedMessage) -> RecordDict:
    """A packed message as Flower carries it."""
    arrays = {k: Array(r.dtype, r.shape, STYPE, r.data) for k, r in packed.arrays.items()}
    return RecordDict(
        {"words": ConfigRecord({"json": packed.words}), "arrays": ArrayRecord(arrays)}
    )


def from_record(record: RecordDict) -> PackedMessage:
    """The inverse of ``to_record``; ``unpack`` looks at what is in it. Raises MalformedError, for anything else."""
    words = record.get("words")
    arrays = record.get("arrays")
    if not isinstance(words, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise MalformedError("it lacks words or arrays")
    text = words.get("json")
    if not isinstance(text, str):
        raise MalformedError("its words are no text")
    raws = {}
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise MalformedError(f"array {name} is {array.stype!r:.40}, expected {STYPE!r}")
        raws[str(name)] = RawTensor(array.dtype, tuple(array.shape), array.data)
    return PackedMessage(text, raws)


class FlowerTransport:
    """A ``Transport`` over the grid of the running ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.bytes_down = self.bytes_up = 0

    def nodes(self) -> dict[int, str]:
        """Nodes that are online, each with the fingerprint of its public key."""
        return {node.node_id: sha256_hex(node.public_key) for node in self._grid.get_nodes()}

    def ask(
        self, kind: str, contents: Mapping[int, SiteMessage], timeout: float
    ) -> dict[int, SiteMessage | str]:
        """Send one message to each node; what each answers, or why it does not."""
        asked = {}
        for node, content in contents.items():
            packed = pack(content)
            self.bytes_down += packed.bytes
            asked[node] = Message(to_record(packed), dst_node_id=node, message_type=KINDS[kind])
        found: dict[int, SiteMessage | str] = {}
        for node, reply in self.exchange(asked, timeout).items():
            if isinstance(reply, str):
                found[node] = reply
                continue
            try:
                packed = from_record(reply.content)
                self.bytes_up += packed.bytes
                found[node] = unpack(packed)
            except MalformedError as error:
                found[node] = f"its answer is malformed: {error}"
        return found

    def ask_sum(
        self, contents: Mapping[int, SiteMessage], bound: float, number: int, timeout: float
    ) -> SecureSum:
        """As ``ask`` for ``fit``, of which only the sum over the nodes is learnt."""
        records = {node: to_record(pack(content)) for node, content in contents.items()}
        return secure_sum(self, self._grid, records, bound=bound, number=number, timeout=timeout)

    def exchange(self, messages: Mapping[int, Message], timeout: float) -> dict[int, Message | str]:
        """Send one message to each node; the reply of each, or why there is none, in words."""
        found: dict[int, Message | str] = {}
        waiting: dict[str, int] = {}
        for node, message in messages.items():
            # One at a time: a request that holds the messages of all nodes can be too large.
            for number in self._grid.push_messages([message]):
                if number:
                    waiting[number] = node
        found |= {
            n: "the SuperLink did not take the message"
            for n in messages
            if n not in waiting.values()
        }
        last = time.monotonic() + timeout
        while waiting and time.monotonic() < last:
            time.sleep(PULL_EVERY)
            for reply in self._grid.pull_messages(list(waiting)):
                # An error's sender is the SuperLink, so the message it answers tells whose it is.
                of = waiting.pop(reply.metadata.reply_to_message_id, None)
                if of is not None:
                    found[of] = reply if not reply.has_error() else _why(reply)
        return found | dict.fromkeys(waiting.values(), f"it did not answer within {timeout:g} s")


def _why(reply: Message) -> str:
    """Flower's error, in words."""
    return WHY.get(reply.error.code, f"Flower's error {reply.error.code}: {reply.error.reason}")
