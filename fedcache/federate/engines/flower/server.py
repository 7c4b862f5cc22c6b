"""Server of a federation: the rounds over real sites. The server never sees a feature.

Every run is a ``RunState`` as in the in-process engine; its clients have a name and a number of rows, but no rows. One
message to a site carries all points and seeds that the site takes part in, because every message takes seconds. A site
that does not answer, or whose upload is rejected, is left out of the round with a warning. Its client state stays as it
was after the last round in which the server used its upload.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcache.config import Home, to_table
from fedcache.errors import FedcacheError, FederatedRunError, UsageError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import keep_down, sends_nothing
from fedcache.federate.engine.outcome import (
    DeployedModel,
    Evaluation,
    RoundRecord,
    Snapshot,
    TrainingOutput,
    no_training_rows,
)
from fedcache.federate.engine.run import TrainingRun
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.snapshots import resume_job, snapshot_of
from fedcache.federate.engines.flower.masking import LEAST_SITES, Masking
from fedcache.federate.engines.flower.messages import SiteMessage, refusal_of
from fedcache.federate.engines.flower.plan import Plan
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
    client_of,
    score_counts,
)
from fedcache.federate.trust.pipeline import RejectedUpload
from fedcache.heads.linear import Tree
from fedcache.parsing import Facts, Record
from fedcache.process import Stop
from fedcache.progress import Observer, piece_of_work
from fedcache.runs.directory import owning
from fedcache.runs.events import GridPosition
from fedcache.runs.loop import (
    OpenRun,
    TrainingOptions,
    note_paper_choices,
    open_run,
    prepare_run,
    training_run,
)
from fedcache.runs.run import Run
from fedcache.store.files import digest_of

# Job of a server: one point and seed of a federation.

OnRound = Callable[[int, Facts, Facts, Callable[[], Snapshot]], None]
"""(round, metrics, traffic of the round, snapshot) after a round of one configuration and seed; rounds begin at 1."""


MOST_TENSORS = 10_000
"""Maximum number of tensors in a client's state that a site may report."""
MOST_NUMBERS = 2**40
"""Maximum length of an axis of such a tensor."""


def _is_shape(value: Any) -> bool:
    """Whether a value that a site sent is the shape of a tensor."""
    if not isinstance(value, list):
        return False
    return all(type(n) is int and 0 <= n <= MOST_NUMBERS for n in value)


@dataclass
class ServerJob:
    """One point and seed that the server trains."""

    id: str  # names it to the sites
    run: RunState  # the server's side of it
    rounds: int  # number of rounds in all
    participation: int | float | None  # as ``RunState.sample`` takes it
    on_round: OnRound  # called after every round
    # True: an invalid upload is left out of its round; False: an invalid upload ends the run.
    leaves_out: bool = False
    records: list[RoundRecord] = field(default_factory=list)  # of the rounds so far
    # client -> (name, shape) of the tensors of its state, sorted by name. Tensors under ``rows/`` are left out, because
    # they have one row for each training row, so their shapes differ between clients.
    outlines: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=dict)
    evaluation: Evaluation | None = None  # of the last round that was scored
    scored_rows: Data | None = None  # labels of the rows that ``evaluation`` scored
    scored: int = 0  # sites that ``evaluation`` scored
    failed: FedcacheError | None = None  # the error that ended it
    # of the server's tensors at the beginning
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # client -> the last round in which the server used its upload
    latest: dict[int, int] = field(default_factory=dict)
    # metadata of the checkpoint that it resumed from
    earlier: list[Facts] = field(default_factory=list)

    def answered(self, client: int, words: Any) -> int:
        """Check the words of a client's answer, and keep the shapes of its state; returns the round that was answered.

        Raises ValueError for words that do not belong to this job.
        """
        if not isinstance(words, dict) or words.get("id") != self.id:
            found = "none"
            if isinstance(words, dict):
                found = str(words.get("id"))[:12]
            expected = self.id[:12]
            raise ValueError(f"the answer belongs to job {found}, expected {expected}")
        number = words.get("round")
        outline = words.get("outline")
        sound = (
            isinstance(outline, dict)
            and len(outline) <= MOST_TENSORS
            and all(map(_is_shape, outline.values()))
        )
        if type(number) is not int or not sound:
            raise ValueError("its header is malformed")
        if outline:
            tensors = []
            for name, shape in sorted(outline.items()):
                if not name.startswith("rows/"):
                    tensors.append((name, tuple(shape)))
            self.outlines[client] = tuple(tensors)
        return number

    @property
    def outline(self) -> Tree:
        """The state of most clients, as tensors without memory."""
        if not self.outlines:
            return {}
        ((usual, _),) = Counter(self.outlines.values()).most_common(1)
        return {name: torch.empty(shape, device="meta") for name, shape in usual}

    @property
    def open(self) -> bool:
        """Whether rounds are left."""
        return self.failed is None and self.run.round < self.rounds


