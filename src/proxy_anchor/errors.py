"""The one exception that a user is meant to read.

Entry points print it as a single line and exit with code 2; everything else keeps its traceback.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

USAGE_ERROR = 2  # exit code after an error that a user can repair
STOPPED = 75  # sysexits.h's "temporary failure, try again": the same command continues the run


class UsageError(ValueError):
    """Something the user can repair: a bad argument, a missing file, an unreadable image.

    The message is one line that names the thing, what was expected, what was found, and the repair.
    """


class AgreedError(UsageError):
    """Raised by all processes of a run alike, or by those that were told by the first: the first one says it for all."""


class FolderTaken(UsageError):
    """Raised where the folder of a run holds another one, before anything is written: it stays as it is."""


class UnreadableImage(UsageError):
    """An image file that is missing, empty, damaged or no image; the message names it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for a misspelt name, or '' when nothing known is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise UsageError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise UsageError(f"{name}={value} is not known; choose one of: {listed}.")


def check_int(name: str, value: object, minimum: int) -> None:
    """Raise UsageError unless `value` is an int (not a bool) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name}={value!r}: expected a whole number of at least {minimum}.")


def check_number(
    name: str, value: object, minimum: float, *, maximum: float = math.inf, exclusive: bool = False
) -> None:
    """Raise UsageError unless `value` is a finite number in [minimum, maximum] (or above `minimum` if exclusive)."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < minimum or value > maximum or (exclusive and value == minimum):  # type: ignore[operator]
        bound = f"above {minimum:g}" if exclusive else f"of at least {minimum:g}"
        upper = "" if maximum == math.inf else f" and at most {maximum:g}"
        raise UsageError(f"{name}={value!r}: expected a finite number {bound}{upper}.")
