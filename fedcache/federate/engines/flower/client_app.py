"""ClientApp: it answers every message from the site's own store, which the node's configuration names.

An app of ``fedcache flower app`` imports ``app`` from here; it contains no code of its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

from fedcache.config import Home
from fedcache.errors import FedcacheError, UsageError
from fedcache.federate.engines.flower.messages import SiteMessage, pack, refused, unpack
from fedcache.federate.engines.flower.processes import end_with_parent
from fedcache.federate.engines.flower.secure_aggregation import least_sites, vector_answer
from fedcache.federate.engines.flower.site import ShardSite, state_of
from fedcache.federate.engines.flower.transport import KINDS, from_record, to_record
from fedcache.store.store import Store

app = ClientApp()
NO_SHARD = (
    "The node was started without a shard. Start the node with:  fedcache flower site --shard PATH "
    "--superlink HOST:PORT"
)


def site_of(context: Context) -> ShardSite:
    """The site of a node's configuration: ``shard``, and perhaps ``name`` and ``state``."""
    config = context.node_config
    if "shard" not in config:
        raise SystemExit(NO_SHARD)
    path = Path(str(config["shard"]))
    name = None
    if config.get("name"):
        name = str(config["name"])
    if config.get("state"):
        state = Path(str(config["state"]))
    else:
        state = state_of(Home.from_environment().root, Store.open(path))
    return ShardSite(path, state, name)


def answered(kind: str, message: Message, context: Context) -> Message:
    """The reply to a message."""
    request = unpack(from_record(message.content))
    # A request for secure aggregation that arrives here would be answered without a mask.
    needs_mask = "secure" in request.words or context.node_config.get("masked-only")
    if kind == "fit" and needs_mask:
        answer = refused(
            UsageError(
                "This site sends uploads only under secure aggregation.",
                "Make the app again with --secure.",
            )
        )
    else:
        answer = _of_site(kind, request, context)
    return Message(to_record(pack(answer)), reply_to=message)


def _of_site(kind: str, request: SiteMessage, context: Context) -> SiteMessage:
    """The answer of the node's site; a store that cannot be opened becomes a refusal."""
    end_with_parent()
    try:
        return site_of(context).answer(kind, request)
    except FedcacheError as error:
        return refused(error)


def masked(message: Message, context: Context) -> Message:
    """The vector of a site's uploads, which ``secaggplus_mod`` masks."""
    request = unpack(from_record(message.content))
    answer = _of_site("fit", request, context)
    return vector_answer(message, answer)


for _kind, _type in KINDS.items():
    _category, _, _action = _type.partition(".")
    getattr(app, _category)(_action)(partial(answered, _kind))
# Messages of SecAgg+ have the type ``train`` without an action.
app.train(mods=[least_sites, secaggplus_mod])(masked)
