"""pplab's runtime against PyTorch's: the same stages, batch, ranks and threads, in turn in one run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from pplab.lab import TorchEngine
from pplab.runtime import Pool, Workload
from pplab.schedule import Schedule
from pplab.simulator import simulate


@dataclass(frozen=True)
class Versus:
    """Step times of both runtimes under one schedule."""

    schedule: Schedule
    workload: str
    device: str
    transport: str  # of pplab's; torch takes gloo, or NCCL on GPUs
    pplab_ms: float  # the median of all steps
    torch_ms: float
    ratios: tuple[float, ...]  # pplab's median over torch's, of each round
    limit_ms: float  # simulated, with the durations that pplab's own actions had

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios; below 1, pplab is faster."""
        return statistics.median(self.ratios)

    @property
    def share_of_limit(self) -> float:
        """How much of pplab's step time the schedule itself takes."""
        return self.limit_ms / self.pplab_ms

    def us_per_action(self, milliseconds: float) -> float:
        """A step's time over the actions of its longest row, in microseconds."""
        return milliseconds / max(map(len, self.schedule.rows)) * 1e3

    def to_dict(self) -> dict:
        """The figures as plain JSON values."""
        return {
            "schedule": self.schedule.name,
            "num_ranks": self.schedule.num_ranks,
            "num_microbatches": self.schedule.num_microbatches,
            "workload": self.workload,
            "device": self.device,
            "transport": self.transport,
            "pplab_ms": self.pplab_ms,
            "torch_ms": self.torch_ms,
            "ratio": self.ratio,
            "ratios": self.ratios,
            "pplab_us_per_action": self.us_per_action(self.pplab_ms),
            "torch_us_per_action": self.us_per_action(self.torch_ms),
            "limit_ms": self.limit_ms,
            "share_of_limit": self.share_of_limit,
        }

    def __str__(self) -> str:
        return (
            f"{self.schedule.name:22} {self.pplab_ms:9.1f} {self.torch_ms:9.1f} {self.ratio:6.2f} "
            f"{f'{min(self.ratios):.2f} to {max(self.ratios):.2f}':>13}  {self.us_per_action(self.pplab_ms):7.0f} "
            f"{self.us_per_action(self.torch_ms):7.0f} {self.limit_ms:9.1f} {self.share_of_limit:6.2f}"
        )


HEADINGS = (
    f"{'schedule':22} {'pplab ms':>9} {'torch ms':>9} {'ratio':>6} {'of rounds':>13}  {'us per action':>15} "
    f"{'limit ms':>9} {'share':>6}"
)


def versus(pool: Pool, schedule: Schedule, workload: Workload, *, rounds: int = 5, steps: int = 6) -> Versus:
    """Run `steps` steps by pplab and `steps` by torch, `rounds` times: the machine's mood is in both."""
    ours, theirs, ratios, limits = [], [], [], []
    for _ in range(rounds):
        run = pool.train(schedule, workload, steps=steps)
        other = pool.train(schedule, workload, TorchEngine(), steps=steps)
        ours += run.step_times_ms
        theirs += other.step_times_ms
        ratios.append(run.step_time_ms / other.step_time_ms)
        limits.append(simulate(schedule, run.costs).makespan)
    return Versus(
        schedule,
        workload.name,
        pool.devices[0],
        pool.transport,
        statistics.median(ours),
        statistics.median(theirs),
        tuple(ratios),
        statistics.median(limits),
    )
