"""Rounds of runs with simulated time, by whatever execution computes their clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fedcache.errors import FedcacheError
from fedcache.federate.engine.outcome import RoundTraffic
from fedcache.federate.engine.simulated_time import TimedRun
from fedcache.federate.execution.executor import Executor


def timed_round(executor: Executor) -> tuple[tuple[int, ...], list[RoundTraffic | None]]:
    """One round of all points: the clients whose uploads it is made of, and the traffic of each point.

    What ends a point is in ``batch.failed``, as after ``Executor.train_round``.
    """
    points = cast(Sequence[TimedRun], executor.batch.points)
    first = points[0]
    round_ = points[0].round
    for point in points[1:]:
        point.schedule = first.schedule
    if first.rule.buffer is None:
        participation = executor.batch.participation
        drawn = first.sampler.drawn(round_, participation)
        took_part = tuple(first.sample(participation))
        trained = executor.train_round()
        first.schedule.wait(drawn, round_)
        return took_part, trained
    groups = first.begin_step()
    for point in points[1:]:
        point.join_step(first)
    # Clients that began with one model are one round of the executor: with its broadcast and that round's draws.
    for version, ids in groups.items():
        for point in points:
            point.round = version  # whose draws are made
        executor.one_round(ids, [point.versions[version] for point in points])
    failed = executor.batch.failed
    traffics: list[RoundTraffic | None] = [None] * len(points)
    for g, point in enumerate(points):
        point.round = round_
        if g in failed:
            continue
        try:
            traffics[g] = point.end_step()
        except FedcacheError as error:
            failed[g] = error
    return tuple(sorted(c for ids in groups.values() for c in ids)), traffics
