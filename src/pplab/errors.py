"""Errors that say what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ScheduleError(ValueError):
    """A schedule that can't run.

    Attributes: `rank` and `action` locate the fault (None where it has no single place), `cause` says what is wrong,
    `remedy` says what to change.
    """

    def __init__(self, cause: str, remedy: str, rank: int | None = None, action: object = None):
        self.rank, self.action, self.cause, self.remedy = rank, action, cause, remedy
        super().__init__(f"{cause}; {remedy}")

    def __reduce__(self):
        return type(self), (self.cause, self.remedy, self.rank, self.action)


def positive_int(name: str, value: object) -> int:
    """Return `value` when it is an integer of at least 1; raise ValueError that names it otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    value = value.__index__()
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def unknown(what: str, given: object, known: Iterable[str]) -> ValueError:
    """A ValueError for a name that isn't among `known`, with the nearest ones."""
    known = list(known)
    lowered = {name.lower(): name for name in known}
    near = [lowered[n] for n in difflib.get_close_matches(str(given).lower(), lowered, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"unknown {what} {given!r}: {hint}known: {', '.join(known)}")
