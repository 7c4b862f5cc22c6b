"""Natural partition: one client for each value of a column, such as a hospital, a writer or a domain.

With ``hold_out`` the rows of some values belong to no client, and are the test set (leave one domain out).
With ``inside`` another scheme assigns the rows of every value to several clients (``north/client-0``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedcache.errors import UsageError, shell_word, unknown
from fedcache.federate.partition.client_table import NumberedNames, RowLists, sorted_once
from fedcache.federate.partition.scheme import (
    DOMAIN,
    Argument,
    Dealt,
    InfeasibleError,
    RowPool,
    Scheme,
    Streams,
    Value,
    Values,
    alpha_argument,
    clients_argument,
    count_of,
    number_of,
    shots_argument,
)
from fedcache.federate.partition.schemes import SCHEMES
from fedcache.store.samples import held_out
from fedcache.tables.groups import Group
from fedcache.tables.words import some_names

NAME = "natural"
NAMED = 10
"""Maximum number of clients that a note lists."""

OF_INSIDE = ("clients", "alpha", "shards", "shots")
"""Arguments that go to the scheme of ``inside``."""


def two_test_sets(tests: Value) -> UsageError:
    """The error for held-out values together with a rule for test rows."""
    return UsageError(
        f"hold_out and tests {tests} both define the test set.",
        "Leave one of them out.",
    )


@dataclass(frozen=True, eq=False)
class Members:
    """The clients of a column, with the rows of their values."""

    words: Sequence[str]  # [M] names of the clients
    train: RowLists  # [M] training rows
    test: RowLists  # [M] rows of the test split


def deal_natural(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """One client per value of the column ``by``, in the order of the values; ``NATURAL`` describes the options."""
    by = str(args["by"])
    given = [key for key in OF_INSIDE if args[key] is not None]
    if given and args["inside"] is None:
        first = given[0]
        schemes = " | ".join(SCHEMES)
        raise UsageError(
            f"The argument {first} needs a scheme, which divides the rows of each value of {by}; no scheme was given.",
            f"--by {shell_word(by)} --scheme {schemes}; or leave out {first}, so that every value is one client",
        )
    # A given ``within`` looks like the default here; ``with_column`` refuses it.
    if args["hold_out"] is not None and args["tests"] != "within":
        raise two_test_sets(args["tests"])
    group = pool.columns.sorted_by(by)
    notes = []
    if args["unlabelled"] == "drop":
        label = pool.columns.label
        train = pool.train[label[pool.train] >= 0]
        test = pool.test[label[pool.test] >= 0]
        lost = len(pool.train) - len(train) + len(pool.test) - len(test)
        if lost:
            notes.append(f"{lost:,} rows without a label are left out")
        pool = replace(pool, train=train, test=test)
    all_rows = np.sort(np.concatenate([pool.train, pool.test]))
    rows = pool.train
    tests = pool.test
    trains_on_all = args["rows"] == "all"
    if args["rows"] == "auto":
        trains_on_all = args["hold_out"] is not None
    if trains_on_all:
        rows = all_rows
        tests = pool.test[:0]
    without = int((group.codes[rows] < 0).sum())
    if without:
        notes.append(f"{without:,} of {len(rows):,} rows have no value of {by} and are left out")
    held_codes = held_out_codes(group, by, args["hold_out"])
    common: np.ndarray | None = None  # global test rows, None for the test split
    if held_codes is not None:
        common = all_rows[np.isin(group.codes[all_rows], held_codes)]
        if not len(common):
            names = ", ".join(group.words[code] for code in held_codes)
            raise UsageError(
                f"Scheme natural: no row with {by} {names} is readable.", "fedcache inspect"
            )
        rows = rows[~np.isin(group.codes[rows], held_codes)]
        tests = tests[~np.isin(group.codes[tests], held_codes)]
    members = members_of(group, rows, tests)
    if args["tests"] == "held-out-clients":
        members, common, note = _hold_out_clients(members, all_rows, group, args, streams)
        notes.append(note)
    within = args["tests"] == "within" and common is None
    if within:
        members, more_notes = _with_own_tests(members, pool)
        notes += more_notes
    members, more_notes = _keep_large(members, args, streams, within=within)
    notes += more_notes
    if args["inside"] is not None:
        return _assign_inside(
            members, pool, args, streams, notes=notes, common=common, within=within
        )
    own_tests = None
    if within:
        own_tests = members.test
        common = sorted_once(own_tests.rows)
    return Dealt(members.train, own_tests, members.words, notes, common=common, pool=rows)


def held_out_codes(group: Group, by: str, values: Value) -> np.ndarray | None:
    """Codes of the held-out values; None without any. Raises UsageError for an unknown value, and for all values."""
    if values is None:
        return None
    assert isinstance(values, tuple)
    for value in values:
        if value not in group.words:
            raise unknown(f"value of {by}", value, group.words)
    if len(set(values)) == len(group.words):
        raise UsageError(
            f"All {len(group.words)} values of {by} are held out, so no client is left to train.",
            "Hold out fewer values.",
        )
    return np.array([group.words.index(value) for value in values])


def members_of(group: Group, rows: np.ndarray, tests: np.ndarray) -> Members:
    """The rows of each value; values without a training row are left out."""
    train = _rows_by_code(group.codes, rows, len(group.words))
    test = _rows_by_code(group.codes, tests, len(group.words))
    members = Members(group.words, train, test)
    return _selected(members, np.flatnonzero(train.sizes > 0))


def _rows_by_code(codes: np.ndarray, rows: np.ndarray, count: int) -> RowLists:
    """A list of ``rows`` for each of ``count`` codes, in stored order; rows without a value are in no list."""
    known = rows[codes[rows] >= 0]
    return RowLists.by_owner(known, codes[known], count)


def _selected(members: Members, which: np.ndarray) -> Members:
    """The members at these places."""
    words = tuple(members.words[i] for i in which.tolist())
    return Members(words, members.train.take(which), members.test.take(which))


def _hold_out_clients(
    members: Members, all_rows: np.ndarray, group: Group, args: Values, streams: Streams
) -> tuple[Members, np.ndarray, str]:
    """Draw the test clients. Returns the other members, the test set (all rows of the test clients), and a note."""
    count = len(members.words)
    share = number_of(args, "held_out_share")
    to_hold_out = min(count - 1, max(1, round(share * count)))
    if to_hold_out < 1:
        raise UsageError(
            f"Scheme natural: {count} client is too few for a division into training and test clients.",
            "To test every client on its own rows: --tests within",
        )
    drawn = np.sort(streams("held-out clients").permutation(count)[:to_hold_out])
    held_out_words = {members.words[i] for i in drawn.tolist()}
    codes = np.array([i for i, word in enumerate(group.words) if word in held_out_words])
    common = all_rows[np.isin(group.codes[all_rows], codes)]
    kept = _selected(members, np.setdiff1d(np.arange(count), drawn))
    note = f"{to_hold_out:,} of {count:,} clients do not train; all their rows are the test set"
    return kept, common, note


def _with_own_tests(members: Members, pool: RowPool) -> tuple[Members, list[str]]:
    """Members that each have test rows, and notes.

    For members without test rows, the fifth of each class with the smallest uids is held out. A member with a single
    row is left out, because it has no row for a test.
    """
    untested = members.test.sizes == 0
    notes = []
    if untested.any():
        rows = members.train.rows
        owner = members.train.owner
        label = pool.columns.label[rows]
        uid = pool.columns.uid[rows]
        chosen = held_out(label, owner, uid, untested[owner])
        # With few rows of each class, a fifth can be no row. Then the row with the smallest uid is held out.
        lacking = untested & (members.train.sizes > 1)
        lacking[owner[chosen]] = False
        one_class = np.zeros_like(label)
        chosen |= held_out(one_class, owner, uid, lacking[owner], most=1)
        count = len(untested)
        sizes = np.bincount(owner[~chosen], minlength=count)
        train = RowLists.of_sizes(rows[~chosen], sizes)
        # The held-out rows follow the test rows of their member.
        test_rows = np.concatenate([members.test.rows, rows[chosen]])
        of_tests = np.concatenate([members.test.owner, owner[chosen]])
        test = RowLists.by_owner(test_rows, of_tests, count)
        members = Members(members.words, train, test)
        drawn = int((test.sizes[untested] > 0).sum())
        if drawn:
            notes.append(
                f"{drawn:,} of {count:,} clients have no rows of the test split, so a fifth of each of their classes "
                "is held out"
            )
    single = members.test.sizes == 0
    dropped = int(single.sum())
    if dropped:
        many = f"{dropped:,} of {len(single):,} clients"
        notes.append(
            f"{many} are left out, because their only row cannot be both a training and a test row"
        )
        members = _selected(members, np.flatnonzero(~single))
    return members, notes


def _keep_large(
    members: Members, args: Values, streams: Streams, *, within: bool
) -> tuple[Members, list[str]]:
    """Members with at least ``min_rows`` rows, and notes. Of more than ``max_clients`` members, as many are drawn."""
    notes = []
    least = count_of(args, "min_rows")
    sizes = members.train.sizes
    if within:
        sizes = sizes + members.test.sizes
    if not len(sizes):
        raise UsageError(
            f"Scheme natural: no value of {args['by']} has both a training row and a test row.",
            "See the values:  fedcache inspect",
        )
    enough = np.flatnonzero(sizes >= least)
    if not len(enough):
        most = int(sizes.max())
        why = f"Scheme natural: no client has {least:,} rows or more; the largest has {most:,}."
        raise NATURAL.infeasible(args, why, {"min_rows": most})
    if len(enough) < len(sizes):
        small = np.flatnonzero(sizes < least)
        named = some_names((members.words[i] for i in small.tolist()), NAMED)
        many = f"{len(small):,} of {len(sizes):,} clients"
        notes.append(f"{many} with fewer than {least:,} rows are left out: {named}")
    most_clients = args["max_clients"]
    if isinstance(most_clients, int) and most_clients < len(enough):
        notes.append(f"{most_clients:,} of {len(enough):,} clients are drawn")
        enough = np.sort(streams("clients").permutation(enough)[:most_clients])
    if len(enough) < len(sizes):
        members = _selected(members, enough)
    return members, notes


def _assign_inside(
    members: Members,
    pool: RowPool,
    args: Values,
    streams: Streams,
    *,
    notes: list[str],
    common: np.ndarray | None,
    within: bool,
) -> Dealt:
    """The rows of every member, assigned to clients inside it by another scheme.

    ``common`` are the global test rows. With ``within``, each client is tested on rows of its member instead.
    """
    scheme = SCHEMES[str(args["inside"])]
    given = {key: args[key] for key in OF_INSIDE if args[key] is not None}
    names = []
    train = []
    test: list[np.ndarray] = []
    enough = []
    labelled = pool.columns.label >= 0
    for word, trained, tested in zip(members.words, members.train, members.test, strict=True):
        if scheme.needs_labels and not labelled[trained].any():
            raise UsageError(
                f"Scheme {scheme.name} assigns rows by class, and no training row of {word} has a label.",
                "Leave out rows without a label:  --option unlabelled=drop",
            )
        values = scheme.resolve({**given, "domain": None})
        # Every value has its own random streams, so that an additional value changes no other draw.
        sub = replace(pool, train=np.sort(trained), dealt=trained, notes=[])
        if within:
            sub = replace(sub, test=np.sort(tested))
        own_streams = Streams(streams.seed, f"{NAME}/{scheme.name}/{word}")
        try:
            dealt = scheme.deal(sub, values, own_streams)
        except InfeasibleError as error:
            # Only arguments of ``OF_INSIDE`` can be set, so advice with ``fill`` cannot be followed.
            instead: dict[str, Value] = {}
            if "fill" not in error.instead:
                instead = {key: v for key, v in error.instead.items() if key in OF_INSIDE}
            raise NATURAL.infeasible(args, f"{word}: {error.message}", instead) from error
        count = len(dealt.train)
        own_names = dealt.names or NumberedNames(count)
        names += [f"{word}/{name}" for name in own_names]
        train += list(dealt.train)
        if within:
            test += dealt.test or [sub.test] * count
        notes += [f"{word}: {note}" for note in dealt.notes]
        if dealt.enough_shots is not None:
            enough.append(dealt.enough_shots)
    own_tests = None
    if within:
        own_tests = test
        common = sorted_once(np.concatenate(test))
    return Dealt(
        train,
        own_tests,
        names,
        notes,
        common=common,
        pool=members.train.rows,
        enough_shots=min(enough, default=None),
    )


# The defaults and help texts in these calls are replaced.
_INSIDE = tuple(
    replace(argument, default=None, help="of inside", named=False)
    for argument in (
        clients_argument(1),
        alpha_argument(1.0),
        SCHEMES["shards"].argument("shards"),
        shots_argument(1, ""),
    )
)
NATURAL = Scheme(
    NAME,
    "each value of a column of the data is a client, e.g. a hospital, a writer or a domain",
    "Caldas et al. 2018, LEAF, arXiv:1812.01097; leave one domain out: Gulrajani & Lopez-Paz 2021, arXiv:2007.01434",
    (
        Argument(
            "by", "word", "domain", "the column whose values are the clients", tag="by-", named=True
        ),
        Argument(
            "hold_out",
            "names",
            None,
            "values of the column; all rows with these values are test rows",
            tag="without-",
        ),
        Argument(
            "tests",
            "choice",
            "within",
            "`within`: each client is tested on its own rows of the test split, or on a fifth of its rows if "
            "it has none there; `held-out-clients`: all rows of a share of the clients are the test set; "
            "`global`: the whole test split",
            choices=("within", "held-out-clients", "global"),
            tag="t",
        ),
        Argument(
            "held_out_share",
            "float",
            0.2,
            "share of the clients whose rows are the test set with `held-out-clients`",
            low=0.0,
            high=1.0,
            above=True,
            tag="share",
        ),
        Argument(
            "rows",
            "choice",
            "auto",
            "source of the training rows: `train` (the training split), `all` (also the test split) or `auto` (`all` "
            "with hold_out, else `train`)",
            choices=("auto", "train", "all"),
            tag="r",
        ),
        Argument(
            "unlabelled",
            "choice",
            "keep",
            "`keep` rows without a label, for methods that read no labels, or `drop` them, for other methods",
            choices=("keep", "drop"),
            tag="u",
        ),
        Argument(
            "min_rows",
            "int",
            1,
            "leave out clients with fewer rows than this (training and own test rows together)",
            low=1,
            high=10**12,
            tag="min",
        ),
        Argument(
            "max_clients",
            "int",
            None,
            "draw at most this many clients at random",
            low=1,
            high=10**9,
            tag="max",
        ),
        Argument(
            "inside",
            "choice",
            None,
            "scheme that divides the rows of every value among several clients",
            choices=tuple(SCHEMES),
            tag="i",
        ),
        *_INSIDE,
        DOMAIN,
    ),
    deal_natural,
    needs_labels=False,
)
