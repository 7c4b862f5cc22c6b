"""Partition scheme: a name, declared arguments, and a function that assigns rows to clients.

The arguments are data, so that command-line options, their help, the messages for wrong values and the tests of those
messages all come from one table per scheme.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedcache.errors import CorruptionError, UsageError, closest, shell_word, unknown
from fedcache.store.files import canonical_json
from fedcache.tables.groups import Group

Value = int | float | bool | str | tuple[str, ...] | None
Values = Mapping[str, Value]
Kind = Literal["int", "float", "bool", "choice", "word", "names", "share"]

SEED = "--partition-seed"
LARGEST_SEED = 2**63 - 1


class InfeasibleError(UsageError):
    """The arguments are each in range but cannot be met together by these rows.

    Args:
        message: the requested arguments and the limits of the rows.
        hint: arguments that work, as a command.
        instead: arguments that work, to be merged over the given ones; empty if none were found.
    """

    def __init__(self, message: str, hint: str, instead: Values | None = None) -> None:
        super().__init__(message, hint)
        self.instead: dict[str, Value] = dict(instead or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return InfeasibleError, (self.message, self.hint, self.instead)


@dataclass(frozen=True)
class Argument:
    """One argument of a scheme."""

    name: str  # as a Python keyword; ``--name`` or ``--option name=`` on the command line
    kind: Kind  # int, float, bool, choice (one of ``choices``), word, names (several), share (or one of ``choices``)
    default: Value  # used when the argument is not given; None means "derived from the others", or "all" for names
    help: str  # one sentence
    low: float = -math.inf  # smallest value; not itself allowed when ``above`` is set
    high: float = math.inf  # largest value
    above: bool = False  # the range is open below
    choices: tuple[str, ...] = ()  # the values of a choice
    tag: str = ""  # letters that name the argument in a partition's default name
    named: bool = False  # the default name shows the argument even at its default value
    # whether a partition records the argument only if it is not at its default; such an argument was added in a later
    # release, and partitions of earlier releases keep their digests
    later: bool = False

    def option(self, value: Value | None = None) -> str:
        """The argument on the command line: its own flag, or ``--option name=value``."""
        shown = "VALUE"
        if value is not None:
            shown = shell_word(_as_text(value))
        if self.name in _FLAGS:
            return f"{_FLAGS[self.name]} {shown}"
        return f"--option {self.name}={shown}"

    @property
    def range(self) -> str:
        """The allowed values, in words."""
        match self.kind:
            case "bool":
                return "true or false"
            case "choice":
                return " or ".join(self.choices)
            case "word":
                return "a name"
            case "names":
                return "one or several names"
            case "share":
                return " or ".join(["a share above 0 and below 1", *self.choices])
            case "int":
                words = "an integer"
            case _:
                words = "a number"
        if self.above:
            words += f" above {self.low:,g}"
        elif math.isfinite(self.low):
            words += f" from {self.low:,g}"
        if math.isfinite(self.high):
            words += f" up to {self.high:,.0f}"
        return words

    def check(self, value: object) -> Value:
        """``value`` as this argument's type. Raises UsageError, naming the value found and the values allowed."""
        checked = self._typed(value)
        if checked is None:
            message = f"{self.name} is {value!r}, expected {self.range}."
            near = closest(str(value), self.choices)
            if isinstance(value, str) and near:
                message += f" Did you mean {near!r}?"
            raise UsageError(message, self.option() + f": {self.help}.")
        return checked

    def _typed(self, value: object) -> Value:
        """``value`` as this argument's type; None for a value that is not allowed."""
        if self.kind in ("choice", "share") and isinstance(value, str) and value in self.choices:
            return value
        match self.kind:
            case "bool":
                if isinstance(value, bool):
                    return value
                return None
            case "choice":
                return None
            case "word":
                if isinstance(value, str) and value.strip():
                    return value
                return None
            case "names":
                names = value
                if isinstance(value, str | int):
                    names = (value,)
                if not isinstance(names, Sequence) or not names:
                    return None
                for name in names:
                    # Numbers are names too, for example years, but True and False are not.
                    if isinstance(name, bool) or not isinstance(name, str | int):
                        return None
                return tuple(map(str, names))
            case "share":
                return _share(value)
        # True is an int in Python, but no number of clients.
        if isinstance(value, bool | str):
            return None
        number: int | float
        try:
            if self.kind == "int":
                number = operator.index(value)  # type: ignore[arg-type]
            else:
                number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return None
        too_low = number < self.low or (self.above and number == self.low)
        if not math.isfinite(number) or too_low or number > self.high:
            return None
        return number


