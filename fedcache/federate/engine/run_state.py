"""Run state: the constants of a run, its state between rounds, and the begin and end of a round.

An ``Executor`` trains the clients between begin and end. The state between rounds is (round, server, states) and
nothing else, so a run resumes bit for bit, and all executions share one format. ``fit`` never sees a test row, and a
method that needs no labels gets data without labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FederatedRunError, StoreError, UsageError
from fedcache.federate.engine.client_data import (
    SHARED_SUMS,
    ClientData,
    Data,
    FeatureColumns,
    Features,
    cut_out,
    in_steps,
    stack_clients,
    take_rows,
)
from fedcache.federate.engine.context import (
    SERVER,
    ClientRng,
    Ctx,
    LruCache,
    RunConstants,
    SameObject,
    check_views,
)
from fedcache.federate.engine.hyperparameters import Hp, has_batchnorm
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.method import ClientOverrides, Method, Uploads, check_mixed
from fedcache.federate.engine.outcome import RoundTraffic, Traffic, itemsize
from fedcache.federate.engine.sampling import UNIFORM, ClientSampler, Participation, SamplingRule
from fedcache.federate.execution.gram_states import ClientStates
from fedcache.federate.partition.client_table import (
    Client,
    all_train_rows,
    names_of,
    sorted_once,
    train_sizes,
)
from fedcache.federate.trust.attacks import flipped_labels
from fedcache.federate.trust.pipeline import (
    FAR_FROM_OTHERS,
    BufferedUploads,
    RejectedUpload,
    TrustPolicy,
    UploadPipeline,
    UploadRound,
    reduced_weights,
    weight_warnings,
)
from fedcache.federate.trust.privacy import Noise, PrivateDraws, system_normals
from fedcache.federate.trust.update_validation import (
    UpdateValidation,
    all_bounded,
    is_bounded,
    largest,
    largest_number,
    largest_to_train_from,
    not_finite,
    probe_uploads,
)
from fedcache.heads.linear import Tree

# Selection of the clients that can train.


def eligible_clients(
    method: Method, hp: Hp, clients: Sequence[Client], public: int, trust: TrustPolicy
) -> tuple[np.ndarray, list[str]]:
    """Numbers (int64, ascending) of the clients with enough rows to train and not too many, and warnings.

    The warnings of a private run name no client. Raises FederatedRunError if no client is left, or the public set has
    no row.

    Args:
        method: of the run.
        hp: its hyperparameters.
        clients: all of them.
        public: number of first clients that hold the public set and do not train.
        trust: limits of a client's rows and of its weight.
    """
    if public and not len(clients[0].train):
        raise FederatedRunError(
            f"{method.name} uses client 0 as the public set, but client 0 has no training rows.",
            "Assign rows to client 0, for example with --scheme flesd.",
        )
    names = names_of(clients)
    rows = train_sizes(clients)
    # Every client except the public set is either kept, or skipped for the first reason that holds.
    remaining = np.arange(len(clients)) >= public
    empty = remaining & (rows == 0)
    remaining &= ~empty
    large = np.zeros_like(remaining)
    if trust.max_rows is not None:
        large = remaining & (rows > trust.max_rows)
    remaining &= ~large
    short = remaining & np.isin(rows, _too_few(method, hp, rows))
    kept = np.flatnonzero(remaining & ~short)
    few = "have too few rows for one batch"
    normalised = has_batchnorm(hp)
    if normalised:
        few += " (two rows with BatchNorm, one row with bn=false)"
    warnings = []
    for skipped, why in (
        (empty, "have no training rows"),
        (short, few),
        (large, f"have more rows than --max-rows-per-client {trust.max_rows}"),
    ):
        count = int(skipped.sum())
        if not count:
            continue
        if trust.protects:
            # Noise does not cover the clients' numbers of rows, so no client is named.
            warnings.append(
                f"clients that {why} are skipped; their names are not shown, because this run is private"
            )
        else:
            first = np.flatnonzero(skipped)[:5].tolist()
            listed = ", ".join(names[i] for i in first)
            if count > 5:
                listed += " .."
            warnings.append(f"{count} of {len(clients)} clients {why} and are skipped: {listed}")
    if not len(kept):
        reasons = "; ".join(warnings)
        hint = "Use fewer clients, more rows, or a smaller --set batch="
        if normalised:
            hint += "; or --set bn=false"
        raise FederatedRunError(
            f"None of the {len(clients)} clients can train: {reasons}.", f"{hint}."
        )
    if trust.weighs_by_rows(method, hp):
        weights = rows[kept].astype(np.float64)
        warnings += weight_warnings(names, kept, weights, trust.max_share)
    return kept, warnings


def _too_few(method: Method, hp: Hp, rows: np.ndarray) -> list[int]:
    """The numbers in ``rows`` (training rows of each client) that are too small for one batch."""
    if not method.gradient or "batch" not in hp:
        return []
    # More than two batches of rows always make a whole batch.
    most = 2 * cast(int, hp["batch"])
    candidates = sorted_once(rows[rows <= most]).tolist()
    return [count for count in candidates if not batch_sizes(count, hp)]


# Numbers that clients and server exchange before the first round. If a method needs the mean length of all training
# rows, every client sends the sum of the lengths of its rows and the number of these rows, and receives the mean.


SUM_BYTES = 8
"""Bytes of a float64, the type of all numbers that clients and server exchange before the first round."""


def mean_length(x: Features, rows: np.ndarray) -> float:
    """Mean length of the rows ``rows`` (int64 [n]) of features [N, V, D], view 0, in float64; 0 without rows."""
    total = 0.0
    V = x.shape[1]
    for part in in_steps(rows):
        index = torch.from_numpy(part).to(x.device)
        lengths = take_rows(x, index * V).double().norm(dim=-1)
        total += float(lengths.sum())
    return total / max(1, len(rows))


def mean_training_length(x: Features, clients: Sequence[Client], cache: LruCache) -> float:
    """``mean_length`` of all clients' training rows, computed once for the points of a grid that share ``cache``.

    Rows are added in the order of the matrix, so the number does not depend on the partition.
    """
    # The sorted rows are part of the key, so that points of a grid with the same rows share the number.
    rows = np.sort(all_train_rows(clients))
    key = ("mean length", SameObject(x), rows.tobytes())
    return cache.get(key, lambda: mean_length(x, rows), lambda _: rows.nbytes)


NUMERICAL = (ArithmeticError, ValueError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]  # not in its __all__
"""Errors of a method's server step that are caused by the numbers in uploads."""

