"""Numbers that layers of any stage report in their forwards, such as a router's entropy, in every
step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ...actions import F
from ...runtime import Extra, Job, Listener, Rank

# A number's name, its stage, and which of that name it is in the stage's forward.
Place = tuple[str, int, int]
# What a rank heard in a step: the number's place, what its microbatch counts for, and the number.
Heard = list[tuple[Place, float, float]]
_ears: ContextVar[tuple[list, ...]] = ContextVar("ears", default=())


def say(name: str, number: torch.Tensor) -> None:
    """Report a number of this microbatch from a layer's forward, on any stage, to `lab.Numbers()`
    and `lab.Log`.

    Without them it does nothing. It doesn't change the loss, as `pplab.runtime.add_loss` does.
    """
    for ear in _ears.get():
        ear.append((name, number.detach().reshape(())))


@dataclass(frozen=True)
class Numbers(Extra):
    """Keep what layers `say`. `run.extras["numbers"]` has a dict for every measured step, which
    gives by name the means over the microbatches, layer by layer.
    """

    name = "numbers"

    def listen(self, rank: Rank) -> Listener:
        return Hearing(rank)

    def finish(
        self, job: Job, reports: Sequence[list[Heard]]
    ) -> tuple[dict[str, tuple[float, ...]], ...]:
        """Each rank reports its own numbers, and none waits for those of others."""
        return tuple(map(merged, zip(*reports, strict=True)))

    def lines(self, found: Sequence[dict[str, tuple[float, ...]]]) -> list[str]:
        last = found[-1] if found else {}
        return [
            f"{name:<16} {' '.join(f'{x:.4g}' for x in values)} (last step)"
            for name, values in last.items()
        ]


class Hearing(Listener):
    """Collects what is said in forwards. A forward that runs a second time in its backward adds
    nothing.
    """

    events = frozenset(("turn", "action", "call"))

    def __init__(self, rank: Rank):
        self.rank = rank
        # of the step's forwards: stage, microbatch, and what was said
        self.said: list[tuple[int, int, list]] = []
        self.steps: list[Heard] = []

    def begin(self, event: str, what: Any) -> None:
        """Collect for one forward, separately, because halves of a pair may run at once."""
        if event == "turn":
            self.said.clear()  # what was said in passes that aren't measured
        elif event in ("action", "call") and what.kind is F:
            self.said.append((what.stage, what.microbatch, ear := []))
            _ears.set((*_ears.get(), ear))

    def end(self, event: str, what: Any) -> None:
        if event in ("action", "call") and what.kind is F:
            _ears.set(_ears.get()[:-1])
        elif event == "turn":
            self.steps.append(self.read())

    def read(self) -> Heard:
        """This rank's numbers of the step. A microbatch that counts for nothing may have none."""
        places, numbers = [], []
        for stage, microbatch, said in self.said:
            share, counts = self.rank.shares[microbatch], defaultdict(int)
            for name, number in said if share else ():
                places.append(((name, stage, counts[name]), share))
                counts[name] += 1
                numbers.append(number.float())
        values = torch.stack(numbers).tolist() if numbers else []  # a GPU waits once
        return [(*place, value) for place, value in zip(places, values, strict=True)]

    def report(self) -> list[Heard]:
        return self.steps


def merged(ranks: Iterable[Heard]) -> dict[str, tuple[float, ...]]:
    """The numbers of a step from all ranks: by name, the means over microbatches, in the order of
    the layers.
    """
    totals: dict[Place, list[float]] = {}
    for place, share, value in chain(*ranks):
        total = totals.setdefault(place, [0.0, 0.0])
        total[0] += share * value
        total[1] += share
    found: dict[str, tuple[float, ...]] = {}
    for place in sorted(totals):
        value, share = totals[place]
        found[place[0]] = (*found.get(place[0], ()), value / share)
    return found
