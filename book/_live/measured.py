"""Values that cells measured when the book was recorded, as JSON and back: the page gives them to the cells below.

What JSON has stands for itself, a list for a list. Anything else is an object with one key, which says what it is:

    {"tuple": [...]}    {"set": [...]}    {"frozenset": [...]}    {"dict": [[key, value], ...]}
    {"range": [start, stop, step]}    {"float": "inf"}    {"kind": "F"}    {"action": "0F3"}
    {"schedule": [name, "0F0 0B0", ...]}
    {"timeline": [schedule, starts, ends, unit, how, [[rank, action, start, end], ...]]}
    {"pplab.costs.Link": {"latency": 1, ...}}    a dataclass or a named tuple of the package, with all that it holds
    {"seen": ["Run", its text, {"losses": ...}]}    of an object that can't be made without torch: what cells read of it

Reading imports no module but the package's own, and calls nothing that a recording names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass

from pplab import Action, Kind, Overlap, Schedule, Span, Timeline, parse

PACKAGES = ("pplab", "pplab_course")


class NoForm(ValueError):
    """A value that a recording can't hold."""


class Seen:
    """What the cells of a chapter read of an object whose class needs torch."""

    def __init__(self, kind: str, text: str, found: dict):
        vars(self).update(found, _kind=kind, _text=text)

    def __getattr__(self, name: str):
        if name.startswith("_"):  # Python and the page ask whether it has a length, a picture ...
            raise AttributeError(name)
        raise ImportError(
            f"the book's recording of this {self._kind} lacks its {name}: open the notebook", name="torch"
        )

    def __repr__(self) -> str:
        found = ", ".join(name for name in vars(self) if not name.startswith("_"))
        return self._text or f"<of a {self._kind} the book has recorded {found}>"


def kept(space: dict, names: Collection[str], read: Collection[str]) -> str:
    """Of a namespace, those of these names whose values have a form, as JSON; see `to_plain`."""
    found = {}
    for name in sorted(space.keys() & names):
        with contextlib.suppress(NoForm, RecursionError):
            found[name] = to_plain(space[name], read)
    return json.dumps(found, ensure_ascii=False, allow_nan=False)


def to_plain(value: object, read: Collection[str] = ()) -> object:
    """A value's form in JSON. `read`: the attributes that are kept of an object which can't be made without torch.

    Raises NoForm for models, functions, pools and the like, and for what holds one.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return _each(value, read)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of numpy's or torch's
        return to_plain(value.item(), read)
    if write := _WRITERS.get(type(value)):
        return write(value, read)
    return _of_package(value, read)


def _each(values: Iterable, read: Collection[str]) -> list:
    return [to_plain(value, read) for value in values]


def _schedule(schedule: Schedule) -> list[str]:
    return [schedule.name, *(" ".join(map(str, row)) for row in schedule.rows)]


def _timeline(timeline: Timeline, read: Collection[str]) -> dict:
    times = (_each(values, read) for values in (timeline.starts, timeline.ends))
    others = [_each(span, read) for span in timeline.others]
    return {"timeline": [_schedule(timeline.schedule), *times, timeline.unit, timeline.how, others]}


_WRITERS = {
    tuple: lambda value, read: {"tuple": _each(value, read)},
    set: lambda value, read: {"set": _each(sorted(value, key=repr), read)},
    frozenset: lambda value, read: {"frozenset": _each(sorted(value, key=repr), read)},
    range: lambda value, read: {"range": [value.start, value.stop, value.step]},
    dict: lambda value, read: {"dict": [_each(item, read) for item in value.items()]},
    Kind: lambda value, read: {"kind": str(value)},
    Action: lambda value, read: {"action": str(value)},
    Overlap: lambda value, read: {"action": str(value)},
    Schedule: lambda value, read: {"schedule": _schedule(value)},
    Timeline: _timeline,
}


def _of_package(value: object, read: Collection[str]) -> dict:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__name__}"
    if kind.__module__.split(".")[0] not in PACKAGES:
        raise NoForm(f"a {name} has no form in a recording")
    if any(base.__name__ in ("Workload", "Extra") for base in kind.__mro__):
        raise NoForm(f"a {name} is what a run is given, not what came of it")
    if _has_form(kind) and not _needs_torch(kind.__module__):
        try:
            return {name: {field: to_plain(each, read) for field, each in _held(value).items()}}
        except NoForm:
            pass  # some field has none: then what cells read of it
    if not _has_form(kind) and not isinstance(value, Exception):
        raise NoForm(f"a {name} has no form in a recording")
    found = {}
    for attribute in sorted(read):
        try:
            found[attribute] = to_plain(getattr(value, attribute), read)
        except Exception:  # it isn't there, has no form, or says that it wasn't measured
            continue
    return {"seen": [kind.__name__, str(value), found]}


def _has_form(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, tuple) and hasattr(kind, "_fields")


def _held(value: object) -> dict[str, object]:
    """All that it holds by name, but for what it computes from that when it is asked."""
    if isinstance(value, tuple):
        return value._asdict()
    computed = functools.cached_property
    return {name: each for name, each in vars(value).items() if not isinstance(getattr(type(value), name, 0), computed)}


@functools.cache
def _needs_torch(module: str) -> bool:
    """Whether a module of the package can't be imported where torch and numpy are absent."""
    code = f"import sys; sys.modules.update(torch=None, numpy=None); import {module}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode != 0


