"""How long things take: the durations that a simulation gives to a schedule's actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real

from .actions import Kind
from .errors import unknown

Time = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations, in one unit of your choice (`unit` names it in drawings).

    Durations are per stage: a number for all stages, or one value for each. A stage of a schedule with two stages per
    rank is half as deep, so `finer(2)` compares schedules on one model.
    """

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    latency: float = 0  # of a message between two ranks; the sender goes on meanwhile
    unit: str = ""

    def __post_init__(self) -> None:
        for name in _DURATIONS:
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(_duration(name, x) for x in value))
            else:
                _duration(name, value)
        _duration("latency", self.latency)

    def of(self, kind: Kind, stage: int) -> float:
        """How long `kind` takes on `stage`. A full backward is the sum of its two halves."""
        if kind == "B":
            return _at(self.backward_input, stage) + _at(self.backward_weight, stage)
        return _at({"F": self.forward, "I": self.backward_input, "W": self.backward_weight}[kind], stage)

    def finer(self, stages_per_rank: int) -> Costs:
        """The costs of the same model cut into `stages_per_rank` times as many stages.

        >>> Costs(forward=2).finer(2).forward
        1.0
        """
        divided = {name: _divide(getattr(self, name), stages_per_rank) for name in _DURATIONS}
        return replace(self, **divided)

    def check(self, num_stages: int) -> None:
        """Raise ValueError unless every list of per-stage durations has `num_stages` values."""
        for name in _DURATIONS:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ValueError(
                    f"{name} has {len(value)} values for {num_stages} stages: give one per stage, or a single number"
                )

    @classmethod
    def from_options(cls, **options: object) -> Costs:
        """Costs from keyword options, where an unknown name gets an error with the nearest ones."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown("cost", name, known)
        return cls(**options)


_DURATIONS = ("forward", "backward_input", "backward_weight")


def _duration(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return value


def _at(time: Time, stage: int) -> float:
    return time[stage] if isinstance(time, tuple) else time


def _divide(time: Time, by: int) -> Time:
    return tuple(x / by for x in time) if isinstance(time, tuple) else time / by