MOST_SUSPECTS = 32
"""Maximum number of uploads that the server leaves out one by one, to find the upload that it cannot aggregate."""

CHUNK_ROWS_BYTES = 8 << 20
"""Limit in bytes for row numbers of chunks of clients that are kept for the next round."""


class RunState:
    """The constants of a run and its state between rounds."""

    def __init__(
        self,
        method: Method,
        hp: Hp,
        data: Data,
        clients: Sequence[Client],
        seed: int,
        dtype: torch.dtype,
        overrides: Mapping[int, ClientOverrides] | None = None,
        watch: Callable[[], None] | None = None,
        memo: LruCache | None = None,
        trust: TrustPolicy | None = None,
        identity: str = "",
    ) -> None:
        self.method = method
        self.seed = seed
        self.trust = trust or TrustPolicy()
        self.trust.check(method, hp)
        self.memo = memo
        # Copies of training rows (``_cut``), and the mean length of rows; points of a grid share them.
        self.shared_cache = memo or LruCache()
        # Features are cast once for the whole run; images stay bytes.
        self.data = data
        if data.x.dtype != dtype and data.image is None:
            self.data = replace(data, x=data.x.to(dtype))
        self.overrides = overrides or {}
        check_mixed(method, self.overrides, data.x.shape[2], len(clients))
        self.columns = FeatureColumns(self.data.x)
        self.clients = clients
        self.training_clients = clients
        if method.central:
            # All rows are those of one client. They are sorted, so that the run depends neither on the partition nor on
            # the order of clients.
            rows = np.sort(all_train_rows(clients))
            self.training_clients = [Client("all", rows, np.empty(0, np.int64))]
        text = data.text
        if text is not None:
            text = text.to(data.x.device, dtype)
        row_norm = None
        if "row norms" in method.reads(hp):
            row_norm = mean_training_length(self.data.x, clients, self.shared_cache)
        mean_rows = None
        if "row counts" in method.reads(hp):
            mean_rows = float(train_sizes(self.training_clients).mean())
        self.env = RunConstants(
            data.classes,
            data.x.shape[2],
            data.x.shape[1],
            len(self.training_clients),
            text,
            dtype,
            data.x.device,
            names=data.names,
            backbones=data.backbones,
            row_norm=row_norm,
            mean_rows=mean_rows,
            image=data.image,
            towers=data.towers,
        )
        if watch is not None:
            self.env = replace(self.env, watch=watch)
        hp = method.settle(hp, self.env)
        self.hp = hp
        self._chunk_rows = LruCache(CHUNK_ROWS_BYTES)
        self.warnings: list[str] = []
        self.private: PrivateDraws | None = None
        if self.trust.privacy is not None:
            self.private = PrivateDraws(
                self.trust.privacy, seed, (identity, method.name), hp, self.training_clients
            )
        self.attackers = frozenset[int]()
        attack = self.trust.attack
        if attack is not None:
            names = self.client_names
            self.attackers = attack.attackers(names, seed)
            if not self.attackers:
                self.warnings.append(
                    f"--attack {attack.text}: no client is malicious, because this share of {len(names)} clients is "
                    "less than one client"
                )
        self.labels: Tensor | None = None
        if "labels" in method.reads(hp):
            self.labels = self._labels()
        self.rejected: list[RejectedUpload] = []
        self.unprotected_classes = 0
        self.round = 0
        # Uploads are kept until the end of a round, so that one can be rejected then.
        self.keeps_uploads = not self.trust.plain
        # The pooled upload of the last server step that was tried, and the server after it.
        self._tried: tuple[Tree, Tree] | None = None
        self.expected_clients = 0.0  # mean number of clients in a round
        self.server: Tree = {}
        self.states = ClientStates()
        self.traffic = Traffic.none_of(len(clients))
        self.met = np.zeros(len(self.training_clients), bool)  # clients that received a broadcast
        # Number of first clients that hold the public set and do not train.
        self.public = int("public" in method.reads(hp))
        self.eligible = self._eligible()
        self.draw_by(UNIFORM)
        self.lost: list[int] = []  # clients of this round that get the broadcast and send nothing
        # Clients that send in this round and received their broadcast in an earlier one.
        self.early: frozenset[int] = frozenset()
        self.train_bytes = int(self.client_rows[self.eligible].sum()) * self.data.x[:1].nbytes
        if self.public:
            public = torch.from_numpy(self.train_rows(0)).to(data.x.device)
            self.public_columns = FeatureColumns(self.data.x[public])
            features = self.public_columns.cut(())  # () for all columns
            self.env = replace(self.env, public=cast(Tensor, features))
        self.warnings += method.cautions(hp)
        self.noticed = False  # whether the method has warned about a round

    def _labels(self) -> Tensor:
        """The labels that clients train on: those of the data, except attackers' labels under ``label-flip``."""
        y = self.data.y.to(self.data.x.device)
        attack = self.trust.attack
        if attack is None or attack.name != "label-flip":
            return y
        rows = {c: self.train_rows(c) for c in range(len(self.training_clients))}
        return flipped_labels(y, rows, self.attackers, self.data.classes)

    def _eligible(self) -> np.ndarray:
        """int64, ascending: the clients that can train; adds the warnings of ``eligible_clients``."""
        kept, warnings = eligible_clients(
            self.method, self.hp, self.training_clients, self.public, self.trust
        )
        self.warnings += warnings
        return kept

    def start(self, rounds: int = 1) -> None:
        """Check the hyperparameters against the data, and make the server's first tensors.

        ``rounds`` is the run's number of rounds: uploads of the last round may hold other tensors than the first.
        """
        needs = self.method.reads(self.hp)
        if "text" in needs and self.env.text is None:
            raise StoreError(
                f"{self.method.name} needs class text features, but the features of this run have none.",
                "Use a backbone with a text tower, for example --backbones glyph-clip.",
            )
        # These needs depend on the store or the device, so they are checked before any client trains.
        available = {
            "image tower": self.env.towers,
            "text tower": self.env.towers,
            "pixels": self.env.image,
        }
        for need, found in available.items():
            if need in needs and found is None:
                raise StoreError(
                    f"{self.method.name} needs {need}, but this run has none.",
                    "Train on a store with images: fedcache extract --backbones pixels",
                )
        check_views(self.hp, self.env.views)
        self.method.check(self.hp, self.server_ctx())
        # Contiguous for the reason in ``next_server``.
        made = self.method.init(self.server_ctx()).items()
        self.server = {name: t.contiguous() for name, t in made}
        upload_schemas = [partial(self.expected_uploads, number) for number in (0, rounds - 1)]
        self.trust.check_uploads(self.method, upload_schemas)

    def ctx(self, ids: Sequence[int], axes: int) -> Ctx:
        """The context of clients ``ids``, with a leading client axis (axes=1) or for one client without (axes=0)."""
        names = tuple(self.client_names[i] for i in ids)
        draws = ClientRng(
            self.seed, self.round, names, axes, self.env.dtype, self.env.device, self.memo
        )
        hp = self.hp
        env = self.env
        # A run with different clients computes them one by one, so ``ids`` is then one client.
        overrides = self.overrides.get(ids[0])
        if overrides:
            hp = {**hp, **overrides.hp}
            env = replace(env, width=self.columns.cut(overrides.columns).shape[-1])
            if self.public:
                public = self.public_columns.cut(overrides.columns)
                env = replace(env, public=cast(Tensor, public))
        lead = (len(ids),) * axes
        return Ctx(lead, hp, env, draws, tuple(ids), self.round)

    def server_ctx(self, ids: Sequence[int] = ()) -> Ctx:
        """The server's context; ``ids`` are the clients whose uploads it merges."""
        draws = ClientRng(self.seed, self.round, (SERVER,), 0, self.env.dtype, self.env.device)
        return Ctx((), self.hp, self.env, draws, tuple(ids), self.round)

    def train_rows(self, client: int) -> np.ndarray:
        """int64: the training rows of one client."""
        return np.asarray(self.training_clients[client].train, np.int64)

    def rows(
        self, ids: Sequence[int], axes: int, *, tests: Sequence[Client] | None = None
    ) -> ClientData:
        """The training rows of some clients, or their test rows in ``tests``; chunks of clients are cached."""
        if axes and tests is None and not self.overrides:
            make = partial(self._rows, ids, axes)
            return self._chunk_rows.get((axes, *ids), make, lambda made: made.rows.nbytes)
        return self._rows(ids, axes, tests)

    def _rows(
        self, ids: Sequence[int], axes: int, tests: Sequence[Client] | None = None
    ) -> ClientData:
        if tests is None:
            rows = [self.train_rows(i) for i in ids]
        else:
            rows = [np.asarray(tests[i].test, np.int64) for i in ids]
        return stack_clients(self.features(ids[0]), self.labels, rows, axes)

    def cut(self, client: int) -> ClientData:
        """The training rows of one client, contiguous in memory if those of all clients fit into the cache."""
        train = self.training_clients[client].train
        if not len(train) or self.train_bytes > self.shared_cache.budget:
            return self.rows([client], 0)
        if self.overrides:
            return cut_out(self.features(client), self.labels, [train])[0]
        return self._cut[client]

    @cached_property
    def _cut(self) -> dict[int, ClientData]:
        """Every client's training rows, which points of a grid share."""
        # Points of a grid have the same features, labels and rows, so one of them cuts for all.
        clients = self.eligible.tolist()
        x = self.data.x
        rows = [self.train_rows(c) for c in clients]
        of_rows = (r.tobytes() for r in rows)
        key = ("rows", SameObject(x), SameObject(self.labels), *of_rows)
        make = partial(cut_out, x, self.labels, rows)
        made = self.shared_cache.get(key, make, lambda _: self.train_bytes)
        return dict(zip(clients, made, strict=True))

    def features(self, client: int | None) -> Features:
        """Features [N, V, D] with the columns of a client; with all columns for the server (None)."""
        if client is None or client not in self.overrides:
            return self.data.x
        return self.columns.cut(self.overrides[client].columns)

    def labelled(self, client: int | None) -> ClientData:
        """All clients' labelled training rows, which evaluation may read; features with the columns of ``client``."""
        rows = np.sort(all_train_rows(self.clients))
        labels = self.data.y.cpu().numpy()[rows]
        rows = rows[labels >= 0]
        y = self.data.y.to(self.data.x.device)
        return stack_clients(self.features(client), y, [rows], 0)

    def down(self) -> Tree:
        """The broadcast of this round."""
        return self.method.broadcast(self.server, self.server_ctx())

    def draw_by(self, rule: SamplingRule) -> None:
        """Draw the clients of all rounds by another rule."""
        uniforms = None
        if self.private is not None:
            uniforms = self.private.uniforms
        self.sampler = ClientSampler(
            self.client_names, self.eligible, self.seed, self.client_rows, rule, uniforms
        )

    def sample(self, participation: Participation) -> list[int]:
        """This round's clients in client order; those that drop out are noted."""
        self.lost = self.sampler.lost(self.round, participation)
        return self.sampler.sample(self.round, participation)

    def expected_uploads(self, number: int | None = None) -> Uploads:
        """The form of an upload in round ``number``, counted from 0 (None: this round).

        It is declared by the method, or derived from a fit of noise. Raises UsageError if it can be neither.
        """
        if self.method.uploads is None:
            return self._probed_uploads
        ctx = self.server_ctx()
        if number is not None:
            ctx = replace(ctx, round=number)
        return self.method.uploads(self.server, ctx)

    @cached_property
    def _probed_uploads(self) -> Uploads:
        return probe_uploads(
            self.method, self.data, self.server_ctx(), labelled=self.labels is not None
        )

    def update_validation(self) -> UpdateValidation:
        """The checks of the uploads of this round."""
        return UpdateValidation(self.expected_uploads(), self.round + 1, self.longest_row)

    @property
    def longest_row(self) -> float | None:
        """Upper bound of the norm of a training row, from ``--max-row-norm`` or ``feat_post``; None without."""
        bounds = (self.trust.max_row_norm, self.data.longest_row)
        known = [bound for bound in bounds if bound is not None]
        return min(known, default=None)

    @cached_property
    def client_names(self) -> Sequence[str]:
        """Name of every client."""
        return names_of(self.training_clients)

    @cached_property
    def client_rows(self) -> np.ndarray:
        """float64 [M]: n_i, training rows of every client."""
        return train_sizes(self.training_clients).astype(np.float64)

    def upload_pipeline(
        self, ids: Sequence[int], down: Tree, participation: Participation
    ) -> UploadPipeline:
        """The pipeline for the uploads of this round's clients."""
        possible = len(self.eligible)
        expected_rows = 0.0
        if self.trust.privacy is not None:
            # A private run counts all clients, because noise does not cover the number of eligible ones.
            possible = len(self.training_clients)
            expected_rows = float(self.client_rows[self.eligible].sum())
        self.expected_clients = self.sampler.share(participation) * possible
        noise: Noise = system_normals
        if self.private is not None:
            noise = self.private.normals(self.round)
        rows_of = {c: float(self.client_rows[c]) for c in ids}
        upload_round = UploadRound(
            self.method,
            self.hp,
            self.trust,
            self.expected_uploads(),
            down,
            number=self.round + 1,
            seed=self.seed,
            names=self.client_names,
            rows=self.client_rows,
            weights=reduced_weights(rows_of, self.trust.max_share),
            clients=len(ids),
            attackers=self.attackers,
            expected_clients=self.expected_clients,
            expected_rows=expected_rows,
            noise=noise,
            longest=self.longest_row,
        )
        if self.keeps_uploads:
            return BufferedUploads(upload_round)
        return UploadPipeline(upload_round)

    def upload_size(self, up: Tree) -> tuple[int, int]:
        """(scalars, bytes of one scalar) of an upload. All numbers count in an upload that will be rejected."""
        try:
            scalars = self.method.sent(up, self.server_ctx())
            return scalars, itemsize(up)
        except (KeyError, IndexError, RuntimeError, AttributeError):
            if self.trust.plain:
                raise  # a plain policy has validated the upload by now
            tensors = {}
            if isinstance(up, dict):
                tensors = {k: t for k, t in up.items() if isinstance(t, Tensor)}
            scalars = sum(t.numel() for t in tensors.values())
            return scalars, itemsize(tensors)

    def pooled(self, pipeline: UploadPipeline, ids: Sequence[int]) -> Tree:
        """The pooled upload of the round; rejected uploads and warnings are added to the run.

        If the server cannot aggregate the pooled upload, but can without the upload of one client, that upload is
        rejected. Raises FederatedRunError for an invalid upload under ``--on-bad-update fail``.
        """
        pooled = pipeline.pooled()
        if isinstance(pipeline, BufferedUploads) and self.steps_at_once:
            pipeline, pooled = self._aggregable(pipeline, pooled, ids)
        self.warnings += pipeline.warnings(len(self.rejected), self.unprotected_classes)
        self.rejected += pipeline.rejected
        self.unprotected_classes += pipeline.unprotected_classes
        return pooled

    @property
    def steps_at_once(self) -> bool:
        """Whether the server's next step uses one pooled upload alone."""
        return True

    def _aggregable(
        self, pipeline: BufferedUploads, pooled: Tree, ids: Sequence[int]
    ) -> tuple[BufferedUploads, Tree]:
        """The round in a form that the server can aggregate: unchanged, or without the upload of one client.

        An upload is also left out if it alone makes the model so large that no client can train from it. Raises
        FederatedRunError, naming the suspects, if leaving out one upload does not help.
        """
        # The server's step is tried first, and uploads are suspected only if it fails.
        rejected = {r.client for r in pipeline.rejected}
        ids = [c for c in ids if c not in rejected]
        failure = None
        too_large = {}
        try:
            made = self.next_server(pooled, ids)
            too_large = self._too_large(made)
            # Remembered even if numbers are too large, because ``finish`` needs this step if the round stays unchanged.
            self._tried = pooled, made
            if not too_large:
                return pipeline, pooled
            name, size = next(iter(too_large.items()))
            problem = f"{name} of the model would contain {size:.2g}, so clients could not continue training"
        except FederatedRunError as error:
            failure = error
            problem = failure.message.rstrip(".")
        # The uploads farthest from the others first: the round is aggregated again without each of them in turn.
        suspects = pipeline.suspects()[:MOST_SUSPECTS]
        why = f"the server cannot aggregate the round with this upload ({problem})"
        for client in suspects:
            other_ids = [c for c in ids if c != client]
            try:
                remaining, repooled = pipeline.without(client, why)
                repaired = self.next_server(repooled, other_ids)
            except (FederatedRunError, UsageError):
                continue
            # The upload is the cause if the model without it is smaller by more than a factor of FAR_FROM_OTHERS.
            still_large = any(
                size <= FAR_FROM_OTHERS * largest_number(repaired[name])
                for name, size in too_large.items()
            )
            if still_large:
                continue
            if self.trust.on_bad == "fail":
                name = self.client_names[client]
                raise pipeline.validation.refusal(client, name, why) from failure
            self._tried = repooled, repaired
            return remaining, repooled
        if failure is None:  # no upload alone makes the model so large
            return pipeline, pooled
        if not suspects:
            raise failure
        named = ", ".join(repr(self.client_names[c]) for c in suspects[:5])
        tried = f"Leaving out any one of {len(suspects)} uploads does not help. The uploads of {named} differ most."
        raise FederatedRunError(f"{failure.message} {tried}", failure.hint) from failure

    def _too_large(self, made: Tree) -> dict[str, float]:
        """Tensor of a new model -> its largest number, for tensors with a number too large for training.

        Empty for closed forms, which have no next round, and for simulated attacks, whose effect is to be seen.
        """
        if not self.method.gradient or self.trust.attack is not None:
            return {}
        # Numbers so large that a step of gradient descent from them overflows.
        found = {}
        for name, t in made.items():
            if t.is_floating_point():
                size = largest_number(t)
                if size > largest_to_train_from(t.dtype):
                    found[name] = size
        return found

    def next_server(self, pooled: Tree, ids: Sequence[int]) -> Tree:
        """The server's tensors after a step with pooled uploads; the run is not changed.

        Raises FederatedRunError for a numerical error of the method, and for numbers that are not finite.
        """
        if self._tried is not None and self._tried[0] is pooled:
            return self._tried[1]
        try:
            merged = self.method.aggregate(self.server, pooled, self.server_ctx(ids))
        except NUMERICAL as error:
            number = self.round + 1
            raise FederatedRunError(
                f"Round {number}: {self.method.name} cannot aggregate the uploads: {error}.",
                "Check the clients, or leave out invalid uploads with --on-bad-update reject.",
            ) from error
        # Contiguous as in a file: torch chooses kernels by strides, and a resumed run must give the same bits.
        made = {k: t.contiguous() for k, t in merged.items()}
        self.check_finite(made, (), 0)
        return made

    def fit_one(self, down: Tree, client: int) -> Tree:
        """Train one client alone, without leading axes; returns its upload."""
        self.env.watch()
        data = self.cut(client)
        ctx = self.ctx([client], 0)
        state = self.states.get(client)
        if state is None:
            state = self.method.enter(down, data, ctx)
        state, up = self.method.fit(down, state, data, ctx)
        # A state is checked here. An upload of a plain policy is validated when it is added to the pipeline.
        to_check = state or not self.trust.plain
        if to_check and self.trust.on_bad == "fail":
            for tree in (up, state):
                if not all_bounded(tree):
                    self.check_finite(tree, [client], 0)
        if state:
            self.states[client] = {k: t.contiguous() for k, t in state.items()}
        return up

    def check_finite(self, tree: Tree, ids: Sequence[int], axes: int) -> None:
        """Refuse a result that is not finite. Raises FederatedRunError, naming tensor, round and client.

        Args:
            tree: result of a computation; other objects are left to update validation.
            ids: clients on the leading axis; () for the server's tensors.
            axes: 1 with a leading axis of clients, 0 for one client without.
        """
        if not isinstance(tree, dict):
            return
        for name, t in tree.items():
            floating = isinstance(t, Tensor) and t.is_floating_point()
            if not floating or is_bounded(t):
                continue
            # A server's model may hold large finite numbers, such as the bias -1e30 of a class without rows.
            if not ids and bool(torch.isfinite(t).all()):
                continue
            # [M, ..] or [1, ..]: the first client with a number that is not finite is named.
            of_clients = t.reshape(1, -1)
            if axes:
                of_clients = t.flatten(1)
            bounded = (of_clients.abs() <= largest(t.dtype)).all(1)
            bad = int((~bounded).nonzero()[0])
            culprit = None
            if ids:
                client = ids[bad]  # position 0 for a tensor that clients share
                culprit = client, self.training_clients[client].name
            raise not_finite(name, of_clients[bad], self.round + 1, culprit, self.method, self.hp)

    def diagnose(self) -> dict[str, float]:
        """The method's own numbers about the current state; labels are read here as in any evaluation."""
        # Labels of the clients that took part, in the order of the rows in their states.
        labels = {c: self.data.y[torch.from_numpy(self.train_rows(c))] for c in self.states}
        return self.method.diagnose(self.server, self.states, labels, self.server_ctx())

    def finish(
        self, ids: Sequence[int], down: Tree, pooled: Tree, ups: Sequence[tuple[int, int]]
    ) -> RoundTraffic:
        """The end of a round: aggregate and count; advances ``round`` and ``server``.

        ``ups`` are (scalars, bytes of one) that each client sent.
        """
        self.server = self.next_server(pooled, ids)
        self._tried = None
        if not self.noticed:
            notice = self.method.notice(pooled, self.server_ctx(ids))
            if notice:
                self.noticed = True
                self.warnings.append(f"round {self.round + 1}: {notice}")
        # A one-shot method has nothing to send before its round; it sends the model of the round afterwards.
        delivered = down
        if self.method.one_shot:
            delivered = self.down()
        if self.trust.secret_participants:
            ids, ups = self._expected_to_send()
        traffic = self._count(ids, delivered, ups)
        self.round += 1
        return traffic

    def nobody_sends(self, down: Tree) -> RoundTraffic:
        """A round in which no upload arrives: the server and all clients stay as they are."""
        traffic = self._count((), down, ())
        self.round += 1
        return traffic

    def _expected_to_send(self) -> tuple[list[int], list[tuple[int, int]]]:
        """As many clients as a round has on average, rounded up, and the size of each client's upload.

        The counts use them in place of the real participants if these are secret: the real numbers and names would
        reveal who took part.
        """
        # An upload of the declared shapes that takes no memory: one number, expanded.
        declared = self.expected_uploads().items()
        up = {name: torch.ones((), dtype=t.dtype).expand(t.shape) for name, t in declared}
        # 1e-9 less, so that a rounding error of the product does not add a client.
        count = math.ceil(self.expected_clients - 1e-9)
        return list(range(count)), [self.upload_size(up)] * count

    def _count(
        self, ids: Sequence[int], down: Tree, ups: Sequence[tuple[int, int]]
    ) -> RoundTraffic:
        """Add the traffic of a round to the counter; arguments as ``finish``."""
        method = self.method
        if method.central:
            nothing = RoundTraffic(len(self.clients), 0, 0, 0, 0, 0, 0)
            self.traffic.rounds.append(nothing)
            return nothing
        broadcast_scalars = method.received(down, self.server_ctx())
        size = itemsize(down)
        # Class text features reach a client once, with its first broadcast.
        once = 0
        once_bytes = 0
        needs_text = "text" in method.reads(self.hp) and method.text_travels
        if needs_text and self.env.text is not None:
            once = self.env.text.numel()
            once_bytes = self.env.text.element_size()
        who = np.array((*ids, *self.lost), np.int64)  # no client twice; the lost send nothing
        # [n, 2]: scalars that each client sent, and the bytes of one.
        sizes = np.zeros((len(who), 2), np.int64)
        uploaded = np.fromiter(chain.from_iterable(ups), np.int64, 2 * len(ids))
        sizes[: len(ids)] = uploaded.reshape(-1, 2)
        # Clients that received their broadcast in an earlier round receive nothing again.
        is_receiver = ~np.isin(who, list(self.early))
        text = np.where(self.met[who], 0, once)
        sent = sizes[:, 0]
        scalars_received = is_receiver * broadcast_scalars
        paper_up, paper_down = self._paper_counts(who, sent, broadcast_scalars)
        counts = {
            "up": sent,
            "down": scalars_received + text,
            "up_bytes": sizes.prod(1),
            "down_bytes": scalars_received * size + text * once_bytes,
            "paper_up": paper_up[: len(ids)],
            "paper_down": is_receiver * paper_down + text,
        }
        self.met[who] = True
        self.traffic.up[who] += counts["up"]
        self.traffic.down[who] += counts["down"]
        totals = {name: int(of_clients.sum()) for name, of_clients in counts.items()}
        if self.round == 0:
            # Before the first round, each client that can train has sent sums and received the means.
            clients = len(self.eligible)
            shared = self._shared_numbers()
            self.traffic.up[self.eligible] += shared["up"]
            self.traffic.down[self.eligible] += shared["down"]
            for way, numbers in shared.items():
                totals[way] += numbers * clients
                totals[f"{way}_bytes"] += SUM_BYTES * numbers * clients
        receiver_count: int | None = len(who) - len(self.early)
        if receiver_count == len(ids):
            receiver_count = None
        traffic = RoundTraffic(len(ids), **totals, receivers=receiver_count)
        self.traffic.rounds.append(traffic)
        return traffic

    def _shared_numbers(self) -> dict[str, int]:
        """Numbers that each client sends and receives before the first round, for means over all clients' rows."""
        post = str(self.hp.get("feat_post"))
        means = SHARED_SUMS.get(post, 0) * self.env.width + (self.env.row_norm is not None)
        mean_rows = self.env.mean_rows is not None
        # The number of rows is sent once, with sums or for the mean number of rows.
        sends_row_count = bool(means) or mean_rows
        return {"up": means + sends_row_count, "down": means + mean_rows}

    def _paper_counts(
        self, who: np.ndarray, sent: np.ndarray, received: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scalars up and down of some clients as the method's paper counts them, else as they are sent."""
        count = self.method.paper_count
        env = self.env
        if count is None:
            return sent, np.full(len(who), received)
        pairs = [count(env.width, env.classes, env.clients, self.hp)]
        if self.overrides:  # clients that differ are counted one by one
            ctxs = (self.ctx([client], 0) for client in who.tolist())
            pairs = [count(ctx.env.width, env.classes, env.clients, ctx.hp) for ctx in ctxs]
        # One pair for all clients, or a pair for each client; the shape is given because there may be no client.
        table = np.array(pairs, np.int64).reshape(-1, 2).T
        up, down = np.broadcast_to(table, (2, len(who)))
        return up, down
