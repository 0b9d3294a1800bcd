"""Exceptions with a message for the user, and checks of arguments.

Entry points print a UsageError as a single line and exit with code 2; every other exception keeps its traceback.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable

USAGE_ERROR = 2  # exit code of an error that the user can repair
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes the run


class UsageError(ValueError):
    """An error that the user can repair.

    Examples are a bad argument, a missing file and an unreadable image. The message is one line: argument, expected,
    received, repair.
    """


class AgreedError(UsageError):
    """A UsageError that all ranks raise together; only rank 0 prints it."""


class FolderTaken(UsageError):
    """The run folder already holds another run. Raised before anything is written."""


class UnreadableImage(UsageError):
    """An image file that is missing, empty, damaged or not an image."""


def reason_of(error: BaseException) -> str:
    """Message of an error on one line, or its type without message."""
    return " ".join(str(error).split()) or type(error).__name__


def counted(number: int, noun: str) -> str:
    """'1 image', '2 images', '2 classes'."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' with the closest known name, or ''."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise UsageError unless `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"{name}={value} is not known; choose one of: {', '.join(map(str, choices))}.")


def check_int(name: str, value: object, minimum: int, *, optional: bool = False) -> None:
    """Raise UsageError unless `value` is an int of at least `minimum`, or None where it is optional."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name}={value!r}: expected a whole number of at least {minimum}.")


def check_number(
    name: str, value: object, minimum: float, *, maximum: float = math.inf, exclusive: bool = False
) -> float:
    """Return `value` as a float. Raises UsageError unless it is a finite number in [minimum, maximum].

    exclusive: in (minimum, maximum].
    """
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and minimum <= number <= maximum) or (exclusive and number == minimum):
        bound = f"above {minimum:g}" if exclusive else f"of at least {minimum:g}"
        upper = "" if maximum == math.inf else f" and at most {maximum:g}"
        raise UsageError(f"{name}={value!r}: expected a finite number {bound}{upper}.")
    return number