UPLOAD_BYTES = 8
"""Bytes of a number in a masked vector."""


@dataclass(frozen=True)
class SummedUploads:
    """The uploads of one round of a job under secure aggregation."""

    clients: Sequence[int] = ()  # clients in the sums, in client order
    # as ``UploadPipeline.add_sum``
    sums: Mapping[str, tuple[Tensor, torch.dtype]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)  # client -> why it is not in the sums
    failed: str = ""  # why there are no sums; "" if there are
    numbers: int = 0  # that each client sent


def _sums_of_job(
    job: ServerJob,
    answer: SecureSum,
    total: Tensor,
    position: int,
    masking: Masking,
    down: Tree,
    clients_of: Mapping[int, int],
    weights: Mapping[int, float],
) -> SummedUploads:
    """The part of a sum that belongs to one job.

    ``position`` is that of the job in the messages, and ``clients_of`` maps a node to its client.
    """
    failed = answer.failed
    for node, words in answer.words.items():
        client = clients_of[node]
        try:
            sound = job.answered(client, words["jobs"][position]) == job.run.round + 1
        except (LookupError, TypeError, ValueError):
            sound = False
        # The sum is lost, because a single vector cannot be subtracted from it.
        if not sound and not failed:
            failed = f"the answer of client {client} belongs to another round or job"
    size = len(total)
    complete = size == masking.size and bool(torch.isfinite(total).all())
    if not failed and not complete:
        failed = f"the sum does not consist of {masking.size} finite numbers"
    missing = {}
    for node, why in answer.missing.items():
        if node not in answer.words:
            missing[clients_of[node]] = why
    if failed:
        return SummedUploads(missing=missing, failed=failed)
    clients = sorted(clients_of[node] for node in answer.words)
    rows = [weights[client] for client in clients]
    sums = masking.sums(total, down, rows)
    return SummedUploads(clients, sums, missing, numbers=masking.size)


