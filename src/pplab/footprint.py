"""How much ranks hold in memory: what an action adds and frees, and what this adds up to over
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .actions import Action, B, F, I, Kind, Overlap, W, parts
from .costs import PerStage, check_length, of_stage, per_stage
from .errors import accept, expect


@dataclass(frozen=True)
class Memory:
    """How much a rank holds, in one unit of your choice (`unit` names it in drawings). Give one
    number, or one value per stage.

    - `activation`: what a stage keeps for a microbatch from the start of F to the end of B, or of
      I.
    - `weight_input`: the part of it that stays after I until the end of W. By default all of it
      stays.
    - `recomputed`: what is held in addition while B or I runs, when activations are computed again.
    - `while_input_gradient`: what is held in addition while I runs, because I keeps what W needs
      before it frees what it doesn't need.
    - `parameters`: what a stage holds all the time, which is weights, gradients and the optimizer's
      state.
    """

    activation: PerStage = 1
    weight_input: PerStage | None = None
    recomputed: PerStage = 0
    parameters: PerStage = 0
    while_input_gradient: PerStage = 0
    unit: str = ""

    def __post_init__(self) -> None:
        for name in _HELD:
            if (value := getattr(self, name)) is not None or name != "weight_input":
                accept(self, **{name: per_stage(name, value)})
        expect(str, unit=self.unit)

    def check(self, num_stages: int) -> None:
        """Raise ValueError unless every list of values has one for each of `num_stages` stages."""
        for name in _HELD:
            check_length(name, getattr(self, name), num_stages)

    def changes(self, stage: int) -> dict[Kind, tuple[float, float]]:
        """By how much a stage holds more (or less) once an action of that kind starts, and once it
        ends.
        """
        whole, again = of_stage(self.activation, stage), of_stage(self.recomputed, stage)
        kept = whole if self.weight_input is None else of_stage(self.weight_input, stage)
        during = again + of_stage(self.while_input_gradient, stage)
        return {
            F: (whole, 0),
            B: (again, -again - whole),
            I: (during, -during - whole + kept),
            W: (0, -kept),
        }

    def levels(self, row: Sequence[Action | Overlap]) -> Iterator[tuple[float, float]]:
        """How much a rank holds while each item of its row runs, and after it: (during, after). It
        depends on the order alone, not on time.
        """
        halves = list(map(parts, row))
        stages = sorted({action.stage for pair in halves for action in pair})
        changes = {stage: self.changes(stage) for stage in stages}
        after = self.constant(stages)
        for pair in halves:
            ended = 0
            for stage, kind, _ in pair:
                at_start, at_end = changes[stage][kind]
                after += at_start
                ended += at_end
            during, after = after, after + ended
            yield during, after

    def constant(self, stages: Sequence[int]) -> float:
        """How much a rank with these stages holds all the time."""
        return sum(of_stage(self.parameters, stage) for stage in stages)


_HELD = ("activation", "weight_input", "recomputed", "parameters", "while_input_gradient")
