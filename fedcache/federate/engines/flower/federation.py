"""One federation from its plan to its results: what the ServerApp runs, over any transport.

A result lies in ``runs/`` like every other. What determines it is what determines a run in one process, the digests of
the sites' stores, and that sites computed it. A federation in which a site was missing says so in its result, and is
run again when it is asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedcache.config import Home, to_table
from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.server import Server, outcome_of
from fedcache.federate.engines.flower.server_job import ServerJob
from fedcache.federate.engines.flower.site_facts import SiteFacts
from fedcache.federate.engines.flower.site_names import SiteNames
from fedcache.federate.engines.flower.site_rows import SiteRows
from fedcache.federate.engines.flower.sites import Sites, Transport
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.events import GridPosition
from fedcache.runs.forecast import training_run
from fedcache.runs.open_run import OpenRun, note_paper_choices, open_run, prepare_run
from fedcache.runs.run import Run
from fedcache.runs.running import owning
from fedcache.store.files import digest_of

CLAIMED = (
    "accuracy",
    "macro_f1",
    "confusion",
    "fairness",
    "classes_owned",
    "dataset.rows",
    "dataset.ok",
)
"""Figures of a result that are made of what sites say of themselves; what is not named here was measured here."""


def federate(
    plan: Plan, transport: Transport, home: Home, observer: Observer, names: SiteNames | None = None
) -> list[Run]:
    """Run every point and seed of a plan over the sites that a transport reaches, and store the results.

    ``names`` is the server's table of whose name is whose; None binds names for this run alone. Raises UsageError,
    StoreError, CorruptionError for a damaged table, FederatedRunError.
    """
    began = time.perf_counter()
    sites = Sites(transport, plan.terms, partial(_tell, observer), names)
    words = {"train": to_table(plan.train)}
    facts = [m.facts for m in sites.gather(words)]
    source = SiteRows(facts, _class_text(sites, facts[0]))
    points = _open_points(plan, source, home, observer)
    note_paper_choices(points[0].inputs, points[0].spec, observer)
    waiting = _begin_points(points, observer, fresh=plan.fresh)
    server = Server(sites, plan.secure_bound if plan.secure else None)
    jobs = [
        (run, seed, _start_seed(run, seed, server, observer))
        for run in waiting
        for seed in run.spec.seeds
        if not run.restore_seed(seed)
    ]
    if jobs:
        common = {
            **words,
            "recipes": list(facts[0].recipes),
            "feat_post": facts[0].feat_post,
            "dtype": plan.train.dtype,
        }
        observer.start(
            f"{points[0].spec.method} over {len(facts)} sites",
            sum(j.rounds for *_, j in jobs),
            "rounds",
        )
        try:
            with owning([run.directory.path for run in waiting], observer, Stop()):
                server.train([job for *_, job in jobs], plan.train.eval_every, common)
        finally:
            observer.stop()
    errors = []
    for run, _, job in jobs:
        if job.failed is not None:
            errors.append(job.failed)
            continue
        assert job.dealt is not None
        # What a result reads of the rows that counts were dealt out as: their labels and domains.
        y, domain = job.dealt.y, job.dealt.domain
        rows = replace(
            run.inputs.data, x=job.dealt.x.new_empty(len(y), 1, 0), y=y, domain=domain, text=None
        )
        scored = run.inputs.with_data(rows)
        run.end_seed(outcome_of(job, sites.members), sum(r.seconds for r in job.records), scored)
    for run in waiting:
        if len(run.done) == len(run.spec.seeds):
            run.stored = _finish(run, server, time.perf_counter() - began, observer)
    if errors:
        raise errors[0]
    return [run.stored for run in points if run.stored is not None]


def _tell(observer: Observer, text: str) -> None:
    if text.startswith("warning: "):
        observer.warn(text.removeprefix("warning: "))
    else:
        observer.note(text)


def _class_text(sites: Sites, first: SiteFacts) -> torch.Tensor | None:
    """The class text features that all sites have, where the method reads some."""
    if not first.text:
        return None
    return sites.text(first.text, len(first.classes))


def _open_points(plan: Plan, source: SiteRows, home: Home, observer: Observer) -> list[OpenRun]:
    """Every point of a plan as a run."""
    opened = []
    for swept, config in plan.points:
        # Who has all shards in one directory can run it again: the configuration names that directory.
        inputs = replace(prepare_run(config, source), seconds={})
        spec = inputs.resolve(replace(config, clients_from="sites"))
        # Sums are rounded under secure aggregation, so such a run has results of its own.
        engine = f"flower, secure sums within {plan.secure_bound:g}" if plan.secure else "flower"
        spec = replace(spec, device="cpu", engine=engine)
        runs = Path(plan.runs) if plan.runs else home.runs
        position = GridPosition(" ".join(f"{k}={v}" for k, v in swept.items()))
        opened.append(
            open_run(inputs, spec, runs, fresh=plan.fresh, observer=observer, position=position)
        )
    return opened


def _begin_points(points: Sequence[OpenRun], observer: Observer, *, fresh: bool) -> list[OpenRun]:
    """Begin the runs that are not there yet, or were made without some site."""
    begun = []
    for run in points:
        name = run.directory.path.name
        if run.stored is not None and not run.stored.result.get("federation", {}).get("missed"):
            observer.note(f"The same run is there already ({name}); --fresh runs it again.")
            continue
        if run.stored is not None:
            observer.note(f"The last run of {name} lacked sites; it is run again.")
        run.begin(fresh=fresh or run.stored is not None)
        run.stored = None
        begun.append(run)
    return begun


def _start_seed(run: OpenRun, seed: int, server: Server, observer: Observer) -> ServerJob:
    """A seed, from its checkpoint when there is one; every round leaves one, as rounds cost seconds."""
    state = run.checkpoint(seed)
    if state is not None:
        observer.note(f"Seed {seed}: going on after round {state.meta['round']}.")
        run.events.replay(seed, state.meta["records"])

    def round_ended(
        number: int,
        metrics: dict[str, Any],
        traffic: dict[str, Any],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        run.events.round_ended(seed, number, metrics, traffic)
        observer.advance(1)
        run.save_checkpoint(seed, snapshot())

    job_id = digest_of([run.identity.digest, seed])[:24]
    return server.start(
        training_run(run.inputs, run.spec, seed), run.inputs.settings, job_id, round_ended, state
    )


def _finish(run: OpenRun, server: Server, seconds: float, observer: Observer) -> Run:
    """Store the result of all seeds, with who was missing and when, and what the server saw of uploads."""
    sites, bound = server.sites, server.secure_bound
    federation: Mapping[str, Any] = {
        "engine": "flower",
        "uploads": "one by one"
        if bound is None
        else f"sums alone (SecAgg+), every number within {bound:g}",
        "sites": [m.facts.name for m in sites.members],
        # Sites score themselves: the server has no test row, so it can bound what they say and not check it.
        "claimed": list(CLAIMED),
        "missed": [asdict(m) for m in sites.missed],
        "joined": [asdict(m) for m in sites.joined],
    }
    wire = {"up_bytes": sites.transport.bytes_up, "down_bytes": sites.transport.bytes_down}
    return run.finish(
        observer,
        result={"federation": federation},
        seconds={"federation": seconds},
        measured={"wire": wire},
    )
