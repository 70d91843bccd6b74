"""The game's levels: what each asks, and what it tells a player who has solved it.

A text shows the wall and keeps the answer: what is clever about an order, and its name, stand in
`end` alone. Figures in the texts are simulated here, and the page simulates the same references
(play.js).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

import pplab.lab  # noqa: F401 (it brings eager 1F1B)
from pplab import Costs, Timeline, build, simulate
from pplab.lab.forms import in_script
from pplab.schedule import plural

TWICE = Costs(backward=2)
DURATIONS = ("forward", "backward", "backward_input", "backward_weight", "latency")


@dataclass(frozen=True)
class Level:
    """A level. `end` must be true of every order that reaches the goal: there may be several."""

    id: str
    title: str
    text: str
    end: str
    reference: str
    num_ranks: int
    num_microbatches: int
    costs: Costs = TWICE
    stages_per_rank: int = 1
    cap: tuple[int, ...] = ()  # forwards that each rank may hold; none: as many as there are
    is_before: bool = False  # asked: to finish before the reference, which nobody can
    is_about_span: bool = False  # asked, too: no wait between a rank's first action and its last
    instead: str = ""  # a schedule with one stage per rank, to say how long it would take

    def simulated(self, name: str, stages_per_rank: int = 1) -> Timeline:
        """The level's work in the order of the schedule `name`."""
        options = {"stages_per_rank": stages_per_rank} if name.startswith("Interleaved") else {}
        schedule = build(
            name, num_ranks=self.num_ranks, num_microbatches=self.num_microbatches, **options
        )
        return simulate(schedule, self.costs.finer(stages_per_rank))

    def task(self) -> str:
        """The question, with its figures."""
        costs = self.costs.finer(self.stages_per_rank)
        backward = (
            f"a backward {costs.backward:g}"
            if costs.backward
            else f"I and W {costs.backward_input:g} each"
        )
        message = f", a message {costs.latency:g}" if costs.latency else ""
        said = [self.text, f"A forward takes {costs.forward:g}, {backward}{message}."]
        if self.cap:
            said.append(self._memory())
        if self.instead:
            said.append(f"{self.instead} would take {self.simulated(self.instead).makespan:g}.")
        goal = f"{self.simulated(self.reference, self.stages_per_rank).makespan:g}"
        span = (
            ", and let no rank wait between its first action and its last"
            if self.is_about_span
            else ""
        )
        return " ".join([*said, f"Finish {'before' if self.is_before else 'by'} {goal}{span}."])

    def on_paper(self) -> str:
        """The task, and the size that a chart would show."""
        ranks = plural(self.num_ranks, "rank")
        return f"{ranks}, {plural(self.num_microbatches, 'microbatch')}. {self.task()}"

    def _memory(self) -> str:
        forwards = "forwards" if self.stages_per_rank == 1 else "forwards of a stage"
        if len(set(self.cap)) == 1:
            return f"Every rank has memory for {self.cap[0]} {forwards}."
        each = [f"rank {rank} for {most}" for rank, most in enumerate(self.cap)]
        where = f"on {', on '.join(each[:-1])} and on {each[-1]}"
        return f"There is memory for only so many {forwards}: {where}."