class Server:
    """The server's side of a federation, after its ``sites`` were gathered.

    With a ``secure_bound`` it gets only sums of uploads, whose numbers are within that bound.
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
        """The job of one point and seed, from the beginning or from a snapshot.

        ``spec`` is as in ``engine.run``; its data gives widths, views, classes and text, and has no rows.
        """
        clients = [client_of(m.facts) for m in self.sites.members]
        leaves_out = spec.trust.on_bad == "reject"
        silent = spec.method.uploads is sends_nothing
        # An upload without tensors cannot make the server's step fail, so uploads are not kept for a later rejection.
        trust = spec.trust
        if silent:
            trust = replace(trust, on_bad="fail")
        run = RunState(spec.method, hp, spec.data, clients, spec.seed, spec.dtype, trust=trust)
        run.keeps_uploads = self.secure_bound is None and not silent
        rounds = spec.rounds
        if spec.method.one_shot:
            rounds = 1
        run.start(rounds)
        shapes = {k: tuple(t.shape) for k, t in run.server.items()}
        made = ServerJob(
            job_id, run, rounds, spec.participation, on_round, leaves_out, shapes=shapes
        )
        if state is not None:
            made.records = resume_job(run, state)
            made.latest = {client: r.round for r in made.records for client in r.clients}
        return made

    def train(self, jobs: Sequence[ServerJob], eval_every: int, common: Record) -> None:
        """Train all rounds of the jobs that ``start`` made; every ``eval_every``-th round and the last one are scored.

        A round of all open jobs is one message to each site. Each job ends with ``evaluation`` or ``failed``.
        ``common`` are words of every message. Raises FederatedRunError if too few sites answer.
        """
        while open_jobs := [job for job in jobs if job.open]:
            for member in self.sites.newcomers(open_jobs[0].run.round + 1):
                self._join(open_jobs, member)
            began = time.perf_counter()
            samples = [job.run.sample(job.participation) for job in open_jobs]
            downs = [job.run.down() for job in open_jobs]
            answers = self._round(open_jobs, samples, downs, common)
            seconds = (time.perf_counter() - began) / len(open_jobs)
            ended = []
            to_score = []
            for job, sample, down, answer in zip(open_jobs, samples, downs, answers, strict=True):
                ids = self._merge(job, sample, down, answer)
                if ids is None:
                    continue
                ended.append((job, ids))
                is_scored = eval_every > 0 and job.run.round % eval_every == 0
                if is_scored or not job.open:
                    to_score.append(job)
            self._score(to_score, common)
            for job, ids in ended:
                self._record(job, ids, seconds, job in to_score)
        # A run that was resumed after its last round is scored again.
        unscored = [job for job in jobs if job.failed is None and job.evaluation is None]
        self._score(unscored, common)

    def _round(
        self,
        jobs: Sequence[ServerJob],
        samples: Sequence[Sequence[int]],
        downs: Sequence[Tree],
        common: Record,
    ) -> Sequence[Mapping[int, Tree | str] | SummedUploads]:
        """For each job: client -> its upload, or why there is none; with secure aggregation the sums."""
        if self.secure_bound is not None:
            return self._summed_round(jobs, samples, downs, common, self.secure_bound)
        of_jobs: list[dict[int, Tree | str]] = [{} for _ in jobs]
        messages = {}
        recipients = {}  # node -> its client, and the places in ``jobs`` of that client's jobs
        for client, member in enumerate(self.sites.members):
            own_jobs = [g for g, sample in enumerate(samples) if client in sample]
            if own_jobs:
                words = self._words([jobs[g] for g in own_jobs], client, common, ahead=1)
                messages[member.node] = SiteMessage(words, [downs[g] for g in own_jobs])
                recipients[member.node] = (client, own_jobs)
        for node, answer in self.sites.ask("fit", messages).items():
            client, own_jobs = recipients[node]
            result = _result_or_reason(answer)
            for position, g in enumerate(own_jobs):
                if isinstance(result, str):
                    of_jobs[g][client] = f"{NO_ANSWER}{result}"
                else:
                    of_jobs[g][client] = self._checked(jobs[g], client, result, position)
        return of_jobs

    def _summed_round(
        self,
        jobs: Sequence[ServerJob],
        samples: Sequence[Sequence[int]],
        downs: Sequence[Tree],
        common: Record,
        bound: float,
    ) -> list[SummedUploads]:
        """A round of secure aggregation. Jobs with the same clients share one message and one vector.

        ``bound`` is the largest absolute value of a number in a vector.
        """
        sites = self.sites
        of_jobs = [SummedUploads()] * len(jobs)
        groups: dict[tuple[int, ...], list[int]] = {}
        for g, sample in enumerate(samples):
            groups.setdefault(tuple(sorted(sample)), []).append(g)
        for clients, group in groups.items():
            if len(clients) < LEAST_SITES:
                why = f"the sum has {len(clients)} sites, but a sum of fewer than {LEAST_SITES} reveals single uploads"
                for g in group:
                    of_jobs[g] = SummedUploads(failed=why)
                continue
            first = jobs[group[0]].run
            weights = {client: first.client_rows[client] for client in clients}
            scale = float(max(weights.values()))
            maskings = []
            for g in group:
                run = jobs[g].run
                expected = run.expected_uploads()
                masking = Masking.of(run.method, run.hp, expected, downs[g], scale, bound)
                maskings.append(masking)
            secure = [masking.to_words() for masking in maskings]
            messages = {}
            clients_of = {}  # node -> its client
            for client in clients:
                node = sites.members[client].node
                message = self._words([jobs[g] for g in group], client, common, ahead=1)
                message["weight"] = weights[client]
                message["secure"] = secure
                messages[node] = SiteMessage(message, [downs[g] for g in group])
                clients_of[node] = client
            number = first.round + 1
            answer = sites.transport.ask_sum(messages, bound, number, sites.terms.timeout)
            # The vectors of all jobs follow one another in the sum.
            start = 0
            for position, (g, masking) in enumerate(zip(group, maskings, strict=True)):
                part = answer.total[start : start + masking.size]
                start += masking.size
                of_jobs[g] = _sums_of_job(
                    jobs[g], answer, part, position, masking, downs[g], clients_of, weights
                )
        return of_jobs

    def _checked(
        self, job: ServerJob, client: int, answer: SiteMessage, position: int
    ) -> Tree | str:
        """The upload for the job at ``position`` of an answer, or why it is not valid."""
        try:
            up = dict(answer.trees[position])
            sent_in = job.answered(client, answer.words["jobs"][position])
        except ValueError as error:
            return str(error)
        except (LookupError, TypeError) as error:
            return f"its header is malformed ({type(error).__name__})"
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
        answer: Mapping[int, Tree | str] | SummedUploads,
    ) -> list[int] | None:
        """Pool the uploads of a round and end the round; returns its clients, or None if the job failed."""
        run = job.run
        number = run.round + 1
        summed = None
        ups = {}
        missing = {}  # client -> why its upload is missing
        if isinstance(answer, SummedUploads):
            summed = answer
            ids = sorted(summed.clients)
            missing = {client: f"{NO_ANSWER}{why}" for client, why in summed.missing.items()}
        else:
            for client, up in answer.items():
                if isinstance(up, str):
                    missing[client] = up
                else:
                    ups[client] = up
            ids = sorted(ups)
        reasons = {}
        for client in sample:
            if client not in ids:
                reasons[client] = missing.get(client, f"{NO_ANSWER}no message arrived")
        try:
            _check_model_was_usable(job, number, sample, reasons)
            for client, why in sorted(reasons.items()):
                self._note_missing(job, client, number, why)
            if summed is not None and summed.failed:
                raise FederatedRunError(
                    f"Round {number}: secure aggregation gave no sum: {summed.failed}.",
                    "The logs of the sites show why. Run again with the same sites to resume after the last complete "
                    "round.",
                )
            self._check_quorum(number, ids, sample, reasons)
            pipeline = run.upload_pipeline(ids, down, job.participation)
            if summed is None:
                for client in ids:
                    pipeline.add(ups[client], client, validated=True)
            else:
                pipeline.add_weights(ids)
                for name, (total, dtype) in summed.sums.items():
                    pipeline.add_sum(name, total, dtype)
            rejected_before = len(run.rejected)
            pooled = run.pooled(pipeline, ids)
            # Valid uploads can be rejected here too, if the server cannot aggregate with them.
            for rejected in run.rejected[rejected_before:]:
                self._note_rejected(number, rejected.client, rejected.why)
                reasons[rejected.client] = rejected.why
                ids.remove(rejected.client)
            self._check_quorum(number, ids, sample, reasons)
            if summed is None:
                sent = [run.upload_size(ups[client]) for client in ids]
            else:
                sent = [(summed.numbers, UPLOAD_BYTES)] * len(ids)
            run.finish(ids, down, pooled, sent)
        except FedcacheError as error:
            job.failed = error
            return None
        job.latest |= dict.fromkeys(ids, number)
        return ids

    def _check_quorum(
        self, number: int, ids: Sequence[int], sample: Sequence[int], reasons: Mapping[int, str]
    ) -> None:
        """Refuse a round with too few valid uploads; ``reasons`` say why clients of the sample have none."""
        quorum = self.sites.terms.quorum
        if len(ids) >= quorum:
            return
        needed = f"{quorum} are needed"
        if reasons:
            client = min(reasons)
            name = self.sites.members[client].facts.name
            why = reasons[client].removeprefix(NO_ANSWER).rstrip(".")
            needed += f". Site {name!r} is missing, because {why}"
        count = f"{len(ids)} of {len(sample)} sites"
        raise FederatedRunError(
            f"Round {number}: {count} sent a valid upload, but {needed}.",
            "Start or repair the missing sites and run again to resume after the last complete round.",
        )

    def _note_missing(self, job: ServerJob, client: int, number: int, why: str) -> None:
        """Note a site without a valid upload in a round.

        Raises the refusal of an invalid upload if the policy is ``fail``.
        """
        name = self.sites.members[client].facts.name
        run = job.run
        if why.startswith(NO_ANSWER):
            why = why.removeprefix(NO_ANSWER)
            self.sites.miss(
                number, name, why, f"round {number} continues without site {name!r}: {why}."
            )
            return
        if not job.leaves_out:
            raise run.update_validation().refusal(client, name, why)
        run.rejected.append(RejectedUpload(number, client, why))
        self._note_rejected(number, client, why)

    def _note_rejected(self, number: int, client: int, why: str) -> None:
        """Name the site of a rejected upload in the result and in the log."""
        name = self.sites.members[client].facts.name
        rejected = f"the upload of site {name!r} is rejected: {why}."
        self.sites.missed.append(MissedSite(number, name, f"its upload is rejected: {why}"))
        self.sites.observer.warn(f"round {number}: {rejected}")

    def _score(self, jobs: Sequence[ServerJob], common: Record) -> None:
        """Score jobs from the counts of all sites, with the figures of the in-process evaluation."""
        if not jobs:
            return
        # Sites score all jobs in one message, and send counts only.
        downs = [job.run.down() for job in jobs]
        messages = {}
        for client, member in enumerate(self.sites.members):
            words = self._words(jobs, client, common)
            messages[member.node] = SiteMessage(words, downs)
        answers = self.sites.ask("score", messages)
        facts = [member.facts for member in self.sites.members]
        for g, job in enumerate(jobs):
            counts = {}
            for client, member in enumerate(self.sites.members):
                read: SiteMessage | Tensor | str = _result_or_reason(answers[member.node])
                if isinstance(read, SiteMessage):
                    read = checked_counts(read, g, member.facts)
                if isinstance(read, Tensor):
                    counts[client] = read
                    continue
                name = member.facts.name
                warning = f"site {name!r} is not scored: {read}."
                self.sites.miss(job.run.round, name, f"not scored: {read}", warning)
            job.scored = len(counts)
            job.evaluation, job.scored_rows = score_counts(job.run, facts, counts)

    def _record(self, job: ServerJob, ids: Sequence[int], seconds: float, measured: bool) -> None:
        """Add the record of the last round, and call ``on_round``; ``measured`` if the round was scored."""
        run = job.run
        traffic = run.traffic.rounds[-1]
        diagnostics = {}
        if measured:
            diagnostics = run.diagnose()
            if job.scored < len(self.sites.members):
                diagnostics["scored"] = float(job.scored)
        if job.leaves_out or not run.trust.plain:
            rejected = sum(upload.round == run.round for upload in run.rejected)
            diagnostics["rejected"] = float(rejected)
        accuracy = None
        if measured and job.evaluation is not None:
            accuracy = job.evaluation.accuracy
        record = RoundRecord(run.round, tuple(ids), seconds, accuracy, traffic, diagnostics)
        job.records.append(record)
        metrics = {"accuracy": accuracy, "seconds": seconds, "clients": len(ids), **diagnostics}
        snapshot = partial(snapshot_of, run, job.records)
        job.on_round(run.round, metrics, asdict(traffic), snapshot)

    def _words(
        self, jobs: Sequence[ServerJob], client: int, common: Record, ahead: int = 0
    ) -> Facts:
        """Words of one message to a client; ``ahead`` is 1 for the next round, 0 for the last finished one."""
        entries = []
        for job in jobs:
            run = job.run
            # A job is one configuration, so none of its hyperparameters is a tensor; the test is for the type checker.
            hp = {name: value for name, value in run.hp.items() if not isinstance(value, Tensor)}
            since = job.latest.get(client, 0)
            site = SiteJob(job.id, hp, run.seed, run.round + ahead, since)
            entries.append(site.to_words())
        return {**common, "jobs": entries, "clients": len(self.sites.members), "client": client}

    def _join(self, jobs: Sequence[ServerJob], member: Member) -> None:
        """Add a late site to all jobs, or refuse it if tensors of the server depend on the number of sites."""
        name = member.facts.name
        number = jobs[0].run.round + 1
        for job in jobs:
            run = job.run
            clients: list[Any] = [*run.clients, client_of(member.facts)]
            dtype = run.env.dtype
            wider = RunState(
                run.method, run.hp, run.data, clients, run.seed, dtype, trust=run.trust
            )
            wider.keeps_uploads = run.keeps_uploads
            # A fresh start shows the shapes with one more client; then the state of the run moves over.
            wider.start()
            shapes = {name: tuple(t.shape) for name, t in wider.server.items()}
            if shapes != job.shapes:
                why = "connected late, and the method cannot add sites during a run"
                kept = f"{run.method.name} can use only sites that took part from the start"
                self.sites.miss(number, name, why, f"site {name!r} connected late: {kept}.")
                return
            wider.server = run.server
            wider.round = run.round
            wider.warnings = run.warnings
            wider.noticed = run.noticed
            wider.unprotected_classes = run.unprotected_classes
            wider.rejected = run.rejected
            wider.traffic.up[: len(run.traffic.up)] = run.traffic.up
            wider.traffic.down[: len(run.traffic.down)] = run.traffic.down
            wider.traffic.rounds = run.traffic.rounds
            wider.met[: len(run.met)] = run.met
            job.run = wider
        self.sites.members.append(member)
        self.sites.joined.append(MissedSite(number, name, "joined"))
        self.sites.observer.note(f"Site {name!r} joins in round {number}.")


NO_ANSWER = "no answer: "
"""Beginning of the reason for a missing upload. A reason without it belongs to a rejected upload."""


def _check_model_was_usable(
    job: ServerJob, number: int, sample: Sequence[int], reasons: Mapping[int, str]
) -> None:
    """Refuse a round if the model itself is unusable, so that no site is blamed.

    Raises FederatedRunError if more than half of the sites of a round send invalid uploads although their uploads of
    the round before were valid.
    """
    before = number - 1
    turned = []  # clients whose upload was valid in the round before and is invalid now
    for client, why in sorted(reasons.items()):
        if not why.startswith(NO_ANSWER) and job.latest.get(client, 0) == before:
            turned.append(client)
    sampled = len(sample)
    if number == 1 or 2 * len(turned) <= sampled:
        return
    count = f"{len(turned)} of {sampled} sites"
    why = reasons[turned[0]].rstrip(".")
    raise FederatedRunError(
        f"Round {number}: the uploads of {count} are invalid. The cause is the model that the server made in "
        f"round {before}, not the sites, because their uploads in that round were valid. One upload is invalid "
        f"now because {why}.",
        "Start again with a robust rule, for example --aggregate median, or with a lower learning rate.",
    )


def _result_or_reason(answer: SiteMessage | str) -> SiteMessage | str:
    """An answer with results, or the reason why there are none: no answer, or a site's refusal."""
    if isinstance(answer, SiteMessage):
        refusal = refusal_of(answer)
        if refusal is not None:
            return refusal.message
    return answer


