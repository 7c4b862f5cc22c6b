"""The loop of rounds over sites: what goes out, what comes back, who is missing. The server never sees a feature.

The runs are ``RunState`` as the in-process engine has them, over clients that have a name and a number of rows and no
row. All points and seeds that a site takes part in travel in one message, because a message costs seconds whatever is
in it. A site that does not answer, or whose upload is refused by update validation, is left out of the round and said
so; what it holds stays as it was after the last round in which the server has its upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcache.config import Home, to_table
from fedcache.errors import FedcacheError, FederatedRunError, UsageError
from fedcache.federate.engine.deployed import DeployedModel, no_training_rows
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import keep_down, sends_nothing
from fedcache.federate.engine.outcome import RoundRecord, Snapshot, TrainingOutput
from fedcache.federate.engine.run import TrainingRun
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.snapshots import resume_job, snapshot_of
from fedcache.federate.engines.flower.masking import LEAST_SITES, Masking
from fedcache.federate.engines.flower.messages import SiteMessage, refusal_of
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.server_job import OnRound, ServerJob
from fedcache.federate.engines.flower.site import SiteJob
from fedcache.federate.engines.flower.site_names import SiteNames
from fedcache.federate.engines.flower.sites import (
    Member,
    MissedSite,
    SecureSum,
    SiteFacts,
    SiteRows,
    Sites,
    Transport,
    rows_of,
    score_counts,
)
from fedcache.federate.trust.pipeline import RejectedUpload
from fedcache.heads.linear import Tree
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.directory import owning
from fedcache.runs.events import GridPosition
from fedcache.runs.forecast import training_run
from fedcache.runs.loop import OpenRun, note_paper_choices, open_run, prepare_run
from fedcache.runs.run import Run
from fedcache.store.files import digest_of

# A round of secure aggregation as the server's loop takes it: for each job the pooled sums, and
# who is in them.


UPLOAD_BYTES = 8
"""Of each number of a masked vector."""


@dataclass(frozen=True)
class SummedUploads:
    """What a server learns of a job's round."""

    clients: Sequence[int] = ()  # who is in the sums, in client order
    # as ``UploadPipeline.add_sum``
    sums: Mapping[str, tuple[Tensor, torch.dtype]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)  # client -> why it is not in them
    failed: str = ""  # why there are no sums; "" when there are
    sent: tuple[int, int] = (0, UPLOAD_BYTES)  # numbers that each client sent, and bytes of one


