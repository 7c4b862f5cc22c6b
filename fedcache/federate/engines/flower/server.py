"""The loop of rounds over sites: what goes out, what comes back, who is missing. The server never sees a feature.

The runs are ``RunState`` as the in-process engine has them, over clients that have a name and a number of rows and no
row. All points and seeds that a site takes part in travel in one message, because a message costs seconds whatever is
in it. A site that does not answer, or whose upload is refused by update validation, is left out of the round and said
so; what it holds stays as it was after the last round in which the server has its upload.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedcache.errors import FedcacheError, FederatedRunError, UsageError
from fedcache.federate.engine.deployed import DeployedModel, no_training_rows
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import keep_down, sends_nothing
from fedcache.federate.engine.outcome import RoundRecord, Snapshot, TrainingOutput
from fedcache.federate.engine.run import TrainingRun
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.snapshots import resume_job, snapshot_of
from fedcache.federate.engines.flower.messages import SiteMessage, refusal_of
from fedcache.federate.engines.flower.server_job import OnRound, ServerJob
from fedcache.federate.engines.flower.site import SiteJob
from fedcache.federate.engines.flower.site_facts import SiteFacts, rows_of
from fedcache.federate.engines.flower.site_rows import score_counts
from fedcache.federate.engines.flower.sites import Member, MissedSite, Sites
from fedcache.federate.engines.flower.summed_rounds import SummedUploads, summed_round
from fedcache.federate.trust.pipeline import RejectedUpload
from fedcache.heads.linear import Tree


class Server:
    """A federation as its server sees it; ``sites`` have been gathered.

    With a ``secure_bound`` it is given sums of uploads alone, and every number of an upload lies within that bound.
    """

    def __init__(self, sites: Sites, secure_bound: float | None = None) -> None:
        self.sites, self.secure_bound = sites, secure_bound

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
        trust = (
            replace(spec.trust, on_bad="fail")
            if spec.method.uploads is sends_nothing
            else spec.trust
        )
        run = RunState(spec.method, hp, spec.data, clients, spec.seed, spec.dtype, trust=trust)
        run.keeps_uploads = self.secure_bound is None and spec.method.uploads is not sends_nothing
        run.start()
        rounds = 1 if spec.method.one_shot else spec.rounds
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
            ended = [
                (job, ids)
                for job, sample, down, got in zip(going, samples, downs, answers, strict=True)
                for ids in (self._merge(job, sample, down, got),)
                if ids is not None
            ]
            due = [
                job
                for job, _ in ended
                if not job.open or (eval_every > 0 and job.run.round % eval_every == 0)
            ]
            self._score(due, common)
            for job, (ids, traffic) in ended:
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
            return summed_round(
                self.sites,
                jobs,
                samples,
                downs,
                common,
                lambda job, client: self._words(job, client, job.run.round + 1),
                self.secure_bound,
            )
        found: list[dict[int, Tree | str]] = [{} for _ in jobs]
        messages, about = {}, {}
        for client, member in enumerate(self.sites.members):
            mine = [g for g, sample in enumerate(samples) if client in sample]
            if mine:
                told = [self._words(jobs[g], client, jobs[g].run.round + 1) for g in mine]
                words = {
                    **common,
                    "jobs": told,
                    "clients": len(self.sites.members),
                    "client": client,
                }
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
            told, up = answer.words["jobs"][place], dict(answer.trees[place])
            sent_in = job.answered(client, told)
        except ValueError as error:
            return str(error)
        except (LookupError, TypeError) as error:
            return f"its words are malformed ({type(error).__name__})"
        rows = float(self.sites.members[client].facts.train)
        why = job.run.update_validation().problem(up, rows, sent_in=sent_in)
        return up if why is None else why

    def _merge(
        self,
        job: ServerJob,
        sample: Sequence[int],
        down: Tree,
        got: Mapping[int, Tree | str] | SummedUploads,
    ) -> tuple[list[int], Any] | None:
        """Pool what came and end the round; None when that ended the job."""
        run, number = job.run, job.run.round + 1
        if isinstance(got, SummedUploads):
            summed, ups = got, dict[int, Tree]()
            ids = sorted(summed.clients)
            told = {client: f"{NO_ANSWER}{why}" for client, why in summed.missing.items()}
        else:
            summed, ups = None, {c: up for c, up in got.items() if not isinstance(up, str)}
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
            for rejected in run.rejected[
                already:
            ]:  # sound by itself, but the server cannot aggregate with it
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
        for client, why in sorted(reasons.items())[:1]:
            named = f"; site {self.sites.members[client].facts.name!r} is out because: "
            named += why.removeprefix(NO_ANSWER).rstrip(".")
        raise FederatedRunError(
            f"Round {number}: {len(ids)} of {len(sample)} sites have a sound upload, and "
            f"{self.sites.terms.quorum} are needed{named}.",
            "Start or mend the missing sites and run again: it goes on after the last whole round.",
        )

    def _left_out(self, job: ServerJob, client: int, number: int, why: str) -> None:
        """Note a site whose upload is not in a round; one that is refused ends a run that was not told otherwise."""
        name, run = self.sites.members[client].facts.name, job.run
        if why.startswith(NO_ANSWER):
            entry = MissedSite(number, name, why.removeprefix(NO_ANSWER))
            if entry not in self.sites.missed:
                self.sites.missed.append(entry)
                self.sites.say(
                    f"warning: round {number} goes on without site {name!r}: {entry.why}."
                )
            run.warnings.append(f"round {number} went on without site {name!r}: {entry.why}")
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
        self.sites.missed.append(MissedSite(number, name, f"its upload is rejected: {why}"))
        self.sites.say(f"warning: round {number}: the upload of site {name!r} is rejected: {why}.")

    def _score(self, jobs: Sequence[ServerJob], common: Mapping[str, Any]) -> None:
        """Ask every site for its counts, and make of them what the in-process evaluation makes of predictions."""
        if not jobs:
            return
        downs = [job.run.down() for job in jobs]
        messages = {
            m.node: SiteMessage(
                {
                    **common,
                    "jobs": [self._words(job, c, job.run.round) for job in jobs],
                    "clients": len(self.sites.members),
                    "client": c,
                },
                downs,
            )
            for c, m in enumerate(self.sites.members)
        }
        answers = self.sites.ask("score", messages)
        for g, job in enumerate(jobs):
            counts: dict[int, Tensor] = {}
            for client, member in enumerate(self.sites.members):
                answer = _sound(answers[member.node])
                read = (
                    answer if isinstance(answer, str) else checked_counts(answer, g, member.facts)
                )
                if isinstance(read, Tensor):
                    counts[client] = read
                    continue
                entry = MissedSite(job.run.round, member.facts.name, f"not scored: {read}")
                if entry not in self.sites.missed:
                    self.sites.missed.append(entry)
                    self.sites.say(f"warning: site {member.facts.name!r} is not scored: {read}.")
                job.run.warnings.append(f"site {member.facts.name!r} is not scored: {read}")
            job.evaluation, job.dealt = score_counts(
                job.run, [m.facts for m in self.sites.members], counts
            )

    def _record(
        self, job: ServerJob, ids: Sequence[int], traffic: Any, seconds: float, measured: bool
    ) -> None:
        run = job.run
        diagnostics = run.diagnose() if measured else {}
        if job.leaves_out or not run.trust.plain:
            diagnostics["rejected"] = float(sum(r.round == run.round for r in run.rejected))
        accuracy = job.evaluation.accuracy if measured and job.evaluation is not None else None
        job.records.append(
            RoundRecord(run.round, tuple(ids), seconds, accuracy, traffic, diagnostics)
        )
        metrics = {"accuracy": accuracy, "seconds": seconds, "clients": len(ids), **diagnostics}
        job.on_round(run.round, metrics, asdict(traffic), partial(snapshot_of, run, job.records))

    def _words(self, job: ServerJob, client: int, number: int) -> dict[str, Any]:
        hp = {k: v for k, v in job.run.hp.items() if not isinstance(v, Tensor)}
        return SiteJob(job.id, hp, job.run.seed, number, job.latest.get(client, 0)).to_words()

    def _join(self, jobs: Sequence[ServerJob], member: Member) -> None:
        name, number = member.facts.name, jobs[0].run.round + 1
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
                self.sites.say(
                    f"warning: site {name!r} came late: {run.method.name} keeps a place for each site it began with."
                )
                self.sites.missed.append(
                    MissedSite(number, name, "came late, and the method has no place for it")
                )
                return
            wider.server, wider.round = run.server, run.round
            wider.warnings, wider.rejected = run.warnings, run.rejected
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
    refusal = None if isinstance(answer, str) else refusal_of(answer)
    return answer if refusal is None else refusal.message


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
    run, evaluation = job.run, job.evaluation
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
