"""A site of a federation: its store, the facts it reports, and its answers: uploads and counts, never a row.

The random streams of a client are seeded by its name, and the message holds all other inputs. So a site sends the same
bits as the client of that name in the in-process engine. The store is opened for every message, because Flower answers
each message in a new process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedcache
from fedcache.config import TrainConfig, resolve
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    FederatedRunError,
    StoreError,
    UsageError,
)
from fedcache.federate.engine.client_data import Data, prepare_features
from fedcache.federate.engine.evaluate import deployed_model, has_model, score_job
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Evaluation, classes_owned
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.flower.masking import Masking
from fedcache.federate.engines.flower.messages import SiteMessage, refused
from fedcache.federate.engines.flower.plan import check_suited
from fedcache.federate.engines.flower.sites import SiteFacts
from fedcache.federate.execution.memory_estimate import shares_uploads
from fedcache.federate.methods import find_method
from fedcache.federate.partition.partition import Client
from fedcache.federate.trust.pipeline import TrustPolicy
from fedcache.heads.linear import Tree
from fedcache.models.saved_model import (
    ClientTensors,
    ModelFacts,
    SavedModel,
    client_tensors,
    computed_as,
    owned,
)
from fedcache.parsing import Facts, Record
from fedcache.progress import Silent
from fedcache.runs.directory import code_of
from fedcache.runs.features import text_of
from fedcache.runs.origin import check_text
from fedcache.runs.store_choice import arrays_for, backbones_of, feat_post_for
from fedcache.store.files import (
    append_line,
    canonical_json,
    digest_of,
    make_private,
    read_sealed,
    sha256_hex,
    write_sealed,
)
from fedcache.store.store import Store

SENT = "sent.jsonl"
"""File in the folder of a site's state that lists the facts, uploads and counts which the site sends."""

OTHER = Client("", np.empty(0, np.int64), np.empty(0, np.int64))
"""Substitute for every other client, because a site knows nothing about other clients."""


@dataclass(frozen=True)
class SiteJob:
    """One point and seed of a message."""

    id: str  # unique among all runs; part of the names of the site's files
    hp: dict[str, Value]  # resolved hyperparameters
    seed: int  # of every stream
    round: int  # from 1: the round to fit, or for scores the last one that was fitted
    since: int  # the last round in which the server used an upload of this site; 0 for none

    @classmethod
    def from_words(cls, words: Record) -> SiteJob:
        """The inverse of ``to_words``. Raises FederatedRunError for an id that would be a path."""
        name = str(words["id"])
        if not name.isalnum():
            raise FederatedRunError(
                f"{name!r:.40} is not a valid job name.", "Start the run with fedcache flower."
            )
        return cls(
            name,
            dict(words["hp"]),
            int(words["seed"]),
            int(words["round"]),
            int(words["since"]),
        )

    def to_words(self) -> Facts:
        """Plain JSON values."""
        return asdict(self)


class _OneClientRun(RunState):
    """A run at one site: every client except the site's own is ``OTHER``."""

    def _eligible(self) -> np.ndarray:
        """The site's own client, also if it has no training rows and is only scored."""
        is_own = [client is not OTHER for client in self.training_clients]
        return np.flatnonzero(is_own)


