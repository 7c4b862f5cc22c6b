"""Partition: the rows of a store that each client holds.

A partition is made once and saved, so that methods are compared on the same clients. Rows are indices into the store,
never copies of features, so a partition file can be shared without the data. Its digest covers scheme, arguments, seed,
the dataset's digest and all row lists. Clients are stored as arrays (``client_table``), and the object of a single
client is made on access, so a million clients are fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, StoreError, UsageError, unknown
from fedcache.federate.partition import json_file
from fedcache.federate.partition.client_table import (
    Client,
    ClientTable,
    MatchedLists,
    NumberedNames,
    RowLists,
    is_among,
    sorted_once,
)
from fedcache.federate.partition.json_file import beyond, canonical_parts, not_rows, problem_of
from fedcache.federate.partition.natural import NATURAL, OF_INSIDE, two_test_sets
from fedcache.federate.partition.scheme import (
    FEWER,
    SEED,
    TEST,
    TRAIN,
    Argument,
    Columns,
    Dealt,
    InfeasibleError,
    RowPool,
    Scheme,
    Streams,
    Value,
    Values,
    checked_seed,
    long_tailed,
    make_pool,
)
from fedcache.federate.partition.schemes import SCHEMES as OF_POOLS
from fedcache.federate.partition.validation import OWN_SPLIT, with_validation
from fedcache.notebooks import html_table
from fedcache.parsing import as_lists
from fedcache.plugins import PluginTable, plugins
from fedcache.store.chunks import is_array_file, mapped, pack
from fedcache.store.files import Buffer
from fedcache.store.lock import write_output

SCHEMES: Mapping[str, Scheme] = PluginTable(
    "partitions", {**OF_POOLS, NATURAL.name: NATURAL}, Scheme
)
"""All partition schemes by name, also those of plug-ins, which are not listed."""

MOST_TRIED = 20
"""Maximum number of trial partitions in the search for arguments that work."""

NOT_ONE = "Not a partition: "
"""Beginning of the error about rows that are not allowed in a partition."""

MOST_TESTED = 10**10
"""Limit for test rows of all clients together. The digest of so many rows takes minutes."""

SHOWN = 1000
"""Maximum number of clients in the table that a notebook shows."""

__all__ = [
    "SCHEMES",
    "Argument",
    "Client",
    "ClientRow",
    "Columns",
    "InfeasibleError",
    "Partition",
    "Scheme",
    "from_payload",
    "make",
]


@dataclass(frozen=True)
class ClientRow:
    """One line of the table of ``describe``: numbers of training, test and validation rows.

    ``classes`` counts the classes with a training row, and ``counts`` are the training rows of each class.
    """

    client: str
    train: int
    test: int
    classes: int
    counts: tuple[int, ...]
    validation: int = 0


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows of every client, and the scheme that made them.

    Args:
        scheme: its name.
        args: every argument of the scheme, defaults included.
        seed: seed of the random draws.
        clients: in client order; kept as a ``ClientTable``.
        test: int64, ascending; the rows of a global evaluation. A client may be tested on exactly these.
        dataset: digest of the dataset's content.
        pool: number of rows that the scheme could assign.
        dropped: number of these rows that no client holds.
        notes: remarks for a reader.

    Raises:
        FedcacheError: usage error when clients are missing, empty or share a name, when a row list is not ascending
            and non-negative, or when a training row of one client is a test row of any.
    """

    scheme: str
    args: Mapping[str, Value]
    seed: int
    clients: Sequence[Client]
    test: np.ndarray
    dataset: str
    pool: int
    dropped: int
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        problem = not_rows(self.clients, self.test) or problem_of(self.table)
        if problem:
            raise UsageError(
                f"{NOT_ONE}{problem}.", "Make one from a scheme: fedcache partition --help"
            )
        object.__setattr__(self, "clients", self.table)

    @cached_property
    def table(self) -> ClientTable:
        """The clients as arrays."""
        return ClientTable.of(self.clients, self.test)

    @property
    def validation(self) -> np.ndarray | None:
        """int64, ascending: all validation rows; None without any."""
        held = self.table.validation
        if held is None:
            return None
        return held.rows

    def without_validation(self) -> Partition:
        """The partition that is made without ``validation``.

        Validation rows become training rows again, except the rows of the dataset's own validation split.
        """
        args = {k: v for k, v in self.args.items() if k != "validation"}
        table = replace(self.table, validation=None)
        if self.args.get("validation") != OWN_SPLIT:
            table = self.table.without_validation()
        return replace(self, args=args, clients=table)

    def without_client(self, client: str) -> Partition:
        """The partition without a client, whose name is added to the argument ``forgotten``.

        Its own test rows leave with it; the global test rows stay. Raises UsageError for a client that is forgotten
        already or unknown, and for the only client.
        """
        forgotten = self.args.get("forgotten", ())
        assert isinstance(forgotten, tuple)
        names = self.table.names
        if client in forgotten:
            raise UsageError(
                f"The client {client!r} is not in this partition, because it was already forgotten.",
                "fedcache runs list",
            )
        if client not in names:
            raise unknown("client", client, names)
        if len(names) == 1:
            raise UsageError(
                f"{client!r} is the only client, so no training rows would be left.",
                "To remove the run instead:  fedcache runs rm --help",
            )
        number = names.index(client)
        # Validation rows that the client gave are its rows too.
        rows = self.without_validation().table.train_sizes[number]
        return replace(
            self,
            args={**self.args, "forgotten": tuple(sorted((*forgotten, client)))},
            clients=self.table.without(number),
            dropped=self.dropped + int(rows),
        )

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical payload without its ``digest``."""
        digest = hashlib.sha256()
        for part in canonical_parts(self._words(), self.table):
            digest.update(part)
        return digest.hexdigest()

    @property
    def test_protocol(self) -> str:
        """Class shares of the clients' test rows: matched or balanced; for ``natural`` its ``tests``, or held-out."""
        if self.scheme == NATURAL.name:
            if self.args.get("hold_out"):
                return "held-out"
            return str(self.args["tests"])
        return str(self.args.get("test_protocol", "balanced"))

    def to_payload(self) -> dict[str, Any]:
        """The content of a partition file as plain JSON values, rows and digest included."""
        payload: dict[str, Any] = json.loads(b"".join(self._json()))
        return payload

    def _json(self) -> Iterator[bytes]:
        """The canonical JSON of the file, in parts."""
        return canonical_parts({**self._words(), "digest": self.digest}, self.table)

    def _words(self) -> dict[str, Any]:
        """All fields except clients, test rows and digest, as ``json_file`` describes them."""
        schema = json_file.SCHEMA
        if self.validation is not None:
            schema = json_file.WITH_VALIDATION
        return {
            "schema": schema,
            "scheme": self.scheme,
            "args": as_lists(self.args),
            "seed": self.seed,
            "dataset": self.dataset,
            "pool": self.pool,
            "dropped": self.dropped,
            "notes": list(self.notes),
        }

    def save(self, path: Path) -> None:
        """Write the partition file atomically: JSON if its name ends in ``.json``, else arrays.

        Raises UsageError for clients whose names are too long for a file.
        """
        if path.suffix == ".json":
            write_output(path, *self._json(), b"\n")
        else:
            write_output(path, *self.to_file())

    def to_file(self) -> list[Buffer]:
        """The parts of the file of arrays, which follow one another. Raises as ``save``."""
        content = {
            **self._words(),
            "clients": json_file.clients_of(self.table),
            "digest": self.digest,
        }
        try:
            return pack(content, json_file.arrays_of(self.table))
        except ValueError as error:
            raise UsageError(
                f"The partition cannot be written to a file: {error}.",
                "Give the clients shorter names.",
            ) from error

    @classmethod
    def load(
        cls, path: Path | str, *, dataset: str | None = None, rows: int | None = None
    ) -> Partition:
        """Read a partition file, arrays or JSON.

        Args:
            path: of the file.
            dataset: digest the partition must be of; None skips the check.
            rows: rows of the store; every row of the partition must be below.

        Raises:
            FedcacheError: store error if the file is missing or of another dataset; corruption if it is not a
                partition file, its digest does not match its content, or it holds rows that the store of its dataset
                does not have.
        """
        try:
            raw = mapped(Path(path))
        except OSError as error:
            raise StoreError(
                f"Cannot read partition {path}: {error.strerror or error}.",
                "To list partitions: fedcache ls; to make one: fedcache partition --help",
            ) from error
        return cls.from_file(raw, dataset=dataset, rows=rows, origin=str(path))

    @classmethod
    def from_file(
        cls,
        raw: memoryview,
        *,
        dataset: str | None = None,
        rows: int | None = None,
        origin: str = "partition",
        vouched: bool = False,
    ) -> Partition:
        """The partition in a file's bytes; arguments and errors as of ``load``.

        Args:
            raw: the bytes.
            dataset: digest the partition must be of.
            rows: of the store.
            origin: name of the file in messages.
            vouched: whether fedcache wrote these bytes. Then only the checksums of arrays are verified, because the
                digest of the canonical JSON takes longer than everything else.
        """
        if not is_array_file(raw):
            payload = json_file.read_json(raw, origin)
            return from_payload(payload, dataset=dataset, rows=rows, origin=origin)
        fields = json_file.decode(*json_file.read_arrays(raw, origin), origin)
        return _checked(fields, dataset, rows, origin, vouched=vouched)

    def to_dict(self) -> dict[str, Any]:
        """The same as ``to_payload``."""
        return self.to_payload()

    def __repr__(self) -> str:
        return f"Partition({self.summary()})"

    def _repr_html_(self) -> str:
        shown = self.table[:SHOWN]
        rows = [(client.name, len(client.train), len(client.test)) for client in shown]
        return html_table(self.summary(), ("client", "training rows", "test rows"), rows)

    def default_name(self) -> str:
        """A file name with scheme, arguments that are not at their defaults, and seed: ``dirichlet-a0.1-m100-s0``."""
        scheme = SCHEMES.get(self.scheme)
        if scheme:
            return scheme.default_name(self.args, self.seed)
        short = self.digest[:8]
        return f"{self.scheme}-{short}"

    def counts(self, columns: Columns, most: int | None = None) -> np.ndarray:
        """Training rows of each client and class, int64 [M, C]; rows without a label are not counted.

        Only the first ``most`` clients are counted, all for None.
        """
        train = self.table.train.first(most)
        classes = len(columns.classes)
        label = columns.label[train.rows]
        known = label >= 0
        place = train.owner.astype(np.int64)[known] * classes + label[known]
        counts = np.bincount(place, minlength=len(train) * classes)
        return counts.reshape(len(train), classes)

    def describe(self, columns: Columns, most: int | None = None) -> list[ClientRow]:
        """One line for each of the first ``most`` clients: rows, test rows, classes owned, rows of each class."""
        table = self.table
        counts = self.counts(columns, most)
        described = len(counts)
        validation = np.zeros(len(table), np.int64)
        if table.for_validation is not None:
            validation = table.for_validation.test_sizes
        sizes = np.stack([table.train_sizes, table.test_sizes, validation], 1)
        lines = []
        for name, (train, test, held), of_classes in zip(
            table.names[:described], sizes[:described].tolist(), counts.tolist(), strict=True
        ):
            owned = len(of_classes) - of_classes.count(0)
            lines.append(ClientRow(name, train, test, owned, tuple(of_classes), held))
        return lines

    def summary(self) -> str:
        """One line for a person."""
        sizes = self.table.train_sizes
        low = sizes.min()
        high = sizes.max()
        total = sizes.sum()
        tests = len(self.test)
        parts = [
            f"{len(sizes)} clients with {low} to {high} training rows, {total} in all",
            f"{self.dropped} of {self.pool} rows left out",
            f"{self.test_protocol} tests, {tests} global test rows",
        ]
        held = self.table.validation
        if held is not None:
            requested = self.args.get("validation")
            source = f"taken from the training rows (share {requested})"
            if requested == OWN_SPLIT:
                source = "of the dataset's own split"
            parts.append(f"{len(held.rows)} validation rows {source}")
            if held.own is not None and not held.own.sizes.all():
                none = int((held.own.sizes == 0).sum())
                parts[-1] += f", {none} clients have none"
        listed = "; ".join(parts)
        return f"{self.scheme}, seed {self.seed}: {listed}"


