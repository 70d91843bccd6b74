"""Which frameworks have a schedule, and whether torch keeps its stages compiled. All tables that
recommend a schedule take it from here.

Read in Megatron-LM d98e8a64, torch 2.13, torchtitan b5bcd76c, DeepSpeed edaa7221, nanotron
2411b022, PithTrain 23db1829, MindSpeed 9f9eebfa, Paddle fbdbb234 and the authors' repositories.
Tests ask torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from pplab import Schedule, build
from pplab.lab import Entry, Ledger
from pplab.lab.forms import Table, unknown_to_torch

ROWS, AUTHORS = "rows in a file", "its authors"
OWNERS = {
    "naive": "device_map, rows in a file",
    "GPipe": "torch, nanotron",
    "1F1B": "Megatron-LM, DeepSpeed, nanotron, torch",
    "Interleaved1F1B": "Megatron-LM (VPP), torch",
    "LoopedBFS": "torch",
    "InterleavedZeroBubble": "torch",
    "ZBVZeroBubble": "torch, its authors",
    "paired-1F1B": "Megatron-LM (with VPP), rows in a file",
    "DualPipe": "DeepSeek",
    "DualPipeV": "torch, DeepSeek, PithTrain, MindSpeed, Paddle",
    "Seq1F1B": AUTHORS,
    "TeraPipe": AUTHORS,
} | dict.fromkeys(["ZB-H1", "ZB-H2", "V-Half", "V-Min"], "its authors, rows in a file")
NOBODY_WAITS = {"GPipe": ROWS, "1F1B": ROWS, "Interleaved1F1B": "torch"}  # for a send
WAITING = {"1F1B": "Megatron-LM, torch", "Interleaved1F1B": "Megatron-LM (VPP)"}


def who_has(schedule: Schedule) -> tuple[str, str]:
    """Which frameworks have it, and what becomes of compiled stages: "kept", "lost" with split
    backwards, or "" outside torch.
    """
    has, (P, M) = OWNERS.get(schedule.name), (schedule.num_ranks, schedule.num_microbatches)
    if schedule.name == "1F1B" and schedule != build("1F1B", num_ranks=P, num_microbatches=M):
        has = ROWS  # no class has tickets
    if schedule.copies > 1 or has == AUTHORS or any(map(unknown_to_torch, schedule.rows)):
        # torch knows no two copies, no slices, and of pairs only whole ones
        return has or "nobody", ""
    return has or ROWS, "lost" if "I" in str(schedule.rows) else "kept"


@dataclass(repr=False)
class Owned(Ledger):
    """A ledger whose rows tell which frameworks have them, and what becomes of stages that torch
    compiled.
    """

    @property
    def table(self) -> Table:
        """The ledger's table with two more columns."""
        bare = super().table
        found = Table((*row, *_owner(entry)) for row, entry in zip(bare, self.entries, strict=True))
        found.columns = (*bare.columns, "who has it", "compiled stages")
        return found

    def _repr_html_(self) -> str:
        # narrow, so that a page has room for all columns
        told = super()._repr_html_().replace(", ", ", <br>")
        return told.replace("LM (", "LM <br>(")


def _owner(entry: Entry) -> tuple[str, str]:
    if not entry.timeline:  # shards, or a perfect pipeline
        return ("torch, DeepSpeed", "kept") if entry.held_gb else ("", "")
    has, compiled = who_has(entry.timeline.schedule)
    sends = WAITING if entry.what.endswith(" wait") else NOBODY_WAITS
    owners = sends.get(entry.timeline.schedule.name, has).split(", ")
    if len(set(entry.cut or ())) > 1:
        owners = [owner for owner in owners if owner != AUTHORS]  # whose V has an even cut alone
    again = entry.recompute or (0,)
    # Megatron-LM's --recompute-num-layers is one number
    if again is not True and len({n for n in again if not isinstance(n, str)}) > 1:
        owners = [owner for owner in owners if "Megatron" not in owner]
    return ", ".join(owners) or "nobody", compiled