@dataclass(frozen=True)
class Site:
    """A client on its own machine."""

    request: SiteRequest  # its store, and the configuration of the run
    feat_post: str  # transformation of its features
    data: Data  # its own rows
    client: Client  # its name, training rows and test rows
    memory: StoredClientMemory  # client state between rounds

    def answer(self, kind: str, message: SiteMessage) -> SiteMessage:
        """Answer ``fit`` with uploads, ``score`` with counts. Raises FederatedRunError if the client state is lost."""
        jobs = [SiteJob.from_words(words) for words in message.words["jobs"]]
        clients = int(message.words["clients"])
        client_number = int(message.words["client"])
        dtype = getattr(torch, str(message.words["dtype"]))
        method = self.request.method
        trees = []
        answers: list[Facts] = []
        fitted = {}  # key of jobs with equal uploads -> the upload
        for job, down in zip(jobs, message.trees, strict=True):
            run = self._run(job, clients, client_number, dtype)
            if kind == "score":
                run.round = job.round  # the round that was fitted last
                run.down = lambda down=down: down  # type: ignore[method-assign, misc]  # a site has no server
                domains = len(self.request.store.samples.domains)
                counts = counts_of(score_job(run), self.data, domains)
                trees.append({"counts": counts})
                self._save_model(run, job)
                answers.append({"id": job.id, "round": job.round})
                continue
            run.round = job.round - 1  # a run counts from 0
            # Points that differ only in settings of the server share one upload if the method allows it.
            key: Any = job.id
            if shares_uploads(method):
                names = sorted(h.name for h in method.hparams if h.fit)
                key = (job.seed, *(str(job.hp[name]) for name in names))
            if key not in fitted:
                fitted[key] = run.fit_one(down, client_number)
            kept = dict(run.states.get(client_number) or {})
            self.memory.save(job, kept)
            up = fitted[key]
            secure = message.words.get("secure")
            if secure is not None:
                # ``secure_aggregation`` masks the vector before it leaves.
                masking = Masking.from_words(secure[len(trees)])  # of this job
                up = {"vector": masking.vector(up, down, float(message.words["weight"]))}
            trees.append(up)
            outline = {name: list(t.shape) for name, t in kept.items()}
            answers.append({"id": job.id, "round": job.round, "outline": outline})
        return SiteMessage({"jobs": answers}, trees)

    def _run(self, job: SiteJob, clients: int, client_number: int, dtype: torch.dtype) -> RunState:
        """The run of a job, with the state of this client after the last round it took part in."""
        all_clients = [OTHER] * clients
        all_clients[client_number] = self.client
        # With ``reject`` the site sends an upload that is not finite. The server refuses it, naming round and client.
        trust = TrustPolicy(on_bad="reject")
        method = self.request.method
        run = _OneClientRun(method, job.hp, self.data, all_clients, job.seed, dtype, trust=trust)
        if job.since:
            state = self.memory.load(job)
            if state:
                run.states[client_number] = state
        return run

    def _save_model(self, run: RunState, job: SiteJob) -> None:
        """Save the site's own model of a job, unless all sites use the server's model.

        The server never has this model. The file is like that of a run in one process, so
        ``fedcache predict FILE IMAGES`` classifies with it. It is replaced whenever the site is scored, so it holds the
        model of the last round.
        """
        method = run.method
        protocol = method.protocol(run.hp)
        client_number = int(run.eligible[0])
        if protocol == "global" or not has_model(run, client_number):
            return
        store = self.request.store
        keys = tuple(self.request.keys)
        arrays = [store.arrays[key] for key in keys]
        down = run.down()
        model = deployed_model(run, client_number, down)
        facts = ModelFacts(
            run=job.id,
            seed=job.seed,
            dataset=str(store.dataset["slug"]),
            method=method.name,
            code=code_of(method),
            hp=job.hp,
            protocol=protocol,
            rounds=run.round,
            dtype=str(run.env.dtype).removeprefix("torch."),
            classes=tuple(store.samples.classes),
            keys=keys,
            recipes=tuple(array.recipe for array in arrays),
            widths=tuple(int(array.shape[2]) for array in arrays),
            views=run.env.views,
            feat_post=self.feat_post,
            clients=run.env.clients,
            saved={self.client.name: client_number},
            computed=computed_as([array.how for array in arrays]),
        )
        text = {}
        if run.env.text is not None:
            text = {"features/text": run.env.text}
        personal = ClientTensors()
        personal.add(client_number, owned(client_tensors(model, down)))
        server = {f"server/{name}": t for name, t in down.items()}
        tensors = owned(text | server) | personal.stacked()
        folder = self.memory.folder / "models"
        make_private(self.memory.folder)
        make_private(folder)
        SavedModel(facts, tensors).save(folder / f"{job.id}.safetensors")


def counts_of(evaluation: Evaluation, data: Data, domains: int) -> Tensor:
    """Counts int64 [domains, C, C + 1] of labelled test rows by domain, label and prediction.

    Rows without a prediction are counted in the last place.
    """
    C = data.classes
    label = data.y.cpu().numpy()[evaluation.rows]
    domain = np.zeros(len(label), np.int64)
    if data.domain is not None:
        domain = data.domain.cpu().numpy()[evaluation.rows]
    known = label >= 0
    guess = np.where(evaluation.predictions < 0, C, evaluation.predictions)[known]
    cell = (domain[known] * C + label[known]) * (C + 1) + guess
    counts = np.bincount(cell, minlength=domains * C * (C + 1))
    return torch.from_numpy(counts.reshape(domains, C, C + 1))


