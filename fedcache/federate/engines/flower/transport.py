"""Transport of messages through Flower: one message to each site, and its answer or the reason why there is none."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcache.federate.engines.flower.messages import (
    MalformedError,
    PackedMessage,
    RawTensor,
    pack,
    unpack,
)
from fedcache.federate.engines.flower.secure_aggregation import secure_sum
from fedcache.federate.engines.flower.sites import GONE, Answers, Requests, SecureSum
from fedcache.store.files import sha256_hex

STYPE = "fedcache.raw"
"""Format of an array's bytes in a message: raw, little endian."""

KINDS = {
    "facts": "query.facts",
    "text": "query.text",
    "fit": "train.fit",
    "score": "evaluate.score",
}
"""Kind of a request -> Flower's message type."""

PULL_EVERY = 0.5
"""Seconds between two checks for answers; the grid's ``send_and_receive`` waits three."""

WHY = {
    1: "its app could not be loaded: check that the same version of fedcache is installed there",
    2: "its app ended with an exception, which is in its log",
    3: "its node disconnected before it had sent the whole answer",
    5: GONE,
    8: "its app was killed",
}
"""Flower's error codes -> the reason in a message."""


def to_record(packed: PackedMessage) -> RecordDict:
    """A packed message as a record of Flower."""
    arrays = {n: Array(raw.dtype, raw.shape, STYPE, raw.data) for n, raw in packed.arrays.items()}
    words = ConfigRecord({"json": packed.words})
    return RecordDict({"words": words, "arrays": ArrayRecord(arrays)})


def from_record(record: RecordDict) -> PackedMessage:
    """The inverse of ``to_record``. Raises MalformedError for another record; ``unpack`` checks the content."""
    words = record.get("words")
    arrays = record.get("arrays")
    if not isinstance(words, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise MalformedError("its header or its arrays are missing")
    text = words.get("json")
    if not isinstance(text, str):
        raise MalformedError("its header is not text")
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
        self.bytes_down = 0
        self.bytes_up = 0

    def nodes(self) -> dict[int, str]:
        """Nodes that are online, each with the fingerprint of its public key."""
        return {node.node_id: sha256_hex(node.public_key) for node in self._grid.get_nodes()}

    def ask(self, kind: str, contents: Requests, timeout: float) -> Answers:
        """Send one message to each node; returns the answer of each, or why there is none."""
        requests = {}
        for node, content in contents.items():
            packed = pack(content)
            self.bytes_down += packed.bytes
            record = to_record(packed)
            requests[node] = Message(record, dst_node_id=node, message_type=KINDS[kind])
        answers: Answers = {}
        for node, reply in self.exchange(requests, timeout).items():
            if isinstance(reply, str):
                answers[node] = reply
                continue
            try:
                packed = from_record(reply.content)
                self.bytes_up += packed.bytes
                answers[node] = unpack(packed)
            except MalformedError as error:
                answers[node] = f"its answer is malformed: {error}"
        return answers

    def ask_sum(self, contents: Requests, bound: float, number: int, timeout: float) -> SecureSum:
        """As ``ask`` for ``fit``, but the server learns only the sum over the nodes."""
        records = {node: to_record(pack(content)) for node, content in contents.items()}
        return secure_sum(self, self._grid, records, bound=bound, number=number, timeout=timeout)

    def exchange(self, messages: Mapping[int, Message], timeout: float) -> dict[int, Message | str]:
        """Send one message to each node; returns the reply of each, or why there is none, in words."""
        replies: dict[int, Message | str] = {}
        waiting: dict[str, int] = {}
        for node, message in messages.items():
            replies[node] = "the SuperLink did not accept the message"
            # One message at a time, because all of them together can be too large for the SuperLink.
            for message_id in self._grid.push_messages([message]):
                if message_id:
                    waiting[message_id] = node
                    replies[node] = f"it did not answer within {timeout:g} s"
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            time.sleep(PULL_EVERY)
            for reply in self._grid.pull_messages(list(waiting)):
                # The sender of an error is the SuperLink, so the node is found by the message it answers.
                sender = waiting.pop(reply.metadata.reply_to_message_id, None)
                if sender is None:
                    continue
                replies[sender] = reply
                if reply.has_error():
                    error = reply.error
                    unknown = f"Flower's error {error.code}: {error.reason}"
                    replies[sender] = WHY.get(error.code, unknown)
        return replies