def make(scheme: str, columns: Columns, *, seed: int = 0, **args: object) -> Partition:
    """Assign the rows of a dataset to clients.

    Rows with ok = 0 and rows of the validation split are not assigned. Equal arguments give equal partitions.

    Args:
        scheme: a key of ``SCHEMES``.
        columns: of the dataset.
        seed: 0 to 2**63 - 1.
        args: arguments of the scheme, see ``SCHEMES[scheme].arguments``; None means the default.

    Raises:
        FedcacheError: usage error for an unknown scheme or argument, a value out of range, or a dataset without the
            labels, domains or splits the scheme needs.
        InfeasibleError: the arguments cannot be met by these rows; the error carries arguments that can, if any.
    """
    if scheme not in SCHEMES:
        raise unknown("partition scheme", scheme, [*SCHEMES, *plugins("partitions")])
    chosen = SCHEMES[scheme]
    values = chosen.resolve(args)
    seed = checked_seed(seed)
    try:
        return _deal(chosen, columns, values, seed, advise=True)
    except InfeasibleError as error:
        raise _with_working_advice(error, chosen, columns, values, seed) from error


def _with_working_advice(
    error: InfeasibleError, scheme: Scheme, columns: Columns, values: Values, seed: int
) -> FedcacheError:
    """The error with advice that works, or another error if no other arguments help.

    A scheme that assigns the rows of each value of a column fails at the first value without a solution, and its advice
    need not work for the next value. So the advice is tried here before it is given.
    """
    message = error.message
    if error.instead:
        try:
            instead = _working_arguments(scheme, columns, values, error.instead, seed)
        except InfeasibleError as refused:
            if refused.message != message:
                message = f"{message} {refused.message}"
        except FedcacheError as other:
            return other
        else:
            # A command without --partition-seed has the seed 0, so a hint must name any other seed.
            is_complete = bool(error.hint) and (not seed or SEED in error.hint)
            if instead == error.instead and is_complete:
                return error
            return scheme.infeasible(values, message, instead, seed)
    if scheme is NATURAL and values["inside"] is not None:
        message = f"{message} No other number of clients works for every value of {values['by']}."
        # None for all of these arguments, so that each value is one client.
        whole: dict[str, Value] = dict.fromkeys(("inside", *OF_INSIDE))
        with suppress(FedcacheError):
            _deal(scheme, columns, {**values, **whole}, seed)
            message_of_whole = f"{message} Without --scheme, each value is one client."
            return scheme.infeasible(values, message_of_whole, whole, seed)
        return InfeasibleError(message, "See how many rows each value has:  fedcache inspect")
    if error.hint and not error.instead:
        return error
    domain = values["domain"]
    assert domain is None or isinstance(domain, tuple)
    given: dict[str, Value] = {"domain": domain}
    if not scheme.has("clients") and len(domain or columns.domains) < 2:
        simpler = SCHEMES["label-shift"]
        what = "Divide the rows of one domain among several clients instead"
    else:
        simpler = SCHEMES["iid"]
        what = "Divide the rows evenly instead"
        given["clients"] = values.get("clients") or len(columns.domains)
    try:
        command = _working_command(simpler, columns, given, seed)
    except FedcacheError as refused:
        if refused.hint:
            return refused
        return InfeasibleError(message, "See the counts per split:  fedcache inspect")
    return InfeasibleError(message, f"{what}:  {command}")