def checked_counts(answer: SiteMessage, position: int, facts: SiteFacts) -> Tensor | str:
    """The counts [domains, C, C + 1] of the job at ``position`` (``site.counts_of``), or in words what is wrong."""
    C = len(facts.classes)
    try:
        counts = answer.trees[position]["counts"]
    except (KeyError, IndexError):
        return "it sent no confusion counts"
    shape = tuple(counts.shape)
    if shape != (len(facts.domains), C, C + 1) or counts.dtype != torch.int64:
        return f"its confusion counts have shape {shape}"
    out_of_range = (counts < 0) | (counts > facts.test)
    if out_of_range.any() or int(counts.sum()) > facts.test:
        return f"its confusion counts do not fit its {facts.test} test rows"
    return counts


def outcome_of(job: ServerJob, members: Sequence[Member]) -> TrainingOutput:
    """The output of a run, as the in-process engine returns it."""
    run = job.run
    method = run.method
    protocol = method.protocol(run.hp)
    evaluation = job.evaluation
    assert evaluation is not None

    def predict(_x: Tensor) -> Tensor:
        raise UsageError("The server has no features, so it cannot predict.", "Predict on a site.")

    def deployed(client: int | None) -> DeployedModel | None:
        # The server has only the one model for all, unless that model depends on rows of the sites.
        if client is not None or protocol != "global" or method.deploy is not keep_down:
            return None
        no_rows = no_training_rows(method.name)
        return DeployedModel(method, run.down(), {}, no_rows, run.server_ctx())

    return TrainingOutput(
        method=method.name,
        hp=dict(run.hp),
        seed=run.seed,
        protocol=protocol,
        evaluation=evaluation,
        records=tuple(job.records),
        traffic=run.traffic,
        fidelity=method.faithful(run.hp, run.env.views),
        execution="sequential",
        chunk=1,
        points=1,
        threads=torch.get_num_threads(),
        dtype=run.env.dtype,
        clients=tuple(m.facts.name for m in members),
        classes_owned=tuple(m.facts.owned for m in members),
        trainable=method.trainable(run.server, job.outline),
        server=run.server,
        states={},
        warnings=tuple(run.warnings),
        attackers=(),
        predict=predict,
        deployed=deployed,
        broadcast=run.down,
    )


