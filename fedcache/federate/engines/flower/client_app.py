"""The ClientApp: every message is answered by the site's own store, which the node's configuration names.

An app made by ``fedcache flower app`` imports ``app`` from here; nothing of a run is in the app itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.federate.engines.flower.messages import pack, refused, unpack
from fedcache.federate.engines.flower.site import ShardSite, state_of
from fedcache.federate.engines.flower.transport import KINDS, from_record, to_record
from fedcache.store.store import Store

app = ClientApp()
NO_SHARD = "The node was started without a shard.  fedcache flower site --shard PATH --superlink HOST:PORT"


def site_of(context: Context) -> ShardSite:
    """The site of a node's configuration: ``shard``, and perhaps ``name`` and ``state``."""
    config = context.node_config
    if "shard" not in config:
        raise SystemExit(NO_SHARD)
    path = Path(str(config["shard"]))
    name = str(config["name"]) if config.get("name") else None
    if config.get("state"):
        return ShardSite(path, Path(str(config["state"])), name)
    return ShardSite(path, state_of(Home.from_environment().root, Store.open(path)), name)


def answered(kind: str, message: Message, context: Context) -> Message:
    """The reply to a message."""
    try:
        answer = site_of(context).answer(kind, unpack(from_record(message.content)))
    except FedcacheError as error:  # the store itself cannot be opened
        answer = refused(error)
    return Message(to_record(pack(answer)), reply_to=message)


for _kind, _type in KINDS.items():
    _category, _, _action = _type.partition(".")
    getattr(app, _category)(_action)(partial(answered, _kind))