LEVELS = (
    Level(
        id="first-steps",
        title="One batch, two ranks",
        text="Two ranks hold one half of the model each. A batch in one piece goes forward through "
        "both, and its gradient comes back. Start with 0F0, and watch who is busy. The other three "
        "actions follow by themselves, because no rank has an alternative.",
        end="Only one rank works at any time, and no order changes that: a batch in one piece is "
        "in one place.",
        reference="naive",
        num_ranks=2,
        num_microbatches=1,
    ),
    Level(
        id="eighteen",
        title="Faster than 18",
        text="Three ranks hold a third of the model each, and the batch comes in four "
        "microbatches. Each of them goes forward through ranks 0, 1 and 2, and its gradient comes "
        "back through ranks 2, 1 and 0.",
        end="Nobody finishes before 18, in whatever order. Why not? Ask when rank 2 can begin at "
        "the earliest, and what is left for the others when it has finished.",
        reference="GPipe",
        num_ranks=3,
        num_microbatches=4,
        is_before=True,
    ),
    Level(
        id="memory-line",
        title="Memory for three",
        text="The batch comes in five microbatches. What a forward computes stays in its rank's "
        "memory until the backward of the same microbatch has run there.",
        end="Backwards that run early make room for forwards, and they cost no time: with memory "
        "for all five microbatches nobody finishes earlier.",
        reference="1F1B",
        num_ranks=3,
        num_microbatches=5,
        cap=(3, 3, 3),
    ),
    Level(
        id="latency",
        title="Messages take time",
        text="What a rank computes is now on its way for one unit before the next rank has it.",
        end="While a message is on its way, a rank lives on forwards that it has run in advance, "
        "and each of them takes memory.",
        reference="eager-1F1B",
        num_ranks=3,
        num_microbatches=5,
        costs=Costs(backward=2, latency=1),
        cap=(5, 3, 1),
        instead="1F1B",
    ),
    Level(
        id="two-stages",
        title="Two stages per rank",
        text="Rank 0 holds stages 0 and 2 and rank 1 holds stages 1 and 3, each half as deep as "
        "before. A microbatch visits both ranks twice on its way forward, and twice on its way "
        "back.",
        end="Thinner stages halve the waiting: the first microbatch reaches the last rank in half "
        "the time, and the last gradient comes back in half the time.",
        reference="Interleaved1F1B",
        num_ranks=2,
        num_microbatches=4,
        stages_per_rank=2,
        instead="1F1B",
    ),
    Level(
        id="split-backward",
        title="A backward in two halves",
        text="A backward now comes in two halves. I computes the gradient of the stage's input, "
        "and the rank before waits for it. W computes the gradient of the weights, and no rank "
        "waits for it. A forward stays in memory until its W has run.",
        end="A W can run whenever its rank would wait otherwise, so it fills what used to be "
        "bubble.",
        reference="ZB-H1",
        num_ranks=3,
        num_microbatches=4,
        costs=Costs(),
        cap=(3, 3, 3),
        instead="1F1B",
    ),
    Level(
        id="zero-bubble",
        title="No wait in between",
        text="A backward comes in its two halves, I and W, and there is more memory than 1F1B "
        "would use.",
        end="What is left of the bubble lies before a rank's first action and after its last, "
        "where the next step could begin. The price is memory.",
        reference="ZB-H2",
        num_ranks=2,
        num_microbatches=5,
        costs=Costs(),
        cap=(3, 3),
        is_about_span=True,
        instead="1F1B",
    ),
    Level(
        id="zero-bubble-v",
        title="No wait in between, on a V",
        text="Rank 0 holds stages 0 and 3 and rank 1 holds stages 1 and 2, each half as deep as "
        "before: a microbatch turns on rank 1 and comes back. Backwards come in their two halves, "
        "I and W.",
        end="No rank waited, and none needed more memory than rank 0 of 1F1B: four forwards of "
        "half a rank's layers are two of all its layers.",
        reference="ZB-V",
        num_ranks=2,
        num_microbatches=3,
        costs=Costs(),
        stages_per_rank=2,
        cap=(4, 4),
        is_about_span=True,
        instead="1F1B",
    ),
)


def script() -> str:
    """The script that play.js needs before it: the levels, as a global, with the page's names."""
    return f"var pplabLevels = {in_script([_told(level) for level in LEVELS])};"


def _told(level: Level) -> dict:
    durations = {name: getattr(level.costs, name) for name in DURATIONS}
    said = asdict(level) | {
        "task": level.task(),
        "cap": level.cap or None,
        "costs": _camelled(durations),
    }
    return _camelled(said)


def _camelled(said: dict) -> dict:
    return {
        re.sub("_(.)", lambda found: found[1].upper(), name): value for name, value in said.items()
    }
