"""What a partition scheme is: a name, declared arguments, and a function that deals rows to clients.

The arguments are data, so that command-line options, their help, the messages for wrong values and the tests of those
messages all come from one table per scheme.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedcache.errors import UsageError, closest, shell_word, unknown

if TYPE_CHECKING:
    from fedcache.federate.partition.rows import Dealt, RowPool, Streams

Value = int | float | bool | str | tuple[str, ...] | None
Values = Mapping[str, Value]
Kind = Literal["int", "float", "bool", "choice", "word", "names", "share"]

LARGEST_SEED = 2**63 - 1


class InfeasibleError(UsageError):
    """The arguments are each in range but cannot be met together by these rows.

    Args:
        message: what was asked for and what the rows allow.
        hint: the value that works, as a command.
        instead: arguments that do work, to be merged over those given; empty when none was found.
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
    # at its default it is no part of a partition: partitions that were saved before there was such an argument keep
    # their digests
    later: bool = False

    def option(self, value: Value | None = None) -> str:
        """The argument on the command line: its own flag, or ``--option name=value`` for the rarer ones."""
        shown = shell_word(_shown(value)) if value is not None else "VALUE"
        return (
            f"--{_FLAGS[self.name]} {shown}"
            if self.name in _FLAGS
            else f"--option {self.name}={shown}"
        )

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
        kind = "an integer" if self.kind == "int" else "a number"
        low = (
            f"{'above' if self.above else 'from'} {self.low:,g}" if math.isfinite(self.low) else ""
        )
        high = f"up to {self.high:,.0f}" if math.isfinite(self.high) else ""
        return " ".join(word for word in (kind, low, high) if word)

    def check(self, value: object) -> Value:
        """``value`` as this argument's type. Raises UsageError, naming the value found and the values allowed."""
        checked = self._typed(value)
        if checked is None:
            near = closest(value, self.choices) if isinstance(value, str) and self.choices else None
            guess = f" Did you mean {near!r}?" if near else ""
            raise UsageError(
                f"{self.name} is {value!r}, expected {self.range}.{guess}",
                f"{self.option()}: {self.help}.",
            )
        return checked

    def _typed(self, value: object) -> Value:
        match self.kind:
            case "bool":
                return value if isinstance(value, bool) else None
            case "choice":
                return value if isinstance(value, str) and value in self.choices else None
            case "word":
                return value if isinstance(value, str) and value.strip() else None
            case "names":
                names = (
                    (value,) if isinstance(value, str | int) else value
                )  # years and ids are names too
                if (
                    not isinstance(names, Sequence)
                    or not names
                    or not all(isinstance(n, str | int) for n in names)
                ):
                    return None
                return None if any(isinstance(n, bool) for n in names) else tuple(map(str, names))
            case "share":
                return value if isinstance(value, str) and value in self.choices else _share(value)
        if isinstance(value, bool):  # True is an int to Python, but nobody means one client by it
            return None
        try:
            number: int | float = operator.index(value) if self.kind == "int" else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return None
        too_low = number <= self.low if self.above else number < self.low
        return (
            None
            if isinstance(value, str) or not math.isfinite(number) or too_low or number > self.high
            else number
        )


