"""The parts of `make gpu`, in the order of their worth: a deadline cuts off the last ones."""

from __future__ import annotations

import gpu_box
from gpu_assumptions import assumptions
from gpu_ranks import predicted, without_pace
from gpu_runs import batch, gradients, paced, runs, smoke
from gpu_setting import Part, Piece, Setting, piece
from gpu_sharing import links, nccl, slow_down
from gpu_stages import copies, offload, stages
from gpu_tests import tests
from gpu_versus import profile, versus


@piece(20)
def check(setting: Setting, part: Part) -> None:
    """What kind of machine this is. Its facts are the file's `box`."""
    part.ran = True
    part.more["problems"] = gpu_box.problems(gpu_box.facts(setting.device))
    for problem in part.more["problems"]:
        print(f"note: {problem}", flush=True)


# A part is a function `@piece(seconds, *packages)` in a file of its own kind, and its line here.
PARTS: dict[str, Piece] = {
    "check": check,
    "smoke": smoke,
    "assumptions": assumptions,
    "stages": stages,
    "batch": batch,
    "predicted": predicted,
    "slow_down": slow_down,
    "nccl": nccl,
    "links": links,
    "gradients": gradients,
    "tests": tests,
    "paced": paced,
    "copies": copies,
    "offload": offload,
    "profile": profile,
    "versus": versus,
    "cores": without_pace,
    "runs": runs,
}
ON_CORES = ("stages", "copies", "offload", "predicted", "cores")  # those that `make bench` records of a processor