# One federation from its plan to its results, over any transport.
#
# A result is stored in ``runs/`` like every other. Its identity is that of a run in one process,
# plus the digests of the sites' stores and the engine. If a site was missing, the result says so,
# and the next request for the same run computes it again.


CLAIMED = (
    "accuracy",
    "macro_f1",
    "confusion",
    "fairness",
    "classes_owned",
    "dataset.rows",
    "dataset.ok",
)
"""Values of a result that sites report about themselves; the server measured all other values."""


def federate(
    plan: Plan, transport: Transport, home: Home, observer: Observer, names: SiteNames | None = None
) -> list[Run]:
    """Run every point and seed of a plan over the sites that a transport reaches, and store the results.

    ``names`` is the server's table of site names and keys; None binds names for this run alone. Raises UsageError,
    StoreError, CorruptionError for a damaged table, FederatedRunError.
    """
    began = time.perf_counter()
    sites = Sites(transport, plan.terms, observer, names)
    words = {"train": to_table(plan.train)}
    facts = [m.facts for m in sites.gather(words)]
    source = SiteRows(facts, _class_text(sites, facts[0]))
    points = _open_points(plan, source, home, observer)
    note_paper_choices(points[0].inputs, points[0].spec, observer)
    begun = _begin_points(points, observer, fresh=plan.fresh)
    server = Server(sites)
    if plan.secure:
        server.secure_bound = plan.secure_bound
    jobs = []
    for run in begun:
        for seed in run.spec.seeds:
            if not run.restore_seed(seed):
                jobs.append((run, _start_seed(run, seed, server, observer)))
    if jobs:
        common = {
            **words,
            "recipes": list(facts[0].recipes),
            "feat_post": facts[0].feat_post,
            "dtype": plan.train.dtype,
        }
        method = points[0].spec.method
        started = [job for _, job in jobs]
        total = sum(job.rounds for job in started)
        with (
            piece_of_work(observer, f"{method} over {len(facts)} sites", total, "rounds"),
            owning([run.directory.path for run in begun], observer, Stop()),
        ):
            server.train(started, plan.train.eval_every, common)
    errors = []
    for run, job in jobs:
        if job.failed is not None:
            errors.append(job.failed)
            continue
        assert job.scored_rows is not None
        # The rows that the counts stand for have labels and domains, which a result reads, and no features.
        y = job.scored_rows.y
        x = job.scored_rows.x.new_empty(len(y), 1, 0)
        rows = replace(run.inputs.data, x=x, y=y, domain=job.scored_rows.domain, text=None)
        scored = run.inputs.with_data(rows)
        outcome = outcome_of(job, sites.members)
        seconds = sum(record.seconds for record in job.records)
        run.end_seed(outcome, seconds, scored)
    for run in begun:
        if len(run.done) == len(run.spec.seeds):
            earlier = [meta for of_run, job in jobs if of_run is run for meta in job.earlier]
            run.stored = _finish(run, server, time.perf_counter() - began, earlier)
    if errors:
        raise errors[0]
    return [run.stored for run in points if run.stored is not None]