def _working_command(scheme: Scheme, columns: Columns, given: Values, seed: int) -> str:
    """The command of arguments that work instead of some ``given`` ones. Raises as ``_working_arguments``."""
    found = _working_arguments(scheme, columns, scheme.resolve(given), given, seed)
    return scheme.command(found, seed)


def _working_arguments(
    scheme: Scheme,
    columns: Columns,
    values: Values,
    instead: Values,
    seed: int,
) -> dict[str, Value]:
    """Arguments that work instead of some ``values``, found by following the advice of one error after another.

    Raises InfeasibleError if the last error gives no new advice, and any other error of ``make``.
    """
    found = dict(instead)
    for _ in range(MOST_TRIED):
        try:
            _deal(scheme, columns, {**values, **found}, seed)
        except InfeasibleError as refused:
            if refused.instead.items() <= found.items():
                raise
            found |= refused.instead
        else:
            return found
    raise InfeasibleError("No other arguments work.", "")


def _with_remedy(
    notes: Sequence[str],
    enough: int,
    scheme: Scheme,
    columns: Columns,
    values: Values,
    seed: int,
) -> list[str]:
    """The notes, with a remedy in the last note about too few rows: arguments that work, or more rows.

    Args:
        notes: of the partition.
        enough: the largest ``shots`` for which all classes have enough rows, 0 for none.
        scheme: of the partition.
        columns: of the dataset.
        values: arguments of the scheme.
        seed: of the partition.
    """
    inner = scheme
    if scheme is NATURAL:
        inner = SCHEMES[str(values["inside"])]
    remedy = "extract more images"
    if inner.has("clients"):
        remedy += ", or use fewer --clients"
    # Validation rows are taken later, so they change neither the assigned rows nor the notes.
    values = {**values, "validation": None}
    if enough:
        with suppress(FedcacheError):
            found = _working_arguments(scheme, columns, values, {"shots": enough}, seed)
            tried = _deal(scheme, columns, {**values, **found}, seed)
            # A client with a single training row could not give one for validation.
            can_validate = tried.table.train_sizes.min() > 1
            if can_validate and not any(FEWER in note for note in tried.notes):
                words = [scheme.argument(name).option(found[name]) for name in sorted(found)]
                options = " ".join(words)
                remedy = f"{options} assigns the requested rows"
    last = max(i for i, note in enumerate(notes) if FEWER in note)
    amended = list(notes)
    amended[last] += f"; {remedy}"
    return amended


