"""Secure aggregation by Flower's SecAgg+ (Bell et al., CCS 2020): the server learns a round's sum and no single upload.

One round has four exchanges with every site: public keys, encrypted shares of secrets, the masked vector, and the
shares that remove the masks from the sum of the received vectors. The protocol is Flower's (``SecAggPlusWorkflow`` at
the server, ``secaggplus_mod`` at the sites). This module passes it the vectors of ``masking`` and reads the sum.

The protection is that of Flower. Flower 1.41 reduces the key of every mask to 32 bits before it draws the mask
(``pseudo_rand_gen``), so an attacker who records the messages can remove masks by trying 2^32 seeds. The server is
assumed to follow the protocol (honest but curious).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid

from fedcache.federate.engines.flower.masking import LEAST_SITES, MODULUS, levels_for
from fedcache.federate.engines.flower.messages import SiteMessage, refusal_of
from fedcache.federate.engines.flower.sites import SecureSum
from fedcache.parsing import Facts, parse_json


def least_that_stay(sites: int) -> int:
    """The number of sites that must stay to the end of a round: two thirds, rounded up, at least ``LEAST_SITES``.

    It is also the number of shares that reveal the secrets of a site that left.
    """
    return max(LEAST_SITES, -(-2 * sites // 3))


NUMBER_BYTES = 8
"""Bytes that are counted for a number in a message."""


class MessageExchange(Protocol):
    """Sends one Flower message to each node and waits for the answers; ``transport.FlowerTransport`` is one."""

    bytes_down: int
    bytes_up: int

    def exchange(self, messages: Mapping[int, Message], timeout: float) -> dict[int, Message | str]:
        """The answer of each node, or why there is none, in words."""


class _RoundStrategy(FedAvg):  # type: ignore[misc]  # Flower is an extra that the linters do not have
    """The strategy of one round, in the form that SecAgg+ needs: the nodes to send to, and their answers."""

    def __init__(self, nodes: Iterable[int], grid: Grid) -> None:
        super().__init__()
        run_id = grid.run.run_id
        self._requests = []
        for node in nodes:
            proxy = GridClientProxy(node, grid, run_id)
            self._requests.append((proxy, FitIns(Parameters([], ""), {})))
        self.answers: dict[int, FitRes] = {}

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        """A request to every node of the round."""
        return self._requests

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Keep the answers of the nodes in the sum; each holds the mean of all vectors."""
        self.answers = {proxy.node_id: answer for proxy, answer in results}
        return None, {}


class _PollingGrid:
    """Grid for SecAgg+ that uses the transport's short polling interval, and keeps errors and bytes by node."""

    def __init__(self, transport: MessageExchange, grid: Grid) -> None:
        self._transport = transport
        self._grid = grid
        self.errors: dict[int, str] = {}

    @property
    def run(self) -> Any:
        """The run, which Flower's proxies read."""
        return self._grid.run

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """The answers to some messages; nodes without an answer are added to ``errors``."""
        requests = {message.metadata.dst_node_id: message for message in messages}
        answers = []
        for node, answer in self._transport.exchange(requests, timeout or math.inf).items():
            if isinstance(answer, str):
                self.errors[node] = answer
            else:
                answers.append(answer)
        self._transport.bytes_down += sum(map(_size, requests.values()))
        self._transport.bytes_up += sum(map(_size, answers))
        return answers


def _size(message: Message) -> int:
    """Bytes of the content of a message, without the overhead of the transport."""
    size = 0
    for record in message.content.values():
        size += sum(map(_bytes_of, record.values()))
    return size


