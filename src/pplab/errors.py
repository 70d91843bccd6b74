"""The errors of the package, which name what was given, what was expected and what to do, and the
checks that raise them.
"""

import difflib
from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import Any

# What to do for somebody who has something else.
_REMEDIES = {
    "Schedule": ': pplab.build("1F1B", num_ranks=4, num_microbatches=8) makes one, or '
    "pplab.Schedule(rows)",
    "Timeline": ": pplab.simulate(schedule) makes one, and a run has run.timeline",
    "Extra": ": give one such as lab.Meter(), and options by name, such as steps=5",
    "Mapping": ": give a dict",
    "Callable": ": give a function",
    "Costs": ": give pplab.Costs(forward=1, latency=0.5), for example",
    "Sequence": ": give a list or a tuple, such as (x,)",
    "Collection": ": give a list or a tuple, such as (x,)",
}
MOST = 1e100  # of a duration or size: sums of millions of them, and their ratios, stay finite


class ScheduleError(ValueError):
    """A schedule that can't run.

    `cause` tells what is wrong, and `remedy` what to do. `rank` and `action` locate the fault (None
    if it has no single place).
    """

    def __init__(self, cause: str, remedy: str, rank: int | None = None, action: Any = None):
        self.rank, self.action, self.cause, self.remedy = rank, action, cause, remedy
        super().__init__(f"{cause}; {remedy}")

    def __reduce__(self) -> tuple:
        return type(self), (self.cause, self.remedy, self.rank, self.action)


def positive_int(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int. Raise ValueError, which names it, unless it is an integer of at
    least `least`.
    """
    try:
        found = index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {shown(value)}")
    return found


def number(name: str, value: Any, most: float = MOST) -> float:
    """Return `value` as a Python number. Raise ValueError, which names it, unless it is from 0 to
    `most`.

    Numbers of numpy and torch are converted, because they wrap around, lose digits, and can't be
    written as JSON.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    is_real = isinstance(plain, Real) and not isinstance(plain, bool)
    if not is_real or not 0 <= plain <= most:
        raise ValueError(f"{name} must be a number from 0 to {most:g}, got {shown(value)}")
    return plain if isinstance(plain, int) else float(plain)


def expect(kind: type, **given: object) -> None:
    """Raise ValueError unless every given value is of that kind."""
    for name, value in given.items():
        if not isinstance(value, kind):
            remedy = _REMEDIES.get(kind.__name__, "")
            a = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise ValueError(f"{name} must be {a} {kind.__name__}, got {shown(value)}{remedy}")


def accept(frozen: object, **checked: object) -> None:
    """Set the fields of a frozen dataclass in its `__post_init__` to the checked form of what was
    given.
    """
    vars(frozen).update(checked)


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut to one short line."""
    try:
        text = " ".join(map(str.strip, repr(value).splitlines()))
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