def _deal(
    scheme: Scheme,
    columns: Columns,
    values: Values,
    seed: int,
    *,
    advise: bool = False,
) -> Partition:
    """The partition of resolved arguments. Raises as ``make``; the advice of an InfeasibleError is not tried.

    With ``advise`` a note about too few rows has a remedy.
    """
    streams = Streams(seed, scheme.name)
    domain = values["domain"]
    assert domain is None or isinstance(domain, tuple)
    split = TRAIN
    if values.get("pool") == "test":
        split = TEST
    pool = make_pool(
        columns, domain, split=split, needs_labels=scheme.needs_labels, scheme=scheme.name
    )
    factor = values.get("long_tail", 1.0)
    assert isinstance(factor, float)
    if factor > 1:
        pool = long_tailed(pool, factor, streams)
    dealt = scheme.deal(pool, values, streams)
    train = RowLists.of(dealt.train).ascending()
    trained = np.zeros(len(columns.label), bool)
    trained[train.rows] = True
    test = dealt.common
    if test is None:
        # Label shift may train on the test split.
        test = pool.test[~trained[pool.test]]
    dealt_from = dealt.pool
    if dealt_from is None:
        dealt_from = pool.dealt
    notes = [*pool.notes, *dealt.notes]
    if advise and dealt.enough_shots is not None:
        notes = _with_remedy(notes, dealt.enough_shots, scheme, columns, values, seed)
    if not len(test) and dealt.test is not None and any(len(rows) for rows in dealt.test):
        test = sorted_once(np.concatenate(dealt.test))
        notes.append(
            "no test split: the global test rows are the test rows of all clients together"
        )
    if not len(test):
        raise UsageError(
            f"Scheme {scheme.name} needs readable test rows, but the chosen domains have none.",
            _tests_hint(columns, domain, seed),
        )
    names = dealt.names or NumberedNames(len(train))
    tests = _tests_of_clients(scheme, dealt, test, train, columns, streams, values)
    clients = ClientTable.dealt(names, train, test, tests)
    untested = np.flatnonzero(clients.test_sizes == 0)
    if len(untested):
        name = names[int(untested[0])]
        raise UsageError(
            f"Scheme {scheme.name}: no test row has a class of client {name!r} (number of clients without test rows: "
            f"{len(untested)}).",
            "Test every client on balanced rows instead: --option test_protocol=balanced",
        )
    # Rows that are in use: trained on, or tested on by some client.
    in_use = trained
    in_use[clients.tests.distinct] = True
    if clients.shares.any():
        in_use[test] = True
    dropped = int((~in_use[dealt_from]).sum())
    if values.get("validation") is not None:
        clients = _with_validation(clients, scheme, values, pool)
    notes += _leaks(columns, train.rows, clients.tested)
    return Partition(
        scheme=scheme.name,
        args=dict(values),
        seed=seed,
        clients=clients,
        test=test,
        dataset=columns.digest,
        notes=tuple(notes),
        pool=len(dealt_from),
        dropped=dropped,
    )