def summed_round(
    sites: Sites,
    jobs: Sequence[ServerJob],
    samples: Sequence[Sequence[int]],
    downs: Sequence[Tree],
    words: Callable[[Sequence[ServerJob], int], Mapping[str, Any]],
    bound: float,
) -> list[SummedUploads]:
    """One round of every job. Jobs of the same clients travel together, as one vector.

    Args:
        sites: who takes part.
        jobs: with ``samples``, the clients of their rounds, and ``downs``, what those are sent.
        words: of the message with some jobs to a client.
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
        secure = [m.to_words() for m in maskings]
        messages = {}
        places = {}
        for client in clients:
            node = sites.members[client].node
            message = words([jobs[g] for g in group], client)
            message = {**message, "weight": weights[client], "secure": secure}
            messages[node] = SiteMessage(message, [downs[g] for g in group])
            places[node] = client
        number = jobs[group[0]].run.round + 1
        got = sites.transport.ask_sum(messages, bound, number, sites.terms.timeout)
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


class Server:
    """A federation as its server sees it; ``sites`` have been gathered.

    With a ``secure_bound`` it is given sums of uploads alone, and every number of an upload lies within that bound.
    """

    def __init__(self, sites: Sites, secure_bound: float | None = None) -> None:
        self.sites = sites
        self.secure_bound = secure_bound

    def start(
        self,
        spec: TrainingRun,
        hp: Mapping[str, Value],
        job_id: str,
        on_round: OnRound,
        state: Snapshot | None = None,
    ) -> ServerJob:
        """One point and seed, from the beginning or from a snapshot.

        ``spec`` is as in ``engine.run``, and its data has no row: widths, views, classes and text are read of it.
        """
        clients = [rows_of(m.facts) for m in self.sites.members]
        leaves_out = spec.trust.on_bad == "reject"
        # Where nothing is sent there is nothing to leave out.
        trust = spec.trust
        if spec.method.uploads is sends_nothing:
            trust = replace(trust, on_bad="fail")
        run = RunState(spec.method, hp, spec.data, clients, spec.seed, spec.dtype, trust=trust)
        run.keeps_uploads = self.secure_bound is None and spec.method.uploads is not sends_nothing
        run.start()
        if spec.method.one_shot:
            rounds = 1
        else:
            rounds = spec.rounds
        made = ServerJob(job_id, run, rounds, spec.participation, on_round, leaves_out)
        made.shapes = {k: tuple(t.shape) for k, t in run.server.items()}
        if state is not None:
            made.records = resume_job(run, state)
            made.latest = {client: r.round for r in made.records for client in r.clients}
        return made

    def train(self, jobs: Sequence[ServerJob], eval_every: int, common: Mapping[str, Any]) -> None:
        """All rounds of all jobs, as many as are open in one message to each site; also scored every k-th round.

        Each job, from ``start``, ends with ``evaluation`` or ``failed``. ``common`` are words of every message. Raises
        FederatedRunError, when too few sites answer.
        """
        while going := [job for job in jobs if job.open]:
            for member in self.sites.newcomers(going[0].run.round + 1):
                self._join(going, member)
            began = time.perf_counter()
            samples = [job.run.sample(job.participation) for job in going]
            downs = [job.run.down() for job in going]
            answers = self._round(going, samples, downs, common)
            seconds = (time.perf_counter() - began) / len(going)
            ended = []
            due = []
            for job, sample, down, got in zip(going, samples, downs, answers, strict=True):
                merged = self._merge(job, sample, down, got)
                if merged is None:
                    continue
                ended.append((job, *merged))
                if not job.open or (eval_every > 0 and job.run.round % eval_every == 0):
                    due.append(job)
            self._score(due, common)
            for job, ids, traffic in ended:
                self._record(job, ids, traffic, seconds, job in due)
        # A run that was resumed after its last round is scored again.
        self._score([job for job in jobs if job.failed is None and job.evaluation is None], common)

    def _round(
        self,
        jobs: Sequence[ServerJob],
        samples: Sequence[Sequence[int]],
        downs: Sequence[Tree],
        common: Mapping[str, Any],
    ) -> Sequence[Mapping[int, Tree | str] | SummedUploads]:
        """For each job the uploads of its clients, or why there is none; their sums under secure aggregation."""
        if self.secure_bound is not None:
            to_client = partial(self._words, common=common, ahead=1)
            return summed_round(self.sites, jobs, samples, downs, to_client, self.secure_bound)
        found: list[dict[int, Tree | str]] = [{} for _ in jobs]
        messages = {}
        about = {}
        for client, member in enumerate(self.sites.members):
            mine = [g for g, sample in enumerate(samples) if client in sample]
            if mine:
                words = self._words([jobs[g] for g in mine], client, common, ahead=1)
                messages[member.node] = SiteMessage(words, [downs[g] for g in mine])
                about[member.node] = (client, mine)
        for node, answer in self.sites.ask("fit", messages).items():
            client, mine = about[node]
            sound = _sound(answer)
            for place, g in enumerate(mine):
                if isinstance(sound, str):
                    found[g][client] = f"{NO_ANSWER}{sound}"
                else:
                    found[g][client] = self._checked(jobs[g], client, sound, place)
        return found

    def _checked(self, job: ServerJob, client: int, answer: SiteMessage, place: int) -> Tree | str:
        """An upload that update validation accepts, or why it does not."""
        try:
            told = answer.words["jobs"][place]
            up = dict(answer.trees[place])
            sent_in = job.answered(client, told)
        except ValueError as error:
            return str(error)
        except (LookupError, TypeError) as error:
            return f"its words are malformed ({type(error).__name__})"
        rows = float(self.sites.members[client].facts.train)
        why = job.run.update_validation().problem(up, rows, sent_in=sent_in)
        if why is None:
            return up
        return why

    def _merge(
        self,
        job: ServerJob,
        sample: Sequence[int],
        down: Tree,
        got: Mapping[int, Tree | str] | SummedUploads,
    ) -> tuple[list[int], Any] | None:
        """Pool what came and end the round; None when that ended the job."""
        run = job.run
        number = job.run.round + 1
        if isinstance(got, SummedUploads):
            summed = got
            ups = dict[int, Tree]()
            ids = sorted(summed.clients)
            told = {client: f"{NO_ANSWER}{why}" for client, why in summed.missing.items()}
        else:
            summed = None
            ups = {c: up for c, up in got.items() if not isinstance(up, str)}
            ids = sorted(ups)
            told = {client: why for client, why in got.items() if isinstance(why, str)}
        reasons = {c: told.get(c, f"{NO_ANSWER}it was not heard") for c in sample if c not in ids}
        try:
            _check_model_was_usable(job, number, sample, reasons)
            for client, why in sorted(reasons.items()):
                self._left_out(job, client, number, why)
            if summed is not None and summed.failed:
                raise FederatedRunError(
                    f"Round {number}: secure aggregation gave no sum: {summed.failed}.",
                    "The sites' logs say why; run again: it goes on after the last whole round.",
                )
            self._check_quorum(number, ids, sample, reasons)
            pipeline = run.upload_pipeline(ids, down, job.participation)
            for client in ids if summed is None else ():
                pipeline.add(ups[client], client, validated=True)
            if summed is not None:
                pipeline.add_weights(ids)
                for name, (total, dtype) in summed.sums.items():
                    pipeline.add_sum(name, total, dtype)
            already = len(run.rejected)
            pooled = run.pooled(pipeline, ids)
            # Sound by themselves, but the server cannot aggregate with them.
            for rejected in run.rejected[already:]:
                self._say_rejected(number, rejected.client, rejected.why)
                reasons[rejected.client] = rejected.why
                ids.remove(rejected.client)
            self._check_quorum(number, ids, sample, reasons)
            sent = [run.upload_size(ups[c]) if summed is None else summed.sent for c in ids]
            traffic = run.finish(ids, down, pooled, sent)
        except FedcacheError as error:
            job.failed = error
            return None
        job.latest |= dict.fromkeys(ids, number)
        return ids, traffic

    def _check_quorum(
        self, number: int, ids: Sequence[int], sample: Sequence[int], reasons: Mapping[int, str]
    ) -> None:
        """Refuse a round with too few sound uploads; ``reasons`` say why clients of the sample have none."""
        if len(ids) >= self.sites.terms.quorum:
            return
        named = ""
        if reasons:
            client = min(reasons)
            name = self.sites.members[client].facts.name
            why = reasons[client].removeprefix(NO_ANSWER).rstrip(".")
            named = f"; site {name!r} is out because: {why}"
        quorum = self.sites.terms.quorum
        raise FederatedRunError(
            f"Round {number}: {len(ids)} of {len(sample)} sites have a sound upload, and {quorum} are needed{named}.",
            "Start or mend the missing sites and run again: it goes on after the last whole round.",
        )

    def _left_out(self, job: ServerJob, client: int, number: int, why: str) -> None:
        """Note a site whose upload is not in a round; one that is refused ends a run that was not told otherwise."""
        name = self.sites.members[client].facts.name
        run = job.run
        if why.startswith(NO_ANSWER):
            why = why.removeprefix(NO_ANSWER)
            self.sites.miss(
                number, name, why, f"round {number} goes on without site {name!r}: {why}."
            )
            run.warnings.append(f"round {number} went on without site {name!r}: {why}")
            return
        if not job.leaves_out:
            raise run.update_validation().refusal(client, name, why)
        run.rejected.append(RejectedUpload(number, client, why))
        self._say_rejected(number, client, why)
        run.warnings.append(
            f"round {number}: the upload of client {client} ({name!r}) is rejected: {why}"
        )

    def _say_rejected(self, number: int, client: int, why: str) -> None:
        """Name the site of a rejected upload in the result and in the log."""
        name = self.sites.members[client].facts.name
        rejected = f"the upload of site {name!r} is rejected: {why}."
        self.sites.missed.append(MissedSite(number, name, f"its upload is rejected: {why}"))
        self.sites.say(f"warning: round {number}: {rejected}")

    def _score(self, jobs: Sequence[ServerJob], common: Mapping[str, Any]) -> None:
        """Ask every site for its counts, and make of them what the in-process evaluation makes of predictions."""
        if not jobs:
            return
        downs = [job.run.down() for job in jobs]
        messages = {}
        for client, member in enumerate(self.sites.members):
            words = self._words(jobs, client, common)
            messages[member.node] = SiteMessage(words, downs)
        answers = self.sites.ask("score", messages)
        facts = [member.facts for member in self.sites.members]
        for g, job in enumerate(jobs):
            counts: dict[int, Tensor] = {}
            for client, member in enumerate(self.sites.members):
                read: SiteMessage | Tensor | str = _sound(answers[member.node])
                if isinstance(read, SiteMessage):
                    read = checked_counts(read, g, member.facts)
                if isinstance(read, Tensor):
                    counts[client] = read
                    continue
                name = member.facts.name
                warning = f"site {name!r} is not scored: {read}"
                self.sites.miss(job.run.round, name, f"not scored: {read}", f"{warning}.")
                job.run.warnings.append(warning)
            job.evaluation, job.dealt = score_counts(job.run, facts, counts)

    def _record(
        self, job: ServerJob, ids: Sequence[int], traffic: Any, seconds: float, measured: bool
    ) -> None:
        run = job.run
        if measured:
            diagnostics = run.diagnose()
        else:
            diagnostics = {}
        if job.leaves_out or not run.trust.plain:
            diagnostics["rejected"] = float(sum(r.round == run.round for r in run.rejected))
        accuracy = None
        if measured and job.evaluation is not None:
            accuracy = job.evaluation.accuracy
        job.records.append(
            RoundRecord(run.round, tuple(ids), seconds, accuracy, traffic, diagnostics)
        )
        metrics = {"accuracy": accuracy, "seconds": seconds, "clients": len(ids), **diagnostics}
        job.on_round(run.round, metrics, asdict(traffic), partial(snapshot_of, run, job.records))

    def _words(
        self, jobs: Sequence[ServerJob], client: int, common: Mapping[str, Any], ahead: int = 0
    ) -> dict[str, Any]:
        """Words of one message to a client; ``ahead`` is 1 for the round after the last that each job has ended."""
        told = []
        for job in jobs:
            run = job.run
            # Tensors of a setting travel in the trees.
            hp = {k: v for k, v in run.hp.items() if not isinstance(v, Tensor)}
            site = SiteJob(job.id, hp, run.seed, run.round + ahead, job.latest.get(client, 0))
            told.append(site.to_words())
        return {**common, "jobs": told, "clients": len(self.sites.members), "client": client}

    def _join(self, jobs: Sequence[ServerJob], member: Member) -> None:
        name = member.facts.name
        number = jobs[0].run.round + 1
        for job in jobs:
            run = job.run
            wider = RunState(
                run.method,
                run.hp,
                run.data,
                [*run.clients, rows_of(member.facts)],
                run.seed,
                run.env.dtype,
                trust=run.trust,
            )
            wider.keeps_uploads = run.keeps_uploads
            wider.start()
            if {k: tuple(t.shape) for k, t in wider.server.items()} != job.shapes:
                why = "came late, and the method has no place for it"
                kept = f"{run.method.name} keeps a place for each site it began with"
                self.sites.miss(number, name, why, f"site {name!r} came late: {kept}.")
                return
            wider.server = run.server
            wider.round = run.round
            wider.warnings = run.warnings
            wider.rejected = run.rejected
            wider.traffic.up[: len(run.traffic.up)] = run.traffic.up
            wider.traffic.down[: len(run.traffic.down)] = run.traffic.down
            wider.traffic.rounds = run.traffic.rounds
            wider.met[: len(run.met)] = run.met
            wider.warnings.append(f"site {name!r} joined in round {number}")
            job.run = wider
        self.sites.members.append(member)
        self.sites.joined.append(MissedSite(number, name, "joined"))
        self.sites.say(f"Site {name!r} joins in round {number}.")


NO_ANSWER = "no answer: "
"""Marks why a site has no upload at all, apart from why an upload is refused."""


def _check_model_was_usable(
    job: ServerJob, number: int, sample: Sequence[int], reasons: Mapping[int, str]
) -> None:
    """Refuse a round in which most sites cannot train from the model, and name none of them.

    Raises FederatedRunError, when more than half of the sites of a round send unsound uploads though their uploads of
    the round before were sound.
    """
    turned = [
        client
        for client, why in sorted(reasons.items())
        if not why.startswith(NO_ANSWER) and job.latest.get(client, 0) == number - 1
    ]
    if number == 1 or 2 * len(turned) <= len(sample):
        return
    raise FederatedRunError(
        f"Round {number}: the uploads of {len(turned)} of {len(sample)} sites are unsound, and those of the same sites "
        f"in round {number - 1} were sound. The model of round {number - 1} is the cause, and no site is to blame for "
        f"its own upload. One of them is unsound because {reasons[turned[0]].rstrip('.')}.",
        "Begin again with a rule that one upload cannot move far, for example --aggregate median, or with a lower "
        "learning rate.",
    )


def _sound(answer: SiteMessage | str) -> SiteMessage | str:
    """An answer that is no refusal, else why there is none."""
    if isinstance(answer, str):
        refusal = None
    else:
        refusal = refusal_of(answer)
    if refusal is None:
        return answer
    return refusal.message


def checked_counts(answer: SiteMessage, place: int, facts: SiteFacts) -> Tensor | str:
    """The counts of one job, checked, or what is wrong with them."""
    C = len(facts.classes)
    try:
        counts = answer.trees[place]["counts"]
    except (KeyError, IndexError):
        return "it sent no counts"
    if tuple(counts.shape) != (len(facts.domains), C, C + 1) or counts.dtype != torch.int64:
        return f"its counts have shape {tuple(counts.shape)}"
    if (counts < 0).any() or (counts > facts.test).any() or int(counts.sum()) > facts.test:
        return f"it counts more than its {facts.test} test rows"
    return counts


def _server_model(run: RunState) -> DeployedModel | None:
    """The one model for all; None where it is made of rows that the server has not, or every site has its own."""
    method = run.method
    if method.protocol(run.hp) != "global" or method.deploy is not keep_down:
        return None
    return DeployedModel(method, run.down(), {}, no_training_rows(method.name), run.server_ctx())


def outcome_of(job: ServerJob, members: Sequence[Member]) -> TrainingOutput:
    """What the in-process engine returns of a run."""
    run = job.run
    evaluation = job.evaluation
    assert evaluation is not None

    def predict(_x: Tensor) -> Tensor:
        raise UsageError("The server has no features to predict.", "Ask a site.")

    return TrainingOutput(
        method=run.method.name,
        hp=dict(run.hp),
        seed=run.seed,
        protocol=run.method.protocol(run.hp),
        evaluation=evaluation,
        records=tuple(job.records),
        traffic=run.traffic,
        fidelity=run.method.faithful(run.hp, run.env.views),
        execution="sequential",
        chunk=1,
        points=1,
        threads=torch.get_num_threads(),
        dtype=run.env.dtype,
        clients=tuple(m.facts.name for m in members),
        classes_owned=tuple(m.facts.owned for m in members),
        trainable=run.method.trainable(run.server, job.outline),
        server=run.server,
        states={},
        warnings=tuple(run.warnings),
        attackers=(),
        predict=predict,
        deployed=lambda client: _server_model(run) if client is None else None,
        broadcast=run.down,
    )


# One federation from its plan to its results: what the ServerApp runs, over any transport.
#
# A result lies in ``runs/`` like every other. What determines it is what determines a run in one
# process, the digests of the sites' stores, and that sites computed it. A federation in which a
# site was missing says so in its result, and is run again when it is asked for again.


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
        y = job.dealt.y
        domain = job.dealt.domain
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
        engine = "flower"
        if plan.secure:
            engine = f"flower, secure sums within {plan.secure_bound:g}"
        spec = replace(spec, device="cpu", engine=engine)
        if plan.runs:
            runs = Path(plan.runs)
        else:
            runs = home.runs
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
    sites = server.sites
    bound = server.secure_bound
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
