"""Laws as checks: a law is a property that, for example, every method must have; ``LawBroken`` is its violation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedcache.errors import FedcacheError, unknown

Subject = TypeVar("Subject")


class LawBroken(AssertionError):  # noqa: N818 - a test report shows this name, which says what happened
    """A law does not hold for the method, backbone, partition scheme or rule on which it was tried."""


def require(holds: bool, otherwise: str) -> None:
    """Raise ``LawBroken`` with the sentence ``otherwise``, unless ``holds`` is true."""
    if not holds:
        raise LawBroken(otherwise)


def by_name(*laws: Callable[[Subject], None]) -> dict[str, Callable[[Subject], None]]:
    """Name -> law, for laws that are functions."""
    return {law.__name__: law for law in laws}


def statement_of(law: Callable[..., None]) -> str:
    """The statement of a law: the first paragraph of its docstring, on one line."""
    first, _, _ = (law.__doc__ or "").partition("\n\n")
    return " ".join(first.split())


@dataclass(frozen=True)
class Check:
    """One law on one subject; a call tries it. Its ``str`` is its name, for ``pytest.mark.parametrize(ids=str)``."""

    subject: str  # the tried object, for messages: "the method fedavg"
    name: str  # name of the law, followed by the execution in brackets if there are several
    statement: str  # the law in a sentence
    attempt: Callable[[], None]  # tries the law on the subject

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Try the law. Raises LawBroken, with the law and the violation, or the type and text of an error."""
        try:
            self.attempt()
        except LawBroken as broken:
            title = f"{self.subject} breaks the law {self.name}"
            raise LawBroken(f"{title}: {self.statement}\nFound: {broken}.") from None
        except Exception as error:
            # fedcache's own errors are sentences; other errors are unclear without their type.
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, FedcacheError):
                message = error.message
            title = f"{self.subject} could not be tried on the law {self.name}"
            raise LawBroken(f"{title}: {self.statement}\nFound: {message}") from error


def less_exceptions(
    checks: Iterable[Check], exceptions: Mapping[str, str] | None, known: Iterable[str]
) -> list[Check]:
    """The checks without those of the laws in ``exceptions`` (name of the law -> why it need not hold).

    Raises UsageError, with "did you mean", for a law that does not exist, and ValueError for an empty reason.
    """
    left_out = dict(exceptions or {})
    for name, reason in left_out.items():
        if name not in set(known):
            raise unknown("law", name, known)
        if not reason.strip():
            raise ValueError(f"The law {name} is left out without a reason.")
    # The name of a check is the name of its law, with the execution in brackets if there are several.
    return [check for check in checks if check.name.partition("[")[0] not in left_out]


def check_all(checks: Iterable[Check]) -> list[str]:
    """Try every check, then report all that fail. Returns the names of the laws that hold; raises LawBroken."""
    names = []
    broken = []
    for check in checks:
        try:
            check()
            names.append(check.name)
        except LawBroken as error:
            broken.append(str(error))
    if broken:
        raise LawBroken("\n\n".join(broken))
    return names