def _tests_of_clients(
    scheme: Scheme,
    dealt: Dealt,
    test: np.ndarray,
    train: RowLists,
    columns: Columns,
    streams: Streams,
    values: Values,
) -> Sequence[np.ndarray] | None:
    """The clients' test rows: those of the scheme, or chosen by ``test_protocol``; None for the global ones."""
    if dealt.test:
        # Clients that all hold one and the same array are stored as a rule, because a million copies need much memory.
        first = dealt.test[0]
        if any(rows is not first for rows in dealt.test):
            return RowLists.of(dealt.test).ascending()
        chosen = MatchedLists.alike(first, len(train))
    elif values.get("test_protocol") == "matched":
        chosen = MatchedLists.of(test, columns.label, streams("test"), train)
    else:
        return None
    total = int(chosen.sizes.sum())
    if total > MOST_TESTED:
        fit = MOST_TESTED // len(chosen.order)
        clients = len(train)
        why = (
            f"Scheme {scheme.name}: {clients} clients have {total} test rows in all, more than the limit of "
            f"{MOST_TESTED}. With at most {fit} clients the number of test rows is always below the limit."
        )
        raise scheme.infeasible(values, why, {"clients": fit})
    return chosen


def _leaks(columns: Columns, trained: np.ndarray, tested: np.ndarray) -> list[str]:
    """A note if an image is in the store twice, once as a training row and once as a test row.

    Digests are compared by their first half, which is fast, and in full if the halves agree.
    """
    halves = np.ascontiguousarray(columns.uid[:, :8])
    half = halves.view(np.uint64)[:, 0]
    alike = is_among(half[tested], half[trained])
    if not alike.any():
        return []
    suspects = tested[alike]
    originals = trained[is_among(half[trained], half[suspects])]
    seen = {uid.tobytes() for uid in columns.uid[originals]}
    twice = sum(uid.tobytes() in seen for uid in columns.uid[suspects])
    if twice:
        return [
            f"{twice} of {len(tested)} test rows are the same image as a training row (equal bytes)"
        ]
    return []


