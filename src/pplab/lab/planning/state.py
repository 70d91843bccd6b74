"""What a parameter takes on its GPU all the time."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import accept, number, positive_int


@dataclass(frozen=True)
class State:
    """Bytes per parameter: of its weight, of its gradient, and of what the optimizer has of it.
    Their sum is 18.

    That is Megatron-LM's choice for bfloat16: gradients are summed over microbatches in float32,
    and Adam has a float32 copy of the weight and two moments. `State(2, 2, 12)`: gradients are
    summed in bfloat16, too, and a step copies them to float32 (`Plan.held_bytes`; rows with slices,
    offload or a spread head leave that out). `State(1, 2, 12)`: weights are stored in FP8 alone
    (`--fp8-param-gather`). `State(2, 2, 6)`: Adam's moments have 8 bits. `State(2, 0, 0)`: the
    weights are frozen, so nothing is computed for them, and nothing reduced. `logits`: bytes of
    each number that the head gives, from its forward to its backward. A loss in float32 that takes
    them whole has 8: the number, its copy and its gradient. nanotron has 14. ValueError for an
    optimizer without gradients.

    >>> State().bytes(), State().bytes(shards=4), State(2, 2, 6).bytes()
    (18.0, 9.0, 10.0)
    """

    weights: float = 2
    gradients: float = 4
    optimizer: float = 12
    logits: float = 0

    def __post_init__(self) -> None:
        accept(self, **{name: number(name, given) for name, given in vars(self).items()})
        if not self.weights or (self.optimizer and not self.gradients):
            raise ValueError(
                "a parameter has a weight, and an optimizer needs its gradient: give bytes above "
                "0, or freeze it with State(2, 0, 0), got "
                f"{self!r}"
            )

    def bytes(self, shards: int = 1) -> float:
        """Of a parameter, where the optimizer's share is divided among so many ranks (ZeRO-1)."""
        return self.weights + self.gradients + self.optimizer / positive_int("shards", shards)

    def reduced(self, shards: int = 1) -> float:
        """Of a parameter, what goes around a ring twice: its gradient; among shards that once, and
        its new weight.
        """
        return (
            (self.gradients + self.weights) / 2 if shards > 1 and self.gradients else self.gradients
        )