def _class_text(sites: Sites, first: SiteFacts) -> torch.Tensor | None:
    """The class text features that all sites have, for a method that reads them."""
    if not first.text:
        return None
    return sites.text(first.text, len(first.classes))


def _open_points(plan: Plan, source: SiteRows, home: Home, observer: Observer) -> list[OpenRun]:
    """Every point of a plan as a run."""
    opened = []
    for swept, config in plan.points:
        # The server reads and extracts no features, so the result has no seconds for these steps.
        inputs = replace(prepare_run(config, source), seconds={})
        # With this configuration, `fedcache train --clients-from DIR` repeats the run on a directory of all shards.
        spec = inputs.resolve(replace(config, clients_from="sites"))
        # The engine is part of the identity, because secure aggregation rounds the sums.
        engine = "flower"
        if plan.secure:
            engine = f"flower, secure sums within {plan.secure_bound:g}"
        spec = replace(spec, device="cpu", engine=engine)
        runs = home.runs
        if plan.runs:
            runs = Path(plan.runs)
        words = " ".join(f"{name}={value}" for name, value in swept.items())
        options = TrainingOptions(runs, observer, Stop(), plan.fresh)
        opened.append(open_run(inputs, spec, options, GridPosition(words)))
    return opened


def _begin_points(points: Sequence[OpenRun], observer: Observer, *, fresh: bool) -> list[OpenRun]:
    """Begin the runs that are not stored yet, and those that missed a site."""
    begun = []
    for run in points:
        name = run.directory.path.name
        if run.stored is not None:
            federation = run.stored.result.get("federation", {})
            if not federation.get("missed") and not federation.get("joined"):
                observer.note(f"The same run is stored already ({name}); --fresh trains it again.")
                continue
            observer.note(f"{name} was trained while sites were missing, so it is trained again.")
        run.begin(fresh=fresh or run.stored is not None)
        run.stored = None
        begun.append(run)
    return begun