@dataclass(frozen=True)
class StoredClientMemory:
    """Client state between rounds: one file per job and round, sealed with the store and the client."""

    folder: Path  # of this site's state and models
    store: str  # digest of the store
    client: str  # its name; two sites may serve equal stores

    def load(self, job: SiteJob) -> Tree:
        """The state after the last round in which the server used an upload.

        Raises FederatedRunError if the state is missing or damaged. The server gets the message, so it names no path.
        """
        round_ = job.since
        hint = "Restore its state directory, or start the run again with --fresh."
        try:
            found = read_sealed(self._path(job.id, round_), self._seal_facts(job.id, round_))
        except CorruptionError as error:
            raise FederatedRunError(
                f"The state of site {self.client!r} after round {round_} is damaged, so the site cannot "
                "resume from it.",
                hint,
            ) from error
        if found is None:
            raise FederatedRunError(
                f"The state of site {self.client!r} after round {round_} is missing, so the site cannot "
                "resume from it.",
                hint,
            )
        return found.tensors

    def save(self, job: SiteJob, tree: Tree) -> None:
        """Keep the state after the job's round.

        States from ``since`` on are kept too: if the server does not get the answer, it goes back to that round.
        """
        path = self._path(job.id, job.round)
        for folder in (self.folder, path.parent.parent, path.parent):
            make_private(folder)
        write_sealed(path, self._seal_facts(job.id, job.round), {}, owned(tree))
        for old in path.parent.glob("after-*.safetensors"):
            if int(old.stem.removeprefix("after-")) < job.since:
                old.unlink(missing_ok=True)

    def _path(self, job: str, round_: int) -> Path:
        client = digest_of(self.client)[:16]
        return self.folder / job / client / f"after-{round_}.safetensors"

    def _seal_facts(self, job: str, round_: int) -> Facts:
        return {
            "kind": "client state",
            "store": self.store,
            "client": self.client,
            "job": job,
            "round": round_,
        }


@dataclass(frozen=True)
class ShardSite:
    """A store that answers messages."""

    path: Path  # of the store
    state: Path  # folder of the client state
    name: str | None = None  # of the client, for a store that was not cut out of another

    def answer(self, kind: str, message: SiteMessage) -> SiteMessage:
        """The answer to a message; an error becomes a refusal in words. ``SENT`` lists the answers."""
        answer = self._answer(kind, message)
        sent = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "site": self.name or self.path.stem,
            "message": kind,
            "method": message.words["train"].get("method"),
            "words": answer.words,
            "tensors": [{name: list(t.shape) for name, t in tree.items()} for tree in answer.trees],
        }
        append_line(make_private(self.state) / SENT, canonical_json(sent))
        return answer

    def _answer(self, kind: str, message: SiteMessage) -> SiteMessage:
        try:
            config = resolve(TrainConfig, dict(message.words["train"]), {}, "the message")
            request = SiteRequest(Store.open(self.path), config)
            if kind == "facts":
                return SiteMessage({"facts": request.facts(self.name).to_words()})
            if kind == "text":
                text = request.text()
                if text is None:
                    return SiteMessage({}, [{}])
                return SiteMessage({}, [{"text": torch.from_numpy(text)}])
            # The store may have been extracted again since the run began.
            if list(message.words.get("recipes") or []) != request.recipes:
                raise StoreError(
                    f"The features of {self.path.name} have another recipe than at the start of the run.",
                    "Start the run again.",
                )
            feat_post = str(message.words["feat_post"])
            data = request.data(feat_post)
            client = request.client(self.name)
            digest = str(request.store.dataset["digest"])
            memory = StoredClientMemory(self.state, digest, client.name)
            return Site(request, feat_post, data, client, memory).answer(kind, message)
        except FedcacheError as error:
            return refused(error)


