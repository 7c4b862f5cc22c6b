"""One federation from its plan to its results: what the ServerApp runs, with any carrier.

A result lies in ``runs/`` like every other. What determines it is what determines a run in one process, the digests of
the sites' stores, and that sites computed it. A federation in which a site was missing says so in its result, and is
run again when it is asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcache.config import Home, TrainConfig, to_table
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.engines.flower.membership import Facts
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.scoring import domain_names
from fedcache.federate.engines.flower.server import Running, Server, outcome_of
from fedcache.federate.engines.flower.sites import Carrier, Roster
from fedcache.federate.partition.partition import Client, Partition
from fedcache.progress import Observer
from fedcache.runs.directory import RunDirectory
from fedcache.runs.encoders import with_rounds
from fedcache.runs.events import Place, Teller
from fedcache.runs.identity import Identity
from fedcache.runs.loop import tell_chosen
from fedcache.runs.plugin_code import code_of
from fedcache.runs.prepare import Setting, find_method, parse_participation, parse_seeds
from fedcache.runs.results import Seeded, seed_record, summarise
from fedcache.runs.run import Run
from fedcache.runs.spec import resolved_config
from fedcache.runs.trust import policy_from_config
from fedcache.store.files import digest_of, sha256_hex


@dataclass
class Point:
    """One point of a plan.

    Attributes:
        swept: its values.
        config: as asked.
        setting: what the sites have, as a run has it.
        resolved: what determines the result.
        identity: digests of it.
        directory: where it lies.
        done: seeds that have ended.
    """

    swept: dict[str, str]
    config: TrainConfig
    setting: Setting
    resolved: dict[str, Any]
    identity: Identity
    directory: RunDirectory
    done: dict[int, Seeded]


def federate(plan: Plan, carrier: Carrier, home: Home, observer: Observer) -> list[Run]:
    """Run every point and seed of a plan over the sites that a carrier reaches, and store the results.

    Raises:
        FedcacheError: USAGE, STORE, FEDERATED.
    """
    began = time.perf_counter()
    method = find_method(str(plan.train.method))
    roster = Roster(carrier, plan.terms, _saying(observer))
    words = {"train": to_table(plan.train)}
    facts = [m.facts for m in roster.gather(words)]
    text = roster.text() if facts[0].text else None
    if text is not None and sha256_hex(text.numpy().tobytes()) != facts[0].text:
        raise FedcacheError(
            Exit.CORRUPT,
            f"Site {facts[0].name!r} sent class text features of another digest than its own.",
            "Run again.",
        )
    server = Server(roster)
    points = [_point(plan, swept, config, facts, text, home) for swept, config in plan.points]
    tell_chosen(method, plan.train, points[0].resolved, observer)
    runs: dict[int, Run] = {}
    todo = []
    for number, point in enumerate(points):
        stored = None if plan.fresh else point.directory.stored()
        if stored is not None and not stored.get("federation", {}).get("missed"):
            observer.note(f"The same run is there already ({point.directory.path.name}); --fresh runs it again.")
            runs[number] = Run(point.directory.path, stored, point.directory.measured() or {}, reused=True)
            continue
        if stored is not None:
            observer.note(f"The last run of {point.directory.path.name} lacked sites; it is run again.")
        _begin(point, fresh=plan.fresh or stored is not None)
        todo.append((number, point))
    common = {**words, "recipes": list(facts[0].recipes), "feat_post": facts[0].feat_post, "dtype": plan.train.dtype}
    jobs = [
        (number, point, seed, _running(point, seed, server, observer))
        for number, point in todo
        for seed in parse_seeds(point.config.seeds)
        if not _finished(point, seed)
    ]
    if jobs:
        total = sum(job.rounds for *_, job in jobs)
        observer.start(f"{method.name} over {len(facts)} sites", total, "rounds")
        try:
            server.train([job for *_, job in jobs], plan.train.eval_every, common)
        finally:
            observer.stop()
    failed: FedcacheError | None = None
    for _, point, seed, job in jobs:
        if job.failed is not None:
            failed = failed or job.failed
            continue
        assert job.dealt is not None
        setting = replace(point.setting, data=replace(point.setting.data, **_labels(job.dealt)))
        seconds = sum(r.seconds for r in job.records)
        point.done[seed] = seed_record(outcome_of(job, roster.members), setting, seconds)
    for number, point in todo:
        if len(point.done) == len(parse_seeds(point.config.seeds)):
            runs[number] = _finish(point, roster, time.perf_counter() - began, observer)
    if failed is not None:
        raise failed
    return [runs[number] for number in sorted(runs)]


def _saying(observer: Observer) -> Callable[[str], None]:
    def say(text: str) -> None:
        if text.startswith("warning: "):
            observer.warn(text.removeprefix("warning: "))
        else:
            observer.note(text)

    return say


def _point(
    plan: Plan, swept: dict[str, str], config: TrainConfig, facts: list[Facts], text: torch.Tensor | None, home: Home
) -> Point:
    setting = _setting(config, facts, text)
    resolved = resolved_config(setting, config)
    resolved |= {"device": "cpu", "engine": "flower"}
    seeds = parse_seeds(config.seeds)
    digest = setting.partitions[seeds[0]].digest
    identity = Identity(resolved, setting.features, setting.dataset["digest"], [digest] * len(seeds),
                        code_of(setting.method))  # fmt: skip
    directory = RunDirectory(Path(plan.runs) if plan.runs else home.runs, identity)
    return Point(swept, config, setting, resolved, identity, directory, {})


def _setting(config: TrainConfig, facts: list[Facts], text: torch.Tensor | None) -> Setting:
    """What the sites have, as a run has it: widths, classes, digests, and no row."""
    first = facts[0]
    method = find_method(str(config.method))
    hp = with_rounds(method.resolve(config.preset, config.set), config.rounds or method.defaults.rounds)
    hp = {**hp, **({"feat_post": first.feat_post} if "feat_post" in hp else {})}
    data = Data(
        x=torch.empty(0, first.views, sum(first.widths)),
        y=torch.empty(0, dtype=torch.int64),
        classes=len(first.classes),
        text=text,
        widths=first.widths,
        domain=torch.empty(0, dtype=torch.int64),
    )
    stores = digest_of([[f.name, f.dataset] for f in facts])
    parents = {f.parent for f in facts}
    dataset = {
        "slug": first.slug,
        "digest": first.parent if parents == {first.parent} and first.parent else stores,
        "rows": sum(f.rows for f in facts),
        "ok": sum(f.ok for f in facts),
    }
    # The rows are the sites' own: one stands for all, and the digests of their stores for which they are.
    one, none = np.zeros(1, np.int64), np.ones(1, np.int64)
    partition = Partition(
        scheme="sites",
        args={"stores": stores},
        seed=0,
        clients=tuple(Client(f.name, one, none) for f in facts),
        test=none,
        dataset=str(dataset["digest"]),
        pool=sum(f.train for f in facts),
        dropped=0,
    )
    return Setting(
        method=method,
        hp=hp,
        feat_post=first.feat_post,
        data=data,
        keys=list(first.keys),
        backbones=list(first.backbones),
        features=[*first.recipes, *([first.text] if first.text else [])],
        dataset=dataset,
        domains=tuple(domain_names(facts)),
        partitions=dict.fromkeys(parse_seeds(config.seeds), partition),
        named=None,
        templates=list(first.templates),
        classes=first.classes,
    )


def words_of(swept: Mapping[str, str]) -> str:
    """The swept values of a point in words."""
    return " ".join(f"{k}={v}" for k, v in swept.items())


def _labels(dealt: Data) -> dict[str, Any]:
    """What a result reads of the rows that counts were dealt out as."""
    return {"x": dealt.x.new_empty(len(dealt.y), 1, 0), "y": dealt.y, "domain": dealt.domain, "text": None}


def _begin(point: Point, *, fresh: bool) -> None:
    table = to_table(
        replace(
            point.config,
            rounds=point.resolved["rounds"],
            participation=point.resolved["participation"],
            set=point.resolved["set"],
            clients_from="sites",  # a directory of the same shards, for one who has them all
        )
    )
    point.directory.begin(table, {})
    if fresh:
        point.directory.restart()


def _finished(point: Point, seed: int) -> bool:
    found = point.directory.seed_result(seed)
    if found is not None:
        point.done[seed] = Seeded.from_dict(found)
    return found is not None


def _running(point: Point, seed: int, server: Server, observer: Observer) -> Running:
    """A seed, from its checkpoint when there is one; every round leaves one, as rounds cost seconds."""
    directory = point.directory
    saved = directory.checkpoint(seed)
    state = Snapshot(*saved) if saved is not None else None
    facts = {**point.resolved, "seeds": parse_seeds(point.config.seeds), "dataset": point.setting.dataset,
             "backbones": point.setting.backbones, "hyperparameters": point.resolved["set"]}  # fmt: skip
    teller = Teller(observer, directory.path, facts, Place(words_of(point.swept)))
    if state is not None:
        observer.note(f"Seed {seed}: going on after round {state.meta['round']}.")
        teller.again(seed, state.meta["records"])

    def told(number: int, metrics: dict[str, Any], traffic: dict[str, Any], snapshot: Callable[[], Snapshot]) -> None:
        teller.measured(seed, number, metrics, traffic)
        observer.advance(1)
        taken = snapshot()
        directory.save_checkpoint(seed, taken.tensors, taken.meta)

    return server.start(
        point.setting.method,
        point.setting.hp,
        point.setting.data,
        seed,
        id=digest_of([point.identity.digest, seed])[:24],
        rounds=int(point.resolved["rounds"]),
        participation=parse_participation(str(point.resolved["participation"])),
        dtype=getattr(torch, point.config.dtype),
        trust=policy_from_config(point.config, point.setting.method),
        told=told,
        state=state,
    )


def _finish(point: Point, roster: Roster, seconds: float, observer: Observer) -> Run:
    """Store the result of all seeds, with who was missing and when."""
    done = [point.done[seed] for seed in parse_seeds(point.config.seeds)]
    result: Mapping[str, Any] = summarise(point.setting, point.resolved, point.identity, done)
    federation = {
        "engine": "flower",
        "sites": [m.facts.name for m in roster.members],
        "missed": [asdict(m) for m in roster.missed],
        "joined": [asdict(m) for m in roster.joined],
    }
    measured = {
        "seconds": {"train": sum(d.seconds for d in done), "federation": seconds},
        "per_seed": {str(d.seed): d.measured for d in done},
        "wire": {"up_bytes": roster.carrier.bytes_up, "down_bytes": roster.carrier.bytes_down},
        "time": time.time(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    whole = point.directory.finish({**result, "federation": federation}, [r for d in done for r in d.rounds], measured)
    for warning in dict.fromkeys(w for d in done for w in d.warnings):
        observer.warn(warning)
    return Run(point.directory.path, whole, measured)
