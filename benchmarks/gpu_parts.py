"""The parts of `make gpu`, in the order of their worth, because a deadline cuts off the last ones."""

from __future__ import annotations

from collections.abc import Mapping

import gpu_box
from gpu_ranks import predicted, versus
from gpu_runs import batch, gradients, runs, smoke
from gpu_setting import Part, Piece, Setting, piece
from gpu_sharing import links, nccl
from gpu_stages import copies, stages
from gpu_tests import chapters, tests


@piece(20)
def check(setting: Setting, part: Part) -> None:
    """Describe this machine. The facts become the file's `box`."""
    part.ran = True
    part.more["problems"] = gpu_box.problems(gpu_box.facts(setting.device))
    for problem in part.more["problems"]:
        print(f"note: {problem}", flush=True)


# A part is a function `@piece(seconds, *packages)` in a file of its own kind, and its line here: what several GPUs show
# first.
PARTS: dict[str, Piece] = {
    "check": check,
    "smoke": smoke,
    "gradients": gradients,
    "links": links,
    "batch": batch,  # of what follows
    "versus": versus,
    "predicted": predicted,
    "tests": tests,
    "nccl": nccl,
    "chapters": chapters,
    "stages": stages,
    "copies": copies,
    "runs": runs,
}
_ONE_GPU_FIRST = ("check", "smoke", "nccl", "chapters", "stages", "copies", "tests", "batch", "predicted")


def in_order(parts: Mapping[str, Piece], num_gpus: int) -> dict[str, Piece]:
    """These parts, in the order for so many GPUs."""
    first = _ONE_GPU_FIRST if num_gpus == 1 else ()
    return dict(sorted(parts.items(), key=lambda each: first.index(each[0]) if each[0] in first else len(first)))