@dataclass(frozen=True)
class SiteRequest:
    """A store and the configuration in a message."""

    store: Store
    config: TrainConfig

    def __post_init__(self) -> None:
        check_suited(self.method, self.hp, self.config)

    @property
    def method(self) -> Method:
        return find_method(str(self.config.method))

    @property
    def hp(self) -> dict[str, Value]:
        return self.method.resolve(self.config.preset, self.config.set)

    @property
    def keys(self) -> list[str]:
        return arrays_for(self.method, self.hp, self.store, self.config.backbones, Silent())

    @property
    def recipes(self) -> list[str]:
        return [str(self.store.arrays[key].digest) for key in self.keys]

    def text(self) -> np.ndarray | None:
        """Class text features, for a method that reads them. Raises StoreError if other weights made them."""
        text, _ = text_of(self.method, self.hp, self.store, self.keys)
        if text is not None:
            check_text(self.store, self.keys[0])
        return text

    def client(self, name: str | None) -> Client:
        """The client of this store, with its training and test rows without a defect.

        Raises UsageError for a shard with validation rows, which sites do not score, and for a client without a name.
        Validation rows of a store that is no shard are not used.
        """
        shard = self.store.dataset.get("shard")
        s = self.store.samples
        if shard is None and name is None:
            raise UsageError(
                f"{self.store.path.name} was not made by `fedcache shard`, so its client has no name.",
                "Give it a name:  fedcache flower site --shard PATH --superlink HOST:PORT --name NAME",
            )
        validation = int((s.split == 2).sum())
        if shard is not None and validation:
            file = self.store.path.name
            raise UsageError(
                f"{file} has {validation:,} validation rows, but a federation of sites cannot use validation rows.",
                "Make the store from a partition without --validation:  fedcache shard --partition NAME",
            )
        readable = s.ok == 1
        train = np.flatnonzero(readable & (s.split == 0))
        test = np.flatnonzero(readable & (s.split == 1))
        return Client(name or str(shard["client"]), train, test)  # type: ignore[index]

    def facts(self, name: str | None) -> SiteFacts:
        """The facts that the site reports about itself."""
        store = self.store
        keys = self.keys
        client = self.client(name)
        text, templates = text_of(self.method, self.hp, store, keys)
        text_digest = ""
        if text is not None:
            text_digest = sha256_hex(text.tobytes())
        # A shard knows its number and the store it was cut from, so that the server can detect duplicates.
        shard = store.dataset.get("shard")
        number = None
        parent = ""
        if shard is not None:
            number = int(shard["number"])
            parent = str(shard["parent"])
        s = store.samples
        label = s.label.astype(np.int64)
        lacks_labels = (label[client.train] < 0).any()
        if "labels" in self.method.needs and lacks_labels:
            raise UsageError(
                f"{self.method.name} needs labels, but training rows of {store.path.name} have none.",
                "Add labels to the dataset, then extract or shard again.",
            )
        arrays = [store.arrays[key] for key in keys]
        requested = "feat_post" in self.config.set
        test_uids = sorted(bytes(uid) for uid in s.uid[client.test])
        tests = b"".join(test_uids)
        return SiteFacts(
            name=client.name,
            number=number,
            train=len(client.train),
            test=len(client.test),
            owned=int(classes_owned(label[client.train])),
            tests=sha256_hex(tests),
            classes=tuple(s.classes),
            domains=tuple(s.domains),
            keys=tuple(keys),
            backbones=backbones_of(store, keys),
            recipes=tuple(self.recipes),
            made_from=tuple(canonical_json(dict(array.recipe)).decode() for array in arrays),
            widths=tuple(int(array.shape[2]) for array in arrays),
            views=min(array.shape[1] for array in arrays),
            text=text_digest,
            templates=tuple(templates),
            feat_post=feat_post_for(self.hp, requested, self.config.preset, store, keys),
            dataset=str(store.dataset["digest"]),
            parent=parent,
            slug=str(store.dataset["slug"]),
            rows=int(store.rows),
            ok=int(store.rows_ok),
            code=code_of(self.method),
            version=fedcache.__version__,
        )

    def data(self, feat_post: str) -> Data:
        """The site's rows in the form that methods read."""
        arrays = [self.store.reader(key) for key in self.keys]
        s = self.store.samples
        features = self.text()
        text = None
        if features is not None:
            text = torch.from_numpy(features)
        views = min(array.shape[1] for array in arrays)
        return Data(
            x=prepare_features(arrays, feat_post, views=views)[0],
            y=torch.from_numpy(s.label.astype(np.int64)),
            classes=len(s.classes),
            text=text,
            widths=tuple(array.shape[2] for array in arrays),
            domain=torch.from_numpy(s.domain.astype(np.int64)),
        )


def state_of(home: Path, store: Store) -> Path:
    """Folder of a site's client state. It is named by the content of the store, so a moved store keeps its state."""
    slug = store.dataset["slug"]
    digest = str(store.dataset["digest"])[:16]
    return home / "flower" / f"{slug}-{digest}"
