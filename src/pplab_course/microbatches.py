"""Check how a reader's file treats its microbatches: weights that suit only equal ones, and a
`held` that is never emptied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from .verdict import Wrong

EQUAL = 1e-4  # gradients are the same up to this, relative to the largest


@dataclass(frozen=True)
class Microbatches:
    """What was seen on one rank when its file had ended."""

    sizes: tuple[int, ...]  # samples of each
    left: int  # in `held`, where the file has that
    as_if_equal: bool  # the gradients are those of the mean of the microbatches' means
    alone: int | None  # the gradients are those of this microbatch alone


def seen(
    torch: ModuleType, names: Mapping[str, object], num_microbatches: int, error: float
) -> Microbatches:
    """Look at the names that a file has left, whose gradients have this error. `torch` may be the
    stand-in.
    """
    model, inputs, targets = (names[name] for name in ("model", "inputs", "targets"))
    parts = [each.tensor_split(num_microbatches) for each in (inputs, targets)]
    losses = [
        torch.nn.functional.mse_loss(model(x), y) for x, y in zip(*parts, strict=True) if len(x)
    ]
    own = [parameter for parameter in names["stage"].parameters() if parameter.grad is not None]

    def are_of(loss: object) -> bool:
        return bool(own) and _are(torch.autograd.grad(loss, own, retain_graph=True), own)

    shares = [loss * len(x) / len(inputs) for loss, x in zip(losses, parts[0], strict=False)]
    alone = next((m for m, loss in enumerate(shares) if not error <= EQUAL and are_of(loss)), None)
    held = names.get("held")
    left = len(held) if isinstance(held, (dict, list)) else 0
    return Microbatches(tuple(map(len, parts[0])), left, are_of(sum(losses) / len(losses)), alone)


def _are(gradients: tuple, parameters: list) -> bool:
    pairs = zip(gradients, parameters, strict=True)
    return all((p.grad - g).abs().max() <= EQUAL * g.abs().max() for g, p in pairs)


def check(of_ranks: list[Microbatches], *, are_off: bool) -> None:
    """Raise `Wrong` if unequal microbatches count equally, or if a backward leaves its forward in
    `held`.

    `are_off` tells whether no rank's gradients are the batch's, which is the mean of the means of
    equal microbatches.
    """
    if are_off and all(each.as_if_equal for each in of_ranks):
        *sizes, last = of_ranks[0].sizes
        sizes = f"{', '.join(map(str, sizes))} and {last} samples"
        raise Wrong(
            f"gradients are those of microbatches that all count alike, but here they have {sizes}"
        )
    for rank, each in enumerate(of_ranks):
        if each.alone is not None:
            raise Wrong(
                f"rank {rank}'s gradients are those of microbatch {each.alone} alone, and not the "
                "sum of all: has something set them to zero within the step, such as `zero_grad` "
                "in `backward`?"
            )
        if each.left:
            raise Wrong(
                f"after the last step rank {rank} still has {each.left} microbatches in held: a "
                "backward takes one out"
            )
