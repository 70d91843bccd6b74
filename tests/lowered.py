"""An engine that tests send to ranks: torch's interpreter, on rows that pplab has lowered."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch.distributed.pipelining import schedules as torch_schedules

from pplab import lab
from pplab.lab.against_torch import torch_engine
from pplab.lowering import LoweredRow
from pplab.runtime import Job, RankContext, RankReport
from pplab.schedule import Schedule


@dataclass(frozen=True)
class LoweredByUs(lab.TorchEngine):
    """torch's interpreter on rows with our own sends and receives, as they stand."""

    rows: tuple[LoweredRow, ...] = ()

    def check(self, job: Job) -> Job:
        return replace(super().check(job), engine=partial(_train_lowered, rows=self.rows))


def _train_lowered(context: RankContext, job: Job, rows: tuple[LoweredRow, ...]) -> RankReport:
    torch_engine.load_rows = partial(_load_lowered, rows)  # of this rank's process
    return torch_engine.train_torch(context, job)


def _load_lowered(rows: tuple[LoweredRow, ...], runner: object, schedule: Schedule) -> None:
    """With `REDUCE_GRAD` of every stage at the rows' ends, where torch divides gradients by the microbatches.

    From torch 2.15 on each send and each `REDUCE_GRAD` has its wait, behind it.
    """
    ends = [[f"{stage}REDUCE_GRAD" for stage in schedule.stages_of(r)] for r in range(schedule.num_ranks)]
    if hasattr(torch_schedules, "WAIT_SEND_F"):
        sends = [[str(x).replace("SEND", "WAIT_SEND") for x in row if "SEND" in str(x)] for row in rows]
        waits = [[word for x in end for word in (x, x.replace("REDUCE", "WAIT_REDUCE"))] for end in ends]
        ends = [[*sent, *reduced] for sent, reduced in zip(sends, waits, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        path.write_text(lab.to_csv([[*row, *end] for row, end in zip(rows, ends, strict=True)]))
        runner._load_csv(str(path), format="compute_comms")