def _tests_hint(columns: Columns, domain: tuple[str, ...] | None, seed: int) -> str:
    """The hint for a dataset without test rows: arguments of label-shift, which takes them from each client."""
    try:
        command = _working_command(SCHEMES["label-shift"], columns, {"domain": domain}, seed)
    except FedcacheError:
        return "Give the dataset a test split."
    return f"Give the dataset a test split, or take test rows from each client:  {command}"


def _with_validation(
    clients: ClientTable, scheme: Scheme, values: Values, pool: RowPool
) -> ClientTable:
    """The clients with the requested validation rows."""
    chosen_by = values["validation"]
    columns = pool.columns
    assert isinstance(chosen_by, float | str)
    by = None
    if scheme is NATURAL:
        by = columns.sorted_by(str(values["by"]))
    per_client = by is not None and values["inside"] is None and not clients.shares.any()
    return with_validation(clients, chosen_by, columns, pool.domains, by, per_client=per_client)


def from_payload(
    payload: object,
    *,
    dataset: str | None = None,
    rows: int | None = None,
    origin: str = "partition",
) -> Partition:
    """The partition of a payload, as ``Partition.to_payload`` made it; arguments and errors as of ``load``."""
    fields = json_file.decode(*json_file.read_payload(payload, origin), origin)
    return _checked(fields, dataset, rows, origin, vouched=False)


def _checked(
    fields: dict[str, Any], dataset: str | None, rows: int | None, origin: str, *, vouched: bool
) -> Partition:
    """The partition of decoded fields, after checks of its rows, its digest and its dataset."""
    digest = fields.pop("digest")
    try:
        partition = Partition(**fields)
    except FedcacheError as error:
        problem = error.message.removeprefix(NOT_ONE).removesuffix(".")
        raise json_file.corrupt(origin, problem) from error
    if vouched:
        # The value of the cached property, which is then not computed.
        partition.__dict__["digest"] = digest
    elif partition.digest != digest:
        raise json_file.corrupt(
            origin, f"its content does not match the digest that it states, {digest}"
        )
    if dataset is not None and partition.dataset != dataset:
        short = partition.dataset[:12]
        raise StoreError(
            f"{origin} was made for another dataset (digest {short}) than the dataset of the store.",
            "Make it again for this store: fedcache partition --help",
        )
    # After the dataset: a partition of a larger dataset has rows beyond this store, and is not corrupt.
    if rows is not None:
        found = beyond(partition.table, rows)
        if found:
            raise json_file.corrupt(origin, f"{found}, expected rows from 0 to {rows - 1}")
    return partition


def with_column(scheme: str | None, arguments: Values) -> tuple[str | None, dict[str, Value]]:
    """Scheme and arguments for given ones: ``by`` or ``hold_out`` select ``natural``, with another scheme inside.

    >>> with_column("dirichlet", {"by": "hospital", "alpha": 0.3})
    ('natural', {'by': 'hospital', 'alpha': 0.3, 'inside': 'dirichlet'})

    ``arguments`` are the given ones, without defaults. Raises UsageError if two of them determine the test set.
    """
    given = dict(arguments)
    if given.get("hold_out") is not None and given.get("tests") is not None:
        raise two_test_sets(given["tests"])
    by_column = given.get("by") is not None or given.get("hold_out") is not None
    if scheme == NATURAL.name or not by_column:
        return scheme, given
    if scheme is not None:
        given["inside"] = scheme
    return NATURAL.name, given
