"""A round of secure aggregation as the server's loop takes it: for each job the pooled sums, and who is in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcache.federate.engines.flower.masking import LEAST_SITES, Masking
from fedcache.federate.engines.flower.messages import SiteMessage
from fedcache.federate.engines.flower.server_job import ServerJob
from fedcache.federate.engines.flower.sites import SecureSum, Sites
from fedcache.heads.linear import Tree

UPLOAD_BYTES = 8
"""Of each number of a masked vector."""


@dataclass(frozen=True)
class SummedUploads:
    """What a server learns of a job's round."""

    clients: Sequence[int] = ()  # who is in the sums, in client order
    sums: Mapping[str, tuple[Tensor, torch.dtype]] = field(
        default_factory=dict
    )  # as ``UploadPipeline.add_sum``
    missing: Mapping[int, str] = field(default_factory=dict)  # client -> why it is not in them
    failed: str = ""  # why there are no sums; "" when there are
    sent: tuple[int, int] = (0, UPLOAD_BYTES)  # numbers that each client sent, and bytes of one


def summed_round(
    sites: Sites,
    jobs: Sequence[ServerJob],
    samples: Sequence[Sequence[int]],
    downs: Sequence[Tree],
    common: Mapping[str, Any],
    words: Callable[[ServerJob, int], Mapping[str, Any]],
    bound: float,
) -> list[SummedUploads]:
    """One round of every job. Jobs of the same clients travel together, as one vector.

    Args:
        sites: who takes part.
        jobs: with ``samples``, the clients of their rounds, and ``downs``, what those are sent.
        common: words of every message.
        words: what a client is told of a job.
        bound: within which every number of a vector lies.
    """
    found = [SummedUploads()] * len(jobs)
    groups: dict[tuple[int, ...], list[int]] = {}
    for g, sample in enumerate(samples):
        groups.setdefault(tuple(sorted(sample)), []).append(g)
    for clients, group in groups.items():
        if len(clients) < LEAST_SITES:
            why = f"{len(clients)} sites are in it, and the sum of fewer than {LEAST_SITES} tells what each sent"
            for g in group:
                found[g] = SummedUploads(failed=why)
            continue
        weights = {client: jobs[group[0]].run.client_rows[client] for client in clients}
        scale = float(max(weights.values()))
        maskings = []
        for g in group:
            run = jobs[g].run
            maskings.append(
                Masking.of(run.method, run.hp, run.expected_uploads(), downs[g], scale, bound)
            )
        asked = {
            sites.members[client].node: SiteMessage(
                {
                    **common,
                    "jobs": [words(jobs[g], client) for g in group],
                    "clients": len(sites.members),
                    "client": client,
                    "weight": weights[client],
                    "secure": [m.to_words() for m in maskings],
                },
                [downs[g] for g in group],
            )
            for client in clients
        }
        number = jobs[group[0]].run.round + 1
        got = sites.transport.ask_sum(asked, bound, number, sites.terms.timeout)
        places = {sites.members[client].node: client for client in clients}
        start = 0
        for place, (g, masking) in enumerate(zip(group, maskings, strict=True)):
            part = got.total[start : start + masking.size]
            start += masking.size
            found[g] = _read(jobs[g], got, part, place, masking, downs[g], places, weights)
    return found


def _read(
    job: ServerJob,
    got: SecureSum,
    total: Tensor,
    place: int,
    masking: Masking,
    down: Tree,
    places: Mapping[int, int],
    weights: Mapping[int, float],
) -> SummedUploads:
    """One job's part of a sum."""
    missing = {places[node]: why for node, why in got.missing.items() if node not in got.words}
    if got.failed:
        return SummedUploads(missing=missing, failed=got.failed)
    clients = sorted(places[node] for node in got.words)
    for node, told in got.words.items():
        try:
            sound = job.answered(places[node], told["jobs"][place]) == job.run.round + 1
        except (LookupError, TypeError, ValueError):
            sound = False
        if not sound:  # its vector cannot be taken out of the sum
            return SummedUploads(
                missing=missing, failed=f"client {places[node]} answered another round or job"
            )
    if len(total) != masking.size or not bool(torch.isfinite(total).all()):
        return SummedUploads(
            missing=missing, failed=f"the sum has {len(total)} finite numbers of {masking.size}"
        )
    sums = masking.sums(total, down, [weights[client] for client in clients])
    return SummedUploads(clients, sums, missing, sent=(masking.size, UPLOAD_BYTES))
