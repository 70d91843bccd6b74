"""Where one gets a schedule, and whether torch leaves its stages compiled: one answer for all tables that recommend.

Read in Megatron-LM d98e8a64, torch 2.13, torchtitan b5bcd76c and the authors' repositories; tests ask torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from pplab import Schedule
from pplab.actions import I, W, parts
from pplab.lab import Ledger
from pplab.lab.against_torch import CLASSES
from pplab.lab.forms import Table, unknown_to_torch

SLICED = "Seq1F1B", "TeraPipe"
ELSEWHERE = {
    "naive": "Transformers' device_map",
    "1F1B": "Megatron-LM, DeepSpeed",
    "Interleaved1F1B": "Megatron-LM (VPP)",
    "paired-1F1B": "Megatron-LM (with VPP)",
    "DualPipe": "DeepSeek",
    "DualPipeV": "DeepSeek",
} | dict.fromkeys(["ZB-H1", "ZB-H2", "ZBVZeroBubble", "V-Half", "V-Min", *SLICED], "its authors")


def who_has(schedule: Schedule) -> tuple[str, str]:
    """Where one gets it, and what becomes of compiled stages: "kept", "lost" with split backwards, "" outside torch."""
    name, has = schedule.name, [ELSEWHERE.get(schedule.name, "")]
    if schedule.copies > 1 or name in SLICED or any(map(unknown_to_torch, schedule.rows)):
        return has[0] or "nobody", ""  # torch knows no two copies, no slices, and of pairs only whole ones
    has.append("torch" if name in CLASSES else "rows in a file")
    kinds = {action.kind for row in schedule.rows for item in row for action in parts(item)}
    return ", ".join(filter(None, has)), "lost" if kinds & {I, W} else "kept"


@dataclass(repr=False)
class Owned(Ledger):
    """A ledger whose rows say who has them, and what becomes of `torch.compile`."""

    @property
    def table(self) -> Table:
        """The ledger's table and two columns."""
        bare = super().table
        found = Table(
            (*row, *(who_has(entry.timeline.schedule) if entry.timeline else ("", "")))
            for row, entry in zip(bare, self.entries, strict=True)
        )
        found.columns = (*bare.columns, "who has it", "torch.compile")
        return found