@dataclass(frozen=True)
class Scheme:
    """One way of assigning rows to clients."""

    name: str  # as on the command line
    summary: str  # one sentence for lists and help
    paper: str  # source of the scheme
    # declared arguments; ``validation``, which every scheme has, is added. An undeclared argument is an error
    arguments: tuple[Argument, ...]
    # the rows of every client, from a pool and resolved arguments
    deal: Callable[[RowPool, Values, Streams], Dealt]
    needs_labels: bool = True  # whether rows without a label cannot be assigned
    derive: Callable[[Values], Values] = dict  # fills the arguments whose default depends on others

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", (*self.arguments, VALIDATION_ARGUMENT))

    def has(self, name: str) -> bool:
        """Whether the scheme declares an argument of that name."""
        return any(argument.name == name for argument in self.arguments)

    def argument(self, name: str) -> Argument:
        """The declared argument of that name. Raises UsageError, with "did you mean"."""
        known = {argument.name: argument for argument in self.arguments}
        if name not in known:
            described = []
            for a in self.arguments:
                default = _default_in_words(a)
                described.append(f"{a.name} ({a.range}, default {default})")
            listing = ", ".join(described)
            raise unknown(
                f"argument of {self.name}", name, known, hint=f"Arguments of {self.name}: {listing}"
            )
        return known[name]

    def resolve(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Every argument with its value: the given one, checked, or its default. Raises UsageError."""
        values: dict[str, Value] = {argument.name: argument.default for argument in self.arguments}
        for name, value in given.items():
            argument = self.argument(name)
            if value is not None:
                values[name] = argument.check(value)
        resolved = dict(self.derive(values))
        for argument in self.arguments:
            if argument.later and resolved.get(argument.name) == argument.default:
                resolved.pop(argument.name, None)
        return resolved

    def rederived(self, args: Values) -> dict[str, Value]:
        """Resolved arguments with all derived defaults derived again."""
        given = {a.name: args.get(a.name) for a in self.arguments if a.default is not None}
        return self.resolve(given)

    def default_name(self, args: Values, seed: int) -> str:
        """A file name such as ``dirichlet-a0.1-m100-s0``: values that are not defaults, by tag, and the seed."""
        derived = self.rederived(args)
        parts = []
        for a in sorted(self.arguments, key=lambda a: a.tag):
            usual = a.default
            if usual is None:
                usual = derived.get(a.name)
            if a.named or args.get(a.name, a.default) != usual:
                parts.append(a.tag + _in_file_name(args.get(a.name)))
        if "forgotten" in args:  # clients that were left out later (``Partition.without_client``)
            parts.append("without-" + _in_file_name(args["forgotten"]))
        return "-".join([self.name, *parts, f"s{seed}"])

    def command(self, args: Values, seed: int | None = None) -> str:
        """The command line that makes this partition; arguments at their declared default are left out."""
        words = [f"fedcache partition --scheme {shell_word(self.name)}"]
        for argument in self.arguments:
            value = args.get(argument.name)
            if value is not None and value != argument.default:
                words.append(argument.option(value))
        if seed is not None:
            words.append(f"{SEED} {seed}")
        return " ".join(words)

    def infeasible(
        self, args: Values, why: str, instead: Values, seed: int | None = None
    ) -> InfeasibleError:
        """The error for arguments that contradict each other, with a command whose arguments work."""
        return InfeasibleError(why, self.command({**args, **instead}, seed), instead)


VALIDATION_ARGUMENT = Argument(
    "validation",
    "share",
    None,
    "validation rows: a share of every client's training rows, taken from each class, or `split` for the "
    "dataset's own split",
    choices=("split",),
    tag="val",
    later=True,
)
"""The argument of every scheme for validation rows."""

_FLAGS = {
    name: "--" + name.replace("_", "-")
    for name in (
        "clients",
        "alpha",
        "shards",
        "shots",
        "domain",
        "by",
        "tests",
        "validation",
        "hold_out",
        "min_rows",
        "max_clients",
    )
}
"""Argument -> its separate option on the command line. Other arguments are set by ``--option``."""


def option_names(arguments: Iterable[str]) -> list[str]:
    """Names of arguments on the command line: ``--min-rows``; ``--option order`` for those without a flag."""
    return [_FLAGS.get(name, f"--option {name}") for name in arguments]


def _as_text(value: Value) -> str:
    """A value as a user types it."""
    if isinstance(value, tuple | list):  # names in a result or a file are a list
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value)


def _share(value: object) -> float | None:
    """A number above 0 and below 1, also as text; None for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if 0.0 < number < 1.0:  # excludes True and False
        return number
    return None


def _default_in_words(argument: Argument) -> str:
    """The default in words; the help of the argument explains a derived one."""
    if argument.default is not None:
        return _as_text(argument.default)
    if argument.kind == "names":
        return "all"
    return "derived"


def _in_file_name(value: Value) -> str:
    """A value as part of a file name."""
    if isinstance(value, bool):
        value = int(value)
    return re.sub(r"[^A-Za-z0-9._-]", "_", _as_text(value))[:60]


def checked_seed(seed: object) -> int:
    """The seed as an int of 63 bits. Raises UsageError for any other value."""
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number <= LARGEST_SEED:
        raise UsageError(
            f"The seed is {seed!r}, expected an integer from 0 to {LARGEST_SEED}.",
            "For example: --partition-seed 0",
        )
    return number


def number_of(args: Values, name: str) -> float:
    """A resolved numeric argument, for a scheme that has declared it."""
    value = args[name]
    assert isinstance(value, int | float), f"{name} is declared as a number"
    return value


def count_of(args: Values, name: str) -> int:
    """A resolved integer argument, for a scheme that has declared it."""
    value = args[name]
    assert isinstance(value, int), f"{name} is declared as an integer"
    return value


# Arguments shared by several schemes, so that a word means the same thing everywhere.
LARGEST_COUNT = 1_000_000


def clients_argument(default: int) -> Argument:
    """``clients``: the number of clients M."""
    return Argument(
        "clients",
        "int",
        default,
        "number of clients",
        low=1,
        high=LARGEST_COUNT,
        tag="m",
        named=True,
    )


def alpha_argument(default: float) -> Argument:
    """``alpha``: the concentration of the Dirichlet draws."""
    return Argument(
        "alpha",
        "float",
        default,
        "concentration of the Dirichlet draws: small values are skewed, large values are even",
        low=0.0,
        high=1e6,
        above=True,
        tag="a",
        named=True,
    )


def shots_argument(default: int, meaning: str) -> Argument:
    """``shots``: examples of each class."""
    return Argument(
        "shots", "int", default, meaning, low=1, high=LARGEST_COUNT, tag="n", named=True
    )


def tests_argument(default: int) -> Argument:
    """``tests``: test rows of each class in a class-balanced test set."""
    return Argument(
        "tests",
        "int",
        default,
        "for balanced tests: take the first so many rows of each class and domain (all rows if there are fewer)",
        low=1,
        high=LARGEST_COUNT,
        tag="v",
    )


def test_protocol_argument(default: str, meaning: str) -> Argument:
    """``test_protocol``: the class shares of a client's test rows."""
    return Argument(
        "test_protocol", "choice", default, meaning, choices=("matched", "balanced"), tag="t"
    )


SHARED_TESTS = test_protocol_argument(
    "balanced",
    "`balanced`: every client has the same test rows; `matched`: each client has the largest set of test "
    "rows with the class shares of its own training rows",
)
DOMAIN = Argument("domain", "names", None, "use rows of these domains only, in this order", tag="d")
LONG_TAIL = Argument(
    "long_tail",
    "float",
    1.0,
    "ratio of the largest class to the smallest class: random training rows of later classes are left out, so that "
    "the sizes of the classes fall exponentially; 1 leaves out no rows",
    low=1.0,
    high=1e6,
    tag="lt",
    later=True,
)


# The rows a scheme may assign, and the random streams it draws from.


TRAIN = 0
TEST = 1
VALIDATION = 2
SPLITS = {TRAIN: "training", TEST: "test"}


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a dataset that a partition may use: one entry per row of the store, no features."""

    label: np.ndarray  # int [N], -1 unknown
    domain: np.ndarray  # int [N], index into ``domains``
    split: np.ndarray  # int [N], 0 train, 1 test, 2 validation
    ok: np.ndarray  # int or bool [N]; rows with 0 have no features and are never assigned
    uid: np.ndarray  # uint8 [N, 16], the identity of the image
    classes: tuple[str, ...]  # class names, C of them
    domains: tuple[str, ...]  # domain names
    digest: str  # of the dataset's content
    # columns that came with the data, by name; raises for an unknown one
    groups: Callable[[str], Group] | None = None

    def sorted_by(self, name: str) -> Group:
        """A column as codes and words: a group, or ``domain`` or ``class``. Raises UsageError for an unknown one."""
        if name == "domain":
            return Group(self.domain.astype(np.int32), self.domains)
        if name == "class":
            return Group(self.label.astype(np.int32), self.classes)
        if self.groups is None:
            raise unknown("column", name, ("domain", "class"))
        return self.groups(name)

    def __post_init__(self) -> None:
        rows = len(self.label)
        for name, shape in (
            ("domain", (rows,)),
            ("split", (rows,)),
            ("ok", (rows,)),
            ("uid", (rows, 16)),
        ):
            found = getattr(self, name).shape
            if found != shape:
                raise CorruptionError(
                    f"Column {name} has shape {found}, expected {shape}, as there are {rows} labels.",
                    "Check the store: fedcache verify",
                )
        for name, column, low, names in (
            ("label", self.label, -1, self.classes),
            ("domain", self.domain, 0, self.domains),
        ):
            wrong = column[(column < low) | (column >= len(names))]
            if len(wrong):
                found = wrong[0]
                raise CorruptionError(
                    f"Column {name} holds {found}, expected numbers from {low} and below {len(names)}.",
                    "Check the store: fedcache verify",
                )


@dataclass(frozen=True)
class Streams:
    """Independent generators keyed by purpose, so that more draws for one purpose change no draw for another."""

    seed: int
    scheme: str

    def __call__(self, purpose: str, *key: int) -> np.random.Generator:
        """The generator of (seed, partition, scheme, purpose, key)."""
        words = canonical_json([self.seed, "partition", self.scheme, purpose, *key])
        digest = hashlib.sha256(words).digest()
        number = int.from_bytes(digest[:16], "little")
        return np.random.Generator(np.random.Philox(key=number))


@dataclass(frozen=True, eq=False)
class RowPool:
    """Rows with ok = 1 in the chosen domains, in stored order."""

    columns: Columns  # of the dataset
    domains: tuple[int, ...]  # codes of the chosen domains, in the user's order
    train: np.ndarray  # int64, rows of split train
    test: np.ndarray  # int64, rows of split test
    # int64, all rows of the split that is assigned, including rows that were left out because they have no label
    dealt: np.ndarray
    notes: list[str] = field(default_factory=list)

    def by_class(self, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of each class, C arrays (some may be empty), each in stored order."""
        label = self.columns.label[rows]
        return [rows[label == c] for c in range(len(self.columns.classes))]

    def of_domain(self, rows: np.ndarray, domain: int) -> np.ndarray:
        """Those of ``rows`` that belong to a domain."""
        held: np.ndarray = rows[self.columns.domain[rows] == domain]
        return held


FEWER = "fewer than"
"""Text in notes about clients that got fewer rows than requested. No other note contains it."""


@dataclass(frozen=True, eq=False)
class Dealt:
    """Result of a scheme."""

    train: Sequence[np.ndarray]  # training rows of each client, in any order
    # the clients' own test rows; None when the scheme leaves them to ``test_protocol``
    test: Sequence[np.ndarray] | None = None
    names: Sequence[str] | None = None  # names of the clients; None numbers them
    notes: Sequence[str] = ()  # what a reader of the partition should know
    # int64, ascending: the global test rows; None for the test split
    common: np.ndarray | None = None
    # int64: the rows that could have been assigned; None for ``RowPool.dealt``
    pool: np.ndarray | None = None
    # the largest ``shots`` for which all classes have enough rows, 0 for none; None if no class has too few rows
    enough_shots: int | None = None


def make_pool(
    columns: Columns, domain: Sequence[str] | None, *, split: int, needs_labels: bool, scheme: str
) -> RowPool:
    """The pool of the chosen domains, all for None; validation rows and rows with ok = 0 are in no pool.

    Test rows without a label cannot be scored and are left out, unless no test row has one. ``split``, ``TRAIN`` or
    ``TEST``, is the split that is assigned; with ``needs_labels``, its rows without a label are left out too. Raises
    UsageError, for an unknown or repeated domain, and for labels that a scheme needs and the dataset lacks.
    """
    names = columns.domains
    if domain is not None:
        names = tuple(domain)
    for name in names:
        if name not in columns.domains:
            raise unknown("domain", name, columns.domains)
        if names.count(name) > 1:
            raise UsageError(
                f"Domain {name!r} is given twice, expected distinct names.",
                f"--domain {shell_word(name)}",
            )
    codes = tuple(columns.domains.index(name) for name in names)
    in_domains = np.isin(columns.domain, codes)
    chosen = in_domains & np.isin(columns.split, (TRAIN, TEST))
    ok = columns.ok.astype(bool)
    notes = []
    bad = int((chosen & ~ok).sum())
    if bad:
        every = chosen.sum()
        notes.append(f"{bad} of {every} rows are unreadable or removed (ok = 0) and left out")
    usable = chosen & ok
    rows = {code: np.flatnonzero(usable & (columns.split == code)) for code in SPLITS}
    dealt = rows[split]
    for code, name in SPLITS.items():
        known = columns.label[rows[code]] >= 0
        without = int((~known).sum())
        assigned_by_label = needs_labels and code == split
        if assigned_by_label and without and not known.any():
            raise UsageError(
                f"Scheme {scheme} assigns rows by class, but none of the {without} {name} rows has a label.",
                "To use a scheme without labels: fedcache partition --scheme iid",
            )
        # Test rows need a label, because others cannot be scored.
        needs_label = assigned_by_label or code == TEST
        if needs_label and without and known.any():
            notes.append(f"{without} {name} rows without a label are left out")
            rows[code] = rows[code][known]
    return RowPool(columns, codes, rows[TRAIN], rows[TEST], dealt, notes)


def long_tailed(pool: RowPool, factor: float, streams: Streams) -> RowPool:
    """The pool without random training rows, so that class sizes fall exponentially in the order of the classes.

    Class c of the C classes with training rows keeps n factor**(-c / (C - 1)) rows, rounded down, but at least one,
    where n are the rows of the largest class; a class with fewer rows keeps all of them. (Cui et al., "Class-Balanced
    Loss Based on Effective Number of Samples", CVPR 2019, section 5.1.) Raises UsageError without labels.
    """
    held = [rows for rows in pool.by_class(pool.train) if len(rows)]
    if not held:
        raise UsageError(
            "long_tail needs training rows with a label.", "Leave out --option long_tail."
        )
    largest = max(len(rows) for rows in held)
    last = max(1, len(held) - 1)
    kept = []
    for number, rows in enumerate(held):
        # Rounding must not take a row from a size that is an integer.
        size = max(1, int(largest * factor ** (-number / last) + 1e-9))
        kept.append(streams("long-tail", number).permutation(rows)[:size])
    return replace(pool, train=np.sort(np.concatenate(kept)))


def need_rows(rows: np.ndarray, split: str, scheme: str) -> None:
    """Refuse an empty pool. Raises UsageError, naming the split."""
    if not len(rows):
        raise UsageError(
            f"Scheme {scheme} assigns rows of the split {split}, but the chosen domains have no readable row of this "
            "split.",
            "See the counts per split: fedcache inspect",
        )


def first_per_class(pool: RowPool, rows: np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` rows of each class, in stored order; all rows of a class with fewer."""
    # ``rows[:0]`` gives the result its dtype even if there are no classes.
    first = [of_class[:count] for of_class in pool.by_class(rows)]
    return np.concatenate([rows[:0], *first])
