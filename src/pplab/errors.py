"""Errors that say what was given, what was expected and what to do, and the gates that raise
them.
"""

import difflib
from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import Any

MOST = 1e100  # of a duration or size: sums of millions of them, and their ratios, stay finite


class ScheduleError(ValueError):
    """A schedule that can't run.

    `rank` and `action` locate the fault (None: it has no one place), `cause` says what is wrong,
    `remedy` what to do.
    """

    def __init__(self, cause: str, remedy: str, rank: int | None = None, action: Any = None):
        self.rank, self.action, self.cause, self.remedy = rank, action, cause, remedy
        super().__init__(f"{cause}; {remedy}")

    def __reduce__(self) -> tuple:
        return type(self), (self.cause, self.remedy, self.rank, self.action)


def positive_int(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int when it is an integer of at least `least`; raise ValueError that
    names it otherwise.
    """
    try:
        found = index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {shown(value)}")
    return found


def number(name: str, value: Any, most: float = MOST) -> float:
    """Return `value` as Python's number when it is one from 0 to `most`; raise ValueError that
    names it otherwise.

    numpy's and torch's become Python's: theirs wrap around, lose digits, and can't be written as
    JSON.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    is_real = isinstance(plain, Real) and not isinstance(plain, bool)
    if not is_real or not 0 <= plain <= most:
        raise ValueError(f"{name} must be a number from 0 to {most:g}, got {shown(value)}")
    return plain if isinstance(plain, int) else float(plain)


def expect(kind: type, **given: object) -> None:
    """Raise ValueError unless all that is given is of that kind."""
    for name, value in given.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {shown(value)}")


def accept(frozen: object, **checked: object) -> None:
    """Set fields of a frozen dataclass in its `__post_init__`: what was given, in its checked
    form.
    """
    vars(frozen).update(checked)


def shown(value: object) -> str:
    """What was given, as an error can show it: on one short line, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, a list in itself, somebody's own
        text = object.__repr__(value)
    return text if len(text) <= 160 else f"{text[:150]} ..."


def unknown(what: str, given: object, known: Iterable[str]) -> ValueError:
    """A ValueError for a name that isn't among `known`, with the nearest ones."""
    known = list(known)
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), lowered, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(lowered[name] for name in near)}? " if near else ""
    return ValueError(f"unknown {what} {given!r}: {hint}known: {', '.join(known)}")