def _start_seed(run: OpenRun, seed: int, server: Server, observer: Observer) -> ServerJob:
    """Start a seed, from its checkpoint if it has one. Every round takes seconds, so every round writes one."""
    state = run.checkpoint(seed)
    earlier: list[Facts] = []
    if state is not None:
        observer.note(f"Seed {seed}: resuming after round {state.meta['round']}.")
        run.events.replay(seed, state.meta["records"])
        earlier.append(state.meta)

    def round_ended(
        number: int,
        metrics: Facts,
        traffic: Facts,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        run.events.round_ended(seed, number, metrics, traffic)
        observer.advance(1)
        made = snapshot()
        made.meta.update(server.sites.absences(earlier))
        run.save_checkpoint(seed, made)

    job_id = digest_of([run.identity.digest, seed])[:24]
    spec = training_run(run.inputs, run.spec, seed)
    job = server.start(spec, run.inputs.settings, job_id, round_ended, state)
    job.earlier = earlier
    return job


def _finish(run: OpenRun, server: Server, seconds: float, earlier: Sequence[Facts]) -> Run:
    """Store the result of all seeds, with the missing sites, and whether the server saw single uploads.

    ``earlier`` as in ``Sites.absences``.
    """
    sites = server.sites
    bound = server.secure_bound
    uploads = "one by one"
    if bound is not None:
        uploads = f"only sums (SecAgg+), every number within {bound:g}"
    federation: Record = {
        "engine": "flower",
        "uploads": uploads,
        "expected": sites.terms.sites,
        "sites": [m.facts.name for m in sites.members],
        # Sites score themselves. The server has no test rows, so it can only check that their counts are possible.
        "claimed": list(CLAIMED),
        **sites.absences(earlier),
    }
    wire = {"up_bytes": sites.transport.bytes_up, "down_bytes": sites.transport.bytes_down}
    return run.finish(
        result={"federation": federation},
        seconds={"federation": seconds},
        measured={"wire": wire},
    )