def from_plain(data: object) -> object:
    """The value whose form `to_plain` gave; ValueError for anything else."""
    if isinstance(data, list):
        return list(map(from_plain, data))
    if not isinstance(data, dict):
        return data
    try:
        ((name, content),) = data.items()
        return READERS[name](content) if name in READERS else _object(name, content)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"this is no recording: {error}. {_ANEW}") from error


_ANEW = "Record the chapter anew: python tools/execute_notebooks.py"


def _read_timeline(content: list) -> Timeline:
    (name, *rows), starts, ends, unit, how, others = content
    spans = [Span(*from_plain(span)) for span in others]
    return Timeline(_read_schedule([name, *rows]), from_plain(starts), from_plain(ends), unit, how, tuple(spans))


def _read_schedule(content: list[str]) -> Schedule:
    name, *rows = content
    return Schedule([row.split() for row in rows], name)


READERS = {
    "tuple": lambda content: tuple(map(from_plain, content)),
    "set": lambda content: set(map(from_plain, content)),
    "frozenset": lambda content: frozenset(map(from_plain, content)),
    "range": lambda content: range(*content),
    "dict": lambda content: {from_plain(key): from_plain(value) for key, value in content},
    "float": float,
    "kind": Kind,
    "action": parse,
    "schedule": _read_schedule,
    "timeline": _read_timeline,
    "seen": lambda content: Seen(content[0], content[1], {name: from_plain(each) for name, each in content[2].items()}),
}


def _object(name: str, content: dict) -> object:
    """An object of the package, made without calling anything of its class."""
    module, _, short = name.rpartition(".")
    kind = None
    if module.split(".")[0] in PACKAGES and "__" not in module:
        with contextlib.suppress(ImportError):
            kind = getattr(importlib.import_module(module), short, None)
    if not isinstance(kind, type) or kind.__module__ != module or not _has_form(kind):
        raise ValueError(f"{name} is no dataclass and no named tuple of {' or '.join(PACKAGES)}. {_ANEW}")
    values = {field: from_plain(each) for field, each in content.items()}
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [values[field] for field in kind._fields])
    if missing := {field.name for field in fields(kind)} - values.keys():
        raise ValueError(f"this recording of a {name} lacks {', '.join(sorted(missing))}. {_ANEW}")
    made = object.__new__(kind)
    vars(made).update(values)
    return made