@dataclass(frozen=True)
class Scheme:
    """One way of dealing rows to clients."""

    name: str  # as on the command line
    summary: str  # one sentence for lists and help
    paper: str  # where the scheme comes from
    # what it reads, and what every partition may have; an argument it does not declare is an error
    arguments: tuple[Argument, ...]
    deal: Callable[
        [RowPool, Values, Streams], Dealt
    ]  # the rows of every client, from a pool and resolved arguments
    needs_labels: bool = True  # rows with unknown label cannot be dealt
    derive: Callable[[Values], Values] = dict  # fills the arguments whose default depends on others

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", (*self.arguments, VALIDATION))

    def argument(self, name: str) -> Argument:
        """The declared argument of that name. Raises UsageError, with "did you mean"."""
        known = {argument.name: argument for argument in self.arguments}
        if name not in known:
            listing = ", ".join(
                f"{a.name} ({a.range}, default {_default(a)})" for a in self.arguments
            )
            raise unknown(
                f"argument of {self.name}", name, known, hint=f"Arguments of {self.name}: {listing}"
            )
        return known[name]

    def resolve(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Every argument with its value: those given, checked; else the defaults. Raises UsageError."""
        values: dict[str, Value] = {argument.name: argument.default for argument in self.arguments}
        for name, value in given.items():
            argument = self.argument(name)
            if value is not None:
                values[name] = argument.check(value)
        later = {argument.name: argument.default for argument in self.arguments if argument.later}
        return {k: v for k, v in self.derive(values).items() if k not in later or v != later[k]}

    def rederived(self, args: Values) -> dict[str, Value]:
        """Resolved arguments as if those with a derived default had not been given."""
        return self.resolve(
            {a.name: args.get(a.name) for a in self.arguments if a.default is not None}
        )

    def default_name(self, args: Values, seed: int) -> str:
        """A file name such as ``dirichlet-a0.1-m100-s0``: what is not the default, by tag, then the seed."""
        usual = self.rederived(args)
        shown = [
            a
            for a in self.arguments
            if a.named
            or args.get(a.name, a.default)
            != (a.default if a.default is not None else usual.get(a.name))
        ]
        parts = [f"{a.tag}{_spelt(args.get(a.name))}" for a in sorted(shown, key=lambda a: a.tag)]
        return "-".join([self.name, *parts, f"s{seed}"])

    def command(self, args: Values) -> str:
        """The command line that makes this partition; arguments at their declared default are left out."""
        words = [f"fedcache partition --scheme {shell_word(self.name)}"]
        for argument in self.arguments:
            value = args.get(argument.name)
            if value is not None and value != argument.default:
                words.append(argument.option(value))
        return " ".join(words)

    def infeasible(self, args: Values, why: str, instead: Values) -> InfeasibleError:
        """The error of arguments that cannot be met, with the command of those that can."""
        return InfeasibleError(why, self.command({**args, **instead}), instead)


VALIDATION = Argument(
    "validation",
    "share",
    None,
    "rows to choose by: this share of the training rows of every client, class by class, or the dataset's own split",
    choices=("split",),
    tag="val",
    later=True,
)
"""An argument of every scheme."""

_FLAGS = {
    **{
        name: name
        for name in ("clients", "alpha", "shards", "shots", "domain", "by", "tests", "validation")
    },
    "hold_out": "hold-out",
    "min_rows": "min-rows",
    "max_clients": "max-clients",
}
"""Those that have an option of their own, and what it is called."""


def option_names(arguments: Iterable[str]) -> list[str]:
    """What arguments are called on the command line: ``--min-rows``; ``--option by`` for those without a flag."""
    return [f"--{_FLAGS[name]}" if name in _FLAGS else f"--option {name}" for name in arguments]


def _shown(value: Value) -> str:
    """A value as a user types it."""
    if isinstance(value, tuple | list):  # a list where a result or a file holds names
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _share(value: object) -> float | None:
    """A number above 0 and below 1, also as text; None for anything else."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if 0.0 < number < 1.0 else None


def _default(argument: Argument) -> str:
    """The default in words; its help says how a derived one comes about."""
    if argument.default is not None:
        return _shown(argument.default)
    return "all" if argument.kind == "names" else "derived"


def _spelt(value: Value) -> str:
    """A value as part of a file name."""
    text = _shown(int(value) if isinstance(value, bool) else value)
    return "".join(c if (c.isascii() and c.isalnum()) or c in "._-" else "_" for c in text)[:60]


def checked_seed(seed: object) -> int:
    """The seed as an int of 63 bits. Raises UsageError, for anything else."""
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
        "concentration of the Dirichlet draws: small is skewed, large is even",
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
        "balanced tests: first rows of each class and domain (fewer where fewer exist)",
        low=1,
        high=LARGEST_COUNT,
        tag="v",
    )


def test_protocol_argument(default: str, meaning: str) -> Argument:
    """``test_protocol``: whose class shares a client is tested on."""
    return Argument(
        "test_protocol", "choice", default, meaning, choices=("matched", "balanced"), tag="t"
    )


SHARED_TESTS = test_protocol_argument(
    "balanced",
    "balanced: every client is tested on the same test rows; matched: on the largest set of test rows with the class "
    "shares of its own training rows",
)
DOMAIN = Argument("domain", "names", None, "use rows of these domains only, in this order", tag="d")
