"""The settings in which time is compared with memory: four ranks, several times, and the running case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pplab import Costs, Memory
from pplab.lab import Case, Problem

P = 4
CASE = Case()
CUTS = {
    "one stage per rank": [8, 9, 8, 7],
    "loop": [3, 3, 5, 5, 4, 6, 4, 2],
    "V": [4, 4, 4, 4, 5, 5, 4, 2],
}
KNOWN = {"one stage per rank": "1F1B", "loop": "Interleaved1F1B", "V": "ZB-V"}  # a schedule of that placement
LIMITS = {  # in a rank's activations of a microbatch
    "one stage per rank": [1, 2, 3, 4, 5, 6, 7, 8],
    "one stage per rank, whole": [1, 2, 3, 4, 5, 6, 7, 8],
    "V": [1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5],
    "loop": [2, 2.5, 3, 3.5, 4, 4.5, 5],
    "bidirectional": [2, 3, 4, 5, 6],
}
GIGABYTES = [48, 56, 64, 72, 80, 96]


@dataclass(frozen=True)
class Setting:
    """Times of a whole rank's share (None for those of the running case)."""

    name: str
    title: str
    num_microbatches: int
    costs: Costs | None
    unit: str = ""

    def problems(self) -> Iterator[tuple[Problem, list[float]]]:
        """The problems of every placement, with the limits to look at."""
        for look, limits in LIMITS.items():
            if look == "loop" and self.num_microbatches > 8:  # the solver doesn't get far
                continue
            placement, split = look.removesuffix(", whole"), not look.endswith("whole")
            asked = {"num_ranks": P, "num_microbatches": self.num_microbatches, "placement": placement, "split": split}
            if self.costs is None:
                if placement in CUTS:
                    plan = CASE.plan(KNOWN[placement], self.num_microbatches, cut=CUTS[placement])
                    memory = plan.memory
                    yield Problem(**asked, costs=plan.costs, memory=memory), [gb * 1e9 for gb in GIGABYTES]
            else:
                each = 2 if placement in ("V", "loop") else 1
                costs, memory = self.costs.finer(each), Memory(1 / each)
                if isinstance(costs.forward, tuple) and placement != "one stage per rank":
                    costs = spread(self.costs, placement)
                yield Problem(**asked, costs=costs, memory=memory), limits


def spread(costs: Costs, placement: str) -> Costs:
    """Costs per rank as costs per stage: half of a rank's for each of two stages, or all for each of two copies."""
    order = {"V": [0, 1, 2, 3, 3, 2, 1, 0], "loop": [0, 1, 2, 3] * 2, "bidirectional": [0, 1, 2, 3]}[placement]
    share = len(order) / P
    names = ("forward", "backward_input", "backward_weight")
    return replace(costs, **{name: [getattr(costs, name)[rank] / share for rank in order] for name in names})


SLOW = (2, 2, 3, 2)
PROFILE = Costs(18.522, 18.086, 9.337, latency=0.601, unit="ms")
TIMES = [
    ("equal", "F = I = W", Costs(), ""),
    ("3-4-2", "F, I, W = 3, 4, 2", Costs(3, 4, 2), ""),
    ("latency", "F = I = W, and a message takes as long as each", Costs(latency=1), ""),
    ("slow-rank", "F = I = W = 2, on rank 2 3", Costs(SLOW, SLOW, SLOW), ""),
    ("profile", "the zero-bubble paper's times", PROFILE, "ms"),
    ("case", "the running case", None, "s"),
]
SETTINGS = {
    f"{name}-{M}": Setting(f"{name}-{M}", f"{title}; {P} ranks, {M} microbatches", M, costs, unit)
    for M in (8, 16)
    for name, title, costs, unit in TIMES
    if not (name == "slow-rank" and M == 16)
}