def _bytes_of(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    if isinstance(value, Array):
        return len(value.data)
    if isinstance(value, bytes | str):
        return len(value)
    return NUMBER_BYTES


def secure_sum(
    transport: MessageExchange,
    grid: Grid,
    contents: Mapping[int, RecordDict],
    bound: float,
    number: int,
    timeout: float,
) -> SecureSum:
    """Run one round of SecAgg+ over some nodes.

    Args:
        transport: carries messages to nodes.
        grid: of the running ServerApp.
        contents: node -> its ``fit`` request, as ``to_record`` packs it.
        bound: largest absolute value of a number in a vector.
        number: of the round.
        timeout: seconds for each of the four exchanges.
    """
    polled = _PollingGrid(transport, grid)
    round_ = _RoundStrategy(contents, cast(Grid, polled))
    workflow = SecAggPlusWorkflow(
        1.0,  # each site gives all sites a share of its secrets
        least_that_stay(len(contents)),  # number of shares that reveal a secret
        max_weight=1.0,
        clipping_range=bound,
        quantization_range=levels_for(len(contents)),
        modulus_range=MODULUS,
        timeout=timeout,
    )
    configs = ConfigRecord({WorkflowKey.CURRENT_ROUND: number})
    state = RecordDict({MAIN_CONFIGS_RECORD: configs, MAIN_PARAMS_RECORD: ArrayRecord()})
    app_context = Context(grid.run.run_id, 0, {}, state, {})
    context = LegacyContext(app_context, strategy=round_)
    progress = WorkflowState()
    stages = (
        (workflow.setup_stage, "the exchange of keys"),
        (workflow.share_keys_stage, "the exchange of shares"),
        (workflow.collect_masked_vectors_stage, "the masked uploads"),
        (workflow.unmask_stage, "taking the masks off"),
    )
    for stage, name in stages:
        failed = ""
        try:
            if not stage(cast(Grid, polled), context, progress):
                failed = f"too few sites were left in {name}"
        except Exception as error:
            failed = f"an answer in {name} is malformed ({type(error).__name__})"
        if failed:
            return SecureSum({}, torch.zeros(0), polled.errors, failed)
        # The setup makes empty requests for the third stage; they get their content here.
        if stage == workflow.setup_stage:
            for node, content in contents.items():
                progress.nid_to_fitins[node].update(content)
    # SecAgg+ writes the mean over the received vectors into the answer of each node that sent a vector.
    words = {node: _words(answer) for node, answer in round_.answers.items()}
    first = next(iter(round_.answers.values()))
    mean = parameters_to_ndarrays(first.parameters)[0]
    total = torch.from_numpy(np.asarray(mean, np.float64)) * len(words)
    return SecureSum(words, total, polled.errors, "")


def _words(answer: FitRes) -> Facts:
    """The words that a site sent with its vector; {} if they are no table."""
    try:
        found = parse_json(str(answer.metrics.get("words")))
    except ValueError:
        return {}
    if isinstance(found, dict):
        return found
    return {}


def least_sites(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Check of a site before ``secaggplus_mod``: refuse a round whose sum would reveal the site's upload.

    Raises ValueError, so that the site sends no answer.
    """
    configs = message.content.config_records[RECORD_KEY_CONFIGS]
    if configs.get(Key.STAGE) == Stage.SETUP:
        sites = int(configs[Key.SAMPLE_NUMBER])
        shares = int(configs[Key.SHARE_NUMBER])
        needed = int(configs[Key.THRESHOLD])
        # With half of the shares or less, two disjoint groups of sites could each reveal a secret.
        is_secret = needed >= LEAST_SITES and 2 * needed > shares
        is_complete = sites >= LEAST_SITES and shares == sites
        if not is_secret or not is_complete:
            raise ValueError(
                f"secure aggregation among {sites} sites, with {shares} shares and a threshold of {needed}, does not "
                f"hide an upload: expected {LEAST_SITES} sites or more, one share for each site, and a threshold of "
                f"at least {LEAST_SITES} and of more than half of the shares"
            )
    return call_next(message, context)


def vector_answer(message: Message, answer: SiteMessage) -> Message:
    """A site's answer to the third exchange, which ``secaggplus_mod`` masks before it is sent.

    Raises ValueError for a site's refusal, so that nothing is sent; the refusal is in the site's log.
    """
    refusal = refusal_of(answer)
    if refusal is not None:
        raise ValueError(str(refusal))
    vector = torch.cat([tree["vector"] for tree in answer.trees]).numpy()
    parameters = ndarrays_to_parameters([vector])
    words = {"words": json.dumps(answer.words)}
    # 1 example for every site, because the vector already has the weight of the site's rows.
    result = FitRes(Status(Code.OK, ""), parameters, 1, words)
    return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)
